"""The report on memory formats: what it times is what it says, and nothing of the model changes."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mixedfp.memory_format import MemoryFormatReport, memory_format_report
from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same, tiny_batch, tiny_net

BATCH = tiny_batch()
FORMATS = torch.contiguous_format, torch.channels_last


class Looking(nn.Module):
    """A convolution that notes how its weights lie, and in what precision they are."""

    seen: list = []  # of all copies

    def __init__(self):
        super().__init__()
        self.net = tiny_net()

    def forward(self, x):
        """Note, and compute."""
        w = self.net.conv.weight
        formats = [f for f in FORMATS if w.is_contiguous(memory_format=f)]
        self.seen.append((w.dtype, *formats))
        return self.net(x)


@pytest.fixture
def looking():
    """Make one that has seen nothing."""
    Looking.seen = []
    return Looking()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_both_formats_are_tried_in_turn(looking, dtype):
    """In the precision that was asked for, after a look in float32 at what each computes."""
    found = memory_format_report(looking, BATCH, cross_entropy, dtype, n_turns=3)
    expected = [(torch.float32, f) for f in FORMATS] + [(dtype, f) for f in FORMATS] * (1 + 3)
    assert Looking.seen == expected
    assert found.dtype == dtype and not found.problem
    assert len(found.contiguous) == len(found.channels_last) == 3
    assert min(found.contiguous + found.channels_last) > 0


def test_the_precision_is_that_of_the_model(looking):
    """And so is what stays in 32 bits."""
    opt = torch.optim.SGD(looking.parameters(), lr=0.1)
    model, opt = with_masters(looking, opt, dtype=torch.bfloat16, keep_fp32="net.conv")
    found = memory_format_report(model, BATCH, cross_entropy, n_turns=1)
    assert found.dtype == torch.bfloat16
    assert {dtype for dtype, _ in Looking.seen} == {torch.float32}
    Looking.seen.clear()
    memory_format_report(model, BATCH, cross_entropy, keep_fp32=(), n_turns=1)
    assert {dtype for dtype, _ in Looking.seen} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("flat", [False, True])
def test_nothing_changes(flat):
    """Weights, masters, gradients, statistics, modes, hooks and random numbers are as before."""
    model = nn.Sequential(tiny_net(), nn.Dropout(0.5))
    model, opt = with_masters(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), flat_master=flat
    )
    cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    opt.step()
    cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    model[0].norm.eval()

    def state():
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        tensors = [*model.named_parameters(), *model.named_buffers()]
        bits = {name: t.detach().clone() for name, t in tensors}
        full = {name: t.clone() for name, t in model.state_dict().items()}
        return (full, grads, bits), [m.training for m in model.modules()]

    before, random_state = state(), torch.get_rng_state()
    memory_format_report(model, BATCH, cross_entropy, n_turns=1)
    assert torch.equal(torch.get_rng_state(), random_state)
    after = state()
    assert_same(after[0], before[0])
    assert after[1] == before[1]
    opt.step()
    assert not torch.equal(model.state_dict()["0.linear.weight"], before[0][0]["0.linear.weight"])


def test_batches_in_any_form():
    """A dict of arguments, as Hugging Face's models take it."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = tiny_net()

        def forward(self, pixel_values, labels):
            return cross_entropy(self.net(pixel_values), labels)

    batch = dict(pixel_values=BATCH[0], labels=BATCH[1])
    found = memory_format_report(Named(), batch, lambda loss, _: loss, torch.bfloat16, n_turns=1)
    assert not found.problem and len(found.contiguous) == 1
    with pytest.raises(TypeError, match="a batch is a Tensor"):
        memory_format_report(tiny_net(), BATCH[0], cross_entropy)


def test_volumes_cannot_have_it():
    """PyTorch refuses the format for five dimensions; the report says so and goes on."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Unflatten(1, (2, 2)), nn.Conv3d(2, 2, 1))
    loss = memory_format_report(
        model, (BATCH[0], BATCH[1]), lambda out, y: out.square().mean(), n_turns=1
    )
    assert loss.problem.startswith("It raises: ") and "rank 4" in loss.problem
    assert not loss.is_faster and "not for this model" in repr(loss)


def test_a_gain_has_to_be_one():
    """By 3 %, and in three of four turns."""
    times = dict(dtype=torch.bfloat16, contiguous=(1.0,) * 4)
    assert MemoryFormatReport(channels_last=(0.9, 0.9, 0.9, 1.1), **times).is_faster
    assert not MemoryFormatReport(channels_last=(0.5, 0.5, 1.1, 1.1), **times).is_faster
    assert not MemoryFormatReport(channels_last=(0.98,) * 4, **times).is_faster
    found = MemoryFormatReport(channels_last=(0.5,) * 4, set_by="the line", **times)
    assert found.speed == 2.0 and found.line == "the line" and "the line" in repr(found)
