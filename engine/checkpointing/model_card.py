"""The model card of final/ (README.md): what the Hub shows of a model, where it comes from, and how it is loaded.

Tests: tests/engine/checkpointing/test_model_card.py.
"""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from engine.checkpointing.model_folder import RUN_CONFIG
from engine.checkpointing.tensor_files import Shards, weights_sha256
from engine.config.redact import redact_all
from engine.rows.chat_options import PROMPT
from engine.rows.prepared_split import counted_rows
from engine.run.train_state import Run
from engine.storage import hub
from engine.storage.jsonl import lines_from_end, read_json

PIPELINES = {  # the end of the name of a model's class -> its pipeline, unless a task has a `pipeline_tag`
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
}
OPTIONS = ("preference_loss", "beta")  # on which the numbers of an evaluation depend
PACKAGES = ("transformers", "torch", "accelerate", "datasets")


@dataclass
class Card:
    """What add-ons may change of a model card."""

    paragraphs: list[str]
    code: list[str]  # lines of Python that load the model; the first one imports its library
    base: str | None  # the model that training began with
    commit: str | None  # of it, if it is of the Hub
    weights: str | None = None  # their hash, if it is a folder


def write_card(folder: Path, run: Run, config: dict, evaluated: int, best: str) -> None:
    """Write README.md of a complete final/, and the run's configuration, which eval.py reads.

    The evaluation of step `evaluated` is that of its weights; 0: there is none. `best`: a sentence about the best step."""
    cfg, task = run.cfg, run.task
    name, model = cfg.model_name_or_path, task.saved(run.model.model)
    commit = hub.records.get(f"model {name}@{cfg.model_revision}", {}).get("commit")
    sources = list(cfg.mixture) if cfg.mixture else [cfg.dataset_name, *cfg.train_file]
    data = ", ".join(public_name(source) for source in sources if source)
    start = f"Fine-tuned from {public_name(name)}" if name else "Trained from random weights"
    first = (
        f"{start} on {data}; task `{cfg.task}`, seed {cfg.seed}, global batch {cfg.global_batch_size}. {RUN_CONFIG} holds the "
        "configuration."
    )
    kind = type(model)
    code = [f"from transformers import {kind.__name__}"]
    code.append(f'model = {kind.__name__}.from_pretrained(".")  # this folder, or its name')
    card = Card([first], code, name, commit)
    for addon in cfg.addons:
        addon.change_card(card, task, model)
    parts = card.paragraphs
    if card.base and (card.commit or card.weights):
        version = f"commit {card.commit}" if card.commit else f"weights {card.weights}"
        parts.append(f"Its base model is {public_name(card.base)}, {version}.")
    if best:
        parts.append(f"{best[0].upper()}{best[1:]}.")
    prompt = task.plan_rows(task.reads_chats).get(PROMPT)
    if prompt:
        parts.append(f"In training, {PROMPT} `{prompt}`.")
    for rows_of, (_, number) in counted_rows(run.datasets["train"]):
        parts.append(f"{number:,} {rows_of}.")
    lines = lines_from_end(Path(cfg.output_dir, "metrics.jsonl")) if evaluated else ()
    numbers = next((line for _, line in lines if line.get("kind") == "eval" and line["step"] == evaluated), {})
    rows = {option: config[option] for option in OPTIONS if config.get(option) is not None}
    rows |= {metric: value for metric, value in numbers.items() if metric != "kind"}
    if rows:
        parts.append("\n".join(["| last evaluation | |", "|---|---|", *(f"| {key} | {rows[key]} |" for key in rows)]))
    front = {"base_model": card.base if card.commit else None, "tags": [cfg.task]}
    front["datasets"] = sorted({key.split()[1].partition("@")[0] for key in hub.records if key.startswith("dataset ")})
    if kind.__module__.startswith("transformers."):
        front["library_name"] = card.code[0].split()[1]
        found = [pipeline for end, pipeline in PIPELINES.items() if kind.__name__.endswith(end)]
        front["pipeline_tag"] = task.pipeline_tag or (found[0] if found else None)
        if getattr(task, "tokenizer", None) is not None:
            card.code.insert(1, "from transformers import AutoTokenizer")
            card.code.append('tokenizer = AutoTokenizer.from_pretrained(".")')
        parts.append("\n".join(["```python", *card.code, "```"]))
    versions = read_json(Path(cfg.output_dir, "environment.json")).get("versions", {})
    parts.append(", ".join(f"{package} {versions[package]}" for package in PACKAGES if package in versions))
    head = yaml.safe_dump({key: value for key, value in front.items() if value}, allow_unicode=True)
    text = "\n\n".join(part for part in parts if part)
    (folder / "README.md").write_text(f"---\n{head}---\n# {Path(cfg.output_dir).name}\n\n{text}\n", encoding="utf-8")
    text = yaml.safe_dump(redact_all(config), sort_keys=False, allow_unicode=True)
    (folder / RUN_CONFIG).write_text(text, encoding="utf-8")


def add_hash(folder: Path, shards: Shards) -> None:
    """Add the SHA-256 of the weights of a complete final/, which may be an average or merged, to its model card."""
    with (folder / "README.md").open("a", encoding="utf-8") as card:
        card.write(f"\nSHA-256 of these weights: {weights_sha256(folder, shards)}\n")


def public_name(source: str) -> str:
    """Return a Hub name unchanged, but only the last component of a URL or a local path."""
    if "://" in source:
        return Path(urlsplit(source).path).name or "a URL"
    return Path(source).name if Path(source).is_absolute() or Path(source).exists() else source
