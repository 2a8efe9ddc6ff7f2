"""Micro-batches come in order for any number of loader processes; a failing process is reported with its rows."""

import json
import pickle
import traceback
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from src.config.schema import RunConfig
from src.data import data_loader
from src.data.batch_plan import PlanConfig, training_order
from src.data.prepared_split import column_readers
from src.tasks import causal_lm
from tests.helpers import kit


@pytest.fixture(scope="module")
def data(tiny, tmp_path_factory):
    """(task, split of 83 rows)"""
    task, splits = kit.open_data(**tiny, cache_dir=tmp_path_factory.mktemp("cache"))
    return task, splits["train"]


def plan(split, steps: int = 11, micro: int = 4) -> list:
    return list(training_order(PlanConfig(len(split), 8, micro, 1, split.lengths), 0, 1, 0, steps))


def before_collate(monkeypatch, action) -> None:
    """Call `action(rows)` before each micro-batch is collated."""
    original = causal_lm.Task.collate

    def collate(self, rows, training):
        action(rows)
        return original(self, rows, training)

    monkeypatch.setattr(causal_lm.Task, "collate", collate)


def contents(split, ids) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in split.rows(np.array(ids))]


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weight_that_is_no_count_is_refused(tiny, monkeypatch, weight):
    original = causal_lm.Task.collate
    monkeypatch.setattr(causal_lm.Task, "collate", lambda self, *args: original(self, *args)._replace(weight=weight))
    task, splits = kit.open_data(**tiny)
    micro = data_loader.MicroBatch(np.array([0, 1]), seed=1)
    with pytest.raises(ValueError, match=f"weight {weight}"):
        data_loader.collate(task, micro, splits["train"].rows(micro.ids))


# ---- errors in the collator ----------------------------------------------------------------------------------------------


def collator_error(data, folder: Path, monkeypatch, workers: int, at: int = 9) -> tuple[str, list]:
    """Return (the output with the traceback, the micro-batch that failed) of a failing collator."""
    task, split = data
    bad = plan(split)[at]
    wanted = contents(split, bad.ids)

    def fail(rows):
        if [row["input_ids"].tolist() for row in rows] == wanted:
            raise ValueError("a cosmic ray")

    def reading():
        seen = []
        with pytest.raises(ValueError, match="a cosmic ray") as error:
            for micro, _ in data_loader.read_batches(
                split, task, iter(plan(split)), RunConfig(dataloader_num_workers=workers), False
            ):
                seen.append((micro.step, micro.index))
        traceback.print_exception(error.value)
        return seen

    before_collate(monkeypatch, fail)
    [seen] = kit.spawn(1, reading, out=folder / "out")
    assert seen == [(micro.step, micro.index) for micro in plan(split)[:at]]  # all before it have come
    return (folder / "out" / "rank0.txt").read_text(), bad


@pytest.mark.parametrize("workers", [0, 3])
def test_error_in_the_collator_names_its_rows(data, tmp_path, monkeypatch, workers):
    text, bad = collator_error(data, tmp_path, monkeypatch, workers)
    assert f"micro-batch {bad.index} of step {bad.step + 1}" in text
    assert f"rows {bad.ids.tolist()} " in text


# ---- threads of a loader process -------------------------------------------------------------------------------------------


def threads(fields, folder: Path) -> list[int]:
    """Write the threads that a loader process uses to `folder`; return those of its rank."""
    from threadpoolctl import threadpool_info, threadpool_limits

    def used() -> list[int]:
        return [torch.get_num_threads(), *(pool["num_threads"] for pool in threadpool_info())]

    torch.set_num_threads(2)
    threadpool_limits(2)
    task, splits = kit.open_data(**fields)
    original = causal_lm.Task.collate

    def collate(self, rows, training):
        (folder / f"worker{torch.utils.data.get_worker_info().id}.json").write_text(json.dumps(used()))
        return original(self, rows, training)

    causal_lm.Task.collate = collate
    order = iter(plan(splits["train"]))
    list(data_loader.read_batches(splits["train"], task, order, RunConfig(dataloader_num_workers=2), False))
    return used()


def test_loader_process_uses_one_thread(tiny, tmp_path):
    [of_rank] = kit.spawn(1, threads, tiny | {"cache_dir": tmp_path / "cache"}, tmp_path, out=tmp_path / "out")
    for number in range(2):
        assert {*json.loads((tmp_path / f"worker{number}.json").read_text())} == {1}
    assert of_rank[0] == max(of_rank) == 2  # the rank itself keeps what it had


# ---- the same batches ------------------------------------------------------------------------------------------------------


def batches(data, workers: int) -> list:
    task, split = data
    got = data_loader.read_batches(split, task, iter(plan(split, 23)), RunConfig(dataloader_num_workers=workers), False)
    return [
        (m.step, m.index, m.ids.tolist(), m.seed, m.last, {k: v.tolist() for k, v in b.inputs.items()}, *b[1:])
        for m, b in got
    ]


def test_batches_do_not_depend_on_workers(data):
    one = batches(data, 0)
    assert len(one) > 40
    assert batches(data, 1) == one
    assert batches(data, 3) == one


def test_pickled_split_reads_the_same_rows(data):
    """A loader process gets it so where processes are spawned."""
    _, split = data
    ids = np.arange(len(split))[::-1]
    split.rows(ids)  # files are open
    text = pickle.dumps(split)
    assert len(text) < 4000  # names, no rows
    other = pickle.loads(text)
    assert contents(other, ids) == contents(split, ids)
    assert other.lengths.tolist() == split.lengths.tolist()
    assert [sorted(row) for row in other.rows(ids[:3])] == [sorted(row) for row in split.rows(ids[:3])]


# ---- columns ---------------------------------------------------------------------------------------------------------------


COLUMNS = {
    "int32": pa.array([3, -1, 7], pa.int32()),
    "int64": pa.array([3, 2**40, 7], pa.int64()),
    "float64": pa.array([0.5, -1.25, 3e300], pa.float64()),
    "lists": pa.array([[1, 2, 3], [], [4]], pa.list_(pa.int32())),
    "large_lists": pa.array([[1, 2, 3], [], [4]], pa.large_list(pa.int64())),
    "fixed_lists": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2)),
    "floats": pa.array([[0.5], [1.5, 2.5], []], pa.list_(pa.float32())),
    "strings": pa.array(["für", "", "漢字"]),
    "nulls": pa.array([1, None, 3]),
    "null_lists": pa.array([[1], None, [2, 3]], pa.list_(pa.int32())),
    "nested": pa.array([[[1], [2, 3]], [], [[4]]]),
    "bytes": pa.array([b"\x00\xff", b"", b"x"]),
    "bools": pa.array([True, False, True]),
    "objects": pa.array([{"a": 1}, {"a": 2}, None]),
    "length": pa.array([1, 2, 3]),
}


def taken(batch: pa.RecordBatch) -> dict[str, list]:
    return {name: [take(i) for i in range(batch.num_rows)] for name, take in column_readers(batch)}


def plain(value):
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


@pytest.mark.parametrize("part", [slice(0, 3), slice(1, 3)], ids=["whole", "a slice"])
def test_column_values(part):
    batch = pa.record_batch(list(COLUMNS.values()), names=list(COLUMNS)).slice(part.start, part.stop - part.start)
    got = taken(batch)
    assert got.keys() == COLUMNS.keys() - {"length"}  # a column for the plan, of no use to `collate`
    for name, values in got.items():
        values = [plain(value) for value in values]
        if name == "null_lists":  # a null list is an empty one
            values = [value or None for value in values]
        if name == "bytes":  # views of the file
            values = [bytes(value) for value in values]
        assert values == batch[name].to_pylist(), name


def test_numbers_and_lists_are_not_copied(data):
    _, split = data
    one, again = (split.rows(np.array([5]))[0]["input_ids"] for _ in range(2))
    assert np.shares_memory(one, again)  # the same memory of the file
    assert not one.flags.writeable  # nothing can write to it by mistake
