"""`state_dtype=`: second moments in bfloat16 move, are reproducible, and stay finite."""

import io

import pytest
import torch
from laws import small_chunks
from torch import nn

from mixedfp.formats import MixedPrecisionError, round_stochastically
from mixedfp.optimizer import with_masters

BF16 = torch.bfloat16
SECOND = {"exp_avg_sq": BF16}


def make_run(states, optimizer=torch.optim.AdamW, seed=0, **settings):
    torch.manual_seed(seed)
    model = nn.Linear(16, 16, bias=False)
    opt = optimizer(model.parameters(), 1e-3, **settings)
    with_masters(model, opt, dtype="bf16", native=True, flat_master=True, state_dtype=states)
    return model, opt


def train(model, opt, steps, size=1.0):
    """Give each step in the range `steps` gradients of its own, about as large as `size`."""
    for i in steps:
        g = torch.randn(16, 16, generator=torch.Generator().manual_seed(i))
        model.weight.grad = size * g
        opt.step()


def second(model, opt):
    return opt.state[model.weight]["exp_avg_sq"].float()


def test_each_number_goes_to_a_neighbour_and_the_mean_stays():
    x = torch.randn(1000).repeat_interleave(400)
    noise = torch.randint(2**16, x.shape, dtype=torch.int32)
    out = round_stochastically(torch.empty(len(x), dtype=BF16), x, noise, 2**18).float()
    down = (x.view(torch.int32) & -65536).view(torch.float32)
    up = torch.where(down == x, down, ((x.view(torch.int32) & -65536) + 65536).view(torch.float32))
    assert ((out == down) | (out == up)).all() and (out == up).any() and (out == down).any()
    error = (out - x).view(1000, 400).mean(1) / (up - down).view(1000, 400)[:, 0]
    assert error.nan_to_num().abs().max() < 0.12  # 0.5 / sqrt(400) is 0.025, four times over


def test_a_second_moment_follows_gradients_that_shrink(monkeypatch):
    """Rounded to the nearest number it stands still: a thousandth is less than half a 256th."""
    ends = {}
    for name, states in (("float32", None), ("stochastic", SECOND), ("nearest", SECOND)):
        if name == "nearest":
            monkeypatch.setattr("mixedfp.engine.flat.SECOND_MOMENTS", frozenset())
        run = make_run(states)
        train(*run, range(50))
        before = second(*run).mean()
        train(*run, range(50, 350), size=1e-3)
        ends[name] = (second(*run).mean() / before).item()
    assert ends["float32"] == pytest.approx(0.999**300, rel=0.01)
    assert ends["stochastic"] == pytest.approx(ends["float32"], rel=0.02)
    assert ends["nearest"] > 0.95


def test_a_resumed_run_has_the_bits_of_an_unbroken_one():
    with small_chunks(48):
        whole = make_run(SECOND)
        train(*whole, range(20))
        first = make_run(SECOND)
        train(*first, range(10))
        file = io.BytesIO()
        torch.save({"model": first[0].state_dict(), "opt": first[1].state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        assert saved["opt"]["state"][0]["exp_avg_sq"].dtype == torch.float32
        second_run = make_run(SECOND, seed=1)
        second_run[0].load_state_dict(saved["model"])
        second_run[1].load_state_dict(saved["opt"])
        train(*second_run, range(10, 20))
    for a, b in ((whole, first), (whole, second_run)):
        is_same = torch.equal(second(*a), second(*b))
        assert is_same == (b is second_run)
    assert torch.equal(whole[0].weight, second_run[0].weight)


STATES = {
    "AdamW": dict.fromkeys(("exp_avg", "exp_avg_sq"), BF16),
    "AdamW amsgrad": {"max_exp_avg_sq": BF16},
    "NAdam": dict.fromkeys(("exp_avg", "exp_avg_sq"), BF16),
    "RAdam": dict.fromkeys(("exp_avg", "exp_avg_sq"), BF16),
    "RMSprop": {"square_avg": BF16},
    "Adagrad": {"sum": BF16},
    "Adadelta": dict.fromkeys(("square_avg", "acc_delta"), BF16),
}


@pytest.mark.parametrize("name", STATES)
def test_rows_without_gradients_stay_finite(name):
    kind, *flags = name.split()
    model, opt = make_run(STATES[name], getattr(torch.optim, kind), **dict.fromkeys(flags, True))
    before = model.weight.detach().clone()
    for _ in range(5):
        model.weight.grad = torch.ones(16, 16)
        model.weight.grad[:8] = 0
        opt.step()
    after = model.weight.detach()
    assert after.isfinite().all() and not torch.equal(after[8:], before[8:])
    states = opt.state[model.weight]
    assert all(s.float().isfinite().all() for s in states.values() if s.ndim)
    assert all(states[k].dtype == BF16 for k in STATES[name])


@pytest.mark.parametrize("name", ["exp_avg_sq", "sqr_avg", "square_avg"])
def test_a_second_moment_in_float16_is_refused_by_name(name):
    with pytest.raises(MixedPrecisionError, match=f"'{name}': torch.float16.*eps of 1e-8"):
        make_run({name: torch.float16})


def test_chunks_are_rounded_with_noise_of_their_own():
    with small_chunks(64):
        model = nn.Linear(1, 256, bias=False)
        nn.init.zeros_(model.weight)
        opt = torch.optim.AdamW(model.parameters(), 0.01)
        with_masters(model, opt, dtype=BF16, flat_master=True, state_dtype={"exp_avg_sq": BF16})
        for _ in range(3):
            opt.zero_grad()
            (0.37 * model(torch.ones(1, 1)).sum()).backward()  # all gradients are equal
            opt.step()
        rows = opt.state[model.weight]["exp_avg_sq"].view(4, 64)
    assert len({tuple(row.tolist()) for row in rows}) == 4
