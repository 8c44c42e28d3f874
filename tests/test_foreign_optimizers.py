"""Optimizers that look at whole matrices, or keep weights of their own, under the same laws.

`--all-rows`, nightly, takes every optimizer of pytorch_optimizer and timm.
"""

import copy
import io
from collections import deque
from functools import partial

import pytest
import torch
from torch import nn, optim

from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

others = pytest.importorskip("pytorch_optimizer")
of_timm = pytest.importorskip("timm.optim")
schedulefree = pytest.importorskip("schedulefree")

CHOSEN = ["torch.muon", "schedulefree.adamw"]
CHOSEN += [f"pytorch_optimizer.{k}" for k in ("lion", "prodigy", "soap")]
EVERY = [f"pytorch_optimizer.{k}" for k in others.get_supported_optimizers()]
EVERY += [f"timm.{k}" for k in of_timm.list_optimizers()]
MATRICES = "adago adamuon distributedmuon muon muonclip normuon".split()  # these are told which
SETTINGS = dict(bsam=dict(num_data=20, foreach=False), prodigy=dict(lr=1.0))
SETTINGS |= dict(ranger21=dict(num_iterations=20), soap=dict(precondition_frequency=2))
SECOND_ORDER = "adahessian sophiah".split()
CLOSURE = "alig bsam lbfgs".split()  # needed; two of them call it again, where no step is skipped
LEFT_OUT = dict(bnb="needs CUDA", fused="needs CUDA and apex", demo="needs einops")
LEFT_OUT |= dict(distributedmuon="needs a process group")
LEFT_OUT |= dict.fromkeys(("adalomo", "lomo"), "steps in the backward pass")
BF16, FLAT = dict(dtype="bf16"), dict(dtype="bf16", flat_master=True)
each_layout = pytest.mark.parametrize("layout", [BF16, FLAT], ids=["a master each", "flat"])


def optimizers_over(model, name):
    """Return one, or PyTorch's Muon for matrices and AdamW beside it for the rest."""
    package, _, kind = name.partition(".")
    params = list(model.parameters())
    matrices, rest = ([p for p in params if (p.ndim == 2) == is_2d] for is_2d in (True, False))
    if package == "torch":
        return [optim.Muon(matrices, lr=0.02), optim.AdamW(rest, lr=0.01)]
    if package == "schedulefree":
        return [schedulefree.AdamWScheduleFree(params, lr=0.01, warmup_steps=2)]
    if package == "timm":
        return [of_timm.create_optimizer_v2(params, opt=kind, lr=0.01, weight_decay=0.01)]
    if kind == "adammini":
        params = model
    elif kind == "spectralsphere":
        params = matrices
    elif kind in MATRICES:
        params = [dict(params=matrices, use_muon=True), dict(params=rest, use_muon=False)]
    return [others.load_optimizer(kind)(params, **dict(lr=0.01) | SETTINGS.get(kind, {}))]


class Run:
    """A model, its optimizers, and steps with gradients that follow from their number."""

    def __init__(self, name, seed=0, **settings):
        torch.manual_seed(seed)
        self.kind = name.partition(".")[2]
        self.model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
        self.opts = optimizers_over(self.model, name)
        if settings:
            with_masters(self.model, *self.opts, native=True, **settings)
        for opt in self.opts:
            if hasattr(opt, "train"):
                opt.train()

    @torch.enable_grad()
    def backward(self, i, factor=1.0):
        for opt in self.opts:
            opt.zero_grad()
        x, y = torch.randn(5, 9, generator=torch.Generator().manual_seed(i)).split((6, 3), 1)
        loss = (self.model(x) - y).square().mean() * factor
        loss.backward(create_graph=self.kind in SECOND_ORDER)
        return loss

    def train(self, steps):
        """Take steps; an optimizer alone takes each second one with a closure."""
        for i in steps:
            self.backward(i)
            with_closure = len(self.opts) == 1 and (i % 2 or self.kind in CLOSURE)
            for opt in self.opts:
                opt.step(partial(self.backward, i)) if with_closure else opt.step()
        assert all(p.isfinite().all() for p in self.model.parameters())
        return self

    def states(self):
        return [opened(o.state_dict()) for o in (self.model, *self.opts)]

    def save(self):
        """Return what files hold, read back."""
        torch.save([o.state_dict() for o in (self.model, *self.opts)], file := io.BytesIO())
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, saved):
        for o, state in zip((self.model, *self.opts), saved, strict=True):
            o.load_state_dict(state)
        return self


def opened(state):
    """What a state contains, also in objects."""
    if isinstance(state, dict):
        return {k: opened(v) for k, v in state.items()}
    if isinstance(state, list | tuple | deque):
        return [opened(v) for v in state]
    is_object = hasattr(state, "__dict__") and not isinstance(state, torch.Tensor)
    return opened(vars(state)) if is_object else state


def pytest_generate_tests(metafunc):
    """Make a test of every optimizer, but not on each push."""
    if "any_name" in metafunc.fixturenames:
        is_full = metafunc.config.getoption("--all-rows")
        metafunc.parametrize("any_name", CHOSEN + EVERY * is_full)


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_steps_masters_as_it_steps_weights(any_name):
    """In float32 it is plain training; in bfloat16 flat and unguarded steps have the same bits."""
    kind = any_name.partition(".")[2]
    for left_out, why in LEFT_OUT.items():
        if kind == left_out or any_name.startswith(f"timm.{left_out}"):
            pytest.skip(why)

    def train(**settings):
        return Run(any_name, **settings).train(range(6)).states()

    assert_same(train(dtype="float32"), train())
    unguarded = train(**BF16, skip_nonfinite=False)
    assert_same(train(**FLAT, skip_nonfinite=False), unguarded)
    for layout in (BF16, FLAT):
        if kind in ("bsam", "lbfgs"):
            with pytest.raises(MixedPrecisionError, match="calls its closure several times"):
                train(**layout)
        else:
            assert_same(train(**layout), unguarded)


@pytest.mark.parametrize("name", CHOSEN)
@each_layout
def test_a_skipped_step_changes_nothing_and_a_file_continues_to_the_same_bits(name, layout):
    whole, run = (Run(name, **layout).train(range(n)) for n in (8, 4))
    saved = copy.deepcopy(run.save())
    run.backward(4)
    for opt in run.opts:
        opt.param_groups[0]["params"][0].grad.view(-1)[0] = float("inf")
        opt.step()
    assert_same(run.save(), saved)
    assert run.opts[0].masters.n_skipped == len(run.opts)
    for one in (run, Run(name, seed=1, **layout).load(saved)):
        assert_same(one.train(range(4, 8)).save(), whole.save())


@each_layout
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_muon_orthogonalizes_on_landed_steps_only(dtype, layout, monkeypatch):
    """Counted where PyTorch's Muon multiplies matrices."""
    from torch.optim import _muon

    calls, own = [], _muon._zeropower_via_newtonschulz
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", lambda *a: calls.append(1) or own(*a))
    run, scaler = Run("torch.muon", **layout | dict(dtype=dtype)), LossScaler("cpu", 2.0**4)
    for i in range(6):
        scaler.scale(torch.zeros(()))
        run.backward(i, scaler.get_scale())
        if i % 2:
            run.model[0].weight.grad[0, 0] = float("nan")
        for opt in run.opts:
            scaler.step(opt)
        scaler.update()
    assert len(calls) == 3 * 2  # three landed steps of two matrices
    assert scaler.n_skipped == 3
    states = [v for s in run.opts[0].state.values() for v in s.values() if v.ndim]
    assert states and all(v.dtype == torch.float32 for v in states)  # that of the gradient
