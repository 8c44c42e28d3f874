"""Finds code and outputs that tests and saved notebooks must not contain.

fastcore's `test_eq`, `test_eq_type` and `test_close` treat float16 and float32 tensors as equal: in
this library they test nothing. `assert_same` of `mixedfp.testing` also checks the dtype. An output
with an error, or with a path of the machine it ran on, must not be published.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
from notebooks import ROOT, all_notebooks

BANNED = re.compile(r"\btest_(eq_type|eq|close)\b")
MACHINE = re.compile(r"(?<![\w.])/(work|root|tmp|home)/\S*")


def banned_tests(source: str) -> Iterator[str]:
    """Report the banned comparisons in `source`."""
    for found in sorted(set(BANNED.findall(source))):
        yield f"test_{found} ignores dtypes: use assert_same, or assert_close of torch.testing"


def texts(output: nbformat.NotebookNode) -> Iterator[str]:
    """Yield the texts of `output`, without pictures, whose characters mean nothing."""
    yield output.get("text", "")
    for kind, value in output.get("data", {}).items():
        if not kind.startswith("image/"):
            yield str(value)


def bad_outputs(cell: nbformat.NotebookNode) -> Iterator[str]:
    """Report errors in the saved outputs of `cell`."""
    for output in cell.outputs:
        if output.output_type == "error":
            yield f"its output is an error: {output.ename}: {output.evalue}"
        for path in {found[0] for text in texts(output) for found in MACHINE.finditer(text)}:
            yield f"its output contains a local path: {path}"


def check_notebook(path: Path) -> Iterator[str]:
    """Report errors in the notebook at `path`."""
    for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
        if cell.cell_type == "code":
            for text in [*banned_tests(cell.source), *bad_outputs(cell)]:
                yield f"{path.relative_to(ROOT)}, cell {number}: {text}"


def check_file(path: Path) -> Iterator[str]:
    """Report errors in the test or benchmark at `path`."""
    yield from banned_tests(path.read_text(encoding="utf-8"))


def main() -> int:
    """Check all notebooks, tests and benchmarks."""
    found = [text for path in all_notebooks() for text in check_notebook(path)]
    for path in sorted(p for folder in ("tests", "bench") for p in (ROOT / folder).rglob("*.py")):
        found += [f"{path.relative_to(ROOT)}: {text}" for text in check_file(path)]
    print("\n".join(found) if found else "tests and outputs: no errors")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
