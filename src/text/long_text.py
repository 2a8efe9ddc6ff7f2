"""Tokenization of a long document in overlapping parts, with the same ids as in one call.

Tests: tests/text/test_long_text.py.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from src.text.tokenization import cumulative_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PART = 1 << 18  # characters per tokenizer call
OVERLAP = 1 << 14  # characters that two adjacent parts share


class _Part(NamedTuple):
    """The tokens of one part; all arrays have one entry per token."""

    ids: np.ndarray
    spans: np.ndarray  # (begin, end) in characters of the whole text
    words: np.ndarray  # index of the token's word, -1 if none
    bytes_after: np.ndarray  # UTF-8 bytes of the whole text up to the token's end


def encode_long(
    tokenizer: "PreTrainedTokenizerBase", text: str, add_special_tokens: bool = True
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (ids, bytes per token) of a long text in little memory. Return None if the ids may differ from one call's.

    A tokenizer needs 160 bytes of memory per byte of text, so it gets overlapping parts. Two parts are joined inside
    their overlap if both have the same tokens in its middle half. For BPE the result is exact: a sequence of tokens is
    the encoding of its text if each adjacent pair is the encoding of its own text. Here each adjacent pair, also the
    one at the joint, comes from one part. Other tokenizers work word by word, so they are joined at a word's start."""
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    ids, reached = [], []  # columns of the tokens that are final
    begin = bytes_before = 0
    last = _encode_part(tokenizer, text[:PART], 0, 0)
    while begin + PART < len(text):
        step = text[begin : begin + PART - OVERLAP]
        begin += len(step)
        bytes_before += len(step.encode("utf-8", "surrogatepass"))
        part = _encode_part(tokenizer, text[begin : begin + PART], begin, bytes_before)
        joint = _joint(last, part, begin + OVERLAP // 4, begin + OVERLAP - OVERLAP // 4, is_bpe)
        if joint is None:
            return None
        ids.append(last.ids[: joint[0]].copy())
        reached.append(last.bytes_after[: joint[0]].copy())
        last = _Part(*(column[joint[1] :] for column in part))
    prefix, suffix = _special_tokens(tokenizer) if add_special_tokens else ([], [])
    no_bytes = [np.zeros(len(special), np.int64) for special in (prefix, suffix)]
    all_ids = np.concatenate([np.array(prefix, np.int32), *ids, last.ids, np.array(suffix, np.int32)])
    all_reached = np.concatenate([no_bytes[0], *reached, last.bytes_after, no_bytes[1]])
    return all_ids, np.diff(np.maximum.accumulate(all_reached), prepend=0)


def _encode_part(tokenizer: "PreTrainedTokenizerBase", text: str, begin: int, bytes_before: int) -> _Part:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
    return _Part(
        np.array(encoded["input_ids"], np.int32),
        spans + begin,
        np.array([-1 if word is None else word for word in encoded.word_ids(0)], np.int64),
        cumulative_bytes(text, spans[:, 1].tolist()) + bytes_before,
    )


def _joint(left: _Part, right: _Part, low: int, high: int, is_bpe: bool) -> tuple[int, int] | None:
    """Return (number of tokens of `left` to keep, number of `right` to drop). Return None if the overlaps differ.

    Compare only the tokens that begin between the characters `low` and `high`."""
    (a, b), (c, d) = (np.searchsorted(part.spans[:, 0], (low, high)) for part in (left, right))
    if b - a != d - c or b - a < 4:
        return None
    if (left.ids[a:b] != right.ids[c:d]).any() or (left.spans[a:b] != right.spans[c:d]).any():
        return None
    for i in range((b - a) // 2, b - a - 1):
        new_word = all(part.words[at + i] != part.words[at + i - 1] for part, at in ((left, a), (right, c)))
        separate = left.spans[a + i - 1][1] <= left.spans[a + i][0]  # tokens of the same character share its span
        if separate and (is_bpe or new_word):
            return a + i, c + i
    return None


def _special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer adds before and after a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    at = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
    return full[:at], full[at + len(bare) :]
