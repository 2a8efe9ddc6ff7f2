"""make preview: the rows of the first steps as text, with the tokens that have a loss marked."""

import re
from importlib import import_module

import numpy as np
import pytest

from addons.tools import preview
from tests.conformance import recipes
from tests.helpers import kit

ADDON_RECIPES = "tests.addons.tasks.recipes"
WORDS = ["def f return self"] * 3


def shown(folder, capsys, data, **fields) -> str:
    file = kit.write_jsonl(folder / "rows.jsonl", data)
    model = kit.write_yaml(folder / "model.yaml", kit.TINY | {"vocab_size": 400})
    given = {"model_config": model, "train_file": file, "cache_dir": folder / "cache"}
    preview.main([str(word) for word in kit.flags(**given | fields)])
    return capsys.readouterr().out


def marked(text: str) -> list[str]:
    return re.findall(r"\033\[32m(.*?)\033\[0m", text, re.S)


def test_tokens_with_a_loss_are_marked(tmp_path, capsys):
    """As many as the batch of training weighs; the page marks the same text."""
    tokenizer = kit.tiny_tokenizer(tmp_path / "tokenizer", WORDS)
    rows = [{"prompt": f"def <{i}>", "completion": f" return {i}"} for i in range(9)]
    page = tmp_path / "page.html"
    text = shown(tmp_path, capsys, rows, tokenizer_name=tokenizer, rows=3, page=page)
    assert text.count("── row ") == 3
    assert all(part.strip().startswith("return") for part in marked(text))
    assert len(marked(text)) == len(re.findall("<mark> ?return", page.read_text())) == 3
    assert "def &lt;" in page.read_text()
    task, splits = kit.open_data(
        model_config=tmp_path / "model.yaml",
        train_file=tmp_path / "rows.jsonl",
        tokenizer_name=tokenizer,
        cache_dir=tmp_path / "cache",
    )
    for row, tokens, trained in re.findall(r"── row (\d+), step 1: (\d+) tokens, (\d+) with a loss", text):
        batch = task.collate(splits["train"].rows(np.array([int(row)])), True)
        assert (batch.tokens, batch.weight) == (int(tokens), int(trained))


def test_packed_documents_and_rows_without_a_tokenizer(tmp_path, capsys):
    rows = [{"input_ids": list(range(i, i + 9))} for i in range(21)]
    text = shown(tmp_path, capsys, rows, packing=True, max_length=27, rows=2)
    assert ", rows 100.0% full" in text
    assert text.count(": 27 tokens, 24 with a loss") == 2  # three documents of nine
    assert len(marked(text)) == 6


def test_pairs_show_both_sides(tmp_path, capsys):
    """The tokens that both sides begin with have no loss."""
    kit.need_task("preference")
    tokenizer = kit.tiny_tokenizer(tmp_path / "tokenizer", WORDS)
    rows = [{"prompt": f"def <{i}>", "chosen": f" return {i}", "rejected": f" self {i} {i}"} for i in range(9)]
    text = shown(tmp_path, capsys, rows, task="preference", tokenizer_name=tokenizer, rows=2)
    assert len(re.findall(r"── row \d+, step 1\nchosen: \d+ tokens, \d+ with a loss\n", text)) == 2
    chosen, rejected = [marked(part) for part in re.split("rejected: ", text, maxsplit=1)]
    assert [part.strip().split()[0] for part in (chosen[0], rejected[0])] == ["return", "self"]
    counts = [int(count) for count in re.findall(r"(\d+) with a loss", text)]
    task, splits = kit.open_data(
        task="preference",
        model_config=tmp_path / "model.yaml",
        train_file=tmp_path / "rows.jsonl",
        tokenizer_name=tokenizer,
        cache_dir=tmp_path / "cache",
    )
    ids = [int(row) for row in re.findall(r"── row (\d+)", text)]
    targets = [task.collate(splits["train"].rows(np.array([row])), True).inputs["targets"] for row in ids]
    assert counts == [int((side != -100).sum()) for of_row in targets for side in of_row]


def test_preview_ends_with_the_epoch(tmp_path, capsys):
    """Even of a run of many epochs: each row once."""
    rows = [{"input_ids": [i, i, i, i]} for i in range(5)]
    text = shown(tmp_path, capsys, rows, rows=99, global_batch_size=2, per_device_batch_size=1, max_steps=50)
    assert sorted(re.findall(r"── row (\d+), step \d+", text)) == list("01234")


def recipes_of_all_tasks() -> list:
    """Return the recipes of the core, and of add-ons if they are here."""
    has_addons = (kit.REPOSITORY / f"{ADDON_RECIPES.replace('.', '/')}.py").exists()
    return recipes.RECIPES + (import_module(ADDON_RECIPES).RECIPES if has_addons else [])


@pytest.mark.parametrize("recipe", recipes_of_all_tasks(), ids=lambda recipe: recipe.__name__)
def test_rows_of_every_task_are_shown(tmp_path, capsys, recipe):
    flags = recipe(tmp_path)
    if "--train_file" not in flags and "--dataset_name" not in flags:
        flags += kit.flags(train_file=tmp_path / "train.jsonl")
    preview.main([*map(str, flags), "--rows", "2", "--cache_dir", str(tmp_path / "cache")])
    assert capsys.readouterr().out.count("── row ") == 2
