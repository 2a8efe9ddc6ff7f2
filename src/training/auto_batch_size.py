"""`per_device_batch_size: auto`: the largest micro-batch that fits on every rank.

Tests: tests/training/test_auto_batch_size.py.
"""

import gc

import torch

from src.config.schema import RunConfig
from src.data.dataset import Split
from src.tasks import Task

ON_CPU = 8  # where memory ends without an error that could be caught


def largest_that_fits(accelerator, host_group, cfg: RunConfig, module, task: Task, examples: Split) -> int:
    """Return the largest power of two, at most a rank's share of the global batch, whose longest rows fit on every rank."""
    share = max(1, cfg.global_batch_size // accelerator.num_processes)
    size = 1 << (share.bit_length() - 1)
    if accelerator.device.type == "cpu":
        return min(size, ON_CPU)
    return search(size, lambda n: fits(accelerator, module, task, examples.rows(examples.longest(n))), host_group)


def search(size: int, fits, host_group) -> int:
    """Return the first of size, size/2, … that fits on all ranks; every rank makes every trial and hears every outcome."""
    while size > 1 and host_group.sum([0 if fits(size) else 1])[0]:
        size //= 2
    return size


def fits(accelerator, module, task: Task, rows: list[dict]) -> bool:
    """Return whether a forward and backward pass over `rows` stays in memory while the optimizer's moments are reserved."""
    # The bare module: a trial must not meet the others in a reduction that some rank never reaches.
    module = accelerator.unwrap_model(module)
    try:
        reserved = [torch.empty_like(p) for p in module.parameters() if p.requires_grad for _ in range(2)]
        inputs = {name: value.to(accelerator.device) for name, value in task.collate(rows).inputs.items()}
        module(inputs)["loss"].backward()
        return bool(reserved)
    except torch.OutOfMemoryError:
        return False
    finally:
        reserved = None
        module.zero_grad(set_to_none=True)
        gc.collect()
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
