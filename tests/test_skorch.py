"""Mixed precision in skorch beyond what nbs/13_skorch.ipynb asserts.

The batches are few and known: `table` is not shuffled, so a fit can be written out by hand, and
batch 2 of `overflowing` is beyond float16.
"""

import copy
import pickle
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("skorch")

import torch
from sklearn.base import clone
from skorch import NeuralNetClassifier
from skorch import callbacks as cbs
from skorch.callbacks import Callback, GradientNormClipping
from torch import nn
from torch.optim import SGD

from mixedfp import masters_of, with_masters
from mixedfp.formats import MixedPrecisionError
from mixedfp.nested import warn_once
from mixedfp.scaler import LossScaler
from mixedfp.skorch import MixedPrecisionMixin
from mixedfp.testing import assert_same

MODES = {
    f"{flat}{dtype}": dict(amp_enabled=True, amp_dtype=dtype, flat_master=bool(flat))
    for flat in ("", "flat_")
    for dtype in ("fp16", "bf16")
}
every_mode = pytest.mark.parametrize("mode", MODES)
ROUNDED = dict(state_dtype={"momentum_buffer": torch.bfloat16})
SMALL = dict(flat_master=True, keep_fp32=["last"], **ROUNDED)
LINEAR = dict(module=nn.Linear, module__in_features=4, module__out_features=2)
BS = 8


def table(factor=1):
    """Return four batches; the numbers of batch 2 are multiplied by `factor`."""
    rng = np.random.default_rng(0)
    X = (rng.integers(-16, 16, (4 * BS, 4)) / 8).astype("float32")
    y = (X[:, 0] + X[:, 1] > 0).astype("int64")
    X[2 * BS : 3 * BS] *= factor
    return X, y


overflowing = partial(table, 1e5)


class Small(nn.Module):
    """Two layers and a norm, and a note of the dtype of each product."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.last, self.seen = nn.Linear(8, 2), []

    def forward(self, x):
        h = self.first(x)
        self.seen.append(h.dtype)
        return self.last(self.norm(h).relu())


class Loss(nn.CrossEntropyLoss):
    def forward(self, pred, target):
        assert pred.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        return super().forward(pred, target)


class Net(MixedPrecisionMixin, NeuralNetClassifier):
    """The usual net."""


def make(mode=None, cls=Net, module=Small, **settings):
    """Return a net with the same weights each time."""
    defaults = dict(criterion=Loss, train_split=None, batch_size=BS, max_epochs=2, verbose=0)
    momentum = {} if "optimizer" in settings else dict(optimizer__momentum=0.5)
    torch.manual_seed(0)
    return cls(module, **(defaults | dict(lr=0.25) | momentum | MODES.get(mode, {}) | settings))


def fit(mode=None, *args, data=None, **settings):
    return make(mode, *args, **settings).fit(*data or table())


def modules(net):
    found = {k: getattr(net, f"{k}_", None) for k in net._modules}
    return nn.ModuleDict({k: m for k, m in found.items() if isinstance(m, nn.Module)})


def weights(net):
    return copy.deepcopy(dict(modules(net).state_dict()))


def ends(net):
    """Return all that training changes."""
    opt = copy.deepcopy(net.optimizer_.state_dict()) | {"loss_scale": None}
    return weights(net), opt, net.grad_scaler_.state_dict()


WRONG = [
    ("dtype", dict(amp_dtype="float8"), TypeError),
    ("growth_factor", dict(grad_scaler__growth_factor=0.5), ValueError),
    ("needs flat_master=True", dict(flat_master=False, **ROUNDED), MixedPrecisionError),
    ("matches", dict(keep_fp32="nothing"), ValueError),
]


@pytest.mark.parametrize("words, settings, error", WRONG)
def test_wrong_settings_are_refused_and_change_nothing(words, settings, error):
    with pytest.raises(error, match=words):
        make("flat_bf16", **settings).initialize()
    net = fit("flat_bf16")
    before, params = ends(net), net.get_params()
    with pytest.raises(error, match=words):
        net.set_params(lr=2.0, **settings)
    assert_same(ends(net), before)
    assert masters_of(net.module_) is net.optimizer_.masters
    assert net.get_params().keys() == params.keys() and net.amp_dtype == "bf16" and net.lr == 0.25


def test_an_interrupt_before_the_step_leaves_a_usable_scaler():
    interrupts = Callback()
    interrupts.on_grad_computed = Mock(side_effect=KeyboardInterrupt)
    net = fit("fp16", callbacks=[interrupts])  # returns as usual
    net.callbacks_ = []
    net.partial_fit(*table())
    assert_same(*[dict(n.module_.named_parameters()) for n in (net, fit("fp16"))])


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("kinds", [{}, dict(flat_master=True), SMALL], ids=["each", "flat", "16"])
def test_a_net_is_the_loop_of_pytorchs_documentation(dtype, kinds):
    """Two callbacks clip true gradients; the scale grows after three steps."""
    clip = [GradientNormClipping(2.0**-6), GradientNormClipping(2.0**-6)]
    settings = dict(amp_enabled=True, amp_dtype=dtype, callbacks=clip, **kinds)
    net, hand = [clone(make(**settings, grad_scaler__growth_interval=3)), make().initialize()]
    torch.manual_seed(0), net.initialize()
    net.module_.load_state_dict(hand.module_.state_dict())
    model, opt = with_masters(hand.module_, hand.optimizer_, dtype=dtype, **kinds)
    scaler = LossScaler(enabled=dtype == "fp16", growth_interval=3)
    for xb, yb in 2 * [*zip(*(torch.tensor(t).split(BS) for t in table()), strict=True)]:
        opt.zero_grad()
        scaler.scale(hand.criterion_(model(xb), yb)).backward()
        scaler.unscale_(opt)
        for _ in range(2):
            nn.utils.clip_grad_norm_(model.parameters(), 2**-6)
        scaler.step(opt)
        scaler.update()
    assert_same(ends(net.partial_fit(*table()))[:2], ends(hand)[:2])
    assert net.optimizer_.masters.policy == opt.masters.policy
    assert net.grad_scaler_.get_scale() == scaler.get_scale() > (2**16 if dtype == "fp16" else 0)


@every_mode
def test_a_skipped_step_changes_nothing(mode):
    kept, keep = [], Callback()
    keep.on_batch_begin = keep.on_batch_end = lambda net, **_: kept.append(ends(net)[:2])
    net = fit(mode, data=table(np.nan), max_epochs=1, callbacks=[keep])
    assert net.optimizer_.masters.skipped == [2]
    assert_same(kept[5], kept[4])
    with pytest.raises(AssertionError):  # another batch does change them
        assert_same(kept[1], kept[0])
    if "fp16" in mode:  # beyond its range; `fit` starts anew
        assert net.partial_fit(*overflowing()).grad_scaler_.get_scale() == 2.0**14
        assert net.fit(*overflowing()).grad_scaler_.get_scale() == 2.0**15
    else:
        net.set_params(skip_nonfinite=False).partial_fit(*table(np.nan))
        assert any(w.isnan().any() for w in weights(net).values())


@every_mode
def test_a_copy_continues_as_the_original(mode):
    net = fit(mode, data=overflowing(), grad_scaler__growth_interval=3)
    twins = [pickle.loads(pickle.dumps(net)), copy.deepcopy(net)]
    for _ in range(2):
        for twin in twins:
            assert_same(ends(twin), ends(net))
            assert_same(twin.forward(table()[0]), net.forward(table()[0]))
        for each in (net, *twins):
            each.partial_fit(*overflowing())


@every_mode
def test_a_resumed_run_ends_in_the_same_bits(mode, tmp_path):
    settings = dict(grad_scaler__growth_interval=3)
    whole, save = fit(mode, max_epochs=4, **settings), None
    for _ in range(2):
        save = cbs.TrainEndCheckpoint(dirname=str(tmp_path), f_grad_scaler="scaler.pt")
        net = fit(mode, callbacks=[save, cbs.LoadInitState(save)], **settings)
    assert_same(ends(net), ends(whole))
    new = make(mode, **settings).initialize()
    new.load_params(f_grad_scaler=tmp_path / "train_end_scaler.pt")
    assert_same(new.grad_scaler_.state_dict(), whole.grad_scaler_.state_dict())


@pytest.mark.parametrize("other", [None, *MODES])
def test_a_mode_that_is_set_keeps_weights_and_momentum(other):
    net = fit("flat_bf16", module=Small())
    module = net.module_
    before, momentum = weights(net), copy.deepcopy(net.optimizer_.state_dict()["state"])
    assert module.first.weight.dtype == torch.float32
    net.set_params(**dict(flat_master=False) | MODES.get(other, dict(amp_enabled=False)))
    assert_same([weights(net), net.optimizer_.state_dict()["state"]], [before, momentum])
    assert (masters_of(module) is None) == (other is None)
    net.partial_fit(*table())
    assert not module.first.weight.equal(before["module.first.weight"])
    assert net.initialize().module_ is module


def test_a_trimmed_net_predicts():
    net, (X, _) = fit("fp16"), table()
    before, masters = net.forward(X), weights(net)
    net.trim_for_prediction()
    assert_same(net.forward(X), before)
    twin = pickle.loads(pickle.dumps(net))  # has no optimizer, so no masters: in float32
    assert_same(weights(twin), masters)
    assert (twin.forward(X) - before).abs().max() < 2**-8


@every_mode
def test_other_callbacks_work(mode, recwarn):
    schedule = cbs.LRScheduler("StepLR", step_size=8, gamma=0.5, step_every="batch")
    stop = cbs.EarlyStopping("train_loss", patience=9, load_best=True, sink=lambda text: None)
    net = make(mode, callbacks=[schedule, cbs.Freezer("first.weight"), stop]).initialize()
    first, (X, y) = net.module_.first.weight.clone(), overflowing()
    X[:BS] *= 1e6  # the first batch is skipped, too
    net.partial_fit(X, y)
    assert_same(net.module_.first.weight.detach(), first)
    assert net.optimizer_.param_groups[0]["lr"] == 0.125
    assert "fp16" not in mode or 0 in net.grad_scaler_.skipped
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


class Scaling:
    """Calls the module and `backward` itself, and scales the loss as in PyTorch's documentation."""

    scales = True

    def train_step_single(self, batch, **fit_params):
        self._set_training(True)
        y_pred = self.module_(torch.as_tensor(batch[0]))
        loss = nn.functional.cross_entropy(y_pred, batch[1])
        is_scaled = self.scales and hasattr(self, "grad_scaler_")
        (self.grad_scaler_.scale(loss) if is_scaled else loss).backward()
        return {"loss": loss, "y_pred": y_pred}


class Unscaled(Scaling):
    scales = False  # the gradients are true, apart from those that float16 flushes to 0


class Once:
    """Steps all optimizers, without telling callbacks."""

    n_times = 1

    def train_step(self, batch, **fit_params):
        for _ in range(self.n_times):
            self._zero_grad_optimizer()
            step = self.train_step_single(batch, **fit_params)
            for name in self._optimizers:
                getattr(self, name + "_").step()
        return step


class Twice(Once):
    n_times = 2


class Two:
    """Two modules, each with its optimizer."""

    def initialize_module(self):
        self.module_, self.second_ = Small(), nn.Linear(2, 2)
        return self

    def initialize_optimizer(self):
        self.optimizer_ = SGD(self.module_.parameters(), lr=0.25)
        self.second_opt_ = SGD(self.second_.parameters(), lr=0.25)
        return self

    def infer(self, x, **fit_params):
        return self.second_(super().infer(x, **fit_params))


OWN = [(Scaling,), (Unscaled,), (Twice,), (Twice, Scaling), (Two,), (Once, Two)]


@every_mode
@pytest.mark.parametrize("order", ["above", "below"])
@pytest.mark.parametrize("own", OWN)
def test_overridden_methods_keep_mixed_precision(own, order, mode, caplog):
    warn_once.cache_clear()
    bases = (*own, Net) if order == "above" else (MixedPrecisionMixin, *own, NeuralNetClassifier)
    settings = dict(callbacks=[GradientNormClipping(2.0**-4)] if Two in own else [])
    plain = fit(None, type("Plain", (*own, NeuralNetClassifier), {}), **settings)
    scale = dict(grad_scaler__init_scale=2.0**10, grad_scaler__growth_interval=3)
    net = fit(mode, type("Own", bases, {}), **settings, **scale)
    assert {dtype.itemsize for dtype in net.module_.seen} == {2}
    assert None not in map(masters_of, modules(net).values())
    torch.testing.assert_close(weights(net), weights(plain), rtol=0.05, atol=0.02)
    warned = [r for r in caplog.records if "grad_scaler_.scale(loss)" in r.message]
    assert len(warned) == ("fp16" in mode and Unscaled in own)
    if "fp16" in mode:  # one update for each step, and none was skipped
        n_steps = 16 if Twice in own or Two in own else 8
        assert net.grad_scaler_.n_skipped == 0 and net.grad_scaler_.n_steps == n_steps
        assert net.grad_scaler_.get_scale() == 2.0 ** (10 + n_steps // 3)
    twin = copy.deepcopy(net)
    assert_same(weights(twin.partial_fit(*table())), weights(net.partial_fit(*table())))


@every_mode
def test_compiled_modules(mode):
    net, same = fit(mode, compile=True, compile__backend="eager", **LINEAR), fit(mode, **LINEAR)
    assert_same({k.replace("_orig_mod.", ""): v for k, v in weights(net).items()}, weights(same))
