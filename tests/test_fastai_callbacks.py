"""Every callback that fastai ships and that touches training, in each precision, flat and not.

Each is used as its documentation says (`USES`). Three laws hold for all of them; what a callback
is there for comes after. The marks `checks` become the table in the documentation.
"""

import importlib
import pkgutil
import random
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache, partial
from io import StringIO
from itertools import permutations
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import NamedTuple

import fastai
import numpy as np
import pandas as pd
import pytest
import torch
from fastai.basics import Callback, Datasets, TensorImage
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.core import FetchPredsCallback
from fastai.callback.data import CollectDataCallback
from fastai.callback.hook import ActivationStats, HookCallback, hook_outputs
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.preds import MCDropoutCallback
from fastai.callback.progress import CSVLogger, ProgressCallback, ShowGraphCallback
from fastai.callback.rnn import ModelResetter, RNNCallback, RNNRegularizer
from fastai.callback.schedule import ParamScheduler, SchedCos, SchedLin
from fastai.callback.tracker import (
    EarlyStoppingCallback,
    ReduceLROnPlateau,
    SaveModelCallback,
    TerminateOnNaNCallback,
    TrackerCallback,
)
from fastai.callback.training import (
    BnFreeze,
    GradientAccumulation,
    GradientClip,
    ShortEpochCallback,
)
from fastai.losses import (
    LabelSmoothingCrossEntropy,
    LabelSmoothingCrossEntropyFlat,
    MSELossFlat,
)
from fastai.metrics import accuracy
from fastai.test_utils import VerboseCallback
from tiny import (
    Do,
    dropout_net,
    make_dls,
    make_learner,
    picture_dls,
    pictures,
    plain,
    snapshot,
    three_groups,
    weights,
)
from torch import nn
from torch.nn import functional as F

from mixedfp.callback import MixedPrecision
from mixedfp.testing import assert_same

# Precisions


class Precision(NamedTuple):
    """What the model is in, and how its masters lie; its name stands in the table."""

    name: str
    dtype: torch.dtype | None = None  # None: plain fastai
    flat: bool = False

    def __str__(self):
        return self.name


PLAIN = Precision("plain fastai")
FLOAT = [Precision("fp32", torch.float32), Precision("fp32 flat", torch.float32, True)]
FP16 = [Precision("fp16", torch.float16), Precision("fp16 flat", torch.float16, True)]
BF16 = [Precision("bf16", torch.bfloat16), Precision("bf16 flat", torch.bfloat16, True)]

in_float32 = pytest.mark.parametrize("precision", FLOAT, ids=str)
in_fp16 = pytest.mark.parametrize("precision", FP16, ids=str)
in_16_bits = pytest.mark.parametrize("precision", FP16 + BF16, ids=str)
checks = pytest.mark.checks  # whose test it is, what it holds


def tolerance(precision, fp16, bf16):
    """Return how far rounding may lead: bfloat16 has 3 bits fewer than float16."""
    return fp16 if precision.dtype == torch.float16 else bf16


def mixed(learn, precision, **kwargs):
    """Put `learn` into `precision`."""
    if precision.dtype is not None:
        learn.to_fp16(dtype=precision.dtype, flat_master=precision.flat, **kwargs)
    return learn


def seed():
    """Start all random numbers anew."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


# What a callback of ours notes while another is at work


def noting(event, f, order=60, training=True):
    """Return a list, and a callback that appends `plain(f(learn))` to it at `event`."""
    seen = []
    return seen, Do(event, lambda learn: seen.append(plain(f(learn))), None, order, training)


def grads(learn):
    """Return the gradients on the model's parameters."""
    return [p.grad for p in learn.model.parameters()]


def norm(tensors):
    """Return the norm of all `tensors` together."""
    return torch.cat([t.flatten() for t in tensors]).norm()


def lr(learn):
    """Return the learning rate of the head."""
    return learn.opt.hypers[-1]["lr"]


# How each is used: a function that trains the learner it gets, and returns what is to be seen


def gradient_clip(learn):
    seen, note = noting("before_step", lambda learn: norm(grads(learn)), order=12)
    learn.fit(2, 0.1, wd=0.5, cbs=[GradientClip(0.0625), note])
    return seen


def gradient_accumulation(learn):
    seen, note = noting("before_step", grads, order=12)
    learn.fit(2, 0.1, wd=0.5, cbs=[GradientAccumulation(16), note])
    return seen


def mixing(cb, learn):
    seen, note = noting("after_loss", lambda learn: (learn.xb[0], *learn.yb, learn.loss))
    learn.fit(2, 0.05, cbs=[cb(), note])
    return seen


def smoothing(learn):
    seen, note = noting("after_loss", lambda learn: (learn.pred, *learn.yb, learn.loss))
    learn.fit(2, 0.1, cbs=note)
    return seen


def stopping_early(learn):
    learn.fit(8, 0.05, cbs=EarlyStoppingCallback(min_delta=0.15))
    return len(learn.recorder.values)


def reducing_the_rate(learn):
    learn.fit(6, 0.05, cbs=ReduceLROnPlateau(min_delta=0.15, factor=4.0))
    return learn.recorder.lrs


def saving_the_best(learn):
    seen, note = noting("after_epoch", weights, training=False)
    learn.fit(3, 0.1, cbs=[SaveModelCallback(monitor="accuracy", fname="best"), note])
    best = int(np.argmax([v[-1] for v in learn.recorder.values]))
    file = torch.load(learn.path / "models" / "best.pth", weights_only=True)
    return {"file": plain(dict(file)), "best": seen[best], "at the end": weights(learn)}


def tracking(learn):
    tracker = TrackerCallback()
    learn.fit(3, 0.1, cbs=tracker)
    return {"best": tracker.best, "losses": [v[1] for v in learn.recorder.values]}


def terminating(learn):
    learn.fit(2, 0.1, cbs=TerminateOnNaNCallback())
    return learn.train_iter


def recording(learn):
    learn.fit(2, 0.1)
    return {
        "smooth": torch.stack(list(learn.recorder.losses)),
        "values": torch.tensor(plain(learn.recorder.values)),
    }


def logging(learn):
    learn.fit(2, 0.1, cbs=CSVLogger())
    log = pd.read_csv(learn.path / "history.csv").drop(columns="time")
    return {"csv": torch.tensor(log.values), "values": torch.tensor(plain(learn.recorder.values))}


def showing_progress(learn):
    seen, note = noting("after_batch", lambda learn: learn.progress.pbar.comment, order=61)
    smooth, note_smooth = noting("after_batch", lambda learn: learn.smooth_loss)
    with redirect_stdout(StringIO()):
        learn.fit(2, 0.1, cbs=[ProgressCallback(), note, note_smooth])
    return {"shown": seen, "smooth": smooth}


def showing_a_graph(learn):
    drawn = []

    def catch(learn):
        learn.progress.mbar.update_graph = lambda *args: drawn.append(plain(args[0]))

    with redirect_stdout(StringIO()):
        cbs = [ProgressCallback(), ShowGraphCallback(), Do("before_train", catch)]
        learn.fit(2, 0.1, cbs=cbs)
    values = [v[1] for v in learn.recorder.values]
    return {"drawn": drawn, "train": plain(learn.recorder.losses), "valid": values}


def channels_last(learn):
    formats, note = noting("after_batch", _memory_formats)
    learn.fit(2, 0.1, cbs=[ChannelsLast(), note])
    return formats


def _memory_formats(learn):
    return [
        p.is_contiguous(memory_format=torch.channels_last)
        for p in learn.model.parameters()
        if p.ndim == 4
    ]


def freezing_norms(learn):
    learn.train_bn = False
    learn.create_opt()
    learn.freeze_to(1)
    before = plain(dict(learn.model[1].named_buffers()))
    learn.fit(2, 0.1, cbs=BnFreeze())
    return {"before": before, "after": plain(dict(learn.model[1].named_buffers()))}


def cutting_epochs_short(learn):
    training, note_training = noting("after_batch", lambda learn: learn.iter)
    all_batches, note_all = noting("after_batch", lambda learn: learn.iter, training=False)
    learn.fit(2, 0.1, cbs=[ShortEpochCallback(0.5), note_training, note_all])
    return {"training": training, "validation": len(all_batches) - len(training)}


def skipping_epochs(learn):
    learn.fit_one_cycle(3, 0.1, start_epoch=1)
    return [float(v) for v in learn.recorder.lrs]


def activation_stats(learn):
    stats = ActivationStats(with_hist=True, modules=[learn.model[0], learn.model[-1]])
    learn.fit(1, 0.1, cbs=stats)
    keys = ("mean", "std", "near_zero")
    numbers = [[layer[k] for k in keys] for batch in stats.stats for layer in batch]
    return {"numbers": torch.tensor(numbers), "hist": stats.hist(0)}


def hooking(learn):
    seen = []
    hook = HookCallback(
        modules=[learn.model[0], learn.model[-1]], hook=lambda m, i, o: seen.append(plain((i, o)))
    )
    learn.fit(1, 0.1, cbs=hook)
    return seen


def keeping_outputs(learn):
    seen = []
    with hook_outputs([learn.model[0], learn.model[-1]]) as hooks:
        learn.fit(1, 0.1, cbs=Do("after_pred", lambda learn: seen.append(plain(hooks.stored))))
    return seen


def regularizing(learn, alpha=2.0, beta=1.0):
    hidden, note_hidden = noting("before_train", lambda learn: learn.model.hidden)
    outs, note_outs = noting("after_pred", lambda learn: learn.rnn.out)
    added, note_added = noting("after_loss", lambda learn: learn.loss_grad - learn.loss, order=2)
    cbs = [ModelResetter(), RNNCallback(), RNNRegularizer(alpha, beta)]
    learn.fit(2, 0.1, cbs=[*cbs, note_hidden, note_outs, note_added])
    return {"hidden": hidden, "out": outs, "added": added, "at the end": plain(learn.model.hidden)}


def scheduling(learn):
    used, note = noting("before_step", lambda learn: (lr(learn), learn.opt.hypers[-1]["mom"]))
    cbs = ParamScheduler({"lr": SchedCos(0.1, 0.01), "mom": SchedLin(0.9, 0.5)})
    learn.fit(2, 0.3, cbs=[cbs, note])
    return {"used": used, "recorded": plain(learn.recorder.hps)}


def finding_a_rate(learn):
    before = weights(learn)
    learn.lr_find(num_it=6, show_plot=False, suggest_funcs=None, stop_div=False)
    found = {"before": before, "after": weights(learn), "lrs": plain(learn.recorder.lrs)}
    learn.fit(1, 0.1)
    return found


def choosing_items(learn):
    seen, note = noting("after_batch", lambda learn: learn.yb[0])
    learn.fit(2, 0.1, cbs=note)
    return seen


def collecting(learn):
    collect = CollectDataCallback()
    learn.fit(1, 0.1, cbs=collect)
    return plain(collect.data)


def dropping_out(learn):
    learn.fit(1, 0.1)
    return [learn.get_preds(cbs=MCDropoutCallback())[0] for _ in range(2)]


def gathering(learn):
    learn.fit(1, 0.1)
    inputs, preds, targets, losses = learn.get_preds(with_input=True, with_loss=True)
    return {"inputs": inputs, "preds": preds, "targets": targets, "losses": losses}


def fetching(learn):
    fetch = FetchPredsCallback()
    learn.fit(2, 0.1, cbs=fetch)
    return {"fetched": plain(fetch.preds[0]), "asked": plain(learn.get_preds()[0])}


def telling_events(learn):
    told = StringIO()
    with redirect_stdout(told):
        learn.fit(1, 0.1, cbs=VerboseCallback())
    return told.getvalue().split()


def casting(learn):
    wrap = Do("before_batch", _wrap, order=-5)
    seen, note = noting("after_pred", lambda learn: [type(x).__name__ for x in learn.xb])
    learn.fit(1, 0.1, cbs=[wrap, note])
    return seen


def _wrap(learn):
    learn.xb = tuple(TensorImage(x) for x in learn.xb)


def counting(learn):
    seen, note = noting("after_batch", _progress, order=-5, training=False)
    learn.fit(2, 0.1, cbs=note)
    return seen


def _progress(learn):
    return [learn.train_iter, learn.pct_train, learn.training, learn.model.training]


# Learners that some of them need


class Rnn(nn.Module):
    """A small language model that returns its outputs as fastai's AWD_LSTM and decoder do."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(12, 8), nn.LSTM(8, 8, batch_first=True)
        self.decode = nn.Linear(8, 12)
        self.reset()

    def forward(self, x):
        raw, hidden = self.rnn(self.embed(x), self.hidden)
        self.hidden = tuple(h.detach() for h in hidden)
        return self.decode(raw), raw, raw

    def reset(self):
        self.hidden = tuple(self.decode.weight.new_zeros(1, 8, 8) for _ in range(2))


def text_learner(**kwargs):
    """Return a learner that tells the next token."""
    tokens = torch.randint(12, (40, 7), generator=torch.Generator().manual_seed(0))
    return make_learner(model=Rnn, dls=make_dls(tokens[:, :-1], tokens[:, 1:]), **kwargs)


def one_hot_learner(**kwargs):
    """Return a learner whose targets are floats."""
    x, y = pictures(40)
    dls = make_dls(x, F.one_hot(y, 2).float())
    return make_learner(dls=dls, loss_func=MSELossFlat(), **kwargs)


def picked_learner(pick, **kwargs):
    """Return a learner whose `DataLoaders` `pick` makes of fastai's `Datasets`."""
    x, y = pictures(40)
    dsets = Datasets(
        range(40), [[lambda i: x[i]], [lambda i: y[i]]], splits=(range(32), range(32, 40))
    )
    return make_learner(dls=pick(dsets, bs=8, num_workers=0, device="cpu"), **kwargs)


def only_odd_items(dsets, **kwargs):
    """Give the items of class 0 no weight."""
    return dsets.weighted_dataloaders([float(i % 2) for i in range(32)], **kwargs)


def half_the_items(dsets, **kwargs):
    """Take 16 of the items for each epoch."""
    return dsets.partial_dataloaders(16, **kwargs)


class Use(NamedTuple):
    """A callback at work; as a string it is a test's id, and what the table calls it."""

    callback: str
    train: Callable
    make: Callable = make_learner

    def __str__(self):
        return self.callback


smooth = partial(make_learner, loss_func=LabelSmoothingCrossEntropy(eps=0.25))
smooth_flat = partial(make_learner, loss_func=LabelSmoothingCrossEntropyFlat(eps=0.25))
grouped = partial(make_learner, splitter=three_groups)
scored = partial(make_learner, metrics=accuracy)
far_from_kinks = partial(make_learner, seed=4)  # no sum so near 0 that rounding turns a ReLU over
USES = [
    Use("GradientClip", gradient_clip, grouped),
    Use("GradientAccumulation", gradient_accumulation, grouped),
    Use("MixUp", partial(mixing, MixUp)),
    Use("MixUp, float targets", partial(mixing, MixUp), one_hot_learner),
    Use("CutMix", partial(mixing, CutMix)),
    Use("CutMix, float targets", partial(mixing, CutMix), one_hot_learner),
    Use("LabelSmoothingCrossEntropy", smoothing, smooth),
    Use("LabelSmoothingCrossEntropyFlat", smoothing, smooth_flat),
    Use("EarlyStoppingCallback", stopping_early, far_from_kinks),
    Use("ReduceLROnPlateau", reducing_the_rate, far_from_kinks),
    Use("SaveModelCallback", saving_the_best, scored),
    Use("TrackerCallback", tracking),
    Use("TerminateOnNaNCallback", terminating),
    Use("Recorder", recording),
    Use("CSVLogger", logging),
    Use("ProgressCallback", showing_progress),
    Use("ShowGraphCallback", showing_a_graph),
    Use("ChannelsLast", channels_last),
    Use("BnFreeze", freezing_norms, grouped),
    Use("ShortEpochCallback", cutting_epochs_short),
    Use("SkipToEpoch", skipping_epochs),
    Use("ActivationStats", activation_stats),
    Use("HookCallback", hooking),
    Use("hook_outputs", keeping_outputs),
    Use("ModelResetter", regularizing, text_learner),
    Use("RNNCallback", regularizing, text_learner),
    Use("RNNRegularizer", regularizing, text_learner),
    Use("ParamScheduler", scheduling),
    Use("LRFinder", finding_a_rate),
    Use("WeightedDL", choosing_items, partial(picked_learner, only_odd_items)),
    Use("PartialDL", choosing_items, partial(picked_learner, half_the_items)),
    Use("CollectDataCallback", collecting),
    Use("MCDropoutCallback", dropping_out, partial(make_learner, model=dropout_net)),
    Use("GatherPredsCallback", gathering),
    Use("FetchPredsCallback", fetching),
    Use("VerboseCallback", telling_events),
    Use("CastToTensor", casting),
    Use("TrainEvalCallback", counting),
]
BY_NAME = {use.callback: use for use in USES}


@cache
def run(train, make, precision):
    """Train a new learner; return what was there before, at the end, and what was seen."""
    with TemporaryDirectory() as path, redirect_stdout(StringIO()):
        seed()
        learn = make(path=path)
        before = weights(learn)
        mixed(learn, precision)
        seed()
        seen = train(learn)
        learn.to_fp32()
        return SimpleNamespace(before=before, end=snapshot(learn), seen=seen)


def use(callback, precision):
    """Return the `run` of a callback in `precision`."""
    return run(*BY_NAME[callback][1:], precision)


def seen(callback, precision):
    """Return what was to be seen of `callback` in `precision`."""
    return use(callback, precision).seen


# The laws for all


every_callback = pytest.mark.parametrize("callback", BY_NAME)


@checks("{callback}", "the fit and all that the callback shows is plain fastai's, bit for bit")
@in_float32
@every_callback
def test_float32_is_plain_fastai(callback, precision):
    ours, theirs = use(callback, precision), use(callback, PLAIN)
    assert_same(ours.end, theirs.end)
    assert_same(ours.seen, theirs.seen)


@checks("{callback}", "flat masters end in the same bits as one master a parameter")
@pytest.mark.parametrize("precision", [FP16[1], BF16[1]], ids=str)
@every_callback
def test_flat_is_each(callback, precision):
    flat, each = use(callback, precision), use(callback, precision._replace(flat=False))
    assert_same(flat.end, each.end)
    assert_same(flat.seen, each.seen)


def distance(a, b):
    """Return the norm of the difference of two models' weights."""
    return norm([(a[k] - b[k]).float() for k in a if a[k].is_floating_point()]).item()


@checks("{callback}", "the weights end near those of the 32-bit fit")
@in_16_bits
@every_callback
def test_sixteen_bits_end_near_32(callback, precision):
    ours, theirs = use(callback, precision), use(callback, PLAIN)
    way = distance(theirs.end["weights"], theirs.before)
    assert distance(ours.end["weights"], theirs.end["weights"]) < way * tolerance(
        precision, 0.01, 0.1
    )


# What each is there for


def seen_near(callback, precision, pick, fp16, bf16):
    """Hold a part of what was seen against that of plain fastai."""
    bound = tolerance(precision, fp16, bf16)
    ours, theirs = pick(seen(callback, precision)), pick(seen(callback, PLAIN))
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


@checks("GradientClip", "the norm of the gradients that the optimizer sees is the one asked for")
@in_16_bits
def test_the_clipped_norm_is_the_one_asked_for(precision):
    norms = torch.stack(seen("GradientClip", precision))
    torch.testing.assert_close(norms, torch.full((8,), 0.0625), rtol=1e-4, atol=0)


def norm_net():
    """Return a net in which the pictures of a batch do not know each other."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 2)
    )


def gradient(precision, bs, *cbs):
    """Return the gradients of the first step on 64 pictures, and the sums on the way to them."""
    learn = mixed(make_learner(model=norm_net, dls=picture_dls(64, bs=bs)), precision)
    found, note = noting("before_step", grads, order=12)
    sums, note_sums = noting("after_backward", grads, order=12)
    learn.fit(1, 0.0, cbs=[note, note_sums, *cbs])
    return found[0], sums


def exact_gradient(dtype):
    """Return the same in 64 bits, from weights and pictures rounded to `dtype`."""
    net = make_learner(model=norm_net).model.to(dtype).double()
    x, y = (t[:64] for t in pictures(72))
    F.cross_entropy(net(x.to(dtype).double()), y).backward()
    return [p.grad for p in net.parameters()]


def error(found, exact):
    """Return how far `found` is from `exact`, relative to its norm."""
    return (norm([f - e for f, e in zip(found, exact, strict=True)]) / norm(exact)).item()


@checks("GradientAccumulation", "what 64 batches of one add up to is the gradient of a batch of 64")
@pytest.mark.parametrize("precision", FLOAT + FP16 + BF16, ids=str)
def test_the_accumulated_gradient_is_that_of_the_whole_batch(precision):
    """As exact as the whole batch's: it is added up in 32 bits. In 16 bits it would not be."""
    exact = exact_gradient(precision.dtype)
    one, _ = gradient(precision, 64)
    accumulated, sums = gradient(precision, 1, GradientAccumulation(64))
    assert len(sums) == 64
    assert all(g.dtype == torch.float32 for g in accumulated)
    if precision.dtype == torch.float32:
        assert error(accumulated, exact) < 1e-6
    else:
        assert error(accumulated, exact) < 1.5 * error(one, exact)
        assert error(added_up(sums, precision.dtype), sums[-1]) > 2 * error(one, exact)


def added_up(sums, dtype):
    """Return what the batches would have come to in `dtype`."""
    total = before = [torch.zeros_like(g, dtype=dtype) for g in sums[0]]
    for after in sums:
        total = [t + (a - b).to(dtype) for t, a, b in zip(total, after, before, strict=True)]
        before = after
    return total


@checks("GradientClip", "in any order with GradientAccumulation and ours: the same bits")
@checks("GradientAccumulation", "in any order with GradientClip and ours: the same bits")
@in_16_bits
def test_the_order_in_which_they_are_given_is_no_matter(precision):
    ends = []
    for order in permutations(range(3)):
        ours = MixedPrecision(dtype=precision.dtype, flat_master=precision.flat)
        cbs = [GradientClip(0.0625), GradientAccumulation(16), ours]
        learn = make_learner()
        learn.fit(1, 0.1, cbs=[cbs[i] for i in order])
        ends.append(snapshot(learn))
    for end in ends[1:]:
        assert_same(end, ends[0])


MIXES = ["MixUp", "MixUp, float targets", "CutMix", "CutMix, float targets"]


@checks("{callback}", "inputs, targets and losses stay in 32 bits: the model casts its inputs")
@in_16_bits
@pytest.mark.parametrize("callback", MIXES)
def test_pictures_are_mixed_in_32_bits(callback, precision):
    ours, theirs = seen(callback, precision), seen(callback, PLAIN)
    assert not torch.equal(theirs[0][0], pictures(40)[0][:8])
    for (x, y, loss), (full_x, full_y, full_loss) in zip(ours, theirs, strict=True):
        assert_same(x, full_x)
        assert_same(y, full_y)
        bound = tolerance(precision, 0.004, 0.04)
        torch.testing.assert_close(loss, full_loss, rtol=bound, atol=bound)


@checks("{callback}", "the loss is that of the 32-bit predictions, smoothed, to the bit")
@in_16_bits
@pytest.mark.parametrize(
    ("callback", "loss_func"),
    [
        ("LabelSmoothingCrossEntropy", LabelSmoothingCrossEntropy(eps=0.25)),
        ("LabelSmoothingCrossEntropyFlat", LabelSmoothingCrossEntropyFlat(eps=0.25)),
    ],
)
def test_labels_are_smoothed(callback, loss_func, precision):
    for pred, y, loss in seen(callback, precision):
        assert pred.dtype == loss.dtype == torch.float32
        assert_same(loss, plain(loss_func(pred, y)))
        assert abs(loss - F.cross_entropy(pred, y)) > 1e-4


@checks("EarlyStoppingCallback", "training stops after the same epoch as in 32 bits")
@in_16_bits
def test_training_stops_at_the_same_epoch(precision):
    epochs = seen("EarlyStoppingCallback", PLAIN)
    assert epochs == 4
    assert seen("EarlyStoppingCallback", precision) == epochs


@checks("ReduceLROnPlateau", "every step has the learning rate that it has in 32 bits")
@in_16_bits
def test_the_rate_is_reduced_at_the_same_step(precision):
    rates = seen("ReduceLROnPlateau", PLAIN)
    assert len(set(rates)) > 1
    assert seen("ReduceLROnPlateau", precision) == rates


@checks("SaveModelCallback", "the file holds the best epoch's 32-bit weights; they are loaded")
@in_16_bits
def test_the_best_model_is_saved_in_32_bits_and_loaded(precision):
    found = seen("SaveModelCallback", precision)
    assert_same(found["file"], found["best"])
    assert_same(found["at the end"], found["best"])
    weight = found["file"]["0.weight"]
    assert weight.dtype == torch.float32
    assert (weight.to(precision.dtype).float() != weight).any()


@checks("TrackerCallback", "the best value is that of the best epoch, near the one in 32 bits")
@in_16_bits
def test_the_best_value_is_tracked(precision):
    found = seen("TrackerCallback", precision)
    assert found["best"] == min(found["losses"])
    seen_near("TrackerCallback", precision, lambda found: found["losses"], 0.002, 0.02)


@checks("Recorder", "the losses are the true ones, also of accumulated batches and skipped steps")
@in_16_bits
def test_recorded_losses_are_true(precision):
    """With a rate of 0 each loss is one of 32 bits, whatever becomes of the steps."""
    recorded = []
    for to in (PLAIN, precision):
        learn = mixed(make_learner(), to)
        spoil = [] if to is PLAIN else [Do("after_backward", _spoil, at=1)]
        learn.fit(2, 0.0, cbs=[GradientAccumulation(16), *spoil])
        recorded.append(torch.stack(list(learn.recorder.losses)))
    assert learn.mp_cb.skipped == ([0] if precision.dtype == torch.float16 else [])
    bound = tolerance(precision, 0.002, 0.02)
    torch.testing.assert_close(recorded[1], recorded[0], rtol=bound, atol=0)


def _spoil(learn):
    value = torch.inf if next(learn.model.parameters()).dtype == torch.float16 else 0.0
    for p in learn.model.parameters():
        p.grad.fill_(value)


@checks("Recorder", "all that is recorded is near what it is in 32 bits")
@in_16_bits
def test_what_is_recorded_is_near(precision):
    for key in ("smooth", "values"):
        seen_near("Recorder", precision, lambda found, key=key: found[key], 0.002, 0.02)


@checks("CSVLogger", "the file holds what was recorded, near what it is in 32 bits")
@in_16_bits
def test_the_csv_holds_true_losses(precision):
    found = seen("CSVLogger", precision)
    assert_same(found["csv"][:, 1:].float(), found["values"])
    seen_near("CSVLogger", precision, lambda found: found["csv"], 0.002, 0.02)


@checks("ProgressCallback", "the bar shows the true smoothed loss")
@in_16_bits
def test_the_bar_shows_the_true_loss(precision):
    found = seen("ProgressCallback", precision)
    assert found["shown"] == [f"{loss.item():.4f}" for loss in found["smooth"]]
    seen_near("ProgressCallback", precision, lambda found: found["smooth"], 0.002, 0.02)


@checks("ShowGraphCallback", "the graph shows the true losses of training and validation")
@in_16_bits
def test_the_graph_shows_true_losses(precision):
    found = seen("ShowGraphCallback", precision)
    (_, train), (_, valid) = found["drawn"][-1]
    assert_same([train, valid], [found["train"], found["valid"]])
    seen_near("ShowGraphCallback", precision, lambda found: found["train"], 0.002, 0.02)


@checks("ChannelsLast", "all 4-dimensional weights lie channels last, in every step")
@in_16_bits
def test_channels_lie_last(precision):
    assert seen("ChannelsLast", precision) == [[True, True]] * 8


@checks("ChannelsLast", "`to_channelslast` leaves our mixed precision in its place")
@in_16_bits
def test_to_channelslast_adds_no_second_mixed_precision(precision):
    learn = mixed(make_learner(), precision)
    ours = learn.mixed_precision
    learn.to_channelslast().fit(1, 0.1)
    assert learn.mixed_precision is ours
    assert next(learn.model.parameters()).dtype == precision.dtype
    assert learn.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    learn.to_contiguous(to_fp32=False)
    assert next(learn.model.parameters()).dtype == precision.dtype


@checks("BnFreeze", "the statistics of a frozen BatchNorm keep their bits; without it they move")
@in_16_bits
def test_frozen_statistics_stay(precision):
    found = seen("BnFreeze", precision)
    assert_same(found["after"], found["before"])
    assert found["after"]["running_mean"].dtype == torch.float32
    moved = use("TrainEvalCallback", precision).end["weights"]["1.running_mean"]
    assert not torch.equal(moved, found["before"]["running_mean"])


@checks("ShortEpochCallback", "an epoch ends after the part asked for")
@in_16_bits
def test_epochs_are_short(precision):
    assert seen("ShortEpochCallback", precision) == {"training": [0, 1, 0, 1], "validation": 2}


def whole_cycle(learn):
    learn.fit_one_cycle(3, 0.1)
    return [float(v) for v in learn.recorder.lrs]


@checks("SkipToEpoch", "the rates are those of the same epochs of a whole fit")
@in_16_bits
def test_skipped_epochs_are_skipped(precision):
    assert seen("SkipToEpoch", precision) == run(whole_cycle, make_learner, PLAIN).seen[4:]


@checks("ActivationStats", "mean, deviation and histogram of 16-bit layers, near those in 32 bits")
@in_16_bits
def test_activation_statistics_are_near(precision):
    seen_near("ActivationStats", precision, lambda found: found["numbers"], 0.005, 0.05)
    seen_near("ActivationStats", precision, lambda found: found["hist"].expm1().sum(), 0.01, 0.03)
    assert seen("ActivationStats", precision)["hist"].shape == (40, 4)


@checks("{callback}", "what is hooked are the model's 16-bit activations, near those in 32 bits")
@in_16_bits
@pytest.mark.parametrize("callback", ["HookCallback", "hook_outputs"])
def test_hooks_see_activations(callback, precision):
    def flatten(o):
        return [t for v in o for t in flatten(v)] if isinstance(o, list) else [o]

    ours, theirs = (flatten(seen(callback, p)) for p in (precision, PLAIN))
    bound = tolerance(precision, 0.01, 0.1)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.dtype, b.dtype) == (precision.dtype, torch.float32)
        torch.testing.assert_close(a.float(), b, rtol=bound, atol=bound)


@checks("HookCallback", "no hook of a forward pass is left after a fit")
@in_16_bits
def test_hooks_are_taken_off(precision):
    learn = mixed(make_learner(), precision)
    hooking(learn)
    assert not any(m._forward_hooks for m in learn.model.modules())


@checks("ModelResetter", "hidden states start an epoch at 0, in the model's type")
@in_16_bits
def test_hidden_states_are_reset(precision):
    found = seen("ModelResetter", precision)
    zeros = [torch.zeros(1, 8, 8, dtype=precision.dtype)] * 2
    assert_same([*found["hidden"], found["at the end"]], [zeros] * 3)


@checks("RNNCallback", "it finds the model's own outputs, 16-bit numbers in float32, near fp32's")
@in_16_bits
def test_raw_outputs_are_found(precision):
    found, full = seen("RNNCallback", precision)["out"], seen("RNNCallback", PLAIN)["out"]
    bound = tolerance(precision, 0.002, 0.02)
    for a, b in zip(found, full, strict=True):
        assert a.dtype == torch.float32
        assert_same(a, a.to(precision.dtype).float())
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)


@checks("RNNRegularizer", "what it adds to the loss is added before scaling, in 32 bits")
@in_16_bits
def test_regularization_is_added(precision):
    found = seen("RNNRegularizer", precision)
    for out, added in zip(found["out"], found["added"], strict=True):
        steps = (out[:, 1:] - out[:, :-1]).float()
        expected = 2 * out.float().pow(2).mean() + steps.pow(2).mean()
        assert added.dtype == torch.float32
        torch.testing.assert_close(added, expected, rtol=1e-3, atol=0)
    unregularized = run(partial(regularizing, alpha=0.0, beta=0.0), text_learner, precision)
    full, end = use("RNNRegularizer", PLAIN), use("RNNRegularizer", precision).end["weights"]
    near = distance(end, full.end["weights"])
    assert distance(unregularized.end["weights"], full.end["weights"]) > 10 * near


@checks("ParamScheduler", "every step has the hyper-parameters of the schedule")
@in_16_bits
def test_hyper_parameters_follow_the_schedule(precision):
    found = seen("ParamScheduler", precision)
    assert found == seen("ParamScheduler", PLAIN)
    assert found["used"][0] == [0.1, 0.9]
    assert found["used"] == [list(v) for v in zip(*found["recorded"].values(), strict=True)]
    assert len({lr for lr, _ in found["used"]}) == 8


@checks("LRFinder", "the weights are afterwards what they were, to the bit; the rates are fastai's")
@in_16_bits
def test_looking_for_a_rate_leaves_no_trace(precision):
    found = seen("LRFinder", precision)
    assert_same(found["after"], found["before"])
    assert found["lrs"] == seen("LRFinder", PLAIN)["lrs"]


@checks("WeightedDL", "items without weight are never seen")
@in_16_bits
def test_weighted_items(precision):
    assert_same(seen("WeightedDL", precision), [torch.ones(8, dtype=torch.int64)] * 8)


@checks("PartialDL", "an epoch takes as many items as asked for, the same as in 32 bits")
@in_16_bits
def test_a_part_of_the_items(precision):
    found = seen("PartialDL", precision)
    assert len(found) == 4
    assert_same(found, seen("PartialDL", PLAIN))


@checks("CollectDataCallback", "inputs, predictions and losses are collected in 32 bits")
@in_16_bits
def test_batches_are_collected(precision):
    found = seen("CollectDataCallback", precision)
    assert len(found) == 5
    for (x,), _, pred, loss in found:
        assert {x.dtype, pred.dtype, loss.dtype} == {torch.float32}
    seen_near(
        "CollectDataCallback", precision, lambda found: [batch[2:] for batch in found], 0.01, 0.1
    )


@checks("MCDropoutCallback", "predictions are 32-bit, drop out anew each time, near fp32's")
@in_16_bits
def test_dropout_in_predictions(precision):
    first, second = seen("MCDropoutCallback", precision)
    assert not torch.equal(first, second)
    seen_near("MCDropoutCallback", precision, lambda found: found, 0.005, 0.05)


@checks("GatherPredsCallback", "inputs as given; 32-bit predictions and their losses")
@in_16_bits
def test_predictions_are_gathered(precision):
    found = seen("GatherPredsCallback", precision)
    x, y = (t[32:] for t in pictures(40))
    assert_same([found["inputs"], found["targets"]], [x, y])
    losses = F.nll_loss(found["preds"].log(), y, reduction="none")
    torch.testing.assert_close(found["losses"], losses, rtol=1e-5, atol=1e-6)
    seen_near("GatherPredsCallback", precision, lambda found: found["preds"], 0.002, 0.02)


@checks("FetchPredsCallback", "what is fetched in a fit is what `get_preds` gives, to the bit")
@in_16_bits
def test_predictions_are_fetched(precision):
    found = seen("FetchPredsCallback", precision)
    assert_same(found["fetched"], found["asked"])
    assert found["fetched"].dtype == torch.float32


@checks("VerboseCallback", "the events are fastai's own, in its order")
@in_16_bits
def test_events_are_fastais(precision):
    assert seen("VerboseCallback", precision) == seen("VerboseCallback", PLAIN)
    assert "after_step" in seen("VerboseCallback", precision)


@checks("CastToTensor", "the model gets plain tensors")
@in_16_bits
def test_models_get_plain_tensors(precision):
    assert seen("CastToTensor", precision) == [["Tensor"]] * 4


@checks("TrainEvalCallback", "counts and modes are fastai's own")
@in_16_bits
def test_counts_and_modes_are_fastais(precision):
    assert seen("TrainEvalCallback", precision) == seen("TrainEvalCallback", PLAIN)


# TerminateOnNaN


@checks("TerminateOnNaNCallback", "it does not stop at a skipped step")
@in_fp16
def test_a_skipped_step_does_not_terminate(precision):
    """The scale is far too large at first: the gradients overflow, the losses do not."""
    learn = mixed(make_learner(), precision, loss_scale=2.0**24)
    assert terminating(learn) == 8
    assert 0 < learn.mp_cb.n_skipped < 8


def broken(precision):
    """Break the loss from batch 2 on; return the learner, and its weights before and after."""
    learn = mixed(make_learner(), precision)
    before, note = noting("before_batch", weights)
    spoil = Do("after_loss", _no_number, order=5)
    learn.fit(2, 0.1, cbs=[TerminateOnNaNCallback(), note, spoil])
    return learn, before[2], weights(learn)


def _no_number(learn):
    if learn.train_iter >= 2:
        learn.loss_grad = learn.loss_grad * torch.nan
        learn.loss = learn.loss_grad.detach().clone()


def _too_large(learn):
    learn.xb = tuple(x * 1e30 for x in learn.xb)


@checks("TerminateOnNaNCallback", "it stops at a loss that is no number")
@in_16_bits
def test_a_loss_that_is_no_number_terminates(precision):
    """In 16 bits at the second in a row: the first may be an outlier, and no step was taken."""
    plain, *_ = broken(PLAIN)
    learn, before, after = broken(precision)
    assert plain.train_iter == 3 and learn.train_iter == 4
    assert_same(after, before)


@checks("TerminateOnNaNCallback", "it stays quiet where one batch overflows, and is skipped")
@in_fp16
def test_an_overflowed_batch_does_not_terminate(precision):
    """Its step is none. fastai's autocast skips it as well, but its nan ends the fit."""
    learn = mixed(make_learner(), precision)
    spoil = Do("before_batch", _too_large, at=2, order=5)
    losses, note = noting("after_batch", lambda learn: learn.loss.detach().clone())
    learn.fit(2, 0.01, cbs=[TerminateOnNaNCallback(), spoil, note])
    assert learn.train_iter == 8 and learn.mp_cb.skipped == [2]
    assert_same(losses[2], losses[1])  # it has none of its own
    assert losses[3] != losses[2] and learn.smooth_loss.isfinite()


# Nothing is left out

LEFT_OUT = {
    "fastai.callback.azureml": "reports to a service",
    "fastai.callback.captum": "explains predictions, with a package that fastai does not bring",
    "fastai.callback.comet": "reports to a service",
    "fastai.callback.fp16": "fastai's own mixed precision, which ours replaces",
    "fastai.callback.neptune": "reports to a service",
    "fastai.callback.tensorboard": "reports to a program that fastai does not bring",
    "fastai.callback.wandb": "reports to a service",
    "fastai.distributed": "needs several devices",
    "fastai.vision.gan": "belongs to an application, and is tested there",
}
ABSTRACT = {"MixHandler"}  # what MixUp and CutMix have in common


def shipped():
    """Return every subclass of `Callback` that fastai defines outside of `LEFT_OUT`."""
    for info in pkgutil.walk_packages(fastai.__path__, "fastai."):
        if info.name not in LEFT_OUT and not info.name.endswith(("_nbdev", "_modidx")):
            import_if_possible(info.name)
    return {c.__name__ for c in subclasses(Callback) if c.__module__ not in LEFT_OUT}


def import_if_possible(name):
    """Import a module of fastai, unless it needs a package that is not there."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as e:
        assert not e.name.startswith("fastai")
        assert ".callback." not in name, f"{name} is neither tested nor left out"


def subclasses(cls):
    """Yield the subclasses of `cls` that are fastai's."""
    for c in cls.__subclasses__():
        if c.__module__.startswith("fastai."):
            yield c
        yield from subclasses(c)


def test_every_callback_of_fastai_is_here():
    used = {name.split(",")[0] for name in BY_NAME}
    assert shipped() - ABSTRACT - used == set()
    callables = {"LabelSmoothingCrossEntropy", "LabelSmoothingCrossEntropyFlat", "hook_outputs"}
    assert used - shipped() - callables - {"WeightedDL", "PartialDL"} == set()
