"""A Learner in `distrib_ctx`, two ranks over gloo: against plain fastai, and sent during or after.

One pair of processes trains all the cases; the tests look at what it brings back.
"""

import traceback
from typing import Any

import inside
import pytest
import torch
from fastai.callback.training import GradientAccumulation, GradientClip
from ranks import on_two_ranks
from tiny import (
    Do,
    Sometimes,
    be_distributed,
    conv_net,
    make_dls,
    make_learner,
    opt_state,
    pictures,
    weights,
)

from mixedfp.callback import MixedPrecision
from mixedfp.formats import MixedPrecisionError
from mixedfp.testing import assert_same

accelerate: Any = pytest.importorskip("accelerate")

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
LAYOUTS = dict(each=dict(), flat=dict(flat_master=True))
UNUSED = dict(net=Sometimes, ddp=dict(find_unused_parameters=True))


def cases():
    """Return the settings of all learners, by name; without `dtype` it is plain fastai's."""
    found = {"plain": {}, "unused-plain": UNUSED}
    for layout, settings in LAYOUTS.items():
        for dtype, name in ((FULL, "full"), (BF16, "bfloat"), (HALF, "half")):
            found[f"{name}-{layout}"] = dict(dtype=dtype, **settings)
        found[f"unused-full-{layout}"] = dict(dtype=FULL, **settings, **UNUSED)
    found["parts"] = dict(dtype=BF16, n_acc=16)
    found["uneven"] = dict(dtype=HALF, **UNUSED, starts=True)
    for name in ("bfloat-each", "half-flat", "parts", "uneven"):
        found[f"{name}-after"] = found[name] | dict(is_after=True)
    found["sent-in-16"] = dict(dtype=BF16, reduce_dtype=BF16)
    found["overflow"] = dict(dtype=HALF, overflow=True)
    return found


CASES = cases()


def train(rank, dtype=None, net=conv_net, ddp=None, n_acc=None, **settings):
    """Fit for two epochs; return what came of it on this rank."""
    starts, is_after = settings.pop("starts", False), settings.pop("is_after", False)
    fault = settings.pop("overflow", False)
    learn = make_learner("adam", net, dls=make_dls(*pictures(40, seed=0), n_valid=8, bs=8))
    sent = []
    if starts and rank:
        learn.model.count = 1  # its batches use the layer at other times than the first rank's
    if dtype is not None:
        learn.add_cb(MixedPrecision(dtype=dtype, loss_scale=64.0, **settings))
    cbs = [GradientClip(0.5), Do("after_step", lambda learn: sent.append("step"))]
    cbs += [] if n_acc is None else [GradientAccumulation(n_acc)]
    if fault and rank:
        cbs.append(Do("before_batch", overflow, at=1, order=5))
    kwargs = accelerate.DistributedDataParallelKwargs(bucket_cap_mb=0.0002, **(ddp or {}))
    with inside.note_messages(sent, is_after):
        with learn.distrib_ctx(sync_bn=False, cpu=True, kwargs_handlers=[kwargs]):
            learn.fit(2, 0.02, cbs=cbs)
    return dict(
        weights=weights(learn),
        opt=opt_state(learn),
        values=[list(v) for v in learn.recorder.values],
        sent=sent,
        hooks=n_hooks(learn),
        skipped=learn.mp_cb.skipped if dtype is not None else [],
    )


def n_hooks(learn):
    """Count the hooks that wait for gradients."""
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in learn.model.parameters())


def fail(learn):
    """Let the backward pass raise ZeroDivisionError."""
    learn.loss_grad.register_hook(lambda _: 1 / 0)


def overflow(learn):
    """Let the batch overflow in the forward pass."""
    learn.xb = (torch.full_like(learn.xb[0], torch.inf),)


def train_all(rank):
    """Train all cases; where one fails, its place holds what was raised."""
    be_distributed(rank)
    results = {}
    for name, case in CASES.items():
        try:
            results[name] = train(rank, **case)
        except Exception:
            results[name] = traceback.format_exc()
    learn = make_learner("adam").to_bf16()
    with learn.distrib_ctx(sync_bn=False, cpu=True):
        with pytest.raises(MixedPrecisionError, match="lr_find would hang with several processes"):
            learn.lr_find(show_plot=False)
    results["after lr_find"] = type(learn.model).__name__
    with learn.distrib_ctx(sync_bn=False, cpu=True):
        with pytest.raises(ZeroDivisionError):
            learn.fit(1, 0.02, cbs=Do("before_backward", fail, at=1))
    left = n_hooks(learn)
    results["after an exception"] = left, n_hooks(learn.to_fp32())
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return what both ranks came to."""
    found = on_two_ranks(train_all, tmp_path_factory.mktemp("ranks"), ("test_distributed",))
    for result in found[0].values():
        assert not (isinstance(result, str) and "Traceback" in result), result
    return found


@pytest.mark.parametrize("name", [n for n in CASES if "full" in n])
def test_float32_is_plain_fastai_on_every_rank(ranks, name):
    """Weights, buffers, optimizer and valid_loss, bit for bit; with layers that not all use."""
    plain = "unused-plain" if name.startswith("unused") else "plain"
    for found in ranks:
        for what in ("weights", "opt", "values"):
            assert_same(found[name][what], found[plain][what])


@pytest.mark.parametrize("name", list(CASES))
def test_ranks_agree_and_no_hook_stays(ranks, name):
    """The same messages in the same order, whatever a rank's batch has used."""
    one, two = (found[name] for found in ranks)
    for what in ("weights", "opt", "sent", "skipped"):
        assert_same(one[what], two[what])
    assert one["hooks"] == two["hooks"] == 0
    assert_same(one["values"], two["values"])  # fastai gathers predictions


@pytest.mark.parametrize("name", [n for n in CASES if f"{n}-after" in CASES])
def test_sent_during_the_backward_pass_or_after_it_are_the_same_bits(ranks, name):
    """Also where they are accumulated, and where ranks use other layers."""
    for found in ranks:
        assert_same(found[name]["weights"], found[f"{name}-after"]["weights"])
        assert_same(found[name]["opt"], found[f"{name}-after"]["opt"])
    assert {when for *_, when in messages(ranks, name)} == {"during"}
    assert {when for *_, when in messages(ranks, f"{name}-after")} == {"after"}


def messages(ranks, name):
    """Return the messages of a case on the first rank."""
    return [m for m in ranks[0][name]["sent"] if m != "step"]


def test_what_is_sent(ranks):
    """Several buckets a step, in 32 bits or as asked for; with the last micro-batch only."""
    plain, parts = messages(ranks, "bfloat-each"), messages(ranks, "parts")
    steps, n = ranks[0]["bfloat-each"]["sent"].count("step"), len(set(plain))
    assert steps == 4 and len(plain) == steps * n and n > 2
    assert {dtype for dtype, *_ in plain} == {FULL}
    in_16 = messages(ranks, "sent-in-16")
    assert {dtype for dtype, *_ in in_16} == {BF16} and len(in_16) == len(plain)
    assert ranks[0]["parts"]["sent"].count("step") == 2 and len(parts) == len(plain) // 2


def test_ranks_skip_what_overflows_on_one(ranks):
    """Rank 1 alone had an inf."""
    assert [found["overflow"]["skipped"] for found in ranks] == [[1], [1]]


def test_lr_find_is_refused_before_it_hangs(ranks):
    """The learner is as it was."""
    assert [found["after lr_find"] for found in ranks] == ["Sequential"] * 2


def test_after_an_exception_hooks_stay_until_to_fp32(ranks):
    """fastai calls no event then, so the callback cannot take them off before."""
    for found in ranks:
        left, after = found["after an exception"]
        assert left > 0 and after == 0
