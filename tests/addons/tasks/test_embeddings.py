"""Text embeddings: vectors of each text alone, the loss and the ranks by hand, a temperature that is trained and kept."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertTokenizerFast

from addons.tasks import embeddings as contrastive
from tests.conformance.recipes import BERT
from tests.helpers import kit

WORDS = [*"bcdefghij", "dog", "cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows of three texts, a BERT tokenizer and a tiny BERT."""
    folder, generator = tmp_path_factory.mktemp("embeddings"), np.random.default_rng(0)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "tokenizer")
    for name, count in (("train", 43), ("validation", 21)):
        lengths = generator.integers(1, 12, (count, 3))
        texts = [[" ".join(generator.choice(WORDS, length)) for length in row] for row in lengths]
        kit.write_jsonl(folder / f"{name}.jsonl", [{"query": a, "found": b, "other": c} for a, b, c in texts])
    kit.write_yaml(folder / "bert.yaml", BERT)
    return folder


def recipe(folder, **fields):
    columns = {"anchor_column": "query", "positive_column": "found", "negative_column": "other"}
    return kit.bert_recipe("embeddings", folder, **columns | fields)


def texts_of(folder, file) -> list[list[str]]:
    return [list(json.loads(line).values()) for line in (folder / file).read_text().splitlines()]


def vectors_by_hand(folder, model, rows, pooling="mean") -> torch.Tensor:
    """Return (rows, texts, features) unit vectors, each text alone."""
    tokenizer, found = AutoTokenizer.from_pretrained(folder / "tokenizer"), []
    for row in rows:
        for text in row:
            with torch.no_grad():
                hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            vector = hidden[0] if pooling == "cls" else hidden.mean(0)
            found.append(vector / vector.norm())
    return torch.stack(found).unflatten(0, (len(rows), -1))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_those_of_each_text_alone(folder, pooling):
    task, splits = kit.open_data(**recipe(folder, pooling=pooling, temperature=0.1))
    model = task.build().eval()
    batch = task.collate(splits["train"].rows(np.arange(43)), False)
    assert batch.inputs["input_ids"].shape[:2] == (43, 3)
    assert (batch.weight, batch.tokens) == (43, int(batch.inputs["attention_mask"].sum()))
    with torch.no_grad():
        found = task.represent(model, batch.inputs)["vectors"]
    expected = vectors_by_hand(folder, model, texts_of(folder, "train.jsonl"), pooling)
    expected[:, 0] /= 0.1
    assert torch.allclose(found, expected, rtol=0, atol=1e-9)


def loss_by_hand(anchors, others) -> float:
    total = 0.0
    for i in range(len(anchors)):
        row = [math.exp(anchors[i] @ other) for others_of_row in others for other in others_of_row]
        column = [math.exp(anchor @ others[i][0]) for anchor in anchors]
        own = anchors[i] @ others[i][0]
        total += math.log(sum(row)) / 2 + math.log(sum(column)) / 2 - own
    return total


@pytest.mark.parametrize("texts", [2, 3])
def test_loss_by_hand(texts):
    vectors = torch.randn(7, texts, 4, dtype=torch.float64)
    loss = contrastive.info_nce(vectors[:, 0], vectors[:, 1:])
    assert loss.item() == pytest.approx(loss_by_hand(vectors[:, 0].numpy(), vectors[:, 1:].numpy()), rel=1e-12)
    assert contrastive.info_nce(vectors[:1, 0], vectors[:1, 1:2]).item() == 0  # a tail of one row has no negatives


@pytest.mark.parametrize("chunk", [1, 50, 1 << 24])
def test_ranks_by_hand_and_equal_texts_are_ties(monkeypatch, chunk):
    monkeypatch.setattr(contrastive, "CHUNK_ELEMENTS", chunk)
    vectors = torch.nn.functional.normalize(torch.randn(31, 3, 5, dtype=torch.float64), dim=-1)
    vectors[7, 1] = vectors[3, 1] + 1e-9  # the same text in another row, up to rounding
    texts, ranks = torch.arange(62).view(31, 2), []
    texts[7, 0] = texts[3, 0]
    for i in range(31):
        own = vectors[i, 0] @ vectors[i, 1]
        better = [(vectors[i, 0] @ other).item() > own + 1e-6 for row in vectors for other in row[1:]]
        ranks.append(1 + sum(better))
    found = contrastive.retrieval_metrics(vectors[:, 0] * 20, vectors[:, 1:], texts)
    assert found["mrr"] == pytest.approx(np.mean(1 / np.array(ranks)), rel=1e-12)
    assert found["recall_at_1"] == np.mean(np.array(ranks) <= 1)
    assert found["recall_at_10"] == np.mean(np.array(ranks) <= 10)
    for alike in (torch.ones_like(vectors), torch.full_like(vectors, torch.nan)):  # a model that has collapsed
        assert max(contrastive.retrieval_metrics(alike[:, 0], alike[:, 1:], texts).values()) < 0.02


def test_evaluation_by_hand(folder, tmp_path):
    fields = {"global_batch_size": 10, "per_device_batch_size": 3, "per_device_eval_batch_size": 4, "max_steps": 6}
    fields |= {"learning_rate": 1e-2, "learn_temperature": True}
    run = kit.run_training(2, tmp_path / "run", *kit.flags(**recipe(folder, **fields)))
    scale = math.exp(run.weights["logit_scale"].item())
    assert abs(scale - 20) > 0.1  # trained, from a temperature of 0.05
    model = AutoModel.from_pretrained(run.folder / "final").eval()
    rows = texts_of(folder, "validation.jsonl")
    vectors, others = vectors_by_hand(folder, model, rows), [row[1:] for row in rows]
    names = torch.tensor([[hash(text) for text in row] for row in others])
    assert len(names.unique()) < names.numel()  # some rows have a text of another row
    blocks = [(vectors[a : a + 10, 0] * scale, vectors[a : a + 10, 1:]) for a in (0, 10, 20)]
    line = run.kind("eval")[-1]
    assert line["loss"] == pytest.approx(sum(loss_by_hand(*(v.numpy() for v in b)) for b in blocks) / 21, rel=1e-9)
    by_hand = contrastive.retrieval_metrics(vectors[:, 0], vectors[:, 1:], names)
    assert {name: line[name] for name in by_hand} == pytest.approx(by_hand)
    assert 0 < line["mrr"] < 1


def test_negatives_that_no_field_names_are_warned_about(folder, tmp_path, capsys):
    file = kit.write_jsonl(tmp_path / "rows.jsonl", [{"query": "b", "found": "c", "negative": "d"}] * 9)
    fields = recipe(folder, train_file=file, validation_file=file)
    del fields["negative_column"]
    kit.open_data(**fields)
    assert "the column negative is not used: give --negative_column negative" in capsys.readouterr().err


def test_ratings_of_pairs_are_warned_about(folder, tmp_path, capsys):
    file = kit.write_jsonl(tmp_path / "rows.jsonl", [{"query": "b", "found": "c", "bad": "d", "label": 0}] * 9)
    kit.open_data(**recipe(folder, train_file=file, validation_file=file, negative_column="bad"))
    assert "train data: the column label is not used" in capsys.readouterr().err


@pytest.mark.parametrize("mode", [{"pooling_mode": "cls"}, {"pooling_mode_cls_token": True, "pooling_mode_max": False}])
def test_other_pooling_than_that_of_sentence_transformers_is_warned_about(folder, tmp_path, capsys, mode):
    model = tmp_path / "model"
    AutoModel.from_config(AutoConfig.for_model(**BERT, vocab_size=18)).save_pretrained(model)
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling/config.json").write_text(json.dumps({"embedding_dimension": 32, "include_prompt": True} | mode))
    fields = recipe(folder, model_name_or_path=model)
    del fields["model_config"]
    for pooling in ("cls", "mean"):
        kit.open_data(**fields, pooling=pooling)
        assert ("pooling is mean, but" in capsys.readouterr().err) == (pooling == "mean")
