"""Checkpoint folders of a run: list them, read state.json, find the newest intact one, delete old ones.

Tests: tests/checkpointing/test_resume.py, tests/checkpointing/test_async_writer.py.
"""

import json
import re
import shutil
from pathlib import Path

from src.config.schema import RunConfig
from src.storage import atomic_folder


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the checkpoint folders of a run, intact or not, oldest first."""
    folders = [(step_of(path), path) for path in Path(output_dir, "checkpoints").glob("*")]
    return [path for _, path in sorted(item for item in folders if item[0] is not None)]


def step_of(checkpoint: Path) -> int | None:
    """Return the step of a checkpoint folder, even if a user renamed it; None for any other folder."""
    if match := re.fullmatch(r"step_(\d+)", checkpoint.name):
        return int(match[1])
    if checkpoint.name.startswith((".", "old_")):  # half-written, or archived
        return None
    try:
        return read_state(checkpoint)["progress"]["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def checkpoint_of_step(output_dir: str | Path, step: int) -> Path | None:
    """Return the checkpoint of a step, or None."""
    return next((path for path in list_checkpoints(output_dir) if step_of(path) == step), None)


def is_inside(checkpoint: Path, output_dir: Path) -> bool:
    """Return True if a checkpoint lies in the checkpoints folder of the run in `output_dir`."""
    return checkpoint.resolve().parent == (output_dir / "checkpoints").resolve()


def newest_intact(output_dir: str | Path) -> Path | None:
    """Return the newest intact checkpoint of a run, or None. Reads every byte of each checkpoint it verifies."""
    return next((path for path in reversed(list_checkpoints(output_dir)) if not atomic_folder.verify(path)), None)


def read_state(checkpoint: Path) -> dict:
    """Return state.json: progress, meter, identity, run id, configuration, numbers of the optimizer and scaler."""
    return json.loads((checkpoint / "state.json").read_text())


def read_run_id(checkpoint: Path) -> str | None:
    """Return the id of the run that saved a checkpoint, None for other folders. It never changes in a run's folder."""
    return atomic_folder.read_json(checkpoint / "state.json").get("run_id")


def prune(cfg: RunConfig, best_step: int = 0) -> None:
    """Delete all checkpoints except the last `save_total_limit`, those at multiples of `save_keep_every` steps, and the
    best one if `metric_for_best_model` is set.

    Checkpoints that a user renamed and symlinks are never deleted."""
    saved = [path for path in list_checkpoints(cfg.output_dir) if path.name.startswith("step_")]
    saved = [path for path in saved if not path.is_symlink()]
    for path in saved[: -cfg.save_total_limit]:
        step = step_of(path) or 0
        is_kept = cfg.save_keep_every and step % cfg.save_keep_every == 0
        if not is_kept and not (cfg.metric_for_best_model and step == best_step):
            shutil.rmtree(path)
