"""Which file and line a raw row came from, and what is wrong with a file that cannot be read. Only faults ask.

Leave alone. Guarded by tests/test_bad_input.py and tests/test_bad_rows.py.
"""

import json
import os
from itertools import islice
from pathlib import Path

from src.inputs import UsageError


class Places:
    """The places of rows start … stop−1 of a split, looked up when one is put into a message."""

    def __init__(self, source, split: str, start: int, stop: int):
        self.source, self.split, self.start, self.stop = source, split, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, i: int) -> "Place":
        if not 0 <= i < len(self):
            raise IndexError(i)
        return Place(self.source, self.split, self.start + i)


def decoded(rows, places, take=lambda rows, i: rows[i]) -> None:
    """Raise UsageError for the first of `rows` whose bytes are no text: Arrow takes any, and Python does not."""
    for i in range(len(places)):
        try:
            take(rows, i)
        except UnicodeDecodeError as reason:
            raise UsageError(f"{places[i]}: not UTF-8 text ({reason.reason})") from None


class Place:
    """One raw row, in words: the row of its split, counted from 0, and the file and line where that can be found."""

    def __init__(self, source, split: str, row: int):
        self.source, self.split, self.row = source, split, row

    def __str__(self) -> str:
        found = origin(self.source.files, self.row) if self.source is not None else None
        return (f"{found}: " if found else "") + f"{self.split} data, row {self.row}"


def origin(files: list[str], row: int) -> str | None:
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

        with open(file, newline="", encoding="utf-8", errors="replace") as lines:
            reader = csv.reader(lines)
            next(reader, None)
            count = 0
            for _ in filter(None, reader):
                if count == row:
                    return None, f"line {reader.line_num}"
                count += 1
            return count, None
    elif kind == ".json" and _is_array(file):
        count = len(json.loads(Path(file).read_text(encoding="utf-8")))
    elif kind in (".jsonl", ".json", ".txt"):
        count = 0
        with open(file, "rb") as lines:
            for number, text in enumerate(lines, 1):
                if kind == ".txt" or text.strip():
                    if count == row:
                        return None, f"line {number}"
                    count += 1
        return count, None
    else:
        return None, None
    return count, f"row {row}" if row < count else None


def _is_array(file: str) -> bool:
    with open(file, "rb") as start:
        return start.read(64).lstrip().startswith(b"[")


# ---- files that cannot be read ---------------------------------------------------------------------------------------


def fault(file: str) -> str | None:
    """Return what is wrong with a text file, and in which line, or None where nothing is found."""
    kind = Path(file).suffix
    if not os.path.isfile(file) or kind not in (".jsonl", ".json", ".csv", ".txt"):
        return None
    if where := _not_utf8(file):
        return f"{file}, {where}: not UTF-8 text: a {kind} file was expected"
    if kind in (".jsonl", ".json"):
        return _json_fault(file)
    return _csv_fault(file) if kind == ".csv" else None


def _not_utf8(file: str) -> str | None:
    with open(file, "rb") as lines:
        for number, text in enumerate(lines, 1):
            try:
                text.decode()
            except UnicodeDecodeError as reason:
                return f"line {number}, byte {reason.start}"
    return None


def _csv_fault(file: str) -> str | None:
    import csv

    with open(file, newline="", encoding="utf-8") as lines:
        reader = csv.reader(lines)
        names = next(reader, [])
        for row in filter(None, reader):
            if len(row) > len(names):
                return f"{file}, line {reader.line_num}: {len(row)} fields, where the first line names {len(names)}"
    return None


def _json_fault(file: str) -> str | None:
    """Return what is wrong with a file of JSON objects, one a line or in one array, and in which line; or None."""
    kinds, kind = {}, Path(file).suffix
    try:
        with open(file, encoding="utf-8") as lines:
            array = kind == ".json" and _is_array(file)
            for number, text in enumerate([lines.read()] if array else lines, 1):
                if not text.strip():
                    continue
                value = json.loads(text.rstrip())
                if not isinstance(value, list if array else dict):
                    return f"{file}, line {number}: expected a JSON object, found {text.strip()[:60]}"
                for place, row in enumerate(value) if array else [(number, value)]:
                    where = f"{file}, {'row' if array else 'line'} {place}"
                    if not isinstance(row, dict):
                        return f"{where}: expected a JSON object, found {json.dumps(row)[:60]}"
                    if other := _other_kind(kinds, row):
                        return f"{where}: {other}"
                    json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return f"{where}: half of a surrogate pair, which no UTF-8 text can hold"
    except json.JSONDecodeError as reason:
        found = next(islice(text.splitlines(), reason.lineno - 1, None), "").strip()[:60]
        return (
            f"{file}, line {number + reason.lineno - 1}: not valid JSON ({reason.msg}, column {reason.colno}): {found}"
        )
    except RecursionError:
        return f"{file}, line {number}: nested too deeply: {text.strip()[:60]}"
    return None


_KINDS = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}


def _kind(value) -> str:
    if not isinstance(value, list):
        return _KINDS[type(value)]
    inside = {_kind(x) for x in value if x is not None}
    return f"a list of {inside.pop() if len(inside) == 1 else 'several kinds'}" if inside else "a list"


def _other_kind(kinds: dict[str, str], row: dict) -> str | None:
    """Return which field of a row is of another kind than in the rows before."""
    for name, value in row.items():
        kind = None if value is None or value == [] else _kind(value)
        if kind and kinds.setdefault(name, kind) != kind:
            return f"`{name}` is {kind}, and {kinds[name]} in the rows before: {json.dumps(value)[:60]}"
    return None


def check_kinds(schema, columns: list[str], files: list[str], name: str) -> None:
    """Raise UsageError for a column of several kinds, which `datasets` holds as JSON, and not always reads back as it was."""
    for column in columns:
        if (
            "arrow.json" in str(schema.field(column).type) and column != "messages"
        ):  # whose turns may differ in their keys
            found = next((text for file in files if (text := fault(file))), None)
            raise UsageError(found or f"{name}: `{column}` holds values of several kinds")
