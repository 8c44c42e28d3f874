"""`find_overflow`: planted faults are named, with a fix that works; a healthy model has none."""

from functools import partial

import pytest
import torch
from fastai.layers import Lambda
from test_report import Block, TimesBackward, rows, settings_of, times
from tiny import Do, bits, conv_net, make_learner
from torch import nn
from torch.nn import functional as F

from mixedfp import find_overflow, precision_report
from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same

FAULTS = {
    "value": lambda x: ((x * 0 + 300).square() / 300) * 0 + x,  # its root fits into float16
    "constant": lambda x: x + torch.full((), 1e6, dtype=x.dtype) * 0,
    "0 / 0": lambda x: x + (x * 0) / (x * 0),
    "a division by 0": lambda x: x + 1 / (x * 0),
    "cancel": lambda x: x + ((x * 0 + 60000) * 2 - (x * 0 + 60000) * 2),
    "a constant that PyTorch refuses": lambda x: x.masked_fill(x > 1e9, -1e9),
    "backward": lambda x: TimesBackward.apply(x, 1e9),
}


class Net(nn.Module):
    """A layer that is used twice, one beside its input, dropout, a dict that goes out."""

    def __init__(self, slot=None, fault=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(8, 2)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=True)
        self.first, self.middle, self.last, self.linear = *[nn.Identity()] * 3, nn.Linear(8, 8)
        if slot is not None:
            setattr(self, slot, Lambda(FAULTS[fault]))

    def forward(self, x):
        x = self.norm(self.first(self.embed(x))).view(-1, 4, 8)
        x = self.layer(x + self.linear(self.middle(self.layer(x))))
        return {"logits": self.last(self.head(x.mean(1)))}


def loss_func(pred, y):
    """Return the cross entropy, of a dict as well."""
    return F.cross_entropy(pred["logits"] if isinstance(pred, dict) else pred, y)


def batch(n=16):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return rows(8, n)


def is_fixed(model, fix):
    """Compute a batch with what `fix` sets: whether all gradients are finite."""
    settings, (x, y) = dict(dtype="fp16") | settings_of(fix), batch()
    scale = settings.pop("loss_scale", 1.0)
    model, _ = with_masters(model, torch.optim.SGD(model.parameters(), 0.1), **settings)
    (loss_func(model(x), y) * scale).backward()
    return all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_healthy_model_has_none():
    assert find_overflow(Net(), batch(), loss_func, scale=512.0) is None
    sparse = nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))
    assert find_overflow(sparse, (torch.ones(2, 2).long(), torch.arange(2)), loss_func) is None


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("slot", ["first", "middle", "last"])
def test_a_planted_fault_is_named_with_a_fix_that_works(slot, fault):
    model, is_backward = Net(slot, fault), fault == "backward"
    found = find_overflow(model, batch(), loss_func, scale=2.0 if is_backward else 1.0)
    assert (found.module, found.kind) == (slot, "Lambda"), found
    assert found.phase == ("backward" if is_backward else "forward")
    assert found.line.startswith("test_report.py:" if is_backward else "test_overflow.py:")
    assert found.line in str(found) and slot in str(found)
    if "0" in fault:
        assert found.cause.startswith(fault) and found.cause.endswith("no precision helps")
        assert not found.fix
    else:
        assert ("a constant " if "refuses" in fault else "") + "beyond the range" in found.cause
        assert "refuses" not in fault or "masked_fill" in found.line
        assert is_fixed(model, found.fix)


spoil = lambda learn: learn.model[0].weight.grad.fill_(torch.inf)  # noqa: E731
BAD_LOSS = lambda pred, y: (pred["logits"] * 0).sum() / 0 * y.sum()  # noqa: E731
OUTSIDE = {  # of the modules: a factor for a column, the loss function, the phase and the cause
    "large": (1e6, loss_func, "input", "input columns 5 (up to "),
    "nan": (torch.nan, loss_func, "input", "the batch is inf or nan already"),
    "inf": (torch.inf, loss_func, "input", "the batch is inf or nan already"),
    "loss": (1.0, BAD_LOSS, "loss", "0 / 0"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_input_or_the_loss(name):
    factor, loss, phase, cause = OUTSIDE[name]
    x, y = batch()
    x[:, 5] *= factor
    found = find_overflow(Net(), (x, y), loss)
    assert found.phase == phase and found.cause.startswith(cause)
    assert found.fix == ("to_bf16()" if name == "large" else "")


def low(self, x):
    low = self.a(x) * 0 - 60000
    low = low + low  # -inf, which alone may be a mask
    return low.reciprocal() * 0 + (low - low)  # it was none: it makes a nan


def high(self, x):
    return FAULTS["value"](self.a(x))


@pytest.mark.parametrize("f, operation", [(low, "add"), (high, "pow")])
def test_the_first_overflow_is_named_and_neither_a_later_nan_nor_new_memory(f, operation):
    """PyTorch fills it with nan here; the 16-bit copies are written into such memory."""
    torch.use_deterministic_algorithms(True)
    try:
        found = find_overflow(Block(f), batch(4), F.cross_entropy)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (found.module, found.operation) == ("", operation) and "beyond" in found.cause


def two(self, x, z, labels=None):
    pred = self.b(high(self, x) + self.a(z))
    return pred if labels is None else {"loss": F.cross_entropy(pred.float(), labels)}


def test_a_batch_has_one_form_in_both_searches():
    model, x, z, y = Block(two), torch.randn(4, 4), torch.randn(4, 4), torch.arange(4) % 2
    forms = [((x, z), y), (x, z, y), (dict(x=x, z=z), y)]
    found = [str(find_overflow(model, form, F.cross_entropy)) for form in forms]
    assert "the whole model (Block)" in found[0] and len(set(found)) == 1
    tables = [precision_report(model, [form], F.cross_entropy).table for form in forms]
    assert all(table.equals(tables[0]) for table in tables)
    given, own_loss = dict(x=x, z=z, labels=y), lambda out: out["loss"]
    assert find_overflow(model, given, own_loss).operation == "pow"
    assert precision_report(model, [given], own_loss).verdicts == {"": "keep in fp32"}
    for search in (find_overflow, lambda m, b, loss: precision_report(m, [b], loss)):
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'target'"):
            search(model, given, F.cross_entropy)


def test_a_model_that_keeps_a_module_in_32_bits_is_taken_as_it_is():
    model, fix = Net("middle", "value"), "to_fp16(keep_fp32=['middle'])"
    assert find_overflow(model, batch(), loss_func).fix == fix
    opt = torch.optim.SGD(model.parameters(), 0.1)
    kept, _ = with_masters(model, opt, dtype="fp16", keep_fp32=["middle"])
    assert find_overflow(kept, batch(), loss_func) is None
    assert find_overflow(kept, batch(), loss_func, dtype="fp16") is None
    assert find_overflow(kept, batch(), loss_func, keep_fp32=()).module == "middle"
    report = precision_report(kept, [batch()], loss_func)
    assert report.verdicts == {} and report.line == fix
    assert precision_report(kept, [batch()], loss_func, keep_fp32=()).causes == ["middle"]


def test_a_weight_beyond_float16_is_named_with_a_fix_that_works():
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 2), nn.Linear(2, 2))
    model[0].weight.data[0, 0] = 1e6
    x, y = batch()
    found = find_overflow(model, (x / 1e6, y), loss_func)
    assert found.cause.startswith("its weight `0.weight`, up to 1e+06, is inf or nan in")
    # the layer has most weights, so keeping it is no fix; keeping the weight alone does not help
    assert found.fix == "to_bf16()" and "to_bf16()" in str(found)
    model[0].weight.data[0, 0] = torch.nan
    found = find_overflow(model, (x, y), loss_func)
    assert "`0.weight`, up to nan" in found.cause and "in float32 as well" in found.cause


def test_a_compiled_model_is_searched_uncompiled():
    torch._dynamo.reset()
    model = torch.compile(Net("last", "value"), backend="eager")
    model(batch()[0])
    assert find_overflow(model, batch(), loss_func).module == "last"


def normalized(x):
    """Divide by a norm near 0: outputs are small, the gradient is a thousand times as large."""
    x = x * 1e-4
    return x / (x.norm(dim=-1, keepdim=True) + 1e-3)


def test_an_overflow_of_the_scaled_gradient_has_a_smaller_scale():
    model = nn.Sequential(nn.Linear(8, 8), Lambda(normalized), nn.Linear(8, 4))
    find = partial(find_overflow, model, rows(16, 8, 4), F.cross_entropy)
    found = find(scale=2.0**16)
    assert found.phase == "backward" and found.module == "1" and found.operation
    assert "only the scaled gradient overflows" in found.cause
    scale = settings_of(found.fix)["loss_scale"]
    assert 1 <= scale < 2**16 and find(scale=scale) is None and find(scale=4 * scale) is not None


def test_a_module_whose_output_does_not_fit_is_kept_with_the_one_around_it():
    scaled = nn.Sequential(nn.Linear(2, 2), times(2.0**20), times(2.0**-20))  # its output fits
    model = nn.Sequential(nn.Linear(16, 2), scaled, nn.Linear(2, 2))
    found = find_overflow(model, batch(), F.cross_entropy)
    assert found.module == "1.1" and found.fix == "to_fp16(keep_fp32=['1'])"
    assert is_fixed(model, found.fix)
    most = nn.Sequential(nn.Linear(2, 2, bias=False), scaled)  # of the weights: no fix
    found = find_overflow(most, batch(2), F.cross_entropy)
    assert found.module == "1.1" and found.fix == "to_bf16()"


class Huge(nn.Linear):
    """A layer whose numbers are too large inside, from batch `at` on, when it trains."""

    n = 0

    def forward(self, x):
        self.n += self.training
        x = F.dropout(super().forward(x), training=self.training)
        return FAULTS["value"](x) if self.n > self.at else x


def with_huge(at=0, **kwargs):
    torch.manual_seed(0)
    model = conv_net().append(Huge(2, 2))
    model[-1].at = at
    return make_learner("adam", model).to_fp16(**kwargs)


@torch.compile(backend="eager")
def much_more(x):
    return x * 1e6


def test_a_compiled_function_is_searched_one_operation_at_a_time():
    model = nn.Sequential(nn.Linear(2, 2), Lambda(much_more))
    found = find_overflow(model, (torch.ones(4, 2), torch.ones(4, 2)), F.mse_loss)
    assert found.operation == "mul" and "x * 1e6" in found.line


def test_it_costs_nothing_until_a_step_is_skipped(monkeypatch):
    calls, learn = [], make_learner().to_fp16()
    search = "mixedfp.diagnose.overflow.find_overflow"
    monkeypatch.setattr(search, lambda *args, step, **settings: calls.append(step))
    learn.fit(1, 0.01)
    with pytest.raises(MixedPrecisionError, match="no step was skipped so far"):
        learn.mp_cb.find_overflow()
    learn.fit(1, 0.01, cbs=Do("after_backward", spoil, at=2))
    assert calls == []
    learn.find_overflow()
    assert calls == [6]


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_the_module_is_named_and_the_learner_stays_as_it_is(flat):
    learn = with_huge(at=2, flat_master=flat)
    learn.fit(1, 0.01)
    before, random = bits(learn), torch.get_rng_state()
    found = learn.find_overflow()
    assert (found.phase, found.module, found.operation) == ("forward", "11", "pow")
    assert found.step == 3 and found.fix == "to_fp16(keep_fp32=['11'])"
    assert_same(bits(learn), before)
    assert torch.equal(torch.get_rng_state(), random)
    fixed = with_huge(keep_fp32=["11"])
    fixed.fit(1, 0.01)
    assert fixed.mp_cb.n_skipped == 0
    assert fixed.find_overflow(fixed.dls.one_batch()) is None


def test_the_error_after_too_many_skips_names_the_module_or_says_that_nothing_is_reproduced():
    with pytest.raises(MixedPrecisionError, match="(?s)in a row were skipped.*forward.*11 .Huge"):
        with_huge(max_skips=3).fit(1, 0.01)
    with pytest.raises(MixedPrecisionError, match="Not reproduced"):
        make_learner().to_fp16(max_skips=2).fit(1, 0.01, cbs=Do("after_backward", spoil))
