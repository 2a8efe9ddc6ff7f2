"""Token classification: where the tag of a word stands, weights, and F1 equal to a plain loop."""

import json
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
from transformers import BertTokenizerFast

from addons.tasks.token_classification import word_of_each_token
from engine.config.errors import UsageError
from tests.addons.tasks import recipes
from tests.conformance import checks
from tests.helpers import kit
from tests.helpers.losses import TEXTS, check_balanced_weights

WORDS = ["un", "##aff", "##able", "New", "York", "'", "s", "mayor", ",", "met", "the", "EU"]
TAGS = ["B-LOC", "B-ORG", "I-LOC", "O"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tags")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=False).save_pretrained(folder / "tokenizer")
    generator = np.random.default_rng(0)
    words = ["unaffable", "New", "York's", "mayor,", "met", "the", "EU"]
    for split, count in (("train", 60), ("validation", 23)):
        rows = [generator.choice(words, n).tolist() for n in generator.integers(1, 12, count)]
        tags = [generator.choice(TAGS, len(row)).tolist() for row in rows]
        kit.write_jsonl(folder / f"{split}.jsonl", [{"tokens": r, "tags": t} for r, t in zip(rows, tags, strict=True)])
    kit.write_yaml(folder / "bert.yaml", recipes.BERT)
    return folder


def open_data(folder, **fields):
    files = {f"{split}_file": folder / f"{split}.jsonl" for split in ("train", "validation")}
    known = {"task": "token_classification", "model_config": folder / "bert.yaml", "cache_dir": folder / "cache"}
    known |= {"tokenizer_name": folder / "tokenizer", "dtype": "float64"}
    fields = known | ({} if "dataset_name" in fields else files) | fields
    return kit.open_data(**fields)


def raw_rows(folder, split="train"):
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_tag_stands_on_the_first_token_of_a_word(folder):
    task, splits = open_data(folder)
    assert task.labels == TAGS
    raw = raw_rows(folder)
    for row, prepared in zip(raw, splits["train"].rows(np.arange(len(raw))), strict=True):
        expected = task.tokenizer(row["tokens"], is_split_into_words=True)  # the tokenizer's own count of words
        words = expected.word_ids()
        first = [word is not None and word not in words[:i] for i, word in enumerate(words)]
        labels = [TAGS.index(row["tags"][w]) if f else -100 for w, f in zip(words, first, strict=True)]
        assert prepared["input_ids"].tolist() == expected["input_ids"]
        assert prepared["labels"].tolist() == labels
    assert splits["train"].stats["targets"] == sum(len(row["tokens"]) for row in raw)


def test_token_that_begins_with_a_space_belongs_to_the_word_after_it(tmp_path):
    """Byte-level tokens hold the space before their word, and some tokenizers report it as part of the token."""
    from transformers import AutoTokenizer

    words = ["def", "return", "x", "über", "🙂"]
    tokenizer = AutoTokenizer.from_pretrained(kit.tiny_tokenizer(tmp_path / "t", ["def return x def return x"] * 3))
    encoded = tokenizer(" ".join(words), return_offsets_mapping=True)
    begins = word_of_each_token(encoded["offset_mapping"], words)
    assert [word for word in begins if word is not None] == [0, 1, 2, 3, 4]
    texts = [tokenizer.decode(token) for token in encoded["input_ids"]]
    assert [text.strip() for text, word in zip(texts, begins, strict=True) if word in (0, 1)] == ["def", "return"]


def test_class_labels_keep_the_order_of_their_names(folder):
    names = ["O", "B-ORG", "B-LOC"]  # as in Hub datasets; B-LOC does not occur
    features = datasets.Features(
        {"tokens": datasets.List(datasets.Value("string")), "ner_tags": datasets.List(datasets.ClassLabel(names=names))}
    )
    rows = datasets.Dataset.from_dict({"tokens": [["the", "EU"], ["met"]], "ner_tags": [[0, 1], [0]]}, features)
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(folder / "disk")
    task, splits = open_data(folder, dataset_name=folder / "disk", columns={"tags": "ner_tags"})
    assert task.labels == names
    assert [row["labels"].tolist() for row in splits["train"].rows(np.arange(2))] == [
        [-100, 0, 1, -100],
        [-100, 0, -100],
    ]
    assert task.build().config.id2label == dict(enumerate(names))


@pytest.mark.parametrize(
    "row, message",
    [
        ({"tokens": ["the", "EU"], "tags": ["O"]}, r"line 2: validation data: 2 tokens with 1 tags"),
        ({"tokens": ["the"], "tags": ["B-PER"]}, r"line 2: .*'B-PER'.*4 known labels"),
        ({"tokens": ["the"], "tags": None}, r"line 2: validation data: `tags` holds nothing"),
        ({"tokens": ["the", 5], "tags": ["O", "O"]}, r"line 2: .*`tokens` holds int, not text"),
        ({"tokens": ["the"], "tags": "O"}, r"line 2: .*`tags` holds str: give a list"),
    ],
)
def test_unusable_rows_are_refused(folder, row, message):
    file = kit.write_jsonl(folder / "bad.jsonl", [{"tokens": ["met"], "tags": ["O"]}, row])
    with pytest.raises(UsageError, match=message):
        open_data(folder, validation_file=file)


def test_columns_without_lists_are_named(folder):
    file = kit.write_jsonl(folder / "text.jsonl", [{"tokens": "the EU", "tags": ["O", "B-ORG"]}])
    with pytest.raises(UsageError, match=r"line 1: .*`tokens` holds str: give a list for each row"):
        open_data(folder, train_file=file)
    with pytest.raises(UsageError, match=r"`ner`, which columns names for tags, is not among"):
        open_data(folder, columns={"tags": "ner"})


def test_word_without_a_token_is_warned_of_once(folder, capsys):
    """BERT removes characters that have no width, and nothing is left of the word."""
    rows = [{"tokens": ["the", "\u200d", "EU"], "tags": ["O", "B-LOC", "B-ORG"]}] * 2
    cut = [{"tokens": ["the"] * 9, "tags": ["O"] * 9}]
    file = kit.write_jsonl(folder / "invisible.jsonl", [*cut, *rows])
    _, splits = open_data(folder, validation_file=file, max_length=6)
    labels = splits["validation"].rows(np.arange(2))[1]["labels"]
    assert labels[labels != -100].tolist() == [TAGS.index("O"), TAGS.index("B-ORG")]
    warnings = capsys.readouterr().err
    assert "invisible.jsonl, line 2: validation data: no token begins with the word" in warnings
    assert "'B-LOC'" in warnings
    assert warnings.count("warning:") == 1


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_loss_is_that_of_transformers(folder):
    task, splits = open_data(folder)
    model = task.build().eval()
    row = splits["train"].rows(np.array([3]))
    batch = task.collate(row, False)
    with torch.no_grad():
        expected = model(**batch.inputs).loss  # the mean over this row's tags
        ours = task.loss(model, batch.inputs)["loss"]
    assert (ours / batch.weight).item() == pytest.approx(expected.item(), rel=1e-9)


@torch.no_grad()
def test_accuracy_and_f1_equal_a_plain_loop(folder):
    task, splits = open_data(folder)
    model = task.build()
    rows = splits["validation"].rows(np.arange(23))
    counts: Counter = Counter()
    for row in rows:
        guesses = model.eval()(torch.tensor(row["input_ids"])[None].long()).logits[0].argmax(-1).tolist()
        counts.update((g, t) for g, t in zip(guesses, row["labels"].tolist(), strict=True) if t != -100)
    total = sum(counts.values())
    scores, hits, given = [], 0, 0
    for tag in range(3):  # without O
        both = counts[tag, tag]
        either = sum(n * ((g == tag) + (t == tag)) for (g, t), n in counts.items())
        scores += [2 * both / either] if either else []
        hits, given = hits + both, given + either
    sums: Counter = Counter()
    for part in (rows[:7], rows[7:]):
        found, _ = checks.run_batch(task, model, part, training=False)
        sums.update(found)
    assert sums["weight"] == total
    assert task.metrics(sums, total) == {
        "accuracy": pytest.approx(sum(counts[t, t] for t in range(4)) / total),
        "f1": pytest.approx(np.mean(scores)),
        "micro_f1": pytest.approx(2 * hits / given),
    }
    assert hits > 0


def test_balanced_weights_are_those_of_scikit_learn(tmp_path):
    rows = [{"tokens": text.split(), "tags": [word[0] for word in text.split()]} for text in TEXTS]
    check_balanced_weights(tmp_path, "token_classification", rows, [tag for row in rows for tag in row["tags"]])
