"""The precision report: faults are found where they were put, and looking changes nothing."""

import math
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from fastai.layers import Lambda, MergeLayer, SequentialEx
from fastai.text.models import AWD_LSTM
from tiny import conv_net, dropout_net, image_dls, make_learner, weights
from torch import nn

import mixedfp.callback  # noqa: F401, gives Learner its methods
from mixedfp.diagnose.report import INPUTS, precision_report
from mixedfp.testing import assert_same

cross_entropy = nn.functional.cross_entropy


def loss_func(out, y):
    return cross_entropy(out.flatten(0, -2).float(), y.flatten())


def rows(n, width, n_classes=2):
    return torch.randn(n, width), torch.arange(n) % n_classes


class TimesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None


def times(factor):
    return Lambda(lambda x: x * factor)


def backward(factor):
    """Return the identity, whose gradient is multiplied."""
    return Lambda(lambda x: TimesBackward.apply(x, factor))


FAULTS = {  # which float32 does not mind; the verdict, and the format in which the line helps
    "within": (Lambda(lambda x: (x * 2.0**20) * 2.0**-20), "keep in fp32", "fp16"),
    "cancel": (Lambda(lambda x: (x + 8192) - 8192), "keep in fp32", "fp16"),
    "beyond": (nn.Sequential(times(2.0**20), times(2.0**-20)), "out of range", "fp16"),
    "vanish": (backward(2.0**-30), "scale up", "any"),
    "explode": (backward(2.0**30), "scale down", "bf16"),
}


def conv():
    parts = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    return [*parts, head], (torch.randn(16, 3, 8, 8), torch.arange(16) % 2)


def transformer():
    layers = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)]
    ids = torch.randint(0, 20, (8, 6))
    return [nn.Embedding(20, 16), *layers, nn.Linear(16, 20)], (ids, ids.roll(1, 1))


KINDS = pytest.mark.parametrize("kind", [conv, transformer], ids=["conv", "transformer"])


def make(kind, depth=None, fault=None):
    """Return a batch and a model with `fault` at depth 0 (after the first part), 1 or 2."""
    parts, batch = kind()
    named = [(f"part{i}", part) for i, part in enumerate(parts)]
    if depth is not None:
        named.insert((1, len(parts) // 2 + 1, len(parts) - 1)[depth], ("fault", fault))
    return nn.Sequential(OrderedDict(named)), batch


def settings_of(line):
    """Return what the line to paste sets, for another report."""
    return eval(line, dict(to_fp16=dict, to_bf16=lambda **k: dict(k, dtype="bf16"), nn=nn))


@KINDS
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_healthy_model_has_no_verdict(kind, dtype):
    model, batch = make(kind)
    report = precision_report(model, [batch], loss_func, dtype)
    assert report.verdicts == {} and report.line == f"to_{dtype}()", report


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("depth", [0, 1, 2])
@KINDS
def test_a_fault_is_found_where_it_was_put_and_the_line_works(kind, depth, fault):
    bad, verdict, helps = FAULTS[fault]
    model, batch = make(kind, depth, bad)
    report = precision_report(model, [batch], loss_func)
    where = "fault.0" if fault == "beyond" else "fault"
    assert report.causes[0] == where, report
    assert report.verdicts[where] == verdict
    assert helps == "any" or report.line.startswith(f"to_{helps}("), report
    again = precision_report(model, [batch], loss_func, **settings_of(report.line))
    assert again.verdicts == {}, f"{report.line}\n{again}"


class Block(nn.Module):
    """Computes something between its modules, which no smaller part can keep."""

    def __init__(self, f):
        super().__init__()
        self.a, self.b, self.norm, self.f = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), f

    def forward(self, *args, **kwargs):
        return self.f(self, *args, **kwargs)


def grown(self, x):  # the sum fits into float32, the output goes back to 16 bits
    return (self.a(x) + x) * 2.0**20


def residual(self, x):
    return self.norm(x * 2.0**17 + self.a(x))


BLOCKS = {  # what is computed, whether by the whole model, what is kept; the verdicts and the line
    "lost": (lambda self, x: self.b((self.a(x) + 8192) - 8192), True, (), {"": "keep in fp32"}, ""),
    "grown": (grown, False, (), {"1": "out of range"}, "to_bf16()"),
    "grown in float32": (grown, False, "1", {"1": "out of range"}, "to_bf16(keep_fp32=['1'])"),
    "residual": (residual, False, (), {"1": "out of range"}, "to_fp16(keep_fp32=['1'])"),
    "residual of a float32 input": (residual, True, (), {}, "to_fp16()"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_computed_between_modules_is_of_the_block_and_a_line_works_or_is_not_there(name):
    f, is_all, keep, verdicts, line = BLOCKS[name]
    model = Block(f) if is_all else nn.Sequential(nn.Linear(4, 4), Block(f), nn.LayerNorm(4))
    report = precision_report(model, [rows(16, 4, 4)], cross_entropy, keep_fp32=keep)
    assert (report.verdicts, report.line) == (verdicts, line)
    assert line or "none of the settings that were tried helps" in report.headline()
    if name == "residual":  # the sum is no module's
        assert [m.name for m in report.modules] == [INPUTS, "0", "1.a", "1", "1.norm", "2"]


def test_inputs_out_of_range_are_named_by_column():
    model, (x, y) = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), rows(16, 4)
    assert precision_report(model, [(x, y)], loss_func).verdicts == {}
    x[3, 2] = 70_000
    report = precision_report(model, [(x, y)], loss_func)
    assert report.causes[0] == INPUTS and report.line == "to_bf16()"
    assert report.table.loc[INPUTS, "verdict"] == "input out of range: column(s) [2]"


def test_a_pass_within_the_scale_window_is_true_and_one_above_it_overflows():
    layers = [nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)]
    model, batch = nn.Sequential(*layers), rows(64, 16)

    def row(scale):
        report = precision_report(model, [batch], loss_func, loss_scale=2.0**scale)
        return next(m for m in report.modules if m.name == "2")

    (low, high), least = row(9).window, row(9).least_scale
    assert row(low).grad_snr > 50 and row(high).grad_snr > 50
    assert row(high + 1).grad_snr == -math.inf and row(high + 1).verdict == "scale down"
    assert row(least - 2).verdict == "scale up"
    assert row(least - 6).grad_snr < 15 < row(least).grad_snr


def test_layer_scales_count():
    model = nn.Sequential(nn.Linear(8, 8), backward(2.0**-30), nn.Linear(8, 2))
    batch, scales = rows(16, 8), {"0": 2.0**24, "1": 2.0**10}
    report = precision_report(model, [batch], loss_func)
    assert report.verdicts == {"0": "scale up", "1": "scale up"}
    scaled = precision_report(model, [batch], loss_func, layer_scales=scales)
    assert scaled.verdicts == {} and "layer_scales={'0'" in scaled.line
    (low, high), moved = (r.modules[1].window for r in (report, scaled))
    assert moved == (low - 24, high - 24)
    assert report.table.loc["0", "scale window"] == f"[2^{low:.0f}, 2^{high:.0f}]"


def test_settings_that_make_no_sense_are_refused():
    model, batch = make(conv)
    with pytest.raises(ValueError, match="`batches` is empty"):
        precision_report(model, [], loss_func)
    with pytest.raises(TypeError, match="a batch is a Tensor.*lambda out: out.loss"):
        precision_report(model, [batch[0]], loss_func)
    with pytest.raises(ValueError, match="`what` is 'x'"):
        precision_report(model, [batch], loss_func).plot("x")


@pytest.mark.parametrize("to, settings", [("to_fp32", {}), ("to_bf16", dict(flat_master=True))])
def test_a_fit_is_the_same_after_a_report(to, settings):
    results = []
    for looks in (False, True):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        learn = make_learner("adam", model=dropout_net, dls=image_dls(shuffle=True))
        getattr(learn, to)(**settings)
        for _ in range(2):
            if looks:
                report = learn.precision_report(n_batches=2)
                assert report.verdicts == {}
                assert report.settings.dtype == (torch.bfloat16 if settings else torch.float16)
            learn.fit(1, 0.01)
        flags = [m.training for m in learn.model.modules()]
        results.append([weights(learn), flags, list(learn.recorder.losses)])
    assert_same(*results)


def test_a_learner_is_examined_as_it_is_trained():
    learn, scales = make_learner(model=conv_net), {"4": 2.0**3}
    learn.to_fp16(1024.0, keep_fp32=nn.GroupNorm, layer_scales=scales)
    learn.model.eval()
    report = learn.precision_report()
    used = report.settings
    assert (used.dtype, used.loss_scale, used.layer_scales) == (torch.float16, 1024, scales)
    assert report.line == "to_fp16(keep_fp32=[nn.GroupNorm], layer_scales={'4': 8.0})"
    other = learn.precision_report(dtype=torch.bfloat16)
    assert other.settings.loss_scale == 1 and other.line == "to_bf16(keep_fp32=[nn.GroupNorm])"
    norm = next(m for m in report.modules if m.kind == "BatchNorm2d")
    assert norm.own > 60  # by the statistics of the batch: it is trained so
    assert report.table.loc["0", "params"] == 108 and report.table.index[0] == INPUTS


def test_rows_of_a_plot_are_the_modules_from_top_to_bottom():
    net = nn.Sequential(OrderedDict(a=nn.Linear(4, 8), mask=nn.ReLU(), b=nn.Linear(8, 2)))
    ax = precision_report(net, [rows(8, 4)], cross_entropy).plot("gradients")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "mask", "b"]
    low, high = ax.get_ylim()
    assert low > high and ax.get_xlabel()
    assert ax.images[0].zorder > ax.patches[0].zorder  # the format's range hides no numbers


def test_models_that_hang_tensors_on_modules_and_on_tensors():
    """fastai's: AWD-LSTM holds weights with a graph and states, `SequentialEx` the input."""
    rnn, (_, batch) = AWD_LSTM(20, 8, 12, 2), transformer()
    rnn.reset()
    loss_func(nn.Sequential(rnn, nn.Linear(8, 20))(batch[0]), batch[1]).backward()
    assert precision_report(rnn, [batch], lambda out, y: out.float().square().mean()).verdicts == {}
    blocks = SequentialEx(nn.Linear(4, 4), nn.ReLU(inplace=True), MergeLayer())
    report = precision_report(blocks, [(torch.randn(4, 4), 0)], lambda out, y: out.square().mean())
    assert report.verdicts == {} and min(m.own for m in report.modules) > 50
