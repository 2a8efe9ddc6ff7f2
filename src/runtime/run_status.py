"""RUN/status.json, the lock of the run folder, the mark of the first failed rank, exit codes.

    python -m src.runtime.run_status RUN [CODE]           prints the run's own exit code, where a launcher knows only 0 and 1
    python -m src.runtime.run_status --newest             prints the folder in runs/ that a run wrote to last

Tests: tests/distributed/test_stop_signals.py. Exit codes: 0 complete · 1 failed · 2 the user can mend it · 75 stopped, saved,
to be started again (EX_TEMPFAIL of sysexits.h) · 128 + N ended at once by a second signal N.
"""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from src.config.errors import UsageError, warn
from src.config.redact import redact
from src.storage import atomic_folder, held_folder

EXIT_STOPPED = 75
ACTIVE = ("status.json", "metrics.jsonl", "config.yaml")  # files that a run writes as it goes
FAILED = "logs/failed.json"
SETTLING = 0.5  # seconds after which a folder that is being deleted should be gone
SAVING = 120  # seconds that a run may take to save after its launcher is gone


def write_status(
    folder: Path, status: str, step: int | None = None, code: int | None = None, reason: str = "", **more
) -> None:
    """Say in status.json how the run stands: running, complete, stopped or failed; `more` is added to it."""
    value = {
        "status": status,
        "step": step,
        "exit_code": code,
        "reason": redact(reason),
        "launcher": os.getppid(),
    } | more
    atomic_folder.rewrite(folder / "status.json", json.dumps(value | {"time": round(time.time(), 3)}) + "\n")


def read_status(folder: Path) -> dict:
    """Return what status.json says, or nothing."""
    try:
        return json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return {}


def newest_run(parent: Path, weights: bool = True) -> Path | None:
    """Return the folder in `parent` of the run that was last active (of those that have saved weights), or None."""
    active: dict[Path, float] = {}
    for folder in parent.iterdir() if parent.is_dir() else []:
        if not weights or (folder / "final").is_dir() or any((folder / "checkpoints").glob("step_*")):
            times = [file.stat().st_mtime for name in ACTIVE if (file := folder / name).exists()]
            active |= {folder: max(times)} if times else {}
    return max(active, key=lambda folder: active[folder], default=None)


def report_failure(folder: Path, rank: int, message: str) -> bool:
    """Return whether this rank is the first of its run to fail; then its message stands in logs/ for the others to see."""
    file = folder / FAILED
    temporary = file.with_name(f".failed_{rank}.tmp")
    try:
        held_folder.check_held(file)
        temporary.write_text(json.dumps({"rank": rank, "time": time.time(), "message": redact(message)}))
        os.link(temporary, file)  # fails where there is one, and is never seen half written
    except FileExistsError:
        return False
    except OSError:
        return True  # a folder that cannot be written is no reason to say nothing
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return True


def failed_rank(folder: Path, rank: int) -> str | None:
    """Return the rank that failed first, if there is one and it is another than `rank`."""
    try:
        first = json.loads((folder / FAILED).read_text())["rank"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(first) if first != rank else None


def clear_failure(folder: Path) -> None:
    (folder / FAILED).unlink(missing_ok=True)


_lock = []  # held open until the process ends


def lock_run_folder(folder: Path, patience: float = 60) -> None:
    """Hold the run folder for this process; UsageError if another one trains in it and does not end in time.

    The operating system lets go when the process ends, however it ends."""
    import fcntl

    if _lock:
        if reason := held_folder.lost_folder(folder):
            raise UsageError(f"output_dir: {reason} while this process started: give the command again")
        return
    check_links(folder)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    file = _file(folder).open("a")
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(file, folder):  # deleted while this process waited for it
                file.close()
                return lock_run_folder(folder, patience)
            _lock.append(file)
            held_folder.hold(folder)
            return
        except BlockingIOError:
            if time.monotonic() - began > patience:
                raise UsageError(
                    f"output_dir: another process trains in {folder}: end it, or give another --output_dir"
                ) from None
            if time.monotonic() - began < 0.5:
                warn(f"another process trains in {folder}: waiting {patience:g} s for its end")
            time.sleep(0.5)
        except OSError as error:
            warn(f"{folder} cannot be locked ({error.strerror}): make sure that nothing else trains in it")
            held_folder.hold(folder)
            return


def check_links(folder: Path) -> None:
    """Raise UsageError for a file that a run appends to or truncates, and that is a link: a run folder may be somebody else's."""
    for file in (folder / "metrics.jsonl", folder / "ledger.jsonl", *sorted((folder / "logs").glob("*.log"))):
        if file.is_symlink():
            raise UsageError(
                f"output_dir: {file} is a symbolic link to {os.readlink(file)}, which this run would write to: put the file in "
                "its place, or give another --output_dir"
            )


def lost(folder: Path) -> str:
    """Return why the run folder is not this process's any more, or nothing: it was deleted, moved or replaced, or another
    process has locked it after the lock file was deleted. A lock file that is only deleted is made again."""
    import fcntl

    if (reason := held_folder.lost_folder()) or not _lock or _is_at(_lock[0], folder):
        return reason
    time.sleep(SETTLING)  # somebody may be deleting the whole folder
    if reason := held_folder.lost_folder():
        return reason
    try:
        file = _file(folder).open("a")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"another process has locked {folder}"
    except FileNotFoundError:
        return f"{_file(folder).parent} was deleted"
    except OSError:  # looked at again
        return ""
    _lock.append(file)
    _lock.pop(0).close()
    warn(f"{_file(folder)} was deleted: the run folder is locked again", alone=True)
    return ""


def _file(folder: Path) -> Path:
    return folder / "logs" / "rank_0.log"


def _is_at(file, folder: Path) -> bool:
    """Return whether an open lock file is still the one in the folder; also where the file system does not answer."""
    try:
        return os.path.samestat(os.stat(_file(folder)), os.fstat(file.fileno()))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def unlock_run_folder() -> None:
    """Let go of the lock in this process, a child: the one that it was forked from keeps it."""
    while _lock:
        _lock.pop().close()


def wait_for_end(folder: Path) -> None:
    """Return when no process trains in `folder`: a launcher may die before its child has saved."""
    if read_status(folder).get("status") == "running":
        with suppress(UsageError):
            lock_run_folder(folder, patience=SAVING)


def main(argv: list[str]) -> int:
    """Print how a run stands to stderr and its exit code to stdout; or, for --newest, the folder of the newest run."""
    if argv == ["--newest"]:
        print(newest_run(Path("runs"), weights=False) or "")
        return 0
    if not argv or argv[0].startswith("-"):
        print("error: give a run folder: python -m src.runtime.run_status RUN [CODE]", file=sys.stderr)
        return 2
    status = read_status(Path(argv[0]))
    code = status.get("exit_code")
    if status:
        print(f"{argv[0]}: {status['status']}, step {status['step']}. {status['reason']}", file=sys.stderr)
    print(code if code is not None else argv[1] if argv[1:] else 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
