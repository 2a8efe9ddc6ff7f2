"""Work that all processes on a disk share: each task runs once, and its outcome, a file or an error, reaches everyone.

Processes find each other through files and file locks only, never through a collective. So this works before a process
group exists, between launches that start together, and on nodes with a common disk or one disk each. A result is published
by a rename and has the same bytes in every process: a file system without working locks costs repeated work, never data.

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

POLL = 0.1  # seconds between two looks at work that another process does
NOTICE_EVERY = 10.0  # seconds between two lines about waiting


class SharedWork:
    """Tasks of all processes that see the folder `root`.

    A task is known by the file that it publishes. One process runs it, the others wait for the outcome. If the task fails,
    all processes of the launch raise its error; if its process dies, they raise Failure.
    """

    def __init__(self, root: str | Path):
        self.root = Path(root)
        self.peers = LaunchPeers(self.root)

    def run_once(self, target: Path, make: Callable[[], None], what: str) -> None:
        """Return when `target` exists, made by `make()` in one process."""
        self.run_all([target], lambda _: make(), what)

    def run_all(self, targets: Sequence[Path], make: Callable[[int], None], what: str) -> None:
        """Return when all targets exist, each made by `make(index)` in one process.

        `make` publishes its target complete or not at all. Other launches take part. What one of their processes leaves
        unfinished when it dies is made by another process: its lock is free then.
        """
        for folder in {target.parent for target in targets}:
            folder.mkdir(parents=True, exist_ok=True)
        first = int(self.peers.rank) * len(targets) // self.peers.world_size  # ranks begin at different targets
        order = [*range(first, len(targets)), *range(first)]
        notice = _WaitNotice(what)
        while missing := [i for i in order if not targets[i].exists()]:
            if not self._make_unlocked(missing, targets, make):
                notice.sleep(f", {len(missing)} of {len(targets)} pieces to go" if len(targets) > 1 else "")

    def _make_unlocked(self, missing: list[int], targets: Sequence[Path], make: Callable[[int], None]) -> bool:
        """Make the missing targets that no other process is making; return whether there was one."""
        made = False
        for i in missing:
            self.peers.raise_if_failed()
            with try_lock(targets[i]) as locked:
                if not locked or targets[i].exists():
                    continue
                self.peers.raise_if_failed()  # again: the lock may be free because its holder has failed
                try:
                    make(i)
                except BaseException as error:
                    self.peers.report_failure(error)  # before the lock is free, or the next process would try the same
                    raise
                made = True
        return made

    def compute_once(self, key: str, compute: Callable[[], dict], what: str) -> dict:
        """Return what `compute()` returns, a JSON object; one process of this launch calls it."""
        result = self.peers.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        self.peers.remove_if_old(result)
        self.run_once(result, lambda: write_atomic(result, json.dumps(compute())), what)
        return json.loads(result.read_text())

    @contextmanager
    def exclusive(self, target: Path, what: str) -> Iterator[None]:
        """Within, no other process of any launch works at `target`, which may exist already."""
        notice = _WaitNotice(what)
        while True:
            with try_lock(target) as locked:
                if locked:
                    yield
                    return
            self.peers.raise_if_failed()
            notice.sleep()


def write_atomic(target: Path, text: str) -> None:
    """Write a file all at once, even if another process writes the same one: some file systems do not keep locks."""
    temporary = target.with_name(f"{target.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    fsync(temporary)
    temporary.replace(target)


class _WaitNotice:
    """Prints now and then, on one rank of a host, what its processes wait for."""

    def __init__(self, what: str):
        self.what = what
        self.printed = time.monotonic()

    def sleep(self, detail: str = "") -> None:
        if time.monotonic() - self.printed > NOTICE_EVERY and os.environ.get("LOCAL_RANK", "0") == "0":
            self.printed = time.monotonic()
            print(f"waiting for another process: {self.what}{detail}", file=sys.stderr, flush=True)
        time.sleep(POLL)
