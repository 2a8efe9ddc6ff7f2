"""Model construction on the CPU, of transformers or any nn.Module: from a checkpoint, pretrained, random, or empty.

Tests: tests/engine/models/test_loading.py, tests/engine/models/test_plain_model.py and tests/engine/config/test_bad_input.py.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from engine.config.addon import Addon, overrides
from engine.config.errors import UsageError, errors_of, warn
from engine.config.paths import locate, read_yaml
from engine.config.run_config import RunConfig
from engine.models import varlen_attention
from engine.models.config_and_tokenizer import (
    BASE_FILE,
    config_file,
    experts_per_token,
    load_tokenizer,
    model_folder,
    refuse_adapter,
    refuse_quantized,
)
from engine.models.new_tokens import ROWS_MISSING, add_rows, config_of_weights, ids_without_rows, new_ids
from engine.storage.jsonl import read_json

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

    With `empty`, its parameters are allocated but never written. Raise UsageError if the files lack parameters.
    Pretrained files may lack those with a name that contains one of `new_weights` (a new head)."""
    from transformers.initialization import no_init_weights

    torch.manual_seed(cfg.seed)
    options: dict = {"dtype": weight_dtype(cfg)}
    by_lengths = cfg.attn_implementation == varlen_attention.NAME
    if cfg.attn_implementation:
        options["attn_implementation"] = "sdpa" if by_lengths else cfg.attn_implementation
    name = weights or cfg.model_name_or_path
    folder = weights_folder(cfg, weights) if name and not empty else None
    with errors_of(f"{name or cfg.model_config}: the model could not be built"):
        info: dict = {"missing_keys": [], "mismatched_keys": []}
        if empty:
            # Parameters are allocated but never written: such memory costs nothing until its first use. The meta device
            # does not work here: all its addresses are equal, and accelerate identifies parameters by address.
            with no_init_weights():
                model = auto_class.from_config(config, **options)
            model.tie_weights()
        elif folder is None:
            model = auto_class.from_config(config, **options)
        else:
            model, info = auto_class.from_pretrained(
                folder,
                config=config_of_weights(config, folder) if cfg.add_tokens else config,
                trust_remote_code=cfg.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported below
                **options,
            )
            correct_tied_setting(model)
            _add_rows_of_new_tokens(cfg, model, config, weights)
    absent = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    missing = []
    for key in absent:
        is_new = any(part in key for part in new_weights)
        if weights or not is_new:
            missing.append(key)
    if missing:
        raise UsageError(
            f"{name} has no weights of this name and shape for {len(missing)} parameters of {type(model).__name__}, first "
            f"{min(missing)}: they would stay random; give a folder saved from this kind of model"
        )
    if cfg.dtype == "float64" and experts_per_token(config):
        model.set_experts_implementation("batched_mm")  # the default kernel takes no float64
    return varlen_attention.use_in(model) if by_lengths else model


def _add_rows_of_new_tokens(
    cfg: RunConfig, model: "PreTrainedModel", config: "PreTrainedConfig", weights: str | None
) -> None:
    """Give a loaded model the rows of the tokens that the run adds, but those that the folder `weights` has."""
    if not cfg.add_tokens:
        return
    ids = ROWS_MISSING.get()
    if ids is None:
        ids = _new_ids(cfg, weights)
    model.new_ids = ids  # for who records what its weights lacked
    if ids:
        add_rows(model, config.get_text_config().vocab_size, ids)


def _new_ids(cfg: RunConfig, weights: str | None) -> list[int]:
    """Return the ids of the tokens that the run adds, and that the model has no rows of."""
    tokenizer = load_tokenizer(cfg)
    ids = new_ids(tokenizer)
    if weights:  # which may be the merged model of an adapter
        saved = load_tokenizer(dataclasses.replace(cfg, model_name_or_path=locate(weights), tokenizer_name=None))
        ids = ids_without_rows(tokenizer, saved, Path(locate(weights)))
    return ids


def correct_tied_setting(model: "PreTrainedModel") -> None:
    """Set `tie_word_embeddings` to false in a configuration that says tied for weights which transformers left apart.

    It does so if the files hold different values for both. Of a model with several pairs of tied weights, some of which
    are apart, the setting stays: false would mean all of them."""
    from transformers import PreTrainedModel

    pairs_of_config: dict[int, list[tuple[Any, Any]]] = {}  # the parts of a model may share a configuration
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    for part in parts:
        for target, source in part.get_expanded_tied_weights_keys().items():
            pair = (part.get_parameter_or_buffer(target), part.get_parameter_or_buffer(source))
            pairs_of_config.setdefault(id(part.config), []).append(pair)
    for part in parts:
        pairs = pairs_of_config.get(id(part.config))
        if pairs and all(target is not source for target, source in pairs):
            part.config.tie_word_embeddings = False


def weight_dtype(cfg: RunConfig) -> torch.dtype:
    """Return the dtype of the weights; warn if it is bfloat16 and these are trained.

    Not if an add-on trains weights of its own instead, or if the optimizer rounds at random, which loses nothing."""
    rounds_at_random = (cfg.optim_args or {}).get("bf16_stochastic_round")
    trains_others = any(overrides(addon, Addon.left_out) for addon in cfg.addons)
    if cfg.dtype == "bfloat16" and not trains_others and not rounds_at_random:
        warn(
            "dtype is bfloat16, so the weights have no float32 copy and lose updates smaller than 1/256 of a weight. "
            "For speed, set mixed_precision: bf16 in the accelerate file (YAML) and keep dtype float32.",
        )
    return getattr(torch, cfg.dtype)


def weights_folder(cfg: RunConfig, weights: str | Path | None) -> Path:
    """Return the folder `weights`, else that of the pretrained model. Raise UsageError for a base model
    without what an add-on of its run has trained."""
    folder = Path(locate(str(weights)) if weights else model_folder(cfg, str(cfg.model_name_or_path)))
    refuse_adapter(str(folder), folder)
    refuse_quantized(str(folder), read_json(folder / "config.json"))
    if any(folder.glob("adapter*.safetensors")):  # also beside the weights of its base model
        base = read_json(folder / BASE_FILE).get("name", "its base model")
        raise UsageError(
            f"{folder} holds only what an add-on has trained on {base}: give the run's final/, where both are one model (if it "
            "holds no model, start that run again with --merge true, which merges without training); or to train it further, "
            "give --init_from and that run's field of the add-on (state.json has it)"
        )
    return folder


# ---- any nn.Module: a task calls these in `load` and `build` if its model has no `save_pretrained` --------------------


def saved_config(cfg: RunConfig) -> dict[str, Any]:
    """Return config.json of the model that `model_name_or_path` names, {} if it is not set or has no such file.

    Call it in `load`: it holds what `model_config` returned when a run saved the model."""
    file = config_file(Path(model_folder(cfg, cfg.model_name_or_path))) if cfg.model_name_or_path else None
    return read_yaml(file) if file and file.exists() else {}


def build_plain_model(
    cfg: RunConfig, make: Callable[[], torch.nn.Module], weights: str | Path | None = None, empty: bool = False
) -> torch.nn.Module:
    """Return `make()` in `cfg.dtype`: with the weights of `weights`, else of `model_name_or_path`, else random.

    Random weights depend only on the seed. With `empty`, no weights are loaded. Raise UsageError if the files and the
    module do not have the same parameters and buffers, of tied ones all names."""
    torch.manual_seed(cfg.seed)
    model = make()
    dtype = weight_dtype(cfg)
    for value in (*model.parameters(), *model.buffers()):
        if value.is_floating_point():
            value.data = value.data.to(dtype)
    if empty or not (weights or cfg.model_name_or_path):
        return model
    folder = weights_folder(cfg, weights)
    tensors: dict[str, torch.Tensor] = {}  # memory-mapped
    for path in (*folder.glob("model.safetensors"), *folder.glob("model-*-of-*.safetensors")):
        tensors |= load_file(path)
    with errors_of(f"the weights in {folder} do not fit {type(model).__name__}"):
        model.load_state_dict(tensors)
    return model
