"""An interrupt at any line of a step leaves the model in 16 bits and its masters whole."""

import sys

import pytest
import torch
from torch import nn

from mixedfp.engine import flat, masters
from mixedfp.optimizer import with_masters

FILES = {masters.__file__, flat.__file__}


class InterruptAt:
    """Raise KeyboardInterrupt at the given line event of the engine, once."""

    def __init__(self, at):
        self.left, self.happened = at, False

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind, *_):
        sys.settrace(None)
        return kind is KeyboardInterrupt

    def _trace(self, frame, event, arg):
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                self.happened = True
                raise KeyboardInterrupt
        return self._trace


def make(opt, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 40), nn.BatchNorm1d(40), nn.Linear(40, 2))
    model, opt = with_masters(model, opt(model.parameters()), dtype="bf16", **settings)
    step(model, opt)
    return model, opt


def step(model, opt):
    opt.zero_grad()
    model(torch.ones(3, 4)).square().sum().backward()
    opt.step()


def adamw(params):
    return torch.optim.AdamW(params, 1e-2)


def lbfgs(params):
    return torch.optim.LBFGS(params, 0.1, max_iter=2)


def assert_whole(model, opt):
    for p in opt.masters.params:
        full = opt.masters[p]
        assert full.dtype == torch.float32 and full.isfinite().all()
    weights = [model[0].weight, model[2].weight]
    assert all(p.dtype == torch.bfloat16 for p in weights)
    for p in weights:
        error = (p.detach().float() - opt.masters[p]).abs()
        assert (error <= 2**-8 * opt.masters[p].abs() + 1e-30).all(), "a weight is not its master"


CASES = {
    "each": (adamw, {}),
    "flat": (adamw, dict(flat_master=True)),
    "remainders": (adamw, dict(flat_master=True, store_param_remainders=True)),
    "16-bit states": (adamw, dict(flat_master=True, state_dtype={"exp_avg": "bf16"})),
}


@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_any_line_leaves_masters_whole(case, monkeypatch):
    """For each line event of a step in turn; then training continues."""
    monkeypatch.setattr(flat, "CHUNK", 64)
    opt_func, settings = CASES[case]
    model, opt = make(opt_func, **settings)
    at, happened = 0, True
    while happened:
        opt.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        with InterruptAt(at) as interrupt:
            opt.step()
        happened = interrupt.happened
        assert_whole(model, opt)
        at += 1
    assert at > 50, "the trace has seen no step"
    step(model, opt)
    assert_whole(model, opt)


@pytest.mark.parametrize("flat_master", [False, True])
def test_an_interrupted_closure_leaves_the_model_in_16_bits(flat_master):
    """LBFGS calls the model in the middle of its step."""
    model, opt = make(adamw)
    opt.masters.restore()
    opt = lbfgs(model.parameters())
    model, opt = with_masters(model, opt, dtype="bf16", flat_master=flat_master)

    def closure():
        opt.zero_grad()
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        return loss

    at, happened = 0, True
    while happened:
        opt.state.clear()  # an interrupted LBFGS has a state that it cannot continue with
        with InterruptAt(at) as interrupt:
            opt.step(closure)
        happened = interrupt.happened
        assert_whole(model, opt)
        at += 3
    assert at > 50, "the trace has seen no step"
