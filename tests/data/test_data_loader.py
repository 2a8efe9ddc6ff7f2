"""Micro-batches come in order for any number of loader processes; a failing process is reported with its rows."""

import json
import os
import pickle
import signal
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


def once(folder: Path) -> bool:
    """Return True in the first process that calls it."""
    try:
        os.close(os.open(folder / "failed", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def worker() -> int | None:
    info = torch.utils.data.get_worker_info()
    return None if info is None else info.id


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


def test_all_ranks_end_when_a_loader_process_dies(tiny, tmp_path, monkeypatch):
    def fail(rows):
        if worker() is not None and os.environ["RANK"] == "1" and once(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)

    before_collate(monkeypatch, fail)
    fields = {"dataloader_num_workers": 2, "global_batch_size": 8, "per_device_batch_size": 2, "max_steps": 40}
    fields |= {"output_dir": "run", "cache_dir": tmp_path / "cache"}
    codes, texts = kit.run_command("train.py", *kit.flags(**tiny | fields), folder=tmp_path / "here", world=2)
    assert codes == [1, 1], texts
    assert "killed by signal: Killed" in texts[1]  # the error of torch


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


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_error_in_the_collator_names_its_rows(data, tmp_path, monkeypatch, workers):
    text, bad = collator_error(data, tmp_path, monkeypatch, workers)
    assert f"micro-batch {bad.index} of step {bad.step + 1}" in text
    assert f"rows {bad.ids.tolist()} " in text


# ---- threads of a loader process -------------------------------------------------------------------------------------------


def threads(data_of, folder: Path) -> tuple[int, list[int]]:
    """Record the threads of loader processes of a rank that has several; return those of the rank."""
    from threadpoolctl import threadpool_info, threadpool_limits

    torch.set_num_threads(2)
    threadpool_limits(2)
    for name in ("OMP_NUM_THREADS", "OPENCV_FOR_THREADS_NUM"):
        os.environ.pop(name, None)
    task, splits = kit.open_data(**data_of)
    original = causal_lm.Task.collate

    def collate(self, rows, training):
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")
        limits = {name: os.environ.get(name) for name in names}
        pools = [[pool["user_api"], pool["num_threads"]] for pool in threadpool_info()]
        limits |= {"torch": torch.get_num_threads(), "pools": pools}
        (folder / f"worker{worker()}.json").write_text(json.dumps(limits))
        return original(self, rows, training)

    causal_lm.Task.collate = collate
    order = plan(splits["train"])
    list(data_loader.read_batches(splits["train"], task, iter(order), RunConfig(dataloader_num_workers=2), False))
    return torch.get_num_threads(), [pool["num_threads"] for pool in threadpool_info()]


def single(folder: Path) -> list[bool]:
    """Return, for each loader process, whether it uses one thread."""
    limits = [json.loads(path.read_text()) for path in sorted(folder.glob("worker*.json"))]
    assert len(limits) == 2
    assert all({kind for kind, _ in one["pools"]} >= {"openmp"} for one in limits)
    return [
        one["torch"] == 1
        and all(count == 1 for _, count in one["pools"])
        and all(value == "1" for name, value in one.items() if name.isupper())
        for one in limits
    ]


def test_loader_process_uses_one_thread(tiny, tmp_path):
    fields = tiny | {"cache_dir": tmp_path / "cache"}
    [(own, pools)] = kit.spawn(1, threads, fields, tmp_path, out=tmp_path / "out")
    assert single(tmp_path) == [True, True]
    assert own == 2  # and the rank itself keeps what it had
    assert max(pools) == 2


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


def test_mutant_that_yields_batches_as_they_are_ready(data, monkeypatch):
    """Batches of workers in another order than that of the plan."""
    original, in_order = data_loader.read_batches, batches(data, 0)

    def as_they_come(*arguments):
        items = list(original(*arguments))
        return iter(items[1::2] + items[::2])

    monkeypatch.setattr(data_loader, "read_batches", as_they_come)
    assert batches(data, 2) != in_order


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
LISTS = {"lists", "large_lists", "fixed_lists", "floats"}
ZERO_COPY = {"int32", "int64", "float64"} | LISTS


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


def _copies(batch: pa.RecordBatch) -> list[str]:
    """Return the columns of numbers and lists with copied values."""
    found = []
    for name, values in taken(batch).items():
        column = batch[name]
        if name not in ZERO_COPY:
            continue
        if name in LISTS:
            whole = column.values.to_numpy(zero_copy_only=True)
            shared = all(np.shares_memory(value, whole) for value in values if len(value))
        else:
            buffer = np.frombuffer(column.buffers()[1], np.uint8)
            shared = np.shares_memory(dict(column_readers(batch))[name].__self__, buffer)
        if not shared:
            found.append(name)
    return found


def test_numbers_and_lists_are_not_copied(data, tmp_path):
    batch = pa.record_batch(list(COLUMNS.values()), names=list(COLUMNS))
    assert _copies(batch) == []
    with pa.ipc.new_stream(tmp_path / "rows.arrow", batch.schema) as out:
        out.write_batch(batch)
    [mapped] = pa.ipc.open_stream(pa.memory_map(str(tmp_path / "rows.arrow"))).read_all().to_batches()
    assert _copies(mapped) == []
    _, split = data
    one, again = (split.rows(np.array([5]))[0]["input_ids"] for _ in range(2))
    assert np.shares_memory(one, again)  # the same memory of the file
    assert not one.flags.writeable  # nothing can write to it by mistake


def test_mutant_that_copies_columns(monkeypatch):
    from src.data import prepared_split

    def copying(column):
        if column.type in (pa.int32(), pa.int64(), pa.float64()):
            return column.to_numpy(zero_copy_only=False).copy().__getitem__
        return lambda i: np.array(column[i].as_py(), dtype=object)

    monkeypatch.setattr(prepared_split, "_reader", copying)
    batch = pa.record_batch(list(COLUMNS.values()), names=list(COLUMNS))
    assert set(_copies(batch)) == ZERO_COPY
