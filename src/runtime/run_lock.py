"""The lock of a run folder: only one process trains in it.

Tests: tests/runtime/test_run_status.py.
"""

import fcntl
import os
import time
from pathlib import Path
from typing import IO

from src.config.errors import UsageError, warn

_locks: dict[Path, IO] = {}  # run folder -> its lock file, held open until the process ends


def lock_run_folder(folder: Path, patience: float = 60) -> None:
    """Lock the run folder for this process. Raise UsageError if another process holds it for `patience` seconds.

    The operating system releases the lock when the process ends, however it ends."""
    key = folder.absolute()
    if key in _locks:
        return
    check_links(folder)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    file = _lock_file(folder).open("a")
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            _wait(folder, time.monotonic() - began, patience)
        except OSError as error:
            warn(f"{folder} cannot be locked ({error.strerror}): make sure that nothing else trains in it")
            break
    if not _is_in_place(file, folder):  # the lock file was deleted while this process waited
        file.close()
        return lock_run_folder(folder, patience)
    _locks[key] = file


def _wait(folder: Path, waited: float, patience: float) -> None:
    """Wait half a second for the process that holds the lock. Raise UsageError after `patience` seconds."""
    if waited > patience:
        raise UsageError(f"output_dir: another process trains in {folder}: end it, or give another --output_dir")
    if waited < 0.5:
        warn(f"another process trains in {folder}: waiting up to {patience:g} s for its end")
    time.sleep(0.5)


def check_links(folder: Path) -> None:
    """Raise UsageError if a file that a run appends to or truncates is a symlink, which may lead to any file."""
    for file in (folder / "metrics.jsonl", folder / "ledger.jsonl", *sorted((folder / "logs").glob("*.log"))):
        if file.is_symlink():
            raise UsageError(
                f"output_dir: {file} is a symbolic link to {os.readlink(file)}, which this run would "
                "write to: replace the link by the file, or give another --output_dir"
            )


def keep_lock(folder: Path) -> bool:
    """Lock the folder again if the lock file of this process was deleted. Return False if another process was faster."""
    old = _locks.get(folder.absolute())
    if old is None or _is_in_place(old, folder):
        return True
    try:
        file = _lock_file(folder).open("a")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # also if the whole folder is gone; the next call tries again
        return True
    _locks[folder.absolute()] = file
    old.close()
    warn(f"{_lock_file(folder)} was deleted: the run folder is locked again", any_rank=True)
    return True


def _lock_file(folder: Path) -> Path:
    return folder / "logs" / "rank_0.log"


def _is_in_place(file: IO, folder: Path) -> bool:
    """Return True if an open lock file is still the one in the folder, or if the file system does not answer."""
    try:
        return os.path.samestat(os.stat(_lock_file(folder)), os.fstat(file.fileno()))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def unlock_run_folder() -> None:
    """Close the lock files in a forked child process; the parent keeps the locks."""
    while _locks:
        _locks.popitem()[1].close()
