"""The weights that other code sees, writes and saves are the ones that are trained.

Oracles: the same script in float32, and the same script without what must change nothing.
"""

import copy
import gc
import pickle
import sys
import weakref
from typing import NamedTuple

import pytest
import torch
from fastai.basics import Callback, DataLoaders, Learner
from fastai.optimizer import OptimWrapper
from ranks import on_ranks
from tiny import silent
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mixedfp.callback import MixedPrecision
from mixedfp.engine import flat, forward, masters
from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

FULL = torch.float32
X = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
Y = torch.arange(64) % 4
flats = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
both = pytest.mark.parametrize("dtype", ["bf16", "fp16"])


class Way(NamedTuple):
    dtype: str
    flat: bool = False
    how: str = ""  # "resumed": from a file halfway; "callback": in a Learner

    def __str__(self):
        return f"{self.dtype}-{'flat' if self.flat else 'each'}{self.how and '-'}{self.how}"


WAYS = [Way(d, f, how) for how in ("", "resumed") for d in ("bf16", "fp16") for f in (False, True)]
WAYS += [Way("bf16", True, "callback"), Way("fp16", False, "callback")]
ways = pytest.mark.parametrize("way", WAYS, ids=str)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def vector(model):
    """Return what a file would hold, as one vector."""
    return torch.cat([w.flatten() for w in model.state_dict().values()])


START = vector(net())


def train(way=None, after=None, penalty=None, make=net, lr=1e-3, n=60):
    """Train, in float32 without a `way`; `after(model)` follows each step. Return the model."""
    torch.manual_seed(0)
    loss_of = lambda m: cross_entropy(m(X), Y) + (penalty(m) if penalty else 0)  # noqa: E731
    if way is not None and way.how == "callback":
        return _fit(way, after, penalty, make, lr, n)
    model, opt, scaler = _prepare(way, make, lr)
    for i in range(n):
        if i == n // 2 and way is not None and way.how == "resumed":
            files = pickle.dumps([model.state_dict(), opt.state_dict(), scaler.state_dict()])
            model, opt, scaler = _prepare(way, make, lr)
            for o, state in zip((model, opt, scaler), pickle.loads(files), strict=True):
                o.load_state_dict(state)
        opt.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.step(opt)
        scaler.update()
        if after is not None:
            after(model)
    return model


def _prepare(way, make, lr):
    model = make()
    opt = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    if way is not None:
        with_masters(model, opt, dtype=way.dtype, flat_master=way.flat)
    return model, opt, LossScaler(128.0, enabled=way is not None and way.dtype == "fp16")


def batches(n):
    """Return fastai's data: the same batch `n` times."""
    rows = list(zip(X, Y, strict=True))
    return DataLoaders.from_dsets(rows * n, rows, bs=64, shuffle=False, num_workers=0, device="cpu")


class After(Callback):
    def __init__(self, work):
        self.work = work

    def after_batch(self):
        if self.training and self.work is not None:
            self.work(self.model)


def _fit(way, after, penalty, make, lr, n):
    def loss(out, y):
        return cross_entropy(out, y) + (penalty(learn.model) if penalty else 0)

    def opt(params, **kwargs):
        return OptimWrapper(params, torch.optim.SGD, momentum=0.9, **kwargs)

    learn = silent(Learner(batches(n), make(), loss_func=loss, opt_func=opt, cbs=After(after)))
    scale = dict(loss_scale=128.0) if way.dtype == "fp16" else {}
    getattr(learn, f"to_{way.dtype}")(flat_master=way.flat, **scale)
    learn.fit(1, lr, wd=0.0)
    return learn.model


def error(found, want, start=START):
    """Return the error of a movement from `start`."""
    return ((found - want).norm() / (want - start).norm()).item()


# Averages swapped in for evaluation, casts: nothing changes


@torch.no_grad()
def swap(model):
    kept = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.mul_(0.99)
    model(X)
    for p, k in zip(model.parameters(), kept, strict=True):
        p.copy_(k)


def swap_data(model):
    kept = [p.data.clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.mul_(0.99)
    for p, k in zip(model.parameters(), kept, strict=True):
        p.data.copy_(k)


def swap_tensors(model):
    kept = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data * 0.99
    with torch.no_grad():
        model(X)
    for p, k in zip(model.parameters(), kept, strict=True):
        p.data = k


def load(model):
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict({k: v * 0.99 for k, v in kept.items()})
    model.load_state_dict(kept)


def reset(model):
    for p in model.parameters():
        p.data = p.to(torch.float32)


NOTHING = [swap, swap_data, swap_tensors, load, reset, nn.Module.float, nn.Module.cpu]
NOTHING += [lambda m: m.double().float(), lambda m: m.to(torch.float32), lambda m: m.state_dict()]


@pytest.mark.parametrize("f", NOTHING, ids=lambda f: f.__name__)
@ways
def test_no_bit_is_lost(way, f):
    assert_same(vector(train(way, f, n=12)), vector(train(way, n=12)))


class Casts(nn.Sequential):
    def forward(self, x):
        return super().forward(x.float()) if self.float() is self else x


@ways
def test_a_cast_in_the_forward_pass_loses_no_bit(way):
    made = train(way, make=lambda: Casts(*net()), n=12)
    assert_same(vector(made), vector(train(way, n=12)))


# Averages outside the model, writes by hand, penalties


class Average:
    """An average of the model's weights, beginning with the first step's."""

    def __init__(self, update):
        self.update, self.average = update, None

    def __call__(self, model):
        if self.average is None:
            self.average = copy.deepcopy(model)
        with torch.no_grad():
            for a, p in zip(self.average.parameters(), model.parameters(), strict=True):
                self.update(a, p)


class OfTorch(Average):
    def __call__(self, model):
        if self.average is None:
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.average.update_parameters(model)


AVERAGES = {
    "mul_add": lambda: Average(lambda a, p: a.data.mul_(0.9).add_(0.1 * p.detach())),
    "lerp": lambda: Average(lambda a, p: a.lerp_(p, 0.1)),
    "copy": lambda: Average(lambda a, p: a.copy_(a * 0.9 + p.data * 0.1)),
    "AveragedModel": lambda: OfTorch(None),
}


@pytest.mark.parametrize("name", AVERAGES)
@ways
def test_an_average_outside_the_model(way, name):
    full, half = AVERAGES[name](), AVERAGES[name]()
    train(None, full), train(way, half)
    for a, b in zip(full.average.parameters(), half.average.parameters(), strict=True):
        assert b.dtype == FULL
    ends = [torch.cat([p.detach().flatten() for p in f.average.parameters()]) for f in (full, half)]
    assert error(ends[1], ends[0]) < 0.05


@torch.no_grad()
def decay(model):
    for p in model.parameters():
        p.mul_(1 - 1e-3)


@torch.no_grad()
def normalize(model):
    for m in model[0], model[2]:
        m.weight.div_(m.weight.norm(dim=1, keepdim=True) ** 0.01)


def noise(model):
    for p in model.parameters():
        p.data.add_(torch.linspace(-1e-4, 1e-4, p.numel()).view_as(p))


def pull(model):
    starts = net().parameters()
    return 3 * sum(((p - a) ** 2).sum() for p, a in zip(model.parameters(), starts, strict=True))


def shrink(model):
    return 0.1 * sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize("settings", [{"after": f} for f in (decay, normalize, noise)]
                         + [{"penalty": f} for f in (pull, shrink)], ids=lambda s: [*s.values()][0].__name__)  # fmt: skip
@ways
def test_weights_that_are_changed_by_hand_or_pulled(way, settings):
    want = vector(train(None, **settings))
    assert error(vector(train(way, **settings)), want) < 0.05
    assert error(vector(train(None)), want) > 0.1  # the change matters


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.register_buffer("table", torch.ones(4, 8))
        self.register_buffer("mean", torch.ones(16))

    def forward(self, z):
        if self.training:
            self.table.mul_(0.999).add_(2 * 0.001)
            self.mean.lerp_(torch.full((16,), 2.0), 0.001)
        return z * self.weight


@ways
def test_averages_in_buffers(way):
    def make():
        return nn.Sequential(Codebook(), *net())

    full, half = train(None, make=make), train(way, make=make)
    assert_same(dict(half.named_buffers()), dict(full.named_buffers()))
    assert half[0].table.mean() > 1.05


# Memory and structure


@torch.no_grad()
def transpose(model):
    model[0].weight.data = model[0].weight.data.t()


def cut(model):
    model[0].weight.data, model[0].bias.data = model[0].weight.data[:1], model[0].bias.data[:1]


def write_view(model):
    model[0].weight.detach().view(-1)[3:7] = 0.5


def write_master(model):
    p, q = (model[i].weight for i in (0, 1))
    one = masters.masters_of(model)[p] if masters.masters_of(model) else p.detach()
    one.fill_(3.3)
    with torch.no_grad():
        q.fill_(2.0)


def write_float_model(model):
    found = masters.masters_of(model)
    plain = found.float_model() if found else model
    plain[0].weight.data.fill_(3.3), model[1].weight.data.fill_(2.0)


def write_negative_zero(model):
    with torch.no_grad():
        model[0].weight.fill_(1e-45)
    model.state_dict()
    model[0].weight.data.fill_(-0.0)


@pytest.mark.parametrize("write", [transpose, cut, write_view, write_master, write_float_model,
                                   write_negative_zero], ids=lambda f: f.__name__)  # fmt: skip
@flats
@both
def test_what_is_written_is_in_the_file_and_in_the_next_pass(dtype, flat, write):
    files, outs = [], []
    for is_mixed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        opt = torch.optim.SGD(model.parameters(), 0.0)
        if is_mixed:
            with_masters(model, opt, dtype=dtype, flat_master=flat)
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
        write(model)
        if write is cut:
            model = model[:1] if not is_mixed else model
            model[0](torch.ones(2, 4)).sum().backward()
        else:
            model(torch.ones(2, 4)).sum().backward()
            outs.append(model(torch.ones(2, 4)).detach())
        opt.step()
        files.append({k: v.clone() for k, v in model.state_dict().items() if k[0] == "0"})
    assert_same(dict(files[1]), dict(files[0]))
    if outs:
        torch.testing.assert_close(*outs, rtol=0.02, atol=0.02)


@flats
@pytest.mark.parametrize("when", ["before", "after"])
def test_memory_that_is_shared_stays_shared(when, flat):
    model = net()
    if when == "before":
        model.share_memory()
    kept = model.state_dict()
    model, opt = with_masters(model, torch.optim.SGD(model.parameters(), 0.1), dtype="bf16",
                              flat_master=flat)  # fmt: skip
    if when == "after":
        kept = model.share_memory().state_dict()
    model(X).sum().backward()
    opt.step()
    assert all(p.is_shared() for p in model.parameters())
    assert_same(dict(kept), dict(model.state_dict()))  # what another process sees
    kept["0.weight"].fill_(0.5)
    assert (model[0].weight == 0.5).all()


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(50, 32), nn.Linear(32, 50)

    def forward(self, x):
        return self.out(self.emb(x))

    def loss(self, x):
        return cross_entropy(self.out(self.emb(x)), x)


@flats
@both
def test_a_loss_of_another_method_is_computed_in_float32(dtype, flat):
    model = LM()
    plain, x = copy.deepcopy(model), torch.randint(50, (512,))
    with_masters(model, torch.optim.SGD(model.parameters(), 0.1), dtype=dtype, flat_master=flat)
    a, b = model.loss(x), plain.loss(x)
    assert_same(a, b)
    a.backward(), b.backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


# Errors


@flats
@pytest.mark.parametrize("owner, name", [(masters, "BufferSnapshot"), (flat_module := flat, "Vector"),
                                         (forward, "Copies"), (torch, "zeros")])  # fmt: skip
def test_an_out_of_memory_error_in_with_masters_leaves_a_float32_model(owner, name, flat, monkeypatch):
    if not flat and (owner is flat_module or owner is torch):
        return
    model, file = net(), net().state_dict()
    model[0].weight.grad = torch.ones(32, 16)
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def fail(*_, **__):
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(torch.OutOfMemoryError):
            with_masters(model, opt, dtype="bf16", flat_master=flat)
    assert_same(dict(model.state_dict()), dict(file))
    assert_same(model(X), net()(X))
    assert (model[0].weight.grad == 1).all() and not any("forward" in vars(m) for m in model.modules())
    with_masters(model, opt, dtype="bf16", flat_master=flat)
    model(X).sum().backward()


@both
def test_another_learner_trains_the_same_masters(dtype):
    dls, ends = batches(3), []
    for is_mixed in (False, True):
        model = net()
        if is_mixed:
            first = silent(Learner(dls, model, cross_entropy, cbs=MixedPrecision(dtype=dtype)))
            first.create_opt()
        other = silent(Learner(dls, model, cross_entropy, opt_func=lambda p, **k: OptimWrapper(p, torch.optim.SGD, **k)))
        other.fit(1, 1e-5, wd=0)
        ends.append(vector(model))
    assert error(ends[1], ends[0]) < 0.05
    with pytest.raises(MixedPrecisionError, match="already has masters"):
        getattr(other, f"to_{dtype}")()


@flats
@both
def test_a_gradient_that_is_assigned(dtype, flat):
    model = net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with_masters(model, opt, dtype=dtype, flat_master=flat)
    scaler = LossScaler(8.0, enabled=dtype == "fp16")
    scaler.scale(model(X).mean()).backward()
    scaler.unscale_(opt)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    scaler.step(opt)
    want = net().state_dict()
    want["0.weight"] -= 0.1
    assert_same(dict(model.state_dict()), dict(want))


@flats
@both
def test_a_model_is_freed_after_an_exception_in_a_backward_pass(dtype, flat):
    def fail():
        model = net()
        with_masters(model, torch.optim.SGD(model.parameters(), 0.1), dtype=dtype, flat_master=flat)
        model[0].bias.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(X).sum().backward()
        return weakref.ref(model)

    alive = fail()
    gc.collect()
    assert alive() is None


# Calls grow with the number of parameters


def n_calls(f):
    found = 0

    def count(frame, event, arg):
        nonlocal found
        found += "call" in event

    sys.setprofile(count)
    try:
        f()
    finally:
        sys.setprofile(None)
    return found


def tasks(n, is_mixed, flat):
    """Yield names and tasks of training for a model of `n` parameters."""
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(n)])
    opts = [torch.optim.SGD(model.parameters(), 0.1)]
    if not flat:  # an optimizer for each parameter
        opts = [torch.optim.SGD([p], 0.1) for p in model.parameters()]
    if is_mixed:
        with_masters(model, *opts, dtype="bf16", flat_master=flat)
    teacher, file = copy.deepcopy(model), model.state_dict()

    def step():
        model(torch.ones(1, 2)).sum().backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()

    @torch.no_grad()
    def follow():
        for t, p in zip(teacher.parameters(), model.parameters(), strict=True):
            t.mul_(0.9).add_(p, alpha=0.1)

    step()
    yield from {
        "state_dict": model.state_dict, "load": lambda: model.load_state_dict(file),
        "pickle": lambda: pickle.dumps(model), "copy": lambda: copy.deepcopy(model),
        "step": step, "teacher": follow, "float": model.float,
    }.items()  # fmt: skip


@flats
def test_calls_do_not_grow_with_the_square_of_the_number_of_parameters(flat):
    counts = {}
    for n in (50, 200):
        for is_mixed in (False, True):
            for name, f in tasks(n, is_mixed, flat):
                counts[name, n, is_mixed] = n_calls(f)
    more = {(name, n): counts[name, n, True] - counts[name, n, False] for name, n, _ in counts}
    for name, n in more:
        assert more[name, 200] <= 4.6 * max(more[name, 50], 50), (name, more)


# Several processes


def one_rank(rank, dtype, flat):
    """Train with DDP around parts, children, a wrapper of a method, and two passes for one loss."""
    found = {}
    for name in ("part", "children", "wrapper", "two passes", "whole"):
        torch.manual_seed(0)
        a, b = nn.Linear(16, 32), nn.Linear(32, 4)
        model = nn.ModuleList([a, b]) if name == "children" else nn.Sequential(a, b)
        opt = torch.optim.SGD(model.parameters(), 0.1)
        if dtype is not None:
            with_masters(model, opt, dtype=dtype, flat_master=flat)
        if name in ("part", "children"):
            a, b = DDP(a), DDP(b)
            call = lambda x, a=a, b=b: b(a(x))  # noqa: E731
            if name == "part":
                model[0], model[1] = a, b
                call = model
        elif name == "wrapper":
            call = DDP(Other(model))
        else:
            call = DDP(model)
        x = X[rank * 32 : rank * 32 + 32]
        for _ in range(5):
            opt.zero_grad()
            loss = call(x).square().mean()
            if name == "two passes":
                loss = loss - call(-x).sin().mean()
            loss.backward()
            opt.step()
        found[name] = vector(model)
    return found


class Other(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model[1](self.model[0](x))


def all_ways(rank):
    return {way: one_rank(rank, *way) for way in
            [(None, False), ("bf16", False), ("bf16", True), ("fp16", False), ("fp16", True)]}  # fmt: skip


def test_ranks_stay_equal_wherever_ddp_is(tmp_path):
    first, second = on_ranks(2, all_ways, tmp_path, ("mixedfp.optimizer",))
    assert_same(first, second)
    for way, found in first.items():
        for name, end in found.items():
            assert error(end, first[None, False][name], 0 * end) < 0.01, (way, name)


def sharded_later(rank):
    from torch.distributed.fsdp import fully_shard

    distributed.init_device_mesh("cpu", (1,)) if hasattr(distributed, "init_device_mesh") else None
    model = net()
    model, opt = with_masters(model, torch.optim.SGD(model.parameters(), 0.1), dtype="bf16")
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), 1e-5)
    for _ in range(5):
        opt.zero_grad()
        cross_entropy(model(X), Y).backward()
        opt.step()
    return {k: v.full_tensor() for k, v in model.state_dict().items()}


def test_fully_shard_after_with_masters_trains_float32_shards(tmp_path):
    (found,) = on_ranks(1, sharded_later, tmp_path)
    full = net()
    opt = torch.optim.SGD(full.parameters(), 1e-5)
    for _ in range(5):
        opt.zero_grad()
        cross_entropy(full(X), Y).backward()
        opt.step()
    end = torch.cat([w.flatten() for w in found.values()])
    assert end.dtype == FULL and error(end, vector(full)) < 0.05
