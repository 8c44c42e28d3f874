"""Faults found in the step of large vectors and in the trial of optimizers, by their numbers."""

import copy
import os
import pathlib
import shutil
import subprocess
import sys
import time
import warnings
from functools import partial

import fastai.optimizer
import inside
import pytest
import torch
from tiny import make_learner
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import mixedfp
from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.step import MixedStep, check_elementwise
from mixedfp.testing import assert_same

optim = torch.optim
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler"
)


@pytest.fixture
def small_is_large(monkeypatch):
    """Have vectors of any size stepped in one pass, in chunks of some hundred elements."""
    inside.everything_is_large(monkeypatch, chunk=700)


def net():
    """Make a small model with biases."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 70), nn.ReLU(), nn.Linear(70, 40), nn.Linear(40, 2))


def mixed_step(dtype=torch.bfloat16, flat=True, compiled=False, scale=None, **kwargs):
    """Make a step; flat, its gradients are deferred."""
    scaler = LossScaler(init_scale=scale or 1.0, enabled=scale is not None)
    mixed = MixedStep(dtype, flat_master=flat, scaler=scaler, compiled=compiled, **kwargs)
    inside.be_exclusive(mixed, flat)
    return mixed


def batch(mixed, model, i, opt=None, after_unscale=None, factor=1.0):
    """Train on batch number `i`; return whether it was stepped."""
    rng = torch.Generator().manual_seed(i)
    x = torch.randn(16, 12, generator=rng)
    y = torch.randint(0, 2, (16,), generator=rng)
    loss = nn.functional.cross_entropy(
        mixed.uncast(model(mixed.cast(x, training=True))).float(), y
    )
    mixed.scale(factor * loss).backward()
    is_good = mixed.unscale()
    if after_unscale is not None:
        after_unscale()
    mixed.step() if is_good else mixed.skip()
    mixed.update()
    (opt or mixed.opt).zero_grad()
    return is_good


def train(mixed, make, n_steps=5, model=None):
    """Train a model for some steps; return it and its optimizer."""
    model = net() if model is None else model
    mixed.attach(model)
    opt = mixed.wrap_optimizer(make(list(model.parameters())))
    for i in range(n_steps):
        batch(mixed, model, i)
    return model, opt


def ends(model, opt):
    """Return what training changes."""
    return {"model": dict(model.state_dict()), "opt": opt.state_dict()["state"]}


# 2.1, 2.2: names of states


class Named(optim.Optimizer):
    """Momentum, in a state of any name."""

    def __init__(self, params, name, lr=0.05):
        self.name = name
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        """Step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault(self.name, torch.zeros_like(p))
                    m.mul_(0.9).add_(p.grad)
                    p.add_(m, alpha=-group["lr"])


NAMES = [
    "g", "t0", "r0", "s0", "x1", "x2", "out", "found", "numbers", "inv_scale", "torch", "p", "grad",
    "update", "lambda", "a b", "1", "", "x=__import__('os').abort()", ("a", 1), 7,
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_2_02_states_of_any_name_in_chunks(name, small_is_large):
    """The bits are those of masters for each parameter."""
    make = partial(Named, name=name)
    one = train(mixed_step(), make)
    assert one[1].update_paths().keys() == {"in chunks"}
    assert_same(ends(*one)["model"], ends(*train(mixed_step(flat=False), make))["model"])


@needs_compiler
@pytest.mark.parametrize("name", ["g", "t0", "r0", "p", "x=__import__('os').abort()"])
def test_2_02_states_of_any_name_compiled(name, small_is_large):
    """Nothing that is computed on the way is mistaken for a state; the path is the compiled one."""
    make = partial(Named, name=name)
    one = train(mixed_step(compiled=True), make)
    assert one[1].update_paths().keys() == {"compiled"}
    other = train(mixed_step(flat=False), make)
    for k, w in other[0].state_dict().items():
        torch.testing.assert_close(one[0].state_dict()[k], w, rtol=2**-20, atol=2**-22)


@needs_compiler
def test_2_01_names_from_a_file_are_not_run(tmp_path, small_is_large):
    """A file that loads with `weights_only=True`; the name of a state holds a program."""
    marker = tmp_path / "was_run"
    mixed = mixed_step(compiled=True)
    model, opt = train(mixed, partial(optim.Adam, lr=0.01), 2)
    state = opt.state_dict()
    for s in state["state"].values():
        s[f"x=open({str(marker)!r}, 'w')"] = torch.zeros_like(s["exp_avg"])
    torch.save(state, tmp_path / "opt.pth")
    opt.load_state_dict(torch.load(tmp_path / "opt.pth", weights_only=True))
    for i in range(3):
        batch(mixed, model, i)
    assert opt.update_paths().keys() == {"compiled"}
    assert not marker.exists()


def test_2_01_no_source_text_is_made_anywhere():
    """No module of the package runs text."""
    for path in pathlib.Path(mixedfp.__file__).parent.glob("**/*.py"):
        text = path.read_text()
        for call in ("exec(", "eval(", "compile(text", "__import__("):
            assert f" {call}" not in text.replace("=", " "), (path.name, call)


@needs_compiler
def test_2_01_one_graph_whatever_the_rates(small_is_large):
    """As many functions as ways to be called, and none is compiled anew as rates move."""
    from torch._dynamo.utils import counters

    mixed, model = mixed_step(compiled=True, scale=4.0), net()
    mixed.attach(model)
    opt = mixed.wrap_optimizer(optim.AdamW(model.parameters(), lr=0.01))
    seen = []
    for i in range(12):
        opt.param_groups[0]["lr"] = 0.01 / (i + 1)
        opt.param_groups[0]["weight_decay"] = 0.01 * (i + 1)
        batch(mixed, model, i)
        seen.append((inside.n_compiled(opt), counters["stats"]["unique_graphs"]))
    assert seen[0][0] == 0
    assert len({n for n, _ in seen[2:]}) == len({n for _, n in seen[2:]}) == 1


# 1.5: what the import of the compiler logs


QUIET = """
import sys, torch
import inside, pytest
from torch import nn
from mixedfp.step import MixedStep
assert "torch._inductor" not in sys.modules
inside.everything_is_large(pytest.MonkeyPatch())
inside.pays_after(pytest.MonkeyPatch(), 1)
model = nn.Linear(9, 9, bias=False)
mixed = MixedStep(torch.bfloat16, flat_master=True)
inside.be_exclusive(mixed)
mixed.attach(model)
opt = mixed.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for i in range(2):
    mixed.scale(model.weight.float().sum()).backward()
    mixed.unscale()
    mixed.step()
    mixed.update()
    opt.zero_grad()
    assert ("torch._inductor.compile_fx" in sys.modules) == (i == 1)  # not before it pays
assert opt.update_paths() == {"compiled": 81}, opt.update_paths()
import logging
logging.getLogger("torch.utils.cpp_extension").warning("something else")
"""


@needs_compiler
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is logged")
def test_1_05_nothing_is_logged_where_there_is_no_gpu(tmp_path):
    """Compiling begins when it pays, and says one line, ours; other warnings are heard."""
    env = os.environ | {"CUDA_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", QUIET], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and len(done.stderr.splitlines()) == 2, done.stderr + done.stdout
    assert "is compiled from here on" in done.stderr and "something else" in done.stderr


# 2.3: which optimizers may step a vector


class Own(optim.Optimizer):
    """An optimizer of the kind that a test wants to see found out; `kind` names it."""

    def __init__(self, params, kind, lr=0.05):
        self.kind = kind
        super().__init__(params, dict(lr=lr, scaled=False))

    @torch.no_grad()
    def step(self):
        """Step as `kind` says."""
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    update = getattr(self, f"_{self.kind}")(p, p.grad, self.state[p], group)
                    p.sub_(group["lr"] * update)

    def _late(self, p, g, state, group):  # AdaShift: nothing at all for ten steps
        state["gs"] = [*state.get("gs", []), g.clone()][-11:]
        return g / g.abs().max() if len(state["gs"]) > 10 else torch.zeros_like(g)

    def _warm(self, p, g, state, group):  # AdaGC: by the norm after a hundred steps
        return g / g.norm() if group["count"] > 100 else g

    def _shrinking(self, p, g, state, group):  # AdaNorm: where the norm is below its average
        n = state["n"] = 0.9 * state.get("n", 0) + 0.1 * g.norm().item()
        return g * n / g.norm() if n > g.norm() else g

    def _across(self, p, g, state, group):  # AdamP, SGDP: without the part along the weights
        if p.ndim < 2:
            return g
        rows, gs = p.flatten(1), g.flatten(1)
        m = state["m"] = 0.5 * state.get("m", 0) + gs
        if torch.cosine_similarity(gs, rows, dim=1).abs().max() < 0.01:
            rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-20)
            return (m - (m * rows).sum(1, keepdim=True) * rows).view_as(p)
        return m.view_as(p)

    def _by_group(self, p, g, state, group):  # a second group with LARS's trust
        return g * p.norm() / g.norm().clamp_min(1e-9) if group["scaled"] else g

    def _of_all(self, p, g, state, group):  # Prodigy: one number of all gradients
        total = sum(q.grad.abs().sum() for q in group["params"] if q.grad is not None)
        return g / (1e-9 + total)

    def _kept(self, p, g, state, group):  # SWATS: a number that will matter later
        state["scaling"] = g.dot(g) if g.ndim == 1 else (g * g).sum()
        return g

    def _many_dimensions(self, p, g, state, group):  # gradient centralization of convolutions
        return g - g.mean(tuple(range(1, g.ndim)), keepdim=True) if g.ndim > 3 else g

    def _never(self, p, g, state, group):
        return torch.zeros_like(g)

    def _raises(self, p, g, state, group):
        if p.ndim < 2:
            raise ValueError("matrices are wanted")
        return g

    def _random(self, p, g, state, group):
        return g + torch.randn_like(g)

    def _plain(self, p, g, state, group):
        return g


def two_groups(kind):
    """Return an optimizer with two groups, of which the second is scaled."""
    opt = Own([nn.Parameter(torch.ones(3, 3))], kind)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(3))], "scaled": True})
    return opt


REASONS = {
    "late": "step 11 of a trial.*random", "warm": "trial", "shrinking": "trial",
    "across": "trial", "by_group": "step 1 of a trial of group 1",
    "of_all": "trial", "kept": "keeps a 'scaling'", "many_dimensions": "trial",
    "never": "moved no weight", "raises": "ValueError: matrices are wanted", "random": "trial",
}  # fmt: skip


@pytest.mark.parametrize("kind", REASONS)
def test_2_03_what_looks_at_a_whole_layer_is_refused_with_its_reason(kind):
    """Also where it does so now and then, late, or in its second group; nothing else changes."""
    opt, state = two_groups(kind), torch.random.get_rng_state()
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(MixedPrecisionError, match=f"{REASONS[kind]}.*flat_master=False"):
        check_elementwise(opt)
    assert opt.state_dict() == before
    assert_same(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    "make",
    [
        lambda: two_groups("plain"),
        lambda: optim.AdamW([nn.Parameter(torch.ones(2))], fused=True),
        lambda: optim.Adagrad([nn.Parameter(torch.ones(2))]),
        lambda: optim.Rprop([nn.Parameter(torch.ones(2))]),
        lambda: optim.ASGD([nn.Parameter(torch.ones(2))]),
        lambda: fastai.optimizer.ranger([nn.Parameter(torch.ones(2))], lr=0.1),
        lambda: FilledWhenMade([nn.Parameter(torch.ones(2, 2))]),
    ],
)
def test_2_03_what_does_not_is_taken_and_soon(make):
    """A trial is a matter of milliseconds."""
    opt = make()
    state, start = torch.random.get_rng_state(), time.process_time()
    check_elementwise(opt)
    assert time.process_time() - start < 0.5
    assert_same(torch.random.get_rng_state(), state)


class FilledWhenMade(optim.Optimizer):
    """Adagrad as torch 2.10 has it: its state is there before the first step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"sum": torch.full_like(p, 0.5), "first": p.detach().clone()}

    @torch.no_grad()
    def step(self):
        """Step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["sum"].addcmul_(p.grad, p.grad)
                    p.addcdiv_(p.grad, self.state[p]["sum"].sqrt(), value=-group["lr"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_1_01_a_state_made_with_the_optimizer_is_flat_as_well(dtype, small_is_large):
    """In chunks or whole: the bits of masters for each parameter."""
    one = train(mixed_step(dtype), FilledWhenMade)
    other = train(mixed_step(dtype, flat=False), FilledWhenMade)
    assert_same(ends(*one), ends(*other))


def test_2_03_an_optimizer_inside_another_is_not_stepped_by_the_trial():
    """The one inside holds the model's own parameters."""

    class Outer(optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)
            self.inner = optim.SGD(self.param_groups, lr=0.1)

        def step(self):
            self.inner.step()

    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises(MixedPrecisionError, match="another optimizer .SGD."):
        check_elementwise(Outer([p]))
    assert_same(p.detach(), torch.ones(3))


def test_2_03_hooks_on_all_optimizers_do_not_see_the_trial():
    """`register_optimizer_step_pre_hook` is asked for steps of the user's optimizers."""
    seen = []
    hook = register_optimizer_step_pre_hook(lambda *_: seen.append(1))
    try:
        check_elementwise(optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    finally:
        hook.remove()
    assert not seen


# 2.8: fused optimizers that are skipped in the step that makes their states


@pytest.fixture
def memory_is_nan():
    """Have torch fill memory without values with nan."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


FUSED = {
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
    "nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "no momentum": partial(optim.SGD, lr=0.1, fused=True),
    "adam": partial(optim.Adam, lr=0.1, amsgrad=True, fused=True),
    "adagrad": partial(optim.Adagrad, lr=0.1, fused=True),
}


def fused_steps(make, scaler, overflows, wrap=False, unscale=False):
    """Step on known gradients, some of which overflow; return the weights and the state."""
    p = nn.Parameter(torch.ones(5))
    opt = make([p])
    if wrap:
        module = nn.Module()
        module.p = p
        _, opt = with_masters(module, opt, dtype=torch.float32)
    for i in range(4):
        scaler.scale((p * (i + 1) * (torch.inf if i in overflows else 1)).sum()).backward()
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return p.detach().clone(), list(opt.state_dict()["state"].values())


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_2_08_a_fused_first_step_that_is_skipped_is_none(name, wrap, unscale, memory_is_nan):
    """Weights and state are those of a run on the steps that did not overflow."""
    found, state = fused_steps(FUSED[name], LossScaler("cpu", 16.0), {0, 2}, wrap, unscale)
    opt = FUSED[name]([nn.Parameter(torch.ones(5))])
    (p,) = opt.param_groups[0]["params"]
    for i in (1, 3):
        p.grad = torch.full((5,), i + 1.0)
        opt.step()
    assert_same(found, p.detach())
    assert_same(state, list(opt.state_dict()["state"].values()))


def test_2_08_under_torchs_own_scaler(memory_is_nan):
    """Masters see to it themselves: `torch.amp.GradScaler` hands such a step over."""
    scaler = torch.amp.GradScaler("cpu", 16.0)
    found, _ = fused_steps(FUSED["momentum"], scaler, {0, 2}, wrap=True)
    assert found.isfinite().all()
    assert_same(found, fused_steps(FUSED["momentum"], LossScaler("cpu", 16.0), {0, 2})[0])


def test_2_08_later_steps_are_decided_on_the_device(monkeypatch):
    """And all of an optimizer whose states begin at 0, or that has none: nothing is read."""
    read = []
    look = LossScaler.found_nonfinite
    monkeypatch.setattr(
        LossScaler, "found_nonfinite", lambda self, opt: read.append(1) or look(self, opt)
    )
    fused_steps(FUSED["momentum"], LossScaler("cpu", 16.0), {2})
    assert len(read) == 1
    for makes_none in ("adam", "no momentum"):
        fused_steps(FUSED[makes_none], LossScaler("cpu", 16.0), {0, 2})
    assert len(read) == 1


def test_2_08_momentum_that_comes_later(memory_is_nan):
    """A schedule raises it from 0 in a step that overflows."""

    def make(params):
        opt = optim.SGD(params, lr=0.1, momentum=0.0, fused=True)
        own = opt.zero_grad

        def zero_grad():
            own()
            opt.param_groups[0]["momentum"] = 0.9

        opt.zero_grad = zero_grad
        return opt

    weights, _ = fused_steps(make, LossScaler("cpu", 16.0), {1})
    assert weights.isfinite().all()


# counts that an optimizer keeps in its groups, in itself, or beside its parameters


class Counting(optim.Optimizer):
    """Adam's correction of its bias, with the count in the group or in the optimizer."""

    def __init__(self, params, where="group", lr=0.05):
        self.where, self.count, self.table = where, 0, {}
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        """Step."""
        self.count += 1
        self.table["count"] = self.table.get("count", 0) + 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["in place"] = group.get("in place", torch.zeros(())).add_(1)
            n = {
                "group": group["count"], "self": self.count, "table": self.table["count"],
                "in place": group["in place"].item(),
            }[self.where]  # fmt: skip
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    m.mul_(0.9).add_(p.grad, alpha=0.1)
                    p.sub_(m, alpha=group["lr"] / (1 - 0.9**n))


@pytest.mark.parametrize("where", ["group", "self", "table", "in place"])
@pytest.mark.parametrize("large", [1, 1000], ids=["all in one pass", "some"])
def test_2_03_counts_beside_the_states_go_on(where, large, small_is_large, monkeypatch):
    """In one pass a copy of the optimizer counts: the optimizer is to have counted, and once."""
    make = partial(Counting, where=where)
    inside.large_from(monkeypatch, large)
    one = train(mixed_step(), make)
    assert "in chunks" in one[1].update_paths()
    assert_same(ends(*one), ends(*train(mixed_step(flat=False), make)))
    assert one[1].opt.param_groups[0]["count"] == one[1].opt.count == 5


def test_2_03_counts_of_a_skipped_step_are_taken_back(small_is_large):
    """Also where the device alone knows that it was none."""

    def run(on_device):
        mixed, model = mixed_step(torch.float16, scale=4.0), net()
        inside.decide_on_device(mixed, on_device)
        mixed.attach(model)
        opt = mixed.wrap_optimizer(Counting(model.parameters()))
        for i in range(6):
            batch(mixed, model, i, factor=torch.inf if i in (0, 3) else 1.0)
        return mixed.scaler.skipped, ends(model, opt), opt.opt.param_groups[0]["count"]

    one, other = run(True), run(False)
    assert one[0] == other[0] == [0, 3] and one[2] == other[2] == 4
    assert_same(one[1], other[1])


# 3.6: interrupts


def small_learner(precision="to_fp16"):
    """Make a learner whose vectors are all stepped in one pass."""
    learn = getattr(make_learner("adam"), precision)(flat_master=True)
    learn.fit(1, 0.01)
    return learn


def interrupted(learn, at):
    """Fit until line `at` of the second step; return whether it came to that."""

    def one_step(*args, **kwargs):
        with inside.Interrupt(at):
            return own(*args, **kwargs)

    own = learn.mp_cb.mixed.opt.step
    vars(learn.mp_cb.mixed.opt)["step"] = one_step
    try:
        learn.fit(1, 0.01)
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        vars(learn.mp_cb.mixed.opt).pop("step", None)


@pytest.mark.parametrize("precision", ["to_fp16", "to_bf16"])
@pytest.mark.parametrize("clear", ["model", "some", "nothing"])
def test_3_06_an_interrupted_step_goes_on(clear, precision, small_is_large):
    """At any line: gradients cleared in the model, some of them or none, and fitted on."""
    for at in (1, 10, 40, 90, 150, 230, 330, 470, 700, 900):
        learn = small_learner(precision)
        if not interrupted(learn, at):
            assert at > 400
            break
        params = list(learn.model.parameters())
        for p in params if clear == "model" else params[:1] if clear == "some" else []:
            p.grad = None
        learn.fit(1, 0.01)
        state = learn.model.state_dict()
        assert all(w.isfinite().all() for w in state.values())
        assert learn.opt.state_dict()["state"]
        for k, p in learn.model.named_parameters():
            assert_same(p.detach(), state[k].to(p.dtype))


def test_3_06_gradients_after_an_interrupt_are_the_true_ones(small_is_large):
    """Those that were to wait are unscaled; those that came in their place are left alone."""
    mixed, model = mixed_step(torch.float16, scale=512.0), net()
    mixed.attach(model)
    opt = mixed.wrap_optimizer(optim.SGD(model.parameters(), lr=0.1))
    batch(mixed, model, 0)

    def interrupt():
        waiting.update({k: p.grad.clone() for k, p in model.named_parameters()})
        raise KeyboardInterrupt

    waiting = {}
    with pytest.raises(KeyboardInterrupt):
        batch(mixed, model, 1, after_unscale=interrupt)
    assert waiting["0.weight"].dtype == torch.float16
    model[0].weight.grad = torch.ones_like(waiting["0.weight"])
    model[1 + 1].bias.grad = None
    opt.state_dict()
    assert_same(model[0].weight.grad.float(), torch.ones(70, 12))
    assert model[2].bias.grad is None
    assert_same(model[3].weight.grad, waiting["3.weight"].float() / 512)


@pytest.mark.parametrize("large", [False, True], ids=["whole", "one pass"])
def test_after_a_step_gradients_of_ones_own_are_stepped(large, monkeypatch):
    """Only until then does nobody else look: what is put there after it is what steps next."""
    if large:
        inside.everything_is_large(monkeypatch)
    mixed, model = mixed_step(torch.float32, scale=8.0), net()
    mixed.attach(model)
    opt = mixed.wrap_optimizer(optim.SGD(model.parameters(), lr=1.0))
    inside.be_exclusive(mixed)
    mixed.scale(model(torch.ones(2, 12)).sum()).backward()
    assert mixed.unscale()
    mixed.step()
    mixed.update()
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    opt.step()
    assert_same([p.detach() for p in model.parameters()], [p - 2 for p in before])


@pytest.mark.parametrize("exclusive", [False, True])
def test_gradients_of_ones_own_are_cleared_to_zeros(exclusive):
    """Put there after the masters had taken others: zeros are zeros for these as well."""
    mixed, model = mixed_step(torch.float32), net()
    mixed.attach(model)
    opt = mixed.wrap_optimizer(optim.SGD(model.parameters(), lr=1.0))
    inside.be_exclusive(mixed, exclusive)
    mixed.scale(model(torch.ones(2, 12)).sum()).backward()
    assert mixed.unscale()
    mixed.step()
    mixed.update()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.zero_grad(set_to_none=False)
    for p in model.parameters():
        assert_same(p.grad, torch.zeros_like(p))


def test_gradients_of_layers_that_were_not_stepped_are_cleared_as_well(small_is_large):
    """A batch reaches a layer for the first time and is called off: its zeros are zeros."""
    mixed, model = mixed_step(), nn.ModuleDict(dict(a=nn.Linear(12, 2), b=nn.Linear(12, 2)))
    mixed.attach(model)
    opt = mixed.wrap_optimizer(optim.SGD(model.parameters(), lr=1.0))
    x = torch.ones(2, 12, dtype=torch.bfloat16)
    for names in ("a", "ab"):
        mixed.scale(sum(model[k](x).sum() for k in names).float()).backward()
        if names == "a":
            assert mixed.unscale()
            mixed.step()
            mixed.update()
        opt.zero_grad(set_to_none=False)
    for p in model["b"].parameters():
        assert_same(p.grad.float(), torch.zeros(p.shape))


# 3.7: layers used in turn


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("large", [1, 2**60], ids=["one pass", "whole"])
def test_3_07_layers_in_turn_take_no_pass_over_the_weights(flat, large, monkeypatch):
    """What the last step gave to a layer is known when its turn comes; what is written, is seen."""
    inside.large_from(monkeypatch, large)
    syncs = inside.count_syncs(monkeypatch)

    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers, self.n = nn.ModuleList(nn.Linear(12, 2) for _ in range(3)), 0

        def forward(self, x):
            self.n += 1
            return self.layers[self.n % 3](x)

    mixed, model = mixed_step(flat=flat), Turns()
    mixed.attach(model)
    mixed.wrap_optimizer(optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    syncs.clear()
    for i in range(20):
        batch(mixed, model, i)
    assert not syncs
    with torch.no_grad():
        model.layers[0].weight.fill_(0.5)  # its turn is the last of the next three
    for i in range(6):
        batch(mixed, model, i)
    assert len(syncs) == 1
    assert (model.state_dict()["layers.0.weight"] - 0.5).abs().max() < 0.45


# 4: strides of what `restore` gives back


@pytest.mark.parametrize("flat", [False, True])
def test_4_restore_gives_back_the_strides(flat):
    """Of convolutions with one channel any stride would do: they have those that they had."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 1, 3), nn.Conv2d(4, 4, 1))
    model.append(nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last))
    model.append(nn.Conv2d(3, 4, (1, 3)).to(memory_format=torch.channels_last))
    model.append(nn.Conv1d(1, 1, 1)).append(nn.Linear(1, 4)).append(nn.Linear(4, 1))
    before = {k: (p.stride(), p.detach().clone()) for k, p in model.named_parameters()}
    masters = inside.MasterParams(model, torch.float16, flat=flat)
    inside.lay_out(masters, [list(model.parameters())])
    masters.restore()
    for k, p in model.named_parameters():
        assert p.stride() == before[k][0]
        assert_same(p.detach(), before[k][1])


# 5: tests that were missing


def test_5_hooks_on_all_optimizers_see_the_whole_step(small_is_large, monkeypatch):
    """Not the small vectors alone: with such a hook the optimizer steps all masters itself."""
    inside.large_from(monkeypatch, 500)
    seen = []
    hooks = []
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        seen.clear()
        hooks.append(register(lambda opt, *_: seen.append(sum(
            p.numel() for group in opt.param_groups for p in group["params"]
        ))))  # fmt: skip
        try:
            model, opt = train(mixed_step(), partial(optim.SGD, lr=0.1))
        finally:
            hooks[-1].remove()
        assert seen == 5 * [inside.in_vectors(model.parameters())]
        assert opt.update_paths().keys() == {"by the optimizer"}
    paths = train(mixed_step(), partial(optim.SGD, lr=0.1))[1].update_paths()
    assert "in chunks" in paths


@pytest.mark.parametrize("flat", [False, True])
def test_5_a_state_dict_from_a_step_hook_holds_the_new_weights(flat):
    """The model has not been given them yet: nothing there is taken for somebody's write."""
    mixed, model = mixed_step(flat=flat), net()
    mixed.attach(model)
    opt = mixed.wrap_optimizer(optim.SGD(model.parameters(), lr=0.5))
    files = []
    opt.opt.register_step_post_hook(lambda *_: files.append(copy.deepcopy(model.state_dict())))
    for i in range(3):
        batch(mixed, model, i)
        assert_same(files[-1], dict(model.state_dict()))


def test_5_schedules_know_that_large_vectors_were_stepped(small_is_large):
    """Where no optimizer's own step was called, no schedule is to warn."""
    mixed, model = mixed_step(), net()
    mixed.attach(model)
    own = optim.SGD(model.parameters(), lr=0.1)
    schedule = optim.lr_scheduler.LambdaLR(own, lambda i: 1 / (i + 1))
    mixed.wrap_optimizer(own)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):
            batch(mixed, model, i)
            schedule.step()
    assert mixed.opt.update_paths().keys() == {"in chunks"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_5_a_buffer_written_in_part_keeps_the_rest_whole(dtype):
    """The written element is as written; all others have the bits from before the cast."""
    model = net()
    model.register_buffer("table", torch.randn(50))
    before = model.table.clone()
    masters = inside.MasterParams(model, dtype)
    model.table[7] = 0.5
    assert_same(model.state_dict()["table"], before.index_fill(0, torch.tensor([7]), 0.5))
    masters.restore()
    assert_same(model.table, before.index_fill(0, torch.tensor([7]), 0.5))
