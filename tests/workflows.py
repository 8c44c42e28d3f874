"""Ways of working: each function is one, its name says which. Laws hold for all of them.

A function of `run` is given a `Loop` of tests/laws.py and calls its verbs, one of `learn` a fastai
`Learner`. Plain training, masters and masters kept by hand (`BY_HAND`) go through the same lines.
"""

import copy
import io
from contextlib import suppress
from functools import partial
from inspect import signature

import fastai.callback.schedule  # noqa: F401, gives Learner fit_one_cycle, fine_tune, lr_find
import torch
from fastai.basics import Learner, params
from fastai.callback import core
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.optimizer import Adam
from nets import DEVICE
from tiny import Do, opt_state, torch_optimizer, weights
from torch import nn

from mixedfp.testing import assert_same


def through_a_file(state):
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


def iterating(run):
    run.iterate(5)


def scaling_the_loss(run):
    run.scale_by(2.0**10)
    run.iterate(4)


def clipping(run):
    run.scale_by(2.0**4)
    for i in range(4):
        run.backward(i)
        run.unscale()
        if i % 2:
            run.see(nn.utils.clip_grad_norm_(run.params, 0.1))
        else:
            nn.utils.clip_grad_value_(run.params, 0.01)
        run.step()
        run.opt.zero_grad()


def accumulating(run):
    for i in range(9):
        run.backward(i)
        if i % 3 == 2:
            run.step()
            run.opt.zero_grad(set_to_none=i == 2)


def freezing(run):
    run.iterate(2)
    run.train_only("head")
    run.iterate(2)
    run.train_only("stem", "layers", "head")
    run.opt.zero_grad()
    run.iterate(2)


def setting_rates(run):
    run.iterate(2)
    for i, group in enumerate(run.opt.param_groups):
        group["lr"] = group["lr"] / (2 + i)
    run.iterate(2)


def scheduling_one_cycle(run):
    cycles = any(k in run.opt.defaults for k in ("momentum", "betas"))
    make = torch.optim.lr_scheduler.OneCycleLR
    schedule = make(run.opt, 0.1, total_steps=20, cycle_momentum=cycles)
    for i in range(5):
        run.iterate(1, i)
        schedule.step()
    run.see([dict(g, params=None) for g in run.opt.param_groups])


def adding_a_group(run):
    new = run.leave_out("layers")
    run.iterate(2)
    if new:
        run.opt.add_param_group({"params": new, "lr": 0.03125})
    run.iterate(3)


def stepping_twice_without_gradients_and_with_a_closure(run):
    run.opt.zero_grad()
    run.opt.step()
    run.backward(0)
    run.opt.step()
    run.opt.step()
    run.opt.zero_grad()
    run.opt.step()
    run.iterate(1)

    def closure():
        run.opt.zero_grad()
        loss = run.loss(1)
        loss.backward()
        return loss

    for _ in range(3):
        run.see(run.opt.step(closure))
    run.iterate(1)


def writing_weights(run):
    run.iterate(2)
    with torch.no_grad():
        run.params[0].mul_(0.5)
        run.params[-1].fill_(0.25)
    run.iterate(1)
    run.model.head.weight.data = run.model.head.weight.data * 0.5
    nn.init.eye_(run.model.head.weight)
    vector = nn.utils.parameters_to_vector(run.model.head.parameters())
    nn.utils.vector_to_parameters(vector / 2, run.model.head.parameters())
    run.iterate(2)
    run.opt.zero_grad()
    run.backward(9)
    run.model.head.weight.data = run.model.head.weight.data * 0.5  # between backward and step
    run.step()


def editing_gradients(run):
    for i in range(4):
        run.opt.zero_grad()
        run.backward(i)
        p, q = run.model.head.parameters()
        if i == 0:
            p.grad = None
            q.grad = torch.zeros_like(q, dtype=torch.float32)
        elif i == 1:
            p.grad.mul_(0.5)
            q.grad = q.grad * 0.5
        elif i == 2:
            p.grad.data = p.grad.data * 0.5
        run.step()


def hooking_the_step(run):
    def halve(opt, *_):
        for group in opt.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)

    before = run.opt.register_step_pre_hook(halve)
    after = run.opt.register_step_post_hook(lambda *_: run.see("stepped"))
    run.iterate(2)
    before.remove(), after.remove()
    run.iterate(1)


def looking_at_everything(run):
    for i in range(3):
        run.backward(i)
        run.look()
        run.step()
        run.look()
        with torch.no_grad():
            run.model.eval()
            run.loss(50)
            run.model.train()
        run.opt.zero_grad()


def going_back_to_a_file_and_through_float32(run):
    run.iterate(2)
    state = through_a_file(run.state())
    run.iterate(2)
    run.load(state)
    run.iterate(2)
    run.there_and_back()
    run.iterate(2)


def interrupting_passes_and_reloading_before_the_step(run):
    run.iterate(1)
    run.backward(1)
    run.load(copy.deepcopy(run.state()))
    run.step()
    run.opt.zero_grad()
    head = run.model.head
    for register in (head.register_forward_pre_hook, head.register_full_backward_pre_hook):
        hook = register(partial(_raise, KeyboardInterrupt))
        with suppress(KeyboardInterrupt):
            run.backward(1)
        hook.remove()
        run.iterate(1)


def _raise(error, *_):
    raise error


def penalizing_gradients(run):
    for i in range(3):
        run.opt.zero_grad()
        loss = run.loss(i)
        (g,) = torch.autograd.grad(loss, [run.model.head.weight], create_graph=True)
        (loss + g.float().square().sum()).backward()
        run.step()


# fastai: lr 0.1 and a weight decay that cannot be overlooked

LOADED_IN = ["before_fit", "before_train", "before_batch", "after_backward", "before_step"]
LOADED_IN += ["after_step", "after_batch", "before_validate", "after_epoch"]
CANCELLED = [
    *("before_step Step", "before_step Batch", "after_backward Batch", "after_loss Batch"),
    *("after_pred Batch", "after_step Batch", "before_step Train", "after_step Epoch"),
    "before_batch Fit",
]
SEARCH = {"num_it": 4, "show_plot": False, "suggest_funcs": None}


def fitting_and_fine_tuning(learn):
    learn.fit(1, 0.05, wd=0.5)
    learn.fit_one_cycle(1, slice(0.01, 0.1), wd=0.1)
    learn.fit_flat_cos(1, slice(0.01, 0.05), pct_start=0.25, wd=0.1)
    learn.fit_sgdr(1, 1, 0.05, wd=0.1)
    learn.fine_tune(1, 0.05, freeze_epochs=1, wd=0.5)


def freezing_and_unfreezing(learn):
    learn.freeze_to(-1)
    learn.fit(1, slice(0.1), wd=0.5)
    learn.unfreeze()
    learn.fit_one_cycle(1, slice(0.01, 0.1), wd=0.1)
    learn.freeze_to(-2)
    learn.fit(1, 0.02)
    learn.freeze()
    learn.fit(1, slice(0.01, 0.1), wd=0.5, cbs=Do("before_batch", Learner.unfreeze, at=2))
    learn.fit(1, slice(0.01, 0.1), cbs=Do("after_batch", Learner.freeze, at=1))
    thaw = Do("after_step", Learner.unfreeze, at=2)
    learn.fit(1, 0.05, wd=0.1, cbs=[Do("before_step", Learner.freeze, at=1), thaw])
    learn.fit(1, 0.05)


def finding_a_rate(learn):
    learn.lr_find(**SEARCH)
    learn.fit(1, 0.05, wd=0.5)
    learn.freeze()
    learn.lr_find(**SEARCH, stop_div=False)
    learn.fit(1, 0.05)
    learn.unfreeze()
    learn.lr_find(start_lr=1.0, end_lr=1e15, stop_div=False, **SEARCH | {"num_it": 8})
    torch.manual_seed(0)  # fastai's search goes on: more random numbers, and more batches
    learn.model.count = 0
    learn.fit(1, 0.05, wd=0.1)


def clipping_norms_and_accumulating_batches(learn):
    learn.fit(2, 0.1, wd=0.5, cbs=GradientClip(0.1))
    learn.fit(2, 0.1, wd=0.5, cbs=GradientAccumulation(10))  # two and a half: some are left over
    learn.fit(1, 0.1, cbs=[GradientClip(0.1), GradientAccumulation(8)])


@torch.no_grad()
def _clamp(learn):
    for p in learn.model.head.parameters():
        p.clamp_(-0.0625, 0.0625)  # exact in 16 bits too


def starting_over_and_clamping_weights(learn):
    learn.fit_one_cycle(1, 0.1, wd=0.5)
    learn.fit_one_cycle(1, slice(0.01, 0.05), reset_opt=True)
    learn.create_opt()
    learn.fit(1, 0.05, cbs=Do("after_batch", Learner.create_opt, at=1))
    learn.fit(1, 0.1, wd=0.5, cbs=Do("after_step", _clamp))
    learn.fit(1, 0.1, cbs=Do("after_batch", _clamp, at=1))


def changing_format_and_device(learn):
    learn.fit(1, 0.05, wd=0.5, cbs=ChannelsLast())
    learn.model.to(memory_format=torch.contiguous_format)
    learn.fit(1, 0.05)
    learn.model.to(learn.dls.device).eval()
    learn.dls.to(DEVICE), learn.to(DEVICE)
    learn.fit(1, 0.05)


def exchanging_the_head_and_the_model(learn):
    learn.fit(1, 0.05, wd=0.5)
    learn.model.head = nn.Linear(4, 2)
    learn.create_opt()
    learn.fit(1, 0.05)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        learn.model = learn.model.net.build()
    learn.create_opt()
    learn.fit(1, 0.05)


def saving_and_loading(learn):
    learn.fit(1, 0.05, wd=0.5)
    learn.save("one")
    learn.fit(1, 0.1)
    learn.load("one")
    learn.fit(1, 0.05)
    learn.load("one", with_opt=False)
    learn.fit(1, 0.05)
    learn.fit(2, 0.1, wd=0.5, cbs=SaveModelCallback(fname="best", with_opt=True))
    learn.fit(1, 0.05)
    learn.create_opt()
    learn.freeze()
    learn.fit(1, 0.05)
    learn.save("without moments of what is frozen")
    learn.unfreeze()
    learn.fit(1, 0.05)
    learn.load("without moments of what is frozen")
    learn.fit(1, 0.05)


def loading_in_any_event(learn):
    for event in LOADED_IN:
        learn.fit(1, 0.05, wd=0.1)
        learn.save("one")
        saved = [weights(learn), opt_state(learn)]

        def load(learn, saved=saved):
            learn.load("one")
            assert_same([weights(learn), opt_state(learn)], saved)

        learn.fit(1, 0.02, wd=0.1, cbs=Do(event, load, training=False))


def calling_steps_off_and_interrupting_fits(learn):
    for i, (event, kind) in enumerate(map(str.split, CANCELLED)):
        error = getattr(core, f"Cancel{kind}Exception")
        cancel = Do(event, partial(_raise, error), at=1, order=(5, 60)[i % 2])
        learn.fit(1, 0.05, wd=0.5, cbs=cancel)
    for event, order in (("after_backward", 5), ("before_step", 60), ("after_step", 5)):
        stop = Do(event, partial(_raise, KeyboardInterrupt), at=2, order=order)
        with suppress(KeyboardInterrupt):
            learn.fit(1, 0.05, wd=0.1, cbs=stop)
    learn.fit(1, 0.05)


def validating_inside(learn):
    learn.fit(1, 0.05, wd=0.5)
    learn.get_preds()
    learn.validate()
    predict = partial(Learner.get_preds, inner=True, reorder=False)
    learn.fit(2, 0.05, cbs=Do("after_epoch", predict, training=False))


def setting_hypers_optimizer_and_splitter(learn):
    def set_hypers(learn):
        learn.opt.set_hypers(lr=slice(0.02, 0.08), wd=0.2)
        learn.opt.hypers[0]["lr"] = 0.03

    late = Do("before_step", lambda learn: learn.opt.set_hyper("lr", 0.02), at=2)
    learn.fit(1, 0.03, wd=0.1, cbs=[Do("after_batch", set_hypers, at=0), late])
    learn.opt.set_hypers(lr=slice(0.01, 0.05), wd=0.2)
    learn.fit(1, slice(0.01, 0.05))
    learn.fit(1, 0.05, wd=0.1)
    learn.opt_func = partial(Adam, eps=0.1)  # or it blows rounding up where gradients are small
    learn.fit(1, 0.01, reset_opt=True)
    learn.opt_func, learn.opt = torch_optimizer(torch.optim.AdamW, eps=0.1), None
    learn.splitter = lambda model: [params(model.head), params(model.stem) + params(model.layers)]
    learn.fit(1, slice(0.001, 0.01))


def changing_the_defaults(learn):
    learn.lr, learn.wd, learn.moms = 0.02, 0.3, (0.5, 0.25, 0.5)
    learn.fit_one_cycle(1)
    learn.wd_bn_bias, learn.train_bn = True, False
    learn.create_opt()
    learn.freeze()
    learn.fit(1)


def evaluating_while_training(learn):
    learn.fit(2, 0.05, wd=0.1, cbs=Do("before_batch", lambda learn: learn.model.eval(), at=1))


def training_batch_by_batch(learn):
    learn.fit(1, 0.05, wd=0.1)
    batches = list(learn.dls.train)
    learn.n_epoch, learn.n_iter, learn.dl = 1, len(batches), learn.dls.train
    with learn:
        learn("before_train")
        for i, b in enumerate(batches):
            learn.one_batch(i, b)
    learn.one_batch(0, batches[0])
    learn.fit(1, 0.05)


def _ways(argument):
    """Return this module's functions of `argument`, by their names."""
    ours = [f for f in globals().values() if getattr(f, "__module__", "") == __name__]
    public = [f for f in ours if not f.__name__.startswith("_")]
    return {f.__name__: f for f in public if [*signature(f).parameters] == [argument]}


LOOPS, FITS = _ways("run"), _ways("learn")
BY_HAND = "iterating scaling_the_loss clipping accumulating freezing setting_rates".split()
