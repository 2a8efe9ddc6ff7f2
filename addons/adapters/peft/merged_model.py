"""What a run with an adapter writes to final/: the merged model, and the adapter alone in the format of peft.

Tests: tests/addons/adapters/test_peft.py.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from addons.adapters import peft
from src.checkpointing.model_folder import write_model
from src.checkpointing.tensor_files import write_tensors
from src.config.paths import locate
from src.models.build_model import ADAPTER, adapter_files
from src.training.step import ModelWithLoss


def write_merged(folder: Path, task: Any) -> None:
    """Merge the adapter in `folder` into the weights, so that `from_pretrained` needs no peft.

    The adapter and the weights before merging stay beside them. Costs the memory of one more model on the host."""
    whole, lost = merge(copy.copy(task), folder)  # building a model sets attributes of its task
    for path in [*folder.glob("model*.safetensors*"), *adapter_files(folder)]:
        path.unlink()
    write_model(ModelWithLoss(whole, task), folder, task.saved(whole).state_dict())
    write_tensors(lost, folder / f"{ADAPTER}.safetensors")


@torch.no_grad()
def merge(task: Any, folder: Path) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return (the model of `folder` with its adapter merged, the tensors that it had before and that merging lost).

    Write the adapter as peft does to FOLDER/adapter."""
    from peft.utils import get_peft_model_state_dict

    whole = task.build(str(folder))
    tuner = peft.add_adapter(task, whole, folder)
    model, config = tuner.model, tuner.peft_config[peft.NAME]
    export = get_peft_model_state_dict(model, adapter_name=peft.NAME, save_embedding_layers=False)
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
