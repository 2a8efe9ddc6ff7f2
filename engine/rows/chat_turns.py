"""Turns of a chat as its row says them: parts joined to text, nulls, keys that are obeyed or refused, turns without loss.

Tests: tests/engine/rows/test_chat.py.
"""

import functools
import json
import re
from dataclasses import dataclass, replace
from typing import Any

from engine.config.errors import did_you_mean, warn_once

ASSISTANT_NAMES = ("assistant", "gpt", "bot", "chatbot", "model", "ai")  # role names in other formats
# Roles of turns that are read, but not trained on. A template may have further ones.
OTHER_ROLES = ("system", "developer", "user", "tool", "function", "ipython", "environment", "observation", "documents")
REASONING = ("reasoning_content", "reasoning", "thinking")  # of a turn, as transformers names it
CALLS = ("tool_calls", "function_call")
# Whether a turn is trained on: axolotl's, ms-swift's and OpenAI's keys; of torchtune's the opposite.
TRAIN_KEYS = ("train", "training", "trainable", "loss", "weight")
NOT_TRAINED_KEY = "masked"
PARTLY_TRAINED_KEYS = ("train_detail", "training_detail", "loss_mask", "loss_scale", "loss_weight")
MEDIA_KEYS = ("image", "images", "audio", "audios", "video", "videos")
IDENTIFIERS = ("id", "tool_call_id", "type")  # templates may leave them out


@dataclass(frozen=True)
class Chat:
    """The turns of a row, with which of them are trained on, and its tools, as a template takes them."""

    turns: list[dict]
    is_trained: list[bool]
    tools: list | None
    is_history: bool = False  # before an answer: what of earlier answers the template leaves out, inference lacks, too


def read_chat(messages: Any, tools: Any) -> Chat:
    """Return the chat that a row says. Raise ValueError for a turn that would not be used as it says."""
    if not isinstance(messages, list) or not all(isinstance(turn, dict) for turn in messages):
        raise ValueError(f"the row holds {type(messages).__name__}, not a list of turns")
    tools = _read_tools(tools)
    turns = []
    is_trained = []
    for i, message in enumerate(messages):
        turn = {key: value for key, value in message.items() if value is not None}
        _check_keys(i, turn)
        turn["content"] = _read_content(i, turn)
        is_trained.append(_read_training(i, turn))
        turns.append(turn)
    return Chat(turns, is_trained, tools or None)


def warn_of_unread_keys(turns: list[dict], template: str) -> None:
    """Warn of each key of turns that the template does not name, so it cannot write or obey it."""
    for turn in turns:
        for key in turn:
            if key not in _words(template) and key not in ("role", "content", *CALLS, *REASONING, *IDENTIFIERS):
                warn_once(f"messages: the chat template does not read `{key}` of a turn: it is not used")


@functools.lru_cache
def _words(template: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", template))


# ---- keys of a turn --------------------------------------------------------------------------------------------------


def _check_keys(i: int, turn: dict) -> None:
    """Raise ValueError if turn `i` lacks a part, or has a role or a key that would not be used as it means."""
    if any(turn.get(name) for name in CALLS):
        turn.setdefault("content", "")
    role = turn.get("role")
    if not isinstance(role, str) or "content" not in turn:
        raise ValueError(f"turn {i} has no role or no content")
    if role != "assistant" and role.strip().lower() in ASSISTANT_NAMES:
        raise ValueError(f"turn {i} has the role {role!r}: rename it to assistant, or it is not trained on")
    if role not in ("assistant", *OTHER_ROLES):
        hint = did_you_mean(role, ("assistant", *OTHER_ROLES))
        if hint:
            raise ValueError(f"turn {i} has the role {role!r}, which is not trained on{hint}")
        warn_once(f"messages: turns of the role {role!r} are not trained on: only those of the assistant are")
    for key in MEDIA_KEYS:
        if turn.get(key):
            raise ValueError(f"turn {i} has `{key}`: this task reads text only: remove the row")
    for key in PARTLY_TRAINED_KEYS:
        if turn.get(key) not in (None, []):  # 0 means that the turn is not trained on
            raise ValueError(
                f"turn {i} has `{key}`, which is not supported: remove it, give `train: false` for the whole turn, or "
                "give rows of input_ids and labels"
            )


def _read_training(i: int, turn: dict) -> bool:
    """Return whether turn `i` is trained on, and remove the keys that say so."""
    answers = {}  # by key: whether the turn is trained on
    for key in (*TRAIN_KEYS, NOT_TRAINED_KEY):
        if key in turn:
            value = turn.pop(key)
            if isinstance(value, str) or value not in (0, 1):  # booleans are numbers here
                raise ValueError(
                    f"turn {i} has `{key}` {value!r}: a turn is trained on (true or 1) or not (false or 0): for other "
                    "weights give rows of input_ids and labels"
                )
            answers[key] = not value if key == NOT_TRAINED_KEY else bool(value)
    if len(set(answers.values())) > 1:
        raise ValueError(f"turn {i} has {' and '.join(answers)}, which say the opposite: remove one of them")
    if turn["role"] != "assistant":
        if any(answers.values()):
            key = next(iter(answers))
            warn_once(f"messages: only turns of the assistant are trained on: `{key}` of others is not used")
        return False
    return all(answers.values())


def _read_content(i: int, turn: dict) -> Any:
    """Return the text of a turn; parts of text are joined. What a tool returns may be JSON."""
    content = turn["content"]
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    if parts and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        others = {part.get("type", "text") for part in parts} - {"text"}
        if not others:
            return "".join(part["text"] for part in parts)
    if turn["role"] == "tool" and isinstance(content, list | dict):
        return content
    if parts and all(isinstance(part, dict) for part in parts):
        types = sorted({str(part.get("type")) for part in parts} - {"text"})
        raise ValueError(
            f"the content of turn {i} has parts of type {', '.join(types) or 'text without `text`'}: this task reads text "
            "only: give one string, or parts of type text"
        )
    raise ValueError(f"the content of turn {i} is {type(content).__name__}: give one string, or parts of type text")


# ---- tools and nulls -------------------------------------------------------------------------------------------------


def from_json(value: Any, name: str) -> Any:
    """Return the value of JSON text, None for an empty text, and any other value as it is.

    For what has to be a mapping or a list. Raise ValueError, which begins with `name`, for text that is no JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise ValueError(f"{name} is text, but not JSON: {error}") from error


def _read_tools(tools: Any) -> Any:
    """Return the tools of a row; any of them may be JSON text. Raise ValueError if they are no list of dicts."""
    name = "`tools` of the row"
    tools = from_json(tools, name)
    if isinstance(tools, list):
        tools = [from_json(tool, name) for tool in tools]
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"{name} is not a list of functions, each as a mapping with its name and parameters")
    return tools


def with_mappings(chat: Chat, tokenizer: Any, *templates: str) -> Chat:
    """Return the chat with the arguments of calls as mappings instead of JSON text, if one of the templates wants that.

    Others write JSON text as it is."""
    texts = [isinstance(function.get("arguments"), str) for turn in chat.turns for function in functions_of(turn)]
    if not any(texts) or not any(_wants_mappings(tokenizer, template) for template in templates):
        return chat
    return replace(chat, turns=[_with_mappings(i, turn) for i, turn in enumerate(chat.turns)])


def functions_of(turn: dict) -> list[dict]:
    """Return the functions, with name and arguments, that a turn calls."""
    calls = list(turn.get("tool_calls") or ())
    if turn.get("function_call"):
        calls.append(turn["function_call"])
    return [call.get("function", call) for call in calls if isinstance(call, dict)]


def _with_mappings(i: int, value: Any) -> Any:
    """Return a turn, or a part of it, with `arguments` as mappings."""
    if isinstance(value, list):
        return [_with_mappings(i, item) for item in value]
    if not isinstance(value, dict):
        return value
    value = value | {key: _with_mappings(i, value[key]) for key in (*CALLS, "function") if key in value}
    if isinstance(value.get("arguments"), str):
        value["arguments"] = from_json(value["arguments"], f"`arguments` of turn {i}") or {}
    return value


@functools.lru_cache
def _wants_mappings(tokenizer: Any, template: str) -> bool:
    """Return whether a template writes arguments that are a mapping, but refuses JSON text, or quotes it again."""
    text = '{"key": "Zq7x"}'

    def render(arguments: Any) -> str:
        call = {"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            return tokenizer.apply_chat_template(turns, tokenize=False, chat_template=template)
        except Exception:
            return ""

    as_text = render(text)
    return (not as_text or json.dumps(text) in as_text) and "Zq7x" in render(json.loads(text))
