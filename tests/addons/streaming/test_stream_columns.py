"""Columns of a stream: `encode` gets what it gets of prepared rows."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.config.errors import UsageError
from engine.config.find_addons import run_config
from engine.plan.dataset import prepare_datasets
from engine.rows import file_parts
from tests.engine.rows.test_read import (
    BAD_LINES,
    CHAT,
    SAME,
    Reader,
    both,
    check_values_of_json,
    jsonl,
    parquet,
    without_nulls,
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
        for block, rows in enumerate(shards.blocks(shard)):
            shards.prepare(rows, shard, block, 0)
    return shards.task.seen


@pytest.mark.parametrize("part", [40, 4 << 20])
def test_values_of_json_are_those_of_the_file(tmp_path, monkeypatch, part):
    """A column may come late, and change its type."""
    monkeypatch.setattr(file_parts, "PART", part)
    check_values_of_json(tmp_path, seen)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_row_without_the_column_that_is_read_is_named(tmp_path, kind):
    tokenizer = kit.tiny_tokenizer(tmp_path / "tokenizer", ["def return self"])
    fields = {"tokenizer_name": tokenizer, "model_config": kit.write_yaml(tmp_path / "gpt2.yaml", kit.EXACT)}
    fields |= {"cache_dir": tmp_path / "cache", "per_device_batch_size": 1}
    files = [tmp_path / f"{i}.{kind}" for i in range(2)]
    for file, rows in zip(files, ([{"text": "def return", "n": 1}], [{"n": 1}]), strict=True):
        if kind == "csv":
            file.write_text(",".join(rows[0]) + "\n" + ",".join(map(str, rows[0].values())) + "\n")
        elif kind == "jsonl":
            kit.write_jsonl(file, rows)
        else:
            pq.write_table(pa.Table.from_pylist(rows), file)
    _, splits = kit.open_data(train_file=list(map(str, files)), **fields, **STREAM)
    shards = splits["train"].shards
    with pytest.raises(UsageError, match=rf"1.{kind}, (line 1|line 2|row 0): train data: `text` holds nothing"):
        shards.prepare(next(shards.blocks(1)), 1, 0, 0)


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
def test_values_of_tables_are_those_of_each_file(tmp_path, name):
    files = parquet(tmp_path, *SAME[name])
    expected = [without_nulls(value) for column in SAME[name] for value in column.to_pylist()]
    for fields in both(files):
        assert seen(tmp_path, ("c",), **fields) == {"c": expected}


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
    [raw] = shards.blocks(0)
    assert len(shards.prepare(raw, 0, 0, 0)) == 2


@pytest.mark.parametrize("columns", [{}, {"conversations": "chat", "system": "before"}])
def test_conversations_and_their_system_column_are_read_as_from_prepared_data(tmp_path, columns):
    """Also where the run file names them."""
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
    [raw] = shards.blocks(0)
    streamed = [row["labels"].tolist() for _, row, _ in shards.prepare(raw, 0, 0, 0)]
    assert sorted(streamed) == sorted(row["labels"].tolist() for row in kit.all_rows(prepared["train"]))
    assert streamed[0] != streamed[1]
    plan = splits["train"].stats["row_description"]
    assert plan.startswith("`conversations` as chats: loss on the assistant's turns")
    assert ("(`conversations` is the column `chat`)" in plan) == bool(columns)
