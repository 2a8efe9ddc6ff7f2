"""Buffers that training changes (running statistics): their mean over the micro-batches of a step, on all ranks.

Tests: tests/engine/distributed/test_running_statistics.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import torch
import torch.distributed as dist

from engine.distributed.exact_sums import VALUE_PARTS, join_values, split_values
from engine.process import private_apis


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return by name the buffers that a checkpoint holds; a buffer with several names appears once."""
    buffers = dict(module.named_buffers())
    saved = module.state_dict(keep_vars=True).keys() if buffers else ()
    return {name: buffer for name, buffer in buffers.items() if name in saved}


@contextmanager
def all_buffers_unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Undo at exit what forward passes within have changed, also in buffers that no checkpoint holds."""
    before = []
    for owner in module.modules():
        for name, buffer in private_apis.own_buffers(owner).items():
            value = None if buffer is None else buffer.detach().clone()
            before.append((owner, name, buffer, value))
    yield
    with torch.no_grad():
        for owner, name, buffer, value in before:
            if buffer is not None:
                buffer.copy_(value)
            setattr(owner, name, buffer)  # a module may have replaced it


class StepBuffers:
    """The persistent buffers of a module, changed by training forward passes that all start from the same values.

    Within `step`, hooks around the forward pass of the module set the buffers back and record its change; the mean of
    all changes is added at exit. So the result does not depend on the rank that ran a pass, or on the order. Does
    nothing for a module without buffers."""

    def __init__(self, module: torch.nn.Module, device: torch.device, all_ranks: bool, is_exact: bool = False):
        """`all_ranks`: whether `finish` takes the mean over the passes of all ranks (a collective). `is_exact`: whether
        it adds exactly."""
        self.is_exact = is_exact
        self.module = module
        self.device = device
        self.all_ranks = all_ranks
        owners = []
        for name, buffer in persistent_buffers(module).items():
            if not buffer.is_complex():
                path, _, leaf = name.rpartition(".")
                owners.append((module.get_submodule(path), leaf))
        # By dtype, so that few kernels copy many small buffers. A module may replace a buffer, so look it up by name.
        self.owners = sorted(owners, key=lambda owner: str(getattr(*owner).dtype))
        self.is_real: list[bool] | None = None  # within `step`: for each micro-batch, whether it is no dummy batch
        self.forwards = 0  # within `step`: passes up to now

    def add_hooks(self) -> None:
        """Let the module call this object around each forward pass."""
        if self.owners:
            self.module.register_forward_pre_hook(self._before_forward)
            self.module.register_forward_hook(self._after_forward)

    @contextmanager
    def step(self, is_real: list[bool]) -> Iterator[None]:
        """Within, forward passes start from the same values; at exit, set the buffers to the mean over these passes.

        The passes are those of the step's micro-batches, in order; those that are not `is_real` do not count."""
        if not self.owners:
            yield
            return
        self.begin()
        self.is_real = is_real
        self.forwards = 0
        try:
            yield
        finally:
            self.is_real = None
        self.finish()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Undo at exit what forward passes within have changed: for passes that are no part of the training."""
        before = self._by_dtype()
        is_real = self.is_real
        self.is_real = None
        try:
            yield
        finally:
            self.is_real = is_real
            self._write(before)

    def _before_forward(self, module: torch.nn.Module, inputs: tuple) -> None:
        """Undo the passes before, also what a backward pass has repeated of them; it refuses changed buffers."""
        if self.is_real is not None and self.forwards:
            self._write(self.start)

    def _after_forward(self, module: torch.nn.Module, inputs: tuple, outputs: object) -> None:
        """Record the pass now: the backward pass may repeat it (activation checkpointing)."""
        if self.is_real is None:
            return
        index = min(self.forwards, len(self.is_real) - 1)
        self.forwards += 1
        if self.is_real[index]:
            self.record()

    @torch.no_grad()
    def begin(self) -> None:
        """Start a mean of changes from the current values."""
        self.start = self._by_dtype()
        self.start_wide = self._widen(self.start)
        # An infinite buffer (a minimum so far) may become finite: its change is counted from 0.
        self.base = torch.where(self.start_wide.isfinite(), self.start_wide, 0.0)
        self.total = self.base.new_zeros((VALUE_PARTS if self.is_exact else 1, *self.base.shape))
        self.passes = 0

    @torch.no_grad()
    def record(self) -> None:
        """Add the change by one forward pass."""
        now = self._widen(self._by_dtype())
        change = torch.where(now == self.start_wide, 0.0, now - self.base)
        self.total += split_values(change) if self.is_exact else change
        self.passes += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Set the buffers to their values at `begin` plus the mean change, rounded for integers.

        A value stays the same to the last bit if no pass has changed it, or if its mean change is not finite."""
        sums = torch.cat([self.total.flatten(), self.total.new_full((1,), float(self.passes))])
        if self.all_ranks:
            dist.all_reduce(sums)
        total = sums[:-1].view_as(self.total)
        change = (join_values(total) if self.is_exact else total[0]) / sums[-1]
        moved = change.isfinite() & (change != 0)
        values = self.base + change
        result = []
        first = 0
        for start in self.start:
            part = slice(first, first + start.numel())
            value = values[part] if start.is_floating_point() else values[part].nan_to_num().round()
            result.append(torch.where(moved[part], value.to(start.dtype), start))
            first = part.stop
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
        buffers = [getattr(*owner) for owner in self.owners]
        by_dtype = [list(group) for _, group in groupby(buffers, key=lambda value: value.dtype)]
        for tensors, flat in zip(by_dtype, values, strict=True):
            parts = flat.split([tensor.numel() for tensor in tensors])
            views = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
            private_apis.copy_all_(tensors, views)
