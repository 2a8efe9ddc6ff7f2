"""An independent look at the targets of a chat: its words are found in the text, and the header and end around them.

It knows nothing of how templates are rendered: only the marker before the first word of a turn, and the one after its
last word."""

import re
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from engine.text.chat import encode_chat
from engine.text.tokenize_and_pack import IGNORED

# ---- rows ------------------------------------------------------------------------------------------------------------

QUESTIONS = [{"role": "user", "content": "Where did uqone go?"}, {"role": "user", "content": "And uqtwo?"}]
ANSWERS = [{"role": "assistant", "content": "It went waone home."}, {"role": "assistant", "content": "watwo stayed."}]
REASONED = [
    ANSWERS[0] | {"reasoning_content": "Think roone first."},
    ANSWERS[1] | {"reasoning_content": "Then rotwo again."},
]
SYSTEM = {"role": "system", "content": "Say systone only."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "fnlookup",
            "description": "Looks up a name.",
            "parameters": {
                "type": "object",
                "properties": {"who": {"type": "string", "description": "The name."}},
                "required": ["who"],
            },
        },
    }
]
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "fnlookup", "arguments": {"who": "argone"}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "fnlookup", "tool_call_id": "abcdef123", "content": "resone found"}

ROWS = {
    "one turn": ([QUESTIONS[0], ANSWERS[0]], None),
    "several turns": ([QUESTIONS[0], ANSWERS[0], QUESTIONS[1], ANSWERS[1]], None),
    "system": ([SYSTEM, QUESTIONS[0], ANSWERS[0], QUESTIONS[1], ANSWERS[1]], None),
    "tools": ([QUESTIONS[0], CALLING, RESULT, ANSWERS[0], QUESTIONS[1], ANSWERS[1]], TOOLS),
    "reasoning": ([QUESTIONS[0], REASONED[0]], None),
    "reasoning twice": ([QUESTIONS[0], REASONED[0], QUESTIONS[1], REASONED[1]], None),
}


# ---- what a family writes around a turn ------------------------------------------------------------------------------


class Marks(NamedTuple):
    """What stands before the words of an assistant's turn and after them.

    `header`: the last of it before a turn, which the prompt ends with. `prompted`: what the prompt may have more, which
    may be a target or not. `ends`: the markers that end a turn; spaces after them belong to the end. `joins`: a turn
    after the result of a tool has no header, but begins after this text."""

    header: str
    ends: tuple[str, ...]
    prompted: str = ""
    joins: str | None = None


CHATML = Marks("<|im_start|>assistant\n", ("<|im_end|>",))
EMPTY_THINK = r"(?:<think>\s*</think>\s*)?"  # may be a target or not: an option of the run decides


class Wrong(AssertionError):
    """The targets, or the text, are not those of the row."""


def tokenizer_with(markers: list[str], template: str, eos: str = "</s>") -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, in which each marker is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos)
    fast.add_tokens(sorted(set(markers) - {"<s>", eos}), special_tokens=True)
    fast.chat_template = template
    return fast


def check_targets(tokenizer, row: list[dict], tools, marks: Marks) -> str:
    """Encode a row, compare its targets with its words, and return its text. Raise Wrong if they differ."""
    ids, labels, _ = encode_chat(tokenizer, row, "row", tools)
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    expected, optional = _expected_targets(text, row, marks, tokenizer.eos_token)
    place = 0
    for token, label in zip(ids, labels, strict=True):
        length = len(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        places = set(range(place, place + length))
        is_target = label != IGNORED
        if places & optional:
            pass
        elif is_target != bool(places & expected):
            what = "is a target" if is_target else "is no target"
            raise Wrong(f"{text[place : place + length]!r} at {place} {what}: …{text[max(0, place - 60) : place + 60]!r}")
        place += length
    if place != len(text):
        raise Wrong(f"the tokens have {place} characters, the text {len(text)}")
    return text


def _expected_targets(text: str, row: list[dict], marks: Marks, eos: str) -> tuple[set[int], set[int]]:
    """Return the characters that must be targets, and those that may be."""
    expected: set[int] = set()
    optional: set[int] = set()
    place = 0
    for i, turn in enumerate(row):
        words = _words_of(turn)
        positions = []
        for word in words:
            position = text.find(word, place)
            if position < 0:
                raise Wrong(f"{word} of turn {i} is not written in its place")
            positions.append(position)
        if turn["role"] == "assistant":
            begin, prompt_end = _begin(text, min(positions), marks)
            end, spaces_end = _end(text, max(positions), marks, eos)
            expected |= set(range(prompt_end, end))
            optional |= set(range(begin, prompt_end)) | set(range(end, spaces_end))
        place = max(positions)
    return expected, optional


def _words_of(turn: dict) -> list[str]:
    """Return words of all that a turn says; each stands nowhere else in its row."""
    said = [turn["content"], turn.get("reasoning_content", "")]
    said += [call["function"]["arguments"]["who"] for call in turn.get("tool_calls", ())]
    return re.findall(r"\b(?:uq|wa|ro|arg|res|syst)(?:one|two)\b", " ".join(said))


def _begin(text: str, first_word: int, marks: Marks) -> tuple[int, int]:
    """Return where a turn begins, and where what the prompt may have ends."""
    begin = text.rfind(marks.header, 0, first_word)
    begin = begin + len(marks.header) if begin >= 0 else -1
    if marks.joins is not None:
        joined = text.rfind(marks.joins, 0, first_word)
        begin = max(begin, joined + len(marks.joins) if joined >= 0 else -1)
    if begin < 0:
        raise Wrong(f"no header before {text[first_word : first_word + 20]!r}")
    prompted = re.compile(f"(?:{EMPTY_THINK}{marks.prompted})").match(text, begin)
    return begin, min(prompted.end(), first_word)


def _end(text: str, last_word: int, marks: Marks, eos: str) -> tuple[int, int]:
    """Return where the marker that ends a turn ends, and where the spaces (and the end of the text) after it do."""
    ends = [text.find(end, last_word) + len(end) for end in marks.ends if text.find(end, last_word) >= 0]
    if not ends:
        raise Wrong(f"nothing ends the turn after {text[last_word : last_word + 40]!r}")
    end = min(ends)
    spaces = re.compile(rf"\s*(?:{re.escape(eos)}$)?").match(text, end)
    return end, spaces.end()
