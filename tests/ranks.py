"""Two processes that talk to each other over gloo, for tests of what ranks agree on."""

import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import distributed

SECONDS = 120  # for all the work; then the processes are ended


def on_two_ranks(work: Callable[[int], Any], folder: Path, preload: tuple[str, ...] = ()) -> list:
    """Run `work(rank)` in two processes; return both results, which `torch.save` can write.

    `preload` names modules that both need, to be imported once.
    """
    context = get_context("forkserver")  # a fork of this process would copy its threads' locks
    context.set_forkserver_preload(["ranks", *preload])
    processes = [context.Process(target=_run, args=(work, r, str(folder))) for r in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        process.kill()
    found = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for result in found:
        assert not isinstance(result, str), result
    return found


def _run(work, rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=SECONDS / 2),
    )
    try:
        result = work(rank)
    except Exception:
        result = traceback.format_exc()
    torch.save(result, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()
