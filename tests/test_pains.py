"""What users of mixed precision suffer from elsewhere, and must not here: one test a number.

The numbers are those of the list of public issues that this library was planned by. Each docstring
says what fastai's own ways do: `to_fp16` (autocast, for CUDA) and `to_non_native_fp16` (masters).
"""

import logging
import warnings
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import inside
import pytest
import torch
import torch.nn.functional as F
from fastai.callback.core import (
    Callback,
    CancelBatchException,
    CancelFitException,
    CancelStepException,
)
from fastai.callback.rnn import rnn_cbs
from fastai.callback.training import GradientAccumulation
from fastai.interpret import ClassificationInterpretation
from fastai.learner import load_learner
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
from fastai.text.models.core import get_language_model
from fastai.torch_core import TensorBase, TensorImage
from tiny import (
    Do,
    bits,
    conv_net,
    make_dls,
    make_learner,
    weights,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mixedfp.examples import photos
from mixedfp.formats import MixedPrecisionError
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

FLAT = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])


@pytest.fixture
def told(caplog):
    """Return the notices that the library gave in this test."""
    inside.forget_notices()
    caplog.set_level(logging.WARNING, logger="mixedfp")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "mixedfp"]


@FLAT
@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16], ids=str)
def test_pain_01_half_model(to, flat):
    """fastai: "Attempting to unscale FP16 gradients". Here trainable half weights get masters."""
    model = conv_net().half()
    model[1].float()
    model[4].requires_grad_(False)
    learn = make_learner(model=model).to_fp16(dtype=to, flat_master=flat)
    assert {m.dtype for ms in learn.mp_cb.master_params for m in ms} == {torch.float32}
    trained = {p for ps in learn.mp_cb.model_params for p in ps}
    assert trained == {p for p in model.parameters() if p.requires_grad}
    before = weights(learn)
    learn.fit(1, 0.01)
    moved = {k for k, v in weights(learn).items() if not torch.equal(v, before[k])}
    assert {"0.weight", "10.weight"} < moved and not {"4.weight", "4.bias"} & moved
    off = weights(learn)["0.weight"] - learn.model[0].weight.float()
    assert off.abs().max() > 0  # the masters hold more than the halves do


def test_pain_01_plain_scaler_takes_half_gradients():
    """torch: ValueError. `LossScaler` unscales float16 gradients, or says what is wrong."""
    p = nn.Parameter(torch.ones(2, dtype=torch.float16))
    opt = torch.optim.SGD([p], lr=1.0)
    scaler = LossScaler(init_scale=4.0)
    scaler.scale(p.float().sum()).backward()
    try:
        scaler.unscale_(opt)
    except ValueError as e:
        assert "FP16" in str(e)
    else:
        assert_same(p.grad, torch.ones(2, dtype=torch.float16))


@FLAT
def test_pain_02_bfloat16_gradients(flat):
    """torch: a scaler fails on bfloat16 gradients. Here they are float32 by then."""
    model = conv_net()
    model[4].bfloat16()  # one layer in bfloat16, one in double, the rest in 32
    learn = make_learner(model=model).to_fp16(flat_master=flat)
    learn.fit(1, 0.01)
    assert learn.mp_cb.n_skipped == 0 and learn.mp_cb.scales == [512.0] * 4
    learn.to_bf16(flat).fit(1, 0.01)
    seen = []
    look = Do(
        "before_step", lambda learn: seen.extend(p.grad.dtype for p in learn.model.parameters())
    )
    learn.fit(1, 0.01, cbs=look)
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
def test_pain_02_one_optimizer_of_many_types(value):
    """fp32, fp64, bf16 and sparse gradients in one optimizer are unscaled and checked."""
    ps = [
        nn.Parameter(torch.ones(2, dtype=t)) for t in (torch.float32, torch.float64, torch.bfloat16)
    ]
    table = nn.Parameter(torch.ones(3, 2))
    opt = torch.optim.SGD([*ps, table], lr=0.5)
    for bad in range(4):
        scaler = LossScaler(init_scale=4.0)
        loss = (
            sum(p.float().sum() for p in ps)
            + F.embedding(torch.tensor([0, 0]), table, sparse=True).sum()
        )
        scaler.scale(loss).backward()
        if value != 1.0:
            grad = [*ps, table][bad].grad
            (grad._values() if grad.is_sparse else grad).view(-1)[0] = value
        scaler.unscale_(opt)
        if value == 1.0:
            assert_same([p.grad for p in ps], [torch.ones_like(p) for p in ps])
            assert_same(table.grad.to_dense(), torch.tensor([[2.0, 2.0], [0, 0], [0, 0]]))
        assert scaler.found_nonfinite(opt) == (value != 1.0)
        before = [p.detach().clone() for p in (*ps, table)]
        scaler.step(opt)
        scaler.update()
        assert torch.equal(before[0], ps[0]) == (value != 1.0)
        assert scaler.get_scale() == (4.0 if value == 1.0 else 2.0)
        opt.zero_grad()


def plain_loop(scaler):
    """Return a parameter, its optimizer, and what calls backward with a gradient of 1."""
    p = nn.Parameter(torch.ones(2))
    return p, torch.optim.SGD([p], lr=0.5), lambda: scaler.scale(p.sum()).backward()


def test_pain_07_unscaling_twice():
    """torch: "unscale_() has already been called". Here the second one changes no bit."""
    scaler = LossScaler(init_scale=4.0)
    p, opt, backward = plain_loop(scaler)
    for i in range(3):
        opt.zero_grad()
        backward()
        for _ in range(3):
            scaler.unscale_(opt)
            assert_same(p.grad, torch.ones(2))
        scaler.step(opt)
        scaler.update()
        assert_same(p.detach(), torch.full((2,), 1 - 0.5 * (i + 1)))


def test_pain_07_a_scaler_without_a_step_is_usable():
    """An iteration that ends with `update` alone, as after a nan in the user's own metric."""
    scaler = LossScaler(init_scale=4.0)
    p, opt, backward = plain_loop(scaler)
    for is_stepping in (False, True, False, True):
        opt.zero_grad()
        backward()
        scaler.unscale_(opt)
        if is_stepping:
            scaler.step(opt)
        scaler.update()
    assert_same(p.detach(), torch.zeros(2))
    assert scaler.n_skipped == 0 and scaler.get_scale() == 4.0


def test_pain_07_unscaling_each_micro_batch():
    """Unscaling before all is added up would mix scaled and unscaled gradients.

    torch says so with an error. Whatever is done here, a wrong gradient is never stepped on.
    """
    scaler = LossScaler(init_scale=4.0)
    p, opt, backward = plain_loop(scaler)
    try:
        for _ in range(2):
            backward()
            scaler.unscale_(opt)
        scaler.step(opt)
    except (RuntimeError, MixedPrecisionError) as e:
        assert "unscale_" in str(e)
        assert_same(p.detach(), torch.ones(2))
    else:
        assert_same(p.detach(), torch.zeros(2))  # 1 - 0.5 * (1 + 1)


@FLAT
@pytest.mark.parametrize("order", [5, 60], ids=["before_ours", "after_ours"])
def test_pain_07_a_step_called_off(order, flat):
    """A step called off from a callback, then accumulation: the scaler unscales as ever."""

    def off(_):
        raise CancelStepException

    learn, norms = make_learner().to_fp16(flat_master=flat), []

    def note(learn):
        norms.append(max(p.grad.abs().max().item() for p in learn.model.parameters()))

    cbs = [Do("before_step", note, order=61), Do("before_step", off, at=1, order=order)]
    learn.fit(1, 0.01, cbs=cbs)
    learn.fit(1, 0.01, cbs=[cbs[0], GradientAccumulation(16)])
    assert len(norms) == (3 if order == 5 else 3) + 2
    assert all(0 < n < 1 for n in norms), "a gradient that is still scaled is a hundred times that"
    assert learn.mp_cb.n_skipped == 0 and learn.mp_cb.loss_scale == 512.0


def overflowing(at):
    def overflow(learn):
        learn.xb = (torch.full_like(learn.xb[0], float("inf")),)

    return Do("before_batch", overflow, at=at, order=0)


@FLAT
@pytest.mark.parametrize("opt", ["adam", "torch_adamw"])
@pytest.mark.filterwarnings("error:.*lr_scheduler.*:UserWarning")
def test_pain_08_the_schedule_goes_by_batches(opt, flat):
    """fastai's schedules go by batches: over a skipped step as over any other, and no warning.

    A user is told of it: by `skipped`, the numbers of the skipped steps, and `n_skipped`. fastai's
    own has the last step's `skipped` alone.
    """
    rates, moms = {}, {}
    for at in (None, 0):
        learn = make_learner(opt).to_fp16(flat_master=flat)
        note = rates[at] = []
        mom = moms[at] = []

        def look(learn, note=note, mom=mom):
            note.append(learn.opt.hypers[-1]["lr"])
            mom.append(learn.opt.hypers[-1]["mom"])

        cbs = [] if at is None else [overflowing(at)]
        learn.fit_one_cycle(2, 0.01, cbs=[Do("before_step", look, order=0), *cbs])
        assert learn.mp_cb.n_skipped == len(learn.mp_cb.skipped) == len(cbs)
        assert learn.mp_cb.skipped == [0] * len(cbs)
        assert len(learn.mp_cb.scales) == 8
    assert len(set(rates[None])) == 8
    assert rates[0] == rates[None] and moms[0] == moms[None]


@FLAT
def test_pain_08_a_scheduler_of_torch(flat):
    """torch warns "`lr_scheduler.step()` before `optimizer.step()`" when the first step is skipped.

    A user who wants a schedule that goes by steps asks `n_skipped`, and no warning comes.
    """
    learn = make_learner("torch_adamw").to_fp16(flat_master=flat)
    learn.create_opt()
    schedule = torch.optim.lr_scheduler.StepLR(learn.opt.opt.opt, 1, gamma=0.5)
    seen, asked = [], []

    def follow(learn):
        if learn.mp_cb.n_skipped == len(asked):
            schedule.step()
        else:
            asked.append(learn.iter)
        seen.append(learn.opt.hypers[-1]["lr"])

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*")
        learn.fit(1, 0.01, cbs=[overflowing(0), Do("after_step", follow)])
    assert asked == [0] and seen == [0.01, 0.005, 0.0025, 0.00125]


@FLAT
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "constant"])
def test_pain_12_scale_collapses(dynamic, flat):
    """D11, X1: no floor, the scale becomes 0 and the next healthy batch makes the weights nan."""
    learn = make_learner().to_fp16(flat_master=flat, max_skips=15, dynamic=dynamic)
    learn.create_opt()
    before = bits(learn)

    def overflow(learn):
        learn.xb = (torch.full_like(learn.xb[0], float("nan")),)

    with pytest.raises(MixedPrecisionError, match="15 steps in a row.*0.weight.*bfloat16"):
        learn.fit(5, cbs=Do("before_batch", overflow, order=0))
    assert_same(bits(learn), before)
    assert learn.mp_cb.scales[-1] == (1.0 if dynamic else 512.0)
    learn.fit(1, 0.01)
    assert all(v.isfinite().all() for v in weights(learn).values())
    assert learn.mp_cb.n_skipped == 15


def test_pain_15_large_inputs(told):
    """D11: each step is skipped without a word. Here one warning names the column and the cure."""
    x, y = torch.randn(40, 8), torch.arange(40) % 2
    x[:, 3] *= 1e6
    learn = make_learner(model=lambda: nn.Sequential(nn.Linear(8, 2)), dls=make_dls(x, y))
    learn.to_fp16(max_skips=100).fit(2)
    (message,) = [m for m in told() if "beyond" in m]
    assert "column(s) [3]" in message and "to_bf16()" in message and "normalize" in message
    before = weights(learn)
    learn.to_bf16().fit(1, 1e-6)
    assert not torch.equal(weights(learn)["0.weight"], before["0.weight"])
    assert torch.tensor(learn.recorder.losses).isfinite().all()


def test_pain_15_the_loss_is_computed_in_32_bits():
    """fastai's autocast casts some losses; here every loss function sees float32 predictions."""
    seen = set()

    def loss(pred, y):
        seen.add(pred.dtype)
        return (F.cross_entropy(pred, y, reduction="none") + 1e5).mean()  # inf in float16

    learn = make_learner(loss_func=loss).to_fp16()
    learn.fit(1, 0.01)
    assert seen == {torch.float32} and learn.mp_cb.n_skipped == 0
    assert torch.tensor(learn.recorder.losses).isfinite().all()


class Masked(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.first, self.second, self.value = nn.Linear(108, 4), nn.Linear(4, 2), value

    def forward(self, x):
        x = self.first(x.flatten(1))
        return self.second(
            x.masked_fill(torch.tensor([True, False, False, True]), self.value).softmax(-1)
        )


@pytest.mark.parametrize("value", [-1e9, -1e10, float("-inf"), -1e4])
def test_pain_16_masks(value):
    """torch: "value cannot be converted to type at::Half without overflow", no word of where."""
    learn = make_learner(model=lambda: Masked(value)).to_fp16()
    if value in (-1e9, -1e10):
        with pytest.raises(
            MixedPrecisionError, match=r"the model \(Masked\).*finfo\(x\.dtype\)\.min"
        ):
            learn.fit(1)
        learn.to_bf16()
    learn.fit(1)
    assert torch.tensor(learn.recorder.losses).isfinite().all()


Pair = namedtuple("Pair", "logits hidden note")


@dataclass
class Output:
    logits: torch.Tensor
    hidden: None = None
    note: str = "text"


class ModelOutput(OrderedDict):
    """What the libraries of transformers return: a dict with attributes."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Wrapping(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.net, self.wrap = conv_net(), wrap

    def forward(self, x):
        return self.wrap(self.net(x), None, "text")


def model_output(logits, hidden, note):
    return ModelOutput(logits=logits, hidden=hidden, note=note)


@pytest.mark.parametrize("wrap", [Pair, Output, model_output])
def test_pain_17_outputs(wrap):
    """N8: outputs are rebuilt: a ModelOutput becomes a dict; a namedtuple, None, a str crash."""
    seen = []

    def loss(pred, y):
        seen.append(pred)
        return F.cross_entropy(pred.logits, y)

    make_learner(model=lambda: Wrapping(wrap), loss_func=loss).to_fp16().fit(1)
    for pred in seen:
        assert type(pred) is type(wrap(torch.zeros(1), None, ""))
        assert pred.logits.dtype == torch.float32 and pred.hidden is None and pred.note == "text"


def test_pain_18_integers():
    """fastai's older `to_fp16` halves every input, and the targets too."""
    seen = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.lin = nn.Embedding(3000, 2), nn.Linear(4, 1)

        def forward(self, ids, mask, x):
            if self.training:
                seen.append((ids, mask, x))
            return self.lin(torch.cat([self.emb(ids) * mask[:, None], x], -1))

    g = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(2048, 3000, (40,), generator=g), torch.arange(40) % 2 == 0
    x, y = torch.randn(40, 2, generator=g), torch.randn(40, 1, generator=g) * 1e5
    targets = []

    def loss(pred, y):
        targets.append(y)
        return F.l1_loss(pred, y)

    dls = make_dls(ids, mask, x, y, n_inp=3)
    make_learner(model=Model, dls=dls, loss_func=loss).to_fp16(1.0).fit(1, 0.0)
    assert_same(torch.cat([b[0] for b in seen]), ids[:32])  # 2049 is none of float16's numbers
    assert_same(torch.cat([b[1] for b in seen]), mask[:32])
    assert_same(torch.cat([b[2] for b in seen]), x[:32].half())
    assert_same(torch.cat(targets[:4]), y[:32])


PRECISIONS = {
    "fp16": lambda learn: learn.to_fp16(),
    "fp16_flat": lambda learn: learn.to_fp16(flat_master=True),
    "bf16": lambda learn: learn.to_bf16(),
    "bf16_flat": lambda learn: learn.to_bf16(flat_master=True),
}
ALL_WAYS = pytest.mark.parametrize("precision", PRECISIONS)


def photo_learner(path):
    """Return a learner of photos, whose data know how to show and decode themselves."""
    dls = photos(n_train=16, n_valid=8, bs=8, device="cpu")
    return make_learner(dls=dls, path=path)


def all_that_predicts(learn):
    """Return what all that predicts gives: a dictionary of predictions."""
    import matplotlib.pyplot as plt

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fastai and matplotlib
        interp = ClassificationInterpretation.from_learner(learn)
        interp.plot_top_losses(2)
        counts = torch.from_numpy(interp.confusion_matrix()).float()
        learn.show_results(max_n=2)
        plt.close("all")
        found = dict(get_preds=learn.get_preds()[0], tta=learn.tta(n=1)[0])
    return found | dict(losses=interp.losses, counts=counts)


@ALL_WAYS
def test_pain_19_predicting_changes_nothing(precision, tmp_path):
    """D4: with fastai's masters each of these rounds the weights to halves.

    All run, give 32 bits that are near those of the 32-bit model, and leave every bit.
    """
    learn = PRECISIONS[precision](photo_learner(tmp_path))
    learn.fit(1, 0.01)
    before = bits(learn)
    found = all_that_predicts(learn)
    assert_same(bits(learn), before)
    expected = all_that_predicts(learn.to_fp32())
    for k, preds in found.items():
        assert preds.dtype == torch.float32, k
        torch.testing.assert_close(preds, expected[k], rtol=0.02, atol=0.01, msg=k)


@ALL_WAYS
def test_pain_20_export(precision, tmp_path):
    """The file holds 32-bit weights on no special device, and predicts as the learner did.

    An older fastai exported halves, which a CPU could not predict with. (Its autocast today has
    32-bit weights anyway.)
    """
    learn = PRECISIONS[precision](photo_learner(tmp_path))
    learn.fit(1, 0.01)
    rounded, full = learn.get_preds()[0], weights(learn)
    learn.export("learn.pkl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fastai's, of pickles from strangers
        loaded = load_learner(tmp_path / "learn.pkl", cpu=True)
    assert_same(weights(loaded), full)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert {p.device.type for p in loaded.model.parameters()} == {"cpu"}
    with loaded.no_bar(), loaded.no_logging():
        found = loaded.get_preds(dl=learn.dls.valid)[0]
    torch.testing.assert_close(found, rounded, rtol=0.02, atol=0.01)
    assert_same(found, learn.to_fp32().get_preds()[0])


@FLAT
@pytest.mark.parametrize("to, dtype", [("to_fp16", torch.float16), ("to_bf16", torch.bfloat16)])
def test_pain_27_a_cpu_is_a_device(to, dtype, flat):
    """N1: off CUDA fastai's `to_fp16` and `to_bf16` train in float32 and say nothing."""
    learn, seen = make_learner(), set()
    getattr(learn, to)(flat_master=flat)
    hooks = [
        m.register_forward_hook(lambda m, i, o: seen.add(o.dtype)) for m in learn.model.children()
    ]
    learn.fit(1)
    learn.get_preds()
    for hook in hooks:
        hook.remove()
    assert seen == {dtype} and learn.model[0].weight.dtype == dtype
    device = inside.scaler_device(learn.mp_cb.mixed.scaler)
    assert device == "cpu" or torch.accelerator.is_available()
    plain = make_learner()
    plain.fit(1)
    assert not torch.equal(weights(plain)["0.weight"], weights(learn)["0.weight"])


@pytest.mark.parametrize(
    "error", [CancelBatchException, CancelFitException, KeyboardInterrupt, ValueError]
)
@pytest.mark.parametrize("at", ["before_batch", "after_pred", "after_loss", "before_step"])
def test_pain_30_nothing_stays_entered(at, error):
    """N4: autocast is entered in `before_batch` and left in `after_loss`, or never."""

    def stop(_):
        raise error("stop")

    learn = make_learner().to_fp16()
    try:
        learn.fit(1, cbs=Do(at, stop, at=1))
    except (KeyboardInterrupt, ValueError):
        assert error in (KeyboardInterrupt, ValueError)
    assert torch.overrides._len_torch_function_stack() == 0
    assert not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
    half = torch.ones(2, 2, dtype=torch.float16)
    assert torch.mm(half * 200, half * 200).isinf().any() == (2 * 200 * 200 > 65504)


def test_pain_30_backward_runs_outside():
    """The loss and backward are outside of what computes fp16: no mode is on in `after_pred`."""
    lengths = set()
    events = (
        "after_pred",
        "after_loss",
        "before_backward",
        "after_backward",
        "before_step",
        "after_step",
    )

    def look(_):
        lengths.add(torch.overrides._len_torch_function_stack())

    make_learner().to_fp16().fit(
        1, cbs=[Do(event, look, order=o) for event in events for o in (5, 60)]
    )
    assert lengths == {0}


class Packed(nn.Module):
    """An LSTM over sequences of different lengths, and what comes of their ends."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = x.flatten(2).transpose(1, 2)  # (batch, steps, channels)
        lengths = torch.arange(len(x), 0, -1) + 4
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(out[torch.arange(len(x)), lengths - 1])


@ALL_WAYS
@pytest.mark.filterwarnings("error:.*contiguous.*")
def test_pain_33_packed_sequences(precision):
    """Elsewhere: "weights are not part of single contiguous chunk of memory". Where it is said,
    on CUDA, cannot be seen here; the weights are trained as in 32 bits."""
    ends = []
    for to in (PRECISIONS[precision], lambda learn: learn):
        learn = make_learner(model=Packed)
        start = weights(learn)
        to(learn).fit(2, 0.05)
        ends.append(torch.cat([(v - start[k]).flatten() for k, v in weights(learn).items()]))
        assert learn.model.lstm.weight_hh_l0.dtype == (
            torch.float32 if len(ends) == 2 else learn.mp_cb.mixed.dtype
        )
    assert (ends[0] - ends[1]).norm() < 0.05 * ends[1].norm()


@ALL_WAYS
@pytest.mark.filterwarnings("error:.*contiguous.*")
def test_pain_33_awd_lstm(precision):
    """A language model with tied weights, dropout of weights and hidden states between batches."""
    config = dict(awd_lstm_lm_config, emb_sz=6, n_hid=8, n_layers=2)
    ids = torch.randint(0, 20, (40, 6), generator=torch.Generator().manual_seed(0))
    ends = []
    for to in (PRECISIONS[precision], lambda learn: learn):
        learn = make_learner(
            model=lambda: get_language_model(AWD_LSTM, 20, config, drop_mult=0.3),
            dls=make_dls(ids, ids.roll(1, 1)),
            cbs=rnn_cbs(alpha=2.0, beta=1.0),
        )
        start = weights(learn)
        torch.manual_seed(0)
        to(learn).fit(1, 0.1)
        tied = learn.model[1].decoder.weight is learn.model[0].encoder.weight
        assert tied and all(v.isfinite().all() for v in weights(learn).values())
        ends.append(torch.cat([(v - start[k]).flatten() for k, v in weights(learn).items()]))
    assert (ends[0] - ends[1]).norm() < 0.05 * ends[1].norm()


def test_pain_34_tensor_subclasses():
    """fastai#3438: a TensorImage under autocast, a TensorBase loss in the scaler: TypeError."""
    types = {}
    for mixed in (False, True):
        learn = make_learner(loss_func=based).to_fp16() if mixed else make_learner(loss_func=based)
        seen = types.setdefault(mixed, [])

        def picture(learn):
            learn.xb = tuple(map(TensorImage, learn.xb))

        def look(learn, seen=seen):
            seen.append(tuple(map(type, (*learn.xb, learn.pred, learn.loss, learn.loss_grad))))
            assert learn.pred.dtype == learn.loss.dtype == torch.float32

        as_picture = Do("before_batch", picture, order=9.5)  # after fastai's CastToTensor
        learn.fit(1, cbs=[as_picture, Do("after_backward", look)])
    assert types[True] == types[False]
    assert types[True][0][0] is TensorImage and issubclass(types[True][0][-1], TensorBase)
    assert learn.mp_cb.n_skipped == 0


def based(pred, y):
    return TensorBase(F.cross_entropy(pred, y))


def test_pain_37_settings():
    """N3: `enabled=False` is overwritten; elsewhere the scaler's settings cannot be reached."""
    learn = make_learner().to_fp16(
        init_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=1, max_scale=64.0
    )
    learn.fit(1, 0.01)
    assert learn.mp_cb.scales == [8.0, 32.0, 64.0, 64.0]
    off = make_learner().to_fp16(enabled=False)
    off.fit(1, 0.01)
    assert off.mp_cb.loss_scale == 1.0 and off.mp_cb.n_skipped == 0


@FLAT
def test_pain_37_the_default_start_wastes_no_steps(flat):
    """A first scale of 2**16 and more costs the first steps; at most 2 may go, here none."""
    learn = make_learner().to_fp16(flat_master=flat)
    learn.fit(2)
    assert learn.mp_cb.n_skipped == 0


class Ema(Callback):
    """A user's moving average of the weights, which asks whether the step was skipped."""

    order = 70

    def before_fit(self):
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.n_skipped, self.states = 0, []

    def after_step(self):
        if self.learn.mp_cb.n_skipped == self.n_skipped:
            self.average.update_parameters(self.model)
        self.n_skipped = self.learn.mp_cb.n_skipped
        self.states.append({k: v.clone() for k, v in self.average.state_dict().items()})


@FLAT
@pytest.mark.parametrize("opt", ["adam", "ranger", "torch_adamw"])
def test_pain_39_a_skipped_step_moves_nothing(opt, flat):
    """Weights, moments, step counts, weight decay, a moving average: all as before, bit for bit.

    Elsewhere the moments decay, or the decay is applied. fastai's own steps are skipped whole as
    well; but `after_step` comes after a skipped step too, so that an average has to ask.
    """
    learn, seen = make_learner(opt).to_fp16(flat_master=flat), []
    ema = Ema()

    def look(learn):
        seen.append(bits(learn))

    looks = [Do(event, look, at=2, order=-100) for event in ("before_batch", "after_batch")]
    learn.fit(1, 0.01, wd=0.5, cbs=[overflowing(2), ema, *looks])
    assert learn.mp_cb.skipped == [2]
    assert_same(seen[1], seen[0])
    assert_same(ema.states[2], ema.states[1])
    for before, after in ((0, 1), (2, 3)):  # and it does move otherwise
        with pytest.raises(AssertionError):
            assert_same(ema.states[after], ema.states[before])


@FLAT
def test_pain_39_hooks_of_the_optimizer_are_not_called(flat):
    """What hangs on the optimizer itself hears of the steps that are taken, and of no other."""
    learn, calls = make_learner("torch_adamw").to_fp16(flat_master=flat), []
    learn.create_opt()
    learn.opt.opt.opt.register_step_post_hook(lambda *_: calls.append(learn.iter))
    learn.fit(1, 0.01, cbs=overflowing(2))
    assert calls == [0, 1, 3]
