"""Property tests of `mixedfp.cast`, and those that need fastai or a fresh view of a mode."""

import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from inside import ComputeInFloat32, cast_floats, map_tensors, stays_float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mixedfp.cast import bn2float, model2float, model2half, to_float, to_half
from mixedfp.testing import assert_same

Pair = namedtuple("Pair", "a b")


@dataclass(frozen=True)
class Box:
    content: object
    name: str = "box"


DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.complex64,
]
HALVES = st.sampled_from([torch.float16, torch.bfloat16])
tensors = st.builds(
    lambda dtype, shape: torch.ones(shape, dtype=dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
)
leaves = tensors | st.none() | st.text(max_size=3) | st.integers() | st.booleans()
nestings = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict)
        | st.builds(Pair, inner, inner)
        | st.builds(Box, inner)
    ),
    max_leaves=8,
)


def walk(o):
    """Yield every object in `o` with its path, containers included."""
    stack = [((), o)]
    while stack:
        path, o = stack.pop()
        yield path, o
        if isinstance(o, Box):
            stack.append(((*path, "content"), o.content))
        elif isinstance(o, dict):
            stack += [((*path, k), v) for k, v in o.items()]
        elif isinstance(o, (list, tuple)):
            stack += [((*path, i), v) for i, v in enumerate(o)]


@given(nestings, HALVES)
def test_only_floating_point_tensors_change_and_nothing_else(o, dtype):
    before = dict(walk(o))
    after = dict(walk(cast_floats(o, dtype)))
    assert list(after) == list(before)
    for path, old in before.items():
        new = after[path]
        assert type(new) is type(old)
        if not isinstance(old, Tensor):
            assert isinstance(old, (list, tuple, dict, Box)) or new is old
        elif old.is_floating_point() and old.dtype != dtype:
            assert_same(new, old.to(dtype))
        else:
            assert new is old
    assert all(o is before[path] for path, o in walk(o))  # the original was not written to


@given(nestings)
def test_without_a_change_it_is_the_same_object(o):
    assert map_tensors(lambda t: t, o) is o


@given(nestings, HALVES)
def test_to_float_undoes_only_the_16_bit_types(o, dtype):
    for path, t in walk(to_float(cast_floats(o, dtype))):
        if isinstance(t, Tensor):
            old = dict(walk(o))[path]
            assert t.dtype == (torch.float32 if old.is_floating_point() else old.dtype)


@given(st.lists(nestings, max_size=4), HALVES, st.none() | st.integers(0, 4))
def test_targets_are_the_same_objects(batch, dtype, n_inp):
    out = to_half(batch, dtype, n_inp)
    n = max(1, len(batch) - 1) if n_inp is None else n_inp
    assert len(out) == len(batch)
    assert all(new is old for new, old in zip(out[n:], batch[n:], strict=True))
    for new, old in zip(out[:n], batch[:n], strict=True):
        assert [p for p, _ in walk(new)] == [p for p, _ in walk(old)]
        assert all(
            t.dtype == dtype
            for _, t in walk(new)
            if isinstance(t, Tensor) and t.is_floating_point()
        )


LAYERS = [
    lambda: nn.Linear(4, 4),
    lambda: nn.Conv1d(4, 4, 3),
    lambda: nn.LayerNorm(4),
    lambda: nn.GroupNorm(2, 4),
    lambda: nn.Embedding(4, 4),
    lambda: nn.LSTM(4, 4),
    lambda: nn.PReLU(),
    lambda: nn.BatchNorm1d(4),
    lambda: nn.BatchNorm2d(4, affine=False),
    lambda: nn.SyncBatchNorm(4),
    lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
]
trees = st.recursive(
    st.sampled_from(LAYERS).map(lambda make: make()),
    lambda inner: st.lists(inner, max_size=3).map(lambda ms: nn.Sequential(*ms)),
    max_leaves=6,
)


@given(trees, HALVES)
def test_every_number_of_a_model_has_its_dtype(model, dtype):
    for t in model.state_dict().values():
        if t.is_floating_point():
            t.add_(2.0**-20)  # what 16 bits would lose
    params, state = list(model.parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    assert model2half(model, dtype) is model
    assert all(p is q for p, q in zip(model.parameters(), params, strict=True))
    for m in model.modules():
        for t in [*m.parameters(recurse=False), *m.buffers(recurse=False)]:
            if t.is_floating_point():
                assert t.dtype == (torch.float32 if stays_float(m) else dtype)
    halved = {k: v.clone() for k, v in model.state_dict().items()}
    for k, v in halved.items():
        assert_same(v, state[k].to(v.dtype), name=k)
    bn2float(model)
    assert_same(model.state_dict(), halved)
    model2float(model)
    assert_same(
        model.state_dict(),
        {k: v.float() if v.is_floating_point() else v for k, v in halved.items()},
    )


sizes = st.integers(1, 6)


@given(sizes, sizes, sizes, st.integers(-12, 11), st.integers(0, 2**31))
def test_a_product_is_the_float32_product_rounded(n, k, m, exponent, seed):
    rng = torch.Generator().manual_seed(seed)
    x, w, g = (torch.randn(s, generator=rng) for s in [(n, k), (m, k), (n, m)])
    x, w, g = (x * 2.0**exponent).half(), (w * 2.0**exponent).half(), g.half()
    xh, wh = x.clone().requires_grad_(), w.clone().requires_grad_()
    with ComputeInFloat32():
        out = F.linear(xh, wh)
    out.backward(g)
    for ours, a, b in [(out, x, w.T), (xh.grad, g, w), (wh.grad, g.T, x)]:
        truth = a.double() @ b.double()
        # all that the order of a sum in float32 can change
        slack = (a.shape[1] + 1) * 2.0**-24 * (a.double().abs() @ b.double().abs())
        assert ours.dtype == torch.float16
        assert ((truth - slack).half() <= ours).all() and (ours <= (truth + slack).half()).all()


class Count(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.n = getattr(self, "n", 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_modes_of_others_stay_when_ours_is_left(error):
    x = torch.ones(1, 1, dtype=torch.float16)
    with Count() as count:
        with pytest.raises(error), ComputeInFloat32():
            raise error
        n = count.n if hasattr(count, "n") else 0
        F.linear(x, x)
        assert count.n > n
    assert len(torch.overrides._get_current_function_mode_stack()) == 0


def test_nested_blocks_are_one():
    a = torch.tensor([[6e4, 6e4, -6e4]], dtype=torch.float16)
    with ComputeInFloat32(), ComputeInFloat32():
        assert F.linear(a, torch.ones_like(a)).item() == 6e4


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("is_packed", [False, True])
def test_recurrent_layers_run_in_both_directions(kind, is_packed):
    net = model2half(kind(4, 5, num_layers=2, bidirectional=True))
    x = torch.randn(3, 2, 4)
    batch = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2])) if is_packed else x
    [inputs] = to_half([batch])
    with ComputeInFloat32():
        out, _ = net(inputs)
    out = out.data if is_packed else out
    out.float().sum().backward()
    plain = kind(4, 5, num_layers=2, bidirectional=True)
    plain.load_state_dict(net.state_dict())
    expected = plain(to_float(inputs))[0]
    expected = expected.data if is_packed else expected
    assert_same(out, expected.half())
    assert all(p.grad is not None and p.grad.dtype == torch.float16 for p in net.parameters())


def test_fastai_types_are_kept():
    from fastai.torch_core import TensorImage
    from fastcore.basics import fastuple

    image = TensorImage(torch.ones(1, 3, 4, 4))
    out = to_half((image, fastuple(torch.ones(2), torch.arange(2)), torch.ones(1)))
    assert type(out) is tuple and type(out[0]) is TensorImage and type(out[1]) is fastuple
    assert [t.dtype for t in (out[0], *out[1], out[2])] == [
        torch.float16,
        torch.float16,
        torch.int64,
        torch.float32,
    ]
    assert type(to_float(out[0])) is TensorImage


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_nonfinite_numbers_pass(value):
    x = torch.tensor([value])
    assert_same(to_float(to_half([x])[0]), x)


def test_a_module_that_stays_in_32_bits_is_rounded_once():
    """To the last dtype that the model was put into: float16 through bfloat16 would lose bits."""
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    expected = model(x).half()
    for dtype in (torch.bfloat16, torch.float16):
        model2half(model, dtype, keep_fp32="0")
        assert model(x).dtype == dtype
    assert_same(model(x), expected)
    assert len(model[0]._forward_hooks) == len(model[0]._forward_pre_hooks) == 1


@pytest.mark.parametrize("pattern", ["first", "second", "second.*"])
def test_a_module_with_two_names_is_kept_by_either(pattern):
    model = nn.ModuleDict(dict(first=nn.Linear(2, 2), other=nn.Linear(2, 2)))
    model["second"] = model["first"]
    model2half(model, keep_fp32=pattern)
    assert {p.dtype for p in model["first"].parameters()} == {torch.float32}
    assert {p.dtype for p in model["other"].parameters()} == {torch.float16}
