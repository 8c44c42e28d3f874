"""A GPU for tests where there is none: PyTorch's CUDA code runs, the CPU computes the numbers.

`runtime.c` stands in for CUDA's runtime and driver. PyTorch's own host code runs over it as on a
GPU: its allocator, streams, autograd's device threads, its choice of kernels. A kernel does nothing
but be counted, and `device.Numbers` has the CPU compute over the same memory what it would have.
`plugin` gives a whole run of pytest this device; `make test-cuda` uses it.

It shows: waits of the host, tensors on two devices where one is needed, memory that is read before
anybody wrote it, launches and bytes of a step.
It cannot show: time, CUDA's own rounding, what cuBLAS and cuDNN do, races, several processes.
"""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
SITE = Path(sysconfig.get_paths()["purelib"])
HEADERS = SITE / "nvidia" / "cu13" / "include"  # pip's, of PyTorch's builds for CUDA 13
BUILT = HERE.parents[1] / "build" / "simulated_cuda"


def why_not() -> str | None:
    """Say what is missing to simulate a GPU here, None if nothing is."""
    if shutil.which("gcc") is None:
        return "there is no gcc to build the simulated GPU"
    if not (HEADERS / "cuda_runtime_api.h").exists():
        return "the simulated GPU needs a build of PyTorch for CUDA 13"
    return None


def build() -> Path:
    """Build the library, once, and return its path. Raises: CalledProcessError."""
    source, library = HERE / "runtime.c", BUILT / "libcuda.so.1"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        BUILT.mkdir(parents=True, exist_ok=True)
        mine = BUILT / f"{os.getpid()}.so"  # others may build at the same time
        headers = [f"-I{HEADERS}", f"-I{SITE / 'triton/backends/nvidia/include'}"]
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Wl,-soname,libcuda.so.1"]
        subprocess.run(["gcc", *flags, *headers, "-o", mine, source], check=True)
        mine.replace(library)
    return library
