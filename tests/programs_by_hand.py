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
from programs import Net, plain_run, random_groups, random_net, vectors_are_large
from tiny import plain
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same


class Boom(KeyboardInterrupt):
    """Somebody has pressed a key."""


# The program


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
    flat: bool = True  # whether the optimizer allows it
    large: bool = False
    cut: int = 2**18

    def calls_hooks(self):
        """Whether a skipped step calls the same hooks: `LossScaler` skips where momenta are new."""
        return not (self.opt.name == "SGD" and ("fused", True) in self.opt.settings)

    def torch_dtype(self, name):
        """Return the type of that name."""
        return getattr(torch, self.dtype if name == "half" else name)

    def run(self, dtype=None, flat=False):
        """Return what is seen in a run: plain where `dtype` is None."""
        run = Run(self, dtype, flat)
        for i, event in enumerate(self.events):
            run.n = i
            event.do(run)
        run.end()
        return run.log


def _of_training(state):
    """Return a state without the count of what vectors have been stepped in chunks."""
    return {k: v for k, v in state.items() if k != "payback"}


class Run:
    """A program under way."""

    def __init__(self, program, dtype, flat):
        self.program, self.dtype, self.flat, self.is_plain = program, dtype, flat, dtype is None
        self.log, self.n, self.saved, self.others = [], 0, None, []
        self.kept, self.scheduler = None, None
        self.is_unscaled = False
        torch.manual_seed(1)
        model = program.net.build()
        params = list(model.parameters())
        self.held = {i % len(params) for group in program.groups for i in group}
        for i in program.frozen:
            params[i % len(params)].requires_grad_(False)
        opt = self.make_opt(params)
        settings = dict(init_scale=program.scale or 1.0, growth_interval=3)
        settings["enabled"] = program.scale is not None
        if self.is_plain:
            self.scaler = torch.amp.GradScaler("cpu", **settings)
        else:
            model, opt = with_masters(model, opt, dtype=dtype, flat_master=flat)
            self.scaler = LossScaler("cpu", **settings)
        self.model, self.opt = model, opt
        if program.schedule == "step":
            self.scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
        elif program.schedule == "one_cycle":
            make = torch.optim.lr_scheduler.OneCycleLR
            cycles = any(k in opt.defaults for k in ("momentum", "betas"))
            self.scheduler = make(opt, 0.1, total_steps=50, cycle_momentum=cycles)

    def make_opt(self, params):
        """Return the optimizer; each group has a rate and a decay of its own."""
        groups, settings, held = [], dict(self.program.opt.settings), set()
        for i, places in enumerate(self.program.groups):
            places = dict.fromkeys(j % len(params) for j in places)  # fewer in a smaller program
            group = {"params": [params[j] for j in places if j not in held]}
            held |= set(places)
            if i and settings.get("lr") and self.program.opt.name != "LBFGS":
                group["lr"] = settings["lr"] / (i + 1)
                group["weight_decay"] = 0.125 * i
                if self.program.opt.name == "Rprop":
                    del group["weight_decay"]
            groups.append(group)
        return getattr(torch.optim, self.program.opt.name)(groups, **settings)

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
        self.see("optimizer", _of_training(self.opt.state_dict()))
        self.see("trained", [p.requires_grad for p in self.params])
        self.see("scale", self.scaler.get_scale())
        if self.dtype in (torch.float16, torch.bfloat16):
            self.see("half weights", [p.detach() for p in self.params])

    def see_grads(self):
        """Remember the gradients as somebody finds them who asks the optimizer for them first."""
        self.opt.param_groups  # noqa: B018
        self.see("grads", [p.grad if p.grad is None else p.grad.detach() for p in self.params])

    def end(self):
        """Remember how it ended; masters go back into the model as they are."""
        self.see_all()
        for model, opt in self.others:
            self.see("the other model", dict(model.state_dict()))
            self.see("the other optimizer", _of_training(opt.state_dict()))
        if not self.is_plain:
            shown = plain([self.model.state_dict()[k] for k, _ in self.model.named_parameters()])
            self.opt.restore()
            assert_same([p.detach() for p in self.params], shown, name="restored")

    # the iteration

    def begin(self):
        """Keep the buffers, which plain PyTorch does not, where an iteration begins.

        A pass that has left no gradient is no part of it.
        """
        has_grads = any(self.params[i].grad is not None for i in self.held)
        if self.kept is None or not has_grads:
            self.kept = {slot: plain(b) for slot, b in self.buffers()}

    def buffers(self):
        """Yield each buffer with its module's name and its own, those that are None as well."""
        for name, m in self.model.named_modules():
            for k, b in m._buffers.items():
                yield (name, k), b

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
        """Step, and end the iteration, unless the step was stopped before it has done anything."""
        before, is_open = self.scaler.get_scale(), False
        states = {p: dict(state) for p, state in self.opt.state.items()} if self.is_plain else {}
        try:
            self.scaler.step(self.opt)
        except Boom:
            self.see("stopped", True)
            is_open = stop == "before"  # its gradients, and so its passes, go into the next step
        self.scaler.update()
        if self.is_plain and not is_open and self.scaler.get_scale() < before:
            self.undo()
            if self.program.opt.name == "SGD":  # PyTorch's fused one makes momenta without values
                self.opt.state.clear()
                self.opt.state.update(states)
        self.kept, self.is_unscaled = self.kept if is_open else None, True

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
        """Do it."""
        run.begin()
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
        """Raise now, or when the gradient of `out` comes."""
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
        """Do it."""
        if run.program.opt.name == "LBFGS":
            return self.with_closure(run)
        if not any(run.params[i].grad is not None for i in run.held):
            return  # `GradScaler` raises
        if self.unscale or self.clip:
            run.scaler.unscale_(run.opt)
        if self.clip == "norm":
            run.see("norm", nn.utils.clip_grad_norm_(run.params, 0.1))
        elif self.clip == "value":
            nn.utils.clip_grad_value_(run.params, 0.01)
        hook = None
        if self.stop and run.program.calls_hooks():
            register = dict(
                before=run.opt.register_step_pre_hook, after=run.opt.register_step_post_hook
            )[self.stop]
            hook = register(_raise)
        run.step(self.stop)
        if hook is not None:
            hook.remove()
        if run.scheduler is not None:
            run.scheduler.step()

    def with_closure(self, run):
        """Step with a closure."""

        def closure():
            run.opt.zero_grad()
            loss = run.loss(run.n)
            loss.backward()
            return loss

        run.begin()
        run.opt.step(closure)
        run.kept = None


class Closure(NamedTuple):
    """Step with a closure where nothing is scaled: `GradScaler` takes none."""

    def do(self, run):
        """Do it."""
        if run.program.scale is None:
            Step().with_closure(run)


class Zero(NamedTuple):
    """Clear the gradients."""

    how: str = "opt"

    def do(self, run):
        """Do it."""
        if self.how.startswith("opt"):
            run.opt.zero_grad(set_to_none=self.how == "opt")
            run.kept = None
        elif self.how.startswith("model"):
            run.model.zero_grad(set_to_none=self.how == "model")
        else:
            for p in run.params:
                if self.how == "none_each":
                    p.grad = None
                elif p.grad is not None:
                    p.grad.zero_()


class EditGrad(NamedTuple):
    """Write into a gradient, or put another one into its place."""

    i: int = 0
    how: str = "mul_"

    def do(self, run):
        """Do it."""
        p = run.param(self.i)
        run.opt.param_groups  # noqa: B018, 32-bit by now
        if self.how == "none":
            p.grad = None
        elif self.how == "zeros":
            p.grad = torch.zeros_like(p)
        elif p.grad is not None:
            if self.how == "mul_":
                p.grad.mul_(0.5)
            elif self.how == "new":
                p.grad = p.grad * 0.5
            elif self.how == "data":
                p.grad.data = p.grad.data * 0.5


# What happens at any time


class Look(NamedTuple):
    """Look at everything, or at gradients."""

    grads: bool = False

    def do(self, run):
        """Do it."""
        run.see_grads() if self.grads else run.see_all()


class Freeze(NamedTuple):
    """Freeze a parameter, or train it."""

    i: int = 0
    train: bool = False

    def do(self, run):
        """Do it."""
        run.param(self.i).requires_grad_(self.train)


class Write(NamedTuple):
    """Write into a weight."""

    i: int = 0
    how: str = "copy_"

    def do(self, run):
        """Do it."""
        p = run.param(self.i)
        new = torch.randn(p.shape, generator=torch.Generator().manual_seed(self.i)) / 2
        with torch.no_grad():
            if self.how == "copy_":
                p.copy_(new)
            elif self.how == "mul_":
                p.mul_(0.5)
            elif self.how == "part":
                p.view(-1)[:1].fill_(0.25)
            elif self.how == "data":
                p.data = new.to(p.dtype)
            elif self.how == "vector":
                vector_to_parameters(parameters_to_vector(run.params) / 2, run.params)
            elif self.how == "init":
                nn.init.uniform_(p, -0.5, 0.5)
            elif self.how == "sync_from_model":
                p.data.copy_(new)
                if not run.is_plain:
                    run.opt.sync_from_model()


class WriteBuffers(NamedTuple):
    """Write into the buffers that are numbers; between iterations."""

    how: str = "mul_"

    def do(self, run):
        """Do it."""
        for (name, k), b in run.buffers():
            if b is not None and b.is_floating_point():
                if self.how == "mul_":
                    b.mul_(0.5)
                elif self.how == "part":
                    b.view(-1)[:1].fill_(0.25)
                else:
                    run.model.get_submodule(name)._buffers[k] = b / 2


class Eval(NamedTuple):
    """Compute without gradients, in the mode for evaluation or for training."""

    train: bool = False

    def do(self, run):
        """Do it."""
        run.model.train(self.train)
        with torch.no_grad():
            run.loss(50)
        run.model.train()


class Hyper(NamedTuple):
    """Change a rate by hand."""

    factor: float = 0.5

    def do(self, run):
        """Do it."""
        for group in run.opt.param_groups:
            group["lr"] *= self.factor


class AddGroup(NamedTuple):
    """Have the optimizer train what it has not trained so far."""

    def do(self, run):
        """Do it."""
        params = [run.param(i) for i in run.program.late]
        n_groups = len(run.program.groups)
        if params and len(run.opt.state_dict()["param_groups"]) == n_groups:
            run.opt.add_param_group({"params": params, "lr": 0.03125})
            run.held |= {i % len(run.params) for i in run.program.late}


class Save(NamedTuple):
    """Write a checkpoint."""

    def do(self, run):
        """Do it."""
        file = io.BytesIO()
        state = run.model.state_dict(), run.opt.state_dict(), run.scaler.state_dict()
        torch.save(state, file)
        run.saved = file.getvalue()


class Load(NamedTuple):
    """Go back to the checkpoint, or to a part of it."""

    model: bool = True
    opt: bool = True

    def do(self, run):
        """Do it."""
        if run.saved is None:
            return
        model, opt, scaler = torch.load(io.BytesIO(run.saved), weights_only=True)
        n_groups = len(run.opt.state_dict()["param_groups"])
        if self.model and model.keys() == run.model.state_dict().keys():
            run.model.load_state_dict(model)
            if run.kept is not None:
                run.kept = {slot: plain(b) for slot, b in run.buffers()}
        if self.opt and n_groups == len(opt["param_groups"]):
            run.opt.load_state_dict(opt)
            if run.kept is None and run.program.scale is not None:
                run.scaler.load_state_dict(scaler)


class Copy(NamedTuple):
    """Copy model and optimizer together, and go on with the copy or with what was there."""

    how: str = "deepcopy"
    go_on: str = "copy"

    def do(self, run):
        """Do it."""
        pair = run.model, run.opt, run.scheduler
        if self.how == "deepcopy" or "_norm" in repr(run.program.net):  # no pickle has these
            model, opt, scheduler = copy.deepcopy(pair)
        else:
            model, opt, scheduler = pickle.loads(pickle.dumps(pair))
        if self.go_on == "copy":
            run.model, run.opt, run.scheduler = model, opt, scheduler
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
    """Return an optimizer, and whether its masters may be flat."""
    if rng.random() < 0.1:
        name = rng.choice(list(OTHERS))
        return Opt(name, rng.choice(OTHERS[name])), False
    name = rng.choice(list(ELEMENTWISE))
    settings = rng.choice(ELEMENTWISE[name])
    way = rng.random()
    if way < 0.15 and name in FUSED:
        return Opt(name, (*settings, ("fused", True))), False
    if way < 0.4:
        settings = (*settings, ("foreach", way < 0.3))
    return Opt(name, settings), True


def inside(rng):
    """Return something that happens between a backward pass and a step."""
    i = rng.randrange(40)
    return rng.choice([
        lambda: EditGrad(i, rng.choice(["mul_", "new", "none", "zeros", "data"])),
        lambda: EditGrad(i, rng.choice(["mul_", "new", "none", "zeros", "data"])),
        lambda: Look(rng.random() < 0.7),
        lambda: Write(i, rng.choice(WRITES)),
        lambda: Freeze(i, rng.random() < 0.5),
        lambda: Eval(False),
        lambda: Copy(rng.choice(["deepcopy", "pickle"]), rng.choice(["copy", "original"])),
        lambda: Load(True, rng.random() < 0.5),
    ])()  # fmt: skip


WRITES = ["copy_", "mul_", "part", "data", "vector", "init", "sync_from_model"]


def between(rng):
    """Return something that happens between two iterations."""
    i = rng.randrange(40)
    return rng.choice([
        lambda: Freeze(i, False),
        lambda: Freeze(i, True),
        lambda: Write(i, rng.choice(WRITES)),
        lambda: Write(i, rng.choice(WRITES)),
        lambda: WriteBuffers(rng.choice(["mul_", "part", "new"])),
        lambda: Eval(rng.random() < 0.5),
        lambda: Look(rng.random() < 0.3),
        lambda: Hyper(rng.choice([0.5, 2.0])),
        lambda: AddGroup(),
        lambda: Save(),
        lambda: Load(*rng.choice([(True, True), (True, True), (True, False), (False, True)])),
        lambda: Copy(rng.choice(["deepcopy", "pickle"]), rng.choice(["copy", "original"])),
        lambda: Zero(rng.choice(ZEROS)),
    ])()  # fmt: skip


ZEROS = ["opt", "opt", "opt_zeros", "model", "model_zeros", "none_each", "zero_each"]


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
    if rng.random() < 0.05:
        events.append(Closure())
    return events


def by_hand(rng):
    """Return the program that `rng`, a `random.Random`, draws."""
    net, (opt, flat) = random_net(rng), random_opt(rng)
    groups, left_out = random_groups(rng, net, 1 if opt.name == "LBFGS" else 3)
    if opt.name == "LBFGS":
        groups = (tuple(i for group in groups for i in group),)
    n_params = len(list(net.build().parameters()))
    scaled = opt.name != "LBFGS" and rng.random() < 0.6
    schedule = rng.choice([None, None, "step", "one_cycle"]) if opt.name != "LBFGS" else None
    events = [e for _ in range(rng.randint(2, 5)) for e in iteration(rng, scaled)]
    return Program(
        net=net,
        opt=opt,
        groups=groups,
        frozen=tuple(rng.sample(range(n_params), rng.choice([0, 0, 0, 1, 2]))),
        late=left_out if schedule is None and opt.name != "LBFGS" else (),
        schedule=schedule,
        scale=2.0 ** rng.choice([4, 8, 12, 16]) if scaled else None,
        dtype=rng.choice(["float16", "bfloat16"]),
        flat=flat,
        large=flat and rng.random() < 0.6,
        cut=rng.choice([7, 64, 2**18]),
        events=tuple(events),
    )


# The laws: how a program is run, and which run it has to equal

LAWS = {
    "float32, a master each": (("float32", False), None),
    "float32, flat": (("float32", True), None),
    "16 bits, flat": (("half", True), ("half", False)),
}
INVALID: list[str] = []  # why plain PyTorch did not take a program


def check_by_hand(program, law):
    """Return how `program` breaks `law`, None where it does not, or where the law says nothing."""
    (dtype, flat), other = LAWS[law]
    if flat and not program.flat:
        return None
    try:
        expected = plain_run(program)
    except Exception as e:
        return INVALID.append(f"{type(e).__name__}: {e}")
    with vectors_are_large(program.large, program.cut):
        try:
            if other is not None:
                expected = program.run(program.torch_dtype(other[0]), other[1])
            run = program.run(program.torch_dtype(dtype), flat)
            for a, b in zip(run, expected, strict=True):
                assert_same(a, b, name="log")
        except Exception as e:
            return f"{type(e).__name__}: {e}"
