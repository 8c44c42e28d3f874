"""`torch.compile` around a model in 16 bits: as many graphs as under autocast, and no break."""

import copy
import warnings

import pytest
import tiny
import torch
from torch import nn
from torch._dynamo.utils import counters

import mixedfp.callback  # noqa: F401, puts `to_bf16` on Learners
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

LAYOUTS = {"a master each": {}, "flat": dict(flat_master=True)}


class Net(nn.Module):
    """A forward pass of a user's: PyTorch 2.10 compiles no `nn.Sequential` in place."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        return self.linear(self.norm(self.conv(x)).relu().mean((2, 3)))


def make_model():
    torch.manual_seed(0)
    return Net()


def compiled_around(model):
    return torch.compile(model, backend="aot_eager")


def compiled_in_place(model):
    model.compile(backend="aot_eager")
    return model


def not_compiled(model):
    return model


class Run:
    """A loop of training, accumulation and evaluation, whose graphs are counted."""

    def __init__(self, compile_, settings=None, dtype="bf16", first=False):
        torch._dynamo.reset()
        counters.clear()
        self.model, self.is_plain = make_model(), settings is None
        self.opt = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.call = compile_(self.model) if first else None
        if not self.is_plain:
            given = self.model if self.call is None else self.call
            found, _ = with_masters(given, self.opt, dtype=dtype, **settings)
            assert found is given
        self.call = compile_(self.model) if self.call is None else self.call
        enabled = dtype == "fp16" and not self.is_plain
        self.scaler, self.losses = LossScaler("cpu", 2.0**10, enabled=enabled), []

    def backward(self, i):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(i))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_plain):
            loss = self.call(x).float().square().mean()
        self.scaler.scale(loss).backward()
        self.losses.append(loss.item())

    def step(self, set_to_none=True):
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad(set_to_none)

    def evaluate(self):
        self.model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.is_plain):
            self.losses.append(self.call(torch.ones(4, 3, 8, 8)).sum().item())
        self.model.train()

    def train(self):
        """Evaluate, step, accumulate, evaluate between backward and step, keep zeroed gradients."""
        self.evaluate()
        self.backward(0)
        self.step()
        self.backward(1)
        self.backward(2)
        self.evaluate()
        self.step(set_to_none=False)
        self.backward(3)
        self.step()
        return self

    @staticmethod
    def count():
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("compile_", [compiled_around, compiled_in_place])
def test_there_are_as_many_graphs_as_under_autocast_and_the_same_bits(compile_, dtype, layout):
    Run(compile_).train()
    expected = Run.count()
    assert expected[1] == 0
    run = Run(compile_, LAYOUTS[layout], dtype).train()
    assert Run.count() == expected
    eager = Run(not_compiled, LAYOUTS[layout], dtype).train()
    assert run.losses == pytest.approx(eager.losses, rel=2**-7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_model_may_be_given(layout):
    run = Run(compiled_around, LAYOUTS[layout], first=True).train()
    assert run.count()[1] == 0
    assert run.losses == Run(compiled_around, LAYOUTS[layout]).train().losses
    run.opt.masters.restore()
    assert "forward" not in vars(run.model)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_skip_changes_nothing(dtype):
    run = Run(compiled_around, LAYOUTS["flat"], dtype).train()
    before = copy.deepcopy((run.model.state_dict(), run.opt.state_dict()))
    run.backward(4)
    run.model.conv.weight.grad[0] = float("nan")
    run.step()
    assert_same((run.model.state_dict(), run.opt.state_dict()), before)
    assert run.opt.masters.n_skipped == 1


@pytest.mark.parametrize("compile_", [compiled_around, compiled_in_place])
@pytest.mark.parametrize("to", ["to_bf16", "to_fp16"])
def test_a_learner_trains_a_compiled_model(compile_, to):
    ends = []
    for how in (not_compiled, compile_):
        torch._dynamo.reset()
        counters.clear()
        learn = tiny.make_learner()
        learn.model = how(learn.model)
        getattr(learn, to)(flat_master=True)
        with learn.no_bar(), learn.no_logging(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            learn.validate()  # compiled while no gradient is there
            torch.manual_seed(0)
            learn.fit(1)
        ends.append([float(loss) for loss in learn.recorder.losses])
        assert sum(counters["graph_break"].values()) == 0
    assert ends[1] == pytest.approx(ends[0], rel=2**-6)


def halve(params):
    """Clip by hand: a function that reads and writes gradients."""
    for p in params:
        p.grad.mul_(0.5)
    return sum(p.grad.norm() for p in params)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_step_and_a_compiled_clip_do_what_they_do_uncompiled(layout):
    ends = []
    for compile_ in (not_compiled, compiled_around):
        run = Run(not_compiled, LAYOUTS[layout])
        clip, step = compile_(halve), compile_(run.opt.step)
        for i in range(3):
            run.backward(i)
            run.losses.append(clip(list(run.model.parameters())).item())
            step()
            run.opt.zero_grad()
        ends.append((run.losses, run.model.state_dict(), run.opt.state_dict()))
    assert_same(*ends)
