"""Others' trainers over `with_masters`: Fabric, Accelerate, Lightning and Hugging Face's Trainer.

The functions of nbs/15_trainers.ipynb in two processes, and what the page only mentions. With
masters in float32 a trainer gives the bits that it gives without them; in 16 bits those of a loop;
a run that was saved and resumed ends in those of an unbroken one.
"""

import copy
import itertools
import os
from functools import partial
from importlib.util import find_spec

import pytest

if not all(map(find_spec, ["accelerate", "lightning", "transformers"])):
    pytest.skip("a trainer is not installed", allow_module_level=True)

import accelerate
import lightning
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import on_ranks
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, SequentialSampler

from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same

TRAINERS = ["with_accelerate", "with_fabric", "with_lightning", "with_trainer"]


# Two processes


def run(name, kit, rank, bad=None, **kwargs):
    """Train by what is called `name`; in step `bad` the last rank alone has an inf."""
    from trainers import page

    data = [page["batches"](bad=bad if r == 1 else None, seed=r) for r in range(2)]
    (model, opt, scaler), mine = kit, data[rank]
    if name == "with_trainer":  # it deals out the batches
        mine = [batch for step in zip(*data, strict=True) for batch in step]
    own = DistributedDataParallel(model) if name == "by_hand" else model
    page[name](own, opt, scaler, mine, **kwargs)
    ends = page["ends"](model, opt)
    return {**ends, "scaler": scaler.state_dict(), "skipped": scaler.skipped}


def work(folder, rank):
    """Return all runs of one of two processes: {(trainer, kind): what it ends in}."""
    from trainers import page

    make, found = page["make"], {}
    env = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2}  # as torchrun has it
    env |= {"LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": 0}
    env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 1}  # not dialled: the group exists
    os.environ |= {k: str(v) for k, v in env.items()}
    for name in ["by_hand", *TRAINERS]:
        for dtype in (None, "fp32", "fp16", "bf16"):
            bad = None if dtype in (None, "fp32") else 4
            found[name, dtype] = run(name, make(dtype), rank, bad)
    for name in TRAINERS:
        file = page["files"](folder)[name]
        run(name, make("fp16"), rank, bad=1, stop=3, save=file)
        found[name, "resumed"] = run(name, make("fp16"), rank, bad=1, resume=file)
    found["by_hand", "resumed"] = run("by_hand", make("fp16"), rank, bad=1)
    return found


def test_two_processes_end_as_a_loop_does(tmp_path):
    """An overflow on one rank is skipped by both, and their models stay equal."""
    done = on_ranks(2, partial(work, str(tmp_path)), tmp_path, ("trainers",))
    for trainer, found in itertools.product(TRAINERS, done):
        for dtype in (None, "fp32", "fp16", "bf16"):
            assert_same(found[trainer, dtype], found["by_hand", dtype])
            assert_same(found[trainer, dtype]["opt"], done[0][trainer, dtype]["opt"])
        assert_same(found[trainer, "fp32"], found["by_hand", None])
        assert found[trainer, "fp16"]["skipped"] == [4]
        assert all(v.isfinite().all() for v in found[trainer, "bf16"]["model"].values())
        resumed, unbroken = found[trainer, "resumed"], found["by_hand", "resumed"]
        assert resumed["skipped"] == [] and unbroken["skipped"] == [1]
        assert_same({**resumed, "skipped": [1]}, unbroken)


# Lightning, with two networks


def layers(*sizes):
    return nn.Sequential(nn.Linear(*sizes[:2]), nn.BatchNorm1d(sizes[1]), nn.Linear(*sizes[1:]))


class Gan(lightning.LightningModule):
    """Generator and critic, which `toggle_optimizer` freezes in turn."""

    def __init__(self, settings):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.nets, self.losses = nn.ModuleList([layers(2, 8, 5), layers(5, 8, 1)]), []
        self.opts = [SGD(net.parameters(), lr=0.1, momentum=0.5) for net in self.nets]
        if settings is not None:
            for net, opt in zip(self.nets, self.opts, strict=True):
                with_masters(net, opt, **settings)

    def configure_optimizers(self):
        return self.opts

    def training_step(self, x, _):
        generator, critic = self.nets
        for opt, target in zip(self.optimizers(), (1.0, 0.0), strict=True):
            self.toggle_optimizer(opt)
            frozen = [not any(p.requires_grad for p in net.parameters()) for net in self.nets]
            assert frozen == [target == 0, target == 1]
            out = critic(generator(x[:, :2]))
            loss = binary_cross_entropy_with_logits(out, torch.full_like(out, target))
            if target == 0:
                out = critic(x)
                loss = loss + binary_cross_entropy_with_logits(out, torch.ones_like(out))
            self.manual_backward(loss)
            opt.step()
            opt.zero_grad()
            self.untoggle_optimizer(opt)
            self.losses.append(loss.detach())


def lit(module, data, path, val=None, epochs=1, resume=None, **settings):
    """Train with Lightning in silence."""
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    common = dict(accelerator="cpu", devices=1, num_sanity_val_steps=0, default_root_dir=str(path))
    trainer = lightning.Trainer(max_epochs=epochs, **quiet, **common, **settings)
    torch.manual_seed(2)
    trainer.fit(module, DataLoader(data, batch_size=4), val, ckpt_path=resume)
    return module


@pytest.mark.parametrize("flat", [False, True])
def test_lightnings_toggle_freezes_what_it_freezes_without_masters(flat, tmp_path):
    """Gradients of the frozen network would add up if an optimizer held other tensors."""
    gans = []
    for settings in (None, dict(dtype="fp32", flat_master=flat), dict(dtype="bf16")):
        x = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
        gans.append(lit(Gan(settings), x, tmp_path, enable_checkpointing=False))
    plain, exact, half = gans
    assert_same(exact.losses, plain.losses)
    assert_same(dict(exact.state_dict()), dict(plain.state_dict()))
    torch.testing.assert_close(half.losses, plain.losses, rtol=0.02, atol=0.02)


class Classifier(lightning.LightningModule):
    """A net whose masters are made in `configure_optimizers`, with a schedule and validation."""

    def __init__(self, settings):
        super().__init__()
        torch.manual_seed(1)
        self.net, self.settings, self.losses = layers(5, 8, 2), settings, []

    def configure_optimizers(self):
        self.opt = AdamW(self.net.parameters(), lr=0.01, weight_decay=0.1)
        if self.settings is not None:
            with_masters(self.net, self.opt, **self.settings)
        return [self.opt], [{"scheduler": StepLR(self.opt, 2, 0.5), "interval": "step"}]

    def training_step(self, batch, _):
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.losses.append(cross_entropy(self.net(batch[0]), batch[1]))


def points(n):
    x = torch.randn(n, 5, generator=torch.Generator().manual_seed(0))
    return [(row, int(row[0] > 0)) for row in x]


def ends(model, opt):
    return copy.deepcopy({"model": dict(model.state_dict()), "opt": opt.state_dict()})


@pytest.mark.parametrize("flat", [False, True])
def test_lightning_with_masters_made_in_configure_optimizers(flat, tmp_path):
    """In float32 it is plain Lightning; a resumed run in bfloat16 ends as the unbroken one."""

    def fit(settings, path, resume=None):
        saves = [ModelCheckpoint(str(tmp_path / path), save_top_k=-1)]
        fast = dict(callbacks=saves, gradient_clip_val=0.5, epochs=2, resume=resume)
        val = DataLoader(points(8), batch_size=8)
        module = lit(Classifier(settings), points(24), tmp_path, val, **fast)
        return ends(module.net, module.opt), module.losses

    settings = dict(flat_master=flat)
    assert_same(fit(settings | dict(dtype="fp32"), "fp32"), fit(None, "plain"))
    whole = fit(settings | dict(dtype="bf16"), "bf16")
    first = str(next((tmp_path / "bf16").glob("epoch=0*.ckpt")))
    resumed = fit(settings | dict(dtype="bf16"), "more", first)
    assert_same(resumed, (whole[0], whole[1][1:]))


# Accelerate, with accumulation and a schedule


def accelerated(settings, path=None, resume=False):
    """Train with Accelerate; write a checkpoint after four of six batches, or begin from it."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(1)
    model = layers(5, 8, 2)
    own = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    if settings is not None:
        with_masters(model, own, **settings)
    dl = DataLoader(points(24), batch_size=4)
    model, opt, dl, schedule = accelerator.prepare(model, own, dl, StepLR(own, 2, 0.5))
    if resume:
        accelerator.load_state(str(path))
    for i, (x, y) in enumerate(dl):
        if resume and i < 4:
            continue
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            schedule.step()
            opt.zero_grad()
        if i == 3 and path is not None:
            accelerator.save_state(str(path))
    assert opt.optimizer is own
    return ends(model, own) | {"lr": schedule.get_last_lr()}


@pytest.mark.parametrize("flat", [False, True])
def test_accelerate_accumulates_and_resumes(flat, tmp_path):
    settings = dict(flat_master=flat)
    assert_same(accelerated(settings | dict(dtype="fp32")), accelerated(None))
    whole = accelerated(settings | dict(dtype="bf16"), tmp_path)
    assert_same(accelerated(settings | dict(dtype="bf16"), tmp_path, resume=True), whole)


# Hugging Face

KIND = pytest.mark.parametrize("kind, flat", [("bert", True), ("llama", False)])


def make_model(kind):
    """Return a model with a few thousand random weights."""
    torch.manual_seed(1)
    sizes = dict(vocab_size=19, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    sizes |= dict(intermediate_size=16, max_position_embeddings=16)
    if kind == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def texts(kind):
    """Return texts of six words, with a class each, or with the words to come."""
    words = torch.randint(19, (24, 6), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": w, "labels": w[0] % 2 if kind == "bert" else w} for w in words]


class Ordered(transformers.Trainer):
    """Takes texts in their order."""

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


def trained(kind, settings, path, resume=None, **more):
    """Train for six steps, with a checkpoint and an evaluation after three."""
    model = make_model(kind)
    opt = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    if settings is not None:
        with_masters(model, opt, **settings)
    args = dict(max_steps=6, save_steps=3, eval_strategy="steps", eval_steps=3, use_cpu=True)
    args |= dict(logging_strategy="no", report_to=[], disable_tqdm=True)
    args = transformers.TrainingArguments(str(path), per_device_train_batch_size=4, **args, **more)
    data = texts(kind)
    trainer = Ordered(model, args, train_dataset=data, eval_dataset=data[:8],
                      optimizers=(opt, None))  # fmt: skip
    torch.manual_seed(2)  # of dropout
    trainer.train(resume_from_checkpoint=resume)
    losses = [h["eval_loss"] for h in trainer.state.log_history if "eval_loss" in h]
    return ends(model, opt) | {"losses": losses}


@KIND
def test_the_trainer_in_float32_is_the_plain_one(kind, flat, tmp_path):
    plain = trained(kind, None, tmp_path / "plain")
    masters = dict(dtype="fp32", flat_master=flat)
    assert_same(trained(kind, masters, tmp_path / "masters"), plain)


@KIND
def test_the_trainer_resumes_and_may_enter_autocast(kind, flat, tmp_path):
    """A second autocast of the same dtype changes nothing."""
    settings = dict(dtype="bf16", flat_master=flat)
    whole = trained(kind, settings, tmp_path)
    resume = str(tmp_path / "checkpoint-3")
    assert_same(trained(kind, settings, tmp_path, resume), whole)
    assert_same(trained(kind, settings, tmp_path / "autocast", bf16=True), whole)


@KIND
def test_save_pretrained_keeps_the_bits_of_the_masters(kind, flat, tmp_path):
    """Inside of `shown` config.json holds float32; outside bfloat16, to which loading rounds."""
    model = make_model(kind)
    opt = AdamW(model.parameters(), lr=0.01)
    with_masters(model, opt, dtype="bf16", flat_master=flat)
    batch = {k: torch.stack([row[k] for row in texts(kind)]) for k in ("input_ids", "labels")}
    model(**batch).loss.backward()
    opt.step()
    with opt.masters.shown():
        model.save_pretrained(tmp_path / "shown")
    model.save_pretrained(tmp_path / "outside")
    exact, rounded = (type(model).from_pretrained(tmp_path / f) for f in ("shown", "outside"))
    assert exact.config.dtype == torch.float32 and rounded.config.dtype == torch.bfloat16
    assert_same(dict(exact.state_dict()), dict(model.state_dict()))
    assert next(model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_an_optimizer_of_the_trainers_own_is_an_error(optim, tmp_path):
    model = make_model("bert")
    with_masters(model, SGD(model.parameters(), 0.1), dtype="bf16")
    args = transformers.TrainingArguments(str(tmp_path), optim=optim, use_cpu=True, report_to=[])
    with pytest.raises(MixedPrecisionError, match="without their masters"):
        transformers.Trainer(model, args, train_dataset=texts("bert")).train()
