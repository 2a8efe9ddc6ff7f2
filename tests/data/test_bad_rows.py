"""Bad data, one kind at a time: refused with file and line, or accepted with a warning; never silently."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets.packaged_modules.json.json import JsonConfig

from src.config.errors import UsageError
from src.data import local_files, prepare, readers, row_errors
from src.data.prepared_split import data_notes, repeated
from src.data.raw_rows import RawRows
from src.data.sources import Source
from src.tasks import causal_lm
from tests.helpers import kit

MAX_LENGTH = 64
GOOD = [{"text": f"def f{i} return self"} for i in range(9)]
IDS = [{"input_ids": [1, 2, 3, i]} for i in range(9)]
ODD = 31337  # stands in the row that is bad, so that its line can be looked up


class Case(NamedTuple):
    files: dict  # content by name: text, bytes, or columns of a parquet file
    message: str | None  # words of the last lines, separated by |; {line} is where ODD stands; None: the run is good
    code: int = 2


def lines(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def among(rows: list, odd: str, at: int = 5, blank: str = "\n") -> str:
    """Return rows as lines with a bad one among them, and a blank one before that."""
    return lines(*rows[:at]) + blank + odd + "\n" + lines(*rows[at:])


EXTRA = {"text": ["def f"] * 9, "n": [ODD] * 9}
PLAIN = {"text": ["def f"] * 9}
NONE = {"text": pa.array([], pa.string())}
CASES = {
    # ---- lines that are not what their file is to hold
    "malformed line of the second file": Case(
        {"a.jsonl": lines(*GOOD), "b.jsonl": among(GOOD, f'{{"text": "{ODD}"')},
        "b.jsonl, line {line}: JSON parse error: Missing a comma",
    ),
    "invalid UTF-8 in jsonl": Case(
        {
            "a.jsonl": lines(*GOOD),
            "b.jsonl": among(GOOD, f'{{"text": "{ODD} \udcff y"}}').encode("utf-8", "surrogateescape"),
        },
        "b.jsonl, line {line}: train data: not UTF-8 text",
    ),
    "invalid UTF-8 in csv": Case(
        {"a.csv": "text\nx def\n", "b.csv": b"text\nx def\ny\n31337 \xe9t\xe9 def\n"},
        "b.csv, line {line}, byte 6: not UTF-8 text",
    ),
    "csv with a field too many": Case(
        {"a.csv": "text,n\nx def,1\n", "b.csv": f"text,n\nx def,1\ny,{ODD},3\n"}, "b.csv, line {line}: 3 fields"
    ),
    # ---- types
    "another type in a late row": Case(
        {"a.jsonl": lines(*GOOD), "b.jsonl": among(GOOD, json.dumps({"text": ODD}), blank="")},
        "b.jsonl, line {line}: |(/text) changed from string to number",
    ),
    "another type in the second file": Case(
        {"a.jsonl": lines(*GOOD), "b.jsonl": lines({"text": ODD}, {"text": 4})},
        "b.jsonl|text: int64|a.jsonl|text: string",
    ),
    "numbers for words in csv": Case({"a.csv": "text,n\nx def,1\n", "b.csv": f"text,n\nx,{ODD}a\n"}, "b.csv|n: |a.csv"),
    "another type in the second parquet": Case(
        {"a.parquet": PLAIN, "b.parquet": {"text": [ODD] * 3}}, "b.parquet|text: int64|a.parquet|text: string"
    ),
    # ---- columns
    "a column more, jsonl": Case({"a.jsonl": lines(*GOOD), "b.jsonl": lines({"text": "x", "n": ODD})}, None),
    "a column fewer, parquet": Case({"a.parquet": EXTRA, "b.parquet": PLAIN}, None),
    "no text, csv": Case(
        {"a.csv": "text,n\nx def,1\n", "b.csv": f"n\n{ODD}\n2\n"},
        "b.csv, line {line}: train data: `text` holds nothing",
    ),
    # ---- nothing where something was expected
    "an empty file among several": Case(
        {"a.jsonl": lines(*GOOD), "b.jsonl": "", "c.jsonl": lines(*GOOD)}, "b.jsonl is empty and skipped", code=0
    ),
    "a parquet without rows first": Case({"a.parquet": NONE, "b.parquet": PLAIN}, "a.parquet |skipped", code=0),
    "a blank jsonl among several": Case(
        {"a.jsonl": lines(*GOOD), "b.jsonl": "\n\n", "c.jsonl": lines(*GOOD)}, "b.jsonl |skipped", code=0
    ),
    "null text": Case(
        {"a.jsonl": lines(*GOOD), "b.jsonl": among(GOOD, f'{{"text": null, "n": {ODD}}}')},
        "b.jsonl, line {line}: train data: `text` holds nothing",
    ),
    "null text in parquet": Case(
        {"a.parquet": PLAIN, "b.parquet": {"text": ["x", "y", None, "z"]}},
        "b.parquet, row 2: train data: `text` holds nothing",
    ),
    "null text in csv": Case(
        {"a.csv": f'text,n\n"x\ndef",1\n,{ODD}\n'}, "a.csv, line {line}: train data: `text` holds nothing"
    ),
    "null throughout the first file, not needed": Case(
        {"a.jsonl": lines(*[row | {"n": None} for row in GOOD]), "b.jsonl": lines({"text": "x", "n": f"{ODD}!"})}, None
    ),
}


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    kit.tiny_tokenizer(folder / "tokenizer", ["def f return self"] * 2)
    kit.write_yaml(folder / "llama.yaml", kit.TINY | {"vocab_size": 400, "n_positions": MAX_LENGTH})
    return folder


def write(folder: Path, files: dict) -> list[Path]:
    for name, content in files.items():
        path = folder / name
        if isinstance(content, dict):
            pyarrow.parquet.write_table(pa.table(content), path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [folder / name for name in files]


def odd_line(files: list[Path]) -> int | None:
    """Return the number of the line where ODD stands, as an editor shows it."""
    for file in files:
        for i, text in enumerate(file.read_bytes().split(b"\n"), 1):
            if str(ODD).encode() in text:
                return i
    return None


def fields_of(tools, **fields) -> dict:
    return {
        "model_config": tools / "llama.yaml",
        "tokenizer_name": tools / "tokenizer",
        "max_length": MAX_LENGTH,
    } | fields


def outcome(tools, folder: Path, capfd, **fields) -> tuple[int, str]:
    """Return what the command does with these files: (exit code, last message or all warnings and notes)."""
    capfd.readouterr()
    try:
        _, splits = kit.open_data(**fields_of(tools, **fields), cache_dir=folder / "cache")
    except UsageError as error:
        return 2, str(error).replace(f"{folder}/", "")
    text = "\n".join([capfd.readouterr().err, *data_notes(splits)])
    return 0, text.replace(f"{folder}/", "")


def check(text: str, code: int, words: str | None, expected: int, line: int | None) -> None:
    assert code == expected, text
    if words is None:
        assert "warning" not in text
        assert "rain data:" not in text
        return
    for word in words.replace("{line}", str(line)).split("|"):
        assert word in text
    if code:  # the message names the user's files, not those in the cache
        assert not any(name in text for name in (".arrow", "cache/", "prepared", "__fragment"))


@pytest.mark.parametrize("name", CASES)
def test_bad_data_is_named_by_file_and_row(tools, tmp_path, capfd, name):
    case = CASES[name]
    files = write(tmp_path, case.files)
    code, text = outcome(tools, tmp_path, capfd, train_file=files)
    check(text, code, case.message, case.code if case.message else 0, odd_line(files))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "txt", "json", "spread", "parquet", "arrow"])
def test_location_of_every_row(tools, tmp_path, kind):
    """Rows 0 … n−1 of several files, with blank lines, quoted line ends and carriage returns among them."""
    files = {
        "jsonl": {
            "a.jsonl": '{"text": "r0"}\r\n\n{"text": "r1"}\n',
            "b.jsonl": '\n\n{"text": "r2"}\n  \n{"text": "r3"}',
        },
        "csv": {"a.csv": 'text,n\n"r0\n\nx",1\n  \n \t\nr1,2\n', "b.csv": 'n,text\r\n\r\n1,"r2\r\n"\r\n2,r3'},
        "txt": {"a.txt": "r0\nr1\u2028x\x0b\n", "b.txt": "r2\r\nr3"},
        "json": {"a.json": '[{"text": "r0"},\n\n{"text": "r1"}]', "b.json": '[{"text": "r2"}, {"text": "r3"}]'},
        "spread": {  # as a formatter leaves them
            "a.json": '{\n  "text": "r0"\n}\n\n{\n  "text": "r1",\n  "n": {\n    "m": 1}\n}\n',
            "b.json": '{\n"text": "r2"\n} {"text": "r3"}\n',
        },
        "parquet": {"a.parquet": {"text": ["r0", "r1"]}, "b.parquet": {"text": ["r2", "r3"]}},
        "arrow": {},
    }[kind]
    paths = write(tmp_path, files)
    if kind == "arrow":  # the two formats that there are
        for name, writer, values in (
            ("a.arrow", pa.ipc.new_stream, ["r0", "r1"]),
            ("b.arrow", pa.ipc.new_file, ["r2", "r3"]),
        ):
            table = pa.table({"text": values})
            with writer(tmp_path / name, table.schema) as out:
                out.write_table(table)
            paths.append(tmp_path / name)
    seen = {}

    def note(self, batch, places):
        for i, value in enumerate(batch["text"]):
            seen[value[:2]] = str(places[i])
        return original(self, batch, places)

    original = causal_lm.Task.encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_lm.Task, "encode", note)
        kit.open_data(**fields_of(tools, train_file=paths), cache_dir=tmp_path / "cache")
    assert sorted(seen) == ["r0", "r1", "r2", "r3"]
    for i in range(4):
        file = paths[i // 2]
        expected = f"row {i % 2}"
        if kind in ("jsonl", "csv", "txt"):
            raw = file.read_bytes()
            before = raw[: raw.index(f"r{i}".encode())].count(b"\n") + 1
            expected = f"line {before}"  # where the row begins
        assert seen[f"r{i}"] == f"{file}, {expected}: train data"


def test_mutant_that_names_another_line(tools, tmp_path, capfd, monkeypatch):
    """The number of the row for that of the line; and no file at all."""
    message = "a.jsonl, line {line}: train data: `text` holds nothing"
    files = write(tmp_path, {"a.jsonl": among(GOOD, f'{{"text": null, "n": {ODD}}}')})
    code, text = outcome(tools, tmp_path, capfd, train_file=files)
    check(text, code, message, 2, odd_line(files))
    monkeypatch.setattr(row_errors, "_rows_of_file", lambda file: (f"line {i + 1}" for i in range(99)))
    code, text = outcome(tools, tmp_path, capfd, train_file=files)
    with pytest.raises(AssertionError):
        check(text, code, message, 2, odd_line(files))
    case = CASES["malformed line of the second file"]
    files = write(tmp_path, case.files)
    for module in ("raw_rows", "readers"):
        monkeypatch.setattr(f"src.data.{module}.describe_file_error", lambda *_: None)
    code, text = outcome(tools, tmp_path, capfd, train_file=files)
    with pytest.raises(AssertionError):
        check(text, code, case.message, 2, odd_line(files))


def test_mixed_types_never_quote_the_good_texts(tools, tmp_path, monkeypatch):
    """`datasets` writes a column of several types as JSON, in quotes: to train on those would be a silent error.

    It does so chunk by chunk (of 10 MiB)."""
    good, bad = lines(*GOOD), among(GOOD, json.dumps({"text": ODD}), blank="")
    monkeypatch.setattr(JsonConfig.__init__, "__defaults__", _with(JsonConfig, "chunksize", len(good)))
    files = write(tmp_path, {"a.jsonl": good + bad})
    fields = fields_of(tools, train_file=files)
    with pytest.raises(
        UsageError, match=rf"{files[-1].name}, line {odd_line(files)}: .*/text.* changed from string to number"
    ):
        task, splits = kit.open_data(**fields, cache_dir=tmp_path / "cache")
        rows = splits["train"].rows(np.arange(len(splits["train"])))
        texts = [task.tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in rows]
        assert texts[9:14] == [row["text"] for row in GOOD[:5]]


def _with(kind, name: str, value) -> tuple:
    """Return the defaults of a dataclass with one of them changed."""
    names = [f.name for f in dataclasses.fields(kind)]
    defaults = list(kind.__init__.__defaults__)
    defaults[names.index(name) - len(names)] = value
    return tuple(defaults)


def test_location_ignores_files_of_other_splits(tools, tmp_path):
    """Rows count from the first file of their own split; the mutant counts through the folder."""
    (tmp_path / "set").mkdir()
    write(tmp_path / "set", {"test.jsonl": lines(*GOOD), "train.jsonl": among(GOOD, f'{{"text": null, "n": {ODD}}}')})
    fields = fields_of(tools, dataset_name=tmp_path / "set")
    with pytest.raises(UsageError, match=r"set/train.jsonl, line 7: train data: `text` holds nothing"):
        kit.open_data(**fields, cache_dir=tmp_path / "cache")


def test_location_in_a_downloaded_file_is_its_url(tmp_path):
    [file] = map(str, write(tmp_path, {"a.jsonl": lines(*GOOD)}))
    source = Source("train_file", "train", (file,), "json", origins={file: "https://host/a.jsonl"})
    assert RawRows(source, None, (file,)).describe_row(3) == "https://host/a.jsonl, line 4: train data"


def test_lines_are_counted_through_blocks(tmp_path, monkeypatch):
    """A long file is parsed in blocks of lines; the mutant counts from the start of the block."""
    (file,) = write(tmp_path, {"a.jsonl": "\n" + among(GOOD * 9, f'{{"text": "{ODD}"', 70)})
    where = f"{file}, line {odd_line([file])}: JSON parse error"
    assert readers.describe_file_error(str(file)).startswith(where)
    monkeypatch.setattr(readers, "BLOCK", 200)
    assert readers.describe_file_error(str(file)).startswith(where)
    monkeypatch.setattr(readers, "enumerate", lambda lines, first=0: enumerate(lines, 1), raising=False)
    assert not readers.describe_file_error(str(file)).startswith(where)


def test_errors_in_json_over_several_lines(tmp_path):
    rows = [json.dumps(row, indent=1) for row in GOOD]
    file, wrong_type = tmp_path / "a.json", "JSON parse error: Column(/text) changed from string to number"
    for odd, message in (
        ('{\n "text": 3\n}', f"row 5: {wrong_type}"),
        ('{\n "text": "x"\n', "row 5: JSON parse error: Missing a comma or '}' after an object member"),
    ):
        file.write_text("\n".join([*rows[:5], odd, *rows[5:]]))
        assert readers.describe_file_error(str(file)) == f"{file}, {message}"
    file.write_text("[" + ",\n".join([*rows[:5], '{"text": 3}']) + "]")
    assert readers.describe_file_error(str(file)) == f"{file}, row 5: {wrong_type}"
    file.write_text("[" + ",\n".join([*rows[:5], '{"text" 3}']) + "]")
    assert readers.describe_file_error(str(file)).startswith(f"{file}, line 16: not valid JSON")
    file.write_text("\n".join(rows))
    assert readers.describe_file_error(str(file)) is None


# ---- rows that are too long, or of nothing -----------------------------------------------------------------------------


def documents(task, split) -> list[list[int]]:
    """Return the token ids of every document of prepared rows, in their order."""
    found = []
    for row in split.rows(np.arange(len(split))):
        ends = np.cumsum(row.get("documents", [len(row["input_ids"])]))
        found += [part.tolist() for part in np.split(row["input_ids"], ends[:-1])]
    return found


def opened(tools, folder, rows, **fields):
    file = kit.write_jsonl(folder / "rows.jsonl", rows)
    return kit.open_data(**fields_of(tools, train_file=file, **fields), cache_dir=folder / "cache")


LONG = [*GOOD, {"text": "def f return self " * 40}, {"text": "return " * 90}]


def counted(stats, task) -> tuple[int, int]:
    """Return how many rows and tokens are to be cut, found by encoding texts one by one."""
    lengths = [len(task.tokenizer(row["text"])["input_ids"]) + 1 for row in LONG]
    return sum(n > MAX_LENGTH for n in lengths), sum(max(0, n - MAX_LENGTH) for n in lengths)


def test_long_rows_are_truncated_and_counted(tools, tmp_path):
    task, splits = opened(tools, tmp_path, LONG)
    whole = [[*task.tokenizer(row["text"])["input_ids"], task.tokenizer.eos_token_id] for row in LONG]
    stats = splits["train"].stats
    assert counted(stats, task)[0] == 2
    assert (stats["rows_cut"], stats["tokens_cut"]) == counted(stats, task)
    assert documents(task, splits["train"]) == [ids[:MAX_LENGTH] for ids in whole]
    share = stats["tokens_cut"] / sum(map(len, whole))
    expected = f"train data: 2 rows were longer than max_length: truncation removed {share:.1%} of all tokens"
    assert data_notes(splits) == [expected]


def nothing_lost(task, split) -> bool:
    whole = [[*task.tokenizer(row["text"])["input_ids"], task.tokenizer.eos_token_id] for row in LONG]
    parts = sorted(ids[i : i + MAX_LENGTH] for ids in whole for i in range(0, len(ids), MAX_LENGTH))
    return sorted(documents(task, split)) == [part for part in parts if len(part) > 1]


def test_packing_splits_long_rows_and_loses_nothing(tools, tmp_path, monkeypatch):
    task, splits = opened(tools, tmp_path, LONG, packing=True)
    assert nothing_lost(task, splits["train"])
    assert splits["train"].stats["rows_cut"] == splits["train"].stats["tokens_cut"] == 0
    assert data_notes(splits) == []
    original = causal_lm.pack  # the mutant: what packers do that keep the first part of a document only

    def first_parts(max_length, batch):
        keep = [i for i, n in enumerate(batch["length"]) if i == 0 or batch["length"][i - 1] < max_length]
        return original(max_length, {name: [values[i] for i in keep] for name, values in batch.items()})

    monkeypatch.setattr(causal_lm, "pack", first_parts)
    (other := tmp_path / "other").mkdir()
    task, splits = opened(tools, other, LONG, packing=True)
    assert not nothing_lost(task, splits["train"])


@pytest.mark.parametrize("packing", [False, True])
def test_empty_rows_are_counted_without_target(tools, tmp_path, packing):
    task, splits = opened(tools, tmp_path, [*GOOD, {"text": ""}, *GOOD, {"text": ""}], packing=packing)
    stats, split = splits["train"].stats, splits["train"]
    assert stats["source_rows"] == 20
    if packing:  # they would fill a place and teach nothing
        assert sum(len(ids) > 1 for ids in documents(task, split)) == len(documents(task, split)) == 18
        return
    assert (len(split), stats["without_target"]) == (20, 2)
    expected = "train data: 2 of 20 rows have no target and are not trained on"
    assert data_notes(splits) == [expected]
    batch = task.collate(split.rows(np.array([8, 9])), True)
    assert batch.weight == len(split.rows(np.array([8]))[0]["input_ids"]) - 1


# ---- evaluation on what is trained on -----------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
def test_validation_rows_in_training_data_are_counted(tools, tmp_path, monkeypatch, packing):
    new = [{"text": f"return x{i} self"} for i in range(4)]
    other = kit.write_jsonl(tmp_path / "other.jsonl", [*new, *GOOD[3:6], {"text": " " + GOOD[0]["text"]}])
    _, splits = opened(tools, tmp_path, GOOD, validation_file=other, packing=packing)
    assert repeated(splits) == (3, 8)
    note = "validation data: 3 of 8 examples checked are also in the training data"
    assert data_notes(splits) == [note]
    if packing:  # the mutant: whole rows are compared, which never are the same
        monkeypatch.setattr(prepare, "_contents", lambda rows: [repr(r).encode() for r in rows["input_ids"]])
        (tmp_path / "mutant").mkdir()
        _, splits = opened(tools, tmp_path / "mutant", GOOD, validation_file=other, packing=True)
        assert repeated(splits)[0] != 3


@pytest.mark.parametrize("name", ["more.csv", "__other/train.jsonl", "extra.jsonl"])
def test_warning_for_unread_files_of_a_folder(tools, tmp_path, capsys, monkeypatch, name):
    folder = tmp_path / "data"
    (folder / name).parent.mkdir(parents=True)
    for file in ("train.jsonl", "test.jsonl", name):
        (folder / file).write_text(lines(*GOOD) if file.endswith("l") else "text\nx\n")
    given = fields_of(tools, dataset_name=folder)
    for _ in range(2):  # the second time, all is prepared
        monkeypatch.setattr(local_files, "_warned", set())
        kit.open_data(**given, cache_dir=tmp_path / "cache")
        message = capsys.readouterr().err
        assert message.count("not read") == 1
        assert f"{folder / name} not read" in message


def test_tokenizer_beside_the_data_is_not_reported_as_unread(tools, tmp_path, capsys):
    folder = tmp_path / "data"
    shutil.copytree(tools / "tokenizer", folder / "tokenizer")
    for file in ("train.jsonl", "test.jsonl"):
        (folder / file).write_text(lines(*GOOD))
    kit.open_data(**fields_of(tools, dataset_name=folder), cache_dir=tmp_path / "cache")
    assert "not read" not in capsys.readouterr().err
