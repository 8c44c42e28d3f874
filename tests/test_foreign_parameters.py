"""Packed weights, frequencies, complex buffers, a `grad_dtype` of the user."""

import copy
import io

import pytest
import torch
from torch import distributed, nn

from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler

BF16 = torch.bfloat16


class PackedWeight(nn.Parameter):
    """Two 4-bit codes a byte, as quantizing libraries keep them, with attributes of its own."""

    def __new__(cls, data=None, scales=None):
        self = torch.Tensor._make_subclass(cls, torch.empty(0) if data is None else data, False)
        self.scales = scales
        return self

    def __deepcopy__(self, memo):
        return type(self)(self.data.clone(), self.scales.clone())


class Quantized(nn.Module):
    """A frozen packed layer, rotary frequencies and a trained layer."""

    def __init__(self):
        super().__init__()
        codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
        self.packed = PackedWeight(codes, torch.rand(16) * 1e-3)
        self.codes = nn.Parameter(torch.arange(-8, 8, dtype=torch.int8), requires_grad=False)
        self.eights = nn.Parameter(torch.randn(16).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("inv_freq", 1e4 ** (-torch.arange(8) / 8))
        self.register_buffer("turns", torch.polar(torch.ones(8), torch.arange(8) / 3))
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        weight = self.packed.float() / 256
        return self.out((x.float() @ weight).to(self.out.weight.dtype))


KEPT = "packed", "codes", "eights", "inv_freq", "turns"


def bits(t):
    return t.detach().contiguous().view(torch.uint8).clone()


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("flat", [False, True])
def test_packed_weights_and_frequencies_keep_their_bits(dtype, flat):
    model = Quantized()
    before = {k: (getattr(model, k).dtype, bits(getattr(model, k))) for k in KEPT}
    scales = model.packed.scales.clone()
    opt = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    with_masters(model, opt, dtype=dtype, flat_master=flat)
    scaler = LossScaler("cpu", 2.0**4, enabled=dtype == torch.float16)
    for _ in range(2):
        scaler.scale(model(torch.randn(3, 16)).square().mean()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = Quantized()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for found in (model, copy.deepcopy(model), loaded, opt.masters.float_model()):
        for k, (kind, was) in before.items():
            assert getattr(found, k).dtype == kind, k
            assert torch.equal(bits(getattr(found, k)), was), k
    assert model.packed.scales.dtype == torch.float32
    assert torch.equal(model.packed.scales, scales) and type(model.packed) is PackedWeight
    opt.masters.restore()
    assert all(getattr(model, k).dtype == kind for k, (kind, _) in before.items())


# `grad_dtype`


@pytest.mark.parametrize("grad_dtype", [None, torch.float32, BF16])
def test_gradients_are_float32_whatever_grad_dtype_was_before(grad_dtype):
    model = nn.Linear(4, 4)
    model.weight.grad_dtype = grad_dtype
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with_masters(model, opt, dtype="bf16")
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad.dtype == torch.float32


def test_fsdp2_does_not_honour_grad_dtype_yet(tmp_path):
    """A canary: once FSDP2 does (pytorch#197504), sharded weights can have float32 gradients."""
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = nn.Linear(4, 4).bfloat16()
        for p in model.parameters():
            p.grad_dtype = torch.float32
        fully_shard(model)
        model(torch.ones(2, 4, dtype=BF16)).sum().backward()
        assert model.weight.grad.dtype == BF16
    finally:
        distributed.destroy_process_group()
