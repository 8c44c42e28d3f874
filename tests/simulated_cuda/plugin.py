"""Have pytest run on the simulated GPU: `PYTHONPATH=tests pytest -p simulated_cuda.plugin`.

The GPU is there, loaded before anything imports torch, and nobody has asked for it.
"""

import pytest

from simulated_cuda import why_not

if why_not() is None:
    from simulated_cuda import device  # noqa: F401, before torch


def pytest_configure(config):
    """End the run here, with one line, where no GPU can be simulated."""
    if reason := why_not():
        pytest.exit(f"no test was run on a simulated GPU: {reason}", returncode=0)


@pytest.fixture(autouse=True)
def simulated_cuda():
    """A GPU whose numbers are true, for each test."""
    with device.Numbers():
        yield
