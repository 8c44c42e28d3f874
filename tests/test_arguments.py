"""Wrong arguments of the main functions are refused by a sentence that names them."""

import inspect

import pytest
import torch
from tiny import make_learner
from torch import nn

from mixedfp import masters_of, with_masters
from mixedfp.callback import MixedPrecision
from mixedfp.formats import MixedPrecisionError
from mixedfp.scaler import LossScaler

NET = nn.Linear(2, 2)
SGD = torch.optim.SGD(NET.parameters(), 0.1)
MISTAKES = {
    "swapped": ((SGD, NET), "`model` is a SGD: expected with_masters.module, optimizer"),
    "generator first": ((NET.parameters(), SGD), "`model` is a generator: expected with_masters"),
    "generator": ((NET, NET.parameters()), "after the model, got generator"),
    "list": ((NET, [SGD]), "after the model, got list"),
    "no optimizer": ((NET,), "after the model, got none"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_with_masters_says_what_it_expected(name):
    given, words = MISTAKES[name]
    with pytest.raises(TypeError, match=words):
        with_masters(*given)
    assert masters_of(NET) is None and "forward" not in vars(NET)


@pytest.mark.parametrize("name", "dtype loss_scale growth_interval enabled remainders".split())
def test_to_bf16_takes_only_what_it_uses(name):
    learn = make_learner()
    with pytest.raises(TypeError, match=f"to_bf16.. has no setting '{name}'"):
        learn.to_bf16(**{name: 1})
    assert not hasattr(learn, "mp_cb") and "forward" not in vars(learn.model)
    assert name not in inspect.signature(learn.to_bf16).parameters


@pytest.mark.parametrize("name", ["init_scale", "layers", "device", "remainders"])
def test_an_unknown_setting_of_a_learner_is_named(name):
    for make in (MixedPrecision, make_learner().to_fp16):
        with pytest.raises(TypeError, match=f"has no setting '{name}'"):
            make(**{name: 512.0})


@pytest.mark.parametrize("make", [MixedPrecision, make_learner().to_bf16, make_learner().to_fp16])
def test_every_setting_of_with_masters_is_in_the_signature(make):
    own = inspect.signature(make).parameters
    given = inspect.signature(with_masters).parameters
    shared = {k: p.default for k, p in given.items() if p.kind == p.KEYWORD_ONLY}
    assert shared.pop("dtype") == torch.bfloat16
    assert "kwargs" not in own and shared == {k: own[k].default for k in shared}


def test_optimizers_before_a_refused_one_stay_as_they_were():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = (torch.optim.SGD(m.parameters(), 0.1) for m in model)
    how = dict(flat_master=True, half_grads=True)
    with_masters(model, first, **how)
    with pytest.raises(MixedPrecisionError, match="stepped in chunks"):
        with_masters(model, second, torch.optim.Adafactor(model.parameters()), **how)
    assert "masters" not in vars(second) and len(first.masters.steps) == 1


def test_errors_name_parameters_as_the_model_does():
    model = nn.ModuleDict(dict(body=nn.Linear(2, 2), head=nn.Linear(2, 2)))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with_masters(model, opt, dtype="fp16")
    scaler = LossScaler(max_skips=1)
    scaler.scale(model["head"].weight.sum() * torch.inf).backward()
    scaler.step(opt)
    with pytest.raises(MixedPrecisionError, match="in the gradients of head.weight."):
        scaler.update()
