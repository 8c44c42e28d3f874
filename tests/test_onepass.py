"""The step in one pass over memory: the optimizer's own bits, in a fixed number of calls."""

import copy
import gc
import shutil
import weakref
from functools import partial

import inside
import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.progress import CSVLogger
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.optimizer import SGD, Adam, OptimWrapper, QHAdam, RAdam, RMSProp
from tiny import Do, make_learner, plain
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.step import MixedStep
from mixedfp.testing import assert_same

optim = torch.optim
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler"
)
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
DTYPES = HALVES | {"fp32": torch.float32}

OPTIMIZERS = {
    "fastai SGD": partial(SGD, lr=0.1, mom=0.9, wd=0.01),
    "fastai SGD, l2": partial(SGD, lr=0.1, mom=0.9, wd=0.01, decouple_wd=False),
    "fastai SGD, no momentum": partial(SGD, lr=0.1),
    "fastai Adam": partial(Adam, lr=0.01, wd=0.01),
    "fastai RMSProp": partial(RMSProp, lr=0.01, mom=0.9),
    "fastai RAdam": partial(RAdam, lr=0.01),
    "fastai QHAdam": partial(QHAdam, lr=0.01),
    "wrapped AdamW": partial(OptimWrapper, opt=optim.AdamW, lr=0.01),
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD, nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, dampening=0),
    "SGD, maximize": partial(optim.SGD, lr=0.1, maximize=True),
    "AdamW": partial(optim.AdamW, lr=0.01),
    "Adam, amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "AdamW, foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "AdamW, a tensor as rate": partial(optim.AdamW, lr=torch.tensor(0.01)),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "Adamax": optim.Adamax,
    "Adagrad": optim.Adagrad,
    "Adadelta": optim.Adadelta,
    "ASGD": optim.ASGD,
}


@pytest.fixture
def small_is_large(monkeypatch):
    """Have vectors of any size stepped in one pass, in chunks of some hundred elements."""
    inside.everything_is_large(monkeypatch, chunk=700)


def net():
    """Make a small model with norms, biases and weights larger than a chunk."""
    torch.manual_seed(0)
    layers = [nn.Linear(12, 70), nn.BatchNorm1d(70), nn.ReLU(), nn.Linear(70, 40)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(40, 2))


def train(mixed, make, n_steps=5, before_step=None, losses=(), model=None):
    """Train with the verbs of `mixed`; return the model, the optimizer and what they hold."""
    model = net() if model is None else model
    mixed.attach(model)
    opt = mixed.wrap_optimizer(make(list(model.parameters())))
    rng = torch.Generator().manual_seed(1)
    for i in range(n_steps):
        x = torch.randn(16, 12, generator=rng)
        y = torch.randint(0, 2, (16,), generator=rng)
        loss = nn.functional.cross_entropy(mixed.uncast(model(mixed.cast(x, training=True))), y)
        if i in losses:
            loss = loss * float("inf")
        mixed.scale(loss).backward()
        if mixed.unscale():
            if before_step is not None:
                before_step(i, model, opt)
            mixed.step()
        else:
            mixed.skip()
        mixed.update()
        opt.zero_grad()
    return model, opt


def ends(model, opt):
    """Return what training changes."""
    return {"model": dict(model.state_dict()), "opt": opt.state_dict()["state"]}


def mixed_step(dtype, exclusive=True, compiled=False):
    """Make a step over flat masters, from a scale that overflows at first."""
    scaler = LossScaler(init_scale=2.0**18, max_scale=2.0**24, enabled=dtype == torch.float16)
    mixed = MixedStep(dtype, flat_master=True, scaler=scaler, compiled=compiled)
    inside.be_exclusive(mixed, exclusive)
    return mixed


def can_be_recorded(make):
    """Whether all that this torch's version of an optimizer does is element-wise operations."""
    p = nn.Parameter(torch.ones(3))
    opt = make([p])
    for _ in range(2):
        p.grad = torch.ones(3)
        opt.step()
    p.grad = torch.ones(3)
    states = [v for v in opt.state[p].values() if isinstance(v, torch.Tensor) and v.ndim]
    try:
        inside.record(opt.step, [[p, p.grad, *states]])
    except inside.NotElementwise:
        return False
    return True


# their inner operations are others in other versions of torch: an `index_put_` in some
MAYBE_RECORDED = {"Rprop", "ASGD", "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam"}


def is_refused(name):
    """Whether an optimizer steps by itself with this torch."""
    return name in MAYBE_RECORDED and not can_be_recorded(OPTIMIZERS[name])


# how gradients come is the same for all optimizers: these four in all ways, the others in two
ALL_WAYS = [(dtype, exclusive) for dtype in DTYPES for exclusive in (True, False)]
IN_ALL_WAYS = "fastai SGD", "fastai Adam", "SGD", "AdamW"
BY_CHUNKS = [
    (name, *way)
    for i, name in enumerate(OPTIMIZERS)
    for way in (ALL_WAYS if name in IN_ALL_WAYS else (ALL_WAYS[0], ALL_WAYS[1 + i % 5]))
]


@pytest.mark.parametrize("name, dtype, exclusive", BY_CHUNKS)
def test_chunks_give_the_optimizers_own_bits(name, dtype, exclusive, small_is_large, monkeypatch):
    """Chunk by chunk, unscaled on the way, or the whole vectors by the optimizer itself."""
    one = train(mixed_step(DTYPES[dtype], exclusive), OPTIMIZERS[name])
    way = "by the optimizer" if is_refused(name) else "in chunks"
    assert one[1].update_paths().keys() == {way}
    inside.nothing_is_large(monkeypatch)
    whole = train(mixed_step(DTYPES[dtype], exclusive=False), OPTIMIZERS[name])
    assert whole[1].update_paths().keys() == {"by the optimizer"}
    assert_same(ends(*one), ends(*whole))


@pytest.mark.parametrize("fused", [optim.SGD, optim.AdamW])
def test_fused_kernels_round_the_ends_of_stretches_otherwise(fused, small_is_large, monkeypatch):
    """They are not PyTorch's element-wise operators: 4 ulps of the weights in 5 steps."""
    make = partial(fused, lr=0.01, fused=True)
    one = train(mixed_step(torch.bfloat16), make)
    assert one[1].update_paths().keys() == {"in chunks"}
    inside.nothing_is_large(monkeypatch)
    whole = train(mixed_step(torch.bfloat16), make)
    for k, w in whole[0].state_dict().items():
        torch.testing.assert_close(one[0].state_dict()[k], w, rtol=2**-21, atol=2**-26)


@pytest.mark.parametrize("name", ["fastai Adam", "AdamW"])
def test_skipped_steps_change_nothing(name, small_is_large):
    """Weights, state and step counts after an overflow are those before it."""
    seen = []

    def look(i, model, opt):
        seen.append((i, copy.deepcopy(ends(model, opt))))

    mixed = mixed_step(torch.float16)
    mixed.scaler = LossScaler(init_scale=4.0)
    train(mixed, OPTIMIZERS[name], before_step=look, losses={1, 2})
    assert [i for i, _ in seen] == [0, 3, 4]
    assert mixed.scaler.skipped == [1, 2]
    other = mixed_step(torch.float16)
    other.scaler = LossScaler(init_scale=4.0)
    once = ends(*train(other, OPTIMIZERS[name], n_steps=1))
    then = seen[1][1]  # before the step after them, and after its forward pass
    assert_same(then["opt"], once["opt"])
    params = [k for k in once["model"] if k.endswith(("weight", "bias"))]
    assert_same([then["model"][k] for k in params], [once["model"][k] for k in params])


@pytest.mark.parametrize(
    "name", ["fastai SGD", "fastai Adam", "AdamW", "Adam, amsgrad", "wrapped AdamW"]
)
def test_the_device_alone_decides_on_a_skip(name, small_is_large):
    """Nobody reads whether gradients are finite: the same bits, in the first step, too."""

    def run(on_device):
        mixed = mixed_step(torch.float16)
        inside.decide_on_device(mixed, on_device)
        mixed.scaler = LossScaler(init_scale=4.0)
        return mixed, train(mixed, OPTIMIZERS[name], 8, losses={0, 3, 4})

    one, other = run(True), run(False)
    assert_same(ends(*one[1]), ends(*other[1]))
    assert one[0].scaler.skipped == other[0].scaler.skipped == [0, 3, 4]
    assert one[0].scaler.scales == other[0].scaler.scales


def test_hopeless_runs_end_where_only_the_device_knows(small_is_large):
    """The error comes when the record is read, after as many steps as may be skipped."""
    mixed = mixed_step(torch.float16)
    inside.decide_on_device(mixed)
    mixed.scaler = LossScaler(init_scale=4.0, max_skips=3)
    with pytest.raises(MixedPrecisionError, match="3 steps in a row"):
        train(mixed, OPTIMIZERS["AdamW"], 8, losses=set(range(8)))


def test_a_sum_of_gradients_is_taken_in_32_bits(small_is_large):
    """A layer used twice: its gradient does not wait in 16 bits, one used once does."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 2)

        def forward(self, x):
            return self.b(self.a(self.a(x)))

    dtypes = []

    def look(i, model, opt):
        dtypes.append([p.grad.dtype for p in model.parameters()])

    one = train(mixed_step(torch.bfloat16), OPTIMIZERS["SGD"], 3, look, model=Twice())
    assert dtypes[-1] == 2 * [torch.float32] + 2 * [torch.bfloat16]
    other = train(mixed_step(torch.bfloat16, exclusive=False), OPTIMIZERS["SGD"], 3, model=Twice())
    assert_same(ends(*one), ends(*other))


def test_single_use_params():
    """A parameter counts as often as operations use it, one in a checkpoint not at all."""
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    assert inside.single_use_params((a * b).sum()) == {a, b}
    assert inside.single_use_params((a * b * b).sum()) == {a}
    hidden = torch.utils.checkpoint.checkpoint(lambda x: x * c, a * 1, use_reentrant=True)
    assert inside.single_use_params(hidden.sum()) == {a}
    assert inside.single_use_params(torch.ones(())) == set()


@pytest.mark.parametrize(
    "cb, exclusive",
    [
        (None, True),
        (CSVLogger, True),
        (partial(GradientClip, 0.1), True),  # it is known what it does
        (partial(GradientClip, 0.1, 3.0), False),
        (partial(GradientAccumulation, 32), False),
        (partial(Callback, after_backward=lambda cb: None), False),
        (partial(Do, "before_step", lambda learn: None), False),
    ],
)
def test_gradients_wait_only_where_no_callback_may_look(cb, exclusive, small_is_large, tmp_path):
    """With a callback on the way they are 32-bit and unscaled in `before_step`, as ever."""
    learn = make_learner()
    learn.path = tmp_path
    learn.to_fp16(flat_master=True)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, 0.01, cbs=[] if cb is None else [cb()])
    assert inside.is_exclusive(learn.mp_cb.mixed) == exclusive
    assert inside.has_passed(learn.mp_cb.mixed.opt)


def test_a_learner_fits_to_the_same_bits_watched_or_not(small_is_large):
    """A callback that only looks changes nothing but when gradients are unscaled."""
    found = []
    for cbs in ([], [Do("before_step", lambda learn: None)]):
        for precision in ("to_fp16", "to_bf16"):
            learn = getattr(make_learner(), precision)(flat_master=True)
            with learn.no_bar(), learn.no_logging():
                learn.fit_one_cycle(2, 0.01, cbs=cbs)
            found.append([learn.model.state_dict(), learn.opt.state_dict()["state"]])
    assert_same(plain(found[:2]), plain(found[2:]))


def test_gradients_wait_in_16_bits_and_become_true_for_who_asks(small_is_large):
    """Between `unscale` and `step` they are scaled 16-bit ones, until somebody looks."""
    seen = {}

    def look(i, model, opt):
        if i == 3:
            seen["waiting"] = [p.grad.clone() for p in model.parameters()]
            inside.materialize(opt)
            seen["true"] = [p.grad.clone() for p in model.parameters()]

    mixed = mixed_step(torch.float16)
    mixed.scaler = LossScaler(init_scale=1024.0)
    model, _ = train(mixed, OPTIMIZERS["SGD"], before_step=look)
    for p, waiting, true in zip(model.parameters(), seen["waiting"], seen["true"], strict=True):
        assert waiting.dtype == p.dtype
        assert true.dtype == torch.float32
        assert_same(waiting.float() / 1024, true)


def test_asking_in_between_changes_no_bit(small_is_large):
    """Who looks at the gradients gets the truth, and the same training."""

    def look(i, model, opt):
        if i % 2:
            inside.materialize(opt)

    asked = train(mixed_step(torch.float16), OPTIMIZERS["AdamW"], before_step=look)
    assert_same(ends(*asked), ends(*train(mixed_step(torch.float16), OPTIMIZERS["AdamW"])))


@pytest.mark.parametrize("make", [OPTIMIZERS["fastai SGD"], OPTIMIZERS["SGD"]])
@pytest.mark.parametrize("dtype", HALVES)
def test_micro_batches_add_up_in_32_bits(make, dtype, small_is_large):
    """Sixteen backward passes of a step are as exact with gradients that come in 16 bits."""

    def grads(exclusive):
        mixed = mixed_step(HALVES[dtype], exclusive)
        model = net()
        mixed.attach(model)
        opt = mixed.wrap_optimizer(make(list(model.parameters())))
        mixed.scaler = LossScaler(init_scale=256.0, enabled=dtype == "fp16")
        rng = torch.Generator().manual_seed(1)
        for n in (1, 16):
            for _ in range(n):
                x = torch.randn(16, 12, generator=rng)
                out = mixed.uncast(model(mixed.cast(x, training=True)))
                mixed.scale(out.square().mean()).backward()
            assert mixed.unscale()
            inside.materialize(opt)
            found = [p.grad.clone() for p in model.parameters()]
            if n == 1:
                mixed.step()
            mixed.update()
            opt.zero_grad()
        return found

    assert_same(grads(exclusive=True), grads(exclusive=False))


def test_a_parameter_without_a_gradient_is_stepped_as_by_fastai(small_is_large):
    """fastai's `zero_grad` leaves zeros: weight decay and momentum go on."""

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.n = nn.Linear(12, 2), nn.Linear(12, 2), 0

        def forward(self, x):
            self.n += 1
            return self.a(x) if self.n % 2 == 0 else self.a(x) + self.b(x)

    ways = [mixed_step(torch.bfloat16, exclusive) for exclusive in (True, False)]
    one, other = (train(way, OPTIMIZERS["fastai SGD"], model=Sometimes()) for way in ways)
    assert_same(ends(*one), ends(*other))
    assert one[0].b.weight.grad.dtype == torch.float32  # true for who looks after the fit


def test_weights_written_into_the_model_are_taken_over(small_is_large):
    """Also where the step's pass would not look at them."""

    def write(i, model, opt):
        if i == 2:
            with torch.no_grad():
                model[0].weight.fill_(0.5)

    make = OPTIMIZERS["fastai SGD, no momentum"]
    written = train(mixed_step(torch.bfloat16), make, 3, before_step=write)
    assert (written[0].state_dict()["0.weight"] - 0.5).abs().max() < 0.25
    twin = train(mixed_step(torch.bfloat16, exclusive=False), make, 3, before_step=write)
    assert_same(ends(*written), ends(*twin))


@pytest.mark.parametrize("how", ["in place", "another tensor"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("exclusive", [False, True], ids=["taken", "exclusive"])
@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_written_weights_are_taken_over_once(how, large, exclusive, flat, monkeypatch):
    """Every write, with nothing to pay for it in the steps that follow."""
    inside.large_from(monkeypatch, 1 if large else 2**40)
    syncs = inside.count_syncs(monkeypatch)

    def write(i, model, opt):
        if i in (2, 3, 6):
            if how == "in place":
                with torch.no_grad():
                    model[0].weight.fill_(0.5)
            else:
                model[0].weight.data = torch.full_like(model[0].weight, 0.5)
        counts.append(len(syncs))
        weights.append(inside.masters_by_param(opt)[model[0].weight].detach().clone())

    counts, weights = [], []
    mixed = MixedStep(torch.bfloat16, flat, compiled=False)
    inside.be_exclusive(mixed, exclusive)
    train(mixed, OPTIMIZERS["fastai SGD, no momentum"], 9, before_step=write)
    after = [now - counts[0] for now in counts]  # the counts before the steps
    assert after == [0, 0, 0, 1, 2, 2, 2, 3, 3]
    for i, w in enumerate(weights):
        assert ((w - 0.5).abs().max() < 0.25) == (i in (3, 4, 5, 6, 7, 8))


@pytest.mark.parametrize("exclusive", [False, True], ids=["taken", "exclusive"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_masters_show_true_gradients_or_none(large, exclusive, monkeypatch):
    """Never memory that nothing was written to, or what is left of the last step."""
    inside.large_from(monkeypatch, 1 if large else 2**40)
    seen = []

    def look(i, model, opt):
        groups = inside.masters_by_list(opt)
        seen.extend((i, m.grad, ps) for ps, ms in groups for m in ms)
        for _, grad, params in seen[-2:]:
            if grad is not None:
                joined = torch.cat([p.grad.flatten() for p in params])
                assert_same(inside.pieces(grad.detach(), params), joined)

    mixed = mixed_step(torch.bfloat16, exclusive)
    mixed.attach(model := net())
    opt = mixed.wrap_optimizer(optim.SGD(model.parameters(), lr=0.1))
    assert [m.grad for _, ms in inside.masters_by_list(opt) for m in ms] == [None, None]
    train(mixed, OPTIMIZERS["SGD"], 3, before_step=look)
    assert len(seen) == 6
    assert all((grad is None) == (large and exclusive) for _, grad, _ in seen)
    assert [m.grad for _, ms in inside.masters_by_list(mixed) for m in ms] == [None, None]


@pytest.mark.parametrize("exclusive", [False, True], ids=["taken", "exclusive"])
def test_gradients_that_wait_need_no_vector(exclusive, small_is_large):
    """Four bytes a parameter less, until somebody wants to see true gradients."""
    mixed = mixed_step(torch.bfloat16, exclusive)
    _, opt = train(mixed, OPTIMIZERS["fastai Adam"])
    assert inside.have_grad_vectors(mixed) == 2 * [not exclusive]
    inside.materialize(opt)
    opt.step()
    assert inside.have_grad_vectors(mixed) == 2 * [True]


def test_gradients_put_there_after_a_step_are_stepped():
    """Nobody looks before `step`; after it the gradients are anybody's again."""

    def moved(exclusive):
        mixed, model = mixed_step(torch.bfloat16, exclusive), net()
        mixed.attach(model)
        opt = mixed.wrap_optimizer(SGD(list(model.parameters()), lr=0.5))
        mixed.scale(mixed.uncast(model(mixed.cast(torch.ones(16, 12)))).square().mean()).backward()
        mixed.unscale()
        mixed.step()
        for p in model.parameters():
            p.grad = torch.ones(p.shape)
        opt.step()
        return dict(model.state_dict())

    assert_same(moved(exclusive=True), moved(exclusive=False))


# what is not element-wise, or looked at by others, goes the readable way


class Normed(optim.Optimizer):
    """Steps by the sign of the mean, which no chunk knows."""

    def __init__(self, params):
        super().__init__(params, dict(lr=0.1))

    @torch.no_grad()
    def step(self):
        """Look at the whole."""
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * p.grad.norm().sign())


def test_an_update_that_looks_at_the_whole_is_refused_before_anything_changes():
    """`record` runs on stand-ins: no weight has moved when it raises."""
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises(inside.NotElementwise, match="norm"):
        inside.record(Normed([p]).step, [[p, p.grad]])


class Noisy(optim.SGD):
    """Adds noise, whose numbers come from nothing that a stand-in has."""

    @torch.no_grad()
    def step(self):
        """Move by the gradient and by as many random numbers."""
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad).add_(torch.randn(p.shape))


def test_an_update_with_numbers_from_elsewhere_is_refused():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises(inside.NotElementwise, match="add_"):
        inside.record(Noisy([p]).step, [[p, p.grad]])


class Keeping(optim.SGD):
    """Keeps the last gradient in a state of that name."""

    @torch.no_grad()
    def step(self):
        """Move by the mean of two gradients."""
        for p in self.param_groups[0]["params"]:
            last = self.state[p].setdefault("grad", torch.zeros_like(p))
            p.sub_(0.05 * (p.grad + last))
            last.copy_(p.grad)


def test_states_of_any_name_are_stepped_to_the_same_bits(small_is_large):
    """A state that is called as the gradient is in an update: the optimizer steps it itself."""
    make = partial(Keeping, lr=0.1)
    one = train(mixed_step(torch.bfloat16), make)
    assert_same(ends(*one), ends(*train(MixedStep(torch.bfloat16), make)))


class Cooling(optim.Optimizer):
    """SGD whose rate is a number in its state, halved in place once it was used."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        """Step, then cool."""
        for group in self.param_groups:
            for p in group["params"]:
                rate = self.state[p].setdefault("rate", torch.tensor(0.5))
                p.addcmul_(p.grad, rate, value=-1)
                rate.mul_(0.5)


def test_a_number_that_changes_after_it_was_used_is_what_it_was_then(small_is_large, monkeypatch):
    one = train(mixed_step(torch.bfloat16), Cooling)
    assert one[1].update_paths().keys() == {"in chunks"}
    inside.nothing_is_large(monkeypatch)
    assert_same(ends(*one), ends(*train(mixed_step(torch.bfloat16), Cooling)))


def test_vectors_that_are_no_more_are_let_go(small_is_large):
    """Of a layout that was given up nothing stays in memory."""
    mixed = mixed_step(torch.bfloat16)
    model, opt = train(mixed, OPTIMIZERS["SGD"])
    old = weakref.ref(inside.masters_by_list(mixed)[0][1][0])
    model[0].requires_grad_(False)
    for p in model[0].parameters():
        p.grad = None
    mixed.wrap_optimizer(opt)
    mixed.scale(mixed.uncast(model(mixed.cast(torch.randn(16, 12)))).square().mean()).backward()
    mixed.unscale()
    mixed.step()
    gc.collect()
    assert old() is None


def test_what_was_gathered_for_a_skipped_step_is_not_used_again(small_is_large):
    """A backward pass on a loss of one's own, unscaled, after an overflow."""
    mixed = mixed_step(torch.float16)
    mixed.scaler = LossScaler(init_scale=4.0)
    model, _ = train(mixed, OPTIMIZERS["SGD"], 2, losses={1})
    mixed.uncast(model(mixed.cast(torch.ones(16, 12)))).square().mean().backward()
    assert mixed.unscale()
    mixed.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_refused_optimizer_steps_its_vectors_itself(small_is_large):
    """It passes the trial by chance (a sign is the same for all pieces), and is still exact."""
    one = train(mixed_step(torch.bfloat16), Normed, 3)
    assert one[1].update_paths().keys() == {"by the optimizer"}
    each = MixedStep(torch.bfloat16)
    assert_same(ends(*one), ends(*train(each, Normed, 3)))


def test_hooks_see_all_masters(small_is_large):
    """With a hook on the step the optimizer steps whole vectors: it is shown all of them."""
    seen = []

    def make(params):
        opt = optim.SGD(params, lr=0.1)
        opt.register_step_pre_hook(lambda opt, *_: seen.append(sum(
            p.grad.numel() for group in opt.param_groups for p in group["params"]
        )))  # fmt: skip
        return opt

    model, opt = train(mixed_step(torch.float16), make, 3)
    assert set(seen) == {inside.in_vectors(model.parameters())}
    assert opt.update_paths().keys() == {"by the optimizer"}


def test_a_step_of_ones_own_is_called(small_is_large):
    """Who puts a function into `opt.step` is asked for every step, with whole vectors."""
    seen = []

    def make(params):
        opt = SGD(params, lr=0.1)
        own = opt.step
        opt.step = lambda: (
            seen.append(sum(p.numel() for ps in opt.param_lists for p in ps)),
            own(),
        )
        return opt

    model, opt = train(mixed_step(torch.bfloat16), make, 3)
    assert seen == 3 * [inside.in_vectors(model.parameters())]
    assert opt.update_paths().keys() == {"by the optimizer"}


def test_a_model_given_back_in_between_has_32_bit_gradients(small_is_large):
    """Those that were to wait for a step in 16 bits, and still scaled: unscaled by then."""
    mixed, model = mixed_step(torch.float16), net()
    mixed.scaler = LossScaler(init_scale=1024.0)
    mixed.attach(model)
    opt = mixed.wrap_optimizer(OPTIMIZERS["SGD"](list(model.parameters())))
    mixed.scale(mixed.uncast(model(mixed.cast(torch.randn(16, 12)))).square().mean()).backward()
    waiting = {k: p.grad.clone().float() for k, p in model.named_parameters()}
    assert {p.grad.dtype for p in opt.param_groups[0]["params"]} > {torch.float16}
    mixed.detach()
    for k, p in model.named_parameters():
        assert p.grad.dtype == p.dtype == torch.float32
        assert_same(p.grad, waiting[k] / 1024)


def test_small_vectors_are_stepped_beside_large_ones(monkeypatch):
    """Weights in one pass, norms and biases by the optimizer itself: the same bits as all alike."""
    inside.large_from(monkeypatch, 1000)
    for name in ("fastai Adam", "AdamW", "wrapped AdamW"):
        for dtype in DTYPES.values():
            one = train(mixed_step(dtype), OPTIMIZERS[name])
            assert one[1].update_paths().keys() == {"in chunks", "by the optimizer"}
            each = train(MixedStep(dtype, scaler=mixed_step(dtype).scaler), OPTIMIZERS[name])
            assert_same(ends(*one), ends(*each))


def test_copies_and_files_of_what_waits(small_is_large):
    """A deep copy and a state dict between backward and step hold the truth."""

    def look(i, model, opt):
        if i == 2:
            opt.state_dict()
            copy.deepcopy(model)

    one = train(mixed_step(torch.float16), OPTIMIZERS["AdamW"], before_step=look)
    assert_same(ends(*one), ends(*train(mixed_step(torch.float16), OPTIMIZERS["AdamW"])))


# plain loops


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_master_optimizer_steps_in_one_pass(stream, dtype, small_is_large, monkeypatch):
    """Of a plain loop, with the same bits as masters for each parameter."""

    def run(**kwargs):
        model, opt = _pair(DTYPES[dtype], **kwargs)
        scaler = LossScaler("cpu", init_scale=256.0, enabled=dtype == "fp16")
        rng = torch.Generator().manual_seed(1)
        for _ in range(4):
            x = torch.randn(16, 12, generator=rng).to(DTYPES[dtype])
            scaler.scale(model(x).float().square().mean()).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        return model, opt

    flat, each = run(flat_master=True, stream=stream), run()
    assert flat[1].update_paths().keys() == {"in chunks"}
    assert_same(dict(flat[0].state_dict()), dict(each[0].state_dict()))
    assert_same(flat[1].state_dict()["state"], each[1].state_dict()["state"])


def _pair(dtype, **kwargs):
    model = net()
    return with_masters(model, optim.AdamW(model.parameters(), lr=0.01), dtype=dtype, **kwargs)


# calls and reads


class Count(TorchDispatchMode):
    """Count operations, and those that bring a number to Python."""

    def __init__(self):
        super().__init__()
        self.calls, self.reads = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count one."""
        self.calls.append(str(func))
        self.reads += func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.equal.default,
        )
        return func(*args, **(kwargs or {}))


class Bag(nn.Module):
    """So many matrices."""

    def __init__(self, n):
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(torch.ones(8, 8)) for _ in range(n)])


def count_a_step(n, dtype, make, on_device=None, skip_nonfinite=None):
    """Count what happens after the backward pass over `n` matrices."""
    mixed, model = mixed_step(dtype), Bag(n)
    mixed.skip_nonfinite = skip_nonfinite
    inside.decide_on_device(mixed, on_device)
    mixed.scaler = LossScaler(init_scale=4.0, enabled=dtype == torch.float16)
    mixed.attach(model)
    opt = mixed.wrap_optimizer(make(list(model.parameters())))
    for _ in range(3):
        mixed.scale(torch.stack([p.float().sum() for p in model.parameters()]).sum()).backward()
        with Count() as counter:
            assert mixed.unscale()
            mixed.step()
            mixed.update()
            opt.zero_grad()
    way = "in chunks" if inside.is_everything_large() else "by the optimizer"
    assert opt.update_paths().keys() == {way}
    return counter


@pytest.mark.parametrize("large", [1, 2**60], ids=["one pass", "whole"])
@pytest.mark.parametrize("name", ["fastai SGD", "fastai Adam", "SGD", "AdamW"])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_number_of_calls_is_that_of_groups_not_of_tensors(name, dtype, large, monkeypatch):
    """10 or 200 tensors in a group: gather, check, update and give back are as many calls."""
    inside.large_from(monkeypatch, large)
    few, many = (count_a_step(n, HALVES[dtype], OPTIMIZERS[name]) for n in (10, 200))
    assert few.calls == many.calls
    assert len(many.calls) < (100 if dtype == "fp16" else 50)


@pytest.mark.parametrize("name", ["fastai SGD", "fastai Adam", "SGD", "AdamW"])
def test_nothing_is_read_back(name, monkeypatch):
    """No number of this step comes to Python, if the device is left to decide on a skip.

    Adam counts steps on the host: there the decision on the last step is read, one step late.
    """
    inside.everything_is_large(monkeypatch)
    own = 1 if name == "AdamW" else 0  # its step count, on the host
    late = 1 if "Adam" in name else 0
    counter = count_a_step(20, torch.bfloat16, OPTIMIZERS[name])
    assert counter.reads == own + 2  # on a CPU: whether the norm is finite, whether to skip
    counter = count_a_step(20, torch.bfloat16, OPTIMIZERS[name], skip_nonfinite=False)
    assert counter.reads == own
    counter = count_a_step(20, torch.float16, OPTIMIZERS[name], on_device=True)
    assert counter.reads == own + late
    counter = count_a_step(20, torch.float16, OPTIMIZERS[name], on_device=False)
    assert counter.reads == own + 1  # whether to skip


def test_the_counter_counts():
    """A control: masters for each parameter take more calls for more tensors."""

    def calls(n):
        model = Bag(n)
        mixed = MixedStep(torch.bfloat16)
        mixed.attach(model)
        opt = mixed.wrap_optimizer(SGD(list(model.parameters()), lr=0.1))
        for p in model.parameters():
            p.grad = torch.ones_like(p, dtype=torch.float32)
        with Count() as counter:
            mixed.unscale()
            mixed.step()
            opt.zero_grad()
        return len(counter.calls)

    assert calls(100) > calls(10) + 90
    with Count() as counter:
        float(torch.ones(()))
    assert counter.reads == 1


# compiled


def given_gradients(mixed, make, schedule=None, n_steps=10, device="cpu"):
    """Step on gradients that do not depend on weights, so that roundings do not feed themselves."""
    model = net().to(device)
    mixed.attach(model)
    opt = mixed.wrap_optimizer(make(list(model.parameters())))
    rng = torch.Generator().manual_seed(1)
    for i in range(n_steps):
        if schedule is not None:
            schedule(i, model, opt)
        factors = [torch.randn(p.shape, generator=rng).to(p) for p in model.parameters()]
        pairs = zip(model.parameters(), factors, strict=True)
        mixed.scale(sum((p * f).float().sum() for p, f in pairs)).backward()
        assert mixed.unscale()
        mixed.step()
        mixed.update()
        opt.zero_grad()
    return model, opt


def assert_within_ulps(model, other, n):
    """Assert that weights are at most `n` spacings of the largest of them apart."""
    for k, w in other.state_dict().items():
        if w.is_floating_point():
            bound = n * torch.finfo(torch.float32).eps * max(1e-3, float(w.abs().max()))
            torch.testing.assert_close(model.state_dict()[k], w, rtol=0, atol=bound)


@needs_compiler
@pytest.mark.parametrize(
    "name, dtype",
    [("fastai Adam", "fp16"), ("AdamW", "fp16"), ("AdamW", "bf16"), ("fastai SGD", "bf16")],
)
def test_the_compiled_pass_is_within_ulps(name, dtype, monkeypatch):
    """On the same gradients, at moving rates: an ulp of the largest weight for each step."""
    inside.everything_is_large(monkeypatch)

    def schedule(i, model, opt):
        opt.set_hypers(lr=0.01 * (i + 1)) if "fastai" in name else _set_lr(opt, 0.01 * (i + 1))

    runs = []
    for compiled in (True, False):
        mixed = mixed_step(HALVES[dtype], compiled=compiled)
        mixed.scaler = LossScaler(init_scale=16.0, enabled=dtype == "fp16")
        runs.append(given_gradients(mixed, OPTIMIZERS[name], schedule))
    assert runs[0][1].update_paths().keys() == {"compiled"}
    assert inside.n_compiled(runs[0][1]) <= 2  # with weight decay and without: not by rate
    assert_within_ulps(runs[0][0], runs[1][0], 10)


def _set_lr(opt, lr):
    for group in opt.opt.param_groups:
        group["lr"] = lr


@needs_compiler
def test_moving_rates_compile_nothing_anew(monkeypatch):
    """A schedule over twenty steps: the graphs that there were after the third."""
    from torch._dynamo.utils import counters

    inside.everything_is_large(monkeypatch)
    seen = []

    def schedule(i, model, opt):
        _set_lr(opt, 0.001 * (i + 1))
        seen.append(counters["stats"]["unique_graphs"])

    train(mixed_step(torch.bfloat16, compiled=True), OPTIMIZERS["AdamW"], 20, schedule)
    assert seen[-1] > seen[0]
    assert seen[-1] == seen[3]


class HalfMomentum(optim.Optimizer):
    """SGD with a momentum in bfloat16, as optimizers that save memory have it."""

    def __init__(self, params):
        super().__init__(params, dict(lr=0.1))

    @torch.no_grad()
    def step(self):
        """Round twice: when the momentum fades, and when the gradient is added."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p, dtype=torch.bfloat16)
                momentum = state["momentum"]
                momentum.mul_(0.9).add_(p.grad)
                p.add_(momentum, alpha=-group["lr"])


@needs_compiler
def test_states_in_16_bits_are_rounded_as_the_optimizer_rounds_them(small_is_large, monkeypatch):
    """A compiler keeps what is on its way in 32 bits: such a step is done in chunks."""
    one = train(mixed_step(torch.bfloat16, compiled=True), HalfMomentum)
    assert one[1].update_paths().keys() == {"in chunks"}
    inside.nothing_is_large(monkeypatch)
    assert_same(ends(*one), ends(*train(mixed_step(torch.bfloat16), HalfMomentum)))


def test_without_a_compiler_it_goes_in_chunks(monkeypatch, caplog, small_is_large):
    """And says so."""
    monkeypatch.setattr(torch, "compile", _no_compiler)
    one = train(mixed_step(torch.bfloat16, compiled=True), OPTIMIZERS["AdamW"])
    assert one[1].update_paths().keys() == {"in chunks"}
    each = train(MixedStep(torch.bfloat16), OPTIMIZERS["AdamW"])
    assert_same(ends(*one), ends(*each))


def _no_compiler(fn, **kwargs):
    def call(*args):
        raise RuntimeError("No working C++ compiler found")

    return call


@needs_compiler
def test_autograd_notices_a_step_in_between(monkeypatch):
    """A second backward pass through weights that were stepped raises, compiled or not."""
    inside.everything_is_large(monkeypatch)
    for compiled in (False, True):
        mixed, model = mixed_step(torch.bfloat16, compiled=compiled), net()
        mixed.attach(model)
        opt = mixed.wrap_optimizer(OPTIMIZERS["SGD"](list(model.parameters())))
        for _ in range(3):
            out = mixed.uncast(model(mixed.cast(torch.randn(16, 12), training=True)))
            mixed.scale(out.square().mean()).backward(retain_graph=True)
            mixed.unscale()
            mixed.step()
            mixed.update()
            opt.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.square().mean().backward()


# Clipping


# two batches of `train`'s five clip nothing
BOUNDS = [0.2, 1e6, 0.05, 0.3, 1e6]
CLIPS = {
    "once": lambda clip, i: [clip(BOUNDS[i])],
    "twice": lambda clip, i: [clip(BOUNDS[i]), clip(BOUNDS[i] / 2)],
    "another norm": lambda clip, i: [clip(BOUNDS[i], norm_type=float("inf"))],
    "an error": lambda clip, i: [clip(BOUNDS[i], error_if_nonfinite=True)],
}


def train_clipped(dtype, how="once", scale=2.0**10, n_batches=1, flat=True, defer=True, look=None):
    """Train with clipped gradients, the third step's are not finite; return norms and ends."""
    scaler = LossScaler(init_scale=scale, enabled=dtype == torch.float16)
    mixed = MixedStep(dtype, flat_master=flat, scaler=scaler, compiled=False)
    inside.be_exclusive(mixed, defer)
    mixed.clips, norms = defer, []
    model = net()
    by_torch = partial(nn.utils.clip_grad_norm_, list(model.parameters()))
    clip = mixed.clip_grad_norm_ if defer else by_torch
    mixed.attach(model)
    opt = mixed.wrap_optimizer(optim.AdamW(model.parameters(), lr=0.01))
    rng = torch.Generator().manual_seed(1)
    for i in range(5):
        for _ in range(n_batches):
            x, y = torch.randn(16, 12, generator=rng), torch.randint(0, 2, (16,), generator=rng)
            out = mixed.uncast(model(mixed.cast(x, training=True)))
            loss = nn.functional.cross_entropy(out, y) * (float("inf") if i == 2 else 1)
            mixed.scale(loss).backward()
        if mixed.unscale():
            norms += CLIPS[how](clip, i)
            if look is not None:
                look(mixed, model)
            mixed.step()
        else:
            mixed.skip()
        mixed.update()
        opt.zero_grad()
    assert mixed.record.skipped == [2]
    return norms, ends(model, opt)


@pytest.mark.parametrize("n_batches", [1, 2])
@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
def test_what_is_deferred_is_clipped_in_the_pass_to_torchs_bits(dtype, n_batches, small_is_large):
    """And stays deferred, over a step that clips nothing, one that is skipped, micro-batches."""
    stages = []

    def look(mixed, model):
        stages.append(mixed.opt.iteration.stage.name)

    kwargs = dict(n_batches=n_batches)
    one = train_clipped(dtype, look=look, **kwargs)
    assert stages == 4 * ["DEFERRED"] and min(one[0]) > 0.3
    for flat in (True, False):
        assert_same(one, train_clipped(dtype, flat=flat, defer=False, **kwargs))


@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
def test_who_looks_after_clipping_sees_clipped_gradients(dtype, small_is_large):
    """Before it those that are not; the step that follows is the same."""
    seen, deferred = [], []

    def look(mixed, model):
        deferred.append(any(p.grad.dtype == dtype for p in model.parameters()))
        inside.materialize(mixed.opt)
        seen.append([p.grad.clone() for p in model.parameters()])

    one, mine = train_clipped(dtype, look=look), seen[:]
    assert deferred == 4 * [True]
    assert_same(one, train_clipped(dtype, defer=False, look=look))
    assert_same(mine, seen[4:])
    norms = [float(nn.utils.get_total_norm(grads)) for grads in mine]
    expected = [min(float(n), BOUNDS[i]) for n, i in zip(one[0], (0, 1, 3, 4), strict=True)]
    assert norms == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "dtype, how, scale",
    [(torch.float16, how, 2.0**10) for how in CLIPS if how != "once"]
    + [(torch.bfloat16, "twice", 1.0), (torch.float16, "once", 1000.0)],
)
def test_what_the_pass_cannot_clip_torch_clips(dtype, how, scale, small_is_large):
    """Twice, by another norm, with an error, or under a scale whose product would be rounded."""
    one, other = (train_clipped(dtype, how, scale, defer=defer) for defer in (True, False))
    assert_same(one, other)


def test_a_norm_that_overflows_is_no_overflow(small_is_large):
    """In bfloat16, where a gradient's square may be infinite: a step with zeros, as torch does."""
    mixed, model = mixed_step(torch.bfloat16), net()
    mixed.clips = True
    mixed.attach(model)
    mixed.wrap_optimizer(optim.SGD(model.parameters(), lr=0.1))
    out = mixed.uncast(model(mixed.cast(torch.ones(2, 12), training=True)))
    mixed.scale(out.sum() * 1e25).backward()
    assert mixed.unscale() and mixed.clip_grad_norm_(1.0) == float("inf")
    assert not any(p.grad.any() for p in model.parameters())


class _Called(GradientClip):
    """Is no `GradientClip` that the pass would know."""


@pytest.mark.parametrize("precision", ["to_fp16", "to_bf16"])
def test_a_learners_gradient_clip_is_done_in_the_pass(precision, small_is_large):
    """To the bits of fastai's own call, over flat masters and others; switched on again after."""
    found = []
    for flat, kind in [(True, GradientClip), (True, _Called), (False, GradientClip)]:
        cb = kind(0.05)
        learn = getattr(make_learner(), precision)(flat_master=flat)
        learn.fit(2, 0.05, cbs=[cb])
        assert inside.is_exclusive(learn.mp_cb.mixed) == (flat and kind is GradientClip)
        assert cb.run
        found.append(learn.model.state_dict())
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])
    learn = getattr(make_learner(), precision)(flat_master=True)
    learn.fit(2, 0.05)
    with pytest.raises(AssertionError):
        assert_same(found[0], learn.model.state_dict())


def test_a_gradient_clip_clips_again_after_an_interrupted_fit(small_is_large):
    """Between `before_step` and `after_step` fastai's callback is switched off."""

    def interrupt(*args):
        raise KeyboardInterrupt

    learn = make_learner(cbs=[GradientClip(0.05)]).to_fp16(flat_master=True)
    learn.create_opt()
    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(type(learn.mp_cb.mixed.opt), "step", interrupt)
        learn.fit(1, 0.05)
    assert not learn.gradient_clip.run
    learn.to_fp32()
    assert learn.gradient_clip.run
