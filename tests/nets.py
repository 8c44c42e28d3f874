"""Small networks for laws: a stem, a layer of any kind between two plain ones, a head."""

import os
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

DEVICE = os.environ.get("MIXEDFP_TEST_DEVICE", "cpu")  # of models and data
torch.set_num_threads(1)  # these tensors are tiny: a second thread would only wait

# Layers: from vectors (n, 4), images (n, 4, 3, 3) or words (n, 3, 4) to the same


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
    """A recurrent layer, over a sequence."""

    def __init__(self, kind, packed=False):
        super().__init__()
        self.cell, self.packed = kind(4, 4, batch_first=True), packed

    def forward(self, x):
        if not self.packed:
            return self.cell(x)[0]
        lengths = torch.arange(len(x)) % x.shape[1] + 1
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        out, _ = self.cell(packed)
        length = x.shape[1]
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=length)[0]


class Attention(nn.Module):
    """Attend to oneself, masked."""

    def __init__(self):
        super().__init__()
        self.module = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        n = x.shape[1]
        mask = x.new_full((n, n), float("-inf")).triu(1)
        return self.module(x, x, x, attn_mask=mask, need_weights=False)[0]


class OwnAttention(nn.Module):
    """Attend to oneself, with PyTorch's function."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return scaled_dot_product_attention(q, k, v).squeeze(1)


class Recomputed(nn.Module):
    """A layer whose activations are computed a second time in the backward pass."""

    def __init__(self, reentrant=False):
        super().__init__()
        self.layer, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


class Positions(nn.Module):
    """Add positions, made in 32 bits in the forward pass."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 4)

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

    def __init__(self):
        super().__init__()
        self.one = self.again = nn.Linear(4, 4)

    def forward(self, x):
        return self.again(torch.tanh(self.one(x)))


class Tied(nn.Module):
    """Two layers with biases of their own, of which both have the same weight."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.other(torch.tanh(self.one(x)))


class Sometimes(nn.Module):
    """A layer for every other batch, and one that is never used."""

    def __init__(self):
        super().__init__()
        self.layer, self.never = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return x + self.layer(x)


def _half_input(module, args):
    return (args[0] * 0.5,)


def _half_output(module, args, out):
    return out * 0.5


def _half_grad(module, grad_in, grad_out):
    return (grad_in[0] * 0.5,)


def hooked():
    """Return a layer with hooks of the user's: on the way there, and on the way back."""
    layer = nn.Linear(4, 4)
    layer.register_forward_pre_hook(_half_input)
    layer.register_forward_hook(_half_output)
    layer.register_full_backward_hook(_half_grad)
    return layer


KINDS = {
    "images": {
        "norm": lambda: nn.BatchNorm2d(4),
        "group_norm": lambda: nn.GroupNorm(2, 4),
        "instance_norm": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        "transposed": lambda: nn.ConvTranspose2d(4, 4, 3, padding=1),
        "pruned": lambda: prune.l1_unstructured(nn.Conv2d(4, 4, 1), "weight", 0.5),
        "wide": lambda: nn.Sequential(nn.Conv2d(4, 9, 3, padding=1), nn.ReLU(), nn.Conv2d(9, 4, 1)),
        "sometimes_used": Sometimes,
    },
    "words": {
        "lstm": lambda: Cell(nn.LSTM),
        "gru": lambda: Cell(nn.GRU),
        "packed_gru": lambda: Cell(nn.GRU, packed=True),
        "attention": Attention,
        "own_attention": OwnAttention,
        "layer_norm": lambda: nn.LayerNorm(4),
        "positions": Positions,
        "tied": Tied,
    },
    "vectors": {
        "batch_norm": lambda: nn.BatchNorm1d(4),
        "rms_norm": lambda: nn.RMSNorm(4),
        "gelu": nn.GELU,
        "dropout": lambda: nn.Dropout(0.25),
        "prelu": nn.PReLU,
        "scale": Scale,
        "counter": Counter,
        "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
        "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
        "recomputed": Recomputed,
        "recomputed_reentrant": lambda: Recomputed(reentrant=True),
        "empty": Empty,
        "double": Double,
        "complex": Complex,
        "many": Many,
        "quantized": Quantized,
        "own_function": OwnFunction,
        "twice": Twice,
        "hooked": hooked,
    },
    "padded": {
        "padded": lambda: nn.LayerNorm(4),
    },
}
STEMS = {
    "images": lambda: nn.Conv2d(3, 4, 2),  # of 4 by 4 pixels: 3 by 3 are left
    "words": lambda: nn.Embedding(7, 4),
    "vectors": lambda: nn.Linear(5, 4),
    "padded": lambda: nn.Embedding(7, 4, padding_idx=0),
}


class Net(NamedTuple):
    """A network: its inputs, and the kind of its layer."""

    inputs: str
    kind: str

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


class Built(nn.Module):
    """The model of a `Net`. A copy counts on from where the other one was; a count is no buffer."""

    def __init__(self, net):
        super().__init__()
        self.net, self.count = net, 0
        self.stem, self.head = STEMS[net.inputs](), nn.Linear(4, 2)
        mix = nn.Conv2d(4, 4, 1) if net.inputs == "images" else nn.Linear(4, 4)
        self.layers = nn.ModuleList([mix, nn.Tanh(), KINDS[net.inputs][net.kind](), nn.Tanh()])

    def forward(self, x):
        self.count += self.training
        x = self.stem(x)
        for layer in self.layers:
            if self.count % 2 or not isinstance(layer, Sometimes):
                x = layer(x)
        if x.ndim == 3:
            x = x.mean(1)
        return self.head(x.flatten(2).mean(2) if x.ndim > 2 else x)


NETS = {kind: Net(inputs, kind) for inputs, kinds in KINDS.items() for kind in kinds}
