"""What runs on a push: the files that say so agree with each other."""

import configparser
import re
import sys
from pathlib import Path

import patiently
import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def made(job):
    "What a job makes."
    lines = [step["run"] for step in job["steps"] if "run" in step]
    return [target for line in lines for target in re.findall(r"^make ([\w-]+)", line)]


def pythons(job):
    given = job.get("strategy", {}).get("matrix", {}).get("python", [])
    uses = [
        step for step in job["steps"] if step.get("uses", "").startswith("actions/setup-python")
    ]
    assert len(uses) == 1 and job["steps"].index(uses[0]) == 1  # after the checkout, before make
    return given or [uses[0]["with"]["python-version"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_makes_is_in_the_makefile(path):
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, job in jobs(path).items():
        assert made(job), name
        for target in made(job):
            assert re.search(rf"^{target}:", text, re.MULTILINE), (name, target)


def test_a_push_runs_what_ci_run_runs():
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    targets = re.search(r"^for target in (.*); do$", text, re.MULTILINE)
    assert targets
    on_push = [target for job in jobs(ROOT / ".github/workflows/test.yml").values()
               for target in made(job)]  # fmt: skip
    assert sorted(on_push) == sorted(targets[1].split())


def test_the_oldest_python_that_is_promised_is_tried():
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    oldest = settings["DEFAULT"]["min_python"]
    all_jobs = {name: job for path in WORKFLOWS for name, job in jobs(path).items()}
    for name in ("test", "test-latest", "test-oldest"):
        versions = pythons(all_jobs[name])
        assert oldest in versions, name
        assert all(isinstance(version, str) for version in versions), name  # 3.10 is no number


def test_a_silent_command_is_shown_to_run_and_its_code_is_kept(monkeypatch, capfd):
    monkeypatch.setattr(patiently, "SECONDS", 0.5)
    code = "import time; print('begin', end=''); time.sleep(3); print('end'); raise SystemExit(7)"
    assert patiently.main("waiting", sys.executable, "-c", code) == 7
    lines = capfd.readouterr().out.splitlines()
    assert {"begin", "end"} <= set(lines) and lines[-1] == "[waiting: exit code 7]"
    assert sum(line.startswith("[waiting: ") for line in lines) > 2
