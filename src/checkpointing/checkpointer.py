"""Checkpointer, the training loop's interface to checkpoints: find, load, save, stop, write the final model.

All ranks make the same decisions here: whether a save is skipped and how a run ends.
Tests: tests/checkpointing/test_resume.py, tests/checkpointing/test_async_writer.py.
"""

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from src.checkpointing import checkpoint_format, checkpoint_list, final_model, resume
from src.checkpointing.async_writer import CheckpointWriter, Tensors
from src.checkpointing.resume import Start
from src.checkpointing.sharded_checkpoint import check_shared_folder
from src.config.addons import functions_of_addons
from src.config.errors import Failure, Stopped, UsageError, call_or_warn, warn
from src.config.parsing import to_yaml
from src.distributed import replica_check
from src.distributed.init_accelerator import num_nodes
from src.distributed.stop_signals import StopSignals
from src.runtime import run_status
from src.storage.jsonl import strict_json
from src.training.evaluation import check_finite
from src.training.techniques import Techniques
from src.training.train_state import Intervals, Run

SLOW_DISK = 60.0  # seconds that a save waits for the previous write; other ranks wait in their next all-reduce


class Checkpointer:
    """The checkpoints of one run. Every rank must call the methods in the same order."""

    def __init__(self, run: Run, start: Start, due: Intervals, techniques: Techniques, signals: StopSignals):
        """Rename old outputs in the run folder that do not fit this run, unless nothing is left to train."""
        self.cfg, self.strategy, self.hosts, self.task = run.cfg, run.strategy, run.hosts, run.task
        self.run, self.due, self.techniques, self.parts = run, due, techniques, start.parts
        self.model, self.state, self.meter, self.datasets = run.model, run.state, run.meter, run.datasets
        self.accelerator, self.folder = run.strategy.accelerator, Path(run.cfg.output_dir)
        self.is_main = self.accelerator.is_main_process
        self.average = ""  # name of the technique with the average that final/ holds
        self.of_addons: list[str] = []  # messages of add-ons that have used final/
        config = to_yaml(self.cfg, self.task.options)
        self.metadata = resume.run_metadata(self.accelerator, self.cfg, config, self.datasets, start.checkpoint)
        self.writer = CheckpointWriter(self.cfg, self.strategy, self.model, run.files, signals)
        if start.checkpoint and checkpoint_list.is_inside(start.checkpoint, self.folder):
            self.writer.saved = (self.state.step, self.state.evaluated)
        if self.writer.all_ranks_write and num_nodes() > 1:
            check_shared_folder(self.accelerator, self.hosts, self.folder)
        if not due.complete():
            resume.archive_stale_outputs(self.accelerator, self.cfg, start.checkpoint, self.metadata)

    # ---- in the loop -------------------------------------------------------------------------------------------------

    def failed(self) -> float:
        """Return 1 if too many checkpoints in a row failed on this rank, else 0; each step's all-reduce sums this."""
        return self.writer.failed()

    def update_best(self, metrics: dict) -> None:
        """Compare this evaluation with the best one. If it lacks metric_for_best_model, save and end the run."""
        try:
            self.state.update_best(metrics, self.cfg)
            check_finite(metrics, self.cfg, self.state.step)
        except (UsageError, Failure) as error:
            self.stop(error)

    def save(self) -> None:
        """Copy the training state to host memory and write checkpoints/step_N in the background, unless it is saved."""
        with self.meter.paused():
            self.state.finish_update(self.cfg.max_skipped_steps)
            replica_check.check_replicas(self.strategy, self.model, self.state.step)
            self.due.last_save = (self.state.step, self.state.evaluated)
            if position := getattr(self.datasets["train"], "position", None):  # the step alone does not determine it
                self.state.stream = position(self.state.step, self.hosts)
            if self.due.finished() or self.due.best():
                self._wait_on_all_ranks()  # never skip the last or best checkpoint because of a write in progress
            meter = self.meter.state(self.hosts)
            if self.writer.writes:
                self._save(meter)

    def _save(self, meter: dict) -> None:
        """Save; only the ranks that write call this."""
        began, state, writer = time.perf_counter(), self.state, self.writer
        is_saved = self.is_main and writer.saved == (state.step, state.evaluated)
        is_late = not is_saved and not writer.wait(min(SLOW_DISK, self.cfg.ddp_timeout / 2))
        is_saved, is_late = self._any_writer([is_saved, is_late])
        if is_saved:
            return
        if is_late:
            warn(f"the checkpoint of step {state.step} is skipped: the one before it is still being written")
            return
        tensors, numbers = checkpoint_format.collect_tensors(self.strategy, self.model, self.parts)
        error = writer.disk_error(tensors) if self.is_main else None
        [is_full] = self._any_writer([error is not None])
        if error:
            writer.save_failed(state.step, error)
        if is_full:
            return
        copying = time.perf_counter()
        host = writer.copy_to_host(tensors)
        copying = time.perf_counter() - copying
        scaler = self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else None
        saved = {"progress": self._progress(), "meter": meter, "scaler": scaler, "numbers": numbers} | self.metadata
        writer.write_checkpoint(host, strict_json(saved), time.perf_counter() - began, copying)

    def _progress(self) -> dict:
        """Return the fields of the TrainState; this waits for the device."""
        grad_norm = None if self.state.grad_norm is None else float(self.state.grad_norm)
        return asdict(replace(self.state, grad_norm=grad_norm))

    def state_hashes(self) -> dict[str, str]:
        """Return {PART/NAME: hash or value} of all that a checkpoint would hold now, on every rank. A collective."""
        self._wait_on_all_ranks()
        lines = set()
        if self.writer.writes:
            tensors, numbers = checkpoint_format.collect_tensors(self.strategy, self.model, self.parts)
            for part, named in self.writer.copy_to_host(tensors).items():
                for name, value in named.items():
                    digest = hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy()).hexdigest()[:16]
                    lines.add(f"{part}/{name}: {value.dtype} {list(value.shape)} {digest}")
            for part, named in (numbers | {"progress": self._progress()}).items():
                lines |= {f"{part}/{name}: {json.dumps(strict_json(value))}" for name, value in named.items()}
        return dict(line.split(": ", 1) for line in self.hosts.union(lines))

    def _any_writer(self, answers: list[bool]) -> list[bool]:
        """Return each of `answers` as True if it is True on any rank that writes."""
        if not self.writer.all_ranks_write:
            return answers
        return [count > 0 for count in self.hosts.sum([float(answer) for answer in answers]).tolist()]

    def _wait_on_all_ranks(self) -> None:
        """Wait until no rank writes. All ranks check once a second, so that no collective times out on a slow disk."""
        while self.hosts.sum([0.0 if self.writer.wait(1.0) else 1.0])[0]:
            pass

    # ---- the end of a run --------------------------------------------------------------------------------------------

    def stop(self, reason: str | UsageError | Failure) -> NoReturn:
        """Save, then end an incomplete run: raise Stopped, or `reason` if it is an error.

        Raise Failure if the state could not be saved."""
        if self.writer.failures >= self.cfg.max_failed_saves:
            reason = f"{self.writer.failures} failed saves in a row (the last attempt succeeded)"
        self._wait_on_all_ranks()
        self.save()
        is_saved, step = self._finish_writing(), self.writer.saved[0]
        if self.is_main and step is not None:
            with suppress(OSError):
                run_status.write_status(self.folder, "running", step)
        if not is_saved:
            raise Failure(
                f"no checkpoint could be saved: {self.writer.reason or 'see the main process'}. Free space or repair the "
                "disk; the same command resumes from the last checkpoint that was saved"
            )
        if isinstance(reason, UsageError | Failure):
            raise reason
        where = "" if step is None else f" at step {step:,}"
        raise Stopped(f"Stopped by {reason}{where}. Saved to {self.folder}; run the same command to resume.")

    def write_final(self) -> None:
        """Write final/ unless it is intact: the best checkpoint's model if metric_for_best_model is set, else the last.

        If the best checkpoint is gone, final/ holds the last step. The average of a technique with the option `final`
        replaces the weights, also in memory. Then add-ons may use final/, such as to upload it."""
        state, writer, final, best = self.state, self.writer, self.techniques.final, None
        if state.skipped and not state.updates and self.accelerator.scaler is None:  # fp16 first lowers its scale
            raise Failure(
                f"all {state.skipped} updates were skipped, because the loss or the gradient was not finite: nothing was "
                "trained, and final/ is not written. Lower learning_rate, or check the examples named in logs/"
            )
        self._wait_on_all_ranks()
        if self.is_main and self.cfg.metric_for_best_model and state.best_step not in (0, state.step):
            best = checkpoint_list.checkpoint_of_step(self.folder, state.best_step)
        if best and final:
            writer.verify(best)
        self._wait_on_all_ranks()
        best = best if writer.intact else None
        writer.final_step = state.best_step if best else state.step
        is_done = self.is_main and final_model.is_intact(self.folder / "final", writer.final_step)
        if writer.writes:
            is_done, is_copy = self._any_writer([is_done, best is not None])
            source = checkpoint_list.checkpoint_of_step(self.folder, state.best_step) if is_copy else None
            if self.techniques.load_final(partial(checkpoint_format.load_part, source) if source else None):
                self.average, is_copy = final, False
            if not is_done and is_copy and self.is_main:
                last = checkpoint_list.checkpoint_of_step(self.folder, state.step)
                writer.copy_final([best, last], state, self.metadata["config"])
            elif not is_done and not is_copy:
                writer.write_final(self._final_tensors(), state, self.metadata["config"], self.average)
        self._finish_writing()
        if self.is_main and self.due.complete() and not self.cfg.smoke:
            self.of_addons = [use_final(self.cfg) for use_final in functions_of_addons(self.cfg, "final_is_written")]

    def _final_tensors(self) -> Tensors | None:
        """Return this rank's share of a sharded model's weights in host memory; None if the model is not sharded."""
        if self.writer.is_sharded:
            return self.writer.copy_to_host(checkpoint_format.collect_tensors(self.strategy, self.model, {})[0])[
                "model"
            ]

    def _finish_writing(self) -> bool:
        """Wait until no rank writes; return True on every rank if the last checkpoint was saved."""
        self._wait_on_all_ranks()
        failed_here = isinstance(self.writer.error, Failure)
        if not failed_here:
            self.writer.failed()  # raises an error of code here, before the others are asked: this rank has the traceback
        if self.hosts.sum([float(failed_here)])[0] and not failed_here:
            raise Failure("the final model could not be written: see the error of the rank that failed")
        self.writer.failed()
        return not self.hosts.sum([float(self.writer.failures)])[0]

    def summary(self) -> str:
        """Return lines about early stopping, the best model, the pauses for saving, and the upload."""
        best = final_model.best(self.cfg, self.state, self.writer.final_step, self.average)
        lines = [self.due.early_stop_message(), best, self.writer.summary(), *self.of_addons]
        return "\n".join(line for line in lines if line)

    def sample(self) -> str | None:
        """Return the task's sample from the model in final/, on the main process; warn if the sample fails."""
        if not self.is_main or self.writer.is_sharded:
            return None
        model = self.task.saved(self.model.model) if self.writer.final_step == self.state.step else None
        final = self.folder / "final"
        return call_or_warn("the sample", final_model.sample, self.task, model, final, self.accelerator.device)

    def outcome(self) -> dict:
        """Return the fields of status.json about the end of the run."""
        return self.due.outcome() | {"final_step": self.writer.final_step}
