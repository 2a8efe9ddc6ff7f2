"""Encoding of raw rows by the task, and the error message for the row on which it fails.

Tests: tests/data/test_encode_errors.py.
"""

import reprlib
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from src.config.errors import Failure, UsageError
from src.config.paths import REPOSITORY
from src.data.arrow_columns import record_batch
from src.data.row_errors import RowLocations
from src.storage import disk_errors
from src.tasks import Task

COLUMNS = 4  # number of columns with values in an error message


def encode_rows(
    task: Task, rows: dict[str, list], locations: RowLocations, schema: pa.Schema
) -> tuple[dict[str, list], pa.RecordBatch]:
    """Return what the task's `encode` returns for raw rows, and the same as Arrow columns.

    If that fails, raise UsageError for the first row with which it fails, and print the traceback: the task may be in
    error as well as the row."""
    try:
        return _encode(task, rows, locations, schema, 0, len(locations))
    except (UsageError, Failure, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in disk_errors.FULL:
            raise
        i, error = _find_failing_row(task, rows, locations, schema, error)
        traceback.print_exception(error, chain=False)
        row = {name: column[i] for name, column in rows.items()} if i is not None else {}
        values = describe_values(row) or f"this and the next {len(locations) - 1} rows together, not one by one"
        raise UsageError(
            f"{locations[i or 0]}: `encode` of task {task.cfg.task} fails for {values} ({describe_error(error)}): fix the "
            "row, or the code of the task"
        ) from error


def _encode(
    task: Task, rows: dict[str, list], locations: RowLocations, schema: pa.Schema, start: int, stop: int
) -> tuple[dict[str, list], pa.RecordBatch]:
    part = RowLocations(locations.split, locations.rows[start:stop], locations.describe)
    encoded = task.encode({name: column[start:stop] for name, column in rows.items()}, part)
    return encoded, record_batch(encoded, schema)


def _find_failing_row(
    task: Task, rows: dict[str, list], locations: RowLocations, schema: pa.Schema, error: Exception
) -> tuple[int | None, Exception]:
    """Return (index of the first row that fails alone, its error), by halves: as much work as one more `encode`.

    If none fails alone, return None and `error`."""
    start, stop = 0, len(locations)
    while stop - start > 1:
        middle = (start + stop) // 2
        try:
            _encode(task, rows, locations, schema, start, middle)
            start = middle
        except Exception:
            stop = middle
    try:
        _encode(task, rows, locations, schema, start, stop)
    except UsageError:
        raise
    except Exception as found:
        return start, found
    return None, error


def describe_values(row: dict[str, Any]) -> str:
    """Return the nulls of a row if there are any, else its first values, shortened."""
    null = [f"`{name}` = null" for name, value in row.items() if value is None]
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    return ", ".join(null or [f"`{name}` = {short.repr(value)}" for name, value in row.items()][:COLUMNS])


def describe_failing_row(call: Callable[[list[dict]], Any], ids: Iterable[int], rows: list[dict]) -> str:
    """Return text about the first row for which `call([row])` fails: its id and values. Return "" if it never does."""
    for number, row in zip(ids, rows, strict=True):
        try:
            call([row])
        except Exception:
            return f"; row {number} fails alone: {describe_values(row)}"
    return ""


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an error, and its last line of code in this project."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if REPOSITORY in Path(frame.filename).parents and ".venv" not in frame.filename]
    where = (own or frames)[-1]
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text} in {Path(where.filename).name}, line {where.lineno}"
