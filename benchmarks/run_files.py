"""Run files that need no download: parameters, peak memory, time of a step and of the run. See docs/performance.md.

python benchmarks/run_files.py [NAME …]   (prints a Markdown table; ten minutes on two cores)
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
NAMES = sorted(path.stem for path in (REPOSITORY / "configs").glob("*.yaml") if path.stem[:6] in ("stdlib", "drawn_"))
STEPS = 40


def measure(name: str, folder: Path, flags: list[str]) -> dict:
    """Train the first steps of a run file in a process of its own; the first quarter warms up."""
    every = ["--max_steps", str(STEPS), "--logging_steps", "5", "--eval_steps", str(STEPS), "--output_dir"]
    command = [sys.executable, "train.py", "--config", f"configs/{name}.yaml", *flags]
    plan = subprocess.run([*command, "--dry_run"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    with subprocess.Popen(
        [*command, *every, str(folder)], cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        errors = process.stderr.read().decode() if process.stderr else ""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{name}: {errors}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train" and line["step"] > STEPS // 4]
    step = statistics.median(line["seconds"] / 5 for line in train)
    of_plan = dict(re.findall(r"^  (\w+) {2,}(.+)$", plan, re.M))
    steps = int(of_plan["steps"].split()[0].replace(",", ""))
    return {
        "task": of_plan["task"],
        "parameters": of_plan["parameters"].split()[0],
        "memory": usage.ru_maxrss / 2**20,
        "step": step,
        "minutes": steps * step / 60,
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)} (default: all)")
    names = parser.parse_args().names or NAMES
    print("| run file | task | parameters | peak memory of the process, GiB | s a step | steps | minutes of the run |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        of_lm = Path(temporary) / "stdlib_lm"
        begin = ["--model_name_or_path", f"{of_lm}/final"]
        flags = {
            **dict.fromkeys(("stdlib_preference", "stdlib_orpo", "stdlib_kto", "stdlib_reward"), begin),
            "stdlib_distillation": ["--teacher_name_or_path", f"{of_lm}/final"],
        }
        for name in sorted(names, key=lambda name: name in flags):  # those that start from stdlib_lm come last
            if name in flags and not of_lm.exists():
                measure("stdlib_lm", of_lm, [])
            r = measure(name, Path(temporary) / name, flags.get(name, []))
            size = f"{r['parameters']} | {r['memory']:.2f} | {r['step']:.3f} | {r['steps']:,} | {r['minutes']:.1f}"
            print(f"| `{name}` | {r['task']} | {size} |", flush=True)


if __name__ == "__main__":
    main()
