"""What the edge of a 16-bit model costs: casts in and out, and all that looks on the way.

    python bench/edge.py                  # seven models, bfloat16 and float16; 3 minutes on 2 cores

`model(x)` of a model with masters, against the same casts written around its own forward by hand.
The forward itself is replaced by one that returns a tensor it was given, so that what is left is
the edge; its cost is put beside a whole training step of the model. Both ways in turns, in one
process; medians.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn
from train_step import TASKS, Task

from mixedfp.optimizer import with_masters

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from inside import ComputeInFloat32, cast_floats  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def step_seconds(model: nn.Module, opt, x: tuple, y: torch.Tensor, repeats: int) -> float:
    """Time whole training steps; the median."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        out = model(*x)
        F.cross_entropy(out.flatten(0, -2), y.flatten()).backward()
        opt.step()
        opt.zero_grad()
        times.append(time.perf_counter() - start)
    return median(times[2:])


def edge_seconds(model: nn.Module, x: tuple, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Time a call of `model`, whose forward does nothing, and casts by hand around one like it."""
    kind = type(model)
    out = model(*x).detach().to(dtype).requires_grad_()

    class Empty(kind):
        def forward(self, *args):
            return out

    plain = nn.Module()  # without masters and hooks
    model.__class__ = Empty
    plain.forward = lambda *args: out

    def by_hand():
        if dtype == torch.float16:
            with ComputeInFloat32():
                return plain(*cast_floats(x, dtype)).float()
        return plain(*cast_floats(x, dtype)).float()

    ways = {"wrapped": lambda: model(*x), "by hand": by_hand}
    times = {name: [] for name in ways}
    for _ in range(repeats):
        for name, call in ways.items():
            start = time.perf_counter()
            for _ in range(50):
                call()
            times[name].append((time.perf_counter() - start) / 50)
    model.__class__ = kind
    return {name: median(ts) for name, ts in times.items()}


def measure(task: Task, dtype: torch.dtype, repeats: int) -> tuple[float, float, float]:
    """Return seconds of a step, of the edge and of casts by hand."""
    torch.manual_seed(0)
    model, (x, y) = task.model(), task.batch()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, opt = with_masters(model, opt, dtype=dtype, flat_master=True, compiled=False)
    step = step_seconds(model, opt, x, y, repeats)
    edge = edge_seconds(model, x, dtype, repeats)
    return step, edge["wrapped"], edge["by hand"]


def main() -> None:
    """Print a line a model and dtype."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--models", nargs="+", default=list(TASKS["small"]))
    p.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    p.add_argument("--repeats", type=int, default=10)
    args = p.parse_args()
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print("| model | dtype | step, ms | edge, µs | by hand, µs | more, % of the step |")
    print("|---|---|---|---|---|---|")
    for name in args.models:
        for dtype in args.dtypes:
            step, edge, hand = measure(TASKS["small"][name], DTYPES[dtype], args.repeats)
            more = 100 * (edge - hand) / step
            figures = f"{1e3 * step:.1f} | {1e6 * edge:.0f} | {1e6 * hand:.0f} | {more:.2f}"
            print(f"| {name} | {dtype} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
