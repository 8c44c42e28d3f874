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
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbconvert.filters import strip_ansi
from nbconvert.preprocessors import (
    CellExecutionError,
    CoalesceStreamsPreprocessor,
    ExecutePreprocessor,
)
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


def run_here(path: Path, write: bool) -> None:
    """Run the notebook at `path` in a fresh kernel; raise if a cell does."""
    nb = nbformat.read(path, as_version=4)
    to_run = [cell for cell in nb.cells if not is_skipped(cell)]
    part = nbformat.v4.new_notebook(cells=to_run)  # shares its cells with `nb`
    runner = ExecutePreprocessor(timeout=None, kernel_name="python3", record_timing=False)
    runner.preprocess(part, {"metadata": {"path": str(path.parent)}})
    if write:
        part, _ = CoalesceStreamsPreprocessor().preprocess(part, {})  # lines come one by one
        for cell, ran in zip(to_run, part.cells, strict=True):
            cell.outputs = [portable(output) for output in ran.outputs if not is_noise(output)]
        nbformat.write(nb, path)


def settings(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of a process that runs notebooks, with its share of the cores."""
    threads = str(max(1, (os.cpu_count() or 1) // args.workers))
    limits = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    if args.write:  # fastai causes PyTorch warnings that are not useful to readers
        limits["PYTHONWARNINGS"] = "ignore::FutureWarning"
    return {**os.environ, **limits}


def run_apart(path: Path, args: argparse.Namespace) -> bool:
    """Run the notebook at `path` in its own process, print the result, return whether it passed."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--here", str(path), *(["--write"] if args.write else [])],
            cwd=ROOT,
            env=settings(args),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=args.timeout,
        )
        passed, output = done.returncode == 0, done.stdout
    except subprocess.TimeoutExpired as stopped:
        passed, output = False, (stopped.stdout or b"") + b"\nstopped: timed out"
    took = time.perf_counter() - start
    line = f"{'passed' if passed else 'FAILED'} {took:6.1f} s  {path.relative_to(ROOT)}"
    if not passed:
        line = f"{output.decode(errors='replace').strip()}\n{line}"
    print(line, flush=True)
    return passed


def run_nbdev(paths: list[Path], args: argparse.Namespace, *options: str) -> list[bool]:
    """Run `nbdev_test`, print its output, and return for each of `paths` whether it passed."""
    test = [str(Path(sys.executable).parent / "nbdev_test"), "--do_print", *options]
    began, ended, failed, said = {}, set(), set(), []
    limit = 3 * args.timeout  # for all of them
    with subprocess.Popen(
        test,
        cwd=ROOT,
        env=settings(args),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        kill = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
        kill.start()
        for line in process.stdout or ():
            now, (word, _, name) = time.perf_counter(), line.strip().rpartition(" ")
            if word == "Starting":
                began[name] = now
            elif word == "- Completed":
                ended.add(name)
                took, shown = now - began.get(name, now), name.removeprefix(f"{ROOT}/")
                print(f"ended {took:7.1f} s  {shown}", flush=True)
            else:
                said.append(line)
            # an error as it occurs, and the list of all errors at the end
            if of_failed := re.fullmatch(r"(?:\w+ in |\t)(\S+\.ipynb):?\n?", line):
                failed.add(Path(of_failed[1]).name)
        kill.cancel()
    print("".join(said).strip(), flush=True)
    if process.returncode == -signal.SIGKILL:
        print(f"stopped after {limit:.0f} s", flush=True)
    if process.returncode > 0 and not failed:  # for a reason other than a cell
        return [False] * len(paths)
    return [str(path) in ended and path.name not in failed for path in paths]


def run_parts(args: argparse.Namespace) -> list[bool]:
    """Run all notebooks with `nbdev_test`, and return for each whether it passed.

    It runs them in order of name, so the lessons, which train models, would run last, and the
    longest of them alone. They therefore run as a separate part, in parallel with the others.
    """
    is_lesson = {path: "tutorials" in path.parts for path in all_notebooks()}
    lessons = [path for path in is_lesson if is_lesson[path]]
    index = [path for path in is_lesson if path.parent == ROOT]
    others = [path for path in is_lesson if path not in {*lessons, *index}]
    n = str(max(1, args.workers // 2))  # of each part

    def run_others() -> list[bool]:
        found = run_nbdev(others, args, "--n_workers", n, "--skip_folder_re", "^[_.]|^tutorials$")
        return found + [run_nbdev([path], args, "--path", str(path))[0] for path in index]

    with ThreadPoolExecutor(min(2, args.workers)) as pool:
        of_lessons = pool.submit(
            run_nbdev, lessons, args, "--n_workers", n, "--path", str(ROOT / "nbs" / "tutorials")
        )
        of_others = pool.submit(run_others)
    found = [*of_lessons.result(), *of_others.result()]
    for path, passed in zip([*lessons, *others, *index], found, strict=True):
        if not passed:
            print(f"FAILED {path.relative_to(ROOT)}")
    return found


def run_all(paths: list[Path], args: argparse.Namespace) -> list[bool]:
    """Run the notebooks at `paths` and return for each whether it passed."""
    if args.nbdev:
        return run_parts(args)
    paths = [path.resolve() for path in paths] or all_notebooks()
    # lessons train models: start with them, so that workers do not wait long for the last
    paths.sort(key=lambda path: "tutorials" not in path.parts)
    with ThreadPoolExecutor(args.workers) as pool:
        return list(pool.map(lambda path: run_apart(path, args), paths))


def main() -> int:
    """Run the notebooks selected on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="notebooks; all by default")
    parser.add_argument("--workers", type=int, default=1, help="notebooks at a time")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one notebook")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--nbdev", action="store_true", help="run all with nbdev_test")
    how.add_argument("--write", action="store_true", help="save the new outputs")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.nbdev and args.paths:
        parser.error("--nbdev runs all notebooks: for a single one, use nbdev_test --path NOTEBOOK")
    if args.here:
        try:
            run_here(args.here, args.write)
        except CellExecutionError as error:  # its text is the cell and the traceback
            print(strip_ansi(str(error)))
            return 1
        return 0
    results = run_all(args.paths, args)
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
