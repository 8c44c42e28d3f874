"""The laws: what holds for every model, optimizer, precision, layout and way of working.

Each law is told once, over a table of rows that are drawn so that all values occur and pairs of
them meet; `--all-rows` takes all pairs. One row alone: `pytest tests/test_laws.py -k "flat and lstm
and AdamW"`.
"""

import copy
import io
import pickle
import warnings
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from fastai.basics import L
from laws import (
    BF16,
    DTYPES,
    ELEMENTWISE_OF_TORCH,
    FP32,
    LAYOUTS,
    NOT_ELEMENTWISE,
    OF_TORCH,
    RECURRENT,
    ByHand,
    Loop,
    allows,
    assert_plain,
    interrupt_at,
    learn_state,
    learner,
    rows,
    settings,
    small_chunks,
    train,
)
from nets import DEVICE, NETS
from tiny import OPTIMIZERS, Do, plain, weights
from workflows import BY_HAND, FITS, LOOPS, through_a_file

from mixedfp.callback import MixedPrecision
from mixedfp.testing import assert_same


def law(*tables, also=lambda row: True, **columns):
    """Hold a law over these tables, each with these columns, where a row is allowed."""

    def mark(f):
        f.tables = [table | columns for table in tables], also
        return f

    return mark


def pytest_generate_tests(metafunc):
    tables, also = getattr(metafunc.function, "tables", ((), None))
    is_full = metafunc.config.getoption("--all-rows")
    found = [rows(table, lambda row: allows(row) and also(row), is_full) for table in tables]
    if found:
        metafunc.parametrize("row", sum(found, []), ids=str)


@pytest.fixture(autouse=True)
def chunks_of_large_vectors():
    with small_chunks():
        yield


LOOP = dict(model=NETS, optimizer=OF_TORCH)
FIT = dict(model=NETS, optimizer=OPTIMIZERS)
WAYS = LOOP | dict(workflow=LOOPS), FIT | dict(workflow=FITS)
HALVES = ["float16", "bfloat16"]
EACH_AND_FLAT = ["a_master_each", "flat"]

# (a) float32 is plain training, bit for bit


@law(*WAYS, precision=["float32"], layout=EACH_AND_FLAT)
def test_in_float32_training_is_plain_pytorch_and_plain_fastai(row):
    assert_same(train(row, **settings(row)), train(row))


# (b) flat is per parameter, bit for bit


@law(*WAYS, precision=HALVES, layout=["flat", "half_grads"])
def test_training_with_flat_masters_has_the_bits_of_a_master_each(row):
    assert_same(train(row, **settings(row)), train(row, dtype=DTYPES[row.precision]))


# (c) 16 bits are masters kept by hand, bit for bit, and near float32

NOT_BY_HAND = {"counter", *RECURRENT}  # makes a buffer in its first pass; float32 on a CPU


@law(
    LOOP | dict(model=[k for k in NETS if k not in NOT_BY_HAND], workflow=BY_HAND),
    precision=HALVES,
    layout=LAYOUTS,
)
def test_a_loop_in_16_bits_is_masters_kept_by_hand(row):
    kept = settings(row)
    assert_same(train(row, native=True, **kept), train(row, ByHand, **kept))


SMOOTH = "layer_norm rms_norm group_norm gelu lstm attention tied many hooked twice".split()
NEAR = {"float16": 0.01, "bfloat16": 0.06}  # of the way from the first weights to the last


@law(
    dict(model=SMOOTH, optimizer=["sgd", "torch_sgd"]),
    workflow=[
        *("fitting_and_fine_tuning", "freezing_and_unfreezing", "changing_the_defaults"),
        *("clipping_norms_and_accumulating_batches", "training_batch_by_batch"),
    ],
    precision=HALVES,
    layout=EACH_AND_FLAT,
)
def test_a_fit_in_16_bits_ends_near_float32(row):
    states = weights(learner(row)), *(train(row, **k)["weights"] for k in (settings(row), {}))
    first, found, expected = (
        torch.cat([v.flatten().cpu() for v in state.values() if v.is_floating_point()])
        for state in states
    )
    off = (found - expected).norm() / (expected - first).norm()
    assert 0 < off < NEAR[row.precision], f"{off:.4f} of the way from float32"


# (d) copies are plain float32 models with the masters' bits

HOW = {"deepcopy": copy.deepcopy, "pickle": lambda o: pickle.loads(pickle.dumps(o))}
COPIES = dict(precision=DTYPES, layout=LAYOUTS, how=HOW)


def _can_be_copied(row):
    """Whether PyTorch itself can: a pruned weight that was computed is no leaf."""
    no_pickle = ("weight_norm", "spectral_norm") if row.how == "pickle" else ()
    return row.model not in (*no_pickle, "pruned")


def begun(row):
    """Return a loop that has done two steps."""
    run = Loop(row, **settings(row))
    run.iterate(2)
    run.log.clear()
    return run


@law(LOOP, also=_can_be_copied, **COPIES)
def test_a_copy_of_the_model_is_plain_and_has_the_bits_of_the_masters(row):
    run = begun(row)
    twin, expected = HOW[row.how](run.model), run.held()
    assert_plain(twin, row)
    assert_same(plain(dict(twin.state_dict())), expected)
    other = NETS[row.model].build()
    other.load_state_dict(expected, strict=False)  # a buffer may come with the first batch
    other.count = twin.count
    x, _ = run.net.batch(9)
    for model in (twin, other):
        torch.manual_seed(3)
        run.see(model(x))
        model(x).sum().backward()
    assert_same(run.log[0], run.log[1])
    run.iterate(1)
    assert_same(dict(other.state_dict()).keys(), expected.keys())
    assert all(torch.equal(p, expected[k]) for k, p in twin.named_parameters())  # none is shared


@law(LOOP, also=_can_be_copied, **COPIES)
def test_a_copied_pair_trains_on_to_the_same_bits(row):
    run = begun(row)
    twin = copy.copy(run)
    twin.log = []
    twin.model, twin.opt = HOW[row.how]((run.model, run.opt))
    assert "masters" not in vars(twin.opt)
    twin.wrap()
    for one in (run, twin):
        torch.manual_seed(3)
        one.iterate(2, 2)
    assert_same(twin.end(), run.end())


@law(FIT, also=_can_be_copied, **COPIES)
def test_a_copied_learner_trains_on_to_the_same_bits(row):
    learn = learner(row, **settings(row))
    learn.fit(1, 0.05)
    twin = HOW[row.how](learn)
    assert_same(learn_state(twin), learn_state(learn))
    for one in (learn, twin):
        torch.manual_seed(3)
        one.fit(1, 0.05)
    assert_same(learn_state(twin), learn_state(learn))
    assert_same(learn_state(twin.to_fp32()), learn_state(learn.to_fp32()))
    assert_plain(twin.model, row)


# (e) files are float32, go anywhere, and a run goes on from one

SECOND_MOMENTS = dict.fromkeys(("sqr_avg", "exp_avg_sq", "square_avg"), BF16)
KINDS = {
    "plain": {},
    **{k: dict(dtype=v) for k, v in DTYPES.items()},
    **{f"{k}_flat": dict(dtype=v, flat_master=True) for k, v in DTYPES.items()},
    "half_grads": dict(dtype=BF16, flat_master=True, half_grads=True),
    "16_bit_states": dict(dtype=BF16, flat_master=True, state_dtype=SECOND_MOMENTS),
}
OF_FITS = [k for k in KINDS if k != "half_grads"]
LOADED = [k for k in NETS if k != "counter"]  # its last buffer comes with the first batch
FILES = LOOP | dict(model=LOADED)


def _of_kind(row, name, n=0, first=0):
    run = Loop(row, **KINDS[name])
    run.iterate(n, first)
    return run


def _kinds_allow(row):
    is_in_chunks = any(v in ("half_grads", "16_bit_states") for v in vars(row).values())
    return row.optimizer not in NOT_ELEMENTWISE or not is_in_chunks


def _is_float32(kind):
    return KINDS[kind].get("dtype", FP32) == FP32


def assert_in_float32(state, model, row):
    """Assert that a file has the dtypes and shapes of `model`, a plain one, and float32 states."""
    kinds = [{k: (v.dtype, v.shape) for k, v in d.items()} for d in (state["model"], model)]
    assert kinds[0] == kinds[1]
    states = state["opt"]["state"]
    states = states.values() if isinstance(states, dict) else states
    floats = [v for s in states for v in s.values() if torch.is_tensor(v) and v.is_floating_point()]
    shapes = {v.shape for v in model.values()} | {torch.Size()}
    assert {v.dtype for v in floats} <= ({FP32, torch.float64} if row.model == "double" else {FP32})
    assert row.optimizer == "Adafactor" or {v.shape for v in floats} <= shapes


@law(FILES, also=_kinds_allow, source=KINDS, target=KINDS)
def test_a_file_goes_from_any_kind_of_loop_into_any_other(row):
    state = through_a_file(_of_kind(row, row.source, 2).state())
    assert_in_float32(state, _of_kind(row, "plain", 2).state()["model"], row)
    target, plainly = _of_kind(row, row.target, 1, 5), _of_kind(row, "plain")
    for run in (target, plainly):
        run.load(state)
        assert_same(plain(run.state()), plain(state))
        run.log.clear()
        run.model.count = 0
        torch.manual_seed(3)
        run.iterate(2, 2)
    if _is_float32(row.target):
        assert_same(target.end(), plainly.end())


@law(FILES, also=_kinds_allow, kind=KINDS, scaled=["with_a_scaler", "without_a_scaler"])
def test_a_killed_loop_goes_on_from_its_file_to_the_same_bits(row):
    whole, killed, resumed = (_of_kind(row, row.kind) for _ in range(3))
    for run in (whole, killed, resumed):
        if row.scaled == "with_a_scaler":
            run.scale_by(2.0**6)
    for run in (whole, killed):
        torch.manual_seed(2)
        run.iterate(3)
    scaler = {} if killed.scaler is None else killed.scaler.state_dict()
    state, scaler = through_a_file((killed.state(), scaler))
    resumed.load(state)
    resumed.model.count = whole.model.count
    if scaler:
        resumed.scaler.load_state_dict(scaler)
    for run in (whole, resumed):
        run.log.clear()
        torch.manual_seed(3)
        run.iterate(3, 3)
    assert_same(resumed.end(), whole.end())


def _sizes(learn):
    """Return the sizes of files of parts, which hold those parts alone: no vector behind a view."""
    model, states, sizes = learn.model, learn.opt.state_dict()["state"], []
    for part in (model.state_dict(), model.stem.state_dict(), states, states[0]):
        torch.save(part, buffer := io.BytesIO())
        sizes += [len(buffer.getvalue()), len(pickle.dumps(part))]
    return sizes


@law(FIT | dict(model=LOADED), also=_kinds_allow, source=OF_FITS, target=OF_FITS)
def test_a_file_goes_from_any_learner_into_any_other(row, tmp_path):
    """It is saved after an epoch, and trained on to the bits of the same precision."""
    kinds = row.source, row.target, "plain"
    source, target, plainly = (learner(row, path=tmp_path, **KINDS[k]) for k in kinds)
    source.fit(1, 0.05)
    for learn in (target, plainly):
        learn.fit(1, 0.01)
    file, saved, before = source.save("it"), learn_state(source), learn_state(target)
    expected = _sizes(plainly)
    with torch.serialization.safe_globals([L]):  # as `learn.load` does
        state = torch.load(file, weights_only=True)
    assert_in_float32(state, plainly.model.state_dict(), row)
    if row.target.startswith("float16"):
        with pytest.raises(ValueError, match="not the state of a loss scaler"):
            target.opt.load_state_dict(state["opt"] | {"loss_scale": {"scale": -1.0}})
        assert_same(learn_state(target), before)
    for learn in (target, plainly):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # "Could not load the optimizer state"
            learn.load("it")
        assert_same(learn_state(learn), saved)
    if row.target != "plain":
        assert_same(learn_state(target.to_fp32()), saved)
        target.add_cb(MixedPrecision(**KINDS[row.target]))
    for learn in (source, target, plainly):
        learn.model.count = 0
        torch.manual_seed(3)
        learn.fit(1, 0.05)
    if _is_float32(row.target):
        assert_same(learn_state(target), learn_state(plainly))
    elif row.source.removesuffix("_flat") == row.target.removesuffix("_flat"):
        # fastai's RMSProp counts no steps, on which the rounding of its 16-bit averages depends
        if (row.optimizer, row.source) != ("rmsprop", "16_bit_states"):
            assert_same(learn_state(target), learn_state(source))
    room = 256 if row.optimizer == "larc" else 64  # its rate is a number or a tensor
    for sizes in (_sizes(source), _sizes(source.to_fp32())):
        assert all(a <= 1.02 * b + room for a, b in zip(sizes, expected, strict=True))


# (f) a skipped step changes nothing

SCALERS = dict(scaler=["LossScaler", "GradScaler", "no_scaler"])


def _with_scaler(row, **dynamic):
    run = Loop(row, **settings(row))
    if row.scaler == "LossScaler":
        run.scale_by(2.0**4, **dynamic)
    elif row.scaler == "GradScaler":
        run.scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**4)
    return run


def _skips(row):
    if DEVICE == "cuda" and (row.scaler, row.layout) == ("GradScaler", "half_grads"):
        return False  # PyTorch's scaler has no kernel for bfloat16 gradients
    skips = row.scaler == "LossScaler" or row.precision == "bfloat16"
    return skips or (row.scaler, row.precision) == ("GradScaler", "float16")


def _overflow(run, fault):
    run.opt.zero_grad()
    x, y = run.net.batch(7)
    if fault == "the_input" and x.is_floating_point():
        run.net = SimpleNamespace(batch=lambda i: (torch.full_like(x, torch.inf), y))
        run.backward(7)
        run.net = NETS[run.row.model]
    elif fault in ("the_input", "the_loss"):  # no word is infinite
        run.backward(7, torch.inf)
    else:
        run.backward(7)
        grads = [p.grad for p in run.params if p.grad is not None and p.grad.numel()]
        grads[0].view(-1)[-1:] = torch.inf if fault == "a_gradient" else torch.nan
    run.step()


@law(
    dict(model=[k for k in NETS if k != "sometimes_used"]),  # it counts the batches of its own
    also=_skips,
    optimizer=[*ELEMENTWISE_OF_TORCH, "AdamW_fused", "Adafactor"],
    precision=DTYPES,
    layout=LAYOUTS,
    **SCALERS,
    fault=["the_loss", "a_gradient", "a_nan", "the_input"],
    at=["first", "third"],
)
def test_a_skipped_step_changes_nothing(row):
    """Neither weights, masters, states nor buffers, and training goes on as if it had not been."""
    ends = []
    for at in ({"first": 0, "third": 2}[row.at], None):
        run = _with_scaler(row, dynamic=False)
        for i in range(4):
            torch.manual_seed(i)
            if i == at:
                before = everything(run)
                _overflow(run, row.fault)
                after = everything(run)
                assert run.opt.masters.n_skipped == 1
                if row.scaler == "GradScaler":
                    run.scaler.update(2.0**4)
                torch.manual_seed(i)
            run.iterate(1, i)
        ends.append(everything(run))
    if row.at == "first":  # an optimizer that has not stepped yet may make its states: zeros
        after, before = after[:-1], before[:-1]
    assert_same(after, before)
    assert_same(*ends)


def everything(run):
    """Return copies of all that training changes, as it is and as files get it."""
    held = dict(run.model.named_parameters()) | dict(run.model.named_buffers())
    return plain([held, *run.state().values()])


# (g) gradients between backward and step are true


@law(
    dict(model=[k for k in NETS if (DEVICE, k) != ("cuda", "dropout")]),  # whose masks are by dtype
    optimizer=["AdamW"],
    precision=DTYPES,
    layout=[k for k in LAYOUTS if k != "half_grads"],
    **SCALERS,
)
def test_between_backward_and_step_gradients_are_unscaled_float32(row):
    run, plainly = _with_scaler(row), Loop(row)
    for one in (run, plainly):
        torch.manual_seed(3)
        for i in range(3):
            one.backward(i)
        one.unscale()
    found, true = ([p.grad for p in one.params] for one in (run, plainly))
    if row.precision == "float32":
        assert_same(found, true)
    assert [g is None or g.dtype for g in found] == [g is None or g.dtype for g in true]
    found, true = (
        torch.cat([g.abs().flatten() for g in grads if g is not None]) for grads in (found, true)
    )
    bound = {"float32": 0, "float16": 0.02, "bfloat16": 0.1}[row.precision]  # of rounding
    assert (found - true).norm() <= bound * true.norm()


# (h) an exception at any point leaks nothing

EVENTS = [
    *("before_fit", "before_epoch", "before_train", "before_batch", "after_pred", "after_loss"),
    *("before_backward", "after_backward", "before_step", "after_step", "after_batch"),
    *("after_train", "before_validate", "after_validate", "after_epoch", "after_fit"),
]


def assert_nothing_entered():
    """Assert that no mode is on."""
    assert torch.overrides._len_torch_function_stack() == 0
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


@law(
    dict(model=["layer_norm", "norm", "tied", "lstm"]),
    optimizer=["sgd", "adam", "ranger", "lamb", "torch_adamw"],
    event=EVENTS,
    order=[5, 60],
    error=[KeyboardInterrupt, ZeroDivisionError],
    precision=HALVES,
    layout=["a_master_each", "flat", "half_grads"],
    added=["before", "for_one_fit"],
)
def test_an_exception_in_an_event_of_a_fit_leaks_nothing(row):
    is_one_fit, kept, n = row.added == "for_one_fit", settings(row), []
    learn = learner(row, **({} if is_one_fit else kept))
    cbs = [MixedPrecision(**kept)] if is_one_fit else []

    def stop(learn):
        n.append(1)
        if len(n) == 2 or row.event in ("before_fit", "after_fit"):
            raise row.error("boom")

    with pytest.raises(row.error, match="boom"):
        learn.fit(2, 0.01, cbs=[*cbs, Do(row.event, stop, order=row.order, training=False)])
    assert_nothing_entered()
    if is_one_fit:
        assert_plain(learn.model, row)
    stopped = weights(learn)
    learn.fit(1, 0.01)
    found = weights(learn)
    for name, p in learn.model.named_parameters():
        assert found[name].isfinite().all()
        assert p.dim() == 0 or not torch.equal(found[name], stopped[name])
    learn.to_fp32()
    assert_plain(learn.model, row)
    assert_same(weights(learn), found)


@law(
    dict(model=["layer_norm", "norm", "scale"]),
    optimizer=["SGD_momentum", "AdamW", "AdamW_fused", "Adafactor"],
    precision=HALVES,
    layout=LAYOUTS,
    scaler=["LossScaler", "no_scaler"],
)
def test_ctrl_c_at_any_line_of_ours_leaks_nothing(row):
    """Each weight is as it was before the step or after it, and the next iteration trains."""

    def begin():
        run = _with_scaler(row)
        run.iterate(1)
        return run, run.held()

    whole, before = begin()
    whole.iterate(1, 1)
    after, line, is_over = whole.held(), 1, False
    while not is_over:
        run, _ = begin()
        with interrupt_at(line) as left, suppress(KeyboardInterrupt):
            run.iterate(1, 1)
        is_over = left[0] > 0
        assert_nothing_entered()
        for k, now in run.model.state_dict().items():
            if now.is_floating_point() and "running" not in k:
                assert ((now == before[k]) | (now == after[k])).all(), (line, k)
        run.iterate(2, 2)
        found = run.held()
        assert all(v.isfinite().all() for v in found.values())
        assert not torch.equal(found["head.weight"], after["head.weight"])
        run.opt.masters.restore()
        assert_same(run.held(), found)
        line += 23
