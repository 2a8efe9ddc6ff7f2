"""Chats as a template writes them: once plain, and once with marks that show where each text of the row stands.

A text that a template removes, changes or garbles is refused: a row is what its file says. Tests: tests/engine/rows/test_chat.py.
"""

import functools
import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from engine.config.errors import warn_once
from engine.rows.chat_turns import CALLS, REASONING, Chat, functions_of

Render = Callable[..., str]  # turns, options -> text

GENERATION = re.compile(r"\{%(-?)\s*generation\s*(-?)%\}")  # as transformers finds it
END_GENERATION = re.compile(r"\{%(-?)\s*endgeneration\s*(-?)%\}")
# Marks are noncharacters, which Unicode keeps out of texts (those of private use are in fonts of icons): around text 12
# "\ufdd012\ufdd1" and "\ufdd2", around what a template generates "\ufdd3" and "\ufdd4".
MARK = re.compile("(\ufdd0\\d+\ufdd1|[\ufdd2-\ufdd4])")
ESCAPED_MARK = re.compile(r"\\u(fdd[0-4])")  # as Python code and some JSON have it
THINK_TAG = re.compile("</?think>")
IN_CONTENT = "reasoning in the content"
WORDS = "Zq7x"
QUESTION = [{"role": "user", "content": WORDS}]
OTHER_TEMPLATE = "remove it from the rows, or give --chat_template FILE with a template that writes it"


class Text(NamedTuple):
    """A text of a turn, without the spaces around it. `turn` is -1 for the tools of the row."""

    turn: int
    name: str
    text: str

    @property
    def is_reasoning(self) -> bool:
        return self.name in (*REASONING, IN_CONTENT)

    def ways_to_write(self) -> tuple[str, ...]:
        """Return the text as a template may write it: as it is, or as JSON escapes it."""
        return self.text, json.dumps(self.text, ensure_ascii=False)[1:-1], json.dumps(self.text)[1:-1]


class WrittenChat(NamedTuple):
    """A chat as text, where each of the row's texts stands in it, and what its template marks with {% generation %}."""

    text: str
    places: list[tuple[Text, list[tuple[int, int]]]]
    generated: list[tuple[int, int]]


def marks_turns(template: str) -> bool:
    """Return True if the template marks what the assistant says with {% generation %}."""
    return bool(GENERATION.search(template))


def without_marks(template: str) -> str:
    """Return a chat template that writes the same without {% generation %}, which few programs read."""
    template = GENERATION.sub(r"{%\1 if true \2%}", template)
    return END_GENERATION.sub(r"{%\1 endif \2%}", template)


@functools.lru_cache
def _with_visible_marks(template: str) -> str:
    # A scope of its own, as the block is: a variable that is set in it ends with it.
    template = GENERATION.sub(lambda tag: f"{{%{tag[1]} with %}}\ufdd3{{% set marked = true {tag[2]}%}}", template)
    return END_GENERATION.sub(lambda tag: f"{{%{tag[1]} set marked = false %}}\ufdd4{{% endwith {tag[2]}%}}", template)


def renderer(tokenizer: Any, chat: Chat, template: str | None, variables: dict[str, Any]) -> Render:
    """Return a function that renders turns of a chat with a template; None: the tokenizer's own, which final/ has."""
    apply = functools.partial(
        tokenizer.apply_chat_template, tokenize=False, tools=chat.tools, chat_template=template, **variables
    )
    if not _takes_parts(tokenizer, template or tokenizer.get_chat_template(tools=chat.tools)):
        return apply
    return lambda turns, **options: apply([_with_parts(turn) for turn in turns], **options)


@functools.lru_cache
def _takes_parts(tokenizer: Any, template: str) -> bool:
    """Return whether a template writes texts only as lists of parts, as those for images do."""
    for turns in (QUESTION, [_with_parts(turn) for turn in QUESTION]):
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, chat_template=template)
        except Exception:  # whatever a template raises
            continue
        if WORDS in text:
            return turns is not QUESTION
    return False


def _with_parts(turn: dict) -> dict:
    """Return a turn with its text as a list of one part."""
    content = turn["content"]
    if not isinstance(content, str):
        return turn
    return turn | {"content": [{"type": "text", "text": content}]}


def write_chat(render: Render, chat: Chat, template: str, text: str | None = None, **options: Any) -> WrittenChat:
    """Return a chat as a template writes it, which is `text` if that is known.

    Marks prove where texts stand if the template writes the same with them. One that compares texts, such as names, may
    not: then they are searched for. Raise ValueError if it writes Python code, or does not show what it generates."""
    if text is None:
        text = render(chat.turns, **options)
    _check_no_python(chat, text)
    texts: list[Text] = []
    turns = [_mark_turn(i, turn, texts) for i, turn in enumerate(chat.turns)]
    tools = [_mark_function(tool, Text(-1, "tools", ""), texts) for tool in chat.tools or ()] or None
    options["chat_template"] = _with_visible_marks(template)
    try:
        marks = _read_marks(render(turns, tools=tools, **options), text)
    except Exception:  # whatever a template raises about a text that it compares
        marks = None
    if marks is not None:
        return WrittenChat(text, _marked_places(texts, text, marks), _generated(marks))
    places = [
        (each, [place.span() for way in each.ways_to_write() for place in re.finditer(re.escape(way), text)])
        for each in texts
    ]
    if not marks_turns(template):
        return WrittenChat(text, places, [])
    marks = _read_marks(render(chat.turns, **options), text)
    if marks is None:
        raise ValueError(
            "the text between {% generation %} and {% endgeneration %} cannot be found: use them once a turn"
        )
    return WrittenChat(text, places, _generated(marks))


def _read_marks(marked: str, text: str) -> list[tuple[str, int]] | None:
    """Return each mark and its place in the text without marks; None if that is not `text`, or parts overlap."""
    parts = MARK.split(ESCAPED_MARK.sub(lambda escaped: chr(int(escaped[1], 16)), marked))
    if "".join(parts[::2]) != text:
        return None
    place = 0
    marks = []
    for between, mark in zip(parts[::2], parts[1::2], strict=False):
        place += len(between)
        marks.append((mark, place))
    around = "".join(mark for mark, _ in marks if mark in "\ufdd3\ufdd4")
    return marks if around == "\ufdd3\ufdd4" * (len(around) // 2) else None


def _generated(marks: list[tuple[str, int]]) -> list[tuple[int, int]]:
    borders = [place for mark, place in marks if mark in "\ufdd3\ufdd4"]
    return list(zip(borders[::2], borders[1::2], strict=True))


def _marked_places(
    texts: list[Text], text: str, marks: list[tuple[str, int]]
) -> list[tuple[Text, list[tuple[int, int]]]]:
    """Return where each text stands as it is, or as JSON escapes it."""
    places: list[tuple[Text, list[tuple[int, int]]]] = [(each, []) for each in texts]
    for (mark, begin), (after, end) in pairwise(marks):
        if mark[0] == "\ufdd0" and after == "\ufdd2":
            marked, found = places[int(mark[1:-1])]
            if text[begin:end] in marked.ways_to_write():
                found.append((begin, end))
    return places


# ---- the proof -------------------------------------------------------------------------------------------------------


def check_written(chat: Chat, written: WrittenChat) -> None:
    """Raise ValueError for the first text that is not written. Reasoning may be written under another of its names."""
    reasoning = {(text.turn, text.text) for text, places in written.places if places and text.is_reasoning}
    for text, places in written.places:
        if not places:
            if not (text.is_reasoning and (text.turn, text.text) in reasoning):
                _refuse(chat, text)
            continue
        if text.name == IN_CONTENT:
            _warn_of_opened(chat.turns[text.turn]["content"], written.text[: places[0][0]])


def check_inside(written: WrittenChat, spans: dict[int, tuple[int, int]]) -> None:
    """Raise ValueError for the first text of a turn that stands elsewhere than in its span.

    A template that marks its turns may leave reasoning out."""
    for text, places in written.places:
        if not places or text.turn not in spans or (text.is_reasoning and written.generated):
            continue
        begin, end = spans[text.turn]
        if not any(begin <= first and last <= end for first, last in places):
            raise ValueError(
                f"the chat template writes the {text.name} of turn {text.turn} elsewhere than in its turn, so it would not "
                f"be trained on: {OTHER_TEMPLATE}"
            )


def _refuse(chat: Chat, text: Text) -> None:
    """Raise ValueError for a text that is not written, but for what templates leave out of answers before the last one."""
    if text.turn < 0:
        raise ValueError(f"the chat template does not write the `tools` of the row: {OTHER_TEMPLATE}")
    is_history = chat.is_history or (
        not chat.is_trained[text.turn] and (text.is_reasoning or THINK_TAG.search(text.text))
    )
    if is_history and chat.turns[text.turn]["role"] == "assistant":
        return
    problem = f"the chat template does not write the {text.name} of turn {text.turn}"
    if text.name == "content":
        raise ValueError(
            f"{problem} as it is: give --chat_template FILE with a template that writes {text.text[:40]!r}"
        )
    raise ValueError(f"{problem}: {OTHER_TEMPLATE}")


def _warn_of_opened(content: str, before: str) -> None:
    if not split_reasoning(content)[0] and before.rstrip().endswith("<think>"):
        warn_once(
            "messages: a turn of the assistant has </think> without <think>: what stands before it is written as "
            "reasoning, as the chat template reads it"
        )


def _check_no_python(chat: Chat, text: str) -> None:
    """Raise ValueError if a template writes the content of a turn, or arguments of a call, as Python code."""
    for i, turn in enumerate(chat.turns):
        values = [("content", turn["content"])]
        values += [("arguments", function.get("arguments")) for function in functions_of(turn)]
        for name, value in values:
            if not value or not isinstance(value, list | dict):
                continue
            if repr(value) in text and repr(value) != json.dumps(value, ensure_ascii=False, default=str):
                raise ValueError(
                    f"the chat template writes the {name} of turn {i} as Python code: give JSON text, or another template"
                )


# ---- marks around texts ----------------------------------------------------------------------------------------------


def split_reasoning(content: str) -> tuple[str, str, str, str]:
    """Return the reasoning that an assistant's content begins with, and its words: (<think>, reasoning, </think>, words)."""
    block, end, words = content.partition("</think>")
    before, tag, reasoning = block.partition("<think>")
    if end and tag and not before.strip():
        return before + tag, reasoning, end, words
    if end and not tag:
        return "", block, end, words
    return "", "", "", content


def _mark_turn(i: int, turn: dict, texts: list[Text]) -> dict:
    """Return turn `i` with marks around its texts, and append these to `texts`."""
    marked = dict(turn)
    for name in REASONING:
        if name in turn:
            marked[name] = _mark(turn[name], Text(i, name, ""), texts)
    content = Text(i, "content", "")
    if turn["role"] == "assistant" and isinstance(turn["content"], str):
        tag, reasoning, end, words = split_reasoning(turn["content"])
        reasoning = _mark(reasoning, content._replace(name=IN_CONTENT), texts)
        marked["content"] = tag + reasoning + end + _mark(words, content, texts)
    else:
        marked["content"] = _mark(turn["content"], content, texts)
    for name in CALLS:
        if turn.get(name):
            calls = turn[name] if isinstance(turn[name], list) else [turn[name]]
            calls = [_mark_function(call, Text(i, name, ""), texts) for call in calls]
            marked[name] = calls if isinstance(turn[name], list) else calls[0]
    return marked


def _mark_function(value: Any, owner: Text, texts: list[Text]) -> Any:
    """Return a tool or a call with marks around the name of the function and the texts of the arguments."""
    if not isinstance(value, dict):
        return _mark(value, owner, texts)
    if isinstance(value.get("function"), dict):
        return value | {"function": _mark_function(value["function"], owner, texts)}
    marked = dict(value)
    for key in ("name", "arguments"):
        if key in value:
            marked[key] = _mark(value[key], owner, texts)
    return marked


def _mark(value: Any, owner: Text, texts: list[Text]) -> Any:
    """Return `value` with marks around its text, within its spaces, or around each text in nested dicts and lists."""
    if isinstance(value, dict):
        return {key: _mark(item, owner, texts) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark(item, owner, texts) for item in value]
    if not isinstance(value, str) or not value.strip():
        return value
    text = value.strip()
    before, _, after = value.partition(text)
    texts.append(owner._replace(text=text))
    return f"{before}\ufdd0{len(texts) - 1}\ufdd1{text}\ufdd2{after}"
