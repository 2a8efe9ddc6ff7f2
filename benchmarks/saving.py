"""Benchmark of saving and resuming a checkpoint of about 1 GB: python benchmarks/saving.py [--steps N]. See README.md.

A model of 87 million parameters trains with AdamW for some steps and saves five times. Reported are: the training pause per
save compared with the copy to the host, the time of the background write, the speed of verifying a checkpoint
compared with reading it, and the memory of resuming compared with that of model and optimizer.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import yaml

from engine.config.paths import REPOSITORY
from engine.storage import verify_hashes

MODEL = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
SAVED = re.compile(r"training paused ([\d.]+) s for it \(([\d.]+) s to copy")
RESUME = """
import sys
from types import SimpleNamespace
sys.path.insert(0, {repository!r})
from engine.checkpointing import checkpoint_folder
from engine.config import parsing
from engine.plan.dataset import prepare_datasets
from engine.distributed.init_accelerator import init_accelerator
from engine.distributed.choose_backend import make_backend
from engine.run.meter import Meter
from engine.find_tasks import OPTIONS, make_task
from src.training.optimizers import make_optimizer
from engine.run.model_with_loss import ModelWithLoss

def memory(name):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(name))

cfg, options = parsing.parse(sys.argv[1:], OPTIONS)
task = make_task(cfg, options)
prepare_datasets(cfg, task)
backend = make_backend(init_accelerator(cfg), cfg)
import transformers.models.llama.modeling_llama
before = memory("VmRSS")
start = checkpoint_folder.newest_intact(cfg.output_dir)
model = ModelWithLoss(task.build(start), task)
optimizer = make_optimizer(cfg, model)
run = SimpleNamespace(backend=backend, model=model, meter=Meter())
checkpoint_folder.load_checkpoint(start, run, {{"optimizer": optimizer}})
print(memory("VmHWM") - before, memory("VmRSS") - before)
"""


def evicted(folder: Path) -> None:
    """Drop the files from the kernel's page cache, so that they are read from the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def seconds(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def read_all(folder: Path) -> None:
    buffer = bytearray(1 << 22)
    for path in folder.iterdir():
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory(prefix="saving-") as name:
        folder = Path(name)
        rows = np.random.default_rng(0).integers(0, 32000, (200, 32)).tolist()
        (folder / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
        (folder / "model.yaml").write_text(yaml.safe_dump(MODEL))
        argv = ["--model_config", folder / "model.yaml", "--train_file", folder / "rows.jsonl", "--max_steps", steps]
        argv += ["--global_batch_size", 1, "--per_device_batch_size", 1, "--save_steps", max(1, steps // 5)]
        argv = [*map(str, argv), "--output_dir", str(folder / "run"), "--logging_steps", "1"]
        command = [sys.executable, str(REPOSITORY / "train.py"), *argv]
        environment = os.environ | {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        saved = SAVED.findall((folder / "run/logs/rank_0.log").read_text())
        stalls, copies = ([float(x) for x in column] for column in zip(*saved, strict=True))
        newest = sorted((folder / "run/checkpoints").iterdir())[-1]
        size = sum(path.stat().st_size for path in newest.iterdir()) / 1e9
        print(f"checkpoint of {size:.2f} GB, {len(saved)} saves")
        ratios = [stall / copy for stall, copy in zip(stalls, copies, strict=True)]
        print(f"training paused, s:        {', '.join(f'{x:.3f}' for x in stalls)}")
        print(f"copy to the host, s:       {', '.join(f'{x:.3f}' for x in copies)}  (the first allocates memory)")
        print(f"ratio, median:             {statistics.median(ratios):.3f}  (bar: 1.2)")
        for state in ("from memory", "from disk"):
            if state == "from disk":
                evicted(newest)
            plain = seconds(lambda: read_all(newest))
            if state == "from disk":
                evicted(newest)
            verify = seconds(lambda: verify_hashes.verify(newest))
            print(
                f"verify {state + ':':<20}{size / verify:.2f} GB/s (only reading: {size / plain:.2f} GB/s; bar: 1 GB/s or the disk)"
            )
        code = RESUME.format(repository=str(REPOSITORY))
        done = subprocess.run(
            [sys.executable, "-c", code, *argv], check=True, capture_output=True, text=True, env=environment
        )
        peak, after = map(float, done.stdout.split()[-2:])
        state = size * 1e9 / 2**20
        print(
            f"memory of resuming, MiB:   peak {peak:.0f}, then {after:.0f}; model and optimizer: {state:.0f}; ratio {peak / state:.3f}  (bar: 1.2)"
        )


if __name__ == "__main__":
    main()
