"""The cost of a report, and of monitoring a healthy step, measured repeatedly on a CPU.

    python bench/report.py --out bench/results/report.json    # 2 minutes on 2 cores

A Darknet on batches of 64 random images of 32 x 32, in a Learner with flat masters. `plain`
trains with only `to_fp16()`; `watched` adds the recorder's columns and the norm of the gradients.
`step` is the median time of a batch, `ratio` the median over repeats of watched / plain. `report`
and `find_overflow` are measured on one batch, in units of a `plain` step.
"""

import argparse
import json
import platform
import time
from datetime import date
from pathlib import Path
from statistics import median

import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import Adam
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mixedfp import find_overflow, precision_report
from mixedfp.callback import PrecisionRecorder
from mixedfp.examples import Darknet

MODES = {"plain": [], "watched": [PrecisionRecorder]}


class Times(Callback):
    """Records the time of each batch."""

    order = -100

    def __init__(self):
        self.taken = []

    def before_batch(self):
        """Start the clock."""
        self.began = time.perf_counter()

    def after_batch(self):
        """Stop the clock."""
        self.taken.append(time.perf_counter() - self.began)


def learner(batches: int, watching: list) -> Learner:
    """Create a Learner in float16 that trains quietly."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64 * batches, 3, 32, 32), torch.arange(64 * batches) % 10)
    dls = DataLoaders(DataLoader(data, 64), DataLoader(data, 64))
    cbs = [Times(), *(cb() for cb in watching)]
    model = Darknet([1, 2, 2], num_classes=10, nf=16)
    learn = Learner(dls, model, nn.CrossEntropyLoss(), opt_func=Adam, lr=1e-3, cbs=cbs)
    return learn.to_fp16(flat_master=True)


def seconds(f, *args, **kwargs) -> float:
    """Time one call."""
    began = time.perf_counter()
    f(*args, **kwargs)
    return time.perf_counter() - began


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    learns = {mode: learner(5, watching) for mode, watching in MODES.items()}
    times = {mode: [] for mode in MODES}
    for repeat in range(args.repeats + 1):
        for mode, learn in learns.items():
            learn.times.taken.clear()
            with learn.no_bar(), learn.no_logging():
                learn.fit(1)
            if repeat:  # the first repeat is a warm-up
                times[mode].append(median(learn.times.taken[:5]))
    plain = median(times["plain"])
    model = Darknet([1, 2, 2], num_classes=10, nf=16)
    batch, loss = next(iter(learns["plain"].dls.train)), nn.CrossEntropyLoss()
    asked = {"report": (precision_report, [batch]), "find_overflow": (find_overflow, batch)}
    found = {
        name: median(seconds(f, model, given, loss) for _ in range(3)) / plain
        for name, (f, given) in asked.items()
    }
    about = dict(date=str(date.today()), torch=torch.__version__, machine=platform.machine())
    pairs = zip(times["watched"], times["plain"], strict=True)
    result = dict(
        about=about | dict(threads=torch.get_num_threads()),
        step_ms={mode: round(1e3 * median(ms), 1) for mode, ms in times.items()},
        ratio=round(median(a / b for a, b in pairs), 3),
        in_steps={name: round(x, 1) for name, x in found.items()},
    )
    print(json.dumps(result, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
