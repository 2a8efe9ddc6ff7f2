"""UTF-8 bytes of tokens, and the check for text."""

import pytest
from transformers import AutoTokenizer

from src.config.errors import UsageError
from src.text.tokenization import require_text, token_bytes
from tests.helpers import kit

TEXTS = ["def f(x): return x", "für Ölmühlen", "漢字かな", "a🙂b👩‍👩‍👧c", "", "a\ud800b"]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_characters(text):
    """Each character as a token of its own: known without any tokenizer."""
    expected = [len(c.encode("utf-8", "surrogatepass")) for c in text]
    assert token_bytes(text, [(i, i + 1) for i in range(len(text))]).tolist() == expected


def test_bytes_of_tokens_add_up_to_the_text(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(kit.tiny_tokenizer(tmp_path, TEXTS[:2] * 3))
    for text in TEXTS[:-1]:  # a lone surrogate is no text
        encoded = tokenizer(text, return_offsets_mapping=True)
        sizes = token_bytes(text, encoded["offset_mapping"]).tolist()
        assert (len(sizes), sum(sizes)) == (len(encoded["input_ids"]), len(text.encode()))
        assert all(size >= 0 for size in sizes)
        if text.isascii():  # a byte-level token spells one character per byte
            assert sizes == [len(token) for token in tokenizer.convert_ids_to_tokens(encoded["input_ids"])]


def test_bytes_of_gaps_and_special_tokens():
    # A special token covers nothing, a skipped blank belongs to the token after it, a character in several tokens
    # counts once.
    assert token_bytes("ab é", [(0, 0), (0, 2), (3, 4), (3, 4), (0, 0)]).tolist() == [0, 2, 3, 0, 0]


def test_text_must_be_text():
    require_text(["a", ""], "text", ["row 0", "row 1"])
    for value, kind in ((None, "nothing"), (3, "int"), (["a"], "list")):
        with pytest.raises(UsageError, match=f"row 1: `text` holds {kind}"):
            require_text(["a", value], "text", ["row 0", "row 1"])
