"""Long texts are tokenized in parts: the same ids and bytes as in one piece, in a fraction of the memory."""

import random
import resource

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from src.text import long_text
from src.text.long_text import encode_long
from src.text.tokenization import token_bytes
from tests.helpers import kit

LETTERS = ["def", "return", " self", "\n\n", "für", "漢字", "🙂👩‍👩‍👧", "e\u0301", "ﬁ", "  ", "'s", "12345", "<|s|>"]
TRAINING = {"vocab_size": 600, "special_tokens": ["<unk>", "<|s|>"], "show_progress": False}
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
KINDS = {  # model, trainer, pre-tokenizer, normalizer
    "byte-level BPE": lambda: (
        models.BPE(),
        trainers.BpeTrainer(**TRAINING, max_token_length=9, initial_alphabet=ALPHABET),
        pre_tokenizers.ByteLevel(),
        None,
    ),
    "BPE without words": lambda: (
        models.BPE(unk_token="<unk>", fuse_unk=True),
        trainers.BpeTrainer(**TRAINING, max_token_length=9),
        None,
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    "WordPiece": lambda: (
        models.WordPiece(unk_token="<unk>"),
        trainers.WordPieceTrainer(**TRAINING),
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(),
    ),
    "Unigram": lambda: (
        models.Unigram(),
        trainers.UnigramTrainer(**TRAINING, unk_token="<unk>"),
        pre_tokenizers.Metaspace(),
        normalizers.NFKC(),
    ),
}


def text(count: int) -> str:
    generator = random.Random(0)
    return "".join(generator.choice(LETTERS) + generator.choice(["", " ", " "]) for _ in range(count))


def make(kind: str) -> PreTrainedTokenizerFast:
    model, trainer, words, normalizer = KINDS[kind]()
    tokenizer = Tokenizer(model)
    if words:
        tokenizer.pre_tokenizer = words
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator([text(3000)[i : i + 500] for i in range(0, 12_000, 500)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|s|> $A <unk>", special_tokens=[("<|s|>", 1), ("<unk>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(long_text, "PART", 1 << 12)
    monkeypatch.setattr(long_text, "OVERLAP", 1 << 10)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_bytes_equal_those_of_one_piece(monkeypatch, small_parts, kind):
    tokenizer, long = make(kind), text(20_000)
    for options in ({}, {"add_special_tokens": False}):
        whole = tokenizer(long, return_offsets_mapping=True, verbose=False, **options)
        ids, sizes = encode_long(tokenizer, long, **options)
        assert ids.tolist() == whole["input_ids"]
        assert sizes.tolist() == token_bytes(long, whole["offset_mapping"]).tolist()
    monkeypatch.setattr(long_text, "OVERLAP", 0)  # the mutant splits anywhere
    monkeypatch.setattr(long_text, "_joint", lambda left, right, *_: (len(left.ids), 0))
    assert encode_long(tokenizer, long)[0].tolist() != tokenizer(long, verbose=False)["input_ids"]


def test_parts_that_differ_are_not_joined(monkeypatch, small_parts):
    monkeypatch.setattr(long_text, "OVERLAP", 16)  # too short to compare
    assert encode_long(make("byte-level BPE"), text(5000)) is None


@pytest.mark.parametrize("packing", [True, False])
def test_rows_of_a_long_document(tmp_path, monkeypatch, small_parts, packing):
    kit.tiny_tokenizer(tmp_path / "tokenizer", [text(500)])
    kit.write_jsonl(tmp_path / "a.jsonl", [{"text": text(3000)}, {"text": "def self"}])
    kit.write_yaml(tmp_path / "llama.yaml", kit.LLAMA)
    found = []
    for limit in (1 << 12, 1 << 30):
        for module in ("encode_rows", "tokenization"):
            monkeypatch.setattr(f"src.text.{module}.CHARACTERS", limit)
        fields = {"train_file": tmp_path / "a.jsonl", "cache_dir": tmp_path / f"{limit}", "packing": packing}
        fields |= {"model_config": tmp_path / "llama.yaml", "tokenizer_name": tmp_path / "tokenizer", "max_length": 64}
        stats = kit.open_data(**fields)[1]["train"].stats
        found.append((stats["rows"], stats["tokens_cut"], stats["tokens"]))
    assert found[0] == found[1]


def _growth(tokenizer, long: str, in_one_piece: bool) -> int:
    """Return by how many bytes this process grew at most."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ids = tokenizer(long, return_offsets_mapping=True, verbose=False) if in_one_piece else encode_long(tokenizer, long)
    assert ids is not None
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


def test_memory_of_a_long_document(tmp_path):
    tokenizer, long = make("byte-level BPE"), text(600_000)
    assert len(long) > 1_500_000
    [parts] = kit.spawn(1, _growth, tokenizer, long, False, out=tmp_path / "parts")
    [whole] = kit.spawn(1, _growth, tokenizer, long, True, out=tmp_path / "whole")
    assert parts < 100 * len(long) < whole, (parts / len(long), whole / len(long))
