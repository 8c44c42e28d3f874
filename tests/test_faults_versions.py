"""Faults found on the machines of others: versions, commands, tables, pictures."""

import json
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
import torch
from fastai.torch_core import TensorImage
from inside import crop_windows, model_of, n_bytes
from PIL import Image
from torch import nn

from mixedfp import compare as comparison
from mixedfp.command import main
from mixedfp.compare import Result, bytes_per_parameter, compare, results_table
from mixedfp.examples import FlipCrop, photos
from mixedfp.formats import MixedPrecisionError
from mixedfp.step import MixedStep, is_elementwise
from mixedfp.testing import assert_same

ROOT = Path(__file__).resolve().parent.parent
QUICK = ["--model", "darknet-small", "--epochs", "1", "--device", "cpu", "--precisions", "fp32"]


def a_result(**kwargs):
    """Make what one run may give: in float32, SGD with momentum."""
    usual = {
        "precision": "fp32",
        "seed": 1,
        "accuracy": 0.5,
        "valid_loss": 1.0,
        "epoch_seconds": [5.0, 2.0, 4.0],
        "weights": 4.0,
        "masters": 0.0,
        "state": 4.0,
        "peak_memory": 3 * 2**20,
        "skipped": 0,
        "loss_scale": None,
        "losses": [2.0, 1.0],
        "scales": [],
    }
    return Result(**usual | kwargs)


def test_5_the_fastest_epoch_is_neither_the_first_nor_the_last():
    assert a_result().seconds == 2.0
    assert a_result(epoch_seconds=[1.0, 2.0, 3.0]).seconds == 1.0
    assert a_result(epoch_seconds=[3.0, 2.0, 1.5]).seconds == 1.5


def test_5_a_row_is_arithmetic_on_its_runs():
    """Speed is fp32's time through one's own; memory is the largest, bytes are a sum."""
    table = results_table(
        [
            a_result(),
            a_result(seed=2, epoch_seconds=[8.0, 3.0], accuracy=0.75, valid_loss=2.0),
            a_result(precision="bf16", epoch_seconds=[4.0, 0.5, 1.0], weights=2.0, masters=4.0),
            a_result(precision="fp16", epoch_seconds=[8.0, 9.0], skipped=1, loss_scale=8.0),
            a_result(precision="fp16", seed=2, skipped=2, peak_memory=9 * 2**20, loss_scale=4.0),
        ]
    )
    assert table.seconds.to_dict() == {"fp32": 2.0, "bf16": 0.5, "fp16": 2.0}
    assert table.speed.to_dict() == {"fp32": 1.0, "bf16": 4.0, "fp16": 1.0}
    assert table.accuracy["fp32"] == 0.625 and table.valid_loss["fp32"] == 1.5
    assert table.bytes.to_dict() == {"fp32": 8.0, "bf16": 10.0, "fp16": 8.0}
    assert table.skipped["fp16"] == 1.5 and table.loss_scale["fp16"] == 4.0
    assert table.peak_memory["fp16"] == 9 * 2**20


def test_5_memory_that_two_tensors_share_counts_once():
    vector = torch.zeros(100)
    assert n_bytes([vector, vector[:50], vector[50:].view(5, 10), vector.detach()]) == 400
    assert n_bytes([vector, torch.zeros(7, dtype=torch.bfloat16)]) == 414


def test_5_bytes_of_a_learner_with_flat_masters():
    """Masters and their views in the state's own words: 4 bytes a parameter, not 8."""
    dls = photos(n_train=64, n_valid=16, bs=16, device="cpu")
    learn = comparison.make_learner(
        "bf16-flat",
        dls,
        nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 2)),
        opt_func=comparison.OPTIMIZERS["sgd"],
    )
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, 0.01)
    assert bytes_per_parameter(learn) == {"weights": 2.0, "masters": 4.0, "state": 4.0}


class Stopped(Exception):
    """Raised where a run would begin."""


@pytest.mark.parametrize(
    ("args", "n_train", "n_valid"),
    [
        ([], 1280, 500),
        (["--n-train", "0"], None, 500),
        (["--n-valid", "0"], 1280, None),
        (["--n-train", "64", "--n-valid", "32"], 64, 32),
    ],
)
def test_5_zero_pictures_are_all_of_them(args, n_train, n_valid, monkeypatch):
    seen = {}

    def stop(**settings):
        seen.update(settings)
        raise Stopped

    monkeypatch.setattr(comparison, "compare", stop)
    with pytest.raises(Stopped):
        main([*QUICK, *args])
    assert (seen["n_train"], seen["n_valid"]) == (n_train, n_valid)


def test_5_another_seed_makes_other_flips_and_crops():
    """Each on its own: from one seed the same, from another one not."""
    numbers = torch.arange(16 * 16, dtype=torch.int16).view(16, 16)
    picture = TensorImage(numbers.expand(64, 3, 16, 16).clone())
    made = [FlipCrop(pad, seed)(picture, split_idx=0) for pad in (0, 3) for seed in (0, 0, 1)]
    for one, same, other in (made[:3], made[3:]):
        assert_same(same, one)
        assert not torch.equal(other, one)


def test_5_each_pass_over_the_pictures_makes_other_flips():
    """In the same order, too: the transform is started again from the pass's own numbers."""
    one, other = (photos(n_train=64, n_valid=2, bs=64, device="cpu", seed=s) for s in (1, 2))
    crops = []
    for dls in (one, other):
        (tfm,) = (t for t in dls.train.after_batch.fs if isinstance(t, FlipCrop))
        for _ in range(2):
            dls.train.one_batch()
            tfm_state = tfm.rng.bit_generator.state["state"]["state"]
            crops.append(tfm_state)
    assert len(set(crops)) == 4


@pytest.mark.parametrize("pad", [0, 1, 4])
def test_5_the_window_stands_at_every_place_within_the_padding(pad):
    """From −pad to +pad, both ends too, about equally often; without a flip, to see it."""
    size, n = 16, 3000
    starts = crop_windows(FlipCrop(pad, seed=1), n, size)
    inside = torch.arange(size)
    found = []
    for shift in range(-size, size + 1):
        at = (inside + shift).abs()
        at = torch.where(at < size, at, 2 * (size - 1) - at)
        found += [shift] * int((starts == at).all(1).sum())
    assert len(found) == n
    counts = {shift: found.count(shift) for shift in sorted(set(found))}
    assert list(counts) == list(range(-pad, pad + 1))
    expected = n / (2 * pad + 1)
    assert all(0.7 * expected < count < 1.3 * expected for count in counts.values())


def own_pictures(root, splits=("train", "valid"), n=6, size=(40, 48)):
    """Write two classes of pictures that are not 32×32; return the folder."""
    for split in splits:
        for k, name in enumerate(["cats", "dogs"]):
            (root / split / name).mkdir(parents=True)
            for i in range(n):
                colour = (120 * k, 40, 10 * i)
                Image.new("RGB", size, colour).save(root / split / name / f"{i}.jpg")
    return root


@pytest.mark.parametrize("split", ["valid", "test"])
def test_4_data_may_be_a_folder_of_ones_own(split, tmp_path):
    folder = own_pictures(tmp_path / "mine", ("train", split))
    main([*QUICK, "--data", str(folder), "--bs", "4", "--out", str(tmp_path / "out")])
    file = tmp_path / "out" / "mine-darknet-small.json"
    (run,) = json.loads(file.read_text())["results"]
    assert len(run["losses"]) == 12 // 4  # all of them: 12 pictures in batches of 4


def test_4_a_folder_of_another_layout_is_refused_in_one_line(tmp_path, capsys):
    own_pictures(tmp_path / "half", ("train",))
    (tmp_path / "half" / "valid" / "cats").mkdir(parents=True)
    empty = own_pictures(tmp_path / "empty")
    for file in (empty / "valid" / "dogs").iterdir():
        file.unlink()
    for folder, message in {
        tmp_path / "nowhere": "expected one of photos, cifar10, or a folder that holds",
        tmp_path / "half": "expected a folder with train/<class> for two classes or more",
        empty: "found cats, dogs to train on and cats for validation",
    }.items():
        with pytest.raises(SystemExit):
            main([*QUICK, "--data", str(folder)])
        assert message in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(ValueError, match="expected a folder with train"):
        compare("fp32", data=str(tmp_path / "half"))


@pytest.mark.parametrize(("args", "code"), [(["--help"], 0), (["--opt", "lion"], 2)])
def test_4_help_and_mistakes_come_before_the_imports(args, code):
    """By the command that is installed: what settings.ini names, in a new process."""
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    module, _, function = config["DEFAULT"]["console_scripts"].partition("=")[2].partition(":")
    program = (
        f"import sys\nfrom {module} import {function} as main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as e: code = e.code\n"
        "print([m for m in ('torch', 'fastai', 'numpy') if m in sys.modules], code)"
    )
    command = [sys.executable, "-c", program, *args]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.splitlines()[-1] == f"[] {code}"
    assert "Warning" not in run.stderr and (run.stderr == "") == (code == 0)


def test_1_08_what_belongs_to_a_model_is_there_or_says_why_not():
    """No attribute of a step is None half of the time: an early call is told what to do."""
    mixed = MixedStep(torch.bfloat16)
    for name in ("masters", "buffers", "opt"):
        with pytest.raises(MixedPrecisionError, match="call `attach` first"):
            getattr(mixed, name)
    assert not mixed.is_attached and not mixed.has_opt
    model = nn.Linear(2, 2)
    mixed.attach(model)
    assert mixed.is_attached and not mixed.has_opt and model_of(mixed) is model
    with pytest.raises(MixedPrecisionError, match="call `wrap_optimizer` first"):
        mixed.step()
    mixed.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert mixed.has_opt
    mixed.detach()
    assert not mixed.is_attached and model.weight.dtype == torch.float32


class Eager(torch.optim.Optimizer):
    """Makes its state when it is made, as Adagrad does in torch 2.10, and checks no shape there."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {"step": torch.tensor(0.0), "sum": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self):
        """Step as Adagrad. A fused kernel would read beyond a state that is shorter."""
        for group in self.param_groups:
            for p in group["params"]:
                total = self.state[p]["sum"]
                assert total.shape == p.shape and total.dtype == p.dtype
                total.addcmul_(p.grad, p.grad)
                p.addcdiv_(p.grad, total.sqrt().add_(1e-10), value=-group["lr"])


@pytest.mark.parametrize("first", [(), (0, 6), (1,)], ids=str)
@pytest.mark.parametrize("apart", [False, True], ids=["one group", "two groups"])
def test_1_01_a_trial_makes_states_like_its_tensors(first, apart):
    """Not like a number that is the first parameter of a group: a kernel would leave its memory."""
    odd, weight = nn.Parameter(torch.ones(first)), nn.Parameter(torch.randn(4, 3))
    groups = [{"params": [odd]}, {"params": [weight]}] if apart else [odd, weight]
    assert is_elementwise(Eager(groups))


def notebooks():
    """List the notebooks that `nbdev_test` runs."""
    found = sorted((ROOT / "nbs").rglob("*.ipynb"))
    return [path for path in found if not path.name.startswith(("_", "."))]


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_1_07_no_notebook_looks_at_what_others_have_imported(path):
    """Any of them may have run before in the same process: what needs a fresh one makes one."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            for line in "".join(cell["source"]).splitlines():
                assert not re.match(r"assert .*\bsys\.modules\b", line), line
