"""What a CPU computes in float32 for a 16-bit model: products, softmax, sums of embeddings.

Oracle: the same function of the same numbers in float32. A spy below autograd records in which
dtype the kernels run.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mixedfp.cast import model2half, to_float, to_half
from mixedfp.engine import in_float32
from mixedfp.engine.in_float32 import InFloat32, has_arithmetic
from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same

FULL, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
both = pytest.mark.parametrize("dtype", [HALF, BF16], ids=["fp16", "bf16"])


class Spy(TorchDispatchMode):
    """The dtypes of the first operand of every kernel, by name."""

    def __enter__(self):
        self.seen = {}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            self.seen.setdefault(func.overloadpacket.__name__, set()).add(args[0].dtype)
        return func(*args, **(kwargs or {}))


# The numbers


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
    net, _ = with_masters(net, torch.optim.SGD(net.parameters(), 0.1), dtype="fp16")
    out = net(torch.ones(2, 4))
    torch.testing.assert_close(out.detach(), exact, rtol=0.01, atol=1e-3)


# What is left alone


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


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_computes_the_same_twice(reentrant):
    """The repeated pass is outside of the mode: so both are left to PyTorch."""
    x, w = (torch.randn(64, 64).to(BF16).requires_grad_() for _ in range(2))
    with Spy() as spy, InFloat32(BF16):
        out = checkpoint(torch.matmul, x, w, use_reentrant=reentrant)
    out.sum().backward()
    assert w.grad is not None and (reentrant or spy.seen["mm"] == {BF16})


# What the processor is

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
