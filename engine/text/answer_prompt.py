"""The prompt that an assistant answers, rendered as inference does: for rows, evaluation, samples, chat and predict.

Tests: tests/engine/text/test_answer_prompt.py.
"""

import datetime
import functools
import json
import re
from typing import Any

from engine.text.chat_spans import Span
from engine.text.chat_texts import Render, choose_render
from engine.text.chat_turns import CALLS, REASONING, Chat
from engine.text.template_variables import THINKING, variables_of

SWITCH = re.compile(r"""['"](/\w+)['"]""")  # what a template may look for in a text, such as '/no_think'
CLOSED_REASONING = re.compile(r"</think>\s*$|\[/THINK\]\s*$|<channel\|>\s*$")
DAY = datetime.date(2025, 8, 5)
DATE = re.compile(r"\b(\d{1,2} [^\W\d]+ \d{4}|\d{4}-\d{2}-\d{2})\b")
QUESTION = [{"role": "user", "content": "x"}]


def with_fixed_date(template: str) -> str:
    """Return a template in which today is always the same day, so that rows do not depend on when they are prepared."""
    if "strftime_now" not in template:
        return template
    parts = "".join(f" | replace('%{letter}', '{DAY.strftime('%' + letter)}')" for letter in "aAbBdejmpyY")
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{parts} }}}}{{%- endmacro -%}}\n{template}"


def renderer(tokenizer: Any, chat: Chat, template: str | None, variables: dict[str, Any]) -> Render:
    """Return a function that renders turns of a chat with a template; None: the tokenizer's own, which final/ has."""
    apply = functools.partial(
        tokenizer.apply_chat_template, tokenize=False, tools=chat.tools, chat_template=template, **variables
    )
    return choose_render(apply, chat)


def answer_prompt(tokenizer: Any, chat: Chat, variables: dict[str, Any]) -> str:
    """Return the text after which the assistant answers a chat."""
    return renderer(tokenizer, chat, None, variables)(chat.turns, add_generation_prompt=True)


def written_by_prompt(render: Render, turns: list[dict]) -> str:
    """Return what the generation prompt adds after these turns: the beginning of an answer."""
    turns = turns or QUESTION  # a template cannot render an empty chat
    plain = render(turns, add_generation_prompt=False)
    prompt = render(turns, add_generation_prompt=True)
    both = zip(plain, prompt, strict=False)
    length = next((i for i, (one, other) in enumerate(both) if one != other), min(len(plain), len(prompt)))
    return prompt[length:]


class AnswerPrompts:
    """The prompts of a chat's answers, by the tokenizer's own template, which final/ has.

    `template`: writes the chat in training; the same one, or one that trains every turn."""

    def __init__(self, tokenizer: Any, chat: Chat, template: str, variables: dict[str, Any]):
        self.tokenizer = tokenizer
        self.chat = chat
        self.variables = variables
        self.own = with_fixed_date(tokenizer.get_chat_template(tools=chat.tools))
        self.render_row = renderer(tokenizer, chat, template, variables)
        self.render = self.render_row if template == self.own else renderer(tokenizer, chat, self.own, variables)
        self._switches = SWITCH.findall(self.own)
        self._beginnings: dict[tuple, str] = {}

    def prompt(self, i: int) -> str:
        """Return the text after which turn `i` is the answer."""
        return self.render(self.chat.turns[:i], add_generation_prompt=True)

    def beginning(self, i: int) -> str:
        """Return the beginning of turn `i` that its prompt has already written.

        Of a long chat few are rendered: a prompt depends on what the template looks for in texts, and on the turn before."""
        before = self.chat.turns[:i]
        last = before[-1] if before else {}
        found = [tuple(switch in str(turn["content"]) for switch in self._switches) for turn in before]
        found = [each for each in found if any(each)]  # a template may read all of them, or the last one
        key = (last.get("role"), *(bool(last.get(name)) for name in CALLS), frozenset(found), *found[-1:])
        if key not in self._beginnings:
            try:
                self._beginnings[key] = written_by_prompt(self.render, before)
            except Exception:  # the own template refuses the chat, so inference cannot render it, either
                self._beginnings[key] = written_by_prompt(self.render_row, before)
        return self._beginnings[key]

    def skips_reasoning(self, i: int) -> bool:
        """Return whether turn `i` has no reasoning, though a model can reason after its prompt."""
        turn = self.chat.turns[i]
        if any(turn.get(name) for name in REASONING) or "</think>" in str(turn["content"]):
            return False
        is_closed = CLOSED_REASONING.search(self.beginning(i))
        return not is_closed and asks_for_reasoning(self.tokenizer, self.own, json.dumps(self.variables))

    def follow(self, text: str, spans: list[Span]) -> bool:
        """Return whether the last target stands in the text after its prompt of inference, but for dates."""
        if not spans or spans[-1].turn < 1:  # the template alone knows the turn, or the assistant speaks first
            return True
        try:
            prompt = self.prompt(spans[-1].turn)
        except Exception:  # the own template refuses the chat, so inference cannot render it, either
            return True
        return text.startswith(prompt) or DATE.sub("", text).startswith(DATE.sub("", prompt))

    def spans_after_prompts(self, text: str, spans: list[Span]) -> list[Span]:
        """Return the spans of turns, marked by the template, less what their prompts have written.

        Raise ValueError if a turn begins otherwise."""
        after = []
        end_before = 0
        for span in spans:
            if span.turn < 0:  # the template alone knows which turns it marks
                return spans
            beginning = self.beginning(span.turn)
            start = max(span.begin - len(beginning), 0)  # where the template marks a turn from its words on
            if not text.startswith(beginning, start):
                start = text.rfind(beginning, end_before, span.begin + len(beginning))
            if start < 0:
                self._refuse(span.turn, beginning)
            after.append(span._replace(begin=max(span.begin, start + len(beginning))))
            end_before = span.end
        return after

    def _refuse(self, i: int, beginning: str) -> None:
        switches = sorted(variables_of(self.tokenizer, self.own) & THINKING)
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
