"""Layer scales in a fastai `Learner`: they change no bit, but for what one scale would lose."""

import copy

import inside
import pytest
import torch
from fastai.basics import Callback
from fastai.callback.core import CancelBatchException
from fastai.callback.training import GradientAccumulation, GradientClip
from tiny import Do, bits, conv_net, make_learner, silent, weights
from torch import nn

from mixedfp.checkpoint import Checkpoint
from mixedfp.testing import assert_same

BY_HAND = {"0": 2.0**4, "4": 2.0**-4, "5": 2.0**3, "10": 2.0**7}
WAYS = {"by hand": BY_HAND, "auto": "auto"}
ways = pytest.mark.parametrize("layer_scales", WAYS.values(), ids=WAYS)


def learner(layer_scales=None, dtype=torch.float16, flat=False, **kwargs):
    """Return a learner of `conv_net` in `dtype`."""
    learn = make_learner(**kwargs)
    return learn.to_fp16(dtype=dtype, flat_master=flat, layer_scales=layer_scales)


def hooks(model):
    """Return how many hooks each module has, of each kind."""
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def end(learn):
    """Return the bits of weights, masters and optimizer, without the scales."""
    found = bits(learn)
    found["opt"].pop("layer_scales", None)
    return found


class Clip(GradientClip):
    """Clip at a norm that all gradients have."""


@ways
@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize(
    "cbs",
    [[], [Clip(2.0**-3)], [GradientAccumulation(16)]],
    ids=["plain", "clipped", "accumulated"],
)
def test_powers_of_two_change_no_bit_in_float32(layer_scales, flat, cbs):
    """Not of weights, nor of the optimizer's state, whatever else happens to gradients."""
    ends = []
    for scales in (None, layer_scales):
        learn = learner(scales, torch.float32, flat)
        learn.fit(2, 0.01, cbs=cbs)
        ends.append(end(learn))
        state = learn.opt.state_dict()
        assert ("layer_scales" in state) == (scales is not None)
    assert_same(*ends)
    found = learn.mp_cb.layer_scales
    assert len(set(found.values())) > 1 and (layer_scales == "auto" or found == BY_HAND)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_flat_is_not_different(dtype):
    ends = []
    for flat in (False, True):
        learn = learner(BY_HAND, dtype, flat)
        learn.fit(2, 0.01)
        ends.append(end(learn))
    assert_same(*ends)


def faint(loss_scale=1.0, **kwargs):
    """Return a learner whose lowest layer gets gradients of about 2**-26, and its first ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(2), nn.Linear(2, 2), nn.Linear(2, 2))
    for layer in model[2:]:
        layer.weight.data = torch.eye(2) * 2.0**-12
    learn = make_learner(model=model)
    learn.model(learn.dls.one_batch()[0])  # to know the number of inputs
    grads = []

    class First(Callback):
        def before_step(self):
            grads.append(self.model[1].weight.grad.clone())

    learn.add_cb(First())
    learn.to_fp16(loss_scale=loss_scale, **kwargs).fit(1, 0.01)
    return learn, grads


def test_what_one_scale_flushes_arrives_in_the_masters():
    """In the right size, too: what the optimizer sees are the true gradients."""
    _, exact = faint(dtype=torch.float32)
    _, flushed = faint()
    _, arrived = faint(layer_scales=dict.fromkeys("123", 2.0**16))
    assert exact[0].norm() > 0 and flushed[0].norm() == 0
    assert arrived[0].dtype == torch.float32
    assert (arrived[0] - exact[0]).norm() < 0.01 * exact[0].norm()


def test_automatic_scales_find_what_one_scale_flushes():
    """After a few steps, and in no need of being told where."""
    _, exact = faint(dtype=torch.float32)
    learn, grads = faint(layer_scales="auto")
    assert grads[0].norm() == 0 and grads[-1].norm() > 0
    assert min(learn.mp_cb.layer_scales[k] for k in "123") > 2.0**4
    assert len(exact) == len(grads)


def interrupt(learn):
    """Be stopped by Ctrl-C."""
    raise KeyboardInterrupt


def overflow_in_the_last(learn):
    """Let the loss of a batch be so large that its gradient overflows in the last layer."""
    learn.loss_grad = learn.loss_grad * 2.0**100


def test_a_layer_that_overflows_backs_off_and_the_step_is_no_step():
    learn = learner(BY_HAND)
    learn.fit(1, 0.01)
    before, scales = end(learn), dict(learn.mp_cb.layer_scales)
    n = learn.mp_cb.n_skipped
    fault = Do("before_backward", overflow_in_the_last, at=0, order=0)

    with pytest.raises(KeyboardInterrupt):
        learn.fit(1, 0.01, cbs=[fault, Do("after_batch", interrupt, order=100)])
    assert learn.mp_cb.n_skipped == n + 1
    assert_same(end(learn), before)
    now = learn.mp_cb.layer_scales
    assert now["10"] == scales["10"] / 2 and set(now) == set(scales)
    learn.fit(1, 0.01)
    assert all(v.isfinite().all() for v in weights(learn).values())


@ways
@pytest.mark.parametrize("event", ["before_batch", "after_pred", "before_backward", "before_step"])
def test_no_hook_is_left_by_a_fit_that_breaks_off(layer_scales, event):
    learn = learner(layer_scales)
    plain = hooks(learn.model)  # that of its Learner alone

    def fail(learn):
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        learn.fit(1, 0.01, cbs=Do(event, fail, at=1, order=50))
    assert hooks(learn.model) == plain
    learn.fit(1, 0.01)
    assert hooks(learn.model) == plain
    learn.to_fp32()
    assert hooks(learn.model) == hooks(conv_net()) and "forward" not in vars(learn.model)


def test_no_hook_is_left_by_a_forward_pass_that_breaks_off():
    learn = learner(BY_HAND)
    plain = hooks(learn.model)

    def fail(*_):
        raise ValueError("in the middle")

    handle = learn.model[4].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        learn.fit(1, 0.01)
    handle.remove()
    assert hooks(learn.model) == plain
    learn.fit(1, 0.01)


def test_scales_are_saved_and_loaded_with_the_optimizer(tmp_path):
    learn = learner(BY_HAND, path=tmp_path)
    learn.fit(1, 0.01)
    inside.layer_infos(learn.mp_cb.mixed.layers)[1].growth_tracker = 7
    learn.save("run")
    other = learner(dict.fromkeys(BY_HAND, 1.0), path=tmp_path)
    other.load("run")
    assert other.mp_cb.layer_scales == learn.mp_cb.layer_scales == BY_HAND
    assert_same(other.opt.state_dict()["layer_scales"], learn.opt.state_dict()["layer_scales"])
    plain = make_learner(path=tmp_path)
    plain.load("run")  # a learner in 32 bits reads it as well
    assert_same(weights(plain), weights(learn))


def test_scales_of_other_layers_are_left_alone(tmp_path, caplog):
    learn = learner(BY_HAND, path=tmp_path)
    learn.create_opt()  # with which scales are saved
    learn.save("run")
    other = learner({"0": 2.0}, path=tmp_path)
    other.load("run")
    assert other.mp_cb.layer_scales == {"0": 2.0}
    assert "scales of other layers" in caplog.text


@ways
def test_a_resumed_run_ends_in_the_same_bits(layer_scales, tmp_path):
    unbroken = learner(layer_scales, path=tmp_path / "a")
    unbroken.fit(4, 0.01, cbs=Checkpoint("run"))
    killed = learner(layer_scales, path=tmp_path / "b")
    with pytest.raises(KeyboardInterrupt):
        killed.fit(4, 0.01, cbs=[Checkpoint("run"), Do("after_backward", interrupt, at=9)])
    resumed, checkpoint = learner(layer_scales, path=tmp_path / "b"), Checkpoint("run")
    resumed.fit(4, 0.01, start_epoch=checkpoint.resume(resumed), cbs=checkpoint)
    assert_same(end(resumed), end(unbroken))
    assert resumed.mp_cb.layer_scales == unbroken.mp_cb.layer_scales


def test_finding_a_rate_leaves_the_scales():
    learn = learner(BY_HAND)
    with learn.no_bar():
        learn.lr_find(num_it=6, show_plot=False)
    assert learn.mp_cb.layer_scales == BY_HAND


def test_a_copy_has_scales_of_its_own():
    learn = learner(BY_HAND)
    learn.fit(1, 0.01)
    other = silent(copy.deepcopy(learn))
    inside.layer_infos(other.mp_cb.mixed.layers)[1].scaling_factor = 1.0
    assert learn.mp_cb.layer_scales == BY_HAND
    other.fit(1, 0.01)
    assert other.mp_cb.layer_scales["0"] == 1.0


@pytest.mark.parametrize(
    "layer_scales, error, words",
    [
        ({"conv": 2.0}, ValueError, "names 'conv', which is no module"),
        ({"0": 0.0}, ValueError, r"`layer_scales\['0'\]` is 0.0"),
        ({"0": "high"}, TypeError, r"`layer_scales\['0'\]` is 'high'"),
        ("automatic", ValueError, "expected a dict of layers' names and scales"),
        ([1.0], TypeError, "expected a dict of layers' names and scales"),
    ],
)
def test_senseless_scales_are_refused_and_the_model_is_as_it_was(layer_scales, error, words):
    learn = make_learner()
    before = copy.deepcopy(weights(learn))
    with pytest.raises(error, match=words):
        learn.to_fp16(layer_scales=layer_scales)
    assert_same(weights(learn), before)
    assert {p.dtype for p in learn.model.parameters()} == {torch.float32}
    assert hooks(learn.model) == hooks(conv_net())
    learn.fit(1, 0.01)


def test_a_loss_on_what_a_layer_keeps_to_itself_is_right_as_well():
    """An activation that a hook has kept, as regularizers do: the model's output is not it."""
    ends = []
    for scales in (None, BY_HAND):
        learn, kept = learner(scales, torch.float32), []
        learn.model[4].register_forward_hook(lambda _m, _x, out, kept=kept: kept.append(out))

        def regularize(learn, kept=kept):
            learn.loss_grad = learn.loss_grad + kept[-1].square().mean()

        learn.fit(1, 0.01, cbs=Do("after_loss", regularize, order=0))
        ends.append(end(learn))
    assert_same(*ends)


def test_a_batch_that_is_called_off_leaves_no_iteration_open():
    learn = learner(BY_HAND, torch.bfloat16)

    def call_off(learn):
        raise CancelBatchException

    learn.fit(1, 0.01, cbs=Do("after_pred", call_off, order=60))
    assert not learn.mp_cb.mixed.layers.is_scaling
