"""What all tests share: seeds, threads, and the way to the images."""

import gc
import logging
import os
import random
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "Agg")  # before anything imports matplotlib

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import distributed

from mixedfp.nested import warn_once

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))
torch.set_num_threads(min(2, torch.get_num_threads()))

if os.environ.get("MIXEDFP_TEST_DEVICE") == "cuda" and "simulated_cuda.device" not in sys.modules:
    # a GPU adds up in another order each time, and rounds factors to TF32, unless it is told not to
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.allow_tf32 = False


class SkipsWithout(MetaPathFinder):
    """Skips, by name, the tests and files that import a package that is not installed."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname in ("fastai", "skorch"):
            pytest.skip(f"{fullname} is not installed", allow_module_level=True)


sys.meta_path.append(SkipsWithout())  # asked last: only for what nobody finds

# The same examples on each run; no deadline, since a busy machine is no bug.
settings.register_profile("mixedfp", deadline=None, derandomize=True)
settings.load_profile("mixedfp")


def pytest_addoption(parser):
    """Add the option for long tables."""
    parser.addoption("--all-rows", action="store_true", help="tables with all pairs of values")


def pytest_collection_finish():
    """Let the garbage collector look at what the tests make, and no more at all that is loaded."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Let it see all again: some libraries count at the end what is left of them."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def fixed_seeds():
    """Every test starts from the same random numbers, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def alone():
    """A group of one process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def warnings_of(caplog):
    """The texts that are logged, each of them as if for the first time."""
    warn_once.cache_clear()
    caplog.set_level(logging.WARNING, "mixedfp")
    return lambda: [r.getMessage() for r in caplog.records]
