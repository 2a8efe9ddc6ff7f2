"""Checkpointer: what the loop needs of checkpoints: find, load, save, stop, and the final model.

Tests: tests/checkpointing/test_resume.py, tests/checkpointing/test_async_writer.py. One place decides, on all ranks
alike, when to save and how a run ends; async_writer.py writes, resume.py chooses, format.py knows the files.
"""

import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import torch

from src.checkpointing import checkpoint_format, checkpoint_list, final_model, resume
from src.checkpointing.async_writer import CheckpointWriter, Tensors
from src.checkpointing.hub_upload import push_to_hub
from src.checkpointing.locate_weights import init_weights
from src.checkpointing.sharded_checkpoint import check_shared_folder
from src.config.errors import Failure, Stopped, UsageError, call_or_warn, warn
from src.config.parsing import to_yaml
from src.config.schema import RunConfig
from src.distributed.host_group import HostGroup
from src.distributed.init_accelerator import num_nodes
from src.distributed.stop_signals import StopSignals
from src.distributed.strategies import Strategy
from src.runtime import run_status
from src.storage import atomic_folder
from src.storage.jsonl import JsonlWriter, strict_json
from src.tasks import Task
from src.training.replicas import Replicas
from src.training.step import ModelWithLoss
from src.training.train_state import Intervals, TrainState

SLOW_DISK = 60.0  # seconds that a save waits for the one before it; other ranks wait as long in their next all-reduce


class Checkpointer:
    """The checkpoints of one run. All ranks call every method alike."""

    def __init__(self, cfg: RunConfig, strategy: Strategy, hosts: HostGroup, task: Task, datasets: dict):
        self.cfg, self.strategy, self.hosts, self.task, self.datasets = cfg, strategy, hosts, task, datasets
        self.accelerator = accelerator = strategy.accelerator
        self.folder, self.is_main = Path(cfg.output_dir), accelerator.is_main_process
        self.resume_from: Path | None = None
        self.notes: list[str] = []  # what the user should know of the choice

    # ---- at the start ------------------------------------------------------------------------------------------------

    def find_weights(self) -> Path | str | None:
        """Choose the checkpoint to resume from; return its weights, or those of `init_from`, or None."""
        self.resume_from, self.notes = resume.choose_on_all_ranks(
            self.accelerator, self.cfg, self.task.options, self.datasets
        )
        return self.resume_from or init_weights(self.cfg)

    def load(self, model: ModelWithLoss, optimizer: torch.optim.Optimizer, meter) -> TrainState:
        """Return the state to train from; put optimizer, scaler and meter where the checkpoint left them."""
        self.model, self.parts, self.meter = model, {"optimizer": optimizer}, meter  # parts: saved beside the model
        if self.resume_from is None:
            self.state = TrainState()
        else:
            self.state = checkpoint_format.load_checkpoint(self.resume_from, self.strategy, model, self.parts, meter)
        return self.state

    def begin(self, due: Intervals, files: list[JsonlWriter], replicas: Replicas, stop_signals: StopSignals) -> None:
        """Get ready to save; `files` are flushed before each checkpoint, `replicas` agree on their weights before it."""
        self.due, self.replicas = due, replicas
        self.config = to_yaml(self.cfg, self.task.options)
        self.metadata = resume.run_metadata(self.accelerator, self.cfg, self.config, self.datasets, self.resume_from)
        self.writer = CheckpointWriter(self.cfg, self.strategy, self.model, files, stop_signals)
        if self.resume_from and checkpoint_list.is_inside(self.resume_from, self.folder):
            self.writer.saved = (self.state.step, self.state.evaluated)
        if self.writer.all_ranks_write and num_nodes() > 1:
            check_shared_folder(self.accelerator, self.hosts, self.folder)
        if not due.complete():
            resume.archive_stale_outputs(self.accelerator, self.cfg, self.resume_from, self.metadata["lineage"])

    # ---- in the loop -------------------------------------------------------------------------------------------------

    def failed(self) -> float:
        """Return 1 on a rank where too many checkpoints in a row failed: for the all-reduce of every step."""
        return self.writer.failed()

    def update_best(self, metrics: dict) -> None:
        """Compare this evaluation with the best one; save and end the run if metric_for_best_model is none of its metrics.

        Which metrics exist is known only after the first evaluation: the steps until then are not lost."""
        try:
            self.state.update_best(metrics, self.cfg)
        except UsageError as error:
            self.stop(error)

    def save(self) -> None:
        """Copy the state to the host and write checkpoints/step_N beside training, unless that one is there already."""
        with self.meter.paused():
            self.state.finish_update(self.cfg.max_skipped_steps)
            self.replicas.before_save()
            self.due.last_save = (self.state.step, self.state.evaluated)
            self.state.stream = self.datasets["train"].position(self.state.step, self.hosts)
            if self.due.finished() or self.due.best():
                self._wait_on_all_ranks()  # this save must not be skipped because the disk still writes the last one
            meter = self.meter.state(self.hosts)
            if self.writer.writes:
                self._save(meter)

    def _save(self, meter: dict) -> None:
        """Save on the ranks that write."""
        began, state, writer = time.perf_counter(), self.state, self.writer
        is_saved = self.is_main and writer.saved == (state.step, state.evaluated)
        is_late = not is_saved and not writer.wait(min(SLOW_DISK, self.cfg.ddp_timeout / 2))
        is_saved, is_late = self._any_writer([is_saved, is_late])
        if is_saved:
            return
        if is_late:
            warn(f"the checkpoint of step {state.step} is skipped: the disk still writes the one before it")
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
        saved = {"progress": asdict(state), "meter": meter, "scaler": scaler, "numbers": numbers} | self.metadata
        writer.write_checkpoint(host, strict_json(saved), time.perf_counter() - began, copying)

    def _any_writer(self, answers: list[bool]) -> list[bool]:
        """Return for each answer whether it is yes on any of the ranks that write."""
        if not self.writer.all_ranks_write:
            return answers
        return [count > 0 for count in self.hosts.sum([float(answer) for answer in answers]).tolist()]

    def _wait_on_all_ranks(self) -> None:
        """Wait until nothing is being written; however slow a disk is, no rank waits longer than a second in a collective."""
        while self.hosts.sum([0.0 if self.writer.wait(1.0) else 1.0])[0]:
            pass

    # ---- the end of a run --------------------------------------------------------------------------------------------

    def stop(self, reason: str | UsageError) -> NoReturn:
        """Save and end the run before it is complete: raise Stopped, or `reason` if that is an error, or Failure if the
        state could not be saved."""
        if self.writer.failures >= self.cfg.max_failed_saves:
            reason = f"{self.writer.failures} failed saves in a row, before one that worked"
        self._wait_on_all_ranks()
        self.save()
        is_saved, step = self._finish_writing(), self.writer.saved[0]
        if self.is_main and step is not None:
            with suppress(OSError):
                run_status.write_status(self.folder, "running", step)
        if not is_saved:
            raise Failure(
                f"no checkpoint could be saved: {self.writer.reason or 'the main process says why'}. Free space or repair the "
                "disk; the same command resumes from the last checkpoint that was saved"
            )
        if isinstance(reason, UsageError):
            raise reason
        where = "" if step is None else f" at step {step:,}"
        raise Stopped(f"Stopped by {reason}{where}. Saved to {self.folder}; run the same command to resume.")

    def write_final(self) -> None:
        """Write final/, unless it is there and intact: the best checkpoint if a metric is named, else the last step.

        If the best checkpoint is gone, final/ holds the last step. Upload it if the run file says so."""
        state, writer = self.state, self.writer
        best = None
        self._wait_on_all_ranks()
        if self.is_main and self.cfg.metric_for_best_model and state.best_step not in (0, state.step):
            best = checkpoint_list.checkpoint_of_step(self.folder, state.best_step)
        writer.final_step = state.best_step if best else state.step
        is_there = self.is_main and _is_intact(self.folder / "final", writer.final_step)
        if writer.writes:
            is_there, is_copy = self._any_writer([is_there, best is not None])
            if not is_there and is_copy and self.is_main:
                last = checkpoint_list.checkpoint_of_step(self.folder, state.step)
                writer.copy_final([best, last], state, self.metadata["config"])
            elif not is_there and not is_copy:
                writer.write_final(self._final_tensors(), state, self.metadata["config"])
        self._finish_writing()
        self.uploaded = push_to_hub(self.cfg, self.is_main) if self.cfg.push_to_hub and self.due.complete() else ""

    def _final_tensors(self) -> Tensors | None:
        """Return the weights of a sharded model in host memory; None for a model that this process holds."""
        if not self.writer.is_sharded:
            return None
        tensors, _ = checkpoint_format.collect_tensors(self.strategy, self.model, self.parts)
        return self.writer.copy_to_host({"model": tensors["model"]})["model"]

    def _finish_writing(self) -> bool:
        """Return on every rank, when nothing is being written any more, whether the last checkpoint was saved."""
        self._wait_on_all_ranks()
        is_mine = isinstance(self.writer.error, Failure)
        if self.hosts.sum([float(is_mine)])[0] and not is_mine:
            raise Failure("the final model could not be written, as the main process says")
        self.writer.failed()
        return not self.hosts.sum([float(self.writer.failures)])[0]

    def summary(self) -> str:
        """Return how the run ended, which model is the best, and what saving has cost training."""
        best = final_model.best(self.cfg, self.state, self.writer.final_step)
        lines = [self.due.early_stop_message(), best, self.writer.summary(), self.uploaded]
        return "\n".join(filter(None, lines))

    def sample(self) -> str | None:
        """Return the task's sample of the model in final/, on the main process; a sample that fails is a warning."""
        if not self.is_main or self.writer.is_sharded:
            return None
        model = self.model.model if self.writer.final_step == self.state.step else None
        device = self.accelerator.device
        return call_or_warn("the sample", final_model.sample, self.task, model, self.folder / "final", device)

    def outcome(self) -> dict:
        """Return for status.json how the run ended."""
        return self.due.outcome() | {"final_step": self.writer.final_step}


def _is_intact(folder: Path, step: int) -> bool:
    return atomic_folder.read_metadata(folder).get("step") == step and not atomic_folder.verify(folder)
