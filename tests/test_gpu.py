"""What a real GPU adds to the laws: cuDNN, layouts, compiling, graphs, streams.

`make test-gpu` runs this on a GPU. On a CPU and on the simulated GPU the same tests run, but for
those that need a real one; there each is a dry run. On CUDA sums are repeated to the bit only
under `torch.use_deterministic_algorithms`, which `conftest` sets.
"""

import copy
import sys
import warnings
from functools import partial

import pytest
import torch
from nets import DEVICE
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only

from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler, any_nonfinite
from mixedfp.testing import assert_same

IS_SIMULATED = "simulated_cuda.device" in sys.modules
on_a_real_gpu = pytest.mark.skipif(
    DEVICE != "cuda" or IS_SIMULATED, reason="needs a real GPU, MIXEDFP_TEST_DEVICE=cuda"
)
BF16, FP16 = torch.bfloat16, torch.float16
FLAT = dict(flat_master=True)
each_and_flat = pytest.mark.parametrize("how", [{}, FLAT], ids=["each", "flat"])
halves = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
STORED = {"a_master_each": {}, "flat": FLAT, "half_grads": FLAT | dict(half_grads=True)}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adamw_fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adamw_capturable": partial(torch.optim.AdamW, lr=0.01, capturable=True),
}


def mlp():
    layers = [nn.Linear(12, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.BatchNorm1d(64)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(64, 3))


def conv_net():
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    layers += [nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))


def rows(i, shape=(8, 12)):
    rng = torch.Generator().manual_seed(i)
    return torch.randn(shape, generator=rng).to(DEVICE), (torch.arange(8) % 3).to(DEVICE)


def images(i):
    x, y = rows(i, (8, 3, 8, 8))
    return x.contiguous(memory_format=torch.channels_last), y


def make(build, make_opt, dtype, **how):
    """Return a model on the device and its optimizer, with masters if `dtype` is given."""
    torch.manual_seed(0)
    model = build().to(DEVICE)
    opt = make_opt(model.parameters())
    return (model, opt) if dtype is None else with_masters(model, opt, dtype=dtype, **how)


def train(model, opt, batches, n=4, dtype=None, first=0, called=None):
    """Train for `n` batches, with a loss scale in float16; return the losses."""
    scaler, losses = LossScaler(DEVICE, init_scale=2.0**10, enabled=dtype == FP16), []
    for i in range(first, first + n):
        x, y = batches(i)
        opt.zero_grad()
        loss = cross_entropy((model if called is None else called)(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.detach().clone())
    return losses


def run(build, batches, make_opt, dtype, n=4, **how):
    """Train a new model; return its losses and what a file would hold, on the host."""
    model, opt = make(build, make_opt, dtype, **how)
    losses, state = train(model, opt, batches, n, dtype), opt.state_dict()["state"]
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, [losses, dict(model.state_dict()), state])


# What cuDNN, layouts and compilers see


@each_and_flat
@pytest.mark.skipif(IS_SIMULATED, reason="the simulated GPU has no recurrent layers")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU], ids=["lstm", "gru"])
@halves
def test_a_recurrent_layer_is_used_without_a_copy_of_its_weights(kind, how, dtype):
    def build():
        return nn.Sequential(kind(12, 16, num_layers=2, bidirectional=True, batch_first=True))

    words = partial(rows, shape=(8, 5, 12))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model, opt = make(build, OPTIMIZERS["adamw_fused"], dtype, **how)
        train(model, opt, words, 3, dtype, called=lambda x: model(x)[0][:, -1])
        model.eval()(words(7)[0])
    assert not [str(w.message) for w in seen if "contiguous" in str(w.message)]
    weights = list(model.parameters())
    assert [p.data_ptr() for p in model[0]._flat_weights] == [p.data_ptr() for p in weights]
    if DEVICE == "cuda":  # they lie as cuDNN wants them
        assert len({p.untyped_storage().data_ptr() for p in weights}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16], ids=str)
def test_channels_last_is_kept_and_flat_has_the_bits_of_a_master_each(dtype):
    def build():
        return conv_net().to(memory_format=torch.channels_last)

    goal = run(build, images, OPTIMIZERS["adamw"], None if dtype == torch.float32 else dtype)
    found = run(build, images, OPTIMIZERS["adamw"], dtype, **FLAT)
    assert_same(found, goal)
    assert found[1]["0.weight"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.skipif(IS_SIMULATED, reason="nothing is compiled for the simulated GPU")
@each_and_flat
def test_a_compiled_model_is_compiled_once(how):
    import torch._dynamo

    torch._dynamo.reset()
    model, opt = make(mlp, OPTIMIZERS["adamw_fused"], BF16, **how)
    called = torch.compile(model)
    train(model, opt, rows, 2, called=called)
    with torch._dynamo.config.patch(error_on_recompile=True):
        losses = train(model, opt, rows, 6, first=2, called=called)
    goal, opt = make(mlp, OPTIMIZERS["adamw_fused"], BF16, **how)
    train(goal, opt, rows, 2)
    torch.testing.assert_close(losses, train(goal, opt, rows, 6, first=2), atol=0.02, rtol=0.02)


# Graphs and streams


@on_a_real_gpu
@each_and_flat
def test_a_step_is_captured_in_a_graph(how):
    how = how | dict(skip_nonfinite=False)  # a skip is decided on the host
    goal, goal_opt = make(mlp, OPTIMIZERS["adamw_capturable"], BF16, **how)
    train(goal, goal_opt, lambda i: rows(0), 8)
    model, opt = make(mlp, OPTIMIZERS["adamw_capturable"], BF16, **how)
    x, y = rows(0)

    def step():
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        opt.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    opt.zero_grad()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    found, expected = dict(model.state_dict()), dict(goal.state_dict())
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-2)


@on_a_real_gpu
@halves
@pytest.mark.parametrize("stored", STORED)
def test_a_step_on_another_stream_has_the_same_bits(stored, dtype):
    goal = run(mlp, rows, OPTIMIZERS["adamw"], dtype, n=8, **STORED[stored])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = run(mlp, rows, OPTIMIZERS["adamw"], dtype, n=8, **STORED[stored])
    torch.cuda.synchronize()
    assert_same(found, goal)


@on_a_real_gpu
@each_and_flat
def test_the_host_waits_once_a_step_for_the_check(how):
    model, opt = make(mlp, OPTIMIZERS["adamw_fused"], BF16, **how)
    train(model, opt, rows, 3)
    batches = [rows(i) for i in range(4)]
    torch.cuda.synchronize()
    with torch.profiler.profile() as prof:
        train(model, opt, batches.__getitem__, 4)
    waits = [e.count for e in prof.key_averages() if "Synchronize" in e.key]
    assert sum(waits) <= 4 + 1  # the profiler's own at its end


# Models that move, and the check


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU, or a simulated one")
@each_and_flat
def test_a_model_that_moves_takes_its_masters_along(how):
    model = mlp()
    model, opt = with_masters(model, OPTIMIZERS["sgd"](model.parameters()), dtype=BF16, **how)
    before = copy.deepcopy(model.state_dict())
    model.cuda()
    after = model.state_dict()
    assert all(v.device.type == "cuda" for v in after.values())
    assert_same({k: v.cpu() for k, v in after.items()}, dict(before))
    train(model, opt, rows)
    weight = model[0].weight
    assert (weight.device.type, weight.dtype) == ("cuda", torch.float32)


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32], ids=str)
def test_the_check_finds_inf_and_nan(dtype):
    nothing = torch.empty(0, dtype=dtype, device=DEVICE)  # its largest is an error on a GPU
    assert not any_nonfinite([nothing])
    for bad in (float("inf"), -float("inf"), float("nan")):
        grads = [torch.full((7, n), 3.0, dtype=dtype, device=DEVICE) for n in (1, 8, 33)]
        grads += [torch.ones(3, device=DEVICE), nothing]  # the first is a norm's
        assert not any_nonfinite(grads)
        grads[1][5, 6] = bad
        assert any_nonfinite(grads)
