"""Whole training steps on a CPU, forward to zero_grad: in float32, under autocast, with masters.

    python bench/train_step.py --out bench/results/train_step.json      # an hour, 10 GB
    python bench/train_step.py --models vit --ways autocast-bf16 bf16-flat

Each way runs in its own process: in a shared one, the state in which others leave memory, through
page faults alone, made the same step 20 % slower or faster. `to_fp32` is the median over turns of
float32's time divided by the way's: above 1 is faster. `bytes` is the peak of PyTorch's tensors in
the first two steps. `first_ms` is the extra time of the first three steps over three later ones.
Batches are random, created once.

-cl: channels_last; -fused: PyTorch's fused optimizer; -compiled: and torch.compile. bf16, fp16:
mixedfp, float32 parameters with 16-bit copies; -flat: in one vector. learn-*: in a `Learner`.
"""

import logging
import math
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import accumulate
from multiprocessing import get_context
from statistics import geometric_mean, median

import torch
from common import (
    FLAT,
    InALearner,
    Loop,
    about,
    in_turn,
    options,
    ratio,
    seconds,
    spread,
    table,
    write,
)
from fastai.optimizer import SGD
from fastai.tabular.model import TabularModel
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
from fastai.text.models.core import get_language_model
from fastai.vision.models.xresnet import xresnet18, xresnet50
from networks import LM, ViT, images, words
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from mixedfp.examples import Darknet


class AwdLstm(nn.Module):
    """fastai's language model: logits only, each batch from the same fresh state."""

    def __init__(self):
        super().__init__()
        config = awd_lstm_lm_config | dict(emb_sz=200, n_hid=400, n_layers=2)
        self.lm = get_language_model(AWD_LSTM, 5000, config)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits of each next word."""
        self.lm.reset()
        return self.lm(x)[0]


def rows() -> tuple[tuple[Tensor, ...], Tensor]:
    """Create a table of twenty categories and twenty numbers per row, and their classes."""
    return (torch.randint(50, (1024, 20)), torch.randn(1024, 20)), torch.randint(10, (1024,))


def tiny() -> nn.Module:
    """Build a model whose first steps load the libraries a way needs, before memory is measured."""
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(576, 256))


MODELS: dict[str, tuple[Callable, Callable]] = {
    "darknet": (partial(Darknet, [1, 2, 2, 2, 2], 10, nf=16), partial(images, 64, 32)),
    "xresnet18-32": (partial(xresnet18, n_out=10), partial(images, 64, 32)),
    "xresnet18-64": (partial(xresnet18, n_out=10), partial(images, 64, 64)),
    "xresnet50": (partial(xresnet50, n_out=10), partial(images, 16, 64)),
    "vit": (partial(ViT, 6, 192, 3, 32, 4), partial(images, 64, 32)),
    "tabular": (partial(TabularModel, [(50, 16)] * 20, 20, 10, [512, 256]), rows),
    "awd-lstm": (AwdLstm, partial(words, 16, 64, 5000)),
    "lm": (LM, partial(words, 4, 128, 8000)),
}
CONVOLUTIONAL = {"darknet", "xresnet18-32", "xresnet18-64", "xresnet50"}  # channels_last matters
RATE = 1e-4  # random targets teach nothing: keep the numbers in an ordinary range
SWITCHES = {  # those available to users; the best for each model is compared
    "fused": dict(fused=True),
    "fused-cl": dict(fused=True, channels_last=True),
    "compiled": dict(fused=True, wrap=torch.compile),
    "compiled-cl": dict(fused=True, wrap=torch.compile, channels_last=True),
}
CL, AUTOCAST, BF16 = dict(channels_last=True), dict(precision="autocast"), dict(precision="bf16")
WAYS: dict[str, dict] = {
    "fp32": {},
    "fp32-cl": CL,
    "autocast-bf16": AUTOCAST,
    "autocast-bf16-cl": AUTOCAST | CL,
    "bf16": BF16,
    "bf16-flat": BF16 | FLAT,
    "bf16-flat-cl": BF16 | FLAT | CL,
    "learn-fp32": {},
    "learn-autocast-bf16": AUTOCAST,
    "learn-bf16-flat": BF16 | FLAT,
    "learn-bf16-flat-cl": BF16 | FLAT | CL,
    **{f"autocast-bf16-{k}": AUTOCAST | on for k, on in SWITCHES.items()},
    **{f"bf16-flat-{k}": BF16 | FLAT | on for k, on in SWITCHES.items()},
}
IN_FP16 = {  # products are emulated: several times slower, and measured only if named
    "fp16": dict(precision="fp16"),
    "fp16-flat": FLAT | dict(precision="fp16"),
    "learn-fp16-flat": FLAT | dict(precision="fp16"),
}


def make(model: str, way: str) -> tuple[Callable, int]:  # a step, and the number of samples in it
    """Build a model, with the same weights and batch in every way."""
    torch.manual_seed(0)
    how = dict((WAYS | IN_FP16)[way])
    build, batch = MODELS.get(model, (tiny, partial(images, 4, 8)))
    (xs, y), net = batch(), build().train()
    if how.pop("channels_last", False):
        net = net.to(memory_format=torch.channels_last)
        xs = tuple(x.to(memory_format=torch.channels_last) for x in xs)
    fused = {"fused": True} if how.pop("fused", False) else {}
    if way.startswith("learn"):
        run = InALearner(net, partial(SGD, mom=0.9), RATE, **how)
    else:
        run = Loop(net, torch.optim.SGD(net.parameters(), RATE, 0.9, **fused), **how)
    return partial(run.step, xs, y), len(y)


def peak(f: Callable) -> int:
    """Return the most bytes that PyTorch's tensors take during `f`, above those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        f()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


STEP: list[Callable] = []  # of this process


def start(model: str, way: str) -> dict:
    """Build a way and run its first steps; return its peak memory, their time and the samples."""
    tiny_step, _ = make("tiny", way)
    seconds(tiny_step, 2)
    del tiny_step
    found = {}

    def begin():
        step, found["samples"] = make(model, way)
        STEP.append(step)
        found["first_s"] = 2 * seconds(step, 2)

    found["bytes"] = peak(begin)
    found["first_s"] += turn(1)
    return found


def turn(n: int) -> float:
    """Return seconds per step of `n` steps of this process."""
    return seconds(STEP[0], n)


def measure(model: str, ways: list[str], repeats: int, shortest: float) -> list[dict]:
    """Measure the ways for one model; return a row for each."""
    ways = [way for way in ways if model in CONVOLUTIONAL or not way.endswith("-cl")]
    places = {way: ProcessPoolExecutor(1, mp_context=get_context("fork")) for way in ways}
    found = {way: place.submit(start, model, way).result() for way, place in places.items()}
    n = math.ceil(shortest / places["fp32"].submit(turn, 1).result())  # steps in a turn
    clocks = {w: lambda place=place: place.submit(turn, n).result() for w, place in places.items()}
    times = in_turn(clocks, repeats)
    for place in places.values():
        place.shutdown()
    return [
        {
            "model": model,
            "way": way,
            "bytes": None if way.endswith("-cl") else found[way]["bytes"],  # a layout costs none
            "ms": 1e3 * median(own),
            "spread": spread(own),
            "samples_per_second": found[way]["samples"] / median(own),
            "to_fp32": ratio(times["fp32"], own),
            "turns_ms": [1e3 * t for t in own],
            "first_ms": 1e3 * (found[way]["first_s"] - 3 * median(own)),
        }
        for way, own in times.items()
    ]


def best_of(rows: list[dict]) -> list[dict]:
    """Choose the best switches for each model, under autocast and in mixedfp: a line each."""
    found, out = {(o["model"], o["way"]): o for o in rows}, []
    for model in dict.fromkeys(o["model"] for o in rows):
        line = {"model": model}
        for name, start in (("autocast", "autocast-bf16"), ("mixedfp", "bf16-flat")):
            own = {k: o for k in SWITCHES if (o := found.get((model, f"{start}-{k}")))}
            if own:
                switches, o = min(own.items(), key=lambda item: item[1]["ms"])
                line[name] = {"switches": switches} | {k: o[k] for k in ("ms", "to_fp32")}
                eager = own.get(switches.replace("compiled", "fused"))
                line[name] |= {"first_ms": o["first_ms"], "pays_back": payback(o, eager)}
        if len(line) == 3:
            out.append(line | {"ratio": line["autocast"]["ms"] / line["mixedfp"]["ms"]})
    return out


def payback(row: dict, eager: dict | None) -> str:
    """Return the number of steps after which compiling has saved the time it took."""
    if eager is None or eager is row:
        return "at once"
    gain = eager["ms"] - row["ms"]
    if gain < 0.05 * eager["ms"]:  # repeats vary by more
        return "no clear gain"
    return f"{(row['first_ms'] - eager['first_ms']) / gain:,.0f} steps"


def main() -> None:
    """Run the requested benchmarks, writing the file after each model, and print the tables."""
    threads = torch.get_num_threads()
    args = options(
        __doc__, models=list(MODELS), ways=list(WAYS), repeats=5, turn=0.05, threads=threads
    )
    warnings.filterwarnings("ignore")
    logging.getLogger("mixedfp").setLevel(logging.ERROR)  # hides the notice about fp16 on a CPU
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # hides the profiler's messages
    rows = []
    for model in args.models:
        rows += (
            new := measure(
                model, list(dict.fromkeys(["fp32", *args.ways])), args.repeats, args.turn
            )
        )
        table(
            new, "model way ms:.1f spread:.0% samples_per_second:.0f to_fp32:.2f bytes first_ms:.0f"
        )
        settings = dict(opt="sgd", repeats=args.repeats, turn=args.turn)
        write(args.out, about() | settings | dict(results=rows, best=best_of(rows)))
    best = best_of(rows)
    for name in ("autocast", "mixedfp"):
        print(f"\nbest, {name}")
        table(
            [{"model": o["model"]} | o[name] for o in best], "model switches to_fp32:.2f pays_back"
        )
    if best:
        print(f"\nours by autocast, geometric mean: {geometric_mean(o['ratio'] for o in best):.2f}")


if __name__ == "__main__":
    main()
