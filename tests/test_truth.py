"""The weights that other code sees, writes and saves are the ones that are trained.

Oracles: the same script in float32, and the same script without what must change nothing.
"""

import copy
import gc
import sys

import pytest
import torch
from fastai.basics import DataLoaders, Learner
from fastai.optimizer import OptimWrapper
from tiny import Do, silent
from torch import nn
from torch.nn.functional import cross_entropy
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
WAYS = [("bf16", False, "loop"), ("bf16", True, "callback")]
WAYS += [("fp16", True, "loop"), ("fp16", False, "callback")]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda w: f"{w[0]}-{'flat' * w[1]}-{w[2]}")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def sgd(params, lr=0.1, **settings):
    return torch.optim.SGD(params, lr, **settings)


def vector(model):
    """Return what a file would hold, as one vector."""
    return torch.cat([w.flatten() for w in model.state_dict().values()])


def error(found, want):
    """Return the error of a movement from the first weights."""
    return ((found - want).norm() / (want - vector(net())).norm()).item()


def train(way=None, after=None, penalty=None, n=60):
    """Train, in float32 without a `way`; `after(model)` follows each step. Return the model."""
    (dtype, flat, how), lr, model = way or (None, False, ""), 1e-3, net()

    def loss_of(out, y):
        return cross_entropy(out, y) + (0 if penalty is None else penalty(model))

    if how == "callback":
        cbs = Do("after_batch", lambda learn: after and after(learn.model))
        learn = make_learner(model, n, loss_of, momentum=0.9, cbs=cbs)
        scale = dict(loss_scale=128.0) if dtype == "fp16" else {}
        getattr(learn, f"to_{dtype}")(flat_master=flat, **scale).fit(1, lr, wd=0.0)
        return model
    opt = sgd(model.parameters(), lr, momentum=0.9)
    if dtype is not None:
        with_masters(model, opt, dtype=dtype, flat_master=flat)
    scaler = LossScaler(128.0, enabled=dtype == "fp16")
    for _ in range(n):
        opt.zero_grad()
        scaler.scale(loss_of(model(X), Y)).backward()
        scaler.step(opt), scaler.update()
        if after is not None:
            after(model)
    return model


def make_learner(model, n, loss=cross_entropy, momentum=0.0, **kwargs):
    rows = list(zip(X, Y, strict=True))
    data = dict(bs=64, shuffle=False, num_workers=0, device="cpu")
    dls = DataLoaders.from_dsets(rows * n, rows, **data)

    def opt(params, **settings):
        return OptimWrapper(params, torch.optim.SGD, momentum=momentum, **settings)

    return silent(Learner(dls, model, loss_func=loss, opt_func=opt, **kwargs))


# What changes nothing, averages outside of the model, writes by hand, penalties


def look(model):
    """Swap in other weights, by hand and from a file, and swap them out; cast to float32."""
    file = copy.deepcopy(model.state_dict())
    kept = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data * 0.99
    model.eval()(X), model.train()
    for p, k in zip(model.parameters(), kept, strict=True):
        p.data = k
    model.load_state_dict({k: v * 0.99 for k, v in file.items()}), model.load_state_dict(file)
    model.double().float().to(torch.float32)


@ways
def test_no_bit_is_lost(way):
    assert_same(vector(train(way, look, n=12)), vector(train(way, n=12)))


@ways
def test_an_average_outside_the_model_is_one_of_float32_weights(way):
    kept, average = [], AveragedModel(net(), multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def see(model):
        average.update_parameters(model)
        kept.append([p.detach().clone() for p in model.parameters()])

    train(way, see, n=12)
    want = kept[0]
    for now in kept[1:]:
        want = [w.lerp(p, 0.1) for w, p in zip(want, now, strict=True)]
    torch.testing.assert_close([*average.module.parameters()], want, rtol=0, atol=1e-7)


def drift(model):
    for p in model.parameters():
        p.data.add_(torch.linspace(-1e-4, 1e-4, p.numel()).view_as(p))
    with torch.no_grad():
        model[0].weight.div_(model[0].weight.norm(dim=1, keepdim=True) ** 0.01)


def pull(model):
    starts = net().parameters()
    return 3 * sum(((p - a) ** 2).sum() for p, a in zip(model.parameters(), starts, strict=True))


@pytest.mark.parametrize(
    "settings", [dict(after=drift), dict(penalty=pull)], ids=["by hand", "by a loss"]
)
@ways
def test_weights_that_are_changed(way, settings):
    want = vector(train(None, **settings))
    assert error(vector(train(way, **settings)), want) < 0.05
    assert error(vector(train(None)), want) > 0.1  # the change matters


# Memory and structure


def transpose(model, _):
    model[0].weight.data = model[0].weight.data.t()


def cut(model, _):
    model[1].weight.data, model[1].bias.data = model[1].weight.data[:1], model[1].bias.data[:1]


def write_view(model, _):
    model[0].weight.detach().view(-1)[3:7] = 0.5


@pytest.mark.parametrize("write", [transpose, cut, write_view], ids=lambda f: f.__name__)
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


def test_another_learner_trains_the_float32_weights_and_gets_no_masters():
    full, half = net(), net()
    make_learner(half, 3).to_bf16().create_opt()
    others = [make_learner(m, 3) for m in (full, half)]
    [other.fit(1, 1e-5, wd=0) for other in others]
    assert error(vector(half), vector(full)) < 0.05
    with pytest.raises(MixedPrecisionError, match="already has masters"):
        others[1].to_fp16()


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


# Calls grow with the number of parameters


def n_calls(n, is_mixed, flat):
    """Return the calls of a step of `n` parameters, of which each has an optimizer or all one."""
    model, found = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(n)]), []
    groups = [model.parameters()] if flat else [[p] for p in model.parameters()]
    opts = [sgd(ps) for ps in groups]
    if is_mixed:
        with_masters(model, *opts, dtype="bf16", flat_master=flat)

    def step():
        model(torch.ones(1, 2)).sum().backward()
        [(opt.step(), opt.zero_grad()) for opt in opts]

    step()
    gc.collect(), gc.disable()  # no finalizers of other tests
    sys.setprofile(lambda frame, event, arg: found.append(1) if "call" in event else None)
    step()
    sys.setprofile(None)
    gc.enable()
    return len(found)


@flats
def test_calls_do_not_grow_with_the_square_of_the_number_of_parameters(flat):
    few, many = (n_calls(n, True, flat) - n_calls(n, False, flat) for n in (50, 200))
    assert many <= 4.6 * max(few, 50)
