"""Attention of bfloat16 models on a CPU: computed in float32 where that is faster, else left alone.

And gradients of embeddings, which are added up in float32.

Oracle: the same attention of the same numbers in float32. A spy below autograd sees in which dtype
the kernels run. `slow_attention` says what the processor is slow at; most tests say it for it.
"""

import copy
import math
import pickle
import platform
import weakref
from contextlib import nullcontext
from functools import partial

import inside
import pytest
import torch
import torch.nn.functional as F
from inside import AttentionInFloat32, ComputeInFloat32, EmbeddingInFloat32, slow_attention
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mixedfp.optimizer import with_masters
from mixedfp.step import MixedStep
from mixedfp.testing import assert_same

FULL, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture
def slow(monkeypatch):
    """Let attention in bfloat16 on a CPU be slow in any size, whatever the processor."""
    set_limit(monkeypatch, math.inf)


def set_limit(monkeypatch, limit):
    """Let attention be slow in bfloat16 on a CPU below `limit` products a head."""
    inside.attention_is_slow(
        monkeypatch, lambda device, dtype: limit * ((device, dtype) == ("cpu", BF16))
    )


class Spy(TorchDispatchMode):
    """The dtypes of the first operand of every kernel, by name, in the order of the calls."""

    def __enter__(self):
        self.seen = {}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            self.seen.setdefault(func.overloadpacket.__name__, []).append(args[0].dtype)
        return func(*args, **(kwargs or {}))

    @property
    def attention(self):
        """Of attention's forward pass, and of its backward pass."""
        return self.seen.get(KERNEL, []), self.seen.get(KERNEL + "_backward", [])


def qkv(dtype=BF16, n_queries=5, n_keys=5, size=8):
    """Return query, key and value."""
    shapes = (2, 3, n_queries, size), *[(2, 3, n_keys, size)] * 2
    return [torch.randn(s).to(dtype).requires_grad_() for s in shapes]


def run(tensors, **kwargs):
    """Return attention, and the gradients of all tensors."""
    out = F.scaled_dot_product_attention(*tensors, **kwargs)
    grad = (torch.arange(out.numel()) % 7 - 3).view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, grad)]


def in_float(tensors):
    """Return the same numbers in float32."""
    return [t.detach().float().requires_grad_() for t in tensors]


ROWS = torch.ones(5, 5, dtype=torch.bool).tril()
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bools": {"attn_mask": ROWS},
    "numbers": {"attn_mask": torch.zeros(5, 5, dtype=BF16).masked_fill(~ROWS, -math.inf)},
    "a scale": {"scale": 0.5},
    "groups": {"enable_gqa": True},
}

# The numbers


@pytest.mark.parametrize("mask", MASKS)
def test_results_are_float32s_rounded(slow, mask):
    """Results once; gradients pass through a result that is kept in 16 bits, as natively."""
    tensors = qkv()
    with AttentionInFloat32(), Spy() as spy:
        ours = run(tensors, **MASKS[mask])
    assert {d for part in spy.attention for d in part} <= {FULL}
    kwargs = dict(MASKS[mask])
    if mask == "numbers":
        kwargs["attn_mask"] = kwargs["attn_mask"].float()
    exact = run(in_float(tensors), **kwargs)
    assert_same(ours[0], exact[0].to(BF16))
    native = run(tensors, **MASKS[mask])
    for mine, true, theirs in zip(ours[1:], exact[1:], native[1:], strict=True):
        assert mine.dtype == BF16
        assert distance(mine, true) <= max(2**-8, 1.1 * distance(theirs, true))


def distance(got, true):
    """Return the largest error, in units of the largest number."""
    return ((got.float() - true).abs().max() / true.abs().max()).item()


def test_the_spy_sees_both_ways(slow):
    tensors = qkv()
    with Spy() as spy:
        run(tensors)
    assert spy.attention == ([BF16], [BF16])
    with Spy() as spy, AttentionInFloat32():
        run(tensors)
    assert spy.attention == ([FULL], [FULL])


def test_a_mask_that_learns_has_its_gradient(slow):
    bias = torch.randn(1, 3, 5, 5).to(BF16).requires_grad_()
    q, k, v = qkv()
    with AttentionInFloat32():
        out = F.scaled_dot_product_attention(q, k, v, bias)
    grads = torch.autograd.grad(out.float().pow(2).sum(), [q, bias])
    fq, fk, fv, fbias = in_float([q, k, v, bias])
    exact = F.scaled_dot_product_attention(fq, fk, fv, fbias)
    true = torch.autograd.grad(exact.pow(2).sum(), [fq, fbias])
    assert [g.dtype for g in grads] == [BF16, BF16]
    assert all(distance(g, t) < 2**-6 for g, t in zip(grads, true, strict=True))


def test_a_row_that_may_look_at_nothing(slow):
    mask = ROWS.clone()
    mask[2] = False
    tensors = qkv()
    native = run(tensors, attn_mask=mask)
    with AttentionInFloat32():
        ours = run(tensors, attn_mask=mask)
    assert [t.isfinite().all() for t in ours] == [t.isfinite().all() for t in native]


def test_names_of_arguments(slow):
    q, k, v = qkv()
    with AttentionInFloat32():
        named = F.scaled_dot_product_attention(value=v, key=k, query=q, dropout_p=0.0)
        assert_same(named, F.scaled_dot_product_attention(q, k, v))


def test_what_is_kept_for_the_backward_pass_has_16_bits(slow, monkeypatch):
    """All but the sums: no tensor of the size of the query waits in float32."""
    kept = inside.watch_narrowed(monkeypatch)
    with AttentionInFloat32():
        run(qkv())
    assert sorted((t.dim(), t.dtype) == (4, BF16) for t in kept) == [False] + 4 * [True]
    assert [t.dtype for t in kept if t.dim() == 3] == [FULL]


def test_what_is_kept_does_not_hold_on_to_what_was_given(slow):
    """Query, key and value are often views of one tensor, which nobody needs afterwards."""
    leaf = torch.randn(3, 2, 3, 5, 8).to(BF16).requires_grad_()
    given = []

    def forward():
        together = leaf * 1
        q, k, v = together
        given.append(weakref.ref(q))
        return F.scaled_dot_product_attention(q, k, v)

    with AttentionInFloat32():
        out = forward()
    assert given[0]() is None
    assert out.grad_fn is not None


# What is left alone


def in_mode(tensors, **kwargs):
    """Return what `run` does, and the kernels' dtypes."""
    with Spy() as spy, AttentionInFloat32():
        out = run(tensors, **kwargs)
    return out, spy.attention


@pytest.mark.parametrize("dtype", [FULL, HALF])
def test_other_types_are_left_alone(slow, dtype):
    tensors = qkv(dtype)
    ours, dtypes = in_mode(tensors)
    assert dtypes == ([dtype], [dtype])
    assert_same(ours, run(tensors))


@pytest.mark.parametrize("limit, expected", [(0, BF16), (5 * 7 * 8, BF16), (5 * 7 * 8 + 1, FULL)])
def test_large_heads_are_left_alone(monkeypatch, limit, expected):
    set_limit(monkeypatch, limit)
    assert in_mode(qkv(n_keys=7))[1] == ([expected], [expected])


def test_dropout_is_left_alone(slow):
    torch.manual_seed(1)
    native = run(tensors := qkv(), dropout_p=0.5)
    torch.manual_seed(1)
    tensors_again = qkv()
    assert_same(tensors_again, tensors)
    with AttentionInFloat32():
        assert_same(run(tensors_again, dropout_p=0.5), native)


@pytest.mark.parametrize("how", ["no_grad", "frozen"])
def test_nothing_is_done_without_a_backward_pass(slow, how):
    tensors = [t.detach() for t in qkv()] if how == "frozen" else qkv()
    with Spy() as spy, AttentionInFloat32(), torch.set_grad_enabled(how == "frozen"):
        F.scaled_dot_product_attention(*tensors)
    assert spy.attention == ([BF16], [])


def test_a_mask_of_another_type_is_left_alone(slow):
    """Kept in 16 bits for the backward pass it would not be the same mask."""
    tensors, mask = qkv(), torch.randn(5, 5)
    ours, dtypes = in_mode(tensors, attn_mask=mask)
    assert dtypes == ([BF16], [BF16])
    assert_same(ours, run(tensors, attn_mask=mask))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_computes_the_same_twice(slow, reentrant):
    """The repeated pass is outside of the mode: so the first one leaves attention alone."""
    tensors = qkv()

    def sdpa(*ts):
        return F.scaled_dot_product_attention(*ts)

    with Spy() as spy, AttentionInFloat32():
        out = checkpoint(sdpa, *tensors, use_reentrant=reentrant)
    out.sum().backward()
    assert set(spy.attention[0]) == {BF16}


def test_hooks_of_others_see_what_they_always_saw(slow):
    seen = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: seen.append(t.dtype) or t, lambda t: t
    )
    with AttentionInFloat32(), hooks:
        run(qkv())
    assert BF16 in seen and seen.count(FULL) == 1  # the sums


def test_torch_func_is_left_alone(slow):
    q, k, v = (t.detach() for t in qkv())

    def loss(q):
        return F.scaled_dot_product_attention(q, k, v).float().pow(2).sum()

    expected = torch.func.grad(loss)(q)
    with AttentionInFloat32():
        assert_same(torch.func.grad(loss)(q), expected)
        torch.vmap(partial(F.scaled_dot_product_attention, key=k[0], value=v[0]))(q)


# Modules that call attention where no mode sees it


class Attending(nn.Module):
    """PyTorch's module around attention, without the weights, so that the fast kernel runs."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Encoder(nn.Module):
    """PyTorch's whole layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


class Sdpa(nn.Module):
    """Attention as most write it now."""

    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 2)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.head(out.transpose(1, 2).flatten(2).mean(1))


class Plain(nn.Module):
    """No attention."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(x.mean(1))


MODELS = [Attending, Encoder, Sdpa]
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


def half_model(make, dtype=BF16, **kwargs):
    """Return a model in 16 bits with its optimizer."""
    model = make()
    return with_masters(model, optim.SGD(model.parameters(), 0.1), dtype=dtype, **kwargs)


@pytest.mark.parametrize("make", MODELS)
def test_only_attention_is_computed_in_float32(slow, make):
    model, opt = half_model(make)
    with Spy() as spy:
        out = model(X.to(BF16))
        out.float().sum().backward()
    assert out.dtype == FULL and spy.attention == ([FULL], [FULL])
    assert {d for k in ("addmm", "mm") for d in spy.seen.get(k, [])} == {BF16}
    before = [p.detach().clone() for p in model.parameters()]
    opt.step()
    assert not all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("make", MODELS)
def test_results_are_within_roundings_of_the_native_ones(slow, make):
    model, opt = half_model(make)
    native, _ = copy.deepcopy((model, opt))  # of the model alone it would be one in 32 bits
    native.forward.native = True
    ours, theirs = model(X.to(BF16)), native(X.to(BF16))
    assert distance(ours, theirs.float()) < 2**-6


def test_multi_head_attention_is_its_own_code_but_for_attention(slow):
    """Weights, masks and all that: whatever does not call the kernel has the same bits."""
    attend = nn.MultiheadAttention(8, 2, batch_first=True).to(BF16)
    x = X.to(BF16)
    for kwargs in (
        {},
        {"average_attn_weights": False},
        {"attn_mask": ~ROWS},
        {"key_padding_mask": torch.zeros(3, 5, dtype=torch.bool)},
    ):
        expected = attend(x, x, x, **kwargs)
        with AttentionInFloat32():
            assert_same(attend(x, x, x, **kwargs), expected)
    with AttentionInFloat32(), pytest.raises(AssertionError):
        attend(x, x, x[:, :2])


def test_evaluation_keeps_pytorchs_fast_path(slow):
    """`torch._transformer_encoder_layer_fwd` computes a whole layer; a mode would turn it off."""
    model, opt = half_model(Encoder)
    native, _ = copy.deepcopy((model.eval(), opt))
    del native.forward
    with torch.no_grad(), Spy() as spy:
        out = model.eval()(X.to(BF16))
    assert "_transformer_encoder_layer_fwd" in spy.seen
    with torch.no_grad():
        assert_same(out, native(X.to(BF16)).float())


# In the library


class Sometimes(Sdpa):
    """Attention in the batches that ask for it."""

    asked = False

    def forward(self, x):
        return super().forward(x) if self.asked else self.head(x.mean(1))


def count_modes(monkeypatch, kind=AttentionInFloat32):
    """Return a list that grows with each mode of this kind that is entered."""
    entered, enter = [], kind.__enter__
    monkeypatch.setattr(kind, "__enter__", lambda mode: entered.append(mode) or enter(mode))
    return entered


@pytest.mark.parametrize("make, n", [(Plain, 1), (Sdpa, 3)])
def test_a_model_without_attention_does_not_pay_for_a_mode(slow, monkeypatch, make, n):
    """The first training batch shows it; evaluation and compilation never enter one."""
    entered = count_modes(monkeypatch)
    model, _ = half_model(make)
    with torch.no_grad():
        model(X.to(BF16))
    assert len(entered) == 0
    for _ in range(3):
        model(X.to(BF16))
    assert len(entered) == n


def test_each_attach_looks_again(slow, monkeypatch):
    """Who first attends later has it natively until then; what was found once stays."""
    entered = count_modes(monkeypatch)
    step, model = MixedStep(BF16), Sometimes()
    step.attach(model)
    model(X.to(BF16))
    model.asked = True
    model(X.to(BF16))
    assert len(entered) == 1
    step.attach(model)
    for model.asked in (True, False, True):
        model(X.to(BF16))
    assert len(entered) == 4


def test_a_forward_pass_that_breaks_off_has_shown_nothing(slow, monkeypatch):
    entered = count_modes(monkeypatch)
    model, _ = half_model(Sdpa)
    with pytest.raises(RuntimeError):
        model(X[..., :7])
    model(X.to(BF16))
    model(X.to(BF16))
    assert len(entered) == 3


def has_forward(model):
    """Whether somebody stands in `model.forward`."""
    return inside.has_half_forward(model)


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_who_asks_for_pytorchs_kernels_gets_them(slow, flat):
    by_hand, _ = half_model(Sdpa, native=True, flat_master=flat)
    step = MixedStep(BF16, flat, native=True)
    step.attach(attached := Sdpa())
    for model in (by_hand, attached):
        with Spy() as spy:
            model(X.to(BF16))
        assert spy.attention[0] == [BF16]


def test_no_forward_is_replaced_in_float32(slow):
    assert not has_forward(half_model(Sdpa, FULL)[0])
    step = MixedStep(FULL)
    step.attach(model := Sdpa())
    assert not has_forward(model)


def test_no_mode_is_entered_where_nothing_is_slow(monkeypatch):
    set_limit(monkeypatch, 0)
    entered = count_modes(monkeypatch)
    step = MixedStep(BF16)
    step.attach(model := Sdpa())
    assert has_forward(model)
    model(X)
    assert not entered


def test_attach_and_detach(slow):
    step, model = MixedStep(BF16), Sdpa()
    before = copy.deepcopy(model.state_dict())
    step.attach(model)
    step.attach(model)
    with Spy() as spy:
        model(X.to(BF16))
    assert has_forward(model) and spy.attention[0] == [FULL]
    step.detach()
    assert "forward" not in vars(model)
    assert_same(dict(model.state_dict()), dict(before))


def test_restore_gives_the_forward_back(slow):
    model, opt = half_model(Sdpa)
    assert "forward" not in vars(opt.float_model()) and has_forward(model)
    opt.restore()
    assert "forward" not in vars(model)


def test_a_model_with_a_forward_of_its_own(slow):
    model = Sdpa()
    model.forward = own = partial(Sdpa.forward, model)
    step = MixedStep(BF16)
    step.attach(model)
    with Spy() as spy:
        model(X.to(BF16))
    assert spy.attention[0] == [FULL]
    step.detach()
    assert model.forward is own


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_do_the_same(slow, make_copy):
    model, opt = half_model(Sdpa)
    again, _ = make_copy((model, opt))
    assert again.forward.model is again
    with Spy() as spy:
        out = again(X.to(BF16))
    assert spy.attention[0] == [FULL]
    assert_same(out, model(X.to(BF16)))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_no_mode_is_left_entered(slow, error):
    class Broken(Sdpa):
        def forward(self, x):
            super().forward(x)
            raise error

    model, _ = half_model(Broken)
    with pytest.raises(error):
        model(X.to(BF16))
    with Spy() as spy:
        run(qkv())
    assert spy.attention == ([BF16], [BF16])


def test_overflow_is_no_matter_of_bfloat16(slow):
    """The advice for float16 would be wrong here: PyTorch's own message passes."""

    class Filled(Sdpa):
        def forward(self, x):
            return super().forward(x.masked_fill(x > 0, -1e300))

    model, _ = half_model(Filled)
    with pytest.raises(RuntimeError, match="without overflow") as e:
        model(X.to(BF16))
    assert "to_bf16" not in str(e.value)


@pytest.mark.parametrize("make", [Sdpa, Plain])
def test_compiled_it_is_one_graph_without_a_mode(slow, make):
    model, opt = half_model(make)
    fast = torch.compile(model, backend="eager", fullgraph=True)
    native, _ = copy.deepcopy((model, opt))
    native.forward.native = True
    for _ in range(2):
        out = fast(X.to(BF16))
        assert_same(out, native(X.to(BF16)))
        out.float().sum().backward()
        opt.step()
        native, _ = copy.deepcopy((model, opt))
        native.forward.native = True


def test_around_a_compiled_model_there_is_in_mode(slow):
    plain = Sdpa()
    step, model = MixedStep(BF16), torch.compile(plain, backend="eager", fullgraph=True)
    step.attach(model)
    assert_same(model(X.to(BF16)), plain(X.to(BF16)).float())
    step.detach()


def test_a_compiled_part_inside(slow):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.body = Sdpa(), torch.compile(Sdpa(), backend="eager")

        def forward(self, x):
            return self.first(x) + self.body(x)

    model, _ = half_model(Parts)
    model(X.to(BF16)).float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_another_device_is_left_alone(slow):
    model, _ = half_model(Sdpa)
    assert model.to("meta")(X.to(BF16).to("meta")).device.type == "meta"


# What the processor is


@pytest.mark.parametrize(
    "machine, tiles, instructions, limit",
    [
        ("x86_64", False, True, 2**23),
        ("AMD64", False, False, math.inf),
        ("x86_64", True, True, 2**21),
        ("aarch64", False, False, 0),
    ],
)
def test_limits(monkeypatch, machine, tiles, instructions, limit):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: instructions)
    inside.ask_the_processor(monkeypatch)
    assert slow_attention("cpu", BF16) == slow_attention(torch.device("cpu"), BF16) == limit
    assert slow_attention("cuda:0", BF16) == slow_attention("cpu", HALF) == 0


class Words(nn.Module):
    """A table, and a layer that hands gradients on as they come."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(3, 1), nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)

    def forward(self, words):
        return self.layer(self.table(words))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype, stuck", [(BF16, 256), (HALF, 2048)])
def test_gradients_of_an_embedding_are_added_up_in_float32(dtype, stuck, flat):
    """4,096 times the same word; PyTorch's own sum in 16 bits stops to grow on the way."""
    for native, expected in [(False, 4096), (True, stuck)]:
        model, opt = half_model(Words, dtype, flat_master=flat, native=native)
        for _ in range(2):  # what the first pass finds out holds for the second
            opt.zero_grad()
            model(torch.ones(4096, dtype=torch.int64)).sum().backward()
            assert_same(model.table.weight.grad, torch.tensor([[0.0], [expected], [0.0]]))


def test_a_model_without_embeddings_does_not_pay_for_their_mode(monkeypatch):
    entered = count_modes(monkeypatch, EmbeddingInFloat32)
    for make, n in [(Plain, 1), (Words, 1 + 3)]:
        model, _ = half_model(make)
        x = X.to(BF16) if make is Plain else torch.ones(2, dtype=torch.int64)
        with torch.no_grad():
            model(x)
        for _ in range(3):
            model(x)
        assert len(entered) == n


# Products in bfloat16


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "slow"])
def test_products_run_in_float32_where_the_cpu_has_none_in_bfloat16(is_native, monkeypatch):
    """Forward and backward, from 16-bit weights, rounded once."""
    inside.is_native(monkeypatch, bfloat16=is_native)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    model, opt = with_masters(model, optim.SGD(model.parameters(), 0.1), dtype=BF16)
    conv, linear = model[0], model[2]
    x = torch.randn(2, 3, 8, 8)
    with Spy() as spy:
        out = model(x)
        out.sum().backward()
    kernels = [spy.seen[k][0] for k in ("convolution", "convolution_backward", "addmm")]
    assert set(kernels) == {BF16 if is_native else FULL}
    if not is_native:
        wide = [p.detach().float() for p in (conv.weight, conv.bias, linear.weight, linear.bias)]
        hidden = F.conv2d(x.to(BF16).float(), *wide[:2]).to(BF16).float().flatten(1)
        assert_same(out.detach(), F.linear(hidden, *wide[2:]).to(BF16).float())
    assert {p.grad.dtype for p in model.parameters()} == {FULL}
    opt.step()


INTEL, AMD = "vendor_id : GenuineIntel", "AMD64 Family 25 Model 97, AuthenticAMD"


@pytest.mark.parametrize("machine, processor, expected", [
    # the processor: who made it, and whether bfloat16 has products, instructions, tiles
    ("x86_64", (INTEL, True, True, True), True),
    ("x86_64", (INTEL, True, True, False), False),  # at half the rate of float32's instructions
    ("x86_64", (INTEL, True, False, False), False),  # emulated
    ("x86_64", (INTEL, False, True, True), False),  # oneDNN is held to other instructions
    ("AMD64", (AMD, True, True, False), True),
    ("AMD64", (AMD, True, False, False), False),  # emulated
    ("AMD64", (AMD, False, False, False), False),
    ("aarch64", ("", False, False, False), True),
])  # fmt: skip
def test_what_a_cpu_trains_fast_with(machine, processor, expected, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: machine)
    inside.ask_the_processor_for_products(monkeypatch, *processor)
    assert inside.has_arithmetic("cpu", BF16) is expected
    # fp16 on x86: PyTorch is slow in the backward pass of its convolutions
    assert inside.has_arithmetic("cpu", HALF) is (machine == "aarch64")


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or platform.system() == "Darwin",
    reason="makers of x86 alone; a Mac does not say, and has no AVX512-BF16",
)
def test_the_system_knows_who_made_the_processor():
    assert any(maker in inside.the_processor() for maker in ("GenuineIntel", "AuthenticAMD"))


def test_native_is_native_on_any_cpu(monkeypatch):
    inside.is_native(monkeypatch, bfloat16=False)
    model = nn.Linear(4, 3)
    model, _ = with_masters(model, optim.SGD(model.parameters(), 0.1), dtype=BF16, native=True)
    with Spy() as spy:
        model(torch.ones(2, 4))
    assert set(spy.seen["addmm"]) == {BF16}


def test_native_stays_native_where_more_is_kept_in_32_bits(monkeypatch):
    inside.is_native(monkeypatch, bfloat16=False)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    settings = dict(dtype=BF16, native=True)
    model, opt = with_masters(model, optim.SGD(model.parameters(), 0.1), **settings)
    opt.keep_more(["1"])
    with Spy() as spy:
        model(torch.ones(2, 4))
    assert set(spy.seen["addmm"]) == {BF16, FULL}


# What such a product keeps for its backward pass


LINES = torch.arange(-2048, 2048).view(64, 64) / 2048  # 2¹² numbers, and none a small one
PICTURES = LINES.reshape(2, 8, 16, 16)
MATRICES = LINES.reshape(4, 32, 32)[:2].repeat(2, 1, 1)


def cross_attention(query, key, w):
    """Of parts of one matrix: the query's weights, and those of key and value."""
    weights, bias = torch.cat([w, w.flip(0), w.flip(1)]), w[:3].flatten()
    attended, _ = F.multi_head_attention_forward(
        query, key, key, 64, 2, weights, bias, None, None, False, 0.0, w, w[0]
    )
    return attended


BIG_PRODUCTS = {
    "linear": (F.linear, [LINES, LINES.flip(0), LINES[0]]),
    "transposed": (lambda x, w: x.t() @ w[:, ::2], [LINES, LINES.flip(0)]),
    "a view": (lambda x, w: x.view(4, 1024)[1:].view(-1, 64) @ w, [LINES, LINES]),
    "the same twice": (lambda x: x @ x.t(), [LINES]),
    "conv2d": (F.conv2d, [PICTURES, LINES.view(-1)[:1152].view(16, 8, 3, 3).repeat(4, 1, 1, 1)]),
    "channels_last": (
        lambda x, w: F.conv2d(x.contiguous(memory_format=torch.channels_last), w, stride=2),
        [PICTURES, LINES.view(-1)[:1152].view(16, 8, 3, 3)],
    ),
    "bmm": (torch.bmm, [MATRICES, MATRICES]),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->ik", a, b), [MATRICES, MATRICES]),
    "parts of a matrix": (cross_attention, [LINES[:4], LINES[:7], LINES]),
    "attention": (F.scaled_dot_product_attention, [MATRICES[None]] * 3),
}


def gradients(product, tensors, dtype, mode, twice=False):
    """Return the product, the gradients, and those of the gradients' sum of squares."""
    leaves = [t.to(dtype).requires_grad_() for t in tensors]
    with mode:
        out = product(*leaves)
    grads = torch.autograd.grad(out.float().pow(2).sum(), leaves, create_graph=twice)
    if twice:
        sum(g.float().pow(2).sum() for g in grads).backward()
    return [out, *grads, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("name", BIG_PRODUCTS)
def test_gradients_have_the_bits_of_casts_that_were_kept(name, dtype, twice, monkeypatch):
    product, tensors = BIG_PRODUCTS[name]
    if twice and name in ("attention", "parts of a matrix"):
        pytest.skip("PyTorch has no second derivative of its kernel")
    ours = gradients(product, tensors, dtype, ComputeInFloat32(dtype), twice)
    packed = inside.keep_casts(monkeypatch)
    assert_same(ours, gradients(product, tensors, dtype, ComputeInFloat32(dtype), twice))
    assert packed


@pytest.mark.parametrize("inputs_are_changed", [False, True])
def test_what_is_kept_is_what_was_given(inputs_are_changed):
    """Changed in between it is refused: PyTorch refuses it where the CPU computes it itself."""
    x, w = (LINES.to(BF16).requires_grad_() for _ in range(2))
    for mode in (ComputeInFloat32(BF16), nullcontext()):
        hidden = x * 1
        with mode:
            out = hidden @ w
        (hidden if inputs_are_changed else w.detach()).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_small_operands_are_kept_as_casts(monkeypatch):
    """Two calls of Python each would cost more than their memory."""
    packed = inside.keep_casts(monkeypatch)
    for n, expected in ((63, 0), (64, 1)):
        with ComputeInFloat32(BF16):
            LINES[:n].to(BF16) @ LINES.to(BF16)[:, :n].requires_grad_()
        assert len(packed) == expected


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_keep_their_casts(make, monkeypatch):
    """One for all steps, where each step would cast the weights anew."""
    packed, layer = inside.keep_casts(monkeypatch), make(64, 64).to(BF16)
    with ComputeInFloat32(BF16):
        layer(LINES.to(BF16))
    assert packed == []


def test_hooks_of_others_and_torch_func_are_left_alone():
    x, w = (LINES.to(BF16).requires_grad_() for _ in range(2))
    seen = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: seen.append(t.dtype) or t, lambda t: t
    )

    def loss(w):
        return (x.detach() @ w).float().pow(2).sum()

    with ComputeInFloat32(BF16):
        expected = torch.autograd.grad(loss(w), w)[0]
        with hooks:
            x @ w
        assert seen == [FULL, FULL]
        assert_same(torch.func.grad(loss)(w), expected)
        assert torch.func.vmap(lambda row: row @ w)(x).dtype == BF16


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
def test_a_trace_hears_of_nothing():
    """Sizes and versions are no part of what is traced."""
    w = LINES.to(BF16)
    with ComputeInFloat32(BF16):
        traced = torch.jit.trace(lambda x: x @ w, LINES.to(BF16), check_trace=False)
    assert_same(traced(LINES.to(BF16)), (LINES.to(BF16).float() @ w.float()).to(BF16))


def test_what_was_made_in_inference_mode_trains():
    """Its changes are not counted, and so not seen: the cast is kept."""
    with torch.inference_mode():
        x = LINES.to(BF16)
    w = LINES.to(BF16).requires_grad_()
    with ComputeInFloat32(BF16):
        out = x @ w
    with torch.inference_mode():
        x.mul_(2)
    out.sum().backward()
    assert_same(w.grad, (LINES.to(BF16).float().t() @ torch.ones(64, 64)).to(BF16))


@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_a_model_keeps_half_as_much_as_in_float32(dtype, monkeypatch):
    """Of the inputs of all layers; the weights and their masters are there anyway."""
    inside.is_native(monkeypatch, float16=False, bfloat16=False)
    sizes = {}
    for precision in (FULL, dtype):
        model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh())])
        model, _ = with_masters(model, optim.SGD(model.parameters(), 0.1), dtype=precision)
        with inside.Allocated() as made:
            out = model(torch.randn(256, 64))
        sizes[precision] = made.alive()
        assert out.dtype == FULL
    assert sizes[dtype] < 0.7 * sizes[FULL]
