"""Shards that are not as they were, gradients that are sums, and what stays as it was."""

import warnings

import pytest
import torch
from ranks import on_two_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from mixedfp.scaler import LossScaler
from mixedfp.sharded_masters import sharded_masters
from mixedfp.testing import assert_same


class Scale(nn.Module):
    """A weight that each process has whole, of a batch that is cut: its gradient is a sum."""

    def __init__(self, line):
        super().__init__()
        self.line = line
        whole = distribute_tensor(torch.arange(1.0, 5.0), line, [Replicate()])
        self.weight = nn.Parameter(whole)

    def forward(self, x):
        """Multiply this process's part of the batch."""
        return DTensor.from_local(x, self.line, [Shard(0)]) * self.weight


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), lr=0.1, **settings)


def sums(line, rank, wrap):
    """Return the weight after two steps by gradients that are added up over processes."""
    model = Scale(line)
    opt = adamw(model)
    if wrap:
        model, opt = sharded_masters(model, opt)
    x = torch.arange(4.0).view(1, 4) + rank
    for _ in range(2):
        opt.zero_grad()
        model(x).pow(2).sum().full_tensor().backward()
        assert isinstance(model.weight.grad.placements[0], Partial)
        opt.step()
    return model.weight.detach().full_tensor()


def columns(line):
    """Return a layer whose rows are cut over the processes."""
    torch.manual_seed(0)
    return parallelize_module(nn.Sequential(nn.Linear(4, 6)), line, {"0": ColwiseParallel()})


def moved(line, wrap):
    """Return weights that are stepped, laid into other memory, and stepped again."""
    model = columns(line).append(nn.LayerNorm(3))  # which each process has whole
    opt = adamw(model)
    if wrap:
        model, opt = sharded_masters(model, opt)
    for _ in range(2):
        model(torch.arange(8.0).view(2, 4)).pow(3).sum().backward()
        opt.step()
        for p in model[1].parameters():
            p.data = p.data.clone()
    return [p.detach().clone() for p in model[1].parameters()]


def written(line, wrap):
    """Return what autograd says of a backward pass over a weight that was stepped since."""
    model = columns(line)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    if wrap:
        model, opt = sharded_masters(model, opt)
    x = torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()
    late = model(x).sum()
    opt.step()
    with pytest.raises(RuntimeError) as e:
        late.backward()
    return "modified by an inplace operation" in str(e.value)


def skipped_first(line):
    """Return what is warned of where a schedule follows a first step that was skipped."""
    model, opt = sharded_masters(model := columns(line), adamw(model), skip_nonfinite=True)
    schedule = torch.optim.lr_scheduler.StepLR(opt.optimizer, 1)
    (model(torch.ones(2, 4)).sum() * torch.inf).backward()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        opt.step()
        schedule.step()
    assert opt.n_skipped == 1
    return [str(w.message) for w in said]


def hooks(model):
    """Return how many hooks there are, of each kind."""
    kinds = "_forward_hooks", "_forward_pre_hooks", "_load_state_dict_post_hooks"
    return [len(getattr(m, kind)) for m in model.modules() for kind in kinds]


def left_alone(line):
    """Whether a refusal leaves hooks and groups as they were: of a second optimizer, of a group."""
    model, other = fully_shard(columns_of_none(), mesh=line), nn.Linear(2, 2)
    before, good = hooks(model), adamw(model)
    for bad in (adamw(other), good):
        with pytest.raises(ValueError):
            sharded_masters(model, good, bad)
    is_alone = hooks(model) == before
    _, opt = sharded_masters(model, good)
    with pytest.raises(ValueError):
        opt.add_param_group({"params": other.parameters()})
    return is_alone and len(opt.param_groups) == 1


def columns_of_none():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))


def paths(line):
    """Return who steps: a fused optimizer is one pass by itself."""
    found = []
    for fused in (False, True):
        model, opt = sharded_masters(model := columns(line), adamw(model, fused=fused))
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        found += dict(opt.update_paths())
    return found


def skipped_in_a_row(line):
    """Return the buffers after a step, and after each of two that overflow."""
    torch.manual_seed(0)
    model, opt = sharded_masters(model := fully_shard(columns_of_none(), mesh=line), adamw(model))
    scaler, found = LossScaler("cpu", 8.0), []
    for factor in (1.0, torch.inf, torch.inf):
        opt.zero_grad()
        scaler.scale(model(torch.randn(8, 4)).square().mean() * factor).backward()
        scaler.step(opt)
        scaler.update()
        found.append([b.clone() for b in model.buffers()])
    return found, scaler.n_skipped


def many(line, wrap):
    """Return a weight of 2**20 elements after two steps: a process's half is several pieces."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(1024, 1024, bias=False), mesh=line)
    opt = adamw(model)
    if wrap:
        model, opt = sharded_masters(model, opt)
    for _ in range(2):
        model(torch.randn(2, 1024)).square().mean().backward()
        opt.step()
    assert model.weight.to_local().numel() == 2**19
    return model.weight.to_local().detach().clone()


def regrouped(line, wrap):
    """Return weights after a step by groups that were set as a whole."""
    opt = adamw(model := columns(line))
    if wrap:
        model, opt = sharded_masters(model, opt)
    (group,) = opt.param_groups
    opt.param_groups = [{**group, "params": group["params"][:1], "lr": 0.5}]
    model(torch.arange(8.0).view(2, 4)).pow(3).sum().backward()
    opt.step()
    return [p.to_local().detach().clone() for p in model.parameters()], len(opt.param_groups[0])


def work(rank):
    """Return all that the tests look at."""
    line = init_device_mesh("cpu", (2,))
    return {
        "sums": [sums(line, rank, wrap) for wrap in (True, False)],
        "moved": [moved(line, wrap) for wrap in (True, False)],
        "written": [written(line, wrap) for wrap in (True, False)],
        "skipped first": skipped_first(line),
        "left alone": left_alone(line),
        "paths": paths(line),
        "in a row": skipped_in_a_row(line),
        "many": [many(line, wrap) for wrap in (True, False)],
        "regrouped": [regrouped(line, wrap) for wrap in (True, False)],
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two processes have come to."""
    return on_two_ranks(work, tmp_path_factory.mktemp("ranks"), ("test_sharded_edges",))


def test_gradients_that_are_sums_are_added_up(ranks):
    for found in ranks:
        assert_same(*found["sums"])
        assert_same(found["sums"], ranks[0]["sums"])


def test_shards_in_other_memory_are_stepped_there(ranks):
    for found in ranks:
        assert_same(*found["moved"])


def test_autograd_knows_that_weights_were_stepped(ranks):
    assert [found["written"] for found in ranks] == [[True, True]] * 2


def test_a_schedule_says_nothing_of_a_first_step_that_is_skipped(ranks):
    assert [found["skipped first"] for found in ranks] == [[]] * 2


def test_what_is_refused_changes_nothing(ranks):
    assert all(found["left alone"] for found in ranks)


def test_a_fused_optimizer_steps_by_itself(ranks):
    for found in ranks:
        assert found["paths"] == ["in chunks", "by the optimizer"]


def test_steps_that_are_skipped_in_a_row_leave_the_buffers_alone(ranks):
    """Also of the second: what says that more may come is the skip itself."""
    for (before, once, twice), n_skipped in (found["in a row"] for found in ranks):
        assert n_skipped == 2
        assert_same(once, before)
        assert_same(twice, before)


def test_a_shard_of_several_pieces_is_stepped_as_by_the_plain_optimizer(ranks):
    """A pass cuts what does not fit into a cache."""
    for found in ranks:
        assert_same(*found["many"])


def test_groups_may_be_set_as_a_whole(ranks):
    for found in ranks:
        assert_same(*found["regrouped"])
