"""CSV files read by `pyarrow.csv` instead of pandas, for files, folders, Hub datasets and streams: no row is misread.

pandas takes an extra field in every row as an index (which shifts the columns), fills short rows, and renames duplicate
columns. Tests: tests/data/test_bad_rows.py.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import pyarrow as pa

from src.config.errors import UsageError, one_line

CSV_BLOCK = 16 << 20  # bytes: the first block of a file decides the types of its columns


def csv_tables(self, base_files, files_iterables):
    """Yield the tables of CSV files, read by pyarrow. A dataset with a dialect of its own is left to pandas."""
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
        batches = (
            batch for file in files for batch in _read_csv(partial(open_file, file, "rb"), file, config.sep, types)
        )
        for number, batch in enumerate(batches):
            yield Key(shard, number), pa.Table.from_batches([batch])


def _read_csv(open_file: Callable, file: str, delimiter: str, types: dict) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a CSV file: numbers, bools and text. Raise UsageError for a bad row.

    `types` are those of the columns of earlier files, and get those of this file."""
    from pyarrow import csv as arrow_csv

    parse = arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    read = arrow_csv.ReadOptions(use_threads=False, block_size=CSV_BLOCK)  # without threads, errors have row numbers
    words = {"true_values": ["true", "True", "TRUE"], "false_values": ["false", "False", "FALSE"]}  # 1 is a number
    convert = arrow_csv.ConvertOptions(strings_can_be_null=True, **words)

    @contextmanager
    def open_csv():
        with open_file() as binary:
            yield arrow_csv.open_csv(_StrictQuotes(binary, file, delimiter), read, parse, convert)

    try:
        with open_csv() as reader:
            schema, names = reader.schema, reader.schema.names
        if repeated := {name for name in names if names.count(name) > 1}:
            raise UsageError(f"{file}: the column `{min(repeated)}` is named twice")
        convert.column_types = dict.fromkeys(names, pa.string())
        with open_csv() as reader:
            first = next(iter(reader), pa.RecordBatch.from_pylist([], reader.schema))
        columns = zip(schema, first.columns, strict=True)
        inferred = {field.name: pa.string() if _is_text(field.type, cells) else field.type for field, cells in columns}
        convert.column_types = inferred | types
        with open_csv() as reader:
            types.update(inferred | types)
            yield from reader
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {one_line(error)}") from error


def _is_text(kind: pa.DataType, cells: pa.Array) -> bool:
    """Return whether a CSV column stays text though pyarrow reads `kind`: dates, 0x1F, integers that int64 cannot hold."""
    import pyarrow.compute as pc

    if pa.types.is_integer(kind):
        return bool(pc.any(pc.match_substring(cells, "x", ignore_case=True)).as_py())
    if pa.types.is_floating(kind):  # float64 would round integers
        return bool(pc.all(pc.match_substring_regex(cells, r"^\s*[-+]?\d+\s*$")).as_py())
    return not pa.types.is_boolean(kind)


class _StrictQuotes(io.RawIOBase):
    """A CSV file that checks its quotes while it is read: pyarrow takes all rows after an open quote as one cell."""

    def __init__(self, binary, file: str, delimiter: str):
        csv.field_size_limit(CSV_BLOCK)
        self._records, self._rest = self._checked_records(binary, file, delimiter), b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        parts, length = [self._rest], len(self._rest)
        while (size < 0 or length < size) and (record := next(self._records, b"")):
            parts.append(record)
            length += len(record)
        content = b"".join(parts)
        size = size if size >= 0 else length
        self._rest = content[size:]
        return content[:size]

    @staticmethod
    def _checked_records(binary, file: str, delimiter: str) -> Iterator[bytes]:
        lines: list[str] = []  # of the current record

        def keep(text: Iterable[str]) -> Iterator[str]:
            for line in text:
                lines.append(line)
                yield line

        row = 1
        with io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            try:
                for _ in csv.reader(keep(text), delimiter=delimiter, strict=True):
                    yield "".join(lines).encode(errors="surrogateescape")
                    lines.clear()
                    row += 1
            except csv.Error as error:
                raise UsageError(f"{file}: Row #{row}: not valid CSV ({error}): check the quotes") from None
