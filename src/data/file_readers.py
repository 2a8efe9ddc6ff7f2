"""Strict readers of CSV and text files, for `datasets`.

pandas takes a surplus field in every row for an index and so shifts the columns, fills up short rows, and renames a second column
of the same name. `datasets` keeps a byte order mark in the first line of a text. All of it is refused here, with file and line,
for local files, folders, Hub data sets and streams alike. Tests: tests/data/test_file_readers.py, which would notice if `datasets` changed.
"""

import csv
import io
import sys
from collections.abc import Iterator
from functools import cache
from itertools import count

from src.config.errors import UsageError
from src.runtime import private_apis

DIALECT = ("header", "names", "index_col", "usecols", "converters", "skipinitialspace", "skiprows", "nrows", "quoting")
DIALECT += (
    "escapechar",
    "comment",
    "encoding",
    "skipfooter",
    "doublequote",
    "on_bad_lines",
    "skip_blank_lines",
    "dialect",
)


def install() -> None:
    """Make `datasets` read CSV and text files by the functions below, and follow no references: those are templates, which
    versions of fsspec run as code, and which a README.md may name."""
    import fsspec

    fsspec.register_implementation("reference", _references(), clobber=True)
    from datasets.packaged_modules.csv import csv as csv_module
    from datasets.packaged_modules.text import text as text_module

    for module, kind, tables in ((csv_module, "Csv", _csv_tables), (text_module, "Text", _text_tables)):
        builder = getattr(module, kind)
        private_apis.replace_table_reader(builder, tables)
    csv.field_size_limit(sys.maxsize)


@cache
def _references() -> type:
    from fsspec import AbstractFileSystem

    class References(AbstractFileSystem):
        protocol, cachable = "reference", False

        def __init__(self, *_, **__):
            raise ValueError("reference:// is not read, it may run code: give the files themselves")

    return References


def _csv_tables(self, base_files, files_iterables):
    """Yield (key, table) of CSV files, as `Csv._generate_tables` of datasets 5.2 does, of rows that all fit the header."""
    import pyarrow as pa
    from datasets.builder import Key
    from datasets.packaged_modules.csv import csv as module

    config, usual = self.config, module.CsvConfig()
    if len(config.sep) != 1 or any(getattr(config, name) != getattr(usual, name) for name in DIALECT):
        yield from self.lenient_tables(base_files, files_iterables)  # somebody described another dialect
        return
    for shard, files in enumerate(files_iterables):
        for file in files:
            with getattr(module, "open", open)(file, "rb") as raw:  # theirs reads URLs, too
                for number, frame in enumerate(_frames(file, raw, config)):
                    yield (
                        Key(shard, number),
                        private_apis.cast_table(self, pa.Table.from_pandas(frame, preserve_index=False)),
                    )


def _frames(file: str, raw, config) -> Iterator:
    """Yield the rows of a CSV file as pandas reads them, in frames of `chunksize` rows; UsageError names a bad line."""
    import pandas as pd
    from datasets.features.features import require_storage_cast

    chunk, names, rows, first = [], [], 0, 1
    reader = csv.reader(_kept(file, raw, chunk), delimiter=config.sep, quotechar=config.quotechar, strict=True)
    options = config.pd_read_csv_kwargs | {"header": None, "chunksize": None, "index_col": False}
    if config.features is not None:
        fields = zip(config.features.items(), config.features.arrow_schema.types, strict=True)
        options["dtype"] = {
            name: object if require_storage_cast(feature) else kind.to_pandas_dtype()
            for (name, feature), kind in fields
        }

    def frame(chunk: list[str]):
        return pd.read_csv(io.StringIO("".join(chunk)), **options)

    while True:
        first = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise UsageError(f"{file}, line {first}: not valid CSV ({error}): check the quotes") from None
        if row is None:
            break
        if not row or (len(row) == 1 and not chunk[-1].strip()):
            continue  # a blank line
        if not names:
            names = [name or f"Unnamed: {i}" for i, name in enumerate(row)]
            if twice := [name for name in names if names.count(name) > 1]:
                raise UsageError(f"{file}, line {first}: the column `{twice[0]}` is named twice")
            options["names"] = names
            chunk.clear()
            continue
        if len(row) != len(names):
            raise UsageError(f"{file}, line {first}: {len(row)} fields, where the first line names {len(names)}")
        rows += 1
        if rows % config.chunksize == 0:
            yield frame(chunk)
            chunk.clear()
    if names and (rows % config.chunksize or not rows):
        yield frame(chunk)


def _kept(file: str, raw, chunk: list[str]) -> Iterator[str]:
    """Yield the lines of a CSV file without its byte order mark, and keep them in `chunk`."""
    with io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
        for number, line in enumerate(text, 1):
            _refuse_nul(file, number, line)
            chunk.append(line)
            yield line


def _text_tables(self, base_files, files_iterables):
    """Yield (key, table) of the lines of text files, as `Text._generate_tables` of datasets 5.2 does, without a byte order mark."""
    import pyarrow as pa
    from datasets.builder import Key
    from datasets.packaged_modules.text import text as module

    config = self.config
    if config.sample_by != "line" or config.keep_linebreaks or config.encoding.lower() not in ("utf-8", "utf8"):
        yield from self.lenient_tables(base_files, files_iterables)
        return
    names = list(config.features) if config.features is not None else ["text"]
    for shard, files in enumerate(files_iterables):
        for file in files:
            first = 1
            with (
                getattr(module, "open", open)(file, "rb") as raw,
                io.TextIOWrapper(raw, encoding="utf-8-sig", errors=config.encoding_errors) as text,
            ):
                for number in count():
                    if not (lines := text.readlines(config.chunksize)):
                        break
                    for line, content in enumerate(lines, first):
                        _refuse_nul(file, line, content)
                    first += len(lines)
                    table = pa.Table.from_arrays([pa.array([line.rstrip("\n") for line in lines])], names=names)
                    yield Key(shard, number), private_apis.cast_table(self, table)


def _refuse_nul(file: str, number: int, line: str) -> None:
    if "\0" in line:
        raise UsageError(
            f"{file}, line {number}: holds a NUL character: is it UTF-16, or not a text file? Convert it to UTF-8"
        )
