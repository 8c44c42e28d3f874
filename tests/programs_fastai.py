"""Random programs of fastai: a `Learner`, its fits, and what happens in them and between them.

In float32 a program has to give plain fastai's bits; in 16 bits flat masters those of a master for
each parameter. `SkipOverflow` is what a scale does in float32: an overflown batch is left out.
"""

import copy
import pickle
import warnings
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from fastai.callback.core import (
    Callback,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
)
from fastai.callback.training import GradientAccumulation, GradientClip
from nets import Net
from programs import in_groups, random_groups, random_net
from programs_by_hand import EDITS, edit_grad, write
from tiny import OPTIMIZERS, make_dls, make_learner, opt_state, plain, weights

from mixedfp.callback import MixedPrecision
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same


class SkipOverflow(Callback):
    """Leave out a step whose gradients are not finite, and put the buffers back."""

    order, kept, scaled = 10, None, False

    def before_train(self):
        self.kept = None

    def before_batch(self):
        if self.training and self.kept is None:
            self.kept = [
                (m, k, plain(b)) for m in self.model.modules() for k, b in m._buffers.items()
            ]

    def before_backward(self):
        self.scaled = True

    def before_step(self):
        grads = [p.grad for p in self.opt.all_params(with_grad=True).itemgot(0)]
        if not all(g.isfinite().all() for g in grads):
            for m, k, b in self.kept:
                m._buffers[k] = b
            raise CancelStepException

    def after_step(self):
        self.kept, self.scaled = None, False

    def after_cancel_batch(self):
        if not self.scaled:
            self.kept = None


class Program(NamedTuple):
    """What happens, to which network and optimizer."""

    events: tuple = ()
    net: Net = Net()
    opt: str = "sgd"
    groups: tuple = ((0, 1, 2, 3),)  # of parameters, by their places
    frozen: tuple = ()
    scale: float | None = None
    dtype: str = "bfloat16"  # of the second law
    cut: int = 2**18  # numbers in a chunk

    def split(self, model):
        """Return the groups of parameters."""
        return in_groups(self.groups, list(model.parameters()))

    def build(self):
        """Make the model, with what is frozen from the start."""
        model = self.net.build()
        params = list(model.parameters())
        for i in self.frozen:
            params[i % len(params)].requires_grad_(False)
        if self.scale is not None:  # a scaler unscales its optimizer's gradients, and no others
            held = {i % len(params) for group in self.groups for i in group}
            for i, p in enumerate(params):
                p.requires_grad_(p.requires_grad and i in held)
        return model

    def run(self, dtype=None, flat=False):
        """Return what is seen in a run: plain where `dtype` is None."""
        with TemporaryDirectory() as path, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = Run(self, dtype, flat, path)
            for i, event in enumerate(self.events):
                run.n = i
                event.do(run)
            run.see_all()
            if dtype is not None:
                run.learn.to_fp32()
                run.see_all()  # to_fp32 changes nothing
                assert_same(list(run.log[-1].values()), list(run.log[-4].values()), name="to_fp32")
                del run.log[-3:]
            return run.log


class Run:
    """A program under way."""

    def __init__(self, program, dtype, flat, path):
        self.program, self.dtype, self.flat, self.log, self.n = program, dtype, flat, [], 0
        x, y = program.net.batch(0, 16)
        dls = make_dls(x, y, n_valid=4, bs=4)
        self.learn = make_learner(
            program.opt, program.build, program.split, dls, path=path, cbs=self.callbacks()
        )
        self.learn.create_opt()
        torch.manual_seed(0)  # of dropout

    def callbacks(self):
        """Return what makes the learner this run's."""
        program = self.program
        if self.dtype is None:
            return [] if program.scale is None else [SkipOverflow()]
        cb = MixedPrecision(dtype=self.dtype, flat_master=self.flat)
        enabled = program.scale is not None
        cb.mixed.scaler = LossScaler(
            "cpu", init_scale=program.scale or 1.0, growth_interval=4, enabled=enabled
        )
        return [cb]

    @property
    def params(self):
        """The model's parameters."""
        return list(self.learn.model.parameters())

    def param(self, i):
        """Return parameter `i`, counted around."""
        return self.params[i % len(self.params)]

    def see(self, what, value):
        """Remember what is seen."""
        self.log.append({f"{what} at {self.n}": plain(value)})

    def see_all(self):
        """Remember all that training changes, as files and users get it."""
        self.see("trained", [p.requires_grad for p in self.params])
        self.see("optimizer", opt_state(self.learn))
        self.see("model", weights(self.learn))

    def see_half(self):
        """Remember what the model computes with, and the scale."""
        if self.dtype in (torch.float16, torch.bfloat16):
            self.see("half weights", [p.detach() for p in self.params if p.numel()])
            self.see("scales", self.learn.mp_cb.scales)


# What happens in a fit: `At` an event of a batch


class Overflow(NamedTuple):
    """Let the gradients become inf or nan."""

    def do(self, run):
        if run.program.scale is not None:
            run.learn.loss_grad = run.learn.loss_grad * float("inf")


class Cancel(NamedTuple):
    """Call something off."""

    what: str = "batch"

    def do(self, run):
        raise CANCELS[self.what]


CANCELS = dict(
    step=CancelStepException,
    batch=CancelBatchException,
    train=CancelTrainException,
    epoch=CancelEpochException,
    fit=CancelFitException,
    all=KeyboardInterrupt,
)


class EditGrad(NamedTuple):
    """Write into a gradient, or put another one into its place."""

    i: int = 0
    how: str = "mul_"

    def do(self, run):
        edit_grad(run.param(self.i), self.how)


class Look(NamedTuple):
    """Look at everything."""

    def do(self, run):
        run.see_all()


class SeeGrads(NamedTuple):
    """Look at the gradients."""

    def do(self, run):
        run.see("grads", [p.grad for p in run.params])


class FreezeTo(NamedTuple):
    """Freeze all groups but those from `n` on."""

    n: int = 0

    def do(self, run):
        if abs(self.n) < len(run.learn.opt.param_lists):  # else everything is frozen
            run.learn.freeze_to(self.n)


class Freeze(NamedTuple):
    """Freeze a parameter by hand, or train it."""

    i: int = 0
    train: bool = False

    def do(self, run):
        p = run.param(self.i)
        is_held = any(p is q for ps in run.learn.opt.param_lists for q in ps)
        if is_held or run.program.scale is None:  # nobody unscales what no optimizer has
            p.requires_grad_(self.train)


class Write(NamedTuple):
    """Write into a weight."""

    i: int = 0
    how: str = "copy_"

    def do(self, run):
        write(run.param(self.i), self.i, self.how)


class ZeroGrad(NamedTuple):
    """Clear the gradients."""

    how: str = "opt"

    def do(self, run):
        {"opt": run.learn.opt.zero_grad, "model": run.learn.model.zero_grad}[self.how]()


class CreateOpt(NamedTuple):
    """Make the optimizer anew."""

    def do(self, run):
        run.learn.create_opt()


class At(NamedTuple):
    """Do something at an event of a batch."""

    what: tuple = Look()
    event: str = "after_batch"
    batch: int = 1
    order: int = 60

    def callback(self, run):
        """Return the callback: it has one method, so that ours knows which events are looked at."""

        def f(cb):
            if cb.training and cb.iter == self.batch:
                self.what.do(run)

        return type("At", (Callback,), {self.event: f, "order": self.order})()


class Fit(NamedTuple):
    """Train an epoch."""

    inside: tuple = ()
    schedule: str = "fit"
    lr: float | str = 0.05  # or "slice", or "list": a rate for each group
    wd: float | None = None
    clip: float | None = None
    accumulate: int | None = None  # samples a step
    reset_opt: bool = False

    def do(self, run):
        learn = run.learn
        cbs = [] if self.clip is None else [GradientClip(self.clip)]
        cbs += [] if self.accumulate is None else [GradientAccumulation(self.accumulate)]
        cbs += [at.callback(run) for at in self.inside]
        rates = np.linspace(0.01, 0.1, len(learn.opt.param_lists)).tolist()
        lr = {"list": rates, "slice": slice(0.01, 0.1)}.get(self.lr, self.lr)
        try:
            getattr(learn, self.schedule)(1, lr, wd=self.wd, cbs=cbs, reset_opt=self.reset_opt)
        except KeyboardInterrupt:
            run.see("stopped", True)
        if run.program.scale is None:  # else ours shows the last loss that was finite
            run.see("losses", [list(values) for values in learn.recorder.values])
        run.see_half()


# What happens between fits


class Save(NamedTuple):
    """Write a checkpoint."""

    def do(self, run):
        run.learn.save("checkpoint")


class Load(NamedTuple):
    """Go back to the checkpoint, if there is one."""

    with_opt: bool = True

    def do(self, run):
        if (run.learn.path / "models" / "checkpoint.pth").exists():
            run.learn.load("checkpoint", with_opt=self.with_opt)


class Predict(NamedTuple):
    """Validate and predict."""

    def do(self, run):
        run.see("validation", list(run.learn.validate()))
        run.see("predictions", run.learn.get_preds()[0])


class FindRate(NamedTuple):
    """Look for a learning rate."""

    def do(self, run):
        run.learn.lr_find(num_it=3, show_plot=False, suggest_funcs=None)


class ThereAndBack(NamedTuple):
    """Go to 32 bits and back."""

    def do(self, run):
        if run.dtype is not None:
            run.learn.to_fp32().add_cb(run.callbacks()[0])


class Copy(NamedTuple):
    """Go on with a copy of the learner."""

    how: str = "deepcopy"

    def do(self, run):
        if self.how == "pickle" and run.program.net.can_be_pickled:
            run.learn = pickle.loads(pickle.dumps(run.learn))
        else:
            run.learn = copy.deepcopy(run.learn)


# Programs made up


def inside(rng, scaled):
    """Return what happens in a fit."""
    at = dict(batch=rng.randrange(3), order=rng.choice([5, 60]))
    i = rng.randrange(40)
    if scaled and rng.random() < 0.4:
        return At(Overflow(), "after_loss", **at)
    unseen = rng.choice(["before_batch", "after_pred", "after_loss", "after_batch"])
    anywhere = rng.choice([unseen, unseen, "after_backward", "before_step", "after_step"])
    return rng.choice([
        lambda: At(Cancel(rng.choice(["batch", "batch", "train", "epoch", "fit"])), anywhere, **at),
        lambda: At(Cancel("step"), "before_step", **at),
        lambda: At(Cancel("all"), anywhere, **at),
        lambda: At(EditGrad(i, rng.choice(EDITS)), "before_step", at["batch"], 60),
        lambda: At(EditGrad(i, rng.choice(EDITS)), "after_backward", **at),
        lambda: At(SeeGrads(), "before_step", at["batch"], 60),
        lambda: At(Look(), anywhere, **at),
        lambda: At(FreezeTo(rng.choice([0, -1, 1])), unseen, **at),
        lambda: At(Freeze(i, rng.random() < 0.5), unseen, **at),
        lambda: At(Write(i, rng.choice(WRITES)), anywhere, **at),
        lambda: At(Write(i, rng.choice(WRITES)), unseen, **at),
        lambda: At(ZeroGrad(rng.choice(["opt", "model"])), anywhere, **at),
        lambda: At(CreateOpt(), rng.choice(["before_batch", "after_batch"]), **at),
    ])()  # fmt: skip


WRITES = ["copy_", "mul_", "part", "data"]


def fit(rng, scaled):
    """Return a fit."""
    return Fit(
        tuple(inside(rng, scaled) for _ in range(rng.choice([0, 0, 1, 1, 2]))),
        rng.choice(["fit", "fit", "fit_one_cycle", "fit_flat_cos"]),
        rng.choice([0.05, "slice", "list"]),
        rng.choice([None, 0.0, 0.5]),
        rng.choice([None, None, 0.1]),
        rng.choice([None, None, 6, 8]),
        rng.random() < 0.15,
    )


def between(rng, scaled):
    """Return something that happens between two fits."""
    i = rng.randrange(40)
    return rng.choice([
        lambda: fit(rng, scaled),
        lambda: FreezeTo(rng.choice([0, -1, -2, 1])),
        lambda: Freeze(i, rng.random() < 0.5),
        lambda: Write(i, rng.choice(WRITES)),
        lambda: Save(),
        lambda: Load(rng.random() < 0.7),
        lambda: Predict(),
        lambda: FindRate() if rng.random() < 0.3 else Look(),
        lambda: ThereAndBack(),
        lambda: Copy(rng.choice(["deepcopy", "pickle"])),
        lambda: CreateOpt(),
        lambda: ZeroGrad(rng.choice(["opt", "model"])),
    ])()  # fmt: skip


def with_fastai(rng):
    """Return the program that `rng`, a `random.Random`, draws."""
    net = random_net(rng)
    scaled = rng.random() < 0.5
    events = [fit(rng, scaled)]
    for _ in range(rng.randint(0, 3)):
        events.append(between(rng, scaled))
    if len(events) > 1:
        events.append(fit(rng, scaled))
    return Program(
        tuple(events),
        net,
        rng.choice(list(OPTIMIZERS)),
        random_groups(rng, net)[0],
        tuple(rng.sample(range(len(list(net.build().parameters()))), rng.choice([0, 0, 0, 1, 2]))),
        2.0 ** rng.choice([4, 9, 16]) if scaled else None,
        rng.choice(["float16", "bfloat16"]),
        rng.choice([16, 64, 2**18]),
    )
