"""Adapters (LoRA and others of the package peft) around any model: injection, files, merged weights.

A checkpoint holds the base model under its own names, so that `build` loads it, and adapter.safetensors beside it.
Tests: tests/models/test_adapters.py.
"""

import copy
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from src.config.errors import UsageError, did_you_mean
from src.config.paths import locate
from src.config.schema import RunConfig
from src.models.adapter_options import read_options
from src.models.model_files import ADAPTER, adapter_files, model_folder, reason

NAME = "default"  # the name that peft gives the only adapter of a model; it is part of parameter names
WRAPPED = re.compile(r"\.(base_layer|original_module|token_adapter)(?=\.|$)")  # peft adds these to names of the base

# ---- injection -------------------------------------------------------------------------------------------------------


def add_adapter(task: Any, whole: torch.nn.Module, weights: str | Path | None, empty: bool = False) -> Any:
    """Inject the adapter into the part of `whole` that is trained, in place; return peft's tuner.

    Only the adapter, `modules_to_save` and a head that pretrained weights lack (`Task.new_head`) stay trainable. The
    initial adapter depends on the seed only. If the folder of the weights holds an adapter, load it."""
    cfg, model = task.cfg, task.saved(whole)
    kind, config = read_options(cfg)
    folder = None if empty else _folder_with_adapter(cfg, weights)
    if folder and hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # loaded below
    names, tied = list(model.state_dict()), _tied(model)
    is_open = config.target_modules is None and not getattr(config, "target_parameters", None)
    if is_open and _architecture(model) not in (getattr(kind, "target_module_mapping", None) or {}):
        config.target_modules = "all-linear"
    if hasattr(config, "modules_to_save"):
        found = _new_head(model, task.new_head)
        config.modules_to_save = [*(config.modules_to_save or []), *found] or None
    leaves = sorted({name.rpartition(".")[2] for name, part in model.named_modules() if _has_matrix(part)})
    torch.manual_seed(cfg.seed)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft sets it itself
            tuner = kind(model, config, adapter_name=NAME)
    except Exception as error:
        raise UsageError(
            f"peft: {reason(error)} (linear layers and convolutions of this model: {', '.join(leaves)})"
        ) from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name in task.new_head)  # a temperature
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, cfg.dtype))
    _check_names(model, cfg.peft or {})
    vars(model)["base_names"] = _base_names(model, names, tied)
    if not empty:
        _check_mergeable(model, kind)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if getattr(task, "plain_head", False) and head is not None and type(head).__module__.startswith("peft."):
        task.plain_head = False  # the loss would read the weight of the head without its adapter
    if folder:
        _load(model, folder)
    return tuner


def _check_names(model: torch.nn.Module, given: Mapping[str, Any]) -> None:
    """Raise UsageError for a name of a module that the model lacks: peft ignores it if another one exists."""
    modules = [f".{name}" for name, _ in model.named_modules()]
    for option, before in (("target", "."), ("target_modules", "."), ("modules_to_save", "")):
        for name in given[option] if isinstance(given.get(option), list) else ():
            if not any(module.endswith(f"{before}{name}") for module in modules):
                leaves = sorted({module.rpartition(".")[2] for module in modules})
                raise UsageError(f"peft: {option}: this model has no module {name!r}{did_you_mean(name, leaves)}")


def _architecture(model: torch.nn.Module) -> str | None:
    return getattr(getattr(model, "config", None), "model_type", None)


def _has_matrix(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d)) or type(module).__name__ == "Conv1D"


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


def _check_mergeable(model: torch.nn.Module, kind: type) -> None:
    """Merge a copy of one layer of each kind; raise UsageError if it fails: a run would notice it in its last minute."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    tried = set()
    for name, layer in model.named_modules():
        key = (type(layer), *(part for part, _ in layer.named_parameters()))
        if not isinstance(layer, BaseTunerLayer) or key in tried:
            continue
        tried.add(key)
        try:
            copy.deepcopy(layer).merge()
        except Exception as error:
            text = f"peft: {name}: {kind.__name__} cannot merge this layer, which final/ needs: {reason(error)}"
            raise UsageError(f"{text}: give another type or target") from error


# ---- files -----------------------------------------------------------------------------------------------------------


def split(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> tuple[dict, dict[str, torch.Tensor]]:
    """Return (tensors of the base model under its own names, tensors of the adapter)."""
    base: dict[str, str] = vars(model)["base_names"]
    own = {name: value for name, value in tensors.items() if name not in base}
    return {base[name]: value for name, value in tensors.items() if name in base}, own


def is_adapted(model: torch.nn.Module) -> bool:
    """Return whether the model has an adapter."""
    return "base_names" in vars(model)


def _folder_with_adapter(cfg: RunConfig, weights: str | Path | None) -> Path | None:
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


@torch.no_grad()
def merge(task: Any, folder: Path) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return (the model of `folder` with its adapter merged, the tensors that it had before and that merging lost).

    Write the adapter as peft does to FOLDER/adapter."""
    from peft.utils import get_peft_model_state_dict

    whole = task.build(str(folder))
    tuner = add_adapter(task, whole, folder)
    model, config = tuner.model, tuner.peft_config[NAME]
    export = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    base = task.cfg.model_name_or_path
    config.base_model_name_or_path = (
        base if base and not Path(locate(base)).exists() else None
    )  # no path of this machine
    config.revision, config.inference_mode = task.cfg.model_revision if base else None, True
    if getattr(config, "feedforward_modules", None) and isinstance(config.target_modules, set):
        config.feedforward_modules = set(config.feedforward_modules) & config.target_modules  # else peft cannot load it
    config.save_pretrained(folder / ADAPTER)
    named = {f"base_model.model.{name}": value.clone() for name, value in export.items()}
    save_file(named, folder / ADAPTER / "adapter_model.safetensors", {"format": "pt"})
    names = vars(model).pop("base_names")
    lost = {name: value.clone() for name, value in model.state_dict().items() if names.get(name) != name}
    tuner.merge_and_unload()
    return whole, lost
