"""PyTorch's own cases of gradient scaling, for models in 16 bits; oracle: the loop without scaling.

Each loop is written once and run twice: with a `LossScaler` over a model in 32 or 16 bits, and with
PyTorch alone, without any scaling, over the same model in 32 or 64 bits. In 32 bits the weights
have to be the same bits. In 16 bits they have to be closer to the exact ones than `TOLERANCE` of
what the training moved them, and the same loop with a fault has to end outside of that.
"""

import io
import math
import os
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from mixedfp.optimizer import MasterOptimizer, with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

DEVICE = os.environ.get("MIXEDFP_TEST_DEVICE", "cpu")  # `make test-cuda` sets it

# Ways to train a model


class Way(NamedTuple):
    """How a model is trained: the dtype that it computes in, and what steps it."""

    dtype: torch.dtype
    kind: str  # "alone": the plain optimizer; a key of `MASTERS` or `GIVEN`

    def __str__(self):
        return f"{str(self.dtype).removeprefix('torch.')}-{self.kind}"


HALF, BRAIN = torch.float16, torch.bfloat16
FLOAT, EXACT = Way(torch.float32, "alone"), Way(torch.float64, "alone")
MASTERS = dict(masters={}, flat=dict(flat_master=True))
MASTERS["stream"] = dict(flat_master=True, stream=True)
GIVEN = dict(given={}, given_flat=dict(flat_master=True))  # the model is in 16 bits already
HALVES = [Way(dtype, kind) for dtype in (HALF, BRAIN) for kind in MASTERS]
HALVES += [Way(HALF, "given"), Way(BRAIN, "given_flat")]
FLOATS = [FLOAT, *(Way(torch.float32, kind) for kind in MASTERS)]
TOLERANCE = {torch.float32: 1e-5, HALF: 0.003, BRAIN: 0.02}

every_way = pytest.mark.parametrize("way", [*FLOATS, *HALVES], ids=str)
SOME = [FLOAT, Way(torch.float32, "flat"), Way(HALF, "masters"), Way(HALF, "stream")]
SOME += [Way(BRAIN, "flat"), Way(BRAIN, "given")]  # each dtype and each kind, where cases are many
some_ways = pytest.mark.parametrize("way", SOME, ids=str)
SPARSE = "alone", "masters", "given"  # flat masters refuse sparse gradients
every_half = pytest.mark.parametrize("way", HALVES, ids=str)


def mlp():
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.Tanh(),
        nn.LayerNorm(16),
        nn.Linear(16, 12),
        nn.GELU(),
        nn.Linear(12, 3),
    )


def conv_net():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 8, 2, padding=1),
        nn.BatchNorm2d(8),
        nn.Tanh(),
        nn.Conv2d(8, 4, 2),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make(way, net=mlp, optimizer=sgd, seed=1, split=False):
    """Return a model to be trained in `way`, and its optimizer or, if `split`, two of its parts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = net()
    if way.kind not in MASTERS:
        model.to(way.dtype)
    parts = (model[:3], model[3:]) if split else (model,)
    opts = [optimizer(part.parameters()) for part in parts]
    if way.kind in MASTERS:
        model, *opts = with_masters(model, *opts, dtype=way.dtype, **MASTERS[way.kind])
    if way.kind in GIVEN:
        opts = [MasterOptimizer(opt, **GIVEN[way.kind]) for opt in opts]
    return model, opts if split else opts[0]


class NoScale:
    """Stands for the scaler in a loop without scaling: it only keeps inf and nan from a step."""

    def scale(self, loss):
        return loss

    def unscale_(self, optimizer):
        pass

    def step(self, optimizer):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [p.grad.to_dense() for p in params if p.grad is not None]
        is_finite = all(grad.isfinite().all() for grad in grads)
        if is_finite:
            optimizer.step()
        return is_finite

    def update(self, new_scale=None):
        pass

    def get_scale(self):
        return 1.0


def full(t):
    """Return `t` in 32 bits, or in 64 where it is."""
    return t if t.dtype == torch.float64 else t.float()


def predict(model, x):
    return full(model(x.to(next(model.parameters()).dtype)))


def loss_of(model, x, y):
    pred = predict(model, x)
    return mse_loss(pred, y.to(pred.dtype))


def batches(n=6, rows=8, seed=0):
    """Return `n` batches of numbers that 16 bits hold exactly: only the arithmetic rounds."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, rows, 6, generator=rng).bfloat16()
    y = (x[..., :3] * x[..., 3:]).sin().bfloat16()
    return list(zip(x, y, strict=True))


def weights(model, opt):
    """Return the weights in full, which are the masters' where there are masters."""
    states = [o.state_dict() for o in (opt if isinstance(opt, list) else [opt])]
    if "masters" in states[0]:
        return [m.clone() for state in states for m in state["masters"]]
    kept = model.state_dict()
    return [kept[name].detach().clone() for name, _ in model.named_parameters()]


class Trained(NamedTuple):
    """What a loop leaves."""

    weights: list  # of each model, in full
    moved: torch.Tensor  # how far all of them went, in 64 bits
    scaler: LossScaler
    seen: list  # what the loop returned


def trained(loop, way, scaler=None, n=1, **kwargs):
    """Run `loop` over `n` models and their optimizers."""
    pairs = [make(way, seed=1 + i, **kwargs) for i in range(n)]
    scaler = of_256() if scaler is None else scaler
    before = [w for pair in pairs for w in weights(*pair)]
    seen = loop(*[model for model, _ in pairs], *[opt for _, opt in pairs], scaler)
    after = [w for pair in pairs for w in weights(*pair)]
    moved = [(a.double() - b.double()).flatten() for a, b in zip(after, before, strict=True)]
    for model, _ in pairs:
        check_dtypes(model, way)
    return Trained(after, torch.cat(moved), scaler, seen)


def check_dtypes(model, way):
    """Check that the model is in the dtype of `way`, but for its norms' parameters."""
    dtypes = {p.dtype for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters()}
    assert dtypes == {way.dtype}
    x, _ = batches()[0]
    returned = torch.float32 if way.kind in MASTERS else way.dtype  # the model's own forward casts
    assert model(x.to(way.dtype)).dtype == returned


def rounded(net, way):
    """Return a 32-bit model with the weights that training in `way` begins with."""
    return net().to(way.dtype).float() if way.kind in GIVEN else net()


REFERENCES = {}  # each is computed once: the same for many ways


def reference(loop, way, scaler, **kwargs):
    """Return what `trained` does, from memory where it has been asked for."""
    key = way, *map(key_of, (loop, scaler)), *((k, key_of(v)) for k, v in sorted(kwargs.items()))
    if key not in REFERENCES:
        REFERENCES[key] = trained(loop, way, scaler(), **kwargs)
    return REFERENCES[key]


def key_of(value):
    if isinstance(value, partial):
        return value.func, value.args, frozenset(value.keywords.items())
    return value


def exactly(loop, way, net=mlp, **kwargs):
    """Run `loop` in 64 bits without scaling."""
    start = way if way.kind in GIVEN else FLOAT
    return reference(loop, EXACT, NoScale, net=partial(rounded, net, start), **kwargs)


def error(ours, exact):
    """Return how far two trainings went apart, as a part of how far the exact one went."""
    return ((ours.moved - exact.moved).norm() / exact.moved.norm()).item()


def twin_of(way):
    """Return the way that has to give the same bits as `way` of 16 bits."""
    return way._replace(kind="given" if way.kind in GIVEN else "masters")


SHOWN = FLOAT, Way(HALF, "masters")  # where faults are tried out
of_256 = partial(LossScaler, DEVICE, 256.0)


def assert_exact(loop, way, faults=(), scaler=of_256, by_bits=True, **kwargs):
    """Hold `loop` with scaling against itself without, and every fault outside of that."""
    ours, exact = trained(loop, way, scaler(), **kwargs), exactly(loop, way, **kwargs)
    assert error(ours, exact) < TOLERANCE[way.dtype]
    if by_bits and way.dtype == torch.float32:
        assert_same(ours.weights, reference(loop, FLOAT, NoScale, **kwargs).weights)
    elif by_bits and way != twin_of(way):
        assert_same(ours.weights, reference(loop, twin_of(way), scaler, **kwargs).weights)
    for fault in faults if way in SHOWN else ():
        theirs = trained(fault, way, scaler(), **kwargs)
        assert not error(theirs, exact) < 3 * TOLERANCE[BRAIN], fault
    return ours


# Typical use


def typical(model, opt, scaler, n=6, rows=8, without=()):
    done = []
    for i, (x, y) in enumerate(batches(n, rows)):
        if i in without:
            continue
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        done.append(scaler.step(opt))
        scaler.update()
    return done


def never_unscaled(model, opt, scaler):
    for x, y in batches():
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        opt.step()


without_the_last = partial(typical, n=5)


@every_way
@pytest.mark.parametrize("net", [mlp, conv_net])
def test_the_typical_loop_trains_as_without_scaling(way, net):
    ours = assert_exact(typical, way, [never_unscaled, without_the_last], net=net)
    assert ours.seen == [True] * 6 and ours.scaler.scales == [256.0] * 6


adam = partial(torch.optim.AdamW, lr=0.02, eps=1e-2)  # of a large eps: tiny gradients lose signs
OPTIMIZERS = dict(
    adamw=adam,
    adamw_foreach=partial(adam, foreach=True),
    adamw_fused=partial(adam, fused=True),
    sgd_foreach=partial(sgd, foreach=True),
    sgd_fused=partial(sgd, fused=True),
    nesterov=partial(sgd, nesterov=True, weight_decay=0.1),
    rmsprop=partial(torch.optim.RMSprop, lr=0.01, eps=0.1),
)


@some_ways
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_implementation_of_an_optimizer_is_unscaled(way, name):
    is_vector = way.kind in ("flat", "stream", "given_flat")
    by_bits = not (name.endswith("fused") and is_vector)  # these differ at the ends of a vector
    faults = [without_the_last] + [never_unscaled] * name.startswith("sgd")
    ours = assert_exact(typical, way, faults, by_bits=by_bits, optimizer=OPTIMIZERS[name])
    assert ours.scaler.n_skipped == 0
    assert len(ours.seen) == 6 and all(map(bool, ours.seen))
    if name.endswith("fused"):  # nobody has asked for them
        assert all(isinstance(taken, torch.Tensor) for taken in ours.seen)


@some_ways
def test_a_scaler_that_is_not_enabled_lets_all_through(way):
    off = partial(LossScaler, DEVICE, enabled=False)
    ours = assert_exact(typical, way, [without_the_last], off)
    assert ours.scaler.get_scale() == 1.0 and ours.scaler.state_dict() == {}


@some_ways
def test_pytorchs_own_scaler_over_masters_gives_our_bits(way):
    theirs = trained(typical, way, GradScaler(DEVICE, 256.0))
    assert_same(theirs.weights, trained(typical, way).weights)


@pytest.mark.parametrize("scaler", [GradScaler, LossScaler])
def test_without_masters_float16_gradients_are_refused(scaler):
    """The error of PyTorch; ours names the parameters and the cure."""
    model, opt = make(Way(HALF, "alone"))
    before = weights(model, opt)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients") as e:
        typical(model, opt, scaler(DEVICE, 256.0))
    assert_same(weights(model, opt), before)
    if scaler is LossScaler:
        assert "MasterOptimizer(optimizer)" in str(e.value) and "shape (16, 6)" in str(e.value)


@pytest.mark.parametrize("kind", ["alone", *MASTERS, *GIVEN])
def test_small_steps_of_bfloat16_are_lost_without_masters_only(kind):
    """With PyTorch's scaler nothing fails, and most weights stand still."""
    way, slow = Way(BRAIN, kind), partial(torch.optim.SGD, lr=1e-3)
    ours, exact = trained(typical, way, optimizer=slow), exactly(typical, way, optimizer=slow)
    if kind == "alone":
        assert error(ours, exact) > 0.5
    else:
        assert error(ours, exact) < TOLERANCE[BRAIN]


def in_a_closure(model, opt, scaler):
    def compute(x, y):
        opt.zero_grad()
        loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        return loss.detach()

    for x, y in batches():
        scaler.step(opt, partial(compute, x, y))
        scaler.update()


@every_way
def test_a_step_by_a_closure_is_the_typical_step(way):
    """PyTorch's scaler takes none: "Closure use is not currently supported"."""
    ours, theirs = trained(in_a_closure, way), trained(typical, way)
    assert_same(ours.weights, theirs.weights)
    assert ours.scaler.scales == theirs.scaler.scales


def words_net():
    return nn.Sequential(Words(), nn.Tanh(), nn.Linear(8, 3))


class Words(nn.Embedding):
    """The embedding of what an input of numbers is rounded to, with sparse gradients."""

    def __init__(self):
        super().__init__(9, 8, sparse=True)

    def forward(self, x):
        return super().forward((x.float().abs() * 3).long().clamp(max=8)).sum(1)


@pytest.mark.parametrize("way", [w for w in (*FLOATS, *HALVES) if w.kind in SPARSE], ids=str)
def test_sparse_gradients_are_unscaled(way):
    slow = partial(torch.optim.SGD, lr=0.05)
    assert_exact(typical, way, [never_unscaled], net=words_net, optimizer=slow)
    model, opt = make(way, net=words_net, optimizer=slow)
    scaler = of_256()
    one_backward(model, scaler)
    model[0].weight.grad._values()[0] = math.inf
    assert not scaler.step(opt)


class Fused(torch.optim.Optimizer):
    """An optimizer that unscales by itself, as the fused ones of PyTorch, and counts its skips."""

    _step_supports_amp_scaling = True

    def __init__(self, params):
        super().__init__(params, dict(lr=0.1))
        self.skips = 0

    @torch.no_grad()
    def step(self, closure=None):
        scale, found_inf = (getattr(self, k, torch.tensor(v)) for k, v in NOT_TOLD.items())
        self.skips += int(found_inf)
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None and not found_inf:
                p.sub_(0.1 * p.grad / scale)


NOT_TOLD = dict(grad_scale=1.0, found_inf=0.0)  # without a scaler


@every_way
def test_an_optimizer_that_unscales_by_itself_is_told_scale_and_overflow(way):
    (model, opt), scaler = make(way, optimizer=Fused), growing()
    done = overflows_at(model, opt, scaler)
    exact = exactly(overflows_at, way, optimizer=partial(torch.optim.SGD, lr=0.1))
    ours = torch.cat([w.double().flatten() for w in weights(model, opt)])
    theirs = torch.cat([w.flatten() for w in exact.weights])
    assert (ours - theirs).norm() < TOLERANCE[way.dtype] * exact.moved.norm()
    assert [i for i, taken in enumerate(done) if not taken] == scaler.skipped == [2]
    assert scaler.get_scale() == 2048.0
    inner = opt if way is FLOAT else opt.optimizer
    assert inner.skips == 1 and not {"grad_scale", "found_inf"} & (vars(opt) | vars(inner)).keys()


class ToldOfTheScaler(torch.optim.SGD):
    """An optimizer of PyTorch's older kind, whose step asks the scaler to unscale."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        if grad_scaler is None:
            return super().step(closure)
        grad_scaler.unscale_(self)
        if not grad_scaler._found_inf_per_device(self)[torch.device(DEVICE)]:
            super().step(closure)


@some_ways
@pytest.mark.filterwarnings("ignore:GradScaler is going to stop:FutureWarning")
def test_an_optimizer_that_is_given_the_scaler_is_unscaled(way):
    ours = trained(overflows_at, way, growing(), optimizer=partial(ToldOfTheScaler, lr=0.1))
    plain = trained(overflows_at, way, growing(), optimizer=partial(torch.optim.SGD, lr=0.1))
    assert_same(ours.weights, plain.weights)
    assert ours.scaler.get_scale() == plain.scaler.get_scale() == 2048.0
    assert ours.scaler.skipped == [2]


def of_a_scale_beside(model, opt, scaler):
    """Scale the loss by hand as well, and tell a fused optimizer, as PyTorch allows."""
    for x, y in batches():
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y) * 4).backward()
        opt.grad_scale = torch.tensor(4.0)
        scaler.step(opt)
        scaler.update()


@some_ways
def test_a_scale_of_ones_own_beside_the_scalers(way):
    fused = partial(sgd, fused=True)
    ours = trained(of_a_scale_beside, way, optimizer=fused)
    assert_same(ours.weights, trained(typical, way, optimizer=fused).weights)


# Growth and backoff


def overflow(model):
    """Let one number of the model's gradients be infinite."""
    next(model.parameters()).grad.view(-1)[3] = math.inf


def overflows_at(model, opt, scaler, steps=(2,)):
    done = []
    for i, (x, y) in enumerate(batches()):
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        if i in steps:
            overflow(model)
        done.append(scaler.step(opt))
        scaler.update()
    return done


growing = partial(LossScaler, DEVICE, 128.0, growth_interval=1)


@every_way
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_an_overflow_skips_its_step_and_no_other(way, optimizer):
    faults = [partial(overflows_at, steps=steps) for steps in ((), (3,), (2, 5))]
    ours = assert_exact(overflows_at, way, faults, growing, optimizer=optimizer)
    assert ours.seen == [True, True, False, True, True, True]
    assert ours.scaler.skipped == [2]
    assert ours.scaler.scales == [128.0, 256.0, 512.0, 256.0, 512.0, 1024.0]
    assert ours.scaler.get_scale() == 2048.0


@some_ways
def test_pytorchs_scaler_skips_grows_and_backs_off_the_same(way):
    theirs = trained(overflows_at, way, GradScaler(DEVICE, 128.0, growth_interval=1))
    ours = trained(overflows_at, way, growing())
    assert_same(theirs.weights, ours.weights)
    assert theirs.scaler.get_scale() == ours.scaler.get_scale() == 2048.0


@some_ways
def test_the_scale_grows_after_so_many_clean_steps_in_a_row(way):
    scaler = partial(LossScaler, DEVICE, 64.0, growth_factor=4.0, backoff_factor=0.25)
    ours = assert_exact(overflows_at, way, scaler=partial(scaler, growth_interval=2))
    assert ours.scaler.scales == [64.0, 64.0, 256.0, 64.0, 64.0, 256.0]


@every_way
def test_a_skipped_step_leaves_weights_and_moments(way):
    model, opt = make(way, optimizer=adam)
    scaler = growing()
    typical(model, opt, scaler)
    before = weights(model, opt), opt.state_dict()["state"], [p.clone() for p in model.parameters()]
    (x, y), *_ = batches(seed=1)
    opt.zero_grad()
    scaler.scale(loss_of(model, x, y)).backward()
    overflow(model)
    assert not scaler.step(opt)
    now = weights(model, opt), opt.state_dict()["state"], [p.clone() for p in model.parameters()]
    assert_same(now, before)


def overflows_forward(model, opt, scaler, at=2):
    for i, (x, y) in enumerate(batches()):
        opt.zero_grad()
        x = x * math.inf if i == at else x
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.step(opt)
        scaler.update()


@pytest.mark.parametrize("kind", MASTERS)
def test_a_batch_that_overflows_is_as_if_it_never_was(kind):
    """The statistics of a BatchNorm, too; over a model in 32 bits `GradScaler` leaves them nan."""
    constant = partial(LossScaler, DEVICE, 256.0, dynamic=False)
    (model, opt), scaler = make(Way(HALF, kind), net=conv_net), constant()
    overflows_forward(model, opt, scaler)
    twin, twin_opt = make(Way(HALF, kind), net=conv_net)
    typical(twin, twin_opt, constant(), without=(2,))
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    assert scaler.skipped == [2] and model[2].running_mean.isfinite().all()
    plain, plain_opt = make(FLOAT, net=conv_net)
    overflows_forward(plain, plain_opt, GradScaler(DEVICE, 256.0))
    assert not plain[2].running_mean.isfinite().all()


@some_ways
def test_a_first_scale_that_is_too_high_backs_off_until_gradients_fit(way):
    """It costs the batches that overflow, and nothing else; 32 bits and bfloat16 hold them all."""
    ours = trained(partial(typical, n=16), way, LossScaler(DEVICE, 2.0**24))
    taken = partial(typical, n=16, without=tuple(ours.scaler.skipped))
    assert error(ours, exactly(taken, way)) < TOLERANCE[way.dtype]
    n = ours.scaler.n_skipped
    assert 4 < n < 12 if way.dtype == HALF else n == 0
    assert ours.scaler.get_scale() == 2.0 ** (24 - n)
    assert ours.scaler.skipped == [i for i, step_taken in enumerate(ours.seen) if not step_taken]


def of_tiny_loss(model, opt, scaler):
    for x, y in batches():
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y) * 2.0**-22).backward()
        scaler.step(opt)
        scaler.update()


@some_ways
def test_the_scale_keeps_gradients_that_float16_would_flush(way):
    quick = partial(sgd, lr=0.1 * 2**22)
    assert_exact(of_tiny_loss, way, scaler=partial(LossScaler, DEVICE, 2.0**22), optimizer=quick)
    if way.dtype == HALF:
        unscaled = trained(of_tiny_loss, way, LossScaler(DEVICE, 1.0), optimizer=quick)
        assert error(unscaled, exactly(of_tiny_loss, way, optimizer=quick)) > 0.2


# Gradients between backward and step


def one_backward(model, scaler, seed=0):
    (x, y), *_ = batches(seed=seed)
    scaler.scale(loss_of(model, x, y)).backward()


@every_way
def test_unscaled_gradients_are_the_true_ones_in_32_bits(way):
    (model, opt), scaler = make(way), LossScaler(DEVICE, 256.0)
    exact, _ = make(EXACT, net=partial(rounded, mlp, way))
    one_backward(exact, NoScale())
    one_backward(model, scaler)
    scaler.unscale_(opt)
    scaler.unscale_(opt)  # twice is once
    true = torch.cat([p.grad.flatten() for p in exact.parameters()])
    ours = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert ours.dtype == torch.float32
    assert (ours - true).norm() < TOLERANCE[way.dtype] * true.norm()


@every_way
def test_the_optimizer_shows_the_same_gradients_as_the_model(way):
    (model, opt), scaler = make(way), LossScaler(DEVICE, 256.0)
    one_backward(model, scaler)
    scaler.unscale_(opt)
    ours = sum(p.grad.double().square().sum() for p in model.parameters())
    masters = [p for group in opt.param_groups for p in group["params"]]
    assert {m.dtype for m in masters} == {m.grad.dtype for m in masters} == {torch.float32}
    shown = sum(m.grad.double().square().sum() for m in masters)
    torch.testing.assert_close(shown, ours, rtol=1e-12, atol=0)
    for p in model.parameters():
        p.grad.mul_(0.5)
    halved = sum(m.grad.double().square().sum() for m in masters)
    torch.testing.assert_close(halved, ours / 4, rtol=1e-12, atol=0)


def unscaled_early(model, opt, scaler):
    for x, y in batches():
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()


@every_way
def test_unscaling_before_the_step_changes_no_bit(way):
    assert_exact(unscaled_early, way)
    assert_same(trained(unscaled_early, way).weights, trained(typical, way).weights)


def of_model(model, opt):
    return list(model.parameters())


def of_groups(model, opt):
    return [p for group in opt.param_groups for p in group["params"]]


by_norm = partial(clip_grad_norm_, max_norm=0.1)
by_value = partial(clip_grad_value_, clip_value=0.005)


def clipped(model, opt, scaler, clip, params, steps=()):
    seen = []
    for i, (x, y) in enumerate(batches()):
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        if i in steps:
            overflow(model)
        scaler.unscale_(opt)
        seen.append(clip(params(model, opt)))
        scaler.step(opt)
        scaler.update()
    return seen


def clipped_while_scaled(model, opt, scaler, clip, params):
    for x, y in batches():
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        clip(params(model, opt))
        scaler.step(opt)
        scaler.update()


@some_ways
@pytest.mark.parametrize("params", [of_model, of_groups])
@pytest.mark.parametrize("clip", [by_norm, by_value], ids=["norm", "value"])
def test_unscaled_gradients_are_clipped(way, clip, params):
    """The norm over vectors adds up in another order: there the bits may differ."""
    how = dict(clip=clip, params=params)
    is_vector = way.kind in ("flat", "stream", "given_flat")
    by_bits = not (is_vector and clip is by_norm and params is of_groups)
    faults = [typical, partial(clipped_while_scaled, **how)]
    ours = assert_exact(partial(clipped, **how), way, faults, by_bits=by_bits)
    if clip is by_norm:
        exact = exactly(partial(clipped, **how), way).seen
        assert all(norm > 0.2 for norm in exact)  # every batch is clipped
        rtol = TOLERANCE[way.dtype]
        torch.testing.assert_close(
            torch.stack(ours.seen).double(), torch.stack(exact), rtol=rtol, atol=0
        )


@every_way
def test_a_clipped_overflow_is_still_skipped(way):
    """Its norm is infinite, and what clipping leaves is nan: the scaler has looked before."""
    how = dict(clip=by_norm, params=of_model)
    ours = assert_exact(partial(clipped, **how, steps=(1, 4)), way, [partial(clipped, **how)])
    assert ours.scaler.skipped == [1, 4] and ours.seen[1].isinf() and ours.seen[2].isfinite()


def halved_in_place(model, opt):
    for p in model.parameters():
        p.grad.mul_(0.5)


def halved_anew(model, opt):
    for p in model.parameters():
        p.grad = p.grad * 0.5


def halved_masters(model, opt):
    for p in of_groups(model, opt):
        p.grad.mul_(0.5)


def halved_masters_anew(model, opt):
    for p in of_groups(model, opt):
        p.grad = p.grad * 0.5


def dropped_masters(model, opt):
    for p in of_groups(model, opt):
        p.grad = None


def without_a_gradient(model, opt):
    model[3].weight.grad = None


def changed(model, opt, scaler, change):
    for i, (x, y) in enumerate(batches()):
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.unscale_(opt)
        if i != 1:
            change(model, opt)
        scaler.step(opt)
        scaler.update()


CHANGES = [halved_in_place, halved_anew, without_a_gradient]
CHANGES += [halved_masters, halved_masters_anew, dropped_masters]


@some_ways
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_unscaled_gradients_is_what_is_stepped(way, change):
    assert_exact(partial(changed, change=change), way, [typical])


# Gradient penalty


def penalized(model, opt, scaler, weight=1.0, is_unscaled=True):
    norms = []
    for x, y in batches():
        opt.zero_grad()
        loss = loss_of(model, x, y)
        scaled = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
        inv_scale = 1.0 / scaler.get_scale() if is_unscaled else 1.0
        norm = sum((full(g) * inv_scale).square().sum() for g in scaled).sqrt()
        norms.append(norm.detach())
        scaler.scale(loss + weight * norm).backward()
        scaler.step(opt)
        scaler.update()
    return norms


@every_way
def test_a_penalty_on_the_unscaled_gradients(way):
    faults = [partial(penalized, weight=0.0), partial(penalized, is_unscaled=False)]
    ours = assert_exact(penalized, way, faults)
    exact = torch.stack(exactly(penalized, way).seen)
    rtol = TOLERANCE[way.dtype]
    torch.testing.assert_close(torch.stack(ours.seen).double(), exact, rtol=rtol, atol=0)


@some_ways
def test_a_penalty_whose_gradients_overflow_is_skipped(way):
    """Scaled by 2 ** 22 they do in float16 alone, in the first of the two backward passes."""
    ours = trained(penalized, way, LossScaler(DEVICE, 2.0**22, backoff_factor=2.0**-12))
    assert ours.scaler.skipped == ([0] if way.dtype == HALF else [])
    assert all(w.isfinite().all() for w in ours.weights)


# Gradient accumulation


def accumulated(model, opt, scaler, n, taken=None, divisor=None, looks=False):
    for x, y in batches(n=3, rows=16):
        opt.zero_grad()
        micro = list(zip(x.chunk(n), y.chunk(n), strict=True))
        for xb, yb in micro[:taken]:
            scaler.scale(loss_of(model, xb, yb) / (divisor or n)).backward()
            if looks:
                scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()


@every_way
@pytest.mark.parametrize("n", [4, 16])
def test_micro_batches_train_as_the_one_batch_that_they_are(way, n):
    loop = partial(accumulated, n=n)
    faults = [partial(loop, taken=n - 1), partial(loop, taken=1), partial(loop, divisor=1)]
    ours = assert_exact(loop, way, faults)
    joined = exactly(partial(typical, n=3, rows=16), way)
    assert error(exactly(loop, way), joined) < 1e-12
    assert error(ours, joined) < TOLERANCE[way.dtype]


@some_ways
def test_looking_at_the_gradients_of_each_micro_batch_changes_no_bit(way):
    """With PyTorch's scaler they would be divided by the scale again and again."""
    loop = partial(accumulated, n=4)
    assert_same(trained(partial(loop, looks=True), way).weights, trained(loop, way).weights)


@every_way
def test_micro_batches_are_added_in_32_bits(way):
    """The gradients of fifteen are too small to be added to the first's in 16 bits."""
    (model, _opt), scaler = make(way), LossScaler(DEVICE, 2.0**14)
    (x, y), *_ = batches()
    small = 2.0**-9 if way.dtype == BRAIN else 2.0**-12
    scaler.scale(loss_of(model, x, y)).backward()
    first = [p.grad.clone() for p in model.parameters()]
    for _ in range(15):
        scaler.scale(loss_of(model, x, y) * small).backward()
    for p, g in zip(model.parameters(), first, strict=True):
        torch.testing.assert_close(p.grad, g * (1 + 15 * small), rtol=2e-3 * small, atol=1e-3)


# Several models, losses and optimizers


def two_of_each(m0, m1, opt0, opt1, scaler, overflowing=None, clips=False, looks=False):
    """Train two models by two losses that reach both; batch 2 of model `overflowing` overflows."""
    models, opts, done = (m0, m1), (opt0, opt1), []
    for i, (x, y) in enumerate(batches()):
        for opt in opts:
            opt.zero_grad()
        pred0, pred1 = (predict(model, x) for model in models)
        y = y.to(pred0.dtype)
        loss0 = mse_loss(0.6 * pred0 + 0.4 * pred1, y)
        loss1 = mse_loss(0.3 * pred0 - 0.7 * pred1, y)
        scaler.scale(loss0).backward(retain_graph=True)
        if looks:
            scaler.unscale_(opt0)
        scaler.scale(loss1).backward()
        if overflowing is not None and i == 2:
            overflow(models[overflowing])
        if clips:
            scaler.unscale_(opt0)
            by_norm(m0.parameters())
        done.append([scaler.step(opt) for opt in opts])
        scaler.update()
    return done


def one_loss_of_two(m0, m1, opt0, opt1, scaler):
    for x, y in batches():
        for opt in (opt0, opt1):
            opt.zero_grad()
        pred = 0.6 * predict(m0, x) + 0.4 * predict(m1, x)
        scaler.scale(mse_loss(pred, y.to(pred.dtype))).backward()
        for opt in (opt0, opt1):
            scaler.step(opt)
        scaler.update()


@every_way
def test_two_losses_train_two_models(way):
    faults = [partial(two_of_each, overflowing=0), one_loss_of_two]
    ours = assert_exact(two_of_each, way, faults, growing, n=2)
    assert ours.seen == [[True, True]] * 6
    assert ours.scaler.get_scale() == 128.0 * 2**6  # one update an iteration, not one a step


@some_ways
def test_only_the_optimizer_that_is_unscaled_is_clipped(way):
    assert_exact(partial(two_of_each, clips=True), way, [two_of_each], n=2)


@some_ways
def test_gradients_unscaled_between_two_losses_are_added_to_at_one_scale(way):
    """With PyTorch's scaler the second loss would weigh as much as the scale."""
    loop = partial(two_of_each, looks=True)
    assert_same(trained(loop, way, n=2).weights, trained(two_of_each, way, n=2).weights)
    theirs = trained(loop, FLOAT, GradScaler(DEVICE, 256.0), n=2)
    assert not error(theirs, exactly(two_of_each, FLOAT, n=2)) < 0.5


@some_ways
def test_losses_in_any_nesting_are_scaled_as_their_sum(way):
    (x, y), *_ = batches()
    (model, opt), scaler = make(way), of_256()
    loss = loss_of(model, x, y)
    first, (second, third) = scaler.scale([0.25 * loss, (0.25 * loss, 0.5 * loss)])
    assert_same([first, second, third], [64 * loss, 64 * loss, 128 * loss])
    (first + second + third).backward()
    scaler.step(opt)
    twin, twin_opt = make(way)
    one_backward(twin, scaler := of_256())
    scaler.step(twin_opt)
    assert_same(weights(model, opt), weights(twin, twin_opt))


@every_way
@pytest.mark.parametrize("which", [0, 1])
def test_each_optimizer_decides_alone_whether_to_skip(way, which):
    other = 1 - which
    faults = [two_of_each, partial(two_of_each, overflowing=other)]
    loop = partial(two_of_each, overflowing=which)
    ours = assert_exact(loop, way, faults, growing, n=2)
    expected = [[True, True] for _ in range(6)]
    expected[2][which] = False
    assert ours.seen == expected
    assert ours.scaler.skipped == [2] and ours.scaler.get_scale() == 128.0 * 2**5 / 2


def in_parts(model, opt, scaler, overflowing=None):
    """Train a model by two optimizers, of its body and its head; one may overflow in batch 2."""
    parts, done = (model[:3], model[3:]), []
    for i, (x, y) in enumerate(batches()):
        for o in opt:
            o.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        if overflowing is not None and i == 2:
            overflow(parts[overflowing])
        done.append([scaler.step(o) for o in opt])
        scaler.update()
    return done


@some_ways
@pytest.mark.parametrize("overflowing", [None, 0, 1])
def test_two_optimizers_of_one_model_step_and_skip_alone(way, overflowing):
    others = {None, 0, 1} - {overflowing}
    faults = [partial(in_parts, overflowing=o) for o in others]
    loop = partial(in_parts, overflowing=overflowing)
    ours = assert_exact(loop, way, faults, growing, split=True)
    expected = [[True, True] for _ in range(6)]
    if overflowing is not None:
        expected[2][overflowing] = False
    assert ours.seen == expected


# Custom autograd functions


class Softsign(torch.autograd.Function):
    """x / (1 + |x|), with a derivative of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x / (1 + x.abs())

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (1 + x.abs()).square()


class OfAnotherScale(Softsign):
    """Its derivative adds a number that is not scaled as the gradients are."""

    @staticmethod
    def backward(ctx, grad):
        return Softsign.backward(ctx, grad) + 1e-2


class InFloat(torch.autograd.Function):
    """The same, in 32 bits under autocast; notes the dtypes that it meets."""

    met = []

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        InFloat.met.append((x.dtype, torch.is_autocast_enabled("cpu")))
        return Softsign.forward(ctx, x)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        InFloat.met.append((grad.dtype, torch.is_autocast_enabled("cpu")))
        return Softsign.backward(ctx, grad)


class AsAutocast(torch.autograd.Function):
    """The same, in whatever dtype comes; its backward pass is in autocast as the forward was."""

    met = []

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        AsAutocast.met.append(torch.is_autocast_enabled("cpu"))
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


class OwnLinear(nn.Linear):
    def forward(self, x):
        return AsAutocast.apply(x, self.weight) + self.bias


def custom_net(function):
    return nn.Sequential(OwnLinear(6, 16), Apply(function), nn.Linear(16, 3))


@some_ways
@pytest.mark.parametrize("function", [Softsign, InFloat])
def test_a_gradient_of_ones_own_is_scaled_like_any(way, function):
    function.met = []
    assert_exact(typical, way, net=partial(custom_net, function))
    if function is InFloat:  # no autocast, no cast: 16 bits stay so
        assert (way.dtype, False) in function.met and not any(on for _, on in function.met)


@some_ways
def test_a_gradient_that_is_not_scaled_like_the_others_shows(way):
    """What it adds is divided by a scale that it never had."""
    wrong = trained(typical, way, net=partial(custom_net, OfAnotherScale))
    exact = exactly(typical, way, net=partial(custom_net, OfAnotherScale))
    assert error(wrong, exact) > 3 * TOLERANCE[way.dtype]


def autocast_to(dtype, model, opt, scaler):
    for x, y in batches():
        opt.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    return list(InFloat.met), list(AsAutocast.met)


@every_half
def test_custom_functions_of_autocast_around_a_16_bit_model(way):
    """`custom_fwd` casts to 32 bits there, and the backward pass is what the forward was."""
    InFloat.met, AsAutocast.met = [], []
    ours = trained(partial(autocast_to, way.dtype), way, net=partial(custom_net, InFloat))
    casts, autocasts = ours.seen
    assert set(casts) == {(torch.float32, False)} and len(casts) == 12
    assert set(autocasts) == {True} and len(autocasts) == 6
    exact = exactly(typical, way, net=partial(custom_net, InFloat))
    assert error(ours, exact) < TOLERANCE[way.dtype]


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_autocast_of_a_32_bit_model_trains_as_with_pytorchs_scaler(dtype):
    loop = partial(autocast_to, dtype)
    ours, theirs = trained(loop, FLOAT), trained(loop, FLOAT, GradScaler(DEVICE, 256.0))
    assert_same(ours.weights, theirs.weights)
    assert error(ours, exactly(typical, FLOAT)) < TOLERANCE[dtype]


# Saving and resuming


def through_a_file(*states):
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def part_of(data, start, model, opt, scaler):
    """Train on `data`; of all batches the fourth, and no other, overflows."""
    for i, (x, y) in enumerate(data, start):
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        if i == 3:
            overflow(model)
        scaler.step(opt)
        scaler.update()


adam_fused = partial(adam, fused=True)
RESUMED = [
    (sgd, 4, "optimizer first"),
    (adam, 4, "model first"),
    (adam_fused, 2, "optimizer first"),
]


@some_ways
@pytest.mark.parametrize("optimizer, cut, order", RESUMED)
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(way, optimizer, cut, order):
    data, scaler = batches(8), partial(LossScaler, DEVICE, 256.0, growth_interval=3)
    unbroken = *make(way, optimizer=optimizer), scaler()
    part_of(data, 0, *unbroken)
    broken = *make(way, optimizer=optimizer), scaler()
    part_of(data[:cut], 0, *broken)
    model_state, opt_state, scale = through_a_file(*[o.state_dict() for o in broken])
    # other weights and another rate: both have to come from the file
    model, opt = make(way, optimizer=partial(optimizer, lr=1.0), seed=9)
    if order == "model first":
        model.load_state_dict(model_state)
    opt.load_state_dict(opt_state)
    if order == "optimizer first":
        model.load_state_dict(model_state)
    resumed = model, opt, scaler()
    resumed[2].load_state_dict(scale)
    part_of(data[cut:], cut, *resumed)
    assert_same(what_is_left(*resumed), what_is_left(*unbroken))
    assert broken[2].scales + resumed[2].scales == unbroken[2].scales
    assert unbroken[2].skipped == [3]


def what_is_left(model, opt, scaler):
    in_16_bits = [p.detach() for p in model.parameters()]
    return weights(model, opt), in_16_bits, opt.state_dict()["state"], scaler.state_dict()


@some_ways
def test_without_its_momentum_a_resumed_run_is_another_one(way):
    """So the equality of a resumed run is no accident."""
    data, unbroken, first = batches(8), make(way), make(way)
    part_of(data, 0, *unbroken, growing())
    part_of(data[:4], 0, *first, growing())
    model, opt = first[0], first[1]
    for state in opt.state.values():
        state["momentum_buffer"].zero_()
    part_of(data[4:], 4, model, opt, growing())
    moved = zip(weights(model, opt), weights(*unbroken), strict=True)
    assert all((a - b).abs().max() > 1e-3 for a, b in moved)


# The scale by hand


NEW_SCALES = dict(number=32.0, whole=32, tensor=torch.tensor(32.0))
NEW_SCALES["double"] = torch.tensor(32.0, dtype=torch.float64)


def with_a_new_scale(model, opt, scaler, new, steps=(1, 3)):
    seen = []
    for i, (x, y) in enumerate(batches()):
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        if i == 4:
            overflow(model)
        seen.append(scaler.get_scale())
        scaler.step(opt)
        scaler.update(new if i in steps else None)
    return seen


@some_ways
@pytest.mark.parametrize("new", NEW_SCALES)
def test_a_scale_set_by_hand_is_the_next_ones_and_moves_on(way, new):
    loop = partial(with_a_new_scale, new=NEW_SCALES[new])
    ours = assert_exact(loop, way, scaler=growing)
    assert ours.seen == ours.scaler.scales == [128.0, 256.0, 32.0, 64.0, 32.0, 16.0]
    assert ours.scaler.get_scale() == 32.0


@pytest.mark.parametrize("way", [Way(HALF, "masters"), FLOAT], ids=str)
def test_a_tensor_given_as_scale_is_copied(way):
    model, opt = make(way)
    new, scaler = torch.tensor(32.0), growing()
    one_backward(model, scaler)
    scaler.step(opt)
    scaler.update(new)
    new.fill_(5.0)
    assert scaler.get_scale() == 32.0
    one_backward(model, scaler)
    scaler.step(opt)
    scaler.update()
    assert new.item() == 5.0


# The state of the scaler


@every_way
def test_the_state_goes_to_pytorchs_scaler_and_back(way):
    """A third of the run each: the scale, its growth and the weights are those of one scaler."""
    kwargs, data = dict(init_scale=64.0, growth_interval=3), batches(9)
    whole, scaler = make(way), LossScaler(DEVICE, **kwargs)
    part_of(data, 0, *whole, one := LossScaler(DEVICE, **kwargs))
    model, opt = make(way)
    part_of(data[:3], 0, model, opt, scaler)
    for start, end, other in ((3, 5, GradScaler(DEVICE)), (5, 9, LossScaler(DEVICE))):
        (state,) = through_a_file(scaler.state_dict())
        other.load_state_dict(state)
        assert other.get_scale() == scaler.get_scale()
        scaler = other
        part_of(data[start:end], start, model, opt, scaler)
    assert_same(weights(model, opt), weights(*whole))
    assert scaler.state_dict() == one.state_dict()


@pytest.mark.parametrize("scaler", [GradScaler, LossScaler])
def test_a_state_can_be_loaded_before_the_first_step(scaler):
    """A scale tensor is made later: until then the numbers wait."""
    source = LossScaler(DEVICE, 3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2)
    new = scaler(DEVICE, 7.0)
    new.load_state_dict(source.state_dict())
    model, opt = make(Way(HALF, "masters"))
    part_of(batches(2), 0, model, opt, new)
    assert new.get_scale() == 12.0 and new.get_growth_factor() == 4.0
    assert new.get_backoff_factor() == 0.5 and new.get_growth_interval() == 2


# Wrong orders


def unscale_first(model, opt, scaler):
    scaler.unscale_(opt)


def step_first(model, opt, scaler):
    scaler.step(opt)


def update_first(model, opt, scaler):
    scaler.update()


def update_without_a_step(model, opt, scaler):
    one_backward(model, scaler)
    scaler.update()


def step_twice(model, opt, scaler):
    one_backward(model, scaler)
    scaler.step(opt)
    scaler.step(opt)


def unscale_after_step(model, opt, scaler):
    one_backward(model, scaler)
    scaler.step(opt)
    scaler.unscale_(opt)


def update_twice(model, opt, scaler):
    one_backward(model, scaler)
    scaler.step(opt)
    scaler.update()
    scaler.update()


def scale_a_number(model, opt, scaler):
    scaler.scale(1.0)


def scale_a_number_in_a_list(model, opt, scaler):
    scaler.scale([torch.ones(()), 1.0])


def load_nothing(model, opt, scaler):
    scaler.load_state_dict({})


def update_with(new, model, opt, scaler):
    one_backward(model, scaler)
    scaler.step(opt)
    scaler.update(new)


WRONG = dict(
    unscale_first=unscale_first,
    step_first=step_first,
    update_first=update_first,
    update_without_a_step=update_without_a_step,
    step_twice=step_twice,
    unscale_after_step=unscale_after_step,
    update_twice=update_twice,
    scale_a_number=scale_a_number,
    scale_a_number_in_a_list=scale_a_number_in_a_list,
    load_nothing=load_nothing,
    a_list_of_scales=partial(update_with, torch.tensor([2.0])),
    two_scales=partial(update_with, torch.tensor([1.0, 2.0])),
    a_scale_that_learns=partial(update_with, torch.tensor(2.0, requires_grad=True)),
)


def error_of(loop, way, scaler):
    with pytest.raises(Exception) as e:
        loop(*make(way), scaler(DEVICE, 256.0))
    return e.value


@some_ways
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_order_gets_pytorchs_own_error(way, name):
    ours, theirs = error_of(WRONG[name], way, LossScaler), error_of(WRONG[name], FLOAT, GradScaler)
    assert (type(ours), str(ours)) == (type(theirs), str(theirs))
    assert isinstance(theirs, AssertionError | RuntimeError | ValueError)


@some_ways
def test_a_wrong_order_leaves_the_right_one_possible(way):
    """After the error the same objects train as if it had not been."""
    (model, opt), scaler = make(way), LossScaler(DEVICE, 256.0)
    for wrong in (unscale_first, step_first, update_first):
        with pytest.raises(AssertionError):
            wrong(model, opt, scaler)
    typical(model, opt, scaler)
    assert_same(weights(model, opt), trained(typical, way).weights)


@every_way
def test_without_any_gradient_the_step_is_harmless(way):
    """PyTorch's scaler fails there: "No inf checks were recorded for this optimizer"."""
    (model, opt), scaler = make(way), growing()
    before = weights(model, opt)
    scaler.scale(torch.zeros(()))
    assert bool(scaler.step(opt))
    scaler.update()
    assert_same(weights(model, opt), before)
    assert scaler.get_scale() == 256.0
