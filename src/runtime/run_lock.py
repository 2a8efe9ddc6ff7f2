"""The lock of a run folder: only one process trains in it.

Tests: tests/runtime/test_run_status.py.
"""

import os
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from src.config.errors import UsageError, warn

# Run folder -> its lock, which ends with the process, and the identity of the lock file; None: it cannot be locked.
_locks: dict[Path, tuple[FileLock, os.stat_result] | None] = {}


def lock_run_folder(folder: Path, patience: float = 60) -> None:
    """Lock the run folder for this process. Raise UsageError if another process holds it for `patience` seconds.

    The operating system releases the lock when the process ends, however it ends."""
    if folder.absolute() in _locks:
        return
    check_links(folder)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    try:
        try:
            _lock(folder, 0.5)
        except Timeout:
            warn(f"another process trains in {folder}: waiting up to {patience:g} s for its end")
            _lock(folder, patience)
    except Timeout as error:
        raise UsageError(
            f"output_dir: another process trains in {folder}: end it, or give another --output_dir"
        ) from error
    except OSError as error:
        warn(f"{folder} cannot be locked ({error.strerror}): make sure that nothing else trains in it")
        _locks[folder.absolute()] = None


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
    lock, file = _locks.get(folder.absolute()), _lock_file(folder)
    with suppress(OSError):  # deleted, or the file system does not answer
        if lock is None or os.path.samestat(lock[1], os.stat(file)):
            return True
    if not file.parent.is_dir():  # FileLock would create it, in the way of a new run
        return True
    try:
        _lock(folder, 0)
    except Timeout:
        return False
    except OSError:
        return True
    warn(f"{file} was deleted: the run folder is locked again", any_rank=True)
    return True


def _lock(folder: Path, timeout: float) -> None:
    """Hold the lock of `folder` until this process ends. Raise Timeout if another process holds it, or OSError."""
    # A soft lock would outlive a killed process. Any thread may hold the lock, and forked processes do not keep it.
    lock = FileLock(_lock_file(folder), timeout=timeout, thread_local=False, fallback_to_soft=False)
    lock.acquire()
    _locks[folder.absolute()] = lock, os.stat(_lock_file(folder))


def _lock_file(folder: Path) -> Path:
    return folder / "logs" / "run.lock"
