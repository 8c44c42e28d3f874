"""Gradients as they come: 16-bit in the backward pass, float32 at its end, any dtype that is set.

Oracle: the gradient of each pass on its own, widened and added up in float32.
"""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.checkpoint import checkpoint

from mixedfp.engine.gradients import Gradients
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLAT = dict(flat_master=True)
LAYOUTS = pytest.mark.parametrize("how", [{}, FLAT], ids=["each", "flat"])


def net():
    torch.manual_seed(0)
    first, middle, last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
    return nn.Sequential(first, nn.Tanh(), middle, nn.Tanh(), last)


def make(dtype="bf16", build=net, **how):
    model = build()
    return with_masters(model, torch.optim.AdamW(model.parameters(), 0.01), dtype=dtype, **how)


def loss_of(model, i=0):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(i))
    return model(x).square().sum()


def sums(model, n):
    """Return the float32 sums of the gradients of `n` batches."""
    params = list(model.parameters())
    found = [torch.zeros_like(p, dtype=FP32) for p in params]
    for i in range(n):
        for s, g in zip(found, torch.autograd.grad(loss_of(model, i), params), strict=True):
            assert g.dtype == BF16  # as the backward pass makes them
            s += g.float()
    return found


def grads(model):
    return [p.grad for p in model.parameters()]


# Passes


def test_passes_add_up_in_float32():
    model, _ = make()
    goal = sums(model, 4)
    for i in range(4):
        loss_of(model, i).backward()
    assert_same(grads(model), goal)


def test_two_passes_over_one_graph_add_up_in_float32():
    model, _ = make()
    (goal,) = [[2 * s for s in sums(model, 1)]]
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_same(grads(model), goal)


def test_a_hook_of_the_user_sees_16_bits_and_the_caller_32():
    model, _ = make()
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    loss_of(model).backward()
    assert seen == [BF16] and model[0].weight.grad.dtype == FP32


def test_half_grads_stay():
    model, _ = make(**FLAT, half_grads=True)
    loss_of(model).backward()
    assert {g.dtype for g in grads(model)} == {BF16}
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def press(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("with_forward", [True, False])
def test_after_an_exception_in_a_backward_pass_the_next_ones_end_in_float32(with_forward):
    model, opt = make()
    later = loss_of(model, 1)
    hook = model[2].register_forward_hook(lambda m, args, out: out.register_hook(press) and None)
    with pytest.raises(KeyboardInterrupt):
        loss_of(model).backward()
    hook.remove()
    arrived = [p.grad for p in model[4].parameters()]
    assert {g.dtype for g in arrived} == {BF16}  # and no callback
    if with_forward:
        loss_of(model, 0)
        assert {p.grad.dtype for p in model[4].parameters()} == {FP32}
    later.backward()
    assert {g.dtype for g in grads(model)} == {FP32}
    opt.zero_grad()
    goal = sums(model, 2)
    for i in range(2):
        loss_of(model, i).backward()
    assert_same(grads(model), goal)


def test_a_backward_pass_inside_another_ends_twice():
    model, _ = make()
    goal, inner = sums(model, 2), []

    def again(grad):
        if not inner:
            inner.append(1)
            with torch.enable_grad():
                loss_of(model, 1).backward()

    loss = loss_of(model, 0)
    loss.register_hook(again)
    loss.backward()
    assert {g.dtype for g in grads(model)} == {FP32}
    torch.testing.assert_close(grads(model), goal)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_have_the_gradients_of_the_plain_pass(use_reentrant):
    model, _ = make()
    x = torch.randn(32, 8)
    model(x).square().sum().backward()
    goal, twin = grads(model), make()[0]
    x = x.clone().requires_grad_()
    twin_body, head = twin[:4], twin[4]

    class Whole(nn.Module):
        def forward(self, x):
            return head(checkpoint(twin_body, x, use_reentrant=use_reentrant))

    with torch.autocast("cpu", BF16):
        Whole()(x).float().square().sum().backward()
    assert {g.dtype for g in grads(twin)} == {FP32}
    torch.testing.assert_close(grads(twin), goal, atol=0.5, rtol=0.1)


def test_a_gradient_with_a_graph_keeps_it():
    model, _ = make()
    loss_of(model).backward(create_graph=True)
    assert all(g.dtype == FP32 and g.requires_grad for g in grads(model))
    kept = grads(model)
    penalty = sum(g.square().sum() for g in kept)
    second = torch.autograd.grad(penalty, list(model.parameters()), allow_unused=True)
    assert any(g is not None and g.abs().sum() > 0 for g in second)


def test_a_layer_that_is_thawed_later_adds_up_in_float32():
    def frozen():
        model = net()
        model[0].requires_grad_(False)
        return model

    model, opt = make(build=frozen)
    loss_of(model).backward()
    opt.zero_grad()
    model[0].requires_grad_(True)
    goal = sums(model, 3)
    for i in range(3):
        loss_of(model, i).backward()
    assert_same(grads(model), goal)


@LAYOUTS
def test_an_optimizer_that_steps_in_the_backward_pass_takes_16_bit_gradients(how):
    model = net()
    first = torch.optim.SGD([model[0].weight], 0.01)
    with_masters(model, first, dtype="bf16", **how)
    goal = copy.deepcopy(model)
    x = torch.randn(32, 8)
    model(x).square().sum().backward()
    grad = model[0].weight.grad.clone()
    model.zero_grad()

    def step(p):
        assert p.grad.dtype == BF16
        first.step()
        p.grad = None

    model[0].weight.register_post_accumulate_grad_hook(step)
    model(x).square().sum().backward()
    moved = model.state_dict()["0.weight"]
    torch.testing.assert_close(moved, (goal[0].weight - 0.01 * grad).detach(), rtol=1e-6, atol=0)


# Gradients that somebody sets


BOTH = pytest.mark.parametrize("name", ["bf16", "fp16"])


@BOTH
@LAYOUTS
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.float64], ids=str)
def test_a_gradient_of_any_dtype_is_taken(how, dtype, name):
    model, opt = make(name, **how)
    goal, goal_opt = make(name, **how)
    for one, grad_dtype in ((model, dtype), (goal, FP32)):
        torch.manual_seed(1)
        for p in one.parameters():
            p.grad = torch.randint(-9, 9, p.shape).to(grad_dtype)
    opt.step()
    goal_opt.step()
    assert_same(dict(model.state_dict()), dict(goal.state_dict()))


@BOTH
def test_a_gradient_like_its_parameter_is_added_to(name):
    (model, _), (other, _) = make(name), make(name)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for one in (model, other):
        loss_of(one).backward()
    assert_same(grads(model), grads(other))


def step(model, opt, scaler, i):
    """Train on batch `i`."""
    opt.zero_grad()
    scaler.scale(loss_of(model, i)).backward()
    scaler.step(opt)
    scaler.update()


@BOTH
@LAYOUTS
@pytest.mark.parametrize("n", [0, 2])
def test_pytorchs_distributed_checkpoint_saves_and_resumes(n, how, name, tmp_path):
    """It sets the gradients of a fresh optimizer to zeros like the parameters."""
    scaler = LossScaler(init_scale=8.0, enabled=name == "fp16")
    model, opt = make(name, **how)
    for i in range(n):
        step(model, opt, scaler, i)
    state = dict(zip(("model", "opt"), get_state_dict(model, opt), strict=True))
    assert {v.dtype for v in state["model"].values()} == {FP32}
    dcp.save(state, checkpoint_id=tmp_path)
    twin, twin_opt = make(name, **how)
    with torch.no_grad():
        twin[0].weight.zero_()  # not what the file holds
    found = dict(zip(("model", "opt"), get_state_dict(twin, twin_opt), strict=True))
    dcp.load(found, checkpoint_id=tmp_path)
    set_state_dict(twin, twin_opt, model_state_dict=found["model"], optim_state_dict=found["opt"])
    assert_same(dict(twin.state_dict()), dict(model.state_dict()))
    for i in range(n, n + 2):
        step(model, opt, scaler, i)
        step(twin, twin_opt, scaler, i)
    assert_same(dict(twin.state_dict()), dict(model.state_dict()))
    assert_same(twin_opt.state_dict()["state"], opt.state_dict()["state"])


def test_a_wrong_gradient_is_pytorchs_own_error():
    model, opt = make()
    with pytest.raises(RuntimeError):
        model[0].weight.grad = torch.zeros(3)
    with pytest.raises(TypeError):
        model[0].weight.grad = "none"
    loss_of(model).backward()
    opt.step()


# In float16 gradients are float32 on arrival, from a forward pass to the step


def test_in_float16_tiny_gradients_add_up_and_a_penalty_is_not_zero():
    model, opt = make("fp16")
    params = list(model.parameters())
    x = torch.randn(32, 8)
    loss = model(x).square().mean() * 1e-7
    found = torch.autograd.grad(loss * 2.0**10, params, create_graph=True)
    assert {g.dtype for g in found} == {FP32}
    assert all((g * 2.0**-10).abs().max() > 0 for g in found)  # float16 would flush them to zero
    opt.step()
    assert {p.grad_dtype for p in params} == {None}


def test_in_float16_what_is_assigned_before_a_pass_is_widened_by_it():
    model, _ = make("fp16")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with torch.no_grad():
        model(torch.randn(2, 8))  # no gradients will follow
    assert {g.dtype for g in grads(model)} == {FP16}
    model(torch.randn(2, 8))
    assert {g.dtype for g in grads(model)} == {FP32}


class Breaks(nn.Linear):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.parametrize("first", [nn.Linear, Breaks])
def test_in_float16_a_compiled_models_gradients_are_float32_after_the_pass(first):
    torch.compiler.reset()
    other = torch.compile(make("fp16", lambda: first(8, 8))[0], backend="aot_eager")
    other(torch.randn(2, 8))  # after a break, Dynamo compiles all that a forward pass calls
    model, _ = make("fp16")
    called = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        called(torch.randn(2, 8)).sum().backward()
    assert {g.dtype for g in grads(model)} == {FP32}


# What is left


@LAYOUTS
def test_hooks_do_not_keep_a_model_alive(how):
    model, opt = make(**how)
    loss_of(model).backward()
    opt.step()
    kept = weakref.ref(model[0].weight), weakref.ref(model)
    del model, opt
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_hooks_are_gone_after_restore_and_on_copies():
    model, opt = make()
    loss_of(model).backward()
    twin = copy.deepcopy(model)
    assert not any(p._post_accumulate_grad_hooks for p in twin.parameters())
    opt.masters.restore()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    loss_of(model, 1).backward()


def test_gradients_without_their_owner_stay_as_they_are():
    p = nn.Parameter(torch.ones(3, dtype=BF16))
    Gradients([p], make()[1].masters.policy)  # freed at once
    gc.collect()
    (p * 2).sum().backward()
    assert p.grad.dtype == BF16
