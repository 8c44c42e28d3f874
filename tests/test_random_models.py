"""Laws that hold for any small network, trained in any way: examples that hypothesis makes up.

A `Case` is read aloud as what is built and what is done with it; a law that fails is shown with the
shortest case that breaks it.
"""

from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from fastai.callback.training import GradientAccumulation, GradientClip
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import (
    ELEMENTWISE,
    LAYERWISE,
    bits,
    make_dls,
    make_learner,
    masters,
    opt_state,
    snapshot,
    weights,
)
from torch import nn

from mixedfp.callback import MixedPrecision
from mixedfp.testing import assert_same

# Networks


def per_shape(on_vectors, on_pictures):
    """Return what makes a layer, given whether its input is pictures."""
    return lambda pictures: on_pictures() if pictures else on_vectors()


LAYERS = {
    "mix": per_shape(lambda: nn.Linear(4, 4), lambda: nn.Conv2d(4, 4, 3, padding=1)),
    "plain_mix": per_shape(
        lambda: nn.Linear(4, 4, bias=False), lambda: nn.Conv2d(4, 4, 1, bias=False)
    ),
    "batch_norm": per_shape(lambda: nn.BatchNorm1d(4), lambda: nn.BatchNorm2d(4)),
    "layer_norm": per_shape(lambda: nn.LayerNorm(4), lambda: nn.LayerNorm([4, 3, 3])),
    "group_norm": per_shape(lambda: nn.GroupNorm(2, 4), lambda: nn.GroupNorm(2, 4)),
    "relu": per_shape(nn.ReLU, nn.ReLU),
    "gelu": per_shape(nn.GELU, nn.GELU),
    "tanh": per_shape(nn.Tanh, nn.Tanh),
    "dropout": per_shape(lambda: nn.Dropout(0.25), lambda: nn.Dropout(0.25)),
}
STEMS = {
    "vectors": lambda: nn.Linear(5, 4),
    "pictures": lambda: nn.Conv2d(3, 4, 2),  # of 4 by 4 pixels: 3 by 3 are left
    "words": lambda: nn.Sequential(nn.Embedding(7, 4), Mean()),
}


class Mean(nn.Module):
    """Average over the words of a text."""

    def forward(self, x):
        return x.mean(1)


class Layer(NamedTuple):
    """A layer, how its input goes on, and on which batches it is there."""

    kind: str
    residual: bool = False  # its output is added to its input
    tied: bool = False  # its weight is that of the layer before it of this kind
    used: str = "always"  # or "never", or "sometimes": on every other batch


class Net(NamedTuple):
    """A network: a stem for its inputs, layers, a head for two classes."""

    inputs: str
    layers: tuple[Layer, ...]

    def build(self):
        """Make the model."""
        return Built(self)

    def dls(self):
        """Return three batches of four to train on, and one to validate on."""
        rng = torch.Generator().manual_seed(0)
        y = torch.arange(16) % 2
        x = {
            "vectors": torch.randn(16, 5, generator=rng),
            "pictures": torch.randn(16, 3, 4, 4, generator=rng),
            "words": torch.randint(7, (16, 3), generator=rng),
        }[self.inputs]
        return make_dls(x, y, n_valid=4, bs=4)


class Built(nn.Module):
    """The model of a `Net`."""

    def __init__(self, net):
        super().__init__()
        self.net, self.count, last = net, 0, {}
        self.stem, self.head = STEMS[net.inputs](), nn.Linear(4, 2)
        self.layers = nn.ModuleList(LAYERS[k.kind](net.inputs == "pictures") for k in net.layers)
        for layer, spec in zip(self.layers, net.layers, strict=True):
            if spec.tied and spec.kind in last:
                layer.weight = last[spec.kind].weight
            last[spec.kind] = layer

    def forward(self, x):
        self.count += self.training
        x = self.stem(x)
        for layer, spec in zip(self.layers, self.net.layers, strict=True):
            if spec.used == "always" or (spec.used == "sometimes" and self.count % 2):
                x = x + layer(x) if spec.residual else layer(x)
        return self.head(x.flatten(2).mean(2) if x.ndim > 2 else x)


# What is done with them


class FreezeTo(NamedTuple):
    """Freeze all groups but those from `n` on."""

    n: int

    def do(self, learn):
        """Do it."""
        if abs(self.n) < len(learn.opt.param_lists):  # else everything is frozen
            learn.freeze_to(self.n)


class Save(NamedTuple):
    """Write a checkpoint."""

    def do(self, learn):
        """Do it."""
        learn.save("checkpoint")


class Load(NamedTuple):
    """Go back to the checkpoint, if there is one."""

    with_opt: bool

    def do(self, learn):
        """Do it."""
        if (learn.path / "models" / "checkpoint.pth").exists():
            learn.load("checkpoint", with_opt=self.with_opt)


class Fit(NamedTuple):
    """Train an epoch."""

    schedule: str = "fit"
    lr: float | slice | str = 0.05  # or "list": a rate for each group
    wd: float | None = None
    moms: tuple | None = None  # of `fit_one_cycle`
    clip: float | None = None
    accumulate: int | None = None  # samples a step
    reset_opt: bool = False

    def do(self, learn):
        """Do it."""
        cbs = [] if self.clip is None else [GradientClip(self.clip)]
        cbs += [] if self.accumulate is None else [GradientAccumulation(self.accumulate)]
        rates = np.linspace(0.01, 0.1, len(learn.opt.param_lists)).tolist()
        kwargs = dict(wd=self.wd, cbs=cbs, reset_opt=self.reset_opt)
        if self.schedule == "fit_one_cycle":
            kwargs["moms"] = self.moms
        getattr(learn, self.schedule)(1, rates if self.lr == "list" else self.lr, **kwargs)


class Case(NamedTuple):
    """A network, its parameters by number in groups, and what happens to it."""

    net: Net
    opt: str
    groups: tuple[tuple[int, ...], ...]  # what is in none is not trained
    frozen: tuple[int, ...]
    steps: tuple

    def split(self, model):
        """Return the groups of parameters."""
        ps = list(model.parameters())
        return [[ps[i] for i in group] for group in self.groups]

    def build(self):
        """Make the model, with what is frozen from the start."""
        model = self.net.build()
        for i, p in enumerate(model.parameters()):
            p.requires_grad_(i not in self.frozen)
        return model


@contextmanager
def learner(case, *cbs):
    """Give a new learner of `case`, with folders of its own."""
    with TemporaryDirectory() as path:
        dls = case.net.dls()
        learn = make_learner(case.opt, case.build, case.split, dls, path=path, cbs=list(cbs))
        learn.create_opt()
        torch.manual_seed(0)  # of dropout
        yield learn


def train(case, *cbs):
    """Return the learner after all that happens to it."""
    with learner(case, *cbs) as learn:
        for step in case.steps:
            step.do(learn)
        return learn


# Strategies: what is simplest comes first, since that is where a failure shrinks to

LAYER = st.builds(
    Layer,
    kind=st.sampled_from(list(LAYERS)),
    residual=st.booleans(),
    tied=st.booleans(),
    used=st.sampled_from(["always", "always", "sometimes", "never"]),
).map(
    lambda layer: (
        layer if hasattr(LAYERS[layer.kind](False), "weight") else layer._replace(tied=False)
    )
)
NET = st.builds(Net, st.sampled_from(list(STEMS)), st.lists(LAYER, max_size=5).map(tuple))
FIT = st.builds(
    Fit,
    schedule=st.sampled_from(["fit", "fit_one_cycle", "fit_flat_cos"]),
    lr=st.sampled_from([0.05, slice(0.01, 0.1), slice(0.1), "list"]),
    wd=st.sampled_from([None, 0.0, 0.5]),
    moms=st.sampled_from([None, (0.5, 0.25, 0.5)]),
    clip=st.sampled_from([None, 0.1]),
    accumulate=st.sampled_from([None, 6]),
    reset_opt=st.sampled_from([False, False, True]),
).map(lambda fit: fit if fit.schedule == "fit_one_cycle" else fit._replace(moms=None))
BETWEEN = st.one_of(
    FIT,
    st.builds(FreezeTo, st.sampled_from([0, -1, -2, 1])),
    st.builds(Save),
    st.builds(Load, st.booleans()),
)


@st.composite
def cases(draw, optimizers=tuple(ELEMENTWISE)):
    """Make up a case; the head is trained always, so that there is something to train."""
    net = draw(NET)
    names = [name for name, _ in net.build().named_parameters()]
    body = [i for i, name in enumerate(names) if not name.startswith("head.")]
    head = [i for i, name in enumerate(names) if name.startswith("head.")]
    order = draw(st.permutations(body))
    ends = sorted(draw(st.lists(st.integers(0, len(order)), min_size=1, max_size=4, unique=True)))
    groups = [order[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    groups[-1] = [*groups[-1], *draw(st.permutations(head))]
    return Case(
        net,
        draw(st.sampled_from(list(optimizers))),
        tuple(tuple(group) for group in groups if group),
        tuple(sorted(draw(st.sets(st.sampled_from(body), max_size=3)))),
        (*draw(st.lists(BETWEEN, max_size=4)), draw(FIT)),
    )


def examples(n):
    """Try a law on `n` cases; making them up is slow, and no bug."""
    return settings(max_examples=n, suppress_health_check=list(HealthCheck))


# The laws


@examples(30)
@given(case=cases())
def test_float32_is_plain_fastai(case):
    """In float32 every fit is fastai's own, bit for bit, with a master each and with flat ones."""
    expected = snapshot(train(case))
    for flat in (False, True):
        mixed = MixedPrecision(dtype=torch.float32, flat_master=flat)
        assert_same(snapshot(train(case, mixed).to_fp32()), expected)


@examples(12)
@given(case=cases(optimizers=tuple(LAYERWISE)))
def test_float32_is_plain_fastai_for_layer_wise_optimizers(case):
    """With a master each this holds for Larc, LARS and Lamb as well."""
    mixed = MixedPrecision(dtype=torch.float32)
    assert_same(snapshot(train(case, mixed).to_fp32()), snapshot(train(case)))


@examples(25)
@given(case=cases(), dtype=st.sampled_from([torch.float16, torch.bfloat16]))
def test_flat_is_each(case, dtype):
    """In 16 bits flat masters give the bits that a master each gives, the loss scale's as well."""
    each, flat = (
        train(case, MixedPrecision(dtype=dtype, flat_master=flat)) for flat in (False, True)
    )
    assert_same(bits(flat), bits(each))
    assert flat.mp_cb.scales == each.mp_cb.scales and flat.mp_cb.skipped == each.mp_cb.skipped
    assert {p.dtype for p in flat.model.head.parameters()} == {dtype}


WAYS = st.sampled_from([(d, f) for d in (torch.float16, torch.bfloat16) for f in (False, True)])


@examples(25)
@given(case=cases(), way=WAYS)
def test_there_and_back_is_the_identity(case, way):
    """`to_fp16().to_fp32()` leaves each weight and buffer, before training and after it."""
    dtype, flat = way
    with learner(case) as learn:
        before = weights(learn)
        learn.to_fp16(dtype=dtype, flat_master=flat)
        assert_same(weights(learn), before)
        assert_same(weights(learn.to_fp32()), before)
        learn.to_fp16(dtype=dtype, flat_master=flat)
        for step in case.steps:
            step.do(learn)
        full, state, shown = masters(learn), opt_state(learn), weights(learn)
        learn.to_fp32()
        assert_same([p.detach() for p in learn.model.parameters()], full)
        assert_same(weights(learn), shown)
        assert_same(opt_state(learn), state)
        assert_same(weights(learn.to_fp16(dtype=dtype, flat_master=flat).to_fp32()), shown)
