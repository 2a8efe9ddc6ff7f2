"""Files of lines: JSON, one object after the other or one list, and text.

Tests: tests/engine/rows/test_read.py, tests/engine/rows/test_bad_rows.py.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from engine.config.errors import one_line
from engine.rows import file_parts
from engine.rows.file_parts import File, Part

BOM = b"\xef\xbb\xbf"  # byte order mark
UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def parts_of_lines(file: File, binary: Any, seeks: bool) -> Iterator[Part]:
    """Yield the parts of a file of lines; their bytes, unless it `seeks`."""
    begun = binary.read(file_parts.SAMPLE)
    if begun.startswith(UTF_16):
        raise ValueError("it is UTF-16: save it as UTF-8")
    first_lines = begun.removeprefix(BOM).lstrip()
    while file.kind == "json" and not first_lines:  # a file of blank lines has no rows
        more = binary.read(file_parts.SAMPLE)
        if not more:
            return
        begun += more
        first_lines = more.lstrip()
    if file.kind == "json" and first_lines.startswith(b"["):
        yield from _parts_of_list(file, begun + binary.read())
        return
    if file.kind == "json" and _is_on_several_lines(first_lines):  # nothing tells where the next object begins
        content = begun + binary.read()
        yield Part(file, len(content), 1, content)
        return
    cut = b"\n{" if file.kind == "json" else b"\n"  # some objects may stand on several lines
    lines_in_sample = max(1, begun.count(b"\n"))
    size = max(
        1, min(file_parts.PART, file_parts.PART_ROWS * len(begun) // lines_in_sample)
    )  # if all lines are as long as these
    if not seeks:
        yield from _chunks(file, binary, begun, size, cut)
        return
    end = binary.seek(0, os.SEEK_END)
    count = -(-end // size)
    first = 0
    for i in range(1, count + 1):
        stop = _find(binary, cut, max(first, end * i // count)) if i < count else end
        if stop > first:
            yield Part(file, stop - first, first)
            first = stop


def _is_on_several_lines(first_lines: bytes) -> bool:
    """Return whether the first object of a file has line breaks."""
    line, end, _ = first_lines.partition(b"\n")
    if not end:
        return False
    try:
        DECODER.raw_decode(decode(line)[0])
    except (ValueError, RecursionError):
        return True
    return False


def _find(binary: Any, cut: bytes, start: int) -> int:
    """Return where the first line begins after a byte with `cut` before it, or where the file ends."""
    content = b""
    binary.seek(start)
    while more := binary.read(file_parts.SAMPLE):
        content = content[-1:] + more
        start += len(more)
        found = content.find(cut)
        if found >= 0:
            return start - len(content) + found + 1
    return start


def _chunks(file: File, binary: Any, begun: bytes, size: int, cut: bytes) -> Iterator[Part]:
    line = 1
    while more := binary.read(size):
        begun += more
        length = begun.rfind(cut) + 1
        if length:
            yield Part(file, length, line, begun[:length])
            line += begun.count(b"\n", 0, length)
            begun = begun[length:]
    if begun:
        yield Part(file, len(begun), line, begun)


def decode(content: bytes, is_json: bool = True) -> tuple[str, bool]:
    """Return (the text, whether all texts in it are Unicode). A byte that is not UTF-8 becomes half of a surrogate pair."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return content.decode(errors="surrogateescape"), False
    return text, not (is_json and HALF_SURROGATE.search(text))


def text_rows(text: str) -> Iterator[tuple[int, dict]]:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if not lines[-1]:
        lines.pop()
    return enumerate({"text": line} for line in lines)


# ---- JSON ------------------------------------------------------------------------------------------------------------

WHITESPACE = re.compile(r"[ \t\n\r]*")  # between JSON values
OBJECT = re.compile(r"^\{", re.M)
# An escape of half of a surrogate pair, or what may be one behind a backslash
HALF_SURROGATE = re.compile(
    r"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|[c-fC-F](?<!\\u[dD][89abAB]..\\u[dD].))|\\\\u[dD]"
)


def _object(pairs: list[tuple[str, Any]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key `{next(name for name in names if names.count(name) > 1)}` is named twice")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def json_rows(text: str) -> Iterator[tuple[int, "dict | ValueError"]]:
    """Yield (line from 0, row or error) of JSON objects, one after the other; after an error the next line goes on."""
    line = 0
    position = 0
    end = 0
    while (start := _skip_whitespace(text, end)) < len(text):
        line += text.count("\n", position, start)
        position = start
        try:
            value, end = DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            next_row = OBJECT.search(text, position + 1)
            end = next_row.start() if next_row else len(text)
            yield line, ValueError(error.msg if isinstance(error, json.JSONDecodeError) else one_line(error))
            continue
        yield line, value if isinstance(value, dict) else _no_object(value)


def _skip_whitespace(text: str, position: int) -> int:
    found = WHITESPACE.match(text, position)
    return found.end() if found else position


def _no_object(value: Any) -> ValueError:
    return ValueError(f"a row must be an object, not {json.dumps(value)[:40]}")


def _parts_of_list(file: File, content: bytes) -> Iterator[Part]:
    """Yield the parts of a file that begins with a list: of its rows, or of its texts."""
    size = len(content)
    text, is_clean = decode(content.removeprefix(BOM))
    rows: list[dict | ValueError] = []
    end = 0
    while (start := _skip_whitespace(text, end)) < len(text):
        try:
            value, end = DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            line = 1 + text.count("\n", 0, getattr(error, "pos", start))
            reason = error.msg if isinstance(error, json.JSONDecodeError) else one_line(error)
            yield Part(file, size, line, ValueError(reason))
            return
        if rows:
            line = 1 + text.count("\n", 0, start)
            yield Part(file, size, line, ValueError("the list of rows has ended: give one list, or an object a line"))
            return
        for row in value if isinstance(value, list) else [value]:
            row = {"text": row} if isinstance(row, str) else row
            rows.append(row if isinstance(row, dict) else _no_object(row))
    count = max(1, min(file_parts.PART_ROWS, file_parts.PART * len(rows) // size))
    for first in range(0, len(rows), count):
        some = rows[first : first + count]
        yield Part(file, size * len(some) // len(rows), first, some, is_clean)


def select(row: "dict | ValueError", columns: Iterable[str] | None, is_clean: bool) -> "dict | ValueError":
    """Return these columns of a row (None: all), None where it has none. A text that is no Unicode is an error, if its
    column is asked for."""
    if isinstance(row, ValueError) or columns is None:
        return row
    chosen = {name: row.get(name) for name in columns}
    if not is_clean:
        for name, value in chosen.items():
            if not is_unicode(value):
                return ValueError(
                    f"`{name}` holds text with half of a surrogate pair, or with bytes that are not UTF-8, which are no "
                    "characters: save the file as UTF-8, or remove it"
                )
    return chosen


def is_unicode(value: Any) -> bool:
    """Return False for text, or a value with a text, with half of a surrogate pair, which JSON may hold."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
