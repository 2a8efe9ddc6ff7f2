"""Warmups of sizes: the global batch and the length of rows grow during the first steps, as functions of the step.

Tests: tests/addons/data/test_size_warmups.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from engine.config.addon import Addon
from engine.config.errors import UsageError
from engine.config.option import option
from engine.plan.batch_plan import PlanConfig, StepSizes
from engine.task import Task


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

    def __str__(self) -> str:
        return f"{self.start:,} → {self.end:,} over the first {self.steps:,} steps, in multiples of {self.start:,}"


# ---- the global batch ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WarmupSizes(StepSizes):
    """Positions of each step in a batch-size warmup: a table with one line per warmup step, then O(1)."""

    warmup: Ramp

    @cached_property
    def _table(self) -> np.ndarray:
        """(epoch, step in the epoch, first position) of each warmup step and of the first step after them."""
        table = np.zeros((self.warmup.steps + 1, 3), np.int64)
        epoch = within = start = 0
        for step in range(self.warmup.steps):
            within, start = within + 1, start + self.warmup.at(step)
            if start >= self.num_examples:
                epoch, within, start = epoch + 1, 0, 0
            table[step + 1] = epoch, within, start
        return table

    @cached_property
    def _after(self) -> tuple[int, int, int, int]:
        """(epoch, step in the epoch, first position) of the first step after the warmup, steps left in this epoch."""
        epoch, within, start = self._table[-1].tolist()
        return epoch, within, start, -(-(self.num_examples - start) // self.global_batch)

    def locate(self, step: int) -> tuple[int, int]:
        if step < self.warmup.steps:
            epoch, within, _ = self._table[step].tolist()
            return epoch, within
        epoch, within, _, left = self._after
        since = step - self.warmup.steps
        if since < left:
            return epoch, within + since
        epochs, within = divmod(since - left, self.per_epoch)
        return epoch + 1 + epochs, within

    def first_step(self, epoch: int) -> int:
        last, _, _, left = self._after
        if epoch <= last:
            return int(np.searchsorted(self._table[:, 0], epoch))
        return self.warmup.steps + left + (epoch - last - 1) * self.per_epoch

    def positions(self, epoch: int, within: int) -> tuple[int, int]:
        step, (last, first, at, _) = self.first_step(epoch) + within, self._after
        start, size = within * self.global_batch, self.global_batch
        if step < self.warmup.steps:
            start, size = int(self._table[step, 2]), self.warmup.at(step)
        elif epoch == last:
            start = at + (within - first) * size
        return start, min(start + size, self.num_examples)

    def steps_of(self, epochs: float) -> int:
        complete = math.floor(epochs)
        first, after = self.first_step(complete), self.first_step(complete + 1)
        return first + math.ceil(round((epochs - complete) * (after - first), 6))

    def epochs_of(self, step: int) -> float:
        epoch, within = self.locate(step)
        return epoch + within / (self.first_step(epoch + 1) - self.first_step(epoch))


_warmup_sizes = lru_cache(maxsize=8)(WarmupSizes)  # the table of equal arguments is computed once


# ---- the length of rows ----------------------------------------------------------------------------------------------


def shorten_row(row: dict, length: int) -> dict:
    """Return a row of tokens cut to its first `length` tokens: `input_ids`, `labels`, and `documents` if it is packed.

    Its UTF-8 bytes (`bytes`), which only an evaluation uses, become 0."""
    cut = {name: row[name][:length] for name in ("input_ids", "labels") if name in row}
    if "bytes" in row:
        cut["bytes"] = 0
    if "documents" in row:
        ends = np.minimum(np.cumsum(row["documents"]), length)
        sizes = np.diff(ends, prepend=0)
        cut["documents"] = sizes[sizes > 0]
    return row | cut


# ---- the add-on --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SizeWarmups(Addon):
    batch_size_warmup_steps: int | None = option(
        "the global batch grows linearly to global_batch_size in this many steps (default: off)",
        group="batch",
        min=1,
        max=10**6,
        is_rare=True,
    )
    batch_size_warmup_start: int | None = option(
        "first global batch of the warmup; the following ones are multiples of it",
        min=1,
        is_rare=True,
    )
    sequence_length_warmup_steps: int | None = option(
        "rows are cut to a length that grows linearly to max_length in this many steps (default: off)",
        min=1,
        is_rare=True,
    )
    sequence_length_warmup_start: int | None = option(
        "first length in tokens of the warmup; the following ones are multiples of it",
        min=2,
        is_rare=True,
    )

    def errors(self, cfg: Any, training: bool) -> Iterator[str]:
        """Yield an error for half a warmup, and for one that does not grow."""
        if not training:
            return
        for size in ("batch_size_warmup", "sequence_length_warmup"):
            if (getattr(self, f"{size}_start") is None) != (getattr(self, f"{size}_steps") is None):
                yield f"{size}_start and {size}_steps belong together, but one is missing: give both, or neither"
        start, size = self.batch_size_warmup_start, cfg.global_batch_size
        if start is not None and start >= size > 0:
            yield f"batch_size_warmup_start is {start}: not less than global_batch_size, which is {size}: lower or remove it"

    def step_sizes(self, cfg: Any, num_examples: int) -> StepSizes | None:
        """Return the sizes of the steps of a run with a batch-size warmup."""
        ramp = self._batch_ramp(cfg)
        return _warmup_sizes(num_examples, cfg.global_batch_size, ramp) if ramp else None

    def check_task(self, cfg: Any, task: Task) -> None:
        """Raise UsageError if the task cannot shorten rows, or its rows are no longer than those of the first step.

        A task whose rows `shorten_row` can cut says so by `can_shorten = True`."""
        ramp = self._length_ramp(task)
        if ramp is None:
            return
        if not getattr(task, "can_shorten", False):
            raise UsageError(
                f"sequence_length_warmup_steps is {ramp.steps}, but task {cfg.task} cannot shorten its rows: "
                "remove it, or set `can_shorten` in the task"
            )
        if ramp.start >= ramp.end:
            raise UsageError(
                f"sequence_length_warmup_start is {ramp.start}, not less than max_length, which is {ramp.end}: lower it, or "
                "remove sequence_length_warmup_steps"
            )

    def change_plan(self, plan: PlanConfig, cfg: Any, task: Task, train_set: Any) -> PlanConfig:
        """Rows of a micro-batch are sorted and counted by the lengths that they have after they are shortened."""
        ramp = self._length_ramp(task)
        return replace(plan, max_length=ramp.at) if ramp else plan

    def change_rows(self, task: Any, rows: list[dict], step: int) -> list[dict]:
        """Return the rows cut to the length of this step."""
        ramp = self._length_ramp(task)
        return [shorten_row(row, ramp.at(step)) for row in rows] if ramp else rows

    def plan_rows(self, cfg: Any, task: Task, train_set: Any, total: int, rows: dict[str, str]) -> dict[str, str]:
        """Return the lines of the plan about both warmups."""
        ramps = {"global batch": self._batch_ramp(cfg), "tokens per row": self._length_ramp(task)}
        return {name: str(ramp) for name, ramp in ramps.items() if ramp}

    def _batch_ramp(self, cfg: Any) -> Ramp | None:
        """Return the sizes of the global batch during a batch-size warmup, None without one."""
        start = self.batch_size_warmup_start
        steps = self.batch_size_warmup_steps
        return Ramp(start, cfg.global_batch_size, steps) if start and steps else None

    def _length_ramp(self, task: Any) -> Ramp | None:
        """Return the tokens per row during a sequence-length warmup up to the task's `max_length`, None without one."""
        start = self.sequence_length_warmup_start
        steps = self.sequence_length_warmup_steps
        return Ramp(start, getattr(task, "max_length", 0), steps) if start and steps else None
