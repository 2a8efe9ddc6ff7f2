"""Files that `datasets` and pandas would misread silently: read correctly, or refused with file and line, in every mode."""

import os

import datasets
import numpy as np
import pytest

from src.config.errors import UsageError
from src.data.readers import install
from tests.helpers import kit
from tests.helpers.served_data import open_served

BOM = b"\xef\xbb\xbf"
GOOD = {
    "plain.csv": b"text,n\nab,1\ncd,2\n",
    "bom.csv": BOM + b"text,n\nab,1\ncd,2\n",
    "quoted.csv": b'"text",n\r\n"ab",1\r\n\r\n  \r\ncd,"2"\r\n',
    "cr.csv": b"text,n\rab,1\rcd,2\r",
    "bom.txt": BOM + b"ab\ncd\n",
    "cr.txt": b"ab\rcd\r",
    "crlf.txt": b"ab\r\ncd",
    "bom.jsonl": BOM + b'{"text": "ab"}\n{"text": "cd"}\n',
    "bom.json": BOM + b'[{"text": "ab"}, {"text": "cd"}]',
    "cr.jsonl": b'{"text": "ab"}\r{"text": "cd"}\r',
}
BAD = {  # contents, and the message after the name of the file
    "trailing.csv": (b"text,n\nab,1,\ncd,2,\n", "line 2: 3 fields"),
    "extra.csv": (b"text,n\n7,ab,1\n8,cd,2\n", "line 2: 3 fields"),
    "two.csv": (b"text\nx,ab,1\ny,cd,2\n", "line 2: 3 fields"),
    "late.csv": (b"text,n\n" + b"ab,1\n" * 10_100 + b"cd,2,\n", "line 10102: 3 fields"),
    "few.csv": (b"id,text\n1,ab\n2\n", "line 3: 1 fields"),
    "twice.csv": (b"text,text\nab,cd\n", "line 1: the column `text` is named twice"),
    "swallowed.csv": (b'text,n\nab,1\n"cd,2\nef,3\n', "line 3: not valid CSV"),
    "stray.csv": (b'text,n\n"ab" and more,1\n', "line 2: not valid CSV"),
    "nul.csv": (b"text,n\nab,1\nc\0d,2\n", "line 3: holds a NUL"),
    "utf16.csv": ("text\nab\n".encode("utf-16"), "line 1, byte 0: not UTF-8"),
    "utf16.txt": ("ab\ncd\n".encode("utf-16"), "line 1, byte 0: not UTF-8"),
    "utf16.jsonl": ('{"text": "ab"}\n'.encode("utf-16"), "line 1, byte 0: not UTF-8"),
}
NAMELESS = {"no_header.csv": b"ab,1\ncd,2\n", "semicolons.csv": b"text;n\nab;1\ncd;2\n"}


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    kit.tiny_tokenizer(folder / "tokenizer", ["def return self"] * 2)
    kit.write_yaml(folder / "llama.yaml", kit.LLAMA)
    return folder


def texts_of(tools, folder, **fields) -> list[str]:
    """Return the text of all rows, in order of a text, opened in this process."""
    fields = {"model_config": tools / "llama.yaml", "tokenizer_name": tools / "tokenizer", "append_eos": False} | fields
    task, splits = kit.open_data(cache_dir=folder / "cache", **fields)
    split = splits["train"]
    return sorted(task.tokenizer.decode(row["input_ids"]) for row in split.rows(np.arange(len(split))))


def put(folder, name: str, content: bytes):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


MODES = ("file", "folder")


def given(folder, name: str, content: bytes, mode: str) -> dict:
    """Return the fields that name this file, or a folder with it."""
    file = put(folder / "data", name, content)
    return {"dataset_name": folder / "data"} if mode == "folder" else {"train_file": file}


@pytest.mark.parametrize("mode", MODES)
def test_good_files_are_read_correctly(tools, tmp_path, mode):
    for name, content in GOOD.items():
        found = texts_of(tools, tmp_path, **given(tmp_path / name, name, content, mode))
        assert found == ["ab", "cd"], name


@pytest.mark.parametrize("mode", MODES)
def test_broken_files_are_refused_with_line(tools, tmp_path, mode):
    for name in BAD if mode == "file" else ("late.csv", "twice.csv", "swallowed.csv"):
        content, message = BAD[name]
        with pytest.raises(UsageError) as caught:
            texts_of(tools, tmp_path, **given(tmp_path / name, name, content, mode))
        assert f"{name}, {message}" in str(caught.value), name


@pytest.mark.parametrize("name", NAMELESS)
def test_csv_without_header_or_with_semicolons_is_refused(tools, tmp_path, name):
    with pytest.raises(UsageError, match=r"no usable column among (ab, 1|text;n)"):
        texts_of(tools, tmp_path, **given(tmp_path, name, NAMELESS[name], "file"))


def test_broken_csv_behind_http_is_refused(hub, tools, tmp_path):
    for name in ("bom.csv", "trailing.csv", "late.csv"):
        content, message = BAD.get(name) or (GOOD[name], None)
        put(hub.folder / "files", name, content)
        fields = {"tokenizer_name": tools / "tokenizer", "model_config": tools / "llama.yaml"}
        outcome = open_served(hub, tmp_path, f"{hub.files_url}/{name}", len, streaming=False, **fields)
        assert outcome == 2 if message is None else f"{hub.files_url}/{name}, {message}" in outcome, outcome


@pytest.mark.parametrize("name", ["trailing.csv", "twice.csv", "few.csv", "nul.csv"])
def test_mutant_without_checks_accepts_broken_files(tools, tmp_path, name):
    """The reason for the checks; this fails if `datasets` changes."""
    install()
    from datasets.packaged_modules.csv.csv import Csv

    checked, file = Csv._generate_tables, put(tmp_path, name, BAD[name][0])
    try:
        Csv._generate_tables = Csv.unchecked_tables
        rows = list(datasets.load_dataset("csv", data_files=[str(file)], split="train", streaming=True))
    finally:
        Csv._generate_tables = checked
    assert len(rows) in (1, 2)


def test_csv_dialect_of_a_dataset_card(tools, tmp_path):
    card = "---\nconfigs:\n- config_name: default\n  data_files: a.csv\n  sep: ';'\n  skiprows: 1\n---\n"
    put(tmp_path / "data", "README.md", card.encode())
    fields = given(tmp_path, "a.csv", b"written by hand\ntext;n\nab;1\ncd;2\n", "folder")
    assert texts_of(tools, tmp_path, **fields) == ["ab", "cd"]


# ---- what is named and cannot be read --------------------------------------------------------------------------------


def odd_files(folder) -> dict[str, str]:
    """Make unreadable files, each beside a good one in its own folder; return how a message describes them."""
    message = {"dangling": "(a symlink to", "loop": "(a symlink to", "pipe": "is not a regular file"}
    for name in message:
        put(folder / name, "good.jsonl", b'{"text": "ab"}\n')
    (folder / "dangling/a.jsonl").symlink_to(folder / "nowhere.jsonl")
    (folder / "loop/a.jsonl").symlink_to(folder / "loop/a.jsonl")
    os.mkfifo(folder / "pipe/a.jsonl")
    return message


@pytest.mark.parametrize("mode", MODES)
def test_unreadable_files_are_named(tools, tmp_path, mode):
    for name, message in odd_files(tmp_path).items():
        fields = {"train_file": tmp_path / name / "*.jsonl"}
        if mode == "folder":
            fields = {"dataset_name": tmp_path / name}
        with pytest.raises(UsageError) as caught:
            texts_of(tools, tmp_path, **fields)
        assert f"{tmp_path / name}/a.jsonl" in str(caught.value)
        assert message in str(caught.value)


def test_folders_matching_a_glob_are_refused(tools, tmp_path):
    put(tmp_path / "data", "a.jsonl", b'{"text": "ab"}\n')
    put(tmp_path / "data/more", "b.jsonl", b'{"text": "cd"}\n')
    for pattern in ("data/*", "data"):
        with pytest.raises(UsageError, match="is a folder"):
            texts_of(tools, tmp_path, train_file=tmp_path / pattern)
    assert texts_of(tools, tmp_path, train_file=tmp_path / "data/**") == ["ab", "cd"]
    put(tmp_path / "data/parts.jsonl", "part-0.jsonl", b'{"text": "ef"}\n')
    with pytest.raises(UsageError, match=r"parts\.jsonl is a folder"):
        texts_of(tools, tmp_path, train_file=tmp_path / "data/**/*.jsonl")


def test_linked_folders_in_a_dataset_folder_are_refused(tools, tmp_path):
    put(tmp_path / "data", "a.jsonl", b'{"text": "ab"}\n')
    put(tmp_path / "other", "b.jsonl", b'{"text": "cd"}\n')
    (tmp_path / "data/c.jsonl").symlink_to(tmp_path / "other/b.jsonl")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert texts_of(tools, tmp_path, dataset_name=tmp_path / "link") == ["ab", "cd"]
    (tmp_path / "data/more").symlink_to(tmp_path / "other")  # `datasets` would leave its files out
    with pytest.raises(UsageError, match="data/more is a symlink to a folder"):
        texts_of(tools, tmp_path, dataset_name=tmp_path / "data")


def test_new_file_with_an_old_time_is_read_again(tools, tmp_path):
    for content in (b'{"text": "ab"}\n', b'{"text": "cd"}\n', b'{"text": "cd"}\n{"text": "ef"}\n'):
        file = put(tmp_path / "data", "a.jsonl", content)
        os.utime(file, ns=(10**18, 10**18))  # as `cp -p` and `tar` do
        expected = [line.split('"')[3] for line in content.decode().splitlines()]
        assert texts_of(tools, tmp_path, train_file=file) == expected
        assert texts_of(tools, tmp_path, dataset_name=tmp_path / "data") == expected
