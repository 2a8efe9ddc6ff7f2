"""Model construction on the CPU: from a checkpoint, pretrained, random from the seed, or empty.

Tests: tests/models/test_loading.py and tests/config/test_bad_input.py.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from src.config.errors import UsageError, warn
from src.config.paths import locate
from src.config.schema import RunConfig
from src.models.model_files import model_folder, reason, refuse_base_without_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


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
    try:
        if empty:
            return _empty_model(auto_class, config, options)
        if not name:
            return auto_class.from_config(config, **options)
        folder = locate(name) if weights else model_folder(cfg, name)
        refuse_base_without_adapter(cfg, Path(folder))
        model, info = auto_class.from_pretrained(
            folder,
            config=config,
            trust_remote_code=cfg.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # _check_complete reports them
            **options,
        )
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{name or cfg.model_config}: the model could not be built: {reason(error)}") from error
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
