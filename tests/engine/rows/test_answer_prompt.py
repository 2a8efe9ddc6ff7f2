"""The prompt of inference is what stands before each target, in the same tokens: all templates, settings and kinds of rows.

The table of docs/data.md is made by this file."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from engine.config.errors import UsageError, kept_warnings
from engine.rows import chat_options, encode_chat, encode_rows
from engine.rows.encode_rows import Encoder
from engine.rows.formats import MESSAGES
from engine.rows.prompts import read_prompt
from engine.rows.template_families import family_files
from engine.rows.template_variables import split_defaults, variables_of, with_defaults
from engine.rows.tokenize_and_pack import IGNORED
from tests.helpers.chat_oracle import ROWS, tokenizer_of

TEMPLATES = {name: file.read_text(encoding="utf-8") for name, file in family_files().items()}
SETTINGS = ({}, {"enable_thinking": False}, {"enable_thinking": True})
QUESTION = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "A"}
REASONED = ANSWER | {"reasoning_content": "R"}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setattr(encode_chat, "warn_once", lambda message: None)


def settings_of(family: str) -> list[dict]:
    """Return the variables that a template reads, with which its prompt differs from that without any."""
    tokenizer = tokenizer_of(TEMPLATES[family])
    found, prompts = [], []
    for setting in SETTINGS:
        prompt = tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True, **setting)
        if set(setting) <= variables_of(tokenizer, tokenizer.chat_template) and prompt not in prompts:
            found.append(setting)
            prompts.append(prompt)
    return found


def encode(family: str, turns, tools, setting: dict, which: str = "all", two_breaks: bool = True) -> list:
    chosen = chat_options.ChatFormat(variables=setting, train_turns=which)
    return encode_chat.encode_chat(tokenizer_of(TEMPLATES[family], two_breaks), turns, "row", tools, chat_format=chosen)


# ---- the table of docs/data.md ---------------------------------------------------------------------------------------


def table() -> list[str]:
    lines = ["| template | variables | the prompt ends with | target of `A` | target of `A` with reasoning `R` |"]
    lines.append("|---|---|---|---|---|")
    for family in sorted(TEMPLATES):
        for setting in settings_of(family):
            tokenizer = tokenizer_of(TEMPLATES[family])
            prompt = tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True, **setting)
            cells = [code(prompt.rpartition("Q")[2]), *(target(family, setting, turn) for turn in (ANSWER, REASONED))]
            variables = ", ".join(f"{name}: {json.dumps(value)}" for name, value in setting.items())
            lines.append("| " + " | ".join([f"`{family}`", f"`{variables}`" if variables else "", *cells]) + " |")
    return lines


def target(family: str, setting: dict, turn: dict) -> str:
    try:
        [(_, labels, _)] = encode(family, [QUESTION, turn], None, setting)
    except UsageError as error:
        return "refused: no place for it" if "does not write" in str(error) else "refused: the prompt closes it"
    return code(tokenizer_of(TEMPLATES[family], True).decode([label for label in labels if label != IGNORED]))


def code(text: str) -> str:
    return "`" + text.replace("\n", "\\n").replace("|", "\\|") + "`"


def test_the_table_of_the_page_is_true():
    page = Path("docs/data.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in page, "\n".join(table())


# ---- all kinds of rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["all", "last", "each"])
@pytest.mark.parametrize("family", TEMPLATES)
def test_targets_follow_the_prompt_of_inference_in_its_tokens(family, which):
    """Mutants: joint tokens; marks as they are; the history of `all`. Chats, samples and predict have this prompt."""
    tokenizer = tokenizer_of(TEMPLATES[family], True)
    encoded = 0
    for turns, tools in ROWS.values():
        for setting in settings_of(family):
            try:
                sequences = encode(family, turns, tools, setting, which)
            except UsageError:
                continue  # in the table
            answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
            found = [begin for ids, labels, _ in sequences for begin in prompts_of(ids, labels)]
            assert len(found) == (1 if which == "last" else len(answers))
            for i, ids in zip(answers[-len(found) :], found, strict=True):
                before = [turn for turn in turns[:i] if turn.get("content") or turn.get("tool_calls")]
                prompt = tokenizer.apply_chat_template(
                    before, tools=tools, tokenize=False, add_generation_prompt=True, **setting
                )
                assert tokenizer.decode(ids) == prompt
                assert ids == tokenizer(prompt, add_special_tokens=False)["input_ids"] or which == "all"
                if i == answers[0] and before[-1]["role"] == "user":
                    assert ids == read_prompt(tokenizer, before, "here", tools, **setting).ids
                encoded += 1
    assert encoded


def prompts_of(ids: list[int], labels: list[int]) -> list[list[int]]:
    """Return what stands before each run of targets."""
    return [ids[:k] for k in range(1, len(ids)) if labels[k] != IGNORED and labels[k - 1] == IGNORED]


def test_one_token_would_hold_parts_of_prompt_and_target():
    """Of Qwen 3 Thinking: <think>, a line break; another one, </think>. The mutant has one token for both."""
    [(ids, labels, _)] = encode("qwen3_thinking", [QUESTION, ANSWER], None, {})
    tokenizer = tokenizer_of(TEMPLATES["qwen3_thinking"], True)
    joint = tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"]
    assert len(joint) == len(ids) - 1
    first = next(k for k, label in enumerate(labels) if label != IGNORED)
    assert tokenizer.decode(ids[:first]).endswith("<think>\n")


@pytest.mark.parametrize("family", ["qwen3", "llama3", "chatml"])
def test_a_chat_is_rendered_twice_and_for_one_prompt(family, monkeypatch):
    """Plain, with marks, and before the last answer with its prompt and without, which tells what a prompt adds.

    The mutant renders a prompt for each turn, whose time grows with the square of the turns."""
    rendered = []
    tokenizer = tokenizer_of(TEMPLATES[family])
    apply = tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *args, **kw: rendered.append(1) or apply(*args, **kw))
    counts = []
    for turns in (3, 3, 80):  # what is cached is not rendered again
        rendered.clear()
        encode_chat.encode_chat(tokenizer, [QUESTION, ANSWER] * turns, "row", None)
        counts.append(len(rendered))
    assert counts[1:] == [4, 4]


# ---- turns that begin otherwise, and that do not reason --------------------------------------------------------------


STOCK = (  # as published templates of thinking models: reasoning only in turns after the last question
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index %}{% endif %}"
    "{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index > ns.last %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [None, "qwen3"])
def test_a_turn_begins_another_sequence_where_its_prompt_does_not_continue_the_one_before(template):
    """Here where the history loses its blocks; results of tools continue it. The mutant has one sequence of all turns."""
    tokenizer = tokenizer_of(STOCK, True)
    chosen = chat_options.ChatFormat(TEMPLATES[template] if template else None)
    result = {"role": "tool", "content": "T"}
    turns = [QUESTION, REASONED, result, ANSWER, QUESTION, ANSWER]
    sequences = encode_chat.encode_chat(tokenizer, turns, "row", None, chat_format=chosen)
    found = [prompts_of(ids, labels) for ids, labels, _ in sequences]
    assert [len(prompts) for prompts in found] == [2, 1]
    for i, ids in zip((1, 3, 5), [prompt for prompts in found for prompt in prompts], strict=True):
        prompt = tokenizer.apply_chat_template(turns[:i], tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(ids) == prompt
    # A task that compares answers has one sequence.
    one = encode_chat.encode_chat(
        tokenizer,
        turns,
        "row",
        None,
        chat_format=dataclasses.replace(chosen, one_sequence=True, template=TEMPLATES["qwen3"]),
    )
    assert len(one) == 1


@pytest.mark.parametrize("which", ["all", "each"])
def test_an_only_answer_has_the_history_of_inference(which):
    """Turns that are not trained, as of a prompt, stand before it as inference writes them. The mutant has blocks there."""
    tokenizer = tokenizer_of(STOCK, True)
    chosen = chat_options.ChatFormat(TEMPLATES["qwen3"], train_turns=which, one_sequence=which == "all")
    turns = [QUESTION, ANSWER | {"train": False}, QUESTION, ANSWER]
    [(ids, labels, _)] = encode_chat.encode_chat(tokenizer, turns, "row", None, chat_format=chosen)
    prompt = tokenizer.apply_chat_template([QUESTION, ANSWER, QUESTION], tokenize=False, add_generation_prompt=True)
    assert [tokenizer.decode(found) for found in prompts_of(ids, labels)] == [prompt]


@pytest.mark.parametrize("which", ["all", "last", "each"])
@pytest.mark.parametrize("template", [STOCK, TEMPLATES["qwen3"], TEMPLATES["llama3"]])
def test_the_assistant_may_speak_first(template, which):
    tokenizer = tokenizer_of(template, True)
    for turns in ([ANSWER], [ANSWER, QUESTION, ANSWER]):
        sequences = encode_chat.encode_chat(
            tokenizer, turns, "row", None, chat_format=chat_options.ChatFormat(train_turns=which)
        )
        said = "".join(tokenizer.decode([label for label in labels if label != IGNORED]) for _, labels, _ in sequences)
        assert said.count("A<|") == (1 if which == "last" else len(turns) // 2 + 1)
        assert not any("Q" in tokenizer.decode(ids) for ids, _, _ in sequences if turns == [ANSWER])


def test_a_task_that_compares_answers_has_one_sequence_of_a_row():
    """The mutant does not ask for it: sides of other rows would be paired."""
    tokenizer = tokenizer_of(STOCK, True)
    chosen = chat_options.ChatFormat(TEMPLATES["qwen3"])
    encoder = Encoder(tokenizer, len(tokenizer), 512, False, True, chat_format=chosen)
    encoder.use(MESSAGES, "train")
    batch = {"messages": [[QUESTION, ANSWER, QUESTION, ANSWER]] * 2}
    assert len(encoder.encode_batch(batch, ["a", "b"])["input_ids"]) == 4
    encoder.require_one_sequence()
    assert len(encoder.encode_batch(batch, ["a", "b"])["input_ids"]) == 2
    encoder.chat_format = dataclasses.replace(chosen, train_turns="each")
    with pytest.raises(UsageError, match="train_turns"):
        encoder.require_one_sequence()


def test_the_last_switch_may_decide():
    """The mutant knows only whether a switch is there."""
    template = (
        "{% set ns = namespace(off=false) %}{% for m in messages %}{% if m.role == 'user' and '/no_think' in m.content %}"
        "{% set ns.off = true %}{% elif m.role == 'user' and '/think' in m.content %}{% set ns.off = false %}{% endif %}"
        "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% if ns.off %}<think></think>{% endif %}{% generation %}"
        "{% if not ns.off %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if ns.off %}<think></think>{% endif %}{% endif %}"
    )
    tokenizer = tokenizer_of(template, True)
    turns = []
    for switch in ("/no_think", "/think", "/no_think"):
        turns += [QUESTION | {"content": f"Q {switch}"}, ANSWER]
    [(_, labels, _)] = encode_chat.encode_chat(tokenizer, turns, "row", None)
    said = tokenizer.decode([label for label in labels if label != IGNORED])
    assert said == "A<|im_end|>\n<think></think>A<|im_end|>\nA<|im_end|>\n"


def counted(tokenizer, turns, **format) -> dict[str, int]:
    with kept_warnings() as warnings:
        encode_chat.encode_chat(
            tokenizer, turns, "a.jsonl, line 2", None, chat_format=chat_options.ChatFormat(**format)
        )
    return {kind: number for kind, (_, number) in warnings.items()}


@pytest.mark.parametrize(
    ("family", "setting", "count"),
    [
        ("qwen3", {}, 1),
        ("qwen3", {"enable_thinking": False}, 0),
        ("qwen3_thinking", {}, 1),
        ("smollm3", {}, 1),
        ("gpt_oss", {}, 1),
        ("llama3", {}, 0),
        ("deepseek_v3_1", {}, 0),
        ("gemma4", {}, 0),
        ("gemma4", {"enable_thinking": True}, 1),
    ],
)
def test_answers_without_reasoning_are_counted_where_the_model_may_reason(family, setting, count):
    tokenizer = tokenizer_of(TEMPLATES[family])
    assert sum(counted(tokenizer, [QUESTION, ANSWER], variables=setting).values()) == count
    if count:
        assert counted(tokenizer, [QUESTION, REASONED], variables=setting) == {}


def test_smollm3_reasons_where_the_system_says_so():
    tokenizer = tokenizer_of(TEMPLATES["smollm3"])
    for mode, count in (("/think", 1), ("/no_think", 0)):
        assert sum(counted(tokenizer, [{"role": "system", "content": mode}, QUESTION, ANSWER]).values()) == count


# ---- the template of final/ ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "glm4_5", "smollm3", "deepseek_v3_1", "gemma4"])
def test_variables_of_the_run_are_defaults_of_the_saved_template(family):
    """A server that gives none prompts as the run did, and may give others. A run from final/ finds both again."""
    tokenizer = tokenizer_of(TEMPLATES[family])
    for values in ({"enable_thinking": False}, {"enable_thinking": True}):
        saved = with_defaults(TEMPLATES[family], values)
        assert split_defaults(saved) == (TEMPLATES[family], values)
        for given in ({}, {"enable_thinking": not values["enable_thinking"]}):
            served, trained = (
                tokenizer.apply_chat_template(
                    [QUESTION], tokenize=False, add_generation_prompt=True, chat_template=template, **variables
                )
                for template, variables in ((saved, given), (TEMPLATES[family], values | given))
            )
            assert served == trained


def test_values_of_defaults_are_what_jinja_reads():
    values = {"a": "🙂 '\"\\ #} {{", "b": {"c": None, "d": [1, True, "é"]}}
    template = "{{ a }}|{{ b.c is none }}|{{ b.d | tojson }}|{{ messages[0].content }}"
    tokenizer = tokenizer_of(template)
    saved = with_defaults(template, values)
    assert split_defaults(saved) == (template, values)
    texts = [
        tokenizer.apply_chat_template([QUESTION], tokenize=False, chat_template=each, **given)
        for each, given in ((saved, {}), (template, values))
    ]
    assert texts[0] == texts[1]
    own = "{%- if persona is not defined %}{% set persona = 'Bob' %}{% endif %}\n{{ persona }}"
    assert split_defaults(own) == (own, {})  # a line of the template itself


def test_a_run_from_a_saved_template_keeps_its_defaults():
    first = copy.deepcopy(tokenizer_of(TEMPLATES["qwen3"]))
    options = chat_options.ChatOptions(chat_template_kwargs={"enable_thinking": False})
    chosen = encode_rows.make_chat_format(first, options)
    assert chosen.prompt == "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    again = encode_rows.make_chat_format(first, chat_options.ChatOptions())
    assert again == chosen
    assert first.chat_template == with_defaults(TEMPLATES["qwen3"], {"enable_thinking": False})
