"""Tokenization helpers: bytes per token, packing, chat templates, attention masks that need no sync.

Tests: tests/text/test_tokenization.py.
"""

from contextlib import contextmanager

import numpy as np
import torch

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


@contextmanager
def masks_known(packed: bool):
    """Within, transformers takes from us whether rows are packed or padded, instead of reading it from the device.

    It asks `mask.all()` in every forward pass, where the host then waits for all work in flight. Private functions of
    transformers: where a version has none of that name, nothing changes but the wait.
    """
    from transformers import masking_utils

    def sequences(position_ids):
        if not packed:
            return None
        return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)

    def can_be_ignored(padding_mask, kv_length, local_attention_size=None):
        return padding_mask is None and (local_attention_size is None or kv_length < local_attention_size)

    ours = {"find_packed_sequence_indices": sequences, "_ignore_bidirectional_mask_sdpa": can_be_ignored}
    theirs = {name: getattr(masking_utils, name) for name in ours if hasattr(masking_utils, name)}
    try:
        vars(masking_utils).update({name: ours[name] for name in theirs})
        yield
    finally:
        vars(masking_utils).update(theirs)
