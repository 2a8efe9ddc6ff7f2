"""Rows of tokens: tokenized, truncated to a length, packed into full rows, padded to a batch.

Tests: tests/engine/rows/test_tokenize_and_pack.py.
"""

import bisect
import functools
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from engine.config.errors import UsageError, warn_once

IGNORED = -100  # label of a token that is not a target
TEXTS = 16  # per tokenizer call: its output takes about 100 bytes per character


def require_text(values: list, column: str, locations) -> None:
    """Raise UsageError for the first value that is not text. A tokenizer would read a list of two texts as a pair."""
    for i, value in enumerate(values):
        if not isinstance(value, str):
            content = "nothing" if value is None else type(value).__name__
            raise UsageError(f"{locations[i]}: `{column}` holds {content}, not text")


def warn_of_special_tokens(tokenizer, texts: Iterable, column: str, locations) -> None:
    """Warn of the first text that holds a special token: the tokenizer reads it as the token that it names, not as text.

    Once for each column and token. `locations`: of the texts."""
    pattern = _special_tokens(tokenizer)
    if pattern is None:
        return
    for text, location in zip(texts, locations, strict=True):
        if isinstance(text, str) and (found := pattern.search(text)):
            warn_once(
                f"{location}: `{column}` holds {found[0]!r}, which the tokenizer reads as its special token, not as text: "
                "remove it from such rows, unless the token is meant",
                kind=f"the special token {found[0]} in {column}",
            )


@functools.lru_cache
def _special_tokens(tokenizer) -> re.Pattern | None:
    """Return a pattern of the special tokens that a tokenizer finds in texts; None if there are none."""
    tokens: list[str] = [
        token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special
    ]
    if not tokens or getattr(tokenizer, "split_special_tokens", False):
        return None
    ends: dict[str, list[str]] = {}  # by the first two characters: `re` would try a thousand tokens at each "<"
    for token in sorted(tokens, key=str.__len__, reverse=True):
        ends.setdefault(token[:2], []).append(re.escape(token[2:]))
    return re.compile("|".join(f"{re.escape(begin)}(?:{'|'.join(each)})" for begin, each in ends.items()))


def tokenize(tokenizer, *texts: list[str], **options) -> Any:
    """Return the tokenizer's output; a text that begins with the BOS, as chat templates write it, gets no second one."""
    encoded = tokenizer(*texts, verbose=False, **options)
    bos = getattr(tokenizer, "bos_token_id", None)
    for i, ids in enumerate(encoded["input_ids"]):
        if bos is not None and ids[:2] == [bos, bos]:
            for values in encoded.values():
                del values[i][0]
    return encoded


def tokenize_columns(
    tokenizer, batch: dict[str, list], columns: list[str], max_length: int, locations
) -> tuple[Any, dict[str, list]]:
    """Return what `tokenize_truncated` does for a column of texts, or two as pairs. Raise UsageError for other values."""
    for column in columns:
        require_text(batch[column], column, locations)
        warn_of_special_tokens(tokenizer, batch[column], column, locations)
    return tokenize_truncated(tokenizer, [batch[column] for column in columns], max_length)


def tokenize_truncated(tokenizer, texts: list[list[str]], max_length: int, **options) -> tuple[Any, dict[str, list]]:
    """Return (the tokenizer's output, truncated to max_length; columns `length` and `cut`, the tokens truncated).

    `texts` holds one list of texts, or two lists for pairs."""
    encoded = tokenize(tokenizer, *texts, truncation=True, max_length=max_length, **options)
    lengths = [len(ids) for ids in encoded["input_ids"]]
    complete = encoded["input_ids"]
    if max(lengths, default=0) >= max_length - 1:  # again without the limit, only to report how much was truncated
        complete = tokenize(tokenizer, *texts)["input_ids"]
    truncated = [len(ids) - length for ids, length in zip(complete, lengths, strict=True)]
    return encoded, {"length": lengths, "cut": truncated}


class TextBytes(NamedTuple):
    """How many UTF-8 bytes of a text its tokens are. They are unknown, and 0, without a fast tokenizer."""

    text: str
    encoding: Any = None  # tokenizers.Encoding
    skipped: int = 0  # tokens of the encoding that the row lacks, at its beginning

    def before(self, token: int) -> int:
        """Return the bytes of the tokens before one. Few tokens are asked for, and a list of all spans takes long."""
        if self.encoding is None:
            return 0
        for i in reversed(range(min(token + self.skipped, len(self.encoding)))):
            span = self.encoding.token_to_chars(i)
            if span and span[1]:  # else a token that the tokenizer has added
                return len(self.text[: span[1]].encode(errors="surrogatepass"))
        return 0

    def of_each(self, count: int) -> np.ndarray:
        """Return the bytes of each of `count` tokens."""
        if self.encoding is None:
            return np.zeros(count, np.int64)
        return token_bytes(self.text, span_array(self.encoding.offsets[self.skipped :])[:, 1])


def tokenize_with_bytes(tokenizer, texts: list[str], **options) -> Iterator[tuple[list[int], TextBytes]]:
    """Yield (token ids, UTF-8 bytes of the tokens) for each text."""
    for start in range(0, len(texts), TEXTS):
        batch = texts[start : start + TEXTS]
        encoded = tokenize(tokenizer, batch, return_attention_mask=False, **options)
        encodings = getattr(encoded, "encodings", None) or [None] * len(batch)
        for text, ids, encoding in zip(batch, encoded["input_ids"], encodings, strict=True):
            yield ids, TextBytes(text, encoding, len(encoding) - len(ids) if encoding else 0)


def find_leads(tokenizer) -> list[str]:
    """Return characters after which the tokenizer adds no space, if it begins a text with one; else none.

    SentencePiece begins a text with a space, so the text after another one has to be tokenized behind something."""
    leads = []
    for lead in ("\n", ".", ":"):
        if any(_loses_space(tokenizer, lead, word) for word in ("a", "e", "1", "yes")):
            leads.append(lead)
    return leads


def _loses_space(tokenizer, lead: str, word: str) -> bool:
    """Return whether a word has other tokens behind `lead` than alone, and `lead` the same."""

    def ids_of(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    lead_ids = ids_of(lead)
    both = ids_of(lead + word)
    is_separate = bool(lead_ids) and both[: len(lead_ids)] == lead_ids
    return is_separate and both[len(lead_ids) :] != ids_of(word)


def tokenize_continuation(tokenizer, text: str, leads: list[str]) -> tuple[list[int], np.ndarray]:
    """Return (token ids, UTF-8 bytes of each token) of a text that follows another one. `leads`: see find_leads."""
    for lead in leads:
        encoded = tokenize_with_bytes(tokenizer, [lead, lead + text], add_special_tokens=False)
        (lead_ids, _), (ids, sizes) = encoded
        if ids[: len(lead_ids)] == lead_ids:  # else one token would hold parts of both, as of two line breaks
            return ids[len(lead_ids) :], sizes.of_each(len(ids))[len(lead_ids) :]
    [(ids, sizes)] = tokenize_with_bytes(tokenizer, [text], add_special_tokens=False)
    return ids, sizes.of_each(len(ids))


def span_array(spans: list[tuple[int, int]]) -> np.ndarray:
    """Return the character spans of tokens as an array, (tokens, 2)."""
    return np.fromiter(chain.from_iterable(spans), np.int64, 2 * len(spans)).reshape(-1, 2)


def token_bytes(text: str, ends: np.ndarray) -> np.ndarray:
    """Return the number of UTF-8 bytes of `text` per token, from the characters at which the tokens end."""
    if not text.isascii():
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        sizes = 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)
        ends = np.concatenate([[0], np.cumsum(sizes)])[ends]
    return np.diff(np.maximum.accumulate(ends), prepend=0)


# ---- rows of a batch -------------------------------------------------------------------------------------------------


def pack(max_length: int, batch: dict) -> dict:
    """Return rows of up to max_length tokens, packed from the documents of a batch (best fit, longest document first).

    A row keeps the lengths of its documents, so neither attention nor targets cross from one document to the next.
    Documents of one token are dropped, because they have no target."""
    columns = [name for name in ("input_ids", "labels", "length", "targets", "bytes", "cut") if name in batch]
    packed: dict[str, list] = {name: [] for name in columns}
    packed["documents"] = []
    for documents in _best_fit(batch["length"], max_length):
        for name in columns:
            values = [batch[name][document] for document in documents]
            is_list = name in ("input_ids", "labels")
            packed[name].append(list(chain.from_iterable(values)) if is_list else sum(values))
        packed["documents"].append([batch["length"][document] for document in documents])
    return packed


def _best_fit(lengths: list[int], max_length: int) -> list[list[int]]:
    """Return the document indices of each row. A document goes into the fullest row that still has space for it.

    Of several such rows, it is the one that changed last. Linear in the number of documents, as few spaces differ."""
    rows: list[list[int]] = []
    open_rows: dict[int, list[list[int]]] = {}  # space -> rows with that space, in the order of their last change
    spaces: list[int] = []  # those of open rows, sorted
    documents = [document for document, length in enumerate(lengths) if length > 1]
    documents.sort(key=lambda document: -lengths[document])
    for document in documents:
        place = bisect.bisect_left(spaces, lengths[document])
        if place < len(spaces):
            space = spaces[place]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del spaces[place]
        else:
            space = max_length
            row = []
            rows.append(row)
        row.append(document)
        space -= lengths[document]
        if space and not open_rows.setdefault(space, []):
            bisect.insort(spaces, space)
        if space:
            open_rows[space].append(row)
    return rows


def padded_length(lengths: list[int], multiple_of: int | None, max_length: int) -> int:
    """Return the width of a padded micro-batch: its longest row, rounded up to `multiple_of`, up to max_length."""
    longest = max(1, *lengths)
    if not multiple_of:  # set it so that torch.compile sees fewer shapes
        return longest
    rounded_up = -(-longest // multiple_of) * multiple_of
    return max(longest, min(rounded_up, max_length))


def pad_columns(rows: list[dict], padding: dict[str, int], width: int) -> dict[str, np.ndarray]:
    """Return each column that `padding` names as an int64 array (rows, width), padded on the right with its value.

    Add `attention_mask`, unless no row is shorter than `width`: without a mask attention uses its fast kernels."""
    padded = {name: np.full((len(rows), width), value, np.int64) for name, value in padding.items()}
    mask = np.zeros((len(rows), width), np.int64)
    for i, row in enumerate(rows):
        for name in padding:
            padded[name][i, : len(row[name])] = row[name]
        mask[i, : max(1, len(row["input_ids"]))] = 1  # a row that attends to nothing would be NaN
    return padded if mask.all() else padded | {"attention_mask": mask}
