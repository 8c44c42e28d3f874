"""Where the time of a training step goes: PyTorch's kernels, and the Python of each package.

    python bench/where_time_goes.py --out bench/results/where_time_goes.json    # 10 minutes

`cProfile` counts calls; the time that it adds to each call is measured and subtracted. A package's
Python time is that of its functions, including the built-in C functions and the operators that they
use. The rest of a step, timed without the profiler, is in PyTorch's C code: *kernels*, also ours,
such as the copies of a chunk. Models, batches and ways are the same as in train_step.py.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable
from cProfile import Profile
from pstats import Stats
from statistics import median

from common import about, options, seconds, table, write
from train_step import MODELS, make

WAYS = {"loop bfloat16": "bf16-flat", "Learner bfloat16": "learn-bf16-flat"}
PACKAGES = {"/mixedfp/": "ours", "/fastai/": "fastai", "/fastcore/": "fastai", "/torch/": "torch"}


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


def count(step: Callable, n: int, added: tuple[float, float]) -> Counter:
    """Profile `n` steps; return microseconds per step by package."""
    packages, profile = Counter(), Profile()
    profile.runcall(seconds, step, n)
    for callee, (_, _, _, _, callers) in Stats(profile).stats.items():
        for caller, (_, calls, own, _) in callers.items():
            who = callee if owner(callee) else caller  # for `zip`: its caller
            packages[owner(who)] += 1e6 * (own - calls * added[0]) / n
            packages[owner(caller)] -= 1e6 * calls * added[1] / n
    return packages


def measure(model: str, way: str, at_most: float, added: tuple[float, float]) -> dict:
    """Time steps, then profile the same number."""
    gc.collect()  # an optimizer is a reference cycle, even PyTorch's
    step, _ = make(model, WAYS[way])
    n = max(3, min(50, round(at_most / seconds(step, 3))))
    whole = 1e6 * median(seconds(step) for _ in range(n))
    packages = count(step, n, added)
    row = {"model": model, "way": way, "ms": whole / 1e3}
    row["kernels_%"] = 100 - 100 * (sum(packages.values()) - packages["kernels"]) / whole
    for name in ("ours", "fastai", "torch"):
        row |= {f"{name}_us": packages[name], f"{name}_%": 100 * packages[name] / whole}
    return row


def main() -> None:
    """Measure, print, and write."""
    args, added = options(__doc__, models=list(MODELS), seconds=2.0), added_by_profiler()
    rows = [measure(m, way, args.seconds, added) for m in args.models for way in WAYS]
    table(rows, "model way ms:.1f kernels_%:.1f ours_%:.1f fastai_%:.1f torch_%:.1f ours_us:.0f")
    write(args.out, about() | {"rows": rows})


if __name__ == "__main__":
    main()
