"""Data without a length: every row once a pass, the same steps on any number of processes, and from where a run was."""

import json
from itertools import chain, pairwise

import datasets
import numpy as np
import pytest

from addons.streaming.shards import BLOCK
from engine.config import parsing, validation
from engine.config.errors import UsageError
from engine.distributed.backends import Backend
from engine.distributed.host_group import HostGroup
from engine.distributed.init_accelerator import init_accelerator
from engine.find_tasks import OPTIONS, make_task
from engine.plan import dataset
from engine.plan.data_loader import train_batches
from engine.run.train_state import TrainState
from tests.conformance.recipes import BERT
from tests.helpers import kit, technique_runs

ledger = pytest.importorskip("addons.tools.ledger", reason="this fork has no addons/tools/ledger.py")


def shards(folder, sizes) -> list:
    """Write files of rows, each row known by its first id and number; return their paths."""
    generator = np.random.default_rng(0)
    files, number = [], 0
    folder.mkdir(parents=True, exist_ok=True)
    for shard, size in enumerate(sizes):
        rows = []
        for _ in range(size):
            length = int(generator.integers(3, 12))
            rows.append({"input_ids": [number // 50 % 50, number % 50, *generator.integers(0, 50, length).tolist()]})
            number += 1
        files.append(kit.write_jsonl(folder / f"shard{shard}.jsonl", rows))
    return files


def recipe(folder, files, **fields) -> list[str]:
    model = folder / "gpt2.yaml"
    if not model.exists():
        kit.write_yaml(model, kit.TINY)
    fields = {
        "model_config": model,
        "train_file": files,
        "streaming": True,
        "dtype": "float64",
        "global_batch_size": 8,
        "per_device_batch_size": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "cache_dir": folder / "cache",
    } | fields
    return kit.flags(**fields)


def seen_rows(argv, steps: int, start=None, workers: int = 0) -> tuple:
    """Return (row numbers of each step on this rank, steps at which passes ended, the stream's position), without a model."""
    run, options = parsing.parse([*argv, "--max_steps", str(steps), "--dataloader_num_workers", str(workers)], OPTIONS)
    validation.check(run, options)
    task = make_task(run, options)
    stream = dataset.prepare_datasets(run, task, wanted=("train",))["train"]
    accelerator = init_accelerator(run)
    host_group = HostGroup(accelerator, run.ddp_timeout)
    progress = TrainState(step=start[0] if start else 0, stream=start[1] if start else None)
    found, turns = [], []
    backend = Backend(accelerator, run)
    batches = train_batches(run, backend, task, stream, progress, steps)
    epoch = progress.stream["epoch"] if progress.stream else 0
    while progress.step < steps:
        batch, _ = next(batches)
        rows = [
            int(a) * 50 + int(b)
            for micro, collated in batch
            if not micro.dummy
            for a, b in collated.inputs["input_ids"][:, :2].tolist()
        ]
        assert all(micro.last == (i == len(batch) - 1) for i, (micro, _) in enumerate(batch))
        assert host_group.sum([len(rows)])[0]  # no step is without rows on all ranks
        if stream.epoch != epoch:
            epoch = stream.epoch
            turns.append(progress.step)
        progress.step += 1
        found.append(rows)
    place = stream.position(progress.step, host_group)
    return found, turns, (progress.step, place)


def read(world: int, argv, steps: int, out, start=None, workers: int = 0):
    """Return (rows of each step over all ranks, sorted; steps at which passes ended; the stream's position)."""
    argv = [str(word) for word in argv]
    ranks = kit.spawn(world, seen_rows, argv, steps, start, workers, out=out)
    assert len({json.dumps([turns, place]) for _, turns, place in ranks}) == 1  # all ranks agree
    merged = [sorted(chain(*parts)) for parts in zip(*(rank[0] for rank in ranks), strict=True)]
    return merged, ranks[0][1], ranks[0][2]


CASES = [([20, 7, 3], 2), ([9, 9, 2, 6, 4], 3), ([10, 10, 10], 4), ([1, 29], 2), ([30], 2)]


@pytest.mark.parametrize("sizes, world", CASES)
def test_every_row_once_a_pass(tmp_path, sizes, world):
    argv = recipe(tmp_path, shards(tmp_path / "data", sizes), stream_lanes=min(len(sizes), 3))
    steps, turns, _ = read(world, argv, 22, tmp_path / "out")
    ends = [0, *turns]
    assert len(ends) > 2  # more than one pass was seen
    passes = [list(chain(*steps[a:b])) for a, b in pairwise(ends)]
    assert [sorted(rows) for rows in passes] == [list(range(sum(sizes)))] * len(passes)
    alone, turns_alone, _ = read(1, argv, 22, tmp_path / "alone")
    assert (steps, turns) == (alone, turns_alone)  # the same steps on one process
    assert steps[0] != steps[turns[0]] or sum(sizes) <= 8  # and other ones in the next pass


def test_mutant_plain_split_by_node_loses_rows(tmp_path):
    """Ranks of an even split end at different steps: a hang, or dropped rows."""
    from datasets.distributed import split_dataset_by_node

    files = [str(file) for file in shards(tmp_path / "data", [20, 7, 3])]
    whole = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    counts = [sum(1 for _ in split_dataset_by_node(whole.shard(2, rank), 0, 1)) for rank in range(2)]
    assert counts[0] != counts[1]  # ranks that run dry at different steps: a hang, or rows left over
    assert 2 * min(counts) < 30


@pytest.mark.parametrize("stop, world, other", [(1, 2, 2), (5, 2, 3), (9, 3, 1), (11, 1, 2)])
def test_resumed_stream_continues_at_the_next_row(tmp_path, stop, world, other):
    argv = recipe(tmp_path, shards(tmp_path / "data", [9, 9, 2, 6, 4]), stream_lanes=3)
    straight, turns, end = read(1, argv, 20, tmp_path / "straight")
    before, early, place = read(world, argv, stop, tmp_path / "before")
    after, late, last = read(other, argv, 20, tmp_path / "after", start=place)
    assert before + after == straight
    assert [step for step in early if step < stop] + late == [
        step for step in turns if step not in early or step < stop
    ]
    assert last == end


def test_loader_process_reads_the_same_stream(tmp_path):
    argv = recipe(tmp_path, shards(tmp_path / "data", [20, 7, 3]), stream_lanes=3)
    assert read(2, argv, 12, tmp_path / "a", workers=2) == read(2, argv, 12, tmp_path / "b")


def test_rows_of_many_blocks_are_shuffled_and_complete(tmp_path):
    size = 2 * BLOCK + 37
    argv = recipe(tmp_path, shards(tmp_path / "data", [size, 11]), global_batch_size=64, per_device_batch_size=64)
    steps, turns, _ = read(1, argv, 40, tmp_path / "out")
    numbers = [n % 2500 for n in range(size + 11)]
    assert sorted(chain(*steps[: turns[0]])) == sorted(numbers)
    assert max(steps[0]) - min(steps[0]) > 200  # not the first 64 rows of the file
    middle = read(1, argv, 7, tmp_path / "middle")
    rest = read(1, argv, 40, tmp_path / "rest", start=middle[2])
    assert middle[0] + rest[0] == steps


# ---- whole runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    files = shards(folder / "data", [20, 7, 3, 12, 8])
    validation = shards(folder / "validation", [9])
    argv = recipe(folder, files, validation_file=validation, stream_lanes=4, max_steps=18, save_steps=6, eval_steps=9)
    return folder, argv, kit.run_training(1, folder / "one", *argv)


def test_numbers_do_not_depend_on_processes(data, tmp_path):
    _, argv, one = data
    for world in (2, 3):
        run = kit.run_training(world, tmp_path / f"{world}", *argv)
        assert kit.distance(one.weights, run.weights) <= (1e-10 if world == 2 else 1e-6)  # DDP divides by 3 in float32
        assert ledger.compare(one.folder, run.folder) is None
        assert [line["epoch"] for line in run.kind("train")] == [line["epoch"] for line in one.kind("train")]
    assert one.kind("train")[-1]["epoch"] >= 1
    assert one.kind("eval")[-1]["examples"] == 9


@pytest.mark.parametrize("world", [1, 2])
def test_killed_stream_run_resumes(data, tmp_path, world):
    _, argv, one = data
    ranks = kit.Ranks("train.py", *argv, "--output_dir", "run", folder=tmp_path, world=world)
    kit.until(lambda: kit.last_step(tmp_path / "run") >= 7)
    ranks.signal(9)
    ranks.wait()
    run = kit.run_training(1, tmp_path / "run", *argv)
    assert kit.distance(one.weights, run.weights) <= (0 if world == 1 else 1e-10)
    assert ledger.compare(one.folder, run.folder) is None
    with pytest.raises(UsageError, match=r"a stream has no .*plan"):
        ledger.compare(run.folder)


def test_mutant_without_stream_position(data, tmp_path, monkeypatch):
    from addons.streaming.stream import Stream

    _, argv, one = data
    step_batches = Stream.step_batches

    def forget(self, backend, state, pin_memory):
        state.stream = None
        return step_batches(self, backend, state, pin_memory)

    monkeypatch.setattr(Stream, "step_batches", forget)
    run = kit.run_training(1, kit.rewind(one.folder, 12, tmp_path / "run"), *argv)
    assert kit.distance(one.weights, run.weights) > 1e-6


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"max_steps": None}, "max_steps"),
        ({"stream_lanes": 9}, "stream_lanes is 9"),
        ({"stream_lanes": 2}, r"stream_lanes is 2, but there are 1 shards \(files\): give at most 1"),
    ],
)
def test_fields_that_a_stream_cannot_have(tmp_path, fields, field):
    with pytest.raises(UsageError, match=field):
        opened(tmp_path, shards(tmp_path / "data", [5]), **fields)


def opened(folder, files, **fields):
    """Return a stream, opened in this process."""
    values = {"model_config": kit.write_yaml(folder / "gpt2.yaml", kit.TINY), "cache_dir": folder / "cache"}
    values |= {"train_file": files, "streaming": True, "max_steps": 3, "global_batch_size": 8} | fields
    return kit.open_data(**{name: value for name, value in values.items() if value is not None})[1]["train"]


def test_changed_local_shard_is_refused(tmp_path):
    file = kit.write_jsonl(tmp_path / "changing[1].jsonl", [{"input_ids": [n % 50, 7, 8]} for n in range(600)])
    stream = opened(tmp_path, file)
    blocks = stream.shards.blocks(0)
    assert len(next(blocks)) == 512
    kit.write_jsonl(file, [{"input_ids": [1, 2, 3]}] * 601)
    for again in (blocks, stream.shards.blocks(0)):  # during a pass, and in the next one
        with pytest.raises(UsageError, match=r"changing\[1\]\.jsonl changed"):
            list(again)


@pytest.mark.parametrize("kind", ["json", "parquet"])
@pytest.mark.parametrize("new", ["attention_mask", "labels"])
def test_column_that_only_a_later_shard_has_is_looked_at(tmp_path, monkeypatch, kind, new):
    """Masked tokens would be trained on."""
    monkeypatch.setattr("engine.rows.examples.FIRST_ROWS", 5)
    files = [tmp_path / f"{i}.{kind}" for i in range(2)]
    for file, more in zip(files, ({}, {new: [[1, 1, 0]] * 9}), strict=True):
        getattr(datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 9} | more), f"to_{kind}")(file)
    shards = opened(tmp_path, files).shards
    [rows] = shards.blocks(1)
    with pytest.raises(UsageError, match=rf"1\.{kind}, (line 1|row 0): .*`{new}` is .*8 more of the 9 rows"):
        shards.prepare(rows, 1, 0, 0)


def test_classes_of_a_later_shard_in_another_order_are_refused(tmp_path):
    kit.need_task("text_classification")
    files = [tmp_path / f"{i}.parquet" for i in range(2)]
    for file, names in zip(files, (["bad", "good"], ["good", "bad"]), strict=True):
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
        datasets.Dataset.from_dict({"text": ["a"] * 9, "label": [0, 1, 0] * 3}, features).to_parquet(file)
    more = {"task": "text_classification", "tokenizer_name": kit.tiny_tokenizer(tmp_path / "tokenizer", ["a"])}
    with pytest.raises(UsageError, match=r"1\.parquet: `label` has the classes \['good', 'bad'\]"):
        opened(tmp_path, files, **more, model_config=kit.write_yaml(tmp_path / "bert.yaml", BERT))


@pytest.mark.parametrize("masked", [True, False])
def test_stream_without_targets_is_refused(tmp_path, monkeypatch, masked):
    """Also if the only target is in a later block, which gives the dummy row."""
    monkeypatch.setattr("addons.streaming.shards.BLOCK", 8)
    rows = [{"input_ids": [1, 2, 3], "labels": [-100] * 3}] * 20
    files = [kit.write_jsonl(tmp_path / f"{i}.jsonl", rows) for i in range(2)]
    if masked:
        with pytest.raises(UsageError, match=r"0.jsonl, .*1.jsonl has no row to train on.*masked"):
            opened(tmp_path, files)
        return
    kit.write_jsonl(files[1], [*rows, {"input_ids": [4, 5, 6], "labels": [4, 5, 6]}])
    number, *_ = opened(tmp_path, files).shards.dummy_row
    assert (number >> 44, number >> 20 & 0xFFFFFF) == (1, 2)  # of the second file, the third block


def test_long_rows_of_a_stream_are_dropped(tmp_path):
    file = kit.write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": [n] * n} for n in range(2, 20)])
    shards = opened(tmp_path, file, max_length=11, long_rows="drop").shards
    [table] = shards.blocks(0)
    assert sorted(length for *_, length in shards.prepare(table, 0, 0, 0)) == [*range(2, 12)]


def test_stream_of_packed_rows_has_the_warmups(tmp_path):
    """The first steps have fewer and shorter rows, the same for 1 and 2 processes, and after a resume."""
    generator = np.random.default_rng(1)
    rows = [{"input_ids": generator.integers(0, 50, n).tolist()} for n in generator.integers(3, 12, 23)] * 3
    fields = technique_runs.files(tmp_path) | {"global_batch_size": 8, "max_steps": 8, "max_length": 11}
    fields |= {"batch_size_warmup_start": 2, "batch_size_warmup_steps": 5}
    fields |= {"sequence_length_warmup_start": 3, "sequence_length_warmup_steps": 6}
    fields |= {"streaming": True, "stream_lanes": 2, "packing": True}
    fields["train_file"] = [kit.write_jsonl(tmp_path / f"part{i}.jsonl", rows[i::2]) for i in range(2)]
    one = technique_runs.train(tmp_path / "one", fields, 1, 3)
    two = technique_runs.check_resume(tmp_path / "two", fields, 2, 3)
    assert kit.distance(one.weights, two.weights) <= 1e-10
    _, steps = ledger.read(one.folder)
    assert [examples for examples, _ in steps.values()][:6] == [2, 2, 4, 4, 6, 8]
    assert one.kind("train")[0]["weight"] <= 2 * 2
