"""Faults that were found in files, refusals, several processes and skorch, by their numbers."""

import copy
import errno
import io
import os
import pickle
import random
import subprocess
import sys
import time
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ranks as ranks_module
import tiny
import torch
from fastai.optimizer import SGD
from inside import (
    average_over_ranks,
    holds_a_file,
    masters_by_param,
    take_from_first,
    write_checkpoint,
)
from ranks import on_two_ranks
from sklearn.base import clone
from skorch import NeuralNetClassifier
from skorch.callbacks import Checkpoint as SkorchCheckpoint
from skorch.callbacks import GradientNormClipping
from tiny import make_dls, make_learner, pictures
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from mixedfp.checkpoint import Checkpoint
from mixedfp.formats import MixedPrecisionError
from mixedfp.scaler import LossScaler
from mixedfp.skorch import MixedPrecisionMixin
from mixedfp.step import MixedStep
from mixedfp.testing import assert_same

# 3.11: damaged checkpoints


def learner(path, **kwargs):
    """Return the learner of a script, the same at each start, with a loss scale."""
    return make_learner("adam", tiny.conv_net, path=path).to_fp16(loss_scale=64.0, **kwargs)


@pytest.fixture
def written(tmp_path):
    """The path of a checkpoint of one epoch."""
    learner(tmp_path).fit(1, 0.01, cbs=Checkpoint("run"))
    return tmp_path / "models" / "run.pth"


def sign(state, path):
    """Write `state` as `Checkpoint` does: a file whose bytes are those that were written."""
    write_checkpoint(state, path)


def flips(data):
    """Yield copies of `data` with one flipped bit: in every region, and in each record."""
    infos = zipfile.ZipFile(io.BytesIO(data)).infolist()
    starts = [info.header_offset for info in infos]
    inside = [info.header_offset + 100 + info.file_size // 2 for info in infos]
    even = [len(data) * i // 40 for i in range(40)]
    end = [len(data) - 1 - i for i in range(0, 120, 7)]
    for at in {*starts[::8], *inside[::4], *even, *end, 0}:
        bad = bytearray(data)
        bad[min(at, len(data) - 1)] ^= 1 << at % 8
        yield f"bit {at % 8} of byte {at}", bytes(bad)


def cuts(data):
    """Yield copies of `data` that are cut, lengthened, or with a piece in another place."""
    for n in [0, 1, 3, 30, *(len(data) * i // 20 for i in range(1, 20)), len(data) - 1]:
        yield f"{n} bytes", data[:n]
    for n in (1, 22, 81, 100):
        yield f"without the last {n}", data[:-n]
        yield f"without the first {n}", data[n:]
    half = len(data) // 2
    yield "a byte more", data + b"\0"
    yield "twice", data + data
    yield "halves exchanged", data[half:] + data[:half]
    yield "a page of zeros", data[:4096] + bytes(4096) + data[8192:]
    yield "a page twice", data[:8192] + data[4096:8192] + data[12288:]
    yield "zeros", bytes(len(data))
    yield "text", b"not a checkpoint\n" * 100


def zipped_anew(data):
    """Yield zip files with records replaced, exchanged, left out; the tool repairs all sums."""
    source = zipfile.ZipFile(io.BytesIO(data))
    records = {info.filename: source.read(info) for info in source.infolist()}
    tensors = [name for name in records if "/data/" in name]
    for name in tensors[:8]:
        other = next(n for n in tensors if len(records[n]) == len(records[name]) and n != name)
        exchanged = records | {name: records[other], other: records[name]}
        yield f"{name} exchanged with {other}", exchanged
        yield f"{name} of zeros", records | {name: bytes(len(records[name]))}
        yield f"no {name}", {k: v for k, v in records.items() if k != name}
    pickled = next(name for name in records if name.endswith("data.pkl"))
    for old, new in [(b"hypers", b"hyperS"), (b"n_done", b"n_dona"), (b"weight", b"weighs")]:
        yield f"{old} is {new}", records | {pickled: records[pickled].replace(old, new)}
    yield "no pickle", {k: v for k, v in records.items() if k != pickled}


def as_zip(records):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        for name, data in records.items():
            target.writestr(name, data)
    return file.getvalue()


def edited(state):
    """Yield states of wrong types and wrong numbers."""

    def other(where, key, value):
        new = copy.deepcopy(state)
        at = new
        for k in where:
            at = at[k]
        if value is None:
            del at[key]
        else:
            at[key] = value
        return f"{'.'.join([*where, key])}: {value!r}"[:80], new

    saved = ("opt", "checkpoint")
    for value in (float("nan"), float("inf"), 0.0, -1.0, "64", [64.0]):
        yield other(("opt", "loss_scale"), "scale", value)
    for value in ("one", 1.0, [1], None):
        yield other(saved, "n_done", value)
    for key, value in [("random", [1]), ("grads", None), ("callbacks", {}), ("train_iter", "4")]:
        yield other(saved, key, value)
    for where, key, value in [
        ((), "model", None), ((), "opt", None), ((), "model", [1]), ((), "opt", [1]), ((), "x", 1),
        (("opt",), "checkpoint", 1), (("opt",), "hypers", None), (("opt",), "hypers", [1]),
        (("opt",), "state", 1), (("model",), "0.weight", 1), (("model",), "0.weight", None),
        (("model",), "more", torch.ones(1)), (("opt",), "loss_scale", 3.0),
    ]:  # fmt: skip
        yield other(where, key, value)


def everything(learn):
    """Return copies of what a checkpoint could change."""
    scale, rates = learn.opt.scaler.state_dict(), [dict(h) for h in learn.opt.hypers]
    states = torch.get_rng_state(), random.getstate()
    return tiny.weights(learn), tiny.plain(learn.opt.state_dict()["state"]), scale, rates, states


def test_3_11_a_damaged_file_is_one_error_and_changes_nothing(written, tmp_path):
    """Some 200 variants: flipped bits, cuts, exchanged records, wrong types, a scale of nan."""
    data = written.read_bytes()
    state = torch.load(written, weights_only=True)
    files = [*flips(data), *cuts(data), *((k, as_zip(v)) for k, v in zipped_anew(data))]
    files = [(name, bad) for name, bad in files if bad != data]
    for i, (name, bad) in enumerate(edited(state)):
        path = tmp_path / f"edited{i}.pth"
        torch.save(bad, path)  # without a digest
        files.append((f"{name}, written by torch.save", path.read_bytes()))
        sign(bad, path)
        files.append((f"{name}, with a digest", path.read_bytes()))
    assert len(files) > 150
    learn, wrong = learner(tmp_path), []
    learn.fit(1, 0.01)  # moments, a scale and gradients of its own
    before = everything(learn)
    for name, bad in files:
        written.write_bytes(bad)
        try:
            Checkpoint("run").resume(learn)
            wrong.append((name, "is taken"))
        except MixedPrecisionError as e:
            if f"{written}" not in str(e):
                wrong.append((name, str(e)))
            if name.startswith("bit") and "is damaged" not in str(e):
                wrong.append((name, str(e)))
        except Exception as e:
            wrong.append((name, repr(e)))
        try:
            assert_same(everything(learn), before)
        except AssertionError:
            wrong.append((name, "has changed the learner"))
            break
    assert not wrong, f"{len(wrong)} of {len(files)}: {wrong}"
    written.write_bytes(data)
    assert Checkpoint("run").resume(learn) == 1


def test_3_11_the_digest_is_in_the_file_and_others_read_it(written, tmp_path):
    """A zip comment: torch reads it with `weights_only=True`, mapped or not, and so does a zip."""
    assert zipfile.ZipFile(written).comment.startswith(b"mixedfp blake2b ")
    assert zipfile.ZipFile(written).testzip() is None
    one = torch.load(written, weights_only=True)
    two = torch.load(written, weights_only=True, mmap=True)
    assert_same(dict(one["model"]), dict(two["model"]))
    assert [p.name for p in written.parent.iterdir()] == ["run.pth"]  # no second file
    make_learner("adam", tiny.conv_net, path=tmp_path).load("run")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
def test_3_11_an_os_error_is_itself(number, written, tmp_path, monkeypatch):
    """Too many open files say nothing about this one: nobody is to delete it."""
    learn = learner(tmp_path)

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(torch, "load", fail)
    monkeypatch.setattr("builtins.open", fail)
    with pytest.raises(OSError, match=os.strerror(number)) as e:
        Checkpoint("run").resume(learn)
    assert e.value.errno == number


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0.0, -2.0, "8", None])
def test_3_11_no_scaler_takes_such_a_scale(scale, tmp_path):
    """From any file: of a loop by hand, of `learn.save`."""
    scaler = LossScaler("cpu", init_scale=8.0)
    before = scaler.state_dict()
    with pytest.raises((TypeError, ValueError), match="scale"):
        scaler.load_state_dict(before | {"scale": scale})
    assert scaler.state_dict() == before
    learn = learner(tmp_path)
    learn.fit(1, 0.01)
    state = copy.deepcopy(learn.opt.state_dict())
    state["loss_scale"]["scale"] = scale
    for s in state["state"]:
        s["grad_avg"].zero_()
    before = tiny.snapshot(learn)
    with pytest.raises((TypeError, ValueError), match="scale"):
        learn.opt.load_state_dict(state)
    assert_same(tiny.snapshot(learn), before)


# 5: a file that runs code


class Marks:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_5_a_file_that_runs_code(written, tmp_path):
    """With a right digest as well, which says nothing about who wrote the file."""
    state, made = torch.load(written, weights_only=True), tmp_path / "made"
    state["opt"]["checkpoint"]["x"] = Marks(made)
    sign(state, written)
    with pytest.raises(MixedPrecisionError, match="not written by Checkpoint"):
        Checkpoint("run").resume(learner(tmp_path))
    assert not made.exists()


def test_5_the_batches_are_counted_on(tmp_path):
    """`train_iter` of a resumed run is that of an unbroken one, in each batch."""
    seen = []
    note = tiny.Do("after_backward", lambda learn: seen.append(learn.train_iter))
    learner(tmp_path / "whole").fit(3, 0.01, cbs=note)
    expected = seen.copy()
    learner(tmp_path).fit(2, 0.01, cbs=Checkpoint("run"))
    seen.clear()
    learn, checkpoint = learner(tmp_path), Checkpoint("run")
    done = checkpoint.resume(learn)
    learn.fit(3, 0.01, start_epoch=done, cbs=[checkpoint, note])
    assert done == 2 and seen == expected[-4:] and seen[0] == 8


def test_5_a_search_for_a_rate_after_resume_skips_nothing(tmp_path):
    """Without accumulation as well: `lr_find` goes through all its rates."""

    def rates(learn):
        learn.lr_find(num_it=20, show_plot=False, suggest_funcs=None, stop_div=False)
        return list(map(float, learn.recorder.lrs))

    learner(tmp_path).fit(2, 0.01, cbs=Checkpoint("run"))
    whole, learn, checkpoint = learner(tmp_path), learner(tmp_path), Checkpoint("run")
    learn.add_cb(checkpoint)
    assert checkpoint.resume(learn) == 2
    assert rates(learn) == rates(whole)


def test_3_11_groups_that_are_cut_elsewhere_are_told_as_all_else_is(tmp_path):
    """As many groups of one of PyTorch's optimizers, and other layers in them."""

    def learner_in_halves(cut):
        def halves(model):
            return [tiny.params(model[:cut]), tiny.params(model[cut:])]

        return make_learner("torch_adamw", tiny.conv_net, path=tmp_path, splitter=halves).to_bf16()

    learner_in_halves(1).fit(1, cbs=Checkpoint("run"))
    assert Checkpoint("run").resume(learner_in_halves(1)) == 1
    with pytest.raises(MixedPrecisionError, match="of another optimizer, or of other groups"):
        Checkpoint("run").resume(learner_in_halves(4))


# 2.18: two runs with one name


OTHER_RUN = """
import fcntl, os, shutil, sys
beside = sys.argv[1] + ".x.tmp"
shutil.copy(sys.argv[1], beside)
file = open(beside, "r+b")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
os.replace(beside, sys.argv[1])
print("written", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_run(written):
    """A process that has written the checkpoint, and lives; without torch, it starts at once."""
    pytest.importorskip("fcntl", reason="a system with locks that end with their process")
    args = [sys.executable, "-c", OTHER_RUN, str(written)]
    process = subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"written\n"
    yield process
    process.kill()
    process.wait()


def is_free(path):
    """Return whether another process could lock the file."""
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1]), fcntl.LOCK_SH | fcntl.LOCK_NB)"
    args = [sys.executable, "-c", code, str(path)]
    return subprocess.run(args, capture_output=True, check=False).returncode == 0


def test_2_18_a_run_holds_its_file_while_it_trains(written, tmp_path):
    """From its first write until the end of the fit, whatever ends it."""
    pytest.importorskip("fcntl")
    free = []
    look = tiny.Do(
        "after_epoch", lambda _: free.append(is_free(written)), order=110, training=False
    )
    learner(tmp_path).fit(1, 0.01, cbs=[Checkpoint("run"), look])
    assert free == [False] and is_free(written)


def test_2_18_a_run_whose_learner_keeps_the_callback_holds_its_file_no_longer(written, tmp_path):
    """`Learner(cbs=...)` does not remove it after a fit, and the notebook lives on."""
    pytest.importorskip("fcntl")
    learn = learner(tmp_path).add_cb(Checkpoint("run"))
    learn.fit(1, 0.01)
    assert is_free(written)


def test_2_18_the_second_run_is_told_until_the_first_is_dead(other_run, written, tmp_path):
    """At `resume` and before the first batch; after `kill -9` nothing stands in the way."""
    before = written.read_bytes()
    learn, trained = learner(tmp_path), []
    count = tiny.Do("after_backward", lambda learn: trained.append(learn.iter))
    with pytest.raises(MixedPrecisionError, match="written by another run: give each run a name"):
        Checkpoint("run").resume(learn)
    with pytest.raises(MixedPrecisionError, match="written by another run"):
        learn.fit(1, 0.01, cbs=[Checkpoint("run"), count])
    assert not trained and written.read_bytes() == before
    learn.fit(1, 0.01, cbs=Checkpoint("another"))
    other_run.kill()
    other_run.wait()
    assert Checkpoint("run").resume(learn) == 1
    learn.fit(1, 0.01, cbs=[Checkpoint("run"), count])
    assert trained and written.read_bytes() != before


def test_2_18_a_file_that_another_has_written_is_not_written_over(tmp_path):
    """Where no lock tells: of another callback with the same name, or a file system without."""

    def save(learn):
        if learn.epoch == 1:
            learn.save("run")

    with pytest.raises(MixedPrecisionError, match="was written over, by another run or another"):
        learner(tmp_path).fit(
            3, 0.01, cbs=[Checkpoint("run"), tiny.Do("after_epoch", save, training=False)]
        )


def test_2_18_a_checkpoint_of_another_run_since_resume(written, tmp_path):
    """The file is read twice: the random states are to be those of the weights."""
    learn, checkpoint = learner(tmp_path), Checkpoint("run")
    done = checkpoint.resume(learn)
    state = torch.load(written, weights_only=True)
    state["opt"]["checkpoint"]["n_done"] = 3
    sign(state, written)
    with pytest.raises(MixedPrecisionError, match="by another run meanwhile"):
        learn.fit(4, 0.01, start_epoch=done, cbs=checkpoint)


def test_2_18_each_write_has_a_temporary_name_of_its_own(written, monkeypatch):
    """One that is shared is written by two at once: a broken file, or none."""
    names, replace = [], os.replace

    def noted(old, new):
        names.append(old)
        replace(old, new)

    monkeypatch.setattr(os, "replace", noted)
    for i in range(3):
        sign({"x": i}, written)
    assert len(set(map(str, names))) == 3
    assert all(Path(name).parent == written.parent for name in names)
    assert torch.load(written)["x"] == 2
    (written.parent / "plain").write_bytes(b"")  # not for its owner alone, as `tempfile`'s are
    assert written.stat().st_mode == (written.parent / "plain").stat().st_mode


def test_2_18_what_killed_runs_leave_is_deleted_and_nothing_else(written, tmp_path):
    """A temporary file of a dead process; not one that is being written, not another run's."""
    dead = written.with_name("run.pth.0123abcd.tmp")
    others = [written.with_name(n) for n in ("run2.pth.0123abcd.tmp", "run.tmp", "run.pth.txt")]
    for file in (dead, *others):
        file.write_bytes(b"half a file")
    learner(tmp_path).fit(1, 0.01, cbs=Checkpoint("run"))
    assert not dead.exists() and all(file.exists() for file in others)


def test_2_18_what_another_run_is_writing_is_not_deleted(written, tmp_path):
    """It could not rename its file: that run would end."""
    pytest.importorskip("fcntl")
    file = written.with_name("run.pth.0123abcd.tmp")
    file.write_bytes(b"half a file")
    code = "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX); "
    code += "print('locked', flush=True); sys.stdin.read()"
    args = [sys.executable, "-c", code, str(file)]
    with subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"locked\n"
        learner(tmp_path).fit(1, 0.01, cbs=Checkpoint("run"))
        assert file.exists()


def test_2_18_a_failed_write_leaves_nothing(written, monkeypatch):
    """A full disk: the file of before, and no half of a new one."""
    before = written.read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        sign({"x": 1}, written)
    assert written.read_bytes() == before
    assert [p.name for p in written.parent.iterdir()] == ["run.pth"]


def test_2_18_an_interrupted_run_lets_go(written, tmp_path):
    """In a notebook the process lives on, and another one may resume."""

    def stop(learn):
        raise KeyboardInterrupt

    learn, checkpoint = learner(tmp_path), Checkpoint("run")
    with pytest.raises(KeyboardInterrupt):
        learn.fit(2, 0.01, cbs=[checkpoint, tiny.Do("before_validate", stop, training=False)])
    assert not holds_a_file(checkpoint)
    copies = tiny.Do("after_epoch", partial(_copies, checkpoint), order=110, training=False)
    learn.fit(1, 0.01, cbs=[checkpoint, copies])
    assert not holds_a_file(checkpoint)


def _copies(checkpoint, learn):
    copy.deepcopy(checkpoint)  # an open file cannot be copied, a callback can


# 1.2: two processes of a test


def sleep(rank):
    time.sleep(300)


def die(rank):
    if rank == 1:
        os._exit(3)
    distributed.barrier()


def fail(rank):
    if rank == 1:
        raise ZeroDivisionError("the reason")
    distributed.barrier()


def test_1_02_the_result_says_that_the_time_ran_out(tmp_path, monkeypatch):
    """Not that a file is missing."""
    monkeypatch.setattr(ranks_module, "SECONDS", 0.5)
    with pytest.raises(TimeoutError, match=r"the time ran out after 0.5 s"):
        on_two_ranks(sleep, tmp_path, ("tiny", "test_faults_files"))


@pytest.mark.parametrize("how, said", [(die, "rank 1: .* ended with 3"), (fail, "the reason")])
def test_1_02_a_process_that_ends_is_not_waited_for(how, said, tmp_path):
    """The other is ended as well, and what is raised says why."""
    with pytest.raises(RuntimeError, match=said):
        on_two_ranks(how, tmp_path, ("tiny", "test_faults_files"))


# 3.13: refusals at once


def test_3_13_a_refused_file_leaves_the_rate(written):
    """The file is compared with an optimizer, and fastai takes the rate of one that names it."""
    learn = make_learner(partial(SGD, lr=0.5), tiny.conv_net, path=written.parents[1]).to_fp16()
    before = learn.lr
    with pytest.raises(MixedPrecisionError, match="is of another optimizer"):
        Checkpoint("run").resume(learn)
    assert learn.opt is None and learn.lr == before != 0.5


@pytest.mark.parametrize("name", ["a/b/c", "", ".", "a/", 3, None, "x" * 300])
def test_3_13_a_name_that_cannot_be_written(name, tmp_path):
    """Before the first batch, and in `resume`; not after the first epoch."""
    learn, trained = learner(tmp_path), []
    before = tiny.weights(learn)
    count = tiny.Do("after_backward", lambda learn: trained.append(learn.iter))
    with pytest.raises((TypeError, ValueError, OSError)) as e:
        learn.fit(1, 0.01, cbs=[Checkpoint(name), count])
    assert "fname" in str(e.value) or isinstance(e.value, OSError)
    assert not trained
    assert_same(tiny.weights(learn), before)
    (tmp_path / "models" / "sub").mkdir(parents=True)
    learn.fit(1, 0.01, cbs=[Checkpoint(Path("sub/run")), count])
    assert Checkpoint("sub/run").resume(learner(tmp_path)) == 1 and trained


NONSENSE = [
    ("flat_master", "no"), ("flat_master", 2), ("flat_master", None), ("compiled", "yes"),
    ("compiled", 1.0), ("native", "false"), ("dynamic", "no"), ("enabled", "off"),
    ("layer_scales", 2.0), ("layer_scales", ["0"]),
    ("layer_scales", {"0": "big"}), ("layer_scales", {"0": -1.0}),
    ("layer_scales", {"0": float("nan")}), ("init_scale", "8"),
]  # fmt: skip


@pytest.mark.parametrize("name, value", NONSENSE, ids=str)
def test_3_13_a_setting_without_sense_is_refused_at_once(name, value, tmp_path):
    """What came and what is expected are named; a learner in 16 bits is left as it was."""
    learn = make_learner("adam", tiny.conv_net, path=tmp_path).to_bf16()
    learn.fit(1, 0.01)
    before, callback = tiny.bits(learn), learn.mp_cb
    with pytest.raises((TypeError, ValueError), match=f"`{name}.*: expected"):
        learn.to_fp16(**{name: value})
    assert learn.mp_cb is callback
    assert_same(tiny.bits(learn), before)
    if name not in ("dynamic", "enabled", "init_scale"):
        with pytest.raises((TypeError, ValueError), match=f"`{name}.*: expected"):
            MixedStep(**{name: value})
    elif name != "init_scale":
        with pytest.raises(TypeError, match=f"`{name}.*: expected"):
            LossScaler("cpu", **{name: value})


def test_3_13_two_first_scales_and_a_foreign_scaler():
    """One name would win in silence; PyTorch's scaler would fail in the first batch."""
    with pytest.raises(ValueError, match="`loss_scale` is 8.0 and `init_scale` is 16.0"):
        make_learner().to_fp16(8.0, init_scale=16.0)
    with pytest.raises(TypeError, match="`scaler` is .*expected a mixedfp.scaler.LossScaler"):
        MixedStep(scaler=torch.amp.GradScaler("cpu"))


def test_numpys_true_is_true():
    """A search over settings hands in numpy's numbers."""
    assert make_learner().to_fp16(flat_master=np.True_, compiled=np.False_).mp_cb.mixed.flat_master


# 3.12 and 5: skorch


class Net(MixedPrecisionMixin, NeuralNetClassifier):
    """A classifier that can train in mixed precision."""


class Triples(torch.amp.GradScaler):
    """A scale of somebody's own, with another rule."""

    def __init__(self, device="cpu", rate=3.0, **kwargs):
        super().__init__(device, init_scale=2.0**10, growth_interval=2, **kwargs)
        self.rate = rate

    def update(self, new_scale=None):
        super().update(self.get_scale() * self.rate)


def table(n=64, overflow_at=None):
    """Return rows and classes; row `overflow_at` is beyond float16."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 4)).astype("float32")
    y = (x[:, 0] > 0).astype("int64")
    if overflow_at is not None:
        x[overflow_at] = 1e6
    return x, y


def make_net(**settings):
    """Return a net with the same weights each time."""
    torch.manual_seed(0)
    common = dict(criterion=nn.CrossEntropyLoss, train_split=None, verbose=0, batch_size=8)
    common |= dict(max_epochs=2, lr=0.25, optimizer__momentum=0.5, amp_enabled=True)
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    return Net(module, **(common | settings))


def net_state(net):
    """Return copies of weights, buffers, momentum and scale."""
    opt = net.optimizer_.state_dict()["state"]
    scale = dict(net.grad_scaler_.state_dict())
    scale.pop("skips_in_a_row", None)  # PyTorch's scaler has none
    return copy.deepcopy((dict(net.module_.state_dict()), opt, scale))


FIRST = dict(grad_scaler__init_scale=2.0**12, grad_scaler__growth_interval=3)


@pytest.mark.parametrize("mode", ["autocast", "master"])
def test_3_12_pytorchs_scaler_trains_the_same_bits(mode):
    """With an overflow, clipped gradients and accumulation, in a copy and out of a pickle."""

    class Accumulates(Net):
        def train_step(self, batch, **fit_params):
            step = self.train_step_single(batch, **fit_params)
            named = list(self.module_.named_parameters())
            self.notify("on_grad_computed", named_parameters=named, batch=batch)
            if len(self.history[-1, "batches"]) % 2 == 0:
                self.optimizer_.step()
                self.optimizer_.zero_grad()
            return step

    clip = ("clip", GradientNormClipping(0.25))
    for cls, callbacks in [(Net, []), (Net, [clip]), (Accumulates, [])]:
        ends = []
        for kind in (LossScaler, torch.amp.GradScaler):
            net = make_net(grad_scaler=kind, amp_mode=mode, callbacks=callbacks, **FIRST)
            net.__class__ = cls
            net.fit(*table(overflow_at=20))
            assert isinstance(net.grad_scaler_, kind)
            ends.append(net_state(net))
            if cls is Net:
                for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
                    assert_same(net_state(twin.partial_fit(*table())), again(net))
        assert_same(*ends)
        assert ends[0][2]["scale"] != 2.0**12  # it moved


def again(net):
    """Return where a copy of `net` goes."""
    return net_state(copy.deepcopy(net).partial_fit(*table()))


def test_3_12_a_scaler_of_ones_own():
    """Its rule is kept, its arguments are parameters, a clone has it."""
    net = clone(make_net(grad_scaler=Triples, grad_scaler__rate=2.0)).fit(*table())
    assert isinstance(net.grad_scaler_, Triples) and net.grad_scaler_.get_scale() == 2.0**26
    net.set_params(grad_scaler__rate=4.0)
    assert net.grad_scaler_.rate == 4.0 and net.grad_scaler_.get_scale() == 2.0**10
    with pytest.raises(MixedPrecisionError, match="LBFGS calls its closure several times"):
        make_net(grad_scaler=Triples, optimizer=torch.optim.LBFGS, optimizer__momentum=None)
        lbfgs = Net(
            nn.Linear(4, 2), criterion=nn.CrossEntropyLoss, optimizer=torch.optim.LBFGS,
            train_split=None, verbose=0, amp_enabled=True, grad_scaler=Triples,
        )  # fmt: skip
        lbfgs.fit(*table())


@pytest.mark.parametrize("kind", [LossScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("mode", ["autocast", "master"])
def test_3_12_a_plain_checkpoint_holds_the_scale(mode, kind, tmp_path):
    """A run that is resumed from the files that skorch writes by itself ends in the same bits."""
    settings = dict(amp_mode=mode, grad_scaler=kind, **FIRST)
    whole = make_net(max_epochs=4, **settings).fit(*table(overflow_at=20))
    saved = SkorchCheckpoint(dirname=str(tmp_path), monitor=None)
    make_net(callbacks=[saved], **settings).fit(*table(overflow_at=20))
    rest = make_net(**settings).initialize()
    rest.load_params(checkpoint=saved)
    assert rest.grad_scaler_.get_scale() != 2.0**12
    assert_same(net_state(rest.partial_fit(*table(overflow_at=20))), net_state(whole))
    plain = NeuralNetClassifier(
        make_net().module, criterion=nn.CrossEntropyLoss, optimizer__momentum=0.5
    ).initialize()
    plain.load_params(f_optimizer=tmp_path / "optimizer.pt")
    off = make_net(amp_enabled=False).initialize()
    off.load_params(checkpoint=saved)
    assert_same(plain.optimizer_.state_dict()["state"], off.optimizer_.state_dict()["state"])


SENSELESS = [
    ("amp_enabled", "false"), ("amp_enabled", "yes"), ("amp_enabled", None), ("amp_enabled", 1),
    ("flat_master", "no"), ("flat_master", None), ("grad_scaler", "LossScaler"),
    ("grad_scaler", torch.optim.SGD),
]  # fmt: skip


@pytest.mark.parametrize("name, value", SENSELESS, ids=str)
def test_3_12_a_setting_without_sense(name, value):
    """In `initialize`, and in `set_params` of a net that has been: it is as it was."""
    with pytest.raises(TypeError, match=f"`{name}` is .*: expected"):
        make_net(**{name: value}).initialize()
    net = make_net(amp_mode="master").fit(*table())
    before, scaler, params = net_state(net), net.grad_scaler_, net.get_params(deep=False)
    with pytest.raises(TypeError, match=f"`{name}` is .*: expected"):
        net.set_params(**{name: value})
    assert net.grad_scaler_ is scaler and getattr(net, name) == params[name]
    assert_same(net_state(net), before)
    net.partial_fit(*table())
    assert make_net(amp_enabled=np.True_).initialize().grad_scaler_.is_enabled()


def test_3_12_a_scalers_setting_without_sense_leaves_the_net():
    """The attribute of before is back, and one that was none is gone."""
    net = make_net(grad_scaler__growth_factor=4.0).fit(*table())
    for name, value in [("growth_factor", 0.5), ("backoff_factor", 2.0)]:
        with pytest.raises(ValueError, match=name):
            net.set_params(**{f"grad_scaler__{name}": value})
    assert net.grad_scaler__growth_factor == 4.0 and not hasattr(net, "grad_scaler__backoff_factor")
    clone(net).initialize()


def test_5_the_scaler_follows_amp_dtype():
    """On for float16 alone, there and back."""
    net = make_net(amp_dtype="bf16").fit(*table())
    for dtype, enabled in [("fp16", True), ("bf16", False), (torch.float16, True)]:
        net.set_params(amp_dtype=dtype)
        assert net.grad_scaler_.is_enabled() is enabled
        net.partial_fit(*table())


# 2.9 and 5: two processes, one pair for all tests


LAYOUTS = {"plain": None, "each": dict(flat_master=False), "flat": dict(flat_master=True)}


def fit_on_two(rank, layout, model=tiny.conv_net, dtype=torch.float32, **ddp):
    """Train a learner inside DDP on a rank's own pictures; return what it comes to."""
    dls = make_dls(*pictures(40, seed=rank))
    learn = make_learner("adam", model, dls=dls, seed=1 + rank)
    learn.model = DistributedDataParallel(learn.model, **ddp)
    if LAYOUTS[layout] is not None:
        learn.to_fp16(dtype=dtype, **LAYOUTS[layout])
    learn.fit(2, 0.02)
    losses = [list(map(float, row)) for row in learn.recorder.values]
    state = {k.removeprefix("module."): v for k, v in tiny.weights(learn).items()}
    losses.append(list(map(float, learn.validate())))
    if LAYOUTS[layout] is not None:
        learn.to_fp32()
        assert not learn.model._forward_hooks and learn.model.require_backward_grad_sync is True
    return losses, state


def by_hand(rank, is_mixed):
    """Accumulate two micro-batches, the first under `no_sync`, as DDP's documentation does."""
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    opt, mixed = torch.optim.SGD(model.parameters(), 0.125), MixedStep(torch.float32)
    if is_mixed:
        mixed.attach(model)
        opt = mixed.wrap_optimizer(opt)
    seen = []
    for _ in range(3):
        with model.no_sync():
            model(torch.randn(8, 3, generator=rng)).square().mean().backward()
            seen.append(model.module[1].running_mean.clone())
        loss = model(torch.randn(8, 3, generator=rng)).square().mean()
        seen.append(model.module[1].running_mean.clone())
        if is_mixed:
            mixed.scale(loss).backward()
            assert mixed.unscale()
            mixed.step()
            mixed.update()
        else:
            loss.backward()
            opt.step()
        opt.zero_grad(set_to_none=True)
    if is_mixed:
        mixed.detach()
    return seen, dict(model.module.state_dict())


def average(rank):
    """Return means over both processes, and over a group of the second one alone."""
    grads = []
    for group in (None, distributed.new_group([1])):
        p = nn.Parameter(torch.zeros(2))
        p.grad = torch.tensor([1.0, 4.0]) * (1 + 2 * rank)
        if group is None or rank == 1:
            average_over_ranks([p], group)
            take_from_first([torch.ones(1)], group)  # whose first rank may be any process
        grads.append(p.grad)
    return grads


def joint_batch(rank, dtype, layout):
    """Train on this rank's half of each batch; rank 0 also alone, on whole ones."""
    ends = []
    for is_alone in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        rng = torch.Generator().manual_seed(0)
        if not is_alone:
            model = DistributedDataParallel(model)
        mixed = MixedStep(dtype, flat_master=layout == "flat")
        mixed.attach(model)
        opt = mixed.wrap_optimizer(torch.optim.SGD(model.parameters(), 0.5))
        for _ in range(3):
            x = torch.randn(16, 6, generator=rng)
            y = x[:, :2] - x[:, 2:4]
            mine = slice(None) if is_alone else slice(8 * rank, 8 * rank + 8)
            out = mixed.uncast(model(mixed.cast(x[mine], training=True)))
            mixed.scale((out - y[mine]).square().mean()).backward()
            assert mixed.unscale()
            mixed.step()
            mixed.update()
            opt.zero_grad(set_to_none=True)
        ends.append(torch.cat([m.flatten() for m in masters_by_param(mixed).values()]))
    return ends


def work(rank):
    """Return all that the tests below look at."""
    fits = {
        "plain DDP": {},
        "no broadcast": dict(broadcast_buffers=False),
        "unused": dict(find_unused_parameters=True, model=tiny.Sometimes),
    }
    found = {k: {w: fit_on_two(rank, w, **kw) for w in LAYOUTS} for k, kw in fits.items()}
    found["fp16"] = fit_on_two(rank, "flat", dtype=torch.float16)
    found["by hand"] = [by_hand(rank, is_mixed) for is_mixed in (False, True)]
    found["average"] = average(rank)
    ways = [(d, w) for d in (torch.float32, torch.float16) for w in ("each", "flat")]
    found["joint"] = {(str(d), w): joint_batch(rank, d, w) for d, w in ways}
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two processes have come to."""
    return on_two_ranks(work, tmp_path_factory.mktemp("ranks"), ("tiny", "test_faults_files"))


@pytest.mark.parametrize("layout", ["each", "flat"])
@pytest.mark.parametrize("how", ["plain DDP", "no broadcast", "unused"])
def test_2_09_buffers_and_losses_are_those_of_plain_ddp(how, layout, ranks):
    """In float32, bit for bit, on each rank; buffers that DDP sends are equal after validation."""
    for rank in ranks:
        (losses, state), (plain_losses, plain_state) = rank[how][layout], rank[how]["plain"]
        assert losses == plain_losses
        assert_same(state, plain_state)
    states = [rank[how][layout][1] for rank in ranks]
    means = [torch.cat([v for k, v in s.items() if k.endswith("running_mean")]) for s in states]
    assert torch.equal(*means) == (how != "no broadcast")


def test_2_09_buffers_are_equal_over_ranks_in_16_bits(ranks):
    """And weights, as before."""
    assert_same(ranks[0]["fp16"][1], ranks[1]["fp16"][1])


def test_2_09_no_sync_sends_buffers_when_plain_ddp_does(ranks):
    """After a pass under `no_sync` DDP sends no buffers before the next."""
    for rank in ranks:
        plain, mixed = rank["by hand"]
        assert_same(mixed[0], plain[0])
        assert_same(mixed[1], plain[1])


def test_5_the_mean_over_processes_is_the_mean(ranks):
    """Not the sum; of the group that is given, whose first rank is the second process here."""
    assert [g.tolist() for g in ranks[0]["average"]] == [[2.0, 8.0], [1.0, 4.0]]
    assert [g.tolist() for g in ranks[1]["average"]] == [[2.0, 8.0], [3.0, 12.0]]


@pytest.mark.parametrize("layout", ["each", "flat"])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.float16, 4e-3)], ids=str)
def test_5_two_processes_come_to_where_one_comes_with_the_joint_batch(dtype, bound, layout, ranks):
    """To rounding: the sums are taken in another order."""
    (two, one), (other, _) = (rank["joint"][str(dtype), layout] for rank in ranks)
    assert_same(two, other)
    assert (two - one).norm() / one.norm() < bound
