"""Optimizers by name, with their parameter groups: frozen parameters, rates and weight decay by name pattern.

engine/config/optimizer_class.py finds the class or the add-on. A pattern is a whole name, as checkpoints hold it, in which
`*` stands for any text: `*.attn.*`. Tests: tests/src/training/test_optimizers.py, tests/src/training/test_parameter_groups.py.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch

from engine.config.errors import UsageError, did_you_mean, errors_of
from engine.config.optimizer_class import find_optimizer, optimizer_arguments
from engine.distributed.sharded_tensors import plain_name
from engine.run.model_with_loss import ModelWithLoss
from src.fields import RunConfig

FUSED = (torch.optim.AdamW, torch.optim.Adam)  # these can skip an update on the device


def make_optimizer(cfg: RunConfig, model: torch.nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    """Freeze what `cfg.freeze` names; return the optimizer named by `cfg.optim` of the remaining parameters.

    With `fused`, one kernel updates all parameters, where torch has one that can skip an update on the device."""
    parameters = named_parameters(model)
    for name in first_match(cfg.freeze, parameters, "freeze"):
        parameters[name].requires_grad_(False)
    groups = parameter_groups(model, cfg)
    cls, addon = find_optimizer(cfg.optim)
    options = {"lr": cfg.learning_rate} | optimizer_arguments(cfg, cls, addon)
    if cls in FUSED:
        options["fused"] = fused
    factors = lr_factors(groups)
    make = getattr(addon, "make", None)
    with errors_of(f"optim is {cfg.optim}: {cls.__name__} refuses its arguments or parameters"):
        optimizer = make(cfg, cls, groups, options) if make else cls(groups, **options)
    if lr_factors(optimizer.param_groups) != factors:
        raise UsageError(
            f"optim is {cfg.optim}: {cls.__name__} makes parameter groups of its own, which lack the factors of "
            "parameter_groups or lr_layer_decay: remove these fields, or choose another optimizer"
        )
    return optimizer


def lr_factors(groups: list[dict]) -> dict[int, float]:
    """Return {id of a parameter: factor of its rate} where it is not 1."""
    factors = {}
    for group in groups:
        if "lr_factor" in group:
            factors |= {id(parameter): group["lr_factor"] for parameter in group["params"]}
    return factors


def parameter_groups(model: torch.nn.Module, cfg: RunConfig) -> list[dict]:
    """Return the trainable parameters in groups: weight decay for two or more dimensions, none for the rest.

    `parameter_groups`, `lr_layer_decay` and an optimizer for hidden matrices split them further. The rate of a group is
    that of the schedule times its `lr_factor`, by default 1."""
    parameters = named_parameters(model)
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    rules = cfg.parameter_groups or {}
    pattern_of = first_match(rules, parameters, "parameter_groups")
    factor_of_layer = layer_factors(model, cfg.lr_layer_decay) if cfg.lr_layer_decay else {}
    _, addon = find_optimizer(cfg.optim)
    hidden = addon.hidden_matrices(model, cfg.optim) if hasattr(addon, "hidden_matrices") else None
    groups: dict[tuple, dict] = {}
    for name, parameter in sorted(trained.items(), key=lambda item: dimensions(item[1]) < 2):
        rule = rules.get(pattern_of.get(name, ""), {})
        weight_decay = cfg.weight_decay if dimensions(parameter) >= 2 else 0.0
        fields = {"weight_decay": rule.get("weight_decay", weight_decay)}
        factor = rule.get("lr_factor", 1.0)
        if cfg.lr_layer_decay:
            factor *= factor_of_layer[name]
        if factor != 1.0:
            fields["lr_factor"] = factor  # a class may set the `lr` of a group: `Backend.prepare` multiplies both
        if hidden is not None:
            fields["hidden"] = name in hidden
        group = groups.setdefault(tuple(fields.values()), {"params": []} | fields)
        group["params"].append(parameter)
    return list(groups.values())


def layer_factors(model: torch.nn.Module, decay: float) -> dict[str, float]:
    """Return {parameter name: factor of its rate}: `decay` once for each layer between it and the output."""
    depths, num_layers = layer_depths(model)
    return {name: decay ** (num_layers + 1 - depth) for name, depth in depths.items()}


def dimensions(parameter: torch.nn.Parameter) -> int:
    """Return the number of dimensions of a parameter, which may be sharded."""
    return len(getattr(parameter, "ds_shape", parameter.shape))  # ds_shape: under ZeRO-3


def layer_depths(model: torch.nn.Module) -> tuple[dict[str, int], int]:
    """Return ({parameter name: depth}, number of layers n): 0 before the layers, 1 … n in them, n + 1 after them.

    Layers are the elements of the outermost ModuleLists, in the order of the model; a parameter between two lists has
    the depth of the layer before it. Raise UsageError if the model has no such list."""
    names = list(named_parameters(model))
    prefixes = layer_prefixes(model)
    layer_of = {}  # 1 … n, by the name of a parameter
    for number, prefix in enumerate(prefixes, 1):
        layer_of |= {name: number for name in names if name.startswith(prefix)}
    if not layer_of:
        raise UsageError(
            f"lr_layer_decay or optim: {type(model).__name__} has no ModuleList of layers: remove the field, or hold the "
            "layers in a torch.nn.ModuleList"
        )
    last = max(names.index(name) for name in layer_of)  # the last parameter that is in a layer
    depths = {}
    depth = 0
    for i, name in enumerate(names):
        if name in layer_of:
            depth = layer_of[name]
        elif i > last:
            depth = len(prefixes) + 1
        depths[name] = depth
    return depths, len(prefixes)


def layer_prefixes(model: torch.nn.Module) -> list[str]:
    """Return the prefix of the parameter names of each layer, such as `h.0.`."""
    prefixes: list[str] = []
    for path, submodule in without_loss(model).named_modules():
        is_inside_layer = f"{path}.".startswith(tuple(prefixes))
        if isinstance(submodule, torch.nn.ModuleList) and not is_inside_layer:
            prefixes += [f"{plain_name(path)}.{i}." for i in range(len(submodule))]
    return prefixes


# ---- names -----------------------------------------------------------------------------------------------------------


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters by the names that checkpoints hold; tied ones once."""
    return {plain_name(name): parameter for name, parameter in without_loss(model).named_parameters()}


def without_loss(model: torch.nn.Module) -> torch.nn.Module:
    """Return the task's model."""
    return model.model if isinstance(model, ModelWithLoss) else model


def matching(pattern: str, names: Iterable[str], field: str) -> list[str]:
    """Return the names that the pattern of `field` matches; raise UsageError if there is none."""
    matches = [name for name in names if fnmatchcase(name, pattern)]
    if not matches:
        hint = did_you_mean(pattern, names)
        raise UsageError(f"{field}: {pattern} matches no parameter{hint} (* stands for any text)")
    return matches


def first_match(patterns: Iterable[str], names: Iterable[str], field: str) -> dict[str, str]:
    """Return {name: first pattern that matches it}; raise UsageError for a pattern that matches no name."""
    pattern_of = {}
    for pattern in patterns:
        for name in matching(pattern, names, field):
            pattern_of.setdefault(name, pattern)
    return pattern_of
