"""The model in final/: merged with its adapter, or the adapter alone.

Tests: tests/addons/adapters/test_adapter_models.py, tests/addons/adapters/test_adapter_formats.py.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import torch

from addons.adapters.peft.files import ADAPTER, NAME, adapter_files, trained_tensors, write_in_format_of_peft
from addons.adapters.peft.injection import WRAPPED, add_adapter
from engine.checkpointing.model_folder import write_model
from engine.checkpointing.tensor_files import write_index, write_tensors
from engine.config.errors import UsageError
from engine.config.find_addons import first_answer
from engine.models.config_and_tokenizer import CONFIG_OF_ADAPTER
from engine.models.new_tokens import token_ids
from engine.run.model_with_loss import ModelWithLoss

MERGED_AT_ONCE = 4 << 30  # bytes of layers that are merged and written together, in one file
UNLOAD = "unload_and_optionally_merge_module"  # method of peft's wrappers that are no adapters of a single layer


@torch.no_grad()
def write_merged(task: Any, folder: Path) -> None:
    """Merge the adapter in `folder` into its base model; write that model, and the adapter as peft does to FOLDER/adapter.

    That is also what an exact evaluation or further training needs besides the base model."""
    whole = task.build_base(str(folder))
    dtype = first_answer(addon.change_base_to_merge(task, whole) for addon in task.cfg.addons)
    tuner = add_adapter(task, whole, folder)
    trained = {name: value.clone() for name, value in trained_tensors(task, tuner.model).items()}
    (folder / ADAPTER).mkdir()
    exported = trained
    if (
        task.base_model is None
    ):  # the base model is nowhere else, so what merging changes of it is kept for an evaluation
        base = vars(tuner.model)["base_names"]
        exported = {name: value for name, value in trained.items() if name not in base}
        write_tensors(trained, folder / ADAPTER / f"{ADAPTER}.safetensors")
    write_in_format_of_peft(task, tuner, folder / ADAPTER, exported)
    for path in [*folder.glob("model*.safetensors*"), *folder.glob(f"{ADAPTER}*.safetensors")]:
        path.unlink()
    task.base_model = None  # this folder holds the whole model, too
    base_names = vars(tuner.model).pop("base_names")
    groups = _groups_of_layers(tuner.model, base_names)
    parts = folder / "parts"
    for number, names in enumerate(groups):
        place = folder if number == 0 else parts
        place.mkdir(exist_ok=True)
        tensors = _merge_layers(tuner.model, {name: base_names[name] for name in names})
        if dtype is not None:
            tensors = _cast(tensors, dtype)
        write_model(ModelWithLoss(whole, task), place, tensors, number, len(groups))
        tensors.clear()
        _free(tuner.model, names)
        for file in parts.glob("*.safetensors"):
            file.rename(folder / file.name)
    shutil.rmtree(parts, ignore_errors=True)
    write_index(folder)
    tokenizer: Any = getattr(task, "tokenizer", None)
    if token_ids(tokenizer) and tuner.model.config.get_text_config().vocab_size == len(tokenizer):
        tokenizer.save_pretrained(folder / ADAPTER)  # AutoPeftModel gives the base model as many rows as this has


def check_can_merge(model: torch.nn.Module) -> None:
    """Raise UsageError if an adapter is on a layer into which peft cannot merge it: one without a bias, or with groups."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for path, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        base = module.get_base_layer()
        trains_bias = hasattr(module, "beft_bias") or getattr(module, "lora_bias", {}).get(NAME)
        reason = None
        if trains_bias and getattr(base, "bias", None) is None:
            reason = "has no bias, which this adapter trains"
        elif hasattr(module, "lora_A") and getattr(base, "groups", 1) > 1:
            reason = f"is a convolution with {base.groups} groups"
        if reason:
            raise UsageError(
                f"peft: an adapter of {path} could not be merged, because it {reason}: give merge: false, other layers as "
                "target, or another type"
            )


def _groups_of_layers(model: torch.nn.Module, base_names: dict[str, str]) -> list[list[str]]:
    """Return the names of the base model's tensors below the adapter, in groups of at most MERGED_AT_ONCE bytes.

    Layers are not divided: transformers converts some models layer by layer when it saves them."""
    state = model.state_dict(keep_vars=True)
    groups: list[list[str]] = [[]]
    size = 0
    by_layer: dict[str, list[str]] = {}
    for name, base_name in base_names.items():
        match = re.match(r".*?\.\d+(?=\.)", base_name)  # up to the first number, the index of the layer
        by_layer.setdefault(match[0] if match else "", []).append(name)
    for names in by_layer.values():
        of_layer = sum(state[name].nbytes for name in names)
        if groups[-1] and size + of_layer > MERGED_AT_ONCE:
            groups.append([])
            size = 0
        groups[-1] += names
        size += of_layer
    return groups


def _merge_layers(model: torch.nn.Module, base_names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Merge the adapter into these layers, in place; return their tensors by the names of the base model.

    `base_names`: {name below the adapter: name in the base model}."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted: dict[str, torch.nn.Module] = {}  # the outermost ones
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in adapted)
        if not is_inside and (isinstance(module, BaseTunerLayer) or hasattr(module, UNLOAD)):
            adapted[path] = module
    tensors: dict[str, torch.Tensor] = {}
    unloaded: dict[str, torch.nn.Module] = {}
    for path, module in adapted.items():
        if not any(name.startswith(f"{path}.") for name in base_names):
            continue
        if hasattr(module, UNLOAD):  # modules_to_save, attention of torch
            layer = getattr(module, UNLOAD)(merge=True, safe_merge=False, adapter_names=None)
            unloaded[WRAPPED.sub("", path)] = layer
        else:
            for inner in reversed([part for part in module.modules() if isinstance(part, BaseTunerLayer)]):
                inner.merge()  # parameters of experts are nested
    state = model.state_dict()  # now that all are merged: rows of new tokens give tied weights another tensor each time
    replaced = {f"{path}.{name}": x for path, layer in unloaded.items() for name, x in layer.state_dict().items()}
    for name, base_name in base_names.items():
        tensors[base_name] = replaced[base_name] if base_name in replaced else state[name]
    return tensors


def _cast(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors with those of floating point in `dtype`; tied ones stay one tensor, which is written once."""
    cast = {(x.data_ptr(), x.shape): x.to(dtype) for x in tensors.values() if x.is_floating_point()}
    return {name: cast.get((x.data_ptr(), x.shape), x) for name, x in tensors.items()}


def _free(model: torch.nn.Module, names: list[str]) -> None:
    """Free tensors that are written, so that merging needs the memory of a few layers only."""
    state = model.state_dict(keep_vars=True)
    for name in names:
        if name in state:
            state[name].data = torch.empty(0, dtype=state[name].dtype)


@torch.no_grad()
def write_adapter_alone(task: Any, folder: Path) -> None:
    """Replace the adapter in `folder` by one in the format of peft, which names its base model.

    Beside a config.json, `from_pretrained` would want weights: the configuration gets another name."""
    whole = task.build_base(str(folder))
    tuner = add_adapter(task, whole, folder)
    trained = trained_tensors(task, tuner.model)
    for path in adapter_files(folder):
        path.unlink()
    write_in_format_of_peft(task, tuner, folder, trained)
    (folder / "config.json").rename(folder / CONFIG_OF_ADAPTER)
