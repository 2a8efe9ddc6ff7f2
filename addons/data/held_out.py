"""Held-out rows (`validation_split`): evaluation rows chosen among the training rows by a hash of their content.

Tests: tests/addons/data/test_held_out.py.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from engine.config.addon import Addon
from engine.config.errors import warn
from engine.config.option import option
from engine.rows import sources
from engine.rows.prepared_split import MEDIA, Split
from engine.rows.sources import Source
from engine.task import Task


@dataclass(frozen=True)
class HeldOutSource(Source):
    """Rows of the training data: those that are held out, or the others."""

    share: float = 0.0

    @property
    def rows_of(self) -> str:
        return "train"

    def key(self) -> list:
        return [*super().key(), self.share, Path(__file__).read_text()]

    def choose_rows(self, rows: list[dict], features: Mapping[str, Any]) -> np.ndarray:
        return are_held_out(rows, features, self.share) == (self.split == "validation")

    def explain_no_rows(self, count: int) -> str:
        number, fix = ("none", "raise it") if self.split == "validation" else ("all", "lower it")
        return f"validation_split is {self.share}, which holds out {number} of the {count} rows of {self}: {fix}"


@dataclass(frozen=True)
class HeldOut(Addon):
    validation_split: float | None = option(
        "share of the training rows that is held out for evaluation, such as 0.05: chosen by a hash of their content",
        group="data",
        above=0,
        below=1,
    )

    def errors(self, cfg: Any, training: bool) -> Iterator[str]:
        """Yield the errors of other evaluation data beside `validation_split`."""
        if cfg.validation_file:
            yield "validation_split and validation_file are both given: keep one"
        for name, source in (cfg.mixture or {}).items():
            if isinstance(source, dict) and source.get("validation_file"):
                yield f"validation_split and mixture: {name}: validation_file are both given: keep one"

    def find_sources(self, cfg: Any, split: str) -> dict[str, Source]:
        """Return the sources of the training data for both splits."""
        training = sources.find_sources(cfg, "train")
        share = self.validation_split or 0.0
        return {name: replace(HeldOutSource(**vars(one)), split=split, share=share) for name, one in training.items()}

    def after_preparation(self, cfg: Any, task: Task, source: Source, split: Split) -> None:
        """Warn if held-out rows take the place of the dataset's own evaluation split."""
        names = [
            name for name in ("validation", "test") if name in split.stats["splits"] and name != source.dataset_split
        ]
        if names and source.split == "validation":
            warn(f"{source.field}: the split {names[0]} of {source.name} is not used: validation_split takes its place")

    def plan_rows(self, cfg: Any, task: Task, train_set: Any, total: int, rows: dict[str, str]) -> dict[str, str]:
        """Return the line of the plan about the evaluation data."""
        return {"evaluation data": f"{rows['evaluation data']}, held out by validation_split {self.validation_split:g}"}


# ---- the choice of rows ----------------------------------------------------------------------------------------------


def are_held_out(rows: list[dict], features: Mapping[str, Any], share: float) -> np.ndarray:
    """Return for each row whether it is evaluation data, as bools.

    `rows` hold the columns that the task reads; images and audio as {"bytes": …, "path": …}. The result is a function
    of the values of the row alone, so equal rows are all on one side, wherever they are, and a larger share adds rows."""
    hashes = [_hash({name: _stable(value, features.get(name)) for name, value in row.items()}) for row in rows]
    return np.array([number < int(share * 2**64) for number in hashes], bool)


def _hash(row: dict) -> int:
    return xxhash.xxh3_64_intdigest(json.dumps(_normal(row), sort_keys=True, default=repr).encode())


def _stable(value: Any, feature: Any) -> Any:
    """Return the value as it stays when files are moved or rows are added: content, not path; name, not number."""
    type_name = type(feature).__name__
    if type_name in MEDIA and isinstance(value, dict):
        return xxhash.xxh3_128_hexdigest(_content(value))
    if type_name == "ClassLabel" and isinstance(value, int) and value >= 0:
        return feature.names[value]
    return value


def _content(media: dict) -> bytes:
    try:
        return media["bytes"] if media["bytes"] is not None else Path(media["path"]).read_bytes()
    except OSError:
        return b""  # `encode` is refused this row, with its location


def _normal(value: Any) -> Any:
    """Return a value as it is whatever other rows hold: without null entries of objects, and 1.0 as 1.

    A later row with another key adds it to all rows, and one with a fraction makes all numbers fractions."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _normal(inside) for name, inside in value.items() if inside is not None}
    if isinstance(value, list) and {dict, list, float} & set(map(type, value)):
        return [_normal(inside) for inside in value]
    return value
