"""Mistakes of a fork that no run shows are named: unseeded generators, new seeds, means, host reads in the loop."""

import types

import numpy as np
import pytest

from engine.config.errors import Failure
from tests.conformance import checks, mutants
from tests.conformance.host_reads import host_reads
from tests.conformance.smoke_checks import check_collate, check_loss, check_weight
from tests.conformance.test_task import open_task
from tests.helpers import kit, plain_task

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
        check_weight(task, splits["train"])
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


@pytest.mark.parametrize("kind", mutants.STATE | mutants.WEIGHTS, ids=lambda kind: kind.__name__)
def test_mutant_state_or_weight_is_named(data, kind):
    with pytest.raises(Failure, match=f"task fork .*{(mutants.STATE | mutants.WEIGHTS)[kind]}"):
        check(data, kind)


# ---- a host that waits for the device in each step -------------------------------------------------------------------


def test_no_step_reads_a_tensor(data, tmp_path):
    """Two steps of train.py between two log lines."""
    with plain_task.registered():
        reads = host_reads(kit.REPOSITORY / "train.py", tmp_path / "run", *plain_task.flags(data))
    assert not reads, (
        f"the host reads a tensor in each step, so on a GPU it waits there: {'; '.join(reads)}: compute on the device, "
        "or read at a log line (docs/forking.md, A new number in the log)"
    )


READS = {
    "print(losses.losses.sum().item())": "item",
    "if norm > 1: print('a large norm')": "__bool__",
    "print(f'{norm:.3f}')": "item",
    "history = losses.losses.to('cpu')": "to",
    "history = losses.losses[losses.losses > 0]": "tensor[mask]",
    "history = [float(norm), norm.tolist()]": "__float__",
}


def test_mutant_loop_that_reads_is_named(data, tmp_path):
    """By file, line and method: all of them in one train.py, one below the other."""
    source = (kit.REPOSITORY / "train.py").read_text()
    before, place, after = source.partition("state.add_update(norm, skipped, batch, losses)\n")
    assert place, "train.py has no line `state.add_update(…)` any more: let this test add its mutants elsewhere"
    indent = " " * (len(before) - len(before.rstrip(" ")))
    (tmp_path / "train.py").write_text(before + place + "".join(f"{indent}{line}\n" for line in READS) + after)
    first = before.count("\n") + 2
    with plain_task.registered():
        reads = host_reads(tmp_path / "train.py", tmp_path / "run", *plain_task.flags(data))
    lines = enumerate(READS.values(), start=first)
    expected = [f"train.py:{line} (train): {'' if '[' in name else 'Tensor.'}{name}" for line, name in lines]
    assert sorted(reads) == sorted(expected)
