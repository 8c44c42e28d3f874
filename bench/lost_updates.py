"""Count the weights that an optimizer step leaves unchanged, with and without masters.

    python bench/lost_updates.py                   # lesson 1's network and rate: a minute
    python bench/lost_updates.py --seeds 0 1 2

Needs CIFAR-10 (see `mixedfp.examples.cifar10`). It counts matrices and kernels; with masters, those
that the optimizer steps. The README plots the result.
"""

import argparse
import json
from datetime import date
from pathlib import Path

import torch
from fastai.callback.core import Callback
from fastai.metrics import accuracy
from fastai.torch_core import set_seed

from mixedfp.compare import MODELS, OPTIMIZERS, make_learner
from mixedfp.examples import cifar10

PRECISIONS = ["fp32", "bf16-flat", "bf16-pure"]


class LostUpdates(Callback):
    """Record each step's loss, and the share of weights that the step has not changed."""

    order = 20  # after MixedPrecision

    def before_fit(self):
        """Find the weights that the optimizer steps."""
        masters = getattr(self.learn, "mp_cb", None)
        params = self.model.parameters()
        self.weights = masters.master_params[0] if masters else [p for p in params if p.ndim > 1]
        self.losses, self.shares, self.start = [], [], self.copy()

    def copy(self):
        """Copy all weights."""
        return torch.cat([w.detach().flatten() for w in self.weights])

    def unchanged(self, since):
        """Return the share of weights that equal `since`."""
        return (self.copy() == since).float().mean().item()

    def before_step(self):
        """Store the weights."""
        self.before = self.copy()

    def after_step(self):
        """Compare with the weights before the step."""
        self.shares.append(self.unchanged(self.before))
        self.losses.append(self.loss.item())

    def after_fit(self):
        """Compare with the initial weights."""
        self.unmoved = self.unchanged(self.start)


def train(precision: str, seed: int, args: argparse.Namespace) -> dict:
    """Train once, and return the results."""
    set_seed(seed)
    dls = cifar10(n_train=args.n_train, n_valid=args.n_valid, bs=64, device="cpu", seed=seed)
    kwargs = {"opt_func": OPTIMIZERS["sgd"], "metrics": accuracy}
    learn = make_learner(precision, dls, MODELS["darknet"](dls.c), **kwargs)
    lost = LostUpdates()
    with learn.no_bar(), learn.no_logging():
        learn.fit_one_cycle(args.epochs, args.lr, cbs=lost)
    lists = {"lost": lost.shares, "losses": lost.losses}
    found = {name: [round(v, 5) for v in values] for name, values in lists.items()}
    about = {"precision": precision, "seed": seed, "unmoved": lost.unmoved}
    return about | {"accuracy": learn.recorder.values[-1][-1]} | found


def main() -> None:
    """Train each precision with each seed, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--n-train", type=int, default=2000)
    parser.add_argument("--n-valid", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("bench/results/lost_updates.json"))
    args = parser.parse_args()
    about = {k: v for k, v in vars(args).items() if k not in ("out", "seeds")}
    about = {"date": f"{date.today()}", "torch": torch.__version__} | about
    results = []
    for seed in args.seeds:
        for name in PRECISIONS:
            results.append(r := train(name, seed, args))
            lost = sum(r["lost"]) / len(r["lost"])
            print(f"{name}, seed {seed}: {lost:.1%} lost, accuracy {r['accuracy']:.1%}", flush=True)
            args.out.write_text(json.dumps({"about": about, "results": results}) + "\n")


if __name__ == "__main__":
    main()
