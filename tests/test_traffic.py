"""Launches, bytes and peak memory of a step on the simulated GPU: ours and autocast's."""

import gc
import json
import sys
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from notebooks import ROOT

if "simulated_cuda.device" not in sys.modules:
    pytest.skip("counts on the simulated GPU", allow_module_level=True)

sys.path.append(str(ROOT / "bench"))
import traffic  # noqa: E402
from networks import LM, loss_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.amp import GradScaler  # noqa: E402

from mixedfp import memory_of  # noqa: E402
from mixedfp.cast import Policy  # noqa: E402
from mixedfp.formats import MixedPrecisionError  # noqa: E402
from mixedfp.optimizer import with_masters  # noqa: E402
from mixedfp.scaler import LossScaler, any_nonfinite  # noqa: E402
from mixedfp.step import MixedTraining  # noqa: E402

flats = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
allocated = traffic.device.allocated
EACH, FLAT, HALF, SMALLEST = list(traffic.MODES)[1:]


@pytest.fixture(autouse=True)
def simulated_cuda():
    """Without the numbers that the plugin has the CPU compute: nothing reads them."""


# launches, bytes and peak, relative to autocast's. The peak is in the loss: our logits are float32
LIMITS = {
    "lm": {
        EACH: (0.53, 0.87, 1.01),
        FLAT: (0.531, 0.87, 1.01),
        HALF: (0.54, 0.89, 1.01),
        SMALLEST: (0.62, 1.07, 0.92),
    },
    "vit": {FLAT: (0.54, 0.79, 0.92), SMALLEST: (0.56, 0.90, 0.86)},
    # the buffers of a skipped step are restored on the device: 11 launches
    "resnet": {FLAT: (0.85, 1.01, 1.01), SMALLEST: (0.87, 1.11, 0.95)},
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_step_keeps_to_its_share_of_autocast(name):
    plain = traffic.count(name, "autocast")
    assert plain["waits"] == 0
    for mode, limits in LIMITS[name].items():
        ours = traffic.count(name, mode)
        found = [ours[k] / plain[k] for k in ("launches", "moved_mb", "peak_mib")]
        print(name, mode, [round(f, 3) for f in found])
        assert all(f <= limit for f, limit in zip(found, limits, strict=True)), (found, limits)
        assert ours["waits"] == (mode in (HALF, SMALLEST))  # chunks read what the check found
        assert ours["products"] == plain["products"]
        assert_is_what_the_page_shows(ours)


def assert_is_what_the_page_shows(row):
    """Assert that `bench/results/traffic.json` holds these counts, if its PyTorch is ours."""
    kept = json.loads((ROOT / "bench" / "results" / "traffic.json").read_text())
    if kept["about"]["torch"] == torch.__version__:
        near = pytest.approx(row["peak_mib"], abs=2)  # noise for rounding is made once a process
        assert row | dict(peak_mib=near) in kept["rows"]


def test_a_block_casts_no_weight_and_the_lesson_draws_what_is_counted():
    found = {mode: traffic.block(mode) for mode in traffic.BLOCKS}
    assert "cast" not in found["mixedfp"]["forward"]
    assert found["mixedfp"]["backward"].split().count("cast") == 2  # a grouped copy of gradients
    kept = json.loads((ROOT / "bench" / "results" / "traffic.json").read_text())
    assert found == kept["block"] or kept["about"]["torch"] != torch.__version__


def test_the_check_takes_at_most_five_launches_and_one_read():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        grads = [torch.empty(2**16, dtype=dtype, device="cuda") for _ in range(90)]
        with traffic.Traffic():
            before = traffic.device.counts()
            any_nonfinite(grads).item()
            found = traffic.device.counts() - before
        assert found.launches <= 5 and found.waits == 1, (dtype, found)


KINDS = {"guard": partial(LossScaler, enabled=False), "GradScaler": GradScaler}


@flats
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.parametrize("kind", ["guard", "LossScaler", "GradScaler", "trainer", "no masters"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_with_a_fused_optimizer_no_step_waits_and_others_once(dtype, kind, fused, flat):
    model, x = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8)).cuda(), torch.ones(4, 8).cuda()
    opt, scaler = torch.optim.AdamW(model.parameters(), fused=fused), None
    if kind == "trainer":
        mixed = MixedTraining(Policy(dtype, flat_master=flat))
        mixed.attach(model), mixed.wrap(opt)
        scaler = mixed.scaler
    elif kind != "no masters":
        with_masters(model, opt, dtype=dtype, flat_master=flat)
    scaler = KINDS.get(kind, LossScaler)("cuda") if scaler is None else scaler
    waits = []
    for _ in range(4):
        before = traffic.device.counts()
        scaler.scale(model(x).square().mean()).backward()
        if kind == "trainer":  # as a Learner does
            assert mixed.opt.look() is not True
            opt.step()
        else:
            scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        waits.append((traffic.device.counts() - before).waits)
    assert waits[1:] == [0 if fused else 1] * 3


SETTINGS = {
    "to_bf16": {},
    "and 16-bit gradients": traffic.HALF,
    "and 16-bit states": traffic.HALF | traffic.STATES,
}


@pytest.mark.parametrize("mode", SETTINGS)
def test_a_gpu_holds_the_bytes_that_mixedfp_memory_works_out(mode):
    ids = torch.zeros(2, 128, dtype=torch.long)
    row = memory_of(LM(n_layers=2), ids).rows[mode]
    gc.collect()
    before = allocated().now
    with traffic.Traffic():
        model = LM(n_layers=2).cuda()
        opt = torch.optim.AdamW(model.parameters(), fused=True)
        model, opt = with_masters(model, opt, dtype="bf16", **SETTINGS[mode])
        gc.collect()
        held, x = allocated().now, ids.cuda()
        out = model(x)
        loss = loss_of(out, x)
        active = allocated().now - held
        loss.backward()
        del out, loss
        opt.step()
        gc.collect()
    roles = "weights", "gradients", "states", "buffers"
    assert allocated().now - before == pytest.approx(sum(row[role] for role in roles), rel=0.03)
    assert active == pytest.approx(row["activations"], rel=0.10)


CAPTURED = [("bf16", LossScaler), ("fp16", LossScaler), ("fp16", GradScaler)]


@flats
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.parametrize("dtype, kind", CAPTURED)
def test_a_whole_step_is_captured_unless_the_host_would_have_to_decide(dtype, kind, fused, flat):
    """After a warm-up, as PyTorch describes it."""
    with traffic.Traffic():
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).cuda()
        opt = torch.optim.AdamW(model.parameters(), capturable=True, fused=fused)
        with_masters(model, opt, dtype=dtype, flat_master=flat)
        scaler = kind("cuda", enabled=dtype == "fp16")
        x, stream, graph = torch.zeros(4, 8, device="cuda"), torch.cuda.Stream(), None

        def step():
            opt.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(opt)
            scaler.update()

        unready = mock.patch.object(torch.cuda.Event, "query", return_value=False)
        with torch.cuda.stream(stream), unready:  # the host has read nothing yet
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        n_steps, graph = opt.masters.steps[0].guard.n_steps, torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        words = "capturable=True, or skip_nonfinite=False"
        with nullcontext() if fused else pytest.raises(MixedPrecisionError, match=words):
            with torch.cuda.graph(graph):  # a wait, or a question to an event, is an error here
                before = traffic.device.counts()
                step()
                found = traffic.device.counts() - before
            assert found.waits == 0 and found.launches > 20
            assert opt.masters.steps[0].guard.n_steps == n_steps  # nothing has been stepped
            graph.replay()
            step()
