"""Chats rendered with the tokenizer's chat template, as ids and labels: the assistant's turns are the targets.

Tests: tests/engine/rows/test_chat.py and tests/src/tasks/test_causal_lm.py.
"""

import functools
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from engine.config.errors import UsageError, count_rows, errors_of, warn_once
from engine.rows.chat_options import ChatFormat
from engine.rows.chat_turns import (
    Chat,
    read_chat,
    warn_of_unread_keys,
    with_mappings,
)
from engine.rows.find_targets import AnswerPrompts, Span, find_targets, with_fixed_date
from engine.rows.render_chat import marks_turns, split_reasoning
from engine.rows.template_families import nearest_family
from engine.rows.template_variables import read_variables
from engine.rows.tokenize_and_pack import (
    IGNORED,
    find_leads,
    span_array,
    token_bytes,
    warn_of_special_tokens,
)

NOT_REASONED = (
    "answers have no reasoning, and after their prompt the chat template lets the model reason: it learns to answer at "
    "once; to keep its reasoning, give rows with it, or the prompt without: chat_template_kwargs, such as "
    "{enable_thinking: false}"
)
WINDOW = 64  # tokens before a target
FEW_TOKENS = 8  # of them, which the beginning of the window does not change
OWN_FORMAT = ChatFormat()  # the tokenizer's own template


class Sequence(NamedTuple):
    """A tokenized chat, or its beginning: ids, labels and UTF-8 bytes of each token."""

    ids: list[int]
    labels: list[int]
    sizes: np.ndarray


def encode_chat(
    tokenizer: Any,
    messages: list[dict],
    location,
    tools: Any,
    chat_format: ChatFormat = OWN_FORMAT,
    variables: Any = None,
    columns: str = "`messages`",
) -> list[Sequence]:
    """Return the sequences of a chat, whose targets are turns of the assistant, each after its prompt of inference.

    `tools`: what the row says about the functions that the assistant may call; None: nothing. `variables`: what the row
    says about variables of the template. `columns`: where the row has the chat, for errors."""
    if not tokenizer.chat_template:
        raise UsageError(
            f"{location}: the tokenizer has no chat template: give --chat_template chatml, another name of "
            "configs/chat_templates, or a file"
        )
    with errors_of(location, f"{columns} could not be rendered"):
        chat = read_chat(messages, tools)
        # A tokenizer may have one more template for rows with tools.
        own = tokenizer.get_chat_template(tools=chat.tools)
        template = with_fixed_date(chat_format.template or own)
        chat = with_mappings(chat, tokenizer, template, own)
        values = chat_format.variables | read_variables(variables, tokenizer, template, own)
        # At the beginning of a turn, <think> is meant as the token that it may be
        contents = [split_reasoning(turn["content"])[-1] for turn in chat.turns if isinstance(turn["content"], str)]
        warn_of_special_tokens(tokenizer, contents, "content", [location] * len(contents))
        sequences = []
        try:
            parts = _find_sequences(tokenizer, chat, template, values, chat_format)
        except ValueError as error:
            if marks_turns(template):
                raise
            raise ValueError(
                f"{error} (of those that ship, {nearest_family(tokenizer, template)} is nearest)"
            ) from error
        for part, text, spans in parts:
            text.encode()  # fails for half of a surrogate pair, such as "\ud800", with its place
            for span in spans:
                if span.turn >= 0 and part.skips_reasoning(span.turn):
                    count_rows(NOT_REASONED, location)
            sequences.append(_encode_text(tokenizer, text, spans))
            _warn_of_template(tokenizer, part, text, spans, sequences[-1].labels)
    return sequences


# ---- what of a chat is a sequence, and what of it a target -----------------------------------------------------------


def _find_sequences(
    tokenizer: Any, chat: Chat, template: str, values: dict[str, Any], chat_format: ChatFormat
) -> list[tuple[AnswerPrompts, str, list[Span]]]:
    """Return (prompts, text, spans of targets) of each sequence of a chat.

    One sequence has all turns if the prompt of inference for the last one is what stands before it; else, as where
    reasoning is left out of the history, each turn whose prompt does not continue the sequence before begins another."""
    which = chat_format.train_turns
    answers = [i for i, trained in enumerate(chat.is_trained) if trained]
    if which == "last":
        last = max((i for i, turn in enumerate(chat.turns) if turn["role"] == "assistant"), default=-1)
        answers = [i for i in answers if i == last]
    if which == "all" or not answers:
        is_one = not answers or (chat_format.one_sequence and len(answers) > 1)
        whole = chat if answers else replace(chat, is_trained=[False] * len(chat.turns))
        prompts = AnswerPrompts(tokenizer, whole, template, values)
        try:
            text, spans = find_targets(prompts)
            if is_one or prompts.follow(text, spans):
                return [(prompts, text, spans)]
        except ValueError:
            if is_one or len(answers) < 2:
                raise
    sequences: list[tuple[AnswerPrompts, str, list[Span]]] = []
    for i in answers:
        part = Chat(chat.turns[: i + 1], [False] * i + [True], chat.tools)
        prompts = AnswerPrompts(tokenizer, part, template, values)
        text, spans = find_targets(prompts, with_history_of_inference=True)
        if which == "all" and sequences and text.startswith(sequences[-1][1]):
            spans = [*sequences.pop()[2], *spans]
        sequences.append((prompts, text, spans))
    return sequences


def _encode_text(tokenizer: Any, text: str, spans: list[Span]) -> Sequence:
    """Return the tokens of a text; those that start in a span are targets.

    What stands before a span is tokenized apart from it where it has other tokens alone, as at inference."""
    ids, offsets = _tokenize(tokenizer, text, 0, len(text))
    borders = _borders(tokenizer, text, spans, ids, offsets[:, 0])
    if borders:
        parts = [_tokenize(tokenizer, text, *part) for part in pairwise([0, *borders, len(text)])]
        ids = [each for part, _ in parts for each in part]
        offsets = np.concatenate([part for _, part in parts])
    labels = np.where(_in_spans(offsets[:, 0], spans), np.array(ids, np.int64), IGNORED).tolist()
    return Sequence(ids, labels, token_bytes(text, offsets[:, 1]))


def _borders(tokenizer: Any, text: str, spans: list[Span], ids: list[int], starts: np.ndarray) -> list[int]:
    """Return where spans begin before which the tokens of `text` are not those of a prompt that ends there.

    Texts between special tokens are tokenized on their own, so the prompt's end is compared from the last one on, or
    where none is near, the last tokens of a window."""
    special = _special_ids(tokenizer)
    windows = []  # (where the span begins, the text before it, the last tokens of that)
    for span in spans:
        end = int(np.searchsorted(starts, span.begin))
        near = max(0, end - WINDOW)
        first = next((k for k in range(end - 1, near, -1) if ids[k] in special), near)
        if first < end:
            compared = end - first if first > near or not near else FEW_TOKENS
            windows.append((span.begin, text[starts[first] : span.begin], ids[end - compared : end]))
    texts = tuple(dict.fromkeys(window for _, window, _ in windows))
    alone = dict(zip(texts, _ids_alone(tokenizer, texts), strict=True))
    return [begin for begin, window, last in windows if alone[window][-len(last) :] != last]


@functools.lru_cache(1024)  # most turns have the same header
def _ids_alone(tokenizer: Any, texts: tuple[str, ...]) -> list[list[int]]:
    return tokenizer([*texts], add_special_tokens=False, verbose=False)["input_ids"] if texts else []


def _in_spans(places: np.ndarray, spans: list[Span]) -> np.ndarray:
    """Return whether each place is in a span."""
    if not spans:
        return np.zeros(len(places), bool)
    begins, ends = np.array([span[:2] for span in spans]).T
    span_before = np.searchsorted(begins, places, side="right") - 1
    return (span_before >= 0) & (places < ends[span_before])


def _tokenize(tokenizer: Any, text: str, start: int, stop: int) -> tuple[list[int], np.ndarray]:
    """Return ids and characters of the tokens of a part of a text, without a space that a tokenizer begins texts with."""
    for lead in [*_leads(tokenizer), ""] if start else [""]:
        part = lead + text[start:stop]
        encoded = tokenizer(part, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = span_array(encoded["offset_mapping"])
        in_part = offsets[:, 1] > len(lead)
        first = int(in_part.argmax()) if in_part.any() else len(offsets)
        if first == len(offsets) or offsets[first, 0] >= len(lead):  # else one token holds parts of both
            break
    return encoded["input_ids"][first:], offsets[first:] + (start - len(lead))


_leads = functools.lru_cache(find_leads)


def _warn_of_template(tokenizer: Any, prompts: AnswerPrompts, text: str, spans: list[Span], labels: list[int]) -> None:
    """Warn, once each, if keys of turns are ignored, nothing ends a turn, or words are neither prompt nor target."""
    turns = prompts.chat.turns
    warn_of_unread_keys(turns, prompts.template)
    if prompts.between(text, spans):  # not quoted: it may differ in each row
        warn_once(
            "between the prompt of inference and the words that {% generation %} marks, the chat template writes more, "
            "such as the header of the turn, which a trained model neither gets nor learns: let the template write it at "
            "the end where add_generation_prompt is true, or mark it, too"
        )
    if any(_ends_with_its_words(turns, text, span) for span in spans):
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
    last = islice((label for label in reversed(labels) if label != IGNORED), 2)
    return not _special_ids(tokenizer).isdisjoint(last)


@functools.lru_cache
def _special_ids(tokenizer: Any) -> frozenset[int]:
    return frozenset([*tokenizer.all_special_ids, *tokenizer.added_tokens_encoder.values()])


def _ends_with_its_words(turns: list[dict], text: str, span: Span) -> bool:
    """Return whether the text of an assistant's turn ends with what it says, so that nothing ends the turn."""
    content = turns[span.turn]["content"].strip() if span.turn >= 0 else ""
    return bool(content) and text[span.begin : span.end].rstrip().endswith(content)
