"""Benchmark of loop and start: train.py against a plain hand-written loop (benchmarks/plain.py). See README.md.

python benchmarks/loop.py [--processes 2] [--only loop|start] [--repeats N] [--threads N] [--clock cpu]   (make bench)
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["ACCELERATE_USE_CPU"] = "true"
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import numpy as np
import torch
import yaml

import train
from benchmarks.forked_ranks import in_ranks
from benchmarks.plain import Plain, direct_loss, labels_loss
from benchmarks.plain_steps import steps_in_memory
from engine.config.paths import REPOSITORY

LOGGING_STEPS = 10
EXACT = "200 ms, 4 micro-batches"  # the case that is measured with exact_sums, too
BARS = {f"{EXACT}, exact": 0.78, "10 ms": 0.93, "200 ms": 0.97, "start": 1.05}
SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LARGE = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
CASES = {  # name -> (model, longest row, global batch, micro-batch, steps per block, blocks)
    "10 ms": (SMALL, 32, 8, 8, 20, 40),
    "10 ms, 2 micro-batches": (SMALL, 16, 8, 4, 20, 40),
    "200 ms": (LARGE, 128, 8, 8, 2, 20),
    "200 ms, 4 micro-batches": (LARGE, 128, 8, 2, 2, 20),
}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
LOSSES = {"labels=": labels_loss, "direct": direct_loss}


def make_files(folder: Path, model: dict, longest: int, rows: int = 4000) -> None:
    """Write rows of different lengths and the model's configuration for both loops."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(longest // 2, longest + 1, rows)
    lines = [json.dumps({"input_ids": rng.integers(0, model["vocab_size"], n).tolist()}) for n in lengths]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    heads = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
    (folder / "model.yaml").write_text(yaml.safe_dump(heads | model))


def flags(folder: Path, out: str, **more) -> list[str]:
    values = {"model_config": folder / "model.yaml", "train_file": folder / "rows.jsonl", "output_dir": folder / out}
    values |= {"cache_dir": folder / "cache", "resume": "never"} | more
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


class Stop(Exception):
    """Raised when the measurement is complete, so that train.train does nothing after its last step."""


class Interleaved(train.RunLogger):
    """The logger of a run that measures its steps; after each block of steps, the plain loop does the same steps.

    The plain loop has a model of its own, and gets the same micro-batches as padded tensors in memory, so only ours pays
    for reading and collating. `measure` sets the attributes of the class."""

    loss, block, blocks, clock = "", 0, 0, time.perf_counter
    times: dict[str, list[float]]  # seconds of a step, by program and block
    losses: dict[str, list]

    def __init__(self, run, *more):
        super().__init__(run, *more)
        self.accelerator = run.backend.accelerator
        ranks, model = self.accelerator.num_processes, run.task.build()  # the initial weights of ours
        if ranks > 1:
            options = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
            model = torch.nn.parallel.DistributedDataParallel(model, **options)
        self.plain = Plain(model, LOSSES[self.loss], run.cfg.learning_rate, run.cfg.max_steps, ranks)
        self.write, self.record.write = self.record.write, self._keep_loss
        self.record.say = lambda text: None  # only the table of results is shown
        self.ready = steps_in_memory(run.cfg, run.task, run.datasets["train"], self.accelerator)
        self.steps, self.mark = 0, self.clock()

    def add_step(self, *values):
        super().add_step(*values)
        self.steps += 1
        if self.steps % self.block:
            return
        self.times["ours"].append((self.clock() - self.mark) / self.block)
        steps = [next(self.ready) for _ in range(self.block)]
        self.accelerator.wait_for_everyone()
        self.mark = self.clock()
        for batches, weight in steps:
            self.losses["plain"].append((float(self.plain.step(batches, weight)), weight))
        self.times["plain"].append((self.clock() - self.mark) / self.block)
        if self.steps == self.block * self.blocks:
            raise Stop
        self.accelerator.wait_for_everyone()
        self.mark = self.clock()

    def _keep_loss(self, kind, values):
        self.write(kind, values)
        self.losses["ours"].append(values["loss"])


def measure(case: str, loss: str, folder: Path, clock, exact_sums: bool = False) -> dict:
    """Return the median step times and the median of their ratio, plain / ours (above 1: ours is faster).

    With `exact_sums`, both compute on one thread.

    Ours is train.py itself, with another logger."""
    _, _, size, micro, block, blocks = CASES[case]
    fields = {"max_steps": block * (blocks + 1) + 1, "save_steps": 10**6, "learning_rate": 1e-3}
    fields |= {"global_batch_size": size, "per_device_batch_size": micro, "logging_steps": LOGGING_STEPS}
    fields |= {"exact_sums": exact_sums}
    times, losses = ({"ours": [], "plain": []} for _ in range(2))
    settings = {"loss": loss, "block": block, "blocks": blocks + 1, "clock": staticmethod(clock)}
    train.RunLogger = type("Measured", (Interleaved,), settings | {"times": times, "losses": losses})
    with suppress(Stop):
        train.main(flags(folder, "run", **fields))
    if "RANK" not in os.environ:  # with several ranks, each knows only its share of the plain loss
        check_same(losses, LOGGING_STEPS)
    ours, other = ([1e3 * seconds for seconds in of_blocks[1:]] for of_blocks in times.values())  # block 1: the warmup
    return summary(ours, other, "ms", [b / a for a, b in zip(ours, other, strict=True)])


def summary(ours: list[float], plain: list[float], unit: str, ratios: list[float]) -> dict:
    """Return the medians of both loops, and median and quartiles of their ratio."""
    ratios = sorted(ratios)
    return {
        f"ours_{unit}": statistics.median(ours),
        f"plain_{unit}": statistics.median(plain),
        "ratio": statistics.median(ratios),
        "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "blocks": len(ratios),
    }


def check_same(losses: dict, every: int) -> None:
    """Raise AssertionError if the two loops have different losses, because their times are then not comparable."""
    loss, weight = np.array(losses["plain"]).T
    whole = len(loss) // every * every
    plain = (loss * weight)[:whole].reshape(-1, every).sum(1) / weight[:whole].reshape(-1, every).sum(1)
    ours = np.array(losses["ours"])  # lacks the last line: the measurement ends before it
    worst = np.abs(ours / plain[: len(ours)] - 1).max()
    assert worst < 1e-3, f"the two loops train differently: their losses differ by {worst:.2%}"


def starts(folder: Path) -> tuple[float, float]:
    """Return the seconds from the start of `python train.py …`, and of the plain loop, to the end of its first step."""
    fields = {"max_steps": 1, "logging_steps": 1, "global_batch_size": 8, "per_device_batch_size": 8}
    began = time.time()
    _run("train.py", *flags(folder, "start", **fields))
    ours = (folder / "start" / "metrics.jsonl").stat().st_mtime - began
    began = time.time()
    printed = _run("benchmarks/plain.py", folder / "rows.jsonl", folder / "model.yaml")
    return ours, json.loads(printed.splitlines()[-1])[0] - began


def _run(script: str, *args) -> str:
    command = [sys.executable, str(REPOSITORY / script), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    if done.returncode:
        sys.exit(f"{script} failed:\n{done.stderr}")
    return done.stdout


def measure_start(folder: Path, repeats: int) -> dict:
    """Return median start times of fresh, interleaved processes with warm caches, and each first (cold) start."""
    make_files(folder, SMALL, 48)
    first, *rest = (starts(folder) for _ in range(repeats + 1))
    ours, plain = ([pair[i] for pair in rest] for i in (0, 1))
    found = summary(ours, plain, "s", [a / b for a, b in rest])
    return found | {"first_ours_s": first[0], "first_plain_s": first[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="number of ranks (backend gloo)")
    parser.add_argument("--threads", type=int, help="threads per rank (default: cores / ranks)")
    parser.add_argument("--only", help="loop, start, or a prefix of a case's name", default="")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: for a busy machine; --threads 1")
    parser.add_argument("--repeats", type=int, default=9, help="fresh processes per loop for the start benchmark")
    options = parser.parse_args()
    threads = options.threads or max(1, len(os.sched_getaffinity(0)) // options.processes)
    several = f", {options.processes} processes" if options.processes > 1 else ""
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["HF_DATASETS_CACHE"] = f"{temporary}/datasets"
        for case, (model, longest, *_) in CASES.items():
            if options.only not in ("", "loop") and not case.startswith(options.only):
                continue
            if several and "micro-batches" not in case:
                continue  # one micro-batch leaves the other ranks without work
            folder = Path(temporary, case.replace(" ", "_"))
            folder.mkdir()
            make_files(folder, model, longest)
            for loss in LOSSES:
                words = (case, loss, folder, CLOCKS[options.clock])
                results[f"{case}, {loss}{several}"] = in_ranks(options.processes, threads, measure, *words)
            if case == EXACT:
                results[f"{case}, exact_sums{several}"] = in_ranks(options.processes, threads, measure, *words, True)
        if options.only in ("", "start"):
            (folder := Path(temporary, "start")).mkdir()
            results["start"] = measure_start(folder, options.repeats)
    show(results)
    save(results, threads, options.clock)


def show(results: dict[str, dict]) -> None:
    print(f"\n{'':44}{'ours':>10}{'plain':>10}{'ratio':>8}  {'quartiles':14}{'bar':8}")
    for name, r in results.items():
        bar, (low, high) = next(bar for case, bar in BARS.items() if name.startswith(case)), r["quartiles"]
        digits, unit, sign = (2, "s", "≤") if name == "start" else (1, "ms", "≥")
        ours, plain = (f"{r[f'{which}_{unit}']:.{digits}f} {unit}" for which in ("ours", "plain"))
        is_met = r["ratio"] <= bar if name == "start" else r["ratio"] >= bar
        verdict, around = "met" if is_met else "MISSED", f"{low:.3f}–{high:.3f}"
        print(f"{name:44}{ours:>10}{plain:>10}{r['ratio']:>8.3f}  {around:14}{sign} {bar:<6}{verdict}")


def save(results: dict, threads: int, clock: str = "wall") -> None:
    """Add the results and the machine they were measured on to benchmarks/results.json."""
    file = REPOSITORY / "benchmarks" / "results.json"
    old = json.loads(file.read_text()) if file.exists() else {}
    machine = {"cpu": platform.machine(), "cores": os.cpu_count(), "threads": threads, "clock": clock}
    machine["load"] = os.getloadavg()[0]
    machine |= {"python": platform.python_version(), "torch": torch.__version__}
    new = {name: values | machine for name, values in results.items()}
    new = json.loads(json.dumps(new), parse_float=lambda text: round(float(text), 3))
    file.write_text(json.dumps(old | new, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
