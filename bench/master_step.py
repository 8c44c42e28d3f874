"""The optimizer step with float32 masters: mixedfp against a hand-written one.

    python bench/master_step.py --out bench/results/master_step.json    # 3 minutes on 2 cores

Gradients in, update, weights back to bfloat16. All ways are timed in turn in one run, on parameters
of the same shapes; each time is the fastest turn, which is least disturbed by other programs, and
`ratio` divides it by the time of PyTorch's fused optimizer with hand-written masters.
By hand: 16-bit gradients are copied to float32, the masters are stepped and copied back.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median

import torch
from common import FLAT, HALF, about, in_turn, options, seconds, table, write
from torch import nn

from mixedfp.optimizer import with_masters

SIZES = {  # name: (number of tensors, numbers per tensor)
    "2,000 of 256": (2000, 256),
    "120 of 2,048": (120, 2048),
    "24 M": (100, 240_000),
    "86 M": (150, 573_440),
}
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
}
FOREACH, FUSED = dict(foreach=True), dict(fused=True)
OURS = {  # name: (settings of the optimizer, settings of with_masters)
    "mixedfp": ({}, {}),
    "mixedfp foreach": (FOREACH, {}),
    "mixedfp fused": (FUSED, {}),
    "mixedfp flat": ({}, FLAT),
    "mixedfp flat fused": (FUSED, FLAT),
    "mixedfp flat, half gradients": ({}, HALF),
}


class Params(nn.Module):
    """A model with only parameters."""

    def __init__(self, n: int, size: int):
        super().__init__()
        torch.manual_seed(0)
        self.params = nn.ParameterList([nn.Parameter(torch.randn(size)) for _ in range(n)])

    def forward(self):
        """Return a loss that depends on all parameters."""
        return torch.stack([p.square().sum() for p in self.params]).sum()

    def set_grads(self) -> None:
        """Give each parameter a gradient, where and in the dtype that a backward pass does."""
        self().backward()


def by_hand(model: Params, make: Callable) -> Callable[[], None]:
    """Return a step with hand-written masters."""
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data.bfloat16()
    model.set_grads()
    opt, params = make(masters), list(model.parameters())
    for m in masters:
        m.grad = torch.empty_like(m)

    def step():
        torch._foreach_copy_([m.grad for m in masters], [p.grad for p in params])
        opt.step()
        torch._foreach_copy_([p.data for p in params], [m.data for m in masters])

    return step


def stepped_by_mixedfp(model: Params, make: Callable, settings: dict | None) -> Callable[[], None]:
    """Return our step, or None's, in float32; as in the other ways, gradients are not checked."""
    opt = make(model.parameters())
    if settings is not None:
        with_masters(model, opt, dtype="bf16", skip_nonfinite=False, **settings)
    model.set_grads()
    return opt.step


def measure(size: str, optimizer: str, repeats: int) -> list[dict]:
    """Time all ways in turn."""
    make, new = OPTIMIZERS[optimizer], partial(Params, *SIZES[size])
    steps = {"float32": stepped_by_mixedfp(new(), make, None)}
    for name, how in (("foreach", FOREACH), ("fused", FUSED)):
        steps[f"by hand {name}"] = by_hand(new(), partial(make, **how))
    for name, (how, settings) in OURS.items():
        steps[name] = stepped_by_mixedfp(new(), partial(make, **how), settings)
    clocks = {name: partial(seconds, step) for name, step in steps.items()}
    rows, times = [], in_turn(clocks, repeats, unused=2)
    for name, own in times.items():
        row = dict(size=size, optimizer=optimizer, way=name, ms=min(own) * 1e3)
        row |= dict(median_ms=median(own) * 1e3, ratio=min(own) / min(times["by hand fused"]))
        rows.append(row)
    table(rows, "size optimizer way ms:.2f ratio:.2f")
    return rows


def main() -> None:
    """Measure, print, and write."""
    args = options(__doc__, sizes=list(SIZES), repeats=8)
    rows = [row for s, o in product(args.sizes, OPTIMIZERS) for row in measure(s, o, args.repeats)]
    write(args.out, dict(about=about(), rows=rows))


if __name__ == "__main__":
    main()
