"""The forward pass of a 16-bit model: what goes in and comes out, what a CPU computes in float32.

Oracles: the model's own forward pass, the same model or function in float32, and the same call made
twice. A spy below autograd records in which dtype the kernels run.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mixedfp.cast import Policy, model2half, to_float, to_half
from mixedfp.engine import in_float32
from mixedfp.engine.forward import install_forward, remove_forward
from mixedfp.engine.in_float32 import InFloat32, has_arithmetic
from mixedfp.formats import MixedPrecisionError
from mixedfp.testing import assert_same

FULL, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
both = pytest.mark.parametrize("dtype", [HALF, BF16], ids=["fp16", "bf16"])
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(3))


def half(model, dtype=BF16, **kwargs):
    """Return `model`, called with 32-bit tensors and computed in `dtype`."""
    install_forward(model, Policy(dtype, **kwargs))
    return model


class Ends(nn.Module):
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
    y, *others = losses["loss"]
    assert y.dtype == output.logits.dtype == FULL and output.logits.isfinite().all()
    assert_same(others, [F.mse_loss(y, labels), None])
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


def test_without_autocast_32_bit_tensors_inside_are_refused_and_the_rest_is_in_16_bits():
    with pytest.raises((RuntimeError, ValueError), match="type"):
        half(Positions(), autocast=False)(X)
    seen = []
    half(Ends(lambda y: seen.append(y.softmax(-1).dtype) or y), autocast=False)(X)
    assert seen == [BF16]
    assert half(nn.LSTM(4, 4), autocast=False)(X)[0].dtype == FULL  # a part without copies


def test_a_constant_beyond_float16_and_dtypes_that_do_not_mix_are_named():
    def ends(f, dtype=BF16):
        return half(Ends(f), dtype)(X)

    with pytest.raises(MixedPrecisionError, match=r"Ends is beyond .* 65504.*torch\.finfo"):
        ends(lambda y: y.masked_fill(y > 0, -1e9), HALF)
    assert ends(lambda y: y.masked_fill(y > 0, -1e9)).min() < -9e8
    with pytest.raises(RuntimeError, match="scalar type\nEnds combines dtypes.*autocast=False"):
        ends(lambda y: torch.zeros(16, 100).index_add(0, torch.arange(16), y))


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
    found = torch.export.export(model, (x,)).module(), torch.jit.trace(model, x, check_trace=False)
    for f in found:  # a GRU's bfloat16 gates are under autocast in eager mode alone
        torch.testing.assert_close(f(x), expected, rtol=2**-6, atol=2**-6)
    assert_same(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), expected)
    with torch.no_grad():
        [p.mul_(-1) for p in model.parameters()]
    assert not torch.allclose(model(x), expected, atol=0.05)
    for f in found:  # a later weight counts
        torch.testing.assert_close(f(x), model(x), rtol=2**-6, atol=2**-6)


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
@pytest.mark.parametrize("kept", [(), "*.*", "*.weight", "*.bias"])
def test_a_norm_returns_the_dtype_it_is_given(kept, norm, is_recomputed, dtype):
    model = half(Stream(nn.Linear(4, 4), copy.deepcopy(norm)), dtype, keep_fp32=kept)
    for is_full in (True, False):
        model(X, is_full, is_recomputed).sum().backward()
        x, y = model.seen
        assert x.dtype == y.dtype == (FULL if is_full else dtype)
        torch.testing.assert_close(y.float(), norm(x.detach().float()), **NEAR[y.dtype])
    assert all(p.grad is not None for p in model.parameters())


class Spy(TorchDispatchMode):
    """The dtypes of the first operand of every kernel, by name."""

    def __enter__(self):
        self.seen = {}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            self.seen.setdefault(func.overloadpacket.__name__, set()).add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@given(st.tuples(*[st.integers(1, 6)] * 3), st.integers(-12, 11), st.integers(0, 2**31))
def test_a_product_is_the_float32_product_rounded(sizes, exponent, seed):
    rng, (n, k, m) = torch.Generator().manual_seed(seed), sizes
    x, w, g = (torch.randn(s, generator=rng) for s in [(n, k), (m, k), (n, m)])
    x, w, g = (x * 2.0**exponent).half(), (w * 2.0**exponent).half(), g.half()
    xh, wh = x.clone().requires_grad_(), w.clone().requires_grad_()
    with InFloat32(HALF):
        out = F.linear(xh, wh)
    out.backward(g)
    for ours, a, b in [(out, x, w.T), (xh.grad, g, w), (wh.grad, g.T, x)]:
        truth = a.double() @ b.double()
        # all that the order of a sum in float32 can change
        slack = (a.shape[1] + 1) * 2.0**-24 * (a.double().abs() @ b.double().abs())
        assert ours.dtype == HALF
        assert ((truth - slack).half() <= ours).all() and (ours <= (truth + slack).half()).all()


PRODUCTS = {
    "linear": F.linear,
    "@": lambda x, w: x.t() @ w[:, ::2],
    "conv2d": lambda x, w: F.conv2d(x.view(2, 8, 16, 16), w.view(4, 8, 8, 16)),
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "attention": lambda x, w: F.multi_head_attention_forward(
        *(x, x, x, 64, 2, w.repeat(3, 1), w[:3].flatten(), None, None, False, 0.0, w, w[0]))[0],
}  # fmt: skip


@both
@pytest.mark.parametrize("name", PRODUCTS)
def test_kernels_run_in_float32(name, dtype):
    x, w = (torch.randn(64, 64).to(dtype).requires_grad_() for _ in range(2))
    with InFloat32(dtype), Spy() as spy:
        out = PRODUCTS[name](x, w)
    out.sum().backward()
    kernels = spy.seen.keys() & {"mm", "addmm", "bmm", "convolution"}
    assert kernels and all(spy.seen[k] == {FULL} for k in kernels)
    assert out.dtype == w.grad.dtype == dtype


@both
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind, dtype):
    """Packed, in both directions, with hidden states in float32, on any CPU and with native."""
    net = model2half(kind(4, 5, num_layers=2, bidirectional=True), dtype)
    plain = model2half(copy.deepcopy(net), FULL)
    batch = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([3, 2]))
    hidden = torch.zeros(4, 2, 5)
    hidden = (hidden, hidden) if kind is nn.LSTM else hidden
    [inputs] = to_half([batch], dtype)
    expected = plain(to_float(inputs), hidden)[0].data
    for is_emulated in (True, False):
        with torch.autocast("cpu", dtype), InFloat32(dtype, is_emulated):
            out = net(batch, hidden)[0].data
        out.float().sum().backward()
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)
    assert all(p.grad is not None for p in net.parameters())


OUT_OF_RANGE = {
    "normalize": lambda x: F.normalize(x * 0, dim=-1),
    "cosine_similarity": lambda x: F.cosine_similarity(x * 0, x, dim=-1),
    "exp": lambda x: torch.exp(x * 12).log(),
    "**": lambda x: (x * 400) ** 2 / 1e5,
    "pow": lambda x: (x * 400).pow(2) / 1e5,
    "rsqrt": lambda x: torch.rsqrt(x * 400) * x.pow(2).mean(-1, keepdim=True),
    "sum": lambda x: (x * 400).sum(-1) / 1e3,
    "cumsum": lambda x: (x * 400).cumsum(-1) / 1e3,
    "norm": lambda x: (x * 400).norm(dim=-1) / 1e3,
    "cdist": lambda x: torch.cdist(x * 400, x * 0) / 1e3,
    "mse_loss": lambda x: F.mse_loss(x * 400, x * 0) / 1e5,
    "softplus": F.softplus,
    "reciprocal": lambda x: (x * 1e-5).reciprocal() / 1e5,
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_float16_has_the_range_that_cudas_autocast_gives_it(name):
    class Net(nn.Linear):
        def forward(self, x):
            return OUT_OF_RANGE[name](super().forward(x))

    net = Net(4, 300)
    nn.init.uniform_(net.weight, 0.2, 0.3)
    exact = net(torch.ones(2, 4)).detach()
    out = half(net, HALF)(torch.ones(2, 4)).detach()
    torch.testing.assert_close(out, exact, rtol=0.01, atol=1e-3)


def test_operands_of_mixed_types_are_refused_as_pytorch_refuses_them():
    x, w = torch.randn(2, 4), torch.randn(4, 4).half()
    for f in (F.linear, torch.matmul, lambda a, b: F.conv1d(a[None], b[:, :2, None])):
        with pytest.raises(RuntimeError) as native:
            f(x, w)
        with pytest.raises(RuntimeError) as ours, InFloat32(HALF):
            f(x, w)
        assert str(ours.value) == str(native.value)
    with torch.autocast("cpu", HALF), InFloat32(HALF):
        assert F.linear(x, w).dtype == HALF
        out = torch.zeros(2, 4, dtype=HALF)
        assert torch.mm(x.half(), w, out=out) is out and out.any()
        assert torch.matmul(x.double(), w.double()).dtype == torch.float64
        by_name = torch.layer_norm(normalized_shape=(4,), input=w, weight=w[0])
        assert_same(by_name, F.layer_norm(w.float(), (4,), w[0].float()))
        with torch.autocast("cpu", enabled=False):
            assert F.linear(x, w.float()).dtype == FULL and w.softmax(-1).dtype == HALF


INTEL, AMD = "vendor_id : GenuineIntel", "AMD64 Family 25 Model 97, AuthenticAMD"


@pytest.mark.parametrize("machine, processor, expected", [
    # the processor: its maker, and whether bfloat16 has products, instructions, tiles
    ("x86_64", (INTEL, True, True, True), True),
    ("x86_64", (INTEL, True, True, False), False),  # at half the rate of float32's instructions
    ("x86_64", (INTEL, False, True, True), False),  # oneDNN is held to other instructions
    ("AMD64", (AMD, True, True, False), True),
    ("AMD64", (AMD, True, False, False), False),  # emulated
    ("aarch64", ("", False, False, False), True),
])  # fmt: skip
def test_what_a_cpu_trains_fast_with(machine, processor, expected, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(in_float32, "_processor", lambda: processor[0])
    monkeypatch.setattr(in_float32.private, "bf16_units", lambda: processor[1:])
    assert has_arithmetic("cpu", BF16) is expected
    assert has_arithmetic("cpu", HALF) is (machine == "aarch64")
