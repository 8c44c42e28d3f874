"""Weights and masters that other code writes, by every in-place way, in every layout and precision.

The value that was written is kept: of a weight, or of a master that was lent out.
"""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same

HALF = ["bf16", "fp16"]
LAYOUTS = {
    "each": {},
    "flat": dict(flat_master=True),
    "16-bit states": dict(flat_master=True, state_dtype={"momentum_buffer": torch.bfloat16}),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
dtypes = pytest.mark.parametrize("dtype", ["fp32", *HALF])


class Evaluates(torch.optim.SGD):
    """Calls its closure during its step, as SAM does."""

    def step(self, closure=None):
        """Step with the closure's gradients."""
        with torch.enable_grad():
            closure()
        super().step()


def make(dtype, lr=0.0, n=5, kind=torch.optim.SGD, **settings):
    """Return a model that has made a step, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(n, 6), nn.Linear(6, 2))
    opt = kind(model.parameters(), lr, momentum=0.9)
    model, opt = with_masters(model, opt, dtype=dtype, **settings)
    if kind is torch.optim.SGD:
        step(model, opt)
    return model, opt


def step(model, opt):
    """Make a step."""
    opt.zero_grad()
    model(torch.ones(2, model[0].weight.shape[1])).sum().backward()
    opt.step()


def saved(model, opt):
    """Return the first weight as a file has it."""
    return model.state_dict()["0.weight"]


READ = {
    "a file": saved,
    "a copy": lambda model, opt: copy.deepcopy(model)[0].weight.detach(),
    "a copy of a part": lambda model, opt: copy.deepcopy(model[0]).weight.detach(),
    "a pickle": lambda model, opt: pickle.loads(pickle.dumps(model))[0].weight.detach(),
    "the masters": lambda model, opt: opt.masters[model[0].weight],
    "a twin": lambda model, opt: opt.masters.float_model()[0].weight.detach(),
    "a step": lambda model, opt: step(model, opt) or saved(model, opt),
    "a skip": lambda model, opt: skip(model, opt) or saved(model, opt),
    "restoring": lambda model, opt: opt.masters.restore()[0].weight.detach(),
}


def skip(model, opt):
    """Skip a step, and make one."""
    model[1].weight.grad = torch.full_like(model[1].weight, torch.inf)
    opt.step()
    step(model, opt)


IN_PLACE = {
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(3.0),
    "mul_": lambda t: t.mul_(0.5),
    "neg_": lambda t: t.neg_(),
    "clamp_": lambda t: t.clamp_(-0.1, 0.1),
    "copy_": lambda t: t.copy_(torch.full(t.shape, 1.7)),
    "one number": lambda t: t[0, 1].fill_(2.0),
    "nan_to_num_": lambda t: t.copy_(torch.nan).nan_to_num_(),
    "rows in turn": lambda t: t.copy_(t.flip(0)),
    "numpy": lambda t: t.view(torch.int16).numpy().fill(0),
}


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("write", IN_PLACE)
@layouts
@pytest.mark.parametrize("dtype", HALF)
def test_a_weight_written_through_data_is_kept(dtype, layout, write, read):
    model, opt = make(dtype, **LAYOUTS[layout])
    before, weight = saved(model, opt).clone(), model[0].weight
    IN_PLACE[write](weight.data)
    now = weight.detach().clone()
    found = READ[read](model, opt)
    differs = before.to(now.dtype) != now
    assert differs.any()
    assert_same(found[differs], now[differs].float())
    assert_same(found[~differs], before[~differs])  # each bit of the others stays


@pytest.mark.parametrize("n", [1, 3, 5, 2**10])
@pytest.mark.parametrize("fused", [False, True])
@layouts
def test_in_the_step_a_written_weight_is_that_of_a_loaded_model(layout, fused, n):
    if layout == "16-bit states" and fused:
        pytest.skip("chunks of a CPU's fused kernel have other bits")
    (model, opt), (twin, twins_opt) = (make("bf16", lr=0.1, n=n, **LAYOUTS[layout]) for _ in "ab")
    for group in (*opt.param_groups, *twins_opt.param_groups):
        group["fused"] = fused
    for i in range(4):
        weight = model[i % 2].weight
        weight.data[:1] = i
        twin.load_state_dict(copy.deepcopy(model.state_dict()))
        step(model, opt)
        step(twin, twins_opt)
        assert_same(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("read", READ)
@layouts
@pytest.mark.parametrize("dtype", HALF)
def test_the_last_of_several_writes_is_kept(dtype, layout, read):
    model, opt = make(dtype, **LAYOUTS[layout])
    for value in (1.5, 2.5):
        model[0].weight.data.fill_(value)
        assert_same(opt.masters[model[0].weight], torch.full((6, 5), value))
    model[0].weight.data[0] = 0.5
    assert (READ[read](model, opt)[0] == 0.5).all()


LENT = {
    "state_dict": saved,
    "float_model": lambda model, opt: opt.masters.float_model()[0].weight.detach(),
    "masters[p]": lambda model, opt: opt.masters[model[0].weight],
}


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("lent", LENT)
@layouts
@dtypes
def test_a_master_that_is_written_wins_over_the_weight(dtype, layout, lent, read):
    if dtype == "fp32" and (layout == "16-bit states" or read == "a skip"):
        pytest.skip("float32 has neither 16-bit states nor skips")
    model, opt = make(dtype, **LAYOUTS[layout])
    LENT[lent](model, opt).fill_(3.3)
    assert_same(READ[read](model, opt), torch.full((6, 5), 3.3))
    assert model[0].weight[0, 0] == torch.tensor(3.3).to(model[0].weight.dtype)


@layouts
@pytest.mark.parametrize("dtype", HALF)
def test_through_the_data_of_a_master_that_was_lent_the_weight_wins(dtype, layout):
    model, opt = make(dtype, **LAYOUTS[layout])
    weight = model[0].weight.detach().clone()
    saved(model, opt).data.fill_(3.3)
    step(model, opt)
    assert_same(saved(model, opt), weight.float())  # as the page says


@layouts
def test_shown_masters_may_be_written_in_any_way(layout):
    model, opt = make("bf16", **LAYOUTS[layout])
    with opt.masters.shown():
        model[0].weight.data.fill_(3.3)
        model[1].weight.data = torch.full((2, 6), 4.4)
    step(model, opt)
    assert_same(saved(model, opt), torch.full((6, 5), 3.3))
    assert_same(model.state_dict()["1.weight"], torch.full((2, 6), 4.4))


@pytest.mark.parametrize("saver", ["deepcopy", "pickle", "torch.save"])
@layouts
@dtypes
def test_a_copy_of_a_part_is_a_plain_float32_module(dtype, layout, saver):
    if dtype == "fp32" and layout == "16-bit states":
        pytest.skip("float32 has no 16-bit states")
    net = nn.Sequential(nn.Embedding(4, 3), nn.BatchNorm1d(3), nn.LSTM(3, 2), nn.LayerNorm(2))
    net[1].register_buffer("mean", torch.tensor(1.0001))
    net[3].twin = net[0].weight  # a parameter that two modules share
    opt = torch.optim.SGD(net.parameters(), 0.1)
    net, opt = with_masters(net, opt, dtype=dtype, **LAYOUTS[layout])
    for part in (net, *net, net[:2], net[0].weight):
        if saver == "deepcopy":
            twin = copy.deepcopy(part)
        elif saver == "pickle":
            twin = pickle.loads(pickle.dumps(part))
        else:
            torch.save(part, file := io.BytesIO())
            assert len(file.getvalue()) < 12_000  # not the vector that it is a part of
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        if isinstance(part, nn.Module):
            assert_same(dict(twin.state_dict()), dict(part.state_dict()))
            for m in twin.modules():
                assert not m._state_dict_hooks and not m._load_state_dict_pre_hooks
                assert "forward" not in vars(m) and "__reduce_ex__" not in vars(m)
                assert all(not vars(p) for p in m.parameters())
        else:
            assert_same(twin.detach(), opt.masters[part])
    twin = copy.deepcopy(net)
    assert twin[3].twin is twin[0].weight


def test_a_buffer_that_is_written_is_kept_by_a_skip_if_it_is_saved():
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    net, opt = with_masters(net, torch.optim.SGD(net.parameters(), 0.1), dtype="bf16")
    net[1].running_mean.fill_(7.0)
    opt.masters.snapshot.save()
    (net(torch.ones(4, 3)).sum() * torch.inf).backward()
    opt.step()
    assert opt.masters.n_skipped == 1
    assert_same(net[1].running_mean, torch.full((2,), 7.0))


# Averages of weights inside the model


def distance(way, dtype="bf16", n_steps=300, decay=0.99):
    """Return how far an average in 16 bits is from float32's, relative to how far that moved."""
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    model = nn.ModuleDict({"q": student, "k": copy.deepcopy(student).requires_grad_(False)})
    first = [k.clone() for k in model["k"].parameters()]
    opt, keep = torch.optim.SGD(model["q"].parameters(), 0.01), ("k",) if way == "keep" else ()
    model, opt = with_masters(model, opt, dtype=dtype, keep_fp32=keep)
    for i in range(n_steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(i))
        (model["q"](x) - x.sum(1, keepdim=True)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        pairs = list(zip(model["k"].parameters(), model["q"].parameters(), strict=True))
        with torch.no_grad():
            if way == "shown":
                with opt.masters.shown():
                    for k, q in pairs:
                        k.lerp_(q, 1 - decay)
            else:
                for k, q in pairs:
                    (k.data if way == "data" else k).mul_(decay).add_(q, alpha=1 - decay)
    now = opt.masters.restore()["k"].parameters()
    return [p.detach() for p in now], first


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("way", ["keep", "shown"])
@pytest.mark.parametrize("decay", [0.99, 0.999])
def test_a_momentum_encoder_is_that_of_float32(way, dtype, decay):
    (ours, first), (exact, _) = (distance(way, d, decay=decay) for d in (dtype, "fp32"))
    off, moved = (torch.cat([(a - b).flatten() for a, b in zip(ours, other, strict=True)]).norm()
                  for other in (exact, first))
    assert off <= 0.02 * moved


@pytest.mark.parametrize("way", ["in place", "data"])
def test_an_average_in_16_bits_is_warned_of_once(way, warnings_of):
    for recipe in ("keep", "shown"):
        distance(recipe, n_steps=4)
    assert not [text for text in warnings_of() if "average" in text]
    distance(way, n_steps=4)
    assert len([text for text in warnings_of() if "keep_fp32=['k']" in text]) == 1


def test_averaged_model_takes_the_twin_and_shown():
    model, opt = make("bf16", lr=0.1)
    average = AveragedModel(opt.masters.float_model())
    step(model, opt)
    average.update_parameters(opt.masters.float_model())
    with opt.masters.shown():
        average.update_parameters(model)
    assert average.module[0].weight.dtype == torch.float32


# A step touches its own parameters


def two(kind, dtype, flat):
    """Return what two halves of a ModuleList are after a few steps in the order `kind`."""
    torch.manual_seed(0)
    halves = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(2)]
    opts = [torch.optim.AdamW(m.parameters(), 0.01) for m in halves]
    both = nn.ModuleList(halves)
    if dtype is not None:
        with_masters(both, *opts, dtype=dtype, flat_master=flat)
    for i in range(4):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(i))
        a, b = (m(x) for m in both)
        if kind == "in turn":
            losses = a.square().sum(), b.sum()
        else:  # mutual: each learns from the other's output
            losses = (a - b.detach()).square().sum(), (b - a.detach()).abs().sum()
        for loss, opt in zip(losses, opts, strict=True):
            opt.zero_grad()
            loss.backward()
            opt.step()
    return dict(both.state_dict())


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("kind", ["in turn", "mutual"])
def test_the_step_of_one_optimizer_leaves_the_others_graph(kind, flat):
    assert_same(two(kind, "fp32", flat), two(kind, None, flat))
    for dtype in HALF:
        assert_same(two(kind, dtype, flat), two(kind, dtype, not flat))


def in_backward(dtype, flat, one=False):
    """Return a model whose parameters are stepped as their gradients arrive."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
    opts = {p: torch.optim.AdamW([p], 0.01) for p in model.parameters()}
    if dtype is not None:
        with_masters(model, *opts.values(), dtype=dtype, flat_master=flat)

    def hook(p):
        opts[p].step()
        opts[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for i in range(4):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(i))
        model(x).square().sum().backward()
    return dict(model.state_dict())


def test_an_optimizer_in_the_backward_pass_steps_its_own_parameter():
    for flat in (False, True):
        assert_same(in_backward("fp32", flat), in_backward(None, flat))
    for dtype in HALF:
        assert_same(in_backward(dtype, False), in_backward(dtype, True))


def test_after_an_interrupt_gradients_are_the_same_flat():
    """fastai's `l2_reg` adds to the gradient in place."""
    from fastai.optimizer import SGD

    from mixedfp.cast import Policy
    from mixedfp.step import MixedStep

    found = []
    for flat in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        opt = SGD(list(model.parameters()), 0.1, wd=0.1, decouple_wd=False)
        mixed = MixedStep(Policy(torch.bfloat16, flat_master=flat))
        mixed.attach(model)
        mixed.wrap(opt)
        model(torch.ones(2, 3)).sum().backward()
        opt.step()
        found.append([p.grad for p in model.parameters()])
    assert_same(*found)


# Refusals


@layouts
@pytest.mark.parametrize("shared", ["layer", "weight"])
def test_two_models_that_share_a_parameter_are_refused(layout, shared):
    model, _ = make("bf16", **LAYOUTS[layout])
    other = nn.Sequential(model[0] if shared == "layer" else nn.Linear(5, 6), nn.Linear(6, 1))
    other[0].weight = model[0].weight
    before = [p.dtype for p in other.parameters()]
    with pytest.raises(MixedPrecisionError, match=r"nn\.ModuleList\(\[a, b\]\)"):
        with_masters(other, torch.optim.SGD(other.parameters(), 0.1), dtype="bf16")
    assert before == [p.dtype for p in other.parameters()]


@layouts
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
def test_an_optimizer_without_masters_is_refused_when_it_steps(layout, kind):
    model, opt = make("bf16", **LAYOUTS[layout])
    other = kind(model.parameters(), 0.1)
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(2, 5)).sum().backward()
    with pytest.raises(MixedPrecisionError, match="with_masters"):
        other.step()
    assert_same(dict(model.state_dict()), dict(before))
    with opt.masters.shown():
        other.step()
    opt.masters.restore()
    other.step()


@layouts
@pytest.mark.parametrize("how", ["weight_norm", "a new layer", "a closure"])
def test_16_bit_parameters_that_join_later_are_refused_before_anything_is_trained(layout, how):
    kind = Evaluates if how == "a closure" else torch.optim.SGD
    if kind is Evaluates and layout == "16-bit states":
        pytest.skip("it is not stepped in chunks")
    model, opt = make("bf16", lr=0.1, kind=kind, **LAYOUTS[layout])
    if how == "weight_norm":
        nn.utils.parametrizations.weight_norm(model[0])
        new = list(model[0].parametrizations.parameters())
    else:
        model[1] = nn.Linear(6, 2).bfloat16()
        new = list(model[1].parameters())
    opt.add_param_group({"params": new})
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 5)).sum().backward()
    closures = [lambda: model(torch.ones(2, 5)).sum().backward()] if kind is Evaluates else []
    with pytest.raises(MixedPrecisionError, match="has no master: it joined after"):
        opt.step(*closures)
    assert_same([p.detach() for p in model.parameters()], before)


# Export


@pytest.mark.parametrize("layout", ["each", "flat"])
def test_the_twin_exports_while_gradients_are_left(layout):
    pytest.importorskip("onnx")
    model, opt = make("bf16", lr=0.1, **LAYOUTS[layout])
    assert model[0].weight.grad is not None
    x = torch.ones(2, 5)
    torch.onnx.export(opt.masters.float_model(), (x,), file := io.BytesIO(), dynamo=False)
    assert len(file.getvalue()) > 4 * sum(p.numel() for p in model.parameters())
