"""Options of the field `peft`, by the names of the package peft: read and checked before the model is built.

Tests: tests/models/test_adapters.py.
"""

import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from src.config.errors import UsageError, did_you_mean
from src.config.schema import RunConfig
from src.models.model_files import reason

TASK_TYPES = {  # for the Auto classes of peft
    "causal_lm": "CAUSAL_LM",
    "distillation": "CAUSAL_LM",
    "preference": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
    "text_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "embeddings": "FEATURE_EXTRACTION",
}
REFUSED_TYPES = {
    "adalora": "it changes its ranks and its loss in every step",
    "poly": "it needs a task for each row",
    "xlora": "it mixes other adapters",
    "shadow": "peft does not inject it into a model",
    "osf": "it replaces the weights of the base model",
}
NOT_OPTIONS = {
    **dict.fromkeys(("peft_type", "auto_mapping", "peft_version"), "give type"),
    **dict.fromkeys(("base_model_name_or_path", "revision"), "give model_name_or_path and model_revision"),
    **dict.fromkeys(("task_type", "inference_mode"), "it follows from the task"),
    "megatron_core": "it imports a module by name",
    "module_dropout": "it skips layers at random, whose gradients other processes wait for: give rank_dropout",
    "layer_replication": "it changes the layers of the base model",
}
INITIAL = (True, False, "gaussian", "orthogonal")  # values of init_lora_weights that leave the base model as it is


def read_options(cfg: RunConfig) -> tuple[type, Any]:
    """Return peft's classes for the field `peft`: the tuner, which injects layers, and its configuration.

    Raise UsageError for an unknown type or option, a value of the wrong type, and what cannot work here."""
    if not cfg.peft:
        raise UsageError("peft: it gives no type, so the whole model would be trained: give {type: lora}, or remove it")
    try:
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
    except ImportError as error:
        raise UsageError(
            f"peft: the package peft cannot be imported: {error}; install it: pip install peft (requirements-extra.txt)"
        ) from error
    given = {name: value for name, value in cfg.peft.items() if value is not None}
    configs = {kind.value.lower(): found for kind, found in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    tuners = {kind.value.lower(): found for kind, found in PEFT_TYPE_TO_TUNER_MAPPING.items()}
    works = sorted(name for name in configs if _why_refused(name, configs[name], tuners.get(name)) is None)
    name = str(given.pop("type", "lora")).lower()
    if name not in configs:
        raise UsageError(
            f"peft: type: unknown value {name!r}{did_you_mean(name, works)}; choose from {', '.join(works)}"
        )
    if why := _why_refused(name, configs[name], tuners.get(name)):
        raise UsageError(f"peft: type is {name}, which cannot train here: {why}; choose from {', '.join(works)}")
    values = _check_options(configs[name], given)
    try:
        return tuners[name], configs[name](**values, task_type=TASK_TYPES.get(cfg.task))
    except Exception as error:  # also a package that one type needs
        raise UsageError(f"peft: {reason(error)}") from error


def _why_refused(name: str, config: type, tuner: Any) -> str | None:
    if name in REFUSED_TYPES:
        return REFUSED_TYPES[name]
    if tuner is None or "target_modules" not in vars(config)["__dataclass_fields__"]:
        return "it changes the forward pass of the model instead of layers in it"
    return "its layers share weights outside of the model" if getattr(tuner, "uses_shared_state", True) else None


def _check_options(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by peft's names (`target` is target_modules); raise UsageError for the first wrong one."""
    try:
        hints = get_type_hints(config)
    except NameError:  # a type that peft imports for type checkers only
        hints = dict.fromkeys(vars(config)["__dataclass_fields__"], Any)
    allowed = {name for name in hints if name not in NOT_OPTIONS and not name.endswith("_config")}
    values = {}
    for short, value in given.items():
        name = "target_modules" if short == "target" else short
        if name in values:
            raise UsageError("peft: target and target_modules are the same option: keep one")
        if name not in allowed:
            why = f"; {NOT_OPTIONS[name]}" if name in NOT_OPTIONS else did_you_mean(short, {*allowed, "target", "type"})
            raise UsageError(
                f"peft: {short}: no option of {config.__name__} here{why}; it has {', '.join(sorted(allowed))}"
            )
        if not _fits(hints[name], value):
            expected = re.sub(r"typing\.|<class '|'>", "", str(hints[name]))
            raise UsageError(f"peft: {short} is {value!r}: expected {expected}")
        if name.endswith("dropout") and not 0 <= value < 1:
            raise UsageError(f"peft: {short} is {value!r}: give a probability below 1")
        if name.endswith("alpha") and value <= 0:
            raise UsageError(f"peft: {short} is {value!r}: the adapter is multiplied by it; give a number above 0")
        if name == "init_lora_weights" and value not in INITIAL:
            raise UsageError(
                f"peft: {short} is {value!r}, which changes the base model or needs data: give one of "
                f"{', '.join(str(one).lower() for one in INITIAL)}"
            )
        values[name] = value
    return values


def _fits(hint: Any, value: Any) -> bool:
    """Return False if a value from YAML cannot be of this type; peft itself checks what this does not know."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return any(_fits(part, value) for part in parts)
    if kind is Literal:
        return value in parts
    if kind in (list, set, tuple):
        return isinstance(value, list) and all(_fits(parts[0], one) for one in value if parts)
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    known = kind or hint
    return isinstance(value, known) if known in (str, bool, list, dict, type(None)) else True
