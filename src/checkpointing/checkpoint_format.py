"""Checkpoint contents: model, optimizer and training state as safetensors and JSON, without pickle.

Tests: tests/checkpointing/test_format.py, tests/checkpointing/test_async_writer.py.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from src.checkpointing.checkpoint_list import read_state
from src.checkpointing.model_folder import without_sharing, write_model
from src.checkpointing.sharded_checkpoint import TensorReader, file_name
from src.config.errors import UsageError, warn
from src.distributed.sharded_tensors import ShardedTensorRef
from src.distributed.strategies import Strategy
from src.training.step import ModelWithLoss
from src.training.train_state import TrainState

Tensors = dict[str, torch.Tensor]

# ---- save ------------------------------------------------------------------------------------------------------------


def collect_tensors(
    strategy: Strategy, model_with_loss: ModelWithLoss, parts: dict
) -> tuple[dict[str, Tensors], dict[str, dict]]:
    """Return ({part: {name: tensor}}, {part: {name: other value}}) of the model and of `parts`.

    A part is the optimizer, or an object with a flat `state_dict` of tensors, numbers and strings."""
    model = model_with_loss.model
    tensors, numbers = {"model": strategy.named_weights(model_with_loss.task.saved(model))}, {}
    for part, holder in parts.items():
        state = strategy.named_moments(model, holder) if part == "optimizer" else holder.state_dict()
        tensors[part] = {name: value for name, value in state.items() if _is_tensor(value)}
        numbers[part] = {name: value for name, value in state.items() if not _is_tensor(value)}
    return tensors, numbers


def _is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor | ShardedTensorRef)


def write_checkpoint(
    folder: Path,
    model_with_loss: ModelWithLoss,
    tensors: dict[str, Tensors],
    state: dict,
    rank: int = 0,
    world: int = 1,
) -> None:
    """Write all files of a checkpoint, or only those of one rank if `world` > 1.

    Reads `tensors` instead of the model's parameters, so training may continue in the meantime."""
    write_model(model_with_loss, folder, dict(tensors["model"]), rank, world)
    for part, named in tensors.items():
        if part != "model" and (named or world == 1):
            save_file(without_sharing(named), folder / file_name(part, rank, world))
    if rank == 0:
        (folder / "state.json").write_text(json.dumps(state, indent=1, allow_nan=False))


# ---- load ------------------------------------------------------------------------------------------------------------


def load_checkpoint(
    checkpoint: Path, strategy: Strategy, model_with_loss: ModelWithLoss, parts: dict, meter
) -> TrainState:
    """Restore `parts`, gradient scaler and meter; return the TrainState. The model has its weights."""
    state = read_state(checkpoint)
    if unread := sorted(state["numbers"].keys() - parts.keys()):
        warn(f"resume: {checkpoint} also holds {', '.join(unread)}, which this run neither loads nor saves")
    for part, holder in parts.items():
        if part not in state["numbers"]:
            raise UsageError(
                f"resume: {checkpoint} has no {part}: start a new run from its weights with --init_from {checkpoint}"
            )
        if part == "optimizer":
            reader = TensorReader(checkpoint, part)
            strategy.load_moments(model_with_loss.model, holder, reader, state["numbers"][part])
        else:
            load_part(checkpoint, part, holder)
    if strategy.accelerator.scaler is not None and state["scaler"]:
        strategy.accelerator.scaler.load_state_dict(state["scaler"])
    meter.resume(state["meter"])
    return _train_state(checkpoint, state["progress"])


def _train_state(checkpoint: Path, progress: dict) -> TrainState:
    """Return the TrainState of a checkpoint, without fields that older versions saved, if these are empty."""
    known = {field.name for field in fields(TrainState)}
    if unread := [name for name, value in progress.items() if name not in known and value]:
        raise UsageError(
            f"resume: {checkpoint} holds {', '.join(unread)}, which this version of the code no longer supports: start a "
            f"new run from its weights with --init_from {checkpoint}"
        )
    return TrainState(**{name: value for name, value in progress.items() if name in known})


def load_part(checkpoint: Path, part: str, holder: Any) -> None:
    """Restore an object that was saved beside the model and the optimizer; its tensors may be sharded."""
    reader, current = TensorReader(checkpoint, part), holder.state_dict()
    tensors = {name: reader.like(name, current.get(name)) for name in reader.where}
    holder.load_state_dict(read_state(checkpoint)["numbers"][part] | tensors)
