"""Masked language models: which tokens are masked, and the loss and gradient of transformers itself."""

import numpy as np
import pytest
import torch

from addons.tasks.masked_lm import has_positionwise_head, mask_tokens, masked_count
from engine.plan.seeding import seed_everything
from tests.addons.tasks import recipes
from tests.helpers import kit

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "bert": recipes.BERT,
    "roberta": recipes.BERT | {"model_type": "roberta", "max_position_embeddings": 66},
    "distilbert": {"model_type": "distilbert", "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
    "modernbert": SIZES | {"model_type": "modernbert", "cls_token_id": 0, "sep_token_id": 0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    recipes.masked_lm(folder)
    for name, values in MODELS.items():
        kit.write_yaml(folder / f"{name}.yaml", values)
    return folder


def open_data(folder, model="bert", **fields):
    model = {} if "model_name_or_path" in fields else {"model_config": folder / f"{model}.yaml"}
    fields = model | {"train_file": folder / "train.jsonl"} | fields
    return kit.open_data(
        task="masked_lm", tokenizer_name=folder / "tokenizer", cache_dir=folder / "cache", dtype="float64", **fields
    )


def rows_of(splits, count=None):
    return splits["train"].rows(np.arange(count or len(splits["train"])))


# ---- masks -----------------------------------------------------------------------------------------------------------


def test_tokens_are_masked_replaced_or_kept():
    ids = np.tile(np.arange(20), 1000)
    allowed = np.arange(20) >= 3
    masked, positions = mask_tokens(ids, allowed, 0.3, 2, 20, np.random.default_rng(0))
    assert len(positions) == len(set(positions)) == masked_count(17_000, 0.3) == 5100
    assert allowed[ids[positions]].all()
    others = np.setdiff1d(np.arange(len(ids)), positions)
    assert (masked[others] == ids[others]).all()
    is_mask, is_kept = masked[positions] == 2, masked[positions] == ids[positions]
    assert is_mask.mean() == pytest.approx(0.8 + 0.1 / 20, abs=0.02)
    assert is_kept.mean() == pytest.approx(0.1 + 0.1 / 20, abs=0.02)
    assert [masked_count(n, 0.15) for n in (0, 1, 3, 20, 100)] == [0, 1, 1, 3, 15]


def test_weight_is_known_before_training(folder):
    task, splits = open_data(folder)
    rows = rows_of(splits)
    for training in (True, False):
        assert task.collate(rows, training).weight == splits["train"].stats["targets"]


def test_long_texts_are_split_or_dropped(folder):
    (_, split), (_, dropped) = (open_data(folder, max_length=16, long_rows=value) for value in ("cut", "drop"))
    stats = dropped["train"].stats
    assert len(split["train"]) > stats["source_rows"] > len(dropped["train"]) > 0
    assert len(dropped["train"]) == stats["source_rows"] - stats["rows_dropped"]


def test_masks_belong_to_the_micro_batch_in_training_and_to_the_row_in_evaluation(folder):
    task, splits = open_data(folder)
    rows = rows_of(splits, 9)

    def inputs(rows, training, seed=0):
        seed_everything(seed)
        return task.collate(rows, training).inputs

    first, again, other = (inputs(rows, True, seed)["positions"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    together = inputs(rows, False)["input_ids"]
    for i, row in enumerate(rows):
        alone = inputs([row], False, seed=i)["input_ids"][0]
        assert torch.equal(together[i, : len(alone)], alone)


# ---- loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradient_are_those_of_transformers(folder, name):
    task, splits = open_data(folder, name)
    model = task.build().eval()
    assert task.positionwise_head
    rows = rows_of(splits, 8)
    total, weights = 0.0, 0
    expected = torch.zeros(())
    for row in rows:  # transformers divides by the targets of its batch
        batch = task.collate([row], False)
        labels = torch.full_like(batch.inputs["input_ids"], -100)
        labels.view(-1)[batch.inputs["positions"]] = batch.inputs["targets"]
        expected = expected + model(batch.inputs["input_ids"], labels=labels).loss * batch.weight
        weights += batch.weight
    reference = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    batch = task.collate(rows, False)
    with torch.enable_grad():
        model.train(False)
        evaluated = task.loss(model, batch.inputs)
        model.training = True  # the loss for training, without dropout inside
        total = task.loss(model, batch.inputs)["loss"]
    assert batch.weight == weights
    assert evaluated["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    gradient = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    for one, other in zip(reference, gradient, strict=True):
        assert one is other is None or torch.allclose(one, other, atol=1e-6)


def test_head_sees_only_masked_positions(folder):
    task, splits = open_data(folder)
    model = task.build().eval()
    batch = task.collate(rows_of(splits), False)
    shapes = []
    model.cls.register_forward_hook(lambda module, inputs, logits: shapes.append(logits.shape))
    task.loss(model, batch.inputs)
    assert shapes == [(1, batch.weight, model.config.vocab_size)]


def test_mutant_head_that_mixes_positions_gets_all_of_them(folder):
    task, splits = open_data(folder)
    model = task.build().eval()
    head = model.cls.forward
    model.cls.forward = lambda hidden: head(hidden - hidden.mean(1, keepdim=True))
    batch = task.collate(rows_of(splits, 8), False)
    with torch.no_grad():
        wrong = task.loss(model, batch.inputs)["loss"].item()
        assert not has_positionwise_head(model, task.vocab_size)
        task.positionwise_head = False
        labels = batch.inputs["targets"]
        arguments = {name: batch.inputs[name] for name in ("input_ids", "attention_mask")}
        logits = model(**arguments).logits.flatten(0, 1)[batch.inputs["positions"]]
        expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        assert task.loss(model, batch.inputs)["loss"].item() == pytest.approx(expected, rel=1e-9)
    assert wrong != pytest.approx(expected, rel=1e-6)
