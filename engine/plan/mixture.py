"""Mixture: several sources as one dataset, sampled by weight.

The batch plan treats a mixture like one dataset. Row ids count through all sources in order.
Tests: tests/engine/plan/test_mixture.py.
"""

import hashlib
from collections.abc import Callable, Iterator
from operator import attrgetter

import numpy as np

from engine.config.errors import UsageError
from engine.plan.row_order import mixture_quotas
from engine.rows.prepared_split import SUMS


class Mixture:
    """Several splits, read by row id, with the same interface as `Split`."""

    def __init__(self, parts: dict, weights: list[float] | None = None, training: bool = True):
        self.parts = parts
        rows = [len(part) for part in parts.values()]
        self.lengths = NumbersByRow(parts, attrgetter("lengths"), np.int64)
        self.starts = self.lengths.starts
        self.quotas = mixture_quotas(rows, weights) if training else None
        for name, (_, draws) in zip(parts, self.quotas or [], strict=False):
            if not draws:
                raise UsageError(f"mixture: the weight of {name} gives it no example in an epoch: raise the weight")
        self.stats = self._stats()

    def _stats(self) -> dict:
        """Return the statistics of one epoch: a sum over sources, each weighted by its draws per row."""
        stats = [part.stats for part in self.parts.values()]
        shares = [draws / rows for rows, draws in self.quotas] if self.quotas else [1.0] * len(stats)
        total = {}
        for name in SUMS:
            total[name] = round(sum(s[name] * share for s, share in zip(stats, shares, strict=True)))
        content = [(name, s["rows"]) for name, s in zip(self.parts, stats, strict=True)]
        return total | {
            "examples": len(self),
            "longest": max(s["longest"] for s in stats),
            "rows": hashlib.sha256(repr([*content, self.quotas]).encode()).hexdigest()[:32],
        }

    def __len__(self) -> int:
        return sum(draws for _, draws in self.quotas) if self.quotas else int(self.starts[-1])

    def segments(self) -> list[tuple]:
        """Return (source name, id of its first row, its split) of each source."""
        return list(zip(self.parts, self.starts.tolist(), self.parts.values(), strict=False))

    def longest(self, count: int) -> np.ndarray:
        """Return the ids of the `count` longest rows of one source: the one that has the longest row."""
        _, first, part = max(self.segments(), key=lambda s: s[2].stats["longest"])
        return first + part.longest(count)

    def rows(self, ids: np.ndarray) -> list[dict]:
        """Return the rows with the given ids, in the order of `ids`."""
        rows: list = [None] * len(ids)
        for part, first, mine in self.lengths.by_part(ids):
            for i, row in zip(mine.tolist(), part.rows(ids[mine] - first), strict=True):
                rows[i] = row
        return rows


class NumbersByRow:
    """A number for each row of a mixture, indexed by an array of row ids."""

    def __init__(self, parts: dict, array_of: Callable, dtype: type):
        self.parts = list(parts.values())
        self.array_of = array_of
        self.dtype = dtype
        self.starts = np.cumsum([0, *map(len, self.parts)])

    def by_part(self, ids: np.ndarray) -> Iterator[tuple]:
        """Yield (part, id of its first row, where in `ids` its rows are) of the parts that have some of `ids`."""
        numbers = np.searchsorted(self.starts, ids, side="right") - 1
        for number in np.unique(numbers).tolist():
            yield self.parts[number], int(self.starts[number]), np.flatnonzero(numbers == number)

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        numbers = np.empty(len(ids), self.dtype)
        for part, first, mine in self.by_part(ids):
            numbers[mine] = self.array_of(part)[ids[mine] - first]
        return numbers
