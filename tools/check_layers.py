"""Checks that each module imports only what stands above it.

    formats   testing            what 16 bits can hold, and how it is tested
    cast                         what is cast
    master ‖ scaler ‖ layerwise  the weights; the scales: these do not know the casts
    onepass                      what an optimizer does, done in one pass over memory
    distributed                  what processes tell each other
    step                         one batch, in order
    optimizer ‖ report           for a plain PyTorch loop; what the numbers did
    callback ‖ skorch            trainers
    checkpoint                   a fastai run that goes on where it was killed
    command                      the options of `mixedfp_compare`: the standard library alone
    examples, compare            data, models, the comparison
    all                          what a fastai user imports

Down to `report` a module needs torch and the standard library alone; a function there may still
import matplotlib when it is asked for a plot. `command` imports the module that does what it reads
when it has read it, in a function: the one way down.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from notebooks import ROOT

PACKAGE = "mixedfp"
ABOVE = {"formats": set(), "testing": {"formats"}}
ABOVE["cast"] = {"formats", "testing"}
ABOVE["master"] = {"formats", "testing", "cast"}
ABOVE["scaler"] = ABOVE["layerwise"] = ABOVE["distributed"] = {"formats", "testing"}
ABOVE["onepass"] = {"formats", "testing", "cast", "master"}
ABOVE["step"] = ABOVE["onepass"] | {"onepass", "scaler", "layerwise", "distributed"}
ABOVE["optimizer"] = ABOVE["report"] = ABOVE["step"] | {"step"}
CORE = set(ABOVE)
ABOVE["callback"] = ABOVE["skorch"] = CORE
ABOVE["checkpoint"] = CORE | {"callback"}
ABOVE["examples"] = CORE | {"callback", "skorch", "checkpoint"}
ABOVE["command"] = set()
ABOVE["compare"] = ABOVE["examples"] | {"examples", "command"}
ABOVE["all"] = ABOVE["compare"] | {"compare"}

# the package that each trainer leaves alone
STANDS_BESIDE = {"callback": "skorch", "checkpoint": "skorch", "skorch": "fastai"}
ON_IMPORT = sys.stdlib_module_names | {"torch"}
IN_FUNCTIONS = ON_IMPORT | {"matplotlib"}
DOWN_IN_FUNCTIONS = {"command": {"compare"}}


def imports(node: ast.AST, in_function: bool = False) -> Iterator[tuple[int, str, bool]]:
    """Yield line, dotted name and whether a function does it, for each import below `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield child.lineno, alias.name, in_function
        elif isinstance(child, ast.ImportFrom):
            source = f"{PACKAGE}.{child.module or ''}".rstrip(".") if child.level else child.module
            for alias in child.names:  # `from . import cast` names a module, so keep the name
                yield child.lineno, f"{source}.{alias.name}", in_function
        else:
            inside = in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from imports(child, inside)


def complaint(module: str, name: str, in_function: bool) -> str | None:
    """Say what is wrong with `module` importing `name`, if anything is."""
    package, *rest = name.split(".")
    if package == PACKAGE:
        own = rest[0] if rest else ""
        if in_function and own in DOWN_IN_FUNCTIONS.get(module, ()):
            return None
        if own in ABOVE and own not in ABOVE[module]:
            return f"imports {PACKAGE}.{own}, which does not stand above it"
    elif module == "command" and package not in sys.stdlib_module_names:
        return f"imports {package}: only the standard library, so that help comes at once"
    elif module in CORE and package not in (IN_FUNCTIONS if in_function else ON_IMPORT):
        return f"imports {package}: down to `report`, only torch and the standard library"
    elif package == STANDS_BESIDE.get(module):
        return f"imports {package}: the trainers stand side by side"
    return None


def check(path: Path) -> list[str]:
    """List what is wrong with the imports of the module at `path`."""
    if path.stem not in ABOVE:
        return [f"{path.name}: has no layer; give it one in tools/check_layers.py"]
    found = imports(ast.parse(path.read_text(encoding="utf-8")))
    said = [(line, complaint(path.stem, name, inside)) for line, name, inside in found]
    return [f"{path.name}:{line}: {text}" for line, text in dict.fromkeys(said) if text]


def main() -> int:
    """Check the whole package."""
    modules = sorted(p for p in (ROOT / PACKAGE).glob("*.py") if not p.stem.startswith("_"))
    found = [text for path in modules for text in check(path)]
    print("\n".join(found) if found else f"layers: {len(modules)} modules, all in order")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
