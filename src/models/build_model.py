"""Model construction on the CPU, of transformers or any nn.Module: from a checkpoint, pretrained, random, or empty.

Tests: tests/models/test_loading.py, tests/models/test_plain_model.py and tests/config/test_bad_input.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from src.config.addons import functions_of_addons
from src.config.errors import UsageError, one_line, warn
from src.config.paths import locate
from src.config.schema import RunConfig
from src.models.load_config import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ADAPTER = "adapter"  # adapter.safetensors of a checkpoint; in final/ also a folder in the format of peft


def build_model(
    cfg: RunConfig,
    config: "PreTrainedConfig",
    auto_class: type,
    weights: str | None = None,
    new_weights: tuple[str, ...] = (),
    empty: bool = False,
) -> "PreTrainedModel":
    """Return the model in `cfg.dtype`: from the folder `weights`, else pretrained, else random from the seed.

    With `empty`, its parameters are allocated but not initialized. Raise UsageError if the files lack parameters.
    Pretrained files may lack those with a name that contains one of `new_weights` (a new head)."""
    torch.manual_seed(cfg.seed)
    options: dict = {"dtype": weight_dtype(cfg)}
    if cfg.attn_implementation:
        options["attn_implementation"] = cfg.attn_implementation
    name = str(weights or cfg.model_name_or_path or "")
    folder = None if empty or not name else weights_folder(cfg, weights)
    try:
        if empty:
            return _empty_model(auto_class, config, options)
        if folder is None:
            return auto_class.from_config(config, **options)
        model, info = auto_class.from_pretrained(
            folder,
            config=config,
            trust_remote_code=cfg.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # _check_complete reports them
            **options,
        )
    except Exception as error:
        raise UsageError(f"{name or cfg.model_config}: the model could not be built: {one_line(error)}") from error
    _check_complete(model, name, info, may_be_missing=() if weights else (*new_weights, *_timm_head(model)))
    return model


def weight_dtype(cfg: RunConfig) -> torch.dtype:
    """Return the dtype of the weights; warn if it is bfloat16."""
    if cfg.dtype == "bfloat16":
        warn(
            "dtype is bfloat16, so the weights have no float32 copy and lose updates smaller than 1/256 of a weight. "
            "For speed, set mixed_precision: bf16 in the accelerate file (YAML) and keep dtype float32.",
        )
    return getattr(torch, cfg.dtype)


def weights_folder(cfg: RunConfig, weights: str | Path | None) -> Path:
    """Return the folder `weights`, else that of the pretrained model. Raise UsageError for a base without its adapter."""
    folder = Path(locate(str(weights)) if weights else model_folder(cfg, str(cfg.model_name_or_path)))
    loads_adapter = functions_of_addons(cfg, "write_own_tensors")
    if not loads_adapter and adapter_files(folder) and not (folder / ADAPTER).is_dir():
        raise UsageError(
            f"{folder} holds a base model and, beside it, the adapter of a run with the field peft: give that run's peft, or "
            "its final/, where the adapter is merged"
        )
    return folder


def adapter_files(folder: Path) -> list[Path]:
    """Return the files of the adapter that a run has saved in `folder`, if any."""
    return sorted([*folder.glob(f"{ADAPTER}.safetensors"), *folder.glob(f"{ADAPTER}-*-of-*.safetensors")])


def _timm_head(model: torch.nn.Module) -> list[str]:
    """Return the prefixes of the classifier of a timm model: every architecture names its own."""
    names = getattr(getattr(model, "timm_model", None), "pretrained_cfg", {}).get("classifier") or ()
    return [f"timm_model.{name}." for name in ([names] if isinstance(names, str) else names)]


def _check_complete(model: torch.nn.Module, name: str, info: dict, may_be_missing: tuple[str, ...]) -> None:
    """Raise UsageError if parameters are missing in the files or have another shape. They would stay random."""
    missing = dict.fromkeys(info["missing_keys"], "")
    for key, in_file, in_model in info["mismatched_keys"]:
        missing[key] = f" (shape {list(in_file)} in the file, {list(in_model)} in the model)"
    names = sorted(key for key in missing if not any(part in key for part in may_be_missing))
    if names:
        raise UsageError(
            f"model_name_or_path: {name} has no weights for {len(names)} parameters of {type(model).__name__}, first "
            f"{names[0]}{missing[names[0]]}: they would stay random; give a folder saved from this kind of model"
        )


def _empty_model(auto_class: type, config: "PreTrainedConfig", options: dict) -> torch.nn.Module:
    """Return a model with parameters that are allocated but never written. Such memory costs nothing until its first use.

    The meta device does not work here: all its addresses are equal, and accelerate identifies parameters by address."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = auto_class.from_config(config, **options)
    for module in model.modules():
        for name, value in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            memory = torch.empty(value.shape, dtype=value.dtype)
            setattr(module, name, torch.nn.Parameter(memory, requires_grad=value.requires_grad))
    model.tie_weights()
    return model


# ---- any nn.Module: a task calls these in `load` and `build` if its model has no `save_pretrained` --------------------


def saved_config(cfg: RunConfig) -> dict[str, Any]:
    """Return config.json of the model that `model_name_or_path` names, {} if it is not set or has no such file.

    Call it in `load`: it holds what `model_config` returned when a run saved the model."""
    if not cfg.model_name_or_path:
        return {}
    file = Path(model_folder(cfg, cfg.model_name_or_path), "config.json")
    try:
        values = dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"model_name_or_path: {file} cannot be read: {one_line(error)}") from error
    if (task := values.get("task", cfg.task)) != cfg.task:
        raise UsageError(f"model_name_or_path: {file} belongs to task {task}, not {cfg.task}: give --task {task}")
    return values


def build_plain_model(
    cfg: RunConfig, make: Callable[[], torch.nn.Module], weights: str | Path | None = None, empty: bool = False
) -> torch.nn.Module:
    """Return `make()` in `cfg.dtype`: with the weights of `weights`, else of `model_name_or_path`, else random.

    Random weights depend only on the seed. With `empty`, no weights are loaded. Raise UsageError if the files and the
    module do not have the same parameters and buffers; of tied parameters the files may hold one name or all."""
    torch.manual_seed(cfg.seed)
    model, dtype = make(), weight_dtype(cfg)
    for value in (*model.parameters(), *model.buffers()):
        if value.is_floating_point():
            value.data = value.data.to(dtype)
    if empty or not (weights or cfg.model_name_or_path):
        return model
    folder = weights_folder(cfg, weights)
    tensors: dict[str, torch.Tensor] = {}  # memory-mapped
    for path in [folder / "model.safetensors", *sorted(folder.glob("model-*-of-*.safetensors"))]:
        tensors |= load_file(path) if path.exists() else {}
    state = model.state_dict(keep_vars=True)
    same = {id(state[name]): tensor for name, tensor in tensors.items() if name in state}
    tied = {name: same[id(value)] for name, value in state.items() if id(value) in same}
    try:
        model.load_state_dict(tied | tensors)
    except RuntimeError as error:  # it names all that differ
        raise UsageError(
            f"the weights in {folder} do not fit {type(model).__name__}: {one_line(error, 1000)}"
        ) from error
    return model
