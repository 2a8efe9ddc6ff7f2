"""Checkpoint folders: write and load one as safetensors and JSON without pickle; list those of a run, delete old ones.

Tests: tests/engine/checkpointing/test_format.py, tests/engine/checkpointing/test_resume.py, tests/engine/checkpointing/test_async_writer.py.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from engine.checkpointing.model_folder import is_final_of, write_model
from engine.checkpointing.tensor_files import Shards, TensorReader, Tensors, file_name, weights_sha256, write_tensors
from engine.config.errors import UsageError, warn
from engine.config.run_config import RunConfig
from engine.distributed.backends import Backend
from engine.distributed.sharded_tensors import ShardedTensorRef
from engine.run.model_with_loss import ModelWithLoss
from engine.run.train_state import Run, TrainState
from engine.storage import run_store, verify_hashes

TENSOR = (torch.Tensor, ShardedTensorRef)

# ---- contents --------------------------------------------------------------------------------------------------------


def collect_tensors(
    backend: Backend, model_with_loss: ModelWithLoss, parts: dict[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return ({part: {name: tensor}}, {part: {name: other value}}) of the model and of `parts`.

    A part is the optimizer, or an object with a flat `state_dict` of tensors, numbers and strings. Tensors of a base
    model that checkpoints leave out are not among them."""
    model = model_with_loss.model
    saved = model_with_loss.task.saved(model)
    weights = backend.named_weights(saved)
    left_out = model_with_loss.task.left_out(saved, weights)
    tensors = {"model": {name: value for name, value in weights.items() if name not in left_out}}
    values = {}
    for part, holder in parts.items():
        state = backend.named_moments(model, holder) if part == "optimizer" else holder.state_dict()
        tensors[part] = {name: value for name, value in state.items() if isinstance(value, TENSOR)}
        values[part] = {name: value for name, value in state.items() if not isinstance(value, TENSOR)}
    return tensors, values


def write_checkpoint(
    folder: Path, model_with_loss: ModelWithLoss, tensors: dict[str, Tensors], rank: int, world: int
) -> None:
    """Write all files of a checkpoint but state.json, or only those of one rank if `world` > 1.

    Reads `tensors` instead of the model's parameters, so training may continue in the meantime."""
    write_model(model_with_loss, folder, tensors["model"], rank, world)
    for part, named in tensors.items():
        if part != "model" and (named or world == 1):
            write_tensors(named, folder / file_name(part, rank, world))


def write_state(folder: Path, state: dict, shards: Shards) -> str:
    """Write state.json beside the weights of all ranks, with their SHA-256; return it. `shards`: those of other ranks."""
    state = state | {"weights_sha256": weights_sha256(folder, shards)}
    (folder / "state.json").write_text(json.dumps(state, indent=1))
    return state["weights_sha256"]


def load_checkpoint(checkpoint: Path, run: Run, parts: dict[str, Any]) -> TrainState:
    """Restore `parts`, gradient scaler and meter; return the TrainState. The model has its weights."""
    state = read_state(checkpoint)
    for part, holder in parts.items():
        if part not in state["numbers"]:
            raise UsageError(
                f"resume: {checkpoint} has no {part}: start a new run from its weights with --init_from {checkpoint}"
            )
        if part == "optimizer":
            reader = TensorReader(checkpoint, part)
            run.backend.load_moments(run.model.model, holder, reader, state["numbers"][part])
        else:
            load_part(checkpoint, part, holder)
    if run.backend.accelerator.scaler is not None and state["scaler"]:
        run.backend.accelerator.scaler.load_state_dict(state["scaler"])
    run.meter.resume(state["meter"])
    return TrainState(**state["progress"])


def load_part(checkpoint: Path, part: str, holder: Any) -> None:
    """Restore an object that was saved beside the model and the optimizer; its tensors may be sharded."""
    reader = TensorReader(checkpoint, part)
    current = holder.state_dict()
    tensors = {name: reader.like(name, current.get(name)) for name in reader.where}
    holder.load_state_dict(read_state(checkpoint)["numbers"][part] | tensors)


def copy_model(checkpoint: Path, folder: Path) -> None:
    """Copy what a checkpoint lists to `folder`, without its training state. Other files may be links to any file."""
    parts = "|".join(map(re.escape, read_state(checkpoint)["numbers"]))
    for name in verify_hashes.read_manifest(checkpoint)["files"]:
        if not re.fullmatch(rf"state\.json|({parts})(-\d+-of-\d+)?\.safetensors", name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkpoint / name, folder / name)


def read_state(checkpoint: Path) -> dict:
    """Return state.json: progress, meter, identity, run id, configuration, numbers of the optimizer and scaler."""
    return json.loads((checkpoint / "state.json").read_text())


# ---- the checkpoints of a run ----------------------------------------------------------------------------------------


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the checkpoint folders of a run, intact or not, oldest first."""
    checkpoints = []
    for path in Path(output_dir, "checkpoints").glob("*"):
        step = step_of(path)
        if step is not None:
            checkpoints.append((step, path))
    return [path for _, path in sorted(checkpoints)]


def step_of(checkpoint: Path) -> int | None:
    """Return the step of a checkpoint folder, even if a user renamed it; None for any other folder.

    0 if it was renamed and its manifest is damaged: it must be found to be refused."""
    match = re.fullmatch(r"step_(\d+)", checkpoint.name)
    if match:
        return int(match[1])
    if checkpoint.name.startswith((".", "old_")):  # half-written, or archived
        return None
    if not (checkpoint / "state.json").exists():
        return None
    return verify_hashes.read_metadata(checkpoint).get("step", 0)


def newest_intact(output_dir: str | Path) -> Path | None:
    """Return the newest intact checkpoint of a run, or None. Reads every byte of each checkpoint it verifies."""
    for path in reversed(list_checkpoints(output_dir)):
        if _is_intact(path):
            return path
    return None


def _is_intact(checkpoint: Path) -> bool:
    """Return whether a checkpoint is undamaged; warn if it is not."""
    errors = verify_hashes.verify(checkpoint)
    if errors:
        warn(f"{checkpoint} is damaged and not used: {'; '.join(errors)}")
    return not errors


def find_best(output_dir: Path, step: int) -> tuple[Path | None, bool]:
    """Return (the intact checkpoint of the best step, whether that or an intact final/ holds its model); 0: no such step."""
    if not step:
        return None, False
    best = next((path for path in list_checkpoints(output_dir) if step_of(path) == step), None)
    if best is not None:
        run_store.current.fetch(best)
    if best is not None and _is_intact(best):
        return best, True
    if is_final_of(step, output_dir / "final"):
        return None, True
    warn(f"the checkpoint of the best step {step:,} is gone or damaged: final/ holds the last step")
    return None, False


def prune(cfg: RunConfig, best_step: int = 0) -> None:
    """Delete all checkpoints except the last `save_total_limit`, those at multiples of `save_keep_every` steps, and the
    best one if `metric_for_best_model` is set. Warn if the disk fails.

    Checkpoints that a user renamed and symlinks are never deleted."""
    try:
        checkpoints = list_checkpoints(cfg.output_dir)
        ours = [path for path in checkpoints if path.name.startswith("step_") and not path.is_symlink()]
        for path in ours[: -cfg.save_total_limit]:
            step = step_of(path) or 0
            is_kept = cfg.save_keep_every and step % cfg.save_keep_every == 0
            is_best = cfg.metric_for_best_model and step == best_step
            if not is_kept and not is_best:
                shutil.rmtree(path)
    except OSError as error:
        warn(f"old checkpoints in {cfg.output_dir} cannot be removed ({error}); the next save tries again")
