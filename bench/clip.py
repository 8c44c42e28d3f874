"""Unscale, check and clip: `LossScaler` against `torch.amp.GradScaler`, and the cost of a check.

    python bench/clip.py --out bench/results/clip.json    # 1 minute

Gradients are float32. Each way unscales and checks them, then PyTorch's `clip_grad_norm_` clips; in
bfloat16 nothing is scaled, so the check is a separate pass. All ways are timed in turn; `ratio` is
the median over turns of a way's time divided by `GradScaler`'s in that turn: above 1 is slower.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from master_step import Params, about
from torch.nn.utils import clip_grad_norm_

from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler, any_nonfinite

SIZES = {"24 M in 100 tensors": (100, 240_000), "2,000 tensors of 256": (2000, 256)}
FLAT = dict(flat_master=True)


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
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 2):
        for name, (model, prepare, run) in ways.items():
            model.set_grads()
            prepare()
            begin = time.perf_counter()
            run()
            times[name] += [time.perf_counter() - begin] * (turn >= 2)
    rows = []
    for name, own in times.items():
        ratio = median(a / b for a, b in zip(own, times["GradScaler"], strict=True))
        rows.append(dict(size=size, way=name, ms=median(own) * 1e3, ratio=ratio))
        print(f"{size:22} {name:20} {median(own) * 1e3:8.2f} ms  x {ratio:.2f}", flush=True)
    return rows


def main() -> None:
    """Measure, print, and write."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--repeats", type=int, default=40)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    rows = [row for size in SIZES for row in measure(size, args.repeats)]
    if args.out:
        args.out.write_text(json.dumps(dict(about=about(), rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
