"""Files: what one precision writes, any other reads."""

import io
import pickle
import warnings

import pytest
import torch
from fastai.basics import L
from fastai.callback.core import CancelFitException
from tiny import Do, conv_net, make_learner, opt_state, weights

import mixedfp.callback  # noqa: F401, gives Learner to_fp16
from mixedfp.testing import assert_same

PRECISIONS = {
    "fp32": lambda learn: learn,
    "fp16": lambda learn: learn.to_fp16(growth_interval=3),
    "fp16_flat": lambda learn: learn.to_fp16(flat_master=True, growth_interval=3),
    "bf16": lambda learn: learn.to_bf16(),
    "bf16_flat": lambda learn: learn.to_bf16(flat_master=True),
    "bf16_state": lambda learn: learn.to_bf16(flat_master=True, state_dtype=dict(sqr_avg="bf16")),
    "mixed_fp32": lambda learn: learn.to_fp16(dtype=torch.float32, flat_master=True),
}
ANY = pytest.mark.parametrize("precision", PRECISIONS)
SOME = pytest.mark.parametrize("precision", ["fp16", "fp16_flat", "bf16_flat"])


def learner(precision, path, opt="adam", **kwargs):
    """Return a tiny learner in `precision` that keeps its files in `path`."""
    return PRECISIONS[precision](make_learner(opt, path=path, **kwargs))


def trained(precision, path, opt="adam", **kwargs):
    """Return such a learner after an epoch."""
    learn = learner(precision, path, opt, **kwargs)
    learn.fit(1, 0.02, wd=0.1)
    return learn


def state(learn):
    """Return copies of all that a file is to hold."""
    return {"model": weights(learn), "opt": opt_state(learn)}


def tensors(o):
    """List the tensors in a nesting."""
    if isinstance(o, torch.Tensor):
        return [o]
    values = o.values() if isinstance(o, dict) else o if isinstance(o, list | tuple | L) else ()
    return [t for v in values for t in tensors(v)]


def quietly(f, *args, **kwargs):
    """Call `f`; fail where fastai warns, as it does about a state that it could not load."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return f(*args, **kwargs)


def moved(learn, before):
    """Whether every trained weight of `learn` is another than it was, and finite."""
    pairs = [(now, before[k]) for k, now in learn.model.state_dict().items()]
    floats = [(a, b) for a, b in pairs if a.is_floating_point()]
    return all(a.isfinite().all() and not torch.equal(a, b) for a, b in floats)


# From any precision to any other

NAMES, OPTS = list(PRECISIONS), ["adam", "sgd", "torch_adamw", "radam", "ranger"]
PAIRS = [(a, NAMES[(i + j) % 7], OPTS[(i + j) % 5]) for i, a in enumerate(NAMES) for j in range(4)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train in a precision, save, and train on, once for all tests that use the same."""
    done = {}

    def get(precision, opt="adam"):
        if (precision, opt) not in done:
            one = trained(precision, tmp_path_factory.mktemp("run"), opt)
            file, saved = one.save("one"), state(one)
            one.fit(1, 0.02, wd=0.1)
            done[precision, opt] = file, saved, state(one)
        return done[precision, opt]

    return get


@pytest.mark.parametrize(("first", "second", "opt"), PAIRS)
def test_a_file_of_any_precision_continues_in_any_other(first, second, opt, run, tmp_path):
    """Weights and moments are the saved bits; between layouts, so is all that follows."""
    file, saved, unbroken = run(first, opt)
    learn = learner(second, tmp_path, opt, seed=2)
    quietly(learn.load, file.with_suffix(""))
    assert_same(state(learn), saved)
    learn.to_fp32()
    assert_same(state(learn), saved)
    PRECISIONS[second](learn)
    learn.fit(1, 0.02, wd=0.1)
    assert moved(learn, saved["model"])
    exact = {"mixed_fp32": "fp32", "bf16_state": None}
    if exact.get(first, first[:4]) == exact.get(second, second[:4]):
        assert_same(state(learn), unbroken)
    for k, v in weights(learn).items():
        torch.testing.assert_close(v, unbroken["model"][k], rtol=0.05, atol=0.05, msg=k)


# What is in a file


@pytest.mark.parametrize("opt", ["adam", "torch_adamw"])
@ANY
def test_a_file_holds_32_bits_per_parameter(precision, opt, run):
    """As `weights_only=True` reads it: the shapes of the model, no vector behind a view."""
    with torch.serialization.safe_globals([L]):  # as `learn.load` does
        file, net = torch.load(run(precision, opt)[0], weights_only=True), conv_net()
    shapes = {k: (v.dtype, v.shape) for k, v in net.state_dict().items()}
    assert {k: (v.dtype, v.shape) for k, v in file["model"].items()} == shapes
    states = file["opt"]["state"]
    states = list(states.values()) if isinstance(states, dict) else list(states)
    for p, s in zip(net.parameters(), states, strict=True):
        for t in tensors(s):
            assert t.dtype == torch.float32 and t.shape in (p.shape, torch.Size())


@SOME
def test_files_of_parts_hold_those_parts_alone(precision, tmp_path):
    """A layer, an optimizer's state, after `to_fp32()` too: as large as plain fastai's."""

    def sizes(learn):
        model, opt = learn.model.state_dict(), learn.opt.state_dict()["state"]
        parts = [model, learn.model[0].state_dict(), opt, opt[:1]]
        written = []
        for part in parts:
            torch.save(part, buffer := io.BytesIO())
            written += [len(buffer.getvalue()), len(pickle.dumps(part))]
        return written

    learn, expected = trained(precision, tmp_path), sizes(trained("fp32", tmp_path))
    for found in (sizes(learn), sizes(learn.to_fp32())):
        assert all(a <= 1.02 * b + 64 for a, b in zip(found, expected, strict=True))


@SOME
def test_what_has_no_moments_yet_gets_none(precision, tmp_path):
    """A frozen part, which is then unfrozen."""
    kwargs = dict(splitter=lambda m: [list(m[:2].parameters()), list(m[2:].parameters())])
    one, other = (learner(precision, tmp_path, seed=seed, **kwargs) for seed in (1, 2))
    one.freeze()
    one.fit(1, 0.02)
    one.save("one")
    quietly(other.load, "one")
    assert_same(state(other), state(one))
    for learn in (one, other):
        learn.unfreeze()
        learn.fit(1, 0.02)
    assert_same(state(other), state(one))


@pytest.mark.parametrize("precision", ["fp16", "fp16_flat"])
def test_a_state_with_a_wrong_scale_changes_nothing(precision, tmp_path):
    """It is checked before the optimizer loads the rest."""
    learn, other = (trained(precision, tmp_path, seed=seed) for seed in (1, 2))
    before, wrong = state(learn), other.opt.state_dict() | {"loss_scale": {"scale": -1.0}}
    with pytest.raises(ValueError, match="not the state of a loss scaler"):
        learn.opt.load_state_dict(wrong)
    assert_same(state(learn), before)


# Loading in the middle of a fit

EVENTS = ["before_fit", "before_train", "before_batch", "after_backward", "before_step"]
EVENTS += ["after_step", "after_batch", "before_validate", "after_epoch"]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize(("one", "two"), [("fp32", "mixed_fp32"), ("fp16", "fp16_flat")])
def test_loading_in_any_event_loads_every_bit(one, two, event, tmp_path):
    """In float32 as plain fastai does, flat as with a master each."""
    source, results = trained(one, tmp_path, seed=2), []
    source.save("one")
    for precision in (one, two):
        learn, found = learner(precision, tmp_path), []

        def load(learn, found=found):
            if not found:
                quietly(learn.load, "one")
                found.append(state(learn))

        learn.fit(2, 0.02, wd=0.1, cbs=Do(event, load, training=False))
        assert_same(found[0], state(source))
        results.append(state(learn))
    assert_same(results[1], results[0])


@SOME
def test_a_skipped_step_leaves_what_was_loaded_before_its_batch(precision, tmp_path):
    one, learn = trained("fp16", tmp_path, seed=2), trained(precision, tmp_path)
    one.save("one")

    def overflow(learn):
        next(learn.model.parameters()).grad.fill_(torch.inf)

    def stop(learn):
        raise CancelFitException

    load = Do("before_batch", lambda learn: learn.load("one"), at=1)
    spoil = Do("after_backward", overflow, at=1, order=61)
    learn.fit(1, 0.02, cbs=[load, spoil, Do("after_batch", stop, at=1)])
    assert learn.mp_cb.n_skipped == 1
    assert_same(weights(learn), weights(one))
    assert_same(opt_state(learn), opt_state(one))
