"""Strict CSV and text files: checks in front of the readers of `datasets`, which read the values.

pandas takes an extra field in every row as an index (which shifts the columns), fills short rows, and renames duplicate
columns. The checks raise UsageError with file and line instead; `pyarrow.csv` counts rows without blank lines, and
accepts text after a closing quote, a column named twice, and NUL characters. A byte order mark is removed, which
`datasets` keeps in the first line of a text. All this applies to local files, folders, Hub datasets and streams.
Tests: tests/data/test_file_readers.py, which also notices if `datasets` changes.
"""

import csv
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache

from src.config.errors import UsageError
from src.runtime import private_apis

# pandas options: if a dataset changes one of them, its CSV files are not checked
DIALECT = ("header", "names", "index_col", "usecols", "converters", "skipinitialspace", "skiprows", "nrows", "quoting")
DIALECT += ("escapechar", "comment", "encoding", "skipfooter", "doublequote", "on_bad_lines", "skip_blank_lines")
DIALECT += ("dialect",)
UTF_8 = ("utf-8", "utf8", "utf-8-sig")


def install() -> None:
    """Check the CSV and text files that `datasets` reads from now on, and refuse reference:// files.

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
    """Yield what `Csv._generate_tables` of datasets 5.2 yields, from files whose rows all fit the header."""
    from datasets.packaged_modules.csv import csv as module

    config, default = self.config, module.CsvConfig()
    if len(config.sep) == 1 and all(getattr(config, name) == getattr(default, name) for name in DIALECT):
        open_file = getattr(module, "open", open)  # the `open` of datasets also reads URLs
        files_iterables = ((_CheckedCsv(file, open_file, config) for file in files) for files in files_iterables)
    yield from self.unchecked_tables(base_files, files_iterables)


class _CheckedCsv:
    """A CSV file that pandas can read. Reading raises UsageError at a bad line."""

    def __init__(self, file: str, open_file: Callable, config):
        self._records = _checked_records(file, open_file, config)

    def read(self, size: int = -1) -> str:
        """Return the next records, `size` characters or a little more; an empty string at the end."""
        chunk, length = [], 0
        for record in self._records:
            chunk.append(record)
            length += len(record)
            if 0 <= size <= length:
                break
        return "".join(chunk)

    def __iter__(self) -> Iterator[str]:  # pandas requires it of a file, but calls only `read`
        return self._records


def _checked_records(file: str, open_file: Callable, config) -> Iterator[str]:
    """Yield the text of each record. Raise UsageError for a column named twice and for rows that do not fit the header."""
    with open_file(file, "rb") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
        names: list[str] = []
        for line, fields, record in csv_records(file, text, config.sep, config.quotechar):
            names = names or fields
            if fields is names and (twice := [name for name in names if name and names.count(name) > 1]):
                raise UsageError(f"{file}, line {line}: the column `{twice[0]}` is named twice")
            if len(fields) != len(names):
                raise UsageError(f"{file}, line {line}: {len(fields)} fields, but the header has {len(names)}")
            yield record


def csv_records(
    file: str, text: Iterable[str], delimiter: str = ",", quotechar: str = '"'
) -> Iterator[tuple[int, list[str], str]]:
    """Yield (number of its first line, fields, text) of each CSV record, the header first. Skip blank lines.

    `text` yields lines with their line ends. Raise UsageError at broken quotes and NUL characters."""
    record: list[str] = []  # the lines of the current record

    def lines() -> Iterator[str]:
        for number, line in enumerate(text, 1):
            if "\0" in line:
                raise UsageError(_holds_nul(file, number))
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
    """Yield what `Text._generate_tables` of datasets 5.2 yields, without the byte order mark at the start of a file.

    Raise UsageError for a line with a NUL character."""
    import pyarrow.compute as pc
    from datasets.builder import Key

    config = self.config
    if config.sample_by != "line" or config.keep_linebreaks or config.encoding.lower() not in UTF_8:
        yield from self.unchecked_tables(base_files, files_iterables)
        return
    config.encoding = "utf-8-sig"
    for shard, files in enumerate(files_iterables):
        for file in files:
            first = 1
            for number, (_, table) in enumerate(self.unchecked_tables(base_files, [[file]])):
                bad = pc.index(pc.match_substring(table.column(0), "\0"), True).as_py()
                if bad >= 0:
                    raise UsageError(_holds_nul(file, first + bad))
                first += len(table)
                yield Key(shard, number), table


def _holds_nul(file: str, line: int) -> str:
    return f"{file}, line {line}: holds a NUL character, so it is UTF-16 or not text: convert the file to UTF-8"
