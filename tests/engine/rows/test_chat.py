"""Chats: the assistant's turns in the text of any template; what a template does not write is refused."""

import json

import pytest
from transformers import AutoTokenizer

from engine.config.errors import UsageError
from engine.rows.chat_turns import read_chat
from engine.rows.encode_chat import encode_chat
from engine.rows.find_targets import AnswerPrompts, find_targets
from engine.rows.tokenize_and_pack import IGNORED
from tests.helpers import kit

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "hello hi"},  # a user who repeats the assistant
    {"role": "assistant", "content": "hello"},
]
LOOP = "{% for m in messages %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(kit.tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["a def f(x)"] * 9))


def render(tokenizer, template, messages, tools=None):
    """Return (text, the characters of each trained turn)."""
    tokenizer.chat_template = template
    text, spans = find_targets(AnswerPrompts(tokenizer, read_chat(messages, tools), template, {}))
    return text, [(span.begin, span.end) for span in spans]


PLAIN_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {  # and what each writes around an assistant's words: in the prompt, and in the target
    "chatml": (PLAIN_CHATML, "<|im_start|>assistant\n", "", "<|im_end|>\n"),
    "mistral": (
        "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }}</s>"
        "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
        "",
        "",
        "</s>",
    ),
    # Inference writes no header, so the model has to.
    "no prompt": ("{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}", "", "assistant: ", "\n"),
}
# The mutant looks for the words in the text, and finds "assistant" in the header.
WORDS = ["hello", "assistant", "a", "", "  spaced ", "<|im_start|>"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_loss_never_covers_a_header_of_the_prompt(tokenizer, name):
    template, header, begin, end = TEMPLATES[name]
    mutant_failed = False
    for words in WORDS:
        say = {"role": "assistant", "content": words}
        for chat in ([say], [say, CHAT[0], say], [CHAT[0], say, say], [CHAT[0], say | {"tool_calls": None}]):
            text, turns = render(tokenizer, template, chat)
            assert len(turns) == sum(turn["role"] == "assistant" for turn in chat)
            for a, b in turns:
                assert text[:a].endswith(header)
                expected = [f"{begin}{said}{end}".strip() for said in (words, words.strip())]
                assert text[a:b].strip() in expected, (words, chat)
            mutant_failed |= text.find(words) != turns[0][0]
    assert mutant_failed


def test_marks_that_a_template_cuts_are_refused(tokenizer):
    template = MARKS.replace("{% generation %}", "{% set words %}{% generation %}")
    template = template.replace("{% endgeneration %}", "{% endgeneration %}{% endset %}{{ WORDS }}")
    assert len(render(tokenizer, template.replace("WORDS", "words"), CHAT)[1]) == 2
    with pytest.raises(ValueError, match=r"between.* cannot be found"):
        render(tokenizer, template.replace("WORDS", "words[:5]"), CHAT)


def test_marks_may_leave_out_reasoning_but_no_words(tokenizer):
    """What an answer says would quietly be no target."""
    template = MARKS.replace("{% if m['role']", "{{ m.reasoning }}{% if m['role']", 1)
    chat = [CHAT[0], CHAT[1] | {"reasoning": "why"}]
    text, [(a, b)] = render(tokenizer, template, chat)
    assert text[:a].endswith("why")
    assert text[a:b] == "hello"
    for words in ("{{ m['content'] }}{% generation %}!{% endgeneration %}", "{% generation %}!{% endgeneration %}"):
        cut = MARKS.replace("{% generation %}{{ m['content'] }}{% endgeneration %}", words)
        with pytest.raises(ValueError, match="the content of turn 1"):
            render(tokenizer, cut, CHAT)


def test_words_of_the_assistant_that_stand_elsewhere_are_refused(tokenizer):
    """As Gemma 4 writes what is said beside a call: after the result of the tool. It would be no target."""
    template = (
        LOOP
        + "{% if m.role == 'tool' %}<|tool|>{{ m.content }}{{ messages[loop.index0 - 1].content }}{% else %}"
        + "<|{{ m.role }}|>{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
        + "{{ m.tool_calls[0].function.arguments | tojson }}{% else %}{{ m.content }}{% endif %}{% endif %}<|endoftext|>"
        + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    for repeated in (1, 6):
        chat = called({"city": "Paris"}) * repeated
        text, spans = render(tokenizer, template, chat)
        assert [text[a:b] for a, b in spans] == ['f{"city": "Paris"}<|endoftext|>', "hello<|endoftext|>"] * repeated
        chat[1] = chat[1] | {"content": "I look."}
        with pytest.raises(ValueError, match="writes the content of turn 1 elsewhere"):
            render(tokenizer, template, chat)
        chat[1] = chat[1] | {"train": False}
        assert len(render(tokenizer, template, chat)[1]) == 2 * repeated - 1


CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"


@pytest.mark.parametrize("before", ["{% if m.reasoning %}({{ m.reasoning }}){% endif %}", "CALLS"])
def test_all_that_a_turn_says_is_a_target_without_a_generation_prompt(tokenizer, before):
    """With the header, which inference does not write. The mutant begins where the content does."""
    template = LOOP + "<{{ m.role }}>" + before.replace("CALLS", CALLS) + "{{ m.content }}</s>{% endfor %}"
    says = {"reasoning": "why"} if before != "CALLS" else {"tool_calls": called({"a": "b"})[1]["tool_calls"]}
    written = "(why)" if before != "CALLS" else '<call>f {"a": "b"}'
    for content in ("hello", ""):
        text, [(a, b)] = render(tokenizer, template, [CHAT[0], {"role": "assistant", "content": content, **says}])
        assert text[a:b] == f"<assistant>{written}{content}</s>"


GENERATION = [
    "{%- generation -%}{{ m.content }}<|endoftext|>{%- endgeneration -%}",
    "\n  {% generation %}\n{% set words = m.content %}{{ words }}\n  {% endgeneration %}\n",
    "{% generation %}{{ m.content }}{% endgeneration %}<|endoftext|>",
]


@pytest.mark.parametrize("generation", GENERATION)
def test_turns_that_a_template_marks_are_those_of_transformers(tokenizer, generation):
    tokenizer.chat_template = (
        LOOP
        + "<|{{ m.role }}|>{% if m.role == 'assistant' %}"
        + generation
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    chat = [*CHAT, {"role": "assistant", "content": "für 🙂 \ue004 "}]  # and an icon of a font
    [(ids, labels, sizes)] = encode_chat(tokenizer, chat, "row 3", None)
    expected = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    assert ids == expected["input_ids"]
    assert [label != IGNORED for label in labels] == [bool(target) for target in expected["assistant_masks"]]
    assert sizes.sum() == len(tokenizer.apply_chat_template(chat, tokenize=False).encode())


def test_header_and_words_are_tokens_apart(tokenizer):
    """As at inference, where the header is the prompt. The mutant tokenizes both together: one token has parts of both."""
    tokenizer.chat_template = (
        LOOP + "{{ m.role }}: de{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}assistant: de{% endif %}"
    )
    chat = [CHAT[0], {"role": "assistant", "content": "f(x)"}]
    [(ids, labels, sizes)] = encode_chat(tokenizer, chat, "row 3", None)
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    prompt = tokenizer(text[: text.rindex("f(x)")])["input_ids"]
    assert tokenizer(text)["input_ids"][: len(prompt)] != prompt == ids[: len(prompt)]
    assert tokenizer.decode([label for label in labels if label != IGNORED]) == "f(x)</s>"
    assert sizes.sum() == len(text.encode())


# ---- turns that are not trained on -----------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{"train": False}, {"weight": 0}, {"masked": True}, {"loss": 0}, {"training": False}])
@pytest.mark.parametrize("template", [kit.CHATML, "marks"])
def test_turns_that_a_row_excludes_are_not_trained_on(tokenizer, template, keys):
    chat = [CHAT[0], CHAT[1] | keys, CHAT[2], {"role": "assistant", "content": "yes", "weight": 1.0}]
    text, spans = render(tokenizer, MARKS if template == "marks" else template, chat)
    assert [text[a:b].replace("<|endoftext|>\n", "") for a, b in spans] == ["yes"]
    assert "hello" in text
    assert "weight" not in text


def test_template_with_two_marked_parts_in_a_turn(tokenizer):
    """Which turn a part belongs to is not known, so no turn can be excluded."""
    template = MARKS.replace("{% endgeneration %}", "{% endgeneration %}:{% generation %}!{% endgeneration %}")
    text, spans = render(tokenizer, template, CHAT)
    assert [text[a:b] for a, b in spans] == ["hello", "!"] * 2
    with pytest.raises(ValueError, match=r"turn 1 is not to be trained on.*marks 4 parts of 2 turns"):
        render(tokenizer, template, [CHAT[0], CHAT[1] | {"train": False}, *CHAT[2:]])


def test_training_of_other_roles_is_warned_of(tokenizer, capsys):
    render(tokenizer, kit.CHATML, [CHAT[0] | {"train": True}, CHAT[1] | {"train": True}])
    assert "only turns of the assistant" in capsys.readouterr().err
    render(tokenizer, kit.CHATML, [CHAT[0] | {"train": False}, CHAT[1] | {"train": True}])
    assert not capsys.readouterr().err


THINKING = (  # as Qwen 3: reasoning is written in the last turn only
    LOOP
    + "<|{{ m.role }}|>{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("reason", [{"reasoning_content": "why"}, {"content": "<think>why</think>yes"}])
def test_reasoning_of_earlier_turns_may_be_left_out_where_they_are_not_trained_on(tokenizer, reason):
    answer = {"role": "assistant", "content": "yes"} | reason
    chat = [CHAT[0], answer, CHAT[2], answer]
    with pytest.raises(ValueError, match=r"does not write the reasoning.* of turn 1"):
        render(tokenizer, THINKING, chat)
    text, [(a, b)] = render(tokenizer, THINKING, [CHAT[0], answer | {"train": False}, CHAT[2], answer])
    assert text[a:b] == "<think>why</think>yes<|endoftext|>"
    assert text.count("why") == 1


SPLITS = (  # as Qwen 3 splits the content of a turn
    LOOP + "<|{{ m.role }}|>{% set words = m.content %}{% if m.role == 'assistant' and '</think>' in words %}"
    "{{ '<think>' + words.split('</think>')[0].replace('<think>', '', 1).strip() + '</think>' }}"
    "{% set words = words.partition('</think>')[2].strip() %}{% endif %}{{ words }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("words", ["`<think>` opens and `</think>` closes reasoning", "a <think>b</think> c"])
def test_words_about_reasoning_are_not_taken_for_reasoning(tokenizer, words):
    chat = [CHAT[0], {"role": "assistant", "content": words}]
    with pytest.raises(ValueError, match="content of turn 1 as it is"):
        render(tokenizer, SPLITS, chat)
    assert words in render(tokenizer, kit.CHATML, chat)[0]
    asked = [{"role": "user", "content": words}, CHAT[1]]
    assert words in render(tokenizer, SPLITS, asked)[0]
    text, spans = render(tokenizer, SPLITS, [chat[0], chat[1] | {"train": False}, *CHAT[2:]])
    assert [text[a:b] for a, b in spans] == ["hello<|endoftext|>"]


def test_reasoning_may_speak_of_its_tag(tokenizer):
    """A template may write other spaces around it, or leave out that of earlier turns, but not its first half."""
    chat = [CHAT[0], {"role": "assistant", "content": "<think>\nis it <think> ?\n</think>\n\nyes"}]
    assert "<think>is it <think> ?</think>yes" in render(tokenizer, SPLITS, chat)[0]
    cut = SPLITS.replace(".replace('<think>', '', 1)", ".split('<think>')[-1]")
    with pytest.raises(ValueError, match="reasoning in the content of turn 1"):
        render(tokenizer, cut, chat)


def test_special_tokens_around_reasoning_are_meant(tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(kit.tiny_tokenizer(tmp_path / "tokenizer", chat_template=kit.CHATML))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    for words, count in (("<think>why</think>yes", 0), ("<think>why</think>yes </think>", 1)):
        encode_chat(tokenizer, [CHAT[0], {"role": "assistant", "content": words}], "here", None)
        assert capsys.readouterr().err.count("its special token") == count


def test_reasoning_that_is_only_closed_is_warned_of(tokenizer, capsys):
    """DeepSeek R1 writes so, whose prompt opens it; or the turn speaks of the tag."""
    for words in ("<think> why\n</think>\n\nyes <think>", "why</think>yes </think>"):
        text, _ = render(tokenizer, SPLITS, [CHAT[0], {"role": "assistant", "content": words}])
        assert "<think>why</think>yes " in text
        assert ("</think> without <think>" in capsys.readouterr().err) == words.startswith("why")


# ---- what a row holds ------------------------------------------------------------------------------------------------

CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
GPT = {"role": "gpt", "content": "yes"}


def parts(*kinds: str) -> dict:
    return {"role": "user", "content": [{"type": kind, "text": f"{kind} of {k}. "} for k, kind in enumerate(kinds)]}


def test_parts_of_text_are_joined(tokenizer):
    """Even under a template that writes strings only, as Qwen 3's."""
    template = kit.CHATML.replace("m['content']", "m['content'] if m['content'] is string else ''")
    text, _ = render(tokenizer, template, [parts("text", "text"), *CHAT[1:]])
    assert "text of 0. text of 1. " in text


def test_template_that_takes_only_parts_gets_them(tokenizer):
    """As those for images and text: SmolVLM's writes nothing for a string, LLaVA's fails."""
    for write in ("{% for part in m.content %}{{ part.text }}{% endfor %}", "{{ m.content[0]['text'] }}"):
        template = kit.CHATML.replace("{{ m['content'] }}", write)
        assert render(tokenizer, template, [parts("text"), *CHAT[1:]])[0].count("text of 0.") == 1
        # A word that stands in a header, too, does not say that texts are written.
        chat = [{"role": "user", "content": "user"}, {"role": "assistant", "content": "hello"}, CHAT[2]]
        assert "<|user|>user<" in render(tokenizer, template, chat)[0]
        assert "hello" in render(tokenizer, template, [CHAT[0] | {"content": ""}, CHAT[1]])[0]


def test_a_list_without_calls_is_no_call(tokenizer):
    text, spans = render(tokenizer, kit.CHATML, [CHAT[0], CHAT[1] | {"tool_calls": []}])
    assert [text[a:b] for a, b in spans] == ["hello<|endoftext|>\n"]


def test_reasoning_that_is_never_written_is_not_a_matter_of_the_last_turn(tokenizer):
    answer = CHAT[1] | {"reasoning_content": "why"}
    with pytest.raises(ValueError, match=r"reasoning_content of turn 1: remove it"):
        render(tokenizer, kit.CHATML, [CHAT[0], answer, CHAT[2], answer])
    with pytest.raises(ValueError, match=r"reasoning_content of turn 1: remove it"):
        inline = {"role": "assistant", "content": "<think>why</think>yes"}
        render(tokenizer, kit.CHATML, [CHAT[0], answer, CHAT[2], inline])


TOOL_CHAT = (
    LOOP + "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def called(arguments) -> list[dict]:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    return [{"role": "user", "content": 'loads("{}")'}, call, {"role": "tool", "content": "5"}, CHAT[1]]


def test_null_in_arguments_is_a_value(tokenizer):
    text, _ = render(tokenizer, TOOL_CHAT, called({"city": "Paris", "limit": None}))
    assert '{"city": "Paris", "limit": null}' in text


@pytest.mark.parametrize("arguments", [{"city": "Paris"}, '{"city": "Paris"}', "{}"])
def test_template_that_refuses_a_result_without_its_call_writes_the_call(tokenizer, arguments):
    """As gpt-oss does, and Mistral: what they refuse to render without a part is no reason to refuse the chat. The quoted
    text of the user is not the arguments."""
    template = TOOL_CHAT if isinstance(arguments, dict) else TOOL_CHAT.replace("| tojson", "")
    assert len(render(tokenizer, template, called(arguments))[1]) == 2


@pytest.mark.parametrize(
    "arguments",
    ["c.function.arguments | tojson", "(c.function.arguments.items() | list)[0][1]", "c.function.arguments"],
)
def test_arguments_as_json_text_are_a_mapping_where_the_template_wants_one(tokenizer, arguments):
    """Others would quote the text again, or refuse it; a template that writes text as it is gets the text."""
    tokenizer.chat_template = (
        LOOP + "<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ "
        f"{arguments} }}}}{{% endfor %}}<|endoftext|>{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"
    )
    as_text = encode_chat(tokenizer, called('{"city":"Z"}'), "row 0", None)
    if arguments == "c.function.arguments":
        assert '{"city":"Z"}' in tokenizer.decode(as_text[0].ids)
    else:
        assert as_text[0].ids == encode_chat(tokenizer, called({"city": "Z"}), "row 0", None)[0].ids
        with pytest.raises(UsageError, match=r"row 0: .*`arguments` of turn 1 is text, but not JSON"):
            encode_chat(tokenizer, called("Z"), "row 0", None)


def test_tokenizer_with_several_templates(tokenizer):
    """One more for rows with tools, as Command R and Hermes have."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = MARKS.replace("{%", "{{ tools | tojson }}{%", 1)
    tokenizer.chat_template = {"default": kit.CHATML, "tool_use": with_tools}
    plain, more = (encode_chat(tokenizer, CHAT, "row 3", given)[0] for given in (None, tools))
    assert len(plain[0]) < len(more[0])
    targets = [tokenizer.decode([label for label in labels if label != IGNORED]) for _, labels, _ in (plain, more)]
    assert targets == ["hello<|endoftext|>\n" * 2, "hello" * 2]  # as each template says


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "int"}, "y": None}}}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [json.dumps(tool) for tool in TOOLS]])
def test_tools_of_a_row_are_given_to_the_template(tokenizer, tools):
    with pytest.raises(ValueError, match=r"does not write the `tools`.*--chat_template"):
        render(tokenizer, kit.CHATML, CHAT, tools)
    template = "{% if tools %}<|tools|>{{ tools | tojson }}\n{% endif %}" + kit.CHATML
    text, turns = render(tokenizer, template, CHAT, tools)
    head = text.removesuffix(render(tokenizer, kit.CHATML, CHAT)[0])
    assert json.loads(head.removeprefix("<|tools|>")) == TOOLS
    assert [text[a:b] for a, b in turns] == ["hello<|endoftext|>\n"] * 2


def test_each_tool_of_a_row_is_written(tokenizer):
    template = "{{ (tools or [])[:1] | tojson }}" + kit.CHATML
    other = {"type": "function", "function": {"name": "assistant"}}  # stands in headers, too
    assert render(tokenizer, template, CHAT, TOOLS)
    with pytest.raises(ValueError, match="does not write the `tools`"):
        render(tokenizer, template, CHAT, [*TOOLS, other])


@pytest.mark.parametrize("tools", [None, "", " ", "[]", []])
def test_a_row_may_have_no_tools(tools):
    assert read_chat(CHAT, tools).tools is None


@pytest.mark.parametrize("tools, words", [("f(x)", "text, but not JSON"), ({"name": "f"}, "not a list"), (5, "not a")])
def test_tools_that_are_no_list_are_refused(tokenizer, tools, words):
    with pytest.raises(ValueError, match=f"`tools` of the row.*{words}"):
        render(tokenizer, kit.CHATML, CHAT, tools)


# ---- templates and chats that are refused ----------------------------------------------------------------------------

NO_SYSTEM = LOOP + "{% if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}\n{% endif %}{% endfor %}"
MARKS = kit.CHATML.replace(
    "{{ m['content'] }}",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}",
)
UPPER = LOOP + "{{ m.role }}: {{ m.content | upper }}\n{% endfor %}"
LATER = LOOP + "<|{{ m.role }}|>{{ m.content }}{% if loop.last %}<|endoftext|>{% endif %}{% endfor %}"
NO_TURN = LOOP + "{% if loop.index != 3 %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
CUT = kit.CHATML.replace("m['content']", "m['content'][1:]")
PYTHON = TOOL_CHAT.replace("arguments | tojson", "arguments")
FIRST_ONLY = TOOL_CHAT.replace("arguments | tojson", "arguments.a | tojson")
THINK_PROMPT = kit.CHATML.replace("<|assistant|>{% endif %}", "<|assistant|><think>{% endif %}")
SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    "template, messages, words",
    [
        (kit.CHATML, [CHAT[0], CALL], "`messages`.*tool_calls of turn 1"),
        (kit.CHATML, [CHAT[0], CHAT[1] | {"reasoning_content": "why"}], "not write the reasoning_content of turn 1"),
        (kit.CHATML, [CHAT[0], CHAT[1] | {"function_call": {"name": "f"}}], "not write the function_call of turn 1"),
        (kit.CHATML, [CHAT[0], CHAT[1] | {"weight": 0.5}], "turn 1 has `weight` 0.5"),
        (kit.CHATML, [CHAT[0], CHAT[1] | {"train": "false"}], "turn 1 has `train` 'false'"),
        (kit.CHATML, [CHAT[0], CHAT[1] | {"train": False, "weight": 1}], "train and weight, which say the opposite"),
        (kit.CHATML, [CHAT[0], CHAT[1] | {"train_detail": [{"train": False}]}], "turn 1 has `train_detail`"),
        (kit.CHATML, [CHAT[0], CHAT[1] | {"loss_mask": 0}], "turn 1 has `loss_mask`"),
        (kit.CHATML, [CHAT[0] | {"images": ["x.png"]}, CHAT[1]], "turn 0 has `images`"),
        (kit.CHATML, [CHAT[0], {"role": "assistant", "content": None}], "turn 1 has no role or"),
        (kit.CHATML, [CHAT[0] | {"content": 5}, CHAT[1]], "content of turn 0 is int"),
        (kit.CHATML, [parts("text", "image_url"), *CHAT[1:]], "content of turn 0 has parts of type image_url"),
        (MARKS, [CHAT[0], GPT, *CHAT], "turn 1 has the role 'gpt'"),
        (kit.CHATML, [CHAT[0], CHAT[1] | {"role": "assistant "}], "turn 1 has the role 'assistant '"),
        (kit.CHATML, [CHAT[0], CHAT[1], {"role": "tool", "content": {"a": 1}}], "content of turn 2 as Python code"),
        (NO_SYSTEM, [SYSTEM, *CHAT], "does not write the content of turn 0"),
        (NO_TURN, [CHAT[0], CHAT[1], CHAT[0], CHAT[1]], "does not write the content of turn 2"),
        (CUT, CHAT, "does not write the content of turn 0"),
        (UPPER, CHAT[1:2], "does not write the content of turn 0"),
        (PYTHON, called({"city": "Paris"}), "arguments of turn 1 as Python code"),
        (FIRST_ONLY, called({"a": "one", "b": {"c": ["two"]}}), "does not write the tool_calls of turn 1"),
        (FIRST_ONLY, called({"a": "one", "b": "one"}), "does not write the tool_calls of turn 1"),
        (NO_TURN, [*CHAT[:2], {"role": "user", "content": "s"}, CHAT[1]], "does not write the content of turn 2"),
        (LATER, CHAT, "turn 1 .*prompt ends, ''.*--chat_template.*is nearest"),
        (THINK_PROMPT, CHAT, "turn 1 .*prompt ends, '<|assistant|><think>'"),
    ],
)
def test_chats_and_templates_that_are_refused(tokenizer, template, messages, words):
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match=f"row 3: .*{words.replace('|', '.')}"):
        encode_chat(tokenizer, messages, "row 3", None)


def test_texts_may_be_escaped_as_json_says(tokenizer):
    template = kit.CHATML.replace("m['content']", "m['content'] | tojson")
    text, spans = render(tokenizer, template, [CHAT[0], {"role": "assistant", "content": 'say "für"\n'}])
    assert [text[a:b] for a, b in spans] == ['"say \\"für\\"\\n"<|endoftext|>\n']


def test_template_that_compares_names_is_searched_for_texts(tokenizer):
    """So it writes another text for names with marks."""
    template = TOOL_CHAT.replace(
        "{{ m.tool_calls[0].function.name }}", "{% if m.tool_calls[0].function.name == 'f' %}f{% endif %}"
    )
    assert len(render(tokenizer, template, called({"city": "Paris"}))[1]) == 2
    with pytest.raises(ValueError, match="does not write the tool_calls of turn 1"):
        render(tokenizer, template.replace("arguments | tojson", "arguments.town"), called({"city": "Paris"}))


def test_the_location_of_a_row_is_read_only_for_an_error(tokenizer):
    """It counts the lines of the file: once for each row, time would grow with the square of the rows."""
    reads = []

    class Location:
        def __str__(self) -> str:
            reads.append(1)
            return "line 7"

    tokenizer.chat_template = kit.CHATML
    encode_chat(tokenizer, CHAT, Location(), None)
    assert not reads
    with pytest.raises(UsageError, match="line 7"):
        encode_chat(tokenizer, [GPT], Location(), None)


GLM = LOOP + "<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"

UNPROMPTED = LOOP + (
    "[{{ m.role }}] {% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "template, words",
    [
        # `<|im_end|>` is plain text for this tokenizer, so a trained model would not stop after its answer.
        (TEMPLATES["chatml"][0], "generation will not stop"),
        # Rows that are prepared tomorrow would differ, and the run would not resume with them.
        (GLM, "no target says that the turn ends"),
        (MARKS, "no target says that the turn ends"),
        (UNPROMPTED, "which a trained model neither gets nor learns"),
        (UNPROMPTED + "{% if add_generation_prompt %}[assistant] {% endif %}", ""),
        (kit.CHATML, ""),
    ],
)
def test_warnings(tokenizer, capsys, template, words):
    tokenizer.chat_template = template
    encode_chat(tokenizer, CHAT, "row 3", None)
    warnings = capsys.readouterr().err
    assert warnings.count("warning: ") == bool(words)
    assert words in warnings


def test_keys_that_a_template_does_not_read_are_warned_of(tokenizer, capsys):
    tokenizer.chat_template = kit.CHATML
    chat = [CHAT[0] | {"name": "Ann", "id": "a1"}, CHAT[1]]
    encode_chat(tokenizer, chat, "row 3", None)
    assert "does not read `name`" in capsys.readouterr().err
    tokenizer.chat_template = kit.CHATML.replace("{{ m['content'] }}", "{{ m.name or '' }}{{ m['content'] }}")
    encode_chat(tokenizer, chat, "row 3", None)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("role", "meant"), [("asistant", "assistant"), ("usr", "user"), ("systen", "system")])
def test_misspelled_role_is_refused(role, meant):
    """Templates write any role, so the turn would be trained around without a word."""
    with pytest.raises(
        ValueError, match=f"turn 1 has the role '{role}', which is not trained on; did you mean {meant}"
    ):
        read_chat([{"role": "user", "content": "a"}, {"role": role, "content": "b"}], None)


def test_role_of_a_template_of_ones_own_is_read_with_a_warning(capsys):
    chat = read_chat([{"role": "critic", "content": "a"}, {"role": "assistant", "content": "b"}], None)
    assert chat.is_trained == [False, True]
    assert "turns of the role 'critic' are not trained on" in capsys.readouterr().err
