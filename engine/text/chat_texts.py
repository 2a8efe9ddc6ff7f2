"""Whether a chat template writes every text of a chat, and where: rendered once more with a mark around each text.

A template that removes, changes or garbles a text is refused: a row is what its file says. Tests: tests/engine/text/test_chat.py.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from engine.config.errors import warn_once
from engine.text.chat_turns import CALLS, REASONING, Chat, functions_of

Render = Callable[..., str]  # turns, options -> text

# A mark is a number between two noncharacters, which Unicode keeps out of texts (those of private use are in fonts of
# icons); JSON writes them as they are.
MARKED_TEXT = re.compile("\ufdd0(\\d+)\ufdd1(.*?)\ufdd2", re.DOTALL)
THINK_TAG = re.compile("(</?think>)")
OTHER_TEMPLATE = "remove it from the rows, or give --chat_template FILE with a template that writes it"


class Text(NamedTuple):
    """A text of a turn, without the spaces around it. `is_content`: it is what the turn says."""

    turn: int
    name: str
    text: str
    is_reasoning: bool
    is_content: bool


def find_texts(render: Render, chat: Chat, rendered: str) -> list[Text]:
    """Return the texts of a chat. Raise ValueError if one is not written.

    They are searched for if the template writes something else when texts are marked, for example because it compares
    names."""
    _check_tags(chat, rendered)
    texts, marked = _render_marked(render, chat)
    if _without_marks(marked) != rendered:
        _check_by_search(chat, texts, rendered)
        return texts
    written = set()
    for match in MARKED_TEXT.finditer(marked):
        if match[2] in ways_to_write(texts[int(match[1])].text):
            written.add(int(match[1]))
    _check_written(chat, texts, written)
    return texts


def _check_tags(chat: Chat, rendered: str) -> None:
    """Raise ValueError if <think> or </think> within the words of a turn, which mention it, is removed or moved.

    At the beginning of a turn they enclose reasoning, which a template may write with other spaces around it."""
    for i, turn in enumerate(chat.turns):
        content = turn["content"]
        if turn["role"] != "assistant" or not isinstance(content, str) or not THINK_TAG.search(content):
            continue
        before, end, after = content.partition("</think>")
        is_opened = before.lstrip().startswith("<think>")
        has_block = end and (is_opened or "<think>" not in before)
        words = (after if has_block else content).strip()
        if chat.is_trained[i] and THINK_TAG.search(words) and not _is_written(words, rendered):
            raise ValueError(
                f"the chat template takes <think> or </think> within the words of turn {i} for reasoning, and does not write "
                f"{words[:60]!r}: write reasoning as `reasoning_content`, or the words without these tags"
            )
        reasoning = before.strip().removeprefix("<think>").strip() if has_block else ""
        mention, _, end_of_reasoning = reasoning.rpartition("<think>")
        written_end = rf"<think>\s*{re.escape(end_of_reasoning.strip())}\s*</think>"
        if mention and chat.is_trained[i] and re.search(written_end, rendered) and not _is_written(reasoning, rendered):
            raise ValueError(
                f"the chat template writes of the reasoning of turn {i} only what follows its last <think>: write it without "
                "this tag"
            )
        if has_block and not is_opened and re.search(rf"<think>\s*{re.escape(before.strip())}", rendered):
            warn_once(
                "messages: a turn of the assistant has </think> without <think>: what stands before it is written as "
                "reasoning, as the chat template reads it"
            )


def _is_written(words: str, rendered: str) -> bool:
    return any(way in rendered for way in ways_to_write(words))


def _check_written(chat: Chat, texts: list[Text], written: set[int]) -> None:
    """Raise ValueError for the first text that is not written; reasoning may be written under another of its names."""
    reasoning_written = {(texts[k].turn, texts[k].text) for k in written if texts[k].is_reasoning}
    for k, text in enumerate(texts):
        has_another_name = text.is_reasoning and (text.turn, text.text) in reasoning_written
        if text.text and k not in written and not has_another_name:
            _refuse(chat, text)


def _without_marks(marked: str) -> str:
    return MARKED_TEXT.sub(r"\2", marked)


def _render_marked(render: Render, chat: Chat) -> tuple[list[Text], str]:
    """Return the texts of a chat, and the chat with a mark around each; an empty text if the template refuses marks."""
    texts: list[Text] = []
    turns = [_mark_turn(i, turn, texts) for i, turn in enumerate(chat.turns)]
    return texts, _render_or_none(render, turns) or ""


def choose_render(render: Render, chat: Chat) -> Render:
    """Return `render`, or for a template that takes only lists of parts, as those for images, one that gives it these."""

    def render_parts(turns: list[dict], **options: Any) -> str:
        return render([_with_parts(turn) for turn in turns], **options)

    longest = _longest_text(chat)
    if longest in (_render_or_none(render, chat.turns) or ""):
        return render
    if longest in (_render_or_none(render_parts, chat.turns) or ""):
        return render_parts
    return render


def _longest_text(chat: Chat) -> str:
    """Return the longest text of a chat: a short one may stand in a header.

    Not the assistant's, unless there is no other: a template may leave out its reasoning."""
    turns = [turn for turn in chat.turns if isinstance(turn["content"], str) and turn["content"].strip()]
    of_others = [turn for turn in turns if turn["role"] != "assistant"]
    texts: list[str] = [turn["content"].strip() for turn in of_others or turns]
    return max(texts, key=len, default="")


def _with_parts(turn: dict) -> dict:
    """Return a turn with its text as a list of one part."""
    content = turn["content"]
    if not isinstance(content, str):
        return turn
    return turn | {"content": [{"type": "text", "text": content}]}


def check_parts(render: Render, chat: Chat, rendered: str) -> None:
    """Raise ValueError if the template writes no calls, no tools, or values as Python code."""
    for name in CALLS:
        calling_turns = [i for i, turn in enumerate(chat.turns) if turn.get(name)]
        if calling_turns and _render_or_none(render, _without_key(chat.turns, name)) == rendered:
            raise ValueError(
                f"the chat template does not write the {name} of turn {calling_turns[0]}: {OTHER_TEMPLATE}"
            )
    if chat.tools and _render_or_none(render, chat.turns, tools=None) == rendered:
        raise ValueError(f"the chat template does not write the `tools` of the row: {OTHER_TEMPLATE}")
    for i, turn in enumerate(chat.turns):
        if isinstance(turn["content"], list | dict) and repr(turn["content"]) in rendered:
            raise ValueError(f"the chat template writes the content of turn {i} as Python code: give one string")
        for function in functions_of(turn):
            _check_arguments(i, function.get("arguments"), chat, rendered)


def _without_key(turns: list[dict], name: str) -> list[dict]:
    """Return the turns without one of their keys."""
    copies = [dict(turn) for turn in turns]
    for turn in copies:
        turn.pop(name, None)
    return copies


def _check_arguments(i: int, arguments: Any, chat: Chat, rendered: str) -> None:
    """Raise ValueError if the template writes arguments as Python code, or those that are JSON text in quotes."""
    if isinstance(arguments, str):
        quoted = json.dumps(arguments, ensure_ascii=False)
        if quoted in rendered and not any(quoted in str(turn["content"]) for turn in chat.turns):
            raise ValueError(f"the chat template quotes the arguments of turn {i} again: give a mapping, not text")
        return
    as_python = repr(arguments)
    if arguments and as_python != json.dumps(arguments, ensure_ascii=False) and as_python in rendered:
        raise ValueError(
            f"the chat template writes the arguments of turn {i} as Python code: give JSON text, or another template"
        )


def _render_or_none(render: Render, turns: list[dict], **options: Any) -> str | None:
    """Return the text of a chat that lacks a part; None if the template refuses it, so it has read that part."""
    try:
        return render(turns, **options)
    except Exception:
        return None


# ---- the texts of a turn ---------------------------------------------------------------------------------------------


def _mark_turn(i: int, turn: dict, texts: list[Text]) -> dict:
    """Return turn `i` with marks around its texts, and append these to `texts`."""
    marked = dict(turn)
    for name in REASONING:
        if name in turn:
            marked[name] = _mark(turn[name], Text(i, name, "", is_reasoning=True, is_content=False), texts)
    content = Text(i, "content", "", is_reasoning=False, is_content=True)
    if turn["role"] == "assistant" and isinstance(turn["content"], str):
        marked["content"] = _mark_reasoning_and_answer(turn["content"], content, texts)
    else:
        marked["content"] = _mark(turn["content"], content, texts)
    for name in CALLS:
        if name in turn:
            marked[name] = _mark_calls(turn[name], Text(i, name, "", is_reasoning=False, is_content=False), texts)
    return marked


def _mark(value: Any, owner: Text, texts: list[Text]) -> Any:
    """Return `value` with marks around its text, or around each text in nested dicts and lists.

    `owner`: the part of a turn that holds `value`; each text is one like it."""
    if isinstance(value, dict):
        return {key: _mark(item, owner, texts) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark(item, owner, texts) for item in value]
    if isinstance(value, str) and value.strip():
        return _add_mark(value, owner, texts)
    return value


def _add_mark(value: str, owner: Text, texts: list[Text]) -> str:
    """Return a text with marks within the spaces around it."""
    text = value.strip()
    begin = value.index(text)
    texts.append(owner._replace(text=text))
    number = len(texts) - 1
    spaces_after = value[begin + len(text) :]
    return f"{value[:begin]}\ufdd0{number}\ufdd1{text}\ufdd2{spaces_after}"


def _mark_reasoning_and_answer(content: str, owner: Text, texts: list[Text]) -> str:
    """Return an assistant's content with marks around its texts: those between <think> and </think> are reasoning."""
    parts = THINK_TAG.split(content)  # text, tag, text, tag, …, text
    for i in range(0, len(parts), 2):
        is_reasoning = parts[i + 1 : i + 2] == ["</think>"]
        name = "reasoning in the content" if is_reasoning else "content"
        parts[i] = _mark(parts[i], owner._replace(name=name, is_reasoning=is_reasoning), texts)
    return "".join(parts)


def _mark_calls(value: Any, owner: Text, texts: list[Text]) -> Any:
    """Return calls with marks around the names of functions and the texts of their arguments."""
    if isinstance(value, list):
        return [_mark_calls(call, owner, texts) for call in value]
    if not isinstance(value, dict):
        return value
    function = value.get("function", value)
    marked = dict(function)
    for key in ("name", "arguments"):
        if key in function:
            marked[key] = _mark(function[key], owner, texts)
    return value | {"function": marked} if "function" in value else marked


# ---- texts that are not written --------------------------------------------------------------------------------------


def ways_to_write(text: str) -> tuple[str, ...]:
    """Return a text as a template may write it: as it is, or as JSON escapes it."""
    return text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]


def _check_by_search(chat: Chat, texts: list[Text], rendered: str) -> None:
    """Raise ValueError for the first text that does not stand in the rendered chat."""
    end = 0
    for text in texts:
        ways = ways_to_write(text.text)
        # Usually a text follows the one before it, so the whole chat is searched only for one that a template has moved.
        begin = _find_first(rendered, ways, end)
        if begin is not None:
            if text.is_content:
                end = begin + len(text.text)
        elif not any(way in rendered for way in ways):
            _refuse(chat, text)


def _find_first(rendered: str, ways: tuple[str, ...], start: int) -> int | None:
    """Return where the first of these ways to write a text stands after `start`."""
    for way in ways:
        begin = rendered.find(way, start)
        if begin >= 0:
            return begin
    return None


def _refuse(chat: Chat, text: Text) -> None:
    """Raise ValueError for a text that the template does not write, but for reasoning of a turn that is not trained on."""
    is_answer = chat.turns[text.turn]["role"] == "assistant"
    if is_answer and (chat.is_history or (text.is_reasoning and not chat.is_trained[text.turn])):
        return
    problem = f"the chat template does not write the {text.name} of turn {text.turn}"
    if text.is_content:
        raise ValueError(
            f"{problem} as it is: give --chat_template FILE with a template that writes {text.text[:40]!r}"
        )
    raise ValueError(f"{problem}: {OTHER_TEMPLATE}")
