"""Processes that exchange tensors over gloo, for tests of several ranks."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed

SECONDS = 600  # for all the work, on a busy machine; then the processes are killed


def on_ranks(
    n: int,
    work: Callable[[int], Any],
    folder: Path,
    preload: tuple[str, ...] = (),
    method: str = "forkserver",  # a fork of a test's process would copy its threads' locks
) -> list:
    """Run `work(rank)` in `n` processes; return all results, which `torch.save` can write.

    All need the modules `preload`, which are imported once. Raises: TimeoutError after `SECONDS`;
    RuntimeError with what was raised, or how a process ended.
    """
    context: Any = get_context(method)
    context.set_forkserver_preload(["ranks", *preload])
    processes = [context.Process(target=_run, args=(work, r, n, str(folder))) for r in range(n)]
    # so that the fork server finds the modules to preload; else each child imports them again
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        for process in processes:
            process.start()
    in_time = _wait(processes, folder, time.monotonic() + SECONDS)
    for process in processes:
        process.kill()
        process.join()
    files = {rank: file for rank in range(n) if (file := folder / f"{rank}.pt").exists()}
    found = {rank: torch.load(file, weights_only=False) for rank, file in files.items()}
    ends = {rank: f"the process ended with {p.exitcode}" for rank, p in enumerate(processes)}
    failed = [f"rank {r}: {end}" for r, end in (ends | found).items() if isinstance(end, str)]
    if not in_time:
        raise TimeoutError(f"the time ran out after {SECONDS} s. " + "; ".join(failed))
    if failed:
        raise RuntimeError("\n".join(failed))
    return list(found.values())


def _wait(processes, folder, deadline):
    "Wait for all results; False if time runs out. A process that dies ends the waiting."
    while waiting := [p.sentinel for p in processes if p.exitcode is None]:
        if any(p.exitcode and not (folder / f"{r}.pt").exists() for r, p in enumerate(processes)):
            break
        if not connection.wait(waiting, max(0.0, deadline - time.monotonic())):
            return False
    return True


def _run(work, rank, n, folder):
    env = dict(RANK=rank, LOCAL_RANK=rank, GROUP_RANK=0, WORLD_SIZE=n, LOCAL_WORLD_SIZE=n)
    env |= dict(TORCHELASTIC_RUN_ID=0, MASTER_ADDR="localhost", MASTER_PORT=1)  # not dialled
    os.environ |= {k: str(v) for k, v in env.items()}  # as torchrun does
    torch.set_num_threads(1)
    meet = dict(init_method=f"file://{folder}/meet", rank=rank, world_size=n)
    distributed.init_process_group("gloo", **meet, timeout=timedelta(seconds=SECONDS / 2))
    try:
        result = work(rank)
    except Exception:
        result = traceback.format_exc()
    torch.save(result, f"{folder}/{rank}.part")
    os.replace(f"{folder}/{rank}.part", f"{folder}/{rank}.pt")  # whole, or not there
    distributed.destroy_process_group()
