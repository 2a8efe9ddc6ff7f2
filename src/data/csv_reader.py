"""CSV files read strictly instead of by pandas, for files, folders, Hub datasets and streams: no row is misread.

pandas takes an extra field in every row as an index (which shifts the columns), fills short rows, and renames duplicate
columns; pyarrow takes all rows after an open quote as one cell. Tests: tests/data/test_bad_rows.py.
"""

import csv
import io
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from src.config.errors import UsageError, one_line

ROWS, CHARACTERS = 200_000, 16 << 20  # at most in a table; those of the first one decide the types of the columns
LONGEST_CELL = 1 << 30  # characters
BOOLS = pa.array(["true", "True", "TRUE", "false", "False", "FALSE"])  # 1 is a number


def csv_tables(self, base_files, files_iterables):
    """Yield the tables of CSV files. A dataset with a dialect of its own is left to pandas."""
    from datasets.builder import Key
    from datasets.packaged_modules.csv import csv as module

    config, default = self.config, module.CsvConfig()
    dialect = module.CsvConfig.__annotations__.keys() - {"sep", "delimiter"}
    if len(config.sep) > 1 or any(getattr(config, name) != getattr(default, name) for name in dialect):
        yield from self.unchecked_tables(base_files, files_iterables)
        return
    open_file = getattr(module, "open", open)  # the `open` of datasets also reads URLs
    # `datasets` would cast the columns of later files and splits to the types of the first one: 007 to 7, 2 to true
    types = {name: pa.string() for name, f in (self.info.features or {}).items() if getattr(f, "dtype", "") == "string"}
    for shard, files in enumerate(files_iterables):
        for file in files:
            with open_file(file, "rb") as binary:
                for number, table in enumerate(_read_csv(binary, file, config.sep, types)):
                    yield Key(shard, number), table


def _read_csv(binary: BinaryIO, file: str, delimiter: str, types: dict) -> Iterator[pa.Table]:
    """Yield the rows of a CSV file in tables: numbers, bools and text. Raise UsageError for a bad row.

    `types` are those of the columns of earlier files, and get those of this file."""
    from pyarrow.csv import ConvertOptions

    no_value = pa.array(ConvertOptions().null_values)
    csv.field_size_limit(LONGEST_CELL)
    with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            names = next(filter(None, reader), [])  # without blank lines
            if repeated := {name for name in names if names.count(name) > 1}:
                raise UsageError(f"{file}: the column `{min(repeated)}` is named twice")
            for rows in _blocks(reader, len(names)):
                cells = {name: pa.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
                cells = {name: pc.if_else(pc.is_in(column, no_value), None, column) for name, column in cells.items()}
                for name, column in cells.items():
                    types.setdefault(name, _type_of(column.drop_null()))
                yield pa.table({name: _convert(column, types[name]) for name, column in cells.items()})
        except pa.ArrowInvalid as error:  # somewhere in these rows
            raise UsageError(f"{file}: {one_line(error)}") from error
        except (UnicodeDecodeError, csv.Error) as error:
            # The lines before the bytes that were decoded last have all been read.
            more = 1 + error.object[: error.start].count(b"\n") if isinstance(error, UnicodeDecodeError) else 0
            raise UsageError(f"{file}, line {reader.line_num + more}: {one_line(error)}") from error


def _blocks(reader: Iterator[list[str]], columns: int) -> Iterator[list[list[str]]]:
    """Yield the rows, without blank lines, in lists that memory can hold: documents may be long."""
    rows, size = [], 0
    for row in filter(None, reader):
        if len(row) != columns:
            raise csv.Error(f"expected {columns} columns, got {len(row)}")
        rows.append(row)
        size += sum(map(len, row)) + columns
        if len(rows) == ROWS or size >= CHARACTERS:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _type_of(cells: pa.Array) -> pa.DataType:
    """Return the type of a CSV column. Dates, 0x1F, and integers that int64 cannot hold stay text."""
    kind = pa.int64() if pc.all(pc.match_substring_regex(cells, r"^\s*[-+]?\d+\s*$")).as_py() else pa.float64()
    kind = pa.bool_() if pc.all(pc.is_in(cells, BOOLS)).as_py() else kind
    try:
        return _convert(cells, kind).type if len(cells) else pa.string()
    except pa.ArrowInvalid:
        return pa.string()


def _convert(cells: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the cells as values of this type. Raise ArrowInvalid, with the cell, for one that is no such value."""
    if kind == pa.string():
        return cells
    known = cells.drop_null()  # a cast would make True of 1, and 31 of 0x1F
    is_bool, has_x = pc.is_in(known, BOOLS), pc.match_substring(known, "x", ignore_case=True)
    if len(others := known.filter(pc.invert(is_bool) if kind == pa.bool_() else has_x)):
        raise pa.ArrowInvalid(f"invalid value '{others[0]}' in a column of {kind}")
    return pc.utf8_trim_whitespace(cells).cast(kind)
