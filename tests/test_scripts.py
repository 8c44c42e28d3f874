"""Training scripts in float32, under autocast and with masters, beside each other."""

from copy import deepcopy
from functools import cache, partial
from itertools import product

import pytest
import torch
from ranks import on_ranks
from scripts import SCRIPTS, Run, cross_entropy_of, hogwild, mean_teacher, mlp

from mixedfp.testing import assert_same

SEEDS = range(3)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
SCRIPT = pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
pytestmark = pytest.mark.usefixtures("alone")
torch.set_num_threads(1)  # these tensors are tiny: a second thread would only wait


def trained(script, kind, dtype=torch.bfloat16, seed=0, **settings):
    """Return the model, and a function of it that returns a loss."""
    torch.manual_seed(seed)
    return script(Run(kind, dtype, **settings))


def state(*args, **settings):
    return dict(trained(*args, **settings)[0].state_dict())


@cache
def losses(script, kind, dtype=torch.bfloat16, steps=None):
    """The losses of all seeds after training."""
    ends = [trained(script, kind, dtype, seed, steps=steps) for seed in SEEDS]
    return [float(evaluate(model).detach()) for model, evaluate in ends]


@SCRIPT
@HALVES
def test_a_script_ends_where_it_ends_in_float32(script, dtype):
    """Two lines are changed; seeds differ by more than precisions. Autocast has twice the room."""
    plain = losses(script, "float32")
    assert max(plain) < min(losses(script, "float32", steps=0))
    spread = max(plain) - min(plain)
    assert losses(script, "masters", dtype) == pytest.approx(plain, abs=spread)
    assert losses(script, "autocast", dtype) == pytest.approx(plain, abs=2 * spread)


@SCRIPT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masters_in_float32_and_flat_ones_change_no_bit(script, dtype):
    """With the same two lines."""
    masters = state(script, "masters", dtype, 1, steps=12)
    assert_same(state(script, "flat", dtype, 1, steps=12), masters)
    if dtype == torch.float32:
        assert_same(state(script, "float32", dtype, 1, steps=12), masters)


@SCRIPT
@HALVES
def test_a_resumed_script_ends_as_an_unbroken_one(script, dtype, tmp_path):
    """And its file continues without masters, from the float32 weights."""
    file = tmp_path / "file"
    unbroken = state(script, "masters", dtype, steps=12)
    half = state(script, "masters", dtype, steps=7, save=file)
    assert_same(state(script, "masters", dtype, 1, steps=12, resume=file), unbroken)
    assert_same(state(script, "float32", dtype, 1, steps=7, resume=file), half)
    trained(script, "float32", seed=1, steps=8, resume=file)


HOWS = [("float32",), *product(("autocast", "masters", "flat"), (torch.bfloat16, torch.float16))]


def on_each_rank(models, rank):
    """Train the mean teacher over DDP, then `models`: one in turns, and one without a lock."""
    for how, (in_turns, free) in zip(HOWS, models, strict=True):
        hogwild(Run(*how), in_turns, 12, rank)
        hogwild(Run(*how), free, 80, rank, in_turns=False)
    return [state(mean_teacher, *how, steps=12) for how in HOWS]


def test_two_processes(tmp_path):
    """DDP keeps teachers equal; Hogwild's masters stay in shared memory."""
    models = [[mlp(192, 32, 4).share_memory() for _ in range(2)] for _ in HOWS]
    alone = [deepcopy(in_turns) for in_turns, _ in models]
    first, second = on_ranks(2, partial(on_each_rank, models), tmp_path, ("test_scripts",))
    assert_same(second, first)
    for how, plain, (in_turns, free) in zip(HOWS, alone, models, strict=True):
        hogwild(Run(*how), plain, 12)
        assert_same(dict(in_turns.state_dict()), dict(plain.state_dict()))
        assert cross_entropy_of(free, 0) < 1  # an untrained model's is above 1.38
