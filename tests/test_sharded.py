"""What processes that share tensors agree on: FSDP2 and a grid of processes, over gloo."""

import copy
import math

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

N = 4
PLACED = {  # by name: the dimensions of the mesh that it is on, and how
    "replicated": ("rows columns", [Replicate(), Replicate()]),
    "cut by rows": ("rows", [Shard(0)]),
    "cut by columns": ("columns", [Shard(0)]),
    "cut by both": ("rows columns", [Shard(0), Shard(1)]),
}


def verdict(mesh, rank, names, spoiled, where, value):
    """Return what this rank finds where the gradient `spoiled` holds `value` on rank `where`."""
    params = [nn.Parameter(torch.zeros(2, 2))]  # a plain one beside them
    params[0].grad = torch.ones(2, 2)
    for name in names:
        dims, places = PLACED[name]
        part = mesh[tuple(dims.split())]
        grad = torch.ones(2, 2)
        if name == spoiled and rank == where:
            grad[1, 1] = value
        p = nn.Parameter(DTensor.from_local(torch.zeros(2, 2), part, places, run_check=False))
        p.grad = DTensor.from_local(grad, part, places, run_check=False)
        params.append(p)
    opt, scaler = torch.optim.SGD(params, lr=1.0, foreach=False), LossScaler("cpu", 4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(opt)
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in params]
    return scaler.found_nonfinite(opt), [g.flatten()[0].item() for g in grads]


def partial_sum(mesh):
    """Return what is found where terms are finite and their sum is not."""
    line = mesh["columns"]
    p = nn.Parameter(DTensor.from_local(torch.zeros(2), line, [Replicate()], run_check=False))
    p.grad = DTensor.from_local(torch.full((2,), 3e38), line, [Partial()], run_check=False)
    opt, scaler = torch.optim.SGD([p], lr=1.0), LossScaler("cpu", 1.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(opt)
    return scaler.found_nonfinite(opt)


def net():
    """Return a small network, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))


def sharded_run(make_scaler, mesh, rank):
    """Train with FSDP2; in each step but the first another rank's gradients overflow."""
    model = fully_shard(net(), mesh=mesh)
    opt, scaler = torch.optim.AdamW(model.parameters(), lr=0.1), make_scaler("cpu", 64.0)
    rng = torch.Generator().manual_seed(rank)
    scales = []
    for i in range(2 * N):
        opt.zero_grad()
        scaler.scale(model(torch.randn(5, 4, generator=rng)).pow(2).mean()).backward()
        if i % 2 and rank == i // 2:
            next(model.parameters()).grad.to_local().fill_(math.inf)
        scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())
    return [p.full_tensor() for p in model.parameters()], scales


def sharded_too_late(mesh, flat):
    """Return what the first step says where masters were made before `fully_shard`."""
    model, opt = net(), None
    model, opt = with_masters(
        model, torch.optim.SGD(model.parameters(), lr=0.1), dtype=torch.bfloat16, flat_master=flat
    )
    fully_shard(model, mesh=mesh)
    try:
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
    except MixedPrecisionError as e:
        return str(e)


def refused(mesh, flat):
    """Return what `with_masters` says of a sharded model, and whether it left it as it was."""
    model = fully_shard(net(), mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.full_tensor() for p in model.parameters()]
    held = copy.copy(vars(model)), model.forward, [p.dtype for p in model.parameters()]
    try:
        with_masters(model, opt, dtype=torch.bfloat16, flat_master=flat)
    except MixedPrecisionError as e:
        now = copy.copy(vars(model)), model.forward, [p.dtype for p in model.parameters()]
        assert_same([p.full_tensor() for p in model.parameters()], before)
        hooks = {k: dict(v) for k, v in held[0].items() if k.endswith("hooks")}
        assert hooks == {k: dict(v) for k, v in now[0].items() if k.endswith("hooks")}
        model(torch.ones(2, 4)).sum().backward()
        return str(e), held[1:] == now[1:]


def work(rank):
    """Return all that the tests look at."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    line = init_device_mesh("cpu", (N,))
    orders = list(PLACED), list(PLACED)[::-1]
    return {
        "verdicts": {
            (i, spoiled, where, value): verdict(grid, rank, names, spoiled, where, value)
            for i, names in enumerate(orders)
            for spoiled in PLACED
            for where in range(N)
            for value in (math.inf, math.nan)
        },
        "healthy": [verdict(grid, rank, names, None, 0, 0.0) for names in orders],
        "sum": partial_sum(grid),
        "ours": sharded_run(LossScaler, line, rank),
        "theirs": sharded_run(GradScaler, line, rank),
        "late": [sharded_too_late(line, flat) for flat in (False, True)],
        "refused": [refused(line, flat) for flat in (False, True)],
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What four processes have come to."""
    return on_ranks(N, work, tmp_path_factory.mktemp("ranks"), ("test_sharded",))


def test_2_10_all_ranks_agree_whatever_mesh_a_gradient_is_on(ranks):
    for found in ranks:
        assert {k: v for k, v in found["verdicts"].items() if not v[0]} == {}
        assert [v[0] for v in found["healthy"]] == [False, False]
        assert all(g == 0.25 for _, grads in found["healthy"] for g in grads)  # divided once
        assert found["sum"]


def test_2_10_a_sharded_run_is_that_of_pytorchs_scaler(ranks):
    for found in ranks:
        assert_same(found["ours"], found["theirs"])
        assert found["ours"][1][-1] == 64.0 * 0.5**N  # each rank's overflow was everybody's
    assert_same(ranks[0]["ours"], ranks[1]["ours"])


def test_2_11_masters_of_a_model_that_was_sharded_later_say_so(ranks):
    for said in (said for found in ranks for said in found["late"]):
        assert "shape (7, 4)" in said and "is no longer in the" in said


def test_3_10_a_sharded_model_is_refused_before_anything_is_changed(ranks):
    for said, is_as_before in (x for found in ranks for x in found["refused"]):
        assert "MixedPrecisionPolicy" in said and is_as_before
