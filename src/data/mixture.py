"""Several sources as one dataset, with shares by weight.

Tests: tests/data/test_mixture.py. The plan draws from a mixture as from one data set; ids count through the
sources one after the other.
"""

import hashlib

import numpy as np

from src.config.errors import UsageError
from src.config.mixture_fields import as_list
from src.config.schema import RunConfig
from src.data.batch_plan import mixture_quotas, steps_per_epoch
from src.data.dataset_spec import DatasetSpec


def dataset_specs(cfg: RunConfig) -> dict[str, DatasetSpec]:
    """Return the sources of a run by name; the one of a run without a mixture has none."""
    if not cfg.mixture:
        names = (cfg.dataset_name, cfg.dataset_config_name, cfg.dataset_revision)
        return {"": DatasetSpec(*names, cfg.train_file, cfg.validation_file)}
    found = {}
    for name, told in cfg.mixture.items():
        files = [as_list(told.get(field)) for field in ("train_file", "validation_file")]
        names = [told.get(f"dataset_{field}") for field in ("name", "config_name", "revision")]
        found[name] = DatasetSpec(*names, *files, where=f"mixture: {name}: ")
    if cfg.validation_file:  # evaluation on other data than that of the sources
        found = {name: one._replace(validation_file=[]) for name, one in found.items()}
    return found


class Mixture:
    """Rows of several splits by id; looks to the loop as one split does."""

    def __init__(self, parts: dict, weights: list[float] | None = None, training: bool = True):
        self.parts = parts
        self.starts = np.cumsum([0, *(len(part) for part in parts.values())])
        self.lengths = _Lengths(self)
        self.quotas = mixture_quotas([len(part) for part in parts.values()], weights) if training else None
        if self.quotas and (none := [n for n, (_, draws) in zip(parts, self.quotas, strict=True) if not draws]):
            raise UsageError(f"mixture: the weight of {none[0]} comes to less than one example an epoch: raise it")
        self.stats = self._facts()

    def _facts(self) -> dict:
        """Return the facts of an epoch: those of the sources, added as often as their rows are drawn."""
        stats = [part.stats for part in self.parts.values()]
        shares = [draws / rows for rows, draws in self.quotas] if self.quotas else [1.0] * len(stats)
        names = ("tokens", "targets", "rows_cut", "tokens_cut", "without_target", "source_rows", "examples")
        total = {name: round(sum(f[name] * s for f, s in zip(stats, shares, strict=True))) for name in names}
        total |= {
            "examples": len(self),
            "longest": max(f["longest"] for f in stats),
            "tokenizer": stats[0]["tokenizer"],
        }
        held = repr([(name, f["rows"]) for name, f in zip(self.parts, stats, strict=True)] + [self.quotas])
        total["rows"] = hashlib.sha256(held.encode()).hexdigest()[:32]
        total["files"] = {f"{name}: {k}": v for name, p in self.parts.items() for k, v in p.stats["files"].items()}
        return total

    def position(self, step: int, host_group) -> None:
        """Return nothing to save: where to continue follows from the step."""

    def __len__(self) -> int:
        return sum(draws for _, draws in self.quotas) if self.quotas else int(self.starts[-1])

    def epoch_at(self, step: int, batch: int) -> float:
        """Return how many epochs, each as long as all sources together, are over after so many steps."""
        return step / steps_per_epoch(len(self), batch)

    def segments(self) -> list[tuple]:
        """Return (name, first id, rows) of each source."""
        return list(zip(self.parts, self.starts.tolist(), self.parts.values(), strict=False))

    def longest(self, count: int) -> np.ndarray:
        """Return the ids of the longest rows of the source that has the longest."""
        _, first, part = max(self.segments(), key=lambda s: s[2].stats["longest"])
        return first + part.longest(count)

    def rows(self, ids: np.ndarray) -> list[dict]:
        """Return the rows of `ids` in that order."""
        found = [None] * len(ids)
        for _, first, part in self.segments():
            mine = np.flatnonzero((ids >= first) & (ids < first + len(part)))
            for place, row in zip(mine.tolist(), part.rows(ids[mine] - first), strict=True):
                found[place] = row
        return found


class _Lengths:
    """The lengths of a mixture's rows, indexed by arrays of ids."""

    def __init__(self, mixture: Mixture):
        self.mixture = mixture

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        found = np.empty(len(ids), np.int64)
        for _, first, part in self.mixture.segments():
            mine = (ids >= first) & (ids < first + len(part))
            found[mine] = part.lengths[ids[mine] - first]
        return found
