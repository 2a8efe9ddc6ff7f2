"""Checks of the distributed settings before training; device-mesh sizes that are not given are computed.

Tests: tests/distributed/test_accelerate_configs.py, test_fsdp2.py and test_unused_parameters.py.
"""

import os
import re
from typing import TYPE_CHECKING

import torch

from src.config.errors import UsageError, warn
from src.config.schema import RunConfig
from src.distributed.sharded_tensors import plain_name
from src.runtime import private_apis

if TYPE_CHECKING:
    from src.distributed.strategies import Strategy

MESH = ("dp_replicate", "dp_shard", "tp")
PRECISIONS = ("no", "bf16", "fp16", "fp8")


# ---- before the Accelerator exists: environment variables of the launcher --------------------------------------------


def check_fsdp_version() -> None:
    """Raise UsageError for FSDP1. Called before accelerate looks for the accelerator device that FSDP1 needs."""
    if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise UsageError(f"fsdp_version is {version}: give 2, as accelerate_configs/fsdp2.yaml does")


def complete_mesh(world: int) -> None:
    """Set dp_shard_size so that HSDP or tensor parallelism uses all `world` processes.

    The accelerate file then sets only dp_replicate_size and tp_size, and fits any number of processes."""
    sizes = {}
    for name in MESH:
        value = os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")
        if not value.isdecimal() or int(value) == 0:
            raise UsageError(f"parallelism_config_{name}_size is {value!r}: give a whole number above zero")
        sizes[name] = int(value)
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true" or set(sizes.values()) == {1}:
        return
    copies, shards, tp = sizes.values()
    if shards == 1 and world % (copies * tp) == 0 and world > copies * tp:
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = str(world // (copies * tp))
    elif copies * shards * tp != world or shards == 1:
        given = " × ".join(f"parallelism_config_{name}_size {size}" for name, size in sizes.items() if size > 1)
        raise UsageError(
            f"{given} does not divide {world} processes into equal groups of at least two that shard the model: change "
            "these sizes or the number of processes"
        )


def check_precision(precision: str, cfg: RunConfig) -> None:
    """Raise UsageError for an unknown precision, or one that contradicts the run file."""
    if precision not in PRECISIONS:
        raise UsageError(
            f"mixed_precision is {precision!r}: give one of {', '.join(PRECISIONS)} in the accelerate file"
        )
    if precision != "no" and cfg.dtype == "float64":
        raise UsageError(f"dtype is float64, but mixed_precision is {precision} in the accelerate file: set it to 'no'")


def check_precision_of_fsdp2(precision: str, cfg: RunConfig) -> None:
    """Raise UsageError for weights in bfloat16 under mixed precision."""
    if precision in ("bf16", "fp16") and cfg.dtype == "bfloat16":
        raise UsageError(
            "dtype is bfloat16, but FSDP2 keeps float32 weights for mixed_precision: set mixed_precision: 'no'"
        )


# ---- after the strategy is created -----------------------------------------------------------------------------------


def check_settings(strategy: "Strategy", cfg: RunConfig) -> None:
    """Raise UsageError for settings that this strategy does not support; warn about settings that it ignores."""
    _check_mesh(strategy)
    for name in strategy.unsupported:
        if value := getattr(cfg, name, None):  # it may belong to an add-on that the run file does not name
            raise UsageError(
                f"{name} is {str(value).lower()}, which {strategy.name} does not support: remove it, or use DDP or FSDP2 "
                "(accelerate_configs/ddp.yaml, fsdp2.yaml)"
            )
    if cfg.per_device_batch_size == "auto" and strategy.is_sharded:
        raise UsageError(
            f"per_device_batch_size is auto, but under {strategy.name} each pass is a collective, in which all ranks would "
            "wait for one that has run out of memory: give a number"
        )
    accelerator = strategy.accelerator
    if cfg.ddp_comm_hook != "no" and (strategy.is_sharded or accelerator.num_processes == 1):
        warn(f"ddp_comm_hook {cfg.ddp_comm_hook} is ignored: it needs DDP, and this is {strategy.name}")
    if cfg.ddp_comm_hook == "bf16" and accelerator.device.type == "cpu":
        raise UsageError("ddp_comm_hook is bf16, which torch supports on GPUs only: remove it, or use fp16")
    if cfg.sync_each_batch and not strategy.is_sharded:
        warn("sync_each_batch is ignored: it saves memory only if gradients are sharded")


def _check_mesh(strategy: "Strategy") -> None:
    mesh = strategy.accelerator.parallelism_config
    for name, meaning in (("cp", "context"), ("sp", "sequence")):
        if mesh and (size := getattr(mesh, f"{name}_size")) > 1:
            raise UsageError(
                f"parallelism_config_{name}_size is {size}: {meaning} parallelism is not supported. Remove the key; "
                "docs/scaling.md says why, and what to use instead"
            )


# ---- before the model is wrapped -------------------------------------------------------------------------------------


def check_model(strategy: "Strategy", model: torch.nn.Module) -> None:
    """Raise UsageError for state that cannot be sharded, or for a layer that depends on the number of processes."""
    if strategy.is_sharded:
        check_only_tensors(model)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm) and strategy.accelerator.num_processes > 1:
            raise UsageError(
                f"{name} is a SyncBatchNorm, which depends on the number of processes: use BatchNorm; its running statistics "
                "are the same on all processes here"
            )


def check_groups(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if a trainable parameter is in no parameter group: it would never be trained."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [plain_name(name) for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(
            f"{missing[0]}{more}: trainable, but in no parameter group of the optimizer: add it to one (`parameter_groups` in "
            "src/training/optimizers.py), or freeze it in `build`"
        )


def rate_factor(rate: float, learning_rate: float) -> float:
    """Return the rate of a parameter group as a multiple of `learning_rate`; raise UsageError if there is none."""
    if rate < 0:
        raise UsageError(f"a parameter group of the optimizer has the rate {rate:g}: give 0 or more")
    if rate and not learning_rate:
        raise UsageError(
            f"learning_rate is 0, but a parameter group has the rate {rate:g}: groups are multiples of learning_rate. Give "
            'a positive learning_rate, or the group a field "lr_factor"'
        )
    return rate / learning_rate if learning_rate else 1.0


def check_only_tensors(model: torch.nn.Module) -> None:
    """Raise UsageError if a state dict holds something else than tensors, which can be neither sharded nor saved."""
    if others := [name for name, value in model.state_dict().items() if not isinstance(value, torch.Tensor)]:
        raise UsageError(
            f"{others[0]} of {type(model).__name__} is extra state and not a tensor, which a checkpoint cannot hold: make it "
            "a buffer"
        )


def check_shardable(model: torch.nn.Module, strategy: str) -> None:
    """Raise UsageError for a parameter that FSDP2 cannot split."""
    for name, parameter in model.named_parameters():
        if not parameter.dim() or not parameter.numel():
            kind = "is a single number: give it the shape (1,)" if parameter.numel() else "has no elements: remove it"
            raise UsageError(
                f"{type(model).__name__}: {name} {kind}, or use another strategy: {strategy} cannot split it"
            )


# ---- in a step -------------------------------------------------------------------------------------------------------

FIX = "freeze them by the field freeze (an adapter of peft: name the layers in its exclude_modules)"


def check_trainable(parameters: dict[str, torch.nn.Parameter], trainable: set[str]) -> None:
    """Raise UsageError if a parameter was frozen or unfrozen after the optimizer and the reduction were built."""
    changed = [name for name, p in parameters.items() if p.requires_grad != (name in trainable)]
    if changed:
        raise UsageError(
            f"requires_grad of {_in_words(changed)} was changed during training, which neither the optimizer nor the "
            "reduction of gradients notices: set it in `build` of the task; to change it later, train the second part "
            "as a run of its own with --init_from CHECKPOINT"
        )


def check_reduced(module: torch.nn.Module, parameters: dict[str, torch.nn.Parameter]) -> None:
    """Raise UsageError if DDP is still waiting for a gradient after the last backward pass of a step.

    Otherwise it says so only in its next forward pass, after an update with gradients that were not reduced."""
    if not isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return
    try:
        private_apis.check_reduced(module)
    except RuntimeError as error:
        names = [name for name, p in parameters.items() if p.requires_grad]
        indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        missing = [names[int(index)] for index in indices[1].split()] if indices else ["some parameters"]
        raise UsageError(
            f"the loss does not use {_in_words(missing)} in this step, and DDP waits for their gradients: {FIX}, or, if "
            "other rows use them, set --ddp_find_unused_parameters true"
        ) from error


def _in_words(names: list[str]) -> str:
    """Return "parameter NAME" or "N parameters (NAME, …)" with at most five names."""
    if len(names) == 1:
        return f"parameter {names[0]}"
    return f"{len(names)} parameters ({', '.join(names[:5])}{', …' if len(names) > 5 else ''})"
