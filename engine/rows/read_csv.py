"""CSV files: cells are text, and nothing is shifted, filled or dropped.

Tests: tests/engine/rows/test_read.py, tests/engine/rows/test_bad_rows.py.
"""

import csv
import functools
import io
from collections.abc import Iterable, Iterator
from typing import Any

from engine.config.errors import UsageError, one_line
from engine.rows import file_parts
from engine.rows.file_parts import File, Part
from engine.rows.read_lines import select

LONGEST_CELL = 1 << 30  # characters


def parts_of_csv(file: File, binary: Any) -> Iterator[Part]:
    """Yield the parts of a CSV file: (names of the columns, (line, cells or error) of each record).

    Python's strict reader shifts, fills and drops nothing, unlike pandas, which takes an extra field in every row as an
    index, and pyarrow, which takes all rows after an open quote as one cell."""
    csv.field_size_limit(LONGEST_CELL)
    with io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        reader = csv.reader(text, delimiter=file.separator, strict=True)
        names = next((cells for _, cells in _records(reader)), [])
        if isinstance(names, ValueError):
            yield Part(file, 0, 1, names)
            return
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise UsageError(f"{file.name}: the column `{min(repeated)}` is named twice")
        records = []
        size = 0
        for line, cells in _records(reader):
            if isinstance(cells, list) and len(cells) != len(names):
                cells = ValueError(f"expected {len(names)} columns, got {len(cells)}")
            records.append((line, cells))
            size += sum(map(len, cells)) if isinstance(cells, list) else 0
            if len(records) == file_parts.PART_ROWS or size >= file_parts.PART:
                yield Part(file, size, 0, (names, records))
                records = []
                size = 0
        if records:
            yield Part(file, size, 0, (names, records))


def _records(reader: Any) -> Iterator[tuple[int, "list[str] | ValueError"]]:
    """Yield (first line, cells or error) of each record but blank lines."""
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, ValueError(one_line(error))
            continue
        if cells:
            yield line, cells


@functools.cache
def _no_values() -> frozenset[str]:
    from pyarrow.csv import ConvertOptions

    return frozenset(ConvertOptions().null_values)


def read_record(
    names: list[str], cells: "list[str] | ValueError", columns: Iterable[str] | None
) -> "dict | ValueError":
    """Return the cells of a record by column; those that stand for nothing, such as an empty one, are None."""
    if isinstance(cells, ValueError):
        return cells
    nothing = _no_values()
    row = {
        name: None if cell in nothing else cell
        for name, cell in zip(names, cells, strict=True)
        if columns is None or name in columns
    }
    return select(row, columns, all(map(str.isascii, cells)))
