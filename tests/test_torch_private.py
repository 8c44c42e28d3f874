"""Canaries: one for each private name of PyTorch and fastai that the library uses.

A new release that drops a name fails here first; the message says which name, and who uses it.
"""

import ast
import copy
import functools
import inspect
import math
import os
import re
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from inside import torch_private as private
from torch import distributed, nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

HOME = Path(private.__file__)
PACKAGE = HOME.parents[1]
DOCUMENTED = "_version _base _parameters _buffers _modules".split()
OF_LEARNERS = "_backward _step _do_grad_opt _do_one_batch one_batch".split()
OF_FASTAI = [*OF_LEARNERS, "_stateattrs", "_init_state"]
CANARIES = {}


@functools.cache
def modules():
    """Return the text of each module of the library, by its dotted name."""
    files = [p for p in PACKAGE.rglob("*.py") if p != HOME and p.stem != "_modidx"]
    return {
        ".".join(p.relative_to(PACKAGE).with_suffix("").parts): p.read_text(encoding="utf-8")
        for p in files
    }


def users(name):
    """List the modules that use `name`."""
    return [module for module, text in modules().items() if re.search(rf"\b{name}\b", text)]


def canary(*names):
    """Mark a test as what says that PyTorch still has what stands behind `names`."""

    def mark(test):
        CANARIES.update(dict.fromkeys(names, test))

        @functools.wraps(test)
        def run(*args, **kwargs):
            try:
                test(*args, **kwargs)
            except Exception as e:
                raise AssertionError("\n".join(map(said, names))) from e

        return run

    return mark


def said(name):
    """Say what is at stake with `name`."""
    by = ", ".join(users(name))
    behind = re.search(r"Seen in (.*)", getattr(private, name, None).__doc__ or "", re.S)
    seen = f" ({' '.join(behind[1].split())})" if behind and name in private.__all__ else ""
    package = "fastai" if name in OF_FASTAI else "torch"
    now = f"{package} {version(package)}"
    return f"{name}{seen} is not what it was, in {now}; it is used by {by}"


@pytest.fixture
def model():
    """Return a small module with a buffer."""
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


# Compiling


@canary("outside_of_dynamo")
def test_dynamo_runs_a_function_as_it_is():
    """Inside of a compiled function, what is marked is not compiled."""
    seen = []

    @private.outside_of_dynamo
    def inner(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    compiled = torch.compile(lambda x: 2 * inner(x), backend="eager")
    assert compiled(torch.ones(1)).item() == 4 and seen == [False]


@canary("uncompiled")
def test_the_module_inside_of_a_compiled_one(model):
    """What `torch.compile` returns leads back to the model."""
    assert private.uncompiled(torch.compile(model, backend="eager")) is model
    assert private.uncompiled(model) is model and private.uncompiled(None) is None


# The graph


@canary("sequence_number", "next_sequence_number")
def test_nodes_are_numbered_as_they_are_made():
    """The next number is that of the next node; leaves have the largest of all."""
    x = torch.ones(1, requires_grad=True)
    first = private.next_sequence_number()
    a = x.exp()
    b = a.exp()
    assert [private.sequence_number(t.grad_fn) for t in (a, b)] == [first, first + 1]
    assert private.next_sequence_number() == first + 2
    leaf = a.grad_fn.next_functions[0][0]
    assert private.sequence_number(leaf) == 2**64 - 1


@canary("backward_id")
def test_backward_passes_have_numbers():
    """Outside of a backward pass the number is -1, inside each has its own."""
    x, ids = torch.ones(1, requires_grad=True), []
    for _ in range(2):
        y = x.exp()
        y.register_hook(lambda g: ids.append(private.backward_id()))
        y.backward()
    assert len(set(ids)) == 2 and min(ids) >= 0 and private.backward_id() == -1


@canary("at_end_of_backward")
def test_a_function_is_called_when_a_backward_pass_ends():
    """It comes after all gradients, however early it was asked for."""
    x, order = torch.ones(1, requires_grad=True), []
    y = x.exp()
    y.register_hook(lambda g: private.at_end_of_backward(lambda: order.append("end")))
    x.register_post_accumulate_grad_hook(lambda p: order.append("gradient"))
    y.backward()
    assert order == ["gradient", "end"]


class Twice(torch.autograd.Function):
    """Multiplies by 2."""

    @staticmethod
    def forward(ctx, x):
        """Compute it."""
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        """Compute the gradient."""
        return 2 * g


@canary("node_class")
def test_the_nodes_of_a_function_have_its_class():
    """And no other node has."""
    x = torch.ones(1, requires_grad=True)
    made = private.node_class(Twice)
    assert isinstance(Twice.apply(x).grad_fn, made) and not isinstance(x.exp().grad_fn, made)


@canary("keeping_version")
def test_a_write_is_not_counted():
    """In the context a write leaves the version as it was; outside it does not."""
    x = torch.ones(1)
    with private.keeping_version(x):
        x.mul_(1)
    assert x._version == 0
    assert x.mul_(1)._version == 1


@canary("is_in_transform")
def test_a_transform_of_functions_is_seen():
    """Inside of `torch.func.grad` and `vmap`, and nowhere else."""
    seen = []

    def f(x):
        seen.append(private.is_in_transform())
        return x.sum()

    f(torch.ones(1))
    torch.func.grad(f)(torch.ones(1))
    torch.func.vmap(f)(torch.ones(2, 1))
    torch.func.functional_call(nn.Linear(1, 1), {}, torch.ones(1, 1))
    f(torch.ones(1))
    assert seen == [False, True, True, False]


@canary("saved_tensors_hooks_now", "may_hook_saved_tensors")
def test_the_hooks_of_saved_tensors_are_found():
    """The innermost pair is found, and whether one is forbidden."""
    graph, pair = torch.autograd.graph, (lambda t: t, lambda t: t)
    assert private.saved_tensors_hooks_now() is None and private.may_hook_saved_tensors()
    with graph.saved_tensors_hooks(*pair):
        assert tuple(private.saved_tensors_hooks_now()) == pair
    with graph.disable_saved_tensors_hooks("not here"):
        assert not private.may_hook_saved_tensors()


# Processors and lists


@canary("cpu_has_bf16", "cpu_multiplies_bf16", "cpu_has_amx")
def test_the_processor_is_asked():
    """Each question has an answer; where PyTorch answers in public, the same one."""
    assert type(private.cpu_multiplies_bf16()) is bool
    if "ONEDNN_MAX_CPU_ISA" not in os.environ:  # which keeps oneDNN from what the processor has
        assert private.cpu_multiplies_bf16() or not private.cpu_has_bf16()
    public = getattr(torch.cpu, "get_capabilities", dict)()
    assert private.cpu_has_bf16() == public.get("avx512_bf16", private.cpu_has_bf16())
    assert private.cpu_has_amx() == public.get("amx_tile", private.cpu_has_amx())


@canary("assure")
def test_assure():
    """What is so is no error, and the compiler knows it: the graph has the size as it is told."""
    seen = []

    def halves(x):
        private.assure(x.shape[0] % 16 == 0)
        return x * 2

    def backend(graph, inputs):
        seen.append(str(graph.code))
        return graph

    torch.compile(halves, backend=backend, dynamic=True)(torch.ones(32))
    assert "% 16" in seen[0]
    with pytest.raises(RuntimeError, match="not as the compiler was told"):
        private.assure(False)


@canary("copy_each_", "zero_each_", "norm_of_each", "joined")
def test_operations_take_lists():
    """Copies cast, norms are of each tensor, and what is joined is a copy."""
    targets = [torch.zeros(2, dtype=torch.float16), torch.zeros(())]
    private.copy_each_(targets, [torch.tensor([3.0, -4.0]), torch.tensor(7.0)])
    assert [t.dtype for t in targets] == [torch.float16, torch.float32]
    assert [t.item() for t in private.norm_of_each(targets, 2.0)] == [5, 7]
    assert [t.item() for t in private.norm_of_each(targets, float("inf"))] == [4, 7]
    vector = private.joined(targets)
    assert vector.tolist() == [3.0, -4.0, 7.0] and vector.dtype == torch.float32
    private.zero_each_(targets)
    assert not any(t.any() for t in targets) and vector.all()


@canary("unscale_each_")
def test_a_scaler_unscales_and_checks_a_list():
    """Subnormal numbers are multiplied, and what was found is never taken back."""
    tiny = 2.0**-149
    grads = [torch.tensor([3.0, -4.0]).requires_grad_(), torch.tensor(4 * tiny)]
    found, half = torch.zeros(()), torch.tensor(0.5)
    private.unscale_each_(grads, half, found)
    assert grads[0].tolist() == [1.5, -2.0] and grads[1].item() == 2 * tiny and found.item() == 0
    private.unscale_each_([torch.tensor([1.0, -math.inf])], half, found)
    private.unscale_each_(grads, half, found)
    assert found.item() == 1


# Modules


@canary("NORMS")
def test_norms_that_keep_statistics_have_two_bases():
    """All of PyTorch's are derived from them, and no other norm is."""
    kinds = ["BatchNorm", "InstanceNorm", "LazyBatchNorm", "LazyInstanceNorm"]
    norms = [getattr(nn, f"{kind}{n}d") for kind in kinds for n in (1, 2, 3)]
    assert all(issubclass(norm, private.NORMS) for norm in [*norms, nn.SyncBatchNorm])
    assert not any(issubclass(m, private.NORMS) for m in (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm))


@canary("apply_to_own")
def test_a_modules_own_tensors_are_changed(model):
    """Parameters and buffers of the module itself, not those of its children."""
    model.register_buffer("own", torch.ones(1))
    private.apply_to_own(model, lambda t: t.half())
    assert model.own.dtype == torch.float16 and model[0].weight.dtype == torch.float32
    lstm = nn.LSTM(1, 1)
    private.apply_to_own(lstm, lambda t: t.double())
    assert lstm(torch.ones(1, 1, dtype=torch.float64))[0].dtype == torch.float64


@canary("forward_hooks", "remove_hooks")
def test_hooks_of_the_forward_pass_are_found_and_removed():
    """Of every kind; the others stay, and are called."""
    module, calls = nn.Identity(), []

    def ours(*args):
        calls.append("ours")

    def other(*args):
        calls.append("other")

    for hook in (ours, other):
        module.register_forward_pre_hook(hook)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        module.register_forward_hook(hook, with_kwargs=True, always_call=True)
    before, after = private.forward_hooks(module)
    assert list(before.values()) == [ours, ours, other, other]
    assert list(after.values()) == [ours, other]
    private.remove_hooks(module, lambda hook: hook is ours)
    module(torch.ones(1))
    assert calls == ["other"] * 3


@canary("state_dict_hooks")
def test_hooks_of_state_dict_are_found(model):
    """Each of the three kinds, by the id of its handle."""
    handles = [
        model.register_state_dict_post_hook(lambda *args: None),
        model.register_load_state_dict_pre_hook(lambda *args: None),
        model.register_load_state_dict_post_hook(lambda *args: None),
    ]
    found = private.state_dict_hooks(model)
    assert [list(hooks) for hooks in found] == [[handle.id] for handle in handles]


@canary("loads_strictly")
def test_a_load_says_whether_it_is_strict(model):
    """To a hook, of a part of the model as well; outside of a load it is not."""
    seen = []
    model[0].register_load_state_dict_pre_hook(lambda *args: seen.append(private.loads_strictly()))
    for strict in (True, False):
        model.load_state_dict(model.state_dict(), strict=strict)
    assert seen == [True, False] and not private.loads_strictly()


@canary("module_of_call")
@pytest.mark.parametrize("hooked", [False, True])
def test_the_frames_of_calls_name_the_modules(hooked):
    """From the inside out, with hooks and without."""

    class Inner(nn.Identity):
        def forward(self, x):
            found = [private.module_of_call(frame.frame) for frame in inspect.stack()]
            self.around = [m for m in found if m is not None]
            return x

    inner = Inner()
    outer = nn.Sequential(inner)
    if hooked:
        outer.register_forward_pre_hook(lambda m, args: None)
    outer(torch.ones(1))
    assert inner.around == [inner, outer]


@canary("is_replica")
def test_replicas_are_marked(model):
    """What `nn.DataParallel` makes of a module is known from it."""
    assert private.is_replica(model._replicate_for_data_parallel())
    assert not private.is_replica(model)


# Optimizers


def stepped(**kwargs):
    """Return an optimizer of a parameter with a gradient."""
    p = nn.Parameter(torch.ones(1))
    p.grad = torch.ones(1)
    return SGD([p], lr=0.1, **kwargs)


@canary("STEP_HOOKS", "step_hooks")
def test_hooks_of_steps_are_found():
    """Those of an optimizer, and those of all; an optimizer with new dicts has none of its own."""
    opt, calls = stepped(), []
    hooks = [lambda *args, i=i: calls.append(i) for i in range(4)]
    registers = [
        opt.register_step_pre_hook,
        opt.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ]
    handles = [register(hook) for register, hook in zip(registers, hooks, strict=True)]
    try:
        assert private.step_hooks(opt) == hooks
        vars(opt).update({name: {} for name in private.STEP_HOOKS})
        assert private.step_hooks(opt) == hooks[2:]
        opt.step()
        assert calls == [2, 3]
    finally:
        for handle in handles:
            handle.remove()


@canary("is_of_schedule")
def test_what_a_schedule_binds_is_known():
    """A schedule puts a counting step into the optimizer; a user's own is no such."""
    opt = stepped()
    assert "step" not in vars(opt)
    StepLR(opt, 1)
    assert private.is_of_schedule(vars(opt)["step"]) and not private.is_of_schedule(stepped().step)


@canary("count_as_stepped")
def test_a_step_that_was_skipped_counts():
    """A schedule warns of one that was never called, and not of one that counts."""
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        StepLR(stepped(), 1).step()
    opt = stepped()
    schedule = StepLR(opt, 1)
    private.count_as_stepped(opt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()


@canary("unscales_by_itself", "_step_supports_amp_scaling")
def test_fused_optimizers_unscale():
    """They say so, and a `GradScaler` reads it where they do."""
    assert private.unscales_by_itself(stepped(fused=True))
    assert not private.unscales_by_itself(stepped())

    class Own(SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None):
            self.told = vars(self).keys() & {"grad_scale", "found_inf"}

    p = nn.Parameter(torch.ones(1))
    opt, scaler = Own([p]), GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    scaler.step(opt)
    assert opt.told == {"grad_scale", "found_inf"}


# Processes, operations


@canary("active_ddp")
def test_the_ddp_around_a_forward_pass_is_found(model):
    """While it runs, and not before or after."""
    seen = []
    model.register_forward_pre_hook(lambda m, args: seen.append(private.active_ddp()))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        ddp = nn.parallel.DistributedDataParallel(model)
        ddp(torch.ones(2, 2))
    finally:
        distributed.destroy_process_group()
    assert seen == [ddp] and private.active_ddp() is None


@canary("local_tensor")
def test_the_part_of_this_process_is_found():
    """It is the memory itself, and the same object each time."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        part, mesh = torch.ones(2), init_device_mesh("cpu", (1,))
        p = nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)]))
        assert private.local_tensor(p) is private.local_tensor(p)
        assert private.local_tensor(p).data_ptr() == part.data_ptr()
        assert type(private.local_tensor(p)) is torch.Tensor
    finally:
        distributed.destroy_process_group()


@canary("asks_by_name", "loads_in_place")
def test_the_functions_for_files_of_many_processes_are_known():
    """They ask an optimizer for its groups, and a model for its tensors, by themselves."""
    by_name, in_place = [], []

    class Opt(SGD):
        @property
        def param_groups(self):
            by_name.append(private.asks_by_name())
            return self.groups

        @param_groups.setter
        def param_groups(self, groups):
            self.groups = groups

    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(lambda *args: in_place.append(private.loads_in_place()))
    opt = Opt(model.parameters(), lr=0.1)
    assert opt.param_groups and model.state_dict()
    assert by_name and not any(by_name) and in_place == [False]
    get_state_dict(model, opt)
    assert any(by_name) and in_place == [False, True]


@canary("schema_of", "TorchDispatchMode", "is_in_torch_dispatch_mode")
def test_operations_are_seen_below_the_dispatcher():
    """A mode sees each operation, with its name and what it takes."""
    seen = []

    class Look(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            schema = private.schema_of(func)
            seen.append((schema.name, [str(a.type) for a in schema.arguments]))
            return func(*args, **(kwargs or {}))

    with Look():
        assert private.is_in_torch_dispatch_mode()
        private.zero_each_([torch.ones(1)])
    assert not private.is_in_torch_dispatch_mode()
    assert seen[-1] == ("aten::_foreach_zero_", ["List[Tensor]"])


# Names that are used where they stand


@canary(*DOCUMENTED)
def test_names_that_have_no_function(model):
    """Counts of writes, bases of views, and the dicts of a module."""
    x = torch.ones(2)
    view = x[:1]
    view.add_(1)
    assert view._base is x and x._base is None and x._version == 1
    norm = model[1]
    assert list(model._modules.values()) == list(model)
    assert dict(norm._parameters) == dict(norm.named_parameters())
    norm._buffers["running_mean"] = mean = torch.ones(2)
    assert norm.running_mean is mean


@canary(*OF_LEARNERS)
def test_the_methods_of_a_learner_around_a_step():
    """By these names a callback knows who looks at gradients, and a hook whose batch it is in."""
    pytest.importorskip("fastai")
    from fastai.learner import Learner

    assert all(callable(getattr(Learner, name)) for name in OF_LEARNERS)
    assert "_do_one_batch" in inspect.getsource(Learner.one_batch)


@canary("_stateattrs", "_init_state")
def test_what_no_copy_of_a_callback_has():
    """What `_stateattrs` names is made anew by `_init_state`."""
    pytest.importorskip("fastai")
    from fastai.callback.core import Callback

    class Own(Callback):
        _stateattrs = ("held",)

        def _init_state(self):
            self.held = "new"

    cb = Own()
    cb.held = "mine"
    assert copy.copy(cb).held == "new"


# The rule itself


def test_each_name_has_a_canary_and_a_user():
    """Nothing is kept that no module needs, and nothing goes without a test."""
    assert set(private.__all__) <= CANARIES.keys()
    assert [name for name in CANARIES if not users(name)] == []


def private_names(text, known):
    """Yield the private names of PyTorch that a module's `text` uses."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            root = ast.unparse(node).split(".")[0]
            if node.attr in known or (root == "torch" and re.match("_[^_]", node.attr)):
                yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and node.value in known:
            yield node.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from (name for name in names if name.startswith("_"))


def test_private_names_stand_in_one_place():
    """But for the scaler's, which overrides private methods; and frames are Python's."""
    known = set(re.findall(r"\b_[a-z]\w+", inspect.getsource(private))) - {
        *DOCUMENTED,
        "_all_",
        "_getframe",
    }
    assert {"_opt_called", "_orig_mod", "_active_ddp_module"} <= known
    found = {
        module: sorted(set(private_names(text, known)))
        for module, text in modules().items()
        if module != "scaler"
    }
    assert {module: names for module, names in found.items() if names} == {}
    assert list(private_names("torch.nn._x\nfrom torch._y import z\na._orig_mod", known))


def test_a_missing_name_is_named(monkeypatch):
    """The message says which name is gone, and the modules that use it."""

    @canary("backward_id")
    def gone():
        raise AttributeError("_current_graph_task_id")

    with pytest.raises(AssertionError, match=r"_current_graph_task_id.*used by layerwise"):
        gone()
