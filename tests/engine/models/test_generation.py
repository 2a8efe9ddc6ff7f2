"""Prompts and answers as tokens: what stands before the last answer, where an answer ends, rows of several sources."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config.errors import UsageError
from engine.models.generation import Generation, cut_after
from engine.rows.prompts import end_of_turn, last_answer, prompt_in_words, read_prompt
from engine.rows.tokenize_and_pack import IGNORED
from tests.helpers import kit

X = IGNORED
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinks is defined %}{{ thinks }}{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer whose turns end with another token than its texts."""
    folder = kit.tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["one two user assistant"] * 3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    return tokenizer


@pytest.mark.parametrize(
    "labels, prompt, answer",
    [
        ([X, X, 7, 8], 2, [7, 8]),
        ([X, 5, X, X, 7, 8, X], 4, [7, 8]),  # two turns, and one of the user at the end
        ([X, 5, 6, 7, 8], 1, [5, 6, 7, 8]),
    ],
)
def test_last_answer_is_the_last_run_of_targets(labels, prompt, answer):
    """The mutant takes the last turn of a row, also if it is one of the user."""
    ids = np.array([value if value != X else 1 for value in labels])
    found = last_answer(ids, np.array(labels))
    assert found.ids == ids[:prompt].tolist()
    assert found.reference == answer


@pytest.mark.parametrize("labels", [[X, X, X], [5, 6, 7], [5, 6, X]])
def test_rows_without_an_answer_or_with_nothing_before_it_have_no_prompt(labels):
    assert last_answer(np.arange(3), np.array(labels)) is None


def test_answers_end_at_the_token_that_ends_a_turn(tokenizer, tmp_path):
    """The model says one token, and the end of a turn, for ever; without that token it would go on."""
    tokenizer.chat_template = CHATML
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end_of_turn(tokenizer) == end != tokenizer.eos_token_id
    assert cut_after(torch.tensor([[5, end, 5, end], [5, 5, 5, 5]]), [end]).tolist() == [[5, end, X, X], [5, 5, 5, 5]]
    model = AutoModelForCausalLM.from_pretrained(kit.save_model(tmp_path, kit.LLAMA | {"vocab_size": len(tokenizer)}))
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()  # all logits are equal, and the first token wins
    options = SimpleNamespace(chat_template_kwargs={"thinks": "two "})
    generation = Generation(options, tokenizer, model.config)
    prompt = generation.read_prompt([{"role": "user", "content": "one"}], "here")
    assert tokenizer.decode(prompt.ids) == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo "
    of_row = generation.read_prompt([{"role": "user", "content": "one"}], "here", of_row={"thinks": "one ", "no": 1})
    assert tokenizer.decode(of_row.ids).endswith("assistant\none ")
    inputs = generation.inputs([prompt, generation.read_prompt("one two", "here")])
    assert inputs["attention_mask"].sum(1).tolist() == [len(prompt.ids), len(tokenizer("one two")["input_ids"])]
    assert inputs["attention_mask"][1, -1] == 1  # padding is on the left
    tokens = generation.generate(model, inputs, None, 4)
    assert tokens.tolist() == [[0, X, X, X]] * 2  # 0 ends a text
    generation.tokenizer.eos_token = None
    generation.end_of_turn = 0
    assert generation.generate(model, inputs, None, 4).tolist() == [[0, X, X, X]] * 2
    generation.end_of_turn = end
    model.generation_config.eos_token_id = None
    assert generation.generate(model, inputs, None, 4).tolist() == [[0, 0, 0, 0]] * 2
    generation.tokenizer.eos_token = "<|endoftext|>"


def test_templates_without_an_end_of_turn_have_none(tokenizer):
    for template in ("{% for m in messages %}{{ m['content'] }} {% endfor %}", "{{ raise_exception('no') }}", None):
        tokenizer.chat_template = template
        assert end_of_turn(tokenizer) is None


@pytest.mark.parametrize(
    "turns, words",
    [
        ([], "ends with nothing"),
        ([{"role": "assistant", "content": "one"}], "ends with assistant"),
        ([{"role": "user"}], "no content"),
        ([{"role": "bot", "content": "one"}], "bot"),
    ],
)
def test_chats_that_cannot_be_answered_are_refused(tokenizer, turns, words):
    tokenizer.chat_template = CHATML
    with pytest.raises(UsageError, match=f"file, line 3: .*{words}"):
        read_prompt(tokenizer, turns, "file, line 3")
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="chat_template"):
        read_prompt(tokenizer, [{"role": "user", "content": "one"}], "here")


def test_prompts_in_words():
    call = {"role": "assistant", "content": None, "tool_calls": [1]}
    text = prompt_in_words([{"role": "user", "content": "one"}, call])
    assert text == f"user: one\nassistant: {json.dumps(call)}"
    assert prompt_in_words("two") == "two"


def test_first_rows_of_each_source_of_a_mixture(tmp_path):
    """Two sources, one with rows of text, which have no prompt."""
    model = kit.write_yaml(tmp_path / "llama.yaml", kit.LLAMA)
    chats = [
        {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": f"two {i}"}]}
        for i in range(5)
    ]
    sources = {}
    for name, rows in (("chats", chats), ("texts", [{"text": "one two one"}] * 5)):
        file = kit.write_jsonl(tmp_path / f"{name}.jsonl", rows)
        sources[name] = {"train_file": str(file), "validation_file": str(file)}
    task, _ = kit.open_data(
        mixture=json.dumps(sources),
        model_config=model,
        tokenizer_name=kit.tiny_tokenizer(tmp_path / "tokenizer", ["one two user"] * 3, chat_template=kit.CHATML),
        predict_with_generate=True,
        max_eval_generate_examples=3,
    )
    texts = task.generation.texts([prompt.reference for prompt in task.generation.of_rows])
    assert texts == ["two 0", "two 1", "two 2"]
