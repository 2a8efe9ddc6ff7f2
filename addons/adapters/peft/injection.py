"""Injection of an adapter into the part of a model that is trained.

Tests: tests/addons/adapters/test_peft.py.
"""

import re
import warnings
from pathlib import Path
from typing import Any

import torch

from addons.adapters.peft.files import NAME, adapter_files, load_adapter
from addons.adapters.peft.options import read_options
from engine.config.errors import UsageError, did_you_mean, errors_of, warn
from engine.config.paths import locate
from engine.config.run_config import field_values
from engine.models.new_tokens import token_ids
from engine.run.model_with_loss import tied_names

WRAPPED = re.compile(r"\.(base_layer|original_module|token_adapter)(?=\.|$)")  # peft adds these to names of the base
TOKENS = "token_adapter.base_layer"  # where peft keeps a weight of which it trains single rows


def add_adapter(task: Any, whole: torch.nn.Module, weights: str | Path | None, empty: bool = False) -> Any:
    """Inject the adapter into the part of `whole` that is trained, in place; return peft's tuner.

    Only the adapter, `modules_to_save` and a head that pretrained weights lack (`new_head` of the task) stay trainable. The
    initial adapter depends on the seed only. If `weights`, the model of a run, have an adapter, load it. A model that
    model_name_or_path names gets a new one, also if it is the merged model of a run."""
    cfg, model = task.cfg, task.saved(whole)
    tuner_class, config = read_options(field_values(cfg)["peft"])
    folder = Path(locate(str(weights))) if weights and not empty else None
    folder = folder if folder and adapter_files(folder) else None
    new_head = getattr(task, "new_head", ())
    if config.target_modules is None and not getattr(config, "target_parameters", None):
        architecture = getattr(getattr(model, "config", None), "model_type", None)
        layers = _layers_of_peft(tuner_class, config)
        if layers is not None and architecture not in layers:
            config.target_modules = "all-linear"
    if hasattr(config, "modules_to_save"):
        config.modules_to_save = [*(config.modules_to_save or []), *_outermost(model, new_head)] or None
    _check_names(model, config)
    _train_new_tokens(config, model, token_ids(getattr(task, "tokenizer", None)))
    names, tied = list(model.state_dict()), tied_names(model)
    torch.manual_seed(cfg.seed)
    with errors_of("peft"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft sets it itself
        tuner = tuner_class(model, config, adapter_name=NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name in new_head)  # a temperature
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, cfg.dtype))
    _widen_adapter(model, getattr(torch, cfg.dtype))
    vars(model)["base_names"] = _base_names(model, names, tied)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if getattr(task, "plain_head", False) and head is not None and type(head).__module__.startswith("peft."):
        task.plain_head = False  # the loss would read the weight of the head without its adapter
    if folder:
        load_adapter(task, model, folder, config)
    task.adapter_folder = folder
    return tuner


def _layers_of_peft(tuner_class: type, config: Any) -> dict[str, list[str]] | None:
    """Return peft's own choice of layers for each architecture; None if a type asks the model for its layers."""
    from peft.utils import constants

    layers = getattr(tuner_class, "target_module_mapping", None)  # ia3 has none, but a constant (0.21)
    return layers or getattr(constants, f"TRANSFORMERS_MODELS_TO_{config.peft_type.value}_TARGET_MODULES_MAPPING", None)


def _check_names(model: torch.nn.Module, config: Any) -> None:
    """Raise UsageError for a name of a layer that the model does not have: peft ignores one beside others that it has."""
    layers = [
        name
        for name, module in model.named_modules()
        if name and next(module.parameters(recurse=False), None) is not None
    ]
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters()]
    numbers = {int(part) for name in modules for part in name.split(".") if part.isdecimal()}
    numbered = getattr(config, "layers_to_transform", None)
    for number in [numbered] if isinstance(numbered, int) else numbered or []:
        if number not in numbers:
            last = max(numbers, default=None)
            raise UsageError(
                f"peft: layers_to_transform: {type(model).__name__} has no layer {number}: its layers "
                + ("have no numbers" if last is None else f"are 0 to {last}")
            )
    for option_name, known in (
        ("target_modules", modules),
        ("modules_to_save", modules),
        ("target_parameters", parameters),
    ):
        wanted = getattr(config, option_name, None)
        if isinstance(wanted, str) and wanted != "all-linear":
            with errors_of("peft", option_name, wanted):  # a pattern that is none
                matches = any(re.fullmatch(wanted, name) for name in known)
            if not matches and any(name.endswith(f".{wanted}") for name in known):
                raise UsageError(f"peft: {option_name}: {wanted} is a pattern of whole names: give the list [{wanted}]")
            wanted = [] if matches else [wanted]  # one without a match is refused below, with the names that there are
        for name in sorted(wanted) if isinstance(wanted, list | set | tuple) else ():
            end = name if option_name == "modules_to_save" else f".{name}"  # as peft compares them
            if any(each == name or each.endswith(end) for each in known):
                continue
            choices = sorted({each.rpartition(".")[2] for each in (known if known is parameters else layers)})
            raise UsageError(
                f"peft: {option_name}: {name} is no part of {type(model).__name__}{did_you_mean(name, choices)}; choose from "
                f"{', '.join(choices)}"
            )


def _widen_adapter(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the adapter to `dtype`, but to float32 if that has 16 bits: so do its moments, and updates are not lost.

    As in peft, `modules_to_save` and new heads keep the dtype of the base model, because their inputs have it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    wide = torch.float32 if dtype.itemsize < 4 else dtype
    for module in model.modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and not name.startswith("base_layer."):
                parameter.data = parameter.data.to(wide)
    narrow = [name for name, value in model.named_parameters() if value.requires_grad and value.itemsize < 4]
    if narrow:
        warn(
            f"dtype is {str(dtype).removeprefix('torch.')}, so {narrow[0]} and {len(narrow) - 1} more trained weights beside the "
            "adapter have no float32 copy and lose updates smaller than 1/256 of a weight: set mixed_precision: bf16 in "
            "the accelerate file (YAML) and keep dtype float32, or train none of them"
        )


def _train_new_tokens(config: Any, model: torch.nn.Module, ids: list[int]) -> None:
    """Let the adapter train the rows of the tokens `ids` of add_tokens, in the embedding and in a head of its own."""
    if not ids:
        return
    if not hasattr(config, "trainable_token_indices"):
        raise UsageError(f"peft: type {config.peft_type.value.lower()} cannot train the rows of add_tokens: give lora")
    if config.trainable_token_indices:
        raise UsageError("peft: trainable_token_indices and add_tokens are both given: remove one of them")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = [embedding]
    if head is not None and head.weight is not embedding.weight:
        layers.append(head)
        if getattr(head, "bias", None) is not None:  # peft leaves it out (0.21)
            raise UsageError(
                "peft: add_tokens needs a head without bias: train the whole model, or do without new tokens"
            )
    names = [name for name, module in model.named_modules() if any(module is layer for layer in layers)]
    fully = [name for name in names if any(name.endswith(part) for part in config.modules_to_save or ())]
    config.trainable_token_indices = {name: ids for name in names if name not in fully} or None


def _outermost(model: torch.nn.Module, parts: tuple[str, ...]) -> list[str]:
    """Return the outermost modules with a name that contains one of `parts`."""
    names: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in names)
        if not inside and any(part in f"{name}." for part in parts) and next(module.parameters(), None) is not None:
            names.append(name)
    return names


def _base_names(model: torch.nn.Module, names: list[str], tied: list[list[str]]) -> dict[str, str]:
    """Return {name in the adapted model: name in the base model}; raise UsageError if a weight of two layers has one."""
    before, base_of = set(names), {name: WRAPPED.sub("", name) for name in model.state_dict()}
    base_of = {name: base for name, base in base_of.items() if base in before}
    if sorted(base_of.values()) != sorted(names):
        raise UsageError(f"peft: this type changes the names of {type(model).__name__}: give another type")
    moved = {base for name, base in base_of.items() if name != base}
    for group in tied:
        trains_tokens = all(f"{name.removesuffix('.weight')}.{TOKENS}.weight" in base_of for name in group)
        if moved & set(group) and not trains_tokens:  # rows of tokens stay tied, and are merged once
            raise UsageError(
                f"peft: {' and '.join(group)} are one weight, so an adapter of one layer could not be merged: give a target "
                "(or modules_to_save) without these layers"
            )
    return base_of
