"""Tests of the command `mixedfp_compare`, run as a user runs it."""

import csv
import json
import os
import subprocess
import sys

import pytest
import torch

from mixedfp import examples
from mixedfp.compare import PRECISIONS, main

QUICK = ["--model", "darknet-small", "--epochs", "1", "--n-train", "128", "--n-valid", "32"]
QUICK += ["--device", "cpu"]


def run(folder, code, *args):
    """Run `code` with `args` in `folder`, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def trained(folder, *args):
    """Run the command here; return what is in the JSON file."""
    main([*QUICK, *args, "--out", str(folder)])
    (file,) = folder.glob("*.json")
    return json.loads(file.read_text())


def test_command_trains_prints_and_writes(tmp_path):
    command = "from mixedfp.compare import main; main()"
    done = run(tmp_path, command, *QUICK, "--precisions", *PRECISIONS)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("importing PyTorch and fastai")
    for name, line in zip(PRECISIONS, said[1:], strict=False):
        assert line.startswith(f"{name}, seed 42: validation loss ")
    table = done.stdout.split("\n\n")[2].splitlines()[2:9]
    assert [line.split()[0] for line in table] == list(PRECISIONS)
    files = {file.suffix: file for file in (tmp_path / "results").iterdir()}
    assert sorted(files) == [".csv", ".json", ".png"]
    assert {f"results/{file.name}" for file in files.values()} <= set(said)
    assert files[".png"].read_bytes()[:4] == b"\x89PNG"
    rows = list(csv.DictReader(files[".csv"].read_text().splitlines()))
    assert [row["precision"] for row in rows] == list(PRECISIONS)
    assert "±" not in rows[0]  # one seed has no spread
    assert all(float(row["ms/step"]) > 0 for row in rows) and float(rows[0]["speed"]) == 1
    whole = json.loads(files[".json"].read_text())
    assert all(len(r["losses"]) == 128 // 16 for r in whole["results"])
    assert whole["settings"]["n_train"] == 128 and torch.__version__ in whole["machine"]


WRONG = [  # found by the standard library alone
    (["--precisions", "fp32", "fp8"], "invalid choice: 'fp8' (choose from"),
    (["--precisions"], "expected at least one argument"),
    (["--data", "mnist"], "invalid choice: 'mnist'"),
    (["--opt", "lamb"], "invalid choice: 'lamb'"),
    (["--epochs", "0"], "epochs=0: expected a finite number > 0"),
    (["--epochs", "two"], "invalid int value: 'two'"),
    (["--bs", "-1"], "bs=-1: expected a finite number > 0"),
    (["--lr", "nan"], "lr=nan: expected a finite number > 0"),
    (["--seeds", "0"], "seeds=0: expected a finite number > 0"),
    (["--out", f"{__file__}/results"], f"{__file__}/results"),
]


def test_simple_mistakes_are_found_before_torch_is_imported(tmp_path):
    code = f"""if True:
        import sys
        from mixedfp.compare import main
        for args, _ in {WRONG!r}:
            try:
                main(args)
            except SystemExit as e:
                assert e.code == 2 and "torch" not in sys.modules"""
    done = run(tmp_path, code)
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert done.returncode == 0 and len(errors) == len(WRONG), done.stderr
    for (_, message), line in zip(WRONG, errors, strict=True):
        assert message in line
    assert not list(tmp_path.iterdir())


LATER = [  # before anything is trained
    (["--model", "vgg"], "Unknown model vgg"),
    (["--model", "vit_b_16"], "Wrong image height"),
    (["--n-train", "100000"], "n_train=100000: expected 2 to 4500"),
    (["--n-train", "-5"], "n_train=-5: expected 2 to 4500"),
    (["--device", "tpu"], "Expected one of cpu, cuda"),
]


@pytest.mark.parametrize("args, message", LATER)
def test_other_mistakes_end_in_one_line_before_training(args, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as e:
        main([*QUICK, *args, "--out", str(tmp_path / "out")])
    shown = capsys.readouterr()
    assert e.value.code == 2 and message in shown.err.splitlines()[-1]
    assert "validation loss" not in shown.out and not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("named", [[], ["--precisions", "autocast-bf16", "bf16"]])
def test_slow_autocast_is_left_out_unless_it_is_named(named, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("mixedfp.engine.in_float32.has_arithmetic", lambda device, dtype: False)
    trained_names = [r["precision"] for r in trained(tmp_path, *named)["results"]]
    said = "autocast-bf16 is left out" in capsys.readouterr().out
    assert said == (not named) and ("autocast-bf16" in trained_names) == bool(named)
    assert named or trained_names == [name for name in PRECISIONS if name != "autocast-bf16"]


def test_the_names_of_the_command_are_those_of_the_examples(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert f"--opt {{{','.join(examples.OPTIMIZERS)}}}" in shown
    assert ", ".join(examples.MODELS) in shown and examples.PRECISIONS == list(PRECISIONS)


def test_seeds_follow_the_first_and_a_run_that_diverged_is_saved(tmp_path, capsys):
    """Of a model of torchvision; JSON has no nan: it is null there."""
    args = ["--model", "squeezenet1_1", "--precisions", "bf16", "--bs", "64", "--lr", "1e30"]
    results = trained(tmp_path, *args, "--seed", "5", "--seeds", "2")["results"]
    assert "squeezenet1_1 on photos, sgd" in capsys.readouterr().out
    assert [r["seed"] for r in results] == [5, 6] and results[0]["valid_loss"] is None
    assert len(results[0]["losses"]) == 128 // 64
