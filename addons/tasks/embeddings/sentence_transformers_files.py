"""Files of sentence-transformers: what they say of a base model, and those that checkpoints and final/ hold.

vLLM and text-embeddings-inference read them, too. The names of keys and classes are the oldest, which all of them know.
Tests: tests/addons/tasks/test_embeddings.py.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.storage.jsonl import read_json

KEYS = {  # {pooling: its key in 1_Pooling/config.json}
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "lasttoken": "pooling_mode_lasttoken",
}
PARTS = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}  # {class: folder}
WITHOUT_EFFECT = {"Dropout"}  # in inference
MODULES = "modules.json"
POOLING = "1_Pooling/config.json"
LENGTH = "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
DOCUMENT = ("document", "passage", "corpus")  # the first of these prompts is that of `encode_document`


@dataclass(frozen=True)
class BaseFiles:
    """What the folder of a base model says; nothing if it is not of sentence-transformers."""

    pooling: str | None = None
    max_length: int | None = None
    is_complete: bool = False  # whether it has modules.json
    prompts: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # of config_sentence_transformers.json
    not_used: tuple[str, ...] = ()  # parts that change the vectors, but not those of this task

    def prompt(self, *names: str) -> str:
        """Return the first of these prompts that the model has, else its default, else an empty text."""
        given = [self.prompts[name] for name in names if self.prompts.get(name) is not None]
        default = self.prompts.get(self.settings.get("default_prompt_name") or "")
        return [*given, default or ""][0]


def read_base(folder: Path) -> BaseFiles:
    """Return what the files of sentence-transformers in `folder` say."""
    modules = []
    if (folder / MODULES).exists():
        modules = [
            (each["type"].rsplit(".", 1)[-1], each["path"]) for each in json.loads((folder / MODULES).read_text())
        ]
    folders = dict(modules)
    pooling = read_json(folder / folders.get("Pooling", PARTS["Pooling"]) / "config.json")
    named = pooling.get("pooling_mode") or [key for key, value in pooling.items() if value is True and "_mode_" in key]
    modes = [named] if isinstance(named, str) else list(named)
    names = {key: name for name, key in KEYS.items()}
    texts = read_json(folder / LENGTH)
    settings = read_json(folder / PROMPTS)
    not_used = [name for name, _ in modules if name not in {*PARTS, *WITHOUT_EFFECT}]
    if pooling.get("include_prompt") is False:
        not_used.append("include_prompt: false")
    if texts.get("do_lower_case"):
        not_used.append("do_lower_case")
    if "message" in texts.get("modality_config", {}):
        not_used.append("its chat template around each text")
    return BaseFiles(
        pooling=" and ".join(names.get(mode, mode) for mode in modes) or None,
        max_length=texts.get("max_seq_length"),
        is_complete=bool(modules),
        prompts=settings.get("prompts") or {},
        settings=settings,
        not_used=tuple(not_used),
    )


def write_files(
    folder: Path, base: BaseFiles, pooling: str, max_length: int, dimension: int, prompts: dict[str, str]
) -> None:
    """Write the files by which sentence-transformers computes the vectors of the run."""
    modules = []
    for index, (name, place) in enumerate(PARTS.items()):
        modules.append(
            {"idx": index, "name": str(index), "path": place, "type": f"sentence_transformers.models.{name}"}
        )
    pooling_config = {"word_embedding_dimension": dimension} | {key: name == pooling for name, key in KEYS.items()}
    settings = {"default_prompt_name": None, "similarity_fn_name": "cosine"} | base.settings
    settings |= {"prompts": base.prompts | prompts, "model_type": "SentenceTransformer"}
    for place in PARTS.values():
        (folder / place).mkdir(exist_ok=True)
    contents = {
        MODULES: modules,
        POOLING: pooling_config | {"include_prompt": True},
        LENGTH: {"max_seq_length": max_length, "do_lower_case": False},
        PROMPTS: settings,
    }
    for name, value in contents.items():
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
