"""Have pytest run on the simulated GPU: `PYTHONPATH=tests pytest -p simulated_cuda.plugin`.

The GPU is there, loaded before anything imports torch, and nobody has asked for it. With
`--learners-on-cuda` the data of `tiny.make_dls` is on it, and so are its learners' models; with
`--default-cuda` whatever a test makes: not for fastai, which makes tensors on the CPU by itself.
"""

import contextlib
import os
import zlib

import pytest

from simulated_cuda import why_not

if why_not() is None:
    from simulated_cuda import device  # noqa: F401, before torch

import torch  # noqa: E402


def pytest_addoption(parser):
    """Say where tests make their models and data."""
    parser.addoption("--learners-on-cuda", action="store_true", help="learners train on the GPU")
    parser.addoption("--default-cuda", action="store_true", help="the GPU is the default device")

    parser.addoption("--one-in", type=int, default=1, help="of so many tests, always the same one")


def pytest_collection_modifyitems(config, items):
    """Leave a part of the tests, spread over all files."""
    n = config.getoption("--one-in")
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % n == 0]


def pytest_configure(config):
    """End the run here, with one line, where no GPU can be simulated."""
    if config.getoption("--learners-on-cuda") or config.getoption("--default-cuda"):
        os.environ["MIXEDFP_TEST_DEVICE"] = "cuda"
    reason = why_not()
    if reason is not None:
        pytest.exit(f"no test was run on a simulated GPU: {reason}", returncode=0)


@pytest.fixture(autouse=True)
def simulated_cuda(request):
    """A GPU whose numbers are true, for each test; the same ones each time."""
    from simulated_cuda.device import Numbers

    on_cuda = request.config.getoption("--default-cuda")
    with Numbers(on_cuda), torch.device("cuda") if on_cuda else contextlib.nullcontext():
        yield
