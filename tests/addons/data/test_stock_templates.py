"""Published templates, as the package trl has them: six rows under each train with exact targets, or are refused."""

import copy
import importlib.util
import random
from pathlib import Path

import jinja2
import pytest

from engine.config.errors import UsageError
from engine.rows.chat_options import ChatFormat, ChatOptions
from engine.rows.encode_chat import encode_chat
from engine.rows.encode_rows import make_chat_format
from engine.rows.find_targets import DATE, with_fixed_date
from engine.rows.template_families import family_files, family_of
from engine.rows.tokenize_and_pack import IGNORED
from tests.helpers import chat_oracle as oracle
from tests.helpers.chat_oracle import CHATML, ROWS, Marks, check_targets, tokenizer_of

TRL = importlib.util.find_spec("trl")
if TRL is None:
    pytest.skip("trl is not installed: pip install -r requirements-extra.txt", allow_module_level=True)
pytestmark = pytest.mark.cluster  # with the other extra packages
FOLDER = Path(TRL.submodule_search_locations[0]) / "chat_templates"
STOCK = {file.stem: file for file in sorted(FOLDER.glob("*.jinja")) if not file.stem.endswith("_training")}

ONE = ChatFormat(one_sequence=True)
ASSISTANT = Marks("Assistant:", ("<end_of_utterance>",))
COHERE = Marks("<|CHATBOT_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",))
MUSE = Marks("<|start|>assistant", ("<|eot|>", "<|end|>"))
# Families of other templates than those that ship; the others are found.
MARKS = {
    "cohere": COHERE,
    "cohere2": COHERE._replace(header="<|CHATBOT_TOKEN|><|START_RESPONSE|>"),
    # After the result of a tool its prompt lacks the header that its turns have, so the header is a target.
    "diffusion_gemma": oracle.GEMMA4._replace(header="<turn|>\n<|turn>model\n", prompted=r"<\|turn>model\n"),
    "gemma4_v2": oracle.GEMMA4,
    "idefics3": ASSISTANT,
    "lfm2": CHATML,
    "lfm2_2_5": CHATML,
    "lfm2_2_5_v2": CHATML,
    "lfm2_2_5_vl": CHATML,
    "lfm2_v2": CHATML,
    "llama3": oracle.LLAMA,
    "llava_next": Marks("[/INST]", ("</s>",)),
    "muse_glimmer": MUSE,
    "qwen2_5_vl": CHATML,
    "qwen3_8": oracle.OPENED,
    "smolvlm": ASSISTANT,
}
FAMILIES = {
    "deepseek_r1_distill": "deepseek_r1",
    "deepseekv3": "deepseek_r1",  # its prompt opens the reasoning
    "gemma": "gemma3",
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "gemma4_v3": "gemma4",
    "gemma4_v4": "gemma4",
    "gemma4_v5": "gemma4",
    "glm4moe": "glm4_5",
    "gptoss": "gpt_oss",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
    "nemotron_3_5_lightning": "nemotron_3_ultra",
    "nemotron_3_nano": "nemotron_3",
    "nemotron_3_super": "nemotron_3",
    "nemotron_3_ultra": "nemotron_3_ultra",
    "phi3": "phi3",
    "phi3_5": "phi3",
    "qwen2_5": "qwen2_5",
    "qwen3": "qwen3",
    "qwen3_5_nothink": "qwen3_5",
    "qwen3_5_think": "qwen3_5",
    "qwen3_6": "qwen3_6",
    "qwen3_instruct_2507": "qwen3_instruct",
    "qwen3_vl": "qwen3_instruct",
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """Templates that end no turn, or write the date, warn; that is tested in test_chat.py."""
    monkeypatch.setattr("engine.rows.encode_chat.warn_once", lambda message: None)


def marks_of(stock: str) -> Marks:
    return MARKS[stock] if stock in MARKS else oracle.FAMILY_MARKS[FAMILIES[stock]]


def cells(template: str, marks: Marks) -> dict[str, str | None]:
    """Return the text of each row; None if it is refused. Raise Wrong for targets that are not exact."""
    texts: dict[str, str | None] = {}
    for name, (row, tools) in ROWS.items():
        try:
            texts[name] = check_targets(tokenizer_of(template), row, tools, marks)
        except UsageError:
            texts[name] = None
    return texts


@pytest.mark.parametrize("stock", STOCK)
def test_each_row_trains_exactly_or_is_refused(stock):
    """What the own template trains, its family writes alike, but for the date of today, and trains, too.

    A run takes the family; where there is none, the own template, whose turns begin several sequences if need be."""
    template = STOCK[stock].read_text(encoding="utf-8")
    tokenizer = tokenizer_of(template)
    family = family_of(tokenizer)
    assert family == FAMILIES.get(stock)
    own = cells(template, marks_of(stock))
    options = ChatOptions()
    make_chat_format(copy.copy(tokenizer), options)
    assert options.training_template == (family or "own")
    if family:
        ours = cells(family_files()[family].read_text(encoding="utf-8"), oracle.FAMILY_MARKS[family])
        for name, text in own.items():
            assert text is None or DATE.sub("DATE", ours[name]) == DATE.sub("DATE", text), name


@pytest.mark.parametrize("stock", STOCK)
def test_one_turn_a_sequence_follows_the_prompt_of_the_published_template(stock):
    """Token by token, for each turn of chats with and without reasoning, or the chat is refused."""
    own = STOCK[stock].read_text(encoding="utf-8")
    encoded = 0
    for name, (row, tools) in ROWS.items():
        tokenizer = copy.copy(tokenizer_of(own, True))
        tokenizer.chat_template = own
        chosen = make_chat_format(tokenizer, ChatOptions(train_turns="each"))
        try:
            sequences = encode_chat(tokenizer, row, "row", tools, chat_format=chosen)
        except UsageError:
            continue
        answers = [i for i, turn in enumerate(row) if turn["role"] == "assistant"]
        for i, (ids, labels, _) in zip(answers, sequences, strict=True):
            prompt = tokenizer(prompt_of(tokenizer, row[:i], tools), add_special_tokens=False)["input_ids"]
            first = next(k for k, label in enumerate(labels) if label != IGNORED)
            assert ids[: len(prompt)] == prompt, (name, i)
            assert first == len(prompt), (name, i)
        encoded += 1
    assert encoded >= 2  # at least one turn and several turns without anything else


def prompt_of(tokenizer, turns: list[dict], tools) -> str:
    """Return the prompt after these turns, which some templates for images take as lists of parts."""
    parts = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
    prompts = []
    for each in (turns, parts):
        try:
            template = with_fixed_date(tokenizer.get_chat_template(tools=tools))
            options = {"chat_template": template, "add_generation_prompt": True}
            prompts.append(tokenizer.apply_chat_template(each, tools=tools, tokenize=False, **options))
        except (jinja2.UndefinedError, TypeError):
            continue
    return next(prompt for prompt in prompts if turns[-1]["content"] in prompt)


WORDS = [" lead", "trail ", "\nnew", "two\n\nlines", "émile", 'a<b>&"q"', "{}", "'s"]
SCHEMAS = [
    {"type": "string"},
    {"type": "string", "enum": ["red", "green"], "description": "Its color."},
    {"type": "integer", "description": "How many.", "default": 4},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string"}},
    {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"]},
    {"type": "string", "nullable": True},
]
VALUES = [7, 1.5, True, "so", [1, "a"], {"a": 2}, {"a": "x", "b": False}]


def random_chat(seed: int) -> tuple[list[dict], list[dict] | None]:
    """Return turns and tools with spaces, quotes, nested schemas and arguments, and several calls in a turn."""
    draw = random.Random(seed)

    def say() -> str:
        return draw.choice(WORDS) + str(draw.randrange(1000)) + draw.choice(["", " ", "\n", "."])

    def tool(i: int) -> dict:
        properties = {f"p{k}": draw.choice(SCHEMAS) for k in range(draw.randint(0, 3))}
        parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
        return {"type": "function", "function": {"name": f"f{i}", "description": f"Does {i}", "parameters": parameters}}

    turns = [{"role": "system", "content": say()}] if draw.random() < 0.4 else []
    tools = [tool(i) for i in range(draw.randint(1, 2))] if draw.random() < 0.5 else None
    for k in range(draw.randint(1, 3)):
        turns.append({"role": "user", "content": say()})
        for _ in range(draw.choice([0, 1, 2]) if tools else 0):
            calls = []
            for i in range(draw.choice([1, 1, 2])):
                arguments = {f"p{j}": draw.choice([*VALUES, say()]) for j in range(draw.randint(0, 2))}
                function = {"name": f"f{i}", "arguments": arguments}
                calls.append({"id": f"abcdef{k}{i}x", "type": "function", "function": function})
            turns.append({"role": "assistant", "content": "", "tool_calls": calls})
            for call in calls:
                turns.append({"role": "tool", "tool_call_id": call["id"], "content": say()})
        answer = {"role": "assistant", "content": say()}
        if draw.random() < 0.3:
            answer["reasoning_content"] = "why" + say().strip()
        turns.append(answer)
    return turns, tools


@pytest.mark.parametrize("stock", [name for name in STOCK if name in FAMILIES])
def test_random_chats_have_the_text_of_the_own_template_where_that_trains_them(stock):
    own = tokenizer_of(STOCK[stock].read_text(encoding="utf-8"))
    family = tokenizer_of(family_files()[FAMILIES[stock]].read_text(encoding="utf-8"))
    compared = 0
    for seed in range(12):
        turns, tools = random_chat(seed)
        try:
            text = own.decode(encode_chat(own, turns, "row", tools, chat_format=ONE)[0].ids)
        except UsageError:
            continue
        ours = family.decode(encode_chat(family, turns, "row", tools, chat_format=ONE)[0].ids)
        assert DATE.sub("DATE", ours) == DATE.sub("DATE", text)
        compared += 1
    assert compared > 0 or FAMILIES[stock] == "deepseek_r1"  # refused: no turn begins as its prompt does


def test_chats_of_several_turns_train_under_nine_of_ten():
    """Under that of its family, if there is one, else under the own template. The mutant has no families."""
    trained = 0
    trained_by_own = 0
    row, tools = ROWS["several turns"]
    for file in STOCK.values():
        template = file.read_text(encoding="utf-8")
        family = family_of(tokenizer_of(template))
        own_trains = trains(template, row, tools)
        trained_by_own += own_trains
        if family:
            trained += trains(family_files()[family].read_text(encoding="utf-8"), row, tools)
        else:
            trained += own_trains
    assert len(STOCK) > 30
    assert trained >= 0.9 * len(STOCK)
    assert trained_by_own < 0.9 * len(STOCK)


def trains(template: str, row: list[dict], tools) -> bool:
    try:
        encode_chat(tokenizer_of(template), row, "row", tools, chat_format=ONE)
    except UsageError:
        return False
    return True
