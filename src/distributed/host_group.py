"""All-reduce of small vectors on the host, for decisions that all ranks must make together.

Tests: tests/training/test_step.py, tests/distributed/ and tests/addons/backends/test_tensor_parallel.py.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from src.config.errors import Failure, Stopped, UsageError

if TYPE_CHECKING:
    from accelerate import Accelerator


last_sum = time.monotonic()  # when the last sum over all ranks ended: hang_report.py reads it


class HostGroup:
    """A gloo group of all ranks, even if gradients travel over NCCL, so that a sum does not wait for the device.

    A rank must not decide alone to stop, save or skip. It adds its vote to a vector, and every rank reads the sum."""

    def __init__(self, accelerator: "Accelerator", timeout: int, ranks_per_batch: int = 1):
        """`timeout`: seconds that a sum waits for the slowest rank. Groups of `ranks_per_batch` ranks read the same
        data, and add the same numbers."""
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
