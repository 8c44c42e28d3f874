"""Passes over 16-bit copies: modules that nest, fail, write, look up, are copied or exported.

Oracles: the same model in float32, the same pass without the tool, and sums that are exact.
"""

import copy
import gc
import time
import types
import weakref
from collections import OrderedDict
from functools import partial
from multiprocessing.pool import ThreadPool

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from mixedfp.engine.forward import computing
from mixedfp.engine.rounded import Copies
from mixedfp.formats import MixedPrecisionError
from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same

FULL, BF16 = torch.float32, torch.bfloat16
flats = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
both = pytest.mark.parametrize("dtype", ["bf16", "fp16"])
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(3))


def mixed(model, dtype="bf16", lr=0.1, **settings):
    return with_masters(model, torch.optim.SGD(model.parameters(), lr), dtype=dtype, **settings)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


def pair(make, *args, **settings):
    """Return a float32 model, the same in mixed precision, and its optimizer."""
    torch.manual_seed(0)
    model = make(*args)
    return copy.deepcopy(model), *mixed(model, **settings)


def grads(model):
    return [p.grad for p in model.parameters()]


def is_clean(model):
    parts = [t for m in model.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)]
    modes = torch.overrides._get_current_function_mode_stack()
    is_off = not (modes or torch.is_autocast_enabled("cpu"))
    return is_off and all(t.dtype == FULL for t in parts)


def assert_close(a, b, tol=0.03):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def assert_trains_alike(full, half, *_):
    """The outputs and gradients of `half` are those of `full`, up to rounding."""
    a, b = full(X), half(X)
    assert b.dtype == FULL
    assert_close(a, b)
    a.square().mean().backward(), b.square().mean().backward()
    for p, q in zip(full.parameters(), half.parameters(), strict=True):
        assert p.grad is not None and q.grad.dtype == FULL
        assert_close(p.grad, q.grad)
    assert is_clean(half)


@pytest.fixture
def n_rounded(monkeypatch):
    """The number of times that copies are made."""
    calls, own = [], Copies.round
    monkeypatch.setattr(Copies, "round", lambda self: calls.append(1) or own(self))
    return lambda: len(calls)


# Modules that write their weights in a pass: bounds of .125, which 16 bits hold


def limit_(w):
    with torch.no_grad():
        w.clamp_(-0.125, 0.125)


def limit_data(w, bound=0.125):
    w.data.clamp_(-bound, bound)


def limit_own(module, _, bound=0.125):
    limit_data(module.weight, bound)


def limit_child(module, _, bound=0.125):
    module.linear.weight.data.clamp_(-bound, bound)


elsewhere = types.ModuleType("elsewhere")
exec("def limit(w):\n    w.data.clamp_(-0.125, 0.125)", vars(elsewhere))


def parent(kind=nn.Sequential):
    """Return a module whose only part is a layer, `linear`."""
    return kind(OrderedDict(linear=nn.Linear(4, 4)))


OWN = """
with torch.no_grad(): self.weight.clamp_(-0.125, 0.125)
with torch.no_grad(): self.weight[self.weight > 0.125] = 0.125
with torch.no_grad(): self.weight *= 0.5
with torch.no_grad(): torch.clamp(self.weight, -0.125, 0.125, out=self.weight)
self.weight.data.clamp_(-0.125, 0.125)
self.weight.data = self.weight.data.clamp(-0.125, 0.125)
self.weight.detach().clamp_(-0.125, 0.125)
self.weight = nn.Parameter(self.weight.detach().clamp(-0.125, 0.125))
limit_(self.weight)
limit_data(self.weight)
elsewhere.limit(self.weight)
nn.init.constant_(self.weight, 0.125)
for p in self.parameters(): p.data.clamp_(-0.125, 0.125)
for name in ("weight", "bias"): limit_data(getattr(self, name))
"""
OF_CHILD = """
with torch.no_grad(): self.linear.weight.mul_(0.5)
self.linear.weight.data.clamp_(-0.125, 0.125)
limit_data(self.linear.weight)
for m in self.children(): limit_data(m.weight)
for p in self.parameters(): limit_(p)
self.apply(lambda m: limit_data(m.weight) if hasattr(m, "weight") else None)
"""


def subclass(base, code):
    """Return a user's subclass of `base`, with the methods in `code`."""
    found = {}
    exec(code, globals() | {"base": base}, found)
    return type("Own", (base,), {"__module__": __name__, **found})


def assert_writes_alike(full, half, opt):
    for _ in range(2):
        assert_close(full(X), half(X), 0.01)
        assert_close(list(half.parameters()), list(full.parameters()), 2**-9)
    assert all(p.dtype == FULL for p in half.parameters())
    half(X).sum().backward()
    opt.step()
    assert all(p.grad is not None for p in half.parameters())


@flats
@pytest.mark.parametrize("code", [*OWN.strip().split("\n"), *OF_CHILD.strip().split("\n")])
def test_a_module_that_writes_weights_in_its_pass(code, flat):
    methods = f"def write(self):\n    {code}\n"
    methods += "def forward(self, x):\n    self.write()\n    return base.forward(self, x)"

    def make():
        if code in OF_CHILD:
            return nn.Sequential(parent(subclass(nn.Sequential, methods)))
        return nn.Sequential(subclass(nn.Linear, methods)(4, 4))

    assert_writes_alike(*pair(make, lr=0.0, flat_master=flat))


@flats
@pytest.mark.parametrize("is_partial", [False, True], ids=["function", "partial"])
@pytest.mark.parametrize("hook", [limit_own, limit_child])
def test_a_hook_that_writes_weights(hook, is_partial, flat):
    def make():
        model = nn.Linear(4, 4) if hook is limit_own else parent()
        model.register_forward_pre_hook(partial(hook, bound=0.125) if is_partial else hook)
        return nn.Sequential(model)

    assert_writes_alike(*pair(make, lr=0.0, flat_master=flat))


@flats
def test_a_written_copy_changes_only_the_numbers_that_were_written(flat, warnings_of):
    half, _ = mixed(net(), flat_master=flat)
    before, dtypes = half[0].weight.detach().clone(), []

    def first_row(module, inputs, output):
        dtypes.append(module.weight.dtype)
        with torch.no_grad():
            module.weight[0] = 0.5

    half[0].register_forward_hook(first_row)
    for _ in range(3):
        half(X)
    assert (half[0].weight[0] == 0.5).all() and dtypes == [BF16, FULL, FULL]
    assert_same(half[0].weight[1:].detach(), before[1:])  # with all digits of float32
    assert sum("was written in the forward pass" in text for text in warnings_of()) == 1


@flats
@both
def test_parts_compute_in_16_bits_only_when_asked_to(dtype, flat, n_rounded):
    half, opt = mixed(net(), dtype, flat_master=flat)
    first, last = half[0].weight, half[3].weight
    assert_same(half[0](X), net()[0](X))
    with computing(half):
        ys = [half[0](X + i) for i in range(5)]
        assert ys[0].dtype == half[0].weight.dtype and ys[0].dtype.itemsize == 2
        half(X).sum().backward()
        assert n_rounded() == 1
        before = [p.clone() for p in half.parameters()]
        with pytest.raises(MixedPrecisionError, match="would not change its copies"):
            opt.step()
        assert_same([p.clone() for p in half.parameters()], before)
        with torch.no_grad():
            last.mul_(2)  # the parameter: float32 keeps all of its digits
            doubled = last.clone()
            half[0].weight.clamp_(-0.125, 0.125)  # the copy
    assert_same(half[3].weight, doubled)
    assert first.abs().max() == 0.125 and is_clean(half)
    opt.step()
    assert not any(map(torch.equal, before, half.parameters()))
    assert half[0](X).dtype == half[0].weight.dtype == FULL and is_clean(half)
    with pytest.raises(ValueError), computing(half):
        raise ValueError
    assert is_clean(half)


class Nested(nn.Module):
    def __init__(self, with_grad):
        super().__init__()
        self.first, self.linear = nn.Linear(4, 4), nn.Linear(4, 4)
        self.with_grad = with_grad

    def forward(self, x, depth=1):
        y = self.linear(self.first(x))
        outer, is_tied = self.linear.weight, self.linear.weight.requires_grad
        if depth:
            with torch.set_grad_enabled(self.with_grad):
                inner = self(y, depth - 1)
            y = y + inner
        assert self.linear.weight is outer  # the copy of this pass is back, as it was
        assert outer.requires_grad == is_tied
        return y + self.linear(y)


@flats
@pytest.mark.parametrize("with_grad", [True, False])
def test_a_model_called_inside_its_own_pass_shares_the_copies(with_grad, flat, n_rounded):
    full, half, _ = pair(Nested, with_grad, flat_master=flat)
    assert_trains_alike(full, half)
    assert n_rounded() == 1
    with torch.no_grad():
        assert_close(half(X), full(X))


@both
def test_gradients_of_many_passes_inside_one_block_are_summed_in_float32(dtype):
    half, _ = mixed(nn.Linear(1, 1, bias=False), dtype)
    with computing(half):
        sum(half(torch.ones(1, 1)).sum() for _ in range(2500)).backward()
    assert half.weight.grad.item() == 2500  # 256 in bfloat16, 2048 in float16


@flats
@both
def test_several_passes_before_a_backward_pass_add_up(dtype, flat):
    half, opt = mixed(net(), dtype, flat_master=flat)
    half(X).sum().backward(), half(-X).square().sum().backward()
    want = [g.clone() for g in grads(half)]
    opt.zero_grad()
    a = half(X).sum()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            half(X + 1)
    (a + half(-X).square().sum()).backward()
    assert_same(grads(half), want)


def in_threads(f, n):
    """Return `f` of each number below `n`, called in daemon threads; a deadlock is an error."""
    with ThreadPool(n) as pool:
        return pool.map_async(f, range(n), 1).get(30)


ERRORS = (
    ValueError("no"),
    RuntimeError("no"),
    torch.OutOfMemoryError("no dtype"),
    KeyboardInterrupt("no"),
)


@flats
@pytest.mark.parametrize("when", ["forward", "backward", "rounding", "widening"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_exception_leaves_nothing_and_is_itself(error, when, flat, monkeypatch):
    (half, _), calls = mixed(net(), flat_master=flat), []

    def fail(*_, **__):
        calls.append(1)
        raise error

    def fail_later(x, **_):
        x.register_hook(fail)
        return x

    f = fail_later if when == "backward" else fail
    place = (F, "gelu") if when in ("forward", "backward") else (torch, "_foreach_copy_")
    with monkeypatch.context() as patch, pytest.raises(type(error), match="no") as raised:
        loss = half(X).sum() if when == "widening" else None
        patch.setattr(*place, f)
        (half(X).sum() if loss is None else loss).backward()
    assert raised.value is error and calls == [1] and is_clean(half)
    assert_same(in_threads(lambda _: half(X).detach(), 1), [half(X).detach()])


@flats
@pytest.mark.parametrize("with_grad", [True, False])
def test_threads_may_call_one_model(with_grad, flat):
    (half, _), seen = mixed(net(), flat_master=flat), set()
    half[0].register_forward_hook(lambda *_: time.sleep(1e-3))  # another thread's turn
    half[1].register_forward_pre_hook(lambda m, args: seen.add(m.weight.dtype))

    def call(i):
        with torch.set_grad_enabled(with_grad):
            return half(X + i)

    want, found = [half(X + i).detach() for i in range(20)], in_threads(call, 20)
    assert_same([y.detach() for y in found], want)
    assert found[0].requires_grad == with_grad and seen == {BF16} and is_clean(half)


def test_a_scripted_part():
    full, half = (nn.Sequential(torch.jit.script(nn.Linear(4, 4))) for _ in range(2))
    half.load_state_dict(full.state_dict())
    assert_trains_alike(full, *mixed(half))


def test_several_models_in_one_pass():
    class Outer(nn.Linear):
        def forward(self, x):
            return super().forward(self.others[0](x))

    inner, _ = mixed(net())
    full, half, _ = pair(Outer, 3, 2)
    full.others, half.others = [copy.deepcopy(inner)], [inner]  # not parts
    assert_trains_alike(full, half)
    assert all(q.grad is not None for q in inner.parameters()) and is_clean(inner)


@flats
@both
def test_functional_call_grad_and_vmap(dtype, flat):
    full, half, _ = pair(net, dtype=dtype, flat_master=flat)
    params = {k: v.detach() * 2 for k, v in full.named_parameters()}
    zeros = {k: torch.zeros_like(v) for k, v in params.items()}
    assert functional_call(half, zeros, (X,)).abs().max() == 0
    assert_close(functional_call(half, params, (X,)), functional_call(full, params, (X,)))
    many = {k: torch.stack([v, v * 0.5]) for k, v in params.items()}

    def loss(model, ps, x=X):
        return functional_call(model, ps, (x,)).square().mean()

    for f in (loss, lambda m, ps: vmap(lambda q: loss(m, q))(many).sum() + loss(m, ps)):
        a, b = (grad(partial(f, m))(params) for m in (full, half))
        assert_close(a, b, 0.06)
    each = vmap(lambda m, x: grad(partial(loss, m))(params, x), in_dims=(None, 0))
    assert_close(each(full, X), each(half, X), 0.1)  # per-sample gradients
    assert_close(jacrev(full)(X[0]), jacrev(half)(X[0]))
    assert is_clean(half)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift, self.start = (nn.Parameter(1 + torch.rand(4)) for _ in range(3))
        self.start.requires_grad_(False)

    def forward(self, x):
        self.seen = [(p.dtype, p.requires_grad) for p in (self.scale, self.shift, self.start)]
        return (x + self.start) * self.scale + self.shift


@flats
@both
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_in_a_model_and_around_it_give_the_same_gradients(reentrant, dtype, flat):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Scaled(), *net()))
    half, opt = mixed(model, dtype, flat_master=flat)

    def gradients(out):
        opt.zero_grad()
        out.square().sum().backward()
        return copy.deepcopy(grads(half))

    want = gradients(half(X))
    x = X.clone().requires_grad_()
    assert_same(gradients(checkpoint(half, x, use_reentrant=reentrant)), want)
    half[1].forward = partial(checkpoint, half[1].forward, use_reentrant=reentrant)
    assert_same(gradients(half(X)), want)
    assert is_clean(half)


Upper = type("Upper", (nn.Module,), {"forward": lambda self, w: w.triu()})
ON_WEIGHTS = {
    "own": lambda m: parametrize.register_parametrization(m, "weight", Upper()),
    "pruned": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "old weight_norm": weight_norm,
    "old spectral_norm": spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@flats
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ON_WEIGHTS)
def test_weights_that_are_computed(name, when, flat):
    compute = ON_WEIGHTS[name]
    full, half = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)) for _ in range(2))
    compute(full[0])
    if when == "before":
        compute(half[0])
    mixed(half, lr=0.0, flat_master=flat, native=True)  # autocast on a CPU does not round `mv`
    if when == "after":
        compute(half[0])
    half.load_state_dict(full.state_dict())
    assert_trains_alike(full, half)
    assert_same(dict(half.state_dict()), dict(full.state_dict()))


@pytest.mark.parametrize("lazy", [partial(nn.LazyLinear, 4), nn.LazyBatchNorm1d])
def test_a_lazy_module_is_refused_with_a_sentence(lazy):
    model = nn.Sequential(nn.Linear(4, 4), lazy())
    with pytest.raises(MixedPrecisionError, match="run a batch through the model first"):
        mixed(model)
    model(X)
    assert mixed(model)[0](X).dtype == FULL


LAYERS = {
    "Embedding": partial(nn.Embedding, 3, 4),
    "sparse Embedding": partial(nn.Embedding, 3, 4, sparse=True),
    "Embedding with max_norm": partial(nn.Embedding, 3, 4, max_norm=0.5),
    "recomputed Embedding": partial(nn.Embedding, 3, 4),
    "EmbeddingBag": partial(nn.EmbeddingBag, 3, 4, mode="sum"),
    "sparse EmbeddingBag": partial(nn.EmbeddingBag, 3, 4, mode="mean", sparse=True),
}
READS = dict.fromkeys(LAYERS, lambda layer, i: layer(i[None])) | {
    "recomputed Embedding": lambda layer, i: checkpoint(layer, i, use_reentrant=False),
    "w[i]": lambda w, i: w[i],
    "w[:, i]": lambda w, i: w[:, i],
    "take": lambda w, i: torch.take(w, i),
    "gather": lambda w, i: w.gather(0, i[:, None].expand(-1, 4)),
    "take_along_dim": lambda w, i: torch.take_along_dim(w, i[:, None], 0),
    "index_select": lambda w, i: w.index_select(0, i),
    "one_hot": lambda w, i: F.one_hot(i, 3).float() @ w,
    "element-wise": lambda w, i: w[:2].sum(0) * torch.ones(len(i), 1),
    "F.embedding": lambda w, i: F.embedding(i, w, max_norm=1.0),
    "F.embedding_bag": lambda w, i: F.embedding_bag(i[None], w, mode="sum"),
}


class Table(nn.Module):
    """Rows of a table, or of a layer that has one."""

    def __init__(self, name):
        super().__init__()
        self.table = LAYERS[name]() if name in LAYERS else nn.Parameter(torch.ones(3, 4))
        self.read = READS[name]

    def forward(self, i):
        return self.read(self.table, i)


@flats
@both
@pytest.mark.parametrize("name", READS)
def test_a_row_that_is_read_a_thousand_times(name, dtype, flat):
    full, half, opt = pair(Table, name, dtype=dtype, lr=2**-10, flat_master=flat)
    i = torch.tensor([0] * 1001 + [1] * 3)
    other = torch.optim.SGD(full.parameters(), 2**-10)
    full(i).sum().backward(), half(i).sum().backward()
    a, b = grads(full)[0], grads(half)[0]
    assert a.layout == b.layout and b.dtype == FULL
    is_exact = "mbedding" in name  # others round the sum once
    assert_close(b.to_dense(), a.to_dense(), 1e-6 if is_exact else 2**-8)
    opt.step(), other.step()
    assert_close(list(half.parameters()), list(full.parameters()), 4e-3)


# Operators for which there are no 16-bit kernels, and float32 tensors inside

OPERATORS = """
x @ w + torch.slogdet(w)[1]; x @ torch.linalg.inv(w); x @ w * w.det(); x @ torch.linalg.qr(w)[0]
x @ torch.fft.rfft(w).abs()[:, :3]; x @ torch.complex(w, w).abs(); x @ torch.polar(w, w).real
x @ torch.view_as_complex(w.view(4, 2, 2)).abs(); x @ torch.matrix_exp(w)
torch.lerp(x[:4], w, 0.5); torch.zeros(4, 4).index_put((torch.arange(4),), w) + x[:4]
torch.zeros(4, 4).scatter(0, torch.zeros(4, 4).long(), w) + x[:4]; torch.where(x[:4] > 0, w, x[:4])
torch.cat([x, w]); F.linear(F.normalize(x), F.normalize(w)); torch.einsum("bi,oi->bo", x, w)
F.grid_sample(w[None, None], x.tanh().view(1, 8, 4, 2), align_corners=False)
F.interpolate(w[None, None], (16, 4), mode="bicubic")[0, 0] + x
torch.baddbmm(torch.ones(1, 4, 4), w[None], w[None]); torch.cdist(x, w); x @ w.sort()[0]
F.cosine_similarity(x[:4], w); F.scaled_dot_product_attention(x[None], w[None], w[None])
torch.addmm(x, x, w); torch.addcmul(x[:4], x[:4], w); F.bilinear(x, x, w[None], None)
F.batch_norm(x, None, None, w[0], w[1], True); F.layer_norm(x, (4,), w[0], w[1]); F.prelu(x, w[0])
""".replace("\n", ";").split(";")


class OnWeight(nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.weight, self.act = nn.Parameter(torch.eye(4) + torch.rand(4, 4) / 8), act


@pytest.mark.parametrize("code", [code.strip() for code in OPERATORS if code.strip()])
def test_operators_on_a_weight(code):
    forward = f"def forward(self, x):\n    w = self.weight\n    return {code}"
    assert_trains_alike(*pair(subclass(OnWeight, forward)))


HELD = [(F.relu, True), (torch.tanh, True), (torch.linalg.inv, False)]
HELD += [(lambda w: w.take(torch.tensor([[0, 5], [5, 0]])), False)]


@pytest.mark.parametrize("act, has_copy", HELD)
def test_a_function_that_a_module_holds_is_read_as_its_own_code(act, has_copy):
    class Held(OnWeight):
        def forward(self, x):
            return x[:, :2] @ self.act(self.weight)[:2, :2]

    full, half, opt = pair(Held, act)
    assert_trains_alike(full, half)
    assert bool(opt.masters.copies.places) == has_copy


@flats
def test_a_pass_sees_16_bit_weights_but_those_kept_by_name_and_hooks_float32_gradients(flat):
    half, opt = mixed(nn.Sequential(Scaled(), *net()), flat_master=flat, keep_fp32="*.scale")
    seen, dtypes = [], []
    half[1].register_forward_pre_hook(lambda m, args: seen.append(m.weight.dtype))
    for m in (half[2], half[4]):
        m.register_forward_hook(lambda m, args, out: seen.extend((m.weight.dtype, out.dtype)))
    half.register_forward_hook(lambda m, args, out: seen.extend((m[1].weight.dtype, out.dtype)))
    trained = [p for p in half.parameters() if p.requires_grad]
    for p in trained:
        p.register_hook(lambda g: dtypes.append(g.dtype))
        p.register_post_accumulate_grad_hook(lambda p: dtypes.append(p.grad.dtype))
    half(X).sum().backward()
    opt.step()
    assert half[0].seen == [(FULL, True), (BF16, True), (BF16, False)]
    assert seen == [BF16] * 5 + [FULL] * 2 and dtypes == [FULL] * 2 * len(trained)
    assert half[0].start.grad is None


@both
def test_an_optimizer_that_steps_in_the_backward_pass(dtype):
    def train(model, dtype=FULL):
        opts = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
        if dtype != FULL:
            with_masters(model, *opts.values(), dtype=dtype)
        for p, opt in opts.items():
            p.register_post_accumulate_grad_hook(lambda p, opt=opt: opt.step())
            p.register_post_accumulate_grad_hook(lambda p, opt=opt: opt.zero_grad())
        for _ in range(5):
            model(X).square().mean().backward()
        assert all(p.grad is None for p in opts)
        assert dtype == FULL or not any(opt.masters.n_skipped for opt in opts.values())
        return [p.detach() for p in opts]

    assert_close(train(net(), dtype), train(net()), 0.01)


@flats
@both
def test_a_model_is_freed_with_its_last_reference(dtype, flat):
    """Also after a step, passes in a block, and an exception; and what a hook holds is freed."""

    def used(is_interrupted):
        model, held = net(), nn.Linear(1, 1)
        model[0].register_forward_pre_hook(lambda m, args: None if held else args)
        half, opt = mixed(model, dtype, flat_master=flat)
        half(X).sum().backward()
        opt.step()
        with computing(half):
            half[0](X)
        if not is_interrupted:
            return [weakref.ref(o) for o in (half, held, *half.parameters())]
        half[0].bias.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            half(X).sum().backward()
        return [weakref.ref(half)]  # PyTorch keeps parameters

    alive = [*used(False), *used(True)]
    gc.collect()
    assert not any(ref() is not None for ref in alive)
