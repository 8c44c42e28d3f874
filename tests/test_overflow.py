"""`find_overflow`: planted faults are named, with a cure that works; a healthy model has none."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mixedfp.optimizer import with_masters
from mixedfp.overflow import find_overflow
from mixedfp.report import precision_report
from mixedfp.step import MixedStep
from mixedfp.testing import assert_same

torch.set_num_threads(1)


class Backward(torch.autograd.Function):
    """Nothing forward; the gradient times a number."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Fault(nn.Module):
    """Where something goes wrong, after a layer that does not."""

    def __init__(self, kind=None):
        super().__init__()
        self.kind, self.inner = kind, nn.Identity()

    def forward(self, x):
        x = self.inner(x)
        match self.kind:
            case "value":  # the square is beyond float16, its root is not
                return ((x * 0 + 300).square() / 300) * 0 + x
            case "constant":
                return x + torch.full((), 1e6, dtype=x.dtype) * 0
            case "zero":
                return x + (x * 0) / (x * 0)
            case "inf - inf":
                huge = x * 0 + 60000
                return x + ((huge + huge) - (huge + huge))
            case "backward":
                return Backward.apply(x, 1e9)
        return x


SLOTS = ["first", "middle", "last"]


class Conv(nn.Module):
    """A residual net with a norm that keeps statistics."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, 2)
        self.first, self.middle, self.last = Fault(), Fault(), Fault()

    def forward(self, x):
        x = self.first(self.norm(self.a(x.view(-1, 1, 4, 4))))
        x = x + self.middle(self.b(x))
        return self.last(self.head(x.mean((2, 3))))


class Transformer(nn.Module):
    """A layer that is used twice, dropout, a dict that goes out."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=True)
        self.first, self.middle, self.last = Fault(), Fault(), Fault()

    def forward(self, x):
        x = self.first(self.embed(x.view(-1, 4, 4)))
        x = self.layer(self.middle(self.layer(x)))
        return {"logits": self.last(self.head(x.mean(1)))}


class Recurrent(nn.Module):
    """An LSTM between."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Linear(4, 8), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 2)
        self.first, self.middle, self.last = Fault(), Fault(), Fault()

    def forward(self, x):
        x, _ = self.lstm(self.first(self.embed(x.view(-1, 4, 4))))
        return self.last(self.head(self.middle(x)[:, -1]))


class Tabular(nn.Module):
    """Columns through two layers, one of which is called twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.first, self.middle, self.last = Fault(), Fault(), Fault()

    def forward(self, x):
        x = self.first(self.a(x)).relu()
        return self.last(self.head(self.b(self.middle(self.b(x)).relu())))


MODELS = pytest.mark.parametrize("kind", [Conv, Transformer, Recurrent, Tabular])


def loss_func(pred, y):
    """Return the cross entropy, of a dict as well."""
    return F.cross_entropy(pred["logits"] if isinstance(pred, dict) else pred, y)


def new(kind, slot=None, fault=None):
    torch.manual_seed(0)
    model = kind()
    if slot is not None:
        setattr(model, slot, Fault(fault))
    return model


def batch():
    rng = torch.Generator().manual_seed(1)
    return torch.randn(8, 16, generator=rng), torch.randint(0, 2, (8,), generator=rng)


def is_cured(model, cure):
    """Train a step with what `cure` says: whether all gradients are finite."""
    settings = dict(loss_scale=1.0)
    exec(cure.replace("; ", "\n"), {"torch": torch}, settings)
    x, y = batch()
    mixed = MixedStep(settings.get("dtype", torch.float16), keep_fp32=settings.get("keep_fp32", ()))
    mixed.attach(model)
    loss = loss_func(model(x), y) * settings["loss_scale"]
    loss.backward()
    return all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@MODELS
def test_a_healthy_model_has_none(kind):
    assert find_overflow(new(kind), batch(), loss_func, scale=512.0) is None


@pytest.mark.parametrize("fault", ["value", "constant", "zero", "inf - inf", "backward"])
@pytest.mark.parametrize("slot", SLOTS)
@MODELS
def test_a_planted_fault_is_named_with_a_cure_that_works(kind, slot, fault):
    model = new(kind, slot, fault)
    scale = 2.0 if fault == "backward" else 1.0
    found = find_overflow(model, batch(), loss_func, scale=scale)
    assert (found.module, found.kind) == (slot, "Fault"), found
    assert found.phase == ("backward" if fault == "backward" else "forward")
    assert "test_overflow.py" in found.line and found.dtype == torch.float16
    assert found.n_inf + found.n_nan > 0 and found.place is not None
    if fault == "zero":
        assert found.cause == "0 / 0; in float32 as well: no precision helps" and not found.cures
    else:
        assert "beyond the range" in found.cause
        assert found.cures and all(is_cured(copy.deepcopy(model), cure) for cure in found.cures)
    assert slot in str(found)


@pytest.mark.parametrize(
    ("op", "cause"),
    [
        (lambda x: x.relu() * 0 + (300 * x.relu()) ** 2, "a value beyond the range"),
        (lambda x: (x * 0).rsqrt(), "rsqrt of a number outside of its domain, or of 0"),
        (lambda x: (-x.abs() - 1).log(), "log of a number outside of its domain, or of 0"),
    ],
)
def test_a_power_beyond_the_range_is_no_number_outside_of_a_domain(op, cause):
    class Op(nn.Module):
        def forward(self, x):
            return op(x)

    x, y = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    x[:, 0] = -1  # 0 behind the relu: its square is no fault
    model = nn.Sequential(Op(), nn.Linear(3, 2))
    assert find_overflow(model, (x, y), loss_func).cause.startswith(cause)


def test_a_scale_that_is_too_large():
    model = new(Tabular)
    found = find_overflow(model, batch(), loss_func, scale=2.0**24)
    assert found.phase == "backward" and "only the scaled gradient" in found.cause
    assert found.cures[0].startswith("loss_scale=") and is_cured(model, found.cures[0])


def test_an_input_column():
    x, y = batch()
    x[:, 5] *= 1e6
    found = find_overflow(new(Tabular), (x, y), loss_func)
    assert found.phase == "input" and "columns 5" in found.cause
    assert found.cures[0].startswith("x[:, 5] /= ")
    exec(found.cures[0], {"x": x})
    assert find_overflow(new(Tabular), (x, y), loss_func) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_batch_that_is_bad_already(value):
    x, y = batch()
    x[3, 2] = value
    found = find_overflow(new(Tabular), (x, y), loss_func)
    assert found.phase == "input" and "the batch is" in found.cause and not found.cures


def test_a_row_in_which_all_is_masked_and_one_in_which_not():
    class Attention(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.n, self.scores, self.head = n, nn.Linear(16, 4), nn.Linear(4, 2)

        def forward(self, x):
            mask = torch.arange(4) < self.n
            return self.head(self.scores(x).masked_fill(mask, float("-inf")).softmax(-1))

    assert find_overflow(Attention(3), batch(), loss_func) is None
    found = find_overflow(Attention(4), batch(), loss_func)
    assert "softmax" in found.operation and "masked" in found.cause


def test_a_negative_overflow_that_is_subtracted_is_named_and_not_the_nan():
    """-inf alone may be a mask; once it has made a nan, it was none."""

    class Low(nn.Linear):
        def forward(self, x):
            low = super().forward(x) * 0 - 60000
            low = low + low
            return low.reciprocal() * 0 + (low - low)

    found = find_overflow(nn.Sequential(Low(16, 2)), batch(), loss_func)
    assert (found.module, found.operation, found.is_producer) == ("0", "add", True)
    assert found.n_inf and not found.n_nan


def test_a_constant_that_raises_is_named_by_its_line_alone():
    """It comes to no operation that has a bad output: none is printed."""

    class Masks(nn.Module):
        def forward(self, x):
            return x.masked_fill(x > 0, -1e9)

    found = find_overflow(nn.Sequential(nn.Linear(16, 2), Masks()), batch(), loss_func)
    assert (found.module, found.phase, found.operation) == ("1", "forward", "")
    assert "a constant" in str(found) and "operation" not in str(found)


def test_the_line_is_not_that_of_a_class_of_tensors():
    """As fastai's are: each operation goes through their `__torch_function__`."""

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})

    x, y = batch()
    found = find_overflow(new(Tabular, "last", "value"), (x.as_subclass(Mine), y), loss_func)
    assert found.operation == "pow" and "square()" in found.line


class Two(nn.Module):
    """Takes two tensors."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.fault = nn.Linear(8, 8), nn.Linear(8, 2), Fault("value")

    def forward(self, x, z):
        return self.b(self.fault(self.a(x)) + self.a(z))


def test_a_batch_is_given_in_either_form_to_both_calls():
    torch.manual_seed(0)
    model, x, z, y = Two(), torch.randn(4, 8), torch.randn(4, 8), torch.arange(4) % 2
    forms = [((x, z), y), (x, z, y), (dict(x=x, z=z), y)]
    found = [str(find_overflow(model, form, F.cross_entropy)) for form in forms]
    assert "fault (Fault)" in found[0] and len(set(found)) == 1
    tables = [precision_report(model, [form], F.cross_entropy).table for form in forms]
    for table in tables:
        assert table.equals(tables[0])
    plain = nn.Linear(8, 2)
    for form in ((x, y), ([x], y)):
        assert find_overflow(plain, form, F.cross_entropy) is None
        assert not precision_report(plain, [form], F.cross_entropy).verdicts


def test_the_loss():
    found = find_overflow(new(Tabular), batch(), lambda pred, y: (pred - pred).sum() / 0 * y.sum())
    assert found.phase == "loss" and found.cause.startswith(("0 / 0", "inf or nan"))


def everything(model, opt):
    hooks = [[len(m._forward_hooks), len(m._forward_pre_hooks)] for m in model.modules()]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    weights = [p.detach().clone() for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    state = copy.deepcopy(opt.state_dict()["state"])
    return hooks, grads, weights, buffers, state, torch.get_rng_state(), random.getstate()


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("kind", [Conv, Transformer])
def test_nothing_is_changed(kind, flat, raises):
    model = new(kind, "middle", "value")
    model, opt = with_masters(
        model, torch.optim.AdamW(model.parameters()), dtype=torch.bfloat16, flat_master=flat
    )
    x, y = batch()
    for _ in range(2):
        loss_func(model(x), y).backward()
        opt.step()
    before = everything(model, opt)
    if raises:
        with pytest.raises(KeyError):
            find_overflow(model, (x, y), lambda pred, y: {}["no"])
    else:
        assert find_overflow(model, (x, y), loss_func, dtype=torch.float16).module == "middle"
    assert_same(everything(model, opt)[:-2], before[:-2])
    assert torch.equal(torch.get_rng_state(), before[-2]) and random.getstate() == before[-1]


def test_a_compiled_model_is_looked_at_uncompiled():
    model = torch.compile(new(Tabular, "last", "value"), backend="eager")
    model(batch()[0])
    assert find_overflow(model, batch(), loss_func).module == "last"


def test_numpy_has_nothing_to_do_with_it():
    state = np.random.get_state()[1].tolist()
    find_overflow(new(Tabular, "last", "value"), batch(), loss_func)
    assert np.random.get_state()[1].tolist() == state


class NeedsAutocast(nn.Module):
    """A product with a float32 tensor that nothing casts, after a value that is too large."""

    def __init__(self, is_late):
        super().__init__()
        self.a, self.huge, self.basis = nn.Linear(16, 8), Fault("value"), torch.ones(8, 2)
        self.is_late = is_late

    def forward(self, x):
        x = self.a(x)
        return self.huge(x) @ self.basis if self.is_late else self.huge(x @ self.basis)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_trained", [False, True])
def test_a_forward_pass_that_begins_again_is_counted_once(is_trained, is_late):
    """Under autocast, which the first call turns out to need, before the fault or after it."""
    model = NeedsAutocast(is_late)
    if is_trained:
        model, _ = with_masters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = find_overflow(model, batch(), loss_func)
    assert (found.module, found.call, found.operation) == ("huge", 1, "pow")
    assert [name for name, _ in found.before] == ["a", "huge.inner"]
