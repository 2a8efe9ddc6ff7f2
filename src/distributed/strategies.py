"""What differs between one process, DDP, FSDP2 and DeepSpeed: configuration, gradient sync, backward.

Tests: tests/distributed/test_fsdp2.py, tests/distributed/test_deepspeed.py and tests/training/test_step.py. src/distributed/prepare_model.py builds and wraps.
"""

import os
from contextlib import contextmanager
from dataclasses import replace

import torch

from src.config.errors import UsageError, warn
from src.config.schema import RunConfig
from src.distributed import tensor_parallel

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}  # mixed_precision -> what matrix products are computed in


def is_sharded(accelerator) -> bool:
    """Return whether no process holds the whole model, so that a forward or backward pass is a collective of all."""
    return accelerator.distributed_type.value in ("FSDP", "DEEPSPEED") or tensor_parallel.tp_size(accelerator) > 1


def strategy_name(accelerator) -> str:
    """Return the strategy in words."""
    kind, mesh = accelerator.distributed_type.value, accelerator.parallelism_config
    if (cut := tensor_parallel.tp_size(accelerator)) > 1:
        shards = f", FSDP2 over {mesh.dp_shard_size}" if kind == "FSDP" else ""
        return (
            f"layers cut over {cut} processes{shards}"
            + f", {mesh.dp_replicate_size} copies" * mesh.dp_replicate_enabled
        )
    if kind == "FSDP":
        copies = mesh.dp_replicate_size if mesh else 1
        return "FSDP2" if copies == 1 else f"HSDP: {copies} copies, each over {mesh.dp_shard_size} processes"
    if kind == "DEEPSPEED":
        return f"DeepSpeed ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    if accelerator.num_processes == 1:
        return "one process"
    return "DDP over " + torch.distributed.get_backend()


def check_version() -> None:
    """Raise UsageError for FSDP1, before accelerate looks for a device that it needs."""
    if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise UsageError(f"fsdp_version is {version}: give 2, as accelerate_configs/fsdp2.yaml does")


def complete_mesh(world: int) -> None:
    """Let a model of which there are several copies (HSDP), or whose layers are cut, be sharded over all processes that it has.

    So the accelerate file names copies and cuts only, and fits any number of processes."""
    sizes = {f"parallelism_config_{name}_size": 1 for name in ("dp_replicate", "dp_shard", "tp")}
    for name in sizes:
        value = os.environ.get(name.upper(), "1")
        if not value.isdecimal() or not int(value):
            raise UsageError(f"{name} is {value!r}: give a whole number above zero")
        sizes[name] = int(value)
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true" or set(sizes.values()) == {1}:
        return
    copies, shards, cuts = sizes.values()
    said = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    if shards == 1 and not world % (copies * cuts) and world > copies * cuts:
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = str(world // (copies * cuts))
    elif copies * shards * cuts != world or shards == 1:
        raise UsageError(
            f"{said} does not cut {world} processes into groups of two or more that each hold one copy of the model: change either"
        )


def configure(accelerator, cfg: RunConfig) -> None:
    """Give the backend what follows from the run file; UsageError for what cannot be had or is said in two places."""
    kind, mesh = accelerator.distributed_type.value, accelerator.parallelism_config
    for name, meaning in (("cp", "context"), ("sp", "sequence")):
        if mesh and getattr(mesh, f"{name}_size") > 1:
            raise UsageError(
                f"parallelism_config_{name}_size is {getattr(mesh, f'{name}_size')}: {meaning} parallelism is not offered, and each "
                "process would train on other rows; take it out (docs/scaling.md says why, and what to use)"
            )
    if is_sharded(accelerator) and cfg.per_device_batch_size == "auto":
        raise UsageError(f"per_device_batch_size is auto, which cannot be tried out under {kind}: give a number")
    tensor_parallel.check(accelerator, cfg)
    if cfg.local_sgd_steps:
        _configure_local_sgd(accelerator, cfg)
    if kind == "FSDP":
        _configure_fsdp(accelerator, cfg)
    elif kind == "DEEPSPEED":
        from src.distributed import deepspeed

        deepspeed.configure(accelerator, cfg)
    if cfg.ddp_comm_hook != "no" and (kind not in ("MULTI_GPU", "MULTI_CPU") or accelerator.num_processes == 1):
        warn(f"ddp_comm_hook {cfg.ddp_comm_hook} is ignored: gradients of whole replicas (DDP) only go through it")
    if cfg.ddp_comm_hook == "bf16" and accelerator.device.type == "cpu":
        raise UsageError("ddp_comm_hook is bf16, which torch has for GPUs only: leave it out, or use fp16")
    if cfg.sync_each_batch and not is_sharded(accelerator):
        warn("sync_each_batch is ignored: a replica holds all of its gradient anyway, so waiting costs no memory")


def sync_every_micro_batch(accelerator, cfg: RunConfig) -> bool:
    """Return whether gradients are reduced after every micro-batch."""
    return accelerator.distributed_type.value == "FSDP" and cfg.sync_each_batch is not False


def _configure_local_sgd(accelerator, cfg: RunConfig) -> None:
    asked = f"local_sgd_steps is {cfg.local_sgd_steps}"
    if is_sharded(accelerator):
        raise UsageError(
            f"{asked}, but under {accelerator.distributed_type.value} no process holds a whole model to update by itself: "
            "leave it out, or use accelerate_configs/ddp.yaml"
        )
    if accelerator.num_processes == 1:
        warn("local_sgd_steps is ignored: there is one process, and nothing to average")
    elif accelerator.mixed_precision == "fp16":
        raise UsageError(
            f"{asked}, but with fp16 each process would scale its gradient by a factor of its own: use bf16"
        )


def _configure_fsdp(accelerator, cfg: RunConfig) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    plugin = accelerator.state.fsdp_plugin
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy) and accelerator.device.type == "cpu":
        raise UsageError("fsdp_offload_params is true, but there is no accelerator to offload from: set it to false")
    if low := LOW.get(accelerator.mixed_precision):
        if cfg.dtype == "bfloat16":
            raise UsageError(
                "dtype is bfloat16, but FSDP2 keeps float32 weights with mixed_precision: set that to 'no'"
            )
        # accelerate would also reduce gradients, and return the loss, in 16 bits.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)


def can_fuse_optimizer(accelerator, cfg: RunConfig) -> bool:
    """Return whether the optimizer may be a fused kernel.

    Under a gradient scaler that would skip on the device, where nobody could tell the schedule to wait; and torch has no
    fused SGD for shards."""
    return accelerator.mixed_precision != "fp16" and not (
        accelerator.distributed_type.value == "FSDP" and cfg.optim == "sgd"
    )


# ---- in a step -----------------------------------------------------------------------------------------------------------


def forwards_per_rank(accelerator, window: list) -> list[float]:
    """Return, for the vector that all ranks add up, how many micro-batches each has; nothing where that may differ."""
    if not is_sharded(accelerator):
        return []
    mine, world = tensor_parallel.data_parallel_rank_and_size(accelerator)
    return [float(len(window) * (rank == mine)) for rank in range(world)]


def pad_with_dummy_batches(window: list, turns: list[float]) -> list:
    """Return the window with fillers of weight zero before it, so that all ranks run as many forward passes."""
    micro, batch = window[0]
    dummy = replace(micro, ids=micro.ids[:1], dummy=True, last=False)
    return [(dummy, batch)] * int(max(turns, default=0) - len(window)) + window


@contextmanager
def gradient_sync(accelerator, module: torch.nn.Module, last: bool, each: bool):
    """Reduce the gradients of a backward pass in here if its micro-batch is the last of a window, or after each one.

    Of a model that is replicated and sharded (HSDP), the sum over replicas always waits for the last."""
    kind = accelerator.distributed_type.value
    if kind == "DEEPSPEED":
        module.set_gradient_accumulation_boundary(last)
        yield
    elif kind == "FSDP":
        module.set_requires_gradient_sync(last or each)
        module.set_requires_all_reduce(last)
        yield
    elif last:
        yield
    else:
        with accelerator.no_sync(module):
            yield


def backward(accelerator, module: torch.nn.Module, loss: torch.Tensor) -> None:
    """Add the gradient of a loss, which nothing divides any more."""
    if accelerator.distributed_type.value == "DEEPSPEED":
        module.backward(loss, scale_wrt_gas=False)  # accelerate's would also update the weights
    else:
        accelerator.backward(loss)
