"""reduce_lr_on_plateau: torch's rates, resumed, and what a resumed run may change."""

import dataclasses

import pytest
import torch

from engine.config.run_config import RunConfig
from tests.engine.checkpointing.test_run_identity import check, refusal
from tests.helpers import kit


@pytest.fixture(scope="module")
def plateau(tmp_path_factory):
    """Flags of a run with an accuracy that stops improving several times, and the run on two processes."""
    folder = tmp_path_factory.mktemp("plateau")
    fields = {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "accuracy", "dtype": "float64"}
    fields |= {"lr_scheduler_kwargs": '{"factor": 0.5, "patience": 1, "cooldown": 1, "min_lr": 0.02}'}
    fields |= {"learning_rate": 0.1, "warmup_steps": 3, "max_steps": 24, "logging_steps": 1, "eval_steps": 1}
    fields |= {"save_steps": 4, "save_total_limit": 99, "global_batch_size": 8, "per_device_batch_size": 4}
    flags = kit.flags(**kit.tiny_files(folder), **fields)
    return flags, kit.run_training(2, folder / "run", *flags)


def plateau_rates(accuracies: list[float], mode: str) -> list[float]:
    """Return the rates of torch's scheduler, times the warmup, for an evaluation after each of the steps."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode=mode, factor=0.5, patience=1, cooldown=1, min_lr=0.02
    )
    expected = []
    for step, accuracy in enumerate(accuracies):
        expected.append(optimizer.param_groups[0]["lr"] * min(1.0, step / 3))
        scheduler.step(accuracy)
    return expected


def test_plateau_equals_that_of_torch_and_follows_the_metric(plateau):
    _, run = plateau
    accuracies = [line["accuracy"] for line in run.kind("eval")]
    found = [line["learning_rate"] for line in run.kind("train")]
    assert len(accuracies) == len(found) == 24
    assert found == pytest.approx(plateau_rates(accuracies, "max"), rel=1e-12)
    assert found[-1] == pytest.approx(0.02)  # min_lr
    assert found != pytest.approx(plateau_rates(accuracies, "min"), rel=1e-3)  # the mutant: the direction of a loss


def test_plateau_after_a_resume(plateau, tmp_path):
    flags, run = plateau
    resumed = kit.run_training(1, kit.rewind(run.folder, 8, tmp_path / "run"), *flags)
    rates, expected = ([line["learning_rate"] for line in each.kind("train")] for each in (resumed, run))
    assert rates == expected
    assert kit.distance(resumed.weights, run.weights) <= 1e-10


# ---- resume ------------------------------------------------------------------------------------------------------------


def run_of(**fields) -> RunConfig:
    return RunConfig(output_dir="run", lr_scheduler_type="reduce_lr_on_plateau", warmup_steps=3, **fields)


def test_plateau_may_be_extended_unless_its_last_evaluation_was_an_extra_one(tmp_path):
    was, now = (run_of(max_steps=steps, eval_steps=5) for steps in (12, 30))
    for evaluated in (0, 10):  # resumed before the end
        assert check(tmp_path, now, was=was, evaluated=evaluated) == ["changed since step_00000008: max_steps: 12 → 30"]
    assert "(max_steps: 12 → 30)" in refusal(tmp_path, now, was=was, evaluated=12)


@pytest.mark.parametrize(
    "field, value", [("eval_steps", 3), ("metric_for_best_model", "accuracy"), ("greater_is_better", True)]
)
def test_what_decides_the_rate_of_plateau_may_not_change(tmp_path, field, value):
    was = run_of(max_steps=12, eval_steps=5)
    now = dataclasses.replace(was, **{field: value})
    assert f"({field}: {getattr(was, field)} → {value})" in refusal(tmp_path, now, was=was)
    was = dataclasses.replace(was, lr_scheduler_type="constant")
    assert check(tmp_path, dataclasses.replace(was, **{field: value}), was=was)
