"""Numbers in a column of the raw rows that set the order of the prepared ones: difficulties and weights.

Read once and stored as a memory-mapped array beside the prepared rows.
Tests: tests/addons/data/test_row_numbers.py.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from engine.config.errors import UsageError, did_you_mean
from engine.data.column_types import is_json_text
from engine.data.mixture import Mixture, NumbersByRow
from engine.data.prepared_split import Split
from engine.data.raw_rows import RawRows, load_raw_rows
from engine.data.sources import Source
from engine.storage import atomic_folder
from engine.storage.cache_folder import run_once
from engine.task import Task

ROWS = 1 << 20  # rows that are read at once


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
            run_once(target, lambda: _store(load_raw_rows(source, cfg), kept, self, target), f"column {self.name}")
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


def _store(raw: RawRows | None, kept: np.ndarray, column: Column, target: Path) -> None:
    """Write the array (numbers, or cumulative sums of weights), then its hash to `target`.

    `kept` says of each row whether it is part of the split."""
    assert raw is not None  # it was prepared
    names, what = raw.rows.column_names, f"{column.field} is {column.name}"
    if column.name not in names:
        raise UsageError(f"{what}: no such column among {', '.join(names)}{did_you_mean(column.name, names)}")
    rows, digest, total = raw.rows.select_columns([column.name]).with_format("arrow"), xxhash.xxh3_128(), 0.0
    count, stored = int(kept.sum()), 0
    numbers = np.lib.format.open_memmap(target.with_suffix(".npy"), "w+", np.float64, (count,))
    for start in range(0, len(rows), ROWS):
        ids = np.arange(start, min(start + ROWS, len(rows)))
        ids = ids[kept[ids]]
        if not ids.size:
            continue
        values = _read(raw, rows[start : start + ROWS][column.name].take(pa.array(ids - start)), column, ids)
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


def _read(raw: RawRows, array, column: Column, ids: np.ndarray) -> np.ndarray:
    """Return the values of these rows, an Arrow array, as float64. Raise UsageError for the row of a bad value."""
    field, name = column.field, column.name
    try:
        values = np.array(array.cast("float64", safe=False).to_numpy(), np.float64)
    except (ValueError, NotImplementedError):
        kind = "values of several types" if is_json_text(raw.rows.features[name]) else array.type
        raise UsageError(f"{field} is {name}, which holds {kind} in {raw.source}: give a column of numbers") from None
    bad = np.flatnonzero(~np.isfinite(values) | ((values < 0) if column.weights else False))
    if bad.size:
        allowed = "a number, 0 or more" if column.weights else "a number"
        value = array[int(bad[0])].as_py()
        raise UsageError(f"{raw.describe_row(int(ids[bad[0]]))}: {field}: `{name}` is {value}: it must be {allowed}")
    return values
