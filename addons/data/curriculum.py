"""Curriculum: the rows of the first steps come in ascending order of a column of numbers, or of their length.

In each epoch the rows that these steps draw anyway are sorted, so every row still comes once.
Tests: tests/addons/data/test_row_numbers.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from addons.data._row_numbers import Column
from engine.config.addon import Addon
from engine.config.option import option
from engine.plan.batch_plan import PlanConfig
from engine.rows.prepared_split import Split
from engine.rows.sources import Source
from engine.task import Task

LENGTH = "length"  # as curriculum_column: the tokens of a row


@dataclass(frozen=True, eq=False)
class EasyToHard:
    """Each epoch takes its rows of the first `steps` steps in ascending order of their `values`."""

    values: Any  # difficulty by id: an array, or an object that an array of ids indexes
    steps: int

    def ids(self, plan: PlanConfig, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the ids at positions start … stop−1 of an epoch, all of them in one step."""
        if start < self._end(plan, epoch):
            return self._easy_to_hard(plan, epoch)[start:stop]
        return plan.draw(plan, epoch, start, stop)

    def _end(self, plan: PlanConfig, epoch: int) -> int:
        """Return the number of positions of an epoch that are in steps of the curriculum."""
        last, within = plan.sizes.locate(self.steps)
        return plan.num_examples if epoch < last else plan.sizes.positions(last, within)[0] if epoch == last else 0

    @lru_cache(maxsize=1)  # noqa: B019 (the steps of an epoch ask one after the other)
    def _easy_to_hard(self, plan: PlanConfig, epoch: int) -> np.ndarray:
        """Return the ids of the curriculum's steps of an epoch; rows of equal value keep their random order."""
        ids = plan.draw(plan, epoch, 0, self._end(plan, epoch))
        return ids[np.argsort(np.asarray(self.values[ids]), kind="stable")]


@dataclass(frozen=True)
class Curriculum(Addon):
    curriculum_column: str | None = option(
        "column of numbers, or length (tokens): rows of the first curriculum_steps steps come in its ascending order",
        group="data",
        is_rare=True,
    )
    curriculum_steps: int | None = option("steps of the curriculum (default: off)", min=1, is_rare=True)

    def errors(self, cfg: Any, training: bool) -> Iterator[str]:
        """Yield an error for half a curriculum."""
        if training and (self.curriculum_column is None) != (self.curriculum_steps is None):
            yield "curriculum_column and curriculum_steps belong together, but one is missing: give both, or neither"

    def after_preparation(self, cfg: Any, task: Task, source: Source, split: Split) -> None:
        """Store the difficulties beside the prepared training rows."""
        if source.split == "train" and (column := self._column()):
            column.store(cfg, task, source, split)

    def change_plan(self, plan: PlanConfig, cfg: Any, task: Task, train_set: Any) -> PlanConfig:
        """Sort the rows of the first steps."""
        column = self._column()
        values = column.read(train_set) if column else train_set.lengths
        return replace(plan, ids=EasyToHard(values, self.curriculum_steps or 0).ids)

    def plan_rows(self, cfg: Any, task: Task, train_set: Any, total: int, rows: dict[str, str]) -> dict[str, str]:
        """Return the line of the plan about the curriculum."""
        return {"curriculum": f"ascending {self.curriculum_column} in the first {self.curriculum_steps:,} steps"}

    def _column(self) -> Column | None:
        """Return the column of difficulties, None for the lengths of rows."""
        name = str(self.curriculum_column)
        return (
            None
            if name == LENGTH
            else Column("curriculum_column", name, hint=f", or give --curriculum_column {LENGTH}")
        )
