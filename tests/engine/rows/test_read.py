"""`encode` gets the values of the columns that a task reads as they stand in the file; other columns are not looked at."""

import json
import pickle
from decimal import Decimal

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import task as base
from engine.config.errors import UsageError
from engine.config.find_addons import run_config
from engine.plan.dataset import prepare_datasets
from engine.rows import file_parts, prepared_split, read
from engine.rows.file_parts import File
from tests.helpers import kit

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CALL = {"id": "1", "function": {"name": "f", "arguments": {"x": None, "y": 12345678901234567890, "z": 0.1}}}
WITH_CALL = [CHAT[0], {"role": "assistant", "content": "b", "tool_calls": [CALL], "n": None}]


class Reader(base.Task):
    """A task that keeps the values that `encode` gets."""

    columns = ("text",)

    def load(self):
        self.seen = {name: [] for name in self.columns}

    def fingerprint(self):
        return repr(self.columns)

    def inspect_columns(self, examples, split):
        return list(self.columns), datasets.Features(dict.fromkeys(prepared_split.COUNTS, datasets.Value("int64")))

    def encode(self, batch, locations):
        for name, values in batch.items():
            self.seen[name] += values
        return {name: [1] * len(locations) for name in prepared_split.COUNTS}


def seen(folder, columns, **fields) -> dict[str, list]:
    """Return the values of `columns` that the task gets."""
    cfg = run_config(cache_dir=str(folder / "cache"), **fields)
    task = type("Columns", (Reader,), {"columns": columns})(cfg, None)
    prepare_datasets(cfg, task)
    return task.seen


def both(files) -> list[dict]:
    """Return the fields that name these files, and those that name their folder."""
    return [{"train_file": list(map(str, files))}, {"dataset_name": str(files[0].parent)}]


def jsonl(folder, *files):
    (folder / "data").mkdir(exist_ok=True)
    return [kit.write_jsonl(folder / "data" / f"train-{i}.jsonl", rows) for i, rows in enumerate(files)]


# ---- parts -----------------------------------------------------------------------------------------------------------


def rows_of(parts) -> list:
    """Return (place, values or error) of the rows of parts, as another process reads them."""
    rows = [row for part in parts for row in read.read_part(pickle.loads(pickle.dumps(part)), None, "train data")]
    return [(str(row.place), row.error or row.values) for row in rows]


SPREAD = '{\n"text": "a",\n"n": [\n{\n"m": 1}]\n}\n'  # as `indent=0` writes it


@pytest.mark.parametrize("part", [1, 7, 40, 4 << 20])
@pytest.mark.parametrize("kind", ["jsonl", "spread", "txt", "csv", "list", "parquet", "arrow"])
def test_parts_of_any_size_hold_the_same_rows_and_places(tmp_path, monkeypatch, part, kind):
    """The mutants of a part that begins in a row, and of lines that are counted from its start, would differ."""
    file, texts = tmp_path / f"a.{kind}", [f"row {i}\n" * (i % 3) + "é" for i in range(30)]
    lines = list(range(1, 31))
    unit, name = "line", kind
    if kind == "jsonl":
        file.write_text("\ufeff" + "\n\n".join(json.dumps({"text": text}) for text in texts))
        name, lines = "json", list(range(1, 61, 2))
    elif kind == "spread":
        file.write_text("".join(SPREAD.replace("a", text.replace("\n", "\\n")) for text in texts))
        name, lines = "json", list(range(1, 181, 6))
    elif kind == "txt":
        texts = [text.replace("\n", "\u2028\x0b") for text in texts]
        file.write_bytes("\r\n".join(texts).encode())
        name = "text"
    elif kind == "csv":
        file.write_text("text\n\n" + "\n".join(f'"{text}"' for text in texts))
        lines = [3 + sum(1 + before.count("\n") for before in texts[:i]) for i in range(30)]
    else:
        table = pa.table({"text": texts})
        unit, lines = "row", list(range(30))
        if kind == "list":
            file.write_text(json.dumps([{"text": text} for text in texts]))
            name = "json"
        elif kind == "parquet":
            pq.write_table(table, file, row_group_size=7)
        else:
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=7)
    monkeypatch.setattr(file_parts, "PART", part)
    monkeypatch.setattr(file_parts, "SAMPLE", 5)
    parts = list(read.parts_of_file(File(str(file), name, "a")))
    assert [(place, row["text"]) for place, row in rows_of(parts)] == [
        (f"a, {unit} {line}: train data", text) for line, text in zip(lines, texts, strict=True)
    ]
    assert len(parts) > 3 or part > 40 or kind == "spread"  # which has no place to cut it
    if kind in ("jsonl", "spread", "txt"):  # as a URL is read, and a compressed file
        url = File(f"x://{file}", name, "a")
        of_bytes = list(read.parts_of_file(url, None, lambda path: file.open("rb")))
        assert rows_of(of_bytes) == rows_of(parts)
        assert len(of_bytes) > 3 or part > 40 or kind == "spread"


def test_memory_does_not_hold_a_file_of_lines(tmp_path, monkeypatch):
    """A part names the bytes of its lines, and the process that encodes them reads them."""
    monkeypatch.setattr(file_parts, "PART", 1000)
    file = kit.write_jsonl(tmp_path / "a.jsonl", [{"text": "a" * 90}] * 1000)
    parts = list(read.parts_of_file(File(str(file), "json", "a")))
    assert len(parts) > 50
    assert max(len(pickle.dumps(part)) for part in parts) < 500


def test_long_lines_make_small_parts_and_short_ones_have_limited_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(file_parts, "PART_ROWS", 10)
    file = kit.write_jsonl(tmp_path / "a.jsonl", [{"n": 1}] * 100)
    parts = list(read.parts_of_file(File(str(file), "json", "a")))
    assert max(len(rows_of([part])) for part in parts) <= 11


# ---- JSON ------------------------------------------------------------------------------------------------------------


def check_values_of_json(folder, seen):
    """`seen(folder, columns, **fields)` returns the values of the files, of which some come late or change their type."""
    late = {"messages": WITH_CALL, "tools": [{"f": None}], "pad": [1, "x"]}
    files = jsonl(folder, [{"messages": CHAT, "pad": 1}] * 5 + [late], [{"messages": CHAT, "tools": "[]"}])
    for fields in both(files):
        values = seen(folder, ("messages", "tools"), **fields)
        assert values == {"messages": [CHAT] * 5 + [WITH_CALL, CHAT], "tools": [None] * 5 + [[{"f": None}], "[]"]}


@pytest.mark.parametrize("part", [40, 4 << 20])
def test_values_of_json_are_those_of_the_file(tmp_path, monkeypatch, part):
    """Nulls are None, as what a row lacks, numbers are exact, wherever the first row of a kind comes."""
    monkeypatch.setattr(file_parts, "PART", part)
    check_values_of_json(tmp_path, seen)


@pytest.mark.parametrize(
    "values", [(1, "x"), ("x", 1), (None, "x"), (1, 1.5), ([], [1]), (True, 1), ({"a": 1}, "x"), ([1], ["x"])]
)
def test_column_may_change_its_type(tmp_path, values):
    """`datasets` would refuse the file, or write 1 as text."""
    rows = [[{"text": "a", "n": values[0]}] * 3 + [{"text": "b", "n": values[1]}], [{"text": "c", "n": values[1]}]]
    for fields in both(jsonl(tmp_path, *rows)):
        found = seen(tmp_path, ("text", "n"), **fields)
        assert found == {"text": ["a"] * 3 + ["b", "c"], "n": [values[0]] * 3 + [values[1]] * 2}


BAD_LINES = {
    '{"text": "a"': "line 2: train data: Expecting",
    '{"text": "a", "text": "b"}': "line 2: train data: the key `text` is named twice",
    '["a"]': "line 2: train data: a row must be an object",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_line_that_is_no_row_is_named(tmp_path, line):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "a"}) + "\n" + line)
    with pytest.raises(UsageError, match=rf"a\.jsonl, {BAD_LINES[line]}"):
        seen(tmp_path, ("text",), train_file=[str(file)])


BAD_FILES = {
    b'[{"text": "a", "note": "caf\xe9"}]': "row 0: train data: `note` holds text with half",
    b'[{"text": "a", "note": "\\ud800"}]': "row 0: train data: `note` holds text with half",
    b'{"text": "a", "note": "\\\\ud83d\\ude00"}': "line 1: train data: `note` holds text with half",
    b'["a", "b"]\n["c"]\n': "line 2: train data: the list of rows has ended",
    '{"text": "a"}'.encode("utf-16"): "it is UTF-16",
}


@pytest.mark.parametrize("content", BAD_FILES)
def test_text_that_is_no_unicode_is_refused_where_it_is_read(tmp_path, content):
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=BAD_FILES[content]):
        seen(tmp_path, ("note",), train_file=[str(file)])


def test_bytes_of_a_column_that_nobody_reads(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a", "note": "caf\xe9"}\n' * 3)
    assert seen(tmp_path, ("text",), train_file=[str(file)]) == {"text": ["a"] * 3}


def test_marks_and_line_breaks_within_a_text_file(tmp_path, monkeypatch):
    """A mark within a file is text, wherever the file is cut; a line may end with \\r."""
    file = tmp_path / "a.txt"
    file.write_bytes("".join(f"\ufeff{i}\r{i}\r\n{i}\n" for i in range(9)).encode())
    monkeypatch.setattr(file_parts, "PART", 16)
    monkeypatch.setattr(file_parts, "SAMPLE", 5)
    parts = list(read.parts_of_file(File(str(file), "text", "a")))
    texts = [text for i in range(9) for text in (f"\ufeff{i}", f"{i}", f"{i}")]
    texts[0] = "0"  # after the byte order mark
    rows = rows_of(parts)
    assert len(parts) > 3
    assert [row["text"] for _, row in rows] == texts
    assert [place for place, _ in rows] == [f"a, line {i}: train data" for i in range(1, 28)]


@pytest.mark.parametrize("text", ["\ud800", "a\udc00b"])
def test_half_of_a_surrogate_pair_is_refused_where_it_is_read(tmp_path, text):
    [file] = jsonl(tmp_path, [{"text": "a", "note": "a"}, {"text": "\U0001f600", "note": text}])
    assert seen(tmp_path, ("text",), train_file=[str(file)]) == {"text": ["a", "\U0001f600"]}
    with pytest.raises(UsageError, match=r"train-0.jsonl, line 2: train data: `note` holds text with half"):
        seen(tmp_path, ("note",), train_file=[str(file)])


# ---- Parquet and Arrow -----------------------------------------------------------------------------------------------

TEXT = pa.array(["a", None])
SAME = {  # columns of two files
    "text": (TEXT, TEXT.cast(pa.large_string())),
    "views": (TEXT.cast(pa.string_view()), TEXT),
    "dictionaries": (TEXT, TEXT.dictionary_encode()),
    "integers": (pa.array([1, 2], pa.int32()), pa.array([3, 2**40])),
    "numbers": (pa.array([1, 2**60]), pa.array([0.5, None])),
    "lists": (pa.array([["a"], []]), pa.array([["b"], None], pa.large_list(pa.large_string()))),
    "nothing": (pa.nulls(2), TEXT),
    "keys": (pa.array([CHAT[:1]] * 2), pa.array([[{"role": "user", "n": 1}, {"role": "user", "n": None}]] * 2)),
    "values": (pa.array([{"a": 1}] * 2), pa.array([{"a": "x"}] * 2)),
    "maps": (pa.array([[("a", 1)], None], pa.map_(pa.dictionary(pa.int8(), pa.string()), pa.int64())), TEXT),
}


def parquet(folder, *columns):
    """Return files with these columns `c`, and a column of other types in each."""
    (folder / "data").mkdir(exist_ok=True)
    files = [folder / "data" / f"train-{i}.parquet" for i in range(2)]
    for file, column, unread in zip(files, columns, (pa.array(["x", "y"]), pa.array([1, 2])), strict=True):
        pq.write_table(pa.table({"c": column, "unread": unread}), file)
    return files


def without_nulls(value):
    """Return the value of a column: in lists of structs a key that holds nothing is not there."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [{key: each for key, each in item.items() if each is not None} for item in value]
    return value


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", SAME)
def test_values_of_tables_are_those_of_each_file(tmp_path, name, swapped):
    columns = SAME[name][::-1] if swapped else SAME[name]
    files = parquet(tmp_path, *columns)
    expected = [without_nulls(value) for column in columns for value in column.to_pylist()]
    for fields in both(files):
        assert seen(tmp_path, ("c",), **fields) == {"c": expected}


def test_column_that_is_there_twice_is_refused(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_arrays([TEXT, TEXT], names=["text", "text"]), file)
    with pytest.raises(UsageError, match=r"a\.parquet: the column `text` is there twice"):
        seen(tmp_path, ("text",), train_file=[str(file)])


def test_arrow_files_with_other_types(tmp_path):
    for i, column in enumerate((TEXT, TEXT.cast(pa.large_string()))):
        with pa.ipc.new_file(tmp_path / f"{i}.arrow", pa.schema([("text", column.type)])) as writer:
            writer.write_table(pa.table({"text": column}))
    files = [str(tmp_path / f"{i}.arrow") for i in range(2)]
    assert seen(tmp_path, ("text",), train_file=files) == {"text": ["a", None] * 2}


def with_call(**arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [CHAT[0], {"role": "assistant", "content": "b", "tool_calls": [call]}]}


def test_null_below_arguments_of_structs_is_refused(tmp_path):
    """Parquet has all keys in all rows, so it may be written or not; in a .jsonl file it is written."""
    file = tmp_path / "a.parquet"
    for rows, is_bad, is_fixed in (
        ([with_call(x=1)] * 2, False, False),
        ([with_call(x=1), with_call(y=2)], True, False),
        ([with_call(x=1), with_call(y=2)], True, True),
    ):
        table = pa.Table.from_pylist(rows)
        if is_fixed:  # lists of two structs
            kind = pa.list_(table.schema.field("messages").type.value_type, 2)
            table = pa.table({"messages": pa.array([row["messages"] for row in rows], kind)})
        pq.write_table(table, file)
        if is_bad:
            with pytest.raises(UsageError, match=r"a.parquet, row 0: .*arguments in `messages` has null for y"):
                seen(tmp_path, ("messages",), train_file=[str(file)])
        else:
            found = seen(tmp_path, ("messages",), train_file=[str(file)])
            assert found == {"messages": [row["messages"] for row in rows]}


@pytest.mark.parametrize("first", [["x", "y"], None])
def test_classes_of_another_file_are_refused(tmp_path, first):
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for file, names in zip(files, (first, ["y", "x"]), strict=True):
        kind = datasets.ClassLabel(names=names) if names else datasets.Value("int64")
        features = datasets.Features(text=datasets.Value("string"), label=kind)
        datasets.Dataset.from_dict({"text": ["a"], "label": [0]}, features).to_parquet(file)
    given = list(map(str, files))
    assert seen(tmp_path, ("text",), train_file=given) == {"text": ["a", "a"]}
    with pytest.raises(UsageError, match=r"b.parquet: `label` has the classes \['y', 'x'\]"):
        seen(tmp_path, ("label",), train_file=given)


def test_fractions_of_decimals_are_no_ids(tmp_path):
    """A cast would make 1 of 1.50."""
    config = kit.write_yaml(tmp_path / "gpt2.yaml", kit.EXACT)
    for number, rest in (("1.50", None), ("1.00", [1, 2])):
        ids = pa.array([[Decimal(number), Decimal("2.00")]], pa.list_(pa.decimal128(10, 2)))
        pq.write_table(pa.table({"input_ids": ids}), tmp_path / "a.parquet")
        fields = {"model_config": config, "train_file": tmp_path / "a.parquet", "cache_dir": tmp_path / "cache"}
        if rest is None:
            with pytest.raises(UsageError, match=r"a.parquet, row 0: .*not whole"):
                kit.open_data(**fields)
        else:
            assert kit.open_data(**fields)[1]["train"].rows(np.array([0]))[0]["input_ids"].tolist() == rest


# ---- types are the task's business -----------------------------------------------------------------------------------


def labels_of(tmp_path, *files, suffix="jsonl") -> list[str]:
    """Return the names of the labels that a classifier finds in files of these labels."""
    kit.need_task("text_classification")
    bert = kit.write_yaml(tmp_path / "bert.yaml", {"model_type": "bert", "hidden_size": 16, "num_attention_heads": 2})
    tokenizer = kit.tiny_tokenizer(tmp_path / "tokenizer", ["a b"])
    paths = [tmp_path / f"{i}.{suffix}" for i in range(len(files))]
    for path, labels in zip(paths, files, strict=True):
        if suffix == "csv":
            path.write_text("text,label\n" + "".join(f"a,{label}\n" for label in labels))
        else:
            kit.write_jsonl(path, [{"text": "a", "label": label} for label in labels])
    names = {"task": "text_classification", "model_config": bert, "tokenizer_name": tokenizer}
    task, _ = kit.open_data(**names, train_file=paths, cache_dir=tmp_path / "cache")
    return task.labels


@pytest.mark.parametrize("other", ["0", True, [1]])
def test_labels_of_several_types_are_named_with_both_lines(tmp_path, other):
    two = r"1.jsonl, line 2: train data: `label` holds a .*, and a number in \S+0.jsonl, line 1: "
    message = r"1.jsonl, line 2: train data: `label` holds a list, and several labels" if other == [1] else two
    with pytest.raises(UsageError, match=message):
        labels_of(tmp_path, [1, 0], [1, other])


def test_labels_that_are_integers_are_sorted_by_value(tmp_path):
    """Also in CSV files, whose cells are text; 01 is another name than 1."""
    assert labels_of(tmp_path, [10, 9, 2]) == ["2", "9", "10"]
    assert labels_of(tmp_path, [10, 9, "01", 1, 2], suffix="csv") == ["01", "1", "2", "9", "10"]
    assert labels_of(tmp_path, [10, 9, "x"], suffix="csv") == ["10", "9", "x"]
