"""Runs notebooks, each in a process of its own, and counts those that pass.

By default in a fresh Jupyter kernel, writing nothing: the way that needs no nbdev.
`--nbdev` hands each to `nbdev_test` instead; `--write` keeps the new outputs.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbconvert.filters import strip_ansi
from nbconvert.preprocessors import CellExecutionError, ExecutePreprocessor
from notebooks import ROOT, all_notebooks, directives

NEVER = {"notest", "eval: false", "eval:false"}


def has_gpu() -> bool:
    """Say if PyTorch finds a CUDA device."""
    import torch  # here, not above: it takes seconds, and few notebooks ask

    return torch.cuda.is_available()


def is_skipped(cell: nbformat.NotebookNode) -> bool:
    """Say if `cell` is not to be run here."""
    if cell.cell_type != "code":
        return True
    marks = set(directives(cell.source))
    # the last cell of a notebook calls nbdev_export(): a job for its author, not for a test
    return bool(marks & NEVER) or "nbdev_export" in cell.source or "cuda" in marks and not has_gpu()


def anywhere(text: str) -> str:
    """Give `text`, often a warning, without the paths that only this machine has."""
    text = re.sub(r"[^\s'\"]*/site-packages/", "", text)
    text = re.sub(r"[^\s'\"]*/ipykernel_\d+/\d+\.py", "<cell>", text)
    return text.replace(f"{ROOT}/", "")


def is_noise(output: nbformat.NotebookNode) -> bool:
    """Say if `output` is only what the compiler logs where there is no GPU."""
    return output.get("name") == "stderr" and "No CUDA runtime is found" in output.text


def portable(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Give `output` with its texts made fit to be kept."""
    if "text" in output:
        output.text = anywhere(output.text)
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/"):
            output.data[kind] = anywhere(value)
    return output


def run_here(path: Path, write: bool) -> None:
    """Run the notebook at `path` in a fresh kernel; raise if a cell does."""
    nb = nbformat.read(path, as_version=4)
    to_run = [cell for cell in nb.cells if not is_skipped(cell)]
    part = nbformat.v4.new_notebook(cells=to_run)  # shares its cells with `nb`
    runner = ExecutePreprocessor(timeout=None, kernel_name="python3", record_timing=False)
    runner.preprocess(part, {"metadata": {"path": str(path.parent)}})
    if write:
        for cell, ran in zip(to_run, part.cells, strict=True):
            cell.outputs = [portable(output) for output in ran.outputs if not is_noise(output)]
        nbformat.write(nb, path)


def command(path: Path, args: argparse.Namespace) -> list[str]:
    """Give the command that runs the notebook at `path`."""
    if args.nbdev:
        return [str(Path(sys.executable).parent / "nbdev_test"), "--path", str(path)]
    return [sys.executable, __file__, "--here", str(path), *(["--write"] if args.write else [])]


def run_apart(path: Path, args: argparse.Namespace) -> bool:
    """Run the notebook at `path` in its own process, print how it went, and say if it passed."""
    threads = str(max(1, (os.cpu_count() or 1) // args.workers))
    limits = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if args.write:  # fastai brings warnings of PyTorch's that no reader can do anything about
        limits["PYTHONWARNINGS"] = "ignore::FutureWarning"
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command(path, args),
            cwd=ROOT,
            env={**os.environ, **limits},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=args.timeout,
        )
        passed, output = done.returncode == 0, done.stdout
    except subprocess.TimeoutExpired as stopped:
        passed, output = False, (stopped.stdout or b"") + b"\nstopped: it took too long"
    took = time.perf_counter() - start
    line = f"{'passed' if passed else 'FAILED'} {took:6.1f} s  {path.relative_to(ROOT)}"
    if not passed:
        line = f"{output.decode(errors='replace').strip()}\n{line}"
    print(line, flush=True)
    return passed


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="notebooks; all of them by default")
    parser.add_argument("--workers", type=int, default=1, help="notebooks at a time")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one notebook")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--nbdev", action="store_true", help="run them with nbdev_test")
    how.add_argument("--write", action="store_true", help="keep the new outputs")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        try:
            run_here(args.here, args.write)
        except CellExecutionError as error:  # its text is the cell and the traceback
            print(strip_ansi(str(error)))
            return 1
        return 0
    paths = [path.resolve() for path in args.paths] or all_notebooks()
    # lessons train models: begin with them, so that no worker waits long for the last
    paths.sort(key=lambda path: "tutorials" not in path.parts)
    with ThreadPoolExecutor(args.workers) as pool:
        results = list(pool.map(lambda path: run_apart(path, args), paths))
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
