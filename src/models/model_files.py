"""Folder of a model or tokenizer: a local folder, or the snapshot of a Hub repository.

Tests: tests/models/test_loading.py.
"""

from pathlib import Path

from src.config.schema import RunConfig
from src.download import fetch_records, hub
from src.download.cache_folder import cache_root


def model_folder(cfg: RunConfig, name: str, field: str = "model_name_or_path", weights: bool = True) -> str:
    """Return the folder of the model or tokenizer `name`, downloaded at most once. `field` is its option."""
    revision = cfg.model_revision if name == cfg.model_name_or_path else "main"
    return hub.model_folder(name, revision, field, cache_root(cfg), weights, cfg.trust_remote_code)


def pretrained_source(cfg: RunConfig) -> tuple[Path, str | None]:
    """Return (folder of the pretrained model, its commit or None). Only a model from the Hub has a commit."""
    folder = Path(model_folder(cfg, str(cfg.model_name_or_path)))
    record = fetch_records.records.get(f"model {cfg.model_name_or_path}@{cfg.model_revision}", {})
    return folder, record.get("commit")


def reason(error: Exception) -> str:
    """Return the beginning of a library's error message as one line."""
    if isinstance(error, KeyError):
        return f"unknown value {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:400] or type(error).__name__
