"""Two processes over gloo agree bit for bit; an inf in one is a skip of both (USERS 28)."""

import copy
import gc
import io
import traceback
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fastai.callback.training import GradientAccumulation, GradientClip
from ranks import on_two_ranks
from tiny import Do, Sometimes, be_distributed, images, make_dls, make_learner, opt_state, weights
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from mixedfp.callback import MixedPrecision
from mixedfp.engine import ranks as engine
from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import masters_of, with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

accelerate: Any = pytest.importorskip("accelerate")

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
FLAT = dict(flat_master=True)
LAYOUTS = dict(each={}, flat=FLAT)


class Net(nn.Module):
    """Layers that each batch uses, and one that some batches use."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.norm, self.some = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x, use=True):
        x = self.norm(torch.tanh(self.first(x)))
        return {"pred": (self.last(x + self.some(x) if use else x), None)}


class Never(Net):
    """A layer that no batch uses."""

    def __init__(self):
        super().__init__()
        self.never = nn.Linear(8, 8)


class Kinds(Net):
    """A weight that is complex, and a table whose gradients are sparse."""

    def __init__(self):
        super().__init__()
        self.wave = nn.Parameter(torch.ones(8, dtype=torch.complex64))
        self.table = nn.Embedding(3, 8, sparse=True)

    def forward(self, x, use=True):
        x = torch.fft.ifft(torch.fft.fft(self.first(x).float()) * self.wave).real
        x = self.norm(x + self.table(torch.tensor([0, 2])).sum(0))
        return {"pred": (self.last(self.some(x)), None)}


class Tied(Net):
    """A layer that is called twice, once in a checkpoint with a backward pass of its own."""

    def forward(self, x, use=True):
        x = checkpoint(self.some, torch.tanh(self.first(x)), use_reentrant=True)
        return {"pred": (self.last(self.some(x)), None)}


class Outer(nn.Module):
    """A larger module that holds the model with masters, as Lightning's does."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.factor = inner, nn.Parameter(torch.ones(()))

    def forward(self, x, use=True):
        return {"pred": (self.inner(x, use)["pred"][0] * self.factor, None)}


def make(net=Net, dtype=BF16, two=False, opt=AdamW, seed=0, settings=None, **layout):
    """Return a model with masters and its optimizers."""
    torch.manual_seed(seed)
    model = net()
    params = list(model.parameters())
    parts = [params[:2], params[2:]] if two else [params]
    opts = [opt(part, **dict(lr=0.03, weight_decay=0.1) | (settings or {})) for part in parts]
    return with_masters(model, *opts, dtype=dtype, **layout)


def batch(rank, step, part=0):
    """Return the inputs of a process."""
    seed = 100 * rank + 10 * step + part
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def loss_of(model, *args):
    """Return a loss."""
    return model(*args)["pred"][0].square().mean()


def grads_of(model):
    """Return copies of the gradients."""
    return [None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]


def freeze(model, i, how):
    """Freeze or thaw the first layer at the step `i`."""
    if i == 2 or (i, how) == (0, "thaw"):
        model.first.requires_grad_((i, how) == (2, "thaw"))


def train(
    rank, ddp=None, n_parts=1, bad=None, clip=None, outer=False, some=False, hook=None, how=None,
    **settings,
):  # fmt: skip
    """Train by five steps under DDP; return what both processes must agree on."""
    settings["seed"] = rank if settings.pop("own_start", False) else 0
    model, *opts = make(**settings)
    shared = DistributedDataParallel(Outer(model) if outer else model, **(ddp or {}))
    if hook is not None:
        shared.register_comm_hook(None, getattr(default_hooks, hook))
    is_scaled, grads = settings.get("dtype") == HALF, []
    scaler = LossScaler("cpu", 256.0, growth_interval=3, enabled=is_scaled)
    for i in range(5):
        freeze(model, i, how) if how else None
        for k in range(n_parts):
            x = batch(rank, i, k) * (torch.inf if (rank, i) == (1, bad) else 1)
            use = not some or rank == i % 2 == 1
            with nullcontext() if k == n_parts - 1 else shared.no_sync():
                scaler.scale(loss_of(shared, x, use)).backward()
        for opt in opts:
            scaler.unscale_(opt)
        grads.append(grads_of(model))
        if clip:
            clip_grad_norm_(model.parameters(), clip)
        for opt in opts:
            scaler.step(opt)
            opt.zero_grad()
        scaler.update()
    return copy.deepcopy(
        dict(
            model=[p.detach() for p in shared.parameters()],
            saved=dict(model.state_dict()),
            opt=[opt.state_dict() for opt in opts],
            scale=scaler.get_scale(),
            skipped=scaler.skipped if is_scaled else masters_of(model).skipped,
            grads=grads,
        )
    )


def by_hand(n_parts=1, net=Net, opt=AdamW):
    """Return the first step's gradients: the mean of two models, each with a process's batches."""
    models = [make(net, opt=opt, settings=dict(weight_decay=0))[0] for _ in range(2)]
    for rank, model in enumerate(models):
        for k in range(n_parts):
            loss_of(model, batch(rank, 0, k)).backward()
    pairs = zip(*map(grads_of, models), strict=True)
    return [None if one is None else one / 2 + two / 2 for one, two in pairs]


SOME = dict(some=True, net=Never, ddp=dict(find_unused_parameters=True))
STATIC = dict(static_graph=True)
CASES = {
    **{f"half-{k}": dict(dtype=HALF, bad=2, **v) for k, v in LAYOUTS.items()},
    **{f"bf16-{k}": v for k, v in LAYOUTS.items()},
    **{f"bad-{k}": dict(bad=2, **v) for k, v in LAYOUTS.items()},
    **{f"parts-{k}": dict(n_parts=3, **v) for k, v in LAYOUTS.items()},
    **{f"some-{k}": SOME | v for k, v in LAYOUTS.items()},
    **{f"clip-{k}": dict(dtype=HALF, clip=0.1, opt=SGD, **v) for k, v in LAYOUTS.items()},
    **{f"two-{k}": dict(two=True, bad=2, dtype=HALF, **v) for k, v in LAYOUTS.items()},
    **{f"tied-{k}": dict(net=Tied, ddp=STATIC, **v) for k, v in LAYOUTS.items()},
    **{f"own_start-{k}": dict(own_start=True, **v) for k, v in LAYOUTS.items()},
    "fused": dict(dtype=HALF, bad=2, settings=dict(fused=True), **FLAT),
    "remainders": dict(store_param_remainders=True, ddp=dict(init_sync=False), **FLAT),
    "half_grads": dict(half_grads=True, **FLAT),
    "views": dict(ddp=dict(gradient_as_bucket_view=True)),
    "buckets": dict(ddp=dict(bucket_cap_mb=1e-5)),
    "static": dict(ddp=STATIC),
    "static, never": dict(net=Never, ddp=STATIC),
    "kinds": dict(net=Kinds, opt=SGD, settings=dict(weight_decay=0)),
    "hook": dict(hook="allreduce_hook"),
    "hook in 16 bits": dict(hook="bf16_compress_hook"),
    "freeze": dict(how="freeze"),
    "thaw": dict(how="thaw"),
    "outer": dict(outer=True),
}


def statistics(rank, is_mixed):
    """Return the running mean as each of six forward passes finds it."""
    torch.manual_seed(0)
    model, found = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), []
    if is_mixed:
        model, _ = with_masters(model, SGD(model.parameters(), lr=0.1), dtype=BF16)
    model[1].register_forward_pre_hook(lambda m, _: found.append(m.running_mean.clone()))
    ddp = DistributedDataParallel(model)
    for i, how in enumerate(("", "no_sync", "", "no_grad", "no_grad", "")):
        with dict(no_sync=ddp.no_sync, no_grad=torch.no_grad).get(how, nullcontext)():
            out = ddp(batch(rank, i))
        if out.requires_grad:
            out.square().mean().backward()
    return found


def message(f, *args, **kwargs):
    """Return what `f` raises."""
    try:
        f(*args, **kwargs)
    except MixedPrecisionError as e:
        return str(e)


def refusals(rank):
    """Return the messages of what is refused."""
    ddp = DistributedDataParallel(make()[0])
    with ddp.join():
        found = [message(ddp, batch(rank, 0))]
    learn = make_learner("adam").to_bf16()
    with learn.distrib_ctx(sync_bn=False, cpu=True):
        found.append(message(learn.lr_find, show_plot=False))
    for model in (make(Never)[0], Never()):  # PyTorch's own words
        ddp = DistributedDataParallel(model)
        loss_of(ddp, batch(rank, 0)).backward()
        with pytest.raises(RuntimeError) as e:
            ddp(batch(rank, 1))
        found.append(str(e.value))
    return found


def overlap(rank, dtype):
    """Return for a backward pass: messages, those begun before its last product, and its memory."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    _, opt = with_masters(model, SGD(model.parameters(), lr=0.1), dtype=dtype)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.03, gradient_as_bucket_view=True)
    for _ in range(3):
        opt.zero_grad()
        with torch.profiler.profile() as profile:
            ddp(torch.randn(8, 64)).square().mean().backward()
        opt.step()
    starts = {k: [e.time_range.start for e in profile.events() if e.name == k]
              for k in ("aten::mm", "c10d::allreduce_")}  # fmt: skip
    sent = starts["c10d::allreduce_"]
    storages = [p.grad.untyped_storage() for p in ddp.parameters()]
    memory = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    return len(sent), sum(t < max(starts["aten::mm"]) for t in sent), memory


def ends(rank):
    """Return what is left: after an error in a backward pass, of a DDP, and after `restore`."""
    model, opt = make()
    ddp = DistributedDataParallel(model)
    copied = copy.deepcopy(model)
    handle = model.first.weight.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(ddp, batch(rank, 0)).backward()
    handle.remove()
    with pytest.raises(RuntimeError, match="finished reduction"):  # as in float32
        ddp(batch(rank, 0))
    old, ddp = weakref.ref(ddp), DistributedDataParallel(model)
    gc.collect()
    opt.zero_grad()
    loss_of(ddp, batch(rank, 0)).backward()
    in_16 = grads_of(model)
    opt.masters.restore()
    opt.zero_grad()
    loss_of(ddp, batch(rank, 0)).backward()
    in_32 = grads_of(model)
    other = DistributedDataParallel(copied)
    loss_of(other, batch(rank, 0)).backward()
    return old() is None, len(engine._FEEDS), in_16, in_32, grads_of(copied)


def zero1(rank):
    """Train by PyTorch's ZeRO-1 and not, with a skip; save, load, and train on."""
    found = []
    for kind in (AdamW, ZeroRedundancyOptimizer):
        torch.manual_seed(0)
        model, file = Net(), io.BytesIO()
        given = dict(optimizer_class=AdamW) if kind is not AdamW else {}
        opt = kind(model.parameters(), lr=0.03, **given)
        model, opt = with_masters(model, opt, dtype=BF16)
        ddp = DistributedDataParallel(model)
        for i in range(6):
            x = batch(rank, i) * (torch.inf if (rank, i) == (1, 2) else 1)
            loss_of(ddp, x).backward()
            opt.step()
            opt.zero_grad()
            if i == 3:
                if given:
                    opt.consolidate_state_dict(0)
                state = [{k: v.clone() for k, v in model.state_dict().items()}]
                torch.save(opt.state_dict() if not given or rank == 0 else None, file)
                file.seek(0)
                state += [torch.load(file, weights_only=True)]
                torch.distributed.broadcast_object_list(state, 0)
            if i == 5:
                ends = {k: v.clone() for k, v in model.state_dict().items()}
        skipped = opt.masters.skipped
        model.load_state_dict(state[0])
        opt.load_state_dict(state[1])
        for i in (4, 5):
            loss_of(ddp, batch(rank, i)).backward()
            opt.step()
            opt.zero_grad()
        held = sum(v.numel() for s in getattr(opt, "optim", opt).state.values() for v in s.values())
        found.append((ends, skipped, dict(model.state_dict()), held))
    return found


def clipped_norm(n_groups, layout, dtype, group=None):
    """Return the norm that clipping has computed, and that of the same gradients in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(20)))
    params = list(model.parameters())
    groups = [{"params": params[i::n_groups]} for i in range(n_groups)]
    opt = torch.optim.AdamW(groups, 1e-3)
    with_masters(model, opt, dtype=dtype, flat_master=layout == "flat")
    scaler = LossScaler("cpu", 2.0**8, enabled=dtype == torch.float16)
    net = model if group is None else DistributedDataParallel(model)
    x = torch.randn(16, 64)
    part = slice(None) if group is None else slice(8 * group, 8 * group + 8)
    scaler.scale(net(x[part]).square().mean()).backward()
    scaler.unscale_(opt)
    grads = torch.cat([p.grad.flatten() for p in params])
    return clip_grad_norm_(params, 1e9).item(), grads.double().norm().item()


def norms(rank):
    """Return these of two processes, for one group and twenty, flat and not."""
    layouts = "a master each", "flat"
    return [clipped_norm(n, layout, BF16, rank) for n in (1, 20) for layout in layouts]


def uneven(rank):
    """Train a float32 model by DDP and `join`, the second process with fewer batches."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    opt, scaler = AdamW(model.parameters(), lr=0.1), LossScaler("cpu", 512.0, growth_interval=3)
    with model.join():
        for i in range(6 - 2 * rank):
            loss = model(batch(rank, i)).square().mean() * (torch.inf if (rank, i) == (1, 1) else 1)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
    return [p.detach() for p in model.parameters()], scaler.skipped, scaler.scales[:4]


LEARNERS = {
    "plain": {},
    "plain, some": dict(model=Sometimes),
    **{f"full-{k}": dict(dtype=FULL, **v) for k, v in LAYOUTS.items()},
    "full, some": dict(dtype=FULL, model=Sometimes),
    **{f"bf16-{k}": dict(dtype=BF16, **v) for k, v in LAYOUTS.items()},
    **{f"half-{k}": dict(dtype=HALF, bad=True, **v) for k, v in LAYOUTS.items()},
    "bf16, some": dict(dtype=BF16, model=Sometimes),
}


def fit(rank, dtype=None, bad=False, model=None, **settings):
    """Fit for two epochs in `distrib_ctx`; return what both processes must agree on."""
    dls = make_dls(*images(40, seed=0), n_valid=8, bs=8)
    learn = make_learner("adam", dls=dls, **({} if model is None else dict(model=model)))
    if dtype is not None:
        learn.add_cb(MixedPrecision(dtype=dtype, loss_scale=64.0, **settings))
    cbs = [GradientClip(0.5), GradientAccumulation(16)]
    if bad and rank:
        spoil = lambda learn: setattr(learn, "xb", (learn.xb[0] * torch.inf,))  # noqa: E731
        cbs.append(Do("before_batch", spoil, at=1, order=5))
    some = accelerate.DistributedDataParallelKwargs(find_unused_parameters=model is not None)
    with learn.distrib_ctx(sync_bn=False, cpu=True, kwargs_handlers=[some]):
        learn.fit(2, 0.02, cbs=cbs)
    found = [weights(learn), opt_state(learn), [list(v) for v in learn.recorder.values]]
    return *found, learn.mp_cb.skipped if dtype is not None else []


def work(rank):
    """Return all results by name; where a case fails, its traceback."""
    be_distributed(rank)
    jobs = {name: (train, case) for name, case in CASES.items()}
    jobs |= {f"fit {name}": (fit, case) for name, case in LEARNERS.items()}
    jobs |= {f.__name__: (f, {}) for f in (refusals, norms, uneven, ends, zero1)}
    jobs |= {f"overlap {dtype}": (overlap, dict(dtype=dtype)) for dtype in (FULL, BF16)}
    jobs |= {f"statistics {mixed}": (statistics, dict(is_mixed=mixed)) for mixed in (0, 1)}
    found = {}
    for name, (f, case) in jobs.items():
        try:
            found[name] = f(rank, **case)
        except Exception:
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return a function of a name: the results of both processes."""
    found = on_two_ranks(work, tmp_path_factory.mktemp("ranks"), ("test_ranks",))

    def of_both(name):
        for result in found:
            assert not (isinstance(result[name], str) and "Traceback" in result[name]), result[name]
        return [result[name] for result in found]

    return of_both


@pytest.mark.parametrize("name", list(CASES))
def test_both_processes_have_the_same_bits(name, ranks):
    """Weights, masters, moments, gradients, scales and skips."""
    one, two = ranks(name)
    assert_same(one, two)
    dtypes = {g.dtype for gs in one["grads"] for g in gs if g is not None}
    assert dtypes - {torch.complex64} == {BF16 if name == "half_grads" else FULL}
    assert one["skipped"] == ([2] if "bad" in CASES[name] else [])
    assert one["scale"] == 128.0 or name not in ("half-each", "fused")


@pytest.mark.parametrize("name", ["bf16-each", "parts-each", "parts-flat", "kinds", "outer"])
def test_gradients_are_the_mean_of_both_processes(name, ranks):
    """Bit for bit, in float32, also where they accumulate under `no_sync`."""
    settings = {k: v for k, v in CASES[name].items() if k in ("n_parts", "net")}
    settings |= dict(opt=SGD) if name == "kinds" else {}
    assert_same(ranks(name)[0]["grads"][0], by_hand(**settings))


SAME = [(n, n.replace("-flat", "-each")) for n in CASES if n.endswith("-flat")]
SAME += [(n, "bf16-each") for n in ("views", "buckets", "static", "hook", "own_start-each")]


@pytest.mark.parametrize("name, other", SAME)
def test_what_changes_no_bit(name, other, ranks):
    """Flat masters, DDP's buckets; weights of another start: all have the first process's."""
    assert_same(ranks(name), ranks(other))


def test_a_layer_that_no_process_uses_does_not_move(ranks):
    """Neither by weight decay nor by zeros; a layer that one process uses does."""
    saved, begun = ranks("some-each")[0]["saved"], make(Never)[0].state_dict()
    assert_same(saved["never.weight"], begun["never.weight"])
    assert not saved["some.weight"].equal(begun["some.weight"])


@pytest.mark.parametrize("mixed", [0, 1])
def test_buffers_are_sent_when_plain_ddp_sends_them(mixed, ranks):
    """Not after a forward pass under `no_sync` or without gradients."""
    one, two = ranks(f"statistics {mixed}")
    same = [a.equal(b) for a, b in zip(one, two, strict=True)]
    assert same == [True, True, False, True, False, False]


def test_what_is_refused(ranks):
    """`lr_find` would hang: only the first process has written weights to load again."""
    for joined, find, ours, plain in ranks("refusals"):
        assert "equal numbers of batches" in joined and "lr_find would hang" in find
        assert ours.split("Parameter")[0] == plain.split("Parameter")[0]
        assert "find_unused_parameters=True" in ours


def test_buckets_are_sent_during_the_backward_pass_and_take_no_more_memory(ranks):
    """As many as in float32; gradients and buckets are the same 4 bytes."""
    for full, half in zip(ranks(f"overlap {FULL}"), ranks(f"overlap {BF16}"), strict=True):
        assert half == full
        n, early, n_bytes = half
        assert n >= 4 and early >= n / 2 and n_bytes == 4 * 8 * 64 * 64


def test_a_frozen_layer_keeps_its_weights_and_a_thawed_one_is_averaged(ranks):
    """Both processes agree (above); plain DDP raises an error or averages nothing."""
    begun = make()[0].state_dict()["first.weight"]
    for name, is_frozen in (("freeze", [False, False, True]), ("thaw", [True, True, False])):
        grads = [g[0] for g in ranks(name)[0]["grads"]]
        assert [g is None for g in grads[:3]] == is_frozen
        assert not ranks(name)[0]["saved"]["first.weight"].equal(begun)


def test_nothing_is_left_of_a_ddp(ranks):
    """It is freed; its successor averages in 16 bits, after `restore` in 32, as a copy's does."""
    one, two = ranks("ends")
    assert_same(one, two)
    is_freed, n_feeds, in_16, in_32, plain = one
    assert is_freed and n_feeds == 0
    assert_same(in_32, plain)
    assert all((a - b).norm() < 0.05 * b.norm() for a, b in zip(in_16, in_32, strict=True))


def test_zero_1_gives_the_same_bits_with_half_of_the_state(ranks):
    """Also after a skip, and resumed from a file."""
    for (ends, skipped, resumed, held), (*others, less) in ranks("zero1"):
        assert_same([ends, skipped, resumed], others)
        assert_same(resumed, ends)
        assert skipped == [2] and less < 0.6 * held


def test_uneven_batches_of_a_float32_model(ranks):
    """Both skip the same step at the same scale, while both run."""
    one, two = ranks("uneven")
    assert_same(one, two)
    assert one[1:] == ([1], [512.0, 512.0, 256.0, 256.0])


@pytest.mark.parametrize("name", list(LEARNERS))
def test_learners_agree(name, ranks):
    """A float32 learner is plain fastai's bit for bit; an inf in one process skips both."""
    one, two = ranks(f"fit {name}")
    assert_same(one, two)
    if "full" in name:
        assert_same(one, ranks("fit plain, some" if "some" in name else "fit plain")[0])
    assert one[3] == ([0] if "half" in name else [])


# Norms


@pytest.mark.parametrize("n_groups", [1, 20])
@pytest.mark.parametrize("layout", ["a master each", "flat"])
@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_the_norm_that_clips_is_that_of_float64(n_groups, layout, dtype):
    found, truth = clipped_norm(n_groups, layout, dtype)
    assert found == pytest.approx(truth, rel=1e-6)
    assert found == clipped_norm(1, "a master each", dtype)[0]  # to the bit


def test_the_norm_is_the_same_in_two_processes(ranks):
    one, other = ranks("norms")
    assert one == other and len({found for found, _ in one}) == 1
    alone, _ = clipped_norm(1, "a master each", BF16)
    for found, truth in one:
        assert found == pytest.approx(truth, rel=1e-6)
        assert found == pytest.approx(alone, rel=1e-2)  # the batch is rounded in two halves
