"""Flat: gradients are slices of vectors where parameters are, and a step takes whole runs.

At the end `state_dtype=`: second moments in bfloat16 move, are reproducible, and stay finite.
"""

import math
import weakref
from functools import partial

import pytest
import torch
from laws import FUSED, read_late, small_chunks
from torch import nn, optim
from torch.amp import GradScaler

from mixedfp import scaler as scalers
from mixedfp import step
from mixedfp.engine import rounded
from mixedfp.formats import MixedPrecisionError, round_stochastically
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

X = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(0))
FACTORS = [1.0, 1.0, math.inf, 1.0, 1.0, math.nan, 1.0, math.inf, math.nan, 1.0]


class Net(nn.Module):
    """Sizes are multiples of 64, so a CPU's fused kernels have no last numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, 64)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh())
        self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.head(self.norm(self.layers(self.table(x)).mean(1)))


def flat_sgd(model, groups=None):
    opt = optim.SGD(groups or model.parameters(), 0.1)
    with_masters(model, opt, dtype="bf16", flat_master=True)
    return opt


def train(opt, flat, dtype="bf16", kind="guard", change=lambda *_: None):
    """Return what a step changes and the scales, and the optimizer."""
    model = Net()
    opt = opt(model.parameters())
    if kind != "no masters":
        with_masters(model, opt, dtype=dtype, flat_master=flat)
    make = {"guard": partial(LossScaler, enabled=False), "GradScaler": GradScaler}
    scaler = make.get(kind, LossScaler)("cpu", 2.0**4, growth_interval=2)
    for i, factor in enumerate(FACTORS):
        opt.zero_grad()
        scaler.scale(model(X).square().mean() * factor).backward()
        change(i, model, opt, scaler)
        scaler.step(opt)
        scaler.update()
    counts = [scaler.skipped] if make.get(kind) is None else []
    counts += [opt.masters.skipped] if kind != "no masters" else []
    assert all(skipped == [2, 5, 7, 8] for skipped in counts)
    scales = getattr(scaler, "scales", None), scaler.get_scale()
    return [model.state_dict(), opt.state_dict()["state"], *scales], opt


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("kind", ["guard", "LossScaler", "GradScaler", "no masters"])
def test_a_fused_optimizer_has_the_same_bits_read_late_and_in_whole_runs(
    kind, name, dtype, monkeypatch
):
    flats = [False] if kind == "no masters" else [False, True]
    found = [train(FUSED[name], flat, dtype, kind)[0] for flat in flats]
    read_late(monkeypatch)
    found += [train(FUSED[name], flat, dtype, kind)[0] for flat in flats]
    if kind != "no masters":
        monkeypatch.setattr(step, "_UNEVEN", set())  # as on a GPU
        whole, opt = train(FUSED[name], True, dtype, kind)
        found.append(whole)
        sizes = [len(chunk.param) for chunks in opt.master_step.loop.calls for chunk in chunks]
        # what has 16-bit copies; and what is gathered: the table and the batch norm
        assert len(opt.master_step.loop.calls) == 1 and sizes == [8384, 4224]
    for other in found[1:]:
        assert_same(other, found[0])


def test_gradients_are_checked_as_few_tensors(monkeypatch):
    seen = []
    check = scalers.any_nonfinite
    monkeypatch.setattr(scalers, "any_nonfinite", lambda g, f: seen.append(len(g)) or check(g, f))
    _, opt = train(partial(optim.SGD, lr=0.1), True)
    n_params = len(list(opt.masters.model.parameters()))
    assert set(seen) == {len(opt.master_step.loop.grads())} and seen[0] < n_params


def replaced(i, model, *_):
    """Replace gradients, as users and hooks do."""
    if i == 1:
        model.head.weight.grad = model.head.weight.grad.clone()
    if i == 4:
        norm = model.layers[1]
        norm.weight.grad, norm.bias.grad = norm.bias.grad, norm.weight.grad
    if i == 6:
        model.layers[0].bias.grad = None


def turned(i, model, opt, _):
    """Give a gradient other strides at the same address."""
    if i == 3 and not opt.defaults["fused"]:  # PyTorch's fused kernels ignore strides
        model.head.weight.grad = model.head.weight.grad.t()


def forgotten(i, model, opt, _):
    """Begin anew with the state of one parameter."""
    if i == 3:
        opt.state.pop(model.head.weight)
    if i == 6:
        state = opt.state[model.head.weight]
        opt.state[model.head.weight] = {k: torch.zeros_like(v) for k, v in state.items()}


def accumulated(i, model, *_):
    """Add a second backward pass; a third builds a graph, so its sums are new tensors."""
    model(X).sum().backward()
    model(X).mean().backward(create_graph=i == 4)


def clipped(i, model, *_):
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def moved(i, model, opt, scaler):
    """Have the same gradients hold other memory, after they are checked."""
    scaler.unscale_(opt)
    for p in model.parameters():
        p.grad.data = p.grad.data.clamp(-1e-4, 5e-5)


def moved_in_a_hook(i, model, opt, scaler):
    """Do this in a hook of a step that checks the gradients itself."""
    if i == 0:
        opt.register_step_pre_hook(lambda *_: moved(i, model, opt, scaler))


CHANGES = [replaced, turned, forgotten, accumulated, clipped, moved_in_a_hook]


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "change, how", [*((f, {}) for f in CHANGES), (moved, dict(dtype="fp16", kind="LossScaler"))]
)
def test_whatever_becomes_of_gradients_the_bits_are_those_of_a_master_each(
    change, how, fused, monkeypatch
):
    read_late(monkeypatch)
    monkeypatch.setattr(step, "_UNEVEN", set())
    opt = partial(optim.AdamW, lr=0.01, fused=fused)
    each, flat = (train(opt, flat, change=change, **how)[0] for flat in (False, True))
    assert_same(flat, each)


def test_two_passes_through_one_graph_share_no_memory():
    model = nn.Linear(64, 64)
    flat_sgd(model)
    loss = model(torch.ones(2, 64)).sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(3 * loss, list(model.parameters()))
    assert_same(list(first), kept)
    assert_same(list(second), [3 * g for g in kept])


def test_gaps_between_gradients_are_zero():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))  # no size is a multiple of 16
    opt = flat_sgd(model)
    before = torch.full((2**12,), math.nan)  # memory that may be used again
    del before
    model(torch.ones(2, 3)).sum().backward()
    (whole,) = opt.master_step.loop.grads()
    n_params = sum(p.numel() for p in model.parameters())
    assert len(whole) > n_params and whole.isfinite().all()
    assert whole.count_nonzero() <= n_params


def test_small_groups_send_their_gradients_before_the_backward_pass_ends(monkeypatch):
    monkeypatch.setattr(rounded, "GROUP", 2**10)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    flat_sgd(model)
    order = []
    for i, m in enumerate(model):
        m.weight.register_post_accumulate_grad_hook(lambda p, i=i: order.append(i))
        m.register_full_backward_hook(lambda m, *_, i=i: order.append(f"module {i}"))
    model(torch.ones(2, 64, requires_grad=True)).sum().backward()
    assert order.index(3) < order.index("module 1")


def test_gradients_are_neighbours_again_after_a_step_in_which_one_was_not():
    def change(i, model, opt, _):
        if i == 3:
            model.head.weight.grad = model.head.weight.grad.clone()
        opt.master_step.loop.grads()
        sizes.append(sorted(run.n for run in opt.master_step.loop.runs))

    sizes = []
    train(partial(optim.SGD, lr=0.1), True, change=change)
    assert sizes[3] != sizes[2] == sizes[4]


def test_a_group_of_gradients_has_no_room_for_what_lies_between():
    model = Net()
    groups = [{"params": [*model.table.parameters(), *model.head.parameters()]}]
    groups += [{"params": [*model.layers.parameters(), *model.norm.parameters()], "lr": 1.0}]
    copies = flat_sgd(model, groups).masters.copies
    for lo, hi, (_, n, _) in copies.groups:
        assert n == sum(p.numel() for p in copies.params[lo:hi])


@pytest.mark.parametrize("n_out", [32, 128])
def test_a_layer_that_changes_its_size_between_steps_trains_on(n_out):
    model = nn.Linear(64, 64)
    opt, before = flat_sgd(model), [torch.randn(n_out, 64), torch.randn(n_out)]
    for p, value in zip(model.parameters(), before, strict=True):
        p.data = value.clone()
    model(torch.ones(2, 64)).sum().backward()
    opt.step()
    assert_same([p.detach() for p in model.parameters()], [value - 0.2 for value in before])


# States in 16 bits

BF16 = torch.bfloat16
SECOND = {"exp_avg_sq": BF16}


def make_run(states, optimizer=optim.AdamW):
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    opt = optimizer(model.parameters(), 1e-3)
    with_masters(model, opt, dtype="bf16", native=True, flat_master=True, state_dtype=states)
    return model, opt


def moments(model, opt, steps, size=1.0):
    """Give each step in the range `steps` gradients of its own, about as large as `size`."""
    for i in steps:
        g = torch.randn(16, 16, generator=torch.Generator().manual_seed(i))
        model.weight.grad = size * g
        opt.step()
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
        before = moments(*run, range(50)).mean()
        ends[name] = (moments(*run, range(50, 350), size=1e-3).mean() / before).item()
    assert ends["float32"] == pytest.approx(0.999**300, rel=0.01)
    assert ends["stochastic"] == pytest.approx(ends["float32"], rel=0.02)
    assert ends["nearest"] > 0.95


STATES = "exp_avg exp_avg_sq max_exp_avg_sq square_avg acc_delta sum".split()


@pytest.mark.parametrize("name", "AdamW NAdam RAdam RMSprop Adagrad Adadelta amsgrad".split())
def test_rows_without_gradients_stay_finite(name):
    make = partial(optim.Adam, amsgrad=True) if name == "amsgrad" else getattr(optim, name)
    model, opt = make_run(dict.fromkeys(STATES, BF16), make)
    before = model.weight.detach().clone()
    for _ in range(5):
        model.weight.grad = torch.ones(16, 16)
        model.weight.grad[:8] = 0
        opt.step()
    after = model.weight.detach()
    assert after.isfinite().all() and not torch.equal(after[8:], before[8:])
    states = [s for s in opt.state[model.weight].values() if s.ndim]
    assert states and all(s.dtype == BF16 and s.float().isfinite().all() for s in states)


@pytest.mark.parametrize("name", ["exp_avg_sq", "sqr_avg", "square_avg"])
def test_a_second_moment_in_float16_is_refused_by_name(name):
    with pytest.raises(MixedPrecisionError, match=f"'{name}': torch.float16.*small squares"):
        make_run({name: torch.float16})


def test_chunks_are_rounded_with_noise_of_their_own_and_random_numbers_are_left():
    model, opt = make_run(SECOND)
    before = torch.get_rng_state()
    with small_chunks(64):
        for _ in range(3):
            model.weight.grad = torch.full((16, 16), 0.37)
            opt.step()
    assert_same(torch.get_rng_state(), before)
    rows = opt.state[model.weight]["exp_avg_sq"].view(4, 64)
    assert len({tuple(row.tolist()) for row in rows}) == 4


@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_gradients_are_freed_when_they_are_cleared_also_after_a_skip(factor):
    model = Net()
    model, opt = with_masters(model, torch.optim.AdamW(model.parameters()), flat_master=True)
    (model(X).square().mean() * factor).backward()
    opt.step()
    grads = [weakref.ref(p.grad) for p in model.parameters()]
    opt.zero_grad()
    assert not any(ref() is not None for ref in grads)


def copied(model, opt):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector, model.parameters())


def shared(model, opt):
    model.share_memory()


def restarted(model, opt):
    for state in opt.state.values():
        state.update(exp_avg=torch.zeros_like(state["exp_avg"]), step=torch.tensor(0.0))


@pytest.mark.parametrize("between", [copied, shared, restarted])
def test_changes_between_steps_have_the_same_effect_as_without_vectors(between):
    ends = []
    for flat in (False, True):
        model = Net()
        model, opt = with_masters(model, optim.AdamW(model.parameters()), flat_master=flat)
        for _ in range(3):
            model(X).square().mean().backward()
            opt.step()
            opt.zero_grad()
            between(model, opt)
        ends.append((dict(model.state_dict()), opt.state_dict()["state"]))
    assert_same(*ends)
