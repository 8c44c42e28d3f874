"""Flat masters give the bits of masters one by one, and only optimizers that can are taken."""

import copy
import warnings
from functools import partial

import inside
import pytest
import torch
from fastai.optimizer import Adam, Larc, Optimizer
from tiny import (
    CASES,
    ELEMENTWISE,
    LAYERWISE,
    Case,
    Do,
    conv_net,
    make_learner,
    masters,
    opt_state,
    three_groups,
    torch_optimizer,
    train,
    weights,
)
from torch import nn

from mixedfp.callback import MixedPrecision
from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.step import MixedStep, is_elementwise
from mixedfp.testing import assert_same, ulp_distance

HALVES = [torch.float16, torch.bfloat16]
IN_BFLOAT16 = [case for case in CASES if case.opt in ("sgd", "adam", "torch_adamw")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flat_is_each_in_float16(case):
    assert_same(train(case, torch.float16, flat=True), train(case, torch.float16))


@pytest.mark.parametrize("case", IN_BFLOAT16, ids=str)
def test_flat_is_each_in_bfloat16(case):
    assert_same(train(case, torch.bfloat16, flat=True), train(case, torch.bfloat16))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("opt", ["adam", "ranger", "torch_adamw"])
def test_optimizer_state_is_seen_per_parameter_while_training(opt, dtype):
    case = Case("freezing", opt)
    assert_same(train(case, dtype, flat=True, stay=True), train(case, dtype, stay=True))


def test_the_comparison_can_fail():
    """16 bits are not 32, and float16 is not bfloat16: the runs that are compared really differ."""
    runs = [train(Case("fits"), dtype)["weights"]["0.weight"] for dtype in (*HALVES, None)]
    assert len({tuple(w.flatten().tolist()) for w in runs}) == 3


# Optimizers of torch.optim: the element-wise ones

TORCH = {
    "adadelta": torch_optimizer(torch.optim.Adadelta),
    "adagrad": torch_optimizer(torch.optim.Adagrad),
    "adamax": torch_optimizer(torch.optim.Adamax),
    "nadam": torch_optimizer(torch.optim.NAdam),
    "radam": torch_optimizer(torch.optim.RAdam),
    "asgd": torch_optimizer(torch.optim.ASGD),
    "rprop": torch_optimizer(torch.optim.Rprop),
    "amsgrad": torch_optimizer(torch.optim.AdamW, amsgrad=True),
    "nesterov": torch_optimizer(torch.optim.SGD, momentum=0.9, nesterov=True),
    "centered": torch_optimizer(torch.optim.RMSprop, centered=True, momentum=0.9),
    "foreach": torch_optimizer(torch.optim.AdamW, foreach=True),
}
FUSED = {
    "sgd": torch_optimizer(torch.optim.SGD, momentum=0.9, fused=True),
    "adam": torch_optimizer(torch.optim.Adam, fused=True),
    "adamw": torch_optimizer(torch.optim.AdamW, fused=True),
    "adagrad": torch_optimizer(torch.optim.Adagrad, fused=True),
}


def torch_run(opt, **mixed):
    learn = make_learner(opt, splitter=three_groups)
    learn.create_opt()
    if mixed:
        learn.to_fp16(**mixed)
    has_decay = "wd" in learn.opt.hypers[0]  # Rprop has none
    learn.fit(1, slice(0.001, 0.01), wd=0.1 if has_decay else None)
    learn.to_fp32().fit(1, 0.01)
    return {"weights": weights(learn), "opt": opt_state(learn)}


@pytest.mark.parametrize("name", TORCH)
def test_torch_optimizers_are_taken(name):
    plain = torch_run(TORCH[name])
    for flat in (False, True):
        assert_same(torch_run(TORCH[name], dtype=torch.float32, flat_master=flat), plain)
    assert_same(torch_run(TORCH[name], flat_master=True), torch_run(TORCH[name], flat_master=False))


@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizers_are_taken_within_rounding(name):
    """A fused step computes the ends of a tensor in another order: float32's rounding, no more."""
    flat, each = (torch_run(FUSED[name], dtype=torch.float32, flat_master=f) for f in (True, False))
    assert_same(each, torch_run(FUSED[name]))
    for k, w in flat["weights"].items():
        if w.is_floating_point():
            torch.testing.assert_close(w, each["weights"][k], rtol=1e-5, atol=1e-6)
            assert not w.numel() or ulp_distance(w, each["weights"][k]).median() <= 64


def test_a_learning_rate_that_is_a_tensor_is_taken():
    def make(params, lr, **kwargs):
        opt = torch_optimizer(torch.optim.AdamW)(params, lr=lr, **kwargs)
        for group in opt.opt.param_groups:
            group["lr"] = torch.tensor(float(lr))
        return opt

    for flat in (False, True):
        learn = make_learner(make).to_fp16(flat_master=flat)
        before = weights(learn)["0.weight"]
        learn.fit(1, 0.01)
        assert not torch.equal(weights(learn)["0.weight"], before)


# Which optimizers are element-wise


def optimizer(make, lr=0.1):
    return make([[nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))]], lr=lr)


@pytest.mark.parametrize("name", [*ELEMENTWISE, *TORCH, *FUSED])
def test_element_wise_optimizers_are_told(name):
    for kind in (ELEMENTWISE, TORCH, FUSED):
        if name in kind:
            assert is_elementwise(optimizer(kind[name]))


ALL_TORCH = {
    "adafactor": torch_optimizer(torch.optim.Adafactor),
    "lbfgs": torch_optimizer(torch.optim.LBFGS),
    "sparse_adam": torch_optimizer(torch.optim.SparseAdam),
}


@pytest.mark.parametrize("name", [*LAYERWISE, "adafactor", "sparse_adam"])
def test_layer_wise_optimizers_are_told(name):
    assert not is_elementwise(optimizer({**LAYERWISE, **ALL_TORCH}[name]))


def test_a_rate_that_is_clipped_now_need_not_be_later():
    """LARC with a large trust coefficient clips every rate at first: still, it looks at layers."""

    def larc(params, lr):
        return Larc(params, lr=lr, trust_coeff=100.0)

    assert not is_elementwise(optimizer(larc))


def test_a_setting_that_looks_like_a_count_of_steps_is_left_alone():
    """Of a warm-up of any length the trial sees what comes long after it."""

    class NormsLater(torch.optim.Optimizer):
        def __init__(self, params, lr, warmup):
            super().__init__(params, dict(lr=lr, warmup=warmup))

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    n = self.state[p]["step"] = self.state[p].get("step", 0) + 1
                    by = p.grad.norm() if n > 3 * group["warmup"] else 1.0
                    p.sub_(p.grad / by, alpha=group["lr"])

    for warmup in range(2, 24):
        assert not is_elementwise(optimizer(torch_optimizer(NormsLater, warmup=warmup))), warmup


def test_a_kind_of_optimizer_is_tried_once(monkeypatch):
    """Of torch's and fastai's own: the second is as the first, whatever its rate and weights."""
    trials, adam = inside.count_trials(monkeypatch), partial(torch_optimizer, torch.optim.Adam)
    for make in (Adam, adam(), torch_optimizer(torch.optim.SGD)):
        for lr in (0.1, 0.2):
            assert is_elementwise(optimizer(make, lr))
    assert len(trials) == 3
    others = [adam(eps=1e-3), adam(betas=(0.8, 0.9)), adam(foreach=True)]
    for make in (*others, partial(Adam, decouple_wd=False), partial(Adam, eps=1e-3)):
        assert is_elementwise(optimizer(make))
    assert len(trials) == 8
    make_learner("radam").to_fp16(flat_master=True).fit(1)
    assert len(trials) == 9  # to_fp16 asks, and fit


def test_what_may_have_changed_is_tried_again(monkeypatch):
    """Code that is not torch's or fastai's, an optimizer that has moments, a refusal."""
    trials, is_on = inside.count_trials(monkeypatch), False

    class PerLayer(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"] if is_on else []:
                p.grad /= p.grad.norm()
            super().step(closure)

    def per_layer_step(p, lr, **kwargs):
        p.data.add_(p.grad / (p.grad.norm() if is_on else 1.0), alpha=-lr)

    for make in (torch_optimizer(PerLayer), partial(Optimizer, cbs=[per_layer_step])):
        opt = optimizer(make)
        for is_on in (False, True, False):
            assert is_elementwise(opt) != is_on
    assert len(trials) == 6
    opt = optimizer(Adam)
    for p in opt.all_params().itemgot(0):
        p.grad = torch.ones_like(p)
    assert is_elementwise(opt)
    opt.step()
    assert is_elementwise(opt) and is_elementwise(opt)
    assert len(trials) == 9
    assert not any(is_elementwise(optimizer(Larc)) for _ in range(2))
    assert len(trials) == 11


def test_trying_an_optimizer_changes_nothing():
    for name in (*ELEMENTWISE, "foreach"):
        opt = optimizer({**ELEMENTWISE, **TORCH}[name])
        before = str(opt.state_dict()), [p.clone() for ps in opt.param_lists for p in ps]
        grads = [p.grad for ps in opt.param_lists for p in ps]
        calls = []
        if hasattr(opt, "opt") and hasattr(opt.opt, "register_step_post_hook"):
            opt.opt.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        assert is_elementwise(opt) and not calls
        after = str(opt.state_dict()), [p.clone() for ps in opt.param_lists for p in ps]
        assert before[0] == after[0] and grads == [p.grad for ps in opt.param_lists for p in ps]
        assert_same(after[1], before[1])


@pytest.mark.parametrize("name", [*LAYERWISE, "lbfgs", "adafactor"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_layer_wise_optimizers_are_refused_flat(name, dtype):
    learn = make_learner({**LAYERWISE, **ALL_TORCH}[name])
    before = weights(learn)
    why = "TypeError: .*closure" if name == "lbfgs" else "whole layers"
    with pytest.raises(MixedPrecisionError, match=f"({why}).*flat_master=False"):
        learn.to_fp16(flat_master=True, dtype=dtype)
    assert_same(weights(learn), before)
    assert {p.dtype for p in learn.model.parameters()} == {torch.float32}
    if name in LAYERWISE:
        learn.fit(1)
        learn.to_fp16(dtype=dtype).fit(1)


# What flat masters are


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("groups", [1, 3])
def test_two_lists_of_masters_a_group(flat, groups):
    learn = make_learner(**({"splitter": three_groups} if groups == 3 else {})).to_bf16(flat)
    cb = learn.mp_cb
    assert len(cb.model_params) == len(cb.master_params) == 2 * groups
    for params, found in zip(cb.model_params, cb.master_params, strict=True):
        if flat:
            assert [tuple(m.shape) for m in found] == (
                [(inside.in_vectors(params),)] if params else []
            )
        else:
            assert [m.shape for m in found] == [p.shape for p in params]
        assert all(m.dtype == torch.float32 for m in found)
    norms_and_biases = {p for ps in cb.model_params[1::2] for p in ps}
    names = {n for n, p in learn.model.named_parameters() if p in norms_and_biases}
    assert names == {"1.weight", "1.bias", "4.bias", "5.weight", "5.bias", "10.bias"}


def test_frozen_parameters_are_in_no_list():
    learn = make_learner(splitter=three_groups, train_bn=False)
    learn.freeze_to(-1)
    learn.to_fp16(flat_master=True)
    assert [len(ps) for ps in learn.mp_cb.model_params] == [0, 0, 0, 0, 1, 1]
    learn.unfreeze()
    assert [len(ps) for ps in learn.mp_cb.master_params] == [1, 1, 1, 1, 1, 1]


def test_flat_masters_are_one_memory():
    """The vector of a list and the masters of its parameters are the same numbers."""
    learn = make_learner().to_fp16(flat_master=True)
    for _ in range(2):
        own = inside.masters_by_param(learn.mp_cb.mixed)
        for params, (vector,) in zip(
            learn.mp_cb.model_params, learn.mp_cb.master_params, strict=True
        ):
            pieces = torch.cat([own[p].detach().flatten() for p in params])
            assert_same(inside.pieces(vector.detach(), params), pieces)
            vector.data.mul_(2)
            assert_same(pieces * 2, torch.cat([own[p].detach().flatten() for p in params]))
            vector.data.div_(2)
        learn.fit(1)


NORMS_AND_BIASES = {"1.weight", "1.bias", "4.bias", "5.bias", "10.bias"}  # to fastai, of conv_net


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("decay", ["weights", "all"])
def test_do_wd_holds(flat, decay):
    """With a learning rate of 0.5 and a decay of 1 each decayed weight halves, the others stay."""
    learn = make_learner("adam", wd_bn_bias=decay == "all").to_fp16(flat_master=flat)
    before = masters(learn)

    def no_gradient(learn):
        for p in learn.model.parameters():
            p.grad.zero_()

    learn.dls.train = learn.dls.train.new(dataset=learn.dls.train_ds[:8])
    learn.fit(1, 0.5, wd=1.0, cbs=Do("before_step", no_gradient))
    names = [name for name, _ in learn.model.named_parameters()]
    for name, new, old in zip(names, masters(learn), before, strict=True):
        is_exempt = name in NORMS_AND_BIASES and decay == "weights"
        assert_same(new, old if is_exempt else old / 2, name=name)


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("train_bn", [False, True])
def test_force_train_holds(flat, train_bn):
    """A frozen group's norms train, if the learner says so."""
    learn = make_learner(splitter=three_groups, train_bn=train_bn).to_fp16(flat_master=flat)
    learn.freeze()
    before = {n: p.detach().clone() for n, p in learn.model.named_parameters()}
    learn.fit(1, 0.1)
    moved = {n for n, p in learn.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"10.weight", "10.bias"} | ({"1.weight", "1.bias"} if train_bn else set())


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("of", ["one", "all"])
def test_flags_are_set_per_parameter_from_outside(flat, of):
    """Who forbids the decay of one parameter in the middle of training is obeyed.

    So is who says yes or no of each: then only the values tell parameters apart.
    """
    learn = make_learner("adam").to_fp16(flat_master=flat)
    params = dict(learn.model.named_parameters())
    theirs = params if of == "all" else ["4.weight"]

    def forbid(learn):
        for name in theirs:
            learn.opt.state[params[name]]["do_wd"] = name != "4.weight"
        for p in learn.model.parameters():
            p.grad.zero_()

    before = masters(learn)
    learn.dls.train = learn.dls.train.new(dataset=learn.dls.train_ds[:8])
    learn.fit(1, 0.5, wd=1.0, cbs=Do("before_step", forbid))
    for name, old, new in zip(params, before, masters(learn), strict=True):
        stays = name == "4.weight" or (of == "one" and name in NORMS_AND_BIASES)
        assert_same(new, old if stays else old / 2, name=name)


def test_each_group_has_its_own_rate():
    learn = make_learner("torch_sgd", splitter=three_groups).to_fp16(flat_master=True)
    learn.fit(1, [0.0, 0.0, 0.1])
    fresh = dict(make_learner(model=conv_net).model.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved = {
            n for n, w in learn.to_fp32().model.named_parameters() if not torch.equal(w, fresh[n])
        }
    assert moved == {"10.weight", "10.bias"}


def test_masters_in_one_vector_cost_no_more():
    """The masters' memory is 4 bytes a parameter, flat or not."""
    for flat in (False, True):
        learn = make_learner(cbs=MixedPrecision(flat_master=flat))
        learn.fit(1)
        masters = inside.masters_by_param(learn.mp_cb.mixed)
        storages = {
            m.untyped_storage().data_ptr(): m.untyped_storage().nbytes()
            for m in masters.values()
        }
        params = list(learn.model.parameters())
        n = inside.in_vectors(params) if flat else sum(p.numel() for p in params)
        assert sum(storages.values()) == 4 * n


def test_masters_have_the_strides_of_their_parameters():
    """In dimensions of size 1 as well: who compares strides would lay the vector out anew."""
    model = nn.Linear(3, 2)
    model.odd = nn.Parameter(torch.randn(6).as_strided((3, 1, 2), (2, 99, 1)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, opt = with_masters(model, sgd, flat_master=True)
    masters_of = inside.masters_by_param(opt)
    assert {m.stride() for m in masters_of.values()} >= {(2, 99, 1)}
    assert all(m.stride() == p.stride() for p, m in masters_of.items())


def test_states_that_lie_one_after_the_other_by_chance_are_joined():
    """They are neighbors in memory, and parts of no common storage."""
    memory = bytearray(32)
    states = [torch.frombuffer(memory, dtype=torch.float32, count=4, offset=i) for i in (0, 16)]
    states[1].fill_(1.0)
    params = [nn.Parameter(torch.zeros(4)) for _ in states]
    vector = torch.zeros(8)
    bucket = inside.Bucket(params, vector, list(vector.split(4)))
    joined = bucket.join([{"moment": state} for state in states])["moment"]
    assert_same(joined, torch.tensor([0.0] * 4 + [1.0] * 4))


# As on an accelerator: the model's weights in one piece, each parameter aligned


@pytest.fixture
def aligned(monkeypatch):
    """Have vectors on the CPU laid out as on an accelerator."""
    inside.align(monkeypatch)


def odd_net():
    """Make a model with parameters of 15, 5, 10 and 2 elements, and weights in channels_last."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 5)]
    return nn.Sequential(*layers, nn.Linear(5, 2)).to(memory_format=torch.channels_last)


def odd_step(compiled=False, exclusive=True, dtype=torch.float16):
    """Make a step over flat masters that looks at nothing on the way."""
    mixed = MixedStep(dtype, True, LossScaler(init_scale=16.0), compiled=compiled)
    inside.be_exclusive(mixed, exclusive)
    return mixed


def odd_train(mixed, between=None, n_steps=5, make=torch.optim.AdamW):
    """Train it; `between` is called with the model and the optimizer after the second step."""
    model = odd_net()
    mixed.attach(model)
    opt = mixed.wrap_optimizer(make(model.parameters(), lr=0.01))
    rng = torch.Generator().manual_seed(1)
    for i in range(n_steps):
        x = torch.randn(8, 3, 2, 2, generator=rng)
        mixed.scale(mixed.uncast(model(mixed.cast(x, training=True))).square().mean()).backward()
        assert mixed.unscale()
        mixed.step()
        mixed.update()
        opt.zero_grad()
        if i == 1 and between is not None:
            between(model, opt)
    return model, opt


def odd_ends(model, opt):
    """Return what training changes; states as they are after one more look."""
    return {"model": dict(model.state_dict()), "opt": opt.state_dict()["state"]}


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop])
def test_gaps_change_no_bit(make, exclusive, monkeypatch):
    """Gradients, weights and states of the parameters are those of vectors without gaps."""
    inside.everything_is_large(monkeypatch)
    packed = odd_ends(*odd_train(odd_step(exclusive=exclusive), make=make))
    inside.align(monkeypatch)
    assert_same(odd_ends(*odd_train(odd_step(exclusive=exclusive), make=make)), packed)


def test_what_was_in_a_gap_stays_there(aligned, monkeypatch):
    """Memory that chunks share holds what others have put there: no step, and no look, sees it."""
    inside.everything_is_large(monkeypatch, chunk=20)
    model, opt = odd_train(odd_step())
    for params, (vector,) in inside.masters_by_list(opt):
        in_gaps = vector.detach().clone()
        for v in inside.split_vector(in_gaps, params):
            v.zero_()
        assert len(in_gaps) > sum(p.numel() for p in params)
        assert not in_gaps.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_lie_in_one_piece(dtype, aligned):
    """Each begins at a multiple of 32 bytes, in the order of the masters, and keeps its strides."""
    strides = [p.stride() for p in odd_net().parameters()]
    model, opt = odd_train(odd_step(dtype=dtype))
    assert [p.stride() for p in model.parameters()] == strides
    for params, _ in inside.masters_by_list(opt):
        starts = [p.data_ptr() for p in params]
        lengths = [2 * inside.in_vectors([p]) for p in params]
        assert all(start % 32 == 0 for start in starts)
        assert [a + n for a, n in zip(starts, lengths, strict=True)][:-1] == starts[1:]


def test_files_of_a_part_are_no_larger(aligned, tmp_path):
    """Of a layer whose weights lie among others: a pickle, a copy and a tensor of it."""
    model, _ = odd_train(odd_step())
    for p in model.parameters():
        assert p.untyped_storage().nbytes() == p.nbytes
    part = copy.deepcopy(model[2])
    assert [p.untyped_storage().nbytes() for p in part.parameters()] == [2 * 12, 2 * 3]
    torch.save(model[5].weight.detach(), tmp_path / "part")
    torch.save(model[5].weight.detach().clone(), tmp_path / "clone")
    sizes = [(tmp_path / name).stat().st_size for name in ("part", "clone")]
    assert sizes[0] <= sizes[1] + 64  # but for the names inside


@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_that_was_moved_is_written_where_it_is(compiled, aligned, monkeypatch):
    """`p.data = x`, as many scripts do: the step goes on with x, and with the others in place."""
    inside.everything_is_large(monkeypatch)

    def move(model, opt):
        model[2].weight.data = model[2].weight.data.clone()

    plain, _ = odd_train(odd_step(compiled))
    model, opt = odd_train(odd_step(compiled), between=move)
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    masters = inside.masters_by_param(opt)
    for p in model.parameters():
        assert_same(p.detach(), masters[p].detach().half())


def test_weights_stay_where_they_are_when_layers_are_frozen(aligned):
    """A list that is a run of the one before needs no new place."""
    places = []

    def freeze(model, opt):
        places.append([p.data_ptr() for p in model.parameters()])
        model[0].requires_grad_(False)

    model, opt = odd_train(odd_step(), between=freeze)
    assert [p.data_ptr() for p in model.parameters()] == places[0]
    (params, *_), *_ = inside.masters_by_list(opt)
    assert model[0].weight not in set(params)


def test_memory_that_others_use_is_left_to_them(aligned):
    """Views of one storage, as cuDNN wants the weights of an LSTM, and two names of one memory."""
    model = odd_net()
    mixed = odd_step()
    mixed.attach(model)
    both = torch.cat([model[4].weight.detach().flatten(), model[2].weight.detach().flatten()])
    model[4].weight.data = both[:15].view(5, 3)
    model[2].weight.data = both[15:].view(3, 4)
    more = torch.zeros(100, dtype=torch.float16)
    model[5].weight.data = more[:10].view(2, 5)
    mixed.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert model[4].weight.data_ptr() == both.data_ptr()
    assert model[2].weight.data_ptr() == both[15:].data_ptr()
    assert model[5].weight.data_ptr() == more.data_ptr()
