"""Bytes of tokens, documents packed into rows, and the turns of a chat."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from src.config.errors import UsageError
from src.text import chat
from src.text.chat import render_chat
from src.text.packing import pack
from src.text.tokenization import require_text, token_bytes
from tests.helpers import kit

# ---- packing ---------------------------------------------------------------------------------------------------------


def documents(count, longest, labelled=False, seed=0):
    """Ragged documents, each of its own token id, as the columns that pack sees."""
    generator = np.random.default_rng(seed)
    lengths = 1 + (longest * generator.random(count) ** 2).astype(int)
    batch = {
        "input_ids": [[d] * int(n) for d, n in enumerate(lengths)],
        "length": lengths.tolist(),
        "targets": [max(0, int(n) - 1) for n in lengths],
        "bytes": [3 * int(n) for n in lengths],
        "cut": [0] * count,
    }
    if labelled:
        batch["labels"] = [[-100 if i % 2 else d for i in range(n)] for d, n in enumerate(batch["length"])]
    return batch


def filled(packed, max_length):
    return sum(packed["length"]) / (max_length * len(packed["length"]))


@pytest.mark.parametrize("labelled", [False, True])
def test_every_document_is_whole_in_exactly_one_row(labelled):
    batch = documents(2000, 256, labelled)
    packed = pack(256, batch)
    found = []
    for row, sizes in zip(packed["input_ids"], packed["documents"], strict=True):
        assert sum(sizes) == len(row) <= 256
        ends = np.cumsum(sizes)
        for start, end in zip(ends - sizes, ends, strict=True):
            found.append(row[start])
            assert row[start:end] == batch["input_ids"][row[start]]
    assert sorted(found) == [d for d, n in enumerate(batch["length"]) if n > 1]  # one token predicts nothing
    if labelled:
        for row, labels in zip(packed["input_ids"], packed["labels"], strict=True):
            assert len(labels) == len(row)
            assert all(label in (token, -100) for token, label in zip(row, labels, strict=True))
        kept = [labels for labels in batch["labels"] if len(labels) > 1]
        assert sum(x.count(-100) for x in packed["labels"]) == sum(x.count(-100) for x in kept)


def test_sums_of_a_row_are_those_of_its_documents():
    batch = documents(300, 64)
    packed = pack(64, batch)
    kept = [d for d, n in enumerate(batch["length"]) if n > 1]
    for name in ("length", "targets", "bytes", "cut"):
        assert sum(packed[name]) == sum(batch[name][d] for d in kept)
    assert packed["length"] == [len(row) for row in packed["input_ids"]]
    assert packed["targets"] == [
        len(row) - len(sizes) for row, sizes in zip(*map(packed.get, ("input_ids", "documents")), strict=True)
    ]


def _next_fit(max_length, batch):
    """The mutant: documents in order, a new row as soon as one does not fit."""
    rows = []
    for n in batch["length"]:
        if not rows or rows[-1] + n > max_length:
            rows.append(0)
        rows[-1] += n
    return {"length": rows}


@pytest.mark.parametrize("longest", [64, 256, 1024])
def test_rows_are_full(longest):
    batch = documents(3000, longest)
    assert filled(pack(1024, batch), 1024) >= 0.98
    assert longest == 64 or filled(_next_fit(1024, batch), 1024) < 0.98


def test_best_fit_by_hand():
    # Longest first: 6 | 5 | 4 joins 6 (nothing left) | 3 joins 5 (2 left, the tightest) | 2 joins 5+3.
    batch = documents(5, 1) | {"input_ids": [[n] * n for n in (2, 3, 4, 5, 6)], "length": [2, 3, 4, 5, 6]}
    assert pack(10, batch)["documents"] == [[6, 4], [5, 3, 2]]


def test_packing_is_deterministic():
    assert pack(128, documents(500, 128)) == pack(128, documents(500, 128))
    assert pack(128, documents(500, 128)) != pack(128, documents(500, 128, seed=1))


def test_nothing_to_pack():
    assert pack(8, documents(5, 1))["input_ids"] == []


# ---- bytes -----------------------------------------------------------------------------------------------------------

TEXTS = {
    "ascii": "def f(x): return x",
    "two bytes": "für Ölmühlen",
    "three bytes": "漢字かな",
    "emoji": "a🙂b👩‍👩‍👧c",
    "lone surrogate": "a\ud800b",
    "empty": "",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = kit.tiny_tokenizer(
        tmp_path_factory.mktemp("tokenizer"), ["def f(x): return x, für Ölmühlen"] * 3, chat_template=kit.CHATML
    )
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_bytes_of_characters(text):
    """Each character as a token of its own: known without any tokenizer."""
    expected = [len(c.encode("utf-8", "surrogatepass")) for c in text]
    assert token_bytes(text, [(i, i + 1) for i in range(len(text))]).tolist() == expected


@pytest.mark.parametrize("name", ["ascii", "two bytes", "three bytes", "emoji", "empty"])
def test_bytes_of_tokens_add_up_to_the_text(tokenizer, name):
    text = TEXTS[name]
    spans = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    sizes = token_bytes(text, spans)
    assert len(sizes) == len(spans)
    assert sizes.sum() == len(text.encode())
    assert (sizes >= 0).all()
    if name == "ascii":
        tokens = tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
        assert sizes.tolist() == [len(token) for token in tokens]  # a byte-level token spells a byte a character


def test_gaps_and_special_tokens():
    # A special token spans nothing, the blank that a tokenizer skips belongs to the token after it, a character in
    # several tokens counts once.
    assert token_bytes("ab é", [(0, 0), (0, 2), (3, 4), (3, 4), (0, 0)]).tolist() == [0, 2, 3, 0, 0]


# ---- chats -----------------------------------------------------------------------------------------------------------

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "hello hi"},  # a user who repeats the assistant
    {"role": "assistant", "content": "hello"},
]


def test_turns_of_the_assistant(tokenizer):
    text, turns = render_chat(tokenizer, CHAT, "row 0")
    assert text == "".join(f"<|{m['role']}|>{m['content']}<|endoftext|>\n" for m in CHAT)
    assert [text[a:b] for a, b in turns] == ["hello<|endoftext|>\n"] * 2
    assert all(text[:a].endswith("<|assistant|>") for a, _ in turns)


def test_a_chat_may_begin_with_the_assistant(tokenizer):
    text, turns = render_chat(tokenizer, CHAT[1:], "row 0")
    assert [text[a:b] for a, b in turns] == ["hello<|endoftext|>\n"] * 2


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HEAD = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
TEMPLATES = {  # and what each writes around an assistant's words
    "chatml": ("{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT, "<|im_start|>assistant\n", "<|im_end|>\n"),
    "default system": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are an assistant.<|im_end|>\n{% endif %}"
        "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT,
        "<|im_start|>assistant\n",
        "<|im_end|>\n",
    ),
    "llama 3": (
        "<|begin|>{% for m in messages %}" + HEAD + "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    "gemma": (
        "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
        "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<start_of_turn>model\n",
        "<end_of_turn>\n",
    ),
    "mistral": (
        "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }}</s>{% else %}[INST] {{ m.content }} [/INST]"
        "{% endif %}{% endfor %}",
        "",
        "</s>",
    ),
    "no prompt": ("{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}", "assistant:", "\n"),
}
WORDS = ["hello", "assistant", "a", "", "  spaced ", "<|im_start|>", "model", "system\nYou are an assistant."]


@pytest.mark.parametrize("name", TEMPLATES)
def test_loss_never_covers_a_header_of_the_template(tokenizer, monkeypatch, name):
    template, header, end = TEMPLATES[name]
    monkeypatch.setattr(tokenizer, "chat_template", template)
    for words in WORDS:
        say = {"role": "assistant", "content": words}
        for conversation in ([say], [say, CHAT[0], say], [CHAT[0], say, say], [CHAT[0], say | {"tool_calls": None}]):
            text, turns = render_chat(tokenizer, conversation, "row 0")
            assert len(turns) == sum(turn["role"] == "assistant" for turn in conversation)
            for a, b in turns:
                assert text[:a].endswith(header)
                assert text[a:b].strip() in (f"{words.strip()}{end}".strip(), f"{words}{end}".strip()), (
                    words,
                    conversation,
                )


def test_mutant_that_looks_for_the_words_covers_the_header():
    """The way it was: where the assistant says "assistant", its words were found in the header."""
    after = "<|im_start|>assistant\nassistant<|im_end|>\n"
    assert after.partition("assistant")[0] == "<|im_start|>"


CALL = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
CALLS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\n"
CALLS += "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def test_what_a_template_would_leave_out_is_refused(tokenizer, monkeypatch):
    with pytest.raises(UsageError, match=r"row 3: `messages`.*does not write the tool_calls of turn 1"):
        render_chat(tokenizer, CHAT[:1] + CALL, "row 3")
    with pytest.raises(UsageError, match=r"row 3: `messages`.*turn 1 has no content"):
        render_chat(tokenizer, [*CHAT[:1], {"role": "assistant", "content": None}], "row 3")
    monkeypatch.setattr(tokenizer, "chat_template", CALLS)
    text, [(a, b)] = render_chat(tokenizer, CHAT[:1] + CALL, "row 3")
    assert text[a:b].startswith('[{"function"')
    assert "None" not in text


def test_a_template_that_hides_where_words_begin_is_refused(tokenizer, monkeypatch):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(UsageError, match=r"row 3: `messages`.*generation %}"):
        render_chat(tokenizer, CHAT[1:2], "row 3")


def test_a_template_that_drops_words_is_warned_about(tokenizer, monkeypatch, capsys):
    monkeypatch.setattr(chat, "_warned", [])
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template + "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    for _ in range(2):
        render_chat(tokenizer, [CHAT[0], {"role": "assistant", "content": "<think>why</think>so"}], "row 3")
    assert capsys.readouterr().err.count("warning: row 3: ") == 1


def test_a_chat_without_assistant_has_no_turns(tokenizer):
    assert render_chat(tokenizer, CHAT[:1], "row 0") == ("<|user|>hi<|endoftext|>\n", [])


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, monkeypatch):
    template = "{% for m in messages %}{% if loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(UsageError, match=r"row 7: the chat template rewrites earlier turns.*--chat_template"):
        render_chat(tokenizer, CHAT, "row 7")


@pytest.mark.parametrize("messages", [None, [{"content": "no role"}], ["text"], "text"])
def test_what_is_no_chat_is_refused(tokenizer, messages):
    with pytest.raises(UsageError, match="row 3: `messages`"):
        render_chat(tokenizer, messages, "row 3")


@pytest.mark.parametrize("role", ["Assistant", "gpt", "model"])
def test_an_assistant_of_another_name_is_refused(tokenizer, role):
    """Nothing of it would be trained on."""
    with pytest.raises(UsageError, match=f"row 3: `messages`.*turn 1 has the role '{role}'"):
        render_chat(tokenizer, [CHAT[0], {"role": role, "content": "yes"}, *CHAT], "row 3")


def test_parts_that_a_template_does_not_know_are_refused(tokenizer):
    parts = [{"type": "text", "text": "hi"}]
    with pytest.raises(UsageError, match=r"row 3: `messages`.*parts of turn 0"):
        render_chat(tokenizer, [{"role": "user", "content": parts}, *CHAT[1:]], "row 3")


def test_text_must_be_text():
    require_text(["a", ""], "text", ["row 0", "row 1"])
    for value, kind in ((None, "nothing"), (3, "int"), (["a"], "list")):
        with pytest.raises(UsageError, match=f"row 1: `text` holds {kind}, not text"):
            require_text(["a", value], "text", ["row 0", "row 1"])
