"""Tests of the command `mixedfp_compare`, run as a user runs it."""

import csv
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import nn

from mixedfp.command import MODEL_NAMES, OPTIMIZER_NAMES, PRECISIONS, main
from mixedfp.testing import assert_same

QUICK = ["--model", "darknet-small", "--epochs", "1", "--n-train", "128", "--n-valid", "32"]
QUICK += ["--device", "cpu", "--repeats", "2"]


def run_command(folder, *args, code="from mixedfp.command import main; main()"):
    """Run `mixedfp_compare` with `args` in `folder`, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def trained(folder, *args):
    """Run the command here; return what is in the JSON file."""
    main([*QUICK, *args, "--out", str(folder)])
    (file,) = folder.glob("*.json")
    return json.loads(file.read_text())


def images(folder, n=20):
    """Write a folder with two classes of images of one colour; return it."""
    for i in range(n):
        place = folder / f"deep/{i % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (60, 50), (i, 100 * (i % 2), 0)).save(place / f"{i}.png")
    return folder


def test_command_trains_prints_and_writes(tmp_path):
    done = run_command(tmp_path, *QUICK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("7 runs of 1 epochs take about ")
    assert "Warning" not in done.stderr
    table = done.stdout.split("\n\n")[2].splitlines()[2:9]
    assert [line.split()[0] for line in table] == list(PRECISIONS)
    files = {file.suffix: file for file in (tmp_path / "results").iterdir()}
    assert sorted(files) == [".csv", ".json", ".png"]
    assert all(f"results/{file.name}" in done.stdout.splitlines() for file in files.values())
    assert files[".png"].read_bytes()[:4] == b"\x89PNG"
    rows = list(csv.DictReader(files[".csv"].read_text().splitlines()))
    assert [row["precision"] for row in rows] == list(PRECISIONS)
    assert "±" not in rows[0]  # one seed has no spread
    for row in rows:
        assert float(row["from"]) <= float(row["speed"]) <= float(row["to"])
    assert float(rows[0]["from"]) == float(rows[0]["to"]) == 1  # fp32's
    whole = json.loads(files[".json"].read_text())
    assert all(len(r["losses"]) == 128 // 64 for r in whole["results"])
    assert all(len(r["step_seconds"]) == 2 for r in whole["results"])
    assert whole["settings"]["n_train"] == 128 and torch.__version__ in whole["machine"]


WRONG = [  # found by the standard library alone
    (["--precisions", "fp32,fp8"], "precision='fp8': expected one of fp32, autocast-bf16"),
    (["--precisions", ","], "precisions=[]: expected one or more"),
    (["--precisions", "fp32,fp32"], "one or more, all different"),
    (["--data", "mnist"], "data='mnist': expected photos, cifar10, or a folder"),
    (["--size", "64"], "size=64: photos has images of 32×32"),
    (["--opt", "lamb"], "invalid choice: 'lamb'"),
    (["--epochs", "0"], "epochs=0: expected an integer > 0"),
    (["--epochs", "two"], "invalid int value: 'two'"),
    (["--bs", "-1"], "bs=-1: expected an integer > 0"),
    (["--lr", "nan"], "lr=nan: expected a finite number > 0"),
    (["--n-train", "-5"], "n_train=-5: expected an integer > 0"),
    (["--seeds", "0"], "seeds=0: expected an integer > 0"),
    (["--out", f"{__file__}/results"], "choose another folder"),
]


def test_simple_mistakes_are_found_before_torch_is_imported(tmp_path):
    code = f"""if True:
        import sys
        from mixedfp.command import main
        for args, _ in {WRONG!r}:
            try:
                main(args)
            except SystemExit as e:
                assert e.code == 2 and "torch" not in sys.modules
    """
    done = run_command(tmp_path, code=code)
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert done.returncode == 0 and len(errors) == len(WRONG), done.stderr
    for (_, message), line in zip(WRONG, errors, strict=True):
        assert message in line
    assert not list(tmp_path.iterdir())


LATER = [  # before anything is trained
    (["--model", "vgg"], "or a classifier from torchvision or timm"),
    (["--model", "vit_b_16"], "cannot be trained on these images: Wrong image height"),
    (["--data", str(Path(__file__).parent)], "expected a folder with train/<class>"),
    (["--n-train", "100000"], "n_train=100000: expected 2 to 4500"),
    (["--device", "tpu"], "device='tpu' cannot be used; the default is "),
]


@pytest.mark.parametrize(("args", "message"), LATER)
def test_other_mistakes_end_in_one_line_before_training(args, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as e:
        main([*QUICK, *args, "--out", str(tmp_path / "out")])
    shown = capsys.readouterr()
    assert e.value.code == 2 and message in shown.err.splitlines()[-1]
    assert shown.out == "" and not (tmp_path / "out").exists()


def test_a_damaged_picture_is_named_before_training(tmp_path, capsys):
    folder = images(tmp_path / "images")
    (folder / "deep/1/7.png").write_bytes(b"not an image")
    with pytest.raises(SystemExit):
        main([*QUICK, "--data", str(folder), "--n-train", "0", "--n-valid", "0"])
    shown = capsys.readouterr()
    assert "cannot read the image" in shown.err and "7.png" in shown.err and shown.out == ""


def test_a_folder_of_classes_and_a_model_of_torchvision(tmp_path, capsys):
    args = ["--data", str(images(tmp_path / "images")), "--size", "40", "--bs", "8"]
    args += ["--model", "squeezenet1_1", "--n-train", "0", "--n-valid", "0"]
    whole = trained(tmp_path / "out", *args, "--precisions", "fp32,bf16")
    assert "squeezenet1_1 on images, sgd" in capsys.readouterr().out
    assert [len(r["losses"]) for r in whole["results"]] == [2, 2]  # 16 of 20 in batches of 8


def test_a_model_of_timm(monkeypatch, tmp_path):
    def create_model(name, num_classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes))

    timm = SimpleNamespace(is_model="a_net".__eq__, create_model=create_model, __spec__=1)
    monkeypatch.setitem(sys.modules, "timm", timm)
    (result,) = trained(tmp_path, "--model", "a_net", "--precisions", "bf16")["results"]
    assert len(result["losses"]) == 2


def test_command_without_cifar10_names_the_places(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("CIFAR10_PATH", raising=False)
    monkeypatch.setattr("mixedfp.examples.fastai_path", lambda name: tmp_path / name)
    monkeypatch.setattr("fastai.vision.all.untar_data", None)  # no network
    with pytest.raises(SystemExit):
        main([*QUICK, "--data", "cifar10"])
    assert "none of four places" in capsys.readouterr().err


def test_help_names_every_precision(capsys):
    with pytest.raises(SystemExit) as e:
        main(["--help"])
    assert e.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown and text in shown for name, text in PRECISIONS.items())


def test_the_names_of_the_command_are_those_of_compare():
    compare = importlib.import_module("mixedfp.compare")
    assert tuple(compare.MODELS) == MODEL_NAMES and tuple(compare.OPTIMIZERS) == OPTIMIZER_NAMES
    assert compare.PRECISIONS == list(PRECISIONS)


def test_seeds_follow_the_first_and_a_run_that_diverged_is_saved(tmp_path):
    """JSON has no nan: it is null there."""
    args = ["--precisions", "fp32", "--seed", "5", "--seeds", "2", "--lr", "1e30"]
    results = trained(tmp_path, *args)["results"]
    assert [r["seed"] for r in results] == [5, 6] and results[0]["valid_loss"] is None


@pytest.mark.parametrize("opt", ["sgd", "adam"])
def test_flat_is_not_different(opt, tmp_path):
    before = torch.get_default_dtype(), torch.get_num_threads()
    names = ["bf16", "bf16-flat", "fp16", "fp16-flat", "autocast-bf16"]
    runs = trained(tmp_path, "--opt", opt, "--bs", "32", "--precisions", ",".join(names))["results"]
    for one, flat in zip(runs[:4:2], runs[1:4:2], strict=True):
        for part in ("losses", "valid_loss", "accuracy"):
            assert_same(one[part], flat[part], name=f"{part} of {flat['precision']}")
    assert (torch.get_default_dtype(), torch.get_num_threads()) == before
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
