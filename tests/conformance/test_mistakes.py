"""Mistakes of a fork that no run shows are named: unseeded generators, new seeds, means, host reads in the loop."""

import types

import numpy as np
import pytest

from src.config.errors import Failure
from src.training.task_checks import check_collate, check_loss
from tests.conformance import checks, mutants
from tests.conformance.test_task import open_task
from tests.helpers import plain_task

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return plain_task.write_data(tmp_path_factory.mktemp("mistakes"))


def check(data, kind: type, **fields) -> None:
    """Run the checks of the suite on a task of this class."""
    module = types.SimpleNamespace(Options=plain_task.Options, Task=kind)
    with plain_task.registered(module, "fork"):
        task, splits, model = open_task(plain_task.flags(data, task="fork", **fields))
        rows = splits["train"].rows(np.arange(checks.ROWS))
        for training in (True, False):
            check_collate(task, rows, training)
            check_loss(task, model, rows, training, checks.TOLERANCE, checks.ROUNDING)


@pytest.mark.parametrize("norm", [False, True])
def test_sound_task_passes(data, norm):
    """With augmentation and dropout, and with batch norm."""
    check(data, mutants.Task, norm=norm)


@pytest.mark.parametrize("kind", mutants.UNSEEDED, ids=lambda kind: kind.__name__)
def test_mutant_unseeded_generator_is_named(data, kind):
    with pytest.raises(Failure, match=r"task fork \(tests/conformance/mutants.py\): `(collate|loss)` .*without a seed"):
        check(data, kind)


@pytest.mark.parametrize("kind", mutants.RESEEDING, ids=lambda kind: kind.__name__)
def test_mutant_new_seed_is_named(data, kind):
    with pytest.raises(Failure, match=f"task fork .*{mutants.RESEEDING[kind]}"):
        check(data, kind)


@pytest.mark.parametrize("kind", mutants.MEANS, ids=lambda kind: kind.__name__)
def test_mutant_mean_is_named(data, kind):
    with pytest.raises(Failure, match=f"task fork .*{mutants.MEANS[kind]}"):
        check(data, kind)
