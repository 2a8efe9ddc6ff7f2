"""Encoding of raw rows (text, chats, prompt and completion, or token ids) as token ids and labels.

Add a kind of row here: an `_encode_*` generator and its branch in `choose`.
Tests: tests/tasks/test_causal_lm.py, tests/config/test_bad_input.py.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from src.config.errors import UsageError, warn
from src.text.chat import render_chat, tokenize_marked_chat
from src.text.tokenization import IGNORED, batches_by_size, require_text, token_bytes

# Columns that other trainers use. A warning names those that the data has and this task ignores.
MEANINGFUL = "attention_mask labels loss_mask assistant_mask assistant_masks completion_mask prompt_mask position_ids"
MEANINGFUL += " token_type_ids seq_lengths cu_seqlens weight weights sample_weight tools"
OTHER_FORMATS = {  # columns of a format -> how to convert it
    "instruction output": "; Alpaca's columns: convert the file once, by datasets.load_dataset('json', data_files=FILE, "
    "split='train').map(lambda row: {'prompt': row['instruction'] + '\\n' + (row.get('input') or '') + '\\n', "
    "'completion': row['output']}).to_json(NEW)",
    "conversations": "; ShareGPT's column: convert the file once, by datasets.load_dataset('json', data_files=FILE, "
    "split='train').map(lambda row: {'messages': [{'role': {'human': 'user', 'gpt': 'assistant'}.get(turn['from'], "
    "turn['from']), 'content': turn['value']} for turn in row['conversations']]}).to_json(NEW)",
}
OPTIONAL_COLUMNS = ("labels", "attention_mask")  # beside `input_ids`


@dataclass
class Document:
    """The tokens of one raw row, before they are truncated or packed."""

    ids: list[int]
    labels: list[int] | None = None  # None: every token is a target
    token_bytes: np.ndarray | None = None  # UTF-8 bytes of text per token, None if unknown


@dataclass
class Encoder:
    """Encodes the raw rows of a split. All rows of a split are of one kind."""

    tokenizer: Any  # PreTrainedTokenizerBase; None if all rows are ids
    vocab_size: int
    max_length: int
    packing: bool
    text_column: str
    append_eos: bool

    def choose(self, columns: list[str], split: str, used: tuple = ()) -> tuple[list[str], list[str]]:
        """Choose the kind of row from the columns. Return (columns to read, columns that encode_batch returns).

        `used` names columns that something else reads: no warning about them."""
        has_labels = True
        if "input_ids" in columns:
            self.encode = self._encode_ids
            needed = [name for name in ("input_ids", *OPTIONAL_COLUMNS) if name in columns]
            has_labels = "labels" in columns
        elif "messages" in columns:
            self.encode, needed = self._encode_messages, [name for name in ("messages", "tools") if name in columns]
        elif "prompt" in columns and "completion" in columns:
            self.encode, needed = self._encode_completion, ["prompt", "completion"]
        elif self.text_column in columns:
            self.encode, needed = self._encode_text, [self.text_column]
            has_labels = False
        else:
            hint = next((hint for names, hint in OTHER_FORMATS.items() if {*names.split()} <= {*columns}), "")
            raise UsageError(
                f"{split} data: no usable column among {', '.join(columns)}: a row needs `{self.text_column}` (see "
                f"--text_column), `messages`, `prompt` and `completion`, or `input_ids`{hint}"
            )
        if self.tokenizer is None and "input_ids" not in columns:
            raise UsageError(f"{split} data: the rows hold text, but there is no tokenizer: give --tokenizer_name")
        if ignored := [name for name in MEANINGFUL.split() if name in columns and name not in (*needed, *used)]:
            _warn_once(f"{split} data: the columns {', '.join(ignored)} are not used: only {', '.join(needed)}")
        self.made = ["input_ids", *(["labels"] if has_labels else []), "length", "targets", "bytes", "cut"]
        return needed, self.made

    def encode_batch(self, batch: dict[str, list], locations) -> dict[str, list]:
        """Return the encoded columns of a batch of raw rows. An error names the location of the row."""
        rows = [row for document in self.encode(batch, locations) for row in self._rows(document)]
        return {name: [row[name] for row in rows] for name in self.made}

    def _rows(self, document: Document) -> list[dict]:
        """Return a document as one row truncated to max_length; with packing, as several rows of up to max_length."""
        length, limit = len(document.ids), self.max_length
        starts = range(0, max(length, 1), limit) if self.packing else [0]
        return [self._row(document, start, min(start + limit, length)) for start in starts]

    def _row(self, document: Document, start: int, stop: int) -> dict:
        """Return the row of tokens start to stop - 1. Its first token is not a target, because no token precedes it."""
        ids = document.ids[start:stop]
        labels = ids if document.labels is None else document.labels[start:stop]
        is_target = np.array(labels)[1:] != IGNORED
        target_bytes = 0
        if document.token_bytes is not None:
            target_bytes = int(document.token_bytes[start + 1 : stop][is_target].sum())
        return {
            "input_ids": ids,
            "labels": labels,
            "length": len(ids),
            "targets": int(is_target.sum()),
            "bytes": target_bytes,
            "cut": 0 if self.packing else len(document.ids) - len(ids),
        }

    def _tokenize(self, texts: list[str], **options) -> Iterator[tuple[list[int], np.ndarray | None]]:
        """Yield (token ids, bytes per token) for each text. The bytes are None without a fast tokenizer."""
        fast = getattr(self.tokenizer, "is_fast", False)
        for batch in batches_by_size(texts):
            encoded = self.tokenizer(batch, return_offsets_mapping=fast, verbose=False, **options)
            for i, text in enumerate(batch):
                sizes = token_bytes(text, encoded["offset_mapping"][i]) if fast else None
                yield list(encoded["input_ids"][i]), sizes

    def _with_eos(self, ids: list[int], sizes: np.ndarray | None) -> tuple[list[int], np.ndarray | None]:
        eos = self.tokenizer.eos_token_id
        if not self.append_eos or eos is None or ids[-1:] == [eos]:
            return ids, sizes
        return [*ids, eos], None if sizes is None else np.append(sizes, 0)

    # ---- one generator for each kind of row --------------------------------------------------------------------------

    def _encode_text(self, batch: dict[str, list], locations) -> Iterator[Document]:
        texts = batch[self.text_column]
        require_text(texts, self.text_column, locations)
        for ids, sizes in self._tokenize(texts):
            ids, sizes = self._with_eos(ids, sizes)
            yield Document(ids, token_bytes=sizes)

    def _encode_ids(self, batch: dict[str, list], locations) -> Iterator[Document]:
        for i, ids in enumerate(batch["input_ids"]):
            labels, mask = (batch[name][i] if name in batch else None for name in OPTIONAL_COLUMNS)
            yield Document(*self._without_padding(ids, labels, mask, locations[i]))

    def _without_padding(self, ids, labels, mask, location) -> tuple[list[int], list[int] | None]:
        """Return ids and labels that `mask` keeps. Raise UsageError for invalid types, lengths, ids or masks."""
        for name, values in (("input_ids", ids), ("labels", labels), ("attention_mask", mask)):
            if name != "input_ids" and values is None:
                continue
            types = (int, bool) if name == "attention_mask" else (int,)
            if not isinstance(values, list) or not all(type(value) in types for value in values):
                raise UsageError(f"{location}: `{name}` must be a list of integers")
            if len(values) != len(ids):
                raise UsageError(f"{location}: `{name}` has {len(values)} values for {len(ids)} input_ids")
        if mask is not None:
            start = mask.index(1) if 1 in mask else 0
            kept = slice(start, start + sum(mask))
            if any(mask[:start]) or any(value != 1 for value in mask[kept]) or any(mask[kept.stop :]):
                raise UsageError(
                    f"{location}: `attention_mask` must be 0 for padding, at the start or the end, and 1 for all others"
                )
            ids, labels = ids[kept], None if labels is None else labels[kept]
        for name, values in (("input_ids", ids), ("labels", [value for value in labels or () if value != IGNORED])):
            if values and not 0 <= min(values) <= max(values) < self.vocab_size:
                raise UsageError(
                    f"{location}: `{name}` holds {min(values)} to {max(values)}: ids must be 0 to {self.vocab_size - 1}"
                )
        return ids, labels

    def _encode_completion(self, batch: dict[str, list], locations) -> Iterator[Document]:
        for name in ("prompt", "completion"):
            require_text(batch[name], name, locations)
        # Tokenized separately, because at generation the prompt is tokenized alone.
        prompts = self._tokenize(batch["prompt"])
        completions = self._tokenize(batch["completion"], add_special_tokens=False)
        for (head, _), (completion, sizes) in zip(prompts, completions, strict=True):
            if head and head[-1] == self.tokenizer.eos_token_id:
                head = head[:-1]
            tail, sizes = self._with_eos(completion, sizes)
            if sizes is not None:
                sizes = np.concatenate([np.zeros(len(head), np.int64), sizes])
            yield Document(head + tail, [IGNORED] * len(head) + tail, sizes)

    def _encode_messages(self, batch: dict[str, list], locations) -> Iterator[Document]:
        if not getattr(self.tokenizer, "is_fast", False):
            raise UsageError("rows with `messages` need a fast tokenizer, which reports the characters of each token")
        template = self.tokenizer.chat_template
        if not template:
            raise UsageError(f"{locations[0]}: the tokenizer has no chat template: give one with --chat_template FILE")
        tools = batch.get("tools") or [None] * len(batch["messages"])
        for chat in zip(batch["messages"], locations, tools, strict=True):
            if "generation %}" in template:
                yield Document(*tokenize_marked_chat(self.tokenizer, *chat))
            else:
                yield self._encode_chat(*chat)

    def _encode_chat(self, messages: list[dict], location, tools: Any) -> Document:
        text, turns = render_chat(self.tokenizer, messages, location, tools)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, spans = list(encoded["input_ids"]), encoded["offset_mapping"]
        labels = []
        for token, (start, _) in zip(ids, spans, strict=True):
            in_turn = any(begin <= start < end for begin, end in turns)
            labels.append(token if in_turn else IGNORED)
        return Document(ids, labels, token_bytes(text, spans))


@functools.cache
def _warn_once(text: str) -> None:
    warn(text)
