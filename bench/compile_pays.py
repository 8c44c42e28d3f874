"""What compiling an update takes, and what it saves: the constants of `mixedfp.engine.payback`.

    python bench/compile_pays.py --out bench/results/compile_pays.json      # 10 minutes

All times are processor times of one thread, those of child processes among them: other programs on
the machine disturb them least. Ways take turns; a figure is the median over turns. `compiling` is
the time of a process that compiles one update, or two, less that of one that compiles none: with
an empty cache of PyTorch's compiler, and with a full one. `operations` is what chunks take more,
for each element and operation. `steps` is what a whole step gains, as a share of its time in
chunks, at batches from the smallest on.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median

import torch
from fastai.optimizer import SGD, Adam
from fastai.vision.models.xresnet import xresnet18, xresnet50
from torch import Tensor, nn
from train_step import machine_name

from mixedfp.scaler import LossScaler
from mixedfp.step import MixedStep

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from inside import be_exclusive  # noqa: E402

OPTIMIZERS = {
    "SGD, momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-4),
    "fastai's SGD, momentum": partial(SGD, lr=1e-3, mom=0.9),
    "fastai's Adam": partial(Adam, lr=1e-4),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Run:
    """A model that is trained flat, as in a Learner where no callback looks at gradients."""

    def __init__(self, model: nn.Module, opt: str, dtype: str, compiled: bool | None):
        scaler = LossScaler(init_scale=16.0, enabled=dtype == "fp16")
        self.model, self.mixed = model, MixedStep(DTYPES[dtype], True, scaler, compiled=compiled)
        self.mixed.attach(model)
        self.opt = self.mixed.wrap_optimizer(OPTIMIZERS[opt](list(model.parameters())))
        be_exclusive(self.mixed)

    def forward(self, x: Tensor) -> Tensor:
        """Compute a loss."""
        return self.mixed.uncast(self.model(self.mixed.cast(x, training=True))).square().mean()

    def step(self, x: Tensor) -> tuple[float, float]:
        """Train on a batch; return the seconds of all of it, and of the update alone."""
        start = time.process_time()
        self.mixed.scale(self.forward(x)).backward()
        middle = time.process_time()
        assert self.mixed.unscale()
        self.mixed.step()
        self.mixed.update()
        self.opt.zero_grad()
        end = time.process_time()
        return end - start, end - middle


def linears(width: int, n: int) -> nn.Module:
    """Build linear layers: the least work for each parameter."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(n)))


def work_of(make: Callable[[], nn.Module], opt: str, dtype: str, x: Tensor) -> int:
    """Count operations on elements in a step."""
    run = Run(make(), opt, dtype, None)
    counts = []
    for _ in range(3):
        run.step(x)
        counts.append(run.opt.state_dict().get("payback", {}).get("chunked", 0))
    return counts[2] - counts[1]


def in_turns(make: Callable[[], nn.Module], opt: str, dtype: str, x: Tensor, n: int) -> list:
    """Train in chunks and compiled; return for each turn the seconds of both."""
    runs = [Run(make(), opt, dtype, compiled) for compiled in (False, True)]
    for run in runs:
        for _ in range(3):
            run.step(x)
    assert "compiled" in runs[1].opt.update_paths()
    return [[run.step(x) for run in runs] for _ in range(n)]


def operations(n_turns: int) -> list[dict]:
    """Measure what an operation on an element takes more in chunks."""
    rows = []
    make, x = partial(linears, 1024, 10), torch.ones(2, 1024)
    for opt in OPTIMIZERS:
        for dtype in DTYPES:
            work = work_of(make, opt, dtype, x)
            turns = in_turns(make, opt, dtype, x, n_turns)
            saved = median(chunks[1] - compiled[1] for chunks, compiled in turns)
            chunks_ms = 1e3 * median(chunks[1] for chunks, _ in turns)
            row = dict(opt=opt, dtype=dtype, operations=round(work / 10 / 2**20))
            row |= dict(chunks_ms=chunks_ms, saved_ms=1e3 * saved, ns=1e9 * saved / work)
            rows.append(row)
            print(rows[-1], flush=True)
    return rows


MODELS = {
    "linear layers": (partial(linears, 1024, 10), (1024,), (1, 16, 64)),
    "xresnet18": (partial(xresnet18, n_out=10), (3, 64, 64), (2, 4, 16)),
    "xresnet50": (partial(xresnet50, n_out=10), (3, 64, 64), (2, 4, 16)),
}


def steps(n_turns: int) -> list[dict]:
    """Measure what a whole step gains."""
    rows = []
    for name, (make, shape, sizes) in MODELS.items():
        for opt in ("SGD, momentum", "fastai's Adam"):
            for bs in sizes:
                turns = in_turns(make, opt, "bf16", torch.randn(bs, *shape), n_turns)
                saved = median(chunks[1] - compiled[1] for chunks, compiled in turns)
                whole = median(chunks[0] for chunks, _ in turns)
                rows.append(dict(model=name, opt=opt, bs=bs, ms=1e3 * whole, share=saved / whole))
                print(rows[-1], flush=True)
    return rows


def compile_some(n: int) -> None:
    """Train two models, the first `n` of them compiled."""
    for i, opt in enumerate(["AdamW", "SGD, momentum"]):
        run = Run(nn.Linear(2048, 2048), opt, "bf16", i < n)
        for _ in range(2):
            run.step(torch.ones(2, 2048))


def seconds(n: int, cache: str) -> tuple[float, float]:
    """Return the processor's and the wall's seconds of a process that compiles `n` updates."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, "--compile", str(n)], env=env, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, time.perf_counter() - start


def compiling(n_turns: int) -> list[dict]:
    """Measure what the compiler takes."""
    rows = []
    for _ in range(n_turns):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
            none = seconds(0, one)
            found = {"one": seconds(1, one), "one, cached": seconds(1, one), "two": seconds(2, two)}
        rows += [
            dict(functions=k, cpu_s=v[0] - none[0], wall_s=v[1] - none[1]) for k, v in found.items()
        ]
        print(rows[-3:], flush=True)
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)  # a process of `compiling`
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.compile is not None:
        return compile_some(args.compile)
    about = {"date": str(date.today()), "machine": machine_name("cpu"), "threads": 1}
    about |= {"torch": torch.__version__, "python": platform.python_version()}
    found = {"about": about, "operations": operations(args.turns), "steps": steps(args.turns)}
    found["compiling"] = compiling(2)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
