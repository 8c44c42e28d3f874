"""Measure on your GPU, in 10 minutes: one JSON, one table. `make bench-gpu` runs it.

    python bench/gpu.py                     # writes bench/results/gpu-<its name>.json
    python bench/gpu.py --device cpu --smallest --out try.json    # a trial of this file itself

It runs `master_step.py` and `train_step.py`, each part in a process of its own, the most telling
ones first; what time does not allow is named in the JSON as broken off. Post what is printed: the
issue template "A result of a GPU" says how.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import geometric_mean

import torch

HERE = Path(__file__).resolve().parent
MASTER, TRAIN = "master_step.py", "train_step.py"
WAYS = "fp32 autocast-bf16 fastai-bf16 fastai-fp16 bf16 bf16-flat learn-bf16-flat fp16-flat"
MODELS = "xresnet50 vit-b darknet xresnet18 awd-lstm tabular"
# parts by name: the script, what it is asked for; the most telling ones first
PARTS = {
    "master step": (MASTER, "--repeats 8"),
    **{
        f"whole steps, {m}": (TRAIN, f"--size large --fused --no-memory --models {m} --ways {WAYS}")
        for m in MODELS.split()
    },
}
SMALLEST = {
    "master step": (MASTER, "--repeats 1"),
    "whole steps, tabular": (
        TRAIN,
        "--size small --no-memory --models tabular --ways fp32 bf16 --repeats 1",
    ),
}


def run_part(script: str, options: str, device: str, seconds: float) -> tuple[dict, str]:
    """Run a benchmark for at most so many seconds; return what it wrote, and what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        asked = [*options.split(), "--device", device]
        command = [sys.executable, "-W", "ignore", str(HERE / script), *asked, "--out", str(out)]
        try:
            code = subprocess.run(command, timeout=seconds, stdout=subprocess.DEVNULL).returncode
            wrong = f"it ended with code {code}" if code else ""
        except subprocess.TimeoutExpired:
            wrong = "time was up"
        return json.loads(out.read_text()) if out.exists() else {}, wrong


def measure(parts: dict, device: str, minutes: float) -> dict:
    """Run the parts one after the other; none takes more than half of the time that is left."""
    end = time.monotonic() + 60 * minutes
    found = {"master_step": [], "train_step": [], "broken_off": {}}
    for name, (script, options) in parts.items():
        seconds = (end - time.monotonic()) / 2
        print(f"{name}: at most {seconds:.0f} s", file=sys.stderr, flush=True)
        part, wrong = run_part(script, options, device, seconds)
        found["master_step"] += part.get("rows", [])
        found["train_step"] += part.get("results", [])
        if wrong:
            found["broken_off"][name] = wrong
    return found


def about(device: str) -> dict:
    """Name the day, the GPU, its driver and the versions."""
    found = {"date": date.today().isoformat(), "device": device, "driver": None}
    if device == "cuda":
        found |= {"device": torch.cuda.get_device_name(), "driver": driver()}
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    return found | {"python": platform.python_version()}


def driver() -> str | None:
    """Ask NVIDIA's tool for the driver's version; None where there is no such tool."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.check_output(asked, text=True).split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def show(found: dict) -> None:
    """Print the tables in markdown: means over what was measured."""
    print(", ".join(f"{k} {v}" for k, v in found["about"].items()))
    rows = found["master_step"]
    shapes = list(dict.fromkeys((r["size"], r["optimizer"]) for r in rows))
    print("\nThe master step, ms:\n")
    _table(["way", *map(", ".join, shapes)], [
        [way, *(_ms(rows, way, shape) for shape in shapes)]
        for way in dict.fromkeys(r["way"] for r in rows)
    ])  # fmt: skip
    lines = [r for r in found["train_step"] if r.get("to_fp32")]
    models = list(dict.fromkeys(r["model"] for r in lines))
    print("\nWhole steps, speed by that of float32:\n")
    _table(["way", *models, "geometric mean"], [
        [way, *_speeds(lines, way, models)] for way in dict.fromkeys(r["way"] for r in lines)
    ])  # fmt: skip
    for name, reason in found["broken_off"].items():
        print(f"\nbroken off: {name}: {reason}")


def _table(head, rows):
    for cells in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(cells)} |")


def _ms(rows, way, shape):
    found = [r["ms"] for r in rows if (r["way"], (r["size"], r["optimizer"])) == (way, shape)]
    return f"{found[0]:.2f}" if found else ""


def _speeds(lines, way, models):
    by_model = {r["model"]: r["to_fp32"] for r in lines if r["way"] == way}
    speeds = [f"{by_model[m]:.2f}" if m in by_model else "" for m in models]
    return [*speeds, f"{geometric_mean(by_model.values()):.2f}"]


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--smallest", action="store_true", help="two small parts: a trial")
    parser.add_argument("--minutes", type=float, default=10, help="the most that it may take")
    parser.add_argument("--out", type=Path, help="default: bench/results/gpu-<name>.json")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("nothing was measured: PyTorch finds no CUDA device here")
    if args.device == "cpu" and args.out is None:
        parser.error("--device cpu is a trial: say with --out where its file goes")
    info = about(args.device)
    found = measure(SMALLEST if args.smallest else PARTS, args.device, args.minutes)
    name = re.sub(r"[^a-z0-9]+", "-", info["device"].lower()).strip("-")
    out = args.out or HERE / "results" / f"gpu-{name}.json"
    out.write_text(json.dumps({"about": info, **found}, indent=1) + "\n")
    show({"about": info, **found})
    print(f"\nwritten: {out}")


if __name__ == "__main__":
    main()
