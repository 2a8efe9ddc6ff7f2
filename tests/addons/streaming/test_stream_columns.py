"""Columns of a stream: only those that the task reads are compared; `encode` gets what it gets of prepared rows."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.config.addons import run_config
from engine.config.errors import UsageError
from engine.data import json_reader
from engine.data.dataset import prepare_datasets
from tests.engine.data.test_column_types import (
    BAD_LINES,
    CHAT,
    SAME,
    WITH_CALL,
    Reader,
    both,
    jsonl,
    parquet,
    with_call,
)
from tests.helpers import kit

STREAM = {"streaming": True, "max_steps": 1, "global_batch_size": 1}


def seen(folder, columns, **fields) -> dict[str, list]:
    """Return the values of `columns` that the task gets of a stream."""
    cfg = run_config(cache_dir=str(folder / "cache"), **fields, **STREAM)
    task = type("Columns", (Reader,), {"columns": columns})(cfg, None)
    shards = prepare_datasets(cfg, task)["train"].shards
    shards.task.load()  # without the rows that it has looked at
    for shard in range(len(shards)):
        for block, table in enumerate(shards.blocks(shard)):
            shards.prepare(table, shard, block, 0)
    return shards.task.seen


@pytest.mark.parametrize("chunk", [40, 10 << 20])
def test_values_of_json_are_those_of_the_file(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(json_reader, "CHUNK", chunk)
    late = {"messages": WITH_CALL, "tools": [{"f": None}], "pad": [1, "x"]}
    first = [{"messages": CHAT, "tools": None, "pad": 1}] * 5 + [late]
    files = jsonl(tmp_path, first, [{"messages": CHAT, "tools": "[]"}])
    for fields in both(files):
        values = seen(tmp_path, ("messages", "tools"), **fields)
        assert values == {"messages": [CHAT] * 5 + [WITH_CALL, CHAT], "tools": [None] * 5 + [[{"f": None}], "[]"]}


@pytest.mark.parametrize("values", [(1, "x"), (None, "x"), (1, 1.5), ({"a": 1}, "x")])
def test_column_that_is_not_read_may_change_its_type(tmp_path, monkeypatch, values):
    monkeypatch.setattr(json_reader, "CHUNK", 20)
    one, other = ({"text": "a", "n": value} for value in values)
    for fields in both(jsonl(tmp_path, [one] * 3 + [other], [other])):
        assert seen(tmp_path, ("text",), **fields) == {"text": ["a"] * 5}


@pytest.mark.parametrize("late", ["x", 1.5, 2**70])
def test_late_type_of_a_column_is_refused_with_file_and_line(tmp_path, monkeypatch, late):
    monkeypatch.setattr(json_reader, "CHUNK", 20)
    files = jsonl(tmp_path, [{"n": 1, "m": 1}] * 9 + [{"n": 1, "m": late}, {"n": late, "m": 1}])
    with pytest.raises(UsageError, match=r"0.jsonl, line 11: `n` is .*int64"):
        seen(tmp_path, ("n",), train_file=[str(files[0])])


def test_csv_column_that_is_not_read_may_change_its_type(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.data.csv_reader.ROWS", 2)
    file = tmp_path / "a.csv"
    file.write_text("text,n\na,1\na,2\na,x\n")
    assert seen(tmp_path, ("text",), train_file=[str(file)]) == {"text": ["a"] * 3}
    with pytest.raises(UsageError, match=r"a.csv: `n`: .*'x'"):
        seen(tmp_path, ("n",), train_file=[str(file)])


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_file_without_the_columns_that_are_read_is_refused(tmp_path, kind):
    """It would be a table without columns, and so without rows."""
    files = [tmp_path / f"{i}.{kind}" for i in range(2)]
    for file, rows in zip(files, ([{"text": "a", "n": 1}], [{"n": 1}]), strict=True):
        if kind == "csv":
            file.write_text(",".join(rows[0]) + "\n" + ",".join(map(str, rows[0].values())) + "\n")
        elif kind == "jsonl":
            kit.write_jsonl(file, rows)
        else:
            pq.write_table(pa.Table.from_pylist(rows), file)
    with pytest.raises(UsageError, match=rf"1.{kind}: there is no column `text` among n, but earlier shards have it"):
        seen(tmp_path, ("text",), train_file=list(map(str, files)))
    if kind == "jsonl":
        files[1].write_text("{}\n")
        with pytest.raises(UsageError, match=r"1.jsonl has only rows without a value"):
            seen(tmp_path, ("text",), train_file=list(map(str, files)))


@pytest.mark.parametrize("content", ["\n\n", "[]"])
def test_file_without_rows_is_skipped(tmp_path, content):
    """Training would end at it, and without it the stream is another one, which no checkpoint resumes."""
    files = [kit.write_jsonl(tmp_path / f"{i}.jsonl", [{"text": "a"}]) for i in range(3)]
    files[1].write_text(content)
    assert seen(tmp_path, ("text",), train_file=list(map(str, files))) == {"text": ["a", "a"]}


@pytest.mark.parametrize("line", BAD_LINES)
def test_line_that_is_no_row_is_named(tmp_path, line):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n' + line)
    with pytest.raises(UsageError, match=rf"a\.jsonl, {BAD_LINES[line]}"):
        seen(tmp_path, ("text",), train_file=[str(file)])


@pytest.mark.parametrize("name", SAME)
def test_types_of_files_that_hold_the_same_are_one(tmp_path, name):
    files = parquet(tmp_path, *SAME[name])
    expected = [value for column in SAME[name] for value in column.to_pylist()]
    with_null = [
        [dict.fromkeys(("role", "content", "n")) | turn for turn in chat] for chat in expected if name == "keys"
    ]
    files_alone, folder = (seen(tmp_path, ("c",), **fields) for fields in both(files))
    assert files_alone == {"c": expected}  # a file has its own keys
    assert folder == {"c": with_null or expected}


def test_evaluation_rows_of_another_format_change_nothing(tmp_path):
    """Encoding a shard needs what was chosen for the training data, not for the evaluation data that is read next."""
    train, validation = jsonl(tmp_path, [{"messages": CHAT}] * 2, [{"text": "plain"}] * 2)
    tokenizer = kit.tiny_tokenizer(tmp_path / "tokenizer", ["a b plain"], chat_template=kit.CHATML)
    files = {"train_file": str(train), "validation_file": str(validation), "tokenizer_name": tokenizer}
    config = kit.write_yaml(tmp_path / "gpt2.yaml", kit.EXACT)
    _, splits = kit.open_data(
        model_config=config, cache_dir=tmp_path / "cache", per_device_batch_size=1, **files, **STREAM
    )
    shards = splits["train"].shards
    [table] = shards.blocks(0)
    assert len(shards.prepare(table, 0, 0, 0)) == 2


def test_structs_of_a_later_shard_are_refused(tmp_path):
    """The first shard has no arguments, so a null in those of the second would be written."""
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    pq.write_table(pa.Table.from_pylist([{"messages": CHAT}]), files[0])
    pq.write_table(pa.Table.from_pylist([with_call(x=1), with_call(y=2)]), files[1])
    with pytest.raises(UsageError, match=r"b.parquet: messages: .*structs"):
        seen(tmp_path, ("messages",), train_file=list(map(str, files)))
    assert len(seen(tmp_path, ("messages",), train_file=list(map(str, files[::-1])))["messages"]) == 3


@pytest.mark.parametrize("columns", [{}, {"conversations": "chat", "system": "before"}])
def test_conversations_and_their_system_column_are_read_as_from_prepared_data(tmp_path, columns):
    """Also where the run file names them. A column of the format that a later shard brings is refused."""
    tokenizer = kit.tiny_tokenizer(tmp_path / "tokenizer", ["def return self"], chat_template=kit.CHATML)
    turns = [{"from": "human", "value": "def"}, {"from": "gpt", "value": "return"}]
    names = [columns.get(name, name) for name in ("conversations", "system")]
    rows = [dict(zip(names, (turns, system), strict=True)) for system in ("self", None)]
    fields = {"columns": columns} if columns else {}
    fields |= {"tokenizer_name": tokenizer, "model_config": kit.write_yaml(tmp_path / "gpt2.yaml", kit.EXACT)}
    fields |= {"cache_dir": tmp_path / "cache", "per_device_batch_size": 1}
    [file] = jsonl(tmp_path, rows)
    _, prepared = kit.open_data(train_file=str(file), **fields)
    _, splits = kit.open_data(train_file=str(file), **fields, **STREAM)
    shards = splits["train"].shards
    [table] = shards.blocks(0)
    streamed = [row["labels"].tolist() for _, row, _ in shards.prepare(table, 0, 0, 0)]
    assert sorted(streamed) == sorted(row["labels"].tolist() for row in kit.all_rows(prepared["train"]))
    assert streamed[0] != streamed[1]
    plan = splits["train"].stats["row_description"]
    assert plan.startswith("`conversations` as chats: loss on the assistant's turns")
    assert ("(`conversations` is the column `chat`)" in plan) == bool(columns)
    if columns:  # refused, if the first rows lack them
        return
    files = jsonl(tmp_path, [{"conversations": turns}], rows)
    _, splits = kit.open_data(train_file=list(map(str, files)), **fields, **STREAM)
    with pytest.raises(UsageError, match=f"{files[1].name}.*system"):
        list(splits["train"].shards.blocks(1))
