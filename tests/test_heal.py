"""A module that overflows goes into 32 bits in the middle of a loop by hand."""

import copy

import pytest
import torch
from inside import forget_notices, masters_of_model
from torch import nn
from torch.nn import functional as F

from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import MasterOptimizer, with_masters
from mixedfp.overflow import heal
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same, tiny_batch, tiny_net

WAYS = {
    "fp16": dict(dtype=torch.float16),
    "fp16, flat": dict(dtype=torch.float16, flat_master=True),
    "bf16, flat": dict(dtype=torch.bfloat16, flat_master=True),
    "remainders": dict(dtype=torch.bfloat16, flat_master=True, store_param_remainders=True),
}
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


@pytest.fixture(autouse=True)
def _notices():
    forget_notices()


def start(make, keep=(), **way):
    model = tiny_net()
    model, opt = with_masters(model, make(model.parameters()), keep_fp32=keep, **way)
    return model, opt, LossScaler("cpu", 2.0**8, enabled=way["dtype"] == torch.float16)


def train(model, opt, scaler, n=3):
    for i in range(n):
        x, y = tiny_batch(8, seed=i)
        opt.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(opt)
        scaler.update()


def parts(*run):
    return [copy.deepcopy(part.state_dict()) for part in run]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_run_goes_on_as_one_that_is_loaded_with_the_setting(make, way):
    run = start(make, **way)
    train(*run)
    saved, model, opt = parts(*run), run[0], run[1]
    groups = opt.optimizer.param_groups
    opt.keep_more(["linear"])
    assert opt.optimizer.param_groups is groups and not opt.is_restored
    is_cut = way.get("store_param_remainders", False)
    assert masters_of_model(model).cuts == is_cut
    assert model.linear.weight.dtype == torch.float32
    assert model.conv.weight.dtype == way["dtype"]
    assert_same(parts(*run), saved)
    train(*run)
    other = start(make, keep="linear", **way)
    for part, state in zip(other, saved, strict=True):
        part.load_state_dict(state)
    train(*other)
    assert_same(parts(*run), parts(*other))


def test_schedules_and_copies_go_on():
    model, opt, scaler = start(OPTIMIZERS["AdamW"], **WAYS["fp16"])
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    train(model, opt, scaler, 1)
    opt.keep_more(["linear"])
    train(model, opt, scaler, 1)
    schedule.step()
    assert opt.param_groups[0]["lr"] == 0.005
    opt.healed = ((1, "keep_fp32=['linear']"),)
    twin, twin_opt = copy.deepcopy((model, opt))
    assert twin_opt.healed == opt.healed and twin.linear.weight.dtype == torch.float32


def test_a_frozen_part_that_no_optimizer_has_is_no_hindrance():
    model = tiny_net()
    model.conv.requires_grad_(False)
    opt = torch.optim.SGD(model.linear.parameters(), lr=0.1)
    run = *with_masters(model, opt), LossScaler("cpu", 2.0**8)
    before = parts(model)
    run[1].keep_more(["conv"])
    assert_same(parts(model), before)
    train(*run)
    assert model.conv.weight.dtype == torch.float32 and model.linear.weight.dtype == torch.float16
    assert torch.equal(model.conv.weight, before[0]["conv.weight"])
    assert not torch.equal(model.state_dict()["linear.weight"], before[0]["linear.weight"])


def test_what_cannot_be_is_refused_and_changes_nothing():
    model = tiny_net()
    first = torch.optim.SGD([model.conv.weight], lr=0.1)
    rest = torch.optim.SGD([p for n, p in model.named_parameters() if n != "conv.weight"], lr=0.1)
    model, one, two = with_masters(model, first, rest)
    with pytest.raises(MixedPrecisionError, match="another optimizer"):
        one.keep_more(["linear"])
    with pytest.raises(MixedPrecisionError, match="no model is known"):
        half = tiny_net().half()
        MasterOptimizer(torch.optim.SGD(half.parameters(), 0.1)).keep_more(["linear"])
    assert model.linear.weight.dtype == torch.float16 and not two.is_restored
    model, opt, _ = start(OPTIMIZERS["SGD"], **WAYS["fp16"])
    (master, *_) = opt.param_groups[0]["params"]
    with pytest.raises(ValueError, match="matches no module"):
        opt.keep_more(["linear", "nowhere"])
    assert opt.param_groups[0]["params"][0] is master
    assert model.linear.weight.dtype == torch.float16


class TooLarge(nn.Linear):
    """Its square overflows, its quotient is between -1 and 1."""

    def forward(self, x):
        loud = super().forward(x) * 3e4
        return loud / (1 + loud.abs())


@pytest.mark.parametrize("enabled", [True, False])
def test_an_overflow_is_healed_and_the_file_says_so(enabled, caplog):
    def begin():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), TooLarge(8, 8), nn.Linear(8, 2))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        model, opt = with_masters(model, opt, dtype=torch.float16)
        return model, opt, LossScaler("cpu", 2.0**4, enabled=enabled)

    model, opt, scaler = begin()
    x, y = 8 * torch.randn(16, 4), torch.arange(16) % 2
    before, opt.healed = parts(model), ((0, "earlier"),)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    if enabled:
        assert scaler.step(opt) is False
        scaler.update()
    found = heal(opt, (x, y), F.cross_entropy, scaler=scaler if enabled else None)
    assert found.module == "1" and "keep_fp32=['1']" in found.cures
    assert [what for _, what in opt.healed] == ["earlier", "keep_fp32=['1']"]
    assert "heal: from step" in caplog.text
    assert_same(parts(model), before)
    loss = F.cross_entropy(model(x), y)
    assert loss.isfinite() and model[1].weight.dtype == torch.float32
    other = begin()
    other[1].load_state_dict(opt.state_dict())
    assert other[1].healed == opt.healed and other[0][1].weight.dtype == torch.float32
    plain = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    assert "healed" not in plain.state_dict()


def test_a_constant_scale_is_lowered_and_a_healthy_batch_left_alone(caplog):
    model, opt, _ = start(OPTIMIZERS["SGD"], **WAYS["fp16"])
    scaler = LossScaler("cpu", 2.0**30, max_scale=2.0**30, dynamic=False)
    x, y = tiny_batch(8)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    assert scaler.step(opt) is False
    scaler.update()
    found = heal(opt, (x, y), F.cross_entropy, scaler=scaler)
    assert "scale" in found.cause and scaler.get_scale() < 2.0**30
    opt.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    assert scaler.step(opt)
    scaler.update()
    n = len(opt.healed)
    assert n == 1 and heal(opt, (x, y), F.cross_entropy, scaler=scaler) is None
    assert len(opt.healed) == n and "Not reproduced" in caplog.text


def test_a_dynamic_scale_is_left_to_find_its_place(caplog):
    model, opt, _ = start(OPTIMIZERS["SGD"], **WAYS["fp16"])
    scaler = LossScaler("cpu", 2.0**30, max_scale=2.0**30)
    x, y = tiny_batch(8)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    assert scaler.step(opt) is False
    scaler.update()
    heal(opt, (x, y), F.cross_entropy, scaler=scaler)
    assert scaler.get_scale() == 2.0**29 and opt.healed == ()
    assert "nothing was found that helps" in caplog.text
