"""The defects of fastai's own mixed precision: here is each that it has, and that ours has not.

A defect is one check, a function of a way to put a learner into mixed precision. It must pass on
ours, with a master each and with flat masters, and must fail on fastai's own: so the check is seen
to find what it looks for. fastai's own ways are for CUDA alone; tests/fastais_own.py has them for a
CPU with nothing changed but the device. Its code is the same in fastai 2.8.7 and 2.8.12; should a
later release mend a defect, its control says so, and the release goes into `MENDED`.
"""

import logging
import warnings
from collections import OrderedDict, namedtuple
from importlib.metadata import version

import inside
import pytest
import torch
import torch.nn.functional as F
from fastai.callback.core import CancelBatchException, CancelFitException
from fastai.callback.fp16 import MixedPrecision as FastaisMixedPrecision
from fastai.callback.training import GradientClip
from fastai.optimizer import SGD
from fastais_own import autocast as autocast_on_cpu
from fastais_own import masters as masters_on_cpu
from fastais_own import net, two_groups
from packaging.version import Version
from tiny import Do, make_dls, make_learner, opt_state, torch_optimizer, weights
from torch import nn

from mixedfp.formats import MixedPrecisionError
from mixedfp.testing import assert_same

# Ways: each takes a learner and its settings, in our words, and returns the learner


def ours(learn, **settings):
    """Put `learn` into float16, with a master for each parameter."""
    return learn.to_fp16(**_with_clip(learn, **settings))


def ours_flat(learn, **settings):
    """Put `learn` into float16, with flat masters."""
    return learn.to_fp16(flat_master=True, **_with_clip(learn, **settings))


def _with_clip(learn, clip=None, **settings):
    if clip is not None:
        learn.add_cb(GradientClip(clip))
    return settings


def masters(learn, loss_scale=512.0, max_scale=None, growth_interval=500, **settings):
    """Put `learn` into fastai's `to_non_native_fp16`; its first scale is its greatest, it says."""
    settings |= dict(max_loss_scale=max_scale or loss_scale, scale_wait=growth_interval)
    return masters_on_cpu(learn, loss_scale=loss_scale, **settings)


def flat_masters(learn, **settings):
    """Put `learn` into fastai's `to_non_native_fp16(flat_master=True)`."""
    return masters(learn, flat_master=True, **settings)


def autocast(learn, loss_scale=512.0, **settings):
    """Put `learn` into fastai's `to_fp16`, for the CPU."""
    return autocast_on_cpu(learn, init_scale=loss_scale, **settings)


def as_shipped(learn):
    """Put `learn` into fastai's `to_fp16` with nothing changed at all."""
    return learn.add_cb(FastaisMixedPrecision())


MENDED = {}  # {"n06": "the fastai release that has mended it", ...}


def fails_on(*ways, error=AssertionError, says=None):
    """Make a test of a check: it passes on ours, and on fastai's `ways` raises `error`."""

    def make_test(check):
        number = check.__name__.split("_")[1]
        is_mended = number in MENDED and Version(version("fastai")) >= Version(MENDED[number])

        def test(way):
            if way in (ours, ours_flat) or is_mended:
                return check(way)
            with warnings.catch_warnings(), pytest.raises(error, match=says):
                warnings.simplefilter("ignore")
                check(way)

        ids = ["each", "flat", *(f"fastais_{way.__name__}" for way in ways)]
        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return pytest.mark.parametrize("way", [ours, ours_flat, *ways], ids=ids)(test)

    return make_test


@pytest.fixture(autouse=True)
def files_go_elsewhere(tmp_path, monkeypatch):
    """Write what a learner saves into the test's own folder."""
    monkeypatch.chdir(tmp_path)


# What the checks are made of


def linear():
    """Return one layer without a norm, for pictures."""
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 2))


plain_sgd = SGD  # no momentum: a step is the rate times the gradient


def no_slope(pred, y):
    """Return a loss whose gradient is zero everywhere."""
    return 0 * pred.sum()


def sum_of(pred, y):
    """Return a loss whose gradient at each prediction is 1, or the loss scale."""
    return pred.sum()


def all_finite(tensors):
    """Whether no number in a dict of tensors is inf or nan."""
    return all(t.isfinite().all() for t in tensors.values())


def moved(learn, before):
    """Return the names of what is no longer as in `before`."""
    return {k for k, v in weights(learn).items() if not torch.equal(v, before[k].to(v.dtype))}


def poison(learn):
    """Make a gradient inf."""
    next(p for p in learn.model.parameters() if p.grad is not None).grad.fill_(float("inf"))


def overflowing(at=None):
    """Return a callback that makes gradients inf, on batch `at` or on all."""
    return Do("after_backward", poison, at=at, order=0)


class Scales(list):
    """The loss scale of each batch, as the gradient of the sum of the predictions shows it."""

    def cb(self):
        """Return the callback that looks."""
        return Do("after_pred", self._look, order=60)

    def _look(self, learn):
        learn.pred.register_hook(lambda g: self.append(g.flatten()[0].item()))


def raiser(error):
    """Return what raises `error` when it is called."""

    def stop(learn):
        raise error("stop")

    return stop


# Masters: fastai's `to_non_native_fp16`


@fails_on(flat_masters, says="in the shape of its parameter")
def test_d01_state_of_the_flat_vector(way):
    """fastai: after a flat fit the whole group's momentum is the first parameter's."""
    learn = way(make_learner(model=net))
    learn.fit(1, 0.01)
    for p in learn.model.parameters():
        averages = [v for k, v in learn.opt.state[p].items() if k == "grad_avg"]
        shapes = [a.shape for a in averages]
        assert shapes == [p.shape], "each state is in the shape of its parameter"
        assert averages[0].any()


@fails_on(flat_masters, says="biases and norms are not decayed")
def test_d02_no_weight_decay_of_biases_and_norms(way):
    """fastai: a flat vector has lost which of its numbers are not to be decayed."""
    learn = make_learner(plain_sgd, net, loss_func=no_slope)
    nn.init.ones_(learn.model[0].bias)
    before = weights(learn)
    way(learn).fit(1, 0.1, wd=0.5)
    now = weights(learn)
    for k in ("0.weight", "5.weight"):
        torch.testing.assert_close(now[k], before[k] * 0.95**4, rtol=1e-3, atol=1e-4)
    for k in ("0.bias", "1.weight", "1.bias"):
        same = torch.equal(now[k], before[k])
        assert same, "biases and norms are not decayed"


@fails_on(masters, flat_masters, says="small updates add up over fits")
def test_d03_masters_live_across_fits(way):
    """fastai: each fit's end throws the masters away, so what is less than half a bit is lost."""
    ones = torch.ones(16, 1)
    dls = make_dls(ones, ones, n_valid=8)
    learn = make_learner(plain_sgd, nn.Linear(1, 1, bias=False), dls=dls, loss_func=mean_of)
    nn.init.ones_(learn.model.weight)
    way(learn)
    for _ in range(10):
        learn.fit(1, 1e-4, wd=0.0)
    found = weights(learn)["weight"].item()
    assert found == pytest.approx(0.999, abs=1e-6), "small updates add up over fits"


def mean_of(pred, y):
    """Return a loss whose gradient at a weight of inputs 1 is 1."""
    return pred.mean()


@fails_on(masters, flat_masters, says="validating changes nothing")
def test_d04_validating_changes_nothing(way):
    """fastai: `validate` alone rounds the weights and buffers to 16 bits."""
    learn = make_learner(model=net)
    before = weights(learn)
    way(learn).validate()
    assert not moved(learn, before), "validating changes nothing"


def d05(error):
    """Return the check of a fit that `error` ends, and of the fit after it."""

    def check(way):
        learn = way(make_learner(model=net))
        with pytest.raises(error):
            learn.fit(1, 0.05, cbs=Do("after_loss", raiser(error), at=1))
        before = weights(learn)
        learn.fit(1, 0.05)
        names = {k for k, _ in learn.model.named_parameters()}
        assert names <= moved(learn, before), "the fit after it trains"

    return check


@fails_on(masters, flat_masters, says="the fit after it trains")
def test_d05_a_fit_after_an_exception_trains(way):
    """fastai: the optimizer is left with masters of nobody, and the next fit trains nothing."""
    d05(ValueError)(way)


@fails_on(masters, flat_masters, says="the fit after it trains")
def test_d05_a_fit_after_an_interruption_trains(way):
    """fastai: as after an exception; Ctrl-C is how many a fit ends."""
    d05(KeyboardInterrupt)(way)


class WithUnused(nn.Module):
    """A net with a layer that nothing goes through."""

    def __init__(self):
        super().__init__()
        self.net, self.unused = net(), nn.Linear(2, 2)

    def forward(self, x):
        return self.net(x)


@fails_on(flat_masters, error=AttributeError, says="'NoneType'")
def test_d06_a_parameter_without_a_gradient(way):
    """fastai: flat masters want a gradient of each parameter, and crash where there is none."""
    learn = way(make_learner(model=WithUnused))
    before = weights(learn)
    learn.fit(1, 0.05, wd=0.5)
    names = {k for k, _ in learn.model.net.named_parameters(prefix="net")}
    assert names <= moved(learn, before)
    assert not {"unused.weight", "unused.bias"} & moved(learn, before)


@fails_on(flat_masters, error=(RuntimeError, ValueError), says="non-empty list")
def test_d06_a_frozen_group(way):
    """fastai: flat masters make a vector of each group, and crash where all of it is frozen."""
    learn = way(make_learner(model=net, splitter=two_groups, train_bn=False))
    learn.freeze()
    before = weights(learn)
    learn.fit(1, 0.05)
    statistics = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert moved(learn, before) == {"5.weight", "5.bias"} | statistics


@fails_on(masters, says="momentum goes on")
def test_d07_momentum_of_a_torch_optimizer(way):
    """fastai: under `OptimWrapper` each fit starts without momentum, and leaves dead state."""
    learn = make_learner(torch_optimizer(torch.optim.SGD, momentum=0.9), net)
    way(learn).fit(1, 0.05)
    before, learn.loss_func = weights(learn), no_slope
    learn.fit(1, 0.05, wd=0.0)
    assert {"0.weight", "5.weight"} <= moved(learn, before), "momentum goes on without a gradient"
    n = len(list(learn.model.parameters()))
    assert len(learn.opt.state_dict()["state"]) == n, "state is of parameters"


def update_of_one_step(learn):
    """Return how far a step at a rate of 1 moves all weights together."""
    before = weights(learn)
    learn.fit(1, 1.0, wd=0.0, cbs=Do("after_step", raiser(CancelFitException), at=0))
    now = weights(learn)
    names = [k for k, _ in learn.model.named_parameters()]
    return torch.cat([(now[k] - before[k]).float().flatten() for k in names]).norm().item()


@fails_on(masters, flat_masters, says="the step is as long as it may be")
def test_d08_gradient_clip_clips(way):
    """fastai: `GradientClip` comes when the masters have their gradients, and has no effect."""
    learn = make_learner(plain_sgd, net, loss_func=sum_of, cbs=GradientClip(0.125))
    found = update_of_one_step(way(learn, dynamic=False, loss_scale=8.0))
    assert found == pytest.approx(0.125, rel=0.02), "the step is as long as it may be"


@fails_on(masters, says="the step is as long as it may be")
def test_d08_clipping_is_of_all_groups_together(way):
    """fastai: `clip=` clips each group by itself, so two groups step √2 times as far."""
    learn = make_learner(plain_sgd, net, splitter=two_groups, loss_func=sum_of)
    found = update_of_one_step(way(learn, clip=0.125, dynamic=False, loss_scale=8.0))
    assert found == pytest.approx(0.125, rel=0.02), "the step is as long as it may be"


@fails_on(flat_masters, says="each layer by its own norms")
def test_d09_layer_wise_optimizers(way):
    """fastai: to Lamb and LARS a flat vector is one layer, silently. Ours refuses, and says why."""

    def updates(learn):
        before = weights(learn)
        learn.fit(1, 0.05, wd=0.0)
        now = weights(learn)
        return torch.stack([(now[k] - before[k]).norm() for k in ("0.weight", "5.weight")])

    expected = updates(make_learner("lars", net))
    learn = make_learner("lars", net)
    if way is ours_flat:
        with pytest.raises(MixedPrecisionError, match="looks at whole layers.*flat_master=False"):
            way(learn)
        return
    near = torch.allclose(updates(way(learn)), expected, rtol=0.05)
    assert near, "each layer by its own norms"


@fails_on(masters, flat_masters, says="32-bit weights")
def test_d10_a_checkpoint_of_the_middle_of_a_fit(way):
    """fastai: what is saved in a fit is the 16-bit model, and its masters are lost."""
    learn = way(make_learner(model=net))
    files = []

    def save(learn):
        files.append(torch.load(learn.save("middle"), weights_only=False)["model"])

    learn.fit(1, 0.05, cbs=Do("after_epoch", save, training=False))
    (file,) = files
    floats = {k: v for k, v in file.items() if v.is_floating_point()}
    assert {v.dtype for v in floats.values()} == {torch.float32}, "a file holds 32-bit weights"
    assert not torch.equal(file["0.weight"], file["0.weight"].half().float())
    assert_same({k: file[k] for k in floats}, {k: weights(learn)[k] for k in floats})


@fails_on(masters, flat_masters, says="the scale goes on")
def test_d10_a_checkpoint_holds_the_scale(way):
    """fastai: no file holds the loss scale; a run that goes on starts from the first one again."""
    learn = way(make_learner(model=net, loss_func=sum_of))
    learn.fit(1, 1e-3, cbs=overflowing(at=1))
    learn.save("scale")
    other, scales = way(make_learner(model=net, loss_func=sum_of)), Scales()
    other.load("scale")
    other.fit(1, 1e-3, cbs=scales.cb())
    assert scales == [256.0] * 4, "the scale goes on"


def find_a_rate(learn):
    """Look for a rate up to where the loss is beyond all bounds."""
    learn.lr_find(num_it=8, end_lr=100, stop_div=False, show_plot=False, suggest_funcs=None)


@fails_on(masters, flat_masters, says="the weights are as they were")
def test_d10_lr_find_leaves_the_weights(way):
    """fastai: `lr_find` gives back weights that are rounded to 16 bits."""
    learn = make_learner(model=net)
    before = weights(learn)
    find_a_rate(way(learn))
    assert not moved(learn, before), "the weights are as they were"


@fails_on(flat_masters, says="the optimizer is as it was")
def test_d10_lr_find_leaves_the_optimizer(way):
    """fastai: after a flat `lr_find` the momentum is the one of the run that diverged."""
    learn = way(make_learner(model=net))
    learn.fit(1, 0.05)
    before = opt_state(learn)["state"]
    find_a_rate(learn)
    first = (opt_state(learn)["state"][0]["grad_avg"], before[0]["grad_avg"])
    assert torch.equal(*first), "the optimizer is as it was"
    assert_same(opt_state(learn)["state"], before)


@fails_on(masters, flat_masters, says="a constant scale is checked too")
def test_d11_a_constant_scale_is_checked(way):
    """fastai: with `dynamic=False` gradients that are inf go straight into the weights."""
    learn = way(make_learner(model=net), dynamic=False)
    learn.fit(1, 0.05, cbs=overflowing(at=1))
    assert all_finite(weights(learn)), "a constant scale is checked too"


@fails_on(masters, flat_masters, says="the scale has a floor")
def test_d11_the_scale_has_a_floor(way):
    """fastai: the scale halves for ever; a run of bad batches leaves it at nothing."""
    learn, scales = way(make_learner(model=net, loss_func=sum_of), loss_scale=2.0), Scales()
    learn.fit(3, 0.0, cbs=[overflowing(), scales.cb()])
    assert min(scales) == 1.0, "the scale has a floor"


@fails_on(masters, flat_masters, says="the scale has a ceiling")
def test_d11_the_scale_has_a_ceiling(way):
    """fastai: `max_loss_scale` is where it starts, and no bound at all."""
    settings = dict(loss_scale=16.0, max_scale=16.0, growth_interval=1)
    learn, scales = way(make_learner(model=net, loss_func=sum_of), **settings), Scales()
    learn.fit(1, 0.0, cbs=scales.cb())
    assert scales == [16.0] * 4, "the scale has a ceiling"


class Said(logging.Handler):
    """All that is warned of or logged while this is entered."""

    def __enter__(self):
        self.words, self.catcher = [], warnings.catch_warnings(record=True)
        self.warned = self.catcher.__enter__()
        warnings.simplefilter("always")
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *error):
        logging.getLogger().removeHandler(self)
        self.catcher.__exit__(*error)
        self.words += [str(w.message) for w in self.warned]

    def emit(self, record):
        """Keep what is logged."""
        self.words.append(record.getMessage())


@fails_on(masters, flat_masters, autocast, says="somebody says so")
def test_d11_inputs_beyond_float16_are_told(way):
    """fastai: inputs above 65504 become inf, each step is skipped, and nobody says a word."""
    inside.forget_notices()
    x, y = torch.randn(24, 4) * 1e6, torch.arange(24) % 2
    learn = make_learner(model=lambda: nn.Linear(4, 2), dls=make_dls(x, y))
    before = weights(learn)
    with Said() as said:
        way(learn).fit(1, 0.05)
    assert any("beyond" in words and "65504" in words for words in said.words), "somebody says so"
    assert not moved(learn, before)


@fails_on(masters, flat_masters, says="what was unfrozen is trained")
def test_d12_unfreezing_from_a_callback(way):
    """fastai: what is trained is settled when the fit begins; `unfreeze` in it does nothing."""
    in_half = net().half().float()  # so that rounding is no move
    learn = way(make_learner(model=in_half, splitter=two_groups))
    learn.freeze()
    before = weights(learn)
    learn.fit(1, 0.05, cbs=Do("before_batch", lambda learn: learn.unfreeze(), at=2))
    assert {"0.weight", "0.bias"} <= moved(learn, before), "what was unfrozen is trained"


# Autocast: fastai's `to_fp16` and `to_bf16`


def types_inside(learn):
    """Return the types that a fit's layers compute in."""
    seen = set()
    layers = [m for m in learn.model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    hooks = [m.register_forward_hook(lambda m, i, o: seen.add(o.dtype)) for m in layers]
    learn.fit(1, 0.05)
    for hook in hooks:
        hook.remove()
    return seen


@fails_on(as_shipped, says="in 16 bits")
def test_n01_sixteen_bits_off_cuda(way):
    """fastai: autocast is asked for by the name of "cuda"; without it a fit is one in 32 bits."""
    assert types_inside(way(make_learner(model=net))) == {torch.float16}, "in 16 bits"


@fails_on(autocast, says="the scale goes on")
def test_n02_the_scale_lives_across_fits(way):
    """fastai: each fit makes the scaler anew, and wastes its first steps again."""
    learn, scales = way(make_learner(model=net, loss_func=sum_of)), Scales()
    learn.fit(1, 1e-3, cbs=overflowing(at=1))
    learn.fit(1, 1e-3, cbs=scales.cb())
    assert scales == [256.0] * 4, "the scale goes on"


@fails_on(autocast, says="the scale goes on")
def test_n02_a_checkpoint_holds_the_scale(way):
    """fastai: the scaler is in no checkpoint."""
    learn = way(make_learner(model=net, loss_func=sum_of))
    learn.fit(1, 1e-3, cbs=[overflowing(at=1), Do("after_batch", save_as("n02"), at=3)])
    other, scales = way(make_learner(model=net, loss_func=sum_of)), Scales()
    other.load("n02")
    other.fit(1, 1e-3, cbs=scales.cb())
    assert scales == [256.0] * 4, "the scale goes on"


def save_as(name):
    """Return what saves a learner under `name`."""
    return lambda learn: learn.save(name)


@fails_on(autocast, says="scaling is off")
def test_n03_scaling_can_be_switched_off(way):
    """fastai: `enabled=False` is taken, and overwritten."""
    learn, scales = make_learner(model=net, loss_func=sum_of), Scales()
    way(learn, enabled=False).fit(1, 1e-3, cbs=scales.cb())
    assert scales == [1.0] * 4, "scaling is off"


@pytest.fixture
def leave_autocast():
    """Leave the autocast that a check of fastai's own has left entered."""
    yield
    torch.set_autocast_enabled("cpu", False)
    torch.clear_autocast_cache()
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting() > 0:
        pass


def is_anything_entered():
    """Whether a mode of PyTorch is on that changes what is computed."""
    return torch.is_autocast_enabled("cpu") or torch.overrides._len_torch_function_stack() > 0


@pytest.mark.usefixtures("leave_autocast")
@fails_on(autocast, says="nothing stays entered")
def test_n04_nothing_stays_entered_after_a_cancelled_batch(way):
    """fastai: autocast is entered before the batch and left after the loss, or not at all."""
    learn = way(make_learner(model=net))
    learn.fit(1, 0.05, cbs=Do("after_pred", raiser(CancelBatchException), at=1))
    assert not is_anything_entered(), "nothing stays entered"


@pytest.mark.usefixtures("leave_autocast")
@fails_on(autocast, says="nothing stays entered")
def test_n04_nothing_stays_entered_after_an_exception(way):
    """fastai: after an error all that the user does next is in 16 bits."""
    learn = way(make_learner(model=net))
    with pytest.raises(ValueError, match="stop"):
        learn.fit(1, 0.05, cbs=Do("after_pred", raiser(ValueError), at=1))
    assert not is_anything_entered(), "nothing stays entered"
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.usefixtures("leave_autocast")
@fails_on(autocast, error=AttributeError, says="'NoneType' object has no attribute '__enter__'")
def test_n05_predicting_inside_a_fit(way):
    """fastai: the predictions' end takes the scaler away from the fit that goes on."""

    def predict(learn):
        learn.remove_cb(predicting)  # once: predicting has epochs, too
        assert learn.get_preds(reorder=False)[0].dtype == torch.float32

    def train(cbs):
        learn = way(make_learner(model=net))
        learn.fit(2, 0.05, cbs=cbs)
        return weights(learn)

    predicting = Do("after_epoch", predict, training=False)
    assert_same(train(predicting), train([]))


@pytest.mark.usefixtures("leave_autocast")
@fails_on(autocast, says="No inf checks were recorded")
def test_n06_to_fp16_twice(way):
    """fastai: two callbacks share one scaler, and the second finds it used."""
    learn = way(way(make_learner(model=net)))
    learn.fit(1, 0.05)
    expected = way(make_learner(model=net))
    expected.fit(1, 0.05)
    assert_same(weights(learn), weights(expected))


@pytest.mark.usefixtures("leave_autocast")
@fails_on(autocast, error=ValueError, says="Attempting to unscale FP16 gradients")
def test_n07_a_half_model(way):
    """fastai: what is in 16 bits already has 16-bit gradients, which the scaler refuses."""
    learn = way(make_learner(model=lambda: linear().half()))
    before = weights(learn)
    learn.fit(1, 0.01)
    assert moved(learn, before) == {"1.weight", "1.bias"}
    assert all_finite(weights(learn))


Pair = namedtuple("Pair", "logits hidden note")


class ModelOutput(OrderedDict):
    """What the libraries of transformers return: a dict with attributes."""

    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


class Wrapping(nn.Module):
    """A net whose output is made by `wrap`."""

    def __init__(self, wrap):
        super().__init__()
        self.net, self.wrap = net(), wrap

    def forward(self, x):
        return self.wrap(self.net(x))


def on_logits(pred, y):
    """Return the loss of an output that has logits."""
    return F.cross_entropy(pred.logits, y)


def fit_wrapped(way, wrap):
    """Fit a model whose outputs are wrapped, and return the first of them that the loss sees."""
    seen = []
    learn = way(make_learner(model=lambda: Wrapping(wrap), loss_func=on_logits))
    learn.fit(1, 0.05, cbs=Do("after_pred", lambda learn: seen.append(learn.pred), at=0))
    return seen[0]


@pytest.mark.usefixtures("leave_autocast")
@fails_on(autocast, masters, error=AttributeError, says="no attribute 'logits'")
def test_n08_a_model_output_stays_one(way):
    """fastai: outputs are rebuilt, and a dict with attributes comes back without them."""
    pred = fit_wrapped(way, lambda x: ModelOutput(logits=x))
    assert type(pred) is ModelOutput and pred.logits.dtype == torch.float32


@pytest.mark.usefixtures("leave_autocast")
@fails_on(autocast, masters, error=TypeError, says="NoneType")
def test_n08_a_namedtuple_stays_one(way):
    """fastai: a namedtuple, and a None or a string in it, crash."""
    pred = fit_wrapped(way, lambda x: Pair(x, None, "text"))
    assert type(pred) is Pair and pred.hidden is None and pred.note == "text"
    assert pred.logits.dtype == torch.float32


@fails_on(autocast, masters, flat_masters, says="statistics are finite")
def test_n09_a_skipped_step_leaves_the_statistics(way):
    """fastai: the step is skipped, but BatchNorm keeps the batch's inf and nan for good."""
    learn = way(make_learner(model=net))

    def overflow(learn):
        learn.xb = (torch.full_like(learn.xb[0], float("inf")),)

    learn.fit(1, 0.01, cbs=Do("before_batch", overflow, at=1, order=5))
    assert all_finite(weights(learn)), "the statistics are finite"


@fails_on(autocast, masters, flat_masters, says="stops on nan")
def test_n10_lr_find_stops_on_nan(way):
    """fastai: nan is not greater than anything, so `lr_find` goes on to its last iteration."""
    learn, losses = make_learner(plain_sgd, net), []

    def spoil(learn):
        learn.xb = (torch.full_like(learn.xb[0], float("nan")),)

    spoiled = [Do("before_batch", spoil, at=i, order=5) for i in range(10, 100)]
    look = Do("after_batch", lambda learn: losses.append(learn.loss.item()))
    with learn.added_cbs([*spoiled, look]):
        way(learn).lr_find(num_it=100, show_plot=False, suggest_funcs=None)
    assert len(losses) < 100, "it stops on nan"
