"""Test and measure on your GPU, in 9 minutes: one JSON, tables to post. `make bench-gpu` runs it.

    python bench/gpu.py                         # writes bench/results/gpu-<its name>.json
    python bench/gpu.py --stages gpt vit        # some stages; the others keep their results
    python bench/gpu.py --device cpu --smallest --out try.json    # a test of this script itself

It needs PyTorch, torchvision and pytest, and works offline; parts that need fastai are skipped by
name if fastai is not installed. Each stage runs in its own process with a time limit, the most
informative stages come first, and each writes its results as it goes: an interrupted stage keeps
its rows, and a second run repeats only the stages that have not finished.

The ways are timed in turn with CUDA events; times are medians over the turns. `peak` is PyTorch's
`max_memory_allocated` from before the model is built to the end of the third step, minus the memory
allocated before. `launches` counts the kernels in one step, by the profiler; `waits` counts the
calls in which the host waits for the device. float32 products use TF32. Batches are random.
Another version of mixedfp: PYTHONPATH with its folder, and a file of its own (--out).
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import geometric_mean, mean, median, stdev

import torch
from common import FLAT, HALF, Generation, InALearner, Loop, about, in_turn, seconds, table, write
from networks import GPT, ViT, images, words
from torch import distributed, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

HERE = Path(__file__).resolve().parent
SECONDS = {"tests": 110, "small": 60, "one": 30, "gpt": 85, "vit": 90, "resnet": 120, "curves": 40}
B16 = torch.bfloat16


# models


def resnet(depth: int) -> nn.Module:
    """Build torchvision's ResNet."""
    from torchvision import models

    return getattr(models, f"resnet{depth}")()


def tiny_conv_net() -> nn.Module:
    """Build a network for a trial run."""
    conv, norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
    return nn.Sequential(
        conv, norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )


def channels_last(batch: tuple) -> tuple:
    """Convert the images of a batch to the memory layout of the model's weights."""
    (x,), y = batch
    return (x.to(memory_format=torch.channels_last),), y


MODELS: dict[str, tuple[Callable, Callable]] = {
    "gpt": (GPT, partial(words, 16, 1024, 50304)),
    "vit": (partial(ViT, 12, 768, 12, 224, 16, 1000), partial(images, 128, 224, 1000)),
    "resnet": (partial(resnet, 50), lambda: channels_last(images(256, 224, 1000))),
    "small": (partial(resnet, 18), lambda: channels_last(images(8, 224, 1000))),
    "one": (GPT, partial(words, 1, 256, 50304)),
}
SMALLEST: dict[str, tuple[Callable, Callable]] = {
    "gpt": (partial(GPT, 64, 32, 2, 2, 16), partial(words, 2, 16, 64)),
    "vit": (partial(ViT, 1, 32, 2, 16, 8), partial(images, 2, 16)),
    "resnet": (tiny_conv_net, lambda: channels_last(images(2, 8))),
    "small": (tiny_conv_net, lambda: channels_last(images(2, 8))),
    "one": (partial(GPT, 64, 32, 2, 2, 16), partial(words, 1, 16, 64)),
}


# ways

SMALLEST_MASTERS = HALF | dict(state_dtype={"exp_avg": B16, "exp_avg_sq": B16})
AUTOCAST, MASTERS = dict(precision="autocast"), dict(precision="bf16")
WAYS: dict[str, dict] = {
    "float32": {},
    "autocast": AUTOCAST,
    "mixedfp": MASTERS,
    "mixedfp flat": MASTERS | FLAT,
    "mixedfp half gradients": MASTERS | HALF,
    "mixedfp smallest": MASTERS | SMALLEST_MASTERS,
    "autocast compiled": AUTOCAST | dict(wrap=torch.compile),
    "mixedfp flat compiled": MASTERS | FLAT | dict(wrap=torch.compile),
}
DDP = dict(wrap=DistributedDataParallel)
ALSO: dict[str, dict] = {  # float16 with a scaler, DDP in one process, a CUDA graph, many passes
    "autocast fp16": dict(precision="autocast-fp16", scaler=GradScaler),
    "mixedfp flat fp16": dict(precision="fp16") | FLAT,
    "mixedfp flat fp16, GradScaler": dict(precision="fp16", scaler=GradScaler) | FLAT,
    "autocast ddp": AUTOCAST | DDP,
    "mixedfp flat ddp": MASTERS | FLAT | DDP,
    "autocast captured": AUTOCAST,
    "mixedfp flat captured": MASTERS | FLAT,
    "autocast generating": AUTOCAST,
    "mixedfp flat generating": MASTERS | FLAT,
}
LEARNERS: dict[str, dict] = {
    "learner float32": {},
    "learner autocast": AUTOCAST,
    "learner flat": MASTERS | FLAT,
}


def trained(model: nn.Module, way: str, lr: float = 1e-4) -> Loop | InALearner:
    """Return the loop of a way, with fused AdamW."""
    if way in LEARNERS:
        from fastai.optimizer import OptimWrapper

        opt_func = partial(OptimWrapper, opt=partial(torch.optim.AdamW, fused=True))
        return InALearner(model, opt_func, lr, **LEARNERS[way])
    if "ddp" in way and not distributed.is_initialized():
        distributed.init_process_group(store=distributed.HashStore(), rank=0, world_size=1)
    opt = torch.optim.AdamW(model.parameters(), lr, fused=True, capturable="captured" in way)
    return (Generation if "generating" in way else Loop)(model, opt, **(WAYS | ALSO)[way])


# measurements


class Device:
    """Measures memory and kernels of the device; on a CPU, nothing."""

    def __init__(self, name: str):
        self.name, self.is_cuda = name, name == "cuda"

    def wait(self) -> None:
        """Wait until the device has finished all its work."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def allocated(self) -> int:
        """Return the bytes allocated now, and reset the peak."""
        if not self.is_cuda:
            return 0
        self.wait()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Return the peak since `allocated`."""
        return torch.cuda.max_memory_allocated() if self.is_cuda else 0

    def profile(self, f: Callable) -> dict:
        """Return kernels, waits and the time of the largest kernels in one call."""
        with torch.profiler.profile() as prof:
            f()
            self.wait()
        events = prof.events()
        kernels = [e for e in events if e.device_type.name == "CUDA" and not _is_copy(e.name)]
        kernels = [e for e in kernels if not getattr(e, "is_user_annotation", False)]
        found, times = Counter(), Counter()
        for e in kernels:
            found[e.name] += 1
            times[e.name] += e.time_range.elapsed_us()
        calls = Counter(e.name for e in events if e.device_type.name == "CPU")
        waits = {k: n for k, n in calls.items() if k.startswith("cuda") and "Synchronize" in k}
        waits["cudaDeviceSynchronize"] = waits.get("cudaDeviceSynchronize", 0) - 1  # our own call
        return {
            "launches": sum(found.values()),
            "device_ms": sum(times.values()) / 1e3,
            "waits": {k: n for k, n in waits.items() if n > 0},
            "reads": calls["aten::_local_scalar_dense"],
            "kernels": [[k[:120], found[k], round(us / 1e3, 3)] for k, us in times.most_common(16)],
        }


def _is_copy(name):
    return name.startswith(("Memcpy", "Memset"))


def measure(stage: str, args: argparse.Namespace, out: Path) -> None:
    """Measure the ways for one model, writing each row as soon as it is known."""
    device = Device(args.device)
    build, make_batch = (SMALLEST if args.smallest else MODELS)[stage]
    ways, also = list(WAYS), [w for w in ALSO if device.is_cuda or "captured" not in w]
    if stage == "small":
        ways = [*ways[:-2], *also[:-2], *(LEARNERS if find_spec("fastai") is not None else ())]
    elif stage == "one":
        ways = ["autocast", "mixedfp flat", *also[5:]]
    torch.manual_seed(0)
    xs, y = make_batch()
    batch = tuple(x.to(args.device) for x in xs), y.to(args.device)
    runs, rows = {}, {}
    for is_compiled in (False, True):
        new = [way for way in ways if ("compiled" in way) == is_compiled]
        for way in new:
            rows[way] = {"model": stage, "way": way, "items": y.numel()}  # tokens or images
            try:
                step = start(way, build, stage, device, batch, rows[way])
                runs[way] = partial(step, *batch)
            except Exception as e:  # a failing way must not hide the others
                rows[way]["error"] = f"{type(e).__name__}: {e}"[:200]
            write(out, list(rows.values()))
        if set(new) & runs.keys():
            take_turns(runs, rows, device, 1 if args.smallest else 5)
        write(out, list(rows.values()))
    for way, run in runs.items():  # last: profiling slows down launches, even afterwards
        rows[way] |= device.profile(run)
        write(out, list(rows.values()))


def start(way, build, stage, device, batch, row) -> Callable:
    """Build a way and run its first three steps; record their time and memory in `row`."""
    before = device.allocated()
    torch.manual_seed(0)
    model = build().to(device.name).train()
    if stage in ("resnet", "small"):
        model = model.to(memory_format=torch.channels_last)
    run = trained(model, way)
    step = captured(run.step, batch) if "captured" in way else run.step
    begin = time.perf_counter()
    for _ in range(3):
        loss = step(*batch)
    device.wait()
    row["first_s"] = time.perf_counter() - begin
    row["peak_mib"] = (device.peak() - before) / 2**20
    row["held_mib"] = (device.allocated() - before) / 2**20
    row["loss"] = loss.item()
    row["turns_ms"] = []
    return step


def captured(step: Callable, batch: tuple) -> Callable:
    """Capture a step on `batch` in a CUDA graph, after three on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(*batch)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(*batch)

    def replay(*batch):
        graph.replay()
        return loss

    return replay


def take_turns(runs: dict, rows: dict, device: Device, n_turns: int) -> None:
    """Time each way in turn, for a quarter of a second each, and record the medians."""
    once = {way: seconds(run, device=device.name) for way, run in runs.items()}
    steps = {way: 1 if n_turns == 1 else max(1, round(0.25 / s)) for way, s in once.items()}
    clocks = {way: partial(seconds, run, steps[way], device.name) for way, run in runs.items()}
    for way, own in in_turn(clocks, n_turns).items():
        rows[way]["turns_ms"] += [1e3 * s for s in own]
        rows[way]["ms"] = median(rows[way]["turns_ms"])


def warm(args: argparse.Namespace, by_mixedfp: bool) -> None:
    """Compile the stages' models in advance, to fill the compiler's cache with their kernels."""
    way = "mixedfp flat compiled" if by_mixedfp else "autocast compiled"
    models = SMALLEST if args.smallest else MODELS
    for stage in [s for s in args.stages if s in ("gpt", "vit", "resnet")]:
        build, make_batch = models[stage]
        xs, y = make_batch()
        batch = tuple(x.to(args.device) for x in xs), y.to(args.device)
        start(way, build, stage, Device(args.device), batch, {})


def curves(args: argparse.Namespace, out: Path) -> None:
    """Train a small language model on generated text, with three seeds per way."""
    n_steps, n_words = (3, 16) if args.smallest else (200, 256)
    follows = torch.randint(n_words, (n_words, 4), generator=torch.Generator().manual_seed(0))
    found: list[dict] = []
    of_mixedfp = (f"mixedfp {kind}" for kind in ("flat", "half gradients", "smallest"))
    for way in ("float32", "autocast", *of_mixedfp):
        for seed in range(3):
            losses = train_on_text(way, seed, follows, n_steps, args)
            found.append(dict(way=way, seed=seed, losses=losses, last=mean(losses[-20:])))
            write(out, found)


def train_on_text(way, seed, follows, n_steps, args) -> list[float]:
    """Train a model with this seed; return the losses."""
    torch.manual_seed(seed)
    n_words, n = len(follows), 16 if args.smallest else 128
    model = GPT(n_words, 32, 1, 2, n) if args.smallest else GPT(n_words, 256, 4, 4, n)
    run = trained(model.to(args.device), way, lr=1e-3)
    text, losses = torch.Generator().manual_seed(100 + seed), []
    for _ in range(n_steps):
        x = generate(follows, 4 if args.smallest else 32, n, text).to(args.device)
        losses.append(run.step((x[:, :-1],), x[:, 1:]))
    return [round(loss, 4) for loss in torch.stack(losses).tolist()]


def generate(follows, n, length, rng) -> torch.Tensor:
    """Draw texts in which each word is followed by one of four words."""
    choices = torch.randint(4, (n, length), generator=rng)
    text = [torch.randint(len(follows), (n,), generator=rng)]
    for i in range(length):
        text.append(follows[text[-1], choices[:, i]])
    return torch.stack(text, 1)


def test(args: argparse.Namespace, out: Path) -> None:
    """Run the tests on the device; count them, and report failures with reasons."""
    report = out.with_suffix(".xml")
    files = ["tests/test_gpu.py", "tests/test_laws.py"]
    if args.smallest:
        files = ["tests/test_gpu.py", "-k", "skipped_step"]
    workers = "2" if args.device == "cpu" else str(min(12, os.cpu_count() or 1))
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "--dist", "worksteal", "-rs"]
    env = os.environ | {"MIXEDFP_TEST_DEVICE": args.device}
    subprocess.run([*command, f"--junitxml={report}", *files], cwd=HERE.parent, env=env)
    write(out, read_junit(report))


def read_junit(report: Path) -> dict:
    """Return the counts, the failures with their last line, and the reasons of skips."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [(c, e) for c in cases for e in (*c.findall("failure"), *c.findall("error"))]
    skipped = [e.get("message", "") for c in cases for e in c.findall("skipped")]
    return {
        "passed": len(cases) - len(bad) - len(skipped),
        "failed": {c.get("name"): (e.get("message") or "")[:400] for c, e in bad},
        "skipped": dict(Counter(skipped)),
    }


# stages


def run_stage(stage: str, args: argparse.Namespace, out: Path, seconds: float) -> str:
    """Run a stage in its own process group for at most `seconds`; return an error message."""
    command = [sys.executable, "-W", "ignore", __file__, "--run", stage, "--out", str(out)]
    command += ["--device", args.device] + ["--smallest"] * args.smallest
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(seconds)
        return f"it exited with code {code}" if code else ""
    except subprocess.TimeoutExpired:
        return f"it timed out after {seconds:.0f} s"
    finally:
        end_group(process)


def end_group(process: subprocess.Popen) -> None:
    """Kill a process and all its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run_stages(args: argparse.Namespace, found: dict, out: Path) -> None:
    """Run the stages that have not finished yet; write the file after each."""
    parts = out.with_suffix("")
    parts.mkdir(parents=True, exist_ok=True)
    stages = [s for s in SECONDS if s in args.stages and s not in found["ended"]]
    warming = []
    if args.device == "cuda" and "tests" in stages and len(stages) > 1:
        warming = [warm_up(args, k, stages) for k in ("warm-autocast", "warm-mixedfp")]
    for stage in stages:
        begin, part = time.monotonic(), parts / f"{stage}.json"
        print(f"{stage}: at most {SECONDS[stage]} s", file=sys.stderr, flush=True)
        wrong = run_stage(stage, args, part, SECONDS[stage])
        while warming:
            end_group(warming.pop())
        if part.exists():
            found["stages"][stage] = json.loads(part.read_text())
        found["seconds"][stage] = round(time.monotonic() - begin, 1)
        found["broken_off"].pop(stage, None)
        if wrong:
            found["broken_off"][stage] = wrong
        else:
            found["ended"].append(stage)
        write(out, found)


def warm_up(args: argparse.Namespace, what: str, stages: list[str]) -> subprocess.Popen:
    """Compile in the background, during the tests, the models that the stages will time."""
    command = [sys.executable, "-W", "ignore", __file__, "--run", what, "--device", args.device]
    command += ["--stages", *stages]
    return subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)


def about_gpu(device: str) -> dict:
    """Return the date, the GPU, its driver and the versions."""
    found = {k: v for k, v in about(device).items() if k in ("date", "torch", "python")}
    name = torch.cuda.get_device_name() if device == "cuda" else device
    found |= {"device": name, "driver": driver() if device == "cuda" else None}
    found["fastai"] = "installed" if find_spec("fastai") else "not installed: learners left out"
    return found | {"cuda": torch.version.cuda}


def driver() -> str | None:
    """Return the driver version reported by NVIDIA's tool; None if there is no such tool."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.check_output(asked, text=True).split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


# output


def show(found: dict) -> None:
    """Print the tables as markdown."""
    print(", ".join(f"{k} {v}" for k, v in found["about"].items()))
    stages = found["stages"]
    if "tests" in stages:
        tests = stages["tests"]
        print(f"\ntests: {tests['passed']} passed, {len(tests['failed'])} failed")
        for name, why in list(tests["failed"].items())[:40]:
            print(f"- {name}: {(why.splitlines() or [''])[0][:160]}")
        for why, n in tests["skipped"].items():
            print(f"- {n} skipped: {why}")
    for stage in ("gpt", "one", "small", "vit", "resnet"):
        if stage in stages:
            show_rows(stages[stage])
    if "curves" in stages:
        losses: dict[str, list] = {}
        for r in stages["curves"]:
            losses.setdefault(r["way"], []).append(r["last"])
        lines = [
            dict(way=k, last=mean(v), deviation=stdev(v) if v[1:] else "")
            for k, v in losses.items()
        ]
        table(lines, "way last:.4f deviation:.4f")
    for name, reason in found["broken_off"].items():
        print(f"\ninterrupted: {name}: {reason}")
    show_means(stages)


def show_rows(rows: list[dict]) -> None:
    """Print the table of a model; speed and memory are relative to autocast."""
    base: dict = next((r for r in rows if r["way"] == "autocast"), {})
    for r in (r for r in rows if "ms" in r):
        r["a_second"] = 1e3 * r["items"] / r["ms"]
        r["speed"] = base.get("ms", 0) / r["ms"]
        r["memory"] = r["peak_mib"] / (base.get("peak_mib") or 1)
        r["n_waits"] = sum(r.get("waits", {}).values())
    print(f"\n{rows[0]['model']}; a second: tokens or images; speed, memory: times autocast's")
    table(
        rows,
        "way ms:.2f a_second:.0f speed:.2f peak_mib:.0f memory:.2f launches device_ms:.1f n_waits "
        "reads error",
    )


def show_means(stages: dict) -> None:
    """Print the means over the three large models, relative to the same kind of autocast."""
    for way, base in (
        ("mixedfp", "autocast"), ("mixedfp flat", "autocast"), ("mixedfp smallest", "autocast"),
        ("mixedfp flat compiled", "autocast compiled"),
    ):  # fmt: skip
        speeds, peaks = [], []
        for stage in ("gpt", "vit", "resnet"):
            rows = {r["way"]: r for r in stages.get(stage, []) if "ms" in r}
            if way in rows and base in rows:
                speeds.append(rows[base]["ms"] / rows[way]["ms"])
                peaks.append(rows[way]["peak_mib"] / (rows[base]["peak_mib"] or 1))
        if speeds:
            of = f"{len(speeds)} models by {base}"
            memory = f", memory × {mean(peaks):.2f}" if any(peaks) else ""
            print(f"\n{way}, mean of {of}: speed × {geometric_mean(speeds):.2f}{memory}")


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--smallest", action="store_true", help="tiny models, for a trial run")
    parser.add_argument("--stages", nargs="+", choices=SECONDS, default=list(SECONDS))
    parser.add_argument("--again", action="store_true", help="repeat finished stages")
    parser.add_argument("--out", type=Path, help="default: bench/results/gpu-<name>.json")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("nothing was run: PyTorch finds no CUDA device")
    if args.run:
        torch.set_float32_matmul_precision("high")
        todo: dict[str, Callable] = {"tests": test, "curves": curves}
        if args.run.startswith("warm"):
            return warm(args, args.run == "warm-mixedfp")
        return todo.get(args.run, partial(measure, args.run))(args, args.out)
    if args.device == "cpu" and args.out is None:
        parser.error("--device cpu is a trial run: set --out to choose where its file goes")
    info = about_gpu(args.device)
    name = re.sub(r"[^a-z0-9]+", "-", info["device"].lower()).strip("-")
    out = args.out or HERE / "results" / f"gpu-{name}.json"
    found = dict(about=info, stages={}, seconds={}, broken_off={}, ended=[])
    if out.exists() and json.loads(out.read_text())["about"] == info:
        found = json.loads(out.read_text())
    if args.again:
        found["ended"] = [s for s in found["ended"] if s not in args.stages]
    run_stages(args, found, out)
    show(found)
    print(f"\nwritten: {out.name}")
    if found["broken_off"] or found["stages"].get("tests", {}).get("failed"):
        sys.exit(1)


if __name__ == "__main__":
    main()
