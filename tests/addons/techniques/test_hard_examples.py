"""Hard examples of the global batch against a plain loop; the choice within a micro-batch is not the same."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from addons.techniques import hard_examples
from engine.plan.seeding import seed_everything
from src.losses import chunked_cross_entropy
from src.tasks import causal_lm
from tests.addons.tasks import recipes
from tests.conformance.test_task import make_flags, open_task
from tests.helpers import kit, technique_runs

SHARE = 0.3  # 5 of 16 rows


def fields(folder, **options) -> dict:
    return technique_runs.files(folder) | {"techniques": json.dumps({"hard_examples": {"share": SHARE, **options}})}


def plain_weights(values: dict, losses: list | None = None) -> dict[str, torch.Tensor]:
    """Return the weights of a plain loop over whole batches; append the mean loss of the chosen rows in each step."""
    plain = technique_runs.Plain(values)
    optimizer, targets = plain.optimizer(), plain.batch.inputs["targets"]

    def update(step: int) -> None:
        logits = plain.model(input_ids=plain.batch.inputs["input_ids"]).logits
        each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum(1)
        counts = (targets != -100).sum(1)
        chosen = (each / counts).topk(math.ceil(SHARE * len(each))).indices
        loss = each[chosen].sum() / counts[chosen].sum()
        if losses is not None:
            losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return plain.train(update)


def test_lines_of_a_run_name_both_losses(tmp_path):
    values, losses = fields(tmp_path), []
    plain_weights(values, losses)
    run = technique_runs.train(tmp_path / "run", values, 2, 4)
    assert run.losses() == pytest.approx(losses, rel=1e-10)
    for line in run.kind("train"):  # the weight is that of all rows, as without the technique
        assert line["loss"] > line["all_rows_loss"]
        assert 0 < line["chosen_weight"] < 1
    without = technique_runs.train(tmp_path / "without", values | {"techniques": "{}", "max_steps": 1}).kind("train")
    assert run.kind("train")[0]["all_rows_loss"] == pytest.approx(without[0]["loss"], rel=1e-12)
    assert run.kind("train")[0]["weight"] == without[0]["weight"]


class OfTheMicroBatch(hard_examples.HardestRows):
    """The mutant that chooses the hardest rows of each micro-batch of four."""

    def batch_loss(self, vectors, weight):
        starts = range(0, technique_runs.ROWS, 4)
        parts = [{name: value[start : start + 4] for name, value in vectors.items()} for start in starts]
        return {"loss": sum(super(OfTheMicroBatch, self).batch_loss(part, weight)["loss"] for part in parts) / 4}


def test_choice_within_a_micro_batch_is_caught(tmp_path, monkeypatch):
    values = fields(tmp_path)
    weights = plain_weights(values)
    monkeypatch.setattr(hard_examples, "HardestRows", OfTheMicroBatch)
    run = technique_runs.train(tmp_path / "mutant", values, 1, 4)
    assert kit.distance(run.weights, {name: weights[name] for name in run.weights}) > 1e-4


def test_resumed_at_start_step_before_which_all_rows_count(tmp_path):
    run = technique_runs.check_resume(tmp_path, fields(tmp_path, start_step=3))
    plain = technique_runs.train(tmp_path / "plain", technique_runs.files(tmp_path) | {"max_steps": 3}, 1, 4)
    assert run.losses()[:2] == pytest.approx(plain.losses()[:2], rel=1e-12)
    assert run.kind("train")[2]["all_rows_loss"] == pytest.approx(plain.losses()[2], rel=1e-12)
    assert run.losses()[2] > plain.losses()[2]


# ---- losses of rows ----------------------------------------------------------------------------------------------------


CROSS_ENTROPY = {"z_loss": 0.1, "label_smoothing_factor": 0.1}


@pytest.mark.parametrize(
    "name, more",
    [
        ("causal_lm", CROSS_ENTROPY),
        ("masked_lm", CROSS_ENTROPY),
        ("seq2seq", CROSS_ENTROPY),
        ("preference", {}),
        ("distillation", {}),
        ("text_classification", CROSS_ENTROPY | {"class_weights": ["0.5", "2"]}),
        ("token_classification", CROSS_ENTROPY),
        ("image_classification", CROSS_ENTROPY | {"mixup": 1.0}),
    ],
)
def test_losses_of_rows_add_up(tmp_path, monkeypatch, name, more):
    """In float64, with the options of the cross-entropy, and in several chunks of logits."""
    kit.need_task(name)
    monkeypatch.setattr(chunked_cross_entropy, "chunk_rows", lambda *args: 7)
    if name in ("preference", "distillation"):  # a fork may lack them
        monkeypatch.setattr("addons.tasks.distillation.token_terms.chunk_rows", lambda *args: 7)
    task, splits, model = open_task(make_flags(getattr(recipes, name), tmp_path) + kit.flags(**more))
    rows = splits["train"].rows(range(10))
    model.train()
    seed_everything(0)
    batch = task.collate(rows, training=True)
    loss = task.loss(model, batch.inputs)["loss"]
    together = task.row_losses(model, batch.inputs)
    assert together["loss"].shape == together["weight"].shape == (len(rows),)
    assert together["loss"].sum().item() == pytest.approx(loss.item(), rel=1e-6 if "image" in name else 1e-10)
    assert together["weight"].sum().item() == pytest.approx(batch.weight, rel=1e-6)


def test_option_that_changes_the_loss_of_rows_is_refused(tmp_path, monkeypatch):
    """A loss that the losses of rows do not know is found in the first step, on all ranks."""
    loss = causal_lm.Task.loss
    monkeypatch.setattr(causal_lm.Task, "loss", lambda *args: {name: 2 * v for name, v in loss(*args).items()})
    flags = kit.flags(**fields(tmp_path) | {"per_device_batch_size": 4})
    codes, outputs = kit.run_command("train.py", *flags, folder=tmp_path / "here", world=2)
    assert codes == [2, 2]
    assert "row_losses" in outputs[0]
