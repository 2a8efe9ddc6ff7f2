"""Detection of a run folder that is deleted, moved or replaced while this process uses it.

Tests: tests/storage/test_atomic_folder.py, tests/distributed/test_stop_signals.py.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path

_held: dict[Path, int] = {}  # run folder -> open file descriptor, so that its inode number is not reused


def hold(folder: Path) -> None:
    """Open the folder at this path, so that `lost_folder` notices if another folder takes its place."""
    if folder.absolute() not in _held:
        with suppress(OSError):
            _held[folder.absolute()] = os.open(folder, os.O_RDONLY)


def lost_folder(path: Path) -> str:
    """Return the reason why the held folder that is or contains `path` is gone, or an empty string."""
    for folder, descriptor in _held.items():
        if not path.absolute().is_relative_to(folder):
            continue
        try:
            if not os.path.samestat(os.stat(folder), os.fstat(descriptor)):
                return f"{folder} was deleted or moved, and another folder is in its place"
        except (FileNotFoundError, NotADirectoryError):
            return f"{folder} was deleted or moved"
        except OSError:  # the file system does not answer: the folder may still be there
            continue
    return ""


def check_held(path: Path) -> None:
    """Raise OSError if `path` is in a folder that was deleted, moved or replaced since `hold`."""
    if reason := lost_folder(path):
        raise OSError(errno.ESTALE, f"{reason}; nothing was written there")
