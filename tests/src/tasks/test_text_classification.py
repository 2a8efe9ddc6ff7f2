"""Text classification: labels of any kind, each example exactly once, accuracy and F1 equal to a plain loop."""

import json
from collections import Counter

import datasets
import numpy as np
import pandas
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertTokenizerFast

from engine.checkpointing.locate_weights import init_weights
from engine.config.errors import UsageError
from engine.config.run_config import RunConfig
from engine.rows.labels import Labels
from tests.conformance import checks, recipes
from tests.helpers import kit

BERT = {name: value for name, value in recipes.BERT.items() if "dropout" not in name}
LABELS = ["blue", "green", "red"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts labeled mostly by the color they name, second texts, a BERT tokenizer and a tiny BERT."""
    folder = tmp_path_factory.mktemp("classification")
    generator = np.random.default_rng(0)
    words = [*LABELS, "a", "sky", "of", "grass", "##s", "rose"]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "tokenizer")

    for name, count in (("train", 160), ("validation", 47)):
        rows = []
        for color in generator.integers(0, 3, count):
            text = generator.permutation([LABELS[color], *generator.choice(words[3:], generator.integers(1, 20))])
            label = LABELS[(color + (generator.random() < 0.2)) % 3]
            rows.append({"text": " ".join(text), "other": str(generator.choice(words)), "label": label})
        kit.write_jsonl(folder / f"{name}.jsonl", rows)
    kit.write_yaml(folder / "bert.yaml", BERT)
    return folder


def recipe(folder, **fields):
    return kit.bert_recipe("text_classification", folder, **fields)


def open_data(folder, **fields):
    return kit.open_data(**recipe(folder, **fields))


def raw_rows(folder, file="train.jsonl"):
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_pairs_equal_those_of_tokenizer_and_model(folder):
    """The model must know which tokens are of the second text."""
    task, splits = open_data(folder, columns={"text_pair": "other"})
    rows = raw_rows(folder)
    pair = [row["text"] for row in rows], [row["other"] for row in rows]
    expected = task.tokenizer(*pair, padding=True, return_tensors="pt")
    assert expected["token_type_ids"].any()
    batch = task.collate(kit.all_rows(splits["train"]), True)
    assert torch.equal(batch.inputs["input_ids"], expected["input_ids"])
    assert torch.equal(batch.inputs["attention_mask"], expected["attention_mask"])
    assert (batch.weight, batch.tokens) == (160, expected["attention_mask"].sum())
    model = task.build().eval()
    labels = torch.tensor([LABELS.index(row["label"]) for row in rows])

    def check(inputs):
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(model(**inputs).logits, labels, reduction="sum")
            return task.loss(model, batch.inputs)["loss"].item() == pytest.approx(loss.item(), rel=1e-12)

    assert check(expected)
    assert not check({k: v for k, v in expected.items() if k != "token_type_ids"})  # the mutant


# ---- labels ----------------------------------------------------------------------------------------------------------


def test_labels_of_rows_stay_theirs_where_long_rows_are_dropped(folder):
    task, splits = open_data(folder, max_length=12, long_rows="drop")
    short = [row for row in raw_rows(folder) if len(task.tokenizer(row["text"])["input_ids"]) <= 12]
    rows = splits["train"].rows(np.arange(len(splits["train"])))
    assert [task.labels[row["label"]] for row in rows] == [row["label"] for row in short]
    assert [row["input_ids"].tolist() for row in rows] == [task.tokenizer(row["text"])["input_ids"] for row in short]


@pytest.mark.parametrize(
    "values, names",
    [
        (["red", "blue", "red"], ["blue", "red"]),
        ([10, 2, 10, 1], ["1", "2", "10"]),  # in the order of numbers, not of their spelling
        ([True, False], ["False", "True"]),
    ],
)
def test_labels_may_be_names_numbers_or_bools(folder, values, names):
    file = kit.write_jsonl(folder / "labels.jsonl", [{"text": "a sky", "label": value} for value in values])
    task, splits = open_data(folder, train_file=file, validation_file=file)
    assert task.labels == names
    for split in splits.values():
        assert [names[row["label"]] for row in kit.all_rows(split)] == [str(value) for value in values]


def test_class_labels_keep_the_order_of_their_names(folder):
    names = ["red", "blue", "green"]  # not sorted, and green does not occur
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    rows = datasets.Dataset.from_dict({"text": ["a", "of", "sky"], "label": [1, 0, 1]}, features)
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(folder / "disk")
    fields = recipe(folder, dataset_name=folder / "disk")
    task, splits = kit.open_data(**{k: v for k, v in fields.items() if not k.endswith("_file")})
    assert task.labels == names
    assert [row["label"] for row in kit.all_rows(splits["validation"])] == [1, 0, 1]


@pytest.mark.parametrize("values", [[1.5, 2.5], [b"a", b"b"], [-100, 1]])
def test_values_that_are_no_labels_are_refused(values):
    with pytest.raises(UsageError, match="train data: `label` holds "):
        Labels("label").of_data(RunConfig(), values, "train")


@pytest.mark.parametrize("regression", [False, True])
@pytest.mark.parametrize("label", [[0, 2], ["red", "blue"], {"color": "red"}])
def test_several_labels_for_one_row_are_refused(folder, label, regression):
    file = kit.write_jsonl(folder / "several.jsonl", [{"text": "a sky", "label": label}] * 4)
    with pytest.raises(UsageError, match=r"several.jsonl, line 1: train data: `label` holds") as error:
        open_data(folder, train_file=file, validation_file=file, regression=regression)
    assert "\n" not in str(error.value)


def test_weights_of_other_classes_or_tokens_do_not_begin_a_run_silently(folder, tmp_path, capsys):
    task, _ = open_data(folder)
    cfg = RunConfig(init_from=str(tmp_path))
    kit.tiny_tokenizer(tmp_path, ["other words"])
    for labels in (LABELS, LABELS[::-1]):
        (tmp_path / "config.json").write_text(json.dumps({"id2label": dict(enumerate(labels))}))
        if labels == LABELS:
            assert init_weights(cfg, task) == tmp_path
            assert "was trained with other tokens than those of this run" in capsys.readouterr().err
    with pytest.raises(UsageError, match="has the classes red, green, blue, but the data blue, green, red"):
        init_weights(cfg, task)
    task.tokenizer.save_pretrained(tmp_path)
    task.classes = Labels("label", ["ham", "spam", "news"])  # another task: its head begins with these weights
    assert init_weights(cfg, task) == tmp_path
    assert "has the classes red, green, blue, but the data ham, spam, news" in capsys.readouterr().err
    task.classes = Labels("label", LABELS[::-1])
    assert init_weights(cfg, task) == tmp_path
    assert capsys.readouterr().err == ""


def test_final_model_says_one_label_and_truncates_nothing(folder, tmp_path):
    """The pretrained model had several labels for each text, so that a pipeline would compute sigmoids."""
    config = BertConfig(**BERT | {"id2label": dict(enumerate(LABELS))}, problem_type="multi_label_classification")
    kit.write_yaml(tmp_path / "bert.yaml", config.to_dict())
    flags = kit.flags(**recipe(folder, max_steps=1, max_length=5, model_config=tmp_path / "bert.yaml"))
    final = kit.run_training(1, tmp_path / "run", *flags).folder / "final"
    assert AutoConfig.from_pretrained(final).problem_type is None
    assert json.loads((final / "tokenizer.json").read_text())["truncation"] is None


# ---- numbers ---------------------------------------------------------------------------------------------------------


def macro_f1(guesses, truth):
    """The mean over the labels of 2 × hits / (guesses and true ones of a label)."""
    hits = Counter(guess for guess, true in zip(guesses, truth, strict=True) if guess == true)
    both = Counter(guesses) + Counter(truth)
    return sum(2 * hits[label] / count for label, count in both.items()) / len(both)


def test_numbers_equal_a_plain_loop_over_single_texts(folder, tmp_path):
    fields = recipe(folder, global_batch_size=16, max_steps=100, learning_rate=2e-3, per_device_eval_batch_size=4)
    run = kit.run_training(1, tmp_path / "run", *kit.flags(**fields))
    model = AutoModelForSequenceClassification.from_pretrained(run.folder / "final", dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "final")
    assert model.config.id2label == dict(enumerate(LABELS))
    rows = raw_rows(folder, "validation.jsonl")
    loss, guesses, truth = 0.0, [], [row["label"] for row in rows]
    for row in rows:
        with torch.no_grad():
            logits = model(**tokenizer(row["text"], return_tensors="pt")).logits[0]
        loss -= logits.log_softmax(-1)[model.config.label2id[row["label"]]].item()
        guesses.append(model.config.id2label[logits.argmax().item()])
    (line,) = run.kind("eval")
    assert line["examples"] == line["weight"] == len(rows) == 47
    assert line["loss"] == pytest.approx(loss / len(rows), rel=1e-12)
    assert line["f1"] == pytest.approx(macro_f1(guesses, truth), rel=1e-12) != line["accuracy"]
    assert 0.5 < line["accuracy"] == sum(g == t for g, t in zip(guesses, truth, strict=True)) / len(rows) < 1


def test_regression_loss_is_that_of_transformers(folder, tmp_path):
    """Of texts with a quarter of the number of their words as label."""
    rows = [{"text": row["text"], "label": len(row["text"].split()) / 4} for row in raw_rows(folder)]
    file = kit.write_jsonl(tmp_path / "scored.jsonl", rows)
    task, splits = open_data(folder, train_file=file, validation_file=file, regression=True)
    model, rows = task.build().eval(), splits["train"].rows(np.arange(9))
    assert (model.config.problem_type, model.num_labels) == ("regression", 1)
    with torch.no_grad():
        expected = [model(**task.collate([row], False).inputs).loss.item() for row in rows]
    checks.check_rows_are_independent(task, model, rows, training=False)
    sums, values = checks.run_batch(task, model, rows, training=False)
    assert sums["loss"] == pytest.approx(sum(expected), rel=1e-9)
    numbers = pandas.DataFrame({"prediction": values["prediction"], "label": [row["label"] for row in rows]})
    errors = numbers["prediction"] - numbers["label"]
    mse, mae = np.mean(errors**2), np.mean(np.abs(errors))
    assert task.metrics(sums, 9) == {"mse": pytest.approx(mse), "mae": pytest.approx(mae)}
    for name, correlation in task.row_metrics(values).items():
        assert correlation == pytest.approx(numbers.corr(name).loc["prediction", "label"])
