"""Chats: the assistant's turns in the text of any template."""

import json

import pytest
from transformers import AutoTokenizer

from src.config.errors import UsageError
from src.text.chat import encode_chat, render_chat, warn_once
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
    return AutoTokenizer.from_pretrained(kit.tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["def f(x)"]))


def render(tokenizer, template, *arguments):
    tokenizer.chat_template = template
    return render_chat(tokenizer, *arguments)


TEMPLATES = {  # and what each writes around an assistant's words
    "chatml": ((kit.REPOSITORY / "configs/chatml.jinja").read_text(), "<|im_start|>assistant\n", "<|im_end|>\n"),
    "mistral": (
        "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }}</s>"
        "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
        "",
        "</s>",
    ),
    "no prompt": ("{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}", "assistant:", "\n"),
}
# The mutant looks for the words in the text, and finds "assistant" in the header.
WORDS = ["hello", "assistant", "a", "", "  spaced ", "<|im_start|>"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_loss_never_covers_a_header_of_the_template(tokenizer, name):
    template, header, end = TEMPLATES[name]
    mutant_failed = False
    for words in WORDS:
        say = {"role": "assistant", "content": words}
        for chat in ([say], [say, CHAT[0], say], [CHAT[0], say, say], [CHAT[0], say | {"tool_calls": None}]):
            text, turns = render(tokenizer, template, chat, "row 0")
            assert len(turns) == sum(turn["role"] == "assistant" for turn in chat)
            for a, b in turns:
                assert text[:a].endswith(header)
                assert text[a:b].strip() in (f"{words.strip()}{end}".strip(), f"{words}{end}".strip()), (words, chat)
            mutant_failed |= text.find(words) != turns[0][0]
    assert mutant_failed


# ---- templates and chats that are refused ----------------------------------------------------------------------------

CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
PARTS = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
GPT = {"role": "gpt", "content": "yes"}

NO_SYSTEM = LOOP + "{% if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}\n{% endif %}{% endfor %}"
MARKS = kit.CHATML.replace("{{ m['content'] }}", "{% generation %}{{ m['content'] }}{% endgeneration %}")
UPPER = LOOP + "{{ m.role }}: {{ m.content | upper }}\n{% endfor %}"
LAST = LOOP + "{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}"
TOOL_CHAT = (
    LOOP + "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}"
)
TOOL_CHAT += (
    "{% endif %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}"
)
TOOL_CHAT += "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def called(arguments) -> list[dict]:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    return [{"role": "user", "content": 'loads("{}")'}, call, {"role": "tool", "content": "5"}, CHAT[1]]


@pytest.mark.parametrize(
    "template, messages, words",
    [
        (kit.CHATML, [CHAT[0], CALL], "`messages`.*tool_calls of turn 1"),
        (kit.CHATML, [CHAT[0], CHAT[1] | {"reasoning_content": "why"}], "not write the reasoning_content of turn 1"),
        (kit.CHATML, [CHAT[0], CHAT[1] | {"function_call": {"name": "f"}}], "not write the function_call of turn 1"),
        (kit.CHATML, [CHAT[0], CHAT[1] | {"weight": 0}], "turn 1 has the weight 0"),
        (kit.CHATML, [CHAT[0], {"role": "assistant", "content": None}], "turn 1 has no role or"),
        (MARKS, [CHAT[0], GPT, *CHAT], "turn 1 has the role 'gpt'"),
        (kit.CHATML, [PARTS, *CHAT[1:]], "content of turn 0"),
        (NO_SYSTEM, [{"role": "system", "content": "be brief"}, *CHAT], "does not write the content of turn 0"),
        (TOOL_CHAT, called('{"city": "Zürich"}'), "quotes the arguments of turn 1 again"),
        (UPPER, CHAT[1:2], "`messages`.*generation %}"),
        (LAST, CHAT, "earlier turns.*--chat_template"),
    ],
)
def test_chats_and_templates_that_are_refused(tokenizer, template, messages, words):
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match=f"row 3: .*{words}"):
        encode_chat(tokenizer, messages, "row 3", None)


def test_missing_values_of_a_turn_are_not_written(tokenizer):
    """Arrow gives all calls the same arguments, which are null where a call has none of that name."""
    text, _ = render(tokenizer, TOOL_CHAT, called({"city": "Paris", "limit": None}), "row 3")
    assert '{"city": "Paris"}' in text


@pytest.mark.parametrize("arguments", [{"city": "Paris"}, '{"city": "Paris"}', "{}"])
def test_template_that_refuses_a_result_without_its_call_writes_the_call(tokenizer, arguments):
    """As gpt-oss does, and Mistral: what they refuse to render without a part is no reason to refuse the chat. The quoted
    text of the user is not the arguments."""
    template = TOOL_CHAT if isinstance(arguments, dict) else TOOL_CHAT.replace("| tojson", "")
    assert len(render(tokenizer, template, called(arguments), "row 3")[1]) == 2


def test_tokenizer_with_several_templates(tokenizer):
    """One more for rows with tools, as Command R and Hermes have."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = kit.CHATML.replace("{%", "{{ tools | tojson }}{%", 1)
    tokenizer.chat_template = {"default": kit.CHATML, "tool_use": with_tools}
    plain, more = (encode_chat(tokenizer, CHAT, "row 3", given)[0] for given in (None, tools))
    assert len(plain) < len(more)


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "int"}, "y": None}}}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_of_a_row_are_given_to_the_template(tokenizer, tools):
    """Arrow gives all tools the same parameters, which are null where a tool has none of that name."""
    with pytest.raises(UsageError, match=r"row 3: `messages`.* does not write the `tools`.*--chat_template"):
        render(tokenizer, kit.CHATML, CHAT, "row 3", tools)
    template = "{% if tools %}<|tools|>{{ tools | tojson }}\n{% endif %}" + kit.CHATML
    text, turns = render(tokenizer, template, CHAT, "row 3", tools)
    head = text.removesuffix(render(tokenizer, kit.CHATML, CHAT, "row 3")[0])
    assert json.loads(head.removeprefix("<|tools|>"))[0]["function"]["parameters"] == {"x": {"type": "int"}}
    assert [text[a:b] for a, b in turns] == ["hello<|endoftext|>\n"] * 2


@pytest.mark.parametrize(
    "template, words",
    [
        # `<|im_end|>` is plain text for this tokenizer, so a trained model would not stop after its answer.
        (TEMPLATES["chatml"][0], "generation will not stop"),
        # Rows that are prepared tomorrow would differ, and the run would not resume with them.
        ("{{ strftime_now('%d %b %Y') }}\n" + kit.CHATML, "the chat template writes the date"),
        (kit.CHATML.replace("m['content']", "m['content'][1:]"), "the chat template changes or drops text"),
        (kit.CHATML, ""),
    ],
)
def test_warnings(tokenizer, capsys, template, words):
    warn_once.cache_clear()
    tokenizer.chat_template = template
    encode_chat(tokenizer, CHAT, "row 3", None)
    warnings = capsys.readouterr().err
    assert warnings.count("warning: ") == bool(words)
    assert words in warnings
