"""Train one model in several precisions: accuracy over seeds, and training time per epoch.

    python bench/accuracy.py                         # 3 seeds, rates 0.01 and 0.001: 10 minutes
    python bench/accuracy.py --seeds 0 --epochs 1    # a quick look
    python bench/accuracy.py                         # again: only remeasures the times

Needs CIFAR-10 (see `mixedfp.examples.cifar10`). Every finished run is a line of the CSV file and
is not repeated. Times are measured separately: the precisions take turns, a few batches each, so
that a temporarily busy machine affects all of them.
"""

import argparse
import csv
import json
import platform
import time
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev

import torch
from fastai.callback.core import Callback, CancelValidException
from fastai.torch_core import set_seed

from mixedfp.command import PRECISIONS
from mixedfp.compare import MODELS, OPTIMIZERS, make_learner, train_once
from mixedfp.examples import cifar10

COLUMNS = ["precision", "lr", "seed", "accuracy", "valid_loss", "skipped", "loss_scale"]


class BatchTimes(Callback):
    """Record the time of each training batch, from casting its inputs to clearing the gradients."""

    order = -100  # starts the clock before any other callback

    def before_fit(self):
        """Create the list."""
        self.seconds = []

    def before_batch(self):
        """Start the clock."""
        self.start = time.perf_counter()

    def after_batch(self):
        """Stop the clock."""
        if self.training:
            self.seconds.append(time.perf_counter() - self.start)

    def before_validate(self):
        """Skip validation."""
        raise CancelValidException


def measure_times(args: argparse.Namespace) -> dict:
    """Time the precisions in turn; return seconds per epoch, and the ratio to fp32."""
    learners, batches = {}, {}
    for name in args.precisions:
        set_seed(0)
        dls = cifar10(n_train=4 * args.bs, n_valid=2, bs=args.bs, device="cpu", seed=0)
        model = MODELS[args.model](dls.c)
        learners[name] = make_learner(name, dls, model, opt_func=OPTIMIZERS[args.opt])
        batches[name] = []
    for turn in range(args.turns + 1):
        for name, learn in learners.items():
            clock = BatchTimes()
            with learn.no_bar(), learn.no_logging():
                learn.fit(1, 0.001, cbs=clock)
            if turn > 0:  # the first turn is a warm-up
                batches[name].append(median(clock.seconds))
    fp32 = batches.get("fp32", [float("nan")] * args.turns)
    return {
        name: {
            "seconds": (args.n_train // args.bs) * median(own),
            "to_fp32": median(a / b for a, b in zip(own, fp32, strict=True)),
        }
        for name, own in batches.items()
    }


def train_all(args: argparse.Namespace, path: Path) -> list[dict]:
    """Do the runs that `path` lacks, and write each to it when finished."""
    rows = read(path)
    done = {(r["precision"], r["lr"], r["seed"]) for r in rows}
    get_dls = partial(cifar10, n_train=args.n_train, n_valid=args.n_valid, bs=args.bs, device="cpu")
    for seed in args.seeds:
        for lr in args.lrs:
            for name in args.precisions:
                if (name, lr, seed) in done:
                    continue
                make_model = MODELS[args.model]
                result = train_once(name, get_dls, make_model, args.opt, args.epochs, lr, seed)
                rows.append({**{k: getattr(result, k) for k in COLUMNS if k != "lr"}, "lr": lr})
                with path.open("w", newline="") as f:
                    writer = csv.DictWriter(f, COLUMNS)
                    writer.writeheader()
                    writer.writerows(rows)
    return rows


def read(path: Path) -> list[dict]:
    """Read the lines of `path`; return none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as f:
        return [
            {k: v if k == "precision" else float(v or "nan") for k, v in row.items()}
            for row in csv.DictReader(f)
        ]


def summarize(rows: list[dict], times: dict) -> list[dict]:
    """Return a line per rate and precision: mean and deviation over seeds, time over fp32's."""
    lines = []
    for lr in sorted({r["lr"] for r in rows}, reverse=True):
        for name in PRECISIONS:
            runs = [r for r in rows if r["lr"] == lr and r["precision"] == name]
            if not runs:
                continue
            percents = [100 * r["accuracy"] for r in runs]
            lines.append(
                {
                    "lr": lr,
                    "precision": name,
                    "seeds": len(runs),
                    "accuracy_mean": mean(percents),
                    "accuracy_sd": stdev(percents) if len(runs) > 1 else float("nan"),
                    "valid_loss": mean(r["valid_loss"] for r in runs),
                    "skipped": sum(r["skipped"] for r in runs),
                    **times.get(name, {"seconds": float("nan"), "to_fp32": float("nan")}),
                }
            )
    return lines


def show(lines: list[dict]) -> None:
    """Print the table as markdown."""
    print("| rate | precision | accuracy, % | validation loss | s per epoch | × fp32 | skipped |")
    print("|---|---|---|---|---|---|---|")
    for o in lines:
        accuracy = f"{o['accuracy_mean']:.1f} ± {o['accuracy_sd']:.1f}"
        print(
            f"| {o['lr']:g} | {o['precision']} | {accuracy} | {o['valid_loss']:.3f} "
            f"| {o['seconds']:.2f} | {o['to_fp32']:.2f} | {o['skipped']:.0f} |"
        )


def main() -> None:
    """Do the requested runs, then write and print the table."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument(
        "--precisions",
        nargs="+",
        choices=PRECISIONS,
        default=["fp32", "bf16-flat", "bf16", "bf16-pure", "fp16-flat"],
    )
    p.add_argument("--lrs", nargs="+", type=float, default=[0.01, 0.001])
    p.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    p.add_argument("--model", choices=MODELS, default="darknet")
    p.add_argument("--opt", choices=OPTIMIZERS, default="sgd")
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--bs", type=int, default=64)
    p.add_argument("--n-train", type=int, default=2000)
    p.add_argument("--n-valid", type=int, default=500)
    p.add_argument("--turns", type=int, default=10, help="timing turns of 4 batches; 0: no timing")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--out", type=Path, default=Path("accuracy"), help="writes OUT.csv and OUT.json")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    rows = train_all(args, args.out.with_suffix(".csv"))
    lines = summarize(rows, measure_times(args) if args.turns else {})
    about = {k: v for k, v in vars(args).items() if k not in ("out", "precisions", "lrs", "seeds")}
    about = {"torch": torch.__version__, "machine": platform.machine(), **about}
    whole = json.dumps({**about, "results": lines}, indent=1)
    args.out.with_suffix(".json").write_text(whole.replace("NaN", "null") + "\n")
    show(lines)


if __name__ == "__main__":
    main()
