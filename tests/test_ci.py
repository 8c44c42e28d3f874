"""What runs on a push: the files that say so agree with each other."""

import configparser
import re
import sys

import patiently
import pytest
import yaml
from notebooks import ROOT

WORKFLOWS = {
    path.name: yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}


def made(job):
    """What a job makes."""
    lines = "\n".join(step.get("run", "") for step in job["steps"])
    return re.findall(r"^make ([\w-]+)", lines, re.MULTILINE)


def pythons(job):
    given = job.get("strategy", {}).get("matrix", {}).get("python", [])
    uses = [s.get("uses", "").startswith("actions/setup-python") for s in job["steps"]]
    assert uses.count(True) == 1 and uses[1]  # after the checkout, before make
    return given or [job["steps"][1]["with"]["python-version"]]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_what_a_workflow_makes_is_in_the_makefile(name):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for job in WORKFLOWS[name].values():
        assert made(job) and set(made(job)) <= set(targets)


def test_a_push_runs_what_ci_run_runs():
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (targets,) = re.findall(r"^for target in (.*); do$", text, re.MULTILINE)
    on_push = [target for job in WORKFLOWS["test.yml"].values() for target in made(job)]
    assert sorted(on_push) == sorted(targets.split())


def test_the_oldest_python_that_is_promised_is_tried():
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    jobs = {name: job for of_file in WORKFLOWS.values() for name, job in of_file.items()}
    for name in ("test", "test-latest", "test-oldest"):
        versions = pythons(jobs[name])
        assert settings["DEFAULT"]["min_python"] in versions, name
        assert all(isinstance(version, str) for version in versions), name  # 3.10 is no number


def test_a_silent_command_is_shown_to_run_and_its_code_is_kept(monkeypatch, capfd):
    monkeypatch.setattr(patiently, "SECONDS", 0.5)
    code = "import time; print('begin', end=''); time.sleep(3); print('end'); raise SystemExit(7)"
    assert patiently.main("waiting", sys.executable, "-c", code) == 7
    lines = capfd.readouterr().out.splitlines()
    assert {"begin", "end"} <= set(lines) and lines[-1] == "[waiting: exit code 7]"
    assert sum(line.startswith("[waiting: ") for line in lines) > 2
