"""A Learner without an optimizer has none after `to_fp16` either: fastai makes it when needed.

The masters are there at once. Whatever is set before the optimizer is made (`opt_func`, `lr`,
`splitter`) is what plain fastai takes.
"""

import copy
import pickle
import random
import warnings
from functools import partial

import pytest
import torch
from fastai.basics import load_learner
from fastai.callback.hook import summary  # noqa: F401, gives Learner summary
from fastai.optimizer import SGD, Adam, OptimWrapper
from inside import is_on_masters, users_optimizer
from tiny import (
    ELEMENTWISE,
    LAYERWISE,
    Do,
    conv_net,
    make_learner,
    masters,
    opt_state,
    plain,
    snapshot,
    three_groups,
    torch_optimizer,
    weights,
)

from mixedfp.callback import MixedPrecision
from mixedfp.checkpoint import Checkpoint
from mixedfp.examples import photos
from mixedfp.formats import MixedPrecisionError
from mixedfp.testing import assert_same

FULL = torch.float32
FLAT = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
TO = {
    "fp16": lambda learn, flat: learn.to_fp16(flat_master=flat),
    "bf16": lambda learn, flat: learn.to_bf16(flat_master=flat),
    "fp32": lambda learn, flat: learn.to_fp16(flat_master=flat, dtype=FULL),
}
ANY = pytest.mark.parametrize("to", TO.values(), ids=TO.keys())
ADAMW = torch_optimizer(torch.optim.AdamW)


# None stays None


@ANY
@FLAT
def test_none_stays_none(to, flat, tmp_path):
    """Also over all that needs no optimizer; then one is made as for any Learner."""
    learn = make_learner(path=tmp_path)
    opt_func = learn.opt_func
    assert to(learn, flat) is learn and learn.opt is None and learn.opt_func is opt_func
    learn.validate(), learn.get_preds(), learn.save("no_opt")
    assert str(learn.summary()) and repr(learn.mp_cb) and learn.mp_cb.update_paths() == {}
    assert learn.mp_cb.loss_scale > 0 and learn.mp_cb.n_skipped == 0
    assert learn.opt is None
    if learn.opt is None:
        learn.create_opt()
    assert is_on_masters(learn.opt)
    learn.fit(1)


@FLAT
def test_none_stays_none_for_a_callback_of_the_constructor(flat):
    learn = make_learner(cbs=MixedPrecision(flat_master=flat))
    assert learn.opt is None and learn.model[0].weight.dtype == torch.float16
    learn.fit(1)
    assert is_on_masters(learn.opt)


@ANY
@FLAT
def test_back_before_the_first_fit(to, flat):
    learn = make_learner()
    before = weights(learn)
    to(learn, flat).to_fp32()
    assert learn.opt is None and "create_opt" not in vars(learn)
    assert_same(weights(learn), before)
    learn.fit(1)
    assert not is_on_masters(learn.opt)


@FLAT
@pytest.mark.parametrize("first", ["freeze", "unfreeze", "lr_find", "load", "fit", "fit_one_cycle"])
def test_what_makes_one_makes_one_on_masters(first, flat, tmp_path):
    learn = make_learner(path=tmp_path, splitter=three_groups)
    learn.save("start")
    learn.to_fp16(flat_master=flat)
    args = dict(load=["start"], fit=[1], fit_one_cycle=[1]).get(first, [])
    options = dict(num_it=20, show_plot=False) if first == "lr_find" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fastai's: the file holds no optimizer
        getattr(learn, first)(*args, **options)
    assert is_on_masters(learn.opt) and learn.opt is learn.mp_cb.mixed.opt


# Masters do not wait for it


@ANY
@FLAT
def test_masters_are_there_at_once(to, flat):
    learn = make_learner(splitter=three_groups, opt="ranger")
    before = [p.detach().clone() for p in learn.model.parameters()]
    to(learn, flat)
    assert_same(masters(learn), before)
    cb = learn.mp_cb
    early = cb.model_params, cb.master_params
    assert learn.opt is None and [len(ps) for ps in early] == [6, 6]
    learn.create_opt()
    for found, expected in zip((cb.model_params, cb.master_params), early, strict=True):
        assert [[id(p) for p in ps] for ps in found] == [[id(p) for p in ps] for ps in expected]
    assert_same(masters(learn), before)
    assert not flat or {len(ms) for ms in cb.master_params} <= {0, 1}


@FLAT
def test_masters_in_the_groups_of_today(flat):
    """What `master_params` shows follows the splitter until there is an optimizer."""
    learn = make_learner().to_bf16(flat_master=flat)
    assert len(learn.mp_cb.model_params) == 2
    learn.splitter = three_groups
    assert len(learn.mp_cb.model_params) == 6
    learn.splitter = lambda model: list(model[0].parameters())
    learn.create_opt()
    found = learn.mp_cb.model_params
    assert [id(p) for ps in found for p in ps] == [id(p) for p in learn.model[0].parameters()]


@FLAT
def test_a_twin_of_the_masters_is_one_before_the_first_fit(flat):
    learn = make_learner().to_bf16(flat_master=flat)
    twin = learn.mp_cb.float_model()
    assert learn.opt is None
    learn.fit(1)
    assert_same([p.detach() for p in twin.parameters()], masters(learn))


@ANY
@FLAT
def test_weights_that_are_written_before_it_is_made_are_kept(to, flat):
    learn = to(make_learner(), flat)
    with torch.no_grad():
        learn.model[0].weight.fill_(0.5)
    learn.create_opt()
    for p in learn.model.parameters():
        p.grad = torch.zeros_like(p, dtype=FULL)
    learn.opt.set_hypers(lr=0.0, wd=0.0)
    learn.opt.step()
    assert (learn.model[0].weight == 0.5).all() and (masters(learn)[0] == 0.5).all()


# What is set later is taken


def _later(learn):
    learn.opt_func, learn.lr, learn.splitter = partial(Adam, eps=1e-3), 0.02, three_groups
    return learn


@FLAT
@pytest.mark.parametrize("opt", ELEMENTWISE)
def test_what_is_set_later_is_taken(opt, flat):
    """In float32 to the bit: optimizer function, rate and groups."""
    ends = []
    for to in (lambda learn, flat: learn, TO["fp32"]):
        learn = to(make_learner("sgd"), flat)
        learn.opt_func, learn.lr, learn.splitter = ELEMENTWISE[opt], 0.02, three_groups
        learn.fit(1)
        ends.append(snapshot(learn))
    assert_same(ends[1], ends[0])


@ANY
@FLAT
def test_the_later_optimizer_is_the_one_that_steps(to, flat):
    learn = _later(to(make_learner("sgd"), flat))
    learn.fit(1)
    assert [h["lr"] for h in learn.opt.hypers] == [0.02] * 3
    assert learn.opt.hypers[0]["eps"] == 1e-3
    assert learn.opt_func.func is Adam


@FLAT
def test_a_rate_in_the_keywords_is_taken_when_it_is_made(flat):
    learn = make_learner(partial(OptimWrapper, opt=torch.optim.SGD, lr=0.25), lr=0.05)
    learn.to_fp16(flat_master=flat)
    assert learn.lr == 0.05
    learn.create_opt()
    assert learn.lr == 0.25 and learn.opt.hypers[0]["lr"] == 0.25


@FLAT
def test_an_optimizer_that_was_made_by_hand_as_function(flat):
    """fastai takes an `OptimWrapper` in place of a function, and clears its state."""
    ends = []
    for to in (lambda learn, flat: learn, TO["fp32"]):
        learn = to(make_learner(), flat)
        made = torch.optim.AdamW(learn.model.parameters(), lr=0.01)
        learn.opt_func = OptimWrapper(opt=made)
        learn.create_opt()
        assert is_on_masters(learn.opt) == (to is TO["fp32"])
        learn.fit(1)
        ends.append(snapshot(learn))
    assert_same(ends[1], ends[0])


# What cannot be flat is refused: at once, and when it comes later


@pytest.mark.parametrize("opt", LAYERWISE)
def test_the_refusal_is_immediate(opt):
    learn = make_learner(opt)
    before = weights(learn)
    with pytest.raises(MixedPrecisionError, match="whole layers"):
        learn.to_fp16(flat_master=True)
    assert learn.opt is None and not {"create_opt", "mp_cb"} & vars(learn).keys()
    assert_same(weights(learn), before)
    assert learn.to_fp16().opt is None  # masters of their own
    learn.fit(1)


@pytest.mark.parametrize("opt", LAYERWISE)
@pytest.mark.parametrize("first", ["create_opt", "freeze", "fit"])
def test_the_refusal_of_a_later_one(first, opt):
    learn = make_learner().to_bf16(flat_master=True)
    before = masters(learn)
    learn.opt_func = LAYERWISE[opt]
    for _ in range(2):  # no optimizer that was refused stays
        with pytest.raises(MixedPrecisionError, match="whole layers"):
            getattr(learn, first)(*([1] if first == "fit" else []))
        assert learn.opt is None
    assert_same(masters(learn), before)
    learn.opt_func = Adam
    learn.fit(1)
    assert learn.model[0].weight.dtype == torch.bfloat16


def test_a_look_at_the_optimizer_leaves_no_trace():
    """`to_fp16(flat_master=True)` tries an optimizer: no random number is used for it."""
    made = []

    def opt_func(params, **kwargs):
        torch.rand(3), random.random()
        made.append(Adam(params, **kwargs))
        return made[-1]

    learn = make_learner(partial(opt_func, lr=0.5), lr=0.05)
    state, python = torch.random.get_rng_state(), random.getstate()
    before = set(vars(learn))
    learn.to_fp16(flat_master=True)
    assert len(made) == 1 and not made[0].state.get(learn.model[0].weight)
    assert_same(torch.random.get_rng_state(), state)
    assert random.getstate() == python
    assert learn.lr == 0.05 and learn.opt is None
    new = vars(learn).keys() - before
    assert new == {"create_opt", "mixed_precision", "mp_cb"}
    learn.create_opt()
    assert learn.opt.opt is made[1] and learn.lr == 0.5


# Files, before the first fit


def _fitted(tmp_path, to, flat, opt=ADAMW):
    learn = to(make_learner(opt, path=tmp_path), flat)
    learn.fit(2)
    return learn


@ANY
@FLAT
@pytest.mark.parametrize("late", [False, True], ids=["from the start", "set later"])
def test_a_file_is_loaded_before_the_first_fit(late, to, flat, tmp_path):
    """States in 32 bits, and the loss scale, also into an optimizer that was named later."""
    learn = _fitted(tmp_path, to, flat)
    learn.save("run")
    other = to(make_learner(SGD if late else ADAMW, seed=2, path=tmp_path), flat)
    other.opt_func = ADAMW
    other.load("run")
    assert_same(plain(other.opt.state_dict()), plain(learn.opt.state_dict()))
    assert_same(weights(other), weights(learn))
    assert any((v != v.bfloat16()).any() for v in other.opt.state_dict()["state"][0].values())
    if to is TO["fp16"]:
        assert other.mp_cb.loss_scale == learn.mp_cb.loss_scale
    for one in (learn, other):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            one.fit(1)
    assert_same(snapshot(other), snapshot(learn))


class _Killed(Exception):
    pass


@ANY
@FLAT
def test_a_killed_run_whose_optimizer_is_set_later(to, flat, tmp_path):
    def start():
        learn = to(make_learner("sgd", path=tmp_path), flat)
        learn.opt_func = ADAMW
        return learn

    def kill(learn):
        raise _Killed

    (tmp_path / "models").mkdir()
    whole = start()
    whole.fit(3, cbs=Checkpoint("whole"))
    with pytest.raises(_Killed):
        start().fit(3, cbs=[Checkpoint("run"), Do("before_batch", kill, at=9)])
    learn, checkpoint = start(), Checkpoint("run")
    done = checkpoint.resume(learn)
    assert done > 0
    learn.fit(3, cbs=checkpoint, start_epoch=done)
    assert_same(snapshot(learn), snapshot(whole))
    assert "exp_avg" in opt_state(learn)["state"][0]


def test_a_checkpoint_of_another_optimizer_leaves_none(tmp_path):
    """So the right one can be named, and the file be tried again."""
    (tmp_path / "models").mkdir()
    learn = make_learner(ADAMW, path=tmp_path).to_bf16()
    learn.fit(1, cbs=Checkpoint("run"))
    other = make_learner(partial(SGD, lr=0.5), path=tmp_path, seed=2).to_bf16()
    before = weights(other)
    with pytest.raises(MixedPrecisionError, match="another optimizer"):
        Checkpoint("run").resume(other)
    assert other.opt is None and other.lr == 0.05
    assert_same(weights(other), before)
    other.opt_func = ADAMW
    assert Checkpoint("run").resume(other) == 1
    assert_same(opt_state(other), opt_state(learn))


@FLAT
def test_copies_pickles_and_exports_before_the_first_fit(flat, tmp_path):
    dls = photos(n_train=16, n_valid=8, bs=8, device="cpu")
    learn = make_learner(dls=dls, path=tmp_path).to_bf16(flat_master=flat)
    for copied in (copy.deepcopy(learn), pickle.loads(pickle.dumps(learn))):
        assert copied.opt is None
        copied.fit(1)
        assert copied.opt is copied.mp_cb.mixed.opt
        assert (len(copied.mp_cb.master_params[0]) == 1) == flat
        assert learn.opt is None
        assert copied.to_fp32() and "create_opt" not in vars(copied)
    before = masters(learn)
    learn.export("run.pkl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fastai's, of pickles from strangers
        loaded = load_learner(tmp_path / "run.pkl")
    assert loaded.opt is None and "create_opt" not in vars(loaded)
    assert_same([p.detach() for p in loaded.model.parameters()], before)
    assert is_on_masters(learn.opt)  # `export` of fastai makes one


# One that is there


@ANY
@FLAT
def test_an_optimizer_that_is_there_keeps_its_state(to, flat):
    learn = make_learner("adam")
    learn.fit(1)
    opt, before = learn.opt, opt_state(learn)
    to(learn, flat)
    assert is_on_masters(learn.opt) and users_optimizer(learn.opt) is opt
    assert_same(opt_state(learn), before)
    learn.to_fp32()
    assert learn.opt is opt
    assert_same(opt_state(learn), before)


def test_a_create_opt_of_ones_own_is_left_alone():
    """On the class it makes what steps the masters; on the Learner it stays what it is."""
    learn = make_learner(model=conv_net)

    def create_opt():
        learn.opt = SGD(list(learn.model.parameters()), lr=0.01)

    learn.create_opt = create_opt
    learn.to_bf16()
    learn.fit(1)
    assert is_on_masters(learn.opt) and learn.create_opt is create_opt
    assert learn.to_fp32().create_opt is create_opt
