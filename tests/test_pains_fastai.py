"""What users of mixed precision suffer from, seen side by side: ours passes, fastai's own fails.

A pain is one check, a function of a way to put a learner into 16 bits; the numbers are those of
tests/test_pains.py. It must pass on each of our ways. Where fastai's own has the fault, the same
check must fail on it, so that the check is seen to find what it looks for; a docstring says where
fastai's own is free of it. fastai's ways are for CUDA: tests/fastais_own.py has them for a CPU.
"""

import itertools
import warnings
from functools import partial

import fastais_own
import inside
import pytest
import torch
from fastai.callback.core import CancelBatchException
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.optimizer import SGD, Adam, Lookahead, Optimizer, sgd_step
from fastais_own import net, two_groups
from tiny import (
    ELEMENTWISE,
    LAYERWISE,
    Do,
    bits,
    make_dls,
    make_learner,
    opt_state,
    pictures,
    plain,
    torch_optimizer,
    weights,
)
from torch import nn

from mixedfp.formats import MixedPrecisionError
from mixedfp.testing import assert_same

# Ways: each takes a learner and settings, in our words, and returns the learner


def fp16(learn, **settings):
    """Put `learn` into float16, with a master for each parameter."""
    return learn.to_fp16(**settings)


def fp16_flat(learn, **settings):
    """Put `learn` into float16, with flat masters."""
    return learn.to_fp16(flat_master=True, **settings)


def bf16(learn, **settings):
    """Put `learn` into bfloat16, with a master for each parameter."""
    return learn.to_bf16(**settings)


def bf16_flat(learn, **settings):
    """Put `learn` into bfloat16, with flat masters."""
    return learn.to_bf16(flat_master=True, **settings)


def masters(learn, loss_scale=512.0, growth_interval=500, **settings):
    """Put `learn` into fastai's `to_non_native_fp16`."""
    settings |= dict(max_loss_scale=loss_scale, scale_wait=growth_interval)
    return fastais_own.masters(learn, loss_scale=loss_scale, **settings)


def flat_masters(learn, **settings):
    """Put `learn` into fastai's `to_non_native_fp16(flat_master=True)`."""
    return masters(learn, flat_master=True, **settings)


def autocast(learn, loss_scale=512.0, **settings):
    """Put `learn` into fastai's `to_fp16`."""
    return fastais_own.autocast(learn, init_scale=loss_scale, **settings)


SCALED = (fp16, fp16_flat)
OURS = (*SCALED, bf16, bf16_flat)


def pain(*fastais, on=OURS, error=AssertionError, says=None):
    """Make a test of a check: it passes `on` ours, and `fastais` own ways raise `error`."""

    def make_test(check):
        def test(way, tmp_path):
            if way in on:
                return check(way, tmp_path)
            with warnings.catch_warnings(), pytest.raises(error, match=says):
                warnings.simplefilter("ignore")
                check(way, tmp_path)

        ids = [f.__name__ for f in on] + [f"fastais_{f.__name__}" for f in fastais]
        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return pytest.mark.parametrize("way", [*on, *fastais], ids=ids)(test)

    return make_test


# What the checks are made of


def learner(opt="sgd", model=net, **kwargs):
    """Return a learner of `net` in two groups."""
    return make_learner(opt, model, **{"splitter": two_groups, **kwargs})


def spied(seen, *steppers):
    """Return an optimizer that notes the gradients that it is given, in `seen`."""

    def spy(p, **_):
        seen.append(plain(p.grad))

    return partial(Optimizer, cbs=[spy, *(steppers or [sgd_step])])


def overflow(at):
    """Return a callback by which the batch `at` overflows in the forward pass."""

    def f(learn):
        learn.xb = (torch.full_like(learn.xb[0], float("inf")),)

    return Do("before_batch", f, at=at, order=0)


def scale_of(learn):
    """Return the loss scale, wherever the way keeps it; within a fit."""
    if hasattr(learn, "mp_cb"):
        return learn.mp_cb.loss_scale
    if hasattr(learn, "masters_on_cpu"):
        return learn.masters_on_cpu.loss_scale
    return learn.scaler.get_scale()


def masters_of(learn):
    """Return the float32 masters, as one vector; within a fit."""
    cb = getattr(learn, "mp_cb", None)
    lists = cb.master_params if cb else learn.masters_on_cpu.master_pgs
    return torch.cat([plain(p).flatten() for ps in lists for p in ps])


def trainable(learn):
    """Return a copy of the model's weights in 32 bits, without its buffers."""
    state = weights(learn)
    return {k: state[k] for k, _ in learn.model.named_parameters()}


def way_gone(learn, start):
    """Return how far the weights are from `start`, as one vector."""
    now = trainable(learn)
    return torch.cat([(now[k].float() - start[k]).flatten() for k in now])


def assert_near(found, expected, rtol):
    """Two ways from the same start lead to the same place, up to a part of the length."""
    off = (found - expected).norm() / expected.norm()
    assert off < rtol, f"off by {off:.2g} of the way"


def same_way(way, fit, rtol, make=learner):
    """Train by `fit`, in 16 bits and in 32, and assert that both lead to the same place."""
    ends = []
    for to in (lambda learn: learn, way):
        learn = make()
        start = trainable(learn)
        fit(to(learn))
        ends.append(way_gone(learn, start))
    assert_near(ends[1], ends[0], rtol)


# Checkpoints


@pain(autocast, masters, flat_masters)
def test_pain_03_the_scale_is_resumed(way, tmp_path):
    """fastai: neither scale nor growth count is in a checkpoint, or lives on to the next fit.

    The scale halves in the first epoch and, three steps later, doubles in the second.
    """

    def start():
        return way(learner("adam", path=tmp_path), growth_interval=3)

    def note(learn):
        seen.append((learn.epoch, scale_of(learn), learn.loss.item()))

    cbs = [overflow(1)] if way not in (bf16, bf16_flat) else []
    ends, seen = [], []
    for is_broken in (False, True):
        learn, seen = start(), []
        look = Do("after_batch", note)
        if is_broken:
            learn.fit(1, 0.01, cbs=[look, *cbs])
            learn.save("stop")
            learn = start().load("stop")
            learn.fit(1, 0.01, cbs=look)
        else:
            at = [Do(cb.event, cb.f, at=1, order=cb.order) for cb in cbs]
            learn.fit(2, 0.01, cbs=[look, *at])
        ends.append(([s[1:] for s in seen], weights(learn), opt_state(learn)))
    (unbroken, *state), (broken, *state_broken) = ends
    if cbs:
        assert len({scale for scale, _ in unbroken[4:]}) > 1, "the growth count matters"
    assert_same([torch.tensor(b[4:]) for b in [broken]], [torch.tensor(unbroken[4:])])
    assert_same(state_broken, state)


@pain(masters, flat_masters)
def test_pain_04_masters_are_not_rebuilt_from_halves(way, tmp_path):
    """fastai: the file holds the half weights, widened; the low bits of the masters are gone.

    Autocast has no masters.
    """
    learn, ends = way(learner(path=tmp_path)), []
    keep = Do("after_step", lambda learn: ends.append(masters_of(learn)), order=100)
    learn.fit(1, 0.01, cbs=keep)
    learn.save("stop")
    other = way(learner(path=tmp_path, seed=2)).load("stop")
    found = []
    other.fit(1, 0.0, cbs=Do("before_batch", lambda o: found.append(masters_of(o)), at=0))
    assert_same(found[0], ends[-1])


@pain(masters, flat_masters)
def test_pain_04_a_plain_checkpoint_sets_the_masters(way, tmp_path):
    """fastai: masters are made anew from the rounded weights at each fit. Here: the file's bits."""
    source = learner(SGD, path=tmp_path)
    source.fit(1, 0.01)
    source.save("plain")
    learn, found = way(learner(SGD, path=tmp_path, seed=2)), []
    learn.load("plain")
    learn.fit(1, 0.0, cbs=Do("before_batch", lambda o: found.append(masters_of(o)), at=0))
    expected = torch.cat([p.detach().flatten() for p in source.model.parameters()])
    assert_same(found[0].sort().values, expected.sort().values)


# Clipping


def assert_clipped(way, groups, rtol):
    seen, norms, grads = [], [], []

    def note(learn):
        norms.append(torch.cat([g.flatten() for g in seen]).norm().item())
        grads.append(torch.cat([g.flatten() for g in seen]))
        seen.clear()

    start = Do("before_step", lambda learn: seen.clear(), order=70)
    for to in (way, lambda learn: learn):
        learn = to(learner(spied(seen), splitter=groups))
        learn.fit(1, 1e-3, cbs=[GradientClip(0.01), start, Do("after_step", note)])
    torch.testing.assert_close(torch.tensor(norms), torch.full((8,), 0.01), rtol=1e-4, atol=0)
    for ours, full in zip(grads[:4], grads[4:], strict=True):
        assert_near(ours.sort().values, full.sort().values, rtol)


def one_group(model):
    """Return all parameters as one group."""
    return list(model.parameters())


@pain(masters, flat_masters)
def test_pain_05_the_optimizer_sees_clipped_gradients(way, tmp_path):
    """fastai: the half gradients are clipped, still scaled; the masters' are not.

    Its autocast unscales before.
    """
    assert_clipped(way, one_group, 0.03)


@pain(masters, flat_masters)
def test_pain_05_several_groups_are_clipped_together(way, tmp_path):
    """fastai: its own `clip=` is per group. The norm is that of all, as in 32 bits."""
    assert_clipped(way, two_groups, 0.03)


FUSED = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adam": partial(torch.optim.Adam, eps=0.01),  # so large that the gradient's size matters
    "adamw": partial(torch.optim.AdamW, eps=0.01),
}


@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("opt", FUSED)
def test_pain_06_fused_and_clipped(way, opt):
    """Others refuse it. fastai's optimizers are not fused; with autocast PyTorch's work, too.

    Fused kernels round differently in the last bit (their products are not rounded in between):
    after two steps the masters agree to 4 units in the last place, or 1e-8.
    """
    ends = {}
    for fused, clip in itertools.product((False, True), (0.01, 1e6)):
        torch_opt = torch_optimizer(FUSED[opt], fused=fused)
        learn = way(learner(torch_opt, dls=make_dls(*pictures(24))))
        learn.fit(1, 0.01, cbs=GradientClip(clip))
        ends[fused, clip] = masters_of(learn)
    torch.testing.assert_close(ends[True, 0.01], ends[False, 0.01], rtol=5e-7, atol=1e-8)
    assert (ends[False, 0.01] - ends[False, 1e6]).abs().max() > 1e-4  # clipping did something


# The loop


@pain(autocast, error=RuntimeError, says="since the last update")
def test_pain_07_a_batch_called_off_before_its_step(way, tmp_path):
    """fastai's autocast: "step() has already been called since the last update()".

    Its masters pass.

    The gradients of the batch that was called off stay, and are added to: as in 32 bits.
    """

    def f(_):
        raise CancelBatchException

    same_way(way, lambda learn: learn.fit(1, 0.01, cbs=Do("before_step", f, at=1)), 0.03)


@pain(masters, flat_masters)
def test_pain_21_lr_find_leaves_no_trace(way, tmp_path):
    """fastai: the checkpoint that it goes back to has no masters, and no scale.

    Its autocast has no scale to lose, it starts anew at each fit (number 3).

    Weights, optimizer state and scale are as before it, bit for bit, and so is the fit after it.
    """
    ends = []
    for looks in (False, True):
        learn = way(learner("adam", path=tmp_path), loss_scale=1024.0, growth_interval=3)
        learn.fit(1, 0.01)
        before = trainable(learn), opt_state(learn)["state"]
        if looks:
            learn.lr_find(num_it=20, end_lr=1e3, show_plot=False, suggest_funcs=None)
            assert_same((trainable(learn), opt_state(learn)["state"]), before)
        scales = []
        look = Do("before_batch", lambda o, scales=scales: scales.append(scale_of(o)))
        learn.fit(1, 0.01, cbs=look)
        ends.append((scales, weights(learn), opt_state(learn)["state"]))
    assert_same(ends[1], ends[0])


@pain(autocast, masters, flat_masters)
def test_pain_21_lr_find_stops_on_nan(way, tmp_path):
    """fastai: nan is greater than nothing, so it goes on to its last iteration."""
    learn, losses = way(learner(path=tmp_path)), []

    def spoil(learn):
        losses.append(0)
        if len(losses) > 10:
            learn.xb = (torch.full_like(learn.xb[0], float("nan")),)

    with learn.added_cbs(Do("before_batch", spoil, order=0)):
        learn.lr_find(num_it=60, show_plot=False, suggest_funcs=None)
    assert 10 < len(losses) < 60


# Accumulation


@pytest.mark.parametrize("way", OURS)
def test_pain_22_losses_are_logged_unscaled(way):
    """An older fastai logged losses times the scale. Today's shows the true ones, too.

    The first loss is of the same weights: as near as the rounding of weights and activations.
    """
    seen = []
    for to in (way, lambda learn: learn):
        learn = to(learner())

        def note(learn):
            seen.append(torch.stack([learn.loss, learn.loss_grad]).detach())

        learn.fit(1, 1e-3, cbs=[GradientAccumulation(16), Do("after_batch", note)])
    rtol = 1e-2 if way in (bf16, bf16_flat) else 2e-3
    assert len(seen) == 8
    torch.testing.assert_close(
        torch.stack(seen[:4])[:, 0], torch.stack(seen[4:])[:, 0], rtol=rtol, atol=0
    )
    torch.testing.assert_close(
        torch.stack(seen[:4])[1::2, 1], torch.stack(seen[4:])[1::2, 1], rtol=rtol, atol=0
    )


@pain(masters, flat_masters, on=SCALED)
def test_pain_22_one_micro_batch_overflows(way, tmp_path):
    """fastai: the statistics are nan from there on (number 14), so no step is taken any more.

    All of the step is skipped, once: the other is taken, and the scale is halved once.
    """
    seen = []
    learn = way(learner(spied(seen), dls=make_dls(*pictures(56))), loss_scale=512.0)
    scales, before = [], trainable(learn)
    seen.clear()
    start = Do("before_fit", lambda learn: seen.clear(), order=70)
    note = Do("after_batch", lambda learn: scales.append(scale_of(learn)))
    frozen = Do("after_batch", lambda o: scales.append(trainable(o)), at=2)
    learn.fit(1, 1e-3, cbs=[GradientAccumulation(24), overflow(1), start, note, frozen])
    assert_same([v for v in scales if isinstance(v, dict)], [before])
    scales = [v for v in scales if not isinstance(v, dict)]
    assert scales == [512.0] * 2 + [256.0] * 4
    n_seen, n = sum(g.numel() for g in seen), sum(v.numel() for v in before.values())
    assert n_seen == n, "one step"
    assert all(g.isfinite().all() for g in seen)


# Steps that are skipped


@pain(autocast, masters, flat_masters, on=SCALED)
def test_pain_14_statistics_after_a_skip(way, tmp_path):
    """fastai: the overflowed forward pass has made BatchNorm's statistics nan, for good."""
    learn, seen = way(learner()), []

    def look(learn):
        seen.append({k: plain(b) for k, b in learn.model.named_buffers()})

    looks = [Do("before_batch", look, at=1, order=-1), Do("after_batch", look, at=1)]
    looks.append(Do("before_batch", look, at=2, order=-1))
    learn.fit(1, 0.01, cbs=[overflow(1), *looks])
    assert_same(seen[-1], seen[0])
    assert_same(seen[1], seen[0])
    assert torch.tensor(learn.recorder.final_record[-1]).isfinite(), "the validation loss"


# What is small


@pain(masters, flat_masters)
def test_pain_23_sixteen_micro_batches(way, tmp_path):
    """fastai: half gradients are added up in half: the small ones are lost against the large.

    The gradient is the mean of the inputs: 1 in the first micro-batch, a quarter of a unit in the
    last place of 1 in the others. Autocast keeps its weights, and gradients, in 32 bits.
    """
    eps = torch.finfo(torch.bfloat16 if way in (bf16, bf16_flat) else torch.float16).eps
    x = torch.full((66, 8), eps / 4)
    x[:4] = 1.0
    exact = x[:64].double().mean(0)
    errors = []
    for bs in (4, 64):
        seen = []
        learn = make_learner(
            spied(seen),
            lambda: nn.Linear(8, 1, bias=False),
            dls=make_dls(x, torch.zeros(66), n_valid=2, bs=bs),
            loss_func=lambda pred, y: pred.mean(),
        )
        start = Do("before_step", lambda learn, seen=seen: seen.clear(), order=70)
        way(learn, loss_scale=16.0) if way in (*SCALED, masters, flat_masters) else way(learn)
        learn.fit(1, 0.0, cbs=[GradientAccumulation(64), start])
        (grad,) = seen
        errors.append(((grad.double().flatten() - exact).norm() / exact.norm()).item())
    micro, one = errors
    assert one < eps and micro <= one + 1e-6, "the sum is as good as the batch"


class Ones(nn.Module):
    """A norm's weights and others, all of them 1 at the start."""

    def __init__(self):
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(8, bias=False), nn.Parameter(torch.ones(8))

    def forward(self, x):
        """Compute; the square of what comes out has a gradient above 0 for each weight."""
        return self.norm(x) * self.weight


@pain(masters, flat_masters)
def test_pain_24_weights_of_one_move(way, tmp_path):
    """fastai: masters end with the fit, so what was too small for the halves is lost each time.

    From 1.0, 100 steps of 1e-4 go where they go in 32 bits: bit for bit, as each step has the size
    of the rate. In half they would be lost, next to 1 it has steps of 5e-4, bfloat16 of 4e-3.
    """
    ends = []
    x = torch.randn(18, 8)
    for to in (way, lambda learn: learn):
        learn = to(
            make_learner(
                partial(Optimizer, cbs=[signed_step]),
                Ones,
                dls=make_dls(x, x[:, 0], n_valid=2, bs=4),
                loss_func=lambda pred, y: pred.pow(2).mean(),
            )
        )
        for _ in range(25):
            learn.fit(1, 1e-4)
        ends.append(trainable(learn))
    for weight in ends[1].values():
        torch.testing.assert_close(weight, torch.full((8,), 0.99), rtol=1e-5, atol=0)
    assert_same(ends[0], ends[1])


def signed_step(p, lr, **_):
    """Step by the rate, whatever the gradient's size."""
    p.data.add_(p.grad.data.sign(), alpha=-lr)


@pain(masters, flat_masters)
def test_pain_25_weight_decay_alone(way, tmp_path):
    """fastai: the decay is rounded away at the end of each fit; flat, it is of biases as well."""
    ends = []
    for to in (way, lambda learn: learn):
        learn = to(learner(loss_func=lambda pred, y: 0 * pred.sum()))
        for _ in range(3):
            learn.fit(1, 0.01, wd=0.1)
        ends.append(trainable(learn))
    assert not torch.equal(ends[1]["5.weight"], trainable(learner())["5.weight"])
    assert_same(ends[0], ends[1])


# Freezing


def what_moves(learn, fit):
    """Return the names of the parameters that `fit` moves."""
    before = trainable(learn)
    fit(learn)
    return {k for k, v in trainable(learn).items() if not torch.equal(v.float(), before[k].float())}


BODY, NORM = {"0.weight", "0.bias"}, {"1.weight", "1.bias"}  # norms are trained when frozen, too
HEAD = {"5.weight", "5.bias"}


@pytest.mark.parametrize("way", OURS)
def test_pain_26_freeze_and_unfreeze(way):
    """What is frozen stays, bit for bit, and all else moves. fastai's own passes, too."""
    learn = way(learner())
    for _ in range(2):
        learn.freeze()
        assert what_moves(learn, lambda learn: learn.fit(1, 0.1)) == NORM | HEAD
        learn.unfreeze()
        assert what_moves(learn, lambda learn: learn.fit(1, 0.1)) == BODY | NORM | HEAD


@pain(masters, flat_masters)
def test_pain_26_unfreezing_in_a_callback(way, tmp_path):
    """fastai: what is unfrozen in the middle of a fit has no master, and is not trained."""
    learn = way(learner(model=lambda: net().half().float()))  # casting alone moves no weight
    learn.freeze()
    unfreeze = Do("before_batch", lambda learn: learn.unfreeze(), at=2)
    assert what_moves(learn, lambda learn: learn.fit(1, 0.1, cbs=unfreeze)) == BODY | NORM | HEAD
    freeze = Do("before_batch", lambda learn: learn.freeze(), at=0)
    assert what_moves(learn, lambda learn: learn.fit(1, 0.1, cbs=freeze)) == NORM | HEAD


# Order


@pytest.mark.parametrize("way", OURS)
def test_pain_35_any_order_of_registration(way):
    """Elsewhere the order decides. fastai's own: clipping has no effect on masters (number 5)."""
    ends = []
    for order in itertools.permutations(range(3)):
        learn = learner()
        cbs = [GradientClip(0.05), GradientAccumulation(16), None]
        for i in order:
            learn = way(learn) if cbs[i] is None else learn.add_cb(cbs[i])
        learn.fit(2, 0.1)
        ends.append(bits(learn))
    for end in ends[1:]:
        assert_same(end, ends[0])
    for cbs in ([GradientClip(0.05)], [GradientAccumulation(16)]):  # both did something
        learn = way(learner(cbs=cbs))
        learn.fit(2, 0.1)
        assert not torch.equal(weights(learn)["5.weight"], ends[0]["masters"][-2])


# Flat


def assert_flat_is_each(each, flat, opt):
    ends = []
    for to in (each, flat):
        learn = to(learner(opt, splitter=two_groups))
        learn.fit(2, slice(0.001, 0.01), wd=0.1)
        ends.append((weights(learn), masters_by_param(learn) if each in OURS else ()))
    (flat_weights, flat_masters_), (each_weights, each_masters) = reversed(ends)
    assert_same(flat_weights, each_weights)
    assert_same(flat_masters_, each_masters)


def masters_by_param(learn):
    """List the masters in the order of the model: in a vector norms come before biases."""
    masters = inside.masters_by_param(learn.mp_cb.mixed)
    return [masters[p].detach().clone() for p in learn.model.parameters()]


PAIRS = {"fp16": (fp16, fp16_flat), "bf16": (bf16, bf16_flat)}
LOOKAHEAD = {"lookahead": lambda *args, **kwargs: Lookahead(Adam(*args, **kwargs), k=3)}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("opt", ELEMENTWISE | LOOKAHEAD)
def test_pain_38_flat_is_each(opt, pair):
    """fastai: see the control below. Here flat masters give the same bits, with any of these."""
    assert_flat_is_each(*PAIRS[pair], (ELEMENTWISE | LOOKAHEAD)[opt])


@pytest.mark.parametrize("opt", ["sgd", "adam", "ranger", "torch_adamw"])
def test_pain_38_fastais_flat_is_another_training(opt):
    """The control: norms and biases are decayed, the state lands on the first parameter."""
    with pytest.raises((AssertionError, RuntimeError, AttributeError)):
        assert_flat_is_each(masters, flat_masters, ELEMENTWISE[opt])


@pain(flat_masters, on=(fp16_flat, bf16_flat), error=pytest.fail.Exception)
def test_pain_38_layer_wise_optimizers_are_refused(way, tmp_path):
    """fastai: all layers become one, without a word. Here it is an error, before training."""
    for name, opt in LAYERWISE.items():
        with pytest.raises(MixedPrecisionError, match="flat_master=False"):
            way(learner(partial(opt, mom=0.0) if name != "lamb" else opt)).fit(1, 0.01)
