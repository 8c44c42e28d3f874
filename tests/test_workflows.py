"""Every way of working that fastai has: the same calls, the same bits in 32, near them in 16."""

import copy
import random
import warnings
from contextlib import redirect_stdout
from functools import cache, partial
from io import StringIO
from tempfile import TemporaryDirectory

import fastai.callback.hook  # noqa: F401  gives Learner.summary
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fastai.basics import load_learner
from fastai.callback.progress import ProgressCallback
from fastai.callback.training import GradientClip
from fastai.interpret import ClassificationInterpretation, Interpretation
from fastai.losses import LabelSmoothingCrossEntropyFlat
from fastai.optimizer import Adam
from fastai.vision.all import CategoryBlock, DataBlock, Flip, ImageBlock, Normalize, PILImage
from tiny import (
    Do,
    Scale,
    make_learner,
    masters,
    opt_state,
    picture_dls,
    pictures,
    snapshot,
    three_groups,
    torch_optimizer,
    weights,
)
from torch import nn

from mixedfp.callback import MixedPrecision
from mixedfp.examples import photos
from mixedfp.testing import assert_same

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
HALF = pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
FLAT = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
SEARCH = {"num_it": 6, "show_plot": False, "suggest_funcs": None}  # keywords for `lr_find`
TOO_FAR = SEARCH | {"start_lr": 1.0, "end_lr": 1e15, "num_it": 10, "stop_div": False}


def smooth_net():
    """Return a net without kinks: a rounded activation never takes another branch."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        Scale(),
        nn.Conv2d(4, 4, 3),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(4, 2),
    )


# Ways to train beside those of tiny.py: each changes the learner it gets


def flat_cos(learn):
    """Fit at one rate, which then falls as a cosine."""
    learn.fit_flat_cos(2, 0.05, wd=0.1)
    learn.fit_flat_cos(1, slice(0.01, 0.05), pct_start=0.25)


def warm_restarts(learn):
    """Fit in cycles, each twice as long as the last."""
    learn.fit_sgdr(2, 1, 0.05, wd=0.1)


def starting_over_with_a_schedule(learn):
    """Make the optimizer anew at the start of a fit that follows a schedule."""
    learn.fit_one_cycle(1, 0.05, wd=0.1)
    learn.fit_one_cycle(1, slice(0.01, 0.05), reset_opt=True)
    learn.fit_flat_cos(1, 0.05, reset_opt=True)
    learn.fit_sgdr(1, 1, 0.05, reset_opt=True)


def starting_later(learn):
    """Fit no epoch, an epoch, and then only the second of two."""
    learn.fit(0)
    learn.fit(1, 0.05)
    learn.fit_one_cycle(2, 0.05, start_epoch=1)


def freezing_group_after_group(learn):
    """Thaw one group more in each epoch, from a callback within one fit."""
    learn.freeze()
    thaw = Do("before_epoch", lambda learn: learn.freeze_to(2 - learn.epoch), training=False)
    learn.fit(3, slice(0.01, 0.05), wd=0.1, cbs=thaw)


def freezing_within_a_step(learn):
    """Freeze between a backward pass and its step, thaw between a step and the next batch."""
    freeze = Do("before_step", lambda learn: learn.freeze(), at=1)
    thaw = Do("after_step", lambda learn: learn.unfreeze(), at=2)
    learn.fit(1, 0.05, wd=0.1, cbs=[freeze, thaw])
    learn.fit(1, 0.05)


def finding_rates_while_frozen(learn):
    """Look for a rate in each stage of fine-tuning, before any fit too."""
    learn.freeze()
    learn.lr_find(**SEARCH)
    learn.fit_one_cycle(1, slice(0.05), wd=0.1)
    learn.lr_find(**SEARCH)
    learn.unfreeze()
    learn.lr_find(**SEARCH)
    learn.fit_one_cycle(1, slice(0.01, 0.05))


def finding_rates_until_all_is_nan(learn):
    """Look for a rate until weights and losses are nan, before a fit and between fits."""
    for _ in range(2):
        learn.lr_find(**TOO_FAR)
        torch.manual_seed(0)  # fastai's search goes on, and draws more for its dropout
        learn.fit(1, 0.05, wd=0.1)


def setting_hypers(learn):
    """Set hyper-parameters from a callback, between batches and between a backward and its step."""
    late = Do("before_step", lambda learn: learn.opt.set_hyper("lr", [0.01, 0.02, 0.04]), at=2)
    learn.fit(1, [0.02, 0.03, 0.05], wd=0.1, cbs=[Do("after_batch", _set_hypers, at=0), late])
    learn.opt.set_hypers(lr=slice(0.01, 0.05), wd=0.2)
    learn.fit(1, slice(0.01, 0.05))
    assert [round(h["wd"], 3) for h in learn.opt.hypers] == [0.2] * 3


def _set_hypers(learn):
    learn.opt.set_hypers(lr=slice(0.02, 0.08), mom=0.5, wd=0.2)
    learn.opt.hypers[0]["lr"] = 0.03


def changing_the_data(learn):
    """Train on other data: between fits, and from a callback between epochs."""
    learn.fit(1, 0.05, wd=0.1)
    learn.dls = picture_dls(24, bs=6)
    learn.fit(1, 0.05)
    turn = Do("after_epoch", lambda learn: setattr(learn, "dls", picture_dls(16)), training=False)
    learn.fit(2, 0.05, cbs=turn)


def changing_the_loss(learn):
    """Train with another loss: between fits, and from a callback between batches."""
    learn.fit(1, 0.05, wd=0.1)
    learn.loss_func = LabelSmoothingCrossEntropyFlat()
    learn.fit(1, 0.05)
    other = Do("after_batch", lambda learn: setattr(learn, "loss_func", F.cross_entropy), at=1)
    learn.fit(1, 0.05, cbs=other)


def changing_the_defaults(learn):
    """Set the learner's own rate, decay and momentums between fits."""
    learn.fit(1)
    learn.lr, learn.wd, learn.moms = 0.02, 0.3, (0.5, 0.25, 0.5)
    learn.fit(1)
    learn.fit_one_cycle(1)
    learn.wd_bn_bias, learn.train_bn = True, False
    learn.create_opt()
    learn.freeze()
    learn.fit(1)


def changing_the_optimizer(learn):
    """Say what the next optimizer is to be: the old one trains on until one is made."""
    learn.fit(1, 0.05, wd=0.1)
    learn.opt_func = partial(Adam, eps=0.1)  # or it blows rounding up where gradients are small
    learn.fit(1, 0.05)
    learn.fit(1, 0.01, reset_opt=True)
    learn.opt_func, learn.opt = torch_optimizer(torch.optim.AdamW, eps=0.1), None
    learn.fit(1, 0.01)


def changing_the_splitter(learn):
    """Train in other groups from here on."""
    learn.fit(1, 0.05, wd=0.1)
    learn.splitter = lambda model: [list(model[4:].parameters()), list(model[:4].parameters())]
    learn.create_opt()
    learn.fit(1, slice(0.01, 0.1))


def another_model(learn):
    """Put another model in the place of the first between fits, with an optimizer of its own."""
    learn.fit(1, 0.05, wd=0.1)
    learn.model = _second_model()
    learn.create_opt()
    learn.fit(1, 0.05)


def another_model_frozen(learn):
    """Put another model in the place of the first, and train its head alone."""
    learn.fit(1, 0.05, wd=0.1)
    learn.model, learn.opt = _second_model(), None
    learn.freeze()
    learn.fit(1, 0.05)


def _second_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return smooth_net()


def evaluating_while_training(learn):
    """Put the model into evaluation mode from a callback, for the rest of an epoch."""
    learn.fit(2, 0.05, wd=0.1, cbs=Do("before_batch", lambda learn: learn.model.eval(), at=1))


def moving_about(learn):
    """Say where model and data are to be."""
    learn.to("cpu")
    learn.fit(1, 0.05, wd=0.1)
    learn.dls.to("cpu")
    learn.dls.cpu()
    learn.model.cpu()
    learn.fit(1, 0.05)


def callbacks_come_and_go(learn):
    """Add and remove callbacks: for a block, for good, and out of order."""
    clip = GradientClip(0.1)
    with learn.added_cbs([clip]):
        learn.fit(1, 0.05, wd=0.1)
    learn.add_cb(clip)
    with learn.removed_cbs(clip):
        learn.fit(1, 0.05)
    learn.fit(1, 0.05)
    learn.remove_cb(GradientClip)
    learn.fit(1, 0.05)


def with_and_without_a_bar(learn):
    """Fit with the progress bar and the printed lines switched off."""
    learn.add_cb(ProgressCallback())
    said = StringIO()
    with redirect_stdout(said), learn.no_bar(), learn.no_logging():
        learn.fit(1, 0.05, wd=0.1)
    assert said.getvalue() == "" and isinstance(learn.progress, ProgressCallback)
    with redirect_stdout(said), learn.no_mbar(), learn.no_logging():
        learn.fit(1, 0.05)
    learn.remove_cb(ProgressCallback)


def batches_by_hand(learn):
    """Train batch by batch, in fastai's own context and without any."""
    learn.fit(1, 0.05, wd=0.1)
    batches = list(learn.dls.train)
    learn.n_epoch, learn.n_iter, learn.dl = 1, len(batches), learn.dls.train
    with learn:
        learn("before_train")
        for i, b in enumerate(batches):
            learn.one_batch(i, b)
    learn.one_batch(0, batches[0])
    learn.fit(1, 0.05)


def looking_by_hand(learn):
    """Evaluate a batch in fastai's contexts for it, between fits."""
    learn.fit(1, 0.05, wd=0.1)
    with learn.validation_context(), learn.loss_not_reduced(), torch.no_grad():
        learn.dl, learn.n_iter = learn.dls.valid, 1
        learn("before_validate")
        learn.one_batch(0, learn.dls.valid.one_batch())
        assert learn.loss.shape == (8,) and learn.pred.dtype == torch.float32
    learn.fit(1, 0.05)


TRAININGS = {
    f.__name__: f
    for f in (
        flat_cos, warm_restarts, starting_over_with_a_schedule, starting_later,
        freezing_group_after_group, freezing_within_a_step, finding_rates_while_frozen,
        finding_rates_until_all_is_nan, setting_hypers, changing_the_data, changing_the_loss,
        changing_the_defaults, changing_the_optimizer, changing_the_splitter, another_model,
        another_model_frozen, evaluating_while_training, moving_about, callbacks_come_and_go,
        with_and_without_a_bar, batches_by_hand, looking_by_hand,
    )
}  # fmt: skip

# A fit that something ends, and one after it

OF_A_BATCH = [
    *("before_batch", "after_pred", "after_loss", "before_backward", "after_backward"),
    *("before_step", "after_step", "after_batch"),
]
EVENTS = [
    *("before_fit", "before_epoch", "before_train", *OF_A_BATCH, "after_train"),
    *("before_validate", "after_validate", "after_epoch", "after_fit"),
]
BOTH_SIDES = ("before_backward", "after_backward", "before_step", "after_step")  # of ours


def interrupted(learn, event, order):
    """Press ctrl-C (or fail) in the second epoch's second batch, then train on."""
    error = (KeyboardInterrupt, ZeroDivisionError)[EVENTS.index(event) % 2]

    def interrupt(learn):
        if event in ("before_fit", "after_fit") or learn.epoch == 1:
            raise error("stop")

    learn.fit(1, 0.05, wd=0.1)
    at = 4 if event in OF_A_BATCH else None
    stop = Do(event, interrupt, at=at, order=order, training=False)
    with pytest.raises(error, match="stop"):
        learn.fit(2, 0.05, cbs=stop)
    learn.fit(1, 0.05)


def interrupted_search(learn):
    """Stop a search for a rate: as with fastai alone, the weights stay where it had got to."""
    learn.fit(1, 0.05, wd=0.1)
    with pytest.raises(ZeroDivisionError):
        with learn.added_cbs(Do("after_step", lambda learn: 1 / 0, at=3)):
            learn.lr_find(1e-3, 0.1, **SEARCH)
    learn.fit(1, 0.05)


INTERRUPTIONS = {
    f"interrupted_at_{e}_{when}": partial(interrupted, event=e, order=order)
    for i, e in enumerate(EVENTS)
    for when, order in (("early", 5), ("late", 60))
    if e in BOTH_SIDES or (order == 5) == (i % 2 == 0)
} | {"interrupted_search": interrupted_search}

ALL = TRAININGS | INTERRUPTIONS


@cache
def train(way, opt, dtype=None, flat=False):
    """Train a new learner, with plain fastai where `dtype` is None; return what there is after."""
    seen = set()

    def look(learn):
        seen.add(learn.model[0].weight.dtype)

    mixed = [] if dtype is None else [MixedPrecision(dtype=dtype, flat_master=flat)]
    with TemporaryDirectory() as path, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fastai's, of freezing
        cbs = [*mixed, Do("after_loss", look, training=False)]
        learn = make_learner(opt, smooth_net, three_groups, picture_dls(24), path=path, cbs=cbs)
        before = weights(learn)
        torch.manual_seed(0)
        ALL[way](learn)
        learn.to_fp32()
        return {"after": snapshot(learn), "before": before, "dtypes": seen}


OTHER_OPTIMIZERS = [
    ("freezing_within_a_step", "ranger"),
    ("finding_rates_while_frozen", "torch_adamw"),
    ("setting_hypers", "torch_adamw"),
    ("another_model", "torch_adamw"),
    ("batches_by_hand", "torch_adamw"),
]
RUNS = [(way, "sgd") for way in ALL] + OTHER_OPTIMIZERS

# all in one vector, every other one with a master each as well
EXACT = [(*run, True) for run in RUNS] + [(*run, False) for run in RUNS[::2]]
# by turns in one of the types; in the other one they go where 32 bits go
TWICE = [(*run, list(HALVES)[i % 2]) for i, run in enumerate(RUNS)]


@pytest.mark.parametrize("way, opt, flat", EXACT, ids=["-".join(map(str, run)) for run in EXACT])
def test_float32_is_plain_fastai(way, opt, flat):
    """Weights, buffers, the optimizer's state and hyper-parameters, and what is frozen."""
    assert_same(train(way, opt, torch.float32, flat)["after"], train(way, opt)["after"])


@pytest.mark.parametrize("way, opt, half", TWICE, ids=["-".join(run) for run in TWICE])
def test_flat_is_each(way, opt, half):
    flat, each = (train(way, opt, HALVES[half], flat=flat) for flat in (True, False))
    assert_same(flat["after"], each["after"])


def moved(run):
    """Return what training added to the weights and statistics, as one vector."""
    before, after = run["before"], run["after"]["weights"]
    floats = [k for k, v in after.items() if v.is_floating_point()]
    return torch.cat([(after[k] - before[k]).flatten() for k in floats])


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("way", ALL)
def test_sixteen_bits_go_where_32_go(way, precision):
    """The way from the first weights to the last is that of 32 bits, to a few in a thousand."""
    plain, half = train(way, "sgd"), train(way, "sgd", HALVES[precision], True)
    assert plain["dtypes"] == {torch.float32} and half["dtypes"] == {HALVES[precision]}
    way_in_32 = moved(plain)
    off = (moved(half) - way_in_32).norm() / way_in_32.norm()
    assert off < {"fp16": 0.002, "bf16": 0.012}[precision]


@pytest.mark.parametrize("way", ALL)
def test_the_comparison_can_fail(way):
    """Each way to train moves the weights of every layer by more than what rounding may cost."""
    run = train(way, "sgd")
    assert sum(not torch.equal(v, run["before"][k]) for k, v in run["after"]["weights"].items()) > 8
    assert moved(run).norm() > 0.1


# Looking for a learning rate

PRECISIONS = {
    "fp16": lambda learn, **kw: learn.to_fp16(**kw),
    "fp16_flat": lambda learn, **kw: learn.to_fp16(flat_master=True, **kw),
    "bf16": lambda learn, **kw: learn.to_bf16(**kw),
    "bf16_flat": lambda learn, **kw: learn.to_bf16(flat_master=True, **kw),
}


def state(learn):
    """Return copies of all that a look must not touch, and touch nothing."""
    scaler = learn.mp_cb.mixed.scaler
    found = {
        "model": {k: v.detach().clone() for k, v in learn.model.named_parameters()},
        "buffers": {k: v.detach().clone() for k, v in learn.model.named_buffers()},
        "masters": masters(learn),
        "opt": opt_state(learn),
        "scale": scaler.state_dict(),
        "frozen": [not p.requires_grad for p in learn.model.parameters()],
        "grads": [None if p.grad is None else p.grad.clone() for p in learn.model.parameters()],
    }
    assert all(g is None or g.dtype == torch.float32 for g in found["grads"])
    return found


def search_state(learn):
    """Return `state` without what fastai's search leaves changed: hyper-parameters, gradients."""
    found = state(learn)
    for k in ("hypers", "param_groups"):
        found["opt"].pop(k, None)
    return {k: v for k, v in found.items() if k != "grads"}


def _to_nan(learn):
    """Search with a loss that is nan from the fourth batch on."""
    calls, loss_func = [], learn.loss_func

    def loss(pred, y):
        calls.append(1)
        return loss_func(pred, y) * (1.0 if len(calls) < 4 else float("nan"))

    learn.loss_func = loss
    learn.lr_find(show_plot=False, suggest_funcs=None)
    learn.loss_func = loss_func
    assert len(calls) < 100 and len(learn.recorder.losses) < 100  # it has seen enough


SEARCHES = {
    "short": lambda learn: learn.lr_find(**SEARCH),
    "too_far": lambda learn: learn.lr_find(**TOO_FAR | {"num_it": 60}),
    "to_nan": _to_nan,
}


@cache
def around_a_search(when, search, precision, path):
    """Fit (or freeze, or neither), search unless `search` is None, and fit; return the learner."""
    learn = make_learner("adam", smooth_net, three_groups, path=path)
    scaling = {"growth_interval": 3} if precision.startswith("fp16") else {}
    PRECISIONS[precision](learn, **scaling)
    if when == "frozen":
        learn.freeze()
    if when != "before_any_fit":
        torch.manual_seed(0)
        learn.fit(1, 0.05)
    if learn.opt is None:
        learn.create_opt()
    if search is not None:
        before = search_state(learn)
        SEARCHES[search](learn)
        assert_same(search_state(learn), before)
    torch.manual_seed(0)
    learn.fit(1, 0.05)
    assert learn.mp_cb.loss_scale > 512 or not scaling  # it grows, by the same count of steps
    return learn


WHEN = "before_any_fit", "between_fits", "frozen"
LOOKED_FOR = [
    (when, search, precision)
    for i, when in enumerate(WHEN)
    for j, search in enumerate(SEARCHES)
    for precision in (("fp16", "bf16_flat"), ("fp16_flat", "bf16"))[(i + j) % 2]
]


@pytest.mark.parametrize("when, search, precision", LOOKED_FOR)
def test_a_search_for_a_rate_leaves_no_trace(when, search, precision, tmp_path_factory):
    """Weights, masters, buffers, state and scale stay; the fit after it is the one without it.

    fastai's own search does not stop at nan: it trains on to `num_it` with what is lost.
    """
    path = tmp_path_factory.getbasetemp()
    searched, straight = (around_a_search(when, s, precision, path) for s in (search, None))
    assert_same(state(searched), state(straight))


@FLAT
def test_skips_of_a_search_do_not_count_in_the_fit_after_it(flat, tmp_path):
    """Two skips end the search, one begins the fit: they are no row of three."""
    learn = make_learner(path=tmp_path).to_fp16(flat_master=flat, max_skips=3)
    last_two = [Do("before_backward", _overflow, at=at) for at in (4, 5)]
    with learn.added_cbs(last_two):
        learn.lr_find(**SEARCH)
    assert learn.mp_cb.skipped == [4, 5]
    first = masters(learn)
    learn.fit(1, 0.05, cbs=Do("before_backward", _overflow, at=0))
    assert learn.mp_cb.skipped == [4, 5, 6]
    assert not any(torch.equal(a, b) for a, b in zip(masters(learn), first, strict=True))


def _overflow(learn):
    learn.loss_grad = learn.loss_grad * float("inf")


@FLAT
@HALF
def test_a_search_sees_the_losses_of_32_bits(dtype, flat, tmp_path):
    """The curve that a user reads the rate from is the same."""
    seen = []
    for mixed in (False, True):
        learn = make_learner(model=smooth_net, path=tmp_path)
        if mixed:
            learn.to_fp16(dtype=dtype, flat_master=flat)
        torch.manual_seed(0)
        learn.lr_find(1e-3, 1.0, num_it=20, show_plot=False, suggest_funcs=None)
        seen.append((learn.recorder.lrs, torch.stack(learn.recorder.losses)))
    (lrs, losses), (lrs_in_half, losses_in_half) = seen
    assert lrs_in_half == lrs and len(losses) == 20
    tolerance = 1e-3 if dtype == torch.float16 else 1e-2
    torch.testing.assert_close(losses_in_half, losses, rtol=tolerance, atol=tolerance)


def test_a_search_suggests_a_rate_and_draws_its_curve(tmp_path):
    learn = make_learner(model=smooth_net, path=tmp_path).to_fp16(flat_master=True)
    found = learn.lr_find(1e-3, 1.0, num_it=20)
    assert 1e-3 < found.valley < 1.0
    (axes,) = plt.gcf().axes
    assert len(axes.lines[0].get_xdata()) == 15
    plt.close("all")


# Looking at a learner of pictures


@cache
def trained():
    """Return a trained learner in 32 bits whose data know how to decode and show."""
    block = DataBlock(
        blocks=(ImageBlock, CategoryBlock),
        get_x=_picture,
        get_y=_label,
        splitter=_split,
        batch_tfms=[Flip(), Normalize.from_stats([0.5] * 3, [0.25] * 3, cuda=False)],
    )
    dls = block.dataloaders(list(range(24)), bs=8, num_workers=0, device="cpu", shuffle=False)
    learn = make_learner("sgd", smooth_net, three_groups, dls)
    learn.fit(2, 0.1)
    return learn


def copy_of(learn):
    """Return a new learner with the weights and the optimizer's state of `learn`, and its data."""
    twin = make_learner("sgd", copy.deepcopy(learn.model), three_groups, learn.dls)
    twin.create_opt()
    twin.opt.load_state_dict(learn.opt.state_dict())
    return twin


def _picture(i):
    x = pictures(24)[0][i].permute(1, 2, 0) * 32 + 128
    return PILImage.create(x.clamp(0, 255).byte().numpy())


def _label(i):
    return "ab"[i % 2]


def _split(items):
    return items[:16], items[16:]


def _interpret(learn):
    interp = ClassificationInterpretation.from_learner(learn)
    interp.plot_confusion_matrix()
    interp.plot_top_losses(4)
    interp.show_results([0, 1])
    interp.print_classification_report()
    confused = interp.most_confused()
    return interp.losses, interp.confusion_matrix().tolist(), str(confused), interp[[2, 0]]


def _top_losses(learn):
    losses, indices = Interpretation.from_learner(learn, ds_idx=0).top_losses(3)
    return losses, indices


def _summary(learn):
    text = learn.summary().split("Optimizer used")[0]
    assert "Total trainable params" in text
    return text


def _one_batch(learn):
    with learn.validation_context(), learn.loss_not_reduced(), torch.no_grad():
        learn.dl, learn.n_iter = learn.dls.valid, 1
        learn("before_validate")
        learn.one_batch(0, learn.dls.valid.one_batch())
        return learn.pred, learn.loss, learn.yb


def _show(learn):
    learn.show_results(max_n=2)
    learn.dls.show_batch(max_n=2)
    learn.show_training_loop()
    return learn.dls.valid.one_batch()


def _with_contexts(learn):
    with learn.no_bar(), learn.no_logging(), learn.no_mbar():
        return learn.validate(), learn.final_record


LOOKS = {
    "get_preds": lambda learn: learn.get_preds(),
    "of_the_training_set": lambda learn: learn.get_preds(ds_idx=0, with_loss=True),
    "with_all": lambda learn: learn.get_preds(with_input=True, with_decoded=True, with_loss=True),
    "without_activation": lambda learn: learn.get_preds(act=lambda x: x),
    "of_its_own_activation": lambda learn: learn.get_preds(act=torch.sigmoid, with_decoded=True),
    "side_by_side": lambda learn: learn.get_preds(dl=list(learn.dls.train), concat_dim=-1),
    "of_a_dl": lambda learn: learn.get_preds(dl=learn.dls.test_dl([3, 8, 1], with_labels=True)),
    "predict": lambda learn: learn.predict(_picture(9), with_input=True),
    "validate": lambda learn: (learn.validate(), learn.validate(ds_idx=0)),
    "tta": lambda learn: learn.tta(n=2),
    "tta_max": lambda learn: learn.tta(n=1, use_max=True),
    "tta_both": lambda learn: learn.tta(n=1, beta=None),
    "interpret": _interpret,
    "top_losses": _top_losses,
    "show": _show,
    "summary": _summary,
    "one_batch": _one_batch,
    "contexts": _with_contexts,
}


def look_at(learn, look):
    """Look with the same random numbers each time; return what was seen, losses as a tensor."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with redirect_stdout(StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's, of classes that nobody predicts
        found = LOOKS[look](learn)
    plt.close("all")
    return found


def assert_near(found, expected, tolerance, where=""):
    """Assert equal types, 32 bits, floats within `tolerance` and all else the same."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype != torch.float64, where
        a, b = (t.detach().as_subclass(torch.Tensor) for t in (found, expected))
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    elif isinstance(expected, float):
        assert abs(found - expected) <= tolerance * (1 + abs(expected)), where
    elif isinstance(expected, str) or not hasattr(expected, "__iter__"):
        assert found == expected, where
    else:
        pairs = zip(found, expected, strict=True)
        for i, (a, b) in enumerate(pairs):
            assert_near(a, b, tolerance, f"{where}[{i}]")


@cache
def expected_of(look):
    """Return what a look at the 32-bit learner shows."""
    return look_at(trained(), look)


VIEWS = [
    (look, precision)
    for i, look in enumerate(LOOKS)
    for precision in (("fp16", "bf16_flat"), ("fp16_flat", "bf16"))[i % 2]
]


@pytest.mark.parametrize("look, precision", VIEWS, ids=["-".join(pair) for pair in VIEWS])
def test_a_look_is_in_32_bits_near_and_leaves_no_trace(look, precision):
    """It shows what the 32-bit learner shows; after it that learner is there, bit for bit."""
    expected = expected_of(look)
    learn = PRECISIONS[precision](copy_of(trained()))
    before, contexts = state(learn), (learn.loss_func, learn.logger, learn.cbs.attrgot("name"))
    found = look_at(learn, look)
    tolerance = 2e-3 if precision.startswith("fp16") else 1.5e-2
    assert_near(found, expected, tolerance)
    assert_same(state(learn), before)
    assert (learn.loss_func, learn.logger, learn.cbs.attrgot("name")) == contexts
    assert getattr(learn.loss_func, "reduction", "mean") == "mean"
    learn.to_fp32()
    assert_near(look_at(learn, look), expected, 0.0)


@FLAT
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES.values()], ids=str)
def test_predictions_within_a_fit_are_those_of_that_moment(dtype, flat):
    """In 32 bits the bits of plain fastai, in 16 bits near them and 32-bit."""
    seen = []
    for mixed in (False, True):
        learn = make_learner("sgd", smooth_net, three_groups)
        if mixed:
            learn.to_fp16(dtype=dtype, flat_master=flat)
        found = []

        def predict(learn, found=found):
            found.append(learn.get_preds(inner=True, reorder=False, with_loss=True, ds_idx=0))

        torch.manual_seed(0)
        learn.fit(2, 0.05, cbs=Do("after_epoch", predict, training=False))
        seen.append(found)
    assert len(seen[0]) == 2
    assert_near(seen[1], seen[0], {torch.float32: 0.0, torch.float16: 2e-3}.get(dtype, 1e-2))


# Ours taken off, the model exchanged, the learner written to a file


def fits_with_a_break(learn, rest):
    """Fit, do `rest` while mixed precision is off, fit on; return what is there in 32 bits."""
    learn.fit(1, 0.05, wd=0.1)
    before = weights(learn)
    mixed = learn.mixed_precision
    if rest == "removed_cbs":
        with learn.removed_cbs(mixed):
            look_at_32_bits(learn, before)
            learn.fit(1, 0.05)
        assert learn.mixed_precision is learn.mp_cb is mixed
    else:
        dtype, flat = mixed.mixed.dtype, mixed.mixed.flat_master
        learn.to_fp32()
        look_at_32_bits(learn, before)
        learn.fit(1, 0.05)
        learn.to_fp16(mixed.loss_scale, dtype=dtype, flat_master=flat)
    learn.get_preds()
    half = learn.model[0].weight.dtype
    learn.fit(1, 0.05)
    return learn.to_fp32(), half


def look_at_32_bits(learn, before):
    """Assert that `learn` is a plain one with the weights `before`."""
    assert not hasattr(learn, "mixed_precision") and not hasattr(learn, "mp_cb")
    assert {p.dtype for p in learn.model.parameters()} == {torch.float32}
    parameters = {k: p.detach() for k, p in learn.model.named_parameters()}
    assert_same(parameters, {k: before[k] for k in parameters})


@FLAT
@HALF
def test_taken_off_for_a_block(dtype, flat):
    """Within `removed_cbs` the learner is in 32 bits, the masters' bits; after it in 16 again."""
    results = []
    for rest in ("removed_cbs", "to_fp32"):
        learn = make_learner("adam", smooth_net, three_groups)
        torch.manual_seed(0)
        learn, half = fits_with_a_break(learn.to_fp16(dtype=dtype, flat_master=flat), rest)
        assert half == dtype
        results.append(snapshot(learn))
    assert_same(results[0], results[1])


@FLAT
@HALF
def test_a_model_that_is_exchanged_goes_back_to_32_bits(dtype, flat):
    """The first is whole again, masters and all; the second trains from its own 32-bit weights."""
    learn = make_learner("sgd", smooth_net, three_groups).to_fp16(dtype=dtype, flat_master=flat)
    learn.fit(1, 0.05)
    first, found, second = learn.model, masters(learn), _second_model()
    original = [p.detach().clone() for p in second.parameters()]
    learn.model, learn.opt = second, None
    learn.fit(1, 0.0, wd=0.0)
    assert_same([p.detach() for p in first.parameters()], found)
    assert not first._forward_hooks and "forward" not in vars(first)
    assert learn.model is second and second[0].weight.dtype == dtype
    assert_same(masters(learn), original)
    with torch.no_grad():
        x = learn.dls.valid.one_batch()[0]
        assert first.eval()(x).dtype == torch.float32  # it is anybody's model now


def export_between_fits(dtype, flat, path):
    """Fit, export, fit on; return what there is after, and what the file holds."""
    dls = photos(n_train=16, n_valid=8, bs=8, device="cpu")
    learn = make_learner("adam", smooth_net, three_groups, dls, path=path)
    if dtype is not None:
        learn.to_fp16(dtype=dtype, flat_master=flat)
    torch.manual_seed(0)
    learn.fit(1, 0.01)
    exported = weights(learn)
    learn.export("learn.pkl")
    learn.fit(1, 0.01)
    assert dtype is None or learn.model[0].weight.dtype == dtype
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fastai's, of pickles from strangers
        loaded = load_learner(path / "learn.pkl")
    assert_same(weights(loaded), exported)
    return snapshot(learn.to_fp32())


def test_an_export_between_fits_changes_nothing(tmp_path):
    """In 32 bits it is plain fastai; flat is each; in 16 bits the fits end near."""
    plain = export_between_fits(None, False, tmp_path)
    assert_same(export_between_fits(torch.float32, True, tmp_path), plain)
    for dtype, tolerance in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        flat, each = (export_between_fits(dtype, flat, tmp_path) for flat in (True, False))
        assert_same(flat, each)
        w, expected = each["weights"]["10.weight"], plain["weights"]["10.weight"]
        torch.testing.assert_close(w, expected, rtol=tolerance, atol=tolerance)
