"""Tasks that run once per machine or shared disk: one process works, all others get the file or raise the error.

Processes coordinate through files and file locks only, never through a collective. So this works before a process
group exists, between launches that start together, and on nodes with a shared disk or local disks. An atomic rename
publishes each result, and every process would write the same bytes. So a file system that ignores locks only costs
repeated work.

Tests: tests/storage/test_shared_work.py.
"""

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from src.storage.atomic_folder import fsync
from src.storage.peer_failures import LaunchPeers, try_lock

POLL = 0.1  # seconds between two checks if another process has finished
NOTICE_EVERY = 10.0  # seconds between two messages about waiting


class SharedWork:
    """Runner of tasks for all processes that share the folder `root`.

    A task is identified by the file that it publishes. One process runs the task; the others wait. If the task fails,
    all processes of the launch raise its error. If its process dies, they raise Failure.
    """

    def __init__(self, root: str | Path):
        self.root = Path(root)
        self.peers = LaunchPeers(self.root)

    def run_once(self, target: Path, make: Callable[[], None], what: str) -> None:
        """Call `make()`, which creates `target`, in one process. Return when `target` exists."""
        self.run_all([target], lambda _: make(), what)

    def run_all(self, targets: Sequence[Path], make: Callable[[int], None], what: str) -> None:
        """Call `make(index)`, which creates a target, in one process for each target. Return when all targets exist.

        `make` must publish a target atomically. Processes of other launches take part. If one of them dies, its lock is
        released, and another process makes its unfinished target.
        """
        for folder in {target.parent for target in targets}:
            folder.mkdir(parents=True, exist_ok=True)
        first = int(self.peers.rank) * len(targets) // self.peers.world_size  # each rank begins at another target
        order = [*range(first, len(targets)), *range(first)]
        notice = _WaitNotice(what)
        while missing := [i for i in order if not targets[i].exists()]:
            if not self._make_unlocked(missing, targets, make):
                notice.sleep(f", {len(missing)} of {len(targets)} pieces left" if len(targets) > 1 else "")

    def _make_unlocked(self, missing: list[int], targets: Sequence[Path], make: Callable[[int], None]) -> bool:
        """Make each missing target that no other process is making. Return True if there was any."""
        made = False
        for i in missing:
            self.peers.raise_if_failed()
            with try_lock(targets[i]) as locked:
                if not locked or targets[i].exists():
                    continue
                self.peers.raise_if_failed()  # check again: the lock may be free because its holder has failed
                try:
                    make(i)
                except BaseException as error:
                    self.peers.report_failure(error)  # with the lock held, or the next process would try the same
                    raise
                made = True
        return made

    def compute_once(self, key: str, compute: Callable[[], dict], what: str) -> dict:
        """Call `compute()` in one process of this launch. Return its result, a JSON object, in all processes."""
        result = self.peers.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        self.peers.remove_if_old(result)
        self.run_once(result, lambda: write_atomic(result, json.dumps(compute())), what)
        return json.loads(result.read_text())

    @contextmanager
    def exclusive(self, target: Path, what: str) -> Iterator[None]:
        """Hold the lock of `target`, which may exist: no process of any launch can work on it in the meantime."""
        notice = _WaitNotice(what)
        while True:
            with try_lock(target) as locked:
                if locked:
                    yield
                    return
            self.peers.raise_if_failed()
            notice.sleep()


def write_atomic(target: Path, text: str) -> None:
    """Write a file atomically, even if another process writes it, too: some file systems ignore locks."""
    temporary = target.with_name(f"{target.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    fsync(temporary)
    temporary.replace(target)


class _WaitNotice:
    """Prints every NOTICE_EVERY seconds, on local rank 0, which task this process waits for."""

    def __init__(self, what: str):
        self.what = what
        self.printed = time.monotonic()

    def sleep(self, detail: str = "") -> None:
        if time.monotonic() - self.printed > NOTICE_EVERY and os.environ.get("LOCAL_RANK", "0") == "0":
            self.printed = time.monotonic()
            print(f"waiting for another process: {self.what}{detail}", file=sys.stderr, flush=True)
        time.sleep(POLL)
