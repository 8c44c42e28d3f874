"""Prints the size of the package, tests and scripts, and fails if one exceeds its limit."""

import ast
import re
import sys
from pathlib import Path

from notebooks import ROOT

LINES, CODE, MODULES, FUNCTION = 6890, 4900, 29, 60  # all lines of all modules
TEST_LINES, SCRIPT_LINES = 11500, 3730  # bench and tools
BANNED = re.compile(r"_getframe|f_locals|inspect\.stack|\bexec\(")


def is_patch(decorator: ast.expr) -> bool:
    """Return whether `decorator` is fastcore's `patch` or `patch_to`."""
    return getattr(getattr(decorator, "func", decorator), "id", "") in ("patch", "patch_to")


def look(path: Path) -> tuple[int, int, list[str]]:
    """Return the lines of `path`, its lines of code, and its errors."""
    text = path.read_text(encoding="utf-8")
    lines, docs, wrong = text.splitlines(), set(), []
    for node in ast.walk(ast.parse(text)):
        first = getattr(node, "body", [None])
        first = first[0] if isinstance(first, list) and first else None
        is_doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        if is_doc and isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
            docs |= set(range(first.lineno, first.end_lineno + 1))
        if isinstance(node, ast.FunctionDef):
            n = node.end_lineno - node.lineno + 1
            if n - max((len(node.args.args) + len(node.args.kwonlyargs)), 0) > FUNCTION:
                wrong.append(f"{path.name}: {node.name} has {n} lines")
            on = getattr(node.args.args[0].annotation, "id", "") if node.args.args else ""
            if any(map(is_patch, node.decorator_list)) and on != "Learner":
                wrong.append(f"{path.name}: @patch on {on or 'no class'}, {node.name}")
    wrong += [f"{path.name}: uses {found}" for found in set(BANNED.findall(text))]
    is_code = [
        bool(line.strip()) and not line.strip().startswith("#") and i not in docs
        for i, line in enumerate(lines, 1)
    ]
    return len(lines), sum(is_code), wrong


def count_lines(folder: str) -> int:
    """Return the lines of all modules in `folder`."""
    return sum(len(p.read_text().splitlines()) for p in (ROOT / folder).rglob("*.py"))


def main() -> int:
    """Print the figures and the errors."""
    modules = sorted(p for p in (ROOT / "mixedfp").rglob("*.py") if p.stem != "_modidx")
    found = [look(path) for path in modules]
    lines, code = sum(n for n, _, _ in found), sum(n for _, n, _ in found)
    tests = count_lines("tests")
    scripts = count_lines("bench") + count_lines("tools")
    modules = [p for p in modules if p.stem != "__init__"]
    print(
        f"size: {lines} lines (limit {LINES}), {code} of code ({CODE}), {len(modules)} modules "
        f"({MODULES}); tests: {tests} lines ({TEST_LINES}); bench and tools: {scripts} "
        f"({SCRIPT_LINES})"
    )
    wrong = [text for _, _, texts in found for text in texts]
    limits = [(lines, LINES), (code, CODE), (len(modules), MODULES), (tests, TEST_LINES)]
    limits.append((scripts, SCRIPT_LINES))
    wrong += [f"{n} is above the limit of {limit}" for n, limit in limits if n > limit]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
