"""Checkpointer, the training loop's interface to checkpoints: save, stop, write the final model.

A save copies the training state to host memory; then the background thread writes it to a temporary folder, renames
that to checkpoints/step_N, and deletes old checkpoints. All ranks make the same decisions here: whether a save is
skipped and how a run ends. Tests: tests/engine/checkpointing/test_async_writer.py, tests/engine/checkpointing/test_best_model.py.
"""

import logging
import time
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import yaml

from engine.checkpointing import checkpoint_folder, files_of_base, model_card, model_folder, resume
from engine.checkpointing.async_writer import BackgroundWriter, HostCopy, check_shared_folder
from engine.checkpointing.resume import Start
from engine.checkpointing.run_identity import VERSION
from engine.checkpointing.tensor_files import Tensors
from engine.config.addresses import address_of
from engine.config.errors import Failure, Stopped, UsageError, call_or_warn, warn
from engine.config.parsing import to_yaml
from engine.distributed import replica_check
from engine.distributed.host_group import run_on_main
from engine.distributed.stop_signals import StopSignals
from engine.process import console, run_status
from engine.process.exit_codes import is_exiting
from engine.run.techniques import Techniques
from engine.run.train_state import Intervals, Run, check_finite
from engine.storage import atomic_folder, jsonl, run_store

log = logging.getLogger("run")
SLOW_DISK = 60.0  # seconds that a save waits for the previous write; other ranks wait in their next all-reduce


class Checkpointer:
    """The checkpoints of one run. Every rank must call the methods in the same order."""

    def __init__(
        self,
        run: Run,
        start: Start,
        due: Intervals,
        techniques: Techniques,
        parts: dict[str, Any],
        signals: StopSignals,
    ):
        """`parts` are what checkpoints hold beside the model, by name: objects with a state dict."""
        self.run = run
        self.state = run.state
        self.start = start
        self.due = due
        self.techniques = techniques
        self.parts = parts
        self.signals = signals
        self.cfg = run.cfg
        self.hosts = run.hosts
        self.folder = Path(run.cfg.output_dir)
        self.accelerator = run.backend.accelerator
        self.is_main = self.accelerator.is_main_process
        self.writer = BackgroundWriter(run.backend, run.cfg.max_failed_saves)
        self.memory = HostCopy(self.writer.rank, self.writer.world)
        config = yaml.safe_load(to_yaml(run.cfg, run.task.options))
        self.metadata = {
            "engine": VERSION,
            "config": config,
            "identity": start.identity,
            "run_id": start.run_id,
        }
        self.saved: tuple[int, int] | None = None  # (step, evaluated) of the newest checkpoint, on the main process
        checkpoints = [path.resolve() for path in checkpoint_folder.list_checkpoints(self.folder)]
        if start.checkpoint and start.checkpoint.resolve() in checkpoints:
            self.saved = self._now()
        self.final_step = 0  # step of the weights in final/
        self.average = ""  # name of the technique that averaged them
        self.addon_messages: list[str] = []  # about what they did with final/

    def begin(self) -> None:
        """Check that all ranks see the run folder. Rename old outputs there that do not fit this run, unless nothing is
        left to train."""
        if self.writer.world > 1 and not run_store.current.token:
            check_shared_folder(self.is_main, self.hosts, self.folder)
        if not self.due.complete():  # all ranks end if another run has locked the folder
            run_on_main(self.accelerator, lambda: resume.archive_stale_outputs(self.cfg, self.start))

    def _now(self) -> tuple[int, int]:
        return self.state.step, self.state.evaluated

    # ---- in the loop -------------------------------------------------------------------------------------------------

    def failed(self) -> float:
        """Return 1 if too many checkpoints in a row failed on this rank, else 0; each step's all-reduce sums this.

        Raise Failure if another run has taken the store of this one."""
        run_store.current.check()
        return float(self.writer.failed())

    def after_step(self) -> None:
        """Tell the time limit how long a save takes. On a GPU, after the first update, reserve the memory of saves, so
        that the first one need not."""
        self.signals.save_seconds = self.writer.slowest
        has_moments = self.state.updates > 0
        is_on_gpu = self.accelerator.device.type == "cuda"
        if is_on_gpu and has_moments and self.writer.writes and not self.memory.reserving:
            tensors, _ = checkpoint_folder.collect_tensors(self.run.backend, self.run.model, self.parts)
            self.memory.reserve(tensors)

    def update_best(self, metrics: dict) -> None:
        """Compare this evaluation with the best one. If it lacks metric_for_best_model, save and end the run."""
        try:
            self.state.update_best(metrics, self.cfg)
            check_finite(metrics, self.cfg, self.state.step)
        except (UsageError, Failure) as error:
            self.stop(error)

    def save(self) -> None:
        """Copy the training state to host memory, and let the background thread write checkpoints/step_N (`_write`)."""
        with self.run.meter.paused():
            began = time.perf_counter()
            state = self.state
            state.finish_update(self.cfg.max_skipped_steps)
            replica_check.check_replicas(self.run.backend, self.run.model, state.step)
            self.due.last_save = self._now()
            self.signals.save_requested = False  # by the file `save`: this is that save
            # The step alone does not determine the position of a stream.
            position = getattr(self.run.datasets["train"], "position", None)
            if position is not None:
                state.stream = position(state.step, self.hosts)
            if self.due.finished() or self.due.best():
                self.writer.wait_on_all_ranks()  # never skip the last or best checkpoint because of a write in progress
            meter = self.run.meter.state(self.hosts)
            if not self.writer.writes:
                return
            if self.writer.is_busy(min(SLOW_DISK, self.cfg.ddp_timeout / 2)):
                warn(f"the checkpoint of step {state.step} is skipped: the one before it is still being written")
                return
            began_copy = time.perf_counter()
            tensors, values = checkpoint_folder.collect_tensors(self.run.backend, self.run.model, self.parts)
            copies = self.memory.take(tensors)  # a collective for sharded tensors
            ended = time.perf_counter()
            pause = f"training paused {ended - began:.3f} s for it ({ended - began_copy:.3f} s to copy it to the host)"
            saved = self._values_to_save(meter, values)
            self.writer.start(f"THE CHECKPOINT OF STEP {state.step}", self._write, copies, saved, self._flush(), pause)

    def _values_to_save(self, meter: dict, values: dict) -> dict:
        """Return a copy of all that a checkpoint holds beside tensors; `values`: those of optimizer and techniques.

        Techniques may change theirs while it is written."""
        scaler = self.accelerator.scaler
        saved = {
            "progress": self.state.saved_fields(),
            "meter": meter,
            "numbers": values,
            **self.metadata,
            "scaler": scaler.state_dict() if scaler is not None else None,
        }
        return deepcopy(saved)

    def _write(self, tensors: dict[str, Tensors], state: dict, error: OSError | None, pause: str) -> None:
        """Write a checkpoint, then delete old ones; in the background thread. `error`: of the lines that come before."""
        writer = self.writer
        sha256 = ""
        progress = state["progress"]
        step = progress["step"]
        folder = self.folder / "checkpoints" / f"step_{step:08d}"
        if error is not None:
            raise error
        for file in self.run.files:
            if file.path.exists():  # it does not exist before its first line
                atomic_folder.fsync(file.path)
        with writer.temporary_folder(folder) as temporary:
            checkpoint_folder.write_checkpoint(temporary, self.run.model, tensors, writer.rank, writer.world)
            if self.is_main:
                shards = writer.add_shards(temporary)
                sha256 = checkpoint_folder.write_state(temporary, state, shards)
                writer.publish(temporary, folder, step, shards)
        if not self.is_main:
            return
        name = run_store.current.publish(folder)
        self.saved = (step, progress["evaluated"])
        checkpoint_folder.prune(self.cfg, progress["best_step"])
        run_store.current.prune()
        show = log.info if is_exiting() else console.stamped  # a failed rank prints its error last
        show(f"step {step} saved in {name}; {pause}; weights sha256 {sha256[:16]}")

    def _flush(self) -> OSError | None:
        """Write the queued lines of all files, so that a checkpoint is never ahead of metrics.jsonl; return the error."""
        try:
            for file in self.run.files:
                file.flush()
        except OSError as error:
            return error
        return None

    # ---- the end of a run --------------------------------------------------------------------------------------------

    def stop(self, error: UsageError | Failure | None = None) -> NoReturn:
        """Save, then end an incomplete run: raise `error`, or Stopped with the reasons of all ranks.

        Raise Failure if the state could not be saved."""
        reason = self.signals.reason
        if self.writer.failures >= self.cfg.max_failed_saves:
            error = None
            reason = f"{self.writer.failures} failed saves in a row (the last attempt succeeded)"
        reasons = " and ".join(self.hosts.union({reason} if reason else set()))  # a signal may reach some ranks later
        self.writer.wait_on_all_ranks()
        is_this_step_saved = self.is_main and self.saved == self._now()
        if not self.hosts.sum([float(is_this_step_saved)])[0]:
            self.save()
        is_saved = self.writer.finish()
        if self.is_main:
            with suppress(OSError):
                run_status.write_status(self.folder, "running", self.state.step)
        if not is_saved:
            raise Failure(
                f"no checkpoint could be saved: {self.writer.reason or 'see the main process'} ({self.folder}). Free space or "
                "repair the disk; the same command resumes from the last checkpoint that was saved"
            )
        command = "the same command"
        if self.cfg.resume == "never":
            command += " without resume: never"
        folder = address_of.get(str(self.folder), self.folder)
        text = f"Stopped by {reasons} at step {self.state.step:,}. Saved to {folder}; run {command} to resume."
        raise error or Stopped(text)

    def write_final(self) -> None:
        """Write final/ unless it is intact: the best checkpoint's model if metric_for_best_model is set, else the last.

        If the best checkpoint is damaged and final/ is not its model, final/ holds the last step. The average of a
        technique with `final` replaces the weights, also in memory. Then add-ons may use final/, such as to upload it."""
        state = self.state
        final = self.folder / "final"
        if state.skipped and not state.updates and self.accelerator.scaler is None:  # fp16 lowers its scale
            raise Failure(
                f"all {state.skipped} updates were skipped, because the loss or the gradient was not finite: nothing was "
                "trained, and final/ is not written. Lower learning_rate, or check the examples named in logs/"
            )
        self.writer.wait_on_all_ranks()
        older = state.best_step if self.cfg.metric_for_best_model and state.best_step != state.step else 0
        best, is_best = run_on_main(self.accelerator, lambda: checkpoint_folder.find_best(self.folder, older))
        best = run_store.current.here(best)
        self.final_step = older if is_best else state.step
        is_written = run_on_main(self.accelerator, lambda: self._has_final(final))
        load_part = partial(checkpoint_folder.load_part, best) if best else None
        if (best or not is_best) and self.techniques.load_final(load_part):
            self.average = self.techniques.final
            best = None
        if not is_written:
            tensors: Tensors = {}
            if best is None and self.writer.writes:
                collected, _ = checkpoint_folder.collect_tensors(self.run.backend, self.run.model, {})
                tensors = self.memory.take(collected)["model"]
            if self.writer.writes:
                self.writer.start("THE FINAL MODEL", self._write_final, final, best, tensors)
            if not self.writer.finish():
                raise Failure(f"{final} could not be written: {self.writer.reason or 'see the main process'}")
        if self.is_main and self.due.complete():
            self.addon_messages = [addon.final_is_written(self.cfg) for addon in self.cfg.addons]

    def _has_final(self, final: Path) -> bool:
        """Return whether `final` is intact, of the step that it should have, and what the add-ons would write."""
        run_store.current.fetch(final)
        is_intact = model_folder.is_final_of(self.final_step, final)
        return is_intact and model_folder.is_finished_alike(final, self.cfg, self.metadata["config"])

    def _write_final(self, final: Path, best: Path | None, tensors: Tensors) -> None:
        """Write final/ from the checkpoint `best`, else from `tensors` of the model; in the background thread."""
        run = self.run
        writer = self.writer
        with writer.temporary_folder(final) as temporary:
            if best is None:
                model_folder.write_model(run.model, temporary, tensors, writer.rank, writer.world)
            elif self.is_main:
                checkpoint_folder.copy_model(best, temporary)
            if self.is_main:
                shards = writer.add_shards(temporary)
                if model_folder.finish_by_addons(temporary, run):
                    shards = {}  # of files that are others now
                files_of_base.complete_final(temporary, run)
                step = 0 if self.average else self.final_step
                model_card.write_card(temporary, run, self.metadata["config"], step, self._best_sentence())
                model_card.add_hash(temporary, shards)
                writer.publish(temporary, final, self.final_step, shards)
        if self.is_main:
            run_store.current.publish(final)

    # ---- for the summary ---------------------------------------------------------------------------------------------

    def summary(self) -> str:
        """Return lines about early stopping, the best model, and what add-ons did with final/."""
        sha256 = f"weights sha256 {self._sha256()} (step {self.state.step:,})"
        lines = [self.due.early_stop_message(), self._best_sentence(), *self.addon_messages, sha256]
        return "\n".join(line for line in lines if line)

    def _best_sentence(self) -> str:
        return model_folder.best_sentence(self.cfg, self.state, self.final_step, self.average)

    def sample(self) -> str | None:
        """Return the sample of a task with the option `sample_prompt`, on the main process, if final/ is the last step."""
        task: Any = self.run.task
        is_last = self.final_step == self.state.step and not self.run.backend.is_sharded
        if not self.is_main or not is_last or not getattr(task.options, "sample_prompt", None):
            return None
        return call_or_warn("the sample", task.sample, task.saved(self.run.model.model))

    def outcome(self) -> dict:
        """Return the fields of status.json about the end of the run."""
        return self.due.outcome() | {"final_step": self.final_step, "weights_sha256": self._sha256()}

    def _sha256(self) -> str | None:
        """Return the SHA-256 of the weights of this step, from its checkpoint."""
        checkpoint = self.folder / "checkpoints" / f"step_{self.state.step:08d}"
        return jsonl.read_json(checkpoint / "state.json").get("weights_sha256")
