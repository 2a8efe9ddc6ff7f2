"""Reports of errors and dead processes between the ranks of one launch, through files.

This works without a process group. Reports of an earlier launch with the same name are ignored.
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
from typing import Any

import psutil
from filelock import FileLock, Timeout

from src.config.errors import Failure, UsageError
from src.config.redact import redact
from src.storage.atomic_folder import read_json
from src.storage.disk_errors import is_unwritable

STARTED = time.time()
START_SPREAD = 20.0  # seconds within which all processes of a launch start on one host
DAY = 24 * 3600
current: "LaunchPeers | None" = None  # of the launch of this process, since it has prepared its data


class LaunchPeers:
    """The processes of this launch that share the folder `root`: which are alive, which failed, and with which error.

    Each process has files HOST_LAUNCHER_RANK with the endings .lock (locked while the process lives), .here (removed by
    the process when it ends; a killed process leaves it) and .failed (its error).
    """

    def __init__(self, root: Path):
        self.rank = os.environ.get("RANK", "0")
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.alone = self.world_size == 1
        self.host = socket.gethostname().replace(".", "-")
        self.launcher = os.getppid()
        self.earliest = _earliest_report(self.launcher)
        self.root = root
        self.folder = root / "crews" / self._launch_name()
        self.has_prepared = False  # the data of this process
        self.locks_work = True  # False if `joined` finds that file locks have no effect on this file system

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Stop the other processes of the launch, with the reason, if this one fails or dies in this context."""
        global current
        current = None if self.alone else self
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._own_file(".lock"))
        with suppress(Timeout):  # the launcher starts independent replicas: another process has this rank
            lock.acquire(timeout=0)
            self.locks_work = not is_unlocked(self._own_file(".lock"))
        self._own_file(".failed").unlink(missing_ok=True)
        self._own_file(".here").write_text(json.dumps({"time": time.time(), "pid": os.getpid()}))
        try:
            yield
            self.has_prepared = True
        except BaseException as error:
            self.report_failure(error)
            raise
        finally:
            self._own_file(".here").unlink(missing_ok=True)  # before the lock: .here without a held lock means a death
            lock.release()
            if self.alone or self.rank == "0":
                self._remove_old_folders()

    def report_failure(self, error: BaseException) -> None:
        """Write `error` to a file for the other processes of the launch, unless one of them reported it.

        Set `already_reported` on the error if this process must print it, `reported_elsewhere` if another process does.
        """
        known = getattr(error, "reported_elsewhere", False) or getattr(error, "already_reported", False)
        if known or isinstance(error, KeyboardInterrupt):
            return
        text = redact(str(error) if isinstance(error, UsageError | Failure) else f"{type(error).__name__}: {error}")
        is_first = self._is_first_to_report(text)
        vars(error).update(already_reported=is_first, reported_elsewhere=not is_first)
        report: dict[str, Any] = {"kind": type(error).__name__, "text": text, "time": time.time()}
        report["prepared"] = _has_prepared()
        if isinstance(error, OSError) and is_unwritable(error, self.root):
            report["os_error"] = [error.errno, error.strerror, str(error.filename)]
        with suppress(OSError):  # on a full disk only the launcher stops the other processes
            temporary = self._own_file(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps(report))
            temporary.replace(self._own_file(".failed"))

    def other_error(self) -> Exception | None:
        """Return the error that another process of this launch reported, or None; a death is no report."""
        try:
            self._raise_reports(".failed")
        except (UsageError, Failure, OSError) as error:
            return error
        return None

    def raise_if_failed(self) -> None:
        """Raise the error that another process of this launch reported, or Failure if a process of this host died."""
        self._raise_reports(".failed", ".here")

    def _raise_reports(self, *endings: str) -> None:
        with suppress(FileNotFoundError):  # the folder does not exist yet, or a process ends and removes its file
            for path in list(self.folder.iterdir()):
                if path.suffix in endings:
                    self._raise_report(path)

    def _raise_report(self, path: Path) -> None:
        """Raise the error in a `.failed` file, or Failure if the process of a `.here` file is dead."""
        host, launcher, rank = path.stem.rsplit("_", 2)
        same_host = host == self.host
        if same_host and int(launcher) != self.launcher:
            return
        report = read_json(path)
        if not report or not self.is_recent(report["time"], same_host):
            return
        if (
            report.get("prepared") and not _has_prepared()
        ):  # of an earlier launch: no rank trains while one prepares data
            return
        if path.suffix == ".failed":
            raise _reported_error(report, rank, printed_elsewhere=rank != self.rank)  # same rank: its worker
        if same_host and rank != self.rank and _is_dead(path, report["pid"]):
            raise Failure(f"rank {rank} ended without an error message during data preparation (was it killed?)")

    def is_recent(self, moment: float, same_host: bool = True) -> bool:
        """Return True if a report of this time can be from this launch, not from an earlier one with the same name.

        Clocks of other hosts differ, so a report from another host must be newer than the start of this process.
        """
        return moment > (self.earliest if same_host else STARTED)

    def remove_if_old(self, path: Path) -> None:
        """Remove a file in `folder` if an earlier launch with the same name left it there."""
        with suppress(OSError):
            if not self.is_recent(path.stat().st_mtime):
                path.unlink()

    def _launch_name(self) -> str:
        """Return the name of this launch, which is the same in all its processes on all nodes.

        Launches on one host have its name in theirs: on another host with this disk, the rest may be the same."""
        if self.alone:
            return f"{self.host}_alone_{os.getpid()}"
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE")
        words = [os.environ.get(name, "") for name in names]
        host = [self.host] if os.environ.get("LOCAL_WORLD_SIZE") == str(self.world_size) else []
        return "_".join(host + words).replace("/", "_")

    def _own_file(self, ending: str) -> Path:
        return self.folder / f"{self.host}_{self.launcher}_{self.rank}{ending}"

    def _is_first_to_report(self, text: str) -> bool:
        """Return True if this rank is the first of its launcher to fail with this message. Only that rank prints it."""
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        claim = self.folder / f"{self.host}_{self.launcher}_{digest}.reported"
        self.remove_if_old(claim)
        with suppress(OSError), open(claim, "x") as file:
            file.write(self.rank)
        # On a full disk the file is missing or empty. It names this rank if a worker process of this rank was first.
        return not claim.exists() or claim.read_text() in ("", self.rank)

    def _remove_old_folders(self) -> None:
        """Remove the folder of this launch if it has only this process, and folders of launches over a day old."""
        for folder in self.folder.parent.iterdir():
            with suppress(OSError):
                if (self.alone and folder == self.folder) or STARTED - folder.stat().st_mtime > DAY:
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def try_lock(target: Path) -> Iterator[bool]:
    """Take the lock of `target` if it is free, and hold it in this context. Yield True if it was free."""
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
    """Return True if no process holds this lock file."""
    with try_lock(lock.with_suffix("")) as free:
        return free


def wait_for_local_rank_0(seconds: float) -> None:
    """Wait until the other process of this launcher with LOCAL_RANK 0 has ended, for at most `seconds`."""
    siblings, found = [], []
    with suppress(psutil.Error):
        siblings = psutil.Process(os.getppid()).children()
    for process in siblings:
        with suppress(psutil.Error):  # of one that has ended
            if process.pid != os.getpid() and process.environ().get("LOCAL_RANK") == "0":
                found.append(process.pid)
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(map(_is_alive, found)):  # one that its launcher has not reaped has ended
        time.sleep(0.05)


def _has_prepared() -> bool:
    return current is not None and current.has_prepared


def _earliest_report(launcher: int) -> float:
    """Return the time before which no process of this launch can have reported anything on this host.

    A restarted container may give its launcher the same process number again."""
    with suppress(psutil.Error):
        return max(STARTED - START_SPREAD, psutil.Process(launcher).create_time() - 1)  # it is rounded to a second
    return STARTED - START_SPREAD


def _reported_error(report: dict, rank: str, printed_elsewhere: bool) -> Exception:
    """Return the exception for an error that another process reported.

    For an unwritable disk it is the same OSError, so that all ranks explain it alike and exit with the same code."""
    if "os_error" in report:
        return OSError(*report["os_error"])
    usage = report["kind"] == "UsageError"
    error = UsageError(report["text"]) if usage else Failure(f"rank {rank}: {report['text']}")
    vars(error).update(reported_elsewhere=printed_elsewhere)
    return error


def _is_dead(here: Path, pid: int) -> bool:
    """Return True if a process of this host has died: it is gone, but its `.here` file is still there."""
    return is_unlocked(here.with_suffix(".lock")) and not _is_alive(pid) and here.exists()


def _is_alive(pid: int) -> bool:
    """Return True if a process of this host is running. A free lock is no proof if the file system ignores locks."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return True
