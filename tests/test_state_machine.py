"""The verbs of a training step, in any order that hypothesis makes up.

Two sides do the same, and agree after each verb, bit for bit: `MixedTraining` in float32 and plain
training, which knows of no scale and no master; in 16 bits, flat masters and a master for each
parameter, and `MixedTraining` and a loop by hand. What a rule's precondition leaves out is not
promised. A failure prints its program, made small. More programs: `MORE_PROGRAMS=20 pytest
tests/test_state_machine.py` makes twenty times as many.
"""

import copy
import math
import os
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import fastai.optimizer
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from laws import small_chunks
from tiny import plain
from torch import nn
from torch.nn.functional import cross_entropy

from mixedfp.cast import Policy
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.step import MixedTraining, guard_of
from mixedfp.testing import assert_same


class Net(nn.Module):
    """A network of which a batch uses a part, with running statistics and a count."""

    def __init__(self, has_scalar):
        super().__init__()
        self.stem, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor(1.5)) if has_scalar else None
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x, path):
        """Go through the middle layer once, twice, not at all; or through the head alone."""
        self.count += 1
        if path == "head":
            return self.head(x[:, :4])
        x = torch.tanh(self.norm(self.stem(x)))
        for _ in range({"once": 1, "twice": 2, "past": 0}[path]):
            x = torch.tanh(self.middle(x))
        return self.head(x if self.scale is None else x * self.scale)


class Batch(NamedTuple):
    """Inputs and classes, and what comes of them."""

    seed: int
    path: str
    overflows: bool = False
    stop: bool = False  # ctrl-C in the backward pass

    def loss(self, model):
        rng = torch.Generator().manual_seed(self.seed)
        x, y = torch.randn(4, 5, generator=rng), torch.randint(2, (4,), generator=rng)
        x.requires_grad_()  # so there is a backward pass though all that is used is frozen
        out = model(x, self.path)
        if self.stop:
            out.register_hook(_stop)
        loss = cross_entropy(out.float(), y)
        return loss * math.inf if self.overflows else loss


def _stop(grad):
    raise KeyboardInterrupt


OPTIMIZERS = {
    "fastai SGD": partial(fastai.optimizer.SGD, lr=0.1, mom=0.9, wd=0.1),
    "fastai Adam": partial(fastai.optimizer.Adam, lr=0.01, wd=0.1),
    "torch SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "torch AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}


class Setup(NamedTuple):
    opt: str
    scale: float | None  # of the loss, at first
    flat: bool
    has_scalar: bool
    dtype: torch.dtype

    @property
    def kept(self):
        return dict(dtype=self.dtype, flat_master=self.flat)

    def scaler(self, guard):
        if self.scale is None:
            return guard
        return LossScaler(init_scale=self.scale, growth_interval=2, max_scale=2.0**12)


BATCHES = st.builds(
    Batch,
    seed=st.integers(0, 3),
    path=st.sampled_from(["once", "twice", "past", "head"]),
    overflows=st.sampled_from([False, False, False, True]),
    stop=st.sampled_from([False] * 5 + [True]),
)
PLACES = st.integers(0, 8)  # of parameters
WRITES = {
    "in place": lambda p: torch.no_grad()(p.mul_)(0.5),
    "data": lambda p: setattr(p, "data", p.data * 0.5),
    "in place through data": lambda p: p.data.mul_(0.5),
}


class Plain:
    """Plain training in 32 bits, with the law of skipped steps written out."""

    def __init__(self, setup):
        self.setup = setup
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.model = Net(setup.has_scalar)
        self.params, self.is_scaled = list(self.model.parameters()), False
        self.opt = OPTIMIZERS[setup.opt](self.params)
        self.attach()

    def state(self):
        """Return what a file gets, and what the model holds."""
        opt = plain(self.opt.state_dict())
        opt.pop("loss_scale", None)
        held = [p.detach() for p in self.params], dict(self.model.named_buffers())
        return plain([held, dict(self.model.state_dict()), opt])

    def grads(self):
        return plain([p.grad for p in self.params])

    def attach(self):
        """Be trained from here on: buffers are kept as they are."""
        self.kept = {k: b.clone() for k, b in self.model.named_buffers()}

    def detach(self):
        pass

    def backward(self, batch):
        self.is_scaled = self.setup.scale is not None
        batch.loss(self.model).backward()

    def unscale(self):
        """Return whether the gradients may be stepped: all are finite, or none was scaled."""
        grads = [p.grad for p in self.params if p.grad is not None]
        return not self.is_scaled or all(bool(g.isfinite().all()) for g in grads)

    def step(self):
        self.opt.step()
        self.attach()

    def skip(self):
        """Give buffers the bits that they had after the last step."""
        for k, b in self.kept.items():
            self.model.get_buffer(k).copy_(b)

    def update(self):
        self.is_scaled = False

    def load_model(self, state):
        """Load weights and buffers; no skip goes back before that."""
        self.model.load_state_dict(state)
        Plain.attach(self)


class Mixed(Plain):
    """The same through `MixedTraining`, as a trainer."""

    def attach(self):
        if not hasattr(self, "mixed"):
            policy = Policy(**self.setup.kept)
            self.scaler = self.setup.scaler(guard_of(policy))
            self.mixed = MixedTraining(policy, self.scaler)
        self.mixed.attach(self.model)
        self.mixed.wrap(self.opt)

    def detach(self):
        self.mixed.detach()

    def backward(self, batch):
        self.scaler.scale(batch.loss(self.model)).backward()

    def unscale(self):
        return self.mixed.opt.look() is not True

    def step(self):
        self.opt.step()

    def skip(self):
        self.mixed.opt.skip()

    def update(self):
        self.scaler.update()


class ByHand(Mixed):
    """The same in a loop; the optimizer's step decides on a skip."""

    def attach(self):
        if not hasattr(self, "scaler"):
            self.scaler = self.setup.scaler(LossScaler(enabled=False))
        with_masters(self.model, self.opt, **self.setup.kept)

    def detach(self):
        self.opt.masters.restore()

    def unscale(self):
        self.scaler.unscale_(self.opt)
        return all(bool(p.grad.isfinite().all()) for p in self.params if p.grad is not None)

    def step(self):
        self.scaler.step(self.opt)

    skip = step


class Laws(RuleBasedStateMachine):
    """What both sides do, and what is the same after it."""

    dtypes, flat, twin_of = [torch.float32], [False, True], staticmethod(Plain)
    opts = list(OPTIMIZERS)

    @initialize(data=st.data())
    def start(self, data):
        setup = st.builds(
            Setup,
            opt=st.sampled_from(self.opts),
            scale=st.sampled_from([None, 2.0**4, 2.0**10]),
            flat=st.sampled_from(self.flat),
            has_scalar=st.booleans(),
            dtype=st.sampled_from(self.dtypes),
        )
        setup = data.draw(setup)
        self.mine, self.twin = Mixed(setup), self.twin_of(setup)
        self.stage, self.saved = "empty", None  # of the gradients: or "scaled", or "true"

    def each(self, do):
        return do(self.mine), do(self.twin)

    def agree(self):
        assert_same(*self.each(lambda side: side.state()))
        if self.stage != "scaled":
            assert_same(*self.each(lambda side: side.grads()))

    @rule(batches=st.lists(BATCHES, min_size=1, max_size=3), look=st.booleans())
    def iterate(self, batches, look):
        for batch in batches:
            self.backward(batch)
        self.unscale_and_step(look)
        self.each(lambda side: side.opt.zero_grad())
        self.stage = "empty"

    @precondition(lambda self: self.stage != "true")
    @rule(batch=BATCHES)
    def backward(self, batch):
        """Add gradients; a pass that is stopped leaves what it has done until then."""
        for side in (self.mine, self.twin):
            with suppress(KeyboardInterrupt):
                side.backward(batch)
        self.stage = "scaled"

    @precondition(lambda self: self.stage == "scaled" and self.has_grads())
    @rule(look=st.booleans())
    def unscale_and_step(self, look):
        if not self.has_grads():
            return
        mine, twin = self.each(lambda side: side.unscale())
        assert mine == twin
        self.stage = "true"
        if look and mine:
            self.agree()
        self.each(lambda side: side.step() if mine else side.skip())
        self.each(lambda side: side.update())
        if mine:
            self.agree()

    def has_grads(self):
        return any(p.grad is not None for p in self.twin.params)

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none):
        self.each(lambda side: side.model.zero_grad(set_to_none))
        self.stage = "empty"
        self.agree()

    @rule(i=PLACES, how=st.sampled_from(list(WRITES)))
    def write_weight(self, i, how):
        self.each(lambda side: WRITES[how](side.params[i % len(side.params)]))
        self.agree()

    @precondition(lambda self: self.stage == "empty")
    @rule()
    def load_model(self):
        def load(side):
            state = plain(dict(side.model.state_dict()))
            side.load_model({k: v / 2 if v.is_floating_point() else v for k, v in state.items()})

        self.each(load)
        self.agree()

    @rule()
    def save(self):
        self.saved = copy.deepcopy(self.each(lambda side: side.opt.state_dict()))

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load_optimizer(self):
        for side, state in zip((self.mine, self.twin), copy.deepcopy(self.saved), strict=True):
            side.opt.load_state_dict(state)
        self.agree()

    @rule(i=PLACES, train=st.booleans())
    def freeze(self, i, train):
        self.each(lambda side: side.params[i % len(side.params)].requires_grad_(train))

    @precondition(lambda self: self.stage == "empty")
    @rule()
    def give_back_and_hand_over(self):
        before = plain(dict(self.mine.model.state_dict()))
        self.each(lambda side: side.detach())
        assert_same(plain(dict(self.mine.model.state_dict())), before)
        if not any(p.requires_grad for p in self.mine.params):  # such a model is refused
            self.each(lambda side: [p.requires_grad_(True) for p in side.params])
        self.each(lambda side: side.attach())
        self.agree()


class HalfLaws(Laws):
    dtypes, flat = [torch.float16, torch.bfloat16], [True]
    twin_of = staticmethod(lambda setup: Mixed(setup._replace(flat=False)))


class HandLaws(Laws):
    dtypes, opts = [torch.float16, torch.bfloat16], ["torch SGD", "torch AdamW"]
    twin_of = staticmethod(ByHand)


MORE = int(os.environ.get("MORE_PROGRAMS", "0"))


@pytest.mark.parametrize("laws, n", [(Laws, 80), (HalfLaws, 50), (HandLaws, 50)])
def test_any_program_keeps_the_laws(laws, n):
    how = dict(max_examples=n * (MORE or 1), stateful_step_count=14, derandomize=not MORE)
    how |= dict(phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck))
    how |= dict(deadline=None, database=None, report_multiple_bugs=False)
    with small_chunks(16):
        stateful.run_state_machine_as_test(laws, settings=settings(**how))
