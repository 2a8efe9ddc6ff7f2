"""Buffers that training changes (running statistics): their mean over the micro-batches of a step, on all ranks.

Tests: tests/training/test_running_statistics.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import torch
import torch.distributed as dist

from src.runtime import private_apis


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return by name the buffers that a checkpoint holds; a buffer with several names appears once."""
    buffers = dict(module.named_buffers())
    saved = module.state_dict(keep_vars=True).keys() if buffers else ()
    return {name: buffer for name, buffer in buffers.items() if name in saved}


class StepBuffers:
    """The persistent buffers of a module, changed by training forward passes that all start from the same values.

    `record` adds the change by one forward pass, `restore` undoes it, and `finish` adds the mean of all changes. So the
    result does not depend on the rank that ran a pass, or on the order. Does nothing for a module without buffers."""

    def __init__(self, module: torch.nn.Module, device: torch.device, all_ranks: bool):
        """`all_ranks`: whether `finish` takes the mean over the passes of all ranks (a collective)."""
        self.module, self.device, self.all_ranks = module, device, all_ranks
        names = [name.rpartition(".") for name, b in persistent_buffers(module).items() if not b.is_complex()]
        owners = [(module.get_submodule(path), leaf) for path, _, leaf in names]
        # By dtype, so that few kernels copy many small buffers. A module may replace a buffer, so look it up by name.
        self.owners = sorted(owners, key=lambda owner: str(getattr(*owner).dtype))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within, forward passes start from the same values; at exit, set the buffers to the mean over these passes."""
        if self.owners:
            self.begin()
        yield
        if self.owners:
            self.finish()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Undo at exit what forward passes within have changed: for passes that are no part of the training."""
        before = self._by_dtype()
        try:
            yield
        finally:
            self._write(before)

    @torch.no_grad()
    def begin(self) -> None:
        """Start a mean of changes from the current values."""
        self.start = self._by_dtype()
        self.start_wide = self._widen(self.start)
        # An infinite buffer (a minimum so far) may become finite: its change is counted from 0.
        self.base = torch.where(self.start_wide.isfinite(), self.start_wide, 0.0)
        self.total, self.passes = torch.zeros_like(self.base), 0

    @torch.no_grad()
    def record(self) -> None:
        """Add the change by one forward pass. Call it before the backward pass, which may repeat the forward pass."""
        if self.owners:
            now = self._widen(self._by_dtype())
            self.total += torch.where(now == self.start_wide, 0.0, now - self.base)
            self.passes += 1

    def restore(self) -> None:
        """Set the buffers to the values of `begin`. Call it after the backward pass, which refuses changed buffers."""
        if self.owners:
            self._write(self.start)

    @torch.no_grad()
    def finish(self) -> None:
        """Set the buffers to their values at `begin` plus the mean change, rounded for integers.

        A value stays the same to the last bit if no pass has changed it, or if its mean change is not finite."""
        sums = torch.cat([self.total, self.total.new_full((1,), float(self.passes))])
        if self.all_ranks:
            dist.all_reduce(sums)
        change = sums[:-1] / sums[-1]
        moved = change.isfinite() & (change != 0)
        values = self.base + change
        result, begin = [], 0
        for start in self.start:
            part = slice(begin, begin + start.numel())
            begin = part.stop
            value = values[part] if start.is_floating_point() else values[part].nan_to_num().round()
            result.append(torch.where(moved[part], value.to(start.dtype), start))
        self._write(result)

    def _by_dtype(self) -> list[torch.Tensor]:
        """Return copies of all values, one flat tensor for each dtype."""
        flat = [getattr(*owner).detach().to(self.device).reshape(-1) for owner in self.owners]
        return [torch.cat(list(group)) for _, group in groupby(flat, key=lambda value: value.dtype)]

    def _widen(self, values: list[torch.Tensor]) -> torch.Tensor:
        empty = torch.zeros(0, dtype=torch.float64, device=self.device)
        return torch.cat([empty, *(value.to(torch.float64) for value in values)])

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        targets, sources = [getattr(*owner) for owner in self.owners], iter(values)
        for _, group in groupby(targets, key=lambda value: value.dtype):
            tensors = list(group)
            parts = next(sources).split([tensor.numel() for tensor in tensors])
            views = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
            private_apis.copy_all_(tensors, views)
