"""`per_device_batch_size: auto`: the largest micro-batch that fits on every rank, by trying it.

Tests: tests/training/test_auto_batch_size.py.
"""

import gc
from collections.abc import Callable

import torch

from src.config.schema import RunConfig
from src.data.prepared_split import Split
from src.distributed.host_group import HostGroup
from src.distributed.strategies import Strategy
from src.runtime import exit_codes
from src.tasks import Task

LARGEST_ON_CPU = 8  # a CPU process that runs out of memory is killed without an exception


def choose_batch_size(
    strategy: Strategy, host_group: HostGroup, cfg: RunConfig, module: torch.nn.Module, task: Task, train_set: Split
) -> int:
    """Return per_device_batch_size. For `auto`, return the largest power of two for which the longest rows fit in
    memory on every rank, up to a rank's share of the global batch.

    Each size is tried by a forward and backward pass. Sharded models are refused before (strategy_checks.py)."""
    if cfg.per_device_batch_size != "auto":
        return cfg.per_device_batch_size
    share = max(1, cfg.global_batch_size // strategy.accelerator.num_processes)
    size = 1 << (share.bit_length() - 1)
    if strategy.accelerator.device.type == "cpu":
        return min(size, LARGEST_ON_CPU)
    with strategy.buffers.unchanged():
        return largest_that_fits(
            size, lambda n: fits(strategy, module, task, train_set.rows(train_set.longest(n))), host_group
        )


def largest_that_fits(size: int, fits: Callable[[int], bool], host_group: HostGroup) -> int:
    """Return the first of size, size/2, … that fits on all ranks, at least 1; a collective on every size."""
    while size > 1 and host_group.sum([0 if fits(size) else 1])[0]:
        size //= 2
    return size


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
        torch.stack([value.float().sum() for value in out.values() if value.requires_grad]).sum().backward()
        return True
    except RuntimeError as error:
        if not exit_codes.is_out_of_memory(error):
            raise
        return False
    finally:
        moments.clear()
        module.zero_grad(set_to_none=True)
        gc.collect()
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
