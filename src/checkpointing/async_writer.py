"""Write checkpoints and the final model in a thread beside training: copy, hash, publish, delete old ones.

Tests: tests/checkpointing/test_async_writer.py, tests/distributed/test_fsdp2.py. Of a replicated model only the main
process writes, and no other rank waits for its disk. Of a sharded model each process writes its share of the files, and
the main process publishes the folder. Nothing here is a collective: checkpointer.py decides together with all ranks.
"""

import logging
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError

from src.checkpointing import checkpoint_format, checkpoint_list, final_model, host_copy, model_folder
from src.checkpointing.sharded_checkpoint import ShardWriters, assign_tensors_to_ranks
from src.config.errors import Failure, warn
from src.config.schema import RunConfig
from src.distributed.stop_signals import StopSignals
from src.distributed.strategies import Strategy
from src.runtime import console, run_status
from src.storage import atomic_folder, lost_run_folder
from src.storage.jsonl import JsonlWriter
from src.training.step import ModelWithLoss
from src.training.train_state import TrainState

Tensors = dict[str, torch.Tensor]  # by name
log = logging.getLogger("run")
SHARD_TIMEOUT = 600.0  # seconds that the main process's thread waits for the files of other ranks; training continues


class CheckpointWriter:
    """The thread that writes the folders of one run, one at a time, and what became of them."""

    def __init__(
        self,
        cfg: RunConfig,
        strategy: Strategy,
        model: ModelWithLoss,
        files: list[JsonlWriter],
        stop_signals: StopSignals,
    ):
        """A checkpoint is never ahead of `files`: they are flushed before it is written."""
        self.cfg, self.model, self.files, self.stop_signals = cfg, model, files, stop_signals
        self.folder, self.is_main = Path(cfg.output_dir), strategy.accelerator.is_main_process
        self.precision = strategy.accelerator.mixed_precision
        self.is_sharded = strategy.is_sharded
        self.all_ranks_write = self.is_sharded and strategy.accelerator.num_processes > 1
        self.rank, self.world = 0, 1  # of the ranks that write
        if self.all_ranks_write:
            self.rank, self.world = strategy.accelerator.process_index, strategy.accelerator.num_processes
        self.writes = self.is_main or self.all_ranks_write
        self.shards = ShardWriters(self.rank, self.world, SHARD_TIMEOUT)
        self.folders_started = 0  # the same number on all ranks that write
        self.memory = host_copy.HostCopy()
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None  # of the last write, not raised yet
        self.failures, self.reason = 0, ""  # failed checkpoints in a row, and why the last one failed
        self.saved: tuple[int | None, int | None] = (None, None)  # (step, last evaluation) of the newest checkpoint
        self.final_step: int | None = None  # step of the weights in final/
        self.pauses: list[float] = []  # seconds that training stood still for each checkpoint

    # ---- called by the main thread -----------------------------------------------------------------------------------

    def wait(self, seconds: float | None = None) -> bool:
        """Return whether nothing is being written any more, after waiting at most `seconds` for it."""
        if self.thread is not None:
            self.thread.join(seconds)
            if self.thread.is_alive():
                return False
            self.thread = None
        return True

    def failed(self) -> float:
        """Return 1 if the run is to end because `max_failed_saves` checkpoints in a row failed, else 0.

        Raise an error of the last write that is not the disk's."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return float(self.failures >= self.cfg.max_failed_saves)

    def disk_error(self, tensors: dict[str, Tensors]) -> OSError | None:
        """Flush the run's files, and return why the disk does not take another checkpoint, if it does not."""
        try:
            for file in self.files:  # a checkpoint never knows more steps than the lines beside it
                file.flush()
            # The old checkpoints stay until the new one is complete.
            needed = sum(value.nbytes for named in tensors.values() for value in named.values()) + (1 << 20)
            lost_run_folder.check_held(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            checkpoints = self.folder / "checkpoints"  # which may be another disk
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
        """Start writing a checkpoint from host memory; training has waited `paused` seconds, `copying` of them to copy."""
        self.pauses.append(paused)
        self._start(self._write_checkpoint, tensors, state, copying)

    def write_final(self, tensors: Tensors | None, state: TrainState, config: dict) -> None:
        """Start writing final/ from the model of the last step."""

        def write(folder: Path) -> None:
            model_folder.write_final(folder, self.cfg, self.model, tensors, self.rank, self.world, config)
            final_model.complete_card(folder, self.cfg, state, state.step)

        self.final_step = state.step
        self._start(self._write_final, lambda: self._publish(self.folder / "final", write, state.step))

    def copy_final(self, candidates: list[Path | None], state: TrainState, config: dict) -> None:
        """Start making final/ a copy of the model in the first intact checkpoint of `candidates`."""
        folder = self.folder / "final"

        def card(temporary: Path, step: int) -> None:
            model_folder.write_card(temporary, self.cfg, self.model.model, config)
            final_model.complete_card(temporary, self.cfg, state, step)

        def copy() -> None:
            self.final_step = final_model.publish_copy(folder, candidates, card, self.precision)

        self._start(self._write_final, copy)

    def save_failed(self, step: int, error: Exception) -> None:
        """Count and report a checkpoint that the disk did not take."""
        if lost_run_folder.lost_folder(self.folder):
            return  # StopSignals ends this process at its next look, and says why
        self.failures += 1
        self.reason = f"{getattr(error, 'strerror', None) or error} ({self.folder})"
        warn(
            f"THE CHECKPOINT OF STEP {step} COULD NOT BE SAVED: {self.reason}. The ones before it are untouched, training "
            f"continues; failure {self.failures} of {self.cfg.max_failed_saves} in a row, after which the run ends"
        )

    def summary(self) -> str:
        """Return how often training was paused for a checkpoint and for how long, or that the last one failed."""
        if self.failures:
            return f"warning: the last checkpoint could not be saved ({self.reason}); the final model is complete"
        if not self.pauses:
            return ""
        pause, count = statistics.median(self.pauses), len(self.pauses)
        each = "each" if count > 1 else "it"
        return f"{count} checkpoint{'s' * (count > 1)} saved; training paused {pause:.3f} s for {each}"

    # ---- in the thread -----------------------------------------------------------------------------------------------

    def _start(self, work: Callable, *args) -> None:
        self.thread = threading.Thread(target=work, args=args, name="checkpoint writer", daemon=True)
        self.thread.start()

    def _write_checkpoint(self, tensors: dict[str, Tensors], state: dict, copying: float) -> None:
        began, train_state = time.perf_counter(), state["progress"]
        step = train_state["step"]
        folder = self.folder / "checkpoints" / f"step_{step:08d}"

        def write(temporary: Path) -> None:
            checkpoint_format.write_checkpoint(temporary, self.model, tensors, state, self.rank, self.world)

        try:
            for file in self.files:
                if file.path.exists():  # not before its first line
                    atomic_folder.fsync(file.path)
            self._publish(folder, write, step)
            self.failures = 0
            if self.is_main:
                self.saved = (step, train_state["evaluated"])
                self._delete_old(train_state["best_step"])
                self._report_saved(folder, tensors, copying, time.perf_counter() - began)
        except (OSError, SafetensorError) as error:
            if _is_disk_error(error):
                self.save_failed(step, error)
            else:
                self.error = error
        except BaseException as error:
            self.error = error
        self.stop_signals.save_seconds = max(self.stop_signals.save_seconds, time.perf_counter() - began)

    def _write_final(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, SafetensorError) as error:
            self.error = Failure(f"{self.folder / 'final'} could not be written: {error}; the same command tries again")
        except BaseException as error:
            self.error = error

    def _publish(self, folder: Path, write: Callable[[Path], None], step: int) -> None:
        """Publish what all ranks write, on the main process; on other ranks hand over this rank's files."""
        lost_run_folder.check_held(folder)
        if not self.all_ranks_write:
            atomic_folder.publish(folder, write, step=step, mixed_precision=self.precision)
            return
        shards = folder.with_name(f".{folder.name}.{self.folders_started}.parts")
        if not self.is_main:
            self.shards.write_shard(shards, write)
            return

        def write_and_collect(temporary: Path) -> dict:
            write(temporary)
            entries = self.shards.collect_shards(shards, temporary)
            model_folder.write_index(temporary)
            return entries

        atomic_folder.publish(folder, write_and_collect, step=step, mixed_precision=self.precision)

    def _report_saved(self, folder: Path, tensors: dict[str, Tensors], copying: float, seconds: float) -> None:
        step = self.saved[0]
        size = sum({id(value): value.nbytes for named in tensors.values() for value in named.values()}.values())
        pause = self.pauses[-1]
        log.info(
            f"step {step} saved: training paused {pause:.3f} s, {copying:.3f} s of it to copy {size / 1e6:,.1f} MB to the host; "
            f"written, hashed and published beside training in {seconds:.3f} s"
        )
        if not run_status.failed_rank(self.folder, -1):  # a failed rank's traceback is to stay the last thing printed
            console.stamped(f"step {step} saved in {folder}; training paused {pause:.3f} s for it")

    def _delete_old(self, best_step: int) -> None:
        try:
            lost_run_folder.check_held(self.folder)
            atomic_folder.remove_leftovers(self.folder / "checkpoints")
            checkpoint_list.prune(self.cfg, best_step)
        except OSError as error:
            warn(f"old checkpoints in {self.folder} cannot be removed ({error.strerror}); the next save tries again")


def _is_disk_error(error: Exception) -> bool:
    return isinstance(error, OSError) or "os error" in str(error)  # safetensors wraps those of the system
