"""Checks in front of the readers of `datasets`, and messages for files that cannot be read: line and reason.

pandas takes an extra field in every row as an index (which shifts the columns), fills short rows, and renames duplicate
columns. The checks raise UsageError with file and line instead; `pyarrow.csv` counts rows without blank lines, and
accepts text after a closing quote, a column named twice, and NUL characters. A byte order mark is removed, which
`datasets` keeps in the first line of a text. All this applies to local files, folders, Hub datasets and streams.
Tests: tests/data/test_readers.py, which also notices if `datasets` changes, and tests/data/test_bad_rows.py.
"""

import csv
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from src.config.errors import UsageError, one_line
from src.config.paths import not_found_locally
from src.runtime import private_apis

if TYPE_CHECKING:
    from src.data.sources import Source

BLOCK = 1 << 26  # bytes of lines that are parsed together
# pandas options: if a dataset changes one of them, its CSV files are not checked
DIALECT = ("header", "names", "index_col", "usecols", "converters", "skipinitialspace", "skiprows", "nrows", "quoting")
DIALECT += ("escapechar", "comment", "encoding", "skipfooter", "doublequote", "on_bad_lines", "skip_blank_lines")
DIALECT += ("dialect",)


def install() -> None:
    """Check the CSV files that `datasets` reads from now on, and refuse reference:// files.

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
                raise UsageError(f"{file}, line {number}: holds a NUL character: convert the file to UTF-8")
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
    """Yield what `Text._generate_tables` of datasets 5.2 yields, without the byte order mark at the start of a file."""
    if self.config.encoding.lower() in ("utf-8", "utf8"):
        self.config.encoding = "utf-8-sig"
    yield from self.unchecked_tables(base_files, files_iterables)


# ---- messages for files that cannot be read ---------------------------------------------------------------------------


def explain_read_error(source: "Source", error: BaseException, files: Sequence[str] = ()) -> str:
    """Return the error message for `files` that `datasets` could not read: file, line if known, and reason."""
    name = source.display_names(files) or str(source)
    while error.__cause__ is not None:
        # After an error at a URL, datasets reopens it with an argument that fsspec rejects. Skip that second error.
        hidden = isinstance(error.__cause__, TypeError) and error.__context__ is not None
        error = error.__context__ if hidden and error.__context__ else error.__cause__
    for file in files or source.files:
        own = isinstance(error, UsageError) and file in str(error)
        if found := str(error) if own else describe_file_error(file):
            return found.replace(file, source.display_names([file]))
    if isinstance(error, UsageError):
        return str(error)
    if absent := re.search(r"No match for FieldRef.Name\((.*?)\)", str(error)):
        return f"{source.field}: {name}: there is no column `{absent[1]}`, which other files have"
    reason = one_line(error, 400)
    if "corresponds to no data" in reason:
        return f"{source.field}: {name} holds no rows: give data with at least one row"
    hint = "" if source.builder else not_found_locally(str(source.name))
    return f"{source.field}: {name} could not be read: {hint}{reason}"


def describe_file_error(file: str) -> str | None:
    """Return a message with the first error in a text file and its line or row, or None without an error."""
    kind = Path(file).suffix
    if not os.path.isfile(file) or kind not in (".jsonl", ".json", ".csv", ".txt"):
        return None
    with open(file, "rb") as lines:
        for number, text in enumerate(lines, 1):
            try:
                text.decode()
            except UnicodeDecodeError as error:
                return f"{file}, line {number}, byte {error.start}: not UTF-8 text: a {kind} file must be UTF-8"
    return {".jsonl": _jsonl_error, ".json": _json_error}.get(kind, lambda _: None)(file)


def _jsonl_error(file: str) -> str | None:
    first = 1
    with open(file, "rb") as text:
        while lines := text.readlines(BLOCK):
            if found := _bad_row(b"".join(lines)):
                rows = [(number, line) for number, line in enumerate(lines, first) if line.strip()]
                number, line = rows[found[0]]
                return f"{file}, line {number}: {found[1]}: {line.decode().strip()[:60]}"
            first += len(lines)
    return None


def _json_error(file: str) -> str | None:
    content = Path(file).read_bytes()
    try:
        rows = json.loads(content)
        content = "\n".join(map(json.dumps, rows)).encode() if isinstance(rows, list) else content
    except json.JSONDecodeError as error:
        if content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return f"{file}, line {error.lineno}: not valid JSON ({error.msg}, column {error.colno})"
    found = _bad_row(content)  # a list, one object per line, or objects one after the other
    return f"{file}, row {found[0]}: {found[1]}" if found else None


def _bad_row(content: bytes) -> tuple[int, str] | None:
    """Return (number, reason) of the first row that is no JSON object, or has a field of another type than earlier."""
    import pyarrow
    from pyarrow.json import ParseOptions, ReadOptions, read_json

    one_block = ReadOptions(use_threads=False, block_size=len(content) + 1)  # pyarrow counts rows from its block
    try:
        read_json(pyarrow.BufferReader(content), one_block, ParseOptions(newlines_in_values=True))
    except pyarrow.ArrowInvalid as error:
        reason, _, row = str(error).rpartition(" in row ")
        reason = reason.rstrip(".").replace("Column() changed from object to", "expected a JSON object, found")
        return (int(row), reason) if row.isdigit() else None
    return None
