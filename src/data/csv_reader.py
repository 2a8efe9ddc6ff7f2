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
from src.data.column_types import NUL_BYTES

ROWS, CHARACTERS = 200_000, 16 << 20  # at most in a table; those of the first one decide the types of the columns
LONGEST_CELL = 1 << 30  # characters
TYPES = (pa.string(), pa.int64(), pa.float64(), pa.bool_())  # of columns
BOOLS = pa.array(["true", "True", "TRUE", "false", "False", "FALSE"])  # 1 is a number


def csv_tables(self, base_files, files_iterables):
    """Yield the tables of CSV files. A dataset with a dialect of its own is left to pandas.

    `only_columns` of the builder (None: all) are read; `late_columns` are refused."""
    from datasets import Features
    from datasets.builder import Key
    from datasets.packaged_modules.csv import csv as module

    if has_own_dialect(self.config):
        yield from self.unchecked_tables(base_files, files_iterables)
        return
    only, late = getattr(self, "only_columns", None), {*getattr(self, "late_columns", ())}
    open_file = getattr(module, "open", open)  # the `open` of datasets also reads URLs
    # `datasets` would cast the columns of later files and splits to the types of the first one: 007 to 7, 2 to true
    known = (pa.string(),) if getattr(self, "has_card", False) else TYPES  # a card may name other types than the cells
    types = {field.name: field.type for field in (self.info.features or Features()).arrow_schema if field.type in known}
    for shard, files in enumerate(files_iterables):
        for file in files:
            with open_file(file, "rb") as binary:
                for number, cells in enumerate(_read_cells(binary, file, self.config.sep)):
                    for name in late & cells.keys():
                        raise UsageError(
                            f"{file}: there is a column `{name}`, which the first file lacks: add it to all files"
                        )
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


def types_of_file(file: str, delimiter: str = ",") -> dict[str, pa.DataType]:
    """Return the types of the columns of a file: of all its rows."""
    types: dict[str, pa.DataType | None] = {}
    with open(file, "rb") as binary:
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
            _refuse_nul_bytes(names)
            if repeated := {name for name in names if names.count(name) > 1}:
                raise UsageError(f"{file}: the column `{min(repeated)}` is named twice")
            for rows in _blocks(reader, len(names)):
                cells = {name: pa.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
                yield {name: pc.if_else(pc.is_in(column, no_value), None, column) for name, column in cells.items()}
        except (UnicodeDecodeError, csv.Error) as error:
            # The lines before the bytes that were decoded last have all been read.
            more = 1 + error.object[: error.start].count(b"\n") if isinstance(error, UnicodeDecodeError) else 0
            raise UsageError(f"{file}, line {reader.line_num + more}: {one_line(error)}") from error


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
    rows, size = [], 0
    for row in filter(None, reader):
        if len(row) != columns:
            raise csv.Error(f"expected {columns} columns, got {len(row)}")
        _refuse_nul_bytes(row)
        rows.append(row)
        size += sum(map(len, row)) + columns
        if len(rows) == ROWS or size >= CHARACTERS:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _refuse_nul_bytes(row: list[str]) -> None:
    if "\0" in "".join(row):
        raise csv.Error(f"NUL bytes, {NUL_BYTES}")


def _type_of(cells: pa.Array) -> pa.DataType | None:
    """Return the type of CSV cells; None if there are none.

    Dates, 0x1F, and integers that int64 cannot hold stay text."""
    if not len(cells):
        return None
    kind = pa.int64() if pc.all(pc.match_substring_regex(cells, r"^\s*[-+]?\d+\s*$")).as_py() else pa.float64()
    kind = pa.bool_() if pc.all(pc.is_in(cells, BOOLS)).as_py() else kind
    try:
        return _convert(cells, kind).type
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
