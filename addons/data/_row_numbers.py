"""Numbers of the raw rows that set the order of the prepared ones: difficulties (a curriculum) and weights.

Read once and stored as a memory-mapped array beside the prepared rows. Tests: tests/data/test_row_order.py.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import xxhash

from src.config.data_order_fields import LENGTH
from src.config.errors import UsageError, did_you_mean
from src.config.schema import RunConfig
from src.data.arrow_cache import RawRows, load_raw_rows
from src.data.prepared_pieces import KEPT, published
from src.data.row_order import Curriculum
from src.data.sources import Source
from src.storage.shared_work import SharedWork, write_atomic
from src.tasks import Task

if TYPE_CHECKING:
    from src.data.mixture import Mixture
    from src.data.prepared_split import Split

ROWS = 1 << 20  # rows that are read at once
DIFFICULTY, WEIGHT = "curriculum_column", "sample_weight_column"


def add_numbers(cfg: RunConfig, task: Task, source: Source, split: "Split", work: SharedWork) -> None:
    """Store the columns that the run file names beside the prepared training rows, as part of their identity.

    Raise UsageError if the rows are not those of the files one by one, or for a value that is no valid number."""
    for field in (DIFFICULTY, WEIGHT):
        column = getattr(cfg, field)
        if not column or (field, column) == (DIFFICULTY, LENGTH):
            continue
        if getattr(task.options, "packing", False) or split.stats["examples"] != split.stats["source_rows"]:
            raise UsageError(
                f"{field} is {column}, but the {split.stats['examples']} rows of the prepared data are not the "
                f"{split.stats['source_rows']} rows of {source} (packing, or long texts that become several rows): remove it"
                + (f", or give --{field} {LENGTH}" if field == DIFFICULTY else "")
            )
        target = split.folder / f"{field}_{xxhash.xxh3_64_hexdigest(column.encode())}.json"
        if not target.exists():
            raw = load_raw_rows(source, cfg, work)
            assert raw is not None  # it was prepared
            kept = np.load(split.folder / KEPT, mmap_mode="r") if source.held_out else None
            work.run_once(target, lambda: _store(raw, kept, field, column, target, work), f"column {column}")  # noqa: B023
        split.numbers[field] = target.with_suffix(".npy")
        content = (split.stats["rows"], field, json.loads(target.read_text())["hash"])
        split.stats["rows"] = xxhash.xxh3_128_hexdigest(repr(content).encode())


def _store(raw: RawRows, kept: np.ndarray | None, field: str, column: str, target: Path, work: SharedWork) -> None:
    """Write the array (difficulties, or cumulative sums of weights), then its hash to `target`.

    `kept` says of each row whether it is part of the split (None: all)."""
    if column not in raw.rows.column_names:
        names = raw.rows.column_names
        raise UsageError(f"{field} is {column}: no such column among {', '.join(names)}{did_you_mean(column, names)}")
    rows, digest, total = raw.rows.select_columns([column]).with_format("arrow"), xxhash.xxh3_128(), 0.0
    count, stored = len(rows) if kept is None else int(kept.sum()), 0
    with published(target.with_suffix(".npy"), work) as path:
        whole = np.lib.format.open_memmap(path, "w+", np.float64, (count,))
        for start in range(0, len(rows), ROWS):
            ids = np.arange(start, min(start + ROWS, len(rows)))
            ids = ids if kept is None else ids[kept[ids]]
            if not ids.size:
                continue
            values = _read(raw, rows[start : start + ROWS][column].take(pa.array(ids - start)), field, column, ids)
            digest.update(values.tobytes())
            if field == WEIGHT:
                values[0] += total
                values = np.cumsum(values)
                total = values[-1]
            whole[stored : stored + len(values)] = values
            stored += len(values)
        if field == WEIGHT and not 0 < total < np.inf:
            raise UsageError(
                f"{field} is {column}: the sum of all weights is {total:g}: it must be positive and finite"
            )
        whole.flush()
    write_atomic(target, json.dumps({"column": column, "hash": digest.hexdigest()}))


def _read(raw: RawRows, found, field: str, column: str, ids: np.ndarray) -> np.ndarray:
    """Return the values of these rows, an Arrow array, as float64. Raise UsageError for the row of a bad value."""
    try:
        values = np.array(found.cast("float64", safe=False).to_numpy(), np.float64)
    except (ValueError, NotImplementedError):
        raise UsageError(
            f"{field} is {column}, which holds {found.type} in {raw.source}: give a column of numbers"
        ) from None
    bad = np.flatnonzero(~np.isfinite(values) | ((values < 0) if field == WEIGHT else False))
    if bad.size:
        allowed = "a number, 0 or more" if field == WEIGHT else "a number"
        value = found[int(bad[0])].as_py()
        raise UsageError(f"{raw.describe_row(int(ids[bad[0]]))}: {field}: `{column}` is {value}: it must be {allowed}")
    return values


def curriculum(cfg: RunConfig, train_set: "Split | Mixture") -> Curriculum | None:
    """Return the curriculum of a run: the difficulty of each row by id, and the number of steps."""
    if not cfg.curriculum_steps:
        return None
    values = train_set.lengths if cfg.curriculum_column == LENGTH else train_set.read_numbers(DIFFICULTY)
    return Curriculum(values, cfg.curriculum_steps)


def cumulative_weights(cfg: RunConfig, train_set: "Split") -> np.ndarray | None:
    """Return the cumulative sums of the row weights by id, None without a column of weights."""
    return train_set.read_numbers(WEIGHT) if cfg.sample_weight_column else None
