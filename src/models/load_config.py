"""Model configuration, pretrained or from the file `model_config`; checks of its values and its fit to the task.

Tests: tests/models/test_loading.py and tests/config/test_bad_input.py.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.config.addons import functions_of_addons
from src.config.errors import UsageError, did_you_mean, warn
from src.config.paths import not_found_locally, plain_name, read_yaml
from src.config.schema import RunConfig
from src.models.model_files import model_folder, reason
from src.runtime import private_apis

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

DEFAULT_MAX_LENGTH = 1024
# Models with positions that begin after that of the padding token.
POSITIONS_AFTER_PADDING = (
    *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet"),
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
POSITIVE_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
# A config.json that save_pretrained wrote has one of these. It may have fields of other versions of transformers.
PUBLISHED = {"architectures", "transformers_version"}
LAYERDROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_config(cfg: RunConfig, tokenizer: "PreTrainedTokenizerBase | None") -> "PreTrainedConfig":
    """Return the transformers configuration. `model_config` takes vocab_size and special ids from the tokenizer."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # its bars would break the progress bar of training
    if not cfg.model_name_or_path and not cfg.model_config:
        raise UsageError(
            f"no model: give --model_name_or_path, or --model_config for random weights of task {cfg.task}"
        )
    if cfg.model_name_or_path:
        config = pretrained_config(cfg, str(cfg.model_name_or_path))
    else:
        config = _config_from_file(cfg, tokenizer)
    _switch_layerdrop_off(config)
    for change_config in functions_of_addons(cfg, "change_config"):
        change_config(cfg, config)
    return config


def _switch_layerdrop_off(config: "PreTrainedConfig") -> None:
    """Switch LayerDrop off, with a warning: it skips whole layers, so DDP would find no gradient, and ranks of a sharded
    model would wait forever."""
    for name in LAYERDROP:
        if value := getattr(config, name, 0.0):
            setattr(config, name, 0.0)
            warn(f"{name} is {value:g} in the model's configuration: set to 0, because every rank must run every layer")


def pretrained_config(cfg: RunConfig, name: str, field: str = "model_name_or_path") -> "PreTrainedConfig":
    """Return the configuration of the pretrained model `name`, which the option `field` names."""
    from transformers import AutoConfig

    try:
        folder = model_folder(cfg, name, field)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)
    except Exception as error:
        raise UsageError(
            f"{field}: no model could be read from {name}: {not_found_locally(name)}{reason(error)} (give a "
            "folder made by save_pretrained, or a Hub id)"
        ) from error
    file = Path(folder, "config.json")
    _refuse_hub_kernels(cfg, str(file), json.loads(file.read_text(encoding="utf-8")))
    return config


def _config_from_file(cfg: RunConfig, tokenizer: "PreTrainedTokenizerBase | None") -> "PreTrainedConfig":
    from transformers import CONFIG_MAPPING, AutoConfig

    file = str(cfg.model_config)
    values = read_yaml(file)
    _refuse_hub_kernels(cfg, file, values)
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str):
        raise UsageError(
            f"{file}: model_type is {model_type}: give a name that transformers knows (llama, gpt2, bert, …)"
        )
    if model_type not in CONFIG_MAPPING:
        raise UsageError(
            f"{file}: model_type: unknown value {model_type!r}{did_you_mean(model_type, list(CONFIG_MAPPING))}"
        )
    try:
        defaults: Any = AutoConfig.for_model(model_type)
        names = {*defaults.to_dict(), *getattr(defaults, "attribute_map", {})}
    except Exception:  # a model type with default sizes that contradict each other
        defaults = CONFIG_MAPPING[model_type]
        names = {field.name for field in fields(defaults)}
    given = dict(values)
    _set_vocabulary(values, defaults, tokenizer)
    for name, value in values.items():
        if isinstance(value, int) and isinstance(config_value(defaults, name), float):
            values[name] = float(value)
    try:
        config = AutoConfig.for_model(model_type, **values)
    except Exception as error:
        raise UsageError(f"{file}: not a valid {model_type} configuration: {reason(error)}") from error
    # transformers converts names of earlier versions (`rope_theta`); of names that it does not know, it keeps the value.
    unknown = [name for name in given if name not in names and name in config.to_dict()]
    if unknown and not PUBLISHED & given.keys() and Path(file).name != "config.json":
        raise UsageError(f"{file}: {unknown[0]}: {model_type} has no such field{did_you_mean(unknown[0], names)}")
    if unknown:
        warn(f"{file}: {model_type} has no field {', '.join(unknown)}: without effect unless the model's code reads it")
    if errors := _value_errors(config, given):
        raise UsageError(f"{file}: {'; '.join(errors)}")
    return config


def _set_vocabulary(values: dict, defaults: Any, tokenizer: "PreTrainedTokenizerBase | None") -> None:
    """Set in `values` the vocabulary size and special ids that the file leaves open, from the tokenizer, if any.

    Without a tokenizer, remove the special ids of the published model that a smaller vocabulary does not have."""
    if tokenizer is not None:
        if config_value(defaults, "vocab_size") is not None:
            values.setdefault("vocab_size", len(tokenizer))
        elif config_value(defaults, "text_config") is not None:
            values["text_config"] = {"vocab_size": len(tokenizer)} | values.get("text_config", {})
    for name in SPECIAL_IDS:
        published = config_value(defaults, name)
        if tokenizer is not None:
            values.setdefault(name, getattr(tokenizer, name))
        elif isinstance(published, int) and published >= values.get("vocab_size", published + 1):
            values.setdefault(name, None)
    if tokenizer is not None and config_value(defaults, "is_encoder_decoder"):
        values.setdefault("decoder_start_token_id", tokenizer.pad_token_id)
        if config_value(defaults, "forced_eos_token_id") is not None:  # BART: the last token of a generation
            values.setdefault("forced_eos_token_id", tokenizer.eos_token_id)


def _refuse_hub_kernels(cfg: RunConfig, file: str, values: dict) -> None:
    """Raise UsageError if a configuration names a Hub kernel: transformers would download and run its code."""
    if cfg.attn_implementation or cfg.trust_remote_code:  # the user has decided
        return
    mappings = [values]
    while mappings:
        for name, value in mappings.pop().items():
            if isinstance(value, dict):
                mappings.append(value)
            if name.endswith("attn_implementation") and isinstance(value, str) and not plain_name(value):
                raise UsageError(
                    f"{file}: {name} is {value}, which is code from the Hub: give --attn_implementation sdpa, or "
                    "--trust_remote_code true if you trust it"
                )


def _value_errors(config: "PreTrainedConfig", values: dict) -> list[str]:
    """Return error messages for sizes and probabilities that transformers accepts, but that cannot be trained with."""
    sizes = {name: config_value(config, name) for name in POSITIVE_SIZES}
    sizes = {name: size for name, size in sizes.items() if isinstance(size, int)}
    errors = [
        f"{name} is {size}: it must be above zero" for name, size in sizes.items() if size <= 0 and name in values
    ]
    heads = sizes.get("num_attention_heads", 1)
    key_heads = sizes.get("num_key_value_heads", 1)
    if not errors and heads % key_heads:
        errors.append(f"num_key_value_heads is {key_heads}: it must divide num_attention_heads, which is {heads}")
    vocabulary = sizes.get("vocab_size", 0)
    errors += [
        f"{name} is {values[name]}, but vocab_size is {vocabulary}"
        for name in SPECIAL_IDS
        if vocabulary > 0 and isinstance(values.get(name), int) and values[name] >= vocabulary
    ]
    for name, value in values.items():
        if ("dropout" in name or name.endswith("pdrop")) and type(value) in (int, float) and not 0 <= value < 1:
            errors.append(f"{name} is {value}: give a probability from 0 to below 1")
    return errors


def check_fit(
    cfg: RunConfig,
    config: "PreTrainedConfig",
    tokenizer: "PreTrainedTokenizerBase | None",
    max_length: int | None,
    auto_class: type,
    option: str = "max_length",
) -> int:
    """Return the maximum row length. Raise UsageError if task, tokenizer, model and max_length do not fit together.

    `option` is the name of the field max_length."""
    source = cfg.model_name_or_path or cfg.model_config
    if not private_apis.has_model_class(auto_class, config) and not getattr(config, "auto_map", None):
        raise UsageError(
            f"{source}: transformers has no {auto_class.__name__} of model_type {config.model_type}: give another "
            f"model, or another --task than {cfg.task}"
        )
    size = config_value(text_config(config), "vocab_size")
    if tokenizer is not None and isinstance(size, int) and len(tokenizer) > size:
        raise UsageError(
            f"{source}: vocab_size is {size}, but the tokenizer {cfg.tokenizer_name or source} has {len(tokenizer)} "
            "tokens: its ids would be outside the embedding; use the model's own tokenizer or a larger vocab_size"
        )
    limit = _max_positions(config)
    if max_length and limit and max_length > limit:
        raise UsageError(
            f"{option} is {max_length}, but {source} has {limit} positions: give at most --{option} {limit}"
        )
    return max_length or min(DEFAULT_MAX_LENGTH, limit or DEFAULT_MAX_LENGTH)


def _max_positions(config: "PreTrainedConfig") -> int | None:
    """Return the maximum number of tokens in a row, None if the model has no limit."""
    config = text_config(config)
    limit = config_value(config, "max_position_embeddings")
    if not isinstance(limit, int) or limit <= 0:  # some models have -1
        return None
    if config.model_type in POSITIONS_AFTER_PADDING:
        limit -= 1 + (config_value(config, "pad_token_id") or 0)
    return limit


def vocabulary_size(cfg: RunConfig, config: "PreTrainedConfig") -> int:
    """Return the number of token ids of a model, also if text is only one of its inputs."""
    if not isinstance(size := config_value(text_config(config), "vocab_size"), int):
        raise UsageError(
            f"{cfg.model_name_or_path or cfg.model_config}: {config.model_type} models have no vocabulary, which task "
            f"{cfg.task} needs: give another model or task"
        )
    return size


def text_config(config: "PreTrainedConfig") -> "PreTrainedConfig":
    """Return the part of a model's configuration that describes its text, which is all of it for a text model."""
    if config_value(config, "vocab_size") is not None:
        return config
    try:
        return config.get_text_config(decoder=True)
    except ValueError:  # more than one part reads or writes text
        return config


def config_value(config: Any, name: str) -> Any:
    """Return a field of a configuration; None if it has no such field, or one value for each layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers refuses to answer for fields that differ by layer
        return None
