"""Bytes a parameter: a model of 20 M parameters takes what the tables name, and 8 MiB at most.

Live tensors are counted, not resident pages, from before the model is made to the end of the second
step. The 8 MiB are scratch memory: as much for every size of model, because chunks are of one size.
"""

import gc
import weakref

import pytest
import tiny
import torch
from fastai.basics import Learner
from fastai.optimizer import Adam
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mixedfp.callback  # noqa: F401, puts `to_bf16` on Learners
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler

# products that are computed in float32 keep float32 operands: this would depend on the CPU
FP16, BF16 = dict(dtype="fp16", native=True), dict(dtype="bf16", native=True)
FLAT = dict(flat_master=True)
HALF = FLAT | dict(half_grads=True)
STATES = "exp_avg exp_avg_sq grad_avg sqr_avg".split()  # of PyTorch's AdamW, of fastai's Adam
NARROW = dict(state_dtype=dict.fromkeys(STATES, torch.bfloat16))
BYTES = {  # weights + gradients + states; and the 16-bit copies, in a pass
    "float32": (dict(dtype="fp32"), 4 + 4 + 8, 0),
    "bfloat16": (BF16, 4 + 4 + 8, 2),
    "flat": (BF16 | FLAT, 4 + 4 + 8, 2),
    "half gradients": (BF16 | HALF, 4 + 2 + 8, 2),
    "half gradients, 16-bit states": (BF16 | HALF | NARROW, 4 + 2 + 4, 2),
    "float16": (FP16, 4 + 4 + 8, 2),
    "float16, half gradients": (FP16 | HALF, 4 + 2 + 8, 2),
}
EACH_MODE = pytest.mark.parametrize("mode", BYTES)


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside of the block hold at once."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self._add(t.untyped_storage())
        return out

    def _add(self, storage):
        key = storage._cdata
        if key not in self.known:
            self.known[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._remove, key)

    def _remove(self, key):
        self.now -= self.known.pop(key)


def make_model():
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(76)))


def assert_is_documented(peak, n_bytes):
    documented = n_bytes * 76 * 512 * 512
    assert documented <= peak.most < documented + 2**23


@pytest.fixture(autouse=True)
def nothing_left():
    gc.collect()


@EACH_MODE
def test_a_loop_takes_the_bytes_a_parameter_that_the_table_names(mode):
    """The copies go as the gradients come, and are not there in the step."""
    settings, n_bytes, _ = BYTES[mode]
    scaler = LossScaler(enabled=settings["dtype"] == "fp16")
    with Peak() as peak:
        model = make_model()
        opt = torch.optim.AdamW(model.parameters(), foreach=False)
        if mode != "float32":
            with_masters(model, opt, **settings)
        for _ in range(2):
            scaler.scale(model(torch.ones(2, 512)).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert_is_documented(peak, n_bytes)


@EACH_MODE
def test_a_fit_takes_the_bytes_a_parameter_that_the_table_names(mode):
    """fastai keeps zeroed gradients in the next pass, beside the copies."""
    settings, n_bytes, n_copies = dict(BYTES[mode][0]), *BYTES[mode][1:]
    to = f"to_{settings.pop('dtype')}"
    dls = tiny.make_dls(torch.ones(6, 512), torch.zeros(6, 512), n_valid=2, bs=2)
    with Peak() as peak:
        learn = Learner(dls, make_model(), nn.MSELoss(), opt_func=Adam)
        getattr(learn, to)(**settings)
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
    assert_is_documented(peak, n_bytes + n_copies)
