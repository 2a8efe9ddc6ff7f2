"""RUN/status.json, which has the state and exit code of a run, and the lock of a run folder: one process trains in it.

    python -m src.runtime.run_status RUN [CODE]           print the exit code of the run; CODE, the launcher's, if it has none
    python -m src.runtime.run_status --newest             print the folder in runs/ that a run wrote to last

src/runtime/exit_codes.py lists the exit codes. Tests: tests/runtime/test_run_status.py.
"""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from src.config.errors import UsageError, warn
from src.config.redact import redact_all
from src.storage import atomic_folder, jsonl

EXIT_STOPPED = 75


def write_status(
    folder: Path, status: str, step: int | None = None, code: int | None = None, reason: str = "", **more
) -> None:
    """Write status.json. `status` is running, complete, stopped or failed; `more` holds further keys."""
    value = {"status": status, "step": step, "exit_code": code, "reason": redact_all(reason), "launcher": os.getppid()}
    atomic_folder.rewrite(folder / "status.json", json.dumps(value | more | {"time": round(time.time(), 3)}) + "\n")


def read_status(folder: Path) -> dict:
    """Return the contents of status.json, or {} if the file is missing or unreadable."""
    return jsonl.read_json(folder / "status.json")


def newest_run(parent: Path) -> Path | None:
    """Return the run in `parent` that was active last, or None."""
    files = [*parent.glob("*/status.json"), *parent.glob("*/metrics.jsonl")]
    return max(files, key=lambda file: file.stat().st_mtime).parent if files else None


# ---- lock ------------------------------------------------------------------------------------------------------------

# Run folder -> its lock, which ends with the process (None: it cannot be locked); the lock file that a rank has locked.
_locks: dict[Path, FileLock | None] = {}
_seen: dict[Path, os.stat_result] = {}


def lock_run_folder(folder: Path, patience: float = 60) -> None:
    """Lock the run folder for this process. Raise UsageError if another process holds it for `patience` seconds.

    The operating system releases the lock when the process ends, however it ends."""
    if folder.absolute() in _locks:
        return
    _check_links(folder)
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"output_dir: {folder} cannot be written: {error}") from error
    try:
        try:
            _lock(folder, 0.5)
        except Timeout:
            warn(f"another process trains in {folder}: waiting up to {patience:g} s for its end")
            _lock(folder, patience)
    except Timeout as error:
        text = f"output_dir: another process trains in {folder}: end it, or give another --output_dir"
        raise UsageError(text) from error
    except OSError as error:
        warn(f"{folder} cannot be locked ({error.strerror}): make sure that nothing else trains in it")
        _locks[folder.absolute()] = None


def _check_links(folder: Path) -> None:
    """Raise UsageError if a file that a run appends to or truncates is a symlink, which may lead to any file."""
    files = [folder / name for name in ("metrics.jsonl", "ledger.jsonl", ".seen")]
    for file in (*files, *folder.glob("logs/*"), *folder.glob("profile/*")):
        if file.is_symlink():
            raise UsageError(f"output_dir: {file} is a symbolic link to {os.readlink(file)}: replace it by that file")


def has_lost_lock(folder: Path) -> bool:
    """Return True if a new run has begun in the place of this one after its folder was deleted.

    If another file took the place of the lock, and no process holds it, lock that one."""
    if _locks.get(folder.absolute()) is not None and was_replaced(folder):
        with suppress(OSError):  # the file system does not answer
            try:
                _lock(folder, 0)  # a copy took its place, or the disk gives files new numbers
            except Timeout:
                return True
    return False


def see_lock(folder: Path) -> None:
    """Remember the lock file of a run folder, if there is one."""
    with suppress(OSError):
        _seen[folder.absolute()] = os.stat(_lock_file(folder))


def was_replaced(folder: Path) -> bool:
    """Return True if another file took the place of the lock file that this process remembers."""
    with suppress(OSError, KeyError):  # deleted, or never seen
        return not os.path.samestat(_seen[folder.absolute()], os.stat(_lock_file(folder)))
    return False


def _lock(folder: Path, timeout: float) -> None:
    """Hold the lock of `folder` until this process ends. Raise Timeout if another process holds it, or OSError."""
    # A soft lock would outlive a killed process. Any thread may hold the lock, and forked processes do not keep it.
    lock = FileLock(_lock_file(folder), timeout=timeout, thread_local=False, fallback_to_soft=False)
    lock.acquire()
    _locks[folder.absolute()] = lock
    see_lock(folder)


def _lock_file(folder: Path) -> Path:
    return folder / "logs" / "run.lock"


# ---- the command -------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    """Print the status of a run to stderr and its exit code to stdout; with --newest, print the newest run folder."""
    if argv == ["--newest"]:
        print(newest_run(Path("runs")) or "")
        return
    status = read_status(Path(argv[0]))
    if status:
        print("{}: {status}, step {step}. {reason}".format(argv[0], **status), file=sys.stderr)
    code = status.get("exit_code")  # a shell may evaluate it
    print(code if isinstance(code, int) else (argv[1:] or [1])[0])


if __name__ == "__main__":
    main(sys.argv[1:])
