"""What a step may cost on a GPU, counted on a simulated one: waits, launches, copies.

Run by `make test-cuda`: the simulated GPU has to be there before anything imports torch.
"""

import sys

import pytest
import torch
from torch import nn

if "simulated_cuda.device" not in sys.modules:
    pytest.skip("needs -p simulated_cuda.plugin, see make test-cuda", allow_module_level=True)

import inside
from fastai.callback.training import GradientAccumulation, GradientClip
from inside import FlushWatch
from simulated_cuda.device import counts
from simulated_cuda.steps import OPTIMIZERS, by_hand, in_a_learner, net

from mixedfp.checkpoint import Checkpoint
from mixedfp.optimizer import with_masters
from mixedfp.report import precision_report
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
FLAT = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
BY_HAND = {
    "plain": {},
    "accumulating": {"n_batches": 3},
    "clipping": {"clip": 0.1},
    "skipping": {"skips": True},
}
IN_A_LEARNER = {
    "plain": lambda: [],
    "accumulating": lambda: [GradientAccumulation(40)],  # a step in five batches, the counted one
    "clipping": lambda: [GradientClip(0.1)],
    "saving": lambda: [Checkpoint("budget")],
}


# Controls: the counters count


def test_a_number_that_is_read_is_a_wait():
    before = counts()
    torch.ones((), device="cuda").item()
    assert (counts() - before).waits == 1


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_a_copy_from_memory_that_is_not_pinned_is_told_from_one_that_is(pinned):
    vector = torch.ones(8)
    if pinned:
        vector = vector.pin_memory()
    before = counts()
    there = vector.to("cuda", non_blocking=True)
    done = counts() - before
    assert (done.copies, done.pageable_copies) == (1, int(not pinned))
    assert there.tolist() == [1] * 8


def test_memory_that_nobody_has_written_is_nan():
    assert torch.empty(3, device="cuda").isnan().all()


def test_a_foreach_kernel_is_one_launch():
    tensors = [torch.ones(4, device="cuda") for _ in range(5)]
    before = counts()
    torch._foreach_add_(tensors, 1.0)
    assert (counts() - before).launches == 1


def test_tensors_on_two_devices_are_refused():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, 2, device="cuda") @ torch.ones(2, 2)


def test_a_report_waits_once_however_many_passes_there_are():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()]
    model = nn.Sequential(*layers * 3, nn.Linear(8, 2)).cuda()
    batch = torch.randn(4, 8, device="cuda"), torch.arange(4, device="cuda") % 2
    reports, waits = [], []
    for n in (1, 1, 4):  # what is looked up once, the first time
        before = counts()
        reports.append(precision_report(model, [batch] * n, nn.functional.cross_entropy))
        waits.append((counts() - before).waits)
    assert waits[2] == waits[1], waits
    there = precision_report(
        model.cpu(), [tuple(t.cpu() for t in batch)], nn.functional.cross_entropy
    )
    for a, b in zip(reports[1].modules, there.modules, strict=True):
        assert (a.name, a.verdict, a.window) == (b.name, b.verdict, b.window)
        assert a.out.counts == b.out.counts


# Waits and copies


@pytest.mark.parametrize("event", BY_HAND)
@pytest.mark.parametrize("name", OPTIMIZERS)
@FLAT
@HALF
def test_a_step_by_hand_waits_for_nothing(dtype, flat, name, event):
    """Only the verdict on float16 gradients is read, as by `GradScaler`: flat not even that."""
    cost = by_hand(OPTIMIZERS[name], dtype, flat, **BY_HAND[event])
    reads = dtype == torch.float16 and not flat and "fused" not in name
    assert cost.after_backward.waits == int(reads)
    assert cost.after_backward.pageable_copies == 0
    plain = by_hand(OPTIMIZERS[name], None, **BY_HAND[event])
    assert cost.whole.waits == plain.whole.waits + int(reads)
    assert cost.whole.pageable_copies == plain.whole.pageable_copies


@pytest.mark.parametrize("event", IN_A_LEARNER)
@pytest.mark.parametrize("name", ["sgd", "adam", "torch_adamw"])
@FLAT
@HALF
def test_a_learner_waits_for_nothing_that_fastai_does_not_wait_for(
    dtype, flat, name, event, tmp_path, monkeypatch
):
    """But for the verdict, where masters are not flat, or a callback looks at the gradients."""
    monkeypatch.chdir(tmp_path)
    cbs = IN_A_LEARNER[event]
    plain = in_a_learner(name, None, cbs=cbs() if event != "saving" else [])
    cost = in_a_learner(name, dtype, flat, cbs=cbs())
    is_watched = event == "accumulating"  # how `GradientClip` looks is known
    reads = dtype == torch.float16 and (not flat or is_watched)
    assert cost.whole.waits == plain.whole.waits + int(reads)
    assert cost.whole.pageable_copies == plain.whole.pageable_copies


@FLAT
def test_a_look_for_flushed_gradients_waits_for_nothing(flat, monkeypatch):
    costs = []
    for first in (100, 6):  # the step that is counted is the sixth
        monkeypatch.setattr(FlushWatch, "first", first)
        costs.append(by_hand(OPTIMIZERS["AdamW"], torch.float16, flat).whole)
    without, with_look = costs
    assert with_look.waits == without.waits
    assert 1 <= with_look.launches - without.launches <= 2



def test_the_numbers_of_a_compiled_step_are_on_their_way_while_it_is_launched():
    """Its rates, which move from step to step."""
    like, before = torch.ones(4, device="cuda"), counts()
    vector = inside.numbers_for_pass([0.5, 0.25, 2.0], like)
    done = counts() - before
    assert (done.waits, done.copies, done.pageable_copies) == (0, 1, 0)
    assert vector.is_cuda and vector.tolist() == [0.5, 0.25, 2.0]


@pytest.mark.parametrize("scales", [{"0": 16.0}, "auto"], ids=["given", "auto"])
@FLAT
def test_scales_of_layers_are_read_together(flat, scales):
    """One wait for all layers, one for the step."""
    plain = in_a_learner("adam", None)
    cost = in_a_learner("adam", torch.float16, flat, layer_scales=scales)
    assert cost.whole.waits == plain.whole.waits + 2


# Launches


@pytest.mark.parametrize("name", ["sgd", "adam", "torch_adamw"])
@HALF
def test_a_flat_step_has_as_many_launches_for_any_number_of_layers(dtype, name):
    few, many = (in_a_learner(name, dtype, True, model=net(n_layers=n)) for n in (2, 12))
    assert few.after_backward.launches == many.after_backward.launches


@pytest.mark.parametrize("name", OPTIMIZERS)
@HALF
def test_masters_of_each_parameter_cost_few_launches_more_than_foreach(dtype, name):
    """One to write the model; in float16 the scaler's: the scale, the check, the new scale.

    In bfloat16 a fused optimizer takes the verdict of a check; others would have to wait for it.
    That check is 8 launches in PyTorch 2.15, 9 in 2.14.
    """
    model = net(n_layers=12)
    plain = by_hand(OPTIMIZERS[name], None, model=model).after_backward
    cost = by_hand(OPTIMIZERS[name], dtype, model=model).after_backward
    more = {torch.bfloat16: 9 if "fused" in name else 1, torch.float16: 11}[dtype]
    assert cost.launches <= plain.launches + more


def test_weights_of_two_dtypes_are_written_in_two_launches():
    """As those of a model whose norms stay in 32 bits: PyTorch's own takes one a tensor then."""
    targets = [torch.zeros(4, device="cuda", dtype=d) for d in (torch.bfloat16, torch.float32) * 5]
    sources = [torch.full((4,), i + 0.5, device="cuda") for i in range(10)]
    before = counts()
    inside.torch_private.copy_each_(targets, sources)
    assert (counts() - before).launches == 2
    assert_same([t.float() for t in targets], sources)


# The verdict that nobody reads


@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW, fused"])
def test_a_skip_in_bfloat16_waits_for_nothing(name):
    """The bits are those of masters for each parameter whose verdict is read, as was asked for."""
    results = []
    for flat, skip in [(False, True), (True, None), (False, None)][: 3 if "fused" in name else 2]:
        model = net()
        model.append(nn.BatchNorm1d(2).cuda())
        opt = OPTIMIZERS[name](list(model.parameters()))
        kwargs = dict(dtype=torch.bfloat16, flat_master=flat, skip_nonfinite=skip)
        model, opt = with_masters(model, opt, **kwargs)
        for i in range(6):
            rng = torch.Generator().manual_seed(i)
            x, y = torch.randn(16, 12, generator=rng).cuda(), torch.zeros(16).long().cuda()
            loss = nn.functional.cross_entropy(model(x), y) * (float("inf") if i == 3 else 1)
            loss.backward()
            before = counts()
            opt.step()
            if skip is None and i == 3:  # the first step does what none does again
                assert (counts() - before).waits == 0
            opt.zero_grad()
        assert opt.skipped == [3]
        results.append((dict(model.state_dict()), opt.state_dict()["state"]))
    for other in results[1:]:  # a fused kernel rounds the end of a vector in its own way
        assert_same(results[0], other, ulps=4 if "fused" in name else 0)


@pytest.mark.parametrize("with_scaler_of", ["us", "torch"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_flat_vectors_that_skip_on_the_device_have_the_bits_of_masters_for_each(
    name, with_scaler_of
):
    """Losses overflow in the first steps and in the middle; a schedule and norms go along."""
    results = []
    for flat in (False, True):
        model = net()
        if with_scaler_of == "us":  # torch's tells nobody of a skip: statistics have moved
            model.append(nn.BatchNorm1d(2).cuda())
        opt = OPTIMIZERS[name](list(model.parameters()))
        model, opt = with_masters(model, opt, flat_master=flat)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        kind = LossScaler if with_scaler_of == "us" else torch.amp.GradScaler
        scaler = kind("cuda", init_scale=2.0**13, growth_interval=4)
        rng, told = torch.Generator().manual_seed(0), []
        for i in range(12):
            x = torch.randn(16, 12, generator=rng).cuda()
            y = torch.randint(0, 2, (16,), generator=rng).cuda()
            loss = nn.functional.cross_entropy(model(x), y) * (float("inf") if i == 8 else 64)
            scaler.scale(loss).backward()
            told.append(scaler.step(opt))
            scaler.update()
            schedule.step()
            opt.zero_grad()
        paths, state = opt.update_paths(), opt.state_dict()["state"]
        results.append((dict(model.state_dict()), state, scaler.get_scale()))
        if flat:
            assert paths.keys() == {"in chunks"}
        if with_scaler_of == "us":
            taken = [bool(t) for t in told]
            assert taken.count(False) >= 3 and taken.count(True) >= 5
    assert_same(results[0], results[1])
