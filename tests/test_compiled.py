"""`torch.compile` around a model in 16 bits: as many graphs as under autocast, and no break."""

import copy
import warnings

import pytest
import torch
from tiny import make_learner
from torch import nn
from torch._dynamo.utils import counters

import mixedfp.callback  # noqa: F401, puts `to_bf16` on Learners
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

COMPILED = {
    "not": lambda o: o,
    "around": lambda o: torch.compile(o, backend="aot_eager"),
    "in place": lambda model: model.compile(backend="aot_eager") or model,
}
hows = pytest.mark.parametrize("how", ["around", "in place"])
flats = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
both = pytest.mark.parametrize("dtype", ["bf16", "fp16"])


class Net(nn.Module):
    """A forward pass of a user's: PyTorch 2.10 compiles no `nn.Sequential` in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        return self.linear(self.norm(self.conv(x)).relu().mean((2, 3)))


class Run:
    """A loop of training, accumulation and evaluation, whose graphs are counted."""

    def __init__(self, how, flat=None, dtype="bf16", is_first=False):
        torch._dynamo.reset()
        counters.clear()
        self.model, self.autocasts = Net(), flat is None
        self.opt = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.call = COMPILED[how](self.model) if is_first else self.model
        if flat is not None:
            found, _ = with_masters(self.call, self.opt, dtype=dtype, flat_master=flat)
            assert found is self.call
        if not is_first:
            self.call = COMPILED[how](self.model)
        is_scaled = dtype == "fp16" and flat is not None
        self.scaler, self.losses = LossScaler("cpu", 2.0**10, enabled=is_scaled), []

    def loss(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocasts):
            loss = self.call(x).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def backward(self, *batches):
        for i in batches:
            x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(i))
            self.scaler.scale(self.loss(x)).backward()

    def step(self, set_to_none=True):
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad(set_to_none)

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            self.loss(torch.ones(4, 3, 8, 8))
        self.model.train()

    def train(self):
        """Evaluate, step, accumulate, evaluate between backward and step, keep zeroed gradients."""
        self.evaluate()
        self.backward(0)
        self.step()
        self.backward(1, 2)
        self.evaluate()
        self.step(set_to_none=False)
        self.backward(3)
        self.step()
        return self

    @staticmethod
    def count():
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@flats
@both
@hows
def test_there_are_as_many_graphs_as_under_autocast_and_a_skip_changes_nothing(how, dtype, flat):
    Run(how).train()
    expected = Run.count()
    assert expected[1] == 0
    run = Run(how, flat, dtype).train()
    assert Run.count() == expected
    before = copy.deepcopy((run.model.state_dict(), run.opt.state_dict()))
    run.backward(4)
    run.model.conv.weight.grad[0] = float("nan")
    run.step()
    assert_same((run.model.state_dict(), run.opt.state_dict()), before)
    assert run.opt.masters.n_skipped == 1
    eager = Run("not", flat, dtype).train()
    assert run.losses[:-1] == pytest.approx(eager.losses, rel=2**-7)


@flats
def test_a_compiled_model_may_be_given(flat):
    run = Run("around", flat, is_first=True).train()
    assert run.count()[1] == 0
    assert run.losses == Run("around", flat).train().losses
    run.opt.masters.restore()
    assert "forward" not in vars(run.model)


@both
@hows
def test_a_learner_trains_a_compiled_model(how, dtype):
    ends = []
    for kind in ("not", how):
        torch._dynamo.reset()
        counters.clear()
        learn = make_learner()
        learn.model = COMPILED[kind](learn.model)
        getattr(learn, f"to_{dtype}")(flat_master=True)
        with warnings.catch_warnings():
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


@flats
def test_a_compiled_step_and_a_compiled_clip_do_what_they_do_uncompiled(flat):
    ends = []
    for how in ("not", "around"):
        run = Run("not", flat)
        clip, step = COMPILED[how](halve), COMPILED[how](run.opt.step)
        for i in range(3):
            run.backward(i)
            run.losses.append(clip(list(run.model.parameters())).item())
            step()
            run.opt.zero_grad()
        ends.append((run.losses, run.model.state_dict(), run.opt.state_dict()))
    assert_same(*ends)
