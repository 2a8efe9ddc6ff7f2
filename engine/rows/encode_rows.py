"""Encoding of raw rows (text, chats, prompt and completion, or token ids) as token ids and labels.

Their formats are in formats.py. Tests: tests/src/tasks/test_causal_lm.py, tests/engine/rows/test_formats.py,
tests/engine/config/test_bad_input.py.
"""

import importlib.util
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from engine.config.errors import UsageError, may_be_removed, reason_of, warn_once
from engine.rows.chat_options import CHATS, ChatFormat, ChatOptions
from engine.rows.chat_turns import MEDIA_KEYS
from engine.rows.formats import (
    CHAT_PAIRS,
    FORMATS,
    IDS,
    INSTRUCTIONS,
    LAID_OUT,
    RATINGS,
    TEXT,
    TEXT_PAIRS,
    ChatRow,
    Format,
    Ids,
    Texts,
    as_bool,
    choose_format,
)
from engine.rows.tokenize_and_pack import (
    IGNORED,
    TextBytes,
    find_leads,
    pack,
    tokenize_continuation,
    tokenize_with_bytes,
    warn_of_special_tokens,
)

BAD_ANSWER = "an answer to avoid, which this task would train on: remove such rows, or make pairs for task preference"


class Document(NamedTuple):
    """The tokens of a raw row, or of one of its answers, before they are truncated or packed."""

    ids: list[int]
    labels: list[int]
    sizes: np.ndarray | TextBytes  # UTF-8 bytes of text per token, zeros if unknown; TextBytes if all are targets


def make_chat_format(tokenizer: Any, options: ChatOptions) -> ChatFormat:
    """Return how the chats of a run become text: a function of the tokenizer and the options alone.

    Sets `options.training_template`, and gives the tokenizer the template that is saved with the model. Raise UsageError
    for a template that does not exist, or options that have no effect."""
    defaults = ChatOptions()
    changed = [name for name in vars(defaults) if getattr(options, name) != getattr(defaults, name)]
    if tokenizer is None:
        if options.chat_template or options.chat_template_kwargs:
            raise UsageError(
                "chat_template and chat_template_kwargs need a tokenizer: give --tokenizer_name, or omit them"
            )
        return ChatFormat()
    if not changed and importlib.util.find_spec("engine.rows.choose_template") is None:
        return ChatFormat()  # a copy that has removed chats
    with may_be_removed(CHATS):
        from engine.rows.choose_template import choose_template  # pyrefly: ignore
    return choose_template(tokenizer, options)


@dataclass
class Encoder:
    """Encodes the raw rows of a split. All rows of a split have one format."""

    tokenizer: Any  # PreTrainedTokenizerBase; None if all rows are ids
    vocab_size: int
    max_length: int
    splits: bool  # rows longer than max_length become several rows; else they are truncated
    append_eos: bool
    named: Collection[str] = ()  # parts of rows that the run file names in `columns`
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    is_mixed: bool = False  # the sources of a mixture may have other formats, and lack parts that are named
    formats: tuple[Format, ...] = FORMATS  # those that rows may have

    def choose(self, columns: list[str], split: str, first: Callable[[str], Any]) -> tuple[list[str], list[str]]:
        """Choose the format from the columns. Return (columns to read, columns that encode_batch returns).

        `first`: the first value of a column."""
        formats = [self._variant(each, first) for each in self.formats]
        chosen = choose_format(formats, self.named, columns, split, self.is_mixed, first)
        return [*chosen.parts], self.use(chosen, split, has_labels="labels" in columns)

    def _variant(self, format: Format, first: Callable[[str], Any]) -> Format:
        """Return how rows of a format are read that may be chats or texts."""
        if format is TEXT_PAIRS and any(isinstance(first(part), list | dict) for part in format.required):
            return CHAT_PAIRS
        return LAID_OUT if format is INSTRUCTIONS and not getattr(self.tokenizer, "chat_template", None) else format

    def use(self, format: Format, split: str, has_labels: bool = False) -> list[str]:
        """Read rows in this format. Return the columns that encode_batch returns."""
        self.format = format
        if self.tokenizer is None and format is not IDS:
            raise UsageError(f"{split} data: the rows hold text, but there is no tokenizer: give --tokenizer_name")
        if not format.is_chat and self.chat_format.unused_fields():
            fields = " and ".join(self.chat_format.unused_fields())
            warn_once(f"{split} data: {fields} of the run file have no effect: the rows are no chats")
        has_no_end = self.append_eos and getattr(self.tokenizer, "eos_token_id", None) is None
        if has_no_end and not format.is_chat and format is not IDS:
            warn_once(
                f"{split} data: the tokenizer has no eos_token, so no text ends with one: set eos_token in its "
                "tokenizer_config.json, or give --append_eos false"
            )
        self.encoded_columns = ["input_ids", "labels", "length", "targets", "bytes", "cut"]
        if format is TEXT or (format is IDS and not has_labels):
            self.encoded_columns.remove("labels")  # all tokens are targets
        return self.encoded_columns

    def require_one_sequence(self) -> None:
        """Make one sequence of each row, for a task that compares answers. Raise UsageError if the run file wants several."""
        if self.chat_format.train_turns == "each":
            raise UsageError(
                "train_turns: each makes several sequences of a row, but this task has one: give last or all"
            )
        self.chat_format = replace(self.chat_format, one_sequence=True)

    def encode_batch(self, batch: dict[str, list], locations) -> dict[str, list]:
        """Return the encoded columns of a batch of raw rows. An error names the location of the row."""
        columns: dict[str, list] = {name: [] for name in self.encoded_columns}
        rows = self.read_batch(batch, locations)
        for documents, location in zip(self._documents(rows, locations), locations, strict=True):
            for document in documents:
                self._warn_of_split(document, location)
                for row in self._rows(document):
                    for name, values in columns.items():
                        values.append(row[name])
        return columns

    def read_batch(self, batch: dict[str, list], locations) -> list[Any]:
        """Return each row of a batch as its format reads it."""
        parts = [part for part in self.format.parts if part in batch]
        return [self.read_row({part: batch[part][i] for part in parts}, each) for i, each in enumerate(locations)]

    def read_row(self, row: dict[str, Any], location) -> Texts | ChatRow | Ids:
        """Return a row, {part: value}, as its format reads it. Raise UsageError for one that would not be used as it says."""
        try:
            for part in RATINGS:
                if as_bool(row.get(part)) is False:
                    raise ValueError(f"`{part}` is false: {BAD_ANSWER}")
            for part in MEDIA_KEYS:
                if row.get(part):
                    raise ValueError(f"`{part}` holds a file: this task reads text only: remove the row")
            return self.format.read(row)
        except Exception as error:
            raise UsageError(f"{location}: {reason_of(error)}") from error

    def _warn_of_split(self, document: Document, location) -> None:
        """Warn of the first row with a prompt that packing splits: its later parts lack what they follow."""
        if self.splits and len(document.ids) > self.max_length and IGNORED in document.labels:
            warn_once(
                f"{location}: it has {len(document.ids):,} tokens, and max_length is {self.max_length:,}: packing splits "
                "such rows, so their later parts are trained on without the prompt: give --packing whole, which cuts them, or "
                "--long_rows drop (more such rows are not named)",
                kind="packing splits rows with a prompt",
            )

    def pack(self, rows: dict[str, list]) -> dict[str, list]:
        """Return encoded rows packed into fuller ones, with the lengths of their `documents`."""
        return pack(self.max_length, rows)

    def _rows(self, document: Document) -> Iterator[dict]:
        """Yield a document as one row truncated to max_length; if it is split, as several rows of up to max_length."""
        length = len(document.ids)
        starts = range(0, max(length, 1), self.max_length) if self.splits else [0]
        for start in starts:
            ids = document.ids[start : start + self.max_length]
            stop = start + len(ids)
            first = min(start + 1, stop)  # never the first token of a row is a target: no token precedes it
            labels = document.labels[start:stop]
            if isinstance(document.sizes, TextBytes):
                targets = stop - first
                size = document.sizes.before(stop) - document.sizes.before(first)
            else:
                is_target = np.array(document.labels[first:stop], np.int64) != IGNORED
                targets = int(is_target.sum())
                size = int(document.sizes[first:stop][is_target].sum())
            yield {
                "input_ids": ids,
                "labels": labels,
                "length": len(ids),
                "targets": targets,
                "bytes": size,
                "cut": 0 if self.splits else length - len(ids),
            }

    # ---- the documents of each row -----------------------------------------------------------------------------------

    def _documents(self, rows: list[Any], locations) -> Iterator[list[Document]]:
        """Yield the documents of each row; the rows of a split are all texts, chats or ids."""
        first = rows[0] if rows else None
        if isinstance(first, ChatRow):
            return self._encode_chats(rows, locations)
        if isinstance(first, Ids):
            return self._encode_ids(rows, locations)
        return self._encode_texts(rows, locations)

    def _encode_texts(self, rows: list[Texts], locations) -> Iterator[list[Document]]:
        texts = [row.text for row in rows]
        prompts = [row.prompt for row in rows if row.prompt is not None]
        if prompts:
            warn_of_special_tokens(self.tokenizer, prompts, self.format.required[0], locations)
        warn_of_special_tokens(self.tokenizer, texts, self.format.required[-1], locations)
        if prompts:
            yield from self._encode_completions(prompts, texts)
            return
        for ids, sizes in tokenize_with_bytes(self.tokenizer, texts):
            ids = ids + self._eos(ids)
            yield [Document(ids, ids, sizes)]

    def _encode_completions(self, prompts: list[str], completions: list[str]) -> Iterator[list[Document]]:
        # The prompt is tokenized alone, as at generation, and the completion as it follows it.
        heads = tokenize_with_bytes(self.tokenizer, prompts)
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        both = tokenize_with_bytes(self.tokenizer, texts)
        adds_eos = self.tokenizer("a")["input_ids"][-1:] == [self.tokenizer.eos_token_id]
        end = -1 if adds_eos else None  # without its eos; one that the prompt itself ends with stays
        for (head, _), (ids, both_sizes), completion in zip(heads, both, completions, strict=True):
            head = head[:end]
            if ids[:end][: len(head)] == head:
                tail = ids[len(head) : end]
                sizes = both_sizes.of_each(len(ids))[len(head) : end]
            else:  # one token would hold parts of both
                tail, sizes = tokenize_continuation(self.tokenizer, completion, self._leads)
            tail = tail + self._eos(tail)
            sizes = np.pad(sizes, (len(head), len(tail) - len(sizes)))
            yield [Document(head + tail, [IGNORED] * len(head) + tail, sizes)]

    @cached_property
    def _leads(self) -> list[str]:
        return find_leads(self.tokenizer)

    @cached_property
    def _eos_id(self) -> int | None:
        return self.tokenizer.eos_token_id if self.append_eos else None

    def _eos(self, ids: list[int]) -> list[int]:
        """Return what ends a document of these ids."""
        return [] if self._eos_id is None or ids[-1:] == [self._eos_id] else [self._eos_id]

    def _encode_chats(self, rows: list[ChatRow], locations) -> Iterator[list[Document]]:
        with may_be_removed(CHATS):
            from engine.rows.encode_chat import encode_chat  # pyrefly: ignore
        columns = " and ".join(f"`{part}`" for part in self.format.required)
        for location, row in zip(locations, rows, strict=True):
            chat = (row.turns, location, row.tools, self.chat_format, row.variables, columns)
            try:
                yield [Document(*sequence) for sequence in encode_chat(self.tokenizer, *chat)]
            except UsageError as error:
                if not row.note:
                    raise
                raise UsageError(f"{error}{row.note}") from error

    def _encode_ids(self, rows: list[Ids], locations) -> Iterator[list[Document]]:
        for location, (ids, labels) in zip(locations, rows, strict=True):
            if labels is not ids and "labels" not in self.encoded_columns:
                raise UsageError(
                    f"{location}: `labels` is here, but not in the first rows: give it in all rows, or in none"
                )
            for name, values in (("input_ids", ids), ("labels", [label for label in labels if label != IGNORED])):
                if values and not 0 <= min(values) <= max(values) < self.vocab_size:
                    raise UsageError(
                        f"{location}: `{name}` holds {min(values)} to {max(values)}: ids must be 0 to {self.vocab_size - 1}"
                    )
            yield [Document(ids, labels, np.zeros(len(ids), np.int64))]
