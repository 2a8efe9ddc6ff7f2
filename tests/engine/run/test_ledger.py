"""ledger.jsonl: the examples of every step are those of the plan, on any number of processes."""

import json

import numpy as np
import pytest

from engine.plan import batch_plan, data_loader
from engine.run.ledger import hash_text
from tests.helpers import kit

STEPS = 36  # step 32 is the tail of the first epoch, with 11 examples


def recipe(files, **fields) -> list[str]:
    values = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "max_length": 16}
    values |= {"per_device_batch_size": 8, "max_steps": STEPS, "logging_steps": 5, "save_steps": 10}
    return kit.flags(**values | fields)


@pytest.fixture(scope="module")
def one(files, tmp_path_factory):
    """Return the folder of a run on one process."""
    return kit.run_training(1, tmp_path_factory.mktemp("ledger") / "one", *recipe(files)).folder


def test_hash_depends_on_every_id_but_not_on_order_or_split():
    ids = np.random.default_rng(0).permutation(10_000)[:500]
    parts = [batch_plan.hash_ids(part) for part in np.array_split(ids[::-1], 7)]
    assert tuple(map(sum, zip(*parts, strict=True))) == batch_plan.hash_ids(ids)
    changed = [ids, *(np.delete(ids, i) for i in range(500)), *(np.append(ids[1:], i) for i in ids[1:])]
    assert len({hash_text(*batch_plan.hash_ids(other)) for other in changed}) == len(changed)
    # The mutant, a sum of ids, would not see these.
    assert batch_plan.hash_ids(np.array([1, 4])) != batch_plan.hash_ids(np.array([2, 3]))


def test_ledger_has_a_line_per_step(one):
    first, *rest = map(json.loads, kit.ledger_text(one).splitlines())
    plan = {"examples": 1003, "global_batch_size": 32, "seed": 42}
    assert first == {"step": 0, "after": 0, "data": first["data"], "plan": plan}
    assert len(first["data"]) == 32  # the hash of the prepared rows
    assert [line["step"] for line in rest] == list(range(1, STEPS + 1))
    assert [line["examples"] for line in rest] == [32] * 31 + [11] + [32] * 4
    assert len({line["ids"] for line in rest}) == STEPS
    assert kit.first_other_step(one) is None  # every step is that of the plan


@pytest.mark.parametrize("world, micro_batch", [(2, 32), (3, 3)])
def test_ledger_does_not_depend_on_processes_or_micro_batches(files, one, tmp_path, world, micro_batch):
    run = kit.run_training(world, tmp_path / "run", *recipe(files, per_device_batch_size=micro_batch))
    assert kit.ledger_text(run.folder) == kit.ledger_text(one)


def rank_0_everywhere(config, rank, *rest, order=data_loader.training_order):
    """Every rank reads the data of rank 0, as without a distributed sampler."""
    return order(config, 0, *rest)


def test_mutant_of_the_order_is_caught(files, one, tmp_path, monkeypatch):
    monkeypatch.setattr(data_loader, "training_order", rank_0_everywhere)
    run = kit.run_training(2, tmp_path / "run", *recipe(files, max_steps=2))
    assert kit.first_other_step(run.folder) == kit.first_other_step(one, run.folder) == 1
