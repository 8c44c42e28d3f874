"""Finds where a file outside of the library reaches into its insides.

A test or a benchmark imports what a user imports: the names below, of the modules below. All else
is the engine's, whose modules and names may move: `tests/inside.py` alone knows them.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache

from notebooks import ROOT

PACKAGE = "mixedfp"
# what is public of a module; None: all that it exports
PUBLIC: dict[str, str | None] = dict.fromkeys(
    """all callback checkpoint command compare examples formats memory_format report skorch
    testing""".split()
)
PUBLIC |= {
    "cast": "bn2float model2float model2half to_float to_half",
    "layerwise": "LayerInfo LayerwiseGradientScaler",
    "master": "get_master master2model model_g2master_g split_bn_bias",
    "optimizer": "MasterOptimizer with_masters",
    "sharded_masters": "ShardedOptimizer sharded_masters",
    "overflow": "Overflow find_overflow heal random_state",
    "scaler": "LossScaler",
    "step": "MixedStep check_elementwise is_elementwise",
}
# attributes without an underscore that a user has no business with, some with whose they are
INNER = frozenset(
    """come_back exclusive is_stepping is_there snapshot lay_out mixed.buffers mixed.forward
    mixed.masters move_states on_device one_pass opt.masters grads_to_master lend reclaim
    buckets""".split()
)
# private attributes of objects of torch, fastai and Python that tests look at
THEIRS = frozenset(
    """_backward_hooks _base _buffers _field_defaults _fields _forward_hooks _forward_pre_hooks
    _found_inf_per_device _get_growth_tracker _load_state_dict_pre_hooks _modules
    _optimizer_step_pre_hooks _parameters _post_accumulate_grad_hooks _replace
    _replicate_for_data_parallel _sequence_nr _state_dict_hooks _step _values
    _version""".split()
)
NAMED = re.compile(rf"{PACKAGE}(\.\w+)+")
BY_NAME = {"getattr", "setattr", "delattr"}  # functions, and methods of a MonkeyPatch


@cache
def public_names(module: str) -> frozenset[str]:
    """Return the names of `module` that are its own; none, where there is no such module."""
    if module not in PUBLIC:
        return frozenset()
    names = PUBLIC[module]
    if names is not None:
        return frozenset(names.split())
    tree = ast.parse((ROOT / PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def is_private(name: str) -> bool:
    """Whether `name` begins with one underscore."""
    return name.startswith("_") and not name.endswith("__")


def inside_of(dotted: str) -> str | None:
    """Say what is wrong with the name `mixedfp.module.name`, or a part of it, None if nothing."""
    _, *rest = dotted.split(".")
    if not rest or rest[0].endswith("__"):
        return None
    if rest[0] not in PUBLIC:
        return f"{PACKAGE}.{rest[0]} is not public"
    names = public_names(rest[0]) | {"*" if rest[0] == "all" else ""}
    if len(rest) > 1 and rest[1] not in names and not rest[1].endswith("__"):
        return f"{PACKAGE}.{rest[0]}.{rest[1]} is not public"
    return None


class _Finder(ast.NodeVisitor):
    """Walks over a file and notes what it should not know."""

    def __init__(self, tree: ast.AST):
        self.found: list[tuple[int, str]] = []
        self.ours: dict[str, str] = {}  # names that stand for a module or a thing of the library
        self.others: set[str] = set()  # those of other objects
        self.docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            self._bind(node)
        self.visit(tree)

    def _bind(self, node):
        if isinstance(node, ast.Import):
            for a in node.names:
                name = a.asname or a.name.split(".")[0]
                self._bind_name(name, a.name if a.asname else name)
        elif isinstance(node, ast.ImportFrom):
            for a in node.names:
                self._bind_name(a.asname or a.name, f"{node.module}.{a.name}")

    def _bind_name(self, name, stands_for):
        if stands_for.split(".")[0] == PACKAGE:
            self.ours[name] = stands_for
        else:
            self.others.add(name)

    def _say(self, node, text):
        if text is not None:
            self.found.append((node.lineno, text))

    def _dotted(self, node):
        """Return the name of ours that `node` stands for, None if it is none."""
        if isinstance(node, ast.Name):
            return self.ours.get(node.id)
        if isinstance(node, ast.Attribute):
            before = self._dotted(node.value)
            return before and f"{before}.{node.attr}"
        return None

    def _is_own(self, node):
        """Whether `node` is the object itself, or of another package."""
        if isinstance(node, ast.Call):
            return isinstance(node.func, ast.Name) and node.func.id == "super"
        while isinstance(node, ast.Attribute):
            node = node.value
            if isinstance(node, ast.Name):
                return node.id in self.others
        return isinstance(node, ast.Name) and node.id in {"self", "cls", *self.others}

    def _check_attribute(self, node, owner, name):
        dotted = self._dotted(owner)
        if dotted is not None and inside_of(f"{dotted}.{name}"):
            self._say(node, inside_of(f"{dotted}.{name}"))
            return
        full = f"{ast.unparse(owner)}.{name}"
        is_inner = name in INNER or ".".join(full.split(".")[-2:]) in INNER
        if not self._is_own(owner) and (is_inner or is_private(name) and name not in THEIRS):
            self._say(node, f"{full} is not public")

    def visit_Import(self, node):
        for a in node.names:
            if a.name.split(".")[0] == PACKAGE:
                self._say(node, inside_of(a.name))

    def visit_ImportFrom(self, node):
        if (node.module or "").split(".")[0] == PACKAGE:
            for a in node.names:
                self._say(node, inside_of(f"{node.module}.{a.name}"))

    def visit_Attribute(self, node):
        self._check_attribute(node, node.value, node.attr)
        self.generic_visit(node)

    def visit_Call(self, node):
        function = node.func.id if isinstance(node.func, ast.Name) else None
        function = node.func.attr if isinstance(node.func, ast.Attribute) else function
        if function in BY_NAME and len(node.args) > 1:
            owner, name = node.args[:2]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self._check_attribute(node, owner, name.value)
        self.generic_visit(node)

    def visit_Constant(self, node):
        if not isinstance(node.value, str) or id(node) in self.docstrings:
            return
        if NAMED.fullmatch(node.value):
            self._say(node, inside_of(node.value))
        elif re.search(rf"\b(import|from) {PACKAGE}\b", node.value):  # maybe another process's
            try:
                program = ast.parse(node.value)
            except SyntaxError:
                return
            for line, text in _Finder(program).found:
                self.found.append((node.lineno + line - 1, text))


def reaches_inside(source: str) -> Iterator[str]:
    """Say where `source` uses what is not public, with the number of the line."""
    for line, text in sorted(set(_Finder(ast.parse(source)).found)):
        yield f"line {line}: {text}: give tests/inside.py a function for it"
