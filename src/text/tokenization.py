"""Tokenization helpers: bytes per token, batches of limited size, the check for text.

Tests: tests/text/test_tokenization.py.
"""

from collections.abc import Iterator

import numpy as np

from src.config.errors import UsageError

IGNORED = -100  # label of a token that is not a target
CHARACTERS = 1 << 20  # maximum per tokenizer call: its output takes about 100 bytes per character


def require_text(values: list, column: str, locations) -> None:
    """Raise UsageError for the first value that is not text."""
    for i, value in enumerate(values):
        if not isinstance(value, str):
            kind = "nothing" if value is None else type(value).__name__
            raise UsageError(f"{locations[i]}: `{column}` holds {kind}, not text")


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


def token_bytes(text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """Return the number of UTF-8 bytes of `text` per token, from the character spans of the tokens."""
    return np.diff(cumulative_bytes(text, [end for _, end in spans]), prepend=0)


def cumulative_bytes(text: str, ends: list[int]) -> np.ndarray:
    """Return the number of UTF-8 bytes of `text` up to the end of each token. `ends` are end characters."""
    if not ends:
        return np.zeros(0, np.int64)
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    sizes = 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)
    bytes_before = np.concatenate([[0], np.cumsum(sizes)])
    return np.maximum.accumulate(bytes_before[ends])
