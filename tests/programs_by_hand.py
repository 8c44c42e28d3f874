"""Random programs of plain PyTorch: a loop written by hand, with `with_masters` and `LossScaler`.

In float32 a program has to give plain PyTorch's bits; in 16 bits flat masters those of a master for
each parameter. Plain PyTorch gets its buffers back after a skipped step: there the library differs
from it on purpose.
"""

import copy
import io
import pickle
from typing import NamedTuple

import torch
from nets import Net
from programs import in_groups, random_groups, random_net
from tiny import plain
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same


class Boom(KeyboardInterrupt):
    """A key is pressed."""


class Opt(NamedTuple):
    """An optimizer of torch.optim, and its settings."""

    name: str = "SGD"
    settings: tuple = ()  # (name, value)


class Program(NamedTuple):
    """What happens, to which network and optimizer."""

    events: tuple = ()
    net: Net = Net()
    opt: Opt = Opt()
    groups: tuple = ((0, 1, 2, 3),)  # of parameters, by their places
    frozen: tuple = ()
    late: tuple = ()  # parameters that `AddGroup` adds
    schedule: str | None = None
    scale: float | None = None  # the first loss scale
    dtype: str = "bfloat16"  # of the second law
    cut: int = 2**18  # numbers in a chunk

    def run(self, dtype=None, flat=False):
        """Return what is seen in a run: plain where `dtype` is None."""
        run = Run(self, dtype, flat)
        for i, event in enumerate(self.events):
            run.n = i
            event.do(run)
        run.end()
        return run.log


class Run:
    """A program under way."""

    def __init__(self, program, dtype, flat):
        self.program, self.dtype, self.flat, self.is_plain = program, dtype, flat, dtype is None
        self.log, self.n, self.saved, self.others, self.scheduler = [], 0, None, [], None
        self.is_unscaled = False
        torch.manual_seed(1)
        self.model = program.net.build()
        for i in program.frozen:
            self.param(i).requires_grad_(False)
        self.held = {i % len(self.params) for group in program.groups for i in group}
        self.opt = self.make_opt()
        self.wrap()
        make = torch.amp.GradScaler if self.is_plain else LossScaler
        scale, enabled = program.scale or 1.0, program.scale is not None
        self.scaler = make("cpu", init_scale=scale, growth_interval=3, enabled=enabled)
        if program.schedule == "step":
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.opt, 2, 0.5)
        elif program.schedule == "one_cycle":
            make = torch.optim.lr_scheduler.OneCycleLR
            cycles = any(k in self.opt.defaults for k in ("momentum", "betas"))
            self.scheduler = make(self.opt, 0.1, total_steps=50, cycle_momentum=cycles)

    def make_opt(self):
        """Return the optimizer; each group has a rate and a decay of its own."""
        name, settings, groups = self.program.opt.name, dict(self.program.opt.settings), []
        for i, params in enumerate(in_groups(self.program.groups, self.params)):
            group = {"params": params}
            if i and settings.get("lr") and name != "LBFGS":
                group["lr"] = settings["lr"] / (i + 1)
                group |= {} if name == "Rprop" else {"weight_decay": 0.125 * i}
            groups.append(group)
        return getattr(torch.optim, name)(groups, **settings)

    def wrap(self):
        """Give the model masters; keep the buffers, which plain PyTorch does not."""
        if not self.is_plain:
            settings = dict(dtype=self.dtype, flat_master=self.flat)
            self.model, self.opt = with_masters(self.model, self.opt, **settings)
        self.keep()

    @property
    def params(self):
        """The model's parameters."""
        return list(self.model.parameters())

    def param(self, i):
        """Return parameter `i`, counted around."""
        return self.params[i % len(self.params)]

    def module(self, i):
        """Return stem, head or one of the layers."""
        modules = [self.model.stem, self.model.head, *self.model.layers]
        return modules[i % len(modules)]

    def see(self, what, value):
        """Remember what is seen."""
        self.log.append({f"{what} at {self.n}": plain(value)})

    def see_all(self):
        """Remember all that training changes, as files and users get it."""
        self.see("model", dict(self.model.state_dict()))
        self.see("optimizer", self.opt.state_dict())
        self.see("trained", [p.requires_grad for p in self.params])
        self.see("scale", self.scaler.get_scale())
        if self.dtype in (torch.float16, torch.bfloat16):
            self.see("half weights", [p.detach() for p in self.params if p.numel()])

    def end(self):
        """Remember how it ended; masters go back into the model as they are."""
        self.see_all()
        for model, opt in self.others:
            self.see("the other model", dict(model.state_dict()))
            self.see("the other optimizer", opt.state_dict())
        if not self.is_plain:
            shown = plain(dict(self.model.state_dict()))
            self.opt.masters.restore()
            assert_same(plain(dict(self.model.state_dict())), shown, name="restored")

    # the iteration: from one step to the next

    def keep(self):
        """Keep the buffers as they are."""
        self.kept = {
            (name, k): plain(b)
            for name, m in self.model.named_modules()
            for k, b in m._buffers.items()
        }

    def undo(self):
        """Put the buffers back."""
        for (name, k), b in self.kept.items():
            self.model.get_submodule(name)._buffers[k] = plain(b)

    def loss(self, seed):
        """Return the loss of a batch."""
        x, y = self.program.net.batch(seed)
        loss = cross_entropy(self.model(x), y)
        self.see("loss", loss)
        return loss

    def step(self, stop=None):
        """Step; a hook of the optimizer may stop it before or after it has done anything."""
        before = self.scaler.get_scale()
        states = {p: dict(state) for p, state in self.opt.state.items()} if self.is_plain else {}
        is_stopped = False
        try:
            self.scaler.step(self.opt)
        except Boom:
            is_stopped = stop == "before"
            self.see("stopped", True)
        self.scaler.update()
        if self.is_plain and self.scaler.get_scale() < before:
            self.undo()
            self.opt.state.clear()  # PyTorch's fused optimizers make states where they skip
            self.opt.state.update(states)
        elif not is_stopped:
            self.keep()
        self.is_unscaled = True

    def rescale(self):
        """Scale gradients that a step has unscaled: plain PyTorch would add scaled ones to them."""
        if self.is_plain and self.is_unscaled:
            for p in (self.params[i] for i in self.held):
                if p.grad is not None:
                    p.grad.mul_(self.scaler.get_scale())
        self.is_unscaled = False


# What happens in an iteration


class Backward(NamedTuple):
    """Compute a loss and its gradients."""

    seed: int = 0
    overflow: bool = False
    stop: str | None = None  # in the "forward" or "backward" pass
    at: int = 0  # the module

    def do(self, run):
        hook = run.module(self.at).register_forward_hook(self.boom) if self.stop else None
        try:
            loss = run.loss(self.seed)
            run.rescale()
            run.scaler.scale(loss * (float("inf") if self.overflow else 1.0)).backward()
        except Boom:
            run.see("stopped", True)
        finally:
            if hook is not None:
                hook.remove()

    def boom(self, module, args, out):
        if self.stop == "forward":
            raise Boom
        if out.requires_grad:
            out.register_hook(_raise)


def _raise(*_):
    raise Boom


class Step(NamedTuple):
    """Unscale, clip, step, and follow the schedule."""

    unscale: bool = False
    clip: str | None = None
    stop: str | None = None  # "before" or "after"

    def do(self, run):
        if run.program.opt.name == "LBFGS":
            return with_closure(run)
        if not any(run.params[i].grad is not None for i in run.held):
            return  # `GradScaler` raises
        if run.is_unscaled and run.program.scale is not None:
            return  # `GradScaler` divides once more what it has divided: ours does not
        if self.unscale or self.clip:
            run.scaler.unscale_(run.opt)
        if self.clip == "norm":
            run.see("norm", nn.utils.clip_grad_norm_(run.params, 0.1))
        elif self.clip == "value":
            nn.utils.clip_grad_value_(run.params, 0.01)
        hook = None
        if self.stop and ("fused", True) not in run.program.opt.settings:
            kinds = run.opt.register_step_pre_hook, run.opt.register_step_post_hook
            hook = kinds[self.stop == "after"](_raise)
        run.step(self.stop)
        if hook is not None:
            hook.remove()
        if run.scheduler is not None:
            run.scheduler.step()


def with_closure(run):
    """Step with a closure."""

    def closure():
        run.opt.zero_grad()
        loss = run.loss(run.n)
        loss.backward()
        return loss

    run.opt.step(closure)
    run.keep()


class Closure(NamedTuple):
    """Step with a closure where nothing is scaled: `GradScaler` takes none."""

    def do(self, run):
        if run.program.scale is None:
            with_closure(run)


class Zero(NamedTuple):
    """Clear the gradients."""

    how: str = "opt"

    def do(self, run):
        if self.how.startswith("opt"):
            run.opt.zero_grad(set_to_none=self.how == "opt")
        elif self.how.startswith("model"):
            run.model.zero_grad(set_to_none=self.how == "model")
        else:
            for p in run.params:
                p.grad = None


class EditGrad(NamedTuple):
    """Write into a gradient, or put another one into its place."""

    i: int = 0
    how: str = "mul_"

    def do(self, run):
        edit_grad(run.param(self.i), self.how)


def edit_grad(p, how):
    """Write into the gradient of `p`."""
    if how == "none":
        p.grad = None
    elif how == "zeros":
        p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
    elif p.grad is not None:
        if how == "mul_":
            p.grad.mul_(0.5)
        elif how == "new":
            p.grad = p.grad * 0.5
        elif how == "data":
            p.grad.data = p.grad.data * 0.5


# What happens at any time


class Look(NamedTuple):
    """Look at everything, or at gradients."""

    grads: bool = False

    def do(self, run):
        run.see("grads", [p.grad for p in run.params]) if self.grads else run.see_all()


class Freeze(NamedTuple):
    """Freeze a parameter, or train it."""

    i: int = 0
    train: bool = False

    def do(self, run):
        run.param(self.i).requires_grad_(self.train)


class Write(NamedTuple):
    """Write into a weight."""

    i: int = 0
    how: str = "copy_"

    def do(self, run):
        write(run.param(self.i), self.i, self.how)
        if self.how == "vector":
            vector_to_parameters(parameters_to_vector(run.params) / 2, run.params)


def write(p, i, how):
    """Write into `p`."""
    new = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) / 2
    with torch.no_grad():
        if how == "copy_":
            p.copy_(new)
        elif how == "mul_":
            p.mul_(0.5)
        elif how == "part":
            p.view(-1)[:1].fill_(0.25)
        elif how == "data":
            p.data = new.to(p.dtype)
        elif how == "init":
            nn.init.uniform_(p, -0.5, 0.5)


class Eval(NamedTuple):
    """Compute without gradients, in the mode for evaluation or for training."""

    train: bool = False

    def do(self, run):
        run.model.train(self.train)
        with torch.no_grad():
            run.loss(50)
        run.model.train()


class Hyper(NamedTuple):
    """Change a rate by hand."""

    factor: float = 0.5

    def do(self, run):
        for group in run.opt.param_groups:
            group["lr"] *= self.factor


class AddGroup(NamedTuple):
    """Have the optimizer train what it has not trained so far."""

    def do(self, run):
        params = [run.param(i) for i in run.program.late]
        if params and len(run.opt.param_groups) == len(run.program.groups):
            run.opt.add_param_group({"params": params, "lr": 0.03125})
            run.held |= {i % len(run.params) for i in run.program.late}


class Save(NamedTuple):
    """Write a checkpoint."""

    def do(self, run):
        file = io.BytesIO()
        torch.save((run.model.state_dict(), run.opt.state_dict(), run.scaler.state_dict()), file)
        run.saved = file.getvalue()


class Load(NamedTuple):
    """Go back to the checkpoint, or to a part of it."""

    model: bool = True
    opt: bool = True
    scaler: bool = True

    def do(self, run):
        if run.saved is None:
            return
        model, opt, scaler = torch.load(io.BytesIO(run.saved), weights_only=True)
        if self.model and model.keys() == run.model.state_dict().keys():
            run.model.load_state_dict(model)
            run.keep()
        if self.opt and len(run.opt.param_groups) == len(opt["param_groups"]):
            run.opt.load_state_dict(opt)
            if self.scaler and run.program.scale is not None:
                run.scaler.load_state_dict(scaler)


class Copy(NamedTuple):
    """Copy model and optimizer together, and go on with the copy or with what was there."""

    how: str = "deepcopy"
    go_on: str = "copy"

    def do(self, run):
        trio = run.model, run.opt, run.scheduler
        if self.how == "deepcopy" or not run.program.net.can_be_pickled:
            model, opt, scheduler = copy.deepcopy(trio)
        else:
            model, opt, scheduler = pickle.loads(pickle.dumps(trio))
        if self.go_on == "copy":
            run.model, run.opt, run.scheduler = model, opt, scheduler
            run.wrap()
        else:
            run.others.append((model, opt))


# Programs made up

ELEMENTWISE = {
    "SGD": [
        (("lr", 0.1),),
        (("lr", 0.1), ("momentum", 0.9)),
        (("lr", 0.1), ("momentum", 0.9), ("nesterov", True), ("weight_decay", 0.25)),
        (("lr", 0.1), ("momentum", 0.5), ("dampening", 0.5), ("maximize", True)),
    ],
    "Adam": [(("lr", 0.01),), (("lr", 0.01), ("amsgrad", True), ("weight_decay", 0.25))],
    "AdamW": [(("lr", 0.01),), (("lr", 0.01), ("weight_decay", 0.5), ("amsgrad", True))],
    "RMSprop": [(("lr", 0.01),), (("lr", 0.01), ("momentum", 0.9), ("centered", True))],
    "Adagrad": [(("lr", 0.1),), (("lr", 0.1), ("initial_accumulator_value", 0.5))],
    "Adadelta": [(("lr", 1.0),)],
    "Adamax": [(("lr", 0.01),)],
    "NAdam": [(("lr", 0.01),), (("lr", 0.01), ("decoupled_weight_decay", True))],
    "RAdam": [(("lr", 0.01),)],
    "ASGD": [(("lr", 0.1),)],
    "Rprop": [(("lr", 0.01),)],
}
OTHERS = {"Adafactor": [(("lr", 0.1),)], "LBFGS": [(("lr", 0.5), ("max_iter", 3))]}
FUSED = "SGD", "Adam", "AdamW", "Adagrad"


def random_opt(rng):
    """Return an optimizer."""
    kinds = OTHERS if rng.random() < 0.1 else ELEMENTWISE
    name = rng.choice(list(kinds))
    settings, kind = rng.choice(kinds[name]), rng.random()
    if kinds is ELEMENTWISE and kind < 0.4:
        is_fused = kind < 0.15 and name in FUSED
        settings = (*settings, ("fused", True) if is_fused else ("foreach", kind < 0.3))
    return Opt(name, settings)


WRITES = ["copy_", "mul_", "part", "data", "vector", "init"]
ZEROS = ["opt", "opt", "opt_zeros", "model", "model_zeros", "none_each"]
EDITS = ["mul_", "new", "none", "zeros", "data"]


def inside(rng):
    """Return something that happens between a backward pass and a step."""
    i = rng.randrange(40)
    return rng.choice([
        lambda: EditGrad(i, rng.choice(EDITS)),
        lambda: EditGrad(i, rng.choice(EDITS)),
        lambda: Look(rng.random() < 0.7),
        lambda: Write(i, rng.choice(WRITES)),
        lambda: Freeze(i, rng.random() < 0.5),
        lambda: Eval(False),
        lambda: Copy(rng.choice(["deepcopy", "pickle"]), "original"),
        lambda: Load(True, rng.random() < 0.5, False),
    ])()  # fmt: skip


def between(rng):
    """Return something that happens between two iterations."""
    i = rng.randrange(40)
    return rng.choice([
        lambda: Freeze(i, False),
        lambda: Freeze(i, True),
        lambda: Write(i, rng.choice(WRITES)),
        lambda: Write(i, rng.choice(WRITES)),
        lambda: Eval(rng.random() < 0.5),
        lambda: Look(rng.random() < 0.3),
        lambda: Hyper(rng.choice([0.5, 2.0])),
        lambda: AddGroup(),
        lambda: Save(),
        lambda: Load(*rng.choice([(True, True), (True, True), (True, False), (False, True)])),
        lambda: Copy(rng.choice(["deepcopy", "pickle"]), rng.choice(["copy", "original"])),
        lambda: Zero(rng.choice(ZEROS)),
    ])()  # fmt: skip


def iteration(rng, scaled):
    """Return the events of an iteration, and what comes after it."""
    events = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        stop = rng.choice(["forward", "backward"]) if rng.random() < 0.06 else None
        overflow = scaled and rng.random() < 0.15
        events.append(Backward(rng.randrange(20), overflow, stop, rng.randrange(8) if stop else 0))
        if stop and rng.random() < 0.7:
            events.append(Zero(rng.choice(ZEROS)))
        if rng.random() < 0.25:
            events.append(inside(rng))
    clip = rng.choice([None] * 3 + ["norm", "value"])
    stop = rng.choice(["before", "after"]) if rng.random() < 0.05 else None
    events.append(Step(rng.random() < 0.2, clip, stop))
    if rng.random() < 0.9:
        events.append(Zero(rng.choice(ZEROS)))
    events += [between(rng) for _ in range(rng.choice([0, 0, 1, 1, 2]))]
    return events + [Closure()] * (rng.random() < 0.05)


def by_hand(rng):
    """Return the program that `rng`, a `random.Random`, draws."""
    net, opt = random_net(rng), random_opt(rng)
    is_lbfgs = opt.name == "LBFGS"
    groups, left_out = random_groups(rng, net, 1 if is_lbfgs else 3)
    if is_lbfgs:
        groups = (tuple(i for group in groups for i in group),)
    n_params = len(list(net.build().parameters()))
    scaled = not is_lbfgs and rng.random() < 0.6
    schedule = rng.choice([None, None, "step", "one_cycle"]) if not is_lbfgs else None
    return Program(
        events=tuple(e for _ in range(rng.randint(2, 5)) for e in iteration(rng, scaled)),
        net=net,
        opt=opt,
        groups=groups,
        frozen=tuple(rng.sample(range(n_params), min(n_params, rng.choice([0, 0, 0, 1, 2])))),
        late=left_out if schedule is None and not is_lbfgs else (),
        schedule=schedule,
        scale=2.0 ** rng.choice([4, 8, 12, 16]) if scaled else None,
        dtype=rng.choice(["float16", "bfloat16"]),
        cut=rng.choice([16, 64, 2**18]),
    )
