"""metrics.jsonl is strict JSON that says exactly what was optimized; environment.json, the batch arithmetic."""

import json
import subprocess

import pytest
import torch

from engine.config.run_config import RunConfig
from src.tasks import causal_lm
from src.training import environment
from tests.helpers import kit


def flags(files, **values):
    fields = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "learning_rate": 1e-2}
    return kit.flags(**fields | {"max_steps": 10} | values)


def test_a_train_line_is_the_mean_by_weight_since_the_last_line(files, tmp_path):
    each = kit.run_training(1, tmp_path / "each", *flags(files, logging_steps=1)).kind("train")
    every = kit.run_training(2, tmp_path / "every", *flags(files, logging_steps=4)).kind("train")
    assert [line["step"] for line in every] == [4, 8, 10]
    for line, part in zip(every, (each[:4], each[4:8], each[8:]), strict=True):
        weight = sum(one["weight"] for one in part)
        assert line["weight"] == weight
        assert line["loss"] == pytest.approx(sum(one["loss"] * one["weight"] for one in part) / weight, rel=1e-6)
        assert line["epoch"] == line["step"] / 32
        assert {"learning_rate", "grad_norm", "tokens_per_second", "padding", "data_seconds", "skipped"} <= set(line)


def test_a_run_folder_holds_what_the_contract_says(files, tmp_path):
    run = kit.run_training(2, tmp_path / "run", *flags(files, validation_file=files / "validation.jsonl"))
    names = {path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*") if path.is_file()}
    expected = {"config.yaml", "environment.json", "metrics.jsonl", "final/README.md"}
    assert expected | {"logs/rank_0.log", "logs/rank_1.log"} <= names
    values = json.loads((run.folder / "environment.json").read_text())
    assert values["world_size"] == 2
    assert values["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    words = ["git", "-C", kit.REPOSITORY, "rev-parse", "HEAD"]
    commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    assert values["git_commit"] == (commit or None)
    assert values["global_batch"] == "32 examples = 4 micro-batches of 8 = 2 ranks × 2 accumulated"
    assert all(line["kind"] in ("train", "eval") and isinstance(line["step"], int) for line in run.lines)
    assert {"loss", "weight", "examples", "perplexity"} <= set(run.kind("eval")[0])
    text = environment.arithmetic(RunConfig(global_batch_size=32, per_device_batch_size=5), 2)
    assert text == "32 examples = 7 micro-batches of up to 5 = 2 ranks × up to 4 accumulated"


# ---- named sums --------------------------------------------------------------------------------------------------------


def test_named_sums_reach_the_train_line_and_survive_a_resume(files, tmp_path, monkeypatch):
    """The task returns `rare` for some micro-batches."""
    loss = causal_lm.Task.loss

    def with_sum(self, model, inputs):
        ids = inputs["input_ids"]
        more = {"rare": ids.double().sum()} if model.training and ids[0, 0] % 3 == 0 else {}
        return loss(self, model, inputs) | more

    monkeypatch.setattr(causal_lm.Task, "loss", with_sum)
    values = {"dtype": "float64", "max_steps": 8, "logging_steps": 4, "save_steps": 3}
    argv = flags(files, **values, model_config=files / "exact.yaml")
    one, two = (kit.run_training(world, tmp_path / f"{world}", *argv) for world in (1, 2))
    sums = [[line["rare"] for line in run.kind("train")] for run in (one, two)]
    assert min(sums[0]) > 0
    assert sums[1] == pytest.approx(sums[0], rel=1e-10)
    undisturbed = kit.timeless(two.folder)
    kit.rewind(two.folder, 6)  # between two train lines
    kit.run_training(2, two.folder, *argv)
    assert kit.timeless(two.folder) == undisturbed


def test_a_sum_with_the_name_of_a_field_is_refused(files, tmp_path, monkeypatch):
    loss = causal_lm.Task.loss
    monkeypatch.setattr(causal_lm.Task, "loss", lambda *args: {"skipped": torch.ones(())} | loss(*args))
    codes, texts = kit.run_command("train.py", *flags(files), folder=tmp_path / "run", world=2)
    assert codes == [2, 2]
    assert "'skipped'" in "".join(texts)
