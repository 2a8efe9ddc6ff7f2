"""`per_device_batch_size: auto`: the largest micro-batch that fits on every rank, tried, or estimated if sharded.

Tests: tests/training/test_auto_batch_size.py.
"""

import gc
from collections.abc import Callable

import torch

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.data.prepared_split import Split
from src.distributed.host_group import HostGroup
from src.distributed.strategies import Strategy
from src.models import memory_estimate
from src.models.activation_memory import activation_bytes, forward_of_row
from src.tasks import Task
from src.training.batch_loss import scalar_of_vectors

LARGEST_ON_CPU = 8  # a CPU process that runs out of memory is killed without an exception
USABLE = 0.8  # of the free memory; the estimate ignores what kernels need for a moment, and gaps between tensors


def choose_batch_size(
    strategy: Strategy, host_group: HostGroup, cfg: RunConfig, module: torch.nn.Module, task: Task, train_set: Split
) -> int:
    """Return per_device_batch_size. For `auto`, return the largest power of two for which the longest rows fit in
    memory on every rank, up to a rank's share of the global batch.

    One process and DDP try a forward and backward pass. If the model is sharded, each pass is a collective, in which
    the other ranks would wait for one that is out of memory: there the size follows from an estimate and the free
    memory."""
    if cfg.per_device_batch_size != "auto":
        return cfg.per_device_batch_size
    share = max(1, cfg.global_batch_size // strategy.accelerator.num_processes)
    size = 1 << (share.bit_length() - 1)
    if strategy.accelerator.device.type == "cpu":
        return min(size, LARGEST_ON_CPU)
    if strategy.is_sharded:
        room = USABLE * free_bytes(strategy.accelerator.device)
        return largest_that_fits(size, estimate(cfg, task, train_set, room), host_group)
    with strategy.buffers.unchanged():
        return largest_that_fits(
            size, lambda n: fits(strategy, module, task, train_set.rows(train_set.longest(n))), host_group
        )


def largest_that_fits(size: int, fits: Callable[[int], bool], host_group: HostGroup) -> int:
    """Return the first of size, size/2, … that fits on all ranks, at least 1; a collective on every size."""
    while size > 1 and host_group.sum([0 if fits(size) else 1])[0]:
        size //= 2
    return size


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on an accelerator."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def estimate(cfg: RunConfig, task: Task, train_set: Split, room: float) -> Callable[[int], bool]:
    """Return a function that tells whether a micro-batch of n of the longest rows fits into `room` bytes.

    The sharded weights are allocated already; gradients, moments, gathered layers and activations are not. The
    arithmetic is that of `--dry_run` (docs/scaling.md). Raise UsageError if activations cannot be measured."""
    model, strategy = (
        task.build_model(empty=True),
        memory_estimate.strategy_of_launch(cfg),
    )  # never touched: costs no memory
    counted = memory_estimate.count_parameters(model)
    resting = memory_estimate.resting_bytes(counted, cfg, strategy)
    room -= memory_estimate.working_bytes(counted, cfg, strategy)
    room -= 0 if strategy.offload else resting["gradients"] + resting["optimizer"]
    [row] = train_set.rows(train_set.longest(1))
    forward = forward_of_row(model, task, row)
    dtype = torch.bfloat16 if strategy.low_precision else getattr(torch, cfg.dtype)
    layers = counted.layers if strategy.recompute else 0

    def fits(rows: int) -> bool:
        kept = activation_bytes(forward, rows, dtype, autocast=False, recomputed_layers=layers)
        if kept is None:
            raise UsageError(
                f"per_device_batch_size is auto, but the memory of a forward pass of task {cfg.task} cannot be estimated for "
                f"{strategy.name}, because its loss reads values: give a number"
            )
        return kept <= room

    return fits


def fits(strategy: Strategy, module: torch.nn.Module, task: Task, rows: list[dict]) -> bool:
    """Return whether a forward and backward pass over `rows` fits in memory beside the optimizer's moments."""
    # Without DDP: a rank could wait for an all-reduce that another rank, out of memory, never reaches.
    accelerator = strategy.accelerator
    module = accelerator.unwrap_model(module)
    moments = []
    try:
        moments = [torch.empty_like(p) for p in module.parameters() if p.requires_grad for _ in range(2)]
        inputs = {
            name: value.to(accelerator.device) for name, value in task.collate(rows, training=True).inputs.items()
        }
        out = module(inputs)
        (scalar_of_vectors(out) if module.batch_loss else out["loss"]).backward()
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        moments.clear()
        module.zero_grad(set_to_none=True)
        gc.collect()
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
