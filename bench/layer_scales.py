"""One loss scale against a scale per layer: accuracy, and gradients flushed to zero.

    python bench/layer_scales.py --out bench/results/layer_scales.json    # 2 minutes

Needs CIFAR-10 (see `mixedfp.examples.cifar10`). Two tasks: an ordinary network on CIFAR-10, and
the network of `nbs/07_layerwise`, built so that no single scale fits, on scikit-learn's digits.
Each is trained in float32, in float16 with one dynamic loss scale, and with layer scales in
addition. After training, one batch's gradients are compared with float32 gradients for the same
(16-bit) weights: a gradient is flushed if it is zero in float16 only.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator
from itertools import product
from statistics import mean, median, stdev

import torch
from common import about, options, table, write
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

from mixedfp import precision_report
from mixedfp.examples import Darknet, cifar10
from mixedfp.layerwise import LayerwiseGradientScaler
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler

MODES = ["fp32", "one scale", "layer scales"]


class Block(nn.Module):
    """A layer, with a skip connection where sizes allow, that passes on 2**-6 of its gradient."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__()
        self.fc = nn.Linear(n_in, n_out)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer."""
        y = torch.tanh(self.fc(x))
        y = x + y if x.shape == y.shape else y
        return y * 2.0**-6 + (y * (1 - 2.0**-6)).detach()


class Head(nn.Module):
    """A linear layer with large inputs and small weights: their gradients are large."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__()
        self.fc = nn.Linear(n_in, n_out)
        self.fc.weight.data /= 2.0**10

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer."""
        return self.fc(x * 2.0**10)


class Digits:
    """The network that needs layer scales, and Adam, which takes full steps on tiny gradients."""

    name, epochs, steps = "digits, built to need it", 10, 48  # an epoch

    def __init__(self, seed: int):
        x, y = load_digits(return_X_y=True)
        mix = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        self.x = torch.tensor(x, dtype=torch.float32)[mix] / 16
        self.y = torch.tensor(y)[mix]
        self.rng = torch.Generator().manual_seed(seed)

    def model(self) -> nn.Module:
        """Build it, with fresh weights."""
        middle = [Block(32, 32) for _ in range(6)]
        return nn.Sequential(Block(64, 4), Block(4, 32), *middle, Head(32, 10))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build Adam; the head's small weights have small steps."""
        body, head = model[:-1].parameters(), model[-1].parameters()
        groups = [{"params": body}, {"params": head, "lr": 0.002 / 2**10}]
        return torch.optim.Adam(groups, lr=0.002, eps=1e-25)

    def train(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch."""
        for i in torch.randperm(1536, generator=self.rng).split(32):
            yield self.x[i], self.y[i]

    def valid(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rest of the digits."""
        yield self.x[1536:], self.y[1536:]


class Cifar:
    """Airplane or dog: a small Darknet and SGD, nothing special."""

    name, epochs, steps = "CIFAR-10, airplane or dog", 3, 20  # an epoch

    def __init__(self, seed: int):
        self.dls = cifar10(n_train=1000, n_valid=500, bs=50, device="cpu", seed=seed)

    def model(self) -> nn.Module:
        """Build it, with fresh weights."""
        return Darknet([1, 1, 1], 2, nf=16)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build SGD."""
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def train(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch."""
        for x, y in self.dls.train:
            yield x.as_subclass(Tensor), y.as_subclass(Tensor)

    def valid(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the images of the test set."""
        for x, y in self.dls.valid:
            yield x.as_subclass(Tensor), y.as_subclass(Tensor)


def scales_for(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return scales that move each layer's gradients to the middle of float16's range."""
    modules = precision_report(model, [(x, y)], F.cross_entropy).modules
    middles = {m.name: sum(m.window) / 2 for m in modules if math.isfinite(sum(m.window))}
    lowest, scales = min(middles.values()), {}  # the lowest is left to the loss scale
    for name, _ in model.named_modules():
        inside = [e for k, e in middles.items() if f"{k}.".startswith(f"{name}.")]
        if inside:  # the first module has no window: its input has no gradient
            scales[name] = 2.0 ** round(middles.get(name, inside[0]) - lowest)
    return scales


class Run:
    """A model and its optimizer in one mode, and the loop's steps."""

    def __init__(self, mode: str, model: nn.Module, scales: dict, get_optimizer: Callable):
        dtype = torch.float32 if mode == "fp32" else torch.float16
        self.model, self.opt = with_masters(model, get_optimizer(model), dtype=dtype)
        self.layers = LayerwiseGradientScaler(model, scales) if mode == "layer scales" else None
        # grows early, so that the single scale is as high as possible
        settings = {"growth_interval": 25, "enabled": mode != "fp32", "layers": self.layers}
        self.scaler = LossScaler("cpu", **settings)

    def backward(self, x: Tensor, y: Tensor) -> None:
        """Compute the true gradients."""
        self.opt.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)

    def step(self) -> None:
        """Step unless a gradient has overflowed, and update the scales."""
        self.scaler.step(self.opt)
        self.scaler.update()

    @torch.no_grad()
    def accuracy(self, batches: Iterator[tuple[Tensor, Tensor]]) -> float:  # percent
        """Return the share of correct predictions."""
        self.model.eval()
        right = [self.model(x).argmax(1) == y for x, y in batches]
        self.model.train()
        return 100 * torch.cat(right).float().mean().item()


def flushed(run: Run, fresh: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return, for each weight, the share of gradients that are zero here but not in float32."""
    truth = copy.deepcopy(fresh)
    with torch.no_grad():
        for p, q in zip(truth.parameters(), run.model.parameters(), strict=True):
            p.copy_(q)
    F.cross_entropy(truth(x), y).backward()
    run.backward(x, y)
    while bool(run.scaler.known_of(run.opt).found_inf):
        run.step()
        run.backward(x, y)
    shares = {}
    both = zip(truth.named_parameters(), run.model.parameters(), strict=True)
    for (name, p), q in both:
        if p.ndim > 1:
            is_there = p.grad != 0
            shares[name.removesuffix(".weight")] = (q.grad[is_there] == 0).float().mean().item()
    return shares


def train_one(task: type, mode: str, seed: int) -> dict:
    """Train once: accuracy, skips, scales, and flushed gradients."""
    start = time.process_time()
    data = task(seed)
    torch.manual_seed(seed)
    fresh = data.model()
    scales = scales_for(fresh, *next(data.train())) if mode == "layer scales" else {}
    run = Run(mode, copy.deepcopy(fresh), scales, data.optimizer)
    rate = OneCycleLR(run.opt, [g["lr"] for g in run.opt.param_groups], task.epochs * task.steps)
    for _ in range(task.epochs):
        for x, y in data.train():
            run.backward(x, y)
            run.step()
            rate.step()
    out = {"accuracy": run.accuracy(data.valid()), "cpu_seconds": time.process_time() - start}
    if mode == "fp32":
        return out | {"loss_scale": 1.0, "skipped": 0, "flushed": {}, "exponents": {}}
    out |= {"loss_scale": run.scaler.get_scale(), "skipped": run.scaler.n_skipped}
    out["flushed"] = flushed(run, fresh, *next(data.train()))
    infos = [] if run.layers is None else run.layers.get_layer_info()
    scales = {info.layer_name: math.log2(info.scaling_factor) for info in infos}
    return out | {"exponents": {k: v for k, v in scales.items() if k in out["flushed"]}}


def summarize(task: type, mode: str, runs: list[dict]) -> dict:
    """Combine the seeds of one mode."""
    accuracies = [r["accuracy"] for r in runs]
    return {
        "network": task.name,
        "mode": mode,
        "accuracies": accuracies,
        "accuracy_mean": mean(accuracies),
        "accuracy_sd": stdev(accuracies) if len(runs) > 1 else float("nan"),
        "loss_scales": [r["loss_scale"] for r in runs],
        "skipped": [r["skipped"] for r in runs],
        "cpu_seconds": median(r["cpu_seconds"] for r in runs),
        "flushed": {k: mean(r["flushed"][k] for r in runs) for k in runs[0]["flushed"]},
        "exponents": {k: median(r["exponents"][k] for r in runs) for k in runs[0]["exponents"]},
    }


def main() -> None:
    """Run the benchmark, then write and print the table."""
    args, rows = options(__doc__, seeds=[0, 1, 2]), []
    for task, mode in product((Cifar, Digits), MODES):
        rows.append(summarize(task, mode, [train_one(task, mode, seed) for seed in args.seeds]))
        write(args.out, about() | {"seeds": args.seeds, "results": rows})
    worst = [max(o["flushed"].values(), default=0.0) for o in rows]
    shown = [o | {"flushed": w} for o, w in zip(rows, worst, strict=True)]  # of the worst layer
    table(shown, "network mode accuracy_mean:.1f accuracy_sd:.1f flushed:.2% cpu_seconds:.1f")


if __name__ == "__main__":
    main()
