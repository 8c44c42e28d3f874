"""The laws: what holds for every model, optimizer, precision, layout and way of working.

Each law is told once, over a table of rows that are drawn so that all values occur and pairs of
them meet; `--all-rows` takes all pairs. One row alone: `pytest tests/test_laws.py -k "flat and lstm
and AdamW"`.
"""

import copy
import io
import pickle
import warnings

import pytest
import torch
from laws import (
    DTYPES,
    ELEMENTWISE_OF_TORCH,
    FP32,
    LAYOUTS,
    OF_TORCH,
    ByHand,
    Loop,
    assert_plain,
    fit_allows,
    interrupt_at,
    learn_state,
    learner,
    loop_allows,
    rows,
    settings,
    small_chunks,
    train_fit,
    train_loop,
)
from nets import DEVICE, NETS
from tiny import OPTIMIZERS, Do, plain, weights
from workflows import BY_HAND, FITS, LOOPS

from mixedfp.callback import MixedPrecision
from mixedfp.testing import assert_same


def law(allows, **columns):
    """Hold a law over a table with these columns."""

    def mark(f):
        f.table = allows, columns
        return f

    return mark


def pytest_generate_tests(metafunc):
    """Make a test of each row."""
    table = getattr(metafunc.function, "table", None)
    if table is not None:
        allows, columns = table
        is_full = metafunc.config.getoption("--all-rows")
        metafunc.parametrize("row", rows(columns, allows, is_full), ids=str)


@pytest.fixture(autouse=True)
def chunks_of_large_vectors():
    """Cut the vectors of tiny models into many chunks."""
    with small_chunks():
        yield


HALVES = ["float16", "bfloat16"]
EACH_AND_FLAT = ["a_master_each", "flat"]
WITHOUT_SCALE = [k for k in NETS if k != "sometimes_used"]  # it counts its batches itself

# (a) float32 is plain training, bit for bit


@law(loop_allows, model=NETS, optimizer=OF_TORCH, workflow=LOOPS, layout=EACH_AND_FLAT)
def test_in_float32_a_loop_is_plain_pytorch(row):
    assert_same(train_loop(row, FP32, **settings(row)), train_loop(row))


@law(fit_allows, model=NETS, optimizer=OPTIMIZERS, workflow=FITS, layout=EACH_AND_FLAT)
def test_in_float32_a_fit_is_plain_fastai(row):
    assert_same(train_fit(row, FP32, **settings(row)), train_fit(row))


# (b) flat is per parameter, bit for bit


@law(
    loop_allows,
    model=NETS,
    optimizer=OF_TORCH,
    workflow=LOOPS,
    precision=HALVES,
    layout=["flat", "half_grads"],
)
def test_a_loop_with_flat_masters_has_the_bits_of_a_master_each(row):
    dtype = DTYPES[row.precision]
    assert_same(train_loop(row, dtype, **settings(row)), train_loop(row, dtype))


@law(
    fit_allows,
    model=NETS,
    optimizer=OPTIMIZERS,
    workflow=FITS,
    precision=HALVES,
    layout=["flat", "half_grads"],
)
def test_a_fit_with_flat_masters_has_the_bits_of_a_master_each(row):
    dtype = DTYPES[row.precision]
    assert_same(train_fit(row, dtype, **settings(row)), train_fit(row, dtype))


# (c) 16 bits are masters kept by hand, bit for bit, and near float32

NOT_BY_HAND = {"counter"}  # makes a buffer in its first pass
NOT_BY_HAND |= {"lstm", "gru", "packed_gru"}  # computed in float32 on a CPU


@law(
    loop_allows,
    model=[k for k in NETS if k not in NOT_BY_HAND],
    optimizer=OF_TORCH,
    workflow=BY_HAND,
    precision=HALVES,
    layout=LAYOUTS,
)
def test_a_loop_in_16_bits_is_masters_kept_by_hand(row):
    dtype = DTYPES[row.precision]
    found = train_loop(row, dtype, native=True, **settings(row))
    assert_same(found, train_loop(row, dtype, ByHand, **settings(row)))


SMOOTH = "layer_norm rms_norm group_norm gelu lstm attention tied many hooked twice".split()
NEAR = {"float16": 0.01, "bfloat16": 0.06}  # of the way from the first weights to the last


def _way(row, dtype=None, **kept):
    """Return what training adds to the weights, as one vector."""
    learn = learner(row, dtype, **kept)
    first = weights(learn)
    torch.manual_seed(0)
    FITS[row.workflow](learn)
    last, floats = weights(learn), [k for k, v in first.items() if v.is_floating_point()]
    return torch.cat([(last[k] - first[k]).flatten().cpu() for k in floats])


@law(
    fit_allows,
    model=SMOOTH,
    optimizer=["sgd", "torch_sgd"],
    workflow=[
        *("fitting_in_one_cycle", "fine_tuning", "freezing_and_unfreezing", "clipping_norms"),
        *("accumulating_batches", "changing_the_defaults", "training_batch_by_batch"),
    ],
    precision=HALVES,
    layout=EACH_AND_FLAT,
)
def test_a_fit_in_16_bits_ends_near_float32(row):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, expected = _way(row, DTYPES[row.precision], **settings(row)), _way(row)
    off = (found - expected).norm() / expected.norm()
    assert 0 < off < NEAR[row.precision], f"{off:.4f} of the way from float32"


# (d) copies are plain float32 models with the masters' bits

HOW = {"deepcopy": copy.deepcopy, "pickle": lambda o: pickle.loads(pickle.dumps(o))}
COPIES = dict(
    model=NETS, optimizer=OF_TORCH, precision=DTYPES, layout=LAYOUTS, how=["deepcopy", "pickle"]
)


def _can_be_copied(row):
    """Whether PyTorch itself can: a pruned weight that was computed is no leaf."""
    no_pickle = ("weight_norm", "spectral_norm") if row.how == "pickle" else ()
    return row.model not in (*no_pickle, "pruned")


def _copy_allows(row):
    return loop_allows(row) and _can_be_copied(row)


def start(row, n=2):
    """Return a loop that has done `n` steps."""
    run = Loop(row, DTYPES.get(row.precision), **settings(row))
    run.iterate(n)
    return run


@law(_copy_allows, **COPIES)
def test_a_copy_of_the_model_is_plain_and_has_the_bits_of_the_masters(row):
    run = start(row)
    twin = HOW[row.how](run.model)
    assert_plain(twin, row)
    expected = plain(dict(run.model.state_dict()))
    assert_same(plain(dict(twin.state_dict())), expected)
    other = NETS[row.model].build()
    other.load_state_dict(expected, strict=False)  # a buffer may come with the first batch
    other.count = twin.count
    x, _ = run.net.batch(9)
    for model in (twin, other):
        torch.manual_seed(3)
        run.see(model(x))
        model(x).sum().backward()
    assert_same(run.log[-2], run.log[-1])
    run.iterate(1)
    assert_same(dict(other.state_dict()).keys(), expected.keys())
    assert all(torch.equal(p, expected[k]) for k, p in twin.named_parameters())  # none is shared


@law(_copy_allows, **COPIES)
def test_a_copied_pair_trains_on_to_the_same_bits(row):
    run = start(row)
    twin = copy.copy(run)
    twin.log = []
    twin.model, twin.opt = HOW[row.how]((run.model, run.opt))
    assert "masters" not in vars(twin.opt)
    twin.wrap()
    for one in (run, twin):
        one.log.clear()
        torch.manual_seed(3)
        one.iterate(2, 2)
    assert_same(twin.end(), run.end())


@law(
    lambda row: fit_allows(row) and _can_be_copied(row),
    model=NETS,
    optimizer=OPTIMIZERS,
    precision=DTYPES,
    layout=LAYOUTS,
    how=["deepcopy", "pickle"],
)
def test_a_copied_learner_trains_on_to_the_same_bits(row):
    learn = learner(row, DTYPES[row.precision], **settings(row))
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

KINDS = {"plain": (None, {})} | {
    f"{precision}_{layout}".removesuffix("_a_master_each"): (dtype, LAYOUTS[layout])
    for precision, dtype in DTYPES.items()
    for layout in ("a_master_each", "flat", "half_grads")
    if precision == "bfloat16" or layout != "half_grads"
}


def _of_kind(row, name, n=0, first=0):
    dtype, kept = KINDS[name]
    run = Loop(row, dtype, **kept)
    run.iterate(n, first)
    return run


def _file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _kinds_allow(row):
    names = [row.cells[k] for k in ("source", "target", "kind") if k in row.cells]
    is_half = any("half_grads" in name for name in names)
    return loop_allows(row) and not (is_half and row.optimizer not in ELEMENTWISE_OF_TORCH)


def _dtypes(o):
    if isinstance(o, dict):
        return {k: _dtypes(v) for k, v in o.items()}
    return (o.dtype, o.shape) if isinstance(o, torch.Tensor) else type(o)


LOADED = [k for k in NETS if k != "counter"]  # its last buffer comes with the first batch
FILES = dict(
    model=LOADED,
    optimizer=list(OF_TORCH),
)


@law(_kinds_allow, **FILES, source=KINDS, target=KINDS)
def test_a_file_goes_from_any_kind_of_loop_into_any_other(row):
    source = _of_kind(row, row.source, 2)
    state = _file(source.state())
    assert _dtypes(state["model"]) == _dtypes(_of_kind(row, "plain", 2).state()["model"])
    states = [v for s in state["opt"]["state"].values() for v in s.values()]
    floats = [v for v in states if isinstance(v, torch.Tensor) and v.is_floating_point()]
    assert {v.dtype for v in floats} <= ({FP32, torch.float64} if row.model == "double" else {FP32})
    target = _of_kind(row, row.target, 1, 5)
    target.load(state)
    assert_same(plain(target.state()), plain(state))
    plainly = _of_kind(row, "plain")
    plainly.load(state)
    for run in (target, plainly):
        run.log.clear()
        run.model.count = 0
        torch.manual_seed(3)
        run.iterate(2, 2)
    if KINDS[row.target][0] in (None, FP32):
        assert_same(target.end(), plainly.end())


@law(_kinds_allow, **FILES, kind=KINDS, scaled=["with_a_scaler", "without_a_scaler"])
def test_a_killed_loop_goes_on_from_its_file_to_the_same_bits(row):
    def begin():
        run = _of_kind(row, row.kind)
        if row.scaled == "with_a_scaler":
            run.scale_by(2.0**6)
        return run

    whole, killed = begin(), begin()
    for run in (whole, killed):
        torch.manual_seed(2)
        run.iterate(3)
    scaler = {} if killed.scaler is None else killed.scaler.state_dict()
    state, scaler = _file((killed.state(), scaler))
    resumed = begin()
    resumed.load(state)
    resumed.model.count = whole.model.count
    if scaler:
        resumed.scaler.load_state_dict(scaler)
    for run in (whole, resumed):
        run.log.clear()
        torch.manual_seed(3)
        run.iterate(3, 3)
    assert_same(resumed.end(), whole.end())


@law(
    lambda row: (row.model, row.optimizer) != ("complex", "lamb"),  # it compares complex norms
    model=LOADED,
    optimizer=OPTIMIZERS,
    source=[k for k in KINDS if k != "bfloat16_half_grads"],
    target=[k for k in KINDS if k != "bfloat16_half_grads"],
)
def test_a_file_goes_from_any_learner_into_any_other(row, tmp_path):
    def make(kind):
        dtype, kept = KINDS[kind]
        return learner(row, dtype, tmp_path, **kept)

    source, target, plainly = make(row.source), make(row.target), make("plain")
    source.fit(1, 0.05)
    target.fit(1, 0.01)
    source.save("it")
    for learn in (target, plainly):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # "Could not load the optimizer state"
            learn.load("it")
        found, expected = learn_state(learn), learn_state(source)
        assert_same(found["weights"], expected["weights"])
        assert_same(found["opt"]["state"], expected["opt"]["state"])
        learn.model.count = 0
        torch.manual_seed(3)
        learn.fit(1, 0.05)
    if KINDS[row.target][0] in (None, FP32):
        assert_same(learn_state(target)["weights"], learn_state(plainly)["weights"])


# (f) a skipped step changes nothing


def _skip_allows(row):
    """Whether there is something that skips."""
    if DEVICE == "cuda" and (row.scaler, row.layout) == ("GradScaler", "half_grads"):
        return False  # PyTorch's scaler has no kernel for bfloat16 gradients
    skips = row.scaler == "LossScaler" or row.precision == "bfloat16"
    return loop_allows(row) and (skips or (row.scaler, row.precision) == ("GradScaler", "float16"))


def _overflow(run, fault):
    """Train on a batch that overflows."""
    if fault == "the_loss":
        run.backward(7, float("inf"))
    elif fault == "the_input":
        net, run.net = run.net, Overflowing(run.net)
        run.backward(7)
        run.net = net
    else:
        run.backward(7)
        for p in run.params:
            if p.grad is not None and p.grad.numel():
                p.grad.view(-1)[-1:] = float("inf" if fault == "a_gradient" else "nan")
                break
    run.step()


class Overflowing:
    """A network's batches, infinitely large where they are no words."""

    def __init__(self, net):
        self.net = net

    def batch(self, i):
        """Return such a batch; of words, classes that cost infinitely much."""
        x, y = self.net.batch(i)
        return (torch.full_like(x, float("inf")) if x.is_floating_point() else x), y


@law(
    _skip_allows,
    model=[k for k in NETS if k != "sometimes_used"],  # it counts the batches of its own
    optimizer=[*ELEMENTWISE_OF_TORCH, "AdamW_fused", "Adafactor"],
    precision=DTYPES,
    layout=LAYOUTS,
    scaler=["LossScaler", "GradScaler", "no_scaler"],
    fault=["the_loss", "a_gradient", "a_nan", "the_input"],
    at=["first", "third"],
)
def test_a_skipped_step_changes_nothing(row):
    """Neither weights, masters, states nor buffers, and training goes on as if it had not been."""

    def train(at):
        run, skipped = Loop(row, DTYPES[row.precision], **settings(row)), None
        if row.scaler == "LossScaler":
            run.scale_by(2.0**4, dynamic=False)
        elif row.scaler == "GradScaler":
            run.scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**4)
        for i in range(4):
            torch.manual_seed(i)
            if i == at:
                before = everything(run)
                run.zero_grad()
                _overflow(run, row.fault)
                skipped = everything(run), before
                assert run.opt.masters.n_skipped == 1
                if row.scaler == "GradScaler":
                    run.scaler.update(2.0**4)
                torch.manual_seed(i)
            run.zero_grad()
            run.backward(i)
            run.step()
        return everything(run), skipped

    if row.fault == "the_input" and not torch.is_floating_point(NETS[row.model].batch(0)[0]):
        row.fault = "the_loss"
    found, skipped = train({"first": 0, "third": 2}[row.at])
    after, before = skipped
    if row.at == "first":  # an optimizer that has not stepped yet may make its states: zeros
        after, before = after[:-1], before[:-1]
    assert_same(after, before)
    assert_same(found, train(None)[0])


def everything(run):
    """Return copies of all that training changes, as it is and as files get it."""
    held = dict(run.model.named_parameters()) | dict(run.model.named_buffers())
    state = run.state()
    return plain([held, state["model"], state["opt"]])


# (g) gradients between backward and step are true


@law(
    lambda row: loop_allows(row) and (DEVICE, row.model) != ("cuda", "dropout"),  # masks by dtype
    model=NETS,
    optimizer=["AdamW"],
    precision=DTYPES,
    layout=[k for k in LAYOUTS if k != "half_grads"],
    scaler=["LossScaler", "GradScaler", "no_scaler"],
)
def test_between_backward_and_step_gradients_are_unscaled_float32(row):
    run, plainly = Loop(row, DTYPES[row.precision], **settings(row)), Loop(row)
    if row.scaler == "LossScaler":
        run.scale_by(2.0**4)
    elif row.scaler == "GradScaler":
        run.scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**4)
    for one in (run, plainly):
        torch.manual_seed(3)
        for i in range(3):
            one.backward(i)
        one.unscale()
    for p, q in zip(run.params, plainly.params, strict=True):
        if q.grad is None:
            assert p.grad is None
        elif row.precision == "float32":
            assert_same(p.grad, q.grad)
        else:
            assert p.grad.dtype == q.grad.dtype
    _assert_true(
        row, *([p.grad for p in one.params if p.grad is not None] for one in (run, plainly))
    )


def _assert_true(row, found, true):
    """Assert that gradients are those of float32, but for what rounding costs."""
    found, true = (torch.cat([g.abs().flatten() for g in grads]) for grads in (found, true))
    bound = {"float32": 0, "float16": 0.02, "bfloat16": 0.1}[row.precision]
    assert (found - true).norm() <= bound * true.norm()


@law(
    lambda row: fit_allows(row) and row.layout != "half_grads",
    model=SMOOTH,
    optimizer=["sgd", "ranger", "torch_adamw"],
    precision=DTYPES,
    layout=LAYOUTS,
    order=[11, 60],
)
def test_callbacks_find_unscaled_float32_gradients_before_a_step(row):
    seen = {}
    for dtype in (None, DTYPES[row.precision]):
        learn = learner(row, dtype, **(settings(row) if dtype else {}))
        grads = seen.setdefault(dtype, [])

        def look(learn, grads=grads):
            grads.append([p.grad.clone() for p in learn.model.parameters()])

        torch.manual_seed(0)
        learn.fit(1, 0.01, cbs=Do("before_step", look, order=row.order))
    assert len(seen[None]) == 4
    if row.precision == "float32":
        assert_same(seen[dtype], seen[None])
    assert all(g.dtype == FP32 for grads in seen[dtype] for g in grads)
    _assert_true(row, seen[dtype][0], seen[None][0])


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
    fit_allows,
    model=["layer_norm", "norm", "tied", "lstm"],
    optimizer=["sgd", "adam", "ranger", "lamb", "torch_adamw"],
    event=EVENTS,
    order=[5, 60],
    error=[KeyboardInterrupt, ZeroDivisionError],
    precision=HALVES,
    layout=["a_master_each", "flat", "half_grads"],
    added=["before", "for_one_fit"],
)
def test_an_exception_in_an_event_of_a_fit_leaks_nothing(row):
    is_one_fit, dtype, kept = row.added == "for_one_fit", DTYPES[row.precision], settings(row)
    learn = learner(row) if is_one_fit else learner(row, dtype, **kept)
    cbs = [MixedPrecision(dtype=dtype, **kept)] if is_one_fit else []
    n = []

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
    for name, p in learn.model.named_parameters():
        now = weights(learn)[name]
        assert now.isfinite().all() and (p.dim() == 0 or not torch.equal(now, stopped[name]))
    found = weights(learn)
    learn.to_fp32()
    assert_plain(learn.model, row)
    assert_same(weights(learn), found)


@law(
    loop_allows,
    model=["layer_norm", "norm", "scale"],
    optimizer=["SGD_momentum", "AdamW", "AdamW_fused", "Adafactor"],
    precision=HALVES,
    layout=LAYOUTS,
    scaler=["LossScaler", "no_scaler"],
)
def test_ctrl_c_at_any_line_of_ours_leaks_nothing(row):
    """Each weight is as it was before the step or after it, and the next iteration trains."""

    def begin():
        run = Loop(row, DTYPES[row.precision], **settings(row))
        if row.scaler == "LossScaler":
            run.scale_by(2.0**4)
        run.iterate(1)
        return run

    whole = begin()
    before = plain(dict(whole.model.state_dict()))
    whole.iterate(1, 1)
    after = plain(dict(whole.model.state_dict()))
    line, is_over = 1, False
    while not is_over:
        run = begin()
        with interrupt_at(line) as left:
            try:
                run.iterate(1, 1)
            except KeyboardInterrupt:
                pass
        is_over = left[0] > 0
        assert_nothing_entered()
        for k, now in run.model.state_dict().items():
            if now.is_floating_point() and "running" not in k:
                assert ((now == before[k]) | (now == after[k])).all(), (line, k)
        run.iterate(2, 2)
        found = plain(dict(run.model.state_dict()))
        assert all(v.isfinite().all() for v in found.values())
        assert not torch.equal(found["head.weight"], after["head.weight"])
        run.opt.masters.restore()
        assert_same(plain(dict(run.model.state_dict())), found)
        line += 23
