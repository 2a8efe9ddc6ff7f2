"""Prompts to answer: rendered from texts and chats, or found in prepared rows before the last answer that they train on.

Tests: tests/engine/models/test_generation.py, tests/src/training/test_answers.py.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from engine.config.errors import UsageError, errors_of, may_be_removed
from engine.rows.chat_options import CHATS
from engine.rows.chat_turns import read_chat, with_mappings
from engine.rows.tokenize_and_pack import IGNORED, tokenize

Text = str | list[dict]  # a text to continue, or the turns of a chat to answer


class Prompt(NamedTuple):
    """What a model continues, and what is known of the answer."""

    ids: list[int]
    reference: list[int] = []  # tokens of the expected answer
    text: Text = ""  # as the run file or a row says it; empty for one of a prepared row


def read_prompt(
    tokenizer: Any, text: Text, where: object, tools: Any = None, of_row: Any = None, **template_arguments: Any
) -> Prompt:
    """Return a text, tokenized as the prompt of a row is, or a chat, rendered with the beginning of an answer.

    `where` begins the error for a chat that the template cannot render. `tools`: functions that the chat may call.
    `of_row`: what its row says about variables of the template, which go before `template_arguments`."""
    if isinstance(text, str):
        [ids] = tokenize(tokenizer, [text])["input_ids"]
        if len(ids) > 1 and tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]:
            ids = ids[:-1]  # a tokenizer that ends each text would end the prompt
        if not ids and tokenizer.eos_token_id is not None:
            ids = [tokenizer.eos_token_id]  # a tokenizer may drop spaces
    else:
        ids = _render(tokenizer, text, where, tools, template_arguments, of_row)
    if not ids:
        raise UsageError(f"{where}: the prompt has no token: give a text")
    return Prompt(ids, text=text)


def _render(tokenizer: Any, turns: list[dict], where: object, tools: Any, arguments: dict, of_row: Any) -> list[int]:
    """Return the tokens of a chat with the beginning of the assistant's answer."""
    if not tokenizer.chat_template:
        raise UsageError(f"{where}: the tokenizer has no chat template: give --chat_template chatml")
    with errors_of(where, "the chat could not be rendered"):
        chat = read_chat(turns, tools)
        last = chat.turns[-1]["role"] if chat.turns else "nothing"
        if last not in ("user", "tool", "function", "ipython"):
            raise ValueError(f"it ends with {last}: a chat to answer ends with a turn of the user or of a tool")
        with may_be_removed(CHATS):
            from engine.rows.find_targets import answer_prompt  # pyrefly: ignore
            from engine.rows.template_variables import read_variables  # pyrefly: ignore
        if of_row is not None:
            template = tokenizer.get_chat_template(tools=chat.tools)
            arguments = arguments | read_variables(of_row, tokenizer, template)
        chat = with_mappings(chat, tokenizer, tokenizer.get_chat_template(tools=chat.tools))
        text = answer_prompt(tokenizer, chat, arguments)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def prompt_in_words(text: Text) -> str:
    """Return a prompt as one text, for the console and trackers."""
    if isinstance(text, str):
        return text
    parts = [turn["content"] if isinstance(turn.get("content"), str) else json.dumps(turn) for turn in text]
    return "\n".join(f"{turn.get('role')}: {part}" for turn, part in zip(text, parts, strict=True))


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the special token that the chat template writes after the words of an assistant; None if there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    mark = "Zq7x"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # a template of other turns: where rows have them, their encoding says what is wrong
        return None
    ids = tokenizer(text.rpartition(mark)[2].lstrip(), add_special_tokens=False)["input_ids"]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_encoder.values()}
    return ids[0] if ids and ids[0] in special else None


# ---- rows that hold the answer -----------------------------------------------------------------------------------------


def prompts_of_split(split: Any, count: int | None, packing: bool | str, longest: int) -> list[Prompt | None]:
    """Return the prompt of each of the first `count` rows of each source of a split; None for one without a whole answer.

    A row of more than `longest` tokens may have lost the end of its answer. Rows of packed data are documents. If they
    were split, raise UsageError for one that may be a part: the other parts lack what stands before them."""
    prompts: list[Prompt | None] = []
    for _, _, part in split.segments():
        of_part: list[Prompt | None] = []
        row = 0
        while row < len(part) and (count is None or len(of_part) < count):
            [values] = part.rows(np.array([row]))
            sizes = values["documents"] if packing else [len(values["input_ids"])]
            if packing is True and max(sizes, default=0) > longest:
                raise UsageError(
                    f"predict_with_generate: row {row} of the packed validation data is a document of max_length "
                    f"{longest + 1} tokens, which may be a part of a longer one: give a larger max_length, or packing whole"
                )
            for ids, labels in _documents(values, sizes):
                of_part.append(last_answer(ids, labels) if len(ids) <= longest else None)
            row += 1
        prompts += of_part[:count]
    return prompts


def _documents(values: dict[str, np.ndarray], sizes: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (ids, labels) of each document of a row."""
    ids = values["input_ids"]
    labels = values.get("labels", ids)  # of rows of text all tokens are targets
    for end, size in zip(np.cumsum(sizes), sizes, strict=True):
        yield ids[end - size : end], labels[end - size : end]


def last_answer(ids: np.ndarray, labels: np.ndarray) -> Prompt | None:
    """Return what stands before the last run of targets of a document, and these targets; None if nothing does."""
    targets = np.flatnonzero(labels != IGNORED)
    if not len(targets):
        return None
    stop = int(targets[-1]) + 1
    others = np.flatnonzero(labels[:stop] == IGNORED)
    start = int(others[-1]) + 1 if len(others) else 0
    if not start:
        return None
    return Prompt(ids[:start].tolist(), ids[start:stop].tolist())
