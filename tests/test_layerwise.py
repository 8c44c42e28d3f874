"""Property tests of `mixedfp.layerwise`; oracle: autograd on the same model without scales."""

import collections
import copy
import dataclasses
import io
import math
from collections import namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import are_finite, fail_in_check, fitting_exponent, watch_borders
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mixedfp.formats import MixedPrecisionError
from mixedfp.layerwise import LayerwiseGradientScaler
from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same, tiny_batch, tiny_net

SGD = torch.optim.SGD
Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    name: str = "out"
    hidden: torch.Tensor | None = None


def lin(n=4, m=4):
    return nn.Linear(n, m)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.fc1, self.fc2 = nn.Linear(64, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x), inplace=True)))
        return self.fc2(torch.tanh(self.fc1(x.flatten(1))))


class NotInOrder(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.first, self.middle, self.never = lin(), lin(), lin(), lin()

    def forward(self, x):
        return self.last(self.middle(self.first(x).sigmoid()))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.block, self.skip = lin(), nn.Sequential(lin(), nn.Tanh(), lin()), lin()

    def forward(self, x):
        h = self.stem(x)
        return h + self.block(h) + self.skip(h) * h


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = lin(), lin()

    def forward(self, x):
        return self.a(self.b(self.a(x).tanh())) + self.a(x)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.box = nn.Sequential(lin(), nn.Tanh(), nn.Sequential(lin(), nn.GELU()), lin())
        self.head = lin()

    def forward(self, x):
        return self.head(self.box(x)) + self.box[0](x)  # also past its container


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, pair, *, extra):
        return {"sum": self.w * pair.a + extra["e"], "all": (pair.b * self.w, [pair.a, "text"])}


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.join, self.end = lin(), lin(), Join(), lin()

    def forward(self, x):
        out = self.join(Pair(self.a(x), x), extra={"e": self.b(x)})
        y, (z, _) = out["sum"], out["all"]
        return Output(self.end(y * z), hidden=z)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.inner, self.decoder = nn.Embedding(7, 4), lin(), nn.Linear(4, 7)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        ids = (x * 10).long().abs() % 7
        return self.decoder(self.inner(self.encoder(ids)).tanh())


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.inner = lin(), lin()
        self.ws = [self.inner.weight]  # a parameter reached by another way

    def forward(self, x):
        h = self.inner(self.encoder(x)) + F.linear(x, self.encoder.weight)
        return h @ self.ws[0]


class SideDoor(nn.Module):
    """As a U-Net's block, that finds what the encoder stored, no input of its own."""

    def __init__(self):
        super().__init__()
        self.down, self.up, self.stored = nn.Sequential(lin(), nn.Tanh()), Up(self), None

    def forward(self, x):
        h = self.down[0](x)
        self.stored = h
        return self.up(self.down[1](h))


class Up(nn.Module):
    def __init__(self, owner):
        super().__init__()
        self.fc, self.owner = lin(), [owner]

    def forward(self, x):
        return self.fc(x) * self.owner[0].stored


class ByHand(nn.Module):
    """Runs parts of containers that it never calls."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([lin(), nn.Sequential(lin(), nn.Tanh()), lin()])

    def forward(self, x):
        h = self.layers[1](self.layers[0](x))
        return self.layers[2](h) * self.layers[1][0](h)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.rnn, self.head = nn.GRUCell(4, 4), nn.LSTM(4, 3, num_layers=2), lin(3)

    def forward(self, x):
        h = torch.zeros_like(x)
        hs = []
        for _ in range(3):
            h = self.cell(x, h)
            hs.append(h)
        y, (_, c) = self.rnn(torch.stack(hs))
        return self.head(y), c


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.relu, self.norm, self.end = lin(), nn.ReLU(True), nn.LayerNorm(4), lin()

    def forward(self, x):
        h = self.fc(x)
        self.relu(h)  # what it returns is not used
        h = self.norm(h)
        h[:, 1:].mul_(2.0)
        return self.end(self.relu(h + 0.1)).relu_()


class Checkpointed(nn.Module):
    reentrant = False

    def __init__(self):
        super().__init__()
        self.stem, self.block, self.end = lin(), nn.Sequential(lin(), nn.Tanh(), lin()), lin()

    def forward(self, x):
        h = checkpoint(self.block, self.stem(x), use_reentrant=self.reentrant)
        return self.end(
            checkpoint(lambda t: F.gelu(self.block(t)), h, use_reentrant=self.reentrant)
        )


class CheckpointedTheOldWay(Checkpointed):
    reentrant = True


class Identity(nn.Module):
    """Layers that return their input, a parameter, a view; weights normed before each use."""

    def __init__(self):
        super().__init__()
        self.fc, self.same, self.pick = lin(), nn.Identity(), Pick()
        self.normed = nn.utils.parametrizations.weight_norm(lin())

    def forward(self, x):
        h = self.same(self.fc(x))
        w, v = self.pick(h)
        return self.same(self.normed(h)), w * v, h


class Pick(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2))

    def forward(self, x):
        return self.w, x[:, :2]


def total(out):
    """Return a loss of any output."""
    if isinstance(out, torch.Tensor):
        return (out * out.cos()).sum()
    if isinstance(out, Output):
        return total(out.logits) + total(out.hidden)
    if isinstance(out, dict):
        out = out.values()
    return sum(total(v) for v in out if not isinstance(v, str))


GRAPHS = {
    Chain: [
        {"fc2": 2.0**10},  # the last layer alone
        {"conv1": 2.0**8, "conv2": 2.0**-4, "fc1": 2.0**12, "fc2": 2.0},
        {"": 2.0**5, "fc1": 2.0**-5},
        {"fc1": 2.0**80, "fc2": 2.0**-70},  # no float32 holds their ratio
    ],
    NotInOrder: [{"first": 2.0**9, "last": 2.0**-3, "middle": 4.0, "never": 2.0}],
    Residual: [
        {"block": 2.0**10},
        {"stem": 2.0**-6, "block": 2.0**4, "block.2": 2.0**9, "skip": 2.0**6},
        {"block.0": 2.0**10, "block.1": 2.0**-3},
    ],
    Twice: [{"a": 2.0**10}, {"a": 2.0**10, "b": 2.0**-10}],
    Nested: [
        {"box": 2.0**8},
        {"box": 2.0**8, "box.0": 2.0**-8, "box.2.1": 2.0**3, "head": 2.0**2},
        {"box": 2.0**8, "box.2": 2.0**4, "box.2.0": 2.0**9, "box.3": 2.0**-1},
    ],
    Packed: [{"join": 2.0**7}, {"a": 2.0**3, "b": 2.0**-3, "join": 2.0**9, "end": 2.0}, {"": 8.0}],
    Tied: [{"encoder": 2.0**10}, {"decoder": 2.0**6}, {"encoder": 2.0**3, "decoder": 2.0**-6}],
    Functional: [{"encoder": 2.0**10}, {"encoder": 2.0**10, "inner": 2.0**4}],
    SideDoor: [{"up": 2.0**10}, {"down.0": 2.0**6, "up": 2.0**-6}, {"down": 2.0**3, "up.fc": 4.0}],
    ByHand: [
        {"layers": 2.0**9},
        {"layers.1": 2.0**9},
        {"": 4.0, "layers": 8.0, "layers.1.1": 2.0**-5},
    ],
    Recurrent: [{"cell": 2.0**10, "rnn": 2.0**4}, {"head": 2.0**3}, {"": 2.0**3, "rnn": 2.0**4}],
    InPlace: [{"relu": 2.0**5}, {"fc": 2.0**6, "relu": 2.0**3, "norm": 2.0**-4, "end": 2.0**9}],
    Checkpointed: [{"block": 2.0**5}, {"stem": 4.0, "block.0": 2.0**5, "end": 2.0**9}, {"": 16.0}],
    CheckpointedTheOldWay: [{"block": 2.0**5}, {"stem": 4.0, "block.0": 2.0**5, "end": 2.0**9}],
    Identity: [
        {"same": 2.0**5, "pick": 8.0},
        {"fc": 4.0, "normed": 2.0**5},
        {"same": 4.0, "": 2.0},
    ],
}
CASES = [(graph, scales) for graph, many in GRAPHS.items() for scales in many]
ids = [f"{g.__name__}-{'+'.join(k or 'all' for k in s)}" for g, s in CASES]


def an_input(graph):
    return torch.randn(2, 3, 8, 8) if graph is Chain else torch.randn(5, 4)


def grads(model, x, scales=None, loss=total):
    """Return the gradients of a copy of `model` and of `x`, if it requires one."""
    model, x = copy.deepcopy(model), x.detach().clone().requires_grad_(x.requires_grad)
    scaler = LayerwiseGradientScaler(model, scales or {})
    scaler.scale()
    loss(model(x)).backward()
    scaler.unscale()
    assert scaler.get_backward_hooks() == [] and not hooks_of(model)
    leaves = dict(model.named_parameters()) | {"input": x}
    return {name: p.grad for name, p in leaves.items() if p.grad is not None}


def hooks_of(model):
    return [h for m in model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]


@pytest.mark.parametrize("graph, scales", CASES, ids=ids)
@pytest.mark.parametrize("with_input", [False, True])
def test_gradients_are_the_true_ones_to_the_bit(graph, scales, with_input):
    model, x = graph(), an_input(graph).requires_grad_(with_input and "Old" not in graph.__name__)
    if "Old" in graph.__name__:
        x.requires_grad_()  # that checkpoint needs one
    plain = grads(model, x)
    assert len(plain) > 2 and any(g.abs().max() > 0 for g in plain.values())
    assert_same(grads(model, x, scales), plain)


@pytest.mark.parametrize("graph, scales", CASES, ids=ids)
def test_gradients_are_those_of_fp64_to_rounding(graph, scales):
    model, x = graph(), an_input(graph).requires_grad_("Old" in graph.__name__)
    odd = {name: s * 1.3 for name, s in scales.items()}  # no power of two: every factor rounds
    found = grads(model, x, odd)
    exact = grads(model.double(), x.detach().double().requires_grad_(x.requires_grad))
    assert found.keys() == exact.keys()
    for name, g in exact.items():
        bound = 3e-5 * g.abs().max().item() + 1e-30
        torch.testing.assert_close(found[name].double(), g, rtol=1e-4, atol=bound, msg=name)


@pytest.mark.parametrize("graph, scales", CASES, ids=ids)
def test_inside_its_layer_a_gradient_is_scaled_and_outside_it_is_not(graph, scales):
    """The unit of each gradient while it runs, at the outputs of all modules without children."""
    if graph in (Checkpointed, CheckpointedTheOldWay, Identity, InPlace, Tied):
        return  # those look at outputs twice, or change them
    model, x, seen = graph(), an_input(graph), {}

    def look(name, run):
        def hook(module, args, out):
            out = out if isinstance(out, torch.Tensor) else None
            if out is not None and out.grad_fn is not None:
                out.register_hook(lambda g: seen.setdefault((name, run), []).append(g))

        return hook

    names = [n for n, m in model.named_modules() if n and not list(m.children())]
    for run, chosen in enumerate([{}, scales]):
        scaler = LayerwiseGradientScaler(model, chosen)
        # before the scaler's own: they see a layer's output as it is inside
        handles = [model.get_submodule(n).register_forward_hook(look(n, run)) for n in names]
        scaler.scale()
        total(model(x)).backward()
        scaler.unscale()
        for handle in handles:
            handle.remove()
    checked = 0
    for name in names:
        path = [".".join(name.split(".")[:i]) for i in range(len(name.split(".")), -1, -1)]
        own = next((scales[p] for p in path if p in scales), 1.0)
        for a, b in zip(seen.get((name, 0), []), seen.get((name, 1), []), strict=True):
            assert_same(b, a * own, name=name)
            checked += 1
    assert checked


def chain16(n, dtype=torch.float16):
    """Layers of one weight each, in 16 bits, with 32-bit gradients."""
    model = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(n)])
    for p in model.to(dtype).parameters():
        p.data.fill_(1.0)
        p.grad_dtype = torch.float32
    return model


EDGES = [  # exponents: scale of the first layer and of the second, the loss's gradient, the weight
    (10, -8, -8, -8),  # leaves the second layer as float16's smallest number
    (10, -8, 0, 5),  # arrives in the first as its largest power of two
    (-8, 10, 0, 5),
    (-8, 10, -8, -8),
    (20, 14, -14, -13),  # without scales it would be flushed
    (-12, -10, 14, 10),  # and here it would overflow
]


@pytest.mark.parametrize("first, second, loss, weight", EDGES)
@pytest.mark.parametrize("in_a_model", [True, False])
def test_between_two_layers_it_is_one_multiplication(first, second, loss, weight, in_a_model):
    """Each number fits float16 in the unit of its place; a detour over another need not."""
    model, inside = chain16(2), (weight + loss + second, weight + loss + first)
    assert all(-24 <= e <= 15 for e in (*inside, loss, loss + second))
    model[1].weight.data.fill_(2.0**weight)
    scaler = LayerwiseGradientScaler(model, {"0": 2.0**first, "1": 2.0**second})
    scaler.scale()
    h = torch.ones(1, 1).half()
    for part in [model] if in_a_model else model:  # or layer by layer, by hand
        h = part(h)
    (h.float() * 2.0**loss).sum().backward()
    assert scaler.unscale()
    assert_same(model[1].weight.grad, torch.tensor([[2.0**loss]]))
    assert_same(model[0].weight.grad, torch.tensor([[2.0 ** (loss + weight)]]))


def test_without_scales_those_gradients_are_lost():
    for _, _, loss, weight in EDGES[-2:]:
        model = chain16(2)
        model[1].weight.data.fill_(2.0**weight)
        (model(torch.ones(1, 1).half()).float() * 2.0**loss).sum().backward()
        assert model[0].weight.grad in (0, math.inf)


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**12])
def test_a_gradient_goes_to_a_16_bit_parameter_in_32_bits_and_in_the_unit_of_the_loss(loss_scale):
    model = chain16(1)
    scaler = LayerwiseGradientScaler(model, {"0": 2.0**12})
    for _ in range(2):  # they add up there
        scaler.scale()
        loss = model(torch.full((1, 1), 2.0**-20).half()).float() * 2.0**-14
        (loss * loss_scale).sum().backward()
        scaler.unscale()
    assert_same(model[0].weight.grad, torch.tensor([[2.0**-33 * loss_scale]]))
    narrow = nn.Linear(1, 1, bias=False).half()  # its own choice: a 16-bit gradient
    scaler = LayerwiseGradientScaler(narrow, {"": 2.0**8})
    scaler.scale()
    narrow(torch.ones(1, 1).half()).sum().backward()
    assert_same(narrow.weight.grad, torch.ones(1, 1).half())


# any graph


def random_model(draw):
    """A model of random layers that run in random order, nested, shared, branching."""
    n = draw(st.integers(1, 5))
    layers = nn.ModuleDict({f"l{i}": nn.Linear(3, 3) for i in range(n)})
    for i in range(draw(st.integers(0, 2))):  # containers, of layers that others use too
        chosen = draw(st.lists(st.sampled_from(sorted(layers)), min_size=1, max_size=3))
        layers[f"c{i}"] = nn.Sequential(*[layers[k] for k in chosen], nn.Tanh())
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(
                    ["layer", "add", "mul", "relu_", "cat", "weight", "layer", "layer"]
                ),
                st.sampled_from(sorted(layers)),
                st.integers(0, 4),
                st.integers(0, 4),
            ),
            min_size=1,
            max_size=8,
        )
    )
    return Program(layers, steps)


class Program(nn.Module):
    def __init__(self, layers, steps):
        super().__init__()
        self.layers, self.steps = layers, steps

    def forward(self, x):
        values = [x]
        for what, name, i, j in self.steps:
            a, b = values[i % len(values)], values[j % len(values)]
            if what == "layer":
                new = self.layers[name](a)
            elif what == "weight":
                new = F.linear(a, next(self.layers[name].parameters()))
            elif what == "cat":
                new = torch.cat([a[..., :1], b[..., 1:]], -1)
            elif what == "relu_":
                new = (a * 1.5).relu_()
            else:
                new = a + b if what == "add" else a * b.sigmoid()
            values.append(new)
        return tuple(values[1:])


@settings(max_examples=60)
@given(st.data())
def test_gradients_are_the_true_ones_on_random_graphs(data):
    model = random_model(data.draw)
    names = [name for name, _ in model.named_modules()]
    exponents = st.dictionaries(st.sampled_from(names), st.integers(-12, 12), max_size=6)
    scales = {name: 2.0**e for name, e in data.draw(exponents).items()}
    x = torch.randn(2, 3, requires_grad=data.draw(st.booleans()))
    plain = grads(model, x) if x.requires_grad or model.steps[0][0] in ("layer", "weight") else {}
    if plain:
        assert_same(grads(model, x, scales), plain)


# what is no output, and what cannot be done


class Storing(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.box = lin(), nn.Sequential(lin(), nn.Tanh())
        self.box[0].register_forward_hook(lambda m, args, out: setattr(self, "kept", out))

    def forward(self, x):
        return self.box(self.fc(x))


def test_a_loss_on_what_a_model_stored_is_covered():
    model, x = Storing(), torch.randn(5, 4)
    scales = {"box": 2.0**10, "fc": 2.0**-4}
    (total(model(x)) + total(model.kept)).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    for covers in (1, 2):
        model.zero_grad()
        scaler = LayerwiseGradientScaler(model, scales)
        scaler.scale()
        loss = total(model(x)) + total(model.kept)
        for _ in range(covers):
            assert scaler.trace_loss(loss) is loss
        loss.backward()
        scaler.unscale()
        assert_same({name: p.grad for name, p in model.named_parameters()}, plain)
    assert scaler.trace_loss(loss) is loss  # out of order it does nothing


def test_penalties_accumulation_and_two_backward_passes():
    model, xs = Nested(), torch.randn(3, 5, 4)

    def run(scales):
        m = copy.deepcopy(model)
        scaler = LayerwiseGradientScaler(m, scales)
        for again in range(2):  # the gradients of the first round stay, and are added to
            scaler.scale()
            for x in xs:
                loss = total(m(x))
                loss.backward(retain_graph=True)
                loss.backward()
            sum(p.square().sum() for p in m.parameters()).backward()
            if again:
                for info in scaler.get_layer_info():
                    assert not info.found_inf_or_nan
            assert scaler.unscale()
        return [p.grad for p in m.parameters()]

    assert_same(run({"box": 2.0**9, "box.0": 2.0**-7, "head": 4.0}), run({}))


def test_a_graph_is_right_however_late_its_backward_runs():
    model, x = Residual(), torch.randn(5, 4)
    scaler = LayerwiseGradientScaler(model, {"block": 2.0**10, "stem": 2.0**3})
    scaler.scale()
    loss = total(model(x))
    scaler.unscale()
    loss.backward()
    assert_same({n: p.grad for n, p in model.named_parameters()}, grads(model, x))


def test_second_derivatives_are_refused():
    model, x = Residual(), torch.randn(5, 4, requires_grad=True)
    scaler = LayerwiseGradientScaler(model, {"block": 2.0**10})
    scaler.scale()
    out = model(x)
    with pytest.raises(MixedPrecisionError, match="create_graph=True goes through a layer"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    scaler.remove()
    assert not hooks_of(model)


def test_a_checkpoint_that_runs_its_own_backward_inside_a_layer_is_refused():
    model = CheckpointedTheOldWay()
    scaler = LayerwiseGradientScaler(model, {"": 2.0})
    scaler.scale()
    with pytest.raises(MixedPrecisionError, match="use_reentrant=False"):
        model(torch.randn(5, 4, requires_grad=True))


def test_a_backward_pass_that_broke_off_leaves_nothing_for_the_next():
    first, second = layers = nn.ModuleList([lin(), lin()])
    x, fails = torch.randn(5, 4), [True]
    plain = grads(nn.Sequential(first, second), x)
    scaler = LayerwiseGradientScaler(layers, {"0": 2.0**10, "1": 2.0**-5})
    scaler.scale()
    h = first(x)
    h.register_hook(lambda g: 1 / 0 if fails.pop() else None)
    fails.insert(0, False)
    loss = total(second(h))
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    layers.zero_grad()
    loss.backward()
    assert h.grad_fn.passed == []
    assert_same({name: p.grad for name, p in layers.named_parameters()}, plain)


class Tries(nn.Module):
    def __init__(self):
        super().__init__()
        self.bad, self.good = lin(3), lin()

    def forward(self, x):
        try:
            return self.bad(x)
        except RuntimeError:
            return self.good(x)


def test_a_layer_that_raised_has_ended():
    model, x, seen = Tries(), torch.randn(5, 4), []
    assert_same(grads(model, x, {"bad": 2.0**10}), grads(model, x))
    model.good.register_forward_hook(lambda m, args, out: out.register_hook(seen.append) and None)
    for scales in ({}, {"bad": 2.0**10}):
        scaler = LayerwiseGradientScaler(model, scales)
        scaler.scale()
        total(model(x)).backward()
        scaler.remove()
    assert_same(seen[1], seen[0])  # outside of the layer that raised


def test_an_interrupted_forward_does_not_switch_scales_off():
    class Stops(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    model, seen = nn.Sequential(lin(), Stops()), []
    scaler = LayerwiseGradientScaler(model, {"0": 8.0, "1": 2.0})
    model[0].register_forward_hook(lambda m, args, out: out.register_hook(seen.append) and None)
    scaler.scale()
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 4))
    model[1].forward = lambda x: x * 1.0
    scaler.scale()
    model(torch.ones(1, 4)).sum().backward()
    assert_same(seen[0], torch.full((1, 4), 8.0))


@pytest.mark.parametrize("pack", [dict, collections.OrderedDict, list, tuple, Pair, Output])
def test_what_comes_out_of_a_scaled_model_keeps_its_type(pack):
    class Packs(nn.Linear):
        def forward(self, x):
            a, b = super().forward(x), super().forward(-x)
            if pack is Output:
                return Output(a, hidden=b)
            if pack is Pair:
                return Pair(a, b)
            return pack([("a", a), ("b", b)] if issubclass(pack, dict) else [a, b, None, "text"])

    model, x = Packs(4, 4), torch.randn(5, 4)

    def loss(out):
        assert type(out) is pack
        if pack in (list, tuple):
            assert out[2:] == pack([None, "text"])
            out = out[:2]
        return total(out)

    assert_same(grads(model, x, {"": 2.0**10}, loss), grads(model, x, {}, loss))


def test_a_shared_part_has_the_scale_of_the_container_that_runs():
    shared, seen = lin(), []
    model = nn.Sequential(nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared, nn.Tanh()))
    x = torch.randn(5, 4)
    plain = grads(model, x)
    shared.register_forward_hook(lambda m, args, out: out.register_hook(seen.append) and None)
    for scales in ({}, {"0": 2.0**3, "1": 2.0**6}, {"": 2.0**2, "0": 2.0**3}):
        model.zero_grad()
        scaler = LayerwiseGradientScaler(model, scales)
        scaler.scale()
        total(model(x)).backward()
        scaler.unscale()
        assert_same({name: p.grad for name, p in model.named_parameters()}, plain)
    last, first = seen[:2]
    assert_same(seen[2:4], [last * 2.0**6, first * 2.0**3])


def test_an_overflow_in_a_shared_part_is_that_of_every_container_around_it():
    """Two containers hold it, and one of them a second time, in a container of its own."""
    shared = lin()
    first, second = nn.Sequential(shared, nn.Tanh()), nn.Sequential(lin(), shared)
    second.append(third := nn.Sequential(lin(), shared))
    model = nn.Sequential(first, second, lin())
    scaler = LayerwiseGradientScaler(model, {"0": 8.0, "1": 8.0, "1.2": 8.0, "2": 8.0})
    scaler.scale()
    total(model(torch.randn(5, 4))).backward()
    shared.weight.grad.fill_(torch.inf)
    assert not scaler.unscale()
    found = {
        info.layer for info in scaler.get_layer_info() if info.found_inf_or_nan and info.scale_layer
    }
    assert found == {first, second, third}


# the iteration


def one_weight(**kwargs):
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    for p in model.parameters():
        p.data.fill_(1.0)
    return model, LayerwiseGradientScaler(model, {"a": 2.0**4, "b": 3.0}, **kwargs)


patterns = st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=25)


@given(patterns, st.integers(1, 4), st.sampled_from([2.0, 1.5]), st.sampled_from([0.5, 0.25]))
def test_each_scale_goes_its_own_bounded_way(overflows, interval, growth, backoff):
    rule = dict(growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
    model, scaler = one_weight(min_scale=1.0, max_scale=64.0, **rule)
    outside = nn.Parameter(torch.ones(()))
    opt = SGD([*model.parameters(), outside], lr=2.0**-10)
    scales, clean, taken = {"a": 16.0, "b": 3.0}, {"a": 0, "b": 0}, 0
    for *layers, third in overflows:
        scaler.scale()
        opt.zero_grad()
        for m, bad in zip(model.values(), layers, strict=True):
            m(torch.tensor([[math.nan if bad else 1.0]])).sum().backward()
        (outside * (math.inf if third else 1.0)).backward()
        assert scaler.unscale() is not any(layers)
        done = scaler.step(opt)
        assert done is not any((*layers, third))
        taken += done
        for name, bad in zip("ab", layers, strict=True):
            clean[name] += 1
            if bad:
                scales[name], clean[name] = max(1.0, scales[name] * backoff), 0
            elif clean[name] == interval:
                scales[name], clean[name] = min(64.0, scales[name] * growth), 0
        infos = scaler.get_layer_info()
        assert [(i.layer_name, i.scaling_factor, i.growth_tracker) for i in infos] == [
            (name, scales[name], clean[name]) for name in "ab"
        ]
        assert [i.found_inf_or_nan for i in infos] == layers
    for p in (*model.parameters(), outside):
        assert_same(p.data, torch.full(p.shape, 1 - taken * 2.0**-10))


def test_after_an_overflow_no_step_and_no_scaled_gradient():
    net, (x, y) = tiny_net(), tiny_batch()
    before = copy.deepcopy(net.state_dict())
    scaler = LayerwiseGradientScaler(net, {"linear": 2.0**10, "conv": 2.0**5})
    opt = SGD(net.parameters(), lr=1.0)
    for bad in (True, False):
        scaler.scale()
        opt.zero_grad()
        (F.cross_entropy(net(x), y) * (math.inf if bad else 1)).backward()
        assert scaler.unscale() is not bad and scaler.step(opt) is not bad
        if bad:
            names = [k for k, p in net.named_parameters()]
            assert_same([net.state_dict()[k] for k in names], [before[k] for k in names])
    assert [i.scaling_factor for i in scaler.get_layer_info() if i.scale_layer] == [16.0, 512.0]
    plain = tiny_net()
    plain.norm.running_mean.zero_()
    F.cross_entropy(plain(x), y).backward()
    assert_same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])


def test_a_layer_without_parameters_overflows_by_itself():
    model = nn.Sequential(lin(), nn.Identity(), nn.AvgPool1d(1), nn.Flatten(0))
    scaler = LayerwiseGradientScaler(model, {"2": 2.0**100, "3": 2.0**127, "0": 1.0})
    opt = SGD(model.parameters(), lr=1.0)
    scaler.scale()
    (model(torch.randn(5, 4)) * 2.0**5).sum().backward()
    assert not scaler.unscale() and not scaler.step(opt)
    scales = {i.layer_name: i.scaling_factor for i in scaler.get_layer_info() if i.scale_layer}
    assert scales == {"0": 0.5, "2": 2.0**99, "3": 2.0**126}


def test_several_optimizers_step_once_each():
    model, scaler = one_weight(growth_interval=1)
    opts = [SGD(m.parameters(), lr=1.0) for m in model.values()]
    scaler.scale()
    sum(m(torch.ones(1, 1)) for m in model.values()).sum().backward()
    scaler.unscale()
    assert [scaler.step(opt) for opt in opts] == [True, True]
    assert [i.scaling_factor for i in scaler.get_layer_info()] == [32.0, 6.0]  # grown once
    with pytest.raises(MixedPrecisionError, match="twice for one optimizer"):
        scaler.step(opts[1])


def test_an_empty_dict_is_a_plain_step():
    model = lin()
    scaler, opt = LayerwiseGradientScaler(model, {}), SGD(model.parameters(), lr=1.0)
    scaler.scale()
    assert scaler.get_backward_hooks() == [] == hooks_of(model)
    (model(torch.ones(1, 4)) * math.inf).sum().backward()
    assert scaler.unscale() and scaler.step(opt)
    assert not model.weight.isfinite().all()
    assert [i.scale_layer for i in scaler.get_layer_info()] == []


@pytest.mark.parametrize("where", ["forward", "interrupt", "backward", "unscale", "step"])
def test_no_hook_is_left_and_the_next_iteration_is_right(where, monkeypatch):
    class Fails(nn.Module):
        error = None

        def forward(self, x):
            if self.error is not None:
                raise self.error
            return x * 1.0

    model, x = nn.Sequential(lin(), nn.Sequential(lin(), Fails()), lin()), torch.randn(5, 4)
    plain = [g for g in grads(model, x).values()]
    scaler = LayerwiseGradientScaler(model, {"0": 8.0, "1.0": 2.0**10, "1": 2.0})
    opt = SGD(model.parameters(), lr=0.0)
    n = len(scaler.scale() or scaler.get_backward_hooks())
    assert n == len(hooks_of(model)) == 2 * 5  # all but the last layer, which stands outside
    with pytest.raises((ZeroDivisionError, KeyboardInterrupt)), monkeypatch.context() as patch:
        errors = dict(forward=ZeroDivisionError(), interrupt=KeyboardInterrupt())
        patch.setattr(Fails, "error", errors.get(where))
        out = model(x)
        if where == "backward":
            out.register_hook(lambda g: 1 / 0)
        total(out).backward()
        if where == "unscale":
            fail_in_check(patch)
        scaler.unscale()
        patch.setattr(opt, "step", lambda: 1 / 0)
        scaler.step(opt)
    if where in ("unscale", "step"):
        assert not hooks_of(model)
    scaler.scale()
    assert len(hooks_of(model)) == n
    model.zero_grad()
    total(model(x)).backward()
    scaler.unscale()
    assert_same([p.grad for p in model.parameters()], plain)
    assert not hooks_of(model) and scaler.get_backward_hooks() == []


def test_the_device_is_read_once_a_step(monkeypatch):
    reads, read = [], torch.Tensor.tolist
    for name in ("tolist", "item", "__bool__", "__float__", "cpu"):
        was = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda t, was=was, name=name: reads.append(name) or was(t)
        )
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(20)])
    scaler = LayerwiseGradientScaler(model, {n: 2.0 for n, _ in model.named_modules()})
    opt = SGD(model.parameters(), lr=0.1, foreach=True)
    for _ in range(3):
        reads.clear()
        scaler.scale()
        model(torch.ones(1, 2)).sum().backward()
        scaler.unscale()
        assert reads == ["tolist"]
        scaler.step(opt)
        assert reads == ["tolist"]
    assert read is not torch.Tensor.tolist


def test_a_border_is_only_where_the_scale_changes():
    """Neighbours of one scale cost nothing: no node between them has a hook."""
    model, x = nn.Sequential(*[lin() for _ in range(6)]), torch.randn(2, 4, requires_grad=True)
    calls = []
    for scales in ({str(i): 8.0 for i in range(6)}, {str(i): 2.0**i for i in range(6)}):
        scaler = LayerwiseGradientScaler(model, scales)
        borders = watch_borders(scaler)
        scaler.scale()
        model(x)
        scaler.unscale()
        calls.append(sum(b is not None for b in borders))
    # both: 12 parameters less those of the layer at scale 1; inner borders only where it changes
    assert calls == [12 + 1, 10 + 5]


# state


def test_saved_loaded_and_continued_is_uninterrupted():
    def run(scaler, model, values):
        for value in values:
            scaler.scale()
            model.zero_grad()
            model["a"](torch.tensor([[value]])).sum().backward()
            scaler.unscale()
            scaler.step(SGD(model.parameters(), lr=0.0))

    values = [1.0, 1.0, math.inf, 1.0, 1.0, 1.0, math.nan, 1.0, 1.0]
    model, unbroken = one_weight(growth_interval=2)
    run(unbroken, model, values)
    for cut in range(len(values)):
        model, first = one_weight(growth_interval=2)
        run(first, model, values[:cut])
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        model, second = one_weight(growth_interval=2)
        second.load_state_dict(torch.load(file, weights_only=True))
        run(second, model, values[cut:])
        assert second.state_dict() == unbroken.state_dict()
    other = LayerwiseGradientScaler(model, {"a": 1.0})
    with pytest.raises(ValueError, match="expected the same layers"):
        other.load_state_dict(unbroken.state_dict())
    assert other.state_dict()["scales"] == {"a": 1.0}


# automatic scales


class Shrinks(nn.Module):
    """Hands down a gradient 2**6 times smaller; what goes up keeps its size."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16, bias=False)
        self.fc.weight.data = torch.randn(16, 16) * 2.0**-8
        self.half()
        self.fc.weight.grad_dtype = torch.float32

    def forward(self, x):
        x = self.fc(x)
        return x + (x * (2.0**6 - 1)).detach()


def test_automatic_scales_reach_down_where_no_loss_scale_does():
    model, x = nn.Sequential(*[Shrinks() for _ in range(8)]), torch.randn(8, 16).half()
    opt = SGD(model.parameters(), lr=0.0)
    loss = 2.0**8  # the largest loss scale that the last layer takes with some room
    exact = copy.deepcopy(model)
    for p in exact.parameters():
        p.grad_dtype = None
    exact.double()
    (exact(x.double()).sum() * loss).backward()
    shares = {}
    for auto in (False, True):
        scaler = LayerwiseGradientScaler(model, {}, auto=auto)
        for _ in range(5):
            scaler.scale()
            opt.zero_grad()
            (model(x).float().sum() * loss).backward()
            scaler.unscale()
            scaler.step(opt)
        shares[auto] = [(p.grad == 0).float().mean().item() for p in model.parameters()]
    assert shares[False][0] == 1 and shares[False][-1] == 0
    assert max(shares[True]) == 0
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        error = (p.grad.double() - q.grad).norm() / q.grad.norm()
        assert error < 2e-2
    scales = [i.scaling_factor for i in scaler.get_layer_info() if "fc" in i.layer_name]
    assert all(math.log2(s) == round(math.log2(s)) for s in scales)
    assert scales == sorted(scales, reverse=True) and scales[0] > 2.0**30 * scales[-1]
    assert scaler.state_dict()["auto_steps_left"] == 0


def test_automatic_scales_of_an_ordinary_net_leave_its_gradients_alone():
    net, (x, y) = tiny_net(), tiny_batch()
    plain = copy.deepcopy(net)
    scaler = LayerwiseGradientScaler(net, auto=True, auto_steps=2)
    opts = [SGD(m.parameters(), lr=0.1) for m in (net, plain)]
    for _ in range(4):
        scaler.scale()
        for m, opt in zip((net, plain), opts, strict=True):
            opt.zero_grad()
            F.cross_entropy(m(x), y).backward()
        scaler.unscale()
        scaler.step(opts[0])
        opts[1].step()
    assert_same(net.state_dict(), plain.state_dict())
    assert len({i.scaling_factor for i in scaler.get_layer_info()}) > 1


def test_each_step_of_the_search_looks_at_its_own_gradients():
    """A first loss that is far larger than the next ones leaves no trace in the scales."""
    found = []
    for losses in ([1.0], [2.0**12, 1.0]):
        net, (x, y) = tiny_net(), tiny_batch()
        scaler = LayerwiseGradientScaler(net, auto=True, auto_steps=len(losses))
        opt = SGD(net.parameters(), lr=0.0)
        for factor in losses:
            scaler.scale()
            opt.zero_grad()
            (factor * F.cross_entropy(net(x), y)).backward()
            scaler.unscale()
            scaler.step(opt)
        found.append(scaler.layer_scales)
    assert found[0] == found[1]


counts = st.dictionaries(st.integers(-149, 127), st.integers(1, 10**6), min_size=1)
dtypes = st.sampled_from([torch.float16, torch.bfloat16])


@given(counts, dtypes, st.integers(0, 8))
def test_the_fitting_exponent_leaves_room_and_loses_no_more_than_it_must(counts, dtype, headroom):
    k = fitting_exponent(counts, dtype, headroom)
    top, bottom = (15, -14) if dtype == torch.float16 else (127, -126)
    assert max(counts) + k <= top - headroom
    small = sum(n for e, n in counts.items() if e + k < bottom)
    higher = sum(n for e, n in counts.items() if e + k + 1 < bottom)
    if max(counts) + k + 1 <= top - headroom:  # there was room to go higher: no need
        assert small <= 1e-3 * sum(counts.values()) and higher <= small


# bad input

BAD = [
    (dict(layer_scale_dict={"blocks.0": 2.0}), ValueError, "such as \\['block.0'"),
    (dict(layer_scale_dict={"zzz": 2.0}), ValueError, "no module: expected a name"),
    (dict(layer_scale_dict={"stem": 0}), ValueError, "the scale of 'stem' is 0: expected a finite"),
    (dict(layer_scale_dict={"stem": -1.0}), ValueError, "expected a finite number above 0"),
    (dict(layer_scale_dict={"stem": math.inf}), ValueError, "expected a finite number above 0"),
    (dict(layer_scale_dict={"stem": math.nan}), ValueError, "expected a finite number above 0"),
    (dict(layer_scale_dict={"stem": "high"}), TypeError, "expected a number above 0"),
    (dict(layer_scale_dict={"stem": True}), TypeError, "expected a number above 0"),
    (dict(layer_scale_dict=["stem"]), TypeError, "a list: expected a dict"),
    (dict(layer_scale_dict={"stem": 8.0}, max_scale=4.0), ValueError, "is 8: expected one within"),
    (dict(growth_factor=1.0), ValueError, "`growth_factor` is 1.0: expected a number above 1"),
    (dict(backoff_factor=1.0), ValueError, "`backoff_factor` is 1.0: expected a number below 1"),
    (dict(backoff_factor=0.0), ValueError, "`backoff_factor` is 0.0: expected a finite number ab"),
    (dict(growth_interval=0), ValueError, "`growth_interval` is 0: expected a whole number"),
    (dict(auto=True, auto_steps=0), ValueError, "`auto_steps` is 0"),
    (dict(min_scale=4.0, max_scale=2.0), ValueError, "`min_scale` is 4, above `max_scale`, 2"),
    (dict(dtype=torch.int8), TypeError, "dtype must be one of"),
]


@pytest.mark.parametrize("kwargs, error, message", BAD, ids=[m for _, _, m in BAD])
def test_bad_settings_are_told_and_change_nothing(kwargs, error, message):
    model = Residual()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        LayerwiseGradientScaler(model, **{"layer_scale_dict": {"stem": 2.0}, **kwargs})
    assert not hooks_of(model)
    assert_same(model.state_dict(), before)


def test_another_name_of_a_module_is_told_by_its_first():
    model = nn.ModuleDict({"a": (shared := lin()), "b": shared})
    with pytest.raises(ValueError, match="'b', which is the same module as 'a': expected that"):
        LayerwiseGradientScaler(model, {"b": 2.0})


def test_the_wrong_order_is_told():
    model = lin()
    scaler, opt = LayerwiseGradientScaler(model, {"": 2.0}), SGD(model.parameters(), lr=1.0)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):  # at first, and after an iteration
        with pytest.raises(MixedPrecisionError, match=r"unscale\(\) before scale\(\)"):
            scaler.unscale()
        scaler.scale()
        with pytest.raises(MixedPrecisionError, match=r"step\(\) before unscale\(\)"):
            scaler.step(opt)
        scaler.unscale()
        assert not hooks_of(model)
    assert_same(model.state_dict(), before)


finite = st.sampled_from([0.0, 1.0, -65504.0, 2.0**-24])
any_value = st.sampled_from([math.inf, -math.inf, math.nan]) | finite
kinds = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


@given(st.lists(st.tuples(kinds, st.lists(any_value, max_size=4), st.booleans()), max_size=6))
def test_finite_is_what_python_says(many):
    tensors = [torch.tensor(v, dtype=d) for d, v, _ in many]
    packed = [t.to_sparse() if s else t for t, (_, _, s) in zip(tensors, many, strict=True)]
    assert are_finite(packed) == [all(map(math.isfinite, v)) for _, v, _ in many]


def test_an_optimizer_that_can_undo_a_step_is_told_of_one_that_is_skipped():
    """As `LossScaler` does: running statistics that the forward pass poisoned go back."""

    class Undoes(SGD):
        undone = 0

        def skip(self):
            self.undone += 1

    model = nn.Sequential(nn.Linear(2, 2))
    opt, scaler = Undoes(model.parameters(), lr=1.0), LayerwiseGradientScaler(model, {"0": 2.0})
    for value, undone in ((1.0, 0), (math.inf, 1)):
        scaler.scale()
        (model(torch.ones(1, 2)).sum() * value).backward()
        scaler.unscale()
        scaler.step(opt)
        assert opt.undone == undone
        opt.zero_grad()


@pytest.mark.parametrize(
    "kwargs", [{}, {"flat_master": True}, {"flat_master": True, "stream": True}]
)
def test_what_one_scale_flushes_arrives_in_masters(kwargs):
    """Gradients leave their layer in 32 bits, or dividing by its scale would flush them again."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    model, opt = with_masters(model, SGD(model.parameters(), lr=1.0), **kwargs)
    exact = copy.deepcopy(opt.float_model()).double()
    for p, q in zip(exact.parameters(), model.parameters(), strict=True):
        p.data.copy_(q)
    x = torch.randn(3, 4).half()
    (exact(x.double()) * 2.0**-26).sum().backward()
    scaler = LayerwiseGradientScaler(model, {"0": 2.0**12, "1": 2.0**14})
    errors = []
    for scaled in (False, True):
        opt.zero_grad()
        if scaled:
            scaler.scale()
        (model(x).float() * 2.0**-26 * 2.0**4).sum().backward()
        assert not scaled or scaler.unscale()
        errors.append(
            max(
                ((p.grad / 2.0**4 - q.grad).norm() / q.grad.norm()).item()
                for p, q in zip(model.parameters(), exact.parameters(), strict=True)
            )
        )
    assert errors[0] > 0.02 and errors[1] < 0.002
