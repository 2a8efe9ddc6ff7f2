"""Memory of a device: an estimate for the plan, and `per_device_batch_size: auto`, the largest micro-batch that fits.

The estimate is arithmetic of weights, gradients and optimizer moments, without activations; docs/scaling.md explains it.
Tests: tests/models/test_memory_estimate.py and tests/training/test_auto_batch_size.py.
"""

import gc
import os
from collections.abc import Callable

import torch

from src.config.addons import load_addon
from src.config.schema import RunConfig
from src.data.prepared_split import Split
from src.distributed.backends import Backend
from src.distributed.init_accelerator import sharding_of_launch
from src.runtime import exit_codes
from src.tasks import Task

# ---- the estimate ----------------------------------------------------------------------------------------------------


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Return (parameters, trainable parameters) of a model, which may be on the meta device or sharded."""
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]  # ds_numel: under ZeRO-3
    return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)


def optimizer_moments(cfg: RunConfig) -> int:
    """Return the number of optimizer state values per trainable parameter; a guess for unlisted optimizers."""
    return {"sgd": 1, "lion": 1, "muon": 1, "adafactor": 0}.get(cfg.optim.lower(), 2)


def describe_memory(
    cfg: RunConfig, model: torch.nn.Module, format_size: Callable[[float], str], copies: int = 0
) -> str:
    """Return one line: the memory per device under this launch's backend.

    `copies`: copies of the trained weights that techniques have."""
    addons = [name for name in sharding_of_launch() if name != "FSDP"]
    if addons:  # the add-on has accelerate's name
        addon = load_addon("backends", addons[0].lower())
        name, sizes, offload = addon.memory_of_launch(cfg, *count_parameters(model), copies)
    else:
        name, shards, offload = backend_of_launch()
        sizes = resting_bytes(cfg, *count_parameters(model), shards, copies)
    where = f"rest in host memory ({name}, offload)" if offload else f"per device ({name})"
    size, more = format_size(sum(sizes.values())), "plus activations: a short run shows them (docs/scaling.md)"
    return f"{size} {where} for weights, gradients and optimizer; {more}"


def resting_bytes(cfg: RunConfig, parameters: int, trained: int, shards: int, copies: int = 0) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer state that a process keeps between steps.

    `shards` processes together hold one copy. `copies` of the trained weights, in float32, count as weights."""
    width = getattr(torch, cfg.dtype).itemsize
    weights, gradients = width * parameters / shards, width * trained / shards
    weights += copies * max(width, 4) * trained / shards
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer_moments(cfg) * width * trained / shards}


def backend_of_launch() -> tuple[str, int, bool]:
    """Return (name, shards, whether weights are in host memory) from the launcher's variables, for DDP and FSDP2."""
    world = int(_env("WORLD_SIZE", "1"))
    if _env("ACCELERATE_USE_FSDP") == "true":
        copies = int(_env("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))
        tp_size = int(_env("PARALLELISM_CONFIG_TP_SIZE", "1"))  # it splits most weights further: an upper bound
        shards = max(1, world // copies // tp_size)
        return "HSDP" if copies > 1 else "FSDP2", shards, _env("FSDP_OFFLOAD_PARAMS") == "true"
    return "DDP" if world > 1 else "one device", 1, False


def _env(name: str, default: str = "") -> str:
    return os.environ.get(name, default).lower()


# ---- the largest micro-batch -----------------------------------------------------------------------------------------

LARGEST_ON_CPU = 8  # a CPU process that runs out of memory is killed without an exception


def choose_batch_size(backend: Backend, cfg: RunConfig, module: torch.nn.Module, task: Task, train_set: Split) -> int:
    """Return per_device_batch_size. For `auto`, return the largest power of two for which a forward and backward pass
    over the longest rows fits on every rank, up to its share of the global batch; backend_checks.py refuses shards."""
    if cfg.per_device_batch_size != "auto":
        return cfg.per_device_batch_size
    size = 1 << (max(1, cfg.global_batch_size // backend.accelerator.num_processes).bit_length() - 1)
    if backend.accelerator.device.type == "cpu":
        return min(size, LARGEST_ON_CPU)
    return largest_that_fits(backend, module, task, train_set, size)


def largest_that_fits(backend: Backend, module: torch.nn.Module, task: Task, train_set: Split, size: int) -> int:
    """Return the first of `size`, `size` / 2, … rows with a pass that fits on every rank; a collective."""
    with backend.buffers.unchanged():
        while size > 1 and backend.hosts.sum([lacks_memory(backend, module, task, train_set, size)])[0]:
            size //= 2
    return size


def lacks_memory(backend: Backend, module: torch.nn.Module, task: Task, train_set: Split, size: int) -> bool:
    """Return whether a pass over `size` rows does not fit in memory beside the optimizer's moments."""
    # Without DDP: a rank could wait for an all-reduce that another rank, out of memory, never reaches.
    device, module, moments = backend.accelerator.device, backend.accelerator.unwrap_model(module), []
    try:
        rows = train_set.rows(train_set.longest(size))
        moments = [torch.empty_like(p) for p in module.parameters() if p.requires_grad for _ in range(2)]
        inputs = {name: value.to(device) for name, value in task.collate(rows, training=True).inputs.items()}
        inputs.pop("target_positions", None)  # as if every token had a target: other rows of this length may
        out = module(inputs)
        torch.stack([value.float().sum() for value in out.values() if value.requires_grad]).sum().backward()
        return False
    except RuntimeError as error:
        if not exit_codes.is_out_of_memory(error):
            raise
        return True
    finally:
        moments.clear()
        module.zero_grad(set_to_none=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
