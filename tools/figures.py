"""Compares the figures in the README and the lessons with the measured results.

A figure has a mark, a comment that is not rendered: `1.44<!--= whole learn-bf16-flat speed -->`.
The mark names the source of the number:

    printed WORDS             a number on a line with these words in an output of this notebook
    whole WAY speed [WHICH [BASE]]  train_step.json (fp16: train_step_fp16.json): relative to the
                              speed of BASE (fp32); WHICH: mean, min, max or a model
    whole WAY memory [WHICH [BASE]]  its peak memory relative to that of BASE
    operators NAME | SHAPE    operators.json: time in 16 bits divided by time in float32
    lost PRECISION NAME       lost_updates.json: the mean of `lost`, `unmoved`, `accuracy`
    accuracy PRECISION RATE   accuracy.json: its mean, in percent
    gpu COLUMN MODEL WAY      gpu-nvidia-h100-80gb-hbm3.json: a column of a row; with the prefix
                              `relative-`, relative to autocast: the speedup for `ms`, else the
                              way's value by autocast's; MODEL mean: of the three large models
    curve WAY                 the same file: the mean final loss
    later COLUMN MODEL WAY    the same for the run of 2026-11-27
    counted COLUMN MODEL MODE traffic.json: a column of a row
    traffic COLUMN MODEL MODE the same, relative to autocast
    set                       chosen or calculated, not measured

A figure is correct if it equals its source after rounding to the same digits. A figure with a unit
(%, times, points, MB, ms, ns) but no mark is an error.
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


def whole(way: str, column: str, which: str = "mean", base: str = "fp32") -> float:
    """Return a way's speed or memory relative to `base`: geometric mean, bound, or one model."""
    rows = results("train_step_fp16" if "fp16" in way else "train_step")["results"]
    key = "to_fp32" if column == "speed" else "bytes"
    plain = {r["model"]: r[key] for r in rows if r["way"] == base}
    found = {r["model"]: r[key] / plain[r["model"]] for r in rows if r["way"] == way}
    if which == "mean":
        return prod(found.values()) ** (1 / len(found))
    return PICK[which](found.values()) if which in PICK else found[which]


def operators(text: str) -> float:
    """Return an operator's time in 16 bits divided by its time in float32."""
    name, shape = (part.strip() for part in text.split("|"))
    for r in results("operators")["rows"]:
        if r["operator"] == name and "×".join(map(str, r["shape"])) == shape:
            return 1 / r["speed of 16 bits"]
    raise KeyError(text)


def lost(precision: str, name: str) -> float:
    """Return the mean over seeds, and over steps if there is a list of them."""
    runs = [r[name] for r in results("lost_updates")["results"] if r["precision"] == precision]
    return mean(mean(r) if isinstance(r, list) else r for r in runs)


def accuracy(precision: str, rate: str) -> float:
    """Return the mean accuracy over seeds."""
    rows = results("accuracy")["results"]
    found = {(r["precision"], r["lr"]): r["accuracy_mean"] / 100 for r in rows}
    return found[precision, float(rate)]


H100 = "gpu-nvidia-h100-80gb-hbm3"
LATER = f"{H100}-2026-11-27"


def gpu(column: str, model: str, *way: str, run: str = H100) -> float:
    """Return a GPU measurement, absolute or relative to autocast, compiled or not."""
    if model == "mean":
        each = [gpu(column, m, *way, run=run) for m in ("gpt", "vit", "resnet")]
        return prod(each) ** (1 / 3)
    rows = {r["way"]: r for r in results(run)["stages"][model]}
    name = column.removeprefix("relative-")
    value = rows[" ".join(way)][name]
    if name == column:
        return value
    base = rows["autocast compiled" if way[-1] == "compiled" else "autocast"][name]
    return base / value if name == "ms" else value / base


def later(*what: str) -> float:
    """Return the same for the later run."""
    return gpu(*what, run=LATER)


def curve(*way: str) -> float:
    """Return the mean final loss on generated text over the seeds."""
    rows = results(H100)["stages"]["curves"]
    return mean(r["last"] for r in rows if r["way"] == " ".join(way))


def counted(column: str, model: str, *mode: str) -> float:
    """Return a count in a mode."""
    rows = results("traffic")["rows"]
    return {r["mode"]: r[column] for r in rows if r["model"] == model}[" ".join(mode)]


def traffic(column: str, model: str, *mode: str) -> float:
    """Return a count in a mode relative to autocast."""
    return counted(column, model, *mode) / counted(column, model, "autocast")


def numbers(nb: nbformat.NotebookNode, words: str) -> list[float]:
    """Return the numbers on lines with `words` in the notebook's outputs."""
    texts = [o.get("text") or o.get("data", {}).get("text/plain", "")
             for cell in nb.cells for o in cell.get("outputs", [])]  # fmt: skip
    lines = [line.replace(words, "") for t in texts for line in t.splitlines() if words in line]
    found = re.findall(rf"({NUMBER})(%?)", " ".join(lines))
    return [float(n.replace(",", "")) / (100 if percent else 1) for n, percent in found]


def sources(nb: nbformat.NotebookNode, mark: str) -> list[float]:
    """Return the numbers allowed for a figure with `mark`."""
    kind, _, rest = mark.partition(" ")
    if kind == "printed":
        return numbers(nb, rest)
    if kind in ("whole", "lost", "accuracy", "gpu", "later", "curve", "counted", "traffic"):
        return [globals()[kind](*rest.split())]
    if kind == "operators":
        return [operators(rest)]
    raise KeyError(mark)


def problems(nb: nbformat.NotebookNode) -> Iterator[str]:
    """Yield the errors in the figures of a notebook's prose."""
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
            yield f"{figure}: a figure without a mark for its source"


def main() -> int:
    """Check the README, lessons and guides, or the notebooks given as arguments."""
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
