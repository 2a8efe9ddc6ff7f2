"""The start of a run: from the newest intact checkpoint, from the weights of `init_from`, or from nothing.

Tests: tests/engine/checkpointing/test_resume.py, tests/engine/checkpointing/test_run_folder.py.
"""

import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from engine.checkpointing.checkpoint_folder import list_checkpoints, load_checkpoint, read_state, step_of
from engine.checkpointing.locate_weights import init_weights
from engine.checkpointing.run_identity import SameRates, check_same_run, identity
from engine.config.addresses import address_of, copies_of_main, on_this_node
from engine.config.errors import Stopped, UsageError
from engine.config.run_config import RunConfig
from engine.distributed.backend_checks import check_only_tensors
from engine.distributed.backends import Backend
from engine.distributed.host_group import run_on_main
from engine.find_tasks import Task
from engine.process import run_lock, run_status
from engine.run.train_state import Run, TrainState
from engine.storage import atomic_folder, jsonl, run_store, verify_hashes


@dataclass
class Start:
    """Where a run begins: at a checkpoint, or at step 0 with the weights of `init_from` or without any."""

    checkpoint: Path | None
    notes: list[str]  # messages for the user about the choice
    weights: Path | None  # the folder of the weights to begin with
    run_id: str  # of the run that the checkpoint belongs to, or a new one
    is_same_run: bool  # False: a new run, perhaps from the checkpoint of another run
    identity: dict[str, Any]  # of data and model

    def load(self, run: Run, parts: dict[str, Any]) -> TrainState:
        """Restore gradient scaler, meter and `parts`, such as the optimizer; return the TrainState of the checkpoint, or a
        new one. The model has its weights already."""
        check_only_tensors(run.task.saved(run.model.model))
        state = TrainState() if self.checkpoint is None else load_checkpoint(self.checkpoint, run, parts)
        if not self.is_same_run:
            state.forget_best()  # that checkpoint is in the folder of the other run
        state.use_metric(run.cfg)  # with another metric, the comparison starts over
        return state


def find_start(cfg: RunConfig, backend: Backend, task: Task, splits: dict, has_same_rates: SameRates) -> Start:
    """Return the main process's choice on every rank, or raise its error on every rank.

    `has_same_rates`: as of `check_same_run`."""
    folder = Path(cfg.output_dir)
    accelerator = backend.accelerator

    def choose() -> Start:
        current = identity(accelerator.mixed_precision, accelerator.num_processes, cfg, splits)
        if folder.is_dir():
            run_lock.lock_run_folder(folder)
            for path in (folder / "final", folder / "checkpoints" / "step_*", folder / "*.json", folder / "*.yaml"):
                atomic_folder.remove_unfinished(path.parent, path.name)
        checkpoint, notes = find_checkpoint(cfg, task.options, current, has_same_rates)
        if checkpoint is None:
            return Start(None, notes, init_weights(cfg, task), uuid.uuid4().hex, False, current)
        is_same_run = belongs(checkpoint, folder)
        run_id = read_state(checkpoint)["run_id"] if is_same_run else uuid.uuid4().hex
        return Start(checkpoint, notes, checkpoint, run_id, is_same_run, current)

    start, of_main, token = run_on_main(accelerator, lambda: (choose(), address_of, run_store.current.token))
    copies_of_main.update(of_main)
    run_store.current.agree(token)
    return replace(start, checkpoint=run_store.current.here(start.checkpoint), weights=on_this_node(start.weights))


def find_checkpoint(
    cfg: RunConfig, options: Any, current: dict, has_same_rates: SameRates
) -> tuple[Path | None, list[str]]:
    """Return the newest intact checkpoint that `cfg.resume` allows, and messages for the user about the choice.

    `current` is the identity of this run. Raise UsageError if checkpoints exist but none is intact, if they belong to
    another run, or if `output_dir` holds a run that did not begin from the requested checkpoint. Raise Stopped if the
    launcher restarts a stopped run."""
    candidates, notes = _candidates(cfg, Path(cfg.output_dir))
    for checkpoint in reversed(candidates):
        run_store.current.fetch(checkpoint)
        errors = verify_hashes.verify(checkpoint)
        if errors and run_store.current.fetch_again(checkpoint):
            errors = verify_hashes.verify(checkpoint)
        if not errors:
            notes += check_same_run(checkpoint, cfg, options, current, has_same_rates)
            return checkpoint, notes
        notes.append(f"{checkpoint} is damaged and not used: {'; '.join(errors)}")
    if candidates:
        raise UsageError(
            f"resume: no checkpoint is intact: {'; '.join(notes)}. Restore one, or start over with --resume never"
        )
    return None, []


def _candidates(cfg: RunConfig, folder: Path) -> tuple[list[Path], list[str]]:
    """Return the checkpoints that `cfg.resume` allows, oldest first, and messages for the user."""
    is_restart = _is_elastic_restart(folder)
    checkpoints = list_checkpoints(folder)
    if cfg.resume == "auto" or (is_restart and checkpoints):  # the first start has already applied --resume
        return checkpoints, []
    if cfg.resume == "never":
        return [], []
    source = Path(cfg.resume)
    began_here = _began_from(source, folder)
    if began_here and checkpoints:
        note = "resuming from its newest checkpoint; to go back again, remove the later ones"
        return checkpoints, [f"{folder} holds the run that began from {source}: {note}"]
    candidates = [source] if (source / "state.json").exists() else list_checkpoints(source)
    if not candidates:
        raise UsageError(
            f"resume: {source} is neither a checkpoint nor a run with one: give auto, never, or the folder of either"
        )
    is_of_this_run = began_here or any(belongs(path, folder) for path in candidates)
    has_outputs = bool(checkpoints) or (folder / "metrics.jsonl").exists()
    if has_outputs and not is_of_this_run:
        raise UsageError(
            f"resume: {source} is a checkpoint of another run than the one in output_dir {folder}: give another "
            "--output_dir, or remove --resume to resume the run in output_dir"
        )
    return candidates, []


def _began_from(source: Path, folder: Path) -> bool:
    """Return whether the run in `folder` was started with --resume `source`."""
    config = folder / "config.yaml"
    given = yaml.safe_load(config.read_text())["resume"] if config.exists() else ""
    return Path(given).resolve() == Path(address_of.get(str(source), source)).resolve()


def _is_elastic_restart(output_dir: Path) -> bool:
    """Return True if torchrun restarts this run after a failure; raise Stopped if its status is `stopped`."""
    status = run_status.read_status(output_dir)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    is_restart = attempt > 0 and status.get("launcher") == os.getppid()
    if is_restart and status.get("status") == "stopped":
        raise Stopped(status["reason"])
    return is_restart


def belongs(checkpoint: Path, output_dir: Path) -> bool:
    """Return True if the run in `output_dir` saved this checkpoint, even if it was moved, or lies there without a
    readable id."""
    checkpoints = list_checkpoints(output_dir)
    if checkpoint.resolve() in [path.resolve() for path in checkpoints]:
        return True
    run_id = _run_id(checkpoint)
    return run_id is not None and any(_run_id(path) == run_id for path in checkpoints)


def _run_id(checkpoint: Path) -> str | None:
    return jsonl.read_json(checkpoint / "state.json").get("run_id")


def archive_stale_outputs(cfg: RunConfig, start: Start) -> None:
    """Rename old outputs that would not fit this run; the main process calls this. Nothing is deleted.

    For a new run these are all outputs, for a resumed run the final model and the checkpoints after its start. Raise
    UsageError if another run has begun and ended in a folder that this one found empty."""
    output_dir = Path(cfg.output_dir)
    run_lock.lock_run_folder(output_dir)
    stale = [output_dir / "final"]
    if not start.is_same_run and cfg.resume != "never" and list_checkpoints(output_dir):
        raise UsageError(f"output_dir: another run has begun in {output_dir} meanwhile: run the same command again")
    if start.checkpoint and start.is_same_run:
        step = read_state(start.checkpoint)["progress"]["step"]  # not from the name: a user may have renamed the folder
        stale += [path for path in list_checkpoints(output_dir) if (step_of(path) or 0) > step]
    else:
        stale += [output_dir / name for name in ("metrics.jsonl", "ledger.jsonl", "checkpoints")]
    for path in stale:
        if path.exists():
            run_store.current.rename(path, _free_name(path, f"old_{path.name}" if start.is_same_run else path.name))


def _free_name(path: Path, name: str) -> Path:
    """Return NAME.old1 beside `path`, or with the first number that is not taken."""
    names = (path.with_name(f"{name}.old{number}") for number in range(1, 10_000))
    return next(each for each in names if not each.exists())
