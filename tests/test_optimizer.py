"""`mixedfp.optimizer` in plain loops. Oracles: the same loop in 32 bits; masters kept by hand."""

import copy
import io
import math
import pickle
import shutil
from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler, swa_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import MasterOptimizer, with_masters
from mixedfp.scaler import LossScaler
from mixedfp.step import is_elementwise
from mixedfp.testing import assert_same

torch.set_num_threads(1)  # these tensors are tiny: a second thread would only be waited for

FULL, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16

# Models and loops


class Net(nn.Module):
    """Matrices, a norm, a number; one layer that every third batch uses, one that none does."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.sometimes, self.never = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.count = 0

    def forward(self, x):
        x = self.scale * torch.tanh(self.norm(self.first(x)))
        self.count += self.training
        if self.count % 3 == 2:
            x = x + self.sometimes(x)
        return self.head(x)


def matrices():
    """Return a net that Muon takes: it has matrices only."""
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


def norm_net():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


class Words(nn.Module):
    """An embedding with sparse gradients, averaged."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 3, sparse=True)

    def forward(self, x):
        ids = (x.float() * 10).long() % 9
        return self.embed(ids).mean(1)


def make(net, seed=0):
    """Return a seeded net."""
    torch.manual_seed(seed)
    return net()


def batches(n=6, seed=1, bs=5):
    """Return `n` batches of 4 inputs and 3 targets."""
    rng = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(bs, 4, generator=rng), torch.randn(bs, 3, generator=rng)) for _ in range(n)
    ]


def loss_of(model, x, y):
    """Return the 32-bit loss of a model in any dtype."""
    dtype = min((p.dtype for p in model.parameters()), key=lambda dtype: dtype.itemsize)
    return F.mse_loss(model(x.to(dtype)).float(), y)


def train(model, opt, data, **zero):
    """Run a plain loop; return the losses."""
    losses = []
    for x, y in data:
        opt.zero_grad(**zero)
        loss = loss_of(model, x, y)
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return losses


def train_by_closure(model, opt, data):
    """Run a plain loop with a closure; return the losses."""

    def closure():
        opt.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    losses = []
    for x, y in data:  # noqa: B007, the closure reads them
        losses.append(opt.step(closure).detach())
    return losses


def moments(opt):
    """Return what the optimizer remembers of each parameter."""
    return opt.state_dict()["state"]


def weights(model):
    """Return copies of the state: of a model with masters, the masters."""
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def dtypes(model):
    return {p.dtype for p in model.parameters()}


def joined(model):
    """Return all 32-bit weights as a vector."""
    return torch.cat([v.flatten() for v in weights(model).values() if v.is_floating_point()])


def distance(model, reference, start):
    """Return how far `model` is from `reference`, as a part of the way that went from `start`."""
    way = (joined(reference) - joined(start)).norm()
    return ((joined(model) - joined(reference)).norm() / way).item()


def in_groups(model, kwargs=None):
    """Return two groups with rates of their own, biases and weights mixed."""
    params = list(model.parameters())
    if len(params) < 3:
        return params
    return [{"params": params[:3]}, {"params": params[3:], "lr": 0.02}]


# Every optimizer

ELEMENTWISE = {
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD momentum": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD maximize": partial(optim.SGD, lr=0.01, momentum=0.9, maximize=True),
    "SGD foreach": partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "Adam": partial(optim.Adam, lr=0.01, weight_decay=0.01),
    "Adam amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True),
    "Adam maximize": partial(optim.Adam, lr=0.01, maximize=True),
    "Adam foreach": partial(optim.Adam, lr=0.01, foreach=True),
    "Adam tensor rate": partial(optim.Adam, lr=torch.tensor(0.01)),
    "AdamW": partial(optim.AdamW, lr=0.01),
    "AdamW one by one": partial(optim.AdamW, lr=0.01, foreach=False, amsgrad=True),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "NAdam foreach": partial(optim.NAdam, lr=0.01, foreach=True, decoupled_weight_decay=True),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "Adamax foreach": partial(optim.Adamax, lr=0.01, foreach=True, maximize=True),
    "Adagrad": partial(optim.Adagrad, lr=0.1, lr_decay=0.01),
    "Adagrad start": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "Adadelta": partial(optim.Adadelta, lr=1.0),
    "ASGD": partial(optim.ASGD, lr=0.1, t0=3),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.01),
    "RMSprop centered": partial(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
}
FUSED = {
    "SGD fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam fused": partial(optim.Adam, lr=0.01, amsgrad=True, fused=True),
    "AdamW fused": partial(optim.AdamW, lr=0.01, fused=True),
    "Adagrad fused": partial(optim.Adagrad, lr=0.1, fused=True),
}
LAYERWISE = {
    "Adafactor": partial(optim.Adafactor, lr=0.05),
    "Muon": partial(optim.Muon, lr=0.05),
    "LBFGS": partial(optim.LBFGS, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
    "SparseAdam": partial(optim.SparseAdam, lr=0.01),
}
EVERY = ELEMENTWISE | FUSED | LAYERWISE
# torch's fused SGD itself fails where a layer gets its first gradient after the others
NETS = {"Muon": matrices, "SparseAdam": Words, "SGD fused": mlp}


def start(name, net=None):
    """Return a net and the named optimizer over it, with groups where it takes them."""
    model = make(net or NETS.get(name, Net))
    params = model.parameters() if name in LAYERWISE else in_groups(model)
    return model, EVERY[name](params)


def loop(name):
    return train_by_closure if name == "LBFGS" else train


def test_every_optimizer_of_torch_is_here():
    """A new one in torch makes this fail: it is to be added."""
    found = {
        c for c in vars(optim).values() if isinstance(c, type) and issubclass(c, optim.Optimizer)
    }
    assert found - {optim.Optimizer} == {factory.func for factory in EVERY.values()}


@pytest.mark.parametrize("name", EVERY)
def test_32_bits_are_the_plain_loop_bit_for_bit(name):
    plain, opt = start(name)
    losses = loop(name)(plain, opt, batches())
    model, mine = with_masters(*start(name), dtype=FULL)
    assert_same(loop(name)(model, mine, batches()), losses)
    assert_same(weights(model), weights(plain))
    assert_same(moments(mine), moments(opt))
    assert not all(torch.equal(a, b) for a, b in zip(losses, losses[1:], strict=False))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_flat_vectors_in_32_bits_are_the_plain_loop_bit_for_bit(name):
    """Also where a third of the steps finds a layer without gradient, and one never has one."""
    plain, opt = start(name)
    losses = train(plain, opt, batches())
    model, mine = with_masters(*start(name), dtype=FULL, flat_master=True)
    assert_same(train(model, mine, batches()), losses)
    assert_same(weights(model), weights(plain))
    assert_same(moments(mine), moments(opt))


@pytest.mark.parametrize("name", FUSED)
def test_flat_vectors_of_a_fused_optimizer_differ_by_ulps(name):
    """PyTorch's fused CPU kernels round differently at the ends of a tensor."""
    plain, opt = start(name)
    train(plain, opt, batches())
    model, mine = with_masters(*start(name), dtype=FULL, flat_master=True)
    train(model, mine, batches())
    for k, v in weights(plain).items():
        torch.testing.assert_close(weights(model)[k], v, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", LAYERWISE)
def test_an_optimizer_that_is_not_elementwise_is_refused_when_flat(name):
    model, opt = start(name)
    before, hooks = weights(model), hooks_of(model)
    with pytest.raises(MixedPrecisionError, match="flat_master=False|sparse"):
        with_masters(model, opt, flat_master=True)
    assert dtypes(model) == {FULL} and hooks_of(model) == hooks
    assert_same(weights(model), before)
    loop(name)(model, opt, batches(2))  # it is as good as new
    assert all(p.grad_dtype in (None, FULL) for p in model.parameters())


def keep_by_hand(model, opt, data, dtype, step):
    """Train `model`, the masters, by the gradients of a 16-bit copy: what the papers describe."""
    half = copy.deepcopy(model).to(dtype)
    pairs = list(zip(half.parameters(), model.parameters(), strict=True))

    def closure():
        for p, master in pairs:
            p.data.copy_(master.detach())
            p.grad = None
        loss = loss_of(half, x, y)
        loss.backward()
        for p, master in pairs:
            g = p.grad.coalesce() if p.grad is not None and p.grad.is_sparse else p.grad
            master.grad = None if g is None else g.to(FULL)
        return loss

    losses = []
    for x, y in data:  # noqa: B007, the closure reads them
        losses.append(step(opt, closure).detach())
    return losses


def step_once(opt, closure):
    loss = closure()
    opt.step()
    return loss


CASES = [(name, False) for name in EVERY] + [(name, True) for name in ELEMENTWISE]


@pytest.mark.parametrize("name, flat", CASES)
def test_16_bits_are_masters_kept_by_hand_bit_for_bit(name, flat):
    """What an optimizer sees is float32: its moments are those of a 32-bit optimizer, exactly.

    A sparse gradient is summed in the model's dtype first, as a dense one is.
    """
    hand, opt = start(name)
    step = (lambda o, closure: o.step(closure)) if name == "LBFGS" else step_once
    losses = keep_by_hand(hand, opt, batches(), BF16, step)
    model, mine = with_masters(*start(name), dtype=BF16, flat_master=flat)
    assert_same(loop(name)(model, mine, batches()), losses)
    assert dtypes(model) == {BF16}
    assert_same(weights(model), weights(hand))
    assert_same(moments(mine), moments(opt))
    assert_same([p.detach() for p in model.parameters()], [p.to(BF16) for p in hand.parameters()])


def test_fp16_kernels_are_masters_kept_by_hand_bit_for_bit():
    hand, opt = start("AdamW")
    losses = keep_by_hand(hand, opt, batches(), HALF, step_once)
    model, mine = with_masters(*start("AdamW"), dtype=HALF, native=True)
    assert_same(train(model, mine, batches()), losses)
    assert dtypes(model) == {HALF}
    assert_same(weights(model), weights(hand))
    assert_same(moments(mine), moments(opt))


@pytest.mark.parametrize(
    "kwargs", [{}, dict(flat_master=True), dict(flat_master=True, stream=True)], ids=str
)
@pytest.mark.parametrize("set_to_none", [False, True])
def test_accumulated_gradients_are_sums_of_float32_bit_for_bit(set_to_none, kwargs):
    """Each 16-bit gradient is widened before it is added; PyTorch alone adds in 16 bits."""
    hand, plain = start("AdamW", mlp)
    model, opt = pair("AdamW", mlp, **kwargs)
    for step in range(3):
        half = copy.deepcopy(hand).to(BF16)
        plain.zero_grad(), opt.zero_grad(set_to_none)
        for x, y in batches(4, seed=step):
            half.zero_grad()
            loss_of(half, x, y).backward()
            loss_of(model, x, y).backward()
            for p, master in zip(half.parameters(), hand.parameters(), strict=True):
                g = p.grad.to(FULL)
                master.grad = g if master.grad is None else master.grad + g
        plain.step(), opt.step()
    assert_same(weights(model), weights(hand))
    assert_same(moments(opt), moments(plain))


@pytest.mark.parametrize("cls", [optim.Adam, optim.RMSprop, optim.ASGD])
def test_capturable_is_torchs_own_answer_on_a_cpu(cls):
    """PyTorch's capturable optimizers refuse a CPU's parameters: so does the wrapped one."""

    def error(wrap):
        model = make(mlp)
        model, opt = wrap(model, cls(model.parameters(), capturable=True))
        with pytest.raises((AssertionError, RuntimeError)) as info:
            train(model, opt, batches(1))
        return str(info.value)

    assert error(partial(with_masters, dtype=BF16)) == error(lambda *pair: pair)


# Freezing, missing gradients, gradients kept in memory


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "ASGD"])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_that_stay_as_zeros_are_stepped_as_torch_does(set_to_none, name, flat):
    """`set_to_none=False`: a layer that is left out has zeros, and momentum moves it."""
    plain, opt = start(name)
    losses = train(plain, opt, batches(), set_to_none=set_to_none)
    model, mine = with_masters(*start(name), dtype=FULL, flat_master=flat)
    assert_same(train(model, mine, batches(), set_to_none=set_to_none), losses)
    assert_same(weights(model), weights(plain))
    assert_same(moments(mine), moments(opt))


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_the_models_own_zero_grad_clears_the_masters_gradients(set_to_none, flat):
    def run(model, opt):
        for x, y in batches():
            model.zero_grad(set_to_none=set_to_none)
            loss_of(model, x, y).backward()
            opt.step()
        return weights(model), moments(opt)

    plain = run(*start("SGD momentum"))
    assert_same(run(*with_masters(*start("SGD momentum"), dtype=FULL, flat_master=flat)), plain)


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_zero_grad_keeps_or_drops_the_memory_as_it_is_told(flat):
    model, opt = with_masters(*start("AdamW"), dtype=BF16, flat_master=flat)
    x, y = batches(1)[0]
    loss_of(model, x, y).backward()
    opt.step()
    opt.zero_grad(set_to_none=False)
    assert_same(model.first.weight.grad, torch.zeros(6, 4))
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert not any(m.grad is not None and m.grad.any() for m in masters_of(opt))


def masters_of(opt):
    return [p for group in opt.param_groups for p in group["params"]]


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("name", ["SGD momentum", "Adam", "Adagrad", "NAdam"])
def test_frozen_parameters_rest_and_unfrozen_ones_train_as_in_the_plain_loop(name, flat):
    def run(wrap):
        model, opt = start(name)
        model.first.requires_grad_(False)
        model.head.bias.requires_grad_(False)
        model, opt = wrap(model, opt)
        before = weights(model)
        losses = train(model, opt, batches(2))
        assert_same(weights(model)["first.weight"], before["first.weight"])
        model.first.requires_grad_(True)
        losses += train(model, opt, batches(3, seed=2))
        model.head.requires_grad_(False)
        losses += train(model, opt, batches(2, seed=3))
        return losses, weights(model), moments(opt)

    plain = run(lambda *pair: pair)
    assert_same(run(partial(with_masters, dtype=FULL, flat_master=flat)), plain)


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
def test_unfreezing_is_the_same_in_flat_vectors(dtype, stream):
    def run(**kwargs):
        model, opt = start("AdamW")
        model.first.requires_grad_(False)
        model, opt = with_masters(model, opt, dtype=dtype, **kwargs)
        losses = train(model, opt, batches(2))
        model.first.requires_grad_(True)
        losses += train(model, opt, batches(3, seed=2))
        assert model.first.weight.dtype == dtype
        return losses, weights(model), moments(opt)

    each, flat = run(), run(flat_master=True, stream=stream)
    assert_same(flat, each)
    assert not torch.equal(each[1]["first.weight"], make(Net).first.weight)


def test_a_backbone_that_was_frozen_keeps_its_low_bits():
    model, opt = start("AdamW")
    model.first.requires_grad_(False)
    model, opt = with_masters(model, opt, dtype=BF16)
    train(model, opt, batches(2))
    model.first.requires_grad_(True)
    assert_same(weights(model)["first.weight"], make(Net).first.weight.detach())


# Weights and gradients that somebody else writes


def clamp(model):
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.1, 0.1)


def initialize(model):
    nn.init.constant_(model[0].bias, 0.25)
    nn.init.eye_(model[3].weight)


def set_data(model):
    for p in model.parameters():
        p.data = p.data * 0.5


def through_a_vector(model):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.clamp(-0.1, 0.1), model.parameters())


def load(model):
    torch.manual_seed(7)
    model.load_state_dict(mlp().state_dict())


def write(change, wrap):
    """Train, write the weights, train; return the weights after each."""
    model, opt = wrap(*start("SGD momentum", mlp))
    train(model, opt, batches(2))
    change(model)
    first = weights(model)
    train(model, opt, batches(2, seed=2))
    return first, weights(model)


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize(
    "change", [clamp, initialize, set_data, through_a_vector, load], ids=lambda f: f.__name__
)
def test_weights_that_are_written_between_steps_are_the_masters_from_then_on(change, flat):
    """(`p.data.clamp_()` leaves no trace that could be seen: write under `no_grad` instead.)"""
    plain = write(change, lambda *pair: pair)
    assert_same(write(change, partial(with_masters, dtype=FULL, flat_master=flat)), plain)
    first, last = write(change, partial(with_masters, dtype=BF16, flat_master=flat))
    torch.testing.assert_close(first, plain[0], rtol=0.01, atol=0.01)
    torch.testing.assert_close(last, plain[1], rtol=0.05, atol=0.02)


def test_what_is_written_keeps_the_low_bits_of_all_the_rest():
    model, opt = pair("SGD", mlp)
    train(model, opt, batches(2))
    expected = weights(model)["0.weight"]
    expected[0] = 0.5
    with torch.no_grad():
        model[0].weight[0] = 0.5
    opt.step()
    expected.add_(model[0].weight.grad, alpha=-0.1)
    assert_same(weights(model)["0.weight"], expected)


def drop_one(model, opt):
    model[0].weight.grad = None


def set_all(model, opt):
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.25)


def scale_all(model, opt):
    for p in model.parameters():
        p.grad.mul_(3.0)


def replace_all(model, opt):
    for p in model.parameters():
        p.grad = p.grad * 2.0


def clip_norm(model, opt):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_masters(model, opt):
    nn.utils.clip_grad_norm_(masters_of(opt), 0.1, foreach=False)


def replace_masters(model, opt):
    for p in masters_of(opt):
        p.grad = p.grad * 2.0


def step_twice(model, opt):
    opt.step()


def ask(model, opt):
    opt.state_dict(), opt.param_groups, len(opt.state), repr(opt), model.state_dict()


def reload(model, opt):
    model.load_state_dict(weights(model))
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def clear(model, opt):
    opt.zero_grad()


MEDDLERS = [
    drop_one,
    set_all,
    scale_all,
    replace_all,
    clip_norm,
    clip_masters,
    replace_masters,
    step_twice,
    ask,
    reload,
    clear,
]


def meddled(meddle, name, wrap):
    """Do something between backward and step; return weights, moments and gradients."""
    model, opt = wrap(*start(name, mlp))
    for i, batch in enumerate(batches(5)):
        opt.zero_grad()
        loss_of(model, *batch).backward()
        if i in (0, 3):
            meddle(model, opt)
        opt.step()
    grads = [p.grad.clone() for p in model.parameters()]
    return weights(model), moments(opt), grads


@pytest.mark.parametrize("stream, flat", [(False, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("name", ["SGD momentum", "Adagrad"])
@pytest.mark.parametrize("meddle", MEDDLERS, ids=lambda f: f.__name__)
def test_whatever_is_done_between_backward_and_step_is_what_torch_does(meddle, name, stream, flat):
    plain = meddled(meddle, name, lambda *pair: pair)
    wrap = partial(with_masters, stream=stream, flat_master=flat)
    mine = meddled(meddle, name, partial(wrap, dtype=FULL))
    if meddle is clip_masters and flat:  # the norm of a vector is summed in another order
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-7)
    else:
        assert_same(mine, plain)
        each = meddled(meddle, name, partial(with_masters, dtype=BF16))
        assert_same(meddled(meddle, name, partial(wrap, dtype=BF16)), each)


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_a_step_without_any_gradient_changes_nothing(dtype, flat):
    model, opt = with_masters(*start("SGD momentum"), dtype=dtype, flat_master=flat)
    before = weights(model), moments(opt)
    opt.step()
    opt.zero_grad()
    opt.step()
    assert_same((weights(model), moments(opt)), before)
    train(model, opt, batches(2))


def test_a_gradient_in_16_bits_that_is_set_by_hand_is_taken():
    """A custom backward pass, or a gradient received from another machine."""
    for kwargs in ({}, dict(flat_master=True)):
        model, opt = pair("SGD", mlp, **kwargs)
        before = weights(model)
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5)
            assert p.grad.dtype == BF16
        opt.step()
        after = weights(model)
        assert_same(after["0.weight"], before["0.weight"] - 0.05)


# What an optimizer has


def pair(name="AdamW", net=Net, **kwargs):
    """Return a net in 16 bits and its optimizer."""
    return with_masters(*start(name, net), **{"dtype": BF16, **kwargs})


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_the_groups_hold_float32_masters(flat):
    model, opt = pair(flat_master=flat)
    assert isinstance(opt, optim.Optimizer)
    assert [group["lr"] for group in opt.param_groups] == [0.01, 0.02]
    assert {p.dtype for p in masters_of(opt)} == {FULL}
    assert sum(p.numel() for p in masters_of(opt)) == sum(p.numel() for p in model.parameters())
    assert all(p.requires_grad and p.is_leaf for p in masters_of(opt))
    train(model, opt, batches(1))
    assert {v.dtype for s in opt.state.values() for v in s.values()} == {FULL}
    assert set(opt.state) <= set(masters_of(opt))


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_masters_and_parameters_share_their_gradients(flat):
    """Clipping the one clips the other: either is what PyTorch's notes do."""
    model, opt = pair(flat_master=flat)
    x, y = batches(1)[0]
    loss_of(model, x, y).backward()
    grads = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    norm = nn.utils.clip_grad_norm_(masters_of(opt), 0.1)
    assert grads == {FULL} and norm > 0.2
    mine = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(
        torch.cat([g.flatten() for g in mine]).norm().item(), 0.1, rtol=1e-4, atol=0
    )


def test_defaults_are_those_of_the_optimizer():
    model, opt = pair()
    assert opt.defaults == optim.AdamW(mlp().parameters(), lr=0.01).defaults


def test_the_repr_shows_the_optimizer_inside():
    _, opt = pair()
    text = repr(opt)
    assert text.startswith("MasterOptimizer(AdamW (") and "lr: 0.02" in text


def test_a_rate_written_into_the_groups_is_the_rate():
    def run(wrap):
        model, opt = wrap(*start("SGD"))
        train(model, opt, batches(1))
        for group in opt.param_groups:
            group["lr"] *= 0.5
        train(model, opt, batches(1))
        return weights(model)

    plain = run(lambda *pair: pair)
    for flat in (False, True):
        assert_same(run(partial(with_masters, dtype=FULL, flat_master=flat)), plain)


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "Adagrad", "Rprop"])
@pytest.mark.parametrize("after", [0, 2])
def test_a_head_that_is_added_trains_as_in_the_plain_loop(after, name, flat):
    """Before training or in the middle of it, the head frozen until then."""

    def run(wrap):
        model = make(Net)
        model.head.requires_grad_(False)
        body = [p for n, p in model.named_parameters() if "head" not in n]
        model, opt = wrap(model, EVERY[name](body))
        losses = train(model, opt, batches(after))
        model.head.requires_grad_(True)
        opt.add_param_group({"params": list(model.head.parameters()), "lr": 0.03})
        assert [group["lr"] for group in opt.param_groups][1] == 0.03
        losses += train(model, opt, batches(3, seed=2))
        return losses, weights(model), moments(opt)

    try:
        plain = run(lambda *pair: pair)
    except KeyError:
        assert name == "Adagrad"  # of some versions of torch: it makes its state when it is made
        pytest.skip("this Adagrad takes no new group, in plain torch neither")
    assert_same(run(partial(with_masters, dtype=FULL, flat_master=flat)), plain)
    each = run(partial(with_masters, dtype=BF16))
    assert_same(run(partial(with_masters, dtype=BF16, flat_master=True)), each)


def test_gradients_of_a_group_that_was_added_add_up_in_32_bits_at_once():
    """Before anybody has called `zero_grad`: 300 ones are 256 in bfloat16."""
    model = make(mlp)
    model, opt = with_masters(model, optim.SGD(model[0].parameters(), lr=0.1), dtype=BF16)
    opt.add_param_group({"params": list(model[3].parameters())})
    for _ in range(300):
        model(torch.zeros(1, 4)).sum().backward()
    assert model[3].bias.grad.unique().tolist() == [300.0]


def test_a_group_added_to_an_optimizer_without_model_gets_masters():
    model = make(mlp).to(BF16)
    opt = MasterOptimizer(optim.SGD(model[0].parameters(), lr=0.1))
    opt.add_param_group({"params": list(model[3].parameters())})
    train(model, opt, batches(2))
    assert {p.dtype for p in masters_of(opt)} == {FULL} and len(masters_of(opt)) == 4
    assert_same(model[3].weight.detach(), opt.param_groups[1]["params"][0].detach().to(BF16))
    assert not torch.equal(model[3].weight, make(mlp).to(BF16)[3].weight)


@pytest.mark.parametrize("bad", [0, 5, 11])
def test_one_bad_gradient_of_many_small_ones_skips_the_step(bad):
    """Small ones are looked at together, large ones each: 4,097 numbers, and others of 8."""
    layers = [nn.Linear(8, 8, bias=False) for _ in range(11)]
    model = nn.ModuleList([*layers, nn.Linear(4097, 1, bias=False)])
    params = list(model.parameters())
    model, opt = with_masters(model, optim.SGD(params, lr=1.0), dtype=BF16)
    before = weights(model)
    for p in params:
        p.grad = torch.ones(p.shape)
    params[bad].grad.view(-1)[-1] = math.inf
    opt.step()
    assert opt.n_skipped == 1
    assert_same(weights(model), before)
    params[bad].grad.view(-1)[-1] = 1.0
    opt.step()
    assert opt.n_skipped == 1
    assert_same(weights(model), {name: w - 1 for name, w in before.items()})


def test_without_a_model_gradients_add_up_in_32_bits():
    """Nobody sends them in 16: there is one process."""
    w = nn.Parameter(torch.ones(2, dtype=BF16))
    opt = MasterOptimizer(optim.SGD([w], lr=1.0))
    for factor in (1.0, 2.0**-10):
        (w * factor).sum().backward()
    opt.step()
    assert masters_of(opt)[0].unique().tolist() == [-(2.0**-10)]


class SumsFromTheStart(optim.Optimizer):
    """Adagrad whose sums are there before the first step, as of some versions of torch."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["sum"] = torch.zeros_like(p, requires_grad=False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                total = self.state[p]["sum"].addcmul_(p.grad, p.grad)
                p.addcdiv_(p.grad, total.sqrt() + 1e-10, value=-group["lr"])


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_states_that_were_made_over_16_bit_parameters_are_kept_in_32(dtype, flat):
    model = make(mlp).to(dtype)
    model, opt = with_masters(
        model, SumsFromTheStart(model.parameters()), dtype=dtype, flat_master=flat
    )
    train(model, opt, batches())
    assert {s["sum"].dtype for s in opt.state_dict()["state"].values()} == {FULL}


class BeginsAnew(optim.Optimizer):
    """SGD with a sum of gradients that is forgotten, state and all, in every second step."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                before = self.state.pop(p, {}).get("sum")
                total = p.grad.clone() if before is None else before + p.grad
                p.sub_(total, alpha=group["lr"])
                if before is None:
                    self.state[p]["sum"] = total


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_a_state_that_is_dropped_in_a_step_stays_dropped(flat):
    model = make(mlp)
    plain = copy.deepcopy(model)
    theirs = BeginsAnew(plain.parameters())
    opt = BeginsAnew(model.parameters())
    model, opt = with_masters(model, opt, dtype=FULL, flat_master=flat)
    for batch in batches(5):
        train(plain, theirs, [batch])
        train(model, opt, [batch])
        states = opt.state_dict()["state"].values()
        assert sum(map(bool, states)) == sum(map(bool, theirs.state.values()))
    assert_same(weights(model), weights(plain))


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_a_part_that_was_frozen_in_16_bits_gets_32_bit_masters_when_it_is_trained(dtype, flat):
    """Until then it needs none; in 16 bits it would lose what is added to it."""
    model = make(mlp).to(dtype)
    model[0].requires_grad_(False)
    opt = optim.SGD(model.parameters(), lr=2.0**-14)
    model, opt = with_masters(model, opt, dtype=dtype, flat_master=flat)
    before = weights(model)["0.weight"].float()
    model[0].requires_grad_(True)
    for _ in range(4):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
    assert {m.dtype for m in masters_of(opt)} == {FULL}
    torch.testing.assert_close(weights(model)["0.weight"], before - 2.0**-12, rtol=0, atol=1e-7)


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_a_model_in_16_bits_already_trains_the_same_told_or_not(dtype, flat):
    """With `model` its `state_dict` is in 32 bits, without it the optimizer's has the masters."""

    def run(told):
        model = make(mlp).to(dtype)
        opt = optim.AdamW(in_groups(model), lr=0.01)
        opt = MasterOptimizer(opt, flat, model=model if told else None)
        losses = train(model, opt, batches())
        full = list(weights(model).values()) if told else opt.state_dict()["masters"]
        assert ("masters" in opt.state_dict()) != told
        assert dtypes(model) == {dtype} and {m.dtype for m in full} == {FULL}
        return losses, full, moments(opt)

    told, untold = run(True), run(False)
    assert_same(told, untold)
    model, opt = make(mlp).to(dtype).float(), None  # the same loop over the rounded weights
    rounded = [p.detach().clone() for p in model.parameters()]
    opt = optim.AdamW(in_groups(model), lr=0.01)
    losses = train(model, opt, batches())
    torch.testing.assert_close(told[0], losses, rtol=0.03, atol=0.0)
    moved = sum((m - r).abs().sum() for m, r in zip(told[1], rounded, strict=True))
    apart = sum((m - p).abs().sum() for m, p in zip(told[1], model.parameters(), strict=True))
    assert apart < 0.1 * moved


def test_step_hooks_are_called_with_the_master_optimizer():
    model, opt = pair()
    seen = []
    before = opt.register_step_pre_hook(lambda o, args, kwargs: seen.append(("before", o)))
    after = opt.register_step_post_hook(lambda o, args, kwargs: seen.append(("after", o)))
    train(model, opt, batches(2))
    assert seen == 2 * [("before", opt), ("after", opt)]
    before.remove()
    after.remove()
    train(model, opt, batches(1))
    assert len(seen) == 4


def test_a_step_hook_of_the_inner_optimizer_goes_on():
    model, inner = start("AdamW")
    seen = []
    inner.register_step_post_hook(lambda o, args, kwargs: seen.append(o))
    train(*with_masters(model, inner, dtype=BF16), batches(2))
    assert seen == [inner, inner]


def test_a_step_hook_may_clip_the_gradients_of_the_masters():
    def run(wrap):
        model, opt = wrap(*start("SGD"))
        opt.register_step_pre_hook(
            lambda o, *_: nn.utils.clip_grad_value_(
                [p for g in o.param_groups for p in g["params"]], 1e-3
            )
        )
        train(model, opt, batches(3))
        return weights(model)

    plain = run(lambda *pair: pair)
    for flat in (False, True):
        assert_same(run(partial(with_masters, dtype=FULL, flat_master=flat)), plain)


def test_state_dict_hooks_are_called_with_the_master_optimizer():
    model, opt = pair()
    train(model, opt, batches(1))
    seen = []
    opt.register_state_dict_pre_hook(lambda o: seen.append(("pre", o)))
    opt.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    opt.register_load_state_dict_pre_hook(lambda o, state: seen.append(("load", o, state["extra"])))
    opt.register_load_state_dict_post_hook(lambda o: seen.append(("loaded", o)))
    state = opt.state_dict()
    assert state["extra"] == 1
    opt.load_state_dict(state)
    assert seen == [("pre", opt), ("load", opt, 1), ("loaded", opt)]


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("name", ["SGD momentum", "AdamW"])
def test_a_closure_is_the_plain_loop_and_its_loss_comes_back(name, flat):
    plain, opt = start(name)
    losses = train_by_closure(plain, opt, batches())
    model, mine = with_masters(*start(name), dtype=FULL, flat_master=flat)
    assert_same(train_by_closure(model, mine, batches()), losses)
    assert_same(weights(model), weights(plain))
    model, mine = with_masters(*start(name), dtype=BF16, flat_master=flat)
    by_closure = train_by_closure(model, mine, batches())
    again, other = with_masters(*start(name), dtype=BF16)
    assert_same(train(again, other, batches()), by_closure)
    assert_same(weights(again), weights(model))


def test_a_step_without_closure_returns_nothing():
    model, opt = pair()
    loss_of(model, *batches(1)[0]).backward()
    assert opt.step() is None


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_lbfgs_sees_the_loss_of_every_point_it_tries(dtype):
    """A model that kept its old weights inside a step would find no point better than the first."""
    model, opt = start("LBFGS", mlp)
    model, opt = with_masters(model, opt, dtype=dtype)
    data = batches(1, bs=20) * 10
    losses = train_by_closure(model, opt, data)
    plain, inner = start("LBFGS", mlp)
    reference = train_by_closure(plain, inner, data)
    assert losses[-1] < 0.5 * losses[0]
    assert losses[-1] < 1.3 * reference[-1]


def test_two_optimizers_of_one_model_are_the_plain_loop():
    def run(wrap):
        model = make(Net)
        first = optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9)
        rest = optim.AdamW([p for n, p in model.named_parameters() if "first" not in n], lr=0.01)
        model, first, rest = wrap(model, first, rest)
        for i, (x, y) in enumerate(batches()):
            first.zero_grad()
            rest.zero_grad()
            loss_of(model, x, y).backward()
            rest.step()
            if i % 2:
                first.step()
        return weights(model), moments(first), moments(rest)

    plain = run(lambda *all: all)
    for flat in (False, True):
        assert_same(run(partial(with_masters, dtype=FULL, flat_master=flat)), plain)
    each = run(partial(with_masters, dtype=BF16))
    assert_same(run(partial(with_masters, dtype=BF16, flat_master=True, stream=True)), each)


# Files of one kind are read by any other


def kind(dtype=None, **kwargs):
    """Return a maker of a net and an optimizer; None: plain."""

    def new(factory, seed=0):
        model = make(mlp, seed)
        opt = factory(in_groups(model))
        return (model, opt) if dtype is None else with_masters(model, opt, dtype=dtype, **kwargs)

    return new


def loose(factory, seed=0):
    """Return a model in 16 bits and a MasterOptimizer that has not been told of it."""
    model = make(mlp, seed).half()
    return model, MasterOptimizer(factory(in_groups(model)))


KINDS = {
    "plain": kind(),
    "fp16": kind(HALF),
    "fp16 flat": kind(HALF, flat_master=True),
    "bf16": kind(BF16),
    "bf16 stream": kind(BF16, flat_master=True, stream=True),
    "loose": loose,
}
THREE = {k: EVERY[k] for k in ("SGD momentum", "Adam", "AdamW")}


def through_a_file(*things):
    file = io.BytesIO()
    torch.save(things, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", THREE)
@pytest.mark.parametrize("source, target", list(product(KINDS, KINDS)))
def test_a_file_of_any_kind_loads_into_any_other(source, target, name):
    """The moments are the same bits, and training goes on from them as in 32 bits."""
    model, opt = KINDS[source](THREE[name])
    train(model, opt, batches(4))
    for group in opt.param_groups:
        group["lr"] *= 0.5
    state, opt_state = through_a_file(model.state_dict(), opt.state_dict())
    other, mine = KINDS[target](THREE[name], seed=1)
    other.load_state_dict(state)
    mine.load_state_dict(opt_state)
    assert_same(moments(mine), moments(opt))
    assert mine.state_dict()["param_groups"] == opt.state_dict()["param_groups"]
    assert [group["lr"] for group in mine.param_groups] == [g["lr"] for g in opt.param_groups]
    if target != "loose":
        assert_same(weights(other), {k: v.to(FULL) for k, v in state.items()})
    plain, inner = KINDS["plain"](THREE[name])
    plain.load_state_dict(state)
    inner.load_state_dict(copy.deepcopy(opt_state))  # torch does not copy it
    begin = copy.deepcopy(plain)
    train(plain, inner, batches(3, seed=2))
    train(other, mine, batches(3, seed=2))
    limit = 0.0 if source != "loose" and target == "plain" else 0.05
    if target == "loose":  # its weights are those of the model, rounded
        limit = 0.2
    assert distance(other, plain, begin) <= limit


class MakesItsGroupsAnew(optim.AdamW):
    """Has a `load_state_dict` of its own, that leaves other lists of parameters."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.param_groups = [{**g, "params": [*g["params"]]} for g in self.param_groups]


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("cls", [optim.AdamW, MakesItsGroupsAnew])
def test_a_state_of_other_shapes_is_refused_and_training_goes_on(cls, flat):
    """It is found after PyTorch has taken the state, which does not look at shapes."""

    def run(is_tried):
        model = make(mlp)
        model, opt = with_masters(model, cls(in_groups(model)), dtype=BF16, flat_master=flat)
        losses = train(model, opt, batches(2))
        if is_tried:
            state = copy.deepcopy(opt.state_dict())
            state["state"][0]["exp_avg"] = torch.zeros(3, 2)
            with pytest.raises(ValueError, match="of another model: its 'exp_avg'"):
                opt.load_state_dict(state)
        return losses + train(model, opt, batches(2, seed=2)), weights(model), moments(opt)

    assert_same(run(True), run(False))


@pytest.mark.parametrize("name", ["fp16", "fp16 flat", "bf16", "bf16 stream", "loose"])
def test_a_run_that_goes_on_from_its_file_ends_in_the_same_bits(name):
    """Without `model`, the file of the optimizer has the masters."""
    model, opt = KINDS[name](THREE["AdamW"])
    train(model, opt, batches(3))
    state, opt_state = through_a_file(model.state_dict(), opt.state_dict())
    assert ("masters" in opt_state) == (name == "loose")
    other, mine = KINDS[name](THREE["AdamW"], seed=1)
    other.load_state_dict(state)
    mine.load_state_dict(opt_state)
    train(model, opt, batches(3, seed=2))
    train(other, mine, batches(3, seed=2))
    assert_same(weights(other), weights(model))
    assert_same(moments(mine), moments(opt))
    assert_same([m.detach() for m in masters_of(mine)], [m.detach() for m in masters_of(opt)])


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "Adagrad start", "ASGD", "RMSprop centered"])
def test_flat_state_is_saved_per_parameter_for_other_optimizers_too(name):
    model, opt = pair(name, flat_master=True)
    train(model, opt, batches())
    shapes = {i: p.shape for i, p in enumerate(model.parameters())}
    for i, state in moments(opt).items():
        assert {v.shape for v in state.values() if v.ndim} <= {shapes[i]}
    plain, inner = start(name)
    plain.load_state_dict(through_a_file(model.state_dict())[0])
    inner.load_state_dict(through_a_file(opt.state_dict())[0])
    assert_same(moments(inner), moments(opt))
    train(plain, inner, batches(1))


# Schedules

SCHEDULES = {
    lr_scheduler.LambdaLR: dict(lr_lambda=lambda i: 0.9**i),
    lr_scheduler.MultiplicativeLR: dict(lr_lambda=lambda i: 0.9),
    lr_scheduler.StepLR: dict(step_size=2),
    lr_scheduler.MultiStepLR: dict(milestones=[1, 3]),
    lr_scheduler.ConstantLR: dict(total_iters=2),
    lr_scheduler.LinearLR: dict(total_iters=3),
    lr_scheduler.ExponentialLR: dict(gamma=0.7),
    lr_scheduler.PolynomialLR: dict(total_iters=4, power=2.0),
    lr_scheduler.CosineAnnealingLR: dict(T_max=4),
    lr_scheduler.CosineAnnealingWarmRestarts: dict(T_0=3),
    lr_scheduler.CyclicLR: dict(base_lr=0.001, max_lr=0.1, step_size_up=2),
    lr_scheduler.OneCycleLR: dict(max_lr=0.1, total_steps=9),
    lr_scheduler.ReduceLROnPlateau: dict(patience=0, threshold=10.0),
    swa_utils.SWALR: dict(swa_lr=0.001, anneal_epochs=3),
}


def two_in_a_row(opt):
    parts = [lr_scheduler.LinearLR(opt, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.5)]
    return lr_scheduler.SequentialLR(opt, parts, milestones=[2])


def two_at_once(opt):
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(opt, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.5)], opt
    )


MAKERS = {cls.__name__: partial(cls, **kwargs) for cls, kwargs in SCHEDULES.items()}
MAKERS |= {"SequentialLR": two_in_a_row, "ChainedScheduler": two_at_once}


def test_every_schedule_of_torch_is_here():
    """A new one in torch makes this fail: it is to be added."""
    base = lr_scheduler.LRScheduler
    found = {c for c in vars(lr_scheduler).values() if isinstance(c, type) and issubclass(c, base)}
    assert {c.__name__ for c in found} - {"LRScheduler", "_LRScheduler"} <= set(MAKERS)


def rates(model, opt, schedule, scaler=None, bad=()):
    """Train with a schedule; return the hyper-parameters of every step."""
    seen = []
    for i, (x, y) in enumerate(batches()):
        opt.zero_grad()
        loss = loss_of(model, x, y) * (float("inf") if i in bad else 1.0)
        if scaler is None:
            loss.backward()
            opt.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        args = [loss.detach()] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []
        schedule.step(*args)
        seen.append([(g["lr"], g.get("momentum"), g.get("betas")) for g in opt.param_groups])
    return seen


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.filterwarnings("error")
def test_a_schedule_moves_the_rate_as_of_the_plain_optimizer(name, flat):
    def run(wrap, optimizer):
        model, opt = wrap(*start(optimizer))
        schedule = MAKERS[name](opt)
        seen = rates(model, opt, schedule)
        return seen, schedule.get_last_lr(), weights(model)

    for optimizer in ("SGD momentum", "AdamW"):
        seen, last, full = run(lambda *pair: pair, optimizer)
        assert len({step[0][0] for step in seen}) > 1  # the rate moves at all
        mine = run(partial(with_masters, dtype=FULL, flat_master=flat), optimizer)
        assert mine[:2] == (seen, last)
        assert_same(mine[2], full)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.filterwarnings("error")
def test_a_schedule_does_not_warn_when_the_first_step_is_skipped(name):
    """Under torch's own scaler it warns that the optimizer was not called."""
    model, opt = pair("SGD momentum", dtype=HALF, flat_master=True)
    scaler = LossScaler(init_scale=8.0)
    seen = rates(model, opt, MAKERS[name](opt), scaler, bad=(0, 3))
    assert scaler.skipped == [0, 3]
    if name != "ReduceLROnPlateau":
        plain, inner = start("SGD momentum")
        assert seen == rates(plain, inner, MAKERS[name](inner))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_a_schedule_that_was_made_before_the_masters_goes_on(flat):
    def run(wrap):
        model, opt = start("SGD momentum")
        schedule = lr_scheduler.ExponentialLR(opt, 0.5)
        model, opt = wrap(model, opt)
        return rates(model, opt, schedule), weights(model)

    seen, full = run(lambda *pair: pair)
    mine = run(partial(with_masters, dtype=FULL, flat_master=flat))
    assert mine[0] == seen
    assert_same(mine[1], full)


@pytest.mark.filterwarnings("error")
def test_a_schedule_made_before_the_masters_does_not_warn_of_a_first_step_that_is_skipped():
    model, opt = start("SGD momentum")
    schedule = lr_scheduler.ExponentialLR(opt, 0.5)
    model, opt = with_masters(model, opt, dtype=HALF)
    scaler = LossScaler(init_scale=8.0)
    rates(model, opt, schedule, scaler, bad=(0,))
    assert scaler.skipped == [0]


def test_a_schedule_is_saved_and_loaded_with_the_optimizer():
    def begin(seed):
        torch.manual_seed(seed)
        model, opt = pair("SGD momentum", flat_master=True)
        return model, opt, lr_scheduler.CosineAnnealingLR(opt, 20)

    model, opt, schedule = begin(0)
    rates(model, opt, schedule)
    files = through_a_file(*(o.state_dict() for o in (model, opt, schedule)))
    again = begin(1)
    for thing, state in zip(again, files, strict=True):
        thing.load_state_dict(state)
    assert rates(*again) == rates(model, opt, schedule)
    assert_same(weights(again[0]), weights(model))


# Averages of the weights


def average(wrap, n=8, **kwargs):
    """Train, averaging the 32-bit weights; return model and average."""
    model, opt = wrap(make(norm_net))
    twin = opt.float_model() if isinstance(opt, MasterOptimizer) else model
    ema = swa_utils.AveragedModel(twin, **kwargs)
    for batch in batches(n, bs=8):
        train(model, opt, [batch])
        ema.update_parameters(twin)
    return model, ema


def sgd(model, rate=0.1):
    return model, optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def wrapped(**kwargs):
    return lambda model: with_masters(*sgd(model), **kwargs)


AVERAGES = {
    "swa": dict(),
    "ema": dict(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
    "buffers": dict(avg_fn=swa_utils.get_ema_avg_fn(0.9), use_buffers=True),
}


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("way", AVERAGES)
def test_an_average_of_the_masters_is_the_average_of_the_plain_run(way, flat):
    _, plain = average(sgd, **AVERAGES[way])
    _, mine = average(wrapped(dtype=FULL, flat_master=flat), **AVERAGES[way])
    assert_same(weights(mine), weights(plain))
    data = [x for x, _ in batches(3, seed=5)]
    for ema in (plain, mine):
        swa_utils.update_bn(data, ema)
    assert_same(weights(mine), weights(plain))
    assert_same(mine(data[0]).detach(), plain(data[0]).detach())


def test_an_average_is_one_of_masters():
    """Small steps: the 16-bit weights stand still, the masters move and so do their averages."""

    def run(of_masters):
        model, opt = with_masters(*sgd(make(norm_net), 1e-4), dtype=BF16)
        twin = opt.float_model() if of_masters else model
        ema = swa_utils.AveragedModel(twin)
        for batch in batches(8, bs=8):
            train(model, opt, [batch])
            ema.update_parameters(twin)
        return torch.cat([p.detach().flatten() for p in ema.parameters()])

    def plain():
        model, opt = sgd(make(norm_net), 1e-4)
        ema = swa_utils.AveragedModel(model)
        for batch in batches(8, bs=8):
            train(model, opt, [batch])
            ema.update_parameters(model)
        return torch.cat([p.detach().flatten() for p in ema.parameters()])

    reference = plain()
    start = torch.cat([p.detach().flatten() for p in make(norm_net).parameters()])
    of_masters, of_the_model = run(True), run(False)
    assert_same(of_the_model, of_masters)
    assert (of_masters - reference).norm() < 0.02 * (start.bfloat16() - start).norm()


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_the_float_model_holds_the_masters_and_follows_them(dtype, flat):
    model, opt = with_masters(*sgd(make(norm_net)), dtype=dtype, flat_master=flat)
    train(model, opt, batches(2, bs=8))
    twin = opt.float_model()
    for _ in range(2):
        assert dtypes(twin) == {FULL}
        assert_same(weights(twin), weights(model))
        train(model, opt, batches(2, bs=8, seed=3))
    assert not any(hook for hook in hooks_of(twin).values())
    x = batches(1)[0][0]
    plain = make(norm_net)
    plain.load_state_dict(model.state_dict())
    assert_same(twin.eval()(x).detach(), plain.eval()(x).detach())


def test_the_twin_and_its_average_outlive_a_file_that_is_loaded():
    model, opt = with_masters(*sgd(make(norm_net)), dtype=BF16, flat_master=True)
    train(model, opt, batches(2))
    twin, state = opt.float_model(), copy.deepcopy(model.state_dict())
    train(model, opt, batches(2))
    model.load_state_dict(state)
    opt.load_state_dict(opt.state_dict())
    assert_same(weights(twin), weights(model))


# torch.compile, parametrizations, functional calls, checkpointing


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("dtype, flat", [(FULL, False), (HALF, True), (BF16, True)], ids=str)
def test_a_compiled_model_trains_as_an_eager_one(dtype, flat, fresh_compiler):
    def run(compiled):
        model, opt = with_masters(*start("AdamW", mlp), dtype=dtype, flat_master=flat)
        called = torch.compile(model, backend="aot_eager") if compiled else model
        losses = train(called, opt, batches())
        return losses, weights(model), moments(opt)

    eager, compiled = run(False), run(True)
    assert_near(compiled, eager, 1e-6 if dtype == FULL else 0.02)


def assert_near(a, b, rtol):
    """Compare nested results; bits, where the numbers are exact."""
    (losses, full, state), (losses_2, full_2, state_2) = a, b
    torch.testing.assert_close(losses, losses_2, rtol=rtol, atol=rtol)
    torch.testing.assert_close(full, full_2, rtol=rtol, atol=rtol)
    torch.testing.assert_close(state, state_2, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype, flat", [(FULL, True), (BF16, False)], ids=str)
def test_a_compiled_function_may_hold_the_whole_step(dtype, flat, fresh_compiler):
    def run(compiler):
        model, opt = with_masters(*start("SGD momentum", mlp), dtype=dtype, flat_master=flat)

        @compiler
        def one_step(x, y):
            opt.zero_grad()
            loss = F.mse_loss(model(x).float(), y)
            loss.backward()
            opt.step()
            return loss.detach()

        losses = [one_step(x.to(dtype), y) for x, y in batches()]
        return losses, weights(model), moments(opt)

    eager = run(lambda f: f)
    assert_near(run(torch.compile(backend="aot_eager")), eager, 1e-6 if dtype == FULL else 0.02)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor wants a C++ compiler")
def test_inductor_compiles_the_model(fresh_compiler):
    model, opt = with_masters(*start("AdamW", mlp), dtype=BF16, flat_master=True)
    losses = train(torch.compile(model), opt, batches(3))
    eager, mine = with_masters(*start("AdamW", mlp), dtype=BF16)
    torch.testing.assert_close(losses, train(eager, mine, batches(3)), rtol=0.03, atol=0.0)
    assert dtypes(model) == {BF16}


def weight_norm():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))


def orthogonal():
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("net", [weight_norm, orthogonal], ids=lambda f: f.__name__)
def test_a_parametrized_model_trains(net, flat):
    """32 bits: the plain loop, bit for bit; 16 bits: near it, the parametrization in 32."""
    plain, opt = start("AdamW", net)
    begin = copy.deepcopy(plain)
    losses = train(plain, opt, batches())
    model, mine = with_masters(*start("AdamW", net), dtype=FULL, flat_master=flat)
    assert_same(train(model, mine, batches()), losses)
    assert_same(weights(model), weights(plain))
    model, mine = with_masters(*start("AdamW", net), dtype=BF16, flat_master=flat)
    train(model, mine, batches())
    assert model[0].weight.dtype == model[2].weight.dtype == BF16
    assert distance(model, plain, begin) < 0.25


def test_an_orthogonal_weight_is_orthogonal_to_16_bits():
    model, mine = with_masters(*start("AdamW", orthogonal), dtype=BF16)
    train(model, mine, batches())
    w = model[0].weight.float()
    torch.testing.assert_close(w @ w.T, torch.eye(4), rtol=0, atol=0.02)


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_a_functional_call_trains_the_masters(flat):
    def run(wrap):
        model, opt = wrap(*start("AdamW", mlp))
        for x, y in batches():
            opt.zero_grad()
            tensors = dict(model.named_parameters())
            out = torch.func.functional_call(model, tensors, (x.to(model[0].weight.dtype),))
            F.mse_loss(out.float(), y).backward()
            opt.step()
        return weights(model), moments(opt)

    plain = run(lambda *pair: pair)
    assert_same(run(partial(with_masters, dtype=FULL, flat_master=flat)), plain)
    model, opt = with_masters(*start("AdamW", mlp), dtype=BF16)
    train(model, opt, batches())
    called = run(partial(with_masters, dtype=BF16, flat_master=flat))
    assert_same(called, (weights(model), moments(opt)))


class Checkpointed(nn.Module):
    """A net whose body is computed again in the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.body, self.head = (
            nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Tanh()),
            nn.Linear(6, 3),
        )

    def forward(self, x):
        if self.reentrant is None:
            return self.head(self.body(x))
        x = x.requires_grad_(self.reentrant)
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize(
    "kwargs", [dict(dtype=FULL), dict(dtype=BF16), dict(dtype=HALF, native=True)], ids=str
)
def test_checkpointed_activations_give_the_same_bits(kwargs, flat):
    def run(reentrant):
        model = make(partial(Checkpointed, reentrant))
        opt = optim.AdamW(model.parameters())
        model, opt = with_masters(model, opt, flat_master=flat, **kwargs)
        torch.manual_seed(3)
        return train(model, opt, batches(4)), weights(model), moments(opt)

    reference = run(None)
    assert_same(run(False), reference)
    assert_same(run(True), reference)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_in_float16_trains_on_any_cpu(reentrant):
    """The second pass is outside of the mode that computes in 32 bits; so is the first one."""
    model = make(partial(Checkpointed, reentrant))
    model, opt = with_masters(model, optim.AdamW(model.parameters()), dtype=HALF)
    before = weights(model)
    train(model, opt, batches(2))
    with pytest.raises(AssertionError):
        assert_same(weights(model), before)


# Copies and pickles


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch"])
@pytest.mark.parametrize(
    "kwargs",
    [dict(dtype=FULL), dict(dtype=HALF), dict(dtype=BF16, flat_master=True, stream=True)],
    ids=["fp32", "fp16", "bf16 stream"],
)
def test_a_copy_trains_on_to_the_same_bits_and_leaves_the_original_alone(kwargs, how):
    model, opt = pair("AdamW", **kwargs)
    train(model, opt, batches(3))
    before = weights(model), copy.deepcopy(moments(opt))
    other, mine = copied(how, (model, opt))
    losses = train(other, mine, batches(3, seed=2))
    assert_same((weights(model), moments(opt)), before)
    assert_same(train(model, opt, batches(3, seed=2)), losses)
    assert_same(weights(other), weights(model))
    assert_same(moments(mine), moments(opt))
    assert dtypes(other) == dtypes(model)


def copied(how, things):
    if how == "deepcopy":
        return copy.deepcopy(things)
    if how == "pickle":
        return pickle.loads(pickle.dumps(things))
    file = io.BytesIO()
    torch.save(things, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("kwargs", [dict(), dict(flat_master=True, stream=True)], ids=str)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_in_the_middle_of_an_accumulation_has_the_gradients_that_torch_copies(how, kwargs):
    """None: PyTorch copies no `grad` of a parameter. The original has them all."""

    def run(wrap):
        model, opt = wrap(*start("SGD momentum", mlp))
        first, second = batches(2)
        loss_of(model, *first).backward()
        other, mine = copied(how, (model, opt))
        for m, o in ((model, opt), (other, mine)):
            loss_of(m, *second).backward()
            o.step()
        return weights(model), weights(other), moments(opt), moments(mine)

    plain = run(lambda *pair: pair)
    assert not torch.equal(plain[0]["0.weight"], plain[1]["0.weight"])
    assert_same(run(partial(with_masters, dtype=FULL, **kwargs)), plain)


def test_an_optimizer_without_model_is_copied_with_the_model():
    model, opt = loose(THREE["Adam"])
    train(model, opt, batches(2))
    other, mine = copy.deepcopy((model, opt))
    train(model, opt, batches(2))
    train(other, mine, batches(2))
    assert_same(weights(other), weights(model))
    assert_same(mine.state_dict()["masters"], opt.state_dict()["masters"])


# The way back


def hooks_of(model):
    """Return every hook of every module and parameter, and what stands before their forward."""
    found = {}
    for name, m in model.named_modules():
        found |= {
            (name, k): list(v.values()) for k, v in vars(m).items() if k.endswith("hooks") and v
        }
        if "forward" in vars(m):
            found[name, "forward"] = vars(m)["forward"]
    for name, p in model.named_parameters():
        if p._post_accumulate_grad_hooks or p._backward_hooks:
            found[name, "grad"] = [
                *(p._post_accumulate_grad_hooks or {}),
                *(p._backward_hooks or {}),
            ]
    return found


WAYS = {
    "fp32": dict(dtype=FULL),
    "fp16": dict(dtype=HALF),
    "bf16": dict(dtype=BF16),
    "fp16 flat": dict(dtype=HALF, flat_master=True),
    "bf16 stream": dict(dtype=BF16, flat_master=True, stream=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_restore_gives_the_masters_and_an_optimizer_that_trains_on(way):
    model, inner = start("AdamW", norm_net)
    handle = model.register_forward_hook(lambda *_: None)  # somebody else's stays
    hooks = hooks_of(model)
    ids = [id(p) for p in model.parameters()]
    model, opt = with_masters(model, inner, **WAYS[way])
    train(model, opt, batches(3))
    full, state = weights(model), copy.deepcopy(opt.state_dict())
    assert opt.restore() is inner
    assert hooks_of(model) == hooks
    handle.remove()
    assert [id(p) for p in model.parameters()] == ids
    assert dtypes(model) == {FULL} and {b.dtype for b in model.buffers()} == {FULL, torch.int64}
    assert_same(weights(model), full)
    assert_same(inner.state_dict(), state)
    assert all(p.grad_dtype in (None, FULL) for p in model.parameters())
    plain, other = start("AdamW", norm_net)
    plain.load_state_dict(full)
    other.load_state_dict(state)
    assert_same(train(model, inner, batches(3, seed=2)), train(plain, other, batches(3, seed=2)))
    assert_same(weights(model), weights(plain))
    assert_same(moments(inner), moments(other))
    assert inner._optimizer_step_pre_hooks == other._optimizer_step_pre_hooks


@pytest.mark.parametrize("way", WAYS)
def test_one_of_two_optimizers_gives_the_model_back_and_the_other_lets_go(way):
    model = make(mlp)
    hooks = hooks_of(model)
    inner = [
        optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
        optim.AdamW([*model[1].parameters(), *model[3].parameters()]),
    ]

    def step(opts):
        for x, y in batches(2):
            model.zero_grad()
            loss_of(model, x, y).backward()
            [opt.step() for opt in opts]

    _, *opts = with_masters(model, *inner, **WAYS[way])
    step(opts)
    full = weights(model)
    assert [opt.restore() for opt in opts] == inner
    assert_same(weights(model), full)
    assert dtypes(model) == {FULL} and hooks_of(model) == hooks
    step(inner)
    assert not any(torch.equal(weights(model)[k], v) for k, v in full.items())


@pytest.mark.parametrize("way", WAYS)
def test_to_16_bits_and_back_at_once_changes_no_bit(way):
    model, opt = start("AdamW", norm_net)
    before = weights(model)
    model, mine = with_masters(model, opt, **WAYS[way])
    mine.restore()
    assert_same(weights(model), before)


def test_restore_then_another_layout_goes_on_as_the_plain_loop():
    """A new optimizer each time, which is wrapped, and then given what the old one knows."""
    model, opt = start("AdamW", mlp)
    plain, other = start("AdamW", mlp)
    for kwargs in (dict(dtype=FULL), dict(dtype=FULL, flat_master=True)):
        model, mine = with_masters(model, optim.AdamW(in_groups(model), lr=0.01), **kwargs)
        mine.load_state_dict(opt.state_dict())
        train(model, mine, batches(2))
        opt = mine.restore()
        train(plain, other, batches(2))
    assert_same(weights(model), weights(plain))
    assert_same(moments(opt), moments(other))


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_a_master_optimizer_that_was_restored_steps_no_more(flat):
    """It would take the masters out again: the inner one would then train these, not the model."""
    model, opt = pair("SGD momentum", mlp, flat_master=flat)
    train(model, opt, batches(1))
    inner = opt.restore()
    before = weights(model)
    model.zero_grad()
    loss_of(model, *batches(1)[0]).backward()
    with pytest.raises(MixedPrecisionError, match="restore"):
        opt.step()
    assert_same(weights(model), before)
    inner.step()
    assert not torch.equal(weights(model)["0.weight"], before["0.weight"])


def test_restore_of_an_optimizer_without_model_gives_32_bit_parameters():
    model, opt = loose(THREE["Adam"])
    train(model, opt, batches(3))
    masters = opt.state_dict()["masters"]
    opt.restore()
    assert dtypes(model) == {FULL}
    assert_same([p.detach() for p in model.parameters()], masters)


def test_a_dropped_optimizer_leaves_a_model_that_still_computes():
    model, opt = pair("AdamW", mlp)
    train(model, opt, batches(1))
    del opt
    loss_of(model, *batches(1)[0]).backward()
    assert model[0].weight.grad.isfinite().all()


# Bad input


def refused(error, message, act, model, *rest):
    """Assert that `act` is refused with `message`, and that the model is as it was."""
    before = weights(model), dtypes(model), hooks_of(model)
    opts = [o for o in rest if isinstance(o, optim.Optimizer)]
    inner = [(len(o.param_groups), list(o._optimizer_step_pre_hooks)) for o in opts]
    with pytest.raises(error, match=message):
        act(model, *rest)
    assert_same(weights(model), before[0])
    assert (dtypes(model), hooks_of(model)) == before[1:]
    assert [(len(o.param_groups), list(o._optimizer_step_pre_hooks)) for o in opts] == inner


def wrap_only(model, opt):
    return MasterOptimizer(opt, model=model)


def test_a_32_bit_model_has_nothing_to_master():
    refused(ValueError, "no parameter .* in 16 bits.*with_masters", wrap_only, *start("AdamW"))


def test_a_parameter_outside_the_model_is_refused_by_name():
    model, other = make(mlp), nn.Parameter(torch.ones(3))
    opt = optim.SGD([*model.parameters(), other], lr=0.1)
    refused(
        ValueError, r"parameter 6 of group 0, shape \(3,\).*ModuleList", with_masters, model, opt
    )
    named = optim.SGD([*model.named_parameters(), ("outside", other)], lr=0.1)
    refused(ValueError, "^outside of the optimizer", with_masters, model, named)
    half = make(mlp).to(BF16)
    loose_one = optim.SGD([*half.parameters(), other], lr=0.1)
    refused(ValueError, "belongs to no module", wrap_only, half, loose_one)


def test_an_added_parameter_outside_the_model_is_refused_and_training_goes_on():
    model, opt = pair("SGD momentum", mlp)
    same, plain = pair("SGD momentum", mlp)
    train(model, opt, batches(2))
    train(same, plain, batches(2))
    with pytest.raises(ValueError, match="belongs to no module"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(opt.param_groups) == 2
    train(model, opt, batches(2))
    train(same, plain, batches(2))
    assert_same(weights(model), weights(same))


def test_a_parameter_that_is_added_twice_is_refused_and_training_goes_on():
    for kwargs in (dict(dtype=BF16), dict(dtype=BF16, flat_master=True)):
        model, opt = pair("SGD momentum", mlp, **kwargs)
        train(model, opt, batches(2))
        with pytest.raises(ValueError, match="more than one parameter group"):
            opt.add_param_group({"params": [model[0].weight]})
        train(model, opt, batches(2))
        assert len(opt.param_groups) == 2


def test_an_optimizer_that_has_stepped_is_refused():
    """Its state may be of 16-bit weights; the message says how to go on."""
    for name in ("AdamW", "SGD momentum", "Adagrad", "RMSprop"):
        model, opt = start(name)
        train(model, opt, batches(1))
        refused(ValueError, "already stepped.*load_state_dict", with_masters, model, opt)


class CountsInItsGroups(optim.Optimizer):
    """SGD with its count of steps in the groups, and no state: as Prodigy and Ranger count."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr, step=0))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=group["lr"])


def test_an_optimizer_that_counts_its_steps_in_its_groups_is_refused_once_it_has_stepped():
    model = mlp()
    opt = CountsInItsGroups(model.parameters())
    model, opt = with_masters(model, opt, dtype=BF16)
    train(model, opt, batches(1))
    opt = opt.restore()
    refused(ValueError, "already stepped", with_masters, model, opt)


def test_an_optimizer_that_has_state_from_its_start_is_taken():
    model, opt = with_masters(*start("Adagrad"), dtype=BF16)
    assert len(train(model, opt, batches(1))) == 1


def test_an_optimizer_is_wrapped_once():
    model, inner = start("AdamW")
    model, opt = with_masters(model, inner, dtype=BF16)
    train(model, opt, batches(2))
    for again in (inner, opt):
        refused(ValueError, "only once", with_masters, model, again)
        refused(ValueError, "only once", wrap_only, model, again)
    train(model, opt, batches(1))


def test_the_inner_optimizer_does_not_step_alone():
    model, inner = start("AdamW")
    model, opt = with_masters(model, inner, dtype=BF16)
    loss_of(model, *batches(1)[0]).backward()
    refused(
        MixedPrecisionError, "AdamW is inside a MasterOptimizer", lambda *_: inner.step(), model
    )
    before = weights(model)
    opt.step()
    assert not torch.equal(weights(model)["first.weight"], before["first.weight"])


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_masters_changed_in_place_are_noticed(flat):
    model, opt = pair("SGD", mlp, flat_master=flat)
    train(model, opt, batches(1))
    opt.zero_grad()
    loss_of(model, *batches(1)[0]).backward()
    with torch.no_grad():
        masters_of(opt)[0].mul_(2.0)
    with pytest.raises(MixedPrecisionError, match=r"changed in place.*master_to_model\(\)"):
        opt.step()
    opt.master_to_model()
    doubled = weights(model)["0.weight"]
    assert_same(model[0].weight.detach(), doubled.to(BF16))
    opt.step()
    assert_same(model[0].weight.detach(), weights(model)["0.weight"].to(BF16))


def test_masters_that_are_replaced_are_noticed():
    model, opt = pair("SGD", mlp)
    loss_of(model, *batches(1)[0]).backward()
    opt.param_groups[0]["params"][0] = nn.Parameter(torch.ones(6, 4))
    refused(MixedPrecisionError, "other tensors than the masters", lambda *_: opt.step(), model)


@pytest.mark.parametrize("thing", [None, 0.1, "adam", optim.AdamW, [torch.ones(2)]], ids=str)
def test_what_is_no_optimizer_is_refused(thing):
    refused(TypeError, "expected one of torch.optim", with_masters, make(mlp), thing)
    refused(TypeError, "expected one of torch.optim", wrap_only, make(mlp).to(BF16), thing)


def test_fastais_optimizer_is_refused_with_the_way_to_go():
    fastai = pytest.importorskip("fastai.optimizer")
    model = make(mlp)
    opt = fastai.Adam(list(model.parameters()), lr=0.1)
    refused(TypeError, r"Learner has to_fp16\(\)", with_masters, model, opt)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, "float16", None], ids=str)
def test_another_dtype_is_refused(dtype):
    model, opt = start("AdamW")
    refused((TypeError, ValueError), "dtype", partial(with_masters, dtype=dtype), model, opt)


def test_a_model_that_is_no_module_is_refused():
    with pytest.raises((TypeError, ValueError), match="Module"):
        with_masters(list(make(mlp).parameters()), optim.SGD(make(mlp).parameters(), lr=0.1))


def test_an_optimizer_given_before_the_model_is_refused():
    model, opt = start("AdamW")
    with pytest.raises((TypeError, ValueError)):
        with_masters(opt, model)
    assert dtypes(model) == {FULL}


def test_a_compiled_model_is_wrapped_first(fresh_compiler):
    model, opt = start("AdamW", mlp)
    compiled = torch.compile(model, backend="aot_eager")
    message = "OptimizedModule.*model inside"
    refused(ValueError, message, with_masters, compiled, opt)
    assert dtypes(model) == {FULL}


def test_a_distributed_model_is_wrapped_first():
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    model, opt = start("AdamW", mlp)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(model)
        with pytest.raises(ValueError, match="DistributedDataParallel.*model inside"):
            with_masters(ddp, opt)
    finally:
        distributed.destroy_process_group()
    assert dtypes(model) == {FULL}


def test_a_flat_parameter_belongs_to_one_optimizer():
    model = make(mlp)
    opts = [optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    wrap = partial(with_masters, flat_master=True)
    refused(ValueError, "a parameter is in two optimizers", wrap, model, *opts)


def test_masters_of_another_kind_are_not_mixed():
    model = make(mlp)
    first, second = (
        optim.SGD(model[0].parameters(), lr=0.1),
        optim.SGD(model[3].parameters(), lr=0.1),
    )
    model, first = with_masters(model, first, dtype=BF16)
    wrap = partial(with_masters, dtype=BF16, flat_master=True)
    refused(ValueError, "masters of another kind", wrap, model, second)


def other_nets():
    return {
        "fewer": nn.Sequential(nn.Linear(4, 3)),
        "wider": nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)),
    }


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("other", other_nets())
def test_state_of_another_model_is_refused(other, flat):
    """PyTorch counts parameters only: a state of other shapes fails in the middle of a step."""
    model, opt = pair("AdamW", mlp, flat_master=flat)
    train(model, opt, batches(2))
    before = weights(model), copy.deepcopy(opt.state_dict())
    net = other_nets()[other]
    foreign = optim.AdamW(in_groups(net), lr=0.5)
    train(net, foreign, batches(2))
    with pytest.raises(ValueError):
        opt.load_state_dict(foreign.state_dict())
    assert_same((weights(model), opt.state_dict()), before)
    train(model, opt, batches(1))


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("mine, other", [("AdamW", "SGD momentum"), ("SGD momentum", "AdamW")])
def test_state_of_another_optimizer_is_refused(mine, other, flat):
    """By PyTorch, or, where it would not notice, by us: SGD has no rate of momentum in Adam's."""
    model, opt = pair(mine, mlp, flat_master=flat)
    train(model, opt, batches(2))
    before = copy.deepcopy(opt.state_dict())
    plain, inner = start(other, mlp)
    train(plain, inner, batches(2))
    error = dict(match="another optimizer") if mine == "SGD momentum" else {}
    with pytest.raises((ValueError, KeyError), **error):
        opt.load_state_dict(inner.state_dict())
    assert_same(opt.state_dict(), before)
    train(model, opt, batches(1))


def test_masters_of_another_model_are_refused():
    model, opt = loose(THREE["AdamW"])
    train(model, opt, batches(2))
    before = copy.deepcopy(opt.state_dict())
    state = copy.deepcopy(before)
    state["masters"][0] = torch.ones(2, 2)
    with pytest.raises(ValueError, match="of another model"):
        opt.load_state_dict(state)
    assert_same(opt.state_dict(), before)


def test_a_model_file_that_does_not_fit_changes_nothing():
    model, opt = pair("AdamW", mlp)
    train(model, opt, batches(1))
    before = weights(model)
    state = {**before, "3.weight": torch.ones(2, 2)}
    with pytest.raises(RuntimeError, match="3.weight"):
        model.load_state_dict(state)
    assert_same(weights(model), before)


def test_without_a_model_there_is_no_float_model():
    _, opt = loose(THREE["AdamW"])
    with pytest.raises(MixedPrecisionError, match="model=model"):
        opt.float_model()


def test_a_sparse_gradient_does_not_go_into_a_flat_vector():
    model = make(Words)
    opt = optim.SGD(model.parameters(), lr=0.1)
    wrap = partial(with_masters, flat_master=True)
    refused(MixedPrecisionError, "sparse gradient", wrap, model, opt)


# Any small network, trained in any way

layers = st.sampled_from(["linear", "norm", "batchnorm", "skip", "tied"])
plans = st.lists(
    st.fixed_dictionaries(
        dict(
            micro=st.integers(1, 3),  # batches whose gradients are added up
            freeze=st.none() | st.integers(0, 9),  # turns this parameter's `requires_grad`
            leave_out=st.none() | st.integers(0, 4),  # a layer that this step does not use
            zeros=st.booleans(),  # gradients are set to zero, not dropped
            between=st.sampled_from([None, None, "copy", "files", "ask"]),  # after the step
        )
    ),
    min_size=2,
    max_size=5,
)


class Drawn(nn.Module):
    """A net of drawn layers, each of which can be left out."""

    def __init__(self, kinds):
        super().__init__()
        shared = nn.Linear(4, 4)
        made = dict(
            linear=lambda: nn.Linear(4, 4),
            norm=lambda: nn.LayerNorm(4),
            batchnorm=lambda: nn.BatchNorm1d(4),
            skip=lambda: nn.Sequential(nn.Linear(4, 2, bias=False), nn.Tanh(), nn.Linear(2, 4)),
            tied=lambda: shared,
        )
        self.parts, self.head = nn.ModuleList(made[kind]() for kind in kinds), nn.Linear(4, 3)
        self.left_out = None

    def forward(self, x):
        for i, part in enumerate(self.parts):
            if i != self.left_out:
                x = torch.tanh(part(x))
        return self.head(x)


def follow(kinds, n_groups, name, plan, wrap):
    """Train a drawn net as planned; return losses, weights and moments."""
    model = make(partial(Drawn, kinds))
    params = list(model.parameters())
    groups = [{"params": params[i::n_groups], "lr": 0.01 * (i + 1)} for i in range(n_groups)]
    model, opt = wrap(model, EVERY[name]([g for g in groups if g["params"]]))
    losses, data = [], iter(batches(20, seed=7))
    for step in plan:
        opt.zero_grad(set_to_none=not step["zeros"])
        if step["freeze"] is not None and step["freeze"] < len(params) - 1:
            params[step["freeze"]].requires_grad_(not params[step["freeze"]].requires_grad)
        model.left_out = step["leave_out"]
        for _ in range(step["micro"]):
            loss = loss_of(model, *next(data)) / step["micro"]
            loss.backward()
            losses.append(loss.detach())
        opt.step()
        model, opt = handle(step["between"], model, opt)
        params = list(model.parameters())
    return losses, weights(model), moments(opt)


def handle(how, model, opt):
    """Copy, save and load, or look at what is trained; return what training goes on with."""
    if how == "copy":
        return copy.deepcopy((model, opt))
    if how == "files":
        state, opt_state = through_a_file(model.state_dict(), opt.state_dict())
        model.load_state_dict(state)
        opt.load_state_dict(opt_state)
    if how == "ask":
        ask(model, opt)
    return model, opt


@given(
    st.lists(layers, min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from(["SGD momentum", "AdamW", "Adam amsgrad", "Adagrad", "RMSprop", "NAdam"]),
    plans,
)
@settings(max_examples=15)
def test_any_net_trained_in_any_way_is_the_plain_loop(kinds, n_groups, name, plan):
    """32 bits: the plain loop; 16 bits: flat, streamed or not, one master a parameter. All bits."""
    run = partial(follow, kinds, n_groups, name, plan)
    plain = run(lambda *pair: pair)
    for kwargs in (dict(), dict(flat_master=True), dict(flat_master=True, stream=True)):
        assert_same(run(partial(with_masters, dtype=FULL, **kwargs)), plain)
    each = run(partial(with_masters, dtype=BF16))
    for stream in (False, True):
        flat = partial(with_masters, dtype=BF16, flat_master=True, stream=stream)
        assert_same(run(flat), each)


def test_a_disabled_scaler_shows_gradients_in_32_bits_as_well():
    """Whoever clips the model's after `unscale_` clips what is stepped, whatever put them there."""
    model = nn.Linear(2, 2, bias=False)
    model, opt = with_masters(model, torch.optim.SGD(model.parameters(), lr=1.0), dtype=BF16)
    model.weight.grad = torch.full((2, 2), 0.5, dtype=BF16)  # as DistributedDataParallel does
    LossScaler("cpu", enabled=False).unscale_(opt)
    assert model.weight.grad.dtype == torch.float32
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    before = model.state_dict()["weight"].clone()
    opt.step()
    torch.testing.assert_close((model.state_dict()["weight"] - before).norm(), torch.tensor(0.1))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_bfloat16_skips_a_step_with_inf_or_nan(flat, bad):
    """Every bit stays, statistics and counts of the optimizer included; with a schedule."""
    model = norm_net()
    model, opt = with_masters(model, optim.AdamW(model.parameters()), dtype=BF16, flat_master=flat)
    schedule = lr_scheduler.ExponentialLR(opt, 0.9)
    for i in range(6):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i))
        before = copy.deepcopy((dict(model.state_dict()), opt.state_dict()["state"]))
        for part in x.chunk(2):  # the second one of the accumulated batches is bad
            if i == 3:
                x[7] = bad
            model(part).square().mean().backward()
        opt.step()
        after = dict(model.state_dict()), opt.state_dict()["state"]
        if i == 3:
            assert_same(after, before)
        else:
            with pytest.raises(AssertionError):
                assert_same(after, before)
        opt.zero_grad()
        schedule.step()
    assert opt.skipped == [3] and opt.n_skipped == 1
    assert copy.deepcopy(opt).skipped == [3]


def test_bfloat16_ends_a_hopeless_run():
    model = norm_net()
    model, opt = with_masters(model, optim.SGD(model.parameters(), 1.0), dtype=BF16)
    with pytest.raises(MixedPrecisionError, match="30 steps in a row were skipped.*0.weight"):
        for _ in range(31):
            opt.zero_grad()
            (model(torch.randn(8, 4)).sum() * float("nan")).backward()
            opt.step()
    assert opt.n_skipped == 30 and model[0].weight.isfinite().all()


class Counts(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_the_look_at_bfloat16_is_a_norm_and_none_in_float32(flat):
    """One read of each gradient, and no second one while all are finite."""
    counts = {}
    for dtype, skip in product((BF16, FULL), (False, None)):
        model = norm_net()
        opt = optim.SGD(model.parameters(), lr=0.5)
        model, opt = with_masters(model, opt, dtype=dtype, flat_master=flat, skip_nonfinite=skip)
        for _ in range(3):
            opt.zero_grad()
            model(torch.ones(8, 4)).sum().backward()
            with Counts() as mode:
                opt.step()
        counts[dtype, skip] = mode.names
    assert counts[FULL, None] == counts[FULL, False]
    more = counts[BF16, None] - counts[BF16, False]
    assert more["_foreach_norm"] >= 1 and "isfinite" not in more
    assert more.total() < 30


class Slotted(optim.SGD):
    """SGD that keeps its rate where `vars` does not show it."""

    __slots__ = ("rate",)

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.rate = lr

    @torch.no_grad()
    def step(self, closure=None):
        """Step by its own rate."""
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=self.rate)


def test_an_optimizer_that_cannot_be_copied():
    """With vectors it is refused, with the reason; with a master each it trains."""
    model = nn.Linear(2, 1, bias=False)
    assert not is_elementwise(Slotted(model.parameters(), 0.5))
    with pytest.raises(MixedPrecisionError, match="keeps rate in `__slots__` of Slotted.*flat_ma"):
        with_masters(model, Slotted(model.parameters(), 0.5), flat_master=True)
    assert model.weight.dtype == torch.float32
    before = model.weight.detach().clone()
    model, opt = with_masters(model, Slotted(model.parameters(), 0.5), dtype=torch.bfloat16)
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    (master,) = opt.param_groups[0]["params"]
    assert_same(master.detach(), before - 0.5)


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_weights_in_64_bits_keep_them(flat):
    """A layer that arrives in float64 has float64 masters, in its file too."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).double())
    with torch.no_grad():
        model[1].weight += 1e-12  # which float32 does not hold
    before = {k: v.clone() for k, v in model.state_dict().items()}
    opt = torch.optim.SGD(model.parameters(), lr=1e-13)
    model, opt = with_masters(model, opt, dtype=torch.bfloat16, flat_master=flat)
    assert_same(dict(model.state_dict()), before)
    model(torch.ones(2, 3)).sum().backward()
    opt.step()
    after = model.state_dict()["1.weight"]
    assert after.dtype == torch.float64 and 0 < (after - before["1.weight"]).abs().max() < 1e-12
