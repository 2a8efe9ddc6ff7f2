"""Reading and encoding of raw rows, with the file and line of a row that fails.

Tests: tests/engine/data/test_bad_rows.py.
"""

import os
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from engine.config.errors import Failure, UsageError, one_line
from engine.data.column_types import parse_json
from engine.task_registry import Task
from engine.text.row_columns import named_in_errors

if TYPE_CHECKING:
    from datasets import Dataset


class RowLocation(NamedTuple):
    """Location of one row, printed as its file and line. The file is read only then."""

    row: int
    describe: Callable[[int], str]

    def __str__(self) -> str:
        return self.describe(self.row)


def read_rows(rows: "Dataset", ids: Sequence[int], describe: Callable[[int], str]) -> dict[str, list]:
    """Return the columns of the raw rows with these ids; JSON text as the values that it stands for.

    Raise UsageError for the first row that cannot be decoded: text that is not UTF-8 (Arrow accepts any bytes as text),
    or a broken image."""
    try:
        return parse_json(rows[ids], rows.features)
    except Exception:
        _refuse_first_failing(lambda i: rows[ids[i]], ids, describe, "this row cannot be decoded")
        raise


def encode_rows(
    task: Task, rows: dict[str, list], ids: Sequence[int], describe: Callable[[int], str], schema: pa.Schema
) -> tuple[dict[str, list], pa.RecordBatch]:
    """Return what the task's `encode` returns for raw rows, and the same as Arrow columns.

    If that fails, raise UsageError for the first row that fails alone."""
    locations = [RowLocation(row, describe) for row in ids]

    def encode(start: int, stop: int) -> tuple[dict[str, list], pa.RecordBatch]:
        part = {name: column[start:stop] for name, column in rows.items()}
        with named_in_errors(task.cfg.columns):
            encoded = task.encode(part, locations[start:stop])
        return encoded, pa.record_batch([pa.array(encoded[field.name], field.type) for field in schema], schema=schema)

    try:
        return encode(0, len(locations))
    except (UsageError, Failure, MemoryError):
        raise
    except Exception:
        _refuse_first_failing(lambda i: encode(i, i + 1), ids, describe, f"`encode` of task {task.cfg.task} fails")
        raise


def _refuse_first_failing(
    call: Callable[[int], Any], ids: Sequence[int], describe: Callable[[int], str], what: str
) -> None:
    """Raise UsageError for the first row i for which `call(i)` fails; return if it never does.

    Print its traceback, because the code of the task may be in error as well as the row."""
    for i, row in enumerate(ids):
        try:
            call(i)
        except UsageError:
            raise
        except Exception as error:
            traceback.print_exception(error, chain=False)
            raise UsageError(f"{describe(row)}: {what}: {type(error).__name__}: {one_line(error, 200)}") from error


# ---- files -----------------------------------------------------------------------------------------------------------


def line_of(file: str, row: int) -> str:
    """Return 'line N' for a row of a file in which a row is a line, else 'row N'."""
    if file.endswith((".jsonl", ".txt")) and os.path.isfile(file):
        with open(file, encoding="utf-8", errors="replace") as text:
            for number, line in enumerate(text, 1):
                row -= file.endswith(".txt") or bool(line.strip())
                if row < 0:
                    return f"line {number}"
    return f"row {row}"
