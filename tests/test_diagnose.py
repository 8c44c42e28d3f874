"""What holds for each look at a model: nothing is changed, no copy is left, the work is linear."""

import copy
import gc
import random
import sys
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import optimizer

from mixedfp import find_overflow, memory_of, precision_audit, precision_report
from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same

torch.set_num_threads(1)
BATCH = torch.randn(8, 4), torch.arange(8) % 2
LOOKS = {  # at a model, with a loss function; without one each raises TypeError
    "report": lambda model, opt, loss: precision_report(model, [BATCH] * 2, loss, training=True),
    "overflow": lambda model, opt, loss: find_overflow(model, BATCH, loss, dtype="fp16"),
    "audit": lambda model, opt, loss: precision_audit(model, opt if loss else None),
    "memory": lambda model, opt, loss: memory_of(model, BATCH[0] if loss else {}),
}
EACH_LOOK = pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)


class Layer(nn.Linear):
    """Knows its copies and their parameters; draws a number; overflows float16 on the way."""

    copies = WeakSet()

    def __setstate__(self, state):
        super().__setstate__(state)
        self.copies.add(self)
        self.copies.update(p for p in self.parameters() if type(p.data) is torch.Tensor)

    def forward(self, x):
        return super().forward(x * random.uniform(0.9, 1.1)) * 2.0**20 * 2.0**-20


def make(n=2, **settings):
    torch.manual_seed(0)
    layers = [Layer(4, 4) for _ in range(n)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(4), nn.Dropout())
    opt = torch.optim.AdamW(model.parameters())
    return with_masters(model, opt, dtype="bf16", **settings) if settings else (model, opt)


def trained(**settings):
    """Return a model with a state, gradients, and one frozen weight."""
    model, opt = make(**settings)
    model[0].weight.requires_grad_(False)
    cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    opt.step()
    opt.zero_grad()
    cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    model[0].eval()
    return model, opt


def everything(model, opt):
    grads, modules = [p.grad for p in model.parameters()], model.modules()
    state = copy.deepcopy([model.state_dict(), opt.state_dict(), grads, torch.get_rng_state()])
    hooks = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in modules]
    of_steps = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
    others = [random.getstate(), np.random.get_state()[1].tolist(), list(map(len, of_steps))]
    return [*state, hooks, *others]


@EACH_LOOK
@pytest.mark.parametrize("settings", [{}, dict(flat_master=False), dict(flat_master=True)], ids=str)
def test_nothing_is_changed(look, settings):
    model, opt = trained(**settings)
    before = everything(model, opt)
    look(model, opt, cross_entropy)
    with pytest.raises(TypeError):
        look(model, opt, None)
    assert_same(everything(model, opt), before)
    assert before[-1] == [0, 0]


@EACH_LOOK
def test_no_copy_of_the_model_is_left(look):
    """Not even until the garbage collector runs."""
    model, opt = make()
    look(model, opt, cross_entropy)  # PyTorch's first fake mode leaves frames behind
    gc.collect()
    Layer.copies.clear()
    gc.disable()
    try:
        look(model, opt, cross_entropy)
        with pytest.raises(TypeError):
            look(model, opt, None)
    finally:
        gc.enable()
    assert not Layer.copies


def calls(look, n):
    """Return how many functions are called while it looks at a model of `n` layers."""
    (model, opt), events = make(n), []
    if look is LOOKS["audit"]:
        model.bfloat16()  # whose lost updates are counted
    sys.setprofile(lambda frame, event, arg: events.append(event in ("call", "c_call")))
    try:
        look(model, opt, cross_entropy)
    finally:
        sys.setprofile(None)
    return sum(events)


@EACH_LOOK
def test_the_work_is_linear_in_the_number_of_parameters(look):
    calls(look, 1)  # fills caches
    few, many = calls(look, 15), calls(look, 60)
    assert few < many < 4.2 * few


@pytest.mark.parametrize("look", [LOOKS["report"], LOOKS["overflow"]], ids=["report", "overflow"])
def test_a_watched_pass_reads_the_same_copies_as_in_training(look):
    """The engine gives none to a module with a hook whose code may write weights."""
    dtypes = set()

    class Norm(nn.LayerNorm):
        def forward(self, x):
            dtypes.add(self.weight.dtype)
            return super().forward(x)

    look(nn.Sequential(Norm(4), nn.Linear(4, 2)), None, cross_entropy)
    assert torch.float16 in dtypes
