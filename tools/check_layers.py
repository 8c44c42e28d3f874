"""Checks that each module imports only what stands below it.

    1 numbers   formats ‖ testing ‖ nested ‖ sharded   16 bits; tests; maps and checks; ranks
    2 ideas     cast ‖ master ‖ scaler ‖ layerwise   each readable alone
    3 engine    mixedfp.engine, in the order of ENGINE   how it is made exact and fast
    4 the step  step, overflow                   the way of one batch; where its inf came from
    5 trainers  optimizer, sharded_masters, callback ‖ skorch, checkpoint   loops, fastai, skorch
    6 tools     report, memory_format, command, examples, compare, all     what the numbers did;
                what is faster; data, the command, what users import

`engine.torch_private` knows nothing of ours: every floor may use it, the first one too.
What is above the step imports the engine only through `step`, `optimizer` and `sharded_masters`.
Floors 1 to 4 and those two need torch, fastcore's `patch` and the standard library alone; a
function there may still import matplotlib or pandas when it is asked for a plot or a table.
`command` imports the module that does what it reads when it has read it, in a function: the one
way down.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from notebooks import ROOT

PACKAGE = "mixedfp"
PRIVATE = "engine.torch_private"  # of PyTorch
NUMBERS = {"formats", "testing", "nested", "sharded", PRIVATE}
IDEAS = {"cast", "master", "scaler", "layerwise"}
# each of these may import those before it
ENGINE = [
    f"engine.{room}"
    for room in """ranks reducer codec full_state copies in_float32 autocast forward flat
    masters program recorder optim_access elementwise payback onepass buffers exchange gradients
    optim screen""".split()
]

BELOW = {PRIVATE: set(), "sharded": set(), "formats": {PRIVATE}}
BELOW |= {"testing": {PRIVATE, "formats"}, "nested": {PRIVATE, "formats"}}
BELOW |= {idea: NUMBERS for idea in IDEAS}
BELOW["master"] = NUMBERS | {"engine.masters"}  # shows it under its public name, when asked for it
for i, room in enumerate(ENGINE):
    BELOW[room] = NUMBERS | IDEAS | set(ENGINE[:i])
BELOW["step"] = NUMBERS | IDEAS | set(ENGINE)
BELOW["optimizer"] = BELOW["overflow"] = BELOW["step"] | {"step"}
BELOW["sharded_masters"] = BELOW["optimizer"] | {"optimizer"}
BELOW["report"] = BELOW["optimizer"] | {"optimizer"}
BELOW["memory_format"] = BELOW["report"] | {"report"}
CORE = set(BELOW)
UP_TO_STEP = NUMBERS | IDEAS | {"step", "overflow", "optimizer", "report", "memory_format"}
BELOW["callback"] = BELOW["skorch"] = UP_TO_STEP
BELOW["checkpoint"] = UP_TO_STEP | {"callback"}
BELOW["examples"] = UP_TO_STEP | {"callback", "skorch", "checkpoint"}
BELOW["command"] = set()
BELOW["compare"] = BELOW["examples"] | {"examples", "command"}
BELOW["all"] = BELOW["compare"] | {"compare"}

# the package that each trainer leaves alone
STANDS_BESIDE = {"callback": "skorch", "checkpoint": "skorch", "skorch": "fastai"}
ON_IMPORT = sys.stdlib_module_names | {"torch", "fastcore"}  # its `patch`: a verb a cell
IN_FUNCTIONS = ON_IMPORT | {"matplotlib", "pandas"}
DOWN_IN_FUNCTIONS = {"command": {"compare"}}


def imports(node: ast.AST, here: str, in_function: bool = False) -> Iterator[tuple[int, str, bool]]:
    """Yield line, dotted name and whether a function does it, for each import below `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield child.lineno, alias.name, in_function
        elif isinstance(child, ast.ImportFrom):
            source = child.module
            if child.level:  # from the module `here`, so many packages up
                source = ".".join([*here.split(".")[: -child.level], child.module or ""]).strip(".")
            for alias in child.names:  # `from . import cast` names a module, so keep the name
                yield child.lineno, f"{source}.{alias.name}", in_function
        else:
            inside = in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from imports(child, here, inside)


def module_of(rest: list[str]) -> str:
    """Return which module of ours a dotted name, without the package, is or is in."""
    return ".".join(rest[:2]) if rest[:1] == ["engine"] else "".join(rest[:1])


def complaint(module: str, name: str, in_function: bool) -> str | None:
    """Say what is wrong with `module` importing `name`, if anything is."""
    package, *rest = name.split(".")
    if package == PACKAGE:
        own = module_of(rest)
        if in_function and own in DOWN_IN_FUNCTIONS.get(module, ()):
            return None
        if own in BELOW and own not in BELOW[module]:
            return f"imports {PACKAGE}.{own}, which does not stand below it"
    elif module == "command" and package not in sys.stdlib_module_names:
        return f"imports {package}: only the standard library, so that help comes at once"
    elif module in CORE and package not in (IN_FUNCTIONS if in_function else ON_IMPORT):
        return f"imports {package}: up to `optimizer`, only torch and fastcore"
    elif package == STANDS_BESIDE.get(module):
        return f"imports {package}: the trainers stand side by side"
    return None


def check(path: Path) -> list[str]:
    """List what is wrong with the imports of the module at `path`."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    module, shown = ".".join(parts), "/".join(parts) + ".py"
    if module not in BELOW:
        return [f"{shown}: has no floor; give it one in tools/check_layers.py"]
    here = f"{PACKAGE}.{module}"
    found = imports(ast.parse(path.read_text(encoding="utf-8")), here)
    said = [(line, complaint(module, name, inside)) for line, name, inside in found]
    return [f"{shown}:{line}: {text}" for line, text in dict.fromkeys(said) if text]


def main() -> int:
    """Check the whole package."""
    modules = sorted(p for p in (ROOT / PACKAGE).rglob("*.py") if not p.stem.startswith("_"))
    found = [text for path in modules for text in check(path)]
    print("\n".join(found) if found else f"layers: {len(modules)} modules, all in order")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
