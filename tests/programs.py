"""Networks and optimizers for random programs, and what makes a failing program small.

A program is a nested named tuple: its `repr` can be pasted, and everything in it can be dropped.
"""

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import inside
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)  # these tensors are tiny: a second thread would only be waited for

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

    def forward(self, x):
        if self.training:
            self.count += 1
            self.mean.lerp_(x.detach().mean().to(self.mean.dtype), 0.25)
            self.last = x.detach().amax()
        return x - self.mean


class Cell(nn.Module):
    """A recurrent layer, over a sequence or a single element."""

    def __init__(self, kind):
        super().__init__()
        self.cell = kind(4, 4, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0] if x.ndim == 3 else self.cell(x.unsqueeze(1))[0].squeeze(1)


class Attention(nn.Module):
    """Attend to oneself, with the module of torch or with its function."""

    def __init__(self, module):
        super().__init__()
        self.module = nn.MultiheadAttention(4, 2, batch_first=True) if module else None
        self.qkv = None if module else nn.Linear(4, 12)

    def forward(self, x):
        seq = x if x.ndim == 3 else x.unsqueeze(1)
        if self.module is not None:
            seq = self.module(seq, seq, seq, need_weights=False)[0]
        else:
            q, k, v = self.qkv(seq).unsqueeze(1).chunk(3, -1)
            seq = scaled_dot_product_attention(q, k, v).squeeze(1)
        return seq if x.ndim == 3 else seq.squeeze(1)


class Recomputed(nn.Module):
    """A layer whose activations are computed a second time in the backward pass."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


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
        return self.mix(x + torch.linspace(-0.5, 0.5, x.shape[-1]))


class Empty(nn.Module):
    """Hold a parameter without elements."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x):
        return x + self.empty.sum()


def mix(inputs, bias=True):
    """Return a layer that mixes features."""
    return nn.Conv2d(4, 4, 1, bias=bias) if inputs == "pictures" else nn.Linear(4, 4, bias=bias)


def norm(inputs):
    """Return a norm with running statistics."""
    return nn.BatchNorm2d(4) if inputs == "pictures" else Channels(nn.BatchNorm1d(4))


def layer_norm(inputs):
    """Return a layer norm."""
    return nn.LayerNorm([4, 3, 3] if inputs == "pictures" else 4)


def wide(inputs):
    """Return two layers with a few hundred weights in between."""
    if inputs == "pictures":
        return nn.Sequential(nn.Conv2d(4, 9, 3, padding=1), nn.ReLU(), nn.Conv2d(9, 4, 1))
    return nn.Sequential(nn.Linear(4, 33), nn.ReLU(), nn.Linear(33, 4))


def of_sequences(layer, otherwise):
    """Return what makes a layer that pictures have no use for."""
    return lambda inputs: otherwise(inputs) if inputs == "pictures" else layer()


LAYERS: dict[str, Callable[[str], nn.Module]] = {
    "mix": mix,
    "plain_mix": lambda inputs: mix(inputs, bias=False),
    "wide": wide,
    "norm": norm,
    "layer_norm": layer_norm,
    "group_norm": lambda inputs: Channels(nn.GroupNorm(2, 4)),
    "relu": lambda inputs: nn.ReLU(),
    "gelu": lambda inputs: nn.GELU(),
    "tanh": lambda inputs: nn.Tanh(),
    "dropout": lambda inputs: nn.Dropout(0.25),
    "scale": lambda inputs: Scale(),
    "counter": lambda inputs: Counter(),
    "lstm": of_sequences(lambda: Cell(nn.LSTM), mix),
    "gru": of_sequences(lambda: Cell(nn.GRU), norm),
    "attention": of_sequences(lambda: Attention(True), mix),
    "own_attention": of_sequences(lambda: Attention(False), layer_norm),
    "weight_norm": lambda inputs: nn.utils.parametrizations.weight_norm(mix(inputs)),
    "spectral_norm": lambda inputs: nn.utils.parametrizations.spectral_norm(mix(inputs)),
    "recomputed": lambda inputs: Recomputed(mix(inputs)),
    "positions": lambda inputs: Positions(mix(inputs)),
    "empty": lambda inputs: Empty(),
}
STEMS = {
    "vectors": lambda: nn.Linear(5, 4),
    "pictures": lambda: nn.Conv2d(3, 4, 2),  # of 4 by 4 pixels: 3 by 3 are left
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
        return Built(self)

    def batch(self, seed, n=4):
        """Return `n` inputs and their classes."""
        rng = torch.Generator().manual_seed(seed)
        y = torch.randint(2, (n,), generator=rng)
        if self.inputs in ("words", "padded"):
            return torch.randint(7, (n, 3), generator=rng), y
        dims = (5,) if self.inputs == "vectors" else (3, 4, 4)
        return torch.randn(n, *dims, generator=rng), y


class Built(nn.Module):
    """The model of a `Net`."""

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


# A deepcopied or unpickled module counts on from where the other one was; a count is no buffer.


def random_net(rng, kinds=tuple(LAYERS), most=4):
    """Return a network drawn from `rng`, a `random.Random`."""
    layers = [
        Layer(
            rng.choice(kinds),
            residual=rng.random() < 0.3,
            tied=rng.random() < 0.3,
            used=rng.choice(["always"] * 5 + ["sometimes", "never"]),
        )
        for _ in range(rng.randint(0, most))
    ]
    return Net(rng.choice(list(STEMS)), tuple(layers))


def random_groups(rng, net, most=3):
    """Return places of parameters in groups, and those in no group; the head is trained always."""
    names = [name for name, _ in net.build().named_parameters()]
    body = [i for i, name in enumerate(names) if not name.startswith("head.")]
    head = [i for i, name in enumerate(names) if name.startswith("head.")]
    rng.shuffle(body)
    rng.shuffle(head)
    left_out = body[: rng.choice([0, 0, 0, 1, 2])]
    body = body[len(left_out) :]
    ends = sorted(rng.sample(range(len(body) + 1), min(rng.randint(1, most), len(body) + 1)))
    groups = [body[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    groups.append(body[ends[-1] :] + head)
    return tuple(tuple(group) for group in groups if group), tuple(left_out)


# Vectors that are large, whatever their size


@contextmanager
def vectors_are_large(large: bool, cut: int = 2**18) -> Iterator[None]:
    """Take vectors of any size for large in the block, and cut them in chunks of `cut`."""
    with pytest.MonkeyPatch.context() as patch:
        if large:
            inside.everything_is_large(patch, chunk=cut)
        yield


# Failures made small


def smaller(o: Any) -> Iterator[Any]:
    """Yield all that is one change simpler than `o`, the largest changes first."""
    if isinstance(o, tuple) and hasattr(o, "_fields"):
        for field in o._fields:
            value, default = getattr(o, field), o._field_defaults.get(field, ...)
            if default is not ... and value != default:
                yield o._replace(**{field: default})
            if isinstance(value, tuple):
                yield from (o._replace(**{field: v}) for v in smaller(value))
    elif isinstance(o, tuple):
        size = len(o)
        while size:
            yield from (o[:i] + o[i + size :] for i in range(0, len(o), size))
            size //= 2
        for i, v in enumerate(o):
            if isinstance(v, tuple):
                yield from ((*o[:i], w, *o[i + 1 :]) for w in smaller(v))


def shrink(program: Any, fails: Callable[[Any], bool], tries: int = 500) -> Any:
    """Return a program that still fails, and none of those one change simpler does."""
    candidates, seen = smaller(program), set()
    while tries and (candidate := next(candidates, None)) is not None:
        if candidate in seen:
            continue
        seen.add(candidate)
        tries -= 1
        if fails(candidate):
            program, candidates = candidate, smaller(candidate)
    return program


class Failure(AssertionError):
    """What a random program has found."""


def check_seed(
    seed: int,
    make: Callable[[random.Random], Any],  # a program
    check: Callable[..., str | None],  # what breaks a law, or one law in particular
    laws: dict[str, Any],
) -> None:
    """Check the program of `seed`. Raises: Failure that shows it, made small."""
    program = make(random.Random(seed))
    for law in laws:
        found = check(program, law)
        if found is not None:
            small = shrink(program, lambda p: kind(check(p, law)) == kind(found))  # noqa: B023
            raise Failure(f"seed {seed}, {law}: {check(small, law)}\n  {small!r}")


@lru_cache(maxsize=1)
def plain_run(program: Any) -> Any:
    """Run `program` plainly; what one law is held against, the next ones are as well."""
    return program.run()


def kind(found: str | None) -> str | None:
    """Return what stays of a message when the program becomes smaller."""
    return found and re.sub(r"[\d.\[\]']+", "", found.split(":")[0] + found.split(":")[1])[:40]
