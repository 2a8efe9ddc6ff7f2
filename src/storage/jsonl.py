"""Strict JSON lines: append whole lines, read intact ones, truncate after a step."""

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

from src.config.errors import warn
from src.storage.held_folder import check_held, lost_folder


def strict_json(value):
    """Return `value` as strict JSON allows it: numbers that are not finite become None."""
    if isinstance(value, dict):
        return {key: strict_json(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonlWriter:
    """Appends whole lines to a file; what the disk does not take is kept, and tried again with the next."""

    def __init__(self, path: Path):
        self.path, self.waiting = path, []

    def add(self, line: dict) -> None:
        """Take a line as strict JSON; it reaches the file with the next flush."""
        self.waiting.append(json.dumps(line, allow_nan=False) + "\n")

    def flush(self) -> None:
        """Write what is waiting, all of it or, with an OSError, nothing."""
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
        """Write what is waiting; where that fails, warn and keep it."""
        try:
            self.flush()
        except OSError as error:
            if error.errno == errno.ESTALE and lost_folder(self.path):
                return  # Watch ends this process at its next look, and says why
            warn(
                f"{self.path} cannot be written ({error.strerror}); its {len(self.waiting)} last lines are kept for later"
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
    """Drop the last lines of a file of JSON objects, up to the last one that is whole and that `keeps` accepts.

    Truncates in place, which is one operation of the file system; reads only the lines that go."""
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
