"""Small networks for laws: a stem, a few layers of any kind, a head.

A `Net` is a nested named tuple: its `repr` can be pasted, and everything in it can be dropped.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

DEVICE = os.environ.get("MIXEDFP_TEST_DEVICE", "cpu")  # of models and data
torch.set_num_threads(1)  # these tensors are tiny: a second thread would only wait

# Layers: from (n, 4), (n, 4, 3, 3) or (n, 3, 4), by what goes in, to the same


class Scale(nn.Module):
    """Multiply by a parameter of no dimension."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.scale * x


class Counter(nn.Module):
    """Keep buffers of its own: a count, an average that goes into the output, a late one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("last", None)
        self.register_buffer("mask", torch.tensor(True), persistent=False)

    def forward(self, x):
        if self.training:
            self.count += 1
            self.mean.lerp_(x.detach().mean().to(self.mean.dtype), 0.25)
            self.last = x.detach().amax()
        return (x - self.mean) * self.mask


class Cell(nn.Module):
    """A recurrent layer, over a sequence or a single element."""

    def __init__(self, kind, packed=False):
        super().__init__()
        self.cell, self.packed = kind(4, 4, batch_first=True), packed

    def forward(self, x):
        seq = x if x.ndim == 3 else x.unsqueeze(1)
        if self.packed:
            lengths = torch.arange(len(seq)) % seq.shape[1] + 1
            packed = nn.utils.rnn.pack_padded_sequence(seq, lengths, True, enforce_sorted=False)
            out = nn.utils.rnn.pad_packed_sequence(
                self.cell(packed)[0], batch_first=True, total_length=seq.shape[1]
            )[0]
        else:
            out = self.cell(seq)[0]
        return out if x.ndim == 3 else out.squeeze(1)


class Attention(nn.Module):
    """Attend to oneself, with the module of torch, masked, or with its function."""

    def __init__(self, module):
        super().__init__()
        self.module = nn.MultiheadAttention(4, 2, batch_first=True) if module else None
        self.qkv = None if module else nn.Linear(4, 12)

    def forward(self, x):
        seq = x if x.ndim == 3 else x.unsqueeze(1)
        if self.module is not None:
            n = seq.shape[1]
            mask = seq.new_full((n, n), float("-inf")).triu(1)
            seq = self.module(seq, seq, seq, attn_mask=mask, need_weights=False)[0]
        else:
            q, k, v = self.qkv(seq).unsqueeze(1).chunk(3, -1)
            seq = scaled_dot_product_attention(q, k, v).squeeze(1)
        return seq if x.ndim == 3 else seq.squeeze(1)


class Recomputed(nn.Module):
    """A layer whose activations are computed a second time in the backward pass."""

    def __init__(self, layer, reentrant=False):
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


class Channels(nn.Module):
    """A layer over the channels, which sequences have last."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.transpose(1, 2)).transpose(1, 2) if x.ndim == 3 else self.layer(x)


class Positions(nn.Module):
    """Add positions, made in 32 bits in the forward pass."""

    def __init__(self, mix):
        super().__init__()
        self.mix = mix

    def forward(self, x):
        return self.mix(x + torch.linspace(-0.5, 0.5, x.shape[-1], device=x.device))


class Empty(nn.Module):
    """Hold parameters without elements."""

    def __init__(self):
        super().__init__()
        self.empty, self.rows = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0, 4))

    def forward(self, x):
        return x + self.empty.sum() + self.rows.sum()


class Double(nn.Module):
    """Multiply by a frozen parameter and a buffer of 64 bits."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.tensor(1 / 7, dtype=torch.float64), requires_grad=False)
        self.register_buffer("wide", torch.tensor(1 / 3, dtype=torch.float64))

    def forward(self, x):
        return x * (1 + self.table * self.wide).to(x.dtype)


class Complex(nn.Module):
    """Multiply by the size of a trained complex number."""

    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.tensor(0.6 + 0.8j))

    def forward(self, x):
        return x * self.phase.abs().to(x.dtype)


class Many(nn.Module):
    """Very many very small parameters."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([torch.rand(3) + 0.5 for _ in range(100)])
        self.named = nn.ParameterDict({"shift": torch.rand(()) - 0.5})

    def forward(self, x):
        return torch.tanh(x * torch.stack(list(self.scales)).mean() + self.named["shift"])


class Quantized(nn.Module):
    """A frozen layer whose weight is kept in 8 bits, with a scale."""

    def __init__(self):
        super().__init__()
        w = torch.randn(4)
        self.register_buffer("scale", w.abs().max() / 100)
        self.register_buffer("weight", (w / self.scale).to(torch.int8))

    def forward(self, x):
        return x * (self.weight.to(x.dtype) * self.scale).mean()


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
    """Call it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return Square.apply(torch.tanh(x), self.scale)


class Twice(nn.Module):
    """One layer, called twice and known by two names."""

    def __init__(self, layer):
        super().__init__()
        self.one = self.again = layer

    def forward(self, x):
        return self.again(torch.tanh(self.one(x)))


def _half_input(module, args):
    return (args[0] * 0.5,)


def _half_output(module, args, out):
    return out * 0.5


def _half_grad(module, grad_in, grad_out):
    return (grad_in[0] * 0.5,)


def hooked(inputs):
    """Return a layer with hooks of the user's: on the way there, and on the way back."""
    layer = mix(inputs)
    layer.register_forward_pre_hook(_half_input)
    layer.register_forward_hook(_half_output)
    layer.register_full_backward_hook(_half_grad)
    return layer


def pruned(inputs):
    """Return a layer of which PyTorch's pruning has taken half."""
    layer = mix(inputs)
    prune.l1_unstructured(layer, "weight", 0.5)
    return layer


def mix(inputs, bias=True):
    """Return a layer that mixes features."""
    return nn.Conv2d(4, 4, 1, bias=bias) if inputs == "images" else nn.Linear(4, 4, bias=bias)


def norm(inputs):
    """Return a norm with running statistics."""
    return nn.BatchNorm2d(4) if inputs == "images" else Channels(nn.BatchNorm1d(4))


def shape_of(inputs):
    """Return the shape of what a norm over features takes."""
    return [4, 3, 3] if inputs == "images" else 4


def wide(inputs):
    """Return two layers with a few hundred weights in between."""
    if inputs == "images":
        return nn.Sequential(nn.Conv2d(4, 9, 3, padding=1), nn.ReLU(), nn.Conv2d(9, 4, 1))
    return nn.Sequential(nn.Linear(4, 33), nn.ReLU(), nn.Linear(33, 4))


def on_sequences(layer, otherwise):
    """Return what makes a layer that images have no use for."""
    return lambda inputs: otherwise(inputs) if inputs == "images" else layer()


def on_pictures(layer, otherwise=mix):
    """Return what makes a layer that takes nothing but images."""
    return lambda inputs: layer() if inputs == "images" else otherwise(inputs)


LAYERS: dict[str, Callable[[str], nn.Module]] = {
    "mix": mix,
    "plain_mix": lambda inputs: mix(inputs, bias=False),
    "wide": wide,
    "norm": norm,
    "layer_norm": lambda inputs: nn.LayerNorm(shape_of(inputs)),
    "rms_norm": lambda inputs: nn.RMSNorm(shape_of(inputs)),
    "group_norm": lambda inputs: Channels(nn.GroupNorm(2, 4)),
    "instance_norm": on_pictures(
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), norm
    ),
    "relu": lambda inputs: nn.ReLU(),
    "gelu": lambda inputs: nn.GELU(),
    "tanh": lambda inputs: nn.Tanh(),
    "dropout": lambda inputs: nn.Dropout(0.25),
    "prelu": lambda inputs: nn.PReLU(),
    "scale": lambda inputs: Scale(),
    "counter": lambda inputs: Counter(),
    "lstm": on_sequences(lambda: Cell(nn.LSTM), mix),
    "gru": on_sequences(lambda: Cell(nn.GRU), norm),
    "packed_gru": on_sequences(lambda: Cell(nn.GRU, True), mix),
    "attention": on_sequences(lambda: Attention(True), mix),
    "own_attention": on_sequences(lambda: Attention(False), mix),
    "transposed": on_pictures(lambda: nn.ConvTranspose2d(4, 4, 3, padding=1)),
    "weight_norm": lambda inputs: parametrizations.weight_norm(mix(inputs)),
    "spectral_norm": lambda inputs: parametrizations.spectral_norm(mix(inputs)),
    "pruned": pruned,
    "recomputed": lambda inputs: Recomputed(mix(inputs)),
    "recomputed_reentrant": lambda inputs: Recomputed(mix(inputs), True),
    "positions": lambda inputs: Positions(mix(inputs)),
    "empty": lambda inputs: Empty(),
    "double": lambda inputs: Double(),
    "complex": lambda inputs: Complex(),
    "many": lambda inputs: Many(),
    "quantized": lambda inputs: Quantized(),
    "own_function": lambda inputs: OwnFunction(),
    "twice": lambda inputs: Twice(mix(inputs)),
    "hooked": hooked,
}
NO_PICKLE = {"weight_norm", "spectral_norm"}  # PyTorch's own refuses
STEMS = {
    "vectors": lambda: nn.Linear(5, 4),
    "images": lambda: nn.Conv2d(3, 4, 2),  # of 4 by 4 pixels: 3 by 3 are left
    "words": lambda: nn.Embedding(7, 4),
    "padded": lambda: nn.Embedding(7, 4, padding_idx=0),
}


class Layer(NamedTuple):
    """A layer, how its input goes on, and on which batches it is there."""

    kind: str
    residual: bool = False  # its output is added to its input
    tied: bool = False  # its weight is that of the layer before it of this kind
    used: str = "always"  # or "never", or "sometimes": on every other batch


class Net(NamedTuple):
    """A network: a stem for its inputs, layers, a head for two classes."""

    inputs: str = "vectors"
    layers: tuple[Layer, ...] = ()

    def build(self):
        """Make the model."""
        return Built(self).to(DEVICE)

    def batch(self, seed, n=4):
        """Return `n` inputs and their classes."""
        rng = torch.Generator().manual_seed(seed)
        y = torch.randint(2, (n,), generator=rng).to(DEVICE)
        if self.inputs in ("words", "padded"):
            return torch.randint(7, (n, 3), generator=rng).to(DEVICE), y
        dims = (5,) if self.inputs == "vectors" else (3, 4, 4)
        return torch.randn(n, *dims, generator=rng).to(DEVICE), y

    @property
    def can_be_pickled(self):
        """Whether PyTorch itself pickles the model."""
        return not NO_PICKLE & {layer.kind for layer in self.layers}


class Built(nn.Module):
    """The model of a `Net`. A copy counts on from where the other one was; a count is no buffer."""

    def __init__(self, net):
        super().__init__()
        self.net, self.count, last = net, 0, {}
        self.stem, self.head = STEMS[net.inputs](), nn.Linear(4, 2)
        self.layers = nn.ModuleList(LAYERS[k.kind](net.inputs) for k in net.layers)
        for layer, spec in zip(self.layers, net.layers, strict=True):
            if spec.tied and spec.kind in last and isinstance(layer, nn.Linear | nn.Conv2d):
                layer.weight = last[spec.kind].weight
            last[spec.kind] = layer

    def forward(self, x):
        self.count += self.training
        x = self.stem(x)
        for layer, spec in zip(self.layers, self.net.layers, strict=True):
            if spec.used == "always" or (spec.used == "sometimes" and self.count % 2):
                x = x + layer(x) if spec.residual else layer(x)
        if x.ndim == 3:
            x = x.mean(1)
        return self.head(x.flatten(2).mean(2) if x.ndim > 2 else x)


def _net(kind, inputs="vectors"):
    return Net(inputs, (Layer("mix"), Layer("tanh"), Layer(kind), Layer("tanh")))


ON_PICTURES = "instance_norm", "transposed", "norm", "group_norm", "pruned", "wide"
ON_WORDS = "lstm", "gru", "packed_gru", "attention", "own_attention", "layer_norm", "positions"
NETS = {
    kind: _net(kind, {ON_PICTURES: "images", ON_WORDS: "words"}[kinds])
    for kinds in (ON_PICTURES, ON_WORDS)
    for kind in kinds
} | {
    kind: _net(kind)
    for kind in LAYERS
    if kind not in (*ON_PICTURES, *ON_WORDS, "mix", "plain_mix", "tanh", "relu")
}
_USED = Layer("mix", residual=True, used="sometimes"), Layer("norm"), Layer("mix", used="never")
NETS |= {
    "tied": Net("words", (Layer("mix"), Layer("tanh"), Layer("mix", tied=True), Layer("norm"))),
    "sometimes_used": Net("images", _USED),
    "padded": Net("padded", (Layer("relu"), Layer("layer_norm"))),
}
