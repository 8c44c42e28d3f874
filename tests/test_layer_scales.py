"""Layer scales in a fastai `Learner`: they change no bit, except for what one scale would lose."""

import copy

import pytest
import torch
from fastai.basics import Callback
from fastai.callback.core import CancelBatchException
from tiny import Do, bits, conv_net, make_learner, silent, weights
from torch import nn

import mixedfp.callback  # noqa: F401, gives Learner to_fp16
from mixedfp.checkpoint import Checkpoint
from mixedfp.layerwise import LayerwiseGradientScaler
from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same

BY_HAND = {"0": 2.0**4, "4": 2.0**-4, "5": 2.0**3, "10": 2.0**7}


def learner(layer_scales=None, dtype=torch.float16, flat=False, **kwargs):
    """Return a learner of `conv_net` in `dtype`."""
    learn = make_learner(**kwargs)
    return learn.to_fp16(dtype=dtype, flat_master=flat, layer_scales=layer_scales)


def n_hooks(model):
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_flat_is_not_different(dtype):
    learns = [learner(BY_HAND, dtype, flat) for flat in (False, True)]
    for learn in learns:
        learn.fit(2, 0.01)
    assert_same(*map(bits, learns))


def faint(loss_scale=1.0, **kwargs):
    """Return the gradients, of about 2**-26, of a learner's lowest layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    for layer in model[2:]:
        layer.weight.data = torch.eye(2) * 2.0**-12
    learn, grads = make_learner(model=model), []

    class First(Callback):
        def before_step(self):
            grads.append(self.model[1].weight.grad.clone())

    learn.add_cb(First())
    learn.to_fp16(loss_scale=loss_scale, **kwargs).fit(1, 0.01)
    return grads


def test_the_gradients_that_one_scale_flushes_arrive_in_the_masters():
    exact = faint(dtype=torch.float32)
    flushed = faint()
    arrived = faint(layer_scales=dict.fromkeys("123", 2.0**16))
    assert exact[0].norm() > 0 and flushed[0].norm() == 0
    assert arrived[0].dtype == torch.float32
    assert (arrived[0] - exact[0]).norm() < 0.01 * exact[0].norm()


def interrupt(learn):
    """Be stopped by Ctrl-C."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("event", ["forward", "after_pred", "before_backward", "before_step"])
@pytest.mark.parametrize("error", [ValueError, CancelBatchException])
def test_a_batch_that_breaks_off_leaves_no_hook_and_no_iteration(event, error):
    def fail(*_):
        raise error

    learn = learner(BY_HAND)
    plain, hook = n_hooks(learn.model), None
    if event == "forward":
        hook = learn.model[4].register_forward_pre_hook(fail)
    try:
        learn.fit(1, 0.01, cbs=Do(event, fail, order=60))
    except ValueError:
        assert error is ValueError
    if hook is not None:
        hook.remove()
    assert n_hooks(learn.model) == plain
    learn.fit(1, 0.01)
    learn.to_fp32()
    assert n_hooks(learn.model) == n_hooks(conv_net()) and "forward" not in vars(learn.model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_resumed_run_ends_in_the_same_bits(dtype, tmp_path):
    unbroken = learner(BY_HAND, dtype, path=tmp_path / "a")
    unbroken.fit(4, 0.01, cbs=Checkpoint("run"))
    killed = learner(BY_HAND, dtype, path=tmp_path / "b")
    with pytest.raises(KeyboardInterrupt):
        killed.fit(4, 0.01, cbs=[Checkpoint("run"), Do("after_backward", interrupt, at=9)])
    resumed, checkpoint = learner(BY_HAND, dtype, path=tmp_path / "b"), Checkpoint("run")
    resumed.fit(4, 0.01, start_epoch=checkpoint.resume(resumed), cbs=checkpoint)
    assert_same(bits(resumed), bits(unbroken))
    assert resumed.mp_cb.layer_scales == unbroken.mp_cb.layer_scales


def test_scales_of_other_layers_are_refused_before_anything_is_loaded():
    learn, other = learner(BY_HAND), learner({"0": 2.0, "4": 4.0})
    for some in (learn, other):
        some.fit(1, 0.01)
    before = copy.deepcopy((bits(learn), learn.mp_cb.layer_scales, learn.mp_cb.loss_scale))
    with pytest.raises(ValueError, match="expected the same layers"):
        learn.opt.load_state_dict(other.opt.state_dict())
    assert_same((bits(learn), learn.mp_cb.layer_scales, learn.mp_cb.loss_scale), before)


def test_finding_a_rate_and_copying_leave_the_scales():
    learn = learner(BY_HAND)
    learn.fit(1, 0.01)
    other = silent(copy.deepcopy(learn))
    other.fit(1, 0.01, cbs=Do("before_backward", lambda learn: learn.loss_grad.mul_(1e30), at=0))
    assert other.mp_cb.layer_scales != BY_HAND == learn.mp_cb.layer_scales
    with learn.no_bar():
        learn.lr_find(num_it=6, show_plot=False)
    assert learn.mp_cb.layer_scales == BY_HAND


WRONG = [
    ({"conv": 2.0}, ValueError, "names 'conv', which is no module"),
    ({"0": 0.0}, ValueError, "`scale of '0'` is 0.0"),
    ("auto", TypeError, "expected a dict"),
    ([1.0], TypeError, "expected a dict"),
]


@pytest.mark.parametrize("layer_scales, error, words", WRONG)
def test_wrong_scales_raise_and_the_model_is_as_it_was(layer_scales, error, words):
    learn = make_learner()
    before = copy.deepcopy(weights(learn))
    with pytest.raises(error, match=words):
        learn.to_fp16(layer_scales=layer_scales)
    assert_same(weights(learn), before)
    assert n_hooks(learn.model) == n_hooks(conv_net())
    learn.fit(1, 0.01)


class Faint(nn.Module):
    """Return the input; its gradient is below float16's smallest number, 2**-24."""

    def forward(self, x):
        return x * 2.0**-13 * 2.0**-13 + x.detach()


def test_over_a_model_with_masters_gradients_leave_a_layer_in_float32():
    """A scaler in a loop traces the model after `with_masters` has given it copies."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Faint(), nn.Linear(4, 2)), torch.ones(3, 4)
    model(x).sum().backward()
    exact = model[0].weight.grad
    model.zero_grad()
    with_masters(model, torch.optim.SGD(model.parameters(), 0.1), dtype="fp16")
    layers = LayerwiseGradientScaler(model, {"0": 2.0**16, "1": 2.0**16})
    layers.scale()
    layers.trace_loss(model(x).sum()).backward()
    layers.unscale()
    torch.testing.assert_close(model[0].weight.grad, exact, rtol=2**-7, atol=0)
