"""Runs notebooks and counts those that pass.

By default each runs in a fresh Jupyter kernel, without writing anything or needing nbdev.
`--write` saves the new outputs. `--nbdev` runs the command `nbdev_test` as its users do, several
notebooks in one process, and counts its reports; then `index.ipynb`, which nbdev_test skips.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbconvert.filters import strip_ansi
from nbconvert.preprocessors import CoalesceStreamsPreprocessor, ExecutePreprocessor
from notebooks import ROOT, all_notebooks, directives

NEVER = {"notest", "eval: false", "eval:false"}


def has_gpu() -> bool:
    """Return whether PyTorch finds a CUDA device."""
    import torch  # not at the top: it takes seconds, and few notebooks need it

    return torch.cuda.is_available()


def is_skipped(cell: nbformat.NotebookNode) -> bool:
    """Return whether `cell` should not be run here."""
    if cell.cell_type != "code":
        return True
    marks = set(directives(cell.source))
    # the last cell of a notebook calls nbdev_export(): for its author, not for a test
    return bool(marks & NEVER) or "nbdev_export" in cell.source or "cuda" in marks and not has_gpu()


def anywhere(text: str) -> str:
    """Return `text`, often a warning, without paths of this machine."""
    text = re.sub(r"[^\s'\"]*/site-packages/", "", text)
    text = re.sub(r"[^\s'\"]*/ipykernel_\d+/\d+\.py", "<cell>", text)
    return text.replace(f"{ROOT}/", "")


def is_noise(output: nbformat.NotebookNode) -> bool:
    """Return whether `output` is only the compiler's log message about a missing GPU."""
    return output.get("name") == "stderr" and "No CUDA runtime is found" in output.text


def portable(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return `output` with its texts ready to be saved."""
    if "text" in output:
        output.text = anywhere(output.text)
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/"):
            output.data[kind] = anywhere(value)
    return output


def run(path: Path, args: argparse.Namespace) -> bool:
    """Run the notebook at `path` in a fresh kernel, print and return whether it passed."""
    start, error = time.perf_counter(), ""
    nb = nbformat.read(path, as_version=4)
    to_run = [cell for cell in nb.cells if not is_skipped(cell)]
    part = nbformat.v4.new_notebook(cells=to_run)  # shares its cells with `nb`
    runner = ExecutePreprocessor(timeout=args.timeout, kernel_name="python3", record_timing=False)
    runner.extra_arguments = ["--log-level=40"]
    try:
        runner.preprocess(part, {"metadata": {"path": str(path.parent)}})
    except Exception as raised:  # by a cell: its text is the cell and the traceback
        error = strip_ansi(str(raised)) + "\n"
    if args.write and not error:
        part, _ = CoalesceStreamsPreprocessor().preprocess(part, {})  # lines come one by one
        for cell, ran in zip(to_run, part.cells, strict=True):
            cell.outputs = [portable(output) for output in ran.outputs if not is_noise(output)]
        nbformat.write(nb, path)
    took, shown = time.perf_counter() - start, path.relative_to(ROOT)
    print(f"{error}{'FAILED' if error else 'passed'} {took:6.1f} s  {shown}", flush=True)
    return not error


def run_nbdev(paths: list[Path], options: tuple[str, ...], timeout: float) -> Iterator[bool]:
    """Run `nbdev_test`, print its output, and yield for each of `paths` whether it passed."""
    test = [str(Path(sys.executable).parent / "nbdev_test"), "--do_print", "--timing", *options]
    streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process = subprocess.Popen(test, cwd=ROOT, start_new_session=True, **streams)
    try:
        output, _ = process.communicate(timeout=3 * timeout)  # for all of them
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0] + b"\nstopped: timed out"
    text = output.decode(errors="replace").strip()
    print(text, flush=True)
    failed = set(re.findall(r"^\t(\S+\.ipynb)$", text, re.MULTILINE))
    if process.returncode and not failed:  # for a reason other than a cell
        failed = {path.name for path in paths}
    for path in paths:
        passed = f"- Completed {path}" in text and path.name not in failed
        if not passed:
            print(f"FAILED {path.relative_to(ROOT)}")
        yield passed


def run_parts(args: argparse.Namespace) -> list[bool]:
    """Run all notebooks with `nbdev_test`, and return for each whether it passed.

    It runs them in order of name, so the lessons, which train models, would run last, and the
    longest of them alone. They therefore run as a separate part, in parallel with the others.
    """
    lessons, n = ROOT / "nbs" / "tutorials", ("--n_workers", str(max(1, args.workers // 2)))
    index, paths = ROOT / "index.ipynb", all_notebooks()
    others = [path for path in paths if path.parent != lessons and path != index]
    parts: list[tuple[list[Path], tuple[str, ...]]] = [
        ([path for path in paths if path.parent == lessons], (*n, "--path", str(lessons))),
        (others, (*n, "--skip_folder_re", "^[_.]|^tutorials$")),
        ([index], ("--path", str(index))),
    ]
    with ThreadPoolExecutor(min(2, args.workers)) as pool:
        found = pool.map(lambda part: list(run_nbdev(*part, args.timeout)), parts)
        return [passed for each in found for passed in each]


def run_all(paths: list[Path], args: argparse.Namespace) -> list[bool]:
    """Run the notebooks at `paths` and return for each whether it passed."""
    if args.nbdev:
        return run_parts(args)
    paths = [path.resolve() for path in paths] or all_notebooks()
    # lessons train models: start with them, so that workers do not wait long for the last
    paths.sort(key=lambda path: "tutorials" not in path.parts)
    with ThreadPoolExecutor(args.workers) as pool:
        return list(pool.map(lambda path: run(path, args), paths))


def main() -> int:
    """Run the notebooks selected on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="notebooks; all by default")
    parser.add_argument("--workers", type=int, default=1, help="notebooks at a time")
    parser.add_argument("--timeout", type=int, default=900, help="seconds for one cell")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--nbdev", action="store_true", help="run all with nbdev_test")
    how.add_argument("--write", action="store_true", help="save the new outputs")
    args = parser.parse_args()
    if args.nbdev and args.paths:
        parser.error("--nbdev runs all notebooks: for a single one, use nbdev_test --path NOTEBOOK")
    threads = str(max(1, (os.cpu_count() or 1) // args.workers))  # of each: its share of the cores
    os.environ.update(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads, PYTHONUNBUFFERED="1")
    if args.write:  # fastai causes PyTorch warnings that are not useful to readers
        os.environ["PYTHONWARNINGS"] = "ignore::FutureWarning"
    results = run_all(args.paths, args)
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
