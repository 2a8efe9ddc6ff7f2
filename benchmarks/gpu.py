"""Benchmark on one GPU: train.py against a plain compiled loop and the Trainer of transformers. See README.md.

python benchmarks/gpu.py [CASE …] [--programs ours plain trainer] [--tiny]   (make bench-gpu CASES="124m 1b")

Each program (gpu_programs.py) trains the model of a case (gpu_cases.py) on the same rows in a process of its own, one
after the other, and prints the time of every fifth step. The cases cpu_… are measured on a CPU, in float32, in rounds of
all programs. `--tiny` runs the same code with small models, also on a CPU, to see that it works; its figures say nothing.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from operator import itemgetter
from pathlib import Path

from gpu_cases import CASES, Case, tiny
from gpu_programs import EVERY, PROGRAMS, write_inputs

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}  # dense bf16 FLOP/s, of NVIDIA's data sheets


def measure(program: str, case: Case, folder: Path, name: str, small: bool) -> dict:
    """Run a program in a process of its own; return seconds per step, seconds to its fifth step, and its peak memory."""
    command = [sys.executable, __file__, name, "--inner", program, "--folder", str(folder), *(["--tiny"] * small)]
    precision = "no" if case.on_cpu else "bf16"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "ACCELERATE_MIXED_PRECISION": precision} | case.environment
    if small or case.on_cpu:
        environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    began = time.time()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    (folder / f"{program}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        return {"error": (done.stdout + done.stderr).strip().splitlines()[-1][:200]}
    result = json.loads(done.stdout.strip().splitlines()[-1])
    times = {int(step): seconds for step, seconds in result["times"].items()}
    seconds = (times[case.steps] - times[case.warmup]) / (case.steps - case.warmup)
    return {"seconds": seconds, "start": times[EVERY] - began, "peak_gib": result["peak_gib"]}


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
    for name, case in cases.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_inputs(case, folder)
            programs, rounds = [program for program in case.programs if program in options.programs], {}
            for program in programs * case.rounds:
                rounds.setdefault(program, []).append(measure(program, case, folder, name, options.tiny))
            for program, each in rounds.items():
                failed = [result for result in each if "error" in result]
                result = failed[0] if failed else sorted(each, key=itemgetter("seconds"))[len(each) // 2]
                if "error" not in result:
                    tokens = tokens_per_step(folder, case)
                    result |= {"tokens_per_second": tokens / result["seconds"], "flops": tokens * flops_per_token(case)}
                results.setdefault(name, {})[program] = result
                print(f"{name} {program}: {result}", flush=True)
                if options.out:
                    (options.out / name).mkdir(parents=True, exist_ok=True)
                    shutil.copy(folder / f"{program}.log", options.out / name)
    text = table(results)
    print(text)
    if options.out:
        (options.out / "results.md").write_text(text + "\n")
        (options.out / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
