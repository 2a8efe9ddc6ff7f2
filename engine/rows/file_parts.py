"""Parts of a file of rows, each row a dict with its place: what readers yield, and processes hand to each other.

Tests: tests/engine/rows/test_read.py.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from engine.config.errors import UsageError

PART = 4 << 20  # bytes of a part, about
PART_ROWS = 10_000  # maximum rows of a part, about
SAMPLE = 1 << 16  # bytes that say how long a line is

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


# ---- opening ---------------------------------------------------------------------------------------------------------


def open_binary(file: File, open_file: Open | None) -> Any:
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
