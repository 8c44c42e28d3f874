"""Eight training scripts in float32, under autocast and with masters, beside each other."""

from functools import cache
from itertools import product

import pytest
import torch
from scripts import SCRIPTS, How

from mixedfp.testing import assert_same

SEEDS = range(3)
KIND = pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
torch.set_num_threads(1)  # these tensors are tiny: a second thread would only wait


def loss_of(script, how, seed, **settings):
    model, evaluate = script(how, seed, **settings)
    return float(evaluate(model).detach())


@cache
def losses(script, kind, dtype):
    """The losses of all seeds after training."""
    return [loss_of(script, How(kind, dtype), seed) for seed in SEEDS]


@KIND
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_script_ends_where_it_ends_in_float32(script, dtype):
    """Two lines are changed; seeds differ by more than precisions."""
    plain = losses(script, "float32", torch.bfloat16)
    assert max(plain) < min(loss_of(script, How("float32"), seed, steps=0) for seed in SEEDS)
    spread = max(plain) - min(plain)
    for kind, seed in product(("autocast", "masters"), SEEDS):
        assert losses(script, kind, dtype)[seed] == pytest.approx(plain[seed], abs=spread)


@KIND
def test_masters_in_float32_change_no_bit(script):
    """With the same two lines."""
    plain, exact = (script(How(k, torch.float32), 1, steps=12)[0] for k in ("float32", "masters"))
    assert_same(dict(exact.state_dict()), dict(plain.state_dict()))


@KIND
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_resumed_script_ends_as_an_unbroken_one(script, dtype, tmp_path):
    """And its file continues without masters, from the float32 weights."""
    how, file = How("masters", dtype), tmp_path / "file"
    unbroken, _ = script(how, 0, steps=12)
    half, _ = script(how, 0, steps=7, save=file)
    resumed, _ = script(how, 1, steps=12, resume=file)
    assert_same(dict(resumed.state_dict()), dict(unbroken.state_dict()))
    plain, _ = script(How("float32"), 1, steps=7, resume=file)
    assert_same(dict(plain.state_dict()), dict(half.state_dict()))
    script(How("float32"), 1, steps=8, resume=file)
