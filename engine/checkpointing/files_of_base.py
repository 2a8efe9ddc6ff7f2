"""The files of final/ for other programs: those of the base model as they are, with what the run has changed.

transformers 5 reads files of earlier versions, but writes less than it has read: llama.cpp would then tokenize otherwise,
and transformers 4 rotate positions otherwise. Tests: tests/engine/checkpointing/test_files_of_base.py.
"""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.config.errors import UsageError, warn
from engine.config.run_config import RunConfig
from engine.models.config_and_tokenizer import config_file, config_value, model_folder
from engine.run.train_state import Run
from engine.storage.jsonl import read_json

TOKENIZER = ("tokenizer*", "*.model", "*.spm", "*.tiktoken", "*vocab*", "merges.txt", "tekken.json", "normalizer.json")
TOKENIZER += ("added_tokens.json", "special_tokens_map.json", "chat_template.json")
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def complete_final(folder: Path, run: Run) -> None:
    """Add to a final model what other programs, and transformers 4, read in the folder of its base model."""
    cfg, task = run.cfg, run.task
    config = getattr(task.saved(run.model.model), "config", None)
    base, of_base = None, {}
    with suppress(UsageError):  # the folder is gone: a run of days does not end without its model for that
        base = Path(model_folder(cfg, cfg.model_name_or_path)) if cfg.model_name_or_path else None
        of_base = read_json(config_file(base)) if base else {}
    file = config_file(folder)
    written = read_json(file)
    kind = written.get("model_type")
    if hasattr(config, "to_diff_dict"):  # of transformers
        parts = [
            part for part in (of_base, *of_base.values()) if isinstance(part, dict) and part.get("model_type") == kind
        ]
        _write(file, _in_both_spellings(written, parts[0] if parts else {}, config))
    if base and of_base.get("model_type") == kind:
        for path in _files(base, PROCESSOR):
            if not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)
    tokenizer: Any = getattr(task, "tokenizer", None)
    if getattr(tokenizer, "loaded_from", None):
        for path in list(folder.rglob("tokenizer_config.json")):  # final/adapter/ may have one, too
            complete_tokenizer(path.parent, tokenizer, cfg)


def _files(base: Path, patterns: tuple[str, ...]) -> list[Path]:
    """Return files of a model folder, which in the cache of the Hub are links. Other links might publish any file."""
    root = base.resolve()
    root = root.parents[1] if root.parent.name == "snapshots" else root
    found = []
    for path in sorted({path for pattern in patterns for path in base.glob(pattern)}):
        if path.is_file() and path.suffix != ".py":
            if path.resolve().is_relative_to(root):
                found.append(path)
            else:
                warn(f"{path} is a link out of its folder: final/ has no copy of it")
    return found


def _write(file: Path, values: dict[str, Any]) -> None:
    """Write a JSON file, unless it holds these values."""
    if read_json(file) != values:
        file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- config.json -----------------------------------------------------------------------------------------------------


def _in_both_spellings(written: dict[str, Any], base: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return a part of config.json with the names of transformers 4, too, and keys of its base that it lacks.

    transformers leaves out what has the default value of this version; `config`, what was loaded, has all values."""
    values = dict(written)
    rope = dict(written.get("rope_parameters") or {})  # which transformers 4 ignores without a word
    if "rope_theta" in rope:
        values |= {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        values["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    for name, value in base.items():
        if name == "torch_dtype":
            values[name] = written.get("dtype")
        elif name.endswith("_config") and isinstance(value, dict) and isinstance(written.get(name), dict):
            values[name] = _in_both_spellings(written[name], value, config_value(config, name))
        elif name in written or name.startswith("_") or name == "auto_map":  # code that final/ does not have
            continue
        elif name == "rope_scaling" or not hasattr(config, name) or _plain(getattr(config, name)) == _plain(value):
            values[name] = value
    return values


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


# ---- tokenizer -------------------------------------------------------------------------------------------------------


def complete_tokenizer(folder: Path, tokenizer: Any, cfg: RunConfig) -> None:
    """Put the files of the base's tokenizer in place of those that transformers has written to `folder`.

    Where the run has changed special tokens, the chat template, or added tokens, write these into each file that has them."""
    base = Path(tokenizer.loaded_from)
    written = {path: path.read_bytes() for path in folder.glob("tokenizer*.json")}
    for path in _files(base, TOKENIZER):
        shutil.copyfile(path, folder / path.name)
    _write_settings(folder, tokenizer)
    added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if i not in tokenizer.loaded_ids}
    if added:
        _write_added(folder, base, tokenizer, added)
    if not _reads_alike(folder, tokenizer, cfg):
        warn(
            f"final/: this version of transformers reads the tokenizer of {base} otherwise from there: it has its own files"
        )
        for path, data in written.items():
            path.write_bytes(data)


def _write_settings(folder: Path, tokenizer: Any) -> None:
    """Write special tokens and chat template of the run into each file of the base that has other ones."""
    special = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    elif (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")  # with the variables of the run
    for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.json"):
        values = read_json(folder / name)
        if values and name != "chat_template.json":
            values |= {key: token for key, token in special.items() if _content(values.get(key)) != token}
        if template and "chat_template" in values:
            values["chat_template"] = template
        if values:
            _write(folder / name, values)


def _write_added(folder: Path, base: Path, tokenizer: Any, added: dict[int, Any]) -> None:
    """Write the tokens that the run has added into the files of the base; `tokenizer.model` takes none."""
    states = {i: token.__getstate__() for i, token in tokenizer.added_tokens_decoder.items()}
    values = read_json(folder / "tokenizer_config.json")
    values["added_tokens_decoder"] = {str(i): state for i, state in states.items()} | values.get(
        "added_tokens_decoder", {}
    )
    _write(folder / "tokenizer_config.json", values)
    if (base / "added_tokens.json").exists():
        ids = {token.content: i for i, token in added.items()}
        _write(folder / "added_tokens.json", read_json(folder / "added_tokens.json") | ids)
    if (base / "tokenizer.json").exists():
        values = read_json(folder / "tokenizer.json")
        values["added_tokens"] += [{"id": i} | states[i] for i in added]
        _write(folder / "tokenizer.json", values)


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _reads_alike(folder: Path, tokenizer: Any, cfg: RunConfig) -> bool:
    """Return whether transformers reads the tokenizer of the run in `folder`. Names of folders decide on classes, too."""
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)
    except Exception:
        return False
    return _meaning(found) == _meaning(tokenizer)


def _meaning(tokenizer: Any) -> tuple:
    """Return all that the ids of a text depend on."""
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    text = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.get_vocab()
    return text, tokenizer.special_tokens_map
