"""The parameters are the masters: whose they are, where they lie, and which dtypes they have."""

import copy

import pytest
import tiny
import torch
from torch import nn

import mixedfp.callback  # noqa: F401, puts `to_fp16` on Learners
from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same


def make_model():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def test_a_file_with_a_broken_loss_scale_changes_nothing():
    learn = tiny.make_learner("adam").to_fp16()
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    bad = copy.deepcopy(learn.opt.state_dict())
    bad["loss_scale"]["scale"] = -1.0
    for state in bad["state"]:
        state["grad_avg"] = state["grad_avg"] + 1
    before = copy.deepcopy(tiny.opt_state(learn))
    with pytest.raises(ValueError, match="`scale` is -1.0"):
        learn.opt.load_state_dict(bad)
    assert_same(tiny.opt_state(learn), before)


LAYOUTS = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])


def step(model, opt):
    opt.zero_grad()
    model(torch.randn(8, 4)).square().sum().backward()
    opt.step()


@LAYOUTS
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_parameters_are_the_users_objects_and_float32(dtype, flat):
    model = make_model()
    before = list(model.parameters())
    opt = torch.optim.AdamW(before)
    with_masters(model, opt, dtype=dtype, flat_master=flat)
    for _ in range(2):
        step(model, opt)
        for p, was in zip(model.parameters(), before, strict=True):
            assert p is was and p.dtype == p.grad.dtype == torch.float32
    opt.masters.restore()
    for p, was in zip(model.parameters(), before, strict=True):
        assert p is was and p.dtype == torch.float32


@pytest.mark.parametrize(
    ("how", "is_own"),
    [
        (dict(dtype="fp32"), True),
        (dict(dtype="bf16", skip_nonfinite=False), True),
        (dict(dtype="bf16"), False),
        (dict(dtype="fp16"), False),
    ],
    ids=str,
)
def test_a_step_that_skips_nothing_is_the_optimizers_own(how, is_own):
    opt = torch.optim.AdamW((model := make_model()).parameters())
    with_masters(model, opt, **how)
    assert ("step" not in vars(opt)) == is_own


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adafactor])
def test_flat_parameters_lie_in_one_vector_and_files_of_parts_are_small(make):
    model = make_model()
    opt = make(model.parameters())
    with_masters(model, opt, dtype="bf16", flat_master=True)
    step(model, opt)
    (vector,) = opt.masters.vectors
    for p in model.parameters():
        assert torch.equal(vector.view(vector.full, p), p)
        assert vector.view(vector.full, p).data_ptr() == p.data_ptr()
        assert p.untyped_storage().nbytes() == 4 * p.numel()


@LAYOUTS
def test_16_bit_weights_are_widened_with_one_warning_and_frozen_ones_stay(flat, warnings_of):
    """Updates below the distance of two 16-bit numbers are kept once a layer is trained."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).bfloat16()
    model[0].requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with_masters(model, opt, dtype="bf16", flat_master=flat)
    assert len(warnings_of()) == 1
    step(model, opt)
    frozen, before = model[0].weight, model[0].weight.detach().float()
    assert (frozen.dtype, model[1].weight.dtype) == (torch.bfloat16, torch.float32)
    model[0].requires_grad_(True)
    for _ in range(3):
        step(model, opt)
    assert frozen is model[0].weight and frozen.dtype == torch.float32
    assert 0 < (frozen - before).abs().max() < 1e-4
    assert frozen in set(opt.masters.copies.params)


class PackedWeight(nn.Parameter):
    """Two 4-bit codes a byte, as quantizing libraries keep them, with an attribute of its own."""

    def __new__(cls, data=None, scales=None):
        self = torch.Tensor._make_subclass(cls, torch.empty(0) if data is None else data, False)
        self.scales = scales
        return self

    def __deepcopy__(self, memo):
        return type(self)(self.data.clone(), self.scales.clone())


@LAYOUTS
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_packed_weights_and_buffers_keep_their_bits(dtype, flat):
    model = make_model()
    model.packed = PackedWeight(torch.arange(64, dtype=torch.uint8), torch.rand(16) * 1e-3)
    model.eights = nn.Parameter(torch.randn(16).to(torch.float8_e4m3fn), requires_grad=False)
    model.register_buffer("inv_freq", 1e4 ** (-torch.arange(8) / 8))
    model.register_buffer("turns", torch.polar(torch.ones(8), torch.arange(8) / 3))
    model.forward = model[:3].forward
    names = "packed", "eights", "inv_freq", "turns"
    before = {k: getattr(model, k).detach().clone().view(torch.uint8) for k in names}
    opt = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    with_masters(model, opt, dtype=dtype, flat_master=flat)
    step(model, opt)
    for found in (model, copy.deepcopy(model), opt.masters.float_model()):
        assert {k: type(getattr(found, k)) for k in names}["packed"] is PackedWeight
        assert_same({k: getattr(found, k).detach().view(torch.uint8) for k in names}, before)
