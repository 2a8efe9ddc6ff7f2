"""All-reduce of small vectors on the host, for decisions that all ranks must make together; a hang names itself.

Tests: tests/src/test_step.py, tests/engine/distributed/ and tests/addons/backends/test_tensor_parallel.py.
"""

import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from engine.config.errors import Failure, Stopped, UsageError, warn
from engine.config.paths import REPOSITORY

if TYPE_CHECKING:
    from accelerate import Accelerator


last_sum = time.monotonic()  # when the last sum over all ranks ended


class HostGroup:
    """A gloo group of all ranks, even if gradients travel over NCCL, so that a sum does not wait for the device.

    A rank must not decide alone to stop, save or skip. It adds its vote to a vector, and every rank reads the sum."""

    def __init__(self, accelerator: "Accelerator", timeout: int, ranks_per_batch: int = 1, is_exact: bool = False):
        """`timeout`: seconds that a sum waits for the slowest rank. Groups of `ranks_per_batch` ranks read the same
        data, and add the same numbers. `is_exact`: sums over micro-batches must not depend on their order."""
        self.is_exact = is_exact
        self.is_single = accelerator.num_processes == 1
        self.ranks_per_batch = ranks_per_batch
        needs_group = not self.is_single and dist.get_backend() != "gloo"
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) if needs_group else None

    def sum(self, values: Sequence[float] | torch.Tensor) -> torch.Tensor:
        """Return `values` summed over all ranks, in float64. Collective: the shape must be the same on every rank.

        Ranks that read the same data count once."""
        global last_sum
        # A copy, because all_reduce works in place and must not change the caller's array.
        vector = torch.as_tensor(values, dtype=torch.float64).clone()
        if not self.is_single:
            dist.all_reduce(vector, group=self.group)
        last_sum = time.monotonic()
        return vector / self.ranks_per_batch if self.ranks_per_batch > 1 else vector

    def sum_in_order(self, values: Sequence[float]) -> torch.Tensor:
        """Return `values` summed like `sum`, but added in the order of ranks.

        How an all-reduce over three ranks or more rounds a number depends on its place in the vector. This does not, so
        use it for numbers that are not whole, in vectors of any length. Every rank gets the vectors of all."""
        vector = torch.as_tensor(values, dtype=torch.float64)
        if self.is_single:
            return vector
        by_rank = [torch.empty_like(vector) for _ in range(dist.get_world_size())]
        dist.all_gather(by_rank, vector, group=self.group)
        return sum(by_rank[1:], by_rank[0]) / self.ranks_per_batch

    def union(self, names: set[str]) -> list[str]:
        """Return the names of all ranks, sorted. Collective."""
        by_rank = [names]
        if not self.is_single:
            by_rank = [set()] * dist.get_world_size()
            dist.all_gather_object(by_rank, names, group=self.group)
        return sorted(set().union(*by_rank))


def run_on_main(accelerator: "Accelerator", work: Callable[[], Any]) -> Any:
    """Return the result of `work()`, which only the main process calls, on every rank. Collective.

    Its UsageError, Failure or Stopped is raised on every rank."""
    from accelerate.utils import broadcast_object_list

    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = work()
        except (UsageError, Failure, Stopped) as error:
            outcome[1] = error
    broadcast_object_list(outcome)
    result, error = outcome
    if error:
        raise error
    return result


# ---- a rank that waits too long: tests/engine/distributed/test_hang_report.py ----------------------------------------------------


def report_hang(rank: int, idle: float, file: Path) -> None:
    """Write the stacks of all threads to `file`; warn with the innermost line of this project in the main thread."""
    place = "code outside of this project"
    for frame, line in traceback.walk_stack(sys._current_frames()[threading.main_thread().ident or 0]):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(REPOSITORY) and ".venv" not in path.parts:
            place = f"{frame.f_code.co_name} ({path.relative_to(REPOSITORY)}:{line})"
            break
    with suppress(OSError), file.open("w") as stacks:  # the message must come even if the disk is full
        faulthandler.dump_traceback(stacks, all_threads=True)
    warn(
        f"rank {rank} has made no progress for {idle:.0f} s; it is in {place}; stacks: {file}. The ranks that wait in a sum "
        "or in a reduction of gradients wait for one that is elsewhere, or does not report",
        any_rank=True,
    )
