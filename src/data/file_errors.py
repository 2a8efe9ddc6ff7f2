"""What is wrong with a data file, and in which line.

Tests: tests/config/test_bad_input.py and tests/data/test_bad_rows.py.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from src.data.row_location import is_array, objects, spreads


def describe_file_error(file: str) -> str | None:
    """Return what is wrong with a text file, and in which line, or None where nothing is found."""
    kind = Path(file).suffix
    if not os.path.isfile(file) or kind not in (".jsonl", ".json", ".csv", ".txt"):
        return None
    if where := _not_utf8(file):
        return f"{file}, {where}: not UTF-8 text: a {kind} file was expected"
    return _json_fault(file) if kind in (".jsonl", ".json") else None


def _not_utf8(file: str) -> str | None:
    with open(file, "rb") as lines:
        for number, text in enumerate(lines, 1):
            try:
                text.decode()
            except UnicodeDecodeError as reason:
                return f"line {number}, byte {reason.start}"
    return None


def _json_fault(file: str) -> str | None:
    """Return what is wrong with a file of JSON objects, one a line or in one array, and in which line; or None."""
    kinds, where = {}, ""
    try:
        for place, value in _values(file):
            where = f"{file}, {place}"
            if not isinstance(value, dict):
                return f"{where}: expected a JSON object, found {json.dumps(value)[:60]}"
            if other := _other_kind(kinds, value):
                return f"{where}: {other}"
            json.dumps(value, ensure_ascii=False).encode()
    except _Twice as reason:
        return f"{file}, line {getattr(reason, 'before', 0) + 1}: `{reason}` is given twice"
    except UnicodeEncodeError:
        return f"{where}: half of a surrogate pair, which no UTF-8 text can hold"
    except json.JSONDecodeError as reason:
        line, text = reason.lineno + getattr(reason, "before", 0), reason.doc.split("\n")[reason.lineno - 1].strip()
        return f"{file}, line {line}: not valid JSON ({reason.msg}, column {reason.colno}): {text[:60]}"
    except RecursionError as reason:
        return f"{file}, line {getattr(reason, 'before', 0) + 1}: nested too deeply"
    return None


class _Twice(ValueError):
    """An object has the same key twice."""


def _object(pairs: list[tuple[str, object]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Twice(next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i])))
    return found


def _values(file: str) -> Iterator[tuple[str, object]]:
    """Yield (its row or line, a value) of a file of JSON values: in one array, one a line, or over several lines each."""
    with open(file, encoding="utf-8-sig") as lines:
        if file.endswith(".json") and is_array(file):
            yield from ((f"row {i}", value) for i, value in enumerate(json.load(lines)))
        elif spreads(file):
            yield from ((f"line {line}", value) for line, value in objects(file))
        else:
            for before, text in enumerate(lines):
                try:
                    value = json.loads(text.rstrip(), object_pairs_hook=_object) if text.strip() else None
                except (ValueError, RecursionError) as reason:
                    reason.before = before
                    raise
                if text.strip():
                    yield f"line {before + 1}", value


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
