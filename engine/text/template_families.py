"""Chat templates that ship in configs/chat_templates/, and which of them writes as a tokenizer's own template does.

Tests: tests/engine/text/test_template_families.py and tests/addons/data/test_stock_templates.py.
"""

import functools
import re
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

from engine.config.paths import REPOSITORY
from engine.text.chat_turns import Chat, read_chat
from engine.text.find_targets import DATE, AnswerPrompts, find_targets, with_fixed_date
from engine.text.render_chat import marks_turns, renderer

FOLDER = REPOSITORY / "configs" / "chat_templates"
EMPTY_REASONING = re.compile(r"<think>\s*</think>\s*")
ESCAPED_QUOTE = "&#34;"  # jinja escapes where a template joins text with one that it calls safe
MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")  # such as <|im_start|> and [INST]


class Probe(NamedTuple):
    """A chat by which templates are compared. `says`: words that a template writes unless it hides a part of the chat.

    `some_reasoning_differs`: the own template may write an empty block of reasoning in the last turn only."""

    turns: list[dict]
    tools: list[dict] | None = None
    says: tuple[str, ...] = ()
    some_reasoning_differs: bool = False


USER = {"role": "user", "content": "What is in the harbor?"}
ANSWER = {"role": "assistant", "content": "Seven green boats."}
SYSTEM = {"role": "system", "content": "Answer a sailor."}
REASONED = ANSWER | {"reasoning_content": "Count the masts first."}
MORE = [{"role": "user", "content": "And behind it?"}, {"role": "assistant", "content": "Only the lighthouse."}]
FUNCTION = {
    "name": "count_boats",
    "description": "Counts boats.",
    "parameters": {
        "type": "object",
        "properties": {"color": {"type": "string"}, "far": {"type": "boolean"}},
        "required": ["color"],
    },
}
CALL = {
    "id": "abcdef123",  # Mistral's templates want nine characters
    "type": "function",
    "function": {"name": "count_boats", "arguments": {"color": "green", "far": True}},
}
OTHER_CALL = {
    "id": "abcdef456",
    "type": "function",
    "function": {"name": "count_boats", "arguments": {"color": "purple"}},
}
RESULT = {"role": "tool", "name": "count_boats", "tool_call_id": "abcdef123", "content": "seven of them"}
OTHER_RESULT = {"role": "tool", "name": "count_boats", "tool_call_id": "abcdef456", "content": "none at all"}
TOOLS = [{"type": "function", "function": FUNCTION}]


def _calling(*calls: dict) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": [*calls]}


PROBES = [
    Probe([USER, ANSWER]),
    Probe([USER, ANSWER, *MORE], some_reasoning_differs=True),
    Probe([SYSTEM, USER, ANSWER], says=(SYSTEM["content"],)),
    Probe(
        [USER, _calling(CALL), RESULT, ANSWER],
        tools=TOOLS,
        says=("Counts boats", "green", "seven of them"),
        some_reasoning_differs=True,
    ),
    Probe(
        [USER, _calling(CALL, OTHER_CALL), RESULT, OTHER_RESULT, ANSWER],
        tools=TOOLS,
        says=("Counts boats", "green", "purple", "seven of them", "none at all"),
        some_reasoning_differs=True,
    ),
    Probe([USER, REASONED], says=(REASONED["reasoning_content"],)),
]
PROMPT = Probe([USER])


def family_files() -> dict[str, Path]:
    """Return the templates that ship, by name."""
    return {file.stem: file for file in sorted(FOLDER.glob("*.jinja"))}


def family_of(tokenizer: Any) -> str | None:
    """Return the name of the template that writes chats as the tokenizer's own one does; None if there is none.

    Empty reasoning in earlier turns may differ, and the date if the own template writes that of today. A chat that the
    own template refuses, or of which it hides a part, only decides between templates that are equal in all others; so
    does the generation prompt."""
    own = _Own(tokenizer)
    if own.texts[0] is None:
        return None
    equal_probes = {}
    for family, template in _templates(tuple(family_files().values())).items():
        if own.may_be(template):
            equal_probes[family] = own.count_equal(template)
    best = max(equal_probes, key=lambda family: equal_probes[family], default=None)
    return best if best is not None and equal_probes[best] else None


def trains_probes(tokenizer: Any) -> bool:
    """Return whether the tokenizer's own template marks what is trained of chats with turns of the system, tools and
    reasoning."""
    for probe in PROBES:
        try:
            chat = read_chat(probe.turns, probe.tools)
            template = with_fixed_date(tokenizer.get_chat_template(tools=probe.tools))
            _, spans = find_targets(AnswerPrompts(tokenizer, chat, template, {}))
        except Exception:  # whatever a template raises
            return False
        if not marks_turns(template) or len(spans) != sum(chat.is_trained):
            return False
    return True


def nearest_family(tokenizer: Any) -> str:
    """Return the name of the template that writes a short chat most like the tokenizer's own one."""
    own, *_ = [text for text in (_render(tokenizer, probe, None) for probe in PROBES) if text] or [""]
    families = _templates(tuple(family_files().values()))

    def likeness(name: str) -> float:
        return SequenceMatcher(None, own, _render(tokenizer, PROBES[0], families[name]) or "").ratio()

    return max(families, key=likeness)


class _Own:
    """What a tokenizer's own template writes, to compare it with others."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.texts = [_render(tokenizer, probe, None) for probe in PROBES]
        self.prompt = _render(tokenizer, PROMPT, None, add_generation_prompt=True)
        self.prompt_opens_reasoning = (self.prompt or "").rstrip().endswith("<think>")
        self.has_date = self.texts[0] is not None and "strftime_now" in tokenizer.get_chat_template()

    def may_be(self, template: str) -> bool:
        """Return whether the source of a template has all markers of the text: compiling each template takes longer."""
        by_name = (self.tokenizer.bos_token, self.tokenizer.eos_token)
        return all(marker in template for marker in MARKER.findall(self.texts[0] or "") if marker not in by_name)

    def count_equal(self, template: str) -> int:
        """Return how many probes a template writes as the own one; 0 if it differs in one that the own one writes whole.

        Writing the same generation prompt counts as one more."""
        count = 0
        for probe, text in zip(PROBES, self.texts, strict=True):
            if text is None:
                continue
            other = _render(self.tokenizer, probe, template)
            if other is not None and self._comparable(probe, other) == self._comparable(probe, text):
                count += 1
            elif all(words in text for words in probe.says):
                return 0
        if _render(self.tokenizer, PROMPT, template, add_generation_prompt=True) == self.prompt:
            count += 1
        return count

    def _comparable(self, probe: Probe, text: str) -> str:
        """Return a text without what may differ."""
        text = text.replace(ESCAPED_QUOTE, '"')
        if self.has_date:
            text = DATE.sub("DATE", text)
        if probe.some_reasoning_differs or self.prompt_opens_reasoning:
            text = EMPTY_REASONING.sub("", text)
        return text


def _render(tokenizer: Any, probe: Probe, template: str | None, **options: Any) -> str | None:
    """Return a probe as `template`, or the tokenizer's own one, writes it; None if it refuses the probe."""
    try:
        return renderer(tokenizer, Chat(probe.turns, [], probe.tools), template, {})(probe.turns, **options)
    except Exception:  # whatever a template raises
        return None


@functools.lru_cache
def _templates(files: tuple[Path, ...]) -> dict[str, str]:
    """Return the text of each template, by the name of its file."""
    return {file.stem: file.read_text(encoding="utf-8") for file in files}
