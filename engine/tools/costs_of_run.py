"""Time, disk and memory of a whole run, from the steps of its smoke test: `make smoke` prints them.

Tests: tests/engine/tools/test_costs_of_run.py.
"""

import math
import re
import resource
from datetime import datetime, timedelta
from pathlib import Path

from engine.config.run_config import RunConfig
from engine.process.console import table
from engine.run.memory import available_bytes
from engine.run.run_size import disk_bytes, format_size
from engine.storage import jsonl

STAMP = r"(\S+ \S+,\d{3}) INFO run: \S+ \S+ "  # of a line in logs/rank_0.log


def describe_costs(cfg: RunConfig, folder: Path, checkpoint: Path) -> str:
    """Return a table: what the whole run costs if its steps are as those in `folder`, which ended with `checkpoint`.

    The first step, which compiles and warms up, counts once, the start and the wait for machines do not."""
    lines = list(jsonl.read_lines(folder / "metrics.jsonl"))
    first, *steps = [line for line in lines if line["kind"] == "train"]
    log = (folder / "logs" / "rank_0.log").read_text(encoding="utf-8")
    total = int(re.findall(r" step \d+/(\d+) loss ", log)[0])
    seconds = sum(line["seconds"] for line in steps) / len(steps)
    pause = float(re.findall(r"training paused ([\d.]+) s", log)[0])
    saves = math.ceil(total / cfg.save_steps)
    parts = {
        f"{total:,} steps of {seconds:.3g} s": first["seconds"] + seconds * (total - 1),
        f"{saves:,} saves of {pause:.3g} s": saves * pause,
    }
    if evaluation := next((line for line in lines if line["kind"] == "eval"), None):
        rows = int(re.findall(r"evaluation data +([\d,]+) rows", log)[0].replace(",", ""))
        rows = min(rows, cfg.max_eval_examples or rows)
        each = seconds_to_evaluate(log) * rows / evaluation["examples"]
        times = math.ceil(total / cfg.eval_steps) if cfg.eval_steps else 1
        parts[f"{times:,} evaluations of {each:.3g} s"] = times * each
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    final = sum(file.stat().st_size for file in checkpoint.glob("model*.safetensors"))
    sent = format_size(saves * size + final)
    return "\ncosts of the whole run, if its steps are like these\n" + table(
        {
            "time": f"{timedelta(seconds=round(sum(parts.values())))} = {' + '.join(parts)}",
            "disk": f"{format_size(disk_bytes(cfg, size, final, total))} at most; {sent} written, or uploaded if output_dir is elsewhere",
            "memory": _describe_peak(lines),
        }
    )


def seconds_to_evaluate(log: str) -> float:
    """Return the time from the last train line to the evaluation of the same step."""
    began = re.findall(STAMP + r"step \d+/", log)[-1]
    ended = re.findall(STAMP + "evaluation at step", log)[0]
    began, ended = (datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f") for stamp in (began, ended))
    return (ended - began).total_seconds()


def _describe_peak(lines: list[dict]) -> str:
    """Return the largest memory of a process in training: on its GPU, and on the host."""
    host = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # of the commands of the smoke test
    texts = [f"{format_size(host)} of {format_size(available_bytes(offload=True))} on the host"]
    if on_gpu := max((line.get("gpu_memory_gib", 0) for line in lines), default=0):
        texts.insert(0, f"{on_gpu:.3g} GiB of {format_size(available_bytes())} on the GPU in training")
    return ", ".join(texts) + ", at the peak of a process"
