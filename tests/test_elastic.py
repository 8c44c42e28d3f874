"""`torchrun` ends all processes when one is killed; started again, they continue from the files.

Run by `torchrun test_elastic.py FOLDER`, this trains a Learner with `Checkpoint` under DDP, and a
sharded model with PyTorch's distributed checkpoint. The last process may kill itself in each.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import mixedfp.callback  # noqa: F401, gives Learner to_bf16
from mixedfp.checkpoint import Checkpoint
from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same

pytest.importorskip("accelerate")

N_EPOCHS = 3


def die(where, epoch):
    """Kill the last process in the second epoch, if the test wants it `where` this is called."""
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if is_last and epoch == 1 and os.environ.get("KILL") == where:
        os.kill(os.getpid(), signal.SIGKILL)


def learner(folder, rank):
    """Train a Learner by fastai's `distrib_ctx`; return where it started, and the weights."""
    learn = tiny.make_learner("adam", dls=tiny.make_dls(*tiny.images(40), bs=8), path=folder)
    learn.to_bf16(flat_master=True)
    checkpoint = Checkpoint("run")
    (folder / learn.model_dir).mkdir(exist_ok=True)

    def copy_file(learn):
        file = learn.path / learn.model_dir / "run.pth"
        if rank == 0 and learn.epoch == N_EPOCHS - 1:
            shutil.copy(file, file.with_name("before.pth"))

    cbs = [checkpoint, tiny.Do("before_backward", lambda learn: die("learner", learn.epoch))]
    cbs += [tiny.Do("before_train", copy_file)]
    with learn.distrib_ctx(sync_bn=False, cpu=True):
        start = checkpoint.resume(learn)
        learn.fit(N_EPOCHS, 0.02, cbs=cbs, start_epoch=start)
    return start, tiny.weights(learn)


def loop(folder, rank, n):
    """Train a sharded model; each process has its part of the same batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (n,)), mp_policy=policy)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, opt = with_masters(model, opt, dtype=torch.bfloat16)

    def state():
        return dict(zip(("model", "opt"), get_state_dict(model, opt), strict=True))

    done = [int(f.name) for f in folder.glob("dcp/*") if (f / ".metadata").exists()]
    start, saved = max(done, default=0), state()
    if start:
        dcp.load(saved, checkpoint_id=folder / "dcp" / str(start))
        given = dict(model_state_dict=saved["model"], optim_state_dict=saved["opt"])
        set_state_dict(model, opt, **given)
    for epoch in range(start, N_EPOCHS):
        rng = torch.Generator().manual_seed(epoch)
        for _ in range(4):
            x = torch.randn(24, 8, generator=rng)
            model(x[rank::n]).square().mean().backward()
            die("loop", epoch)
            opt.step()
            opt.zero_grad()
        dcp.save(state(), checkpoint_id=folder / "dcp" / str(epoch + 1))
    return start, {k: t.full_tensor() for k, t in model.state_dict().items()}


def main(folder):
    """Train both; each process writes what it has come to."""
    torch.set_num_threads(1)
    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from fastai.distributed import DistributedDL

    DistributedDL._broadcast = tiny._broadcast
    found = learner(folder, rank), loop(folder, rank, n)
    torch.save(found, folder / f"{rank}.pt")
    distributed.destroy_process_group()


def torchrun(folder, n, kill=""):
    """Run this file by torchrun; return the ends of the Learner and of the loop, by process."""
    folder.mkdir(exist_ok=True)
    env = os.environ | dict(KILL=kill, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="1")
    env["CUDA_VISIBLE_DEVICES"] = ""
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    run = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    run += ["--nproc-per-node", str(n), "--monitor-interval", "0.1", __file__, folder]
    done = subprocess.run(run, env=env, timeout=400, capture_output=True, text=True)
    if kill:
        assert done.returncode and "Signal 9 (SIGKILL)" in done.stderr, done.stderr[-3000:]
        return None
    assert done.returncode == 0, done.stderr[-3000:]
    return list(zip(*(torch.load(folder / f"{r}.pt") for r in range(n)), strict=True))


def test_killed_processes_are_started_again_and_end_in_the_same_bits(tmp_path):
    """Then three processes continue from the files of two."""
    whole = torchrun(tmp_path / "whole", 2)
    torchrun(tmp_path / "broken", 2, kill="learner")
    torchrun(tmp_path / "broken", 2, kill="loop")
    broken = torchrun(tmp_path / "broken", 2)
    assert [start for start, _ in (whole[0][0], whole[1][0])] == [0, 0]
    for ends, expected in zip(broken, whole, strict=True):
        for (start, weights), (_, others) in zip(ends, expected, strict=True):
            assert start > 0
            assert_same(weights, others)
    shutil.rmtree(tmp_path / "whole" / "dcp" / "3")
    models = tmp_path / "whole" / "models"
    (models / "before.pth").replace(models / "run.pth")
    by_fit, by_loop = torchrun(tmp_path / "whole", 3)
    assert {start for start, _ in (*by_fit, *by_loop)} == {N_EPOCHS - 1}
    assert all(t.isfinite().all() for _, weights in by_fit for t in weights.values())
    for ends in by_fit, by_loop:
        for _, weights in ends:
            assert_same(weights, ends[0][1])
    for k, t in by_loop[0][1].items():
        assert t.allclose(whole[1][0][1][k], atol=1e-2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
