"""Tokenizer of a run and its fingerprint; tokenizer and configuration of a text encoder.

Tests: tests/models/test_loading.py and tests/config/test_bad_input.py.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.config.errors import UsageError, errors_of
from src.config.schema import RunConfig
from src.models.load_config import check_fit, load_config, model_folder
from src.storage.cache_folder import cache_root, sample_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")


def load_tokenizer(cfg: RunConfig) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer that `tokenizer_name` or else the model names. Return None if there is none."""
    name = cfg.tokenizer_name or cfg.model_name_or_path
    if name is None:
        return None
    field = "tokenizer_name" if cfg.tokenizer_name else "model_name_or_path"
    # A Hub repository named only for its tokenizer is downloaded without weights.
    has_weights = name == cfg.model_name_or_path
    folder = sample_tokenizer(name, cache_root(cfg)) or model_folder(cfg, name, field, has_weights)
    if not cfg.tokenizer_name and not any(Path(folder, file).exists() for file in FILES):
        return None  # a model without a tokenizer is enough for rows of input_ids
    from transformers import AutoTokenizer

    with errors_of(f"{field}: no tokenizer could be loaded from {name}"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """Return a string of everything that the tokenizer's output depends on. Call it first: use changes its settings."""
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        return repr(tokenizer)
    return tokenizer.backend_tokenizer.to_str()


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
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id  # a decoder classifies at the last real token
    return tokenizer, text, config, check_fit(cfg, config, tokenizer, max_length)
