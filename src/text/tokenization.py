"""Tokenization helpers: ids with the bytes of each token, truncation, the check for text.

Tests: tests/text/test_tokenization.py.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from src.config.errors import UsageError

IGNORED = -100  # label of a token that is not a target
TEXTS = 16  # per tokenizer call: its output takes about 100 bytes per character


def require_text(values: list, column: str, locations) -> None:
    """Raise UsageError for the first value that is not text. A tokenizer would read a list of two texts as a pair."""
    for i, value in enumerate(values):
        if not isinstance(value, str):
            content = "nothing" if value is None else type(value).__name__
            raise UsageError(f"{locations[i]}: `{column}` holds {content}, not text")


def tokenize_truncated(tokenizer, texts: list[list[str]], max_length: int, **options) -> tuple[Any, dict[str, list]]:
    """Return (the tokenizer's output, truncated to max_length; columns `length` and `cut`, the tokens truncated).

    `texts` holds one list of texts, or two lists for pairs."""
    encoded = tokenizer(*texts, truncation=True, max_length=max_length, verbose=False, **options)
    lengths = [len(ids) for ids in encoded["input_ids"]]
    truncated = [0] * len(lengths)
    full = [i for i, length in enumerate(lengths) if length == max_length]
    if full:  # tokenized again without the limit, only to report how much was truncated
        complete = tokenizer(*([column[i] for i in full] for column in texts), verbose=False)["input_ids"]
        for i, ids in zip(full, complete, strict=True):
            truncated[i] = len(ids) - max_length
    return encoded, {"length": lengths, "cut": truncated}


def tokenize_with_bytes(tokenizer, texts: list[str], **options) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield (token ids, UTF-8 bytes of each token) for each text. Without a fast tokenizer the bytes are zero."""
    fast = getattr(tokenizer, "is_fast", False)
    for start in range(0, len(texts), TEXTS):
        some = texts[start : start + TEXTS]
        encoded = tokenizer(some, return_offsets_mapping=fast, verbose=False, **options)
        for i, text in enumerate(some):
            ids = list(encoded["input_ids"][i])
            yield ids, token_bytes(text, encoded["offset_mapping"][i]) if fast else np.zeros(len(ids), np.int64)


def token_bytes(text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """Return the number of UTF-8 bytes of `text` per token, from the character spans of the tokens."""
    if not spans:
        return np.zeros(0, np.int64)
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    sizes = 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)
    bytes_before = np.concatenate([[0], np.cumsum(sizes)])
    return np.diff(np.maximum.accumulate(bytes_before[[end for _, end in spans]]), prepend=0)
