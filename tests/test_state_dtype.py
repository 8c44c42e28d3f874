"""`state_dtype={"exp_avg": torch.bfloat16}`: states in two bytes between steps; what is lost."""

import copy
import logging
import pickle
from functools import partial

import inside
import pytest
import torch
from tiny import make_learner
from torch import nn

from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import MasterOptimizer, with_masters
from mixedfp.scaler import LossScaler
from mixedfp.step import MixedStep
from mixedfp.testing import assert_same

BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
BOTH = {"exp_avg": BF16, "exp_avg_sq": BF16}
adamw = partial(torch.optim.AdamW, lr=0.01, betas=(0.9, 0.99))
X = torch.linspace(-2, 2, 80).view(5, 16).sin()


def a_net(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 1))
    net.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))  # of no dimension
    return net


def start(state_dtype=None, make=adamw, seed=0, **settings):
    """Return a net in bfloat16 and its optimizer."""
    net = a_net(seed)
    settings = dict(dtype=BF16, flat_master=True, compiled=False) | settings
    return with_masters(net, make(net.parameters()), state_dtype=state_dtype, **settings)


def train(net, opt, steps=1, grads=None):
    """Train, with gradients of the net's own or the given ones; returns the masters."""
    for i in range(steps):
        opt.zero_grad()
        (net(X).float() * net.scale.float()).square().sum().backward()
        for p in net.parameters() if grads is not None else ():
            p.grad = grads[i].expand(p.shape).to(p.grad.dtype).clone()
        opt.step()
    return dict(net.state_dict())


def vectors(opt, name):
    """Return the states of this name as they are held, those of vectors."""
    opt.param_groups  # noqa: B018, the optimizer has the masters
    found = [s[name] for s in opt.optimizer.state.values()]
    return [v for v in found if v.numel() > 1]


# What a user sees


def test_what_is_no_32_bit_vector_keeps_its_dtype():
    """A parameter of no dimension, and one in 64 bits, whose state was asked for in 16 by name."""
    net = a_net()
    net[3].double()
    net, opt = with_masters(
        net, adamw(net.parameters()), dtype=BF16, flat_master=True, state_dtype=BOTH
    )
    for _ in range(2):
        opt.zero_grad()
        (net(X).float() * net.scale.float()).square().sum().backward()
        opt.step()
    opt.param_groups  # noqa: B018, the optimizer has the masters
    held = [(m.dtype, m.ndim, s["exp_avg"].dtype) for m, s in opt.optimizer.state.items()]
    assert {(dtype, kept) for dtype, n, kept in held if n} == {
        (FULL, BF16),
        (torch.float64, torch.float64),
    }
    assert [kept for _, n, kept in held if not n] == [FULL]


def test_bytes_of_adamw():
    """14, with remainders 12, with both states in 16 bits 8; the screen says so."""
    found = []
    for settings in ({}, {"cut": True}, {"cut": True, "state_dtype": BOTH}):
        cut = settings.pop("cut", False)
        net = nn.Linear(64, 64, bias=False)
        opt = adamw(net.parameters())
        settings |= dict(store_param_remainders=cut, dtype=BF16, flat_master=True)
        net, opt = with_masters(net, opt, **settings)
        for _ in range(2):
            net(torch.ones(2, 64)).sum().backward()
            opt.step()
        held = [v for s in opt.optimizer.state.values() for v in s.values() if v.numel() > 1]
        n = 2 * 4096 + inside.memory_of_masters(vars(opt)["_on"]) + sum(v.nbytes for v in held)
        line = str(opt).splitlines()[1]
        total = sum(float(part.split()[-1]) for part in line[12:].split(" + "))
        assert total == round(n / 4096)
        found.append(total)
    assert found == [14, 12, 8]
    assert "exp_avg between steps, bfloat16" in str(opt)


@pytest.mark.parametrize("to", ["to_bf16", "to_fp16"])
def test_a_learner(to):
    names = {"grad_avg": BF16, "sqr_avg": BF16}
    learn = getattr(make_learner("adam"), to)(flat_master=True, state_dtype=names)
    learn.fit(1, 0.01)
    assert "in chunks" in learn.mp_cb.update_paths() and "state_dtype" in repr(learn.mp_cb)
    held = [learn.opt.state[p] for p in learn.model.parameters() if p.ndim]
    assert {s[k].dtype for s in held for k in names} == {BF16}
    file = learn.opt.state_dict()["state"]
    assert {s[k].dtype for s in file for k in names} == {FULL}
    learn.to_fp32()
    assert {s[k].dtype for s in learn.opt.state.values() for k in names} == {FULL}
    learn.fit(1, 0.01)


def test_refused_before_anything_is_changed():
    def refuse(match, make=adamw, error=MixedPrecisionError, **settings):
        net = a_net()
        opt, before = make(net.parameters()), copy.deepcopy(net.state_dict())
        with pytest.raises(error, match=match):
            with_masters(net, opt, **dict(flat_master=True, state_dtype=BOTH) | settings)
        assert_same(dict(net.state_dict()), dict(before))
        assert net[0].weight.dtype == FULL and not opt.state

    refuse("needs flat_master=True", flat_master=False)
    refuse("it has 'exp_avg', 'exp_avg_sq'", state_dtype={"grad_avg": BF16})
    refuse("it has 'exp_avg', 'exp_avg_sq'", state_dtype={"step": BF16})
    refuse("it has none", partial(torch.optim.SGD, lr=0.1), state_dtype={"momentum_buffer": BF16})
    refuse("stays in 32 bits", error=TypeError, state_dtype={"exp_avg": FULL})
    refuse("expected a dict", error=TypeError, state_dtype=BF16)
    refuse("capturable=True", partial(adamw, capturable=True))
    refuse("Use flat_master=False", partial(torch.optim.Adafactor, lr=0.1))
    learn = make_learner("ranger")
    with pytest.raises(MixedPrecisionError, match="outside of its step"):
        learn.to_bf16(flat_master=True, state_dtype={"grad_avg": BF16})
    assert next(learn.model.parameters()).dtype == FULL
    half = a_net().half()
    with pytest.raises(MixedPrecisionError, match="it has"):
        MasterOptimizer(adamw(half.parameters()), True, model=half, state_dtype={"x": BF16})
    assert half[0].weight.grad_dtype is None or half[0].weight.grad_dtype == HALF


def test_what_is_lost_is_said():
    inside.forget_notices()
    said, logger = [], logging.getLogger("mixedfp")

    def note(record):
        said.append(record.getMessage())

    logger.addFilter(note)
    try:
        start(BOTH)
        assert not said
        start({"exp_avg_sq": BF16}, torch.optim.AdamW)
        start({"exp_avg_sq": HALF}, torch.optim.AdamW)
    finally:
        logger.removeFilter(note)
    assert "stands still" in said[0] and "is 0 after gradients of 6e-5" in said[1]


# The update: a step is exact, what it leaves is rounded

STATES = {
    "SGD": (partial(torch.optim.SGD, lr=0.01, momentum=0.9), ["momentum_buffer"]),
    "AdamW": (adamw, ["exp_avg", "exp_avg_sq"]),
    "each": (partial(adamw, foreach=False), ["exp_avg_sq"]),
    "fused": (partial(adamw, fused=True), ["exp_avg"]),
    "amsgrad": (partial(torch.optim.Adam, amsgrad=True), ["exp_avg", "max_exp_avg_sq"]),
    "Adagrad": (partial(torch.optim.Adagrad, lr=0.01), ["sum"]),
    "RMSprop": (partial(torch.optim.RMSprop, momentum=0.9), ["square_avg", "momentum_buffer"]),
    "Rprop": (partial(torch.optim.Rprop, lr=0.01), ["prev"]),
}


@pytest.mark.parametrize("dtype", [BF16, HALF], ids=str)
@pytest.mark.parametrize("make, names", STATES.values(), ids=STATES)
def test_one_step_is_that_of_32_bits(make, names, dtype, monkeypatch):
    """The weights are, to the bit; a state is what 32 bits would be, rounded."""
    inside.chunk_size(monkeypatch, 100)
    try:
        net, opt = start(dict.fromkeys(names, dtype), make)
    except MixedPrecisionError as e:
        if names != ["prev"] or "index_put_" not in str(e):
            raise
        pytest.skip("Rprop of PyTorch 2.10 writes elements that it picks out, and is refused")
    twin, other = start(None, make)
    assert_same(train(net, opt), train(twin, other))
    for name in names:
        pairs = list(zip(vectors(opt, name), vectors(other, name), strict=True))
        assert pairs
        for state, full in pairs:
            assert full.dtype == FULL
            assert_same(state, full.to(dtype))
    assert "in chunks" in opt.update_paths()


@pytest.mark.parametrize("cut, compiled", [(False, False), (True, False), (True, True)])
def test_n_steps_stay_within_the_bound(cut, compiled):
    """With e the error of a state s that forgets at a rate of b: e' ≤ b e + 2⁻⁹ (|s'| + b e)."""
    grads = torch.randn(12, generator=torch.Generator().manual_seed(0))
    make = partial(torch.optim.SGD, lr=2**-3, momentum=0.9)
    settings = dict(compiled=compiled, store_param_remainders=cut)
    net, opt = start({"momentum_buffer": BF16}, make, **settings)
    twin, other = start(None, make, **settings)
    error, moved, seen = torch.zeros(()), torch.zeros(()), 0.0
    for g in grads:
        now, true = train(net, opt, 1, g[None]), train(twin, other, 1, g[None])
        before = 0.9 * error  # the step uses its state before that is rounded
        (full, *_), (state, *_) = vectors(other, "momentum_buffer"), vectors(opt, "momentum_buffer")
        error = before + 2.0**-9 * (full.abs().max() + before)
        off = (state.float() - full).abs().max()
        assert state.dtype == BF16 and off <= error + 1e-5
        moved = moved + 2**-3 * before
        for k in ("0.weight", "3.bias"):
            assert ((now[k] - true[k]).abs() <= moved + 1e-5).all()
        seen = max(seen, float((now["0.weight"] - true["0.weight"]).abs().max()))
    assert seen > 1e-5  # it is lossy
    if compiled and "compiled" not in opt.update_paths():
        pytest.skip("there is no compiler")


# Files, copies, steps that are none or that no pass does


def test_files_hold_32_bits_and_go_on_with_the_same_bits():
    net, opt = start(BOTH)
    train(net, opt, 3)
    file = copy.deepcopy((net.state_dict(), opt.state_dict()))
    states = file[1]["state"].values()
    assert {s[k].dtype for s in states for k in BOTH} == {FULL}
    assert {v.dtype for v in vectors(opt, "exp_avg")} == {BF16}
    (same, its), (full, plain) = start(BOTH, seed=1), start(None, seed=1)
    for model, optimizer in ((same, its), (full, plain)):
        train(model, optimizer)
        model.load_state_dict(file[0])
        optimizer.load_state_dict(copy.deepcopy(file[1]))
    assert_same(copy.deepcopy(its.state_dict()), file[1])
    assert_same(copy.deepcopy(plain.state_dict()), file[1])
    expected = train(net, opt, 2)
    assert_same(train(same, its, 2), expected)
    train(full, plain)
    there = plain.state_dict()  # of 32-bit states, to one with 16: rounded
    its.load_state_dict(copy.deepcopy(there))
    rounded = its.state_dict()["state"][1]["exp_avg"]
    assert_same(rounded, there["state"][1]["exp_avg"].bfloat16().float())


def test_copies_go_on_with_the_same_bits():
    net, opt = start(BOTH)
    train(net, opt, 2)
    both = [copy.deepcopy((net, opt)), pickle.loads(pickle.dumps((net, opt)))]
    expected = train(net, opt, 2)
    for twin, its in both:
        assert_same(train(twin, its, 2), expected)
        assert {v.dtype for v in vectors(its, "exp_avg")} == {BF16}


def test_back_in_32_bits():
    net, opt = start(BOTH)
    train(net, opt, 2)
    states = copy.deepcopy(opt.state_dict()["state"])
    plain = opt.restore()
    assert_same(plain.state_dict()["state"], states)
    assert {plain.state[p]["exp_avg"].dtype for p in net.parameters()} == {FULL}
    train(net, plain)


@pytest.mark.parametrize("use", ["closure", "hook"])
def test_a_step_that_no_pass_does(use):
    """The optimizer sees 32 bits, and what it leaves is rounded: the same bits."""
    (net, opt), (twin, other) = start(BOTH), start(BOTH)
    seen = []

    def closure():
        opt.zero_grad()
        loss = (net(X).float() * net.scale.float()).square().sum()
        loss.backward()
        return loss

    def look(optimizer, *_):
        seen.extend(s[k].dtype for s in optimizer.state.values() for k in BOTH)

    opt.optimizer.register_step_post_hook(look)
    for _ in range(3):
        if use == "closure":
            opt.step(closure)
        else:
            train(net, opt)
    assert_same(dict(net.state_dict()), train(twin, other, 3))
    assert set(seen) == {FULL} and {v.dtype for v in vectors(opt, "exp_avg")} == {BF16}


@pytest.mark.parametrize("on_device", [False, True])
def test_a_skipped_step_is_none(on_device):
    net = a_net()
    mixed = MixedStep(BF16, True, LossScaler(init_scale=8.0), state_dtype=BOTH)
    mixed.attach(net)
    opt = mixed.wrap_optimizer(adamw(net.parameters()))
    inside.be_exclusive(mixed)
    inside.decide_on_device(mixed, on_device)
    kept = []
    for factor in (torch.inf, 1.0, 1.0, torch.inf, 1.0):
        loss = (net(X).float() * net.scale.float()).square().sum()
        mixed.scale(loss * factor).backward()
        mixed.step() if mixed.unscale() else mixed.skip()
        mixed.update()
        opt.zero_grad()
        kept.append(copy.deepcopy((dict(net.state_dict()), opt.state_dict()["state"])))
    assert not kept[0][1] or not any(s["exp_avg"].any() for s in kept[0][1].values())
    assert_same(kept[2], kept[3])
    assert not torch.equal(kept[3][0]["0.weight"], kept[4][0]["0.weight"])


def test_layers_that_have_no_gradient_for_a_while():
    (net, opt), (twin, other) = start(BOTH), start(BOTH)
    for model, optimizer in ((net, opt), (twin, other)):
        for i in range(4):
            model[3].requires_grad_(i != 1)
            if i == 2 and model is net:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            train(model, optimizer)
    assert_same(dict(net.state_dict()), dict(twin.state_dict()))


def test_on_an_accelerators_layout(monkeypatch):
    expected = train(*start(BOTH), 3)
    inside.align(monkeypatch)
    assert_same(train(*start(BOTH), 3), expected)
