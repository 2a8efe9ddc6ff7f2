"""Error locations: the file and line of a bad row.

Files are read again only to explain an error. Tests: tests/data/test_bad_rows.py and tests/config/test_bad_input.py.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from src.config.errors import UsageError
from src.data.file_readers import csv_records
from src.data.local_files import BUILDERS

if TYPE_CHECKING:
    from datasets import Dataset


class RowLocations:
    """Locations of rows, given by number, of a split. `describe(row)` finds a location when a message needs it."""

    def __init__(self, split: str, rows: Sequence[int], describe: Callable[[int], str]):
        self.split, self.rows, self.describe = split, rows, describe

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> "RowLocation":
        if not 0 <= i < len(self):
            raise IndexError(i)
        return RowLocation(self.describe, self.rows[i])


class RowLocation:
    """Location of one row. Its file is read only when the location is printed."""

    def __init__(self, describe: Callable[[int], str], row: int):
        self.describe, self.row = describe, row

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
