"""Micro-batches come in order for any number of loader processes; a failing process is reported with its rows."""

import os
import random
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from engine.config.run_config import RunConfig
from engine.find_tasks import Batch
from engine.plan import data_loader, seeding
from engine.plan.batch_plan import PlanConfig, training_order
from engine.rows.prepared_split import column_readers
from src.tasks import causal_lm
from tests.helpers import kit, plain_task


@pytest.fixture(scope="module")
def data(tiny, tmp_path_factory):
    """(task, split of 83 rows)"""
    task, splits = kit.open_data(**tiny, cache_dir=tmp_path_factory.mktemp("cache"))
    return task, splits["train"]


def plan(split, steps: int = 11) -> list:
    return list(training_order(PlanConfig(len(split), 8, 4, 1, split.lengths), 0, 1, 0, steps))


def read(task, split, order: Iterable, workers: int) -> Iterator:
    return data_loader.read_batches(split, task, iter(order), RunConfig(dataloader_num_workers=workers), False)


@pytest.mark.parametrize("weight, workers", [(-1.0, 0), (float("nan"), 3)])
def test_weight_that_is_no_count_is_refused_with_its_rows(data, tmp_path, monkeypatch, weight, workers):
    bad, original = plan(data[1])[9], causal_lm.Task.collate
    wanted = data[1].rows(bad.ids)[0]["input_ids"].tolist()

    def collate(self, rows, training):
        batch = original(self, rows, training)
        return batch._replace(weight=weight) if rows[0]["input_ids"].tolist() == wanted else batch

    monkeypatch.setattr(causal_lm.Task, "collate", collate)
    with pytest.raises(kit.RankFailed) as failed:
        kit.spawn(1, lambda: list(read(*data, plan(data[1]), workers)), out=tmp_path / "out")
    text = f"rows {bad.ids.tolist()} could not be collated (micro-batch {bad.index} of step {bad.step + 1})"
    assert text in failed.value.texts[0]
    assert f"weight {weight}" in failed.value.texts[0]


# ---- threads of a loader process -------------------------------------------------------------------------------------------


class Threads(torch.utils.data.Dataset):
    """Each item is the threads that its process uses."""

    def __getitem__(self, item) -> list[int]:
        return [torch.get_num_threads(), *(pool["num_threads"] for pool in threadpool_info())]


def threads() -> tuple[list, list]:
    """Return the threads that loader processes use, and those of their rank."""
    torch.set_num_threads(2)
    threadpool_limits(2)
    loader = data_loader.open_loader(Threads(), RunConfig(), 2, False, iter(range(4)))
    return list(loader), Threads()[0]


def test_loader_process_uses_one_thread(tmp_path):
    [(of_loaders, of_rank)] = kit.spawn(1, threads, out=tmp_path / "out")
    assert {count for counts in of_loaders for count in counts} == {1}
    assert of_rank[0] == max(of_rank) == 2  # the rank itself keeps what it had


# ---- the same batches ------------------------------------------------------------------------------------------------------


class Drawing(causal_lm.Task):
    """A task with a collator that draws from every random generator."""

    def collate(self, rows, training):
        drawn = [*torch.rand(2).tolist(), *np.random.rand(2), random.random()]
        ids = torch.from_numpy(np.concatenate([row["input_ids"] for row in rows]))
        return Batch({"ids": ids, "drawn": torch.tensor(drawn, dtype=torch.float64)}, len(rows), len(rows), len(rows))


def batches(split, workers, rank=0, world=1) -> dict:
    torch.manual_seed(os.getpid() + workers)  # what came before must not matter
    order = training_order(PlanConfig(len(split), 32, 4, 1, split.lengths), rank, world, 0, 5)
    found = read(Drawing(RunConfig(), causal_lm.Options()), split, order, workers)
    return {(m.step, m.index): [v.tolist() for v in batch.inputs.values()] for m, batch in found if not m.dummy}


def test_batches_and_random_draws_do_not_depend_on_workers_or_processes(data, monkeypatch):
    _, split = data
    here = batches(split, 0)
    assert len({str(drawn) for _, drawn in here.values()}) == len(here) > 30  # each micro-batch has its own
    for workers in (1, 3):
        assert list(batches(split, workers).items()) == list(here.items())  # in order
    assert batches(split, 0, 0, 2) | batches(split, 0, 1, 2) == here
    monkeypatch.setattr(seeding, "seed_everything", lambda seed: None)  # the mutant
    assert batches(split, 3) != batches(split, 0)


# ---- columns ---------------------------------------------------------------------------------------------------------------


COLUMNS = {
    "int64": pa.array([3, 2**40, 7], pa.int64()),
    "lists": pa.array([[1, 2, 3], [], [4]], pa.list_(pa.int32())),
    "large_lists": pa.array([[1, 2, 3], [], [4]], pa.large_list(pa.int64())),
    "fixed_lists": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2)),
    "nulls": pa.array([1, None, 3]),
    "null_lists": pa.array([[1], None, [2, 3]], pa.list_(pa.int32())),
    "nested": pa.array([[[1], [2, 3]], [], [[4]]]),
    "bytes": pa.array([b"\x00\xff", b"", b"x"]),
    "objects": pa.array([{"a": 1}, {"a": 2}, None]),
    "length": pa.array([1, 2, 3]),
}


@pytest.mark.parametrize("part", [slice(0, 3), slice(1, 3)], ids=["whole", "a slice"])
def test_column_values(part):
    batch = pa.record_batch(list(COLUMNS.values()), names=list(COLUMNS)).slice(part.start, part.stop - part.start)
    readers = dict(column_readers(batch))
    assert readers.keys() == COLUMNS.keys() - {"length"}  # a column for the plan, of no use to `collate`
    for name, read_value in readers.items():
        values = [read_value(i) for i in range(batch.num_rows)]
        values = [value.tolist() if isinstance(value, np.ndarray | np.generic) else value for value in values]
        if name == "null_lists":  # a null list is an empty one
            values = [value or None for value in values]
        if name == "bytes":  # views of the file
            values = [bytes(value) for value in values]
        assert values == batch[name].to_pylist(), name


class WithSchedule(plain_task.Task):
    """Its loss grows with the share of the run that is done."""

    def loss(self, model, inputs):
        sums = super().loss(model, inputs)
        if not model.training:
            return sums
        labels = (inputs["y"] >= 0).sum()
        return {"loss": sums["loss"] * (1 + self.progress), "progress": labels * self.progress}


def test_progress_of_a_run_is_that_of_its_step(tmp_path):
    """On one process, on two, and after a resume, bit by bit."""
    data = plain_task.write_data(tmp_path)
    with plain_task.registered(SimpleNamespace(Options=plain_task.Options, Task=WithSchedule), "scheduled"):
        flags = plain_task.flags(data, task="scheduled")
        one, two = (kit.run_training(world, tmp_path / str(world), *flags) for world in (1, 2))
        kit.rewind(one.folder, 8, tmp_path / "resumed")
        resumed = kit.run_training(1, tmp_path / "resumed", *flags)
    steps = np.arange(24)
    assert [line["progress"] for line in one.kind("train")] == pytest.approx(steps / 24, rel=1e-6)
    assert kit.distance(one.weights, two.weights) <= 1e-10
    assert kit.same(resumed.weights, one.weights)
