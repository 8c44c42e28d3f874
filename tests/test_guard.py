"""One guard decides about steps: by hand, with scalers, a closure, in a Learner.

Each front end trains a weight over batches of which some overflow; all must skip the same ones,
and stop after the same number of skips in a row. Where `late` is used, this CPU's checks are a
GPU's: not ready until the host waits for them, and each wait is counted.
"""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from fastai.basics import DataLoaders, Learner
from fastai.callback.training import GradientClip
from fastai.optimizer import SGD as FastaiSGD
from fastai.optimizer import OptimWrapper
from laws import read_late
from nets import Counter
from tiny import Do
from tiny import make_learner as conv_learner
from torch import nn
from torch.amp import GradScaler

import mixedfp.callback  # noqa: F401, puts `to_fp16` on Learners
from mixedfp import scaler as scalers
from mixedfp.engine.forward import computing
from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

INF, NAN, RATE = math.inf, math.nan, 2.0**-10
SCALE = dict(init_scale=8.0, growth_interval=3)
ONE = torch.ones(1, 1)
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
SGD = torch.optim.SGD
dtypes = pytest.mark.parametrize("dtype", ["bf16", "fp16"])
late = pytest.fixture(read_late, name="late")  # the list of waits
flats = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])


class Net(nn.Module):
    """A weight and a count of batches, which a skip restores."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.count += 1
        return x @ self.weight


def norm_net(norm=nn.BatchNorm1d):
    return nn.Sequential(nn.Linear(4, 8), norm(8), nn.Tanh(), nn.Linear(8, 2))


def by_hand(net, dtype, factors, flat, scaler=None, has_closure=False):
    """Train in a loop; `factors` of the loss are 1, inf or nan. Return the skipped steps."""
    opt = SGD(net.parameters(), RATE)
    with_masters(net, opt, dtype=dtype, flat_master=flat)
    scaler = LossScaler(enabled=False) if scaler is None else scaler("cpu", **SCALE)
    for factor in factors:

        def closure(factor=factor):
            opt.zero_grad()
            loss = net(ONE).sum() * factor
            scaler.scale(loss).backward()
            return loss

        if has_closure:
            opt.step(closure)
        else:
            closure()
            scaler.step(opt)
            scaler.update()
    return opt.masters.skipped


def make_learner(net, batches, to, opt_func=FastaiSGD, lr=RATE, **settings):
    """Return a Learner whose loss is the output times the target."""
    dls, loss_func = DataLoaders(batches, batches[:1]), lambda out, y: (out * y).mean()
    learn = Learner(dls, net, loss_func=loss_func, opt_func=opt_func, lr=lr, train_bn=False)
    getattr(learn, to)(**settings)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, wd=0.0)
    return learn


def by_learner(net, dtype, factors, flat):
    """Train a Learner; the factor is the target."""
    batches = [(ONE, torch.full((1, 1), f)) for f in factors]
    scale = dict(loss_scale=8.0) if dtype == "fp16" else {}
    return make_learner(net, batches, f"to_{dtype}", flat_master=flat, **scale).mp_cb.skipped


FRONTS = {
    "a loop": by_hand,
    "a closure": partial(by_hand, has_closure=True),
    "LossScaler": partial(by_hand, scaler=LossScaler),
    "GradScaler": partial(by_hand, scaler=GradScaler),
    "a Learner": by_learner,
}


@pytest.mark.parametrize("front", FRONTS)
@dtypes
@flats
def test_a_skip_changes_nothing_and_30_in_a_row_stop_the_training(front, dtype, flat):
    train, net = FRONTS[front], Net()
    bad = [(INF, NAN)[i % 8 // 4] if i % 4 == 3 else 1.0 for i in range(140)]
    factors = [1.0, *bad, 1.0]  # 35 skips
    skipped = train(net, dtype, factors, flat)
    assert skipped == [i for i, f in enumerate(factors) if f != 1.0]
    n = len(factors) - len(skipped)
    assert (net.state_dict()["weight"].item(), net.count) == (-n * RATE, n)
    train(Net(), dtype, [1.0] + 29 * [INF] + [1.0] + 29 * [NAN] + [1.0], flat)
    net = Net()
    with pytest.raises(MixedPrecisionError, match="30 steps in a row were skipped") as e:
        train(net, dtype, [1.0] + 30 * [INF] + [1.0], flat)
    assert "in the gradients of weight. " in str(e.value)
    assert (net.state_dict()["weight"].item(), net.count) == (-RATE, 1)


@pytest.mark.parametrize("front", ["a loop", "a Learner"])
def test_where_no_scale_explains_a_skip_there_is_one_warning(front, warnings_of):
    FRONTS[front](Net(), "bf16", [1.0, INF, 1.0, NAN], False)
    assert len([text for text in warnings_of() if text.startswith("a step was skipped")]) == 1


def test_of_two_optimizers_each_has_its_own_count_and_restores_the_buffers_of_its_modules():
    nets = nn.ModuleList([Net(), nn.Sequential(Counter(), Net())])  # one has buffers alone
    opts = [SGD(net.parameters(), 0.1) for net in nets]
    with_masters(nets, *opts, dtype="bf16")
    with pytest.raises(MixedPrecisionError, match="30 steps in a row"):
        for _ in range(31):
            for net, opt, factor in zip(nets, opts, (1.0, INF), strict=True):
                opt.zero_grad()
                (net(ONE).sum() * factor).backward()
            for opt in opts:
                opt.step()
    assert [m.count for m in (nets[0], *nets[1])] == [30, 0, 0]
    assert opts[0].masters.n_skipped == 30


def test_skips_in_a_row_stop_the_training_once_the_host_knows(late):
    model = norm_net()
    opt = SGD(model.parameters(), 0.1, fused=True)
    with_masters(model, opt, dtype="bf16")
    with pytest.raises(MixedPrecisionError, match="30 steps in a row"):
        for _ in range(32):
            opt.zero_grad()
            (model(X).sum() * NAN).backward()
            opt.step()
            for found, _ in opt.master_step.guard._pending[:-1]:  # ready one step later
                bool(found[0])


def test_a_learner_finds_the_batch_that_was_skipped(late):
    good, bad = ((torch.randn(4, 4), torch.full((4, 2), target)) for target in (1.0, INF))
    opt = lambda ps, lr: OptimWrapper(ps, SGD, lr=lr, fused=True)  # noqa: E731
    learn = make_learner(norm_net(), [good, bad, good, good], "to_bf16", opt, 0.1)
    assert not late
    assert learn.mp_cb.find_overflow().step == 1
    assert learn.mp_cb.skipped == [1] and late
    assert len(learn.mp_cb._skipped()) == 1  # the other batches are forgotten
    assert all(p.isfinite().all() for p in learn.model.parameters())


class Masked(nn.Module):
    """Has a large buffer that never changes, one that is written, and its own batch norm."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.register_buffer("mask", torch.ones(512, 512))
        self.register_buffer("mean", torch.zeros(4)), self.register_buffer("var", torch.ones(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        y = self.linear(x) * self.linear.mask[0, :4]
        return nn.functional.batch_norm(y.float(), self.mean, self.var, training=True)


@pytest.mark.parametrize("fused", [False, True])
def test_only_buffers_that_change_are_copied_and_restored(fused, late, monkeypatch):
    model, copied, own = Masked(), [], torch._foreach_copy_
    opt = SGD(model.parameters(), 0.1, fused=fused)
    with_masters(model, opt, dtype="bf16")
    monkeypatch.setattr(torch, "_foreach_copy_", lambda a, b: copied.extend(a) or own(a, b))
    for factor in (1.0, 1.0, INF, 1.0):
        before = {k: v.clone() for k, v in model.named_buffers()}
        opt.zero_grad()
        (model(X).square().sum() * factor).backward()
        opt.step()
        if factor != 1.0:
            assert_same(dict(model.named_buffers()), before)
        else:
            assert not torch.equal(model.mean, before["mean"]) and model.count > before["count"]
    assert copied and max(t.numel() for t in copied) < 512


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        self.running_mean = 0.9 * self.running_mean + 0.1 * x.detach().float().mean(0)
        return x - x.mean(0)


def two_passes(model, x):
    return model(x).square().sum() + model(X).square().sum()


def a_part_first(model, x):
    with computing(model):
        part = model[:2](x)
    return part.sum() + model(X).sum()


@pytest.mark.parametrize("norm, run", [(OwnNorm, two_passes), (nn.BatchNorm1d, a_part_first)])
def test_a_skip_restores_statistics_of_before_the_first_pass(norm, run):
    """A pass may replace them in Python, or go through a part before one through the whole."""
    model = norm_net(norm)
    model, opt = with_masters(model, SGD(model.parameters(), 0.1), dtype="bf16")
    for factor in (1.0, 1.0, INF):
        before = copy.deepcopy(dict(model.state_dict()))
        opt.zero_grad()
        run(model, X * factor).backward()
        opt.step()
    assert opt.masters.n_skipped == 1
    assert_same(dict(model.state_dict()), before)


def test_a_skip_restores_buffers_below_modules_that_are_empty_or_compiled():
    class Empty(nn.Sequential):
        def __len__(self):
            return 0

    model = nn.Sequential(Empty(nn.BatchNorm1d(4)), nn.Linear(4, 1))
    model[1] = torch.compile(model[1], backend="eager")
    model, opt = with_masters(model, SGD(model.parameters(), 0.1))
    before = copy.deepcopy(dict(model.state_dict()))
    model(X * NAN).sum().backward()
    opt.step()
    assert_same(dict(model.state_dict()), before)


def test_a_learner_clips_true_gradients_also_half_ones_and_averages_finite_losses():
    moved, spoil = [], [Do("before_batch", lambda learn: learn.xb[0].fill_(NAN), i) for i in (1, 2)]
    for settings in ({}, dict(half_grads=True)):
        learn = conv_learner()
        start = nn.utils.parameters_to_vector(learn.model.parameters()).clone()
        learn.to_fp16(flat_master=True, **settings).fit(1, 0.1, cbs=[GradientClip(0.1), *spoil])
        assert learn.mp_cb.n_skipped == 2 and learn.recorder.smooth_loss.value.isfinite()
        moved.append(nn.utils.parameters_to_vector(learn.model.parameters()) - start)
    assert (moved[1] - moved[0]).norm() < 0.1 * moved[0].norm()


def test_a_skip_leaves_buffers_on_the_device_that_the_model_was_moved_to():
    net = Net()
    net, opt = with_masters(net, SGD(net.parameters(), 0.1))
    net(ONE).sum().backward()
    net.to("meta")
    opt.skip_step()
    assert net.count.is_meta


def test_the_verdict_is_a_value_and_the_gradients_are_read_once(monkeypatch):
    net = Net()
    net, opt = with_masters(net, SGD(net.parameters(), 0.1), dtype="bf16")
    scaler = LossScaler(init_scale=8.0)
    scaler.scale(net(ONE).sum() * INF).backward()
    known = scaler.look(opt)
    monkeypatch.setattr("mixedfp.scaler._find", None)
    assert known is scaler.look(opt) and known.found_inf and known.inv_scale is None
    assert scaler.step(opt) is False
    scaler.update()
    assert opt.masters.n_skipped == scaler.n_skipped == 1


@flats
def test_after_steps_of_a_gradscaler_a_plain_step_takes_gradients_as_they_are(flat):
    net, scaler = Net(), GradScaler("cpu", **SCALE)
    opt = SGD(net.parameters(), RATE, fused=True)
    with_masters(net, opt, flat_master=flat)
    for _ in range(2):
        scaler.scale(net(ONE).sum()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    net(ONE).sum().backward()
    opt.step()
    assert net.weight.item() == -3 * RATE


@pytest.mark.parametrize("flat", [None, False, True], ids=["plain", "each", "flat"])
@pytest.mark.parametrize("kind", [LossScaler, GradScaler])
def test_step_hooks_get_true_gradients_and_float32_parameters(kind, flat):
    model, seen = nn.Linear(4, 4), []
    opt, params = SGD(model.parameters(), 0.1), list(model.parameters())
    if flat is not None:
        with_masters(model, opt, dtype="fp16", flat_master=flat)
    opt.register_step_pre_hook(lambda *_: seen.append(nn.utils.clip_grad_norm_(params, 1.0)))
    opt.register_step_post_hook(lambda *_: [p.data.clamp_(-0.1, 0.1) for p in params] and None)
    scaler, before = kind("cpu", init_scale=1024.0), model.weight.detach().clamp(-0.1, 0.1)
    scaler.scale(model(torch.ones(2, 4)).float().sum()).backward()
    scaler.step(opt)
    is_plain = flat is None and kind is GradScaler
    assert is_plain or seen[0].item() == pytest.approx(80**0.5)  # 16 of 2 and 4 of 2
    assert model.weight.abs().max() <= 0.1 and (model.weight - before).norm() < 0.11
    assert all(p.dtype == torch.float32 for p in params)


class Polyak(SGD):
    """Its rate is the loss that the closure returns."""

    n_calls = 1

    def step(self, closure=None):
        for _ in range(self.n_calls):
            self.param_groups[0]["lr"] = closure().item()
        super().step()


Twice = type("Twice", (Polyak,), dict(n_calls=2))
SAM = type("SAM", (SGD,), dict(first_step=SGD.step))


@flats
@pytest.mark.parametrize("make", [Polyak, Twice, SAM, torch.optim.LBFGS])
def test_an_optimizer_is_given_what_its_closure_returned_but_once(make, flat):
    """A second call would return the old loss, and compute no gradients."""
    net = Net()
    net.weight.data.fill_(1)
    opt = make(net.parameters())
    with_masters(net, opt, dtype="bf16", flat_master=flat)

    def closure():
        loss = net(ONE).sum() / 2
        loss.backward()
        return loss

    if make is Polyak:
        assert opt.step(closure).item() == 0.5
        assert net.weight.item() == 1 - 0.5 * 0.5
    else:
        words = "calls its closure several times.*skip_nonfinite=False"
        with pytest.raises(MixedPrecisionError, match=words):
            opt.step(closure)
        assert net.weight.item() == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_the_scale_is_ahead_of_the_host_and_copies_read_what_is_late(copied, late):
    scaler = LossScaler("cpu", 2.0**10, growth_interval=1)
    for found in ((1.0, 0.0), (0.0, 1.0), (0.0, 0.0)):  # by the checks of two optimizers
        scaler.scale(torch.ones(()))
        for number in found:
            scaler.register(SGD([nn.Parameter(X)], 0.1), 1.0, scalers.Late(torch.tensor(number)))
        scaler.update()
    assert scaler.scale(torch.ones(())) == scaler.get_scale() == 2.0**9 and not late
    other = copied(scaler)
    assert type(other.used) is float and other.used == other.get_scale() == 2.0**9
    assert other.n_steps == 3 and other.scales == [2.0**10, 2.0**9, 2.0**8]
    assert other.skipped == [0, 1]


@dtypes
def test_two_optimizers_of_which_one_accumulates_while_the_scale_changes(dtype, request):
    def train(waits=()):
        nets, norms = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)]), []
        for p in nets.parameters():
            p.data = torch.linspace(-1, 1, p.numel()).view(p.shape)
        opts = [SGD(m.parameters(), 2.0**-4, fused=True) for m in nets]
        with_masters(nets, *opts, dtype=dtype)
        scaler = LossScaler("cpu", 8.0, growth_interval=1)
        scaler.register(opts[1])
        for i in range(8):
            factor = INF if i == 5 else 1.0
            loss = (nets[0](X).sum() * factor + nets[1](X).sum()).float()
            scaler.scale(loss).backward()
            for net, opt in list(zip(nets, opts, strict=True))[: 1 + i % 2]:
                if i < 4:
                    scaler.unscale_(opt)
                    norms.append(nn.utils.clip_grad_norm_(net.parameters(), 4.0))
                scaler.step(opt)
                opt.zero_grad()
            scaler.update()
        assert not waits
        return nets.state_dict(), norms, scaler.scales, [scaler.skipped, opts[0].masters.skipped]

    at_once = train()
    norms = [norm.item() for norm in at_once[1][:3]]  # the last is of two batches, of two scales
    assert norms == pytest.approx([12.47, 12.47, 2 * 12.47], rel=0.01)
    assert at_once[2][-3:] == [2.0**8, 2.0**7, 2.0**8] and at_once[3] == [[5], [5]]
    assert_same(train(request.getfixturevalue("late")), at_once)


@pytest.mark.parametrize("is_late", [False, True], ids=["read", "late"])
def test_a_bad_batch_leaves_nothing_in_the_other_network_of_a_gan(is_late, request):
    """The generator's pass changes the critic's statistics, too; no step of the critic sees it."""

    def train(batches):
        torch.manual_seed(0)
        nets = nn.ModuleList([norm_net(), nn.Sequential(nn.Linear(2, 4), norm_net())])
        opts = [SGD(n.parameters(), 0.1, fused=True) for n in nets]
        with_masters(nets, *opts)
        for x in batches:
            for opt, factor in zip(opts, (1.0, -1.0), strict=True):
                nets.zero_grad()
                (nets[1](nets[0](x)).square().mean() * factor).backward()
                opt.step()
        nets[1](nets[0](X))
        return dict(nets.state_dict())

    good, bad = [X + 0.1 * i for i in range(4)], X * INF
    without = train(good)
    if is_late:
        request.getfixturevalue("late")
    assert_same(train([*good[:2], bad, *good[2:]]), without)
