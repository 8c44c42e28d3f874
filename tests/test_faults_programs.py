"""Faults that random programs have found, each as small as it can be."""

import copy
import math
import pickle
import warnings

import inside
import pytest
import torch
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.training import GradientAccumulation
from tiny import make_learner, weights
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from mixedfp.callback import MixedPrecision
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.step import MixedStep
from mixedfp.testing import assert_same, tiny_batch, tiny_net

WAYS = pytest.mark.parametrize("flat", [None, False, True], ids=["plain", "each", "flat"])


def make(flat, model, opt):
    """Return model and optimizer: plain, with masters, with flat masters."""
    if flat is None:
        return model, opt
    return with_masters(model, opt, dtype=torch.float32, flat_master=flat)


def steps(flat, edit=None, n=3, **kwargs):
    """Train for `n` steps, with `edit(params)` after each backward pass; return the weights."""
    net = tiny_net()
    model, opt = make(flat, net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    x, y = tiny_batch()
    for _ in range(n):
        cross_entropy(model(x), y).backward()
        if edit is not None:
            edit(list(model.parameters()))
        opt.step()
        opt.zero_grad(**kwargs)
    return {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("flat", [False, True])
def test_zeros_for_gradients_that_nobody_has_looked_at(flat):
    """A batch that is thrown away with `zero_grad(set_to_none=False)` leaves no gradient behind."""
    model = nn.Linear(4, 2)
    before = model.bias.detach().clone()
    model, opt = make(flat, model, torch.optim.SGD(model.parameters(), lr=1.0))
    torch.optim.lr_scheduler.StepLR(opt, 2)  # it has looked at the groups, so masters are held
    model(torch.ones(3, 4)).sum().backward()
    opt.zero_grad(set_to_none=False)
    assert_same(model.bias.grad, torch.zeros(2))
    opt.step()
    assert_same(model.state_dict()["bias"], before)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("flat", [False, True])
def test_a_gradient_gets_other_memory(flat, set_to_none):
    """`p.grad.data = x` is stepped, and so are the gradients of the steps after it."""

    def edit(params):
        for p in params[::2]:
            p.grad.data = p.grad.data * 0.5

    expected = steps(None, edit, set_to_none=set_to_none)
    assert_same(steps(flat, edit, set_to_none=set_to_none), expected)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_parameter_without_elements_next_to_one_without_a_gradient(order):
    """What no batch has used is not decayed."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0, 4))
            self.unused = nn.Parameter(torch.ones(4, 4))
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return self.head(x) + self.empty.sum()

    net = Net()
    params = [[net.empty, net.unused][i] for i in order]
    opt = torch.optim.SGD(params, lr=0.5, weight_decay=0.5)
    model, opt = make(True, net, opt)
    model(torch.ones(3, 4)).sum().backward()
    opt.step()
    assert_same(model.state_dict()["unused"], torch.ones(4, 4))


def test_groups_that_are_added_have_the_optimizers_own_settings():
    """`state_dict` is a plain optimizer's, with no setting that it does not have."""

    def groups(wrap):
        model = nn.Linear(4, 2)
        opt = torch.optim.Adafactor([model.weight])
        if wrap:
            model, opt = make(False, model, opt)
        opt.add_param_group({"params": [model.bias]})
        return opt.state_dict()["param_groups"]

    assert_same(groups(True), groups(False))


def test_activations_that_are_computed_again_in_float16():
    """`torch.utils.checkpoint` finds the same dtypes in the second forward pass."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    first = net[0].forward
    net[0].forward = lambda x: checkpoint(first, x, use_reentrant=False)
    model, _ = with_masters(net, torch.optim.SGD(net.parameters(), lr=0.5))
    model(torch.ones(3, 4, dtype=torch.float16)).float().sum().backward()
    assert model[0].weight.grad.abs().sum() > 0


def test_a_buffer_that_the_overflowed_batch_has_made_is_gone():
    """A buffer that was None before a skipped step is None after it, or what it was."""

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("last", None)

        def forward(self, x):
            self.last = x.detach().amax()
            return self.layer(x)

    net = Last()
    model, opt = make(False, net, torch.optim.SGD(net.parameters(), lr=0.5))
    scaler = LossScaler("cpu")
    for factor in (float("inf"), 1.0, float("inf")):
        before = model.last
        scaler.scale(model(torch.randn(3, 4)).sum() * factor).backward()
        if factor == 1.0:
            before = model.last
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert (model.last is None) == (before is None)
        if before is not None:
            assert_same(model.last, before)


@pytest.mark.parametrize("flat", [False, True])
def test_gradients_of_a_fit_before_the_scale_are_added_in_full(flat):
    """What a fit has left over, without a step, counts as much as the batches after it."""
    learns = []
    for wrap in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            learn = make_learner("torch_adamw")
            learn.fit(1, 0.05, cbs=GradientAccumulation(20))  # 32 samples: 8 are left over
            if wrap:
                cb = MixedPrecision(dtype=torch.float32, flat_master=flat)
                cb.mixed.scaler = LossScaler("cpu", init_scale=2.0**12)
                learn.add_cb(cb)
            learn.fit(1, 0.05)
        learns.append(weights(learn))
    assert_same(*learns)


@pytest.mark.parametrize("flat", [False, True])
def test_a_new_optimizer_adds_to_unscaled_gradients(flat):
    """A batch called off after its step leaves true gradients; `reset_opt` does not scale them."""

    class CallOff(Callback):
        order = 60  # after ours

        def after_step(self):
            if self.iter == self.n_iter - 1:
                raise CancelBatchException

    learns = []
    for wrap in (False, True):
        learn = make_learner("sgd")
        if wrap:
            cb = MixedPrecision(dtype=torch.float32, flat_master=flat)
            cb.mixed.scaler = LossScaler("cpu", init_scale=2.0**12)
            learn.add_cb(cb)
        learn.fit(1, 0.05, cbs=CallOff())
        learn.fit(1, 0.05, reset_opt=True)
        learns.append(weights(learn))
    assert_same(*learns)


class Counts(nn.Module):
    """Count the passes; one may raise after that, or call itself, or show no graph."""

    def __init__(self):
        super().__init__()
        self.layer, self.error = nn.Linear(4, 2), None
        self.depth = 0
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, x):
        self.count += 1
        if self.error is not None:
            raise self.error
        if self.depth:
            self.depth -= 1
            self(x)
        return self.layer(x)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_pass_that_raises_is_no_part_of_the_next_iteration(error):
    """A skip restores the buffers from before the pass that has overflowed."""
    net = Counts()
    model, opt = make(False, net, torch.optim.SGD(net.parameters(), lr=0.5))
    scaler, x = LossScaler("cpu"), torch.ones(3, 4)
    model.error = error()
    with pytest.raises(error):
        model(x)
    model.error = None
    before = model.count.clone()
    assert before > 0
    scaler.scale(model(x).sum() * float("inf")).backward()
    scaler.step(opt)
    assert_same(model.count, before)


def test_a_pass_within_a_pass_is_part_of_it():
    """A skip restores the buffers from before the outer pass, also after one that has raised."""
    net = Counts()
    model, opt = make(False, net, torch.optim.SGD(net.parameters(), lr=0.5))
    scaler, x = LossScaler("cpu"), torch.ones(3, 4)
    model.error = ValueError()
    with pytest.raises(ValueError):
        model(x)
    model.error, model.depth = None, 2
    before = model.count.clone()
    scaler.scale(model(x).sum() * float("inf")).backward()
    assert model.count == before + 3
    scaler.step(opt)
    assert_same(model.count, before)


@pytest.mark.parametrize("flat", [False, True])
def test_lookahead_moves_what_has_no_gradient(flat):
    """Slow weights are averaged with all weights, also with those that are frozen by then."""
    learns = []
    for wrap in (False, True):
        learn = make_learner("ranger")
        if wrap:
            learn.add_cb(MixedPrecision(dtype=torch.float32, flat_master=flat))
        learn.fit(1, 0.05)
        for p in list(learn.model.parameters())[:2]:
            p.grad = None
            p.requires_grad_(False)
        learn.fit(1, 0.05)
        learns.append(weights(learn))
    assert_same(*learns)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("flat", [False, True])
def test_an_interrupted_step_ends_the_iteration_if_it_was_done(flat, where):
    """Passes whose gradients are still to be stepped are undone by a skip, no others."""
    net = Counts()
    model, opt = make(flat, net, torch.optim.SGD(net.parameters(), lr=0.5))
    scaler, x = LossScaler("cpu"), torch.ones(3, 4)

    def stop(*_):
        raise KeyboardInterrupt

    register = dict(before=opt.register_step_pre_hook, after=opt.register_step_post_hook)[where]
    hook = register(stop)
    scaler.scale(model(x).sum()).backward()
    with pytest.raises(KeyboardInterrupt):
        scaler.step(opt)
    hook.remove()
    scaler.update()
    scaler.scale(model(x).sum() * float("inf")).backward()
    assert not scaler.step(opt)
    assert model.count == (0 if where == "before" else 1)


class Last(nn.Module):
    """Puts another tensor into its buffer's place at each pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x):
        self.last = x.detach().mean()
        return self.layer(x)


def test_a_buffer_put_in_the_place_of_another_is_restored_where_the_device_decides():
    model = Last()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model, opt = with_masters(model, sgd, dtype=torch.float32)
    scaler = LossScaler("cpu", 16.0)
    for size in (1.0, float("inf")):
        opt.zero_grad()
        scaler.scale((model(torch.full((1, 2), 3.0 if size == 1 else 5.0)) * size).sum()).backward()
        scaler.step(opt)
        scaler.update()
    assert scaler.skipped == [1] and model.last == 3.0


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(4), lambda: nn.GroupNorm(2, 4)])
def test_a_32_bit_vector_is_written_into_a_16_bit_model(norm):
    """`vector_to_parameters` leaves 32-bit weights in the model: the next pass casts them."""
    net = nn.Sequential(nn.Linear(4, 4), norm(), nn.Linear(4, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    model, opt = with_masters(net, opt, dtype=torch.bfloat16, flat_master=True)
    written = torch.linspace(-1.001, 0.999, sum(p.numel() for p in model.parameters()))
    x, y = torch.randn(8, 4), torch.arange(8) % 2
    for _ in range(2):
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        nn.utils.vector_to_parameters(written, model.parameters())
    model(x)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    held = nn.utils.parameters_to_vector([v for v in model.state_dict().values()])
    assert_same(held, written)


def test_lbfgs_with_a_first_parameter_of_one_dimension():
    """LBFGS keeps one state for all parameters with the first, whose shape it does not have."""

    def make_one():
        net = nn.Sequential(nn.LayerNorm(4, bias=False), nn.Linear(4, 2))
        opt = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3)
        return with_masters(net, opt, dtype=torch.float32)

    def step(model, opt):
        def closure():
            opt.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        opt.step(closure)

    x, y = torch.randn(8, 4), torch.arange(8) % 2
    (model, opt), (other, loaded) = make_one(), make_one()
    step(model, opt)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(opt.state_dict()))
    for pair in ((model, opt), (other, loaded)):
        step(*pair)
    assert_same(*(nn.utils.parameters_to_vector(m.parameters()) for m in (model, other)))


class Sum(nn.Module):
    """A parameter without elements, then one with many."""

    def __init__(self):
        super().__init__()
        self.none, self.w = nn.Parameter(torch.empty(0)), nn.Parameter(torch.linspace(-1, 1, 10))

    def forward(self, x):
        """Return a sum."""
        return (self.w * x).sum() + self.none.sum()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_cleared_gradients_begin_an_iteration_though_they_are_zeros(set_to_none):
    """A step that is skipped restores the buffers of its own iteration, not of the one before."""
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model, opt = make(False, net, torch.optim.SGD(net.parameters(), lr=0.1))
    scaler, (x, y) = LossScaler("cpu", 8.0), (torch.randn(8, 4), torch.arange(8) % 2)
    scaler.scale(cross_entropy(model(x), y)).backward()
    opt.zero_grad(set_to_none=set_to_none)
    before = net[1].running_mean.clone()
    (scaler.scale(cross_entropy(model(x), y)) * math.inf).backward()
    assert not torch.equal(net[1].running_mean, before)
    scaler.step(opt)
    assert_same(net[1].running_mean, before)


def test_a_parameter_without_elements_before_a_large_one(monkeypatch):
    """What is stepped at once is never empty."""
    inside.everything_is_large(monkeypatch)
    inside.chunk_size(monkeypatch, 4, alone=4)
    results = []
    for flat in (False, True):
        model = Sum()
        mixed = MixedStep(torch.float32, flat_master=flat, scaler=LossScaler("cpu", 8.0))
        inside.be_exclusive(mixed, flat)
        mixed.attach(model)
        opt = torch.optim.SGD(list(model.parameters()), lr=0.1, momentum=0.9)
        opt = mixed.wrap_optimizer(opt)
        for _ in range(2):
            mixed.scale(model(mixed.cast(torch.arange(10.0), training=True))).backward()
            assert mixed.unscale()
            mixed.step()
            mixed.update()
            opt.zero_grad()
        results.append(model.state_dict()["w"])
    assert_same(*results)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("flat", [None, False, True], ids=["plain", "each", "flat"])
def test_a_loss_that_is_scaled_by_hand(flat, unscale):
    """`loss * get_scale()` is divided again at every step, of both optimizers, as by PyTorch's."""

    def train(make_scaler, flat):
        torch.manual_seed(0)
        nets = [nn.Linear(4, 2), nn.Linear(2, 2)]
        opts = [torch.optim.SGD(net.parameters(), lr=0.05) for net in nets]
        pairs = [make(flat, net, opt) for net, opt in zip(nets, opts, strict=True)]
        scaler = make_scaler("cpu", init_scale=16.0)
        scaler.scale(torch.ones(1))  # makes the scale
        for _ in range(3):
            loss = nets[1](nets[0](torch.ones(3, 4))).square().sum()
            (loss * scaler.get_scale()).backward()
            for _, opt in pairs:
                if unscale:
                    scaler.unscale_(opt)
                scaler.step(opt)
                opt.zero_grad()
            scaler.update()
        return [p.detach().clone() for net in nets for p in net.parameters()]

    assert_same(train(LossScaler, flat), train(torch.amp.GradScaler, None))


@pytest.mark.parametrize("flat", [False, True])
def test_gradients_put_there_after_they_were_cleared_begin_an_iteration(flat):
    """Zeros of one's own are no gradient of a pass before: the skipped step is the last pass's."""
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model, opt = make(flat, net, torch.optim.SGD(net.parameters(), lr=0.1))
    scaler, (x, y) = LossScaler("cpu", 8.0), (torch.randn(8, 4), torch.arange(8) % 2)
    scaler.scale(cross_entropy(model(x), y)).backward()
    opt.zero_grad()
    net[0].weight.grad = torch.zeros_like(net[0].weight)
    before = net[1].running_mean.clone()
    (scaler.scale(cross_entropy(model(x), y)) * math.inf).backward()
    scaler.step(opt)
    assert_same(net[1].running_mean, before)


class InTurn(nn.Module):
    """Use one of two layers."""

    def __init__(self):
        super().__init__()
        self.layers, self.n = nn.ModuleList(nn.Linear(4, 2) for _ in range(2)), 0

    def forward(self, x):
        """Use them in turn."""
        self.n += 1
        return self.layers[self.n % 2](x.flatten(1)[:, :4])


@pytest.mark.parametrize("flat", [False, True])
def test_gradients_that_are_cleared_twice_are_zeros_still(monkeypatch, flat):
    """What a batch does not use is stepped with zeros; after `lr_find`, too, which clears again."""
    inside.everything_is_large(monkeypatch)

    def train(change):
        learn = make_learner("sgd", InTurn)
        change(learn)
        learn.fit(1)
        learn.opt.zero_grad()
        learn.fit(1)
        return weights(learn)

    half = MixedPrecision(dtype=torch.float32, flat_master=flat)
    assert_same(train(lambda learn: learn.add_cb(half)), train(lambda learn: None))


def clear(p):
    """Have what the next backward pass does not reach left alone."""
    p.grad = None


def put(p):
    """Have it stepped with this gradient, and what the next backward pass adds."""
    p.grad = torch.ones_like(p, dtype=torch.float32)


def write(p):
    """As `put`, into the gradient that is there."""
    if p.grad is not None:
        with torch.no_grad():
            p.grad += 1


@pytest.mark.parametrize("edit", [clear, put, write])
@pytest.mark.parametrize("flat", [False, True])
def test_gradients_are_written_before_a_backward_pass(monkeypatch, flat, edit):
    """None is not zero where a callback has put it, nor a zero None where it has written."""
    inside.everything_is_large(monkeypatch)

    class Edit(Callback):  # it has one method, so that ours knows which events are looked at
        def __init__(self):
            self.seen = []

        def after_pred(self):
            params = list(self.model.parameters()) if self.training else []
            self.seen.append([None if p.grad is None else p.grad.clone() for p in params])
            for p in params if self.iter == 1 else ():
                edit(p)

    def train(*cbs):
        cb = Edit()
        learn = make_learner("sgd", InTurn, cbs=[cb, *cbs])
        learn.fit(2)
        return weights(learn), cb.seen

    half = MixedPrecision(dtype=torch.float32, flat_master=flat)
    assert_same(train(half), train())


@pytest.mark.parametrize("flat", [False, True])
def test_gradients_that_are_none_between_fits_are_not_zero(monkeypatch, flat):
    """A layer that the second fit leaves out at first is not stepped by its momentum."""
    inside.everything_is_large(monkeypatch)

    def train(*cbs):
        learn = make_learner("sgd", InTurn, cbs=list(cbs))
        learn.fit(1)
        learn.model.zero_grad()
        learn.fit(1)
        return weights(learn)

    half = MixedPrecision(dtype=torch.float32, flat_master=flat)
    assert_same(train(half), train())


def test_a_learner_whose_last_step_was_called_off_can_be_copied():
    """The scaler knows of no unfinished step when the fit is over."""

    class CallOff(Callback):
        order = 5

        def after_step(self):
            raise CancelBatchException

    learn = make_learner("sgd", cbs=[CallOff(), MixedPrecision(dtype=torch.float16)])
    learn.fit(1)
    assert_same(weights(copy.deepcopy(learn)), weights(learn))


def test_a_pickle_of_a_large_optimizer_holds_each_number_once(monkeypatch):
    """What was lent to it is over: views of a vector would each bring all of it."""
    inside.everything_is_large(monkeypatch)

    def size(flat):
        layers = [nn.Linear(108, 64), *(nn.Linear(64, 64) for _ in range(8))]
        cb = MixedPrecision(dtype=torch.bfloat16, flat_master=flat)
        learn = make_learner("sgd", nn.Sequential(nn.Flatten(), *layers), cbs=[cb])
        learn.fit(1)
        return len(pickle.dumps(learn.opt))

    assert size(flat=True) < 1.2 * size(flat=False)
