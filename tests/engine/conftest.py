"""Tokenizers and a model configuration that the tests of data share."""

import pytest
from transformers import AutoTokenizer

from tests.helpers import kit

WORDS = ["def", "return", "self", "import", "class", "yield", "lambda", "für", "漢字", "0x1f", "assert", "None", "True"]


def texts(task, split) -> list[str]:
    """Return the text of every row, in the order of ids."""
    return [task.tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in kit.all_rows(split)]


@pytest.fixture(scope="session")
def tools(tmp_path_factory):
    """Return a folder with tokenizers and a model configuration."""
    folder = tmp_path_factory.mktemp("tools")
    kit.tiny_tokenizer(folder / "tokenizer", [" ".join(WORDS)] * 2)
    with_eos = AutoTokenizer.from_pretrained(folder / "tokenizer")
    with_eos.eos_token = with_eos.pad_token  # as base and instruct models have it: the same tokenizer.json
    with_eos.save_pretrained(folder / "other_eos")
    kit.write_yaml(folder / "gpt2.yaml", kit.TINY | {"vocab_size": 400, "n_positions": 128})
    return folder


@pytest.fixture
def open_data(tools, tmp_path):
    """Return a function that opens data as train.py does, with the cache in a folder of the test."""

    def opened(**fields):
        given = {"model_config": tools / "gpt2.yaml", "tokenizer_name": tools / "tokenizer"}
        return kit.open_data(**given | {"cache_dir": tmp_path / "cache"} | fields)

    return opened
