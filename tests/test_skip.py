"""A skipped step is no step: after an overflow every bit is what it was before the batch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.training import GradientAccumulation, GradientClip
from tiny import Do, bits, conv_net, make_learner, one_group, pictures, three_groups, weights
from torch import nn

from mixedfp.callback import MixedPrecision
from mixedfp.formats import MixedPrecisionError
from mixedfp.testing import assert_same

FLAT = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
OPT = pytest.mark.parametrize("opt", ["sgd", "adam", "ranger", "torch_adamw"])


def put(value, name="4.weight"):
    """Return what writes `value` into one number of one gradient."""

    def f(learn):
        dict(learn.model.named_parameters())[name].grad.view(-1)[-1:] = value

    return f


def overflow(learn):
    """Let the batch overflow in the forward pass: statistics and gradients become inf or nan."""
    learn.xb = (torch.full_like(learn.xb[0], float("inf")),)


class Watch(Callback):
    """Keep `bits` before the batch and after the step, at batch `at`; look, but touch nothing."""

    order = -100

    def __init__(self, at=2):
        self.at, self.before, self.after, self.seen = at, None, None, -1

    def before_fit(self):
        self.seen = -1

    def before_batch(self):
        if self.training:
            self.seen += 1
            if self.seen == self.at:
                self.before = bits(self.learn) | {"scale": self.learn.mp_cb.loss_scale}

    def after_batch(self):
        if self.training and self.seen == self.at:
            self.after = bits(self.learn) | {"scale": self.learn.mp_cb.loss_scale}

    def assert_skipped(self, factor=0.5):
        assert self.after.pop("scale") == self.before.pop("scale") * factor
        assert_same(self.after, self.before)


FAULTS = {
    "inf": Do("after_backward", put(float("inf")), at=2, order=0),
    "minus_inf": Do("after_backward", put(float("-inf")), at=2, order=20),
    "nan": Do("after_backward", put(float("nan"), "10.bias"), at=2, order=0),
    "forward": Do("before_batch", overflow, at=2, order=0),
    "loss": Do("after_loss", lambda learn: learn.loss_grad.mul_(float("inf")), at=2, order=0),
}
FAULTS = {k: (fault.event, fault.f, fault.order) for k, fault in FAULTS.items()}


def fault_cb(name, at=2):
    event, f, order = FAULTS[name]
    return Do(event, f, at=at, order=order)


@FLAT
@OPT
@pytest.mark.parametrize("fault", FAULTS)
def test_no_bit_changes(fault, opt, flat):
    learn = make_learner(opt, splitter=three_groups).to_fp16(flat_master=flat)
    watch = Watch()
    learn.fit(1, 0.01, wd=0.5, cbs=[watch, fault_cb(fault)])
    watch.assert_skipped()
    assert learn.mp_cb.skipped == [2] and learn.mp_cb.n_skipped == 1
    assert learn.mp_cb.scales == [512.0, 512.0, 512.0, 256.0]


@FLAT
def test_a_healthy_batch_changes_bits(flat):
    """The premise of the above: the same watch sees a step that was taken."""
    learn = make_learner().to_fp16(flat_master=flat)
    watch = Watch()
    learn.fit(1, 0.01, cbs=watch)
    for what in ("masters", "model", "opt"):
        with pytest.raises(AssertionError):
            assert_same(watch.after[what], watch.before[what])


def test_the_overflowed_forward_poisons_the_statistics():
    """Else there would be nothing to take back."""
    learn, seen = make_learner().to_fp16(), []

    def look(learn):
        seen.append(learn.model[1].running_mean.isfinite().all().item())

    learn.fit(1, cbs=[fault_cb("forward"), Do("after_loss", look)])
    assert seen == [True, True, False, True]


@FLAT
@OPT
@pytest.mark.parametrize("fault", FAULTS)
def test_training_goes_on_as_if_the_batch_had_not_been(fault, opt, flat):
    """Without the bad batch the run ends in the same bits; the scale is constant for that."""

    def run(at, fault_at):
        learn = make_learner(opt).to_fp16(flat_master=flat, dynamic=False)
        rows = list(learn.dls.train_ds)
        if fault_at is None:
            rows = rows[: 8 * at] + rows[8 * at + 8 :]
        learn.dls.train = learn.dls.train.new(dataset=rows)
        learn.fit(1, 0.01, cbs=[] if fault_at is None else fault_cb(fault, fault_at))
        assert learn.mp_cb.skipped == ([] if fault_at is None else [fault_at])
        return bits(learn)

    for at in (0, 2):
        assert_same(run(at, at), run(at, None))


@FLAT
def test_a_constant_scale_skips_too(flat):
    learn = make_learner().to_fp16(loss_scale=64.0, dynamic=False, flat_master=flat)
    watch = Watch()
    learn.fit(1, 0.01, cbs=[watch, fault_cb("forward")])
    watch.assert_skipped(factor=1)
    assert learn.mp_cb.scales == [64.0] * 4 and learn.mp_cb.skipped == [2]


def test_backoff_and_growth():
    learn = make_learner().to_fp16(512.0, growth_interval=2, growth_factor=4.0, backoff_factor=0.25)
    learn.fit(2, 0.001, cbs=fault_cb("inf"))
    assert learn.mp_cb.scales == [512.0, 512.0, 2048.0, 512.0, 512.0, 2048.0, 2048.0, 8192.0]


def test_the_scale_stays_within_its_bounds():
    learn = make_learner().to_fp16(4.0, min_scale=2.0, max_scale=8.0, growth_interval=1)
    learn.fit(1, 0.001, cbs=Do("after_backward", put(float("inf"))))
    assert learn.mp_cb.scales == [4.0, 2.0, 2.0, 2.0]
    learn.fit(1, 0.001)
    assert learn.mp_cb.scales[4:] == [2.0, 4.0, 8.0, 8.0]


@FLAT
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("micro", [0, 1, 2])
def test_overflow_in_one_of_the_accumulated_batches(micro, fault, flat):
    """Three batches make a step: wherever the overflow is, all three are taken back, once."""
    learn = make_learner("adam").to_fp16(flat_master=flat)
    learn.dls.train = learn.dls.train.new(dataset=list(zip(*pictures(72), strict=True)))
    before, after = Watch(at=3), Watch(at=5)
    learn.fit(1, 0.01, cbs=[before, after, fault_cb(fault, 3 + micro), GradientAccumulation(24)])
    before.after = after.after
    before.assert_skipped()
    assert learn.mp_cb.skipped == [1]
    assert len(learn.mp_cb.scales) == 3


@FLAT
def test_the_gradient_is_gone_after_a_skip(flat):
    learn = make_learner().to_fp16(flat_master=flat)
    seen = []

    def look(learn):
        seen.extend(p.grad.isfinite().all().item() for p in learn.model.parameters())

    learn.fit(1, 0.01, cbs=[fault_cb("forward"), Do("before_step", look, order=20)])
    assert len(seen) == 3 * 10 and all(seen)


def test_lookahead_does_not_count_a_skipped_step():
    learn = make_learner("ranger").to_fp16()
    counts = []

    def count(learn):
        counts.append(learn.opt.count)

    learn.fit(1, 0.01, cbs=[fault_cb("inf", at=1), Do("after_batch", count)])
    assert counts == [1, 1, 2, 3]


def test_lookahead_before_its_first_step():
    learn = make_learner("ranger").to_fp16()
    learn.fit(1, 0.01, cbs=[fault_cb("inf", at=0), Do("after_step", count_is(0), at=0)])


def count_is(n):
    def f(learn):
        assert learn.opt.count == n and (n or learn.opt.slow_weights is None)

    return f


def test_clipping_does_not_spread_a_nan():
    learn = make_learner().to_fp16()
    watch = Watch()
    learn.fit(1, 0.01, cbs=[watch, fault_cb("nan"), GradientClip(0.5)])
    watch.assert_skipped()


# Nothing is scaled


@FLAT
@pytest.mark.parametrize("fault", FAULTS)
def test_bfloat16_skips_as_well(fault, flat):
    learn = make_learner("adam", splitter=three_groups).to_bf16(flat_master=flat)
    watch = Watch()
    learn.fit(1, 0.01, wd=0.5, cbs=[watch, fault_cb(fault)])
    watch.assert_skipped(factor=1)
    assert learn.mp_cb.skipped == [2] and learn.mp_cb.n_skipped == 1
    assert np.isfinite(learn.recorder.losses).all()


@FLAT
@pytest.mark.parametrize("micro", [0, 1, 2])
def test_bfloat16_takes_back_all_of_the_accumulated_batches(micro, flat):
    learn = make_learner("adam").to_bf16(flat_master=flat)
    learn.dls.train = learn.dls.train.new(dataset=list(zip(*pictures(72), strict=True)))
    before, after = Watch(at=3), Watch(at=5)
    faults = fault_cb("forward", 3 + micro)
    learn.fit(1, 0.01, cbs=[before, after, faults, GradientAccumulation(24)])
    before.after = after.after
    before.assert_skipped(factor=1)
    assert learn.mp_cb.skipped == [1]


def test_bfloat16_ends_a_hopeless_run():
    learn = make_learner().to_bf16(max_skips=3)
    before = bits(learn)
    with pytest.raises(MixedPrecisionError, match="3 steps in a row were skipped.*4.weight"):
        learn.fit(2, 0.01, cbs=Do("after_backward", put(float("inf"))))
    assert_same(weights(learn), weights(make_learner()))
    assert_same(bits(learn)["masters"], before["masters"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_float32_is_not_checked_nor_bfloat16_that_is_switched_off(dtype):
    """A nan is a nan then, as in plain fastai."""
    learn = make_learner().to_fp16(dtype=dtype, skip_nonfinite=False)
    learn.fit(1, 0.01, cbs=fault_cb("nan"))
    assert learn.mp_cb.n_skipped == 0
    assert learn.model[10].bias.isnan().any()


# What else a forward pass writes


class OwnNorm(nn.Module):
    """A norm that is none of PyTorch's classes, and keeps its statistics in plain buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var, training=self.training, momentum=0.5)


class Counting(nn.Module):
    """Buffers that are written in place, replaced, and made by the first batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("sum", torch.zeros(3))

    def forward(self, x):
        if self.training:
            self.count += 1
            self.last = x.detach().mean((0, 2, 3))
            self.sum.add_(self.last)
        return x


@pytest.mark.parametrize("fault", ["inf", "forward"])
@pytest.mark.parametrize(
    "module", [OwnNorm, Counting, lambda: nn.InstanceNorm2d(3, track_running_stats=True)]
)
def test_all_buffers_are_taken_back(module, fault):
    model = nn.Sequential(module(), *conv_net())
    learn = make_learner(model=model, splitter=one_group).to_fp16()
    watch = Watch()
    event, f, order = FAULTS[fault]
    if fault == "inf":
        f = put(float("inf"), "1.weight")
    learn.fit(1, 0.01, cbs=[watch, Do(event, f, at=2, order=order)])
    watch.assert_skipped()


def test_a_cancelled_batch_is_not_taken_back():
    """Only the batch that overflowed is: the statistics of a batch that was called off stay."""

    def cancel(_):
        raise CancelBatchException

    learn = make_learner().to_fp16()
    watch = Watch()
    learn.fit(1, 0.01, cbs=[watch, Do("after_loss", cancel, at=1), fault_cb("forward")])
    watch.assert_skipped()


def test_what_was_loaded_after_an_exception_is_not_taken_back(tmp_path):
    """A batch that an exception ended is over: a later skip goes back to its own start."""

    def fail(_):
        raise ZeroDivisionError

    learn = make_learner(path=tmp_path).to_fp16()
    learn.save("start")
    with pytest.raises(ZeroDivisionError):
        learn.fit(1, 0.01, cbs=Do("after_loss", fail, at=2))
    learn.load("start")
    watch = Watch(at=0)
    learn.fit(1, 0.01, cbs=[watch, fault_cb("forward", at=0)])
    watch.assert_skipped()


# The end of a hopeless run


@FLAT
@OPT
def test_too_many_skips_end_in_an_error_that_names_the_parameters(opt, flat):
    learn = make_learner(opt).to_fp16(flat_master=flat, max_skips=3)
    good = Watch(at=1)
    bad = Do("after_backward", _poison_late, order=0)
    with pytest.raises(MixedPrecisionError, match=r"3 steps in a row.*`?4\.weight") as e:
        learn.fit(2, 0.01, cbs=[good, bad])
    message = str(e.value)
    assert "10.bias" in message and "0.weight" not in message
    assert "to_bf16" in message or "bfloat16" in message
    now = bits(learn)
    assert_same(now, {k: good.after[k] for k in now})  # of the last good step
    assert learn.mp_cb.skipped == [2, 3, 4]
    learn.fit(1, 0.01)
    assert learn.mp_cb.n_skipped == 3
    after = bits(learn)
    with pytest.raises(AssertionError):
        assert_same(after["masters"], now["masters"])


def _poison_late(learn):
    if learn.mp_cb.mixed.scaler.record.n_steps >= 2:
        put(float("inf"), "4.weight")(learn)
        put(float("nan"), "10.bias")(learn)


def test_many_culprits_are_counted():
    learn = make_learner().to_fp16(max_skips=2)

    def poison(learn):
        for p in learn.model.parameters():
            p.grad.fill_(float("nan"))

    with pytest.raises(MixedPrecisionError, match=r"gradients of 0\.weight, .*, .* and 7 more"):
        learn.fit(1, cbs=Do("after_backward", poison, order=0))


def test_skips_that_are_not_in_a_row_are_forgiven():
    learn = make_learner().to_fp16(max_skips=2)
    learn.fit(3, 0.01, cbs=Do("after_backward", _every_other, order=0))
    assert learn.mp_cb.skipped == [0, 2, 4, 6, 8, 10]


def _every_other(learn):
    if learn.mp_cb.mixed.scaler.record.n_steps % 2 == 0:
        put(float("inf"))(learn)


def test_max_skips_holds_for_a_constant_scale():
    learn = make_learner().to_fp16(dynamic=False, max_skips=2)
    with pytest.raises(MixedPrecisionError, match="2 steps in a row"):
        learn.fit(1, cbs=Do("after_backward", put(float("inf")), order=0))


def test_a_hopeless_fit_of_its_own_callback_leaves_32_bits():
    """With `cbs=` the error comes out of the fit, and the model is back in 32 bits, unharmed."""
    learn = make_learner()
    learn.model.to(learn.dls.device)
    before = weights(learn)
    bad = Do("before_batch", overflow, order=0)
    with pytest.raises(MixedPrecisionError):
        learn.fit(1, 0.01, cbs=[MixedPrecision(max_skips=3), bad])
    assert_same(weights(learn), before)
    assert {p.dtype for p in learn.model.parameters()} == {torch.float32}
    learn.fit(1, 0.01)
