"""DDP over gloo: it averages the float32 gradients of a model with masters as of any model."""

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from fastai.callback.training import GradientAccumulation, GradientClip
from ranks import on_ranks
from tiny import Do, Sometimes, be_distributed, images, make_dls, make_learner, opt_state, weights
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from mixedfp.callback import MixedPrecision
from mixedfp.engine.forward import computing
from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

accelerate: Any = pytest.importorskip("accelerate")

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
FLAT = dict(flat_master=True)
LAYOUTS = dict(each={}, flat=FLAT)


class Net(nn.Module):
    """Layers that each batch uses, one that some batches use, and another method."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.norm, self.some = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x, use=True):
        x = self.encode(x)
        return self.last(x + self.some(x) if use else x)

    def encode(self, x):
        self.seen = getattr(self.first, "module", self.first).weight.dtype
        return self.norm(torch.tanh(self.first(x)))


class Tied(Net):
    """A layer that is called twice, once in a checkpoint with a backward pass of its own."""

    def forward(self, x, use=True):
        x = checkpoint(self.some, torch.tanh(self.first(x)), use_reentrant=True)
        return self.last(self.some(self.norm(x)))


class Outer(nn.Module):
    """A larger module that holds the model with masters, and calls it, or parts of it."""

    def __init__(self, inner, call=lambda inner, x, use: inner(x, use)):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x, use=True):
        return self.call(self.inner, x, use)


def other(inner, x, use, computes=False):
    """Call another method than `forward`."""
    with computing(inner) if computes else nullcontext():
        x = inner.encode(x)
        return inner.last(x + inner.some(x))


def in_turn(layers, x, use):
    """Call layers that have no `forward` of the whole."""
    first, last, norm, some = layers
    x = norm(torch.tanh(first(x)))
    return last(x + some(x))


def each_alone(layers, wrap=DistributedDataParallel):
    """Put each of such layers into a DDP of its own."""
    return Outer(nn.ModuleList(map(wrap, layers)), in_turn)


def each_inside(model):
    for name, part in model.named_children():
        setattr(model, name, DistributedDataParallel(part))
    return model


def batch(rank, step, part=0):
    seed = 100 * rank + 10 * step + part
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def grads_of(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def make(net=Net, two=False, cls=AdamW, **settings):
    torch.manual_seed(0)
    model = net()
    params = list(model.parameters())
    parts = [params[:2], params[2:]] if two else [params]
    return model, [cls(p, lr=0.03, weight_decay=0.1, **settings) for p in parts]


def train(
    rank, net=Net, dtype=BF16, ddp=None, n_parts=1, n_passes=1, bad=None, clip=None, wrap=None,
    some=False, masters="first", freeze=False, opt=None, two=False, **layout,
):  # fmt: skip
    """Train by five steps under DDP; return what both processes must agree on."""
    model, opts = make(net, two, **(opt or {}))
    if masters == "first":
        with_masters(model, *opts, dtype=dtype, **layout)
    shared = model if wrap is None else wrap(model)
    if wrap not in (each_alone, each_inside):
        shared = DistributedDataParallel(shared, **(ddp or {}))
    if masters != "first":
        with_masters(shared if masters == "wrapped" else model, *opts, dtype=dtype, **layout)
    is_scaled, grads = dtype == HALF, []
    scaler = LossScaler("cpu", 256.0, growth_interval=3, enabled=is_scaled)
    for i in range(5):
        if freeze and i == 2:
            model.first.requires_grad_(False)
        for k in range(n_parts):
            x = batch(rank, i, k) * (torch.inf if (rank, i) == (1, bad) else 1)
            use = not some or rank == i % 2 == 1
            with nullcontext() if k == n_parts - 1 else shared.no_sync():
                outs = [shared(x + j, use) for j in range(n_passes)]
                scaler.scale(sum(out.square().mean() for out in outs)).backward()
        for o in opts:
            scaler.unscale_(o)
        grads.append(grads_of(model))
        if clip:
            clip_grad_norm_(model.parameters(), clip)
        for o in opts:
            scaler.step(o)
            o.zero_grad()
        scaler.update()
    cores = [getattr(o, "optim", o) for o in opts]
    if cores != opts:  # each has a part of the states
        opts[0].consolidate_state_dict(0)
    found = dict(
        model=dict(model.state_dict()),
        opt=[o.state_dict() for o in opts] if cores == opts or rank == 0 else None,
        scale=scaler.get_scale(),
        skipped=scaler.skipped if is_scaled else opts[0].masters.skipped,
        grads=grads,
        seen=getattr(model, "seen", None),
    )
    held = sum(v.numel() for o in cores for s in o.state.values() for v in s.values())
    return copy.deepcopy(found) | ({} if cores == opts else dict(held=held))


def by_hand(net=Net, n_parts=1, n_passes=1, wrap=None, dtype=BF16, **_):
    """Return the first step's gradients: the mean of two models, each with a process's batches."""
    found = []
    for rank in range(2):
        model, opts = make(net)
        with_masters(model, *opts, dtype=dtype)
        how = dict(wrap=lambda m: m) if wrap is each_alone else {}
        whole = model if wrap in (None, each_inside) else wrap(model, **how)
        for k in range(n_parts):
            outs = [whole(batch(rank, 0, k) + j) for j in range(n_passes)]
            sum(out.square().mean() for out in outs).backward()
        found.append(grads_of(model))
    return [one / 2 + two / 2 for one, two in zip(*found, strict=True)]


BOTH = {  # flat and not
    "half": dict(dtype=HALF, bad=2),
    "bf16": {},
    "bad": dict(bad=2),
    "last": dict(masters="last"),
    "wrapped": dict(masters="wrapped"),
    "no_sync": dict(n_parts=3),
    "two passes": dict(n_passes=2),
    "some": dict(some=True, ddp=dict(find_unused_parameters=True)),
    "two": dict(two=True, bad=2, dtype=HALF, clip=0.1),
    "tied": dict(net=Tied, ddp=dict(static_graph=True)),
    "parts": dict(net=lambda: nn.ModuleList(Net().children()), wrap=each_alone),
}
CASES = {f"{name}, {k}": v | case for name, case in BOTH.items() for k, v in LAYOUTS.items()} | {
    "fused": dict(dtype=HALF, bad=2, opt=dict(fused=True), **FLAT),
    "views": dict(ddp=dict(gradient_as_bucket_view=True), **FLAT),
    "freeze": dict(freeze=True, ddp=dict(find_unused_parameters=True)),
    "inside": dict(wrap=each_inside),
    "outer": dict(wrap=Outer),
    "other": dict(wrap=partial(Outer, call=other)),
    "computing": dict(wrap=partial(Outer, call=partial(other, computes=True))),
}
MEANS = ["bf16, each", "last, flat", "no_sync, each", "no_sync, flat", "two passes, each"]
MEANS += ["inside", "outer", "other", "computing", "parts, each", "views"]
SAME = [(n, n.replace(", flat", ", each")) for n in CASES if n.endswith(", flat")]
SAME += [(n, "bf16, each") for n in ("last, each", "wrapped, each", "views")]
LEARNERS = {
    "plain": {},
    "full": dict(dtype=FULL, **FLAT),
    "bf16": dict(dtype=BF16, **FLAT),
    **{f"half, {k}": dict(dtype=HALF, bad=True, **v) for k, v in LAYOUTS.items()},
}


def sharded_later(rank, dtype):
    """Train a model that `fully_shard` gets once it has masters, which are forgotten."""
    model, opts = make()
    with_masters(model, *opts, dtype=dtype)
    opt = AdamW(fully_shard(model).parameters(), 0.03)
    for i in range(5):
        opt.zero_grad()
        model(batch(rank, i)).square().mean().backward()
        opt.step()
    return {k: t.full_tensor() for k, t in model.state_dict().items()}


def uneven(rank, **layout):
    """Train by DDP and `join`, the second process with fewer batches."""
    model, (opt,) = make()
    with_masters(model, opt, dtype=HALF, **layout)
    ddp, scaler = DistributedDataParallel(model), LossScaler("cpu", 512.0, growth_interval=3)
    with ddp.join():
        for i in range(6 - 2 * rank):
            loss = ddp(batch(rank, i)).square().mean() * (torch.inf if (rank, i) == (1, 1) else 1)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
    return dict(model.state_dict()), scaler.skipped, scaler.scales[:4]


def overlap(rank, dtype):
    """Return for a backward pass: messages, and those begun before its last product."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    _, opt = with_masters(model, SGD(model.parameters(), lr=0.1), dtype=dtype)
    ddp = DistributedDataParallel(model, bucket_cap_mb=4)
    for _ in range(3):
        opt.zero_grad()
        with torch.profiler.profile() as profile:
            ddp(torch.randn(8, 1024)).square().mean().backward()
        opt.step()
    names = "aten::mm", "c10d::allreduce_"
    made, sent = ([e.time_range.start for e in profile.events() if e.name == k] for k in names)
    return len(sent), sum(t < max(made) for t in sent)


def find(rank):
    learn = make_learner("adam").to_bf16()
    with learn.distrib_ctx(sync_bn=False, cpu=True), pytest.raises(MixedPrecisionError) as e:
        learn.lr_find(show_plot=False)
    return str(e.value)


def fit(rank, dtype=None, bad=False, **settings):
    """Fit a model with a layer that some batches use; return what both processes agree on."""
    learn = make_learner("adam", Sometimes, dls=make_dls(*images(40, seed=0), n_valid=8, bs=8))
    if dtype is not None:
        learn.add_cb(MixedPrecision(dtype=dtype, loss_scale=64.0, **settings))
    cbs = [GradientClip(0.5), GradientAccumulation(16)]
    if bad and rank:
        spoil = lambda learn: setattr(learn, "xb", (learn.xb[0] * torch.inf,))  # noqa: E731
        cbs.append(Do("before_batch", spoil, at=1, order=5))
    some = accelerate.DistributedDataParallelKwargs(find_unused_parameters=True)
    with learn.distrib_ctx(sync_bn=False, cpu=True, kwargs_handlers=[some]):
        learn.fit(2, 0.02, cbs=cbs)
    found = [weights(learn), opt_state(learn), [list(v) for v in learn.recorder.values]]
    return *found, learn.mp_cb.skipped if dtype is not None else []


JOBS = {name: (train, case) for name, case in CASES.items()}
JOBS |= {f"fit {name}": (fit, case) for name, case in LEARNERS.items()}
JOBS |= {f"overlap {dtype}": (overlap, dict(dtype=dtype)) for dtype in (FULL, BF16)}
JOBS |= {f"join {k}": (uneven, layout) for k, layout in LAYOUTS.items()}
JOBS |= {f"shards {dtype}": (sharded_later, dict(dtype=dtype)) for dtype in (FULL, BF16)}
ZERO_1 = dict(cls=ZeroRedundancyOptimizer, optimizer_class=AdamW)
JOBS |= {"zero1": (train, dict(bad=2, opt=ZERO_1)), "find": (find, {})}


def work(rank):
    be_distributed(rank)
    return {name: f(rank, **case) for name, (f, case) in JOBS.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    found = on_ranks(2, work, tmp_path_factory.mktemp("ranks"), ("test_ranks",))
    return lambda name: copy.deepcopy([result[name] for result in found])


@pytest.mark.parametrize("name", list(CASES))
def test_both_processes_have_the_same_bits(name, ranks):
    """Weights, states, gradients, scales and skips; an inf in one process skips both."""
    one, two = ranks(name)
    assert_same(one, two)
    assert {g.dtype for gs in one["grads"] for g in gs if g is not None} == {FULL}
    assert one["skipped"] == ([2] if "bad" in CASES[name] else [])
    is_half = CASES[name].get("dtype") == HALF
    assert one["scale"] == (1.0 if not is_half else 128.0 if one["skipped"] else 512.0)


@pytest.mark.parametrize("name", MEANS)
def test_gradients_are_the_mean_of_both_processes(name, ranks):
    """Bit for bit, in float32, also where they accumulate under `no_sync`."""
    one, _ = ranks(name)
    assert_same(one["grads"][0], by_hand(**CASES[name]))
    if "parts" not in name:  # `encode` by itself computes in float32
        assert one["seen"] == (FULL if name == "other" else BF16)


@pytest.mark.parametrize("name, other", SAME)
def test_what_changes_no_bit(name, other, ranks):
    """Flat masters, DDP before or after, gradients that are views of its buckets."""
    assert_same(ranks(name), ranks(other))


def test_half_of_the_messages_begin_before_the_last_product(ranks):
    """There are as many as in float32."""
    found = (ranks(f"overlap {dtype}") for dtype in (FULL, BF16))
    for (n_full, _), (n, early) in zip(*found, strict=True):
        assert n == n_full >= 4 and early >= n / 2


def test_a_frozen_layer_keeps_its_weights(ranks):
    """DDP goes on to average the others (`find_unused_parameters`)."""
    grads = [g[0] for g in ranks("freeze")[0]["grads"]]
    assert [g is None for g in grads] == [False, False, True, True, True]


def test_zero_1_gives_the_same_bits_with_half_of_the_state(ranks):
    """Also after a skip; the file of the first process is whole."""
    (one, _), (first, second) = ranks("bad, each"), ranks("zero1")
    first["opt"], one["opt"] = (r["opt"][0]["state"] for r in (first, one))
    size = sum(v.numel() for s in one["opt"].values() for v in s.values())
    assert max(first.pop("held"), second.pop("held")) < 0.6 * size
    assert_same(first, one)
    assert_same(second, one | {"opt": None})


def test_a_model_that_is_sharded_later_trains_nearly_as_in_float32(ranks):
    (full, _), (one, two) = ranks(f"shards {FULL}"), ranks(f"shards {BF16}")
    assert_same(one, two)
    torch.testing.assert_close(one, full, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_uneven_batches(kind, ranks):
    """`join` ends with the same weights; both skip the same step at the same scale."""
    one, two = ranks(f"join {kind}")
    assert_same(one, two)
    assert one[1:] == ([1], [512.0, 512.0, 256.0, 256.0])


def test_lr_find_would_hang(ranks):
    """Only the first process has written the weights that each loads again."""
    assert all("lr_find would hang" in message for message in ranks("find"))


@pytest.mark.parametrize("name", list(LEARNERS))
def test_learners_agree(name, ranks):
    """A float32 learner is plain fastai's bit for bit; an inf in one process skips both."""
    one, two = ranks(f"fit {name}")
    assert_same(one, two)
    if "full" in name:
        assert_same(one, ranks("fit plain")[0])
    assert one[3] == ([0] if "half" in name else [])
