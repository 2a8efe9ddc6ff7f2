"""Raw rows of files: JSON, CSV, Parquet, Arrow and text, each row a dict with its place, until `encode` makes ids of it.

A file is cut into parts: lines of JSON and text by their bytes, which the process that encodes them reads itself. One
process reads a CSV file (line breaks in quotes), a compressed one, a list of JSON and tables, and hands parts to the
others. Only a file that is one list of JSON is held in memory as a whole. Tests: tests/engine/rows/test_read.py.
"""

import csv
import functools
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from engine.config.errors import UsageError, one_line

PART = 4 << 20  # bytes of a part, about
PART_ROWS = 10_000  # maximum rows of a part, about
SAMPLE = 1 << 16  # bytes that say how long a line is
LONGEST_CELL = 1 << 30  # characters of a CSV file
BOM = b"\xef\xbb\xbf"  # byte order mark
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
WRITTEN_BY_USERS = ("arguments", "parameters")  # below these keys a null is a value

Open = Callable[[str], Any]


class File(NamedTuple):
    """A file of rows."""

    path: str  # or a URL
    kind: str  # json, csv, parquet, arrow or text
    name: str  # for messages: of a downloaded file, its URL
    separator: str = ","


class Place(NamedTuple):
    """Where a row is, printed as file and line. The lines before its part are counted only then."""

    data: str  # the split, for messages
    file: str
    unit: str  # line, or row where rows are no lines
    number: int
    path: str | None = None  # the number counts from a byte of this file
    start: int = 0

    def __str__(self) -> str:
        number = self.number + (_lines_before(self.path, self.start) if self.path else 0)
        return f"{self.file}, {self.unit} {number}: {self.data}"


class Row(NamedTuple):
    """A raw row, or why it cannot be read."""

    place: Place
    values: dict[str, Any]
    error: str = ""


class Part(NamedTuple):
    """Rows of a file, or where they are."""

    file: File
    size: int  # bytes
    first: int = 0  # number of the first line or row; without `content`, the byte at which it begins
    content: Any = None  # bytes of lines, a table, records of CSV, rows of JSON, or an error
    is_clean: bool = True  # False: rows of JSON may hold text that is no Unicode


def _open(file: File, open_file: Open | None) -> Any:
    """Open a file to read its bytes; `open_file` opens a URL. What its name says to be compressed is decompressed."""
    from fsspec.compression import compr

    compressions: dict[Any, Any] = compr
    binary = open_file(file.path) if open_file and "://" in file.path else open(file.path, "rb")  # noqa: SIM115
    compression = _compression(file)
    return compressions[compression](binary, mode="rb") if compression else binary


def is_compressed(file: File) -> bool:
    return _compression(file) is not None


def _compression(file: File) -> str | None:
    from fsspec.utils import infer_compression

    return infer_compression(file.name.split("?")[0])


def parts_of_file(file: File, columns: Iterable[str] | None = None, open_file: Open | None = None) -> Iterator[Part]:
    """Yield the parts of a file, none if it has no rows. They depend on the file alone, if `columns` (None: all) do.

    `open_file` opens a URL. What cannot be read at all is an error, which ends the file."""
    with _open(file, open_file) as binary:
        if file.kind in ("parquet", "arrow"):
            yield from _parts_of_table(file, binary, columns)
        elif file.kind == "csv":
            yield from _parts_of_csv(file, binary)
        else:
            yield from _parts_of_lines(file, binary, seeks="://" not in file.path and not is_compressed(file))


def read_part(part: Part, columns: Iterable[str] | None, data: str) -> list[Row]:
    """Return the rows of a part, with these columns (None: those that each row has). `data`: the split, for messages."""
    file, _, first, content, is_clean = part
    place = functools.partial(Place, data, file.name)
    if isinstance(content, ValueError):
        return [make_row(place("line", first), content)]
    if isinstance(content, pa.Buffer):
        rows = rows_of_table(pa.ipc.open_stream(content).read_all(), columns)
        return [make_row(place("row", first + i), row) for i, row in enumerate(rows)]
    if isinstance(content, list):
        return [make_row(place("row", first + i), _select(row, columns, is_clean)) for i, row in enumerate(content)]
    if isinstance(content, tuple):
        names, records = content
        return [make_row(place("line", line), _read_record(names, cells, columns)) for line, cells in records]
    of_bytes = {}
    is_begin = first == (0 if content is None else 1)
    if content is None:
        with open(file.path, "rb") as binary:
            binary.seek(first)
            content = binary.read(part.size)
        of_bytes = {"path": file.path, "start": first}
        first = 1
    text, is_clean = _decode(content.removeprefix(BOM) if is_begin else content, file.kind == "json")
    lines = _json_rows(text) if file.kind == "json" else _text_rows(text)
    return [make_row(place("line", first + i, **of_bytes), _select(row, columns, is_clean)) for i, row in lines]


def make_row(place: Place, values: "dict[str, Any] | ValueError") -> Row:
    return Row(place, {}, str(values)) if isinstance(values, ValueError) else Row(place, values)


def bad_rows_error(text: str, bad: int, rows: int) -> UsageError:
    """Return the error about the first of `bad` rows among those that were read together."""
    more = f" ({bad - 1:,} more of the {rows:,} rows that were read with it are bad)" if bad > 1 else ""
    return UsageError(text + more)


@functools.lru_cache(64)
def _lines_before(path: str, byte: int) -> int:
    """Return the number of line breaks (\\n, \\r\\n or \\r) before a byte of a file."""
    count = 0
    last = b""
    with open(path, "rb") as binary:
        while byte > 0 and (content := binary.read(min(byte, PART))):
            count += content.count(b"\n") + content.count(b"\r") - (last + content).count(b"\r\n")
            last = content[-1:]
            byte -= len(content)
    return count


# ---- lines of JSON and text ------------------------------------------------------------------------------------------


def _parts_of_lines(file: File, binary: Any, seeks: bool) -> Iterator[Part]:
    """Yield the parts of a file of lines; their bytes, unless it `seeks`."""
    begun = binary.read(SAMPLE)
    if begun.startswith(UTF_16):
        raise ValueError("it is UTF-16: save it as UTF-8")
    first_lines = begun.removeprefix(BOM).lstrip()
    while file.kind == "json" and not first_lines:  # a file of blank lines has no rows
        more = binary.read(SAMPLE)
        if not more:
            return
        begun += more
        first_lines = more.lstrip()
    if file.kind == "json" and first_lines.startswith(b"["):
        yield from _parts_of_list(file, begun + binary.read())
        return
    if file.kind == "json" and _is_on_several_lines(first_lines):  # nothing tells where the next object begins
        content = begun + binary.read()
        yield Part(file, len(content), 1, content)
        return
    cut = b"\n{" if file.kind == "json" else b"\n"  # some objects may stand on several lines
    lines_in_sample = max(1, begun.count(b"\n"))
    size = max(1, min(PART, PART_ROWS * len(begun) // lines_in_sample))  # if all lines are as long as these
    if not seeks:
        yield from _chunks(file, binary, begun, size, cut)
        return
    end = binary.seek(0, os.SEEK_END)
    parts = -(-end // size)
    first = 0
    for i in range(1, parts + 1):
        stop = _find(binary, cut, max(first, end * i // parts)) if i < parts else end
        if stop > first:
            yield Part(file, stop - first, first)
            first = stop


def _is_on_several_lines(first_lines: bytes) -> bool:
    """Return whether the first object of a file has line breaks."""
    line, end, _ = first_lines.partition(b"\n")
    if not end:
        return False
    try:
        DECODER.raw_decode(_decode(line)[0])
    except (ValueError, RecursionError):
        return True
    return False


def _find(binary: Any, cut: bytes, start: int) -> int:
    """Return where the first line begins after a byte with `cut` before it, or where the file ends."""
    content = b""
    binary.seek(start)
    while more := binary.read(SAMPLE):
        content = content[-1:] + more
        start += len(more)
        found = content.find(cut)
        if found >= 0:
            return start - len(content) + found + 1
    return start


def _chunks(file: File, binary: Any, begun: bytes, size: int, cut: bytes) -> Iterator[Part]:
    line = 1
    while more := binary.read(size):
        begun += more
        length = begun.rfind(cut) + 1
        if length:
            yield Part(file, length, line, begun[:length])
            line += begun.count(b"\n", 0, length)
            begun = begun[length:]
    if begun:
        yield Part(file, len(begun), line, begun)


def _decode(content: bytes, is_json: bool = True) -> tuple[str, bool]:
    """Return (the text, whether all texts in it are Unicode). A byte that is not UTF-8 becomes half of a surrogate pair."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return content.decode(errors="surrogateescape"), False
    return text, not (is_json and HALF_SURROGATE.search(text))


def _text_rows(text: str) -> Iterator[tuple[int, dict]]:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if not lines[-1]:
        lines.pop()
    return enumerate({"text": line} for line in lines)


# ---- JSON ------------------------------------------------------------------------------------------------------------

WHITESPACE = re.compile(r"[ \t\n\r]*")  # between JSON values
OBJECT = re.compile(r"^\{", re.M)
# An escape of half of a surrogate pair, or what may be one behind a backslash
HALF_SURROGATE = re.compile(
    r"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|[c-fC-F](?<!\\u[dD][89abAB]..\\u[dD].))|\\\\u[dD]"
)


def _object(pairs: list[tuple[str, Any]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key `{next(name for name in names if names.count(name) > 1)}` is named twice")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _json_rows(text: str) -> Iterator[tuple[int, "dict | ValueError"]]:
    """Yield (line from 0, row or error) of JSON objects, one after the other; after an error the next line goes on."""
    line = 0
    position = 0
    end = 0
    while (start := _skip_whitespace(text, end)) < len(text):
        line += text.count("\n", position, start)
        position = start
        try:
            value, end = DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            next_row = OBJECT.search(text, position + 1)
            end = next_row.start() if next_row else len(text)
            yield line, ValueError(error.msg if isinstance(error, json.JSONDecodeError) else one_line(error))
            continue
        yield line, value if isinstance(value, dict) else _no_object(value)


def _skip_whitespace(text: str, position: int) -> int:
    found = WHITESPACE.match(text, position)
    return found.end() if found else position


def _no_object(value: Any) -> ValueError:
    return ValueError(f"a row must be an object, not {json.dumps(value)[:40]}")


def _parts_of_list(file: File, content: bytes) -> Iterator[Part]:
    """Yield the parts of a file that begins with a list: of its rows, or of its texts."""
    size = len(content)
    text, is_clean = _decode(content.removeprefix(BOM))
    rows: list[dict | ValueError] = []
    end = 0
    while (start := _skip_whitespace(text, end)) < len(text):
        try:
            value, end = DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            line = 1 + text.count("\n", 0, getattr(error, "pos", start))
            reason = error.msg if isinstance(error, json.JSONDecodeError) else one_line(error)
            yield Part(file, size, line, ValueError(reason))
            return
        if rows:
            line = 1 + text.count("\n", 0, start)
            yield Part(file, size, line, ValueError("the list of rows has ended: give one list, or an object a line"))
            return
        for row in value if isinstance(value, list) else [value]:
            row = {"text": row} if isinstance(row, str) else row
            rows.append(row if isinstance(row, dict) else _no_object(row))
    count = max(1, min(PART_ROWS, PART * len(rows) // size))
    for first in range(0, len(rows), count):
        some = rows[first : first + count]
        yield Part(file, size * len(some) // len(rows), first, some, is_clean)


def _select(row: "dict | ValueError", columns: Iterable[str] | None, is_clean: bool) -> "dict | ValueError":
    """Return these columns of a row (None: all), None where it has none. A text that is no Unicode is an error, if its
    column is asked for."""
    if isinstance(row, ValueError) or columns is None:
        return row
    chosen = {name: row.get(name) for name in columns}
    if not is_clean:
        for name, value in chosen.items():
            if not is_unicode(value):
                return ValueError(
                    f"`{name}` holds text with half of a surrogate pair, or with bytes that are not UTF-8, which are no "
                    "characters: save the file as UTF-8, or remove it"
                )
    return chosen


def is_unicode(value: Any) -> bool:
    """Return False for text, or a value with a text, with half of a surrogate pair, which JSON may hold."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- CSV -------------------------------------------------------------------------------------------------------------


def _parts_of_csv(file: File, binary: Any) -> Iterator[Part]:
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
            if len(records) == PART_ROWS or size >= PART:
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


def _read_record(
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
    return _select(row, columns, all(map(str.isascii, cells)))


# ---- tables: Parquet and Arrow ---------------------------------------------------------------------------------------


def schema_of_file(file: File, open_file: Open | None = None) -> pa.Schema | None:
    """Return the types of the columns of a Parquet or Arrow file; None for other files."""
    from pyarrow import parquet

    if file.kind not in ("parquet", "arrow"):
        return None
    with _open(file, open_file) as binary:
        return parquet.read_schema(binary) if file.kind == "parquet" else _open_arrow(binary).schema


def _open_arrow(binary: Any) -> Any:
    try:
        return pa.ipc.open_stream(binary)
    except (OSError, pa.ArrowInvalid):
        binary.seek(0)
        return pa.ipc.open_file(binary)


def _parts_of_table(file: File, binary: Any, columns: Iterable[str] | None) -> Iterator[Part]:
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
    rows = max(1, min(PART_ROWS, PART * meta.num_rows // max(1, size)))
    for group in range(meta.num_row_groups):  # of all at once, pyarrow would read the bytes ahead
        yield from table.iter_batches(rows, [group], names)


def _arrow_batches(file: File, binary: Any, columns: Iterable[str] | None) -> Iterator[pa.RecordBatch]:
    reader = _open_arrow(binary)
    names = _columns_there(file, reader.schema, columns)
    is_file = hasattr(reader, "num_record_batches")
    for whole in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
        batch = whole.select(names)
        batch.validate(full=True)  # wrong offsets would show other memory, or end the process
        rows = max(1, min(PART_ROWS, PART * batch.num_rows // max(1, batch.nbytes)))
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
