"""Lightning, Fabric, Hugging Face's Trainer and Accelerate with one line changed.

With masters in float32 a trainer gives the bits that it gives without them; in 16 bits those of a
loop by hand; a run that was saved and resumed ends in those of an unbroken one.
"""

import copy
import csv
import gc
import inspect
import itertools
import os
import pickle
import tempfile
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from unittest.mock import Mock

import pytest

if not all(map(find_spec, ["accelerate", "lightning", "transformers", "peft"])):
    pytest.skip("a trainer is not installed", allow_module_level=True)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import accelerate
import lightning
import peft
import torch
import transformers
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricParallel
from lightning.pytorch import callbacks as cbs
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from mixedfp import masters_of, with_masters
from mixedfp.cast import Policy
from mixedfp.engine.rounded import Copies
from mixedfp.formats import MixedPrecisionError
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same
from mixedfp.trainers import MastersPrecision, use_masters

EACH = pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
FLAT = dict(flat_master=True)
FOLDER = tempfile.gettempdir()  # of trainers that write nothing
together = lambda a, net, opt: a.prepare(net, opt)  # noqa: E731
ORDERS = {
    "optimizer first": lambda a, net, opt: reversed(a.prepare(opt, net)),
    "one by one": lambda a, net, opt: (a.prepare(net), a.prepare(opt)),
    "compiled": lambda a, net, opt: a.prepare(torch.compile(net, backend="eager"), opt),
}
SWA = partial(cbs.StochasticWeightAveraging, 0.01, swa_epoch_start=2)
EMA = partial(cbs.EMAWeightAveraging, decay=0.9)
make_opt = partial(AdamW, lr=0.01, weight_decay=0.1)
torch.set_num_threads(1)  # these tensors are tiny: a second thread would only wait


def make_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def batches(bad=None, seed=0, n=8):
    """`n` batches of four points in two classes; batch number `bad` contains an inf."""
    x = torch.randn(n, 4, 5, generator=torch.Generator().manual_seed(seed))
    y = (x[..., 0] > 0).long()
    if bad is not None:
        x[bad, 0, 0] = float("inf")
    return list(zip(x, y, strict=True))


def largest_grad(net):
    return max(float(p.grad.norm()) for p in net.parameters())


def ends(net, opt, logs):
    """Weights, buffers and states, as in files; the number of skipped steps and the scale."""
    states = dict(model=dict(net.state_dict()), opt=opt.state_dict()["state"])
    return copy.deepcopy(states) | dict(skipped_steps=0, loss_scale=1.0) | logs


def by_hand(dtype, data, accumulate=2, ddp=False, **settings):
    net = make_net()
    opt = make_opt(net.parameters())
    scaler = LossScaler(enabled=dtype == "fp16")
    if dtype is not None:
        with_masters(net, opt, dtype=dtype, **settings)
    model = DistributedDataParallel(net) if ddp else net
    for i, (x, y) in enumerate(data, 1):
        scaler.scale(cross_entropy(model(x), y) / accumulate).backward()
        if i % accumulate == 0:
            scaler.unscale_(opt)
            clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    skips = dict(skipped_steps=opt.masters.n_skipped) if dtype else {}
    return ends(net, opt, skips | dict(loss_scale=scaler.get_scale()))


def plugins_of(dtype, **settings):
    return [] if dtype is None else [MastersPrecision(dtype, **settings)]


def by_fabric(dtype, data, accumulate=2, save=None, resume=None, **settings):
    plugins = plugins_of(dtype, **settings)
    fabric = Fabric(accelerator="cpu", devices=world(), plugins=plugins)
    fabric.launch()
    net = make_net()
    own = make_opt(net.parameters())
    model, opt = fabric.setup(net, own)
    state = dict(zip(("model", "opt", "plugin"), (model, opt, *plugins), strict=False), step=0)
    if resume is not None:
        fabric.load(resume, state)
    for x, y in data[state["step"] :]:
        fabric.backward(cross_entropy(model(x), y) / accumulate)
        state["step"] += 1
        if state["step"] % accumulate == 0:
            fabric.clip_gradients(model, opt, max_norm=0.5, error_if_nonfinite=False)
            opt.step()
            opt.zero_grad()
    if save is not None:
        fabric.save(save, state)
    return ends(net, own, plugins[0].logs if plugins else {})


def by_accelerate(dtype, data, accumulate=2, save=None, resume=None, prepare=together, **settings):
    gc.collect()  # Accelerate counts batches of any loader that a Trainer has left in mid-epoch
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    if dtype is not None:
        assert use_masters(accelerator, dtype, **settings) is accelerator
    net = make_net()
    own = make_opt(net.parameters())
    model, opt = prepare(accelerator, net, own)
    if resume is not None:
        accelerator.load_state(resume)
    for x, y in data[4 if resume else 0 :]:
        with accelerator.accumulate(model), accelerator.autocast():
            accelerator.backward(cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
    if save is not None:
        accelerator.save_state(save)
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is net
    return ends(net, own, accelerator.setup.logs([net]) if dtype else {})


class Module(lightning.LightningModule):
    """Calls a net, and notes the dtype of the last output of `net[0]` and the loss."""

    product = None

    def __init__(self, make_opt=make_opt):
        super().__init__()
        self.net, self.make_opt, self.seen = make_net(), make_opt, []
        self.net[0].register_forward_hook(lambda *found: setattr(self, "product", found[2].dtype))

    def forward(self, x):
        return self.net(x)

    def configure_optimizers(self):
        return self.make_opt(self.parameters())

    def training_step(self, batch, _):
        loss = cross_entropy(self(batch[0]), batch[1])
        self.seen.append((self.product, float(loss.detach())))
        return loss

    validation_step = test_step = training_step

    def predict_step(self, batch, _):
        return self(batch[0])

    def on_train_end(self):  # when the fit has ended they are gone
        self.logs = getattr(self.trainer.precision_plugin, "logs", {})


def trainer_of(plugins, **settings):
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    quiet |= dict(enable_checkpointing=False, default_root_dir=FOLDER, num_sanity_val_steps=0)
    settings = quiet | dict(max_epochs=1, use_distributed_sampler=False) | settings
    return lightning.Trainer(accelerator="cpu", devices=world(), plugins=plugins, **settings)


def loader(data):
    return DataLoader(data, batch_size=None)


def by_lightning(dtype, data, accumulate=2, save=None, resume=None, **settings):
    module, how = Module(), dict(gradient_clip_val=0.5, accumulate_grad_batches=accumulate)
    trainer = trainer_of(plugins_of(dtype, **settings), max_epochs=2 if resume else 1, **how)
    trainer.fit(module, loader(data[4 if resume else 0 :]), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    assert masters_of(module) is None
    return ends(module.net, trainer.optimizers[0], module.logs)


def trainer_on(model, rows, path=FOLDER, opt=None, loss=None, **args):
    quiet = dict(use_cpu=True, logging_strategy="no", report_to=[], disable_tqdm=True)
    given = dict(train_sampling_strategy="sequential", per_device_train_batch_size=4)
    given |= dict(learning_rate=0.01, save_strategy="no")
    args = transformers.TrainingArguments(str(path), **quiet | given | args)
    given = dict(train_dataset=rows, eval_dataset=rows[:8], compute_loss_func=loss)
    trainer = transformers.Trainer(model, args, **given, optimizers=(opt, None))
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def by_trainer(dtype, data, accumulate=2, save=None, resume=None, **settings):
    net = make_net()
    own = make_opt(net.parameters())
    rows = [{"input": a, "labels": b} for x, y in data for a, b in zip(x, y, strict=True)]
    args = dict(max_steps=len(data) // accumulate // world(), max_grad_norm=0.5, weight_decay=0.1)
    args |= dict(gradient_accumulation_steps=accumulate, lr_scheduler_type="constant")
    args |= dict(remove_unused_columns=False, average_tokens_across_devices=False)  # of a loss
    args |= dict(save_steps=2, save_strategy="steps") if save else {}
    loss = lambda out, y, **_: cross_entropy(out, y) / accumulate  # noqa: E731
    trainer = trainer_on(net, rows, save or FOLDER, own, loss, **args)
    if dtype is not None:
        assert use_masters(trainer, dtype, **settings) is trainer
    trainer.train(resume_from_checkpoint=resume)
    return ends(net, own, trainer.accelerator.setup.logs([net]) if dtype else {})


TRAINERS = [by_lightning, by_fabric, by_accelerate, by_trainer]
ANY = pytest.mark.parametrize("train", TRAINERS, ids=lambda t: t.__name__)


def world():
    return int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun


def saved_by(train, dtype, data, folder, **kept):
    """Return the path of what a trainer has saved after half of the batches."""
    train(dtype, data[:4], save=str(folder / "saved"), **kept)
    return str(folder / "saved") + ("/checkpoint-2" if train is by_trainer else "")


@ANY
@EACH
@pytest.mark.parametrize(
    "kept", [{}, FLAT, FLAT | dict(half_grads=True)], ids=["each", "flat", "half"]
)
def test_a_trainer_ends_as_a_loop_by_hand(train, dtype, kept):
    """Clipped after unscaling, with accumulation; one step of four overflows."""
    bad = None if dtype == "fp32" else 4
    found = train(dtype, batches(bad), **kept)
    assert_same(found, by_hand(dtype, batches(bad), **kept))
    true = by_hand(dtype, batches(bad))["model"]
    torch.testing.assert_close(found["model"], true, rtol=1e-2, atol=2e-3)  # half gradients too
    assert found["skipped_steps"] == (0 if dtype == "fp32" else 1)
    if dtype == "fp32":
        assert_same(found, train(None, batches()))


@pytest.mark.parametrize("prepare", ORDERS.values(), ids=ORDERS)
def test_accelerate_is_given_model_and_optimizer_in_any_order(prepare):
    assert_same(by_accelerate("fp16", batches(4), prepare=prepare), by_hand("fp16", batches(4)))


@ANY
@pytest.mark.parametrize("kept", [{}, FLAT], ids=["each", "flat"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_resumed_run_ends_as_an_unbroken_one(train, kept, dtype, tmp_path):
    """The overflow comes before the file is written, so that the scale must be in it."""
    unbroken = train(dtype, batches(1), **kept)
    path = saved_by(train, dtype, batches(1), tmp_path, **kept)
    resumed = train(dtype, batches(1), resume=path, **kept)
    assert_same({**resumed, "skipped_steps": 1}, unbroken)


@ANY
@pytest.mark.parametrize("saved", [None, "fp32", "bf16", "fp16"])
def test_a_state_of_any_precision_continues_in_any_other(train, saved, tmp_path):
    """Near to what float32 gives; without a saved scale the scaler's first one stays."""
    path, whole = saved_by(train, saved, batches(), tmp_path), train(None, batches())
    for loaded in (None, "fp32", "bf16", "fp16"):
        if (train, saved, loaded) == (by_trainer, "fp16", None):
            continue  # a plain Trainer cannot read a scale
        if train is by_fabric and saved is None and loaded is not None:
            with pytest.raises(KeyError, match="plugin"):  # Fabric misses an entry of the state
                train(loaded, batches(), resume=path)
            continue
        found = train(loaded, batches(), resume=path)
        assert found["skipped_steps"] == 0
        assert [s["step"] for s in found["opt"].values()] == [4] * 6
        for now, then in zip(found["model"].values(), whole["model"].values(), strict=True):
            torch.testing.assert_close(now, then, rtol=0.05, atol=0.05)


def replicated(rank):
    """All runs of one of two processes: {(trainer, dtype): what it ends in}."""
    found = {}
    for dtype in (None, "fp32", "bf16", "fp16"):
        bad = None if dtype in (None, "fp32") else 4
        data = [batches(bad if r == 1 else None, seed=r) for r in range(2)]
        found["by_hand", dtype] = by_hand(dtype, data[rank], accumulate=1, ddp=True)
        dealt = [batch for step in zip(*data, strict=True) for batch in step]  # by the Trainer
        for train in TRAINERS:
            mine = dealt if train is by_trainer else data[rank]
            found[train.__name__, dtype] = train(dtype, mine, accumulate=1)
    return found


def test_two_processes_end_as_a_loop_does(tmp_path):
    """An overflow on one rank is skipped by both, and their models stay equal."""
    done = on_ranks(2, replicated, tmp_path, ("test_trainers",))
    for train, found in itertools.product(TRAINERS, done):
        for dtype in (None, "fp32", "bf16", "fp16"):
            assert_same(found[train.__name__, dtype], found["by_hand", dtype])
            assert_same(found[train.__name__, dtype]["opt"], done[0]["by_hand", dtype]["opt"])
            assert found["by_hand", dtype]["skipped_steps"] == (dtype in ("bf16", "fp16"))
        assert_same(found[train.__name__, "fp32"], found["by_hand", None])


def shard(model, mesh, dtype):
    half = dict(bf16=torch.bfloat16, fp16=torch.float16).get(dtype)
    policy = MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False)
    return fully_shard(model, mesh=mesh["data_parallel"], mp_policy=policy)


def sharded(rank):
    """Losses of Fabric and of Lightning: {(trainer, dtype): losses}."""
    sizes, found = dict(data_parallel_size=2, tensor_parallel_size=1), {}
    make_pair = lambda: make_net()[::3]  # noqa: E731  # without the norm
    for dtype in (None, "fp32", "bf16", "fp16"):
        parallel = FabricParallel(partial(shard, dtype=dtype), **sizes)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=parallel, plugins=plugins_of(dtype))
        fabric.launch()
        model = fabric.setup_module(make_pair())
        opt = fabric.setup_optimizers(SGD(model.parameters(), lr=0.1))
        found["fabric", dtype] = losses = []
        for x, y in batches(seed=rank):
            loss = cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, opt, max_norm=0.5, error_if_nonfinite=False)
            opt.step()
            opt.zero_grad()
            losses.append(float(loss.detach()))
        module = Module(partial(SGD, lr=0.1))
        module.net = make_pair()
        module.configure_model = lambda m=module, dtype=dtype: shard(m, m.device_mesh, dtype)
        how = dict(strategy=ModelParallelStrategy(**sizes), gradient_clip_val=0.5)
        trainer_of(plugins_of(dtype), **how).fit(module, loader(batches(seed=rank)))
        found["lightning", dtype] = [loss for _, loss in module.seen]
    return found


def test_fsdp2_in_fabric_and_lightning(tmp_path):
    """The bits of float32; in 16 bits nearly its losses."""
    for found in on_ranks(2, sharded, tmp_path, ("test_trainers",)):
        for name in ("fabric", "lightning"):
            assert_same(found[name, "fp32"], found[name, None])
            for dtype in ("bf16", "fp16"):
                assert found[name, dtype] == pytest.approx(found[name, None], rel=2e-3)
                assert found[name, dtype] != found[name, None]
        assert found["fabric", None] == pytest.approx(found["lightning", None])


def test_a_model_that_is_sharded_once_the_plugin_has_it_is_checked(alone):
    plugin = MastersPrecision("bf16")
    fully_shard(plugin.convert_module(make_net()[::3]))
    with pytest.raises(MixedPrecisionError, match="computes in torch.float32"):
        plugin.forward_context().__enter__()


class Gan(lightning.LightningModule):
    """Generator and critic: each is frozen in turn, or `both` step after one loss."""

    def __init__(self, both):
        super().__init__()
        self.automatic_optimization, self.both = False, both
        torch.manual_seed(1)
        sizes = (2, 8, 5), (5, 8, 1)
        layers = [[nn.Linear(i, j), nn.BatchNorm1d(j), nn.Linear(j, k)] for i, j, k in sizes]
        self.nets = nn.ModuleList(nn.Sequential(*three) for three in layers)

    def configure_optimizers(self):
        return [SGD(net.parameters(), lr=0.1, momentum=0.5) for net in self.nets]

    def loss(self, x, target):
        generator, critic = self.nets
        out = critic(generator(x[:, :2]))
        loss = binary_cross_entropy_with_logits(out, torch.full_like(out, target))
        if target == 0:
            out = critic(x)
            loss = loss + binary_cross_entropy_with_logits(out, torch.ones_like(out))
        return loss

    def training_step(self, batch, _):
        clip = lambda _, opt: self.clip_gradients(opt, gradient_clip_val=0.5)  # noqa: E731
        only = lambda _, opt: opt.toggle_model()  # noqa: E731
        self.train_on(batch, self.optimizers(), self.manual_backward, clip, only=only)

    def _only(self, net, opt):
        for other in self.nets:
            other.requires_grad_(other is net)
        return nullcontext()

    def train_on(self, x, opts, backward, clip, step=lambda opt: opt.step(), only=None):
        """Do a training step, of a Trainer or by hand."""
        if self.both:
            backward(self.loss(x, 0.0))
        for net, opt, target in zip(self.nets, opts, (1.0, 0.0), strict=True):
            if not self.both:
                with (only or self._only)(net, opt):
                    is_on = [any(p.requires_grad for p in net.parameters()) for net in self.nets]
                    assert is_on == [target == 1, target == 0]
                    backward(self.loss(x, target))
            clip(net, opt)
            step(opt)
            opt.zero_grad()


@pytest.mark.parametrize("how", ["Lightning", "Fabric", "Fabric without clipping"])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("dtype", [None, "fp32", "bf16", "fp16"])
def test_two_networks_with_an_optimizer_each(dtype, both, how):
    """Each step updates the scale; gradients of frozen networks, if any, would add up."""
    is_scaled, clips = dtype == "fp16", "without" not in how
    is_spoiled = how == "Lightning" and dtype in ("bf16", "fp16")  # it knows both as one model
    data = [x for x, _ in batches(3 if is_spoiled else None)]
    gan, twin, plugins = Gan(both), Gan(both), plugins_of(dtype)
    opts, scaler = twin.configure_optimizers(), LossScaler(enabled=is_scaled)
    if dtype is not None:
        with_masters(twin.nets, *opts, dtype=dtype)

    def clip(net, opt):
        scaler.unscale_(opt)
        if clips:
            clip_grad_norm_(net.parameters(), 0.5)

    def step(opt):
        scaler.step(opt)
        scaler.update()

    for x in data:
        twin.train_on(x, opts, lambda loss: scaler.scale(loss).backward(), clip, step)
    if how == "Lightning":
        trainer_of(plugins).fit(gan, loader(data))
    else:
        fabric = Fabric(accelerator="cpu", plugins=plugins)
        pairs = zip(gan.nets, gan.configure_optimizers(), strict=True)
        nets, opts = zip(*(fabric.setup(*pair) for pair in pairs), strict=True)
        gan.nets = nn.ModuleList(nets)
        clip = partial(fabric.clip_gradients, max_norm=0.5, error_if_nonfinite=False)
        for x in data:
            gan.train_on(x, opts, fabric.backward, clip if clips else lambda *_: None)
        gan.nets = nn.ModuleList(net.module for net in nets)
    assert_same(dict(gan.state_dict()), dict(twin.state_dict()))
    for plugin in plugins:
        assert plugin.scaler.n_steps == scaler.n_steps == (16 if is_scaled else 0)
        assert plugin.scaler.skipped == ([6, 7] if is_scaled and is_spoiled else [])


def test_lightning_validates_tests_and_predicts_in_16_bits_and_fits_again():
    """A new Trainer predicts in 16 bits, too; afterwards the module computes in float32."""
    module, data = Module(), loader(batches())
    trainer = trainer_of([MastersPrecision("bf16")], max_epochs=2)
    trainer.fit(module, data, data)
    last = module.seen[-8:]
    trainer.test(module, data, verbose=False)
    assert module.seen[-8:] == last and {d for d, _ in module.seen} == {torch.bfloat16}
    out = trainer_of([MastersPrecision("fp16")]).predict(module, data)[0]
    assert out.dtype == torch.float32 and masters_of(module) is None
    exact = module.eval()(batches()[0][0])
    assert 0 < (out - exact).abs().max() < 0.01
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, data)
    assert module.seen[-1][0] == torch.bfloat16


def test_lightning_logs_and_its_callbacks_read_unscaled_gradients(tmp_path):
    norms, logger, rates = [], CSVLogger(str(tmp_path)), cbs.LearningRateMonitor()
    see = lambda trainer, module, opt: norms.append(largest_grad(module))  # noqa: E731
    kwargs = dict(callbacks=[cbs.LambdaCallback(on_before_optimizer_step=see), rates])
    kwargs |= dict(plugins=[MastersPrecision("fp16")], logger=logger, log_every_n_steps=2)
    trainer_of(**kwargs).fit(Module(), loader(batches(3)))
    assert max(norms[:3]) < 3 and norms[3] != norms[3]  # nan
    with open(logger.log_dir + "/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    keys = "step", "skipped_steps", "loss_scale"
    found = [tuple(float(r[k]) for k in keys) for r in rows if r["loss_scale"]]
    assert found == [(0, 0, 2**16), (2, 0, 2**16), (4, 1, 2**15), (6, 1, 2**15)]
    assert any(r["lr-AdamW"] for r in rows)


@EACH
def test_lightning_with_an_optimizer_that_calls_its_closure_again(dtype):
    """LBFGS, which Lightning's own float16 plugin refuses; an exception leaves a plain module."""
    make, data = partial(LBFGS, lr=0.1, max_iter=4), loader(batches()[:1] * 6)
    plain, module = Module(make), Module(make)
    trainer_of([]).fit(plain, data)
    refuses = pytest.raises(RuntimeError, match="cannot be skipped")
    with nullcontext() if dtype == "fp32" else refuses:
        trainer_of([MastersPrecision(dtype)]).fit(module, data)
    assert masters_of(module) is None and "forward" not in vars(module)
    assert dtype != "fp32" or module.seen == plain.seen


def test_lightning_skips_a_training_step_that_returns_none():
    class Sometimes(Module):
        def training_step(self, batch, i):
            return super().training_step(batch, i) if i % 2 else None

    skipping, half = Sometimes(), Module()
    trainer_of([MastersPrecision("fp16")]).fit(skipping, loader(batches()))
    trainer_of([MastersPrecision("fp16")]).fit(half, loader(batches()[1::2]))
    assert_same(dict(skipping.state_dict()), dict(half.state_dict()))


def test_lightning_restores_what_a_part_has_changed_before_the_whole_module():
    class Mixed(Module):
        def training_step(self, batch, i):
            return 0.5 * self.net(batch[0]).sum() + super().training_step(batch, i)

    module = Mixed()
    trainer_of([MastersPrecision("bf16")]).fit(module, loader(batches(bad=3)))
    assert module.logs["skipped_steps"] == 1
    assert all(b.isfinite().all() for b in module.buffers())


@pytest.mark.parametrize("average", [SWA, EMA], ids=["swa", "ema"])
@EACH
def test_lightnings_averages_are_of_float32_weights(average, dtype):
    """They read, swap and write the module's parameters; a validation swaps them back."""

    def fit(plugins):
        module, data = Module(), loader(batches())
        trainer_of(plugins, max_epochs=4, callbacks=[average()]).fit(module, data, data)
        return dict(module.state_dict())

    found = fit([MastersPrecision(dtype)])
    if dtype == "fp32":
        assert_same(found, fit([]))
    w = found["net.0.weight"]
    assert (w != w.bfloat16()).float().mean() > 0.9


def test_a_plugin_has_the_settings_of_with_masters_and_is_pickled_for_spawned_processes():
    settings = set(inspect.signature(with_masters).parameters) - {"model", "optimizers"}
    for f in (MastersPrecision, use_masters):
        assert set(inspect.signature(f).parameters) - {"trainer"} == settings | {"scaler"}
    plugin = pickle.loads(pickle.dumps(MastersPrecision("fp16", flat_master=True)))
    assert isinstance(plugin, lightning.pytorch.plugins.Precision)
    assert plugin.setup.policy == Policy(torch.float16, flat_master=True)


def test_accelerates_schedule_waits_for_a_skipped_step_and_its_log_counts_it(recwarn):
    accelerator, logs, net = use_masters(accelerate.Accelerator(cpu=True), "fp16"), [], make_net()
    own = SGD(net.parameters(), lr=0.1)
    model, opt, schedule = accelerator.prepare(net, own, LambdaLR(own, lambda i: 0.5**i))
    tracker = Mock(log=lambda values, **_: logs.append(values))
    tracker.name, accelerator.trackers = "list", [tracker]
    for i, (x, y) in enumerate(batches(2)[:4]):
        accelerator.backward(cross_entropy(model(x), y))
        opt.step()
        schedule.step()
        opt.zero_grad()
        assert opt.step_was_skipped == (i == 2)
        accelerator.log({"loss": 1.0})
    assert schedule.get_last_lr() == [0.1 * 0.5**3]
    assert not [w for w in recwarn if "has been overridden" in str(w.message)]
    found = [(values["loss"], values["loss_scale"], values["skipped_steps"]) for values in logs]
    assert found[1:3] == [(1.0, 65536.0, 0), (1.0, 32768.0, 1)]


def test_accelerate_unscales_the_gradients_of_all_optimizers():
    accelerator = use_masters(accelerate.Accelerator(cpu=True), "fp16")
    nets = [make_net(), make_net()]
    prepared = accelerator.prepare(*nets, *[SGD(net.parameters(), lr=0.1) for net in nets])
    (x, y), *_ = batches()
    for net in nets:
        accelerator.backward(cross_entropy(net(x), y))
    for which in (None, prepared[2:]):
        accelerator.unscale_gradients(which)
        assert all(0 < largest_grad(net) < 3 for net in nets)


def make_model(kind):
    torch.manual_seed(1)
    sizes = dict(vocab_size=19, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    sizes |= dict(intermediate_size=16, max_position_embeddings=16)
    if kind == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def texts(kind):
    """Texts of six words, with a class each, or with the words to come."""
    words = torch.randint(19, (24, 6), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": w, "labels": w[0] % 2 if kind == "bert" else w} for w in words]


def trainer_for(kind, path, model=None, **more):
    """A Trainer for six steps, with a checkpoint and an evaluation after three."""
    args = dict(max_steps=6, save_steps=3, eval_steps=3, logging_steps=3)
    args |= dict.fromkeys(("save_strategy", "eval_strategy", "logging_strategy"), "steps")
    return trainer_on(model or make_model(kind), texts(kind), path, **args | more)


def trained(kind, dtype, path, resume=None, flat=False, **more):
    trainer = trainer_for(kind, path, **more)
    if dtype is not None:
        use_masters(trainer, dtype, flat_master=flat)
    torch.manual_seed(2)  # of dropout
    trainer.train(resume_from_checkpoint=resume)
    losses = [h["eval_loss"] for h in trainer.state.log_history if "eval_loss" in h]
    opt = trainer.optimizer.optimizer
    return ends(trainer.model, opt, {}) | {"losses": losses}, trainer


@pytest.mark.parametrize("kind, flat", [("bert", True), ("llama", False)])
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adafactor"])
def test_the_trainer_trains_and_resumes_a_model_of_transformers(kind, flat, optim, tmp_path):
    """In float32 as a plain one. With a schedule, an evaluation and the best model at the end."""
    more = dict(optim=optim, lr_scheduler_type="cosine", warmup_steps=2)
    more |= dict(gradient_checkpointing=kind == "bert", load_best_model_at_end=True)
    plain, _ = trained(kind, None, tmp_path / "plain", **more)
    assert_same(trained(kind, "fp32", tmp_path / "masters", flat=flat, **more)[0], plain)
    whole, trainer = trained(kind, "bf16", tmp_path, flat=flat, **more)
    resume = str(tmp_path / "checkpoint-3")
    assert_same(trained(kind, "bf16", tmp_path, resume, flat, **more)[0], whole)
    logged = [h for h in trainer.state.log_history if "loss" in h]
    assert [h["skipped_steps"] for h in logged] == [0, 0] and "loss_scale" not in logged[0]


def test_the_trainer_compiles_a_model(tmp_path):
    """Dynamo's copy of a ModelOutput would lose the loss."""
    more = dict(torch_compile=True, torch_compile_backend="eager")
    compiled, _ = trained("llama", "bf16", tmp_path, **more)
    assert_same(compiled, trained("llama", "bf16", tmp_path)[0])


def test_the_trainer_generates_with_one_set_of_copies(tmp_path, monkeypatch):
    """Token by token; without a Trainer's evaluation each token has its own."""
    rounds, count = [], Copies.round
    monkeypatch.setattr(Copies, "round", lambda self: rounds.append(self) or count(self))

    class Generating(transformers.Trainer):
        def prediction_step(self, model, inputs, *_):
            how = dict(max_new_tokens=4, min_new_tokens=4, pad_token_id=0, do_sample=False)
            self.found = self.model.generate(inputs["input_ids"], **how)
            return torch.zeros(()), None, None

    trainer = trainer_for("llama", tmp_path, max_steps=1, save_strategy="no", eval_strategy="no")
    trainer.__class__ = Generating
    use_masters(trainer, "bf16").train()
    model = trainer.model.eval()
    batch = {"input_ids": torch.stack([t["input_ids"] for t in texts("llama")])}
    with torch.no_grad():
        rounds.clear()
        trainer.prediction_step(model, batch, True)
        assert len(rounds) == 1
        found = trainer.found
        Generating.prediction_step(trainer, model, batch)
    assert len(rounds) == 1 + 4 and torch.equal(trainer.found, found)


@pytest.mark.parametrize("base", [torch.bfloat16, torch.float32])
def test_lora_makes_the_adapter_float32_and_leaves_its_base(base, tmp_path):
    def make():
        torch.manual_seed(3)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(make_model("llama").to(base), config)

    model = make()
    whole, _ = trained("llama", "bf16", tmp_path, model=model)
    for p in model.parameters():
        assert p.dtype == (torch.float32 if p.requires_grad else base)
    resume = str(tmp_path / "checkpoint-3")
    assert_same(trained("llama", "bf16", tmp_path, resume, model=make())[0], whole)
    plain = peft.PeftModel.from_pretrained(make_model("llama").to(base), tmp_path / "checkpoint-6")
    states = plain.state_dict().items(), model.state_dict().items()
    assert_same(*({k: v for k, v in state if "lora" in k} for state in states))


def test_each_trial_of_a_search_has_masters(tmp_path):
    """A trial begins with a new model, a new Accelerator and the scale of the first one."""
    trainer = trainer_on(make_model("llama"), texts("llama"), max_steps=4)
    trainer.model_init = lambda *_: make_model("llama")
    scaler = LossScaler(growth_interval=1)
    use_masters(trainer, "fp16", scaler=scaler).train()
    first = trainer.model
    trainer.create_accelerator_and_postprocess()
    trainer.train()
    assert trainer.model is not first and masters_of(trainer.model) is not None
    assert trainer.accelerator.scaler.scales == scaler.scales and len(scaler.scales) == 4


def test_conflicts_are_told(tmp_path, monkeypatch):
    def refuses(match, trainer, *args, **settings):
        with pytest.raises((MixedPrecisionError, TypeError), match=match):
            use_masters(trainer, *(args or ("bf16",)), **settings)

    make = lambda **kw: trainer_for("llama", tmp_path, **kw)  # noqa: E731
    refuses("own mixed precision is on, bf16: leave", make(bf16=True))
    refuses("bf16_full_eval=True would cast", make(bf16_full_eval=True))
    again = use_masters(use_masters(make(), "bf16"), "fp16")
    assert again.accelerator.setup.policy == Policy(torch.float16)
    refuses("'int8'", make(), "int8")
    refuses("flat_matser", make(), flat_matser=True)
    refuses("MastersPrecision", trainer_of([]))
    refuses("with_masters", make_net())
    refuses("`trainer` is a str", "bf16", make())
    trainer = make()
    begin = transformers.TrainerCallback()
    begin.on_train_begin = lambda *_, **__: refuses("has begun", trainer)
    trainer.add_callback(begin)
    trainer.train()
    refuses("has begun", trainer)
    accelerator = use_masters(accelerate.Accelerator(cpu=True), "bf16")
    with pytest.raises(MixedPrecisionError, match=r"prepare\(model, optimizer\)"):
        accelerator.prepare(SGD(make_net().parameters(), lr=0.1))
    monkeypatch.setattr(accelerate.Accelerator, "distributed_type", accelerate.DistributedType.FSDP)
    refuses("does not work under FSDP", make().accelerator)
