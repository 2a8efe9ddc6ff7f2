"""Reading and encoding of raw rows, with the file and line of a row that fails.

Files are read again only to explain an error. Tests: tests/data/test_bad_rows.py and tests/data/test_encode_errors.py.
"""

import reprlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from src.config.errors import Failure, UsageError
from src.config.paths import REPOSITORY
from src.data.arrow_columns import record_batch
from src.data.local_files import BUILDERS
from src.data.readers import csv_records
from src.storage import disk_errors
from src.tasks import Task

if TYPE_CHECKING:
    from datasets import Dataset

COLUMNS = 4  # number of columns with values in an error message


@dataclass
class RowLocations:
    """Locations of rows, given by number, of a split. `describe(row)` finds a location when a message needs it."""

    split: str
    rows: Sequence[int]
    describe: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> "RowLocation":
        return RowLocation(self.describe, self.rows[i])


class RowLocation(NamedTuple):
    """Location of one row. Its file is read only when the location is printed."""

    describe: Callable[[int], str]
    row: int

    def __str__(self) -> str:
        return self.describe(self.row)


def read_rows(rows: "Dataset", ids: Sequence[int], locations: RowLocations) -> dict[str, list]:
    """Return the columns of the raw rows with these ids, one per location.

    Raise UsageError for the first row that cannot be decoded: text that is not UTF-8 (Arrow accepts any bytes as text),
    or a broken image."""
    try:
        return rows[ids]
    except Exception:
        for i, row in enumerate(ids):
            try:
                rows[row]
            except UnicodeDecodeError as error:
                raise UsageError(f"{locations[i]}: not UTF-8 text ({error.reason})") from None
            except Exception as error:
                raise UsageError(f"{locations[i]}: this row cannot be decoded ({error})") from error
        raise


def locate_row(files: Iterable[str], row: int) -> str | None:
    """Return 'FILE, line N' for row number `row` of all files in order, or None if the row is not found.

    Return 'FILE, row N' (counted from 0) for formats without lines."""
    try:
        for file in files:
            count = 0
            for where in _rows_of_file(file):
                if count == row:
                    return f"{file}, {where}"
                count += 1
            row -= count
    except Exception:  # the message with the number of the row is more useful than this error
        pass
    return None


def _rows_of_file(file: str) -> Iterator[str]:
    """Yield 'line N' or 'row N' for each row of a file."""
    kind = Path(file).suffix
    if kind not in (".csv", ".txt", ".jsonl"):
        yield from (f"row {number}" for number in range(_count_rows(file, kind)))
        return
    with open(file, encoding="utf-8", errors="replace", newline="" if kind == ".csv" else None) as text:
        if kind == ".csv":
            yield from (f"line {line}" for line, *_ in islice(csv_records(file, text), 1, None))
        else:
            yield from (f"line {number}" for number, line in enumerate(text, 1) if kind == ".txt" or line.strip())


def _count_rows(file: str, kind: str) -> int:
    if kind == ".parquet":
        from pyarrow import parquet

        return parquet.read_metadata(file).num_rows
    import datasets

    rows = datasets.load_dataset(BUILDERS[kind], data_files=[file], split="train", streaming=True)
    return sum(map(len, rows.with_format("arrow").iter(1000)))


# ---- encoding ----------------------------------------------------------------------------------------------------------


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
    """Return (index of the first row that fails alone, its error); (None, `error`) if none does."""
    for i in range(len(locations)):
        try:
            _encode(task, rows, locations, schema, i, i + 1)
        except UsageError:
            raise
        except Exception as of_row:
            return i, of_row
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
