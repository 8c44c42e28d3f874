"""The simulated GPU in this process: what it counts, and the numbers its kernels would have made.

Import it before torch: names of CUDA are looked up in what was loaded first.
"""

import ctypes
import os
from typing import NamedTuple

from simulated_cuda import build

# Each tensor is memory of its own, unwritten: what is read before it is written is nan.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
os.environ.pop("CUDA_HOME", None)  # it would be asked for a compiler
_library = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402, see above
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

# Their libraries talk to a real driver: the CPU does all of their work.
torch.backends.cudnn.enabled = False
for _name in ("flash", "mem_efficient", "cudnn"):
    getattr(torch.backends.cuda, f"enable_{_name}_sdp")(False)


class Counts(NamedTuple):
    """What has happened, since the process began or in a part of it."""

    launches: int  # of kernels
    waits: int  # of the host for the device

    def __sub__(self, before: "Counts") -> "Counts":
        """What has happened since `before`."""
        return Counts(self.launches - before.launches, self.waits - before.waits)


def counts() -> Counts:
    """Count since the process began."""
    return Counts(_counter("launches").value, _counter("waits").value)


class Allocated(NamedTuple):
    """Bytes of memory on the simulated device."""

    now: int
    peak: int  # since the process began, or since `allocated(forget_peak=True)`


def allocated(forget_peak: bool = False) -> Allocated:
    now, peak = _counter("bytes"), _counter("peak")
    if forget_peak:
        peak.value = now.value
    return Allocated(now.value, peak.value)


def _counter(name):
    return ctypes.c_long.in_dll(_library, f"simulated_{name}")


def tensors(tree) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def on_host(t: Tensor) -> Tensor:
    """See the same memory as the host's."""
    if t.device.type != "cuda":
        return t
    storage, cpu = t.untyped_storage(), torch.device("cpu")
    held = storage.data_ptr(), cpu, storage.nbytes()
    memory = torch._C._construct_storage_from_data_pointer(*held)
    seen = torch.empty(0, dtype=t.dtype, device=cpu)
    return seen.set_(memory, t.storage_offset(), t.shape, t.stride())


def widened(t: Tensor) -> Tensor:
    """Return it on the host, with 32 bits for 16: the CPU has few kernels that take both."""
    seen = on_host(t)
    return seen.float() if t.is_floating_point() and t.itemsize == 2 else seen


# They are in cuBLAS and cuDNN, or sort: the CPU's result is copied to the device.
LIBRARIES = "mm addmm bmm convolution convolution_backward embedding_dense_backward".split()


class Numbers(TorchDispatchMode):
    """Within it, operations on the simulated GPU have the numbers that a GPU's would have.

    Each is done by CUDA's host code first, which chooses and counts kernels, then on the CPU over
    the same memory.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given, name = tensors((args, kwargs)), func._schema.name.removeprefix("aten::")
        is_written = func._schema.is_mutable
        see = on_host if is_written or len({t.dtype for t in given}) == 1 else widened
        args_there, kwargs_there = tree_map_only(Tensor, see, (args, kwargs))
        if "device" in kwargs:
            kwargs_there["device"] = "cpu"
        if name in LIBRARIES and given[0].is_cuda:
            out = func(*args_there, **kwargs_there)
            return tree_map_only(Tensor, lambda t: t.to(given[0].dtype).cuda(), out)
        out = func(*args, **kwargs)
        made, known = tensors(out), {t.untyped_storage().data_ptr() for t in given}
        fresh = [t.is_cuda and t.untyped_storage().data_ptr() not in known for t in made]
        if "empty" not in name and (any(fresh) or is_written and any(t.is_cuda for t in given)):
            results = tensors(func(*args_there, **kwargs_there))
            for to, of, is_fresh in zip(made, results, fresh, strict=True):
                if is_fresh:
                    on_host(to).copy_(of)
        return out
