"""A pointer file of Git LFS in place of data, weights or a tokenizer is named; files that are not read may be some."""

import pytest

from engine.checkpointing.locate_weights import locate_weights
from engine.config.errors import UsageError
from engine.config.find_addons import run_config
from engine.rows.sources import fetch_source, find_sources
from engine.storage import http_files
from engine.storage import hub as hub_module
from engine.storage.hub import fetch_model

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"


def write(folder, *names, text=POINTER):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(text)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet", "txt", "arrow", "png"])
def test_pointer_in_place_of_data(tmp_path, suffix):
    write(tmp_path / "data", f"a.{suffix}")
    file = tmp_path / "data" / f"a.{suffix}"
    for fields in ({"train_file": [str(file)]}, {"dataset_name": str(tmp_path / "data")}):
        if suffix == "png" and "train_file" in fields:
            continue
        with pytest.raises(UsageError, match=rf"{next(iter(fields))}: {file} is a pointer of Git LFS.*git lfs pull"):
            find_sources(run_config(**fields), "train")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer.model", "model.safetensors"])
def test_pointer_in_place_of_a_model(tmp_path, name):
    folder = tmp_path / "model"
    write(folder, "config.json", "model.safetensors", text="{}")
    write(folder, name, "model.onnx", "pytorch_model.bin")  # the last two are not read beside safetensors
    for find in (
        lambda: fetch_model(str(folder), "main", "model_name_or_path"),
        lambda: locate_weights(str(folder), "model_name_or_path"),
    ):
        with pytest.raises(UsageError, match=rf"model_name_or_path: {folder / name} is a pointer of Git LFS"):
            find()


def test_pointers_that_are_not_read(tmp_path):
    """The weights beside a tokenizer, formats that are not read, and a text that is longer than a pointer."""
    folder = tmp_path / "model"
    write(folder, "tokenizer.json", text="{}")
    write(folder, "model.safetensors", "model.onnx")
    assert fetch_model(str(folder), "main", "tokenizer_name", weights=False) == str(folder)
    write(tmp_path / "data", "a.txt", text=POINTER * 20)
    assert find_sources(run_config(train_file=[str(tmp_path / "data/a.txt")]), "train")[""].files


def test_pointer_of_a_raw_link(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(http_files, "is_offline", lambda: False)
    monkeypatch.setattr(hub_module, "records", {})
    (hub.folder / "files/a.jsonl").write_text(POINTER)
    cfg = run_config(train_file=[f"{hub.files_url}/a.jsonl"], cache_dir=str(tmp_path))
    with pytest.raises(UsageError, match=r"train_file: http.*/a.jsonl is a pointer of Git LFS.*give the URL"):
        fetch_source(find_sources(cfg, "train")[""], cfg)
