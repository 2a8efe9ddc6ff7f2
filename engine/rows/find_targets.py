"""What of a chat is a target: each answer of the assistant, less what its prompt at inference has already written.

Tests: tests/engine/rows/test_answer_prompt.py and tests/engine/rows/test_chat.py.
"""

import datetime
import functools
import json
import re
from typing import Any, NamedTuple

from engine.rows.chat_turns import CALLS, REASONING, Chat
from engine.rows.render_chat import (
    QUESTION,
    WrittenChat,
    check_inside,
    check_written,
    marks_turns,
    renderer,
    write_chat,
)
from engine.rows.template_variables import THINKING, variables_of

SWITCH = re.compile(r"""['"](/\w+)['"]""")  # what a template may look for in a text, such as '/no_think'
CLOSED_REASONING = re.compile(r"</think>\s*$|\[/THINK\]\s*$|<channel\|>\s*$")
ANSWER = {"role": "assistant", "content": "Jv3w"}
DAY = datetime.date(2025, 8, 5)
DATE = re.compile(r"\b(\d{1,2} [^\W\d]+ \d{4}|\d{4}-\d{2}-\d{2})\b")


class Span(NamedTuple):
    """The characters of an assistant's turn, without its header; `turn` is -1 if the template alone knows."""

    begin: int
    end: int
    turn: int


def with_fixed_date(template: str) -> str:
    """Return a template in which today is always the same day, so that rows do not depend on when they are prepared."""
    if "strftime_now" not in template:
        return template
    parts = "".join(f" | replace('%{letter}', '{DAY.strftime('%' + letter)}')" for letter in "aAbBdejmpyY")
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{parts} }}}}{{%- endmacro -%}}\n{template}"


def answer_prompt(tokenizer: Any, chat: Chat, variables: dict[str, Any]) -> str:
    """Return the text after which the assistant answers a chat."""
    return renderer(tokenizer, chat, None, variables)(chat.turns, add_generation_prompt=True)


def beginning_of_answer(tokenizer: Any, variables: dict[str, Any]) -> str:
    """Return what the prompt of an answer adds to a question; empty for a template that refuses a question alone."""
    chat = Chat(QUESTION, [False], None)
    try:
        return AnswerPrompts(tokenizer, chat, tokenizer.get_chat_template(), variables).beginning(1)
    except Exception:  # whatever a template raises
        return ""


def block_before_words(tokenizer: Any, template: str | None, variables: dict[str, Any]) -> str:
    """Return what an answer without reasoning has before its words, such as an empty block of reasoning."""
    chat = Chat([*QUESTION, ANSWER], [False, True], None)
    try:
        template = with_fixed_date(template or tokenizer.get_chat_template())
        text, [span] = find_targets(AnswerPrompts(tokenizer, chat, template, variables))
    except Exception:  # whatever a template raises
        return ""
    return text[span.begin : span.end].partition(ANSWER["content"])[0]


class AnswerPrompts:
    """The prompts of a chat's answers, by the tokenizer's own template, which final/ has.

    `template`: writes the chat in training; the same one, or one that trains every turn."""

    def __init__(self, tokenizer: Any, chat: Chat, template: str, variables: dict[str, Any]):
        self.tokenizer = tokenizer
        self.chat = chat
        self.template = template
        self.variables = variables
        self.own = with_fixed_date(tokenizer.get_chat_template(tools=chat.tools))
        self.render_row = renderer(tokenizer, chat, template, variables)
        self.render = self.render_row if template == self.own else renderer(tokenizer, chat, self.own, variables)
        self._switches = SWITCH.findall(self.own)
        self._prompts: dict[int, str] = {}
        self._beginnings: dict[tuple, str] = {}

    def prompt(self, i: int) -> str:
        """Return the text after which turn `i` is the answer; for the first turn, that after a question."""
        if i not in self._prompts:
            self._prompts[i] = self.render(self.chat.turns[:i] or QUESTION, add_generation_prompt=True)
        return self._prompts[i]

    def beginning(self, i: int) -> str:
        """Return the beginning of turn `i` that its prompt has already written.

        Of a long chat few are rendered: a prompt depends on what the template looks for in texts, and on the turn before."""
        before = self.chat.turns[:i]
        last = before[-1] if before else {}
        found = [tuple(switch in str(turn["content"]) for switch in self._switches) for turn in before]
        found = [each for each in found if any(each)]  # a template may read all of them, or the last one
        key = (last.get("role"), *(bool(last.get(name)) for name in CALLS), frozenset(found), *found[-1:])
        if key not in self._beginnings:
            turns = before or QUESTION  # a template cannot render an empty chat
            try:
                plain, prompt = self.render(turns), self.prompt(i)
            except Exception:  # the own template refuses the chat, so inference cannot render it, either
                plain, prompt = self.render_row(turns), self.render_row(turns, add_generation_prompt=True)
            self._beginnings[key] = _added(plain, prompt)
        return self._beginnings[key]

    def skips_reasoning(self, i: int) -> bool:
        """Return whether turn `i` has no reasoning, though a model can reason after its prompt."""
        turn = self.chat.turns[i]
        if any(turn.get(name) for name in REASONING) or "</think>" in str(turn["content"]):
            return False
        asks = asks_for_reasoning(self.tokenizer, self.own, json.dumps(self.variables))
        return asks and not CLOSED_REASONING.search(self.beginning(i))

    def follow(self, text: str, spans: list[Span]) -> bool:
        """Return whether the last target stands in the text after its prompt of inference, but for dates."""
        if not spans or spans[-1].turn < 1:  # the template alone knows the turn, or the assistant speaks first
            return True
        try:
            prompt = self.prompt(spans[-1].turn)
        except Exception:  # the own template refuses the chat, so inference cannot render it, either
            return True
        return text.startswith(prompt) or DATE.sub("", text).startswith(DATE.sub("", prompt))

    def between(self, text: str, spans: list[Span]) -> str:
        """Return what stands between the prompt of inference and the last target: "" unless a template leaves it out."""
        if not spans or spans[-1].turn < 1:
            return ""
        try:
            prompt = self.prompt(spans[-1].turn)
        except Exception:  # the own template refuses the chat, so inference cannot render it, either
            return ""
        return text[len(prompt) : spans[-1].begin].strip() if text.startswith(prompt) else ""


def _added(plain: str, prompt: str) -> str:
    """Return what stands in a prompt after the text that it has in common with the same turns without it."""
    if prompt.startswith(plain):
        return prompt[len(plain) :]
    both = zip(plain, prompt, strict=False)  # a template may end a text that has no prompt
    return prompt[next((i for i, (one, other) in enumerate(both) if one != other), len(prompt)) :]


# ---- targets ---------------------------------------------------------------------------------------------------------


def find_targets(prompts: AnswerPrompts, with_history_of_inference: bool = False) -> tuple[str, list[Span]]:
    """Return a chat as text, and the characters of each assistant turn that is trained on: what follows its prompt.

    `with_history_of_inference`: what stands before the only trained turn, the last one, is the prompt that inference
    gives. Raise ValueError if the template does not write a part of the chat, or does not show where a turn begins and
    ends."""
    chat = prompts.chat
    written = write_chat(prompts.render_row, chat, prompts.template)
    text = written.text
    is_marked = marks_turns(prompts.template)
    check_written(chat, written)
    spans = _marked_spans(chat, written) if is_marked else _spans_of_beginnings(prompts, text)
    check_inside(written, {span.turn: span[:2] for span in spans if span.turn >= 0})
    if is_marked:
        spans = _after_prompts(prompts, text, spans)
    if not with_history_of_inference or not spans or len(chat.turns) == 1:
        return text, spans
    prompt = prompts.prompt(len(chat.turns) - 1)
    if text.startswith(prompt):
        return text, spans
    history = Chat(chat.turns[:-1], [False] * (len(chat.turns) - 1), chat.tools, is_history=True)
    check_written(history, write_chat(prompts.render, history, prompts.own, prompt, add_generation_prompt=True))
    begin = spans[0].begin
    text = prompt + text[begin : spans[-1].end]
    shift = len(prompt) - begin
    return text, [Span(span.begin + shift, span.end + shift, span.turn) for span in spans]


def _marked_spans(chat: Chat, written: WrittenChat) -> list[Span]:
    """Return the spans between {% generation %} and {% endgeneration %}, of trained turns only."""
    spans = [Span(*span, -1) for span in written.generated]
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


def _after_prompts(prompts: AnswerPrompts, text: str, spans: list[Span]) -> list[Span]:
    """Return marked spans less what the prompts of their turns have written. Raise ValueError if a turn begins otherwise."""
    if not spans or spans[-1].turn < 0:  # the template alone knows which turns it marks
        return spans
    prompts.beginning(spans[-1].turn)  # first the last one, whose prompt is needed anyway
    after = []
    end_before = 0
    for span in spans:
        beginning = prompts.beginning(span.turn)
        start = max(span.begin - len(beginning), 0)  # where the template marks a turn from its words on
        if not text.startswith(beginning, start):
            start = text.rfind(beginning, end_before, span.begin + len(beginning))
        if start < 0:
            _refuse(prompts, span.turn)
        after.append(span._replace(begin=max(span.begin, start + len(beginning))))
        end_before = span.end
    return after


def _spans_of_beginnings(prompts: AnswerPrompts, text: str) -> list[Span]:
    """Return the span of each turn that is trained on, by rendering the chat up to it, for a template without marks.

    Each turn is rendered, so time grows with the square of the turns."""
    spans = []
    for i, turn in enumerate(prompts.chat.turns):
        if not prompts.chat.is_trained[i]:
            continue
        after = text if turn is prompts.chat.turns[-1] else prompts.render_row(prompts.chat.turns[: i + 1])
        if not text.startswith(after):
            raise ValueError(
                "the chat template changes earlier turns when later ones follow, so they cannot be trained in one "
                "sequence: give --chat_template NAME with one of configs/chat_templates, or FILE"
            )
        if i:
            prompt = prompts.prompt(i)
        else:  # the template may write something before it
            header = prompts.beginning(i)
            prompt = after[: max(after.find(header), 0)] + header
        if not after.startswith(prompt):
            _refuse(prompts, i)
        spans.append(Span(len(prompt), len(after), i))
    return spans


def _refuse(prompts: AnswerPrompts, i: int) -> None:
    beginning = prompts.beginning(i)
    switches = sorted(variables_of(prompts.tokenizer, prompts.own) & THINKING)
    if CLOSED_REASONING.search(beginning) and switches:
        fix = f"remove its reasoning, or give chat_template_kwargs {{{switches[0]}: true}}, of the run or the row"
    else:
        fix = "give --chat_template NAME or FILE with a template whose prompt is what stands before its words"
    raise ValueError(f"turn {i} of the assistant does not begin as its prompt ends, {beginning!r}: {fix}")


@functools.lru_cache
def asks_for_reasoning(tokenizer: Any, template: str, variables: str) -> bool:
    """Return whether the prompt of a template lets a model reason that can do without. `variables`: as JSON."""
    names = variables_of(tokenizer, template)
    if "reasoning_effort" in names:
        return True
    values = json.loads(variables)
    switches = names & THINKING

    def prompt(**others: Any) -> str:
        render = renderer(tokenizer, Chat(QUESTION, [False], None), template, values | others)
        return render(QUESTION, add_generation_prompt=True)

    try:
        opens = prompt()
        return opens.rstrip().endswith(("<think>", "[THINK]")) or any(
            prompt(**{name: False}) != opens for name in switches
        )
    except Exception:  # a template may want tools, or a turn of the system
        return False
