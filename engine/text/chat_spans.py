"""The characters of each assistant turn in a rendered chat: marked by the template, or found by rendering beginnings.

Tests: tests/engine/text/test_chat.py.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from engine.text.chat_texts import Places, Render, Text, ways_to_write
from engine.text.chat_turns import CALLS, REASONING, Chat

GENERATION = re.compile(r"\{%(-?)\s*generation\s*(-?)%\}")  # as transformers finds it
END_GENERATION = re.compile(r"\{%(-?)\s*endgeneration\s*(-?)%\}")
GENERATED = re.compile("\ufdd3(.*?)\ufdd4", re.DOTALL)
MARK = "\u2042content\u2042"  # replaces the assistant's content, to find where a template writes it
FEW_TURNS = 8  # longer chats are rendered a few times, not twice for each turn
OTHER_TEMPLATE = (
    "give --chat_template NAME with one of configs/chat_templates, or FILE with a plain template or one that marks them "
    "with {% generation %}, or train on the last turn only: --train_turns last"
)


class Span(NamedTuple):
    """The characters of an assistant's turn, without its header; `turn` is -1 if the template alone knows."""

    begin: int
    end: int
    turn: int


def marks_turns(template: str) -> bool:
    """Return True if the template marks what the assistant says with {% generation %}."""
    return bool(GENERATION.search(template))


def marked_spans(render: Render, chat: Chat, text: str, template: str) -> list[Span]:
    """Return the spans between {% generation %} and {% endgeneration %}, of trained turns only.

    transformers finds them, too, but its time grows with the square of the turns."""
    # A scope of its own, as the block is: a variable that is set in it ends with it.
    template = GENERATION.sub(lambda tag: f"{{%{tag[1]} with %}}\ufdd3{{% set marked = true {tag[2]}%}}", template)
    template = END_GENERATION.sub(
        lambda tag: f"{{%{tag[1]} set marked = false %}}\ufdd4{{% endwith {tag[2]}%}}", template
    )
    marked = render(chat.turns, chat_template=template)
    if GENERATED.sub(r"\1", marked) != text:
        raise ValueError(
            "the text between {% generation %} and {% endgeneration %} cannot be found: use them once a turn"
        )
    spans = []
    for k, match in enumerate(GENERATED.finditer(marked)):
        begin = match.start() - 2 * k  # without the two marks of each span before this one
        spans.append(Span(begin, begin + len(match[1]), -1))
    answers = [i for i, turn in enumerate(chat.turns) if turn["role"] == "assistant"]
    if len(answers) == len(spans):
        spans = [span._replace(turn=i) for span, i in zip(spans, answers, strict=True)]
        return [span for span in spans if chat.is_trained[span.turn]]
    not_trained = [i for i in answers if not chat.is_trained[i]]
    if not_trained:
        raise ValueError(
            f"turn {not_trained[0]} is not to be trained on, but the chat template marks {len(spans)} parts of "
            f"{len(answers)} turns of the assistant, so it is not known which: use {{% generation %}} once a turn"
        )
    return spans


def rendered_spans(render: Render, chat: Chat, rendered: str, texts: list[Text], places: Places) -> list[Span]:
    """Return the span of each assistant turn that is trained on: after its header, to the header of the next turn.

    Raise ValueError for a template that changes earlier turns when later ones follow, or writes a part of a turn
    elsewhere. `texts`, `places`: see find_texts."""
    answers = [i for i, trained in enumerate(chat.is_trained) if trained]
    if len(chat.turns) > FEW_TURNS:
        spans = _repeated_spans(render, chat, rendered, places, answers)
        if spans is not None and _find_outside(rendered, texts, spans) is None:
            return spans
    spans = [_rendered_span(render, chat, rendered, i) for i in answers]
    outside = _find_outside(rendered, texts, spans)
    if outside is not None:
        raise ValueError(
            f"the chat template writes the {outside.name} of turn {outside.turn} elsewhere than in its turn, so it would "
            f"not be trained on: {OTHER_TEMPLATE}"
        )
    return spans


def _find_outside(rendered: str, texts: list[Text], spans: list[Span]) -> Text | None:
    """Return the first text of a trained turn that does not stand in the span of this turn, or None."""
    text_of_turn = {span.turn: rendered[span.begin : span.end] for span in spans}
    for text in texts:
        if text.turn not in text_of_turn:
            continue
        if not any(way in text_of_turn[text.turn] for way in ways_to_write(text.text)):
            return text
    return None


# ---- by rendering the chat up to a turn ------------------------------------------------------------------------------


def _rendered_span(render: Render, chat: Chat, text: str, i: int) -> Span:
    """Return the span of turn `i`: from the end of the generation prompt to the end of the chat up to this turn."""
    after = render(chat.turns[: i + 1])
    before, generation_prompt = _text_before(render, chat.turns[:i], chat.turns[i], after)
    if not text.startswith(after):
        raise ValueError(
            "the chat template changes earlier turns when later ones follow, so the assistant's turns cannot be found: "
            + OTHER_TEMPLATE
        )
    if not after.startswith(before):
        hint = ""
        if _prompt_opens_reasoning(render, chat, i, generation_prompt):
            hint = ", or give each turn its reasoning_content, which the prompt opens"
        raise ValueError(
            f"turn {i} of the assistant does not begin with the generation prompt {generation_prompt!r}, after which the "
            f"model answers: give --chat_template FILE whose prompt is what stands before its words{hint}"
        )
    return Span(len(before), len(after), i)


def _prompt_opens_reasoning(render: Render, chat: Chat, i: int, generation_prompt: str) -> bool:
    """Return whether the prompt begins the reasoning of turn `i`, and the template writes `reasoning_content` there."""
    if "<think>" not in generation_prompt or "</think>" in generation_prompt:
        return False
    reasoning = chat.turns[i] | {"reasoning_content": MARK}
    return MARK in render([*chat.turns[:i], reasoning])


def _text_before(render: Render, earlier: list[dict], turn: dict, after: str) -> tuple[str, str]:
    """Return the text before the assistant's content, header included, and the template's generation prompt.

    The prompt is the header. Without one, MARK is all that the turn says, to find where its words begin. `after` is the
    text up to the end of the turn."""
    question = earlier or [{"role": "user", "content": "x"}]  # a template cannot render an empty chat
    plain = render(question, add_generation_prompt=False)
    prompt = render(question, add_generation_prompt=True)
    header = prompt.removeprefix(plain)
    only_mark = {key: value for key, value in turn.items() if key not in (*REASONING, *CALLS)}
    only_mark["content"] = MARK
    begin, mark, _ = render([*earlier, only_mark]).partition(MARK)
    if earlier and (header or not begin.startswith(plain.rstrip())):
        return prompt, header
    if header and mark:  # the assistant speaks first, so only text of the template itself is before the header
        begin = begin.rpartition(header)[0] + header
    if not mark or not after.startswith(begin):
        raise ValueError(
            "the beginning of the assistant's content cannot be found: mark it in the template with {% generation %} "
            "and {% endgeneration %}"
        )
    if not header:
        begin = begin.rstrip(" ")  # the first token may include the space before it
    return begin, header


# ---- chats of many turns ---------------------------------------------------------------------------------------------


def _repeated_spans(render: Render, chat: Chat, text: str, places: Places, answers: Sequence[int]) -> list[Span] | None:
    """Return the spans of many turns in a few renderings, or None if they cannot be found so.

    A turn is rendered if no header is known that stands before its first text, or before that of the next turn; if it
    ends in another way than those before; and in the middle and at the end, where a template would differ."""
    if not places.begins:
        return None
    headers = _Headers(chat, text, places)
    to_render = {answers[len(answers) // 2], answers[-1]} if answers else set()
    spans = []
    for i in answers:
        begin = headers.find_begin(i)
        end = headers.find_end(i)
        if begin is None or end is None or i in to_render or not headers.ends_as_before(i, end):
            span = _rendered_span(render, chat, text, i)
            is_other_place = begin not in (None, span.begin) or end not in (None, span.end)
            if is_other_place or not headers.can_learn(i):
                return None
            border = len(render(chat.turns[:i])) if i else 0
            headers.learn(span, border)
            spans.append(span)
        else:
            spans.append(Span(begin, end, i))
    return spans


class _Headers:
    """Headers of turns, learned from those that were rendered, and found before the first texts of the others.

    Between the border of two turns and the first text of the second one stands a header, the same for all turns of that
    role after that role, but for spaces that the text itself begins with."""

    def __init__(self, chat: Chat, text: str, places: Places):
        self.chat = chat
        self.text = text
        self.places = places
        self.roles = [turn["role"] for turn in chat.turns]
        self.spaces = [_spaces_before(turn["content"]) for turn in chat.turns]
        # Both: header -> characters from where a turn begins (ends) to its first text (to that of the next turn).
        self.before_begin: dict[tuple, dict[str, int]] = {}
        self.after_end: dict[tuple, dict[str, int]] = {}
        self.tails: set[str] = set()  # the text between the last text of a turn and the border

    def find_begin(self, i: int) -> int | None:
        """Return where turn `i` begins after its header, None if no known header stands there."""
        return _find_before(self.text, self.places.begins.get(i), self._headers_before(i))

    def find_end(self, i: int) -> int | None:
        """Return where turn `i` ends, None if no known header of the next turn stands there."""
        if i == len(self.roles) - 1:
            return len(self.text)
        return _find_before(self.text, self.places.begins.get(i + 1), self._headers_after(i))

    def ends_as_before(self, i: int, end: int) -> bool:
        """Return whether turn `i` ends as a turn that was rendered; those with calls may end with numbers."""
        has_calls = any(self.chat.turns[i].get(name) for name in CALLS)
        return has_calls or self._tail(i, end) in self.tails

    def can_learn(self, i: int) -> bool:
        """Return False for turn `i` if the template seems to write another header in each turn."""
        return i in self.places.begins and len(self._headers_before(i)) + len(self._headers_after(i)) <= FEW_TURNS

    def learn(self, span: Span, border: int) -> None:
        """Remember the headers of a rendered turn; the turn before it ends at `border`."""
        first_text = self.places.begins[span.turn]
        next_text = self.places.begins.get(span.turn + 1)
        self.tails.add(self._tail(span.turn, span.end))
        self._headers_before(span.turn)[self.text[border:first_text]] = first_text - span.begin
        if next_text is not None:
            self._headers_after(span.turn)[self.text[span.end : next_text]] = next_text - span.end

    def _headers_before(self, i: int) -> dict[str, int]:
        key = (*self.roles[max(0, i - 1) : i + 1], self.spaces[i])
        return self.before_begin.setdefault(key, {})

    def _headers_after(self, i: int) -> dict[str, int]:
        key = (*self.roles[i : i + 2], *self.spaces[i + 1 : i + 2])
        return self.after_end.setdefault(key, {})

    def _tail(self, i: int, end: int) -> str:
        return self.text[self.places.ends.get(i, 0) : end].strip()


def _find_before(text: str, first_text: int | None, headers: dict[str, int]) -> int | None:
    """Return where the longest header before `first_text` says that the turn begins; None if none stands there."""
    if first_text is None:
        return None
    for header in sorted(headers, key=len, reverse=True):
        if text.endswith(header, 0, first_text):
            return first_text - headers[header]
    return None


def _spaces_before(content: object) -> str:
    """Return the spaces and line breaks that a text begins with; none if it has nothing else."""
    if not isinstance(content, str):
        return ""
    return content[: content.index(content.strip())]
