"""Whole runs on both sides of the step at which compiling an update pays back.

    python bench/payback_runs.py --out bench/results/payback_runs.json      # 18 minutes on a CPU

Two linear layers of 16.8 million weights, AdamW over flat masters in bfloat16, batches of one: a
loop in which an update is nearly all there is. `never` and `always` are `compiled=False` and
`True`; `by counts` is the default; `knows its end` has called `expect_steps`. Each run is a process
of its own with an empty cache of PyTorch's compiler. Seconds are those of the loop, compiling and
the import of the compiler among them, in the quickest of `--rounds` runs; `over better` is how many
times those of the better of `never` and `always`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from operator import itemgetter
from pathlib import Path

import torch
from master_step import write_rows
from torch import nn

from mixedfp.optimizer import with_masters

WAYS = {"never": False, "always": True, "by counts": None, "knows its end": None}


def run(way: str, n_steps: int) -> dict:
    """Train for `n_steps`; give the seconds, and the first step that was compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 4096, bias=False), nn.Linear(4096, 2048, bias=False))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    settings = dict(dtype=torch.bfloat16, flat_master=True, compiled=WAYS[way])
    model, opt = with_masters(model, opt, **settings)
    if way == "knows its end":
        opt.expect_steps(n_steps)
    x, first = torch.randn(1, 2048), None
    start = time.perf_counter()
    for i in range(n_steps):
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if first is None and "compiled" in opt.update_paths():
            first = i
    seconds = round(time.perf_counter() - start, 2)
    return {"steps": n_steps, "way": way, "seconds": seconds, "compiled from": first}


def run_apart(way: str, n_steps: int) -> dict:
    """Do that in a process which has compiled nothing."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}
        command = [sys.executable, __file__, "--one", way, "--steps", str(n_steps)]
        done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run, print, and write a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, nargs="*", default=[200, 1500])
    parser.add_argument("--rounds", type=int, nargs="*", default=[3, 1], help="of each of --steps")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run(args.one, *args.steps)))
        return
    rows = []
    for n_steps, n_rounds in zip(args.steps, args.rounds, strict=True):
        rounds = [[run_apart(way, n_steps) for way in WAYS] for _ in range(n_rounds)]
        found = [min(runs, key=itemgetter("seconds")) for runs in zip(*rounds, strict=True)]
        better = min(row["seconds"] for row in found[:2])
        rows += [row | {"over better": round(row["seconds"] / better, 3)} for row in found]
        print(*rows[-len(WAYS) :], sep="\n", flush=True)
    if args.out is not None:
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
