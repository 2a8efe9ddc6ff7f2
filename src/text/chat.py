"""Render chats with the tokenizer's template, and find the assistant's turns in the text.

Tests: tests/text/test_chat.py and tests/tasks/test_causal_lm.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from src.config.errors import UsageError, warn
from src.config.paths import locate
from src.text.tokenization import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT_NAMES = ("assistant", "gpt", "bot", "chatbot", "model", "ai")  # in other formats
MARK = "\u2042content\u2042"  # replaces an assistant's words, to find where a template writes them
_warned: set[str] = set()  # chat templates


def read_template(file: str) -> str:
    """Return the text of a file with a Jinja chat template."""
    try:
        return Path(locate(file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"chat_template: {file} cannot be read: {error}") from None


def render_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict], location
) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat as text, and the character spans of the assistant's turns without their headers."""
    turns = []
    with _errors_of_rendering(location):
        messages = _check_messages(tokenizer, messages)
        text = _render(tokenizer, messages)
        for i, message in enumerate(messages):
            role = message["role"]
            if role != "assistant" and role.lower() in ASSISTANT_NAMES:
                raise ValueError(f"turn {i} has the role {role!r}: write assistant, otherwise it is not trained on")
            if role == "assistant":
                after = _render(tokenizer, messages[: i + 1])
                before = _text_before_words(tokenizer, messages[:i], message, after)
                turns.append((before, after))
                if str(message["content"]).strip() not in after[len(before) :]:
                    _warn_of_changed_words(tokenizer, location, i)
    if not all(text.startswith(before) and text.startswith(after) for before, after in turns):
        raise UsageError(
            f"{location}: the chat template rewrites earlier turns as the chat grows, so the assistant's turns cannot "
            "be found: give a plain one with --chat_template FILE, or one that marks them with {% generation %}"
        )
    return text, [(len(before), len(after)) for before, after in turns]


def tokenize_marked_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict], location
) -> tuple[list[int], list[int]]:
    """Return ids and labels of a chat whose template marks the assistant's words with {% generation %}."""
    with _errors_of_rendering(location):
        chat = tokenizer.apply_chat_template(
            _check_messages(tokenizer, messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    ids = list(chat["input_ids"])
    labels = [token if is_target else IGNORED for token, is_target in zip(ids, chat["assistant_masks"], strict=True)]
    return ids, labels


@contextmanager
def _errors_of_rendering(location) -> Iterator[None]:
    """Turn every error of a template, which may be any code, into a UsageError."""
    try:
        yield
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise UsageError(f"{location}: `messages` could not be rendered: {reason}") from error


def _render(tokenizer: "PreTrainedTokenizerBase", messages: list[dict], **options) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def _check_messages(tokenizer: "PreTrainedTokenizerBase", messages: list[dict]) -> list[dict]:
    """Return a chat without empty keys; raise ValueError for what its template would skip or write as "None"."""
    # Arrow gives all turns the same keys, and templates ask whether a key is there.
    messages = [{key: value for key, value in turn.items() if value is not None} for turn in messages]
    for i, turn in enumerate(messages):
        if turn.get("tool_calls"):
            turn.setdefault("content", "")
            without_calls = {key: value for key, value in turn.items() if key != "tool_calls"}
            changed = [*messages[:i], without_calls, *messages[i + 1 :]]
            if _render(tokenizer, messages) == _render(tokenizer, changed):
                raise ValueError(f"the chat template does not write the tool_calls of turn {i}")
        elif turn.get("content") is None:
            raise ValueError(f"turn {i} has no content")
        if not isinstance(turn.get("role"), str):
            raise ValueError(f"turn {i} has no role")
        if isinstance(turn["content"], list | dict) and repr(turn["content"]) in _render(tokenizer, messages):
            raise ValueError(
                f"the chat template writes the content parts of turn {i} as Python code: give its content as one text"
            )
    return messages


def _text_before_words(tokenizer: "PreTrainedTokenizerBase", earlier: list[dict], message: dict, after: str) -> str:
    """Return the text before an assistant's words, header included; `after` is the text up to the end of the turn.

    If the template writes a generation prompt, that is the header; else the words are replaced by a mark."""
    asked = earlier or [{"role": "user", "content": "x"}]  # a template cannot render an empty chat
    plain = _render(tokenizer, asked, add_generation_prompt=False)
    prompt = _render(tokenizer, asked, add_generation_prompt=True)
    begin, found, _ = _render(tokenizer, [*earlier, message | {"content": MARK}]).partition(MARK)
    if earlier and (prompt != plain or not begin.startswith(plain.rstrip())):
        return prompt
    header = prompt.removeprefix(plain)
    if header and found:  # the assistant speaks first: only what the template itself writes is before the header
        begin, found, _ = begin.rpartition(header)
        begin += header
    if not found or not after.startswith(begin):
        raise ValueError(
            "the beginning of the assistant's words cannot be found: mark them in the template with {% generation %} "
            "and {% endgeneration %}"
        )
    return begin if header else begin.rstrip(" ")  # without a header, a token may begin with the space before a word


def _warn_of_changed_words(tokenizer: "PreTrainedTokenizerBase", location, turn: int) -> None:
    if tokenizer.chat_template not in _warned:
        warn(f"{location}: the chat template changes or drops words of the assistant (turn {turn})")
        _warned.add(tokenizer.chat_template)
