"""Save beside training: copy to the host, then write, verify, publish and prune in a thread.

Tests: tests/checkpointing/test_async_writer.py, tests/distributed/test_fsdp2.py. Of a replicated model only the main process writes, and no
other waits for its disk; of a sharded one each process writes a share of the files, and the main process publishes them.
"""

import logging
import shutil
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError

from src.checkpointing import checkpoint_list, format, host_copy, model_folder
from src.checkpointing import final_model as final
from src.checkpointing.sharded import ShardWriters, assign_tensors_to_ranks, check_shared_folder
from src.config.errors import Failure, Stopped, UsageError, optional, warn
from src.config.schema import RunConfig
from src.distributed.init_accelerator import num_nodes
from src.distributed.strategies import Strategy
from src.runtime import console, run_status
from src.storage import atomic_folder, held_folder
from src.storage.jsonl import strict_json
from src.training.state import Intervals, TrainState
from src.training.step import ModelWithLoss

log = logging.getLogger("run")
PATIENCE = 60.0  # seconds that a save waits for the one before it; other ranks wait as long in their next reduction
SHARES = 600.0  # seconds that the main process's writer waits for what the others write; training goes on meanwhile


class CheckpointWriter:
    """Writes checkpoints of one run; at most one is under way."""

    def __init__(
        self,
        strategy: Strategy,
        host_group,
        cfg: RunConfig,
        model_with_loss: ModelWithLoss,
        parts: dict,
        about: dict,
        watch,
        lines,
        start,
    ):
        """`parts` are saved beside the model (see checkpoint.tensors_of); `about` goes into state.json as it is; `lines`
        are files that a checkpoint must not be ahead of; `start` is the checkpoint that the run goes on from, or None."""
        self.strategy, accelerator = strategy, strategy.accelerator
        self.main, self.scaler, self.cfg = accelerator.is_main_process, accelerator.scaler, cfg
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.turn = 0  # folders that all ranks have begun to write so far
        self.sharded = strategy.is_sharded
        self.together = self.sharded and self.world > 1
        self.model_with_loss, self.parts, self.about = model_with_loss, parts, about
        self.watch, self.lines, self.folder = watch, lines, Path(cfg.output_dir)
        if self.together and num_nodes() > 1:
            check_shared_folder(accelerator, host_group, self.folder)
        self.patience = min(PATIENCE, cfg.ddp_timeout / 2)
        self.team = ShardWriters(self.rank, self.world, SHARES)
        self.memory, self.thread = host_copy.HostCopy(), None
        self.fault: BaseException | None = None  # of the last save, not yet looked at
        self.failures, self.reason = 0, ""  # in a row, and why the last one failed
        mine = start is not None and checkpoint_list.is_inside(start, self.folder)
        known = checkpoint_list.read_state(start)["progress"] if mine else {"step": None, "evaluated": None}
        self.saved: int | None = known["step"]  # the step of the newest checkpoint
        self.evaluated: int | None = known["evaluated"]  # what that one knows
        self.precision = accelerator.mixed_precision
        self.device = accelerator.device
        self.final: int | None = None  # step of the weights in final/
        self.stalls: list[tuple[float, float]] = []  # seconds that training stood still, and of the copy alone, by save

    def save(self, progress: TrainState, meter: dict, host_group) -> None:
        """Begin to write checkpoints/step_N, after waiting for the save before; a fault shows in `failed`."""
        if not (self.main or self.together):
            return
        began = time.perf_counter()
        done = self.main and (self.saved, self.evaluated) == (progress.step, progress.evaluated)
        late = not done and not self.wait(self.patience)
        if self.together:
            done, late = host_group.sum([float(done), float(late)]).tolist()
        if done:
            return
        self.evaluated = progress.evaluated
        if late:
            return warn(f"the checkpoint of step {progress.step} is left out: the disk still writes the one before it")
        copying = time.perf_counter()
        tensors, numbers = format.collect_tensors(self.strategy, self.model_with_loss, self.parts)
        fault = self._prepared(tensors) if self.main else None
        if self.together and host_group.sum([float(fault is not None)])[0] and fault is None:
            return
        if fault:
            return self._failed(progress.step, fault)
        host = self._host(tensors)
        copied = time.perf_counter()
        scaler = self.scaler.state_dict() if self.scaler is not None else None
        state = {"progress": asdict(progress), "meter": meter, "scaler": scaler}
        state = strict_json(state | {"numbers": numbers} | self.about)
        self.thread = threading.Thread(target=self._write, args=(progress.step, host, state), name="saver", daemon=True)
        self.stalls.append((time.perf_counter() - began, copied - copying))
        self.thread.start()

    def _prepared(self, tensors: dict) -> OSError | None:
        """Return why the disk does not take another checkpoint, if it does not."""
        try:
            for lines in self.lines:  # a checkpoint never knows more steps than the lines beside it
                lines.flush()
            self._room_for(tensors)
        except OSError as error:
            return error
        return None

    def _host(self, tensors: dict) -> dict:
        """Return the tensors that this rank writes, in host memory."""
        if not self.together:
            return self.memory.take(tensors)
        self.turn += 1
        owner = assign_tensors_to_ranks(tensors, self.world)
        return self.memory.take(tensors, {key for key, rank in owner.items() if rank == self.rank})

    def wait(self, seconds: float | None = None) -> bool:
        """Return whether no save is under way any more, after waiting for it at most so long."""
        if self.thread is not None:
            self.thread.join(seconds)
            if self.thread.is_alive():
                return False
            self.thread = None
        return True

    def failed(self) -> float:
        """Return 1 if the run should be given up: for the vector that all ranks add up. Raises what is no fault of a disk."""
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        return float(self.failures >= self.cfg.max_failed_saves)

    def _room_for(self, tensors: dict[str, format.Tensors]) -> None:
        """Raise OSError if the disk has no room for another checkpoint; the old ones stay until the new one is complete."""
        needed = sum(value.nbytes for named in tensors.values() for value in named.values()) + (1 << 20)
        held_folder.check_held(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self.folder / "checkpoints"  # which may be another disk
        free = shutil.disk_usage(place if place.exists() else self.folder).free
        if free < needed:
            raise OSError(28, f"{needed / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free")

    def _write(self, step: int, host: dict, state: dict) -> None:
        began = time.perf_counter()
        size = sum({id(value): value.nbytes for named in host.values() for value in named.values()}.values())
        folder = self.folder / "checkpoints" / f"step_{step:08d}"
        try:
            for lines in self.lines:
                if lines.path.exists():  # not before its first line
                    atomic_folder.fsync(lines.path)
            share = (self.rank, self.world) if self.together else ()
            if not self._publish(
                folder, lambda f: format.write_checkpoint(f, self.model_with_loss, host, state, *share), step
            ):
                self.failures = 0  # to leave its part or why not is all that this rank can fail at
                return
            self.saved, self.failures = step, 0
            self._prune(state["progress"]["best_step"])
            seconds, (stall, copy) = time.perf_counter() - began, self.stalls[-1]
            log.info(
                f"step {step} saved: training stood still for {stall:.3f} s, {copy:.3f} s of it to copy {size / 1e6:,.1f} MB to "
                f"the host; written, hashed and published beside training in {seconds:.3f} s"
            )
            if not run_status.failed_rank(
                self.folder, -1
            ):  # of any rank: its traceback is to stay the last that is printed
                console.stamped(f"step {step} saved in {folder}; training paused {stall:.3f} s for it")
        except (OSError, SafetensorError) as error:
            if isinstance(error, SafetensorError) and "os error" not in str(error):
                self.fault = error
            else:
                self._failed(step, error)
        except BaseException as error:
            self.fault = error
        self.watch.save_seconds = max(self.watch.save_seconds, time.perf_counter() - began)

    def _publish(self, folder: Path, write, step: int) -> bool:
        """Publish what all ranks write, on the main process; on others leave this rank's files for it."""
        held_folder.check_held(folder)
        if not self.together:
            atomic_folder.publish(folder, write, step=step, mixed_precision=self.precision)
            return True
        parts = folder.with_name(f".{folder.name}.{self.turn}.parts")
        if not self.main:
            self.team.write_shard(parts, write)
            return False

        def gathered(temporary: Path) -> dict:
            write(temporary)
            entries = self.team.collect_shards(parts, temporary)
            model_folder.write_index(temporary)
            return entries

        atomic_folder.publish(folder, gathered, step=step, mixed_precision=self.precision)
        return True

    def _prune(self, best_step: int) -> None:
        try:
            held_folder.check_held(self.folder)
            atomic_folder.remove_leftovers(self.folder / "checkpoints")
            checkpoint_list.prune(self.cfg, best_step)
        except OSError as error:
            warn(f"old checkpoints in {self.folder} cannot be removed ({error.strerror}); the next save tries again")

    def _failed(self, step: int, error: Exception) -> None:
        if held_folder.lost_folder(self.folder):
            return  # Watch ends this process at its next look, and says why
        self.failures += 1
        self.reason = f"{getattr(error, 'strerror', None) or error} ({self.folder})"
        warn(
            f"THE CHECKPOINT OF STEP {step} COULD NOT BE SAVED: {self.reason}. The ones before it are untouched, training goes "
            f"on; failure {self.failures} of {self.cfg.max_failed_saves} in a row, after which the run ends"
        )

    def export(self, progress: TrainState, host_group) -> None:
        """Begin to write final/ as soon as the last checkpoint is written; where it is there and intact, it stays.

        It is the best checkpoint where a metric is named; with the weights of the last step, if that one is gone."""
        folder, tensors, step, best = self.folder / "final", None, progress.step, None
        self.catch_up(host_group)
        if self.main and self.cfg.metric_for_best_model and progress.best_step not in (0, step):
            best = checkpoint_list.checkpoint_of_step(self.folder, progress.best_step)
        self.final = progress.best_step if best else step
        done = (
            self.main
            and atomic_folder.read_metadata(folder).get("step") == self.final
            and not atomic_folder.verify(folder)
        )
        if self.together:
            done, copied = host_group.sum([float(done), float(best is not None)]).tolist()
            if copied and not self.main:
                return
        if done or not (self.main or self.together):
            return
        share = (self.rank, self.world) if self.together else ()
        if best:
            work = self._copy, folder, [best, checkpoint_list.checkpoint_of_step(self.folder, step)], progress
        else:
            if self.sharded:
                tensors = self._host(
                    {"model": format.collect_tensors(self.strategy, self.model_with_loss, self.parts)[0]["model"]}
                )["model"]
            work = self._export, folder, tensors, share, progress
        self.thread = threading.Thread(target=self._caught, args=work)
        self.thread.start()

    def _export(self, folder: Path, tensors, share: tuple, progress: TrainState) -> None:
        def write(temporary: Path) -> None:
            model_folder.write_final(
                temporary, self.cfg, self.model_with_loss, tensors, *(share or (0, 1)), self.about["config"]
            )
            final.complete_card(temporary, self.cfg, progress, progress.step)

        self._publish(folder, write, progress.step)

    def _copy(self, folder: Path, candidates: list[Path | None], progress: TrainState) -> None:
        def card(temporary: Path, step: int) -> None:
            model_folder.write_card(temporary, self.cfg, self.model_with_loss.model, self.about["config"])
            final.complete_card(temporary, self.cfg, progress, step)

        self.final = final.publish_copy(folder, candidates, card, self.precision)

    def sample(self, task) -> str | None:
        """Return the task's sample of the model in final/; a sample that fails is a warning."""
        if not self.main or self.sharded:
            return None
        last = self.model_with_loss.model if self.final == self.saved else None
        return optional("the sample", final.sample, task, last, self.folder / "final", self.device)

    def _caught(self, work, *args) -> None:
        try:
            work(*args)
        except (OSError, SafetensorError) as error:
            self.fault = Failure(f"{self.folder / 'final'} could not be written: {error}; the same command tries again")
        except BaseException as error:
            self.fault = error

    def finish(self, host_group) -> bool:
        """Return on every rank, when nothing is being written any more, whether the last checkpoint was saved.

        However slow the disk is, no rank waits longer than a second in a collective."""
        self.catch_up(host_group)
        final = isinstance(self.fault, Failure)
        if host_group.sum([float(final)])[0] and not final:
            raise Failure("the final model could not be written, as the main process says")
        self.failed()
        return not host_group.sum([float(self.failures)])[0]

    def catch_up(self, host_group) -> None:
        """Wait on all ranks for the save that is under way, so that the next one, the last, is not left out."""
        while host_group.sum([0.0 if self.wait(1.0) else 1.0])[0]:
            pass

    def report(self, when: Intervals) -> str:
        """Return how the run ended, which model is the best, and what saving has cost training, in the middle of all saves."""
        lines = [when.early(), final.best(self.cfg, when.progress, self.final)]
        if self.failures:
            lines.append(f"warning: the last checkpoint could not be saved ({self.reason}); the final model is whole")
        elif self.stalls:
            stall, saved = statistics.median(stall for stall, _ in self.stalls), len(self.stalls)
            lines.append(
                f"{saved} checkpoint{'s' * (saved > 1)} saved; training paused {stall:.3f} s for {'each' if saved > 1 else 'it'}"
            )
        return "\n".join(filter(None, lines))

    def leave(self, host_group, save, reason: str | UsageError) -> None:
        """End the run on all ranks before it is complete: Stopped (or `reason`, if it is an error) when its state is saved,
        else Failure."""
        if self.failures >= self.cfg.max_failed_saves:
            reason = f"{self.failures} failed saves in a row, before one that worked"
        self.catch_up(host_group)
        save()
        saved = self.finish(host_group)
        if self.main and self.saved is not None:
            with suppress(OSError):
                run_status.write_status(self.folder, "running", self.saved)
        if saved and isinstance(reason, UsageError):
            raise reason
        if saved:
            step = "" if self.saved is None else f" at step {self.saved:,}"
            raise Stopped(f"Stopped by {reason}{step}. Saved to {self.folder}; run the same command to resume.")
        raise Failure(
            f"no checkpoint could be saved: {self.reason or 'the main process says why'}. Make room or mend the disk, and the "
            "same command goes on from the last one"
        )
