"""Templates that ship: exact targets of each family, turns that stay the same, and how a tokenizer finds its family."""

import pytest

from engine.config.errors import UsageError
from engine.rows.encode_chat import encode_chat
from engine.rows.find_targets import DATE
from engine.rows.template_families import family_files, family_of, nearest_family
from tests.helpers import chat_oracle as oracle
from tests.helpers.chat_oracle import ROWS, Wrong, check_targets, tokenizer_of

TEMPLATES = {name: file.read_text(encoding="utf-8") for name, file in family_files().items()}
NO_REASONING = ("reasoning", "reasoning twice")
# The rows that a family has no place for, each refused in one sentence.
REFUSED = {
    "chatml": ("tools", *NO_REASONING),
    "deepseek_r1": ("tools",),
    "deepseek_v3": ("tools",),
    "deepseek_v3_1": ("tools",),
    "gemma3": ("tools", *NO_REASONING),
    "llama3": NO_REASONING,
    "mistral_v3": NO_REASONING,
    "mistral_v3_spm": NO_REASONING,
    "mistral_v7": NO_REASONING,
    "mistral_v11": NO_REASONING,
    "phi3": ("tools", *NO_REASONING),
    "phi4": ("tools", *NO_REASONING),
    "phi4_mini": ("tools", *NO_REASONING),
    "qwen2_5": NO_REASONING,
    "qwen3_instruct": NO_REASONING,
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """Templates that end no turn warn; that is tested in test_chat.py."""
    monkeypatch.setattr("engine.rows.encode_chat.warn_once", lambda message: None)


# ---- what a family writes --------------------------------------------------------------------------------------------


def test_each_family_has_its_marks_here():
    assert set(TEMPLATES) == set(oracle.FAMILY_MARKS)
    assert all(template.startswith("{#- ") for template in TEMPLATES.values())  # says which models it is for
    assert not any("strftime_now" in template for template in TEMPLATES.values())  # rows of another day would differ


@pytest.mark.parametrize("family", TEMPLATES)
def test_targets_are_what_the_assistant_says_and_its_end(family):
    tokenizer = tokenizer_of(TEMPLATES[family])
    for name, (row, tools) in ROWS.items():
        if name in REFUSED.get(family, ()):
            with pytest.raises(UsageError) as refused:
                encode_chat(tokenizer, row, "a.jsonl, line 7", tools)
            assert str(refused.value).startswith("a.jsonl, line 7: ")
            assert "\n" not in str(refused.value)
        else:
            check_targets(tokenizer, row, tools, oracle.FAMILY_MARKS[family], oracle.variables_of(family, name))


BEGIN = "{%- generation %}\n"
END = "{%- endgeneration %}\n"
LAST = "            {{- '<|im_end|>\\n' }}\n"
RESULT = "{{- '\\n<tool_response>\\n' ~ message.content"
MUTANTS = {  # what each does to the template of Qwen 3, and the row that shows it
    "the end is no target": ([(LAST + "        " + END, "        " + END + LAST)], "several turns"),
    "results are targets": ([(RESULT, "{% generation %}{{- 'x' }}{% endgeneration %}" + RESULT)], "tools"),
    "a second turn is no target": (
        [(BEGIN, BEGIN + "{% if loop.index < 3 %}"), ("        " + END, "{% endif %}" + END)],
        "several turns",
    ),
}


def mutant_of_qwen3(name: str) -> str:
    template = TEMPLATES["qwen3"]
    for old, new in MUTANTS[name][0]:
        assert old in template
        template = template.replace(old, new, 1)
    return template


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_of_a_family_is_caught(name):
    with pytest.raises((Wrong, UsageError)):
        check_targets(tokenizer_of(mutant_of_qwen3(name)), *ROWS[MUTANTS[name][1]], oracle.CHATML)


# What the last turn ends with, where a family writes another end or the end of the text there.
ENDS = {"gpt_oss": ("<|return|>", "<|end|>"), "phi3": ("</s>", ""), "phi4_mini": ("</s>", "")}


@pytest.mark.parametrize("family", TEMPLATES)
def test_turns_are_the_same_whatever_follows(family):
    tokenizer = tokenizer_of(TEMPLATES[family])
    for name, (row, tools) in ROWS.items():
        if name in REFUSED.get(family, ()):
            continue
        whole = tokenizer.apply_chat_template(row, tools=tools, tokenize=False)
        for i, turn in enumerate(row):
            if turn["role"] == "assistant":
                beginning = tokenizer.apply_chat_template(row[: i + 1], tools=tools, tokenize=False)
                last, earlier = ENDS.get(family, ("", ""))
                if not whole.startswith(beginning):
                    assert beginning.endswith(last)
                    beginning = beginning.removesuffix(last) + earlier
                assert whole.startswith(beginning), (name, i)


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_turn_that_is_not_trained_has_no_target(family):
    row, tools = ROWS["several turns"]
    row = [row[0], row[1] | {"train": False}, *row[2:]]
    tokenizer = tokenizer_of(TEMPLATES[family])
    [(_, labels, _)] = encode_chat(tokenizer, row, "row", tools)
    targets = tokenizer.decode([label for label in labels if label >= 0])
    assert "watwo stayed." in targets
    assert "waone" not in targets


@pytest.mark.parametrize("family", [name for name in TEMPLATES if "tools" not in REFUSED.get(name, ())])
def test_arguments_that_are_json_text_are_not_quoted_again(family):
    row, tools = ROWS["tools"]
    function = row[1]["tool_calls"][0]["function"] | {"arguments": '{"who": "argone"}'}
    with_text = [row[0], row[1] | {"tool_calls": [oracle.CALL | {"function": function}]}, *row[2:]]
    tokenizer = tokenizer_of(TEMPLATES[family])
    if "as a mapping, not as JSON text" in TEMPLATES[family]:
        ids = [encode_chat(tokenizer, each, "row", tools)[0].ids for each in (row, with_text)]
        assert ids[0] == ids[1]
    else:
        check_targets(tokenizer, with_text, tools, oracle.FAMILY_MARKS[family])


@pytest.mark.parametrize("family", ["deepseek_r1", "glm4_5", "qwen3", "qwen3_5", "qwen3_6", "qwen3_thinking"])
def test_reasoning_in_the_content_is_written_as_reasoning_content(family):
    row, _ = ROWS["reasoning twice"]
    in_content = [dict(turn) for turn in row]
    for turn in in_content[1::2]:
        turn["content"] = f"<think>\n{turn.pop('reasoning_content')}\n</think>\n\n{turn['content']}"
    tokenizer = tokenizer_of(TEMPLATES[family])
    assert labelled_text(tokenizer, in_content, None) == labelled_text(tokenizer, row, None)


@pytest.mark.parametrize("family", [name for name in TEMPLATES if "tools" not in REFUSED.get(name, ())])
def test_a_call_without_content_is_written_as_one_with_empty_content(family):
    """As servers give it to the template that is saved with the model."""
    row, tools = ROWS["tools"]
    tokenizer = tokenizer_of(TEMPLATES[family])
    text = tokenizer.apply_chat_template(row, tools=tools, tokenize=False)
    without = [row[0], row[1] | {"content": None}, *row[2:]]
    assert tokenizer.apply_chat_template(without, tools=tools, tokenize=False) == text


# ---- which family a tokenizer has -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_family_finds_itself(family):
    """So no two of them write all chats in the same way."""
    assert family_of(tokenizer_of(TEMPLATES[family])) == family


CHATML_BY_HAND = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen 3: reasoning in the last turn only, and an empty block if that has none.
LIKE_QWEN3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Llama 3.2: a system's turn with the date of today, and nothing of tools or reasoning.
LIKE_LLAMA = (
    "{{ bos_token }}{% set has = messages[0].role == 'system' %}{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{{ 'Cutting Knowledge Date: December 2023\nToday Date: ' + DAY + '\n\n' }}"
    "{% if has %}{{ messages[0].content }}{% endif %}<|eot_id|>{% for m in (messages[1:] if has else messages) %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# As Gemma 1: it refuses a turn of the system.
LIKE_GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# As Phi 3: the text ends with the eos_token, so earlier turns change when later ones follow.
LIKE_PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# As DeepSeek R1: the prompt opens the reasoning, with which no turn of the text begins.
LIKE_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "{{ '<｜User｜>' + m.content }}{% elif m.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
STOCK_LIKE = {
    "chatml": (CHATML_BY_HAND, "chatml"),
    "as Qwen 3": (LIKE_QWEN3, "qwen3"),
    "as Llama 3.1": (LIKE_LLAMA.replace("DAY", "'26 Jul 2024'"), "llama3"),
    "as Llama 3.2": (LIKE_LLAMA.replace("DAY", "strftime_now('%d %b %Y')"), "llama3"),
    "as Gemma 1": (LIKE_GEMMA, "gemma3"),
    "as Phi 3": (LIKE_PHI3, "phi3"),
    "as DeepSeek R1": (LIKE_R1, "deepseek_r1"),
    "as DeepSeek V3": (LIKE_R1.replace("<think>\n", ""), "deepseek_v3"),
    "another date": (LIKE_LLAMA.replace("DAY", "'27 Jul 2024'"), None),
    "another end": (CHATML_BY_HAND.replace("+ '\n' }}{% endfor", "}}{% endfor"), None),
    "another prompt of the system": ("{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}" + CHATML_BY_HAND, None),
    "refuses all": ("{{ raise_exception('no') }}", None),
}


@pytest.mark.parametrize("name", STOCK_LIKE)
def test_family_is_found_by_what_the_own_template_renders(name):
    template, family = STOCK_LIKE[name]
    tokenizer = tokenizer_of(template)
    assert family_of(tokenizer) == family
    nearest = {"another date": "llama3", "another end": "chatml"}.get(name, family)
    assert nearest in (None, nearest_family(tokenizer, template))


def test_tokenizer_without_a_template_has_no_family():
    tokenizer = oracle.tokenizer_with([], None)
    assert family_of(tokenizer) is None


@pytest.mark.parametrize("name", [name for name in STOCK_LIKE if STOCK_LIKE[name][1]])
def test_family_writes_and_trains_what_the_own_template_does_where_that_can_be_trained(name):
    """The date of today aside. So are the targets, with the line break after the end of a turn."""
    template, family = STOCK_LIKE[name]
    trained = 0
    for row, tools in ROWS.values():
        try:
            own = labelled_text(tokenizer_of(template), row, tools)
        except (UsageError, ValueError):  # refused, or several sequences
            continue
        assert labelled_text(tokenizer_of(TEMPLATES[family]), row, tools) == own
        trained += 1
    assert trained or name == "as DeepSeek R1"


def labelled_text(tokenizer, row, tools) -> tuple[str, str]:
    """Return the text of a row and its targets, without dates."""
    [(ids, labels, _)] = encode_chat(tokenizer, row, "row", tools)
    return DATE.sub("DATE", tokenizer.decode(ids)), tokenizer.decode([label for label in labels if label >= 0])
