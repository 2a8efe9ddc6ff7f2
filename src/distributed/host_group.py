"""Sum a small vector over all ranks on the host, for decisions that all ranks must make together.

Tests: tests/training/test_step.py and tests/distributed/test_tensor_parallel.py.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from src.distributed import tensor_parallel


class HostGroup:
    """Adds a small vector over all ranks, on the host: every decision that a rank could take alone goes through it.

    Over gloo even when gradients travel over NCCL, so no rank waits for its device to learn what the others say.
    """

    def __init__(self, accelerator, timeout: int):
        self.alone = accelerator.num_processes == 1
        self.copies = tensor_parallel.tp_size(accelerator)  # ranks that read the same data, and say the same of it
        own = not self.alone and dist.get_backend() != "gloo"
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) if own else None

    def sum(self, values) -> torch.Tensor:
        """Return the sum of `values` (numbers or a tensor, the same shape on every rank) in float64."""
        vector = torch.as_tensor(values, dtype=torch.float64)
        if not self.alone:
            dist.all_reduce(vector, group=self.group)
        return vector / self.copies if self.copies > 1 else vector
