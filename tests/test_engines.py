"""Others' training loops over `with_masters`: Hugging Face's Trainer, Lightning's, Accelerate's.

With masters in a float32 model an engine gives the bits that it gives without them; in bfloat16
those of a loop in which float32 masters are kept by hand; a run that was saved and resumed ends in
those of an unbroken one. With AdamW, and with schedule-free's, which trains one set of weights and
evaluates another.
"""

import copy
import os

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, SequentialSampler

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
schedulefree = pytest.importorskip("schedulefree")

from mixedfp.optimizer import with_masters  # noqa: E402
from mixedfp.testing import assert_same  # noqa: E402

FLAT = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
NAMES = ["adamw", "schedule_free"]
OPT = pytest.mark.parametrize("name", NAMES)
MODEL = pytest.mark.parametrize("kind", ["bert", "llama"])
# each model with each optimizer and layout, and each optimizer in each layout
PAIRS = pytest.mark.parametrize(
    "kind, name, flat",
    [
        ("bert", "adamw", False),
        ("bert", "schedule_free", True),
        ("llama", "adamw", True),
        ("llama", "schedule_free", False),
    ],
)


def make_opt(name, params):
    """Return AdamW, torch's or schedule-free's."""
    if name == "adamw":
        return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)
    opt = schedulefree.AdamWScheduleFree(params, lr=0.01, weight_decay=0.1, warmup_steps=2)
    opt.train()  # before masters are laid into vectors: it is tried then
    return opt


def make_model(kind, dropout=0.1):
    """Return a model with a few thousand random weights."""
    torch.manual_seed(1)
    sizes = dict(
        vocab_size=19,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    if kind == "bert":
        config = transformers.BertConfig(
            **sizes,
            num_labels=2,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        return transformers.BertForSequenceClassification(config)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def texts(kind, n=24):
    """Return `n` texts of six words, with a class each, or with the words to come."""
    rng = torch.Generator().manual_seed(0)
    words = torch.randint(19, (n, 6), generator=rng)
    if kind == "bert":
        return [{"input_ids": w, "labels": w[0] % 2} for w in words]
    return [{"input_ids": w, "labels": w} for w in words]


def seen(model, opt):
    """Return copies of weights, buffers and the optimizer's state, as files have them."""
    return copy.deepcopy({"model": dict(model.state_dict()), "opt": opt.state_dict()})


def with_opt(model, name, dtype, flat):
    """Return model and optimizer, plain where `dtype` is None."""
    opt = make_opt(name, model.parameters())
    if dtype is None:  # `flat` says how gradients are clipped, that is all
        return model, opt
    return with_masters(model, opt, dtype=dtype, flat_master=flat, native=True)


# Hugging Face


class Ordered(transformers.Trainer):
    """Takes texts in their order."""

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


def trainer(kind, name, path, dtype, flat=False, bf16=False, simple=False):
    """Return a Trainer of six steps, with a checkpoint and an evaluation after three."""
    model = make_model(kind, dropout=0.0 if simple else 0.1)
    model, opt = with_opt(model, name, dtype, flat)
    args = transformers.TrainingArguments(
        str(path),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        max_steps=6,
        save_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=bf16,
        lr_scheduler_type="constant" if simple else "linear",
    )
    data = texts(kind)
    return Ordered(model, args, train_dataset=data, eval_dataset=data[:8], optimizers=(opt, None))


def run_trainer(*args, resume=None, **kwargs):
    """Return what is seen at the end, and the losses of validation."""
    t = trainer(*args, **kwargs)
    torch.manual_seed(2)  # of dropout
    t.train(resume_from_checkpoint=resume)
    opt = getattr(t.optimizer, "optimizer", t.optimizer)
    losses = [h["eval_loss"] for h in t.state.log_history if "eval_loss" in h]
    return {**seen(t.model, opt), "eval": losses + [t.evaluate()["eval_loss"]]}


@PAIRS
def test_the_trainer_in_float32_is_the_plain_one(kind, name, flat, tmp_path):
    """Weights, optimizer and losses of validation have the plain Trainer's bits."""
    expected = run_trainer(kind, name, tmp_path / "plain", None)
    found = run_trainer(kind, name, tmp_path / "masters", torch.float32, flat)
    assert_same(found, expected)


@PAIRS
def test_the_trainer_goes_on_from_a_checkpoint(kind, name, flat, tmp_path):
    """In bfloat16 a resumed run ends in the bits of an unbroken one."""
    expected = run_trainer(kind, name, tmp_path, torch.bfloat16, flat)
    resume = str(tmp_path / "checkpoint-3")
    found = run_trainer(kind, name, tmp_path, torch.bfloat16, flat, resume=resume)
    assert_same(found, expected)


class ByHand:
    """A bfloat16 model, computed as the library computes it; its float32 masters kept by hand."""

    def __init__(self, model, name):
        self.masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        self.opt = make_opt(name, self.masters)
        unused = torch.optim.SGD(model.parameters())
        self.model, _ = with_masters(model, unused, dtype=torch.bfloat16, native=True)

    def switch(self, training):
        """Put model and optimizer into a mode."""
        self.model.train(training)
        if hasattr(self.opt, "train"):
            self.opt.train() if training else self.opt.eval()
            self.reclaim()

    @torch.no_grad()
    def reclaim(self):
        """Round the masters."""
        for p, m in zip(self.model.parameters(), self.masters, strict=True):
            p.copy_(m)

    def step(self, loss, max_norm=None):
        """Step the masters with the gradients of `loss`, widened."""
        loss.backward()
        for p, m in zip(self.model.parameters(), self.masters, strict=True):
            m.grad = None if p.grad is None else p.grad.float()
            p.grad = None
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.masters, max_norm)
        self.opt.step()
        self.opt.zero_grad()
        self.reclaim()

    def seen(self):
        """Return the masters by name, and the optimizer's state."""
        names = [name for name, _ in self.model.named_parameters()]
        masters = dict(zip(names, self.masters, strict=True))
        return copy.deepcopy({"masters": masters, "opt": self.opt.state_dict()["state"]})


@PAIRS
def test_the_trainer_in_bfloat16_is_a_loop_with_masters(kind, name, flat, tmp_path):
    """Six steps of the Trainer give the bits of a loop by hand."""
    t = trainer(kind, name, tmp_path, torch.bfloat16, flat, simple=True)
    torch.manual_seed(2)
    t.train()
    opt = getattr(t.optimizer, "optimizer", t.optimizer)
    hand = ByHand(make_model(kind, dropout=0.0), name)
    torch.manual_seed(2)
    data = texts(kind)
    for i in range(6):
        hand.switch(True)
        rows = data[4 * i : 4 * i + 4]
        batch = {k: torch.stack([row[k] for row in rows]) for k in rows[0]}
        n = {} if kind == "bert" else {"num_items_in_batch": torch.tensor(4 * 5)}
        hand.step(hand.model(**batch, **n).loss, max_norm=1.0)
        if i == 2:  # it is evaluated and saved: schedule-free goes there and back
            hand.switch(False)
    hand.switch(False)
    expected = hand.seen()
    if hasattr(opt, "eval"):
        opt.eval()
    weights = t.model.state_dict()
    masters = {k: weights[k] for k in expected["masters"]}
    assert_same({"masters": masters, "opt": opt.state_dict()["state"]}, expected)


@MODEL
def test_the_trainer_enters_autocast(kind, tmp_path):
    """`bf16=True` on top of a bfloat16 model trains."""
    found = run_trainer(kind, "adamw", tmp_path, torch.bfloat16, True, bf16=True)
    assert all(v.isfinite().all() for v in found["model"].values())
    assert found["eval"][-1] < found["eval"][0] or kind == "bert"


# Accelerate and Lightning: a small net of one's own


def net():
    """Return a net with a norm."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def points(n=24):
    """Return points of two classes."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=rng)
    return [(a, int(a[0] > 0)) for a in x]


def modes(opt, training):
    """Put an optimizer that has modes into one."""
    if hasattr(opt, "train") and callable(opt.train):
        opt.train() if training else opt.eval()


def accelerated(name, dtype, flat=False, path=None, stop=6, resume=False):
    """Train with Accelerate up to step `stop`, write a checkpoint there or begin from it."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, opt = with_opt(net(), name, dtype, flat)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    dl = DataLoader(points(), batch_size=4)
    model, opt, dl, schedule = accelerator.prepare(model, opt, dl, schedule)
    torch.manual_seed(2)
    start = 0
    if resume:
        accelerator.load_state(str(path))
        start = stop
        stop = 6
    modes(opt, True)
    for i, (x, y) in enumerate(dl):
        if not start <= i < stop:
            continue
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            schedule.step()
            opt.zero_grad()
    if path is not None and not resume:
        accelerator.save_state(str(path))
    modes(opt, False)
    model.eval()
    with torch.no_grad():
        out = model(torch.stack([x for x, _ in points(8)]))
    model.train()
    modes(opt, True)
    return {**seen(model, opt.optimizer), "out": out}


@FLAT
@OPT
def test_accelerate_in_float32_is_the_plain_one(name, flat):
    """Weights, buffers, optimizer and predictions have the bits of Accelerate without masters."""
    assert_same(accelerated(name, torch.float32, flat), accelerated(name, None))


@FLAT
@OPT
def test_accelerate_goes_on_from_a_checkpoint(name, flat, tmp_path):
    """A resumed run in bfloat16 ends in the bits of an unbroken one."""
    expected = accelerated(name, torch.bfloat16, flat)
    accelerated(name, torch.bfloat16, flat, tmp_path / "state", stop=4)
    found = accelerated(name, torch.bfloat16, flat, tmp_path / "state", stop=4, resume=True)
    assert_same(found, expected)


# Lightning


def lightning_module(name, dtype, flat):
    """Return a module that makes its masters with its optimizer."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = net(), []

        def configure_optimizers(self):
            self.net, opt = with_opt(self.net, name, dtype, flat)
            self.opt = opt
            schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
            return [opt], [{"scheduler": schedule, "interval": "step"}]

        def training_step(self, batch, _):
            return cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, _):
            self.losses.append(cross_entropy(self.net(batch[0]), batch[1]))

        def on_train_epoch_start(self):
            modes(self.opt, True)

        def on_validation_model_eval(self):
            modes(self.opt, False)
            self.net.eval()

        def on_validation_model_train(self):
            modes(self.opt, True)
            self.net.train()

        def on_save_checkpoint(self, _):
            modes(self.opt, True)

    return Module()


def lit(name, dtype, flat, path, resume=None):
    """Train with Lightning; there is a checkpoint after the first epoch."""
    import lightning

    module = lightning_module(name, dtype, flat)
    saves = lightning.pytorch.callbacks.ModelCheckpoint(str(path), save_top_k=-1)
    t = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        callbacks=[saves],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        gradient_clip_val=0.5,  # its norm would be summed in another order over flat masters
        gradient_clip_algorithm="value" if flat else "norm",
        default_root_dir=str(path),
    )
    torch.manual_seed(2)
    dl = DataLoader(points(), batch_size=4)
    t.fit(module, dl, DataLoader(points(8), batch_size=8), ckpt_path=resume)
    return {**seen(module.net, module.opt), "losses": module.losses}


@pytest.mark.parametrize("name, flat", [("adamw", True), ("schedule_free", False)])
def test_lightning_in_float32_is_the_plain_one(name, flat, tmp_path):
    """Weights, buffers, optimizer and losses of validation have the plain Trainer's bits."""
    pytest.importorskip("lightning")
    expected = lit(name, None, flat, tmp_path / "plain")
    assert_same(lit(name, torch.float32, flat, tmp_path / "masters"), expected)


@pytest.mark.parametrize("name, flat", [("adamw", False), ("schedule_free", True)])
def test_lightning_goes_on_from_a_checkpoint(name, flat, tmp_path):
    """A resumed run in bfloat16 ends in the bits of an unbroken one."""
    pytest.importorskip("lightning")
    expected = lit(name, torch.bfloat16, flat, tmp_path)
    first = sorted(tmp_path.glob("epoch=0*.ckpt"))[0]
    torch.manual_seed(2)
    found = lit(name, torch.bfloat16, flat, tmp_path / "more", resume=str(first))
    assert_same(found["losses"], expected["losses"][1:])
    assert_same({k: found[k] for k in ("model", "opt")}, {k: expected[k] for k in ("model", "opt")})
