"""Choice of the checkpoint to resume from, the same on all ranks; archiving of outputs that the run replaces.

Tests: tests/checkpointing/test_resume.py, tests/checkpointing/test_run_folder.py.
"""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from src.checkpointing.checkpoint_format import load_checkpoint
from src.checkpointing.checkpoint_list import is_inside, list_checkpoints, read_state, step_of
from src.checkpointing.locate_weights import init_weights
from src.checkpointing.run_identity import check_same_run, identity, lineage, read_lineage
from src.config.errors import Stopped, UsageError, warn
from src.config.schema import RunConfig
from src.distributed.host_group import run_on_main
from src.distributed.strategies import Strategy
from src.distributed.strategy_checks import check_only_tensors
from src.runtime import run_lock, run_status
from src.storage import atomic_folder
from src.tasks import Task
from src.training.techniques import Techniques
from src.training.train_state import Run, TrainState

if TYPE_CHECKING:
    from accelerate import Accelerator


class ResumePoint(NamedTuple):
    """The checkpoint that a run resumes from."""

    folder: Path | None  # None: a new run
    notes: list[str]  # messages for the user about the choice


@dataclass
class Start:
    """Where a run begins: at a checkpoint, or at step 0 with the weights of `init_from` or without any."""

    checkpoint: Path | None
    notes: list[str]  # messages for the user about the choice
    weights: Path | None  # the folder of the weights to begin with
    batch_size: int | None  # per_device_batch_size, if it is known before a batch was tried
    parts: dict[str, Any] = field(default_factory=dict)  # what `load` restored, and what checkpoints will hold

    def load(self, run: Run, techniques: Techniques) -> TrainState:
        """Restore optimizer, techniques, gradient scaler and meter of `run`; set and return its TrainState.

        The model has its weights already."""
        check_only_tensors(run.task.saved(run.model.model))
        self.parts = {"optimizer": run.optimizer} | techniques.begin(run)
        if self.checkpoint is not None:
            run.state = load_checkpoint(self.checkpoint, run.strategy, run.model, self.parts, run.meter)
        return run.state


def find_start(cfg: RunConfig, strategy: Strategy, task: Task, splits: dict) -> Start:
    """Return the main process's choice on every rank, or raise its error on every rank."""
    accelerator, options = strategy.accelerator, task.options
    checkpoint, notes = run_on_main(accelerator, lambda: _choose_on_main(accelerator, cfg, options, splits))
    size = cfg.per_device_batch_size
    if checkpoint and size == "auto":
        size = read_state(checkpoint)["config"]["per_device_batch_size"]
    return Start(checkpoint, notes, checkpoint or init_weights(cfg), None if size == "auto" else size)


def _choose_on_main(accelerator: "Accelerator", cfg: RunConfig, options, splits: dict) -> ResumePoint:
    folder = Path(cfg.output_dir)
    try:
        if folder.is_dir():
            run_lock.lock_run_folder(folder)
            for path in (folder / "final", folder / "checkpoints" / "step_*"):
                atomic_folder.remove_leftovers(path.parent, path.name)
        start = find(cfg, options, identity(accelerator, cfg, splits))
    except OSError as error:
        raise UsageError(f"resume: {error}") from error
    return start


def find(cfg: RunConfig, options, known: dict) -> ResumePoint:
    """Return the newest intact checkpoint that `cfg.resume` allows; `known` is the identity of this run.

    Raise UsageError if checkpoints exist but none is intact, if they belong to another run, or if `output_dir` holds a
    run that did not begin from the requested checkpoint. Raise Stopped if the launcher restarts a stopped run."""
    restarted = _is_elastic_restart(Path(cfg.output_dir))
    candidates, notes = _candidates(cfg, restarted)
    for checkpoint in reversed(candidates):
        if errors := atomic_folder.verify(checkpoint):
            notes.append(f"{checkpoint} is damaged and not used: {'; '.join(errors)}")
        else:
            return ResumePoint(checkpoint, notes + check_same_run(checkpoint, cfg, options, known))
    if candidates:
        raise UsageError(
            f"resume: no checkpoint is intact: {'; '.join(notes)}. Restore one, or start over with --resume never"
        )
    return ResumePoint(None, [])


def _is_elastic_restart(output_dir: Path) -> bool:
    """Return True if torchrun restarts this run after a failure; raise Stopped if its status is `stopped`."""
    status = run_status.read_status(output_dir)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    restarted = attempt > 0 and status.get("launcher") == os.getppid()
    if restarted and status.get("status") == "stopped":
        raise Stopped(status["reason"])
    return restarted


def _candidates(cfg: RunConfig, restarted: bool) -> tuple[list[Path], list[str]]:
    """Return the checkpoints that `cfg.resume` allows, oldest first, and messages for the user."""
    own = Path(cfg.output_dir)
    checkpoints = list_checkpoints(own)
    if cfg.resume == "auto" or (restarted and checkpoints):  # the first start has already applied --resume
        return checkpoints, []
    if cfg.resume == "never":
        return [], []
    asked = Path(cfg.resume)
    if belongs(asked, own):
        return _checkpoints_at(asked), []
    step = _step_of_start(own, asked)
    # A checkpoint of that step or an earlier one is a copy of the best one.
    if step is not None and checkpoints and (step_of(checkpoints[-1]) or 0) > step:
        return checkpoints, [f"{own} holds the run that began from {asked}: resuming from its newest checkpoint"]
    found = _checkpoints_at(asked)
    held = [path.name for path in (*checkpoints, own / "metrics.jsonl", own / "final") if path.exists()]
    if step is None and held:
        raise UsageError(
            f"resume: {asked} is a checkpoint of another run than the one in output_dir {own} ({', '.join(held[:3])}): "
            "give another --output_dir, or remove --resume to resume the run in output_dir"
        )
    return found, []


def belongs(path: Path, output_dir: Path) -> bool:
    """Return True if `path` is `output_dir`, or a checkpoint that its run saved, even if it was moved since."""
    if path.resolve() == output_dir.resolve() or is_inside(path, output_dir):
        return True
    run_id = read_lineage(path).get("run_id")
    return run_id is not None and run_id in [read_lineage(own).get("run_id") for own in list_checkpoints(output_dir)]


def _step_of_start(output_dir: Path, asked: Path) -> int | None:
    """Return the step at which the run in `output_dir` began from `asked`, a checkpoint or a run; None if it did not."""
    checkpoints = list_checkpoints(output_dir)
    for path in reversed(checkpoints):
        if began := read_lineage(path).get("began_from"):
            source, manifest = Path(began["checkpoint"]), atomic_folder.read_manifest(asked).get("manifest")
            same = asked.resolve() in (source, source.parent.parent) or began["manifest"] == manifest
            return began["step"] if same else None
    if checkpoints or (output_dir / "final").exists():
        return None
    with suppress(OSError, ValueError, KeyError, TypeError, yaml.YAMLError):  # killed before its first checkpoint
        resumed = yaml.safe_load((output_dir / "config.yaml").read_text())["resume"]
        return 0 if Path(str(resumed)).resolve() == asked.resolve() else None
    return None


def _checkpoints_at(asked: Path) -> list[Path]:
    """Return [`asked`] if it is a checkpoint, else the checkpoints of the run in it; raise UsageError if none."""
    if any((asked / name).exists() for name in ("state.json", atomic_folder.MANIFEST)):
        return [asked]
    if found := list_checkpoints(asked):
        return found
    raise UsageError(
        f"resume: {asked} is neither a checkpoint nor a run with one: give auto, never, or the folder of either"
    )


def run_metadata(accelerator: "Accelerator", cfg: RunConfig, resolved: str, splits: dict, start: Path | None) -> dict:
    """Return the metadata of the run for its checkpoints: configuration, identity of data and model, lineage."""
    return {
        "config": yaml.safe_load(resolved),
        "identity": identity(accelerator, cfg, splits),
        "lineage": lineage(start, start is not None and belongs(start, Path(cfg.output_dir))),
    }


def archive_stale_outputs(accelerator: "Accelerator", cfg: RunConfig, start: Path | None, metadata: dict) -> None:
    """Rename old outputs that would not fit this run. Nothing is deleted.

    For a new run these are all outputs, for a resumed run the final model and the checkpoints after `start`."""
    if not accelerator.is_main_process:
        return
    folder = Path(cfg.output_dir)
    run_lock.lock_run_folder(folder)
    if start is None and cfg.resume == "auto" and list_checkpoints(folder):
        raise UsageError(
            f"output_dir: another process has trained in {folder} since this one started: run the command again"
        )
    own = start is not None and belongs(start, folder)
    for path in filter(Path.exists, _stale_outputs(folder, start, own)):
        _archive(path, prefix="old_" if own else "")
    if start and not own and cfg.metric_for_best_model:
        copy_best_checkpoint(start, folder, metadata["lineage"])


def _stale_outputs(folder: Path, start: Path | None, own: bool) -> list[Path]:
    stale = [folder / "final"]
    if not own:
        stale += [folder / "metrics.jsonl", folder / "ledger.jsonl"]
    if start is None:
        return [*stale, folder / "checkpoints"]
    step = read_state(start)["progress"]["step"]  # not from the name: a user may have renamed the folder
    return stale + [path for path in list_checkpoints(folder) if _contradicts(path, start, step)]


def _contradicts(checkpoint: Path, start: Path, step: int) -> bool:
    """Return True if the run that resumes from `start` at `step` will write a checkpoint of this step again.

    Symlinks to `start` and copies that a user made stay."""
    if step_of(checkpoint) != step:
        return (step_of(checkpoint) or 0) > step
    made_by_user = checkpoint.is_symlink() or not checkpoint.name.startswith("step_")
    return not made_by_user and not checkpoint.samefile(start)


def _archive(path: Path, prefix: str) -> None:
    """Rename a file or folder to the first free NAME.oldN; raise UsageError if that is not possible."""
    name = f"{prefix}{path.name}"
    number = next(n for n in range(1, 10_000) if not path.with_name(f"{name}.old{n}").exists())
    try:
        path.rename(path.with_name(f"{name}.old{number}"))
    except OSError as error:
        raise UsageError(f"output_dir: {path} cannot be renamed to make room for this run: {error}") from error


def copy_best_checkpoint(start: Path, output_dir: Path, new_lineage: dict) -> None:
    """Copy the best checkpoint of the run that saved `start` to `output_dir`, with `new_lineage` as its lineage.

    It is beside `start`, where a user may also keep checkpoints of other runs."""
    best_step, run_id = read_state(start)["progress"]["best_step"], read_lineage(start)["run_id"]
    beside = [path for path in [start, *sorted(start.resolve().parent.iterdir())] if path.is_dir()]
    found = [path for path in beside if best_step and step_of(path) == best_step]
    same_run = (path for path in found if read_lineage(path).get("run_id") == run_id)
    best = next((path for path in same_run if not atomic_folder.verify(path)), None)
    if best is None:
        return

    def write(temporary: Path) -> None:
        for name in atomic_folder.read_manifest(best)["files"]:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(best / name, temporary / name)  # not the file mode: the source may be read-only
        (temporary / "state.json").write_text(json.dumps(read_state(best) | {"lineage": new_lineage}, indent=1))

    folder = output_dir / "checkpoints" / f"step_{best_step:08d}"
    try:
        atomic_folder.publish(folder, write, **atomic_folder.read_metadata(best))
    except (OSError, shutil.Error) as error:
        warn(f"the best checkpoint so far, {best}, cannot be copied to {folder}: {error}", any_rank=True)
