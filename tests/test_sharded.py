"""`LossScaler` over shared tensors: FSDP2 and a grid of four processes, over gloo."""

import copy
import math
from functools import partial

import pytest
import torch
from ranks import on_ranks
from tiny import make_learner
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import mixedfp.callback  # noqa: F401, gives Learner to_fp16
from mixedfp import precision_audit
from mixedfp.cast import Policy
from mixedfp.checkpoint import Checkpoint
from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.step import MixedTraining
from mixedfp.testing import assert_same

N = 4
policy = partial(MixedPrecisionPolicy, torch.bfloat16, torch.float32)
PLACED = {  # by name: the dimensions of the mesh that it is on, and how
    "replicated": ("rows columns", [Replicate(), Replicate()]),
    "cut by rows": ("rows", [Shard(0)]),
    "cut by columns": ("columns", [Shard(0)]),
    "cut by both": ("rows columns", [Shard(0), Shard(1)]),
}


def finds(params):
    """Return whether a scaler finds inf or nan in gradients, and unscales them."""
    opt, scaler = torch.optim.SGD(params, lr=1.0, foreach=False), LossScaler("cpu", 4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(opt)
    return bool(scaler.known_of(opt).found_inf)


def shared(mesh, places, grad):
    """Return a parameter that processes share, with this part of its gradient."""
    p, p_grad = (DTensor.from_local(t, mesh, places, run_check=False) for t in (grad * 0, grad))
    p = nn.Parameter(p)
    p.grad = p_grad
    return p


def verdict(mesh, rank, names, spoiled=None, where=0, value=0.0):
    """Return what this rank finds where the gradient `spoiled` holds `value` on rank `where`."""
    params = [nn.Parameter(torch.zeros(2, 2))]  # a plain one beside them
    params[0].grad = torch.ones(2, 2)
    for name in names:
        grad = torch.ones(2, 2)
        if name == spoiled and rank == where:
            grad[1, 1] = value
        dims, places = PLACED[name]
        params.append(shared(mesh[tuple(dims.split())], places, grad))
    return finds(params), [local(p.grad).flatten()[0].item() for p in params]


def partial_sum(mesh):
    p = shared(mesh["columns"], [Replicate()], torch.zeros(2))
    terms = torch.full((2,), 3e38)
    p.grad = DTensor.from_local(terms, mesh["columns"], [Partial()], run_check=False)
    return finds([p])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))


def local(tree):
    """Return what this process holds of a tree of tensors."""
    if isinstance(tree, dict):
        return {k: local(v) for k, v in tree.items()}
    return tree.to_local() if isinstance(tree, DTensor) else tree


def state_of(model):
    """Return this process's parameters, and the number of hooks of all kinds."""
    kinds = "_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks"
    hooks = [len(getattr(m, kind)) for m in model.modules() for kind in kinds]
    return [local(p) for p in model.parameters()], hooks


def sharded(mesh, block=None, norm=False):
    model = nn.Sequential(net(), nn.BatchNorm1d(3, affine=norm))
    fully_shard(model[0], mesh=mesh, mp_policy=block or policy())
    return fully_shard(model, mesh=mesh, mp_policy=policy(output_dtype=torch.float32))


def refused(mesh):
    bf16, single, averages = dict(dtype="bf16"), net(), MixedPrecisionPolicy(torch.bfloat16)
    fully_shard(single[0], mesh=mesh, mp_policy=policy())
    cases = {
        "flat_master: not for": (sharded(mesh), dict(bf16, flat_master=True)),
        "keep_fp32: not for": (sharded(mesh), dict(bf16, keep_fp32="0")),
        "`0` computes in torch.float32": (sharded(mesh, MixedPrecisionPolicy()), bf16),
        "`FSDPSequential` computes in torch.bfloat16": (sharded(mesh), dict(dtype="fp16")),
        "averages its gradients in torch.bfloat16": (sharded(mesh, averages), bf16),
        "`2` is in no sharded module": (single, bf16),
        "`1` keeps running statistics": (sharded(mesh, norm=True), bf16),
    }
    found = {}
    for words, (model, settings) in cases.items():
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        before = state_of(model)
        with pytest.raises(MixedPrecisionError) as e:
            with_masters(model, opt, **settings)
        found[words] = str(e.value)
        assert_same(state_of(model), before)
        assert "masters" not in vars(opt)
    learn = make_learner(model=sharded(mesh))
    for mix in (
        lambda: MixedTraining(Policy(dtype="bf16"), layer_scales={}).attach(sharded(mesh)),
        lambda: learn.to_fp16(flat_master=True).fit(1),
        lambda: learn.fit(1, cbs=Checkpoint("run")),
    ):
        with pytest.raises(MixedPrecisionError) as e:
            mix()
        found[str(e.value)[:12]] = str(e.value)
    return found


def with_shards_as_masters(mesh, rank, folder):
    """Train with a skip; save by DCP; train on; load into others; return what is to be equal."""

    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh, mp_policy=policy())
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        return with_masters(model, opt, dtype=torch.bfloat16)

    def step(model, opt, i):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * i + rank))
        model(x * (math.inf if (rank, i) == (1, 1) else 1)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        return copy.deepcopy(local(model.state_dict()))

    model, opt = make(0)
    ends = [step(model, opt, i) for i in range(3)]
    weights, states = get_state_dict(model, opt)
    dcp.save({"model": weights, "opt": states}, checkpoint_id=folder)
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 4))  # leaves its weights gathered
    model.train()
    last = step(model, opt, 3)
    others, other = make(1)
    weights, states = get_state_dict(others, other)
    state = {"model": weights, "opt": states}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(others, other, model_state_dict=weights, optim_state_dict=state["opt"])
    resumed = step(others, other, 3)
    audit = precision_audit(model, opt)
    skipped = opt.masters.skipped
    with torch.no_grad():
        model(torch.ones(2, 4))
    opt.masters.restore()
    again = with_masters(model, opt, dtype=torch.bfloat16)[1].masters.n_skipped
    return ends, last, resumed, skipped, str(audit), again


def work(rank, folder):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    line = init_device_mesh("cpu", (N,))
    orders = list(PLACED), list(PLACED)[1:]  # with a mesh of all processes first, and of some
    return {
        "verdicts": {
            (i, spoiled, where, value): verdict(grid, rank, names, spoiled, where, value)
            for i, names in enumerate(orders)
            for spoiled in names
            for where in range(N)
            for value in (math.inf, math.nan)
        },
        "healthy": [verdict(grid, rank, names) for names in orders],
        "sum": partial_sum(grid),
        "refused": refused(line),
        "with_masters": with_shards_as_masters(line, rank, folder),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return on_ranks(N, partial(work, folder=folder / "saved"), folder, ("test_sharded",))


def test_all_processes_agree_whatever_mesh_a_gradient_is_on(ranks):
    """One that holds inf or nan in any process: on a grid, in a row, in a column, beside others."""
    for found in ranks:
        assert {k: v for k, v in found["verdicts"].items() if not v[0]} == {}
        assert [v[0] for v in found["healthy"]] == [False, False]
        assert all(g == 0.25 for _, grads in found["healthy"] for g in grads)  # divided once
        assert found["sum"]


def test_what_is_refused_and_left_as_it_was(ranks):
    """Each message contains the line to write."""
    for found in (found["refused"] for found in ranks):
        assert all(words in message for words, message in found.items())
        assert len(found) == 10, list(found)
        lines = [m for m in found.values() if "write" in m and "fully_shard(" in m]
        assert len(lines) == 5


def test_with_masters_the_shards_are_the_masters(ranks):
    """All skip, statistics included; DCP's files resume; a validation changes nothing."""
    for found in ranks:
        (ends, last, resumed, skipped, audit, again) = found["with_masters"]
        assert_same(ends[1], ends[0])
        assert not ends[2]["1.running_mean"].equal(ends[1]["1.running_mean"])
        for k in resumed:  # DCP saves the statistics of the first process for all
            assert "running" in k or resumed[k].equal(last[k])
        assert skipped == [1] and again == 0
        assert "no update is lost" in audit
