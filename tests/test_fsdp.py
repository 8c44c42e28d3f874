"""A Learner in `fsdp_ctx` on two processes, compared with one process."""

import os
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from fastai.callback.schedule import Learner  # with its `lr_find`
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders, TfmdDL
from fastai.metrics import accuracy
from fastai.optimizer import Adam, OptimWrapper
from ranks import on_ranks
from tiny import Do
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import mixedfp.callback
import mixedfp.fsdp  # noqa: F401, both give Learner methods
from mixedfp import masters_of
from mixedfp.formats import MixedPrecisionError
from mixedfp.scaler import core_of
from mixedfp.sharded import has_shards
from mixedfp.testing import assert_same

pytest.importorskip("accelerate")

N = 2
TORCH = partial(OptimWrapper, opt=torch.optim.AdamW)
CASES = {
    "fp32": dict(dtype=torch.float32),
    "fp32, torch": dict(dtype=torch.float32, opt_func=TORCH),
    "bf16": {},
    "bf16, torch": dict(opt_func=TORCH),
    "fp16": dict(dtype=torch.float16, bad=True),
    "bf16, inf": dict(bad=True),
    "clip, accumulate": dict(cbs=lambda n: [GradientClip(0.1), GradientAccumulation(32 // n)]),
    "BatchNorm": dict(norm=nn.BatchNorm1d),
}


def make(n, folder, opt_func=Adam, norm=nn.LayerNorm, dtype=torch.bfloat16, seed=0):
    """Return a Learner; the batches of one process consist of those of both."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    samples = list(zip(x, (x[:, 0] > 0).long(), strict=True))
    of_both = [samples[r * 32 + 8 * j + i] for j in range(4) for r in range(N) for i in range(8)]
    given = dict(bs=16 // n, num_workers=0)
    train = TfmdDL(of_both if n == 1 else samples, shuffle=False, **given)
    dls = DataLoaders(train, TfmdDL(samples[:30], **given), device="cpu")
    torch.manual_seed(seed)
    block = nn.Sequential(nn.Linear(8, 32), norm(32), nn.ReLU())
    model = nn.Sequential(block, nn.Sequential(nn.Linear(32, 32), nn.ReLU()), nn.Linear(32, 2))
    given = dict(loss_func=nn.CrossEntropyLoss(), metrics=accuracy, path=folder, model_dir=".")
    learn = Learner(dls, model, opt_func=opt_func, **given)
    if dtype == torch.float32:
        return learn
    return learn.to_fp16() if dtype == torch.float16 else learn.to_bf16()


def whole(learn):
    state = learn.model.state_dict().items()
    return {k: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for k, t in state}


def fit(rank, n, folder, bad=False, cbs=lambda n: [], **settings):
    """Validate, fit, save, fit on, load and fit on again; return what there is to compare."""
    learn = make(n, folder, seed=rank, **settings)
    spoil = lambda learn: setattr(learn, "loss_grad", learn.loss_grad * torch.inf)  # noqa: E731
    cbs = cbs(n) + [Do("before_backward", spoil, at=1, order=9)] * (bad and rank == n - 1)
    with nullcontext() if n == 1 else learn.fsdp_ctx(shard=nn.Sequential):
        start = learn.validate()
        learn.fit(2, 1e-2, cbs=cbs)
        found = dict(weights=whole(learn), start=list(start), values=learn.recorder.values)
        found |= dict(shown=learn.get_preds()[0].sort(0)[0], dls=type(learn.dls.train).__name__)
        found["skipped"] = learn.mp_cb.skipped if "mp_cb" in vars(learn) else []
        if n > 1:
            learn.save("file")
            learn.fit(1, 1e-2)
            found["next"] = whole(learn)
            learn.load("file")
            learn.fit(1, 1e-2)
            found["resumed"] = whole(learn)
    if n > 1:  # the file is that of a plain Learner
        plain = make(1, folder, **settings | dict(dtype=torch.float32)).load("file")
        found |= dict(plain=whole(plain), n_states=len(core_of(plain.opt).state))
    return found


def by_hand(folder):
    """Return the loss of a Learner whose model was sharded before, and its file's dtypes."""
    learn = make(1, folder, dtype=torch.float32)  # both processes have the same batches
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for m in (learn.model[0], learn.model[1], learn.model):
        fully_shard(m, mp_policy=policy)
    learn.to_bf16().validate()
    learn.fit(1, 1e-2)
    with learn.fsdp_ctx(shard=nn.Sequential):
        file = learn.save("by_hand", with_opt=False)
    assert not hasattr(learn, "shared_data")  # the callback of the block
    return learn.recorder.values[-1], {t.dtype for t in torch.load(file).values()}


def refused(folder):
    old, other = (make(N, folder, opt_func=opt_func) for opt_func in (Adam, TORCH))
    old.fit(1), other.fit(1)
    flat = make(N, folder, dtype=torch.float32).to_bf16(flat_master=True)
    for words, learn, shard in (
        ("matches no module of Sequential", make(N, folder), nn.Conv2d),
        ("has trained before", old, nn.Sequential),
        ("has trained before", other, nn.Sequential),
        ("flat_master: not for a sharded model", flat, nn.Sequential),
    ):
        with pytest.raises((MixedPrecisionError, ValueError), match=words):
            with learn.fsdp_ctx(shard=shard):
                pass
        assert not has_shards(learn.model) and masters_of(learn.model) is not None
    for dtype in (torch.float32, torch.bfloat16):
        with make(N, folder, dtype=dtype).fsdp_ctx(shard=nn.Sequential) as learn:
            with pytest.raises(MixedPrecisionError, match="lr_find would hang"):
                learn.lr_find(show_plot=False)
    os.environ.pop("WORLD_SIZE")
    with pytest.raises(MixedPrecisionError, match="start the script with torchrun"):
        with make(1, folder).fsdp_ctx(shard=nn.Sequential):
            pass


def work(rank, n, folder):
    found = {name: fit(rank, n, folder, **case) for name, case in CASES.items()}
    if n > 1:
        found["by hand"] = by_hand(folder)
        refused(folder)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    found = []
    for n in (1, N):
        folder = tmp_path_factory.mktemp("fsdp")
        found.append(on_ranks(n, partial(work, n=n, folder=folder), folder, ("test_fsdp",)))
    return found


@pytest.mark.parametrize("name", list(CASES))
def test_two_processes_train_as_one(name, runs):
    """In float32 up to the order of sums, in 16 bits within rounding; skips are the same."""
    (one,), (first, second) = ([r[name] for r in run] for run in runs)
    assert first["skipped"] == second["skipped"] == one["skipped"]
    assert first["skipped"] == ([1] if CASES[name].get("bad") else [])
    assert first["values"] == second["values"] and first["dls"] == "TfmdDL"
    if name == "BatchNorm":  # of half a batch
        return
    assert_same(first["weights"], second["weights"])
    limit = 1e-5 if "fp32" in name else 3e-2
    ours, theirs = (torch.cat([t.flatten() for t in r["weights"].values()]) for r in (first, one))
    assert (ours - theirs).norm() < limit * theirs.norm()
    for key in ("start", "values"):
        assert torch.tensor(first[key]).allclose(torch.tensor(one[key]), atol=limit)
    assert first["shown"].allclose(one["shown"], atol=10 * limit)


@pytest.mark.parametrize("name", list(CASES))
def test_a_saved_file_resumes_and_loads_into_a_plain_learner(name, runs):
    for rank in runs[1]:  # the file has the statistics of the first process
        states = (rank[name][k].items() for k in ("resumed", "next"))
        assert_same(*({k: t for k, t in state if "running" not in k} for state in states))
    first = runs[1][0][name]
    assert_same(first["plain"], first["weights"])
    assert first["n_states"] == 8


def test_a_model_may_be_sharded_by_hand(runs):
    """It trains and validates as it is; a file needs the context, which keeps the shards."""
    first, second = (rank["by hand"] for rank in runs[1])
    assert first == second and first[0][0] < 0.7
    assert first[1] == {torch.float32}
