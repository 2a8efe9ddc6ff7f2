"""make chat and make predict: answers of a run through its chat template, driven by a pipe and on two processes."""

import json
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from addons.tools.predict import empty_reasoning, prompt_of_row
from engine.config.errors import UsageError
from engine.rows.prompts import last_answer
from tests.helpers import kit

TURNS = [{"role": "user", "content": "one red"}, {"role": "assistant", "content": "cat"}]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a few chats, after which the model answers with cats."""
    folder = tmp_path_factory.mktemp("chats")
    numbers = {"one": 1, "two": 2, "five": 5}
    rows = []
    for i in range(60):
        number, other = list(numbers)[i % 3], ["red", "fox", "the"][i % 4 - 1]
        question, answer = f"{number} {other}", " ".join(["cat"] * numbers[number])
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    texts = ["one two five red fox the cat cat user assistant system"] * 9
    fields = {
        "train_file": kit.write_jsonl(folder / "train.jsonl", rows),
        "tokenizer_name": kit.tiny_tokenizer(folder / "tokenizer", texts, chat_template=kit.CHATML),
        "model_config": kit.write_yaml(folder / "gpt2.yaml", {k: v for k, v in kit.EXACT.items() if k != "vocab_size"}),
        "cache_dir": folder / "cache",
        "dtype": "float64",
        "learning_rate": 1e-2,
        "max_steps": 40,
        "global_batch_size": 30,
        "per_device_batch_size": 30,
        "per_device_eval_batch_size": 2,
    }
    return kit.run_training(1, folder / "run", *kit.flags(**fields))


def answer_by_hand(trained, prompt, max_new_tokens: int) -> str:
    """Return what final/ answers to a chat or continues a text with, by transformers itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = trained.folder / "final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    if isinstance(prompt, list):
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        made = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
    return tokenizer.decode(made, skip_special_tokens=True).strip()


def start_chat(trained, *words) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "addons.tools.chat",
        "--checkpoint",
        trained.folder,
        "--max_new_tokens",
        "8",
        *words,
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([str(word) for word in command], cwd=kit.REPOSITORY, text=True, **pipes)


# ---- chat --------------------------------------------------------------------------------------------------------------


def test_chat_keeps_its_turns_and_ends_with_its_input(trained):
    """The second answer depends on the first turns; /new forgets them."""
    system = {"role": "system", "content": "the"}
    first = [system, {"role": "user", "content": "five fox"}]
    answers = [answer_by_hand(trained, first, 8)]
    both = [*first, {"role": "assistant", "content": answers[0]}, {"role": "user", "content": "two red"}]
    answers.append(answer_by_hand(trained, both, 8))
    answers.append(answer_by_hand(trained, [system, {"role": "user", "content": "two red"}], 8))
    assert "cat" in answers[0]
    chat = start_chat(trained, "--system", "the")
    out, errors = chat.communicate("five fox\n\ntwo red\n/new\ntwo red\n", timeout=300)
    assert chat.returncode == 0, errors
    assert [line.strip() for line in out.splitlines()] == answers


def test_ctrl_c_ends_a_chat_and_a_turn_that_does_not_fit_is_an_error(trained):
    chat = start_chat(trained)
    chat.stdin.write("one red\n" + "red " * 400 + "\n")
    chat.stdin.flush()
    assert chat.stdout.readline().strip() == answer_by_hand(trained, TURNS[:1], 8)
    assert "do not fit into the model's 256 positions" in chat.stdout.readline()
    chat.send_signal(signal.SIGINT)
    _, errors = chat.communicate(timeout=300)
    assert chat.returncode == 0, errors
    assert "Traceback" not in errors


# ---- predict -----------------------------------------------------------------------------------------------------------

ROWS = [
    {"messages": TURNS, "id": 3},
    {"prompt": "one", "note": "für"},
    {"prompt": [{"role": "user", "content": "five the"}]},
    {"text": "two fox"},
    {"messages": [{"role": "user", "content": "two fox"}]},
    {"messages": [*TURNS, {"role": "user", "content": "five red"}], "tools": None},
    {"messages": TURNS, "id": 3},
]


def run_predict(trained, folder, rows, world: int = 1, *words):
    file = kit.write_jsonl(folder.with_suffix(".jsonl"), rows)
    argv = ["--checkpoint", trained.folder, "--file", file, "--max_new_tokens", "8", *words]
    return kit.run_command("addons/tools/predict.py", *argv, folder=folder, world=world)


def test_predict_answers_each_row_once_in_order_on_any_number_of_processes(trained, tmp_path):
    prompts = [TURNS[:1], "one", ROWS[2]["prompt"], "two fox", ROWS[4]["messages"], ROWS[5]["messages"], TURNS[:1]]
    expected = [
        row | {"prediction": answer_by_hand(trained, prompt, 8)} for row, prompt in zip(ROWS, prompts, strict=True)
    ]
    made = {}
    for world in (1, 2):
        output = tmp_path / f"answers_{world}.jsonl"
        codes, texts = run_predict(trained, tmp_path / f"rows_{world}", ROWS, world, "--output", output)
        assert codes == [0] * world, texts
        assert "7 answers" in texts[0]
        made[world] = output.read_bytes()
    assert [json.loads(line) for line in made[1].decode().splitlines()] == expected
    assert made[1] == made[2]
    assert list(json.loads(made[1].decode().splitlines()[0])) == ["messages", "id", "prediction"]


def test_default_output_is_in_the_run_folder(trained, tmp_path):
    codes, texts = run_predict(trained, tmp_path / "mine", ROWS[:1])
    assert codes == [0], texts
    assert len((trained.folder / "predictions_mine.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "row, words",
    [
        ("{", "line 2: no JSON"),
        ([1], "line 2: list"),
        ({"answer": "x"}, "line 2: no prompt among answer"),
        ({"prompt": 3}, "line 2: `prompt` holds int"),
        ({"prompt": "one", "prediction": "x"}, "line 2: .*`prediction`"),
        ({"messages": [{"role": "gpt", "content": "x"}]}, "line 2: .*gpt"),
        ({"messages": 5}, "line 2: `messages` holds int"),
        ({"prompt": "red " * 400}, "line 2: .*256 positions"),
    ],
)
def test_bad_rows_are_named_and_nothing_is_written(trained, tmp_path, row, words):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n" + (row if isinstance(row, str) else json.dumps(row)) + "\n")
    output = tmp_path / "answers.jsonl"
    argv = ["--checkpoint", trained.folder, "--file", file, "--output", output]
    codes, texts = kit.run_command("addons/tools/predict.py", *argv, folder=tmp_path / "here")
    assert codes == [2]
    assert "rows.jsonl, " in texts[0]
    assert re.search(words, " ".join(texts[0].split())), texts[0]
    assert not output.exists()


WRITTEN = "{{ mode or '' }}{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}" + kit.CHATML
SHAREGPT = [{"from": "human", "value": "one red"}, {"from": "gpt", "value": "cat"}]
TOOLS = [{"type": "function", "function": {"name": "fox", "description": "", "parameters": {}}}]


def open_task(folder, row: dict, template: str = WRITTEN, **fields):
    """Return a task that trains on a row, and the tokens before the answer that it trains on."""
    texts = ["one two five red fox the cat user assistant system be think"] * 9
    task, splits = kit.open_data(
        train_file=kit.write_jsonl(folder / "train.jsonl", [row] * 2),
        tokenizer_name=kit.tiny_tokenizer(folder / "tokenizer", texts, chat_template=template),
        model_config=kit.write_yaml(folder / "model.yaml", kit.LLAMA),
        **fields,
    )
    [trained] = splits["train"].rows(np.array([0]))
    return task, last_answer(trained["input_ids"], trained["labels"]).ids


@pytest.mark.parametrize(
    "fields, row",
    [
        ({}, {"messages": TURNS, "chat_template_kwargs": {"mode": "fox"}}),
        ({"chat_template_kwargs": '{"mode": "the"}'}, {"messages": TURNS, "chat_template_kwargs": {"mode": "fox"}}),
        ({"chat_template_kwargs": '{"mode": "the"}'}, {"messages": TURNS}),
        ({}, {"messages": json.dumps(TURNS)}),
        ({}, {"messages": SHAREGPT, "tools": json.dumps(TOOLS)}),
        ({"columns": {"system": "sys"}}, {"messages": TURNS, "sys": "be"}),
        ({"columns": {"conversations": "conv"}}, {"conv": SHAREGPT, "system": "be", "tools": [TOOLS[0]["function"]]}),
        ({}, {"conversations": SHAREGPT, "text": "two"}),
        ({"columns": {"tools": "fns"}}, {"prompt": TURNS[:1], "completion": TURNS[1:], "fns": TOOLS}),
        ({"columns": {"system": "system"}}, {"prompt": TURNS[:1], "completion": "cat", "system": "be"}),
        ({}, {"prompt": "one red", "completion": TURNS[1:]}),
        ({}, {"prompt": "one red", "completion": " cat"}),
        (
            {"columns": {"prompt": "question", "completion": "answer"}},
            {"question": TURNS[:1], "answer": TURNS[1:]},
        ),
        ({}, {"instruction": "one", "input": "red", "output": "cat", "history": [["two", "fox"]], "system": "be"}),
        ({}, {"input_ids": [3, 4, 5], "labels": [-100, 4, 5]}),
    ],
)
def test_a_row_is_answered_after_what_stands_before_its_answer_in_training(tmp_path, fields, row):
    if "text" in row:  # training reads it first
        task, expected = open_task(tmp_path, {key: value for key, value in row.items() if key != "text"}, **fields)
    else:
        task, expected = open_task(tmp_path, row, **fields)
    assert prompt_of_row(row, task, "here").ids == expected
    asked = {key: value for key, value in row.items() if key not in ("completion", "answer", "output")}
    for column in {"messages", "conv", "conversations"} & asked.keys():
        turns = asked[column]
        asked[column] = (json.loads(turns) if isinstance(turns, str) else turns)[:1]
    if "input_ids" not in row and row.get("completion") != TURNS[1:]:  # without turns a text is continued
        assert prompt_of_row(asked, task, "here").ids == expected
    if asked.get("prompt") == TURNS[:1]:
        assert prompt_of_row(asked | {"prompt": TURNS}, task, "here").ids == expected


def test_every_format_of_a_chat_has_the_same_prompt_under_a_template_with_reasoning(tmp_path):
    """It is the prompt of the prepared row. An empty block of reasoning is no part of a prediction."""
    rows = [{"messages": TURNS}, {"conversations": SHAREGPT}, {"instruction": "one red", "output": "cat"}]
    task, in_training = open_task(tmp_path, rows[0], chat_template="qwen3")
    prompts = [prompt_of_row(row, task, "here").ids for row in rows]
    decode = task.generation.tokenizer.decode
    assert prompts == [in_training] * 3
    assert decode(prompts[0]).endswith("assistant\n")
    assert empty_reasoning(task) == "<think>\n\n</think>\n\n"
    without = rows[0] | {"chat_template_kwargs": {"enable_thinking": False}}
    assert decode(prompt_of_row(without, task, "here").ids) == decode(in_training) + "<think>\n\n</think>\n\n"


def test_variables_of_a_row_that_are_none_are_refused(tmp_path):
    task, _ = open_task(tmp_path, {"messages": TURNS})
    with pytest.raises(UsageError, match=r"line 2: .*`chat_template_kwargs` of the row is int"):
        prompt_of_row({"messages": TURNS, "chat_template_kwargs": 3}, task, "line 2")


def test_a_text_before_answers_of_turns_is_a_chat(tmp_path):
    """As task preference trains on it."""
    task, expected = open_task(tmp_path, {"messages": TURNS})
    row = {"prompt": "one red", "chosen": TURNS[1:], "rejected": [{"role": "assistant", "content": "fox"}]}
    assert prompt_of_row(row, task, "here").ids == expected


def test_a_task_that_does_not_generate_is_refused(trained, tmp_path):
    argv = ["--task", "text_classification", "--model_name_or_path", trained.folder / "final", "--file", "x.jsonl"]
    codes, texts = kit.run_command("addons/tools/predict.py", *argv, folder=tmp_path / "here")
    assert codes == [2]
    assert "text_classification does not generate" in texts[0]
