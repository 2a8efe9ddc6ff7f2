"""Where and how often a run was cut, and on how many processes it went on, changes nothing in what it comes to."""

import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from src.data import data_loader
from src.reporting import ledger
from src.tasks import causal_lm
from src.training import step
from tests.helpers import kit

STEPS = 26  # of 8 examples: the exact tails of the epochs, of 3 examples, are steps 11 and 22


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict:
    return kit.tiny_files(tmp_path_factory.mktemp("tiny"))


def recipe(tiny, **fields) -> list[str]:
    values = {"global_batch_size": 8, "per_device_batch_size": 2, "per_device_eval_batch_size": 4}
    values |= {"max_steps": STEPS, "learning_rate": 3e-3, "logging_steps": 1, "eval_steps": 9, "save_steps": 2}
    return kit.flags(**tiny | values | fields)


def killed_at(at: int, world: int, folder: Path, flags: list[str], monkeypatch) -> None:
    """Train until all ranks die without a word in the middle of step `at`, all that was to be saved before it saved."""
    original = train.compute_gradient

    def gradient(strategy, module, window, *rest):
        if window[0][0].step == at - 1:
            for thread in threading.enumerate():
                if thread.name == "checkpoint writer":
                    thread.join()
            os._exit(9)
        return original(strategy, module, window, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(train, "compute_gradient", gradient)
        with pytest.raises(kit.RankFailed) as failed:
            kit.run_training(world, folder, *flags)
    assert set(failed.value.codes) == {9}


def close(one: list[dict], other: list[dict], bound: float) -> bool:
    """Return whether two sets of lines are the same in names, order and, up to `bound`, in numbers."""
    if [list(line) for line in one] != [list(line) for line in other]:
        return False
    pairs = [(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a]
    return all(a == b if isinstance(a, str) else a == pytest.approx(b, rel=bound, abs=bound) for a, b in pairs)


# ---- other numbers of processes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory) -> kit.Run:
    """An undisturbed run on one process, in float64, with dropout."""
    return kit.run_training(1, tmp_path_factory.mktemp("whole") / "run", *recipe(tiny, dtype="float64"))


def test_stopped_on_two_resumed_on_one_and_then_on_four_is_the_same_run(tiny, whole, tmp_path, monkeypatch):
    """Killed in the middle of the epoch (step 7), then in its exact tail (step 11), which four ranks begin with.

    Equal are the examples of every step and, within rounding, dropout masks (or the weights could not be), weights and
    every number of every line."""
    flags, folder = recipe(tiny, dtype="float64"), tmp_path / "run"
    killed_at(7, 2, folder, flags, monkeypatch)
    killed_at(11, 1, folder, flags, monkeypatch)
    run = kit.run_training(4, folder, *flags)
    assert "Resuming from step" in (tmp_path / "run.out" / "rank0.txt").read_text()
    assert "step_00000010" in (tmp_path / "run.out" / "rank0.txt").read_text()
    assert ledger.compare(folder, whole.folder) is None
    assert ledger.compare(folder) is None
    assert len(ledger.read(folder)[1]) == STEPS
    assert kit.distance(run.weights, whole.weights) <= 1e-10
    assert close(kit.timeless(folder), kit.timeless(whole.folder), 1e-9)


@pytest.mark.parametrize("at", [12, 23], ids=["the first epoch's end", "the second epoch's end"])
def test_stopped_at_the_end_of_an_epoch(tiny, whole, tmp_path, monkeypatch, at):
    """Saved after the exact tail (save_steps 11), and killed in the first step of the next epoch."""
    flags, folder = recipe(tiny, dtype="float64", save_steps=11), tmp_path / "run"
    killed_at(at, 4, folder, flags, monkeypatch)
    run = kit.run_training(2, folder, *flags)
    assert ledger.compare(folder, whole.folder) is None
    assert kit.distance(run.weights, whole.weights) <= 1e-10
    assert close(kit.timeless(folder), kit.timeless(whole.folder), 1e-9)


def test_mutant_dropout_seeded_by_rank_is_caught(tiny, whole, tmp_path, monkeypatch):
    original = step.seed_everything
    monkeypatch.setattr(step, "seed_everything", lambda seed: original(seed + int(os.environ["RANK"])))
    run = kit.run_training(2, tmp_path / "run", *recipe(tiny, dtype="float64"))
    assert kit.distance(run.weights, whole.weights) > 1e-6
    assert ledger.compare(run.folder, whole.folder) is None  # the examples were right: the masks alone show in it


def test_mutant_batches_replayed_from_the_start_are_caught(tiny, whole, tmp_path, monkeypatch):
    original = data_loader.training_order

    def replayed(config, rank, world, first, last):
        return original(config, rank, world, 0, last - first)

    flags, folder = recipe(tiny, dtype="float64"), tmp_path / "run"
    killed_at(7, 2, folder, flags, monkeypatch)
    monkeypatch.setattr(data_loader, "training_order", replayed)
    kit.run_training(1, folder, *flags)
    assert "step 7 differs" in ledger.compare(folder, whole.folder)


# ---- collators that draw -----------------------------------------------------------------------------------------------


def masking(monkeypatch, draw) -> None:
    """Let the collator replace random tokens: as masked language models are trained, and images augmented."""
    original = causal_lm.Task.collate

    def collate(self, rows):
        batch = original(self, rows)
        ids = batch.inputs["input_ids"]
        hidden = draw(ids)
        return batch._replace(inputs=batch.inputs | {"input_ids": torch.where(hidden, torch.zeros_like(ids), ids)})

    monkeypatch.setattr(causal_lm.Task, "collate", collate)


def three_ways(ids: torch.Tensor) -> torch.Tensor:
    """Draw from torch, numpy and random."""
    one, two = torch.rand(ids.shape) < 0.1, torch.from_numpy(np.random.random(ids.shape) < 0.1)
    return one | two | torch.tensor([[random.random() < 0.1] * ids.shape[1] for _ in ids])


@pytest.fixture(scope="module")
def masked(tiny, tmp_path_factory):
    """Undisturbed runs with a collator that draws, on one and two processes, read in the training process."""
    folder = tmp_path_factory.mktemp("masked")
    with pytest.MonkeyPatch.context() as patch:
        masking(patch, three_ways)
        return {world: kit.run_training(world, folder / f"{world}", *recipe(tiny)) for world in (1, 2)}


@pytest.mark.parametrize("world, workers", [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_a_collator_that_draws_is_bitwise_the_same_killed_and_resumed(
    tiny, masked, tmp_path, monkeypatch, world, workers
):
    masking(monkeypatch, three_ways)
    flags, folder = recipe(tiny, dataloader_num_workers=workers), tmp_path / "run"
    killed_at(10, world, folder, flags, monkeypatch)
    run = kit.run_training(world, folder, *flags)
    assert kit.same(run.weights, masked[world].weights)
    assert kit.timeless(folder) == kit.timeless(masked[world].folder)


def test_what_a_collator_draws_is_seen_in_the_weights(tiny, masked, tmp_path):
    assert not kit.same(kit.run_training(1, tmp_path / "run", *recipe(tiny)).weights, masked[1].weights)


def test_mutant_randomness_of_the_process_is_caught(tiny, masked, tmp_path, monkeypatch):
    """One generator for the whole process: after a restart it begins anew."""
    generator = np.random.default_rng(0)
    masking(monkeypatch, lambda ids: torch.from_numpy(generator.random(ids.shape) < 0.1))
    straight = kit.run_training(1, tmp_path / "straight", *recipe(tiny))
    killed_at(10, 1, tmp_path / "run", recipe(tiny), monkeypatch)
    assert not kit.same(kit.run_training(1, tmp_path / "run", *recipe(tiny)).weights, straight.weights)


# ---- lines that a cut goes through --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_train_lines_are_bitwise_the_same_where_logging_and_saving_do_not_meet(tiny, tmp_path, monkeypatch, world):
    """Saved at steps 5, 10, …, logged at 7, 14, …: the sums of a line that is under way are part of a checkpoint."""
    flags = recipe(tiny, logging_steps=7, save_steps=5)
    straight = kit.run_training(world, tmp_path / "straight", *flags)
    for at in (9, 14, 18):
        killed_at(at, world, tmp_path / "run", flags, monkeypatch)
    run = kit.run_training(world, tmp_path / "run", *flags)
    assert [line["step"] for line in run.kind("train")] == [7, 14, 21, 26]
    assert kit.timeless(run.folder) == kit.timeless(straight.folder)
    assert kit.same(run.weights, straight.weights)


def test_a_checkpoint_may_come_before_the_first_line_of_metrics(tiny, tmp_path):
    run = kit.run_training(1, tmp_path / "run", *recipe(tiny, logging_steps=10, eval_steps=10, max_failed_saves=1))
    assert "COULD NOT BE SAVED" not in (tmp_path / "run.out" / "rank0.txt").read_text()
    assert [line["step"] for line in run.kind("train")] == [10, 20, 26]


def test_mutant_forgetting_the_sums_of_a_line_under_way_is_caught(tiny, tmp_path, monkeypatch):
    from src.reporting.meter import Meter

    flags = recipe(tiny, logging_steps=7, save_steps=5)
    straight = kit.run_training(1, tmp_path / "straight", *flags)
    killed_at(13, 1, tmp_path / "run", flags, monkeypatch)
    monkeypatch.setattr(Meter, "resume", lambda self, state: None)
    run = kit.run_training(1, tmp_path / "run", *flags)
    assert kit.same(run.weights, straight.weights)  # a healthy run, with a line that says too little
    assert kit.timeless(run.folder) != kit.timeless(straight.folder)
