"""Rows of other trainers: each gives the ids and labels of the same chat written as `messages`, or is refused."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from engine.config.errors import UsageError, said
from engine.rows import foreign_turns
from engine.rows import formats as row_formats
from engine.rows.columns import check_columns, columns_by_name
from engine.rows.encode_rows import Encoder
from engine.rows.prepared_split import describe_rows
from tests.helpers import kit

TEMPLATE = (
    "{% for tool in tools or [] %}<|tool|>{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def turns(*pairs, role="role", text="content") -> list[dict]:
    return [{role: name, text: words} for name, words in pairs]


def from_turns(*pairs) -> list[dict]:
    return turns(*pairs, role="from", text="value")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    kit.tiny_tokenizer(folder / "chats", ["def return self import if else row"] * 3, chat_template=TEMPLATE)
    kit.tiny_tokenizer(folder / "base", ["def return self import if else row"] * 3)
    kit.write_yaml(folder / "gpt2.yaml", kit.EXACT | {"n_positions": 1024})
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder / "chats")


def write(path, rows):
    """Write rows to a file, whose name says how: in .parquet and .arrow, turns are structs with all keys."""
    if path.suffix == ".jsonl":
        return kit.write_jsonl(path, rows)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
        return path
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    return path


def opened(folder, tokenizer="chats", **fields):
    """Return (task, splits) of `train_file`, or of a mixture."""
    given = {"model_config": folder / "gpt2.yaml", "tokenizer_name": folder / tokenizer, "max_length": 1024}
    return kit.open_data(**given | {"cache_dir": folder / "cache"} | fields)


def prepared(folder, rows, kind="jsonl", **fields) -> list[tuple[list, list]]:
    """Return (ids, labels) of rows that are written to a file of this kind and prepared."""
    _, splits = opened(folder, train_file=write(folder / f"rows.{kind}", rows), **fields)
    return [(row["input_ids"].tolist(), row["labels"].tolist()) for row in kit.all_rows(splits["train"])]


def encoded(tokenizer, rows, columns=None) -> list[tuple[list, list]]:
    """Return (ids, labels) of rows as a task gets them of a .jsonl file, without one."""
    columns = columns or {}
    encoder = Encoder(tokenizer, 500, 1024, False, True, [*columns])
    there = columns_by_name(dict.fromkeys(name for row in rows for name in row), columns)
    batch = {name: [row.get(column) for row in rows] for name, column in there.items()}
    first = {name: next((value for value in values if value is not None), None) for name, values in batch.items()}
    encoder.choose(list(batch), "train", first.get)
    made = encoder.encode_batch(batch, [f"row {i}" for i in range(len(rows))])
    return list(zip(made["input_ids"], made["labels"], strict=True))


SYSTEM, USER, ASSISTANT = ("system", "be"), ("user", "def x"), ("assistant", "self für")
MORE = [("user", "if"), ("assistant", "return")]
CHAT = turns(SYSTEM, USER, ASSISTANT, *MORE)
TOOL = {"name": "f", "description": "adds", "parameters": {"type": "object"}}
WRAPPED = {"type": "function", "function": TOOL}
CALL = {"name": "f", "arguments": {"a": 1}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
# name -> rows in this format, the same as messages, `columns` of the run file
SAME = {
    "from and value": (
        [
            {"conversations": from_turns(SYSTEM, ("human", "def x"), ("gpt", "self für"), *MORE)},
            {"conversations": from_turns(("Human", "def x"), ("chatgpt", "self für"))},
        ],
        [{"messages": CHAT}, {"messages": turns(USER, ASSISTANT)}],
        {},
    ),
    "role and content": (
        [{"conversations": turns(SYSTEM, ("human", "def x"), ("bot", "self für"), *MORE)}],
        [{"messages": CHAT}],
        {},
    ),
    "messages with from": (
        [{"messages": from_turns(SYSTEM, ("human", "def x"), ("gpt", "self für"), *MORE)}],
        [{"messages": CHAT}],
        {},
    ),
    "another column": (
        [{"dialogue": turns(SYSTEM, USER, ASSISTANT, *MORE), "text": "no"}],
        [{"messages": CHAT}],
        {"conversations": "dialogue"},
    ),
    "column system": (
        [
            {"conversations": from_turns(("human", "def x"), ("gpt", "self für"), *MORE), "system": "be"},
            {"conversations": from_turns(USER, ASSISTANT), "system": ""},
            {"conversations": from_turns(USER, ASSISTANT), "system": None},
            {"conversations": from_turns(SYSTEM, USER, ASSISTANT), "system": "be"},
        ],
        [{"messages": each} for each in (CHAT, CHAT[1:3], CHAT[1:3], CHAT[:3])],
        {},
    ),
    "tools, calls and results": (
        [
            {
                "conversations": from_turns(USER, ("function_call", json.dumps(CALL)), ("observation", "3"), ASSISTANT),
                "tools": json.dumps([TOOL]),
            },
            {
                "conversations": from_turns(USER, ("function_call", json.dumps([CALL])), ("tool", "3"), ("gpt", "if")),
                "tools": json.dumps([WRAPPED]),
            },
            {
                "conversations": from_turns(USER, ("function-call", json.dumps(CALL)), ("function", "3"), ASSISTANT),
                "tools": "",
            },
        ],
        [
            {"messages": [CHAT[1], CALLING, *turns(("tool", "3"), ASSISTANT)], "tools": json.dumps([WRAPPED])},
            {
                "messages": [CHAT[1], CALLING, *turns(("tool", "3"), ("assistant", "if"))],
                "tools": json.dumps([WRAPPED]),
            },
            {"messages": [CHAT[1], CALLING, *turns(("tool", "3"), ASSISTANT)], "tools": "[]"},
        ],
        {},
    ),
    "turns that are not trained on": (
        [{"conversations": [*from_turns(USER), {"from": "gpt", "value": "if", "weight": 0}, *from_turns(*MORE)]}],
        [{"messages": [CHAT[1], {"role": "assistant", "content": "if", "train": False}, *turns(*MORE)]}],
        {},
    ),
    "Alpaca": (
        [
            {"instruction": "def", "input": "x", "output": "return"},
            {"instruction": "def", "input": "", "output": "return"},
            {"instruction": "def", "input": None, "output": "return"},
        ],
        [
            {"messages": turns(("user", "def\n\nx"), ("assistant", "return"))},
            {"messages": turns(("user", "def"), ("assistant", "return"))},
            {"messages": turns(("user", "def"), ("assistant", "return"))},
        ],
        {},
    ),
    "Alpaca without input": (
        [{"instruction": "def", "output": "return"}],
        [{"messages": turns(("user", "def"), ("assistant", "return"))}],
        {},
    ),
    "Alpaca with system and history": (
        [
            {"instruction": "if", "output": "return", "system": "be", "history": [["def x", "self für"]]},
            {"instruction": "if", "output": "return", "system": None, "history": []},
        ],
        [{"messages": CHAT}, {"messages": CHAT[3:]}],
        {},
    ),
    "question and answer as a chat": (
        [{"system_prompt": "be", "question": "def x", "answer": "self für", "prompt": "no", "completion": "no"}],
        [{"messages": CHAT[:3]}],
        {"instruction": "question", "output": "answer", "system": "system_prompt"},
    ),
    "input and output": (
        [{"input": "def x", "output": "self für"}],
        [{"messages": CHAT[1:3]}],
        {"instruction": "input"},
    ),
    "prompt and completion": (
        [{"prompt": turns(SYSTEM, USER, ASSISTANT, MORE[0]), "completion": turns(MORE[1])}],
        [{"messages": [*CHAT[:2], CHAT[2] | {"train": False}, *CHAT[3:]]}],
        {},
    ),
    "prompt that the completion repeats, and tools": (
        [{"ask": turns(USER), "answer": turns(USER, ASSISTANT), "functions": json.dumps([WRAPPED])}],
        [{"messages": CHAT[1:3], "tools": json.dumps([WRAPPED])}],
        {"prompt": "ask", "completion": "answer", "tools": "functions"},
    ),
    "prompt of text": (
        [
            {"prompt": "def x", "completion": turns(ASSISTANT)},
            {"prompt": "def x", "completion": turns(USER, ASSISTANT)},
        ],
        [{"messages": CHAT[1:3]}] * 2,
        {},
    ),
    "completion of text": (
        [{"prompt": from_turns(SYSTEM, USER), "completion": "self für"}],
        [{"messages": CHAT[:3]}],
        {},
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_rows_equal_the_same_chats_as_messages(folder, tokenizer, name):
    """Also from a Parquet file, in which all turns have the keys of each, some of them null."""
    rows, messages, columns = SAME[name]
    expected = encoded(tokenizer, messages)
    assert all(any(label != -100 for label in labels) for _, labels in expected)
    assert encoded(tokenizer, rows, columns) == expected
    assert prepared(folder, rows, "parquet", columns=columns) == expected


def test_json_and_arrow_files_read_the_same(folder, tokenizer):
    rows, messages, _ = SAME["column system"]
    expected = encoded(tokenizer, messages)
    for kind in ("jsonl", "json", "arrow"):
        assert prepared(folder, rows, kind) == expected


def test_sources_of_a_mixture_may_have_other_formats(folder, tokenizer, tmp_path, capsys):
    """A source without the column that the run file names is read by its other columns, with a warning."""
    kit.write_jsonl(tmp_path / "a.jsonl", [{"dialogue": from_turns(USER, ASSISTANT)}])
    kit.write_jsonl(tmp_path / "b.jsonl", [{"instruction": "def x", "output": "self für"}])
    mixture = {name: {"train_file": str(tmp_path / f"{name}.jsonl")} for name in "ab"}
    _, splits = opened(folder, mixture=mixture, columns={"messages": "dialogue"})
    expected = encoded(tokenizer, [{"messages": CHAT[1:3]}])
    for _, _, part in splits["train"].segments():
        assert [(row["input_ids"].tolist(), row["labels"].tolist()) for row in kit.all_rows(part)] == expected
    assert (
        "`dialogue`, which columns names for messages, is not among the columns instruction, output"
        in capsys.readouterr().err
    )
    plan = describe_rows(splits)
    assert plan.startswith(
        "train a: `messages` as chats: loss on the assistant's turns (`messages` is the column `dialogue`); train b: `instr"
    )


# ---- without a chat template -----------------------------------------------------------------------------------------


LAID_OUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a response "
    "that appropriately completes the request.\n\n### Instruction:\ndef\n\n### Input:\nx\n\n### Response:\n"
)


def test_instructions_without_a_template_are_laid_out_as_alpaca_did(folder, tokenizer, tmp_path):
    base = AutoTokenizer.from_pretrained(folder / "base")
    rows = [
        {"instruction": "def", "input": "x", "output": "return"},
        {"instruction": "def", "input": "", "output": "return", "system": "be"},
        {"instruction": "def", "input": None, "output": "return", "history": []},
    ]
    prompts = [
        LAID_OUT,
        "be\n\n### Instruction:\ndef\n\n### Response:\n",
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\ndef\n\n### Response:\n",
    ]
    expected = [{"prompt": prompt, "completion": "return"} for prompt in prompts]
    assert encoded(base, rows) == encoded(base, expected)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)  # with the field, as with a template of the tokenizer
    messages = [{"messages": turns(("user", "def\n\nx"), ("assistant", "return"))}]
    with_field = prepared(folder, rows[:1], tokenizer="base", chat_template=tmp_path / "chat.jinja")
    assert with_field == encoded(tokenizer, messages)
    for part in ({"history": [["def", "x"]]}, {"tools": json.dumps([TOOL])}):
        with pytest.raises(UsageError, match=f"row 1: `{next(iter(part))}` of an instruction needs a chat template"):
            encoded(base, [rows[0], rows[0] | part])


# ---- mutants ---------------------------------------------------------------------------------------------------------


def mutant_without_input(row, part, is_optional=False):
    return "" if part == "input" else row[part]


def mutant_without_system(messages, system):
    return messages, ""


def mutant_that_trains_prompts(prompt, completion, names):
    return prompt, completion


def mutant_that_trains_humans(messages, name, other_roles=False):
    named = foreign_turns.read_turns(messages, name, other_roles)
    return [turn | {"role": "assistant"} if turn["role"] == "user" else turn for turn in named]


@pytest.mark.parametrize(
    "name, function, mutant",
    [
        ("Alpaca", "_text", mutant_without_input),
        ("column system", "with_system", mutant_without_system),
        ("prompt and completion", "split_prompt", mutant_that_trains_prompts),
        ("from and value", "read_turns", mutant_that_trains_humans),
    ],
)
def test_mutants_are_caught(tokenizer, monkeypatch, name, function, mutant):
    rows, messages, _ = SAME[name]
    expected = encoded(tokenizer, messages)
    assert encoded(tokenizer, rows) == expected
    monkeypatch.setattr(row_formats, function, mutant)
    assert encoded(tokenizer, rows) != expected


# ---- rows and columns that are refused -------------------------------------------------------------------------------


HUMAN, GPT = {"from": "human", "value": "def"}, {"from": "gpt", "value": "if"}
ALPACA = {"instruction": "def", "output": "if"}


@pytest.mark.parametrize(
    "row, words",
    [
        ({"conversations": [HUMAN, {"from": "narrator", "value": "x"}]}, "turn 1 has the role 'narrator'"),
        (
            {"conversations": [HUMAN, {"from": "function", "value": "x"}]},
            "turn 1 has the role 'function'.*function_call",
        ),
        ({"conversations": [HUMAN, {"from": "function_call", "value": "f(x)"}]}, "turn 1 is a function_call.*not JSON"),
        ({"conversations": [HUMAN, {"from": "function_call", "value": "[]"}]}, "turn 1 is a function_call.*`name`"),
        (
            {"conversations": [HUMAN, {"from": "gpt", "role": "user", "value": "x"}]},
            "turn 1 has `role` 'user' and `from`",
        ),
        ({"conversations": [HUMAN, GPT | {"content": "x"}]}, "turn 1 has `value` and `content`, which differ"),
        ({"conversations": [HUMAN, {"from": "gpt", "value": None}]}, "turn 1 has no role or no content"),
        ({"conversations": [HUMAN, {"value": "x"}]}, "turn 1 has no role or no content"),
        ({"conversations": [HUMAN, GPT | {"images": ["a.png"]}]}, "`conversations` could not.*turn 1 has `images`"),
        ({"conversations": [HUMAN, {"from": "gpt", "value": [{"type": "image"}]}]}, "turn 1 has parts of type image"),
        ({"conversations": [HUMAN, GPT | {"weight": 0.5}]}, "turn 1 has `weight` 0.5"),
        ({"conversations": None}, "not a list of turns"),
        ({"conversations": "def"}, "`conversations`: it is text, but not JSON"),
        ({"conversations": [HUMAN, GPT], "label": False}, "`label` is false"),
        ({"conversations": [HUMAN, GPT], "kto_tag": False}, "`kto_tag` is false"),
        ({"conversations": [HUMAN, GPT], "label": "False"}, "`label` is false"),  # of a CSV
        ({"conversations": [{"from": "system", "value": "be"}, GPT], "system": "do"}, "both system texts, and differ"),
        ({"conversations": [GPT | {"weight": 2}], "system": "do"}, r"turn 1 has `weight` 2.*\(turn 0 is `system`\)"),
        ({"conversations": [HUMAN, GPT], "tools": "f(x)"}, "`tools` of the row is text, but not JSON"),
        (ALPACA | {"output": None}, "`output` holds nothing"),
        (ALPACA | {"instruction": None}, "`instruction` holds nothing"),
        (ALPACA | {"input": [1]}, "`input` holds list, not text"),
        (ALPACA | {"history": [["def"]]}, "`history` has no question with its answer.*place 0"),
        (ALPACA | {"label": False}, "`label` is false"),
        ({"prompt": [], "completion": []}, "`completion` has no turn"),
        ({"prompt": None, "completion": turns(ASSISTANT)}, "`prompt` holds nothing"),
        ({"prompt": turns(USER), "completion": None}, "`completion` holds nothing"),
        ({"prompt": "if", "completion": turns(USER, ASSISTANT)}, "`prompt` is text that no turn of the user"),
        (
            {"prompt": turns(USER, ASSISTANT), "completion": turns(ASSISTANT, USER)},
            "`prompt` ends with a turn of the ass",
        ),
        (
            {"prompt": turns(USER), "completion": [{"role": "gpt", "content": "x"}]},
            "turn 1 has the role 'gpt'.*counted",
        ),
        ({"prompt": turns(USER), "completion": turns(USER)}, "`completion` has no turn after those of `prompt`"),
        ({"messages": turns(USER, ASSISTANT), "images": ["cat.png"]}, "`images` holds a file"),
        ({"conversations": [HUMAN, GPT], "image": "cat.png"}, "`image` holds a file"),
        ({"prompt": "def x", "completion": "y", "videos": ["a.mp4"]}, "`videos` holds a file"),
        (ALPACA | {"audios": ["a.wav"]}, "`audios` holds a file"),
    ],
)
def test_bad_rows_are_refused(tokenizer, row, words):
    good = {"conversations": [HUMAN, GPT], "prompt": turns(USER), "completion": turns(ASSISTANT)} | ALPACA
    good["messages"] = turns(USER, ASSISTANT)
    if isinstance(row.get("prompt"), str):
        good["prompt"] = "def x"  # a column holds one type
    first = {name: good.get(name, True if name in ("label", "kto_tag") else None) for name in row}
    with pytest.raises(UsageError, match=f"row 1: .*{words}"):
        encoded(tokenizer, [first, row])


def test_error_of_a_row_ends_the_run_with_code_2(folder, tmp_path):
    path = kit.write_jsonl(
        tmp_path / "bad.jsonl", [{"chat": [HUMAN, GPT]}, {"chat": [HUMAN, {"from": "x", "value": ""}]}]
    )
    flags = kit.flags(model_config=folder / "gpt2.yaml", tokenizer_name=folder / "chats", train_file=path, max_steps=1)
    codes, texts = kit.run_command("train", *flags, "--columns", "{messages: chat}", "--dry_run", folder=tmp_path)
    assert codes == [2]
    assert "bad.jsonl, line 2: train data: `messages`: turn 1 has the role 'x'" in texts[0]
    assert "(`messages` is the column `chat`)" in texts[0]


def choose(columns, capsys, named) -> tuple[list, str]:
    """Return (the parts that are read, what is printed) for data with these columns."""
    said.clear()
    check_columns(columns, named, "train", is_mixed=False)
    there = columns_by_name(columns, named)
    needed, _ = Encoder(object(), 9, 9, False, True, [*named]).choose([*there], "train", lambda column: None)
    return [name for name in needed if name in there], capsys.readouterr().err


@pytest.mark.parametrize(
    "columns, named, read, ignored",
    [
        ("messages conversations system", {}, "messages", "conversations, system"),
        ("messages conversations system", {"system": "system"}, "messages system", "conversations"),
        ("messages conversations system", {"conversations": "messages"}, "conversations system", "conversations"),
        ("text instruction input output", {}, "text", "instruction, input, output"),
        ("text instruction input output", {"instruction": "instruction"}, "instruction output input", "text"),
        ("prompt completion tools", {}, "prompt completion", "tools"),
        ("instruction input output", {"prompt": "instruction", "completion": "output"}, "prompt completion", "input"),
        ("input_ids labels chat", {"messages": "chat"}, "messages", "input_ids, labels"),
        ("text chosen rejected", {}, "text", "chosen, rejected"),
    ],
)
def test_columns_of_several_formats(capsys, columns, named, read, ignored):
    """What the run file names goes first; what is not read is warned of."""
    needed, printed = choose(columns.split(), capsys, named)
    assert needed == read.split()
    only = named.get(ignored, ", ".join(needed))
    assert f"the columns {ignored} are not used: only {only}" in printed


@pytest.mark.parametrize(
    "columns, named, words",
    [
        (
            "text chat",
            {"messages": "chta"},
            "`chta`, which columns names for messages, is not among the columns text, chat; did",
        ),
        (
            "question text",
            {"prompt": "question"},
            "`completion` is not among the columns .*: give --columns '{completion",
        ),
        (
            "messages",
            {"tools": "functions"},
            "`functions`, which columns names for tools, is not among the columns messages",
        ),
        ("a b", {}, "no usable column among a, b: .*`text`.*`instruction` and `output`.*--columns"),
    ],
)
def test_columns_that_the_data_lacks_are_refused(capsys, columns, named, words):
    with pytest.raises(UsageError, match=words):
        choose(columns.split(), capsys, named)


def test_a_long_chat_is_read_in_linear_time(monkeypatch):
    """Each turn is looked at once, so no count grows faster than the turns."""
    calls = []
    original = foreign_turns._read_turn
    monkeypatch.setattr(foreign_turns, "_read_turn", lambda *turn: calls.append(1) or original(*turn))
    assert len(foreign_turns.read_turns([HUMAN, GPT] * 500, "it")) == len(calls) == 1000


def test_format_of_a_copy(tokenizer):
    """It goes before the formats of the engine where rows have its parts; they stay."""

    def read_question(row):
        return row_formats.ChatRow(turns(("user", row["question"]), ("assistant", row["answer"])), None, None)

    mine = row_formats.Format(("question", "answer"), (), read_question, "questions", True)
    encoder = Encoder(tokenizer, len(tokenizer), 64, False, False, formats=(mine, *row_formats.FORMATS))
    rows = {"question": ["def", "if"], "answer": ["return", "else"]}
    assert encoder.choose([*rows, "text"], "train", lambda column: "x")[0] == [*rows]
    got = encoder.encode_batch(rows, ["row 0", "row 1"])

    chats = [turns(("user", one), ("assistant", other)) for one, other in zip(*rows.values(), strict=True)]
    usual = Encoder(tokenizer, len(tokenizer), 64, False, False)
    usual.choose(["messages"], "train", lambda column: chats[0])
    assert got == usual.encode_batch({"messages": chats}, ["row 0", "row 1"])
    assert encoder.choose(["text"], "train", lambda column: "x")[0] == ["text"]
