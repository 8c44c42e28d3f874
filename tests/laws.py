"""What the laws of tests/test_laws.py are held over: rows of tables, and how a row is trained.

A row names a model, an optimizer, a way of working and how the masters are kept; `rows` makes a
short table in which every pair of small columns meets, `--all-rows` one in which all pairs do.
"""

import copy
import itertools
import linecache
import random
import sys
import warnings
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from fastai.basics import params
from nets import DEVICE, NETS
from tiny import ELEMENTWISE, OPTIMIZERS, make_dls, make_learner, opt_state, plain, weights
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrize import ParametrizationList
from workflows import FITS, LOOPS

import mixedfp
from mixedfp import scaler as scalers
from mixedfp import step as steps
from mixedfp.callback import MixedPrecision
from mixedfp.engine.forward import part_of
from mixedfp.optimizer import with_masters
from mixedfp.scaler import LossScaler
from mixedfp.testing import assert_same

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16

# Tables

MANY = 64  # pairs of two columns: more of them meet with --all-rows


class Row:
    """A row of a table: its columns are its attributes, its name is a part of a sentence."""

    def __init__(self, **cells):
        self.cells = cells
        vars(self).update(cells)

    def __repr__(self):
        return f"Row({', '.join(f'{k}={v!r}' for k, v in self.cells.items())})"

    def __str__(self):
        return ", ".join(str(v).replace("_", " ") for v in self.cells.values())


def rows(columns, allows=lambda row: True, is_full=False, seed=0):
    """Return rows in which each value occurs, and each pair of values of two small columns."""
    rng, names = random.Random(seed), list(columns)
    wanted = {((k, v),) for k in names for v in columns[k]}
    for a, b in itertools.combinations(names, 2):
        if is_full or len(columns[a]) * len(columns[b]) <= MANY:
            wanted |= {((a, v), (b, w)) for v in columns[a] for w in columns[b]}
    table, used = [], {}
    for pair in sorted(wanted, key=lambda pair: (-len(pair), repr(pair))):
        if pair in wanted:
            tries = [_draw(rng, columns, dict(pair), used) for _ in range(12)]
            tries = [row for row in tries if allows(row)]
            if tries:
                best = max(tries, key=lambda row: len(wanted & _parts(row)))
                table.append(best)
                wanted -= _parts(best)
                for cell in best.cells.items():
                    used[cell] = used.get(cell, 0) + 1
    return table


def _draw(rng, columns, fixed, used):
    cells = {}
    for k, values in columns.items():
        rare = min(used.get((k, v), 0) for v in values)
        fresh = [v for v in values if used.get((k, v), 0) <= rare + 1]
        cells[k] = fixed.get(k) or rng.choice(fresh if rng.random() < 0.7 else list(values))
    return Row(**cells)


def _parts(row):
    cells = list(row.cells.items())
    return {(cell,) for cell in cells} | set(itertools.combinations(cells, 2))


# How masters are kept

LAYOUTS = {
    "a_master_each": {},
    "flat": dict(flat_master=True),
    "half_grads": dict(flat_master=True, half_grads=True),
    "16_bit_states": dict(flat_master=True),  # and `state_dtype`, see `settings`
}
DTYPES = {"float32": FP32, "float16": FP16, "bfloat16": BF16}


def read_late(monkeypatch):
    """Take this CPU's checks for a GPU's, which nobody has read; return those that are waited for.

    `DummyEvent` is over once somebody has waited for it.
    """
    waits = []

    class DummyEvent:
        def query(self):
            return self in waits

        def synchronize(self):
            waits.extend([] if self in waits else [self])

    class Late(scalers.Late):
        def __init__(self, value):
            super().__init__(value)
            self.copy, self.event = value.clone(), DummyEvent()

    for module in (scalers, steps):
        monkeypatch.setattr(module, "Late", Late)
    monkeypatch.setattr(scalers, "READS_ON", set())
    return waits


@contextmanager
def small_chunks(size=48):
    """Cut vectors into chunks of so many numbers, as those of large models are."""
    from mixedfp.engine import flat

    before, flat.CHUNK = flat.CHUNK, size
    try:
        yield
    finally:
        flat.CHUNK = before


# Plain loops

ELEMENTWISE_OF_TORCH = {
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD_momentum": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD_nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": partial(optim.Adam, lr=0.01, weight_decay=0.01),
    "Adam_amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True, foreach=True),
    "Adam_tensor_rate": lambda ps: optim.Adam(ps, lr=torch.tensor(0.01)),  # a schedule fills it
    "AdamW": partial(optim.AdamW, lr=0.01),
    "AdamW_one_by_one": partial(optim.AdamW, lr=0.01, foreach=False, amsgrad=True),
    "NAdam": partial(optim.NAdam, lr=0.01, decoupled_weight_decay=True),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "Adamax": partial(optim.Adamax, lr=0.01, maximize=True),
    "Adagrad": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "Adadelta": partial(optim.Adadelta, lr=1.0),
    "ASGD": partial(optim.ASGD, lr=0.1, t0=3),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
}
FUSED = {
    "SGD_fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "AdamW_fused": partial(optim.AdamW, lr=0.01, fused=True),
    "Adagrad_fused": partial(optim.Adagrad, lr=0.1, fused=True),
}


# PyTorch's own errors: a fused Adagrad is for CPUs; older Adafactors look for `capturable` on CUDA
IS_OLD = torch.__version__ < "2.12"
NOT_ON_CUDA = {"Adagrad_fused", *(["Adafactor"] if IS_OLD else [])}
RECURRENT = {"lstm", "gru", "packed_gru"}


class NormedSGD(optim.SGD):
    """Divide each gradient by its norm: it looks at whole tensors, and nobody has heard of it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    p.grad = p.grad / (p.grad.norm() + 1)
        return super().step(closure)


OTHERS_OF_TORCH = {
    "Adafactor": partial(optim.Adafactor, lr=0.05),
    "an_optimizer_of_ones_own": partial(NormedSGD, lr=0.1, momentum=0.9),
}
OF_TORCH = ELEMENTWISE_OF_TORCH | FUSED | OTHERS_OF_TORCH
WITH_16_BIT_STATES = {
    "SGD_momentum": "momentum_buffer", "AdamW": "exp_avg", "adam": "grad_avg",
    "sgd": "grad_avg", "torch_adamw": "exp_avg",
}  # fmt: skip


def settings(row):
    """Return the keywords for how the masters of `row` are kept."""
    found = dict(LAYOUTS[row.layout])
    if row.layout == "16_bit_states":
        found["state_dtype"] = {WITH_16_BIT_STATES[row.optimizer]: BF16}
    return found


def loop_allows(row):
    """Whether PyTorch alone can do it, and we promise it."""
    cells, optimizer = row.cells, row.optimizer
    workflow = cells.get("workflow", "iterating")
    if DEVICE == "cuda" and optimizer in NOT_ON_CUDA:
        return False
    if DEVICE == "cuda" and (optimizer, workflow) == ("SGD_nesterov", "looking_at_everything"):
        return False  # over whole tensors it writes into the gradients, in chunks into copies
    if optimizer in FUSED and row.model == "complex":
        return False
    if IS_OLD and optimizer == "Adagrad" and workflow == "adding_a_group":
        return False
    # PyTorch's fused SGD fails where a layer gets its first gradient after the others
    if optimizer == "SGD_fused" and (
        row.model in ("sometimes_used", "counter")
        or workflow not in ("iterating", "scaling_the_loss", "clipping", "accumulating")
    ):
        return False
    if workflow == "penalizing_gradients" and row.model in _NO_DOUBLE_BACKWARD:
        return False
    if row.model == "complex" and (
        optimizer in ("Rprop", "Adafactor")
        or workflow in ("scaling_the_loss", "clipping")
        or cells.get("scaler") == "GradScaler"
    ):
        return False
    if row.model == "empty" and optimizer == "Adafactor":
        return False
    return _keeps(row, OTHERS_OF_TORCH | FUSED)


_NO_DOUBLE_BACKWARD = {"recomputed_reentrant", "own_function", "packed_gru", "lstm", "gru"}


def _keeps(row, others):
    cells, layout = row.cells, row.cells.get("layout")
    is_float32 = cells.get("precision") == "float32"
    if layout == "16_bit_states" and (is_float32 or row.optimizer not in WITH_16_BIT_STATES):
        return False
    if layout == "half_grads":  # what is used twice is added up in 16 bits
        once = cells.get("workflow", "iterating") in ONE_BACKWARD_A_STEP
        return once and row.optimizer not in others and row.model not in USED_TWICE
    return True


USED_TWICE = {"twice", "tied", "own_function", "weight_norm", "spectral_norm"}
USED_TWICE |= {"lstm", "gru", "packed_gru"}


ONE_BACKWARD_A_STEP = {"iterating", "scaling_the_loss", "setting_rates", "freezing", "fine_tuning"}


class Loop:
    """A training loop under way: plain where `dtype` is None, else with `with_masters`."""

    def __init__(self, row, dtype=None, **kept):
        torch.manual_seed(1)
        self.row, self.dtype, self.kept = row, dtype, kept
        self.is_plain, self.net, self.log = dtype is None, NETS[row.model], []
        self.model = self.net.build()
        self.left_out = set()
        self.opt = self.make_opt()
        self.scaler, self.scale, self.seen = None, 1.0, []
        if not self.is_plain:
            self.wrap()
        torch.manual_seed(2)

    def make_opt(self):
        """Make the optimizer, with two groups where it takes them."""
        held = [p for p in self.params if p not in self.left_out]
        groups = {"params": held[::2]}, {"params": held[1::2], "lr": 0.02}
        return OF_TORCH[self.row.optimizer](list(groups))

    def wrap(self):
        """Give the model masters."""
        before = self.opt
        self.model, self.opt = with_masters(self.model, self.opt, dtype=self.dtype, **self.kept)
        assert self.opt is before

    @property
    def params(self):
        """The model's parameters."""
        return list(self.model.parameters())

    with_grads = params  # whose gradients are clipped

    # the verbs

    def forward(self, x):
        """Predict."""
        return self.model(x)

    def loss(self, i):
        """Return the loss of batch `i`."""
        x, y = self.net.batch(i)
        loss = cross_entropy(self.forward(x), y)
        self.see(loss, "loss")
        return loss

    def backward(self, i, factor=1.0, stop=None):
        """Add the gradients of batch `i`; `stop` presses ctrl-C in the "forward" or "backward"."""
        hook = None if stop is None else self.model.head.register_forward_hook(partial(_stop, stop))
        try:
            loss = self.loss(i) * factor
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        finally:
            if hook is not None:
                hook.remove()

    def scale_by(self, scale, **settings):
        """Scale losses from here on."""
        make = torch.amp.GradScaler if self.is_plain else LossScaler
        self.scaler = make(DEVICE, init_scale=scale, growth_interval=3, **settings)

    def unscale(self):
        """Unscale the gradients."""
        if self.scaler is not None:
            self.scaler.unscale_(self.opt)

    def step(self):
        """Step; there may be no gradient at all."""
        if self.scaler is None:
            self.opt.step()
        elif any(p.grad is not None for p in self.with_grads):
            self.scaler.step(self.opt)
            self.scaler.update()

    def zero_grad(self, set_to_none=True):
        """Clear the gradients."""
        self.opt.zero_grad(set_to_none=set_to_none)

    def iterate(self, n, first=0):
        """Train on `n` batches."""
        for i in range(first, first + n):
            self.zero_grad()
            self.backward(i)
            self.step()

    def step_with_closure(self, i):
        """Step with a closure."""

        def closure():
            self.opt.zero_grad()
            loss = self.loss(i)
            loss.backward()
            return loss

        self.see(self.opt.step(closure), "loss")

    def train_only(self, *parts):
        """Freeze all but these parts."""
        for name, p in self.model.named_parameters():
            p.requires_grad_(name.split(".")[0] in parts and p.dtype != torch.float64)

    def leave_out(self, part):
        """Have the optimizer train all but this part; return the part's parameters."""
        new = list(getattr(self.model, part).parameters())
        self.left_out = set(new)
        self.again()
        return [p for p in self.params if p in self.left_out]

    def again(self):
        """Make the optimizer anew."""
        if not self.is_plain:
            self.opt.masters.restore()
        self.opt = self.make_opt()
        if not self.is_plain:
            self.wrap()

    def there_and_back(self):
        """Go to plain float32 and back, with the same optimizer."""
        if not self.is_plain:
            before = plain(dict(self.model.state_dict()))
            assert self.opt.masters.restore() is self.model
            assert_same(plain(dict(self.model.state_dict())), before)
            self.wrap()

    # what is seen

    def see(self, what, name="seen"):
        """Remember it."""
        self.log.append({name: plain(what)})

    def look(self):
        """Remember the model, the gradients and the optimizer as they are."""
        self.see(self.state(), "state")
        self.see([p.grad for p in self.with_grads], "gradients")
        repr(self.opt)

    def state(self):
        """Return what goes into a file."""
        return {"model": dict(self.model.state_dict()), "opt": self.opt.state_dict()}

    def load(self, state):
        """Load it."""
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(copy.deepcopy(state["opt"]))

    def end(self):
        """Return all that was seen, and what there is at the end."""
        self.see(self.state(), "state")
        self.see([p.requires_grad for p in self.params], "trained")
        if self.scaler is not None:
            self.see(self.scaler.get_scale(), "loss scale")
        return self.log


def _stop(when, module, args, out):
    if when == "forward":
        raise KeyboardInterrupt
    out.register_hook(_press)


def _press(*_):
    raise KeyboardInterrupt


class ByHand(Loop):
    """The oracle: a 16-bit copy of the model, float32 masters, a plain optimizer over these."""

    def __init__(self, row, dtype, state_dtype=(), **others):
        super().__init__(row)
        self.half, self.dtype, self.scale, self.used = self.net.build(), dtype, 1.0, 1.0
        self.half.load_state_dict(self.model.state_dict())
        self.state_dtype = dict(state_dtype)
        if isinstance(self.half.stem, nn.Embedding):
            self.half.stem.register_forward_hook(lambda m, args, out: out.to(dtype))
        if DEVICE == "cuda":  # where autocast's norms return float32
            for m in self.half.modules():
                if part := part_of(m, has_copies=False):
                    m.forward = part(m).compute
        torch.manual_seed(2)
        self.pairs = list(zip(self.half.parameters(), self.model.parameters(), strict=True))
        wide = nn.modules.batchnorm._NormBase, nn.Embedding, ParametrizationList
        wide = [m for m in self.half.modules() if isinstance(m, wide)]
        wide = {p for m in wide for p in m.parameters()}
        for p, m in self.pairs:
            if p not in wide and p.dtype == FP32:
                p.data = m.detach().to(dtype)
                p.grad_dtype = dtype  # what is used twice is added up in 16 bits
        self.round_states()

    def forward(self, x):
        """Predict in 16 bits."""
        with torch.autocast(DEVICE, self.dtype):
            return self.half(x).float()

    def backward(self, i, factor=1.0, stop=None):
        """Add the gradients of the copy, widened, to those of the masters."""
        (self.loss(i) * factor * self.scale).backward()
        self.used = self.scale
        for p, m in self.pairs:
            if p.grad is not None:
                g = p.grad.to(m.dtype)
                m.grad = g if m.grad is None else m.grad + g
                p.grad = None

    def scale_by(self, scale, **settings):
        """Scale losses from here on; after three steps by twice as much."""
        self.scale, self.steps = scale, 0

    def unscale(self):
        """Divide."""
        for _, m in self.pairs:
            if m.grad is not None:
                m.grad.mul_(1 / self.used)
        self.used = 1.0

    def step(self):
        """Step the masters, and round them into the copy."""
        self.unscale()
        self.opt.step()
        for p, m in self.pairs:
            p.data = m.detach().to(p.dtype)
        self.round_states()
        if self.scale != 1:
            self.steps += 1
            self.scale *= 1 + (self.steps % 3 == 0)

    def round_states(self):
        """Leave in 16 bits what is kept in them between steps."""
        for p, state in self.opt.state.items():
            for name in self.state_dtype.keys() & state.keys() if p.ndim else ():
                state[name].copy_(state[name].to(self.state_dtype[name]))

    def train_only(self, *parts):
        """Freeze all but these parts, of the copy too."""
        super().train_only(*parts)
        for p, m in self.pairs:
            p.requires_grad_(m.requires_grad)

    def end(self):
        """Return what a `Loop` returns; buffers are the copy's."""
        self.model.load_state_dict(dict(self.half.named_buffers()), strict=False)
        return super().end() + ([] if self.scale == 1 else [{"loss scale": self.scale}])


def train_loop(row, dtype=None, make=Loop, **kept):
    """Run the workflow of `row`; return what is seen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of orders that a workflow makes up
        run = make(row, dtype, **kept)
        LOOPS[row.workflow](run)
        return run.end()


# Fits


def three_groups(model):
    """Split a model in stem, layers and head, of which none is empty."""
    return [g for g in map(params, (model.stem, model.layers, model.head)) if g]


def learner(row, dtype=None, path=None, **kept):
    """Return a silent Learner: plain fastai's where `dtype` is None."""
    net = NETS[row.model]
    dls = make_dls(*net.batch(0, 20), n_valid=4, bs=4)
    mixed = [] if dtype is None else [MixedPrecision(dtype=dtype, **kept)]
    return make_learner(row.optimizer, net.build, three_groups, dls, path=path, cbs=mixed)


def train_fit(row, dtype=None, **kept):
    """Train a new learner; return what there is at the end, back in plain float32."""
    with TemporaryDirectory() as path, warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")  # fastai's, of freezing and of saving
        learn = learner(row, dtype, path, **kept)
        torch.manual_seed(0)
        FITS[row.workflow](learn)
        in_training = learn_state(learn)
        if dtype is not None:
            learn.to_fp32()
            assert_same(learn_state(learn), in_training)
            assert_plain(learn.model, row)
        return in_training


def assert_plain(model, row):
    """Assert that nothing of ours is on `model`, and that it has PyTorch's own dtypes."""
    other = NETS[row.model].build()
    assert type(model) is type(other) and vars(model).keys() >= vars(other).keys()
    for a, b in zip(model.modules(), other.modules(), strict=True):
        assert len(a._forward_hooks) == len(b._forward_hooks)
        assert len(a._state_dict_hooks) == len(b._state_dict_hooks)
        assert len(a._load_state_dict_pre_hooks) == len(b._load_state_dict_pre_hooks)
    dtypes = {k: v.dtype for k, v in model.state_dict().items()}
    fresh = {k: v.dtype for k, v in other.state_dict().items()}
    assert {k: dtypes[k] for k in fresh} == fresh  # a forward pass may have made a buffer
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert (p.dtype, p.grad_dtype) == (q.dtype, q.grad_dtype)


def learn_state(learn):
    """Return copies of all that training changes."""
    return {
        "weights": weights(learn),
        "opt": opt_state(learn),
        "frozen": [not p.requires_grad for p in learn.model.parameters()],
    }


def fit_allows(row):
    """Whether fastai alone can do it, and we promise it."""
    workflow = row.cells.get("workflow")
    if (row.model, workflow) == ("counter", "finding_a_rate"):
        return False  # it first saves a model without the late buffer, and cannot load this
    if (row.model, row.cells.get("optimizer")) == ("complex", "lamb"):
        return False  # it compares norms, which are complex
    if DEVICE == "cuda" and row.model in RECURRENT and workflow == "evaluating_while_training":
        return False  # cuDNN refuses it
    return _keeps(row, set(OPTIMIZERS) - set(ELEMENTWISE) | {"ranger"})


# An interrupt at any line of ours


OURS = str(Path(mixedfp.__file__).parent)


@contextmanager
def interrupt_at(line):
    """Press ctrl-C when the library comes to its line number `line`, counted as it runs."""
    left = [line]

    def trace(frame, event, arg):
        code = frame.f_code
        if not code.co_filename.startswith(OURS):
            return None
        # a signal never comes between a block and its exit, where `with` is traced again
        if event == "line" and not linecache.getline(
            code.co_filename, frame.f_lineno
        ).lstrip().startswith("with "):
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield left
    finally:
        sys.settrace(before)
