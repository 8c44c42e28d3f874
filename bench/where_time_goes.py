"""Where the time of a training step goes: PyTorch's kernels, and the Python of each package.

    python bench/where_time_goes.py --out bench/results/where_time_goes.json    # 10 minutes

`cProfile` counts calls; the time that it adds to each call is measured and subtracted. A package's
Python time is that of its functions, including the built-in C functions and the operators that they
use. The rest of a step, timed without the profiler, is in PyTorch's C code: *kernels*, also ours,
such as the copies of a chunk. `not_emulating` is ours without `engine.in_float32`, which is needed
only on a CPU without fast 16-bit products. Models and batches are the same as in train_step.py.
"""

import argparse
import gc
import json
import time
from collections import Counter
from cProfile import Profile
from functools import partial
from pathlib import Path
from pstats import Stats
from statistics import median
from unittest.mock import patch

import torch
import train_step as ts

from mixedfp.engine.in_float32 import InFloat32

FULL = {"flat_master": True, "dtype": torch.float32}
RUNS = {  # in float32 ours does everything except rounding
    "loop float32": ts.Way(partial(ts.ours, torch.float32, ts.flat)),
    "loop bfloat16": ts.WAYS["bf16-flat"],
    "Learner float32": ts.Way(partial(ts.ours_in_fastai, "to_fp16", FULL)),
    "Learner bfloat16": ts.WAYS["learn-bf16-flat"],
}
PACKAGES = {"/mixedfp/": "ours", "/fastai/": "fastai", "/fastcore/": "fastai", "/torch/": "torch"}
COLUMNS = "ms kernels_% ours_% fastai_% torch_% ours_us not_emulating_us fastai_us torch_us".split()


def owner(function: tuple) -> str:
    """Return the package of a function; 'kernels' for PyTorch's C code, '' for Python's own."""
    file, _, name = function
    if file == "~":
        return "kernels" if "torch" in name or "run_backward" in name else ""
    is_model = file.endswith("/mixedfp/examples.py")
    return next((p for part, p in PACKAGES.items() if part in file and not is_model), "others")


def added_by_profiler(n: int = 200_000) -> tuple[float, float]:
    """Measure the seconds that a call is charged to the function called, and to its caller."""

    def nothing():
        pass

    def repeat(n):
        for _ in range(n):
            nothing()

    begin = time.perf_counter()
    repeat(n)
    real, profile = time.perf_counter() - begin, Profile()
    profile.runcall(repeat, n)
    times = {name: row[2] for (_, _, name), row in Stats(profile).stats.items()}
    return times["nothing"] / n, max(0.0, times["repeat"] - real) / n


def count(run: object, batch: tuple, n: int, args: argparse.Namespace) -> tuple[Counter, Counter]:
    """Profile `n` steps; return microseconds per step by package, and ours by function."""
    packages, functions, profile = Counter(), Counter(), Profile()
    profile.runcall(ts.seconds, run, batch, n, args)
    for callee, (_, _, _, _, callers) in Stats(profile).stats.items():
        for caller, (_, calls, own, _) in callers.items():
            who = callee if owner(callee) else caller  # for `zip`: its caller
            for f, s in ((who, own - calls * args.added[0]), (caller, -calls * args.added[1])):
                packages[owner(f)] += 1e6 * s / n
                if owner(f) == "ours":
                    functions[f"{f[0].rpartition('/mixedfp/')[2]}:{f[2]}"] += 1e6 * s / n
    return packages, functions


def measure(model: str, name: str, args: argparse.Namespace) -> dict:
    """Time steps, then profile the same number."""
    gc.collect()  # an optimizer is a reference cycle, even PyTorch's
    run, batch = ts.make_run(ts.TASKS["small"][model], RUNS[name], args)
    n = max(3, min(50, round(args.seconds / ts.seconds(run, batch, 3, args))))
    step = 1e6 * median(ts.seconds(run, batch, 1, args) for _ in range(n))
    packages, functions = count(run, batch, n, args)
    row = {"model": model, "way": name, "ms": step / 1e3}
    row["kernels_%"] = 100 - 100 * (sum(packages.values()) - packages["kernels"]) / step
    for k in ("ours", "fastai", "torch"):
        row |= {f"{k}_us": packages[k], f"{k}_%": 100 * packages[k] / step}
    batch = tuple(x[:2] for x in batch[0]), batch[1][:2]  # PyTorch's own 16-bit kernels are slow
    with patch.multiple(InFloat32, __enter__=lambda *_: None, __exit__=lambda *_: None):
        ts.seconds(run, batch, 2, args)
        row["not_emulating_us"] = count(run, batch, 5, args)[0]["ours"]
    return row | {"top_us": dict(functions.most_common(6))}


def main() -> None:
    """Measure, print, and write."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--models", nargs="*", default=list(ts.TASKS["small"]))
    p.add_argument("--opt", default="adamw", choices=ts.OPTIMIZERS)
    p.add_argument("--seconds", type=float, default=2.0, help="of each way, at most 50 steps")
    p.add_argument("--out", type=Path)
    p.set_defaults(size="small", device="cpu", fused=False, threads=1, repeats=1)
    args, rows = p.parse_args(namespace=argparse.Namespace(added=added_by_profiler())), []
    ts.prepare(args)
    print(f"| model | way | {' | '.join(COLUMNS)} |\n" + "|---" * (2 + len(COLUMNS)) + "|")
    for model in args.models:
        for name in RUNS:
            rows.append(measure(model, name, args))
            cells = " | ".join(f"{rows[-1][k]:,.1f}" for k in COLUMNS)
            print(f"| {model} | {name} | {cells} |", flush=True)
    if args.out:
        args.out.write_text(json.dumps({**ts.about(args), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
