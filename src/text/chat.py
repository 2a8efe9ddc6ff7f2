"""Chats rendered with the tokenizer's chat template, and the character spans of the assistant's turns.

Tests: tests/text/test_chat.py and tests/tasks/test_causal_lm.py.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.config.errors import UsageError, one_line, warn
from src.config.paths import locate
from src.text.tokenization import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT_NAMES = ("assistant", "gpt", "bot", "chatbot", "model", "ai")  # role names in other formats
TEXTS = ("tool_calls", "reasoning_content", "reasoning", "thinking")  # of a turn, besides its content
MARK = "\u2042content\u2042"  # replaces the assistant's content, to find where a template writes it
WAY_OUT = "remove it from the rows, or give --chat_template FILE with a template that writes it"
_warned: set[str] = set()  # chat templates already warned about


def read_template(file: str) -> str:
    """Return the text of a file with a Jinja chat template."""
    try:
        return Path(locate(file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"chat_template: {file} cannot be read: {error}") from None


Render = Callable[..., str]  # messages, options -> text


def render_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict], location, tools: Any = None
) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat as text, and the (begin, end) characters of each assistant turn without its header.

    `tools`: what the row says about the functions that the assistant may call; None: nothing."""
    turns = []
    with _errors_of_rendering(location):
        render = partial(tokenizer.apply_chat_template, tokenize=False, tools=_check_tools(tokenizer, messages, tools))
        messages = _check_messages(render, messages)
        text = render(messages)
        for i, message in enumerate(messages):
            role = message["role"]
            if role != "assistant" and role.lower() in ASSISTANT_NAMES:
                raise ValueError(f"turn {i} has the role {role!r}: rename it to assistant, or it is not trained on")
            if role == "assistant":
                after = render(messages[: i + 1])
                before = _text_before_words(render, messages[:i], message, after)
                turns.append((before, after))
                if str(message["content"]).strip() not in after[len(before) :]:
                    _warn_of_changed_words(tokenizer, location, i)
    if not all(text.startswith(before) and text.startswith(after) for before, after in turns):
        raise UsageError(
            f"{location}: the chat template changes earlier turns when later ones follow, so the assistant's turns "
            "cannot be found: give --chat_template FILE with a plain template, or one that marks them with "
            "{% generation %}"
        )
    return text, [(len(before), len(after)) for before, after in turns]


def tokenize_marked_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict], location, tools: Any = None
) -> tuple[list[int], list[int]]:
    """Return ids and labels of a chat with a template that marks the assistant's content with {% generation %}."""
    with _errors_of_rendering(location):
        render = partial(tokenizer.apply_chat_template, tools=_check_tools(tokenizer, messages, tools))
        messages = _check_messages(partial(render, tokenize=False), messages)
        chat = render(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ids = list(chat["input_ids"])
    labels = [token if is_target else IGNORED for token, is_target in zip(ids, chat["assistant_masks"], strict=True)]
    return ids, labels


@contextmanager
def _errors_of_rendering(location) -> Iterator[None]:
    """Raise UsageError for any exception within. A chat template is code and may raise anything."""
    try:
        yield
    except Exception as error:
        raise UsageError(f"{location}: `messages` could not be rendered: {one_line(error)}") from error


def _check_tools(tokenizer: "PreTrainedTokenizerBase", messages: list[dict], tools: Any) -> list[dict] | None:
    """Return the tools of a row as a list of dicts. Raise ValueError if the template would drop them."""
    tools = json.loads(tools) if isinstance(tools, str) else tools
    tools = [_without_nulls(json.loads(tool) if isinstance(tool, str) else tool) for tool in tools or ()]
    render = partial(tokenizer.apply_chat_template, messages, tokenize=False)
    if tools and render(tools=tools) == render():
        raise ValueError(f"the chat template does not write the `tools` of the row: {WAY_OUT}")
    return tools or None


def _without_nulls(value: Any) -> Any:
    """Return a value of nested dicts and lists without the keys that are None: Arrow gives all dicts the same keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _check_messages(render: Render, messages: list[dict]) -> list[dict]:
    """Return the messages without None values. Raise ValueError if the template would drop or garble a part of one."""
    # Arrow gives all turns the same keys (None if absent), but templates test whether a key exists.
    messages = [{key: value for key, value in turn.items() if value is not None} for turn in messages]
    for i, turn in enumerate(messages):
        if turn.get("tool_calls"):
            turn.setdefault("content", "")
        elif turn.get("content") is None:
            raise ValueError(f"turn {i} has no content")
        for name in TEXTS:
            if turn.get(name):
                changed = {key: value for key, value in turn.items() if key != name}
                if render(messages) == render([*messages[:i], changed, *messages[i + 1 :]]):
                    raise ValueError(f"the chat template does not write the {name} of turn {i}: {WAY_OUT}")
        if not isinstance(turn.get("role"), str):
            raise ValueError(f"turn {i} has no role")
        if isinstance(turn["content"], list | dict) and repr(turn["content"]) in render(messages):
            raise ValueError(
                f"the chat template writes the content parts of turn {i} as Python code: give its content as one string"
            )
    return messages


def _text_before_words(render: Render, earlier: list[dict], message: dict, after: str) -> str:
    """Return the text before the assistant's content, header included. `after` is the text up to the end of the turn.

    The template's generation prompt is the header. Without one, MARK replaces the content to find where it begins."""
    asked = earlier or [{"role": "user", "content": "x"}]  # a template cannot render an empty chat
    plain = render(asked, add_generation_prompt=False)
    prompt = render(asked, add_generation_prompt=True)
    begin, mark, _ = render([*earlier, message | {"content": MARK}]).partition(MARK)
    if earlier and (prompt != plain or not begin.startswith(plain.rstrip())):
        return prompt
    header = prompt.removeprefix(plain)
    if header and mark:  # the assistant speaks first, so only text of the template itself is before the header
        begin, mark, _ = begin.rpartition(header)
        begin += header
    if not mark or not after.startswith(begin):
        raise ValueError(
            "the beginning of the assistant's content cannot be found: mark it in the template with {% generation %} "
            "and {% endgeneration %}"
        )
    return begin if header else begin.rstrip(" ")  # without a header, the first token may include the space before it


def _warn_of_changed_words(tokenizer: "PreTrainedTokenizerBase", location, turn: int) -> None:
    if tokenizer.chat_template not in _warned:
        warn(f"{location}: the chat template changes or drops text of the assistant in turn {turn}")
        _warned.add(tokenizer.chat_template)
