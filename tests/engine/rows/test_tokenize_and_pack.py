"""UTF-8 bytes of tokens, documents packed into rows that are nearly full; each one once: tests/src/tasks/test_causal_lm.py."""

import timeit

import numpy as np
import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from engine.models.packed_attention import document_lengths, packed_positions
from engine.rows import tokenize_and_pack
from engine.rows.prompts import read_prompt
from engine.rows.tokenize_and_pack import (
    pack,
    token_bytes,
    tokenize_truncated,
    tokenize_with_bytes,
)
from tests.helpers import kit

SAID = {
    "text": {"text": "a<|pad|>b"},
    "completion": {"prompt": "a", "completion": "b<|pad|>"},
    "content": {"messages": [{"role": "user", "content": "x <|pad|>"}, {"role": "assistant", "content": "y"}]},
    "output": {"instruction": "a", "output": "<|pad|>"},
}


@pytest.mark.parametrize("name", SAID)
def test_special_tokens_in_texts_are_warned_of_once(tmp_path, capsys, name):
    fields = {"tokenizer_name": kit.tiny_tokenizer(tmp_path / "tokenizer"), "cache_dir": tmp_path / "cache"}
    fields["model_config"] = kit.write_yaml(tmp_path / "llama.yaml", kit.LLAMA)
    if name == "content":
        fields["tokenizer_name"] = kit.tiny_tokenizer(tmp_path / "chats", chat_template=kit.CHATML)
    row = SAID[name]
    plain = dict.fromkeys(row, "plain")
    if name == "content":
        plain = {"messages": [{"role": "assistant", "content": "plain"}]}
    file = kit.write_jsonl(tmp_path / "rows.jsonl", [plain, row, row])
    kit.open_data(train_file=file, **fields)
    warnings = capsys.readouterr().err
    assert f"rows.jsonl, line 2: train data: `{name}` holds '<|pad|>'" in warnings
    assert warnings.count("warning:") == 1


def test_a_thousand_special_tokens_are_found_quickly(tmp_path):
    """Tokenizers of Mistral have so many, which all begin as a tag of HTML does."""
    patterns = []
    for count in (1, 2000):
        tokenizer = AutoTokenizer.from_pretrained(kit.tiny_tokenizer(tmp_path / str(count)))
        tokens = ["<s>", "<s>>", *(f"<SPECIAL_{i}>" for i in range(count))]
        tokenizer.add_special_tokens({"additional_special_tokens": tokens})
        patterns.append(tokenize_and_pack._special_tokens(tokenizer))
    found = [patterns[1].search(text)[0] for text in ("a<s>>", "a<s>b", "<SPECIAL_1999>")]
    assert found == ["<s>>", "<s>", "<SPECIAL_1999>"]
    html = "<div><p>x</p></div>" * 2000
    few, many = (min(timeit.repeat(lambda p=p: p.search(html), number=1, repeat=5)) for p in patterns)
    assert many < 20 * few


def test_text_is_text_if_special_tokens_are_split(tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(kit.tiny_tokenizer(tmp_path / "tokenizer"), split_special_tokens=True)
    tokenize_and_pack.warn_of_special_tokens(tokenizer, ["<|pad|>"], "text", ["here"])
    assert not capsys.readouterr().err


def test_text_that_begins_with_the_bos_gets_no_second_one(tmp_path):
    """As `apply_chat_template(tokenize=False)` writes it: in rows of texts and of pairs, in prompts, and if truncated."""
    tokenizer = AutoTokenizer.from_pretrained(kit.tiny_tokenizer(tmp_path / "plain"))
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    added = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=added)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    fields = {"tokenizer_name": tmp_path / "tokenizer", "cache_dir": tmp_path / "cache"}
    fields["model_config"] = kit.write_yaml(tmp_path / "llama.yaml", kit.LLAMA)
    for columns in (("text",), ("prompt", "completion")):
        rows = [dict.fromkeys(columns, "abc"), {**dict.fromkeys(columns, "abc"), columns[0]: "<s>abc"}]
        task, splits = kit.open_data(train_file=kit.write_jsonl(tmp_path / f"{columns[0]}.jsonl", rows), **fields)
        one, other = kit.all_rows(splits["train"])
        assert one["input_ids"].tolist() == other["input_ids"].tolist()
        assert one["input_ids"].tolist().count(tokenizer.bos_token_id) == 1
        assert one["bytes"] == other["bytes"]
    assert read_prompt(task.tokenizer, "<s>abc", "here").ids == read_prompt(task.tokenizer, "abc", "here").ids
    encoded, counts = tokenize_truncated(task.tokenizer, [["<s>abcde", "abcde"]], 4)
    assert [len(values[0]) for values in encoded.values()] == [3, 3]
    assert counts == {"length": [3, 4], "cut": [3, 2]}


def test_bytes_of_gaps_and_special_tokens():
    # A special token covers nothing, a skipped blank belongs to the token after it, a character in several tokens
    # counts once.
    assert token_bytes("ab é", np.array([0, 2, 4, 4, 0])).tolist() == [0, 2, 3, 0, 0]


@pytest.mark.parametrize("text", ["ab é 漢字 😀", "<s>ab é", "é<s> a", ""])
def test_bytes_before_a_token_are_the_sum_of_each(text, tmp_path):
    """Also with tokens that the tokenizer adds, of which one is removed if the text has it, and behind the last token."""
    tokenizer = AutoTokenizer.from_pretrained(kit.tiny_tokenizer(tmp_path))
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    added = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <s>", special_tokens=added
    )
    [(ids, sizes)] = tokenize_with_bytes(tokenizer, [text])
    sums = sizes.of_each(len(ids)).cumsum().tolist()
    assert [sizes.before(i) for i in range(len(ids) + 2)] == [0, *sums, sums[-1]]
    assert sums[-1] == len(text.encode())


def test_best_fit_by_hand():
    # Longest first: 6 | 5 | 4 joins 6 (nothing left) | 3 joins 5 (2 left, the tightest) | 2 joins 5+3.
    lengths = [2, 3, 4, 5, 6]
    counts = dict.fromkeys(("length", "targets", "bytes", "cut"), lengths)
    assert pack(10, counts | {"input_ids": [[n] * n for n in lengths]})["documents"] == [[6, 4], [5, 3, 2]]
    assert pack(8, counts | {"input_ids": [[7]] * 5, "length": [1] * 5})["input_ids"] == []  # they predict nothing


@pytest.mark.parametrize("max_length", [7, 64, 1000])
def test_best_fit_is_that_of_a_search_through_all_rows(max_length):
    """The tightest row with space, of several the one that changed last; a row is never too full."""
    lengths = (1 + max_length * np.random.default_rng(1).random(500) ** 2).astype(int).tolist()
    rows: list[list[int]] = []  # in the order of their last change
    for length in sorted((length for length in lengths if length > 1), reverse=True):
        fitting = [row for row in reversed(rows) if sum(row) + length <= max_length]
        row = max(fitting, key=sum, default=[])
        rows = [each for each in rows if each is not row] + [[*row, length]]
    packed = [[lengths[document] for document in row] for row in tokenize_and_pack._best_fit(lengths, max_length)]
    assert sorted(packed) == sorted(rows)
    assert max(map(sum, packed)) <= max_length


def test_padding_does_not_continue_a_document():
    """It counts from zero, so transformers sees padding as a document of its own."""
    assert packed_positions(np.array([3, 2]), 5).tolist() == [0, 1, 2, 0, 1]
    assert packed_positions(np.array([2]), 5).tolist() == [0, 1, 0, 1, 2]
    rows = [np.array([3, 2]), np.array([2])]
    assert document_lengths(rows, 5).tolist() == [3, 2, 2, 3]  # and none of a full row: kernels start blocks for each
