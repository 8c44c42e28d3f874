"""`store_param_remainders=True`: masters in two bytes a parameter, and the bits of 32-bit ones."""

import copy
import os
import pickle
import warnings
from functools import partial
from tempfile import TemporaryDirectory

import inside
import pytest
import torch
from inside import join, round_half_up, split
from tiny import GROUPS, MODELS, WAYS, Case, make_learner, snapshot
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from mixedfp.callback import MixedPrecision
from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.step import MixedStep
from mixedfp.testing import assert_same

cutting = partial(with_masters, dtype=torch.bfloat16, flat_master=True, store_param_remainders=True)


# The cut


def check_patterns(bits):
    """Hold `split` and `join` against what rounding means, for patterns of float32 numbers."""
    full = bits.view(torch.float32)
    weights, *rest = split(full)
    back, is_number = join(weights, *rest), ~full.isnan()
    assert torch.equal(back.view(torch.int32)[is_number], bits[is_number])
    assert torch.equal(weights.isnan(), ~is_number) and torch.equal(back.isnan(), ~is_number)
    nearest = full.bfloat16()  # half to even
    assert torch.equal(weights.isinf(), nearest.isinf())
    off, least = ((w.double() - full.double()).abs() for w in (weights, nearest))
    assert (off <= least)[weights.isfinite()].all()
    ties = is_number & (bits & 0xFFFF == 0x8000)
    assert torch.equal((weights != nearest) & is_number, ties & (bits >> 16 & 1 == 0))


def test_each_weight_with_remainders_at_which_something_happens():
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32)[:, None] << 16
    low = torch.cat([torch.arange(n - 2, n + 3) for n in (2, 0x100, 0x7FFF, 0x8000, 0xFFFD)])
    check_patterns((high + low.to(torch.int32)).flatten())


@pytest.mark.skipif("MIXEDFP_ALL_PATTERNS" not in os.environ, reason="takes minutes: all 2³²")
def test_each_pattern():
    for start in range(-(2**31), 2**31, 2**22):
        check_patterns(torch.arange(start, start + 2**22).to(torch.int32))


def test_special_numbers():
    largest = torch.finfo(torch.float32).max
    full = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, largest, -largest, 1e-45, -1e-45, 1e-39])
    weights, *rest = split(full)
    assert_same(join(weights, *rest), full)
    assert weights[4:6].tolist() == [torch.inf, -torch.inf] and weights[0].signbit() == 0
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32)  # kinds of nan
    assert split(odd.view(torch.float32))[0].isnan().all()
    written = torch.zeros(9).bfloat16()  # through p.data: nobody sees it
    assert join(written, *rest).abs().max() < 2.0**-133  # the next number of bfloat16


# By hand: a plain optimizer over float32 copies, which are rounded half up into a model

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "each": partial(torch.optim.AdamW, lr=0.01, foreach=False),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "Adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "ASGD": partial(torch.optim.ASGD, lr=0.01),
}
X = torch.linspace(-2, 2, 80).view(5, 16).sin()


def a_net(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 1))
    net.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))  # of no dimension
    return net


def loss_of(net):
    return (net(X.to(net[0].weight.dtype)).float() * net.scale.float()).square().sum()


def train_oracle(make, steps):
    """Return float32 weights trained as plain PyTorch does, with a model that rounds half up."""
    net = a_net()
    masters = {k: nn.Parameter(p.detach().clone()) for k, p in net.named_parameters()}
    model, opt = net.bfloat16(), make(list(masters.values()))
    for _ in range(steps):
        with torch.no_grad():
            for k, p in model.named_parameters():
                p.copy_(round_half_up(masters[k].detach()))
        model.zero_grad()
        loss_of(model).backward()
        for k, p in model.named_parameters():
            masters[k].grad = p.grad.float()
        opt.step()
    return {k: m.detach() for k, m in masters.items()}


def train_cut(net, opt, steps):
    for _ in range(steps):
        opt.zero_grad()
        loss_of(net).backward()
        opt.step()
    return dict(net.state_dict())


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_bits_of_plain_32_bit_masters(make, monkeypatch):
    inside.chunk_size(monkeypatch, 100)
    net = a_net()
    net, opt = cutting(net, make(net.parameters()), compiled=False)
    try:
        found = train_cut(net, opt, 5)
    except MixedPrecisionError as e:
        if make is not OPTIMIZERS.get("Rprop") or "index_put_" not in str(e):
            raise
        pytest.skip("Rprop of PyTorch 2.10 writes elements that it picks out, and is refused")
    assert_same(found, train_oracle(make, 5))
    paths = opt.update_paths()
    assert paths["in chunks"] == sum(p.numel() for p in net.parameters() if p.ndim)
    opt.restore()
    assert_same(dict(net.state_dict()), train_oracle(make, 5))


def test_half_to_even_gives_other_bits():
    """The oracle can tell: rounded as PyTorch rounds, it ends elsewhere where there are ties."""
    tie = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])
    assert round_half_up(tie).tolist() == [1 + 2**-7, 1 + 2**-6] != tie.bfloat16().tolist()


def test_compiled():
    make = OPTIMIZERS["AdamW"]
    net = a_net()
    net, opt = cutting(net, make(net.parameters()), compiled=True)
    found, expected = train_cut(net, opt, 4), train_oracle(make, 4)
    if "compiled" not in opt.update_paths():
        pytest.skip("there is no compiler")
    for k, v in expected.items():
        torch.testing.assert_close(found[k], v, rtol=0, atol=2.0**-20)
    p = net[0].weight
    assert_same(p.detach(), round_half_up(found["0.weight"]))  # weight and remainder fit


def test_on_an_accelerators_layout(monkeypatch):
    inside.align(monkeypatch)
    make = OPTIMIZERS["AdamW"]
    net = a_net()
    net, opt = cutting(net, make(net.parameters()), compiled=False)
    assert_same(train_cut(net, opt, 4), train_oracle(make, 4))


# In a Learner: against 32-bit masters of our own that round half up

CASES = [
    *(Case("fits", opt) for opt in ("sgd", "sgd_l2", "adam", "rmsprop", "radam", "qhadam")),
    *(Case("freezing", opt) for opt in ("sgd", "torch_adamw")),
    *(Case(way, "adam") for way in WAYS if way not in ("fits", "freezing", "clamping")),
    *(Case(way, "sgd", "sometimes_groups", "sometimes") for way in ("fits", "accumulating")),
    Case("saving_and_loading", "torch_adamw", "one_group", "tied"),
]


def train_learner(case, cut):
    mixed = MixedPrecision(dtype=torch.bfloat16, flat_master=True, store_param_remainders=True)
    with TemporaryDirectory() as path, warnings.catch_warnings(), pytest.MonkeyPatch.context() as m:
        warnings.simplefilter("ignore")  # fastai's, of freezing and of saving
        if not cut:
            inside.keep_masters_whole(m)
        model, groups = MODELS[case.model], GROUPS[case.groups]
        learn = make_learner(case.opt, model, groups, path=path, cbs=[mixed])
        torch.manual_seed(0)
        WAYS[case.way](learn)
        if cut and learn.opt is not None:
            assert "in chunks" in mixed.update_paths() or case.way != "fits"
        learn.to_fp32()
        return snapshot(learn)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_learner_has_the_bits_of_32_bit_masters(case):
    assert_same(train_learner(case, cut=True), train_learner(case, cut=False))


# What is held


def test_bytes_held():
    net = nn.Linear(64, 64, bias=False)
    n = net.weight.numel()
    net, opt = cutting(net, torch.optim.SGD(net.parameters(), 0.1))
    on = vars(opt)["_on"]
    for _ in range(2):
        net(torch.ones(2, 64)).sum().backward()
        opt.step()
        assert inside.memory_of_masters(on) <= 2 * n + 16
        net.state_dict()
    with pytest.raises(RuntimeError):  # one number stands for all
        opt.param_groups[0]["params"][0].data.add_(1)
    assert opt.param_groups[0]["params"][0].isnan().all()


def test_master_params_are_copies():
    learn = make_learner("sgd").to_bf16(flat_master=True, store_param_remainders=True)
    learn.fit(1, 0.1)
    before = learn.model.state_dict()
    for master in sum(learn.mp_cb.master_params, []):
        assert master.dtype == torch.float32 and not master.isnan().any()
        master.data.zero_()
    assert_same(dict(learn.model.state_dict()), dict(before))
    assert "store_param_remainders=True" in repr(learn.mp_cb)


# Files, copies, writes


def test_files_hold_32_bits_and_fit_32_bit_models():
    net = a_net()
    net, opt = cutting(net, torch.optim.AdamW(net.parameters(), 0.01))
    full = train_cut(net, opt, 3)
    assert all(v.dtype == torch.float32 for v in full.values())
    plain = a_net(1)
    plain.load_state_dict(full)
    other = a_net(2)
    other, its = cutting(other, torch.optim.AdamW(other.parameters(), 0.01))
    train_cut(other, its, 1)
    other.load_state_dict(plain.state_dict())
    its.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert_same(dict(other.state_dict()), full)
    assert_same(list(other.parameters()), list(net.parameters()))
    assert_same(train_cut(other, its, 3), train_cut(net, opt, 3))


def test_a_tie_is_loaded_as_it_was():
    net = nn.Linear(2, 1, bias=False)
    net, opt = cutting(net, torch.optim.SGD(net.parameters(), 1.0))
    tie = {"weight": torch.tensor([[1 + 2**-8, 1.0]])}  # PyTorch's load rounds it to even
    net.load_state_dict(tie)
    assert net.weight.tolist() == [[1 + 2**-7, 1.0]]
    net(torch.tensor([[0.0, 1.0]])).sum().backward()
    opt.step()
    assert net.state_dict()["weight"].tolist() == [[1 + 2**-8, 0.0]]


def test_a_load_that_fails_changes_nothing():
    net = a_net()
    net, opt = cutting(net, torch.optim.SGD(net.parameters(), 0.01))
    before = train_cut(net, opt, 2)
    with pytest.raises(RuntimeError):
        net.load_state_dict({**a_net(1).state_dict(), "0.weight": torch.zeros(3)})
    assert_same(dict(net.state_dict()), before)
    assert_same(train_cut(net, opt, 0), before)


def test_what_others_write_is_the_master(capsys):
    net = a_net()
    net, opt = cutting(net, torch.optim.SGD(net.parameters(), 1e-4))
    before = train_cut(net, opt, 2)
    with torch.no_grad():
        net[0].weight.mul_(2)
        net[3].weight[0, 0] = 0.3
    written = net[0].weight.detach().float()
    now = net.state_dict()
    assert_same(now["0.weight"], written)
    assert now["3.weight"][0, 0] == torch.tensor(0.3).bfloat16().float()
    assert_same(now["1.weight"], before["1.weight"])  # nobody has written there
    opt.zero_grad()
    loss_of(net).backward()
    grad = net[0].weight.grad.clone()
    opt.step()
    assert_same(net.state_dict()["0.weight"], written - 1e-4 * grad)


def test_memory_that_is_exchanged_keeps_the_low_bits():
    net = a_net()
    net, opt = cutting(net, torch.optim.SGD(net.parameters(), 0.01))
    full = train_cut(net, opt, 2)
    net[0].weight.data = net[0].weight.detach().clone()
    assert_same(dict(net.state_dict()), full)
    assert_same(train_cut(net, opt, 2), train_oracle(partial(torch.optim.SGD, lr=0.01), 4))


def test_copies_are_whole():
    net = a_net()
    net, opt = cutting(net, torch.optim.SGD(net.parameters(), 0.01, momentum=0.5))
    full = train_cut(net, opt, 2)
    average = AveragedModel(net)
    average.update_parameters(net)
    assert_same(dict(average.module.state_dict()), full)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert_same(dict(twin.state_dict()), full)
        assert twin[0].weight.dtype == torch.float32
    both, its = copy.deepcopy((net, opt))
    assert_same(train_cut(both, its, 2), train_cut(net, opt, 2))
    held = [inside.memory_of_masters(vars(o)["_on"]) for o in (its, opt)]
    assert held[0] == held[1]  # cut as well
    with pytest.raises(MixedPrecisionError, match="share their memory"):
        opt.float_model()


# Steps that no pass does, and steps that are none


def note_nan(seen, opt, *_):
    seen.append(opt.param_groups[0]["params"][0].isnan().any())


def test_closures_and_hooks_get_whole_masters():
    make = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    expected = train_oracle(make, 3)
    for use in ("closure", "hook"):
        net = a_net()
        net, opt = cutting(net, make(net.parameters()))
        seen = []
        if use == "hook":
            opt.register_step_pre_hook(lambda *_: None)
            opt.optimizer.register_step_post_hook(partial(note_nan, seen))
            found = train_cut(net, opt, 3)
        else:

            def closure(net=net, opt=opt):
                opt.zero_grad()
                loss = loss_of(net)
                loss.backward()
                return loss

            for _ in range(3):
                opt.step(closure)
            found = dict(net.state_dict())
        assert_same(found, expected)
        assert not any(seen) and inside.memory_of_masters(vars(opt)["_on"]) < 4 * 500


@pytest.mark.parametrize("on_device", [False, True])
def test_a_skipped_step_is_none(on_device):
    net = a_net()
    mixed = MixedStep(torch.bfloat16, True, LossScaler(init_scale=8.0), store_param_remainders=True)
    mixed.attach(net)
    opt = mixed.wrap_optimizer(torch.optim.AdamW(net.parameters(), 0.01))
    inside.be_exclusive(mixed)
    inside.decide_on_device(mixed, on_device)
    kept = []
    for factor in (1.0, 1.0, torch.inf, 1.0):
        mixed.scale(loss_of(net) * factor).backward()
        mixed.step() if mixed.unscale() else mixed.skip()
        mixed.update()
        opt.zero_grad()
        kept.append((dict(net.state_dict()), [p.detach().clone() for p in net.parameters()]))
    assert_same(kept[1], kept[2])
    assert not torch.equal(kept[2][0]["0.weight"], kept[3][0]["0.weight"])
    assert mixed.scaler.n_skipped == 1


# What is refused


def test_refused():
    def attempt(make=torch.optim.SGD, **settings):
        net = a_net()
        settings = dict(flat_master=True, store_param_remainders=True) | settings
        with_masters(net, make(net.parameters(), lr=0.1), **settings)

    with pytest.raises(MixedPrecisionError, match="upper half of float32"):
        attempt(dtype=torch.float16)
    with pytest.raises(MixedPrecisionError, match="needs flat_master=True"):
        attempt(dtype=torch.bfloat16, flat_master=False)
    with pytest.raises(TypeError, match="expected True or False"):
        attempt(dtype=torch.bfloat16, store_param_remainders=1)
    for to in ("to_fp16", "to_bf16"):
        learn = make_learner()
        with pytest.raises(MixedPrecisionError):
            getattr(learn, to)(flat_master=to == "to_fp16", store_param_remainders=True)
        assert next(learn.model.parameters()).dtype == torch.float32
    learn = make_learner("ranger")
    learn.create_opt()
    with pytest.raises(MixedPrecisionError, match="second copy of all weights"):
        learn.to_bf16(flat_master=True, store_param_remainders=True)
    assert next(learn.model.parameters()).dtype == torch.float32


class Searching(torch.optim.SGD):
    """Element-wise, and by an operation that is none: a search in a sorted list."""

    @torch.no_grad()
    def step(self):
        edges = torch.tensor([-1.0, 0.0, 1.0])
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.searchsorted(edges, p.grad.contiguous()).float() - 1.5, alpha=-0.01)


def test_what_cannot_be_recorded_is_refused_before_any_change():
    net = a_net()
    net, opt = cutting(net, Searching(net.parameters(), 0.1))
    before = dict(net.state_dict())
    loss_of(net).backward()
    with pytest.raises(MixedPrecisionError, match="searchsorted.*store_param_remainders=False"):
        opt.step()
    assert_same(dict(net.state_dict()), before)


def test_gradients_that_are_looked_at(monkeypatch):
    """Clipping by hand sees 32-bit gradients, of masters that are not there."""
    found = []
    for whole in (False, True):
        with pytest.MonkeyPatch.context() as m:
            if whole:
                inside.keep_masters_whole(m)
            net = a_net()
            net, opt = cutting(net, torch.optim.AdamW(net.parameters(), 0.01))
            for _ in range(3):
                opt.zero_grad()
                for x in X.split(2):
                    F.mse_loss(net(x), torch.ones(len(x), 1)).backward()
                params = [p for group in opt.param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(params, 0.1)
                opt.step()
            found.append(dict(net.state_dict()))
    assert_same(*found)
