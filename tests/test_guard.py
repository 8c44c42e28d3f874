"""One guard decides about steps: by hand, with scalers, a closure, in a Learner, in skorch.

Each front end trains a weight over batches of which some overflow; all must skip the same ones,
and stop after the same number of skips in a row.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
from fastai.basics import DataLoaders, Learner
from fastai.optimizer import SGD as FastaiSGD
from skorch import NeuralNet
from torch import nn
from torch.amp import GradScaler

import mixedfp.callback  # noqa: F401, puts `to_fp16` on Learners
from mixedfp.cast import Policy
from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.skorch import MixedPrecisionMixin
from mixedfp.step import MixedTraining

SCALE = dict(init_scale=8.0, growth_interval=3)


class Net(nn.Module):
    """A weight and a count of batches, which a skip restores."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        """Multiply."""
        if self.training:
            self.count += 1
        return x @ self.weight


def by_hand(dtype, factors, flat, kind="opt", has_closure=False):
    """Train in a loop; `factors` of the loss are 1, inf or nan."""
    net = Net()
    opt = torch.optim.SGD(net.parameters(), 2.0**-10)
    with_masters(net, opt, dtype=dtype, flat_master=flat)
    make = {"LossScaler": LossScaler, "GradScaler": GradScaler}.get(kind)
    scaler = None if make is None else make("cpu", **SCALE)
    x = torch.ones(1, 1)
    for factor in factors:

        def closure(factor=factor):
            opt.zero_grad()
            loss = net(x).sum() * factor
            (loss if scaler is None else scaler.scale(loss)).backward()
            return loss

        if has_closure:
            opt.step(closure)
            continue
        closure()
        if scaler is None:
            opt.step()
        else:
            scaler.step(opt)
            scaler.update()
    return net, opt.masters.skipped


def by_trainer(dtype, factors, flat):
    """Train as a trainer does."""
    scaler = LossScaler("cpu", **SCALE) if dtype == "fp16" else None
    net, mixed = Net(), MixedTraining(Policy(dtype, flat_master=flat), scaler)
    opt = torch.optim.SGD(net.parameters(), lr=2.0**-10)
    mixed.attach(net)
    mixed.wrap(opt)
    for factor in factors:
        opt.zero_grad()
        mixed.scaler.scale(net(torch.ones(1, 1)).sum() * factor).backward()
        mixed.opt.skip() if mixed.opt.look() is True else opt.step()
        mixed.scaler.update()
    return net, mixed.scaler.skipped


def by_learner(dtype, factors, flat):
    """Train a Learner; the factor is the target."""
    batches = [(torch.ones(1, 1), torch.full((1, 1), f)) for f in factors]
    learn = Learner(
        DataLoaders(batches, batches[:1]),
        Net(),
        loss_func=lambda out, y: (out * y).sum(),
        opt_func=FastaiSGD,
        lr=2.0**-10,
        train_bn=False,
    )
    learn.to_bf16(flat_master=flat) if dtype == "bf16" else learn.to_fp16(8.0, flat_master=flat)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, wd=0.0)
    return learn.model, learn.mp_cb.skipped


class SkorchNet(MixedPrecisionMixin, NeuralNet):
    """Its loss is the output times the target."""

    def get_loss(self, y_pred, y_true, *args, **kwargs):
        """Return the loss."""
        return (y_pred * y_true).sum()


def by_skorch(dtype, factors, flat):
    """Train a skorch net with masters."""
    net = SkorchNet(
        Net,
        nn.MSELoss,
        amp_enabled=True,
        amp_dtype=dtype,
        flat_master=flat,
        train_split=None,
        max_epochs=1,
        batch_size=1,
        lr=2.0**-10,
        verbose=0,
        callbacks=None,
        callbacks__print_log=None,
        **({"grad_scaler__init_scale": 8.0} if dtype == "fp16" else {}),
    ).initialize()
    net.partial_fit(np.ones((len(factors), 1), np.float32), np.array(factors, np.float32)[:, None])
    return net.module_, net.optimizer_.masters.skipped


FRONTS = {
    "a loop": by_hand,
    "a closure": lambda *a: by_hand(*a, has_closure=True),
    "LossScaler": lambda *a: by_hand(*a, kind="LossScaler"),
    "GradScaler": lambda *a: by_hand(*a, kind="GradScaler"),
    "MixedTraining": by_trainer,
    "a Learner": by_learner,
    "skorch": by_skorch,
}


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_a_skip_changes_nothing_and_30_in_a_row_stop_the_training(front, dtype, flat):
    bad = [(math.inf, math.nan)[i % 8 // 4] if i % 4 == 3 else 1.0 for i in range(140)]
    factors = [1.0, *bad, 1.0]  # 35 skips
    net, skipped = FRONTS[front](dtype, factors, flat)
    assert skipped == [i for i, f in enumerate(factors) if f != 1.0]
    n = len(factors) - len(skipped)
    assert net.state_dict()["weight"].item() == -n * 2.0**-10
    assert net.count == n
    FRONTS[front](dtype, [1.0] + 29 * [math.inf] + [1.0] + 29 * [math.nan] + [1.0], flat)
    with pytest.raises(MixedPrecisionError, match="30 steps in a row were skipped") as e:
        FRONTS[front](dtype, [1.0] + 30 * [math.inf] + [1.0], flat)
    assert "in the gradients of weight. " in str(e.value)


@pytest.mark.parametrize("front", ["a loop", "MixedTraining", "a Learner", "skorch"])
def test_where_no_scale_explains_a_skip_there_is_one_warning(front, warnings_of):
    FRONTS[front]("bf16", [1.0, math.inf, 1.0, math.nan], False)
    assert len([text for text in warnings_of() if text.startswith("a step was skipped")]) == 1


def test_of_two_optimizers_each_has_its_own_count():
    nets = nn.ModuleList([Net(), Net()])
    opts = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    with_masters(nets, *opts, dtype="bf16")
    with pytest.raises(MixedPrecisionError, match="30 steps in a row"):
        for _ in range(31):
            for net, opt, factor in zip(nets, opts, (1.0, math.inf), strict=True):
                opt.zero_grad()
                (net(torch.ones(1, 1)).sum() * factor).backward()
                opt.step()
    assert nets[0].count == 30 and opts[0].masters.n_skipped == 30


def test_the_verdict_is_a_value_and_the_gradients_are_read_once(monkeypatch):
    net = Net()
    net, opt = with_masters(net, torch.optim.SGD(net.parameters(), 0.1), dtype="bf16")
    scaler = LossScaler(init_scale=8.0)
    scaler.scale(net(torch.ones(1, 1)).sum() * math.inf).backward()
    known = scaler.look(opt)
    monkeypatch.setattr("mixedfp.scaler._find", None)
    assert known is scaler.look(opt) and known.found_inf and known.inv_scale is None
    assert scaler.step(opt) is False
    scaler.update()
    assert opt.masters.n_skipped == scaler.n_skipped == 1


@pytest.mark.parametrize("flat", [False, True])
def test_after_steps_of_a_gradscaler_a_plain_step_takes_gradients_as_they_are(flat):
    net, scaler = Net(), GradScaler("cpu", **SCALE)
    opt = torch.optim.SGD(net.parameters(), 2.0**-10, fused=True)
    with_masters(net, opt, flat_master=flat)
    for _ in range(2):
        scaler.scale(net(torch.ones(1, 1)).sum()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    net(torch.ones(1, 1)).sum().backward()
    opt.step()
    assert net.weight.item() == -3 * 2.0**-10


class Polyak(torch.optim.SGD):
    """Its rate is the loss that the closure returns."""

    def step(self, closure=None, n_calls=1):
        for _ in range(n_calls):
            self.param_groups[0]["lr"] = closure().item()
        super().step()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("n_calls", [1, 2])
def test_an_optimizer_is_given_what_its_closure_returned_but_once(n_calls, flat):
    """A second call would return the old loss, and compute no gradients."""
    net = Net()
    net.weight.data.fill_(1)
    opt = Polyak(net.parameters())
    opt.step = partial(opt.step, n_calls=n_calls)
    with_masters(net, opt, flat_master=flat)

    def closure():
        loss = net(torch.ones(1, 1)).sum() / 2
        loss.backward()
        return loss

    if n_calls == 2:
        with pytest.raises(MixedPrecisionError, match="calls its closure several times"):
            opt.step(closure)
    else:
        assert opt.step(closure).item() == 0.5
        assert net.weight.item() == 1 - 0.5 * 0.5
