"""Which operators are slower in 16 bits: each in float32, in bfloat16, and in float32 with casts.

    python bench/operators.py --out bench/results/operators.json    # 2 minutes
    python bench/operators.py --device cuda --dtype float16 --only attention

Forward and backward together. The third mode casts a 16-bit operator's inputs to float32, computes
in float32 and rounds the result. A star marks where that is clearly faster than 16 bits. The three
modes are timed in turn, so that other load on the machine slows all of them down; reported are
medians and the spread from the first to the third quartile.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from common import about, in_turn, options, ratio, seconds, spread, write
from torch import Tensor
from torch.nn import functional as F

WAYS = ["fp32", "16 bits", "through fp32"]
Case = tuple[str, Callable, list[tuple[int, ...]]]  # name, function, shapes of the inputs


def attention_cases() -> list[Case]:
    """Return attention cases: all sequence and head sizes, masks and dropout."""
    cases = []
    for size in (64, 32, 128):
        for tokens in (16, 65, 128, 197, 256, 512, 1024):
            products = 6 * tokens**2 * size
            batch = max(1, 2**26 // max(products, 2**21))  # about ten milliseconds
            shape = (batch, tokens, 6, size)
            cases.append((f"attention, {size} a head", attend, [shape] * 3))
    image, text = (16, 65, 6, 64), (4, 256, 6, 64)
    return [
        *cases,
        ("attention, causal", partial(attend, is_causal=True), [text] * 3),
        ("attention, float mask", attend, [*[text] * 3, (256, 256)]),
        ("attention, dropout", partial(attend, dropout_p=0.1), [image] * 3),
        ("attention, one query", attend, [(8, 1, 6, 64), *[(8, 512, 6, 64)] * 2]),
    ]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **kwargs) -> Tensor:
    """Apply attention to tensors as linear layers return them: batch, tokens, heads, size."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = None if mask is None else mask.detach()  # not a parameter, like a padding mask
    return F.scaled_dot_product_attention(q, k, v, mask, **kwargs)


def picture_cases() -> list[Case]:
    """Return the operators that image networks use, including convolutions."""
    image = (32, 64, 32, 32)
    weight = (64,)
    return [
        ("conv2d 3×3", partial(F.conv2d, padding=1), [image, (64, 64, 3, 3)]),
        ("conv2d 1×1", F.conv2d, [image, (64, 64, 1, 1)]),
        ("conv2d depthwise", partial(F.conv2d, padding=1, groups=64), [image, (64, 1, 3, 3)]),
        ("conv_transpose2d", partial(F.conv_transpose2d, stride=2), [image, (64, 32, 2, 2)]),
        ("avg_pool2d 2", partial(F.avg_pool2d, kernel_size=2, ceil_mode=True), [image]),
        ("avg_pool2d 3", partial(F.avg_pool2d, kernel_size=3, stride=2, padding=1), [image]),
        ("adaptive_avg_pool2d 1", partial(F.adaptive_avg_pool2d, output_size=1), [image]),
        ("adaptive_avg_pool2d 4", partial(F.adaptive_avg_pool2d, output_size=4), [image]),
        ("max_pool2d 3", partial(F.max_pool2d, kernel_size=3, stride=2, padding=1), [image]),
        ("group_norm", lambda x, w, b: F.group_norm(x, 8, w, b), [image, weight, weight]),
        ("interpolate nearest", partial(F.interpolate, scale_factor=2), [image]),
        (
            "interpolate bilinear",
            partial(F.interpolate, scale_factor=2, mode="bilinear"),
            [image],
        ),
        ("pixel_shuffle", partial(F.pixel_shuffle, upscale_factor=2), [image]),
        *[(name, f, [image]) for name, f in ACTIVATIONS.items()],
    ]


ACTIVATIONS = {
    "relu": F.relu,
    "leaky_relu": partial(F.leaky_relu, negative_slope=0.1),
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "dropout": partial(F.dropout, p=0.1),
}


def text_cases(device: str) -> list[Case]:
    """Return the operators that networks for text or tables use, recurrent or not."""
    tokens = (16, 256, 384)
    ids = torch.randint(0, 8000, (16, 256), device=device)
    classes = torch.randint(0, 8000, (1024,), device=device)
    return [
        ("linear", F.linear, [tokens, (384, 384), (384,)]),
        ("matmul", torch.matmul, [(48, 256, 64), (48, 64, 256)]),
        ("layer_norm", lambda x, w, b: F.layer_norm(x, (384,), w, b), [tokens, (384,), (384,)]),
        ("layer_norm, small", lambda x, w: F.layer_norm(x, (192,), w), [(64, 65, 192), (192,)]),
        ("rms_norm", lambda x, w: F.rms_norm(x, (384,), w), [tokens, (384,)]),
        ("softmax", partial(torch.softmax, dim=-1), [(48, 256, 256)]),
        ("log_softmax", partial(F.log_softmax, dim=-1), [(1024, 8000)]),
        ("cross_entropy", lambda x: F.cross_entropy(x, classes), [(1024, 8000)]),
        ("embedding", lambda w: F.embedding(ids, w), [(8000, 384)]),
        ("mean over tokens", partial(torch.mean, dim=1), [tokens]),
        ("add", torch.add, [tokens, tokens]),
        ("cat", lambda a, b: torch.cat([a, b], -1), [tokens, tokens]),
        (
            "lstm",
            partial(recurrent, "lstm"),
            [(64, 32, 256), (1024, 256), (1024, 256), (1024,), (1024,)],
        ),
        ("gru", partial(recurrent, "gru"), [(64, 32, 256), (768, 256), (768, 256), (768,), (768,)]),
    ]


def recurrent(kind: str, x: Tensor, *weights: Tensor) -> Tensor:
    """Compute an LSTM or GRU layer over a whole sequence, in training, without dropout."""
    h = x.new_zeros(1, x.shape[1], weights[1].shape[1])
    state = (h, h) if kind == "lstm" else h
    return getattr(torch, kind)(x, state, weights, True, 1, 0.0, True, False, False)[0]


def make_ways(case: Case, device: str, dtype: torch.dtype) -> list[Callable[[], None]]:
    """Return three functions without arguments, on the same numbers: one for each of `WAYS`."""
    _, f, shapes = case
    full = [(0.2 * torch.randn(shape, device=device)).requires_grad_() for shape in shapes]
    half = [t.detach().to(dtype).requires_grad_() for t in full]

    def through(*tensors):
        return f(*[t.float() for t in tensors]).to(dtype)

    ways = [(f, full), (f, half), (through, half)]
    return [partial(forward_and_backward, g, ts, gradient(g, ts)) for g, ts in ways]


def gradient(f: Callable, tensors: list[Tensor]) -> Tensor:
    """Return random numbers of the result's shape, to start a backward pass."""
    out = f(*tensors)
    return torch.randn(out.shape, device=out.device).to(out.dtype)


def forward_and_backward(f: Callable, tensors: list[Tensor], grad: Tensor) -> None:
    """Compute `f` and the gradients of its tensors."""
    torch.autograd.grad(f(*tensors), tensors, grad, allow_unused=True)


def measure(case: Case, device: str, dtype: torch.dtype, budget: float) -> dict:
    """Time the three modes in turn for `budget` seconds, but at least 5 turns."""
    ways = zip(WAYS, make_ways(case, device, dtype), strict=True)
    clocks = {name: partial(seconds, way, device=device) for name, way in ways}
    turn = sum(clock() for clock in clocks.values())  # also a warm-up
    n = min(max(5, int(budget / turn)), 100)
    times = in_turn(clocks, n)
    full, half, through = times.values()
    row = {"operator": case[0], "shape": list(case[2][0]), "turns": n}
    for name, own in times.items():
        row[name] = {"ms": 1e3 * median(own), "spread": spread(own)}
    row |= {"speed of 16 bits": ratio(full, half), "gain": ratio(half, through)}
    row["gain's spread"] = spread([a / b for a, b in zip(half, through, strict=True)])
    return row


def main() -> None:
    """Measure, print and write."""
    args = options(__doc__, device="cpu", dtype="bfloat16", only="", budget=1.0)
    dtype, rows = getattr(torch, args.dtype), []
    torch.manual_seed(0)
    for case in [*attention_cases(), *picture_cases(), *text_cases(args.device)]:
        if args.only in case[0]:
            rows.append(row := measure(case, args.device, dtype, args.budget))
            times = ", ".join(f"{row[way]['ms']:.2f}" for way in WAYS)
            star = " *" if row["gain"] > 1.1 + row["gain's spread"] / 2 else ""
            shape = "×".join(map(str, row["shape"]))
            print(f"{case[0]:24}{shape:>18} {times} ms, gain {row['gain']:.2f}{star}", flush=True)
    tiles = torch.cpu._is_amx_tile_supported()
    instructions = {"bf16 instructions": torch.cpu._is_avx512_bf16_supported(), "bf16 tiles": tiles}
    write(args.out, about(args.device) | {"dtype": str(dtype)} | instructions | {"rows": rows})


if __name__ == "__main__":
    main()
