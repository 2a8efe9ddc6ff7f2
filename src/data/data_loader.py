"""Batches of a plan, read by loader processes ahead of time.

Tests: tests/data/test_dataset.py, tests/data/test_data_loader.py and tests/conformance/.
"""

import ctypes
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import torch

from src.config.schema import RunConfig
from src.data.batch_plan import MicroBatch, derive_seed
from src.distributed.stop_signals import ignore_signals
from src.tasks import Batch, Task

Item = tuple[MicroBatch, Batch]


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


def collated(task: Task, micro: MicroBatch, rows: list[dict]) -> Item:
    """Return a micro-batch and its batch; its randomness is the same in any process or worker, and a fault names its ids."""
    seed_everything(derive_seed("collate", micro.seed))
    try:
        return micro, task.collate(rows)
    except Exception:
        text = f"micro-batch {micro.index} of step {micro.step + 1} could not be collated, of rows {micro.ids.tolist()}"
        logging.getLogger("run").error("%s", text)
        print(f"\nrank {os.environ.get('RANK', '0')}: {text}", file=sys.stderr, flush=True)
        raise


class BatchReader(torch.utils.data.Dataset):
    """Turns a micro-batch of the plan into a batch. In a loader process, `desk` says what it is reading."""

    def __init__(self, split, task: Task, desk: torch.Tensor | None = None):
        self.split, self.task, self.desk = split, task, desk

    def __getitem__(self, micro: MicroBatch) -> Item:
        worker = torch.utils.data.get_worker_info()
        if worker is not None and self.desk is not None:
            self.desk[worker.id] = torch.tensor([micro.step, micro.index])
        item = collated(self.task, micro, self.split.rows(micro.ids))
        if worker is not None and self.desk is not None:
            self.desk[worker.id] = -1
        return item


def read_batches(split, task: Task, order: Iterator[MicroBatch], cfg: RunConfig, pin: bool) -> Iterator[Item]:
    """Yield the batches of `order`, in order, read by loader processes ahead of time (none: here, when asked)."""
    workers = cfg.dataloader_num_workers
    if not workers and not pin:  # a loader would add a tenth of a millisecond and nothing else
        return map(BatchReader(split, task).__getitem__, order)
    desk = torch.full((workers, 2), -1).share_memory_() if workers else None
    sent: dict[tuple, list] = {}  # micro-batches that are read at the moment -> their ids
    loader = torch.utils.data.DataLoader(
        BatchReader(split, task, desk),
        sampler=_Once(order, sent),
        batch_size=None,
        pin_memory=pin,
        **_options(cfg, workers),
    )
    return _watched(iter(loader), desk, sent, cfg.dataloader_timeout)


def read_ahead(windows: torch.utils.data.IterableDataset, cfg: RunConfig, pin: bool) -> Iterator:
    """Yield what `windows` yields, read by one loader process ahead of time if there are to be any."""
    workers = min(1, cfg.dataloader_num_workers)
    if not workers and not pin:
        return iter(windows)
    loader = torch.utils.data.DataLoader(windows, batch_size=None, pin_memory=pin, **_options(cfg, workers))
    return _watched(iter(loader), None, {}, cfg.dataloader_timeout)


def _options(cfg: RunConfig, workers: int) -> dict:
    if not workers:
        return {}
    return {
        "num_workers": workers,
        "prefetch_factor": 4,
        "worker_init_fn": _begin_worker,
        "timeout": cfg.dataloader_timeout,
    }


def _begin_worker(*_) -> None:
    """Make a loader process leave signals to its rank, and keep to one thread: there are as many of them as cores."""
    ignore_signals()
    with suppress(OSError, AttributeError):  # Linux: a process that hangs, and is deaf, ends with its rank
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    threads = ("OMP", "OPENBLAS", "MKL", "RAYON", "NUMEXPR")
    os.environ |= {f"{name}_NUM_THREADS": "1" for name in threads}  # for what is imported from now on
    os.environ |= {"OPENCV_FOR_THREADS_NUM": "1", "TOKENIZERS_PARALLELISM": "false"}
    torch.set_num_threads(1)
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)  # of BLAS and OpenMP that are loaded
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)


def _watched(items: Iterator, desk: torch.Tensor | None, sent: dict, timeout: int) -> Iterator:
    """Yield `items`; say which rows a loader process was reading when it died or did not answer."""
    while True:
        try:
            item = next(items, None)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader"):
                raise
            raise RuntimeError(_explain(items, desk, sent, timeout)) from None
        if item is None:
            return
        if isinstance(item[0], MicroBatch):
            sent.pop((item[0].step, item[0].index), None)
        yield item


def _explain(items, desk: torch.Tensor | None, sent: dict, timeout: int) -> str:
    """Return what happened to the loader processes, and what they were reading."""
    processes = getattr(items, "_workers", [])
    dead = [number for number, process in enumerate(processes) if not process.is_alive()]
    what = f"did not answer for {timeout} s (dataloader_timeout)"
    if dead:
        codes = ", ".join(str(processes[number].exitcode) for number in dead)
        what = f"died (exit code {codes}; −9: killed, perhaps for memory)"
    found = []
    for number in dead or range(len(processes)):
        place = tuple(desk[number].tolist()) if desk is not None else ()
        if place in sent:
            found.append(f"micro-batch {place[1]} of step {place[0] + 1}, of rows {sent[place]}")
    reading = "; ".join(found) or "nothing that it had said"
    return f"a loader process {what} while it was reading {reading}"


class _Once(torch.utils.data.Sampler):
    """The plan's order, once; notes what it has handed out."""

    def __init__(self, order: Iterator[MicroBatch], sent: dict):
        self.order, self.sent = order, sent

    def __iter__(self) -> Iterator[MicroBatch]:
        for micro in self.order:
            self.sent[micro.step, micro.index] = micro.ids.tolist()
            yield micro


def windows(batches: Iterator[Item]) -> Iterator[tuple[list[Item], float]]:
    """Yield (this rank's batches of one optimizer step, seconds spent waiting for them)."""
    window, started = [], time.perf_counter()
    for item in batches:
        window.append(item)
        if item[0].last:
            yield window, time.perf_counter() - started
            window, started = [], time.perf_counter()
