"""A run that is killed and resumed ends in the bits of one that was not: promise 4.

Here an exception stands for the kill; `test_killed_ranks.py` kills processes.
"""

import os
import random
from contextlib import suppress
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from fastai.basics import Callback, DataLoaders
from fastai.callback.mixup import MixUp
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.text.data import LMDataLoader, LMTensorText
from tiny import Do, dropout_net, images, make_dls, make_learner, one_group, plain, three_groups
from torch import nn
from torch.utils._pytree import tree_map_only

from mixedfp.callback import MixedPrecision
from mixedfp.checkpoint import Checkpoint
from mixedfp.formats import MixedPrecisionError
from mixedfp.resume import load_checkpoint, random_states, save_checkpoint, set_random_states
from mixedfp.testing import assert_same

FP16 = dict(loss_scale=2.0**20, growth_interval=5)  # too large a scale, that soon grows again
FLAT = "fp16 flat"
PRECISIONS = {
    "fp32": ("to_fp32", {}),
    FLAT: ("to_fp16", FP16 | dict(flat_master=True)),
    "bf16": ("to_bf16", {}),
    "bf16 state": ("to_bf16", dict(flat_master=True, state_dtype={"sqr_avg": torch.bfloat16})),
}
one_cycle = lambda learn, n=3, **how: learn.fit_one_cycle(n, 0.02, **how)  # noqa: E731
steady = lambda learn, n=3, **how: learn.fit(n, 0.02, wd=0.1, **how)  # noqa: E731
# it drops `start_epoch` on its way
flat_cos = lambda learn, **how: learn.fit_flat_cos(3, 0.02, pct_start=0.25, **how)  # noqa: E731


def shuffled_dls():
    random.seed(5)
    return make_dls(*images(40), shuffle=True)


def start(path, precision=FLAT, opt="adam", model=dropout_net, dls=shuffled_dls, split=one_group,
          freeze=0, **mixed):  # fmt: skip
    """Return the learner of a script, the same at each of its starts."""
    to, settings = PRECISIONS[precision]
    learn = make_learner(opt, model, split, dls=dls(), path=path)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    getattr(learn, to)(**settings | mixed)
    learn.freeze_to(freeze)
    return learn


def run(learn, fit=one_cycle, cbs=()):
    """Do what a script does: resume, and fit."""
    checkpoint = Checkpoint("run")
    fit(learn, start_epoch=checkpoint.resume(learn), cbs=[checkpoint, *cbs])
    return learn


class Killed(Exception):
    """What stands for a signal where no process is to die."""


def kill(is_now):
    """Kill in the middle of the epoch for which `is_now` is true."""

    def at(learn):
        if learn.training and learn.iter == 2 and is_now(learn.epoch):
            raise Killed

    return Do("before_batch", at, order=90)


def killed_run(path, at=2, fit=one_cycle, cbs=(), **kwargs):
    with pytest.raises(Killed):
        run(start(path, **kwargs), fit, [*cbs, kill(lambda epoch: epoch == at)])


def ends(learn):
    """Return copies of everything that training changes."""
    found = dict(learn.model.named_parameters()) | dict(learn.model.named_buffers())
    found |= {"weights": dict(learn.model.state_dict()), "opt": learn.opt.state_dict()}
    found["grads"] = [p.grad for p in learn.model.parameters()]
    found["train_iter"] = vars(learn).get("train_iter")
    found["random"] = [random.random(), float(np.random.rand()), torch.rand(2)]
    if "mp_cb" in vars(learn):
        found["scaler"] = learn.mp_cb.mixed.scaler.state_dict()
    return with_numbers_of_python(found)


def with_numbers_of_python(o):
    return tree_map_only(np.generic, np.generic.item, plain(o))


class Now(nn.Module):
    """A net with a layer that is used in the first epoch only."""

    def __init__(self):
        super().__init__()
        self.body, self.early, self.head = dropout_net()[:-1], nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("n", torch.tensor(0))

    def forward(self, x):
        x, self.n = self.body(x), self.n + self.training
        return self.head(x + self.early(x) if self.n <= 4 else x)


def text_dls():
    """Return texts of numbers, whose order each epoch shuffles further."""
    random.seed(5)
    texts = [LMTensorText(torch.arange(i, i + 20) % 16) for i in range(12)]
    dls = [LMDataLoader(texts, bs=4, seq_len=5, shuffle=True, device="cpu") for _ in range(2)]
    return DataLoaders(*dls, device="cpu")


class Uses(Callback):
    """Draws random numbers wherever it can, and changes the inputs by them."""

    def _draw(self):
        random.random(), np.random.rand(), torch.rand(1)

    before_fit = before_epoch = before_train = before_validate = after_epoch = _draw

    def before_batch(self):
        if self.training:
            noise = 1 + 0.1 * random.random() + 0.1 * np.random.rand()
            self.learn.xb = (self.xb[0] * noise,)


WORDS = lambda: nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))  # noqa: E731
CASES = {  # settings of `start`; `fit` and `cbs` of `run`
    **{name: dict(precision=name) for name in PRECISIONS},
    "flat_cos": dict(fit=flat_cos, cbs=lambda: [MixUp()]),
    "reset_opt": dict(fit=partial(one_cycle, reset_opt=True)),
    "ranger": dict(opt="ranger"),
    "torch_adamw": dict(opt="torch_adamw"),
    "larc": dict(opt="larc"),
    "frozen": dict(split=three_groups, freeze=-2),
    "tied, unused": dict(model=Now, fit=steady),  # a gradient of zeros is not None
    "for one fit": dict(precision="fp32", cbs=lambda: [MixedPrecision(flat_master=True, **FP16)]),
    "layer scales": dict(layer_scales={"4": 8.0}),
    "language model": dict(model=WORDS, dls=text_dls),
    "accumulation": dict(fit=steady, cbs=lambda: [GradientAccumulation(20), GradientClip(0.1)]),
    "random": dict(cbs=lambda: [Uses()]),
    "the best": dict(cbs=lambda: [SaveModelCallback(fname="best", with_opt=True)]),
    "plateau": dict(fit=steady, cbs=lambda: [ReduceLROnPlateau(min_delta=10, factor=2)]),
    "early": dict(fit=partial(steady, n=8), cbs=lambda: [EarlyStoppingCallback(patience=3)]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_way_to_train(case, tmp_path):
    """Schedules, optimizers, frozen and unused layers, callbacks that count or draw numbers."""
    case = dict(CASES[case])
    fit, cbs = case.pop("fit", one_cycle), case.pop("cbs", list)
    whole = start(tmp_path / "whole", **case)
    fit(whole, cbs=[Checkpoint(), *cbs()])
    expected = ends(whole)
    for at in (1, 2):
        killed_run(tmp_path, at, fit, cbs(), **case)
    parts = run(start(tmp_path, **case), fit, cbs())
    assert_same(ends(parts), expected)
    assert parts.epoch == whole.epoch


def test_what_happens_between_does_not_count(tmp_path):
    """Predictions, a look at a batch, a learning rate sought, random numbers, another precision."""
    whole = start(tmp_path)
    one_cycle(whole, cbs=Checkpoint("whole"))
    expected = ends(whole)
    killed_run(tmp_path)
    learn, checkpoint = start(tmp_path, "fp32"), Checkpoint("run")
    learn.add_cb(checkpoint)
    done = checkpoint.resume(learn)
    learn.validate()
    learn.dls.one_batch()
    random.random(), np.random.rand(5), torch.rand(5)
    learn.to_fp16(flat_master=True, **FP16)
    before = (tmp_path / "models/run.pth").read_bytes()
    learn.lr_find(num_it=6, show_plot=False, suggest_funcs=None)
    learn.get_preds()
    assert (tmp_path / "models/run.pth").read_bytes() == before
    one_cycle(learn, start_epoch=done)
    assert_same(ends(learn), expected)


def test_a_finished_run_trains_nothing_and_a_second_fit_all_its_epochs(tmp_path):
    end, trained = ends(run(start(tmp_path))), []
    learn, checkpoint = start(tmp_path), Checkpoint("run")
    note = Do("after_backward", lambda learn: trained.append(learn.epoch))
    one_cycle(learn, start_epoch=checkpoint.resume(learn), cbs=[checkpoint, note])
    assert not trained
    assert_same(dict(learn.model.state_dict()), end["weights"])
    one_cycle(learn, 2, cbs=[checkpoint, note])
    assert set(trained) == {0, 1} and Checkpoint("run").resume(start(tmp_path)) == 3


def several_fits(path, *cbs):
    """Fit by two objects of one name; what is between the fits does not count."""
    learn = start(path, split=three_groups)
    for checkpoint in (Checkpoint("run"), Checkpoint("run")):
        done = checkpoint.resume(learn)
        learn.fine_tune(1, 0.02, freeze_epochs=1, start_epoch=done, cbs=[checkpoint, *cbs])
        learn.validate(), learn.get_preds()
        learn.lr_find(num_it=4, show_plot=False, suggest_funcs=None)
        torch.manual_seed(0), random.random()
    done = checkpoint.resume(learn)
    steady(learn, 1)  # without the callback
    learn.fit_sgdr(2, 1, 0.02, start_epoch=done, cbs=[checkpoint, *cbs])
    return learn


@pytest.mark.parametrize("cbs", [list, lambda: [MixUp()]], ids=["plain", "mixup"])
def test_no_epoch_of_several_fits_is_lost(cbs, tmp_path):
    """Each start trains one epoch, and is killed in the next; the last ends as an unbroken run."""
    whole, n_starts, learn = ends(several_fits(tmp_path / "whole", *cbs())), 0, None
    while learn is None:
        n_starts, n_epochs = n_starts + 1, count(1)
        with suppress(Killed):
            second = kill(lambda _, n_epochs=n_epochs: next(n_epochs) == 2)
            learn = several_fits(tmp_path / "run", *cbs(), second)
    assert n_starts == 7
    assert_same(ends(learn), whole)


def test_other_fits_than_those_of_the_file_are_refused(tmp_path):
    with pytest.raises(Killed):
        learn, checkpoint = start(tmp_path), Checkpoint("run")
        one_cycle(learn, 2, cbs=checkpoint)
        one_cycle(learn, 3, cbs=[checkpoint, kill(lambda epoch: epoch == 1)])
    learn, checkpoint = start(tmp_path), Checkpoint("run")
    done = checkpoint.resume(learn)
    before = ends(learn)
    with pytest.raises(MixedPrecisionError, match="fit 1 of the run in .* has 2 epochs"):
        steady(learn, start_epoch=done, cbs=checkpoint)
    assert_same(ends(learn)["weights"], before["weights"])


@pytest.fixture(scope="module")
def after_two(tmp_path_factory):
    """The checkpoint of two epochs in flat float16."""
    killed_run(folder := tmp_path_factory.mktemp("two"))
    return folder / "models/run.pth"


def test_plain_fastai_reads_it(after_two, tmp_path):
    """Weights in 32 bits and a state per parameter, in the file of a flat float16 Learner."""
    state = torch.load(after_two, weights_only=True)
    assert {v.dtype for v in state["model"].values()} == {torch.float32, torch.int64}
    learn = start(tmp_path, "fp32")
    learn.load(after_two.with_suffix(""))
    assert_same(dict(learn.model.state_dict()), dict(state["model"]))
    assert_same(with_numbers_of_python(learn.opt.state_dict())["state"], state["opt"]["state"])
    one_cycle(learn, 1)


def test_every_byte_is_on_the_disk_before_the_file_has_its_name(tmp_path, monkeypatch):
    """Else a power cut could leave an empty file under the name."""
    calls = []

    def note(name, f, *args):
        calls.append((name, [part.stat().st_size for part in tmp_path.iterdir()]))
        return f(*args)

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, partial(note, name, getattr(os, name)))
    save_checkpoint({"x": torch.ones(100)}, tmp_path / "s.pth")
    size = (tmp_path / "s.pth").stat().st_size
    assert calls == [("fsync", [size]), ("replace", [size])]


def test_two_runs_with_one_name_do_not_disturb_each_other(tmp_path, monkeypatch):
    """One writes while the other does: the last wins. Only parts of dead runs are removed."""
    file, own, states = tmp_path / "s.pth", os.fsync, iter([{"epoch": 2}])

    def fsync(fd):
        for state in states:
            save_checkpoint(state, file)
            assert load_checkpoint(file) == {"epoch": 2}
        own(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    old, young = (tmp_path / f"s.pth.{name}.tmp" for name in ("old", "young"))
    young.touch(), old.touch()
    os.utime(old, (0, 0))
    save_checkpoint({"epoch": 1}, file)
    assert load_checkpoint(file) == {"epoch": 1} and set(tmp_path.iterdir()) == {file, young}


def _learn_save(file, to):
    learn = start(to.parent.parent)
    learn.create_opt()
    learn.save("run")


def _put(key, value, message="or not by Checkpoint"):
    """Refuse a file whose checksums are right, with another value at `key`."""

    def make(file, to):
        state = part = load_checkpoint(file)
        *inner, last = key.split("/")
        for name in inner:
            part = part[int(name) if isinstance(part, list) else name]
        part[last] = value
        save_checkpoint(state, to)

    return make, {}, message


_whole = lambda file, to: to.write_bytes(file.read_bytes())  # noqa: E731
_cut = lambda file, to: to.write_bytes(file.read_bytes()[:-1])  # noqa: E731
REFUSED = {  # how the file is made, settings of the learner, the message
    "empty": (lambda file, to: to.touch(), {}, "is damaged"),
    "cut": (_cut, {}, "is damaged"),
    "of learn.save": (_learn_save, {}, "learn.load reads the files of learn.save"),
    "code": _put("x", os.mkdir, "Python objects"),
    "something else": (lambda file, to: save_checkpoint({}, to), {}, "or not by Checkpoint"),
    "another model": (_whole, dict(model=Now), "saved with a different model or opt"),
    "another optimizer": (_whole, dict(opt="torch_adamw"), "number of parameters differ"),
    "other groups": (_whole, dict(split=three_groups), "group 1, group 2 differ"),
    "not a dict": _put("opt", 3),
    "a random state": _put("opt/checkpoint/ranks/0/random/torch", torch.ones(2)),
    "a scale": _put("opt/loss_scale", {"scale": -1.0}),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("precision", ["fp32", FLAT])
def test_a_refused_file_changes_nothing(precision, kind, after_two, tmp_path):
    make, settings, message = REFUSED[kind]
    (tmp_path / "models").mkdir()
    make(after_two, tmp_path / "models/run.pth")
    learn = start(tmp_path, precision, **settings)
    learn.create_opt()
    random_before, before = random_states(learn.dls), ends(learn)
    set_random_states(random_before, learn.dls)
    with pytest.raises(MixedPrecisionError, match=message):
        Checkpoint("run").resume(learn)
    assert_same(ends(learn), before)


@pytest.mark.parametrize("name", [None, "", "folder", "file/run", "x" * 300])
def test_a_place_that_cannot_be_written_is_refused_before_training(name, tmp_path):
    (tmp_path / "models/folder.pth").mkdir(parents=True)
    (tmp_path / "models/file").touch()
    trained = []
    with pytest.raises((ValueError, OSError)):
        one_cycle(start(tmp_path), cbs=[Checkpoint(name), Do("after_batch", trained.append)])
    assert not trained


def test_gradients_of_a_scaled_run_are_resumed_unscaled_in_float32(tmp_path):
    grads, model = [], lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 2))

    def look(learn):
        grads.append([p.grad.clone() for p in learn.model.parameters()])
        raise Killed

    for precision, settings in (("fp32", {}), (FLAT, dict(loss_scale=2.0**10))):
        path, cbs = tmp_path / precision, [GradientAccumulation(20)]
        path.mkdir()
        killed_run(path, 2, steady, cbs, model=model, precision=precision, **settings)
        with pytest.raises(Killed):
            cbs.append(Do("before_batch", look, order=90))
            run(start(path, "fp32", model=model), steady, cbs)
    for true, g in zip(*grads, strict=True):
        assert true.abs().max() > 0
        torch.testing.assert_close(g, true, rtol=0.02, atol=0.02 * true.abs().max().item())


def test_a_flipped_bit_loads_the_same_state_or_is_one_kind_of_error(tmp_path):
    state = {"weight": torch.arange(8.0), "n": 3}
    path = tmp_path / "file.pth"
    save_checkpoint(state, path)
    data, n_refused = path.read_bytes(), 0
    for i in range(len(data)):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :])
        try:
            assert_same(load_checkpoint(path), state)
        except MixedPrecisionError:
            n_refused += 1
    assert n_refused > len(data) / 3
