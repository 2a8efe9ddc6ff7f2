"""Adapters (LoRA and others of the package peft) around any model: the field `peft`.

A checkpoint holds the base model under its own names, so that `build` loads it, and adapter.safetensors beside it.
Tests: tests/addons/adapters/test_peft.py.
"""

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from src.checkpointing.tensor_files import file_name, write_tensors
from src.config.errors import UsageError, did_you_mean, one_line
from src.config.fields import option
from src.config.paths import locate
from src.models.build_model import ADAPTER, adapter_files
from src.models.load_config import model_folder

NAME = "default"  # the name that peft gives the only adapter of a model; it is part of parameter names
WRAPPED = re.compile(r"\.(base_layer|original_module|token_adapter)(?=\.|$)")  # peft adds these to names of the base
TASK_TYPES = {  # for the Auto classes of peft
    "causal_lm": "CAUSAL_LM",
    "distillation": "CAUSAL_LM",
    "preference": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
    "text_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "embeddings": "FEATURE_EXTRACTION",
}
REFUSED_TYPES = ("adalora", "poly", "xlora", "shadow", "osf")  # they need more than layers in a model: wrong results
REFUSED_OPTIONS = {
    "peft_type": "give type",
    "megatron_core": "it imports a module by name",
    "module_dropout": "it skips layers at random, whose gradients other processes wait for: give rank_dropout",
}
INITIAL = (True, False, "gaussian", "orthogonal")  # values of init_lora_weights that leave the base model as it is


@dataclass(frozen=True)
class Fields:
    peft: dict | None = option(
        "adapter around the model, which alone is trained: {type: lora, r: 8, target: [q_proj, v_proj], …}; types and options "
        "are those of the package peft (docs/techniques.md)",
        group="model",
        from_checkpoint=True,
    )


# ---- options ---------------------------------------------------------------------------------------------------------


def errors(cfg: Any, training: bool) -> Iterator[str]:
    """Yield the error of the field `peft`, if there is one."""
    try:
        read_options(cfg)
    except UsageError as error:
        yield str(error)


def read_options(cfg: Any) -> tuple[type, Any]:
    """Return peft's classes for the field `peft`: the tuner, which injects layers, and its configuration.

    Raise UsageError for an unknown type or option, and for what would silently train something else."""
    if not cfg.peft:
        raise UsageError("peft: it gives no type, so the whole model would be trained: give {type: lora}, or remove it")
    try:
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
    except ImportError as error:
        raise UsageError(
            f"peft: the package peft cannot be imported: {error}; install it: pip install peft (requirements-extra.txt)"
        ) from error
    given = {name: value for name, value in cfg.peft.items() if value is not None}
    configs = {kind.value.lower(): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    tuners = {kind.value.lower(): tuner for kind, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items()}
    works = sorted(name for name in configs if _can_train(name, configs[name], tuners.get(name)))
    name = str(given.pop("type", "lora")).lower()
    if name not in works:
        raise UsageError(f"peft: type is {name}{did_you_mean(name, works)}; choose from {', '.join(works)}")
    if "target" in given:
        given["target_modules"] = given.pop("target")
    if refused := sorted(given.keys() & REFUSED_OPTIONS.keys()):
        raise UsageError(f"peft: {refused[0]}: {REFUSED_OPTIONS[refused[0]]}")
    if (value := given.get("init_lora_weights", True)) not in INITIAL:
        raise UsageError(
            f"peft: init_lora_weights is {value!r}, which changes the base model or needs data: give one of "
            f"{', '.join(str(one).lower() for one in INITIAL)}"
        )
    try:
        return tuners[name], configs[name](**given, task_type=TASK_TYPES.get(cfg.task))
    except Exception as error:  # also a package that one type needs
        raise UsageError(f"peft: {one_line(error)}") from error


def _can_train(name: str, config: type, tuner: Any) -> bool:
    """Return whether a type only adds layers with weights of their own, which a checkpoint then holds."""
    if name in REFUSED_TYPES or tuner is None or getattr(tuner, "uses_shared_state", True):
        return False
    return "target_modules" in vars(config)["__dataclass_fields__"]


# ---- injection -------------------------------------------------------------------------------------------------------


def change_built_model(task: Any, model: torch.nn.Module, weights: str | Path | None, empty: bool) -> None:
    """Add the adapter to a model that the task has built."""
    add_adapter(task, model, weights, empty)


def add_adapter(task: Any, whole: torch.nn.Module, weights: str | Path | None, empty: bool = False) -> Any:
    """Inject the adapter into the part of `whole` that is trained, in place; return peft's tuner.

    Only the adapter, `modules_to_save` and a head that pretrained weights lack (`new_head` of the task) stay trainable. The
    initial adapter depends on the seed only. If the folder of the weights holds an adapter, load it."""
    cfg, model = task.cfg, task.saved(whole)
    kind, config = read_options(cfg)
    folder = None if empty else _folder_with_adapter(cfg, weights)
    if folder and hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # loaded below
    names, tied = list(model.state_dict()), _tied(model)
    is_open = config.target_modules is None and not getattr(config, "target_parameters", None)
    architecture = getattr(getattr(model, "config", None), "model_type", None)
    if is_open and architecture not in (getattr(kind, "target_module_mapping", None) or {}):
        config.target_modules = "all-linear"
    if hasattr(config, "modules_to_save"):
        found = _new_head(model, getattr(task, "new_head", ()))
        config.modules_to_save = [*(config.modules_to_save or []), *found] or None
    torch.manual_seed(cfg.seed)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft sets it itself
            tuner = kind(model, config, adapter_name=NAME)
    except Exception as error:
        raise UsageError(f"peft: {one_line(error)}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name in getattr(task, "new_head", ()))  # a temperature
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, cfg.dtype))
    _check_names(model, cfg.peft or {})
    vars(model)["base_names"] = _base_names(model, names, tied)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if getattr(task, "plain_head", False) and head is not None and type(head).__module__.startswith("peft."):
        task.plain_head = False  # the loss would read the weight of the head without its adapter
    if folder:
        _load(model, folder)
    return tuner


def _check_names(model: torch.nn.Module, given: dict[str, Any]) -> None:
    """Raise UsageError for a target that the model lacks: peft ignores it if another one exists."""
    modules = [f".{name}" for name, _ in model.named_modules()]
    targets = given.get("target", given.get("target_modules"))
    for name in targets if isinstance(targets, list) else ():
        if not any(module.endswith(f".{name}") for module in modules):
            near = did_you_mean(name, {module.rpartition(".")[2] for module in modules})
            raise UsageError(f"peft: target: this model has no module {name!r}{near}")


def _new_head(model: torch.nn.Module, parts: tuple[str, ...]) -> list[str]:
    """Return the outermost modules with a name that contains one of `parts`."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and any(part in f"{name}." for part in parts) and next(module.parameters(), None) is not None:
            found.append(name)
    return found


def _tied(model: torch.nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _base_names(model: torch.nn.Module, names: list[str], tied: list[list[str]]) -> dict[str, str]:
    """Return {name in the adapted model: name in the base model}; raise UsageError if a weight of two layers has one."""
    known, found = set(names), {name: WRAPPED.sub("", name) for name in model.state_dict()}
    found = {name: base for name, base in found.items() if base in known}
    if sorted(found.values()) != sorted(names):
        raise UsageError(f"peft: this type changes the names of {type(model).__name__}: give another type")
    moved = {base for name, base in found.items() if name != base}
    for group in tied:
        if moved & set(group):
            raise UsageError(
                f"peft: {' and '.join(group)} are one weight, so an adapter of one layer could not be merged: give a target "
                "(or modules_to_save) without these layers"
            )
    return found


def _folder_with_adapter(cfg: Any, weights: str | Path | None) -> Path | None:
    name = str(weights or cfg.model_name_or_path or "")
    folder = Path(locate(name) if weights else model_folder(cfg, name)) if name else None
    return folder if folder and adapter_files(folder) else None


@torch.no_grad()
def _load(model: torch.nn.Module, folder: Path) -> None:
    """Copy the tensors of adapter*.safetensors into the model. In final/, the unmerged weights are among them."""
    state, loaded = model.state_dict(keep_vars=True), set()
    wrong = f"peft: the adapter in {folder} has other layers than this field asks for"
    for path in adapter_files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no dict)
                value = file.get_tensor(name)
                if name not in state or state[name].shape != value.shape:
                    raise UsageError(f"{wrong} ({name}): give the options of the run that saved it")
                state[name].copy_(value)
                loaded.add(name)
    if missing := sorted(state.keys() - vars(model)["base_names"].keys() - loaded):
        raise UsageError(f"{wrong} ({missing[0]}): give the options of the run that saved it")


def write_own_tensors(
    model: torch.nn.Module, tensors: dict[str, torch.Tensor], folder: Path, rank: int, world: int
) -> dict[str, torch.Tensor]:
    """Write the adapter to adapter.safetensors; return the tensors of the base model under its own names."""
    if "base_names" not in vars(model):
        return tensors  # the adapter is merged
    base: dict[str, str] = vars(model)["base_names"]
    adapter = {name: value for name, value in tensors.items() if name not in base}
    if adapter or world == 1:
        write_tensors(adapter, folder / file_name(ADAPTER, rank, world))
    return {base[name]: value for name, value in tensors.items() if name in base}


def change_final_model(folder: Path, task: Any) -> None:
    """Merge the adapter in `folder` into the weights, so that `from_pretrained` needs no peft."""
    from addons.adapters.peft.merged_model import write_merged

    write_merged(folder, task)


def model_card(cfg: Any) -> str:
    """Return the paragraph of the model card about the adapter."""
    options = ", ".join(f"{name} {value}" for name, value in cfg.peft.items())
    return (
        f"\nTrained with an adapter ({options}), which is merged into the "
        "weights here. The folder adapter/ holds it alone, for `PeftModel.from_pretrained`; adapter.safetensors holds what "
        "an exact evaluation or further training of the adapter needs.\n"
    )
