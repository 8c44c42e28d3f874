"""FSDP2, HSDP and tensor parallelism: shards are masters, against the plain optimizer."""

import copy
import itertools
import math

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from mixedfp.formats import MixedPrecisionError
from mixedfp.scaler import LossScaler
from mixedfp.sharded_masters import sharded_masters
from mixedfp.testing import assert_same

N = 4
F16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
MAKERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),  # makes its states at once
}

GIVEN = MAKERS | {"fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True)}  # by itself


class ByNorm(torch.optim.SGD):
    """Divides each gradient by the norm of all of it: no process knows that of its part."""

    @torch.no_grad()
    def step(self, closure=None):
        """Take a step."""
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm() * group["lr"])


class Mean(nn.Module):
    """Keeps what it has seen, as norms do, which FSDP2 leaves without a dtype on a CPU."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        """Hand on."""
        self.mean.lerp_(x.detach().float().mean(0), 0.1)
        return x


def net(counts=False):
    """Return a small network, always the same; four processes get uneven and empty shards of it."""
    torch.manual_seed(0)
    middle = [Mean()] if counts else []
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


def shard(how, line, grid, counts=False):
    """Return the network cut in one of four ways."""
    model, last = net(counts), str(2 + counts)
    if how in ("tensors", "both"):
        plan = {"0": ColwiseParallel(), last: RowwiseParallel()}
        mesh = grid["inner"] if how == "both" else line
        parallelize_module(model, mesh, plan)
    if how != "tensors":
        mesh = line if how == "shards" else grid if how == "replicas" else grid["outer"]
        fully_shard(model, mesh=mesh, mp_policy=F16)
    return model


def whole(model, opt):
    """Return all weights and states as every process would see them whole."""

    def full(v):
        return v.full_tensor() if hasattr(v, "full_tensor") else v

    names = {p: name for name, p in model.named_parameters()}
    states = {names[p]: {k: full(v).clone() for k, v in s.items()} for p, s in opt.state.items()}
    return {name: full(p).detach().clone() for name, p in model.named_parameters()}, states


def run(model, opt, rank, alike=False, micro=1, n=2 * N):
    """Train in float16; in each step but the first another process's gradients overflow."""
    scaler = LossScaler("cpu", 64.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    rng = torch.Generator().manual_seed(0 if alike else rank)
    trace = []
    for i in range(n):
        opt.zero_grad()
        for _ in range(micro):
            y = model(torch.randn(5, 4, generator=rng))
            scaler.scale(y.float().pow(2).mean()).backward()
        if i % 2 and rank == i // 2:
            next(p.grad.to_local() for p in model.parameters() if p.grad.to_local().numel()).fill_(
                math.inf
            )
        scaler.unscale_(opt)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        trace.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        scaler.step(opt)
        scaler.update()
        schedule.step()
        trace.append(scaler.get_scale())
    return *whole(model, opt), trace, [g["lr"] for g in opt.param_groups]


def both_runs(how, make, meshes, rank, **kwargs):
    """Return a run of ours, the plain one, and how ours was stepped."""
    ours, plain = shard(how, *meshes), shard(how, *meshes)
    alike = how in ("tensors", "both")  # processes that share a batch
    _, opt = sharded_masters(ours, MAKERS[make](ours.parameters()))
    found = run(ours, opt, rank, alike, **kwargs)
    return (
        found,
        run(plain, MAKERS[make](plain.parameters()), rank, alike, **kwargs),
        dict(opt.update_paths()),
    )


def skipped_is_no_step(meshes, rank, by_scaler):
    """Return all bits before and after a step that overflows in the last process alone."""
    model = shard("shards", *meshes, counts=True)
    model, opt = sharded_masters(
        model, MAKERS["adamw"](model.parameters()), skip_nonfinite=not by_scaler
    )
    scaler = LossScaler("cpu", 2.0, enabled=by_scaler)
    seen = []
    for i in range(3):
        opt.zero_grad()
        before = [*whole(model, opt), copy.deepcopy(dict(model.named_buffers()))]
        scaler.scale(model(torch.randn(5, 4)).float().pow(2).mean()).backward()
        if i == 1 and rank == 0:
            next(model.parameters()).grad.to_local()[0, 0] = math.nan
        scaler.step(opt)
        scaler.update()
        after = [*whole(model, opt), copy.deepcopy(dict(model.named_buffers()))]
        seen.append((before, after))
    return seen[1], scaler.n_skipped if by_scaler else opt.n_skipped


def with_given_grads(line, opt_of, wrap):
    """Step with gradients that come and go, a later group, a closure and a loaded state."""
    model = shard("shards", line, None)
    params = list(model.parameters())
    late = 2 if opt_of is not MAKERS["adagrad"] else len(params)  # 2.10's makes no later states
    opt = opt_of(params[:late])
    if wrap:
        model, opt = sharded_masters(model, opt)
    rng = torch.Generator().manual_seed(0)
    if params[late:]:
        opt.add_param_group({"params": params[late:], "lr": 0.05})

    def give(ps):
        opt.zero_grad()
        for p in ps:
            p.grad = distribute_tensor(torch.randn(p.shape, generator=rng), line, p.placements)
        return torch.ones(())

    for ps in (params, params[:3], params, params[1:]):
        give(ps)
        opt.step()
    assert opt.step(lambda: give(params)) == 1.0
    state = copy.deepcopy(opt.state_dict())
    give(params)
    opt.step()
    opt.load_state_dict(state)
    params[0].data.mul_(2)  # what others write is what is stepped
    give(params)
    opt.step()
    if wrap:  # the optimizer inside knows all, and may go on alone
        opt = opt.restore()
    give(params)
    opt.step()
    return whole(model, opt)


def with_nothing_in_the_last(line, make):
    """Return runs, ours and plain, of three rows for four processes: all of the last's is empty."""
    ends = []
    for wrap in (True, False):
        model = net()[-1:]
        fully_shard(model, mesh=line, mp_policy=F16)
        opt = make(model.parameters())
        if wrap:
            model, opt = sharded_masters(model, opt)
        for _ in range(3):
            opt.zero_grad()
            model(torch.ones(2, 8)).float().pow(2).sum().backward()
            opt.step()
        ends.append(whole(model, opt))
    return ends, sum(p.to_local().numel() for p in model.parameters())


def compiled_in_the_first(line, rank):
    """Return runs, ours and plain, where the first process compiles its update, and how."""
    ours, plain = shard("shards", line, None), shard("shards", line, None)
    _, opt = sharded_masters(ours, MAKERS["adamw"](ours.parameters()), compiled=rank == 0)
    (found, *_) = run(ours, opt, rank, n=3)
    (expected, *_) = run(plain, MAKERS["adamw"](plain.parameters()), rank, n=3)
    return found, expected, opt.update_paths()


def refused(line):
    """Return what is said of what cannot be, each time of a model that stays as it was."""
    early, alone = net(), net()
    opt = torch.optim.SGD(early.parameters(), lr=0.1)
    half, unmade = fully_shard(net().half(), mesh=line), fully_shard(net().to("meta"), mesh=line)
    good = shard("shards", line, None)
    twice = sharded_masters(good, torch.optim.SGD(good.parameters(), lr=0.1))[1]
    said = []
    for model, o in (
        (alone, torch.optim.SGD(alone.parameters(), lr=0.1)),
        (fully_shard(early, mesh=line), opt),
        (half, torch.optim.SGD(half.parameters(), lr=0.1)),
        (unmade, torch.optim.SGD(unmade.parameters(), lr=0.1)),
        (good, twice),
    ):
        hooks = [len(m._forward_hooks) for m in model.modules()]
        with pytest.raises((ValueError, MixedPrecisionError)) as e:
            sharded_masters(model, o)
        assert hooks == [len(m._forward_hooks) for m in model.modules()]
        said.append(str(e.value))
    return said


CASES = [
    *itertools.product(["shards"], MAKERS, [1]),
    *itertools.product(["replicas", "tensors", "both"], ["adamw"], [1]),
    ("shards", "adamw", 2),
]


def work(rank):
    """Return all that the tests look at."""
    line = init_device_mesh("cpu", (N,))
    meshes = line, init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    by_norm = []
    for wrap in (True, False):
        model = shard("shards", line, None)
        opt = ByNorm(model.parameters(), lr=0.1)
        if wrap:
            model, opt = sharded_masters(model, opt)
        model(torch.ones(2, 4)).float().sum().backward()
        opt.step()
        by_norm.append(whole(model, opt))
    return {
        "runs": {
            (how, make, micro): both_runs(how, make, meshes, rank, micro=micro)
            for how, make, micro in CASES
        },
        "skips": [skipped_is_no_step(meshes, rank, by_scaler) for by_scaler in (True, False)],
        "given": {
            k: [with_given_grads(line, make, wrap) for wrap in (True, False)]
            for k, make in GIVEN.items()
        },
        "by norm": by_norm,
        "empty": [
            with_nothing_in_the_last(line, make)
            for make in (MAKERS["adamw"], MAKERS["sgd"], lambda ps: ByNorm(ps, lr=0.1))
        ],
        "compiled": compiled_in_the_first(line, rank),
        "refused": refused(line),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What four processes have come to."""
    return on_ranks(N, work, tmp_path_factory.mktemp("ranks"), ("test_sharded_masters",))


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_a_run_is_the_plain_optimizers_bit_for_bit(ranks, case):
    for found in ranks:
        ours, plain, paths = found["runs"][case]
        assert_same(ours, plain)
        assert set(paths) == {"in chunks"}
        assert ours[2][-1] == 64.0 * 0.5**N  # each process's overflow was everybody's
        assert_same(ours[:2], ranks[0]["runs"][case][0][:2])


def test_a_skipped_step_is_no_step_in_any_process(ranks):
    for found in ranks:
        for (before, after), n_skipped in found["skips"]:
            assert_same(after, before)
            assert n_skipped == 1


@pytest.mark.parametrize("make", GIVEN)
def test_gradients_groups_closures_and_states_come_and_go(ranks, make):
    for found in ranks:
        assert_same(*found["given"][make])


def test_what_looks_at_whole_tensors_sees_them_whole(ranks):
    for found in ranks:
        assert_same(*found["by norm"])


def test_a_process_that_has_nothing_goes_the_others_way(ranks):
    """What looks at whole tensors would wait for it for good."""
    for found in ranks:
        for (ours, plain), _ in found["empty"]:
            assert_same(ours, plain)
    assert [found["empty"][0][1] for found in ranks] == [9, 9, 9, 0]


def test_an_update_may_be_compiled(ranks):
    """In one process alone: the others' bits are the plain ones."""
    for i, found in enumerate(ranks):
        ours, plain, paths = found["compiled"]
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
        assert set(paths) == ({"in chunks"} if i else {"compiled"})


def test_what_cannot_be_is_refused_with_what_to_do(ranks):
    for said in (found["refused"] for found in ranks):
        words = "with_masters", "after fully_shard", "MixedPrecisionPolicy", "to_empty", "only once"
        for sentence, word in zip(said, words, strict=True):
            assert word in sentence
