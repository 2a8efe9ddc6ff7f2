"""A parameter that a task adds to a transformers model, read back from the model's own safetensors.

`save_pretrained` writes it with the rest, but `from_pretrained` ignores it. Tests: tests/addons/tasks/test_embeddings.py.
"""

from pathlib import Path

import torch
from safetensors import safe_open

from src.config.paths import locate
from src.config.schema import RunConfig
from src.models.load_config import model_folder


def add_parameter(cfg: RunConfig, model: torch.nn.Module, name: str, initial: float, weights: str | None) -> None:
    """Register a parameter of one element: its value in `weights`, else in the pretrained model, else `initial`.

    It has one dimension, because FSDP2 cannot shard a scalar."""
    folder = locate(weights) if weights else cfg.model_name_or_path and model_folder(cfg, cfg.model_name_or_path)
    value = torch.full((1,), initial)
    for path in sorted(Path(folder).glob("model*.safetensors")) if folder else ():
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118 (safe_open is no dict)
                value = file.get_tensor(name)
    dtype = next(model.parameters()).dtype
    model.register_parameter(name, torch.nn.Parameter(value.to(dtype)))
