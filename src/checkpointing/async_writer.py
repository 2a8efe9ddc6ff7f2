"""Background writer of checkpoints and the final model: write, hash, publish, delete old ones.

Tests: tests/checkpointing/test_async_writer.py, tests/distributed/test_fsdp2_checkpoints.py. If the model is
replicated, only the main process writes, and no other rank waits for its disk. If the model is sharded, each rank writes
its share of the tensors, and the main process publishes the folder. The background thread never calls a collective.
"""

import logging
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

from src.checkpointing import checkpoint_format, checkpoint_list, model_folder
from src.checkpointing.checkpoint_format import Tensors
from src.checkpointing.sharded_checkpoint import ShardWriters, assign_tensors_to_ranks
from src.config.errors import Failure, warn
from src.distributed.stop_signals import StopSignals
from src.runtime import console
from src.runtime.exit_codes import is_exiting, on_exit
from src.storage import atomic_folder
from src.storage.disk_errors import is_disk_error
from src.training.train_state import Run

log = logging.getLogger("run")
SHARD_TIMEOUT = 600.0  # seconds that the main process's background thread waits for the files of other ranks
EXIT_WAIT = 60.0  # seconds that a process that ends waits for its write; a launcher may kill it sooner
NAME = "checkpoint writer"  # of the thread


def finish_writing(seconds: float | None = None) -> bool:
    """Wait for the write in progress, at most `seconds` (None: EXIT_WAIT); return True if none is in progress.

    Its data are in host memory already, so an error after the copy need not cost the checkpoint."""
    end = time.monotonic() + (EXIT_WAIT if seconds is None else seconds)
    writing = [thread for thread in threading.enumerate() if thread.name == NAME]  # a writer would hold the model
    for thread in writing:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in writing)


class CheckpointWriter:
    """The background thread that writes a run's checkpoints one at a time, and the results of its writes."""

    def __init__(self, run: Run, stop_signals: StopSignals):
        self.cfg, self.model, self.stop_signals = run.cfg, run.model, stop_signals
        self.files = run.files  # flushed before each checkpoint, so that they hold every step that the checkpoint knows
        accelerator = run.strategy.accelerator
        self.folder, self.is_main = Path(run.cfg.output_dir), accelerator.is_main_process
        self.precision = accelerator.mixed_precision
        self.is_sharded = run.strategy.is_sharded
        self.all_ranks_write = self.is_sharded and accelerator.num_processes > 1
        self.rank, self.world = 0, 1  # among the ranks that write
        if self.all_ranks_write:
            self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.writes = self.is_main or self.all_ranks_write
        self.shards = ShardWriters(self.rank, self.world, SHARD_TIMEOUT)
        self.folders_started = 0  # the same number on all ranks that write
        self.memory = checkpoint_format.HostCopy()
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None  # exception of the last write, which failed() raises
        self.failures, self.reason = 0, ""  # failed checkpoints in a row, and why the last one failed
        self.saved: tuple[int | None, int | None] = (None, None)  # (step, last evaluation) of the newest checkpoint
        self.pauses: list[float] = []  # seconds for which each saved checkpoint paused training
        on_exit(finish_writing)

    # ---- called by the main thread -----------------------------------------------------------------------------------

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` for the write in progress; return True if none is in progress any more."""
        if self.thread is not None:
            self.thread.join(seconds)
            if self.thread.is_alive():
                return False
            self.thread = None
        return True

    def failed(self) -> float:
        """Return 1 if the run must end because `max_failed_saves` checkpoints in a row failed, else 0.

        Raise the stored exception of the last write: an error of code, which ends the run with its traceback. A disk
        error of a checkpoint is not stored, only counted."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return float(self.failures >= self.cfg.max_failed_saves)

    def disk_error(self, tensors: dict[str, Tensors]) -> OSError | None:
        """Flush the run's files. Return an OSError if the disk cannot take another checkpoint, else None."""
        try:
            for file in self.files:  # a checkpoint must not be ahead of metrics.jsonl
                file.flush()
            # The old checkpoints stay until the new one is complete.
            needed = sum(value.nbytes for named in tensors.values() for value in named.values()) + (1 << 20)
            self.folder.mkdir(parents=True, exist_ok=True)
            checkpoints = self.folder / "checkpoints"  # may be on another disk
            free = shutil.disk_usage(checkpoints if checkpoints.exists() else self.folder).free
            if free < needed:
                return OSError(28, f"{needed / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free")
        except OSError as error:
            return error
        return None

    def copy_to_host(self, tensors: dict[str, Tensors]) -> dict[str, Tensors]:
        """Return the tensors that this rank writes, in host memory; a collective for sharded tensors."""
        if not self.all_ranks_write:
            return self.memory.take(tensors)
        self.folders_started += 1
        rank_of = assign_tensors_to_ranks(tensors, self.world)
        return self.memory.take(tensors, {key for key, rank in rank_of.items() if rank == self.rank})

    def write_checkpoint(self, tensors: dict[str, Tensors], state: dict, paused: float, copying: float) -> None:
        """Start writing a checkpoint. Training was paused for `paused` seconds, including `copying` for the copy."""
        self._start(lambda: self._write_checkpoint(tensors, state, paused, copying))

    def start(self, work: Callable[[], None]) -> None:
        """Start `work()`, which is about final/; a disk error there ends the run."""

        def work_or_failure() -> None:
            try:
                work()
            except BaseException as error:
                text = f"{self.folder / 'final'} could not be written: {error}; run the same command again"
                self.error = Failure(text) if is_disk_error(error) else error

        self._start(work_or_failure)

    def _start(self, work: Callable[[], None]) -> None:
        self.thread = threading.Thread(target=work, name=NAME, daemon=True)
        self.thread.start()

    def save_failed(self, step: int, error: BaseException) -> None:
        """Count and report a checkpoint that could not be written."""
        self.failures += 1
        self.reason = f"{getattr(error, 'strerror', None) or error} ({self.folder})"
        most = self.cfg.max_failed_saves
        what = "training continues" if self.failures < most else "the run ends"
        warn(
            f"THE CHECKPOINT OF STEP {step} COULD NOT BE SAVED: {self.reason}. Older checkpoints are intact; {what} "
            f"({self.failures} failed in a row; max_failed_saves is {most})"
        )

    def summary(self) -> str:
        """Format the number of checkpoints and the median pause of training, or a warning if the last save failed."""
        if self.failures:
            return f"warning: the last checkpoint could not be saved ({self.reason}); the final model is complete"
        if not self.pauses:
            return ""
        pause, count = statistics.median(self.pauses), len(self.pauses)
        each = "each" if count > 1 else "it"
        return f"{count} checkpoint{'s' * (count > 1)} saved; training paused {pause:.3f} s for {each}"

    # ---- in the thread -----------------------------------------------------------------------------------------------

    def _write_checkpoint(self, tensors: dict[str, Tensors], state: dict, paused: float, copying: float) -> None:
        began, train_state = time.perf_counter(), state["progress"]
        step = train_state["step"]
        folder = self.folder / "checkpoints" / f"step_{step:08d}"

        def write(temporary: Path) -> None:
            checkpoint_format.write_checkpoint(temporary, self.model, tensors, state, self.rank, self.world)

        try:
            for file in self.files:
                if file.path.exists():  # it does not exist before its first line
                    atomic_folder.fsync(file.path)
            self.publish(folder, write, step)
            self.failures = 0
            if self.is_main:
                self.saved = (step, train_state["evaluated"])
                self.pauses.append(paused)
                self._delete_old(train_state["best_step"])
                size = sum({id(value): value.nbytes for named in tensors.values() for value in named.values()}.values())
                log.info(
                    f"step {step} saved: training paused {paused:.3f} s, {copying:.3f} s of it to copy {size / 1e6:,.1f} MB to "
                    f"the host; written in the background in {time.perf_counter() - began:.3f} s"
                )
                if not is_exiting():  # keep the error of a failed rank the last thing that it prints
                    console.stamped(f"step {step} saved in {folder}; training paused {paused:.3f} s for it")
        except Failure as error:  # another rank's error: that rank ends the run with its traceback
            log.error("the checkpoint of step %s is not saved: %s", step, error)
        except BaseException as error:
            if is_disk_error(error):
                self.save_failed(step, error)
            else:
                self.error = error
        self.stop_signals.save_seconds = max(self.stop_signals.save_seconds, time.perf_counter() - began)

    def publish(
        self,
        folder: Path,
        write: Callable[[Path], None],
        step: int,
        complete: Callable[[Path], bool] = lambda folder: False,
        alone: bool = False,
    ) -> None:
        """Write and publish `folder` on the main process; on other ranks write this rank's shard for it.

        `complete(temporary folder)`, on the main process, adds files; it returns whether it has changed others. `alone`:
        only the main process writes."""
        shards = folder.with_name(f".{folder.name}.{self.folders_started}.parts")
        if not self.is_main:
            self.shards.write_shard(shards, write)
            return

        def write_and_collect(temporary: Path) -> dict:
            write(temporary)
            entries = {}
            if self.all_ranks_write and not alone:
                entries = self.shards.collect_shards(shards, temporary)
                model_folder.write_index(temporary)
            return {} if complete(temporary) else entries

        atomic_folder.publish(folder, write_and_collect, step=step, mixed_precision=self.precision)

    def _delete_old(self, best_step: int) -> None:
        try:
            atomic_folder.remove_unfinished(self.folder / "checkpoints", "step_*")
            checkpoint_list.prune(self.cfg, best_step)
        except OSError as error:
            warn(f"old checkpoints in {self.folder} cannot be removed ({error.strerror}); the next save tries again")
