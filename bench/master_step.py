"""The optimizer step with float32 masters: ours against a hand-written one.

    python bench/master_step.py --out bench/results/master_step.json    # 3 minutes on 2 cores

Gradients in, update, weights back to bfloat16. All ways are timed in turn in one run, on parameters
of the same shapes; each time is the fastest turn, which is least disturbed by other programs, and
`ratio` divides it by the time of PyTorch's fused optimizer with hand-written masters.
By hand: 16-bit gradients are copied to float32, the masters are stepped and copied back.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median

import torch
from torch import nn

from mixedfp.optimizer import with_masters

SIZES = {  # name: (number of tensors, numbers per tensor)
    "2,000 of 256": (2000, 256),
    "120 of 2,048": (120, 2048),
    "24 M": (100, 240_000),
    "86 M": (150, 573_440),
}
OPTIMIZERS = {
    "adamw": lambda params, **how: torch.optim.AdamW(params, 1e-3, **how),
    "sgd": lambda params, **how: torch.optim.SGD(params, 1e-3, momentum=0.9, **how),
}
FOREACH, FUSED = dict(foreach=True), dict(fused=True)
OURS = {  # name: (settings of the optimizer, settings of with_masters)
    "ours": ({}, {}),
    "ours foreach": (FOREACH, {}),
    "ours fused": (FUSED, {}),
    "ours flat": ({}, dict(flat_master=True)),
    "ours flat fused": (FUSED, dict(flat_master=True)),
    "ours flat, half gradients": ({}, dict(flat_master=True, half_grads=True)),
}


class Params(nn.Module):
    """A model with only parameters."""

    def __init__(self, n: int, size: int):
        super().__init__()
        torch.manual_seed(0)
        self.params = nn.ParameterList([nn.Parameter(torch.randn(size)) for _ in range(n)])

    def forward(self, x):
        """Return `x`."""
        return x

    def set_grads(self) -> None:
        """Give each parameter a gradient, in the dtype that autograd would give it."""
        for p in self.parameters():
            p.grad = torch.randn_like(p, dtype=p.grad_dtype or p.dtype)


def plain(model: Params, make: Callable) -> Callable[[], None]:
    """Return a step in float32."""
    model.set_grads()
    return make(model.parameters()).step


def by_hand(model: Params, make: Callable) -> Callable[[], None]:
    """Return a step with hand-written masters."""
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data.bfloat16()
    model.set_grads()
    opt, params = make(masters), list(model.parameters())
    for m in masters:
        m.grad = torch.empty_like(m)

    def step():
        torch._foreach_copy_([m.grad for m in masters], [p.grad for p in params])
        opt.step()
        torch._foreach_copy_([p.data for p in params], [m.data for m in masters])

    return step


def ours(model: Params, make: Callable, settings: dict) -> Callable[[], None]:
    """Return our step; as in the other ways, gradients are not checked."""
    opt = make(model.parameters())
    with_masters(model, opt, dtype="bf16", skip_nonfinite=False, **settings)
    model.set_grads()
    return opt.step


def steps_of(size: str, optimizer: str, device: str) -> dict[str, Callable[[], None]]:
    """Return the step of each way."""
    make, new = OPTIMIZERS[optimizer], lambda: Params(*SIZES[size]).to(device)
    steps = {"float32": plain(new(), make)}
    for name, how in (("foreach", FOREACH), ("fused", FUSED)):
        steps[f"by hand {name}"] = by_hand(new(), lambda ps, how=how: make(ps, **how))
    for name, (how, settings) in OURS.items():
        steps[name] = ours(new(), lambda ps, how=how: make(ps, **how), settings)
    return steps


def measure(size: str, optimizer: str, repeats: int, device: str) -> list[dict]:
    """Time all ways in turn."""
    steps = steps_of(size, optimizer, device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 2):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if device != "cpu":
                torch.accelerator.synchronize()
            times[name] += [time.perf_counter() - begin] * (turn >= 2)
    base = min(times["by hand fused"])
    rows = []
    for name, found in times.items():
        row = dict(size=size, optimizer=optimizer, way=name, ms=min(found) * 1e3)
        rows.append(row | dict(median_ms=median(found) * 1e3, ratio=min(found) / base))
        print(f"{size:14} {optimizer:6} {name:32} {row['ms']:8.2f} ms  x {min(found) / base:.2f}")
    return rows


def about() -> dict:
    """Return the conditions of the measurement."""
    return dict(
        date=str(date.today()),
        torch=torch.__version__,
        cpu=cpu_name(),
        capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        load=round(os.getloadavg()[0], 1),
    )


def cpu_name() -> str:
    """Return the processor's name."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    named = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def main() -> None:
    """Measure, print, and write."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    p.add_argument("--repeats", type=int, default=8)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--device", default="cpu")
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    pairs = [(s, o) for s in args.sizes for o in OPTIMIZERS]
    rows = [row for s, o in pairs for row in measure(s, o, args.repeats, args.device)]
    if args.out:
        args.out.write_text(json.dumps(dict(about=about(), rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
