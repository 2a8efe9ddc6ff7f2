"""Tables: Parquet and Arrow files, group by group.

Tests: tests/engine/rows/test_read.py, tests/engine/rows/test_bad_rows.py.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from engine.config.errors import UsageError, one_line
from engine.rows import file_parts
from engine.rows.file_parts import File, Open, Part

WRITTEN_BY_USERS = ("arguments", "parameters")  # below these keys a null is a value


def schema_of_file(file: File, open_file: Open | None = None) -> pa.Schema | None:
    """Return the types of the columns of a Parquet or Arrow file; None for other files."""
    from pyarrow import parquet

    if file.kind not in ("parquet", "arrow"):
        return None
    with file_parts.open_binary(file, open_file) as binary:
        return parquet.read_schema(binary) if file.kind == "parquet" else _open_arrow(binary).schema


def _open_arrow(binary: Any) -> Any:
    try:
        return pa.ipc.open_stream(binary)
    except (OSError, pa.ArrowInvalid):
        binary.seek(0)
        return pa.ipc.open_file(binary)


def parts_of_table(file: File, binary: Any, columns: Iterable[str] | None) -> Iterator[Part]:
    """Yield the rows of a table in parts, each an Arrow stream that another process can read."""
    batches = _parquet_batches if file.kind == "parquet" else _arrow_batches
    first = 0
    for batch in batches(file, binary, columns):
        if batch.num_rows:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            yield Part(file, batch.nbytes, first, sink.getvalue())
            first += batch.num_rows


def _parquet_batches(file: File, binary: Any, columns: Iterable[str] | None) -> Iterator[pa.RecordBatch]:
    from pyarrow.parquet import ParquetFile

    table = ParquetFile(binary)
    names = _columns_there(file, table.schema_arrow, columns)
    meta = table.metadata
    size = 0
    for group in map(meta.row_group, range(meta.num_row_groups)):
        chunks = map(group.column, range(group.num_columns))
        size += sum(each.total_uncompressed_size for each in chunks if each.path_in_schema.split(".")[0] in names)
    rows = max(1, min(file_parts.PART_ROWS, file_parts.PART * meta.num_rows // max(1, size)))
    for group in range(meta.num_row_groups):  # of all at once, pyarrow would read the bytes ahead
        yield from table.iter_batches(rows, [group], names)


def _arrow_batches(file: File, binary: Any, columns: Iterable[str] | None) -> Iterator[pa.RecordBatch]:
    reader = _open_arrow(binary)
    names = _columns_there(file, reader.schema, columns)
    is_file = hasattr(reader, "num_record_batches")
    for whole in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
        batch = whole.select(names)
        batch.validate(full=True)  # wrong offsets would show other memory, or end the process
        rows = max(1, min(file_parts.PART_ROWS, file_parts.PART * batch.num_rows // max(1, batch.nbytes)))
        for first in range(0, batch.num_rows, rows):
            yield batch.slice(first, rows)


def _columns_there(file: File, schema: pa.Schema, columns: Iterable[str] | None) -> list[str]:
    """Return those of `columns` that are there; all if none is, for the number of rows."""
    repeated = {name for name in schema.names if schema.names.count(name) > 1}
    if repeated:
        raise UsageError(f"{file.name}: the column `{min(repeated)}` is there twice")
    return [name for name in schema.names if columns is None or name in columns] or schema.names


def rows_of_table(table: pa.Table, columns: Iterable[str] | None) -> "list[dict | ValueError]":
    """Return the rows of a table. Keys of structs in lists, which all rows have, are left out where they hold nothing."""
    chosen = [name for name in table.column_names if columns is None or name in columns]
    missing = dict.fromkeys(name for name in columns or () if name not in chosen)
    structs = [name for name in chosen if _holds_structs(table.schema.field(name).type)]
    if not chosen:
        return [dict(missing) for _ in range(table.num_rows)]
    table = table.select(chosen)
    try:
        rows: list = table.to_pylist()
    except ValueError:  # text that is not UTF-8, which Arrow accepts
        rows = [_only_row(table.slice(i, 1)) for i in range(table.num_rows)]
    if structs or missing:
        rows = [row if isinstance(row, ValueError) else _without_nulls(row | missing, structs) for row in rows]
    return rows


def _only_row(table: pa.Table) -> "dict | ValueError":
    try:
        return table.to_pylist()[0]
    except ValueError as error:
        return ValueError(f"this row cannot be read: {type(error).__name__}: {one_line(error)}")


def _holds_structs(kind: pa.DataType) -> bool:
    types = pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not (is_list or types.is_list_view(kind) or types.is_large_list_view(kind)):
        return False
    return types.is_struct(kind.value_type) or _holds_structs(kind.value_type)


def _without_nulls(row: dict, structs: list[str]) -> "dict | ValueError":
    try:
        return row | {name: _drop_nulls(row[name], name) for name in structs}
    except ValueError as error:
        return error


def _drop_nulls(value: Any, name: str) -> Any:
    """Return a value without the keys that are null; raise ValueError if one of them may have been written."""
    if isinstance(value, list):
        return [_drop_nulls(item, name) for item in value]
    if not isinstance(value, dict):
        return value
    without = {}
    for key, item in value.items():
        if key not in WRITTEN_BY_USERS:
            item = _drop_nulls(item, name)
        elif path := _path_of_null(item):
            raise ValueError(
                f"{key} in `{name}` has null for {path}: in a column of structs, as Parquet stores it, a null and a missing "
                f"key are the same: store {key} as JSON text, or the rows as .jsonl"
            )
        if item is not None:
            without[key] = item
    return without


def _path_of_null(value: Any) -> str:
    """Return the keys, joined with dots, of the first null in nested dicts and lists, or an empty text."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return ""
    for key, item in items:
        if item is None:
            return str(key)
        path = _path_of_null(item)
        if path:
            return f"{key}.{path}"
    return ""
