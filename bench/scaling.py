"""Time and memory of the master step against the number of parameters and of tensors.

    python bench/scaling.py --out bench/results/scaling.json    # 2 minutes on 2 cores

Adam in bfloat16. First matrices of 256 x 256 until there are 10^5 to 3 x 10^8 parameters, then ten
million parameters in 10 to 10,000 tensors. Both are to be straight lines: so many nanoseconds a
parameter, and so many microseconds a tensor on top.
"""

import argparse
import gc
from pathlib import Path
from statistics import median

import torch
from master_step import DTYPES, WAYS, Run, n_bytes, write_rows

NAMES = ["fastai, each", "fastai, flat", "fused", "ours, flat, torch's", "ours, compiled, torch's"]


def measure(name: str, shapes: list[tuple], repeats: int) -> dict:
    """Time one way on parameters of these shapes."""
    grads = [torch.full(s, 2.0**-4, dtype=DTYPES["bf16"]) for s in shapes]
    run = Run(name, shapes, "adam", DTYPES["bf16"])
    for _ in range(3):
        run.step(grads, run.first)
    for _ in range(repeats):
        run.step(grads, run.times)
    n = sum(torch.Size(s).numel() for s in shapes)
    held = n_bytes(run.way.held()) / n
    return {
        "way": name,
        "params": n,
        "tensors": len(shapes),
        "ms": median(run.times),
        "bytes": held,
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=float, default=3e8, help="parameters, 20 bytes each")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sizes = [n for n in (10**5, 10**6, 10**7, 10**8, 3 * 10**8, 10**9) if n <= args.most]
    by_params = [[(256, 256)] * max(1, n // 2**16) for n in sizes]
    by_tensors = [[(10**7 // n,)] * n for n in (10, 100, 1000, 10_000)]
    rows = []
    for name in [name for name in NAMES if name in WAYS]:
        for shapes in by_params + by_tensors:
            n = sum(torch.Size(s).numel() for s in shapes)
            if name.startswith("fastai") and n > 10**8 + 10**7:
                continue  # seconds a step
            rows.append(measure(name, shapes, args.repeats))
            gc.collect()
            print("{way:26} {params:>11,} parameters in {tensors:>6,} tensors: {ms:9.2f} ms, "
                  "{bytes:.1f} bytes each".format(**rows[-1]), flush=True)  # fmt: skip
    if args.out:
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
