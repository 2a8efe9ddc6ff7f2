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
    "give --chat_template FILE with a plain template, or one that marks them with {% generation %}, or train on the last "
    "turn only, by `train: false` in the earlier ones"
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
            "what stands between {% generation %} and {% endgeneration %} cannot be found: use them once a turn"
        )
    found = [(match.start() - 2 * k, match.end() - 2 * k - 2) for k, match in enumerate(GENERATED.finditer(marked))]
    answers = [i for i, turn in enumerate(chat.turns) if turn["role"] == "assistant"]
    if len(answers) == len(found):
        spans = [Span(*bounds, i) for bounds, i in zip(found, answers, strict=True)]
        return [span for span in spans if chat.is_trained[span.turn]]
    trained = [chat.is_trained[i] for i in answers]
    if not all(trained):
        raise ValueError(
            f"turn {answers[trained.index(False)]} is not to be trained on, but the chat template marks {len(found)} parts of "
            f"{len(answers)} turns of the assistant, so it is not known which: use {{% generation %}} once a turn"
        )
    return [Span(*bounds, -1) for bounds in found]


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
    said = {span.turn: rendered[span.begin : span.end] for span in spans}
    for text in texts:
        if text.turn in said and not any(way in said[text.turn] for way in ways_to_write(text.text)):
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
        opens = "<think>" in generation_prompt and "</think>" not in generation_prompt
        takes_reasoning = opens and MARK in render([*chat.turns[:i], chat.turns[i] | {"reasoning_content": MARK}])
        hint = ", or give each turn its reasoning_content, which the prompt opens" if takes_reasoning else ""
        raise ValueError(
            f"turn {i} of the assistant does not begin with the generation prompt {generation_prompt!r}, after which the "
            f"model answers: give --chat_template FILE whose prompt is what stands before its words{hint}"
        )
    return Span(len(before), len(after), i)


def _text_before(render: Render, earlier: list[dict], turn: dict, after: str) -> tuple[str, str]:
    """Return the text before the assistant's content, header included, and the template's generation prompt.

    The prompt is the header. Without one, MARK is all that the turn says, to find where its words begin. `after` is the
    text up to the end of the turn."""
    asked = earlier or [{"role": "user", "content": "x"}]  # a template cannot render an empty chat
    plain = render(asked, add_generation_prompt=False)
    prompt = render(asked, add_generation_prompt=True)
    header = prompt.removeprefix(plain)
    only_mark = {key: value for key, value in turn.items() if key not in (*REASONING, *CALLS)} | {"content": MARK}
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
    return (begin if header else begin.rstrip(" ")), header  # else the first token may include the space before it


# ---- chats of many turns ---------------------------------------------------------------------------------------------


def _repeated_spans(render: Render, chat: Chat, text: str, places: Places, answers: Sequence[int]) -> list[Span] | None:
    """Return the spans of many turns in a few renderings, or None if they cannot be found so.

    Between the border of two turns and the first text of the second one stands a header, the same for all turns of that
    role after that role, but for spaces that the text itself begins with. It is learned by rendering the chat up to the first such turn, and looked for before the first
    texts of the others. A turn that ends in another way than those before, and the turns in the middle and at the end,
    where a template would differ, are rendered as well."""
    first_texts = places.begins
    if not first_texts:
        return None
    roles = [turn["role"] for turn in chat.turns]
    last = len(roles) - 1
    spaces = [_spaces_before(turn["content"]) for turn in chat.turns]
    headers: dict[tuple, dict[str, int]] = {}  # header -> characters from its turn's begin to its first text
    borders: dict[tuple, dict[str, int]] = {}
    tails: set[str] = set()  # what stands between the last text of a turn and the border
    to_render = {answers[len(answers) // 2], answers[-1]} if answers else set()
    spans = []
    for i in answers:
        known_headers = headers.setdefault((*roles[max(0, i - 1) : i + 1], spaces[i]), {})
        known_borders = borders.setdefault((*roles[i : i + 2], *spaces[i + 1 : i + 2]), {})
        begin = _find_before(text, first_texts.get(i), known_headers)
        end = len(text) if i == last else _find_before(text, first_texts.get(i + 1), known_borders)
        has_calls = any(chat.turns[i].get(name) for name in CALLS)  # they may end with numbers
        has_other_tail = not has_calls and text[places.ends.get(i, 0) : end].strip() not in tails
        if begin is None or end is None or has_other_tail or i in to_render:
            span = _rendered_span(render, chat, text, i)
            if begin not in (None, span.begin) or end not in (None, span.end):
                return None
            begin, end = span.begin, span.end
            tails.add(text[places.ends.get(i, 0) : end].strip())
            if len(known_headers) + len(known_borders) > FEW_TURNS or i not in first_texts:
                return None
            border = len(render(chat.turns[:i])) if i else 0
            known_headers[text[border : first_texts[i]]] = first_texts[i] - begin
            if i < last and i + 1 in first_texts:
                known_borders[text[end : first_texts[i + 1]]] = first_texts[i + 1] - end
        spans.append(Span(begin, end, i))
    return spans


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
    return content[: content.index(content.strip())] if isinstance(content, str) else ""
