"""Tokens that a run adds: rows that begin as the mean of the others, are trained, saved, and come back bitwise."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

from engine.config.errors import UsageError
from tests.helpers import kit

TOKENS = ["<|call|>", "<|end|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three pretrained models: tied, untied, and tied with a padded vocabulary."""
    folder = tmp_path_factory.mktemp("tokens")
    texts = [f"def <|call|> return{i} <|end|> self" for i in range(12)]
    kit.write_jsonl(folder / "train.jsonl", [{"text": text} for text in texts])
    tokenizer = AutoTokenizer.from_pretrained(kit.tiny_tokenizer(folder / "tokenizer", ["def return self"] * 3))
    size = len(tokenizer)
    models = {
        "tied": kit.EXACT | {"vocab_size": size},
        "untied": kit.LLAMA | {"vocab_size": size, "tie_word_embeddings": False},
        "padded": kit.EXACT | {"vocab_size": size + 30},
    }
    for name, config in models.items():
        kit.save_model(folder / name, config)
        tokenizer.save_pretrained(folder / name)
    return folder


def fields(folder, name="tied", **more) -> dict:
    given = {"model_name_or_path": folder / name, "train_file": folder / "train.jsonl", "cache_dir": folder / "cache"}
    return given | {"dtype": "float64", "add_tokens": TOKENS, "max_length": 64} | more


@pytest.mark.parametrize("name", ["tied", "untied", "padded"])
def test_new_rows_are_the_mean_of_the_rows_before(folder, name):
    task, splits = kit.open_data(**fields(folder, name))
    first = len(AutoTokenizer.from_pretrained(folder / "tokenizer"))
    ids = task.tokenizer.convert_tokens_to_ids(TOKENS)
    assert ids == [first, first + 1]
    assert {*ids} <= {*kit.all_rows(splits["train"])[0]["input_ids"].tolist()}
    model = task.build()
    before = AutoModelForCausalLM.from_pretrained(folder / name, dtype="float64")
    size = {"padded": first + 30}.get(name, first + 2)
    assert model.config.vocab_size == task.vocab_size == size
    for mine, old in ((model.get_input_embeddings(), before.get_input_embeddings()), (model.lm_head, before.lm_head)):
        mean = old.weight[:first].mean(0).expand(2, -1)
        assert torch.equal(mine.weight[:first], old.weight[:first])
        assert torch.allclose(mine.weight[ids], mean, atol=1e-15)
        assert len(mine.weight) == size
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == (name != "untied")


def test_random_weights_have_a_larger_vocabulary(folder):
    config = kit.write_yaml(folder / "gpt2.yaml", {k: v for k, v in kit.EXACT.items() if k != "vocab_size"})
    given = fields(folder, model_config=config, tokenizer_name=folder / "tokenizer")
    del given["model_name_or_path"]
    task, _ = kit.open_data(**given)
    assert len(task.build().get_input_embeddings().weight) == len(task.tokenizer)
    assert task.tokenizer.convert_tokens_to_ids(TOKENS[1]) == len(task.tokenizer) - 1


@pytest.mark.parametrize("tokens, words", [(["x", " "], "' ' is empty"), (["new", "new"], "'new' is given twice")])
def test_tokens_that_are_refused(folder, tokens, words):
    with pytest.raises(UsageError, match=f"add_tokens: {words}"):
        kit.open_data(**fields(folder, add_tokens=tokens))


def test_tokens_that_the_tokenizer_has_are_warned_of(folder, capsys):
    task, _ = kit.open_data(**fields(folder, add_tokens=["a", "<|new|>"]))
    text = capsys.readouterr().err
    assert "the tokenizer has 'a'" in text
    assert "<|new|>" not in text
    model = task.build()
    before = AutoModelForCausalLM.from_pretrained(folder / "tied", dtype="float64")
    assert torch.equal(model.lm_head.weight[:-1], before.lm_head.weight)


def test_tokens_need_a_tokenizer(folder):
    config = kit.write_yaml(folder / "gpt2.yaml", kit.EXACT)
    rows = kit.write_jsonl(folder / "ids.jsonl", [{"input_ids": [1, 2, 3]}])
    with pytest.raises(UsageError, match="add_tokens needs a tokenizer"):
        kit.open_data(model_config=config, train_file=rows, cache_dir=folder / "cache", add_tokens=["x"])


def test_new_rows_are_trained_saved_and_resumed(folder, tmp_path):
    """On two processes as on one; another run continues with them, and adds one more."""
    common = fields(
        folder, "untied", global_batch_size=4, per_device_batch_size=2, max_steps=4, save_steps=2, learning_rate=1e-2
    )
    common |= {"save_total_limit": 5, "logging_steps": 1}
    one = kit.run_training(1, tmp_path / "one", *kit.flags(**common))
    two = kit.run_training(2, tmp_path / "two", *kit.flags(**common))
    final = load_file(one.folder / "final" / "model.safetensors")
    other = load_file(two.folder / "final" / "model.safetensors")
    assert max((final[name] - other[name]).abs().max() for name in final) < 1e-12
    tokenizer = AutoTokenizer.from_pretrained(one.folder / "final")
    ids = tokenizer.convert_tokens_to_ids(TOKENS)
    model = AutoModelForCausalLM.from_pretrained(one.folder / "final", dtype="float64")
    task, _ = kit.open_data(**common)
    start = task.build()
    for name in ("get_input_embeddings", "get_output_embeddings"):
        moved = getattr(model, name)().weight - getattr(start, name)().weight
        assert (moved[ids].abs().max(1).values > 1e-3).all()
    # Resumed from step 2: bitwise.
    shutil.copytree(one.folder, tmp_path / "resumed")
    for name in ("final", "checkpoints/step_00000004"):
        shutil.rmtree(tmp_path / "resumed" / name)
    again = kit.run_training(1, tmp_path / "resumed", *kit.flags(**common))
    resumed = load_file(again.folder / "final" / "model.safetensors")
    assert all(torch.equal(final[name], resumed[name]) for name in final)
    # init_from keeps the trained rows and gives the third token a new one.
    more, _ = kit.open_data(**common | {"add_tokens": [*TOKENS, "<|third|>"]})
    built = more.build(str(one.folder / "final"))
    assert torch.equal(built.lm_head.weight[: ids[1] + 1], model.lm_head.weight)
    assert torch.allclose(built.lm_head.weight[ids[1] + 1], model.lm_head.weight.mean(0), atol=1e-15)
    with pytest.raises(UsageError, match="has id"):
        swapped, _ = kit.open_data(**common | {"add_tokens": TOKENS[::-1]})
        swapped.build(str(one.folder / "final"))
    assert json.loads((one.folder / "final" / "config.json").read_text())["vocab_size"] == ids[1] + 1


def test_trained_rows_come_back_with_a_tokenizer_without_tokenizer_json(folder, tmp_path):
    kit.save_model(tmp_path / "model", kit.LLAMA | {"vocab_size": 384})
    ByT5Tokenizer().save_pretrained(tmp_path / "model")
    common = fields(folder, model_name_or_path=tmp_path / "model", max_length=128)
    task, _ = kit.open_data(**common)
    model = task.build()
    with torch.no_grad():
        model.get_input_embeddings().weight[384:] += 1  # training
    model.save_pretrained(tmp_path / "trained")
    task.tokenizer.save_pretrained(tmp_path / "trained")
    assert not (tmp_path / "trained" / "tokenizer.json").exists()
    again, _ = kit.open_data(**common)
    built = again.build(str(tmp_path / "trained"))
    assert torch.equal(built.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_weights_without_a_tokenizer_are_refused(folder, tmp_path):
    task, _ = kit.open_data(**fields(folder))
    task.build().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="has no tokenizer that tells which tokens"):
        task.build(str(tmp_path))
