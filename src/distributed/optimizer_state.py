"""The state of any optimizer as flat named tensors and JSON values, and back.

Tensors in lists, tuples and dicts are saved one by one; a JSON value says where each belongs. The groups' own values
(a step count, an estimated rate) are part of the state, too. Tests: tests/training/test_optimizers.py.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from src.config.errors import UsageError
from src.distributed.sharded_tensors import is_partial, plain_name
from src.runtime import private_apis

# torch's state dict is right for these, and their groups hold only arguments of the constructor.
SIMPLE = (torch.optim.AdamW, torch.optim.SGD)
NOT_STATE = ("params", "lr", "lr_factor", "initial_lr", "weight_decay", "hidden", "use_muon")
ON_HOST = ("step", "mu_product")  # torch keeps these numbers on the CPU, unless a group is fused or capturable


def is_simple(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether torch's own state dict holds the whole state: AdamW and SGD."""
    return type(getattr(optimizer, "optimizer", optimizer)) in SIMPLE


def has_first_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the next update is the first one with momentum of a parameter (cycle_momentum changes groups)."""
    parameters = (p for group in optimizer.param_groups if group.get("momentum") for p in group["params"])
    return any(p.grad is not None and p not in optimizer.state for p in parameters)


def update_all(optimizer: torch.optim.Optimizer) -> None:
    """Update all parameters; nothing is skipped on the device.

    torch's fused SGD takes no group in which only some parameters have a momentum (unfreeze): its other kernel does."""
    private_apis.skip_update_on_device(optimizer, None)
    mixed = []
    for group in optimizer.param_groups if type(optimizer) is torch.optim.SGD else ():
        known = {p in optimizer.state for p in group["params"] if p.grad is not None}
        mixed += [group] if group["fused"] and group["momentum"] and len(known) == 2 else []
    for group in mixed:
        group["fused"] = False
    optimizer.step()
    for group in mixed:
        group["fused"] = True


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in the order of its state dict."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def flatten(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Any]:
    """Return the state with keys such as "exp_avg/layers.0.weight"; `names`: of the parameters, in the groups' order.

    Raise UsageError for what no checkpoint can hold."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    name_of = dict(zip(map(id, parameters), names, strict=True))
    found: dict[str, Any] = {}
    for owner, state in optimizer.state.items():
        if id(owner) not in name_of:
            raise UsageError("optim: the state of the optimizer has an entry that belongs to no parameter")
        for key, value in state.items():
            _add(found, str(key), name_of[id(owner)], value)
    if not is_simple(optimizer):
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key not in NOT_STATE and _is_value(value):
                    _add(found, key, f"param_groups[{index}]", value)
    return found


def _is_value(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_value, value))
    return value is None or isinstance(value, bool | int | float | str | torch.Tensor)


def _add(found: dict[str, Any], key: str, name: str, value: Any) -> None:
    """Add one value of the state: a tensor or number as it is, anything else as JSON that names its tensors."""
    if isinstance(value, torch.Tensor):
        found[f"{key}/{name}"] = value
    else:
        found[f"{key}/{name}"] = _to_json(found, key, name, value)


def _to_json(found: dict[str, Any], key: str, name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        found[f"{key}/{name}"] = value
        return {"tensor": key}
    if isinstance(value, list | tuple):
        parts = [_to_json(found, f"{key}.{index}", name, part) for index, part in enumerate(value)]
        return {type(value).__name__: parts}
    if isinstance(value, dict) and all(isinstance(part, str) for part in value):
        return {"dict": {part: _to_json(found, f"{key}.{part}", name, content) for part, content in value.items()}}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(
        f"optim: {key} in the state of the optimizer is a {type(value).__name__}, which no checkpoint can hold: choose "
        "another optimizer"
    )


def restore(optimizer: torch.optim.Optimizer, names: list[str], reader: Any, numbers: dict[str, Any]) -> None:
    """Set the state from what `flatten` returned: `reader` reads the tensors, `numbers` holds the rest."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    parameter_of = dict(zip(names, parameters, strict=True))
    found: dict[str, dict[str, Any]] = {}
    for path in [*reader.where, *numbers]:
        key, name = path.split("/", 1)
        value = numbers[path] if path in numbers else reader.like(path, parameter_of.get(name))
        found.setdefault(name, {})[key] = value
    for index, group in enumerate(optimizer.param_groups):
        for key, value in _nested(found.pop(f"param_groups[{index}]", {})).items():
            group[key] = value
    states = {}
    for name, flat in found.items():
        place = _placement(parameter_of[name], optimizer)
        states[name] = _nested({key: place(key, value) for key, value in flat.items()})
    if is_simple(optimizer):
        by_index = {index: states[name] for index, name in enumerate(names) if name in states}
        optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})
        return
    for name, state in states.items():  # torch would convert all tensors to the dtype of the parameter
        optimizer.state[parameter_of[name]] = state


def _placement(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> Callable[[str, Any], Any]:
    """Return a function that puts a tensor of a state on the device, and mesh, of its parameter."""
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)

    def place(key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or is_partial(value) or (key in ON_HOST and not on_device):
            return value
        value = value.to(parameter.device)
        if value.shape == parameter.shape and not parameter.is_contiguous():
            return torch.empty_like(parameter, dtype=value.dtype).copy_(value)  # in the layout of the parameter
        if value.dim() and isinstance(parameter, torch.distributed.tensor.DTensor):
            from torch.distributed.tensor import Replicate

            mesh = parameter.device_mesh
            return torch.distributed.tensor.DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return value

    return place


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the values of one parameter or group, with the tensors of lists and dicts in their places."""
    used: set[str] = set()

    def build(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        [(kind, content)] = value.items()
        if kind == "tensor":
            used.add(content)
            return flat[content]
        if kind == "float":
            return float(content)
        if kind == "dict":
            return {key: build(part) for key, part in content.items()}
        return [build(part) for part in content] if kind == "list" else tuple(build(part) for part in content)

    built = {key: build(value) for key, value in flat.items()}
    return {key: value for key, value in built.items() if key not in used}
