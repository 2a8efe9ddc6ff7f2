"""SIGKILL at random moments, uploads among them, and the folder of the run removed from the machine each time."""

import os

import pytest

from tests.addons.stores import killing
from tests.engine.checkpointing import recipe

FIELDS = {"max_steps": 60, "eval_steps": 25, "save_steps": 4, "save_total_limit": 2}


def test_killed_run_resumes_from_its_newest_whole_checkpoint(address, tiny, tmp_path):
    flags = recipe.flags(tiny, cache_dir=tmp_path / "cache", **FIELDS)
    found = killing.storm(flags, tmp_path / "cache", tmp_path, address, 6)
    assert found["wrong"] == []
    assert found["kills"] == 6


@pytest.mark.skipif("KILLS" not in os.environ, reason="KILLS is not set: half an hour for KILLS=100")
def test_as_many_kills_as_asked(address, tiny, tmp_path):
    flags = recipe.flags(tiny, cache_dir=tmp_path / "cache", **FIELDS)
    found = killing.storm(flags, tmp_path / "cache", tmp_path, address, int(os.environ["KILLS"]), seed=1)
    print({name: value for name, value in found.items() if name != "wrong"})
    assert found["wrong"] == []
