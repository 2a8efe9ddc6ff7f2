"""The characters of each assistant turn in a rendered chat: marked by the template, or found by rendering beginnings.

Tests: tests/engine/text/test_chat.py.
"""

import re
from typing import NamedTuple

from engine.text.chat_texts import Render, Text, ways_to_write
from engine.text.chat_turns import CALLS, REASONING, Chat

GENERATION = re.compile(r"\{%(-?)\s*generation\s*(-?)%\}")  # as transformers finds it
END_GENERATION = re.compile(r"\{%(-?)\s*endgeneration\s*(-?)%\}")
GENERATED = re.compile("\ufdd3(.*?)\ufdd4", re.DOTALL)
MARK = "\u2042content\u2042"  # replaces the assistant's content, to find where a template writes it
OTHER_TEMPLATE = (
    "give --chat_template NAME with one of configs/chat_templates, or FILE with a plain template or one that marks them "
    "with {% generation %}"
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


def rendered_spans(render: Render, chat: Chat, rendered: str, texts: list[Text]) -> list[Span]:
    """Return the span of each assistant turn that is trained on: after its header, to the header of the next turn.

    Raise ValueError for a template that changes earlier turns when later ones follow, or writes a part of a turn
    elsewhere. `texts`: see find_texts. Each turn is rendered, so time grows with the square of the turns."""
    answers = [i for i, trained in enumerate(chat.is_trained) if trained]
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
        raise ValueError(
            f"turn {i} of the assistant does not begin as its prompt ends, {generation_prompt!r}: give its reasoning, which "
            "the prompt may open, or --chat_template FILE whose prompt is what stands before its words"
        )
    return Span(len(before), len(after), i)


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
