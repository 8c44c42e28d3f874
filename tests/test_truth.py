"""The weights that other code sees, writes and saves are the ones that are trained.

Oracles: the same script in float32, and the same script without what must change nothing.
"""

import copy
import gc
import pickle
import sys
import weakref
from itertools import product

import pytest
import torch
from fastai.basics import Callback, DataLoaders, Learner
from fastai.optimizer import OptimWrapper
from ranks import on_ranks
from tiny import silent
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mixedfp.callback  # noqa: F401, gives Learner to_fp16 and to_bf16
from mixedfp.engine import flat as flat_module
from mixedfp.engine import forward, masters
from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
Y = torch.arange(64) % 4
flats = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
both = pytest.mark.parametrize("dtype", ["bf16", "fp16"])
WAYS = [*product(("bf16", "fp16"), (False, True), ("loop", "resumed"))]
WAYS += [("bf16", True, "callback"), ("fp16", False, "callback")]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda w: f"{w[0]}-{'flat' * w[1]}-{w[2]}")


def named(functions):
    return dict(argvalues=functions, ids=[f.__name__ for f in functions])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def sgd(params, lr=0.1, **settings):
    return torch.optim.SGD(params, lr, **settings)


def vector(model):
    """Return what a file would hold, as one vector."""
    return torch.cat([w.flatten() for w in model.state_dict().values()])


def error(found, want, start=None):
    """Return the error of a movement from `start`."""
    start = vector(net()) if start is None else start
    return ((found - want).norm() / (want - start).norm()).item()


def train(way=None, after=None, penalty=None, make=net, lr=1e-3, n=60):
    """Train, in float32 without a `way`; `after(model)` follows each step. Return the model."""
    dtype, flat, how = way or (None, False, "")

    def prepare():
        model = make()
        opt = sgd(model.parameters(), lr, momentum=0.9)
        if dtype is not None:
            with_masters(model, opt, dtype=dtype, flat_master=flat)
        return model, opt, LossScaler(128.0, enabled=dtype == "fp16")

    def loss_of(out, y):
        return cross_entropy(out, y) + (0 if penalty is None else penalty(model))

    if how == "callback":
        model = make()
        learn = make_learner(model, n, loss_of, momentum=0.9, cbs=After(after))
        scale = dict(loss_scale=128.0) if dtype == "fp16" else {}
        getattr(learn, f"to_{dtype}")(flat_master=flat, **scale).fit(1, lr, wd=0.0)
        return model
    model, opt, scaler = prepare()
    for i in range(n):
        if i == n // 2 and how == "resumed":
            files = pickle.dumps([o.state_dict() for o in (model, opt, scaler)])
            model, opt, scaler = prepare()
            for o, state in zip((model, opt, scaler), pickle.loads(files), strict=True):
                o.load_state_dict(state)
        opt.zero_grad()
        scaler.scale(loss_of(model(X), Y)).backward()
        scaler.step(opt), scaler.update()
        if after is not None:
            after(model)
    return model


class After(Callback):
    def __init__(self, work):
        self.work = work

    def after_batch(self):
        if self.training and self.work is not None:
            self.work(self.model)


def make_learner(model, n, loss=cross_entropy, momentum=0.0, **kwargs):
    rows = list(zip(X, Y, strict=True))
    data = dict(bs=64, shuffle=False, num_workers=0, device="cpu")
    dls = DataLoaders.from_dsets(rows * n, rows, **data)

    def opt(params, **settings):
        return OptimWrapper(params, torch.optim.SGD, momentum=momentum, **settings)

    return silent(Learner(dls, model, loss_func=loss, opt_func=opt, **kwargs))


# Averages swapped in for evaluation, loads, casts: nothing changes


@torch.no_grad()
def swap(model):
    kept = [p.clone() for p in model.parameters()]
    [p.mul_(0.99) for p in model.parameters()], model(X)
    [p.copy_(k) for p, k in zip(model.parameters(), kept, strict=True)]


def swap_data(model):
    kept = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data * 0.99
    model.eval()(X), model.train()
    for p, k in zip(model.parameters(), kept, strict=True):
        p.data = k


def load(model):
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict({k: v * 0.99 for k, v in kept.items()}), model.load_state_dict(kept)


def to_float(model):
    for p in model.parameters():
        p.data = p.to(torch.float32)
    model.double().float().to(torch.float32)


@pytest.mark.parametrize("f", **named([swap, swap_data, load, to_float, nn.Module.float]))
@ways
def test_no_bit_is_lost(way, f):
    assert_same(vector(train(way, f, n=12)), vector(train(way, n=12)))


class Casts(nn.Sequential):
    def forward(self, x):
        return super().forward(x) if self.float() is self else x


@ways
def test_a_cast_in_the_forward_pass_loses_no_bit(way):
    found = train(way, make=lambda: Casts(*net()), n=12)
    assert_same(vector(found), vector(train(way, n=12)))


# Averages outside the model, writes by hand, penalties


class Average:
    """An average of the model's weights, beginning with the first step's."""

    def __init__(self, update):
        self.update, self.average = update, None

    def __call__(self, model):
        if self.average is None:
            own = dict(multi_avg_fn=get_ema_multi_avg_fn(0.9))
            self.average = copy.deepcopy(model) if self.update else AveragedModel(model, **own)
        if self.update is None:
            return self.average.update_parameters(model)
        with torch.no_grad():
            for a, p in zip(self.average.parameters(), model.parameters(), strict=True):
                self.update(a, p)


AVERAGES = {
    "mul_add": lambda a, p: a.data.mul_(0.9).add_(0.1 * p.detach()),
    "lerp": lambda a, p: a.lerp_(p, 0.1),
    "AveragedModel": None,
}


@pytest.mark.parametrize("name", AVERAGES)
@ways
def test_an_average_outside_the_model(way, name):
    full, half = Average(AVERAGES[name]), Average(AVERAGES[name])
    train(None, full), train(way, half)
    a, b = (nn.utils.parameters_to_vector(f.average.parameters()) for f in (full, half))
    assert b.dtype == torch.float32 and error(b, a) < 0.05


@torch.no_grad()
def decay(model):
    [p.mul_(1 - 1e-3) for p in model.parameters()]


@torch.no_grad()
def normalize(model):
    for m in model[0], model[2]:
        m.weight.div_(m.weight.norm(dim=1, keepdim=True) ** 0.01)


def drift(model):
    for p in model.parameters():
        p.data.add_(torch.linspace(-1e-4, 1e-4, p.numel()).view_as(p))


def pull(model):
    starts = net().parameters()
    return 3 * sum(((p - a) ** 2).sum() for p, a in zip(model.parameters(), starts, strict=True))


@pytest.mark.parametrize("f", **named([decay, normalize, drift, pull]))
@ways
def test_weights_that_are_changed_by_hand_or_pulled_back(way, f):
    settings = {"penalty" if f is pull else "after": f}
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
    full, half = (train(w, make=lambda: nn.Sequential(Codebook(), *net())) for w in (None, way))
    assert_same(dict(half.named_buffers()), dict(full.named_buffers()))
    assert half[0].table.mean() > 1.05


# Memory and structure


def transpose(model, _):
    model[0].weight.data = model[0].weight.data.t()


def cut(model, _):
    model[1].weight.data, model[1].bias.data = model[1].weight.data[:1], model[1].bias.data[:1]


def write_view(model, _):
    model[0].weight.detach().view(-1)[3:7] = 0.5


def write_master(model, opt):
    model[0].weight.detach().fill_(3.3)
    model[1].weight.data.fill_(2.0)


def write_float_model(model, opt):
    (opt.masters.float_model() if hasattr(opt, "masters") else model)[0].weight.data.fill_(3.3)
    model[1].weight.data.fill_(2.0)


def write_negative_zero(model, _):
    model[0].weight.data.fill_(1e-45), model.state_dict(), model[0].weight.data.fill_(-0.0)


WRITES = [transpose, cut, write_view, write_master, write_float_model, write_negative_zero]


@pytest.mark.parametrize("write", **named(WRITES))
@flats
@both
def test_a_write_is_in_the_file_and_in_the_next_pass(dtype, flat, write):
    files, outs = [], []
    for is_mixed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        opt = sgd(model.parameters(), 0.0)
        if is_mixed:
            with_masters(model, opt, dtype=dtype, flat_master=flat)
        model(torch.ones(2, 4)).sum().backward(), opt.step(), opt.zero_grad()
        write(model, opt)
        outs.append(model(torch.ones(2, 4)))
        outs[-1].sum().backward(), opt.step()
        files.append({k: v.clone() for k, v in model.state_dict().items()})
    assert_same(files[1], files[0])
    torch.testing.assert_close(*outs, rtol=0.02, atol=0.02)


@flats
@pytest.mark.parametrize("when", ["before", "after"])
def test_memory_that_is_shared_stays_shared(when, flat):
    model = net().share_memory() if when == "before" else net()
    kept, opt = model.state_dict(), sgd(model.parameters())
    with_masters(model, opt, dtype="bf16", flat_master=flat)
    if when == "after":
        kept = model.share_memory().state_dict()
    model(X).sum().backward(), opt.step()
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
    model, x = LM(), torch.randint(50, (512,))
    plain = copy.deepcopy(model)
    with_masters(model, sgd(model.parameters()), dtype=dtype, flat_master=flat)
    assert_same(model.loss(x), plain.loss(x))
    model.loss(x).backward(), plain.loss(x).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


# Errors


@pytest.mark.parametrize("owner, name, flat", [
    (masters, "BufferSnapshot", False), (forward, "Copies", False), (torch, "zeros", True),
    (forward, "part_of", True), (flat_module, "Vector", True)])  # fmt: skip
def test_out_of_memory_in_with_masters_leaves_a_float32_model(owner, name, flat, monkeypatch):
    model = net()
    opt = sgd(model.parameters())
    model[0].weight.grad = torch.ones(32, 16)

    def fail(*_, **__):
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(torch.OutOfMemoryError):
            with_masters(model, opt, dtype="bf16", flat_master=flat)
    assert not any("forward" in vars(m) for m in model.modules())
    assert_same(dict(model.state_dict()), dict(net().state_dict()))
    assert_same(model(X), net()(X))
    assert (model[0].weight.grad == 1).all()
    with_masters(model, opt, dtype="bf16", flat_master=flat)[0](X).sum().backward()


@both
def test_another_learner_over_the_model_trains_its_float32_weights(dtype):
    full, half = net(), net()
    getattr(make_learner(half, 3), f"to_{dtype}")().create_opt()
    others = [make_learner(m, 3) for m in (full, half)]
    [other.fit(1, 1e-5, wd=0) for other in others]
    assert error(vector(half), vector(full)) < 0.05
    with pytest.raises(MixedPrecisionError, match="already has masters"):
        getattr(others[1], f"to_{dtype}")()


@flats
@both
def test_a_gradient_that_is_assigned(dtype, flat):
    model = net()
    opt = sgd(model.parameters())
    with_masters(model, opt, dtype=dtype, flat_master=flat)
    scaler = LossScaler(8.0, enabled=dtype == "fp16")
    scaler.scale(model(X).mean()).backward(), scaler.unscale_(opt)
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
        with_masters(model, sgd(model.parameters()), dtype=dtype, flat_master=flat)
        model[0].bias.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(X).sum().backward()
        return weakref.ref(model)

    alive = fail()
    gc.collect()
    assert alive() is None


# Calls grow with the number of parameters


def n_calls(f):
    found = []
    gc.collect(), gc.disable()  # no finalizers of other tests
    sys.setprofile(lambda frame, event, arg: found.append(1) if "call" in event else None)
    try:
        f()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(found)


def tasks(n, is_mixed, flat):
    """Return tasks of training a model of `n` parameters, by name."""
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(n)])
    groups = [model.parameters()] if flat else [[p] for p in model.parameters()]
    opts = [sgd(ps) for ps in groups]  # an optimizer for each parameter, or one
    if is_mixed:
        with_masters(model, *opts, dtype="bf16", flat_master=flat)
    teacher, file = copy.deepcopy(model), model.state_dict()

    def step():
        model(torch.ones(1, 2)).sum().backward()
        [(opt.step(), opt.zero_grad()) for opt in opts]

    @torch.no_grad()
    def follow():
        for t, p in zip(teacher.parameters(), model.parameters(), strict=True):
            t.mul_(0.9).add_(p, alpha=0.1)

    step()
    own = dict(state_dict=model.state_dict, float=model.float, step=step, teacher=follow)
    own |= dict(pickle=lambda: pickle.dumps(model), copy=lambda: copy.deepcopy(model))
    return own | dict(load=lambda: model.load_state_dict(file))


@flats
def test_calls_do_not_grow_with_the_square_of_the_number_of_parameters(flat):
    found = [tasks(n, is_mixed, flat) for n in (50, 200) for is_mixed in (False, True)]
    for k in found[0]:
        counts = [n_calls(each[k]) for each in found]
        few, many = counts[1] - counts[0], counts[3] - counts[2]
        assert many <= 4.6 * max(few, 50), (k, few, many)


# Several processes


class Other(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model[2](self.model[1](self.model[0](x)))


def on_a_rank(rank):
    """Return the weights after training with DDP in many places, by place, dtype and layout."""
    from torch.distributed.fsdp import fully_shard

    found, x = {}, X[rank * 32 : rank * 32 + 32]
    for place in ("part", "children", "method", "two passes", "shards"):
        for dtype, flat in (None, False), *product(("bf16", "fp16"), (False, True)):
            model = nn.ModuleList(net()) if place == "children" else net()
            opt = sgd(model.parameters())
            if dtype is not None:
                with_masters(model, opt, dtype=dtype, flat_master=flat)
            if place == "part":
                model[0], model[2] = DDP(model[0]), DDP(model[2])
            elif place == "shards":
                fully_shard(model)
                opt = sgd(model.parameters())
            call = model
            if place == "children":
                call = Other([DDP(model[0]), model[1], DDP(model[2])])
            elif place in ("method", "two passes"):
                call = DDP(Other(model) if place == "method" else model)
            for _ in range(5):
                opt.zero_grad()
                loss = call(x).square().mean()
                (loss - call(-x).sin().mean() if place == "two passes" else loss).backward()
                opt.step()
            file = [getattr(w, "full_tensor", lambda w=w: w)() for w in model.state_dict().values()]
            found[place, dtype, flat] = torch.cat([w.flatten() for w in file])
    return found


def test_ranks_stay_equal_wherever_ddp_is_and_after_fully_shard(tmp_path):
    first, second = on_ranks(2, on_a_rank, tmp_path, ("mixedfp.optimizer",))
    assert_same(first, second)
    for (place, *how), end in first.items():
        assert end.dtype == torch.float32
        assert error(end, first[place, None, False]) < 0.05, (place, how)
