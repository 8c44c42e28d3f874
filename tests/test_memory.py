"""Bytes a parameter: what the tables promise is what lives at the peak of a step.

Live tensors are counted, not resident pages. The model has few activations, and 4 M parameters.
"""

import gc
import weakref

import pytest
import tiny
import torch
from fastai.basics import Callback, Learner
from fastai.optimizer import Adam
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mixedfp.callback  # noqa: F401, puts `to_bf16` on Learners
from mixedfp.optimizer import with_masters

BOTH_STATES = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.bfloat16)
FASTAI_STATES = dict.fromkeys(("grad_avg", "sqr_avg"), torch.bfloat16)
BYTES = {  # weights + masters + gradients + two states of AdamW
    "one master each": ({}, 2 + 4 + 4 + 8),
    "flat": (dict(flat_master=True), 2 + 4 + 4 + 8),
    "remainders": (dict(flat_master=True, store_param_remainders=True), 2 + 2 + 4 + 8),
    "remainders, half gradients": (
        dict(flat_master=True, store_param_remainders=True, half_grads=True),
        2 + 2 + 2 + 8,
    ),
    "remainders, half gradients, states in 16 bits": (
        dict(
            flat_master=True,
            store_param_remainders=True,
            half_grads=True,
            state_dtype=BOTH_STATES,
        ),
        2 + 2 + 2 + 4,
    ),
}


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside of the block hold at once."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known = {}

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
    return nn.Sequential(*(nn.Linear(320, 320, bias=False) for _ in range(40)))


N = 40 * 320 * 320


@pytest.fixture(autouse=True)
def small_scratch(monkeypatch):
    """The scratch vector of a chunk is small beside a large model."""
    monkeypatch.setattr("mixedfp.engine.flat.CHUNK", 2**14)
    gc.collect()


@pytest.mark.parametrize("mode", BYTES)
def test_a_loop_holds_the_bytes_a_parameter_that_the_table_says(mode):
    settings, expected = BYTES[mode]
    x = torch.randn(2, 320)
    with Peak() as peak:
        model = make_model()
        opt = torch.optim.AdamW(model.parameters())
        model, opt = with_masters(model, opt, dtype="bf16", native=True, **settings)
        for _ in range(3):
            model(x).square().mean().backward()
            peak.most = peak.now  # from here on: the step, with all gradients there
            opt.step()
            opt.zero_grad()
    assert peak.most / N == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("mode", BYTES)
def test_a_fit_holds_the_bytes_a_parameter_that_the_table_says(mode):
    settings, expected = BYTES[mode]
    if "state_dtype" in settings:
        settings = {**settings, "state_dtype": FASTAI_STATES}
    x, found = torch.randn(12, 320), []

    class Watch(Callback):
        order = 5  # before MixedPrecision

        def before_step(self):
            peak.most = peak.now

        def after_step(self):
            found.append(peak.most)

    dls = tiny.make_dls(x, torch.zeros(12, 320), n_valid=2, bs=2)
    with Peak() as peak:
        learn = Learner(dls, make_model(), nn.MSELoss(), opt_func=Adam, cbs=Watch())
        learn.to_bf16(native=True, **settings)
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
    assert max(found) / N == pytest.approx(expected, rel=0.03)
