"""The file and line of a row, for error messages.

Tests: tests/config/test_bad_input.py and tests/data/test_bad_rows.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from src.config.errors import UsageError


class RowLocations:
    """The places of rows start … stop−1 of a split, looked up when one is put into a message."""

    def __init__(self, source, split: str, start: int, stop: int):
        self.source, self.split, self.start, self.stop = source, split, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, i: int) -> "RowLocation":
        if not 0 <= i < len(self):
            raise IndexError(i)
        return RowLocation(self.source, self.split, self.start + i)


def check_decodable(rows, places, take=lambda rows, i: rows[i]) -> None:
    """Raise UsageError for the first of `rows` whose bytes are no text: Arrow takes any, and Python does not."""
    for i in range(len(places)):
        try:
            take(rows, i)
        except UnicodeDecodeError as reason:
            raise UsageError(f"{places[i]}: not UTF-8 text ({reason.reason})") from None


class ShardRowLocations:
    """Where the rows of a block of a stream's shard are, for messages."""

    def __init__(self, name: str, first: int, count: int):
        self.name, self.first, self.count = name, first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> str:
        if not 0 <= i < self.count:
            raise IndexError(i)
        return f"{self.name}, row {self.first + i}: train data"


class RowLocation:
    """One raw row, in words: the row of its split, counted from 0, and the file and line where that can be found."""

    def __init__(self, source, split: str, row: int):
        self.source, self.split, self.row = source, split, row

    def __str__(self) -> str:
        found = locate_row(self.source.parts or self.source.files, self.row) if self.source is not None else None
        return (f"{found}: " if found else "") + f"{self.split} data, row {self.row}"


def locate_row(files: list[str], row: int) -> str | None:
    """Return 'FILE, line N' (or row N, counted from 0, of a file without lines) of a row of these files in a row."""
    for file in files:
        try:
            count, line = _find(file, row)
        except (OSError, ValueError):
            return None
        if line is not None:
            return f"{file}, {line}"
        if count is None:
            return None
        row -= count
    return None


def _find(file: str, row: int) -> tuple[int | None, str | None]:
    """Return (rows of a file or None where that is not known, where `row` is if it is in there)."""
    kind = Path(file).suffix
    if kind == ".parquet":
        import pyarrow.parquet

        count = pyarrow.parquet.read_metadata(file).num_rows
    elif kind == ".arrow":
        import pyarrow

        with pyarrow.memory_map(file) as source:
            try:
                count = pyarrow.ipc.open_stream(source).read_all().num_rows
            except pyarrow.ArrowInvalid:  # the other of the two formats
                count = pyarrow.ipc.open_file(source).read_all().num_rows
    elif kind == ".csv":
        import csv

        with open(file, newline="", encoding="utf-8", errors="replace") as text:
            count, lines = 0, _Last(text)
            reader = csv.reader(lines)
            next(reader, None)
            for _ in reader:
                if lines.last.strip():  # else pandas sees no row: it knows a blank line by the line, not by its fields
                    if count == row:
                        return None, f"line {reader.line_num}"
                    count += 1
            return count, None
    elif kind == ".json" and is_array(file):
        count = len(json.loads(Path(file).read_text(encoding="utf-8-sig")))
    elif kind in (".jsonl", ".json") and spreads(file):
        for count, (line, _) in enumerate(objects(file)):
            if count == row:
                return None, f"line {line}"
        return count + 1, None
    elif kind in (".jsonl", ".json", ".txt"):
        count = 0
        with open(
            file, encoding="utf-8", errors="replace"
        ) as lines:  # as `datasets` does, which knows three ends of a line
            for number, text in enumerate(lines, 1):
                if kind == ".txt" or text.strip():
                    if count == row:
                        return None, f"line {number}"
                    count += 1
        return count, None
    else:
        return None, None
    return count, f"row {row}" if row < count else None


def is_array(file: str) -> bool:
    with open(file, "rb") as start:
        return start.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


class _Last:
    """Lines of a text, of which the last that was read is remembered."""

    def __init__(self, lines):
        self.lines, self.last = lines, ""

    def __iter__(self) -> Iterator[str]:
        for line in self.lines:
            self.last = line
            yield line


def spreads(file: str) -> bool:
    """Return whether a file of JSON objects has them over several lines each."""
    with open(file, "rb") as lines:
        first = next(filter(bytes.strip, lines), b"").strip()
    try:
        json.loads(first)
    except ValueError:  # or else the first line is at fault
        try:
            next(objects(file), None)
        except ValueError:
            return False
        return True
    return False


def objects(file: str) -> Iterator[tuple[int, object]]:
    """Yield (its first line, a value) of JSON values one after the other, wherever lines end."""
    text, decoder, at, line = Path(file).read_text(encoding="utf-8-sig"), json.JSONDecoder(), 0, 1
    while len(rest := text[at : at + 1]):
        if rest.isspace():
            at, line = at + 1, line + (rest == "\n")
            continue
        value, end = decoder.raw_decode(text, at)
        yield line, value
        at, line = end, line + text.count("\n", at, end)
