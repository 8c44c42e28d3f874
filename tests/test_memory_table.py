"""`memory_of` and `mixedfp_memory`: what they work out is what training takes."""

import gc
import sys

import pytest
import torch
from test_memory import Peak
from torch import nn

from mixedfp.diagnose.memory import MODES, main, memory_of, on_meta
from mixedfp.optimizer import with_masters

STATES = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.bfloat16)
HALF = dict(flat_master=True, half_grads=True)
SETTINGS = {
    "to_bf16": {},
    "and 16-bit gradients": HALF,
    "and 16-bit states": {**HALF, "state_dtype": STATES},
}


class Blocks(nn.Module):
    """Attention and linear layers: 4 M parameters, of which the embedding has no copy."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(2000, 256)
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 2000, bias=False)

    def forward(self, x):
        return self.head(self.layers(self.words(x)))


IDS = torch.zeros(2, 16, dtype=torch.long)


@pytest.fixture(scope="module")
def table():
    return memory_of(on_meta(Blocks), IDS)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_takes_what_was_worked_out(table, mode, monkeypatch):
    monkeypatch.setattr("mixedfp.engine.flat.CHUNK", 2**14)  # its scratch memory stays small
    row = table.rows[mode]
    with Peak() as peak:
        model = Blocks()
        opt = torch.optim.AdamW(model.parameters())
        if mode in SETTINGS:
            with_masters(model, opt, dtype="bf16", native=True, **SETTINGS[mode])
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


def test_seventy_billion_parameters_take_no_memory():
    layers = [nn.Linear(2**16, 2**16, bias=False, device="meta") for _ in range(17)]
    found = memory_of(nn.Sequential(*layers), torch.empty(1, 2**16, device="meta"))
    assert found.n > 69e9
    assert "GiB" in repr(found)
    assert found.rows["float32"]["states"] == 8 * found.n


def test_a_frozen_part_has_no_gradients_or_states():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    found = memory_of(model, torch.empty(4, 64), "sgd")
    assert found.n == 2 * found.n_trained
    row = found.rows["to_bf16"]
    assert row["weights"] == 4 * found.n
    assert row["gradients"] == row["states"] == 4 * found.n_trained


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_model"], "'no_such_model': module 'torchvision.models' has no attribute"),
        (["no_module:make"], "No module named 'no_module'"),
        (["json:make"], "module 'json' has no attribute 'make'"),
        (["resnet18", "--optimizer", "magic"], "invalid choice: 'magic'"),
    ],
)
def test_the_command_names_what_is_wrong(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_an_unknown_optimizer_is_named():
    with pytest.raises(ValueError, match="`optimizer` is 'magic': expected one of adamw"):
        memory_of(nn.Linear(2, 2), torch.empty(1, 2), "magic")
