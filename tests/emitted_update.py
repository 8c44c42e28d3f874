"""What PyTorch's compiler emits for a GPU from the library's update, run and compiled without one.

`python emitted_update.py RESULTS [NAME ...]`, in a process of its own: the simulated GPU is loaded
before torch. It trains a small model there with each optimizer of `test_onepass.OPTIMIZERS`,
compiled and in chunks. A launch of one of Triton's kernels is done by Triton's interpreter, over
the same memory; and the kernel is compiled to PTX for two generations of GPUs. RESULTS, a JSON
file, gets what was seen.
"""

import functools
import importlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

_folder = tempfile.TemporaryDirectory()
os.environ.update(TORCHINDUCTOR_CACHE_DIR=_folder.name, TRITON_CACHE_DIR=_folder.name)
os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="1", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")

# before torch: names of CUDA are looked up in what was loaded first
simulated = importlib.import_module("simulated_cuda.device")

import inside  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from test_onepass import OPTIMIZERS, given_gradients, is_refused  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch._inductor import config  # noqa: E402
from torch._inductor.runtime import triton_helpers  # noqa: E402
from torch._inductor.runtime.triton_heuristics import CachingAutotuner  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mixedfp.scaler import LossScaler  # noqa: E402
from mixedfp.step import MixedStep  # noqa: E402

BLOCK = 256  # elements that an interpreted kernel does at once
launched = []  # kernels, in order; None where a step begins
copied = []  # how many tensors, at one go, since a step began


def run(kernel, *args, stream=None, **kwargs):
    """Do what a launch would: in the interpreter, over the same memory."""
    launched.append(kernel)
    args = [simulated.on_host(a) if isinstance(a, torch.Tensor) else a for a in args]
    with _disable_current_modes():
        interpreted(kernel.fn)[(triton.cdiv(args[-1], BLOCK),)](*args, XBLOCK=BLOCK)


@functools.cache
def interpreted(fn):
    """Return the kernel as the interpreter takes it: Triton decides that at the decorator."""
    source = Path(fn.fn.__code__.co_filename).read_text()
    return _import(fn.fn.__name__, _HEAD + source[source.index("@triton.jit") :])


_HEAD = """
import triton
import triton.language as tl
from torch._inductor.runtime import interpreted_helpers as triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
"""


def _import(name, source):
    path = Path(_folder.name) / f"interpreted_{name}_{len(launched)}.py"
    path.write_text(source)
    return getattr(_load(path.stem, path), name)


def _load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    return module


def widths(kernel, arch):
    """Count what the PTX of a kernel has of reads and writes, by their width."""
    (config,) = kernel.triton_meta["configs"]
    signature = kernel.triton_meta["signature"]
    blocks = {k: 1024 for k, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(kernel.fn, signature, constexprs=blocks, attrs=config)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4})
    return Counter(re.findall(r"\b(?:ld|st)\.global[a-z0-9_.:]*", made.asm["ptx"]))


def train(name, dtype, compiled):
    """Train on the simulated GPU, on the same gradients either way."""
    scaler = LossScaler("cuda", init_scale=16.0, enabled=dtype == torch.float16)
    mixed = MixedStep(dtype, True, scaler, compiled=compiled)
    inside.be_exclusive(mixed)
    return given_gradients(mixed, OPTIMIZERS[name], note_step, n_steps=4, device="cuda")


def note_step(i, model, opt):
    """Note that a step begins."""
    launched.append(None)
    copied.clear()


def weights(model, opt):
    """List pairs of a weight of the model and its master, as the host sees them."""
    masters = inside.masters_by_param(opt)
    return [[simulated.on_host(t.detach()) for t in (p, masters[p])] for p in model.parameters()]


def look(name, dtype):
    """Train both ways; say what was launched and how far apart the weights are."""
    launched.clear()
    copied.clear()
    before = counters["stats"]["unique_graphs"]
    model, opt = train(name, dtype, True)
    n_graphs = counters["stats"]["unique_graphs"] - before
    last_copies = list(copied)
    last_step = launched[-launched[::-1].index(None) :]
    kernels, ours = list(dict.fromkeys(filter(None, launched))), weights(model, opt)
    pairs = list(zip(ours, weights(*train(name, dtype, False)), strict=True))
    return {
        "paths": opt.update_paths(),
        "n_graphs": n_graphs,
        "n_functions": inside.n_compiled(opt),
        "last_step": [kernels.index(k) for k in last_step],
        "last_copies": last_copies,
        "ulps": max(_apart(m, w) for (_, m), (_, w) in pairs),
        "is_rounded": all(torch.equal(p, m.to(p.dtype)) for p, m in ours),
        "ptx": [{arch: widths(k, arch) for arch in (80, 90)} for k in kernels],
    }


def _apart(a, b):
    "In spacings of the largest of them."
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) * 2**23


def outside_of_modes(compile_):
    """Have what is compiled run as without a mode: none of PyTorch's compilers goes into one."""

    def compile_outside(graph, **settings):
        fn = compile_(graph, **settings)

        def call(*args):
            with _disable_current_modes():
                return fn(*args)

        return call

    return compile_outside


def main(path, *names):
    """Look at each optimizer."""
    sys.modules["torch._inductor.runtime.interpreted_helpers"] = helpers = _load(
        "torch._inductor.runtime.interpreted_helpers", triton_helpers.__file__
    )
    sys.modules["torch._inductor.runtime"].interpreted_helpers = helpers
    CachingAutotuner.run = run
    torch.compile = outside_of_modes(torch.compile)
    config.joint_graph_constant_folding = False  # constants are made on the device: that has none
    inside.no_mode_is_seen()
    inside.note_copies(copied)
    found = {}
    with simulated.Numbers():
        for name in names or OPTIMIZERS:
            if not is_refused(name):
                found[name] = look(name, torch.float16)
        for name in names or ("AdamW", "fastai SGD"):
            found[f"{name}, bfloat16"] = look(name, torch.bfloat16)
    Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
