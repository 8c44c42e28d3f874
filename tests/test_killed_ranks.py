"""Two processes, of which one is killed at a random moment; all go on from the last whole file.

They end in the bits of a run that was not broken. Run as a script, `python test_killed_ranks.py
FOLDER`, this trains, and forks each start after the imports. `KILLS=30` kills each way that often.
"""

import os
import random
import signal
import sys
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from fastai.callback.training import GradientAccumulation
from ranks import on_ranks, run_as_script
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from mixedfp.checkpoint import Checkpoint
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.sharded_masters import sharded_masters
from mixedfp.testing import assert_same

pytest.importorskip("accelerate")

N_EPOCHS = 3
FP16 = dict(init_scale=2.0**20, growth_interval=3)  # too large a scale: steps are skipped


def learner(rank, folder):
    """Train a fastai learner, with our callback."""
    tiny.be_distributed(rank)
    dls = tiny.make_dls(*tiny.pictures(88), bs=8, shuffle=True)
    learn = tiny.make_learner("adam", tiny.dropout_net, dls=dls, path=folder)
    learn.to_fp16(flat_master=True, loss_scale=2.0**19, growth_interval=3)
    torch.manual_seed(rank)  # each drops other activations
    checkpoint = Checkpoint("run")
    cbs = [checkpoint, GradientAccumulation(12)]  # of five batches one goes into the next epoch
    (folder / learn.model_dir).mkdir(exist_ok=True)
    with learn.distrib_ctx(sync_bn=False, cpu=True):
        start = checkpoint.resume(learn)
        learn.fit(N_EPOCHS, 0.02, cbs=cbs, start_epoch=start)
    return start, tiny.weights(learn), tiny.opt_state(learn), learn.mp_cb.loss_scale


def net():
    """Return a small network."""
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def epoch_of(model, opt, scaler, epoch, rank):
    """Train for four steps."""
    rng = torch.Generator().manual_seed(2 * epoch + rank)
    for _ in range(4):
        opt.zero_grad()
        scaler.scale(model(torch.randn(5, 4, generator=rng)).float().pow(2).mean()).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(opt)
        scaler.update()


def loop(rank, folder):
    """Train by hand under DDP; the first process writes a file."""
    model = net().append(nn.BatchNorm1d(3))
    model, opt = with_masters(model, torch.optim.AdamW(model.parameters(), 0.1), flat_master=True)
    parts = dict(model=model, opt=opt, scaler=LossScaler("cpu", **FP16))
    file, start = folder / "run.pt", 0
    if file.exists():
        states = torch.load(file)
        start = states.pop("epoch")
        for k, state in states.items():
            parts[k].load_state_dict(state)
    ddp = DistributedDataParallel(model)
    for epoch in range(start, N_EPOCHS):
        epoch_of(ddp, opt, parts["scaler"], epoch, rank)
        if rank == 0:
            states = {k: part.state_dict() for k, part in parts.items()}
            torch.save({**states, "epoch": epoch + 1}, folder / "part")
            os.replace(folder / "part", file)
    return start, {k: part.state_dict() for k, part in parts.items()}


def shards(rank, folder):
    """Train shards; both processes write each file, which is whole once it has `.metadata`."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = fully_shard(net(), mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    model, opt = sharded_masters(model, torch.optim.AdamW(model.parameters(), 0.1))
    scaler = LossScaler("cpu", **FP16)

    def states():
        weights, states = get_state_dict(model, opt)
        return dict(model=weights, opt=states, scaler=scaler.state_dict())

    whole = (i for i in count() if not (folder / str(i + 1) / ".metadata").exists())
    if start := next(whole):
        found = states()
        dcp.load(found, checkpoint_id=folder / str(start))
        set_state_dict(model, opt, model_state_dict=found["model"], optim_state_dict=found["opt"])
        scaler.load_state_dict(found["scaler"])
    for epoch in range(start, N_EPOCHS):
        epoch_of(model, opt, scaler, epoch, rank)
        dcp.save(states(), checkpoint_id=folder / str(epoch + 1))
    weights = {k: p.full_tensor() for k, p in model.named_parameters()}
    moments = [s[k].full_tensor() for s in opt.state.values() for k in ("exp_avg", "exp_avg_sq")]
    return start, weights, moments, scaler.state_dict()


WAYS = dict(learner=learner, loop=loop, shards=shards)
WRITES = {("save", "serialization.py"), ("save", "state_dict_saver.py")}


class Calls:
    """Counts calls of functions, and ends the process at one of them."""

    def __init__(self, last):
        self.n, self.last, self.began, self.writes = 0, last, [], []

    def __call__(self, frame, event, _):
        """See a call, or a return."""
        self.n += 1
        if self.n == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        code = frame.f_code
        if code.co_name == "save" and (code.co_name, Path(code.co_filename).name) in WRITES:
            if event == "call":
                self.began.append(self.n)
            elif event == "return":
                self.writes.append((self.began.pop(), self.n + 50))  # and gives it its name

    @contextmanager
    def counted(self):
        """Count."""
        sys.setprofile(self)
        try:
            yield self
        finally:
            sys.setprofile(None)


def start(rank, way, folder, victim=None, last=None):
    """Train in a process, which may be the victim."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with Calls(last if rank == victim else None).counted() as calls:
        ends = WAYS[way](rank, folder)
    return ends, calls.n, calls.writes


def runs(way, folder, n):
    """Run unbroken, then broken `n` times; return (ends expected, [(ends, where killed)])."""
    names = count()

    def on_two(**kwargs):
        meet = folder / f"meet{next(names)}"
        meet.mkdir(parents=True)
        return on_ranks(2, partial(start, way=way, **kwargs), meet, method="fork")

    (folder / "whole").mkdir(parents=True)
    whole = on_two(folder=folder / "whole")
    chance, found = random.Random(way), []
    for i in range(n):
        run = folder / f"run{i}"
        run.mkdir()
        victim = chance.randrange(2)
        _, n_calls, writes = whole[victim]
        low, high = n_calls // 3, n_calls * 19 // 20
        if writes and i % 2:
            low, high = chance.choice(writes)
        last = chance.randrange(low, high)
        try:
            on_two(folder=run, victim=victim, last=last)
            raise AssertionError("no process died")
        except RuntimeError as e:
            assert f"ended with {-signal.SIGKILL}" in str(e), e
        found.append(([ends for ends, *_ in on_two(folder=run)], (victim, last, i % 2)))
    return [ends for ends, *_ in whole], found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """All runs, of all ways."""
    folder = tmp_path_factory.mktemp("killed")
    run_as_script(__file__, folder)
    return torch.load(folder / "found.pt", weights_only=False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process that forks")
@pytest.mark.parametrize("way", WAYS)
def test_all_go_on_from_the_last_checkpoint_in_the_same_bits(way, found):
    """Weights, buffers, states and scale, on both ranks, wherever one was killed."""
    whole, broken = found[way]
    for ends, where in broken:
        for (_, *expected), (_, *got) in zip(whole, ends, strict=True):
            assert_same(got, expected)
        assert ends[0][0] == ends[1][0], where  # both began with the same epoch
    assert any(ends[0][0] for ends, _ in broken)  # some were in the middle


if __name__ == "__main__":
    torch.compiler.reset()  # which imports, once for all, what DDP and FSDP2 would in each start
    folder = Path(sys.argv[1])
    n = int(os.environ.get("KILLS", 4))
    torch.save({way: runs(way, folder / way, n) for way in WAYS}, folder / "found.pt")
