"""Small networks for laws: a stem, a layer of any kind between two plain ones, a head."""

import os
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import parametrizations, prune, rnn
from torch.utils.checkpoint import checkpoint

DEVICE = os.environ.get("MIXEDFP_TEST_DEVICE", "cpu")  # of models and data
torch.set_num_threads(1)  # these tensors are tiny: a second thread would only wait

# Layers: from vectors (n, 4), images (n, 4, 3, 3) or words (n, 3, 4) to the same


class Scale(nn.Module):
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


class Layer(nn.Module):
    """Parts by their names: modules, parameters or buffers. Each kind is a class, in `LAYERS`."""

    def __init__(self, parts):
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)


def _packed(m, x):
    lengths = torch.arange(len(x)) % x.shape[1] + 1
    packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return rnn.pad_packed_sequence(m.cell(packed)[0], True, total_length=x.shape[1])[0]


def _attention(m, x):
    n = x.shape[1]
    mask = x.new_full((n, n), float("-inf")).triu(1)
    return m.module(x, x, x, attn_mask=mask, need_weights=False)[0]


def _own_attention(m, x):
    q, k, v = m.qkv(x).unsqueeze(1).chunk(3, -1)
    return scaled_dot_product_attention(q, k, v).squeeze(1)


FORWARDS = {  # one for each class, because the library reads their code
    "lstm": lambda m, x: m.cell(x)[0],
    "gru": lambda m, x: m.cell(x)[0],
    "packed_gru": _packed,
    "attention": _attention,
    "own_attention": _own_attention,
    "positions": lambda m, x: m.mix(x + torch.linspace(-0.5, 0.5, x.shape[-1], device=x.device)),
    "recomputed": lambda m, x: checkpoint(m.layer, x, use_reentrant=False),
    "recomputed_reentrant": lambda m, x: checkpoint(m.layer, x, use_reentrant=True),
    "empty": lambda m, x: x + m.empty.sum() + m.rows.sum(),
    "double": lambda m, x: x * (1 + m.table * m.wide).to(x.dtype),
    "complex": lambda m, x: x * m.phase.abs().to(x.dtype),
    "many": lambda m, x: torch.tanh(x * torch.stack(list(m.scales)).mean() + m.named["shift"]),
    "quantized": lambda m, x: x * (m.weight.to(x.dtype) * m.scale).mean(),
    "own_function": lambda m, x: Square.apply(torch.tanh(x), m.scale),
    "twice": lambda m, x: m.again(torch.tanh(m.one(x))),
    "tied": lambda m, x: m.other(torch.tanh(m.one(x))),
    "sometimes_used": lambda m, x: x + m.layer(x),
}
LAYERS = {}
for _kind, _forward in FORWARDS.items():
    _forward.__name__, _name = "forward", f"{_kind}_layer"  # by these names pickle finds them
    LAYERS[_kind] = globals()[_name] = type(_name, (Layer,), dict(forward=_forward))


def tied():
    """Return two layers with biases of their own, of which both have the same weight."""
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    return dict(one=one, other=other)


def hooked():
    """Return a layer with hooks of the user's: on the way there, and on the way back."""
    layer = nn.Linear(4, 4)
    layer.register_forward_pre_hook(_halve)
    layer.register_forward_hook(_halve)
    layer.register_full_backward_hook(_halve)
    return layer


def _halve(module, seen, out=None):
    """Halve the output where there is one, else the input, or the gradient of the input."""
    return out * 0.5 if isinstance(out, torch.Tensor) else (seen[0] * 0.5,)


def _frozen(value):
    return nn.Parameter(torch.tensor(value, dtype=torch.float64), requires_grad=False)


KINDS = {  # what makes a layer, or the parts of a `Layer`
    "images": {
        "norm": lambda: nn.BatchNorm2d(4),
        "group_norm": lambda: nn.GroupNorm(2, 4),
        "instance_norm": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        "transposed": lambda: nn.ConvTranspose2d(4, 4, 3, padding=1),
        "pruned": lambda: prune.l1_unstructured(nn.Conv2d(4, 4, 1), "weight", 0.5),
        "wide": lambda: nn.Sequential(nn.Conv2d(4, 9, 3, padding=1), nn.ReLU(), nn.Conv2d(9, 4, 1)),
        "sometimes_used": lambda: dict(layer=nn.Conv2d(4, 4, 1), never=nn.Conv2d(4, 4, 1)),
    },
    "words": {
        "lstm": lambda: dict(cell=nn.LSTM(4, 4, batch_first=True)),
        "gru": lambda: dict(cell=nn.GRU(4, 4, batch_first=True)),
        "packed_gru": lambda: dict(cell=nn.GRU(4, 4, batch_first=True)),
        "attention": lambda: dict(module=nn.MultiheadAttention(4, 2, batch_first=True)),
        "own_attention": lambda: dict(qkv=nn.Linear(4, 12)),
        "layer_norm": lambda: nn.LayerNorm(4),
        "positions": lambda: dict(mix=nn.Linear(4, 4)),
        "tied": tied,
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
        "recomputed": lambda: dict(layer=nn.Linear(4, 4)),
        "recomputed_reentrant": lambda: dict(layer=nn.Linear(4, 4)),
        "empty": lambda: dict(
            empty=nn.Parameter(torch.ones(0)), rows=nn.Parameter(torch.ones(0, 4))
        ),
        "double": lambda: dict(table=_frozen(1 / 7), wide=torch.tensor(1 / 3, dtype=torch.float64)),
        "complex": lambda: dict(phase=nn.Parameter(torch.tensor(0.6 + 0.8j))),
        "many": lambda: dict(
            scales=nn.ParameterList([torch.rand(3) + 0.5 for _ in range(100)]),
            named=nn.ParameterDict({"shift": torch.rand(()) - 0.5}),
        ),
        "quantized": lambda: dict(
            scale=torch.tensor(0.02), weight=torch.randint(-100, 100, (4,), dtype=torch.int8)
        ),
        "own_function": lambda: dict(scale=nn.Parameter(torch.tensor(0.5))),
        "twice": lambda: dict.fromkeys(("one", "again"), nn.Linear(4, 4)),
        "hooked": hooked,
    },
    "padded": {"padded": lambda: nn.LayerNorm(4)},
}
STEMS = {
    "images": lambda: nn.Conv2d(3, 4, 2),  # of 4 by 4 pixels: 3 by 3 are left
    "words": lambda: nn.Embedding(7, 4),
    "vectors": lambda: nn.Linear(5, 4),
    "padded": lambda: nn.Embedding(7, 4, padding_idx=0),
}


class Net(NamedTuple):
    inputs: str
    kind: str

    def build(self):
        return Built(self).to(DEVICE)

    def batch(self, seed, n=4):
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
        made = KINDS[net.inputs][net.kind]()
        layer = LAYERS[net.kind](made) if isinstance(made, dict) else made
        self.layers = nn.ModuleList([mix, nn.Tanh(), layer, nn.Tanh()])

    def forward(self, x):
        self.count += self.training
        x = self.stem(x)
        for layer in self.layers:
            if self.count % 2 or not isinstance(layer, LAYERS["sometimes_used"]):
                x = layer(x)
        if x.ndim == 3:
            x = x.mean(1)
        return self.head(x.flatten(2).mean(2) if x.ndim > 2 else x)


NETS = {kind: Net(inputs, kind) for inputs, kinds in KINDS.items() for kind in kinds}
