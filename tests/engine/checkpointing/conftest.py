"""What the tests of checkpoints share: undisturbed runs of the tiny model, and a run that was interrupted."""

import pytest

from tests.engine.checkpointing import recipe
from tests.helpers import kit


@pytest.fixture(scope="session")
def straight(tiny, tmp_path_factory) -> dict[int, kit.Run]:
    """Undisturbed runs by number of processes, with checkpoints of steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("straight")
    return {world: kit.run_training(world, folder / f"{world}", *recipe.flags(tiny)) for world in (1, 2)}


@pytest.fixture
def interrupted(straight, tmp_path):
    """Return a function: a copy of the run on so many processes as if killed after step 8, to be resumed or damaged."""

    return lambda world=1: kit.rewind(straight[world].folder, 8, tmp_path / "run")
