"""Formats of rows: the parts that a row has, and a function that makes a chat, texts or ids of them.

A copy gives a format of its own to the Encoder that src/tasks/causal_lm.py makes: Encoder(…, formats=(MINE, *FORMATS)).
Tests: tests/engine/rows/test_formats.py.
"""

from collections.abc import Callable, Collection, Iterator
from decimal import Decimal
from typing import Any, NamedTuple

from engine.config.errors import UsageError, errors_of, warn_once
from engine.rows.chat_turns import MEDIA_KEYS, from_json
from engine.rows.columns import warn_of_ignored
from engine.rows.foreign_turns import read_turns, split_prompt, wrap_tools

VARIABLES = "chat_template_kwargs"  # the variables of the chat template
OF_CHATS = ("tools", VARIABLES, *MEDIA_KEYS)  # parts that may stand beside chats; those of files have to be empty
RATINGS = ("label", "kto_tag")  # whether an answer is good

# The layout of Stanford Alpaca, for tokenizers without a chat template. A system text replaces the first paragraph.
TASK = "Below is an instruction that describes a task"
REQUEST = "Write a response that appropriately completes the request."


class Texts(NamedTuple):
    """A row of text: what is trained on, after a prompt if there is one."""

    text: str
    prompt: str | None = None


class ChatRow(NamedTuple):
    """A row of any format of chats, as a template takes it."""

    turns: Any
    tools: Any
    variables: Any  # of the template, as the row gives them
    note: str = ""  # added to an error: how its turns are counted


class Ids(NamedTuple):
    """A row of token ids."""

    ids: list
    labels: list


class Format(NamedTuple):
    """A format of rows. `read` makes of a row, {part: value}, what the Encoder takes; it raises ValueError if it cannot."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[dict[str, Any]], Texts | ChatRow | Ids]
    plan: str  # how rows are read
    is_chat: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        return self.required + self.optional


# ---- from a row to a chat, texts or ids ------------------------------------------------------------------------------


def read_ids(row: dict) -> Ids:
    """Return a row of `input_ids`; without `labels` all of them are targets. Raise ValueError for padding."""
    ids, labels, mask = (from_json(row.get(name), f"`{name}`") for name in ("input_ids", "labels", "attention_mask"))
    labels = ids if labels is None else labels
    for name, values in (("input_ids", ids), ("labels", labels)):
        if values is None or (isinstance(values, list) and None in values):
            raise ValueError("`input_ids` or `labels` is or holds null")
        types = {*map(type, values)} if isinstance(values, list) else {type(values)}
        if not isinstance(values, list) or not types <= {int, float, Decimal}:  # stored as fractions or decimals
            first_type = min(each.__name__ for each in types)
            raise ValueError(f"`{name}` holds {first_type}: give a list of integers for each row")
        if not types <= {int} and any(value % 1 for value in values):
            raise ValueError(f"`{name}` holds a number that is not whole")
    if len(labels) != len(ids):
        raise ValueError(f"`labels` has {len(labels)} values for {len(ids)} input_ids")
    if mask is not None and mask != [1] * len(ids):
        raise ValueError("`attention_mask` is not 1 for each of the input_ids: remove the padding")
    return Ids(ids, labels)


def read_text(row: dict) -> Texts:
    """Return a row of `text`."""
    return Texts(_text(row, "text"))


def read_pair(row: dict) -> Texts:
    """Return a prompt and its completion, both text."""
    return Texts(_text(row, "completion"), _text(row, "prompt"))


def read_messages(row: dict) -> ChatRow:
    """Return a row of `messages`, whose roles have the names that templates know."""
    with errors_of("`messages`"):
        return _chat(read_turns(row["messages"], "it"), row, row.get("tools"))


def read_conversations(row: dict) -> ChatRow:
    """Return a row of `conversations`, whose roles may have ShareGPT's names."""
    with errors_of("`conversations`"):
        turns = read_turns(row["conversations"], "it", other_roles=True)
        return _chat(turns, row, wrap_tools(row.get("tools")))


def read_chat_pair(row: dict) -> ChatRow:
    """Return a prompt and its completion, text or turns, as a chat."""
    before, answer = split_prompt(row["prompt"], row["completion"], ("prompt", "completion"))
    chat = _chat([*before, *answer], row, row.get("tools"))
    return chat._replace(note=chat.note or " (turns are counted from the first one of `prompt`)")


def read_instruction(row: dict) -> ChatRow:
    """Return a row of Alpaca as a chat. The answers of `history` are turns as others."""
    turns = []
    for question, answer in _history(row):
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    request = [text for text in (_text(row, "instruction"), _text(row, "input", is_optional=True)) if text.strip()]
    turns.append({"role": "user", "content": "\n\n".join(request)})
    turns.append({"role": "assistant", "content": _text(row, "output")})
    return _chat(turns, row, wrap_tools(row.get("tools")))


def lay_out_instruction(row: dict) -> Texts:
    """Return a row of Alpaca as Stanford's training wrote it, for tokenizers without a chat template."""
    for part in ("history", "tools"):
        if from_json(row.get(part), f"`{part}`"):
            raise ValueError(
                f"`{part}` of an instruction needs a chat template, which the tokenizer has not: give --chat_template "
                "chatml, or another one"
            )
    request = f"### Instruction:\n{_text(row, 'instruction')}"
    task = f"{TASK}. {REQUEST}"
    more = _text(row, "input", is_optional=True)
    if more.strip():
        task = f"{TASK}, paired with an input that provides further context. {REQUEST}"
        request = f"{request}\n\n### Input:\n{more}"
    task = _text(row, "system", is_optional=True).strip() or task
    return Texts(_text(row, "output"), f"{task}\n\n{request}\n\n### Response:\n")


def _text(row: dict, part: str, is_optional: bool = False) -> str:
    """Return a part that is text; an optional one may be missing."""
    value = row.get(part)
    if is_optional and not value:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"`{part}` holds {'nothing' if value is None else type(value).__name__}, not text")
    return value


def as_bool(value: Any) -> Any:
    """Return what may be a bool as one, also where it is text, as in CSV; any other value as it is."""
    return {"true": True, "false": False}.get(value.strip().lower(), value) if isinstance(value, str) else value


def _history(row: dict) -> Iterator[tuple[str, str]]:
    """Yield the questions and answers before an instruction. Raise ValueError if they are no list of such pairs."""
    history = from_json(row.get("history"), "`history`") or []
    if not isinstance(history, list):
        raise ValueError("`history` is no list of questions with their answers")
    for i, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ValueError(f"`history` has no question with its answer, two texts, at place {i}")
        yield pair[0], pair[1]


def _chat(turns: Any, row: dict, tools: Any) -> ChatRow:
    """Return turns with what stands beside them in a row."""
    turns, note = with_system(turns, row.get("system"))
    return ChatRow(turns, tools, row.get(VARIABLES), note)


def with_system(turns: Any, system: Any) -> tuple[Any, str]:
    """Return (turns with the text of `system` before them, a note on how they are counted then)."""
    if system is None or (isinstance(system, str) and not system.strip()) or not isinstance(turns, list):
        return turns, ""
    if not isinstance(system, str):
        raise ValueError(f"`system` holds {type(system).__name__}, not text")
    first = turns[0] if turns else {}
    if isinstance(first, dict) and first.get("role") == "system":
        if first.get("content") != system:
            raise ValueError("`system` and turn 0 are both system texts, and differ: remove one of them")
        return turns, ""
    return [{"role": "system", "content": system}, *turns], " (turn 0 is `system`)"


# ---- the formats, the first one first that a row with the parts of several has ---------------------------------------

ANSWERS = "loss on the assistant's turns"
PAIR = ("prompt", "completion")
ALPACA = (("instruction", "output"), ("input", "history", *RATINGS, "tools", "system", VARIABLES, *MEDIA_KEYS))
ALPACA_PARTS = "`instruction`, `input` and `output`"

IDS = Format(("input_ids",), ("labels", "attention_mask"), read_ids, "`input_ids` as they are")
MESSAGES = Format(("messages",), (*OF_CHATS, "label"), read_messages, f"`messages` as chats: {ANSWERS}", True)
TEXT_PAIRS = Format(
    PAIR,
    ("label", *MEDIA_KEYS),
    read_pair,
    "`prompt` and `completion` as text, without a chat template: loss on `completion`",
)
CHAT_PAIRS = Format(
    PAIR,
    (*OF_CHATS, "label"),
    read_chat_pair,
    f"`prompt` and `completion` as chats: {ANSWERS} of `completion`",
    True,
)
TEXT = Format(("text",), (), read_text, "`text`: loss on every token")
CONVERSATIONS = Format(
    ("conversations",),
    (*RATINGS, "system", *OF_CHATS),
    read_conversations,
    f"`conversations` as chats: {ANSWERS}",
    True,
)
INSTRUCTIONS = Format(
    *ALPACA, read_instruction, f"{ALPACA_PARTS} as chats of user and assistant: {ANSWERS}", is_chat=True
)
LAID_OUT = Format(
    *ALPACA,
    lay_out_instruction,
    f"{ALPACA_PARTS} in Alpaca's layout, as the tokenizer has no chat template: loss on `output`",
)
FORMATS = (IDS, MESSAGES, TEXT_PAIRS, TEXT, CONVERSATIONS, INSTRUCTIONS)
PARTS = tuple(dict.fromkeys(part for each in FORMATS for part in (*each.parts, "system") if part not in MEDIA_KEYS))


def choose_format(
    formats: Collection[Format], named: Collection[str], columns: list[str], split: str, is_mixed: bool, first: Callable
) -> Format:
    """Return the first format whose parts are there; one with a part of its own that the run file names goes before others.

    Raise UsageError if the data lacks a part that it needs beside these; in a mixture, whose sources may have other formats
    (`is_mixed`), warn of it. Warn of columns with a meaning elsewhere that are not used. `first`: the first value of a
    column."""
    asked = [each for each in formats if own_parts(each, formats) & {*named}]
    for part in [part for each in asked for part in each.required if part not in (*columns, *named)]:
        problem = f"{split} data: `{part}` is not among the columns {', '.join(columns)}"
        if not is_mixed:
            raise UsageError(f"{problem}: give --columns '{{{part}: COLUMN}}'")
        warn_once(f"{problem}; its rows are read by their other columns")
    fitting = [each for each in formats if {*each.required} <= {*columns}]
    if not fitting:
        needed = "; or ".join(" and ".join(f"`{part}`" for part in each.required) for each in formats)
        raise UsageError(
            f"{split} data: no usable column among {', '.join(columns)}: a row needs {needed}; if they have other names, "
            "give --columns '{PART: COLUMN, …}'"
        )
    chosen = min(fitting, key=lambda each: each not in asked)
    # Beside `messages`, a system text is read only if the run file names its column: it was never read there.
    if "system" in named and chosen.is_chat and "system" not in chosen.optional:
        chosen = chosen._replace(optional=(*chosen.optional, "system"))
    used = [part for part in chosen.parts if part in columns]
    used = [part for part in used if part not in RATINGS or isinstance(as_bool(first(part)), bool)]
    others = [each.required[0] for each in fitting if each.required != chosen.required]
    hint = f" (to read others, give --columns '{{{others[0]}: {others[0]}}}')" if others else ""
    warn_of_ignored(columns, used, split, {*named, *(part for each in fitting for part in each.parts)}, hint)
    return chosen


def own_parts(one: Format, formats: Collection[Format]) -> set[str]:
    """Return the parts that no other of these formats has."""
    return {*one.parts} - {part for each in formats if each is not one for part in each.parts}
