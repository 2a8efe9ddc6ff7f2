"""Buffers that training changes: the mean over the micro-batches of a step, whatever rank computed them."""

from contextlib import nullcontext

import pytest
import torch

from engine.distributed import backends, replica_check
from engine.distributed.running_statistics import StepBuffers, all_buffers_unchanged
from tests.helpers import batch_norm, classifier_task, kit

CONSTANT, COUNTER = "constant", "blocks.0.norm.num_batches_tracked"


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


def test_numbers_do_not_depend_on_the_number_of_processes(flags, one, two, tmp_path, monkeypatch):
    """Mutant: what the first gradient has changed stays, which four ranks compute twice."""
    check_same_numbers(one, two)
    four = kit.run_training(4, tmp_path / "four", *flags)
    check_same_numbers(one, four)
    for run in (one, four):
        assert run.weights[COUNTER].item() == 16  # the steps, not the micro-batches
    monkeypatch.setattr(backends, "all_buffers_unchanged", lambda module: nullcontext())
    assert kit.run_training(4, tmp_path / "mutant", *flags).weights[COUNTER].item() == 17


class Counter(torch.nn.Module):
    """Counts its calls in buffers: in place, as a new tensor, and in one that is there from the first call on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("in_place", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("replaced", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("late", None)

    def forward(self, x):
        self.in_place += 1
        self.replaced = self.replaced + 1
        self.late = torch.ones(1)
        return x


def test_all_buffers_are_restored_after_a_pass_that_does_not_count():
    model = torch.nn.Sequential(Counter())
    model(torch.ones(1))
    model[0].late = None
    before = dict(model.named_buffers())
    with all_buffers_unchanged(model):
        model(torch.ones(1))
        assert model[0].replaced.item() == 2
    after = dict(model.named_buffers())
    assert list(after) == ["0.in_place", "0.replaced"]
    assert all(after[name] is before[name] for name in before)
    assert model[0].in_place.tolist() == [1, 1]
    assert model[0].replaced.item() == 1


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
    monkeypatch.setattr(StepBuffers, "add_hooks", lambda self: None)
    monkeypatch.setattr(StepBuffers, "finish", lambda self: None)
    with pytest.raises(kit.RankFailed, match=r"running_mean"):  # by the check of replicas before the first save
        kit.run_training(2, tmp_path / "run", *flags)
    monkeypatch.setattr(replica_check, "check_replicas", lambda *args: None)
    reported, found = evaluated(kit.run_training(2, tmp_path / "run", *flags), tmp_path / "eval")
    assert found["loss"] != pytest.approx(reported["loss"], rel=1e-4)
