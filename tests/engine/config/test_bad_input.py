"""Whatever a user gets wrong ends with exit code 2, names what is wrong and the fix, and leaves no file behind.

Errors of the command line and the run file itself: test_config.py; of rows and files: tests/engine/rows/test_bad_rows.py, too.
"""

import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers import kit

GOOD = {  # a run that works; each case below changes one thing
    "model_config": "llama.yaml",
    "train_file": "train.jsonl",
    "output_dir": "run",
    "max_steps": 2,
    "global_batch_size": 8,
    "per_device_batch_size": 4,
}
TEXT = {"tokenizer_name": "tokenizer"}
CHAT = TEXT | {"chat_template": "chat.jinja"}
LABELS = TEXT | {"task": "text_classification"}
SAVED = {"model_config": None, "model_name_or_path": "model"}
FOLDER = {"train_file": None, "dataset_name": "folder"}
SCORES = dict.fromkeys(GOOD) | {"output_dir": "scores"}  # of an evaluation
IDS_ROW = {"input_ids": [1, 2, 3]}
IDS = json.dumps(IDS_ROW) + "\n"
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
USER = {"messages": [{"role": "user", "content": "a"}]}


class Case(NamedTuple):
    expected: str  # parts of the last lines, separated by |
    changed: dict = {}  # flags; None omits one
    files: dict = {}  # what is written to the folder first: see write()


def rows(expected: str, *examples, changed=None, **files) -> Case:
    """Return a case with other rows in train.jsonl."""
    return Case(expected, changed or {}, {"train.jsonl": list(examples)} | files)


def ids(expected: str, input_ids, **columns) -> Case:
    return rows(expected, {"input_ids": input_ids} | columns)


def llama(expected: str, **changed) -> Case:
    """Return a case with another model configuration."""
    return Case(expected, {}, {"llama.yaml": kit.LLAMA | changed})


CASES = {
    "tracker unknown": Case("report_to: |wand|wandb", {"report_to": "wand"}),
    "schedule argument unknown": Case("lr_scheduler_kwargs: |linear|min_lr", {"lr_scheduler_kwargs": '{"min_lr": 1}'}),
    "metric without evaluation": Case("metric_for_best_model|--validation_file", {"metric_for_best_model": "loss"}),
    "run folder": Case("output_dir: /proc/run cannot be written", {"output_dir": "/proc/run"}),
    "run folder with a long name": Case("output_dir: |300 bytes|at most 255", {"output_dir": "c" * 300}),
    "run folder in no home": Case("output_dir: |NOT_SET is not set", {"output_dir": "$NOT_SET/run"}),
    "cache folder": Case("cache_dir: /proc/cache/prepared cannot be created", {"cache_dir": "/proc/cache"}),
    "resume nowhere": Case("resume: nowhere|auto, never", {"resume": "nowhere"}),
    "sample without tokenizer": Case("sample_prompt|--tokenizer_name", {"sample_prompt": "def"}),
    # ---- models and tokenizers
    "model type unknown": llama("llama.yaml|lama", model_type="lama"),
    "model field unknown": llama("hidden_sizes: |did you mean hidden_size?", hidden_sizes=3),
    "shared heads do not divide": llama("LlamaForCausalLM does not run", num_key_value_heads=3),
    "model folder missing": Case("model_name_or_path|./nope|no such folder", SAVED | {"model_name_or_path": "./nope"}),
    "model without weights": Case("model|no file named model.safetensors", SAVED, {"model/model.safetensors": None}),
    "weights of another model": Case("GPT2LMHeadModel", SAVED, {"model/config.json": json.dumps(kit.GPT2)}),
    "tokenizer missing": Case("tokenizer_name: |nowhere|no such folder", {"tokenizer_name": "nowhere"}),
    # ---- files
    "data missing": Case("train_file: no.jsonl: no such file", {"train_file": "no.jsonl"}),
    "unknown extension": Case("a.xyz|.jsonl, .json", {"train_file": "a.xyz"}, {"a.xyz": "text"}),
    "unreachable address": Case("train_file: http://127.0.0.1:9/a.jsonl", {"train_file": "http://127.0.0.1:9/a.jsonl"}),
    "bad line": Case("train.jsonl, line 2: train data: Expecting", {}, {"train.jsonl": IDS + '{"input_ids": [1, 2}\n'}),
    "data folder missing": Case("dataset_name: folder|no such folder", FOLDER),
    # ---- rows
    "text without tokenizer": rows("--tokenizer_name", {"text": "a cat"}),
    "text a number": rows("line 1: train data: `text` holds int", {"text": 5}, changed=TEXT),
    "id outside": rows(
        "line 2: train data: `input_ids` holds 1 to 500|0 to 499", {"input_ids": [1, 2]}, {"input_ids": [1, 500]}
    ),
    "labels of another length": ids("`labels` has 2 values for 3 input_ids", [1, 2, 3], labels=[1, 2]),
    "padding": ids("line 1: train data: `attention_mask` is not 1", [1, 2, 3], attention_mask=[1, 1, 0]),
    "all labels masked": ids("masked (-100)", [1, 2, 3], labels=[-100] * 3),
    "fractions in a later row": rows(
        "line 2: train data: `input_ids` holds a number", IDS_ROW, {"input_ids": [5.5, 6]}
    ),
    "ids as text": ids("line 1: train data: `input_ids` holds str", ["1", "2"]),
    "one id": ids("line 1: train data: `input_ids` holds int", 5),
    "labels of bools": ids("line 1: train data: `labels` holds bool", [1, 2], labels=[True, False]),
    "mask as a number": ids("line 1: train data: `attention_mask` is not 1", [1, 2], attention_mask=1),
    "null in ids": ids("`input_ids` or `labels` is or holds null", [1, None, 3]),
    "chat without template": rows("no chat template|--chat_template", USER, changed=TEXT),
    "chat template unknown": rows(
        "chat_template: chatmll is neither a file|chatml, |did you mean chatml",
        USER,
        changed=TEXT | {"chat_template": "chatmll"},
    ),
    "variable that no template reads": rows(
        "chat_template_kwargs: thinking is not read",
        USER,
        changed=CHAT | {"chat_template_kwargs": '{"thinking": true}'},
        **{"chat.jinja": TEMPLATE},
    ),
    "template that hides a text": rows(
        "line 1: train data: |does not write the content of turn 0",
        USER,
        changed=CHAT,
        **{"chat.jinja": "{{ messages | length }}"},
    ),
    "chat without assistant": rows("none of the 1 rows", USER, changed=CHAT, **{"chat.jinja": TEMPLATE}),
    "label of several types": rows(
        "train.jsonl, line 2: train data: `label` holds a text, and a number in ",
        {"text": "a", "label": 1},
        {"text": "b", "label": "1"},
        changed=LABELS,
    ),
    "label of padding": rows(
        "-100, which is no class", {"text": "a", "label": -100}, {"text": "b", "label": 1}, changed=LABELS
    ),
    "number not finite": rows(
        "train.jsonl, line 2: |`label` holds 'nan'",
        {"text": "a", "label": "1.5"},
        {"text": "b", "label": "nan"},
        changed=LABELS | {"regression": "true"},
    ),
    "number of Python": rows(
        "train.jsonl, line 1: |`label` holds '1_000'",
        {"text": "a", "label": "1_000"},
        changed=LABELS | {"regression": "true"},
    ),
    "classes of a regression": rows(
        "metrics: f1|regression", {"text": "a", "label": 1}, changed=LABELS | {"regression": "true", "metrics": "f1"}
    ),
    "one label": rows("`label` is 1 in every row", {"text": "a", "label": 1}, changed=LABELS),
    "one label and null": rows(
        "`label` is b, or holds nothing, in every row",
        {"text": "a", "label": "b"},
        {"text": "a", "label": None},
        changed=LABELS,
    ),
    # ---- eval.py
    "checkpoint nowhere": Case("checkpoint: nowhere", SCORES | {"checkpoint": "nowhere"}),
    "checkpoint not given": Case("checkpoint|--model_name_or_path", SCORES | {"checkpoint": ""}),
    "checkpoint without its run": Case("model does not hold the configuration", SCORES | {"checkpoint": "model"}),
    "checkpoint and model": Case("are both given", SCORES | SAVED | {"checkpoint": "model"}),
    "no validation data": Case(
        "no validation data", SCORES | SAVED | {"dataset_name": "folder"}, {"folder/train.jsonl": IDS}
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with data, a tokenizer and a saved model that fit together."""
    folder = tmp_path_factory.mktemp("good")
    write(folder, {"llama.yaml": kit.LLAMA, "train.jsonl": [{"input_ids": [1, 2, 3, 4, n]} for n in range(20)]})
    kit.tiny_tokenizer(folder / "tokenizer", ["the cat sat on a mat"] * 20)
    kit.save_model(folder / "model", kit.LLAMA)
    return folder


@pytest.fixture
def here(good, tmp_path):
    return Path(shutil.copytree(good, tmp_path / "here"))


def write(folder: Path, files: dict) -> None:
    """Write text, lists as jsonl, dicts as YAML; None removes a file."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        elif isinstance(content, dict):
            kit.write_yaml(path, content)
        elif isinstance(content, list):
            kit.write_jsonl(path, content)
        else:
            path.write_text(content)


def all_files(*folders: Path) -> set[str]:
    return {str(path) for folder in folders for path in folder.rglob("*") if path.suffix != ".lock"}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_named_and_leaves_nothing(here, name):
    case = CASES[name]
    kit.need_task(case.changed.get("task", "causal_lm"))
    write(here, case.files)
    before = all_files(here)
    script = "eval.py" if SCORES.items() <= case.changed.items() else "train.py"
    given = {flag: value for flag, value in (GOOD | case.changed).items() if value is not None}
    codes, [output] = kit.run_command(script, *kit.flags(**given), folder=here)
    assert codes == [2], output
    last_lines = "\n".join(output.rstrip().splitlines()[-3:])
    for part in case.expected.split("|"):
        assert part in last_lines
    assert "Traceback" not in output
    assert all_files(here) == before
    assert not list(Path(os.environ["HF_HOME"], "datasets", "prepared").glob("*.tmp"))
