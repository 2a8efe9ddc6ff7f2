"""Chat templates that ship in configs/chat_templates/, and which of them writes as a tokenizer's own template does.

Tests: tests/engine/text/test_template_families.py and tests/addons/data/test_stock_templates.py.
"""

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

from engine.config.paths import REPOSITORY
from engine.text.chat import render_chat
from engine.text.chat_texts import choose_render
from engine.text.chat_turns import Chat, read_chat

FOLDER = REPOSITORY / "configs" / "chat_templates"
DATE = re.compile(r"\b(\d{1,2} [^\W\d]+ \d{4}|\d{4}-\d{2}-\d{2})\b")
EMPTY_REASONING = re.compile(r"<think>\s*</think>\s*")
MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")  # such as <|im_start|> and [INST]


class Probe(NamedTuple):
    """A chat by which templates are compared. `says`: what a template writes that hides none of it."""

    turns: list[dict]
    tools: list[dict] | None
    says: tuple[str, ...]


USER = {"role": "user", "content": "What is in the harbor?"}
ANSWER = {"role": "assistant", "content": "Seven green boats."}
SYSTEM = {"role": "system", "content": "Answer a sailor."}
REASONED = ANSWER | {"reasoning_content": "Count the masts first."}
MORE = [{"role": "user", "content": "And behind it?"}, {"role": "assistant", "content": "Only the lighthouse."}]
FUNCTION = {
    "name": "count_boats",
    "description": "Counts boats.",
    "parameters": {"type": "object", "properties": {"color": {"type": "string"}}, "required": ["color"]},
}
CALL = {
    "id": "abcdef123",  # Mistral's templates want nine characters
    "type": "function",
    "function": {"name": "count_boats", "arguments": {"color": "green"}},
}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "count_boats", "tool_call_id": "abcdef123", "content": "seven of them"}

PROBES = {
    "one turn": Probe([USER, ANSWER], None, ()),
    "several turns": Probe([USER, ANSWER, *MORE], None, ()),
    "system": Probe([SYSTEM, USER, ANSWER], None, (SYSTEM["content"],)),
    "tools": Probe(
        [USER, CALLS, RESULT, ANSWER], [{"type": "function", "function": FUNCTION}], ("Counts boats", "seven of them")
    ),
    "reasoning": Probe([USER, REASONED], None, (REASONED["reasoning_content"],)),
}
REASONING_TWICE = Probe([USER, REASONED, MORE[0], MORE[1] | {"reasoning_content": "Look up."}], None, ())


def family_files() -> dict[str, Path]:
    """Return the templates that ship, by name."""
    return {file.stem: file for file in sorted(FOLDER.glob("*.jinja"))}


def family_of(tokenizer: Any) -> str | None:
    """Return the name of the template that writes chats as the tokenizer's own one does; None if there is none.

    Empty reasoning in earlier turns may differ, and the date if the own template writes that of today. A chat that the
    own template refuses, or of which it hides a part, only decides between templates that are equal in all others."""
    own = {name: _render(tokenizer, probe, None) for name, probe in PROBES.items()}
    if own["one turn"] is None:
        return None
    has_date = "strftime_now" in _own_template(tokenizer, None)
    equal_probes = {}
    for family, template in _templates(tuple(family_files().values())).items():
        if _has_markers(template, own["one turn"], tokenizer):
            equal_probes[family] = _count_equal(tokenizer, template, own, has_date)
    best = max(equal_probes, key=lambda family: equal_probes[family], default=None)
    return best if best is not None and equal_probes[best] else None


def trains_all_turns(tokenizer: Any) -> bool:
    """Return whether the tokenizer's own template trains chats of several turns, with a system's turn, tools and
    reasoning."""
    for probe in (*PROBES.values(), REASONING_TWICE):
        try:
            chat = read_chat(probe.turns, probe.tools)
            render_chat(tokenizer, chat, _own_template(tokenizer, probe.tools))
        except Exception:  # of the template's own, too
            return False
    return True


def _count_equal(tokenizer: Any, template: str, own: dict[str, str | None], has_date: bool) -> int:
    """Return how many probes `template` writes as `own`; 0 if it differs in one that `own` writes completely."""
    count = 0
    for name, probe in PROBES.items():
        text = own[name]
        if text is None:
            continue
        other = _render(tokenizer, probe, template)
        is_equal = other is not None and _comparable(name, text, has_date) == _comparable(name, other, has_date)
        if not is_equal and all(part in text for part in probe.says):
            return 0
        count += is_equal
    return count


def _comparable(probe: str, text: str, has_date: bool) -> str:
    """Return a text without what may differ between a family's template and the tokenizer's own one."""
    if has_date:
        text = DATE.sub("DATE", text)
    if probe in ("several turns", "tools"):  # the own template may write it in the last turn only
        text = EMPTY_REASONING.sub("", text)
    return text


def _render(tokenizer: Any, probe: Probe, template: str | None) -> str | None:
    """Return a probe as `template`, or the tokenizer's own one, writes it; None if it refuses the probe."""
    chat = Chat(probe.turns, [], probe.tools)
    try:
        render = choose_render(
            functools.partial(tokenizer.apply_chat_template, tokenize=False, tools=probe.tools, chat_template=template),
            chat,
        )
        return render(chat.turns)
    except Exception:  # whatever a template raises
        return None


def _has_markers(template: str, text: str, tokenizer: Any) -> bool:
    """Return whether the source of a template has all markers of a text: compiling all templates would take longer."""
    by_name = (tokenizer.bos_token, tokenizer.eos_token)
    return all(marker in template for marker in MARKER.findall(text) if marker not in by_name)


def _own_template(tokenizer: Any, tools: list | None) -> str:
    return tokenizer.get_chat_template(tools=tools)


@functools.lru_cache
def _templates(files: tuple[Path, ...]) -> dict[str, str]:
    """Return the text of each template, by the name of its file."""
    return {file.stem: file.read_text(encoding="utf-8") for file in files}
