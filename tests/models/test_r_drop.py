"""R-Drop: the formula of the paper, and the same numbers for every split of a run with dropout."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

from src.models.cross_entropy import r_drop_sums
from tests.conformance import recipes
from tests.helpers import kit, technique_runs

ALPHA = 2.0
DROPOUT = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}


def fields(folder) -> dict:
    generator = np.random.default_rng(2)
    texts = [" ".join(generator.choice(recipes.SENTENCE.split(), n)) for n in generator.integers(2, 9, 16)]
    rows = [{"text": text, "label": "cat" if "cat" in text or "red" in text else "none"} for text in texts]
    return technique_runs.files(folder) | {
        "task": "text_classification",
        "model_config": kit.write_yaml(folder / "bert.yaml", recipes.BERT | DROPOUT),
        "tokenizer_name": kit.tiny_tokenizer(folder / "tokenizer"),
        "train_file": kit.write_jsonl(folder / "texts.jsonl", rows),
        "validation_file": kit.write_jsonl(folder / "other_texts.jsonl", rows[:5]),
        "metrics": "none",
        "r_drop_alpha": ALPHA,
    }


def test_loss_is_that_of_the_authors():
    one, other = torch.randn(2, 5, 3, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 1, 0])
    entropy = [F.cross_entropy(logits, labels, reduction="sum") for logits in (one, other)]
    logs = [logits.log_softmax(-1) for logits in (one, other)]
    kl = [F.kl_div(a, b, reduction="sum", log_target=True) for a, b in (logs, logs[::-1])]
    loss = r_drop_sums({"loss": sum(entropy)}, torch.cat([one, other]), ALPHA)["loss"]
    assert abs(loss - sum(entropy) / 2 - ALPHA * sum(kl) / 2) <= 1e-12


def test_r_drop_is_exact_for_every_split(tmp_path):
    values = fields(tmp_path)
    one, two = (technique_runs.train(tmp_path / str(world), values, world, 4) for world in (1, 2))
    assert kit.distance(one.weights, two.weights) <= 1e-10
    assert one.kind("train")[-1]["r_drop"] > 0
    mutant = technique_runs.train(tmp_path / "mutant", values | {"r_drop_alpha": 0.0}, 1, 4)
    assert kit.distance(one.weights, mutant.weights) > 1e-4


def test_r_drop_with_balanced_classes_resumes(tmp_path):
    run = technique_runs.check_resume(tmp_path, fields(tmp_path) | {"class_weights": "balanced"})
    weights = [float(value) for value in yaml.safe_load((run.folder / "config.yaml").read_text())["class_weights"]]
    assert len(weights) == 2
    assert run.kind("train")[-1]["weight"] == pytest.approx(16)
