"""Text embeddings: vectors of each text alone, the loss and the ranks by hand, a temperature that is trained and kept,
files of sentence-transformers."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertTokenizerFast

from addons.tasks import embeddings as contrastive
from addons.tasks.embeddings.sentence_transformers_files import read_base
from engine.config.errors import UsageError
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
    columns = {"anchor": "query", "positive": "found", "negative": "other"}
    return kit.bert_recipe("embeddings", folder, **{"columns": columns} | fields)


def texts_of(folder, file) -> list[list[str]]:
    return [list(json.loads(line).values()) for line in (folder / file).read_text().splitlines()]


def vectors_by_hand(folder, model, rows, pooling="mean") -> torch.Tensor:
    """Return (rows, texts, features) unit vectors, each text alone."""
    of_token = {"cls": 0, "lasttoken": -1}
    tokenizer, found = AutoTokenizer.from_pretrained(folder / "tokenizer"), []
    for row in rows:
        for text in row:
            with torch.no_grad():
                hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            vector = hidden.mean(0) if pooling == "mean" else hidden[of_token[pooling]]
            found.append(vector / vector.norm())
    return torch.stack(found).unflatten(0, (len(rows), -1))


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
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
    scale = math.exp(json.loads((run.folder / "final/temperature.json").read_text())["logit_scale"][0])
    assert "logit_scale" not in run.weights  # a server refuses a weight that the model does not have
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
    again = kit.run_evaluation(2, tmp_path / "again", "--checkpoint", run.folder / "final")
    assert again["loss"] == pytest.approx(line["loss"], rel=1e-9)  # with the learned temperature


def test_temperature_of_sharded_runs(folder, tmp_path):
    """Any rank may write it."""
    fields = {"global_batch_size": 10, "per_device_batch_size": 5, "max_steps": 3, "learn_temperature": True}
    flags = kit.flags(**recipe(folder, **fields | {"learning_rate": 1e-2}))
    runs = [kit.run_training(1, tmp_path / "one", *flags)]
    runs.append(kit.run_training(2, tmp_path / "two", *flags, env=kit.where("fsdp2", 2, mixed_precision="no")))
    one, two = (json.loads((run.folder / "final/temperature.json").read_text())["logit_scale"] for run in runs)
    assert one == pytest.approx(two, rel=1e-9) != pytest.approx([math.log(20)], rel=1e-6)

    final = runs[1].folder / "final"
    task, _ = kit.open_data(**recipe(folder, learn_temperature=True))
    assert task.build(str(final)).logit_scale.tolist() == two


def test_negatives_that_no_field_names_are_warned_about(folder, tmp_path, capsys):
    file = kit.write_jsonl(tmp_path / "rows.jsonl", [{"query": "b", "found": "c", "negative": "d"}] * 9)
    columns = {"anchor": "query", "positive": "found"}
    kit.open_data(**recipe(folder, train_file=file, validation_file=file, columns=columns))
    assert "the column negative is not used: give --columns '{negative: negative}'" in capsys.readouterr().err


def test_ratings_of_pairs_are_warned_about(folder, tmp_path, capsys):
    file = kit.write_jsonl(tmp_path / "rows.jsonl", [{"query": "b", "found": "c", "other": "d", "label": 0}] * 9)
    kit.open_data(**recipe(folder, train_file=file, validation_file=file))
    assert "train data: the column label is not used" in capsys.readouterr().err


# ---- sentence-transformers ---------------------------------------------------------------------------------------------

PROMPTS = {"prompts": {"query": "dog ", "passage": "cat b ", "topic": "j "}, "default_prompt_name": "topic"}


def base_of_sentence_transformers(folder, pooling, modules=("Transformer", "Pooling"), length=9):
    """Save a tiny BERT with the files of sentence-transformers, as it writes them; return the fields of a run on it."""
    model = folder / "model"
    AutoModel.from_config(AutoConfig.for_model(**BERT, vocab_size=18)).save_pretrained(model)
    (model / "1_Pooling").mkdir()
    files = {
        "modules.json": [{"path": f"{i}_{name}" if i else "", "type": f"x.{name}"} for i, name in enumerate(modules)],
        "1_Pooling/config.json": {"embedding_dimension": 32, "include_prompt": True} | pooling,
        "sentence_bert_config.json": {"max_seq_length": length},
        "config_sentence_transformers.json": PROMPTS,
    }
    for name, value in files.items():
        (model / name).write_text(json.dumps(value))
    return {"model_name_or_path": model, "model_config": None}


@pytest.mark.parametrize(
    "given", [{"pooling_mode": "lasttoken"}, {"pooling_mode_lasttoken": True, "pooling_mode_max": False}]
)
def test_pooling_length_and_prompts_of_the_base_model(folder, tmp_path, capsys, given):
    fields = {
        name: value
        for name, value in (recipe(folder) | base_of_sentence_transformers(tmp_path, given)).items()
        if value
    }
    task, splits = kit.open_data(**fields)
    assert (task.pooling, task.max_length) == ("lasttoken", 9)
    row, texts = splits["train"].rows(np.arange(1))[0], texts_of(folder, "train.jsonl")[0]
    for i, prompt in enumerate(("dog ", "cat b ", "cat b ")):
        ids = task.tokenizer(prompt + texts[i], truncation=True, max_length=9)["input_ids"]
        assert row[f"ids_{i}"].tolist() == ids
    assert capsys.readouterr().err.count("pooling") == 0

    task.write_files(tmp_path, {}, 0)  # what a run writes is such a base model, too
    written = read_base(tmp_path)
    assert (written.pooling, written.max_length, written.not_used) == ("lasttoken", 9, ())
    assert (written.prompt("query"), written.prompt("document"), written.prompt()) == ("dog ", "cat b ", "j ")

    task, splits = kit.open_data(**fields, pooling="mean", max_length=20, anchor_prompt="", positive_prompt="b")
    assert (task.pooling, task.max_length, task.prompts) == ("mean", 20, ("", "b", "b"))
    assert "pooling is mean, but" in capsys.readouterr().err


def test_what_is_not_used_of_the_base_model_is_named(folder, tmp_path, capsys):
    other = base_of_sentence_transformers(tmp_path, {"pooling_mode": "max"}, ("Transformer", "Pooling", "Dense"))
    fields = {name: value for name, value in (recipe(folder) | other).items() if value}
    with pytest.raises(UsageError, match="--pooling"):
        kit.open_data(**fields)
    kit.open_data(**fields, pooling="cls")
    assert "Dense" in capsys.readouterr().err


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A Llama whose tokenizer has a chat template, and the fields of a run on it."""
    folder = tmp_path_factory.mktemp("chat_model")
    tokenizer = kit.tiny_tokenizer(folder / "model", [" ".join(WORDS)] * 3, chat_template=kit.CHATML)
    kit.save_model(tokenizer, kit.LLAMA)
    rows = [{"anchor": f"dog {a}", "positive": f"cat {a} {b}"} for a in WORDS for b in WORDS]
    fields = {"task": "embeddings", "train_file": kit.write_jsonl(folder / "rows.jsonl", rows), "max_steps": 3}
    fields |= {"global_batch_size": 8, "per_device_batch_size": 8, "learning_rate": 1e-2, "cache_dir": folder / "cache"}
    return fields | {"model_name_or_path": tokenizer, "learn_temperature": True}


@pytest.mark.cluster
@pytest.mark.parametrize("pooling", ["mean", "lasttoken"])
def test_sentence_transformers_gives_the_vectors_of_the_run(chat_model, tmp_path, pooling):
    """Texts are longer than max_length, and the tokenizer has a chat template, which it would wrap around them."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    prompts = {"anchor_prompt": "query: ", "positive_prompt": "text: "}
    run = kit.run_training(1, tmp_path / "run", *kit.flags(**chat_model, **prompts, pooling=pooling, max_length=9))
    final = run.folder / "final"
    further = chat_model | {"model_name_or_path": final}  # takes all three from final/
    task, splits = kit.open_data(**further)
    rows = splits["train"].rows(np.arange(121))
    model = task.build().eval()
    with torch.no_grad():
        vectors = task.represent(model, task.collate(rows, False).inputs)["vectors"]
    vectors[:, 0] /= model.logit_scale.exp()
    texts = [json.loads(line) for line in chat_model["train_file"].read_text().splitlines()]
    loaded = sentence_transformers.SentenceTransformer(str(final), device="cpu")
    for i, (encode, name) in enumerate(((loaded.encode_query, "anchor"), (loaded.encode_document, "positive"))):
        theirs = torch.tensor(encode([row[name] for row in texts]))
        assert torch.allclose(theirs, vectors[:, i], rtol=0, atol=1e-6)
    assert loaded.max_seq_length == 9
    assert max(len(row["ids_1"]) for row in rows) == 9
    loaded.save(str(tmp_path / "saved"))  # a base model as this version writes it
    again, _ = kit.open_data(**further | {"model_name_or_path": tmp_path / "saved"})
    assert (again.pooling, again.max_length, again.prompts) == (pooling, 9, task.prompts)
