"""Longer checks of `mixedfp.master`: random models, and copies of models under `MasterParams`."""

import copy
import io
import operator
import pickle
from types import SimpleNamespace

import inside
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import nn
from torch.nn import Parameter

from mixedfp.master import get_master, model_g2master_g
from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same, linear_model, tiny_net

HALVES = torch.float16, torch.bfloat16
AWKWARD = [0.0, -0.0, 1e-30, 2.0**-25, 65519.0, 1e38, float("inf"), float("nan"), 1 + 2.0**-20]


class Bag(nn.Module):
    """Parameters and buffers of any shape and memory format, some of them a norm's."""

    def __init__(self, shapes, orders, seed=0, values=()):
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.norm = nn.BatchNorm1d(2)
        for i, (shape, order) in enumerate(zip(shapes, orders, strict=True)):
            full = torch.randn(shape, generator=rng)
            if full.numel():
                picked = torch.tensor(values[: full.numel()])
                full.view(-1)[: len(picked)] = picked
            full = in_order(full, order)
            self.register_parameter(f"p{i}", Parameter(full))
            self.register_buffer(f"b{i}", in_order(full + 1, order))
        self.register_buffer("counts", torch.arange(3))


def in_order(tensor, order):
    """Return `tensor` with its dimensions laid out in memory in another order."""
    order = sorted(range(tensor.ndim), key=lambda d: order[d])
    back = [order.index(d) for d in range(tensor.ndim)]
    return tensor.permute(order).contiguous().permute(back)


def copies(model):
    """Return a copy of each tensor of the model's `state_dict`."""
    return {k: v.clone() for k, v in model.state_dict().items()}


def strides_of(model):
    """Return the strides of parameters and buffers, where they mean something."""
    tensors = [*model.parameters(), *model.buffers()]
    return [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in tensors]


def masters_of(model):
    """Return the `MasterParams` of `model`, which its hooks know, also in a copy."""
    return inside.masters_of_model(model)


def kind(state):
    """Say what is alike in the states of one bucket: which keys, and how many steps."""
    return sorted(state), float(state.get("step", 0))


def step(masters, groups, states, opt_func):
    """Step `masters` with a new optimizer that gets its state from `states`, and give it back."""
    inside.lay_out(masters, groups)
    buckets = [
        bucket
        for i, params in enumerate(groups)
        for bucket in inside.buckets(masters, params, i, lambda p: kind(states.get(p, {})))
    ]
    if not buckets:
        return
    for bucket in buckets:
        inside.grads_to_master(bucket)
    opt = opt_func([bucket.master for bucket in buckets])
    for bucket in buckets:
        opt.state[bucket.master] = bucket.join([states.get(p, {}) for p in bucket.params])
    opt.step()
    for bucket in buckets:
        states.update(zip(bucket.params, bucket.split(opt.state[bucket.master]), strict=True))
    inside.master_to_model(masters)


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5),
}
shape = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(tuple)
order = st.permutations(range(4))
bag = st.lists(st.tuples(shape, order), min_size=1, max_size=6)
dtype = st.sampled_from([*HALVES, torch.float32])


@given(data=st.data(), what=bag, dtype=dtype, name=st.sampled_from(sorted(OPTIMIZERS)))
@examples(max_examples=60)
def test_flat_and_per_parameter_masters_have_the_same_bits(data, what, dtype, name):
    shapes, orders = zip(*what, strict=True)
    models = [Bag(shapes, orders) for _ in range(2)]
    ways = zip(models, (False, True), strict=True)
    masters = [inside.MasterParams(m, dtype, flat) for m, flat in ways]
    params = [list(m.parameters()) for m in models]
    n = len(params[0])
    cut = data.draw(st.integers(0, n), label="first group's length")
    flags = st.lists(st.booleans(), min_size=n, max_size=n)
    states = {}, {}
    for seed in range(4):
        trained, seen = data.draw(flags, label="trained"), data.draw(flags, label="has gradient")
        for m, ps, state in zip(masters, params, states, strict=True):
            rng = torch.Generator().manual_seed(seed)
            for p, is_trained, has_grad in zip(ps, trained, seen, strict=True):
                grad = torch.randn(p.shape, generator=rng)
                p.requires_grad_(is_trained)
                p.grad = grad if is_trained and has_grad else None
            step(m, [ps[:cut], ps[cut:]], state, OPTIMIZERS[name])
        assert_same(dict(models[1].state_dict()), dict(models[0].state_dict()))
        assert_same([p.data for p in params[1]], [p.data for p in params[0]])
        for a, b in zip(params[0], params[1], strict=True):
            assert_same(states[1].get(b, {}), states[0].get(a, {}))


@given(what=bag, dtype=dtype, flat=st.booleans(), seed=st.integers(0, 9), laid_out=st.booleans())
@examples(max_examples=60)
def test_to_16_bits_and_back_is_the_identity(what, dtype, flat, seed, laid_out):
    shapes, orders = zip(*what, strict=True)
    model = Bag(shapes, orders, seed, AWKWARD)
    before = copies(model)
    strides = strides_of(model)
    objects = list(model.parameters())
    masters = inside.MasterParams(model, dtype, flat)
    if laid_out:
        inside.lay_out(masters, [objects[::2], objects[1::2]])
    assert_same(dict(model.state_dict()), before)
    inside.sync_from_model(masters)
    masters.restore()
    assert_same(dict(model.state_dict()), before)
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert strides_of(model) == strides
    assert not model._state_dict_hooks and not model._load_state_dict_pre_hooks


@given(what=bag, seed=st.integers(0, 9))
@examples(max_examples=40)
def test_join_undoes_split_without_a_copy(what, seed):
    shapes, orders = zip(*what, strict=True)
    params = list(Bag(shapes, orders, seed).parameters())
    masters = inside.MasterParams(nn.ParameterList(params), torch.bfloat16, flat=True)
    inside.lay_out(masters, [params])
    for p in params:
        p.grad = torch.ones(p.shape)
    buckets = inside.buckets(masters, params)
    assert {p for bucket in buckets for p in bucket.params} == set(params)
    for bucket in buckets:
        state = {"mean": torch.randn(bucket.master.shape), "step": 3}
        pieces = bucket.split(state)
        assert [s["mean"].shape for s in pieces] == [p.shape for p in bucket.params]
        joined = bucket.join(pieces)
        assert_same(joined, state)
        assert joined["mean"].data_ptr() == state["mean"].data_ptr()


def test_memory_format_may_change_between_steps():
    ends = []
    for flat in (False, True):
        model = nn.Conv2d(2, 3, 2, bias=False)
        model.weight.data.copy_(torch.arange(24.0).view(3, 2, 2, 2))
        masters, states = inside.MasterParams(model, torch.float32, flat), {}
        for i in range(3):
            model.weight.grad = torch.arange(24.0).view(3, 2, 2, 2)
            step(masters, [[model.weight]], states, OPTIMIZERS["sgd"])
            if i == 0:
                model.to(memory_format=torch.channels_last)
        ends.append(masters.restore().weight.data.contiguous())
    assert_same(ends[1], ends[0])


@pytest.mark.parametrize("flat", [False, True])
def test_no_memory_is_shared_between_the_copies(flat):
    model = tiny_net()
    masters = inside.MasterParams(model, torch.float32, flat)
    inside.lay_out(masters, [list(model.parameters())])
    pointers = {p.data_ptr() for p in model.parameters()}
    assert not pointers & {m.data_ptr() for m in inside.masters_by_param(masters).values()}
    masters.restore()
    for p in model.parameters():  # no view of a vector, which would keep it in memory
        assert p.untyped_storage().nbytes() == p.nbytes


@pytest.mark.parametrize("flat", [False, True])
def test_gradients_survive_the_way_there_and_back(flat):
    model = linear_model([1.0])
    model.weight.grad = torch.full((1, 1), 1 + 2.0**-20)
    masters = inside.MasterParams(model, torch.bfloat16, flat)
    assert_same(model.weight.grad, torch.full((1, 1), 1 + 2.0**-20))
    inside.lay_out(masters, [list(model.parameters())])
    masters.restore()
    assert_same(model.weight.grad, torch.full((1, 1), 1 + 2.0**-20))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_that_were_copied_into_the_masters_stay_as_they_are(dtype, flat):
    """A norm's are in 32 bits on both sides: no cast makes a copy of them."""
    model = linear_model().to(dtype)
    params, masters = get_master([model], flat)
    model.weight.grad = torch.ones_like(model.weight)
    model_g2master_g(params, masters, flat)
    model.weight.grad.zero_()
    assert masters[0][0].grad.unique().tolist() == [1.0]


@pytest.mark.parametrize("flat", [False, True])
def test_a_masters_gradient_does_not_hold_the_graph(flat):
    """A backward pass with `create_graph=True` leaves gradients that have one themselves."""
    model = linear_model()
    params, masters = get_master([model], flat)
    model(torch.ones(2, model.in_features)).square().sum().backward(create_graph=True)
    assert model.weight.grad.requires_grad
    model_g2master_g(params, masters, flat)
    assert not masters[0][0].grad.requires_grad


def test_a_step_that_was_interrupted_reaches_the_model():
    model = linear_model([1.0])
    masters = inside.MasterParams(model)
    inside.interrupt_step(masters)
    inside.masters_by_param(masters)[model.weight].data.fill_(2.0)
    inside.sync_from_model(masters)
    assert model.weight == 2.0 and not inside.is_stepping(masters)
    assert inside.masters_by_param(masters)[model.weight] == 2.0


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_give_back_writes_into_the_parameters(dtype):
    model = linear_model([1.0])
    masters = inside.MasterParams(model, dtype)
    pointer = model.weight.data_ptr()
    inside.masters_by_param(masters)[model.weight].data.fill_(1.0005)
    inside.master_to_model(masters)
    assert model.weight.data_ptr() == pointer
    assert_same(model.weight.data, torch.full((1, 1), 1.0005).to(dtype))


@pytest.mark.parametrize("flat", [False, True])
def test_a_frozen_parameter_with_a_gradient_is_stepped_as_in_pytorch(flat):
    model = linear_model([1.0])
    model.other = Parameter(torch.ones(1))
    masters = inside.MasterParams(model, flat=flat)
    model.weight.requires_grad_(False)
    model.weight.grad = torch.ones(1, 1)
    step(masters, [list(model.parameters())], {}, lambda ps: torch.optim.SGD(ps, lr=0.5))
    assert model.weight == 0.5 and model.other == 1


@pytest.mark.parametrize("flat", [False, True])
def test_restore_takes_what_was_written(flat):
    model = linear_model([1.0, 2.0])
    masters = inside.MasterParams(model, flat=flat)
    inside.masters_by_param(masters)[model.weight].data += 2.0**-20
    model.weight.data[0, 1] = 4.0
    masters.restore()
    assert_same(model.weight.data, torch.tensor([[1 + 2.0**-20, 4.0]]))


def test_what_has_no_master_is_its_own_unit():
    model = nn.Module()
    model.weight = Parameter(torch.ones(2))
    model.phase = Parameter(torch.ones(2, dtype=torch.complex64))
    outside = Parameter(torch.ones(2))
    masters = inside.MasterParams(model, flat=True)
    params = [*model.parameters(), outside]
    inside.lay_out(masters, [params])
    for p in params:
        p.grad = torch.ones(p.shape, dtype=p.dtype if p.is_complex() else None)
    buckets = inside.buckets(masters, params)
    own = [bucket.params[0] for bucket in buckets if bucket.master is bucket.params[0]]
    assert set(own) == {model.phase, outside}
    assert len(buckets) == 3
    outside.grad = model.phase.grad = None
    assert [u.params for u in inside.buckets(masters, params)] == [[model.weight]]
    assert model.phase.dtype == torch.complex64


def test_tied_weights_have_one_master():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    before = copies(model)
    masters = inside.MasterParams(model, flat=True)
    assert len(inside.masters_by_param(masters)) == 1
    assert_same(dict(model.state_dict()), before)
    new = {k: v + 2.0**-20 for k, v in before.items()}
    model.load_state_dict({k: torch.ones(2, 2) + 2.0**-20 for k in new})
    masters.restore()
    assert model[0].weight is model[1].weight
    assert_same(model[0].weight.data, torch.ones(2, 2) + 2.0**-20)


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_a_file_holds_tied_weights_once(flat):
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model.append(nn.Linear(64, 1))
    model[1].weight = model[0].weight
    inside.MasterParams(model, flat=flat)
    if flat:
        inside.lay_out(inside.masters_of_model(model), [list(model.parameters())])
    torch.save(model.state_dict(), file := io.BytesIO())
    assert 64 * 64 * 4 < len(file.getvalue()) < 1.5 * 64 * 64 * 4


@pytest.mark.parametrize("cast", [nn.Module.float, nn.Module.bfloat16], ids=["float", "bfloat16"])
def test_what_is_written_into_a_buffer_outlives_a_cast_from_outside(cast):
    model = linear_model([1.0])
    model.register_buffer("means", torch.ones(2))
    masters = inside.MasterParams(model)
    model.means[0] = 3.0
    inside.sync_from_model(masters)
    cast(model)
    inside.sync_from_model(masters)
    assert model.means.tolist() == [3.0, 1.0] and model.means.dtype == torch.float16
    assert masters.restore().means.tolist() == [3.0, 1.0]


def test_what_was_loaded_may_be_changed_afterwards():
    model = linear_model([1.0])
    model.register_buffer("means", torch.ones(1))
    inside.MasterParams(model)
    loaded = {k: v + 2.0**-20 for k, v in model.state_dict().items()}
    before = {k: v.clone() for k, v in loaded.items()}
    model.load_state_dict(loaded)
    for v in loaded.values():
        v.zero_()
    assert_same(dict(model.state_dict()), before)


def test_a_number_from_a_file_that_has_it_in_a_list_keeps_its_low_bits():
    """PyTorch loads shape (1,) into shape (): old files have it."""
    model = nn.ParameterList([Parameter(torch.tensor(1.0))])
    masters = inside.MasterParams(model, torch.bfloat16)
    model.load_state_dict({"0": torch.tensor([1 + 2.0**-20])})
    assert masters.restore()[0].item() == 1 + 2.0**-20


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_scalars_next_to_each_other_keep_their_state(name):
    ends = []
    for flat in (False, True):
        model = nn.ParameterList([Parameter(torch.tensor(float(i))) for i in range(3)])
        params, states = list(model), {}
        masters = inside.MasterParams(model, torch.float32, flat)
        for _ in range(3):
            for i, p in enumerate(params):
                p.grad = torch.tensor(i + 0.5)
            step(masters, [params], states, OPTIMIZERS[name])
        ends.append([[p.data for p in params], [states[p] for p in params]])
    assert_same(ends[1], ends[0])


def test_a_checkpoint_of_a_wrong_shape_fails_as_ever():
    model = tiny_net()
    before = copies(model)
    masters = inside.MasterParams(model)
    with pytest.raises(RuntimeError, match="size mismatch for linear.weight"):
        model.load_state_dict({**before, "linear.weight": torch.zeros(3, 8)})
    assert_same(dict(masters.restore().state_dict()), before)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_half_model_is_trained_from_what_is_left(dtype, flat, caplog):
    model = nn.Linear(3, 2).to(dtype)
    rounded = copies(model)
    masters = inside.MasterParams(model, dtype, flat)
    masters.restore()
    assert_same(dict(model.state_dict()), {k: v.float() for k, v in rounded.items()})


# Copies of a model that is under MasterParams


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [copy.deepcopy, by_pickle, by_torch_save]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("laid_out", [False, True])
def test_a_copy_of_the_model_alone_is_in_32_bits(way, flat, laid_out):
    model = tiny_net()
    model.register_buffer("means", torch.tensor([0.1, 0.2]))
    before = copies(model)
    masters = inside.MasterParams(model, torch.bfloat16, flat)
    if laid_out:
        inside.lay_out(masters, [list(model.parameters())])
    twin = way(model)
    assert twin.conv.weight.dtype == twin.means.dtype == torch.float32
    assert not twin._state_dict_hooks and not vars(twin).keys() & {"__deepcopy__", "forward"}
    assert_same(dict(twin.state_dict()), before)
    assert model.conv.weight.dtype == torch.bfloat16 and model._state_dict_hooks
    assert_same(dict(way(way(model)).state_dict()), before)
    twin.load_state_dict({k: torch.zeros_like(v) for k, v in before.items()})
    assert_same(dict(model.state_dict()), before)
    masters.restore()
    assert not vars(model).keys() & {"__deepcopy__", "__reduce_ex__"}
    assert_same(dict(model.state_dict()), before)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("model_first", [False, True])
def test_a_copy_of_model_and_masters_is_in_16_bits(way, flat, model_first):
    model = tiny_net()
    model.register_buffer("means", torch.tensor([0.1, 0.2]))
    before = copies(model)
    masters = inside.MasterParams(model, torch.bfloat16, flat)
    inside.lay_out(masters, [list(model.parameters())])
    if model_first:
        twin, own = way((model, masters))
    else:
        own, twin = way((masters, model))
    inside.reattach(own)
    assert twin.conv.weight.dtype == twin.means.dtype == torch.bfloat16
    assert_same(dict(twin.state_dict()), before)
    assert masters_of(twin) is own is not masters and own.model is twin
    assert set(inside.masters_by_param(own)) == set(twin.parameters())
    assert_same(dict(way(twin).state_dict()), before)

    twin.load_state_dict({k: torch.zeros_like(v) for k, v in before.items()})
    assert_same(dict(model.state_dict()), before)
    own.restore()
    assert twin.conv.weight.dtype == torch.float32 and not twin.conv.weight.any()
    assert not twin._state_dict_hooks
    masters.restore()
    assert_same(dict(model.state_dict()), before)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("flat", [False, True])
def test_a_copy_trains_on(way, flat):
    model = tiny_net()
    before = copies(model)
    masters = inside.MasterParams(model, flat=flat)
    inside.lay_out(masters, [list(model.parameters())])
    twin, own = way((model, masters))
    inside.reattach(own)
    assert model.linear.weight.grad_dtype == twin.linear.weight.grad_dtype == torch.float32
    check_trains(twin, before)
    assert_same(dict(model.state_dict()), before)


def check_trains(twin, before):
    """Check that a step of a half on gradients of one moves every weight of `twin` by a half."""
    own, params = masters_of(twin), list(twin.parameters())
    inside.sync_from_model(own)
    for p in params:
        p.grad = torch.ones(p.shape)
    step(own, [params], {}, lambda ps: torch.optim.SGD(ps, lr=0.5))
    now = twin.state_dict()
    for name, _ in twin.named_parameters():
        assert_same(now[name], before[name] - 0.5)


# Meddling by others: casts, gaps, copies


def test_a_shallow_copy_shares_the_weights_and_is_copied_as_the_model_is():
    model = tiny_net()
    x = torch.randn(2, 3, 8, 8)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    model, opt = with_masters(model, opt, dtype=torch.bfloat16)
    twin = copy.copy(model)
    assert type(twin) is type(model) and twin is not model
    assert all(map(operator.is_, twin.parameters(), model.parameters()))
    model(x).sum().backward()
    opt.step()
    assert_same(twin(x), model(x))
    for alone in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        assert {p.dtype for p in alone.parameters()} == {torch.float32}
        assert_same(dict(alone.state_dict()), dict(model.state_dict()))


def test_a_checkpoint_holds_what_was_written():
    model = linear_model([1.0, 2.0])
    inside.MasterParams(model)
    model.weight.data.fill_(3.0)
    assert_same(model.state_dict()["weight"], torch.full((1, 2), 3.0))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("cast", ["half", "bfloat16", "float"])
def test_low_bits_survive_a_cast_by_others(cast, dtype, flat):
    model = tiny_net()
    model.norm.weight.data += 2.0**-20
    model.register_buffer("means", torch.tensor([0.1, 0.2]))
    before = copies(model)
    masters = inside.MasterParams(model, dtype, flat)
    getattr(model, cast)()
    inside.sync_from_model(masters)
    assert model.conv.weight.dtype == dtype
    assert model.norm.weight.dtype == model.norm.running_mean.dtype == torch.float32
    assert_same(dict(masters.restore().state_dict()), before)


def test_a_state_with_gaps_is_joined():
    p = Parameter(torch.zeros(4))
    vector = torch.zeros(inside.in_vectors([p]))
    bucket = inside.Bucket([p], vector, [torch.zeros(4)], inside.GradBuffer(vector, [p]))
    with_gaps = torch.arange(8.0)[::2]
    assert_same(bucket.join([{"mean": with_gaps}])["mean"][:4].clone(), with_gaps.clone())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_nothing_is_left_on_the_parameters(dtype):
    model = linear_model([1.0])
    inside.MasterParams(model).restore()
    model.to(dtype)
    model(torch.ones(1, 1, dtype=dtype)).sum().backward()
    assert model.weight.grad.dtype == dtype


def test_a_half_model_comes_back_in_32_bits():
    model = linear_model([1.0])
    model.register_buffer("means", torch.ones(1))
    masters = inside.MasterParams(model.half())
    masters.restore()
    assert model.means.dtype == model.weight.dtype == torch.float32


def test_a_parameter_without_elements_has_a_float32_master():
    model = linear_model([1.0])
    model.none = Parameter(torch.zeros(0, 2))
    masters = inside.MasterParams(model)
    assert inside.masters_by_param(masters)[model.none].dtype == torch.float32


def test_the_optimizers_own_zero_grad():
    model = linear_model([1.0])
    masters = inside.MasterParams(model, flat=True)
    inside.lay_out(masters, [[model.weight]])
    for _ in range(2):
        model.weight.grad = torch.ones(1, 1)
        (bucket,) = inside.buckets(masters, [model.weight])
        inside.grads_to_master(bucket)
        opt = torch.optim.SGD([bucket.master], lr=0.25)
        opt.step()
        opt.zero_grad()
    assert inside.masters_by_param(masters)[model.weight] == 0.5


def test_a_buffer_in_the_middle_of_two_numbers_of_bfloat16_keeps_its_bits():
    """It is rounded to the even one, and is known by that: not as masters that are cut in two."""
    model, middle = nn.Linear(2, 2), torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8])
    model.register_buffer("means", middle.clone())
    model, opt = with_masters(model, torch.optim.SGD(model.parameters(), 1.0), dtype=torch.bfloat16)
    assert model.means.tolist() == [1.0, 1 + 2.0**-6]
    assert_same(model.state_dict()["means"], middle)
    opt.restore()
    assert_same(model.means, middle)


def test_a_hook_of_others_with_masters_of_its_own_is_not_taken_for_ours():
    """Every object that listens to `state_dict` is looked at."""

    class Others:
        def __init__(self, model):
            self.masters = SimpleNamespace(model=model, is_restored=False)

        def __call__(self, *args):
            pass

    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(Others(model))
    before = copies(model)
    model, opt = with_masters(model, torch.optim.SGD(model.parameters(), 1.0))
    assert model.weight.dtype == torch.float16
    assert_same(copies(copy.deepcopy(model)), before)
    opt.restore()
    assert_same(copies(model), before)
