"""R-Drop: the formula of the paper, and the same numbers for every split of a run with dropout."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

from src.data.batch_plan import PlanConfig, plan
from src.models.cross_entropy import r_drop_sums, twice
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


def loss_of(one: torch.Tensor, other: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of the authors' code, summed over rows, by torch."""
    entropy = [F.cross_entropy(logits, labels, reduction="sum") for logits in (one, other)]
    logs = [logits.log_softmax(-1) for logits in (one, other)]
    kl = [F.kl_div(a, b, reduction="sum", log_target=True) for a, b in (logs, logs[::-1])]
    return sum(entropy) / 2 + ALPHA * sum(kl) / 2


def plain_weights(values: dict, micro_batch: int) -> dict[str, torch.Tensor]:
    names = ("task", "model_config", "tokenizer_name", "train_file", "dtype", "metrics")
    task, splits = kit.open_data(**{name: values[name] for name in names}, output_dir="unused")
    torch.manual_seed(42)
    model = task.build(None).train()
    decay = [[p for p in model.parameters() if (p.dim() >= 2) == matrix] for matrix in (True, False)]
    groups = [{"params": decay[0], "weight_decay": 0.1}, {"params": decay[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    config = PlanConfig(16, 16, micro_batch, 42, splits["train"].lengths)
    for step in range(technique_runs.STEPS):
        optimizer.zero_grad()
        for micro in plan(config, step, 0):
            inputs = task.collate(splits["train"].rows(micro.ids), training=True).inputs
            labels = inputs.pop("labels")
            torch.manual_seed(micro.seed)
            one, other = model(**twice(inputs)).logits.chunk(2)
            (loss_of(one, other, labels) / 16).backward()
        optimizer.step()
    return model.state_dict()


def test_loss_is_that_of_the_authors():
    one, other = torch.randn(2, 5, 3, dtype=torch.float64)
    labels, both = torch.tensor([0, 1, 2, 1, 0]), torch.cat([one, other])
    sums = {"loss": F.cross_entropy(both, labels.repeat(2), reduction="sum")}
    assert abs(r_drop_sums(sums, both, ALPHA)["loss"] - loss_of(one, other, labels)) <= 1e-12


def test_r_drop_is_exact_for_every_split(tmp_path):
    values = fields(tmp_path)
    for micro, worlds in ((1, (4,)), (4, (1, 2, 4)), (16, (1,))):
        expected = plain_weights(values, micro)
        for world in worlds:
            run = technique_runs.train(tmp_path / f"{micro}x{world}", values, world, micro)
            assert kit.distance(run.weights, {name: expected[name] for name in run.weights}) <= 1e-10
    assert run.kind("train")[-1]["r_drop"] > 0
    mutant = technique_runs.train(tmp_path / "mutant", values | {"r_drop_alpha": 0.0}, 1, 16)
    assert kit.distance(run.weights, mutant.weights) > 1e-4


def test_r_drop_with_balanced_classes_resumes(tmp_path):
    run = technique_runs.check_resume(tmp_path, fields(tmp_path) | {"class_weights": "balanced"})
    weights = [float(value) for value in yaml.safe_load((run.folder / "config.yaml").read_text())["class_weights"]]
    assert len(weights) == 2
    assert run.kind("train")[-1]["weight"] == pytest.approx(16)
