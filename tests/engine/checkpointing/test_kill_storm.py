"""A short storm: SIGKILL for the whole job at random moments leaves no trace in the results."""

import pytest

from engine.plan import data_loader
from tests.engine.checkpointing import recipe
from tests.helpers.kill_storm import storm


def flags(tiny) -> list[str]:
    return recipe.flags(tiny, max_steps=60, eval_steps=25, save_steps=2)


@pytest.mark.parametrize("world, kills", [(1, 6), (2, 8)])
def test_storm_leaves_no_trace(tiny, tmp_path, world, kills):
    found = storm(flags(tiny), tmp_path, world, kills, minutes=10)
    assert found["differences"] == []
    assert found["kills"] == kills


def test_mutant_that_replays_the_order_is_caught(tiny, tmp_path, monkeypatch):
    """The order from its beginning after each start, as with accelerate's load_state; the ledger names the step."""

    def replayed(config, rank, world, start, stop, original=data_loader.training_order):
        return original(config, rank, world, 0, stop - start)

    monkeypatch.setattr(data_loader, "training_order", replayed)
    found = storm(flags(tiny), tmp_path, 1, 3, minutes=10, seed=3)
    assert any("final weights differ" in text for text in found["differences"])
    assert any("examples of step" in text for text in found["differences"])
