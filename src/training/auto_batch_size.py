"""`per_device_batch_size: auto`: the largest micro-batch that fits on every rank, by trying it.

Tests: tests/training/test_auto_batch_size.py.
"""

import gc

import torch

from src.config.schema import RunConfig
from src.data.prepared_split import Split
from src.distributed.strategies import Strategy
from src.runtime import exit_codes
from src.tasks import Task

LARGEST_ON_CPU = 8  # a CPU process that runs out of memory is killed without an exception


def choose_batch_size(strategy: Strategy, cfg: RunConfig, module: torch.nn.Module, task: Task, train_set: Split) -> int:
    """Return per_device_batch_size. For `auto`, return the largest power of two for which a forward and backward pass
    over the longest rows fits on every rank, up to its share of the global batch; strategy_checks.py refuses shards."""
    if cfg.per_device_batch_size != "auto":
        return cfg.per_device_batch_size
    size = 1 << (max(1, cfg.global_batch_size // strategy.accelerator.num_processes).bit_length() - 1)
    if strategy.accelerator.device.type == "cpu":
        return min(size, LARGEST_ON_CPU)
    with strategy.buffers.unchanged():
        while size > 1 and strategy.hosts.sum([lacks_memory(strategy, module, task, train_set, size)])[0]:
            size //= 2
    return size


def lacks_memory(strategy: Strategy, module: torch.nn.Module, task: Task, train_set: Split, size: int) -> bool:
    """Return whether a pass over `size` rows does not fit in memory beside the optimizer's moments."""
    # Without DDP: a rank could wait for an all-reduce that another rank, out of memory, never reaches.
    device, module, moments = strategy.accelerator.device, strategy.accelerator.unwrap_model(module), []
    try:
        rows = train_set.rows(train_set.longest(size))
        moments = [torch.empty_like(p) for p in module.parameters() if p.requires_grad for _ in range(2)]
        out = module({name: value.to(device) for name, value in task.collate(rows, training=True).inputs.items()})
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
