"""Tiny models, tokenizers and data, the flags of a run, and its data as train.py opens it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from engine.config import validation
from engine.config.paths import REPOSITORY
from engine.find_tasks import OPTIONS

LLAMA = {
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GPT2 = {  # has dropout in the embedding, the attention and the residual stream
    "model_type": "gpt2",
    "vocab_size": 500,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 256,
    "embd_pdrop": 0.2,
    "attn_pdrop": 0.2,
    "resid_pdrop": 0.2,
}
# For what must be exact on every CPU: in float64, all of it computes in float64. Llama's norms round to float32, so that the
# last bit of a sum, which depends on the kernels of a CPU and on the shape of a batch, may become 1e-7.
EXACT = GPT2 | {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
TINY = GPT2 | {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_positions": 32}


def need_task(name: str) -> None:
    """Skip a test of the core that also runs this task, in a fork without it."""
    if name not in OPTIONS:
        pytest.skip(f"this fork has no task {name}")


def has_addon(path: str) -> bool:
    return any((REPOSITORY / f"addons/{path}{end}").exists() for end in (".py", ""))


def need_addon(path: str) -> None:
    """Skip a test of a core promise that it checks with an add-on, such as streaming, where that is removed."""
    if not has_addon(path):
        pytest.skip(f"without addons/{path}", allow_module_level=True)


def write_jsonl(path, rows) -> Path:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Path(path)


def write_yaml(path, values) -> Path:
    Path(path).write_text(yaml.safe_dump(values))
    return Path(path)


def tiny_files(folder) -> dict[str, Path]:
    """Return fields for a model with dropout (10 ms per step) and 83 rows of data.

    With a global batch of 8 an epoch has 11 steps; the last has 3 examples."""
    generator = np.random.default_rng(0)
    fields = {"model_config": write_yaml(Path(folder, "gpt2.yaml"), TINY)}
    for name, count in (("train", 83), ("validation", 21)):
        lengths = generator.integers(3, 12, count)
        rows = [{"input_ids": generator.integers(0, 50, n).tolist()} for n in lengths]
        fields[f"{name}_file"] = write_jsonl(Path(folder, f"{name}.jsonl"), rows)
    return fields


def flags(**fields) -> list[str]:
    """Return the command line that sets these fields."""
    words = []
    for name, value in fields.items():
        values = value if isinstance(value, list | tuple) else [value]
        words += [f"--{name}", *(str(v).lower() if isinstance(v, bool) else str(v) for v in values)]
    return words


def open_data(**fields):
    """Return (task, its prepared splits), opened as train.py opens them."""
    from engine.config import parsing
    from engine.find_tasks import make_task
    from engine.plan import dataset

    run, options = parsing.parse(flags(**fields), OPTIONS)
    validation.check(run, options)
    task = make_task(run, options)
    return task, dataset.prepare_datasets(run, task)


def all_rows(split) -> list[dict]:
    return split.rows(np.arange(len(split)))


CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_model(folder, config: dict, seed: int = 7) -> Path:
    """Save a causal language model with random weights, as transformers does; return its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(folder)
    return Path(folder)


def tiny_tokenizer(folder, texts=(), size: int = 320, chat_template: str | None = None) -> Path:
    """Save a byte-level BPE tokenizer trained on `texts`; it can encode any text."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    model = ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|pad|>"]
    model.train_from_iterator(list(texts), vocab_size=size, special_tokens=special, show_progress=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=model._tokenizer, eos_token=special[0], pad_token=special[1])
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return Path(folder)


def bert_recipe(task: str, folder: Path, **fields) -> dict:
    """Return the fields of a run of `task` on the files of `folder` with its tiny BERT, in float64."""
    names = {"model_config": "bert.yaml", "tokenizer_name": "tokenizer", "cache_dir": "cache"}
    names |= {"train_file": "train.jsonl", "validation_file": "validation.jsonl"}
    return {"task": task, "dtype": "float64"} | {name: folder / file for name, file in names.items()} | fields
