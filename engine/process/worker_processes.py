"""Child processes of a rank: dataloader workers, and processes that prepare rows.

Tests: tests/engine/rows/test_prepare.py, tests/engine/plan/test_data_loader.py.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from itertools import chain, islice
from typing import Any

import torch

from engine.config.errors import Failure, UsageError

# What a rank handles, and its children ignore.
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores the end of the terminal
    SIGNALS.append(signal.SIGHUP)


def init_worker(*_) -> None:
    """Make a dataloader worker ignore stop signals, die with its rank, and use one thread."""
    ignore_signals()
    end_with_parent()
    threads = ("OMP", "OPENBLAS", "MKL", "RAYON", "NUMEXPR")
    os.environ |= {f"{name}_NUM_THREADS": "1" for name in threads}  # for libraries that are imported later
    os.environ |= {"OPENCV_FOR_THREADS_NUM": "1", "TOKENIZERS_PARALLELISM": "false"}
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)  # BLAS and OpenMP libraries that are loaded already
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)


def ignore_signals() -> None:
    """Ignore signals in a dataloader worker: its rank handles them."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> None:
    """Kill this process when its parent ends (Linux only), however that ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# ---- a function of many items ------------------------------------------------------------------------------------------


class Results(torch.utils.data.Dataset):
    """Dataset of the results of a function: a worker of a DataLoader computes that of each item."""

    def __init__(self, function: Callable[[Any], Any]):
        self.function = function

    def __getitem__(self, item: Any) -> Any:
        try:
            return self.function(item)
        except (UsageError, Failure, OSError) as error:  # if it was raised, the DataLoader would change its message
            return error


def in_processes(processes: int, function: Callable[[Any], Any], items: Iterable) -> Generator:
    """Yield `function(item)` of each item, in order, computed in up to `processes` forked processes.

    Of the items, only those that they are about to need are made."""
    every = iter(items)
    first = list(islice(every, processes))
    every = chain(first, every)
    if len(first) < 2:
        yield from map(function, every)
        return
    options = {"worker_init_fn": init_worker, "collate_fn": lambda result: result, "multiprocessing_context": "fork"}
    for result in torch.utils.data.DataLoader(
        Results(function), batch_size=None, sampler=every, num_workers=len(first), **options
    ):
        if isinstance(result, Exception):
            raise result
        yield result
