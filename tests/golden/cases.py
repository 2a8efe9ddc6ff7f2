"""What run files, samples, templates and formats of files prepare, for rows.py; they use files and flags only."""

import csv
import gzip
import json
import re

import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml

from engine.config.errors import UsageError
from engine.config.paths import REPOSITORY
from tests.helpers import kit
from tests.helpers.chat_oracle import ROWS, tokenizer_of

RUN_FILES = sorted(
    path for path in (REPOSITORY / "configs").glob("*.yaml") if path.stem.startswith(("stdlib", "drawn"))
)
HELD_OUT = ("stdlib_classification", "stdlib_mixture", "stdlib_kto", "drawn_characters")
TEMPLATES = sorted((REPOSITORY / "configs/chat_templates").glob("*.jinja"))


@pytest.mark.parametrize("file", RUN_FILES, ids=lambda path: path.stem)
def test_run_file(file, tmp_path):
    """Where a trained model is needed, one with random weights has its tokenizer."""
    fields = yaml.safe_load(file.read_text())
    if fields["task"] == "distillation":
        fields["teacher_name_or_path"] = str(kit.save_model(tmp_path / "teacher", kit.LLAMA | {"vocab_size": 2048}))
    if fields.pop("model_name_or_path", None):
        fields |= {"model_config": "configs/models/llama_small.yaml", "tokenizer_name": "stdlib_code"}
    kit.open_data(config=kit.write_yaml(tmp_path / "run.yaml", fields))
    if file.stem in HELD_OUT:
        kit.open_data(config=kit.write_yaml(tmp_path / "run.yaml", fields), validation_split=0.1)


# ---- chat templates --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Folders of tokenizers with the markers of a template."""
    folders = {}

    def folder(template):
        if template not in folders:
            folders[template] = tmp_path_factory.mktemp("tokenizer")
            tokenizer_of(template.read_text(encoding="utf-8"), True).save_pretrained(folders[template])
        return folders[template]

    return folder


def open_accepted(file, rows, **fields):
    """Prepare rows; those that are refused, with their line, are left out one by one."""
    rows = list(rows)
    while rows:
        kit.write_jsonl(file, rows)
        try:
            return kit.open_data(train_file=file, **fields)
        except UsageError as error:
            line = re.search(r"line (\d+)", str(error))
            if not line:
                raise
            del rows[int(line[1]) - 1]
    return None


CHATS = [{"messages": turns} | ({"tools": tools} if tools else {}) for turns, tools in ROWS.values()]
CHATS += [{"prompt": turns[:-1], "completion": turns[-1:]} for turns, tools in ROWS.values() if not tools]


def settings():
    """Return (template, flags) of each template and the variable that switches its reasoning."""
    for template in TEMPLATES:
        yield pytest.param(template, {}, id=template.stem)
        if "enable_thinking" in template.read_text(encoding="utf-8"):
            for value in ("false", "true"):
                flags = {"chat_template_kwargs": f'{{"enable_thinking": {value}}}'}
                yield pytest.param(template, flags, id=f"{template.stem}-{value}")


@pytest.mark.parametrize("flags", [{}, {"train_turns": "last"}, {"train_turns": "each"}, {"validation_split": 0.4}])
@pytest.mark.parametrize("template, setting", settings())
def test_template(template, setting, flags, tokenizers, tmp_path):
    if setting and "validation_split" in flags:
        return  # which rows are held out does not depend on it
    model = kit.write_yaml(tmp_path / "model.yaml", kit.LLAMA | {"vocab_size": 1000, "max_position_embeddings": 2048})
    fields = {"model_config": model, "tokenizer_name": tokenizers(template), "chat_template": template}
    fields |= {"max_length": 2048, "cache_dir": tmp_path / "cache"} | setting | flags
    for name in ("messages", "prompt"):
        open_accepted(tmp_path / f"{name}.jsonl", [row for row in CHATS if name in row], **fields)


# ---- formats of rows, and of files -----------------------------------------------------------------------------------

WORDS = ["a short text", 'quotes " and, commas', "two\nlines", "für 漢字", "  spaces  ", "<|endoftext|>", "x" * 300]
WORDS = [f"{word} {i}" for i, word in enumerate(WORDS * 3)]
TURNS = [[{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}] for word in WORDS]
FORMATS = {  # kind of row -> (rows, fields)
    "text": ([{"text": word, "id": i} for i, word in enumerate(WORDS)], {}),
    "packed": ([{"text": word} for word in WORDS * 9], {"packing": True}),
    "messages": ([{"messages": turns} for turns in TURNS], {}),
    "packed messages": ([{"messages": turns} for turns in TURNS * 9], {"packing": True}),
    "conversations": (
        [{"conversations": [{"from": "human", "value": w}, {"from": "gpt", "value": w}]} for w in WORDS],
        {},
    ),
    "completions": ([{"prompt": word, "completion": word[::-1]} for word in WORDS], {}),
    "instructions": ([{"instruction": word, "input": "", "output": word[::-1]} for word in WORDS], {}),
    "ids": ([{"input_ids": [1, 2, i, 3], "labels": [-100, 2, i, 3]} for i in range(40)], {}),
    "labels": (
        [{"text": word, "label": str(i % 3)} for i, word in enumerate(WORDS)],
        {"task": "text_classification"},
    ),
    "numbers": ([{"text": word, "label": i % 3} for i, word in enumerate(WORDS)], {"task": "text_classification"}),
    "pairs": ([{"prompt": w, "chosen": w + " yes", "rejected": w + " no"} for w in WORDS], {"task": "preference"}),
    "ratings": ([{"prompt": w, "completion": w, "label": len(w) % 2 == 0} for w in WORDS], {"task": "kto"}),
}


def write(folder, rows, ending: str):
    file = folder / f"rows.{ending}"
    if ending == "jsonl":
        return kit.write_jsonl(file, rows)
    if ending == "json":
        file.write_text(json.dumps(rows, indent=1))
    elif ending == "gzip":  # in a folder, which is a dataset
        (folder / "data").mkdir()
        file = folder / "data/train.jsonl.gz"
        file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    elif ending == "txt":
        file.write_text("\n".join(row["text"] for row in rows), encoding="utf-8")
    elif ending == "csv":
        with open(file, "w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            text = [{n: json.dumps(v) if isinstance(v, list) else v for n, v in row.items()} for row in rows]
            writer.writerows(text)
    elif ending == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), file, row_group_size=3)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(file), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
    return file


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    kit.write_yaml(folder / "llama.yaml", kit.LLAMA)
    kit.write_yaml(folder / "bert.yaml", yaml.safe_load((REPOSITORY / "configs/models/bert_tiny.yaml").read_text()))
    kit.tiny_tokenizer(folder / "tokenizer", WORDS, chat_template=None)
    return folder


ENDINGS = ["jsonl", "json", "gzip", "csv", "txt", "parquet", "arrow"]


@pytest.mark.parametrize("held_out", [{}, {"validation_split": 0.3}], ids=["", "validation_split"])
@pytest.mark.parametrize(
    "kind, ending", [(kind, end) for kind in FORMATS for end in ENDINGS if end != "txt" or kind in ("text", "packed")]
)
def test_rows(kind, ending, held_out, tiny_bert, tmp_path):
    rows, given = FORMATS[kind]
    model = "bert" if given.get("task") == "text_classification" else "llama"
    fields = {"model_config": tiny_bert / f"{model}.yaml", "tokenizer_name": tiny_bert / "tokenizer", "max_length": 64}
    file = write(tmp_path, rows, ending)
    source = {"dataset_name": file.parent} if ending == "gzip" else {"train_file": file}
    fields |= {"cache_dir": tmp_path / "cache"} | source | given | held_out
    if model == "llama" and kind not in ("text", "packed", "ids"):
        fields["chat_template"] = "chatml"
    try:
        kit.open_data(**fields)
    except UsageError as error:
        with pytest.raises(UsageError):
            raise error
