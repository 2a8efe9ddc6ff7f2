"""Rows of text, chats, prompt and completion, or ids become token ids and labels.

a new kind of row is one more generator here. Tests: tests/tasks/test_causal_lm.py, tests/config/test_bad_input.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from src.config.errors import UsageError
from src.text.chat import checked_chat, render_chat
from src.text.ignored_columns import warn_of_ignored
from src.text.long_text import encode_long
from src.text.tokenization import CHARACTERS, batches_by_size, require_text, token_bytes

IGNORED = -100
OPTIONAL = ("labels", "attention_mask")  # columns beside `input_ids`


@dataclass
class Encoder:
    """Encodes rows of one kind; each `_encode_*` yields (ids, labels or None, bytes of each token or None)."""

    tokenizer: Any
    vocabulary: int
    max_length: int
    packing: bool
    text_column: str
    append_eos: bool

    def choose(self, columns: list[str], split: str):
        """Take the generator for rows of these columns; return (which of them it needs, the columns that it makes)."""
        if "input_ids" in columns:
            self.encode = self._encode_ids
            chosen = [name for name in ("input_ids", *OPTIONAL) if name in columns], "labels" in columns
            warn_of_ignored(columns, chosen[0], split)
            return self._returning(*chosen)
        if "messages" in columns:
            self.encode, chosen = self._encode_messages, (["messages"], True)
        elif "prompt" in columns and "completion" in columns:
            self.encode, chosen = self._encode_completion, (["prompt", "completion"], True)
        elif self.text_column in columns:
            self.encode, chosen = self._encode_text, ([self.text_column], False)
        else:
            raise UsageError(
                f"{split} data: no usable column among {', '.join(columns)}: a row needs `{self.text_column}` (see "
                "--text_column), `messages`, `prompt` and `completion`, or `input_ids`"
            )
        if self.tokenizer is None:
            raise UsageError(f"{split} data: the rows hold text, so give --tokenizer_name")
        warn_of_ignored(columns, chosen[0], split)
        return self._returning(*chosen)

    def _returning(self, needed: list[str], labelled: bool) -> tuple[list[str], list[str]]:
        self.names = ["input_ids", *(["labels"] if labelled else []), "length", "targets", "bytes", "cut"]
        return needed, self.names

    def encode_batch(self, batch: dict, places) -> dict:
        """Return the encoded columns of a batch of raw rows; a fault names the place of the row."""
        rows = []
        for ids, labels, sizes in self.encode(batch, places):
            rows += self._rows(ids, labels, sizes)
        return {name: [row[name] for row in rows] for name in self.names}

    def _rows(self, ids: list[int], labels: list[int] | None, sizes: np.ndarray | None) -> list[dict]:
        """Return a document as one row cut to max_length, or, where rows will be packed, in as many as it takes.

        `sizes` are the bytes of text that each token stands for; a row's bytes are those of its targets."""
        limit = self.max_length
        starts = range(0, max(len(ids), 1), limit) if self.packing else range(1)
        rows = []
        for start in starts:
            part = ids[start : start + limit]
            part = part.tolist() if isinstance(part, np.ndarray) else part
            wanted = np.array(part if labels is None else labels[start : start + limit])[1:] != IGNORED
            size = 0 if sizes is None else int(sizes[start + 1 : start + len(part)][wanted].sum())
            cut = 0 if self.packing else len(ids) - len(part)
            row = {"input_ids": part, "length": len(part), "targets": int(wanted.sum()), "bytes": size, "cut": cut}
            rows.append(row if labels is None else row | {"labels": labels[start : start + limit]})
        return rows

    def _tokenize(self, texts: list[str], **options) -> Iterator[tuple[list[int] | np.ndarray, np.ndarray | None]]:
        """Yield the token ids of each text (as an array where it is long), and the bytes that each token stands for where the tokenizer can tell."""
        fast = getattr(self.tokenizer, "is_fast", False)
        for part in batches_by_size(texts):
            if (
                fast
                and len(part) == 1
                and len(part[0]) > CHARACTERS
                and (long := encode_long(self.tokenizer, part[0], **options))
            ):
                yield long
                continue
            encoded = self.tokenizer(part, return_offsets_mapping=fast, verbose=False, **options)
            spans = encoded["offset_mapping"] if fast else [None] * len(part)
            for ids, text, span in zip(encoded["input_ids"], part, spans, strict=True):
                yield list(ids), None if span is None else token_bytes(text, span)

    def _ended(self, ids: list[int], sizes: np.ndarray | None) -> tuple[list[int], np.ndarray | None]:
        eos = self.tokenizer.eos_token_id
        if not self.append_eos or eos is None or (len(ids) and ids[-1] == eos):
            return ids, sizes
        if isinstance(ids, np.ndarray):
            return np.append(ids, np.int32(eos)), np.append(sizes, 0)
        return [*ids, eos], None if sizes is None else np.append(sizes, 0)

    def _encode_text(self, batch: dict, where):
        texts = batch[self.text_column]
        require_text(texts, self.text_column, where)
        for ids, sizes in self._tokenize(texts):
            ids, sizes = self._ended(ids, sizes)
            yield ids, None, sizes

    def _encode_ids(self, batch: dict, where):
        vocabulary = self.vocabulary
        absent = [None] * len(where)
        columns = (batch["input_ids"], *(batch.get(name) or absent for name in OPTIONAL), where)
        for ids, labels, mask, place in zip(*columns, strict=True):
            for name, values in (("input_ids", ids), ("labels", labels)):
                if values is None and name == "labels":
                    continue
                if not isinstance(values, list) or not all(type(value) is int for value in values):
                    raise UsageError(f"{place}: `{name}` must be a list of integers")
            if labels is not None and len(labels) != len(ids):
                raise UsageError(
                    f"{place}: {len(labels)} labels for {len(ids)} input_ids: give one label per token, -100 to ignore it"
                )
            if mask is not None:
                kept = _unmasked(mask, len(ids), place)
                ids, labels = ids[kept], labels and labels[kept]
            for name, values in (("input_ids", ids), ("labels", labels or [])):
                for value in {v for v in (min(values, default=0), max(values, default=0)) if not 0 <= v < vocabulary}:
                    if name == "labels" and value == IGNORED and all(v >= 0 or v == IGNORED for v in values):
                        continue
                    raise UsageError(
                        f"{place}: `{name}` holds {value}, outside the vocabulary of {vocabulary}: 0 to {vocabulary - 1}"
                    )
            if "labels" in batch and labels is None:
                labels = list(ids)  # other rows of the batch have some
            yield ids, labels, None

    def _encode_completion(self, batch: dict, where):
        for name in ("prompt", "completion"):
            require_text(batch[name], name, where)
        # Tokenised apart, because at generation the prompt will stand alone.
        prompts = self._tokenize(batch["prompt"])
        completions = self._tokenize(batch["completion"], add_special_tokens=False)
        for (head, _), (tail, sizes) in zip(prompts, completions, strict=True):
            head, tail = (ids.tolist() if isinstance(ids, np.ndarray) else ids for ids in (head, tail))
            head = head[:-1] if head and head[-1] == self.tokenizer.eos_token_id else head
            tail, sizes = self._ended(tail, sizes)
            sizes = None if sizes is None else np.concatenate([np.zeros(len(head), np.int64), sizes])
            yield head + tail, [IGNORED] * len(head) + tail, sizes

    def _encode_messages(self, batch: dict, where):
        if not getattr(self.tokenizer, "is_fast", False):
            raise UsageError("rows with `messages` need a fast tokenizer: it knows which characters a token stands for")
        if not self.tokenizer.chat_template:
            raise UsageError(f"{where[0]}: the tokenizer has no chat template: give one with --chat_template FILE")
        marked = "generation %}" in self.tokenizer.chat_template  # the template itself says what the assistant wrote
        for messages, place in zip(batch["messages"], where, strict=True):
            if marked:
                yield *self._encode_marked(messages, place), None
                continue
            text, turns = render_chat(self.tokenizer, messages, place)
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids, spans = list(encoded["input_ids"]), encoded["offset_mapping"]
            inside = [any(a <= start < b for a, b in turns) for start, _ in spans]
            labels = [token if keep else IGNORED for token, keep in zip(ids, inside, strict=True)]
            yield ids, labels, token_bytes(text, spans)

    def _encode_marked(self, messages: list[dict], place: str) -> tuple[list[int], list[int]]:
        """Return ids and labels of a chat whose template marks the assistant's words with {% generation %}."""
        try:
            chat = self.tokenizer.apply_chat_template(
                checked_chat(self.tokenizer, messages),
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except Exception as error:
            raise UsageError(
                f"{place}: `messages` could not be rendered: {str(error) or type(error).__name__}"
            ) from error
        ids = list(chat["input_ids"])
        return ids, [token if keep else IGNORED for token, keep in zip(ids, chat["assistant_masks"], strict=True)]


def _unmasked(mask: list, length: int, place) -> slice:
    """Return which part of a padded row of `length` tokens its attention_mask keeps; UsageError where that is not one part."""
    if not isinstance(mask, list) or not all(value in (0, 1) for value in mask):
        raise UsageError(f"{place}: `attention_mask` must be a list of 0 and 1")
    if len(mask) != length:
        raise UsageError(f"{place}: `attention_mask` has {len(mask)} values for {length} input_ids")
    kept = [i for i, value in enumerate(mask) if value] or [0, -1]
    if kept[-1] - kept[0] + 1 != sum(mask):
        raise UsageError(f"{place}: `attention_mask` has zeros among its ones: only padding, at an end, may be masked")
    return slice(kept[0], kept[-1] + 1)
