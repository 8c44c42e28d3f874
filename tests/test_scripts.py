"""Training scripts in float32, under autocast and with masters, beside each other."""

from copy import deepcopy
from functools import cache, partial
from itertools import product

import pytest
import torch
from ranks import on_ranks
from scripts import SCRIPTS, How, cross_entropy_of, hogwild, mlp, teacher

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
    """Two lines are changed; seeds differ by more than precisions. Autocast has twice the room."""
    plain = losses(script, "float32", torch.bfloat16)
    assert max(plain) < min(loss_of(script, How("float32"), seed, steps=0) for seed in SEEDS)
    spread = max(plain) - min(plain)
    for (kind, near), seed in product((("autocast", 2 * spread), ("masters", spread)), SEEDS):
        assert losses(script, kind, dtype)[seed] == pytest.approx(plain[seed], abs=near)


@KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masters_in_float32_and_flat_ones_change_no_bit(script, dtype):
    """With the same two lines."""
    kinds = ["masters", "flat"] + ["float32"] * (dtype == torch.float32)
    states = [dict(script(How(k, dtype), 1, steps=12)[0].state_dict()) for k in kinds]
    for state in states[1:]:
        assert_same(state, states[0])


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


KINDS = product(("autocast", "masters", "flat"), (torch.bfloat16, torch.float16))
HOWS = [How("float32", torch.float32), *(How(*kind) for kind in KINDS)]


def on_each_rank(models, rank):
    """Train the mean teacher over DDP, then `models`: one in turns, and one without a lock."""
    for how, (in_turns, free) in zip(HOWS, models, strict=True):
        hogwild(how, in_turns, 12, rank)
        hogwild(how, free, 80, rank, in_turns=False)
    return [dict(teacher(how, 0, steps=12)[0].state_dict()) for how in HOWS]


def test_two_processes(tmp_path):
    """DDP keeps teachers equal; Hogwild's masters stay in shared memory."""
    models = [[mlp(192, 32, 4).share_memory() for _ in range(2)] for _ in HOWS]
    alone = [deepcopy(in_turns) for in_turns, _ in models]
    first, second = on_ranks(2, partial(on_each_rank, models), tmp_path, ("test_scripts",))
    assert_same(second, first)
    for how, plain, (in_turns, free) in zip(HOWS, alone, models, strict=True):
        hogwild(how, plain, 12)
        assert_same(dict(in_turns.state_dict()), dict(plain.state_dict()))
        assert cross_entropy_of(how, free, 0) < 1  # an untrained model's is above 1.38
