"""Flat: gradients are slices of vectors where parameters are, and a step takes whole runs."""

import math

import pytest
import torch
from laws import read_late
from torch import nn
from torch.amp import GradScaler

from mixedfp import scaler as scalers
from mixedfp import step
from mixedfp.engine import rounded
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

X = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(0))
FUSED = {
    "SGD": (torch.optim.SGD, dict(lr=0.1, momentum=0.9)),
    "AdamW": (torch.optim.AdamW, dict(lr=0.01)),
    "Adagrad": (torch.optim.Adagrad, dict(lr=0.1)),
}


class Net(nn.Module):
    """Sizes are multiples of 64, so a CPU's fused kernels have no last numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, 64)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh())
        self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, 64, bias=False)

    def forward(self, x):
        """Return (4, 64) numbers."""
        return self.head(self.norm(self.layers(self.table(x)).mean(1)))


def fused_like_a_gpu(monkeypatch):
    """Take the fused kernels of this CPU for a GPU's: they may skip, and step whole runs."""
    monkeypatch.setattr(step, "_UNEVEN", set())
    read_late(monkeypatch)


def train(opt, flat, dtype="bf16", kind="guard", change=lambda i, model, opt: None, **settings):
    model = Net()
    opt = opt(model.parameters())
    with_masters(model, opt, dtype=dtype, flat_master=flat, **settings)
    make = {"LossScaler": LossScaler, "GradScaler": GradScaler}.get(kind)
    scaler = LossScaler(enabled=False) if make is None else make("cpu", 2.0**4, growth_interval=2)
    for i, factor in enumerate([1.0, 1.0, math.inf, 1.0, 1.0, math.nan, 1.0]):
        opt.zero_grad()
        scaler.scale(model(X).square().mean() * factor).backward()
        change(i, model, opt)
        scaler.step(opt)
        scaler.update()
    assert opt.masters.skipped == [2, 5]
    return [model.state_dict(), opt.state_dict()["state"]], opt


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("kind", ["guard", "LossScaler", "GradScaler"])
def test_a_fused_optimizer_steps_whole_runs_with_the_same_bits(kind, name, dtype, monkeypatch):
    fused_like_a_gpu(monkeypatch)
    make, settings = FUSED[name]
    each, _ = train(lambda ps: make(ps, **settings, fused=True), False, dtype, kind)
    flat, opt = train(lambda ps: make(ps, **settings, fused=True), True, dtype, kind)
    assert_same(flat, each)
    sizes = [len(chunk.param) for chunks in opt.master_step.loop.calls for chunk in chunks]
    # what has 16-bit copies; and what is gathered: the table and the batch norm
    assert len(opt.master_step.loop.calls) == 1 and sizes == [8384, 4224]


def test_gradients_are_checked_as_few_tensors(monkeypatch):
    seen = []
    check = scalers.any_nonfinite
    monkeypatch.setattr(scalers, "any_nonfinite", lambda g, f: seen.append(len(g)) or check(g, f))
    _, opt = train(lambda ps: torch.optim.SGD(ps, 0.1), True)
    n_params = len(list(opt.masters.model.parameters()))
    assert set(seen) == {len(opt.master_step.loop.grads())} and seen[0] < n_params


def replaced(i, model, opt):
    """Replace gradients, as users and hooks do."""
    if i == 1:
        model.head.weight.grad = model.head.weight.grad.clone()
    if i == 4:
        norm = model.layers[1]
        norm.weight.grad, norm.bias.grad = norm.bias.grad, norm.weight.grad
    if i == 6:
        model.layers[0].bias.grad = None


def turned(i, model, opt):
    """Give a gradient other strides at the same address."""
    if i == 3 and not opt.defaults["fused"]:  # PyTorch's fused kernels ignore strides
        model.head.weight.grad = model.head.weight.grad.t()


def forgotten(i, model, opt):
    """Begin anew with the state of one parameter."""
    if i == 3:
        opt.state.pop(model.head.weight)
    if i == 5:
        state = opt.state[model.head.weight]
        opt.state[model.head.weight] = {k: torch.zeros_like(v) for k, v in state.items()}


def accumulated(i, model, opt):
    """Add a second backward pass; a third builds a graph, so its sums are new tensors."""
    model(X).sum().backward()
    model(X).mean().backward(create_graph=i == 4)


def clipped(i, model, opt):
    """Change gradients in place."""
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("change", [replaced, turned, forgotten, accumulated, clipped])
def test_whatever_becomes_of_gradients_the_bits_are_those_of_a_master_each(
    change, fused, monkeypatch
):
    fused_like_a_gpu(monkeypatch)
    each, _ = train(lambda ps: torch.optim.AdamW(ps, fused=fused), False, change=change)
    flat, _ = train(lambda ps: torch.optim.AdamW(ps, fused=fused), True, change=change)
    assert_same(flat, each)


def test_two_passes_through_one_graph_share_no_memory():
    model = nn.Linear(64, 64)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with_masters(model, opt, dtype="bf16", flat_master=True)
    loss = model(torch.ones(2, 64)).sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(3 * loss, list(model.parameters()))
    assert_same(list(first), kept)
    assert_same(list(second), [3 * g for g in kept])


def test_gaps_between_gradients_are_zero():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))  # no size is a multiple of 16
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with_masters(model, opt, dtype="bf16", flat_master=True)
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
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with_masters(model, opt, dtype="bf16", flat_master=True)
    order = []
    for i, m in enumerate(model):
        m.weight.register_post_accumulate_grad_hook(lambda p, i=i: order.append(i))
        m.register_full_backward_hook(lambda m, *_, i=i: order.append(f"module {i}"))
    model(torch.ones(2, 64, requires_grad=True)).sum().backward()
    assert order.index(3) < order.index("module 1")


def test_gradients_are_neighbours_again_after_a_step_in_which_one_was_not():
    def change(i, model, opt):
        if i == 3:
            model.head.weight.grad = model.head.weight.grad.clone()
        opt.master_step.loop.grads()
        sizes.append(sorted(run.n for run in opt.master_step.loop.runs))

    sizes = []
    train(lambda ps: torch.optim.SGD(ps, 0.1), True, change=change)
    assert sizes[3] != sizes[2] == sizes[4]


def test_a_group_of_gradients_has_no_room_for_what_lies_between():
    model = Net()
    groups = [{"params": [*model.table.parameters(), *model.head.parameters()]}]
    groups += [{"params": [*model.layers.parameters(), *model.norm.parameters()], "lr": 1.0}]
    opt = torch.optim.SGD(groups, 0.1)
    with_masters(model, opt, dtype="bf16", flat_master=True)
    for lo, hi, (_, n, _) in opt.masters.copies.groups:
        assert n == sum(p.numel() for p in opt.masters.copies.params[lo:hi])


@pytest.mark.parametrize("n_out", [32, 128])
def test_a_layer_that_changes_its_size_between_steps_trains_on(n_out):
    model = nn.Linear(64, 64)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with_masters(model, opt, dtype="bf16", flat_master=True)
    weight, bias = torch.randn(n_out, 64), torch.randn(n_out)
    model.weight.data, model.bias.data = weight.clone(), bias.clone()
    model(torch.ones(2, 64)).sum().backward()
    opt.step()
    assert_same(model.weight.detach(), weight - 0.1 * 2)
    assert_same(model.bias.detach(), bias - 0.1 * 2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("in_hook", [False, True])
def test_gradients_that_are_set_between_the_check_and_the_step_count(fused, in_hook, monkeypatch):
    fused_like_a_gpu(monkeypatch)
    found = []
    for flat in (False, True):
        model = Net()
        opt = torch.optim.AdamW(model.parameters(), 0.01, fused=fused)
        with_masters(model, opt, dtype="bf16" if in_hook else "fp16", flat_master=flat)
        scaler = LossScaler("cpu", 2.0**4, enabled=not in_hook)

        def change(*_, model=model):
            for p in model.parameters():
                p.grad.data = p.grad.data.clamp(-1e-4, 5e-5)  # the same tensor, other memory

        if in_hook:  # of a step that checks the gradients itself
            opt.register_step_pre_hook(change)
        for _ in range(3):
            opt.zero_grad()
            scaler.scale(model(X).square().mean()).backward()
            if not in_hook:
                scaler.unscale_(opt)
                change()
            scaler.step(opt)
            scaler.update()
        found.append([model.state_dict(), opt.state_dict()["state"]])
    assert_same(*found)
