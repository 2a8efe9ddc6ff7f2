"""Tokenization helpers: bytes per token, packing, chat templates, attention masks that need no sync.

Tests: tests/text/test_tokenization.py.
"""

import bisect
from contextlib import contextmanager

import numpy as np
import torch

from src.config.errors import UsageError, warn

CHARACTERS = 1 << 20  # of text that a tokenizer gets at a time: its answers take a hundred times as many bytes


def require_text(values: list, column: str, where) -> None:
    for i, value in enumerate(values):
        if not isinstance(value, str):
            kind = "nothing" if value is None else type(value).__name__
            raise UsageError(f"{where[i]}: `{column}` holds {kind}, not text")


def batches(texts: list[str]):
    """Yield the texts in lists of limited size, at least one text each."""
    part, size = [], 0
    for text in texts:
        if part and size + len(text) > CHARACTERS:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    if part:
        yield part


def token_bytes(text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """Return how many UTF-8 bytes of `text` each token stands for, from the tokens' character spans."""
    return np.diff(bytes_reached(text, [end for _, end in spans]), prepend=0)


def bytes_reached(text: str, ends: list[int]) -> np.ndarray:
    """Return how many UTF-8 bytes of `text` are over after each token, from the characters where they end."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    over = np.concatenate([[0], np.cumsum(1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF))])
    return np.maximum.accumulate(over[ends]) if ends else np.zeros(0, np.int64)


def pack(max_length: int, batch: dict) -> dict:
    """Return rows of up to max_length tokens made of the batch's documents, by best fit, longest first.

    A row keeps the lengths of its documents, so that neither attention nor targets cross from one to the next."""
    lengths = batch["length"]
    rows, by_space, spaces = [], {}, []  # by_space: free tokens -> the rows that have them; spaces: its keys in order
    for document in sorted((d for d, n in enumerate(lengths) if n > 1), key=lambda d: -lengths[d]):
        at = bisect.bisect_left(spaces, lengths[document])
        if at < len(spaces):
            space = spaces[at]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[at]
        else:
            space, row = max_length, []
            rows.append(row)
        row.append(document)
        if left := space - lengths[document]:
            if left not in by_space:
                by_space[left] = []
                bisect.insort(spaces, left)
            by_space[left].append(row)
    joined = {
        name: [[x for d in row for x in batch[name][d]] for row in rows]
        for name in ("input_ids", "labels")
        if name in batch
    }
    added = {name: [sum(batch[name][d] for d in row) for row in rows] for name in ("length", "targets", "bytes", "cut")}
    return joined | added | {"documents": [[lengths[d] for d in row] for row in rows]}


_warned: list = []  # once is enough
ASSISTANTS = ("assistant", "gpt", "bot", "chatbot", "model", "ai")  # what other formats call it
MARK = "\u2042content\u2042"  # stands for an assistant's words, to find where a template writes them


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


@contextmanager
def masks_known(packed: bool):
    """Within, transformers takes from us whether rows are packed or padded, instead of reading it from the device.

    It asks `mask.all()` in every forward pass, where the host then waits for all work in flight. Private functions of
    transformers: where a version has none of that name, nothing changes but the wait.
    """
    from transformers import masking_utils

    def sequences(position_ids):
        if not packed:
            return None
        return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)

    def can_be_ignored(padding_mask, kv_length, local_attention_size=None):
        return padding_mask is None and (local_attention_size is None or kv_length < local_attention_size)

    ours = {"find_packed_sequence_indices": sequences, "_ignore_bidirectional_mask_sdpa": can_be_ignored}
    theirs = {name: getattr(masking_utils, name) for name in ours if hasattr(masking_utils, name)}
    try:
        vars(masking_utils).update({name: ours[name] for name in theirs})
        yield
    finally:
        vars(masking_utils).update(theirs)
