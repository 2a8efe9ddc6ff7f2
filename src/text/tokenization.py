"""Tokenization helpers: bytes per token, batches of limited size, checks.

Tests: tests/text/test_tokenization.py.
"""

import numpy as np

from src.config.errors import UsageError

CHARACTERS = 1 << 20  # of text that a tokenizer gets at a time: its answers take a hundred times as many bytes


def require_text(values: list, column: str, where) -> None:
    for i, value in enumerate(values):
        if not isinstance(value, str):
            kind = "nothing" if value is None else type(value).__name__
            raise UsageError(f"{where[i]}: `{column}` holds {kind}, not text")


def batches_by_size(texts: list[str]):
    """Yield the texts in lists of limited size, at least one text each."""
    part, size = [], 0
    for text in texts:
        if part and size + len(text) > CHARACTERS:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    if part:
        yield part


def token_bytes(text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """Return how many UTF-8 bytes of `text` each token stands for, from the tokens' character spans."""
    return np.diff(bytes_reached(text, [end for _, end in spans]), prepend=0)


def bytes_reached(text: str, ends: list[int]) -> np.ndarray:
    """Return how many UTF-8 bytes of `text` are over after each token, from the characters where they end."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    over = np.concatenate([[0], np.cumsum(1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF))])
    return np.maximum.accumulate(over[ends]) if ends else np.zeros(0, np.int64)


ASSISTANTS = ("assistant", "gpt", "bot", "chatbot", "model", "ai")  # what other formats call it
