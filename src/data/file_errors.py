"""Error messages for data files that cannot be read: the line and the reason.

Tests: tests/data/test_bad_rows.py and tests/config/test_bad_input.py.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from src.config.errors import UsageError, one_line
from src.config.paths import not_found_locally
from src.data.sources import Source

JSON = (".jsonl", ".json")


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
    """Return a message with the first error in a text file and its line, or None without an error."""
    kind = Path(file).suffix
    if not os.path.isfile(file) or kind not in (*JSON, ".csv", ".txt"):
        return None
    if where := _not_utf8(file):
        return f"{file}, {where}: not UTF-8 text: a {kind} file must be UTF-8"
    return _json_error(file) if kind in JSON else None


def _not_utf8(file: str) -> str | None:
    with open(file, "rb") as lines:
        for number, text in enumerate(lines, 1):
            try:
                text.decode()
            except UnicodeDecodeError as error:
                return f"line {number}, byte {error.start}"
    return None


def _json_error(file: str) -> str | None:
    """Return a message with the first error in a JSON file and its row, or None without an error."""
    kinds: dict[str, str] = {}
    try:
        for where, value in json_rows(file):
            if not isinstance(value, dict):
                return f"{file}, {where}: expected a JSON object, found {json.dumps(value)[:60]}"
            if mismatch := _other_kind(kinds, value):
                return f"{file}, {where}: {mismatch}"
    except UsageError as error:
        return str(error)
    return None


def json_rows(file: str) -> Iterator[tuple[str, object]]:
    """Yield ('line N', value) for each row of a file with one row per line; ('row N', value), from 0, for other JSON.

    Raise UsageError for a row that is not valid JSON. A file with one row per line is not read at once."""
    with open(file, encoding="utf-8-sig", errors="replace") as lines:
        by_line = file.endswith(".jsonl") or _is_object(next(filter(str.strip, lines), ""))
        lines.seek(0)
        row = 0
        for number, text in enumerate(lines, 1) if by_line else [(1, lines.read())]:
            try:
                for value in _values(text.rstrip()):  # without line end, where errors would be of the next line
                    for item in value if isinstance(value, list) and not by_line else [value]:
                        yield f"line {number}" if by_line else f"row {row}", item
                        row += 1
            except json.JSONDecodeError as error:
                line, bad = number + error.lineno - 1, text.split("\n")[error.lineno - 1].strip()[:60]
                reason = f"not valid JSON ({error.msg}, column {error.colno}): {bad}"
                raise UsageError(f"{file}, line {line}: {reason}") from None
            except (ValueError, RecursionError) as error:  # too many digits, nested too deeply
                raise UsageError(f"{file}, line {number}: {error}") from None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _values(text: str) -> Iterator:
    """Yield the JSON values in a text, which may have several, one after the other."""
    decoder, position = json.JSONDecoder(), 0
    while match := re.compile(r"\S").search(text, position):
        value, position = decoder.raw_decode(text, match.start())
        yield value


_KINDS = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}


def _kind(value) -> str:
    if not isinstance(value, list):
        return _KINDS[type(value)]
    inside = {_kind(item) for item in value if item is not None}
    if not inside:
        return "a list"
    return f"a list of {inside.pop() if len(inside) == 1 else 'several types'}"


def _other_kind(kinds: dict[str, str], row: dict) -> str | None:
    """Return a message for a field with another type than in earlier rows, or None. Add new fields to `kinds`."""
    for name, value in row.items():
        kind = None if value is None or value == [] else _kind(value)
        if kind and kinds.setdefault(name, kind) != kind:
            return f"`{name}` is {kind}, but {kinds[name]} in earlier rows: {json.dumps(value)[:60]}"
    return None
