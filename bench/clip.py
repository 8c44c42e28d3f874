"""Unscale, check and clip: `LossScaler` against `torch.amp.GradScaler`, and the cost of a check.

    python bench/clip.py --out bench/results/clip.json    # 1 minute

Gradients are float32. Each way unscales and checks them, then PyTorch's `clip_grad_norm_` clips; in
bfloat16 nothing is scaled, so the check is a separate pass. All ways are timed in turn; `ratio` is
the median over turns of a way's time divided by `GradScaler`'s in that turn: above 1 is slower.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from common import FLAT, about, in_turn, options, ratio, seconds, table, write
from master_step import Params
from torch.nn.utils import clip_grad_norm_

from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler, any_nonfinite

SIZES = {"24 M in 100 tensors": (100, 240_000), "2,000 tensors of 256": (2000, 256)}


def make_model(size: str, **settings) -> tuple:  # the model and its optimizer
    """Create parameters, with masters if there are settings."""
    model = Params(*SIZES[size])
    opt = torch.optim.SGD(model.parameters(), 0.1)
    if settings:
        with_masters(model, opt, **settings)
    return model, opt


def scaled(scaler: torch.amp.GradScaler, model: Params, opt: torch.optim.Optimizer) -> tuple:
    """Return the model, and functions to run before and in each turn, with a scaler."""

    def prepare():
        scaler.update()
        scaler.scale(torch.ones(()))

    def run():
        scaler.unscale_(opt)
        clip_grad_norm_(model.parameters(), 1.0)

    scaler.scale(torch.ones(()))
    model.set_grads()
    run()  # `update` requires a check
    return model, prepare, run


def unscaled(check: Callable, model: Params) -> tuple:
    """Return the same without a scaler, using `check`, then clip."""

    def run():
        assert not check([p.grad for p in model.parameters()])
        clip_grad_norm_(model.parameters(), 1.0)

    return model, lambda: None, run


def norm_is_finite(grads: list[torch.Tensor]) -> bool:
    """Check the norm, which clipping computes anyway: shows the gain from one read for both."""
    return not torch.nn.utils.get_total_norm(grads).isfinite().item()


def measure(size: str, repeats: int) -> list[dict]:
    """Time all ways of one size in turn."""
    theirs, ours = torch.amp.GradScaler("cpu", 2.0), LossScaler("cpu", 2.0)
    ways = {
        "GradScaler": scaled(theirs, *make_model(size)),
        "LossScaler": scaled(ours, *make_model(size, dtype="fp16")),
        "LossScaler, flat": scaled(LossScaler("cpu", 2.0), *make_model(size, dtype="fp16", **FLAT)),
        "no check": unscaled(lambda grads: False, make_model(size)[0]),
        "bfloat16's check": unscaled(any_nonfinite, make_model(size)[0]),
        "a check by the norm": unscaled(norm_is_finite, make_model(size)[0]),
    }

    def clock(model, prepare, run):
        model.set_grads()
        prepare()
        return seconds(run)

    times = in_turn({name: partial(clock, *way) for name, way in ways.items()}, repeats, unused=2)
    rows = []
    for name, own in times.items():
        row = dict(size=size, way=name, ms=median(own) * 1e3)
        rows.append(row | dict(ratio=ratio(own, times["GradScaler"])))
    table(rows, "size way ms:.2f ratio:.2f")
    return rows


def main() -> None:
    """Measure, print, and write."""
    args = options(__doc__, repeats=40)
    rows = [row for size in SIZES for row in measure(size, args.repeats)]
    write(args.out, dict(about=about(), rows=rows))


if __name__ == "__main__":
    main()
