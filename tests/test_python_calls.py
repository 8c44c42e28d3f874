"""What a step does in Python for each parameter, counted: calls of the library's functions.

Thousands of small parameters are stepped in the time that Python takes to visit them. A call costs
more than the arithmetic of a bias, so none may be made for each parameter where a list will do.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import mixedfp
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.step import MixedStep

HOME = str(Path(mixedfp.__file__).parent)
BF16, HALF = torch.bfloat16, torch.float16
WAYS = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
DTYPES = pytest.mark.parametrize("dtype", [BF16, HALF], ids=str)


class Calls:
    """Counts the calls of the library's functions, by the name of what is measured."""

    def __init__(self):
        self.n = Counter()

    def of(self, name, f, *args):
        """Return `f(*args)`, counted under `name`."""

        def see(frame, event, arg):
            if event == "call" and frame.f_code.co_filename.startswith(HOME):
                self.n[name] += 1

        self.n[name] += 0
        sys.setprofile(see)
        try:
            return f(*args)
        finally:
            sys.setprofile(None)


class Many(nn.Module):
    """As many small parameters as are wanted."""

    def __init__(self, n):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.full((3,), 0.5)) for _ in range(n)])

    def forward(self, x):
        """Multiply each of them by `x`."""
        return torch.stack([w * x for w in self.weights])


def by_hand(n, dtype, flat):
    """Count in the third iteration of a plain loop."""
    model = Many(n)
    model, opt = with_masters(
        model, torch.optim.AdamW(model.parameters(), foreach=True), dtype=dtype, flat_master=flat
    )
    scaler = LossScaler("cpu", init_scale=4.0, enabled=dtype == HALF)
    for _ in range(3):
        calls = Calls()
        loss = scaler.scale(model(torch.ones(3)).sum())
        calls.of("backward", loss.backward)
        calls.of("first look", lambda: opt.param_groups)
        calls.of("look", lambda: opt.param_groups)
        calls.of("step", scaler.step, opt)
        scaler.update()
        calls.of("zero_grad", opt.zero_grad)
    return calls.n


def in_a_trainer(n, dtype, flat):
    """Count in the third iteration of what a `Learner` does."""
    scaler = LossScaler("cpu", init_scale=4.0, enabled=dtype == HALF)
    model, mixed = Many(n), MixedStep(dtype, flat, scaler)
    mixed.attach(model)
    opt = mixed.wrap_optimizer(torch.optim.AdamW(model.parameters(), foreach=True))
    for _ in range(3):
        calls = Calls()
        loss = mixed.scale(mixed.uncast(model(mixed.cast(torch.ones(3), True))).sum())
        calls.of("backward", loss.backward)
        assert calls.of("unscale", mixed.unscale)
        calls.of("step", mixed.step)
        mixed.update()
        calls.of("zero_grad", opt.zero_grad)
    return calls.n


def growth(count, *args):
    """Return how many calls a parameter more costs."""
    few, many = count(8, *args), count(40, *args)
    return {name: (many[name] - few[name]) / 32 for name in many}


@DTYPES
@WAYS
def test_by_hand_python_visits_parameters_as_their_gradients_come_and_not_again(dtype, flat):
    """A hook notes each gradient; all else is done without a call of Python for each."""
    cost = growth(by_hand, dtype, flat)
    assert cost.pop("backward") <= 3
    assert cost == {"first look": 0, "look": 0, "step": 0, "zero_grad": 0}


@DTYPES
@WAYS
def test_in_a_trainer_no_hook_takes_gradients_that_autograd_widens(dtype, flat):
    cost = growth(in_a_trainer, dtype, flat)
    assert cost == {"backward": 0, "unscale": 0, "step": 0, "zero_grad": 0}
