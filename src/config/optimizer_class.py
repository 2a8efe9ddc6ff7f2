"""The optimizer that `optim` names: its class and its arguments.

A name, in any case and without `_`, is a class of torch.optim, of the package pytorch_optimizer (requirements-extra.txt),
or of the file with this name in addons/optimizers/. Tests: tests/training/test_optimizers.py.
"""

import importlib
import inspect
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

from src.config.addons import addon_names, load_addon
from src.config.errors import UsageError, did_you_mean
from src.config.schema import RunConfig

if TYPE_CHECKING:
    import torch

PACKAGE = "pytorch_optimizer"
BUILT_IN = {"adamw": "AdamW", "adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "sgd": "SGD"}
# Arguments that fields of the run file set, by class of torch.optim; all classes: lr and weight_decay.
BETAS = {"betas": "adam_beta1 and adam_beta2", "eps": "adam_epsilon"}
ARGUMENTS_OF_FIELDS = dict.fromkeys(("AdamW", "Adam", "NAdam", "RAdam", "Adamax"), BETAS)
ARGUMENTS_OF_FIELDS |= {"SGD": {"momentum": "adam_beta1"}}
FOR_ALL = {"lr": "learning_rate", "weight_decay": "weight_decay", "params": "the model", "fused": "the backend"}
MUONS = ("muon", "adamuon", "adago", "muonclip", "normuon")  # for matrices of hidden layers: addons/optimizers/muon.py
ADAM_FIELDS = ("adam_beta1", "adam_beta2", "adam_epsilon")


def find_class(optim: str) -> "type[torch.optim.Optimizer]":
    """Return the class that `optim` names. Raise UsageError if there is none, or if it evaluates other weights."""
    import torch

    package, _, given = optim.rpartition("/")
    name = normalized(BUILT_IN.get(given, given))
    classes = {} if package else _classes(torch.optim) | _classes(optimizer_addon(optim) or torch.optim)
    if name not in classes and package in ("", PACKAGE):
        with suppress(ImportError):
            classes |= _classes(importlib.import_module(PACKAGE))
    if name not in classes:
        places = f"torch.optim, addons/optimizers, or {PACKAGE} if it is installed"
        raise UsageError(f"optim is {optim}: not a class of {places}{did_you_mean(name, classes)}")
    if hasattr(classes[name], "eval"):  # nothing here calls it before an evaluation or a save
        hint = "use adamw or sgd with techniques: schedule_free"
        raise UsageError(f"optim is {optim}, which trains other weights than it evaluates: {hint}")
    return classes[name]


def optimizer_addon(optim: str) -> ModuleType | None:
    """Return the add-on that `optim` names, None if it names a class only; raise UsageError for a missing add-on."""
    files = {normalized(file): file for file in addon_names("optimizers")} | dict.fromkeys(MUONS, "muon")
    return load_addon("optimizers", files[name]) if (name := normalized(optim)) in files else None


def normalized(name: str) -> str:
    """Return a name of an optimizer without package, case and `_`."""
    return name.rpartition("/")[2].replace("_", "").replace("-", "").lower()


def _classes(module: Any) -> "dict[str, type[torch.optim.Optimizer]]":
    import torch

    base = torch.optim.Optimizer
    classes = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, base)]
    return {normalized(each.__name__): each for each in classes if each is not base}


def optimizer_arguments(cfg: RunConfig, optimizer: type) -> dict[str, Any]:
    """Return the arguments of the constructor besides parameters, `lr` and `weight_decay`.

    Raise UsageError for what the class would ignore: a field, an unknown name in `optim_args`, or one that a field sets."""
    given, accepted = cfg.optim_args or {}, inspect.signature(optimizer).parameters
    from_fields = ARGUMENTS_OF_FIELDS.get(optimizer.__name__, {}) if optimizer.__module__.startswith("torch.") else {}
    for name in given:
        if field := (FOR_ALL | from_fields).get(name):
            raise UsageError(f"optim_args: {name} is set by {field}: remove it")
        if name not in accepted:  # some classes take any name, and ignore it
            raise UsageError(f"optim_args: {optimizer.__name__} has no argument {name}{did_you_mean(name, accepted)}")
    read = ADAM_FIELDS if getattr(optimizer_addon(cfg.optim), "reads_adam_fields", False) else from_fields.values()
    for name in ADAM_FIELDS:
        if name not in " ".join(read) and getattr(cfg, name) != getattr(RunConfig, name):
            raise UsageError(f"{name} is {getattr(cfg, name):g}, which {optimizer.__name__} does not read: remove it")
    if cfg.weight_decay and "weight_decay" not in accepted:
        raise UsageError(f"weight_decay is {cfg.weight_decay:g}, which {optimizer.__name__} does not read: give 0")
    values = {"betas": (cfg.adam_beta1, cfg.adam_beta2), "eps": cfg.adam_epsilon, "momentum": cfg.adam_beta1}
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}  # betas are tuples
    return {name: values[name] for name in from_fields} | given | lists


def optimizer_errors(cfg: RunConfig) -> Iterator[str]:
    """Yield the error of `optim` or `optim_args`, if there is one."""
    if BUILT_IN.get(cfg.optim) == "AdamW" and not cfg.optim_args:
        return  # spares other commands the import of torch
    try:
        optimizer_arguments(cfg, find_class(cfg.optim))
    except UsageError as error:
        yield str(error)
