"""The benchmark of GPUs, tried on a CPU; and tests that need a package which is not installed."""

import json
import os
import subprocess
import sys

import pytest
from conftest import SkipsWithout
from notebooks import ROOT


def test_the_benchmark_of_a_gpu_runs_and_goes_on_where_it_was_broken_off(tmp_path):
    out = tmp_path / "trial.json"
    command = [sys.executable, "bench/gpu.py", "--device", "cpu", "--smallest", "--out", str(out)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for stages in (["small"], ["small", "curves"]):
        subprocess.run([*command, "--stages", *stages], check=True, cwd=ROOT, env=env)
    found = json.loads(out.read_text())
    assert found["ended"] == stages and not found["broken_off"]
    rows = {row["way"]: row for row in found["stages"]["small"]}
    assert not [row["error"] for row in rows.values() if "error" in row]
    assert {"autocast", "mixedfp flat", "mixedfp smallest", "learner flat"} <= rows.keys()
    assert all(row["ms"] > 0 for row in rows.values())
    losses = {row["way"]: row["losses"] for row in found["stages"]["curves"] if row["seed"] == 0}
    assert abs(losses["float32"][-1] - losses["mixedfp flat"][-1]) < 0.01


def test_with_an_empty_environment_the_python_at_hand_runs_the_tests_of_a_gpu():
    for env, python in (("ENV=", "python3"), ("ENV=elsewhere", "elsewhere/bin/python")):
        made = subprocess.check_output(["make", "-n", "test-gpu", env], cwd=ROOT, text=True)
        # inside another make, lines that name the directory are around it
        assert f"\n{python} bench/gpu.py --stages tests" in "\n" + made


def test_what_needs_a_missing_package_is_skipped_by_name():
    with pytest.raises(pytest.skip.Exception, match="skorch is not installed"):
        SkipsWithout().find_spec("skorch")
    assert SkipsWithout().find_spec("torch") is None
