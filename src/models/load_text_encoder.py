"""Loading of the tokenizer and the configuration of a text encoder; checks that they fit each other and the task.

Tests: tests/tasks/test_text_classification.py and tests/addons/tasks/test_masked_lm.py.
"""

from typing import Any, NamedTuple

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.models.load_config import check_fit, load_config
from src.models.load_tokenizer import load_tokenizer, tokenizer_fingerprint

MASK_TOKEN = "<|mask|>"


class TextEncoder(NamedTuple):
    """What the rows and the model of a text task are made from."""

    tokenizer: Any  # PreTrainedTokenizerBase
    tokenizer_text: str  # everything that its output depends on
    config: Any  # PreTrainedConfig
    max_length: int


def load_text_encoder(
    cfg: RunConfig, max_length: int | None, auto_class: type, needs_mask_token: bool = False
) -> TextEncoder:
    """Return tokenizer, configuration and row length. Raise UsageError if they do not fit each other and the task.

    With `needs_mask_token`, a new model (`model_config`) gets a mask token if its tokenizer has none."""
    tokenizer: Any = load_tokenizer(cfg)
    if tokenizer is None:
        raise UsageError(f"{cfg.task} needs --tokenizer_name, or a model folder with a tokenizer")
    if needs_mask_token and tokenizer.mask_token_id is None:
        if cfg.model_name_or_path:
            raise UsageError(f"{cfg.task}: the tokenizer has no mask token, so the model was not trained to fill masks")
        tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
    text = tokenizer_fingerprint(tokenizer)
    config = load_config(cfg, tokenizer)
    limit = check_fit(cfg, config, tokenizer, max_length, auto_class)
    if tokenizer.pad_token_id is None:
        raise UsageError(
            "the tokenizer has no padding token: set `tokenizer.pad_token = tokenizer.eos_token` and save it"
        )
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id  # a decoder classifies at the last real token
    return TextEncoder(tokenizer, text, config, limit)
