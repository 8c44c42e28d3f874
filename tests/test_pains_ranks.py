"""Number 28 of tests/test_pains.py: processes that train one model together agree, bit for bit."""

import pytest
import torch
from ranks import on_two_ranks
from tiny import Do, make_dls, make_learner, masters, opt_state, pictures, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

# A learner


def overflow(learn):
    """Let the batch overflow in the forward pass."""
    learn.xb = (torch.full_like(learn.xb[0], float("inf")),)


def make(rank):
    """Return a learner with a rank's own weights and pictures; rank 1 has smaller batches."""
    bs = 8 - 2 * rank
    dls = make_dls(*pictures(5 * bs, seed=rank), n_valid=bs, bs=bs)
    return make_learner("adam", dls=dls, seed=1 + rank)


def to_16_bits(learn, dtype, flat):
    """Put `learn` into `dtype`."""
    return learn.to_fp16(dtype=dtype, flat_master=flat, growth_interval=3)


def wrap(learn):
    """Let `learn` share its gradients with the other rank."""
    learn.model = DistributedDataParallel(learn.model)
    return learn


def train(rank, dtype, flat, is_wrapped_first):
    """Fit, fit with an overflow on rank 1 alone, fit; return what both ranks must agree on."""
    learn = make(rank)
    if dtype is None:
        wrap(learn).fit(1, 0.01)
        return flattened(learn)
    learn = wrap(learn) if is_wrapped_first else to_16_bits(learn, dtype, flat)
    learn = to_16_bits(learn, dtype, flat) if is_wrapped_first else wrap(learn)
    learn.fit(1, 0.01)
    first = flattened(learn)
    fault = [Do("before_batch", overflow, at=1, order=0)] if dtype == torch.float16 else []
    learn.fit(1, 0.01, cbs=fault if rank == 1 else [])
    learn.fit(1, 0.01)
    grads = {p.grad.dtype for p in learn.model.parameters()}
    model = [p.detach().clone() for p in learn.model.parameters()]
    scaler = learn.mp_cb
    scales = scaler.scales, scaler.skipped, scaler.loss_scale
    in_16_bits = model, masters(learn), opt_state(learn)
    learn.to_fp32().fit(1, 0.01)  # by DistributedDataParallel alone again
    return first, *in_16_bits, weights(learn), scales, grads


def flattened(learn):
    """Return the 32-bit weights as one vector, without the buffers."""
    state = list(weights(learn).values())
    names = {k.removeprefix("module.") for k, _ in learn.model.named_parameters()}
    keys = [k.removeprefix("module.") for k in weights(learn)]
    return torch.cat([v.flatten() for k, v in zip(keys, state, strict=True) if k in names])


def train_all(rank, dtype):
    """Train flat or not, in both orders of wrapping; in 32 bits, and alone, for comparison."""
    ways = [train(rank, dtype, flat, first) for flat in (False, True) for first in (True, False)]
    start, alone = flattened(make(0)), make(0)
    alone.fit(1, 0.01)
    return ways, train(rank, None, None, None), start, flattened(alone)


def plain_loop(rank):
    """Train by hand, rank 1 with fewer batches: `join` lets the other go on."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    )
    opt = torch.optim.Adam(model.parameters(), lr=0.1)
    scaler = LossScaler("cpu", init_scale=512.0, growth_interval=3)
    with model.join():
        for i in range(6 - 2 * rank):
            x = torch.randn(8, 4)
            if rank == 1 and i == 1:
                x[0, 0] = float("inf")
            opt.zero_grad()
            scaler.scale(model(x).pow(2).mean()).backward()
            scaler.step(opt)
            scaler.update()
    return [p.detach() for p in model.parameters()], scaler.skipped, scaler.scales, i


def work(rank):
    """Return all that the tests look at."""
    return {str(d): train_all(rank, d) for d in NEAR} | {"plain": plain_loop(rank)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two processes have come to."""
    return on_two_ranks(work, tmp_path_factory.mktemp("ranks"), ("tiny",))


NEAR = {torch.float16: 0.1, torch.bfloat16: 0.25}


@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_pain_28_ranks_agree(dtype, ranks):
    """An inf on rank 1 alone: both skip. Weights, masters, moments and scales stay the same bits.

    Elsewhere a rank steps while the other skips, and the scales part. `DistributedDataParallel`
    before or after: both start from rank 0's weights, and go where 32 bits go. fastai's own is not
    compared: its autocast leaves the weights in 32 bits, and to `DistributedDataParallel` alone.
    """
    (one, full, start, alone), (two, *_) = (found[str(dtype)] for found in ranks)

    def distance(weights):
        return (weights - full).norm() / (full - start).norm()

    assert distance(alone) > 0.5  # what a rank learns that is not told of the other's gradients
    for first, second in zip(one, two, strict=True):
        assert_same(first[:5], second[:5])
        assert first[5:] == second[5:]
        way, model, *_, (scales, skipped, _), grads = first
        assert distance(way) < NEAR[dtype]
        assert grads == {torch.float32} and dtype in {p.dtype for p in model}
        if dtype == torch.float16:
            assert skipped == [5] and len(scales) == 12
            assert scales[5:7] == [1024.0, 512.0]
        assert_same(first[2], one[0][2])  # neither flat nor the order matters


def test_pain_28_a_plain_loop_with_uneven_batches(ranks):
    """While both run, both skip the same steps at the same scale; `join` shares the weights."""
    (one, skipped, scales, i), (two, skipped_2, scales_2, j) = (found["plain"] for found in ranks)
    assert (i, j) == (5, 3)
    assert skipped == skipped_2 == [1]
    assert scales[:4] == scales_2 == [512.0, 512.0, 256.0, 256.0]
    assert all(p.isfinite().all() for p in one)
    assert_same(one, two)
