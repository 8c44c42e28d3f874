"""What a user of `to_fp16`, `to_bf16`, `to_fp32` sees, from inside a fit and from outside."""

import copy
import pickle
import warnings
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import inside
import pytest
import torch
import torch.nn.functional as F
from fastai.basics import load_learner
from fastai.callback.core import (
    Callback,
    CancelBackwardException,
    CancelBatchException,
    CancelStepException,
    event,
)
from fastai.callback.fp16 import MixedPrecision as AutocastMixedPrecision
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.losses import MSELossFlat
from fastai.optimizer import SGD
from fastai.vision.all import CategoryBlock, DataBlock, ImageBlock, Normalize, PILImage
from tiny import (
    WAYS,
    Case,
    Do,
    bits,
    conv_net,
    make_dls,
    make_learner,
    masters,
    opt_state,
    picture_dls,
    pictures,
    silent,
    snapshot,
    three_groups,
    train,
    weights,
)
from torch import nn

from mixedfp.callback import MixedPrecision, mixed_precision
from mixedfp.examples import photos
from mixedfp.formats import MixedPrecisionError
from mixedfp.testing import assert_same

FLAT = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
HALVES = [torch.float16, torch.bfloat16]
HALF = pytest.mark.parametrize("dtype", HALVES, ids=["fp16", "bf16"])
PRECISIONS = {
    "fp32": lambda learn: learn,
    "fp16": lambda learn: learn.to_fp16(),
    "fp16_flat": lambda learn: learn.to_fp16(flat_master=True),
    "bf16": lambda learn: learn.to_bf16(),
    "bf16_flat": lambda learn: learn.to_bf16(flat_master=True),
}


def assert_plain(learn):
    """Assert that nothing of ours is left on `learn` and in PyTorch."""
    assert torch.overrides._len_torch_function_stack() == 0
    assert not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
    model = learn.model
    assert "forward" not in vars(model)
    for m in model.modules():
        assert not m._state_dict_hooks and not m._load_state_dict_pre_hooks
        assert not m._forward_hooks and not m._forward_pre_hooks
    floats = [p for p in model.parameters() if p.is_floating_point()]
    assert {p.dtype for p in floats} == {torch.float32}
    assert {b.dtype for b in model.buffers() if b.is_floating_point()} <= {torch.float32}
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in floats)
    assert not hasattr(learn, "mixed_precision") and "mp_cb" not in vars(learn)
    if learn.opt is not None:
        assert type(learn.opt).__module__.startswith(("fastai.", "torch."))
        ids = {id(p) for p in floats}
        assert {id(p) for ps in learn.opt.param_lists for p in ps} <= ids


# The master's reason


class One(nn.Module):
    """A model of one weight, 1.0; the gradient of its output is 1."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.w


def one_dls(n=5):
    return make_dls(torch.ones(n + 1, 1), torch.zeros(n + 1, 1), n_valid=1, bs=1)


def minus(pred, _):
    return -pred.float().mean()


@FLAT
@HALF
def test_small_updates_arrive_through_the_master(dtype, flat):
    """1 + 5 × 0.0001 is 1.0005: the half of it is not 1 any more in float16."""
    learn = make_learner(SGD, One, dls=one_dls(), loss_func=minus).to_fp16(
        dtype=dtype, flat_master=flat
    )
    learn.fit(1, 1e-4)
    w = learn.model.w
    assert w.dtype == dtype
    exact = torch.ones(1)
    for _ in range(5):
        exact = exact + 1e-4
    assert_same(masters(learn)[0], exact)
    assert_same(w.detach(), exact.to(dtype))
    assert (w != 1).item() == (dtype == torch.float16)
    learn.fit(16, 1e-4)
    assert (w != 1).item()  # bfloat16's next number is 1.0078


@HALF
def test_small_updates_vanish_without_the_master(dtype):
    learn = make_learner(SGD, One, dls=one_dls(), loss_func=minus)
    learn.model.to(dtype)
    learn.fit(17, 1e-4, cbs=Do("before_batch", to_dtype(dtype), training=False))
    assert learn.model.w.item() == 1


def to_dtype(dtype):
    def f(learn):
        learn.xb = tuple(x.to(dtype) for x in learn.xb)

    return f


# What is 16 bits and what is 32


@FLAT
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_dtypes(precision, flat):
    learn = make_learner()
    returned = learn.to_fp16(flat_master=flat) if precision == "fp16" else learn.to_bf16(flat)
    assert returned is learn
    half = torch.float16 if precision == "fp16" else torch.bfloat16
    for _ in range(2):  # before and after a fit
        for name, p in learn.model.named_parameters():
            assert p.dtype == (torch.float32 if name in ("1.weight", "1.bias") else half), name
        assert {b.dtype for b in learn.model.buffers()} == {torch.float32, torch.int64}
        assert {m.dtype for m in masters(learn)} == {torch.float32}
        assert {v.dtype for v in weights(learn).values()} == {torch.float32, torch.int64}
        learn.fit(1)
    tensors = [v for s in opt_state(learn)["state"] for v in s.values() if torch.is_tensor(v)]
    assert tensors and {t.dtype for t in tensors} == {torch.float32}


@HALF
def test_the_callbacks_names(dtype):
    learn = make_learner().to_fp16(dtype=dtype)
    assert learn.mp_cb is learn.mixed_precision and isinstance(learn.mp_cb, MixedPrecision)
    assert learn.mp_cb.loss_scale == (512.0 if dtype == torch.float16 else 1.0)
    learn.fit(1)
    assert learn.mp_cb.skipped == [] and learn.mp_cb.n_skipped == 0
    assert learn.mp_cb.scales == ([512.0] * 4 if dtype == torch.float16 else [])


def test_the_callbacks_order():
    assert MixedPrecision.order == AutocastMixedPrecision.order == 10


class Witness(Callback):
    """Note the dtypes that each event of a fit shows, after ours."""

    order = 20

    def __init__(self):
        self.seen = {}

    def note(self, what, *tensors):
        self.seen.setdefault(what, set()).update(t.dtype for t in tensors)

    def after_pred(self):
        self.note("xb", *self.xb)
        self.note("pred", self.pred)
        self.note("yb", *self.yb)

    def after_loss(self):
        self.note("loss", self.loss, self.loss_grad)

    def before_step(self):
        self.note("grad", *[p.grad for p in self.learn.model.parameters()])
        assert_same(self.learn.loss_grad.detach(), self.learn.loss.detach())


@FLAT
@HALF
def test_what_callbacks_see(dtype, flat):
    learn = make_learner().to_fp16(dtype=dtype, flat_master=flat)
    witness = Witness()
    learn.fit(1, cbs=[witness])
    single = {torch.float32}
    assert witness.seen == {
        "xb": single, "pred": single, "yb": {torch.int64}, "loss": single, "grad": single,
    }  # fmt: skip


@FLAT
def test_gradients_in_before_step_are_the_true_ones(flat):
    """Unscaled, for every scale, up to float16's rounding of what went through the layers."""
    grads = {}
    for scale in (None, 1.0, 512.0, 8192.0):
        learn = make_learner()
        if scale:
            learn.to_fp16(scale, flat_master=flat)

        def look(learn, scale=scale):
            grads[scale] = [p.grad.clone() for p in learn.model.parameters()]

        learn.fit(1, 0.01, cbs=Do("before_step", look, at=0, order=11))
    for scale in (1.0, 512.0, 8192.0):
        torch.testing.assert_close(grads[scale], grads[None], rtol=0.05, atol=3e-3)


@FLAT
def test_clipping_clips_the_true_gradients(flat):
    norms = []

    def look(learn):
        gs = [p.grad.flatten() for p in learn.model.parameters()]
        held = [g.flatten() for g in inside.stepped_grads(learn.opt)]
        norms.append((torch.cat(gs).norm().item(), torch.cat(held).norm().item()))

    learn = make_learner(splitter=three_groups).to_fp16(8192.0, flat_master=flat)
    learn.fit(1, 0.01, cbs=[GradientClip(0.0625), Do("before_step", look, order=12)])
    torch.testing.assert_close(torch.tensor(norms), torch.full((4, 2), 0.0625), rtol=1e-4, atol=0)


@pytest.mark.parametrize("n_acc", [8, 16, 32])
@HALF
def test_callbacks_may_come_in_any_order(n_acc, dtype):
    results = []
    for turn in range(3):
        cbs = [GradientClip(0.0625), GradientAccumulation(n_acc), MixedPrecision(dtype=dtype)]
        learn = make_learner()
        learn.fit(1, 0.1, cbs=cbs[turn:] + cbs[:turn])
        results.append(snapshot(learn))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


# Losses and predictions


@HALF
@pytest.mark.parametrize("cbs", [(), (GradientAccumulation(16),), (GradientClip(0.5),)], ids=str)
def test_recorded_losses_are_the_true_ones(dtype, cbs):
    recorded = []
    for mixed in (False, True):
        learn = make_learner()
        if mixed:
            learn.to_fp16(dtype=dtype)
        losses = []

        def note(learn, losses=losses):
            losses.append((learn.loss.item(), learn.smooth_loss.item()))

        learn.fit(2, 0.01, cbs=[Do("after_batch", note), *copy.deepcopy(cbs)])
        recorded.append(
            torch.tensor([*learn.recorder.losses, *[v for pair in losses for v in pair]])
        )
    tolerance = 2e-3 if dtype == torch.float16 else 2e-2
    torch.testing.assert_close(recorded[1], recorded[0], rtol=tolerance, atol=tolerance)


@HALF
def test_the_first_loss_is_the_float32_loss_of_the_rounded_model(dtype):
    """From outside: the same rounded weights and inputs, computed in float32."""
    learn = make_learner(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 2)))
    net, (x, y) = copy.deepcopy(learn.model), learn.dls.train.one_batch()
    for p in net.parameters():
        p.data = p.data.to(dtype).float()
    expected = F.cross_entropy(net(x.to(dtype).float()).to(dtype).float(), y)
    losses = []
    learn.to_fp16(dtype=dtype).fit(
        1, 0.0, cbs=Do("after_loss", lambda learn: losses.append(learn.loss), at=0)
    )
    torch.testing.assert_close(
        losses[0].as_subclass(torch.Tensor).detach(), expected, rtol=1e-2, atol=0
    )
    assert losses[0].dtype == torch.float32


@HALF
@FLAT
def test_predictions_are_32_bit_and_near(dtype, flat):
    learn = make_learner()
    expected = learn.get_preds()
    learn.to_fp16(dtype=dtype, flat_master=flat)
    preds, targets, losses = learn.get_preds(with_loss=True)
    assert preds.dtype == losses.dtype == torch.float32 and targets.dtype == torch.int64
    tolerance = 2e-3 if dtype == torch.float16 else 2e-2
    torch.testing.assert_close(preds, expected[0], rtol=tolerance, atol=tolerance)
    assert not torch.equal(preds, expected[0])  # they were computed in 16 bits


LOOKS = {
    "get_preds": lambda learn: learn.get_preds(with_loss=True, with_input=True),
    "get_train_preds": lambda learn: learn.get_preds(ds_idx=0),
    "validate": lambda learn: learn.validate(),
    "no_steps": lambda learn: learn.fit(0),
    "summary": lambda learn: learn.summary(),
    "state_dict": lambda learn: (learn.model.state_dict(), learn.opt.state_dict()),
    "save": lambda learn: learn.save("look"),
    "lr_find": lambda learn: learn.lr_find(num_it=6, show_plot=False, suggest_funcs=None),
    "master_params": lambda learn: (learn.mp_cb.master_params, learn.mp_cb.model_params),
    "training_loop": lambda learn: learn.show_training_loop(),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_looking_changes_no_bit(precision, look, tmp_path):
    """D4: fastai's master-weight path rounds the weights when it only validates."""
    if look == "master_params" and precision == "fp32":
        pytest.skip("float32 has no masters")
    import fastai.callback.hook  # noqa: F401  gives Learner.summary

    learn = PRECISIONS[precision](make_learner(splitter=three_groups, path=tmp_path))
    learn.fit(1)
    before = snapshot(learn) if precision == "fp32" else bits(learn)
    scale = None if precision == "fp32" else learn.mp_cb.loss_scale
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        LOOKS[look](learn)
    hypers = ("hypers", "param_groups")
    after = snapshot(learn) if precision == "fp32" else bits(learn)
    for one in (before, after):
        for k in hypers if look in ("lr_find", "no_steps") else ():
            one["opt"].pop(k, None)
    assert_same(after, before)
    assert scale is None or learn.mp_cb.loss_scale == scale


def vision_learner(tmp_path):
    """Return a learner whose data know how to decode and show, and a picture for it."""
    block = DataBlock(
        blocks=(ImageBlock, CategoryBlock),
        get_x=_picture,
        get_y=_label,
        splitter=_halves,
        batch_tfms=Normalize.from_stats([0.5] * 3, [0.25] * 3, cuda=False),
    )
    dls = block.dataloaders(list(range(16)), bs=4, num_workers=0, device="cpu")
    return make_learner(dls=dls, path=tmp_path), _picture(9)


def _picture(i):
    x = pictures(16)[0][i].permute(1, 2, 0) * 32 + 128
    return PILImage.create(x.clamp(0, 255).byte().numpy())


def _halves(items):
    return list(range(8)), list(range(8, 16))


def _label(i):
    return "ab"[i % 2]


@pytest.mark.parametrize("precision", ["fp16_flat", "bf16"])
def test_predict_and_show_results_of_pictures(precision, tmp_path):
    """TensorImage in, TensorBase out; nothing changes; the results are those of 32 bits, nearly."""
    import matplotlib.pyplot as plt

    learn, picture = vision_learner(tmp_path)
    expected = learn.predict(picture)
    PRECISIONS[precision](learn)
    before = bits(learn)
    found = learn.predict(picture)
    assert found[2].dtype == torch.float32 and found[0] == expected[0]
    torch.testing.assert_close(found[2], expected[2], rtol=0.02, atol=0.02)
    learn.show_results(max_n=2)
    learn.tta(n=1)
    plt.close("all")
    assert_same(bits(learn), before)
    learn.fit(1)


@pytest.mark.parametrize(
    "at", ["after_batch", "after_epoch", "after_train", "before_validate", "after_step"]
)
@FLAT
def test_predicting_within_a_fit(at, flat):
    """N5: fastai's `to_fp16` dies when a callback predicts in the middle of a fit."""

    def predict(learn):
        was_training = learn.training
        assert learn.get_preds(inner=True, reorder=False)[0].dtype == torch.float32
        learn.training = was_training
        learn.model.train(was_training)

    def run(cbs):
        learn = make_learner().to_fp16(flat_master=flat)
        learn.fit(1, 0.05, cbs=cbs)
        learn.fit(1, 0.05)
        return bits(learn) | {"scales": learn.mp_cb.scales}

    once = Do(at, predict, at=3, training=False)
    original, once.f = (
        once.f,
        lambda learn: once.done.append(1) or original(learn) if not once.done else None,
    )
    once.done = []
    assert_same(run(once), run([]))
    assert once.done == [1]


# From one precision to another


@pytest.mark.parametrize("second", PRECISIONS)
@pytest.mark.parametrize("first", PRECISIONS)
def test_from_one_precision_to_another(first, second):
    """The masters go along: nothing is rounded on the way, and the state of the optimizer stays."""
    learn = PRECISIONS[first](make_learner("adam"))
    learn.fit(1)
    before = snapshot(learn)
    learn = PRECISIONS[second](learn if second != "fp32" else learn.to_fp32())
    assert_same(snapshot(learn), before)
    learn.fit(1)
    assert len([cb for cb in learn.cbs if isinstance(cb, MixedPrecision)]) == (second != "fp32")
    learn.to_fp32()
    assert_plain(learn)


@FLAT
@HALF
def test_masters_are_the_original_weights(dtype, flat):
    """D3: not what 16 bits have left of them."""
    learn = make_learner()
    original = weights(learn)
    learn.to_fp16(dtype=dtype, flat_master=flat)
    rounded = {k: v.float() for k, v in learn.model.named_parameters()}
    for (k, _), m in zip(learn.model.named_parameters(), masters(learn), strict=True):
        assert_same(m, original[k])
    assert not torch.equal(rounded["0.weight"], original["0.weight"])
    learn.fit(1, 0.0, wd=0.0)
    assert_same(masters(learn)[0], original["0.weight"])
    learn.to_fp32()
    parameters = {k: v.detach() for k, v in learn.model.named_parameters()}
    assert_same(parameters, {k: original[k] for k in parameters})


@FLAT
@HALF
def test_to_fp32_gives_the_masters_back(dtype, flat):
    learn = make_learner("adam", splitter=three_groups).to_fp16(dtype=dtype, flat_master=flat)
    learn.freeze()
    learn.fit(1)
    found, state, parameters = masters(learn), opt_state(learn), list(learn.model.parameters())
    assert learn.to_fp32() is learn
    assert [id(p) for p in learn.model.parameters()] == [id(p) for p in parameters]
    assert_same([p.detach() for p in learn.model.parameters()], found)
    assert_same(opt_state(learn), state)
    assert_plain(learn)
    storages = {p.untyped_storage().data_ptr() for p in parameters}
    assert len(storages) == len(parameters)  # no parameter keeps a vector of all alive
    learn.unfreeze()
    learn.fit(1)


@pytest.mark.parametrize("precision", [p for p in PRECISIONS if p != "fp32"])
def test_gradients_that_are_left_are_true_in_32_bits(precision):
    """An accumulation that a fit's end cuts off leaves scaled gradients: not for long."""
    left = {}
    for name in ("fp32", precision):
        learn = PRECISIONS[name](make_learner())
        learn.fit(1, 0.01, cbs=GradientAccumulation(24))  # three batches of four
        left[name] = [p.grad.clone() for p in learn.to_fp32().model.parameters()]
    assert max(g.abs().max() for g in left["fp32"]) > 0.01
    torch.testing.assert_close(left[precision], left["fp32"], rtol=0.1, atol=0.01)


def test_to_fp32_without_anything_to_undo():
    learn = make_learner()
    before = weights(learn)
    assert learn.to_fp32() is learn
    assert_same(weights(learn), before)
    assert_plain(learn)


@pytest.mark.parametrize("after", ["create_opt", "none"])
def test_to_fp32_keeps_the_optimizer_that_the_user_made(after):
    learn = make_learner("adam").to_fp16()
    learn.fit(1)
    learn.opt = None
    if after == "create_opt":
        learn.create_opt()
    mine = learn.opt and inside.users_optimizer(learn.opt)
    learn.to_fp32()
    assert learn.opt is mine
    learn.fit(1)


@FLAT
@pytest.mark.parametrize("opt", ["sgd", "torch_adamw"])
def test_a_callback_of_one_fit(opt, flat):
    """`learn.fit(1, cbs=mixed_precision())` leaves a 32-bit model that knows the masters."""
    learn = make_learner(opt)
    seen = {}

    def look(learn):
        assert learn.model[0].weight.dtype == torch.float16
        seen["masters"] = masters(learn)

    learn.fit(1, 0.05, cbs=[mixed_precision(flat_master=flat), Do("after_fit", look)])
    assert_same([p.detach() for p in learn.model.parameters()], seen["masters"])
    assert_plain(learn)
    stay = make_learner(opt, cbs=mixed_precision(flat_master=flat))
    stay.fit(1, 0.05)
    assert_same(snapshot(stay), snapshot(learn))


def test_the_same_callback_twice_and_on_another_learner():
    cb = MixedPrecision(growth_interval=2)
    learn, other = make_learner(), make_learner(seed=2)
    learn.fit(1, cbs=cb)
    learn.fit(1, cbs=cb)
    assert cb.scales == [512.0] * 2 + [1024.0] * 2 + [2048.0] * 2 + [4096.0] * 2
    other.fit(1, cbs=cb)
    for one in (learn, other):
        assert_plain(one)
    with pytest.raises(MixedPrecisionError, match="add this callback to a Learner"):
        cb.master_params  # noqa: B018


def test_two_callbacks_at_once_lose_nothing():
    """One of the learner's, and one more for a fit: which is not asked for, and does no harm."""
    learn = make_learner(lambda p, lr: SGD(p, lr)).to_fp16(flat_master=True)
    before = {k: v.clone() for k, v in zip("abcdefghij", masters(learn), strict=True)}
    learn.fit(1, 0.0, cbs=mixed_precision())
    learn.fit(1, 0.0)
    learn.to_fp32()
    after = dict(zip("abcdefghij", [p.detach() for p in learn.model.parameters()], strict=True))
    assert_same(after, before)
    assert_plain(learn)


@pytest.mark.parametrize("ours", ["to_fp16", "to_bf16", "to_fp32"])
def test_fastais_own_is_replaced(ours):
    learn = make_learner(cbs=AutocastMixedPrecision())
    getattr(learn, ours)()
    assert not [cb for cb in learn.cbs if isinstance(cb, AutocastMixedPrecision)]
    learn.fit(1)
    assert (learn.model[0].weight.dtype == torch.float32) == (ours == "to_fp32")


def test_fastais_own_words_are_taken():
    learn = make_learner().to_fp16(
        init_scale=64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=4
    )
    assert learn.mp_cb.loss_scale == 64.0
    learn.fit(1)
    assert learn.mp_cb.loss_scale == 256.0
    assert make_learner().to_fp16(1024.0, True).mp_cb.loss_scale == 1024.0


def test_scaling_can_be_switched_off():
    """N3: fastai writes over `enabled=False`."""
    learn = make_learner().to_fp16(enabled=False)
    seen = []
    learn.fit(1, cbs=Do("before_step", lambda learn: seen.append(learn.mp_cb.loss_scale), order=5))
    assert seen == [1.0] * 4 and learn.mp_cb.scales == [] and learn.mp_cb.loss_scale == 1.0
    assert learn.model[0].weight.dtype == torch.float16


# Models and data


def embedding_learner(**kwargs):
    """Return a learner of integers (categories) and floats (continuous), as tabular ones are."""

    class Tabular(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.lin = nn.Embedding(5, 3), nn.Linear(5, 2)

        def forward(self, cat, cont):
            assert cat.dtype == torch.int64
            return self.lin(torch.cat([self.emb(cat), cont], -1))

    g = torch.Generator().manual_seed(0)
    cat, cont = torch.randint(0, 5, (40,), generator=g), torch.randn(40, 2, generator=g)
    dls = make_dls(cat, cont, (cat % 2), n_inp=2)
    return make_learner("adam", Tabular, dls=dls, **kwargs)


def token_learner(**kwargs):
    """Return a learner whose only input is integers."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 5, (40, 4), generator=g)
    dls = make_dls(tokens, tokens[:, 0] % 2)

    def model():
        return nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(12, 2))

    return make_learner("adam", model, dls=dls, **kwargs)


class Lstm(nn.Module):
    """A recurrent net with attention over its steps."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        a, _ = self.attention(h, h, h, need_weights=False)
        q = F.scaled_dot_product_attention(h, a, h)
        return self.head(self.norm(q.mean(1)))


def lstm_learner(**kwargs):
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 5, (40, 4), generator=g)
    return make_learner("adam", Lstm, dls=make_dls(tokens, tokens[:, 0] % 2), **kwargs)


Pair = namedtuple("Pair", "logits extra")


@dataclass
class Output:
    logits: Any
    name: str = "output"
    nothing: None = None
    count: int = 3
    more: dict = field(default_factory=dict)


class Mapped(dict):
    """A dict whose items are attributes, as the outputs of transformers are."""

    __getattr__ = dict.__getitem__


WRAPPED = {
    "tuple": (lambda y: (y, y.argmax(-1)), lambda o: o[0]),
    "list": (lambda y: [None, y], lambda o: o[1]),
    "namedtuple": (lambda y: Pair(y, "text"), lambda o: o.logits),
    "dict": (lambda y: {"logits": y, "mask": y > 0}, lambda o: o["logits"]),
    "model_output": (lambda y: Mapped(logits=y, past=(y, None)), lambda o: o.logits),
    "dataclass": (lambda y: Output(y, more={"x": [y]}), lambda o: o.logits),
    "nested": (lambda y: ({"a": [Pair(y, None)]}, 1.0), lambda o: o[0]["a"][0].logits),
}


class Wrapping(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.net, self.wrap = conv_net(), wrap

    def forward(self, x):
        return self.wrap(self.net(x))


@HALF
@pytest.mark.parametrize("kind", WRAPPED)
def test_outputs_keep_their_type(kind, dtype):
    """N8: fastai rebuilds outputs: a namedtuple, `None` or a string inside crash."""
    wrap, unwrap = WRAPPED[kind]
    seen = []

    def loss(pred, y):
        seen.append(pred)
        return F.cross_entropy(unwrap(pred), y)

    model = Wrapping(wrap)
    learn = make_learner(model=model, loss_func=loss).to_fp16(dtype=dtype)
    learn.fit(1)
    x = learn.dls.train.one_batch()[0]
    raw = model(x)  # by hand as in a fit: 32-bit numbers go in and come out
    assert type(seen[-1]) is type(raw) is type(wrap(torch.zeros(2, 2)))
    assert unwrap(raw).dtype == unwrap(seen[-1]).dtype == torch.float32
    assert model.net[0].weight.dtype == dtype
    if kind == "dataclass":
        assert seen[-1].name == "output" and seen[-1].nothing is None
        assert seen[-1].more["x"][0].dtype == torch.float32
    if kind == "dict":
        assert seen[-1]["mask"].dtype == torch.bool


@FLAT
@HALF
@pytest.mark.parametrize(
    "make", [embedding_learner, token_learner, lstm_learner], ids=lambda f: f.__name__
)
def test_integer_inputs(make, dtype, flat):
    learn = make()
    expected = learn.get_preds()[0]
    learn.to_fp16(dtype=dtype, flat_master=flat)
    torch.testing.assert_close(learn.get_preds()[0], expected, rtol=0.05, atol=0.05)
    before = masters(learn)
    learn.fit(1)
    after = masters(learn)
    assert sum(not torch.equal(a, b) for a, b in zip(after, before, strict=True)) >= len(before) - 2
    exact = make().to_fp16(dtype=torch.float32, flat_master=flat)
    plain = make()
    for one in (exact, plain):
        torch.manual_seed(0)
        one.fit(1)
    assert_same(snapshot(exact), snapshot(plain))


def test_inputs_in_dicts_and_lists():
    """A batch whose input is a dict: floats are cast, the rest is left alone."""

    class Dict(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.lin = nn.Embedding(5, 3), nn.Linear(3, 2)

        def forward(self, x):
            assert x["ids"].dtype == torch.int64 and x["scale"][0].dtype == torch.float16
            return self.lin(self.emb(x["ids"]) * x["scale"][0])

    rows = [
        ({"ids": torch.tensor(i % 5), "scale": [torch.ones(3)]}, torch.tensor(i % 2))
        for i in range(24)
    ]
    from fastai.basics import DataLoaders

    dls = DataLoaders.from_dsets(rows[:16], rows[16:], bs=8, num_workers=0, device="cpu")
    make_learner(model=Dict, dls=dls).to_fp16().fit(1)


def test_float_targets_are_left_alone():
    x, _ = pictures(40)
    y = torch.full((40, 1), 2.0**20) + torch.randn(40, 1)
    seen = []
    learn = make_learner(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 1)),
        dls=make_dls(x, y),
        loss_func=MSELossFlat(),
    ).to_fp16(1.0)
    learn.fit(1, 0.0, cbs=Do("after_loss", lambda learn: seen.append(learn.yb[0]), at=0))
    assert_same(seen[0].as_subclass(torch.Tensor), learn.dls.train.one_batch()[1])
    assert seen[0].dtype == torch.float32


class LearnableLoss(nn.Module):
    """A loss with a parameter of its own, outside of the model."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(1))

    def forward(self, pred, y):
        return F.cross_entropy(pred * self.log_scale.exp(), y) + self.log_scale.square().sum()


@FLAT
@pytest.mark.parametrize("opt", ["sgd", "adam", "ranger", "torch_adamw"])
def test_a_loss_with_parameters(opt, flat):
    def run(dtype):
        loss = LearnableLoss()

        def split(model):
            return [list(model.parameters()), list(loss.parameters())]

        learn = make_learner(opt, splitter=split, loss_func=loss)
        if dtype is not None:
            learn.to_fp16(dtype=dtype, flat_master=flat)
        learn.fit(2, 0.05, wd=0.1)
        return learn.to_fp32(), loss

    (plain, loss), (single, loss_single), (half, loss_half) = map(
        run, (None, torch.float32, torch.float16)
    )
    assert_same(snapshot(single), snapshot(plain))
    assert_same(loss_single.log_scale.detach(), loss.log_scale.detach())
    assert loss_half.log_scale.dtype == torch.float32 and loss_half.log_scale.item() != 0
    torch.testing.assert_close(loss_half.log_scale, loss.log_scale, rtol=0.1, atol=5e-3)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_complex_and_double_parameters_do_not_stop_a_fit(precision):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = conv_net()
            self.phase = nn.Parameter(torch.randn(2, dtype=torch.complex64), requires_grad=False)
            self.register_buffer("wave", torch.ones(2, dtype=torch.complex64))

        def forward(self, x):
            return self.net(x)

    learn = PRECISIONS[precision](make_learner(model=Odd))
    learn.fit(1)
    assert learn.model.phase.dtype == learn.model.wave.dtype == torch.complex64


class InPlace(nn.Module):
    """Products in the spellings that write into a tensor."""

    def __init__(self, spelling):
        super().__init__()
        self.w, self.b, self.spelling = (
            nn.Parameter(torch.randn(108, 2) / 8),
            nn.Parameter(torch.ones(2)),
            spelling,
        )

    def forward(self, x):
        x = x.flatten(1)
        out = self.b.expand(len(x), 2).clone()
        if self.spelling == "addmm_":
            out.addmm_(x, self.w)
        elif self.spelling == "baddbmm_":
            out = out[None]
            out.baddbmm_(x[None], self.w[None])
            out = out[0]
        elif self.training:
            out = out + x @ self.w
        else:
            torch.addmm(out.clone(), x, self.w, out=out)
        return out


@pytest.mark.parametrize("spelling", ["addmm_", "baddbmm_", "out"])
def test_products_in_place(spelling):
    learn = make_learner(model=lambda: InPlace(spelling))
    learn.dls.valid.bs = 8
    with torch.no_grad():
        expected = learn.get_preds()[0]
        learn.to_fp16()
        torch.testing.assert_close(learn.get_preds()[0], expected, rtol=5e-3, atol=5e-3)
    learn.fit(1)


# The way of fp16 without the hardware for it


@pytest.mark.parametrize(
    "make", [make_learner, lstm_learner, embedding_learner], ids=lambda f: f.__name__
)
def test_native_and_default_agree_within_rounding(make):
    runs = {}
    for native in (False, True):
        learn = make().to_fp16(native=native)
        grads = []

        def look(learn, grads=grads):
            grads.extend(p.grad.clone() for p in learn.model.parameters() if p.grad is not None)

        first = learn.get_preds()[0]
        learn.fit(1, 0.01, cbs=Do("before_step", look, at=0, order=20))
        runs[native] = first, learn.get_preds()[0], grads, masters(learn)
    torch.testing.assert_close(runs[True][0], runs[False][0], rtol=4e-3, atol=2e-3)
    torch.testing.assert_close(runs[True][2], runs[False][2], rtol=3e-2, atol=2e-3)
    torch.testing.assert_close(runs[True][3], runs[False][3], rtol=3e-2, atol=2e-2)
    torch.testing.assert_close(runs[True][1], runs[False][1], rtol=3e-2, atol=2e-2)


def test_activations_are_float16_between_layers():
    learn, seen = make_learner().to_fp16(), set()
    hooks = [
        m.register_forward_hook(lambda m, i, o: seen.add(o.dtype)) for m in learn.model.children()
    ]
    learn.fit(1)
    for h in hooks:
        h.remove()
    assert seen == {torch.float16}


# Whatever is raised


def boom(error):
    def f(_):
        raise error("boom")

    return f


EVENTS = [
    e
    for e in vars(event)
    if e.startswith(("before_", "after_")) and "cancel" not in e and e != "after_create"
]


class RaiseAt(Callback):
    """Raise `error` at `name`, in the second epoch and batch where it has one."""

    def __init__(self, name, error, order):
        self.name_of_event, self.error, self.order, self.n = name, error, order, 0

    def __call__(self, event_name):
        if event_name == self.name_of_event:
            self.n += 1
            is_second = event_name in ("before_fit", "after_fit") or self.n == 2
            if is_second:
                raise self.error("boom")


@pytest.mark.parametrize("order", [5, 60])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("name", EVENTS)
def test_an_exception_in_any_event(name, error, order):
    """D5, N4: the next fit trains; nothing stays entered or patched."""
    learn = make_learner("adam", splitter=three_groups).to_fp16(flat_master=order == 60)
    with pytest.raises(error, match="boom"):
        learn.fit(2, 0.01, cbs=RaiseAt(name, error, order))
    assert torch.overrides._len_torch_function_stack() == 0
    stopped = bits(learn)
    rounded = [
        m.to(p.dtype) for m, p in zip(stopped["masters"], learn.model.parameters(), strict=True)
    ]
    assert_same([p.detach() for p in learn.model.parameters()], rounded)
    learn.fit(1, 0.01)
    for now, then in zip(masters(learn), stopped["masters"], strict=True):
        assert now.isfinite().all() and not torch.equal(now, then)
    found = masters(learn)
    learn.to_fp32()
    assert_plain(learn)
    assert_same([p.detach() for p in learn.model.parameters()], found)


@pytest.mark.parametrize("name", EVENTS)
def test_an_exception_with_the_callback_of_one_fit(name):
    learn = make_learner()
    with pytest.raises(ZeroDivisionError):
        learn.fit(
            2, 0.01, cbs=[mixed_precision(flat_master=True), RaiseAt(name, ZeroDivisionError, 60)]
        )
    assert_plain(learn)
    learn.fit(1, 0.01)


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.n = conv_net(), 0

    def forward(self, x):
        self.n += 1
        if self.n == 3:
            raise KeyboardInterrupt("boom")
        return self.net(x)


@FLAT
@pytest.mark.parametrize("opt", ["sgd", "ranger", "torch_adamw"])
@pytest.mark.parametrize("where", ["forward", "loss", "backward", "step", "half_a_step"])
def test_an_interruption_inside(where, opt, flat, monkeypatch):
    count = [0]

    def interrupt(f, at):
        def g(*args, **kwargs):
            count[0] += 1
            if count[0] == at:
                raise KeyboardInterrupt("boom")
            return f(*args, **kwargs)

        return g

    learn = make_learner(
        opt, Fragile if where == "forward" else lambda: nn.Sequential(*[Fragile()])
    )
    for m in learn.model.modules():
        if isinstance(m, Fragile) and where != "forward":
            m.n = 10
    learn.to_fp16(flat_master=flat)
    if where == "loss":
        learn.loss_func = interrupt(learn.loss_func, 3)
    if where == "backward":
        monkeypatch.setattr(torch.Tensor, "backward", interrupt(torch.Tensor.backward, 3))
    learn.create_opt()
    core = learn.opt.opt
    core = getattr(core, "opt", core) if opt != "sgd" else core
    if where == "step":
        core.step = interrupt(core.step, 3)
    if where == "half_a_step":
        at = 2 * len(list(learn.model.parameters())) + 1 if not flat else 3
        monkeypatch.setattr(torch.Tensor, "add_", interrupt(torch.Tensor.add_, at))
        monkeypatch.setattr(torch.Tensor, "addcdiv_", interrupt(torch.Tensor.addcdiv_, at))
    with pytest.raises(KeyboardInterrupt):
        learn.fit(1, 0.01)
    monkeypatch.undo()
    vars(core).pop("step", None)
    assert torch.overrides._len_torch_function_stack() == 0
    stopped = masters(learn)
    halves = [p.detach().clone() for p in learn.model.parameters()]
    assert_same(halves, [m.to(p.dtype) for m, p in zip(stopped, halves, strict=True)])
    learn.fit(1, 0.01)
    assert any(not torch.equal(a, b) for a, b in zip(masters(learn), stopped, strict=True))
    learn.to_fp32()
    assert_plain(learn)


def test_a_raised_error_in_a_forward_pass_leaves_no_mode():
    learn = make_learner().to_fp16()
    with pytest.raises(RuntimeError):
        learn.model(torch.zeros(1, 7, 6, 6, dtype=torch.float16))
    assert torch.overrides._len_torch_function_stack() == 0


# Cancelled steps and batches


@FLAT
@pytest.mark.parametrize("order", [5, 60])
@pytest.mark.parametrize(
    "name, error",
    [("before_step", CancelStepException), ("before_step", CancelBatchException),
     ("after_backward", CancelBatchException), ("after_loss", CancelBatchException),
     ("after_step", CancelBatchException), ("before_backward", CancelBackwardException)],
)  # fmt: skip
@pytest.mark.parametrize("clears", [False, True], ids=["keeps", "clears"])
def test_cancelled_batches(name, error, order, flat, clears):
    """The gradients that a cancelled batch leaves are true when the next batch adds to them."""

    def cancel(_):
        raise error("boom")

    def clear(learn):
        learn.opt.zero_grad()

    grads = {}
    for dtype in (torch.float32, torch.float16):
        learn = make_learner().to_fp16(2.0**12, dtype=dtype, flat_master=flat)
        seen = grads.setdefault(dtype, [])

        def look(learn, seen=seen):
            seen.append(
                [None if p.grad is None else p.grad.clone() for p in learn.model.parameters()]
            )

        cbs = [Do(name, cancel, at=1, order=order), Do("before_step", look, order=50)]
        if clears:
            cbs.append(Do("after_cancel_batch", clear, at=1))
        learn.fit(1, 0.0, cbs=cbs)
        assert torch.overrides._len_torch_function_stack() == 0
    assert len(grads[torch.float32]) == len(grads[torch.float16]) >= 3
    torch.testing.assert_close(grads[torch.float16], grads[torch.float32], rtol=0.05, atol=3e-3)


@pytest.mark.parametrize("order", [5, 60])
def test_the_loss_is_the_true_one_when_backward_is_called_off(order):
    def cancel(_):
        raise CancelBackwardException

    seen = []

    def look(learn):
        seen.append((learn.loss_grad.item(), learn.loss.item()))

    learn = make_learner().to_fp16()
    learn.fit(1, 0.0, cbs=[Do("before_backward", cancel, order=order), Do("after_backward", look)])
    assert len(seen) == 4 and all(a == b for a, b in seen)


# Checkpoints


@pytest.mark.parametrize("second", PRECISIONS)
@pytest.mark.parametrize("first", PRECISIONS)
@pytest.mark.parametrize("opt", ["adam", "ranger", "torch_adamw"])
def test_a_checkpoint_goes_into_any_precision(opt, first, second, tmp_path):
    one = PRECISIONS[first](make_learner(opt, splitter=three_groups, path=tmp_path))
    one.fit(1)
    one.save("checkpoint")
    file = torch.load(tmp_path / "models" / "checkpoint.pth", weights_only=False)
    floats = [v for v in file["model"].values() if v.is_floating_point()]
    assert {v.dtype for v in floats} == {torch.float32}
    other = PRECISIONS[second](make_learner(opt, splitter=three_groups, path=tmp_path, seed=2))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Could not load the optimizer state")
        other.load("checkpoint")
    assert_same(snapshot(other), snapshot(one))
    scaled = [learn for learn in (one, other) if "mp_cb" in vars(learn)]
    if first == second and first.startswith("fp16"):
        assert scaled[0].mp_cb.loss_scale == scaled[1].mp_cb.loss_scale
    other.fit(1)
    if first == second:
        one.fit(1)
        assert_same(snapshot(other), snapshot(one))


@FLAT
def test_a_checkpoint_holds_the_loss_scale(flat, tmp_path):
    one = make_learner(path=tmp_path).to_fp16(growth_interval=3, flat_master=flat)
    one.fit(1)
    one.save("checkpoint")
    other = make_learner(path=tmp_path, seed=2).to_fp16(growth_interval=3, flat_master=flat)
    other.load("checkpoint")
    assert other.mp_cb.loss_scale == 1024.0
    one.fit(1)
    other.fit(1)
    assert other.mp_cb.loss_scale == one.mp_cb.loss_scale == 2048.0
    assert other.mp_cb.scales == one.mp_cb.scales[4:]


@FLAT
@HALF
@pytest.mark.parametrize("how", ["reset_opt", "without_opt", "create_opt"])
def test_checkpoints_and_new_optimizers(how, dtype, flat, tmp_path):
    """A momentum that torch loads stays in 32 bits, whoever made the optimizer."""
    learn = make_learner("torch_adamw", path=tmp_path).to_fp16(dtype=dtype, flat_master=flat)
    learn.fit(1)
    learn.save("checkpoint")
    before, found = opt_state(learn), masters(learn)
    learn.fit(1)
    if how == "create_opt":
        learn.create_opt()
    learn.load("checkpoint", with_opt=how != "without_opt")
    assert_same(masters(learn), found)
    if how == "create_opt":
        assert_same(opt_state(learn), before)
    learn.fit(1, reset_opt=how == "reset_opt")
    for s in opt_state(learn)["state"].values():
        assert {v.dtype for v in s.values()} == {torch.float32}
        assert s["step"] == (4 if how == "reset_opt" else 12 if how == "without_opt" else 8)


@HALF
def test_a_model_file_goes_in_and_out(dtype):
    """`model.load_state_dict` of a plain file sets the masters, not only their halves."""
    source = make_learner(seed=3)
    learn = make_learner().to_fp16(dtype=dtype, flat_master=True)
    learn.fit(1)
    learn.model.load_state_dict(source.model.state_dict())
    assert_same(masters(learn), [p.detach() for p in source.model.parameters()])
    assert_same(weights(learn), weights(source))
    learn.to_fp32()
    assert_same(weights(learn), weights(source))


def test_a_part_of_a_model_goes_in():
    source = make_learner(seed=3)
    learn = make_learner().to_fp16()
    learn.model[4].load_state_dict(source.model[4].state_dict())
    assert_same(masters(learn)[4], source.model[4].weight.detach())
    learn.model.load_state_dict({"0.weight": source.model[0].weight}, strict=False)
    assert_same(masters(learn)[0], source.model[0].weight.detach())
    assert_same(learn.model[4].state_dict()["weight"], source.model[4].weight.detach())


@HALF
def test_weights_written_between_fits_are_taken_over(dtype):
    """Who writes into the 16-bit weights means it; what he leaves keeps its low bits."""
    learn = make_learner().to_fp16(dtype=dtype)
    before = masters(learn)
    with torch.no_grad():
        learn.model[0].weight[0] = 0.25
    learn.fit(0)
    after = masters(learn)
    assert (after[0][0] == 0.25).all()
    assert_same(after[0][1:], before[0][1:])
    assert_same(after[1:], before[1:])


def test_weights_written_through_data_are_taken_over_at_the_next_epoch():
    """A write through `.data` leaves no trace to see; who writes after an epoch is heard."""
    learn = make_learner().to_fp16()

    def write(learn):
        learn.model[0].weight.data.fill_(0.25)

    learn.fit(1, 0.0, cbs=Do("after_epoch", write, training=False))
    learn.fit(1, 0.0)
    assert (weights(learn)["0.weight"] == 0.25).all()


# Copies and files


@FLAT
@pytest.mark.parametrize("opt", ["adam", "ranger", "torch_adamw"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "mixed_fp32"])
def test_a_copy_trains_on(precision, how, opt, flat):
    learn = make_learner(opt, splitter=three_groups)
    if precision != "fp32":
        dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "mixed_fp32": torch.float32}
        learn.to_fp16(dtype=dtypes[precision], flat_master=flat)
    learn.fit(1)
    twin = copy.deepcopy(learn) if how == "deepcopy" else pickle.loads(pickle.dumps(learn))
    assert not {id(p) for p in twin.model.parameters()} & {id(p) for p in learn.model.parameters()}
    look = snapshot if precision == "fp32" else bits
    before = look(learn)
    assert_same(look(twin), before)
    twin.fit(1)
    assert_same(look(learn), before)  # the copy shares nothing
    learn.fit(1)
    assert_same(look(twin), look(learn))
    twin.to_fp32()
    learn.to_fp32()
    assert_same(snapshot(twin), snapshot(learn))
    if precision != "fp32":
        assert_plain(twin)


def test_a_copy_of_the_model_is_a_model_in_32_bits():
    """As for a moving average: it predicts as the learner does back in 32 bits."""
    learn = make_learner().to_fp16(flat_master=True)
    learn.fit(1)
    twin = copy.deepcopy(learn.model).eval()
    assert {p.dtype for p in twin.parameters()} == {torch.float32}
    assert_same(dict(twin.state_dict()), dict(learn.model.state_dict()))
    before = weights(learn)["0.weight"]
    exact = copy.deepcopy(twin)
    with torch.no_grad():
        twin[0].weight.zero_()
    assert_same(weights(learn)["0.weight"], before)
    x = learn.dls.valid.one_batch()[0]
    learn.to_fp32().model.eval()
    with torch.no_grad():
        assert_same(exact(x), learn.model(x))


@pytest.mark.parametrize("precision", ["fp16", "fp16_flat", "bf16", "back_in_fp32"])
def test_export_and_load(precision, tmp_path):
    dls = photos(n_train=32, n_valid=8, bs=8, device="cpu")
    learn, picture = (
        make_learner("torch_adamw", dls=dls, path=tmp_path),
        dls.valid_ds.items[0].image,
    )
    (PRECISIONS[precision] if precision in PRECISIONS else lambda learn: learn.to_fp16())(learn)
    learn.fit(1)
    state, expected = opt_state(learn), weights(learn)
    if precision == "back_in_fp32":
        learn.to_fp32()
    preds = learn.predict(picture)
    learn.export("learn.pkl")
    assert_same(opt_state(learn), state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fastai's, of pickles from strangers
        loaded = silent(load_learner(tmp_path / "learn.pkl"))
    assert_same(weights(loaded), expected)
    assert {v.dtype for v in weights(loaded).values()} <= {torch.float32, torch.int64}
    assert_plain(loaded)
    torch.testing.assert_close(loaded.predict(picture)[2], preds[2], rtol=0.02, atol=0.02)
    learn.fit(1)  # the exported one goes on


# The invariant in the large


@pytest.mark.parametrize("way", WAYS)
def test_sixteen_bits_end_near_32(way):
    """In 16 bits each way to train ends near fastai's own: only rounding is between them."""
    if way in ("finding_a_rate", "keeping_the_best"):
        pytest.skip("a choice between losses may fall the other way")
    plain = train(Case(way))
    for dtype, tolerance in ((torch.float16, 0.02), (torch.bfloat16, 0.1)):
        mixed = train(Case(way), dtype, flat=True)
        pairs = [
            (mixed["weights"][k], w) for k, w in plain["weights"].items() if w.is_floating_point()
        ]
        off = torch.cat([(a - b).flatten() for a, b in pairs]).norm()
        assert off <= tolerance * torch.cat([b.flatten() for _, b in pairs]).norm()


def test_learning_is_learning():
    """fp16 with flat masters learns what fp32 learns."""
    losses = {}
    for precision in PRECISIONS:
        learn = PRECISIONS[precision](make_learner("adam", dls=picture_dls(64)))
        learn.fit_one_cycle(6, 0.05)
        losses[precision] = learn.validate()[0]
        assert losses[precision] < 0.4, losses
    assert max(losses.values()) - min(losses.values()) < 0.1


def test_a_mode_that_others_entered_is_left_alone():
    """A learner works within somebody's own torch function mode, which is still theirs after."""
    from torch.overrides import TorchFunctionMode

    class Mine(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    learn = make_learner().to_fp16()
    with Mine():
        learn.fit(1)
        assert torch.overrides._len_torch_function_stack() == 1
    assert torch.overrides._len_torch_function_stack() == 0


def test_a_forward_of_the_users_own_is_kept():
    learn = make_learner()
    calls = []
    inner = learn.model.forward

    def mine(x):
        calls.append(x.dtype)
        return inner(x)

    learn.model.forward = mine
    learn.to_fp16().fit(1)
    assert set(calls) == {torch.float16}
    learn.to_fp32()
    assert learn.model.forward is mine


def test_groups_that_leave_parameters_out():
    """What no group of the optimizer holds is not trained, and comes back as it was."""

    def split(model):
        return [list(model[4:].parameters())]

    runs = []
    for mixed in (None, {"flat_master": True, "dtype": torch.float32}, {"flat_master": True}):
        learn = make_learner("adam", splitter=split)
        first = weights(learn)["0.weight"]
        if mixed:
            learn.to_fp16(**mixed)
        learn.fit(2)
        learn.to_fp32()
        assert_same(learn.model[0].weight.detach(), first)
        runs.append(snapshot(learn))
    assert_same(runs[1], runs[0])


def test_a_search_for_a_rate_ends_where_no_scale_helps():
    """Losses are finite, gradients are not: that is its answer, and it gives the weights back."""
    learn = make_learner().to_fp16(max_skips=2)
    before = weights(learn)
    poison = Do("after_backward", lambda learn: spoil(learn) if learn.train_iter >= 3 else None)
    learn.add_cb(poison)
    learn.lr_find(num_it=20, show_plot=False, suggest_funcs=None)
    assert len(learn.recorder.lrs) < 20
    assert_same(weights(learn), before)


def spoil(learn):
    for p in learn.model.parameters():
        p.grad.fill_(torch.inf)
