"""Encoding of raw rows (text, chats, prompt and completion, or token ids) as token ids and labels.

Add a format of rows here: an `_encode_*` generator and its line in `choose`, and its columns in row_columns.py.
Tests: tests/src/tasks/test_causal_lm.py, tests/engine/text/test_row_formats.py, tests/engine/config/test_bad_input.py.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from engine.config.errors import UsageError, errors_of, may_be_removed, warn_once
from engine.text.chat_options import CHATS, ChatFormat
from engine.text.chat_turns import MEDIA_KEYS, NO_STRUCTS, find_structs
from engine.text.row_columns import RATINGS, VARIABLES, Format, choose_format, formats_of_rows
from engine.text.row_formats import (
    join_prompt,
    lay_out_instruction,
    read_instruction,
    read_tools,
    read_turns,
    with_system,
)
from engine.text.tokenize_and_pack import (
    IGNORED,
    find_leads,
    pack,
    require_text,
    tokenize_continuation,
    tokenize_with_bytes,
    warn_of_special_tokens,
)


class Document(NamedTuple):
    """The tokens of a raw row, or of one of its answers, before they are truncated or packed."""

    ids: list[int]
    labels: list[int]
    sizes: np.ndarray  # UTF-8 bytes of text per token; zeros if unknown


class ChatRow(NamedTuple):
    """A row of any format of chats, as a template takes it."""

    turns: Any
    tools: Any
    variables: Any  # of the template, as the row gives them
    note: str = ""  # added to an error: how its turns are counted


@dataclass
class Encoder:
    """Encodes the raw rows of a split. All rows of a split have one format."""

    tokenizer: Any  # PreTrainedTokenizerBase; None if all rows are ids
    vocab_size: int
    max_length: int
    packing: bool
    text_column: str
    append_eos: bool
    named: dict[str, str] = field(default_factory=dict)  # part of a row -> the column that the run file names for it
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    is_mixed: bool = False  # the sources of a mixture may have other formats, and lack columns that are named

    reads_chats = False  # whether the rows are chats
    structs = NO_STRUCTS  # how the columns of chats are stored

    def choose(self, columns: list[str], split: str, features: Any = None) -> tuple[list[str], list[str]]:
        """Choose the format from the columns. Return (columns to read, columns that encode_batch returns).

        `features`: the types of the columns, if they are known."""
        formats = formats_of_rows(self.text_column, self.named, features)
        if self.named and self.is_mixed:
            formats += formats_of_rows(self.text_column, {}, features)
        self.format = chosen = choose_format(formats, self.named, columns, split, self.is_mixed)
        if self.tokenizer is None and chosen.name != "ids":
            raise UsageError(f"{split} data: the rows hold text, but there is no tokenizer: give --tokenizer_name")
        encoders = {
            "ids": self._encode_ids,
            "messages": self._encode_chats,
            "pairs": self._encode_pairs,
            "pairs of chats": self._encode_chats,
            "text": self._encode_texts,
            "conversations": self._encode_chats,
            "instructions": self._encode_instructions,
        }
        self.encode = encoders[chosen.name]
        self.reads_chats = chosen.holds_chats(self._has_template)
        if not self.reads_chats and self.chat_format.unused_fields():
            fields = " and ".join(self.chat_format.unused_fields())
            warn_once(f"{split} data: {fields} of the run file have no effect: the rows are no chats")
        has_no_end = self.append_eos and getattr(self.tokenizer, "eos_token_id", None) is None
        if has_no_end and not self.reads_chats and chosen.name != "ids":
            warn_once(
                f"{split} data: the tokenizer has no eos_token, so no text ends with one: set eos_token in its "
                "tokenizer_config.json, or give --append_eos false"
            )
        needed = chosen.columns(columns)
        self.structs = find_structs(features, needed)
        self.encoded_columns = ["input_ids", "length", "targets", "bytes", "cut"]
        if chosen.name != "text" and (chosen.name != "ids" or "labels" in columns):
            self.encoded_columns.insert(1, "labels")
        return needed, self.encoded_columns

    def require_one_sequence(self) -> None:
        """Make one sequence of each row, for a task that compares answers. Raise UsageError if the run file wants several."""
        if self.chat_format.train_turns == "each":
            raise UsageError(
                "train_turns: each makes several sequences of a row, but this task has one: give last or all"
            )
        self.chat_format = replace(self.chat_format, one_sequence=True)

    def nested_columns(self) -> list[str]:
        """Return the columns of turns and tools that the run file names: their rows may have other keys."""
        return [self.named[part] for part in ("messages", "tools") if part in self.named]

    def optional_columns(self) -> list[str]:
        """Return the columns that rows of the chosen format may have."""
        return [*self.format.optional.values()]

    def describe(self) -> str:
        """Return a sentence on how rows are read, for the plan."""
        return describe_format(self.format, self._has_template)

    @property
    def _has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode_batch(self, batch: dict[str, list], locations) -> dict[str, list]:
        """Return the encoded columns of a batch of raw rows. An error names the location of the row."""
        for name in RATINGS:
            if name in self.format.optional:
                _refuse_bad_answers(name, batch.get(name) or (), locations)
        for name in {*MEDIA_KEYS} & {*self.format.optional} & {*batch}:
            if held := [location for value, location in zip(batch[name], locations, strict=True) if value]:
                raise UsageError(f"{held[0]}: `{name}` holds a file: this task reads text only: remove the row")
        columns: dict[str, list] = {name: [] for name in self.encoded_columns}
        for documents, location in zip(self.encode(batch, locations), locations, strict=True):
            for document in documents:
                self._warn_of_split(document, location)
                for row in self._rows(document):
                    for name, values in columns.items():
                        values.append(row[name])
        return columns

    def _warn_of_split(self, document: Document, location) -> None:
        """Warn of the first row with a prompt that packing splits: its later parts lack what they follow."""
        if self.packing and len(document.ids) > self.max_length and IGNORED in document.labels:
            warn_once(
                f"{location}: it has {len(document.ids):,} tokens, and max_length is {self.max_length:,}: packing splits "
                "such rows, so their later parts are trained on without the prompt (more such rows are not named)",
                kind="packing splits rows with a prompt",
            )

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

    # ---- one generator for each format: the documents of each row ----------------------------------------------------

    def _encode_texts(self, batch: dict[str, list], locations) -> Iterator[list[Document]]:
        texts = batch[self.text_column]
        require_text(texts, self.text_column, locations)
        warn_of_special_tokens(self.tokenizer, texts, self.text_column, locations)
        for ids, sizes in tokenize_with_bytes(self.tokenizer, texts):
            ids, sizes = self._with_eos(ids, sizes)
            yield [Document(ids, ids, sizes)]

    def _encode_pairs(self, batch: dict[str, list], locations) -> Iterator[list[Document]]:
        prompts, completions = self._texts(batch, ("prompt", "completion"), locations)
        yield from self._encode_completions(prompts, completions)

    def _texts(self, batch: dict[str, list], parts: tuple[str, ...], locations) -> list[list[str]]:
        """Return the columns of required parts, which hold texts."""
        columns = [self.format.required[part] for part in parts]
        for column in columns:
            require_text(batch[column], column, locations)
            if not self.reads_chats:  # encode_chat warns of them
                warn_of_special_tokens(self.tokenizer, batch[column], column, locations)
        return [batch[column] for column in columns]

    def _encode_completions(self, prompts: list[str], completions: list[str]) -> Iterator[list[Document]]:
        # The prompt is tokenized alone, as at generation, and the completion as it follows it.
        heads = tokenize_with_bytes(self.tokenizer, prompts)
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        both = tokenize_with_bytes(self.tokenizer, texts)
        adds_eos = self.tokenizer("a")["input_ids"][-1:] == [self.tokenizer.eos_token_id]
        end = -1 if adds_eos else None  # without its eos; one that the prompt itself ends with stays
        for (head, _), (ids, sizes), completion in zip(heads, both, completions, strict=True):
            head = head[:end]
            if ids[:end][: len(head)] == head:
                tail = ids[len(head) : end]
                sizes = sizes[len(head) : end]
            else:  # one token would hold parts of both
                tail, sizes = tokenize_continuation(self.tokenizer, completion, self._leads)
            tail, sizes = self._with_eos(tail, sizes)
            sizes = np.concatenate([np.zeros(len(head), np.int64), sizes])
            yield [Document(head + tail, [IGNORED] * len(head) + tail, sizes)]

    @cached_property
    def _leads(self) -> list[str]:
        return find_leads(self.tokenizer)

    def _with_eos(self, ids: list[int], sizes: np.ndarray) -> tuple[list[int], np.ndarray]:
        eos = self.tokenizer.eos_token_id
        if not self.append_eos or eos is None or ids[-1:] == [eos]:
            return ids, sizes
        return [*ids, eos], np.append(sizes, 0)

    def _encode_chats(self, batch: dict[str, list], locations) -> Iterator[list[Document]]:
        with may_be_removed(CHATS):
            from engine.text.encode_chat import encode_chat
        columns = " and ".join(f"`{column}`" for column in self.format.required.values())
        for location, row in zip(locations, self.read_chats(batch, locations), strict=True):
            chat = (row.turns, location, row.tools, self.structs, self.chat_format, row.variables, columns)
            try:
                yield [Document(*sequence) for sequence in encode_chat(self.tokenizer, *chat)]
            except UsageError as error:
                if not row.note:
                    raise
                raise UsageError(f"{error}{row.note}") from error

    def _encode_instructions(self, batch: dict[str, list], locations) -> Iterator[list[Document]]:
        """With a chat template as chats, else as prompts in Alpaca's layout with completions."""
        if self._has_template:
            yield from self._encode_chats(batch, locations)
            return
        prompts = self.lay_out_instructions(batch, locations)
        yield from self._encode_completions(prompts, batch[self.format.required["output"]])

    def _encode_ids(self, batch: dict[str, list], locations) -> Iterator[list[Document]]:
        for i, ids in enumerate(batch["input_ids"]):
            labels = batch["labels"][i] if "labels" in batch else None
            mask = batch["attention_mask"][i] if "attention_mask" in batch else None
            if labels is None:
                labels = ids
            self._check_ids(ids, labels, mask, locations[i])
            yield [Document(ids, labels, np.zeros(len(ids), np.int64))]

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

    # ---- rows as chats, and as prompts -------------------------------------------------------------------------------

    def read_chats(self, batch: dict[str, list], locations) -> Iterator[ChatRow]:
        """Yield each row of the chosen format, one of chats (`reads_chats`), as turns, tools and variables."""
        readers = {
            "messages": self._read_messages,
            "conversations": self._read_messages,
            "pairs of chats": self._read_pairs,
            "instructions": self._read_instructions,
        }
        return readers[self.format.name](batch, locations)

    def _optional(self, batch: dict[str, list], part: str, locations) -> list:
        """Return the column of a part that rows may lack; None for each row if there is none."""
        return batch.get(self.format.optional.get(part, "")) or [None] * len(locations)

    def _read_messages(self, batch: dict[str, list], locations) -> Iterator[ChatRow]:
        column = self.format.required["messages"]
        is_sharegpt = self.format.name == "conversations"
        tools = self._optional(batch, "tools", locations)
        variables = self._optional(batch, VARIABLES, locations)
        systems = self._optional(batch, "system", locations)
        for i, location in enumerate(locations):
            with errors_of(location, f"`{column}`"):
                turns = read_turns(batch[column][i], other_roles=is_sharegpt)
                turns, note = with_system(turns, systems[i], self.format.optional.get("system", ""))
            yield ChatRow(turns, read_tools(tools[i]) if is_sharegpt else tools[i], variables[i], note)

    def _read_pairs(self, batch: dict[str, list], locations) -> Iterator[ChatRow]:
        prompt, completion = (self.format.required[part] for part in ("prompt", "completion"))
        tools = self._optional(batch, "tools", locations)
        variables = self._optional(batch, VARIABLES, locations)
        systems = self._optional(batch, "system", locations)
        for i, location in enumerate(locations):
            with errors_of(location):
                turns = join_prompt(batch[prompt][i], batch[completion][i], (prompt, completion))
                turns, note = with_system(turns, systems[i], self.format.optional.get("system", ""))
            note = note or f" (turns are counted from the first one of `{prompt}`)"
            yield ChatRow(turns, tools[i], variables[i], note)

    def _read_instructions(self, batch: dict[str, list], locations) -> Iterator[ChatRow]:
        instructions, outputs, inputs, systems = self._texts_of_instructions(batch, locations)
        history = self._optional(batch, "history", locations)
        tools = [read_tools(value) for value in self._optional(batch, "tools", locations)]
        variables = self._optional(batch, VARIABLES, locations)
        column = self.format.optional.get("system", "")
        for i, location in enumerate(locations):
            with errors_of(location):
                turns, note = read_instruction(instructions[i], inputs[i], outputs[i], history[i], systems[i], column)
            yield ChatRow(turns, tools[i], variables[i], note)

    def lay_out_instructions(self, batch: dict[str, list], locations) -> list[str]:
        """Return what stands before the output of each row of instructions, for a tokenizer without a chat template."""
        instructions, _, inputs, systems = self._texts_of_instructions(batch, locations)
        history = self._optional(batch, "history", locations)
        tools = [read_tools(value) for value in self._optional(batch, "tools", locations)]
        for i, location in enumerate(locations):
            _refuse_without_template(location, history=history[i], tools=tools[i])
        return [lay_out_instruction(*row) for row in zip(instructions, inputs, systems, strict=True)]

    def _texts_of_instructions(self, batch: dict[str, list], locations) -> tuple[list, list, list, list]:
        """Return the columns of instructions, outputs, inputs and systems, all of them text."""
        instructions, outputs = self._texts(batch, ("instruction", "output"), locations)
        inputs = self._optional(batch, "input", locations)
        systems = self._optional(batch, "system", locations)
        for part, texts in (("input", inputs), ("system", systems)):
            require_text([text or "" for text in texts], self.format.optional.get(part, part), locations)
        return instructions, outputs, inputs, systems


def describe_format(format: Format, has_template: bool) -> str:
    """Return a sentence on how rows of a format are read. `has_template`: the tokenizer has a chat template."""
    columns = [f"`{column}`" for column in format.required.values()]
    if format.name == "ids":
        return "`input_ids` as they are"
    if format.name == "text":
        return f"{columns[0]}: loss on every token"
    if format.name == "pairs":
        return f"{columns[0]} and {columns[1]} as text, without a chat template: loss on {columns[1]}"
    if format.name == "pairs of chats":
        return f"{columns[0]} and {columns[1]} as chats: loss on the assistant's turns of {columns[1]}"
    if format.name != "instructions":
        return f"{columns[0]} as chats: loss on the assistant's turns"
    if "input" in format.optional:
        columns.insert(1, f"`{format.optional['input']}`")
    instruction = f"{', '.join(columns[:-1])} and {columns[-1]}"
    if has_template:
        return f"{instruction} as chats of user and assistant: loss on the assistant's turns"
    return f"{instruction} in Alpaca's layout, as the tokenizer has no chat template: loss on {columns[-1]}"


def _refuse_without_template(location, **parts: Any) -> None:
    """Raise UsageError for a part of an Alpaca row that only a chat template can write."""
    for name, value in parts.items():
        if value:
            raise UsageError(
                f"{location}: `{name}` of an instruction needs a chat template, which the tokenizer has not: give "
                "--chat_template chatml, or another one"
            )


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


def _refuse_bad_answers(name: str, ratings: Iterable[bool | None], locations) -> None:
    """Raise UsageError for the first answer that its row calls bad: a language model would learn to give it."""
    for i, rating in enumerate(ratings):
        if rating is False:
            raise UsageError(
                f"{locations[i]}: `{name}` is false: an answer to avoid, which this task would train on: remove such rows, or "
                "make pairs for task preference"
            )
