"""The edges of `LossScaler`: fused optimizers, closures, scales set by hand, odd settings."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from mixedfp.formats import MixedPrecisionError
from mixedfp.scaler import LossScaler


def make_opt(**kwargs):
    w = nn.Parameter(torch.zeros(2))
    return w, torch.optim.SGD([w], lr=1.0, **kwargs)


def iterate(scaler, w, opt, v):
    scaler.scale(torch.zeros(()))
    w.grad = torch.full((2,), float(v))
    scaler.step(opt)
    scaler.update()


def test_fused_optimizers_are_counted():
    scaler = LossScaler("cpu", max_skips=3)
    w, opt = make_opt(fused=True)
    iterate(scaler, w, opt, math.inf)
    assert scaler.skipped == [0] and scaler.record.scale == scaler.get_scale() == 2.0**15


def test_fused_hopeless():
    scaler = LossScaler("cpu", max_skips=3)
    w, opt = make_opt(fused=True)
    with pytest.raises(MixedPrecisionError):
        for _ in range(3):
            iterate(scaler, w, opt, math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_check_asks_for_the_parameters_once(dtype):
    """Masters look at all gradients to answer; float64 goes another way than float32."""
    n_asked = 0

    class Asked(torch.optim.SGD):
        @property
        def param_groups(self):
            nonlocal n_asked
            n_asked += 1
            return vars(self)["groups"]

        @param_groups.setter
        def param_groups(self, groups):
            vars(self)["groups"] = groups

    w = nn.Parameter(torch.zeros(2, dtype=dtype))
    opt, scaler = Asked([w], lr=1.0), LossScaler("cpu", 4.0)
    scaler.scale(torch.zeros(()))
    w.grad = torch.full_like(w, 8.0)
    n_asked = 0
    scaler.unscale_(opt)
    assert n_asked == 1 and w.grad.tolist() == [2.0, 2.0]


def test_found_nonfinite_asked_early():
    scaler = LossScaler("cpu")
    w, opt = make_opt()
    scaler.scale(torch.zeros(()))
    w.grad = torch.full((2,), math.inf)
    scaler.found_nonfinite(opt)
    scaler.step(opt)
    assert w.isfinite().all()


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_never_runs_on_scaled_gradients(by_name):
    scaler = LossScaler("cpu", 1024.0)
    w, opt = make_opt()
    before, lr = w.detach().clone(), opt.param_groups[0]["lr"]

    def closure():
        opt.zero_grad()
        loss = w.sum()
        scaler.scale(loss).backward()
        return loss

    closure()
    args, kwargs = ((), dict(closure=closure)) if by_name else ((closure,), {})
    scaler.step(opt, *args, **kwargs)
    assert torch.equal(w, before - lr)
    assert torch.equal(w.grad, torch.ones(2))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_new_scale_is_checked(bad):
    scaler = LossScaler("cpu")
    w, opt = make_opt()
    iterate(scaler, w, opt, 1)
    with pytest.raises(ValueError):
        scaler.update(bad)


def test_new_scale_may_be_an_int():
    scaler = LossScaler("cpu")
    w, opt = make_opt()
    iterate(scaler, w, opt, 1)
    scaler.update(8)
    assert scaler.get_scale() == 8


@pytest.mark.parametrize("how", ["load", "hand"])
def test_record_follows_a_clamp(how):
    scaler = LossScaler("cpu")
    w, opt = make_opt()
    iterate(scaler, w, opt, 1)
    if how == "load":
        scaler.load_state_dict(GradScaler("cpu", 2.0**30).state_dict())
    else:
        scaler.update(2.0**30)
    iterate(scaler, w, opt, 1)
    assert scaler.record.scale == scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [{0, 1}, {1, 2}, {0, 1, 2}], ids=str)
def test_an_iteration_is_skipped_once_however_many_of_its_steps_overflow(bad, fused):
    """Three optimizers, and an `update` after the step of each."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    opts = [torch.optim.SGD([p], lr=0.125, fused=fused) for p in params]
    scaler = LossScaler("cpu", init_scale=8.0)
    for overflows in (bad, set()):
        scaler.scale(sum(p.sum() for p in params)).backward()
        for i, (p, opt) in enumerate(zip(params, opts, strict=True)):
            p.grad.mul_(float("inf") if i in overflows else 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert (scaler.skipped, scaler.scales, scaler.get_scale()) == ([0], [8.0, 4.0], 4.0)
    assert [p[0].item() for p in params] == [0.75 + 0.125 * (i in bad) for i in range(3)]


def test_message_names_something_when_gradients_were_cleared():
    scaler = LossScaler("cpu", max_skips=1)
    w, opt = make_opt()
    scaler.scale(torch.zeros(()))
    w.grad = torch.full((2,), math.inf)
    scaler.step(opt)
    opt.zero_grad()
    with pytest.raises(MixedPrecisionError, match="cleared by now"):
        scaler.update()


def test_disabled_passes_everything_through():
    scaler = LossScaler("cpu", enabled=False)
    w, opt = make_opt()
    scaler.forget(opt)
    assert scaler.found_nonfinite(opt) is False


@pytest.mark.parametrize(
    "settings",
    [
        dict(growth_interval=2.5),
        dict(max_skips=1.5),
        dict(min_scale=4, max_scale=2, dynamic=False),
        dict(init_scale=1e39, dynamic=False),
        dict(init_scale=1e-46, dynamic=False),
    ],
)
def test_settings(settings):
    with pytest.raises((ValueError, TypeError)):
        LossScaler("cpu", **settings)


def test_interval_message():
    with pytest.raises(ValueError, match="number of steps"):
        LossScaler("cpu", growth_interval=0)


def test_a_sparse_gradient_whose_sum_overflows_is_skipped():
    """Each of its values is finite; the weight would get their sum."""
    scaler = LossScaler("cpu", 1.0)
    w, opt = make_opt()
    scaler.scale(torch.zeros(()))
    w.grad = torch.sparse_coo_tensor([[1, 1]], [3e38, 3e38], (2,), check_invariants=True)
    assert scaler.step(opt) is False
    assert w.isfinite().all()


@pytest.mark.parametrize("saved, bounded", [(2.0**20, 2.0**10), (1.0, 2.0**4)])
def test_a_loaded_scale_is_brought_within_the_bounds(saved, bounded):
    scaler = LossScaler("cpu", 2.0**8, min_scale=2.0**4, max_scale=2.0**10)
    scaler.load_state_dict(LossScaler("cpu", saved).state_dict())
    assert scaler.get_scale() == float(scaler.scale(torch.ones(()))) == bounded


def test_what_lbfgs_has_learnt_in_a_step_that_overflows_is_forgotten():
    """Its history is in lists that it appends to, so that a copy of the state alone shares them."""
    scaler = LossScaler("cpu", 2.0**4)
    w = nn.Parameter(torch.tensor([3.0, -2.0]))
    opt = torch.optim.LBFGS([w], lr=0.1, max_iter=3)
    factors = iter([1.0] * 5 + [math.inf])

    def closure():
        opt.zero_grad()
        loss = (w**4).sum()
        scaler.scale(loss * next(factors)).backward()
        return loss

    scaler.step(opt, closure)
    scaler.update()
    before = copy.deepcopy(opt.state[w])
    assert scaler.step(opt, closure) is False
    assert len(opt.state[w]["old_dirs"]) == len(before["old_dirs"])
    assert opt.state[w]["n_iter"] == before["n_iter"]


def test_a_copy_in_the_middle_of_an_iteration_goes_on():
    """A loss was scaled, no gradient unscaled: the copy adds to it, unscales and steps."""
    p = torch.nn.Parameter(torch.ones(2))
    scaler = LossScaler(init_scale=8.0)
    scaler.scale(p.sum()).backward()
    scaler = copy.deepcopy(scaler)
    scaler.scale(p.sum()).backward()
    opt = torch.optim.SGD([p], lr=1.0)
    scaler.unscale_(opt)
    assert p.grad.tolist() == [2.0, 2.0]
    assert scaler.step(opt)
    scaler.update()
    assert p.tolist() == [-1.0, -1.0] and scaler.scales == [8.0]


def test_after_an_error_in_unscale_the_scale_is_that_of_now():
    """That of the gradients, from before the `update`, is in its place no longer than needed."""
    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=1)
    w, opt = make_opt()
    half = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    late = torch.optim.SGD([half], lr=1.0)
    scaler.scale(w.sum() + half.float().sum()).backward()
    scaler.step(opt)
    scaler.update()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(late)
    assert scaler.get_scale() == 16.0
