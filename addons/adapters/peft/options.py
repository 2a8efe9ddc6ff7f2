"""The options of the field `peft`: those of the package peft, without those that would train something else.

Tests: tests/addons/adapters/test_peft.py.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from engine.config.errors import UsageError, did_you_mean, errors_of
from engine.process import private_apis

# peft would train these to a wrong result: adalora changes its ranks and its loss in every step, poly needs a task for each
# row, xlora mixes other adapters, osf replaces weights of the base model; shadow it does not inject into a model.
REFUSED_TYPES = ("adalora", "osf", "poly", "shadow", "xlora")
REFUSED_OPTIONS = {
    "alora_invocation_tokens": "peft looks for them outside of the layers, so nothing would be trained: remove it",
    "inference_mode": "it freezes the adapter, so nothing would be trained: remove it",
    "layer_replication": "layers that share weights could not be saved: remove it",
    "megatron_core": "it imports a module by name",
    "module_dropout": "it skips layers at random, and other processes wait for their gradients: give rank_dropout",
}
UNMERGEABLE_TYPES = ("lily",)  # peft has no merge for these (0.21)
INITIAL = (True, False, "gaussian", "orthogonal")  # values of init_lora_weights that leave the base model as it is

KINDS = {"int": (int, "a whole number"), "float": (int | float, "a number"), "bool": (bool, "true or false")}


def read_options(given: dict[str, Any] | None) -> tuple[type, Any]:
    """Return peft's classes for the field `peft`: the tuner, which injects layers, and its configuration.

    Raise UsageError for what peft refuses, and for what would silently train something else."""
    if not given:
        raise UsageError("peft: it gives no type, so the whole model would be trained: give {type: lora}, or remove it")
    private_apis.bitsandbytes()  # if it is there, peft imports it
    with errors_of("peft"):  # such as a missing package
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
    if given.get("target") is not None and given.get("target_modules") is not None:
        raise UsageError("peft: target is short for target_modules, and both are given: remove one of them")
    given = {"target_modules" if name == "target" else name: v for name, v in given.items() if v is not None}
    name = str(given.pop("type", "lora")).lower()
    tuners = {kind.value.lower(): tuner for kind, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items()}
    configs = {kind.value.lower(): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    configs = {each: config for each, config in configs.items() if _is_exact(each, config, tuners.get(each))}
    if name not in configs:
        works = ", ".join(sorted(configs))
        raise UsageError(f"peft: type is {name}: unknown, or no adapter of single layers; choose from {works}")
    if refused := sorted(each for each in given.keys() & REFUSED_OPTIONS.keys() if given[each] is not False):
        raise UsageError(f"peft: {refused[0]}: {REFUSED_OPTIONS[refused[0]]}")
    _check_values(name, given, dataclasses.fields(configs[name]))
    if (value := given.get("init_lora_weights", True)) not in INITIAL:
        raise UsageError(f"peft: init_lora_weights is {value!r}, which changes the base model or needs data: give true")
    if name == "trainable_tokens" and not given.get("token_indices"):
        raise UsageError("peft: type trainable_tokens needs the ids of the tokens to train: give token_indices: [5, 6]")
    with errors_of("peft"):  # also a package that one type needs
        return tuners[name], configs[name](**given)


def _check_values(kind: str, given: dict[str, Any], fields: Iterable[dataclasses.Field]) -> None:
    """Raise UsageError for an option that a type does not have, and for a number, true or false that is none."""
    types = {field.name: field.type for field in fields if field.init}
    for name, value in given.items():
        if name not in types:
            names = sorted({*types, "target"})
            raise UsageError(f"peft: {name} is an unexpected option of type {kind}{did_you_mean(name, names)}")
        wanted = getattr(types[name], "__name__", str(types[name]))  # peft writes them as types or as text
        wanted = wanted.removeprefix("Optional[").removesuffix("]")
        if wanted == "int" and name.endswith(("alpha", "lambda")):
            wanted = "float"  # a factor
        fits, words = KINDS.get(wanted, (object, ""))
        if not isinstance(value, fits) or (words and isinstance(value, bool) != (wanted == "bool")):
            raise UsageError(f"peft: {name} is {value!r}: give {words}")
        if name.endswith("dropout") and isinstance(value, int | float) and not 0 <= value < 1:
            raise UsageError(f"peft: {name} is {value}: give a number from 0 to less than 1")


def _is_exact(name: str, config: type, tuner: Any) -> bool:
    """Return whether a type changes layers in the model, and these share no weights outside of it."""
    in_layers = tuner is not None and "target_modules" in vars(config)["__dataclass_fields__"]
    return in_layers and name not in REFUSED_TYPES and not getattr(tuner, "uses_shared_state", True)
