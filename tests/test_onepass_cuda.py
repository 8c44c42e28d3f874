"""The step in one pass over memory on a GPU: the same laws, and nobody waits."""

import inside
import pytest
import torch
from test_onepass import OPTIMIZERS, assert_within_ulps, given_gradients, net
from torch import nn

from mixedfp.scaler import LossScaler
from mixedfp.step import MixedStep
from mixedfp.testing import assert_same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
NAMES = ["fastai SGD", "fastai Adam", "SGD", "AdamW"]


def train(name, flat, compiled=False, n_steps=12, watch=None, on_device=None):
    """Train in float16 on the GPU; `watch` is called in the middle of it, then at its end."""
    model = net().cuda()
    mixed = MixedStep(
        torch.float16, flat, LossScaler("cuda", init_scale=2.0**18), compiled=compiled
    )
    inside.be_exclusive(mixed, flat)
    inside.decide_on_device(mixed, on_device)
    mixed.attach(model)
    opt = mixed.wrap_optimizer(OPTIMIZERS[name](list(model.parameters())))
    rng = torch.Generator().manual_seed(1)
    for i in range(n_steps):
        x = torch.randn(16, 12, generator=rng).cuda()
        y = torch.randint(0, 2, (16,), generator=rng).cuda()
        loss = nn.functional.cross_entropy(mixed.uncast(model(mixed.cast(x, training=True))), y)
        mixed.scale(64 * loss).backward()  # too much for the first scales
        if watch is not None and i == n_steps - 1:
            watch("error")
        if mixed.unscale():
            mixed.step()
        else:
            mixed.skip()
        mixed.update()
        opt.zero_grad()
        if watch is not None:
            watch("default")
    return model, opt, mixed


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_vectors_have_the_bits_of_masters_for_each_parameter(name, on_device):
    """Whoever decides on a skip; the first steps overflow."""
    one, other = train(name, True, on_device=on_device), train(name, False)
    assert one[1].update_paths().keys() == {"in chunks"}
    assert one[2].scaler.skipped == other[2].scaler.skipped != []
    assert_same(dict(one[0].state_dict()), dict(other[0].state_dict()))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_nobody_waits_for_the_device(name, compiled):
    """PyTorch raises at any wait while the last step is asked for."""
    try:
        train(name, True, compiled, watch=torch.cuda.set_sync_debug_mode)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_watch_sees_a_wait():
    """A control: reading a number raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones((), device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_pass_is_within_ulps(name):
    """On the same gradients: an ulp of the largest weight for each step."""
    runs = []
    for compiled in (True, False):
        mixed = MixedStep(torch.bfloat16, True, compiled=compiled)
        inside.be_exclusive(mixed)
        runs.append(given_gradients(mixed, OPTIMIZERS[name], device="cuda"))
    assert runs[0][1].update_paths().keys() == {"compiled"}
    assert_within_ulps(runs[0][0], runs[1][0], 10)
