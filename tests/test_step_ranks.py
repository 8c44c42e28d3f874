"""`MixedStep` over two ranks, by hand: backward passes, layers and forward passes as few have them.

One pair of processes does all the cases, in 32 bits: there gradients by hand are the same bits.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from ranks import on_two_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mixedfp.step import MixedStep
from mixedfp.testing import assert_same

FULL = torch.float32


class Tied(nn.Module):
    """A layer that is used twice, once inside of a checkpoint with a backward pass of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.body = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        """Call it inside, then outside: on the way back the outer pass comes to it first."""
        return self.body(checkpoint(self.body, self.first(x), use_reentrant=True))


def two_layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def batch(rank, i):
    """Return the inputs of a rank's micro-batch."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * rank + i))


def shared(model, dtype=FULL):
    """Return `model` in DDP, a parameter a message, and the step that it is attached to."""
    ddp, mixed = DistributedDataParallel(model, bucket_cap_mb=1e-6), MixedStep(dtype)
    mixed.attach(ddp)
    mixed.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.125))
    return ddp, mixed


def one_step(rank, make, frozen=()):
    """Step once by two micro-batches; between them layers are frozen. Return gradients, weights."""
    torch.manual_seed(0)
    ddp, mixed = shared(make())
    for i in range(2):
        with ddp.no_sync() if i == 0 else nullcontext():
            mixed.scale(ddp(batch(rank, i)).square().mean()).backward()
        for name in frozen:
            ddp.module.get_parameter(name).requires_grad_(False)
    assert mixed.unscale()
    mixed.step()
    mixed.update()
    params = list(ddp.module.parameters())
    return [p.grad.clone() for p in params], [p.detach().clone() for p in params]


def by_hand(make, frozen=()):
    """Return what `one_step` is to come to: by the mean of both ranks' sums."""
    torch.manual_seed(0)
    models = [make() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for rank, model in enumerate(models):
        for i in range(2):
            model(batch(rank, i)).square().mean().backward()
            for name in frozen:
                model.get_parameter(name).requires_grad_(False)
    grads = [(p.grad + q.grad) / 2 for p, q in zip(*(m.parameters() for m in models), strict=True)]
    pairs = zip(models[0].parameters(), grads, strict=True)
    return grads, [p.detach() - 0.125 * g for p, g in pairs]


def statistics(rank, wrap):
    """Return a rank's running statistics after a step and two forward passes without gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    ddp = shared(model)[0] if wrap else DistributedDataParallel(model)
    ddp(batch(rank, 0)).square().mean().backward()
    found = []
    with torch.no_grad():
        for i in range(1, 4):
            ddp(batch(rank, i))
            found.append(copy.deepcopy(list(model.buffers())))
    return found


FROZEN = ("0.weight", "1.bias")


def work(rank):
    """Return all that the tests look at."""
    return {
        "tied": one_step(rank, Tied),
        "frozen": one_step(rank, two_layers, FROZEN),
        "statistics": [statistics(rank, wrap) for wrap in (True, False)],
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two processes have come to."""
    return on_two_ranks(work, tmp_path_factory.mktemp("ranks"), ("test_step_ranks",))


def test_a_gradient_from_a_backward_pass_inside_of_another_is_averaged_too(ranks):
    """The layer's part from outside was on its way by then: the sum is sent anew."""
    for found in ranks:
        assert_same(found["tied"], by_hand(Tied))


def test_a_layer_that_is_frozen_with_a_gradient_is_stepped_alike_on_both(ranks):
    """What it has from before is averaged; the optimizer steps by it."""
    for found in ranks:
        assert_same(found["frozen"], by_hand(two_layers, FROZEN))


def test_buffers_are_sent_when_plain_ddp_sends_them(ranks):
    """Without gradients a forward pass says that the next one is to send none."""
    for found in ranks:
        ours, plain = found["statistics"]
        assert_same(ours, plain)
    assert not ranks[0]["statistics"][1][-1][0].equal(ranks[1]["statistics"][1][-1][0])
