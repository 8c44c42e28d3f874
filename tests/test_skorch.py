"""Mixed precision in skorch: where it is on, what callbacks and files see, what users override.

`WAYS` are the settings that every law is tried on. The batches are few and known: `table` is not
shuffled, so that a fit can be written out by hand, and batch `OVERFLOWING` is beyond float16.
"""

import copy
import logging
import math
import pickle

import numpy as np
import pytest

pytest.importorskip("skorch")

import torch
from inside import attention_is_slow, forget_notices
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import (
    NeuralNet,
    NeuralNetBinaryClassifier,
    NeuralNetClassifier,
    NeuralNetRegressor,
)
from skorch.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    EpochScoring,
    Freezer,
    GradientNormClipping,
    LoadInitState,
    LRScheduler,
    ProgressBar,
    TrainEndCheckpoint,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.skorch import MixedPrecisionMixin, autocast_works
from mixedfp.testing import assert_same

WAYS = {
    "autocast_fp16": dict(amp_dtype="fp16"),
    "autocast_bf16": dict(amp_dtype="bf16"),
    "master_fp16": dict(amp_dtype="fp16", amp_mode="master"),
    "master_bf16": dict(amp_dtype="bf16", amp_mode="master"),
    "flat_fp16": dict(amp_dtype="fp16", amp_mode="master", flat_master=True),
    "small_bf16": dict(
        amp_dtype="bf16", amp_mode="master", flat_master=True, store_param_remainders=True
    ),
}
way = pytest.mark.parametrize("way", WAYS)
fp16 = pytest.mark.parametrize("way", [name for name in WAYS if "fp16" in name])
BS, OVERFLOWING = 8, 2  # rows a batch; the third batch of `overflowing_table`


@pytest.fixture(autouse=True)
def first_notices(caplog):
    """Have every notice given again, and caught."""
    forget_notices()
    caplog.set_level(logging.WARNING, "mixedfp")


def table(n_rows=4 * BS):
    """Return inputs and classes that float16 and bfloat16 hold."""
    rng = np.random.default_rng(0)
    X = (rng.integers(-16, 16, (n_rows, 4)) / 8).astype("float32")
    return X, (X[:, 0] + X[:, 1] > 0).astype("int64")


def overflowing_table():
    """Return `table` with one batch beyond float16's largest number."""
    X, y = table()
    X[OVERFLOWING * BS : (OVERFLOWING + 1) * BS] *= 1e5
    return X, y


class Small(nn.Module):
    """Two layers and a norm, and a note of each call: autocast's dtype, the weights' dtype."""

    def __init__(self, n_hidden=8, n_out=2):
        super().__init__()
        self.first = nn.Linear(4, n_hidden)
        self.norm = nn.BatchNorm1d(n_hidden)
        self.last = nn.Linear(n_hidden, n_out)
        self.seen = []

    def forward(self, x):
        h = self.first(x)
        self.seen.append((autocast_dtype(), h.dtype, self.first.weight.dtype))
        return self.last(self.norm(h).relu())


class Loss(nn.CrossEntropyLoss):
    """Cross entropy, and a note of each call."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, pred, target):
        self.seen.append((autocast_dtype(), pred.dtype))
        return super().forward(pred, target)


def autocast_dtype():
    """Return what autocast computes in, None outside of it."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


class Net(MixedPrecisionMixin, NeuralNetClassifier):
    """The usual net."""


def make(way=None, cls=Net, module=Small, **settings):
    """Return a net with the same weights each time."""
    amp = {} if way is None else dict(amp_enabled=True, **WAYS[way])
    defaults = dict(criterion=Loss, train_split=None, batch_size=BS, max_epochs=2, verbose=0)
    is_sgd = settings.get("optimizer", torch.optim.SGD) is torch.optim.SGD
    defaults |= dict(lr=0.25, **amp) | (dict(optimizer__momentum=0.5) if is_sgd else {})
    torch.manual_seed(0)
    return cls(module, **(defaults | settings))


def weights(net):
    """Return weights and buffers, in 32 bits."""
    return {k: v.clone() for k, v in net.module_.state_dict().items()}


def ends(net):
    """Return all that training changes."""
    return weights(net), net.optimizer_.state_dict(), net.grad_scaler_.state_dict()


# 0. a bad batch in bfloat16


def test_a_step_with_nan_in_bfloat16_is_skipped(caplog):
    """Where there are masters; said once, counted, and switched off by a parameter."""
    X, y = table()
    X[OVERFLOWING * BS] = np.nan
    net = make("master_bf16").fit(X, y)
    assert net.optimizer_.skipped == [2, 6] and "a step was skipped" in caplog.text
    assert all(w.isfinite().all() for w in weights(net).values())
    net.set_params(skip_nonfinite=False).partial_fit(X, y)
    assert net.optimizer_.n_skipped == 0
    assert any(w.isnan().any() for w in weights(net).values())


# 1. arguments


@pytest.mark.parametrize("cls", [NeuralNetClassifier, NeuralNetRegressor])
def test_off_it_is_skorch_bit_for_bit(cls):
    X, y = table()
    settings = dict(criterion=nn.CrossEntropyLoss)
    if cls is NeuralNetRegressor:
        y, settings = y.astype("float32")[:, None], dict(criterion=nn.MSELoss, module__n_out=1)
    mixed_cls = type("Mixed", (MixedPrecisionMixin, cls), {})
    plain, mixed = [make(cls=c, **settings).fit(X, y) for c in (cls, mixed_cls)]
    assert_same(weights(mixed), weights(plain))
    assert_same(plain.history[:, "train_loss"], mixed.history[:, "train_loss"])
    assert not mixed.grad_scaler_.is_enabled()


@way
@pytest.mark.parametrize(
    "cls", [NeuralNet, NeuralNetClassifier, NeuralNetBinaryClassifier, NeuralNetRegressor]
)
def test_each_kind_of_net_trains_and_predicts(cls, way):
    X, y = table()
    n_out, loss = 2, nn.CrossEntropyLoss
    if cls is NeuralNetBinaryClassifier:
        n_out, loss, y = 1, nn.BCEWithLogitsLoss, y.astype("float32")
    if cls is NeuralNetRegressor:
        n_out, loss, y = 1, nn.MSELoss, y.astype("float32")[:, None]
    net = make(way, type("Mixed", (MixedPrecisionMixin, cls), {}), criterion=loss,
               module__n_out=n_out).fit(X, y)  # fmt: skip
    assert net.history[-1, "train_loss"] < net.history[0, "train_loss"]
    assert net.predict_proba(X).dtype == np.float32  # numpy has no bfloat16
    assert net.module_.seen[-1][1] == (torch.float16 if "fp16" in way else torch.bfloat16)


def test_parameters_are_seen_and_cloned():
    net = make("flat_fp16", grad_scaler__growth_factor=4.0)
    params = clone(net).get_params()
    assert params["grad_scaler__growth_factor"] == 4 and params["grad_scaler"] is LossScaler
    assert params["amp_enabled"] and params["amp_dtype"] == "fp16"
    assert params["amp_mode"] == "master" and params["flat_master"]
    assert clone(net).initialize().grad_scaler_.get_growth_factor() == 4


def test_set_params_makes_anew_what_changed_and_says_so(capsys):
    X, y = table()
    net = make("autocast_fp16", verbose=1, callbacks__print_log=None).fit(X, y)
    before, opt, scaler = weights(net), net.optimizer_, net.grad_scaler_
    capsys.readouterr()
    net.set_params(grad_scaler__growth_factor=8.0)
    because = "because the following parameters were re-set"
    assert capsys.readouterr().out == (
        f"Re-initializing grad_scaler {because}: grad_scaler__growth_factor.\n"
    )
    assert net.grad_scaler_ is not scaler and net.grad_scaler_.get_growth_factor() == 8
    assert net.optimizer_ is opt
    scaler = net.grad_scaler_
    net.set_params(amp_mode="master")
    assert capsys.readouterr().out == f"Re-initializing optimizer {because}: amp_mode.\n"
    assert net.grad_scaler_ is scaler and net.module_.first.weight.dtype == torch.float16
    net.set_params(amp_enabled=False)
    assert "optimizer" in (out := capsys.readouterr().out) and "grad_scaler" in out
    assert not net.grad_scaler_.is_enabled() and net.module_.first.weight.dtype == torch.float32
    assert_same(weights(net), before)
    net.set_params(amp_enabled=False, batch_size=4, lr=0.5)
    assert capsys.readouterr().out == ""
    assert net.batch_size == 4 and net.optimizer_.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (dict(amp_mode="autocat"), ValueError, "amp_mode"),
        (dict(amp_dtype="float8"), TypeError, "dtype"),
        (dict(amp_dtype=torch.int32), TypeError, "dtype"),
        (dict(grad_scaler=torch.amp.GradScaler("cpu")), TypeError, "LossScaler"),
        (dict(grad_scaler__growth_factor=0.5), ValueError, "growth_factor"),
        (dict(grad_scaler_growth_factor=4), ValueError, "grad_scaler__growth_factor"),
    ],
)
def test_senseless_settings_are_refused(settings, error, words):
    with pytest.raises(error, match=words):
        make(**settings).initialize()


def test_a_search_in_a_pipeline():
    X, y = table(64)
    pipe = make_pipeline(StandardScaler(), make("autocast_fp16", max_epochs=3))
    name = pipe.steps[-1][0]
    grid = {
        f"{name}__amp_enabled": [False, True],
        f"{name}__amp_mode": ["autocast", "master"],
        f"{name}__grad_scaler__growth_factor": [2.0, 4.0],
    }
    search = GridSearchCV(pipe, grid, cv=2, refit=True).fit(X, y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    best = search.best_estimator_.steps[-1][1]
    assert best.grad_scaler_.is_enabled() == search.best_params_[f"{name}__amp_enabled"]


# 2. where it is entered


class Everywhere(Callback):
    """Notes what each event finds: whether autocast is on, whether a forward was exchanged."""

    events = ["train_begin", "train_end", "epoch_begin", "epoch_end", "batch_begin", "batch_end"]

    def initialize(self):
        self.seen_ = []
        return self

    def look(self, net, **kwargs):
        self.seen_.append((autocast_dtype(), "forward" in vars(net.module_)))

    on_train_begin = on_train_end = on_epoch_begin = on_epoch_end = look
    on_batch_begin = look

    def on_batch_end(self, net, batch=None, training=False, loss=None, y_pred=None, **kwargs):
        self.look(net)
        assert y_pred.dtype == loss.dtype == torch.float32


@way
def test_autocast_is_on_in_module_and_criterion_alone(way):
    X, y = table()
    net = make(way, callbacks=[("look", Everywhere)], train_split=None)
    net.fit(X, y)
    net.predict(X), net.validation_step((torch.tensor(X), torch.tensor(y))), net.infer(X)
    next(batches := net.forward_iter(X))
    assert autocast_dtype() is None
    next(batches)
    dtype = torch.float16 if "fp16" in way else torch.bfloat16
    inside = dtype if "autocast" in way else None
    weight = torch.float32 if "autocast" in way else dtype
    assert set(net.module_.seen) == {(inside, dtype, weight)}
    assert set(net.criterion_.seen) == {(inside, torch.float32)}
    seen = dict(net.callbacks_)["look"].seen_
    has_masters = "autocast" not in way  # then the forward that casts is there all the time
    assert len(seen) == 2 + 2 * 2 + 2 * 8 and set(seen) == {(None, has_masters)}


class Trips(Small):
    """Raises in the forward pass."""

    def forward(self, x):
        super().forward(x)
        raise KeyError("tripped")


@way
@pytest.mark.parametrize("call", ["fit", "predict", "infer", "forward_iter"])
def test_autocast_is_left_when_an_exception_passes(way, call):
    X, y = table()
    net = make(way, module=Trips).initialize()
    with pytest.raises(KeyError, match="tripped"):
        net.fit(X, y) if call == "fit" else list(getattr(net, call)(X))
    assert net.module_.seen  # it was inside
    assert autocast_dtype() is None
    assert ("forward" in vars(net.module_)) == ("autocast" not in way)
    assert net.batch_ is None and not torch.overrides._get_current_function_mode_stack()
    pickle.dumps(net)


class Interrupts(Callback):
    """Ends the fit between backward pass and step."""

    def on_grad_computed(self, net, **kwargs):
        raise KeyboardInterrupt


def test_an_interrupted_step_leaves_the_scaler_usable():
    X, y = table()
    net = make("autocast_fp16", callbacks=[("interrupts", Interrupts())]).fit(X, y)
    pickle.dumps(net)
    net.callbacks_ = [(k, cb) for k, cb in net.callbacks_ if k != "interrupts"]
    net.partial_fit(X, y)
    whole = make("autocast_fp16").fit(X, y)
    assert_same(dict(net.module_.named_parameters()), dict(whole.module_.named_parameters()))


@fp16
def test_the_recorded_loss_is_the_true_one(way):
    X, y = table()
    mixed, plain = make(way).fit(X, y), make().fit(X, y)
    assert mixed.grad_scaler_.get_scale() == 2**16
    loss = torch.tensor(mixed.history[:, "train_loss"])
    torch.testing.assert_close(
        loss, torch.tensor(plain.history[:, "train_loss"]), rtol=1e-2, atol=0
    )


# 3. the same bits as by hand


def by_hand(net, X, y, epochs=2):
    """Train what `net` has initialized as PyTorch's notes on AMP do, with PyTorch's scaler."""
    module, criterion, opt = net.module_, net.criterion_, net.optimizer_
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    for _ in range(epochs):
        for xb, yb in zip(torch.tensor(X).split(BS), torch.tensor(y).split(BS), strict=True):
            opt.zero_grad()
            with torch.autocast("cpu", torch.float16):
                pred = module(xb)
            scaler.scale(criterion(pred.float(), yb)).backward()
            scaler.unscale_(opt)
            for _ in range(2):
                nn.utils.clip_grad_norm_(module.parameters(), 2**-6)
            scaler.step(opt)
            scaler.update()
    return scaler


@pytest.mark.parametrize("opt", [torch.optim.SGD, torch.optim.AdamW])
def test_autocast_is_pytorchs_loop_bit_for_bit(opt):
    X, y = table()
    clip = [GradientNormClipping(2.0**-6), GradientNormClipping(2.0**-6)]
    settings = dict(optimizer=opt, lr=2**-4, callbacks=clip, grad_scaler__growth_interval=3)
    net, hand = [make("autocast_fp16", **settings).initialize() for _ in range(2)]
    scaler = by_hand(hand, X, y)
    net.partial_fit(X, y)
    # not the norm's statistics: PyTorch lets a skipped step have them
    assert_same(dict(net.module_.named_parameters()), dict(hand.module_.named_parameters()))
    assert net.grad_scaler_.get_scale() == scaler.get_scale() > 2**16


def test_masters_are_with_masters_bit_for_bit():
    X, y = table()
    net, hand = make("master_fp16").initialize(), make().initialize()
    module, opt = with_masters(hand.module_, hand.optimizer_)
    scaler = LossScaler("cpu")
    for xb, yb in list(zip(torch.tensor(X).split(BS), torch.tensor(y).split(BS), strict=True)) * 2:
        opt.zero_grad()
        scaler.scale(hand.criterion_(module(xb.half()).float(), yb)).backward()
        scaler.step(opt)
        scaler.update()
    assert_same(weights(net.partial_fit(X, y)), weights(hand))


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("opt", [torch.optim.SGD, torch.optim.AdamW])
def test_masters_in_float32_change_nothing(opt, flat):
    X, y = table()
    settings = dict(optimizer=opt, lr=2**-5, optimizer__weight_decay=0.125)
    masters = dict(amp_enabled=True, amp_dtype="fp32", amp_mode="master", flat_master=flat)
    plain, mixed = make(**settings).fit(X, y), make(**settings, **masters).fit(X, y)
    assert_same(weights(mixed), weights(plain))


def test_flat_masters_are_vectors():
    each, flat = [make(way).fit(*table()) for way in ("master_fp16", "flat_fp16")]
    n_stepped = [sum(len(g["params"]) for g in n.optimizer_.param_groups) for n in (each, flat)]
    assert n_stepped == [6, 2]  # weights; the norm's and the biases
    assert_same(weights(flat), weights(each))


STATES = {"momentum_buffer": torch.bfloat16}


def test_states_in_16_bits_are_those_of_a_loop_by_hand():
    """Set from the start or later, and in a clone."""
    X, y = table()
    net = clone(make("small_bf16", state_dtype=STATES)).fit(X, y)
    torch.manual_seed(0)
    model = Small()
    sgd = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    kinds = dict(flat_master=True, store_param_remainders=True, state_dtype=STATES)
    model, opt = with_masters(model, sgd, dtype=torch.bfloat16, **kinds)
    for i in 2 * [*range(0, len(X), BS)]:
        opt.zero_grad()
        loss = nn.CrossEntropyLoss()(
            model(torch.tensor(X[i : i + BS])), torch.tensor(y[i : i + BS])
        )
        loss.backward()
        opt.step()
    assert_same(weights(net), dict(model.state_dict()))
    again = make("small_bf16").fit(X, y).set_params(state_dtype=STATES).partial_fit(X, y)
    for o in (net.optimizer_, again.optimizer_):
        o.param_groups  # noqa: B018, the optimizer has the masters
        assert {s["momentum_buffer"].dtype for s in o.optimizer.state.values()} == {torch.bfloat16}


@pytest.mark.parametrize("wrong", [dict(flat_master=False), dict(amp_dtype="fp16")])
def test_what_masters_in_2_bytes_need_is_said_and_the_net_is_as_it_was(wrong):
    net = make("small_bf16").fit(*table())
    before, kinds = ends(net), [getattr(net, name) for name in wrong]
    with pytest.raises(MixedPrecisionError, match="store_param_remainders=True needs"):
        net.set_params(**wrong)
    assert_same(ends(net), before)
    assert kinds == [getattr(net, name) for name in wrong]


class Attends(Small):
    """Attention between the numbers of a row, and a note of the dtype that the row comes in."""

    def forward(self, X):
        self.came_in, rows = X.dtype, (X @ self.first.weight.T)[:, None, :, None]
        attended = nn.functional.scaled_dot_product_attention(rows, rows, rows)
        return super().forward(X + attended[:, 0, :4, 0])


class SeesAttention(TorchDispatchMode):
    """The dtypes in which attention is computed."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in str(func):
            self.seen.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("limit", [math.inf, 0], ids=["slow", "fast"])
def test_masters_in_bfloat16_attend_in_float32_where_that_is_faster(monkeypatch, limit):
    """As with `with_masters` and fastai; how fast attention is, is said to be known."""
    attention_is_slow(monkeypatch, lambda device, dtype: limit)
    net, spy = make("master_bf16", module=Attends), SeesAttention()
    spy.seen = set()
    with spy:
        net.fit(*table())
    assert net.module_.came_in == torch.bfloat16
    assert spy.seen == {torch.float32 if limit else torch.bfloat16}


# 4. steps


@fp16
def test_a_skipped_step_is_no_step(way):
    X, y = overflowing_table()
    net = make(way, max_epochs=1, iterator_train__shuffle=False)
    kept = []

    class Keep(Callback):
        def on_batch_begin(self, net, **kwargs):
            kept.append(copy.deepcopy(ends(net)[:2]))

        on_batch_end = on_batch_begin

    net.set_params(callbacks=[Keep()]).fit(X, y)
    assert net.grad_scaler_.skipped == [OVERFLOWING]
    assert_same(kept[2 * OVERFLOWING + 1], kept[2 * OVERFLOWING])
    with pytest.raises(AssertionError):  # another batch does change them
        assert_same(kept[1], kept[0])
    assert net.grad_scaler_.scales == [2.0**16] * 3 + [2.0**15]
    assert all(v.isfinite().all() for v in weights(net).values())


def test_hopeless_runs_end_and_name_the_layer():
    X, y = overflowing_table()
    with pytest.raises(MixedPrecisionError, match="first.weight"):
        make("master_fp16", grad_scaler__max_skips=1).fit(X, y)


def lbfgs(way, module=nn.Linear, **settings):
    """Return a net that LBFGS trains."""
    if module is nn.Linear:
        settings |= dict(module__in_features=4, module__out_features=2)
    return make(way, module=module, optimizer=torch.optim.LBFGS, optimizer__max_iter=4,
                max_epochs=1, batch_size=-1, **settings)  # fmt: skip


@pytest.mark.parametrize("way", ["autocast_fp16", "master_fp16", "autocast_bf16"])
def test_lbfgs_calls_its_closure_several_times(way):
    X, y = table()
    start, plain, mixed = lbfgs(None).initialize(), lbfgs(None).fit(X, y), lbfgs(way).fit(X, y)
    assert len(mixed.criterion_.seen) == len(plain.criterion_.seen) == 4
    assert mixed.grad_scaler_.n_skipped == 0
    for key, value in weights(plain).items():
        moved = (value - weights(start)[key]).norm()
        assert (weights(mixed)[key] - value).norm() < (0.02 if "fp16" in way else 0.1) * moved


def test_lbfgs_takes_an_overflow_back():
    X, y = overflowing_table()
    net = lbfgs("autocast_fp16", Small).initialize()
    batch = torch.tensor(X).split(BS)[OVERFLOWING], torch.tensor(y).split(BS)[OVERFLOWING]
    before = weights(net)
    net.train_step(batch)
    assert net.grad_scaler_.skipped == [0]
    assert_same(weights(net), before)


class TwoNets(Net):
    """Two modules, each with its optimizer."""

    def initialize_module(self):
        self.module_, self.second_ = Small(), nn.Linear(2, 2)
        return self

    def initialize_optimizer(self):
        self.optimizer_ = torch.optim.SGD(self.module_.parameters(), lr=0.25)
        self.second_opt_ = torch.optim.SGD(self.second_.parameters(), lr=0.25)
        return self

    def infer(self, x, **fit_params):
        return self.second_(super().infer(x, **fit_params))


@way
def test_two_modules_and_two_optimizers(way):
    X, y = table()
    mixed, plain = [
        make(w, TwoNets, callbacks=[GradientNormClipping(2.0**-4)]).fit(X, y) for w in (way, None)
    ]
    assert mixed.grad_scaler_.n_skipped == 0
    for a, b in ((mixed.module_, plain.module_), (mixed.second_, plain.second_)):
        for key, value in b.state_dict().items():
            torch.testing.assert_close(a.state_dict()[key], value, rtol=0.05, atol=0.02)


def test_other_optimizers_get_a_closure_they_may_call_twice():
    class Sam(torch.optim.SGD):
        """Steps from the gradient a little further on."""

        def step(self, closure):
            with torch.enable_grad():
                closure()
            params = [p for group in self.param_groups for p in group["params"]]
            moved = [p.grad * 0.01 for p in params]
            with torch.no_grad():
                torch._foreach_add_(params, moved)
                with torch.enable_grad():
                    loss = closure()
                torch._foreach_sub_(params, moved)
            super().step()
            return loss

    X, y = table()
    mixed, plain = [make(w, optimizer=Sam).fit(X, y) for w in ("autocast_fp16", None)]
    assert len(mixed.module_.seen) == 2 * 2 * 4
    for key, value in weights(plain).items():
        torch.testing.assert_close(weights(mixed)[key], value, rtol=0.05, atol=0.02)


# 5. state


@way
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_copy_goes_on_as_the_original(way, how):
    X, y = overflowing_table()
    net = make(way, grad_scaler__growth_interval=3).fit(X, y)
    twin = copy.deepcopy(net) if how == "deepcopy" else pickle.loads(pickle.dumps(net))
    assert_same(ends(twin), ends(net))
    net.partial_fit(X, y), twin.partial_fit(X, y)
    assert_same(ends(twin), ends(net))
    assert_same(twin.grad_scaler_.scales, net.grad_scaler_.scales)
    assert "fp16" not in way or net.grad_scaler_.scales[-1] != net.grad_scaler_.scales[0]


@pytest.mark.filterwarnings("ignore:Setting self.device", "ignore:Requested to load data to CUDA")
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_a_pickle_from_a_gpu_keeps_its_scale():
    net = make("autocast_fp16").fit(*table())
    net.grad_scaler_ = LossScaler("xpu", init_scale=2.0**10)  # any but the CPU's
    net.device = "cuda"
    net = pickle.loads(pickle.dumps(net))
    assert torch.device(net.device).type == "cpu" and net.grad_scaler_.get_scale() == 2**10
    net.partial_fit(*table())
    assert net.grad_scaler_.record.n_steps == 8


@way
def test_a_resumed_run_ends_in_the_same_bits(way, tmp_path):
    def a_net(epochs):
        save = TrainEndCheckpoint(dirname=str(tmp_path), f_grad_scaler="scaler.pt")
        return make(way, grad_scaler__growth_interval=3, max_epochs=epochs,
                    callbacks=[save, LoadInitState(save)])  # fmt: skip

    X, y = table()
    whole = make(way, grad_scaler__growth_interval=3, max_epochs=4).fit(X, y)
    a_net(2).fit(X, y)
    assert (tmp_path / "train_end_scaler.pt").exists()
    resumed = a_net(2).fit(X, y)
    assert len(resumed.history) == 4
    assert_same(ends(resumed), ends(whole))


FOUR = [None, "autocast_fp16", "master_bf16", "flat_fp16"]


@pytest.mark.parametrize("to", FOUR)
@pytest.mark.parametrize("from_", FOUR)
def test_checkpoints_load_into_any_way(from_, to, tmp_path):
    X, y = table()
    files = Checkpoint(dirname=str(tmp_path), f_grad_scaler="scaler.pt", monitor=None)
    trained = make(from_, callbacks=[files], grad_scaler__init_scale=2.0**10).fit(X, y)
    net = make(to).initialize()
    net.load_params(checkpoint=files)
    assert_same(weights(net), weights(trained))
    assert_same(net.optimizer_.state_dict()["state"], trained.optimizer_.state_dict()["state"])
    was, now = trained.grad_scaler_, net.grad_scaler_
    if now.is_enabled():
        assert now.get_scale() == (2.0**10 if was.is_enabled() else 2.0**16)
    assert np.isfinite(net.partial_fit(X, y).history[-1, "train_loss"])


def test_the_scaler_can_be_saved_alone(tmp_path):
    net = make("autocast_fp16", grad_scaler__init_scale=2.0**10).fit(*table())
    net.save_params(f_grad_scaler=tmp_path / "scaler.pt")
    new = make("autocast_fp16").initialize()
    new.load_params(f_grad_scaler=tmp_path / "scaler.pt")
    assert_same(new.grad_scaler_.state_dict(), net.grad_scaler_.state_dict())


def test_fit_starts_anew_and_partial_fit_goes_on():
    X, y = overflowing_table()
    net = make("autocast_fp16").fit(X, y)
    assert net.partial_fit(X, y).grad_scaler_.get_scale() == 2.0**12
    assert net.fit(X, y).grad_scaler_.get_scale() == 2.0**14


@pytest.mark.parametrize("way", ["master_fp16", "flat_fp16"])
def test_a_module_given_as_an_instance_keeps_its_weights(way):
    X, y = table()
    torch.manual_seed(0)
    module = Small()
    net = make(way, module=module).fit(X, y)
    assert module.first.weight.dtype == torch.float16
    before = weights(net)
    net.initialize()
    assert net.module_ is module
    assert_same(weights(net), before)
    net.set_params(amp_enabled=False)
    assert_same({k: v.clone() for k, v in module.state_dict().items()}, before)
    assert module.first.weight.dtype == torch.float32


def test_a_trimmed_net_predicts():
    X, y = table()
    net = make("master_fp16").fit(X, y)
    before, masters = net.forward(X), weights(net)
    net.trim_for_prediction()
    assert_same(net.forward(X), before)
    twin = pickle.loads(pickle.dumps(net))  # what leaves is in 32 bits, and predicts in them
    assert_same(weights(twin), masters)
    assert twin.forward(X).dtype == torch.float32
    assert (twin.forward(X) - before).abs().max() < 2**-8


# 6. callbacks


@way
def test_callbacks_find_true_gradients(way):
    """Before and after clipping, asked for by several callbacks."""
    norms = {}

    def norm(net):
        grads = [p.grad for p in net.module_.parameters()]
        assert all(g.dtype == torch.float32 for g in grads)
        return torch.stack([g.norm() for g in grads]).norm().item()

    class Before(Callback):
        def on_grad_computed(self, net, **kwargs):
            norms.setdefault("before", norm(net))

    class After(Callback):
        def on_grad_computed(self, net, **kwargs):
            norms.setdefault("after", norm(net))

    X, y = table()
    clip = GradientNormClipping(2.0**-4)
    plain = make(callbacks=[("b", Before)]).fit(X, y)
    expected = norms.pop("before")
    mixed = make(way, callbacks=[("b", Before), ("c1", clip), ("c2", clip), ("a", After)])
    mixed.fit(X, y)
    assert norms["before"] == pytest.approx(expected, rel=0.02) and expected > 2.0**-3
    assert norms["after"] == pytest.approx(2.0**-4, rel=1e-3)
    assert plain.history


@way
def test_other_callbacks_work_unchanged(way):
    X, y = table(96)
    callbacks = [
        EpochScoring("accuracy", lower_is_better=False, name="acc"),
        EpochScoring("accuracy", on_train=True, name="train_acc"),
        LRScheduler("StepLR", step_size=1, gamma=0.5),
        Freezer("first.weight"),
        EarlyStopping(patience=2, threshold=0.5, load_best=True, sink=lambda text: None),
        ProgressBar(),
    ]
    runs = []
    for w in (way, None):
        split = Net(Small).train_split
        net = make(w, callbacks=callbacks, max_epochs=6, train_split=split, verbose=1)
        net.set_params(callbacks__print_log__sink=lambda text: None)
        first = net.initialize().module_.state_dict()["first.weight"].clone()
        runs.append(net.partial_fit(X, y))
        assert_same(net.module_.state_dict()["first.weight"], first)  # a ParamMapper froze it
        assert net.history[:, "event_lr"][:2] == [0.25, 0.125]
    mixed, plain = runs
    assert len(mixed.history) == len(plain.history)
    for key in ("acc", "train_acc", "valid_loss"):
        a, b = mixed.history[:, key], plain.history[:, key]
        assert a == pytest.approx(b, abs=0.07)


def test_a_schedule_by_batch_does_not_warn_of_skipped_steps(recwarn):
    X, y = overflowing_table()
    X[:BS] *= 1e6  # the first batch is skipped
    schedule = LRScheduler("StepLR", step_size=2, gamma=0.5, step_every="batch")
    net = make("autocast_fp16", callbacks=[schedule]).fit(X, y)
    assert 0 in net.grad_scaler_.skipped
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


# 7. overriding


class Penalty:
    """As skorch's notes have it: a term of the weights is added to the loss."""

    def get_loss(self, y_pred, y_true, X=None, training=False):
        loss = super().get_loss(y_pred, y_true, X=X, training=training)
        return loss + 0.0625 * sum(p.abs().sum() for p in self.module_.parameters())


class OwnLoss:
    """Asks neither criterion nor `super`."""

    def get_loss(self, y_pred, y_true, X=None, training=False):
        return nn.functional.cross_entropy(y_pred, y_true)


class OwnSingle:
    """Calls `backward` by itself."""

    def train_step_single(self, batch, **fit_params):
        self._set_training(True)
        y_pred = self.infer(batch[0], **fit_params)
        loss = self.get_loss(y_pred, batch[1], X=batch[0], training=True)
        loss.backward()
        return {"loss": loss, "y_pred": y_pred}


class ScalingSingle:
    """Scales the loss as PyTorch's notes do."""

    def train_step_single(self, batch, **fit_params):
        self._set_training(True)
        y_pred = self.infer(batch[0], **fit_params)
        loss = self.get_loss(y_pred, batch[1], X=batch[0], training=True)
        scaler = getattr(self, "grad_scaler_", None)
        (loss if scaler is None else scaler.scale(loss)).backward()
        return {"loss": loss, "y_pred": y_pred}


class OwnInfer:
    """Calls the module by itself."""

    def infer(self, x, **fit_params):
        return self.module_(torch.as_tensor(x), **fit_params)


class Accumulating:
    """As skorch's FAQ has it: a step every second batch, taken directly."""

    def get_loss(self, *args, **kwargs):
        return super().get_loss(*args, **kwargs) / 2

    def train_step(self, batch, **fit_params):
        step = self.train_step_single(batch, **fit_params)
        if len(self.history[-1, "batches"]) % 2 == 0:
            self.optimizer_.step()
            self.optimizer_.zero_grad()
        return step


class OwnStep:
    """Steps by the method that is there for it, twice a batch."""

    def train_step(self, batch, **fit_params):
        for _ in range(2):
            self._zero_grad_optimizer()
            step = self.train_step_single(batch, **fit_params)
            if hasattr(self, "optimizer_step"):
                self.optimizer_step(self.optimizer_)
            else:
                self.optimizer_.step()
        return step


OVERRIDES = [Penalty, OwnLoss, OwnSingle, ScalingSingle, OwnInfer, Accumulating, OwnStep]
override = pytest.mark.parametrize("override", OVERRIDES, ids=lambda c: c.__name__)
order = pytest.mark.parametrize("order", ["above", "below"])


def overridden(override, order):
    """Return a net with the override in a subclass of the mixed net, or below the mixin."""
    if order == "above":
        return type("Own", (override, Net), {})
    return type("Own", (MixedPrecisionMixin, override, NeuralNetClassifier), {})


@way
@order
@override
def test_overridden_methods_keep_mixed_precision(override, order, way):
    X, y = table()
    plain = make(None, type("Plain", (override, NeuralNetClassifier), {})).fit(X, y)
    net = make(way, overridden(override, order), grad_scaler__init_scale=2.0**10,
               grad_scaler__growth_interval=3).fit(X, y)  # fmt: skip
    dtype = torch.float16 if "fp16" in way else torch.bfloat16
    assert {seen[1] for seen in net.module_.seen} == {dtype}
    for key, value in weights(plain).items():
        torch.testing.assert_close(weights(net)[key], value, rtol=0.05, atol=0.02)
    if "fp16" in way:  # scaled, one update for each step, and none was skipped
        n_steps = {Accumulating: 4, OwnStep: 16}.get(override, 8)
        assert net.grad_scaler_.n_skipped == 0 and net.grad_scaler_.record.n_steps == n_steps
        assert net.grad_scaler_.get_scale() == 2.0 ** (10 + n_steps // 3)


@fp16
def test_a_step_taken_directly_is_skipped_as_well(way):
    class Direct(Net):
        def train_step(self, batch, **fit_params):
            self.optimizer_.zero_grad()
            step = self.train_step_single(batch, **fit_params)
            self.optimizer_.step()
            return step

    X, y = overflowing_table()
    direct, usual = make(way, Direct).fit(X, y), make(way).fit(X, y)
    assert direct.grad_scaler_.skipped == [2, 6]
    assert_same(ends(direct), ends(usual))


def test_gradients_without_scale_are_stepped_and_told(caplog):
    class Around(Net):
        def train_step_single(self, batch, **fit_params):
            y_pred = self.infer(batch[0], **fit_params)
            loss = self.get_loss(y_pred, batch[1], training=True)
            torch.autograd.backward(loss)  # not loss.backward()
            return {"loss": loss, "y_pred": y_pred}

    X, y = table()
    net, plain = make("autocast_fp16", Around).fit(X, y), make().fit(X, y)
    told = [r.message for r in caplog.records if "loss.backward()" in r.message]
    assert len(told) == 1 and "train_step_single" in told[0]
    torch.testing.assert_close(
        weights(net)["first.weight"], weights(plain)["first.weight"], rtol=0.05, atol=0.02
    )


def test_a_closure_given_to_the_optimizer_directly_is_refused():
    class Direct(Net):
        def _step_optimizer(self, step_fn):
            step_fn()
            self.optimizer_.step(step_fn)

    with pytest.raises(MixedPrecisionError, match=r"self\.optimizer_step\(optimizer, closure\)"):
        make("autocast_fp16", Direct).fit(*table())


def test_a_criterion_with_weights_is_for_autocast():
    class Weighted(Loss):
        def __init__(self):
            super().__init__()
            self.weight_ = nn.Parameter(torch.ones(2))

        def forward(self, pred, target):
            return super().forward(pred * self.weight_, target)

    X, y = table()
    with pytest.raises(MixedPrecisionError, match="amp_mode='autocast'"):
        make("master_fp16", criterion=Weighted).fit(X, y)
    net = make("autocast_fp16", criterion=Weighted).fit(X, y)
    assert (net.criterion_.weight_ != 1).any()


# 8. no effect


def test_what_has_no_effect_is_told_once(caplog):
    X, y = table()
    nets = [make(amp_enabled=True, amp_dtype=torch.float32).fit(X, y) for _ in range(2)]
    told = [r.message for r in caplog.records if "no effect" in r.message]
    assert len(told) == 1 and "torch.float32" in told[0] and "'cpu'" in told[0]
    assert_same(weights(nets[0]), weights(make().fit(X, y)))
    make("autocast_bf16").fit(X, y)
    assert len([r for r in caplog.records if "no effect" in r.message]) == 1


def test_autocast_works_where_pytorch_says_so():
    assert autocast_works("cpu", torch.float16) and autocast_works("cpu", torch.bfloat16)
    assert not autocast_works("cpu", torch.float32)
    assert not autocast_works("meta", torch.float16)


# 9. compiled, and on real data


@pytest.mark.parametrize("way", ["autocast_fp16", "master_bf16"])
def test_compiled_modules(way):
    X, y = table()
    compiled = dict(compile=True, compile__backend="eager", module=nn.Linear)
    linear = dict(module__in_features=4, module__out_features=2, criterion=nn.CrossEntropyLoss)
    net = make(way, **(compiled | linear)).fit(X, y)
    same = make(way, module=nn.Linear, **linear).fit(X, y)
    assert_same({k.removeprefix("_orig_mod."): v for k, v in weights(net).items()}, weights(same))


@pytest.mark.parametrize("way", ["autocast_bf16", "master_bf16", "flat_fp16"])
def test_digits_are_learned_as_in_float32(way):
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype("float32")

    def score(way):
        torch.manual_seed(1)
        amp = {} if way is None else dict(amp_enabled=True, **WAYS[way])
        net = Net(nn.Linear, module__in_features=64, module__out_features=10, verbose=0, lr=0.5,
                  criterion=nn.CrossEntropyLoss, max_epochs=8, train_split=None, **amp)  # fmt: skip
        return net.fit(X[:1200], y[:1200]).score(X[1200:], y[1200:])

    assert score(None) > 0.85
    assert score(way) == pytest.approx(score(None), abs=0.01)
