"""Reading and encoding of raw rows, with the file and line of a row that fails; columns of mixed types.

Tests: tests/data/test_bad_rows.py.
"""

import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from src.config.errors import Failure, UsageError, one_line
from src.tasks import Task

if TYPE_CHECKING:
    from datasets import Dataset


class RowLocation(NamedTuple):
    """Location of one row, printed as its file and line. The file is read only then."""

    row: int
    describe: Callable[[int], str]

    def __str__(self) -> str:
        return self.describe(self.row)


def read_rows(rows: "Dataset", ids: Sequence[int], describe: Callable[[int], str]) -> dict[str, list]:
    """Return the columns of the raw rows with these ids.

    Raise UsageError for the first row that cannot be decoded: text that is not UTF-8 (Arrow accepts any bytes as text),
    or a broken image."""
    try:
        return rows[ids]
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
    if file.endswith((".jsonl", ".txt")):
        with open(file, encoding="utf-8", errors="replace") as text:
            for number, line in enumerate(text, 1):
                row -= file.endswith(".txt") or bool(line.strip())
                if row < 0:
                    return f"line {number}"
    return f"row {row}"


def json_error(file: str) -> str | None:
    """Return a message with the first line of a .jsonl file that pyarrow refuses, or None.

    pyarrow counts rows from the start of a block, so the file is one block."""
    from pyarrow.json import ReadOptions, read_json

    if not file.endswith(".jsonl") or not os.path.isfile(file) or os.path.getsize(file) >= 1 << 31:
        return None
    try:
        read_json(file, ReadOptions(use_threads=False, block_size=os.path.getsize(file) + 1))
    except pa.ArrowInvalid as error:
        reason, _, row = str(error).rpartition(" in row ")
        return f"{file}, {line_of(file, int(row))}: {reason.rstrip('.')}" if row.isdigit() else None
    return None


def refuse_mixed_types(schema: pa.Schema, columns: Iterable[str], files: Iterable[str], name: str) -> None:
    """Raise UsageError for a column of mixed types: `datasets` stores it as JSON and may read back texts in quotes."""
    for column in columns:
        # The entries of these may have different keys.
        if column not in ("messages", "tools") and "arrow.json" in str(schema.field(column).type):
            error = next(filter(None, map(json_error, files)), None)
            raise UsageError(error or f"{name}: `{column}` holds values of several types: use one type for all rows")
