"""Global batch, length of rows and first example of each step, as functions of the step.

Tests: tests/data/test_step_sizes.py.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from src.config.schema import RunConfig

if TYPE_CHECKING:  # the batch plan needs no torch
    from src.tasks import Task


@dataclass(frozen=True)
class Ramp:
    """A size that grows linearly from `start`, in multiples of `start`, and is `end` from step `steps` on."""

    start: int
    end: int
    steps: int

    def at(self, step: int) -> int:
        """Return the size at step `step`, counted from 0."""
        if step >= self.steps:
            return self.end
        size = self.start + (self.end - self.start) * step // self.steps
        return size - size % self.start

    def sizes(self) -> list[int]:
        """Return the sizes at the steps before `steps`."""
        return [self.at(step) for step in range(self.steps)]

    def __str__(self) -> str:
        return f"{self.start:,} → {self.end:,} over the first {self.steps:,} steps, in multiples of {self.start:,}"


def batch_warmup(cfg: RunConfig) -> Ramp | None:
    """Return the sizes of the global batch during a batch-size warmup, None without one."""
    if not cfg.batch_size_warmup_steps:
        return None
    return Ramp(cfg.batch_size_warmup_start or 1, cfg.global_batch_size, cfg.batch_size_warmup_steps)


def length_warmup(cfg: RunConfig, task: "Task") -> Ramp | None:
    """Return the tokens per row during a sequence-length warmup up to the task's `max_length`, None without one."""
    if not cfg.sequence_length_warmup_steps:
        return None
    return Ramp(cfg.sequence_length_warmup_start or 1, task.max_length, cfg.sequence_length_warmup_steps)


def steps_per_epoch(num_examples: int, global_batch: int) -> int:
    """Return the number of steps in an epoch without a batch-size warmup. The last one holds the remaining examples."""
    return -(-num_examples // global_batch)


@dataclass(frozen=True)
class StepSizes:
    """Which positions of which epoch each step takes: the last step of an epoch has what is left of it.

    Any step is found in O(1); a batch-size warmup costs a table with one line per warmup step."""

    num_examples: int
    global_batch: int
    warmup: Ramp | None = None

    @property
    def warmup_steps(self) -> int:
        return self.warmup.steps if self.warmup else 0

    @cached_property
    def _table(self) -> np.ndarray:
        """(epoch, step in the epoch, first position) of each warmup step and of the first step after them."""
        table = np.zeros((self.warmup_steps + 1, 3), np.int64)
        epoch = within = start = 0
        for step, size in enumerate(self.warmup.sizes() if self.warmup else []):
            within, start = within + 1, start + size
            if start >= self.num_examples:
                epoch, within, start = epoch + 1, 0, 0
            table[step + 1] = epoch, within, start
        return table

    @cached_property
    def _after(self) -> tuple[int, int, int, int]:
        """(epoch, step in the epoch, first position) of the first step after the warmup, steps left in this epoch."""
        epoch, within, start = self._table[-1].tolist()
        return epoch, within, start, steps_per_epoch(self.num_examples - start, self.global_batch)

    @cached_property
    def per_epoch(self) -> int:
        """Steps of an epoch after the warmup."""
        return steps_per_epoch(self.num_examples, self.global_batch)

    def locate(self, step: int) -> tuple[int, int]:
        """Return (epoch, step in the epoch) of step `step` of the run, both counted from 0."""
        if not self.warmup:
            return divmod(step, self.per_epoch)
        if step < self.warmup_steps:
            epoch, within, _ = self._table[step].tolist()
            return epoch, within
        epoch, within, _, left = self._after
        since = step - self.warmup_steps
        if since < left:
            return epoch, within + since
        epochs, within = divmod(since - left, self.per_epoch)
        return epoch + 1 + epochs, within

    def first_step(self, epoch: int) -> int:
        """Return the number of steps before an epoch."""
        if not self.warmup:
            return epoch * self.per_epoch
        last, _, _, left = self._after
        if epoch <= last:
            return int(np.searchsorted(self._table[:, 0], epoch))
        return self.warmup_steps + left + (epoch - last - 1) * self.per_epoch

    def positions(self, epoch: int, within: int) -> tuple[int, int]:
        """Return the first position of a step in its epoch, and the one after its last."""
        start, size = within * self.global_batch, self.global_batch
        if self.warmup:
            step, (last, first, at, _) = self.first_step(epoch) + within, self._after
            if step < self.warmup_steps:
                start, size = int(self._table[step, 2]), self.warmup.at(step)
            elif epoch == last:
                start = at + (within - first) * size
        return start, min(start + size, self.num_examples)

    def steps_of(self, epochs: float) -> int:
        """Return the number of steps of so many epochs; a part of an epoch is a part of its steps, rounded up."""
        if not self.warmup:
            return math.ceil(round(epochs * self.per_epoch, 6))
        whole = math.floor(epochs)
        first, after = self.first_step(whole), self.first_step(whole + 1)
        return first + math.ceil(round((epochs - whole) * (after - first), 6))

    def epochs_of(self, step: int) -> float:
        """Return the number of epochs finished after `step` steps."""
        if not self.warmup:
            return step / self.per_epoch
        epoch, within = self.locate(step)
        return epoch + within / (self.first_step(epoch + 1) - self.first_step(epoch))

    def passes(self, step: int) -> float:
        """Return the examples of the first `step` steps as a multiple of the data."""
        epoch, within = self.locate(step)
        return epoch + self.positions(epoch, within)[0] / self.num_examples


@lru_cache(maxsize=8)  # of equal arguments, so that a table is computed once
def step_sizes(num_examples: int, global_batch: int, warmup: Ramp | None = None) -> StepSizes:
    """Return the sizes of the steps over `num_examples` draws per epoch."""
    return StepSizes(num_examples, global_batch, warmup)


def sizes_of_run(cfg: RunConfig, num_examples: int) -> StepSizes:
    """Return the sizes of the steps of a run."""
    return step_sizes(num_examples, cfg.global_batch_size, batch_warmup(cfg))
