"""The files of an adapter: those of a checkpoint, and those in the format of peft.

Tests: tests/addons/adapters/test_adapter_checkpoints.py, tests/addons/adapters/test_adapter_formats.py.
"""

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from addons.adapters.peft.options import read_options
from engine.config.errors import UsageError
from engine.distributed.running_statistics import persistent_buffers
from engine.models.config_and_tokenizer import BASE_FILE
from engine.storage.jsonl import read_json

ADAPTER = "adapter"  # adapter.safetensors of a checkpoint; in final/ a folder in the format of peft
NAME = "default"  # the name that peft gives the only adapter of a model; it is part of parameter names
PREFIX = "base_model.model."  # of names in the format of peft
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"  # of the format of peft
# peft's type of a task -> names of the model classes of transformers
TASK_TYPES = {
    "CAUSAL_LM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "SEQ_CLS": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "SEQ_2_SEQ_LM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "TOKEN_CLS": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "FEATURE_EXTRACTION": "MODEL_MAPPING_NAMES",
}
# Options that decide where layers are, which their names say, or that count only in training.
FREE_OPTIONS = {"auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode"}
FREE_OPTIONS |= {"init_lora_weights", "init_weights", "layers_pattern", "layers_to_transform", "modules_to_save"}
FREE_OPTIONS |= {"peft_version", "revision", "target_modules", "target_parameters", "task_type", "feedforward_modules"}
FREE_OPTIONS |= {"trainable_token_indices"}  # of add_tokens


def adapter_files(folder: Path) -> list[Path]:
    """Return the files of the adapter that a run has saved in `folder`, or of one in the format of peft, if any.

    In final/ they lie in adapter/: servers load each safetensors file beside model.safetensors as weights of the model."""
    is_merged = (folder / BASE_FILE).exists() and (folder / ADAPTER / CONFIG_FILE).exists()
    for place in (folder, folder / ADAPTER):
        ours = sorted([*place.glob(f"{ADAPTER}.safetensors"), *place.glob(f"{ADAPTER}-*-of-*.safetensors")])
        is_of_peft = is_merged if place != folder else (folder / CONFIG_FILE).exists()
        if ours or (is_of_peft and (place / WEIGHTS_FILE).exists()):
            return ours or [place / WEIGHTS_FILE]
    return []


def _names_in_peft(model: torch.nn.Module, trained: Iterable[str]) -> dict[str, str]:
    """Return {name of what is trained: its name in adapter_model.safetensors}.

    peft itself renames numbers in place of the tensors. What it does not export, such as buffers, keeps its name below
    the prefix, so that peft loads it, too."""
    from peft.utils import get_peft_model_state_dict

    trained = list(trained)
    numbers = {name: torch.tensor(index) for index, name in enumerate(trained)}
    export = get_peft_model_state_dict(model, state_dict=numbers, adapter_name=NAME, save_embedding_layers=False)
    named = {trained[int(number)]: PREFIX + name for name, number in export.items()}
    return {name: named.get(name, PREFIX + name) for name in trained}


@torch.no_grad()
def load_adapter(task: Any, model: torch.nn.Module, folder: Path, config: Any) -> None:
    """Copy the tensors of an adapter into the model."""
    _check_options(folder, config)
    _check_rows(folder, config)
    state = model.state_dict(keep_vars=True)
    files = adapter_files(folder)
    stored = {name: value for path in files for name, value in load_file(path).items()}
    if files[0].name == WEIGHTS_FILE:
        stored = {PREFIX + name.removeprefix(PREFIX): value for name, value in stored.items()}
        names = {other: name for name, other in _names_in_peft(model, trained_tensors(model)).items()}
        stored = {names.get(name, name): value for name, value in stored.items()}
    missing = state.keys() - vars(model)["base_names"].keys() - stored.keys()
    other = [name for name, value in stored.items() if name not in state or state[name].shape != value.shape]
    if missing or other:
        name = min([*missing, *other])
        difference = "this run has no such layer"
        if name in missing:
            difference = "the adapter has no such layer"
        elif name in state:
            difference = f"{list(stored[name].shape)} there, {list(state[name].shape)} here"
        raise UsageError(
            f"peft: the adapter in {folder} has other layers than this field asks for ({name}: {difference}): give the options "
            "of the run that saved it; or for a new adapter on its merged model, --model_name_or_path instead of --init_from"
        )
    for name, value in stored.items():
        state[name].copy_(value)


def _check_options(folder: Path, config: Any) -> None:
    """Raise UsageError if the adapter in `folder` was trained with other options, such as another lora_alpha."""
    saved = _saved_options(folder)
    here = _plain_options(config.to_dict())
    for name in sorted(saved.keys() & here.keys() - FREE_OPTIONS):
        counts_in_training_only = name.endswith(("dropout", "_config"))
        if saved[name] != here[name] and not counts_in_training_only:
            option_name = "type" if name == "peft_type" else name
            raise UsageError(
                f"peft: the adapter in {folder} was trained with {option_name} {saved[name]}, but this field says {here[name]}: "
                f"give {option_name}: {saved[name]}"
            )


def _check_rows(folder: Path, config: Any) -> None:
    """Raise UsageError if the adapter in `folder` has rows of other tokens, or in another order, than this run trains."""
    there, here = (
        _saved_options(folder).get("trainable_token_indices"),
        getattr(config, "trainable_token_indices", None),
    )
    if there and here and _token_ids(there) != _token_ids(here):
        raise UsageError(
            f"add_tokens: the adapter in {folder} has rows of the tokens {_token_ids(there)}, but this run trains those of "
            f"{_token_ids(here)} (ids, trainable_token_indices in adapter_config.json): give the tokens of the adapter in its order"
        )


def _token_ids(indices: Any) -> str:
    """Return the ids of trainable_token_indices, which is a list, or has one for each layer."""
    lists = indices.values() if isinstance(indices, dict) else [indices]
    return " and ".join(sorted({str(list(ids)) for ids in lists}))


def _saved_options(folder: Path) -> dict[str, Any]:
    """Return the options of an adapter: of peft's own file, or of the run that saved a checkpoint; {} if there are none."""
    for place in (folder, folder / ADAPTER):
        file = place / CONFIG_FILE
        if file.exists():
            return _plain_options(json.loads(file.read_text(encoding="utf-8")))
    given = read_json(folder / "state.json").get("config", {}).get("peft")
    return _plain_options(read_options(given)[1].to_dict()) if given else {}


def _plain_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return options as JSON has them; a set as a sorted list."""
    plain = json.dumps(values, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    return json.loads(plain)


def tensors_of_base(model: torch.nn.Module, tensors: dict[str, Any]) -> set[str]:
    """Return the names in `tensors`, the state dict of the saved part of the model, that checkpoints leave out.

    These are the frozen parameters of the base model. Buffers are saved, because training may change them. If the adapter
    is merged, there are none."""
    names = vars(model).get("base_names", {}).keys() - persistent_buffers(model).keys()
    return {name for name in names & tensors.keys() if not getattr(tensors[name], "requires_grad", False)}


def trained_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what a checkpoint holds of an adapted model, by name: all but the base model."""
    state = model.state_dict(keep_vars=True)
    left_out = tensors_of_base(model, state)
    return {name: value.detach() for name, value in state.items() if name not in left_out}


def write_in_format_of_peft(task: Any, tuner: Any, folder: Path, trained: dict[str, torch.Tensor]) -> None:
    """Write adapter_config.json and adapter_model.safetensors, which `PeftModel` and `AutoPeftModelFor…` load."""
    model, config = tuner.model, copy.copy(tuner.peft_config[NAME])
    base = task.base_model
    # Of a folder, its path as the run file gives it: AutoPeftModelForCausalLM looks for the base model there.
    config.base_model_name_or_path = base.name if base else None
    config.revision = base.commit if base else None
    config.inference_mode = True
    config.task_type, mapping = _task_type(model)
    sets = getattr(config, "feedforward_modules", None), config.target_modules
    if all(isinstance(each, set) for each in sets) and not sets[0] <= sets[1]:  # peft refuses this when it loads
        layers = {name: module for name, module in model.named_modules() if isinstance(module, tuner.tuner_layer_cls)}
        config.target_modules = set(layers)
        config.feedforward_modules = {name for name, module in layers.items() if module.is_feedforward}
    config.save_pretrained(folder, auto_mapping_dict=mapping)
    names = _names_in_peft(model, trained)
    named = {names[name]: value.clone().contiguous() for name, value in trained.items()}
    save_file(named, folder / WEIGHTS_FILE, {"format": "pt"})


def _task_type(model: torch.nn.Module) -> tuple[str | None, dict[str, str] | None]:
    """Return (peft's type of the task, its auto_mapping) of a model of transformers; one of them is None, else both."""
    from transformers import PreTrainedModel
    from transformers.models.auto import modeling_auto

    if not isinstance(model, PreTrainedModel):
        return None, None
    name = type(model).__name__
    for task_type, mapping in TASK_TYPES.items():
        if name in getattr(modeling_auto, mapping).values():
            return task_type, None
    return None, {"base_model_class": name, "parent_library": type(model).__module__}
