"""Others' trainers, as nbs/15_trainers.ipynb uses them: alone, and two processes under DDP.

Each is held against a loop by hand; the page's table says what was checked.
"""

import os
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from ranks import on_ranks
from torch.distributed import get_world_size
from torch.nn.parallel import DistributedDataParallel

from mixedfp.testing import assert_same

if not all(map(find_spec, ["accelerate", "lightning", "transformers"])):
    pytest.skip("a trainer is not installed", allow_module_level=True)

TRAINERS = {
    "Accelerator": "with_accelerate",
    "Fabric": "with_fabric",
    "lightning.Trainer": "with_lightning",
    "transformers.Trainer": "with_trainer",
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
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Return for each place what each of its processes has come to."""
    found = {}
    for place, n in {"one process": 1, "DDP": 2}.items():
        folder = tmp_path_factory.mktemp("ranks")
        found[place] = on_ranks(n, partial(work, str(folder)), folder, ("trainers",))
    return found


PLACE = pytest.mark.parametrize("place", ["one process", "DDP"])
TRAINER = pytest.mark.parametrize("trainer", list(TRAINERS))


def holds(law):
    """Have a test be a line of the page's table."""
    return pytest.mark.checks("{trainer}", law, table="15_trainers")


def without(run, *names):
    """Return what a run ended in, without the parts called `names`."""
    return {k: v for k, v in run.items() if k not in names}


@PLACE
@TRAINER
@holds("float32 masters change no bit: clipped steps are those without them, and a loop's by hand")
def test_in_float32_it_is_the_plain_one(trainer, place, done):
    """Flat, the norm may be summed in another order."""
    for found in done[place]:
        name, hand = TRAINERS[trainer], found["by_hand", "plain"]
        assert_same(found[name, "float32"], found[name, "plain"])
        assert_same(found[name, "plain"], hand)
        torch.testing.assert_close(found[name, "flat"]["model"], hand["model"], rtol=1e-5, atol=0)


@PLACE
@TRAINER
@holds("float16: it scales, clips unscaled gradients, skips an overflow (of one process: in all)")
def test_in_float16_it_is_the_loop_by_hand(trainer, place, done):
    """Bits, the loss scale and the record; ranks have one model."""
    for found in done[place]:
        assert found[TRAINERS[trainer], "float16"]["skipped"] == [4]
        assert_same(found[TRAINERS[trainer], "float16"], found["by_hand", "float16"])
        first = done[place][0][TRAINERS[trainer], "float16"]
        assert_same(found[TRAINERS[trainer], "float16"]["opt"], first["opt"])


@PLACE
@TRAINER
@holds("bfloat16: it clips, and skips a batch with an inf (of one process: in all)")
def test_in_bfloat16_it_is_the_loop_by_hand(trainer, place, done):
    """As in float16, and nobody scales."""
    for found in done[place]:
        assert_same(found[TRAINERS[trainer], "bfloat16"], found["by_hand", "bfloat16"])
        assert all(v.isfinite().all() for v in found["by_hand", "bfloat16"]["model"].values())


@PLACE
@TRAINER
@holds("float16: a run resumed after a skip ends in the bits of an unbroken one, scale included")
def test_it_goes_on_from_its_file(trainer, place, done):
    """The record of skips begins anew."""
    for found in done[place]:
        resumed, unbroken = (found[TRAINERS[trainer], k] for k in ("resumed", "unbroken"))
        assert unbroken["skipped"] == [1] and resumed["skipped"] == []
        assert_same(without(resumed, "skipped"), without(unbroken, "skipped"))
