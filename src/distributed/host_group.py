"""Sums of small vectors over all ranks, computed on the host, for decisions that all ranks must make together.

Tests: tests/training/test_step.py and tests/distributed/test_tensor_parallel.py.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from src.distributed import tensor_parallel

if TYPE_CHECKING:
    from accelerate import Accelerator


class HostGroup:
    """All ranks, connected over gloo even if gradients travel over NCCL, so that no sum waits for a device.

    A rank must not decide alone to stop, save or skip: it adds its wish to a vector, and every rank reads the sum."""

    def __init__(self, accelerator: "Accelerator", timeout: int):
        """`timeout`: seconds that a sum waits for the slowest rank."""
        self.is_single = accelerator.num_processes == 1
        self.ranks_per_batch = tensor_parallel.tp_size(
            accelerator
        )  # ranks that read the same data add the same numbers
        needs_group = not self.is_single and dist.get_backend() != "gloo"
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) if needs_group else None

    def sum(self, values: Sequence[float] | torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over all ranks in float64; a collective, of the same shape on every rank.

        Under tensor parallelism the ranks that compute one micro-batch together count once."""
        # A copy, because all_reduce works in place and must not change the caller's array.
        vector = torch.as_tensor(values, dtype=torch.float64).clone()
        if not self.is_single:
            dist.all_reduce(vector, group=self.group)
        return vector / self.ranks_per_batch if self.ranks_per_batch > 1 else vector
