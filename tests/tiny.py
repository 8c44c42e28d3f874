"""Tiny learners for the tests of the fastai callback: seeded, silent, quick."""

import copy
import os
import warnings
from functools import cache, partial
from tempfile import TemporaryDirectory
from typing import NamedTuple

import fastai.callback.schedule  # noqa: F401, gives Learner fit_one_cycle, fine_tune, lr_find
import inside
import torch
from fastai.basics import Callback, DataLoaders, Learner, params
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.core import (
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
)
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import SGD, Adam, Lamb, Larc, OptimWrapper, QHAdam, RAdam, RMSProp, ranger
from torch import nn

from mixedfp.callback import MixedPrecision

DEVICE = os.environ.get("MIXEDFP_TEST_DEVICE", "cpu")  # of learners; `make test-cuda` sets it
torch.set_num_threads(1)  # these tensors are tiny: a second thread would only be waited for

# Optimizers


def torch_optimizer(cls, **kwargs):
    """Return fastai's wrapper of the optimizer `cls` of torch.optim."""
    return partial(OptimWrapper, opt=partial(cls, **kwargs))


ELEMENTWISE = {
    "sgd": partial(SGD, mom=0.9),
    "sgd_l2": partial(SGD, mom=0.9, decouple_wd=False),
    "adam": Adam,
    "rmsprop": partial(RMSProp, mom=0.9),
    "radam": RAdam,
    "qhadam": QHAdam,
    "ranger": partial(ranger, k=3),
    "torch_sgd": torch_optimizer(torch.optim.SGD, momentum=0.9),
    "torch_adamw": torch_optimizer(torch.optim.AdamW),
    "torch_rmsprop": torch_optimizer(torch.optim.RMSprop, momentum=0.9, alpha=0.9),
}
LAYERWISE = {"larc": Larc, "lars": partial(Larc, clip=False), "lamb": Lamb}
OPTIMIZERS = ELEMENTWISE | LAYERWISE

# Models: a few hundred parameters


class Scale(nn.Module):
    """Multiply by a parameter of no dimension."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.scale * x


def conv_net(dropout=0.0):
    """Return convolutions and norms, with a parameter of no dimension in between."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        Scale(),
        nn.Conv2d(4, 4, 3),
        nn.GroupNorm(2, 4),
        nn.LeakyReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(4, 2),
    )


dropout_net = partial(conv_net, 0.25)


class Sometimes(nn.Module):
    """A convolution net with a layer that only every third batch uses, and one that none does."""

    def __init__(self):
        super().__init__()
        self.body, self.head = conv_net()[:-1], nn.Linear(4, 2)
        self.sometimes, self.never = nn.Linear(4, 4), nn.Linear(4, 4)
        self.count = 0

    def forward(self, x):
        x = self.body(x)
        if self.training:
            self.count += 1
        if self.count % 3 == 2:
            x = x + self.sometimes(x)
        return self.head(x)


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.outer.weight = self.inner.weight
        self.body, self.norm, self.head = conv_net()[:-1], nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.norm(self.outer(torch.tanh(self.inner(self.body(x))))))


def one_group(model):
    """Return all parameters as one group, as fastai does without a splitter."""
    return list(model.parameters())


def three_groups(model):
    """Split `conv_net` in three."""
    return [params(model[:2]), params(model[2:6]), params(model[6:])]


def sometimes_groups(model):
    """Split `Sometimes` in two."""
    return [params(model.body) + params(model.never), params(model.sometimes) + params(model.head)]


# Data


def pictures(n, seed=0):
    """Return `n` noisy pictures of two classes and their labels."""
    noise = torch.randn(n, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    y = torch.arange(n) % 2
    return noise + y.view(n, 1, 1, 1) - 0.5, y


def make_dls(*tensors, n_valid=8, bs=8, n_inp=None, shuffle=False):
    """Return `DataLoaders` over the rows of `tensors`, the last `n_valid` for validation."""
    rows = list(zip(*tensors, strict=True))
    dls = DataLoaders.from_dsets(
        rows[:-n_valid], rows[-n_valid:], bs=bs, shuffle=shuffle, num_workers=0, device=DEVICE
    )
    if n_inp is not None:
        dls.n_inp = n_inp
    return dls


def be_distributed(rank, n=2):
    """Be one of `n` processes for fastai, as its launcher would tell."""
    from fastai.distributed import DistributedDL  # which needs accelerate

    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n))
    os.environ |= dict(MASTER_ADDR="localhost", MASTER_PORT="0", ACCELERATE_USE_CPU="1")
    DistributedDL._broadcast = _broadcast


def _broadcast(self, t, rank):
    """Do what fastai's does, which needs a GPU."""
    t = torch.tensor(t)
    torch.distributed.broadcast(t, rank)
    return t.tolist()


def picture_dls(n=32, **kwargs):
    """Return `DataLoaders` of `n` training pictures in batches of 8."""
    return make_dls(*pictures(n + 8), **kwargs)


# Learners


def silent(learn):
    """Return `learn` without its progress bar and its printed lines."""
    learn.logger = _say_nothing
    if hasattr(learn, "progress"):
        learn.remove_cb(learn.progress)
    return learn


def _say_nothing(*_):
    pass


def make_learner(
    opt="sgd",
    model=conv_net,
    splitter=one_group,
    dls=None,
    loss_func=None,
    seed=1,
    lr=0.05,
    **kwargs,
):
    """Return a silent learner whose weights follow from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = model() if not isinstance(model, nn.Module) else model
    return silent(
        Learner(
            picture_dls() if dls is None else dls,
            net,
            loss_func=CrossEntropyLossFlat() if loss_func is None else loss_func,
            opt_func=OPTIMIZERS[opt] if isinstance(opt, str) else opt,
            splitter=splitter,
            lr=lr,
            **kwargs,
        )
    )


class Do(Callback):
    """Call `f(learn)` at `event` of training, on batch `at` of every fit (None: each time)."""

    def __init__(self, event, f, at=None, order=60, training=True):
        self.event, self.f, self.at, self.order, self.only_training = event, f, at, order, training

    def __call__(self, event_name):
        if event_name == "before_fit":
            self.count = -1
        in_training = self.learn.training or event_name in ("before_fit", "after_fit")
        if event_name == "before_batch" and self.learn.training:
            self.count += 1
        if event_name == self.event and (in_training or not self.only_training):
            if self.at is None or self.count == self.at:
                self.f(self.learn)


# What is compared


def plain(o):
    """Return `o` with fastai's lists and wrappers as plain lists and dicts, its tensors cloned."""
    if isinstance(o, torch.Tensor):
        return o.detach().as_subclass(torch.Tensor).clone()
    if isinstance(o, dict):
        return {k: plain(v) for k, v in o.items()}
    if isinstance(o, str | bytes) or o is None or not hasattr(o, "__iter__"):
        return copy.copy(o)
    return [plain(v) for v in o]


def weights(learn):
    """Return a copy of the model's state: weights and buffers, 32-bit."""
    return plain(dict(learn.model.state_dict()))


def opt_state(learn):
    """Return a copy of the optimizer's state, per model parameter, and its hyper-parameters."""
    if learn.opt is None:
        return None
    state = plain(learn.opt.state_dict())
    for count in ("loss_scale", "payback"):  # of a precision, of flat masters
        state.pop(count, None)
    return state


def snapshot(learn):
    """Return copies of all that training changes."""
    return {
        "weights": weights(learn),
        "opt": opt_state(learn),
        "frozen": [not p.requires_grad for p in learn.model.parameters()],
    }


def masters(learn):
    """Return a copy of the float32 masters, in the order of the model's parameters."""
    masters = inside.masters_by_param(learn.mp_cb.mixed)
    return [masters[p].detach().clone() for p in learn.model.parameters()]


def bits(learn):
    """Return copies of weights, buffers, masters and optimizer state, without touching a thing."""
    model = {k: v.detach().clone() for k, v in learn.model.named_parameters()}
    model |= {k: v.detach().clone() for k, v in learn.model.named_buffers()}
    return {"model": model, "masters": masters(learn), "opt": opt_state(learn)}


# Ways to train: each changes the learner it gets; lr 0.1 and a weight decay that nobody overlooks


def fits(learn):
    """Fit, then fit in one cycle with discriminative rates."""
    learn.fit(1, 0.05, wd=0.5)
    learn.fit_one_cycle(1, slice(0.01, 0.1), wd=0.1)


def freezing(learn):
    """Freeze, fit, unfreeze, fit, freeze further up, fit: parameters keep their last gradients."""
    learn.freeze_to(-1)
    learn.fit(1, slice(0.1), wd=0.5)
    learn.unfreeze()
    learn.fit_one_cycle(1, slice(0.01, 0.1), wd=0.1)
    learn.freeze_to(-2)
    learn.fit(1, 0.02)


def fine_tuning(learn):
    """Train the head, then everything, as fastai does."""
    learn.fine_tune(1, 0.05, freeze_epochs=1, wd=0.5)


def unfreezing_in_a_callback(learn):
    """Unfreeze in the middle of a fit, from a callback."""
    learn.freeze()
    unfreeze = Do("before_batch", lambda learn: learn.unfreeze(), at=2)
    learn.fit(1, slice(0.01, 0.1), wd=0.5, cbs=unfreeze)
    learn.fit(1, 0.05)


def freezing_in_a_callback(learn):
    """Freeze in the middle of a fit, between two steps."""
    freeze = Do("after_batch", lambda learn: learn.freeze(), at=1)
    learn.fit(1, slice(0.01, 0.1), wd=0.5, cbs=freeze)
    learn.unfreeze()
    learn.fit(1, 0.05)


def finding_a_rate(learn):
    """Look for a learning rate before and between fits."""
    learn.lr_find(num_it=6, show_plot=False, suggest_funcs=None)
    learn.fit(1, 0.05, wd=0.5)
    learn.lr_find(num_it=6, show_plot=False, suggest_funcs=None, stop_div=False)
    learn.fit(1, 0.05)


def clipping(learn):
    """Clip the norm of the gradients."""
    learn.fit(2, 0.1, wd=0.5, cbs=GradientClip(0.1))


def accumulating(learn):
    """Make a step of two and a half batches, so that some are left over at an epoch's end."""
    learn.fit(2, 0.1, wd=0.5, cbs=GradientAccumulation(20))


def clipping_what_was_accumulated(learn):
    """Clip what several batches give together."""
    learn.fit(2, 0.1, wd=0.5, cbs=[GradientClip(0.1), GradientAccumulation(16)])


def starting_over(learn):
    """Make the optimizer anew between fits."""
    learn.fit(1, 0.1, wd=0.5)
    learn.fit(1, 0.05, reset_opt=True)
    learn.create_opt()
    learn.fit(1, 0.05)


def looking_on(learn):
    """Read the optimizer's state, lists and flags in the middle of a step and after it."""
    look = [Do(event, _look) for event in ("before_step", "after_step", "after_batch")]
    learn.fit(2, 0.05, wd=0.5, cbs=look)


def _look(learn):
    learn.opt.state_dict()
    assert learn.opt.param_lists[0][0] is next(learn.model.parameters())


def clamping(learn):
    """Keep the weights within bounds from a callback, as GANs do."""
    learn.fit(1, 0.1, wd=0.5, cbs=Do("after_step", _clamp))
    learn.fit(1, 0.1, cbs=Do("after_batch", _clamp, at=1))


@torch.no_grad()
def _clamp(learn):
    for p in learn.model.parameters():
        p.clamp_(-0.0625, 0.0625)  # exact in 16 bits too


def starting_over_in_a_callback(learn):
    """Make the optimizer anew in the middle of a fit."""
    learn.fit(1, 0.05, wd=0.5, cbs=Do("after_batch", lambda learn: learn.create_opt(), at=1))
    learn.fit(1, 0.05)


def changing_memory_format(learn):
    """Lay out the weights with channels last between fits, and back."""
    learn.fit(1, 0.05, wd=0.5)
    learn.model.to(memory_format=torch.channels_last)
    learn.fit(1, 0.05)
    learn.model.to(memory_format=torch.contiguous_format)
    learn.fit(1, 0.05)


def channels_last(learn):
    """Train with fastai's callback for channels last."""
    learn.fit(2, 0.05, wd=0.5, cbs=ChannelsLast())


def moving_the_model(learn):
    """Say where the model is to be, and in which mode, between fits."""
    learn.fit(1, 0.05, wd=0.5)
    learn.model.to(DEVICE).eval()
    learn.fit(1, 0.05)


def exchanging_the_head(learn):
    """Put a new last layer on the model between fits, as transfer learning does."""
    learn.fit(1, 0.05, wd=0.5)
    learn.model[-1] = nn.Linear(4, 2)
    learn.create_opt()
    learn.fit(1, 0.05)


def saving_and_loading(learn):
    """Go back to an earlier checkpoint between fits."""
    learn.fit(1, 0.05, wd=0.5)
    learn.save("one")
    learn.fit(1, 0.1)
    learn.load("one")
    learn.fit(1, 0.05)
    learn.load("one", with_opt=False)
    learn.fit(1, 0.05)


def keeping_the_best(learn):
    """Save the best model in a fit and load it at its end."""
    best = SaveModelCallback(fname="best", with_opt=True)
    learn.fit(2, 0.1, wd=0.5, cbs=best)
    learn.fit(1, 0.05)


def calling_steps_off(learn):
    """Call off a step, a backward pass and batches, from callbacks before and after ours."""
    for i, (event, error) in enumerate(CANCELLED):
        learn.fit(1, 0.05, wd=0.5, cbs=Do(event, _raiser(error), at=1, order=(5, 60)[i % 2]))


CANCELLED = [
    ("before_step", CancelStepException),
    ("before_step", CancelBatchException),
    ("after_backward", CancelBatchException),
    ("after_loss", CancelBatchException),
    ("after_pred", CancelBatchException),
    ("after_step", CancelBatchException),
    ("before_step", CancelTrainException),
    ("after_step", CancelEpochException),
    ("before_batch", CancelFitException),
]


def _raiser(error):
    def f(_):
        raise error

    return f


def validating_inside(learn):
    """Validate and predict within a fit."""
    learn.fit(1, 0.05, wd=0.5)
    learn.get_preds()
    learn.validate()
    learn.fit(2, 0.05, cbs=Do("after_epoch", _predict, training=False))


def _predict(learn):
    learn.get_preds(inner=True, reorder=False)


WAYS = {
    f.__name__: f
    for f in (
        fits, fine_tuning, freezing, unfreezing_in_a_callback, freezing_in_a_callback,
        finding_a_rate, clipping, accumulating, clipping_what_was_accumulated, starting_over,
        looking_on, clamping, starting_over_in_a_callback, changing_memory_format, channels_last,
        moving_the_model, exchanging_the_head, saving_and_loading, keeping_the_best,
        calling_steps_off, validating_inside,
    )
}  # fmt: skip
GROUPS = {f.__name__: f for f in (one_group, three_groups, sometimes_groups)}
MODELS = {"conv": dropout_net, "sometimes": Sometimes, "tied": Tied}


class Case(NamedTuple):
    """A way to train a model with an optimizer; as a string it is a test's id."""

    way: str
    opt: str = "sgd"
    groups: str = "three_groups"
    model: str = "conv"
    settings: tuple = ()  # (name, value) of the learner's

    def __str__(self):
        settings = [f"{k}={v}" for k, v in self.settings]
        return "-".join([self.way, self.opt, self.groups, self.model, *settings])


CASES = [
    *(Case("fits", opt, groups) for opt in ELEMENTWISE for groups in ("one_group", "three_groups")),
    *(Case("freezing", opt) for opt in ELEMENTWISE),
    *(Case(way, opt) for way in WAYS for opt in ("sgd", "ranger", "torch_adamw")),
    *(
        Case(way, opt, "sometimes_groups", "sometimes")
        for way in ("fits", "freezing", "clipping", "accumulating", "looking_on")
        for opt in ("sgd", "ranger", "torch_sgd")
    ),
    *(Case("fits", opt, "one_group", "tied") for opt in ("sgd", "adam", "torch_adamw")),
    *(
        Case(way, settings=settings)
        for way in ("fits", "freezing")
        for settings in (
            (("wd_bn_bias", True),),
            (("train_bn", False),),
            (("moms", (0.5, 0.25, 0.5)),),
        )
    ),
]
CASES = list(dict.fromkeys(CASES))


@cache
def train(case, dtype=None, flat=False, stay=False):
    """Train a new learner, with plain fastai where `dtype` is None; return its `snapshot`."""
    mixed = [] if dtype is None else [MixedPrecision(dtype=dtype, flat_master=flat)]
    with TemporaryDirectory() as path, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fastai's, of freezing and of saving
        learn = make_learner(
            case.opt,
            MODELS[case.model],
            GROUPS[case.groups],
            path=path,
            cbs=mixed,
            **dict(case.settings),
        )
        torch.manual_seed(0)
        WAYS[case.way](learn)
        if not stay:
            learn.to_fp32()
        return snapshot(learn)
