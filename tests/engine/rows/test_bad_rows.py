"""Files that are bad, or that `datasets` would misread: refused with file and row, or read correctly; never silently."""

import bz2
import gzip
import json
import os
from pathlib import Path

import datasets
import pytest
from PIL import Image

from engine.config.errors import UsageError
from engine.config.find_addons import run_config
from engine.rows.examples import load_examples
from engine.rows.prepared_split import data_notes
from engine.rows.sources import find_sources
from src.tasks import causal_lm
from tests.engine.conftest import texts

BOM = b"\xef\xbb\xbf"
GOOD = {
    "bom.csv": BOM + b"text,n\nab,1\ncd,2\n",
    "quoted.csv": b'"text",n\r\n"ab",1\r\n\r\ncd,"2"\r\n',
    "cr.csv": b"text,n\rab,1\rcd,2\r",
    "index.csv": b",text,when,code\n0,ab,2024-01-01,007\n1,cd,2024-01-02,8\n",
    "windows.txt": b"ab\r\ncd",
    "bom.txt": BOM + b"ab\ncd\n",
    "bom.jsonl": BOM + b'{"text": "ab"}\n{"text": "cd"}\n',
    "bom.json": BOM + b'[{"text": "ab"}, {"text": "cd"}]',
    "spread.json": b'{\n "text": "ab"\n}\n\n{"text": "cd",\n "n": {\n  "m": 1}\n}\n',
}


def lines(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


ROW = {"text": "def f"}
BEFORE = lines(ROW) * 3 + "\n"  # the next line is the fifth
BAD = {  # text or bytes of files by name; parts of the message, separated by |
    # ---- CSV that pandas accepts: it shifts or fills columns
    "trailing comma": (
        {"a.csv": "text,n\nab,1,\ncd,2,\n"},
        "a.csv, line 2: train data: expected 2 columns, got 3|1 more",
    ),
    "too few": ({"a.csv": "id,text\n1,ab\n2\n"}, "a.csv, line 3: train data: expected 2 columns, got 1"),
    "open quote": ({"a.csv": 'text,n\nab,1\n"cd,2\nef,3\n'}, "a.csv, line 3: train data: unexpected end of data"),
    "column twice": ({"a.csv": "text,text\nab,cd\n"}, "a.csv: the column `text` is named twice"),
    "null in csv": ({"a.csv": 'text,n\n"x\ndef",1\n,2\n'}, "a.csv, line 4: train data: `text` holds nothing"),
    "invalid UTF-8 in csv": (
        {"a.csv": "text\n" + "ab\n" * 5000 + "caf\udce9\n" + "ab\n" * 5000},
        "a.csv, line 5002: train data: `text` holds |bytes that are not UTF-8|: save the file as UTF-8",
    ),
    # ---- other formats
    "invalid UTF-8 in jsonl": (
        {"a.jsonl": lines(ROW), "b.jsonl": BEFORE.encode() + b'{"text": "\xff y"}\n'},
        "b.jsonl, line 5: train data: `text` holds |bytes that are not UTF-8|: save the file as UTF-8",
    ),
    "another type in a late row": (
        {"a.jsonl": BEFORE + lines({"text": 3})},
        "a.jsonl, line 5: train data: `text` holds int, not text",
    ),
    "types in a list": ({"a.json": '[{"text": "x"}, {"text": 3}]'}, "a.json, row 1: train data: `text` holds int"),
    "list that does not end": ({"a.json": '[{"text": "x"},\n{"text": 3}'}, "a.json, line 2: train data: Expecting"),
    "several kinds of bad rows": (
        {"a.jsonl": BEFORE + lines({"text": 3}) + "{\n" + lines(ROW, {"text": None}) + "[]\n"},
        "a.jsonl, line 5: train data: `text` holds int, not text (3 more of the 8 rows",
    ),
    "another type in the second file": (
        {"a.jsonl": lines(ROW), "b.jsonl": lines({"text": 3})},
        "b.jsonl, line 1: train data: `text` holds int, not text",
    ),
    "two formats": ({"a.jsonl": lines(ROW), "b.csv": "text\nx\n"}, "train_file: |a.jsonl, |b.csv: "),
    "tar as a file": ({"a.tar": "x"}, "train_file: |a.tar|give the folder as --dataset_name"),
    "only a header": ({"a.csv": "text\n"}, "a.csv could not be read, or has no rows"),
    "no byte": ({"train-a.jsonl": lines(ROW), "train-b.jsonl": ""}, "b.jsonl is empty"),
}
CARD = "---\nconfigs:\n- config_name: default\n  data_files: '*.jsonl'\n  chunksize: 40\n---\n"
FOLDER = ("trailing comma", "column twice", "another type in a late row", "no byte")


def write(folder: Path, files: dict) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogateescape"))
    return [folder / name for name in files]


def raw_rows(folder: Path, split: str = "train", **fields) -> list:
    """Return the raw rows of a split of files or a folder, with their places."""
    cfg = run_config(cache_dir=str(folder / "cache"), **fields)
    examples = load_examples(find_sources(cfg, split)[""], cfg)
    return list(examples.rows(examples.column_names))


def both_modes(folder: Path, files: dict) -> list[dict]:
    """Return the fields that name these files, and those that name their folder."""
    paths = write(folder, files)
    return [{"train_file": paths}, {"dataset_name": folder}]


@pytest.mark.parametrize("name", GOOD)
def test_good_files_are_read_correctly(open_data, tmp_path, name):
    for fields in both_modes(tmp_path / "data", {name: GOOD[name]}):
        task, splits = open_data(**fields)
        assert texts(task, splits["train"]) == ["ab", "cd"]


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_with_file_and_row(open_data, tmp_path, name):
    files, parts = BAD[name]
    for fields in both_modes(tmp_path / "data", files)[: 2 if name in FOLDER else 1]:
        with pytest.raises(UsageError) as caught:
            open_data(**fields)
        message = str(caught.value)
        assert all(part in message for part in parts.split("|")), message
        # The message names the user's files, not those in the cache.
        assert not any(name in message for name in ("cache/", "prepared"))


@pytest.mark.parametrize("name", ["trailing comma", "too few", "column twice"])
def test_mutant_readers_of_datasets_accept_broken_files(open_data, tmp_path, name):
    """The reason for a reader of our own; this fails if `datasets` changes. Its own readers stay what they are."""
    (file,) = write(tmp_path, BAD[name][0])
    with pytest.raises(UsageError):
        open_data(train_file=file)
    assert len(list(datasets.load_dataset("csv", data_files=[str(file)], split="train", streaming=True))) in (1, 2)


def test_folder_that_cannot_be_listed_is_refused(tmp_path, monkeypatch):
    """Python and `datasets` skip it without a word."""
    write(tmp_path / "data", {"train.jsonl": lines(ROW)})
    write(tmp_path / "data/more", {"train.jsonl": lines(ROW)})
    allowed = os.access  # root may read every folder
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "more" and allowed(path, mode))
    with pytest.raises(UsageError, match="data/more is a folder that cannot be read"):
        find_sources(run_config(dataset_name=str(tmp_path / "data")), "train")


def test_cells_of_csv_are_text(tmp_path):
    """pandas would make 7 of 007, and floats of integers above int64; what pandas takes for nothing is None here, too."""
    cells = ["12345678901234567891", "true", "007", "2024-01-01", "NA", ""]
    [file] = write(tmp_path, {"a.csv": "text,n\n" + "".join(f"x,{cell}\n" for cell in cells)})
    [other] = write(tmp_path, {"b.csv": "n,text\n1,x\n"})
    rows = raw_rows(tmp_path, train_file=[str(file), str(other)])
    assert [row.values["n"] for row in rows] == [*cells[:4], None, None, "1"]


# ---- locations -------------------------------------------------------------------------------------------------------


def test_location_of_every_line_of_text(tmp_path):
    """Of several files, with carriage returns and other separators of lines in them."""
    files = write(tmp_path, {"a.txt": "r0\nr1\u2028x\x0b\n", "b.txt": "r2\r\nr3"})
    rows = raw_rows(tmp_path, train_file=list(map(str, files)))
    assert [row.values["text"][:2] for row in rows] == ["r0", "r1", "r2", "r3"]
    where = [f"{file}, line {line}: train data" for file in files for line in (1, 2)]
    assert [str(row.place) for row in rows] == where


# ---- a row on which the `encode` of a fork fails ----------------------------------------------------------------------


def test_row_that_encode_cannot_read_is_named(open_data, tmp_path, monkeypatch, capfd):
    original = causal_lm.Task.encode

    def encode(self, batch, locations):
        assert "x" not in "".join(batch["text"])
        return original(self, batch, locations)

    monkeypatch.setattr(causal_lm.Task, "encode", encode)
    file = write(tmp_path, {"rows.jsonl": lines(ROW) * 41 + lines({"text": "x y " * 900}) + lines(ROW)})
    words = "rows.jsonl, line 42: train data: `encode` of task causal_lm fails: AssertionError"
    with pytest.raises(UsageError, match=words):
        open_data(train_file=file)
    assert 'assert "x" not in' in capfd.readouterr().err  # the traceback


# ---- what is named and cannot be read --------------------------------------------------------------------------------


def test_unreadable_files_are_named(open_data, tmp_path):
    for name in ("dangling", "pipe", "folder"):
        write(tmp_path / name, {"good.jsonl": lines(ROW)})
    (tmp_path / "dangling/a.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    os.mkfifo(tmp_path / "pipe/a.jsonl")
    (tmp_path / "folder/a.jsonl").symlink_to(tmp_path / "pipe")  # `datasets` would not read its files
    for name in ("dangling", "pipe", "folder"):
        for fields in ({"train_file": tmp_path / name / "*.jsonl"}, {"dataset_name": tmp_path / name}):
            with pytest.raises(UsageError, match=f"{tmp_path / name}/a.jsonl is not a readable file"):
                open_data(**fields)


def test_new_file_with_an_old_time_is_read_again(open_data, tmp_path):
    """As `cp -p` and `tar` write it: the cache of `datasets` looks at the time alone."""
    for rows in (["ab"], ["cd"], ["cd", "ef"]):
        for fields in both_modes(tmp_path / "data", {"a.jsonl": lines(*({"text": text} for text in rows))}):
            os.utime(tmp_path / "data/a.jsonl", ns=(10**18, 10**18))
            task, splits = open_data(**fields)
            assert texts(task, splits["train"]) == rows


@pytest.mark.parametrize("name", ["train.jsonl.gz", "train.json.bz2", "train.csv.gz", "train.txt.gz"])
def test_compressed_files_of_a_folder_are_read(open_data, tmp_path, name):
    content = {"jsonl": lines({"text": "ab"}, {"text": "cd"}), "csv": "text,n\nab,1\ncd,2\n", "txt": "ab\ncd\n"}
    content["json"] = json.dumps([{"text": "ab"}, {"text": "cd"}])
    compress = gzip.compress if name.endswith("gz") else bz2.compress
    write(tmp_path / "data", {name: compress(content[name.split(".")[1]].encode())})
    task, splits = open_data(dataset_name=tmp_path / "data")
    assert texts(task, splits["train"]) == ["ab", "cd"]


def test_warning_for_unread_files_of_a_folder(open_data, tmp_path, capfd):
    files = {"train.jsonl": lines(ROW), "test.jsonl": lines(ROW), "more.csv": "text\nx\n", "extra.jsonl": lines(ROW)}
    others = {"tokenizer.json": "{}", "labels.txt": "a", "trainer_state.json": "{}", "values.json": "{}"}
    unread = {"more.tsv": "text\nx\n", "more.jsonl.gz": gzip.compress(b"{}"), "train-2.txt": "x\n"}
    write(tmp_path / "data", files | others | unread)
    _, splits = open_data(dataset_name=tmp_path / "data")
    assert f"{tmp_path}/data/extra.jsonl and 4 more not read" in capfd.readouterr().err
    assert data_notes(splits) == ["validation data: 1 of 1 examples checked are also in the training data"]


def test_warning_for_a_copy_in_a_folder(tmp_path, capfd):
    """`datasets` reads a.jsonl.bak as it reads a.jsonl.gz."""
    write(tmp_path / "data", {"a.jsonl": lines(ROW), "a.jsonl.bak": lines(ROW), "a.jsonl.gz": gzip.compress(b"{}")})
    assert len(raw_rows(tmp_path, dataset_name=str(tmp_path / "data"))) == 3
    assert (
        capfd.readouterr().err
        == f"warning: dataset_name: {tmp_path}/data/a.jsonl.bak is read, too: remove it if it is a copy\n"
    )


def test_warning_for_images_that_metadata_does_not_name(tmp_path, capfd):
    for name in ("a", "b", "c"):
        (tmp_path / "data/train").mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(tmp_path / f"data/train/{name}.PNG")
    write(tmp_path / "data/train", {"metadata.jsonl": lines({"file_name": "b.PNG", "label": 1}), "d.HEIC": "x"})
    assert len(raw_rows(tmp_path, dataset_name=str(tmp_path / "data"))) == 1
    warnings = capfd.readouterr().err
    assert "2 of 3 files of the train data" in warnings
    assert f"{tmp_path}/data/train/d.HEIC and 0 more not read" in warnings


def test_masks_that_metadata_names_are_read(tmp_path, capfd):
    (tmp_path / "data").mkdir()
    for name in ("a", "a_mask"):
        Image.new("L", (2, 2)).save(tmp_path / f"data/{name}.png")
    write(tmp_path / "data", {"metadata.jsonl": lines({"image_file_name": "a.png", "mask_file_name": "a_mask.png"})})
    assert [*raw_rows(tmp_path, dataset_name=str(tmp_path / "data"))[0].values] == ["image", "mask"]
    assert "warning:" not in capfd.readouterr().err
