"""The options of the field `peft`: those of the package peft, without those that would train something else.

Tests: tests/addons/adapters/test_peft.py.
"""

from typing import Any

from engine.config.errors import UsageError, errors_of
from engine.process import private_apis

# peft would train these to a wrong result: adalora changes its ranks and its loss in every step, poly needs a task for each
# row, xlora mixes other adapters, osf replaces weights of the base model; shadow it does not inject into a model.
REFUSED_TYPES = ("adalora", "osf", "poly", "shadow", "xlora")
REFUSED_OPTIONS = {
    "megatron_core": "it imports a module by name",
    "module_dropout": "it skips layers at random, and other processes wait for their gradients: give rank_dropout",
}
UNMERGEABLE_TYPES = ("lily",)  # peft has no merge for these (0.21)
INITIAL = (True, False, "gaussian", "orthogonal")  # values of init_lora_weights that leave the base model as it is


def read_options(given: dict[str, Any] | None) -> tuple[type, Any]:
    """Return peft's classes for the field `peft`: the tuner, which injects layers, and its configuration.

    Raise UsageError for what peft refuses, and for what would silently train something else."""
    if not given:
        raise UsageError("peft: it gives no type, so the whole model would be trained: give {type: lora}, or remove it")
    private_apis.bitsandbytes()  # if it is there, peft imports it
    try:
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
    except ImportError as error:
        raise UsageError(f"peft: {error}; install it: pip install peft (requirements-extra.txt)") from error
    given = {"target_modules" if name == "target" else name: v for name, v in given.items() if v is not None}
    name = str(given.pop("type", "lora")).lower()
    tuners = {kind.value.lower(): tuner for kind, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items()}
    configs = {kind.value.lower(): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    configs = {each: config for each, config in configs.items() if _is_exact(each, config, tuners.get(each))}
    if name not in configs:
        works = ", ".join(sorted(configs))
        raise UsageError(f"peft: type is {name}: unknown, or no adapter of single layers; choose from {works}")
    if refused := sorted(given.keys() & REFUSED_OPTIONS.keys()):
        raise UsageError(f"peft: {refused[0]}: {REFUSED_OPTIONS[refused[0]]}")
    if (value := given.get("init_lora_weights", True)) not in INITIAL:
        raise UsageError(f"peft: init_lora_weights is {value!r}, which changes the base model or needs data: give true")
    with errors_of("peft"):  # also a package that one type needs
        return tuners[name], configs[name](**given)


def _is_exact(name: str, config: type, tuner: Any) -> bool:
    """Return whether a type changes layers in the model, and these share no weights outside of it."""
    in_layers = tuner is not None and "target_modules" in vars(config)["__dataclass_fields__"]
    return in_layers and name not in REFUSED_TYPES and not getattr(tuner, "uses_shared_state", True)
