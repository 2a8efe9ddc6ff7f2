"""The picture in the README, docs/promise.svg: three real runs of one run file (YAML). Takes five minutes on two cores.

    python benchmarks/picture.py [--folder DIR]    DIR keeps the three runs

A: one process. B: one process, SIGKILL after step 35, the same command again. C: two processes.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SETTINGS = """--config configs/stdlib_lm.yaml --max_steps 60 --warmup_steps 10 --max_length 128 --max_eval_examples 64
    --logging_steps 1 --eval_steps 60 --save_steps 15 --sample_tokens 1"""
KILL_AT = 35
STEPS = (1, 30, 36, 60)  # the rows of the table


def start(folder: Path, processes: int) -> subprocess.Popen:
    """Start a run in a process group of its own, one thread per process."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", f"accelerate_configs/{'cpu' if processes == 1 else 'cpu_ddp'}.yaml"]
    command += ["--num_processes", str(processes), "train.py", *SETTINGS.split(), "--output_dir", str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(command, cwd=REPOSITORY, env=env, start_new_session=True)


def finish(process: subprocess.Popen) -> None:
    if code := process.wait():
        raise SystemExit(f"error: the run ended with exit code {code}")


def last_step(folder: Path) -> int:
    lines = read_text(folder / "metrics.jsonl").splitlines(keepends=True)
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def read_text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def losses(folder: Path) -> tuple[dict[int, float], float]:
    """Return ({step: training loss}, evaluation loss)."""
    lines = [json.loads(line) for line in read_text(folder / "metrics.jsonl").splitlines()]
    train = {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}
    return train, next(line["loss"] for line in lines if line["kind"] == "eval")


def run_all(folder: Path) -> list[Path]:
    """Train the three runs; return their folders."""
    folders = [folder / name for name in ("one_process", "killed_and_resumed", "two_processes")]
    finish(start(folders[0], 1))
    killed = start(folders[1], 1)
    while last_step(folders[1]) < KILL_AT and killed.poll() is None:
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    print(f"killed after step {last_step(folders[1])}")
    finish(start(folders[1], 1))
    finish(start(folders[2], 2))
    return folders


def draw(runs: list[tuple[dict[int, float], float]], file: Path) -> None:
    """Draw the loss curves of the three runs over each other, with a table of the exact values beside them."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "promise"  # the same file for the same numbers
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    axes, text = figure.subplots(1, 2, width_ratios=(4, 6))
    labels = ("1 process", "kill -9, resumed", "2 processes")
    styles = ({"lw": 7, "color": "#c6dbef"}, {"lw": 3, "color": "#3182bd"}, {"lw": 1.2, "color": "#111", "ls": "--"})
    for (train, _), label, style in zip(runs, labels, styles, strict=True):
        axes.plot(list(train), list(train.values()), label=label, **style)
    axes.axvline(KILL_AT, color="#cb181d", lw=1)
    axes.text(KILL_AT - 1, 0.04, "kill -9", color="#cb181d", ha="right", transform=axes.get_xaxis_transform())
    axes.set(xlabel="step", ylabel="training loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    text.axis("off")
    rows = [f"{'':>10}" + "".join(f"{label:>22}" for label in labels)]
    rows += [f"{f'step {step}':>10}" + "".join(f"{train[step]!s:>22}" for train, _ in runs) for step in STEPS]
    rows.append(f"{'evaluation':>10}" + "".join(f"{evaluation!s:>22}" for _, evaluation in runs))
    for place, row in enumerate(rows):
        weight = "bold" if place == 0 else "normal"
        text.text(0, 0.86 - 0.15 * place, row.replace(" ", "\u00a0"), family="monospace", size=9.5, weight=weight)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="an empty folder for the three runs (default: a temporary one)")
    folder = Path(parser.parse_args().folder or tempfile.mkdtemp(prefix="picture-")).resolve()
    runs = [losses(run) for run in run_all(folder)]
    draw(runs, REPOSITORY / "docs" / "promise.svg")
    if runs[0] != runs[1]:
        raise SystemExit(f"error: the resumed run differs; see {folder}")


if __name__ == "__main__":
    main()
