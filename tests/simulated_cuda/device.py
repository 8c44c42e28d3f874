"""The simulated GPU in this process: what it counts, and the numbers its kernels would have made.

Import it before torch: names of CUDA are looked up in what was loaded first.
"""

import ctypes
import os
from typing import NamedTuple

from simulated_cuda import BUILT, build

# Each tensor is memory of its own, unwritten: what is read before it is written is nan.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
os.environ["TRITON_LIBCUDA_PATH"] = str(BUILT)
os.environ.pop("CUDA_HOME", None)  # it would be asked for a compiler
_library = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402, see above
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

# Their libraries talk to a real driver: the CPU does all of their work.
torch.backends.cudnn.enabled = False
for _name in ("flash", "mem_efficient", "cudnn"):
    getattr(torch.backends.cuda, f"enable_{_name}_sdp")(False)


class Counts(NamedTuple):
    """What has happened, since the process began or in a part of it."""

    launches: int  # of kernels
    waits: int  # of the host for the device
    copies: int  # by the runtime, that no kernel does
    pageable_copies: int  # of these, from or to memory of the host that is not pinned

    def __sub__(self, before: "Counts") -> "Counts":
        """What has happened since `before`."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


def counts() -> Counts:
    """Count since the process began."""
    return Counts(*(_counter(name).value for name in Counts._fields))


class Allocated(NamedTuple):
    """Bytes of memory on the simulated devices."""

    now: int
    peak: int  # since the process began, or since `allocated(forget_peak=True)`


def allocated(forget_peak: bool = False) -> Allocated:
    """Count the bytes that PyTorch has allocated."""
    now, peak = _counter("bytes"), _counter("peak")
    if forget_peak:
        peak.value = now.value
    return Allocated(now.value, peak.value)


def _counter(name):
    return ctypes.c_long.in_dll(_library, f"simulated_{name}")


def _tensors(arg):
    """List the tensors in an operation's arguments or results; quicker than PyTorch's own."""
    if isinstance(arg, Tensor):
        return [arg]
    if isinstance(arg, list | tuple):
        return [t for a in arg for t in _tensors(a)]
    return []


def _mapped(f, arg):
    "The same arguments with `f` of each tensor in its place."
    if isinstance(arg, Tensor):
        return f(arg)
    if isinstance(arg, list | tuple):
        return type(arg)(_mapped(f, a) for a in arg)
    if isinstance(arg, dict):
        return {k: _mapped(f, a) for k, a in arg.items()}
    return arg


def on_host(t: Tensor) -> Tensor:
    """See the same memory as the host's."""
    if t.device.type != "cuda":
        return t
    if t.layout != torch.strided:
        raise NotImplementedError(f"{t.layout} on the simulated GPU")
    storage = t.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    seen = torch.empty(0, dtype=t.dtype, device="cpu")  # others may have another default
    seen.set_(memory, t.storage_offset(), t.shape, t.stride())
    return seen


# Work of cuBLAS and cuDNN, and shapes that follow from numbers: the CPU's result is the result.
_ALL_ON_HOST = frozenset(
    """mm addmm bmm baddbmm addbmm addmv mv dot vdot ger addr convolution convolution_backward
    _convolution nonzero masked_select index unique_dim _unique2 unique_consecutive randperm
    multinomial sort topk bincount cumsum cumprod embedding_dense_backward index_put index_put_
    _index_put_impl_ median nanmedian isin repeat_interleave _linalg_svd linalg_qr _linalg_eigh
    linalg_inv_ex _linalg_solve_ex linalg_cholesky_ex _fft_r2c _fft_c2r _addmm_activation histc
    kthvalue mode scatter_add_ scatter_add index_add_ index_add _embedding_bag
    _ctc_loss grid_sampler_2d equal""".split()
)
_WAITS = frozenset("nonzero masked_select _unique2 unique_dim unique_consecutive equal".split())
_MIXES_DEVICES = frozenset("index index_put index_put_ _index_put_impl_".split())  # with the host's
_WRITES_NOTHING = frozenset(
    """empty empty_strided empty_like new_empty new_empty_strided _pin_memory set_ resize_
    _empty_affine_quantized record_stream""".split()
)


class Numbers(TorchDispatchMode):
    """Within it, operations on the simulated GPU have the numbers that a GPU's would have.

    Each is done by CUDA's host code first, which chooses and counts kernels, then on the CPU over
    the same memory.
    """

    def __init__(
        self,
        takes_host_generators: bool = False,  # for tests that draw data as for the CPU
    ):
        super().__init__()
        self.takes_host_generators = takes_host_generators

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = _tensors((args, list(kwargs.values())))
        if not any(t.is_cuda for t in tensors) and not _is_cuda(kwargs.get("device")):
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if self.takes_host_generators and _is_on_host(kwargs.get("generator")):
            return func(*args, **kwargs | {"device": None}).to(kwargs["device"])
        if name in _ALL_ON_HOST or any(t.layout != torch.strided for t in tensors):
            return _all_on_host(func, name, tensors, args, kwargs)
        seed = _random_seed(func, tensors, kwargs)
        out = func(*args, **kwargs)
        if name in _WRITES_NOTHING:
            return out
        known = {t.untyped_storage().data_ptr() for t in tensors}
        outs = _tensors(out)
        fresh = [t for t in outs if _is_fresh(t, known)]
        if fresh or func._schema.is_mutable:
            _fill(outs, _tensors(_by_host(func, args, kwargs, seed)), fresh)
        return out


def _is_cuda(device):
    return device is not None and torch.device(device).type == "cuda"


def _is_on_host(generator):
    return generator is not None and generator.device.type == "cpu"


def _is_fresh(t, known):
    "Whether `t` is a result in memory of its own."
    return t.numel() > 0 and t.untyped_storage().data_ptr() not in known


def _fill(outs, results, fresh):
    for out, result in zip(outs, results, strict=True):
        if any(out is t for t in fresh):
            if result.shape == out.shape:
                on_host(out).copy_(result)
            else:  # what only a GPU's kernel saves for its backward pass
                on_host(out).zero_()


def _random_seed(func, tensors, kwargs):
    "What an operation with random numbers draws them from: the state of the device's generator."
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    generator = kwargs.get("generator")
    if generator is None:
        device = next((t.device for t in tensors if t.is_cuda), None)
        device = torch.device(kwargs["device"]) if device is None else device
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    if generator.device.type != "cuda":
        return None
    return (generator.initial_seed() * 1_000_003 + generator.get_offset()) % 2**63


def _by_host(func, args, kwargs, seed=None):
    args, kwargs = _mapped(on_host, args), _mapped(on_host, kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    if seed is None:
        return _in_its_dtype(func, args, kwargs)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        return _in_its_dtype(func, args, {k: v for k, v in kwargs.items() if k != "generator"})


def _in_its_dtype(func, args, kwargs):
    "Run `func`; in 32 bits where the CPU has no kernel for 16."
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        if func._schema.is_mutable:
            raise
        return func(*_mapped(_widened, args), **_mapped(_widened, kwargs))


def _widened(t):
    return t.float() if t.is_floating_point() and t.itemsize == 2 else t


def _all_on_host(func, name, tensors, args, kwargs):
    devices = {t.device for t in tensors if t.ndim}
    if name not in _MIXES_DEVICES and len(devices) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {devices}")
    if name in _WAITS:
        _library.cudaStreamSynchronize(None)
    (device, *_) = {t.device for t in tensors if t.is_cuda} or {torch.device(kwargs["device"])}
    out = _by_host(func, args, kwargs, _random_seed(func, tensors, kwargs))
    _counter("launches").value += 1
    if func._schema.is_mutable:
        return args[0]
    return _mapped(lambda t: _to_device(t, device), out)


def _to_device(t, device):
    if t.layout != torch.strided:
        return t.to(device)
    there = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    on_host(there).copy_(t)
    return there
