"""A run that is killed and resumed ends in the bits of one that was not: invariant 4.

Run as a script, `python test_resume.py FOLDER`, this trains in each precision: once in one go, and
once killed with SIGKILL again and again. It forks each start after the imports, which take longer
than all the training.
"""

import os
import pickle
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from fastai.basics import Callback, DataLoaders, Learner
from fastai.callback.mixup import MixUp
from fastai.callback.tracker import (
    EarlyStoppingCallback,
    ReduceLROnPlateau,
    SaveModelCallback,
)
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.learner import load_model
from fastai.losses import CrossEntropyLossFlat
from fastai.text.data import LMDataLoader, LMTensorText
from inside import be_rank, forget_notices, random_states, write_checkpoint
from ranks import run_as_script
from tiny import Do, make_learner, pictures, plain, silent
from torch import nn

from mixedfp.callback import MixedPrecision
from mixedfp.checkpoint import Checkpoint
from mixedfp.formats import MixedPrecisionError
from mixedfp.testing import assert_same

FP16 = dict(loss_scale=2.0**20, growth_interval=5)  # too large a scale, that soon grows again
PRECISIONS = {
    "fp32": ("to_fp32", {}),
    "fp16": ("to_fp16", FP16),
    "fp16 flat": ("to_fp16", FP16 | dict(flat_master=True)),
    "bf16": ("to_bf16", {}),
    "bf16 flat": ("to_bf16", dict(flat_master=True)),
}
FLAT = "fp16 flat"
KILLED = ["fp32", "fp16 flat", "bf16"]  # files of flat masters are those of single ones
N_EPOCHS = 3


def net():
    """Return a net of convolutions, BatchNorm and dropout, with a buffer that is trained on."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), Moved(), nn.Flatten(), nn.Dropout(0.25),
        nn.Linear(64, 2),
    )  # fmt: skip


def without_dropout():
    return nn.Sequential(*net()[:5], nn.Linear(64, 2))


class Moved(nn.Module):
    """Keep an average of what comes through, in a buffer that goes to 16 bits with the model."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.1]))

    def forward(self, x):
        if self.training:
            self.mean = self.mean.lerp(x.detach().mean().view(1), 0.25)
        return x - self.mean


def shuffled_dls(shuffle=True, **kwargs):
    """Return data whose training pictures come in another order in every epoch."""
    rows = list(zip(*pictures(40), strict=True))
    random.seed(5)
    return DataLoaders.from_dsets(
        rows[:-8], rows[-8:], bs=8, shuffle=shuffle, num_workers=0, device="cpu", **kwargs
    )


def start(path, precision, model=net, opt="adam", **kwargs):
    """Return the learner of a script, the same at each of its starts."""
    to, settings = PRECISIONS[precision]
    kwargs = dict(dls=shuffled_dls()) | kwargs
    learn = make_learner(opt, model, path=path, **kwargs)
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    return getattr(learn, to)(**settings)


def one_cycle(learn, n=N_EPOCHS, **kwargs):
    learn.fit_one_cycle(n, 0.02, **kwargs)


def steady(learn, n=N_EPOCHS, **kwargs):
    learn.fit(n, 0.02, wd=0.1, **kwargs)


def flat_cos(learn, n=N_EPOCHS, **kwargs):
    """Fit as fastai does, which drops `start_epoch` on its way."""
    learn.fit_flat_cos(n, 0.02, pct_start=0.25, **kwargs)


def sgdr(learn, **kwargs):
    learn.fit_sgdr(2, 1, 0.02, **kwargs)


def anew(learn, **kwargs):
    """Fit with a new optimizer."""
    learn.fit_one_cycle(N_EPOCHS, 0.02, reset_opt=True, **kwargs)


def run(learn, fit=one_cycle, cbs=(), fname="run"):
    """Do what a script does: resume, and fit."""
    checkpoint = Checkpoint(fname)
    fit(learn, start_epoch=checkpoint.resume(learn), cbs=[checkpoint, *cbs])
    return learn


class Killed(Exception):
    """What stands for a signal where no process is to die."""


def kill_at(epoch, event="before_batch", batch=2):
    """Return a callback that kills in `epoch`."""

    def kill(learn):
        if learn.epoch == epoch and learn.training and getattr(learn, "iter", batch) == batch:
            raise Killed

    return Do(event, kill, order=90)


def interrupted(make, fit=one_cycle, cbs=list, at=(1, 2)):
    """Run a script that is killed in each epoch of `at`; return the learner at its end."""
    for epoch in at:
        with pytest.raises(Killed):
            run(make(), fit, [*cbs(), kill_at(epoch)])
    return run(make(), fit, cbs())


def ends(learn):
    """Return copies of everything that training changes."""
    named = dict(learn.model.named_parameters()) | dict(learn.model.named_buffers())
    found = {"model": named, "weights": dict(learn.model.state_dict()), "rates": rates(learn)}
    found["opt"] = learn.opt.state_dict()
    found["grads"] = [p.grad for p in learn.model.parameters()]
    found["random"] = [random.random(), float(np.random.rand()), torch.rand(2)]
    if hasattr(learn, "mp_cb"):
        found["masters"] = tiny.masters(learn)
    return as_python(plain(found))


def rates(learn):
    return [dict(h) for h in learn.opt.hypers]


def as_python(o):
    """Return `o` with Python's numbers for numpy's."""
    if isinstance(o, dict):
        return {k: as_python(v) for k, v in o.items()}
    if isinstance(o, list):
        return [as_python(v) for v in o]
    return o.item() if isinstance(o, np.generic) else o


def check(tmp_path, make, fit=one_cycle, cbs=list, at=(1, 2)):
    """Check that a killed run ends as an unbroken one; return both learners."""
    whole = make(tmp_path / "whole")
    fit(whole, cbs=[Checkpoint(), *cbs()])
    expected = ends(whole)
    parts = interrupted(partial(make, tmp_path / "parts"), fit, cbs, at)
    assert_same(ends(parts), expected)
    return whole, parts


# A process that dies


def scenes():
    """Return ways for a process to end itself, each a function that is called before it trains."""
    return {
        "in the first epoch": partial(_die_in, 0, "after_backward"),
        "in a step": partial(_die_in, 1, "after_step"),
        "before a single byte": partial(_die_writing, 0.0),
        "half-way in a write": partial(_die_writing, 0.5),
        "before the new file has its name": partial(_die_around, os.replace, False),
        "as soon as it has": partial(_die_around, os.replace, True),
        "while validating": partial(_die_in, 2, "before_validate"),
    }


def _die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in(epoch, event):
    def f(learn):
        if learn.epoch >= epoch and getattr(learn, "iter", 2) >= 2:
            _die()

    return [Do(event, f, order=90, training=False)]


def _die_writing(part):
    """Write `part` of the first file and die."""

    def save(state, f):
        data = pickle.dumps("x" * 10_000)
        f.write(data[: int(len(data) * part)])
        f.flush()
        _die()

    torch.save = save
    return []


def _die_around(f, after):
    def replace(*args):
        if after:
            f(*args)
        _die()

    os.replace = replace
    return []


def _in_a_fork(f, seconds=None):
    """Call `f` in a fork; kill it after `seconds`, if it lives so long. Return how it ended."""
    child = os.fork()
    if child == 0:
        try:
            f()
            os._exit(0)
        finally:
            os._exit(1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _train(path, precision, scene=list):
    learn = run(start(path, precision), cbs=scene())
    record = learn.mp_cb.skipped if precision.startswith("fp16") else []
    torch.save({"ends": ends(learn), "skipped": record}, path / "end.pt")


def _script(folder):
    chance = random.Random(0)
    for precision in KILLED:
        whole, parts = folder / precision / "whole", folder / precision / "parts"
        _train(whole / "warm-up", precision)
        began = time.perf_counter()
        assert _in_a_fork(partial(_train, whole, precision)) == 0
        took = time.perf_counter() - began
        endings = [_in_a_fork(partial(_train, parts, precision, f)) for f in scenes().values()]
        for _ in range(3):  # at any moment at all
            _in_a_fork(partial(_train, parts, precision), chance.uniform(0, took / 2))
        assert _in_a_fork(partial(_train, parts, precision)) == 0
        torch.save(endings, parts / "endings.pt")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of runs that were killed, and of those that were not."""
    folder = tmp_path_factory.mktemp("killed")
    run_as_script(__file__, folder)
    return folder


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process that forks")
@pytest.mark.parametrize("precision", KILLED)
def test_a_run_killed_again_and_again_ends_in_the_same_bits(precision, killed):
    """Weights, masters, buffers, optimizer, loss scale and growth count, after SIGKILLs."""
    whole, parts = killed / precision / "whole", killed / precision / "parts"
    assert set(torch.load(parts / "endings.pt")) == {-signal.SIGKILL}
    end, expected = torch.load(parts / "end.pt"), torch.load(whole / "end.pt")
    assert_same(end["ends"], expected["ends"])
    if precision.startswith("fp16"):
        assert len(expected["skipped"]) > 2  # the scale moved, and batches were lost


# Every way to train


@pytest.mark.parametrize(
    "fit, precision",
    [(steady, FLAT), (flat_cos, FLAT), (flat_cos, "fp32"), (sgdr, FLAT), (anew, FLAT)],
)
def test_with_every_fit(fit, precision, tmp_path):
    """`fit_flat_cos`, which fastai itself resumes at epoch 0, and `reset_opt=True` too."""
    check(tmp_path, partial(start, precision=precision), fit)


@pytest.mark.parametrize("opt", tiny.ELEMENTWISE)
def test_with_every_optimizer(opt, tmp_path):
    check(tmp_path, partial(start, precision=FLAT, opt=opt))


@pytest.mark.parametrize("opt", tiny.LAYERWISE)
def test_with_layer_wise_optimizers(opt, tmp_path):
    check(tmp_path, partial(start, precision="fp16", opt=opt))


@pytest.mark.parametrize("model", [tiny.dropout_net, tiny.Tied], ids=["no dimension", "tied"])
def test_with_other_models(model, tmp_path):
    check(tmp_path, partial(start, precision=FLAT, model=model))


def test_with_groups_and_frozen_layers(tmp_path):
    """What is frozen is the script's to say: `requires_grad` is in no file."""

    def frozen(path):
        learn = start(path, FLAT, tiny.dropout_net, splitter=tiny.three_groups)
        learn.freeze_to(-2)
        return learn

    check(tmp_path, frozen)


class Now(nn.Module):
    """A net with a layer that is used in the first epoch only."""

    def __init__(self):
        super().__init__()
        self.body, self.early, self.head = net()[:-1], nn.Linear(64, 64), nn.Linear(64, 2)
        self.register_buffer("n", torch.tensor(0))

    def forward(self, x):
        x = self.body(x)
        if self.training:
            self.n += 1
        return self.head(x + self.early(x) if self.n <= 4 else x)


@pytest.mark.parametrize("precision", ["fp32", "fp16", FLAT])
def test_a_gradient_of_zeros_is_not_none(precision, tmp_path):
    """fastai steps on a parameter that once had a gradient: momentum and decay still move it."""
    whole, _ = check(tmp_path, partial(start, precision=precision, model=Now), steady, at=(2,))
    state = whole.opt.state[whole.model.early.weight]
    assert state["step"] > 4


class Draws(Callback):
    """Draws random numbers wherever it can."""

    def __init__(self, order):
        self.order = order

    def _draw(self):
        random.random(), np.random.rand(), torch.rand(1)

    before_fit = before_epoch = before_train = before_validate = after_epoch = _draw


CALLBACKS = {
    "accumulation": lambda: [GradientAccumulation(20)],
    "accumulation and clipping": lambda: [GradientAccumulation(20), GradientClip(0.1)],
    "mixup": lambda: [MixUp()],
    "predictions": lambda: [Do("after_epoch", tiny._predict, training=False)],
    "draws before": lambda: [Draws(-20)],
    "draws after": lambda: [Draws(80)],
    "the best": lambda: [SaveModelCallback(fname="best", with_opt=True)],
    "each epoch": lambda: [SaveModelCallback(fname="each", every_epoch=True)],
    "plateau": lambda: [ReduceLROnPlateau(min_delta=10, factor=2)],
}


WITH_CALLBACKS = [*((k, FLAT) for k in CALLBACKS), ("accumulation", "fp32"), ("plateau", "fp32")]


@pytest.mark.parametrize("cbs, precision", WITH_CALLBACKS)
def test_with_other_callbacks(cbs, precision, tmp_path):
    """Trackers go on from their best and their patience, an accumulated gradient from its count.

    With fastai's `start_epoch` alone a tracker fails in the first epoch that is skipped.
    """
    check(tmp_path, partial(start, precision=precision), steady, CALLBACKS[cbs])


def text_dls():
    """Return texts of numbers, whose order each epoch shuffles further."""
    random.seed(5)
    texts = [torch.arange(i, i + 20) % 16 for i in range(12)]
    dls = [
        LMDataLoader([LMTensorText(t) for t in texts], bs=4, seq_len=5, shuffle=True, device="cpu")
        for _ in range(2)
    ]
    return DataLoaders(*dls, device="cpu")


def language_model():
    """Return a model of the next word, given one."""
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))


@pytest.mark.parametrize("precision", ["fp32", FLAT])
def test_with_a_language_model(precision, tmp_path):
    """Its loader keeps the order of the last epoch, to shuffle it again."""

    def make(path):
        loss_func = CrossEntropyLossFlat()
        return start(path, precision, language_model, dls=text_dls(), loss_func=loss_func)

    whole, parts = check(tmp_path, make, steady)
    orders = [list(learn.dls.train.items.idxs) for learn in (whole, parts)]
    assert orders[0] == orders[1] != list(range(12))


def test_skipped_epochs_overwrite_nothing_of_others(tmp_path):
    """fastai's own way writes the loaded weights under the names of the epochs that it skips."""
    make, cbs = partial(start, tmp_path, "fp32"), CALLBACKS["each epoch"]
    with pytest.raises(Killed):
        run(make(), cbs=[*cbs(), kill_at(2)])
    first = (tmp_path / "models" / "each_0.pth").read_bytes()
    run(make(), cbs=cbs())
    assert (tmp_path / "models" / "each_0.pth").read_bytes() == first


def test_early_stopping_stops_at_the_same_epoch(tmp_path):
    """A run that was stopped early and is started again trains its last epoch again, and stops."""

    def cbs():
        return [EarlyStoppingCallback(min_delta=10, patience=3)]

    make = partial(start, precision=FLAT)
    fit = partial(steady, n=8)
    whole, parts = check(tmp_path, make, fit, cbs, at=(2,))
    assert whole.epoch == parts.epoch == 3
    again = run(make(tmp_path / "parts"), fit, cbs())
    assert again.epoch == 3
    assert_same(ends(again)["weights"], ends(parts)["weights"])


@pytest.mark.parametrize("cbs", ["the best", "each epoch"])
def test_a_finished_run_trains_nothing(cbs, tmp_path):
    """It ends as it ended: with the best model, where that is what is kept."""
    fit, cbs = partial(one_cycle, n=3), CALLBACKS[cbs]
    end = ends(run(start(tmp_path, FLAT), fit, cbs()))
    trained = []
    count = Do("after_backward", lambda learn: trained.append(learn.iter))
    again = start(tmp_path, FLAT)
    assert Checkpoint("run").resume(again) == 3
    again = ends(run(again, fit, [*cbs(), count]))
    assert not trained
    assert_same(again["weights"], end["weights"])


def test_where_there_is_no_file_nothing_is_touched(tmp_path):
    learn = start(tmp_path, "fp32")
    before = torch.get_rng_state(), plain(learn.model.state_dict())
    assert Checkpoint("run").resume(learn) == 0 and learn.opt is None
    assert_same((torch.get_rng_state(), plain(learn.model.state_dict())), before)


# What comes between `resume` and the first batch


def test_what_happens_between_does_not_count(tmp_path):
    """Predictions, a look at a batch, a learning rate sought, random numbers, another precision."""
    whole = start(tmp_path, FLAT)
    one_cycle(whole, cbs=Checkpoint("whole"))
    expected = ends(whole)
    with pytest.raises(Killed):
        run(start(tmp_path, FLAT), cbs=[kill_at(2)])
    learn, checkpoint = start(tmp_path, "fp32"), Checkpoint("run")
    learn.add_cb(checkpoint)
    done = checkpoint.resume(learn)
    learn.validate()
    learn.get_preds()
    learn.dls.one_batch()
    random.random(), np.random.rand(5), torch.rand(5)
    learn.to_fp16(flat_master=True, **FP16)
    learn.lr_find(num_it=6, show_plot=False, suggest_funcs=None)
    one_cycle(learn, start_epoch=done)
    assert_same(ends(learn), expected)


@pytest.mark.parametrize("how", [lambda o: o.validate(), lambda o: o.get_preds()])
def test_looking_writes_nothing(how, tmp_path):
    """Nor does `lr_find`, which trains."""
    learn = start(tmp_path, "fp16")
    learn.add_cb(Checkpoint("run"))
    how(learn)
    learn.lr_find(num_it=6, show_plot=False, suggest_funcs=None)
    assert not (tmp_path / "models" / "run.pth").exists()


def test_looking_after_an_interrupted_fit_writes_nothing(tmp_path):
    learn = start(tmp_path, "fp16")
    learn.add_cb(Checkpoint("run"))
    with pytest.raises(Killed):
        one_cycle(learn, cbs=kill_at(2))
    before = (tmp_path / "models" / "run.pth").read_bytes()
    learn.validate()
    assert (tmp_path / "models" / "run.pth").read_bytes() == before


def test_a_search_for_a_rate_that_fails_does_not_end_the_writing(tmp_path):
    learn = start(tmp_path, "fp16")
    learn.add_cb(Checkpoint("run"))
    learn.add_cb(kill := kill_at(0))
    with pytest.raises(Killed):
        learn.lr_find(num_it=6, show_plot=False, suggest_funcs=None)
    learn.remove_cb(kill)
    one_cycle(learn, 1)
    assert (tmp_path / "models" / "run.pth").exists()


def test_mixed_precision_for_one_fit(tmp_path):
    """The loss scale is there though `resume` meets a plain optimizer."""

    def fit(learn, cbs, **kwargs):
        mixed = MixedPrecision(flat_master=True, **FP16)
        one_cycle(learn, cbs=[mixed, *cbs, noted(mixed, scales)], **kwargs)

    def noted(mixed, into):
        return Do("before_batch", lambda _: into.append(mixed.loss_scale), order=90)

    scales = []
    fit(start(tmp_path / "whole", "fp32"), [Checkpoint()])
    expected, at = scales.copy(), 4 + 2
    scales.clear()
    make = partial(start, tmp_path, "fp32")
    with pytest.raises(Killed):
        run(make(), fit, [kill_at(1)])
    assert_same(scales[:at], expected[:at])
    scales.clear()
    run(make(), fit)
    assert_same(scales, expected[4:])
    assert len(set(expected[4:])) > 1


def test_a_second_fit_is_no_resumed_one(tmp_path):
    """One `Checkpoint` serves several fits; each writes over what the one before wrote."""
    learn, checkpoint = start(tmp_path, "fp32"), Checkpoint("run")
    for n in (3, 2):
        one_cycle(learn, n, cbs=checkpoint)
        assert Checkpoint("run").resume(start(tmp_path, "fp32")) == n


def test_a_fit_after_a_resumed_one_trains_all_its_epochs(tmp_path):
    with pytest.raises(Killed):
        run(start(tmp_path, "fp32"), cbs=[kill_at(2)])
    learn, checkpoint, trained = start(tmp_path, "fp32"), Checkpoint("run"), []
    one_cycle(learn, start_epoch=checkpoint.resume(learn), cbs=checkpoint)
    note = Do("after_backward", lambda learn: trained.append(learn.epoch))
    one_cycle(learn, 2, cbs=[checkpoint, note])
    assert set(trained) == {0, 1}


# The file


def saved(path):
    """Return what is in the checkpoint, as torch reads it."""
    return torch.load(path / "models" / "run.pth", weights_only=True)


def write(state, path):
    """Write `state` as `Checkpoint` does, with a digest."""
    write_checkpoint(state, path / "models" / "run.pth")


@pytest.fixture(scope="module")
def after_two(tmp_path_factory):
    """A folder with a checkpoint of two epochs, for each precision."""
    folder = tmp_path_factory.mktemp("two")
    for precision in PRECISIONS:
        with pytest.raises(Killed):
            run(start(folder / precision, precision), cbs=[kill_at(2)])
    return folder


NEXT = list(zip(PRECISIONS, [*list(PRECISIONS)[1:], "fp32"], strict=True))


@pytest.mark.parametrize("precision, to", NEXT)
def test_it_is_a_file_of_learn_save(precision, to, after_two, tmp_path):
    """Weights in 32 bits, state per parameter, in any precision; `learn.load` reads it in the next.

    `tests/test_checkpoints.py` has all pairs of precisions, for files of `learn.save`.
    """
    state, learn = saved(after_two / precision), start(tmp_path, to)
    assert {v.dtype for v in state["model"].values()} == {torch.float32, torch.int64}
    learn.load(after_two / precision / "models" / "run")
    assert_same(dict(learn.model.state_dict()), dict(state["model"]))
    opt = as_python(plain(learn.opt.state_dict()))
    assert_same(opt["state"], state["opt"]["state"])
    assert_same(opt["hypers"], state["opt"]["hypers"])
    one_cycle(learn, 1)


@pytest.mark.parametrize("opt", ["adam", "torch_adamw"])
def test_plain_fastai_reads_it(opt, tmp_path):
    """A learner without any of ours, by fastai's function: model and momentum, no warning."""
    with pytest.raises(Killed):
        run(start(tmp_path, FLAT, opt=opt), cbs=[kill_at(2)])
    learn = silent(Learner(shuffled_dls(), net(), nn.CrossEntropyLoss(), tiny.OPTIMIZERS[opt]))
    learn.create_opt()
    load_model(tmp_path / "models" / "run.pth", learn.model, learn.opt)
    state = saved(tmp_path)
    assert_same(dict(learn.model.state_dict()), dict(state["model"]))
    assert_same(as_python(plain(learn.opt.state_dict()))["state"], state["opt"]["state"])
    learn.fit_one_cycle(1)


def test_a_cut_write_leaves_the_last_file(tmp_path, monkeypatch):
    """Whatever was written of the new one, the old one is read, and the rest done."""
    whole = start(tmp_path, FLAT)
    one_cycle(whole)
    expected = ends(whole)
    save = torch.save

    def cut(state, f):
        if state["opt"]["checkpoint"]["n_done"] == 3:
            f.write(b"PK half a file")
            raise OSError("No space left on device")
        save(state, f)

    monkeypatch.setattr(torch, "save", cut)
    with pytest.raises(OSError, match="No space left"):
        run(start(tmp_path, FLAT))
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["run.pth"]
    assert saved(tmp_path)["opt"]["checkpoint"]["n_done"] == 2
    assert_same(ends(run(start(tmp_path, FLAT))), expected)
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["run.pth"]


def test_every_byte_is_on_the_disk_before_the_file_has_its_name(tmp_path, monkeypatch):
    """Else a power cut could leave an empty file under the name."""
    calls = []

    def noted(name):
        f = getattr(os, name)

        def call(*args):
            files = (tmp_path / "models").glob("run.pth.*.tmp")
            calls.append((name, [file.stat().st_size for file in files]))
            return f(*args)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, noted(name))
    run(start(tmp_path, "fp32"), partial(one_cycle, n=1))
    size = (tmp_path / "models" / "run.pth").stat().st_size
    assert calls == [("fsync", [size]), ("replace", [size])]


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    be_rank(monkeypatch, 1)
    run(start(tmp_path, "fp32"), partial(one_cycle, n=1))
    assert not list((tmp_path / "models").iterdir())


def test_a_file_of_another_number_of_processes_is_said(tmp_path, caplog):
    """One process goes on with the first one's part."""
    forget_notices()
    with pytest.raises(Killed):
        run(start(tmp_path, "fp32"), cbs=[kill_at(1)])
    state = saved(tmp_path)
    state["opt"]["checkpoint"]["ranks"] = [{"random": {}, "grads": {}}]
    write(state, tmp_path)
    end = ends(run(start(tmp_path, "fp32")))
    whole = start(tmp_path, "fp32")
    one_cycle(whole)
    assert_same(end, ends(whole))
    said = [r.getMessage() for r in caplog.records]
    assert [m for m in said if "the checkpoint is of 2 process(es), and here are 1" in m] == said


# Each part of the file matters


class Uses(Callback):
    """Changes the inputs by Python's and numpy's random numbers, as augmentation does."""

    run_valid = False

    def before_batch(self):
        noise = 1 + 0.1 * random.random() + 0.1 * np.random.rand()
        self.learn.xb = (self.xb[0] * noise,)


def _other_random(name):
    def change(state):
        random.seed(7), np.random.seed(7), torch.manual_seed(7)
        dls = shuffled_dls()
        list(dls.train)
        found = state["opt"]["checkpoint"]["random"]
        found[name] = random_states(dls)[name]

    return change


def _no_momentum(state):
    for s in state["opt"]["state"]:
        s["grad_avg"].zero_()


def _no_scale(state):
    del state["opt"]["loss_scale"]


def _no_count(state):
    state["opt"]["loss_scale"]["_growth_tracker"] += 1


def _no_grads(state):
    state["opt"]["checkpoint"]["grads"] = {}


def _no_callbacks(state):
    state["opt"]["checkpoint"]["callbacks"] = []


def _rounded(state):
    for v in state["model"].values():
        v.copy_(v.half())


PARTS = {
    **{name: _other_random(name) for name in ("python", "numpy", "torch", "dls")},
    "momentum": _no_momentum,
    "scale": _no_scale,
    "growth count": _no_count,
    "gradients": _no_grads,
    "counts": _no_callbacks,
    "low bits": _rounded,
}


def of_many_parts(path):
    settings = dict(flat_master=True, loss_scale=2.0**12, growth_interval=3)
    return start(path, "fp32").to_fp16(**settings)


def uses_many_parts():
    return [Uses(), GradientAccumulation(20)]


@pytest.fixture(scope="module")
def many_parts(tmp_path_factory):
    """How a whole run ends, and the folder of one that was killed."""
    folder = tmp_path_factory.mktemp("parts")
    whole = of_many_parts(folder / "whole")
    one_cycle(whole, cbs=uses_many_parts())
    expected = ends(whole)
    with pytest.raises(Killed):
        run(of_many_parts(folder), cbs=[*uses_many_parts(), kill_at(2)])
    return expected, folder


@pytest.mark.parametrize("part", [None, *PARTS])
def test_each_part_matters(part, many_parts, tmp_path):
    """Without it the run ends in other bits; with all of them, in the same."""
    expected, folder = many_parts
    state = saved(folder)
    if part is not None:
        PARTS[part](state)
    learn = of_many_parts(tmp_path)
    (tmp_path / "models").mkdir()
    write(state, tmp_path)
    end = ends(run(learn, cbs=uses_many_parts()))
    if part is None:
        assert_same(end, expected)
    else:
        keys = ("weights", "masters", "opt")
        with pytest.raises(AssertionError):
            assert_same({k: end[k] for k in keys}, {k: expected[k] for k in keys})


@pytest.mark.parametrize("precision", ["fp32", FLAT])
def test_fastais_own_way_is_exact_where_nothing_is_random(precision, tmp_path):
    """`SaveModelCallback`, `learn.load`, `start_epoch`: no shuffling, no dropout; with it, not."""

    def train(kill, shuffle, **kwargs):
        learn = start(path, precision, without_dropout)
        learn.dls = shuffled_dls(shuffle)
        if kwargs:
            learn.load("each_1")
        cbs = [SaveModelCallback(fname="each", every_epoch=True, with_opt=True)]
        if kill:
            with pytest.raises(Killed):
                one_cycle(learn, cbs=[*cbs, kill_at(2)])
        else:
            one_cycle(learn, cbs=[] if kwargs else cbs, **kwargs)
        return {k: v for k, v in ends(learn).items() if k != "random"}

    for shuffle in (False, True):
        path = tmp_path / str(shuffle)
        whole = train(False, shuffle)
        train(True, shuffle)
        parts = train(False, shuffle, start_epoch=2)
        if shuffle:
            with pytest.raises(AssertionError):
                assert_same(parts, whole)
        else:
            assert_same(parts, whole)


# What cannot be resumed


def refuses(path, message, precision="fp16", **kwargs):
    """Check that `resume` raises `message`, and that it leaves the learner as it was."""
    learn = start(path, precision, **kwargs)
    if learn.opt is None:
        learn.create_opt()
    before = tiny.snapshot(learn)
    with pytest.raises(MixedPrecisionError, match=message):
        Checkpoint("run").resume(learn)
    assert_same(as_python(tiny.snapshot(learn)), as_python(before))


def copied(after_two, tmp_path, precision="fp16"):
    """Return the bytes of a checkpoint, and the path of a file to put them into."""
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "run.pth"
    return (after_two / precision / "models" / "run.pth").read_bytes(), file


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
def test_a_damaged_file(part, after_two, tmp_path):
    data, file = copied(after_two, tmp_path)
    file.write_bytes(data[: int(len(data) * part)])
    refuses(tmp_path, "run.pth` is damaged .*: delete it to train anew")


@pytest.mark.parametrize("with_opt", [False, True])
def test_a_file_of_learn_save(with_opt, tmp_path):
    """It does not say where the training was; the message names what reads it."""
    learn = start(tmp_path, "fp16")
    one_cycle(learn, 1)
    learn.save("run", with_opt=with_opt)
    refuses(tmp_path, r"not written by Checkpoint: learn.load\('run'\) reads")


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_that_runs_code(after_two, tmp_path):
    """A right digest does not say who has written the file: no code in it is run."""
    (tmp_path / "models").mkdir()
    state, made = saved(after_two / "fp16"), tmp_path / "made"
    write(state | {"x": Runs(str(made))}, tmp_path)
    refuses(tmp_path, "not written by Checkpoint")
    assert not made.exists()


def test_the_file_of_another_model(after_two, tmp_path):
    data, file = copied(after_two, tmp_path)
    file.write_bytes(data)
    refuses(tmp_path, "of another model: .* differ in name or shape", model=tiny.dropout_net)
    wider = nn.Sequential(*net()[:-1], nn.Linear(64, 3))
    refuses(tmp_path, "of another model: 6.weight, 6.bias", model=wider)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("opt", ["torch_adamw", "sgd"])
def test_the_file_of_another_optimizer(opt, precision, after_two, tmp_path):
    data, file = copied(after_two, tmp_path)
    file.write_bytes(data)
    refuses(tmp_path, "is of another optimizer, or of other groups", precision, opt=opt)


def test_the_file_of_another_splitter(after_two, tmp_path):
    data, file = copied(after_two, tmp_path)
    file.write_bytes(data)
    halves = dict(splitter=lambda m: [tiny.params(m[:3]), tiny.params(m[3:])])
    refuses(tmp_path, "is of another optimizer, or of other groups", **halves)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _script(Path(sys.argv[1]))
