"""Property tests of `mixedfp.cast`, its edge cases, and the messages of `Policy`."""

import copy
import inspect
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from mixedfp.cast import FloatForward, Policy, bn2float, model2half, to_float, to_half
from mixedfp.formats import MixedPrecisionError
from mixedfp.nested import cast_floats, map_tensors
from mixedfp.testing import assert_same

FULL, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [HALF, BF16, FULL, torch.float64, torch.int64, torch.bool, torch.complex64]
HALVES = st.sampled_from([HALF, BF16])
shapes = st.lists(st.integers(0, 3), max_size=3)
NUMBERS = [1.0, 65519.0, 65520.0, 2.0**-25, 1 + 2.0**-11]  # from 65520 on float16 has inf
numbers = st.builds(torch.full, shapes, st.sampled_from(NUMBERS))
tensors = st.builds(torch.Tensor.to, numbers, st.sampled_from(DTYPES))
leaves = tensors | st.none() | st.text(max_size=3) | st.integers() | st.booleans()


def containers(inner):  # others: nbs/02_nested.ipynb
    some = st.lists(inner, max_size=3)
    return some | some.map(tuple) | st.dictionaries(st.text(max_size=2), inner, max_size=3)


nestings = st.recursive(leaves, containers, max_leaves=8)


def walk(o):
    """Yield every object in `o` with its path, containers included."""
    yield (), o
    pairs = o.items() if isinstance(o, dict) else enumerate(o) if type(o) in (list, tuple) else ()
    for key, value in pairs:
        yield from (((key, *path), x) for path, x in walk(value))


@given(nestings, HALVES)
def test_only_floating_point_tensors_change_and_nothing_else(o, dtype):
    before, cast = dict(walk(o)), cast_floats(o, dtype)
    after, back = dict(walk(cast)), dict(walk(to_float(cast)))
    assert map_tensors(lambda t: t, o) is o
    assert list(after) == list(before) == list(back)
    for path, old in before.items():
        new = after[path]
        assert type(new) is type(old)
        if not isinstance(old, Tensor):
            assert isinstance(old, (list, tuple, dict)) or new is old
        elif not old.is_floating_point():
            assert new is old and back[path] is old
        else:
            assert (new is old) == (old.dtype == dtype)
            assert_same((new, back[path]), (old.to(dtype), old.to(dtype).float()))
    assert all(o is before[path] for path, o in walk(o))  # the original was not written to


@given(st.lists(nestings, max_size=4), HALVES, st.none() | st.integers(0, 4))
def test_targets_are_the_same_objects_and_inputs_are_cast(batch, dtype, n_inp):
    out = to_half(batch, dtype, n_inp)
    n = max(1, len(batch) - 1) if n_inp is None else n_inp
    assert len(out) == len(batch)
    assert all(new is old for new, old in zip(out[n:], batch[n:], strict=True))
    assert_same(out[:n], cast_floats(batch[:n], dtype))


KEPT = nn.modules.batchnorm._NormBase  # they keep statistics
LAYERS = [
    *(partial(kind, 4, 4) for kind in (nn.Linear, nn.Embedding, nn.LSTM)),
    *(partial(kind, 4) for kind in (nn.LayerNorm, nn.BatchNorm1d, nn.SyncBatchNorm)),
    partial(nn.InstanceNorm2d, 4, affine=True, track_running_stats=True),
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
                assert t.dtype == (FULL if isinstance(m, KEPT) else dtype)
    halved = {k: v.clone() for k, v in model.state_dict().items()}
    assert_same(halved, {k: v.to(halved[k].dtype) for k, v in state.items()})
    assert_same(dict(bn2float(model).state_dict()), halved)
    full = {k: v.float() if v.is_floating_point() else v for k, v in halved.items()}
    assert_same(model2half(model, FULL).state_dict(), full)
    for m in (m for m in model.modules() if isinstance(m, nn.LSTM)):
        assert all(a is b for a, b in zip(m._flat_weights, m.parameters(), strict=True))


def test_fastai_types_are_kept():
    from fastai.torch_core import TensorImage
    from fastcore.basics import fastuple

    image = TensorImage(torch.ones(1, 3, 4, 4))
    out = to_half((image, fastuple(torch.ones(2), torch.arange(2)), torch.ones(1)))
    assert type(out) is tuple and type(out[0]) is TensorImage and type(out[1]) is fastuple
    assert [t.dtype for t in (out[0], *out[1], out[2])] == [HALF, HALF, torch.int64, FULL]
    assert type(to_float(out[0])) is TensorImage


def test_a_module_that_stays_in_32_bits_is_rounded_once():
    """To the last dtype that the model was put into: float16 through bfloat16 would lose bits."""
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    layer.forward = own = lambda x: nn.Linear.forward(layer, x) * 2
    model, expected = nn.Sequential(layer), layer(x).half()
    for dtype in (BF16, HALF):
        model2half(model, dtype, keep_fp32="0")
        assert model(x).dtype == dtype
    assert_same(model(x), expected)
    FloatForward.remove(layer)
    assert layer.forward is own


@pytest.mark.parametrize("pattern", ["first", "second", "second.*"])
def test_a_module_with_two_names_is_kept_by_either(pattern):
    model = nn.ModuleDict(dict(first=nn.Linear(2, 2), other=nn.Linear(2, 2)))
    model["second"] = model["first"]
    model2half(model, keep_fp32=pattern)
    dtypes = [p.dtype for name in ("first", "other") for p in model[name].parameters()]
    assert dtypes == [FULL, FULL, HALF, HALF]


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=["fp16", "bf16"])
def test_what_has_no_16_bit_kernel_is_computed_in_32_bits(dtype):
    layer, x = parametrizations.orthogonal(nn.Linear(4, 4)), torch.randn(2, 4, 3, 3).to(dtype)
    exact = layer.weight.detach().clone()
    model2half(layer, dtype)
    assert layer.weight.dtype == layer.bias.dtype == dtype
    assert layer.parametrizations.weight.original.dtype == FULL
    for is_on in (False, True):
        with torch.autocast("cpu", dtype, enabled=is_on):
            assert_same(layer.weight.detach(), exact.to(dtype))
    layer(x[:, :, 0, 0]).sum().backward()
    assert_same(model2half(layer, FULL).weight.detach(), exact)
    norm = nn.LocalResponseNorm(2)
    exact = norm(x.float())
    assert_same(model2half(norm, dtype)(x), exact.to(dtype))
    assert "forward" not in vars(model2half(norm, FULL))


class Times(nn.Linear):
    """A layer with a forward pass and an argument of its own."""

    def forward(self, x, times: int = 2):
        return super().forward(x) * times


def test_a_kept_module_computes_in_32_bits_under_autocast_and_copies_with_its_module():
    layer, x = Times(64, 64), torch.randn(8, 64).bfloat16()
    exact = layer(x.float(), 3)
    model2half(layer, BF16, keep_fp32=Times)
    for m in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert m.forward.module is m and str(inspect.signature(m.forward)) == "(x, times: int = 2)"
        with torch.autocast("cpu", BF16):
            assert_same(m(x, times=3), exact.bfloat16())
            assert torch.is_autocast_enabled("cpu")
    assert layer.forward.__name__ == "forward"
    with pytest.raises(TypeError), torch.autocast("cpu", BF16):
        layer(x, of=3)
    assert not torch.is_autocast_enabled("cpu")


def test_complex_tied_frozen_8_bit_and_kept_parameters():
    m = nn.Module()
    m.phase = nn.Parameter(torch.tensor([1 + 2j]))
    m.register_buffer("codes", torch.ones(2, dtype=torch.float8_e4m3fn))
    m.a, m.b, m.kept = nn.Linear(2, 2), nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])
    m.b.weight = m.a.weight.requires_grad_(False)
    m.a.bias.grad, m.kept[0].bias.grad = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])
    model2half(m, keep_fp32=nn.ModuleList)
    assert m.kept[0].weight.dtype == m.kept[0].bias.grad.dtype == FULL
    assert m.kept[0](torch.ones(1, 2).half()).dtype == HALF
    assert m.phase.dtype == torch.complex64 and m.codes.dtype == torch.float8_e4m3fn
    assert m.b.weight is m.a.weight and m.a.weight.dtype == HALF
    assert not m.a.weight.requires_grad
    assert_same(m.a.bias.grad, torch.tensor([1.0, 2.0], dtype=HALF))


# Policy

HOLDS, NO_STATE = "`keep_fp32` holds ", "`state_dtype` is {"
MISTAKES = [
    (dict(dtype=torch.int8), TypeError, "`dtype` is torch.int8: expected torch.float16"),
    (dict(flat_master="no"), TypeError, "`flat_master` is 'no': expected True or False"),
    (dict(keep_fp32=nn.Linear(2, 2)), TypeError, HOLDS + "Linear.*: expected"),
    (dict(keep_fp32=[nn.ReLU()]), TypeError, HOLDS + "ReLU"),
    (dict(keep_fp32=3), TypeError, HOLDS + "3: expected module types"),
    (dict(keep_fp32=[dict]), TypeError, HOLDS + "<class 'dict'>: expected module types"),
    (dict(half_grads=True), MixedPrecisionError, "half_grads=True needs flat_master=True"),
    (dict(state_dtype={"a": HALF}), MixedPrecisionError, "'a'.* needs flat_master=True"),
    (dict(state_dtype=HALF), TypeError, "None, or names of states"),
    (dict(state_dtype={"a": FULL}), TypeError, NO_STATE + "'a': torch.f"),
    (dict(state_dtype={1: HALF}), TypeError, NO_STATE + "1: torch.f"),
]


@pytest.mark.parametrize("settings, error, message", MISTAKES, ids=str)
def test_a_policy_that_cannot_be_names_its_mistake(settings, error, message):
    with pytest.raises(error, match=message):
        Policy(**settings)


def test_a_policy_is_normalised_frozen_and_copied():
    policy = Policy("bf16", True, "head", state_dtype={"exp_avg": "fp16"}, half_grads=True)
    assert policy.dtype == BF16 and policy.keep_fp32 == ("head",)
    assert policy.state_dtype == {"exp_avg": HALF} and Policy().state_dtype == {}
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy
    with pytest.raises(AttributeError):
        policy.dtype = HALF
