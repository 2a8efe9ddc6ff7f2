"""Chat templates that ship in configs/chat_templates/, and which of them writes as a tokenizer's own template does.

Tests: tests/engine/rows/test_template_families.py and tests/addons/data/test_stock_templates.py.
"""

import functools
import re
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

from engine.config.paths import REPOSITORY
from engine.rows.chat_turns import Chat, read_chat
from engine.rows.find_targets import DATE, AnswerPrompts, find_targets, with_fixed_date
from engine.rows.render_chat import marks_turns, renderer

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


def family_files() -> dict[str, Path]:
    """Return the templates that ship, by name."""
    return {file.stem: file for file in sorted(FOLDER.glob("*.jinja"))}


@functools.lru_cache
def _templates(files: tuple[Path, ...]) -> dict[str, str]:
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


def _write_probes(tokenizer: Any, template: str | None) -> list[str | None]:
    """Return each probe, and last the prompt of a question, as `template`, or the tokenizer's own one, writes it.

    None if it refuses the probe."""
    texts: list[str | None] = []
    for probe in [*PROBES, Probe([USER])]:
        options = {} if len(texts) < len(PROBES) else {"add_generation_prompt": True}
        try:
            render = renderer(tokenizer, Chat(probe.turns, [], probe.tools), template, {})
            texts.append(render(probe.turns, **options))
        except Exception:  # whatever a template raises
            texts.append(None)
    return texts


def family_of(tokenizer: Any) -> str | None:
    """Return the name of the template that writes chats as the tokenizer's own one does; None if there is none.

    Empty reasoning in earlier turns may differ, and the date if the own template writes that of today. A chat that the
    own template refuses, or of which it hides a part, only decides between templates that are equal in all others; so
    does the generation prompt."""
    *own, prompt = _write_probes(tokenizer, None)
    if own[0] is None:
        return None
    opens_reasoning = (prompt or "").rstrip().endswith("<think>")
    has_date = "strftime_now" in tokenizer.get_chat_template()

    def comparable(probe: Probe, text: str) -> str:
        text = text.replace(ESCAPED_QUOTE, '"')
        if has_date:
            text = DATE.sub("DATE", text)
        return EMPTY_REASONING.sub("", text) if probe.some_reasoning_differs or opens_reasoning else text

    by_name = (tokenizer.bos_token, tokenizer.eos_token)
    markers = [marker for marker in MARKER.findall(own[0]) if marker not in by_name]
    best, most = None, 0
    for family, template in _templates(tuple(family_files().values())).items():
        if not all(marker in template for marker in markers):  # compiling each template takes longer
            continue
        *others, other_prompt = _write_probes(tokenizer, template)
        count = int(other_prompt == prompt)
        for probe, text, other in zip(PROBES, own, others, strict=True):
            if text is None:
                continue
            if other is not None and comparable(probe, other) == comparable(probe, text):
                count += 1
            elif all(words in text for words in probe.says):
                count = -len(PROBES)  # it differs in a chat that the own one writes whole
        if count > most:
            best, most = family, count
    return best


@functools.lru_cache
def nearest_family(tokenizer: Any, template: str) -> str:
    """Return the family of a tokenizer, or the template that writes a question and its answer most like `template`."""

    def written_by(template: str) -> str:
        texts = _write_probes(tokenizer, template)
        return f"{texts[0]}{texts[-1]}"

    own = written_by(template)
    families = _templates(tuple(family_files().values()))
    return family_of(tokenizer) or max(
        families, key=lambda name: SequenceMatcher(None, own, written_by(families[name]), False).ratio()
    )


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
