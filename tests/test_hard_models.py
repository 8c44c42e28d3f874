"""Models that other tools trip over: shared weights, odd buffers, parametrizations, wrappers.

Every model of `MODELS` is trained by plain fastai, in float32, and with flat masters in float16 and
bfloat16; the laws below hold for all of them. What concerns two settings is tried with one of them
on every other model, and with the other on the rest: each setting meets each kind of model.
"""

import copy
import io
import pickle
import warnings
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import NamedTuple

import cloudpickle
import pytest
import torch
from inside import ComputeInFloat32, has_arithmetic, masters_by_param
from tiny import (
    Do,
    bits,
    make_dls,
    make_learner,
    masters,
    opt_state,
    snapshot,
    torch_optimizer,
    weights,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from mixedfp.formats import MixedPrecisionError
from mixedfp.testing import assert_same

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
FLAT = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
HALF = pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)

# Data: small, of two classes that differ a little everywhere


def _labels(n=24):
    return torch.arange(n) % 2


def floats(*shape):
    y = _labels()
    noise = torch.randn(len(y), *shape, generator=torch.Generator().manual_seed(0))
    return noise + (y - 0.5).view(-1, *[1] * len(shape)), y


def tokens():
    y = _labels()
    rng = torch.Generator().manual_seed(0)
    return torch.randint(0, 9, (len(y), 5), generator=rng) + y[:, None], y


ROWS, PICTURES, SEQUENCES = partial(floats, 6), partial(floats, 3, 6, 6), partial(floats, 5, 6)


@cache
def data(kind):
    return kind()


# Small modules that the models are built of


def head(n):
    return nn.Linear(n, 2)


def mlp(*layers):
    return nn.Sequential(nn.Linear(6, 6), *layers, nn.Tanh(), head(6))


def conv(*layers, n=4):
    """Return a convolution net with `layers` inside; smooth, so that rounding stays small."""
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(nn.Conv2d(3, 4, 3), *layers, nn.Tanh(), *pool, head(n))


class TiedDecoder(nn.Module):
    """A language model's decoder: its weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(10, 4), nn.Linear(4, 10)
        self.out.weight = self.emb.weight
        self.head = head(10)

    def forward(self, x):
        return self.head(torch.tanh(self.out(self.emb(x))).mean(1))


class Twice(nn.Module):
    """One layer, called twice and known by two names."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.again, self.head = self.one, head(6)

    def forward(self, x):
        return self.head(self.again(torch.tanh(self.one(x))))


class Buffers(nn.Module):
    """Buffers of every type; each takes part in the forward pass, and in training most change."""

    def __init__(self):
        super().__init__()
        self.lin, self.head = nn.Linear(6, 6), head(6)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("small", torch.tensor([3], dtype=torch.uint8))
        self.register_buffer("mask", torch.tensor([True] * 5 + [False]))
        self.register_buffer("phase", torch.full((6,), 0.5 + 0.5j))
        self.register_buffer("table", torch.linspace(0.1, 1.0, 6), persistent=False)
        self.register_buffer("running", torch.zeros(6))
        self.register_buffer("replaced", torch.full((6,), 0.1))
        self.register_buffer("nothing", None)

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.small += 1
            self.running.mul_(0.5).add_(0.5 * x.detach().mean(0))
            self.replaced = x.detach().mean(0) + 0.1
        x = self.lin(x) * self.mask * self.table + self.running + self.replaced
        return self.head((x * self.phase.abs().to(x.dtype)).tanh())


class Double(nn.Module):
    """A frozen table and a buffer of 64 bits, beside 32-bit weights."""

    def __init__(self):
        super().__init__()
        self.lin, self.head = nn.Linear(6, 6), head(6)
        self.register_buffer("wide", torch.full((6,), 1 / 3, dtype=torch.float64))
        self.table = nn.Parameter(torch.full((6,), 1 / 7, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        return self.head(torch.tanh(self.lin(x) * self.wide.to(x) + self.table.to(x)))


class Complex(nn.Module):
    """A trained complex parameter."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.head = head(6)

    def forward(self, x):
        return self.head((self.lin(x).float() * self.phase).abs().to(x.dtype))


class Lists(nn.Module):
    """Weights in a list and in a dict."""

    def __init__(self):
        super().__init__()
        self.many = nn.ParameterList([torch.randn(6) / 3 for _ in range(3)])
        self.named = nn.ParameterDict({"a": torch.randn(6, 6) / 3, "b": torch.zeros(6)})
        self.head = head(6)

    def forward(self, x):
        x = torch.tanh(x @ self.named["a"] + self.named["b"])
        return self.head(sum(x * w for w in self.many))


class FiveHundred(nn.Module):
    """Very many very small parameters."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([torch.rand(6) + 0.5 for _ in range(250)])
        self.shifts = nn.ParameterList([torch.rand(()) - 0.5 for _ in range(250)])
        self.head = head(6)

    def forward(self, x):
        scale, shift = torch.stack(list(self.scales)), torch.stack(list(self.shifts))
        return self.head(torch.tanh(x * scale.mean(0) + shift.mean()))


class OddShapes(nn.Module):
    """A parameter of no dimension, and two without an element."""

    def __init__(self):
        super().__init__()
        self.scale, self.lin = nn.Parameter(torch.tensor(1.5)), nn.Linear(6, 6)
        self.empty, self.rows = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0, 6))
        self.head = head(6)

    def forward(self, x):
        return self.head(self.scale * torch.tanh(self.lin(x) + self.empty.sum() + self.rows.sum()))


class SomeBatches(nn.Module):
    """A layer that only every other batch uses, and one that none does."""

    def __init__(self):
        super().__init__()
        self.lin, self.sometimes, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head, self.count = head(6), 0

    def forward(self, x):
        x = torch.tanh(self.lin(x))
        self.count += self.training
        return self.head(x + self.sometimes(x) if self.count % 2 else x)


class Encoder(nn.Module):
    """A transformer's layer over words, the last two of which are padding."""

    def __init__(self, masked):
        super().__init__()
        self.masked = masked
        self.emb = nn.Embedding(10, 4)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = head(4)

    def forward(self, x):
        masks = {}
        if self.masked:
            masks["mask"] = nn.Transformer.generate_square_subsequent_mask(5)
            masks["src_key_padding_mask"] = torch.zeros(x.shape).masked_fill_(
                torch.arange(5) > 2, float("-inf")
            )
        return self.head(self.layers(self.emb(x), **masks).mean(1))


class Attention(nn.Module):
    """Attention with a mask of minus infinity."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), head(6)

    def forward(self, x):
        mask = torch.full((5, 5), float("-inf"), dtype=x.dtype).triu(1)
        return self.head(self.attention(x, x, x, attn_mask=mask)[0].mean(1))


class Recurrent(nn.Module):
    """A recurrent network, over sequences of different lengths where `packed`."""

    def __init__(self, kind, packed=False, **kwargs):
        super().__init__()
        self.rnn, self.packed = kind(6, 8, batch_first=True, **kwargs), packed
        self.head = head((self.rnn.proj_size or 8) * (1 + self.rnn.bidirectional))

    def forward(self, x):
        if self.packed:
            lengths = torch.arange(len(x)) % 4 + 2
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
            x = nn.utils.rnn.pad_packed_sequence(self.rnn(x)[0], batch_first=True)[0]
            return self.head(x.mean(1))
        return self.head(self.rnn(x)[0].mean(1))


class Bag(nn.Module):
    """Embeddings summed up, with a weight each."""

    def __init__(self):
        super().__init__()
        self.bag, self.scale = nn.EmbeddingBag(10, 4, mode="sum"), nn.Parameter(torch.ones(5) / 3)
        self.head = head(4)

    def forward(self, x):
        return self.head(self.bag(x, per_sample_weights=self.scale.expand(len(x), 5)))


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.bilinear, self.head = nn.Bilinear(6, 6, 4), head(4)

    def forward(self, x):
        return self.head(self.bilinear(x, x.flip(1)))


class Sampler(nn.Module):
    """A spatial transformer: pictures are read at places that a layer says."""

    def __init__(self):
        super().__init__()
        self.where, self.head = nn.Linear(3, 6), head(3)
        nn.init.zeros_(self.where.weight)
        self.where.bias.data = torch.tensor([1.0, 0.25, 0.1, 0.0, 1.0, 0.1])

    def forward(self, x):
        theta = self.where(x.mean((2, 3))).view(-1, 2, 3)
        grid = F.affine_grid(theta, x.shape, align_corners=False)
        return self.head(F.grid_sample(x, grid, align_corners=False).mean((2, 3)))


class Square(torch.autograd.Function):
    """A function with a backward pass of the user's own."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * x * scale

    @staticmethod
    def backward(ctx, g):
        x, scale = ctx.saved_tensors
        return 2 * x * scale * g, (x * x * g).sum().to(scale.dtype)


class OwnFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.scale, self.head = nn.Linear(6, 6), nn.Parameter(torch.tensor(0.5)), head(6)

    def forward(self, x):
        return self.head(Square.apply(torch.tanh(self.lin(x)), self.scale))


class Checkpointed(nn.Module):
    """Activations are thrown away and computed again in the backward pass."""

    def __init__(self, **kwargs):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6))
        self.first, self.head, self.kwargs = nn.Linear(6, 6), head(6), kwargs

    def forward(self, x):
        return self.head(checkpoint(self.body, self.first(x), **self.kwargs))


class Wrapper(nn.Module):
    """What `nn.DataParallel` is to its `module`."""

    def __init__(self):
        super().__init__()
        self.module = mlp()

    def forward(self, *args):
        return self.module(*args)


class Doubled(nn.Module):
    """A parametrization of the user's own."""

    def forward(self, w):
        return 2 * w - w.mean()


def around(wrap, **kwargs):
    """A network whose first layer has gone through `wrap`, one of PyTorch's utilities."""
    model = mlp()
    wrap(model[0], **kwargs)
    return model


def pruned():
    model = mlp()
    prune.random_unstructured(model[0], "weight", 0.5)
    return model


class FrozenHalfBody(nn.Module):
    """The first part of a big model, in bfloat16 and frozen, under a new head."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).bfloat16().requires_grad_(False)
        self.head = head(6)

    def forward(self, x):
        x = self.body(x.to(self.body[0].weight.dtype))
        return self.head(x.to(self.head.weight.dtype))


class QuantizedLinear(nn.Module):
    """A frozen layer whose weight is kept in 8 bits, with a scale."""

    def __init__(self, dtype):
        super().__init__()
        w = torch.randn(6, 6)
        self.register_buffer("scale", w.abs().max() / 100)
        self.register_buffer("weight", (w / self.scale).to(dtype))

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale)


def quantized(dtype):
    return nn.Sequential(nn.Linear(6, 6), QuantizedLinear(dtype), nn.Tanh(), head(6))


def hooked():
    """Hooks of the user's: on the way there, and on the way back."""
    model = mlp()
    model[0].register_forward_pre_hook(_half_input)
    model[0].register_forward_hook(_half_output)
    model[1].register_full_backward_hook(_half_grad)
    return model


def _half_input(module, args):
    return (args[0] * 0.5,)


def _half_output(module, args, out):
    return out * 0.5


def _half_grad(module, grad_in, grad_out):
    return (grad_in[0] * 0.5,)


def pooled():
    pools = nn.AdaptiveMaxPool2d(3), nn.AdaptiveAvgPool2d(2)
    return nn.Sequential(nn.Conv2d(3, 4, 3), *pools, nn.Flatten(), head(16))


def upsampled():
    return conv(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(4, 4, 3))


def transposed():
    return conv(nn.ConvTranspose2d(4, 4, 2, stride=2))


def prelu():
    return conv(nn.PReLU(4), nn.Conv2d(4, 4, 1), nn.PReLU())


def same_context():
    """Return the contexts of a forward pass and of its repetition, for float16 on such a CPU."""
    return nullcontext(), ComputeInFloat32()


class Hard(NamedTuple):
    """A model, its data, and how far from 32 bits its weights may end: as a part of their way."""

    make: object
    data: object = ROWS
    fp16: float = 0.004
    bf16: float = 0.02


def own_parametrization():
    return around(
        parametrize.register_parametrization, tensor_name="weight", parametrization=Doubled()
    )


NORMS = {
    "batch_norm": lambda: nn.BatchNorm2d(4),
    "sync_batch_norm": lambda: nn.SyncBatchNorm(4),
    "instance_norm": lambda: nn.InstanceNorm2d(4),
    "instance_norm_affine": lambda: nn.InstanceNorm2d(4, affine=True),
    "instance_norm_stats": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "layer_norm": lambda: nn.LayerNorm([4, 4, 4]),
    "layer_norm_plain": lambda: nn.LayerNorm([4, 4, 4], elementwise_affine=False),
    "group_norm": lambda: nn.GroupNorm(2, 4),
    "rms_norm": lambda: nn.RMSNorm([4, 4, 4]),
    "local_response_norm": lambda: nn.LocalResponseNorm(2),
}
PARAMETRIZED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "orthogonal_cayley": partial(parametrizations.orthogonal, orthogonal_map="cayley"),
    "orthogonal_householder": partial(parametrizations.orthogonal, orthogonal_map="householder"),
}


def normed(norm):
    return conv(NORMS[norm]())


MODELS = {
    "tied_to_embedding": Hard(TiedDecoder, tokens),
    "used_twice": Hard(Twice),
    "some_batches": Hard(SomeBatches),
    "buffers": Hard(Buffers),
    "double": Hard(Double),
    "complex": Hard(Complex),
    "lists": Hard(Lists),
    "five_hundred": Hard(FiveHundred),
    "odd_shapes": Hard(OddShapes),
    # a convolution's bias before an InstanceNorm has a gradient of rounding errors only
    **{k: Hard(partial(normed, k), PICTURES, bf16=0.12) for k in NORMS},
    "old_weight_norm": Hard(partial(around, nn.utils.weight_norm)),
    "old_spectral_norm": Hard(partial(around, nn.utils.spectral_norm)),
    # a spectral norm's two buffers are of length 1: their own rounding counts
    **{k: Hard(partial(around, wrap), fp16=0.01) for k, wrap in PARAMETRIZED.items()},
    "own_parametrization": Hard(own_parametrization),
    "pruned": Hard(pruned),
    "frozen_half_body": Hard(FrozenHalfBody),
    "int8_weights": Hard(partial(quantized, torch.int8)),
    "float8_weights": Hard(partial(quantized, torch.float8_e4m3fn)),
    "transformer": Hard(partial(Encoder, False), tokens),
    "transformer_masked": Hard(partial(Encoder, True), tokens),
    "attention": Hard(Attention, SEQUENCES),
    "lstm": Hard(partial(Recurrent, nn.LSTM), SEQUENCES),
    "lstm_bidirectional": Hard(partial(Recurrent, nn.LSTM, bidirectional=True), SEQUENCES),
    "lstm_projected": Hard(partial(Recurrent, nn.LSTM, proj_size=4, num_layers=2), SEQUENCES),
    "gru_packed": Hard(partial(Recurrent, nn.GRU, True, bidirectional=True), SEQUENCES),
    "embedding_bag": Hard(Bag, tokens),
    "bilinear": Hard(Bilinear),
    "conv_transpose": Hard(transposed, PICTURES),
    "pooling": Hard(pooled, PICTURES),
    "upsample": Hard(upsampled, PICTURES),
    "grid_sample": Hard(Sampler, PICTURES),
    "prelu": Hard(prelu, PICTURES),
    "own_function": Hard(OwnFunction),
    "checkpoint_reentrant": Hard(partial(Checkpointed, use_reentrant=True)),
    "checkpoint_context": Hard(partial(Checkpointed, use_reentrant=False, context_fn=same_context)),
    "hooks": Hard(hooked),
    "wrapper": Hard(Wrapper),
    "data_parallel": Hard(lambda: nn.DataParallel(mlp())),
    "compiled": Hard(lambda: torch.compile(mlp(), backend="eager")),
    "compiled_aot": Hard(lambda: torch.compile(mlp(), backend="aot_eager")),
}
PRECISIONS = {"fp32": torch.float32, **HALVES}
NAMED = pytest.mark.parametrize("name", MODELS)
ODD_NAMES = list(MODELS)[1::2]


def by_turns(argname, even, odd, names=tuple(MODELS)):
    """Mark a test for all models, every other one with `odd`."""
    pairs = [(name, odd if name in ODD_NAMES else even) for name in names]
    return pytest.mark.parametrize(["name", argname], pairs)


IN_HALVES = pytest.mark.parametrize("precision", HALVES)


def learner(name, precision=None, flat=False, opt="sgd", **kwargs):
    make, kind = MODELS[name][:2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that the old weight_norm is old
        learn = make_learner(opt, make, dls=make_dls(*data(kind)), **kwargs)
    return (
        learn if precision is None else learn.to_fp16(dtype=PRECISIONS[precision], flat_master=flat)
    )


def fit(learn):
    learn.fit(1, 0.05, wd=0.1)
    learn.fit_one_cycle(1, 0.1, wd=0.1)
    return learn


def comparable(state):
    """Return `state` with the bits of its 8-bit floats, which `assert_same` does not know."""
    is_tiny = {torch.float8_e4m3fn: torch.uint8}
    return {k: v.view(is_tiny.get(v.dtype, v.dtype)) for k, v in state.items()}


def state(learn):
    """Return copies of weights, all buffers (in the file or not), and the optimizer's state."""
    kept = {k: b.detach().clone() for k, b in learn.model.named_buffers()}
    return {"weights": comparable(weights(learn)), "opt": opt_state(learn), "all": comparable(kept)}


@cache
def trained(name, precision=None, flat=False):
    """Train a model, and return what is there then, before and after it is back in 32 bits."""
    learn = learner(name, precision, flat)
    start = comparable(weights(learn))
    fit(learn)
    seen = SimpleNamespace(start=start, saved=comparable(weights(learn)), opt=opt_state(learn))
    named = dict(learn.model.named_parameters())
    seen.dtypes = {k: p.dtype for k, p in named.items()}
    seen.preds = learn.get_preds(act=nn.Identity())[0]
    if precision is not None:
        owner = masters_by_param(learn.mp_cb.mixed)
        seen.masters = {k: owner[p].detach().clone() for k, p in named.items() if p in owner}
    learn.to_fp32()
    kept = {k: b.detach().clone() for k, b in learn.model.named_buffers()}
    seen.after, seen.buffers = comparable(weights(learn)), comparable(kept)
    return seen


# Laws that hold for every model


@by_turns("flat", False, True)
def test_float32_is_plain_fastai(name, flat):
    plain, ours = trained(name), trained(name, "fp32", flat)
    for what in ("saved", "opt", "after", "buffers", "preds", "dtypes"):
        assert_same(getattr(ours, what), getattr(plain, what), name=what)


@by_turns("precision", "fp16", "bf16")
def test_flat_is_each(name, precision):
    each, flat = trained(name, precision), trained(name, precision, True)
    for what in ("saved", "opt", "after", "buffers", "preds", "masters"):
        assert_same(getattr(flat, what), getattr(each, what), name=what)


def distance(state, other):
    """Return the norm of the difference of all numbers in two states."""
    numbers = [k for k, v in state.items() if v.is_floating_point() or v.is_complex()]
    return sum((state[k] - other[k]).abs().square().sum().item() for k in numbers) ** 0.5


@IN_HALVES
@NAMED
def test_sixteen_bits_end_near_32(name, precision):
    """The way from the start to the end of training is the same, but for a small part of it."""
    plain, ours = trained(name), trained(name, precision, True)
    way = distance(plain.after, plain.start)
    assert distance(ours.after, plain.after) < getattr(MODELS[name], precision) * way
    tolerance = {"fp16": 4e-3, "bf16": 2e-2}[precision]
    torch.testing.assert_close(ours.preds, plain.preds, rtol=tolerance, atol=tolerance)


def is_norm_in_32_bits(module):
    return isinstance(module, nn.modules.batchnorm._NormBase)


@IN_HALVES
@NAMED
def test_the_model_is_in_16_bits_and_its_masters_are_not(name, precision):
    """Batch and instance norms stay in 32 bits, and what was in another type before."""
    plain, ours = trained(name), trained(name, precision, True)
    model = learner(name).model
    stay = [k for k, m in model.named_modules() if is_norm_in_32_bits(m)]
    for k, p in model.named_parameters():
        if p.requires_grad and p.dtype == torch.float32 and ".parametrizations." not in k:
            in_norm = k.rpartition(".")[0] in stay
            assert ours.dtypes[k] == (torch.float32 if in_norm else HALVES[precision]), k
    assert {k: v.dtype for k, v in ours.saved.items()} == {
        k: v.dtype for k, v in plain.saved.items()
    }
    assert ours.preds.dtype == torch.float32
    assert_same({k: ours.after[k] for k in ours.masters}, ours.masters)
    trainable = {k for k, p in model.named_parameters() if p.requires_grad and not p.is_complex()}
    assert {ours.masters[k].dtype for k in trainable} == {torch.float32}


def everything(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return comparable({k: t.detach().clone() for k, t in tensors.items()})


@by_turns("flat", False, True)
def test_to_fp16_to_fp32_is_the_identity(name, flat):
    """Also a second time, in the other type and the other layout."""
    learn = learner(name)
    before, saved = everything(learn.model), comparable(weights(learn))
    for dtype, is_flat in ((torch.float16, flat), (torch.bfloat16, not flat)):
        learn.to_fp16(dtype=dtype, flat_master=is_flat)
        assert_same(comparable(weights(learn)), saved)  # a checkpoint holds them all the time
        learn.to_fp32()
        assert_same(everything(learn.model), before)


FEWER = [k for k in MODELS if k != "five_hundred"]  # it is slow


@pytest.mark.parametrize("name", FEWER)
def test_a_checkpoint_goes_into_plain_fastai_and_back(name, tmp_path):
    """A plain learner reads the file and trains on; the next 16-bit learner reads its file."""
    precision, flat = ("fp16", True) if name in ODD_NAMES else ("bf16", False)
    learn = learner(name, precision, flat, path=tmp_path)
    learn.fit(1, 0.05)
    learn.save("half")
    plain = learner(name, path=tmp_path).load("half", with_opt=True)
    assert_same(comparable(weights(plain)), comparable(weights(learn)))
    assert_same(opt_state(plain), opt_state(learn))
    plain.fit(1, 0.05)
    plain.save("full")
    again = learner(name, precision, flat, path=tmp_path).load("full", with_opt=True)
    assert_same(comparable(weights(again)), comparable(weights(plain)))
    assert_same(opt_state(again), opt_state(plain))
    assert_same(comparable(weights(again.to_fp32())), comparable(weights(plain)))


# torch: "Serialization of parametrized modules is only supported through state_dict()"
NO_PICKLES = {*PARAMETRIZED, "own_parametrization"}


def torch_save(learn):
    file = io.BytesIO()
    torch.save(learn, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickle_round(learn):
    return pickle.loads(pickle.dumps(learn))


def cloud(learn):
    return cloudpickle.loads(cloudpickle.dumps(learn))


# tensors that are not float32, that are shared, that are no parameters and no buffers
BOTH = "tied_to_embedding used_twice buffers double complex odd_shapes pruned int8_weights hooks"
COPIES = [(k, torch_save if k in ODD_NAMES else copy.deepcopy) for k in FEWER]
COPIES += [(k, copy.deepcopy if k in ODD_NAMES else torch_save) for k in BOTH.split()]


@pytest.mark.parametrize("name, copied", COPIES)
def test_a_copy_trains_on(name, copied):
    """With masters of its own, in one vector or not."""
    flat = list(MODELS).index(name) % 4 > 1
    precision = "fp16" if flat else "bf16"
    learn = learner(name, precision, flat)
    learn.fit(1, 0.05)
    if copied is torch_save and name in NO_PICKLES:
        with pytest.raises((RuntimeError, AttributeError), match="[Ss]erialization|pickle"):
            copied(learn)
        return
    twin = copied(learn)
    before = state(learn)
    twin.fit(1, 0.05)
    assert_same(state(learn), before)  # the copy shares nothing
    learn.fit(1, 0.05)
    assert_same(state(twin), state(learn))
    assert_same(state(twin.to_fp32()), state(learn.to_fp32()))


@pytest.mark.parametrize("name", ["tied_to_embedding", "used_twice", "buffers", "lstm_projected"])
def test_a_copy_of_a_16_bit_model_is_a_plain_one(name):
    """It predicts what the learner does back in 32 bits, and ties what was tied."""
    learn = fit(learner(name, "fp16", True))
    ways = cloud, pickle_round, torch_save, copy.deepcopy
    twins = [copied(learn.model).eval() for copied in ways]
    for twin in twins:
        assert_same(dict(twin.state_dict()), dict(learn.model.state_dict()))
        assert len(list(twin.parameters())) == len(list(learn.model.parameters()))
    learn.to_fp32().model.eval()
    x = learn.dls.valid.one_batch()[0]
    with torch.no_grad():
        for twin in twins:
            assert_same(twin(x), learn.model(x))


# Parametrizations


@IN_HALVES
@pytest.mark.parametrize("name", [*PARAMETRIZED, "old_weight_norm", "old_spectral_norm"])
def test_a_layer_with_a_parametrization_computes_in_16_bits(name, precision):
    """Its weight is what plain fastai's is, rounded a few times; its masters are the originals."""
    learn, plain = learner(name, precision), learner(name)
    seen = []
    learn.model[0].register_forward_hook(
        lambda m, args, out: seen.append((args[0].dtype, out.dtype))
    )
    learn.fit(1, 0.0)
    assert set(seen) == {(HALVES[precision], HALVES[precision])}
    names = {k for k, _ in plain.model.named_parameters()}
    assert {k for k, _ in learn.model.named_parameters()} == names
    assert set(weights(learn)) == set(weights(plain))
    originals = {k: p.detach() for k, p in plain.model.named_parameters()}
    assert_same(dict(zip(originals, masters(learn), strict=True)), originals)
    plain.fit(1, 0.0)
    tolerance = 4 * torch.finfo(HALVES[precision]).eps
    torch.testing.assert_close(
        learn.model[0].weight.float(), plain.model[0].weight, rtol=tolerance, atol=tolerance
    )


@FLAT
@IN_HALVES
def test_orthogonal_stays_orthogonal(precision, flat):
    """After training in 16 bits the layer's weight is a rotation, but for rounding."""
    learn = fit(learner("orthogonal", precision, flat)).to_fp32()
    w = learn.model[0].weight.detach()
    torch.testing.assert_close(w @ w.T, torch.eye(6), rtol=0, atol=1e-5)


@FLAT
@IN_HALVES
def test_pruned_weights_stay_zero(precision, flat):
    learn = fit(learner("pruned", precision, flat))
    mask = learn.model[0].weight_mask
    assert 0 < mask.sum() < mask.numel() and mask.unique().tolist() == [0, 1]
    learn.to_fp32()
    prune.remove(learn.model[0], "weight")
    assert (learn.model[0].weight[mask == 0] == 0).all()


# Norms: which type, and why


# Norm: its weights' type in a 16-bit model on a CPU, its input, the largest error of
# (output, gradient of the input, of the weights), in roundings of the 16-bit type.
# A CPU's kernels take 16-bit inputs with weights of 32 bits or of 16. Batch and instance norms
# keep 32: with 16 their running statistics are lost. The others have no statistics, other
# devices want one type for input and weights, and from 16-bit weights the numbers are as good.
ACCURACY = {
    "batch_norm": (nn.BatchNorm2d, torch.float32, (1, 2, 1)),
    "sync_batch_norm": (nn.SyncBatchNorm, torch.float32, (1, 2, 1)),
    "instance_norm": (partial(nn.InstanceNorm2d, affine=True), torch.float32, (1, 2, 1)),
    "instance_norm_stats": (
        partial(nn.InstanceNorm2d, affine=True, track_running_stats=True),
        torch.float32,
        (1, 2, 1),
    ),
    "group_norm": (partial(nn.GroupNorm, 2), None, (1, 4, 4)),
    "layer_norm": (lambda n: nn.LayerNorm([n, 8, 8]), None, (1, 4, 4)),
    "rms_norm": (lambda n: nn.RMSNorm([n, 8, 8]), None, (1, 4, 4)),
    "local_response_norm": (lambda n: nn.LocalResponseNorm(3), None, (3, 3, 0)),
}


class PassOn(nn.Module):
    """The rest of a model: something to train."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x


@HALF
@pytest.mark.parametrize("name", ACCURACY)
def test_norms_are_exact_but_for_a_few_roundings(name, dtype):
    """In a 16-bit learner's model, against the same numbers in 64 bits."""
    make, kept, bounds = ACCURACY[name]
    norm = make(8)
    for p in norm.parameters():
        nn.init.uniform_(p, 0.5, 1.5)
    model = nn.Sequential(norm, PassOn())
    make_learner(model=model, dls=make_dls(*floats(8, 8, 8))).to_fp16(dtype=dtype)
    exact = make(8).double()
    exact.load_state_dict(norm.state_dict())
    with torch.no_grad():
        for p, q in zip(norm.parameters(), exact.parameters(), strict=True):
            assert p.dtype == (kept or dtype)
            q.copy_(p)
    x = floats(8, 8, 8)[0].to(dtype).requires_grad_()
    g = torch.randn(x.shape).to(dtype)
    out = model(x)
    assert out.dtype == torch.float32 and torch.equal(out, out.to(dtype).float())
    out.backward(g.float())
    x64 = x.detach().double().requires_grad_()
    out64 = exact(x64)
    out64.backward(g.double())
    assert_near(out, out64, dtype, bounds[0])
    assert_near(x.grad, x64.grad, dtype, bounds[1])
    for p, q in zip(norm.parameters(), exact.parameters(), strict=True):
        assert_near(p.grad, q.grad, dtype, bounds[2])


def assert_near(found, exact, dtype, roundings):
    """Assert that the largest error is so many halves of `eps`, of the largest number."""
    error = (found.detach().double() - exact).abs().max() / exact.abs().max()
    assert error <= roundings * torch.finfo(dtype).eps / 2


@IN_HALVES
@pytest.mark.parametrize("name", ["batch_norm", "instance_norm_stats"])
def test_running_statistics_are_in_32_bits(name, precision):
    """Steps of a tenth of what is missing would be lost in 16 bits."""
    norm = fit(learner(name, precision)).model[1]
    assert norm.running_mean.dtype == norm.running_var.dtype == torch.float32
    assert norm.num_batches_tracked.dtype == torch.int64
    assert norm.num_batches_tracked == (4 if name == "batch_norm" else 0)  # as PyTorch counts


# Sparse gradients, groups


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.emb, self.head = nn.Embedding(10, 4, sparse=sparse), head(4)

    def forward(self, x):
        return self.head(self.emb(x).mean(1))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("opt", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_sparse_embedding_trains_as_a_dense_one(opt, precision):
    """Each word's row gets the same update; a sum in another order may round it differently."""
    results = []
    for sparse in (True, False):
        learn = make_learner(
            torch_optimizer(opt), lambda s=sparse: Words(s), dls=make_dls(*tokens())
        ).to_fp16(dtype=PRECISIONS[precision])
        learn.fit(2, 0.1)
        results.append(weights(learn.to_fp32()))
    way = distance(results[1], weights(make_learner(model=lambda: Words(True))))
    tolerance = {"fp32": 1e-4, "fp16": 0.01, "bf16": 0.05}[precision]
    assert distance(*results) < tolerance * way


@FLAT
@IN_HALVES
def test_state_made_at_the_start_is_in_32_bits(precision, flat):
    """Adagrad makes its sums when it is built; squares of gradients are too small for float16."""
    ends = []
    for p in (None, precision):
        learn = learner("used_twice", p, flat, opt=torch_optimizer(torch.optim.Adagrad, lr=0.1))
        if p is not None:
            learn.create_opt()
            assert learn.opt.state_dict()["state"][0]["sum"].dtype == torch.float32
        learn.fit(2, 0.1)
        ends.append(weights(learn.to_fp32()))
    way = distance(ends[0], weights(learner("used_twice")))
    assert distance(ends[1], ends[0]) < {"fp16": 0.01, "bf16": 0.1}[precision] * way


def shared_groups(model):
    return [list(model.one.parameters()), [*model.one.parameters(), *model.head.parameters()]]


def distinct_groups(model):
    return [list(model.one.parameters()), list(model.head.parameters())]


@FLAT
@IN_HALVES
@pytest.mark.parametrize("opt", ["sgd", "torch_sgd"])
def test_a_parameter_in_two_groups_is_refused(opt, precision, flat):
    """As torch.optim does; fastai's own optimizers would step it twice. Nothing is changed."""
    refused = pytest.raises(ValueError, match="two groups|more than one parameter group")
    learn = learner("used_twice", opt=opt, splitter=shared_groups)
    before = everything(learn.model)
    if flat:
        with refused:
            learn.to_fp16(dtype=HALVES[precision], flat_master=True)
        assert_same(everything(learn.model), before)
        return
    learn.to_fp16(dtype=HALVES[precision])
    for first in (learn.create_opt, learn.freeze, lambda: learn.fit(1)):
        with refused:
            first()
        assert learn.opt is None and not learn.mp_cb.mixed.has_opt
    assert_same(everything(learn.to_fp32().model), before)


@FLAT
def test_a_layer_used_in_two_groups_counts_in_the_first(flat):
    """A layer with two names, in one group: discriminative rates are plain fastai's."""
    runs = []
    for precision in (None, "fp32"):
        learn = learner("used_twice", precision, flat, splitter=distinct_groups)
        learn.fit_one_cycle(1, slice(0.01, 0.1), wd=0.1)
        runs.append(state(learn.to_fp32()))
    assert_same(*runs[::-1])


@pytest.mark.parametrize("name", ["tied_to_embedding", "used_twice"])
@FLAT
@IN_HALVES
def test_what_is_tied_stays_tied(name, precision, flat):
    learn = fit(learner(name, precision, flat))
    for _ in range(2):
        m = learn.model
        pair = (m.out.weight, m.emb.weight) if name[0] == "t" else (m.one.weight, m.again.weight)
        assert pair[0] is pair[1]
        saved = learn.model.state_dict()
        names = ("out.weight", "emb.weight") if name[0] == "t" else ("one.weight", "again.weight")
        assert_same(*(saved[k] for k in names))
        learn.to_fp32()


# Buffers


@IN_HALVES
def test_buffers_keep_their_type(precision):
    """Integers, bools and complex numbers are what they were; they count and are read."""
    model = fit(learner("buffers", precision)).model
    types = {"steps": torch.int64, "small": torch.uint8, "mask": torch.bool}
    types |= {"phase": torch.complex64}
    assert {k: getattr(model, k).dtype for k in types} == types
    assert model.steps == 4 and model.small == 7 and model.nothing is None
    assert model.table.dtype == HALVES[precision] and "table" not in model.state_dict()
    assert model.state_dict()["running"].dtype == torch.float32


class Replacing(nn.Module):
    """A buffer that training replaces, in one of many ways."""

    def __init__(self, how):
        super().__init__()
        self.lin, self.how = nn.Linear(6, 2), how
        self.register_buffer("kept", torch.full((6,), 0.1))
        self.register_buffer("late", None)

    def forward(self, x):
        if self.training:
            self.replace(x.detach())
        return self.lin(x)

    def replace(self, x):
        if self.how == "values":
            self.kept = x.mean(0)
        elif self.how == "longer":
            self.kept = torch.cat([self.kept, x[:1, 0].to(self.kept.dtype)])
        elif self.how == "none":
            self.kept = None
        elif self.how == "deleted" and "kept" in self._buffers:
            del self.kept
        elif self.how == "integers":
            self.kept = torch.arange(6)
        elif self.how == "double":
            self.kept = x.double().mean(0)
        elif self.how == "late":
            self.late = x.mean(0)
        elif self.how == "registered" and "new" not in self._buffers:
            self.register_buffer("new", x.mean(0))


WAYS_TO_REPLACE = "values longer none deleted integers double late registered".split()


def replacing_learner(how, precision, **kwargs):
    learn = make_learner(model=lambda: Replacing(how), dls=make_dls(*floats(6)), **kwargs)
    return learn if precision is None else learn.to_fp16(dtype=PRECISIONS[precision])


@cache
def replaced(how, precision=None):
    learn = replacing_learner(how, precision)
    learn.fit(1, 0.05)
    learn.fit(1, 0.05)
    saved = weights(learn)
    assert_same(weights(learn.to_fp32()), saved)
    learn.fit(1, 0.05)
    return everything(learn.model)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("how", WAYS_TO_REPLACE)
def test_a_buffer_that_is_replaced_in_training(how, precision):
    """Two fits, `to_fp32`, a fit: what plain fastai ends with, in its types and shapes."""
    tolerance = {"fp32": 0.0, "fp16": 4e-3, "bf16": 3e-2}[precision]
    torch.testing.assert_close(
        replaced(how, precision), replaced(how), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("how", ["none", "deleted", "longer", "late", "registered"])
def test_a_skipped_batch_and_a_buffer_that_was_replaced(how):
    """The batch is taken back; the fit goes on, though the buffer is another one by now."""
    learn = replacing_learner(how, "fp16")
    poison = Do("after_backward", overflow, at=1)
    learn.fit(1, 0.05, cbs=poison)
    assert learn.mp_cb.n_skipped == 1
    assert all(w.isfinite().all() for w in weights(learn.to_fp32()).values())


def overflow(learn):
    learn.model.lin.weight.grad.fill_(float("inf"))


@FLAT
@IN_HALVES
def test_a_checkpoint_changes_buffers(precision, flat, tmp_path):
    """What a file says is in the buffers afterwards, in 32 bits where they are saved."""
    plain = fit(learner("buffers", path=tmp_path))
    plain.save("trained")
    learn = learner("buffers", precision, flat, path=tmp_path).load("trained")
    assert_same(weights(learn), weights(plain))
    assert learn.model.steps == 4 and learn.model.running.dtype == HALVES[precision]
    assert_same(learn.model.running, plain.model.running.to(HALVES[precision]))
    learn.model.eval()
    assert_same(everything(learn.to_fp32().model), everything(plain.model))


# What a user does to a model between fits


def new_data(learn):
    for p in learn.model.parameters():
        p.data = p.data / 2


def new_values(learn):
    with torch.no_grad():
        learn.model[0].weight.fill_(0.25)


def new_parameter(learn):
    learn.model[0].weight = nn.Parameter(torch.full((6, 6), 0.25))


def new_parameter_and_optimizer(learn):
    new_parameter(learn)
    learn.create_opt()


def exchanged_parameters(learn):
    a, b = learn.model[0], learn.model[1]
    a.weight, b.weight = b.weight, a.weight


def frozen_by_hand(learn):
    learn.model[0].weight.requires_grad_(False)


def frozen_for_good(learn):
    learn.model[0].requires_grad_(False)
    learn.create_opt()


def thawed(learn):
    for p in learn.model.parameters():
        p.requires_grad_(not p.requires_grad)
    learn.model[0].requires_grad_(True)
    learn.model[2].requires_grad_(True)


def a_gradient_gone(learn):
    learn.model[0].weight.grad = None


CHANGES = [
    new_data, new_values, new_parameter, new_parameter_and_optimizer, exchanged_parameters,
    frozen_by_hand, frozen_for_good, thawed, a_gradient_gone,
]  # fmt: skip


def square_net():
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), head(6))


@cache
def changed(change, precision=None, flat=False):
    learn = make_learner(model=square_net, dls=make_dls(*floats(6)))
    if precision is not None:
        learn.to_fp16(dtype=PRECISIONS[precision], flat_master=flat)
    learn.fit(1, 0.05, wd=0.1)
    change(learn)
    learn.fit(1, 0.05, wd=0.1)
    learn.to_fp32()
    return snapshot(learn)


EACH_CHANGE = pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)


@FLAT
@EACH_CHANGE
def test_a_change_between_fits_is_plain_fastais_in_float32(change, flat):
    assert_same(changed(change, "fp32", flat), changed(change))


@EACH_CHANGE
def test_a_change_between_fits_in_16_bits(change):
    """Flat is each, and both are near plain fastai."""
    precision = ("fp16", "bf16")[CHANGES.index(change) % 2]
    each, flat = (changed(change, precision, flat) for flat in (False, True))
    assert_same(flat, each)
    tolerance = {"fp16": 2e-3, "bf16": 1e-2}[precision]
    torch.testing.assert_close(
        each["weights"], changed(change)["weights"], rtol=tolerance, atol=tolerance
    )


def shared(learn):
    learn.model.share_memory()


def own_memory(learn):
    for p in learn.model.parameters():
        p.data = p.data.clone()


NO_CHANGES = {
    "double": lambda learn: learn.model.double(),
    "half": lambda learn: learn.model.half(),
    "bfloat16": lambda learn: learn.model.bfloat16(),
    "float": lambda learn: learn.model.float(),
    "float_and_half": lambda learn: learn.model.float().half().float(),
    "to_cpu": lambda learn: learn.model.to("cpu"),
    "to_cpu_float": lambda learn: learn.model.to("cpu", torch.float32),
    "share_memory": shared,
    "own_memory": own_memory,
    "eval": lambda learn: learn.model.eval(),
    "zero_grad": lambda learn: learn.model.zero_grad(set_to_none=False),
    "requires_grad": lambda learn: learn.model.requires_grad_(False).requires_grad_(True),
}


@cache
def unchanged(name, precision, flat):
    """Train with what changes nothing between the fits; return the end."""
    learn = make_learner(model=partial(normed, "group_norm"), dls=make_dls(*PICTURES()))
    learn.to_fp16(dtype=HALVES[precision], flat_master=flat)
    learn.fit(1, 0.05, wd=0.1)
    if name is not None:
        before = masters(learn)
        NO_CHANGES[name](learn)
        learn.fit(0)
        assert_same(masters(learn), before)
        assert learn.model[0].weight.dtype == HALVES[precision]
    learn.fit(1, 0.05, wd=0.1)
    return [bits(learn), everything(learn.to_fp32().model)]


@FLAT
@pytest.mark.parametrize("name", NO_CHANGES)
def test_what_changes_no_weight_changes_no_bit(name, flat):
    """A cast, a move or new memory between fits: masters, and the end of training, are the same.

    (A cast between float16 and bfloat16 does change weights; and one to 16 bits those of a
    BatchNorm, which are in 32: nobody can tell it from a user who writes what is rounded.)
    """
    in_bf16 = (list(NO_CHANGES).index(name) % 2 == 1) == flat
    precision = {"half": "fp16", "float_and_half": "fp16", "bfloat16": "bf16"}.get(
        name, "bf16" if in_bf16 else "fp16"
    )
    assert_same(unchanged(name, precision, flat), unchanged(None, precision, flat))


# Layers that come late, and models that cannot be taken


def lazy_net():
    return nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(2))


@FLAT
@IN_HALVES
def test_a_lazy_model_is_refused_until_its_first_batch(precision, flat):
    """There are no weights yet to keep in 32 bits: the message says what to do; then it trains."""
    learn = make_learner(model=lazy_net, dls=make_dls(*floats(6)))
    with pytest.raises((ValueError, MixedPrecisionError), match="run a batch through"):
        learn.to_fp16(dtype=HALVES[precision], flat_master=flat)
    learn.model(learn.dls.one_batch()[0])
    before = everything(learn.model)
    learn.to_fp16(dtype=HALVES[precision], flat_master=flat)
    assert {p.dtype for p in learn.model.parameters()} == {HALVES[precision]}
    assert_same(everything(learn.to_fp32().model), before)
    learn.to_fp16(dtype=HALVES[precision], flat_master=flat).fit(1, 0.05)
    assert distance(everything(learn.to_fp32().model), before) > 0.01


class LateHead(nn.Module):
    """Its head is made by the first batch, in that batch's type."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x):
        if not hasattr(self, "head"):
            torch.manual_seed(3)
            self.head = head(6).to(x.dtype)
        return self.head(torch.tanh(self.lin(x)))


@FLAT
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_layer_that_comes_late_is_trained_once_the_optimizer_knows_it(precision, flat):
    """As in plain fastai: not in the first fit; it has a master from the next epoch on."""
    ends = []
    for p in (None, precision):
        learn = make_learner(model=LateHead, dls=make_dls(*floats(6)))
        if p is not None:
            learn.to_fp16(dtype=PRECISIONS[p], flat_master=flat)
        learn.fit(2, 0.05)
        late = weights(learn)["head.weight"]
        learn.create_opt()
        learn.fit(1, 0.05)
        assert not torch.equal(weights(learn)["head.weight"].float(), late.float())
        learn.to_fp32()
        ends.append(snapshot(learn))
    tolerance = {"fp32": 0.0, "fp16": 2e-3, "bf16": 1e-2}[precision]
    torch.testing.assert_close(ends[1], ends[0], rtol=tolerance, atol=tolerance)


@FLAT
@IN_HALVES
def test_a_scripted_model_is_refused_and_left_alone(precision, flat):
    """TorchScript modules take no hooks, so that nobody would see masters in their files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that scripting is old
        model = torch.jit.script(mlp())
    learn = make_learner(model=model, dls=make_dls(*floats(6)))
    before = everything(learn.model)
    with pytest.raises(MixedPrecisionError, match="[Ss]cript"):
        learn.to_fp16(dtype=HALVES[precision], flat_master=flat)
    assert_same(everything(learn.model), before)
    learn.fit(1, 0.05)


# Gradient checkpointing, masks, losses


def test_checkpointing_without_reentry_and_without_context_in_float16():
    """The repeated pass is outside of the mode that computes fp16 on such a CPU, and right."""
    learn = make_learner(
        model=lambda: Checkpointed(use_reentrant=False), dls=make_dls(*floats(6))
    ).to_fp16()
    before = masters(learn)
    learn.fit(1, 0.05)
    after = masters(learn)
    assert all(w.isfinite().all() for w in after) and not torch.equal(after[0], before[0])
    for kwargs in ({"dtype": torch.bfloat16}, {"native": True}, {"dtype": torch.float32}):
        learn.to_fp16(**kwargs).fit(1, 0.05)
        assert not any(map(torch.equal, masters(learn), before))


@IN_HALVES
def test_checkpointing_changes_no_bit(precision):
    """Without it the same model trains to the same bits: forward is repeated in the same types."""
    kwargs = {"use_reentrant": False}
    if precision == "fp16":
        kwargs["context_fn"] = same_context
    ends = []
    for make in (lambda: Checkpointed(**kwargs), Unchecked):
        learn = make_learner(model=make, dls=make_dls(*floats(6)))
        fit(learn.to_fp16(dtype=HALVES[precision]))
        ends.append(bits(learn))
    assert_same(*ends)


class Unchecked(Checkpointed):
    def forward(self, x):
        return self.head(self.body(self.first(x)))


class Masked(nn.Module):
    """Attention whose mask has a type that the user chose."""

    def __init__(self, dtype):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), head(6)
        self.dtype = dtype

    def forward(self, x):
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        if self.dtype is not torch.bool:
            dtype = x.dtype if self.dtype is None else self.dtype
            mask = torch.zeros(5, 5, dtype=dtype).masked_fill(mask, float("-inf"))
        return self.head(self.attention(x, x, x, attn_mask=mask)[0].mean(1))


@IN_HALVES
def test_masks_of_bools_and_of_minus_infinity_are_the_same(precision):
    ends = []
    for dtype in (torch.bool, None):
        learn = make_learner(model=partial(Masked, dtype), dls=make_dls(*SEQUENCES()))
        ends.append(bits(fit(learn.to_fp16(dtype=HALVES[precision]))))
    assert all(m.isfinite().all() for m in ends[0]["masters"])
    assert_same(*ends)


def test_a_float32_mask_in_a_16_bit_attention():
    """PyTorch's attention wants one type: under autocast, from the first batch, it has one."""
    learn = make_learner(model=partial(Masked, torch.float32), dls=make_dls(*SEQUENCES()))
    if not has_arithmetic("cpu", torch.float16):
        same = make_learner(model=partial(Masked, None), dls=make_dls(*SEQUENCES()))
        assert_same(bits(fit(learn.to_fp16())), bits(fit(same.to_fp16())))
    before = masters(learn.to_bf16())
    after = masters(fit(learn))
    assert all(w.isfinite().all() for w in after) and not torch.equal(after[0], before[0])


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


def ctc(pred, y):
    """Return the CTC loss of the words 1 2 and 2 1."""
    assert pred.dtype == torch.float32
    words = torch.stack([y + 1, 2 - y], 1)
    lengths = torch.full((len(y),), 5), torch.full((len(y),), 2)
    return F.ctc_loss(pred.log_softmax(-1).transpose(0, 1), words, *lengths)


@FLAT
@IN_HALVES
def test_ctc(precision, flat):
    """A loss that PyTorch has in 32 bits only."""
    ends = []
    for p in (None, precision):
        learn = make_learner(model=Speech, dls=make_dls(*SEQUENCES()), loss_func=ctc)
        if p is not None:
            learn.to_fp16(dtype=HALVES[p], flat_master=flat)
        ends.append(weights(fit(learn).to_fp32()))
    way = distance(ends[0], weights(make_learner(model=Speech)))
    assert distance(ends[1], ends[0]) < {"fp16": 0.004, "bf16": 0.02}[precision] * way


# Wrappers and hooks


@IN_HALVES
@pytest.mark.parametrize("name", ["wrapper", "data_parallel", "compiled"])
def test_a_wrapper_trains_what_it_wraps(name, precision):
    """The same bits as the model without its wrapper, under the wrapper's names."""
    prefix = "_orig_mod." if name == "compiled" else "module."
    learn = make_learner(model=mlp, dls=make_dls(*floats(6)))
    fit(learn.to_fp16(dtype=HALVES[precision]))
    inside = {prefix + k: v for k, v in learn.to_fp32().model.state_dict().items()}
    assert_same(trained(name, precision).after, inside)


@IN_HALVES
def test_hooks_of_the_users_see_16_bits(precision):
    learn, seen = learner("hooks", precision), []
    learn.model[0].register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    learn.model[2].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].dtype))
    learn.fit(1, 0.05)
    assert set(seen) == {HALVES[precision]} and len(seen) == 2 * 2 + 1
    assert len(learn.model[0]._forward_hooks) == 2  # and they are all still there
    learn.to_fp32()
    assert len(learn.model[0]._forward_hooks) == 2 and "forward" not in vars(learn.model)


@FLAT
def test_a_layer_that_no_batch_used_has_its_start(flat):
    """No gradient, no step, no decay: the masters' bits are those of the beginning."""
    start = learner("some_batches").model.never.weight.detach().clone()
    for precision in HALVES:
        after = trained("some_batches", precision, flat).after
        assert_same(after["never.weight"], start)
        assert not torch.equal(after["sometimes.weight"], start)
