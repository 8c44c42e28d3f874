"""Count the weights that an optimizer step leaves unchanged, with and without masters.

    python bench/lost_updates.py --out bench/results/lost_updates.json    # a minute

Needs CIFAR-10 (see `mixedfp.examples.cifar10`). The network and rate are lesson 1's. It counts
matrices and kernels; with masters, those that the optimizer steps. The README plots the result.
"""

from argparse import Namespace
from statistics import mean

import torch
from common import about, options, table, write
from fastai.callback.core import Callback
from fastai.metrics import accuracy
from fastai.torch_core import set_seed

from mixedfp.examples import MODELS, OPTIMIZERS, cifar10, make_learner

PRECISIONS = ["fp32", "bf16-flat", "bf16-pure"]


class LostUpdates(Callback):
    """Record each step's loss, and the share of weights that the step has not changed."""

    order = 20  # after MixedPrecision

    def before_fit(self):
        """Find the weights that the optimizer steps."""
        self.weights = [p for p in self.model.parameters() if p.ndim > 1]
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


def train(precision: str, seed: int, args: Namespace) -> dict:
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
    args = options(__doc__, seeds=[0], epochs=2, lr=0.001, n_train=2000, n_valid=500)
    given = {k: getattr(args, k) for k in ("epochs", "lr", "n_train", "n_valid")}
    results = [train(name, seed, args) for seed in args.seeds for name in PRECISIONS]
    table([r | {"lost": mean(r["lost"])} for r in results], "precision seed lost:.1% accuracy:.1%")
    write(args.out, {"about": about() | given, "results": results})


if __name__ == "__main__":
    main()
