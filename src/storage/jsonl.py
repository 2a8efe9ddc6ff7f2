"""Strict JSON lines: append whole lines, read intact ones, truncate after a step.

Tests: tests/storage/test_jsonl.py.
"""

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

from src.config.errors import warn
from src.storage.lost_run_folder import check_held, lost_folder


def strict_json(value):
    """Return `value` as strict JSON allows it: non-finite numbers become None."""
    if isinstance(value, dict):
        return {key: strict_json(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonlWriter:
    """Appends whole lines to a file; lines that the disk did not take are kept and written with the next ones."""

    def __init__(self, path: Path):
        self.path = path
        self.waiting: list[str] = []

    def add(self, line: dict) -> None:
        """Queue a line for the next flush; ValueError if it is not strict JSON."""
        self.waiting.append(json.dumps(line, allow_nan=False) + "\n")

    def flush(self) -> None:
        """Write all queued lines, or raise OSError and write none."""
        if not self.waiting:
            return
        check_held(self.path)
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
            if error.errno == errno.ESTALE and lost_folder(self.path):
                return  # StopSignals ends this process at its next check and prints the reason
            warn(
                f"{self.path} cannot be written ({error.strerror}): its last {len(self.waiting)} lines are kept for later"
            )


def read_lines(path: Path, required: tuple[str, ...] = ("kind",)) -> list[dict]:
    """Return the readable objects with a step and the required keys; an unreadable line is skipped."""
    found = []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int) and line.keys() >= set(required):
            found.append(line)
    return found


def truncate_after(path: Path, keeps: Callable[[dict], bool]) -> None:
    """Drop the last lines of a file of JSON objects, up to the last whole one that `keeps` accepts.

    Truncates in place, which is one operation of the file system; parses only the lines that it drops."""
    if not path.exists():
        return
    data = path.read_bytes()
    end = len(data)
    while end:
        start = data.rfind(b"\n", 0, end - 1) + 1
        try:
            if data[end - 1 : end] == b"\n" and keeps(json.loads(data[start:end])):
                break
        except (ValueError, KeyError, TypeError):
            pass  # half a line, as a kill leaves it
        end = start
    if end < len(data):
        os.truncate(path, end)
