"""Tests of the command `mixedfp_compare`, run as a user runs it: in a process of its own."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import inside
import pytest
import torch
from PIL import Image
from torch import nn

from mixedfp.command import DEFAULT_PRECISIONS, PRECISIONS, main
from mixedfp.compare import Result, compare, format_table, results_table, save_results
from mixedfp.testing import assert_same

QUICK = ["--model", "darknet-small", "--epochs", "1", "--n-train", "128", "--n-valid", "32"]
QUICK += ["--device", "cpu"]


def run_command(folder: Path, *args: str) -> subprocess.CompletedProcess:
    """Run `mixedfp_compare` with `args` in `folder`."""
    code = "from mixedfp.command import main; main()"
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_command_trains_prints_and_writes(tmp_path):
    done = run_command(tmp_path, *QUICK)
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stdout  # no progress that is overwritten where there is no terminal
    assert done.stdout.startswith("7 runs of 1 epochs: ")
    assert "Warning" not in done.stderr
    table = done.stdout.split("\n\n")[2].splitlines()[2:]
    assert [line.split()[0] for line in table] == list(DEFAULT_PRECISIONS)
    files = {file.suffix: file for file in (tmp_path / "results").iterdir()}
    assert sorted(files) == [".csv", ".json", ".png"]
    for file in files.values():
        assert f"results/{file.name}" in done.stdout.splitlines()
    assert files[".png"].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with files[".csv"].open() as f:
        rows = list(csv.DictReader(f))
    assert [row["precision"] for row in rows] == list(DEFAULT_PRECISIONS)
    assert float(rows[0]["speed"]) == 1
    whole = json.loads(files[".json"].read_text())
    results = [Result(**r) for r in whole["results"]]
    assert all(len(r.losses) == 128 // 64 for r in results)
    assert whole["settings"]["n_train"] == 128 and whole["machine"]["torch"] == torch.__version__
    assert results_table(results).accuracy.tolist() == [float(row["accuracy"]) for row in rows]


def test_a_table_of_one_seed_has_no_spread():
    """It would be a column of "-"; of several seeds it is there."""
    runs = [Result("bf16", s, 0.5, 1.0, [2.0], 2, 4, 4, None, 0, None, [], []) for s in (1, 2)]
    one, two = (format_table(results_table(runs[:n])) for n in (1, 2))
    assert set(two) - set(one) == {"±"}


def test_a_run_that_diverged_is_saved(tmp_path):
    """JSON has no nan: it is null there."""
    nan = float("nan")
    result = Result("bf16", 1, 0.5, nan, [2.0], 2, 4, 4, None, 0, None, [0.5, nan], [])
    whole = json.loads(save_results([result], tmp_path)["json"].read_text())
    assert whole["results"][0]["losses"] == [0.5, None]
    assert whole["results"][0]["valid_loss"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--precisions", "fp32,fp8"], "precision='fp8': expected one of fp32, bf16"),
        (["--precisions", ","], "precisions=[]: expected one or more"),
        (["--precisions", "fp32,fp32"], "all different"),
        (["--data", "mnist"], "data='mnist': expected one of photos, cifar10, or a folder"),
        (["--model", "vgg"], "or a classifier of torchvision's or timm's"),
        (["--model", "vit_b_16"], "cannot be trained on pictures of 32×32: Wrong image height"),
        (["--size", "64"], "size=64: photos has pictures of 32×32"),
        (["--opt", "lamb"], "invalid choice: 'lamb'"),
        (["--epochs", "0"], "epochs=0: expected an integer > 0"),
        (["--epochs", "two"], "invalid int value: 'two'"),
        (["--bs", "-1"], "bs=-1: expected an integer > 0"),
        (["--lr", "nan"], "lr=nan: expected a finite number > 0"),
        (["--lr", "-1"], "lr=-1.0: expected a finite number > 0"),
        (["--n-train", "-5"], "n_train=-5: expected an integer > 0"),
        (["--data", str(Path(__file__).parent)], "expected a folder with train/<class>"),
        (["--n-train", "100000"], "n_train=100000: expected 2 to 4500"),
        (["--seeds", "0"], "seeds=[]: expected one or more"),
        (["--device", "tpu"], "device='tpu' cannot be used; this machine has cpu"),
    ],
)
def test_wrong_arguments_end_in_one_line_before_training(args, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as e:
        main([*QUICK, *args, "--out", str(tmp_path / "out")])
    assert e.value.code == 2
    shown = capsys.readouterr()
    assert message in shown.err.splitlines()[-1]
    assert shown.out == "" and not (tmp_path / "out").exists()


def test_a_folder_of_classes_and_a_model_of_torchvision(tmp_path, capsys):
    for i in range(20):
        place = tmp_path / "pictures" / f"deep/{i % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (60, 50), (i, 100 * (i % 2), 0)).save(place / f"{i}.png")
    main(["--data", str(tmp_path / "pictures"), "--size", "40", "--model", "squeezenet1_1"]
         + ["--precisions", "fp32,bf16", "--epochs", "1", "--bs", "8", "--device", "cpu"]
         + ["--out", str(tmp_path)])  # fmt: skip
    assert "squeezenet1_1 on pictures, sgd" in capsys.readouterr().out
    whole = json.loads((tmp_path / "pictures-squeezenet1_1.json").read_text())
    assert [len(r["losses"]) for r in whole["results"]] == [2, 2]  # 16 of 20 in batches of 8


def test_a_model_of_timm(monkeypatch):
    def create_model(name, num_classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes))

    timm = SimpleNamespace(is_model="a_net".__eq__, create_model=create_model)
    monkeypatch.setitem(sys.modules, "timm", timm)
    (result,) = compare("bf16", model="a_net", epochs=1, n_train=16, n_valid=16, device="cpu")
    assert len(result.losses) == 1
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match="timm's, which is not installed"):
        compare("bf16", model="a_net")


def test_command_without_cifar10_says_so(monkeypatch, capsys, tmp_path):
    def no_network(url):
        raise OSError("no network")

    monkeypatch.delenv("CIFAR10_PATH", raising=False)
    inside.fastais_data(monkeypatch, tmp_path, no_network)
    with pytest.raises(SystemExit):
        main([*QUICK, "--data", "cifar10"])
    assert "none of four places" in capsys.readouterr().err


def test_help_names_every_precision(capsys):
    with pytest.raises(SystemExit) as e:
        main(["--help"])
    assert e.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown and what in shown for name, what in PRECISIONS.items())


def test_seeds_follow_the_first(tmp_path):
    args = [*QUICK, "--precisions", "fp32", "--seed", "5", "--seeds", "2", "--out", str(tmp_path)]
    main(args)
    results = json.loads((tmp_path / "photos-darknet-small.json").read_text())["results"]
    assert [r["seed"] for r in results] == [5, 6]


def test_flat_is_not_different():
    quick = {"model": "darknet-small", "epochs": 2, "bs": 16, "n_train": 64, "n_valid": 16}
    for opt in ("sgd", "adam", "rmsprop"):
        runs = compare(["bf16", "bf16-flat", "fp16", "fp16-flat"], opt=opt, device="cpu", **quick)
        for one, flat in zip(runs[::2], runs[1::2], strict=True):
            assert_same(one.losses, flat.losses, name=f"{opt}: losses of {flat.precision}")
            assert (one.valid_loss, one.accuracy) == (flat.valid_loss, flat.accuracy)


def test_compare_leaves_global_torch_settings_alone():
    default, threads = torch.get_default_dtype(), torch.get_num_threads()
    compare(
        ["autocast-bf16", "fp16"],
        model="darknet-small",
        epochs=1,
        n_train=16,
        n_valid=16,
        device="cpu",
    )
    assert torch.get_default_dtype() == default and torch.get_num_threads() == threads
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
