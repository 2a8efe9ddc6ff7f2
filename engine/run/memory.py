"""Memory of a device, as the plan estimates it: weights, gradients, optimizer moments, and inputs of recomputed layers.

docs/scaling.md explains the arithmetic. Tests: tests/engine/run/test_memory.py.
"""

import os
from collections.abc import Callable

import torch

from engine.config.errors import warn
from engine.config.find_addons import load_addon
from engine.config.optimizer_class import find_optimizer, normalized
from engine.config.run_config import RunConfig
from engine.distributed.init_accelerator import sharding_of_launch
from engine.models.compile_and_recompute import recomputing_layers
from engine.models.config_and_tokenizer import config_value, text_config


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Return (parameters, trainable parameters) of a model, which may be on the meta device or sharded."""
    total = 0
    trained = 0
    for parameter in model.parameters():
        size = _number_of_values(parameter)
        total += size
        if parameter.requires_grad:
            trained += size
    return total, trained


def count_bytes(model: torch.nn.Module) -> tuple[int, int]:
    """Return the bytes of (all parameters, trainable parameters), each in its dtype: an adapter may be wider than its
    base model."""
    total = 0
    trained = 0
    for parameter in model.parameters():
        size = getattr(parameter, "ds_numel", parameter.numel()) * parameter.itemsize
        total += size
        if parameter.requires_grad:
            trained += size
    return total, trained


def _number_of_values(parameter: torch.nn.Parameter) -> int:
    """Return how many weights a parameter stands for, also if it is sharded or has two of them in a byte."""
    state = getattr(parameter, "quant_state", None)  # of bitsandbytes
    if state is not None:
        return state.shape.numel()
    return getattr(parameter, "ds_numel", parameter.numel())  # ds_numel: under ZeRO-3


def bytes_of_scales(model: torch.nn.Module) -> int:
    """Return the bytes of the scales that bitsandbytes keeps beside weights in 4 and 8 bits."""
    tensors = []
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        for each in (state, getattr(state, "state2", None)):  # the scales, and the scales of these
            tensors += vars(each).values() if each is not None else ()
        tensors.append(getattr(parameter, "SCB", None))  # of 8 bits
    return sum(value.nbytes for value in tensors if torch.is_tensor(value))


def moment_bytes(cfg: RunConfig, trained: int, size: int) -> int:
    """Return the bytes of the optimizer's state for `trained` parameters, which have `size` bytes."""
    kind, addon = find_optimizer(cfg.optim)
    if hasattr(addon, "bytes_per_weight"):  # moments in fewer bits
        return int(addon.bytes_per_weight(cfg, kind) * trained)
    return optimizer_moments(cfg) * size


def optimizer_moments(cfg: RunConfig) -> int:
    """Return the number of optimizer state values per trainable parameter; a guess for unlisted optimizers."""
    _, addon = find_optimizer(cfg.optim)
    values = {"sgd": 1, "adafactor": 0} | getattr(addon, "STATE_PER_WEIGHT", {})
    name = cfg.optim.rpartition("/")[2]  # of FILE/NAME
    return values.get(normalized(name), 2)


def describe_memory(
    cfg: RunConfig, model: torch.nn.Module, format_size: Callable[[float], str], copies: int = 0, longest: int = 0
) -> str:
    """Return one line: the memory per device under this launch's backend.

    `copies`: copies of the trained weights that techniques have. `longest`: tokens of the longest row, 0 if unknown."""
    addons = [name for name in sharding_of_launch() if name != "FSDP"]
    if addons:  # the add-on has accelerate's name
        addon = load_addon("backends", addons[0].lower())
        name, sizes, offload = addon.memory_of_launch(cfg, *count_parameters(model), copies)
    else:
        name, shards, offload = backend_of_launch()
        sizes = resting_bytes(cfg, *count_parameters(model), shards, copies, count_bytes(model))
        sizes["weights"] += bytes_of_scales(model)
    needed, available = sum(sizes.values()), available_bytes(offload)
    if needed > available:
        warn(
            f"memory: weights, gradients and optimizer need {format_size(needed)} on each device, which has "
            f"{format_size(available)}: shard them over more devices (accelerate_configs/fsdp2.yaml), or train an adapter"
        )
    place = f"rest in host memory ({name}, offload)" if offload else f"per device ({name})"
    kept = describe_activations(cfg, model, format_size, longest)
    needs = f"{format_size(needed)} {place} for weights, gradients and optimizer; plus activations: {kept}"
    return f"{needs} (docs/scaling.md); it has {format_size(available)}"


def available_bytes(offload: bool = False) -> float:
    """Return the memory of the device of this process, or its share of this machine's; the launcher may run elsewhere."""
    if torch.cuda.is_available() and not offload and _env("ACCELERATE_USE_CPU") != "true":
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / int(_env("LOCAL_WORLD_SIZE", "1"))


def describe_activations(
    cfg: RunConfig, model: torch.nn.Module, format_size: Callable[[float], str], longest: int
) -> str:
    """Return which activations a micro-batch keeps until its backward pass, with the bytes of the inputs of layers that
    recompute. What else it keeps depends on kernels and is not counted."""
    short_run = "a short run shows them"
    recomputed = recomputing_layers(model) if cfg.gradient_checkpointing is not False else []
    if not recomputed:
        return short_run
    kinds = {type(layer) for layer in recomputed}
    layers = [module for module in model.modules() if type(module) in kinds]
    size = input_bytes(cfg, model, longest)
    known = f" (up to {format_size(size * len(recomputed))})" if size else ""
    grade = cfg.gradient_checkpointing
    place = " in host memory" if isinstance(grade, dict) and grade.get("offload") else ""
    others = "all of the other layers" if len(layers) > len(recomputed) else "all of one layer at a time"
    return f"the inputs of {len(recomputed)} of {len(layers)} layers{place}{known}, and {others}: {short_run}"


def input_bytes(cfg: RunConfig, model: torch.nn.Module, longest: int) -> int:
    """Return the bytes of the hidden states that a layer gets for a full micro-batch; 0 if they are not known."""
    hidden = config_value(text_config(model.config), "hidden_size") if hasattr(model, "config") else None
    if cfg.per_device_batch_tokens:
        tokens = cfg.per_device_batch_tokens
    elif isinstance(cfg.per_device_batch_size, int):
        tokens = cfg.per_device_batch_size * longest
    else:
        tokens = 0
    if not isinstance(hidden, int):
        return 0
    # FSDP2 and ZeRO cast the hidden states, autocast of DDP only products.
    in_16_bits = _env("ACCELERATE_MIXED_PRECISION", "no") in ("bf16", "fp16") and bool(sharding_of_launch())
    width = 2 if in_16_bits else getattr(torch, cfg.dtype).itemsize
    return tokens * hidden * width


def resting_bytes(
    cfg: RunConfig, parameters: int, trained: int, shards: int, copies: int = 0, sizes: tuple[int, int] | None = None
) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer state that a process keeps between steps.

    `shards` processes together hold one copy. `copies` of the trained weights, in float32, count as weights. `sizes`:
    bytes of all and of the trained parameters, by default all in the dtype of the run."""
    width = getattr(torch, cfg.dtype).itemsize
    of_all, of_trained = sizes or (width * parameters, width * trained)
    of_copies = copies * max(width, 4) * trained / shards
    of_sums = trained * (24 if width == 8 else 16) if cfg.exact_sums else 0  # their parts stay in memory
    return {
        "weights": of_all / shards + of_copies,
        "gradients": of_trained / shards + of_sums,
        "optimizer": moment_bytes(cfg, trained, of_trained) / shards,
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
