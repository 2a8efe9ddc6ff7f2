"""From the plan's micro-batches to batches on the host: read by id, collated with randomness of their own.

Leave alone. Guarded by tests/test_data.py and tests/conformance/.
"""

import random
import time
from collections.abc import Iterator

import numpy as np
import torch

from src.data import Split
from src.plan import MicroBatch, derive
from src.tasks import Batch, Task
from src.watch import deaf


def seed_everything(seed: int) -> None:
    """Key every generator that a collator or a model may draw from: torch on all devices, numpy and random."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type == "cuda":
        # torch.manual_seed formats a stack trace for each kind of device that is not there: 0.4 ms.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():  # not in a loader's process, which has no use for the device
            torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


class Reader(torch.utils.data.Dataset):
    """Turns a micro-batch of the plan into a batch; its randomness is the same in any process or worker."""

    def __init__(self, split: Split, task: Task):
        self.split, self.task = split, task

    def __getitem__(self, micro: MicroBatch) -> tuple[MicroBatch, Batch]:
        seed_everything(derive("collate", micro.seed))
        return micro, self.task.collate(self.split.rows(micro.ids))


def read(
    split: Split, task: Task, order: Iterator[MicroBatch], workers: int, pin: bool
) -> Iterator[tuple[MicroBatch, Batch]]:
    """Yield the batches of `order`, in order, read by `workers` processes ahead of time (0: here, when asked)."""
    if not workers and not pin:  # a loader would add a tenth of a millisecond and nothing else
        return map(Reader(split, task).__getitem__, order)
    sampler = _Once(order)
    options = {"prefetch_factor": 4, "worker_init_fn": deaf} if workers else {}
    loader = torch.utils.data.DataLoader(
        Reader(split, task), sampler=sampler, batch_size=None, num_workers=workers, pin_memory=pin, **options
    )
    return iter(loader)


class _Once(torch.utils.data.Sampler):
    def __init__(self, order: Iterator[MicroBatch]):
        self.order = order

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.order


def windows(batches: Iterator[tuple[MicroBatch, Batch]]) -> Iterator[tuple[list[tuple[MicroBatch, Batch]], float]]:
    """Yield (this rank's batches of one optimizer step, seconds spent waiting for them)."""
    window, started = [], time.perf_counter()
    for item in batches:
        window.append(item)
        if item[0].last:
            yield window, time.perf_counter() - started
            window, started = [], time.perf_counter()
