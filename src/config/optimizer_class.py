"""The optimizer that `optim` names: its class, its arguments, and the reasons why some cannot work here.

A name is one of torch.optim or of the package pytorch_optimizer (requirements-extra.txt), in any case, without `_`.
Tests: tests/training/test_optimizers.py, tests/training/test_optimizer_names.py.
"""

import importlib
import inspect
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from src.config.errors import UsageError, did_you_mean
from src.config.schema import RunConfig

if TYPE_CHECKING:
    import torch

PACKAGE = "pytorch_optimizer"
BUILT_IN = {"adamw": "AdamW", "adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "sgd": "SGD"}
# Arguments that fields of the run file set, by class of torch.optim; all classes: lr and weight_decay.
BETAS = {"betas": "adam_beta1 and adam_beta2", "eps": "adam_epsilon"}
ARGUMENTS_OF_FIELDS = {"AdamW": BETAS, "Adam": BETAS, "NAdam": BETAS, "RAdam": BETAS, "Adamax": BETAS}
ARGUMENTS_OF_FIELDS |= {"SGD": {"momentum": "adam_beta1"}, "Muon": {}}
FOR_ALL = {"lr": "learning_rate", "weight_decay": "weight_decay", "params": "the model", "fused": "the strategy"}
UNSUPPORTED = {
    "differentiable": "no gradient passes through an update",
    "capturable": "no update is part of a CUDA graph",
}
MUONS = ("muon", "adamuon", "adago", "muonclip", "normuon")  # these treat matrices of hidden layers in another way
ADAM_FIELDS = ("adam_beta1", "adam_beta2", "adam_epsilon")

_CLOSURE = "it computes the gradient several times within a step"
_OWN_REDUCTION = "it reduces gradients over processes itself, which is done here before the update"
_AVERAGES = "it trains other weights than it evaluates; use techniques: schedule_free with adamw or sgd"
REFUSED = {
    "lbfgs": _CLOSURE,
    "sparseadam": "it needs sparse gradients",
    "adahessian": "it needs second derivatives",
    "sophiah": "it needs second derivatives",
    "bsam": _CLOSURE,
    "demo": _OWN_REDUCTION,
    "distributedmuon": _OWN_REDUCTION,
    "splus": "it trains other weights than it evaluates",
    "schedulefreeadamw": _AVERAGES,
    "schedulefreeradam": _AVERAGES,
    "schedulefreesgd": _AVERAGES,
}


def find_class(optim: str) -> "type[torch.optim.Optimizer]":
    """Return the class that `optim` names. Raise UsageError if there is none, or if it cannot work here."""
    import torch

    package, _, name = optim.rpartition("/")
    if package not in ("", PACKAGE):
        raise UsageError(f"optim is {optim}: a name may begin with {PACKAGE}/ only")
    name = normalized(BUILT_IN.get(name, name))
    known = _classes(torch.optim) if not package else {}
    if name not in known:
        try:
            known = known | {
                key: kind for key, kind in _classes(importlib.import_module(PACKAGE)).items() if key not in known
            }
        except ImportError as error:
            hint = f"; for the names of {PACKAGE}, install it (requirements-extra.txt): {error}"
            raise UsageError(
                f"optim is {optim}: not one of torch.optim{did_you_mean(name, known)}{hint}; torch has "
                + ", ".join(sorted(known.keys() - REFUSED.keys()))
            ) from error
    if name not in known:
        raise UsageError(f"optim is {optim}: not one of torch.optim or {PACKAGE}{did_you_mean(name, known)}")
    kind = known[name]
    if reason := REFUSED.get(name) or _reason(kind):
        raise UsageError(f"optim is {optim}, which cannot train here: {reason}")
    return kind


def normalized(name: str) -> str:
    """Return a name of an optimizer without package, case and `_`."""
    return name.rpartition("/")[2].replace("_", "").replace("-", "").lower()


def _classes(module: Any) -> "dict[str, type[torch.optim.Optimizer]]":
    import torch

    base = torch.optim.Optimizer
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, base)]
    return {normalized(kind.__name__): kind for kind in kinds if kind is not base}


def _reason(kind: type) -> str | None:
    """Return why an optimizer with this signature cannot be built from parameters and stepped without a closure."""
    arguments = _signature(kind)
    first = next(iter(arguments))
    if first != "params" or "base_optimizer" in arguments:
        return f"it wraps {'a model' if first == 'model' else 'another optimizer'}"
    if "lr" not in arguments:
        return "it has no learning rate, and a schedule sets one here"
    closure = inspect.signature(kind.step).parameters.get("closure")
    return _CLOSURE if closure and closure.default is inspect.Parameter.empty else None


def _signature(kind: type) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(kind).parameters)
    return {name: p for name, p in found.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}


def optimizer_arguments(cfg: RunConfig, kind: type) -> dict[str, Any]:
    """Return the arguments of the constructor besides parameters, `lr` and `weight_decay`.

    Raise UsageError for an unknown name in `optim_args`, an argument that a field sets, or a field without effect."""
    given, known = dict(cfg.optim_args or {}), _signature(kind)
    from_fields = ARGUMENTS_OF_FIELDS.get(kind.__name__, {}) if kind.__module__.startswith("torch.") else {}
    for name in given:
        if field := (FOR_ALL | from_fields).get(name):
            raise UsageError(f"optim_args: {name} is set by {field}: remove it")
        if name not in known:
            settable = known.keys() - FOR_ALL.keys() - from_fields.keys() - UNSUPPORTED.keys()
            raise UsageError(
                f"optim_args: {kind.__name__} has no argument {name}{did_you_mean(name, settable)}; it has "
                + ", ".join(sorted(settable))
            )
        if name in UNSUPPORTED:
            raise UsageError(f"optim_args: {name} is not supported: {UNSUPPORTED[name]}; remove it")
        if expected := _expected(known[name], given[name]):
            raise UsageError(f"optim_args: {name} is {given[name]!r}: {kind.__name__} expects {expected}")
    if missing := [n for n, p in known.items() if p.default is p.empty and n not in FOR_ALL and n not in given]:
        raise UsageError(f"optim is {cfg.optim}, which needs {', '.join(missing)}: give optim_args {{{missing[0]}: …}}")
    if cfg.weight_decay and "weight_decay" not in known:
        raise UsageError(f"weight_decay is {cfg.weight_decay:g}, but {kind.__name__} has none: give --weight_decay 0")
    if not from_fields and kind.__name__ != "Muon":
        for name in ADAM_FIELDS:
            if getattr(cfg, name) != getattr(RunConfig, name):
                raise UsageError(
                    f"{name} is {getattr(cfg, name):g}, which {kind.__name__} does not read: give its own arguments in optim_args"
                )
    values = {"betas": (cfg.adam_beta1, cfg.adam_beta2), "eps": cfg.adam_epsilon, "momentum": cfg.adam_beta1}
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}  # betas are tuples
    return {name: values[name] for name in from_fields} | given | lists


def _expected(argument: inspect.Parameter, value: Any) -> str | None:
    """Return what the argument's default shows to be expected instead of `value`, or None if that is of its kind."""
    default, is_right, expected = argument.default, True, ""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if value is None and any(word in str(argument.annotation) for word in ("None", "Optional")):
        pass
    elif isinstance(default, bool) or argument.name == "foreach":
        is_right, expected = isinstance(value, bool), "true or false"
    elif argument.annotation in (int, "int"):
        is_right, expected = is_number and isinstance(value, int), "a whole number"
    elif isinstance(default, int | float):
        is_right, expected = is_number, "a number"
    elif isinstance(default, str):
        is_right, expected = isinstance(value, str), "a text"
    elif isinstance(default, tuple):
        is_right = isinstance(value, list) and len(value) == len(default)
        expected = f"a list of {len(default)} values, such as {list(default)}"
    return None if is_right else expected


def optimizer_errors(cfg: RunConfig) -> Iterator[str]:
    """Yield the error of `optim` or `optim_args`, if there is one."""
    if cfg.optim in BUILT_IN and not cfg.optim_args:
        return  # spares other commands the import of torch
    try:
        optimizer_arguments(cfg, find_class(cfg.optim))
    except UsageError as error:
        yield str(error)
