"""What a step costs on a GPU, as far as it can be counted: launches, waits of the host, copies."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from simulated_cuda.device import Counts, counts

N_STEPS = 6  # the last one is counted: the first may do what none does again


class Cost(NamedTuple):
    """What has happened in the last step of a short fit."""

    after_backward: Counts  # from there to the end of the step
    whole: Counts  # from one step's end to the next one's


def net(width: int = 32, n_layers: int = 2) -> nn.Module:
    """Return layers on the GPU, each with a weight, a bias and a norm."""
    layers: list[nn.Module] = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for i in range(n_layers):
            layers += [nn.Linear(12 if i == 0 else width, width), nn.LayerNorm(width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, 2)).cuda()


def batch(i: int, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pictures, times `factor`, and the labels of step `i`, on the GPU already."""
    rng = torch.Generator().manual_seed(i)
    x = torch.randn(16, 12, generator=rng) * factor
    return x.cuda(), torch.randint(0, 2, (16,), generator=rng).cuda()


def by_hand(
    make_opt: Callable[[list], Any],
    dtype: torch.dtype | None,  # of masters' model; None: plain PyTorch in float32
    flat: bool = False,
    n_batches: int = 1,  # a step
    clip: float | None = None,
    skips: bool = False,  # the last step overflows
    model: nn.Module | None = None,
    reads_verdict: bool = True,
) -> Cost:
    """Count the last of a few steps of a plain loop."""
    model = net() if model is None else model
    opt = make_opt(list(model.parameters()))
    if dtype is not None:
        model, opt = with_masters(model, opt, dtype=dtype, flat_master=flat)
    scaler = LossScaler("cuda", init_scale=2.0**10, enabled=dtype == torch.float16)
    end = middle = begin = counts()
    for i in range(N_STEPS):
        begin = end
        for k in range(n_batches):
            last = i == N_STEPS - 1
            x, y = batch(n_batches * i + k)
            loss = nn.functional.cross_entropy(model(x), y)
            if skips and last:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        middle = counts()
        if clip is not None:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        end = counts()
    return Cost(end - middle, end - begin)


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
}


def in_a_learner(
    opt_func: Any,  # of fastai, or its wrapper of one of torch's
    dtype: torch.dtype | None,  # None: plain fastai in float32
    flat: bool = False,
    cbs: Any = (),
    skips: bool = False,
    model: nn.Module | None = None,
    **kwargs,  # for to_fp16
) -> Cost:
    """Count the last batch of a short fit of a Learner; its Recorder waits for the loss, too."""
    import tiny  # needs fastai

    x, y = torch.randn(8 * N_STEPS + 8, 12), torch.arange(8 * N_STEPS + 8) % 2
    dls = tiny.make_dls(x, y)
    dls.device = torch.device("cuda")
    learn = tiny.make_learner(opt_func, model=net() if model is None else model, dls=dls, lr=0.01)
    if dtype is not None:
        method = learn.to_fp16 if dtype == torch.float16 else learn.to_bf16
        method(flat_master=flat, **kwargs)
    loss_func, begins, middles = learn.loss_func, [], []

    # No callback counts: gradients are made true for who may look at them. A batch is made when the
    # one before is done.
    def begin(items):
        begins.append(counts())
        return items

    def loss_of(pred, y):
        if pred.requires_grad:
            engine = torch.autograd.Variable._execution_engine
            at_end = partial(engine.queue_callback, lambda: middles.append(counts()))
            pred.register_hook(lambda grad: at_end())
        loss = loss_func(pred, y)
        return loss * float("inf") if skips and len(middles) == N_STEPS - 2 else loss

    learn.loss_func, dls.train.before_batch = loss_of, begin
    learn.fit(1, cbs=cbs)
    # the last batch but one: what comes after the last is an epoch's end
    return Cost(begins[-1] - middles[-2], begins[-1] - begins[-2])
