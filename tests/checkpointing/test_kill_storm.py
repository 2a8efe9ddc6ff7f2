"""A short storm: SIGKILL for the whole job at random moments, and nothing to be seen of it afterwards."""

import pytest

from src.data import data_loader
from tests.helpers import kit
from tests.helpers.kill_storm import storm


def recipe(files):
    values = {
        "model_config": files / "gpt2.yaml",  # with dropout
        "train_file": files / "train.jsonl",
        "validation_file": files / "validation.jsonl",
        "per_device_batch_size": 8,
        "max_steps": 60,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "eval_steps": 25,
        "save_steps": 2,
    }
    return kit.flags(**values)


@pytest.mark.parametrize("world, kills", [(1, 6), (2, 8)])
def test_a_storm_leaves_no_trace(files, tmp_path, world, kills):
    found = storm(recipe(files), tmp_path, world, kills, minutes=3)
    assert found["differences"] == []
    assert found["kills"] >= kills // 2  # the others came when the run was complete


def test_mutant_that_replays_the_order_is_seen_by_the_storm(files, tmp_path, monkeypatch):
    """The order from its beginning after each start, as with accelerate's load_state; the ledger names the step."""

    def replayed(config, rank, world, start, stop, original=data_loader.training_order):
        return original(config, rank, world, 0, stop - start)

    monkeypatch.setattr(data_loader, "training_order", replayed)
    found = storm(recipe(files), tmp_path, 1, 3, minutes=3, seed=3)
    assert any("final weights differ" in text for text in found["differences"])
    assert any("hash" in text for text in found["differences"])
