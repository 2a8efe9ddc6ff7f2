"""Columns of raw rows: the fields that name them, and the format of rows that they make.

Tests: tests/engine/text/test_row_formats.py.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.config.errors import UsageError, did_you_mean, warn_once
from engine.config.option import option
from engine.text.chat_turns import MEDIA_KEYS

# Columns that other trainers use. A warning names those that the data has and this task ignores.
MEANINGFUL = """
    attention_mask labels loss_mask assistant_mask assistant_masks completion_mask prompt_mask position_ids
    token_type_ids seq_lengths cu_seqlens tools label kto_tag system history documents functions chat_template_kwargs
    image images audio video videos weight weights sample_weight loss_weight chosen rejected margin
"""
VARIABLES = "chat_template_kwargs"  # column of the variables of the chat template
OF_CHATS = ("tools", VARIABLES, *MEDIA_KEYS)  # columns that may stand beside chats; those of files have to be empty
RATINGS = ("label", "kto_tag")  # columns of bools: whether an answer is good
OPTIONAL_COLUMNS = ("labels", "attention_mask")  # beside `input_ids`


@dataclass
class RowColumns:
    """Options of a task whose rows are chats, or prompts with completions, in columns of any name."""

    messages_column: str | None = option(
        "column that holds the turns of a chat (default: messages, else conversations)", from_checkpoint=True
    )
    tools_column: str | None = option(
        "column of the functions that the assistant may call (default: tools)", is_rare=True, from_checkpoint=True
    )
    system_column: str | None = option(
        "column of the system text of a chat (default: system, but not beside messages)",
        is_rare=True,
        from_checkpoint=True,
    )
    prompt_column: str | None = option(
        "column of the prompt, text or turns (default: prompt)", is_rare=True, from_checkpoint=True
    )
    completion_column: str | None = option(
        "column of the completion, text or turns (default: completion)", is_rare=True, from_checkpoint=True
    )
    instruction_column: str | None = option(
        "column of Alpaca's instruction, a user's turn (default: instruction)", is_rare=True, from_checkpoint=True
    )
    input_column: str | None = option(
        "column of what follows the instruction (default: input)", is_rare=True, from_checkpoint=True
    )
    output_column: str | None = option(
        "column of Alpaca's output, the assistant's turn (default: output)", is_rare=True, from_checkpoint=True
    )


PARTS = tuple(name.removesuffix("_column") for name in RowColumns.__dataclass_fields__)


def named_columns(options: Any) -> dict[str, str]:
    """Return {part of a row: its column} for the columns that the options of a task name."""
    columns = {part: getattr(options, f"{part}_column", None) for part in PARTS}
    return {part: column for part, column in columns.items() if column}


def types_at_first(examples: Any, columns: Iterable[str] = ("prompt", "completion")) -> dict[str, type]:
    """Return the type of the first value of these columns, and of ratings, that is there among the first rows.

    The texts true and false, as of a CSV file, are bools."""
    values = {name: examples.first(name) for name in (*columns, *RATINGS) if name in examples.column_names}
    return {
        name: bool if str(value).lower() in ("true", "false") else type(value)
        for name, value in values.items()
        if value is not None
    }


def holds_turns(kind: type | None) -> bool:
    """Return whether a column holds turns by the type of its first value."""
    return kind in (list, dict)


class Format(NamedTuple):
    """A format of rows: the column of each part that a row needs, and of those that it may have."""

    name: str
    required: dict[str, str]  # part -> column
    optional: dict[str, str]

    def columns(self, there: list[str]) -> list[str]:
        """Return the names of its columns that are there."""
        return [name for name in (*self.required.values(), *self.optional.values()) if name in there]

    def holds_chats(self, has_template: bool) -> bool:
        """Return whether its rows are chats; instructions are if the tokenizer `has_template`."""
        is_chat = self.name in ("messages", "conversations", "pairs of chats")
        return is_chat or (self.name == "instructions" and has_template)

    def lacking(self, there: list[str]) -> list[str]:
        """Return the required parts whose columns are not there."""
        return [part for part, column in self.required.items() if column not in there]

    def without_doubles(self) -> "Format":
        """Return the format without optional parts whose column is that of a required one."""
        taken = self.required.values()
        return self._replace(optional={part: column for part, column in self.optional.items() if column not in taken})

    def flags(self) -> list[str]:
        """Return the flag that asks for this format, if there is one."""
        part, column = next(iter(self.required.items()))
        return [f"--{part}_column {column}"] if part in PARTS else []

    def is_asked_for(self, named: dict[str, str]) -> bool:
        """Return whether the run file names a column that only this format has."""
        parts = self.required | {part: column for part, column in self.optional.items() if part == "input"}
        return any(named.get(part) == column for part, column in parts.items())


def formats_of_rows(text_column: str, named: dict[str, str], features: Any) -> list[Format]:
    """Return the formats of rows, the first one first that a row with the columns of several has.

    `features`: the types of the columns, if they are known."""
    types = features or {}
    ratings = [name for name in RATINGS if types.get(name) is bool]

    def names(*parts: str) -> dict[str, str]:
        return {part: named.get(part, part) for part in parts}

    rating = {name: name for name in ratings}
    label = {name: name for name in ratings if name == "label"}
    media = {name: name for name in MEDIA_KEYS}
    variables = {VARIABLES: VARIABLES} | media
    of_chats = rating | names("tools", "system") | variables
    # Beside `messages`, a system text is read only if the run file names its column: it was never read there.
    system = names("system") if "system" in named else {}
    chat_column = named.get("messages", "conversations")
    pair = names("prompt", "completion")
    is_chat = any(holds_turns(types.get(column)) for column in pair.values())
    formats = [
        Format("ids", {"input_ids": "input_ids"}, {name: name for name in OPTIONAL_COLUMNS}),
        Format("messages", {"messages": "messages"}, names("tools") | variables | system | label),
        Format("pairs of chats", pair, names("tools") | variables | system | label)
        if is_chat
        else Format("pairs", pair, label | media),
        Format("text", {"text": text_column}, {}),
        Format("conversations", {"messages": chat_column}, of_chats),
        Format("instructions", names("instruction", "output"), names("input") | {"history": "history"} | of_chats),
    ]
    return [each.without_doubles() for each in formats]


def choose_format(
    formats: list[Format], named: dict[str, str], columns: list[str], split: str, is_mixed: bool
) -> Format:
    """Return the first format whose columns are there; one with a column that the run file names goes before others.

    Raise UsageError if the data lacks a column that the run file names, or one that it needs. In a mixture, where sources
    may have other formats (`is_mixed`), warn of the former. Warn of columns with a meaning elsewhere that are not used."""
    for problem in _missing_columns(formats, named, columns):
        if not is_mixed:
            raise UsageError(f"{split} data: {problem}")
        warn_once(f"{split} data: {problem}; its rows are read by their other columns")
    fitting = [each for each in formats if not each.lacking(columns)]
    if not fitting:
        text_column = next(each.required["text"] for each in formats if each.name == "text")
        raise UsageError(
            f"{split} data: no usable column among {', '.join(columns)}: a row needs `{text_column}` (see --text_column), "
            "`messages` or `conversations` (--messages_column), `prompt` and `completion` (--prompt_column, "
            "--completion_column), `instruction` and `output` (--instruction_column, --output_column), or `input_ids`"
        )
    chosen = min(fitting, key=lambda each: not each.is_asked_for(named))
    meaningful = {*named.values()}
    for other in fitting:
        meaningful |= {*other.columns(columns)}
    others = [flag for each in fitting if each is not chosen for flag in each.flags()]
    hint = f" (to read others, give {' or '.join(others)})" if others else ""
    warn_of_ignored(columns, chosen.columns(columns), split, meaningful, hint)
    return chosen


def warn_of_ignored(
    columns: list[str], used: list[str], split: str, meaningful: Iterable[str] = (), hint: str = ""
) -> None:
    """Warn of columns that are not used but have a meaning elsewhere: those of MEANINGFUL, and `meaningful` ones."""
    meaningful = {*MEANINGFUL.split(), *meaningful}
    ignored = [name for name in columns if name in meaningful and name not in used]
    if ignored:
        warn_once(f"{split} data: the columns {', '.join(ignored)} are not used: only {', '.join(used)}{hint}")


def _missing_columns(formats: list[Format], named: dict[str, str], columns: list[str]) -> Iterator[str]:
    """Yield a sentence for each column that the run file names, or needs beside these, and that the data lacks."""
    there = f"among the columns {', '.join(columns)}"
    for part, column in named.items():
        if column not in columns:
            hint = did_you_mean(column, columns)
            yield f"`{column}`, which {part}_column names, is not {there}{hint}"
    for each in formats:
        if each.is_asked_for(named):
            for part in each.lacking(columns):
                if part not in named:
                    yield f"`{each.required[part]}` is not {there}: give --{part}_column"
