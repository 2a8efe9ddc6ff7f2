"""The run folder that this process holds: notice when it is deleted, moved or replaced.

Tests: tests/storage/test_atomic_folder.py, tests/distributed/test_stop_signals.py.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path

_held: dict[Path, int] = {}  # run folder -> an open descriptor of it, which keeps its inode number from being reused


def hold(folder: Path) -> None:
    """Remember which folder this path means now; from here on nothing is written to another one in its place."""
    if folder.absolute() not in _held:
        with suppress(OSError):
            _held[folder.absolute()] = os.open(folder, os.O_RDONLY)


def lost_folder(path: Path | None = None) -> str:
    """Return why a held folder (with `path`: the one that contains it) is gone; an empty string if it is there."""
    for folder, descriptor in _held.items():
        if path is not None and not path.absolute().is_relative_to(folder):
            continue
        try:
            if not os.path.samestat(os.stat(folder), os.fstat(descriptor)):
                return f"{folder} was deleted or moved, and another folder is in its place"
        except (FileNotFoundError, NotADirectoryError):
            return f"{folder} was deleted or moved"
        except OSError:  # a file system that does not answer now says nothing about the folder
            continue
    return ""


def check_held(path: Path) -> None:
    """Raise OSError if `path` is in a folder that was deleted, moved or replaced since `hold`."""
    if reason := lost_folder(path):
        raise OSError(errno.ESTALE, f"{reason}; nothing is written there")
