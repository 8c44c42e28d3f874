"""How long two ranks wait for gradients after the backward pass: sent during it, or after it.

    python bench/overlap.py --out bench/results/overlap.json    # 4 minutes on a busy machine

Two processes over gloo, one thread each, train a bfloat16 model of 9.4 M parameters with float32
gradients, through `DistributedDataParallel` and `MixedStep`. The time counts from where the last
gradient is there (that of the first layer) to the end of `unscale`, on the first rank. Both ways
take turns, step by step, so that whatever else the machine does slows both down; medians, and the
first and third quartile. Two processes on the same two cores send by memory, and compete with each
other for its bandwidth: what a network gains is another number.
"""

import argparse
import json
import platform
import tempfile
import time
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from statistics import quantiles

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from mixedfp.scaler import LossScaler
from mixedfp.step import MixedStep

WAYS = {"after": False, "during": True}  # the value of `requires_gradient_sync`


def step(mixed: MixedStep, model: nn.Module, x: torch.Tensor, parts: int, is_during: bool) -> float:
    """Train on `parts` micro-batches; return the milliseconds from the last gradient on."""
    there = 0.0

    def note(p):
        nonlocal there
        there = time.perf_counter()

    first = next(model.parameters())
    for part in range(parts):
        mixed.requires_gradient_sync = is_during and part == parts - 1
        loss = mixed.uncast(model(mixed.cast(x, training=True))).square().mean()
        scaled = mixed.scale(loss)
        hook = first.register_post_accumulate_grad_hook(note)
        scaled.backward()
        hook.remove()
    assert mixed.unscale()
    took = time.perf_counter() - there
    mixed.step()
    mixed.update()
    mixed.opt.zero_grad(set_to_none=True)
    return 1000 * took


def work(rank: int, folder: str, n: int) -> None:
    """Measure on one rank; the first writes what it found."""
    torch.set_num_threads(1)
    store = f"file://{folder}/meet"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    layers = [m for _ in range(16) for m in (nn.Linear(768, 768), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=4)
    mixed = MixedStep(torch.bfloat16, flat_master=True, scaler=LossScaler(enabled=False))
    mixed.attach(model)
    mixed.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    found = {}
    for parts in (1, 4):
        times = {way: [] for way in WAYS}
        for i in range(n + 2):
            for way, is_during in WAYS.items():
                distributed.barrier()
                took = step(mixed, model, torch.randn(256, 768), parts, is_during)
                if i >= 2:
                    times[way].append(took)
        for way, values in times.items():
            low, middle, high = quantiles(values, n=4)
            row = dict(median_ms=middle, first_quartile_ms=low, third_quartile_ms=high)
            found[f"{parts} micro-batches, {way}"] = {k: round(v, 1) for k, v in row.items()}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = get_context("spawn")
        ranks = [context.Process(target=work, args=(r, folder, args.steps)) for r in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        found = json.loads(Path(folder, "found.json").read_text())
    machine = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, 2 cores shared"
    about = dict(date=str(date.today()), torch=torch.__version__, machine=machine, steps=args.steps)
    result = dict(about=about, after_the_last_gradient=found)
    print(json.dumps(result, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
