"""Encoding of raw rows (text, chats, prompt and completion, or token ids) as token ids and labels.

Add a format of rows here: an `_encode_*` generator and its line in `choose`.
Tests: tests/src/tasks/test_causal_lm.py, tests/engine/config/test_bad_input.py.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from engine.config.errors import UsageError, may_be_removed
from engine.text.chat_options import CHATS, ChatFormat
from engine.text.chat_turns import NO_STRUCTS, find_structs, warn_once
from engine.text.tokenize_and_pack import (
    IGNORED,
    find_leads,
    pack,
    require_text,
    tokenize_continuation,
    tokenize_with_bytes,
)

# Columns that other trainers use. A warning names those that the data has and this task ignores.
MEANINGFUL = """
    attention_mask labels loss_mask assistant_mask assistant_masks completion_mask prompt_mask position_ids
    token_type_ids seq_lengths cu_seqlens tools label system documents functions chat_template_kwargs
    image images audio video videos weight weights sample_weight loss_weight
"""
OTHER_FORMATS = {  # columns of a format -> how to convert it
    "instruction output": "; Alpaca's columns: convert the file once, by datasets.load_dataset('json', data_files=FILE, "
    "split='train').map(lambda row: {'prompt': row['instruction'] + '\\n' + (row.get('input') or '') + '\\n', "
    "'completion': row['output']}).to_json(NEW)",
    "conversations": "; ShareGPT's column: convert the file once, by datasets.load_dataset('json', data_files=FILE, "
    "split='train').map(lambda row: {'messages': [{'role': {'human': 'user', 'gpt': 'assistant'}.get(turn['from'], "
    "turn['from']), 'content': turn['value']} for turn in row['conversations']]}).to_json(NEW)",
}
OPTIONAL_COLUMNS = ("labels", "attention_mask")  # beside `input_ids`


class Format(NamedTuple):
    """A format of rows: its columns, whether there are labels, and the generator that encodes a batch."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    has_labels: bool
    encode: Callable[..., Iterator["Document"]]


class Document(NamedTuple):
    """The tokens of one raw row, before they are truncated or packed."""

    ids: list[int]
    labels: list[int]
    sizes: np.ndarray  # UTF-8 bytes of text per token; zeros if unknown


@dataclass
class Encoder:
    """Encodes the raw rows of a split. All rows of a split have one format."""

    tokenizer: Any  # PreTrainedTokenizerBase; None if all rows are ids
    vocab_size: int
    max_length: int
    packing: bool
    text_column: str
    append_eos: bool
    chat_format: ChatFormat = field(default_factory=ChatFormat)

    row_format = ""  # "chats" if the rows are chats
    structs = NO_STRUCTS  # how the columns of chats are stored

    def choose(self, columns: list[str], split: str, features: Any = None) -> tuple[list[str], list[str]]:
        """Choose the format from the columns. Return (columns to read, columns that encode_batch returns).

        `features`: the types of the columns, if they are known."""
        is_rated = getattr((features or {}).get("label"), "dtype", None) == "bool"
        rating = ("label",) if is_rated else ()  # whether an answer is good, as in rows for KTO
        formats = [
            Format(("input_ids",), OPTIONAL_COLUMNS, "labels" in columns, self._encode_ids),
            Format(("messages",), ("tools", "chat_template_kwargs", *rating), True, self._encode_messages),
            Format(("prompt", "completion"), rating, True, self._encode_completions),
            Format((self.text_column,), (), False, self._encode_texts),
        ]
        fitting = [each for each in formats if {*each.required} <= {*columns}]
        if not fitting:
            raise UsageError(
                f"{split} data: no usable column among {', '.join(columns)}: a row needs `{self.text_column}` (see "
                f"--text_column), `messages`, `prompt` and `completion`, or `input_ids`{_conversion(columns)}"
            )
        chosen = fitting[0]
        if self.tokenizer is None and chosen.required != ("input_ids",):
            raise UsageError(f"{split} data: the rows hold text, but there is no tokenizer: give --tokenizer_name")
        needed = [name for name in (*chosen.required, *chosen.optional) if name in columns]
        meaningful: list[str] = [*MEANINGFUL.split()]
        for other in fitting:
            meaningful += other.required
        ignored = [name for name in columns if name in meaningful and name not in needed]
        if ignored:
            warn_once(f"{split} data: the columns {', '.join(ignored)} are not used: only {', '.join(needed)}")
        self.structs = find_structs(features, needed)
        self.row_format = CHATS if chosen.required == ("messages",) else ""
        if not self.row_format and self.chat_format.unused_fields():
            fields = " and ".join(self.chat_format.unused_fields())
            warn_once(f"{split} data: {fields} of the run file have no effect: the rows are no chats (`messages`)")
        self.encode = chosen.encode
        self.encoded_columns = ["input_ids", "length", "targets", "bytes", "cut"]
        if chosen.has_labels:
            self.encoded_columns.insert(1, "labels")
        return needed, self.encoded_columns

    def encode_batch(self, batch: dict[str, list], locations) -> dict[str, list]:
        """Return the encoded columns of a batch of raw rows. An error names the location of the row."""
        _refuse_bad_answers(batch.get("label") or (), locations)
        columns: dict[str, list] = {name: [] for name in self.encoded_columns}
        for document in self.encode(batch, locations):
            for row in self._rows(document):
                for name, values in columns.items():
                    values.append(row[name])
        return columns

    def pack(self, rows: dict[str, list]) -> dict[str, list]:
        """Return encoded rows packed into fuller ones, with the lengths of their `documents`."""
        return pack(self.max_length, rows)

    def _rows(self, document: Document) -> Iterator[dict]:
        """Yield a document as one row truncated to max_length; with packing, as several rows of up to max_length."""
        length = len(document.ids)
        starts = range(0, max(length, 1), self.max_length) if self.packing else [0]
        for start in starts:
            stop = start + self.max_length
            ids = document.ids[start:stop]
            labels = document.labels[start:stop]
            sizes = document.sizes[start:stop]
            is_target = np.array(labels[1:]) != IGNORED  # never the first token of a row: no token precedes it
            yield {
                "input_ids": ids,
                "labels": labels,
                "length": len(ids),
                "targets": int(is_target.sum()),
                "bytes": int(sizes[1:][is_target].sum()),
                "cut": 0 if self.packing else length - len(ids),
            }

    # ---- one generator for each format -------------------------------------------------------------------------------

    def _encode_texts(self, batch: dict[str, list], locations) -> Iterator[Document]:
        texts = batch[self.text_column]
        require_text(texts, self.text_column, locations)
        for ids, sizes in tokenize_with_bytes(self.tokenizer, texts):
            ids, sizes = self._with_eos(ids, sizes)
            yield Document(ids, ids, sizes)

    def _encode_completions(self, batch: dict[str, list], locations) -> Iterator[Document]:
        for name in ("prompt", "completion"):
            require_text(batch[name], name, locations)
        # The prompt is tokenized alone, as at generation, and the completion as it follows it.
        prompts = tokenize_with_bytes(self.tokenizer, batch["prompt"])
        texts = [prompt + completion for prompt, completion in zip(batch["prompt"], batch["completion"], strict=True)]
        both = tokenize_with_bytes(self.tokenizer, texts)
        adds_eos = self.tokenizer("a")["input_ids"][-1:] == [self.tokenizer.eos_token_id]
        end = -1 if adds_eos else None  # without its eos; one that the prompt itself ends with stays
        for (head, _), (ids, sizes), completion in zip(prompts, both, batch["completion"], strict=True):
            head = head[:end]
            if ids[:end][: len(head)] == head:
                tail = ids[len(head) : end]
                sizes = sizes[len(head) : end]
            else:  # one token would hold parts of both
                tail, sizes = tokenize_continuation(self.tokenizer, completion, self._leads)
            tail, sizes = self._with_eos(tail, sizes)
            sizes = np.concatenate([np.zeros(len(head), np.int64), sizes])
            yield Document(head + tail, [IGNORED] * len(head) + tail, sizes)

    @cached_property
    def _leads(self) -> list[str]:
        return find_leads(self.tokenizer)

    def _with_eos(self, ids: list[int], sizes: np.ndarray) -> tuple[list[int], np.ndarray]:
        eos = self.tokenizer.eos_token_id
        if not self.append_eos or eos is None or ids[-1:] == [eos]:
            return ids, sizes
        return [*ids, eos], np.append(sizes, 0)

    def _encode_messages(self, batch: dict[str, list], locations) -> Iterator[Document]:
        with may_be_removed(CHATS):
            from engine.text.chat import encode_chat
        nothing = [None] * len(locations)
        others = (batch.get("tools") or nothing, batch.get("chat_template_kwargs") or nothing)
        for messages, location, tools, variables in zip(batch["messages"], locations, *others, strict=True):
            chat = (messages, location, tools, self.structs, self.chat_format, variables)
            yield Document(*encode_chat(self.tokenizer, *chat))

    def _encode_ids(self, batch: dict[str, list], locations) -> Iterator[Document]:
        for i, ids in enumerate(batch["input_ids"]):
            labels = batch["labels"][i] if "labels" in batch else None
            mask = batch["attention_mask"][i] if "attention_mask" in batch else None
            if labels is None:
                labels = ids
            self._check_ids(ids, labels, mask, locations[i])
            yield Document(ids, labels, np.zeros(len(ids), np.int64))

    def _check_ids(self, ids: list[int], labels: list[int], mask: list[int] | None, location) -> None:
        _require_integers(ids, "input_ids", location)
        _require_integers(labels, "labels", location)
        if len(labels) != len(ids):
            raise UsageError(f"{location}: `labels` has {len(labels)} values for {len(ids)} input_ids")
        if mask is not None and mask != [1] * len(ids):
            raise UsageError(f"{location}: `attention_mask` is not 1 for each of the input_ids: remove the padding")
        self._check_range(ids, "input_ids", location)
        self._check_range([label for label in labels if label != IGNORED], "labels", location)

    def _check_range(self, ids: list[int], name: str, location) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise UsageError(
                f"{location}: `{name}` holds {min(ids)} to {max(ids)}: ids must be 0 to {self.vocab_size - 1}"
            )


def _conversion(columns: list[str]) -> str:
    """Return how to convert rows of another format, or an empty text if the format is not known."""
    for names, text in OTHER_FORMATS.items():
        if {*names.split()} <= {*columns}:
            return text
    return ""


def _require_integers(values: Any, name: str, location) -> None:
    """Raise UsageError unless `values` is a list of integers, which may be stored as fractions or decimals."""
    if values is None or (isinstance(values, list) and None in values):
        raise UsageError(f"{location}: `input_ids` or `labels` is or holds null")
    types = set(map(type, values)) if isinstance(values, list) else {type(values)}
    if not isinstance(values, list) or not types <= {int, float, Decimal}:
        first_type = min(each.__name__ for each in types)
        raise UsageError(f"{location}: `{name}` holds {first_type}: give a list of integers for each row")
    if not types <= {int} and any(value % 1 for value in values):
        raise UsageError(f"{location}: `{name}` holds a number that is not whole")


def _refuse_bad_answers(ratings: Iterable[bool | None], locations) -> None:
    """Raise UsageError for the first answer that its row calls bad: a language model would learn to give it."""
    for i, rating in enumerate(ratings):
        if rating is False:
            raise UsageError(
                f"{locations[i]}: `label` is false: an answer to avoid, which this task would train on: remove such rows, or "
                "make pairs for task preference"
            )
