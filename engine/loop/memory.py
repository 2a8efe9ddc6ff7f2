"""Memory of a device, as the plan estimates it: weights, gradients and optimizer moments, without activations.

docs/scaling.md explains the arithmetic. Tests: tests/engine/loop/test_memory.py.
"""

import os
from collections.abc import Callable

import torch

from engine.config.addons import load_addon
from engine.config.optimizer_class import find_optimizer, normalized
from engine.config.run_config import RunConfig
from engine.distributed.init_accelerator import sharding_of_launch


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Return (parameters, trainable parameters) of a model, which may be on the meta device or sharded."""
    total = 0
    trained = 0
    for parameter in model.parameters():
        size = getattr(parameter, "ds_numel", parameter.numel())  # ds_numel: under ZeRO-3
        total += size
        if parameter.requires_grad:
            trained += size
    return total, trained


def optimizer_moments(cfg: RunConfig) -> int:
    """Return the number of optimizer state values per trainable parameter; a guess for unlisted optimizers."""
    _, addon = find_optimizer(cfg.optim)
    values = {"sgd": 1, "adafactor": 0} | getattr(addon, "STATE_PER_WEIGHT", {})
    name = cfg.optim.rpartition("/")[2]  # of FILE/NAME
    return values.get(normalized(name), 2)


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
    size = format_size(sum(sizes.values()))
    place = f"rest in host memory ({name}, offload)" if offload else f"per device ({name})"
    return f"{size} {place} for weights, gradients and optimizer; plus activations: a short run shows them (docs/scaling.md)"


def resting_bytes(cfg: RunConfig, parameters: int, trained: int, shards: int, copies: int = 0) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer state that a process keeps between steps.

    `shards` processes together hold one copy. `copies` of the trained weights, in float32, count as weights."""
    width = getattr(torch, cfg.dtype).itemsize
    of_copies = copies * max(width, 4) * trained / shards
    return {
        "weights": width * parameters / shards + of_copies,
        "gradients": width * trained / shards,
        "optimizer": optimizer_moments(cfg) * width * trained / shards,
    }


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
