"""Benchmark on one GPU: train.py against a plain compiled loop and the Trainer of transformers. See README.md.

python benchmarks/gpu.py [CASE …] [--programs ours plain trainer] [--in_turns] [--tiny]   (make bench-gpu CASES="124m 1b")

Each program (gpu_programs.py) trains the model of a case (gpu_cases.py) on the same rows in a process of its own, one
after the other. With `--in_turns`, all programs of all cases start and warm up at once, then each trains some steps in
turn while the others wait: less time, and the same noise for all, but their starts say nothing. If the device does not
hold all of them, train.py takes turns with each peer alone; if it does not hold two, they run one after the other. The
cases cpu_… are measured on a CPU, in float32, in turns. `--tiny` runs the same code with small models, also on a CPU,
to see that it works; its figures say nothing.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from gpu_cases import CASES, Case, tiny
from gpu_programs import PROGRAMS, write_inputs

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}  # dense bf16 FLOP/s, of NVIDIA's data sheets
OUT_OF_MEMORY = r"(?i)out of memory|ALLOC_FAILED"  # in the log of a program that has failed


class Program:
    """A process that trains a case. After its warm-up it trains `case.turn` steps at each `train`."""

    def __init__(self, program: str, name: str, case: Case, folder: Path, small: bool):
        self.program, self.name, self.case, self.folder = program, name, case, folder
        self.times: list[float] = []  # seconds of each turn after the warm-up
        self.start, self.peak_gib, self.began = 0.0, None, time.time()
        self.has_ended = False  # before it was told to
        precision = "no" if case.on_cpu else "bf16"
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "ACCELERATE_MIXED_PRECISION": precision} | case.environment
        if small or case.on_cpu:
            environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, __file__, name, "--inner", program, "--folder", str(folder), *(["--tiny"] * small)]
        shutil.rmtree(folder / program, ignore_errors=True)  # what it wrote in an earlier round
        self.log = folder / f"{program}.log"
        with self.log.open("w") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
            self.process = subprocess.Popen(command, env=environment, **pipes)

    def wait(self) -> bool:
        """Wait until the program waits for its turn; return False if it has no steps left or has failed."""
        for line in self.process.stdout:
            done = json.loads(line)
            self.peak_gib = done["peak_gib"]
            if not self.start:
                self.start = done["time"] - self.began
            if done["step"] > self.case.warmup:
                self.times.append(done["seconds"])
            print(f"{self.name} {self.program} {line.strip()}", flush=True)
            if done["step"] >= self.case.warmup:
                return done["step"] < self.case.steps
        self.has_ended = True
        return False

    def is_out_of_memory(self) -> bool:
        """Return whether the program has ended because the device had no memory left for it."""
        return self.has_ended and bool(re.search(OUT_OF_MEMORY, self.log.read_text()))

    def train(self) -> bool:
        """Train a turn of steps; return False if no steps are left or the program has failed."""
        with suppress(BrokenPipeError):  # it has ended while it waited
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        return self.wait()

    def result(self) -> dict:
        """Return seconds per step, tokens and FLOP per second, seconds to the end of the first turn, and the peak of memory."""
        names = {"case": self.name, "program": self.program}
        if self.process.wait() or not self.times:
            return names | {"error": (self.log.read_text().strip().splitlines() or [""])[-1][:200]}
        mean = statistics.mean if self.case.ragged else statistics.median
        seconds = mean(self.times) / self.case.turn
        tokens = tokens_per_step(self.folder, self.case)
        values = names | {"seconds": seconds, "tokens_per_second": tokens / seconds, "peak_gib": self.peak_gib}
        return values | {"flops": tokens * flops_per_token(self.case), "start": self.start, "times": self.times}


def train_in_turns(programs: list[Program]) -> bool:
    """Warm all programs up at once, then train some steps of each in turn; let them end when all have finished.

    As soon as one has found no memory on the device, end all and return False."""
    advance = Program.wait
    training = programs
    while training:
        remaining = []
        for program in training:
            if advance(program):
                remaining.append(program)
            elif program.is_out_of_memory():
                for started in programs:
                    started.process.kill()
                    started.process.wait()
                return False
        training, advance = remaining, Program.train
    for program in programs:
        with suppress(BrokenPipeError):
            program.process.stdin.close()
    return True


def measure(programs: list[tuple], small: bool) -> list[list[dict]]:
    """Return the results of programs that trained in turns; round by round, if the device did not hold all at once."""
    started = [Program(*values, small) for values in programs]
    if train_in_turns(started) or len(programs) == 1:
        results = [program.result() for program in started]
        print(*results, sep="\n", flush=True)
        return [results]
    smaller = pairs(programs) if len(programs) > 2 else [[values] for values in programs]
    print(f"out of memory: {len(programs)} programs at once; now {max(map(len, smaller))}", flush=True)
    return [results for some in smaller for results in measure(some, small)]


def pairs(programs: list[tuple]) -> list[list[tuple]]:
    """Return train.py with each peer, and its run of a case with its run of the case that this is compared with."""
    ours = {values[1]: values for values in programs if values[0] == "ours"}
    together = []
    for values in programs:
        program, name, case, _ = values
        if partner := ours.get(case.against if program == "ours" else name):
            together.append([partner, values])
    return together + [[values] for values in programs if not any(values in pair for pair in together)]


def tokens_per_step(folder: Path, case: Case) -> float:
    """Return the mean count of real tokens in a step; rows are drawn evenly, packed rows are nearly full."""
    from pyarrow import parquet

    lengths = [len(row) for row in parquet.read_table(folder / "rows.parquet")["input_ids"]]
    if case.flags.get("packing"):
        run = [json.loads(line) for line in (folder / "ours" / "metrics.jsonl").read_text().splitlines()]
        lines = [line for line in run if line["kind"] == "train" and line["step"] > case.warmup]
        tokens = sum(line["tokens_per_second"] * line["seconds"] for line in lines)
        return tokens / (case.steps - case.warmup)
    return sum(lengths) / len(lengths) * case.global_batch


def flops_per_token(case: Case) -> float:
    """Return 6 N + 12 L H T (LoRA: 4 N + 12 L H T: the base has no weight gradients); attention is not halved.

    N counts all weights but an embedding that is not also the head. Recomputed activations do not count."""
    m = case.model
    hidden, layers, vocab = m["hidden_size"], m["num_hidden_layers"], m["vocab_size"]
    kv = hidden * m["num_key_value_heads"] // m["num_attention_heads"]
    weights = vocab * hidden + layers * (2 * hidden**2 + 2 * hidden * kv + 3 * hidden * m["intermediate_size"])
    return (4 if case.lora else 6) * weights + 12 * layers * hidden * case.longest


def machine() -> tuple[str, float | None]:
    """Return a line on device and versions, and the device's peak in FLOP/s, if it is known."""
    import accelerate
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, accelerate {accelerate.__version__}"
    )
    peak = next((value for name, value in PEAKS.items() if name in device), None)
    return f"{device}, {versions}, {time.strftime('%Y-%m-%d')}", peak


def table(rounds: list[list[dict]]) -> str:
    """Return the results as a Markdown table, with ours against the others, of the same round if it was there."""
    title, peak = machine()
    lines = [title, "", "| case | program | s a step | tokens/s | TFLOP/s | of peak | peak GiB | start s | ours is |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    everything = [result for results in rounds for result in results]
    for results in rounds:
        for r in results:
            name, program = r["case"], r["program"]
            if "error" in r:
                lines.append(f"| {name} | {program} | failed: {r['error']} | | | | | | |")
                continue
            flops, against = r["flops"] / r["seconds"], CASES[name].against
            ours = speed_of_ours(against if program == "ours" else name, [*results, *everything])
            other = f"{ours / r['tokens_per_second']:.2f} ×" if program != "ours" and ours else ""
            if program == "ours" and ours:
                other = f"{r['tokens_per_second'] / ours:.2f} × {against}"
            memory = "" if r["peak_gib"] is None else f"{r['peak_gib']:.1f}"
            share = f"{flops / peak:.1%}" if peak else ""
            lines.append(
                f"| {name} | {program} | {r['seconds']:.4f} | {r['tokens_per_second']:,.0f} | {flops / 1e12:.1f} "
                f"| {share} | {memory} | {r['start']:.1f} | {other} |"
            )
    return "\n".join(lines)


def speed_of_ours(case: str, results: list[dict]) -> float | None:
    """Return the tokens per second of train.py in the first of these results that has them."""
    speeds = [
        r["tokens_per_second"] for r in results if (r["case"], r["program"]) == (case, "ours") and "error" not in r
    ]
    return next(iter(speeds), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cases", nargs="*", help=f"of {', '.join(CASES)} (default: all for a GPU but ragged_… and 124m_…)"
    )
    parser.add_argument("--programs", nargs="*", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument(
        "--in_turns", action="store_true", help="start all programs at once; some steps of each in turn"
    )
    parser.add_argument("--tiny", action="store_true", help="small models, also on a CPU, to see that it works")
    parser.add_argument("--out", type=Path, help="folder for the table, results.json and the programs' logs")
    parser.add_argument("--inner", choices=list(PROGRAMS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no case {sorted(unknown)}: choose from {list(CASES)}")
    names = options.cases or [name for name, case in CASES.items() if not case.on_cpu and not case.only_if_named]
    cases = {name: tiny(CASES[name]) if options.tiny else CASES[name] for name in names}
    if options.inner:
        [case] = cases.values()
        return PROGRAMS[options.inner](case, options.folder)
    rounds: list[list[dict]] = []
    with tempfile.TemporaryDirectory() as temporary:
        groups = [[name] for name in names] if not options.in_turns else [names]
        for group in groups:
            programs = []
            for name in group:
                folder = Path(temporary, name)
                write_inputs(cases[name], folder)
                programs += [(program, name, cases[name], folder) for program in cases[name].programs]
            programs = [values for values in programs if values[0] in options.programs]
            together = options.in_turns or all(case.on_cpu for _, _, case, _ in programs)
            for some in [programs] if together else [[values] for values in programs]:
                rounds += measure(some, options.tiny)
                for program, name, _, folder in some if options.out else []:
                    (options.out / name).mkdir(parents=True, exist_ok=True)
                    shutil.copy(folder / f"{program}.log", options.out / name)
    text = table(rounds)
    print(text)
    if options.out:
        (options.out / "results.md").write_text(text + "\n")
        (options.out / "results.json").write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
