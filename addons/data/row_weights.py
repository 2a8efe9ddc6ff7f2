"""Row weights: rows are drawn independently in proportion to a column of numbers, with replacement.

Tests: tests/addons/data/test_row_numbers.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from addons.data._row_numbers import Column
from engine.config.addon import Addon
from engine.config.option import option
from engine.plan.batch_plan import PlanConfig
from engine.plan.row_order import splitmix64
from engine.plan.seeding import derive_seed
from engine.rows.prepared_split import Split
from engine.rows.sources import Source
from engine.task import Task


@dataclass(frozen=True, eq=False)
class WeightedDraws:
    """Independent draws in proportion to the row weights.

    `cumulative` holds the sums of the weights up to and with each row, in float64. A weight of zero is never drawn.
    A draw is the inverse of this distribution at a 53-bit number of SplitMix64."""

    cumulative: np.ndarray

    def draw(self, plan: PlanConfig, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the ids at positions start … stop−1 of an epoch."""
        key = np.uint64(derive_seed("weighted draw", plan.seed, epoch))
        bits = splitmix64(key + np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        share = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53  # 0 ≤ share < 1
        return np.searchsorted(self.cumulative, share * self.cumulative[-1], side="right")


@dataclass(frozen=True)
class RowWeights(Addon):
    sample_weight_column: str | None = option(
        "column of numbers: rows are drawn in proportion to it, with replacement (default: each row once per epoch)",
        group="data",
        is_rare=True,
    )

    def errors(self, cfg: Any, training: bool) -> Iterator[str]:
        """Yield an error for a mixture."""
        if training and cfg.mixture:
            yield "sample_weight_column and mixture are both given: give each source a `weight`, or remove one of them"

    def after_preparation(self, cfg: Any, task: Task, source: Source, split: Split) -> None:
        """Store the cumulative weights beside the prepared training rows."""
        if source.split == "train":
            self._column().store(cfg, task, source, split)

    def change_plan(self, plan: PlanConfig, cfg: Any, task: Task, train_set: Any) -> PlanConfig:
        """Draw rows by their weights."""
        return replace(plan, draw=WeightedDraws(self._column().read(train_set)).draw)

    def plan_rows(self, cfg: Any, task: Task, train_set: Any, total: int, rows: dict[str, str]) -> dict[str, str]:
        """Return the line of the plan about the draws."""
        return {"draws": f"in proportion to {self.sample_weight_column}, with replacement"}

    def _column(self) -> Column:
        return Column("sample_weight_column", str(self.sample_weight_column), weights=True)
