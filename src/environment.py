"""Where a run is computed: versions, git commit, devices, and how its global batch is made up there.

A fork adds what its runs should remember. Guarded by tests/test_tracking.py.
"""

import platform
import subprocess
import sys
from importlib import metadata

import torch

from src import fetch, strategy
from src.fields import RunConfig
from src.inputs import REPOSITORY
from src.launch import nodes
from src.tensor_parallel import place


def environment(accelerator, run: RunConfig) -> dict:
    """Return versions, git commit, topology and batch arithmetic of this process group."""
    packages = ("torch", "accelerate", "transformers", "datasets", "evaluate", "tokenizers", "safetensors", "numpy")
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: metadata.version(name) for name in packages},
        "git_commit": git.stdout.strip() or None,
        "command": sys.argv,
        "fetched": fetch.record,
        **topology(accelerator, run),
    }


def topology(accelerator, run: RunConfig) -> dict:
    """Return where the run is computed, and how its global batch is made up there."""
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    threads = f", {torch.get_num_threads()} threads a rank" if device.type == "cpu" else ""
    computing = run.dtype if accelerator.mixed_precision == "no" else accelerator.mixed_precision
    return {
        "device": f"{device.type} ({name}{threads})",
        "precision": f"weights {run.dtype}, computing in {computing}",
        "strategy": strategy.named(accelerator),
        "world_size": accelerator.num_processes,
        "nodes": nodes(),
        "global_batch": arithmetic(run, place(accelerator)[1]),
    }


def arithmetic(run: RunConfig, world: int) -> str:
    """Return how the global batch is made up, as a sum that can be checked."""
    if run.per_device_batch_tokens:
        return (
            f"{run.global_batch_size} examples = micro-batches of up to {run.per_device_batch_tokens:,} tokens, shared among "
            f"{world} rank{'s' * (world > 1)}: the sum stays exact"
        )
    micro = -(-run.global_batch_size // run.per_device_batch_size)
    each = -(-micro // world)
    even = micro % world == 0 and run.global_batch_size % run.per_device_batch_size == 0
    rows = f"{run.global_batch_size} examples = {micro} micro-batches of {'' if even else 'up to '}{run.per_device_batch_size}"
    share = f"{world} rank{'s' * (world > 1)} × {each} accumulated" + (
        "" if even else ", some fewer: the sum stays exact"
    )
    return f"{rows} = {share}"
