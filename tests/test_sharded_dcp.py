"""Files of DCP with sharded masters: written by two processes, read by two, one, four."""

from functools import partial

import torch
from ranks import on_ranks
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from mixedfp.sharded_masters import sharded_masters
from mixedfp.testing import assert_same

N_PROCESSES = 2, 2, 1, 4  # 7 and 3 rows: uneven shards, and one that is empty
N_STEPS = 2  # of each
MAKERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5),
}


def net(seed):
    """Return a small network."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))


def train(params, opt, rng, put=lambda g, p: g):
    """Take some steps with gradients that are the same for any number of processes."""
    for _ in range(N_STEPS):
        for p in params:
            p.grad = put(torch.randn(p.shape, generator=rng), p)
        opt.step()


def leg(rank, folder, i, make):
    """Go on from the file of the last leg, and write one; return the weights."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model = fully_shard(net(seed=i), mesh=mesh)  # other weights, until the file is there
    params = list(model.parameters())
    model, opt = sharded_masters(model, MAKERS[make](params))
    if i:
        found = dict(zip(("model", "optim"), get_state_dict(model, opt), strict=True))
        dcp.load(found, checkpoint_id=folder / f"{make}{i - 1}")
        set_state_dict(model, opt, model_state_dict=found["model"], optim_state_dict=found["optim"])
    rng = torch.Generator().manual_seed(i)
    train(params, opt, rng, lambda g, p: distribute_tensor(g, mesh, p.placements))
    found = dict(zip(("model", "optim"), get_state_dict(model, opt), strict=True))
    dcp.save(found, checkpoint_id=folder / f"{make}{i}")
    return [p.full_tensor().detach() for p in params]


def legs(rank, folder, i):
    """Do it with each optimizer."""
    return {make: leg(rank, folder, i, make) for make in MAKERS}


def test_a_run_goes_on_with_any_number_of_processes(tmp_path):
    """In the bits of one process that has never stopped, and has no shards."""
    plain = {make: net(0) for make in MAKERS}
    opts = {make: MAKERS[make](plain[make].parameters()) for make in MAKERS}
    for i, n in enumerate(N_PROCESSES):
        (tmp_path / f"meet{i}").mkdir()
        work = partial(legs, folder=tmp_path, i=i)
        found = on_ranks(n, work, tmp_path / f"meet{i}", ("test_sharded_dcp",))
        for make, model in plain.items():
            params = list(model.parameters())
            train(params, opts[make], torch.Generator().manual_seed(i))
            for weights in (rank[make] for rank in found):
                assert_same(weights, [p.detach() for p in params])
