"""The notice where float16 flushes gradients to zero, and its silence where it does not."""

import pytest
import torch
from inside import FlushWatch, flush_watch, forget_notices
from torch import nn
from torch.nn.functional import cross_entropy

from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler

FLAT = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])


def train(depth, scale, flat, n_steps=12, dtype=torch.float16):
    torch.manual_seed(0)
    layers = [m for _ in range(depth) for m in (nn.Linear(64, 64), nn.Sigmoid())]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    model, opt = with_masters(model, opt, dtype=dtype, flat_master=flat)
    scaler = LossScaler(init_scale=scale, dynamic=False, enabled=scale != 1)
    for _ in range(n_steps):
        x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return flush_watch(opt)


@pytest.mark.parametrize("scale", [1.0, 512.0])
@FLAT
def test_gradients_that_vanish_in_depth_are_said_once(flat, scale, caplog):
    forget_notices()
    train(12, scale, flat)
    assert caplog.text.count("of the gradients to zero") == 1
    assert "layer_scales='auto'" in caplog.text


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
@FLAT
def test_a_healthy_run_says_nothing(flat, scale, caplog):
    forget_notices()
    assert train(1, scale, flat).looked_at == FlushWatch.first
    assert "to zero" not in caplog.text


def test_unscaled_gradients_and_other_dtypes_are_not_judged(caplog):
    forget_notices()
    assert train(12, 1.0, False, dtype=torch.bfloat16).looked_at == 0
    watch, p = FlushWatch(), torch.zeros(1000, dtype=torch.float16)
    for _ in range(FlushWatch.first):
        watch.count([p], [torch.randn(1000) * 2.0**-24], 1.0)  # divided in float32 by the loop
    assert "to zero" not in caplog.text


def test_it_can_be_turned_off_and_set(monkeypatch):
    monkeypatch.setattr(FlushWatch, "every", 0)
    assert train(1, 1.0, False).looked_at == 0
    monkeypatch.setattr(FlushWatch, "every", 4)
    assert train(1, 1.0, False).looked_at == 11
