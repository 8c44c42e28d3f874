"""Measures the time that a training step takes on the host, without a GPU.

    python bench/host.py                        # milliseconds, a table; on an idle machine
    python bench/host.py --out host.json

PyTorch's CUDA code runs on a simulated runtime (`tests/simulated_cuda`), whose kernels take no
time. Products are replaced by functions that return empty memory, 15 us each and the same in all
ways, so only differences between the ways mean something. The network has 196 parameters and 25
norms, the optimizer is fused. Medians of many steps, all ways in turn.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]

from simulated_cuda import device  # noqa: E402

# isort: split
import torch  # noqa: E402
from common import FLAT, HALF, about, options, table, write  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from mixedfp.optimizer import with_masters  # noqa: E402

B16 = torch.bfloat16
WAYS: dict[str, dict | None] = {  # settings of the masters; None: no masters
    "float32": None,
    "autocast": None,
    "each": {},
    "flat": FLAT,
    "flat, half gradients": HALF,
}
STAGES = "forward", "loss", "backward", "step", "zero_grad"
COLUMNS = "way forward:.2f loss:.2f backward:.2f step:.2f all:.2f launches waits x_autocast:.3f"


class Block(nn.Module):
    """A transformer's block whose attention is written out."""

    def __init__(self, d: int):
        super().__init__()
        self.before, self.between = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, d)
        """Return the stream with what the block adds."""
        h = self.before(x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        x = x + self.out(torch.softmax(q @ k.transpose(1, 2) * 0.1, -1) @ v)
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


def network(d: int = 64, n: int = 12) -> nn.Module:
    """Build `n` blocks between two linear layers."""
    blocks = [Block(d) for _ in range(n)]
    return nn.Sequential(nn.Linear(d, d), *blocks, nn.LayerNorm(d), nn.Linear(d, 100))


@contextmanager
def without_products() -> Iterator[None]:
    """Let products return empty memory."""
    library = torch.library.Library("aten", "IMPL")

    def empty(like, *shape):
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    library.impl("mm", lambda a, b: empty(a, len(a), b.shape[1]), "CUDA")
    library.impl("bmm", lambda a, b: empty(a, *a.shape[:2], b.shape[2]), "CUDA")
    add = lambda c, a, b, *, beta=1, alpha=1: empty(a, len(a), b.shape[1])  # noqa: E731
    library.impl("addmm", add, "CUDA")
    try:
        yield
    finally:
        library._destroy()


class Trained:
    """A network and its optimizer, in one of `WAYS`."""

    def __init__(self, way: str):
        torch.manual_seed(0)
        self.model, self.uses_autocast = network().cuda(), way == "autocast"
        self.opt = torch.optim.AdamW(self.model.parameters(), 1e-3, fused=True)
        if (settings := WAYS[way]) is not None:
            with_masters(self.model, self.opt, dtype=B16, **settings)

    def step(self, x: Tensor) -> list[float]:  # milliseconds of each stage
        """Train on a batch."""
        at = [time.perf_counter()]
        with torch.autocast("cuda", B16, enabled=self.uses_autocast):
            out = self.model(x)
        at.append(time.perf_counter())
        loss = out.float().square().mean()
        for stage in (lambda: None, loss.backward, self.opt.step, self.opt.zero_grad):
            stage()
            at.append(time.perf_counter())
        return [1e3 * (after - before) for before, after in zip(at, at[1:], strict=False)]


def measure(n: int) -> dict[str, dict]:
    """Train `n` steps in each way, in turn; return milliseconds, launches and waits of a step."""
    x = torch.zeros(4, 16, 64, device="cuda")
    trained = {way: Trained(way) for way in WAYS}
    times: dict[str, list] = {way: [] for way in WAYS}
    counts = {}
    with without_products():
        for _ in range(n + 20):
            for way, one in trained.items():
                before = device.counts()
                times[way].append(one.step(x))
                counts[way] = device.counts() - before
    rows = {}
    for way, steps in times.items():
        medians = [statistics.median(stage) for stage in zip(*steps[20:], strict=True)]
        whole = statistics.median(map(sum, steps[20:]))
        rows[way] = {**dict(zip(STAGES, medians, strict=True)), "all": whole}
        rows[way] |= dict(launches=counts[way].launches, waits=counts[way].waits)
    for row in rows.values():
        row["x_autocast"] = row["all"] / rows["autocast"]["all"]
    return rows


def main() -> None:
    """Measure, print the table and write the file."""
    args = options(__doc__, steps=200)
    rows = measure(args.steps)
    table([dict(way=way) | row for way, row in rows.items()], COLUMNS)
    write(args.out, dict(about=about(), rows=rows))


if __name__ == "__main__":
    main()
