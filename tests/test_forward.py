"""The forward pass of a 16-bit model: what goes in and comes out, what tools see, what is left.

Oracles: the model's own forward pass, the same model in float32, and the same call made twice.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mixedfp.cast import Policy
from mixedfp.engine.forward import install_forward, remove_forward
from mixedfp.formats import MixedPrecisionError
from mixedfp.testing import assert_same

FULL, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
both = pytest.mark.parametrize("dtype", [HALF, BF16], ids=["fp16", "bf16"])
X, Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(3)), torch.arange(16) % 3


def half(model, dtype=BF16, **kwargs):
    """Return `model`, called with 32-bit tensors and computed in `dtype`."""
    install_forward(model, Policy(dtype, **kwargs))
    return model


class Ends(nn.Module):
    """A layer, and an end."""

    def __init__(self, end):
        super().__init__()
        self.linear, self.end = nn.Linear(4, 100), end

    def forward(self, x):
        return self.end(self.linear(x))


class Positions(nn.Module):
    """Makes 32-bit numbers that meet a norm, a recurrent layer and attention."""

    def __init__(self):
        super().__init__()
        self.norm, self.rnn = nn.LayerNorm(4), nn.GRU(4, 4, batch_first=True)
        self.attention, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        h = self.norm(x[:, None] + torch.sin(torch.arange(20.0)).view(5, 4))
        h = self.rnn(h + torch.arange(4.0))[0]
        return self.out(self.attention(h, h, h, attn_mask=torch.zeros(5, 5))[0].mean(1))


def encoder():
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


# What goes in and comes out


@dataclass
class Output:
    logits: torch.Tensor
    cache: object


class Losses(nn.Sequential):
    """Keeps what it is called with, and computes a loss inside."""

    def forward(self, x, labels, *, mask):
        self.seen = x, labels, mask
        y = super().forward(x)
        losses = {"loss": [y, F.mse_loss(y, labels), None]}
        return Output((y + mask).softmax(-1), X), losses, "text"


@both
def test_arguments_and_outputs_keep_their_types_and_targets_inside_are_not_rounded(dtype):
    labels, mask = torch.full((16, 3), 1001.94), torch.tensor([0.0, torch.finfo(FULL).min, 0.0])
    model = half(Losses(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), dtype)
    output, losses, text = model(X, labels, mask=mask)
    assert all(a is b for a, b in zip(model.seen, (X, labels, mask), strict=True))
    assert type(output) is Output and output.cache is X and text == "text"
    assert output.logits.dtype == FULL and output.logits.isfinite().all()
    assert_same(losses["loss"][1:], [F.mse_loss(losses["loss"][0], labels), None])
    half(model, dtype, autocast=False)(X, labels, mask=mask)
    assert [t.dtype for t in model.seen] == [dtype] * 3


ENDS = {
    "module": nn.Softmax(-1),
    "method": lambda y: y.softmax(-1)[:, None].squeeze(1),
    "log": lambda y: y.log_softmax(-1).exp(),
}


@both
@pytest.mark.parametrize("end", ENDS)
def test_probabilities_add_up_to_1_and_a_sigmoid_is_none(end, dtype):
    assert (half(Ends(ENDS[end]), dtype)(X).sum(-1) - 1).abs().max() < 2e-6
    model = half(Ends(torch.sigmoid), dtype)
    with torch.no_grad():
        model.linear.weight.zero_(), model.linear.bias.fill_(10.0)
    assert_same(model(X).detach(), torch.sigmoid(torch.full((16, 100), 10.0)))


@both
@pytest.mark.parametrize("native", [False, True])
def test_32_bit_tensors_inside_are_no_obstacle(dtype, native):
    model = Positions()
    expected = model(X)
    out = half(model, dtype, native=native)(X)
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)
    F.cross_entropy(out, Y).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_without_autocast_they_are_refused_and_the_rest_is_in_16_bits():
    with pytest.raises((RuntimeError, ValueError), match="type"):
        half(Positions(), autocast=False)(X)
    seen = []
    half(Ends(lambda y: seen.append(y.softmax(-1).dtype) or y), autocast=False)(X)
    assert seen == [BF16]
    assert half(nn.LSTM(4, 4), autocast=False)(X)[0].dtype == FULL  # a part without copies


def add(y):
    return torch.zeros(16, 100).index_add(0, torch.arange(16), y)


def mask_out(y):
    return y.masked_fill(y > 0, -1e9)


def test_a_constant_beyond_float16_and_dtypes_that_do_not_mix_are_named():
    with pytest.raises(MixedPrecisionError, match=r"Ends is beyond .* 65504.*torch\.finfo"):
        half(Ends(mask_out), HALF)(X)
    assert half(Ends(mask_out))(X).min() < -9e8
    with pytest.raises(RuntimeError, match="scalar type\nEnds combines dtypes.*autocast=False"):
        half(Ends(add))(X)


@both
def test_products_that_autocast_leaves_in_float32_do_not_round_their_operands(dtype):
    class Distances(nn.Linear):
        def forward(self, a, b):
            one = a.flatten(), b.flatten()
            dots = a[0].dot(b[0]), torch.inner(*one), torch.tensordot(*one, 1)
            return torch.stack(dots), torch.cdist(a, b)

    a, b = 100 + torch.randn(4, 3), 100 + torch.randn(4, 3)
    goal = Distances(1, 1)(a, b)
    assert_same(half(Distances(1, 1), dtype)(a, b), goal)


# What tools see

SHAPES = {
    "layers": (lambda: Ends(nn.Sequential(nn.ReLU(), nn.Linear(100, 3))), (16, 4)),
    "positions": (Positions, (16, 4)),
    "encoder": (encoder, (2, 5, 4)),
}


@both
@pytest.mark.parametrize("name", SHAPES)
def test_export_trace_and_functional_call(name, dtype):
    make, shape = SHAPES[name]
    model, x = half(make(), dtype).eval(), torch.randn(shape)
    expected = model(x)
    exported = torch.export.export(model, (x,)).module()(x)
    traced = torch.jit.trace(model, x, check_trace=False)(x)
    for out in (exported, traced):  # a GRU's bfloat16 gates are under autocast in eager mode alone
        torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6)
    assert_same(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), expected)


@both
def test_compiled_it_is_one_graph(dtype):
    """The casts of a CPU without 16-bit arithmetic as well."""
    torch._dynamo.reset()
    model, x = half(encoder(), dtype), torch.randn(2, 5, 4)
    twin, settings = copy.deepcopy(model), dict(backend="aot_eager", fullgraph=True)
    half(twin, dtype).compile(**settings)
    out, compiled = model(x), twin(x)
    assert_same(compiled, out)
    out.sum().backward(), compiled.sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=2**-5, atol=2**-5)
    assert_same(torch.compile(model, **settings)(x), out)


def test_compiled_recurrent_layers_run_outside_and_the_forward_pass_inside():
    torch._dynamo.reset()
    model = Positions()
    compiled = half(torch.compile(model, backend="aot_eager"))
    assert "forward" in vars(model)
    assert_same(compiled(X), model(X))
    remove_forward(compiled)
    assert "forward" not in vars(model)


# Norms keep the stream


class Stream(nn.Sequential):
    def forward(self, x, is_full, is_recomputed):
        x = self[0](x).float() if is_full else self[0](x)
        y = checkpoint(self[1], x, use_reentrant=False) if is_recomputed else self[1](x)
        self.seen = x, y
        return y


NORMS = [nn.LayerNorm(4), nn.LayerNorm(4, bias=False), nn.LayerNorm(4, elementwise_affine=False)]
NORMS += [nn.GroupNorm(2, 4), nn.RMSNorm(4), type("Own", (nn.LayerNorm,), {})(4)]
NEAR = {FULL: dict(atol=1e-5, rtol=1e-5), HALF: dict(atol=4e-3, rtol=2e-3),
        BF16: dict(atol=3e-2, rtol=2e-2)}  # fmt: skip


@both
@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_a_norm_returns_the_dtype_it_is_given(norm, is_recomputed, dtype):
    model = half(Stream(nn.Linear(4, 4), copy.deepcopy(norm)), dtype)
    for is_full in (True, False):
        model(X, is_full, is_recomputed).sum().backward()
        x, y = model.seen
        assert x.dtype == y.dtype == (FULL if is_full else dtype)
        torch.testing.assert_close(y.float(), norm(x.detach().float()), **NEAR[y.dtype])
    assert all(p.grad is not None for p in model.parameters())
