"""Configuration and tokenizer of a model, from the Hub, a folder, or the file `model_config`; length and vocabulary.

Tests: tests/engine/models/test_loading.py and tests/engine/config/test_bad_input.py.
"""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config.errors import UsageError, did_you_mean, errors_of, warn
from engine.config.paths import is_plain_name, locate, read_yaml
from engine.config.run_config import RunConfig
from engine.models.new_tokens import add_tokens, new_ids, set_vocabulary
from engine.process import private_apis
from engine.storage import hub
from engine.storage.cache_folder import cache_root, sample_tokenizer
from engine.storage.jsonl import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

DEFAULT_MAX_LENGTH = 1024
# Models with positions that begin after that of the padding token.
POSITIONS_AFTER_PADDING = (
    *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet"),
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
# A config.json that save_pretrained wrote has one of these. It may have fields of other versions of transformers.
PUBLISHED = {"architectures", "transformers_version"}
LAYERDROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Experts that a token is sent to.
TOP_K_NAMES = ("num_experts_per_tok", "moe_k", "num_experts_per_token")
# Of a checkpoint or final/ without the weights of its base model: which one that is, and in final/ the configuration of the
# model; beside config.json, from_pretrained would want weights instead of adding the adapter to its base model.
BASE_FILE = "base_model.json"
CONFIG_OF_ADAPTER = "model_config.json"
ADAPTER_CONFIG = "adapter_config.json"  # of the package peft
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
)


def model_folder(cfg: RunConfig, name: str, field: str = "model_name_or_path", weights: bool = True) -> str:
    """Return the folder of the model or tokenizer `name`, downloaded at most once. `field` is its option."""
    revision = cfg.model_revision if name == cfg.model_name_or_path else "main"
    return hub.fetch_model(name, revision, field, weights, cfg.trust_remote_code)


def pretrained_source(cfg: RunConfig) -> tuple[Path, str | None]:
    """Return (folder of the pretrained model, its commit or None). Only a model from the Hub has a commit."""
    folder = Path(model_folder(cfg, str(cfg.model_name_or_path)))
    record = hub.records.get(f"model {cfg.model_name_or_path}@{cfg.model_revision}", {})
    return folder, record.get("commit")


def load_config(cfg: RunConfig, tokenizer: "PreTrainedTokenizerBase | None") -> "PreTrainedConfig":
    """Return the transformers configuration. `model_config` takes vocab_size and special ids from the tokenizer."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # the run prints lines
    if cfg.model_name_or_path:
        config = pretrained_config(cfg, cfg.model_name_or_path)
    else:
        config = _config_from_file(cfg, str(cfg.model_config), tokenizer)
    # LayerDrop skips whole layers: DDP would find no gradient, and ranks of a sharded model would wait forever.
    for name in LAYERDROP:
        value = getattr(config, name, 0.0)
        if value:
            setattr(config, name, 0.0)
            warn(f"{name} is {value:g} in the model's configuration: set to 0, because every rank must run every layer")
    if cfg.add_tokens:
        if tokenizer is None:
            raise UsageError("add_tokens needs a tokenizer: give --tokenizer_name, or remove it")
        if new_ids(tokenizer):
            set_vocabulary(config, len(tokenizer))
    for addon in cfg.addons:
        addon.change_config(cfg, config)
    return config


def pretrained_config(cfg: RunConfig, name: str, field: str = "model_name_or_path") -> "PreTrainedConfig":
    """Return the configuration of the pretrained model `name`, which the option `field` names."""
    from transformers import AutoConfig

    folder = model_folder(cfg, name, field)
    refuse_adapter(f"{field}: {name}", Path(folder))
    file = config_file(Path(folder))
    if not file.exists() and config_file(Path(folder, "final")).exists():
        raise UsageError(f"{field}: {name} is the folder of a run: give {name.rstrip('/')}/final, its final model")
    source = folder if file.name == "config.json" else str(file)
    with errors_of(f"{field}: no model could be read from {name}"):
        config = AutoConfig.from_pretrained(source, trust_remote_code=cfg.trust_remote_code)
    refuse_quantized(f"{field}: {name}", config.to_dict())
    _refuse_hub_kernels(cfg, name, config)
    return config


def config_file(folder: Path) -> Path:
    """Return the file with the configuration of a model, which may be missing."""
    of_adapter = folder / CONFIG_OF_ADAPTER
    return of_adapter if of_adapter.exists() else folder / "config.json"


def _config_from_file(cfg: RunConfig, file: str, tokenizer: "PreTrainedTokenizerBase | None") -> "PreTrainedConfig":
    from transformers import AutoConfig

    given = read_yaml(file)
    refuse_quantized(f"model_config: {file}", given)
    model_type = str(given.pop("model_type", None))
    with errors_of(f"{file}: not a valid configuration"):
        defaults = AutoConfig.for_model(model_type)
        config = AutoConfig.for_model(model_type, **_values_of_tokenizer(given, defaults, tokenizer))
    # transformers converts names of earlier versions (`rope_theta`); names that it does not know have no effect.
    names = {*defaults.to_dict(), *defaults.attribute_map, "attn_implementation"}
    unknown = [name for name in given if name not in names and name in config.to_dict()]
    if unknown and not PUBLISHED & given.keys() and Path(file).name != "config.json":
        raise UsageError(f"{file}: {unknown[0]}: {model_type} has no such field{did_you_mean(unknown[0], names)}")
    _refuse_hub_kernels(cfg, file, config)
    return config


def _values_of_tokenizer(given: dict, defaults: Any, tokenizer: "PreTrainedTokenizerBase | None") -> dict:
    """Return `given` with the vocabulary size and special ids that it leaves open, as the tokenizer has them.

    Without a tokenizer, remove the special ids of the published model that a smaller vocabulary does not have."""
    if tokenizer is None:
        size = given.get("vocab_size", float("inf"))
        ids = {name: config_value(defaults, name) for name in SPECIAL_IDS}
        removed = {name: None for name, token_id in ids.items() if isinstance(token_id, int) and token_id >= size}
        return removed | given
    values: dict[str, Any] = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    if config_value(defaults, "vocab_size") is not None:
        values["vocab_size"] = len(tokenizer)
    elif config_value(defaults, "text_config") is not None:
        given = given | {"text_config": {"vocab_size": len(tokenizer)} | given.get("text_config", {})}
    if config_value(defaults, "is_encoder_decoder"):
        values["decoder_start_token_id"] = tokenizer.pad_token_id
        if config_value(defaults, "forced_eos_token_id") is not None:  # BART: the last token of a generation
            values["forced_eos_token_id"] = tokenizer.eos_token_id
    return values | given


def refuse_adapter(source: str, folder: Path) -> None:
    """Raise UsageError for a folder with an adapter of peft: transformers would add it, but only if peft is installed.

    Allow the final/ of a run, which says by itself what its base model is."""
    if not (folder / ADAPTER_CONFIG).exists() or (folder / CONFIG_OF_ADAPTER).exists():
        return
    if any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        raise UsageError(
            f"{source} holds an adapter of the package peft beside a model, which would not be trained: merge it into its "
            "model (merge_and_unload, save_pretrained), or remove adapter_config.json"
        )
    base = named_base(folder)
    fix = f"give its base model {base}" if base else "give the base model that it was trained on"
    if (folder.parent / "config.json").exists():
        fix = f"give {folder.parent}, where it is merged, or the base model"
    fix += ", or to train the adapter further, --init_from with its options in the field peft"
    raise UsageError(f"{source} holds only an adapter of the package peft: {fix}")


def named_base(folder: Path) -> str | None:
    """Return the name of the base model that adapter_config.json has, if there is one."""
    return read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")


def refuse_quantized(source: str, config: dict[str, Any]) -> None:
    """Raise UsageError if a configuration, or a part of it, is that of a model saved quantized."""
    for name, value in config.items():
        if name in ("quantization_config", "compression_config") and value:
            method = value.get("quant_method") if isinstance(value, dict) else value
            raise UsageError(
                f"{source} is a quantized model ({name}: {method}), which is not supported: give the model that it was made "
                "from, or one that was dequantized and saved again"
            )
        if isinstance(value, dict):
            refuse_quantized(source, value)


def _refuse_hub_kernels(cfg: RunConfig, source: str, config: "PreTrainedConfig") -> None:
    """Raise UsageError if a configuration, or a part of it, names a Hub kernel: transformers would run its code."""
    kernel = private_apis.attention_kernel(config)
    if kernel and not (
        is_plain_name(kernel) or cfg.attn_implementation or cfg.trust_remote_code
    ):  # the user has decided
        raise UsageError(
            f"{source}: attn_implementation is {kernel}, which is code from the Hub: give --attn_implementation sdpa, or "
            "--trust_remote_code true if you trust it"
        )
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part:
            _refuse_hub_kernels(cfg, source, part)


def check_fit(
    cfg: RunConfig,
    config: "PreTrainedConfig",
    tokenizer: "PreTrainedTokenizerBase | None",
    max_length: int | None,
    option: str = "max_length",
) -> int:
    """Return the maximum row length. Raise UsageError if tokenizer, model and max_length do not fit together.

    `option` is the name of the field max_length."""
    source = cfg.model_name_or_path or cfg.model_config
    text = text_config(config)
    size = config_value(text, "vocab_size")
    limit = position_limit(config)
    if tokenizer is not None and isinstance(size, int) and len(tokenizer) > size:
        raise UsageError(
            f"{source}: vocab_size is {size}, but the tokenizer {cfg.tokenizer_name or source} has {len(tokenizer)} "
            "tokens: its ids would be outside the embedding; use the model's own tokenizer or a larger vocab_size"
        )
    if limit is None:
        return max_length or DEFAULT_MAX_LENGTH
    if max_length and max_length > limit:
        raise UsageError(
            f"{option} is {max_length}, but {source} has {limit} positions: give at most --{option} {limit}"
        )
    return max_length or min(DEFAULT_MAX_LENGTH, limit)


def position_limit(config: "PreTrainedConfig") -> int | None:
    """Return how many positions a model has, or None if it tells no limit."""
    text = text_config(config)
    limit = config_value(text, "max_position_embeddings")
    if not isinstance(limit, int) or limit <= 0:  # a model without a limit has none, or -1
        return None
    if text.model_type in POSITIONS_AFTER_PADDING:
        limit -= 1 + (config_value(text, "pad_token_id") or 0)
    return limit


def vocabulary_size(cfg: RunConfig, config: "PreTrainedConfig") -> int:
    """Return the number of token ids of a model, also if text is only one of its inputs."""
    size = config_value(text_config(config), "vocab_size")
    if not isinstance(size, int):
        raise UsageError(f"{config.model_type} models have no vocabulary, which task {cfg.task} needs")
    return size


def experts_per_token(config: Any) -> int:
    """Return how many experts a token is sent to, 0 if the configuration does not tell."""
    values = [config_value(text_config(config), name) for name in TOP_K_NAMES]
    return next((int(value) for value in values if value), 0)


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


# ---- tokenizer -----------------------------------------------------------------------------------------------------------


def load_tokenizer(cfg: RunConfig) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer that `tokenizer_name` or else the model names. Return None if there is none."""
    name = cfg.tokenizer_name or cfg.model_name_or_path
    if name is None:
        return None
    field = "tokenizer_name" if cfg.tokenizer_name else "model_name_or_path"
    # A Hub repository named only for its tokenizer is downloaded without weights.
    has_weights = name == cfg.model_name_or_path
    folder = sample_tokenizer(name, cache_root(cfg)) or model_folder(cfg, name, field, has_weights)
    if not cfg.tokenizer_name and not any(Path(folder, file).exists() for file in TOKENIZER_FILES):
        return None  # a model without a tokenizer is enough for rows of input_ids
    from transformers import AutoTokenizer

    file = Path(folder, "tokenizer_config.json")
    values = read_json(file)
    vocabularies = (values.get("vocab"), values.get("merges"), *(values.get("init_inputs") or ()))
    if any(isinstance(value, str) for value in vocabularies):
        raise UsageError(f"{file}: vocab, merges or init_inputs names a file, which could be any here: remove it")
    with errors_of(f"{field}: no tokenizer could be loaded from {name}"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)
    with suppress(NotImplementedError):  # that of mistral_common does not tell
        tokenizer.loaded_ids, tokenizer.loaded_from = set(tokenizer.added_tokens_decoder), folder  # for final/
    if cfg.add_tokens:
        add_tokens(tokenizer, cfg.add_tokens)
    return tokenizer


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """Return a string of everything that the tokenizer's output depends on. Call it first: use changes its settings."""
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        return repr(tokenizer)
    return tokenizer.backend_tokenizer.to_str()


def load_text_decoder(
    cfg: RunConfig, max_length: int | None, chat_template: str | None = None
) -> tuple[Any, str, "PreTrainedConfig", int, int]:
    """Return (tokenizer or None, everything that its output depends on, configuration, row length, vocabulary size).

    The tokenizer has the template of the file `chat_template`. Raise UsageError if they do not fit each other."""
    tokenizer: Any = load_tokenizer(cfg)
    text = tokenizer_fingerprint(tokenizer)
    if tokenizer is not None and chat_template:
        with errors_of(f"chat_template: {chat_template} cannot be read"):
            tokenizer.chat_template = Path(locate(chat_template)).read_text(encoding="utf-8")
    config = load_config(cfg, tokenizer)
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True  # otherwise BERT and similar models would attend to the tokens they predict
    length = check_fit(cfg, config, tokenizer, max_length)
    return tokenizer, text, config, length, vocabulary_size(cfg, config)


def load_text_encoder(
    cfg: RunConfig, max_length: int | None, tokenizer: Any = None
) -> tuple["PreTrainedTokenizerBase", str, "PreTrainedConfig", int]:
    """Return (tokenizer, everything that its output depends on, configuration, row length).

    Without `tokenizer`, it is that of the run. Raise UsageError if they do not fit each other."""
    tokenizer = tokenizer or load_tokenizer(cfg)
    if tokenizer is None or tokenizer.pad_token_id is None:
        raise UsageError(f"{cfg.task} needs --tokenizer_name, or a model folder, with a tokenizer that has a pad_token")
    text = tokenizer_fingerprint(tokenizer)
    config = load_config(cfg, tokenizer)
    part = text_config(config)
    if part.model_type not in POSITIONS_AFTER_PADDING:
        part.pad_token_id = tokenizer.pad_token_id  # a decoder classifies at the last real token
    return tokenizer, text, config, check_fit(cfg, config, tokenizer, max_length)
