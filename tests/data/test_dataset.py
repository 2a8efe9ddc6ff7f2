"""Files become rows that are read by id: in order, prepared once, the same with or without loader workers."""

import functools
import json
import os
import random
import time
import types
from contextlib import nullcontext, suppress
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from src.checkpointing import run_identity
from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.data import data_loader, local_files
from src.data.batch_plan import PlanConfig, training_order
from src.data.cache_key import encode_files
from src.storage import shared_work
from src.tasks import Batch, causal_lm
from tests.helpers import kit

TEXTS = ["def f", "return self", "x", "für 漢字", "import if", "else def"]


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    kit.tiny_tokenizer(folder / "tokenizer", TEXTS * 2)
    kit.tiny_tokenizer(folder / "other", ["something else"] * 2)
    with_eos = AutoTokenizer.from_pretrained(folder / "tokenizer")
    with_eos.eos_token = with_eos.pad_token  # as base and instruct models have it: the same tokenizer.json
    with_eos.save_pretrained(folder / "other_eos")
    kit.write_yaml(folder / "llama.yaml", kit.LLAMA)
    return folder


def open_data(tools, folder, **fields):
    fields = {"model_config": tools / "llama.yaml", "tokenizer_name": tools / "tokenizer"} | fields
    return kit.open_data(cache_dir=folder / "cache", **fields)


def texts(task, split):
    """Return the text of every row, in the order of ids."""
    rows = split.rows(np.arange(len(split)))
    return [task.tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in rows]


def prepared(folder):
    return sorted((folder / "cache" / "prepared").glob("*/facts.json"))


# ---- files -----------------------------------------------------------------------------------------------------------


def write(path: Path, rows: list[str]) -> Path:
    """Write texts as a file of the kind that the suffix names."""
    table = datasets.Dataset.from_dict({"text": rows})
    if path.suffix == ".txt":
        path.write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps([{"text": row} for row in rows]), encoding="utf-8")
    elif path.suffix == ".arrow":
        import pyarrow

        arrow = table.data.table
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, arrow.schema) as writer:
            writer.write_table(arrow)
    else:
        getattr(table, {".jsonl": "to_json", ".csv": "to_csv", ".parquet": "to_parquet"}[path.suffix])(path)
    return path


@pytest.mark.parametrize("kind", local_files.BUILDERS)
def test_every_file_format_keeps_row_order(tools, tmp_path, kind):
    file = write(tmp_path / f"rows{kind}", TEXTS)
    task, splits = open_data(tools, tmp_path, train_file=file)
    assert texts(task, splits["train"]) == TEXTS
    assert splits.keys() == {"train"}
    assert len(splits["train"]) == splits["train"].stats["source_rows"] == len(TEXTS)


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet", ".txt"])
def test_files_keep_the_given_order(tools, tmp_path, kind):
    for name in ("b", "a", "c"):
        write(tmp_path / f"{name}{kind}", [f"def {name}", f"return {name}"])
    task, splits = open_data(tools, tmp_path, train_file=[tmp_path / f"{name}{kind}" for name in ("b", "a", "c")])
    assert texts(task, splits["train"]) == [f"{word} {name}" for name in ("b", "a", "c") for word in ("def", "return")]


def test_glob_is_sorted_and_recursive(tools, tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl"):
        write(tmp_path / name, [name])
    task, splits = open_data(tools, tmp_path, train_file=tmp_path / "**/*.jsonl")
    assert texts(task, splits["train"]) == ["a.jsonl", "b.jsonl", "deep/c.jsonl"]
    monkeypatch.chdir(tmp_path)
    task, splits = open_data(tools, tmp_path, train_file=["deep/*.jsonl", "?.jsonl"])
    assert texts(task, splits["train"]) == ["deep/c.jsonl", "a.jsonl", "b.jsonl"]


def test_mixed_file_formats_are_refused(tools, tmp_path):
    files = [write(tmp_path / name, TEXTS) for name in ("a.jsonl", "b.csv")]
    with pytest.raises(UsageError, match=r"train_file: .*a.jsonl, .*b.csv: "):
        open_data(tools, tmp_path, train_file=files)


def test_folder_of_files(tools, tmp_path):
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", TEXTS)
    write(tmp_path / "set" / "validation.jsonl", TEXTS[:2])
    task, splits = open_data(tools, tmp_path, dataset_name=tmp_path / "set")
    assert texts(task, splits["train"]) == TEXTS
    assert texts(task, splits["validation"]) == TEXTS[:2]


@pytest.mark.parametrize(
    "names, validation", [(("train", "validation"), True), (("train", "test"), True), (("train",), False)]
)
def test_dataset_from_save_to_disk(tools, tmp_path, names, validation):
    rows = {"train": TEXTS, "validation": TEXTS[:2], "test": TEXTS[:2]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": rows[name]}) for name in names})
    saved.save_to_disk(tmp_path / "set")
    for _ in range(2):  # a missing split is cached, too
        task, splits = open_data(tools, tmp_path, dataset_name=tmp_path / "set")
        assert texts(task, splits["train"]) == TEXTS
        assert ("validation" in splits) == validation
        assert not validation or texts(task, splits["validation"]) == TEXTS[:2]


def test_folder_without_training_data_is_refused(tools, tmp_path):
    saved = datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": TEXTS})})
    saved.save_to_disk(tmp_path / "set")
    with pytest.raises(UsageError, match="no train data: give --train_file, or a dataset with a train split"):
        open_data(tools, tmp_path, dataset_name=tmp_path / "set")


def test_files_with_conflicting_columns_are_named(tools, tmp_path):
    """The first file has no value in the column of mixed types."""
    files = []
    for i, note in enumerate((None, 1, "one")):
        files.append(tmp_path / f"{i}.jsonl")
        files[-1].write_text(json.dumps({"text": "def f"} | ({} if note is None else {"note": note})) + "\n")
    with pytest.raises(
        UsageError, match=r"2.jsonl has other columns \(.*note: string\) than .*1.jsonl \(.*note: int64\)"
    ):
        open_data(tools, tmp_path, train_file=files)


# ---- rows by id ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ragged(files, tmp_path_factory):
    """(task, split, rows as they are in the file)"""
    folder = tmp_path_factory.mktemp("ragged")
    fields = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "cache_dir": folder}
    task, splits = kit.open_data(**fields)
    return (
        task,
        splits["train"],
        [json.loads(line)["input_ids"] for line in (files / "train.jsonl").read_text().splitlines()],
    )


@pytest.mark.parametrize("ids", [[5], [0, 1, 2, 3], [1002, 0, 500], [7, 7, 7], list(range(1002, -1, -1))])
def test_rows_come_in_the_order_of_ids(ragged, ids):
    _, split, rows = ragged
    got = split.rows(np.array(ids))
    assert [row["input_ids"].tolist() for row in got] == [rows[i] for i in ids]
    assert [len(rows[i]) for i in ids] == split.lengths[ids].tolist()


def test_rank_reads_only_rows_of_its_micro_batches(ragged, tmp_path):
    task, split, rows = ragged

    def work():
        rank, seen = int(os.environ["RANK"]), []
        order = list(training_order(PlanConfig(len(rows), 32, 4, 1, split.lengths), rank, 2, 0, 32))
        spy = _Spy(split, seen)
        for micro, batch in data_loader.read_batches(spy, task, iter(order), RunConfig(), False):
            lengths = [len(rows[i]) for i in micro.ids]
            assert (batch.tokens, batch.weight) == (sum(lengths), sum(lengths) - len(lengths))
        assert seen == [i for micro in order for i in micro.ids]
        return seen, [i for micro in order if not micro.dummy for i in micro.ids]

    one, two = kit.spawn(2, work, out=tmp_path)
    assert sorted(one[1] + two[1]) == list(range(1003))  # 32 steps are an epoch: every row once, by one rank
    assert len(one[0]) + len(two[0]) - 1003 <= 32  # and at most a dummy row per step


class _Spy:
    def __init__(self, split, seen):
        self.split, self.seen = split, seen

    def rows(self, ids):
        self.seen += ids.tolist()
        return self.split.rows(ids)


def test_windows_end_with_the_last_micro_batch_of_a_step(ragged):
    task, split, rows = ragged
    order = list(training_order(PlanConfig(len(rows), 32, 4, 1, split.lengths), 0, 1, 29, 35))
    batches = list(data_loader.group_by_step(data_loader.read_batches(split, task, iter(order), RunConfig(), False)))
    assert [len(batch) for batch, _ in batches] == [8, 8, 3, 8, 8, 8]  # 1003 = 31 × 32 + 11
    assert [[micro.step for micro, _ in batch] for batch, _ in batches] == [
        [s] * n for s, n in zip(range(29, 35), (8, 8, 3, 8, 8, 8), strict=True)
    ]
    assert all(waited >= 0 for _, waited in batches)


# ---- randomness ------------------------------------------------------------------------------------------------------


class Drawing(causal_lm.Task):
    """A task with a collator that draws from every random generator."""

    def collate(self, rows, training):
        drawn = torch.cat(
            [torch.rand(2).double(), torch.from_numpy(np.random.rand(2)), torch.tensor([random.random()]).double()]
        )
        return Batch({"drawn": drawn}, len(rows), len(rows), len(rows))


def draws(split, workers, rank=0, world=1):
    torch.manual_seed(os.getpid() + workers)  # what came before must not matter
    order = training_order(PlanConfig(len(split), 32, 4, 1, split.lengths), rank, world, 0, 3)
    task = Drawing(RunConfig(), causal_lm.Options())
    read = data_loader.read_batches(split, task, order, RunConfig(dataloader_num_workers=workers), False)
    return {(m.step, m.index): batch.inputs["drawn"].tolist() for m, batch in read if not m.dummy}


def test_random_draws_do_not_depend_on_workers_or_processes(ragged, tmp_path):
    _, split, _ = ragged
    here = draws(split, 0)
    assert len({str(value) for value in here.values()}) == 24  # each micro-batch has its own
    assert draws(split, 2) == here
    one, two = kit.spawn(2, lambda: draws(split, 0, int(os.environ["RANK"]), 2), out=tmp_path)
    assert one | two == here
    assert not one.keys() & two.keys()


def test_mutant_without_seeded_draws(ragged, monkeypatch):
    _, split, _ = ragged
    monkeypatch.setattr(data_loader, "seed_everything", lambda seed: None)
    assert draws(split, 2) != draws(split, 0)


# ---- prepared once ---------------------------------------------------------------------------------------------------


def _new_row(tools, folder):
    write(folder / "rows.jsonl", [*TEXTS, "more"])


def _new_text_of_the_same_size(tools, folder):
    file = folder / "rows.jsonl"
    stat = file.stat()
    file.write_text(file.read_text().replace("self", "flea"))
    assert file.stat().st_size == stat.st_size


CHANGES = {
    "a row more": (_new_row, {}),
    "another text of the same size": (_new_text_of_the_same_size, {}),
    "another tokenizer": (None, {"tokenizer_name": "other"}),
    "another end of text": (None, {"tokenizer_name": "other_eos"}),
    "another length": (None, {"max_length": 2}),
    "packing": (None, {"packing": True}),
    "no end of text": (None, {"append_eos": False}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_data_or_options_prepare_again(tools, tmp_path, name):
    edit, fields = CHANGES[name]
    file = write(tmp_path / "rows.jsonl", TEXTS)
    _, before = open_data(tools, tmp_path, train_file=file)
    time.sleep(0.01)  # so that the time of the file differs
    if edit:
        edit(tools, tmp_path)
    fields = {k: tools / v if k == "tokenizer_name" else v for k, v in fields.items()}
    task, after = open_data(tools, tmp_path, train_file=file, **fields)
    assert len(prepared(tmp_path)) == 2
    fresh = open_data(tools, tmp_path / "elsewhere", train_file=file, **fields)[1]["train"]
    assert texts(task, after["train"]) == texts(task, fresh)  # not the old ones under a new name
    assert before["train"].stats["rows"] != after["train"].stats["rows"]
    assert after["train"].stats["rows"] == fresh.stats["rows"]


def test_another_end_of_text_is_a_change_on_resume(tools, tmp_path):
    file, identities = write(tmp_path / "rows.jsonl", TEXTS), []
    for name in ("tokenizer", "other_eos"):
        _, splits = open_data(tools, tmp_path, tokenizer_name=tools / name, train_file=file)
        identities.append(run_identity.data_identity(splits["train"].stats))
    assert all(identities[0][key] != identities[1][key] for key in ("rows", "tokenizer_files"))


class Child(causal_lm.Task):
    """A task of a fork."""


def test_code_behind_encode():
    names = {str(path.relative_to(kit.REPOSITORY)) for path in encode_files(Child(None, None))}
    assert names > {"tests/data/test_dataset.py", "src/tasks/causal_lm.py", "src/text/packing.py"}
    assert not any("base" in name or "models" in name for name in names)


def test_changed_code_of_encode_prepares_again(tools, tmp_path, monkeypatch):
    file, helper = write(tmp_path / "rows.jsonl", TEXTS), types.ModuleType("helper")
    helper.__file__ = str(tmp_path / "helper.py")
    monkeypatch.setattr(causal_lm.Task, "encode_helpers", (helper,))
    for code, count in (("a", 1), ("a", 1), ("b", 2)):
        (tmp_path / "helper.py").write_text(code)
        open_data(tools, tmp_path, train_file=file)
        assert len(prepared(tmp_path)) == count


def _start_together(tools, folder, callers: int = 1):
    """Prepare, and write a line for each call of `encode`, which waits for so many calls."""
    original = causal_lm.Task.encode

    @functools.wraps(original)
    def slow(self, batch, places):
        with open(folder / "calls", "a") as calls:
            calls.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        kit.until(lambda: len((folder / "calls").read_text().splitlines()) >= callers)
        return original(self, batch, places)

    causal_lm.Task.encode = slow
    task, splits = open_data(tools, folder, train_file=folder / "rows.jsonl")
    return texts(task, splits["train"])


def test_processes_started_together_prepare_once(tools, tmp_path):
    write(tmp_path / "rows.jsonl", TEXTS)
    assert kit.spawn(3, _start_together, tools, tmp_path, out=tmp_path / "out") == [TEXTS] * 3
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_mutant_without_a_lock(tools, tmp_path, monkeypatch):
    write(tmp_path / "rows.jsonl", TEXTS)
    monkeypatch.setattr(shared_work.SharedWork, "exclusive", lambda *_: nullcontext())
    with suppress(kit.RankFailed):  # they may write over each other
        kit.spawn(3, _start_together, tools, tmp_path, 2, out=tmp_path / "out")
    assert len((tmp_path / "calls").read_text().splitlines()) > 1


def test_failed_preparation_leaves_nothing(tools, tmp_path):
    file = kit.write_jsonl(tmp_path / "rows.jsonl", [{"text": "good"}] * 5 + [{"text": 3.5}])
    file.write_text(file.read_text().replace("3.5", "null"))
    with pytest.raises(UsageError, match="line 6: train data: `text` holds nothing"):
        open_data(tools, tmp_path, train_file=file)
    left = [path for path in (tmp_path / "cache" / "prepared").rglob("*") if not path.name.endswith(".lock")]
    assert left == []
    file.write_text(file.read_text().replace("null", '"fixed"'))
    task, splits = open_data(tools, tmp_path, train_file=file)
    assert texts(task, splits["train"]) == ["good"] * 5 + ["fixed"]


def test_no_data_and_no_rows_are_refused(tools, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UsageError, match=r"empty.jsonl is empty"):
        open_data(tools, tmp_path, train_file=tmp_path / "empty.jsonl")
    write(tmp_path / "short.jsonl", ["", ""])
    for packing in (False, True):
        with pytest.raises(UsageError, match=r"none of the 2 rows of .*short.jsonl has anything to train on"):
            open_data(tools, tmp_path, train_file=tmp_path / "short.jsonl", packing=packing)


def _other_files(argv, folders):
    os.chdir(folders[int(os.environ["RANK"])])
    import train

    train.main(argv)


@pytest.mark.parametrize("mutant", [False, True])
def test_ranks_with_different_data_do_not_train(tools, tmp_path, mutant, monkeypatch):
    import train

    folders = []
    for name, rows in (("a", TEXTS), ("b", [*TEXTS[:-1], "def x"])):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "rows.jsonl", rows)
        folders.append(tmp_path / name)
    fields = {"model_config": tools / "llama.yaml", "tokenizer_name": tools / "tokenizer", "train_file": "rows.jsonl"}
    fields |= {"cache_dir": tmp_path / "cache", "max_steps": 1, "output_dir": tmp_path / "run"}
    if mutant:
        monkeypatch.setattr(train.dataset, "check_same_data", lambda *_: None)
        kit.spawn(2, _other_files, kit.flags(**fields), folders, out=tmp_path / "out")  # trains silently
        return
    with pytest.raises(kit.RankFailed, match="train data: rank 1 has other rows than rank 0") as failed:
        kit.spawn(2, _other_files, kit.flags(**fields), folders, out=tmp_path / "out")
    assert failed.value.codes == [1, 1]
    assert not (tmp_path / "run" / "checkpoints").exists()
