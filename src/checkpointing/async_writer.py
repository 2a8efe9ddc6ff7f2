"""Background writer of checkpoints and the final model: files in a temporary folder, hashes, one rename.

Tests: tests/checkpointing/test_async_writer.py, tests/checkpointing/test_sharded.py. If the model is replicated, only the
main process writes, and no other rank waits for its disk. If the model is sharded, each rank writes its share of the
tensors, and the main process publishes the folder. The background thread never calls a collective.
"""

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from src.checkpointing.tensor_files import write_index
from src.config.errors import DiskError, Failure, UsageError, is_disk_error, warn
from src.distributed.backends import Backend
from src.distributed.host_group import HostGroup
from src.runtime.exit_codes import on_exit
from src.storage import atomic_folder

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger("run")
SHARD_TIMEOUT = 600.0  # seconds that the main process's background thread waits for the files of other ranks
EXIT_WAIT = 60.0  # seconds that a process that ends waits for its write; a launcher may kill it sooner
NAME = "checkpoint writer"  # of the thread


def finish_writing(seconds: float | None = None) -> bool:
    """Wait for the write in progress, at most `seconds` (None: EXIT_WAIT); return True if none is in progress.

    Its data are in host memory already, so an error after the copy need not cost the checkpoint."""
    writing = [thread for thread in threading.enumerate() if thread.name == NAME]  # a writer would hold the model
    for thread in writing:
        thread.join(EXIT_WAIT if seconds is None else seconds)
    return not any(thread.is_alive() for thread in writing)


class BackgroundWriter:
    """Writes folders one at a time in a background thread; counts failures of the disk."""

    def __init__(self, backend: Backend, max_failures: int):
        self.accelerator, self.hosts, self.max_failures = backend.accelerator, backend.hosts, max_failures
        self.is_main = self.accelerator.is_main_process
        self.rank, self.world = 0, 1  # among the ranks that write
        if backend.is_sharded:
            self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        self.writes = self.is_main or self.world > 1
        self.folders = 0  # folders started, the same number on all ranks that write
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None  # of code, in the last write
        self.failures, self.reason = 0, ""  # failed writes in a row, and why the last one failed
        self.slowest = 0.0  # seconds of the slowest write
        on_exit(finish_writing)

    def start(self, what: str, work: Callable[[], None]) -> None:
        """Start `work()`, which writes `what`. A failure of the disk is counted, an error of code kept in `error`."""

        def work_or_error() -> None:
            began = time.perf_counter()
            try:
                work()
                self.failures = 0
            except Failure as error:  # another rank's error of code: that rank ends the run with its traceback
                log.error("%s is not saved: %s", what, error)
            except BaseException as error:
                if is_disk_error(error):
                    self._count_failure(what, error)
                else:
                    self.error = error
            self.slowest = max(self.slowest, time.perf_counter() - began)

        self.folders += 1
        self.thread = threading.Thread(target=work_or_error, name=NAME, daemon=True)
        self.thread.start()

    def _count_failure(self, what: str, error: BaseException) -> None:
        self.failures += 1
        self.reason = getattr(error, "strerror", None) or str(error)
        warn(
            f"{what} COULD NOT BE SAVED: {self.reason}. Older checkpoints are intact; "
            f"{'training continues' if self.failures < self.max_failures else 'the run ends'} ({self.failures} failed in a "
            f"row; max_failed_saves is {self.max_failures})"
        )

    def failed(self) -> bool:
        """Return whether too many writes in a row failed on this rank; raise an error of code."""
        if self.error is not None:
            raise self.error
        return self.failures >= self.max_failures

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the write in progress; return True if none is in progress any more."""
        if self.thread is not None:
            self.thread.join(seconds)
        return self.thread is None or not self.thread.is_alive()

    def is_busy(self, seconds: float) -> bool:
        """Wait like `wait`; return whether a rank that writes still does. Only these ranks call this, a collective."""
        busy = float(not self.wait(seconds))
        return bool(self.hosts.sum([busy])[0] if self.world > 1 else busy)

    def wait_on_all_ranks(self) -> None:
        """Wait until no rank writes. All ranks check once a second, so that no collective times out on a slow disk."""
        while self.hosts.sum([0.0 if self.wait(1.0) else 1.0])[0]:
            pass

    def finish(self) -> bool:
        """Wait until no rank writes; return whether the last write succeeded on every rank."""
        self.wait_on_all_ranks()
        self.failed()  # raises an error of code before the others are asked: this rank has the traceback
        return not self.hosts.sum([float(self.failures)])[0]

    def publish(
        self,
        folder: Path,
        step: int,
        write: Callable[[Path], None],
        complete: Callable[[Path], bool] = lambda folder: False,
    ) -> None:
        """Write and publish `folder` on the main process; on other ranks write this rank's shard for it.

        `complete(temporary folder)`, on the main process, adds files; it returns whether it has changed others."""
        shards = folder.with_name(f".{folder.name}.{self.folders}.parts")
        if not self.is_main:
            return write_shard(shards, self.rank, write)

        def write_and_collect(temporary: Path) -> dict:
            write(temporary)
            entries = {}
            if self.world > 1:
                entries = collect_shards(shards, self.world, temporary)
                write_index(temporary)
            return {} if complete(temporary) else entries

        precision = self.accelerator.mixed_precision
        atomic_folder.publish(folder, write_and_collect, step=step, mixed_precision=precision)


# ---- ranks that write a folder together on a shared disk -------------------------------------------------------------


def write_shard(shards: Path, rank: int, write: Callable[[Path], None]) -> None:
    """Write this rank's files to SHARDS/RANK, and their hashes or the error to SHARDS/RANK.json.

    RANK.json is written last, so its existence tells the main process that the files are complete."""
    folder, outcome = shards / str(rank), shards / f"{rank}.json"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        write(folder)
        files = sorted(path for path in folder.iterdir() if path.is_file())
        for path in files:
            atomic_folder.fsync(path)
        result = {"files": {path.name: atomic_folder.hash_file(path) for path in files}}
    except Exception as error:
        atomic_folder.rewrite(outcome, json.dumps({"error": str(error), "disk": is_disk_error(error)}))
        if not is_disk_error(error):
            raise
    else:
        atomic_folder.rewrite(outcome, json.dumps(result))


def collect_shards(shards: Path, world: int, folder: Path, patience: float = SHARD_TIMEOUT) -> dict[str, dict]:
    """Move all other ranks' files into `folder`; return their hashes.

    Raise DiskError if a rank's disk failed or a rank is late, Failure if a rank has an error that ends the run."""
    end, hashes = time.monotonic() + patience, {}
    for rank in range(1, world):
        outcome = shards / f"{rank}.json"
        while not outcome.exists():
            if time.monotonic() > end:
                raise DiskError(None, f"rank {rank} has not written its shard in {patience:g} s")
            time.sleep(0.02)
        result = json.loads(outcome.read_text())
        if "error" in result:
            text = f"{result['error']}, on rank {rank}"
            raise DiskError(None, text) if result["disk"] else Failure(text)
        for name in result["files"]:
            (shards / str(rank) / name).rename(folder / name)
        hashes |= result["files"]
    shutil.rmtree(shards, ignore_errors=True)
    return hashes


def check_shared_folder(accelerator: "Accelerator", hosts: HostGroup, folder: Path) -> None:
    """Raise UsageError on every rank if any rank does not see the main process's `folder`."""
    marker = folder / ".seen"
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_text("")
    hosts.sum([0.0])  # a barrier
    missing = hosts.sum([float(not marker.exists())])[0]
    if accelerator.is_main_process:
        marker.unlink()
    if missing:
        raise UsageError(
            f"output_dir: {missing:.0f} processes do not see {folder.resolve()} of the main process, but each writes its shard "
            "of a checkpoint there: give a folder on a disk that all nodes share"
        )
