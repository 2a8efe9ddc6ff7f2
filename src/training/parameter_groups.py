"""Parameter groups: frozen parameters, rates and weight decay by name pattern, rates that fall from the head down.

Tests: tests/training/test_parameter_groups.py.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from src.config.errors import UsageError
from src.config.optimizer_class import optimizer_addon
from src.config.schema import RunConfig
from src.training.parameter_names import first_match, named_parameters
from src.training.step import ModelWithLoss


class Group(NamedTuple):
    """What the parameters of a group have in common."""

    weight_decay: float
    lr_factor: float  # rate of the group = learning rate of the schedule × this
    hidden: bool | None = None  # whether these are hidden matrices; None: the optimizer treats all alike


def freeze(model: torch.nn.Module, cfg: RunConfig) -> None:
    """Set requires_grad to False for the parameters that `freeze` names, before the model is wrapped."""
    parameters = named_parameters(model)
    for name in first_match(cfg.freeze, parameters, "freeze"):
        parameters[name].requires_grad_(False)


def parameter_groups(model: torch.nn.Module, cfg: RunConfig) -> list[dict]:
    """Return the trainable parameters in groups: weight decay for two or more dimensions, none for the rest.

    `parameter_groups`, `lr_layer_decay` and an optimizer for hidden matrices split them further."""
    grouped: dict[Group, list[torch.nn.Parameter]] = {}
    parameters = named_parameters(model)
    for name, group in _groups_by_name(model, cfg).items():
        grouped.setdefault(group, []).append(parameters[name])
    return [{"params": found} | _fields(group, cfg) for group, found in grouped.items()]


def _fields(group: Group, cfg: RunConfig) -> dict:
    """Return a group's fields for the optimizer. An lr_factor of 1 is the default of Strategy.prepare."""
    fields: dict = {"weight_decay": group.weight_decay}
    if group.lr_factor != 1.0:
        fields |= {"lr": cfg.learning_rate * group.lr_factor, "lr_factor": group.lr_factor}
    if group.hidden is not None:
        fields |= {"hidden": group.hidden, "use_muon": group.hidden}  # ours, and that of pytorch_optimizer
    return fields


def _groups_by_name(model: torch.nn.Module, cfg: RunConfig) -> dict[str, Group]:
    """Return the group of each trainable parameter, those with two or more dimensions first."""
    parameters = named_parameters(model)
    rules = cfg.parameter_groups or {}
    pattern_of = first_match(rules, parameters, "parameter_groups")
    depths, layers = layer_depths(model) if cfg.lr_layer_decay else ({}, 0)
    addon, found = optimizer_addon(cfg.optim), {}
    hidden = addon.hidden_matrices(model) if hasattr(addon, "hidden_matrices") else None
    for name, parameter in sorted(parameters.items(), key=lambda item: dimensions(item[1]) < 2):
        if parameter.requires_grad:
            given = rules.get(pattern_of.get(name, ""), {})
            factor = given.get("lr_factor", 1.0)
            if cfg.lr_layer_decay:
                factor *= cfg.lr_layer_decay ** (layers + 1 - depths[name])
            decay = cfg.weight_decay if dimensions(parameter) >= 2 else 0.0
            is_hidden = None if hidden is None else name in hidden
            found[name] = Group(given.get("weight_decay", decay), factor, is_hidden)
    return found


def dimensions(parameter: torch.nn.Parameter) -> int:
    """Return the number of dimensions of a parameter, which may be sharded."""
    return len(getattr(parameter, "ds_shape", parameter.shape))  # ds_shape: under ZeRO-3


def layer_depths(model: torch.nn.Module) -> tuple[dict[str, int], int]:
    """Return ({parameter name: depth}, number of layers n): 0 before the layers, 1 … n in them, n + 1 after them.

    Layers are the elements of the outermost ModuleLists, in the order of the model; a parameter
    between two lists has the depth of the layer before it. Raise UsageError if the model has no such list."""
    model = model.model if isinstance(model, ModelWithLoss) else model
    depth_of_module: dict[int, int] = {}
    for layer in _layers(model):
        depth_of_module[id(layer)] = len(depth_of_module) + 1
    count = len(depth_of_module)
    if not count:
        raise UsageError(
            f"lr_layer_decay or optim: {type(model).__name__} has no ModuleList of layers: remove the field, or hold the "
            "layers in a torch.nn.ModuleList"
        )
    layer_of = {
        id(p): depth_of_module[id(m)] for m in model.modules() if id(m) in depth_of_module for p in m.parameters()
    }
    parameters = named_parameters(model)
    last_in_layers = [name for name, p in parameters.items() if id(p) in layer_of][-1]
    depths, depth = {}, 0
    for name, parameter in parameters.items():
        depths[name] = depth = layer_of.get(id(parameter), depth)
        if name == last_in_layers:
            depth = count + 1
    return depths, count


def _layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


def describe_groups(model: torch.nn.Module, cfg: RunConfig) -> str:
    """Return one line for each group: parameters, rate, weight decay; an empty text without special groups."""
    if not (cfg.parameter_groups or cfg.lr_layer_decay or cfg.freeze or optimizer_addon(cfg.optim)):
        return ""
    sizes: dict[Group, int] = {}
    parameters = named_parameters(model)
    for name, group in _groups_by_name(model, cfg).items():
        parameter = parameters[name]
        sizes[group] = sizes.get(group, 0) + getattr(parameter, "ds_numel", parameter.numel())
    words = [
        f"{size:,} at rate × {group.lr_factor:.4g}, weight decay {group.weight_decay:g}{' (hidden layers)' if group.hidden else ''}"
        for group, size in sizes.items()
    ]
    frozen = sum(getattr(p, "ds_numel", p.numel()) for p in parameters.values() if not p.requires_grad)
    return "; ".join(words + ([f"{frozen:,} frozen"] if frozen else []))
