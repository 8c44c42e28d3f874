"""Holds what the benchmarks share: options, turns, tables, the file, two training loops."""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

import torch
from networks import loss_of
from torch import Tensor, nn

from mixedfp.engine.forward import computing
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler

FLAT = dict(flat_master=True)
HALF = FLAT | dict(half_grads=True)


def options(doc: str | None, **defaults) -> argparse.Namespace:
    """Parse --out, --threads and an option for each default; a list takes several values."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=form)
    parser.add_argument("--out", type=Path, help="a JSON file")
    for name, value in {"threads": 1, **defaults}.items():
        is_list = isinstance(value, list)
        kind, several = type(value[0] if is_list else value), "+" if is_list else None
        shown = f"default: {' '.join(map(str, value)) if is_list else value}"
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, default=value, type=kind, nargs=several, help=shown)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    return args


def about(device: str = "cpu") -> dict:
    """Return the date, the machine and the versions."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "fastai") if find_spec(name)},
        "capability": torch.backends.cpu.get_cpu_capability(),
        # oneDNN's limit: AVX512_CORE_BF16 makes a newer CPU compute like one without AMX and fp16
        "instructions": os.environ.get("ONEDNN_MAX_CPU_ISA", "all"),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
    }


def cpu_name() -> str:
    """Return the processor's name, if the system provides it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write(out: Path | None, whole: Any) -> None:
    """Write the file, if one was requested, in one move: an interrupted run keeps the last one."""
    if out is not None:
        new = out.with_suffix(".new")
        new.write_text(json.dumps(whole, indent=1).replace("NaN", "null") + "\n")
        new.replace(out)


def table(rows: Iterable[dict], columns: str) -> None:
    """Print columns of `rows` as markdown; a column may have a format: "way ms:.1f"."""
    given = [column.partition(":") for column in columns.split()]
    print("\n| " + " | ".join(name for name, _, _ in given) + " |\n" + "|---" * len(given) + "|")
    for row in rows:
        cells = [(row.get(name, ""), how) for name, _, how in given]
        shown = [format(x, how if isinstance(x, int | float) else "") for x, how in cells]
        print("| " + " | ".join(shown) + " |", flush=True)


# times


def seconds(f: Callable, n: int = 1, device: str = "cpu") -> float:
    """Time `n` calls, with CUDA's events on a GPU; return seconds per call."""
    if device == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
    begin = time.perf_counter()
    for _ in range(n):
        f()
    if device == "cuda":
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3 / n
    return (time.perf_counter() - begin) / n


def in_turn(clocks: dict[str, Callable[[], float]], repeats: int, unused: int = 0) -> dict:
    """Call each clock in turn, so that a busy machine affects all; return the seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in clocks}
    for i in range(unused + repeats):
        for name, clock in clocks.items():
            times[name] += [clock()] * (i >= unused)
    return times


def ratio(own: list[float], base: list[float]) -> float:
    """Return the median over turns of `own` divided by `base`."""
    return median(a / b for a, b in zip(own, base, strict=True))


def spread(values: list[float]) -> float:
    """Return the interquartile range as a share of the median."""
    low, middle, high = quantiles(values, n=4, method="inclusive") if values[1:] else values * 3
    return (high - low) / middle


# training loops


class Loop:
    """A PyTorch loop. `precision`: fp32, bf16, fp16, autocast (in bfloat16), autocast-fp16."""

    def __init__(
        self,
        model: nn.Module,
        opt: torch.optim.Optimizer,
        precision: str = "fp32",
        wrap: Callable = lambda model: model,  # such as `torch.compile`
        scaler: Callable = LossScaler,  # for float16
        **masters,  # for `with_masters`
    ):
        device = next(model.parameters()).device.type
        self.opt, self.context, is_fp16 = opt, nullcontext, precision.endswith("fp16")
        if precision.startswith("autocast"):
            dtype = torch.float16 if is_fp16 else torch.bfloat16
            self.context = partial(torch.autocast, device, dtype)
        elif precision != "fp32":
            model, self.opt = with_masters(model, opt, dtype=precision, **masters)
        self.scaler, self.model = scaler(device, 512.0, enabled=is_fp16), wrap(model)

    def step(self, xs: tuple[Tensor, ...], y: Tensor) -> Tensor:
        """Run a whole training step on a batch; return the loss."""
        with self.context():
            loss = loss_of(self.model(*xs), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()
        return loss.detach()


class Generation(Loop):
    """Sixteen forward passes with the same weights, as in generating a text."""

    def step(self, xs: tuple[Tensor, ...], y: Tensor) -> Tensor:
        """Run them; return the last one's loss."""
        with torch.no_grad(), self.context(), computing(self.model):
            for _ in range(16):
                pred = self.model(*xs)
        return loss_of(pred, y)


class InALearner:
    """A fastai `Learner` that gets batches one by one, with all its events."""

    def __init__(
        self, model: nn.Module, opt_func: Callable, lr: float, precision: str = "fp32", **masters
    ):
        from fastai.callback.fp16 import AMPMode, MixedPrecision
        from fastai.callback.progress import ProgressCallback
        from fastai.learner import Learner, Recorder

        import mixedfp.callback  # noqa: F401  adds methods to `Learner`

        class Autocast(MixedPrecision):
            def before_fit(self):
                super().before_fit()
                self.autocast = torch.autocast(device.type, torch.bfloat16)  # fastai's is for CUDA

        device = next(model.parameters()).device
        data: Any = SimpleNamespace(device=device)
        self.learn = learn = Learner(data, model, loss_of, opt_func=opt_func, lr=lr)
        learn.remove_cbs([Recorder, ProgressCallback])  # they read data loaders
        if precision == "autocast":
            learn.add_cb(Autocast(amp_mode=AMPMode.BF16))
        elif precision != "fp32":
            getattr(learn, f"to_{precision}")(**masters)
        if learn.opt is None:
            learn.create_opt()
        learn.opt.set_hypers(lr=lr)
        learn.epoch, learn.n_epoch, learn.n_iter = 0, 1, 1
        for event in ("before_fit", "before_epoch", "before_train"):
            learn(event)

    def step(self, xs: tuple[Tensor, ...], y: Tensor) -> Tensor:
        """Run a whole training step on a batch; return the loss."""
        self.learn.one_batch(0, (*xs, y))
        return self.learn.loss.detach()
