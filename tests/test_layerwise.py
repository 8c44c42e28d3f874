"""Layer scales: they change no bit, except for what one scale would lose.

The oracle is autograd on the same model without scales; at the end they are set in a `Learner`.
"""

import contextlib
import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fastai.callback.core import CancelBatchException
from hypothesis import given
from hypothesis import strategies as st
from tiny import Do, bits, conv_net, make_learner, silent, weights
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mixedfp.callback  # noqa: F401, gives Learner to_fp16
from mixedfp.checkpoint import Checkpoint
from mixedfp.formats import MixedPrecisionError
from mixedfp.layerwise import LayerwiseGradientScaler
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same, tiny_batch, tiny_net

SGD = torch.optim.SGD


class Graph(nn.Module):
    """Layers a, b and others, and any function of them and the input."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run, self.a, self.b = run, nn.Linear(4, 4), nn.Linear(4, 4)
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        return self.run(self, x)


def box():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.GELU()))


def recurrent(m, x):
    y, (_, c) = m.rnn(torch.stack([m.a(x), m.b(m.a(x))]))
    return y, c


def in_place(m, x):
    h = m.a(x)
    m.relu(h)  # the return value is dropped
    h = h * 2.0
    h[:, 1:].mul_(2.0)
    return m.relu(m.b(h).view(-1)) + 0.1


def again(m, x):
    h = checkpoint(m.box, m.a(x), use_reentrant=False)
    return m.b(checkpoint(lambda t: F.gelu(m.box(t)), h, use_reentrant=False))


def packed(m, x):
    pair = {"a": m.a(x), "b": m.b(x)}
    return m.a(pair["a"] * pair["b"]), {"all": [pair, "text", None]}


def total(out):
    """Return a loss of any output."""
    if isinstance(out, torch.Tensor):
        return (out * out.cos()).sum() if out.ndim else out
    out = list(out.values()) if isinstance(out, dict) else out
    return sum(map(total, out)) if isinstance(out, list | tuple) else 0


GRAPHS = [  # a name, a model, scales of its layers
    ("conv", tiny_net, {"": 2.0**5, "conv": 2.0**-5, "norm": 8.0, "linear": 2.0**10}),
    ("far apart", box, {"0": 2.0**80, "2": 2.0**-70}),  # float32 does not hold their ratio
    ("packed", lambda: Graph(packed), {"": 2.0**3, "b": 2.0**-3}),
    ("recurrent", lambda: Graph(recurrent, rnn=nn.LSTM(4, 3, 2)), {"rnn": 2.0**10, "a": 2.0**4}),
    ("in place", lambda: Graph(in_place, relu=nn.ReLU(True)), {"relu": 2.0**5, "a": 2.0**-4}),
    ("checkpoint", lambda: Graph(again, box=box()), {"box": 2.0**5, "box.0": 2.0**9, "a": 4.0}),
    ("itself", lambda: Graph(lambda m, x: total(m.a(x))), {"": 2.0**6}),  # returns a loss
    ("identity", lambda: Graph(lambda m, x: [m.i(m.a(m.i(x))), m.i(x)], i=nn.Identity()), {"": 8}),
]


def begin(model, scales=None, active=False):
    """Return a scaler that has begun an iteration; `active` as in a trainer."""
    scaler = LayerwiseGradientScaler(model, scales or {})
    scaler.in_passes = active
    scaler.scale()
    return scaler


def grads(model, x, scales=None, loss=total, active=False):
    """Return the gradients of a copy of `model` and of `x`, if it requires one."""
    kinds = [p.grad_dtype for p in model.parameters()]
    model, x = copy.deepcopy(model), x.detach().clone().requires_grad_(x.requires_grad)
    for p, dtype in zip(model.parameters(), kinds, strict=True):
        p.grad_dtype = dtype
    scaler = begin(model, scales, active)
    with scaler.active() if active else contextlib.nullcontext():
        out = model.forward(x) if active else model(x)
    scaler.trace_loss(loss(out)).backward()
    assert scaler.unscale() and not has_hooks(model)
    leaves = dict(model.named_parameters()) | {"input": x}
    return {name: p.grad for name, p in leaves.items() if p.grad is not None}


def n_hooks(model):
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def has_hooks(model):
    return any(map(any, n_hooks(model)))


actives = pytest.mark.parametrize("active", [False, True])


@pytest.mark.parametrize("make, scales", [g[1:] for g in GRAPHS], ids=[g[0] for g in GRAPHS])
@actives
def test_gradients_are_the_true_ones_to_the_bit(make, scales, active):
    torch.manual_seed(0)
    model = make()
    x = tiny_batch()[0] if make is tiny_net else torch.randn(5, 4, requires_grad=active)
    plain = grads(model, x)
    assert len(plain) > 2 - (not active) and all(g.abs().max() > 0 for g in plain.values())
    assert_same(grads(model, x, scales, active=active), plain)


@given(st.data())
def test_gradients_are_the_true_ones_on_random_graphs(data):
    """Layers that run in any order or are never called, nested, shared, branching."""
    draw = data.draw
    layers = nn.ModuleDict({f"l{i}": nn.Linear(3, 3) for i in range(draw(st.integers(1, 5)))})
    for i in range(draw(st.integers(0, 2))):  # containers, of layers that others use too
        chosen = draw(st.lists(st.sampled_from(sorted(layers)), min_size=1, max_size=3))
        layers[f"c{i}"] = nn.Sequential(*[layers[k] for k in chosen], nn.Tanh())
    kinds = {
        "layer": lambda a, b, layer: layer(a),
        "weight": lambda a, b, layer: F.linear(a, next(layer.parameters())),
        "cat": lambda a, b, layer: torch.cat([a[..., :1], b[..., 1:]], -1),
        "relu_": lambda a, b, layer: (a * 1.5).relu_(),
        "add": lambda a, b, layer: a + layer(b),
        "mul": lambda a, b, layer: a * b.sigmoid(),
    }
    place = st.integers(0, 4)
    step = st.tuples(st.sampled_from(sorted(kinds)), st.sampled_from(sorted(layers)), place, place)
    steps = [("layer", "l0", 0, 0), *draw(st.lists(step, max_size=8))]

    def run(model, x):
        values = [x]
        for what, name, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(kinds[what](a, b, model.layers[name]))
        return tuple(values[1:])

    model = Graph(run, layers=layers)
    names = st.sampled_from([name for name, _ in model.named_modules()])
    exponents = draw(st.dictionaries(names, st.integers(-12, 12), max_size=6))
    scales = {name: 2.0**e for name, e in exponents.items()}
    x = torch.randn(2, 3, requires_grad=draw(st.booleans()))
    assert_same(grads(model, x, scales, active=draw(st.booleans())), grads(model, x))


# exponents: the layers' scales, the loss's gradient, the second weight
EDGES = [
    (10, -8, -8, -8),  # leaves the second layer as float16's smallest number
    (-8, 10, 0, 5),  # leaves it as float16's largest power of two
    (20, 14, -14, -13),  # without scales it would be flushed
    (-12, -10, 14, 10),  # and here it would overflow
]


@pytest.mark.parametrize("first, second, loss, weight", EDGES)
@actives
def test_between_two_layers_it_is_one_multiplication(first, second, loss, weight, active):
    """Each number fits float16 in the unit of its layer; a detour over another need not."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).half()
    for p, value in zip(model.parameters(), (1.0, 2.0**weight), strict=True):
        p.data.fill_(value)
        p.grad_dtype = torch.float32
    scales, x = {"0": 2.0**first, "1": 2.0**second}, torch.ones(1, 1).half()
    found = grads(model, x, scales, lambda y: (y.float() * 2.0**loss).sum(), active)
    true = {"0.weight": 2.0 ** (loss + weight), "1.weight": 2.0**loss}
    assert_same(found, {name: torch.tensor([[g]]) for name, g in true.items()})


def test_a_loss_on_a_kept_activation_accumulated_and_run_twice():
    """`LossScaler` traces each loss, whatever it uses; the output is changed in place besides."""
    kept, xs, found = [], torch.randn(3, 5, 4), []
    model = nn.Sequential(nn.Linear(4, 4), box(), nn.Linear(4, 4))
    model[1][0].register_forward_hook(lambda m, args, out: kept.append(out.chunk(2, -1)[0]))
    for scales in ({}, {"0": 2.0**-4, "1": 2.0**10, "1.0": 2.0**-7, "2": 4.0}):
        model.zero_grad()
        layers = LayerwiseGradientScaler(model, scales)
        scaler = LossScaler("cpu", 8.0, layers=layers)
        for x in xs:
            loss = total(model(x).relu_()) + total(kept.pop())
            scaler.scale(loss).backward(retain_graph=True)
            scaler.scale(loss).backward()
        scaler.scale(sum(p.square().sum() for p in model.parameters())).backward()
        scaler.unscale_(SGD(model.parameters(), lr=0.0))
        layers.remove()
        found.append([p.grad.clone() for p in model.parameters()])
    assert_same(*found)


def test_a_loss_that_is_not_traced_or_of_an_earlier_graph_is_refused():
    model, x = box(), torch.randn(5, 4)
    scaler = begin(model, {"0": 2.0**10})
    out = model(x)
    with pytest.raises(MixedPrecisionError, match="no backward pass"):
        scaler.unscale()
    scaler.trace_loss(total(out)).backward(retain_graph=True)
    with pytest.raises(MixedPrecisionError, match="without trace_loss"):
        out.sum().backward(retain_graph=True)
    scaler.scale()
    with pytest.raises(MixedPrecisionError, match="an earlier iteration"):
        scaler.trace_loss(total(out))


def in_a_thread(f, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(f, *args).result()


def test_derivatives_of_derivatives_reentrant_checkpoints_and_threads_are_refused():
    model, x = box(), torch.randn(5, 4, requires_grad=True)
    for scales in ({"0": 2.0**10}, {"2": 8.0}):
        scaler = begin(model, scales)
        with pytest.raises(MixedPrecisionError, match="second derivatives would be"):
            torch.autograd.grad(scaler.trace_loss(model(x).sum()), x, create_graph=True)
        with pytest.raises(MixedPrecisionError, match="a second thread"):
            in_a_thread(model, x)
        scaler.remove()
        assert not has_hooks(model)
    with pytest.raises(MixedPrecisionError, match="use_reentrant=False"):
        grads(Graph(lambda m, x: checkpoint(m.a, x, use_reentrant=True)), x, {"a": 2.0})


def test_a_checkpoint_computes_again_in_the_thread_of_its_backward_pass():
    """A GPU's backward pass has a thread of its own."""
    model, x = Graph(again, box=box()), torch.randn(5, 4)
    scaler = begin(model, {"box.0": 2.0**9, "a": 4.0})
    in_a_thread(scaler.trace_loss(total(model(x))).backward)
    assert scaler.unscale()
    assert_same({k: p.grad for k, p in model.named_parameters()}, grads(model, x))


def test_an_overflow_is_attributed_to_the_scales_it_had():
    shared, twins = nn.Linear(4, 4), [nn.Linear(4, 4), nn.Linear(4, 4)]
    twins[1].weight = twins[0].weight
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(nn.Linear(4, 4), shared), *twins)
    # a shared part belongs to the last of its containers, so that 0 has none and joins the others
    # a part without a scale; a tied weight
    for p, own in ((shared.weight, "01"), (model[1][0].bias, "01"), (twins[0].weight, "023")):
        scaler = begin(model, dict.fromkeys("0123", 8.0))
        model.zero_grad()
        scaler.trace_loss(total(model(torch.ones(5, 4)))).backward()
        p.grad.view(-1)[0] = math.nan
        assert not scaler.unscale()
        scaler.update()
        assert scaler.layer_scales == {k: 4.0 if k in own else 8.0 for k in "0123"}


def test_a_layer_without_parameters_backs_off_with_those_below():
    model = nn.Sequential(nn.Linear(4, 4), nn.AvgPool1d(1), nn.Flatten(0))
    scaler = begin(model, {"1": 2.0**100, "2": 2.0**127, "0": 1.0})
    scaler.trace_loss((model(torch.randn(5, 4)) * 2.0**5).sum()).backward()
    assert not scaler.unscale()
    scaler.update()
    assert scaler.layer_scales == {"0": 0.5, "1": 2.0**99, "2": 2.0**126}


patterns = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=25)


@given(patterns, st.integers(1, 4), st.sampled_from([(2.0, 0.5), (1.5, 0.25)]), st.integers(0, 25))
def test_each_scale_goes_its_own_bounded_way_saved_or_not(overflows, interval, factors, saved_at):
    model = nn.ModuleDict({k: nn.Linear(1, 1, bias=False) for k in "ab"})
    rule = dict(growth_factor=factors[0], backoff_factor=factors[1], growth_interval=interval)
    low, high = 2.0**-126, (2 - 2.0**-23) * 2.0**127
    scales, clean = {"a": 2.0**126, "b": 2.0**-124}, {"a": 0, "b": 0}
    scaler = LayerwiseGradientScaler(model, scales, **rule)
    for i, bad in enumerate(overflows):
        if i == saved_at:
            state, scaler = scaler.state_dict(), LayerwiseGradientScaler(model, scales, **rule)
            scaler.load_state_dict(pickle.loads(pickle.dumps(state)))
        scaler.scale()
        model.zero_grad()
        for m, is_inf in zip(model.values(), bad, strict=True):
            loss = m(torch.tensor([[math.nan if is_inf else 0.0]])).sum()
            scaler.trace_loss(loss).backward()
        assert scaler.unscale() is not any(bad)
        scaler.update()
        for name, is_inf in zip("ab", bad, strict=True):
            clean[name] += 1
            if is_inf:
                scales[name], clean[name] = max(low, scales[name] * factors[1]), 0
            elif clean[name] == interval:
                scales[name], clean[name] = min(high, scales[name] * factors[0]), 0
        assert scaler.state_dict() == dict(scales=scales, growth_trackers=clean)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@actives
def test_after_an_exception_the_next_iteration_is_right(active, error):
    def stop(*_):
        raise error

    model, x = nn.Sequential(nn.Linear(4, 4), box()), torch.randn(5, 4)
    plain = list(grads(model, x).values())
    scaler = begin(model, {"0": 8.0, "1.0": 2.0**10, "1": 2.0}, active)
    handle = model[1][1].register_forward_pre_hook(stop)
    with pytest.raises(error), scaler.active() if active else contextlib.nullcontext():
        model(x)
    handle.remove()
    assert sum(map(sum, n_hooks(model))) == (0 if active else 2 * 8)
    scaler.in_passes = False
    scaler.scale()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))  # has hooks that do nothing
    copied(x * math.inf)
    assert has_hooks(copied) and scaler._trace.starts == [0]
    scaler.trace_loss(total(model(x))).backward()
    assert scaler.unscale() and not has_hooks(model)
    assert_same([p.grad for p in model.parameters()], plain)


def test_the_device_is_read_once_a_step_and_neighbours_of_one_scale_cost_nothing(monkeypatch):
    model, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]), torch.randn(2, 4)
    own = [dict(zip("012345", s, strict=True)) for s in ([8.0] * 6, [2.0**i for i in range(6)])]
    scalers = [LayerwiseGradientScaler(model, scales) for scales in own]
    reads, factors = [], []
    for name in ("tolist", "item", "__bool__", "__float__", "cpu"):
        was = getattr(torch.Tensor, name)
        new = lambda t, was=was, name=name: reads.append(name) or was(t)  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, new)
    monkeypatch.setattr("mixedfp.layerwise._times", lambda g, f: factors.append(f) or g)
    # the loss and 12 parameters, less those of the layer at scale 1; 5 edges inside
    for scaler, n in zip(scalers, (1 + 12, 1 + 10 + 5), strict=True):
        scaler.scale()
        scaler.trace_loss(model(x).sum()).backward()
        scaler.unscale()
        scaler.update()
        assert sum(f != 1 for f in factors) == n and reads == ["tolist"]
        factors.clear()
        reads.clear()


def test_layers_whose_float16_gradients_would_flush_are_refused():
    net = box().half()
    with pytest.raises(MixedPrecisionError, match="'0' has float16 gradients, which would flush"):
        LayerwiseGradientScaler(net, {"0": 2.0})
    LayerwiseGradientScaler(net.requires_grad_(False), {"0": 2.0})


# In a `Learner`

BY_HAND = {"0": 2.0**4, "4": 2.0**-4, "5": 2.0**3, "10": 2.0**7}


def learner(layer_scales=BY_HAND, dtype=torch.float16, flat=False, **kwargs):
    learn = make_learner(**kwargs)
    return learn.to_fp16(dtype=dtype, flat_master=flat, layer_scales=layer_scales)


def faint_net():
    """Return a network whose lowest layer has gradients of about 2**-26."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    for layer in model[2:]:
        layer.weight.data = torch.eye(2) * 2.0**-12
    return model


LOUD = dict.fromkeys("123", 2.0**16)


def test_over_a_model_with_masters_gradients_leave_a_layer_in_float32():
    """A scaler in a loop traces the model after `with_masters` has given it copies."""
    model, x = faint_net(), torch.ones(3, 108)
    exact = grads(model, x, loss=torch.mean)["1.weight"]
    with_masters(model, SGD(model.parameters(), 0.1), dtype="fp16")
    layers = begin(model, LOUD)
    layers.trace_loss(model(x).mean()).backward()
    layers.unscale()
    torch.testing.assert_close(model[1].weight.grad, exact, rtol=2**-7, atol=0)


def faint(**kwargs):
    """Return the gradients of a learner's lowest layer."""
    model, grads = faint_net(), []
    learn = make_learner(model=model).to_fp16(loss_scale=1.0, **kwargs)
    learn.fit(1, 0.01, cbs=Do("before_step", lambda _: grads.append(model[1].weight.grad.clone())))
    return grads[0]


@pytest.mark.parametrize("autocast", [True, False])
def test_the_gradients_that_one_scale_flushes_arrive_in_the_masters(autocast):
    exact, flushed = faint(dtype=torch.float32), faint(autocast=autocast)
    arrived = faint(layer_scales=LOUD, autocast=autocast)
    assert exact.norm() > 0 and flushed.norm() == 0
    assert arrived.dtype == torch.float32 and (arrived - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("event", ["forward", "after_pred", "before_backward", "before_step"])
@pytest.mark.parametrize("error", [ValueError, CancelBatchException])
def test_a_batch_that_breaks_off_leaves_no_hook_and_no_iteration(event, error):
    def fail(*_):
        raise error

    learn = learner()
    plain = n_hooks(learn.model)
    hook = learn.model[4].register_forward_pre_hook(fail) if event == "forward" else None
    is_raised = error is ValueError
    with pytest.raises(ValueError) if is_raised else contextlib.nullcontext():
        learn.fit(1, 0.01, cbs=Do(event, fail))
    if hook is not None:
        hook.remove()
    assert n_hooks(learn.model) == plain
    learn.fit(1, 0.01)
    learn.to_fp32()
    assert n_hooks(learn.model) == n_hooks(conv_net()) and "forward" not in vars(learn.model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flat", [False, True])
def test_a_resumed_run_ends_in_the_same_bits_also_with_flat_masters(flat, dtype, tmp_path):
    unbroken = learner(dtype=dtype, path=tmp_path / "a")
    unbroken.fit(4, 0.01, cbs=Checkpoint("run"))
    killed, resumed = (learner(dtype=dtype, flat=flat, path=tmp_path / "b") for _ in range(2))
    with pytest.raises(ZeroDivisionError):
        killed.fit(4, 0.01, cbs=[Checkpoint("run"), Do("after_backward", lambda _: 1 / 0, at=9)])
    checkpoint = Checkpoint("run")
    resumed.fit(4, 0.01, start_epoch=checkpoint.resume(resumed), cbs=checkpoint)
    assert_same(bits(resumed), bits(unbroken))
    assert resumed.mp_cb.layer_scales == unbroken.mp_cb.layer_scales


def test_scales_of_other_layers_are_refused_before_anything_is_loaded():
    learn, other = learner(), learner({"0": 2.0, "4": 4.0})
    for some in (learn, other):
        some.fit(1, 0.01)
    before = copy.deepcopy((bits(learn), learn.mp_cb.layer_scales, learn.mp_cb.loss_scale))
    with pytest.raises(ValueError, match="expected the same layers"):
        learn.opt.load_state_dict(other.opt.state_dict())
    assert_same((bits(learn), learn.mp_cb.layer_scales, learn.mp_cb.loss_scale), before)


def test_finding_a_rate_and_copying_leave_the_scales():
    learn = learner()
    learn.fit(1, 0.01)
    other = silent(copy.deepcopy(learn))
    other.fit(1, 0.01, cbs=Do("before_backward", lambda learn: learn.loss_grad.mul_(1e30), at=0))
    assert other.mp_cb.layer_scales != BY_HAND == learn.mp_cb.layer_scales
    with learn.no_bar():
        learn.lr_find(num_it=6, show_plot=False)
    assert learn.mp_cb.layer_scales == BY_HAND


WRONG = [
    ({"conv": 2.0}, ValueError, "has 'conv': expected names"),
    ({"0": 0.0}, ValueError, "`scale of '0'` is 0.0"),
    ("auto", TypeError, "expected a dict"),
    ([1.0], TypeError, "expected a dict"),
]


@pytest.mark.parametrize("layer_scales, error, words", WRONG)
def test_wrong_scales_raise_and_the_model_is_as_it_was(layer_scales, error, words):
    learn = make_learner()
    before = copy.deepcopy(weights(learn))
    with pytest.raises(error, match=words):
        learn.to_fp16(layer_scales=layer_scales)
    assert_same(weights(learn), before)
    assert n_hooks(learn.model) == n_hooks(conv_net())
    learn.fit(1, 0.01)
