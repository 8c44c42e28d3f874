"""Compares the figures in the prose of the README and the lessons with what was measured.

A figure carries a mark, a comment that no page shows: `1.44<!--= whole learn-bf16-flat speed -->`.
The mark names where the number comes from:

    printed WORDS             a number in a line with these words, in an output of this notebook
    whole WAY speed [WHICH]   train_step.json (fp16: train_step_fp16.json): times float32's speed
    whole WAY memory [WHICH]  its peak memory, of float32's; WHICH: mean, min, max or a model
    operators NAME | SHAPE    operators.json: time in 16 bits by time in float32
    lost PRECISION NAME       lost_updates.json: the mean of `lost`, `unmoved`, `accuracy`
    accuracy PRECISION RATE   accuracy.json: its mean, in percent
    gpu COLUMN MODEL WAY      gpu-nvidia-h100-80gb-hbm3.json: a column of a row; with `relative-`
                              before it, autocast's time by the way's, or the way's by autocast's;
                              MODEL mean: of the three large models
    curve WAY                 the same file: the mean of the last losses
    later COLUMN MODEL WAY    the same of the run of 2026-11-27
    counted passed            that run: tests that passed
    traffic COLUMN MODEL MODE traffic.json: a column of a row, of autocast's
    set                       chosen or calculated, not measured

A figure is right when the number, rounded as it stands there, is that number. One with a unit of
measurement (%, times, points, MB, ms, ns) and no mark is an error.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from pathlib import Path
from statistics import mean

import nbformat
from notebooks import ROOT, all_notebooks

NUMBER = r"(?<![\w.])\d[\d,]*(?:\.\d+)?"
MARKED = re.compile(rf"({NUMBER})( ?%| times| points| MB)?<!--= (.+?) -->")
MARK = re.compile(r"<!--= .+? -->")
UNMARKED = re.compile(rf"{NUMBER}(?: ?%| (?:times|points|MB|ms|ns)\b)")
NO_PROSE = re.compile(r"^(    |\t).*$|```.*?```|`[^`\n]*`|\$[^$\n]*\$", re.DOTALL | re.MULTILINE)
PICK: dict[str, Callable] = {"mean": mean, "min": min, "max": max}


@cache
def results(name: str) -> dict:
    """Read a file of `bench/results`."""
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def whole(way: str, column: str, which: str = "mean") -> float:
    """Give a way's speed or memory relative to float32's: geometric mean, bound, or one model."""
    rows = results("train_step_fp16" if "fp16" in way else "train_step")["results"]
    plain = {r["model"]: r["bytes"] for r in rows if r["way"] == "fp32"}
    found = {
        r["model"]: r["to_fp32"] if column == "speed" else r["bytes"] / plain[r["model"]]
        for r in rows
        if r["way"] == way
    }
    if which == "mean":
        return prod(found.values()) ** (1 / len(found))
    return PICK[which](found.values()) if which in PICK else found[which]


def operators(text: str) -> float:
    """Give how many times as long as in float32 an operator takes in 16 bits."""
    name, shape = (part.strip() for part in text.split("|"))
    for r in results("operators")["rows"]:
        if r["operator"] == name and "×".join(map(str, r["shape"])) == shape:
            return 1 / r["speed of 16 bits"]
    raise KeyError(text)


def lost(precision: str, name: str) -> float:
    """Give a mean over the seeds, and over steps where there is a list of them."""
    runs = [r[name] for r in results("lost_updates")["results"] if r["precision"] == precision]
    return mean(mean(r) if isinstance(r, list) else r for r in runs)


def accuracy(precision: str, rate: str) -> float:
    """Give the mean accuracy over seeds."""
    rows = results("accuracy")["results"]
    found = {(r["precision"], r["lr"]): r["accuracy_mean"] / 100 for r in rows}
    return found[precision, float(rate)]


H100 = "gpu-nvidia-h100-80gb-hbm3"
LATER = f"{H100}-2026-11-27"


def gpu(column: str, model: str, *way: str, run: str = H100) -> float:
    """Give what was measured on a GPU, alone or relative to autocast, compiled or not."""
    if model == "mean":
        each = [gpu(column, m, *way) for m in ("gpt", "vit", "resnet")]
        return prod(each) ** (1 / 3)
    rows = {r["way"]: r for r in results(run)["stages"][model]}
    name = column.removeprefix("relative-")
    value = rows[" ".join(way)][name]
    if name == column:
        return value
    base = rows["autocast compiled" if way[-1] == "compiled" else "autocast"][name]
    return base / value if name == "ms" else value / base


def later(*what: str) -> float:
    """Give the same of the later run."""
    return gpu(*what, run=LATER)


def curve(*way: str) -> float:
    """Give the mean over seeds of the last losses on generated text."""
    rows = results(H100)["stages"]["curves"]
    return mean(r["last"] for r in rows if r["way"] == " ".join(way))


def counted(what: str) -> float:
    """Give the number of tests on a GPU that `passed`."""
    return results(LATER)["stages"]["tests"][what]


def traffic(column: str, model: str, *mode: str) -> float:
    """Give what was counted in a mode, relative to autocast."""
    rows = results("traffic")["rows"]
    found = {r["mode"]: r[column] for r in rows if r["model"] == model}
    return found[" ".join(mode)] / found["autocast"]


def numbers(nb: nbformat.NotebookNode, words: str) -> list[float]:
    """List the numbers in the lines with `words` that the notebook's outputs hold."""
    texts = [o.get("text") or o.get("data", {}).get("text/plain", "")
             for cell in nb.cells for o in cell.get("outputs", [])]  # fmt: skip
    lines = [line.replace(words, "") for t in texts for line in t.splitlines() if words in line]
    found = re.findall(rf"({NUMBER})(%?)", " ".join(lines))
    return [float(n.replace(",", "")) / (100 if percent else 1) for n, percent in found]


def sources(nb: nbformat.NotebookNode, mark: str) -> list[float]:
    """Give the numbers that the figure marked with `mark` may be."""
    kind, _, rest = mark.partition(" ")
    if kind == "printed":
        return numbers(nb, rest)
    if kind in ("whole", "lost", "accuracy", "gpu", "later", "curve", "counted", "traffic"):
        return [globals()[kind](*rest.split())]
    if kind == "operators":
        return [operators(rest)]
    raise KeyError(mark)


def problems(nb: nbformat.NotebookNode) -> Iterator[str]:
    """Yield what is wrong with the figures of a notebook's prose."""
    for cell in nb.cells:
        if cell.cell_type != "markdown":
            continue
        text = NO_PROSE.sub(" ", cell.source)
        for shown, unit, mark in MARKED.findall(text):
            if mark == "set":
                continue
            digits = len(shown.partition(".")[2])
            factor = 100 if unit.strip() in ("%", "points") else 1
            try:
                found = sources(nb, mark)
            except (KeyError, TypeError, ValueError, ZeroDivisionError):
                yield f"{shown}{unit}: nothing is named {mark!r}"
                continue
            value, near = float(shown.replace(",", "")), 0.5 * 10.0**-digits
            if not any(abs(f * factor - value) <= near * (1 + 1e-9) for f in found):
                yield f"{shown}{unit}: {mark} is {[round(f * factor, digits + 2) for f in found]}"
        for figure in UNMARKED.findall(MARKED.sub("", text)):
            yield f"{figure}: a figure without a mark of where it comes from"


def main() -> int:
    """Check the README, lessons and guides, or the notebooks that are named."""
    pages = [
        p
        for p in all_notebooks()
        if p.name == "index.ipynb" or p.parent.name in ("tutorials", "guides")
    ]
    bad = 0
    for path in [Path(name) for name in sys.argv[1:]] or pages:
        for problem in problems(nbformat.read(path, as_version=4)):
            print(f"{path.name}: {problem}")
            bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
