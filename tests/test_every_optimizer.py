"""Every optimizer of pytorch_optimizer and timm under two laws, nightly (`--all-rows`)."""

from collections import deque

import pytest
import torch
from torch import Tensor, nn

from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same

others = pytest.importorskip("pytorch_optimizer")
of_timm = pytest.importorskip("timm.optim")

EVERY = [f"pytorch_optimizer.{k}" for k in others.get_supported_optimizers()]
EVERY += [f"timm.{k}" for k in of_timm.list_optimizers()]
MATRICES = "adago adamuon distributedmuon muon muonclip normuon".split()  # these are told which
SETTINGS = dict(bsam=dict(num_data=20, foreach=False), ranger21=dict(num_iterations=20))
SECOND_ORDER = "adahessian sophiah".split()
CLOSURE = "alig bsam lbfgs".split()  # needed; two of them call it again, where no step is skipped
LEFT_OUT = dict(
    adalomo="steps in the backward pass",
    bnb="needs CUDA",
    demo="needs einops",
    distributedmuon="needs a process group",
    fused="needs CUDA and apex",
    lomo="steps in the backward pass",
)


def pytest_generate_tests(metafunc):
    """Make a test of each, but not on each push."""
    names = EVERY if metafunc.config.getoption("--all-rows") else []
    metafunc.parametrize("full_name", names)


def optimizer_over(model, full_name):
    package, _, name = full_name.partition(".")
    params = list(model.parameters())
    if package == "timm":
        return of_timm.create_optimizer_v2(params, opt=name, lr=0.01, weight_decay=0.01)
    matrices = [p for p in params if p.ndim == 2]
    if name == "adammini":
        params = model
    elif name == "spectralsphere":
        params = matrices
    elif name in MATRICES:
        rest = [p for p in params if p.ndim != 2]
        params = [dict(params=matrices, use_muon=True), dict(params=rest, use_muon=False)]
    return others.load_optimizer(name)(params, lr=0.01, **SETTINGS.get(name, {}))


def opened(state):
    """What a state contains, also in objects."""
    if isinstance(state, dict):
        return {k: opened(v) for k, v in state.items()}
    if isinstance(state, list | tuple | deque):
        return [opened(v) for v in state]
    is_object = hasattr(state, "__dict__") and not isinstance(state, Tensor)
    return opened(vars(state)) if is_object else state


def train(full_name, **settings):
    """Take steps, each second one with a closure."""
    torch.manual_seed(0)
    name = full_name.partition(".")[2]
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    opt = optimizer_over(model, full_name)
    if settings:
        with_masters(model, opt, native=True, **settings)
    if hasattr(opt, "train"):
        opt.train()
    for i in range(6):
        x, y = torch.randn(5, 6), torch.randn(5, 3)

        @torch.enable_grad()
        def closure():
            opt.zero_grad()
            loss = (model(x) - y).square().mean()  # noqa: B023
            loss.backward(create_graph=name in SECOND_ORDER)
            return loss

        closure()
        opt.step(closure) if i % 2 or name in CLOSURE else opt.step()
    assert all(p.isfinite().all() for p in model.parameters())
    return [opened(o.state_dict()) for o in (model, opt)]


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_steps_masters_as_it_steps_weights(full_name):
    """In float32 it is plain training; in bfloat16 flat and unguarded steps have the same bits."""
    name = full_name.partition(".")[2]
    for left_out, why in LEFT_OUT.items():
        if name == left_out or full_name.startswith(f"timm.{left_out}"):
            pytest.skip(why)
    assert_same(train(full_name, dtype="float32"), train(full_name))
    unguarded = train(full_name, dtype="bf16", skip_nonfinite=False)
    assert_same(train(full_name, dtype="bf16", skip_nonfinite=False, flat_master=True), unguarded)
    for flat in (False, True):
        if name in ("bsam", "lbfgs"):
            with pytest.raises(MixedPrecisionError, match="calls its closure several times"):
                train(full_name, dtype="bf16", flat_master=flat)
        else:
            assert_same(train(full_name, dtype="bf16", flat_master=flat), unguarded)
