"""The step of AdamW over the shards of two processes: ours against PyTorch's ways over `DTensor`s.

    python bench/sharded.py --out bench/results/sharded.json    # 2 minutes on 2 cores

80 tensors, weights and biases of 40 square layers, cut by FSDP2 over two processes with a thread
each. All ways take turns in one run, both processes at once. Times are a process's own time on its
core, since a step waits for no other process: medians, in ms, `low` and `high` are quartiles, and
`ratio` is the median of a turn's time over that of ours in that turn. `each` is what PyTorch does
by itself.
"""

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import torch
from master_step import write_rows
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mixedfp.sharded_masters import sharded_masters

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from ranks import on_two_ranks  # noqa: E402

WAYS = {
    "ours": {},
    "each": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def make(way: str, width: int) -> torch.optim.Optimizer:
    """Make a sharded model with gradients, and return its optimizer."""
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(nn.Sequential(*[nn.Linear(width, width) for _ in range(40)]), mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, **WAYS[way])
    if way == "ours":
        _, opt = sharded_masters(model, opt)
    for p in model.parameters():
        p.grad = torch.full_like(p.detach(), 2.0**-4)
    return opt


def turns(rank: int, width: int, repeats: int) -> dict[str, list[float]]:
    """Time the steps of all ways, which take turns."""
    opts = {way: make(way, width) for way in WAYS}
    times = {way: [] for way in WAYS}
    for i in range(repeats + 3):
        for way, opt in opts.items():
            distributed.barrier()
            start = time.process_time()
            opt.step()
            if i >= 3:
                times[way].append(1e3 * (time.process_time() - start))
    return times


def measure(width: int, repeats: int) -> list[dict]:
    """Return a row for each way, of the process that took longer."""
    with tempfile.TemporaryDirectory() as folder:
        work = partial(turns, width=width, repeats=repeats)
        times = max(on_two_ranks(work, Path(folder), ("torch",)), key=lambda t: median(t["ours"]))
    params = 40 * (width + 1) * width
    rows = []
    for way, ms in times.items():
        ratios = [a / b for a, b in zip(ms, times["ours"], strict=True)]
        low, _, high = quantiles(ms, n=4)
        row = dict(width=width, params=params, way=way, ms=median(ms), low=low, high=high)
        rows.append(row | dict(ratio=median(ratios)))
    return rows


def main() -> None:
    """Measure and print; write a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [row for width in args.widths for row in measure(width, args.repeats)]
    for r in rows:
        print(
            f"{r['params'] / 1e6:6.2f} M parameters  {r['way']:15}{r['ms']:9.2f} ms "
            f"({r['low']:.2f} to {r['high']:.2f})  {r['ratio']:5.2f} × ours"
        )
    if args.out:
        write_rows(args.out, rows, threads="1 in each of 2 processes")


if __name__ == "__main__":
    main()
