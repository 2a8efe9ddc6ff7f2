"""Failures and deaths among the processes of one launch, reported through files.

Works before a process group exists and without one. Reports of an earlier launch with the same name do not count.
Tests: tests/storage/test_shared_work.py.
"""

import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from src.config.errors import Failure, UsageError
from src.config.redact import redact

STARTED = time.time()
START_SPREAD = 20.0  # seconds between the starts of a launch's processes on one host, at most
DAY = 24 * 3600


class LaunchPeers:
    """The processes of this launch that see the folder `root`: which are there, which failed, and why.

    Each has the files HOST_LAUNCHER_RANK.lock (held while it lives), .here (removed at its normal end) and .failed.
    """

    def __init__(self, root: Path):
        self.rank = os.environ.get("RANK", "0")
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.alone = self.world_size == 1
        self.host = socket.gethostname().replace(".", "-")
        self.launcher = os.getppid()
        self.folder = root / "crews" / (f"alone_{os.getpid()}" if self.alone else _launch_name())
        self.locks_work = True  # whether this file system keeps locks; `joined` finds out

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Within, an error or the death of this process stops the other processes of the launch, with the reason."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._own_file(".lock"))
        with suppress(Timeout):  # another process has this rank: a launcher that starts independent replicas
            lock.acquire(timeout=0)
            self.locks_work = not is_unlocked(self._own_file(".lock"))
        self._own_file(".failed").unlink(missing_ok=True)
        self._own_file(".here").write_text(json.dumps({"time": time.time(), "pid": os.getpid()}))
        try:
            yield
        except BaseException as error:
            self.report_failure(error)
            raise
        finally:
            self._own_file(".here").unlink(missing_ok=True)  # before the lock: this file without a lock means a death
            lock.release()
            if self.alone or self.rank == "0":
                self._remove_old_folders()

    def report_failure(self, error: BaseException) -> None:
        """Write the error for the other processes of the launch, unless it came from one of them.

        Sets `already_reported` on the error if this process is to print it, `reported_elsewhere` if another one does.
        """
        known = getattr(error, "reported_elsewhere", False) or getattr(error, "already_reported", False)
        if known or isinstance(error, KeyboardInterrupt):
            return
        text = redact(str(error) if isinstance(error, UsageError | Failure) else f"{type(error).__name__}: {error}")
        is_first = self._is_first_to_report(text)
        vars(error).update(already_reported=is_first, reported_elsewhere=not is_first)
        report = {"kind": type(error).__name__, "text": text, "time": time.time()}
        with suppress(OSError):  # a full disk: the launcher stops the others
            temporary = self._own_file(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps(report))
            temporary.replace(self._own_file(".failed"))

    def raise_if_failed(self) -> None:
        """Raise the error of another process of this launch, or Failure if one on this host died."""
        with suppress(FileNotFoundError):  # the folder does not exist yet, or a process ends and removes its file
            for path in list(self.folder.iterdir()):
                if path.suffix in (".failed", ".here"):
                    self._raise_report(path)

    def _raise_report(self, path: Path) -> None:
        """Raise the error in a `.failed` file; Failure for the `.here` file of a dead process."""
        host, launcher, rank = path.stem.rsplit("_", 2)
        same_host = host == self.host
        if same_host and int(launcher) != self.launcher:
            return
        report = _read_json(path)
        if report is None or not self.is_recent(report["time"], same_host):
            return
        if path.suffix == ".failed":
            raise _reported_error(report, rank, printed_elsewhere=rank != self.rank)  # same rank: a helper process
        if same_host and rank != self.rank and _is_dead(path, report["pid"]):
            raise Failure(f"rank {rank} ended without an error message while data was prepared (killed?)")

    def is_recent(self, moment: float, same_host: bool = True) -> bool:
        """Return whether a report of this time can be of this launch; an earlier one may have had the same name and port.

        Clocks of other hosts differ, so their reports count only from the start of this process on.
        """
        return moment > STARTED - START_SPREAD * same_host

    def remove_if_old(self, path: Path) -> None:
        """Remove a file that an earlier launch of the same name left in `folder`."""
        with suppress(OSError):
            if not self.is_recent(path.stat().st_mtime):
                path.unlink()

    def _own_file(self, ending: str) -> Path:
        return self.folder / f"{self.host}_{self.launcher}_{self.rank}{ending}"

    def _is_first_to_report(self, text: str) -> bool:
        """Return whether this rank is the first of the launch to fail with this message: only it prints the message."""
        claim = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.reported"
        self.remove_if_old(claim)
        with suppress(OSError), open(claim, "x") as file:
            file.write(self.rank)
        # On a full disk there is no file, or an empty one. The own rank is there if a helper process was first.
        return not claim.exists() or claim.read_text() in ("", self.rank)

    def _remove_old_folders(self) -> None:
        """Remove the folder of this launch if no other process uses it, and those of launches before yesterday."""
        for folder in self.folder.parent.iterdir():
            with suppress(OSError):
                if (self.alone and folder == self.folder) or STARTED - folder.stat().st_mtime > DAY:
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def try_lock(target: Path) -> Iterator[bool]:
    """Hold the lock of `target` if it is free; yield whether it was."""
    lock = FileLock(f"{target}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def is_unlocked(lock: Path) -> bool:
    """Return whether no process holds a lock file."""
    with try_lock(lock.with_suffix("")) as free:
        return free


def _launch_name() -> str:
    """Return a name that all processes of a launch have in common, on all nodes."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE")
    return "_".join(os.environ.get(name, "") for name in names).replace("/", "_")


def _reported_error(report: dict, rank: str, printed_elsewhere: bool) -> Exception:
    """Return the error that a rank reported, to be raised in other processes."""
    usage = report["kind"] == "UsageError"
    error = UsageError(report["text"]) if usage else Failure(f"rank {rank}: {report['text']}")
    vars(error).update(reported_elsewhere=printed_elsewhere)
    return error


def _is_dead(here: Path, pid: int) -> bool:
    """Return whether a process of this host has ended and left its `.here` file."""
    return is_unlocked(here.with_suffix(".lock")) and not _is_alive(pid) and here.exists()


def _is_alive(pid: int) -> bool:
    """Return whether a process of this host is running. A free lock alone proves nothing where locks do not work."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return True


def _read_json(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
