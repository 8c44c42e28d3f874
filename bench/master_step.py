"""The master step, everything after backward: ours against what one would pick instead.

    python bench/master_step.py --out bench/results/master_step.json    # 6 minutes on 2 cores
    python bench/master_step.py --shapes resnet50 --opts adam --dtypes fp16
    python bench/master_step.py --shapes resnet50 vit_b awd_lstm --dtypes bf16 --repeats 9 \
      --ways "fused" "ours, flat, torch's" "ours, compiled, torch's" "ours, remainders, flat" \
      "ours, remainders, compiled" --out bench/results/master_step_remainders.json

Gradients to float32, unscale and check (float16), update, weights back to 16 bits, gradients
cleared. All ways take turns in one run, on parameters of the same shapes and on the same gradients;
each time is a median. `share` is that of the limit: the fewest bytes that a step can move (SGD with
momentum 20 a parameter, Adam 28; 2 more where a check has to come before the update) over the
bandwidth that a copy of a large array reaches in the same run. `calls` are operations that PyTorch
is asked for, `reads` are numbers that Python asks the device for (on CUDA: waits for the device);
`bytes` is what is held a parameter beside the model's weights and gradients. `first` is the slowest
of three steps before the others: a compiled way compiles then, what no table above it has compiled
(the compiler starts with an empty cache). `payback` is the number of steps after which a way of
ours has caught up with ours for each parameter; 0: at once, never: it is not faster. ViT-B in all
ways takes 20 GB.

Runs on a CPU and, unchanged, on CUDA. Without fastai its own ways are left out.
"""

import argparse
import gc
import json
import math
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler counts calls, and is quiet

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

from mixedfp.optimizer import MasterOptimizer
from mixedfp.scaler import LossScaler
from mixedfp.step import MixedStep

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import inside  # noqa: E402

try:
    from fastai.callback.fp16 import get_master as fastai_masters
    from fastai.callback.fp16 import grad_overflow, to_master_grads, to_model_params
    from fastai.optimizer import SGD, Adam
except ImportError:
    SGD = Adam = None

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LR = {"lr": 1e-4}


# the parameters


def resnet50() -> list[tuple]:
    """List the shapes of ResNet-50's 161 parameters, 25.6 million numbers."""
    shapes, n_in = [(64, 3, 7, 7), (64,), (64,)], 64
    for width, depth in [(64, 3), (128, 4), (256, 6), (512, 3)]:
        for i in range(depth):
            n_out = 4 * width
            convs = [(width, n_in, 1, 1), (width, width, 3, 3), (n_out, width, 1, 1)]
            convs += [(n_out, n_in, 1, 1)] if i == 0 else []
            shapes += [s for conv in convs for s in (conv, conv[:1], conv[:1])]
            n_in = n_out
    return [*shapes, (1000, 2048), (1000,)]


def vit_b() -> list[tuple]:
    """List the shapes of ViT-B/16's 152 parameters, 86.6 million numbers."""
    d = 768
    block = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,)]
    block += [(d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [
        (1, 1, d),
        (d, 3, 16, 16),
        (d,),
        (1, 197, d),
        *(12 * block),
        (d,),
        (d,),
        (1000, d),
        (1000,),
    ]


def awd_lstm() -> list[tuple]:
    """List the shapes of fastai's AWD-LSTM, 30,000 words: 32.5 million numbers."""
    emb, hid = 400, 1152
    shapes = [(30_000, emb), (30_000,)]
    for n_in, n_out in [(emb, hid), (hid, hid), (hid, emb)]:
        shapes += [(4 * n_out, n_in), (4 * n_out, n_out), (4 * n_out,), (4 * n_out,)]
    return shapes


SHAPES = {"resnet50": resnet50, "vit_b": vit_b, "awd_lstm": awd_lstm}
SHAPES["2000 small"] = lambda: [(16, 16)] * 2000


class Params(nn.Module):
    """Parameters of given shapes, weights and vectors apart as in any model."""

    def __init__(self, shapes: list[tuple], dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(0)
        values = [torch.randn(s, device=DEVICE) / 50 for s in shapes]
        self.values = nn.ParameterList([Parameter(v.to(dtype)) for v in values])


# the ways


def fastai_opt(name: str, params) -> object:
    """Make fastai's optimizer."""
    if name == "sgd":
        return SGD(params, mom=0.9, wd=0.01, **LR)
    return Adam(params, mom=0.9, sqr_mom=0.999, wd=0.01, **LR)


def torch_opt(name: str, params, **kwargs) -> torch.optim.Optimizer:
    """Make PyTorch's optimizer."""
    if name == "sgd":
        return torch.optim.SGD(params, momentum=0.9, weight_decay=0.01, **LR, **kwargs)
    return torch.optim.AdamW(params, **LR, **kwargs)


class Fastai:
    """fastai's functions for master weights, with its optimizers."""

    def __init__(self, model: Params, opt: str, dtype: torch.dtype, flat: bool = False):
        self.flat, self.is_scaled = flat, dtype == torch.float16
        self.opt = fastai_opt(opt, list(model.parameters()))
        self.params, self.masters = fastai_masters(self.opt, flat)
        self.opt.param_lists = self.masters
        self.model = model

    def step(self) -> None:
        """Do what `NonNativeMixedPrecision` does from `before_step` to the end of `after_step`."""
        if self.is_scaled and grad_overflow(self.params):
            raise AssertionError("no gradient overflows here")
        to_master_grads(self.params, self.masters, self.flat)
        if self.is_scaled:
            for masters in self.masters:
                for p in masters:
                    p.grad.div_(512.0)
        self.opt.step()
        self.model.zero_grad()
        to_model_params(self.params, self.masters, self.flat)

    def held(self) -> list[Tensor]:
        """List the tensors that are kept beside the model."""
        masters = [p for ps in self.masters for p in ps]
        return [*masters, *(p.grad for p in masters), *_tensors(self.opt.state)]


class ByHand:
    """Masters for each parameter, PyTorch's `foreach` or `fused` kernels, and `GradScaler`."""

    def __init__(self, model: Params, opt: str, dtype: torch.dtype, **kind):
        self.params = list(model.parameters())
        self.masters = [Parameter(p.detach().float()) for p in self.params]
        self.opt = torch_opt(opt, self.masters, **kind)
        enabled = dtype == torch.float16
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=512.0, enabled=enabled)
        self.scaler.scale(torch.ones((), device=DEVICE))
        self.memory = [torch.empty_like(m) for m in self.masters]

    @torch.no_grad()
    def step(self) -> None:
        """Copy gradients, step, copy weights: a call for all tensors each."""
        torch._foreach_copy_(self.memory, [p.grad for p in self.params])
        for m, g in zip(self.masters, self.memory, strict=True):
            m.grad = g
        self.scaler.step(self.opt)
        self.scaler.update()
        torch._foreach_copy_(self.params, self.masters)
        for p in self.params:
            p.grad = None

    def held(self) -> list[Tensor]:
        """List the tensors that are kept beside the model."""
        return [*self.masters, *self.memory, *_tensors(self.opt.state)]


class Ours:
    """`MixedStep`, as in a `Learner` whose callbacks do not look at gradients."""

    def __init__(
        self,
        model: Params,
        opt: str,
        dtype: torch.dtype,
        make: Callable,
        compiled: bool | None = None,
        flat=True,
        cut=False,
    ):
        scaler = LossScaler(DEVICE, init_scale=512.0, enabled=dtype == torch.float16)
        settings = dict(compiled=compiled, store_param_remainders=cut and dtype == torch.bfloat16)
        self.mixed = MixedStep(dtype, flat, scaler, **settings)
        inside.be_exclusive(self.mixed, flat)
        self.mixed.attach(model.float())
        self.opt = self.mixed.wrap_optimizer(make(opt, list(model.parameters())))
        self.params = list(model.parameters())

    def before(self) -> None:
        """Do what comes before the backward pass, of a loss that uses every parameter once."""
        self.mixed.scale(torch.stack([p.view(-1)[0].float() for p in self.params]).sum())
        self.mixed.loss = None  # its graph is the backward pass's to free

    def step(self) -> None:
        """Unscale and check, step, update the scale, clear the gradients."""
        if self.mixed.unscale():
            self.mixed.step()
        self.mixed.update()
        self.opt.zero_grad(set_to_none=None)

    def held(self) -> list[Tensor]:
        """List the tensors that are kept beside the model."""
        return [*inside.tensors_held(self.opt), *_tensors(self.opt.opt.state)]


class OursPlain:
    """`MasterOptimizer` in a plain loop; its gradients reached the vectors during backward."""

    def __init__(self, model: Params, opt: str, dtype: torch.dtype, compiled: bool | None = None):
        inner = torch_opt(opt, list(model.parameters()))
        self.opt = MasterOptimizer(
            inner, flat_master=True, model=model, stream=True, compiled=compiled
        )
        self.scaler = LossScaler(DEVICE, init_scale=512.0, enabled=dtype == torch.float16)
        self.one = torch.ones((), device=DEVICE)

    def before(self) -> None:
        """Do what comes before the backward pass."""
        self.scaler.scale(self.one)

    def after(self, params: list[Parameter]) -> None:
        """Do what hooks do during the backward pass."""
        for p in params:
            inside.deliver_grad(self.opt, p)

    def step(self) -> None:
        """Unscale and check, step, update the scale, clear the gradients."""
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()

    def held(self) -> list[Tensor]:
        """List the tensors that are kept beside the model."""
        return [*inside.tensors_held(self.opt), *_tensors(self.opt.state)]


WAYS: dict[str, Callable] = {}
if SGD is not None:
    WAYS["fastai, each"] = Fastai
    WAYS["fastai, flat"] = partial(Fastai, flat=True)
WAYS["foreach"] = partial(ByHand, foreach=True)
WAYS["fused"] = partial(ByHand, fused=True)
if SGD is not None:
    WAYS["ours, each"] = partial(Ours, make=fastai_opt, flat=False)
    WAYS["ours, flat, fastai's"] = partial(Ours, make=fastai_opt, compiled=False)
    WAYS["ours, compiled, fastai's"] = partial(Ours, make=fastai_opt, compiled=True)
WAYS["ours, flat, torch's"] = partial(Ours, make=torch_opt, compiled=False)
WAYS["ours, compiled, torch's"] = partial(Ours, make=torch_opt, compiled=True)
WAYS["ours, remainders, flat"] = partial(Ours, make=torch_opt, compiled=False, cut=True)
WAYS["ours, remainders, compiled"] = partial(Ours, make=torch_opt, compiled=True, cut=True)
WAYS["ours, plain loop"] = partial(OursPlain, compiled=True)


# measuring


def _tensors(value: object) -> list[Tensor]:
    """List the tensors in nested dicts."""
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else ()
    return [t for v in inside for t in _tensors(v)]


def n_bytes(tensors: list[Tensor]) -> int:
    """Count the bytes of the memory that `tensors` lie in, each once."""
    storages = (t.untyped_storage() for t in tensors)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def count_calls(step: Callable[[], None], again: Callable[[], None]) -> dict[str, int]:
    """Count what a step asks PyTorch for, and how often it waits for a number from a device.

    `again` prepares a second step: on CUDA that one is run with PyTorch's warnings of waits.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events = [e for e in profiler.events() if e.name.startswith("aten::")]
    asked = [
        e for e in events if e.cpu_parent is None or not e.cpu_parent.name.startswith("aten::")
    ]
    reads = sum(e.name == "aten::_local_scalar_dense" for e in events)
    if DEVICE == "cuda":
        again()
        reads = count_waits(step)
    return {"calls": len(asked), "reads": reads}


def count_waits(step: Callable[[], None]) -> int:
    """Count PyTorch's warnings that the host waits for a CUDA device."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in seen)


def sync() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    """Append the milliseconds that the block takes."""
    sync()
    start = time.perf_counter()
    yield
    sync()
    into.append(1e3 * (time.perf_counter() - start))


class Bandwidth:
    """Copy a large array: what the memory gives, in the same minute."""

    def __init__(self):
        self.times = []
        self.source = torch.ones(2**26, device=DEVICE)
        self.target = torch.zeros(2**26, device=DEVICE)

    def measure(self) -> None:
        """Copy once."""
        with timed(self.times):
            self.target.copy_(self.source)

    @property
    def gb_per_s(self) -> float:
        """Bytes read and written: the median, as for the ways that it took turns with."""
        return 2 * self.source.nbytes / median(self.times) / 1e6


class Run:
    """One way with its parameters, and what was measured of it."""

    def __init__(self, name: str, shapes: list[tuple], opt: str, dtype: torch.dtype):
        self.name, self.times, self.first = name, [], []
        self.model = Params(shapes, dtype)
        self.way = WAYS[name](self.model, opt, dtype)
        self.params = list(self.model.parameters())

    def backward(self, grads: list[Tensor]) -> None:
        """Leave gradients as a backward pass would: 16 bits, unless they are asked for in 32."""
        getattr(self.way, "before", lambda: None)()
        for p, g in zip(self.params, grads, strict=True):
            g = g.to(p.grad_dtype or p.dtype, copy=True) if hasattr(p, "grad_dtype") else g.clone()
            if p.grad is None:
                p.grad = g
            else:
                p.grad += g
        if hasattr(self.way, "after"):
            self.way.after(self.params)

    def step(self, grads: list[Tensor], into: list[float]) -> None:
        """Time a step."""
        self.backward(grads)
        with timed(into):
            self.way.step()

    def count(self, grads: list[Tensor]) -> dict:
        """Count a step's operations and reads."""
        self.backward(grads)
        return count_calls(self.way.step, lambda: self.backward(grads))


def limit_bytes(opt: str, dtype: torch.dtype) -> int:
    """Count the fewest bytes a step can move for each parameter."""
    return {"sgd": 20, "adam": 28}[opt] + (2 if dtype == torch.float16 else 0)


def payback(run: Run, each: Run | None) -> int | str | None:
    """Count the steps until one of our ways has caught up with `each`, if it ever does."""
    if each is None or run is each or not run.name.startswith("ours"):
        return None
    gain = median(each.times) - median(run.times)
    behind = _beyond(run) - _beyond(each)
    if behind < median(each.times):  # less than a step: no waiting
        return 0
    return math.ceil(behind / gain) if gain > 0 else "never"


def _beyond(run: Run) -> float:
    """Add up what the first steps took beyond as many later ones, ms."""
    return sum(run.first) - len(run.first) * median(run.times)


@contextmanager
def empty_cache() -> Iterator[None]:
    """Have PyTorch's compiler find nothing that was compiled before."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        yield
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
    if before is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def bench(shape: str, opt: str, dtype: str, ways: list[str], repeats: int) -> list[dict]:
    """Have all ways take turns, and return a row for each."""
    shapes, kind = SHAPES[shape](), DTYPES[dtype]
    n = sum(torch.Size(s).numel() for s in shapes)
    grads = [(torch.randn(s, device=DEVICE) * 2.0**-4).to(kind) for s in shapes]
    bandwidth, runs = Bandwidth(), [Run(name, shapes, opt, kind) for name in ways]
    for run in runs:
        run.step(grads, run.first)
        for _ in range(2):  # what is compiled for other sizes, and what grows into its memory
            run.step(grads, run.first)
    for _ in range(repeats):
        for run in runs:
            bandwidth.measure()
            run.step(grads, run.times)
    each = next((run for run in runs if run.name == "ours, each"), None)
    best = limit_bytes(opt, kind) * n / bandwidth.gb_per_s / 1e6
    rows = []
    for run in runs:
        ms = median(run.times)
        row = {"shape": shape, "opt": opt, "dtype": dtype, "way": run.name, "params": n, "ms": ms}
        row |= {
            "low": min(run.times),
            "high": max(run.times),
            "ns": 1e6 * ms / n,
            "share": best / ms,
        }
        row |= {"ratio": median(runs[0].times) / ms, "first": max(run.first)}
        row |= {
            "payback": payback(run, each),
            "bytes": n_bytes(run.way.held()) / n,
            "gb_per_s": bandwidth.gb_per_s,
            **run.count(grads),
        }
        rows.append(row)
    del runs
    gc.collect()
    return rows


def show(rows: list[dict]) -> None:
    """Print the table of one run."""
    one = rows[0]
    print(f"\n{one['shape']}, {one['params'] / 1e6:.1f} million parameters, {one['opt']}, "
          f"{one['dtype']}; copies at {one['gb_per_s']:.0f} GB/s")  # fmt: skip
    head = f"{'':26}{'ms':>8}{'spread':>15}{'ratio':>8}{'ns/param':>10}{'share':>7}"
    print(head + f"{'bytes':>7}{'calls':>8}{'reads':>7}{'first':>9}{'payback':>9}")
    for r in rows:
        print(f"{r['way']:26}{r['ms']:8.2f}{r['low']:8.1f} -{r['high']:5.0f}{r['ratio']:8.2f}"
              f"{r['ns']:10.2f}{r['share']:7.0%}{r['bytes']:7.1f}{r['calls']:8}{r['reads']:7}"
              f"{r['first']:7.0f} ms{'' if r['payback'] is None else r['payback']:>9}")  # fmt: skip


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--opts", nargs="+", choices=["sgd", "adam"], default=["sgd", "adam"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=4, help="timed steps of each way")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    args = parser.parse_args()
    print(", ".join(f"{k} {v}" for k, v in about().items()))
    rows = []
    with empty_cache():
        for shape, opt, dtype in product(args.shapes, args.opts, args.dtypes):
            rows += bench(shape, opt, dtype, args.ways, args.repeats)
            show(rows[-len(args.ways) :])
            if args.out:  # after each table: a long run may be broken off
                write_rows(args.out, rows)


def about() -> dict:
    """Say when and on what a table was measured."""
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else cpu_name()
    found = {"date": date.today().isoformat(), "device": name, "threads": torch.get_num_threads()}
    if DEVICE == "cpu":
        found["instructions"] = torch.backends.cpu.get_cpu_capability()
    return found | {"torch": torch.__version__, "python": platform.python_version()}


def write_rows(path: Path, rows: list[dict], **other: str) -> None:
    """Write `rows` to a JSON file, with when and on what they were measured; `other` adds to it."""
    path.write_text(json.dumps({"about": about() | other, "rows": rows}, indent=1) + "\n")


def cpu_name() -> str:
    """Name the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
