"""Buffers that training changes: the mean over the micro-batches of a step, whatever rank computed them."""

import pytest
import torch

from src.distributed import backend_checks
from src.distributed.running_statistics import StepBuffers
from tests.helpers import batch_norm, classifier_task, kit

CONSTANT = "constant"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    with classifier_task.registered(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(classifier_task.Task, "build", batch_norm.build)
        yield batch_norm.recipe(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def one(flags, tmp_path_factory) -> kit.Run:
    return kit.run_training(1, tmp_path_factory.mktemp("one") / "run", *flags)


@pytest.fixture(scope="module")
def two(flags, tmp_path_factory) -> kit.Run:
    return kit.run_training(2, tmp_path_factory.mktemp("two") / "run", *flags)


def check_same_numbers(one: kit.Run, other: kit.Run) -> None:
    ours, theirs = dict(one.weights), dict(other.weights)
    assert any("running_var" in name for name in ours)
    assert torch.equal(ours.pop(CONSTANT).view(torch.int64), theirs.pop(CONSTANT).view(torch.int64))
    assert kit.distance(ours, theirs) <= 1e-10
    for a, b in zip(one.kind("eval"), other.kind("eval"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-10)
        assert b["accuracy"] == a["accuracy"]


def test_numbers_do_not_depend_on_the_number_of_processes(flags, one, two, tmp_path):
    check_same_numbers(one, two)
    check_same_numbers(one, kit.run_training(4, tmp_path / "four", *flags))
    assert one.weights["blocks.0.norm.num_batches_tracked"].item() == 16  # the steps, not the micro-batches


def test_fsdp2_and_recomputation_give_the_same_buffers(flags, one, tmp_path):
    """A recomputed forward pass of batch norm updates its statistics a second time."""
    env = kit.where("fsdp2", 2, mixed_precision="no")
    check_same_numbers(one, kit.run_training(2, tmp_path / "fsdp2", *flags, env=env))
    check_same_numbers(one, kit.run_training(1, tmp_path / "again", *flags, "--gradient_checkpointing", "true"))


def evaluated(run: kit.Run, folder) -> tuple[dict, dict]:
    """Return what the run reported last, and what eval.py finds for its last checkpoint on one process."""
    return run.kind("eval")[-1], kit.run_evaluation(1, folder, "--checkpoint", run.folder)


def test_two_processes_evaluate_and_resume_bitwise(flags, two, tmp_path):
    reported, found = evaluated(two, tmp_path / "eval")
    assert found == reported
    resumed = kit.run_training(2, kit.rewind(two.folder, 8, tmp_path / "run"), *flags)
    assert kit.same(resumed.weights, two.weights)
    assert resumed.kind("eval") == two.kind("eval")


def test_mutant_buffers_of_each_rank_are_caught(flags, tmp_path, monkeypatch):
    for name in ("record", "restore", "finish"):
        monkeypatch.setattr(StepBuffers, name, lambda self: None)
    with pytest.raises(kit.RankFailed, match=r"running_mean"):  # by the check of replicas before the first save
        kit.run_training(2, tmp_path / "run", *flags)
    monkeypatch.setattr(backend_checks, "check_replicas", lambda *args: None)
    reported, found = evaluated(kit.run_training(2, tmp_path / "run", *flags), tmp_path / "eval")
    assert found["loss"] != pytest.approx(reported["loss"], rel=1e-4)
