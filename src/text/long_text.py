"""Tokenize long documents in parts, with the same ids as in one piece.

Tests: tests/text/test_long_text.py.
"""

import numpy as np

from src.text.tokenization import bytes_reached

PART = 1 << 18  # characters that a tokenizer gets at a time
OVERLAP = 1 << 14  # of these in common with the part before


def encode_long(tokenizer, text: str, **options) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (ids, bytes of each token) of a long text in little memory, the same as in one go; None where that is not certain.

    A tokenizer takes 160 bytes for each byte of text. So it gets overlapping parts, which are joined inside the overlap, and only
    where both have the same tokens throughout the middle half of it. For BPE that is exact: a row of tokens is the encoding of its
    text if each pair of neighbors is that of theirs, and the pair at the joint comes out of a part, as all others do. A tokenizer
    of another kind is trusted at the beginning of a word only: it sees one word at a time."""
    bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    found, passed, begin = [], 0, 0  # passed: bytes before `begin`
    held = None
    while True:
        part = text[begin : begin + PART]
        encoded = tokenizer(part, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        words = np.array([-1 if word is None else word for word in encoded.word_ids(0)], np.int64)
        ids = np.array(encoded["input_ids"], np.int32)
        here = [ids, spans + begin, words, bytes_reached(part, spans[:, 1].tolist()) + passed]
        if held is not None:
            cuts = _joint(held, here, begin + OVERLAP // 4, begin + OVERLAP - OVERLAP // 4, bpe)
            if cuts is None:
                return None
            found.append((held[0][: cuts[0]].copy(), held[3][: cuts[0]].copy()))
            here = [column[cuts[1] :] for column in here]
        held = here
        if begin + PART >= len(text):
            break
        step = PART - OVERLAP
        passed += len(text[begin : begin + step].encode("utf-8", "surrogatepass"))
        begin += step
    head, tail = _specials(tokenizer) if options.get("add_special_tokens", True) else ([], [])
    ids = np.concatenate([np.array(head, np.int32), *(part for part, _ in found), held[0], np.array(tail, np.int32)])
    reached = np.concatenate(
        [np.zeros(len(head), np.int64), *(part for _, part in found), held[3], [passed] * len(tail)]
    )
    return ids, np.diff(np.maximum.accumulate(reached), prepend=0)


def _joint(left: list, right: list, low: int, high: int, bpe: bool) -> tuple[int, int] | None:
    """Return (tokens of `left` to keep, tokens of `right` to leave out) where two parts meet, None where they differ.

    Compared are the tokens that begin between the characters `low` and `high`."""
    (a, b), (c, d) = (np.searchsorted(part[1][:, 0], (low, high)) for part in (left, right))
    if b - a != d - c or b - a < 4:
        return None
    if not ((left[0][a:b] == right[0][c:d]).all() and (left[1][a:b] == right[1][c:d]).all()):
        return None
    for i in range((b - a) // 2, b - a - 1):
        new_word = all(part[2][at + i] != part[2][at + i - 1] for part, at in ((left, a), (right, c)))
        apart = left[1][a + i - 1][1] <= left[1][a + i][0]  # the tokens of one character may share it
        if apart and (bpe or new_word):
            return a + i, c + i
    return None


def _specials(tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer puts before and behind a text."""
    bare, full = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    at = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
    return full[:at], full[at + len(bare) :]
