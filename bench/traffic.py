"""Counts launches, waits, bytes and peak memory of a training step, without a GPU.

    python bench/traffic.py --out bench/results/traffic.json    # 2 minutes

PyTorch's CUDA code runs on a simulated runtime (`tests/simulated_cuda`), which counts the kernels
it launches; no kernel computes anything. Products, convolutions and attention are in libraries that
need a real driver: they are counted by name (`products`) and are the same in all modes. Bytes are
those of the operands and results of every operation that reads or writes, including products; the
peak is that of the memory allocated by PyTorch. The third step is counted, from the forward pass to
its end, with fused AdamW.
"""

import contextlib
import gc
import sys
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests")]

from simulated_cuda import device  # noqa: E402
from simulated_cuda.device import tensors  # noqa: E402

# isort: split
import torch  # noqa: E402
from common import FLAT, HALF, options, table, write  # noqa: E402
from networks import LM, ViT, images, loss_of, words  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

from mixedfp.optimizer import with_masters  # noqa: E402

B16 = torch.bfloat16
STATES = dict(state_dtype={"exp_avg": B16, "exp_avg_sq": B16})
MODES: dict[str, dict | None] = {  # settings of the masters; None: no masters
    "autocast": None,
    "a master each": {},
    "flat": FLAT,
    "flat, half gradients": HALF,
    "flat, half gradients, 16-bit states": HALF | STATES,
}


def resnet() -> nn.Module:
    """Build torchvision's ResNet-50."""
    from torchvision import models

    return models.resnet50()


MODELS = {
    "lm": (LM, partial(words, 16, 256, 8000)),
    "vit": (partial(ViT, 12, 384, 6, 224, 16, 1000), partial(images, 32, 224, 1000)),
    "resnet": (resnet, partial(images, 32, 224, 1000)),
}

# in cuBLAS, cuDNN and the attention libraries
PRODUCTS = frozenset(
    """mm addmm bmm baddbmm convolution convolution_backward _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_backward""".split()
)
BY_SHAPE = PRODUCTS | {"embedding_dense_backward"}  # its kernels wait for a sorting library


class Traffic(TorchDispatchMode):
    """Counts the products and the bytes moved by the operations inside it."""

    def __init__(self):
        super().__init__()
        self.products, self.moved = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run `func`, or return uninitialized memory as its result."""
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        out = _empty_result(func, args, kwargs) if name in BY_SHAPE else func(*args, **kwargs)
        operands, results = tensors((args, kwargs)), tensors(out)
        if any(t.is_cuda for t in operands):  # the host reads zeros: no step is skipped
            out = 0.0 if isinstance(out, float) else out
            for t in results:
                if not t.is_cuda:
                    t.zero_()
        self.products += name in PRODUCTS
        there = {t.untyped_storage()._cdata for t in operands}
        is_view = results and all(t.untyped_storage()._cdata in there for t in results)
        is_empty = func.overloadpacket.__name__.startswith("empty")  # nothing is written yet
        if func._schema.is_mutable or not (is_view or is_empty):
            self.moved += sum(t.numel() * t.itemsize for t in (*operands, *results))
        return out


class Kernels(Traffic):
    """Lists the operations that launch a kernel or call a library: casts, products, others."""

    def __init__(self):
        super().__init__()
        self.kinds: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run `func`, and note its kind."""
        before, n = device.counts(), self.products
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.products > n:
            self.kinds.append("product")
        elif (device.counts() - before).launches:
            dtypes = {t.dtype for t in (*tensors(args), *tensors(out))}
            is_cast = "copy" in func._schema.name and len(dtypes) > 1
            self.kinds.append("cast" if is_cast else "other")
        return out


def _empty_result(func, args, kwargs):
    """Return memory for the result of `func`; PyTorch infers its shape on the meta device."""
    there = next(t.device for t in tensors(args) if t.is_cuda)
    args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))

    def made(t):
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=there)

    return tree_map_only(Tensor, made, func(*args, **kwargs))


def make(name: str, mode: str) -> tuple[nn.Module, Any, tuple, Tensor]:
    """Return a model on the simulated GPU, its optimizer, and a batch of inputs and targets."""
    torch.manual_seed(0)
    build, batch = MODELS[name]
    model = build().cuda()
    opt: Any = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    how = MODES[mode]
    if how is not None:
        model, opt = with_masters(model, opt, dtype=B16, **how)
    inputs, y = batch()
    return model, opt, tuple(x.cuda() for x in inputs), y.cuda()


@contextlib.contextmanager
def flash_attention():
    """Allow the attention that a real GPU would choose."""
    before = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(before)


def count(name: str, mode: str) -> dict:
    """Count the third step of a model in a mode, with bytes in MB and the peak in MiB."""
    gc.collect()
    seen, held = Traffic(), device.allocated()
    with flash_attention(), seen:
        model, opt, inputs, y = make(name, mode)
        for _ in range(3):
            seen.products = seen.moved = 0
            device.allocated(forget_peak=True)
            at = [device.counts()]
            with torch.autocast("cuda", B16, enabled=MODES[mode] is None):
                pred = model(*inputs)
            at.append(device.counts())
            loss_of(pred, y).backward()
            at.append(device.counts())
            opt.step()
            at.append(device.counts())
            peak = device.allocated().peak - held.now
            opt.zero_grad()
            del pred
    parts = [(b - a).launches for a, b in zip(at, at[1:], strict=False)]
    row = dict(model=name, mode=mode, parameters=sum(p.numel() for p in model.parameters()))
    row |= dict(zip(("forward", "backward", "step"), parts, strict=True))
    row |= dict(launches=sum(parts), waits=(at[-1] - at[0]).waits, products=seen.products)
    return row | dict(moved_mb=round(seen.moved / 1e6), peak_mib=round(peak / 2**20, 1))


BLOCKS = "autocast", "16-bit weights under autocast", "mixedfp"


def block(mode: str) -> dict[str, str]:
    """List the kinds of the kernels of one transformer block, forward and backward."""
    seen = Kernels()
    with flash_attention(), seen:
        model, (x, y) = LM(n_layers=3).cuda(), words(16, 256, 8000)
        if mode == "mixedfp":
            opt = torch.optim.AdamW(model.parameters(), fused=True)
            with_masters(model, opt, dtype=B16)
        if mode == BLOCKS[1]:  # by hand, with gradients that are widened one by one
            for p in model.to(B16).parameters():
                p.grad_dtype = torch.float32
        found, middle = {}, model.blocks[1]

        def begin(module, inputs):
            seen.kinds = []
            inputs[0].register_hook(lambda grad: found.update(backward=" ".join(seen.kinds)))

        def end(module, inputs, output):
            found["forward"] = " ".join(seen.kinds)
            output.register_hook(lambda grad: setattr(seen, "kinds", []))

        middle.register_forward_pre_hook(begin)
        middle.register_forward_hook(end)
        with torch.autocast("cuda", B16, enabled="autocast" in mode):
            pred = model(x[0].cuda())
        loss_of(pred, y.cuda()).backward()
    return found


def main() -> None:
    """Count all models in all modes, and write the rows."""
    args = options(__doc__, models=list(MODELS))
    rows = [count(name, mode) for name in args.models for mode in MODES]
    table(rows, " ".join(rows[0]))
    blocks = {mode: block(mode) for mode in BLOCKS}
    about = dict(date=date.today().isoformat(), torch=torch.__version__)
    write(args.out, dict(about=about, block=blocks, rows=rows))


if __name__ == "__main__":
    main()
