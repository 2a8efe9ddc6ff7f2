"""Tokenization helpers: bytes per token, batches of limited size, the check for text.

Tests: tests/text/test_tokenization.py.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from src.config.errors import UsageError

IGNORED = -100  # label of a token that is not a target
CHARACTERS = 1 << 20  # maximum per tokenizer call: its output takes about 100 bytes per character


def require_text(values: list, column: str, locations) -> None:
    """Raise UsageError for the first value that is not text."""
    for i, value in enumerate(values):
        if not isinstance(value, str):
            content = "nothing" if value is None else type(value).__name__
            raise UsageError(f"{locations[i]}: `{column}` holds {content}, not text")


def batches_by_size(texts: list[str]) -> Iterator[list[str]]:
    """Yield lists of texts with at most CHARACTERS characters in total. A longer text gets its own list."""
    batch, size = [], 0
    for text in texts:
        if batch and size + len(text) > CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


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


def token_bytes(text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """Return the number of UTF-8 bytes of `text` per token, from the character spans of the tokens."""
    if not spans:
        return np.zeros(0, np.int64)
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    sizes = 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)
    bytes_before = np.concatenate([[0], np.cumsum(sizes)])
    return np.diff(np.maximum.accumulate(bytes_before[[end for _, end in spans]]), prepend=0)
