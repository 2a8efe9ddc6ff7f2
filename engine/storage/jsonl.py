"""Strict JSON and JSON Lines files: read objects, append whole lines, read intact lines, truncate after a step.

Tests: tests/engine/storage/test_jsonl.py.
"""

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from engine.config.errors import warn


def strict_json(value):
    """Return `value` with None in place of NaN and infinity, which strict JSON does not allow."""
    if isinstance(value, dict):
        return {key: strict_json(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(file: Path) -> dict:
    """Return the JSON object in a file, or {} if there is none: no such file, not readable, or another value."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class JsonlWriter:
    """Appends whole lines to a file. Keeps lines that could not be written for the next flush."""

    def __init__(self, path: Path):
        self.path = path
        self.waiting: list[str] = []

    def add(self, line: dict) -> None:
        """Queue a line for the next flush. Raise ValueError if it is not strict JSON."""
        self.waiting.append(json.dumps(line, allow_nan=False) + "\n")

    def flush(self) -> None:
        """Write all queued lines. If that fails, write none and raise OSError."""
        if not self.waiting:
            return
        data = "".join(self.waiting).encode()
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)
                raise
        self.waiting = []

    def try_flush(self) -> None:
        """Write all queued lines; if that fails, warn and keep them."""
        try:
            self.flush()
        except OSError as error:
            warn(f"{self.path} cannot be written ({error.strerror}): {len(self.waiting)} lines are kept for later")


def read_lines(path: Path) -> list[dict]:
    """Return the JSON objects that have a `step`; skip unreadable lines."""
    lines = []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with suppress(ValueError):
            lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict) and "step" in line]


def lines_from_end(path: Path) -> Iterator[tuple[int, dict]]:
    """Yield (end in the file, value) of each whole line that is an object with a `step`, the last one first."""
    data = path.read_bytes() if path.exists() else b""
    end = len(data)
    while end:
        start = data.rfind(b"\n", 0, end - 1) + 1
        with suppress(ValueError):
            line = json.loads(data[start:end]) if data[end - 1 : end] == b"\n" else None  # cut off by a kill
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                yield end, line
        end = start


def last_step(path: Path) -> int:
    """Return the `step` of the last line that has one, or 0. The file of a long run has a million lines."""
    return next((line["step"] for _, line in lines_from_end(path)), 0)


def truncate_after(path: Path, keeps: Callable[[dict], bool]) -> None:
    """Truncate a JSON Lines file after the last whole line for which `keeps` returns True.

    Truncate in place, in one file-system operation. Parse from the end, so only the dropped lines and one more."""
    kept = next((end for end, line in lines_from_end(path) if keeps(line)), 0)
    if path.exists() and kept < path.stat().st_size:
        os.truncate(path, kept)
