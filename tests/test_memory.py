"""Training takes the bytes per parameter that the tables name, and that `memory_of` works out.

Live tensors are counted, not resident pages. A step's scratch memory is 8 MiB at most, for every
size of model, because chunks are of one size.
"""

import gc
import sys
import weakref

import pytest
import tiny
import torch
from fastai.basics import Learner
from fastai.optimizer import Adam
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mixedfp.callback  # noqa: F401, puts `to_bf16` on Learners
from mixedfp.diagnose.memory import MODES, main, memory_of, on_meta
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler

# products that are computed in float32 keep float32 operands: this would depend on the CPU
FP16, BF16 = dict(dtype="fp16", native=True), dict(dtype="bf16", native=True)
FLAT = dict(flat_master=True)
HALF = FLAT | dict(half_grads=True)
STATES = "exp_avg exp_avg_sq grad_avg sqr_avg".split()  # of PyTorch's AdamW, of fastai's Adam
NARROW = dict(state_dtype=dict.fromkeys(STATES, torch.bfloat16))
BYTES = {  # weights + gradients + states; and the 16-bit copies, in a pass
    "float32": (dict(dtype="fp32"), 4 + 4 + 8, 0),
    "bfloat16": (BF16, 4 + 4 + 8, 2),
    "flat": (BF16 | FLAT, 4 + 4 + 8, 2),
    "half gradients": (BF16 | HALF, 4 + 2 + 8, 2),
    "half gradients, 16-bit states": (BF16 | HALF | NARROW, 4 + 2 + 4, 2),
    "float16": (FP16, 4 + 4 + 8, 2),
    "float16, half gradients": (FP16 | HALF, 4 + 2 + 8, 2),
}
SETTINGS = {"to_bf16": BF16, "and 16-bit gradients": BF16 | HALF}  # by the modes of `memory_of`
SETTINGS["and 16-bit states"] = BF16 | HALF | NARROW
IDS = torch.zeros(2, 16, dtype=torch.long)
each_mode = pytest.mark.parametrize("settings, n_bytes, n_copies", BYTES.values(), ids=BYTES)


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside of the block hold at once."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known = {}
        gc.collect()  # what others have left

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self._add(t.untyped_storage())
        return out

    def _add(self, storage):
        key = storage._cdata
        if key not in self.known:
            self.known[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._remove, key)

    def _remove(self, key):
        self.now -= self.known.pop(key)


def make_model():
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(76)))


def assert_is_documented(peak, n_bytes):
    documented = n_bytes * 76 * 512 * 512
    assert documented <= peak.most < documented + 2**23


@each_mode
def test_a_loop_takes_the_bytes_per_parameter_that_the_table_names(settings, n_bytes, n_copies):
    """The copies go as the gradients come, and are not there in the step."""
    scaler = LossScaler(enabled=settings["dtype"] == "fp16")
    with Peak() as peak:
        model = make_model()
        opt = torch.optim.AdamW(model.parameters(), foreach=False)
        if settings["dtype"] != "fp32":
            with_masters(model, opt, **settings)
        for _ in range(2):
            scaler.scale(model(torch.ones(2, 512)).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert_is_documented(peak, n_bytes)


@each_mode
def test_a_fit_takes_the_bytes_per_parameter_that_the_table_names(settings, n_bytes, n_copies):
    """fastai keeps zeroed gradients in the next pass, beside the copies."""
    dls = tiny.make_dls(torch.ones(6, 512), torch.zeros(6, 512), n_valid=2, bs=2)
    with Peak() as peak:
        learn = Learner(dls, make_model(), nn.MSELoss(), opt_func=Adam)
        to = getattr(learn, f"to_{settings['dtype']}")
        to(**{k: v for k, v in settings.items() if k != "dtype"})
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
    assert_is_documented(peak, n_bytes + n_copies)


def make_blocks():
    """Return attention and linear layers: 4 M parameters, of which the embedding has no copy."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(2000, 256), layers, nn.Linear(256, 2000, bias=False))


@pytest.fixture(scope="module")
def table():
    return memory_of(on_meta(make_blocks), IDS)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_takes_what_was_worked_out(table, mode, monkeypatch):
    monkeypatch.setattr("mixedfp.engine.flat.CHUNK", 2**14)  # its scratch memory stays small
    row = table.rows[mode]
    with Peak() as peak:
        model = make_blocks()
        opt = torch.optim.AdamW(model.parameters())
        if mode in SETTINGS:
            with_masters(model, opt, **SETTINGS[mode])
        gc.collect()
        held = peak.now
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            out = model(IDS)
        loss = torch.log_softmax(out.float(), -1).mean()
        active = peak.now - held
        loss.backward()
        del out, loss
        opt.step()
        gc.collect()
    roles = "weights", "gradients", "states", "buffers"
    assert peak.now == pytest.approx(sum(row[role] for role in roles), rel=0.03)
    assert active == pytest.approx(row["activations"], rel=0.10)


def test_seventy_billion_parameters_half_of_them_frozen_take_no_memory():
    layers = [nn.Linear(2**16, 2**16, bias=False, device="meta") for _ in range(18)]
    for layer in layers[:9]:
        layer.requires_grad_(False)
    model, batch = nn.Sequential(*layers), torch.empty(1, 2**16, device="meta")
    found, row = memory_of(model, batch), memory_of(model, batch, "sgd").rows["to_bf16"]
    assert found.n > 69e9 and found.n == 2 * found.n_trained
    assert "GiB" in repr(found)
    assert found.rows["float32"]["states"] == 8 * found.n_trained
    assert row["weights"] == 4 * found.n
    assert row["gradients"] == row["states"] == 4 * found.n_trained
    with pytest.raises(ValueError, match="`optimizer` is 'magic': expected one of adamw"):
        memory_of(model, batch, "magic")


def test_the_command_knows_the_models_of_torchvision(capsys):
    pytest.importorskip("torchvision")
    main(["resnet18", "--batch", "4", "--size", "64"])
    shown = capsys.readouterr().out
    assert "to_bf16(flat_master=True)" in shown and "activations" in shown


def test_the_command_takes_a_function(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n    return nn.Linear(1024, 1024, bias=False), (torch.empty(8, 1024),)\n"
    )
    monkeypatch.chdir(tmp_path)  # a command finds the modules of its folder
    monkeypatch.setattr(sys, "path", sys.path[:])
    main(["mine:make", "--optimizer", "sgd"])
    assert "1,048,576 parameters" in capsys.readouterr().out


WRONG = {
    "no_such_model": "'no_such_model': module 'torchvision.models' has no attribute",
    "no_module:make": "No module named 'no_module'",
    "json:make": "module 'json' has no attribute 'make'",
    "resnet18 --optimizer magic": "invalid choice: 'magic'",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_the_command_names_what_is_wrong(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert WRONG[arguments] in capsys.readouterr().err
