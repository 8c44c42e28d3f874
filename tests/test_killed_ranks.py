"""Two processes, of which one is killed at a random moment; all continue from the last whole file.

Run as a script, `python test_killed_ranks.py FOLDER`, this trains a Learner, and forks each start
after the imports. `KILLS=30` kills each so often.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from fastai.callback.training import GradientAccumulation
from ranks import on_ranks

import mixedfp.callback  # noqa: F401, puts `to_fp16` on Learners
from mixedfp.checkpoint import Checkpoint
from mixedfp.testing import assert_same

pytest.importorskip("accelerate")


def learner(rank, folder, n):
    """Return the first epoch of a fit, and what it ends in."""
    tiny.be_distributed(rank, n)
    dls = tiny.make_dls(*tiny.images(88), bs=8, shuffle=True)
    learn = tiny.make_learner("adam", tiny.dropout_net, dls=dls, path=folder)
    learn.to_fp16(flat_master=True, loss_scale=2.0**19, growth_interval=3)  # steps are skipped
    torch.manual_seed(rank)  # each drops other activations
    cbs = [Checkpoint("run"), GradientAccumulation(12)]  # of five batches one is the next epoch's
    (folder / learn.model_dir).mkdir(exist_ok=True)
    with learn.distrib_ctx(sync_bn=False, cpu=True):
        start = cbs[0].resume(learn)
        learn.fit(3, 0.02, cbs=cbs, start_epoch=start)
    return start, tiny.weights(learn), tiny.opt_state(learn), learn.mp_cb.loss_scale


def start(rank, folder, n, victim=None, last=None):
    """Train in a process, which may be the victim; count its calls, note those that write."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    numbers, writes = count(), []

    def see(frame, event, _):
        n = next(numbers)
        if (rank, n) == (victim, last):
            os.kill(os.getpid(), signal.SIGKILL)
        if frame.f_code.co_name == "save_checkpoint":
            writes.append(n)

    sys.setprofile(see)
    try:
        return learner(rank, folder, n), next(numbers), writes
    finally:
        sys.setprofile(None)


def runs(folder, n):
    """Run unbroken, then broken `n` times; return the ends expected, all ends, those of three."""
    chance, found = random.Random(0), []

    def on(name, n=2, **kwargs):
        (folder / name).mkdir(parents=True, exist_ok=True)
        work = partial(start, folder=folder / name, n=n, **kwargs)
        return on_ranks(n, work, Path(tempfile.mkdtemp(dir=folder)), method="fork")

    whole = on("whole")
    for i in range(n):
        victim = chance.randrange(2)
        _, n_calls, writes = whole[victim]
        end = n_calls * 19 // 20  # a file of the last epoch has the buffers of one process
        last = chance.randrange(n_calls // 3, end)
        if writes and i % 2:
            last = min(chance.choice(writes) + chance.randrange(40), end)
        with pytest.raises(RuntimeError, match=f"ended with {-signal.SIGKILL}"):
            on(f"run{i}", victim=victim, last=last)
        found.append([ends for ends, *_ in on(f"run{i}")])
    with pytest.raises(RuntimeError):
        on("more", victim=1, last=whole[1][1] * 9 // 10)
    return [ends for ends, *_ in whole], found, [ends for ends, *_ in on("more", 3)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process that forks")
def test_all_continue_from_the_last_checkpoint_in_the_same_bits(tmp_path):
    """Weights, buffers, states and scale, on both ranks, wherever one was killed."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)  # the same mixedfp as here
    command = [sys.executable, "-W", "ignore", __file__, tmp_path]
    subprocess.run(command, env=env, timeout=900, check=True)  # by itself: it may be killed
    whole, broken, three = torch.load(tmp_path / "found.pt", weights_only=False)
    for ends in broken:
        for (_, *expected), (_, *got) in zip(whole, ends, strict=True):
            assert_same(got, expected)
        assert ends[0][0] == ends[1][0]  # both began with the same epoch
    assert any(ends[0][0] for ends in broken)  # some were in the middle
    for begun, weights, _, scale in three:
        assert begun == three[0][0] > 0 and scale == three[0][3]
        for k, w in weights.items():
            assert w.isfinite().all() and ("running" in k or w.equal(three[0][1][k]))


if __name__ == "__main__":
    torch.compiler.reset()  # imports, once for all, what DDP would import in each start
    folder, n = Path(sys.argv[1]), int(os.environ.get("KILLS", 3))
    torch.save(runs(folder, n), folder / "found.pt")
