"""Models on a GPU, real or simulated (`make test-cuda`): the same laws, and models that move."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU, or a simulated one"
)
FLAT = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False),
}


def net(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    return model.to(device)


def train(model, opt, scaler=None, steps=3, device="cuda"):
    torch.manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(8, 4).to(device), torch.arange(8).to(device) % 3
        opt.zero_grad()
        loss = cross_entropy(model(x), y)
        if scaler is None:
            loss.backward()
            opt.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
    return {k: v.cpu().clone() for k, v in model.state_dict().items()}


@FLAT
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float32_is_the_plain_loop(name, flat):
    plain = net("cuda")
    goal = train(plain, OPTIMIZERS[name](plain.parameters()))
    model = net("cuda")
    model, opt = with_masters(
        model, OPTIMIZERS[name](model.parameters()), dtype="fp32", flat_master=flat
    )
    assert_same(train(model, opt), goal)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_flat_is_per_parameter(name, dtype):
    states = []
    for flat in (False, True):
        model = net("cuda")
        opt = OPTIMIZERS[name](model.parameters())
        model, opt = with_masters(model, opt, dtype=dtype, flat_master=flat)
        scaler = LossScaler("cuda") if dtype == "fp16" else None
        states.append(train(model, opt, scaler))
    assert_same(states[0], states[1])


@FLAT
def test_a_model_that_moves_takes_its_masters_along(flat):
    model = net("cpu")
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model, opt = with_masters(model, opt, dtype="bf16", flat_master=flat)
    before = copy.deepcopy(model.state_dict())
    model.cuda()
    after = model.state_dict()
    assert all(v.device.type == "cuda" for v in after.values())
    assert_same({k: v.cpu() for k, v in after.items()}, dict(before))
    train(model, opt)
    assert opt.masters[model[0].weight].device.type == "cuda"
    assert model[0].weight.dtype == torch.bfloat16
