"""Encoding of preference pairs: a prompt with a chosen and a rejected completion, as text or as chats.

Tests: tests/addons/tasks/test_preference.py.
"""

from dataclasses import replace

from engine.config.errors import UsageError, errors_of, warn_once
from engine.rows.columns import warn_of_ignored
from engine.rows.encode_rows import Encoder
from engine.rows.foreign_turns import not_trained, read_answer, split_prompt, wrap_tools
from engine.rows.formats import MESSAGES, OF_CHATS, TEXT_PAIRS, VARIABLES, with_system
from engine.rows.tokenize_and_pack import IGNORED, require_text

PROMPT = "prompt"
SYSTEM = "system"  # read beside `conversations`, as in other rows of that format
SIDES = ("chosen", "rejected")
PARTS = (PROMPT, *SIDES, "conversations", "tools", SYSTEM, VARIABLES)

WITHOUT_TARGETS = "in each pair, `chosen` and `rejected` are equal, or one of them has no answer"


class PairEncoder:
    """Encodes the pairs of a split, all text or all chats, with the Encoder of language models."""

    def __init__(self, encoder: Encoder, examples, split: str, all_tokens: bool = False):
        """Choose the kind of rows from the columns of `examples`; `needed` are those that encode_batch reads.

        all_tokens: every token of a completion is a target, also those that both completions begin with."""
        self.all_tokens = all_tokens
        columns = examples.column_names
        self.encoder = encoder = replace(encoder)  # each split may have another kind of rows
        encoder.require_one_sequence()
        # LLaMA-Factory's pairs have the turns before the answer in `conversations`.
        self.prompt = prompt = "conversations" if PROMPT not in columns and "conversations" in columns else PROMPT
        self.chat = any(isinstance(examples.first(name), list | dict) for name in (prompt, *SIDES))
        if missing := [name for name in (prompt, *SIDES) if name not in columns and (name != prompt or not self.chat)]:
            raise UsageError(
                f"{split} data: {' and '.join(missing)} not among the columns {', '.join(columns)}: a row needs "
                "`prompt`, `chosen` and `rejected` (chats: `chosen` and `rejected`)"
            )
        beside = [*OF_CHATS, SYSTEM] if prompt != PROMPT else [*OF_CHATS]
        self.needed = [prompt, *SIDES, *(beside if self.chat else ())]
        self.used = [name for name in self.needed if name in columns]
        warn_of_ignored(columns, self.used, split)
        encoder.use(MESSAGES if self.chat else TEXT_PAIRS, split)

    def describe(self) -> str:
        """Return a sentence on how rows are read, for the plan."""
        kind = "chats" if self.chat else "text, without a chat template"
        loss = "on both completions" if self.all_tokens else "where chosen and rejected differ"
        return f"{', '.join(f'`{name}`' for name in self.used)} as {kind}: loss {loss}"

    def encode_batch(self, batch: dict[str, list], locations) -> dict[str, list]:
        """Return SIDE_ids and SIDE_labels of both sides, and `length`, `targets` and `cut` of each pair.

        The tokens that both sides begin with (the prompt, at least) are not targets. A pair without targets, equal or
        truncated in the prompt, has `targets` 0, all others 1. With `all_tokens`, a completion is a target from its
        first token on, and a pair has `targets` 0 if one side has none."""
        pairs = [self.encoder.encode_batch(self._sequences(batch, side, locations), locations) for side in SIDES]
        rows: dict[str, list] = {f"{side}_ids": made["input_ids"] for side, made in zip(SIDES, pairs, strict=True)}
        rows |= {name: [] for name in ("chosen_labels", "rejected_labels", "length", "targets", "cut")}
        if self.chat:
            self._warn_of_other_questions(batch, locations)
        for i, ids in enumerate(zip(rows["chosen_ids"], rows["rejected_ids"], strict=True)):
            differs = (k for k, (one, other) in enumerate(zip(*ids, strict=False)) if one != other)
            shared = 0 if self.all_tokens else next(differs, min(map(len, ids)))
            for side, made in zip(SIDES, pairs, strict=True):
                rows[f"{side}_labels"].append([IGNORED] * shared + made["labels"][i][shared:])
            rows["targets"].append(int(self._counts(rows["chosen_labels"][i], rows["rejected_labels"][i])))
            rows["length"].append(sum(map(len, ids)))
            rows["cut"].append(sum(made["cut"][i] for made in pairs))
        return rows

    def _warn_of_other_questions(self, batch: dict[str, list], locations) -> None:
        """Warn of the first pair of whole chats in which the user says different things."""
        prompts = batch.get(self.prompt) or [None] * len(locations)
        for location, prompt, *chats in zip(locations, prompts, *(batch[side] for side in SIDES), strict=True):
            if prompt:
                continue
            one, other = (
                [turn.get("content") for turn in read_answer(chat, "") if turn.get("role") == "user"] for chat in chats
            )
            if one != other:
                problem = "the user says other things in `chosen` than in `rejected`: they answer other questions"
                warn_once(f"{location}: {problem}", kind=problem)

    def _counts(self, chosen: list[int], rejected: list[int]) -> bool:
        """Return whether a pair with these labels has what its loss needs."""
        # Without label 0: no token precedes the first one.
        has_targets = [any(label != IGNORED for label in labels[1:]) for labels in (chosen, rejected)]
        return all(has_targets) if self.all_tokens else any(has_targets)

    def _sequences(self, batch: dict[str, list], side: str, locations) -> dict[str, list]:
        """Return the prompts with the completions of one side, in the columns that the encoder reads."""
        if self.chat:
            prompts = batch.get(self.prompt) or [None] * len(batch[side])
            systems = batch.get(SYSTEM) or [None] * len(batch[side])
            [other] = set(SIDES) - {side}
            rows = zip(prompts, systems, batch[side], batch[other], locations, strict=True)
            chats = []
            for prompt, system, turns, other_turns, location in rows:
                with errors_of(location):
                    if prompt:
                        before, answer = split_prompt(prompt, turns, (self.prompt, side))
                        chat = [*before, *answer]
                    else:
                        chat = _after_shared_turns(read_answer(turns, side), read_answer(other_turns, other), side)
                    chats.append(with_system(chat, system)[0])
            columns = {"messages": chats} | {name: batch[name] for name in OF_CHATS if name in batch}
            if self.prompt != PROMPT and "tools" in batch:
                columns["tools"] = [wrap_tools(tools) for tools in batch["tools"]]
            return columns
        require_text(batch[side], side, locations)
        return {"prompt": batch[self.prompt], "completion": batch[side]}


def _after_shared_turns(chat: list[dict], other: list[dict], side: str) -> list[dict]:
    """Return a chat without a prompt: its prompt is the turns that both sides begin with, without the last of a side."""
    turns = zip(chat[:-1], other[:-1], strict=False)
    count = next((i for i, (one, another) in enumerate(turns) if one != another), min(len(chat), len(other)) - 1)
    return [*not_trained(chat[:count], side), *chat[count:]]
