"""The contracts of `mixedfp.scaler`; oracles: `torch.amp.GradScaler`, and a few lines of Python."""

import copy
import io
import math
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.amp import GradScaler

from mixedfp.formats import MixedPrecisionError
from mixedfp.layerwise import LayerwiseGradientScaler
from mixedfp.scaler import LossScaler, any_nonfinite, nonfinite_names
from mixedfp.testing import assert_same

INF, NAN = math.inf, math.nan
patterns = st.lists(st.booleans(), max_size=30)  # of overflows
settings = st.fixed_dictionaries(
    dict(
        init_scale=st.sampled_from([1.0, 3.0, 2.0**12, 2.0**24]),
        growth_factor=st.sampled_from([2.0, 1.7, 16.0]),
        backoff_factor=st.sampled_from([0.5, 0.6, 2.0**-4]),
        growth_interval=st.integers(1, 6),
    )
)


def make():
    w = nn.Parameter(torch.zeros(2))
    return w, torch.optim.SGD([w], lr=1.0)


def end(scaler, opt):
    done = scaler.step(opt)
    scaler.update()
    return done


def iterate(scaler, w, opt, factor=1.0):
    """Run an iteration in which the true gradients are `factor`."""
    opt.zero_grad()
    scaler.scale(w.sum() * factor).backward()
    return end(scaler, opt)


def run(scaler, overflows):
    """Run an iteration for each of `overflows`; return the weight."""
    w, opt = make()
    for overflow in overflows:
        iterate(scaler, w, opt, INF if overflow else 1.0)
    return w


def theirs(state):
    """Return what `GradScaler` reads of a state."""
    return {k: v for k, v in state.items() if k != "skips_in_a_row"}


@given(settings, patterns)
def test_without_bounds_it_is_torch(kwargs, overflows):
    bounds = dict(min_scale=2.0**-126, max_scale=2.0**127, max_skips=1000)
    ours, other = LossScaler("cpu", **kwargs, **bounds), GradScaler("cpu", **kwargs)
    bounded, kept = LossScaler("cpu", **kwargs, max_skips=1000), []
    w, opt = make()
    for i, overflow in enumerate(overflows):
        u, v = run(ours, [overflow]), run(other, [overflow])
        if not 2.0**-120 < other.get_scale() < 2.0**120:
            return
        expected = [v.data, other.state_dict()]
        assert_same([u.data, theirs(ours.state_dict())], expected, name=f"step {i}")
        kept.append(bounded.get_scale())
        assert iterate(bounded, w, opt, INF if overflow else 1.0) is not overflow
        assert 1.0 <= bounded.get_scale() <= 2.0**24
        if 1.0 <= min(ours.scales) and max(ours.scales) <= 2.0**24:
            assert kept == ours.scales
    assert bounded.scales == kept
    assert ours.skipped == bounded.skipped == [i for i, o in enumerate(overflows) if o]
    assert ours.n_skipped == sum(overflows) and ours.n_steps == len(overflows)


@given(patterns, st.integers(1, 5))
def test_error_after_max_skips_in_a_row(overflows, max_skips):
    scaler, (w, opt), in_a_row = LossScaler("cpu", max_skips=max_skips), make(), 0
    for overflow in overflows:
        killed, scaler = scaler, LossScaler("cpu", max_skips=max_skips)
        scaler.load_state_dict(killed.state_dict())
        in_a_row = in_a_row + 1 if overflow else 0
        is_last = in_a_row == max_skips
        words = r"parameter 0 of group 0, shape \(2,\)"
        with pytest.raises(MixedPrecisionError, match=words) if is_last else nullcontext():
            iterate(scaler, w, opt, INF if overflow else 1.0)
        in_a_row %= max_skips
    assert w.isfinite().all()


def test_settings():
    wrong = dict(init_scale=["512", 0.5, 1e39], min_scale=[0, 2.0**30], growth_factor=[1, None])
    wrong |= dict(backoff_factor=[1.0, 0], growth_interval=[2.5], max_skips=[0], enabled=["no"])
    for name, values in wrong.items():
        for value in values:
            with pytest.raises((ValueError, TypeError), match=name):
                LossScaler(**{name: value})
    assert LossScaler(init_scale=0.5, dynamic=False).get_scale() == 0.5


def test_nested_outputs_and_float16_losses():
    scaler, one = LossScaler("cpu", 4.0), torch.ones(())
    assert scaler.scale([one, (one, dict(a=one))]) == [4.0, (4.0, dict(a=4.0))]
    assert LossScaler("cpu", 2.0**20).scale(one.half()).item() == 2.0**20  # not inf
    for wrong in (1.0, [1.0], [], None):
        with pytest.raises(ValueError, match="outputs must be a tensor"):
            scaler.scale(wrong)


def test_disabled_passes_everything_through():
    scaler, (w, opt) = LossScaler(enabled=False), make()
    assert iterate(scaler, w, opt, INF) is True and not w.isfinite().any()
    scaler.unscale_(opt)
    scaler.release(opt)
    assert not bool(scaler.known_of(opt).found_inf)
    assert scaler.get_scale() == 1.0 and scaler.state_dict() == {} and scaler.scales == []
    scaler.load_state_dict({})


def gradient(kind, value):
    """Return a gradient of four numbers, the last one `value`, and one in float64 beside it."""
    if kind in ("sparse", "uncoalesced"):
        at, values = [[0, 3, 3]], [1.0, value / 2, value / 2]
        g = torch.sparse_coo_tensor(at, values, (4,), check_invariants=True)
        return g.coalesce() if kind == "sparse" else g
    return torch.tensor([1.0, 2.0, 3.0, value]).to(getattr(torch, kind))


@pytest.mark.parametrize("value", [4.0, INF, NAN, 6e38])  # two finite halves of 6e38 sum up to inf
@pytest.mark.parametrize("kind", "float32 bfloat16 complex64 sparse uncoalesced".split())
def test_gradients_of_any_kind(kind, value):
    grads = [gradient("float64", 8.0), gradient(kind, value)]
    params = [nn.Parameter(torch.zeros_like(g.to_dense())) for g in grads]
    opt, scaler = torch.optim.SGD(params, lr=1.0), LossScaler("cpu", 4.0)
    scaler.scale(torch.zeros(()))
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    assert bool(any_nonfinite(grads)) is (value != 4.0)
    scaler.unscale_(opt)
    assert_same(params[0].grad, grads[0] / 4)
    if value == 4.0:
        assert_same(params[1].grad.to_dense(), grads[1].to_dense() / 4)
    names = [] if value == 4.0 else ["parameter 1 of group 0, shape (4,)"]
    assert nonfinite_names(opt) == names
    assert bool(scaler.known_of(opt).found_inf) is (value != 4.0)
    assert scaler.step(opt) is (value == 4.0)


def test_float16_gradients_are_refused():
    w = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    opt, scaler = torch.optim.SGD([w], lr=1.0), LossScaler("cpu", 8.0)
    scaler.scale(w.sum()).backward()
    with pytest.raises(ValueError, match="float16 gradients would flush.*with_masters"):
        scaler.step(opt)
    assert w.grad.tolist() == [8.0, 8.0]


def test_a_schedule_does_not_warn_that_it_comes_before_a_skipped_step():
    scaler, (w, opt) = LossScaler("cpu", 2.0**10), make()
    schedule = torch.optim.lr_scheduler.StepLR(opt, 99)
    assert iterate(scaler, w, opt, INF) is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()


def test_steps_out_of_order_and_without_gradients():
    scaler, (w, opt) = LossScaler(), make()
    scaler.update()  # nothing was checked
    with pytest.raises(RuntimeError, match="call the closure before step"):
        scaler.step(opt, lambda: w.sum())
    with pytest.raises(MixedPrecisionError, match="no loss was scaled"):
        scaler.step(opt)
    scaler.scale(w.sum()).backward()
    scaler.step(opt)
    with pytest.raises(RuntimeError, match="step\\(\\) has already been called"):
        scaler.step(opt)
    scaler.update()
    assert scaler.step(opt) is True  # with the same gradients
    opt.zero_grad()
    scaler.scale(torch.zeros(()))
    assert scaler.step(opt) is True and w.tolist() == [-2.0, -2.0]


def test_released_gradients_are_unscaled():
    scaler, (w, opt) = LossScaler("cpu", 8.0), make()
    scaler.scale(w.sum()).backward()
    scaler.release(opt)
    assert w.grad.tolist() == [1.0] * 2


@pytest.mark.parametrize("keeps_gradients", [False, True])
@pytest.mark.parametrize("n_verbs", range(6))
@pytest.mark.parametrize("factor", [1.0, INF])
def test_an_interrupt_between_verbs_leaves_a_scaler_that_works(n_verbs, factor, keeps_gradients):
    scaler, (w, opt) = LossScaler("cpu", 8.0), make()
    iterate(scaler, w, opt)
    opt.zero_grad()
    scaled = scaler.scale(w.sum() * factor) if n_verbs > 0 else None
    rest = [lambda: scaled.backward(), lambda: scaler.unscale_(opt), lambda: scaler.step(opt)]
    for verb in [*rest, scaler.update][: max(0, n_verbs - 1)]:
        verb()
    is_added = keeps_gradients and factor == 1.0 and n_verbs > 1
    for added in [is_added, False, False, False]:
        before = w[0].item()
        if not added:
            opt.zero_grad()
        scaler.scale(w.sum()).backward()
        assert end(scaler, opt) is True
        assert w[0].item() == before - 1.0 - added  # true gradients of two batches add up
    assert scaler.get_scale() == float(scaler.used)


def test_layers_are_led_through_each_iteration():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    layers = LayerwiseGradientScaler(model, {"0": 2.0**4}, growth_interval=1)
    scaler, plain = LossScaler("cpu", 2.0**6, layers=layers), copy.deepcopy(model)
    for m, s in ((model, scaler), (plain, LossScaler(enabled=False))):
        torch.manual_seed(0)
        opt = torch.optim.SGD(m.parameters(), 0.1)
        for factor in (1.0, 1.0, INF, 1.0):
            x = torch.randn(5, 2)
            if m is model or factor == 1:
                opt.zero_grad()
                s.scale(m(x).pow(2).mean() * factor).backward()
                end(s, opt)
    assert_same([p.data for p in model.parameters()], [p.data for p in plain.parameters()])
    assert scaler.skipped == [2] and layers.layer_scales["0"] == 2.0**6  # up, up, down, up
    other = LossScaler(layers=LayerwiseGradientScaler(plain, {"0": 1.0}))
    other.load_state_dict(scaler.state_dict())
    assert other.layers.layer_scales == {"0": 2.0**6}


@given(settings, patterns, st.integers(0, 30), st.sampled_from([LossScaler, GradScaler]))
def test_saved_loaded_and_continued_is_uninterrupted(kwargs, overflows, cut, saver):
    cut, limits = min(cut, len(overflows)), dict(max_skips=1000)
    unbroken, first = (LossScaler("cpu", **kwargs, **limits) for _ in range(2))
    run(unbroken, overflows)
    run(first, overflows[:cut])
    state = first.state_dict()
    if saver is GradScaler:  # through torch's class and back
        other = GradScaler("cpu")
        other.load_state_dict(state)
        state = other.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    second = LossScaler("cpu", **limits)
    second.load_state_dict(torch.load(file, weights_only=True))
    run(second, overflows[cut:])
    assert first.scales + second.scales == unbroken.scales
    kept = theirs if saver is GradScaler else dict  # torch's class counts no skips in a row
    assert_same(kept(second.state_dict()), kept(unbroken.state_dict()))
    assert theirs(state).keys() == GradScaler("cpu").state_dict().keys()


@pytest.mark.parametrize("saved, bounded", [(2.0**20, 2.0**10), (1.0, 2.0**4)])
def test_a_loaded_scale_is_brought_within_the_bounds_for_the_next_iteration(saved, bounded):
    scaler, (w, opt) = LossScaler("cpu", 2.0**8, min_scale=2.0**4, max_scale=2.0**10), make()
    scaler.scale(w.sum()).backward()
    scaler.load_state_dict(GradScaler("cpu", saved).state_dict())
    assert scaler.scale(torch.ones(())) == float(scaler.used) == 2.0**8
    scaler.step(opt)
    assert w.tolist() == [-1.0, -1.0]
    scaler.update()
    assert scaler.get_scale() == scaler.scale(torch.ones(())) == bounded


def test_a_wrong_state_is_one_sentence_and_changes_nothing():
    scaler, good = LossScaler("cpu", 8.0), GradScaler("cpu").state_dict()
    before, lacks = scaler.state_dict(), "growth_factor, backoff_factor, growth_interval"
    for state, message in [
        ({}, f"lacks scale, {lacks}, _growth_tracker and has no keys, like .* disabled scaler"),
        ({"state": 1}, rf"lacks scale, {lacks}, _growth_tracker and has \['state'\]"),
        (good | dict(scale=NAN), "`scale` is nan"),
        (good | dict(growth_interval=0), "`growth_interval` is 0"),
    ]:
        for load in (scaler.check_state, scaler.load_state_dict):
            with pytest.raises(ValueError, match=message):
                load(state)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_in_the_middle_of_an_iteration(copied):
    scaler, (w, opt) = LossScaler("cpu", 8.0), make()
    iterate(scaler, w, opt)
    opt.zero_grad()
    scaler.scale(w.sum()).backward()
    other = copied(scaler)
    other.scale(w.sum()).backward()
    assert end(other, opt) and w.tolist() == [-3.0, -3.0]
    assert other.scales == [8.0, 8.0] and scaler.scales == [8.0]
