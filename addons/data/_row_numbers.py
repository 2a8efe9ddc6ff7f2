"""Numbers in a column of the raw rows that set the order of the prepared ones: difficulties and weights.

Read once and stored as a memory-mapped array beside the prepared rows.
Tests: tests/addons/data/test_row_numbers.py.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress, islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from engine.config.errors import UsageError, did_you_mean
from engine.plan.mixture import Mixture, NumbersByRow
from engine.rows.examples import Examples, load_examples
from engine.rows.file_parts import Row
from engine.rows.prepared_split import Split
from engine.rows.sources import Source
from engine.storage import atomic_folder
from engine.storage.cache_folder import run_once
from engine.task import Task

ROWS = 1 << 16  # numbers that are stored at once


@dataclass(frozen=True)
class Column:
    """A column of numbers that a field of the run file names."""

    field: str
    name: str
    weights: bool = False  # no number may be negative, and the array holds their cumulative sums
    hint: str = ""  # for data with other rows than the raw rows

    def file(self, folder: Path) -> Path:
        """Return the record of this column in the folder of a split; the array is beside it, as .npy."""
        return folder / f"{self.field}_{xxhash.xxh3_64_hexdigest(self.name.encode())}.json"

    def store(self, cfg: Any, task: Task, source: Source, split: Split) -> None:
        """Store the numbers beside the prepared rows of a split, as part of their identity.

        Raise UsageError if the rows are not those of the files one by one, or for a value that is no valid number."""
        encoded = split.stats["examples"] + split.stats["rows_dropped"]
        if getattr(task.options, "packing", False) or encoded != split.stats["source_rows"]:
            raise UsageError(
                f"{self.field} is {self.name}, but the {split.stats['examples']} rows of the prepared data are not the "
                f"{split.stats['source_rows']} rows of {source} (packing, or long texts that become several rows): remove it"
                f"{self.hint}"
            )
        target = self.file(split.folder)
        if not target.exists():
            kept = split.array("kept")
            run_once(target, lambda: _store(load_examples(source, cfg), kept, self, target), f"column {self.name}")
        content = (split.stats["rows"], self.field, json.loads(target.read_text())["hash"])
        split.stats["rows"] = xxhash.xxh3_128_hexdigest(repr(content).encode())

    def read(self, train_set: Split | Mixture) -> Any:
        """Return the stored numbers, which an array of row ids indexes."""
        array: Callable[[Split], np.ndarray] = lambda part: np.load(  # noqa: E731
            self.file(part.folder).with_suffix(".npy"), mmap_mode="r"
        )
        if isinstance(train_set, Mixture):
            return NumbersByRow(train_set.parts, array, np.float64)
        return array(train_set)


def _store(examples: Examples | None, kept: np.ndarray, column: Column, target: Path) -> None:
    """Write the array (numbers, or cumulative sums of weights), then its hash to `target`.

    `kept` says of each row whether it is part of the split."""
    assert examples is not None  # it was prepared
    names = examples.column_names
    what = f"{column.field} is {column.name}"
    if column.name not in names:
        raise UsageError(f"{what}: no such column among {', '.join(names)}{did_you_mean(column.name, names)}")
    digest = xxhash.xxh3_128()
    total = 0.0
    stored = 0
    numbers = np.lib.format.open_memmap(target.with_suffix(".npy"), "w+", np.float64, (int(kept.sum()),))
    rows = compress(examples.rows([column.name]), kept)
    while some := list(islice(rows, ROWS)):
        values = np.array([_read(row, column) for row in some], np.float64)
        digest.update(values.tobytes())
        if column.weights:
            values[0] += total
            values = np.cumsum(values)
            total = values[-1]
        numbers[stored : stored + len(values)] = values
        stored += len(values)
    if column.weights and not 0 < total < np.inf:
        raise UsageError(f"{what}: the sum of all weights is {total:g}: it must be positive and finite")
    numbers.flush()
    atomic_folder.fsync(target.with_suffix(".npy"))
    atomic_folder.rewrite(target, json.dumps({"column": column.name, "hash": digest.hexdigest()}))


def _read(row: Row, column: Column) -> float:
    """Return the number of a row; cells of CSV files are text. Raise UsageError for a bad one."""
    value = row.values[column.name]
    try:
        number = math.nan if isinstance(value, str) and "_" in value else float(value)  # 1_000 is Python's
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or (column.weights and number < 0):
        allowed = "a number, 0 or more" if column.weights else "a number"
        raise UsageError(f"{row.place}: {column.field}: `{column.name}` is {repr(value)[:40]}: it must be {allowed}")
    return number
