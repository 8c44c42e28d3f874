"""The examples of nbs/15_trainers.ipynb for tests: imports, functions and classes of its cells."""

import ast
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import nbformat  # noqa: E402

PAGE = Path(__file__).resolve().parent.parent / "nbs" / "15_trainers.ipynb"
DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
page: dict[str, Any] = {"__name__": __name__}

for cell in nbformat.read(PAGE, 4).cells:
    if cell.cell_type == "code" and not cell.source.startswith("#|"):
        tree = ast.parse(cell.source)
        tree.body = [node for node in tree.body if isinstance(node, DEFINES)]
        exec(compile(tree, str(PAGE), "exec"), page)  # noqa: S102
