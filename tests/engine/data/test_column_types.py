"""Columns have one type in all rows and files; what has none is JSON text; only columns that the task reads are refused."""

import json
from decimal import Decimal

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import task as base
from engine.config.addons import run_config
from engine.config.errors import UsageError
from engine.data import column_types, json_reader, prepared_split
from engine.data.dataset import prepare_datasets
from engine.text.chat_turns import find_structs
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


# ---- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [40, 10 << 20])
def test_values_of_json_are_those_of_the_file(tmp_path, monkeypatch, chunk):
    """Absent keys stay absent, nulls are None, numbers are exact, wherever the first row of a kind comes."""
    monkeypatch.setattr(json_reader, "CHUNK", chunk)
    late = {"messages": WITH_CALL, "tools": [{"f": None}], "pad": [1, "x"]}
    files = jsonl(
        tmp_path, [{"messages": CHAT, "tools": None, "pad": 1}] * 5 + [late], [{"messages": CHAT, "tools": "[]"}]
    )
    for fields in both(files):
        values = seen(tmp_path, ("messages", "tools"), **fields)
        assert values == {"messages": [CHAT] * 5 + [WITH_CALL, CHAT], "tools": [None] * 5 + [[{"f": None}], "[]"]}


def test_mutant_json_of_datasets_rounds_numbers(tmp_path):
    """The reason for JSON text of our own; this fails if `datasets` changes."""
    values = [{"x": 0.1, "y": 2**70}]
    rows = datasets.Dataset(
        pa.table({"m": column_types.json_array(values)}).cast(
            datasets.Features(m=column_types.json_text(column_types.NESTED)).arrow_schema
        )
    )
    with pytest.raises(ValueError, match="too big"):
        rows[:]
    rows = column_types.keep_json_text(rows)
    assert column_types.parse_json(rows[:], rows.features) == {"m": values}


@pytest.mark.parametrize(
    "values", [(1, "x"), ("x", 1), (None, "x"), (1, 1.5), ([], [1]), (True, 1), ({"a": 1}, "x"), ([1], ["x"])]
)
def test_column_that_is_not_read_may_change_its_type(tmp_path, values):
    files = jsonl(
        tmp_path, [{"text": "a", "n": values[0]}] * 3 + [{"text": "b", "n": values[1]}], [{"text": "c", "n": values[1]}]
    )
    for fields in both(files):
        assert seen(tmp_path, ("text",), **fields) == {"text": ["a"] * 3 + ["b", "c"]}


@pytest.mark.parametrize("values", [(1, "x"), (True, 1), ([1], ["x"]), ({"a": 1}, "x")])
def test_column_of_several_types_is_refused_with_file_and_line(tmp_path, values):
    one, other = ([{"n": value}] * 2 for value in values)
    for files, place in (([one + other], "0.jsonl, line 3"), ([one, other], "1.jsonl, line 1")):
        for fields in both(jsonl(tmp_path, *files)):
            with pytest.raises(UsageError, match=rf"{place}: `n` holds .* in .*0.jsonl, line 1"):
                seen(tmp_path, ("n",), **fields)


def test_pyarrow_and_python_read_the_same(tmp_path, monkeypatch):
    """Chunks of plain columns are read by pyarrow, the others by Python."""
    rows = [{"i": 1, "f": 1, "s": "ü", "b": True, "l": [1, 2], "e": [], "n": None}, {"f": 2.5, "l": [], "x": 2**64}]
    file = kit.write_jsonl(tmp_path / "a.jsonl", rows)
    chunks = lambda: list(json_reader._chunks(open(file, "rb"), str(file), 1 << 20))  # noqa: E731, SIM115
    [chunk] = chunks()
    features = chunk.features()
    table = chunk.table(features, casts=False)
    monkeypatch.setattr(json_reader.Chunk, "_arrow_table", lambda self, **options: None)
    assert chunk.features() == features
    assert chunk.table(features, casts=False).equals(table)
    assert table.to_pylist()[1]["x"] == 2.0**64


BAD_LINES = {
    '{"text": "a"': "line 2: Expecting",
    '{"text": "a", "text": "b"}': "line 2: the key `text` is named twice",
    '["a"]': "line 2: a row must be an object",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_line_that_is_no_row_is_named(tmp_path, line):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "a"}) + "\n" + line)
    with pytest.raises(UsageError, match=rf"a\.jsonl, {BAD_LINES[line]}"):
        seen(tmp_path, ("text",), train_file=[str(file)])


# ---- Parquet and Arrow -----------------------------------------------------------------------------------------------

TEXT = pa.array(["a", None])
SAME = {  # columns of two files that hold values of one type
    "text": (TEXT, TEXT.cast(pa.large_string())),
    "views": (TEXT.cast(pa.string_view()), TEXT),
    "dictionaries": (TEXT, TEXT.dictionary_encode()),
    "integers": (pa.array([1, 2], pa.int32()), pa.array([3, 2**40])),
    "numbers": (pa.array([1, 2**60]), pa.array([0.5, None])),
    "lists": (pa.array([["a"], []]), pa.array([["b"], None], pa.large_list(pa.large_string()))),
    "ids": (pa.array([[1], []], pa.list_(pa.int32())), pa.array([[2**40], []])),
    "nothing": (pa.nulls(2), TEXT),
    "keys": (pa.array([CHAT[:1]] * 2), pa.array([[{"role": "user", "n": 1}]] * 2)),
    "values": (pa.array([{"a": 1}] * 2), pa.array([{"a": "x"}] * 2)),
}


def parquet(folder, *columns):
    """Return files with these columns `c`, and a column of other types in each."""
    (folder / "data").mkdir(exist_ok=True)
    files = [folder / "data" / f"train-{i}.parquet" for i in range(2)]
    for file, column, unread in zip(files, columns, (pa.array(["x", "y"]), pa.array([1, 2])), strict=True):
        pq.write_table(pa.table({"c": column, "unread": unread}), file)
    return files


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", SAME)
def test_types_of_files_that_hold_the_same_are_one(tmp_path, name, swapped):
    columns = SAME[name][::-1] if swapped else SAME[name]
    files = parquet(tmp_path, *columns)
    expected = [value for column in columns for value in column.to_pylist()]
    if name == "keys":  # Parquet has the keys of all rows of a file
        keys = ("role", "content", "n")
        expected = [[{key: turn.get(key) for key in keys} for turn in chat] for chat in expected]
    for fields in both(files):
        assert seen(tmp_path, ("c",), **fields) == {"c": expected}


def test_columns_of_parquet_of_several_types_are_refused(tmp_path):
    files = [tmp_path / f"{i}.parquet" for i in range(2)]
    for file, column in zip(files, (["x"], [1]), strict=True):
        pq.write_table(pa.table({"text": column}), file)
    with pytest.raises(UsageError, match=r"1.parquet, row 0: `text` holds .*int64.* but .*string.* in .*0.parquet"):
        seen(tmp_path, ("text",), train_file=list(map(str, files)))


def test_column_of_maps_that_is_not_read_is_accepted(tmp_path):
    """`datasets` has no such type."""
    maps = pa.array([[("a", 1)], None], pa.map_(pa.dictionary(pa.int8(), pa.string()), pa.int64()))
    pq.write_table(pa.table({"text": ["x", "y"], "m": maps}), tmp_path / "a.parquet")
    assert seen(tmp_path, ("text",), train_file=[str(tmp_path / "a.parquet")]) == {"text": ["x", "y"]}
    as_pairs = [[{"key": "a", "value": 1}], None]
    assert seen(tmp_path, ("m",), train_file=[str(tmp_path / "a.parquet")]) == {"m": as_pairs}


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


def test_null_of_structs_that_become_json_text_is_not_written(tmp_path):
    """In one file x is text, in the other a number, so messages are JSON text; there, x and y are null where missing."""
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    pq.write_table(pa.Table.from_pylist([with_call(x="s")]), files[0])
    pq.write_table(pa.Table.from_pylist([with_call(x=1), with_call(y=2)]), files[1])
    for names in (files, files[::-1]):
        joined = column_types.join_features(map(read_features, names))
        assert column_types.is_json_text(joined["messages"], column_types.NESTED)
        assert find_structs(joined, ["messages"]) == (True, True)
    of_jsonl = {"messages": column_types.json_text(column_types.NESTED)}
    assert find_structs(of_jsonl, ["messages"]) == (False, False)  # what is written there is known


def read_features(file):
    return column_types.features_of_schema(pq.read_schema(file))


@pytest.mark.parametrize("text", ["\ud800", "a\udc00b"])
def test_half_of_a_surrogate_pair_is_refused_where_it_is_read(tmp_path, text):
    [file] = jsonl(tmp_path, [{"text": "a", "note": "a"}, {"text": "b", "note": text}])
    assert seen(tmp_path, ("text",), train_file=[str(file)]) == {"text": ["a", "b"]}
    with pytest.raises(UsageError, match=r"train-0.jsonl, line 2: `note` holds text with half"):
        seen(tmp_path, ("note",), train_file=[str(file)])


def test_empty_list_beside_text_is_named_with_its_line(tmp_path):
    [file] = jsonl(tmp_path, [{"text": "a"}, {"text": []}])
    with pytest.raises(UsageError, match=r"line 2: `text` holds an empty list, but text in .*line 1"):
        seen(tmp_path, ("text",), train_file=[str(file)])


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


def test_labels_of_several_types_are_named_with_their_line(tmp_path):
    kit.need_task("text_classification")
    [file] = jsonl(tmp_path, [{"text": "a", "n": 1, "label": 1}, {"text": "b", "n": "x", "label": "0"}])
    bert = kit.write_yaml(tmp_path / "bert.yaml", {"model_type": "bert", "hidden_size": 16, "num_attention_heads": 2})
    tokenizer = kit.tiny_tokenizer(tmp_path / "tokenizer", ["a b"])
    names = {"task": "text_classification", "model_config": bert, "tokenizer_name": tokenizer}
    with pytest.raises(UsageError, match=r"line 2: `label` holds text, but a number in .*line 1"):
        kit.open_data(**names, train_file=file, cache_dir=tmp_path / "cache")
