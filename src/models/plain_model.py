"""Plain modules: build any nn.Module in the run's dtype, load its weights strictly, read its config.json.

A task calls build_plain_model in `build` if its model has no `save_pretrained`. Tests:
tests/models/test_plain_model.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from src.config.errors import UsageError
from src.config.paths import locate
from src.config.schema import RunConfig
from src.models.build_model import weight_dtype
from src.models.model_files import model_folder, reason, refuse_base_without_adapter


def saved_config(cfg: RunConfig) -> dict[str, Any]:
    """Return config.json of the model that `model_name_or_path` names, {} if it is not set or has no such file.

    Call it in `load`: it holds what `model_config` returned when a run saved the model."""
    if not cfg.model_name_or_path:
        return {}
    file = Path(model_folder(cfg, cfg.model_name_or_path), "config.json")
    try:
        values = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise UsageError(f"model_name_or_path: {file} cannot be read: {reason(error)}") from error
    if not isinstance(values, dict):
        raise UsageError(f"model_name_or_path: {file} is not a JSON object")
    if (task := values.get("task", cfg.task)) != cfg.task:
        raise UsageError(f"model_name_or_path: {file} belongs to task {task}, not {cfg.task}: give --task {task}")
    return values


def build_plain_model(
    cfg: RunConfig, make: Callable[[], torch.nn.Module], weights: str | Path | None = None, empty: bool = False
) -> torch.nn.Module:
    """Return `make()` in `cfg.dtype`: with the weights of `weights`, else of `model_name_or_path`, else random.

    Random weights depend only on the seed. With `empty`, no weights are loaded. Raise UsageError if the files and the
    module do not have the same parameters and buffers."""
    torch.manual_seed(cfg.seed)
    model, dtype = make(), weight_dtype(cfg)
    for value in (*model.parameters(), *model.buffers()):
        if value.is_floating_point():
            value.data = value.data.to(dtype)
    if (weights or cfg.model_name_or_path) and not empty:
        folder = Path(locate(str(weights)) if weights else model_folder(cfg, str(cfg.model_name_or_path)))
        refuse_base_without_adapter(cfg, folder)
        load_weights(model, folder, str(weights or f"model_name_or_path: {cfg.model_name_or_path}"))
    return model


@torch.no_grad()
def load_weights(model: torch.nn.Module, folder: Path, source: str) -> None:
    """Copy the tensors of all model*.safetensors in `folder` into the module; raise one UsageError for all that differ.

    `source` begins the message. Of tied parameters the files may hold one name or all of them."""
    alone = folder / "model.safetensors"
    paths = [alone] if alone.exists() else sorted(folder.glob("model-*-of-*.safetensors"))
    if not paths:
        raise UsageError(f"{source}: there is no model.safetensors in {folder}, which {type(model).__name__} needs")
    state = model.state_dict(keep_vars=True)
    loaded, unexpected, misshapen = set(), [], []
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no dict)
                shape = file.get_slice(name).get_shape()
                if name not in state:
                    unexpected.append(name)
                elif list(state[name].shape) != shape:
                    loaded.add(id(state[name]))
                    misshapen.append(f"{name} ({shape} in the file, {list(state[name].shape)} in the model)")
                else:
                    loaded.add(id(state[name]))
                    state[name].copy_(file.get_tensor(name))
    missing = [name for name, value in state.items() if id(value) not in loaded]
    kinds = {"missing in the files": missing, "not in the model": unexpected, "of another shape": misshapen}
    if errors := [f"{_first(names)} {kind}" for kind, names in kinds.items() if names]:
        raise UsageError(
            f"{source}: the weights do not fit {type(model).__name__}: {'; '.join(errors)}. Give the options of the "
            "model that was saved"
        )


def _first(names: list[str]) -> str:
    more = f" and {len(names) - 3} more are" if len(names) > 3 else " is" if len(names) == 1 else " are"
    return ", ".join(sorted(names)[:3]) + more
