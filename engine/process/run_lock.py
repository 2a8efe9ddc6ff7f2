"""The lock of a run folder: one run at a time trains in it.

Tests: tests/engine/process/test_run_lock.py.
"""

from pathlib import Path

from filelock import FileLock, Timeout

from engine.config.errors import UsageError, warn

# Run folder -> its lock. The operating system releases it when this process ends, however it ends.
_locks: dict[Path, FileLock] = {}


def lock_run_folder(folder: Path, patience: float = 60) -> None:
    """Lock the run folder until this process ends.

    Raise UsageError if another process holds the lock for `patience` seconds. Warn if the file system has no locks."""
    if is_mine(folder):
        return
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"output_dir: {folder} cannot be written: {error}") from error
    # A soft lock would outlive a killed process of another host. Any thread may hold the lock, and forked processes do not keep it.
    lock = FileLock(folder / "logs" / "run.lock", thread_local=False, fallback_to_soft=False)
    try:
        _acquire(lock, folder, patience)
    except Timeout as error:
        text = f"output_dir: another process trains in {folder}: end it, or give another --output_dir"
        raise UsageError(text) from error
    except OSError as error:
        warn(f"{folder} cannot be locked ({error.strerror}): make sure that nothing else trains in it")
    _locks[folder.absolute()] = lock


def is_mine(folder: Path) -> bool:
    """Return whether this process has locked the run folder."""
    return folder.absolute() in _locks


def _acquire(lock: FileLock, folder: Path, patience: float) -> None:
    """Acquire the lock. Raise Timeout after `patience` seconds, or OSError."""
    try:
        lock.acquire(timeout=0.5)
    except Timeout:
        warn(f"another process trains in {folder}: waiting up to {patience:g} s for its end")
        lock.acquire(timeout=patience)
