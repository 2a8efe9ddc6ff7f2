"""Chats rendered with the tokenizer's chat template, as ids and labels: the assistant's turns are the targets.

Tests: tests/engine/text/test_chat.py and tests/src/tasks/test_causal_lm.py.
"""

import functools
from typing import Any

import numpy as np

from engine.config.errors import UsageError, errors_of
from engine.text.chat_spans import Span, marked_spans, marks_turns, rendered_spans
from engine.text.chat_texts import check_parts, choose_render, find_texts
from engine.text.chat_turns import NO_STRUCTS, Chat, Structs, read_chat, warn_of_unread_keys, warn_once
from engine.text.tokenize_and_pack import IGNORED, token_bytes


def encode_chat(
    tokenizer: Any, messages: list[dict], location, tools: Any, structs: Structs = NO_STRUCTS
) -> tuple[list[int], list[int], np.ndarray]:
    """Return (ids, labels, UTF-8 bytes of each token) of a chat. The assistant's turns are the targets.

    `tools`: what the row says about the functions that the assistant may call; None: nothing."""
    if not tokenizer.chat_template:
        raise UsageError(
            f"{location}: the tokenizer has no chat template: give --chat_template configs/chatml.jinja, or your own"
        )
    with errors_of(location, "`messages` could not be rendered"):
        chat = read_chat(messages, tools, structs)
        template = tokenizer.get_chat_template(tools=chat.tools)  # a tokenizer may have one more for rows with tools
        text, spans = render_chat(tokenizer, chat, template)
        text.encode()  # fails for half of a surrogate pair, such as "\ud800", with its place
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = list(encoded["input_ids"])
    offsets = encoded["offset_mapping"]
    is_target = _tokens_in_spans(offsets, spans, also_partly=marks_turns(template))
    labels = np.where(is_target, ids, IGNORED).tolist() if ids else []
    _warn_of_template(tokenizer, chat, template, text, spans, labels)
    return ids, labels, token_bytes(text, offsets)


def render_chat(tokenizer: Any, chat: Chat, template: str) -> tuple[str, list[Span]]:
    """Return a chat as text, and the characters of each assistant turn that is trained on.

    Raise ValueError if the template does not write a part of the chat, or does not show where a turn begins and ends."""
    render = choose_render(functools.partial(tokenizer.apply_chat_template, tokenize=False, tools=chat.tools), chat)
    text = render(chat.turns)
    check_parts(render, chat, text)
    texts, places = find_texts(render, chat, text)
    if marks_turns(template):
        return text, marked_spans(render, chat, text, template)
    return text, rendered_spans(render, chat, text, texts, places)


def _tokens_in_spans(offsets: list[tuple[int, int]], spans: list[Span], also_partly: bool) -> np.ndarray:
    """Return whether each token begins in a span; with `also_partly`, whether it has a character in one."""
    if not offsets or not spans:
        return np.zeros(len(offsets), bool)
    starts, stops = np.array(offsets).T
    last = np.maximum(starts, stops - 1) if also_partly else starts
    begins, ends = np.array([span[:2] for span in spans]).T
    span_before = np.searchsorted(begins, last, side="right") - 1
    return (span_before >= 0) & (starts < ends[span_before])


def _warn_of_template(
    tokenizer: Any, chat: Chat, template: str, text: str, spans: list[Span], labels: list[int]
) -> None:
    """Warn, once each, if prepared rows would change with the date, keys of turns are ignored, or nothing ends a turn."""
    warn_of_unread_keys(chat.turns, template)
    if "strftime_now" in template:
        warn_once(
            "the chat template writes the date, so rows that are prepared on another day differ, and a run does not resume "
            "with them: keep cache_dir, or give --chat_template FILE with a fixed date"
        )
    if any(_ends_with_its_words(chat.turns, text, span) for span in spans):
        warn_once(
            "the chat template writes nothing after the words of an assistant's turn that is trained on, so no target "
            "says that the turn ends: a trained model continues with the next turn, even where generation_config names "
            "the token of the next role; write {{ eos_token }} there in the chat template, within {% generation %} if it has that"
        )
    elif spans and tokenizer.eos_token_id not in (None, *labels):
        warn_once(
            f"no turn of the assistant ends with the tokenizer's eos_token {tokenizer.eos_token}: unless generation_config "
            "names the token that ends a turn, generation will not stop; write {{ eos_token }} there in the chat template"
        )


def _ends_with_its_words(turns: list[dict], text: str, span: Span) -> bool:
    """Return whether the text of an assistant's turn ends with what it says, so that nothing ends the turn."""
    content = turns[span.turn]["content"].strip() if span.turn >= 0 else ""
    return bool(content) and text[span.begin : span.end].rstrip().endswith(content)
