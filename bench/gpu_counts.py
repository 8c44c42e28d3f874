"""What a step asks of a GPU, counted on a simulated one: launches, waits, copies, bytes. No times.

    PYTHONPATH=tests python bench/gpu_counts.py --out bench/results/gpu_counts.json
    PYTHONPATH=tests python bench/gpu_counts.py --before FOLDER     # against an earlier checkout

PyTorch's own host code runs as on a GPU and chooses its kernels; `tests/simulated_cuda` counts
them. `launches` are those after the backward pass, to the end of the step. `waits` of the host and
`pageable` copies (of memory that is not pinned: the host waits for these too) are of the whole
step, beyond those of the same loop in float32 without masters. Vectors of this size are stepped by
the optimizer, not compiled. The bytes an element that the compiled update moves are those in the
PTX of its kernel: `tests/emitted_update.py`. Gathering gradients into a vector first is not in
them. What does not run in the earlier code is left empty, with its error.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LABEL = "counted on a simulated GPU; no time was measured"
MODELS = {"batch norms": "BatchNorm1d", "layer norms": "LayerNorm"}
MODEL = "12 linear layers of 32, a norm after each, and one layer more: 50 parameters"
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


# in a process of its own, with the code that is counted


def count_steps() -> list[dict]:
    """Count a step of each loop, optimizer, precision and form of the masters."""
    import simulated_cuda.device as simulated  # isort: skip  before torch
    import torch
    from fastai.optimizer import Adam, OptimWrapper
    from simulated_cuda.steps import OPTIMIZERS, by_hand, in_a_learner

    def layers(norm) -> torch.nn.Module:
        nn, made = torch.nn, []
        for i in range(12):
            made += [nn.Linear(32 if i else 12, 32), getattr(nn, norm)(32), nn.ReLU()]
        return nn.Sequential(*made, nn.Linear(32, 2)).cuda()

    def count(model, loop, opt, *args) -> dict:
        run, make = (by_hand, OPTIMIZERS[opt]) if loop == "by hand" else (in_a_learner, funcs[opt])
        try:
            cost = run(make, *args, model=layers(MODELS[model]))
        except Exception as e:  # of earlier code: what it cannot do is a result
            return {"error": f"{type(e).__name__}: {e}".splitlines()[0]}
        counts = {"launches": cost.after_backward.launches, "waits": cost.whole.waits}
        return counts | {"pageable": cost.whole.pageable_copies}

    torch_opts = ("SGD", "Adam", "AdamW")
    funcs = {k: partial(OptimWrapper, opt=OPTIMIZERS[k]) for k in torch_opts}
    funcs |= {"fastai's Adam": Adam}
    with simulated.Numbers():
        return [
            {"model": model, "loop": loop, "opt": opt, "dtype": dtype, "masters": masters}
            | count(model, loop, opt, *_settings(torch, dtype, masters))
            for model in MODELS
            for loop, opts in {"by hand": torch_opts, "Learner": funcs}.items()
            for opt in opts
            for dtype, masters in _ways()
        ]


def _ways() -> Iterator[tuple[str, str | None]]:
    yield "fp32", None
    for dtype in DTYPES:
        yield dtype, "each"
        yield dtype, "flat"


def _settings(torch, dtype, masters):
    "The last arguments of `by_hand` and `in_a_learner`."
    return (None,) if masters is None else (getattr(torch, DTYPES[dtype]), masters == "flat")


def count_bytes() -> list[dict]:
    """Count what the compiled update of weights moves: bytes an element, by its kernel's PTX."""
    import emitted_update  # first: it loads the simulated GPU
    import test_onepass
    import torch

    names = {"SGD": "SGD", "Adam": "Adam", "AdamW": "AdamW", "fastai's Adam": "fastai Adam"}
    test_onepass.OPTIMIZERS.setdefault("Adam", partial(torch.optim.Adam, lr=0.01))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "emitted.json"
        emitted_update.main(path, *names.values())
        found = json.loads(path.read_text())
    return [
        {"opt": opt, "dtype": dtype, "bytes": _bytes(found[f"{name}{suffix}"])}
        for opt, name in names.items()
        for dtype, suffix in {"fp16": "", "bf16": ", bfloat16"}.items()
    ]


def _bytes(seen: dict) -> float:
    "A thread has 8 elements; all that is as long as the vector is moved by 16 bytes at once."
    ptx = seen["ptx"][0]["90"]
    return 16 * (ptx["ld.global.v4.b32"] + ptx["st.global.v4.b32"]) / 8


COUNTED = {"steps": count_steps, "bytes": count_bytes}


# from outside


def run_with(code: Path, what: str) -> list[dict]:
    """Count `what` in the code of the checkout `code`, with the simulated GPU of this one."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counted.json"
        paths = [code, code / "tests", ROOT / "tests"]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        command = [sys.executable, "-W", "ignore", __file__, "--count", what, "--out", str(out)]
        subprocess.run(command, env=env, check=True)
        return json.loads(out.read_text())


def beyond_plain(rows: list[dict]) -> list[dict]:
    """Take from each row the waits and copies of the same loop in float32; note its launches."""
    plain = {(r["model"], r["loop"], r["opt"]): r for r in rows if r["masters"] is None}
    found = []
    for row in rows:
        if row["masters"] is not None:
            before = plain[row["model"], row["loop"], row["opt"]]
            more = {k: row[k] - before[k] for k in ("waits", "pageable") if k in row}
            found.append(row | {"fp32_launches": before["launches"]} | more)
    return found


def show(rows: list[dict], moved: list[dict]) -> None:
    """Print the tables in markdown."""
    codes = list(dict.fromkeys(r["code"] for r in rows))
    table = {}
    for r in rows:
        key = tuple(r[k] for k in ("model", "loop", "opt", "dtype", "masters"))
        table.setdefault(key, {})[r["code"]] = r
    print(f"{LABEL[0].upper()}{LABEL[1:]}. {MODEL}.\n")
    head = ["model", "loop", "optimizer", "dtype", "masters", "launches in fp32"]
    head += [f"{k}, {code}" for k in ("launches", "waits", "pageable") for code in codes]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for key, by_code in table.items():
        cells = [*key, by_code[codes[-1]]["fp32_launches"]]
        cells += [by_code[c].get(k, "") for k in ("launches", "waits", "pageable") for c in codes]
        print(f"| {' | '.join(map(str, cells))} |")
    print("\n| optimizer | dtype | bytes an element, in the compiled update |\n|---|---|---|")
    for r in moved:
        print(f"| {r['opt']} | {r['dtype']} | {r['bytes']:g} |")


def main() -> None:
    """Count, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="a checkout of earlier code to count as well")
    parser.add_argument("--out", type=Path, help="write what was counted to this JSON file")
    parser.add_argument("--count", choices=COUNTED, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.count:
        args.out.write_text(json.dumps(COUNTED[args.count]()))
        return
    from simulated_cuda import why_not

    if why_not() is not None:
        sys.exit(f"nothing was counted: {why_not()}")
    codes = {"before": args.before.resolve()} if args.before else {}
    codes["now"] = ROOT
    rows = [
        {"code": code} | row
        for code, folder in codes.items()
        for row in beyond_plain(run_with(folder, "steps"))
    ]
    moved = run_with(ROOT, "bytes")
    about = {"label": LABEL, "date": date.today().isoformat(), "model": MODEL}
    about |= {k: version(k) for k in ("torch", "fastai", "triton")}
    about |= {"python": platform.python_version()}
    if args.before:
        commit = ["git", "-C", str(args.before), "rev-parse", "--short", "HEAD"]
        about["before"] = subprocess.check_output(commit, text=True).strip()
    if args.out:
        args.out.write_text(
            json.dumps({"about": about, "rows": rows, "bytes": moved}, indent=1) + "\n"
        )
    show(rows, moved)


if __name__ == "__main__":
    main()
