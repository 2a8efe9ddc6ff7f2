"""The contents of a checkpoint: model, optimizer and state as safetensors and JSON, no pickle.

Tests: tests/checkpointing/test_format.py, tests/checkpointing/test_async_writer.py.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from src.checkpointing.checkpoint_list import read_state
from src.checkpointing.model_folder import write_model
from src.checkpointing.sharded import TensorReader, file_name
from src.config.errors import UsageError
from src.distributed.sharded_tensors import ShardedTensorRef, is_partial, plain_name
from src.training.state import TrainState
from src.training.step import ModelWithLoss

Tensors = dict[str, torch.Tensor]

# ---- save --------------------------------------------------------------------------------------------------------------


def collect_tensors(model_with_loss: ModelWithLoss, parts: dict) -> tuple[dict[str, Tensors], dict[str, dict]]:
    """Return (tensors, other values) of the model and of `parts`, each by part and canonical name.

    A part is an optimizer, or has a flat `state_dict` of tensors, numbers and strings (averaged weights, for example)."""
    model = model_with_loss.model
    optimizer = next(iter(parts.values()), None)
    is_deepspeed = hasattr(optimizer, "weights")  # its optimizer holds the float32 weights
    tensors = {"model": optimizer.weights() if is_deepspeed else _weights(model)}
    numbers = {}
    for part, holder in parts.items():
        state = _flat_state(model, holder)
        tensors[part] = {name: value for name, value in state.items() if _is_tensor(value)}
        numbers[part] = {name: value for name, value in state.items() if not _is_tensor(value)}
    return tensors, numbers


def _is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor | ShardedTensorRef)


def _weights(model: torch.nn.Module) -> Tensors:
    """Return the state dict of a model. Shards stay parameters: only those show which weights are tied."""
    held = model.state_dict(keep_vars=True)
    return {name: value if is_partial(value) else value.detach() for name, value in held.items()}


def _flat_state(model: torch.nn.Module, holder) -> dict:
    """Return the state of a part; of an optimizer by "key/parameter name"."""
    if hasattr(holder, "weights"):  # DeepSpeed
        return holder.moments()
    if not isinstance(holder, torch.optim.Optimizer):
        return holder.state_dict()
    names = _parameter_names(model, holder)
    by_parameter = holder.state_dict()["state"].items()
    return {f"{key}/{names[index]}": value for index, state in by_parameter for key, value in state.items()}


def _parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in the order of its state dict."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def write_checkpoint(
    folder: Path,
    model_with_loss: ModelWithLoss,
    tensors: dict[str, Tensors],
    state: dict,
    rank: int = 0,
    world: int = 1,
) -> None:
    """Write the files of a checkpoint, or with `world` > 1 those of one rank.

    Reads no tensor of the model itself, so it may run beside training."""
    write_model(model_with_loss, folder, dict(tensors["model"]), rank, world)
    for part, named in tensors.items():
        if part != "model" and (named or world == 1):
            save_file(_without_sharing(named), folder / file_name(part, rank, world))
    if rank == 0:
        (folder / "state.json").write_text(json.dumps(state, indent=1, allow_nan=False))


def _without_sharing(named: Tensors) -> Tensors:
    """Return the tensors, tied ones copied: safetensors refuses two names for the same memory."""
    result, seen = {}, set()
    for name, value in named.items():
        result[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return result


# ---- load --------------------------------------------------------------------------------------------------------------


def load_checkpoint(checkpoint: Path, model_with_loss: ModelWithLoss, parts: dict, scaler, meter) -> TrainState:
    """Restore every part, the scaler and the meter; return the progress. The model itself has read its weights before."""
    state = read_state(checkpoint)
    for part, holder in parts.items():
        if part not in state["numbers"]:
            raise UsageError(
                f"resume: {checkpoint} has no {part}: start a new run from its weights with --init_from {checkpoint}"
            )
        reader, numbers = TensorReader(checkpoint, part), state["numbers"][part]
        if hasattr(holder, "weights"):  # DeepSpeed
            holder.put(reader, numbers)
        elif isinstance(holder, torch.optim.Optimizer):
            _load_optimizer(model_with_loss.model, holder, reader, numbers)
        else:
            holder.load_state_dict(numbers | {name: reader.whole(name) for name in reader.where})
    if scaler is not None and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    meter.resume(state["meter"])
    return TrainState(**state["progress"])


def _load_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, reader: TensorReader, numbers: dict
) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    index_of = {name: index for index, name in enumerate(_parameter_names(model, optimizer))}
    state: dict[int, dict] = {}
    for entry in [*reader.where, *numbers]:
        key, name = entry.split("/", 1)
        index = index_of[name]
        value = numbers[entry] if entry in numbers else reader.like(entry, parameters[index])
        state.setdefault(index, {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
