"""When an update is compiled: from the step on at which it pays, in every run at the same one."""

import copy
import pickle
import shutil

import inside
import pytest
import torch
from tiny import Do, make_learner
from torch import nn

from mixedfp.checkpoint import Checkpoint
from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler"
)
N_STEPS, SWITCH = 8, 4


def make(dtype=torch.bfloat16, **kwargs):
    """Make a model whose weights are one vector, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(40, 30, bias=False)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    return with_masters(model, opt, dtype=dtype, flat_master=True, **kwargs)


def train(model, opt, start=0, stop=N_STEPS):
    """Train by hand; return the way that each step went."""
    paths = []
    for i in range(start, stop):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(i))
        model(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
        paths += opt.update_paths()
    return paths


def counted(opt):
    """Return what a file says of the count."""
    return opt.state_dict().get("payback", {})


def said(caplog):
    """List what the library has said."""
    return [r.message for r in caplog.records if r.name == "mixedfp"]


def no_compiler(fn, **kwargs):
    """Stand for `torch.compile` where there is none."""
    raise RuntimeError("No working C++ compiler found")


@pytest.fixture
def pays_soon(monkeypatch):
    """Have compiling pay from step `SWITCH` on; the first, which makes states, does not count."""
    inside.everything_is_large(monkeypatch)
    inside.forget_notices()
    model, opt = make()
    train(model, opt, stop=2)
    inside.pays_after(monkeypatch, (SWITCH - 1) * counted(opt)["chunked"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_has_counted_what_the_original_has(monkeypatch, copied):
    """So that it changes over at the same step."""
    inside.everything_is_large(monkeypatch)
    model, opt = make()
    train(model, opt, stop=3)
    _, twin = copied((model, opt))
    assert counted(twin) == counted(opt) != {}


WAYS = ["in chunks"] * SWITCH + ["compiled"] * (N_STEPS - SWITCH)


@needs_compiler
def test_every_run_changes_over_at_the_same_step(pays_soon, caplog):
    """Run twice, and saved before the change or after it: the same bits. One line says it."""
    model, opt = make()
    assert train(model, opt) == WAYS
    (line,) = said(caplog)
    assert "took" in line and "ms less" in line
    for at in (0, SWITCH - 2, SWITCH + 1):
        first, first_opt = make()
        paths = train(first, first_opt, stop=at)
        resumed, resumed_opt = make()
        resumed.load_state_dict(first.state_dict())
        resumed_opt.load_state_dict(first_opt.state_dict())
        assert paths + train(resumed, resumed_opt, start=at) == WAYS
        assert_same(dict(resumed.state_dict()), dict(model.state_dict()))
        assert_same(resumed_opt.state_dict(), opt.state_dict())


@needs_compiler
@pytest.mark.parametrize(
    "kwargs, ways",
    [
        (dict(compiled=True), ["in chunks"] + ["compiled"] * (N_STEPS - 1)),
        (dict(compiled=False), ["in chunks"] * N_STEPS),
        (dict(dtype=torch.float32), ["in chunks"] * N_STEPS),  # bit for bit plain training
    ],
)
def test_who_has_decided_is_not_counted(pays_soon, kwargs, ways, caplog):
    """True compiles the second step, False none; nothing is counted, and nothing said."""
    model, opt = make(**kwargs)
    assert train(model, opt) == ways and counted(opt) == {}
    assert not said(caplog)


@needs_compiler
@pytest.mark.parametrize(
    "n_steps, first",
    [
        (1, None),
        (N_STEPS - 4, None),  # the first makes states; with it one counts, and two are left
        (N_STEPS - 3, 2),  # three are left: as many as pay it back
        (N_STEPS, 2),
    ],
)
def test_a_loop_that_says_how_long_it_is_compiles_what_pays_back(pays_soon, n_steps, first):
    """As a fit, which knows it: early, or not at all."""
    model, opt = make()
    opt.expect_steps(n_steps)
    n_chunked = n_steps if first is None else first
    ways = ["in chunks"] * n_chunked + ["compiled"] * (n_steps - n_chunked)
    assert train(model, opt, stop=n_steps) == ways


@needs_compiler
def test_a_loop_that_goes_on_for_longer_than_it_said_counts_as_others(pays_soon):
    """Nothing is known of what comes after the last step that was announced."""
    model, opt = make()
    opt.expect_steps(2)
    assert train(model, opt) == WAYS
    opt.expect_steps(3)  # compiled by now, and stays so
    assert train(model, opt, stop=1) == ["compiled"]
    with pytest.raises(ValueError, match="n_steps"):
        opt.expect_steps(0)


def test_without_a_compiler_chunks_go_on(pays_soon, monkeypatch, caplog):
    """And one line says why."""
    monkeypatch.setattr(torch, "compile", no_compiler)
    model, opt = make()
    assert train(model, opt) == ["in chunks"] * N_STEPS
    (line,) = said(caplog)
    assert "not compiled" in line


def test_files_go_to_others_and_come_from_them(pays_soon):
    """A plain optimizer reads a file with a count; one without a count begins at 0."""
    model, opt = make()
    train(model, opt, stop=3)
    plain = nn.Linear(40, 30, bias=False)
    other = torch.optim.Adam(plain.parameters())
    other.load_state_dict(opt.state_dict())
    assert_same(other.state_dict()["state"], opt.state_dict()["state"])
    assert counted(opt)["chunked"] > 0
    opt.load_state_dict(other.state_dict())
    assert counted(opt) == {}


@pytest.mark.parametrize("bad", [{"chunked": -1.5, "is_compiled": False}, {"other": 1}, "all"])
def test_a_count_that_is_none_is_refused(pays_soon, bad):
    """Before anything is changed."""
    model, opt = make()
    train(model, opt, stop=2)
    before = opt.state_dict()
    with pytest.raises(ValueError, match="payback"):
        opt.load_state_dict(before | {"payback": bad, "state": {}})
    assert_same(opt.state_dict(), before)


def fit(n_epoch, learn=None, **kwargs):
    """Fit epochs of four batches; return the learner."""
    learn = make_learner().to_bf16(flat_master=True) if learn is None else learn
    learn.fit(n_epoch, **kwargs)
    return learn


@pytest.fixture
def pays_in_the_second_epoch(monkeypatch):
    """Have compiling cost 24 steps, and be impossible: the count is what is looked at."""
    inside.everything_is_large(monkeypatch)
    monkeypatch.setattr(torch, "compile", no_compiler)
    three_steps = counted(fit(1).opt)["chunked"]
    inside.pays_after(monkeypatch, 8 * three_steps)


def test_what_is_to_come_has_to_pay_it_back_too(pays_in_the_second_epoch):
    """After a twentieth of the way: 20 steps that are left are too few, 24 are not."""
    assert not counted(fit(6).opt)["is_compiled"]
    assert counted(fit(7).opt)["is_compiled"]


class Stream(torch.utils.data.DataLoader):
    """Batches of which nobody knows how many there are."""

    def __len__(self):
        raise TypeError("a stream")


@pytest.mark.parametrize(
    "loader, n_epochs, compiles",
    [
        (torch.utils.data.DataLoader, 6, False),  # of 24 steps less than 24 are to come
        (torch.utils.data.DataLoader, 7, True),
        (Stream, 5, False),
        (Stream, 6, True),
    ],
)
def test_a_net_of_skorch_knows_how_many_steps_are_to_come(monkeypatch, loader, n_epochs, compiles):
    """Compiling costs 24 steps, and there are four in an epoch; of a stream those done count."""
    skorch = pytest.importorskip("skorch")
    from mixedfp.skorch import MixedPrecisionMixin  # skorch is an extra

    class Net(MixedPrecisionMixin, skorch.NeuralNetRegressor):
        pass

    def train(n_epochs):
        settings = dict(amp_enabled=True, amp_dtype="bf16", amp_mode="master", flat_master=True)
        settings |= dict(batch_size=8, train_split=None, verbose=0, iterator_train=loader)
        net = Net(nn.Linear(4, 3, bias=False), max_epochs=n_epochs, **settings)
        return net.fit(torch.ones(32, 4), torch.ones(32, 3)).optimizer_

    inside.everything_is_large(monkeypatch)
    monkeypatch.setattr(torch, "compile", no_compiler)
    inside.pays_after(monkeypatch, 6 * counted(train(1))["chunked"])
    assert counted(train(n_epochs))["is_compiled"] == compiles


@pytest.mark.parametrize("n_done", [1, 2])
def test_a_resumed_fit_knows_as_much(pays_in_the_second_epoch, n_done, tmp_path):
    """Killed before the change, or after it."""

    def kill(learn):
        raise KeyboardInterrupt

    def learner():
        learn = make_learner().to_bf16(flat_master=True)
        learn.path = tmp_path
        return learn

    tmp_path.joinpath("models").mkdir()
    killed = learner()
    with pytest.raises(KeyboardInterrupt):
        fit(10, killed, cbs=[Checkpoint(), Do("before_batch", kill, at=4 * n_done)])
    resumed, checkpoint = learner(), Checkpoint()
    assert checkpoint.resume(resumed) == n_done
    assert counted(resumed.opt)["is_compiled"] == (n_done == 2)
    fit(10, resumed, cbs=[checkpoint], start_epoch=n_done)
    assert counted(resumed.opt) == counted(fit(10).opt)
