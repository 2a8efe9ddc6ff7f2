"""make preview: the rows of the first steps as text, with the tokens that have a loss marked."""

import re

import numpy as np

from addons.tools import preview
from tests.helpers import kit

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
