"""Whole training steps, forward to zero_grad, in float32 and in 16 bits, ours and others'.

    python bench/train_step.py --out bench/results/train_step.json      # an hour, 10 GB
    python bench/train_step.py --models vit --ways fp32 autocast-bf16 bf16-flat
    python bench/train_step.py --models xresnet18-32 --profile bf16-flat
    python bench/train_step.py --device cuda --size large --fused

On a CPU each way runs in its own process: in a shared one, the state in which others leave memory,
through page faults alone, made the same step 20 % slower or faster. The ways are timed in turn, so
that a temporarily busy machine affects all of them; a ratio is the median over turns of float32's
time divided by the way's: above 1 is faster. Memory is the peak in the first two steps above the
memory allocated before the model was built, counted by the C library on a CPU and PyTorch on CUDA.
`first` is the extra time of the first three steps over three later ones. Batches are random,
created once. fabric-* (Lightning) and accelerate-* are skipped if these packages are not installed.
fastai's own ways do nothing on a CPU.
"""

import argparse
import gc
import json
import logging
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from types import SimpleNamespace

import torch
from fastai.callback.fp16 import AMPMode
from fastai.callback.fp16 import MixedPrecision as FastaiMixedPrecision
from fastai.callback.progress import ProgressCallback
from fastai.learner import Learner, Recorder
from fastai.optimizer import SGD, Adam
from fastai.tabular.model import TabularModel
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
from fastai.text.models.core import get_language_model
from fastai.vision.models.xresnet import xresnet18, xresnet50
from networks import LM, ViT, images, loss_of, words
from peak_memory import PeakMemory
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import mixedfp.callback  # noqa: F401  adds methods to `Learner`
from mixedfp.examples import Darknet
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler

# models


class AwdLstm(nn.Module):
    """fastai's language model: logits only, each batch from the same fresh state."""

    def __init__(self, n_words: int, **config):
        super().__init__()
        self.lm = get_language_model(AWD_LSTM, n_words, {**awd_lstm_lm_config, **config})

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits of each next word."""
        self.lm.reset()
        return self.lm(x)[0]


class Tabular(TabularModel):
    """Twenty categories and twenty numbers per row."""

    def __init__(self, layers: list[int]):
        super().__init__([(50, 16)] * 20, 20, 10, layers)


def rows(bs: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Create a batch for `Tabular`."""
    return (torch.randint(50, (bs, 20)), torch.randn(bs, 20)), torch.randint(10, (bs,))


@dataclass
class Task:
    """A model and a batch to train it with."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[tuple[Tensor, ...], Tensor]]
    has_conv: bool = False  # so channels_last matters


def tiny() -> nn.Module:
    """Build a model whose first steps load the libraries a way needs, before memory is measured."""
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(576, 256))


TINY = Task(tiny, partial(images, 4, 8), True)

blocks = [1, 2, 2, 2, 2]
small_lstm = {"emb_sz": 200, "n_hid": 400, "n_layers": 2}
TASKS = {
    "small": {
        "darknet": Task(partial(Darknet, blocks, 10, nf=16), partial(images, 64, 32), True),
        "xresnet18-32": Task(partial(xresnet18, n_out=10), partial(images, 64, 32), True),
        "xresnet18-64": Task(partial(xresnet18, n_out=10), partial(images, 64, 64), True),
        "xresnet50": Task(partial(xresnet50, n_out=10), partial(images, 16, 64), True),
        "vit": Task(partial(ViT, 6, 192, 3, 32, 4), partial(images, 64, 32)),
        "tabular": Task(partial(Tabular, [512, 256]), partial(rows, 1024)),
        "awd-lstm": Task(partial(AwdLstm, 5000, **small_lstm), partial(words, 16, 64, 5000)),
        "lm": Task(LM, partial(words, 4, 128, 8000)),
    },
    "large": {
        "darknet": Task(partial(Darknet, blocks, 10, nf=32), partial(images, 512, 64), True),
        "xresnet18": Task(partial(xresnet18, n_out=10), partial(images, 256, 128), True),
        "xresnet50": Task(partial(xresnet50, n_out=10), partial(images, 128, 224), True),
        "vit-b": Task(partial(ViT, 12, 768, 12, 224, 16), partial(images, 128, 224)),
        "tabular": Task(partial(Tabular, [4096, 2048]), partial(rows, 65536)),
        "awd-lstm": Task(partial(AwdLstm, 60000), partial(words, 64, 72, 60000)),
    },
}


# training loops


class Loop:
    """A plain PyTorch loop around a model and an optimizer whose precision is already set."""

    def __init__(
        self,
        model: nn.Module,
        opt: torch.optim.Optimizer,
        context: Callable = nullcontext,  # around the forward pass
        scaler: torch.amp.GradScaler | None = None,
        backward: Callable = Tensor.backward,
    ):
        self.model, self.opt, self.context = model, opt, context
        self.scaler = torch.amp.GradScaler(enabled=False) if scaler is None else scaler
        self._backward = backward

    def forward(self, xs: tuple[Tensor, ...], y: Tensor) -> Tensor:
        """Compute the loss."""
        with self.context():
            pred = self.model(*xs)
        return loss_of(pred, y)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients."""
        self._backward(self.scaler.scale(loss))

    def update(self) -> None:
        """Step, and clear the gradients."""
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()

    def step(self, xs: tuple[Tensor, ...], y: Tensor) -> None:
        """Run a whole training step on a batch."""
        self.backward(self.forward(xs, y))
        self.update()


class Fastai:
    """A `Learner` that gets batches one by one, with all its events."""

    def __init__(self, model: nn.Module, args: argparse.Namespace):
        self.learn = Learner(
            SimpleNamespace(device=torch.device(args.device)),
            model,
            loss_of,
            opt_func=FASTAI_OPTIMIZERS[args.opt],
            lr=RATE,
        )
        self.learn.remove_cbs([Recorder, ProgressCallback])  # they read data loaders

    def begin(self) -> "Fastai":
        """Do what a fit does before its first batch."""
        learn = self.learn
        if learn.opt is None:
            learn.create_opt()
        learn.opt.set_hypers(lr=RATE)
        learn.epoch, learn.n_epoch, learn.n_iter = 0, 1, 1
        for event in ("before_fit", "before_epoch", "before_train"):
            learn(event)
        return self

    def step(self, xs: tuple[Tensor, ...], y: Tensor) -> None:
        """Run a whole training step on a batch."""
        self.learn.one_batch(0, (*xs, y))


RATE = 1e-4  # random targets teach nothing: keep the numbers in an ordinary range
OPTIMIZERS = {"sgd": partial(torch.optim.SGD, momentum=0.9), "adamw": torch.optim.AdamW}
FASTAI_OPTIMIZERS = {"sgd": partial(SGD, mom=0.9), "adamw": Adam}


def make_opt(
    model: nn.Module, args: argparse.Namespace, fused: bool = False
) -> torch.optim.Optimizer:
    """Build the requested optimizer."""
    fused = {"fused": True} if args.fused or fused else {}
    return OPTIMIZERS[args.opt](model.parameters(), lr=RATE, **fused)


def plain(model: nn.Module, args: argparse.Namespace) -> Loop:
    """Train in 32 bits."""
    return Loop(model, make_opt(model, args))


def autocast(
    dtype: torch.dtype,
    model: nn.Module,
    args: argparse.Namespace,
    fused: bool = False,
    compiled: bool = False,
) -> Loop:
    """Train under `torch.autocast`, with a scaler in float16, as PyTorch recommends."""
    scaler = torch.amp.GradScaler(args.device, enabled=dtype == torch.float16)
    context = partial(torch.autocast, torch.device(args.device).type, dtype)
    opt = make_opt(model, args, fused)
    model = torch.compile(model) if compiled else model
    return Loop(model, opt, context=context, scaler=scaler)


def ours(
    dtype: torch.dtype,
    how: dict,
    model: nn.Module,
    args: argparse.Namespace,
    fused: bool = False,
    compiled: bool = False,
) -> Loop:
    """Train a 16-bit model with float32 masters."""
    model, opt = with_masters(model, make_opt(model, args, fused), dtype=dtype, **how)
    model = torch.compile(model) if compiled else model
    scaler = LossScaler(args.device, init_scale=512.0, enabled=dtype == torch.float16)
    return Loop(model, opt, scaler=scaler)


def plain_fastai(model: nn.Module, args: argparse.Namespace) -> Fastai:
    """Train a `Learner` in 32 bits, to measure the cost of fastai's events."""
    return Fastai(model, args).begin()


def ours_in_fastai(to: str, how: dict, model: nn.Module, args: argparse.Namespace) -> Fastai:
    """Train with our `learn.to_bf16()` or `learn.to_fp16()`."""
    run = Fastai(model, args)
    getattr(run.learn, to)(**how)
    return run.begin()


def fastais(mode: AMPMode, model: nn.Module, args: argparse.Namespace) -> Fastai:
    """Train with the callback that fastai's own `to_bf16()` or `to_fp16()` adds."""
    run = Fastai(model, args)
    run.learn.add_cb(FastaiMixedPrecision(amp_mode=mode))
    return run.begin()


class AutocastInFastai(FastaiMixedPrecision):
    """fastai's own mixed precision, on any device: fastai hard-codes CUDA."""

    def before_fit(self):
        """Create the autocast context."""
        super().before_fit()
        self.autocast = torch.autocast(self.dls.device.type, torch.bfloat16)


def autocast_in_fastai(model: nn.Module, args: argparse.Namespace) -> Fastai:
    """Train with `torch.autocast` in a `Learner`."""
    run = Fastai(model, args)
    run.learn.add_cb(AutocastInFastai(amp_mode=AMPMode.BF16))
    return run.begin()


def fabric(precision: str, model: nn.Module, args: argparse.Namespace) -> Loop:
    """Train with Lightning's Fabric: "mixed" is autocast, "true" has no masters."""
    from lightning.fabric import Fabric

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # logs its hardware each time
    device = torch.device(args.device).type
    fab = Fabric(accelerator=device, devices=1, precision=precision)
    model, opt = fab.setup(model, make_opt(model, args))
    return Loop(model, opt, backward=fab.backward)


def accelerate(precision: str, model: nn.Module, args: argparse.Namespace) -> Loop:
    """Train with Accelerate."""
    from accelerate import Accelerator

    acc = Accelerator(mixed_precision=precision, cpu=args.device == "cpu")
    model, opt = acc.prepare(model, make_opt(model, args))
    return Loop(model, opt, backward=acc.backward)


@dataclass
class Way:
    """A way to train, and its requirements."""

    build: Callable[[nn.Module, argparse.Namespace], Loop | Fastai]
    channels_last: bool = False
    package: str = "torch"  # a package it needs
    hardware: bool = False  # skipped on a CPU: float16 is emulated there, 25 times slower


f16, b16 = torch.float16, torch.bfloat16
fused, compiled = {"fused": True}, {"fused": True, "compiled": True}
BEST = {  # the switches available to users; the best for each model is compared
    "fused": (fused, False),
    "fused-cl": (fused, True),
    "compiled": (compiled, False),
    "compiled-cl": (compiled, True),
}
flat = {"flat_master": True}
half = {"half_grads": True}
halves = {"state_dtype": {"grad_avg": b16}}  # fastai's name for the momentum
WAYS = {
    "fp32": Way(plain),
    "fp32-cl": Way(plain, True),
    "autocast-bf16": Way(partial(autocast, b16)),
    "autocast-bf16-cl": Way(partial(autocast, b16), True),
    "autocast-fp16": Way(partial(autocast, f16), hardware=True),
    "fastai-bf16": Way(partial(fastais, AMPMode.BF16)),
    "fastai-fp16": Way(partial(fastais, AMPMode.FP16), hardware=True),
    "fabric-bf16-mixed": Way(partial(fabric, "bf16-mixed"), package="lightning"),
    "fabric-bf16-true": Way(partial(fabric, "bf16-true"), package="lightning"),
    "accelerate-bf16": Way(partial(accelerate, "bf16"), package="accelerate"),
    "bf16": Way(partial(ours, b16, {})),
    "bf16-cl": Way(partial(ours, b16, {}), True),
    "bf16-flat": Way(partial(ours, b16, flat)),
    "bf16-flat-cl": Way(partial(ours, b16, flat), True),
    "bf16-flat-half": Way(partial(ours, b16, flat | half)),
    "learn-fp32": Way(plain_fastai),
    "learn-autocast-bf16": Way(autocast_in_fastai),
    "learn-bf16": Way(partial(ours_in_fastai, "to_bf16", {})),
    "learn-bf16-flat": Way(partial(ours_in_fastai, "to_bf16", flat)),
    "learn-bf16-states": Way(partial(ours_in_fastai, "to_bf16", flat | halves)),
    "learn-bf16-flat-cl": Way(partial(ours_in_fastai, "to_bf16", flat), True),
    "learn-bf16-half": Way(partial(ours_in_fastai, "to_bf16", flat | half)),
    **{f"autocast-bf16-{k}": Way(partial(autocast, b16, **on), cl) for k, (on, cl) in BEST.items()},
    **{f"bf16-flat-{k}": Way(partial(ours, b16, flat, **on), cl) for k, (on, cl) in BEST.items()},
    "fp16": Way(partial(ours, f16, {})),
    "fp16-flat": Way(partial(ours, f16, flat)),
    "learn-fp16-flat": Way(partial(ours_in_fastai, "to_fp16", flat)),
}
MEANINGS = """-cl: channels_last; -fused: PyTorch's fused optimizer; -compiled: and torch.compile.
bf16, fp16: mixedfp, float32 parameters with 16-bit copies; -flat: in one vector. learn-*: the same
with learn.to_bf16() and learn.to_fp16(), and fastai's optimizer; -half: flat, half_grads=True,
-states: flat, the momentum in bfloat16;
learn-fp32 is a Learner in float32, learn-autocast-bf16 a Learner under autocast.
fabric-bf16-true has no masters: this table does not show the small updates it loses."""


def choose(args: argparse.Namespace) -> list[str]:
    """Skip the ways that cannot run or are too slow, and report missing packages."""
    chosen = []
    for name in args.ways or WAYS:
        way = WAYS[name]
        is_slow = way.hardware and args.device == "cpu" and name not in (args.ways or [])
        if find_spec(way.package) is None:
            print(f"{name}: skipped, {way.package} is not installed", file=sys.stderr)
        elif not is_slow or args.all:
            chosen.append(name)
    return chosen


# measurements


def make_run(task: Task, way: Way, args: argparse.Namespace) -> tuple:  # the run and its batch
    """Build a model, with the same weights and batch in every way."""
    torch.manual_seed(0)
    xs, y = task.batch()
    model = task.model().to(args.device)
    xs, y = tuple(x.to(args.device) for x in xs), y.to(args.device)
    if way.channels_last:
        model = model.to(memory_format=torch.channels_last)
        xs = tuple(x.to(memory_format=torch.channels_last) for x in xs)
    return way.build(model.train(), args), (xs, y)


def synchronize(args: argparse.Namespace) -> None:
    """Wait until the device has finished its work."""
    if args.device != "cpu":
        torch.cuda.synchronize(args.device)


def seconds(run: Loop | Fastai, batch: tuple, n: int, args: argparse.Namespace) -> float:
    """Time `n` steps; return seconds per step."""
    synchronize(args)
    start = time.perf_counter()
    for _ in range(n):
        run.step(*batch)
    synchronize(args)
    return (time.perf_counter() - start) / n


def get_task(args: argparse.Namespace, model: str) -> Task:
    """Look a model up."""
    return TASKS[args.size][model]


def fits(task: Task, way: Way) -> bool:
    """Return whether the model can run in this way: channels_last needs convolutions."""
    return task.has_conv or not way.channels_last


class Place:
    """A separate, fresh process on a CPU; CUDA cannot fork and does not need one."""

    def __init__(self, args: argparse.Namespace):
        forks = "fork" in torch.multiprocessing.get_all_start_methods()
        is_own = args.device == "cpu" and forks
        self.pool = ProcessPoolExecutor(1, mp_context=get_context("fork")) if is_own else None

    def call(self, f: Callable, *rest):  # the result of `f`
        """Call `f` in the process."""
        return f(*rest) if self.pool is None else self.pool.submit(f, *rest).result()

    def close(self) -> None:
        """End the process."""
        RUNS.clear()
        if self.pool is not None:
            self.pool.shutdown()


RUNS: dict[str, tuple] = {}  # by way: the run and its batch; one in a separate process


def start(args: argparse.Namespace, model: str, name: str) -> dict:
    """Build a way and run its first steps; return its peak memory and seconds of each step."""
    prepare(args)
    way = WAYS[name]
    run, batch = make_run(TINY, way, args)
    seconds(run, batch, 2, args)
    del run, batch
    gc.collect()
    peak = PeakMemory(args.device, every=0.002)  # there are only two steps to sample
    with peak:
        RUNS[name] = run, batch = make_run(get_task(args, model), way, args)
        firsts = [seconds(run, batch, 1, args) for _ in range(2)]
    firsts.append(seconds(run, batch, 1, args))
    no_memory = args.no_memory or way.channels_last  # a memory layout costs no bytes
    held = None if no_memory else peak.bytes
    return {"bytes": held, "firsts": firsts, "samples": len(batch[1])}


def turn(args: argparse.Namespace, name: str, n: int) -> float:
    """Run `n` steps of a started way; return seconds per step."""
    return seconds(*RUNS[name], n, args)


def start_ways(args: argparse.Namespace, model: str, ways: list[str]) -> tuple[dict, dict]:
    """Start each way in its `Place`; return the places and results of the first steps, by way."""
    places, found = {}, {}
    for name in ways:
        place = Place(args)
        try:
            found[name] = place.call(start, args, model, name)
            places[name] = place
        except Exception as e:
            print(f"{model}, {name}: skipped, {type(e).__name__}: {e}", file=sys.stderr)
            place.close()
    return places, found


def take_turns(args: argparse.Namespace, places: dict) -> dict[str, list[float]]:
    """Time the ways in turn; return seconds per step of each turn, by way."""
    times = {name: [] for name in places}
    for _ in range(args.repeats):
        for name, place in places.items():
            n = turn_length(times["fp32"], args)
            times[name].append(place.call(turn, args, name, n))
    return times


def turn_length(times: list[float], args: argparse.Namespace) -> int:
    """Return the number of steps in a turn, so that it lasts long enough to be timed."""
    return math.ceil(args.turn / median(times)) if times else 1


def prepare(args: argparse.Namespace) -> None:
    """Apply the settings of a process."""
    warnings.filterwarnings("ignore")
    logging.getLogger("mixedfp").setLevel(logging.ERROR)  # hides the notice about fp16 on a CPU
    if args.threads:
        torch.set_num_threads(args.threads)


def measure(args: argparse.Namespace, model: str, ways: list[str]) -> list[dict]:
    """Measure the ways for one model; return a line for each."""
    begin = time.perf_counter()
    ways = [name for name in ways if fits(get_task(args, model), WAYS[name])]
    places, found = start_ways(args, model, ways)
    say(f"{model}: {len(places)} ways started", begin)
    times = take_turns(args, places)
    for place in places.values():
        place.close()
    lines = {}
    for name, own in times.items():
        line = {"model": model, "way": name, "bytes": found[name]["bytes"]}
        line |= summarize(own, times["fp32"], found[name]["samples"])
        lines[name] = line | {"first_ms": 1e3 * (sum(found[name]["firsts"]) - 3 * median(own))}
    say(f"{model}: measured", begin)
    return list(lines.values())


def say(what: str, begin: float) -> None:
    """Report progress."""
    print(f"{what}, {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)


def summarize(own: list[float], fp32: list[float], n_samples: int) -> dict:
    """Combine the turns."""
    low, _, high = quantiles(own, n=4, method="inclusive") if len(own) > 1 else own * 3
    return {
        "ms": 1e3 * median(own),
        "spread": (high - low) / median(own),
        "samples_per_second": n_samples / median(own),
        "to_fp32": median(b / a for a, b in zip(own, fp32, strict=True)),
        "turns_ms": [1e3 * t for t in own],
    }


# output


def show(lines: list[dict]) -> None:
    """Print a table as markdown."""
    print("| model | way | ms per step | spread | samples per second | × fp32 | peak MB | vs fp32 "
          "| first, ms |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    base = {o["model"]: o["bytes"] for o in lines if o["way"] == "fp32"}
    for o in lines:
        memory = share = ""
        if o["bytes"] and base.get(o["model"]):
            memory, share = f"{o['bytes'] / 2**20:.0f}", f"{o['bytes'] / base[o['model']]:.2f}"
        print(
            f"| {o['model']} | {o['way']} | {o['ms']:.1f} | {o['spread']:.0%} "
            f"| {o['samples_per_second']:.0f} | {o['to_fp32']:.2f} | {memory} | {share} "
            f"| {o['first_ms']:.0f} |"
        )


def best_of(lines: list[dict]) -> list[dict]:
    """Choose the best switches for each model, under autocast and in ours: a line each."""
    found, out = {(o["model"], o["way"]): o for o in lines}, []
    for model in dict.fromkeys(o["model"] for o in lines):
        line = {"model": model}
        for name, start in (("autocast", "autocast-bf16"), ("ours", "bf16-flat")):
            own = [o for k in BEST if (o := found.get((model, f"{start}-{k}")))]
            if own:
                o = min(own, key=lambda o: o["ms"])
                switches = o["way"].removeprefix(f"{start}-")
                line[name] = dict(switches=switches, ms=o["ms"], to_fp32=o["to_fp32"])
                line[name] |= dict(first_ms=o["first_ms"], pays_back=payback(o, found))
        if len(line) == 3:
            out.append(line | {"ratio": line["autocast"]["ms"] / line["ours"]["ms"]})
    return out


def show_best(lines: list[dict]) -> None:
    """Print `best_of` as markdown."""
    rows = best_of(lines)
    if not rows:
        return
    head = "× fp32 | first steps, s | pays back after"
    print(f"\n| model | best under autocast | {head} | best of ours | {head} "
          "| ours, × autocast |")  # fmt: skip
    print("|---" * 10 + "|")
    for o in rows:
        cells = [
            f"{c['switches']} | {c['to_fp32']:.2f} | {c['first_ms'] / 1e3:.1f} | {c['pays_back']}"
            for c in (o["autocast"], o["ours"])
        ]
        print(f"| {o['model']} | {' | '.join(cells)} | {o['ratio']:.2f} |")
    print(f"\ngeometric mean: {geometric_mean(o['ratio'] for o in rows):.2f}")


def payback(line: dict, found: dict) -> str:
    """Return the number of steps after which compiling has saved the time it took."""
    eager = found.get((line["model"], line["way"].replace("compiled", "fused")))
    if eager is None or eager is line:
        return "at once"
    gain = eager["ms"] - line["ms"]
    if gain < 0.05 * eager["ms"]:  # repeats vary by more
        return "no clear gain"
    return f"{(line['first_ms'] - eager['first_ms']) / gain:,.0f} steps"


def means(lines: list[dict]) -> list[dict]:
    """Combine the models; return a line for each way."""
    base = {o["model"]: o["bytes"] for o in lines if o["way"] == "fp32"}
    out = []
    for way in dict.fromkeys(o["way"] for o in lines):
        own = [o for o in lines if o["way"] == way]
        shares = [o["bytes"] / base[o["model"]] for o in own if o["bytes"] and base[o["model"]]]
        out.append(
            {
                "way": way,
                "models": len(own),
                "to_fp32": geometric_mean(o["to_fp32"] for o in own),
                "memory_to_fp32": geometric_mean(shares) if shares else None,
            }
        )
    return out


def show_means(lines: list[dict]) -> None:
    """Print the geometric means as markdown."""
    print("\n| way | models | × fp32, geometric mean | memory, × fp32 |\n|---|---|---|---|")
    for o in lines:
        memory = f"{o['memory_to_fp32']:.2f}" if o["memory_to_fp32"] else ""
        print(f"| {o['way']} | {o['models']} | {o['to_fp32']:.2f} | {memory} |")


def show_profile(args: argparse.Namespace, model: str, ways: list[str], n: int = 5) -> None:
    """Print the parts of a step and the slowest operators, side by side."""
    prepare(args)
    parts, tables = {}, {}
    for name in ways:
        run, batch = make_run(get_task(args, model), WAYS[name], args)
        seconds(run, batch, 3, args)
        if isinstance(run, Loop):
            parts[name] = time_parts(run, batch, 2 * n, args)
        tables[name] = time_operators(run, batch, n, args)
    print(f"\n{model}: ms per step\n\n| part | {' | '.join(parts)} |\n|---|{'---|' * len(parts)}")
    for part in ("forward", "backward", "update"):
        print(f"| {part} | {' | '.join(f'{p[part]:.1f}' for p in parts.values())} |")
    ops = sorted(
        {op for t in tables.values() for op in t},
        key=lambda op: -max(t.get(op, (0, 0))[0] for t in tables.values()),
    )
    print(f"\n| operator (self) | {' | '.join(f'{w}, ms | calls' for w in tables)} |")
    print("|---|" + "---|---|" * len(tables))
    for op in ops[:15]:
        cells = [t.get(op, (0, 0)) for t in tables.values()]
        print(f"| {op} | " + " | ".join(f"{ms:.2f} | {calls:g}" for ms, calls in cells) + " |")
    totals = [sum(ms for ms, _ in t.values()) for t in tables.values()]
    print("| all | " + " | ".join(f"{ms:.2f} | " for ms in totals) + " |")


def time_parts(run: Loop, batch: tuple, n: int, args: argparse.Namespace) -> dict[str, float]:
    """Time forward, backward and update separately; return medians in ms."""
    times = {"forward": [], "backward": [], "update": []}
    given = {"forward": batch, "backward": (), "update": ()}
    for _ in range(n):
        loss = None
        for part, own in times.items():
            synchronize(args)
            start = time.perf_counter()
            loss = getattr(run, part)(*(given[part] if part != "backward" else (loss,)))
            synchronize(args)
            own.append(time.perf_counter() - start)
    return {part: 1e3 * median(own) for part, own in times.items()}


def time_operators(run: Loop | Fastai, batch: tuple, n: int, args: argparse.Namespace) -> dict:
    """Profile `n` steps; return (ms, calls) per step of each operator, excluding its callees."""
    on_device = args.device != "cpu"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_device
    with profile(activities=activities) as prof:
        seconds(run, batch, n, args)
    times = {}
    for o in prof.key_averages():
        own = o.self_device_time_total if on_device else o.self_cpu_time_total
        times[o.key] = own / 1e3 / n, o.count / n
    return times


def about(args: argparse.Namespace) -> dict:
    """Return the date, the machine and the versions."""
    names = ("torch", "fastai", "lightning", "accelerate")
    kept = ("size", "opt", "fused", "threads", "repeats", "turn", "device")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine_name(args.device),
        "python": platform.python_version(),
        **{n: version(n) for n in names if find_spec(n) is not None},
        **{k: getattr(args, k) for k in kept if k in args},
        # oneDNN's limit: AVX512_CORE_BF16 makes a newer CPU compute like one without AMX and fp16
        "instructions": os.environ.get("ONEDNN_MAX_CPU_ISA", "all"),
    }


def machine_name(device: str) -> str:
    """Return the name of the GPU or the CPU."""
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    """Run the requested benchmarks, then write and print the tables."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=MEANINGS)
    p.add_argument("--size", choices=TASKS, default="small")
    p.add_argument("--models", nargs="+", help="default: all models of this size")
    p.add_argument("--ways", nargs="+", choices=WAYS, help="default: all; fp32 is always included")
    p.add_argument("--all", action="store_true", help="also ways that a CPU emulates; takes hours")
    p.add_argument("--opt", choices=OPTIMIZERS, default="sgd")
    p.add_argument("--fused", action="store_true", help="PyTorch's fused optimizers in every loop")
    p.add_argument("--repeats", type=int, default=5, help="turns of each way")
    p.add_argument("--turn", type=float, default=0.05, help="minimum seconds per turn")
    p.add_argument("--threads", type=int, default=0, help="0: PyTorch's default")
    p.add_argument("--device", default="cpu")
    p.add_argument("--no-memory", action="store_true", help="measure times only")
    p.add_argument("--profile", nargs="+", choices=WAYS, help="only show where the time goes")
    p.add_argument("--out", type=Path, help="a JSON file")
    args = p.parse_args()
    unknown = set(args.models or []) - set(TASKS[args.size])
    if unknown:
        p.error(f"--models {sorted(unknown)[0]}: expected some of {', '.join(TASKS[args.size])}")
    models = args.models or list(TASKS[args.size])
    if args.profile:
        for model in models:
            place = Place(args)
            place.call(show_profile, args, model, list(dict.fromkeys(["fp32", *args.profile])))
            place.close()
        return
    ways = list(dict.fromkeys(["fp32", *choose(args)]))
    lines = []
    for model in models:
        lines += measure(args, model, ways)
        if args.out:  # after each model: a long run may be interrupted
            whole = {**about(args), "results": lines, "geometric_means": means(lines)}
            whole["best"] = best_of(lines)
            args.out.write_text(json.dumps(whole, indent=1) + "\n")
    show(lines)
    show_best(lines)
    show_means(means(lines))
    print("\n" + MEANINGS.replace("\n", " "))


if __name__ == "__main__":
    main()
