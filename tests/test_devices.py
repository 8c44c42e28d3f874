"""Where a model is: moved before, between and after steps, spread over devices, loaded elsewhere.

In 32 bits each program is held against plain PyTorch, or plain fastai, with the same moves; plain
optimizers leave their states behind, so here these are moved by hand. In 16 bits flat masters are
held against one master a parameter. To the bit, on the simulated GPU: `make test-cuda`.
"""

import contextlib
import copy
import logging
import os
import pickle
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import inside
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW

from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.step import MixedStep
from mixedfp.testing import assert_same

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU, or a simulated one"
)
N_GPUS = torch.cuda.device_count()
on_two_gpus = pytest.mark.skipif(N_GPUS < 2, reason="needs two GPUs: see test_on_two_gpus")
FLAT = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
HALF = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
OPTIMIZERS = {
    "sgd": lambda ps: SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda ps: AdamW(ps, lr=0.01),
}
FUSED = {
    "sgd": lambda ps: SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "nesterov": lambda ps: SGD(ps, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adam": lambda ps: Adam(ps, lr=0.01, fused=True),
    "adamw": lambda ps: AdamW(ps, lr=0.01, amsgrad=True, fused=True),
}


class Halves(nn.Module):
    """A net whose halves may be on two devices: a pipeline by hand."""

    def __init__(self, dropout=0.0, softmax=False):
        super().__init__()
        conv = nn.Conv2d(3, 4, 3, bias=False)
        self.first = nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.last = nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
        self.dropout, self.softmax = nn.Dropout(dropout), softmax

    def forward(self, x):
        x = self.first(x.to(self.first[0].weight.device))
        x = self.dropout(self.last(x.to(self.last[0].weight.device)))
        return x.softmax(-1) if self.softmax else x


def net(**kwargs):
    """Return the same net each time, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Halves(**kwargs)


def batch(seed):
    """Return a batch of pictures and labels, on the CPU."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(8, 3, 6, 6, generator=rng), torch.arange(8) % 2


def follow(opt):
    """Move the states of a plain optimizer to where its parameters are."""
    for p, state in opt.state.items():
        for k, v in state.items():
            if isinstance(v, torch.Tensor) and (k != "step" or opt.defaults.get("fused")):
                state[k] = v.to(p.device)


# Trainers: each knows how to do a batch, to unscale, and to step


class Plain:
    """A plain optimizer and a scaler."""

    def __init__(self, opt, model=None):
        self.model, self.scaler = net() if model is None else model, LossScaler(init_scale=2.0**10)
        self.opt, self.n = opt(self.model.parameters()), 0

    def backward(self, factor=1.0):
        x, y = batch(self.n)
        self.n += 1
        out = self.model(x)
        self.scaler.scale(cross_entropy(out.float(), y.to(out.device)) * factor).backward()

    def unscale(self):
        self.scaler.unscale_(self.opt)

    def step(self):
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()

    def has_moved(self):
        follow(self.opt)


class ByHand(Plain):
    """The loop above with masters."""

    def __init__(self, opt, model=None, **kwargs):
        super().__init__(opt, model)
        self.model, self.opt = with_masters(self.model, self.opt, **kwargs)
        self.owner = self.opt

    def has_moved(self):
        pass


class Verbs(ByHand):
    """A `MixedStep`."""

    def __init__(self, opt, model=None, exclusive=False, **kwargs):
        Plain.__init__(self, opt, model)
        self.owner = self.mixed = MixedStep(scaler=self.scaler, **kwargs)
        self.mixed.attach(self.model)
        self.opt, self.exclusive, self.is_finite = (
            self.mixed.wrap_optimizer(self.opt),
            exclusive,
            None,
        )

    def backward(self, factor=1.0):
        inside.be_exclusive(self.mixed, self.exclusive)
        x, y = batch(self.n)
        self.n += 1
        out = self.mixed.uncast(self.model(self.mixed.cast(x, training=True)))
        self.mixed.scale(cross_entropy(out, y.to(out.device)) * factor).backward()

    def unscale(self):
        self.is_finite = self.mixed.unscale()

    def step(self):
        if self.is_finite is None:
            self.unscale()
        self.mixed.step() if self.is_finite else self.mixed.skip()
        self.mixed.update()
        self.is_finite = None
        self.opt.zero_grad(set_to_none=True)


TRAINERS = {
    "each": (ByHand, {}),
    "flat": (ByHand, dict(flat_master=True)),
    "verbs": (Verbs, {}),
    "verbs_flat": (Verbs, dict(flat_master=True)),
    "verbs_deferred": (Verbs, dict(flat_master=True, exclusive=True)),
}
trainer = pytest.mark.parametrize("trainer", TRAINERS)


# Programs: words that are done one after the other; `first>cuda` moves the first half of the model

MOVES = {
    "before": ">cuda batch batch",
    "between": "batch >cuda batch batch >cpu batch >cuda >cpu >cuda batch",
    "accumulating": "batch backward >cuda backward step backward >cpu backward step batch",
    "after backward": "batch backward >cuda step batch backward >cpu step batch",
    "after unscale": "batch backward unscale >cuda step batch backward unscale >cpu step batch",
    "a half": "batch last>cuda batch backward first>cuda backward step last>cpu batch >cpu batch",
    "format": ">cuda batch channels_last batch >cpu batch backward channels_last step batch",
}
SKIPS = {
    "after a skip": "batch bad >cuda batch bad >cpu batch batch",
    "first is bad": ">cuda bad batch backward >cpu backward step",
    "bad and moved": "batch overflow >cuda step batch overflow >cpu step batch",
    "bad, unscaled, moved": "batch overflow unscale >cuda step overflow unscale >cpu step batch",
}
MIXTURES = {
    "cpu and gpu": "first>cpu last>cuda batch backward backward step batch",
    "gpu and cpu": "first>cuda last>cpu batch backward backward step batch",
    "exchanged": "last>cuda batch backward last>cpu first>cuda step batch >cuda batch",
}
BAD_MIXTURES = {
    "cpu and gpu, bad": "last>cuda bad batch overflow unscale step batch bad batch",
    "gpu and cpu, bad": "first>cuda bad batch overflow unscale step batch bad batch",
}
TWO_GPUS = {
    "two_gpus": "first>cuda:0 last>cuda:1 batch backward backward step batch",
    "two_gpus, the other way": "first>cuda:1 last>cuda:0 batch backward unscale step batch",
    "two_gpus, moved": "batch first>cuda:0 last>cuda:1 batch backward >cuda:1 step "
    "backward unscale first>cuda:0 step batch >cpu batch",
}
BAD_TWO_GPUS = {
    "two_gpus, bad": "first>cuda:0 last>cuda:1 bad batch overflow unscale step batch bad batch",
    "two_gpus, moved, bad": "batch first>cuda:0 last>cuda:1 overflow unscale >cuda:1 step "
    "overflow last>cuda:0 step batch",
}
BAD = SKIPS | BAD_MIXTURES | BAD_TWO_GPUS
PROGRAMS = MOVES | MIXTURES | TWO_GPUS | BAD
programs = pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=on_two_gpus if "cuda:1" in PROGRAMS[p] else ()) for p in PROGRAMS],
)


def run(t, program):
    """Have trainer `t` do the words of `program`."""
    for word in PROGRAMS[program].split():
        if ">" in word:
            part, device = word.split(">")
            (getattr(t.model, part) if part else t.model).to(device)
            t.has_moved()
        elif word == "channels_last":
            t.model.to(memory_format=torch.channels_last)
        elif word == "overflow":
            t.backward(torch.inf)
        elif word in ("batch", "bad"):
            t.backward(torch.inf if word == "bad" else 1.0)
            t.step()
        else:
            getattr(t, word)()
    return t


def ends(t, stats=True):
    """Return what a trainer ends with, on the CPU: weights, statistics, scale, skips."""
    weights = {k: v.detach().cpu().clone() for k, v in t.model.state_dict().items()}
    if not stats:
        weights = {k: v for k, v in weights.items() if "running" not in k and "num_" not in k}
    return weights | {"scales": t.scaler.scales, "skipped": t.scaler.skipped}


@cache
def plain_ends(program, opt):
    """Return the ends of plain PyTorch."""
    return ends(run(Plain(OPTIMIZERS[opt]), program), program not in BAD)


@cache
def half_ends(program, opt, dtype, trainer):
    """Return the ends of a trainer in 16 bits."""
    kind, kwargs = TRAINERS[trainer]
    return ends(run(kind(OPTIMIZERS[opt], dtype=dtype, **kwargs), program))


@pytest.mark.parametrize(
    ("opt", "trainer"),
    [
        ("sgd", "each"),
        ("sgd", "verbs"),
        ("adamw", "flat"),
        ("sgd", "verbs_deferred"),
        ("adamw", "verbs_flat"),
    ],
)
@programs
def test_in_32_bits_a_program_is_plain_pytorchs(program, opt, trainer):
    """But for statistics after a skip, which plain PyTorch keeps."""
    kind, kwargs = TRAINERS[trainer]
    t = run(kind(OPTIMIZERS[opt], dtype=torch.float32, **kwargs), program)
    assert_same(ends(t, program not in BAD), plain_ends(program, opt))
    is_where_its_parameters_are(t)


@pytest.mark.parametrize(
    ("trainer", "opt", "dtype"),
    [("flat", "adamw", "bf16"), ("verbs_deferred", "sgd", "fp16")],
)
@programs
def test_in_16_bits_vectors_end_as_single_masters(program, opt, dtype, trainer):
    each = half_ends(program, opt, DTYPES[dtype], trainer.split("_")[0].replace("flat", "each"))
    assert_same(half_ends(program, opt, DTYPES[dtype], trainer), each)
    assert all(v.isfinite().all() for v in each.values() if isinstance(v, torch.Tensor))


def is_where_its_parameters_are(t):
    """Assert that masters, states and vectors are on the devices of the model's parameters."""
    masters = inside.masters_by_param(t.owner)
    assert set(masters) == set(t.model.parameters())
    for p, master in masters.items():
        assert master.device == p.device
    params = list(t.model.parameters())
    devices = {p.device for p in params}
    t.backward(), t.unscale()  # all is with the masters now
    assert {v.device for v in inside.tensors_held(t.opt)} <= devices
    assert inside.devices_of_scale(t.scaler) <= devices
    for i, state in t.opt.state_dict()["state"].items():
        for k, v in state.items():
            if k != "step":
                assert v.device == params[i].device, (i, k)
    assert {v.device for v in t.model.state_dict().values()} == devices


# Right after a move, before any step


@trainer
@HALF
def test_what_is_read_after_a_move_is_on_the_new_device(trainer, dtype):
    kind, kwargs = TRAINERS[trainer]
    t = kind(OPTIMIZERS["sgd"], dtype=dtype, **kwargs)
    t.backward(), t.step()
    before = {k: v.clone() for k, v in t.model.state_dict().items()}
    t.model.cuda()
    now = t.model.state_dict()
    assert {v.device.type for v in now.values()} == {"cuda"}
    assert_same({k: v.cpu() for k, v in now.items()}, before)
    t.backward(), t.step()
    is_where_its_parameters_are(t)


@FLAT
@HALF
def test_restore_after_a_move_gives_the_masters_on_the_new_device(flat, dtype):
    t = ByHand(OPTIMIZERS["adamw"], dtype=dtype, flat_master=flat)
    t.backward(), t.step()
    before = {k: v.clone() for k, v in t.model.state_dict().items()}
    t.model.cuda()
    opt = t.opt.restore()
    now = dict(t.model.state_dict())
    assert {v.device.type for v in now.values()} == {"cuda"}
    assert_same({k: v.cpu() for k, v in now.items()}, before)
    follow(opt)
    x, y = batch(1)
    cross_entropy(t.model(x), y.cuda()).backward()
    opt.step()


@trainer
def test_a_state_that_is_loaded_after_a_move_goes_where_the_model_is(trainer):
    kind, kwargs = TRAINERS[trainer]
    ended = []
    for moves_first in (True, False):
        t, saved = (kind(OPTIMIZERS["adamw"], dtype=torch.bfloat16, **kwargs) for _ in "ab")
        saved.backward(), saved.step()
        if moves_first:
            t.model.cuda()
        t.opt.load_state_dict(saved.opt.state_dict())
        t.model.load_state_dict(saved.model.state_dict())
        t.model.cuda()
        t.backward(), t.step()
        is_where_its_parameters_are(t)
        ended.append(ends(t))
    assert_same(*ended)


def test_states_in_16_bits_go_along():
    """And come back: the bits of a run that has stayed where it was, as far as devices agree."""
    halves, ends = dict.fromkeys(["exp_avg", "exp_avg_sq"], torch.bfloat16), []
    for moves in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        opt = AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.99))
        settings = dict(dtype=torch.bfloat16, flat_master=True, state_dtype=halves)
        model, opt = with_masters(model, opt, **settings)
        for i in range(4):
            device = "cuda" if moves and i in (1, 2) else "cpu"
            model.to(device)
            opt.zero_grad()
            model(torch.ones(2, 8, device=device)).sum().backward()
            opt.step()
            held = [v for s in opt.state.values() for v in s.values() if v.numel() > 1]
            assert {(v.dtype, v.device.type) for v in held} == {(torch.bfloat16, device)}
        ends.append(model.state_dict())
    for k, v in ends[0].items():
        torch.testing.assert_close(v, ends[1][k], rtol=0, atol=1e-3)


@FLAT
def test_a_copy_can_be_moved_alone(flat):
    t = ByHand(OPTIMIZERS["sgd"], dtype=torch.bfloat16, flat_master=flat)
    t.backward(), t.step()
    twin = pickle.loads(pickle.dumps(t))
    t.model.cuda()
    for one in (t, twin):
        one.backward(), one.step()
        is_where_its_parameters_are(one)
    assert {p.device.type for p in twin.model.parameters()} == {"cpu"}


# A model on the CPU of a machine with a GPU


@FLAT
@HALF
def test_a_model_on_the_cpu_leaves_the_gpu_alone(flat, dtype):
    before = torch.cuda.memory_allocated()
    for kind in (ByHand, Verbs):
        t = kind(OPTIMIZERS["sgd"], dtype=dtype, flat_master=flat)
        for _ in range(2):
            t.backward(), t.step()
        assert {p.device.type for p in t.model.parameters()} == {"cpu"}
        assert inside.devices_of_scale(t.scaler) == {torch.device("cpu")}
        assert torch.cuda.memory_allocated() == before


@FLAT
@pytest.mark.parametrize("to", ["to_fp16", "to_bf16"])
def test_a_learner_on_the_cpu_leaves_the_gpu_alone(to, flat):
    pytest.importorskip("fastai")
    import tiny

    before = torch.cuda.memory_allocated()
    learn = tiny.make_learner(dls=tiny.picture_dls().to(torch.device("cpu")))
    getattr(learn, to)(flat_master=flat)
    learn.fit(1, 0.05)
    assert {v.device.type for v in learn.model.state_dict().values()} == {"cpu"}
    assert torch.cuda.memory_allocated() == before


# fastai


def fit_on(learn, *devices, moves_states=False):
    """Fit once on each of `devices`; by hand move the states of a plain optimizer."""
    for device in devices:
        learn.dls.device = torch.device(device)
        if moves_states and learn.opt is not None:
            for state in getattr(learn.opt, "opt", learn.opt).state.values():
                moves = [k for k, v in state.items() if isinstance(v, torch.Tensor) and k != "step"]
                state.update({k: state[k].to(device) for k in moves})
            if hasattr(learn.opt, "slow_weights"):  # fastai's Lookahead
                learn.opt.slow_weights = [
                    [v.to(device) for v in vs] for vs in learn.opt.slow_weights
                ]
        learn.fit(1, 0.05, wd=0.1)
    return learn


def learner(opt, dtype=None, **kwargs):
    """Return a learner whose data is on the CPU; plain, or with masters."""
    import tiny

    learn = tiny.make_learner(opt, tiny.conv_net, tiny.three_groups, tiny.picture_dls(16))
    learn.dls.device = torch.device("cpu")
    return learn if dtype is None else learn.add_cb(tiny.MixedPrecision(dtype=dtype, **kwargs))


def learner_ends(learn):
    """Return the weights and the optimizer's state, on the CPU."""
    import tiny

    ended = {"weights": tiny.weights(learn), "opt": tiny.opt_state(learn)}
    return inside.map_tensors(lambda t: t.cpu(), ended)


WAYS_OF_FITS = {
    "to": ("cuda",),
    "from": ("cuda", "cpu"),
    "to_and_fro": ("cpu", "cuda", "cpu", "cuda"),
}


@cache
def plain_fits(opt, devices):
    """Return what plain fastai ends with."""
    return learner_ends(fit_on(learner(opt), *devices, moves_states=True))


@FLAT
@pytest.mark.parametrize("opt", ["sgd", "torch_adamw", "ranger"])
@pytest.mark.parametrize("devices", WAYS_OF_FITS.values(), ids=WAYS_OF_FITS)
def test_a_learner_whose_data_moves_is_plain_fastais_in_32_bits(devices, opt, flat):
    learn = fit_on(learner(opt, torch.float32, flat_master=flat), *devices)
    assert_same(learner_ends(learn), plain_fits(opt, devices))
    assert {m.device.type for m in inside.masters_by_param(learn.mp_cb.mixed).values()} == {
        devices[-1]
    }


@HALF
@pytest.mark.parametrize("opt", ["adam", "ranger"])
def test_a_learner_whose_data_moves_ends_flat_as_not_flat(opt, dtype):
    devices = WAYS_OF_FITS["to_and_fro"]
    each, flat = (fit_on(learner(opt, dtype, flat_master=f), *devices) for f in (False, True))
    assert_same(learner_ends(flat), learner_ends(each))
    for learn in (each, flat):
        assert {m.device.type for m in inside.masters_by_param(learn.mp_cb.mixed).values()} == {
            "cuda"
        }
        state = learn.opt.state_dict()
        learn.to_fp32()
        assert {v.device.type for v in learn.model.state_dict().values()} == {"cuda"}
        assert len(state["state"]) == len(list(learn.model.parameters()))
        learn.fit(1, 0.05)


@FLAT
def test_a_learners_model_that_is_moved_by_hand_goes_where_its_data_is(flat):
    learn = fit_on(learner("sgd", torch.bfloat16, flat_master=flat), "cpu")
    twin = fit_on(learner("sgd", torch.bfloat16, flat_master=flat), "cpu")
    learn.model.cuda()
    assert_same(learner_ends(fit_on(learn, "cpu")), learner_ends(fit_on(twin, "cpu")))


@FLAT
def test_predictions_on_another_device(flat):
    learn = fit_on(learner("sgd", torch.bfloat16, flat_master=flat), "cuda")
    preds, _ = learn.get_preds()
    learn.dls.device = torch.device("cpu")
    learn.model.cpu()
    again, _ = learn.get_preds()
    assert preds.dtype == again.dtype == torch.float32 and again.device.type == "cpu"
    torch.testing.assert_close(preds.cpu(), again, rtol=2e-2, atol=1e-2)
    assert np_finite(fit_on(learn, "cpu"))


def np_finite(learn):
    """Whether all weights are finite."""
    return all(v.isfinite().all() for v in learn.model.state_dict().values())


# skorch


@pytest.mark.filterwarnings("ignore:Setting self.device", "ignore:Requested to load data to CUDA")
@pytest.mark.parametrize("mode", ["autocast", "master", "flat"])
@HALF
def test_a_skorch_net_on_either_device(mode, dtype, caplog):
    pytest.importorskip("skorch")
    import numpy as np
    from skorch import NeuralNetClassifier

    from mixedfp.skorch import MixedPrecisionMixin

    class Net(MixedPrecisionMixin, NeuralNetClassifier):
        pass

    caplog.set_level(logging.ERROR)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 4)).astype("float32")
    y = (x[:, 0] > 0).astype("int64")
    kwargs = {"flat": dict(amp_mode="master", flat_master=True), "master": dict(amp_mode="master")}
    ended = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        made = Net(
            nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2), nn.Softmax(-1)),
            device=device, amp_dtype=dtype, max_epochs=2, batch_size=8, verbose=0,
            train_split=None, optimizer=SGD, optimizer__momentum=0.9, lr=0.1,
            **kwargs.get(mode, {}),
        ).fit(x, y)  # fmt: skip
        assert {p.device.type for p in made.module_.parameters()} == {device}
        copied = copy.deepcopy(made)
        for one in (made, copied):
            one.partial_fit(x, y)
        weights = {k: v.cpu() for k, v in made.module_.state_dict().items()}
        assert_same({k: v.cpu() for k, v in copied.module_.state_dict().items()}, weights)
        assert np.isfinite(made.history[:, "train_loss"]).all()
        ended[device] = weights
    torch.testing.assert_close(ended["cpu"], ended["cuda"], rtol=0.05, atol=0.02)


# The scaler


def test_the_scale_is_where_the_loss_is():
    scaler = LossScaler(init_scale=8.0, growth_interval=2)
    w = nn.Parameter(torch.zeros(2))
    opt = SGD([w], lr=1.0)
    for device in ("cpu", "cuda", "cuda", "cpu"):
        w.data = w.data.to(device)
        scaler.scale(w.sum()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert {d.type for d in inside.devices_of_scale(scaler)} == {device}
    assert w.tolist() == [-4.0, -4.0]
    assert scaler.scales == [8.0, 8.0, 16.0, 16.0] and scaler.get_scale() == 32.0


def test_losses_and_gradients_on_two_devices():
    """One optimizer, one verdict: what overflows on one device is a skip on both."""
    here, there = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="cuda"))
    opt, scaler = SGD([here, there], lr=1.0), LossScaler(init_scale=8.0)
    for bad in (None, "cpu", "cuda", None):
        losses = [p.sum() * (torch.inf if p.device.type == bad else 1.0) for p in (here, there)]
        for loss in scaler.scale(losses):
            loss.backward()
        scaler.unscale_(opt)
        assert scaler.found_nonfinite(opt) == (bad is not None)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert here.tolist() == there.tolist() == [-2.0, -2.0]
    assert scaler.skipped == [1, 2]


def test_a_second_update_of_an_iteration_after_a_move():
    """Each optimizer steps, and is followed by an update: the overflow counts once."""
    ws = [nn.Parameter(torch.zeros(2)) for _ in "ab"]
    opts, scaler = [SGD([w], lr=1.0) for w in ws], LossScaler(init_scale=8.0)
    scaler.scale((ws[0] * torch.inf).sum() + ws[1].sum()).backward()
    scaler.step(opts[0])
    scaler.update()
    ws[1].data, ws[1].grad.data = ws[1].data.cuda(), ws[1].grad.data.cuda()
    scaler.step(opts[1])
    scaler.update()
    assert ws[1].tolist() == [-1.0, -1.0] and ws[0].tolist() == [0.0, 0.0]
    assert scaler.skipped == [0] and scaler.get_scale() == 4.0


# Layer scales


@pytest.mark.parametrize("scales", ["auto", {"first.0": 4.0, "last.3": 0.5}], ids=["auto", "given"])
@pytest.mark.parametrize("program", ["between", "accumulating", "after a skip", "cpu and gpu"])
def test_scales_of_layers_move_along(program, scales):
    ended = [
        ends(run(Verbs(OPTIMIZERS["sgd"], dtype=torch.float16, flat_master=flat,
                       layer_scales=scales), program))
        for flat in (False, True)
    ]  # fmt: skip
    assert_same(*ended)
    assert all(v.isfinite().all() for v in ended[0].values() if isinstance(v, torch.Tensor))


# The forward pass


@HALF
def test_a_pass_that_is_repeated_draws_the_same_numbers(dtype):
    """Softmax at the end is found out in the first pass, which is computed again then."""
    t = ByHand(OPTIMIZERS["sgd"], net(dropout=0.5, softmax=True), dtype=dtype)
    t.model.first.cpu(), t.model.last.cuda()
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        t.model(batch(0)[0])
        states.append((torch.get_rng_state(), torch.cuda.get_rng_state()))
    assert_same(*states)


@HALF
@pytest.mark.parametrize("first", ["cpu", "cuda"])
def test_autocast_is_on_for_both_devices(first, dtype):
    """A sum of a 32-bit table and 16-bit numbers is computed, on whichever device it is."""

    class Mixes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            for m in (self.first, self.last):
                device = m.weight.device
                x = m(x.to(device) + torch.ones(3, device=device))
            return x

    model = Mixes()
    model.first.to(first), model.last.to("cpu" if first == "cuda" else "cuda")
    model, opt = with_masters(model, SGD(model.parameters(), lr=0.1), dtype=dtype)
    for _ in range(2):
        out = model(torch.randn(2, 3))
        assert out.dtype == torch.float32 and out.device == model.last.weight.device
        out.sum().backward()
        opt.step()


# Fused optimizers: what torch leaves in new states where a step is skipped on the device


def test_the_memory_that_nobody_has_written_is_seen():
    """Without that the tests below would show nothing."""
    if "simulated_cuda.device" not in sys.modules:
        pytest.skip("a real GPU does not say what was not written")
    assert torch.empty(1000, device="cuda").isnan().all()


def after_skips(t, words):
    """Return weights and states after `words`, on the GPU, with steps that are skipped."""
    t.model.cuda()
    for word in words.split():
        if word == "new":  # parameters that train from here on
            for p in t.model.parameters():
                p.requires_grad_(True)
            t.opt.zero_grad()
            continue
        n, t.n = t.n, t.n if word != "bad" else 99  # a skipped batch takes no number
        t.backward(torch.inf if word == "bad" else 1.0)
        t.n = n + (word != "bad")
        t.step()
    weights = {k: v for k, v in ends(t, stats=False).items() if k not in ("scales", "skipped")}
    states = t.opt.state_dict()["state"]
    return weights, inside.map_tensors(lambda v: v.cpu(), states)


FUSED_TRAINERS = {"plain": (Plain, {})} | TRAINERS


@pytest.mark.parametrize("trainer", FUSED_TRAINERS)
@pytest.mark.parametrize(
    ("opt", "dtype"),
    [*((opt, torch.float32) for opt in FUSED), ("sgd", torch.float16), ("adamw", torch.bfloat16)],
)
def test_a_first_step_that_overflows_leaves_no_trace_in_a_fused_optimizer(opt, trainer, dtype):
    kind, kwargs = FUSED_TRAINERS[trainer]
    if kind is Plain and dtype != torch.float32:
        pytest.skip("has no masters")
    kwargs = kwargs if kind is Plain else dict(kwargs, dtype=dtype)
    bad = after_skips(kind(FUSED[opt], **kwargs), "bad bad batch bad batch")
    good = after_skips(kind(FUSED[opt], **kwargs), "batch batch")
    assert all(v.isfinite().all() for v in bad[0].values())
    torch.testing.assert_close(bad[0], good[0], rtol=1e-6, atol=1e-7)  # scales of 2 ** n: roundings
    steps = [[float(s["step"]) for s in x[1].values() if "step" in s] for x in (bad, good)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("trainer", FUSED_TRAINERS)
def test_parameters_whose_first_step_overflows_later(trainer):
    kind, kwargs = FUSED_TRAINERS[trainer]
    kwargs = kwargs if kind is Plain else dict(kwargs, dtype=torch.float32)

    def two_groups(ps):  # in one group a fused SGD cannot step what comes later
        ps, of_first = list(ps), 3
        groups = [{"params": ps[:of_first]}, {"params": ps[of_first:]}]
        return SGD(groups, lr=0.1, momentum=0.9, fused=True)

    ended = []
    for words in ("batch new bad batch", "batch new batch"):
        model = net()
        t = kind(two_groups, model, **kwargs)
        model.first.requires_grad_(False)
        ended.append(after_skips(t, words)[0])
    assert all(v.isfinite().all() for v in ended[0].values())
    torch.testing.assert_close(*ended, rtol=1e-6, atol=1e-7)


@FLAT
def test_fastais_wrapper_of_a_fused_optimizer(flat):
    import tiny

    opt = tiny.torch_optimizer(SGD, momentum=0.9, fused=True)
    learn = learner(opt, torch.float16, flat_master=flat)
    first = tiny.Do("after_loss", lambda learn: learn.loss_grad.mul_(torch.inf), at=0)
    learn.dls.device = torch.device("cuda")
    learn.fit(1, 0.05, cbs=first)
    assert learn.mp_cb.n_skipped == 1 and np_finite(learn)


# Two GPUs


def test_on_two_gpus():
    """What needs two is done in a process that has two simulated ones."""
    if "simulated_cuda.device" not in sys.modules or N_GPUS > 1:
        pytest.skip("two GPUs are simulated where one is")
    options = "-q", "-p", "simulated_cuda.plugin", "-p", "no:cacheprovider", "-k", "two_gpus"
    said = in_a_process("-m", "pytest", *options, __file__, SIMULATED_CUDA_DEVICES="2")
    assert "passed" in said and "failed" not in said


@on_two_gpus
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, LossScaler])
@pytest.mark.parametrize("opt", FUSED)
@FLAT
def test_two_gpus_that_overflow_both(opt, flat, kind):
    """PyTorch adds their verdicts up, and a fused kernel skips where the sum is 1."""
    model = net()
    model.first.to("cuda:0"), model.last.to("cuda:1")
    model, opt = with_masters(
        model, FUSED[opt](model.parameters()), dtype=torch.float32, flat_master=flat
    )
    scaler = kind("cuda", init_scale=8.0)
    for i, factor in enumerate([1.0, 1.0, torch.inf, torch.inf, 1.0]):
        x, y = batch(i)
        before = {k: v.clone() for k, v in model.state_dict().items() if "running" not in k}
        scaler.scale(cross_entropy(model(x), y.to("cuda:1")) * factor).backward()
        if i == 3:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        now = {k: v for k, v in model.state_dict().items() if k in before}
        assert all(v.isfinite().all() for v in now.values())
        assert all(torch.equal(now[k], before[k]) for k in now) == (factor == torch.inf)
    assert scaler.get_scale() == 2.0


@on_two_gpus
@HALF
def test_a_pass_that_is_repeated_draws_the_same_numbers_on_two_gpus(dtype):
    t = ByHand(OPTIMIZERS["sgd"], net(dropout=0.5, softmax=True), dtype=dtype)
    t.model.first.to("cuda:0"), t.model.last.to("cuda:1")
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        t.model(batch(0)[0])
        states.append(torch.cuda.get_rng_state_all())
    assert_same(*states)


# Saved here, loaded there


def in_a_process(*args, **env):
    """Run Python with `args`; return what it prints. `env` is on top of this one's."""
    root = Path(__file__).resolve().parent
    path = os.pathsep.join([str(root.parent), str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        cwd=root.parent,
        env=os.environ | {"PYTHONPATH": path} | env,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def train(device, folder, end, stops=False):
    """Train two epochs on `device`, or go on with what is in `folder`; save what it ends with."""
    import tiny

    from mixedfp.callback import MixedPrecision
    from mixedfp.checkpoint import Checkpoint

    torch.manual_seed(0)
    mixed = MixedPrecision(flat_master=True)
    learn = tiny.make_learner("adam", tiny.dropout_net, path=Path(folder), cbs=mixed)
    learn.dls.device = torch.device(device)
    checkpoint = Checkpoint("run")
    start = checkpoint.resume(learn)
    stop = tiny.Do("before_batch", _stop, at=5)  # in the second epoch
    with contextlib.suppress(InterruptedError):
        learn.fit(2, 0.05, cbs=[checkpoint, stop] if stops else checkpoint, start_epoch=start)
    assert {v.device.type for v in learn.model.state_dict().values()} == {device}
    full = {k: v.cpu() for k, v in learn.model.state_dict().items()}
    torch.save({"start": start, "weights": full, "scales": learn.mp_cb.scales}, end)
    return full


def _stop(learn):
    raise InterruptedError


def go_on(device, folder):
    """Go on in this process with a copy of what is in `folder`; return what it ends with."""
    copied = folder.with_name(f"{folder.name}_{device}")
    shutil.copytree(folder, copied)
    train(device, copied, copied / "end.pt")
    return torch.load(copied / "end.pt")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_run_goes_on_elsewhere(device, tmp_path):
    """On the other device, where it was, and in a process that sees no GPU: each bit is there."""
    here = tmp_path / "here"
    train(device, here, tmp_path / "cut.pt", stops=True)
    same, other = go_on(device, here), go_on("cpu" if device == "cuda" else "cuda", here)
    whole = train(device, tmp_path / "whole", tmp_path / "whole.pt")
    assert same["start"] == other["start"] == 1
    assert_same(same["weights"], whole)
    if device == "cuda":
        source = (
            "import test_devices as t; t.train_without_a_gpu(); "
            f"t.train('cpu', {str(here)!r}, {str(tmp_path / 'end.pt')!r})"
        )
        in_a_process("-c", source, CUDA_VISIBLE_DEVICES="")
        assert_same(torch.load(tmp_path / "end.pt"), other)


@on_two_gpus
def test_a_run_goes_on_where_there_are_two_gpus(tmp_path, monkeypatch):
    """And with fewer: the states of random numbers are those of the GPUs that are there."""
    here = tmp_path / "here"
    train("cuda", here, tmp_path / "cut.pt", stops=True)
    whole = go_on("cuda", here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert_same(go_on("cpu", here)["start"], whole["start"])


def train_without_a_gpu():
    """Train in each way, and predict."""
    assert not torch.cuda.is_available()
    for dtype in DTYPES.values():
        for kind, kwargs in TRAINERS.values():
            t = kind(FUSED["sgd"], dtype=dtype, **kwargs)
            for _ in range(2):
                t.backward(), t.step()
            assert all(v.isfinite().all() for v in t.model.state_dict().values())
    learn = learner("adam", torch.float16, flat_master=True)
    learn.fit(1, 0.05)
    assert learn.get_preds()[0].isfinite().all()
