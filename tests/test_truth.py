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
from tiny import make_learner
from torch import nn

import mixedfp.callback  # noqa: F401, gives Learner to_fp16 and to_bf16
from mixedfp.engine import flat as flat_module
from mixedfp.engine import forward, masters
from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
flats = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
both = pytest.mark.parametrize("dtype", ["bf16", "fp16"])


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


def train(dtype, flat, after=lambda model: None):
    """Train; `after` follows each step. Return the last weights and buffers."""
    model, opt = mixed(dtype=dtype, lr=1e-3, make=torch.optim.AdamW, flat_master=flat)
    for _ in range(12):
        step(model, opt)
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


@flats
@both
def test_what_is_swapped_in_and_out_loses_no_bit(dtype, flat):
    assert_same(train(dtype, flat, look), train(dtype, flat))


def drift(model):
    for p in model.parameters():
        p.data.add_(torch.linspace(-1e-4, 1e-4, p.numel()).view_as(p))
    with torch.no_grad():
        model[0].weight.div_(model[0].weight.norm(dim=1, keepdim=True) ** 0.01)


def replace(model, opt):
    model[0].weight = opt.param_groups[0]["params"][0] = nn.Parameter(torch.full((4, 4), 0.5))


def join(model, opt):
    torch.manual_seed(2), model.append(nn.Linear(4, 4))
    opt.add_param_group({"params": list(model[-1].parameters())})


def assign(model, opt):
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, assign=True)
    opt.param_groups[0]["params"] = list(model.parameters())


CHANGES = {
    "data": lambda model, _: [p.data.mul_(2) for p in model.parameters()],
    "drift": lambda model, _: drift(model),
    "view": lambda model, _: model[0].weight.detach().view(-1)[3:7].fill_(0.5),
    "transpose": lambda model, _: setattr(model[0].weight, "data", model[0].weight.data.t()),
    "cut": lambda model, _: [setattr(p, "data", p.data[:1]) for p in model[1].parameters()],
    "swap": lambda model, _: torch.utils.swap_tensors(
        model[0].weight, nn.Parameter(torch.full((4, 4), 0.5))
    ),
    "replace": replace,
    "join": join,
    "assign": assign,
}


@flats
@both
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_in_the_next_pass_and_in_the_file_and_are_trained(change, dtype, flat):
    files, ends = [], []
    for kind in ("fp32", dtype):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        opt = torch.optim.SGD(model.parameters(), 0.0)
        if kind != "fp32":
            with_masters(model, opt, dtype=dtype, flat_master=flat)
        step(model, opt, torch.ones(2, 4)), opt.zero_grad()
        model(torch.ones(2, 4))  # later passes do not compute with its copies
        CHANGES[change](model, opt)
        ends.append([model(torch.ones(2, 4))])
        ends[-1][0].sum().backward(), opt.step()
        files.append({k: v.clone() for k, v in model.state_dict().items()})
        for group in opt.param_groups:
            group["lr"] = 0.1
        for _ in range(3):
            step(model, opt, torch.ones(2, 4))
        ends[-1] += model.parameters()
    assert_same(files[1], files[0])
    torch.testing.assert_close(*ends, rtol=0.01, atol=0.01)


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
    model, kinds = net(), set()
    model.packed = PackedWeight(torch.arange(64, dtype=torch.uint8), torch.rand(16) * 1e-3)
    model.real = PackedWeight(torch.rand(16), torch.rand(16))
    model.eights = nn.Parameter(torch.randn(16).to(torch.float8_e4m3fn), requires_grad=False)
    model.register_buffer("inv_freq", 1e4 ** (-torch.arange(8) / 8))
    model.register_buffer("turns", torch.polar(torch.ones(8), torch.arange(8) / 3))
    model.forward = model[:4].forward
    names = "packed", "real", "eights", "inv_freq", "turns"

    def kept(model):
        assert type(model.packed) is PackedWeight
        return {k: getattr(model, k).detach().clone().view(torch.uint8) for k in names}

    before = kept(model)
    model[0].register_forward_hook(lambda *_: kinds.add(type(model.real)))
    opt = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    with_masters(model, opt, dtype=dtype, flat_master=flat)
    step(model, opt)
    for found in (model, copy.deepcopy(model), opt.masters.float_model()):
        assert_same(kept(found), before)
    assert kinds == {PackedWeight}


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
    full, half, first = make_learner(), make_learner(), make_learner().model[0].weight
    half.to_bf16().create_opt()
    other = make_learner(model=half.model)
    [learn.fit(1, 1e-5, wd=0) for learn in (full, other)]
    found, want = (learn.model[0].weight - first for learn in (other, full))
    assert (found - want).norm() < 0.05 * want.norm()
    with pytest.raises(MixedPrecisionError, match="already has masters"):
        other.to_fp16()


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
