"""Settings of a strategy that cannot work, refused before training; sizes of the device mesh completed.

Tests: tests/distributed/test_accelerate_configs.py, test_fsdp2.py, test_tensor_parallel.py and tests/training/test_local_sgd.py.
"""

import os
from typing import TYPE_CHECKING

from src.config.errors import UsageError, warn
from src.config.schema import RunConfig

if TYPE_CHECKING:
    from src.distributed.strategies import Strategy

MESH = ("dp_replicate", "dp_shard", "tp")


# ---- before there is an Accelerator, from the launcher's environment ---------------------------------------------------


def check_fsdp_version() -> None:
    """Raise UsageError for FSDP1, before accelerate looks for the device that FSDP1 needs."""
    if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise UsageError(f"fsdp_version is {version}: give 2, as accelerate_configs/fsdp2.yaml does")


def complete_mesh(world: int) -> None:
    """Set dp_shard_size so that HSDP or tensor parallelism uses all `world` processes.

    So the accelerate file names copies and the tensor parallel size only, and fits any number of processes."""
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
            f"{given} does not divide {world} processes into groups of two or more that each hold one copy of the model: "
            "change the sizes or the number of processes"
        )


# ---- with the strategy made --------------------------------------------------------------------------------------------


def check_settings(strategy: "Strategy", cfg: RunConfig) -> None:
    """Raise UsageError for settings that this strategy cannot offer; warn of those that it ignores."""
    _check_mesh(strategy, cfg)
    _check_local_sgd(strategy, cfg)
    accelerator = strategy.accelerator
    if strategy.is_sharded and cfg.per_device_batch_size == "auto":
        raise UsageError(
            f"per_device_batch_size is auto, which cannot be tried out under {strategy.name}: give a number"
        )
    if cfg.ddp_comm_hook != "no" and (strategy.is_sharded or accelerator.num_processes == 1):
        warn(
            f"ddp_comm_hook {cfg.ddp_comm_hook} is ignored: it compresses the gradients of DDP, and this is {strategy.name}"
        )
    if cfg.ddp_comm_hook == "bf16" and accelerator.device.type == "cpu":
        raise UsageError("ddp_comm_hook is bf16, which torch has for GPUs only: remove it, or use fp16")
    if cfg.sync_each_batch and not strategy.is_sharded:
        warn("sync_each_batch is ignored: a replica holds its whole gradient anyway, so it would save no memory")


def _check_mesh(strategy: "Strategy", cfg: RunConfig) -> None:
    mesh = strategy.accelerator.parallelism_config
    for name, meaning in (("cp", "context"), ("sp", "sequence")):
        if mesh and (size := getattr(mesh, f"{name}_size")) > 1:
            raise UsageError(
                f"parallelism_config_{name}_size is {size}: {meaning} parallelism is not supported, and each process would train "
                "on other rows; remove it (docs/scaling.md says why, and what to use)"
            )
    if strategy.tp_size > 1 and (cfg.compile or not strategy.allows_tensor_parallel):
        raise UsageError(
            f"tp_size is {strategy.tp_size}: tensor parallelism needs FSDP2 with fsdp_cpu_ram_efficient_loading: false, or "
            "neither FSDP nor DeepSpeed, and no compile"
        )


def _check_local_sgd(strategy: "Strategy", cfg: RunConfig) -> None:
    if not cfg.local_sgd_steps:
        return
    if strategy.is_sharded:
        raise UsageError(
            f"local_sgd_steps is {cfg.local_sgd_steps}, but under {strategy.name} no process holds a whole model that it could "
            "update alone: remove it, or use accelerate_configs/ddp.yaml"
        )
    if strategy.accelerator.num_processes == 1:
        warn("local_sgd_steps is ignored: with one process there is nothing to average")
    elif strategy.accelerator.mixed_precision == "fp16":
        raise UsageError(
            f"local_sgd_steps is {cfg.local_sgd_steps}, but with fp16 each process would scale its gradient by a factor of its "
            "own: use bf16"
        )
