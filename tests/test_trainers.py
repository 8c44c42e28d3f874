"""Others' trainers, as nbs/15_trainers.ipynb uses them: alone, and two processes.

Each is held against a loop by hand; the page's table says what was checked.
"""

import logging
import os
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from ranks import on_ranks
from torch.distributed import get_world_size
from torch.nn.parallel import DistributedDataParallel

from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

if not all(map(find_spec, ["accelerate", "lightning", "transformers"])):
    pytest.skip("a trainer is not installed", allow_module_level=True)

TRAINERS = {
    "Accelerator": "with_accelerate",
    "Fabric": "with_fabric",
    "lightning.Trainer": "with_lightning",
    "transformers.Trainer": "with_trainer",
}
RUNS = TRAINERS | {"a loop": "by_hand"}
SHARDED = {
    "Accelerator": "sharded_accelerate",
    "Fabric": "sharded_fabric",
    "lightning.Trainer": "sharded_lightning",
    "transformers.Trainer": "sharded_trainer",
    "a loop": "sharded_by_hand",
}


def run(name, kit, rank, bad=None, **kwargs):
    """Train by what is called `name`, in the step `bad` with an inf on the last rank alone."""
    from trainers import page

    n, end = get_world_size(), None if rank < get_world_size() - 1 else bad
    data = page["batches"](bad=end, seed=rank)
    if name == "with_trainer":  # it deals out the batches
        all_data = [page["batches"](bad=bad if r == n - 1 else None, seed=r) for r in range(n)]
        data = [batch for step in zip(*all_data, strict=True) for batch in step]
    model, opt, scaler = kit
    if name != "by_hand":
        page[name](model, opt, scaler, data, **kwargs)
    elif n > 1:
        page[name](DistributedDataParallel(model), opt, scaler, data)
    else:
        page[name](model, opt, scaler, data)
    return {**page["ends"](model, opt), "scaler": scaler.state_dict(), "skipped": scaler.skipped}


def work(folder, rank):
    """Return all runs: {(trainer, kind): what it ends in}."""
    from trainers import page

    make, n, found = page["make"], get_world_size(), {}
    if n > 1:  # what torchrun tells
        told = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": n}
        told |= {"LOCAL_WORLD_SIZE": n, "TORCHELASTIC_RUN_ID": 0}
        told |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 1}  # nobody dials: they have met
        os.environ |= {k: str(v) for k, v in told.items()}
    for name in ["by_hand", *TRAINERS.values()]:
        found[name, "plain"] = run(name, make(None), rank)
        found[name, "float32"] = run(name, make(torch.float32), rank)
        found[name, "flat"] = run(name, make(torch.float32, True), rank)
        found[name, "float16"] = run(name, make(torch.float16), rank, bad=4)
        found[name, "bfloat16"] = run(name, make(torch.bfloat16), rank, bad=4)
    for name in TRAINERS.values():
        file = page["files"](folder)[name]
        run(name, make(torch.float16), rank, bad=1, stop=3, save=file)
        found[name, "resumed"] = run(name, make(torch.float16), rank, bad=1, resume=file)
        found[name, "unbroken"] = run(name, make(torch.float16), rank, bad=1)
    with logged() as told:
        run("with_a_line_missing", make(torch.float16), rank)
    return found | dict(told=told) | (all_sharded(folder, rank) if n > 1 else {})


@contextmanager
def logged():
    """Gather what is logged, once for each message."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("mixedfp").addHandler(handler)
    yield told
    logging.getLogger("mixedfp").removeHandler(handler)


def run_sharded(place, name, rank, dtype="float16", bad=4, **kwargs):
    """Train shards: (weights, scale, skips). In `bad` the last of FSDP2's processes has an inf."""
    from trainers import page

    scaler = LossScaler("cpu", init_scale=512.0, enabled=dtype == "float16")
    at, seed = (bad, 0) if place == "TP" else (bad if rank else None, rank)  # TP shares a batch
    data = page["batches"](bad=at if dtype == "float16" else None, seed=seed)
    if name == "plain":
        name, kwargs = "sharded_by_hand", kwargs | dict(masters=lambda model, opt: (model, opt))
    model = page[name](place, getattr(torch, dtype), scaler, data, **kwargs)
    return [whole(p.detach()) for p in model.parameters()], scaler.state_dict(), scaler.skipped


def all_sharded(folder, rank):
    """Return all runs of sharded models: {(place, trainer, kind): what `run_sharded` returns}."""
    found = {}
    for place in ["FSDP2", "TP"]:
        for name in [*SHARDED.values(), "plain"]:
            for dtype in ["float32", "float16", "bfloat16"]:
                found[place, name, dtype] = run_sharded(place, name, rank, dtype)
        found[place, "unbroken"] = run_sharded(place, "plain", rank, bad=1)
        for name in SHARDED.values():
            file = f"{folder}/{place}-{name}/3"
            run_sharded(place, name, rank, bad=1, stop=3, save=file)
            found[place, name, "resumed"] = run_sharded(place, name, rank, bad=1, resume=file)
    return found


def whole(t):
    """Return a tensor of which this process may have a part."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t.clone()


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Return for each place what each of its processes has come to."""
    found = {}
    for place, n in {"one process": 1, "DDP": 2}.items():
        folder = tmp_path_factory.mktemp("ranks")
        found[place] = on_ranks(n, partial(work, str(folder)), folder, ("trainers",))
    return found


PLACE = pytest.mark.parametrize("place", ["one process", "DDP"])
TRAINER = pytest.mark.parametrize("trainer", [*TRAINERS, "a loop"])


def holds(law):
    """Have a test be a line of the page's table."""
    return pytest.mark.checks("{trainer}", law, table="15_trainers")


def without(run, *names):
    """Return what a run ended in, without the parts called `names`."""
    return {k: v for k, v in run.items() if k not in names}


FLOAT32 = "float32 masters change no bit: clipped steps are those of a loop by hand without them"
RESUMED = "float16: a run resumed after a skip ends in the bits of an unbroken one, scale included"
FLOAT16 = "float16: it scales, clips unscaled gradients, skips an overflow (of one process: in all)"


@PLACE
@TRAINER
@holds(FLOAT32)
def test_in_float32_it_is_the_plain_one(trainer, place, done):
    """Flat, the norm may be summed in another order."""
    for found in done[place]:
        name, hand = RUNS[trainer], found["by_hand", "plain"]
        assert_same(found[name, "float32"], found[name, "plain"])
        assert_same(found[name, "plain"], hand)
        torch.testing.assert_close(found[name, "flat"]["model"], hand["model"], rtol=1e-5, atol=0)


@PLACE
@TRAINER
@holds(FLOAT16)
def test_in_float16_it_is_the_loop_by_hand(trainer, place, done):
    """Bits, the loss scale and the record; ranks have one model."""
    for found in done[place]:
        assert found[RUNS[trainer], "float16"]["skipped"] == [4]
        assert_same(found[RUNS[trainer], "float16"], found["by_hand", "float16"])
        first = done[place][0][RUNS[trainer], "float16"]
        assert_same(found[RUNS[trainer], "float16"]["opt"], first["opt"])


@PLACE
@TRAINER
@holds("bfloat16: it clips, and skips a batch with an inf (of one process: in all)")
def test_in_bfloat16_it_is_the_loop_by_hand(trainer, place, done):
    """As in float16, and nobody scales."""
    for found in done[place]:
        assert_same(found[RUNS[trainer], "bfloat16"], found["by_hand", "bfloat16"])
        assert all(v.isfinite().all() for v in found["by_hand", "bfloat16"]["model"].values())


@PLACE
@pytest.mark.parametrize("trainer", TRAINERS)
@holds(RESUMED)
def test_it_goes_on_from_its_file(trainer, place, done):
    """The record of skips begins anew."""
    for found in done[place]:
        resumed, unbroken = (found[TRAINERS[trainer], k] for k in ("resumed", "unbroken"))
        assert unbroken["skipped"] == [1] and resumed["skipped"] == []
        assert_same(without(resumed, "skipped"), without(unbroken, "skipped"))


@PLACE
def test_a_missing_line_is_named(place, done):
    """Accelerate clips scaled gradients; the notice says which line is to be written."""
    for found in done[place]:
        assert any("accelerator.unscale_gradients" in message for message in found["told"])


IN_SHARDS = pytest.mark.parametrize("place", ["FSDP2", "TP"])


@IN_SHARDS
@pytest.mark.parametrize("trainer", SHARDED)
@holds(FLOAT32)
def test_shards_in_float32_are_the_plain_optimizers(trainer, place, done):
    """The loop's by hand without us."""
    for found in done["DDP"]:
        assert_same(found[place, SHARDED[trainer], "float32"], found[place, "plain", "float32"])


@IN_SHARDS
@pytest.mark.parametrize("trainer", SHARDED)
@holds(FLOAT16)
def test_shards_in_float16_are_the_plain_optimizers(trainer, place, done):
    """With the same scaler; in each process's weights."""
    for found in done["DDP"]:
        run = found[place, SHARDED[trainer], "float16"]
        assert_same(run, found[place, "plain", "float16"])
        assert run[2] == [4] and run[1]["scale"] == 256.0
        assert_same(run, done["DDP"][0][place, SHARDED[trainer], "float16"])
        assert not run[0][0].equal(found[place, "plain", "float32"][0][0])  # it was in 16 bits


@IN_SHARDS
@pytest.mark.parametrize("trainer", SHARDED)
@holds("bfloat16: it clips; steps are those of the plain optimizer over the same shards")
def test_shards_in_bfloat16_are_the_plain_optimizers(trainer, place, done):
    for found in done["DDP"]:
        assert_same(found[place, SHARDED[trainer], "bfloat16"], found[place, "plain", "bfloat16"])


@IN_SHARDS
@pytest.mark.parametrize("trainer", SHARDED)
@holds(RESUMED)
def test_shards_go_on_from_their_file(trainer, place, done):
    """The unbroken run is the plain optimizer's."""
    for found in done["DDP"]:
        weights, scale, _ = found[place, SHARDED[trainer], "resumed"]
        assert_same((weights, scale, [1]), found[place, "unbroken"])
