"""The optimizer that `optim` names: its class, its add-on and its arguments.

A name, in any case and without `_`, is a class of torch.optim, or one of a file in addons/optimizers/: that of the name of
the file, or one of its function `classes` (FILE/NAME where torch has the name, too). addons/README.md says what else a
file may have. Tests: tests/src/training/test_optimizers.py.
"""

import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any

from engine.config.errors import UsageError, did_you_mean, how_to_install, pinned_extras
from engine.config.find_addons import addon_names, load_addon
from engine.config.run_config import RunConfig

if TYPE_CHECKING:
    import torch

BUILT_IN = {"adamw": "AdamW", "adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "sgd": "SGD"}
FOR_ALL = {"lr": "learning_rate", "weight_decay": "weight_decay", "params": "the model", "fused": "the backend"}
OF_ADAM: dict[str, tuple[str, ...]] = {"betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_epsilon",)}


def find_optimizer(optim: str) -> "tuple[type[torch.optim.Optimizer], ModuleType | None]":
    """Return (the class that `optim` names, the add-on that serves it).

    Raise UsageError if there is none, or if the class evaluates other weights than it trains."""
    import torch

    file, _, name = optim.rpartition("/")
    name = normalized(BUILT_IN.get(name, name))
    stems = addon_names("optimizers")
    classes = {} if file else _classes(torch.optim)
    addon = None
    of_that_name = [stem for stem in stems if normalized(stem) == normalized(file or name)]
    for stem in of_that_name or ([] if file or name in classes else stems):
        addon = load_addon("optimizers", stem)
        classes |= _classes(addon)
        if name in classes:
            break  # the packages of the other files take seconds to import
    if name not in classes:
        missing = [how_to_install(stem) for stem in stems if stem in pinned_extras() and not find_spec(stem)]
        packages = f" (of packages that are not installed: {', '.join(missing)})" if missing else ""
        raise UsageError(
            f"optim is {optim}: not a class of torch.optim or of a file in addons/optimizers{packages}"
            f"{did_you_mean(name, classes)}"
        )
    if hasattr(classes[name], "eval"):  # nothing here calls it before an evaluation or a save
        hint = "use adamw or sgd, and a technique that averages weights (docs/techniques.md)"
        raise UsageError(f"optim is {optim}, which trains other weights than it evaluates: {hint}")
    return classes[name], addon


def normalized(name: str) -> str:
    """Return a name of an optimizer without case, `_` and `-`."""
    return name.replace("_", "").replace("-", "").lower()


def _classes(module: ModuleType) -> "dict[str, type[torch.optim.Optimizer]]":
    """Return the optimizers of torch.optim, or those that an add-on serves, by their names."""
    import torch

    base = torch.optim.Optimizer
    values = module.classes() if hasattr(module, "classes") else vars(module).values()
    classes = [value for value in values if isinstance(value, type) and issubclass(value, base)]
    return {normalized(cls.__name__): cls for cls in classes if cls is not base}


def arguments_of_fields(optimizer: type) -> dict[str, tuple[str, ...]]:
    """Return {argument of the constructor: fields of the run file that set it} besides lr and weight_decay.

    Other classes than those of torch have defaults of their own, unless they have `takes_adam_fields = True`."""
    if not optimizer.__module__.startswith("torch.") and not getattr(optimizer, "takes_adam_fields", False):
        return {}
    if "betas" in inspect.signature(optimizer).parameters:
        return OF_ADAM
    return {"momentum": ("adam_beta1",)} if optimizer.__name__ == "SGD" else {}


def optimizer_arguments(cfg: RunConfig, optimizer: type, addon: ModuleType | None = None) -> dict[str, Any]:
    """Return the arguments of the constructor besides parameters, `lr` and `weight_decay`.

    Raise UsageError for what the class would ignore: a field, an unknown name in `optim_args`, or one that a field sets."""
    accepted = inspect.signature(optimizer).parameters
    from_fields = arguments_of_fields(optimizer)
    set_by = FOR_ALL | {name: " and ".join(fields) for name, fields in from_fields.items()}
    arguments: dict[str, Any] = {}
    for name, fields in from_fields.items():
        values = [getattr(cfg, field) for field in fields]
        arguments[name] = values[0] if len(values) == 1 else values
    for name, value in (cfg.optim_args or {}).items():
        if name in set_by:
            raise UsageError(f"optim_args: {name} is set by {set_by[name]}: remove it")
        if name not in accepted:  # some classes take any name, and ignore it
            raise UsageError(f"optim_args: {optimizer.__name__} has no argument {name}{did_you_mean(name, accepted)}")
        arguments[name] = value
    read = OF_ADAM if getattr(addon, "reads_adam_fields", False) else from_fields
    for field in {*chain(*OF_ADAM.values())} - {*chain(*read.values())}:
        if getattr(cfg, field) != getattr(RunConfig, field):
            raise UsageError(f"{field} is {getattr(cfg, field):g}, which {optimizer.__name__} does not read: remove it")
    if cfg.weight_decay and "weight_decay" not in accepted:
        raise UsageError(f"weight_decay is {cfg.weight_decay:g}, which {optimizer.__name__} does not read: give 0")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}


def optimizer_errors(cfg: RunConfig) -> Iterator[str]:
    """Yield the error of `optim` or `optim_args`, if there is one."""
    if BUILT_IN.get(cfg.optim) == "AdamW" and not cfg.optim_args:
        return  # spares other commands the import of torch
    try:
        optimizer, addon = find_optimizer(cfg.optim)
        optimizer_arguments(cfg, optimizer, addon)
    except UsageError as error:
        yield str(error)
    else:
        if hasattr(addon, "errors"):
            yield from addon.errors(cfg)
