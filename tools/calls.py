"""Counts the package's function calls in one training batch, and fails if there are too many.

The calls of a small Learner are counted, and in a loop those that each parameter and each norm of a
larger network adds: host work that grows with the network.
"""

import sys
from collections import Counter
from pathlib import Path

from notebooks import ROOT

CALLS, FILES = 117, 13
# Python functions and built-in ones that each parameter and each norm of a network adds
BY_PARAMETER, BY_NORM = (0, 5), (3, 6)
COMPREHENSIONS = "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"
PACKAGE = str(ROOT / "mixedfp")


class Count:
    """Counts calls of the package's functions, by file and name."""

    def __init__(self):
        self.found = Counter()

    def see(self, frame, event, _):
        """Count a call; installed as the interpreter's profiler."""
        code = frame.f_code
        is_ours = event == "call" and code.co_filename.startswith(PACKAGE)
        if is_ours and code.co_name not in COMPREHENSIONS:
            self.found[Path(code.co_filename).name, code.co_qualname] += 1


def count_batch() -> Counter:
    """Train nine modules in bfloat16 with flat masters; return the calls in the last batch."""
    import torch
    from fastai.basics import Callback, DataLoaders, Learner
    from torch import nn

    import mixedfp.callback  # noqa: F401, adds `to_bf16` to Learner

    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)]
    items = [(torch.randn(3, 8, 8), i % 2) for i in range(16)]
    dls = DataLoaders.from_dsets(items, items[:4], bs=4, num_workers=0)
    learn = Learner(dls, nn.Sequential(*layers), nn.CrossEntropyLoss())
    learn.to_bf16(flat_master=True, native=True)  # as on a CPU with bfloat16 products
    counts = []

    class CountBatches(Callback):
        order = -100

        def before_batch(self):
            if self.training:
                counts.append(Count())
                sys.setprofile(counts[-1].see)

        def after_batch(self):
            sys.setprofile(None)

    with learn.no_bar(), learn.no_logging():
        learn.fit(1, cbs=CountBatches())
    return counts[-1].found


def count_loop(n_linear: int, n_norms: int, **settings) -> tuple[int, int]:
    """Train a network in a loop; return the Python and the built-in functions a batch calls."""
    import torch
    from torch import nn

    from mixedfp.optimizer import with_masters

    layers = [nn.Linear(8, 8) for _ in range(n_linear)]
    layers += [nn.LayerNorm(8, elementwise_affine=False) for _ in range(n_norms)]
    model = nn.Sequential(*layers)
    opt = torch.optim.AdamW(model.parameters())
    with_masters(model, opt, dtype="bf16", native=True, **settings)
    found = {"call": 0, "c_call": 0}

    def see(frame, event, _):
        if event in found and frame.f_code.co_filename.startswith(PACKAGE):
            found[event] += frame.f_code.co_name not in COMPREHENSIONS or event == "c_call"

    for i in range(4):
        sys.setprofile(see if i == 3 else None)
        model(torch.ones(4, 8)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    sys.setprofile(None)
    return found["call"], found["c_call"]


def count_parts(**settings) -> dict[str, tuple]:
    """Return the calls that a parameter and a norm add to a batch."""
    base = count_loop(4, 4, **settings)
    found = {"parameter": (count_loop(79, 4, **settings), 150)}
    found["norm"] = count_loop(4, 84, **settings), 80
    return {
        k: tuple(round((many - few) / n, 1) for many, few in zip(calls, base, strict=True))
        for k, (calls, n) in found.items()
    }


def main() -> int:
    """Print the counts and, if they are too high, the calls."""
    grows = False
    for name, settings in (("each", {}), ("flat", dict(flat_master=True))):
        for part, calls in count_parts(**settings).items():
            limits = BY_PARAMETER if part == "parameter" else BY_NORM
            grows |= any(n > most for n, most in zip(calls, limits, strict=True))
            print(f"{name}: a {part} adds {calls} Python and built-in calls (limit {limits})")
    found = count_batch()
    calls, files = sum(found.values()), len({file for file, _ in found})
    print(f"a bf16 flat batch: {calls} calls (limit {CALLS}) in {files} files ({FILES})")
    if grows:
        return 1
    if calls <= CALLS and files <= FILES and "-v" not in sys.argv:
        return 0
    for (file, name), n in sorted(found.items()):
        print(f"{n:4}  {file:20} {name}")
    return int(calls > CALLS or files > FILES)


if __name__ == "__main__":
    sys.exit(main())
