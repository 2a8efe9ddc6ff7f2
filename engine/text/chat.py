"""Chats rendered with the tokenizer's chat template, as ids and labels: the assistant's turns are the targets.

Tests: tests/engine/text/test_chat.py and tests/src/tasks/test_causal_lm.py.
"""

import functools
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np

from engine.config.errors import UsageError, errors_of, warn_once
from engine.text.chat_options import ChatFormat
from engine.text.chat_spans import Span, marked_spans, marks_turns, rendered_spans
from engine.text.chat_texts import check_parts, choose_render, find_texts
from engine.text.chat_turns import (
    NO_STRUCTS,
    REASONING,
    Chat,
    Structs,
    read_chat,
    warn_of_unread_keys,
)
from engine.text.template_variables import read_variables
from engine.text.tokenize_and_pack import IGNORED, token_bytes, warn_of_special_tokens

OWN_FORMAT = ChatFormat()  # the tokenizer's own template
REASONING_IN_CONTENT = re.compile(r"^\s*<think>.*?</think>\s*", re.DOTALL)
# What templates write in a turn without reasoning, before its words. In gpt-oss the words are in the channel `final`, and
# to begin with that is not to think.
EMPTY_REASONING = re.compile(
    r"(<think>\s*)?</think>\n*$|\[THINK\]\s*\[/THINK\]\n*$|<\|channel>thought\s*<channel\|>\n*$"
    r"|<\|channel\|>final<\|message\|>$"
)
WORDS = "\u2042words\u2042"


def encode_chat(
    tokenizer: Any,
    messages: list[dict],
    location,
    tools: Any,
    structs: Structs = NO_STRUCTS,
    chat_format: ChatFormat = OWN_FORMAT,
    variables: Any = None,
    columns: str = "`messages`",
) -> tuple[list[int], list[int], np.ndarray]:
    """Return (ids, labels, UTF-8 bytes of each token) of a chat. The assistant's turns are the targets.

    `tools`: what the row says about the functions that the assistant may call; None: nothing. `variables`: what the row
    says about variables of the template. `columns`: where the row has the chat, for errors."""
    if not tokenizer.chat_template:
        raise UsageError(
            f"{location}: the tokenizer has no chat template: give --chat_template chatml, another name of "
            "configs/chat_templates, or a file"
        )
    with errors_of(location, f"{columns} could not be rendered"):
        chat = read_chat(messages, tools, structs)
        if chat_format.only_last_turn:
            chat = _train_last_turn(chat, drop_reasoning=chat_format.template is not None)
        # A tokenizer may have one more template for rows with tools.
        template = chat_format.template or tokenizer.get_chat_template(tools=chat.tools)
        values = chat_format.variables | read_variables(variables, tokenizer, template)
        text, spans = render_chat(tokenizer, chat, template, values)
        if chat_format.masks_empty_reasoning:
            spans = _without_empty_reasoning(text, spans, empty_reasoning(tokenizer, template, json.dumps(values)))
        contents = [turn.get("content") for turn in chat.turns]
        # At the beginning of a turn, <think> is meant as the token that it may be
        contents = [REASONING_IN_CONTENT.sub("", text) for text in contents if isinstance(text, str)]
        warn_of_special_tokens(tokenizer, contents, "content", [location] * len(contents))
        text.encode()  # fails for half of a surrogate pair, such as "\ud800", with its place
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = list(encoded["input_ids"])
    offsets = encoded["offset_mapping"]
    is_target = _tokens_in_spans(offsets, spans, also_partly=marks_turns(template))
    labels = np.where(is_target, ids, IGNORED).tolist() if ids else []
    _warn_of_template(tokenizer, chat, template, values, text, spans, labels)
    return ids, labels, token_bytes(text, offsets)


def render_chat(
    tokenizer: Any, chat: Chat, template: str, variables: dict[str, Any] | None = None
) -> tuple[str, list[Span]]:
    """Return a chat as text, and the characters of each assistant turn that is trained on.

    Raise ValueError if the template does not write a part of the chat, or does not show where a turn begins and ends."""
    apply = functools.partial(
        tokenizer.apply_chat_template, tokenize=False, tools=chat.tools, chat_template=template, **variables or {}
    )
    render = choose_render(apply, chat)
    text = render(chat.turns)
    check_parts(render, chat, text)
    texts, places = find_texts(render, chat, text)
    if marks_turns(template):
        return text, marked_spans(render, chat, text, template)
    return text, rendered_spans(render, chat, text, texts, places)


# ---- what of a turn is a target --------------------------------------------------------------------------------------


def _train_last_turn(chat: Chat, drop_reasoning: bool) -> Chat:
    """Return a chat of which only the last turn of the assistant may be trained on.

    With `drop_reasoning`, turns before the last question have none, as templates for inference write them."""
    roles = [turn["role"] for turn in chat.turns]
    answers = [i for i, role in enumerate(roles) if role == "assistant"]
    questions = [i for i, role in enumerate(roles) if role == "user" and i < max(answers, default=0)]
    is_trained = [trained and i == answers[-1] for i, trained in enumerate(chat.is_trained)]
    turns = chat.turns
    if drop_reasoning:
        last_question = max(questions, default=0)
        turns = [_without_reasoning(turn) if i < last_question else turn for i, turn in enumerate(turns)]
    return replace(chat, turns=turns, is_trained=is_trained)


def _without_reasoning(turn: dict) -> dict:
    """Return a turn of the assistant without its reasoning, any other one unchanged."""
    if turn["role"] != "assistant":
        return turn
    without = {key: value for key, value in turn.items() if key not in REASONING}
    if isinstance(turn["content"], str):
        without["content"] = REASONING_IN_CONTENT.sub("", turn["content"])
    return without


@functools.lru_cache
def empty_reasoning(tokenizer: Any, template: str, variables: str) -> str:
    """Return the block that the template writes before the words of a turn without reasoning, or an empty text.

    `variables`: as JSON, which can be a key of this cache."""
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": WORDS}]
    try:
        chat = Chat(turns, [False, True], None)
        apply = functools.partial(
            tokenizer.apply_chat_template, tokenize=False, chat_template=template, **json.loads(variables)
        )
        before, words, _ = choose_render(apply, chat)(turns).partition(WORDS)
    except Exception:  # a template may want tools, or turns of the system
        return ""
    block = EMPTY_REASONING.search(before)
    return block[0] if block and words else ""


def _without_empty_reasoning(text: str, spans: list[Span], block: str) -> list[Span]:
    """Return spans that begin after an empty block of reasoning, if they begin before its end."""
    if not block:
        return spans
    shorter = []
    for span in spans:
        first = span.begin
        while first < span.end and text[first].isspace():  # GLM 4.5 begins a turn with a line break
            first += 1
        begin = text.find(block, max(0, span.begin - len(block)), first + len(block))
        after = begin + len(block)
        shorter.append(span._replace(begin=after) if begin >= 0 and span.begin < after <= span.end else span)
    return shorter


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
    tokenizer: Any,
    chat: Chat,
    template: str,
    variables: dict[str, Any],
    text: str,
    spans: list[Span],
    labels: list[int],
) -> None:
    """Warn, once each, if prepared rows would change with the date, keys of turns are ignored, or nothing ends a turn."""
    warn_of_unread_keys(chat.turns, template)
    if "strftime_now" in template and "date_string" not in variables:  # which templates read instead of the date
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
    elif spans and not _ends_with_special_token(tokenizer, labels):
        warn_once(
            "no turn of the assistant ends with a special token of the tokenizer, such as its eos_token "
            f"{tokenizer.eos_token}: generation will not stop; write {{{{ eos_token }}}} there in the chat template"
        )


def _ends_with_special_token(tokenizer: Any, labels: list[int]) -> bool:
    """Return whether one of the last two targets, of which the last may be a line break, is a special token."""
    if tokenizer.eos_token_id in labels:
        return True
    last = [label for label in labels if label != IGNORED][-2:]
    return not _special_ids(tokenizer).isdisjoint(last)


@functools.lru_cache
def _special_ids(tokenizer: Any) -> frozenset[int]:
    return frozenset([*tokenizer.all_special_ids, *tokenizer.added_tokens_encoder.values()])


def _ends_with_its_words(turns: list[dict], text: str, span: Span) -> bool:
    """Return whether the text of an assistant's turn ends with what it says, so that nothing ends the turn."""
    content = turns[span.turn]["content"].strip() if span.turn >= 0 else ""
    return bool(content) and text[span.begin : span.end].rstrip().endswith(content)
