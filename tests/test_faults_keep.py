"""What stays in 32 bits, averages of weights, and what a Learner in mixed precision is asked."""

import copy
import io
import logging
import pickle
import weakref
from functools import partial

import inside
import pytest
import torch
from fastai.basics import Callback, Learner
from fastai.callback.fp16 import MixedPrecision as FastaisOwn
from fastai.callback.fp16 import NonNativeMixedPrecision
from fastai.optimizer import Adam, OptimWrapper
from tiny import OPTIMIZERS, conv_net, make_dls, make_learner, pictures, silent
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mixedfp.callback import MixedPrecision
from mixedfp.cast import model2float, model2half
from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
HALVES = pytest.mark.parametrize("dtype", [HALF, BF16], ids=["fp16", "bf16"])
FLAT = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
DTYPES = pytest.mark.parametrize("dtype", [HALF, BF16, FULL], ids=["fp16", "bf16", "fp32"])


@pytest.fixture
def said(caplog):
    """Return the notices of a test."""
    inside.forget_notices()
    caplog.set_level(logging.WARNING, "mixedfp")
    return lambda: " | ".join(r.getMessage() for r in caplog.records if r.name == "mixedfp")


def flat_net(*layers):
    """Return a net over the pictures of `tiny`, 108 numbers each, with `layers` in the middle."""
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 8), *layers, nn.Linear(8, 2))


# What is written into a `state_dict`: in a plain model its tensors are the weights


def written_net(dtype, flat, remainders, n_steps):
    """Return a wrapped net with norms, its optimizer, and that net without masters."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    kinds = dict(flat_master=flat, store_param_remainders=remainders)
    model = copy.deepcopy(plain)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model, opt = with_masters(model, opt, dtype=dtype, **kinds)
    for _ in range(n_steps):
        one_step(model, opt)
    return model, opt, plain


def one_step(model, opt):
    """Step once."""
    opt.zero_grad()
    model(torch.arange(6.0).view(2, 3)).float().pow(2).sum().backward()
    opt.step()


WRITTEN = pytest.mark.parametrize(
    ("dtype", "flat", "remainders"),
    [(d, f, False) for d in (HALF, BF16, FULL) for f in (False, True)] + [(BF16, True, True)],
    ids=str,
)


@WRITTEN
@pytest.mark.parametrize("n_steps", [0, 1])
def test_a_model_has_the_weights_that_were_written_into_its_state_dict(
    dtype, flat, remainders, n_steps
):
    model, opt, plain = written_net(dtype, flat, remainders, n_steps)
    for net in (model, plain):
        for v in net.state_dict().values():  # nobody holds it afterwards
            v.fill_(0.3)
    x = torch.ones(2, 3)
    assert_same(model.state_dict(), plain.state_dict())
    assert_close = partial(torch.testing.assert_close, rtol=2**-6, atol=2**-6)
    assert_close(model.eval()(x).float(), plain.eval()(x))
    assert_same(model.state_dict(), plain.state_dict())
    plain_opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    one_step(model.train(), opt)
    one_step(plain.train(), plain_opt)
    assert_close(model.state_dict(), plain.state_dict(), rtol=2**-4)


@WRITTEN
def test_a_state_dict_that_is_held_may_be_written_later(dtype, flat, remainders):
    model, opt, _ = written_net(dtype, flat, remainders, 1)
    held = model.state_dict()
    one_step(model, opt)
    held["2.weight"].zero_()
    model(torch.ones(2, 3))
    assert model[2].weight.count_nonzero() == 0
    assert model[0].weight.count_nonzero() == 12
    one_step(model, opt)
    assert model[2].weight.count_nonzero() > 0


def test_a_state_dict_that_is_let_go_takes_no_memory():
    """The model looks once whether it was written into."""
    model, *_ = written_net(BF16, False, False, 1)
    shown = weakref.ref(model.state_dict()["2.weight"])
    assert shown() is not None
    model(torch.ones(2, 3))
    assert shown() is None


# 2.17 What stays in 32 bits


class Counted(nn.Module):
    """A model that counts its steps in a floating-point buffer, as it is or over many steps."""

    def __init__(self, start=0.0):
        super().__init__()
        self.body = flat_net()
        self.register_buffer("steps", torch.tensor(start))

    def forward(self, x):
        self.steps += 1
        return self.body(x)


class OwnNorm(nn.Module):
    """A BatchNorm of one's own, as fastai's course has it."""

    def __init__(self, n=8, mom=0.01):
        super().__init__()
        self.mom = mom
        self.mults, self.adds = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))
        self.register_buffer("var", torch.ones(1, n))
        self.register_buffer("mean", torch.zeros(1, n))

    def forward(self, x):
        if self.training:
            m, v = x.mean(0, keepdim=True), x.var(0, keepdim=True)
            self.mean.lerp_(m.detach(), self.mom)
            self.var.lerp_(v.detach(), self.mom)
        else:
            m, v = self.mean, self.var
        return self.mults * (x - m) / (v + 1e-5).sqrt() + self.adds


class Rotary(nn.Module):
    """Angles of positions, as of a transformer; the layer that uses them has weights."""

    def __init__(self, n=8):
        super().__init__()
        self.linear = nn.Linear(n, n)
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, n, 2) / n))

    def forward(self, x):
        angle = torch.arange(4096, device=x.device)[-1] * self.inv_freq
        turned = torch.cat([angle.sin(), angle.cos()]).to(x.dtype)
        return self.linear(x) * turned


@HALVES
def test_2_17_a_mask_goes_to_16_bits(dtype, said):
    """Its -inf is one in any format: nothing is lost, and in 32 bits it would widen the scores."""
    model = nn.Linear(4, 4)
    model.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
    assert model2half(model, dtype).mask.dtype == dtype and not said()


@HALVES
@FLAT
@pytest.mark.parametrize("start", [0.0, 3000.0])
def test_2_17_a_counter_counts(dtype, flat, start):
    learn = make_learner(model=partial(Counted, start)).to_fp16(dtype=dtype, flat_master=flat)
    for _ in range(2200):
        learn.model.steps += 1
    learn.fit(1)
    end = learn.model.state_dict()["steps"].item()
    assert end == start + 2200 + 5  # batches, of training and validation
    assert learn.to_fp32().model.steps == end


@HALVES
def test_2_17_a_counter_of_one_element_that_16_bits_cannot_hold(dtype, said):
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("seen", torch.tensor([[3001.0, 7.0]]))
    model.register_buffer("far", torch.tensor([1e6, 1e30 if dtype == HALF else 3.4e38]))
    model.register_buffer("mean", torch.tensor([0.1, 0.2]))
    model2half(model, dtype)
    assert model.seen.dtype == FULL and model.seen[0, 0] == 3001
    assert (model.far.dtype == FULL) == (dtype == HALF or model.far.dtype == FULL)
    assert model.mean.dtype == model[0].weight.dtype == dtype
    assert "`seen`" in said() and "integers" in said() and "`mean`" not in said()


@HALVES
@FLAT
def test_2_17_the_statistics_of_a_norm_of_ones_own_do_not_drift(dtype, flat):
    """They end where those of a 32-bit model end that sees the rounded inputs."""
    ends = {}
    for how in ("plain", "half"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), OwnNorm(), nn.Linear(8, 2))
        if how == "half":
            inside.MasterParams(model, dtype, flat)
        for _ in range(300):
            x = 10 + torch.randn(16, 8)
            with torch.no_grad():
                model[1](x.to(dtype) if how == "half" else x.to(dtype).float())
        ends[how] = model[1].mean, model[1].var
    assert_same(ends["half"], ends["plain"])


@HALVES
def test_2_17_a_norm_of_ones_own_trains(dtype):
    learn = make_learner(model=lambda: flat_net(OwnNorm())).to_fp16(dtype=dtype)
    norm = learn.model[2]
    seen = []
    norm.register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype)))
    before = norm.mults.detach().clone()
    learn.fit(1)
    assert norm.mean.dtype == norm.mults.dtype == FULL and not torch.equal(norm.mults, before)
    assert seen[0][1] == dtype and learn.model[1].weight.dtype == dtype
    learn.to_fp32()
    assert not norm._forward_pre_hooks


@HALVES
def test_2_17_rotary_frequencies_stay(dtype, said):
    model = nn.Sequential(Rotary())
    exact = model[0].inv_freq.clone()
    model2half(model, dtype)
    assert_same(model[0].inv_freq, exact)
    assert "`0.inv_freq`" in said() and model[0].linear.weight.dtype == dtype
    assert model(torch.randn(2, 8, dtype=dtype)).dtype == dtype


class Parts(nn.Module):
    """Parts under names."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(108, 8), nn.LayerNorm(8), nn.ReLU())
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.LayerNorm(8)])
        self.head = nn.Linear(8, 2)
        self.register_buffer("table", torch.full((2,), 0.1))

    def forward(self, x):
        x = self.body(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


KEPT = {
    "type": (nn.LayerNorm, {"body.2.weight", "body.2.bias", "blocks.1.weight", "blocks.1.bias"}),
    "name": ("head", {"head.weight", "head.bias"}),
    "several": (["head", nn.LayerNorm], None),
    "container": ("blocks", {f"blocks.{i}.{k}" for i in (0, 1) for k in ("weight", "bias")}),
    "glob": ("blocks.*", {f"blocks.{i}.{k}" for i in (0, 1) for k in ("weight", "bias")}),
    "buffer": ("tab*", {"table"}),
}


@HALVES
@pytest.mark.parametrize("which", KEPT)
def test_2_17_keep_fp32(which, dtype):
    pattern, names = KEPT[which]
    learn = make_learner(model=Parts)
    before = {k: v.clone() for k, v in learn.model.state_dict().items()}
    learn.to_fp16(dtype=dtype, keep_fp32=pattern)
    tensors = dict([*learn.model.named_parameters(), *learn.model.named_buffers()])
    found = {k for k, t in tensors.items() if t.dtype == FULL}
    assert found == (names or KEPT["type"][1] | KEPT["name"][1])
    learn.fit(1)
    now = learn.to_fp32().model.state_dict()
    assert all(not torch.equal(now[k], before[k]) for k in before if k != "table")
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in learn.model.modules())


@HALVES
def test_2_17_keep_fp32_by_a_second_name(dtype):
    """A layer that stands in two places, an output layer that is the embedding: both names do."""
    model = nn.ModuleDict({"encoder": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
    model["decoder"] = model["encoder"]
    model2half(model, dtype, keep_fp32="decoder")
    assert {k: p.dtype for k, p in model.named_parameters() if "weight" in k} == {
        "encoder.weight": FULL,
        "other.weight": dtype,
    }


@HALVES
@FLAT
def test_2_17_keep_fp32_in_every_way_in(dtype, flat):
    keep = dict(keep_fp32=[nn.LayerNorm])
    half = make_learner(model=Parts).to_bf16(flat_master=flat, **keep)
    assert half.model.body[2].weight.dtype == FULL and half.model.head.weight.dtype == BF16
    by_cb = make_learner(model=Parts, cbs=MixedPrecision(dtype=dtype, **keep))
    assert by_cb.model.body[2].weight.dtype == FULL
    model = Parts()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    model, opt = with_masters(model, opt, dtype=dtype, flat_master=flat, **keep)
    assert model.body[2].weight.dtype == FULL and model.head.weight.dtype == dtype
    assert "keep_fp32" in repr(half.mp_cb)


@pytest.mark.parametrize("pattern", ["heads", "*.gamma", nn.GroupNorm, ["head", "x"]])
def test_2_17_a_pattern_that_matches_nothing_raises(pattern):
    learn = make_learner(model=Parts)
    with pytest.raises(ValueError, match="matches no module, parameter or buffer of Parts"):
        learn.to_fp16(keep_fp32=pattern)
    model = learn.model
    with pytest.raises(ValueError, match="matches no"):
        with_masters(model, torch.optim.SGD(model.parameters(), 0.1), keep_fp32=pattern)
    assert {p.dtype for p in model.parameters()} == {FULL} and not model._state_dict_hooks
    assert "forward" not in vars(model)
    for bad in (3, [3], [object]):
        with pytest.raises(TypeError):
            learn.to_fp16(keep_fp32=bad)
    assert {p.dtype for p in model.parameters()} == {FULL}


@HALVES
def test_2_17_a_kept_module_computes_in_32_bits(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    exact = copy.deepcopy(model[1])
    model2half(model, dtype, keep_fp32=nn.LayerNorm)
    x = torch.randn(3, 4).to(dtype)
    assert_same(model[1](x).detach(), exact(x.float()).to(dtype).detach())
    assert_same(model[1](input=x).detach(), exact(x.float()).to(dtype).detach())
    assert model(x).dtype == dtype
    model2float(model)
    assert model(x.float()).dtype == FULL and not model[1]._forward_hooks


class HuggingFaced(Parts):
    """Names what is to stay, as Hugging Face's classes do."""

    _keep_in_fp32_modules = ["head"]
    _keep_in_fp32_modules_strict = {"table"}


@HALVES
def test_2_17_keep_in_fp32_modules_of_hugging_face(dtype):
    model = model2half(nn.Sequential(HuggingFaced()), dtype)[0]
    assert model.head.weight.dtype == model.table.dtype == FULL
    assert model.body[1].weight.dtype == dtype


@HALVES
def test_2_17_keep_fp32_in_skorch(dtype):
    from skorch import NeuralNetClassifier

    from mixedfp.skorch import MixedPrecisionMixin

    class Net(MixedPrecisionMixin, NeuralNetClassifier):
        pass

    net = Net(
        Parts,
        criterion=nn.CrossEntropyLoss,
        amp_enabled=True,
        amp_dtype=dtype,
        amp_mode="master",
        keep_fp32=["head", nn.LayerNorm],
        verbose=0,
        max_epochs=1,
    )
    x, y = pictures(16)
    net.fit(x.numpy(), y.numpy())
    assert net.module_.head.weight.dtype == net.module_.body[2].weight.dtype == FULL
    assert net.module_.body[1].weight.dtype == dtype
    assert net.get_params()["keep_fp32"] == ["head", nn.LayerNorm]
    net.set_params(keep_fp32=())
    assert net.module_.head.weight.dtype == dtype


# papercut: buffers that a file brings


@FLAT
def test_4_loaded_numbers_beyond_the_range_are_kept_or_said(flat, said):
    def model():
        m = flat_net()
        m.register_buffer("far", torch.tensor([1.0, 2.0]))
        m.register_buffer("near", torch.tensor([0.1, 0.2]))
        return m

    learn = make_learner(model=model).to_fp16(flat_master=flat)
    state = {k: v.clone() for k, v in learn.model.state_dict().items()}
    state["far"][0] = 1e6
    learn.model.load_state_dict(state)
    assert learn.model.far.tolist() == [1e6, 2.0] and learn.model.near.dtype == HALF
    assert "`far` is loaded with values beyond 65504" in said()
    assert_same(dict(learn.model.state_dict()), state)
    learn.fit(1)
    assert_same(learn.to_fp32().model.far, state["far"])
    assert "`1.weight`" not in said()
    state["1.weight"][0, 0] = 1e5
    learn.to_fp16(flat_master=flat).model.load_state_dict(state)
    assert "`1.weight` holds values beyond float16's 65504" in said()
    assert learn.model.state_dict()["1.weight"][0, 0] == 1e5


def test_4_a_load_that_fails_changes_no_buffer():
    learn = make_learner(model=Counted).to_fp16()
    learn.model.register_buffer("late", torch.tensor([0.1, 0.2]))
    learn.to_fp32().to_fp16()
    before = {k: v.clone() for k, v in learn.model.state_dict().items()}
    bad = before | {"late": torch.tensor([1e6, 1.0]), "body.1.weight": torch.ones(2)}
    with pytest.raises(RuntimeError):
        learn.model.load_state_dict(bad)
    assert_same(dict(learn.model.state_dict()), before)


def test_4_a_lazy_layer_says_to_run_a_batch():
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(2))
    with pytest.raises(MixedPrecisionError, match=r"`1.weight`.*run a batch through the model"):
        make_learner(model=model).to_fp16()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(MixedPrecisionError, match="run a batch"):
        with_masters(model, opt)
    model(torch.zeros(1, 3, 6, 6))
    make_learner(model=model).to_fp16().fit(1)


# 2.19 Averages


class ByHand(Callback):
    """A deep copy, and arithmetic in place."""

    order, decay = 70, 0.9

    def start(self):
        self.average = copy.deepcopy(self.learn.model)

    def before_fit(self):
        self.start()

    @torch.no_grad()
    def after_step(self):
        pairs = zip(self.average.parameters(), self.learn.model.parameters(), strict=True)
        for a, p in pairs:
            a.mul_(self.decay).add_(p, alpha=1 - self.decay)

    def weights(self):
        return torch.cat([p.detach().float().flatten() for p in self.average.parameters()])


class ByTorch(ByHand):
    """`AveragedModel`, with its ways to average."""

    def __init__(self, **kwargs):
        self.kwargs = kwargs

    def start(self):
        self.average = AveragedModel(self.learn.model, **self.kwargs)

    def after_step(self):
        self.average.update_parameters(self.learn.model)


class ByTimm(ByHand):
    """As timm's ModelEma and ModelEmaV2 do it."""

    def start(self):
        self.average = copy.deepcopy(self.learn.model).eval().requires_grad_(False)

    @torch.no_grad()
    def after_step(self):
        states = self.average.state_dict().values(), self.learn.model.state_dict().values()
        for ema_v, model_v in zip(*states, strict=True):
            ema_v.copy_(self.decay * ema_v + (1 - self.decay) * model_v)


class ByTimmV3(ByTimm):
    """As timm's ModelEmaV3 does it."""

    @torch.no_grad()
    def after_step(self):
        states = self.average.state_dict().values(), self.learn.model.state_dict().values()
        for ema_v, model_v in zip(*states, strict=True):
            if ema_v.is_floating_point():
                ema_v.lerp_(model_v, weight=1 - self.decay)
            else:
                ema_v.copy_(model_v)


class OfFloatModel(ByHand):
    """The documented way."""

    def start(self):
        mp_cb = vars(self.learn).get("mp_cb")
        self.source = self.learn.model if mp_cb is None else mp_cb.float_model()
        self.average = AveragedModel(self.source, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def after_step(self):
        self.average.update_parameters(self.source)


WAYS = {
    "by hand": ByHand,
    "torch": ByTorch,
    "torch, ema": lambda: ByTorch(multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "torch, buffers": lambda: ByTorch(multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    "timm": ByTimm,
    "timm v3": ByTimmV3,
    "float_model": OfFloatModel,
}


def averaged(way, to, lr=1e-4):
    """Return the weights before a fit with small steps, and the average after it."""
    cb = WAYS[way]()
    learn = make_learner(lr=lr, opt="sgd")
    start = torch.cat([p.detach().flatten() for p in learn.model.parameters()])
    to(learn).fit(2, cbs=cb)
    assert {p.dtype for p in cb.average.parameters()} == {FULL}
    return start, cb.weights()


@pytest.mark.parametrize("way", WAYS)
@DTYPES
@FLAT
def test_2_19_an_average_moves_as_plain_fastais(way, dtype, flat):
    start, plain = averaged(way, lambda learn: learn)
    _, mixed = averaged(way, lambda learn: learn.to_fp16(dtype=dtype, flat_master=flat))
    if dtype == FULL:
        assert_same(mixed, plain)
        return
    # "by hand" reads rounded weights; all have gradients of a 16-bit model, moves of some 1e-4
    rounding = 0.51 * torch.finfo(dtype).eps * plain.abs() if way == "by hand" else 0
    assert ((mixed - plain).abs() <= rounding + 0.1 * (plain - start).abs() + 2e-5).all()
    moved = (mixed != start)[plain != start].float().mean()
    assert moved > 0.95  # the others began as ones and zeros, exact in 16 bits


@HALVES
def test_2_19_an_average_by_hand_in_a_loop(dtype):
    """`with_masters`: copies and averages are in 32 bits there as well."""
    ends = {}
    for how in ("plain", "half"):
        torch.manual_seed(0)
        model = conv_net()
        opt = torch.optim.SGD(model.parameters(), 1e-4)
        if how == "half":
            model, opt = with_masters(model, opt, dtype=dtype)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        twin = copy.deepcopy(model)
        x, y = pictures(8)
        for _ in range(5):
            opt.zero_grad()
            out = model(x.to(next(model.parameters()).dtype))
            cross_entropy(out.float(), y).backward()
            opt.step()
            average.update_parameters(model)
        assert {p.dtype for p in [*twin.parameters(), *average.parameters()]} == {FULL}
        ends[how] = torch.cat([p.detach().flatten() for p in average.parameters()])
        start = torch.cat([p.detach().flatten() for p in twin.parameters()])
    moved = (ends["plain"] - start).abs()
    assert ((ends["half"] - ends["plain"]).abs() <= 0.1 * moved + 2e-6).all()


@HALVES
@FLAT
def test_2_19_float_model_is_the_masters(dtype, flat):
    learn = make_learner().to_fp16(dtype=dtype, flat_master=flat)
    twin = learn.mp_cb.float_model()
    learn.fit(1)
    ours = learn.model.state_dict()
    assert_same(
        {k: p.detach() for k, p in twin.named_parameters()},
        {k: ours[k] for k, _ in twin.named_parameters()},
    )
    assert "forward" not in vars(twin) and not twin._forward_pre_hooks
    copied = copy.deepcopy(twin)
    learn.fit(1)
    assert not torch.equal(copied[0].weight, twin[0].weight)


# 3.17 A second Learner


@HALVES
@FLAT
def test_3_17_a_second_learner_is_told_whose_model_it_is(dtype, flat):
    learn = make_learner("adam").to_fp16(dtype=dtype, flat_master=flat)
    learn.fit(1)
    before = {k: v.clone() for k, v in learn.model.state_dict().items()}
    second = make_learner("adam", model=learn.model, dls=make_dls(*pictures(24, seed=3)))
    for go in (
        lambda: second.fit(1),
        lambda: second.to_fp16(),
        lambda: make_learner(model=nn.Sequential(learn.model, nn.ReLU())).to_bf16(),
    ):
        with pytest.raises(MixedPrecisionError, match=r"another Learner.*to_fp32\(\)"):
            go()
    assert_same(dict(learn.model.state_dict()), before)
    learn.fit(1)  # the first trains on
    learn.to_fp32()
    second = make_learner("adam", model=learn.model).to_fp16(dtype=dtype, flat_master=flat)
    second.fit(1)
    assert second.model is learn.model


def test_3_17_a_second_learner_may_validate():
    learn = make_learner().to_bf16()
    learn.fit(1)

    class Cast(Callback):
        def before_batch(self):
            self.learn.xb = (self.x.bfloat16(),)

        def after_pred(self):
            self.learn.pred = self.pred.float()

    make_learner(model=learn.model, cbs=Cast()).validate()


# 3.18 Gradients that a callback puts there


class PutGrads(Callback):
    """Replace gradients at an event, as fastai's notebook 13a does."""

    def __init__(self, event, order, make):
        self.order, self.make, self.seen = order, make, []
        setattr(self, event, self.put)

    def put(self):
        for p in self.learn.model.parameters():
            p.grad = self.make(p)
            self.seen.append(p.grad.dtype)


PLACES = [("before_batch", 0), ("after_backward", 0), ("before_step", 0), ("before_step", 50)]


@DTYPES
@FLAT
@pytest.mark.parametrize("event, order", PLACES, ids=str)
def test_3_18_a_gradient_in_the_models_dtype_is_taken(event, order, dtype, flat):
    """The same numbers in 16 bits or in 32: the same bits afterwards."""
    ends = []
    for make in (torch.ones_like, lambda p: torch.ones_like(p, dtype=FULL)):
        learn = make_learner().to_fp16(dtype=dtype, flat_master=flat, loss_scale=1.0, dynamic=False)
        cb = PutGrads(event, order, make)
        after = PutGrads("after_backward", 99, lambda p: p.grad)  # somebody watches
        learn.fit(2, cbs=[cb, after])
        ends.append(dict(learn.to_fp32().model.state_dict()))
        assert cb.seen
    assert_same(*ends)


@HALVES
@FLAT
def test_3_18_zero_gradients_stop_the_weights(dtype, flat):
    learn = make_learner().to_fp16(dtype=dtype, flat_master=flat)
    before = [p.detach().clone() for p in learn.model.parameters()]
    learn.fit(1, wd=0.0, cbs=PutGrads("after_backward", 0, torch.zeros_like))
    assert_same([p.detach() for p in learn.model.parameters()], before)


@HALVES
def test_3_18_gradients_still_add_up_in_32_bits(dtype):
    """After a fit in which others could write gradients, and in its next backward pass."""
    learn = make_learner().to_fp16(dtype=dtype)
    learn.fit(1, cbs=PutGrads("after_backward", 0, torch.zeros_like))
    assert {p.grad_dtype for p in learn.model.parameters()} == {FULL}


# 3.19 fastai's own mixed precision on top


@pytest.fixture
def with_cudnn(monkeypatch):
    """Let fastai's callback be made on a machine without a GPU."""
    monkeypatch.setattr(torch.backends.cudnn, "enabled", True)


@pytest.mark.parametrize("make", [FastaisOwn, NonNativeMixedPrecision])
def test_3_19_fastais_own_on_top_is_refused(make, with_cudnn):
    learn = make_learner().to_fp16()
    before = {k: v.clone() for k, v in learn.model.state_dict().items()}
    learn.add_cb(make())
    with pytest.raises(MixedPrecisionError, match="remove one of the two"):
        learn.fit(1)
    assert_same(dict(learn.model.state_dict()), before)
    learn.to_fp32()
    assert not any(isinstance(cb, make) for cb in learn.cbs)
    learn.to_fp16().fit(1)
    with pytest.raises(MixedPrecisionError, match="remove one of the two"):
        learn.fit(1, cbs=make())


def test_3_19_to_non_native_fp16_is_exchanged_for_ours(with_cudnn):
    learn = make_learner()
    learn.add_cb(NonNativeMixedPrecision())
    learn.to_fp16().fit(1)
    assert not any(isinstance(cb, NonNativeMixedPrecision) for cb in learn.cbs)


# 3.20 The whole model in a file


def through_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@HALVES
@FLAT
@pytest.mark.parametrize("write", [through_torch, lambda m: pickle.loads(pickle.dumps(m))])
def test_3_20_a_file_of_the_model_holds_32_bit_weights(write, dtype, flat):
    learn = make_learner().to_fp16(dtype=dtype, flat_master=flat)
    learn.fit(1)
    loaded = write(learn.model)
    assert {p.dtype for p in loaded.parameters()} == {FULL}
    assert not loaded._state_dict_hooks and "forward" not in vars(loaded)
    assert_same(dict(loaded.state_dict()), dict(learn.model.state_dict()))
    x = torch.randn(2, 3, 6, 6)
    assert loaded.eval()(x).dtype == FULL
    learn.fit(1)
    assert learn.to_fp32() and not {"__deepcopy__", "__reduce_ex__"} & vars(learn.model).keys()


# Papercuts


def test_4_a_summary_names_the_optimizer(capsys):
    from fastai.callback.hook import summary  # noqa: F401, gives Learner summary

    learn = make_learner("adam").to_bf16(flat_master=True)
    text = str(learn.summary())
    assert "_make_opt" not in text and "function Adam" in text
    assert repr(learn.opt_func) == repr(Adam)


def test_4_mp_cb_shows_what_it_is():
    learn = make_learner().to_fp16(flat_master=True)
    assert repr(learn.mp_cb) == (
        "MixedPrecision(torch.float16, flat_master=True, loss_scale=512, skipped=0)"
    )
    assert repr(make_learner().to_bf16().mp_cb) == (
        "MixedPrecision(torch.bfloat16, flat_master=False)"
    )


# Section 5: tests that were missing


@FLAT
def test_5_a_data_write_after_an_epoch_is_taken_over_in_the_same_fit(flat):
    learn = make_learner().to_fp16(flat_master=flat)

    class Write(Callback):
        def after_epoch(self):
            if self.epoch == 0:
                self.learn.model[0].weight.data.fill_(0.25)

        def after_train(self):
            self.seen = self.learn.model.state_dict()["0.weight"].clone()

    cb = Write()
    learn.fit(2, 0.0, wd=0.0, cbs=cb)
    assert (cb.seen == 0.25).all()
    assert (learn.to_fp32().model[0].weight == 0.25).all()


@pytest.mark.parametrize("method", ["_step", "_backward", "_do_grad_opt", "one_batch"])
def test_5_a_learners_own_step_methods_see_true_gradients(method, monkeypatch):
    """Also where vectors are large, whose gradients wait in 16 bits if nobody may look."""
    inside.everything_is_large(monkeypatch)

    class Own(Learner):
        seen = []

        def look(self):
            grads = [p.grad for p in self.model.parameters()]
            self.seen += [(g.dtype, g.abs().max().item()) for g in grads if g is not None]

        def _step(self):
            self.look()
            super()._step()

    if method != "_step":  # its own, and it steps by itself
        del Own._step
        whole = getattr(Learner, method)

        def own(self, *args):
            whole(self, *args)
            if method != "one_batch":
                self.look()

        setattr(Own, method, own)
    learn = make_learner()
    mine = Own(learn.dls, learn.model, learn.loss_func, opt_func=learn.opt_func, lr=0.0)
    mine = silent(mine).to_fp16(flat_master=True, loss_scale=2.0**10, dynamic=False)
    mine.seen.clear()
    mine.fit(1)
    assert not inside.is_exclusive(mine.mp_cb.mixed)
    if method == "_step":
        assert mine.seen and {d for d, _ in mine.seen} == {FULL}
        assert max(g for _, g in mine.seen) < 8  # not 1,024 times as large


@FLAT
@pytest.mark.parametrize("opt", ["adam", "torch_adamw"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["create_opt", "by hand"])
def test_5_an_optimizer_made_anew_in_the_middle_of_a_fit_steps_masters(opt, by_hand, flat):
    ends = []
    for dtype in (None, FULL, BF16):
        learn = make_learner(opt)
        if dtype is not None:
            learn.to_fp16(dtype=dtype, flat_master=flat)

        class Anew(Callback):
            def after_batch(self):
                if self.training and self.iter == 1:
                    if by_hand:
                        self.learn.opt = OPTIMIZERS[opt](list(self.model.parameters()), lr=1e-6)
                    else:
                        self.learn.create_opt()
                    self.learn.opt.set_hypers(lr=1e-6, wd=0.0)
                    self.before = weights_of(self.learn)

        cb = Anew()
        learn.fit(1, cbs=cb)
        assert not torch.equal(weights_of(learn), cb.before)  # masters move by little
        learn.to_fp32() if dtype is not None else None
        ends.append(weights_of(learn))
    assert_same(ends[1], ends[0])
    assert (ends[2] - ends[0]).norm() < 0.1 * ends[0].norm()


def weights_of(learn):
    """Return the floating-point numbers of the model's state in one vector."""
    state = learn.model.state_dict().values()
    return torch.cat([v.flatten() for v in state if v.dtype == FULL]).clone()


def test_5_the_rate_of_an_optimizer_function_is_found():
    """As fastai finds it: in the keywords of a partial."""
    func = partial(OptimWrapper, opt=torch.optim.SGD, lr=0.25)
    hypers = []
    for to in (lambda learn: learn, lambda learn: learn.to_fp16(flat_master=True)):
        learn = to(make_learner(func, lr=0.05))
        learn.create_opt()
        hypers.append([h["lr"] for h in learn.opt.hypers])
        assert learn.opt_func.keywords["lr"] == 0.25
    assert hypers[0] == hypers[1]


@HALVES
def test_2_17_a_tiny_t5_and_a_tiny_llama(dtype):
    """Hugging Face's T5 keeps `wo` in 32 bits, Llama the frequencies; both train."""
    hf = pytest.importorskip("transformers")
    ids = torch.randint(64, (2, 7))
    t5 = dict(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    llama = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=2)
    models = [
        hf.T5ForConditionalGeneration(hf.T5Config(decoder_start_token_id=0, **t5)),
        hf.LlamaForCausalLM(hf.LlamaConfig(**llama, **heads)),
    ]
    exact = models[1].model.rotary_emb.inv_freq.clone()
    for model in models:
        model, opt = with_masters(model, torch.optim.SGD(model.parameters(), 0.1), dtype=dtype)
        before = copy.deepcopy(model.state_dict())
        model(input_ids=ids, labels=ids).loss.float().backward()
        opt.step()
        moved = [not torch.equal(v, before[k]) for k, v in model.state_dict().items()]
        assert sum(moved) > 0.8 * len(moved)
    wo = models[0].encoder.block[0].layer[1].DenseReluDense.wo
    assert wo.weight.dtype == FULL and models[0].shared.weight.dtype == dtype
    assert_same(models[1].model.rotary_emb.inv_freq, exact)
    assert models[1].model.layers[0].self_attn.q_proj.weight.dtype == dtype
