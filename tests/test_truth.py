"""The parameters are the masters: what other code sees, writes, shares and saves is trained.

Oracles: the same script in float32, and the same script without what must change nothing.
"""

import copy
import gc
import operator
import pickle
import sys

import pytest
import torch
from tiny import Do, make_dls, make_learner, opt_state, torch_optimizer
from torch import nn
from torch.nn.functional import cross_entropy

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


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def mixed(model=None, dtype="bf16", lr=0.1, make=torch.optim.SGD, **settings):
    """Return a model, or `net`, and its optimizer, in mixed precision."""
    model = net() if model is None else model
    return with_masters(model, make(model.parameters(), lr=lr), dtype=dtype, **settings)


def step(model, opt, x=X):
    opt.zero_grad()
    model(x).square().mean().backward()
    opt.step()


def learner(model, n, **kwargs):
    """Return a learner whose epoch is `n` times the same batch."""
    dls = make_dls(X.repeat(n + 1, 1), Y.repeat(n + 1), n_valid=64, bs=64)
    opt = torch_optimizer(torch.optim.SGD, momentum=0.9)
    return make_learner(opt, model, dls=dls, **kwargs)


def train(way, after=lambda model: None, n=12, lr=1e-3):
    """Train; `after` follows each step. Return the last weights and buffers."""
    (dtype, flat, how), model, scale = way, net(), 128.0
    if how == "callback":
        learn = learner(model, n, cbs=Do("after_batch", lambda learn: after(learn.model)))
        scale = dict(loss_scale=scale) if dtype == "fp16" else {}
        getattr(learn, f"to_{dtype}")(flat_master=flat, **scale).fit(1, lr, wd=0.0)
        return dict(model.state_dict())
    opt = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    with_masters(model, opt, dtype=dtype, flat_master=flat)
    scaler = LossScaler(scale, enabled=dtype == "fp16")
    for _ in range(n):
        opt.zero_grad()
        scaler.scale(cross_entropy(model(X), Y)).backward()
        scaler.step(opt), scaler.update()
        after(model)
    return dict(model.state_dict())


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


@pytest.mark.parametrize("way", WAYS, ids=lambda w: f"{w[0]}-{'flat' * w[1]}-{w[2]}")
def test_what_is_swapped_in_and_out_loses_no_bit(way):
    assert_same(train(way, look), train(way))


def drift(model):
    for p in model.parameters():
        p.data.add_(torch.linspace(-1e-4, 1e-4, p.numel()).view_as(p))
    with torch.no_grad():
        model[0].weight.div_(model[0].weight.norm(dim=1, keepdim=True) ** 0.01)


WRITES = {
    "drift": drift,
    "view": lambda model: model[0].weight.detach().view(-1)[3:7].fill_(0.5),
    "transpose": lambda model: setattr(model[0].weight, "data", model[0].weight.data.t()),
    "cut": lambda model: [setattr(p, "data", p.data[:1]) for p in model[1].parameters()],
}


@flats
@both
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_in_the_file_and_in_the_next_pass(write, dtype, flat):
    files, outs = [], []
    for kind in ("fp32", dtype):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        opt = torch.optim.SGD(model.parameters(), 0.0)
        if kind != "fp32":
            with_masters(model, opt, dtype=dtype, flat_master=flat)
        step(model, opt, torch.ones(2, 4)), opt.zero_grad()
        WRITES[write](model)
        outs.append(model(torch.ones(2, 4)))
        outs[-1].sum().backward(), opt.step()
        files.append({k: v.clone() for k, v in model.state_dict().items()})
    assert_same(files[1], files[0])
    torch.testing.assert_close(*outs, rtol=0.02, atol=0.02)


@flats
@pytest.mark.parametrize("when", ["before", "after"])
def test_memory_that_is_shared_stays_shared(when, flat):
    model = net().share_memory() if when == "before" else net()
    kept = model.state_dict()
    _, opt = mixed(model, flat_master=flat)
    if when == "after":
        kept = model.share_memory().state_dict()
    step(model, opt)
    assert all(p.is_shared() for p in model.parameters())
    assert_same(dict(kept), dict(model.state_dict()))  # what another process sees
    kept["0.weight"].fill_(0.5)
    assert (model[0].weight == 0.5).all()


@flats
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adafactor])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_parameters_are_the_users_objects_and_float32(dtype, make, flat):
    """Flat they lie in one vector, and files of parts are small."""
    model = net()
    before = list(model.parameters())
    _, opt = mixed(model, dtype, make=make, flat_master=flat)
    for _ in range(2):
        step(model, opt)
        for p, was in zip(model.parameters(), before, strict=True):
            assert p is was and p.dtype == p.grad.dtype == torch.float32
            assert p.untyped_storage().nbytes() == 4 * p.numel()
    assert len(opt.masters.vectors) == flat
    for vector in opt.masters.vectors:
        views = [vector.view(vector.full, p) for p in before]
        assert all(map(torch.equal, views, before))
        assert [v.data_ptr() for v in views] == [p.data_ptr() for p in before]
    for m in (opt.masters.float_model(), opt.masters.restore()):
        assert forward.forward_of(m) is None and all(map(operator.is_, m.parameters(), before))
    assert {p.dtype for p in before} == {torch.float32}


OWN = [(dict(dtype="fp32"), True), (dict(skip_nonfinite=False), True), (dict(), False)]
OWN += [(dict(dtype="fp16"), False)]


@pytest.mark.parametrize("settings, is_own", OWN, ids=str)
def test_a_step_that_skips_nothing_is_the_optimizers_own(settings, is_own):
    assert ("step" not in vars(mixed(**settings)[1])) == is_own


@flats
def test_16_bit_weights_are_widened_with_one_warning_and_frozen_ones_stay(flat, warnings_of):
    """Updates below the distance of two 16-bit numbers are kept once a layer is trained."""
    model = nn.Sequential(nn.Linear(16, 6), nn.Linear(6, 2)).bfloat16()
    model[0].requires_grad_(False)
    _, opt = mixed(model, lr=1e-5, make=torch.optim.AdamW, flat_master=flat)
    assert len(warnings_of()) == 1
    step(model, opt)
    frozen, before = model[0].weight, model[0].weight.detach().float()
    assert (frozen.dtype, model[1].weight.dtype) == (torch.bfloat16, torch.float32)
    model[0].requires_grad_(True)
    for _ in range(3):
        step(model, opt)
    assert frozen is model[0].weight and frozen.dtype == torch.float32
    assert 0 < (frozen - before).abs().max() < 1e-4
    assert frozen in set(opt.masters.copies.params)


class PackedWeight(nn.Parameter):
    """Two 4-bit codes a byte, as quantizing libraries keep them, with an attribute of its own."""

    def __new__(cls, data, scales=None):
        self = torch.Tensor._make_subclass(cls, data, False)
        self.scales = scales
        return self


@flats
@both
def test_packed_weights_and_buffers_keep_their_bits(dtype, flat):
    model = net()
    model.packed = PackedWeight(torch.arange(64, dtype=torch.uint8), torch.rand(16) * 1e-3)
    model.eights = nn.Parameter(torch.randn(16).to(torch.float8_e4m3fn), requires_grad=False)
    model.register_buffer("inv_freq", 1e4 ** (-torch.arange(8) / 8))
    model.register_buffer("turns", torch.polar(torch.ones(8), torch.arange(8) / 3))
    model.forward = model[:4].forward
    names = "packed", "eights", "inv_freq", "turns"

    def kept(model):
        assert type(model.packed) is PackedWeight
        return {k: getattr(model, k).detach().clone().view(torch.uint8) for k in names}

    before = kept(model)
    opt = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    with_masters(model, opt, dtype=dtype, flat_master=flat)
    step(model, opt)
    for found in (model, copy.deepcopy(model), opt.masters.float_model()):
        assert_same(kept(found), before)


@pytest.mark.parametrize("owner, name, flat", [
    (masters, "BufferSnapshot", False), (forward, "Copies", False), (torch, "zeros", True),
    (forward, "part_of", True), (flat_module, "Vector", True)])  # fmt: skip
def test_out_of_memory_in_with_masters_leaves_a_float32_model(owner, name, flat, monkeypatch):
    model = net()
    model[0].weight.grad = torch.ones(32, 16)

    def fail(*_, **__):
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(torch.OutOfMemoryError):
            mixed(model, flat_master=flat)
    assert not any("forward" in vars(m) for m in model.modules())
    assert_same(dict(model.state_dict()), dict(net().state_dict()))
    assert_same(model(X), net()(X))
    assert (model[0].weight.grad == 1).all()
    mixed(model, flat_master=flat)[0](X).sum().backward()


class Named(nn.Linear):
    forward = lambda self, x: nn.functional.linear(x, self.weight)  # noqa: E731


def test_a_pickle_of_any_forward_is_a_plain_model():
    model, _ = mixed(Named(16, 4, bias=False))
    twin = pickle.loads(pickle.dumps(model))
    assert type(twin.forward) is type(Named(1, 1).forward)
    torch.testing.assert_close(twin(X), X @ model.weight.T)


def test_another_learner_trains_the_float32_weights_and_gets_no_masters():
    full, half = net(), net()
    learner(half, 3).to_bf16().create_opt()
    others, first = [learner(m, 3) for m in (full, half)], net()[0].weight
    [other.fit(1, 1e-5, wd=0) for other in others]
    found, want = (model[0].weight - first for model in (half, full))
    assert (found - want).norm() < 0.05 * want.norm()
    with pytest.raises(MixedPrecisionError, match="already has masters"):
        others[1].to_fp16()


def test_a_file_with_a_broken_loss_scale_changes_nothing():
    learn = make_learner("adam").to_fp16()
    learn.fit(1)
    bad = copy.deepcopy(learn.opt.state_dict())
    bad["loss_scale"]["scale"] = -1.0
    for state in bad["state"]:
        state["grad_avg"] = state["grad_avg"] + 1
    before = opt_state(learn)
    with pytest.raises(ValueError, match="`scale` is -1.0"):
        learn.opt.load_state_dict(bad)
    assert_same(opt_state(learn), before)


def n_calls(n, is_mixed, flat):
    """Return the calls of a step of `n` parameters, of which each has an optimizer or all one."""
    model, found = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(n)]), []
    groups = [model.parameters()] if flat else [[p] for p in model.parameters()]
    opts = [torch.optim.SGD(ps, 0.1) for ps in groups]
    if is_mixed:
        with_masters(model, *opts, dtype="bf16", flat_master=flat)
    for _ in range(2):
        found.clear(), gc.collect(), gc.disable()  # no finalizers of other tests
        sys.setprofile(lambda frame, event, arg: found.append(1) if "call" in event else None)
        model(torch.ones(1, 2)).sum().backward()
        [(opt.step(), opt.zero_grad()) for opt in opts]
        sys.setprofile(None)
        gc.enable()
    return len(found)


@flats
def test_calls_do_not_grow_with_the_square_of_the_number_of_parameters(flat):
    few, many = (n_calls(n, True, flat) - n_calls(n, False, flat) for n in (50, 200))
    assert many <= 4.6 * max(few, 50)
