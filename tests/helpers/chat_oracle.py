"""An independent look at the targets of a chat: its words are found in the text, and the header and end around them.

It knows nothing of how templates are rendered: only the marker before the first word of a turn, and the one after its
last word."""

import functools
import re
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from engine.rows.chat_options import ChatFormat
from engine.rows.encode_chat import encode_chat
from engine.rows.tokenize_and_pack import IGNORED

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
EMPTY_THINK = r"\s*<think>\s*</think>\s*"  # may be a target or not: an option of the run decides


class Wrong(AssertionError):
    """The targets, or the text, are not those of the row."""


def tokenizer_with(
    markers: list[str], template: str | None, eos: str = "</s>", two_breaks: bool = False
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, in which each marker is one token, and with `two_breaks` two line breaks, too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*alphabet, *(["ĊĊ"] if two_breaks else [])])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")] if two_breaks else []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos)
    fast.add_tokens(sorted(set(markers) - {"<s>", eos}), special_tokens=True)
    fast.chat_template = template
    return fast


def variables_of(family: str, row: str) -> dict:
    """Return the variables with which a template writes the reasoning of a row that it would refuse without."""
    return {"thinking": True} if family == "deepseek_v3_1" and "reasoning" in row else {}


def check_targets(tokenizer, row: list[dict], tools, marks: Marks, variables: dict | None = None) -> str:
    """Encode a row, compare its targets with its words, and return its text. Raise Wrong if they differ."""
    one = ChatFormat(one_sequence=True)
    [(ids, labels, _)] = encode_chat(tokenizer, row, "row", tools, chat_format=one, variables=variables)
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if encoded["input_ids"] != ids:
        raise Wrong("the text of the ids has other ids")
    expected, optional = _expected_targets(text, row, marks, tokenizer.eos_token)
    for (begin, end), label in zip(encoded["offset_mapping"], labels, strict=True):
        places = set(range(begin, end))
        is_target = label != IGNORED
        if not places & optional and is_target != bool(places & expected):
            what = "is a target" if is_target else "is no target"
            raise Wrong(f"{text[begin:end]!r} at {begin} {what}: …{text[max(0, begin - 60) : begin + 60]!r}")
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
    said += [str(call["function"]["arguments"]) for call in turn.get("tool_calls", ())]
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
    prompted = re.compile(f"(?:{EMPTY_THINK}|{marks.prompted})?").match(text, begin)
    return begin, min(prompted.end(), first_word)


def _end(text: str, last_word: int, marks: Marks, eos: str) -> tuple[int, int]:
    """Return where the marker that ends a turn ends, and where the spaces (and the end of the text) after it do."""
    markers = [marks.ends] if isinstance(marks.ends, str) else [re.escape(end) for end in marks.ends]
    end = re.compile("|".join(markers)).search(text, last_word)
    if end is None:
        raise Wrong(f"nothing ends the turn after {text[last_word : last_word + 40]!r}")
    spaces = re.compile(rf"\s*(?:{re.escape(eos)}$)?").match(text, end.end())
    return end.end(), spaces.end()


# ---- the families that ship -----------------------------------------------------------------------------------------

LLAMA = Marks("<|start_header_id|>assistant<|end_header_id|>\n\n", ("<|eot_id|>",))
GEMMA = Marks("<start_of_turn>model\n", ("<end_of_turn>",))
GEMMA4 = Marks("<|turn>model\n", ("<turn|>", "<|tool_response>"), joins="<tool_response|>")
OPENED = CHATML._replace(prompted=r"<think>\n")
MISTRAL = Marks("[/INST]", ("</s>",), joins="[/TOOL_RESULTS]")
DEEPSEEK = Marks("<｜Assistant｜>", ("<｜end▁of▁sentence｜>",), r"<think>\n", joins="<｜tool▁outputs▁end｜>")
GPT_OSS = Marks(
    "<|start|>assistant",
    r"(?:(?<=home\.)|(?<=stayed\.)|(?<=\}))(?:<\|return\|>|<\|end\|>|<\|call\|>)",
    r"<\|channel\|>final<\|message\|>",
)
FAMILY_MARKS = {
    "chatml": CHATML,
    "deepseek_r1": DEEPSEEK,
    "deepseek_v3": DEEPSEEK._replace(prompted=""),
    "deepseek_v3_1": DEEPSEEK._replace(prompted=r"</?think>", joins="<｜tool▁output▁end｜>"),
    "gemma3": GEMMA,
    "gemma4": GEMMA4,
    "glm4_5": Marks("<|assistant|>", r"(?=<\|user\|>|<\|observation\|>|$)"),
    "gpt_oss": GPT_OSS,
    "llama3": LLAMA,
    "mistral_v3": MISTRAL,
    "mistral_v3_spm": MISTRAL,
    "mistral_v7": MISTRAL,
    "mistral_v11": MISTRAL,
    "mistral_v13": MISTRAL,
    "mistral_v15": MISTRAL,
    "nemotron_3": OPENED,
    "nemotron_3_ultra": OPENED,
    "phi3": Marks("<|assistant|>\n", ("<|end|>",)),
    "phi4": Marks("<|im_start|>assistant<|im_sep|>", ("<|im_end|>",)),
    "phi4_mini": Marks("<|assistant|>", ("<|end|>",)),
    "qwen2_5": CHATML,
    "qwen3": CHATML,
    "qwen3_5": OPENED,
    "qwen3_6": OPENED,
    "qwen3_instruct": CHATML,
    "qwen3_thinking": OPENED,
    "smollm3": CHATML,
}
MARKER = re.compile(r"<[|｜/]?[\w▁|｜]+>|<\|\"\|>|<[\w]+[|]>|\[/?[A-Z_]+\]")


@functools.cache
def tokenizer_of(template: str, two_breaks: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a template, in which all that looks like a marker there is one token."""
    markers = [*MARKER.findall(template), "<|im_start|>", "<|im_end|>"]
    return tokenizer_with(markers, template, two_breaks=two_breaks)
