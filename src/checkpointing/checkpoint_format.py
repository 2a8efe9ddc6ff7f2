"""Checkpoint contents: model, optimizer and training state as safetensors and JSON, without pickle.

Tests: tests/checkpointing/test_format.py, tests/checkpointing/test_async_writer.py.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from src.checkpointing.checkpoint_list import read_state
from src.checkpointing.model_folder import without_sharing, write_model
from src.checkpointing.sharded_checkpoint import TensorReader, file_name
from src.config.errors import UsageError
from src.distributed.sharded_tensors import ShardedTensorRef, gather_full, is_partial
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


class HostCopy:
    """Host memory for one copy of the training state: allocated by the first copy, reused by the next ones."""

    def __init__(self):
        self.memory: dict[tuple[str, str], torch.Tensor] = {}

    def take(self, tensors: dict[str, dict[str, torch.Tensor]], mine: set | None = None) -> dict[str, dict]:
        """Return copies of the tensors in host memory; tied weights share one copy. Waits for the device.

        Sharded tensors are gathered one at a time (a collective). With `mine`, keep only its (part, name) keys."""
        copies = {part: {} for part in tensors}
        copied: dict = {}  # storage key -> copy, or None if another rank keeps it
        from_device = False
        for part, named in tensors.items():
            for name, value in named.items():
                storage = _storage_key(value)
                if storage not in copied:
                    full = gather_full(value)
                    from_device |= full.device.type != "cpu"
                    keep = mine is None or (part, name) in mine
                    copied[storage] = self._copy((part, name), full) if keep else None
                if copied[storage] is not None:
                    copies[part][name] = copied[storage]
        if from_device:
            torch.accelerator.synchronize()
        return copies

    def _copy(self, key: tuple[str, str], value: torch.Tensor) -> torch.Tensor:
        memory = self.memory.get(key)
        if memory is None or memory.shape != value.shape or memory.dtype != value.dtype:
            memory = self.memory[key] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        return memory.copy_(value, non_blocking=True)


def _storage_key(value: torch.Tensor):
    """Return a key that is equal for two names only if they are the same tensor (tied weights)."""
    if is_partial(value) or not value.nbytes:
        return id(value)
    return value.data_ptr(), value.shape, value.stride(), value.dtype


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
    return TrainState(**state["progress"])


def load_part(checkpoint: Path, part: str, holder: Any) -> None:
    """Restore an object that was saved beside the model and the optimizer; its tensors may be sharded."""
    reader, current = TensorReader(checkpoint, part), holder.state_dict()
    tensors = {name: reader.like(name, current.get(name)) for name in reader.where}
    holder.load_state_dict(read_state(checkpoint)["numbers"][part] | tensors)
