"""`MasterOptimizer` under `DistributedDataParallel`: two ranks in a plain loop, over gloo.

One pair of processes trains all the cases; the tests look at what it brings back. What both ranks
should come to is what one process comes to with the joined batch.
"""

import copy
import math
import traceback
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from inside import round_half_up
from ranks import on_two_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mixedfp.optimizer import MasterOptimizer, with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
EACH, FLAT = dict(), dict(flat_master=True)
STREAM = dict(flat_master=True, stream=True)
LAYOUTS = dict(each=EACH, flat=FLAT, stream=STREAM)

# What is trained


class Net(nn.Module):
    """Three layers; only some rows use the middle one."""

    def __init__(self):
        super().__init__()
        self.first, self.some, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.norm = nn.LayerNorm(8)

    def forward(self, x, use):
        x = self.norm(torch.tanh(self.first(x)))
        if use.any():
            x = x + use[:, None].to(x.dtype) * self.some(x)
        return self.last(x)


class NormedByBatch(Net):
    """With running statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)


class Unused(Net):
    """With a layer that no row uses."""

    def __init__(self):
        super().__init__()
        self.never = nn.Linear(8, 8)


def make_data(steps, micro):
    """Return inputs, who uses `some`, and targets: [step, micro-batch, row of both ranks]."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(steps, micro, 16, 6, generator=rng)
    return x, x[..., :2] * 2 + 1


def loss_of(model, x, use, y):
    """Return the loss, in float32, of a model in any dtype."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    return F.mse_loss(model(x.to(module.first.weight.dtype), use).float(), y)


def build(case, rank):
    """Return model and optimizers of `case`; `rank` None is one process."""
    torch.manual_seed(rank or 0 if case.get("own_start") else 0)
    make = case.get("net", Net)
    model = make()
    opt_of = case.get("opt", AdamW)
    kwargs = dict(lr=0.02, weight_decay=0.1) | case.get("settings", {})
    dtype, layout = case.get("dtype", HALF), case.get("layout", EACH)
    if case.get("loose"):
        model = model.to(dtype)
        return model, MasterOptimizer(opt_of(model.parameters(), **kwargs), **layout)
    parts = [model.parameters()]
    if case.get("two"):
        parts = [model.first.parameters(), [*model.parameters()][2:]]
    opts = [opt_of(part, **kwargs) for part in parts]
    return with_masters(model, *opts, dtype=dtype, **layout)


def note_and_send(sent, bucket):
    """Average a bucket over the ranks, as without a hook; add its dtype and size to `sent`."""
    sent.append((bucket.buffer().dtype, bucket.buffer().numel()))
    return allreduce_hook(None, bucket)


def train(case, rank=None):
    """Train `case` on `rank`, or in one process with the joined batch; return what came of it."""
    model, *opts = build(case, rank)
    called, sent = model, []
    if rank is not None and not case.get("unwrapped"):
        called = DistributedDataParallel(model, **case.get("ddp", {}))
        if case.get("hook", True):
            called.register_comm_hook(sent, note_and_send)
    scaler = LossScaler(
        "cpu", init_scale=256.0, growth_interval=3, enabled=case.get("dtype", HALF) == HALF
    )
    steps, micro, bad = case.get("steps", 5), case.get("micro", 1), case.get("bad")
    is_shared = isinstance(called, DistributedDataParallel)
    rows = slice(8 * rank, 8 * rank + 8) if is_shared else slice(None)
    xs, ys = make_data(steps, micro)
    answers, grads, average = [], [], None
    for i in range(steps):
        use = torch.zeros(16, dtype=torch.bool)
        use[8:] = i % 2 == 1 or not case.get("some_unused")  # rank 0 never, rank 1 every other time
        if not case.get("some_unused"):
            use[:] = True
        for opt in opts:
            opt.zero_grad(case.get("set_to_none", True))
        for j in range(micro):
            x, y = xs[i, j].clone(), ys[i, j]
            if i == bad:
                x[15, 0] = math.inf  # on rank 1
            is_last = j == micro - 1
            is_sent = not is_shared or is_last or not case.get("no_sync", True)
            with nullcontext() if is_sent else called.no_sync():
                loss = loss_of(called, x[rows], use[rows], y[rows])
                if case.get("asks_in_between"):
                    with torch.no_grad():
                        loss_of(model, x[rows], use[rows], y[rows])
                if not case.get("late"):
                    scaler.scale(loss / micro).backward()
            if case.get("late"):  # it is the forward pass that decides whether they are sent
                with called.no_sync() if is_shared else nullcontext():
                    scaler.scale(loss / micro).backward()
            if case.get("looks") and not is_last:
                assert all(g["params"] for opt in opts for g in opt.param_groups)
        for opt in opts:
            scaler.unscale_(opt)
            assert opt.param_groups  # who asks, takes the gradients over, also without a scaler
        if case.get("clip"):
            clip_grad_norm_(model.parameters(), case["clip"])
        grads.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        answers += [scaler.step(opt) for opt in opts]
        scaler.update()
        if case.get("averages") and i == 0:  # after a forward pass: the model knows who sends
            twin = opts[0].float_model()
            average = AveragedModel(twin, multi_avg_fn=get_ema_multi_avg_fn(0.5))
            assert_same(dict(copy.deepcopy(model).state_dict()), dict(model.state_dict()))
        if average is not None:
            average.update_parameters(twin)
    return copy.deepcopy(
        dict(
            agreed=dict(
                model=[p.detach() for p in (*model.parameters(), *model.buffers())],
                masters=[p.detach() for opt in opts for g in opt.param_groups for p in g["params"]],
                saved=dict(model.state_dict()),
                opt=[opt.state_dict() for opt in opts],
                scaler=scaler.state_dict(),
                scales=[scaler.scales, scaler.skipped, answers],
                grads=grads,
            ),
            sent=sent,
            average=None if average is None else dict(average.state_dict()),
            weights=weights(model, *opts),
        )
    )


def weights(model, opt, *_):
    """Return the 32-bit weights of the model's parameters, as one vector."""
    held = opt.state_dict().get("masters")  # where no model is known
    if held is None:
        state = model.state_dict()
        held = [state[k] for k, _ in model.named_parameters()]
    return torch.cat([t.detach().flatten() for t in held])


SOME_UNUSED = dict(net=Unused, some_unused=True, ddp=dict(find_unused_parameters=True))
VIEW = dict(ddp=dict(gradient_as_bucket_view=True))

CASES = {
    **{f"half-{k}": dict(layout=v, bad=2) for k, v in LAYOUTS.items()},
    **{f"bfloat-{k}": dict(layout=v, dtype=BF16) for k, v in LAYOUTS.items()},
    **{f"full-{k}": dict(layout=v, dtype=FULL) for k, v in LAYOUTS.items()},
    **{f"view-{k}": dict(layout=v, bad=2, **VIEW) for k, v in LAYOUTS.items()},
    **{f"unused-{k}": dict(layout=v, bad=3, **SOME_UNUSED) for k, v in LAYOUTS.items()},
    **{f"parts-{k}": dict(layout=v, bad=2, micro=4) for k, v in LAYOUTS.items()},
    **{f"looks-{k}": dict(layout=v, bad=2, micro=4, looks=True) for k, v in LAYOUTS.items()},
    **{f"fused-{k}": dict(layout=v, bad=2, settings=dict(fused=True)) for k, v in LAYOUTS.items()},
    **{f"loose-{k}": dict(layout=v, bad=2, loose=True) for k, v in LAYOUTS.items()},
    **{f"clip-{k}": dict(layout=v, bad=2, clip=0.1, opt=SGD) for k, v in LAYOUTS.items()},
    **{f"zeros-{k}": dict(layout=v, bad=2, set_to_none=False) for k, v in LAYOUTS.items()},
    "remainders": dict(dtype=BF16, layout=dict(flat_master=True, store_param_remainders=True)),
    "bare": dict(bad=2, hook=False),
    "loose-bfloat": dict(dtype=BF16, loose=True),
    "loose-parts": dict(dtype=HALF, loose=True, micro=4),
    "view-parts": dict(layout=STREAM, micro=4, bad=2, **VIEW),
    "view-unused-parts": dict(
        layout=STREAM, micro=2, bad=3, net=Unused, some_unused=True,
        ddp=dict(gradient_as_bucket_view=True, find_unused_parameters=True),
    ),
    "each-part-sent": dict(layout=FLAT, micro=4, no_sync=False),
    "static": dict(bad=2, ddp=dict(static_graph=True)),
    "batchnorm": dict(bad=2, net=NormedByBatch),
    "batchnorm-fused": dict(bad=2, net=NormedByBatch, settings=dict(fused=True)),
    "own-start": dict(own_start=True, bad=2),
    "own-start-flat": dict(own_start=True, bad=2, layout=FLAT),
    "unwrapped-parts": dict(unwrapped=True, micro=4, bad=2),
    "late": dict(late=True, bad=2),
    "averages": dict(averages=True, bad=2),
    "averages-flat": dict(averages=True, bad=2, layout=FLAT),
    "asks-in-between": dict(asks_in_between=True),
    "two": dict(two=True, bad=2),
    "two-flat": dict(two=True, bad=2, layout=FLAT),
    "asks-not": dict(),
    "asks-in-between-parts": dict(asks_in_between=True, micro=3, layout=STREAM),
}  # fmt: skip


def remainders_by_hand(rank):
    """Return float32 copies that PyTorch steps; gradients are averaged by hand, in 16 bits."""
    torch.manual_seed(0)
    masters = [p.detach() for p in Net().parameters()]
    model, opt = Net().bfloat16(), AdamW(masters, lr=0.02, weight_decay=0.1)
    xs, ys = make_data(5, 1)
    rows = slice(8 * rank, 8 * rank + 8)
    for x, y in zip(xs[:, 0, rows], ys[:, 0, rows], strict=True):
        for p, master in zip(model.parameters(), masters, strict=True):
            p.data, p.grad = round_half_up(master), None
        loss_of(model, x, torch.ones(8, dtype=torch.bool), y).backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            torch.distributed.all_reduce(p.grad.div_(2))
            master.grad = p.grad.float()
        opt.step()
    return dict(agreed={}, told=[], weights=torch.cat([m.flatten() for m in masters]))


def train_all(rank):
    """Train all cases; where one fails, its place holds what was raised."""
    results = {}
    for name, case in CASES.items():
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                results[name] = train(case, rank)
            results[name]["told"] = [str(w.message) for w in told]
        except Exception:
            results[name] = traceback.format_exc()
    results["remainders-by-hand"] = remainders_by_hand(rank)
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return what each of the two ranks brought back: a dict of results by case."""
    return on_two_ranks(train_all, tmp_path_factory.mktemp("ranks"), ("test_optimizer_ranks",))


@pytest.fixture(scope="module")
def alone():
    """Return a function that trains a case in one process, with the joined batch."""
    kept = {}

    def train_alone(name):
        if name not in kept:
            kept[name] = train(CASES[name])
        return kept[name]

    return train_alone


def both(ranks, name):
    """Return the results of a case on both ranks."""
    for rank, found in enumerate(ranks):
        assert not isinstance(found[name], str), f"rank {rank}: {found[name]}"
    return [found[name] for found in ranks]


NAMES = pytest.mark.parametrize("name", list(CASES))


@NAMES
def test_both_ranks_have_the_same_bits(ranks, name):
    """Weights, masters, moments, gradients, scales and answers, in model and checkpoint."""
    one, two = (found["agreed"] for found in both(ranks, name))
    if name.startswith("batchnorm"):  # statistics are each rank's own until the next forward pass
        one, two = without_statistics(one), without_statistics(two)
    assert_same(one, two)


def without_statistics(agreed):
    """Return `agreed` without BatchNorm's buffers."""
    saved = {k: v for k, v in agreed["saved"].items() if not k.startswith("norm.running")}
    return agreed | dict(model=agreed["model"][:-3], saved=saved)


def start(name):
    """Return the weights that a case begins with."""
    return weights(*build(CASES[name], None))


@pytest.mark.parametrize("name", [n for n in CASES if "batchnorm" not in n])
def test_two_ranks_go_where_one_process_goes(ranks, alone, name):
    """With the joined batch: within 16 bits' rounding, for float32 within that of a sum.

    Not with BatchNorm: each rank normalizes its own half of the batch, which is another model.
    """
    case = CASES[name]
    one, _ = both(ranks, name)
    ours, joined = one["weights"], alone(name)["weights"]
    if case.get("dtype") == FULL:
        torch.testing.assert_close(ours, joined, rtol=1e-5, atol=1e-6)
        return
    near = 0.15 if case.get("dtype") == BF16 else 0.03
    assert (ours - joined).norm() / (joined - start(name)).norm() < near
    assert_same(one["agreed"]["scales"], alone(name)["agreed"]["scales"])


@NAMES
def test_gradients_are_sent_in_the_models_dtype(ranks, name):
    """Half the bytes of 32 bits; each parameter once a step, however many micro-batches."""
    case = CASES[name]
    one, two = both(ranks, name)
    assert one["sent"] == two["sent"]
    if name in ("bare", "unwrapped-parts"):
        assert one["sent"] == []
        return
    params = list(build(case, None)[0].parameters())
    times = 5 * (case["micro"] if case.get("no_sync") is False else 1)
    for dtype in {p.dtype for p in params}:
        size = sum(p.numel() for p in params if p.dtype == dtype)
        assert sum(n for d, n in one["sent"] if d == dtype) == times * size
    assert {d for d, _ in one["sent"]} == {p.dtype for p in params}
    assert case.get("dtype", HALF) in {d for d, _ in one["sent"]}


@NAMES
def test_pain_28_both_skip_what_overflows_on_one(ranks, name):
    """The inf of rank 1 comes to rank 0 with the gradients: same answer, same scale."""
    case = CASES[name]
    for found in both(ranks, name):
        scales, skipped, answers = found["agreed"]["scales"]
        if case.get("dtype", HALF) != HALF:
            continue
        bad = case.get("bad")
        assert skipped == ([] if bad is None else [bad])
        first = [i != bad for i in range(5)]  # inf goes in there; tanh leaves 1 of it
        taken = [bool(answer) for answer in answers]  # a fused one's are tensors
        assert taken == (sum(([a, True] for a in first), []) if case.get("two") else first)
        assert bad is None or scales[bad + 1] == scales[bad] / 2
        assert found["agreed"]["model"][0].isfinite().all()


@pytest.mark.parametrize("name", [n for n in CASES if n.split("-")[-1] in ("flat", "stream")])
def test_flat_and_stream_change_no_bit(ranks, name):
    """What is sent and stepped is what per-parameter masters send and step.

    Fused CPU kernels round the ends of a tensor otherwise: there within 4 ulps of the largest.
    """
    plain = name.rsplit("-", 1)[0] + "-each"
    if plain not in CASES:
        plain = name.removesuffix("-flat")
    one, two = both(ranks, name)[0], both(ranks, plain)[0]
    if "fused" in name:
        torch.testing.assert_close(one["weights"], two["weights"], rtol=1e-5, atol=1e-6)
        return
    assert_same(one["weights"], two["weights"])
    assert_same(one["agreed"]["grads"], two["agreed"]["grads"])
    assert_same(one["agreed"]["opt"], two["agreed"]["opt"])


@pytest.mark.parametrize(
    "name, other",
    [
        *[(f"view-{k}", f"half-{k}") for k in LAYOUTS],
        *[(f"looks-{k}", f"parts-{k}") for k in LAYOUTS],
        *[(f"zeros-{k}", f"half-{k}") for k in LAYOUTS],
        ("bare", "half-each"),
        ("static", "half-each"),
        ("own-start", "half-each"),
        ("late", "half-each"),
        ("asks-in-between", "asks-not"),
        ("averages", "half-each"),
        ("view-parts", "parts-stream"),
    ],
)
def test_what_changes_no_bit(ranks, name, other):
    """Gradients as views of buckets, a look between micro-batches, zeros instead of None, ..."""
    one, two = both(ranks, name)[0], both(ranks, other)[0]
    assert_same(one["agreed"], two["agreed"])


def test_masters_of_two_bytes_are_those_of_an_average_by_hand(ranks):
    """Bit for bit, on both ranks, with more bits than the weights have."""
    for one, hand in zip(both(ranks, "remainders"), both(ranks, "remainders-by-hand"), strict=True):
        assert_same(one["weights"], hand["weights"])
    assert not one["weights"].equal(one["weights"].bfloat16().float())


@pytest.mark.parametrize("name", ["averages", "averages-flat"])
def test_averages_of_the_masters_agree(ranks, alone, name):
    """A moving average over `float_model()`, made while ranks train, has the same bits on both."""
    one, two = both(ranks, name)
    assert_same(one["average"], two["average"])
    ours, joined = one["average"], alone(name)["average"]
    assert int(ours["n_averaged"]) == 5
    torch.testing.assert_close(ours, joined, rtol=0.01, atol=0.005)
    assert not torch.equal(ours["module.last.weight"], one["agreed"]["saved"]["last.weight"])


def test_unwrapped_in_a_group_is_one_process(ranks, alone):
    """Ranks that share nothing, each with the whole batch: micro-batches add up in 32 bits."""
    name = "unwrapped-parts"
    assert_same(both(ranks, name)[0]["agreed"], alone(name)["agreed"])


@pytest.mark.parametrize("name", [n for n in CASES if "unused" in n])
def test_a_layer_that_no_rank_uses_does_not_move(ranks, name):
    """Neither by weight decay nor by zeros sent for it; a layer that rank 1 alone uses does."""
    one, _ = both(ranks, name)
    begun, saved = build(CASES[name], None)[0].state_dict(), one["agreed"]["saved"]
    assert_same(saved["never.weight"], begun["never.weight"])
    assert not torch.equal(saved["some.weight"], begun["some.weight"])


@NAMES
def test_gradients_are_float32_when_they_are_looked_at(ranks, name):
    """After `unscale_`, on every parameter that has one."""
    one, _ = both(ranks, name)
    dtypes = {g.dtype for gs in one["agreed"]["grads"] for g in gs if g is not None}
    assert dtypes == {FULL}


def exact_gradient(name):
    """Return the first step's gradient of a case in fp64, from the weights rounded to 16 bits."""
    case = CASES[name]
    model, _ = build(case, None)
    exact = Net().double()
    with torch.no_grad():
        for p, q in zip(exact.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    xs, ys = make_data(case.get("steps", 5), case["micro"])
    x, y = xs[0].flatten(0, 1).to(case.get("dtype", HALF)), ys[0].flatten(0, 1)
    F.mse_loss(exact(x.double(), torch.ones(len(x), dtype=torch.bool)), y.double()).backward()
    return torch.cat([p.grad.flatten() for p in exact.parameters()])


def error(result, exact):
    """Return how far the first gradient is from `exact`, as a part of it."""
    grads = torch.cat([g.double().flatten() for g in result["agreed"]["grads"][0]])
    return ((grads - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_accumulation_under_no_sync_is_as_exact_as_one_batch(ranks, layout):
    """Four micro-batches, added in 32 bits, are rounded once to be sent; as one batch's are."""
    name = f"parts-{layout}"
    exact = exact_gradient(name)
    ours = error(both(ranks, name)[0], exact)
    case = CASES[name]
    model, opt = build(case, None)
    xs, ys = make_data(5, 4)
    x, y = xs[0].flatten(0, 1), ys[0].flatten(0, 1)
    scaler = LossScaler("cpu", init_scale=256.0)
    scaler.scale(loss_of(model, x, torch.ones(len(x), dtype=torch.bool), y)).backward()
    scaler.unscale_(opt)
    joined = dict(agreed=dict(grads=[[p.grad for p in model.parameters()]]))
    in_16_bits = error(both(ranks, "loose-parts")[0], exact)
    assert ours < 1.5 * error(joined, exact)
    assert in_16_bits > ours  # the control: where no model is known, they add up in 16 bits


@pytest.mark.parametrize("name", ["batchnorm", "batchnorm-fused"])
def test_a_skip_takes_the_statistics_back_on_both_ranks(ranks, name):
    """Rank 1's were poisoned; on both they are finite, and have counted four batches."""
    for found in both(ranks, name):
        mean, var, count = found["agreed"]["model"][-3:]
        assert mean.isfinite().all() and var.isfinite().all() and int(count) == 4


def test_nothing_is_warned_of(ranks):
    """No case needs a word from PyTorch, such as that strides of a gradient do not fit a bucket."""
    for found in ranks:
        for name, result in found.items():
            assert isinstance(result, str) or result["told"] == [], name
