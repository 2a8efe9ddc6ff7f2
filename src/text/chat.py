"""Render chats and find the assistant's turns in the text."""

from pathlib import Path

from src.config.errors import UsageError, warn
from src.config.paths import locate
from src.text.tokenization import ASSISTANTS

_warned: list = []  # once is enough


MARK = "\u2042content\u2042"  # stands for an assistant's words, to find where a template writes them


def read_template(file: str) -> str:
    """Return the text of a file with a Jinja chat template."""
    try:
        return Path(locate(file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"chat_template: {file} cannot be read: {error}") from None


def checked_chat(tokenizer, messages: list[dict]) -> list[dict]:
    """Return a chat without keys that hold nothing; ValueError for what its template would leave out or write as "None"."""

    def rendered(changed: list[dict]) -> str:
        return tokenizer.apply_chat_template(changed, tokenize=False)

    # Arrow gives all turns the same keys, and templates ask whether a key is there.
    messages = [{key: value for key, value in turn.items() if value is not None} for turn in messages]
    for i, turn in enumerate(messages):
        if turn.get("tool_calls"):
            turn.setdefault("content", "")
            silent = {key: value for key, value in turn.items() if key != "tool_calls"}
            if rendered(messages) == rendered([*messages[:i], silent, *messages[i + 1 :]]):
                raise ValueError(f"the chat template does not write the tool_calls of turn {i}")
        elif turn.get("content") is None:
            raise ValueError(f"turn {i} has no content")
        if not isinstance(turn.get("role"), str):
            raise ValueError(f"turn {i} has no role")
        if isinstance(turn["content"], list | dict) and repr(turn["content"]) in rendered(messages):
            raise ValueError(
                f"the chat template writes the parts of turn {i} as Python does: give its content as one text"
            )
    return messages


def render_chat(tokenizer, messages: list[dict], place: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat as text, and the character spans of the assistant's turns, without the headers before them."""
    template = tokenizer.apply_chat_template
    turns = []
    try:
        messages = checked_chat(tokenizer, messages)
        text = template(messages, tokenize=False)
        for i, message in enumerate(messages):
            if message["role"] != "assistant" and message["role"].lower() in ASSISTANTS:
                raise ValueError(
                    f"turn {i} has the role {message['role']!r}: write assistant, or nothing of it is trained on"
                )
            if message["role"] == "assistant":
                after = template(messages[: i + 1], tokenize=False)
                before = _before(template, messages[:i], message, after)
                turns.append((before, after))
                if str(message["content"]).strip() not in after[len(before) :] and not _warned:
                    _warned.append(
                        warn(f"{place}: the chat template changes or leaves out words of the assistant (turn {i})")
                    )
    except Exception as error:
        raise UsageError(f"{place}: `messages` could not be rendered: {str(error) or type(error).__name__}") from error
    if not all(text.startswith(before) and text.startswith(after) for before, after in turns):
        raise UsageError(
            f"{place}: the chat template rewrites earlier turns as the chat grows, so the assistant's cannot be told "
            "apart: give a plain one with --chat_template FILE, or one that marks them with {% generation %}"
        )
    return text, [(len(before), len(after)) for before, after in turns]


def _before(template, earlier: list[dict], message: dict, after: str) -> str:
    """Return the text before an assistant's turn, with its header: as the template itself asks for one, if it does."""
    asked = earlier or [{"role": "user", "content": "x"}]  # a template renders no empty chat
    plain, prompt = (template(asked, tokenize=False, add_generation_prompt=flag) for flag in (False, True))
    begin, found, _ = template([*earlier, message | {"content": MARK}], tokenize=False).partition(MARK)
    if earlier and (prompt != plain or not begin.startswith(plain.rstrip())):
        return prompt
    header = prompt.removeprefix(plain)
    if header and found:  # nothing precedes an assistant who speaks first, except what a template writes of its own
        head, found, _ = begin.rpartition(header)
        begin = head + header
    if not found or not after.startswith(begin):
        raise ValueError(
            "where the assistant's words begin cannot be told: mark them in the template with {% generation %} and "
            "{% endgeneration %}"
        )
    return begin if header else begin.rstrip(" ")  # without a header, a token may begin with the space before a word
