"""dataset_split names the split of a dataset to train on."""

import json

import datasets
import numpy as np
import pytest

from src.config.errors import UsageError
from tests.helpers import kit

GENERATOR = np.random.default_rng(0)
ROWS = [GENERATOR.integers(0, 50, 6).tolist() for _ in range(100)]


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
    return {"model_config": kit.write_yaml(tmp_path_factory.mktemp("fields") / "gpt2.yaml", kit.TINY)}


def ids_of(split) -> list[tuple]:
    return [tuple(row["input_ids"].tolist()) for row in split.rows(np.arange(len(split)))]


def write_splits(folder, kind="files"):
    """Write a folder with the splits train, validation and extra, as files or as `save_to_disk` does; return it."""
    parts = {"train": ROWS[:9], "validation": ROWS[9:12], "extra": ROWS[12:]}
    tables = {name: datasets.Dataset.from_list([{"input_ids": row} for row in rows]) for name, rows in parts.items()}
    if kind == "saved":
        datasets.DatasetDict(tables).save_to_disk(folder)
    else:
        files = {}
        folder.mkdir()
        for name, table in tables.items():
            table.to_json(folder / f"{name}.jsonl")
            files[name] = f"{name}.jsonl"
        configs = [{"config_name": "default", "data_files": [{"split": n, "path": f} for n, f in files.items()]}]
        (folder / "README.md").write_text("---\n" + json.dumps({"configs": configs}) + "\n---\n")
    return folder


@pytest.mark.parametrize("kind", ["files", "saved"])
def test_dataset_split_is_trained(fields, tmp_path, capsys, kind):
    splits_folder = write_splits(tmp_path / "set", kind)
    more = {"model_config": fields["model_config"], "cache_dir": tmp_path / "cache", "dataset_name": splits_folder}
    for name, count in ((None, 9), ("train", 9), ("extra", 88)):
        _, splits = kit.open_data(**more | ({"dataset_split": name} if name else {}))
        assert len(splits["train"]) == count
        assert ids_of(splits["validation"]) == [tuple(row) for row in ROWS[9:12]]
    with pytest.raises(UsageError, match=r"dataset_split is extras.*train, validation, extra"):
        kit.open_data(**more, dataset_split="extras")
    with pytest.raises(UsageError, match="dataset_split is validation, which is also the evaluation data"):
        kit.open_data(**more, dataset_split="validation")
    assert "not used" not in capsys.readouterr().err
    name = str(splits_folder)
    mixture = {"a": {"dataset_name": name}, "b": {"dataset_name": name, "dataset_split": "extra"}}
    del more["dataset_name"]
    _, splits = kit.open_data(**more, mixture=json.dumps(mixture))
    assert [len(part) for *_, part in splits["train"].segments()] == [9, 88]
    mixture["b"]["dataset_split"] = "extras"
    with pytest.raises(UsageError, match="mixture: b: dataset_split is extras"):
        kit.open_data(**more, mixture=json.dumps(mixture))


def test_dataset_split_needs_a_dataset_by_name(fields, tmp_path):
    file = kit.write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": row} for row in ROWS])
    with pytest.raises(UsageError, match="dataset_split is given without dataset_name"):
        kit.open_data(**fields, train_file=file, dataset_split="extra")


def test_evaluation_takes_no_split_to_train_on(fields, tmp_path):
    given = kit.flags(model_name_or_path=tmp_path, dataset_name=tmp_path, dataset_split="extra")
    codes, texts = kit.run_command("eval.py", *given, folder=tmp_path / "run")
    assert codes == [2]
    assert "dataset_split is extra" in texts[0]
