"""Bad input gets a clear error at once, and leaves a learner that works."""

import logging
from functools import partial

import inside
import pytest
import torch
import torch.nn.functional as F
from fastai.losses import MSELossFlat
from tiny import (
    LAYERWISE,
    Do,
    bits,
    conv_net,
    make_dls,
    make_learner,
    masters,
    pictures,
    torch_optimizer,
    weights,
)
from torch import nn

from mixedfp.callback import MixedPrecision, mixed_precision
from mixedfp.formats import MixedPrecisionError
from mixedfp.step import MixedStep
from mixedfp.testing import assert_same


@pytest.fixture(autouse=True)
def notices(caplog):
    """Let every notice be given anew, and return what is given."""
    inside.forget_notices()
    caplog.set_level(logging.WARNING, logger="mixedfp")

    def given():
        return [r.getMessage() for r in caplog.records if r.name == "mixedfp"]

    return given


def about(words, given):
    return [message for message in given() if words in message]


def assert_usable(learn, dtype=torch.float32):
    """Assert that `learn` is what it would be had nobody asked, and trains."""
    assert learn.model[0].weight.dtype == dtype
    assert hasattr(learn, "mixed_precision") == (dtype != torch.float32)
    if dtype == torch.float32:
        assert "forward" not in vars(learn.model) and not learn.model._state_dict_hooks
    before = weights(learn)
    learn.fit(1, 0.01)
    with pytest.raises(AssertionError):
        assert_same(weights(learn), before)


# Settings

SETTINGS = [
    ({"loss_scale": 0}, ValueError, "`loss_scale` is 0"),
    ({"loss_scale": -512.0}, ValueError, "`loss_scale` is -512.0"),
    ({"loss_scale": float("nan")}, ValueError, "`loss_scale` is nan"),
    ({"loss_scale": float("inf")}, ValueError, "`loss_scale` is inf"),
    ({"loss_scale": "dynamic"}, TypeError, "`loss_scale` is 'dynamic'"),
    ({"loss_scale": None}, TypeError, "`loss_scale` is None"),
    ({"loss_scale": True}, TypeError, "`loss_scale` is True"),
    ({"loss_scale": 2.0**30}, ValueError, "outside"),
    ({"init_scale": 0}, ValueError, "is 0"),
    ({"init_scale": "big"}, TypeError, "is 'big'"),
    ({"growth_factor": 1.0}, ValueError, "`growth_factor` is 1.0"),
    ({"growth_factor": "2"}, TypeError, "`growth_factor` is '2'"),
    ({"backoff_factor": 1.0}, ValueError, "`backoff_factor` is 1.0"),
    ({"backoff_factor": 0}, ValueError, "`backoff_factor` is 0"),
    ({"growth_interval": 0}, ValueError, "`growth_interval` is 0"),
    ({"growth_interval": 0.5}, ValueError, "`growth_interval` is 0.5"),
    ({"min_scale": 0.0}, ValueError, "`min_scale` is 0.0"),
    ({"max_scale": float("nan")}, ValueError, "`max_scale` is nan"),
    ({"max_skips": 0}, ValueError, "`max_skips` is 0"),
    ({"dtype": torch.int64}, TypeError, "torch.int64.*torch.float16, torch.bfloat16"),
    ({"dtype": torch.complex64}, TypeError, "torch.complex64"),
    ({"dtype": "float16"}, TypeError, "'float16'"),
    ({"dtype": None}, TypeError, "None"),
    ({"dtype": torch.float8_e4m3fn}, (TypeError, ValueError), "float8_e4m3fn"),
    ({"scale": 2.0}, TypeError, "scale"),
]


@pytest.mark.parametrize("settings, error, message", SETTINGS, ids=lambda o: str(o)[:40])
def test_settings_that_make_no_sense(settings, error, message):
    learn = make_learner()
    with pytest.raises(error, match=message):
        learn.to_fp16(**settings)
    assert_usable(learn)
    with pytest.raises(error, match=message):
        MixedPrecision(**settings)
    with pytest.raises(error, match=message):
        mixed_precision(**settings)


@pytest.mark.parametrize("settings, error, message", SETTINGS[:3], ids=lambda o: str(o)[:40])
def test_a_refused_change_leaves_what_was(settings, error, message):
    """`to_fp16` of a 16-bit learner, refused: it trains on, in 16 or 32 bits; no weight is lost."""
    learn = make_learner().to_bf16()
    learn.fit(1)
    before = weights(learn)
    with pytest.raises(error, match=message):
        learn.to_fp16(**settings)
    assert_same(weights(learn), before)
    assert_usable(learn, learn.model[0].weight.dtype)


def test_the_bounds_are_told():
    with pytest.raises(ValueError, match=r"\[min_scale, max_scale\] = \[1, 256\]"):
        make_learner().to_fp16(512.0, max_scale=256.0)
    make_learner().to_fp16(2.0**30, dynamic=False)  # a constant scale has no bounds


# Optimizers

LBFGS = torch_optimizer(torch.optim.LBFGS)


@pytest.mark.parametrize("opt", [*LAYERWISE.values(), LBFGS], ids=[*LAYERWISE, "lbfgs"])
@pytest.mark.parametrize("way", ["method", "constructor", "fit", "callback"])
def test_layer_wise_optimizers_with_flat_masters(opt, way):
    model = conv_net()
    before = [p.detach().clone() for p in model.parameters()]
    why = "TypeError: .*closure" if opt is LBFGS else "whole layers"
    refused = pytest.raises(MixedPrecisionError, match=f"({why}).*flat_master=False")
    if way == "constructor":
        with refused:
            make_learner(opt, model, cbs=MixedPrecision(flat_master=True))
    else:
        learn = make_learner(opt, model)
        with refused:
            if way == "method":
                learn.to_fp16(flat_master=True)
            elif way == "fit":
                learn.fit(1, cbs=mixed_precision(flat_master=True))
            else:
                learn.add_cb(MixedPrecision(flat_master=True))
                learn.fit(1)
        if way == "callback":
            learn.to_fp32()
    assert_same([p.detach() for p in model.parameters()], before)
    assert "forward" not in vars(model) and not model._state_dict_hooks
    if opt is not LBFGS:
        assert_usable(make_learner(opt, model) if way == "constructor" else learn)


@pytest.mark.parametrize(
    "name, opt", [("Optimizer with lamb_step", LAYERWISE["lamb"]), ("LBFGS", LBFGS)]
)
def test_the_optimizer_is_named(name, opt):
    with pytest.raises(MixedPrecisionError, match=name):
        make_learner(opt).to_fp16(flat_master=True)


def test_a_layer_wise_optimizer_that_comes_later():
    """The optimizer is exchanged after a flat fit: told as it is made, and all is as it was."""
    learn = make_learner().to_fp16(flat_master=True)
    learn.fit(1)
    before, opt = bits(learn), learn.opt
    learn.opt_func = LAYERWISE["lamb"]
    with pytest.raises(MixedPrecisionError, match="whole layers"):
        learn.fit(1, reset_opt=True)
    assert learn.opt is opt
    assert_same(bits(learn), before)
    assert_usable(learn, torch.float16)
    before = masters(learn)
    learn.to_fp16()
    assert_same(masters(learn), before)
    learn.fit(1, reset_opt=True)
    assert "lamb_step" in str(learn.opt.opt.cbs) and learn.opt is not opt


# Sparse gradients


class Words(nn.Module):
    def __init__(self, sparse=True, functional=False):
        super().__init__()
        self.emb = nn.Embedding(5, 3, sparse=sparse and not functional)
        self.lin, self.functional = nn.Linear(3, 2), functional

    def __getitem__(self, i):
        return [self.lin, self.emb][i]

    def forward(self, x):
        if self.functional:
            return self.lin(F.embedding(x, self.emb.weight, sparse=True))
        return self.lin(self.emb(x))


def words_learner(**kwargs):
    tokens = torch.randint(0, 5, (40,), generator=torch.Generator().manual_seed(0))
    return make_learner(
        torch_optimizer(torch.optim.SGD), partial(Words, **kwargs), dls=make_dls(tokens, tokens % 2)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sparse_gradients_with_flat_masters(dtype):
    learn = words_learner()
    with pytest.raises(MixedPrecisionError, match="sparse.*flat_master=False"):
        learn.to_fp16(flat_master=True, dtype=dtype)
    assert_usable(learn)


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sparse_gradients_that_only_the_first_batch_shows(dtype, large, monkeypatch):
    """Before anything is changed, and with a way back; also where a step goes over chunks."""
    inside.large_from(monkeypatch, 1 if large else 2**40)
    inside.chunk_size(monkeypatch, 8)
    learn = words_learner(functional=True).to_fp16(dtype=dtype, flat_master=True)
    before = masters(learn)
    with pytest.raises(MixedPrecisionError, match="sparse.*flat_master=False"):
        learn.fit(1, 0.01)
    assert_same(masters(learn), before)
    learn.to_fp32()
    assert_usable(learn)
    assert_usable(learn.to_fp16(), torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("functional", [False, True])
def test_sparse_gradients_with_a_master_each(dtype, functional):
    plain, learn = (words_learner(functional=functional) for _ in range(2))
    learn.to_fp16(dtype=dtype)
    for one in (plain, learn):
        one.fit(1, 0.1)
    tolerance = {torch.float32: 0.0, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(weights(learn), weights(plain), rtol=tolerance, atol=tolerance)


def test_an_overflow_in_a_sparse_gradient_is_skipped():
    learn = words_learner().to_fp16()
    before = masters(learn)

    def poison(learn):
        learn.model.emb.weight.grad._values()[0, 0] = float("inf")

    learn.fit(1, 0.1, cbs=Do("after_backward", poison, order=0))
    assert learn.mp_cb.n_skipped == 4
    assert_same(masters(learn), before)


# Models


@pytest.mark.parametrize("half", ["all", "part", "double"])
def test_a_model_in_16_bits_is_told_once_and_trains(half, notices):
    model = conv_net()
    {"all": model, "part": model[4], "double": model[4]}[half].to(
        torch.bfloat16 if half == "part" else torch.half
    )
    if half == "all":
        model[1].float()
    learn = make_learner(model=model)
    rounded = [p.detach().float() for p in model.parameters()]
    for _ in range(2):
        learn.to_fp16()
        assert_same(masters(learn), rounded)
        told = about("low bits", notices)
        assert len(told) == 1 and ("`0.weight`" if half == "all" else "`4.weight`") in told[0]
    assert_usable(learn, torch.float16)
    learn.to_fp32()
    assert {p.dtype for p in learn.model.parameters()} == {torch.float32}


def test_masters_are_no_16_bit_model(notices):
    """Precision changed or asked for twice: nothing is lost, so nothing is told."""
    learn = make_learner().to_fp16().to_fp16(flat_master=True).to_bf16()
    learn.fit(1)
    learn.to_fp16().fit(1, cbs=[])
    assert not about("low bits", notices)


def test_a_model_with_nothing_to_train():
    model = conv_net().requires_grad_(False)
    learn = make_learner(model=model)
    for to in (learn.to_fp16, learn.to_bf16):
        with pytest.raises(
            ValueError, match="no parameter of Sequential requires a gradient.*unfreeze"
        ):
            to()
        assert model[0].weight.dtype == torch.float32 and not hasattr(learn, "mixed_precision")
    learn.validate()
    model.requires_grad_(True)
    assert_usable(learn)


def test_a_model_without_parameters():
    with pytest.raises(ValueError, match="no parameter of Flatten"):
        make_learner(
            model=nn.Flatten, dls=make_dls(torch.randn(16, 2), torch.arange(16) % 2)
        ).to_fp16()


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_a_batch_without_floats_is_fine(flat, notices):
    learn = words_learner(sparse=False).to_fp16(flat_master=flat)
    learn.fit(1, 0.01)
    assert not about("beyond", notices)


# Numbers


def big(value, where=(0, 5)):
    x, y = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    x[where] = value
    return make_learner(model=lambda: nn.Sequential(nn.Linear(8, 2)), dls=make_dls(x, y))


def test_inputs_beyond_float16_are_told(notices):
    big(1e6).to_fp16().fit(1)
    (message,) = about("beyond", notices)
    assert "input 0" in message and "[5]" in message and "65504" in message
    assert "1e+06" in message and "to_bf16()" in message and "normalize" in message


def test_inputs_beyond_float16_of_a_later_batch_are_told(notices):
    """Not every batch is looked at, but the one that made a step be skipped is."""
    learn = big(-1e6, (17, 2)).to_fp16()
    learn.fit(1)
    assert learn.mp_cb.skipped == [2]
    assert len(about("beyond", notices)) == 1


def test_inputs_within_the_type_are_not_told(notices):
    big(6e4).to_fp16().fit(1)
    big(1e6).to_bf16().fit(1)
    big(float("inf")).to_fp16().fit(1)  # was inf before
    assert not about("beyond", notices)


def test_an_input_of_no_dimension_is_told(notices):
    x = torch.tensor(1e6)
    assert "1 values are beyond" in inside.inputs_out_of_range((x,), (x.half(),))
    inputs = torch.zeros(0, 3), x.long()
    assert inside.inputs_out_of_range(inputs, (inputs[0].half(), inputs[1])) is None


def test_a_cpu_slow_in_fp16_is_told_once(notices, monkeypatch):
    inside.is_native(monkeypatch, float16=False)
    learn = make_learner().to_fp16()
    learn.fit(2)
    learn.to_fp16().fit(1)
    (message,) = about("on this CPU float16 products are computed in float32", notices)
    assert "to_bf16" in message and "float32" in message and "native=True" in message


def test_a_cpu_slow_in_bf16_is_told_once(notices, monkeypatch):
    """And computes in float32: with AVX2 alone PyTorch's own products take ten times as long."""
    inside.is_native(monkeypatch, bfloat16=False)
    learn = make_learner().to_bf16()
    learn.fit(2)
    (message,) = about("on this CPU bfloat16 products", notices)
    assert "products are computed in float32" in message and "to_bf16" not in message


@pytest.mark.parametrize("how", ["native", "bf16", "hardware"])
def test_nothing_is_told_where_nothing_is_replaced(how, notices, monkeypatch):
    inside.is_native(monkeypatch, float16=how == "hardware")
    learn = make_learner()
    (learn.to_bf16() if how == "bf16" else learn.to_fp16(native=how == "native")).fit(1)
    assert not notices()


def test_nothing_is_told_in_32_bits(notices):
    """There the forward pass is called differently where layers have scales; no CPU is slow."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    MixedStep(torch.float32, layer_scales={"0": 2.0}).attach(model)
    model(torch.ones(2, 4))
    assert not notices()


class Masked(nn.Module):
    """A net that hides numbers behind `value`, as attention masks do."""

    def __init__(self, value):
        super().__init__()
        self.lin, self.inner, self.value = nn.Linear(108, 4), nn.Module(), value
        self.inner.mask = Mask(value)
        self.head = nn.Linear(4, 2)

    def __getitem__(self, i):
        return self.lin

    def forward(self, x):
        x = self.lin(x.flatten(1))
        return self.head(self.inner.mask(x).softmax(-1))


class Mask(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        value = torch.finfo(x.dtype).min if self.value is None else self.value
        return x.masked_fill(torch.tensor([True, False, False, True]), value)


def test_a_constant_beyond_float16_names_the_module():
    learn = make_learner(model=lambda: Masked(-1e9)).to_fp16()
    before = masters(learn)
    with pytest.raises(
        MixedPrecisionError, match=r"`inner\.mask` \(Mask\).*torch\.finfo\(x\.dtype\)\.min"
    ):
        learn.fit(1)
    assert_same(masters(learn), before)
    learn.to_bf16().fit(1)
    learn.to_fp32()
    assert_usable(learn)
    make_learner(model=lambda: Masked(None)).to_fp16().fit(1)


def test_other_errors_of_the_model_come_through():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 2)

        def forward(self, x):
            raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own") as e:
        make_learner(model=Broken).to_fp16().fit(1)
    assert not isinstance(e.value, MixedPrecisionError)


def test_targets_and_losses_beyond_float16_are_fine(notices):
    """The loss is computed in 32 bits: 70000 squared is no overflow there."""
    x, _ = pictures(40)
    learn = make_learner(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 1)),
        dls=make_dls(x, torch.full((40, 1), 7e4)),
        loss_func=MSELossFlat(),
    ).to_fp16(1.0, dynamic=False)
    learn.fit(1, 0.0)
    assert torch.tensor(learn.recorder.losses).isfinite().all()


# An error at the next line, not in the middle of the night


def test_errors_come_before_any_training():
    """Whatever is refused is refused by `to_fp16` itself, before a single batch is loaded."""
    loaded = []

    class Loud(list):
        def __getitem__(self, i):
            loaded.append(i)
            return super().__getitem__(i)

    learn = make_learner(LAYERWISE["lamb"])
    learn.dls.train.dataset = Loud(learn.dls.train_ds)
    for settings in ({"loss_scale": 0}, {"dtype": torch.int8}, {"flat_master": True}):
        with pytest.raises((ValueError, TypeError, MixedPrecisionError)):
            learn.to_fp16(**settings)
    assert not loaded


def test_masters_of_no_learner():
    for name in ("master_params", "model_params"):
        with pytest.raises(MixedPrecisionError, match="add this callback to a Learner"):
            getattr(MixedPrecision(), name)
