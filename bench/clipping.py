"""What it costs to clip gradients by their norm, beside the check that looks at them anyway.

    python bench/clipping.py --out bench/results/clipping.json    # 2 minutes on a CPU

From the end of the backward pass to that of `clip_grad_norm_`, over flat masters: `check` is
`MixedStep.unscale` alone, where only the step looks at gradients; `clip` the same, with norms read
in its place, the clipping left to the step's pass; `torch` is PyTorch's function over true
gradients, as a loop calls it that the step knows nothing of. The ways take turns in one run, in one
thread; times are medians in ms, ratios medians over the turns. `step` is the whole, up to the
weights. Vectors of less than 2**21 numbers are not deferred: there `clip` is PyTorch's function.
"""

import argparse
import json
import os
import platform
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median

import torch
from torch import nn

from mixedfp.scaler import LossScaler
from mixedfp.step import MixedStep

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import inside  # noqa: E402

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SHAPES = {
    "1 M": [(1024, 1024)],
    "16 M": [(1024, 1024)] * 16,
    "16 M in one": [(4096, 4096)],
    "120 small": [(64, 64), (64,)] * 60,
    "ViT-S": 12 * [(1152, 384), (1152,), (384, 384), (384,), (1536, 384), (1536,), (384, 1536)],
}


class Way:
    """A model of given shapes, trained in one of the ways."""

    def __init__(self, shapes: list[tuple], dtype: torch.dtype, way: str):
        torch.manual_seed(0)
        self.model, self.way = nn.ParameterList([torch.randn(s) / 50 for s in shapes]), way
        scaler = LossScaler("cpu", init_scale=1024.0, enabled=dtype == torch.float16)
        self.mixed = MixedStep(dtype, flat_master=True, scaler=scaler, compiled=False)
        inside.be_exclusive(self.mixed, way != "torch")
        self.mixed.clips = way == "clip"
        self.mixed.attach(self.model)
        self.opt = self.mixed.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=1e-4))
        self.grads = [torch.randn_like(p) / 50 for p in self.model]

    def turn(self) -> tuple[float, float]:
        """Time a check, with clipping where it is this way's, and all up to the end of the step."""
        pairs = zip(self.model, self.grads, strict=True)
        self.mixed.scale(sum((p * g).sum() for p, g in pairs).float() / 1024).backward()
        start = time.perf_counter()
        assert self.mixed.unscale()
        if self.way == "clip":
            self.mixed.clip_grad_norm_(1e-4)
        elif self.way == "torch":
            nn.utils.clip_grad_norm_(self.model.parameters(), 1e-4)
        middle = time.perf_counter()
        self.mixed.step()
        end = time.perf_counter()
        self.mixed.update()
        self.opt.zero_grad()
        return 1e3 * (middle - start), 1e3 * (end - start)


def compare(shapes: list[tuple], dtype: torch.dtype, n_turns: int) -> dict:
    """Time the three ways, which take turns."""
    ways = {name: Way(shapes, dtype, name) for name in ("check", "clip", "torch")}
    turns = [{name: way.turn() for name, way in ways.items()} for _ in range(n_turns + 3)][3:]
    row = {name: round(median(t[name][0] for t in turns), 3) for name in ways}
    row |= {f"{name}, step": round(median(t[name][1] for t in turns), 3) for name in ways}
    for i, what in enumerate(["", ", step"]):
        for name in ("clip", "torch"):
            ratio = median(t[name][i] / t["check"][i] for t in turns)
            row[f"{name} / check{what}"] = round(ratio, 2)
    return row


def main() -> None:
    """Time and print, and write a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for shapes in args.shapes:
        for name, dtype in DTYPES.items():
            row = compare(SHAPES[shapes], dtype, args.turns)
            rows.append({"shapes": shapes, "dtype": name} | row)
            print(rows[-1], flush=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, one thread, torch {torch.__version__}"
    if args.out is not None:
        results = {"date": str(date.today()), "machine": machine, "load": os.getloadavg()[0]}
        results["rows"] = rows
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
