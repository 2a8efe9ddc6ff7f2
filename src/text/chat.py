"""Chats rendered with the tokenizer's chat template, and the character spans of the assistant's turns.

Tests: tests/text/test_chat.py and tests/tasks/test_causal_lm.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from src.config.errors import UsageError, one_line, warn
from src.config.paths import locate
from src.text.tokenization import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT_NAMES = ("assistant", "gpt", "bot", "chatbot", "model", "ai")  # role names in other formats
MARK = "\u2042content\u2042"  # replaces the assistant's content, to find where a template writes it
_warned: set[str] = set()  # chat templates already warned about


def read_template(file: str) -> str:
    """Return the text of a file with a Jinja chat template."""
    try:
        return Path(locate(file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"chat_template: {file} cannot be read: {error}") from None


def render_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict], location
) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat as text, and the (begin, end) characters of each assistant turn without its header."""
    turns = []
    with _errors_of_rendering(location):
        messages = _check_messages(tokenizer, messages)
        text = _render(tokenizer, messages)
        for i, message in enumerate(messages):
            role = message["role"]
            if role != "assistant" and role.lower() in ASSISTANT_NAMES:
                raise ValueError(f"turn {i} has the role {role!r}: rename it to assistant, or it is not trained on")
            if role == "assistant":
                after = _render(tokenizer, messages[: i + 1])
                before = _text_before_words(tokenizer, messages[:i], message, after)
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
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict], location
) -> tuple[list[int], list[int]]:
    """Return ids and labels of a chat with a template that marks the assistant's content with {% generation %}."""
    with _errors_of_rendering(location):
        chat = tokenizer.apply_chat_template(
            _check_messages(tokenizer, messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
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


def _render(tokenizer: "PreTrainedTokenizerBase", messages: list[dict], **options) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def _check_messages(tokenizer: "PreTrainedTokenizerBase", messages: list[dict]) -> list[dict]:
    """Return the messages without None values. Raise ValueError if the template would drop or garble a message."""
    # Arrow gives all turns the same keys (None if absent), but templates test whether a key exists.
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
                f"the chat template writes the content parts of turn {i} as Python code: give its content as one string"
            )
    return messages


def _text_before_words(tokenizer: "PreTrainedTokenizerBase", earlier: list[dict], message: dict, after: str) -> str:
    """Return the text before the assistant's content, header included. `after` is the text up to the end of the turn.

    The template's generation prompt is the header. Without one, MARK replaces the content to find where it begins."""
    asked = earlier or [{"role": "user", "content": "x"}]  # a template cannot render an empty chat
    plain = _render(tokenizer, asked, add_generation_prompt=False)
    prompt = _render(tokenizer, asked, add_generation_prompt=True)
    begin, mark, _ = _render(tokenizer, [*earlier, message | {"content": MARK}]).partition(MARK)
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
