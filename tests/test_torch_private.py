"""Canaries: one for each private name of PyTorch that the library uses.

A release that drops a name fails here first, and the test's name tells what is missing.
"""

import inspect
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mixedfp import torch_private as private
from mixedfp.testing import assert_same


def test_the_compiler_is_left():
    model = nn.Linear(1, 1)
    assert private.outside_of_dynamo(lambda x: 2 * x)(2) == 4
    assert private.unwrapped(torch.compile(model)) is private.unwrapped(model) is model


def test_hooks_around_a_step_are_found():
    opt = SGD(nn.Linear(1, 1).parameters(), 0.1)
    own = opt.register_step_pre_hook(print), opt.register_step_post_hook(repr)
    of_all = register_optimizer_step_pre_hook(str)
    before, after = private.hooks_around_step(opt)  # masters of other tests have some, too
    for handle in (*own, of_all):
        handle.remove()
    assert ([h for h in before if h in (str, print)], after) == ([str, print], [repr])


def test_nodes_and_backward_passes_are_numbered():
    x, seen = torch.ones((), requires_grad=True), []
    first, second = x * 2, x * 3
    numbers = private.sequence_number(first.grad_fn), private.sequence_number(second.grad_fn)
    assert numbers[0] < numbers[1] < private.next_sequence_number()
    first.register_hook(lambda grad: seen.append(private.backward_id()))
    first.backward()
    assert seen[0] >= 0 and private.backward_id() == -1


def test_hooks_of_saved_tensors_are_seen():
    assert private.saved_tensors_hooks_now() is None
    with torch.autograd.graph.saved_tensors_hooks(id, torch.abs):
        assert private.saved_tensors_hooks_now() == (id, torch.abs)


def test_operations_take_lists_and_a_scale_grows_and_backs_off():
    grads, half = [torch.tensor([2.0, 4.0]), torch.tensor([6.0])], torch.tensor(0.5)
    found_inf, scale, growth = torch.zeros(()), torch.tensor(8.0), torch.tensor(1).int()
    private.unscale_each_(grads, half, found_inf)
    assert_same(private.norm_of_each(grads, 1.0), [torch.tensor(3.0), torch.tensor(3.0)])
    assert private.norm_of_each([torch.empty(0)], math.inf) == []  # PyTorch raises an error
    nothing = [torch.empty(0, dtype=torch.bfloat16)]
    assert_same(private.norm_of_each(nothing + grads, math.inf)[-1], torch.tensor(3.0))
    private.update_scale_(scale, growth, found_inf, 2.0, 0.5, 2)
    assert (found_inf, scale, growth) == (0, 16.0, 0)
    private.unscale_each_([torch.tensor([torch.inf])], half, found_inf)
    private.update_scale_(scale, growth, found_inf, 2.0, 0.5, 2)
    assert (found_inf, scale, growth) == (1, 8.0, 0)


def test_a_modules_own_tensors_are_changed():
    model = nn.Sequential(nn.Linear(1, 1))
    private.apply_to_own(model, torch.Tensor.half)
    assert model[0].weight.dtype == torch.float32
    private.apply_to_own(model[0], torch.Tensor.half)
    assert model[0].weight.dtype == torch.float16
    assert isinstance(nn.BatchNorm1d(1), private.NORMS)
    assert isinstance(nn.InstanceNorm2d(1), private.NORMS)


def test_a_step_that_counts_is_known_to_schedules(recwarn):
    """One that was made before does not warn; one that is made later does not wrap the step."""
    opt = SGD(nn.Linear(1, 1).parameters(), 0.1)
    schedule = StepLR(opt, 1)
    opt.step = step = private.as_known_to_schedules(lambda: None)
    private.count_as_stepped(opt)
    schedule.step()
    StepLR(opt, 1)
    assert opt.step is step
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_a_fused_optimizer_unscales_by_itself():
    params = [nn.Parameter(torch.ones(1))]
    assert private.unscales_by_itself(SGD(params, 0.1, fused=True))
    assert not private.unscales_by_itself(SGD(params, 0.1))


def test_a_transformation_of_functions_is_seen():
    seen = []
    torch.func.vmap(lambda x: seen.append(private.can_trace_copies()) or x)(torch.ones(2))
    assert seen == [False] and private.can_trace_copies()


def test_autocast_is_left_by_its_dispatch_key_and_comes_back():
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with private.without_autocast("cpu"):
            assert layer(x).dtype == torch.float32
        assert layer(x).dtype == torch.bfloat16


def test_a_tensor_that_shares_its_storage_is_known():
    p = nn.Parameter(torch.ones(4))
    assert not private.is_shared(p)
    other = p.data
    assert private.is_shared(p) and private.is_shared(other[:2])
    del other
    assert not private.is_shared(p)
    assert private.is_shared(nn.Linear(2, 2).share_memory().weight)


def test_a_sharded_module_has_a_policy(alone):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    assert private.mp_policy(model) == policy


def test_fastai_sends_the_order_of_the_samples_by_one_method():
    fastai = pytest.importorskip("accelerate") and pytest.importorskip("fastai.distributed")
    assert "self._broadcast(idxs,0)" in inspect.getsource(fastai.DistributedDL.get_idxs)


def test_private_names_are_used_in_one_module():
    package = Path(private.__file__).parent
    known = {"_python_dispatch", "_subclasses", "_version"}  # modules, and attributes of objects
    private_name = re.compile(r"\b(?:torch|nn|distributed|F)(?:\.\w+)*\.(_(?!foreach)[a-z]\w*)")
    for path in {*package.rglob("*.py")} - {Path(private.__file__), package / "_modidx.py"}:
        found = set(private_name.findall(path.read_text(encoding="utf-8")))
        assert found <= known, path.name
