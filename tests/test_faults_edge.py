"""The edge of a 16-bit model: what goes in and comes out, what tools see, where autocast is.


Models with a `with_masters` optimizer, unless the test says otherwise. Oracles: the model's own
forward pass, the same float32 model, and the same call made twice.
"""

import copy
import inspect
import logging
from collections import namedtuple
from dataclasses import dataclass
from types import MethodType

import inside
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

from mixedfp.optimizer import MasterOptimizer, with_masters
from mixedfp.step import MixedStep
from mixedfp.testing import assert_same

FULL, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
both = pytest.mark.parametrize("dtype", [HALF, BF16], ids=["fp16", "bf16"])
no_fp16 = pytest.mark.skipif(
    inside.has_arithmetic("cpu", HALF), reason="this CPU computes fp16 itself"
)


def half(model, dtype=BF16, **kwargs):
    """Return the seeded `model` in `dtype`, and its optimizer."""
    return with_masters(model, optim.SGD(model.parameters(), lr=0.1), dtype=dtype, **kwargs)


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make()


class Plain(nn.Module):
    """Has names and defaults to be seen."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, scale=1.0, *more, flag: bool = False, **others):
        """Compute the logits."""
        return self.head(self.body(x).relu()) * scale


class Positions(nn.Module):
    """Makes 32-bit numbers, has statistics that move and units that drop."""

    def __init__(self, late=False):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.body, self.layer_norm, self.out = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.late, self.n_calls, self.hidden = late, 0, torch.zeros(())

    def forward(self, x):
        self.n_calls += 1
        self.hidden = self.hidden + 1
        h = self.body(self.drop(self.norm(x)))
        if not self.late or self.n_calls > 3:
            h = self.layer_norm(h + torch.sin(torch.arange(8.0)))
        return self.out(h)


class Attends(nn.Module):
    """Attention of one head."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 2)

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))


X, Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(3)), torch.arange(16) % 3


# 3.16: 32-bit tensors go in, 32-bit tensors come out


@both
@pytest.mark.parametrize("kind", ["with_masters", "MasterOptimizer", "MixedStep"])
def test_3_16_a_model_is_called_as_before(dtype, kind):
    model = seeded(Plain)
    if kind == "with_masters":
        half(model, dtype)
    elif kind == "MasterOptimizer":
        model.to(dtype)
        MasterOptimizer(optim.SGD(model.parameters(), lr=0.1), model=model)
    else:
        MixedStep(dtype).attach(model)
    x = X.clone().requires_grad_()
    out = model(x)
    F.cross_entropy(out, Y).backward()
    assert out.dtype == x.grad.dtype == FULL and model.body.weight.dtype == dtype
    assert_same(model(X.to(dtype)), out)  # a loop that casts by hand
    assert_same(model(X.double()), out)


def test_3_16_skorch():
    skorch = pytest.importorskip("skorch")
    from mixedfp.skorch import MixedPrecisionMixin

    class Net(MixedPrecisionMixin, skorch.NeuralNetClassifier):
        pass

    settings = dict(amp_enabled=True, amp_mode="master", amp_dtype=BF16, max_epochs=1, verbose=0)
    net = Net(Plain, criterion=nn.CrossEntropyLoss, train_split=None, **settings)
    net.fit(X.numpy(), Y.numpy())
    assert net.module_(X).dtype == FULL and inside.has_half_forward(net.module_)
    net.set_params(amp_enabled=False)
    assert "forward" not in vars(net.module_)


@both
def test_3_16_a_learner(dtype):
    from tiny import make_learner, silent

    learn = make_learner().to_fp16(dtype=dtype)
    x, _ = learn.dls.one_batch()
    with silent(learn):
        learn.model.eval()(x).detach().numpy()
        learn.fit(1, 0.0)
    assert learn.model(x).dtype == FULL
    learn.to_fp32()
    assert "forward" not in vars(learn.model)


def test_3_16_in_float32_nothing_is_installed():
    model, _ = half(seeded(Plain), FULL)
    assert "forward" not in vars(model)
    step = MixedStep(FULL)
    step.attach(model := seeded(Plain))
    assert "forward" not in vars(model)


def test_3_16_modules_in_a_container():
    parts = nn.ModuleList([nn.Linear(4, 4), nn.ModuleDict({"b": nn.Linear(4, 2)})])
    _, opt = half(parts)
    out = parts[1]["b"](parts[0](X))
    assert out.dtype == FULL
    copied = copy.deepcopy(parts)
    assert copied[1]["b"](copied[0](X)).dtype == FULL  # a copy is in 32 bits, without casts
    opt.restore()
    assert not any("forward" in vars(m) for p in (parts, copied) for m in p.modules())


Pair = namedtuple("Pair", "logits text")


@dataclass
class Output:
    logits: torch.Tensor
    cache: object
    ids: torch.Tensor


@both
def test_3_16_outputs_keep_type_and_identity(dtype):
    cache, ids = object(), torch.arange(3)

    class Nested(Plain):
        def forward(self, x):
            y = super().forward(x)
            return Output(y, cache, ids), Pair(y, "text"), {"a": [y, None]}, "name"

    model, _ = half(seeded(Nested), dtype)
    output, pair, nested, name = model(X)
    assert type(output) is Output and output.cache is cache and output.ids is ids
    assert type(pair) is Pair and pair.text == name[:0] + "text" and nested["a"][1] is None
    assert {t.dtype for t in (output.logits, pair.logits, nested["a"][0])} == {FULL}
    for returned in (None, "text", 3):
        model.forward = inside.half_forward(Returns(returned).to(dtype), dtype)
        assert model(X) is returned


class Returns(nn.Module):
    def __init__(self, returned):
        super().__init__()
        self.returned, self.linear = returned, nn.Linear(1, 1)

    def forward(self, x):
        return self.returned


def test_3_16_targets_of_a_loss_inside_are_not_rounded():
    """Hugging Face's models compute their loss; what is named labels is a target."""

    class Regression(Plain):
        def forward(self, x, labels=None):
            y = super().forward(x)
            return F.mse_loss(y, labels), y

    model, _ = half(seeded(Regression))
    labels = torch.full((16, 3), 1 + 2**-12)
    loss, y = model(X, labels=labels)
    assert_same(loss, F.mse_loss(y, labels))
    loss.backward()


def test_4_xb_is_in_32_bits_for_later_callbacks():
    from fastai.callback.core import Callback
    from tiny import make_learner, silent

    class Look(Callback):
        order = 20
        seen = set()

        def after_pred(self):
            self.seen.add((self.xb[0].dtype, self.pred.dtype))
            self.xb[0].numpy()

    learn = make_learner().to_bf16()
    with silent(learn):
        learn.fit(1, cbs=Look())
    assert Look.seen == {(FULL, FULL)}


# 3.1: what tools see


@both
def test_3_01_the_signature_is_the_models(dtype):
    own = seeded(Plain)
    model, opt = half(seeded(Plain), dtype)
    assert inspect.signature(model.forward) == inspect.signature(own.forward)
    shown = inspect.getfullargspec(model.forward)
    assert shown.args == ["x", "scale"] and shown.varargs == "more" and shown.varkw == "others"
    assert model.forward.__code__ is own.forward.__code__
    assert model.forward.__name__ == "forward" and model.forward.__self__ is model
    assert inspect.unwrap(model.forward) == Plain.forward.__get__(model)
    opt.restore()
    assert "forward" not in vars(model)


def test_3_01_a_forward_of_the_instance_stays():
    model = seeded(Plain)
    model.forward = own = lambda x, more=2: Plain.forward(model, x) * more
    _, opt = half(model)
    assert inspect.signature(model.forward) == inspect.signature(own)
    assert model(X).dtype == FULL
    opt.restore()
    assert model.forward is own


def test_3_01_it_can_be_bound_anew_as_accelerate_does():
    """The function is taken out of the method, wrapped and bound to the model."""
    model, _ = half(seeded(Plain))
    expected, signature = model(X), inspect.signature(model.forward)
    function = model.forward.__func__
    model.forward = MethodType(function, model)
    assert inspect.signature(model.forward) == signature
    assert_same(model(X), expected)


def test_3_01_bound_to_a_copy_it_computes_with_the_copy():
    model, _ = half(seeded(Plain))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.forward = MethodType(model.forward.__func__, other)
    assert not other(X).any() and model(X).any()


@both
@pytest.mark.parametrize("make", [Plain, Positions])
def test_3_01_export_and_trace(make, dtype):
    model, _ = half(seeded(make), dtype)
    model.eval()
    exported = torch.export.export(model, (X,)).module()
    expected = model(X)
    torch.testing.assert_close(exported(X), expected, rtol=2**-7, atol=2**-7)
    assert exported(X).dtype == FULL
    traced = torch.jit.trace(model, X)
    assert_same(traced(X), expected)


@both
def test_3_01_the_twin_is_scripted(dtype):
    """`torch.jit.script` reads source code, and the forward pass of the model in use has none."""
    model, opt = half(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), dtype)
    with pytest.raises(TypeError, match="was expected"):
        torch.jit.script(model)
    twin = opt.float_model().eval()
    assert_same(torch.jit.script(twin)(X), twin(X))


@both
def test_3_01_compiled_it_is_one_graph(dtype):
    model, opt = half(seeded(Positions), dtype)
    model.eval()
    expected = model(X)
    fast = torch.compile(model, backend="eager", fullgraph=dtype == BF16)
    assert_same(fast(X), expected)
    again, _ = half(seeded(Positions), dtype)  # nobody has called it before
    assert_same(torch.compile(again.eval(), backend="eager", fullgraph=dtype == BF16)(X), expected)


# 3.15: models that make 32-bit tensors


@pytest.fixture
def notices(caplog):
    inside.forget_notices()
    caplog.set_level(logging.WARNING, "mixedfp")
    return caplog


@both
def test_3_15_they_train_and_the_notice_names_the_layer(dtype, notices):
    model, opt = half(seeded(Positions), dtype)
    losses = []
    for _ in range(30):
        opt.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert min(losses[-5:]) < losses[0]
    texts = [r.getMessage() for r in notices.records if "autocast" in r.getMessage()]
    assert len(texts) == 1 and "in `layer_norm` (LayerNorm)" in texts[0]
    assert not torch.is_autocast_enabled("cpu")


@both
@pytest.mark.parametrize("late", [False, True], ids=["at_once", "later"])
def test_3_15_the_batch_runs_again_as_if_for_the_first_time(dtype, late):
    """Random numbers, statistics; the first time attributes as well."""
    model, _ = half(seeded(lambda: Positions(late)), dtype)
    torch.manual_seed(5)
    for i in range(1, 6):
        before, state = copy.deepcopy(model.norm.state_dict()), torch.get_rng_state()
        out = model(X)
        after, end = copy.deepcopy(model.norm.state_dict()), torch.get_rng_state()
        assert after["num_batches_tracked"] == i
        plain = nn.BatchNorm1d(4)
        plain.load_state_dict(before)
        plain(X.to(dtype).float())
        assert_same(after["running_mean"], plain.running_mean)
        if not late:
            assert model.n_calls == i and model.hidden == i
        model.norm.load_state_dict(before)  # under autocast by now, or not yet, as before
        torch.set_rng_state(state)
        model.n_calls -= 1
        model.hidden -= 1
        assert_same(model(X), out)
        assert_same(torch.get_rng_state(), end)


def test_3_15_models_that_need_no_autocast_never_enter_it():
    class Looks(Plain):
        seen = set()

        def forward(self, x):
            self.seen.add(torch.is_autocast_enabled("cpu"))
            return super().forward(x)

    model, _ = half(seeded(Looks))
    for _ in range(3):
        model(X)
    assert Looks.seen == {False}


@both
def test_3_15_an_error_of_another_kind_is_itself(dtype):
    class Fails(Plain):
        n = 0

        def forward(self, x):
            self.n += 1
            raise RuntimeError("nothing to do with it")

    model, _ = half(seeded(Fails), dtype)
    with pytest.raises(RuntimeError, match="nothing to do with it"):
        model(X)
    assert model.n == 1

    class Types(Fails):
        def forward(self, x):
            super_error = "of this type there is no help"
            raise RuntimeError(super_error)

    model, _ = half(seeded(Types), dtype)
    with pytest.raises(RuntimeError, match="of this type there is no help"):
        model(X)
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
@both
def test_3_15_recurrent_layers(make, dtype, monkeypatch):
    """Where oneDNN has no bfloat16, PyTorch refuses an LSTM under autocast: it is in float32."""
    inside.is_native(monkeypatch, bfloat16=inside.has_arithmetic("cpu", BF16))

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = make(4, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x):
            return self.out(self.rnn(x + torch.arange(4.0))[0][:, -1])

    model, _ = half(seeded(Recurrent), dtype)
    model(X[:, None]).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_3_15_what_has_no_kernel_in_16_bits_is_computed_in_float32():
    """So oneDNN says of an LSTM in float16 that is trained, on a CPU that multiplies float16."""

    @torch.overrides.wrap_torch_function(lambda x: (x,))
    def lstm(x):
        if x.dtype == HALF:
            raise RuntimeError("could not create a primitive descriptor for the LSTM forward pass")
        return x + 1

    def wrong(x):
        raise RuntimeError("could not allocate memory")

    with inside.PromoteMixed():
        assert_same(lstm(torch.ones(2, dtype=HALF)), torch.full((2,), 2.0))
        assert lstm(torch.ones(2, dtype=BF16)).dtype == BF16
        with pytest.raises(RuntimeError, match="could not allocate"):
            torch.overrides.wrap_torch_function(lambda x: (x,))(wrong)(torch.ones(2, dtype=HALF))


@no_fp16
def test_3_15_float16_on_a_cpu_is_as_strict_as_a_gpu():
    x, w = torch.randn(2, 4), torch.randn(4, 4).half()
    cases = {
        "linear": lambda a, b: F.linear(a, b, b[0]),
        "matmul": torch.matmul,
        "conv": lambda a, b: F.conv1d(a[None], b[:, :2, None], b[:, 0]),
        "attention": lambda a, b: F.scaled_dot_product_attention(a[None], b[None], b[None]),
        "bmm": lambda a, b: torch.bmm(a[None], b[None]),
    }
    for name, f in cases.items():
        with pytest.raises(RuntimeError) as native:
            f(x, w)
        with pytest.raises(RuntimeError) as ours, inside.ComputeInFloat32():
            f(x, w)
        assert str(ours.value) == str(native.value), name
    with inside.ComputeInFloat32():
        mask = torch.zeros(4, 4)  # attention takes a mask in 32 bits
        out = F.scaled_dot_product_attention(w[None], w[None], w[None], attn_mask=mask)
    wide = w[None].float()
    assert_same(out, F.scaled_dot_product_attention(wide, wide, wide, attn_mask=mask).half())


# 3.3: under an autocast of somebody else


@pytest.mark.parametrize("inner, outer", [(BF16, BF16), (HALF, HALF), (HALF, BF16)], ids=str)
def test_3_03_attention_under_an_outer_autocast(inner, outer):
    model, opt = half(seeded(Attends), inner)
    x = torch.randn(2, 5, 8)
    with torch.autocast("cpu", outer):
        loss = model(x).float().square().mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    opt.step()
    exact = seeded(Attends)(x).square().mean()
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0)


# 2.16: a softmax, a sigmoid or a loss at the end


ENDS = {
    "module": lambda: nn.Sequential(nn.Linear(4, 100), nn.Softmax(-1)),
    "function": lambda: Ends(lambda y: F.softmax(y, -1)),
    "method": lambda: Ends(lambda y: y.softmax(-1)[:, None].squeeze(1)),
    "log": lambda: Ends(lambda y: F.log_softmax(y, -1).exp()),
}


class Ends(nn.Module):
    """A layer, and an end."""

    def __init__(self, end):
        super().__init__()
        self.linear, self.end = nn.Linear(4, 100), end

    def forward(self, x):
        return self.end(self.linear(x))


@both
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("is_first", ["train", "no_grad"])
def test_2_16_predictions_are_probabilities(end, dtype, is_first):
    model, _ = half(seeded(ENDS[end]), dtype)
    if is_first == "no_grad":
        model.eval()
        with torch.no_grad():
            first = model(X)
    else:
        first = model(X)
        first.sum().backward()
    assert (first.float().sum(-1) - 1).abs().max() < 2e-6
    with torch.no_grad():
        assert_same(model.eval()(X), first.detach())


@both
def test_2_16_a_model_that_ends_in_softmax_only_where_it_predicts(dtype):
    """What training has shown of a model says nothing of its evaluation."""

    class Predicts(Ends):
        def forward(self, x):
            return self.linear(x) if self.training else super().forward(x)

    model, _ = half(seeded(lambda: Predicts(nn.Softmax(-1))), dtype)
    logits = model(X).detach()
    with torch.no_grad():
        assert_same(model.eval()(X), logits.softmax(-1))


@both
def test_2_16_a_sigmoid_does_not_become_1(dtype):
    model, _ = half(seeded(lambda: Ends(lambda y: torch.sigmoid(y[:, :1]))), dtype)
    with torch.no_grad():
        model.linear.weight.zero_(), model.linear.bias.fill_(10.0)
    p = model(X)
    assert (p < 1).all()
    assert_same(p, torch.sigmoid(torch.full((16, 1), 10.0)))


@both
def test_2_16_a_loss_inside_is_computed_in_32_bits(dtype):
    class WithLoss(Ends):
        def forward(self, x, y):
            logits = super().forward(x)
            return {"loss": F.cross_entropy(logits, y), "logits": logits}

    model, _ = half(seeded(lambda: WithLoss(nn.Identity())), dtype)
    out = model(X, Y)
    assert_same(out["loss"], F.cross_entropy(out["logits"].float(), Y))


def test_2_16_a_softmax_in_the_middle_is_not_the_end():
    class Middle(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.b(self.a(x).softmax(-1))

    model, _ = half(seeded(Middle))
    model(X)
    assert inside.forward_needs(model) == [None]


def test_2_16_skorchs_own_idiom():
    skorch = pytest.importorskip("skorch")
    from sklearn.model_selection import cross_val_score

    from mixedfp.skorch import MixedPrecisionMixin

    class Net(MixedPrecisionMixin, skorch.NeuralNetClassifier):
        pass

    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)).astype("float32")
    y = x[:, :3].argmax(1)
    common = dict(max_epochs=2, verbose=0, amp_enabled=True, amp_dtype=BF16)
    for mode in ("master", "autocast"):
        torch.manual_seed(0)
        net = Net(ENDS["module"]().__class__, **common, amp_mode=mode)
        net.set_params(module=ThreeProbabilities)
        scores = cross_val_score(net, x, y, cv=2, scoring="roc_auc_ovr", error_score="raise")
        assert np.isfinite(scores).all()
        p = net.fit(x, y).predict_proba(x)
        assert np.abs(p.sum(1) - 1).max() < 1e-6


class ThreeProbabilities(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 3), nn.Softmax(-1))


# what else is done with models


@both
def test_5_functional_calls_vmap_jvp_and_checkpoints(dtype):
    model, _ = half(seeded(Plain), dtype)
    expected = model(X)
    assert_same(torch.func.functional_call(model, dict(model.named_parameters()), (X,)), expected)
    each = torch.func.vmap(model)(X)
    torch.testing.assert_close(each, expected, rtol=2**-6, atol=2**-6)
    out, tangent = torch.func.jvp(model, (X,), (torch.ones_like(X),))
    assert out.dtype == tangent.dtype == FULL

    class Checkpointed(Plain):
        def forward(self, x):
            return self.head(checkpoint(self.body, x, use_reentrant=False).relu())

    model, _ = half(seeded(Checkpointed), dtype)
    assert_same(model(X), expected)
    model(X).sum().backward()
    assert model.body.weight.grad is not None


def test_5_hooks_on_the_model_see_what_its_caller_sees():
    model, _ = half(seeded(Plain))
    seen = []
    model.register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype)))
    model.head.register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype)))
    model(X)
    assert seen == [(BF16, BF16), (FULL, FULL)]


def test_5_wrapped_models_inside_each_other():
    inner, _ = half(seeded(Plain))
    outer = nn.Sequential(inner, nn.Linear(3, 2))
    _, opt = with_masters(outer[1], optim.SGD(outer[1].parameters(), lr=0.1), dtype=BF16)
    out = outer(X)
    out.sum().backward()
    assert out.dtype == FULL and inner.body.weight.grad is not None


def test_5_an_output_may_be_written_into():
    model, _ = half(seeded(Plain))
    out = model(X)
    out.mul_(2).sum().backward()
    x = X.clone()
    model(x)
    assert_same(x, X)
