"""CSV files read by Python's strict csv reader instead of pandas: no row is shifted, filled or dropped.

pandas takes an extra field in every row as an index (which shifts the columns), fills short rows, and renames duplicate
columns; pyarrow takes all rows after an open quote as one cell. Tests: tests/engine/data/test_bad_rows.py.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from engine.config.errors import UsageError, one_line
from engine.data.column_types import refuse_missing_columns

# At most in a table. The first one decides the types of the columns.
ROWS = 200_000
CHARACTERS = 16 << 20
LONGEST_CELL = 1 << 30  # characters
TYPES = (pa.string(), pa.int64(), pa.float64(), pa.bool_())  # of columns
OTHER_DIGITS = r"^([-+]?0\d|\+)"  # of an integer that is written otherwise than it would be as a number
BOOLS = pa.array(["true", "True", "TRUE", "false", "False", "FALSE"])  # a cast would also take 1, a number


def csv_tables(builder: Any, files_iterables: Iterable, open_file: Callable) -> Iterator[tuple[Any, pa.Table]]:
    """Yield the tables of CSV files for a builder of `datasets`, in the types of its features if it has some.

    Its `only_columns` (None: all) are read; `late_columns` are refused."""
    from datasets import Features
    from datasets.builder import Key

    only = builder.only_columns
    known = (pa.string(),) if builder.has_card else TYPES  # a card may name other types than the cells
    schema = (builder.info.features or Features()).arrow_schema
    types = {field.name: field.type for field in schema if field.type in known}
    for shard, files in enumerate(files_iterables):
        for file in files:
            with open_file(file, "rb") as binary:
                for number, cells in enumerate(_read_cells(binary, file, builder.config.sep)):
                    for name in cells.keys() & set(builder.late_columns):
                        raise UsageError(
                            f"{file}: there is a column `{name}`, which the first file lacks: add it to all files"
                        )
                    refuse_missing_columns(file, cells, only)
                    cells = {name: column for name, column in cells.items() if only is None or name in only}
                    for name, column in cells.items():
                        types.setdefault(name, _type_of(column.drop_null()) or pa.string())
                    yield Key(shard, number), _table(cells, types, file)


def has_own_dialect(config) -> bool:
    """Return True if the configuration of the builder of `datasets` (a dataset card) says more than a separator."""
    from datasets.packaged_modules.csv import csv as module

    default = module.CsvConfig()
    dialect = module.CsvConfig.__annotations__.keys() - {"sep", "delimiter", "features"}
    return len(config.sep) > 1 or any(getattr(config, name) != getattr(default, name) for name in dialect)


def types_of_file(file: str, delimiter: str = ",", open_file: Callable = open) -> dict[str, pa.DataType]:
    """Return the types of the columns of a file: of all its rows."""
    types: dict[str, pa.DataType | None] = {}
    with open_file(file, "rb") as binary:
        for cells in _read_cells(binary, file, delimiter):
            for name, column in cells.items():
                types[name] = _join(types.get(name), _type_of(column.drop_null()))
    return {name: kind or pa.string() for name, kind in types.items()}


def _join(one: pa.DataType | None, other: pa.DataType | None) -> pa.DataType | None:
    """Return the type of cells with these types; None is that of no cells."""
    if one == other or None in (one, other):
        return one or other
    return pa.float64() if {one, other} == {pa.int64(), pa.float64()} else pa.string()


def _read_cells(binary: BinaryIO, file: str, delimiter: str) -> Iterator[dict[str, pa.Array]]:
    """Yield the columns of a CSV file as text, in blocks of rows. Raise UsageError for a bad row."""
    from pyarrow.csv import ConvertOptions

    no_value = pa.array(ConvertOptions().null_values)
    csv.field_size_limit(LONGEST_CELL)
    with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            names = next(filter(None, reader), [])  # without blank lines
            repeated = {name for name in names if names.count(name) > 1}
            if repeated:
                raise UsageError(f"{file}: the column `{min(repeated)}` is named twice")
            for rows in _blocks(reader, len(names)):
                cells = {name: pa.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
                yield {name: pc.if_else(pc.is_in(column, no_value), None, column) for name, column in cells.items()}
        except csv.Error as error:
            raise UsageError(f"{file}, line {reader.line_num}: {one_line(error)}") from error
        except UnicodeDecodeError as error:  # of bytes that were read ahead
            raise UsageError(f"{file}, after line {reader.line_num}: {one_line(error)}") from error


def _table(cells: dict[str, pa.Array], types: dict[str, pa.DataType], file: str) -> pa.Table:
    """Return the columns in these types. Raise UsageError for a cell of another type."""
    columns = {}
    for name, column in cells.items():
        try:
            columns[name] = _convert(column, types[name])
        except pa.ArrowInvalid as error:  # somewhere in these rows
            raise UsageError(f"{file}: `{name}`: {one_line(error)}") from error
    return pa.table(columns)


def _blocks(reader: Iterator[list[str]], columns: int) -> Iterator[list[list[str]]]:
    """Yield the rows, without blank lines, in lists that memory can hold: documents may be long."""
    rows = []
    size = 0
    for row in filter(None, reader):
        if len(row) != columns:
            raise csv.Error(f"expected {columns} columns, got {len(row)}")
        rows.append(row)
        size += sum(map(len, row)) + columns
        if len(rows) == ROWS or size >= CHARACTERS:
            yield rows
            rows = []
            size = 0
    if rows:
        yield rows


def _type_of(cells: pa.Array) -> pa.DataType | None:
    """Return the type of CSV cells; None if there are none.

    A float64 would round integers that int64 cannot hold, and an int64 would lose the zeros of 007: they stay text."""
    if not len(cells):
        return None
    kind = pa.float64()
    if pc.all(pc.match_substring_regex(cells, r"^\s*[-+]?\d+\s*$")).as_py():
        kind = pa.int64()
    elif pc.all(pc.is_in(cells, BOOLS)).as_py():
        kind = pa.bool_()
    try:
        return _convert(cells, kind).type
    except pa.ArrowInvalid:
        return pa.string()


def _convert(cells: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the cells as values of this type. Raise ArrowInvalid, with the cell, for one that is no such value."""
    if kind == pa.string():
        return cells
    trimmed = pc.utf8_trim_whitespace(cells)
    if kind == pa.int64():
        changed = trimmed.filter(pc.match_substring_regex(trimmed, OTHER_DIGITS))
        if len(changed):
            raise pa.ArrowInvalid(f"'{changed[0]}' is an integer with a leading zero or plus, which a number loses")
    return trimmed.cast(kind)
