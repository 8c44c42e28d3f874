"""Optimizers that look at whole matrices, or keep weights of their own, under the same laws."""

import copy
import io

import pytest
import torch
from torch import nn, optim

from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

others = pytest.importorskip("pytorch_optimizer")
schedulefree = pytest.importorskip("schedulefree")

BF16 = torch.bfloat16
LAYOUTS = {"a master each": {}, "flat": dict(flat_master=True)}
HOW = (None,), (torch.float32,), (BF16, "a master each"), (BF16, "flat")


def muon_and_adamw(model):
    """Muon for matrices, AdamW for the rest: two optimizers over one model."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [optim.Muon(matrices, lr=0.02), optim.AdamW(rest, lr=0.01)]


OPTIMIZERS = {
    "Muon beside AdamW": muon_and_adamw,
    "schedule-free": lambda model: [
        schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=2)
    ],
    "Lion": lambda model: [others.Lion(model.parameters(), lr=1e-3)],
    "Prodigy": lambda model: [others.Prodigy(model.parameters(), lr=1.0)],
    "SOAP": lambda model: [others.SOAP(model.parameters(), lr=0.01, precondition_frequency=2)],
    "Adafactor": lambda model: [optim.Adafactor(model.parameters(), lr=0.01)],
}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


class Run:
    """A model, its optimizers, and steps with gradients that follow from their number."""

    def __init__(self, name, dtype=None, layout="a master each", seed=0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
        self.opts = OPTIMIZERS[name](self.model)
        if dtype is not None:
            with_masters(self.model, *self.opts, dtype=dtype, native=True, **LAYOUTS[layout])
        for opt in self.opts:
            if hasattr(opt, "train"):
                opt.train()

    def backward(self, i, factor=1.0):
        generator = torch.Generator().manual_seed(i)
        x, y = torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)
        ((self.model(x) - y).square().mean() * factor).backward()

    def train(self, steps):
        for i in steps:
            self.backward(i)
            for opt in self.opts:
                opt.step()
                opt.zero_grad()
        return self

    def save(self):
        """Return what files hold, read back."""
        file = io.BytesIO()
        torch.save([o.state_dict() for o in (self.model, *self.opts)], file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, saved):
        for o, state in zip((self.model, *self.opts), saved, strict=True):
            o.load_state_dict(state)
        return self


@each_optimizer
def test_float32_is_plain_training_and_flat_is_a_master_each(name):
    ends = [Run(name, *how).train(range(6)).save() for how in HOW]
    assert_same(ends[0], ends[1])
    assert_same(ends[2], ends[3])


@each_optimizer
@each_layout
def test_a_file_continues_to_the_bits_of_an_unbroken_run(name, layout):
    whole = Run(name, BF16, layout).train(range(8))
    saved = Run(name, BF16, layout).train(range(4)).save()
    resumed = Run(name, BF16, layout, seed=1).load(saved).train(range(4, 8))
    assert_same(resumed.save(), whole.save())


@each_optimizer
@each_layout
def test_a_skipped_step_changes_nothing(name, layout):
    run = Run(name, BF16, layout).train(range(3))
    before = copy.deepcopy(run.save())
    run.backward(3)
    for opt in run.opts:
        opt.param_groups[0]["params"][0].grad.view(-1)[0] = float("inf")
        opt.step()
        opt.zero_grad()
    assert_same(run.save(), before)
    assert run.opts[0].masters.n_skipped == len(run.opts)
    run.train([3])
    assert_same(run.save(), Run(name, BF16, layout).train(range(4)).save())


@each_layout
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_muon_orthogonalizes_on_landed_steps_only(dtype, layout, monkeypatch):
    """Counted where PyTorch's Muon multiplies matrices."""
    from torch.optim import _muon

    calls, own = [], _muon._zeropower_via_newtonschulz
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", lambda *a: calls.append(1) or own(*a))
    run, scaler = Run("Muon beside AdamW", dtype, layout), LossScaler("cpu", 2.0**4)
    for i in range(6):
        scaler.scale(torch.zeros(()))
        run.backward(i, scaler.get_scale())
        if i % 2:
            run.model[0].weight.grad[0, 0] = float("nan")
        for opt in run.opts:
            scaler.step(opt)
            opt.zero_grad()
        scaler.update()
    assert len(calls) == 3 * 2  # three landed steps of two matrices
    assert scaler.n_skipped == 3
    states = [v for s in run.opts[0].state.values() for v in s.values() if v.ndim]
    assert states and all(v.dtype == torch.float32 for v in states)  # that of the gradient
