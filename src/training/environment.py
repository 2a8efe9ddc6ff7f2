"""environment.json: versions, git commit, topology, batch arithmetic.

Record more about a run here. Tests: tests/src/training/test_run_logger.py.
"""

import json
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import torch

from engine.config.paths import REPOSITORY
from engine.config.redact import redact_all
from engine.config.schema import RunConfig
from engine.distributed.backends import Backend
from engine.distributed.init_accelerator import num_nodes
from engine.storage import atomic_folder, hub, jsonl

PACKAGES = ("torch", "accelerate", "transformers", "datasets", "evaluate", "tokenizers", "safetensors", "numpy")


def write_environment(folder: Path, backend: Backend, cfg: RunConfig, unit: str, step: int) -> None:
    """Write environment.json, with a list of all starts of this run."""
    starts = jsonl.read_json(folder / "environment.json").get("starts", []) if step else []
    # git tracks train.py, or it has found another repository in a parent folder.
    commit = _git("rev-parse", "HEAD").strip() if _git("ls-files", "train.py") else ""
    values = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "git_commit": commit or None,
        "git_dirty": bool(_git("status", "--porcelain")) if commit else None,
        "command": redact_all(sys.argv),
        "fetched": redact_all(hub.records),
        **topology(backend, cfg),
        "unit": unit,
        "starts": [*starts, {"step": step, "world_size": backend.accelerator.num_processes, "time": time.time()}],
    }
    atomic_folder.rewrite(folder / "environment.json", json.dumps(values, indent=1))


def _git(*words: str) -> str:
    """Return the output of a git command in this repository, or an empty text if it fails."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *words]  # fsmonitor would run a program
    try:
        return subprocess.run(command, capture_output=True, cwd=REPOSITORY, check=True, timeout=60, text=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def topology(backend: Backend, cfg: RunConfig, training: bool = True) -> dict:
    """Return device, precision, backend, world size and nodes; for training also the global batch."""
    accelerator, device = backend.accelerator, backend.accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    compute_dtype = cfg.dtype if accelerator.mixed_precision == "no" else accelerator.mixed_precision
    values = {
        "device": f"{device.type} ({name}), CPU threads per rank: {torch.get_num_threads()}",
        "precision": f"weights {cfg.dtype}, computing in {compute_dtype}",
        "strategy": backend.name,
        "world_size": accelerator.num_processes,
        "nodes": num_nodes(),
    }
    return values | ({"global_batch": arithmetic(cfg, backend.data_world_size)} if training else {})


def arithmetic(cfg: RunConfig, ranks: int) -> str:
    """Format the global batch as examples = micro-batches = ranks × accumulation steps."""
    batch, on_ranks = cfg.global_batch_size, f"{ranks} rank{'s' * (ranks > 1)}"
    if cfg.per_device_batch_tokens:
        return f"{batch} examples = micro-batches of up to {cfg.per_device_batch_tokens:,} tokens on {on_ranks}"
    size = int(cfg.per_device_batch_size)  # `auto` was replaced or refused
    count = -(-batch // size)
    up_to = "up to " if count % ranks or batch % size else ""
    accumulated = f"{up_to}{-(-count // ranks)} accumulated"
    return f"{batch} examples = {count} micro-batches of {up_to}{size} = {on_ranks} × {accumulated}"
