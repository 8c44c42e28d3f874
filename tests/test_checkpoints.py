"""Files: what one precision writes, any other reads, and what cannot be read changes nothing."""

import io
import os
import pickle
import subprocess
import sys
import warnings
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from fastai.basics import L, ValueMetric
from fastai.callback.core import CancelFitException
from fastai.callback.tracker import SaveModelCallback
from tiny import (
    Do,
    Sometimes,
    bits,
    conv_net,
    make_learner,
    masters,
    one_group,
    opt_state,
    plain,
    sometimes_groups,
    three_groups,
    weights,
)
from torch import nn

from mixedfp.callback import MixedPrecision
from mixedfp.testing import assert_same

PRECISIONS = {
    "fp32": lambda learn: learn,
    "fp16": lambda learn: learn.to_fp16(growth_interval=3),
    "fp16_flat": lambda learn: learn.to_fp16(flat_master=True, growth_interval=3),
    "bf16": lambda learn: learn.to_bf16(),
    "bf16_flat": lambda learn: learn.to_bf16(flat_master=True),
}
MIXED = {k: f for k, f in PRECISIONS.items() if k != "fp32"} | {
    "mixed_fp32": lambda learn: learn.to_fp16(dtype=torch.float32, flat_master=True)
}
ANY = pytest.mark.parametrize("precision", PRECISIONS)
OURS = pytest.mark.parametrize("precision", MIXED)
OPTS = ["sgd", "adam", "torch_adamw"]
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def learner(precision, path, opt="adam", seed=1, **kwargs):
    """Return a tiny learner in `precision` that keeps its files in `path`."""
    kwargs = {"splitter": three_groups} | kwargs
    learn = make_learner(opt, path=path, seed=seed, **kwargs)
    return (PRECISIONS | MIXED)[precision](learn)


def trained(precision, path, opt="adam", **kwargs):
    """Return such a learner after an epoch."""
    learn = learner(precision, path, opt, **kwargs)
    learn.fit(1, 0.02, wd=0.1)
    return learn


def scale_state(learn):
    """Return the loss scale and how long it has been growing; {} where nothing is scaled."""
    return dict(learn.mp_cb.mixed.scaler.state_dict()) if "mp_cb" in vars(learn) else {}


def state(learn):
    """Return copies of all that a file is to hold: weights, buffers, optimizer, loss scale."""
    return {"model": weights(learn), "opt": opt_state(learn), "scale": scale_state(learn)}


def everything(learn):
    """Return copies of all that there is, the weights as they lie in memory included."""
    mixed = bits(learn) if "mp_cb" in vars(learn) else {}
    grads = [None if p.grad is None else p.grad.clone() for p in learn.model.parameters()]
    flags = [(p.requires_grad, p.dtype) for p in learn.model.parameters()]
    lists = [[id(p) for p in ps] for ps in learn.opt.param_lists]
    return state(learn) | mixed | {"grads": grads, "flags": flags, "lists": lists}


def file_of(learn, name="one"):
    return learn.path / learn.model_dir / f"{name}.pth"


def read(path):
    """Read a checkpoint as `learn.load` does, nothing but data in it."""
    with torch.serialization.safe_globals([L]):
        return torch.load(path, weights_only=True)


def tensors(o):
    """List the tensors in a nesting."""
    if isinstance(o, torch.Tensor):
        return [o]
    values = o.values() if isinstance(o, dict) else o if isinstance(o, list | tuple | L) else ()
    return [t for v in values for t in tensors(v)]


def quietly(f, *args, **kwargs):
    """Call `f`; fail where fastai warns, as it does about a state that it could not load."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return f(*args, **kwargs)


def moved(learn, before):
    """Whether every trained weight of `learn` is another than it was, and finite."""
    pairs = [(now, before[k]) for k, now in learn.model.state_dict().items()]
    floats = [(a, b) for a, b in pairs if a.is_floating_point()]
    return all(a.isfinite().all() and not torch.equal(a, b) for a, b in floats)


# From any precision to any other


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train in a precision, save, and train on, once for all tests that ask for the same."""
    done = {}

    def get(precision, opt):
        if (precision, opt) not in done:
            one = trained(precision, tmp_path_factory.mktemp("run"), opt)
            file = one.save("one")
            saved = state(one)
            one.fit(1, 0.02, wd=0.1)
            done[precision, opt] = file, saved, state(one)
        return done[precision, opt]

    return get


@pytest.mark.parametrize("second", PRECISIONS)
@pytest.mark.parametrize("first", PRECISIONS)
@pytest.mark.parametrize("opt", OPTS)
def test_a_file_of_any_precision_goes_on_in_any_other(opt, first, second, run, tmp_path):
    """Weights, masters, moments and loss scale are the saved bits; the way on is the same."""
    file, saved, unbroken = run(first, opt)
    learn = learner(second, tmp_path, opt, seed=2)
    quietly(learn.load, file.with_suffix(""))
    found = state(learn)
    assert_same(found["model"], saved["model"])
    assert_same(found["opt"], saved["opt"])
    if second != "fp32":
        names = [name for name, _ in learn.model.named_parameters()]
        assert_same(masters(learn), [saved["model"][name] for name in names])
    if "fp16" in first and "fp16" in second:
        assert saved["scale"]["scale"] == 1024.0 and saved["scale"]["_growth_tracker"] == 1
        assert_same(found["scale"], saved["scale"])
    learn.fit(1, 0.02, wd=0.1)
    assert moved(learn, saved["model"])
    if first[:4] == second[:4]:  # flat or not, the arithmetic is the same
        assert_same(state(learn), unbroken)
    else:
        for k, v in weights(learn).items():
            torch.testing.assert_close(v, unbroken["model"][k], rtol=0.05, atol=0.05, msg=k)


@pytest.mark.parametrize("opt", OPTS)
def test_the_saved_moments_matter(opt, run, tmp_path):
    """The comparison above can fail: without the optimizer's state the way on is another."""
    file, _, unbroken = run("fp16", opt)
    learn = learner("fp16", tmp_path, opt, seed=2)
    learn.load(file.with_suffix(""), with_opt=False)
    learn.fit(1, 0.02, wd=0.1)
    with pytest.raises(AssertionError):
        assert_same(weights(learn), unbroken["model"])


# What is in a file


@pytest.mark.parametrize("opt", OPTS)
@ANY
def test_a_file_holds_32_bits_per_parameter(precision, opt, run):
    """As `weights_only=True` reads it: the shapes of the model, never the flat vector."""
    file = read(run(precision, opt)[0])
    net = conv_net()
    shapes = {k: (v.dtype, v.shape) for k, v in net.state_dict().items()}
    assert {k: (v.dtype, v.shape) for k, v in file["model"].items()} == shapes
    params = list(net.parameters())
    states = file["opt"]["state"]
    states = list(states.values()) if isinstance(states, dict) else list(states)
    assert len(states) == len(params)
    for p, s in zip(params, states, strict=True):
        for t in tensors(s):
            assert t.dtype == torch.float32 and t.shape in (p.shape, torch.Size())
    assert ("loss_scale" in file["opt"]) == (precision != "fp32")


@pytest.mark.parametrize("opt", OPTS)
@pytest.mark.parametrize("half", HALVES)
def test_a_flat_file_is_as_small(half, opt, run):
    """A view of a vector would be written with the whole vector behind it."""
    sizes = [os.path.getsize(run(precision, opt)[0]) for precision in (half, half + "_flat")]
    assert sizes[1] <= sizes[0]
    for precision in (half, half + "_flat"):
        assert stored(read(run(precision, opt)[0])) <= 1


def stored(file):
    """How many bytes lie in `file` for one byte of a tensor that is in it."""
    found = tensors(file)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(storages.values()) / sum(t.nbytes for t in found)


@pytest.mark.parametrize("opt", OPTS)
@pytest.mark.parametrize("precision", ["fp16", "fp16_flat"])
def test_a_file_of_a_frozen_model_is_as_small(precision, opt, tmp_path):
    """The vectors change with what is trained; nothing of the former ones is written."""
    learn = trained(precision, tmp_path, opt)
    learn.freeze()
    learn.fit(1)
    assert stored(read(learn.save("one"))) <= 1
    learn.freeze_to(1)
    learn.fit(1)
    assert stored(read(learn.save("one"))) <= 1


@ANY
def test_the_models_state_is_a_plain_file(precision, tmp_path):
    """`torch.save(learn.model.state_dict())` is what the same model in 32 bits writes."""
    learn = trained(precision, tmp_path)
    torch.save(learn.model.state_dict(), tmp_path / "model.pt")
    learn.to_fp32()
    torch.save(learn.model.state_dict(), tmp_path / "plain.pt")
    found, expected = [
        torch.load(tmp_path / f, weights_only=True) for f in ("model.pt", "plain.pt")
    ]
    assert_same(dict(found), dict(expected))
    assert stored(found) <= 1
    assert os.path.getsize(tmp_path / "model.pt") <= os.path.getsize(tmp_path / "plain.pt") + 256
    net = conv_net()
    net.load_state_dict(found)
    assert_same(dict(net.state_dict()), weights(learn))


@OURS
def test_a_saved_state_stays_what_it_was(precision, tmp_path):
    """A file is a picture: what is trained after it does not show in it."""
    learn = trained(precision, tmp_path)
    before = read(learn.save("one"))
    learn.fit(1)
    assert_same(plain(read(file_of(learn))), plain(before))
    learn.load("one")
    assert_same(weights(learn), plain(before["model"]))


# Parts that are frozen or never used


@pytest.mark.parametrize("opt", OPTS[1:])
@pytest.mark.parametrize("second", MIXED)
@pytest.mark.parametrize("first", ["fp32", "fp16_flat", "bf16"])
def test_a_file_of_a_frozen_model_goes_on_unfrozen(first, second, opt, tmp_path):
    """What has no moments yet gets none; the parts are stepped apart and come together again."""
    one = learner(first, tmp_path, opt)
    one.freeze()
    one.fit(1, 0.02)
    one.save("one")
    other = learner(second, tmp_path, opt, seed=2)
    quietly(other.load, "one")
    before = state(other)
    assert_same(before["model"], weights(one))
    assert_same(before["opt"], opt_state(one))
    other.unfreeze()
    other.fit(1, 0.02)
    assert moved(other, before["model"])
    if first[:4] == second[:4]:
        one.unfreeze()
        one.fit(1, 0.02)
        assert_same(state(other), state(one))


@pytest.mark.parametrize("opt", OPTS)
@OURS
def test_layers_without_gradients_go_along(precision, opt, tmp_path):
    """A layer that no batch used has no moments, before and after."""
    kwargs = dict(model=Sometimes, splitter=sometimes_groups)
    one = trained(precision, tmp_path, opt, **kwargs)
    one.save("one")
    other = learner(precision, tmp_path, opt, seed=2, **kwargs)
    quietly(other.load, "one")
    assert_same(state(other), state(one))
    other.model.count = one.model.count
    for learn in (one, other):
        learn.fit(1, 0.02)
    assert_same(state(other), state(one))


# With and without the optimizer


@ANY
def test_a_file_without_the_optimizer_leaves_the_optimizer(precision, tmp_path):
    """fastai says so when the optimizer's state was asked for and is not there."""
    one = trained(precision, tmp_path, seed=2)
    one.save("one", with_opt=False)
    assert set(read(file_of(one))) == set(conv_net().state_dict())
    learn = trained(precision, tmp_path)
    before = state(learn)
    quietly(learn.load, "one", with_opt=False)
    assert_same(state(learn), before | {"model": weights(one)})
    with pytest.warns(UserWarning, match="doesn't contain an optimizer state"):
        learn.load("one")
    assert_same(state(learn), before | {"model": weights(one)})
    learn.fit(1)
    assert moved(learn, weights(one))


@ANY
def test_loading_without_the_optimizer_leaves_the_optimizer(precision, tmp_path):
    """`with_opt=False` of a file that has it: momentum and loss scale stay the learner's."""
    one = trained(precision, tmp_path, seed=2)
    one.fit(1)
    one.save("one")
    learn = trained(precision, tmp_path)
    before = state(learn)
    quietly(learn.load, "one", with_opt=False)
    assert_same(state(learn), before | {"model": weights(one)})


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_loading_before_the_precision_is_loading_after_it(flat, tmp_path):
    """In a learner that is in 32 bits yet: `load(...).to_fp16()` is `to_fp16().load(...)`."""
    trained("fp32", tmp_path).save("one")
    first = learner("fp32", tmp_path, seed=2).load("one").to_fp16(flat_master=flat)
    after = learner("fp32", tmp_path, seed=2).to_fp16(flat_master=flat).load("one")
    assert_same(everything(after)["masters"], everything(first)["masters"])
    for learn in (first, after):
        learn.fit(1)
    assert_same(state(first), state(after))


# fastai's callback that saves


class Told:
    """A metric that says what it was told to, one number an epoch."""

    def __init__(self, *values):
        self.values = iter(values)

    def __call__(self):
        return next(self.values)


def train_with(saver, precision, path, told=(1.0, 0.25, 0.5)):
    """Train with a `SaveModelCallback`; return the learner and its state after each epoch."""
    learn = learner(precision, path, metrics=ValueMetric(Told(*told), "told"))
    seen = []
    note = Do("after_epoch", lambda learn: seen.append(state(learn)), order=99, training=False)
    learn.fit(len(told), 0.02, cbs=[saver, note])
    return learn, seen


@pytest.mark.parametrize("with_opt", [True, False], ids=["with_opt", "without"])
@ANY
def test_the_best_is_saved_and_loaded_at_the_end(precision, with_opt, tmp_path, capsys):
    """The second of three epochs: its weights, and its optimizer where that was saved."""
    best = SaveModelCallback("told", comp=np.less, fname="best", with_opt=with_opt)
    learn, seen = train_with(best, precision, tmp_path)
    rest = seen[1] if with_opt else seen[2] | {"model": seen[1]["model"]}
    assert_same(state(learn), rest)
    assert set(read(file_of(learn, "best"))) == (
        {"model", "opt"} if with_opt else set(conv_net().state_dict())
    )
    if precision != "fp32":
        assert_same(learn.to_fp32() and weights(learn), seen[1]["model"])
    learn.metrics = []
    learn.fit(1)
    assert moved(learn, seen[1]["model"])


@pytest.mark.parametrize("every", [True, 2])
@ANY
def test_every_epoch_is_saved(precision, every, tmp_path):
    """Each file is that epoch, bit for bit; at the end of the fit nothing is loaded."""
    saver = SaveModelCallback("told", fname="epoch", every_epoch=every, with_opt=True)
    learn, seen = train_with(saver, precision, tmp_path)
    assert_same(state(learn), seen[2])
    files = sorted(f.stem for f in (tmp_path / "models").iterdir())
    assert files == (["epoch_0", "epoch_1", "epoch_2"] if every is True else ["epoch_0", "epoch_2"])
    for f in files:
        other = learner(precision, tmp_path, seed=2)
        quietly(other.load, f)
        assert_same(state(other), seen[int(f[-1])])


@pytest.mark.parametrize("with_opt", [True, False], ids=["with_opt", "without"])
@ANY
def test_the_end_is_saved(precision, with_opt, tmp_path, capsys):
    """`at_end` writes the last file; into another precision it goes as any file does."""
    saver = SaveModelCallback("told", fname="end", at_end=True, with_opt=with_opt)
    learn, seen = train_with(saver, precision, tmp_path)
    assert_same(state(learn), seen[2])
    other = learner("bf16_flat", tmp_path, seed=2)
    other.create_opt()
    before = state(other)
    quietly(other.load, "end", with_opt=with_opt)
    assert_same(weights(other), seen[2]["model"])
    assert_same(opt_state(other), (seen[2] if with_opt else before)["opt"])


# Plain fastai, where this library is not installed

PLAIN = """
import sys

import numpy as np
import pandas as pd
import torch
from functools import partial
from fastai.tabular.all import (Adam, CategoryBlock, Categorify, L, Normalize, OptimWrapper, SGD,
                                TabularDataLoaders, load_learner, tabular_learner)

OPTS = {"sgd": partial(SGD, mom=0.9), "adam": Adam,
        "torch_adamw": partial(OptimWrapper, opt=torch.optim.AdamW)}


def table():
    rng = np.random.default_rng(0)
    df = pd.DataFrame({"kind": rng.integers(0, 3, 40)})
    for name in ("size", "weight"):
        df[name] = rng.normal(size=40).astype("float32")
    df["y"] = (df["size"] + df["kind"] > 1).astype(int)
    return df


def make(opt, path, seed=1):
    torch.manual_seed(seed)
    dls = TabularDataLoaders.from_df(
        table(), procs=[Categorify, Normalize], cat_names=["kind"], cont_names=["size", "weight"],
        y_names="y", y_block=CategoryBlock(), valid_idx=list(range(32, 40)), bs=8, shuffle=False,
        num_workers=0, device="cpu")
    learn = tabular_learner(dls, layers=[8], opt_func=OPTS[opt], lr=0.05, path=path)
    learn.remove_cb(learn.progress)
    learn.logger = print_nothing
    return learn


from fastcore.basics import noop as print_nothing


def weights(learn):
    return {k: v.clone() for k, v in learn.model.state_dict().items()}


def look(learn):
    state = learn.opt.state_dict()
    states = state["state"].values() if isinstance(state["state"], dict) else state["state"]
    states = [{k: v.clone() if hasattr(v, "clone") else v for k, v in s.items()} for s in states]
    return {"model": weights(learn), "opt": states}


def predict(learn):
    if hasattr(learn, "progress"):
        learn.remove_cb(learn.progress)
    return [learn.predict(table().iloc[i])[2] for i in range(3)]
"""

ALONE = """
import warnings
from pathlib import Path

warnings.simplefilter("ignore")  # fastai's, of pickles from strangers
here, found = Path(sys.argv[1]), {}
sys.modules["mixedfp"] = None
try:
    import mixedfp.callback
except ModuleNotFoundError:
    found["is_blocked"] = True
for opt in OPTS:
    learn = make(opt, here)
    learn.fit(1)
    learn.save(f"plain-{opt}")
    found[f"plain-{opt}"] = look(learn)
    learn.fit(1)
    found[f"plain-{opt}-unbroken"] = look(learn)
for file in sorted((here / "models").glob("ours-*.pth")):
    learn = make(file.stem.split("-")[1], here, seed=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        learn.load(file.stem)
    found[file.stem] = look(learn)
    learn.fit(1)
    found[file.stem + "-after"] = look(learn)
for file in sorted(here.glob("mixed-*.pkl")):
    try:  # not `load_learner`, which swallows an ImportError and fails on the next line
        torch.load(file, weights_only=False)
    except ImportError as e:
        found[file.name] = str(e)
for file in sorted(here.glob("back-*.pkl")):
    try:
        torch.load(file, weights_only=False)
    except ImportError as e:
        found[file.name] = str(e)
        continue
    learn = load_learner(file)
    found[file.name] = weights(learn), predict(learn)
found["was_imported"] = any(k.startswith("mixedfp.") for k in sys.modules)
del sys.modules["mixedfp"]
for file in sorted(here.glob("mixed-*.pkl")):
    learn = load_learner(file)
    dtypes = {p.dtype for p in learn.model.parameters()}
    found["with-" + file.name] = weights(learn), predict(learn), dtypes
    learn.dls = make("sgd", here).dls
    learn.fit(1)
    found["with-" + file.name + "-after"] = weights(learn)
torch.save(found, here / "found.pt")
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What a process with fastai alone makes of our files, and the files that it writes."""
    here = tmp_path_factory.mktemp("alone")
    module = {}
    exec(PLAIN, module)
    ours = {}
    for opt, (name, to) in product(OPTS, PRECISIONS.items()):
        learn = to(module["make"](opt, here))
        learn.fit(1)
        learn.save(f"ours-{opt}-{name}")
        ours[f"ours-{opt}-{name}"] = module["look"](learn)
        if opt == "torch_adamw" and name != "fp32":
            expected = module["look"](learn)["model"], module["predict"](learn)
            learn.export(f"mixed-{name}.pkl")
            ours[f"mixed-{name}.pkl"] = expected
            learn.to_fp32().export(f"back-{name}.pkl")
            ours[f"back-{name}.pkl"] = module["look"](learn)["model"], module["predict"](learn)
    (here / "alone.py").write_text(PLAIN + ALONE)
    env = os.environ | {
        "PYTHONPATH": str(Path(sys.modules["mixedfp"].__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(here / "alone.py"), str(here)]
    done = subprocess.run(command, env=env, cwd=here, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(here / "found.pt", weights_only=False)
    return here, module, ours, found


def test_the_import_is_blocked(alone):
    """The control: nothing of ours was there, and what needs us could not be loaded."""
    found = alone[3]
    assert found["is_blocked"] and not found["was_imported"]
    for name in MIXED.keys() - {"mixed_fp32"}:
        assert "mixedfp" in found[f"mixed-{name}.pkl"]


@pytest.mark.parametrize("opt", OPTS)
@ANY
def test_plain_fastai_reads_the_file(precision, opt, alone):
    """Weights and moments bit for bit; it trains on."""
    _, _, ours, found = alone
    name = f"ours-{opt}-{precision}"
    assert_same(found[name], ours[name])
    before, after = found[name], found[name + "-after"]
    assert all(after["model"][k].isfinite().all() for k in after["model"])
    assert not torch.equal(
        after["model"]["layers.0.0.weight"], before["model"]["layers.0.0.weight"]
    )
    assert after["opt"][0].get("step", 8) == 8  # the count went on


@pytest.mark.parametrize("precision", [k for k in PRECISIONS if k != "fp32"])
def test_an_export_in_32_bits_needs_only_fastai(precision, alone):
    """`learn.to_fp32().export()` loads where only fastai is, and predicts the same.

    Other learners are still in 16 bits then, and fastai's tabular models share one ReLU.
    """
    _, _, ours, found = alone
    name = f"back-{precision}.pkl"
    assert not isinstance(found[name], str), found[name]
    (model, preds), (expected, expected_preds) = found[name], ours[name]
    assert_same(dict(model), expected)
    assert_same(preds, expected_preds)


@pytest.mark.parametrize("precision", [k for k in PRECISIONS if k != "fp32"])
def test_an_export_in_16_bits_loads_in_32(precision, alone):
    """fastai's `load_learner` on a CPU puts it into 32 bits: the masters, bit for bit."""
    _, _, ours, found = alone
    model, preds, dtypes = found[f"with-mixed-{precision}.pkl"]
    expected, expected_preds = ours[f"mixed-{precision}.pkl"]
    assert_same(dict(model), expected)
    assert dtypes == {torch.float32}
    tolerance = 2e-3 if "fp16" in precision else 2e-2
    torch.testing.assert_close(preds, expected_preds, rtol=tolerance, atol=tolerance)
    assert_same(preds, ours[f"back-{precision}.pkl"][1])
    after = found[f"with-mixed-{precision}.pkl-after"]
    assert not torch.equal(after["layers.0.0.weight"], expected["layers.0.0.weight"])


@pytest.mark.parametrize("opt", OPTS)
@ANY
def test_a_file_of_plain_fastai_is_read(precision, opt, alone):
    """The other way: weights into the masters, moments as they are; in 32 bits the same bits on."""
    here, module, _, found = alone
    learn = (PRECISIONS | MIXED)[precision](module["make"](opt, here, seed=2))
    quietly(learn.load, f"plain-{opt}")
    saved = found[f"plain-{opt}"]
    assert_same(module["look"](learn), saved)
    learn.fit(1)
    unbroken = found[f"plain-{opt}-unbroken"]
    if precision == "fp32":
        return assert_same(module["look"](learn), unbroken)
    for k, v in module["look"](learn)["model"].items():
        assert v.isfinite().all()
        torch.testing.assert_close(v, unbroken["model"][k], rtol=0.05, atol=0.1, msg=k)
    assert not torch.equal(v, saved["model"][k])


# Files of other hands


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@OURS
def test_a_file_in_another_type_goes_in(precision, dtype, tmp_path):
    """An old file in 16 bits: the masters are its values, none of their low bits invented."""
    old = {
        k: v.to(dtype) if v.is_floating_point() else v for k, v in conv_net().state_dict().items()
    }
    torch.save(old, tmp_path / "old.pth")
    learn = trained(precision, tmp_path)
    quietly(learn.load, tmp_path / "old", with_opt=False)
    expected = {k: v.float() if v.is_floating_point() else v for k, v in old.items()}
    assert_same(weights(learn), expected)
    learn.fit(1, 0.02)
    assert moved(learn, expected)


@OURS
def test_a_file_of_a_device_that_is_not_here(precision, tmp_path, monkeypatch):
    """`learn.load` asks for the learner's device, so a file of a GPU goes in on a CPU."""
    one = trained(precision, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
        one.save("one")
    with pytest.raises(RuntimeError, match="CUDA"):
        read(file_of(one))
    learn = learner(precision, tmp_path, seed=2)
    quietly(learn.load, "one")
    assert_same(state(learn), state(one))
    assert {t.device.type for t in tensors([masters(learn), opt_state(learn)])} == {"cpu"}


@OURS
def test_a_part_of_a_file_is_taken_where_strict_is_off(precision, tmp_path):
    """What is missing keeps all its bits, what is too much is passed over."""
    learn = trained(precision, tmp_path)
    before = state(learn)
    other = weights(learner("fp32", tmp_path, seed=2))
    some = {k: v for k, v in other.items() if k[0] in "14"}
    torch.save(some | {"body.weight": torch.ones(2)}, tmp_path / "some.pth")
    quietly(learn.load, tmp_path / "some", with_opt=False, strict=False)
    assert_same(state(learn), before | {"model": before["model"] | some})
    learn.fit(1, 0.02)
    assert moved(learn, before["model"] | some)


@OURS
def test_a_number_that_was_written_as_a_vector(precision, tmp_path):
    """PyTorch before 0.4 had no tensors without dimensions; its files are still read in 32 bits."""
    old = conv_net().state_dict()
    old["3.scale"] = torch.tensor([1.2345678])
    torch.save(old, tmp_path / "old.pth")
    learn = trained(precision, tmp_path)
    learn.load(tmp_path / "old", with_opt=False)
    assert_same(weights(learn)["3.scale"], torch.tensor(1.2345678))


@ANY
def test_an_open_file_and_another_folder(precision, tmp_path):
    """fastai takes a path, a name in its folder, or something to write into."""
    learn = trained(precision, tmp_path)
    before = state(learn)
    with open(tmp_path / "open.bin", "wb") as f:
        learn.save(f)
    learn.save(tmp_path / "deeper")
    learn.fit(1)
    for name in ("open.bin", tmp_path / "deeper"):
        with open(tmp_path / "open.bin", "rb") as f:
            quietly(learn.load, f if name == "open.bin" else name)
        assert_same(state(learn), before)
        learn.fit(1)


# Files that cannot be read


class Evil:
    """What is in a file that only a trusting reader opens."""

    def __reduce__(self):
        return os.getenv, ("HOME",)


def without(d, *keys):
    return {k: v for k, v in d.items() if k not in keys}


def other_shapes(model):
    return {k: torch.zeros(7, *v.shape) for k, v in model.items()}


REFUSED = {
    "missing": (lambda m: without(m, "4.weight", "1.bias"), "Missing key.*1.bias.*4.weight"),
    "no_buffer": (lambda m: without(m, "1.running_var"), "Missing key.*1.running_var"),
    "renamed": (lambda m: {f"module.{k}": v for k, v in m.items()}, "Missing key"),
    "one_renamed": (lambda m: {k.replace("10.b", "11.b"): v for k, v in m.items()}, "11.bias"),
    "too_much": (lambda m: m | {"head.weight": torch.ones(3)}, "Unexpected key.*head.weight"),
    "other_head": (lambda m: m | {"10.weight": torch.ones(5, 4)}, "size mismatch for 10.weight"),
    "other_model": (other_shapes, "size mismatch"),
    "other_kind": (lambda m: m | {"10.bias": "none"}, "10.bias"),
    "a_list": (lambda m: list(m.values()), "dict-like"),
    "empty_dict": (lambda m: {}, "Missing key"),
    "pickle": (lambda m: m | {"10.bias": Evil()}, "(?i)weights.only"),
    "whole_model": (lambda m: conv_net(), "(?i)weights.only"),
}
BROKEN = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "short": lambda data: data[:-30],
    "start": lambda data: data[:10],
    "text": lambda data: b"not a checkpoint\n" * 20,
}


# what torch raises, from `load_state_dict` and from `torch.load`
UNREADABLE = (RuntimeError, TypeError, EOFError, OSError, pickle.UnpicklingError)


def bad_file(kind, source, path, with_opt):
    """Write a file of `kind`, whose weights, where it has some, are those of `source`."""
    if kind in BROKEN:
        source.save(path.with_suffix(""))
        path.write_bytes(BROKEN[kind](path.read_bytes()))
        return ".*"
    change, message = REFUSED[kind]
    model = change(plain(dict(source.model.state_dict())))
    torch.save({"model": model, "opt": source.opt.state_dict()} if with_opt else model, path)
    return f"(?s){message}"


@pytest.mark.parametrize("kind", [*REFUSED, *BROKEN])
@OURS
def test_a_refused_file_changes_nothing(precision, kind, tmp_path):
    """A clear error; weights, masters, buffers, optimizer, scale are as before, and so is a fit.

    Plain PyTorch keeps what it could copy out of such a file.
    """
    source = trained("fp32", tmp_path, seed=2)
    learn, twin = trained(precision, tmp_path), trained(precision, tmp_path)
    path = tmp_path / "bad.pth"
    message = bad_file(kind, source, path, with_opt=True)
    before = everything(learn)
    with pytest.raises(Exception, match=message) as error:
        learn.load(path.with_suffix(""))
    assert isinstance(error.value, UNREADABLE)
    assert_same(everything(learn), before)
    for one in (learn, twin):
        one.fit(1, 0.02)
    assert_same(state(learn), state(twin))
    assert_same(masters(learn), masters(twin))
    good = learner("fp32", tmp_path, seed=2)
    good.save("good")
    learn.load("good")  # the next file goes in
    assert_same(weights(learn), weights(good))


@pytest.mark.parametrize("kind", ["missing", "too_much", "other_head", "other_kind"])
def test_plain_torch_keeps_half_of_a_refused_file(kind, tmp_path):
    """The control: in 32 bits without us the same file leaves another model behind."""
    source, learn = trained("fp32", tmp_path, seed=2), trained("fp32", tmp_path)
    bad_file(kind, source, tmp_path / "bad.pth", with_opt=False)
    before = weights(learn)
    with pytest.raises(RuntimeError):
        learn.load(tmp_path / "bad", with_opt=False)
    assert not torch.equal(weights(learn)["0.weight"], before["0.weight"])


@pytest.mark.parametrize("kind", ["missing", "other_head", "half"])
@OURS
def test_a_refused_file_before_the_first_fit(precision, kind, tmp_path):
    """A learner that was never trained keeps the bits of its weights, low ones included."""
    source, learn = trained("fp32", tmp_path, seed=2), learner(precision, tmp_path)
    message = bad_file(kind, source, tmp_path / "bad.pth", with_opt=False)
    expected = weights(make_learner(splitter=three_groups))
    with pytest.raises(Exception, match=message):
        learn.load(tmp_path / "bad")
    assert_same(weights(learn), expected)
    assert_same(weights(learn.to_fp32()), expected)


@OURS
def test_what_was_written_by_hand_survives_a_refused_file(precision, tmp_path):
    """A weight that somebody set since the last fit is part of what was before."""
    source, learn = trained("fp32", tmp_path, seed=2), trained(precision, tmp_path)
    bad_file("missing", source, tmp_path / "bad.pth", with_opt=False)
    with torch.no_grad():
        learn.model[4].weight.fill_(0.25)
    before = weights(learn)
    with pytest.raises(RuntimeError):
        learn.load(tmp_path / "bad")
    assert_same(weights(learn), before)
    assert (before["4.weight"] == 0.25).all()


@pytest.mark.parametrize("kind", ["missing", "other_head", "half"])
@OURS
def test_a_refused_file_in_the_middle_of_a_fit(precision, kind, tmp_path):
    """A callback that forgives the error goes on as if it had not tried."""
    source = trained("fp32", tmp_path, seed=2)
    bad_file(kind, source, tmp_path / "bad.pth", with_opt=True)
    refused = []

    def attempt(learn):
        with pytest.raises(UNREADABLE):
            learn.load(tmp_path / "bad")
        refused.append(learn.iter)

    learn, twin = trained(precision, tmp_path), trained(precision, tmp_path)
    events = ("before_batch", "after_backward", "before_step", "after_batch")
    learn.fit(1, 0.02, cbs=[Do(event, attempt, at=1) for event in events])
    assert refused == [1] * 4
    twin.fit(1, 0.02)
    assert_same(state(learn), state(twin))


# The state of another optimizer

WARNED = [  # (saved, loading): fastai warns, that it could not load
    ("adam", "torch_adamw"),
    ("torch_adamw", "adam"),
    ("adam", "ranger"),
]


@pytest.mark.parametrize("saved, loading", WARNED, ids="-".join)
@ANY
def test_the_state_of_another_optimizer_is_told(precision, saved, loading, tmp_path):
    """fastai's own warning: weights are loaded, the optimizer is as it was, training goes on."""
    one, learn = trained(precision, tmp_path, saved, seed=2), trained(precision, tmp_path, loading)
    one.save("one")
    check_told(learn, weights(one))


@pytest.mark.parametrize("opt", ["adam", "torch_adamw", "ranger"])
@OURS
def test_the_state_of_other_groups_is_told(precision, opt, tmp_path):
    """A model split into more or fewer groups; fastai's Lookahead alone is left half loaded."""
    single = lambda model: list(model.parameters())  # noqa: E731
    one = trained(precision, tmp_path, opt, seed=2, splitter=single)
    one.save("one")
    check_told(trained(precision, tmp_path, opt), weights(one))


def check_told(learn, expected):
    """Load `one`, whose optimizer does not fit; and train."""
    before = everything(learn)
    with pytest.warns(UserWarning, match="Could not load the optimizer state"):
        learn.load("one")
    found = everything(learn)
    assert_same(weights(learn), expected)
    for k in ("opt", "scale", "lists", "flags", "grads"):
        assert_same(found[k], before[k], name=k)
    learn.fit(1, 0.02)
    assert moved(learn, expected)


@pytest.mark.parametrize("saved, loading", [("sgd", "adam"), ("torch_sgd", "torch_adamw")])
@OURS
def test_the_state_of_an_optimizer_that_knows_less_is_told(precision, saved, loading, tmp_path):
    """SGD's numbers have no `eps`: plain fastai takes them, and the next fit fails on it."""
    one, learn = trained(precision, tmp_path, saved, seed=2), trained(precision, tmp_path, loading)
    one.save("one")
    check_told(learn, weights(one))


@pytest.mark.parametrize("saved, loading", [("sgd", "adam")])
def test_plain_fastai_takes_the_state_of_an_optimizer_that_knows_less(saved, loading, tmp_path):
    """The control: no warning, and no training after it."""
    one, learn = trained("fp32", tmp_path, saved, seed=2), trained("fp32", tmp_path, loading)
    one.save("one")
    quietly(learn.load, "one")
    with pytest.raises((TypeError, KeyError)):
        learn.fit(1, 0.02)


@pytest.mark.parametrize("saved, loading", [("adam", "sgd"), ("rmsprop", "sgd")])
@OURS
def test_the_state_of_an_optimizer_that_knows_more_is_taken(precision, saved, loading, tmp_path):
    """As plain fastai does: Adam's average goes on as SGD's momentum; in float32 the same bits."""
    results = []
    for p in ("fp32", precision):
        one, learn = trained(p, tmp_path, saved, seed=2), trained(p, tmp_path, loading)
        one.save("one")
        quietly(learn.load, "one")
        assert_same(weights(learn), weights(one))
        assert_same(opt_state(learn), opt_state(one))
        learn.fit(1, 0.02)
        assert moved(learn, weights(one))
        results.append(state(learn))
    if precision == "mixed_fp32":
        assert_same(results[1]["model"], results[0]["model"])
        assert_same(results[1]["opt"], results[0]["opt"])


@OURS
def test_without_the_optimizer_its_state_is_not_looked_at(precision, tmp_path):
    """`with_opt=False` of a file of another optimizer: no warning, and nothing but the weights."""
    one, learn = trained(precision, tmp_path, "torch_adamw", seed=2), trained(precision, tmp_path)
    one.save("one")
    before = state(learn)
    quietly(learn.load, "one", with_opt=False)
    assert_same(state(learn), before | {"model": weights(one)})


# Loading in the middle of a fit

EVENTS = ["before_fit", "before_epoch", "before_train", "before_batch", "after_backward"]
EVENTS += ["before_step", "after_step", "after_batch", "after_train"]
EVENTS += ["before_validate", "after_epoch"]


def load_at(event, learn, name="one", order=60):
    """Fit, loading `name` once, at `event`."""
    done, found = [], []

    def load(learn):
        if not done:
            done.append(1)
            quietly(learn.load, name)
            found.append(state(learn))

    at = 1 if event in EVENTS[3:8] else None
    learn.fit(2, 0.02, wd=0.1, cbs=Do(event, load, at=at, order=order, training=False))
    assert done == [1]
    return found[0]


@pytest.mark.parametrize("name", EVENTS)
def test_loading_in_any_event_is_plain_fastais(name, tmp_path, opt="adam"):
    """In float32 bit for bit, with a master each and flat; a way back that a callback may take."""
    trained("fp32", tmp_path, opt, seed=2).save("one")
    results = []
    for mixed in (None, False, True):
        learn = learner("fp32", tmp_path, opt)
        if mixed is not None:
            learn.to_fp16(dtype=torch.float32, flat_master=mixed)
        load_at(name, learn)
        results.append((weights(learn), opt_state(learn)))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", EVENTS)
def test_loading_in_any_event_loads_every_bit(name, half, tmp_path):
    """In 16 bits too the masters are the file's at once, and flat goes on as a master each does."""
    one = trained(half, tmp_path, seed=2)
    one.save("one")
    results = []
    for precision in (half, half + "_flat"):
        learn = learner(precision, tmp_path)
        assert_same(load_at(name, learn), state(one))
        results.append(state(learn))
    assert_same(results[1], results[0])
    assert moved(learn, weights(one))


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("name", ["after_backward", "before_step"])
@pytest.mark.parametrize("order", [5, 60])
def test_a_loaded_scale_is_not_that_of_the_gradients_on_their_way(name, order, flat, tmp_path):
    """The scale comes between a scaled loss and its step: the gradients stay the true ones."""
    one = learner("fp32", tmp_path, seed=2).to_fp16(loss_scale=8192.0)
    one.fit(1, 0.0)
    one.save("one")
    grads = []
    for name_ in (None, name):
        learn = learner("fp32", tmp_path, seed=2).to_fp16(loss_scale=512.0, flat_master=flat)
        look = Do(
            "before_step",
            lambda learn: grads.append([p.grad.clone() for p in learn.model.parameters()]),
            at=0,
            order=61,
        )
        load = Do(name_, lambda learn: learn.load("one"), at=0, order=order)
        learn.fit(1, 0.0, cbs=[look, load])
    assert_same(grads[1], grads[0])


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("name", ["before_batch", "after_backward"])
def test_a_skipped_step_leaves_what_was_loaded(name, flat, tmp_path):
    """An overflow after a load takes back the batch, not the file."""
    one = trained("fp16", tmp_path, seed=2)
    one.save("one")
    learn = trained("fp16_flat" if flat else "fp16", tmp_path)

    def overflow(learn):
        next(learn.model.parameters()).grad.fill_(torch.inf)

    def stop(learn):
        raise CancelFitException

    load = Do(name, lambda learn: learn.load("one"), at=1)
    spoil = Do("after_backward", overflow, at=1, order=61)
    learn.fit(1, 0.02, cbs=[load, spoil, Do("after_batch", stop, at=1)])
    assert learn.mp_cb.n_skipped == 1
    assert_same(weights(learn), weights(one))
    assert_same(opt_state(learn), opt_state(one))


def test_a_callback_of_one_fit_writes_plain_files(tmp_path):
    """`fit(cbs=MixedPrecision())`: a file of that fit goes into a plain learner and back."""
    learn = make_learner("adam", path=tmp_path, splitter=three_groups)
    saver = Do("after_epoch", lambda learn: learn.save("one"), training=False)
    learn.fit(1, 0.02, cbs=[MixedPrecision(flat_master=True), saver])
    other = learner("fp32", tmp_path, seed=2)
    quietly(other.load, "one")
    assert_same(weights(other), weights(learn))
    assert_same(opt_state(other), opt_state(learn))


def _sizes(learn):
    """Bytes of what users write: the whole, the weights of one layer, the optimizer's state."""
    model, opt = learn.model.state_dict(), learn.opt.state_dict()["state"]
    some = {"whole": model, "layer": learn.model[0].state_dict(), "opt": opt, "a state": opt[:1]}
    return {
        (name, write.__name__): len(write(part)) for name, part in some.items() for write in WRITERS
    }


def saved(part):
    """Return the bytes of a file of `torch.save`."""
    buffer = io.BytesIO()
    torch.save(part, buffer)
    return buffer.getvalue()


WRITERS = (saved, pickle.dumps)


@OURS
@pytest.mark.parametrize("back", [False, True], ids=["mixed", "to_fp32"])
def test_files_of_parts_hold_those_parts_alone(precision, back, tmp_path):
    """Not the vector that they are views of, and not once for each of them."""
    plain_one, learn = (trained(p, tmp_path) for p in ("fp32", precision))
    if back:
        learn.to_fp32()
    ours, expected = _sizes(learn), _sizes(plain_one)
    for what, size in ours.items():
        assert size <= 1.02 * expected[what] + 64, what


@OURS
def test_tied_weights_are_written_once(precision, tmp_path):
    """Under whatever names."""

    def tied():
        layers = [nn.Linear(60, 60) for _ in range(3)]
        layers[2].weight = layers[0].weight
        return nn.Sequential(nn.Flatten(), nn.Linear(108, 60), *layers, nn.Linear(60, 3))

    learn = trained(precision, tmp_path, model=tied, splitter=one_group)
    for prefix in ("", "inner.", ""):
        state = learn.model.state_dict(prefix=prefix)
        one, other = (state[f"{prefix}{i}.weight"] for i in (2, 4))
        assert one.data_ptr() == other.data_ptr()
        assert len(saved(state)) < 1.1 * 4 * sum(p.numel() for p in learn.model.parameters())


@pytest.mark.parametrize("precision", ["bf16", "bf16_flat"])
def test_what_is_written_into_a_state_dict_is_trained_on(precision, tmp_path):
    """As PyTorch's own it holds the weights themselves, also where they are parts of a vector."""
    learn = learner(precision, tmp_path, "sgd", splitter=one_group)
    write = Do("before_batch", lambda learn: learn.model.state_dict()["0.weight"].fill_(3), at=1)
    learn.add_cb(write)
    learn.fit(1, 0.0)
    learn.to_fp32()
    assert (learn.model[0].weight == 3).all()
