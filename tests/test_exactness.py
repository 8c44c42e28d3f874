"""In float32 a fit is plain fastai's fit, bit for bit: weights, buffers, optimizer state."""

import pytest
import torch
from tiny import CASES, LAYERWISE, MODELS, Case, Do, make_learner, train, weights

from mixedfp.callback import MixedPrecision
from mixedfp.testing import assert_same


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_is_plain_fastai(case, flat):
    assert_same(train(case, torch.float32, flat), train(case))


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("opt", ["sgd", "ranger", "torch_adamw"])
def test_nobody_sees_a_difference_before_to_fp32(opt, flat):
    for way in ("fits", "freezing"):
        assert_same(train(Case(way, opt), torch.float32, flat, stay=True), train(Case(way, opt)))


@pytest.mark.parametrize("opt", LAYERWISE)
def test_layerwise_optimizers_are_plain_fastai(opt):
    assert_same(train(Case("freezing", opt), torch.float32), train(Case("freezing", opt)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_comparison_can_fail(case):
    """Each way to train moves the weights; else the above would hold for a fit of nothing."""
    with torch.random.fork_rng(devices=[]):
        learn = make_learner(model=MODELS[case.model])
    learn.model.to(learn.dls.device)
    before = weights(learn)
    moved = [not torch.equal(v, before[k]) for k, v in train(case)["weights"].items()]
    assert sum(moved) >= 6


def test_nothing_random_is_used_up():
    before = torch.get_rng_state()
    learn = make_learner().to_fp16(flat_master=True)
    assert torch.equal(torch.get_rng_state(), before)
    learn.to_fp32()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_gradients_seen_in_a_step_are_plain_fastais(flat):
    """A callback finds the same gradients in `before_step`, those of fastai's own fit."""
    seen = {}
    for mixed in (None, MixedPrecision(dtype=torch.float32, flat_master=flat)):
        learn = make_learner(cbs=[] if mixed is None else [mixed])
        grads = seen.setdefault(mixed is None, [])

        def look(learn, grads=grads):
            grads.append([p.grad.clone() for p in learn.model.parameters()])

        learn.fit(1, 0.1, cbs=Do("before_step", look, order=11))
    assert len(seen[True]) == 4
    assert_same(seen[False], seen[True])
