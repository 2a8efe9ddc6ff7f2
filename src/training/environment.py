"""environment.json: versions, topology, batch arithmetic.

Record more about a run here. Tests: tests/src/training/test_run_logger.py.
"""

import platform
from importlib import metadata

import torch

from engine.distributed.backends import Backend
from engine.distributed.init_accelerator import num_nodes
from engine.run.train_state import Run
from src.fields import RunConfig

PACKAGES = ("torch", "accelerate", "transformers", "datasets", "evaluate", "tokenizers", "safetensors", "numpy")


def environment(run: Run) -> dict:
    """Return the values of environment.json; the engine adds the git commit, the command and the starts of the run."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "unit": run.task.unit,
    } | topology(run.backend, run.cfg)


def topology(backend: Backend, cfg: RunConfig, training: bool = True) -> dict:
    """Return device, precision, backend, world size and nodes; for training also the global batch."""
    accelerator = backend.accelerator
    device = accelerator.device
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    compute_dtype = cfg.dtype if accelerator.mixed_precision == "no" else accelerator.mixed_precision
    values = {
        "device": f"{device.type} ({device_name}), CPU threads per rank: {torch.get_num_threads()}",
        "precision": f"weights {cfg.dtype}, computing in {compute_dtype}",
        "strategy": backend.name,
        "world_size": accelerator.num_processes,
        "nodes": num_nodes(),
    }
    if training:
        values["global_batch"] = arithmetic(cfg, backend.data_world_size)
    return values


def arithmetic(cfg: RunConfig, ranks: int) -> str:
    """Format the global batch as examples = micro-batches = ranks × accumulation steps."""
    batch = cfg.global_batch_size
    on_ranks = "1 rank" if ranks == 1 else f"{ranks} ranks"
    if cfg.per_device_batch_tokens:
        return f"{batch} examples = micro-batches of up to {cfg.per_device_batch_tokens:,} tokens on {on_ranks}"
    size = cfg.per_device_batch_size
    micro_batches = -(-batch // size)  # rounded up
    accumulated = -(-micro_batches // ranks)
    up_to = "up to " if micro_batches % ranks or batch % size else ""
    return f"{batch} examples = {micro_batches} micro-batches of {up_to}{size} = {on_ranks} × {up_to}{accumulated} accumulated"
