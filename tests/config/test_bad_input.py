"""Whatever a user may get wrong ends with exit code 2, a last line that names it and the way out, and nothing half-made."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers import kit

GOOD = {  # a run that works, which a test shows; each case below changes one thing
    "model_config": "llama.yaml",
    "train_file": "train.jsonl",
    "output_dir": "run",
    "max_steps": 2,
    "global_batch_size": 8,
    "per_device_batch_size": 4,
}
TEXT = {"tokenizer_name": "tokenizer"}
CHAT = TEXT | {"chat_template": "chat.jinja"}
LABELS = TEXT | {"task": "text_classification", "model_config": "bert.yaml"}
SAVED = {"model_config": None, "model_name_or_path": "model"}
FOLDER = {"train_file": None, "dataset_name": "folder"}
IDS = '{"input_ids": [1, 2, 3]}\n'
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"


class Case(NamedTuple):
    expected: str  # words of the last lines, separated by |
    changed: dict = {}  # fields: None leaves one out, "" names it without a value
    files: dict = {}  # what is written to the folder first: see write()


def rows(*examples, **changed) -> dict:
    return {"train.jsonl": list(examples)} | changed


def llama(**changed) -> dict:
    return {"llama.yaml": kit.LLAMA | changed}


def run_file(content) -> dict:
    return {"changed": {"config": "run.yaml"}, "files": {"run.yaml": content}}


CASES = {
    # ---- the command line and the run file
    "misspelt flag": Case("--learning_rat: unknown field|did you mean learning_rate?", {"learning_rat": 1}),
    "misspelt key": Case("run.yaml: learning_rat: |did you mean learning_rate?", **run_file({"learning_rat": 1})),
    "wrong type": Case("--max_steps: |'ten' is no whole number|optimizer steps", {"max_steps": "ten"}),
    "fraction": Case("--max_steps: |'1.5' is no whole number", {"max_steps": 1.5}),
    "wrong type in YAML": Case("run.yaml: learning_rate: |'fast' is no number", **run_file({"learning_rate": "fast"})),
    "list for a number": Case("run.yaml: seed: expected one value", **run_file({"seed": [1, 2]})),
    "mapping for a number": Case("run.yaml: seed: |no whole number", **run_file({"seed": {"a": 1}})),
    "mapping for the task": Case("task: unknown value", **run_file({"task": {"a": 1}})),
    "no value": Case("--learning_rate: expected one argument|peak", {"learning_rate": ""}),
    "two values": Case("--seed: expected one value, found also 2", {"seed": [1, 2]}),
    "a stray word": Case("--per_device_batch_size: expected one value|fast", {"per_device_batch_size": [4, "fast"]}),
    "not a bool": Case("--packing: expected true or false, found maybe", {"packing": "maybe"}),
    "empty name": Case("--model_config: nothing is given", {"model_config=": ""}),
    "empty folder name": Case("--output_dir: nothing is given", {"output_dir=": ""}),
    "unknown task": Case("task: unknown value 'causal_ml'; did you mean causal_lm?", {"task": "causal_ml"}),
    "another task's field": Case("--packing: it belongs to task causal_lm", LABELS | {"packing": "true"}),
    "unknown optimizer": Case("--optim: |'adamm'|'adamw'", {"optim": "adamm"}),
    "unknown schedule": Case("--lr_scheduler_type: |'cosin'|'cosine'", {"lr_scheduler_type": "cosin"}),
    "unknown dtype": Case("--dtype: |'float16'|'bfloat16'", {"dtype": "float16"}),
    "unknown tracker": Case("report_to: |'wand'; did you mean wandb?", {"report_to": "wand"}),
    "tracker without its package": Case("report_to: |clearml|not installed", {"report_to": "clearml"}),
    "unknown attention": Case("fast|sdpa", {"attn_implementation": "fast"}),
    "schedule arguments not JSON": Case('--lr_scheduler_kwargs: |{min|"min_lr"', {"lr_scheduler_kwargs": "{min"}),
    "schedule arguments a list": Case(
        "--lr_scheduler_kwargs: expected a JSON object|[1]", {"lr_scheduler_kwargs": "[1]"}
    ),
    "schedule arguments of another": Case(
        "lr_scheduler_kwargs: linear|min_lr", {"lr_scheduler_kwargs": '{"min_lr": 1}'}
    ),
    "schedule without its arguments": Case("cosine_with_min_lr|min_lr", {"lr_scheduler_type": "cosine_with_min_lr"}),
    "run file missing": Case("no.yaml: no such file", {"config": "no.yaml"}),
    "run file a folder": Case("model: a folder", {"config": "model"}),
    "run file empty": Case("run.yaml: the file is empty", **run_file("")),
    "run file binary": Case("run.yaml: not readable as YAML", **run_file(b"\x00\xff\xfe\x80abc")),
    "run file malformed": Case("run.yaml: not readable as YAML|line 2", **run_file("seed: [1\nmax_steps: 2")),
    "run file a list": Case("run.yaml: expected lines of the form `name: value`", **run_file("- a\n- b\n")),
    "key given twice": Case("run.yaml: |'seed' is given twice", **run_file("seed: 1\nseed: 2\n")),
    "run file given twice": Case("--config: give it once", {"config": ["run.yaml", "run.yaml"]}),
    # ---- numbers and contradictions
    "micro above global": Case(
        "per_device_batch_size is 9|global_batch_size, which is 8", {"per_device_batch_size": 9}
    ),
    "best by what is not evaluated": Case(
        "metric_for_best_model is loss|--validation_file", {"metric_for_best_model": "loss"}
    ),
    "weights of nowhere": Case("init_from: nowhere is neither", {"init_from": "nowhere"}),
    "warmup of a step and a half": Case("warmup_steps is 1.5|below 1", {"warmup_steps": 1.5}),
    "max_length above the model": Case("max_length is 257|--max_length 256", {"max_length": 257}),
    "seed of 71 bits": Case(f"seed is {2**70}: give at most", {"seed": 2**70}),
    "a million workers": Case("dataloader_num_workers is 1000000|256", {"dataloader_num_workers": 10**6}),
    "endless timeout": Case("ddp_timeout is |at most", {"ddp_timeout": 10**30}),
    "two models": Case("model_name_or_path and model_config", {"model_name_or_path": "model"}),
    "two data sets": Case("dataset_name (|train_file (", {"dataset_name": "stdlib_code"}),
    "no model": Case("no model: give --model_name_or_path", {"model_config": None}),
    "no data": Case("no data: give --train_file", {"train_file": None}),
    "config of no data set": Case("dataset_config_name is given without dataset_name", {"dataset_config_name": "en"}),
    "sample without tokenizer": Case("sample_prompt|--tokenizer_name", {"sample_prompt": "def"}),
    "chat template without tokenizer": Case("chat_template|--tokenizer_name", {"chat_template": "train.jsonl"}),
    "output_dir a file": Case("output_dir: llama.yaml|is not a folder", {"output_dir": "llama.yaml"}),
    "output_dir in a file": Case("output_dir: llama.yaml/x|is not a folder", {"output_dir": "llama.yaml/x"}),
    "cache_dir in a file": Case("cache_dir: llama.yaml/x|is not a folder", {"cache_dir": "llama.yaml/x"}),
    "resume nowhere": Case("resume: nowhere|auto, never", {"resume": "nowhere"}),
    # ---- models and tokenizers
    "unknown model type": Case("model_type: |'lama'; did you mean llama?", files=llama(model_type="lama")),
    "no model type": Case("model_type is None", files={"llama.yaml": {"hidden_size": 32}}),
    "model type a list": Case("model_type is ['llama']", files=llama(model_type=["llama"])),
    "unknown model field": Case("hidden_sizes: |did you mean hidden_size?", files=llama(hidden_sizes=3)),
    "heads do not divide": Case("llama.yaml: |32|attention heads (5)", files=llama(num_attention_heads=5)),
    "shared heads do not divide": Case("num_key_value_heads is 3|4", files=llama(num_key_value_heads=3)),
    "no layers": Case("llama.yaml: num_hidden_layers is 0", files=llama(num_hidden_layers=0)),
    "negative size": Case("llama.yaml: hidden_size is -4", files=llama(hidden_size=-4)),
    "no vocabulary": Case("llama.yaml: vocab_size is 0", files=llama(vocab_size=0)),
    "size in words": Case("llama.yaml: |hidden_size|'big'", files=llama(hidden_size="big")),
    "dropout of 2": Case("attention_dropout is 2.0", files=llama(attention_dropout=2.0)),
    "dropout not a number": Case("attention_dropout is nan", files=llama(attention_dropout=float("nan"))),
    "unknown activation": Case("llama.yaml: |'gelou'", files=llama(hidden_act="gelou")),
    "a model beyond memory": Case("llama.yaml: |allocate", files=llama(vocab_size=10**12)),
    "a model of another kind": Case(
        "AutoModelForCausalLM of model_type vit|--task", files={"llama.yaml": {"model_type": "vit"}}
    ),
    "model_config missing": Case("no.yaml: no such file", {"model_config": "no.yaml"}),
    "model_config malformed": Case("m.json: not readable", {"model_config": "m.json"}, {"m.json": '{"a": '}),
    "model folder missing": Case("model_name_or_path|./nope|no such folder", SAVED | {"model_name_or_path": "./nope"}),
    "model folder without config": Case("model_name_or_path|model_type", SAVED, {"model/config.json": None}),
    "model config garbage": Case("model_name_or_path|not a valid JSON", SAVED, {"model/config.json": "{"}),
    "model without weights": Case("model|no file named model.safetensors", SAVED, {"model/model.safetensors": None}),
    "weights truncated": Case("model|incomplete", SAVED, {"model/model.safetensors": -1000}),
    "weights garbage": Case("model|header", SAVED, {"model/model.safetensors": b"x" * 1000}),
    "weights of another model": Case(
        "has no weights for|GPT2LMHeadModel", SAVED, {"model/config.json": json.dumps(kit.GPT2)}
    ),
    "weights of another shape": Case(
        "model|has no weights for|lm_head|[500, 32], here [600, 32]",
        SAVED,
        {"model/config.json": json.dumps(kit.LLAMA | {"vocab_size": 600})},
    ),
    "tokenizer missing": Case("tokenizer_name: |nowhere|no such folder", {"tokenizer_name": "nowhere"}),
    "tokenizer of a model without": Case("tokenizer_name: |model|save_pretrained", {"tokenizer_name": "model"}),
    "tokenizer garbage": Case("tokenizer_name: |tokenizer", TEXT, {"tokenizer/tokenizer.json": "{"}),
    "tokenizer above the vocabulary": Case("vocab_size is 5|12 tokens", TEXT, llama(vocab_size=5)),
    # ---- files
    "data missing": Case("train_file: no.jsonl: no such file", {"train_file": "no.jsonl"}),
    "pattern without a file": Case("train_file: no*.jsonl: no such file", {"train_file": "no*.jsonl"}),
    "validation missing": Case("validation_file: no.jsonl: no such file", {"validation_file": "no.jsonl"}),
    "data a folder": Case("train_file: model: is a folder|--dataset_name", {"train_file": "model"}),
    "unknown extension": Case("a.xyz|.jsonl, .json", {"train_file": "a.xyz"}, {"a.xyz": "text"}),
    "mixed extensions": Case("a.csv|one kind", {"train_file": ["train.jsonl", "a.csv"]}, {"a.csv": "text\nhello\n"}),
    "unreachable address": Case("train_file: http://127.0.0.1:9/a.jsonl", {"train_file": "http://127.0.0.1:9/a.jsonl"}),
    "unknown protocol": Case("train_file: odd://a/b.jsonl", {"train_file": "odd://a/b.jsonl"}),
    "empty file": Case("train.jsonl is empty", files={"train.jsonl": ""}),
    "blank file": Case("train.jsonl is empty", files={"train.jsonl": "\n\n"}),
    "binary file": Case("train.jsonl, line 2|not UTF-8 text", files={"train.jsonl": bytes(range(256)) * 4}),
    "UTF-16": Case("train.jsonl, line 1, byte 0: not UTF-8 text", files={"train.jsonl": IDS.encode("utf-16")}),
    "a bad line": Case(
        "train.jsonl, line 2: not valid JSON|[1, 2}", files={"train.jsonl": IDS + '{"input_ids": [1, 2}\n'}
    ),
    "a truncated file": Case("train.jsonl, line 3: not valid JSON", files={"train.jsonl": IDS * 2 + '{"input_i'}),
    "a bad line of the second file": Case(
        "b.jsonl, line 1", {"train_file": ["train.jsonl", "b.jsonl"]}, {"b.jsonl": "{\n"}
    ),
    "a number for an object": Case(
        "train.jsonl, line 2: expected a JSON object, found 3", files={"train.jsonl": IDS + "3\n"}
    ),
    "lists for objects": Case("train.jsonl, line 1: expected a JSON object", files={"train.jsonl": "[1]\n[2]\n"}),
    "a bad array": Case("a.json, line 3: not valid JSON", {"train_file": "a.json"}, {"a.json": f"[\n{IDS}, {{,\n]"}),
    "files with other columns": Case(
        "b.jsonl, line 1|`input_ids`", {"train_file": ["train.jsonl", "b.jsonl"]}, {"b.jsonl": [{"other": 1}]}
    ),
    "CSV unclosed": Case(
        "a.csv, line 3: not valid CSV", TEXT | {"train_file": "a.csv"}, {"a.csv": 'text,b\nx,1\n"unclosed'}
    ),
    "CSV of a header": Case("a.csv is empty", TEXT | {"train_file": "a.csv"}, {"a.csv": "text\n"}),
    "parquet garbage": Case(
        "a.parquet could not be read", {"train_file": "a.parquet"}, {"a.parquet": b"PAR1xxxxxxxxPAR1"}
    ),
    "arrow garbage": Case("a.arrow could not be read", {"train_file": "a.arrow"}, {"a.arrow": b"ARROW1xxxx"}),
    "binary text": Case("a.txt, line 2|not UTF-8 text", TEXT | {"train_file": "a.txt"}, {"a.txt": bytes(range(256))}),
    "data folder missing": Case("dataset_name: folder|no such folder", FOLDER),
    "data folder without train": Case("no train data", FOLDER, {"folder/test.jsonl": IDS}),
    "data folder without data": Case("dataset_name: |folder", FOLDER, {"folder/picture.xyz": "x"}),
    # ---- rows
    "no usable column": Case("among other|`text`|`input_ids`", files=rows({"other": 1})),
    "no usable column to evaluate": Case(
        "validation data: no usable column", {"validation_file": "b.jsonl"}, {"b.jsonl": [{"other": 1}]}
    ),
    "text without tokenizer": Case("--tokenizer_name", files=rows({"text": "a cat"})),
    "null text": Case("train data, row 1: `text` holds nothing", TEXT, rows({"text": "a cat"}, {"text": None})),
    "text a number": Case("train data, row 0: `text` holds int", TEXT, rows({"text": 5})),
    "id outside": Case(
        "row 1: `input_ids` holds 500|0 to 499", files=rows({"input_ids": [1, 2]}, {"input_ids": [1, 500]})
    ),
    "negative id": Case("row 0: `input_ids` holds -1", files=rows({"input_ids": [1, -1, 3]})),
    "id of 40 bits": Case("row 0: `input_ids` holds 1099511627776", files=rows({"input_ids": [1, 2**40]})),
    "null ids": Case("row 1: `input_ids` must be a list", files=rows({"input_ids": [1, 2]}, {"input_ids": None})),
    "ids in words": Case("row 0: `input_ids` must be a list", files=rows({"input_ids": "hello"})),
    "ids with fractions": Case("row 0: `input_ids` must be a list", files=rows({"input_ids": [1.5, 2.5]})),
    "nested ids": Case("row 0: `input_ids` must be a list", files=rows({"input_ids": [[1, 2], [3]]})),
    "label outside": Case("`labels` holds 999", files=rows({"input_ids": [1, 2], "labels": [1, 999]})),
    "label of -1": Case("`labels` holds -1", files=rows({"input_ids": [1, 2], "labels": [1, -1]})),
    "labels of another length": Case(
        "2 labels for 3 input_ids", files=rows({"input_ids": [1, 2, 3], "labels": [1, 2]})
    ),
    "all labels masked": Case("masked (-100)", files=rows({"input_ids": [1, 2, 3], "labels": [-100] * 3})),
    "all targets masked": Case("masked (-100)", files=rows({"input_ids": [1, 2, 3], "labels": [1, -100, -100]})),
    "rows too short": Case("too short", files=rows({"input_ids": [1]}, {"input_ids": []})),
    "null completion": Case("`completion` holds nothing", TEXT, rows({"prompt": "a cat", "completion": None})),
    "chat without template": Case(
        "no chat template|--chat_template", TEXT, rows({"messages": [{"role": "user", "content": "a"}]})
    ),
    "chat template missing": Case("chat_template: chat.jinja cannot be read", CHAT),
    "chat template malformed": Case(
        "row 0: `messages`|endfor",
        CHAT,
        rows({"messages": [{"role": "user", "content": "a"}]}) | {"chat.jinja": TEMPLATE[:-12]},
    ),
    "messages without roles": Case(
        "row 0: `messages`|role", CHAT, rows({"messages": [{"content": "a"}]}) | {"chat.jinja": TEMPLATE}
    ),
    "chat without assistant": Case(
        "none of the 1 rows", CHAT, rows({"messages": [{"role": "user", "content": "a"}]}) | {"chat.jinja": TEMPLATE}
    ),
    # ---- text classification
    "classifier without tokenizer": Case("--tokenizer_name", LABELS | {"tokenizer_name": None}),
    "classifier of another kind": Case("model_type vit", LABELS, {"bert.yaml": {"model_type": "vit"}}),
    "no column of labels": Case(
        "no column `lab`|--label_column", LABELS | {"train_file": "text.jsonl", "label_column": "lab"}
    ),
    "null label": Case(
        "row 1: `label` holds nothing", LABELS, rows(*[{"text": "a", "label": n} for n in (1, None, 0)])
    ),
    "list of labels": Case("`label` holds list", LABELS, rows({"text": "a", "label": [1, 2]})),
    "labels with fractions": Case("`label` holds float", LABELS, rows({"text": "a", "label": 1.5})),
    "one label": Case("`label` is 1 in every row", LABELS, rows({"text": "a", "label": 1})),
    "unknown label": Case(
        "validation data, row 0: the label '7'",
        LABELS | {"train_file": "text.jsonl", "validation_file": "b.jsonl"},
        {"b.jsonl": [{"text": "a", "label": 7}]},
    ),
    "unknown metric": Case("metrics: f2", LABELS | {"train_file": "text.jsonl", "metrics": "f2"}),
}
OUT_OF_RANGE = [
    *[(name, value) for name in ("learning_rate", "weight_decay", "max_grad_norm") for value in (-1, "nan", "inf")],
    *[(name, 0) for name in ("max_steps", "global_batch_size", "per_device_batch_size", "per_device_eval_batch_size")],
    *[(name, 0) for name in ("logging_steps", "eval_steps", "save_total_limit", "ddp_timeout", "max_eval_examples")],
    *[(name, -3) for name in ("max_steps", "save_steps", "seed", "dataloader_num_workers", "sample_tokens")],
    *[("max_length", 1), ("adam_beta1", 1), ("adam_beta2", -0.5), ("adam_epsilon", 0), ("warmup_steps", "nan")],
    *[("num_train_epochs", 0), ("num_train_epochs", "inf"), ("num_train_epochs", 1e300), ("max_steps", 10**400)],
    *[(name, 0) for name in ("save_keep_every", "early_stopping_patience", "max_skipped_steps", "max_failed_saves")],
    *[("drift_check_steps", 0), ("time_limit", 0), ("time_limit", "nan")],
]
CASES |= {f"{name} {value}": Case(f"{name} is {value}", {name: value}) for name, value in OUT_OF_RANGE}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with data, a tokenizer and a saved model that fit together; what children need is imported on the way."""
    import datasets
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("good")
    bert = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    write(
        folder, {"llama.yaml": kit.LLAMA, "bert.yaml": bert | {"intermediate_size": 32, "max_position_embeddings": 64}}
    )
    kit.write_jsonl(folder / "train.jsonl", [{"input_ids": [1, 2, 3, 4, n]} for n in range(20)])
    kit.write_jsonl(folder / "text.jsonl", [{"text": "the cat sat on a mat", "label": n % 2} for n in range(20)])
    words = ["<unk>", "<eos>", "the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "far"]
    model = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")
    tokenizer.save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**kit.LLAMA)).save_pretrained(folder / "model")
    datasets.load_dataset("json", data_files=str(folder / "text.jsonl"), split="train")
    return folder


@pytest.fixture
def here(good, tmp_path):
    return Path(shutil.copytree(good, tmp_path / "here"))


def write(folder: Path, files: dict) -> None:
    """Write bytes and text as they are, lists as jsonl, mappings as YAML; None removes a file, a number cuts its end off."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        elif isinstance(content, dict):
            kit.write_yaml(path, content)
        elif isinstance(content, list):
            kit.write_jsonl(path, content)
        elif isinstance(content, int):
            path.write_bytes(path.read_bytes()[:content])
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def words(changed: dict) -> list[str]:
    """Return the command line of the good run with some fields changed."""
    found = []
    for name, value in (GOOD | changed).items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            found += [f"--{name}", *(str(v) for v in values if v != "")]
    return found


def everything(*folders: Path) -> set[str]:
    return {str(path) for folder in folders for path in folder.rglob("*") if path.suffix != ".lock"}


def last_lines(output: str) -> str:
    return "\n".join(output.rstrip().splitlines()[-3:])


def prepared() -> Path:
    return Path(os.environ["HF_HOME"], "datasets", "prepared")


def test_the_good_run_is_good(here):
    codes, [output] = kit.run_command("train.py", *words({"validation_file": "train.jsonl"}), folder=here)
    assert codes == [0], output
    assert (here / "run" / "final" / "model.safetensors").exists()


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_named_and_leaves_nothing(here, name):
    case = CASES[name]
    write(here, case.files)
    before = everything(here)
    codes, [output] = kit.run_command("train.py", *words(case.changed), folder=here)
    assert codes == [2], output
    for expected in case.expected.split("|"):
        assert expected in last_lines(output)
    assert "Traceback" not in output
    assert everything(here) == before
    assert not list(prepared().glob("*.tmp"))


def test_a_fault_of_the_run_file_names_all_faults(here):
    codes, [output] = kit.run_command(
        "train.py", *words({"learning_rate": -1, "seed": -1, "eval_steps": 0}), folder=here
    )
    assert codes == [2]
    for name in ("learning_rate", "seed", "eval_steps"):
        assert name in last_lines(output)
    assert "3 faults" in output


@pytest.mark.parametrize(
    "expected, changed",
    [
        ("checkpoint: nowhere", {"checkpoint": "nowhere"}),
        ("checkpoint: nothing is given|--model_name_or_path", {"checkpoint": ""}),
        ("--checkpoin: unknown field; did you mean checkpoint?", SAVED | {"checkpoin": "model"}),
        # random weights: what train.py takes would overwrite eval.json of the run with their loss
        (
            "model_config is llama.yaml|--checkpoint scores",
            {"model_config": "llama.yaml", "validation_file": "train.jsonl"},
        ),
        ("checkpoint: model", {"checkpoint": "model"}),
        ("no data: give --validation_file", SAVED),
        ("validation_file: no.jsonl: no such file", SAVED | {"validation_file": "no.jsonl"}),
        ("no validation data", SAVED | {"dataset_name": "folder"}),
        (
            "per_device_eval_batch_size is 0",
            SAVED | {"validation_file": "train.jsonl", "per_device_eval_batch_size": 0},
        ),
    ],
)
def test_a_fault_in_evaluation_is_named(here, expected, changed):
    write(here, {"folder/train.jsonl": IDS})
    before = everything(here)
    given = dict.fromkeys(GOOD) | {"output_dir": "scores"} | changed
    codes, [output] = kit.run_command("eval.py", *words(given), folder=here)
    assert codes == [2], output
    for part in expected.split("|"):
        assert part in last_lines(output)
    assert everything(here) == before


def test_a_file_that_cannot_be_prepared_leaves_the_cache_as_it_was(here):
    cache = {"cache_dir": str(here / "cache"), "train_file": "train.jsonl"}
    write(here, rows(*[{"input_ids": [1, 2, 3]}] * 2000, {"input_ids": [1, 500]}))
    codes, [output] = kit.run_command("train.py", *words(cache), folder=here)
    assert codes == [2]
    assert "row 2000" in last_lines(output)
    assert not [path for path in (here / "cache" / "prepared").iterdir() if path.suffix != ".lock"]


def test_two_ranks_end_together_and_one_of_them_speaks(here):
    write(here, rows({"input_ids": [1, 500]}))
    codes, outputs = kit.run_command("train.py", *words({}), folder=here, world=2)
    assert codes == [2, 2]
    assert sorted("`input_ids` holds 500" in last_lines(output) for output in outputs) == [False, True]
    assert "" in [output.strip() for output in outputs]


@pytest.mark.parametrize("launcher", [[sys.executable], ["torchrun", "--standalone", "--nproc_per_node", "2"]])
def test_the_real_commands(here, launcher):
    if launcher[0] == "torchrun":
        launcher = [sys.executable, "-m", "torch.distributed.run", *launcher[1:]]
    command = [*launcher, str(kit.REPOSITORY / "train.py"), *words({"learning_rat": 1})]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120, check=False)
    fault = "--learning_rat: unknown field; did you mean learning_rate?"
    if len(launcher) == 1:
        assert done.returncode == 2
        assert done.stderr.strip() == f"error: {fault}"
    else:  # torchrun has one code for all failures, and a report of its own, which ends with the first rank that failed
        assert done.returncode == 1
        assert done.stderr.count(f"error: {fault}") == 1
        report = done.stderr[done.stderr.index("Root Cause") :]
        assert "exitcode  : 2" in report
        assert fault in last_lines(report)
        assert "Traceback" not in report
    assert not (here / "run").exists()
