"""What users of mixed precision suffer from in plain PyTorch loops, and must not here.

One test a number of the list of public issues that tests/test_pains.py follows, and one for each
defect of `torch.amp.GradScaler` (X1 to X3). Each runs PyTorch's own way first, as a control, and
shows what goes wrong there. Number 28, ranks that disagree, is in tests/test_pains_ranks.py and
tests/test_optimizer_ranks.py.
"""

import copy
import io
import math
import warnings

import inside
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import MasterOptimizer, with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

FLAT = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
LAYOUTS = pytest.mark.parametrize(
    "layout",
    [{}, dict(flat_master=True), dict(flat_master=True, stream=True)],
    ids=["each", "flat", "stream"],
)
HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32

# A small model, its data, and the loop that everybody writes


def net(seed=1):
    """Return two layers with BatchNorm between; weights follow from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)
        )


def batches(n=6, size=8, seed=0):
    """Return `n` batches of a task that the model can learn."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, size, 6, generator=rng)
    y = x[..., :2] * 2 + 1
    return list(zip(x, y, strict=True))


def loss_of(model, x, y):
    """Return the loss, in float32, of a model in any dtype."""
    dtype = next(model.parameters()).dtype
    return F.mse_loss(model(x.to(dtype)).float(), y)


def overflowing(x):
    """Return `x` with a number that poisons the whole forward pass."""
    x = x.clone()
    x[0, 0] = math.inf
    return x


def train(model, opt, scaler, data, clip=None, bad=()):
    """Train as PyTorch's notes say; return what `step` answered each time."""
    answers = []
    for i, (x, y) in enumerate(data):
        opt.zero_grad()
        scaler.scale(loss_of(model, overflowing(x) if i in bad else x, y)).backward()
        if clip is not None:
            scaler.unscale_(opt)
            clip_grad_norm_(model.parameters(), clip)
        answers.append(scaler.step(opt))
        scaler.update()
    return answers


def off():
    """Return a scaler that does nothing: the loop is PyTorch's own then."""
    return GradScaler("cpu", enabled=False)


def copies(tensors):
    """Return copies of `tensors`, detached."""
    return [t.detach().clone() for t in tensors]


def masters(opt):
    """Return copies of the masters, in one vector."""
    return torch.cat([p.detach().flatten() for g in opt.param_groups for p in g["params"]])


def vector(model):
    """Return the weights, as a checkpoint has them, in one vector."""
    state = model.state_dict()
    return torch.cat([state[k].flatten().double() for k, _ in model.named_parameters()])


def everything(model, opt):
    """Return copies of all that a step may change, bit for bit."""
    return copy.deepcopy(
        dict(
            model=copies([*model.parameters(), *model.buffers()]),
            saved=dict(model.state_dict()),
            opt=opt.state_dict(),
        )
    )


def distance(a, b, start):
    """Return how far `a` is from `b`, as a part of the way from `start`."""
    return ((a - b).norm() / (b - start).norm()).item()


# 1 to 3: what a scaler takes, and what a checkpoint holds


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@FLAT
def test_pain_01_half_model(dtype, flat):
    """torch: "Attempting to unscale FP16 gradients". Here trainable half weights get masters."""
    if dtype == HALF:
        model = net().half()
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            train(model, SGD(model.parameters(), lr=0.1), GradScaler("cpu"), batches(1))
    model = net().to(dtype)
    model[1].float()
    model[3].bias.requires_grad_(False)
    frozen = model[3].bias.detach().clone()
    opt = MasterOptimizer(SGD(model.parameters(), lr=1e-4), flat_master=flat, model=model)
    before = vector(model)
    train(model, opt, LossScaler("cpu", init_scale=512.0, enabled=dtype == HALF), batches())
    assert {p.dtype for p in model.parameters()} == {dtype, FULL}
    trained = [p for g in opt.param_groups for p in g["params"] if p.requires_grad and p.numel()]
    assert {m.dtype for m in trained if m.grad is not None} == {FULL}
    assert_same(model[3].bias.detach(), frozen)
    assert opt.float_model()[3].bias.dtype == dtype  # what is frozen costs no 32-bit copy
    saved = model.state_dict()
    assert saved["0.weight"].dtype == FULL
    assert (saved["0.weight"] - model[0].weight.float()).abs().max() > 0  # they hold more bits
    assert (vector(model) - before).abs().max() > 0


def test_pain_01_a_scaler_without_masters_names_the_cure():
    """torch says only that it cannot; here the parameters and the cure are named."""
    model = net().half()
    opt = SGD(model.named_parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"FP16 gradients, of 0\.weight, .*MasterOptimizer\("):
        train(model, opt, LossScaler("cpu", init_scale=512.0), batches(1))


PARTS = ["half", "bfloat16", "float", "double", "sparse"]


def parts():
    """Return a scalar weight in each of four dtypes, and a sparse embedding."""
    table = nn.Embedding.from_pretrained(torch.ones(2, 1).half(), freeze=False, sparse=True)
    weights = [nn.Parameter(torch.ones(1, dtype=getattr(torch, k))) for k in PARTS[:4]]
    return nn.ModuleList([nn.ParameterList(weights), table])


def loss_of_parts(model, bad):
    """Return a loss whose gradient is 0.25 everywhere, but inf in `bad`."""
    values = [*model[0], model[1](torch.tensor([1]))]
    by = [math.inf if k == bad else 0.25 for k in PARTS]
    return sum((v.float() * b).sum() for v, b in zip(values, by, strict=True))


@pytest.mark.parametrize("bad", [None, *PARTS])
def test_pain_02_one_optimizer_of_many_types(bad):
    """torch: refuses the float16 ones. Here all are unscaled, and an inf in any is seen."""
    model = parts()
    theirs = GradScaler("cpu", init_scale=8.0)
    theirs.scale(loss_of_parts(model, bad)).backward()
    with pytest.raises(ValueError, match="FP16"):
        theirs.step(SGD(model.parameters(), lr=1.0))
    model.zero_grad()
    opt = MasterOptimizer(SGD(model.parameters(), lr=1.0), model=model)
    scaler = LossScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of_parts(model, bad)).backward()
    assert scaler.step(opt) is (bad is None)
    scaler.update()
    assert scaler.get_scale() == (8.0 if bad is None else 4.0)
    moved = 1.0 if bad else 0.75
    for k, p in zip(PARTS, model[0], strict=False):
        assert_same(p.detach(), torch.full((1,), moved, dtype=getattr(torch, k)))
    assert_same(model[1].weight.detach(), torch.tensor([[1.0], [moved]]).half())


def start(flat, loose, seed=1):
    """Return a model in float16 with its optimizer and scaler, as a script begins."""
    model = net(seed)
    if loose:
        model = model.half()
        opt = MasterOptimizer(AdamW(model.parameters(), lr=0.02), flat_master=flat)
    else:
        model, opt = with_masters(model, AdamW(model.parameters(), lr=0.02), flat_master=flat)
    return model, opt, LossScaler("cpu", init_scale=512.0, growth_interval=3)


def through_a_file(*parts):
    """Save and load, as a checkpoint that anybody may open."""
    file = io.BytesIO()
    torch.save([p.state_dict() for p in parts], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def state_of(parts):
    """Return copies of the states of model, optimizer and scaler."""
    return copy.deepcopy([dict(p.state_dict()) for p in parts])


@pytest.mark.parametrize("loose", [False, True], ids=["model", "no_model"])
@FLAT
def test_pain_03_resuming_is_not_stopping(flat, loose):
    """Scripts forget the scaler's state; torch starts at 2**16 again. Here: the unbroken bits."""
    data = batches(10)
    unbroken = start(flat, loose)
    train(*unbroken, data, bad=[3, 4])
    first = start(flat, loose)
    train(*first, data[:6], bad=[3, 4])
    second = start(flat, loose, seed=2)
    for part, state in zip(second, through_a_file(*first), strict=True):
        part.load_state_dict(state)
    forgetful = start(flat, loose, seed=2)
    for part, state in zip(forgetful[:2], through_a_file(*first), strict=False):
        part.load_state_dict(state)
    train(*second, data[6:])
    train(*forgetful, data[6:])
    assert_same(state_of(second), state_of(unbroken))
    assert_same(masters(second[1]), masters(unbroken[1]))
    assert forgetful[2].get_scale() != unbroken[2].get_scale()  # the control
    assert unbroken[2].skipped == [3, 4] and second[2].scales == unbroken[2].scales[6:]


# 5 to 7: gradients that are looked at before the step


def two_groups(model):
    """Return the parameters in two groups."""
    return [dict(params=list(model[:2].parameters())), dict(params=list(model[2:].parameters()))]


def one_group(model):
    """Return all parameters as one group."""
    return list(model.parameters())


def seen_norms(opt, into):
    """Have each step of `opt` note the norm of the gradients that it sees."""

    def note(opt, args, kwargs):
        grads = [p.grad for g in opt.param_groups for p in g["params"] if p.grad is not None]
        into.append(torch.cat([g.double().flatten() for g in grads]).norm().item())

    opt.register_step_pre_hook(note)
    return opt


@pytest.mark.parametrize("groups", [one_group, two_groups])
@pytest.mark.parametrize("of", ["model", "masters"])
@LAYOUTS
def test_pain_05_clipping(groups, of, layout):
    """torch: clipping before `unscale_` leaves a gradient 1/scale too small.

    Here model and masters share their gradients, so clipping either clips what is stepped.
    """
    norms, theirs = [], []
    model = net()
    opt = seen_norms(SGD(groups(model), lr=0.05, momentum=0.9), theirs)
    scaler = GradScaler("cpu", init_scale=2.0**12)
    scaler.scale(loss_of(model, *batches(1)[0])).backward()
    clip_grad_norm_(model.parameters(), 0.125)
    scaler.step(opt)
    assert theirs[0] == pytest.approx(0.125 / 2**12, rel=1e-4)  # the control

    model = net()
    before = vector(model)
    inner = seen_norms(SGD(groups(model), lr=0.05, momentum=0.9), norms)
    model, opt = with_masters(model, inner, **layout)
    scaler = LossScaler("cpu", init_scale=2.0**12)
    for x, y in batches():
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.unscale_(opt)
        held = [p for g in opt.param_groups for p in g["params"]]
        clip_grad_norm_(model.parameters() if of == "model" else held, 0.125)
        assert scaler.step(opt) is True
        scaler.update()
    assert norms == pytest.approx([0.125] * 6, rel=1e-5)
    full = net()
    train(full, SGD(groups(full), lr=0.05, momentum=0.9), off(), batches(), clip=0.125)
    assert distance(vector(model), vector(full), before) < 0.01


@pytest.mark.parametrize("make", [SGD, Adam, AdamW])
@LAYOUTS
def test_pain_06_clipping_with_a_fused_optimizer(make, layout):
    """torch: without `unscale_` the fused one unscales what was clipped: nothing is left of it.

    Here fused and unfused go the same way; the masters differ by the fused kernel's rounding only.
    """
    model = net()
    opt, scaler = SGD(model.parameters(), lr=1.0, fused=True), GradScaler("cpu")
    before = vector(model)
    scaler.scale(loss_of(model, *batches(1)[0])).backward()
    clip_grad_norm_(model.parameters(), 0.125)
    scaler.step(opt)
    assert (vector(model) - before).norm() < 0.125 / 2**15  # the control: 0.125 was to be

    def run(**kwargs):
        model = net()
        model, opt = with_masters(model, make(model.parameters(), lr=0.02, **kwargs), **layout)
        answers = train(model, opt, LossScaler("cpu", init_scale=512.0), batches(), clip=0.125)
        assert len(answers) == 6 and all(map(bool, answers))
        assert {isinstance(a, torch.Tensor) for a in answers} == {kwargs["fused"]}
        return masters(opt)

    fused, unfused = run(fused=True), run(fused=False)
    torch.testing.assert_close(fused, unfused, rtol=1e-4, atol=1e-6)


def test_pain_07_unscaling_twice():
    """torch: RuntimeError for the second `unscale_`. Here the second does nothing."""
    for make in (GradScaler, LossScaler):
        model = net()
        if make is LossScaler:
            model, opt = with_masters(model, SGD(model.parameters(), lr=0.1))
        else:
            opt = SGD(model.parameters(), lr=0.1)
        scaler = make("cpu", init_scale=1024.0)
        scaler.scale(loss_of(model, *batches(1)[0])).backward()
        scaler.unscale_(opt)
        once = copies(p.grad for p in model.parameters())
        if make is GradScaler:
            with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
                scaler.unscale_(opt)
            continue
        scaler.unscale_(opt)
        assert_same(copies(p.grad for p in model.parameters()), once)
        assert {g.dtype for g in once} == {FULL}


@LAYOUTS
def test_pain_07_a_step_called_off(layout):
    """torch: a loop that looks at gradients and does not step dies at the next `unscale_`.

    Here it goes on, as if the batch had never been.
    """
    data = batches(4)

    def run(model, opt, scaler, left_out):
        for i, (x, y) in enumerate(data):
            opt.zero_grad()
            scaler.scale(loss_of(model, x, y)).backward()
            scaler.unscale_(opt)
            if i == left_out:
                continue
            scaler.step(opt)
            scaler.update()
        return copies(opt.state_dict()["state"][0].values()), vector(model)

    model = net()
    with pytest.raises(RuntimeError, match="already been called"):
        run(model, SGD(model.parameters(), lr=0.1), GradScaler("cpu"), 1)
    found = []
    for left_out in (1, None):
        model = net()
        if left_out is None:  # the same batches, but for the statistics of the one left out
            del data[1]
        model, opt = with_masters(model, SGD(model.parameters(), lr=0.1, momentum=0.9), **layout)
        scaler = LossScaler("cpu", init_scale=1024.0)
        found.append(run(model, opt, scaler, left_out))
        assert scaler.skipped == [] and scaler.get_scale() == 1024.0
    assert_same(*found)


@LAYOUTS
def test_pain_07_unscaling_each_micro_batch(layout):
    """torch: RuntimeError. Here gradients unscaled too early are scaled again, and added to."""

    def run(unscale_early):
        model = net()
        model, opt = with_masters(model, SGD(model.parameters(), lr=0.1), **layout)
        scaler = LossScaler("cpu", init_scale=1024.0)
        for x, y in batches(3):
            scaler.scale(loss_of(model, x, y)).backward()
            if unscale_early:
                scaler.unscale_(opt)
        assert scaler.step(opt) is True
        return vector(model)

    assert_same(run(True), run(False))


# 8 to 11: schedules, optimizers, closures


def falling(opt):
    """Return a schedule that halves the rate at each step."""
    return LambdaLR(opt, lambda i: 0.5**i)


@pytest.mark.parametrize("fused", [False, True])
@FLAT
def test_pain_08_a_schedule_over_skipped_steps(flat, fused):
    """torch warns of a schedule before the first step when that was skipped, and tells nobody.

    Here there is no warning; `step()` tells, so that a schedule goes by batches or by steps. A
    fused optimizer knows it on the device only: the scaler's record tells.
    """
    model = net()
    opt = SGD(model.parameters(), lr=0.1)
    schedule, scaler = falling(opt), GradScaler("cpu")
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        assert train(model, opt, scaler, batches(1), bad=[0]) == [None]
        schedule.step()

    model = net()
    inner = SGD(model.parameters(), lr=0.1, fused=fused)
    model, opt = with_masters(model, inner, flat_master=flat)
    by_batches, scaler, taken = falling(opt), LossScaler("cpu", init_scale=512.0), 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, batch in enumerate(batches(5)):
            (answer,) = train(model, opt, scaler, [batch], bad=[0] if i in (0, 2) else [])
            assert isinstance(answer, torch.Tensor) == fused
            assert bool(answer) == (i not in (0, 2))
            taken += bool(answer)
            by_batches.step()
    assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.1 / 32] * len(opt.param_groups))
    assert scaler.skipped == [0, 2] and scaler.n_skipped == 2
    assert taken == 3


def test_pain_08_a_schedule_by_steps():
    """A schedule that follows `step()`'s answer has moved as often as the weights have."""
    model = net()
    model, opt = with_masters(model, SGD(model.parameters(), lr=0.1))
    schedule, scaler = falling(opt), LossScaler("cpu", init_scale=512.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, batch in enumerate(batches(5)):
            (answer,) = train(model, opt, scaler, [batch], bad=[0] if i in (0, 2) else [])
            if answer is not False:
                schedule.step()
    assert schedule.last_epoch == 3 and opt.param_groups[0]["lr"] == pytest.approx(0.1 / 8)


@FLAT
def test_pain_09_an_optimizer_without_gradients(flat):
    """torch: AssertionError, "No inf checks were recorded". Here nothing moves, and all goes on."""
    model = net()
    opt, scaler = SGD(model.parameters(), lr=0.1), GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(opt)

    model = nn.ModuleList([net(1), net(2)])
    one = SGD(model[0].parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    two = SGD(model[1].parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    model, one, two = with_masters(model, one, two, flat_master=flat)
    scaler = LossScaler("cpu", init_scale=512.0)
    before = everything(model[1], two)
    x, y = batches(1)[0]
    for _ in range(2):
        scaler.scale(loss_of(model[0], x, y)).backward()
        assert scaler.step(one) is True
        assert scaler.step(two) is True
        scaler.update()
    assert_same(everything(model[1], two), before)
    assert vector(model[0]).sub(vector(net(1))).abs().max() > 0
    assert scaler.skipped == [] and scaler.record.n_steps == 2


def pair(flat):
    """Return two models with an optimizer each; one scaler serves both."""
    model = nn.ModuleList([net(1), net(2)])
    opts = [SGD(m.parameters(), lr=0.05, momentum=0.9) for m in model]
    model, *opts = with_masters(model, *opts, flat_master=flat)
    return model, opts, LossScaler("cpu", init_scale=512.0, growth_interval=1)


@pytest.mark.parametrize("bad", [None, 0, 1])
@FLAT
def test_pain_10_one_scaler_many_optimizers(flat, bad):
    """torch refuses 16-bit models. Here each optimizer decides alone; `update()` comes once."""
    model, opts, scaler = pair(flat)
    other = 1 if bad is None else 1 - bad
    full = [net(1), net(2)]
    alone = [SGD(m.parameters(), lr=0.05, momentum=0.9) for m in full]
    before = [everything(m, o) for m, o in zip(model, opts, strict=True)]
    x, y = batches(1)[0]
    losses = [loss_of(m, overflowing(x) if i == bad else x, y) for i, m in enumerate(model)]
    for loss in losses:
        scaler.scale(loss).backward()
    answers = [scaler.step(opt) for opt in opts]
    scaler.update()
    assert answers == [i != bad for i in range(2)]
    assert scaler.get_scale() == (1024.0 if bad is None else 256.0)
    if bad is not None:
        assert_same(everything(model[bad], opts[bad]), before[bad])
    train(full[other], alone[other], off(), [(x, y)])
    first = vector(net(other + 1))
    assert distance(vector(model[other]), vector(full[other]), first) < 0.01


class SAM(SGD):
    """Sharpness-aware minimization: the gradient of the worst weights nearby (Foret et al.)."""

    @torch.no_grad()
    def step(self, closure):
        """Climb, ask again, come back, step."""
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        before = copies(params)
        for p in params:
            p.add_(p.grad, alpha=0.05 / norm)
        evaluate()
        for p, kept in zip(params, before, strict=True):
            p.copy_(kept)
        super().step()
        return loss


def sam(params):
    """Return SAM with momentum."""
    return SAM(params, lr=0.05, momentum=0.9)


def lbfgs(params):
    """Return L-BFGS with a few iterations a step."""
    return torch.optim.LBFGS(params, lr=0.1, max_iter=4)


def searching(params):
    """Return L-BFGS that searches along the line, with many evaluations a step."""
    return torch.optim.LBFGS(params, lr=0.5, max_iter=3, line_search_fn="strong_wolfe")


CLOSURES = pytest.mark.parametrize("make", [sam, lbfgs, searching])
POSITIONAL = pytest.mark.parametrize("positional", [True, False], ids=["positional", "keyword"])


def smooth_net():
    """Return a model without BatchNorm: L-BFGS wants the same loss for the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def run_closures(model, opt, scaler, positional, bad=None):
    """Take three steps with a closure; let evaluation `bad` overflow. Return losses, answers."""
    losses, answers = [], []
    for x, y in batches(3, 16):

        def closure(x=x, y=y):
            opt.zero_grad()
            loss = loss_of(model, overflowing(x) if len(losses) == bad else x, y)
            scaler.scale(loss).backward()
            losses.append(loss.item())
            return loss

        answers.append(
            scaler.step(opt, closure) if positional else scaler.step(opt, closure=closure)
        )
        scaler.update()
    return losses, answers


@CLOSURES
@POSITIONAL
@pytest.mark.parametrize("dtype", [FULL, BF16, HALF], ids=str)
def test_pain_11_closures(make, positional, dtype):
    """torch refuses `closure=` and runs a positional one scaled. Here both are 32 bits' way.

    In float32 bit for bit, though scaled: a power of two takes nothing.
    """
    full = smooth_net()
    start = vector(full)
    losses, answers = run_closures(full, make(full.parameters()), off(), True)
    model = smooth_net()
    model, opt = with_masters(model, make(model.parameters()), dtype=dtype)
    scaler = LossScaler("cpu", init_scale=256.0)
    ours, our_answers = run_closures(model, opt, scaler, positional)
    assert scaler.skipped == [] and {p.dtype for p in model.parameters()} == {dtype}
    if dtype == FULL:
        assert_same([vector(model), ours, our_answers], [vector(full), losses, answers])
        return
    near = 0.1 if dtype == BF16 else 0.02  # L-BFGS amplifies what is rounded
    assert distance(vector(model), vector(full), start) < near
    assert ours[0] == pytest.approx(losses[0], rel=near)
    assert our_answers[-1].item() == pytest.approx(answers[-1].item(), rel=2 * near)


@CLOSURES
def test_pain_11_closures_and_flat_masters(make):
    """An optimizer that wants a closure looks at the whole model: refused flat, and it says so."""
    model = smooth_net()
    with pytest.raises(MixedPrecisionError, match="Use flat_master=False"):
        with_masters(model, make(model.parameters()), flat_master=True)
    assert {p.dtype for p in model.parameters()} == {FULL}  # nothing has happened


@CLOSURES
@POSITIONAL
def test_pain_11_an_overflow_inside_a_closure_is_undone(make, positional):
    """Where evaluation two overflows, weights, masters and state are the bits of before the step.

    Then training goes on, as if the overflowed batch had not been.
    """
    model = smooth_net()
    model, opt = with_masters(model, make(model.parameters()))
    scaler = LossScaler("cpu", init_scale=256.0)
    run_closures(model, opt, scaler, positional)  # so that there is a state
    before, n = everything(model, opt), scaler.record.n_steps
    x, y = batches(1, 16)[0]
    calls = []

    def closure():
        opt.zero_grad()
        calls.append(1)
        loss = loss_of(model, overflowing(x) if len(calls) == 2 else x, y)
        scaler.scale(loss).backward()
        return loss

    answer = scaler.step(opt, closure) if positional else scaler.step(opt, closure=closure)
    scaler.update()
    assert answer is False and len(calls) == 2
    assert_same(everything(model, opt), before)
    assert scaler.skipped == [n] and scaler.get_scale() == 128.0
    _, answers = run_closures(model, opt, scaler, positional)
    assert all(a.isfinite() for a in answers)
    assert vector(model).isfinite().all()


# 12: a scale that collapses


@FLAT
def test_pain_12_the_scale_has_a_floor_and_hopeless_runs_end(flat):
    """torch halves the scale for ever and says nothing. Here: a floor, then an error with names."""
    model = net()
    theirs = GradScaler("cpu", init_scale=4.0)
    train(model, SGD(model.parameters(), lr=0.1), theirs, batches(1) * 40, bad=range(40))
    assert theirs.get_scale() < 1e-9  # the control

    model = net()
    opt = SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    model, opt = with_masters(model, opt, flat_master=flat)
    scaler = LossScaler("cpu", init_scale=4.0, max_skips=5)
    before = everything(model, opt)
    train(model, opt, scaler, batches(1) * 4, bad=range(4))
    with pytest.raises(MixedPrecisionError, match=r"5 steps in a row .*gradients of 0\.weight"):
        train(model, opt, scaler, batches(1), bad=[0])
    assert scaler.scales == [4.0, 2.0, 1.0, 1.0, 1.0] and scaler.get_scale() == 1.0
    assert_same(everything(model, opt), before)
    assert train(model, opt, scaler, batches(3)) == [True] * 3  # and it can go on
    assert vector(model).isfinite().all()


# 23: bits lost by adding in 16 bits


def gradient(model, data, scaler):
    """Return the gradient of the mean loss over `data`, by one backward pass for each part."""
    for x, y in data:
        scaler.scale(loss_of(model, x, y) / len(data)).backward()


def lost_bits(model, reference):
    """Return how far the gradients are from those in fp64, as a part of them."""
    grads = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    return ((grads - reference).norm() / reference.norm()).item()


def wide_net():
    """Return a model without BatchNorm, whose weights are exact in 16 bits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 2))
    for p in model.parameters():
        p.data = (p.data * 32).round() / 32
    return model


def wide_data():
    """Return sixteen micro-batches, exact in 16 bits, whose gradients point the same way."""
    rng = torch.Generator().manual_seed(0)
    x = (torch.randn(16, 8, 32, generator=rng) * 16 + 8).round() / 16
    return [(xi, torch.full((8, 2), 2.0)) for xi in x]


@pytest.mark.parametrize("dtype", [BF16, HALF], ids=str)
@LAYOUTS
def test_pain_23_sixteen_micro_batches_are_as_exact_as_one(dtype, layout):
    """Added in 16 bits they lose bits with each; here the error against fp64 is one batch's."""
    data = wide_data()
    joined = [tuple(map(torch.cat, zip(*data, strict=True)))]
    exact = wide_net().double()
    F.mse_loss(exact(joined[0][0].double()), joined[0][1].double()).backward()
    reference = torch.cat([p.grad.flatten() for p in exact.parameters()])

    pure = wide_net().to(dtype)
    gradient(pure, data, off())
    theirs = lost_bits(pure, reference)

    def ours(data):
        model = wide_net()
        model, opt = with_masters(model, SGD(model.parameters(), lr=1.0), dtype=dtype, **layout)
        scaler = LossScaler("cpu", init_scale=64.0, enabled=dtype == HALF)
        gradient(model, data, scaler)
        scaler.unscale_(opt)
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert {p.grad.dtype for p in model.parameters()} == {FULL}
        return lost_bits(model, reference)

    one = ours(joined)
    assert one > torch.finfo(dtype).eps / 20  # there is something to be lost
    assert ours(data) < one * 1.05
    assert theirs > 1.5 * one  # the control


# 31, 32: penalties, sparse gradients


def penalized(model, opt, scaler, batch, scaled=False):
    """Step on the loss and the squared norm of its gradient; return loss and penalty.

    `scaled` forgets to unscale the gradient.
    """
    opt.zero_grad()
    loss = loss_of(model, *batch)
    params = list(model.parameters())
    grads = torch.autograd.grad(scaler.scale(loss), params, create_graph=True)
    by = 1.0 if scaled else scaler.get_scale()
    penalty = sum((g.float() / by).pow(2).sum() for g in grads)
    scaler.scale(loss + 0.1 * penalty).backward()
    scaler.step(opt)
    scaler.update()
    return loss.item(), penalty.item()


@pytest.mark.parametrize("dtype", [FULL, BF16, HALF], ids=str)
@LAYOUTS
def test_pain_31_gradient_penalty(dtype, layout):
    """The recipe of PyTorch's notes, which a half model's scaler refuses there, gives 32 bits'.

    In float32 bit for bit. A penalty of scaled gradients is off by the scale squared.
    """
    half = smooth_net().half()
    with pytest.raises(ValueError, match="FP16"):
        penalized(half, SGD(half.parameters(), lr=0.1), GradScaler("cpu", 64.0), batches(1)[0])
    full = smooth_net()
    start, opt = vector(full), SGD(full.parameters(), lr=0.02, momentum=0.9)
    other = smooth_net()
    wrong = penalized(
        other, SGD(other.parameters()), GradScaler("cpu", 64.0), batches(1)[0], scaled=True
    )
    theirs = [penalized(full, opt, off(), batch) for batch in batches()]
    assert wrong[1] == pytest.approx(theirs[0][1] * 64.0**2)
    model = smooth_net()
    opt = SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, opt = with_masters(model, opt, dtype=dtype, **layout)
    scaler = LossScaler("cpu", init_scale=64.0)
    ours = [penalized(model, opt, scaler, batch) for batch in batches()]
    if dtype == FULL:
        assert_same([ours, vector(model)], [theirs, vector(full)])
        return
    near = 32 * torch.finfo(dtype).eps
    assert sum(ours, ()) == pytest.approx(sum(theirs, ()), rel=near)
    assert distance(vector(model), vector(full), start) < near
    assert scaler.skipped == []


def table(dtype):
    """Return a sparse embedding of ones."""
    weight = torch.ones(4, 3, dtype=dtype)
    return nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)


def test_pain_32_duplicate_indices_that_overflow_when_summed():
    """torch looks at the parts, which are finite, and steps to inf. Here the sum counts."""
    big = torch.finfo(FULL).max / 2
    model = table(FULL)
    opt, theirs = SGD(model.parameters(), lr=1.0), GradScaler("cpu", init_scale=1.0)
    theirs.scale((model(torch.tensor([1, 1, 1])) * big).sum()).backward()
    theirs.step(opt)
    assert not model.weight.isfinite().all()  # the control
    model = table(FULL)
    opt, plain = SGD(model.parameters(), lr=1.0), LossScaler("cpu", init_scale=1.0)
    plain.scale((model(torch.tensor([1, 1, 1])) * big).sum()).backward()
    assert plain.step(opt) is False and plain.n_skipped == 0
    plain.update()
    assert plain.n_skipped == 1

    model = table(FULL)
    model, opt = with_masters(model, SGD(model.parameters(), lr=1e-5), dtype=HALF)
    scaler = LossScaler("cpu", init_scale=1.0)
    for indices, taken in (([1, 1, 1], False), ([1, 2], True)):
        opt.zero_grad()
        scaler.scale((model(torch.tensor(indices)).float() * 30000.0).sum()).backward()
        assert model.weight.grad.is_sparse
        assert scaler.step(opt) is taken
        scaler.update()
    assert scaler.skipped == [0]
    rows = torch.tensor([1.0, 1.0 - 0.3, 1.0 - 0.3, 1.0])[:, None].expand(4, 3)
    torch.testing.assert_close(model.state_dict()["weight"], rows, rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of Adagrad, by itself
@pytest.mark.parametrize("make", [SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
def test_pain_32_sparse_embeddings_train_as_in_32_bits(make):
    """A half embedding with sparse gradients, duplicates among them, goes the way of 32 bits."""

    def run(model, opt, scaler):
        rng = torch.Generator().manual_seed(0)
        for _ in range(10):
            x = torch.randint(0, 4, (16,), generator=rng)
            opt.zero_grad()
            scaler.scale((model(x).float() - x[:, None]).pow(2).mean()).backward()
            scaler.step(opt)
            scaler.update()
        return model.state_dict()["weight"].clone()

    full = table(FULL)
    theirs = run(full, make(full.parameters(), lr=0.1), off())
    model = table(FULL)
    model, opt = with_masters(model, make(model.parameters(), lr=0.1))
    scaler = LossScaler("cpu", init_scale=256.0)
    ours = run(model, opt, scaler)
    assert model.weight.dtype == HALF and ours.dtype == FULL and scaler.skipped == []
    assert distance(ours, theirs, torch.ones(4, 3)) < 0.01
    model = table(FULL)
    with pytest.raises(MixedPrecisionError, match="sparse"):
        with_masters(model, SGD(model.parameters(), lr=0.1), flat_master=True)


# 39, 40: skipped steps; gradients taken up during the backward pass


@pytest.mark.parametrize("make", [SGD, Adam, AdamW])
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@LAYOUTS
def test_pain_39_a_skipped_step_moves_nothing(make, fused, layout):
    """torch: the overflowed forward pass has poisoned BatchNorm for good, and EMAs are not told.

    Here parameters, masters, moments, step counts, statistics, and an EMA that follows `step()`'s
    answer (fused: the record's) have the bits of before. Then the loop goes the way of 32 bits.
    """
    data, bad = batches(6), 3
    more = dict(momentum=0.9) if make is SGD else {}

    model = net()
    theirs = GradScaler("cpu")
    train(model, make(model.parameters(), lr=0.02, **more), theirs, data[:1], bad=[0])
    assert not model[1].running_mean.isfinite().all()  # the control

    model = net()
    inner = make(model.parameters(), lr=0.02, weight_decay=0.1, fused=fused, **more)
    model, opt = with_masters(model, inner, **layout)
    twin = opt.float_model()
    ema = AveragedModel(twin, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    scaler = LossScaler("cpu", init_scale=512.0)
    for i, batch in enumerate(data):
        before = everything(model, opt), state_of([ema]), scaler.n_skipped
        (answer,) = train(model, opt, scaler, [batch], bad=[0] if i == bad else [])
        taken = scaler.n_skipped == before[2] if fused else answer
        if taken:
            ema.update_parameters(twin)
        else:
            assert_same(everything(model, opt), before[0])
            assert_same(state_of([ema]), before[1])
    assert scaler.skipped == [bad] and int(ema.n_averaged) == 5

    full = net()
    opt = make(full.parameters(), lr=0.02, weight_decay=0.1, **more)
    train(full, opt, off(), data[:bad] + data[bad + 1 :])
    assert distance(vector(model), vector(full), vector(net())) < 0.02
    for k in ("running_mean", "running_var"):
        ours, theirs = getattr(model[1], k), getattr(full[1], k)
        torch.testing.assert_close(ours, theirs, rtol=0.01, atol=0.01)
    assert_same(model[1].num_batches_tracked, torch.tensor(5))


def accumulate(model, opt, scaler, data, parts, clip=None, bad=()):
    """Step on every `parts` micro-batches; return what `step` answered each time."""
    answers = []
    for i, (x, y) in enumerate(data):
        loss = loss_of(model, overflowing(x) if i in bad else x, y) / parts
        scaler.scale(loss).backward()
        if (i + 1) % parts == 0:
            if clip is not None:
                scaler.unscale_(opt)
                clip_grad_norm_(model.parameters(), clip)
            answers.append(scaler.step(opt))
            scaler.update()
            opt.zero_grad()
    return answers


def test_pain_40_a_step_in_the_backward_pass_cannot_clip():
    """The control: where each parameter is stepped as its gradient comes, clipping is too late."""

    def run(clip):
        model = net()
        for p in model.parameters():
            opt = SGD([p], lr=0.1)
            p.register_post_accumulate_grad_hook(lambda p, opt=opt: opt.step() or opt.zero_grad())
        for x, y in batches():
            loss_of(model, x, y).backward()
            if clip:
                clip_grad_norm_(model.parameters(), 0.1)
        return vector(model)

    assert_same(run(True), run(False))


@pytest.mark.parametrize("make", [SGD, AdamW])
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_pain_40_streaming_keeps_clipping_accumulation_and_scaler(dtype, make):
    """`stream=True` gives the bits of without it, and what 32 bits give, within rounding."""
    data = batches(16)
    bad = [5] if dtype == HALF else []  # in the second of four steps

    def run(**layout):
        model = net()
        opt = make(model.parameters(), lr=0.05, weight_decay=0.1)
        model, opt = with_masters(model, opt, dtype=dtype, **layout)
        scaler = LossScaler("cpu", init_scale=512.0, enabled=dtype == HALF)
        answers = accumulate(model, opt, scaler, data, 4, clip=0.25, bad=bad)
        if bad:
            assert answers == [True, False, True, True]
        return everything(model, opt), masters(opt).sort().values, vector(model)

    plain, stream = run(), run(flat_master=True, stream=True)
    assert_same(stream, plain)
    full = net()
    opt = make(full.parameters(), lr=0.05, weight_decay=0.1)
    accumulate(full, opt, off(), data[:4] + data[4 + 4 * len(bad) :], 4, clip=0.25)
    assert distance(plain[2], vector(full), vector(net())) < (0.02 if dtype == HALF else 0.1)


def test_pain_40_streaming_leaves_no_16_bit_gradient():
    """Right after the backward pass, before anybody asks, each gradient is its vector's part."""
    model = net()
    opt = SGD(model.parameters(), lr=0.05)
    model, opt = with_masters(model, opt, flat_master=True, stream=True)
    opt.zero_grad()
    loss_of(model, *batches(1)[0]).backward()  # no vectors yet: they are made at the first look
    vectors = {p.grad.data_ptr() for g in opt.param_groups for p in g["params"]}
    opt.zero_grad()
    loss_of(model, *batches(1)[0]).backward()
    assert {p.grad.dtype for p in model.parameters()} == {FULL}
    assert {p.grad._base.data_ptr() for p in model.parameters()} == vectors


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_pain_41_weights_that_arrive_in_16_bits_are_counted(dtype, caplog):
    """The file's dtype does not decide in silence: masters and moments in float32, one notice."""
    inside.forget_notices()
    model = net().to(dtype)
    model, opt = with_masters(model, torch.optim.Adam(model.parameters()), dtype=dtype)
    loss_of(model, *batches(1)[0]).backward()
    opt.step()
    held = [t for s in opt.state.values() for t in s.values() if torch.is_tensor(t)]
    assert {t.dtype for t in held} == {FULL} == {p.dtype for p in opt.param_groups[0]["params"]}
    n = sum(p.numel() for p in model.parameters())
    said = [r.getMessage() for r in caplog.records if "rounded values" in r.getMessage()]
    assert len(said) == 1 and f"({n:,} in all)" in said[0] and str(dtype) in said[0]


def test_pain_50_a_run_that_goes_on_from_16_bits_says_so(caplog):
    """A file in 16 bits loads, and a notice says what it lacks; one in 32 loads without a word."""
    model = net()
    model, _ = with_masters(model, SGD(model.parameters(), lr=0.1), dtype=torch.bfloat16)
    full = {k: v.clone() for k, v in model.state_dict().items()}
    for file in (full, {k: v.bfloat16() if v.is_floating_point() else v for k, v in full.items()}):
        inside.forget_notices()
        caplog.clear()
        model.load_state_dict(file)
        said = [r.getMessage() for r in caplog.records]
        assert ["bfloat16 in what is loaded" in text for text in said] == [True] * (
            file is not full
        )
        assert_same(dict(model.state_dict()), {k: v.to(full[k].dtype) for k, v in file.items()})


# The defects X1 to X3 of `torch.amp.GradScaler`


def one_weight():
    """Return a module with a single weight, 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def push(scaler, opt, p, value):
    """Step on a gradient of `value`; return the answer."""
    opt.zero_grad()
    scaler.scale((p.float() * value).sum()).backward()
    answer = scaler.step(opt)
    scaler.update()
    return answer


def test_defect_x1_a_scale_of_zero():
    """torch: after enough overflows the scale is 0, and a healthy batch makes the weights nan.

    Here the scale stays at 1 or above, and the healthy batch is an ordinary step.
    """
    model = one_weight()
    opt, theirs = SGD(model.parameters(), lr=0.25), GradScaler("cpu", init_scale=2.0**10)
    for _ in range(170):
        push(theirs, opt, model.weight, math.inf)
    assert theirs.get_scale() == 0.0 and model.weight.item() == 1.0
    push(theirs, opt, model.weight, 1.0)
    assert model.weight.isnan().all()  # the control

    model = one_weight()
    model, opt = with_masters(model, SGD(model.parameters(), lr=0.25))
    scaler = LossScaler("cpu", init_scale=2.0**10, max_skips=1000)
    for _ in range(170):
        assert push(scaler, opt, model.weight, math.inf) is False
    assert scaler.get_scale() == 1.0 and min(scaler.scales) == 1.0
    assert push(scaler, opt, model.weight, 1.0) is True
    assert_same(model.weight.detach(), torch.tensor([[0.75]]).half())


def step_with_closure(scaler, positional=True, masters=False, first=False):
    """Step a weight of 1 on a closure whose gradient is 1; return weight and answer.

    `first`: call it before, too, since torch wants gradients to check.
    """
    model = one_weight()
    opt = SGD(model.parameters(), lr=0.25)
    if masters:
        model, opt = with_masters(model, opt)

    def closure():
        opt.zero_grad()
        loss = model(torch.ones(1, 1, dtype=model.weight.dtype)).float().sum()
        scaler.scale(loss).backward()
        return loss

    if first:
        closure()
    answer = scaler.step(opt, closure) if positional else scaler.step(opt, closure=closure)
    return model.weight.item(), answer


@pytest.mark.parametrize("masters", [False, True], ids=["fp32", "fp16"])
@POSITIONAL
def test_defect_x2_a_closure_is_never_run_scaled(positional, masters):
    """torch: a positional closure's gradients are stepped as they are, scaled.

    Here they are unscaled, for a plain 32-bit optimizer as for masters.
    """

    weight, _ = step_with_closure(GradScaler("cpu", init_scale=8.0), first=True)
    assert weight == 1.0 - 0.25 * 8  # the control: it should be 0.75
    scaler = LossScaler("cpu", init_scale=8.0)
    weight, loss = step_with_closure(scaler, positional, masters)
    assert weight == 0.75 and loss.item() == 1.0


def updates_for_each(make, masters, bad=None):
    """Step two optimizers on one loss, each step followed by an update; return weights, scale."""
    model = nn.ModuleList([one_weight(), one_weight()])
    opts = [SGD(m.parameters(), lr=0.25) for m in model]
    if masters:
        model, *opts = with_masters(model, *opts)
    scaler = make("cpu", init_scale=4.0, growth_interval=1)
    values = [math.inf if i == bad else 1.0 for i in range(2)]
    loss = sum((m.weight.float() * v).sum() for m, v in zip(model, values, strict=True))
    scaler.scale(loss).backward()
    for opt in opts:
        scaler.step(opt)
        scaler.update()
    return [m.weight.item() for m in model], scaler


@pytest.mark.parametrize("masters", [False, True], ids=["fp32", "fp16"])
def test_defect_x3_an_update_for_each_optimizer(masters):
    """torch: the first update doubles the scale, and the second gradient comes out half.

    Here both are unscaled by what their backward pass was scaled by; one iteration, one growth.
    """
    weights, theirs = updates_for_each(GradScaler, False)
    assert weights == [0.75, 0.875] and theirs.get_scale() == 16.0  # the control
    weights, scaler = updates_for_each(LossScaler, masters)
    assert weights == [0.75, 0.75]
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("bad", [0, 1])
def test_pain_10_an_update_for_each_optimizer_over_an_overflow(bad):
    """Whichever of the two overflows, the other takes its true step, and the scale backs off."""
    weights, scaler = updates_for_each(LossScaler, True, bad)
    assert weights == [1.0 if i == bad else 0.75 for i in range(2)]
    assert scaler.get_scale() <= 4.0


# How often the host waits for the device


class Waits(TorchDispatchMode):
    """Counts the numbers that are read from tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count and go on."""
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def count_waits(model, opt, scaler, data, **kwargs):
    """Return how many numbers are read in each step."""
    counts = []
    for batch in data:
        with Waits() as waits:
            train(model, opt, scaler, [batch], **kwargs)
        counts.append(waits.count)
    return counts


def test_waits_are_counted():
    """PyTorch's own scaler waits once a step: the count can fail."""
    model = net()
    opt, theirs = SGD(model.parameters(), lr=0.1, foreach=True), GradScaler("cpu")
    assert count_waits(model, opt, theirs, batches(3)) == [1, 1, 1]


@pytest.mark.parametrize("fused, allowed", [(False, 1), (True, 0)], ids=["foreach", "fused"])
@LAYOUTS
def test_a_step_waits_for_the_device_at_most_once(fused, allowed, layout):
    """One number a step where the host decides, none where a fused optimizer does."""
    model = net()
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused, foreach=not fused)
    model, opt = with_masters(model, opt, **layout)
    scaler = LossScaler("cpu", init_scale=512.0)
    train(model, opt, scaler, batches(2))
    assert count_waits(model, opt, scaler, batches()) == [allowed] * 6
    assert scaler.record.n_steps == 8
