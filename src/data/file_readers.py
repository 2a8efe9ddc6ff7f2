"""Strict CSV and text readers, which replace those of `datasets`.

pandas takes an extra field in every row as an index (which shifts the columns), fills short rows, and renames duplicate
columns. The readers here raise UsageError with file and line instead. They also remove a byte order mark, which
`datasets` keeps in the first line of a text. They apply to local files, folders, Hub datasets and streams.
Tests: tests/data/test_file_readers.py, which also notices if `datasets` changes.
"""

import csv
import io
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice

from src.config.errors import UsageError
from src.runtime import private_apis

# pandas options: if a dataset changes one of them, `datasets` reads its CSV files with its own reader
DIALECT = ("header", "names", "index_col", "usecols", "converters", "skipinitialspace", "skiprows", "nrows", "quoting")
DIALECT += ("escapechar", "comment", "encoding", "skipfooter", "doublequote", "on_bad_lines", "skip_blank_lines")
DIALECT += ("dialect",)


def install() -> None:
    """Replace the CSV and text readers of `datasets` by the functions below, and refuse reference:// files.

    Some versions of fsspec run templates in reference files as code, and a dataset's README.md may name such files."""
    import fsspec

    fsspec.register_implementation("reference", _refusing_file_system(), clobber=True)
    from datasets.packaged_modules.csv import csv as csv_module
    from datasets.packaged_modules.text import text as text_module

    for module, kind, tables in ((csv_module, "Csv", _csv_tables), (text_module, "Text", _text_tables)):
        private_apis.replace_table_reader(getattr(module, kind), tables)
    csv.field_size_limit(sys.maxsize)


@cache
def _refusing_file_system() -> type:
    from fsspec import AbstractFileSystem

    class References(AbstractFileSystem):
        protocol, cachable = "reference", False

        def __init__(self, *_, **__):
            raise ValueError("reference:// is refused, because it may run code: give the files themselves")

    return References


def _csv_tables(self, base_files, files_iterables):
    """Yield (key, table) of CSV files as `Csv._generate_tables` of datasets 5.2 does. All rows must fit the header."""
    import pyarrow as pa
    from datasets.builder import Key
    from datasets.packaged_modules.csv import csv as module

    config, default = self.config, module.CsvConfig()
    if len(config.sep) != 1 or any(getattr(config, name) != getattr(default, name) for name in DIALECT):
        yield from self.lenient_tables(base_files, files_iterables)  # the dataset sets another CSV dialect
        return
    open_file = getattr(module, "open", open)  # the `open` of datasets also reads URLs
    for shard, files in enumerate(files_iterables):
        for file in files:
            with open_file(file, "rb") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
                for number, frame in enumerate(_csv_frames(file, text, config)):
                    table = pa.Table.from_pandas(frame, preserve_index=False)
                    yield Key(shard, number), private_apis.cast_table(self, table)


def _csv_frames(file: str, text: Iterable[str], config) -> Iterator:
    """Yield the rows of a CSV file as pandas frames of `chunksize` rows. Raise UsageError at a bad line."""
    import pandas as pd

    records = csv_records(file, text, config.sep, config.quotechar)
    line, fields, _ = next(records, (0, [], ""))
    if not fields:
        return
    names = [name or f"Unnamed: {i}" for i, name in enumerate(fields)]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{file}, line {line}: the column `{duplicates[0]}` is named twice")
    options = config.pd_read_csv_kwargs | {"header": None, "names": names, "chunksize": None, "index_col": False}
    if config.features is not None:
        options["dtype"] = _column_types(config.features)
    first = True
    while (chunk := list(islice(records, config.chunksize))) or first:
        for line, fields, _ in chunk:
            if len(fields) != len(names):
                raise UsageError(f"{file}, line {line}: {len(fields)} fields, but the header has {len(names)}")
        yield pd.read_csv(io.StringIO("".join(text for *_, text in chunk)), **options)
        first = False


def _column_types(features) -> dict:
    from datasets.features.features import require_storage_cast

    kinds = zip(features.items(), features.arrow_schema.types, strict=True)
    return {
        name: object if require_storage_cast(feature) else kind.to_pandas_dtype() for (name, feature), kind in kinds
    }


def csv_records(
    file: str, text: Iterable[str], delimiter: str = ",", quotechar: str = '"'
) -> Iterator[tuple[int, list[str], str]]:
    """Yield (number of its first line, fields, text) of each CSV record, the header first. Skip blank lines.

    `text` yields lines with their line ends. Raise UsageError at broken quotes and NUL characters."""
    record: list[str] = []  # the lines of the current record

    def lines() -> Iterator[str]:
        for number, line in enumerate(text, 1):
            _refuse_nul(file, number, line)
            record.append(line)
            yield line

    reader = csv.reader(lines(), delimiter=delimiter, quotechar=quotechar, strict=True)
    while True:
        first = reader.line_num + 1
        record.clear()
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise UsageError(f"{file}, line {first}: not valid CSV ({error}): check the quotes") from None
        if fields is None:
            return
        if fields and (len(fields) > 1 or record[-1].strip()):
            yield first, fields, "".join(record)


def _text_tables(self, base_files, files_iterables):
    """Yield (key, table) of the lines of text files, as `Text._generate_tables` of datasets 5.2 does.

    Remove a byte order mark at the start of a file."""
    import pyarrow as pa
    from datasets.builder import Key
    from datasets.packaged_modules.text import text as module

    config = self.config
    if config.sample_by != "line" or config.keep_linebreaks or config.encoding.lower() not in ("utf-8", "utf8"):
        yield from self.lenient_tables(base_files, files_iterables)
        return
    names = list(config.features) if config.features is not None else ["text"]
    open_file = getattr(module, "open", open)
    for shard, files in enumerate(files_iterables):
        for file in files:
            with (
                open_file(file, "rb") as raw,
                io.TextIOWrapper(raw, encoding="utf-8-sig", errors=config.encoding_errors) as text,
            ):
                for number, lines in enumerate(_text_chunks(file, text, config.chunksize)):
                    table = pa.Table.from_arrays([pa.array(lines)], names=names)
                    yield Key(shard, number), private_apis.cast_table(self, table)


def _text_chunks(file: str, text, size: int) -> Iterator[list[str]]:
    """Yield lists of lines of a text file, without line ends, about `size` characters per list."""
    first = 1
    while lines := text.readlines(size):
        for number, line in enumerate(lines, first):
            _refuse_nul(file, number, line)
        yield [line.rstrip("\n") for line in lines]
        first += len(lines)


def _refuse_nul(file: str, number: int, line: str) -> None:
    if "\0" in line:
        raise UsageError(
            f"{file}, line {number}: holds a NUL character, so it is UTF-16 or not text: convert the file to UTF-8"
        )
