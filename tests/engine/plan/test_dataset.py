"""Files become rows that are read by id: in order, prepared once."""

import json
import os
import types
from pathlib import Path

import datasets
import numpy as np
import pytest

from engine.config.errors import UsageError
from engine.rows.prepare import encode_files
from src.tasks import causal_lm
from tests.engine.conftest import texts
from tests.helpers import kit

TEXTS = ["def f", "return self", "x", "für 漢字", "import if", "else def"]


def write(path: Path, rows: list[str]) -> Path:
    path.parent.mkdir(exist_ok=True)
    return kit.write_jsonl(path, [{"text": row} for row in rows])


# ---- files -----------------------------------------------------------------------------------------------------------


def test_order_of_files_and_rows_is_kept(open_data, tmp_path):
    files = [write(tmp_path / f"{name}.jsonl", [*TEXTS, f"return {name}"]) for name in ("b", "a", "c")]
    task, splits = open_data(train_file=files)
    assert texts(task, splits["train"]) == [text for name in ("b", "a", "c") for text in (*TEXTS, f"return {name}")]
    assert splits.keys() == {"train"}
    assert splits["train"].stats["source_rows"] == len(splits["train"]) == 21


@pytest.mark.parametrize(
    "pattern, files", [("**/*.jsonl", ["a1.jsonl", "a[1].jsonl", "deep/c.jsonl"]), ("a[1].jsonl", ["a[1].jsonl"])]
)
def test_glob_is_sorted_and_recursive_unless_a_file_has_this_name(open_data, tmp_path, pattern, files):
    for name in ("deep/c.jsonl", "a[1].jsonl", "a1.jsonl"):
        write(tmp_path / name, [name])
    task, splits = open_data(train_file=tmp_path / pattern)
    assert texts(task, splits["train"]) == files


GENERATOR = np.random.default_rng(0)
ROWS = [GENERATOR.integers(0, 50, 6).tolist() for _ in range(100)]


def write_splits(folder: Path, kind: str = "files", names=("train", "validation", "extra")) -> Path:
    """Write a folder with 9, 3 and 88 rows of these splits, as files or as `save_to_disk` does; return it."""
    parts = {"train": ROWS[:9], "validation": ROWS[9:12], "extra": ROWS[12:]}
    tables = {name: datasets.Dataset.from_list([{"input_ids": row} for row in parts[name]]) for name in names}
    if kind == "saved":
        datasets.DatasetDict(tables).save_to_disk(folder)
        return folder
    folder.mkdir()
    for name, table in tables.items():
        table.to_json(folder / f"{name}.jsonl")
    configs = [{"config_name": "default", "data_files": [{"split": n, "path": f"{n}.jsonl"} for n in names]}]
    (folder / "README.md").write_text("---\n" + json.dumps({"configs": configs}) + "\n---\n")
    return folder


@pytest.mark.parametrize("kind", ["files", "saved"])
def test_splits_of_a_folder(open_data, tmp_path, kind, capsys):
    folder = write_splits(tmp_path / "set", kind)
    if kind == "saved":
        datasets.load_from_disk(folder)["train"].map(dict)  # leaves its cache in the folder
    for given, rows in ({}, ROWS[:9]), ({"dataset_split": "extra"}, ROWS[12:]):
        _, splits = open_data(dataset_name=folder, **given)
        assert [row["input_ids"].tolist() for row in kit.all_rows(splits["train"])] == rows
        assert len(splits["validation"]) == 3
    assert "not read" not in capsys.readouterr().err
    if kind == "saved":
        _, splits = open_data(train_file=folder / "train/data-*.arrow")
        assert [row["input_ids"].tolist() for row in kit.all_rows(splits["train"])] == ROWS[:9]
    for split in ("extras", "validation"):
        with pytest.raises(UsageError, match=f"dataset_split is {split}: .*train, validation, extra"):
            open_data(dataset_name=folder, dataset_split=split)
    mixture = {"a": {"dataset_name": str(folder)}, "b": {"dataset_name": str(folder), "dataset_split": "extra"}}
    _, splits = open_data(mixture=json.dumps(mixture))
    assert [len(part) for *_, part in splits["train"].segments()] == [9, 88]
    with pytest.raises(UsageError, match="no train data: give --train_file, or a dataset with a train split"):
        open_data(dataset_name=write_splits(tmp_path / "other", kind, ["validation"]))


# ---- prepared once ---------------------------------------------------------------------------------------------------


def prepared(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "prepared").glob("*/facts.json"))


CHANGES = {
    "another end of text": {"tokenizer_name": "other_eos"},
    "another length": {"max_length": 2},
    "packing": {"packing": True},
    "no end of text": {"append_eos": False},
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_options_prepare_again(open_data, tools, tmp_path, name):
    """Changed files: tests/engine/rows/test_bad_rows.py."""
    file = write(tmp_path / "rows.jsonl", TEXTS)
    for _ in range(2):
        _, before = open_data(train_file=file)
        assert len(prepared(tmp_path)) == 1
    fields = {k: tools / v if k == "tokenizer_name" else v for k, v in CHANGES[name].items()}
    _, after = open_data(train_file=file, **fields)
    assert len(prepared(tmp_path)) == 2
    assert after["train"].stats["rows"] != before["train"].stats["rows"]


class Child(causal_lm.Task):
    """A task of a fork."""


def test_changed_code_of_encode_prepares_again(open_data, tmp_path, monkeypatch, capsys):
    names = {str(path.relative_to(kit.REPOSITORY)) for path in encode_files(Child(None, None))}
    assert names > {"tests/engine/plan/test_dataset.py", "src/tasks/causal_lm.py", "engine/rows/labels.py"}
    assert not any("base" in name or "models" in name for name in names)
    file, helper = write(tmp_path / "rows.jsonl", TEXTS), types.ModuleType("helper")
    helper.__file__ = str(tmp_path / "helper.py")
    monkeypatch.setattr(causal_lm.Task, "encode_helpers", (helper,))
    for code, count in (("a", 1), ("a  # a comment", 1), ("b", 2)):
        (tmp_path / "helper.py").write_text(code)
        open_data(train_file=file)
        assert len(prepared(tmp_path)) == count
        assert ("preparing train data again: its code" in capsys.readouterr().out) == (count == 2)
    open_data(train_file=file, max_length=9)  # other rows, not the same ones again
    assert "again" not in capsys.readouterr().out


def _other_files(argv, folders):
    os.chdir(folders[int(os.environ["RANK"])])
    import train

    train.main(argv)


def test_ranks_with_different_data_do_not_train(tools, tmp_path):
    folders = []
    for name, rows in (("a", TEXTS), ("b", [*TEXTS[:-1], "def x"])):
        folders.append(write(tmp_path / name / "rows.jsonl", rows).parent)
    fields = {"model_config": tools / "gpt2.yaml", "tokenizer_name": tools / "tokenizer", "train_file": "rows.jsonl"}
    fields |= {"cache_dir": tmp_path / "cache", "max_steps": 1, "output_dir": tmp_path / "run"}
    with pytest.raises(kit.RankFailed, match=r"train data: rank 1 has 6 rows .*, but rank 0 has 6 rows") as failed:
        kit.spawn(2, _other_files, kit.flags(**fields), folders, out=tmp_path / "out")
    assert failed.value.codes == [1, 1]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_file_that_is_named_twice_is_warned_about(open_data, tmp_path, capsys):
    file = write(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "b.jsonl").symlink_to(file)
    _, splits = open_data(train_file=[file, tmp_path / "b.jsonl"])
    assert len(splits["train"]) == 2 * len(TEXTS)
    assert "names a file more than once, so its rows are read as often" in capsys.readouterr().err
