"""Tiny learners for the tests of the fastai callback: seeded, silent, quick."""

import copy
import os
from functools import partial

import fastai.callback.schedule  # noqa: F401, gives Learner fit_one_cycle, fine_tune, lr_find
import torch
from fastai.basics import Callback, DataLoaders, Learner, noop, params
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import SGD, Adam, Lamb, Larc, OptimWrapper, QHAdam, RAdam, RMSProp, ranger
from nets import DEVICE, Scale
from torch import nn

torch.set_num_threads(1)  # these tensors are tiny: a second thread would only wait


def torch_optimizer(cls, **kwargs):
    """Return fastai's wrapper of the optimizer `cls` of torch.optim."""
    return partial(OptimWrapper, opt=partial(cls, **kwargs))


ELEMENTWISE = {
    "sgd": partial(SGD, mom=0.9),
    "adam": Adam,
    "rmsprop": partial(RMSProp, mom=0.9),
    "radam": RAdam,
    "qhadam": QHAdam,
    "ranger": partial(ranger, k=3),
    "torch_sgd": torch_optimizer(torch.optim.SGD, momentum=0.9),
    "torch_adamw": torch_optimizer(torch.optim.AdamW),
    "torch_rmsprop": torch_optimizer(torch.optim.RMSprop, momentum=0.9, alpha=0.9),
}
OPTIMIZERS = ELEMENTWISE | {
    "larc": Larc,
    "lars": partial(Larc, clip=False),
    "lamb": Lamb,
    "sgd_l2": partial(SGD, mom=0.9, decouple_wd=False),  # writes into gradients
}


def conv_net(dropout=0.0):
    """Return convolutions and norms, with a parameter of no dimension in between."""
    first = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), Scale()
    second = nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.LeakyReLU()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(4, 2)
    return nn.Sequential(*first, *second, *head)


dropout_net = partial(conv_net, 0.25)


class Sometimes(nn.Module):
    """A convolution net with a layer that only every third batch uses, and one that none does."""

    def __init__(self):
        super().__init__()
        self.body, self.head = conv_net()[:-1], nn.Linear(4, 2)
        self.sometimes, self.never = nn.Linear(4, 4), nn.Linear(4, 4)
        self.count = 0

    def forward(self, x):
        x = self.body(x)
        self.count += self.training
        return self.head(x + self.sometimes(x) if self.count % 3 == 2 else x)


def one_group(model):
    """Return all parameters as one group, as fastai does without a splitter."""
    return list(model.parameters())


def three_groups(model):
    return [params(model[:2]), params(model[2:6]), params(model[6:])]


def images(n, seed=0):
    """Return `n` noisy images of two classes and their labels."""
    noise = torch.randn(n, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    y = torch.arange(n) % 2
    return noise + y.view(n, 1, 1, 1) - 0.5, y


def make_dls(*tensors, n_valid=8, bs=8, n_inp=None, shuffle=False):
    """Return `DataLoaders` over the rows of `tensors`, the last `n_valid` for validation."""
    rows = list(zip(*tensors, strict=True))
    sets, how = (rows[:-n_valid], rows[-n_valid:]), dict(bs=bs, shuffle=shuffle, num_workers=0)
    dls = DataLoaders.from_dsets(*sets, **how, device=DEVICE)
    if n_inp is not None:
        dls.n_inp = n_inp
    return dls


def be_distributed(rank, n=2):
    """Be one of `n` processes for fastai, as its launcher would tell."""
    from fastai.distributed import DistributedDL  # which needs accelerate

    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n))
    os.environ |= dict(MASTER_ADDR="localhost", MASTER_PORT="0", ACCELERATE_USE_CPU="1")
    DistributedDL._broadcast = _broadcast


def _broadcast(self, t, rank):
    """Do what fastai's does, which needs a GPU."""
    t = torch.tensor(t)
    torch.distributed.broadcast(t, rank)
    return t.tolist()


def image_dls(n=32, **kwargs):
    """Return `DataLoaders` of `n` training images in batches of 8."""
    return make_dls(*images(n + 8), **kwargs)


def silent(learn):
    """Return `learn` without its progress bar and its printed lines."""
    learn.logger = noop
    if hasattr(learn, "progress"):
        learn.remove_cb(learn.progress)
    return learn


def make_learner(opt="sgd", model=conv_net, splitter=one_group, dls=None, seed=1, lr=0.05, **how):
    """Return a silent learner whose weights follow from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = model if isinstance(model, nn.Module) else model()
    dls, opt = image_dls() if dls is None else dls, OPTIMIZERS[opt] if isinstance(opt, str) else opt
    return silent(Learner(dls, net, CrossEntropyLossFlat(), opt, lr, splitter, **how))


class Do(Callback):
    """Call `f(learn)` at `event` of training, on batch `at` of every fit (None: each time)."""

    def __init__(self, event, f, at=None, order=60, training=True):
        self.event, self.f, self.at, self.order, self.only_training = event, f, at, order, training

    def __call__(self, event_name):
        if event_name == "before_fit":
            self.count = -1
        in_training = self.learn.training or event_name in ("before_fit", "after_fit")
        if event_name == "before_batch" and self.learn.training:
            self.count += 1
        if event_name == self.event and (in_training or not self.only_training):
            if self.at is None or self.count == self.at:
                self.f(self.learn)


def plain(o):
    """Return `o` with fastai's lists and wrappers as plain lists and dicts, its tensors cloned.

    Step counts are on the host: PyTorch leaves them where they were created or loaded.
    """
    if isinstance(o, torch.Tensor):
        return o.detach().as_subclass(torch.Tensor).clone()
    if isinstance(o, dict):
        return {k: plain(v.cpu() if _is_count(k, v) else v) for k, v in o.items()}
    if isinstance(o, str | bytes) or o is None or not hasattr(o, "__iter__"):
        return copy.copy(o)
    return [plain(v) for v in o]


def _is_count(name, value):
    counts = ("step", "mu_product", "eta", "mu")
    return name in counts and isinstance(value, torch.Tensor) and value.ndim == 0


def weights(learn):
    """Return a copy of the model's state: weights and buffers, 32-bit."""
    return plain(dict(learn.model.state_dict()))


def opt_state(learn):
    """Return a copy of the optimizer's state, per model parameter, and its hyper-parameters."""
    if learn.opt is None:
        return None
    state = plain(learn.opt.state_dict())
    state.pop("loss_scale", None)  # of a precision
    return state


def bits(learn):
    """Return copies of weights, buffers and optimizer state, without touching a thing."""
    model = {k: v.detach().clone() for k, v in learn.model.named_parameters()}
    model |= {k: v.detach().clone() for k, v in learn.model.named_buffers()}
    return {"model": model, "opt": opt_state(learn)}
