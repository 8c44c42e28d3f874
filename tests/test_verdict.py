"""The check as a number on the device: what the host reads late, or never, changes no result.

On a CPU the number could be read at once. These tests treat it as a GPU's: it is not ready until
somebody waits for it, and each wait is counted.
"""

import copy
import math
import pickle

import pytest
import torch
from fastai.basics import DataLoaders, Learner
from fastai.optimizer import OptimWrapper
from laws import read_late
from torch import nn
from torch.amp import GradScaler

import mixedfp.callback  # noqa: F401
from mixedfp import scaler as scalers
from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

FUSED = {
    "SGD": (torch.optim.SGD, dict(lr=0.1, momentum=0.9)),
    "AdamW": (torch.optim.AdamW, dict(lr=0.01)),
    "Adagrad": (torch.optim.Adagrad, dict(lr=0.1)),
}
dtypes = pytest.mark.parametrize("dtype", ["bf16", "fp16"])
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def late(monkeypatch):
    """Let no number be ready before somebody waits; return the list of waits."""
    return read_late(monkeypatch)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


FACTORS = [1.0, math.inf, 1.0, 1.0, 1.0, math.nan, math.inf, 1.0, 1.0, 1.0]


def train(kind, dtype, name, flat=False, factors=FACTORS, fused=True):
    """Train with an optimizer and a scaler; return all that a step changes, and the counts."""
    model, (opt, settings) = net(), FUSED[name]
    opt = opt(model.parameters(), **settings, fused=fused)
    rule = dict(init_scale=2.0**10, growth_interval=2)
    scaler = {"LossScaler": LossScaler, "GradScaler": GradScaler}.get(kind)
    scaler = scaler("cpu", **rule) if scaler else LossScaler(enabled=False)
    if kind != "no masters":
        with_masters(model, opt, dtype=dtype, flat_master=flat)
    else:
        scaler = LossScaler("cpu", **rule)
    for factor in factors:
        opt.zero_grad()
        scaler.scale(model(X).float().square().mean() * factor).backward()
        scaler.step(opt)
        scaler.update()
    counts = opt.masters.skipped if kind != "no masters" else scaler.skipped
    if kind == "LossScaler":
        assert scaler.skipped == counts
    scales = getattr(scaler, "scales", None), scaler.get_scale()
    return [model.state_dict(), opt.state_dict()["state"]], [counts, scales]


@dtypes
@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("kind", ["guard", "LossScaler", "GradScaler", "no masters"])
def test_read_late_it_gives_the_bits_of_one_that_is_read_at_once(kind, name, flat, dtype, request):
    at_once = train(kind, dtype, name, flat)
    assert at_once[1][0] == [1, 5, 6]
    request.getfixturevalue("late")
    late = train(kind, dtype, name, flat)
    assert_same(late[0], at_once[0])
    assert late[1] == at_once[1]


@dtypes
@pytest.mark.parametrize("kind", ["guard", "LossScaler", "no masters"])
def test_with_a_fused_optimizer_the_host_waits_for_nothing(kind, dtype, late):
    model = net()
    opt = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    if kind != "no masters":
        with_masters(model, opt, dtype=dtype)
    scaler = LossScaler("cpu", enabled=kind != "guard", growth_interval=2)
    for factor in FACTORS:
        opt.zero_grad()
        scaler.scale(model(X).float().square().mean() * factor).backward()
        done = scaler.step(opt)
        scaler.update()
    assert not late
    if kind != "guard":
        assert done is True
        assert scaler.n_skipped == 3 and scaler.n_steps == len(FACTORS)
        assert len(late) == 2 * len(FACTORS)  # and the scales


def test_an_optimizer_that_is_not_fused_reads_one_number(late, monkeypatch):
    monkeypatch.setattr(scalers, "READS_ON", {"cpu"})  # what was read determines the scale
    train("LossScaler", "bf16", "SGD", fused=False)
    assert len(late) == len(FACTORS)


def test_skips_in_a_row_stop_the_training_once_the_host_knows(late):
    model = net()
    opt = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    with_masters(model, opt, dtype="bf16")
    with pytest.raises(MixedPrecisionError, match="30 steps in a row"):
        for _ in range(32):
            opt.zero_grad()
            (model(X).sum() * math.nan).backward()
            opt.step()
            for found, _ in opt.master_step.guard._pending[:-1]:  # ready one step later
                bool(found[0])


def test_a_learner_finds_the_batch_that_was_skipped(late):
    good, bad = ((torch.randn(4, 4), torch.full((4, 2), target)) for target in (1.0, math.inf))
    opt = lambda ps, lr: OptimWrapper(ps, torch.optim.SGD, lr=lr, fused=True)  # noqa: E731
    dls = DataLoaders([good, bad, good, good], [good])
    learn = Learner(dls, net(), loss_func=lambda out, y: (out * y).mean(), opt_func=opt, lr=0.1)
    learn.to_bf16()
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, cbs=[])
    assert not late
    assert learn.mp_cb.find_overflow().step == 1
    assert learn.mp_cb.skipped == [1] and late
    assert len(learn.mp_cb._skipped()) == 1  # the other batches are forgotten
    assert all(p.isfinite().all() for p in learn.model.parameters())


def test_of_two_optimizers_each_restores_the_buffers_of_its_own_modules():
    nets = nn.ModuleList([nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)) for _ in range(2)])
    a, b = (torch.optim.SGD(m.parameters(), 0.1) for m in nets)
    with_masters(nets, a, b, dtype="bf16")
    for factor in (1, math.inf):
        a.zero_grad(), b.zero_grad()
        (nets[0](X).square().sum() * factor).backward(), nets[1](X).square().sum().backward()
        a.step(), b.step()
    assert [int(m[1].num_batches_tracked) for m in nets] == [1, 2]


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
    opt = torch.optim.SGD(model.parameters(), 0.1, fused=fused)
    with_masters(model, opt, dtype="bf16")
    monkeypatch.setattr(torch, "_foreach_copy_", lambda a, b: copied.extend(a) or own(a, b))
    for factor in (1.0, 1.0, math.inf, 1.0):
        before = {k: v.clone() for k, v in model.named_buffers()}
        opt.zero_grad()
        (model(X).square().sum() * factor).backward()
        opt.step()
        if factor != 1.0:
            assert_same(dict(model.named_buffers()), before)
        else:
            assert not torch.equal(model.mean, before["mean"]) and model.count > before["count"]
    assert copied and max(t.numel() for t in copied) < 512


@pytest.mark.parametrize("flat", [None, False, True], ids=["plain", "each", "flat"])
@pytest.mark.parametrize("kind", [LossScaler, GradScaler])
def test_step_hooks_get_true_gradients_and_float32_parameters(kind, flat):
    torch.manual_seed(0)
    model, seen = nn.Linear(4, 4), []
    opt, params = torch.optim.SGD(model.parameters(), 0.1), list(model.parameters())
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


class Unsupported(RuntimeError):
    def __init__(self, code):
        super().__init__(f"unsupported dtype, code {code}")
        self.code = code


def test_an_error_of_the_users_keeps_its_class_and_attributes():
    class Fails(nn.Linear):
        def forward(self, x):
            raise Unsupported(7)

    model = Fails(2, 2)
    with_masters(model, torch.optim.SGD(model.parameters(), 1.0), dtype="bf16")
    with pytest.raises(Unsupported) as e:
        model(torch.ones(1, 2))
    assert e.value.code == 7


def end(scaler, *found):
    """Count an iteration in which each of several optimizers found something, or 0."""
    scaler.scale(torch.ones(()))
    for number in found:
        opt = torch.optim.SGD([nn.Parameter(X)], 0.1)
        scaler.adopt(opt, 1.0, scalers.Late(torch.tensor(number)))
    scaler.update()


HIGH = 2.0**24


@pytest.mark.parametrize(
    "first, steps, scale",
    [
        (2.0**10, [(1.0,), (0.0,)], 2.0**10),
        (2.0**10, [(0.0,), (1.0,)], 2.0**10),
        (2.0**10, [(0.0,), (0.0,)], 2.0**12),
        (2.0**10, [(1.0, 0.0)], 2.0**9),  # one of two optimizers
        (2.0**10, [(0.0, 1.0)], 2.0**9),
        (HIGH, [(0.0,)], HIGH),
        (1.0, [(1.0,)], 1.0),
    ],
)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_the_scale_is_ahead_of_the_host_within_its_bounds(first, steps, scale, copied, late):
    scaler = LossScaler("cpu", first, growth_interval=1)
    for found in steps:
        end(scaler, *found)
    assert scaler.scale(torch.ones(())) == scale == scaler.get_scale() and not late
    other = copied(scaler)
    assert type(other.used) is float and other.used == other.get_scale() == scale
    assert other.n_steps == len(other.scales) == len(steps) and other.scales[0] == first
    assert other.skipped == [i for i, found in enumerate(steps) if any(found)]


@dtypes
def test_two_optimizers_of_which_one_accumulates_while_the_scale_changes(dtype, request):
    def train(waits=()):
        nets, norms = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)]), []
        for p in nets.parameters():
            p.data = torch.linspace(-1, 1, p.numel()).view(p.shape)
        opts = [torch.optim.SGD(m.parameters(), 2.0**-4, fused=True) for m in nets]
        with_masters(nets, *opts, dtype=dtype)
        scaler = LossScaler("cpu", 8.0, growth_interval=1)
        scaler.adopt(opts[1])
        for i in range(8):
            factor = math.inf if i == 5 else 1.0
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


def test_the_skip_that_stops_a_training_changes_nothing_either():
    model = net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with_masters(model, opt, dtype="bf16")
    before, scaler = {k: v.clone() for k, v in model.state_dict().items()}, GradScaler("cpu")
    with pytest.raises(MixedPrecisionError, match="30 steps in a row"):
        for _ in range(30):
            opt.zero_grad()
            scaler.scale(model(X).sum() * math.nan).backward()
            scaler.step(opt)
            scaler.update()
    assert_same(dict(model.state_dict()), before)


def test_optimizers_that_call_a_closure_several_times_are_refused():
    class SAM(torch.optim.SGD):
        def first_step(self):
            """Climb."""

    for make, flat in ((torch.optim.LBFGS, False), (SAM, True)):
        model = net()
        opt, closure = make(model.parameters()), lambda: 0.0
        with_masters(model, opt, dtype="bf16", flat_master=flat)
        with pytest.raises(MixedPrecisionError, match="skip_nonfinite=False"):
            opt.step(closure)
    model = net()
    opt = torch.optim.LBFGS(model.parameters(), max_iter=3)
    with_masters(model, opt, dtype="bf16", skip_nonfinite=False)
    calls = []

    def again():
        opt.zero_grad()
        calls.append(model(X).square().mean())
        calls[-1].backward()
        return calls[-1]

    opt.step(again)
    assert len(calls) > 1 and calls[-1] < calls[0]


@pytest.mark.parametrize("is_late", [False, True], ids=["read", "late"])
def test_a_bad_batch_leaves_nothing_in_the_other_network_of_a_gan(is_late, request):
    """The generator's pass changes the critic's statistics, too; no step of the critic sees it."""

    def train(batches):
        torch.manual_seed(0)
        nets = nn.ModuleList([net(), nn.Sequential(nn.Linear(2, 4), net())])
        opts = [torch.optim.SGD(n.parameters(), 0.1, fused=True) for n in nets]
        with_masters(nets, *opts)
        for x in batches:
            for opt, factor in zip(opts, (1.0, -1.0), strict=True):
                nets.zero_grad()
                (nets[1](nets[0](x)).square().mean() * factor).backward()
                opt.step()
        nets[1](nets[0](X))
        return dict(nets.state_dict())

    good, bad = [X + 0.1 * i for i in range(4)], X * math.inf
    without = train(good)
    if is_late:
        request.getfixturevalue("late")
    assert_same(train([*good[:2], bad, *good[2:]]), without)
