"""What the numbers did: faults are found where they were put, and looking changes nothing."""

import copy
import math
import random
from collections import OrderedDict

import numpy as np
import pytest
import tiny
import torch
from torch import nn

from mixedfp.callback import GradNorm, PrecisionRecorder
from mixedfp.optimizer import with_masters
from mixedfp.report import (
    INPUTS,
    exponent_counts,
    plot_snr,
    plot_windows,
    precision_report,
    watch_calls,
)
from mixedfp.testing import assert_same

cross_entropy = nn.functional.cross_entropy


# What goes wrong: each is a module that float32 does not mind


class _TimesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None


class Backward(nn.Module):
    """The identity, whose gradient is multiplied."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return _TimesBackward.apply(x, self.factor)


class Within(nn.Module):
    """Goes beyond float16's range and comes back."""

    def forward(self, x):
        return (x * 2.0**20) * 2.0**-20


class Cancel(nn.Module):
    """Adds a large number and takes it away: bits are gone in 16 bits."""

    def forward(self, x):
        return (x + 8192) - 8192


class Beyond(nn.Module):
    """Hands numbers beyond float16's range to the next one."""

    def forward(self, x):
        return x * 2.0**20


class Back(nn.Module):
    """The next one."""

    def forward(self, x):
        return x * 2.0**-20


FAULTS = {
    "within": (Within, "keep in fp32"),
    "cancel": (Cancel, "keep in fp32"),
    "beyond": (lambda: nn.Sequential(Beyond(), Back()), "keep in fp32"),
    "vanish": (lambda: Backward(2.0**-30), "scale up"),
    "explode": (lambda: Backward(2.0**30), "scale down"),
}


class Model(nn.Module):
    """Modules one after the other; the first sees the inputs, all have names."""

    def __init__(self, parts, at=None, fault=None):
        super().__init__()
        for i, part in enumerate(parts):
            self.add_module(f"part{i}", part)
            if i == at:
                self.add_module("fault", fault)

    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


class First(nn.Module):
    """An LSTM's outputs without its states."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x)[0]


class Table(nn.Module):
    """Embeddings beside a normalized column."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 6), nn.BatchNorm1d(2)

    def forward(self, x):
        columns = self.norm(x[:, 1:])
        return torch.cat(
            [self.embedding(x[:, 0].long()), columns.to(self.embedding.weight.dtype)], 1
        )


def conv():
    parts = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    return [*parts, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))]


def transformer():
    def layer():
        return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)

    return [nn.Embedding(20, 16), layer(), layer(), layer(), nn.Linear(16, 20)]


def lstm():
    rnns = [First(nn.LSTM(16, 16, batch_first=True)) for _ in range(3)]
    return [nn.Embedding(20, 16), *rnns, nn.Linear(16, 20)]


def tabular():
    layers = [(nn.Linear(n, 16), nn.BatchNorm1d(16), nn.ReLU()) for n in (8, 16, 16)]
    return [Table(), *(m for three in layers for m in three), nn.Linear(16, 2)]


def batch_of(kind):
    if kind == "conv":
        return torch.randn(16, 3, 8, 8), torch.arange(16) % 2
    if kind == "tabular":
        columns = torch.randint(0, 10, (32, 1)).float()
        return torch.cat([columns, torch.randn(32, 2)], 1), torch.arange(32) % 2
    ids = torch.randint(0, 20, (8, 6))
    return ids, ids.roll(1, 1)


def loss_func(out, y):
    return cross_entropy(out.flatten(0, -2).float(), y.flatten())


KINDS = dict(conv=conv, transformer=transformer, lstm=lstm, tabular=tabular)


def make(kind, depth=None, fault=None):
    """Return a model with `fault` at depth 0 (after the first part), 1 (the middle) or 2."""
    parts = KINDS[kind]()
    at = None if depth is None else (0, len(parts) // 2, len(parts) - 2)[depth]
    return Model(parts, at, fault)


def cure(report):
    """Return what the line to paste says, as settings of a report."""
    kwargs = {}

    def to_fp16(**given):
        kwargs.update(given, dtype=torch.float16)

    def to_bf16(**given):
        kwargs.update(given, dtype=torch.bfloat16)

    eval(report.line, dict(to_fp16=to_fp16, to_bf16=to_bf16, nn=nn))
    return kwargs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_healthy_model_has_no_verdict(kind, dtype):
    model, batch = make(kind), batch_of(kind)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(2):
        report = precision_report(model, [batch], loss_func, dtype, opt=opt)
        assert report.verdicts == {}, report
        assert report.line == ("to_fp16()" if dtype == torch.float16 else "to_bf16()")
        for _ in range(10):
            loss_func(model(batch[0]), batch[1]).backward()
            opt.step()
            opt.zero_grad()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_found_where_it_was_put_and_the_cure_works(kind, depth, fault):
    bad, verdict = FAULTS[fault]
    model, batch = make(kind, depth, bad()), batch_of(kind)
    report = precision_report(model, [batch], loss_func)
    where = "fault.0" if fault == "beyond" else "fault"
    assert report.causes[0] == where, report
    assert report.verdicts[where] == verdict
    settings = cure(report)
    if settings.get("layer_scales") != "auto":
        again = precision_report(model, [batch], loss_func, **settings)
        assert again.verdicts == {}, f"{report.line}\n{again}"
        assert all(m.grad_snr > 0 for m in again.modules if not math.isnan(m.grad_snr)), again


# Models of other forms


class Residual(nn.Module):
    """Adds a branch to its input: the sum is no module's."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.branch, self.norm, self.factor = nn.Linear(8, 8), nn.LayerNorm(8), factor

    def forward(self, x):
        return self.norm(x * self.factor + self.branch(x))


class Shared(nn.Module):
    """Calls one module twice; the second time with large numbers."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.inner, self.head, self.factor = nn.Linear(8, 8), nn.LayerNorm(8), factor

    def forward(self, x):
        return self.head(self.inner(self.inner(x) * self.factor))


class Dicts(nn.Module):
    """Modules that hand each other dicts and tuples, by name."""

    class Part(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.linear, self.factor = nn.Linear(8, 8), factor

        def forward(self, *, state):
            x = self.linear(state["x"]) * self.factor
            return {"x": x / self.factor, "more": (x.sum(), None)}

    def __init__(self, factor=1.0):
        super().__init__()
        self.first, self.second = self.Part(1.0), self.Part(factor)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.second(state=self.first(state={"x": x}))["x"])


FORMS = {Residual: "", Shared: "inner", Dicts: "second"}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_modules(form):
    batch = torch.randn(16, 8), torch.arange(16) % 2
    torch.manual_seed(0)
    assert precision_report(form(), [batch], loss_func).verdicts == {}
    report = precision_report(form(2.0**17), [batch], loss_func)
    assert report.causes[0] == FORMS[form], report
    again = precision_report(form(2.0**17), [batch], loss_func, **cure(report))
    assert again.verdicts == {}, again


def test_a_residual_sum_is_of_the_block():
    blocks = nn.Sequential(Residual(), Residual(2.0**17), Residual(), nn.Linear(8, 2))
    batch = torch.randn(16, 8), torch.arange(16) % 2
    report = precision_report(blocks, [batch], loss_func)
    assert report.causes[0] == "1" and report.line == "to_fp16(keep_fp32=['1'])"
    assert [m.name for m in report.modules if m.name.startswith("1")] == ["1.branch", "1", "1.norm"]
    again = precision_report(blocks, [batch], loss_func, keep_fp32=["1"])
    assert again.verdicts == {}


def test_inputs_out_of_range_are_named_by_column():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    x, y = torch.randn(16, 4), torch.arange(16) % 2
    assert precision_report(model, [(x, y)], loss_func).verdicts == {}
    x[3, 2] = 70_000
    report = precision_report(model, [(x, y)], loss_func)
    assert report.causes[0] == INPUTS and report.line == "to_bf16()"
    assert report.table.loc[INPUTS, "verdict"] == "input out of range: column(s) [2]"
    assert precision_report(model, [(x, y)], loss_func, **cure(report)).verdicts == {}


def test_masters_are_needed_where_updates_are_lost():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    batch = torch.randn(16, 8), torch.arange(16) % 2
    opt = torch.optim.Adam(model.parameters(), 1e-5)
    report = precision_report(model, [batch], loss_func, torch.bfloat16, opt=opt)
    assert report.verdicts == {}  # its weights are in 32 bits
    assert (report.table["lost updates %"].dropna() > 50).all()
    model.bfloat16()
    opt = torch.optim.Adam(model.parameters(), 1e-5)
    report = precision_report(model, [batch], loss_func, opt=opt)
    assert set(report.verdicts) == {"0", "2"} and set(report.verdicts.values()) == {
        "masters needed"
    }
    assert report.line == "to_bf16()"
    # the shares are those of an update that is made
    weight = model[0].weight.detach().clone()
    loss_func(model(batch[0].bfloat16()), batch[1]).backward()
    opt.step()
    stands = (model[0].weight == weight).float().mean().item()
    row = next(m for m in report.modules if m.name == "0")
    assert abs(stands - row.lost / row.updated) < 0.1
    assert row.ulps < 0.5
    high = precision_report(model, [batch], loss_func, opt=opt, lr=0.1)
    assert high.verdicts == {} and high.modules[1].ulps > 1


# Numbers


class Noisy(nn.Module):
    """Is off by 2**-5 in float16."""

    def forward(self, x):
        return x + 2.0**-5 if x.dtype == torch.float16 else x + 0


class Twice(nn.Module):
    """Exact in any format."""

    def forward(self, x):
        return x * 2


def test_own_and_inherited_errors_are_told_apart():
    model = Model([Noisy(), Twice(), Noisy(), nn.Linear(4, 2)])
    batch = torch.ones(8, 4), torch.arange(8) % 2
    rows = {m.name: m for m in precision_report(model, [batch], loss_func).modules}
    db = 20 * math.log10(2**5)
    assert rows["part0"].own == pytest.approx(db) and rows["part0"].inherited == math.inf
    assert rows["part1"].own == math.inf and rows["part1"].inherited == pytest.approx(db)
    assert rows["part2"].own == pytest.approx(db + 20 * math.log10(2))
    assert rows["part2"].inherited == pytest.approx(db)
    assert rows["part2"].snr == pytest.approx(db - 20 * math.log10(1.5))


class NoisyBackward(nn.Module):
    """Has a weight, and multiplies its gradients by 1 + 2**-5 in float16."""

    def __init__(self):
        super().__init__()
        self.linear_weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        factor = 1 + 2.0**-5 if x.dtype == torch.float16 else 1.0
        return _TimesBackward.apply(x @ self.linear_weight, factor)


def test_own_and_inherited_errors_of_gradients_are_told_apart():
    model = Model([nn.Linear(4, 4), NoisyBackward(), nn.Linear(4, 2)])
    batch = torch.randn(8, 4), torch.arange(8) % 2
    rows = {m.name: m for m in precision_report(model, [batch], loss_func).modules}
    db = pytest.approx(20 * math.log10(2**5), abs=0.5)
    assert rows["part1"].grad_own == db and rows["part1"].grad_inherited > 50
    assert rows["part0"].grad_own > 50 and rows["part0"].grad_inherited == db
    assert rows["part2"].grad_own > 50 and rows["part2"].grad_inherited > 50


def in_float16(model, batch, scale):
    """Return the gradients that a real backward pass in float16 computes, by name."""
    model = copy.deepcopy(model)
    model, _ = with_masters(model, torch.optim.SGD(model.parameters(), 0.1))
    found = {}

    def take(name, args, kwargs):
        if args[0].requires_grad:
            args[0].register_hook(lambda g: found.update({name: g.clone()}))

    with watch_calls(model, take):
        loss = loss_func(model(batch[0]), batch[1])
    (loss * scale).backward()
    weights = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    return found, weights


def test_within_its_window_a_module_loses_nothing_and_outside_it_does():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )
    batch = torch.randn(64, 16), torch.arange(64) % 2
    report = precision_report(model, [batch], loss_func)
    true, true_weights = in_float16(model, batch, 2.0**12)
    checked = 0
    for m in report.modules:
        low, high = m.window
        if not math.isfinite(low) or not m.params:
            continue

        def lost(exponent, m=m):
            "Whether something overflows; the largest share that is flushed."
            grads, weights = in_float16(model, batch, 2.0**exponent)
            pairs = [(weights[k], true_weights[k]) for k in m.params]
            pairs += [(grads[m.name], true[m.name])] if m.name in grads else []
            shares = [((a == 0) & (b != 0)).sum() / (b != 0).sum() for a, b in pairs]
            return any(not a.isfinite().all() for a, _ in pairs), max(shares).item()

        assert lost(low + 1)[1] < 1.5e-3 and not lost(high)[0]
        assert lost(low - 2)[1] > 1e-3
        assert lost(high + 1)[0]
        checked += 1
    assert checked == 3


def test_exponents_are_counted_as_they_are():
    x = torch.randn(1000) * 2.0 ** torch.randint(-30, 30, (1000,))
    x[:3] = torch.tensor([0.0, math.inf, math.nan])
    counts = exponent_counts(x)
    expected = torch.frexp(x[3:])[1] - 1
    assert counts[0] == 1 and counts[255] == 2 and counts.sum() == 1000
    for e in expected.unique():
        assert counts[e + 127] == (expected == e).sum()
    assert_same(exponent_counts(x[5:9].reshape(2, 2).t()), exponent_counts(x[5:9]))


def test_layer_scales_count():
    model = nn.Sequential(nn.Linear(8, 8), Backward(2.0**-30), nn.Linear(8, 2))
    batch = torch.randn(16, 8), torch.arange(16) % 2
    report = precision_report(model, [batch], loss_func)
    assert report.verdicts == {"0": "scale up", "1": "scale up"}
    scales = {"0": 2.0**24, "1": 2.0**10}
    scaled = precision_report(model, [batch], loss_func, layer_scales=scales)
    assert scaled.verdicts == {}
    rows = {m.name: m for m in scaled.modules}
    assert rows["0"].grad_snr > 40 and rows["1"].window[0] == report.modules[2].window[0] - 10


# Nothing is changed


def everything_of(model, opt):
    """Return all that a report could change, copied."""
    state = copy.deepcopy([model.state_dict(), opt.state_dict()])
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    flags = [
        (m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()
    ]
    flags += [p.requires_grad for p in model.parameters()]
    random_states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    return state, grads, flags, *random_states


def assert_unchanged(now, before):
    assert_same(now[0], before[0])
    for a, b in zip(now[1], before[1], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_same(a, b)
    assert now[2] == before[2] and now[4:] == before[4:]
    assert torch.equal(now[3], before[3])


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", ["conv", "transformer"])
def test_nothing_is_changed(kind, flat):
    model, batch = make(kind), batch_of(kind)
    next(model.parameters()).requires_grad_(False)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    model, opt = with_masters(model, opt, flat_master=flat)
    for i in range(2):
        (loss_func(model(batch[0]), batch[1]) * 64).backward()
        if i == 0:
            opt.step()
            opt.zero_grad()
    model.eval()
    before = everything_of(model, opt)
    precision_report(model, [batch, batch], loss_func, opt=opt, training=True)
    assert_unchanged(everything_of(model, opt), before)

    def fails(out, y):
        raise ZeroDivisionError

    for bad in (fails, lambda out, y: None):
        with pytest.raises((ZeroDivisionError, TypeError, AttributeError)):
            precision_report(model, [batch], bad, opt=opt)
        assert_unchanged(everything_of(model, opt), before)


def test_what_makes_no_sense_is_refused():
    model, batch = make("conv"), batch_of("conv")
    with pytest.raises(ValueError, match="float32, which the report compares with"):
        precision_report(model, [batch], loss_func, torch.float32)
    with pytest.raises(ValueError, match="`batches` is empty"):
        precision_report(model, [], loss_func)
    with pytest.raises(TypeError, match="a batch is a Tensor"):
        precision_report(model, [batch[0]], loss_func)
    with pytest.raises(ValueError, match="`kind` is 'x'"):
        precision_report(model, [batch], loss_func).plot("x")


def test_a_language_model_is_called_by_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make("lstm")

        def forward(self, input_ids, labels):
            logits = self.body(input_ids)
            return {"loss": loss_func(logits, labels), "logits": logits}

    ids, labels = batch_of("lstm")
    batch = dict(input_ids=ids, labels=labels)
    report = precision_report(Named(), [batch], lambda out, batch: out["loss"])
    assert report.verdicts == {} and {"body.part0", "body.part1.rnn"} <= {
        m.name for m in report.modules
    }


# A Learner


@pytest.mark.parametrize(
    "to, flat",
    [("to_fp32", False), ("to_fp16", False), ("to_fp16", True), ("to_bf16", True)],
)
def test_a_fit_goes_on_as_if_nobody_had_looked(to, flat):
    results = []
    for looks in (False, True):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        dls = tiny.DataLoaders.from_dsets(
            list(zip(*tiny.pictures(32), strict=True)),
            list(zip(*tiny.pictures(8), strict=True)),
            bs=8,
            shuffle=True,
            num_workers=0,
        )
        learn = tiny.Learner(dls, tiny.dropout_net(), tiny.CrossEntropyLossFlat())
        getattr(learn, to)(**({} if to == "to_fp32" else dict(flat_master=flat)))
        for _ in range(2):
            if looks:
                report = learn.precision_report(n_batches=2)
                assert report.verdicts == {} and "lost updates %" in report.table
                assert report.settings["dtype"] == (
                    torch.bfloat16 if to == "to_bf16" else torch.float16
                )
                with pytest.raises(ValueError, match="matches no module"):
                    learn.precision_report(keep_fp32="nothing of that name")
            with learn.no_bar(), learn.no_logging():
                learn.fit(1, 0.01)
        flags = [m.training for m in learn.model.modules()]
        losses = [float(loss) for loss in learn.recorder.losses]
        states = learn.model.state_dict(), list(learn.opt.state_dict()["state"])
        results.append((*copy.deepcopy(states), flags, losses))
    plain, looked = results
    assert_same(looked[:2], plain[:2])
    assert looked[2:] == plain[2:]


def test_a_learner_is_looked_at_as_it_is_trained():
    learn = tiny.Learner(tiny.picture_dls(), tiny.conv_net(), tiny.CrossEntropyLossFlat())
    scales = {"4": 2.0**3}
    learn.to_fp16(1024.0, keep_fp32=nn.GroupNorm, layer_scales=scales)
    learn.model.eval()
    report = learn.precision_report()
    settings = {k: report.settings[k] for k in ("dtype", "loss_scale", "layer_scales")}
    assert settings == dict(dtype=torch.float16, loss_scale=1024, layer_scales=scales)
    assert report.line == "to_fp16(keep_fp32=[nn.GroupNorm], layer_scales={'4': 8})"
    assert {m.layer_scale for m in report.modules} == {1, 8}
    other = learn.precision_report(dtype=torch.bfloat16)
    assert other.settings["loss_scale"] == 1 and other.line == "to_bf16(keep_fp32=[nn.GroupNorm])"
    norm = next(m for m in report.modules if m.kind == "BatchNorm2d")
    assert norm.own > 60  # by the statistics of the batch: it is trained so
    assert report.table.loc["0", "params"] == 108 and report.table.index[0] == INPUTS


def test_columns_of_the_recorder():
    class Clipped(tiny.Callback):
        order = 12  # after the clipping

        def before_fit(self):
            self.seen = []

        def before_step(self):
            grads = [p.grad for p in self.learn.model.parameters() if p.grad is not None]
            self.seen.append(float(torch.nn.utils.get_total_norm(grads)))

    learn = tiny.Learner(tiny.picture_dls(), tiny.conv_net(), tiny.CrossEntropyLossFlat())
    learn.to_fp16(2.0**24, growth_interval=3)
    clipped = Clipped()
    with learn.no_bar(), learn.no_logging():
        learn.fit(2, cbs=[PrecisionRecorder(), GradNorm(), tiny.GradientClip(1e-3), clipped])
    columns = learn.recorder.metric_names[-4:-1]
    assert columns == ["loss_scale", "skipped", "grad_norm"]
    rows = [row[-3:] for row in learn.recorder.values]
    assert [row[1] for row in rows] == [
        sum(i // 4 == epoch for i in learn.mp_cb.skipped) for epoch in (0, 1)
    ]
    assert sum(row[1] for row in rows) == learn.mp_cb.n_skipped > 0
    assert rows[-1][0] == learn.mp_cb.loss_scale < 2.0**24
    assert all(row[1] == 4 or 0.01 < row[2] < 100 for row in rows) and max(clipped.seen) < 0.0011
    assert 0.01 < rows[-1][2] < 100
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)  # they are gone with the callback
    assert "loss_scale" not in learn.recorder.metric_names


def test_one_screen_is_printed():
    learn = tiny.Learner(tiny.picture_dls(), tiny.conv_net(), tiny.CrossEntropyLossFlat())
    assert str(tiny.MixedPrecision()) == repr(tiny.MixedPrecision())  # of no Learner yet
    learn.to_fp16(keep_fp32="4", layer_scales={"10": 4.0})
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    lines = {line[12:] for line in str(learn.mp_cb).splitlines()}
    assert lines >= {
        "127 in float16, 156 in float32",
        "BatchNorm2d: it keeps statistics",
        "4: keep_fp32",
        "512; 4 steps, 0 skipped",
        "1 with scales of their own",
        "283 by the optimizer: masters are not flat",
    }
    assert "MixedPrecision(torch.float16" in f"{learn.mp_cb}"  # one line in `learn.summary()`
    model, opt = with_masters(net := make("conv"), torch.optim.SGD(net.parameters(), 0.1))
    assert str(opt).splitlines()[1].endswith("weights 2.04 + masters 4"), str(opt)


def test_rows_of_a_plot_are_the_modules_from_top_to_bottom():
    """Those of which there is a number, in the order of the model."""
    net = nn.Sequential(OrderedDict(a=nn.Linear(4, 8), mask=nn.ReLU(), b=nn.Linear(8, 2)))
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    report = precision_report(net, [(x, y)], cross_entropy)
    report.modules[2].snr = math.nan
    drawn = (plot_snr(report), ["(inputs)", "a", "b"]), (plot_windows(report), ["a", "mask", "b"])
    for ax, names in drawn:
        assert [label.get_text() for label in ax.get_yticklabels()] == names
        low, high = ax.get_ylim()
        assert low > high and ax.get_xlabel()


def test_models_that_hang_tensors_on_modules_and_on_tensors():
    """fastai's: AWD-LSTM holds weights with a graph and states, `SequentialEx` the input."""
    from fastai.layers import MergeLayer, SequentialEx
    from fastai.text.models import AWD_LSTM

    rnn = AWD_LSTM(20, 8, 12, 2)
    model = nn.Sequential(rnn, nn.Linear(8, 20))
    batch = batch_of("lstm")
    rnn.reset()
    loss_func(model(batch[0]), batch[1]).backward()
    assert precision_report(rnn, [batch], lambda out, y: out.float().square().mean()).verdicts == {}
    blocks = SequentialEx(nn.Linear(4, 4), nn.ReLU(inplace=True), MergeLayer())
    report = precision_report(blocks, [(torch.randn(4, 4), 0)], lambda out, y: out.square().mean())
    assert report.verdicts == {} and min(m.own for m in report.modules) > 50
