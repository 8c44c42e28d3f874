"""Property tests of `mixedfp.scaler`; oracles: `torch.amp.GradScaler`, a few lines of Python."""

import io
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inside import ScaleRecord, check_positive, is_finite, nonfinite_names
from torch import nn
from torch.amp import GradScaler

from mixedfp.formats import MixedPrecisionError
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

patterns = st.lists(st.booleans(), max_size=60)  # of overflows
exponents = st.integers(-10, 10)


def run(scaler, overflows, w=None):
    """Run an iteration for each of `overflows`; return the weight and its optimizer."""
    w = nn.Parameter(torch.zeros(2)) if w is None else w
    opt = torch.optim.SGD([w], lr=1.0)
    for overflow in overflows:
        scaler.scale(torch.zeros(()))
        w.grad = torch.tensor([1.0, 2.0]) * scaler.get_scale()
        if overflow:
            w.grad[1] = math.inf
        scaler.step(opt)
        scaler.update()
    return w


settings = st.fixed_dictionaries(
    dict(
        init_scale=st.sampled_from([1.0, 3.0, 2.0**12, 2.0**24]),
        growth_factor=st.sampled_from([2.0, 1.5, 16.0]),
        backoff_factor=st.sampled_from([0.5, 0.75, 2.0**-4]),
        growth_interval=st.integers(1, 6),
    )
)


@given(settings, patterns)
def test_path_is_the_clamped_rule(kwargs, overflows):
    scaler, kept = LossScaler("cpu", max_skips=1000, **kwargs), []
    scale, clean = torch.tensor(kwargs["init_scale"]), 0
    for overflow in overflows:
        kept.append(scale.item())
        if overflow:
            scale, clean = scale * kwargs["backoff_factor"], 0
        elif (clean := clean + 1) == kwargs["growth_interval"]:
            scale, clean = scale * kwargs["growth_factor"], 0
        scale = scale.clamp(1.0, 2.0**24)
    w = run(scaler, overflows)
    assert scaler.scales == kept
    assert scaler.get_scale() == scaler.record.scale == scale.item()
    assert scaler.skipped == [i for i, overflow in enumerate(overflows) if overflow]
    assert scaler.n_skipped == sum(overflows)
    n = len(overflows) - sum(overflows)
    torch.testing.assert_close(w.data, -n * torch.tensor([1.0, 2.0]), rtol=1e-6, atol=0)


@given(settings, patterns)
def test_without_bounds_it_is_torch(kwargs, overflows):
    bounds = dict(min_scale=2.0**-126, max_scale=2.0**127, max_skips=1000)
    ours, theirs = LossScaler("cpu", **kwargs, **bounds), GradScaler("cpu", **kwargs)
    for i, overflow in enumerate(overflows):
        w, v = run(ours, [overflow]), run(theirs, [overflow])
        if not 2.0**-120 < theirs.get_scale() < 2.0**120:
            return
        state = GradScaler.state_dict(ours)
        assert_same([w.data, state], [v.data, theirs.state_dict()], name=f"step {i}")


@given(patterns, exponents, st.integers(1, 5))
def test_constant_scale_never_moves_and_still_skips(overflows, exponent, interval):
    scale = 2.0**exponent
    scaler = LossScaler("cpu", scale, dynamic=False, growth_interval=interval, max_skips=1000)
    w = run(scaler, overflows)
    assert scaler.scales == [scale] * len(overflows) and scaler.get_scale() == scale
    assert scaler.n_skipped == sum(overflows)
    assert_same(w.data, torch.tensor([1.0, 2.0]) * (sum(overflows) - len(overflows)) + 0.0)


@given(settings, patterns, st.integers(0, 60), st.sampled_from([LossScaler, GradScaler]))
def test_saved_loaded_and_continued_is_uninterrupted(kwargs, overflows, cut, saver):
    cut = min(cut, len(overflows))
    limits = dict(max_skips=1000)
    unbroken = LossScaler("cpu", **kwargs, **limits)
    run(unbroken, overflows)
    first = LossScaler("cpu", **kwargs, **limits)
    run(first, overflows[:cut])
    state = first.state_dict()
    if saver is GradScaler:  # through torch's class and back
        theirs = GradScaler("cpu")
        theirs.load_state_dict(state)
        state = theirs.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    second = LossScaler("cpu", **limits)
    second.load_state_dict(torch.load(file, weights_only=True))
    run(second, overflows[cut:])
    assert first.scales + second.scales == unbroken.scales
    kept = GradScaler if saver is GradScaler else LossScaler  # torch's knows no skips in a row
    assert_same(kept.state_dict(second), kept.state_dict(unbroken))


@given(patterns, st.integers(1, 5))
def test_ends_exactly_after_so_many_skips_in_a_row(overflows, max_skips):
    scaler, w, in_a_row = LossScaler("cpu", max_skips=max_skips), nn.Parameter(torch.zeros(2)), 0
    for overflow in overflows:
        in_a_row = in_a_row + 1 if overflow else 0
        if in_a_row == max_skips:
            with pytest.raises(MixedPrecisionError, match=r"parameter 0 of group 0, shape \(2,\)"):
                run(scaler, [overflow], w)
            in_a_row = 0
        else:
            run(scaler, [overflow], w)
    assert scaler.record.n_steps == len(overflows)
    assert w.isfinite().all()


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([1.0, 2.0, 4.0])), max_size=50))
def test_record_is_the_plain_list(events):
    record, scales, skipped = ScaleRecord(1.0), [], []
    for is_skipped, scale in events:
        scales.append(record.scale)
        skipped += [len(scales) - 1] * is_skipped
        record.add_step(is_skipped)
        record.add_scale(scale)
    assert record.scales == scales and record.skipped == skipped and record.n_steps == len(events)
    assert len(record.changes) <= 1 + len(events)


grads = st.sampled_from([1.0, math.inf, math.nan, None])


@given(st.lists(st.lists(grads, min_size=1, max_size=3), max_size=3))
def test_names_are_those_of_the_nonfinite(groups):
    params = [[nn.Parameter(torch.zeros(1)) for _ in group] for group in groups]
    named = [[(f"g{i}.p{j}", p) for j, p in enumerate(ps)] for i, ps in enumerate(params)]
    bad = []
    for i, (ps, values) in enumerate(zip(params, groups, strict=True)):
        for j, (p, value) in enumerate(zip(ps, values, strict=True)):
            p.grad = None if value is None else torch.tensor([value])
            bad += [f"g{i}.p{j}"] * (value is not None and not math.isfinite(value))
    if not groups:
        return
    opt = torch.optim.SGD([{"params": group} for group in named], lr=0.1)
    assert nonfinite_names(opt) == bad
    plain = torch.optim.SGD([{"params": ps} for ps in params], lr=0.1)
    assert len(nonfinite_names(plain)) == len(bad)


@given(st.lists(st.floats(width=16), max_size=5))
def test_finite_is_what_python_says(values):
    g = torch.tensor(values)
    assert is_finite(g) is is_finite(g.half()) is all(map(math.isfinite, values))


@given(st.floats() | st.integers(-(2**60), 2**60))
def test_positive_numbers_pass_and_no_others(value):
    if 0 < torch.tensor(float(value), dtype=torch.float32) < math.inf:  # what a scale is kept in
        assert check_positive("x", value) == float(value)
    else:
        with pytest.raises(ValueError, match="`x` is .*: expected a finite number above 0"):
            check_positive("x", value)


@pytest.mark.parametrize("value", ["512", True, False, None, 1j, [2.0], torch.tensor(2.0)])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match="expected a number above 0"):
        LossScaler("cpu", init_scale=value)


@pytest.mark.parametrize("n_optimizers", [1, 2, 3])
def test_one_update_serves_all_optimizers(n_optimizers):
    ws = [nn.Parameter(torch.zeros(2)) for _ in range(n_optimizers)]
    opts = [torch.optim.SGD([w], lr=1.0) for w in ws]
    scaler = LossScaler("cpu", 2.0**10, growth_interval=4)
    for i in range(8):
        scaler.scale(torch.zeros(()))
        for k, (w, opt) in enumerate(zip(ws, opts, strict=True)):
            w.grad = torch.full((2,), math.inf if i == k else scaler.get_scale())
            scaler.step(opt)
        scaler.update()
    assert scaler.skipped == list(range(n_optimizers))
    for w in ws:  # each missed its own step only
        assert_same(w.data, torch.full((2,), -7.0))


@pytest.mark.parametrize("dynamic", [True, False])
def test_scale_is_read_from_the_device_only_when_it_may_have_changed(dynamic, monkeypatch):
    scaler, reads = LossScaler("cpu", 1.0, growth_interval=10, dynamic=dynamic), []
    read = LossScaler.get_scale
    monkeypatch.setattr(LossScaler, "get_scale", lambda self: reads.append(1) or read(self))
    w = nn.Parameter(torch.zeros(1))
    opt = torch.optim.SGD([w], lr=1.0)
    for _ in range(100):
        scaler.scale(torch.zeros(()))
        w.grad = torch.ones(1)
        scaler.step(opt)
        scaler.update()
    assert scaler.record.scale == (2.0**10 if dynamic else 1.0)
    assert len(reads) <= 10
