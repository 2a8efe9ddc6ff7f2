"""Benchmark on one GPU: train.py against a plain compiled loop and the Trainer of transformers. See README.md.

python benchmarks/gpu.py [CASE …] [--programs ours plain trainer] [--in_turns] [--tiny]   (make bench-gpu CASES="124m 1b")

Each program (gpu_programs.py) trains the model of a case (gpu_cases.py) on the same rows in a process of its own, one
after the other. With `--in_turns`, all programs of all cases start and warm up at once, then each trains some steps in
turn while the others wait: less time, and the same noise for all, but the device must hold all of them, and their
starts say nothing. The cases cpu_… are measured on a CPU, in float32, in turns. `--tiny` runs the same code with small
models, also on a CPU, to see that it works; its figures say nothing.
"""

import argparse
import json
import os
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


class Program:
    """A process that trains a case. After its warm-up it trains `case.turn` steps at each `train`."""

    def __init__(self, program: str, name: str, case: Case, folder: Path, small: bool):
        self.program, self.name, self.case, self.folder = program, name, case, folder
        self.times: list[float] = []  # seconds of each turn after the warm-up
        self.start, self.peak_gib, self.began = 0.0, None, time.time()
        precision = "no" if case.on_cpu else "bf16"
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "ACCELERATE_MIXED_PRECISION": precision} | case.environment
        if small or case.on_cpu:
            environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, __file__, name, "--inner", program, "--folder", str(folder), *(["--tiny"] * small)]
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
        return False

    def train(self) -> bool:
        """Train a turn of steps; return False if no steps are left or the program has failed."""
        with suppress(BrokenPipeError):  # it has ended while it waited
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        return self.wait()

    def result(self) -> dict:
        """Return seconds per step, tokens and FLOP per second, seconds to the end of the first turn, and the peak of memory."""
        if self.process.wait() or not self.times:
            return {"error": (self.log.read_text().strip().splitlines() or [""])[-1][:200]}
        mean = statistics.mean if self.case.ragged else statistics.median
        seconds = mean(self.times) / self.case.turn
        tokens = tokens_per_step(self.folder, self.case)
        values = {"seconds": seconds, "tokens_per_second": tokens / seconds, "peak_gib": self.peak_gib}
        return values | {"flops": tokens * flops_per_token(self.case), "start": self.start, "times": self.times}


def train_in_turns(programs: list[Program]) -> None:
    """Warm all programs up at once, then train some steps of each in turn; let them end when all have finished."""
    training = [program for program in programs if program.wait()]
    while training:
        training = [program for program in training if program.train()]
    for program in programs:
        with suppress(BrokenPipeError):
            program.process.stdin.close()


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


def table(results: dict[str, dict[str, dict]]) -> str:
    """Return the results as a Markdown table, with ours against the others."""
    title, peak = machine()
    lines = [title, "", "| case | program | s a step | tokens/s | TFLOP/s | of peak | peak GiB | start s | ours is |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for name, programs in results.items():
        for program, r in programs.items():
            if "error" in r:
                lines.append(f"| {name} | {program} | failed: {r['error']} | | | | | | |")
                continue
            flops, ours = r["flops"] / r["seconds"], programs.get("ours", {}).get("tokens_per_second")
            other = "" if program == "ours" or not ours else f"{ours / r['tokens_per_second']:.2f} ×"
            if equal := results.get(CASES[name].against, {}).get("ours", {}).get("tokens_per_second"):
                other = f"{ours / equal:.2f} × {CASES[name].against}"
            memory = "" if r["peak_gib"] is None else f"{r['peak_gib']:.1f}"
            share = f"{flops / peak:.1%}" if peak else ""
            lines.append(
                f"| {name} | {program} | {r['seconds']:.4f} | {r['tokens_per_second']:,.0f} | {flops / 1e12:.1f} "
                f"| {share} | {memory} | {r['start']:.1f} | {other} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: all for a GPU but ragged_…)")
    parser.add_argument("--programs", nargs="*", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument(
        "--in_turns", action="store_true", help="hold all programs in memory; some steps of each in turn"
    )
    parser.add_argument("--tiny", action="store_true", help="small models, also on a CPU, to see that it works")
    parser.add_argument("--out", type=Path, help="folder for the table, results.json and the programs' logs")
    parser.add_argument("--inner", choices=list(PROGRAMS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no case {sorted(unknown)}: choose from {list(CASES)}")
    names = options.cases or [name for name, case in CASES.items() if not case.on_cpu and case.against != "ragged"]
    cases = {name: tiny(CASES[name]) if options.tiny else CASES[name] for name in names}
    if options.inner:
        [case] = cases.values()
        return PROGRAMS[options.inner](case, options.folder)
    results: dict[str, dict[str, dict]] = {}
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
                started = [Program(*values, options.tiny) for values in some]
                train_in_turns(started)
                for program in started:
                    results.setdefault(program.name, {})[program.program] = result = program.result()
                    print(f"{program.name} {program.program}: {result}", flush=True)
                    if options.out:
                        (options.out / program.name).mkdir(parents=True, exist_ok=True)
                        shutil.copy(program.log, options.out / program.name)
    text = table(results)
    print(text)
    if options.out:
        (options.out / "results.md").write_text(text + "\n")
        (options.out / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
