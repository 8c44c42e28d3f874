"""Counts the package's function calls in one training batch, and fails if there are too many."""

import sys
from collections import Counter
from pathlib import Path

from notebooks import ROOT

CALLS, FILES = 117, 13
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


def main() -> int:
    """Print the counts and, if they are too high, the calls."""
    found = count_batch()
    calls, files = sum(found.values()), len({file for file, _ in found})
    print(f"a bf16 flat batch: {calls} calls (limit {CALLS}) in {files} files ({FILES})")
    if calls <= CALLS and files <= FILES and "-v" not in sys.argv:
        return 0
    for (file, name), n in sorted(found.items()):
        print(f"{n:4}  {file:20} {name}")
    return int(calls > CALLS or files > FILES)


if __name__ == "__main__":
    sys.exit(main())
