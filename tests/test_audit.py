"""`precision_audit` on runs that lose updates and on runs that do not, ours and others'."""

import pytest
import torch
from tiny import make_learner
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import mixedfp.callback  # noqa: F401, puts `precision_audit` on Learners
from mixedfp import precision_audit
from mixedfp.engine.flat import Shadow
from mixedfp.optimizer import with_masters


def make_model(dtype=torch.float32):
    layers = nn.Linear(32, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10)
    return nn.Sequential(*layers).to(dtype)


def train(model, opt, n=3, autocast=False):
    """Take steps; the last gradients stay."""
    for _ in range(n):
        opt.zero_grad()
        x = torch.randn(16, 32, dtype=next(model.parameters()).dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x)
        out.float().square().mean().backward()
        opt.step()


def percent_of(audit):
    return float(audit.verdicts[0].split(": ")[1].split(" %")[0])


OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, 1e-4, weight_decay=0),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, 1e-4, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, 1e-2, momentum=0.9),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 1e-4),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, 1e-3),
}


def make(dtype=torch.bfloat16, name="adamw"):
    model = make_model(dtype)
    return model, OPTIMIZERS[name](model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_share_of_lost_updates_is_that_of_weights_that_do_not_move(name):
    """Counted on float32 copies, and again by making the step in bfloat16."""
    model, opt = make(name=name)
    train(model, opt)
    audit, before = precision_audit(model, opt), [p.detach().clone() for p in model.parameters()]
    opt.step()
    pairs = list(zip(before, model.parameters(), strict=True))
    still = sum(int(((p == q) & (q.grad != 0)).sum()) for p, q in pairs)
    n = sum(int((q.grad != 0).sum()) for _, q in pairs)
    assert percent_of(audit) == pytest.approx(100 * still / n, abs=5)
    assert audit.lost == pytest.approx(still / n, abs=0.05)


def test_settings_of_all_groups_are_copied_once(monkeypatch):
    """Not for each parameter: with a group for each, an audit would take quadratic time."""
    model, copied, refresh = make_model(torch.bfloat16), [], Shadow.refresh
    monkeypatch.setattr(Shadow, "refresh", lambda self: copied.append(1) or refresh(self))
    groups = [dict(params=[p], lr=1e-4 * 4**i) for i, p in enumerate(model.parameters())]
    audit = precision_audit(model, torch.optim.AdamW(groups, weight_decay=0))
    assert len(groups) > 2 and len(copied) == 1
    shares = audit.table["lost updates %"]
    assert shares.iloc[0] > shares.iloc[-1]  # each group keeps its rate


class Slower(torch.optim.SGD):
    """Counts its steps outside of `state`, and slows down."""

    n_steps = 0

    def step(self):
        self.n_steps += 1
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad * self.param_groups[0]["lr"] / 2.0 ** (self.n_steps - 1))


def test_each_parameter_is_stepped_from_the_same_state_of_the_optimizer():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(20))).bfloat16()
    for p in model.parameters():
        p.data.fill_(1.0)
        p.grad = torch.ones_like(p)
    assert percent_of(precision_audit(model, Slower(model.parameters(), lr=2.0**-6))) == 0


def test_the_first_step_of_adam_is_known_and_that_of_sgd_is_not():
    assert 60 < percent_of(precision_audit(*make())) < 100
    assert precision_audit(*make(name="sgd")).verdicts == ["SGD steps 2,890 bfloat16 weights"]


HELD = {  # settings: bytes of gradients and of states, a parameter
    "float32": (None, 4, 8),
    "autocast": (None, 4, 8),
    "per parameter": ({}, 4, 8),
    "flat": (dict(flat_master=True), 4, 8),
    "half gradients": (dict(flat_master=True, half_grads=True), 2, 8),
    "16-bit state": (dict(flat_master=True, state_dtype={"exp_avg": torch.bfloat16}), 4, 6),
}


@pytest.mark.parametrize("name", HELD)
def test_float32_weights_are_fine_with_and_without_copies(name):
    settings, gradients, states = HELD[name]
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = OPTIMIZERS["adamw"](model.parameters())
    if settings is not None:
        with_masters(model, opt, dtype="bf16", **settings)
    train(model, opt, 1, autocast=name == "autocast")
    opt.zero_grad()
    audit = precision_audit(model, opt)
    assert audit.is_fine and audit.facts == ["AdamW steps float32 weights: no update is lost"]
    assert audit.bytes_per_parameter() == dict(weights=4, gradients=gradients, states=states)


def test_masters_that_are_kept_by_hand_and_states_that_make_up_for_rounding_are_fine():
    model, opt = make()
    copies = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    audit = precision_audit(model, torch.optim.AdamW(copies))
    assert audit.is_fine and audit.facts == ["AdamW steps float32 copies: no update is lost"]
    assert audit.bytes_per_parameter()["masters"] == 4
    train(model, opt, 1)
    for state in opt.state.values():
        state |= dict(kahan_comp=torch.zeros(()), exp_avg_sq=state["exp_avg_sq"].float())
    assert precision_audit(model, opt).is_fine


@pytest.mark.parametrize("is_float", [False, True])
def test_adapters_in_bfloat16_are_found_over_a_frozen_model(is_float):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4)
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.model.rotary_emb.float()
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=is_float)
    trained = [p for p in model.parameters() if p.requires_grad]
    audit = precision_audit(model, torch.optim.AdamW(trained, 1e-4))
    assert audit.is_fine == is_float and audit.bytes_per_parameter()["gradients"] < 1
    if not is_float:
        assert "bfloat16 weights" in audit.verdicts[0] and "requires_grad" in audit.fixes[0]


def test_a_sharded_model_in_bfloat16_is_found(alone):
    bare = fully_shard(make_model(torch.bfloat16))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for model in (bare, fully_shard(make_model(), mp_policy=policy)):
        opt = OPTIMIZERS["adamw"](model.parameters())
        train(model, opt)
        assert precision_audit(model, opt).is_fine == (model is not bare)
    audit = precision_audit(bare, torch.optim.AdamW(bare.parameters(), 1e-4))
    assert percent_of(audit) > 50 and audit.fixes[0].startswith("fully_shard(")


WRAPPED = {
    "accelerate": lambda found, opt: found.Accelerator(cpu=True).prepare(opt),
    "lightning.pytorch.core.optimizer": lambda found, opt: found.LightningOptimizer(opt),
}


@pytest.mark.parametrize("package", WRAPPED)
def test_the_optimizers_of_a_trainer_are_unwrapped(package):
    model, opt = make()
    audit = precision_audit(model, WRAPPED[package](pytest.importorskip(package), opt))
    assert percent_of(audit) > 50 and audit.verdicts[0].startswith("AdamW steps")
    with pytest.raises(TypeError, match="optimizer, got a list"):
        precision_audit(model, [opt])


def test_rounded_frequencies_and_forgotten_parameters_are_found():
    model = make_model()
    model.register_buffer("inv_freq", torch.ones(4, dtype=torch.bfloat16))
    audit = precision_audit(model, torch.optim.SGD(model[0].parameters(), 0.1))
    assert [v.split(" ")[0] for v in audit.verdicts] == ["`inv_freq`", "4"]
    assert "1.weight, 1.bias, 3.weight, …" in audit.verdicts[1]


def test_a_learner_has_an_audit():
    learn = make_learner()
    assert not learn.precision_audit().verdicts  # no optimizer yet
    learn.to_bf16().fit(1)
    assert learn.precision_audit().facts == ["Optimizer steps float32 weights: no update is lost"]
