"""Error messages for data files that cannot be read: the line and the reason.

Tests: tests/data/test_bad_rows.py and tests/config/test_bad_input.py.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from src.config.errors import UsageError, one_line
from src.config.paths import not_found_locally
from src.data.sources import Source

BLOCK = 1 << 26  # bytes of lines that are parsed together


def explain_read_error(source: Source, error: BaseException, files: Sequence[str] = ()) -> str:
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
