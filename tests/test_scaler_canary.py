"""What the library needs of PyTorch's `GradScaler` beyond its documentation.

A new release of PyTorch that changes any of it fails here first. Names of parameters are compared,
not whole signatures: annotations and defaults may change.
"""

import inspect
import re

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState

import mixedfp.scaler
from mixedfp.scaler import LossScaler

# method: its parameters, and who counts on them
PARAMETERS = {
    "__init__": (
        "device init_scale growth_factor backoff_factor growth_interval enabled",
        "LossScaler.__init__ gives them by place",
    ),
    "scale": ("outputs", "LossScaler.scale stands in for it"),
    "unscale_": ("optimizer", "LossScaler.unscale_ calls it under the scale of the gradients"),
    "_unscale_grads_": (
        "optimizer inv_scale found_inf allow_fp16",
        "LossScaler and mixedfp.skorch's scaler override it; unscale_ and fused steps call it",
    ),
    "_check_inf_per_device": ("optimizer", "LossScaler.step calls it before a fused first step"),
    "_found_inf_per_device": ("optimizer", "LossScaler.found_nonfinite, .found_on_device"),
    "step": ("optimizer args kwargs", "LossScaler.step calls it where there is no closure"),
    "_maybe_opt_step": (
        "optimizer optimizer_state args kwargs",
        "LossScaler and mixedfp.skorch's scaler override it to skip",
    ),
    "update": ("new_scale", "LossScaler.update calls it, mixedfp.skorch's scaler as well"),
    "_lazy_init_scale_growth_tracker": ("dev", "LossScaler.scale makes its tensors with it"),
    "get_scale": ("", "LossScaler.load_state_dict and .update read what came from outside"),
    "_get_growth_tracker": ("", "the growth count that came with that scale"),
    "set_growth_factor": ("new_factor", "LossScaler checks and sets"),
    "set_backoff_factor": ("new_factor", "LossScaler checks and sets"),
    "set_growth_interval": ("new_interval", "LossScaler checks and sets"),
    "state_dict": ("", "LossScaler.state_dict adds to it"),
    "load_state_dict": ("state_dict", "LossScaler.load_state_dict brings it within the bounds"),
    "__getstate__": ("", "LossScaler is pickled without optimizers"),
    "__setstate__": ("state", "LossScaler comes out of a pickle"),
}
# attribute: who reads or writes it
ATTRIBUTES = {
    "_scale": "LossScaler exchanges it while gradients of another scale are unscaled",
    "_growth_tracker": "LossScaler.update sets it to 0 after a late overflow",
    "_device": "LossScaler.scale sets it to where the loss is",
    "_enabled": "all methods of LossScaler",
    "_growth_factor": "the host computes what the device does",
    "_backoff_factor": "the host computes what the device does",
    "_growth_interval": "the host computes what the device does",
    "_per_optimizer_states": "LossScaler and mixedfp.skorch's scaler, by id(optimizer)",
}


def theirs(**kwargs):
    """Return a scaler of PyTorch's that has scaled a loss, a parameter and an optimizer."""
    scaler, w = GradScaler("cpu", 8.0), nn.Parameter(torch.zeros(2))
    scaler.scale(w.sum()).backward()
    return scaler, w, torch.optim.SGD([w], lr=1.0, **kwargs)


def changed(what, where):
    """Return the message of a failed canary."""
    return f"torch {torch.__version__}: {what}. Used here: {where}"


@pytest.mark.parametrize("name", PARAMETERS)
def test_methods_take_what_they_took(name):
    expected, where = PARAMETERS[name]
    assert hasattr(GradScaler, name), changed(f"GradScaler.{name} is gone", where)
    _, *got = inspect.signature(getattr(GradScaler, name)).parameters
    said = f"GradScaler.{name} takes {got}, not {expected.split()}"
    assert got == expected.split(), changed(said, where)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_are_there(name):
    scaler, *_ = theirs()
    assert name in vars(scaler), changed(f"GradScaler.{name} is gone", ATTRIBUTES[name])


def test_the_tables_above_are_complete():
    """Whatever of PyTorch's class `mixedfp.scaler` overrides or names is in one of them."""
    of_any_class = {"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__"}
    of_any_class |= {"__firstlineno__", "__static_attributes__", "__annotate_func__"}
    of_any_class |= {"__annotations_cache__"}
    used = vars(LossScaler).keys() & vars(GradScaler).keys() - of_any_class
    source = inspect.getsource(mixedfp.scaler)
    named = set(re.findall(r"(?:self|super\(\w+, self\))\.(\w+)", source))
    scaler, *_ = theirs()
    used |= {n for n in named if hasattr(scaler, n) and n.startswith("_")}
    assert used <= PARAMETERS.keys() | ATTRIBUTES.keys()


def test_an_optimizers_state_is_a_stage_and_what_was_found():
    scaler, _, opt = theirs()
    where = "LossScaler reads both, and adds `optimizer` and `nonfinite`"
    state = vars(scaler)["_per_optimizer_states"][id(opt)]  # of PyTorch's class
    said = f"GradScaler's state of an optimizer begins as {state}"
    assert state == {"stage": OptState.READY, "found_inf_per_device": {}}, changed(said, where)
    scaler.unscale_(opt)
    assert state["stage"] is OptState.UNSCALED, changed(f"unscale_ leaves {state['stage']}", where)
    assert all(t.shape == () for t in state["found_inf_per_device"].values())
    scaler.step(opt)
    assert state["stage"] is OptState.STEPPED, changed(f"step leaves {state['stage']}", where)
    scaler.update()
    said = "update keeps the states of optimizers"
    assert not vars(scaler)["_per_optimizer_states"], changed(said, where)


@pytest.mark.parametrize(
    ("fused", "expected"),
    [
        (False, ["unscale_", "_unscale_grads_", "_maybe_opt_step"]),
        (True, ["_check_inf_per_device", "_unscale_grads_"]),
    ],
)
def test_a_step_goes_through_what_is_overridden(fused, expected, monkeypatch):
    calls = []

    def noted(name, method):
        def call(self, *args):
            calls.append(name)
            return method(self, *args)

        return call

    for name in ("unscale_", "_check_inf_per_device", "_unscale_grads_", "_maybe_opt_step"):
        monkeypatch.setattr(GradScaler, name, noted(name, getattr(GradScaler, name)))
    scaler, w, opt = theirs(fused=fused)
    scaler.step(opt)
    assert w.tolist() == [-1.0, -1.0]
    said = f"GradScaler.step calls {calls}, not {expected}"
    assert calls == expected, changed(said, "LossScaler overrides these")


def test_a_fused_optimizer_is_lent_the_scale_and_the_verdict(monkeypatch):
    """`MasterOptimizer` hands both on, and restores buffers by the second."""
    scaler, _, opt = theirs(fused=True)
    seen, step = {}, opt.step
    monkeypatch.setattr(opt, "step", lambda: seen.update(vars(opt)) or step())
    scaler.step(opt)
    said = "GradScaler.step lends a fused optimizer no `grad_scale` and `found_inf`"
    assert seen.get("grad_scale") == 8.0 and seen.get("found_inf") == 0.0, changed(
        said, "MasterOptimizer.step"
    )
    assert "found_inf" not in vars(opt), changed("`found_inf` stays", "MasterOptimizer.step")


def test_the_state_has_the_keys_that_files_have():
    keys = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
    got = set(GradScaler("cpu").state_dict())
    assert got == keys, changed(f"GradScaler.state_dict has {got}", "LossScaler.load_state_dict")
