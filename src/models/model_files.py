"""Folder of a model or tokenizer: a local folder, or the snapshot of a Hub repository.

Tests: tests/models/test_loading.py.
"""

from pathlib import Path

from src.config.addons import functions_of_addons
from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.storage import hub
from src.storage.cache_folder import cache_root

ADAPTER = "adapter"  # adapter.safetensors of a checkpoint; in final/ also a folder in the format of peft


def model_folder(cfg: RunConfig, name: str, field: str = "model_name_or_path", weights: bool = True) -> str:
    """Return the folder of the model or tokenizer `name`, downloaded at most once. `field` is its option."""
    revision = cfg.model_revision if name == cfg.model_name_or_path else "main"
    return hub.model_folder(name, revision, field, cache_root(cfg), weights, cfg.trust_remote_code)


def pretrained_source(cfg: RunConfig) -> tuple[Path, str | None]:
    """Return (folder of the pretrained model, its commit or None). Only a model from the Hub has a commit."""
    folder = Path(model_folder(cfg, str(cfg.model_name_or_path)))
    record = hub.records.get(f"model {cfg.model_name_or_path}@{cfg.model_revision}", {})
    return folder, record.get("commit")


def adapter_files(folder: Path) -> list[Path]:
    """Return the files of the adapter that a run has saved in `folder`, if any."""
    return sorted([*folder.glob(f"{ADAPTER}.safetensors"), *folder.glob(f"{ADAPTER}-*-of-*.safetensors")])


def refuse_base_without_adapter(cfg: RunConfig, folder: Path) -> None:
    """Raise UsageError if `folder` is a checkpoint with an adapter, whose base model alone this run would load."""
    loads_adapter = functions_of_addons(cfg, "write_own_tensors")
    if not loads_adapter and adapter_files(folder) and not (folder / ADAPTER).is_dir():
        raise UsageError(
            f"{folder} holds a base model and, beside it, the adapter of a run with the field peft: give that run's peft, or "
            "its final/, where the adapter is merged"
        )


def reason(error: Exception) -> str:
    """Return the beginning of a library's error message as one line."""
    if isinstance(error, KeyError):
        return f"unknown value {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:400] or type(error).__name__
