"""Faults of the loss scale and of scales for layers: each test failed before it was mended."""

import copy
import math
import pickle
import random
import subprocess
import sys
import textwrap
import threading

import inside
import numpy as np
import pytest
import torch
from fastai.basics import DataLoaders, Learner
from fastai.optimizer import SGD as FastaiSGD
from torch import nn
from torch.amp import GradScaler

from mixedfp.callback import MixedPrecision
from mixedfp.formats import MixedPrecisionError
from mixedfp.layerwise import LayerwiseGradientScaler
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.step import MixedStep
from mixedfp.testing import assert_same


def weight(n=2, **kwargs):
    """Return a parameter and an optimizer that takes the gradient off it."""
    w = nn.Parameter(torch.zeros(n))
    return w, torch.optim.SGD([w], lr=1.0, **kwargs)


# The loss scale: gradients of one scale meet those of another


def test_5_scaler_late_unscaling_meets_the_next_scale():
    (w1, o1), (w2, o2) = weight(), weight()
    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(w1.sum() + w2.sum()).backward()
    scaler.step(o1)
    scaler.update()
    assert scaler.get_scale() == 16.0
    scaler.unscale_(o2)
    o1.zero_grad()
    scaler.scale(w1.sum() + w2.sum()).backward()
    scaler.unscale_(o2)
    assert_same(w2.grad, torch.full((2,), 2.0))
    scaler.step(o2)
    assert_same(w2.detach(), torch.full((2,), -2.0))


def test_5_scaler_gradients_left_over_an_update():
    (w1, o1), (w2, o2) = weight(), weight()
    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(w1.sum() + w2.sum()).backward()
    for o in (o1, o2):
        scaler.step(o)
        o.zero_grad()
    scaler.update()
    for _ in range(3):  # `o2` steps for three batches together, `o1` for each
        scaler.scale(w1.sum() + w2.sum()).backward()
        scaler.step(o1)
        o1.zero_grad()
        scaler.update()
    scaler.scale(w2.sum()).backward()
    scaler.unscale_(o2)
    assert_same(w2.grad, torch.full((2,), 4.0))


@pytest.mark.parametrize("how", ["step", "unscale_"])
def test_5_scaler_true_gradients_are_added_to(how):
    w, o = weight()
    scaler = LossScaler("cpu", init_scale=8.0)
    scaler.scale(w.sum()).backward()
    getattr(scaler, how)(o)
    scaler.update()
    scaler.scale(w.sum()).backward()  # nothing was cleared
    scaler.unscale_(o)
    assert_same(w.grad, torch.full((2,), 2.0))


def test_5_scaler_unscaled_before_anothers_update():
    (w1, o1), (w2, o2) = weight(), weight()
    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(w1.sum() + w2.sum()).backward()
    for o in (o1, o2):
        scaler.unscale_(o)
    for o in (o1, o2):
        scaler.step(o)
        scaler.update()
    assert_same(w2.detach(), torch.full((2,), -1.0))


def test_5_scaler_a_closure_that_clears_nothing():
    def trained(scaled, scaler=None):
        w, o = weight()

        def closure():
            loss = (w * w).sum() + w.sum()
            scaled(loss).backward()
            return loss

        for _ in range(3):
            o.step(closure) if scaler is None else scaler.step(o, closure)
            if scaler is not None:
                scaler.update()
        return w.detach()

    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=1)
    assert_same(trained(scaler.scale, scaler), trained(lambda loss: loss))


def test_5_scaler_loaded_in_the_middle_of_an_iteration():
    w, o = weight()
    scaler = LossScaler("cpu", init_scale=8.0)
    state = {**scaler.state_dict(), "scale": 64.0}
    scaler.scale(w.sum()).backward()
    scaler.load_state_dict(state)
    scaler.step(o)
    assert_same(w.detach(), torch.full((2,), -1.0))
    scaler.update()
    assert scaler.get_scale() == 64.0


def test_5_scaler_one_scale_from_the_first_loss_of_an_iteration_to_update():
    (w1, o1), (w2, o2) = weight(), weight()
    scaler = LossScaler("cpu", init_scale=8.0)
    state = {**scaler.state_dict(), "scale": 64.0}
    assert scaler.used_scale == 1.0 and not scaler.is_checked(o1)
    scaler.scale(w1.sum() + w2.sum()).backward()
    scaler.unscale_(o1)
    scaler.load_state_dict(state)
    assert scaler.is_checked(o1) and not scaler.is_checked(o2)
    scaled = scaler.scale([w1.sum(), w2.sum()])
    assert scaler.used_scale == 8.0 and not scaler.is_checked(o1)  # it is added to
    sum(scaled).backward()
    for w, o in ((w1, o1), (w2, o2)):
        scaler.step(o)
        assert_same(w.detach(), torch.full((2,), -2.0))
        o.zero_grad()
    scaler.update()
    assert scaler.get_scale() == 64.0 and scaler.used_scale == 8.0 and not scaler.is_checked(o2)
    assert scaler.scale(torch.ones(())) == scaler.used_scale == 64.0
    scaler.step(o1)
    scaler.update()
    assert scaler.scales == [8.0, 64.0]


def test_5_scaler_a_loss_after_a_step_is_unscaled_once_however_late_it_is_stepped():
    w, o = weight()
    scaler = LossScaler("cpu", init_scale=8.0)
    scaler.scale(w.sum()).backward()
    scaler.step(o)
    o.zero_grad()
    scaler.scale(w.sum()).backward()
    scaler.update()
    scaler.unscale_(o)
    scaler.update(64.0)
    scaler.step(o)  # its gradient is the true one since `unscale_`
    assert_same(w.detach(), torch.full((2,), -2.0))


def test_5_scaler_an_update_by_hand_before_the_first_step_is_no_step():
    w, o = weight()
    scaler = LossScaler("cpu", init_scale=8.0)
    (scaler.scale(w.sum()) * math.inf).backward()
    scaler.update(64.0)
    assert scaler.step(o) is False
    scaler.update()
    assert scaler.skipped == [0] and scaler.record.n_steps == 1 and scaler.get_scale() == 32.0


def test_5_step_an_update_by_hand_between_two_losses_that_are_added():
    mixed, model = MixedStep(torch.float32, scaler=LossScaler(init_scale=8.0)), nn.Linear(2, 1)
    weight = model.weight.detach().clone()
    mixed.attach(model)
    opt = mixed.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    for i in range(3):
        mixed.scale(model(torch.ones(1, 2)).sum()).backward()
        if i == 0:
            mixed.scaler.update(64.0)
        elif i == 1:
            mixed.scaler.load_state_dict({**mixed.scaler.state_dict(), "scale": 2.0})
    mixed.scaler.update(4.0)
    assert mixed.unscale()
    assert_same(model.weight.grad, torch.full((1, 2), 3.0))
    mixed.step()
    mixed.update()
    opt.zero_grad()
    mixed.scale(model(torch.ones(1, 2)).sum()).backward()
    mixed.scaler.update(16.0)
    mixed.detach()  # called off
    assert_same(model.weight.grad, torch.ones(1, 2))
    assert_same(model.weight.detach(), weight - 3)


def test_5_scaler_set_by_hand_in_the_middle_of_a_batch():
    def fit(cbs):
        torch.manual_seed(0)
        x, y = torch.randn(8, 4), torch.randn(8, 2)
        dls = DataLoaders([(x, y)] * 3, [(x, y)])
        learn = Learner(dls, nn.Linear(4, 2), nn.MSELoss(), FastaiSGD, lr=0.1, cbs=cbs)
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
        return {k: v.float() for k, v in learn.model.state_dict().items()}

    class SetsScale(MixedPrecision):
        def after_backward(self):
            super().after_backward()
            self.mixed.scaler.update(float(self.mixed.scaler.get_scale() * 4))

    assert_same(fit(SetsScale(8.0)), fit(MixedPrecision(8.0)))


def run_program(seed, scaler=None, fused=False):
    """Do random things with two optimizers, in a random order; return what their weights became.

    Where there is no scaler it does the same without, which says what is right.
    """
    rng = random.Random(seed)
    pairs = [weight(), weight(fused=True) if fused else weight()]
    scale = (lambda loss: loss) if scaler is None else scaler.scale
    seen, fresh, stepped, n_checked = [], [False] * 2, [False] * 2, 0

    def backward():
        factors = [rng.randrange(1, 4), rng.randrange(1, 4)]
        scale(sum(k * w.sum() for k, (w, _) in zip(factors, pairs, strict=True))).backward()
        fresh[:] = [True] * 2

    def unscale(i):
        if scaler is not None:
            scaler.unscale_(pairs[i][1])
        seen.append(pairs[i][0].grad.clone())

    def step(i):
        pairs[i][1].step() if scaler is None else scaler.step(pairs[i][1])
        seen.append(pairs[i][0].detach().clone())
        fresh[i], stepped[i] = False, True

    def update():
        if scaler is not None:
            scaler.update(rng.choice(SCALES)) if rng.random() < 0.2 else scaler.update()
        else:
            rng.random() < 0.2 and rng.choice(SCALES)
        stepped[:] = [False] * 2

    backward()  # the scaler gets to know both
    for i in (0, 1):
        step(i)
        pairs[i][1].zero_grad()
    update()
    for _ in range(40):
        what, i = rng.choice("bbbusssoz"), rng.randrange(2)
        if what == "b":
            backward()
            n_checked = 0 if not any(stepped) else n_checked
        elif what == "u" and fresh[i] and not stepped[i]:
            unscale(i)
        elif what == "s" and fresh[i] and not stepped[i]:
            step(i)
            n_checked += 1
        elif what == "o" and any(stepped):
            update()
            n_checked = 0
        elif what == "z":
            pairs[i][1].zero_grad()
            fresh[i] = False
    return seen + [w.detach() for w, _ in pairs]


SCALES = [2.0, 8.0, 2.0**10]


@pytest.mark.parametrize("fused", [False, True])
def test_5_scaler_any_order_has_the_true_gradients(fused):
    for seed in range(40):
        scaler = LossScaler("cpu", 8.0, growth_interval=2)
        ours, true = run_program(seed, scaler, fused), run_program(seed, None, fused)
        assert_same(ours, true, name=f"seed {seed}")


def test_5_scaler_late_overflow_ends_the_growth_count():
    (w1, o1), (w2, o2) = weight(), weight()
    scaler = LossScaler("cpu", init_scale=64.0, growth_interval=3)
    rule = 2.0, 0.5, 3  # the same kernel, told of a whole iteration at once
    scale, count = torch.tensor(64.0), torch.tensor(0, dtype=torch.int32)
    for i in range(9):
        scaler.scale(w1.sum() + w2.sum()).backward()
        if i == 1:
            w2.grad.fill_(math.inf)
        for o in (o1, o2):
            scaler.step(o)
            scaler.update()
            o.zero_grad()
        torch._amp_update_scale_(scale, count, torch.tensor(float(i == 1)), *rule)
        assert scaler.get_scale() == scaler.record.scale == scale.item(), i
        assert scaler._get_growth_tracker() == count.item(), i
    assert scaler.skipped == [1] and scale.item() == 128.0


# The scale's settings


def test_4_numpy_integers_are_numbers_of_steps():
    kwargs = dict(growth_interval=np.int64(8), max_skips=np.int32(5))
    scaler = LossScaler("cpu", **kwargs)
    assert type(scaler.get_growth_interval()) is int and scaler.get_growth_interval() == 8
    LayerwiseGradientScaler(nn.Linear(2, 2), growth_interval=np.int64(8), auto_steps=np.int64(2))
    scaler.set_growth_interval(np.int64(9))
    assert type(scaler.state_dict()["growth_interval"]) is int


@pytest.mark.parametrize(
    ("verb", "value"),
    [
        ("set_growth_factor", 0.5),
        ("set_growth_factor", math.nan),
        ("set_backoff_factor", 2.0),
        ("set_backoff_factor", -1.0),
        ("set_growth_interval", 0),
    ],
)
def test_4_settings_are_checked_whenever_they_are_set(verb, value):
    scaler = LossScaler("cpu")
    before = scaler.state_dict()
    with pytest.raises(ValueError, match="expected a"):
        getattr(scaler, verb)(value)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("how", ["load", "hand", "hand, tensor"])
@pytest.mark.parametrize(("scale", "expected"), [(2.0**30, 2.0**24), (2.0**-4, 1.0)])
def test_4_a_scale_from_outside_is_within_the_bounds_at_once(how, scale, expected):
    w, o = weight()
    scaler = LossScaler("cpu")
    scaler.scale(w.sum()).backward()
    scaler.step(o)
    if how == "load":
        scaler.update()
        scaler.load_state_dict(GradScaler("cpu", scale).state_dict())
    else:
        scaler.update(scale if how == "hand" else torch.tensor(scale))
    assert scaler.get_scale() == scaler.record.scale == expected


@pytest.mark.parametrize(
    ("name", "value"), [("scale", math.nan), ("scale", 0.0), ("growth_factor", 0.5)]
)
def test_4_a_state_without_sense_is_refused(name, value):
    scaler = LossScaler("cpu")
    before = scaler.state_dict()
    with pytest.raises(ValueError, match="expected a"):
        scaler.load_state_dict({**before, name: value})
    assert scaler.state_dict() == before


# A machine with an accelerator, a model on the CPU


def on_a_machine_with_an_accelerator(source):
    """Run `source` in a process that takes itself for one with an accelerator."""
    said = """
    import torch
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch.amp.grad_scaler.torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    """
    source = textwrap.dedent(said) + textwrap.dedent(source)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_1_03_a_model_on_the_cpu_of_a_machine_with_an_accelerator():
    on_a_machine_with_an_accelerator("""
    from mixedfp.scaler import LossScaler
    from mixedfp.step import MixedStep

    w = torch.nn.Parameter(torch.zeros(2))
    opt = torch.optim.SGD([w], lr=1.0)
    scaler = LossScaler(init_scale=8.0)
    scaler.scale(w.sum()).backward()
    scaler.step(opt)
    scaler.update()
    assert w.tolist() == [-1, -1] and scaler.used_scale.device.type == "cpu"

    model = torch.nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.bias.detach().clone()
    mixed = MixedStep()
    mixed.attach(model)
    held = mixed.wrap_optimizer(opt)
    loss = mixed.uncast(model(mixed.cast(torch.ones(3, 2), training=True))).sum() / 64
    mixed.scale(loss).backward()
    assert mixed.unscale()
    mixed.step()
    mixed.update()
    mixed.detach()
    assert torch.equal(model.bias, before - 3 / 64)
    """)


def test_1_03_a_learner_on_the_cpu_of_a_machine_with_an_accelerator():
    on_a_machine_with_an_accelerator("""
    from fastai.basics import DataLoaders, Learner, SGD
    import mixedfp.callback

    x, y = torch.ones(3, 2), torch.ones(3, 1)
    dls = DataLoaders([(x, y)], [(x, y)])
    learn = Learner(dls, torch.nn.Linear(2, 1), torch.nn.MSELoss(), SGD, lr=0.1).to_fp16()
    before = learn.model.weight.detach().clone()
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    assert not torch.equal(before, learn.model.weight)
    """)


# A verdict of the device


@pytest.fixture
def small_is_large(monkeypatch):
    """Have vectors of any size take the pass that large ones take."""
    inside.everything_is_large(monkeypatch)


def one_vector():
    """Return a step on flat masters whose skips the device alone decides on, and its model."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2, bias=False)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    mixed = MixedStep(torch.float16, flat_master=True, scaler=LossScaler("cpu", init_scale=4.0))
    mixed.attach(model)
    mixed.wrap_optimizer(opt)
    inside.be_exclusive(mixed)
    inside.decide_on_device(mixed)
    return mixed, model


def backward(mixed, model, factor=1.0):
    """Do a batch's forward and backward pass, and unscale."""
    out = mixed.uncast(model(mixed.cast(torch.ones(1, 4), training=True)))
    mixed.scale(factor * out.sum()).backward()
    return mixed.unscale()


def test_2_04_a_verdict_belongs_to_one_iteration(small_is_large):
    mixed, model = one_vector()
    before = inside.masters_by_param(mixed)[model.weight].detach().clone()
    assert backward(mixed, model, math.inf)  # the device alone knows better
    mixed.step()
    mixed.update()
    assert_same(inside.masters_by_param(mixed)[model.weight].detach(), before)
    model.weight.grad.zero_()  # by hand, no zero_grad
    inside.be_exclusive(mixed, False)
    assert backward(mixed, model)
    mixed.step()
    mixed.update()
    assert_same(inside.masters_by_param(mixed)[model.weight].detach(), before - 1)
    assert mixed.scaler.skipped == [0]


def test_2_04_a_step_that_is_called_off_leaves_no_verdict(small_is_large):
    mixed, model = one_vector()
    before = inside.masters_by_param(mixed)[model.weight].detach().clone()
    assert backward(mixed, model, math.inf)
    model.weight.grad.zero_()
    inside.be_exclusive(mixed, False)
    assert backward(mixed, model)
    mixed.step()
    assert_same(inside.masters_by_param(mixed)[model.weight].detach(), before - 1)


def test_2_04_buffers_of_a_learner_follow_the_verdict_of_the_device(small_is_large):
    """A Learner calls the optimizer's own step: running statistics go back all the same."""

    def fit(on_device):
        torch.manual_seed(0)
        x, y = torch.randn(8, 4), torch.randn(8, 2)
        dls = DataLoaders([(x, y), (x, math.inf * y), (x, y)], [(x, y)])
        net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
        learn = Learner(dls, net, nn.MSELoss(), FastaiSGD, lr=0.1)
        learn.to_fp16(8.0, flat_master=True)
        inside.decide_on_device(learn.mp_cb.mixed, on_device)
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
        assert learn.mp_cb.skipped == [1]
        return learn.to_fp32().model.state_dict()

    assert_same(dict(fit(True)), dict(fit(False)))


# Scales for layers


class Net(nn.Module):
    """Two layers with something between them that differs from test to test."""

    def __init__(self, between=None):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.act, self.relu = nn.Tanh(), nn.ReLU(inplace=True)
        self.between = between

    def forward(self, x):
        """Return the output; what `between` does may be anything."""
        h = self.a(x)
        return self.b(self.act(h) if self.between is None else self.between(self, h))


SCALES_OF = {"a": 2.0**6, "b": 2.0**3, "act": 2.0**-4, "relu": 2.0**5}


def layer_gradients(make_loss, scales=SCALES_OF, net=None, n=1, **kwargs):
    """Return the gradients of `make_loss(net, x)` under scales of layers, and the plain ones."""
    net = Net() if net is None else net
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    grads = []
    for own in (scales, {}):
        layers = LayerwiseGradientScaler(net, own, **kwargs)
        for _ in range(n):
            net.zero_grad()
            layers.scale()
            make_loss(net, x).backward()
            assert layers.unscale()
            layers.update()
        grads.append([p.grad for p in net.parameters()])
    return grads


def in_a_thread(f):
    """Return what `f()` returns in a thread of its own."""
    result = []

    def run():
        with torch.enable_grad():
            try:
                result.append(f())
            except Exception as e:
                result.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(result[0], Exception):
        raise result[0]
    return result[0]


def test_2_12_a_layer_that_is_run_in_a_second_thread():
    net = Net(lambda net, h: in_a_thread(lambda: net.act(h)))
    layers = LayerwiseGradientScaler(net, SCALES_OF)
    layers.scale()
    with pytest.raises(MixedPrecisionError, match="'act' is called in a thread of its own"):
        net(torch.ones(2, 4))
    layers.remove()
    net(torch.ones(2, 4)).sum().backward()


def test_2_12_layers_called_by_hand_in_several_threads():
    """Each thread numbers its nodes from 0: the numbers meet, the gradients are right."""

    def make_loss(net, x):
        h = net.a(x) * 1.0
        number = h.grad_fn._sequence_nr()

        def second():
            y = x.clone().requires_grad_()
            while torch.autograd._get_sequence_nr() < number:
                y * 1.0
            assert net.act(y).grad_fn is not None  # its node has the number of another's
            return net.act(h)

        return net.b(in_a_thread(second) + h).pow(2).sum()

    # the first one is new as well: in this one the numbers are high after other tests
    assert_same(*in_a_thread(lambda: layer_gradients(make_loss)))


def test_2_12_forward_passes_of_the_model_in_two_threads():
    def make_loss(net, x):
        other = in_a_thread(lambda: net(x + 1))
        return net(x).sum() + (other * other).sum()

    assert_same(*layer_gradients(make_loss))


def relu_in_place(net, h):
    """Call the layer for what it writes."""
    net.relu(h)
    return h


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("parent", [False, True])
def test_2_13_a_layer_in_place_whose_return_value_is_dropped(parent, auto):
    net = Net(relu_in_place)

    def make_loss(net, x):
        if parent:
            return net(x).sum() / 2**20
        h = net.a(x)
        net.relu(h)
        return (h.sum() + (h * h).sum()) / 2**20

    ours, true = layer_gradients(make_loss, {} if auto else SCALES_OF, net, 3, auto=auto)
    if auto:  # which scales it finds is its own
        ours, true = ours[:2], true[:2]
    assert_same(ours, true)


def test_2_13_a_view_that_is_written_in_place():
    net = Net()
    layers = LayerwiseGradientScaler(net, SCALES_OF)
    layers.scale()
    part = net.a(torch.ones(2, 4))[:, :2]
    with pytest.raises(MixedPrecisionError, match="'relu' has a scale and writes into a view"):
        net.relu(part)
    net = Net(lambda net, h: net.relu(h.view(-1)).view_as(h) + h)  # inside of the model it is right
    assert_same(*layer_gradients(lambda net, x: net(x).sum(), net=net))


class Auxiliary(Net):
    """Keeps something of its forward pass, in one of the ways that there are."""

    def __init__(self, where):
        super().__init__()
        self.where, self.seen, self.penalties = where, [], {}
        self.block = nn.Sequential(self.a, self.act)
        if where == "hook":
            self.act.register_forward_hook(lambda m, args, out: self.seen.append(out))

    def forward(self, x):
        """Return the output; `aux()` is left behind."""
        h = self.a(x)
        if self.where == "attribute":
            self.kept = h
        elif self.where == "dict":
            self.penalties["a"] = (h * h).mean()
        elif self.where == "buffer":
            self.register_buffer("kept", h, persistent=False)
        out = self.b(self.act(h))
        if self.where == "hook of the model":
            self.kept = out
        return out

    def aux(self):
        """Return the auxiliary loss."""
        if self.where == "hook":
            return self.seen.pop().pow(2).mean()
        return self.penalties["a"] if self.where == "dict" else self.kept.pow(2).mean()


@pytest.mark.parametrize("where", ["attribute", "dict", "buffer", "hook", "hook of the model"])
@pytest.mark.parametrize("auto", [False, True])
def test_2_14_what_is_in_the_loss_and_no_output(where, auto):
    def make_loss(net, x):
        out = net(x)
        return (out.sum() + net.aux()) / 2**20

    ours, true = layer_gradients(
        make_loss, {} if auto else {**SCALES_OF, "block": 2.0**2}, Auxiliary(where), 3, auto=auto
    )
    assert_same(ours, true)


def test_2_14_what_a_loss_alone_knows_of_is_covered_by_scale():
    """Part of what a layer made, in a list of nobody's: the loss scale covers it."""
    feats = []

    class Tells(nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            feats.append(h.chunk(2, -1)[0])
            return h.tanh()

    torch.manual_seed(0)
    net = nn.Sequential(Tells(4, 4), nn.Linear(4, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.0)
    x, grads = torch.randn(8, 4), []
    for layers in (LayerwiseGradientScaler(net, {"0": 2.0**6}), None):
        scaler = LossScaler("cpu", 8.0, layers=layers)
        loss = net(x).sum() + feats[-1].pow(2).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        grads.append([p.grad for p in net.parameters()])
        opt.zero_grad()
        if layers is not None:
            layers.remove()
    assert_same(*grads)


def test_2_15_an_overflow_that_no_parameter_shows_is_nobodys_decision():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.bare, self.linear = nn.Tanh(), nn.Linear(4, 1)

        def forward(self, x):
            return self.linear(x), self.bare(x)

    torch.manual_seed(0)
    net = Net()
    layers = LayerwiseGradientScaler(net, {"bare": 2.0**10, "linear": 2.0**2})
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    x = torch.ones(2, 4, requires_grad=True)
    layers.scale()
    out, other = net(x)
    (out.sum() + (other * 3e38).sum()).backward()
    assert layers.unscale()  # as another process says, whose gradients are the same
    assert layers.step(opt) is True
    assert layers.layer_scales == {"bare": 2.0**9, "linear": 2.0**2}


def test_3_14_transforms_of_the_last_layer():
    net = Net()
    params = dict(net.named_parameters())
    for scales in ({"b": 8.0}, {"a": 8.0}):
        layers = LayerwiseGradientScaler(net, scales)
        layers.scale()
        with pytest.raises(MixedPrecisionError, match="goes through a layer with a scale"):
            torch.func.grad(lambda ps: torch.func.functional_call(net, ps, torch.ones(2, 4)).sum())(
                params
            )
        layers.remove()


def test_3_14_forward_derivatives_through_the_last_layer_are_right():
    from torch.autograd import forward_ad

    net, found = Net(), []
    for scales in ({"b": 8.0, "a": 4.0}, {}):
        layers = LayerwiseGradientScaler(net, scales)
        layers.scale()
        with forward_ad.dual_level():
            x = forward_ad.make_dual(torch.ones(2, 4), torch.full((2, 4), 0.5))
            found.append(forward_ad.unpack_dual(net(x)).tangent)
        layers.remove()
    assert_same(*found)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_4_a_copy_made_in_the_middle_has_no_hooks_that_act(way):
    net = Net()
    layers = LayerwiseGradientScaler(net, SCALES_OF)
    layers.scale()
    loss = net(torch.ones(2, 4)).sum()
    other = way(net)
    n_nodes = inside.n_traced(layers)
    other(torch.ones(2, 4)).sum().backward()
    assert n_nodes == inside.n_traced(layers)
    hooks = [h for m in other.modules() for h in m._forward_hooks.values()]
    assert {h.__name__ for h in hooks} == {"nothing"}
    loss.backward()
    assert layers.unscale()
    assert_same([p.grad for p in net.parameters()], [p.grad for p in other.parameters()])


@pytest.mark.parametrize("auto", [False, True])
def test_4_a_bare_16_bit_model_is_told_where_its_gradients_flush(auto, caplog):
    net = Net().half()
    layers = LayerwiseGradientScaler(net, {} if auto else SCALES_OF, auto=auto)
    for _ in range(2):
        layers.scale()
        layers.remove()
    assert [r.getMessage()[:36] for r in caplog.records] == ["4 parameters of layers with scales h"]
    assert "with_masters" in caplog.text
    caplog.clear()
    net = Net()
    net, _ = with_masters(net, torch.optim.SGD(net.parameters(), lr=1.0))
    LayerwiseGradientScaler(net, SCALES_OF).scale()
    assert not caplog.records


def test_5_layerwise_an_overflow_in_an_unscaled_part_of_a_scaled_container():
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))
    layers = LayerwiseGradientScaler(net, {"0": 2.0**6, "1": 2.0**3})
    layers.scale()
    net(torch.ones(2, 4)).sum().backward()
    net[0][0].weight.grad[0, 0] = math.inf
    assert not layers.unscale()
    layers.update()
    assert layers.layer_scales == {"0": 2.0**5, "1": 2.0**3}


def test_5_layerwise_the_dtype_of_gradients_is_put_back():
    net = Net().bfloat16()
    for p in net.parameters():
        p.grad_dtype = None  # of any dtype, as masters have it
    before = [p.grad_dtype for p in net.parameters()]
    layers = LayerwiseGradientScaler(net, SCALES_OF)
    layers.scale()
    net(torch.ones(2, 4).bfloat16()).sum().backward()
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}
    layers.unscale()
    assert [p.grad_dtype for p in net.parameters()] == before
    assert before == [None] * 4


# Both together


@pytest.mark.parametrize("masters", [False, True])
def test_4_one_verb_leads_both_scales_through_a_loop(masters):
    """Two lines of a loop are as without layers; the numbers are those of the six calls."""

    def train(joint):
        net = Net()
        opt = torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5)
        if masters:
            net, opt = with_masters(net, opt, dtype=torch.bfloat16)
        layers = LayerwiseGradientScaler(net, SCALES_OF, growth_interval=3)
        scaler = LossScaler("cpu", 2.0**6, growth_interval=2, layers=layers if joint else None)
        torch.manual_seed(1)
        for i in range(8):
            x = torch.randn(8, 4)
            if not joint:
                layers.scale()
            loss = net(x.bfloat16() if masters else x).float().pow(2).sum()
            if not joint:
                layers.trace_loss(loss)
            scaler.scale(loss * (math.inf if i == 4 else 1)).backward()
            if not joint:
                layers.unscale()
            scaler.step(opt)
            scaler.update()
            if not joint:
                layers.update()
            opt.zero_grad()
        return scaler.scales, scaler.skipped, layers.layer_scales, dict(net.state_dict())

    assert_same(train(True), train(False))


def test_4_one_state_holds_both_scales():
    net = Net()
    make = lambda: LossScaler("cpu", 8.0, layers=LayerwiseGradientScaler(net, SCALES_OF))  # noqa: E731
    one, other = make(), make()
    one.layers.load_state_dict({**one.layers.state_dict(), "scales": dict.fromkeys(SCALES_OF, 2.0)})
    other.load_state_dict(one.state_dict())
    assert other.layers.layer_scales == dict.fromkeys(SCALES_OF, 2.0)
    GradScaler("cpu").load_state_dict(one.state_dict())
