"""What masters of many small parameters cost in a loop by hand: there a call costs more than a sum.

    python bench/many_small.py --out bench/results/many_small.json    # 2 minutes on a CPU

A chain of small linear layers, a master for each parameter or `flat`, beside PyTorch's optimizer
over float32 weights; with a loss scale, beside PyTorch's `GradScaler`. `half` is the 16-bit model
under PyTorch's optimizer, without masters: what the layers themselves cost. The ways take turns in
one run, in one thread; times are medians in ms. `step` is what `optimizer.step()` or `scaler.step`
and `update` take, the check of the gradients and the copy to the model with it.
"""

import argparse
import time
from pathlib import Path
from statistics import median

import torch
from master_step import write_rows
from torch import nn

from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler

WIDTH = 32
WAYS = {
    "float32": "float32",
    "half": "float32",
    "bf16": "float32",
    "bf16, unchecked": "float32",
    "bf16, flat": "float32",
    "float32, scaled": "float32, scaled",
    "fp16, scaled": "float32, scaled",
    "fp16, flat, scaled": "float32, scaled",
}  # and what each is compared with
OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-4, momentum=0.9, foreach=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-4, foreach=True),
}


class Chain(nn.Module):
    """Small linear layers, one after the other."""

    def __init__(self, n_params: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(n_params // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to `x` a little of what each layer makes of it."""
        for layer in self.layers:
            x = x + 0.03 * torch.tanh(layer(x))
        return x


class Way:
    """A chain, trained in one of the ways."""

    def __init__(self, way: str, n_params: int, optimizer: str):
        torch.manual_seed(0)
        self.model, self.x = Chain(n_params), torch.randn(8, WIDTH)
        if way == "half":
            self.model, self.x = self.model.bfloat16(), self.x.bfloat16()
        self.opt, self.scaler = OPTIMIZERS[optimizer](self.model.parameters()), None
        flat = "flat" in way
        if way.startswith("bf16"):
            check = False if way == "bf16, unchecked" else None
            settings = dict(dtype=torch.bfloat16, native=True)
            settings |= dict(flat_master=flat, skip_nonfinite=check)
            self.model, self.opt = with_masters(self.model, self.opt, **settings)
        elif way.startswith("fp16"):
            settings = dict(flat_master=flat, native=True)
            self.model, self.opt = with_masters(self.model, self.opt, **settings)
            self.scaler = LossScaler("cpu", 2.0**10)
        elif way == "float32, scaled":
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def turn(self) -> tuple[float, ...]:
        """Time a backward pass, two readings of `param_groups`, and the step, in ms."""
        self.opt.zero_grad()
        loss = self.model(self.x).float().pow(2).mean()
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        at = [time.perf_counter()]
        loss.backward()
        at.append(time.perf_counter())
        for _ in range(2):
            self.opt.param_groups  # noqa: B018, reads
            at.append(time.perf_counter())
        if self.scaler is None:
            self.opt.step()
        else:
            self.scaler.step(self.opt)
            self.scaler.update()
        at.append(time.perf_counter())
        return tuple(1e3 * (b - a) for a, b in zip(at, at[1:], strict=False))


def compare(n_params: int, optimizer: str, n_turns: int) -> list[dict]:
    """Time the ways, which take turns."""
    ways = {name: Way(name, n_params, optimizer) for name in WAYS}
    turns = [{name: way.turn() for name, way in ways.items()} for _ in range(n_turns + 5)][5:]
    rows = []
    for name, other in WAYS.items():
        backward, first, second, step = (median(t[name][i] for t in turns) for i in range(4))
        row = {"parameters": n_params, "optimizer": optimizer, "way": name}
        row |= {"backward": backward, "param_groups": first, "again": second, "step": step}
        ratio = [median(sum(t[name][:2]) / sum(t[other][:2]) for t in turns)]
        ratio.append(median(t[name][3] / t[other][3] for t in turns))
        row = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        rows.append(row | {"backward x": round(ratio[0], 2), "step x": round(ratio[1], 2)})
    return rows


def main() -> None:
    """Time and print, and write a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=101)
    parser.add_argument("--parameters", nargs="*", type=int, default=[120, 2000])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for n_params in args.parameters:
        for optimizer in OPTIMIZERS:
            n_turns = max(11, args.turns * 120 // n_params)
            rows += compare(n_params, optimizer, n_turns)
            print(*rows[-len(WAYS) :], sep="\n", flush=True)
    if args.out is not None:
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
