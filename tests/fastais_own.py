"""fastai's own two ways of mixed precision, made to run on a CPU: what ours is held against.

fastai ties both to CUDA. Here nothing of them is changed but the name of the device, so that a test
can show what they do to the bits.
"""

from functools import partial

import torch
from fastai.callback import fp16
from fastai.callback.fp16 import ModelToHalf, NonNativeMixedPrecision
from fastai.learner import Learner
from fastai.torch_core import params
from torch import nn


class AutocastOnCpu(fp16.MixedPrecision):
    """fastai's `to_fp16` and `to_bf16`: autocast and a `GradScaler`, both for the CPU."""

    def before_fit(self):
        with _named(fp16, autocast=_for_cpu(torch.autocast), GradScaler=_for_cpu(fp16.GradScaler)):
            super().before_fit()


class MastersOnCpu(NonNativeMixedPrecision):
    """fastai's `to_non_native_fp16`: a half model, float32 masters, a loss scale."""

    def before_fit(self):
        with _named(self.dls, device=torch.device("cuda")):
            super().before_fit()


def _for_cpu(cls):
    return lambda device, **kwargs: cls("cpu", **kwargs)


class _named:
    """Give attributes of `o` other values while this is entered."""

    def __init__(self, o, **values):
        self.o, self.values = o, values

    def __enter__(self):
        self.before = {k: getattr(self.o, k) for k in self.values}
        self._set(self.values)

    def __exit__(self, *_):
        self._set(self.before)

    def _set(self, values):
        for k, v in values.items():
            setattr(self.o, k, v)


def autocast(learn: Learner, **kwargs) -> Learner:
    """Put `learn` into fastai's autocast mixed precision."""
    return learn.add_cb(AutocastOnCpu(**kwargs))


def masters(learn: Learner, **kwargs) -> Learner:
    """Put `learn` into fastai's mixed precision with masters."""
    return learn.add_cbs([ModelToHalf(), MastersOnCpu(**kwargs)])


flat_masters = partial(masters, flat_master=True)

# What they can train


def net():
    """Return a convolution, a norm and a layer; fastai's masters take no parameter of no dim."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 2),
    )  # fmt: skip


def two_groups(model):
    """Split `net` into body and head."""
    return [params(model[:3]), params(model[3:])]
