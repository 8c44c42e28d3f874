"""Checks that each module imports only from the floors below it.

    1 numbers   torch_private, formats, testing ‖ nested, sharded
    2 ideas     cast ‖ master ‖ scaler, layerwise
    3 engine    in_float32, rounded, forward, masters, flat: in this order
    4 step      step; then diagnose, which inspects a model's numbers without a trainer: report,
                audit, memory, overflow, and the package itself, which exports their names
    5 trainers  optimizer, resume, callback ‖ skorch ‖ trainers, checkpoint ‖ fsdp
    6 tools     examples, compare, all

Floors 1 to 4, `optimizer`, `resume` and `trainers` need only torch, fastcore and the standard
library (`resume` also NumPy, whose random state it saves); a function there can still import
matplotlib or pandas when it draws a plot or a table, and `trainers` a trainer's packages. `compare`
imports the training code inside a function, so that `--help` responds at once.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from notebooks import ROOT

PACKAGE = "mixedfp"
ENGINE = "in_float32 rounded forward masters flat".split()
# each module may import those on earlier lines and, in a list, those before it
FLOORS = [
    [{"torch_private"}, {"formats"}, {"testing", "nested"}, {"sharded"}],
    [{"cast", "master", "scaler"}, {"layerwise"}],
    [{f"engine.{name}"} for name in ENGINE],
    [{"step"}, {"diagnose.report", "diagnose.audit", "diagnose.memory"}, {"diagnose.overflow"}]
    + [{"diagnose"}],
    [{"optimizer", "resume"}, {"callback", "skorch", "trainers"}, {"checkpoint", "fsdp"}],
    [{"examples"}, {"compare"}, {"all"}],
]
STEPS = [names for floor in FLOORS for names in floor]
BELOW = {name: set().union(*STEPS[:i]) for i, names in enumerate(STEPS) for name in names}
BARE = set().union(*(names for floor in FLOORS[:4] for names in floor))
BARE |= {"optimizer", "resume", "trainers"}

STANDS_BESIDE = {"callback": "skorch", "checkpoint": "skorch", "skorch": "fastai"}
ON_IMPORT = sys.stdlib_module_names | {"torch", "fastcore"}
ALSO = {"resume": {"numpy"}}
IN_FUNCTIONS = {name: ON_IMPORT | {"matplotlib", "pandas"} for name in BELOW}


def imports(node: ast.AST, here: str, in_function: bool = False) -> Iterator[tuple[int, str, bool]]:
    """Yield line, dotted name and whether it is in a function, for each import below `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield child.lineno, alias.name, in_function
        elif isinstance(child, ast.ImportFrom):
            source = child.module
            if child.level:  # relative to the module `here`
                source = ".".join([*here.split(".")[: -child.level], child.module or ""]).strip(".")
            for alias in child.names:  # `from . import cast` names a module, so keep the name
                yield child.lineno, f"{source}.{alias.name}", in_function
        else:
            inside = in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from imports(child, here, inside)


def complaint(module: str, name: str, in_function: bool) -> str | None:
    """Return an error message if `module` may not import `name`, else None."""
    package, *rest = name.split(".")
    if package == PACKAGE:
        names = ".".join(rest[:2]), "".join(rest[:1])
        own = next((name for name in names if name in BELOW), None)
        if own not in (None, module) and own not in BELOW[module]:
            return f"imports {PACKAGE}.{own}, which is not below it"
    elif module == "compare" and not in_function and package not in sys.stdlib_module_names:
        return f"imports {package}: use only the standard library, so that `--help` is fast"
    elif module in BARE and package not in (
        IN_FUNCTIONS[module] if in_function else ON_IMPORT | ALSO.get(module, set())
    ):
        return f"imports {package}: only torch and fastcore are allowed there"
    elif package == STANDS_BESIDE.get(module):
        return f"imports {package}: trainers must not import each other's libraries"
    return None


def check(path: Path) -> list[str]:
    """Return the import errors of the module at `path`."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    shown, is_package = "/".join(parts) + ".py", parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    if module not in BELOW:
        return [f"{shown}: has no floor; give it one in tools/check_layers.py"]
    here = f"{PACKAGE}.{module}" + ".__init__" * is_package
    found = imports(ast.parse(path.read_text(encoding="utf-8")), here)
    told = [(line, complaint(module, name, inside)) for line, name, inside in found]
    return [f"{shown}:{line}: {text}" for line, text in dict.fromkeys(told) if text]


def main() -> int:
    """Check the whole package."""
    modules = sorted(p for p in (ROOT / PACKAGE).rglob("*.py") if not p.stem.startswith("_"))
    modules.append(ROOT / PACKAGE / "diagnose" / "__init__.py")
    found = [text for path in modules for text in check(path)]
    print("\n".join(found) if found else f"layers: {len(modules)} modules, all in order")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
