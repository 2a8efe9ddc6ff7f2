"""Work shared by all processes on a disk: file locks, no collectives, failures reach every process.

Tests: tests/storage/test_shared_work.py. Processes know each other by files only, so it works before a process group
exists and without one, among jobs that start together, and on nodes with a common disk as on nodes with one each: who sees
a finished piece does not do it again. A piece is published by a rename and is the same whoever makes it, so a lock that a
file system does not keep costs work, never data.
"""

import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from src.config.errors import Failure, UsageError
from src.config.redact import redact
from src.storage.atomic_folder import fsync

STARTED = time.time()
POLL = 0.1  # seconds between two looks at work that others do
SAY = 10.0  # seconds between two lines about waiting
SLACK = 20.0  # seconds before this process's start in which a word may have been left by its own launch


class SharedWork:
    """The processes of one launch that see `root`: who works at what, who failed and why."""

    def __init__(self, root: str | Path):
        self.root, self.rank = Path(root), os.environ.get("RANK", "0")
        self.host, self.parent = socket.gethostname().replace(".", "-"), os.getppid()
        self.alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE")
        launch = "_".join(os.environ.get(name, "") for name in names).replace("/", "_")
        self.folder = self.root / "crews" / (f"alone_{os.getpid()}" if self.alone else launch)
        self.lock: FileLock | None = None
        self.locks_work = True  # whether the file system keeps locks

    @contextmanager
    def joined(self):
        """Within, the others of the launch hear of a fault, or of this process's death, and stop with its reason."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(self._mine(".lock"))
        with suppress(Timeout):  # held by a process of the same rank: a launcher that starts independent replicas
            self.lock.acquire(timeout=0)
            self.locks_work = not _is_unlocked(self._mine(".lock"))
        self._mine(".failed").unlink(missing_ok=True)
        self._mine(".here").write_text(json.dumps({"time": time.time(), "pid": os.getpid()}))
        try:
            yield
        except BaseException as error:
            self.report_failure(error)
            raise
        finally:
            self._mine(".here").unlink(missing_ok=True)  # before the lock is free: no end without this is a death
            self.lock.release()
            if self.alone or self.rank == "0":
                self._sweep()

    def _mine(self, ending: str) -> Path:
        return self.folder / f"{self.host}_{self.parent}_{self.rank}{ending}"

    def report_failure(self, error: BaseException) -> None:
        """Tell the others of the launch what this process failed with, unless it was told so by one of them."""
        if (
            isinstance(error, KeyboardInterrupt)
            or getattr(error, "reported_elsewhere", False)
            or getattr(error, "already_reported", False)
        ):
            return
        text = redact(str(error) if isinstance(error, UsageError | Failure) else f"{type(error).__name__}: {error}")
        word = {"kind": type(error).__name__, "text": text, "time": time.time()}
        error.already_reported = self._first_to_report(text)
        error.reported_elsewhere = not error.already_reported
        with suppress(OSError):
            temporary = self._mine(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps(word))
            temporary.replace(self._mine(".failed"))

    def _first_to_report(self, text: str) -> bool:
        """Return whether no other process of this launch has met the same fault before."""
        claim = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.said"
        with suppress(OSError):
            if claim.exists() and not self.recent(claim.stat().st_mtime):
                claim.unlink()
            with open(claim, "x") as file:
                file.write(self.rank)
        return not claim.exists() or claim.read_text() in ("", self.rank)  # or a helper of this one has met it

    def _sweep(self) -> None:
        """Remove what this process alone has used, and what launches of yesterday have left."""
        for folder in self.folder.parent.iterdir():
            with suppress(OSError):
                if (self.alone and folder == self.folder) or STARTED - folder.stat().st_mtime > 24 * 3600:
                    shutil.rmtree(folder, ignore_errors=True)

    def raise_if_failed(self) -> None:
        """Raise what another process of this launch failed with, or a Failure if one of this machine died."""
        with suppress(FileNotFoundError):
            for path in [p for p in self.folder.iterdir() if p.suffix in (".failed", ".here")]:
                host, parent, rank = path.stem.rsplit("_", 2)
                near, own = host == self.host, rank == self.rank
                if (near and int(parent) != self.parent) or not (word := _read(path)):
                    continue
                if not self.recent(word["time"], near):
                    continue  # left by an earlier launch of the same name
                if path.suffix == ".failed":
                    kind = UsageError if word["kind"] == "UsageError" else Failure
                    error = kind(word["text"] if kind is UsageError else f"rank {rank}: {word['text']}")
                    error.reported_elsewhere = not own  # who said it prints it, but for a helper process of this one
                    raise error
                if (
                    near
                    and not own
                    and _is_unlocked(path.with_suffix(".lock"))
                    and not _is_alive(word["pid"])
                    and path.exists()
                ):
                    raise Failure(f"rank {rank} ended without a word while data was made ready (killed?)")

    def recent(self, moment: float, near: bool = True) -> bool:
        """Return whether a word of that time can be of this launch, on this machine or (with clocks of their own) another."""
        return moment > STARTED - SLACK * near

    def run_all(self, targets: Sequence[Path], make: Callable[[int], None], what: str) -> None:
        """Return when every target exists: each is made by one process, here or elsewhere, by `make(its number)`.

        `make` leaves its target complete or not at all. What others are at is waited for as long as it takes, with a line
        now and then; it is taken over from a process of another launch that dies."""
        turn = int(self.rank) * len(targets) // int(os.environ.get("WORLD_SIZE", "1"))
        order = [*range(turn, len(targets)), *range(turn)]  # so that ranks begin at different places
        said = time.monotonic()
        for folder in {target.parent for target in targets}:
            folder.mkdir(parents=True, exist_ok=True)
        while missing := [i for i in order if not targets[i].exists()]:
            made = False
            for i in missing:
                self.raise_if_failed()
                with _try_lock(targets[i]) as mine:
                    if mine and not targets[i].exists():
                        self.raise_if_failed()  # once more: who had the lock may have failed meanwhile
                        try:
                            make(i)
                        except BaseException as error:
                            self.report_failure(error)  # before the lock is free: nobody is to try the same again
                            raise
                        made = True
            if not made:
                if time.monotonic() - said > SAY and os.environ.get("LOCAL_RANK", "0") == "0":
                    said = time.monotonic()
                    pieces = f", {len(missing)} of {len(targets)} pieces to go" if len(targets) > 1 else ""
                    print(f"waiting for another process: {what}{pieces}", file=sys.stderr, flush=True)
                time.sleep(POLL)

    @contextmanager
    def exclusive(self, target: Path, what: str):
        """Within, no other process of any launch is at `target`, whose making may be repeated."""
        said = time.monotonic()
        while True:
            with _try_lock(target) as mine:
                if mine:
                    yield
                    return
            self.raise_if_failed()
            if time.monotonic() - said > SAY:
                said = time.monotonic()
                print(f"waiting for another process: {what}", file=sys.stderr, flush=True)
            time.sleep(POLL)

    def run_once(self, target: Path, make: Callable[[], None], what: str) -> None:
        """Return when `target` exists, made by one process: see `share`."""
        self.run_all([target], lambda _: make(), what)


def write_atomic(target: Path, text: str) -> None:
    """Put a file in its place all at once, though another process may be doing the same: a lock is not kept everywhere."""
    temporary = target.with_name(f"{target.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    fsync(temporary)
    temporary.replace(target)


@contextmanager
def _try_lock(target: Path):
    """Hold the lock of `target` if nobody else does, and say whether."""
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


def _is_unlocked(lock: Path) -> bool:
    """Return whether nobody holds a lock any more."""
    with _try_lock(lock.with_suffix("")) as free:
        return free


def _is_alive(pid: int) -> bool:
    """Return whether a process of this machine has not ended: a lock alone may be none, on some file systems."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return True


def _read(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
