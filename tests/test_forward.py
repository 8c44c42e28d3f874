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


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x).relu())


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


@both
def test_outputs_keep_their_type_and_targets_inside_are_not_rounded(dtype):
    class Regression(Plain):
        def forward(self, x, labels=None):
            y = super().forward(x)
            return Output(y, X), {"loss": [F.mse_loss(y, labels), None]}, "text"

    labels = torch.full((16, 3), 1 + 2**-12)
    output, losses, text = half(Regression(), dtype)(X, labels=labels)
    assert type(output) is Output and output.cache is X and text == "text"
    assert output.logits.dtype == FULL and losses["loss"][1] is None
    assert_same(losses["loss"][0], F.mse_loss(output.logits, labels))


ENDS = (
    nn.Softmax(-1),
    lambda y: y.softmax(-1)[:, None].squeeze(1),
    lambda y: y.log_softmax(-1).exp(),
)


@both
@pytest.mark.parametrize("end", ENDS, ids=["module", "method", "log"])
def test_probabilities_add_up_to_1_and_a_sigmoid_is_none(end, dtype):
    assert (half(Ends(end), dtype)(X).sum(-1) - 1).abs().max() < 2e-6
    model = half(Ends(torch.sigmoid), dtype)
    with torch.no_grad():
        model.linear.weight.zero_(), model.linear.bias.fill_(10.0)
    assert_same(model(X).detach(), torch.sigmoid(torch.full((16, 100), 10.0)))


@both
@pytest.mark.parametrize("native", [False, True])
def test_32_bit_tensors_inside_are_no_obstacle(dtype, native):
    model, plain = Positions(), Positions()
    plain.load_state_dict(model.state_dict())
    out = half(model, dtype, native=native)(X)
    torch.testing.assert_close(out, plain(X), rtol=0.05, atol=0.05)
    F.cross_entropy(out, Y).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_without_autocast_they_are_refused_and_the_rest_is_in_16_bits():
    with pytest.raises((RuntimeError, ValueError), match="type"):
        half(Positions(), autocast=False)(X)
    seen = []
    half(Ends(lambda y: seen.append(y.softmax(-1).dtype) or y), autocast=False)(X)
    assert seen == [BF16]
    assert half(nn.LSTM(4, 4), autocast=False)(X)[0].dtype == FULL  # a part without copies


# What is raised


def test_a_constant_beyond_float16_is_named():
    model = half(Ends(lambda y: y.masked_fill(y > 0, -1e9)), HALF)
    with pytest.raises(MixedPrecisionError, match=r"Ends is beyond .* 65504.*torch\.finfo"):
        model(X)
    assert half(Ends(lambda y: y.masked_fill(y > 0, -1e9)))(X).min() < -9e8


# What tools see


SHAPES = {Plain: (16, 4), Positions: (16, 4), encoder: (2, 5, 4)}


@both
@pytest.mark.parametrize("make", SHAPES)
def test_export_trace_and_functional_call(make, dtype):
    model, x = half(make(), dtype).eval(), torch.randn(SHAPES[make])
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


# Inputs are the caller's, norms keep the stream


class Sees(nn.Module):
    """Keeps what it is called with, and computes a loss inside."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, target, *, mask):
        self.seen = x, target, mask
        y = (self.layer(x) + mask).softmax(-1)
        return y, F.mse_loss(y.float(), target.float())


@both
def test_arguments_arrive_as_they_are_passed_or_cast_without_autocast(dtype):
    target, mask = torch.full((16, 3), 1001.94), torch.tensor([0.0, torch.finfo(FULL).min, 0.0])
    model = half(Sees(), dtype)
    out, loss = model(X, target, mask=mask)
    assert all(a is b for a, b in zip(model.seen, (X, target, mask), strict=True))
    assert out.dtype == FULL and torch.isfinite(out).all()
    assert_same(loss, F.mse_loss(out, target))
    model = half(Sees(), dtype, autocast=False)
    model(X, target, mask=mask)
    assert [t.dtype for t in model.seen] == [dtype] * 3


@both
def test_products_that_autocast_leaves_in_float32_do_not_round_their_operands(dtype):
    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Linear(1, 1)

        def forward(self, a, b):
            one = a.flatten(), b.flatten()
            dots = a[0].dot(b[0]), torch.inner(*one), torch.tensordot(*one, 1)
            return torch.stack(dots), torch.cdist(a, b)

    a, b = 100 + torch.randn(4, 3), 100 + torch.randn(4, 3)
    model = Distances()
    goal = model(a, b)
    assert_same(half(model, dtype)(a, b), goal)


NORMS = {
    "layer_norm": lambda: nn.LayerNorm(4),
    "without_a_bias": lambda: nn.LayerNorm(4, bias=False),
    "without_a_weight": lambda: nn.LayerNorm(4, elementwise_affine=False),
    "group_norm": lambda: nn.GroupNorm(2, 4),
    "rms_norm": lambda: nn.RMSNorm(4),
    "a_subclass": lambda: type("Own", (nn.LayerNorm,), {})(4),
}


@both
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_returns_the_dtype_it_is_given(name, recomputed, dtype):
    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), NORMS[name]()

        def forward(self, x, is_full):
            x = self.layer(x)
            x = x.float() if is_full else x
            y = checkpoint(self.norm, x, use_reentrant=False) if recomputed else self.norm(x)
            self.seen = x, y
            return y

    model = half(Stream(), dtype)
    for is_full in (True, False):
        model(X, is_full).sum().backward()
        x, y = model.seen
        assert x.dtype == y.dtype == (FULL if is_full else dtype)
        exact = NORMS[name]()(x.detach().float())
        torch.testing.assert_close(y.float(), exact, **NEAR[y.dtype])
    assert all(p.grad is not None for p in model.parameters())


NEAR = {FULL: dict(atol=1e-5, rtol=1e-5), HALF: dict(atol=4e-3, rtol=2e-3),
        BF16: dict(atol=3e-2, rtol=2e-2)}  # fmt: skip


def test_mixed_dtypes_that_autocast_does_not_cast_name_the_way_out():
    def adds(y):
        return torch.zeros(16, 100).index_add(0, torch.arange(16), y)

    with pytest.raises(RuntimeError, match="scalar type\nEnds combines dtypes.*autocast=False"):
        half(Ends(adds))(X)
