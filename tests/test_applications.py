"""Every fastai application, small and real, in 16 bits: fastai's own calls from data to file.

The laws at the top hold for each application; what only one of them has comes after.
"""

import copy
import random
import warnings
from dataclasses import dataclass
from functools import cache, partial
from io import BytesIO
from tempfile import TemporaryDirectory
from typing import NamedTuple

import inside
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from fastai.collab import CollabDataLoaders, collab_learner
from fastai.data.all import (
    CategoryBlock,
    ColReader,
    DataBlock,
    RandomSplitter,
    RegressionBlock,
)
from fastai.data.transforms import Normalize as ImageNormalize
from fastai.interpret import ClassificationInterpretation
from fastai.learner import Learner, load_learner
from fastai.losses import CrossEntropyLossFlat, L1LossFlat
from fastai.metrics import DiceMulti, Perplexity, accuracy
from fastai.optimizer import Adam
from fastai.tabular.all import (
    Categorify,
    Normalize,
    TabularDataLoaders,
    tabular_config,
    tabular_learner,
)
from fastai.text.all import (
    AWD_LSTM,
    BaseTokenizer,
    TextBlock,
    awd_lstm_clas_config,
    awd_lstm_lm_config,
    language_model_learner,
    text_classifier_learner,
)
from fastai.vision.all import (
    ImageDataLoaders,
    SegmentationDataLoaders,
    imagenet_stats,
    unet_learner,
    vision_learner,
)
from fastai.vision.gan import GANLearner
from PIL import Image
from tiny import Do, bits, make_dls, make_learner, masters, opt_state, plain, silent, weights
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torchvision.models import resnet18

from mixedfp.callback import MixedPrecision
from mixedfp.formats import MixedPrecisionError
from mixedfp.testing import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def seed(n=0):
    """Start all random numbers anew."""
    random.seed(n)
    np.random.seed(n)
    torch.manual_seed(n)


# Data: made by numbers, written to files where fastai reads files


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with pictures of two classes, bright left or right, and a mask of each."""
    path = tmp_path_factory.mktemp("applications")
    (path / "images").mkdir()
    (path / "labels").mkdir()
    rng = np.random.default_rng(0)
    for i in range(24):
        bright = np.arange(32) // 16 == i % 2
        picture = rng.integers(0, 128, (32, 32, 3)) + 100 * bright[:, None]
        mask = np.broadcast_to(bright, (32, 32))
        name = f"{'ab'[i % 2]}_{i}.png"
        Image.fromarray(picture.astype(np.uint8)).save(path / "images" / name)
        Image.fromarray(mask.astype(np.uint8)).save(path / "labels" / name)
    return path


def pictures_in(root):
    return sorted((root / "images").iterdir(), key=lambda f: int(f.stem[2:]))


def first_letter(name):
    return name[0]


def mask_of(file):
    return file.parent.parent / "labels" / file.name


def texts():
    """Return texts of two kinds, with their kind."""
    rng = np.random.default_rng(0)
    words = "good great fine nice bad poor awful dull the a film plot".split()
    rows = []
    for i in range(48):
        own = words[:4] if i % 2 else words[4:8]
        n = rng.integers(6, 18)
        rows.append((" ".join(rng.choice(own + words[8:], n)), "np"[i % 2]))
    return pd.DataFrame(rows, columns=["text", "label"])


def people():
    """Return a table with words and numbers, and two things to predict."""
    rng = np.random.default_rng(0)
    n = 40
    job, age = rng.choice(["clerk", "cook", "smith"], n), rng.normal(40, 12, n).round()
    pay = 30 + age / 2 + 4 * (job == "smith") + rng.normal(0, 0.5, n)  # in thousands
    is_rich = np.where(pay > 52, "yes", "no")
    return pd.DataFrame(dict(job=job, age=age, weight=rng.normal(70, 9, n), pay=pay, rich=is_rich))


def ratings():
    """Return who gave what how many stars."""
    rng = np.random.default_rng(0)
    user, film = rng.integers(0, 6, 60), rng.integers(0, 8, 60)
    stars = (1 + 4 * ((user + film) % 2) * 0.8 + rng.random(60) * 0.5).astype(np.float32)
    return pd.DataFrame(dict(user=user, film=film, stars=stars))


# The applications: each makes a learner, its data and its model, by fastai's own calls

ON_CPU = dict(num_workers=0, device="cpu")


def vision(root):
    dls = ImageDataLoaders.from_name_func(
        root,
        pictures_in(root),
        first_letter,
        valid_pct=0.34,
        seed=1,
        bs=8,
        batch_tfms=ImageNormalize.from_stats(*imagenet_stats, cuda=False),
        **ON_CPU,
    )
    return vision_learner(dls, resnet18, pretrained=False, cut=6, ps=0.2, metrics=accuracy)


def vision_cut(root):
    """A body cut short, a head of the user's sizes, and a regression with a range."""
    dls = ImageDataLoaders.from_lists(
        root,
        pictures_in(root),
        [float(i % 2) for i in range(24)],
        valid_pct=0.34,
        seed=1,
        bs=8,
        y_block=RegressionBlock(),
        **ON_CPU,
    )
    return vision_learner(
        dls, resnet18, pretrained=False, cut=5, lin_ftrs=[16], y_range=(-0.5, 1.5), n_out=1
    )


def unet(root):
    dls = SegmentationDataLoaders.from_label_func(
        root,
        pictures_in(root)[:6],
        mask_of,
        valid_pct=0.34,
        seed=1,
        bs=2,
        codes=["l", "r"],
        **ON_CPU,
    )
    return unet_learner(
        dls, resnet18, pretrained=False, cut=7, self_attention=True, metrics=DiceMulti()
    )


def text_dls(is_lm):
    words = TextBlock.from_df(
        "text", is_lm=is_lm, seq_len=8, min_freq=1, tok=BaseTokenizer(), n_workers=0
    )
    split = RandomSplitter(0.34, seed=1)
    if is_lm:
        block = DataBlock(words, get_x=ColReader("text"), splitter=split)
    else:
        block = DataBlock(
            (words, CategoryBlock),
            get_x=ColReader("text"),
            get_y=ColReader("label"),
            splitter=split,
        )
    return block.dataloaders(texts(), bs=8, seq_len=8, **ON_CPU)


SMALL = dict(emb_sz=12, n_hid=16, n_layers=2)


def text(_):
    config = awd_lstm_clas_config | SMALL
    return text_classifier_learner(
        text_dls(False), AWD_LSTM, seq_len=8, config=config, pretrained=False, metrics=accuracy
    )


def language_model(_):
    config = awd_lstm_lm_config | SMALL
    return language_model_learner(
        text_dls(True), AWD_LSTM, config=config, pretrained=False, metrics=[accuracy, Perplexity()]
    )


def table_dls(y, **kwargs):
    return TabularDataLoaders.from_df(
        people(),
        procs=[Categorify, Normalize],
        cat_names=["job"],
        cont_names=["age", "weight"],
        y_names=y,
        valid_idx=list(range(30, 40)),
        bs=10,
        **kwargs,
        **ON_CPU,
    )


def tabular(_):
    config = tabular_config(ps=0.1, embed_p=0.1)
    dls = table_dls("rich", y_block=CategoryBlock())
    return tabular_learner(dls, layers=[16, 8], config=config, metrics=accuracy)


def tabular_regression(_):
    return tabular_learner(
        table_dls("pay"), layers=[16], y_range=(20, 90), n_out=1, loss_func=L1LossFlat()
    )


def collab(_):
    dls = CollabDataLoaders.from_df(ratings(), valid_pct=0.3, seed=1, bs=16, **ON_CPU)
    return collab_learner(dls, n_factors=8, y_range=(0, 5.5))


def collab_nn(_):
    dls = CollabDataLoaders.from_df(ratings(), valid_pct=0.3, seed=1, bs=16, **ON_CPU)
    return collab_learner(dls, use_nn=True, layers=[16, 8], y_range=(0, 5.5))


# Models of the user's own


class TwoInputs(nn.Module):
    """Numbers and tokens."""

    def __init__(self):
        super().__init__()
        self.emb, self.body, self.head = nn.Embedding(5, 4), nn.Linear(6, 4), nn.Linear(8, 2)

    def forward(self, x, tokens):
        return self.head(torch.cat([F.relu(self.body(x)), self.emb(tokens).mean(1)], 1))


@dataclass
class Output:
    """What a model says, as libraries of transformers have it."""

    logits: torch.Tensor
    size: torch.Tensor
    note: str | None = None


class TwoHeads(nn.Module):
    """A class and a number, returned together in one of several ways."""

    def __init__(self, wrap):
        super().__init__()
        self.body, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.which, self.size, self.wrap = nn.Linear(8, 2), nn.Linear(8, 1), wrap

    def forward(self, x):
        x = F.gelu(self.norm(self.body(x)))
        return self.wrap(self.which(x), self.size(x)[:, 0])


def as_tuple(logits, size):
    return logits, size


def as_dict(logits, size):
    return dict(logits=logits, size=size)


def both_losses(pred, which, size):
    if isinstance(pred, dict):
        pred = pred["logits"], pred["size"]
    elif isinstance(pred, Output):
        pred = pred.logits, pred.size
    assert {o.dtype for o in pred} == {torch.float32}
    return F.cross_entropy(pred[0], which) + F.mse_loss(pred[1], size)


class Masked(nn.Module):
    """Attention that does not look where a bool mask says so."""

    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(5, 8), nn.Linear(8, 2)
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, tokens, is_padding):
        assert is_padding.dtype == torch.bool
        h = self.body(self.emb(tokens), src_key_padding_mask=is_padding)
        return self.head(h.masked_fill(is_padding[..., None], 0).sum(1))


class Packed(nn.Module):
    """A recurrent net that gets its sequences packed, each at its own length."""

    def __init__(self, rnn=nn.LSTM):
        super().__init__()
        self.emb, self.head = nn.Embedding(5, 8), nn.Linear(16, 2)
        self.rnn = rnn(8, 8, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)

    def forward(self, tokens, is_padding):
        n = (~is_padding).sum(1).cpu()
        packed = pack_padded_sequence(self.emb(tokens), n, batch_first=True, enforce_sorted=False)
        h, lengths = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        assert lengths.equal(n)
        return self.head(h.sum(1))


def rows(n=40):
    """Return numbers, tokens, where the tokens are padding, a class and a size."""
    g = torch.Generator().manual_seed(0)
    x, tokens = torch.randn(n, 6, generator=g), torch.randint(0, 5, (n, 7), generator=g)
    is_padding = torch.arange(7) >= torch.randint(2, 8, (n, 1), generator=g)
    which = ((tokens == 1) & ~is_padding).any(1).long()
    return x, tokens, is_padding, which, x.sum(1)


def custom(model, inputs, targets, loss_func, opt="adam"):
    parts = dict(zip("x tokens is_padding which size".split(), rows(), strict=True))
    dls = make_dls(*(parts[k] for k in inputs + targets), n_inp=len(inputs))
    return make_learner(opt, model, dls=dls, loss_func=loss_func)


def two_inputs(_):
    return custom(TwoInputs, ["x", "tokens"], ["which"], CrossEntropyLossFlat(), "sgd")


def two_outputs(_, wrap=as_tuple):
    return custom(partial(TwoHeads, wrap), ["x"], ["which", "size"], both_losses)


def dict_output(_):
    return two_outputs(_, as_dict)


def dataclass_output(_):
    return two_outputs(_, Output)


def bool_mask(_):
    return custom(Masked, ["tokens", "is_padding"], ["which"], CrossEntropyLossFlat())


def packed_lstm(_):
    return custom(Packed, ["tokens", "is_padding"], ["which"], CrossEntropyLossFlat())


def packed_gru(_):
    model = partial(Packed, nn.GRU)
    return custom(model, ["tokens", "is_padding"], ["which"], CrossEntropyLossFlat())


# How they are trained


def fine_tuning(learn):
    """Train the head, then all with rates that differ from group to group."""
    learn.fine_tune(1, 2e-3, freeze_epochs=1)


def unfreezing(learn):
    """Thaw group after group, as ULMFiT does."""
    learn.freeze()
    learn.fit_one_cycle(1, 2e-2)
    learn.freeze_to(-2)
    learn.fit_one_cycle(1, slice(1e-2 / 2.6, 1e-2))
    learn.unfreeze()
    learn.fit_one_cycle(1, slice(1e-2 / 2.6, 1e-2))


def one_cycle(learn):
    learn.fit_one_cycle(1, slice(2e-4, 2e-3))


def fit(learn):
    learn.fit(3, 0.02)


class App(NamedTuple):
    """An application: how its learner is made and trained."""

    make: object
    train: object = fit


APPS = {
    app.make.__name__: app
    for app in (
        App(vision, fine_tuning),
        App(vision_cut, one_cycle),
        App(unet, one_cycle),
        App(text, unfreezing),
        App(language_model, unfreezing),
        App(tabular),
        App(tabular_regression),
        App(collab),
        App(collab_nn),
        App(two_inputs),
        App(two_outputs),
        App(dict_output),
        App(dataclass_output),
        App(bool_mask),
        App(packed_lstm),
        App(packed_gru),
    )
}
FROM_FASTAIS_DATA = (
    "vision_cut unet text language_model tabular tabular_regression collab collab_nn".split()
)
LARGE = {"vision", "vision_cut", "unet"}  # seconds, not tenths: only what says most
PRECISIONS = {
    "plain": lambda learn: learn,
    "fp32": lambda learn: learn.add_cb(MixedPrecision(dtype=torch.float32)),
    "fp32_flat": lambda learn: learn.add_cb(MixedPrecision(dtype=torch.float32, flat_master=True)),
    "fp16": lambda learn: learn.to_fp16(),
    "fp16_flat": lambda learn: learn.to_fp16(flat_master=True),
    "bf16": lambda learn: learn.to_bf16(),
    "bf16_flat": lambda learn: learn.to_bf16(flat_master=True),
}


def make(name, root, precision="plain"):
    """Return a new, silent learner, the same bits at each call."""
    seed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old ways in fastai and around it
        learn = silent(APPS[name].make(root))
    learn.path = root
    return PRECISIONS[precision](learn)


class Result(NamedTuple):
    """What a training came to."""

    losses: list  # of each training batch
    values: list  # what fastai prints, epoch by epoch
    weights: dict
    opt: dict
    preds: object
    dtypes: dict  # of the model's parameters, while it is in its precision
    masters: list
    skipped: int


@cache
def trained(name, precision, root):
    """Train an application and return its `Result`."""
    learn = make(name, root, precision)
    losses = []
    learn.add_cb(Do("after_batch", lambda learn: losses.append(learn.loss.detach().clone())))
    seed(1)
    APPS[name].train(learn)
    has_masters = hasattr(learn, "mp_cb")
    return Result(
        plain(losses),
        [list(map(float, v)) for v in learn.recorder.values],
        weights(learn),
        opt_state(learn),
        predictions(learn, name),
        {k: p.dtype for k, p in learn.model.named_parameters()},
        masters(learn) if has_masters else [],
        learn.mp_cb.n_skipped if has_masters else 0,
    )


def predictions(learn, name):
    """Return fastai's predictions; it cannot gather a dataclass, nor reorder each kind."""
    if name == "dataclass_output":
        return None
    can_reorder = name not in ("language_model", "dict_output")
    return plain(learn.get_preds(reorder=can_reorder)[0])


EACH = pytest.mark.parametrize("name", APPS)
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# How far 16 bits may end from 32, as a part of the way that training went
NEAR = {"fp16": dict(preds=0.1, weights=0.3), "bf16": dict(preds=0.25, weights=0.7)}
LOSSES = {"fp16": dict(rtol=0.03, atol=0.0), "bf16": dict(rtol=0.2, atol=0.0)}


def only_flat_if_large(name, precision):
    if name in LARGE and "flat" not in precision:
        pytest.skip("seconds a run, and flat says more")


# The laws


@EACH
@pytest.mark.parametrize("precision", ["fp32", "fp32_flat"])
def test_in_32_bits_it_is_plain_fastai_bit_for_bit(name, precision, root):
    """Losses, metrics, weights, moments and predictions: masters and casts add no logic."""
    only_flat_if_large(name, precision)
    found, expected = trained(name, precision, root), trained(name, "plain", root)
    assert_same(found.losses, expected.losses, name="losses")
    assert_same(found.values, expected.values, name="values")
    assert_same(found.weights, expected.weights, name="weights")
    assert_same(found.opt, expected.opt, name="opt")
    assert_same(found.preds, expected.preds, name="preds")


@EACH
@pytest.mark.parametrize("half", HALVES)
def test_flat_masters_give_the_bits_of_single_ones(name, half, root):
    only_flat_if_large(name, half)
    found, expected = trained(name, half + "_flat", root), trained(name, half, root)
    for field in ("losses", "values", "weights", "opt", "preds", "dtypes", "masters"):
        assert_same(getattr(found, field), getattr(expected, field), name=field)


@EACH
@pytest.mark.parametrize("half", HALVES)
def test_the_model_is_in_16_bits_and_what_leaves_it_in_32(name, half, root):
    result, learn = trained(name, half + "_flat", root), make(name, root)
    norms = [k for k, m in learn.model.named_modules() if isinstance(m, _NormBase)]
    for k, dtype in result.dtypes.items():
        in_norm = k.rpartition(".")[0] in norms
        assert dtype == (torch.float32 if in_norm else HALVES[half]), k
    assert {m.dtype for m in result.masters} == {torch.float32}
    assert {loss.dtype for loss in result.losses} == {torch.float32}
    assert {p.dtype for p in tensors(result.preds)} <= {torch.float32}
    assert {w.dtype for w in tensors(result.weights)} <= {torch.float32, torch.int64}
    assert {s.dtype for s in tensors(result.opt)} <= {torch.float32}


def tensors(o):
    """Return all tensors in `o`."""
    if isinstance(o, torch.Tensor):
        return [o]
    parts = o.values() if isinstance(o, dict) else o if isinstance(o, list) else []
    return [t for part in parts for t in tensors(part)]


@EACH
@pytest.mark.parametrize("half", HALVES)
def test_16_bits_stay_near_32(name, half, root):
    """Losses of every batch, weights and predictions; no step is skipped on the way.

    The distance to 32 bits is measured against the way that training went: a model that learns
    nothing, or at another rate, is 1 away.
    """
    found, plain = trained(name, half + "_flat", root), trained(name, "plain", root)
    assert found.skipped == 0
    torch.testing.assert_close(found.losses, plain.losses, **LOSSES[half])
    learn = make(name, root)
    ks = [k for k, p in learn.model.named_parameters()]
    start, end, half_end = (
        vector([w[k] for k in ks]) for w in (weights(learn), plain.weights, found.weights)
    )
    assert way(half_end, end) <= NEAR[half]["weights"] * way(start, end)
    if found.preds is not None:
        start, end, half_end = map(vector, (predictions(learn, name), plain.preds, found.preds))
        assert way(half_end, end) <= NEAR[half]["preds"] * way(start, end)


def vector(o):
    return torch.cat([t.flatten() for t in tensors(o)])


def way(a, b):
    return (a - b).norm()


@pytest.mark.parametrize("name", [k for k in APPS if k != "vision_cut"])
def test_files_go_from_precision_to_precision(name, root):
    """A checkpoint of flat fp16 is one of plain fastai: same bits, moments and predictions."""
    learn = make(name, root, "fp16_flat")
    APPS[name].train(learn)
    learn.save(name)
    plain, other = make(name, root), make(name, root, "bf16")
    for one in (plain, other):
        one.load(name, with_opt=True)
        assert_same(weights(one), weights(learn))
        assert_same(opt_state(one), opt_state(learn))
    assert_same(masters(other), masters(learn))
    plain.opt.clear_state()
    plain.save(name)
    learn.load(name)
    assert_same(opt_state(learn), opt_state(plain))
    near = predictions(learn, name)
    learn.to_fp32()
    assert {p.dtype for p in learn.model.parameters()} == {torch.float32}
    exact = predictions(learn, name)
    assert_same(exact, predictions(plain, name))
    if exact is not None:
        torch.testing.assert_close(vector(near), vector(exact), rtol=0.02, atol=0.02)
    losses = []
    for one in (other, plain):  # they train on, from the same batches
        one.create_opt()
        seed(2)
        one.fit(1, 1e-3)
        losses.append(float(one.recorder.losses[0]))
    assert losses[0] == pytest.approx(losses[1], rel=0.1, abs=0.05)


@pytest.mark.parametrize("name", FROM_FASTAIS_DATA)
def test_an_exported_learner_is_plain_and_in_32_bits(name, root):
    """What `export` writes has the masters' bits, and no mixed precision in it where it is off."""
    learn = make(name, root, "fp16_flat")
    APPS[name].train(learn)
    state, expected = opt_state(learn), weights(learn)
    export(learn)
    assert_same(opt_state(learn), state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fastai's, of pickles from strangers
        loaded = silent(load_learner(root / "export.pkl"))
    assert_same(weights(loaded), expected)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    learn.fit(1, 1e-3)  # the exported one goes on
    assert all(torch.isfinite(loss) for loss in learn.recorder.losses)


def export(learn):
    """Export `learn`, unless plain fastai cannot pickle data of this kind here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fastai's, that it saves no optimizer of DataBlock data
        try:
            torch.save(learn.dls.new_empty(), BytesIO())
        except (TypeError, AttributeError) as e:
            pytest.skip(f"these data do not pickle here: {e}")
        learn.export()


# Vision


@pytest.fixture
def no_windows():
    """Close what was plotted."""
    yield
    plt.close("all")


@pytest.mark.parametrize("precision", ["fp16_flat", "bf16"])
def test_what_a_vision_learner_shows(precision, root, no_windows):
    """`predict`, `show_results`, `Interpretation`, `tta`: near 32 bits, and no bit changes."""
    learn = make("vision", root, precision)
    plain_learn = make("vision", root)
    before = bits(learn)
    for name in ("a_0.png", "b_1.png"):
        found, expected = (one.predict(root / "images" / name) for one in (learn, plain_learn))
        assert found[2].dtype == torch.float32
        torch.testing.assert_close(found[2], expected[2], rtol=0.0, atol=0.02)
        assert found[0] == expected[0] or expected[2].diff().abs() < 0.02
    learn.show_results(max_n=2)
    found, expected = map(ClassificationInterpretation.from_learner, (learn, plain_learn))
    losses = [one.top_losses(items=False)[0].sort().values for one in (found, expected)]
    torch.testing.assert_close(*losses, rtol=0.05, atol=0.0)
    assert found.confusion_matrix().sum() == len(learn.dls.valid_ds)
    found.plot_top_losses(2)
    (found, _), (expected, _) = (one.tta(n=1) for one in (learn, plain_learn))
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert_same(bits(learn), before)


def test_pictures_are_normalized_in_32_bits(root):
    """`Normalize` and augmentation come before the cast: the model gets their rounded result."""
    learn, seen = make("vision", root, "fp16"), []
    learn.model[0][0].register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    learn.get_preds()
    batch = learn.dls.valid.one_batch()[0]
    assert batch.dtype == torch.float32 and batch.min() < -1
    assert_same(plain(seen[0]), plain(batch.half()))


@pytest.mark.parametrize("half", HALVES)
def test_a_frozen_body_stays_and_its_norms_learn(half, root):
    """`freeze` keeps the masters of a frozen body; with `train_bn` fastai trains its norms."""
    learn = make("vision", root, half + "_flat")
    before = weights(learn)
    learn.freeze()
    learn.fit_one_cycle(1, 1e-2)
    after, norms = weights(learn), 0
    for k, _ in learn.model[0].named_parameters():
        is_norm = isinstance(learn.model[0].get_submodule(k.rpartition(".")[0]), _NormBase)
        is_same = torch.equal(before[f"0.{k}"], after[f"0.{k}"])
        assert is_same == (not is_norm), k
        norms += is_norm
    assert norms > 0


def test_groups_train_at_their_own_rates(root):
    """Discriminative rates reach the flat masters: a group at rate 0 does not move."""
    learn = make("vision", root, "fp16_flat")
    before = weights(learn)
    learn.fit(1, [0.0, 0.0, 1e-3])
    assert learn.opt.hypers.attrgot("lr") == [0.0, 0.0, 1e-3]
    after = weights(learn)
    for k, _ in learn.model.named_parameters():
        assert torch.equal(before[k], after[k]) == k.startswith("0."), k


# Segmentation


@pytest.mark.parametrize("precision", ["fp16_flat", "bf16_flat"])
def test_a_unet_joins_what_its_hooks_hold(precision, root, no_windows):
    """The encoder's stored outputs are 16-bit, as is what they are joined with; masks are whole."""
    learn, plain_learn = make("unet", root, precision), make("unet", root)
    found, expected = (one.predict(root / "images" / "a_0.png") for one in (learn, plain_learn))
    dtype = HALVES[precision[:4]]
    assert {hook.stored.dtype for hook in learn.model.sfs} == {dtype}
    assert found[0].shape == (32, 32) and found[2].dtype == torch.float32
    torch.testing.assert_close(found[2], expected[2], rtol=0.0, atol=0.05)
    learn.show_results(max_n=1)
    assert any("weight_orig" in k for k in weights(learn))  # self attention, spectrally normed


# Text


@pytest.mark.parametrize("precision", ["fp16", "fp16_flat", "bf16", "bf16_flat"])
def test_tied_weights_stay_tied(precision, root):
    """Encoder and decoder share one parameter, one master, one moment: from first to last."""
    learn = make("language_model", root, precision)

    def assert_tied():
        encoder, decoder = learn.model[0].encoder, learn.model[1].decoder
        assert decoder.weight is encoder.weight is learn.model[0].encoder_dp.emb.weight
        state = weights(learn)
        assert_same(state["1.decoder.weight"], state["0.encoder.weight"])

    assert_tied()
    learn.fit(1, 0.01)
    assert_tied()
    lists = sum(learn.mp_cb.master_params, [])
    n = len(list(learn.model.parameters()))
    assert precision.endswith("flat") or len(lists) == n
    learn.save("tied")
    learn.fit(1, 0.01)
    learn.load("tied")
    assert_tied()
    learn.to_fp32()
    assert_tied()
    learn.fit(1, 0.01)
    assert_tied()


@pytest.mark.parametrize("half", HALVES)
def test_dropped_weights_are_16_bit_and_raw_ones_have_masters(half, root):
    """fastai's `WeightDropout` puts a tensor in the place of the LSTM's parameter."""
    learn = make("language_model", root, half)
    rnn, seen = learn.model[0].rnns[0], []
    rnn.module.register_forward_pre_hook(lambda lstm, _: seen.append(lstm.weight_hh_l0.detach()))
    before = weights(learn)["0.rnns.0.weight_hh_l0_raw"]
    raw = rnn.weight_hh_l0_raw.detach().clone()
    learn.fit(1, 0.01)
    after = weights(learn)["0.rnns.0.weight_hh_l0_raw"]
    assert {w.dtype for w in seen} == {raw.dtype} == {HALVES[half]}
    assert (seen[0] == 0).float().mean() == pytest.approx(0.2, abs=0.05)
    kept = seen[0] != 0
    torch.testing.assert_close(seen[0][kept], (raw / 0.8)[kept], rtol=0.01, atol=0.0)
    assert before.dtype == after.dtype == torch.float32
    assert (before != after).all()
    assert not torch.equal(after, after.to(HALVES[half]).float())


def hidden_types(model):
    return {h.dtype for layer in model[0].hidden for h in layer}


@pytest.mark.parametrize("half", HALVES)
def test_hidden_states_have_the_type_of_the_model(half, root):
    """They are no buffers, but a model can be called at any time, as plain fastai's can."""
    learn = make("language_model", root)
    x = learn.dls.one_batch()[0]
    learn.model.eval()
    expected = learn.model(x)[0]
    learn.model.reset()
    PRECISIONS[half](learn)
    for _ in range(2):
        with torch.no_grad():
            found = learn.model(x)[0]
        assert found.dtype == torch.float32 and hidden_types(learn.model) == {HALVES[half]}
    learn.fit(1, 0.0)
    assert hidden_types(learn.model) == {HALVES[half]}
    learn.to_fp32()
    learn.model.eval()
    assert_same(learn.model(x)[0], expected)
    assert hidden_types(learn.model) == {torch.float32}


@pytest.mark.parametrize("half", HALVES)
def test_hidden_states_go_from_batch_to_batch(half, root):
    """The model remembers within an epoch, and `ModelResetter` forgets between them."""
    learn, starts = make("language_model", root, half), []
    see = Do("before_batch", lambda learn: starts.append(learn.model[0].hidden[0][0].clone()))
    learn.fit(2, 0.01, cbs=see)
    n = len(learn.dls.train)
    assert {h.dtype for h in starts} == {HALVES[half]}
    assert [bool(h.any()) for h in starts] == 2 * [False, *(n - 1) * [True]]


@pytest.mark.parametrize("name", ["language_model", "text", "packed_lstm"])
@pytest.mark.parametrize("half", HALVES)
def test_recurrent_nets_warn_of_nothing(name, half, root):
    """No "weights are not contiguous": the masters leave the weights where the LSTM has them."""
    learn = make(name, root, half + "_flat")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learn.fit(1, 0.01)
        predictions(learn, name)
    assert not [str(w.message) for w in caught if "contiguous" in str(w.message)]
    assert not [str(w.message) for w in caught if "flatten" in str(w.message)]


@pytest.mark.parametrize("half", HALVES)
def test_the_regularizer_adds_the_terms_of_32_bits(half, root):
    """`RNNRegularizer` reads the activations; what it adds is in the gradient, not in the loss."""
    extra = {}
    for precision in ("plain", half):
        learn, terms = make("language_model", root, precision), []
        see = Do(
            "before_backward",
            lambda learn, t=terms: t.append(plain(learn.loss_grad - learn.loss)),
            order=5,
        )
        seed(1)
        learn.fit(1, 0.01, cbs=see)
        extra[precision] = torch.stack(terms)
    assert (extra["plain"] > 0).all() and extra[half].dtype == torch.float32
    torch.testing.assert_close(extra[half], extra["plain"], rtol=0.05, atol=0.0)


@pytest.mark.parametrize(
    "first, second", [("fp16_flat", "plain"), ("plain", "bf16"), ("bf16", "fp16_flat")]
)
def test_an_encoder_goes_from_one_learner_to_another(first, second, root):
    """ULMFiT: the language model's encoder, in 32 bits, becomes the classifier's, and is frozen."""
    lm, classifier = make("language_model", root, first), make("text", root, second)
    lm.fit(1, 0.01)
    lm.save_encoder("encoder")
    saved = torch.load(root / "models" / "encoder.pth", weights_only=True)
    assert {w.dtype for w in saved.values()} == {torch.float32}
    classifier.load_encoder("encoder")
    ours, theirs = weights(classifier), weights(lm)
    for k in saved:
        assert_same(ours[f"0.module.{k}"], theirs[f"0.{k}"], name=k)
    classifier.fit(1, 0.01)
    trained_on = weights(classifier)
    for k in saved:
        assert_same(trained_on[f"0.module.{k}"], ours[f"0.module.{k}"], name=k)  # frozen
    assert not torch.equal(trained_on["1.layers.1.0.weight"], ours["1.layers.1.0.weight"])


@pytest.mark.parametrize("precision", ["fp16_flat", "bf16"])
def test_texts_go_on_and_are_classified(precision, root, capsys):
    """`predict` of both learners; 16 bits draw the words that 32 bits do."""
    found, expected = [], []
    for kind, out in ((precision, found), ("plain", expected)):
        lm, classifier = make("language_model", root, kind), make("text", root, kind)
        seed(3)
        out.append(lm.predict("the film", n_words=3, no_bar=True))
        label, _, p = classifier.predict("a good film")
        out.append(p)
        assert label in ("n", "p") and p.dtype == torch.float32
    assert found[0] == expected[0] and found[0].startswith("the film ")
    torch.testing.assert_close(found[1], expected[1], rtol=0.0, atol=0.02)


# Tables


@pytest.mark.parametrize("precision", ["fp16_flat", "bf16"])
def test_rows_of_a_table_are_predicted(precision, root, capsys):
    """`predict` of a row, `test_dl` of a new table and `show_results`, near those of 32 bits."""
    learn, plain_learn = make("tabular", root, precision), make("tabular", root)
    table = people().drop(columns="rich").iloc[:5]
    found, expected = [], []
    for one, out in ((learn, found), (plain_learn, expected)):
        p = one.get_preds(dl=one.dls.test_dl(table))[0]
        assert p.shape == (5, 2) and p.dtype == torch.float32
        _, _, first = one.predict(people().iloc[0])
        torch.testing.assert_close(first, p[0], rtol=0.0, atol=0.01)
        out += [p, first]
        one.show_results(max_n=2)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.02)


def test_categories_arrive_as_integers_and_numbers_in_16_bits(root):
    learn, seen = make("tabular", root, "fp16"), []
    embedding, first = learn.model.embeds[0], learn.model.layers[0]
    for m in (embedding, first):
        m.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    learn.fit(1, 0.01)
    assert seen and set(zip(seen[::2], seen[1::2], strict=True)) == {(torch.int64, torch.float16)}


def large_inputs(precision, root, procs):
    """Return a learner whose column of numbers goes up to a million."""
    seed()
    table = people()
    table["weight"] = table["weight"] * 1e4
    dls = TabularDataLoaders.from_df(
        table,
        procs=procs,
        cat_names=["job"],
        cont_names=["age", "weight"],
        y_names="rich",
        y_block=CategoryBlock(),
        valid_idx=list(range(30, 40)),
        bs=10,
        **ON_CPU,
    )
    learn = silent(tabular_learner(dls, layers=[16], path=root))
    return PRECISIONS[precision](learn)


@pytest.fixture
def notices(caplog):
    """Let every notice be given anew, and return what is given."""
    inside.forget_notices()
    return caplog


def test_large_numbers_get_one_warning_that_names_the_column(root, notices):
    """Beyond 65504 fp16 has only inf: the user is told once what to do."""
    learn = large_inputs("fp16", root, [Categorify])
    learn.fit(2, 0.01)
    told = [m for m in notices.messages if "beyond the 65504" in m]
    assert len(told) == 1
    assert "input 1, column(s) [1]" in told[0] and "normalize the inputs" in told[0]
    assert all(w.isfinite().all() for w in tensors(weights(learn)))


@pytest.mark.parametrize(
    "precision, procs", [("bf16", [Categorify]), ("fp16", [Categorify, Normalize])]
)
def test_large_numbers_train_where_they_fit(precision, procs, root, notices):
    learn = large_inputs(precision, root, procs)
    learn.fit(3, 0.02)
    assert not [m for m in notices.messages if "beyond" in m]
    assert learn.mp_cb.n_skipped == 0
    assert torch.stack(learn.recorder.losses).isfinite().all()


def large_targets(precision, root):
    seed()
    table = people()
    table["pay"] = table["pay"] * 1000
    dls = TabularDataLoaders.from_df(
        table,
        procs=[Categorify, Normalize],
        cat_names=["job"],
        cont_names=["age", "weight"],
        y_names="pay",
        valid_idx=list(range(30, 40)),
        bs=10,
        **ON_CPU,
    )
    return PRECISIONS[precision](
        silent(tabular_learner(dls, layers=[16], y_range=(20000, 90000), n_out=1, path=root))
    )


def error_of(learn):
    preds, targets = learn.get_preds()
    assert preds.dtype == torch.float32
    return float((preds.view(-1) - targets.view(-1)).abs().mean())


def test_large_targets_are_learned_in_bfloat16(root):
    """A `y_range` up to 90000: the error falls to a quarter, as in 32 bits."""
    errors = {}
    for precision in ("plain", "bf16"):
        learn = large_targets(precision, root)
        errors[precision, "first"] = error_of(learn)
        seed(1)
        learn.fit(12, 0.05)
        errors[precision, "last"] = error_of(learn)
    assert errors["plain", "last"] < errors["plain", "first"] / 4
    assert errors["bf16", "last"] < errors["bf16", "first"] / 4


def test_large_targets_are_refused_by_float16_in_words(root):
    """A `y_range` up to 90000 is beyond float16: an error names layers and bfloat16."""
    learn = large_targets("fp16", root)
    before = weights(learn)
    with pytest.raises(MixedPrecisionError, match="skipped.*bfloat16"):
        learn.fit(12, 0.05)
    assert_same(weights(learn), before)


# Collaborative filtering


@pytest.mark.parametrize("precision", ["fp16_flat", "bf16"])
def test_factors_and_biases_of_users_and_films(precision, root):
    """What the book reads out of a model is there in 16 bits too, near what 32 bits give."""
    learn, plain_learn = make("collab", root, precision), make("collab", root)
    films = [3, 1, 2]
    for read in ("bias", "weight"):
        found, expected = (getattr(one.model, read)(films) for one in (learn, plain_learn))
        torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=1e-4)
    dls = learn.dls.test_dl(ratings().iloc[:7])
    found, expected = (one.get_preds(dl=dls)[0] for one in (learn, plain_learn))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.0)
    assert ((found > 0) & (found < 5.5)).all()


# Adversaries


def gan(root, kind):
    """Return a GAN over the pictures, as fastai's users make one."""
    generator = nn.Sequential(nn.Linear(4, 48), nn.Unflatten(1, (3, 4, 4)))
    critic = nn.Sequential(nn.Flatten(), nn.Linear(48, 1), nn.Flatten(0))
    x = torch.randn(40, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    dls = make_dls(torch.randn(40, 4), x)
    if kind == "wgan":
        return silent(GANLearner.wgan(dls, generator, critic, opt_func=Adam, lr=1e-3, path=root))
    learners = [Learner(dls, m, loss_func=f) for m, f in ((generator, F.l1_loss), (critic, bce))]
    return silent(GANLearner.from_learners(*learners, opt_func=Adam, lr=1e-3, path=root))


def bce(pred, target):
    return F.binary_cross_entropy_with_logits(pred, target)


@pytest.fixture(scope="module")
def gans():
    """Return a function that trains a GAN, each kind and precision once."""
    return cache(train_gan)


def train_gan(kind, precision):
    """Train for two epochs; return what came of it, and the learner."""
    with TemporaryDirectory() as root:
        seed()
        learn = gan(root, kind)
        PRECISIONS[precision](learn)
        seed(1)
        learn.fit(2)
        pred = learn.get_preds(ds_idx=1)[0]
        found = weights(learn), opt_state(learn), plain(learn.recorder.values), pred
    return found, learn


@pytest.mark.parametrize("kind", ["wgan", "from_learners"])
@pytest.mark.parametrize("precision", [p for p in PRECISIONS if p != "plain"])
def test_a_gan_trains(kind, precision, gans):
    """Generator and critic in turns, each called from the loss as well; WGAN clips `p.data`."""
    (expected, *_, losses, preds), _ = gans(kind, "plain")
    found, learn = gans(kind, precision)
    if "fp32" in precision:
        assert_same(found, gans(kind, "plain")[0])
        return
    for k, w in found[0].items():
        torch.testing.assert_close(w, expected[k], rtol=0.02, atol=2e-3)
    torch.testing.assert_close(torch.tensor(found[2]), torch.tensor(losses), rtol=0.03, atol=2e-3)
    torch.testing.assert_close(found[3], preds, rtol=0.02, atol=0.01)
    if "flat" in precision:
        assert_same(found[0], gans(kind, precision.removesuffix("_flat"))[0][0])
    x = torch.randn(2, 4)
    for net, inputs in ((learn.model.generator, x), (learn.model.critic, torch.randn(2, 3, 4, 4))):
        assert net(inputs).dtype == torch.float32
        assert copy.deepcopy(net)(inputs).dtype == torch.float32
    learn.to_fp32()
    assert_same(weights(learn), found[0])
    assert all("forward" not in vars(m) for m in learn.model.modules())


def test_a_gan_skips(root):
    """A batch that overflows is no step of either net, and shows its own loss before it."""
    seed()
    learn = gan(root, "from_learners").to_fp16()
    seen, steps = [], []

    def overflow(learn):
        steps.append(weights(learn))
        learn.xb = (torch.full_like(learn.xb[0], torch.inf),)

    def note(learn):
        seen.append(float(learn.loss))
        if len(seen) == 4:
            steps.append(weights(learn))

    learn.fit(2, cbs=[Do("before_batch", overflow, at=3, order=5), Do("after_batch", note)])
    assert learn.mp_cb.skipped == [3]
    assert seen[3] == seen[1] != seen[2]
    assert_same(*steps)


def test_a_gan_has_no_scales_of_layers(root):
    """The loss calls the nets by themselves: it is refused, and nothing is changed."""
    learn = gan(root, "wgan")
    with pytest.raises(MixedPrecisionError, match="scales of layers are not to be had"):
        learn.to_fp16(layer_scales="auto")
    assert {p.dtype for p in learn.model.parameters()} == {torch.float32}
