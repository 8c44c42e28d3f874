"""The laws of an iteration: the verbs of a training step, in any order that hypothesis makes up.

Two sides do the same, and agree after each verb, bit for bit: `MixedStep` or `MasterOptimizer` in
float32, and plain PyTorch or fastai, which know of no scale and no master; in 16 bits, flat masters
and a master for each parameter. What a rule's precondition leaves out is not promised; a comment
says why. A failure prints its program, made small.

More programs, others each time: `MORE_PROGRAMS=20 pytest tests/test_state_machine.py` makes twenty
times as many.
"""

import copy
import math
import os
import sys
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import fastai.optimizer
import inside
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tiny import plain
from torch import nn
from torch.nn.functional import cross_entropy

from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.step import MixedStep
from mixedfp.testing import assert_same

torch.set_num_threads(1)  # these tensors are tiny: a second thread would only be waited for

# What is trained


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


class Stop(Exception):
    """The user has stopped a pass."""


class Batch(NamedTuple):
    """Inputs and classes, and what comes of them."""

    seed: int
    path: str
    overflows: bool = False
    stop: str | None = None  # in the "forward" or "backward" pass

    def loss(self, model):
        """Return the loss of `model`."""
        rng = torch.Generator().manual_seed(self.seed)
        x, y = torch.randn(4, 5, generator=rng), torch.randint(2, (4,), generator=rng)
        x.requires_grad_()  # so there is a backward pass though all that is used is frozen
        hook = model.head.register_forward_hook(self._stop) if self.stop else None
        try:
            loss = cross_entropy(model(x, self.path).float(), y)
        finally:
            if hook is not None:
                hook.remove()
        return loss * math.inf if self.overflows else loss

    def _stop(self, module, args, out):
        if self.stop == "forward":
            raise Stop
        out.register_hook(_raise_stop)


def _raise_stop(grad):
    raise Stop


OPTIMIZERS = {
    "fastai SGD": partial(fastai.optimizer.SGD, lr=0.1, mom=0.9, wd=0.1),
    "fastai Adam": partial(fastai.optimizer.Adam, lr=0.01, wd=0.1),
    "torch SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "torch AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}
TORCHS = [name for name in OPTIMIZERS if name.startswith("torch")]


class Setup(NamedTuple):
    """How a program trains."""

    opt: str
    scaler: type | None
    scale: float = 2.0**4  # of the loss, at first
    way: str = "each"  # "flat", "large": stepped in one pass; by hand: "stream"
    nobody_looks: bool = False  # at gradients but the step: it is exclusive
    device_decides: bool = False  # alone, whether a step is skipped
    has_scalar: bool = False  # the model has a parameter of no dimension
    dtype: torch.dtype | None = None  # of the model; None: plain training

    @property
    def is_torchs(self):
        """Whether the optimizer is one of torch."""
        return self.opt in TORCHS


def setups(**kwargs):
    """Make up setups with these fields."""
    kwargs |= dict(scale=st.sampled_from([2.0**4, 2.0**10]))
    kwargs |= dict(has_scalar=st.sampled_from([False, False, False, True]))
    return st.builds(Setup, **kwargs)


BATCHES = st.builds(
    Batch,
    seed=st.integers(0, 3),
    path=st.sampled_from(["once", "twice", "past", "head"]),
    overflows=st.sampled_from([False, False, False, True]),
    stop=st.sampled_from([None, None, None, None, "forward", "backward"]),
)
SCALES = st.sampled_from([2.0**2, 2.0**6])
PLACES, LINES = st.integers(0, 8), st.integers(1, 500)  # of parameters; of code

# The sides


class Plain:
    """Plain training in 32 bits, with the laws of skipped steps written out."""

    factor = 1.0  # what gradients are multiplied with
    hidden = fills = False  # nobody is to look at gradients; None may stand for zeros

    def __init__(self, setup, by_hand=False):
        self.setup, self.by_hand = setup, by_hand
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.model = Net(setup.has_scalar)
        self.params = list(self.model.parameters())
        self.opt = self.make_opt()
        self.is_scaled = False  # a loss of this iteration was
        self.kept = None  # the buffers as they were when the iteration began

    def make_opt(self):
        """Make an optimizer."""
        return OPTIMIZERS[self.setup.opt](self.params)

    # what one sees

    def weights(self):
        """Return the weights and the buffers."""
        return [p.detach() for p in self.params], dict(self.model.named_buffers())

    def grads(self):
        """Return the true gradients."""
        return [None if p.grad is None else p.grad.detach() / self.factor for p in self.params]

    def opt_state(self):
        """Return the optimizer's state, of each parameter."""
        state, others = plain(self.opt.state_dict()), ("loss_scale", "payback")
        return {k: v for k, v in state.items() if k not in others}

    def model_state(self):
        """Return what a file gets."""
        return plain(dict(self.model.state_dict()))

    def hypers(self):
        """Return the optimizer's numbers, for each group."""
        if not self.setup.is_torchs:
            return plain(self.opt.hypers)
        return [
            {k: v for k, v in group.items() if k != "params"} for group in self.opt.param_groups
        ]

    def has_grads(self):
        """Whether any parameter has a gradient."""
        return any(p.grad is not None for p in self.params)

    # the verbs

    def backward(self, batch):
        """Add the gradients of a batch to those that are there."""
        if self.setup.scaler is not None:
            # by hand there is no verb that ends an iteration but a step
            if self.kept is None or (self.by_hand and not self.has_grads()):
                self.keep_buffers()
        loss = batch.loss(self.model)
        self.is_scaled = self.setup.scaler is not None
        loss.backward()

    def keep_buffers(self):
        """Remember the buffers as they are."""
        self.kept = {k: b.clone() for k, b in self.model.named_buffers()}

    def unscale(self):
        """Say whether the gradients may be stepped: all are finite, or none was ever scaled."""
        return not self.is_scaled or all(
            bool(g.isfinite().all()) for g in self.grads() if g is not None
        )

    def step(self, by_trainer=False):
        """Step the weights."""
        self.opt.step()

    def skip(self):
        """A skipped step is no step: buffers get the bits they had when the iteration began."""
        for k, b in (self.kept or {}).items():
            self.model.get_buffer(k).copy_(b)
        self.kept = None

    def update(self):
        """End the iteration: its buffers stay as they are."""
        self.kept, self.is_scaled = None, False

    def step_or_skip(self):
        """Do what is right, by hand; PyTorch's scaler tells nobody that a step is skipped."""
        if self.unscale():
            self.step()
        elif self.setup.scaler is LossScaler:
            self.skip()
        self.update()

    def zero_grad(self, set_to_none=None):
        """Clear the gradients; None: as the optimizer's library does."""
        if set_to_none is None:
            self.opt.zero_grad()
        else:
            self.model.zero_grad(set_to_none)
        if self.by_hand:
            self.kept = None

    # what others do

    def set_rate(self, lr):
        """Set the learning rate."""
        if not self.setup.is_torchs:
            self.opt.set_hyper("lr", lr)
            return
        for group in self.opt.param_groups:
            group["lr"] = lr

    def load_model(self, state):
        """Load weights and buffers; no skip goes back before that."""
        self.model.load_state_dict(state)
        if self.kept is not None:
            self.keep_buffers()

    def load_scale(self, scale):
        """Load the scaler's state of now, with another scale."""

    def detach(self):
        """Be trained plainly from here on."""
        self.update()

    def attach(self, opt=None):
        """Be trained as before, by another optimizer if one is given."""
        self.opt = self.opt if opt is None else opt


class Mixed(Plain):
    """The same through `MixedStep`."""

    def __init__(self, setup):
        super().__init__(setup)
        self.scaler = LossScaler(
            init_scale=setup.scale,
            growth_interval=2,
            max_scale=2.0**12,
            enabled=setup.scaler is not None,
        )
        self.mixed = MixedStep(setup.dtype, setup.way != "each", self.scaler, compiled=False)
        inside.be_exclusive(self.mixed, setup.nobody_looks)
        inside.decide_on_device(self.mixed, setup.device_decides)
        self.users_opt, self.hook = self.opt, None
        self.attach()

    def backward(self, batch):
        """Add the gradients of a batch, multiplied by the scale, to those that are there."""
        self.mixed.cast(torch.zeros(1), training=True)
        loss = self.mixed.uncast(batch.loss(self.model))
        loss = self.mixed.scale(loss)
        self.factor, self.hidden = float(self.scaler.used_scale), inside.is_exclusive(self.mixed)
        loss.backward()

    def unscale(self):
        """Take the gradients to the masters."""
        is_fine = self.mixed.unscale()
        self.factor, self.hidden = 1.0, inside.is_exclusive(self.mixed)
        return is_fine

    def step(self, by_trainer=False):
        """Step the masters; a trainer, such as fastai's, calls the optimizer's own step."""
        (self.opt if by_trainer else self.mixed).step()

    def skip(self):
        """Take back what the batches of this iteration wrote into buffers."""
        self.mixed.skip()

    def update(self):
        """End the iteration."""
        self.mixed.update()

    def zero_grad(self, set_to_none=None):
        """Clear the gradients; where nobody looks, None may stand for zeros from here on."""
        self.opt.zero_grad(set_to_none=set_to_none)
        is_none = self.setup.is_torchs if set_to_none is None else set_to_none
        self.hidden = self.fills = self.hidden and not is_none
        self.factor = 1.0

    def look(self):
        """Have the gradients made true, as by somebody who looks."""
        inside.materialize(self.opt)
        self.hidden = self.fills = False

    def load_model(self, state):
        """Load weights and buffers."""
        self.model.load_state_dict(state)

    def load_scale(self, scale):
        """Load the scaler's state of now, with another scale."""
        self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": scale})

    def detach(self):
        """Give model and optimizer back."""
        self.mixed.detach()
        self.opt, self.hook, self.factor = self.users_opt, None, 1.0
        self.hidden = self.fills = False

    def attach(self, opt=None):
        """Hand model and optimizer over."""
        self.users_opt = self.users_opt if opt is None else opt
        self.mixed.attach(self.model)
        self.opt = self.mixed.wrap_optimizer(self.users_opt)

    def toggle_hook(self):
        """Be called at each step, or no longer."""
        if self.hook is None:
            self.hook = self.opt.register_step_post_hook(lambda *args: None)
        else:
            self.hook.remove()
            self.hook = None


class ByHand(Plain):
    """The same through `MasterOptimizer`, with a scaler of ours, of PyTorch, or without one."""

    def __init__(self, setup):
        super().__init__(setup, by_hand=True)
        self.scaler = None
        self.attach()

    def backward(self, batch):
        """Add the gradients of a batch, multiplied by the scale, to those that are there."""
        loss = self.scaler.scale(batch.loss(self.model))
        # ours has one scale an iteration: one that is loaded in its middle waits for the next
        self.factor = float(getattr(self.scaler, "used_scale", self.scaler.get_scale()))
        loss.backward()

    def unscale(self):
        """Unscale the gradients; whether they are finite is for the scaler to know."""
        self.scaler.unscale_(self.opt)
        self.factor = 1.0

    def step_or_skip(self):
        """Step the masters, or skip the step."""
        self.scaler.step(self.opt)
        self.scaler.update()
        self.factor = 1.0

    def zero_grad(self, set_to_none=None):
        """Clear the gradients."""
        self.opt.zero_grad(set_to_none is not False)
        self.factor = 1.0

    load_model, load_scale = Mixed.load_model, Mixed.load_scale

    def detach(self):
        """Give model and optimizer back."""
        self.opt = self.opt.restore()

    def attach(self, opt=None):
        """Hand model and a new optimizer over, with the state of the last one."""
        new = self.make_opt() if opt is None else opt
        state, setup = self.opt.state_dict(), self.setup
        if self.scaler is None or not isinstance(self.scaler, LossScaler):
            # PyTorch's would ask the optimizer that was given back
            make = setup.scaler or partial(LossScaler, enabled=False)
            self.scaler = make("cpu", init_scale=setup.scale, growth_interval=2)
        kwargs = dict(flat_master=setup.way != "each", stream=setup.way == "stream")
        self.model, self.opt = with_masters(
            self.model, new, dtype=setup.dtype, compiled=False, **kwargs
        )
        if opt is None:
            self.opt.load_state_dict(state)


# The laws, whoever trains


class Laws(RuleBasedStateMachine):
    """What both sides do, and what is the same after it."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    def begin(self, mine, twin):
        """Have these sides."""
        self.mine, self.twin, self.setup = mine, twin, mine.setup
        # of the gradients: "empty"; "accumulating", scaled; "ready", unscaled and checked
        self.stage = "empty"
        self.is_fine = True  # what `unscale` said of the gradients
        self.saved = None  # states of both optimizers

    def each(self, do):
        """Do it on both sides; return what came of it."""
        return do(self.mine), do(self.twin)

    def compare(self, what):
        """Assert that both sides see the same."""
        assert_same(*self.each(lambda side: getattr(side, what)()), name=what)

    def is_finite(self):
        """Whether all gradients are."""
        return all(g is None or bool(g.isfinite().all()) for g in self.twin.grads())

    def add_gradients(self, batch):
        """Add those of a batch; a pass that is stopped leaves what it has done until then."""
        for side in (self.mine, self.twin):
            try:
                side.backward(batch)
            except Stop:
                assert batch.stop
        if batch.stop != "forward":
            self.stage = "accumulating"

    def take_opt_state(self):
        """Give the plain side the state of the other one's optimizer."""
        state = copy.deepcopy(self.mine.opt.state_dict())
        state.pop("loss_scale", None)
        self.twin.opt.load_state_dict(state)

    # what holds after each verb

    @invariant()
    def weights_are_the_same(self):
        self.compare("weights")

    @invariant()
    def gradients_are_the_same(self):
        if not self.mine.hidden:
            self.compare("grads")

    def teardown(self):
        """At any point model and optimizer can be had back, as if nothing had been."""
        try:
            if sys.exc_info()[0] is None:  # else that failure is the one to show
                self.give_back()
        finally:
            self.patch.undo()

    def give_back(self):
        """Compare all that there is."""
        self.compare("opt_state")
        self.compare("model_state")
        self.each(lambda side: side.detach())
        self.weights_are_the_same()
        self.gradients_are_the_same()
        self.compare("opt_state")

    # what anybody may do at any time

    # Not where None stands for zeros that nobody was to see: to make it None is no change.
    @precondition(lambda self: not self.mine.fills)
    @rule(set_to_none=st.booleans())
    def zero_grad_of_the_model(self, set_to_none):
        """This is no verb: the iteration goes on without the gradients so far."""
        self.each(lambda side: side.model.zero_grad(set_to_none))

    @precondition(lambda self: not self.mine.hidden)
    @rule(i=PLACES, how=st.sampled_from(["halve", "zero", "replace", "data", "none"]))
    def edit_gradient(self, i, how):
        # Not where there is none: beside scaled ones, nobody knows what it is multiplied with.
        def edit(side):
            p = side.params[i % len(side.params)]
            if p.grad is None:
                return
            if how == "halve":
                p.grad.mul_(0.5)
            elif how == "zero":
                p.grad.zero_()
            elif how == "replace":
                p.grad = p.grad * 0.5
            elif how == "data":
                p.grad.data = p.grad.data * 0.5
            else:
                p.grad = None

        self.each(edit)

    @rule(i=PLACES, how=st.sampled_from(["in place", "data"]))
    def write_weight(self, i, how):
        # Not `p.data.mul_`: no version counter shows it, and the next step writes over it.
        def write(side):
            p = side.params[i % len(side.params)]
            if how == "data":
                p.data = p.data * 0.5
            else:
                with torch.no_grad():
                    p.mul_(0.5)

        self.each(write)

    @rule(with_buffers=st.booleans())
    def load_model(self, with_buffers):
        """Load the model's state of now, changed."""

        def load(side):
            state = side.model_state()
            for k, v in state.items():
                if v.is_floating_point() and (with_buffers or "running" not in k):
                    v.mul_(0.5)
            side.load_model(state)

        self.each(load)

    @rule(what=st.sampled_from(["opt_state", "model_state", "hypers"]))
    def ask(self, what):
        self.compare(what)

    @rule(lr=st.sampled_from([0.05, 0.01]))
    def set_rate(self, lr):
        self.each(lambda side: side.set_rate(lr))

    @rule(i=PLACES, train=st.booleans())
    def freeze(self, i, train):
        self.each(lambda side: side.params[i % len(side.params)].requires_grad_(train))

    @rule()
    def save(self):
        self.saved = copy.deepcopy(self.each(lambda side: side.opt.state_dict()))

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load_optimizer(self):
        for side, state in zip((self.mine, self.twin), copy.deepcopy(self.saved), strict=True):
            side.opt.load_state_dict(state)

    @precondition(lambda self: self.setup.scaler is LossScaler)
    @rule(scale=SCALES)
    def load_scale(self, scale):
        """A checkpoint brings another scale, in the middle of an iteration maybe."""
        self.each(lambda side: side.load_scale(scale))


# MixedStep


class StepLaws(Laws):
    """cast → forward → uncast → scale → backward → unscale → step or skip → update → zero_grad."""

    @initialize(
        setup=setups(
            opt=st.sampled_from(list(OPTIMIZERS)),
            scaler=st.sampled_from([None, LossScaler, LossScaler]),
            way=st.sampled_from(["each", "flat", "large", "large", "large"]),
            nobody_looks=st.sampled_from([False, True, True]),
            device_decides=st.booleans(),
            dtype=st.just(torch.float32),
        )
    )
    def start(self, setup):
        if setup.way == "large":
            inside.everything_is_large(self.patch, chunk=7)
        else:
            inside.nothing_is_large(self.patch)
        self.begin(Mixed(setup), self.make_twin(setup))
        self.is_skipped_by_device = False  # which alone knows that the gradients are not fine
        self.is_stepped = False  # and not yet updated

    def make_twin(self, setup):
        """Make the other side."""
        return Plain(setup)

    # the verbs

    @precondition(lambda self: not self.is_stepped)  # `update` comes before the next iteration
    @rule(batch=BATCHES)
    def backward(self, batch):
        self.add_gradients(batch)

    @precondition(lambda self: not self.is_stepped)
    @rule()
    def unscale(self):
        mine, twin = self.each(lambda side: side.unscale())
        assert mine == twin or self.setup.device_decides and mine
        self.is_fine, self.is_skipped_by_device = twin, mine and not twin
        self.stage = "ready"

    # A skip is of the gradients that were checked: those that are stepped again are not.
    @precondition(lambda self: self.stage == "ready" and (self.is_finite() or not self.is_fine))
    @rule(by_trainer=st.booleans())
    def step(self, by_trainer):
        """Step, once more maybe; a trainer calls the optimizer's own step, and then `update`."""
        if self.is_fine:
            self.each(lambda side: side.step(by_trainer))
        else:
            self.twin.skip()
            if self.is_skipped_by_device:
                self.mine.step(by_trainer)
            else:
                self.mine.skip()
        self.is_stepped = True
        if by_trainer or not self.is_fine:
            self.update()

    @precondition(lambda self: self.is_stepped)
    @rule()
    def update(self):
        self.each(lambda side: side.update())
        self.is_stepped, self.is_fine = False, True

    @rule(set_to_none=st.sampled_from([None, False, True]))
    def zero_grad(self, set_to_none):
        self.each(lambda side: side.zero_grad(set_to_none))
        self.stage = "empty"

    @precondition(lambda self: not self.is_stepped)
    @rule(batch=BATCHES, by_trainer=st.booleans(), set_to_none=st.sampled_from([None, True]))
    def train(self, batch, by_trainer, set_to_none):
        """Do a whole iteration, with all verbs in their order."""
        self.backward(batch)
        self.unscale()
        if self.is_finite() or not self.is_fine:
            self.step(by_trainer)
            self.update()
        self.zero_grad(set_to_none)

    # what is special

    @precondition(lambda self: self.mine.hidden and self.stage != "accumulating")
    @rule()
    def look(self):
        """Somebody looks at gradients, though it was said that nobody does."""
        self.mine.look()

    @rule(exclusive=st.booleans())
    def be_exclusive(self, exclusive):
        """Others come who look at gradients, or go."""
        inside.be_exclusive(self.mine.mixed, exclusive)

    @precondition(lambda self: self.stage != "ready")
    @rule(on_device=st.booleans())
    def decide_on_device(self, on_device):
        self.setup = self.setup._replace(device_decides=on_device)
        inside.decide_on_device(self.mine.mixed, on_device)

    @precondition(lambda self: self.setup.is_torchs)
    @rule()
    def hook(self):
        """Somebody wants to be called at each step, or no longer: no one pass then."""
        self.mine.toggle_hook()

    @rule(new=st.booleans())
    def detach(self, new):
        """Have model and optimizer back; hand them over again, maybe with another optimizer."""
        self.give_back()
        self.each(lambda side: side.attach(side.make_opt() if new else None))
        self.saved = None if new else self.saved
        self.stage = "ready" if self.twin.has_grads() else "empty"
        self.is_fine, self.is_stepped = True, False

    @rule(verb=st.sampled_from(["unscale", "step", "zero_grad"]), line=LINES, attach=st.booleans())
    def interrupted(self, verb, line, attach):
        """A key is pressed; gradients are cleared, and the next iteration is as any other.

        A step may be half done: each weight is as before or as after it, and the next `attach`, as
        at the beginning of a fit, goes on from there.
        """
        if verb == "step" and not (self.stage == "ready" and self.is_fine and self.is_finite()):
            return
        before = self.twin.model_state()
        with suppress(KeyboardInterrupt), inside.Interrupt(line):
            getattr(self.mine, verb)()
        if verb == "step":
            self.twin.step()
            now, after = self.mine.model_state(), self.twin.model_state()
            assert all(((now[k] == before[k]) | (now[k] == after[k])).all() for k in now)
        self.each(lambda side: side.zero_grad(True))
        if attach or verb == "step":
            self.mine.attach()
            self.twin.update()
        if verb == "step":  # of the optimizer's state a part may be stepped as well
            self.twin.model.load_state_dict(self.mine.model_state())
            self.take_opt_state()
        self.stage, self.is_stepped = "empty", False


class HalfStepLaws(StepLaws):
    """In 16 bits: flat masters, and a master for each parameter."""

    @initialize(
        setup=setups(
            opt=st.sampled_from(list(OPTIMIZERS)),
            scaler=st.just(LossScaler),
            way=st.sampled_from(["flat", "large", "large", "large"]),
            nobody_looks=st.sampled_from([False, True, True]),
            device_decides=st.booleans(),
            dtype=st.sampled_from([torch.float16, torch.bfloat16]),
        )
    )
    def start(self, setup):
        super().start(setup)

    def make_twin(self, setup):
        """Make the other side."""
        return Mixed(setup._replace(way="each", nobody_looks=False, device_decides=False))

    interrupted = None  # at other lines


# MasterOptimizer


class HandLaws(Laws):
    """forward → scale → backward → unscale_ → step → update → zero_grad."""

    @initialize(
        setup=setups(
            opt=st.sampled_from(TORCHS),
            scaler=st.sampled_from([None, LossScaler, LossScaler, torch.amp.GradScaler]),
            way=st.sampled_from(["each", "flat", "stream"]),
            dtype=st.just(torch.float32),
        )
    )
    def start(self, setup):
        self.begin(ByHand(setup), self.make_twin(setup))

    def make_twin(self, setup):
        """Make the other side."""
        return Plain(setup, by_hand=True)

    # the verbs

    # PyTorch's scaler adds scaled gradients to unscaled ones; ours brings them to one scale.
    @precondition(
        lambda self: (
            self.setup.scaler is not torch.amp.GradScaler or self.stage in ("empty", "accumulating")
        )
    )
    @rule(batch=BATCHES)
    def backward(self, batch):
        self.add_gradients(batch)

    # A scaler divides once an iteration, and takes gradients without a new loss for scaled ones.
    @precondition(lambda self: self.stage == "accumulating" and self.twin.has_grads())
    @rule()
    def unscale(self):
        self.each(lambda side: side.unscale())
        self.stage = "ready"

    @precondition(
        lambda self: (
            self.stage in ("accumulating", "ready")
            and self.twin.has_grads()
            and (self.setup.scaler is not None or self.is_finite())
        )
    )
    @rule()
    def step(self):
        self.each(lambda side: side.step_or_skip())
        self.stage = "stepped"

    @precondition(
        lambda self: self.setup.scaler is None and self.stage == "stepped" and self.is_finite()
    )
    @rule()
    def step_again(self):
        self.step()

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none):
        if self.setup.scaler is torch.amp.GradScaler and self.stage == "ready":
            self.mine.scaler.update()  # else it does not unscale again
        self.each(lambda side: side.zero_grad(set_to_none))
        self.stage = "empty"

    @rule(batch=BATCHES, set_to_none=st.booleans())
    def train(self, batch, set_to_none):
        """Do a whole iteration, with all verbs in their order."""
        self.zero_grad(set_to_none)
        self.add_gradients(batch)
        if self.stage == "accumulating" and self.twin.has_grads():
            if self.setup.scaler is not None or self.is_finite():
                self.step()

    # what is special

    @rule(new=st.booleans())
    def detach(self, new):
        """Have model and optimizer back; hand them over again, maybe with another optimizer."""
        self.zero_grad(True)  # no scaler knows those of another optimizer
        self.give_back()
        self.each(lambda side: side.attach(side.make_opt() if new else None))
        self.saved = None if new else self.saved

    @precondition(lambda self: self.setup.scaler is not torch.amp.GradScaler)
    @rule(verb=st.sampled_from(["unscale", "step_or_skip", "zero_grad"]), line=LINES)
    def interrupted(self, verb, line):
        """A key is pressed; gradients are cleared, and the next iteration is as any other."""
        is_ready = self.stage in ("accumulating", "ready") and self.twin.has_grads()
        if verb != "zero_grad" and not (is_ready and self.is_finite()):
            return
        before = self.twin.model_state()
        with suppress(KeyboardInterrupt), inside.Interrupt(line):
            getattr(self.mine, verb)()
        if verb == "step_or_skip":
            self.twin.step_or_skip()
            now, after = self.mine.model_state(), self.twin.model_state()
            assert all(((now[k] == before[k]) | (now[k] == after[k])).all() for k in now)
            self.twin.model.load_state_dict(self.mine.model_state())
            self.take_opt_state()
        self.each(lambda side: side.zero_grad(True))
        self.stage = "empty"


class HalfHandLaws(HandLaws):
    """In 16 bits: flat masters, and a master for each parameter."""

    @initialize(
        setup=setups(
            opt=st.sampled_from(TORCHS),
            scaler=st.sampled_from([None, LossScaler, LossScaler]),
            way=st.sampled_from(["flat", "stream"]),
            dtype=st.sampled_from([torch.float16, torch.bfloat16]),
        )
    )
    def start(self, setup):
        super().start(setup)

    def make_twin(self, setup):
        """Make the other side."""
        return ByHand(setup._replace(way="each"))

    interrupted = None  # at other lines


MORE = int(os.environ.get("MORE_PROGRAMS", "0"))


def run(machine, n, steps=16):
    """Run `n` programs of `machine`."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=n * (MORE or 1),
            stateful_step_count=steps,
            derandomize=not MORE,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
            database=None,
            report_multiple_bugs=False,
        ),
    )


def test_mixed_step_is_plain_training():
    run(StepLaws, 250)


def test_mixed_step_in_16_bits_is_the_same_flat():
    run(HalfStepLaws, 120)


def test_master_optimizer_is_plain_training():
    run(HandLaws, 150)


def test_master_optimizer_in_16_bits_is_the_same_flat():
    run(HalfHandLaws, 80)
