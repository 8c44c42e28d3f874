"""The precision report: faults are found where they were put, and looking changes nothing."""

import copy
import math
import random
from collections import OrderedDict

import numpy as np
import pytest
import tiny
import torch
from torch import nn

import mixedfp.callback  # noqa: F401, gives Learner its methods
from mixedfp.diagnose.report import INPUTS, precision_report
from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same

cross_entropy = nn.functional.cross_entropy


def loss_func(out, y):
    return cross_entropy(out.flatten(0, -2).float(), y.flatten())


# What goes wrong: each is a module that float32 does not mind


class TimesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


def backward(factor):
    """Return the identity, whose gradient is multiplied."""
    return Apply(lambda x: TimesBackward.apply(x, factor))


def beyond():
    """Return two modules: the first one's output is beyond float16, the second one's is not."""
    return nn.Sequential(Apply(lambda x: x * 2.0**20), Apply(lambda x: x * 2.0**-20))


FAULTS = {
    "within": (lambda: Apply(lambda x: (x * 2.0**20) * 2.0**-20), "keep in fp32", "fp16"),
    "cancel": (lambda: Apply(lambda x: (x + 8192) - 8192), "keep in fp32", "fp16"),
    "beyond": (beyond, "out of range", "fp16"),
    "vanish": (lambda: backward(2.0**-30), "scale up", "any"),
    "explode": (lambda: backward(2.0**30), "scale down", "bf16"),
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


def conv():
    parts = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    return [*parts, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))]


def transformer():
    layers = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)]
    return [nn.Embedding(20, 16), *layers, nn.Linear(16, 20)]


def batch_of(kind):
    if kind == "conv":
        return torch.randn(16, 3, 8, 8), torch.arange(16) % 2
    ids = torch.randint(0, 20, (8, 6))
    return ids, ids.roll(1, 1)


KINDS = dict(conv=conv, transformer=transformer)


def make(kind, depth=None, fault=None):
    """Return a model with `fault` at depth 0 (after the first part), 1 (the middle) or 2."""
    parts = KINDS[kind]()
    at = None if depth is None else (0, len(parts) // 2, len(parts) - 2)[depth]
    return Model(parts, at, fault)


def settings_of(line):
    """Return what the line to paste sets, for another report."""
    names = dict(to_fp16=dict, to_bf16=lambda **k: dict(k, dtype="bf16"), nn=nn)
    return eval(line, names)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_healthy_model_has_no_verdict(kind, dtype):
    model, batch = make(kind), batch_of(kind)
    report = precision_report(model, [batch], loss_func, dtype)
    assert report.verdicts == {} and report.line == f"to_{dtype}()", report


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_found_where_it_was_put_and_the_line_works(kind, depth, fault):
    bad, verdict, helps = FAULTS[fault]
    model, batch = make(kind, depth, bad()), batch_of(kind)
    report = precision_report(model, [batch], loss_func)
    where = "fault.0" if fault == "beyond" else "fault"
    assert report.causes[0] == where, report
    assert report.verdicts[where] == verdict
    assert helps == "any" or report.line.startswith(f"to_{helps}("), report
    again = precision_report(model, [batch], loss_func, **settings_of(report.line))
    assert again.verdicts == {}, f"{report.line}\n{again}"


class Root(nn.Module):
    """Loses bits between its modules: nothing smaller than the whole model can be kept."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b((self.a(x) + 8192) - 8192)


def test_no_line_is_printed_that_does_not_work():
    batch = torch.randn(8, 4), torch.arange(8) % 2
    report = precision_report(Root(), [batch], cross_entropy)
    assert report.verdicts == {"": "keep in fp32"} and report.line == ""
    assert "none of the settings that were tried helps" in report.headline()


def test_a_module_whose_output_does_not_fit_is_no_better_kept():
    """Even if what it adds up inside fits in float32: its output goes back to 16 bits."""

    class Block(Root):
        def forward(self, x):
            return (self.a(x) + x) * 2.0**20

    model = nn.Sequential(nn.Linear(4, 4), Block(), nn.LayerNorm(4), nn.Linear(4, 2))
    batch = torch.randn(8, 4), torch.arange(8) % 2
    for keep in ((), "1"):
        report = precision_report(model, [batch], cross_entropy, keep_fp32=keep)
        assert report.verdicts == {"1": "out of range"}
        assert report.line.startswith("to_bf16(")


# Models of other forms


class Residual(nn.Module):
    """Adds a branch to its input: the sum is no module's."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.branch, self.norm, self.factor = nn.Linear(8, 8), nn.LayerNorm(8), factor

    def forward(self, x):
        return self.norm(x * self.factor + self.branch(x))


def test_a_residual_sum_is_of_the_block():
    blocks = nn.Sequential(nn.Linear(8, 8), Residual(2.0**17), Residual(), nn.Linear(8, 2))
    batch = torch.randn(16, 8), torch.arange(16) % 2
    report = precision_report(blocks, [batch], loss_func)
    assert report.verdicts == {"1": "out of range"} and report.line == "to_fp16(keep_fp32=['1'])"
    assert [m.name for m in report.modules if m.name.startswith("1")] == ["1.branch", "1", "1.norm"]
    # a float32 input stays one, and so does the sum
    alone = precision_report(Residual(2.0**17), [(batch[0], batch[1] * 4)], loss_func)
    assert alone.verdicts == {}


def test_inputs_out_of_range_are_named_by_column():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    x, y = torch.randn(16, 4), torch.arange(16) % 2
    assert precision_report(model, [(x, y)], loss_func).verdicts == {}
    x[3, 2] = 70_000
    report = precision_report(model, [(x, y)], loss_func)
    assert report.causes[0] == INPUTS and report.line == "to_bf16()"
    assert report.table.loc[INPUTS, "verdict"] == "input out of range: column(s) [2]"


def test_a_model_that_keeps_modules_in_32_bits_is_taken_as_it_is():
    model, batch = make("conv", 1, FAULTS["within"][0]()), batch_of("conv")
    opt = torch.optim.SGD(model.parameters(), 0.1)
    kept, _ = with_masters(model, opt, dtype="fp16", keep_fp32=["fault"])
    report = precision_report(kept, [batch], loss_func)
    assert report.verdicts == {} and report.line == "to_fp16(keep_fp32=['fault'])"
    assert precision_report(kept, [batch], loss_func, keep_fp32=()).causes == ["fault"]


# Numbers


def test_a_pass_within_the_scale_window_is_true_and_one_above_it_overflows():
    layers = [nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)]
    model, batch = nn.Sequential(*layers), (torch.randn(64, 16), torch.arange(64) % 2)

    def row(scale):
        report = precision_report(model, [batch], loss_func, loss_scale=2.0**scale)
        return next(m for m in report.modules if m.name == "2")

    low, high = row(9).window
    assert row(low).grad_snr > 50 and row(high).grad_snr > 50
    assert row(high + 1).grad_snr == -math.inf and row(high + 1).verdict == "scale down"
    assert row(row(9).least_scale - 2).verdict == "scale up"
    assert row(row(9).least_scale - 6).grad_snr < 15 < row(row(9).least_scale).grad_snr


def test_layer_scales_count():
    model = nn.Sequential(nn.Linear(8, 8), backward(2.0**-30), nn.Linear(8, 2))
    batch, scales = (torch.randn(16, 8), torch.arange(16) % 2), {"0": 2.0**24, "1": 2.0**10}
    report = precision_report(model, [batch], loss_func)
    assert report.verdicts == {"0": "scale up", "1": "scale up"}
    scaled = precision_report(model, [batch], loss_func, layer_scales=scales)
    assert scaled.verdicts == {} and "layer_scales={'0'" in scaled.line


def test_settings_that_make_no_sense_are_refused():
    model, batch = make("conv"), batch_of("conv")
    with pytest.raises(ValueError, match="`batches` is empty"):
        precision_report(model, [], loss_func)
    with pytest.raises(TypeError, match="a batch is a Tensor.*lambda out: out.loss"):
        precision_report(model, [batch[0]], loss_func)
    with pytest.raises(ValueError, match="`what` is 'x'"):
        precision_report(model, [batch], loss_func).plot("x")


# A Learner


@pytest.mark.parametrize("to, flat", [("to_fp32", False), ("to_fp16", False), ("to_bf16", True)])
def test_a_fit_is_the_same_after_a_report(to, flat):
    results = []
    for looks in (False, True):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        sets = [list(zip(*tiny.images(n), strict=True)) for n in (32, 8)]
        dls = tiny.DataLoaders.from_dsets(*sets, bs=8, shuffle=True, num_workers=0)
        learn = tiny.Learner(dls, tiny.dropout_net(), tiny.CrossEntropyLossFlat())
        getattr(learn, to)(**({} if to == "to_fp32" else dict(flat_master=flat)))
        for _ in range(2):
            if looks:
                report = learn.precision_report(n_batches=2)
                assert report.verdicts == {}
                dtype = report.settings.dtype
                assert dtype == (torch.bfloat16 if flat else torch.float16)
            with learn.no_bar(), learn.no_logging():
                learn.fit(1, 0.01)
        flags = [m.training for m in learn.model.modules()]
        losses = [float(loss) for loss in learn.recorder.losses]
        results.append((copy.deepcopy(learn.model.state_dict()), flags, losses))
    assert_same(*results)


def test_a_learner_is_examined_as_it_is_trained():
    learn = tiny.Learner(tiny.image_dls(), tiny.conv_net(), tiny.CrossEntropyLossFlat())
    scales = {"4": 2.0**3}
    learn.to_fp16(1024.0, keep_fp32=nn.GroupNorm, layer_scales=scales)
    learn.model.eval()
    report = learn.precision_report()
    settings = report.settings
    assert (settings.dtype, settings.loss_scale) == (torch.float16, 1024)
    assert settings.layer_scales == scales
    assert report.line == "to_fp16(keep_fp32=[nn.GroupNorm], layer_scales={'4': 8.0})"
    other = learn.precision_report(dtype=torch.bfloat16)
    assert other.settings.loss_scale == 1 and other.line == "to_bf16(keep_fp32=[nn.GroupNorm])"
    norm = next(m for m in report.modules if m.kind == "BatchNorm2d")
    assert norm.own > 60  # by the statistics of the batch: it is trained so
    assert report.table.loc["0", "params"] == 108 and report.table.index[0] == INPUTS


def test_rows_of_a_plot_are_the_modules_from_top_to_bottom():
    net = nn.Sequential(OrderedDict(a=nn.Linear(4, 8), mask=nn.ReLU(), b=nn.Linear(8, 2)))
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    report = precision_report(net, [(x, y)], cross_entropy)
    ax = report.plot("gradients")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "mask", "b"]
    low, high = ax.get_ylim()
    assert low > high and ax.get_xlabel()
    assert ax.images[0].zorder > ax.patches[0].zorder  # the format's range hides no numbers


def test_models_that_hang_tensors_on_modules_and_on_tensors():
    """fastai's: AWD-LSTM holds weights with a graph and states, `SequentialEx` the input."""
    from fastai.layers import MergeLayer, SequentialEx
    from fastai.text.models import AWD_LSTM

    rnn, batch = AWD_LSTM(20, 8, 12, 2), batch_of("transformer")
    rnn.reset()
    loss_func(nn.Sequential(rnn, nn.Linear(8, 20))(batch[0]), batch[1]).backward()
    assert precision_report(rnn, [batch], lambda out, y: out.float().square().mean()).verdicts == {}
    blocks = SequentialEx(nn.Linear(4, 4), nn.ReLU(inplace=True), MergeLayer())
    report = precision_report(blocks, [(torch.randn(4, 4), 0)], lambda out, y: out.square().mean())
    assert report.verdicts == {} and min(m.own for m in report.modules) > 50


def test_the_scale_of_a_layer_moves_its_window():
    model, batch = make("conv"), batch_of("conv")
    plain = precision_report(model, [batch], loss_func)
    name = next(m.name for m in plain.modules if m.n_params)
    scaled = precision_report(model, [batch], loss_func, layer_scales={name: 16.0})
    before, after = (next(m for m in r.modules if m.name == name) for r in (plain, scaled))
    assert after.window == (before.window[0] - 4, before.window[1] - 4)
    low, high = before.window
    assert plain.table.loc[name, "scale window"] == f"[2^{low:.0f}, 2^{high:.0f}]"
