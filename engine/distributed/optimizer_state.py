"""The state of any optimizer as flat named tensors and JSON values, and back.

Tensors in lists, tuples and dicts are saved one by one; a JSON value says where each belongs. The groups' own values
(a step count, an estimated rate) are part of the state, too. An optimizer whose state holds other tensors than plain ones
has methods `state_to_save` and `state_from_saved`. Tests: tests/src/training/test_optimizers.py.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from engine.config.errors import UsageError
from engine.distributed.sharded_tensors import is_partial, plain_name

SIMPLE = (torch.optim.AdamW, torch.optim.SGD)  # their groups hold only arguments of the constructor
NOT_STATE = ("params", "lr", "lr_factor", "initial_lr", "weight_decay", "hidden", "original_group")
VALUES = (type(None), bool, int, float, str, list, tuple, torch.Tensor)
ON_HOST = ("step", "mu_product")  # torch keeps these numbers on the CPU, unless a group is fused or capturable


# ---- save ------------------------------------------------------------------------------------------------------------


def flatten(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state with keys such as "exp_avg/layers.0.weight"; raise UsageError for what no checkpoint can hold."""
    name_of = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    convert = getattr(unwrapped(optimizer), "state_to_save", lambda parameter, state: state)
    by_name = {name_of[id(parameter)]: convert(parameter, state) for parameter, state in optimizer.state.items()}
    if not _is_simple(optimizer):
        for index, group in enumerate(optimizer.param_groups):
            values = {key: value for key, value in group.items() if key not in NOT_STATE and isinstance(value, VALUES)}
            by_name[f"param_groups[{group.get('original_group', index)}]"] = values
    flat: dict[str, Any] = {}
    for name, state in by_name.items():
        for key, value in state.items():
            encoded = _encode(flat, str(key), name, value)
            flat.setdefault(f"{key}/{name}", encoded)  # a tensor is there already
    return flat


def _is_simple(optimizer: torch.optim.Optimizer) -> bool:
    return type(unwrapped(optimizer)) in SIMPLE


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside accelerate's wrapper, which fp16 needs."""
    return getattr(optimizer, "optimizer", optimizer)


def _encode(flat: dict[str, Any], key: str, name: str, value: Any) -> Any:
    """Return `value` for JSON, its tensors replaced by their keys in `flat`."""
    if isinstance(value, torch.Tensor):
        flat[f"{key}/{name}"] = value
        return {"tensor": key}
    if isinstance(value, list | tuple):
        parts = [_encode(flat, f"{key}.{index}", name, part) for index, part in enumerate(value)]
        return {type(value).__name__: parts}
    if isinstance(value, dict) and all(isinstance(part, str) for part in value):
        return {"dict": {part: _encode(flat, f"{key}.{part}", name, content) for part, content in value.items()}}
    if isinstance(value, VALUES):
        return value
    raise UsageError(
        f"optim: {key} in the state of the optimizer is a {type(value).__name__}, which no checkpoint can hold: choose "
        "another optimizer"
    )


# ---- load ------------------------------------------------------------------------------------------------------------


def restore(model: torch.nn.Module, optimizer: torch.optim.Optimizer, reader: Any, numbers: dict[str, Any]) -> None:
    """Set the state from what `flatten` returned: `reader` reads the tensors, `numbers` holds the rest."""
    parameter_of = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    convert = getattr(unwrapped(optimizer), "state_from_saved", lambda parameter, state: state)
    paths_of: dict[str, list[str]] = {}
    for path in [*reader.where, *numbers]:
        paths_of.setdefault(path.split("/", 1)[1], []).append(path)
    for name, paths in paths_of.items():  # one after the other, because some are whole until they are converted
        parameter = parameter_of.get(name)
        flat = {}
        for path in paths:
            key = path.split("/", 1)[0]
            value = numbers[path] if path in numbers else reader.like(path, parameter)
            if parameter is not None and isinstance(value, torch.Tensor) and (on_device or key not in ON_HOST):
                value = _placed(value, parameter)
            flat[key] = value
        state = _nested(flat)
        if parameter is not None:
            optimizer.state[parameter] = convert(parameter, state)
        else:
            for index, group in enumerate(optimizer.param_groups):
                if name == f"param_groups[{group.get('original_group', index)}]":
                    group.update(state)


def _placed(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the state on the device, and mesh, of its parameter."""
    if is_partial(value):
        return value
    value = value.to(parameter.device)
    if value.shape == parameter.shape and not parameter.is_contiguous():
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)  # in the layout of the parameter
    if value.dim() and isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return value


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the values of one parameter or group, with the tensors of lists and dicts in their places."""
    used: set[str] = set()

    def build(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        [(form, content)] = value.items()
        if form == "tensor":
            used.add(content)
            return flat[content]
        if form == "dict":
            return {key: build(part) for key, part in content.items()}
        return (list if form == "list" else tuple)(map(build, content))

    built = {key: build(value) for key, value in flat.items()}
    return {key: value for key, value in built.items() if key not in used}
