"""`LossScaler` over shared tensors: FSDP2 and a grid of four processes, over gloo."""

import copy
import math

import pytest
import torch
from ranks import on_ranks
from tiny import make_learner
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import mixedfp.callback  # noqa: F401, gives Learner to_fp16
from mixedfp.cast import Policy
from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.step import MixedStep
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


def skipped_run(mesh, dtype):
    """Return weights and optimizer state around a step that overflows on the last rank alone."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32)
    model = fully_shard(net(), mesh=mesh, mp_policy=policy)
    opt, scaler = torch.optim.AdamW(model.parameters(), lr=0.1), LossScaler("cpu", 64.0)
    found = []
    for factor in (1.0, math.inf, 1.0):
        loss = model(torch.ones(5, 4)).pow(2).mean()
        if mesh.get_local_rank() == N - 1:
            loss = loss * factor
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        found.append(copy.deepcopy([local(model.state_dict()), local(opt.state_dict()["state"])]))
    return found, scaler.skipped, {t.dtype for t in found[0][0].values()}


def local(tree):
    """Return what this process holds of a tree of tensors."""
    if isinstance(tree, dict):
        return {k: local(v) for k, v in tree.items()}
    return tree.to_local() if isinstance(tree, DTensor) else tree


def refused(mesh):
    """Return what is raised for a sharded model, and whether it still trains as it was."""
    model = fully_shard(net(), mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    before, hooks = [p.full_tensor() for p in model.parameters()], n_hooks(model)
    learn = make_learner(model=model)
    found = []
    for mix in (
        lambda: with_masters(model, opt, dtype=torch.bfloat16, flat_master=True),
        lambda: MixedStep(Policy(dtype=torch.float16)).attach(model),
        lambda: learn.to_fp16(flat_master=True).fit(1),
    ):
        with pytest.raises(MixedPrecisionError) as e:
            mix()
        found.append(str(e.value))
    assert_same([p.full_tensor() for p in model.parameters()], before)
    model(torch.ones(2, 4)).sum().backward()
    return found, n_hooks(model) == hooks and "masters" not in vars(opt)


def n_hooks(model):
    """Count hooks of the forward pass and of files."""
    kinds = "_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks"
    return [len(getattr(m, kind)) for m in model.modules() for kind in kinds]


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
        "skipped": [skipped_run(line, dtype) for dtype in (torch.float16, torch.bfloat16)],
        "refused": refused(line),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What four processes have come to."""
    return on_ranks(N, work, tmp_path_factory.mktemp("ranks"), ("test_sharded",))


def test_all_processes_agree_whatever_mesh_a_gradient_is_on(ranks):
    """One that holds inf or nan in any process: on a grid, in a row, in a column, beside others."""
    for found in ranks:
        assert {k: v for k, v in found["verdicts"].items() if not v[0]} == {}
        assert [v[0] for v in found["healthy"]] == [False, False]
        assert all(g == 0.25 for _, grads in found["healthy"] for g in grads)  # divided once
        assert found["sum"]


def test_a_sharded_run_is_that_of_pytorchs_scaler(ranks):
    for found in ranks:
        assert_same(found["ours"], found["theirs"])
        assert found["ours"][1][-1] == 64.0 * 0.5**N  # each process's overflow counted for all
    assert_same(ranks[0]["ours"], ranks[1]["ours"])


def test_a_skipped_step_changes_nothing(ranks):
    """Weights and moments of every process; the shards are float32."""
    for found in ranks:
        for (first, second, third), skipped, dtypes in found["skipped"]:
            assert skipped == [1] and dtypes == {torch.float32}
            assert_same(second, first)
            assert not third[0]["0.weight"].equal(first[0]["0.weight"])


def test_a_sharded_model_is_refused_and_left_as_it_was(ranks):
    for messages, is_as_before in (found["refused"] for found in ranks):
        for message in messages:
            assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16)" in message
            assert "LossScaler" in message
        assert is_as_before
