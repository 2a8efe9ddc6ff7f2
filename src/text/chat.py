"""Chats rendered with the tokenizer's chat template, and the character spans of the assistant's turns.

Tests: tests/text/test_chat.py and tests/tasks/test_causal_lm.py.
"""

import functools
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from src.config.errors import UsageError, errors_of, warn
from src.text.tokenize_and_pack import IGNORED, token_bytes

ASSISTANT_NAMES = ("assistant", "gpt", "bot", "chatbot", "model", "ai")  # role names in other formats
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers finds it
PARTS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")  # of a turn, besides its content
MARK = "\u2042content\u2042"  # replaces the assistant's content, to find where a template writes it
OTHER_TEMPLATE = "remove it from the rows, or give --chat_template FILE with a template that writes it"

Render = Callable[..., str]  # messages, options -> text
warn_once = functools.cache(warn)


def encode_chat(tokenizer: Any, messages: list[dict], location, tools: Any) -> tuple[list[int], list[int], np.ndarray]:
    """Return (ids, labels, UTF-8 bytes of each token) of a chat. The assistant's turns are the targets.

    `tools`: what the row says about the functions that the assistant may call; None: nothing."""
    if not tokenizer.chat_template:
        raise UsageError(
            f"{location}: the tokenizer has no chat template: give --chat_template configs/chatml.jinja, or your own"
        )
    with errors_of(f"{location}: `messages` could not be rendered"):
        template = tokenizer.get_chat_template(tools=tools)  # a tokenizer may have one more for rows with tools
    if "strftime_now" in template:
        warn_once(
            "the chat template writes the date, so rows that are prepared on another day differ, and a run does not resume "
            "with them: keep cache_dir, or give --chat_template FILE with a fixed date"
        )
    if MARKED.search(template):
        with errors_of(f"{location}: `messages` could not be rendered"):
            messages, render = _checked(tokenizer, messages, tools)
            chat: Any = render(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, is_target = list(chat["input_ids"]), chat["assistant_masks"]
        sizes = np.zeros(len(ids), np.int64)  # unknown
    else:
        text, turns = render_chat(tokenizer, messages, location, tools)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, spans = list(encoded["input_ids"]), encoded["offset_mapping"]
        is_target = [any(begin <= start < end for begin, end in turns) for start, _ in spans]
        sizes = token_bytes(text, spans)
    labels = [token if target else IGNORED for token, target in zip(ids, is_target, strict=True)]
    if any(is_target) and tokenizer.eos_token_id not in (None, *labels):
        warn_once(
            f"no turn of the assistant ends with the tokenizer's eos_token {tokenizer.eos_token}: unless generation_config "
            "names the token that ends a turn, generation will not stop; write {{ eos_token }} there in the chat template"
        )
    return ids, labels, sizes


def render_chat(tokenizer: Any, messages: list[dict], location, tools: Any = None) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat as text, and the (begin, end) characters of each assistant turn without its header."""
    turns = []
    with errors_of(f"{location}: `messages` could not be rendered"):
        messages, render = _checked(tokenizer, messages, tools)
        text = render(messages)
        for i, message in enumerate(messages):
            role = message["role"]
            if role == "assistant":
                after = render(messages[: i + 1])
                before = _text_before_content(render, messages[:i], message, after)
                turns.append((before, after))
                if str(message["content"]).strip() not in after[len(before) :]:
                    warn_once("the chat template changes or drops text of the assistant, such as the reasoning in it")
    if not all(text.startswith(before) and text.startswith(after) for before, after in turns):
        raise UsageError(
            f"{location}: the chat template changes earlier turns when later ones follow, so the assistant's turns "
            "cannot be found: give --chat_template FILE with a plain template, or one that marks them with "
            "{% generation %}"
        )
    return text, [(len(before), len(after)) for before, after in turns]


def _checked(tokenizer: Any, messages: list[dict], tools: Any) -> tuple[list[dict], Render]:
    """Return the messages without None values, and the function that renders them with the row's tools.

    Raise ValueError if the template would drop or garble a part of them."""
    # Arrow gives all turns and tools the same keys (None if absent), but templates test whether a key exists.
    messages = _without_nulls(messages)
    tools = _without_nulls(json.loads(tools) if isinstance(tools, str) else tools)
    render = functools.partial(tokenizer.apply_chat_template, tokenize=False, tools=tools or None)
    for i, turn in enumerate(messages):
        _check_turn(i, turn)
    whole = render(messages)
    for i, turn in enumerate(messages):
        others = () if turn["role"] in ("user", "assistant") else ("content",)  # templates may ignore a system or tool
        for name in (*PARTS, *others):
            rest = {key: value for key, value in turn.items() if key != name} | dict.fromkeys(others, "")
            if turn.get(name) and _render_or_none(render, [*messages[:i], rest, *messages[i + 1 :]]) == whole:
                raise ValueError(f"the chat template does not write the {name} of turn {i}: {OTHER_TEMPLATE}")
        for call in turn.get("tool_calls") or ():
            arguments = call.get("function", call).get("arguments")
            quoted = json.dumps(arguments, ensure_ascii=False)
            if (
                isinstance(arguments, str)
                and quoted in whole
                and not any(quoted in str(t["content"]) for t in messages)
            ):
                raise ValueError(f"the chat template quotes the arguments of turn {i} again: give a mapping, not text")
        if isinstance(turn["content"], list | dict) and repr(turn["content"]) in whole:
            raise ValueError(f"the chat template writes the content of turn {i} as Python code: give one string")
    if tools and _render_or_none(functools.partial(render, tools=None), messages) == whole:
        raise ValueError(f"the chat template does not write the `tools` of the row: {OTHER_TEMPLATE}")
    return messages, render


def _check_turn(i: int, turn: dict) -> None:
    """Raise ValueError if turn `i` lacks a part, or has a role or weight that would not be used as it means."""
    if turn.get("tool_calls"):
        turn.setdefault("content", "")
    if not isinstance(turn.get("role"), str) or "content" not in turn:
        raise ValueError(f"turn {i} has no role or no content")
    if turn["role"] != "assistant" and turn["role"].lower() in ASSISTANT_NAMES:
        raise ValueError(f"turn {i} has the role {turn['role']!r}: rename it to assistant, or it is not trained on")
    if turn.get("weight", 1) != 1:
        raise ValueError(f"turn {i} has the weight {turn['weight']}, which is not used: remove it, or give input_ids")


def _render_or_none(render: Render, messages: list[dict]) -> str | None:
    """Return the text of a chat that lacks a part; None if the template refuses it, so it has read that part."""
    try:
        return render(messages)
    except Exception:
        return None


def _without_nulls(value: Any) -> Any:
    """Return a value of nested dicts and lists without the keys that are None."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _text_before_content(render: Render, earlier: list[dict], message: dict, after: str) -> str:
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
        begin = begin.rpartition(header)[0] + header
    if not mark or not after.startswith(begin):
        raise ValueError(
            "the beginning of the assistant's content cannot be found: mark it in the template with {% generation %} "
            "and {% endgeneration %}"
        )
    return begin if header else begin.rstrip(" ")  # without a header, the first token may include the space before it
