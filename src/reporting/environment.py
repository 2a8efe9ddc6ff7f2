"""environment.json: versions, git commit and diff, topology, batch arithmetic.

Record more about a run here. Tests: tests/reporting/test_environment.py.
"""

import json
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import torch

from src.config.paths import REPOSITORY
from src.config.redact import redact, redact_all
from src.config.schema import RunConfig
from src.distributed.init_accelerator import num_nodes
from src.distributed.strategies import Strategy
from src.storage import atomic_folder, hub

PACKAGES = ("torch", "accelerate", "transformers", "datasets", "evaluate", "tokenizers", "safetensors", "numpy")


def write_environment(folder: Path, strategy: Strategy, cfg: RunConfig, unit: str, step: int) -> None:
    """Write environment.json, with a list of all starts of this run, and code.diff if the code differs from its commit."""
    file, (commit, diff) = folder / "environment.json", code_version()
    starts = atomic_folder.read_json(file).get("starts", []) if step else []
    world_size = strategy.accelerator.num_processes
    values = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "git_commit": commit,
        "git_dirty": bool(diff) if commit else None,
        "command": redact_all(sys.argv),
        "fetched": redact_all(hub.records),
        **topology(strategy, cfg),
        "unit": unit,
        "starts": [*starts, {"step": step, "world_size": world_size, "time": time.time()}],
    }
    atomic_folder.rewrite(file, json.dumps(values, indent=1))
    (folder / "code.diff").unlink(missing_ok=True)
    if diff:
        atomic_folder.rewrite(folder / "code.diff", redact(diff))


def code_version() -> tuple[str | None, str]:
    """Return (git commit of this code, diff to it), or (None, "") if git does not track train.py."""
    # Without fsmonitor, ext-diff and textconv, git runs no program that the repository's configuration names.
    git = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false"]
    commands = (["ls-files", "--error-unmatch", "train.py"], ["rev-parse", "HEAD"])
    commands += (["diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--", "."],)
    try:
        done = [
            subprocess.run(git + words, capture_output=True, cwd=REPOSITORY, check=True, timeout=60)
            for words in commands
        ]
    except (OSError, subprocess.SubprocessError):
        return None, ""
    _, commit, diff = (each.stdout.decode(errors="replace") for each in done)
    return commit.strip(), diff


def topology(strategy: Strategy, cfg: RunConfig, training: bool = True) -> dict:
    """Return device, precision, strategy, world size and nodes; for training also the global batch."""
    accelerator, device = strategy.accelerator, strategy.accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    compute_dtype = cfg.dtype if accelerator.mixed_precision == "no" else accelerator.mixed_precision
    values = {
        "device": f"{device.type} ({name}, {torch.get_num_threads()} threads per rank)",
        "precision": f"weights {cfg.dtype}, computing in {compute_dtype}",
        "strategy": strategy.name,
        "world_size": accelerator.num_processes,
        "nodes": num_nodes(),
    }
    return values | ({"global_batch": arithmetic(cfg, strategy.data_world_size)} if training else {})


def arithmetic(cfg: RunConfig, ranks: int) -> str:
    """Format the global batch as examples = micro-batches = ranks × accumulation steps."""
    batch, on_ranks = cfg.global_batch_size, f"{ranks} rank{'s' * (ranks > 1)}"
    if cfg.per_device_batch_tokens:
        return f"{batch} examples = micro-batches of up to {cfg.per_device_batch_tokens:,} tokens on {on_ranks}"
    size = int(cfg.per_device_batch_size)  # `auto` is resolved by now
    count = -(-batch // size)
    up_to = "up to " if count % ranks or batch % size else ""
    accumulated = f"{up_to}{-(-count // ranks)} accumulated"
    return f"{batch} examples = {count} micro-batches of {up_to}{size} = {on_ranks} × {accumulated}"
