"""Both copies of the weights: what is in vectors, what is warned of, what a bad file changes."""

import copy
import gc
import weakref
from functools import partial

import pytest
import tiny
import torch
from fastai.optimizer import OptimWrapper
from torch import nn

import mixedfp.callback  # noqa: F401, puts `to_fp16` on Learners
from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same


def make_model():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adafactor])
def test_flat_masters_lie_in_one_vector_whatever_steps_them(make):
    model = make_model()
    opt = make(model.parameters())
    with_masters(model, opt, dtype="bf16", flat_master=True)
    storages = {m.untyped_storage().data_ptr() for m in opt.masters.master}
    assert len(opt.masters.vectors) == len(storages) == 2  # 16-bit weights, and those of the norm


@pytest.mark.parametrize("flat", [False, True])
def test_the_lists_of_a_learner_hold_its_masters(flat):
    learn = tiny.make_learner().to_bf16(flat_master=flat)
    learn.create_opt()
    model, masters = learn.mp_cb.model_params, learn.mp_cb.master_params
    assert len(model) == len(masters) == 2
    for ps, ms in zip(model, masters, strict=True):
        assert len(ms) == (1 if flat else len(ps)) and all(m.dtype == torch.float32 for m in ms)
        own = torch.cat([learn.opt.masters[p].flatten() for p in ps])
        assert torch.equal(torch.cat([m.flatten() for m in ms]), own)


def fused(params, **kwargs):
    """PyTorch's fused AdamW for fastai, as the guide on speed writes it."""
    return OptimWrapper(params, partial(torch.optim.AdamW, fused=True), **kwargs)


@pytest.mark.parametrize("to", ["to_bf16", "to_fp16"])
def test_a_fused_optimizer_follows_the_rates_of_groups_and_schedules(to):
    """`fit_one_cycle` with a slice of rates: flat has the same bits, and unfused nearly so."""
    runs = {}
    for name, opt, flat in (("flat", fused, True), ("each", fused, False), ("plain", None, True)):
        opt = tiny.torch_optimizer(torch.optim.AdamW) if opt is None else opt
        learn = tiny.make_learner(opt, splitter=tiny.three_groups, seed=3)
        getattr(learn, to)(flat_master=flat)
        with learn.no_bar(), learn.no_logging():
            learn.fit_one_cycle(2, slice(1e-3, 1e-2))
        rates = [h["lr"] for h in learn.opt.hypers]
        assert rates[0] < rates[-1] and len(rates) == 3
        runs[name] = tiny.weights(learn)
    assert_same(runs["flat"], runs["each"])
    for k, v in runs["plain"].items():
        torch.testing.assert_close(runs["flat"][k].float(), v.float(), rtol=0.02, atol=2e-3)


def test_weights_beyond_float16_are_named_and_others_are_not(warnings_of):
    model = make_model()
    with torch.no_grad():
        model[2].weight[0, 0] = 1e5
    with_masters(model, torch.optim.SGD(model.parameters(), 0.1), dtype="fp16")
    found = [text for text in warnings_of() if "65504" in text]
    assert len(found) == 1 and found[0].startswith("`2.weight` holds values above 65504")


def test_a_loaded_buffer_that_16_bits_cannot_hold_stays_in_float32(warnings_of):
    model = make_model()
    model.register_buffer("counts", torch.ones(3))
    with_masters(model, torch.optim.SGD(model.parameters(), 0.1), dtype="bf16")
    assert model.counts.dtype == torch.bfloat16
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    assert model.counts.dtype == torch.bfloat16 and not warnings_of()
    state["counts"] = torch.tensor([1.0, 257.0, 3.0])
    model.load_state_dict(state)
    assert model.counts.dtype == torch.float32 and model.counts[1] == 257
    assert "`counts` is loaded with integers beyond 256" in warnings_of()[0]


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


def test_restoring_frees_the_vectors_at_once():
    """Not only when Python next looks for cycles: they are as large as the model."""
    model = nn.Linear(4, 4)
    model, opt = with_masters(model, torch.optim.AdamW(model.parameters()), flat_master=True)
    model(torch.ones(2, 4)).sum().backward()
    opt.step()
    vectors = [weakref.ref(v.master) for v in opt.masters.vectors]
    gc.disable()
    try:
        opt.masters.restore()
        assert [vector() for vector in vectors] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("flat", [False, True])
def test_a_frozen_16_bit_layer_has_float32_masters_once_it_is_trained(flat):
    """Its updates are below the distance of two 16-bit numbers, and would be rounded away."""
    torch.manual_seed(0)
    model = make_model().bfloat16()
    model[0].requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with_masters(model, opt, dtype="bf16", flat_master=flat)
    weight, x = model[0].weight, torch.randn(8, 4)
    assert opt.masters[weight].dtype == torch.bfloat16
    before = weight.detach().float()
    model[0].requires_grad_(True)
    for _ in range(3):
        model(x).square().sum().backward()
        opt.step()
        opt.zero_grad()
    master = opt.masters[weight]
    assert master.dtype == torch.float32 and 0 < (master - before).abs().max() < 1e-4
