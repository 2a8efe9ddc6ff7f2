"""Copy of the training state in host memory, which a background thread writes while training continues.

Tests: tests/checkpointing/test_async_writer.py.
"""

import torch

from src.distributed.sharded_tensors import gather_full, is_partial


class HostCopy:
    """Host memory for one copy of the training state: allocated by the first copy, reused by the next ones."""

    def __init__(self):
        self.memory: dict[tuple[str, str], torch.Tensor] = {}

    def take(self, tensors: dict[str, dict[str, torch.Tensor]], mine: set | None = None) -> dict[str, dict]:
        """Return copies of the tensors in host memory; tied weights share one copy. Waits for the device.

        Sharded tensors are gathered one at a time (a collective). With `mine`, keep only its (part, name) keys."""
        copies = {part: {} for part in tensors}
        copied: dict = {}  # storage key -> copy, or None if another rank keeps it
        from_device = False
        for part, named in tensors.items():
            for name, value in named.items():
                storage = _storage_key(value)
                if storage not in copied:
                    full = gather_full(value)
                    from_device |= full.device.type != "cpu"
                    keep = mine is None or (part, name) in mine
                    copied[storage] = self._copy((part, name), full) if keep else None
                if copied[storage] is not None:
                    copies[part][name] = copied[storage]
        if from_device:
            torch.accelerator.synchronize()
        return copies

    def _copy(self, key: tuple[str, str], value: torch.Tensor) -> torch.Tensor:
        memory = self.memory.get(key)
        if memory is None or memory.shape != value.shape or memory.dtype != value.dtype:
            memory = self.memory[key] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        return memory.copy_(value, non_blocking=True)


def _storage_key(value: torch.Tensor):
    """Return a key that is equal for two names only if they are the same tensor (tied weights)."""
    if is_partial(value) or not value.nbytes:
        return id(value)
    return value.data_ptr(), value.shape, value.stride(), value.dtype
