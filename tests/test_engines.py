"""Every way to use several processes, with every feature: only rounding differs from float32.

The guide's table is made of what is found here.
"""

import copy
import json
import traceback
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from mixedfp.engine.masters import Masters  # noqa: F401, imported once for all processes
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler

N, N_STEPS = 4, 5
ENGINES = "DDP", "FSDP2", "HSDP", "tensor parallel", "replicate"
INF = "inf in one process"
FEATURES = "training", "accumulation", "clipping", INF, "frozen layer", "unused layer"
FEATURES += "BatchNorm", "torch.compile"
GUIDE = Path(__file__).parents[1] / "nbs" / "guides" / "several_processes.ipynb"


class Net(nn.Module):
    """Blocks, a norm between them, a buffer that counts, and a layer that may be unused."""

    def __init__(self, feature):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.norm = nn.BatchNorm1d(32) if feature == "BatchNorm" else nn.LayerNorm(32)
        if feature == "unused layer":
            self.unused = nn.Linear(32, 32)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        x = self.norm(self.a(x)).relu()
        return self.c(x + self.b(x))


def spread(model, engine, dtype):
    """Distribute `model`; return it and the part of a batch that this process gets."""
    policy = MixedPrecisionPolicy(dtype, reduce_dtype=None if dtype is None else torch.float32)
    if engine == "tensor parallel":
        plan = {"b": ColwiseParallel(output_layouts=Replicate())}
        return parallelize_module(model, init_device_mesh("cpu", (N,)), plan), slice(None)
    if engine != "DDP":
        shape, names = ((2, 2), ("copies", "shards")) if engine == "HSDP" else ((N,), ("all",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        shard = replicate if engine == "replicate" else fully_shard
        if isinstance(model.norm, nn.BatchNorm1d):
            shard(model.norm, mesh=mesh)
        for block in (model.a, model.b, model.c, model):
            shard(block, mesh=mesh, mp_policy=policy)
    return model, slice(torch.distributed.get_rank(), None, N)


def train(engine, feature, dtype=None):
    """Return the ends of a run in `dtype`, or by PyTorch alone in float32."""
    torch.manual_seed(0)
    model, part = spread(Net(feature), engine, dtype)
    if feature == "frozen layer":
        model.a.requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    if dtype is not None:
        with_masters(model, opt, dtype=dtype)
    scaler = LossScaler("cpu", 2.0**8, enabled=dtype == torch.float16)
    net = torch.compile(model, backend="aot_eager") if feature == "torch.compile" else model
    if engine == "DDP":
        net = DistributedDataParallel(net, find_unused_parameters=feature == "unused layer")
    n_parts = 3 if feature == "accumulation" else 1
    for i in range(N_STEPS):
        if (dtype, feature, i) == (None, INF, 2):
            continue
        for k in range(n_parts):
            x = torch.randn(16, 16, generator=torch.Generator().manual_seed(10 * i + k))
            y = x[:, :4].argmax(1)
            # all processes of "tensor parallel" have the same batch
            if (feature, i) == (INF, 2) and part.start in (N - 1, None):
                x = x * torch.inf
            is_last = k == n_parts - 1
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(is_last)
            with nullcontext() if is_last or engine != "DDP" else net.no_sync():
                loss = nn.functional.cross_entropy(net(x[part]), y[part]) / n_parts
                scaler.scale(loss).backward()
        scaler.unscale_(opt)
        if feature == "clipping":
            clip_grad_norm_(model.parameters(), 0.1, foreach=False)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    items = model.state_dict().items()
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in items}
    skipped = scaler.skipped if scaler.is_enabled() or dtype is None else opt.masters.skipped
    return copy.deepcopy(state), skipped


def work(rank):
    """Return ends, or the last line of an error, by engine, feature and dtype."""
    found = {}
    for engine, feature, dtype in product(ENGINES, FEATURES, (None, torch.bfloat16, torch.float16)):
        if dtype != torch.float16 or feature in ("training", INF):
            try:
                found[engine, feature, dtype] = train(engine, feature, dtype)
            except Exception:
                found[engine, feature, dtype] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return what four processes have come to."""
    return on_ranks(N, work, tmp_path_factory.mktemp("engines"), ("test_engines",))


def distance(feature, ours, plain):
    """Return how far two trained models are apart, as a part of the way from the start."""
    torch.manual_seed(0)
    start, params = Net(feature).state_dict(), [k for k, _ in Net(feature).named_parameters()]
    ours, plain, start = (torch.cat([w[k].flatten() for k in params]) for w in (ours, plain, start))
    return ((ours - plain).norm() / (plain - start).norm()).item()


def verdict(ranks, engine, feature):
    """Return what the guide's table contains; all processes have to agree on it."""
    plain, *mixed = ([r[key] for r in ranks] for key in ranks[0] if key[:2] == (engine, feature))
    if isinstance(plain[0], str):
        last = {error.strip().splitlines()[-1] for ends in (plain, *mixed) for error in ends}
        assert len(last) == 1, last  # the same words
        return "refused by PyTorch"
    assert len(mixed) == (2 if feature in ("training", INF) else 1)
    for ends in mixed:
        for state, skipped in ends:
            own = [k for k in state if "running" in k]  # each process has its own statistics
            assert all(state[k].equal(ends[0][0][k]) for k in state if k not in own)
            assert all(t.isfinite().all() for t in state.values())
            assert skipped == ([2] if feature == INF else [])
            assert distance(feature, state, plain[0][0]) < 0.05
            n_passes = (3 if feature == "accumulation" else 1) * N_STEPS - len(skipped)
            assert state["count"] == n_passes  # a skip restores it
    return "yes"


def test_the_guides_table_is_what_happens(ranks):
    """Each cell is a run that equals PyTorch's in float32 except for rounding, or its error."""
    rows = [["", *ENGINES], ["---"] * (len(ENGINES) + 1)]
    rows += [[f, *(verdict(ranks, engine, f) for engine in ENGINES)] for f in FEATURES]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    cells = json.loads(GUIDE.read_text(encoding="utf-8"))["cells"]
    assert table in "\n".join("".join(cell["source"]) for cell in cells), table
