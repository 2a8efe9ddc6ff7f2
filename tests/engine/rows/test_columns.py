"""The field `columns`: a task sees each column by the name of its part; other spellings are refused with this one."""

import json

import datasets
import pytest

from engine.config import parsing
from engine.config.errors import UsageError
from engine.find_tasks import OPTIONS
from engine.rows.examples import DatasetExamples
from engine.rows.sources import Source
from tests.helpers import kit

BERT = {"model_type": "bert", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
BERT |= {"num_attention_heads": 4, "max_position_embeddings": 64}
FEATURES = datasets.Features(
    {"a": datasets.Value("string"), "b": datasets.ClassLabel(names=["no", "yes"]), "text": datasets.Value("string")}
)
ROWS = {"a": ["one", "two"], "b": [0, 1], "text": ["x", "y"]}


@pytest.mark.parametrize(
    "columns, seen",
    [
        ({}, ROWS),
        ({"label": "b"}, {"a": ["one", "two"], "label": [0, 1], "text": ["x", "y"]}),
        ({"text": "a"}, {"text": ["one", "two"], "b": [0, 1]}),  # it takes the place of the column of its name
        ({"text": "a", "a": "text"}, {"a": ["x", "y"], "text": ["one", "two"], "b": [0, 1]}),
        ({"text": "a", "pair": "a"}, {"text": ["one", "two"], "pair": ["one", "two"], "b": [0, 1]}),
        ({"text": "nowhere"}, ROWS),  # in a mixture
    ],
)
def test_columns_have_the_names_of_their_parts(columns, seen):
    source = Source("dataset_name", "train", name="rows")
    examples = DatasetExamples(source, datasets.Dataset.from_dict(ROWS, FEATURES), ())
    examples.name_columns(columns, is_mixed=True)
    assert {name: list(examples[name]) for name in examples.column_names} == seen
    assert [list(row.values.values()) for row in examples.rows([*seen])] == [
        *map(list, zip(*seen.values(), strict=True))
    ]
    assert examples.features["label" if "label" in columns else "b"] == FEATURES["b"]
    assert examples.first("text") == seen["text"][0]


@pytest.fixture
def opened(tmp_path):
    """Return (task, splits) of rows to classify."""
    kit.need_task("text_classification")
    fields = {"task": "text_classification", "model_config": kit.write_yaml(tmp_path / "bert.yaml", BERT)}
    fields |= {"tokenizer_name": kit.tiny_tokenizer(tmp_path / "tokenizer", ["good one bad"] * 9)}

    def open_rows(rows, **more):
        return kit.open_data(train_file=kit.write_jsonl(tmp_path / "rows.jsonl", rows), **fields, **more)

    return open_rows


NAMED = [{"review": "good one", "stars": "a"}, {"review": "bad", "stars": "b"}]


def test_rows_equal_those_whose_columns_have_the_names_of_parts(opened):
    _, named = opened(NAMED, columns={"text": "review", "label": "stars"})
    _, plain = opened([{"text": row["review"], "label": row["stars"]} for row in NAMED])
    assert named["train"].stats["rows"] == plain["train"].stats["rows"]


def test_an_error_of_a_row_says_which_column_it_is_about(opened):
    rows = [NAMED[0], NAMED[0] | {"stars": None}, NAMED[1]]
    with pytest.raises(UsageError, match=r"line 2: .*`label` holds nothing.*\(`label` is the column `stars`\)"):
        opened(rows, columns={"text": "review", "label": "stars"})


@pytest.mark.parametrize(
    "columns, words",
    [
        (
            {"txt": "review"},
            "txt is no part of the rows of task text_classification; did you mean text.*text, text_pair, label",
        ),
        (
            {"text": "revew", "label": "stars"},
            "`revew`, which columns names for text, is not among.*did you mean review",
        ),
        ({"text": "review"}, r"there is no column `label` among .*--columns '\{label: NAME\}'"),
    ],
)
def test_other_parts_and_columns_are_refused(opened, columns, words):
    with pytest.raises(UsageError, match=words):
        opened(NAMED, columns=columns)


def test_columns_whose_names_are_numbers():
    cfg, _ = parsing.parse(["--columns", "{text: review, label: 5}"], OPTIONS)
    assert cfg.columns == {"text": "review", "label": "5"}


def test_json_text_stands_for_lists_and_mappings(tmp_path):
    """In each part that has to be one; a prompt that is text is a text."""
    turns = [{"role": "user", "content": "if"}, {"role": "assistant", "content": "else"}]
    template = "{{ mode }}{% for tool in tools or [] %}{{ tool.name }}{% endfor %}" + kit.CHATML
    beside = {"tools": [{"name": "f"}], "chat_template_kwargs": {"mode": "return"}}
    tokenizer = kit.tiny_tokenizer(tmp_path / "tokenizer", ["if else return row"] * 3, chat_template=template)
    model = kit.write_yaml(tmp_path / "gpt2.yaml", kit.EXACT)

    def prepared(row: dict) -> list[list[int]]:
        file = kit.write_jsonl(tmp_path / "rows.jsonl", [row] * 2)
        _, splits = kit.open_data(train_file=file, tokenizer_name=tokenizer, model_config=model)
        return [row[name].tolist() for row in kit.all_rows(splits["train"]) for name in ("input_ids", "labels")]

    for row in (
        {"messages": turns, **beside},
        {"conversations": turns},
        {"instruction": "if", "output": "else", "history": [["row", "else"]]},
        {"input_ids": [3, 4, 5], "labels": [-100, 4, 5], "attention_mask": [1, 1, 1]},
    ):
        as_text = {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}
        assert prepared(as_text) == prepared(row)
    items = {"messages": [json.dumps(turn) for turn in turns], **beside}
    assert prepared(items) == prepared({"messages": turns, **beside})
    assert prepared({"prompt": json.dumps(turns[:1]), "completion": turns[1:]}) != prepared(
        {"prompt": turns[:1], "completion": turns[1:]}
    )
