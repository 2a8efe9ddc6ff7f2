"""The trial evaluation before step 1: an unknown metric_for_best_model is refused, a task's own metric is found."""

import json
import random
import types
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from src.config.errors import UsageError
from src.data.data_loader import seed_everything
from src.training.step import ModelWithLoss
from src.training.trial_evaluation import check_best_metric, random_state_kept
from tests.helpers import kit, plain_task


def check(plain, metric: str, metrics=None, row_metrics=None, **fields):
    """Check a run of the plain task; one method may be replaced; return the names in the refusal, or []."""
    given = plain | {"metric_for_best_model": metric, "task": plain_task.NAME, "max_steps": 1} | fields
    given = {n: json.dumps(v) if isinstance(v, dict) else v for n, v in given.items() if v is not None}
    task, splits = kit.open_data(**given)
    for name, method in (("metrics", metrics), ("row_metrics", row_metrics)):
        if method:
            setattr(task, name, types.MethodType(method, task))
    try:
        check_best_metric(task.cfg, splits["validation"], ModelWithLoss(task.build(), task))
    except UsageError as error:
        return str(error).partition("it has ")[2].split(", ")
    return []


@pytest.mark.parametrize("metric", ["accuracy", "eval_accuracy", "loss", "weight", "ema/accuracy", "ema/loss"])
def test_known_metric_is_accepted(plain, metric):
    assert check(plain, metric, techniques={"ema": None} if "/" in metric else None) == []


def test_unknown_metric_is_refused_with_all_names(plain):
    known = ["loss", "weight", "examples", "accuracy"]
    assert check(plain, "f1") == known
    assert check(plain, "ema/f1", techniques={"ema": None}) == [*known, "ema/loss", "ema/accuracy"]


def test_metrics_of_all_rows_are_tried(plain):
    assert check(plain, "tau", row_metrics=lambda task, rows: {"tau": float(rows["predictions"].sum())}) == []
    assert "tau" in check(plain, "tao", row_metrics=lambda task, rows: {"tau": 0.0})


def test_names_of_sources(plain):
    files = {name: {key: str(path) for key, path in plain.items()} for name in ("code", "prose")}
    mixture = {"train_file": None, "validation_file": None, "mixture": files}
    assert check(plain, "code/accuracy", **mixture) == []
    assert check(plain, "prose/loss", **mixture) == []
    assert {"accuracy", "code/accuracy", "prose/weight"} <= set(check(plain, "poetry/accuracy", **mixture))


def test_metric_that_needs_more_rows_is_found(plain):
    """The mutant looks at two rows only."""
    assert check(plain, "rare", metrics=lambda task, sums, weight: {"rare": 1.0} if weight > 20 else {}) == []


def has_rare_metric(task, sums, weight):
    """Return a metric that the first 100 rows lack, which have 273 labels in all."""
    return {"rare": 1.0} if weight > 300 else {"accuracy": 0.5}


def train_with_rare_metric(flags: list) -> None:
    import train

    plain_task.Task.metrics = has_rare_metric  # in this process only
    train.main([str(word) for word in flags])


@pytest.mark.parametrize("world", [1, 2])
def test_metric_that_the_first_rows_lack_is_looked_for_in_all_rows(plain, tmp_path, world, capsys):
    """A class may be rare: a run with a right name is not refused, one with a wrong name is before step 1."""
    data = plain_task.write_data(tmp_path, validation=130)
    fields = data | {"max_steps": 2, "output_dir": tmp_path / "run", "lr_scheduler_type": "constant"}
    for steps, looks in ((2, True), (3, False)):  # a resumed run knows that evaluations have it
        flags = plain_task.flags(data, **fields | {"max_steps": steps}, metric_for_best_model="rare")
        kit.spawn(world, train_with_rare_metric, flags, out=tmp_path / "out")
        assert ("evaluating all rows" in (tmp_path / "out/rank0.txt").read_text()) == looks
    assert (tmp_path / "run/final").exists()
    with pytest.raises(kit.RankFailed, match="no 'rear'; did you mean rare"):
        flags = plain_task.flags(data, **fields | {"output_dir": tmp_path / "other"}, metric_for_best_model="rear")
        kit.spawn(world, train_with_rare_metric, flags, out=tmp_path / "out")
    assert not (tmp_path / "other/checkpoints").exists()
    assert check(data, "rare", metrics=has_rare_metric) == []  # a dry run
    assert "the first 100 rows have loss, weight, examples, accuracy" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["metrics", "row_metrics"])
def test_metrics_that_fail_on_few_rows_do_not_refuse_the_run(plain, method, capsys):
    def fails(task, *args):
        return {"tau": 1 / 0}

    assert check(plain, "tau", **{method: fails}) == []
    assert "metric_for_best_model tau is not checked before the first evaluation" in (text := capsys.readouterr().err)
    assert "ZeroDivisionError" in text


def test_rows_without_targets_do_not_refuse_the_run(plain, tmp_path, capsys):
    row = {"x": [0.5] * plain_task.FEATURES, "y": [-100] * plain_task.LABELS}
    rows = [row] * 120 + [row | {"y": [1] * plain_task.LABELS}]
    files = {"validation_file": kit.write_jsonl(tmp_path / "none.jsonl", rows)}
    assert check(plain | files, "accuracy") == []
    assert "the first 100 rows have no targets" in capsys.readouterr().err


def test_too_large_for_a_dry_run_is_said(plain, monkeypatch, capsys):
    monkeypatch.setattr("src.training.trial_evaluation.LIMIT", 1)
    assert check(plain, "f1") == []
    assert "the model is too large" in capsys.readouterr().err


@pytest.mark.parametrize(
    "strategy", [None, *(pytest.param(n, marks=pytest.mark.cluster) for n in ("ddp", "fsdp2", "zero3"))]
)
def test_run_with_such_a_metric_is_bitwise_the_same(plain, tmp_path, strategy):
    """Batch norm and dropout: the trial must not move statistics or random numbers."""
    if strategy == "zero3":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install -r requirements-extra.txt")
    env = kit.where(strategy, 2, mixed_precision="no") if strategy else None
    dtype = "float32" if strategy == "zero3" else "float64"
    fields = {"norm": True, "eval_steps": 5, "dtype": dtype, "per_device_batch_size": 4, "max_steps": 5}

    def run(name: str, **more):
        flags = plain_task.flags(plain, **fields | more)
        return kit.run_training(2 if strategy else 1, tmp_path / name, *flags, env=env)

    first, second = run("loss"), run("accuracy", metric_for_best_model="accuracy")
    assert kit.same(first.weights, second.weights)
    assert first.kind("train")[-1]["loss"] == second.kind("train")[-1]["loss"]


def test_trial_keeps_the_random_state():
    """All three generators continue as if the trial had drawn nothing; the mutant keeps nothing."""

    def draw() -> tuple:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def after(within) -> tuple:
        seed_everything(7)
        with within:
            draw()
        return draw()

    seed_everything(7)
    expected = draw()
    assert after(random_state_kept(torch.device("cpu"))) == expected
    assert after(nullcontext()) != expected
