"""Hub repositories: dataset commits and model snapshots, fetched once per machine or shared disk.

`huggingface_hub` downloads and caches. This file gives all ranks the same commit, and records the last complete fetch.
The record is used with HF_HUB_OFFLINE=1, or when the Hub does not answer: `huggingface_hub` remembers a commit before
its files are complete, and waits forever for a silent Hub. Tests: tests/storage/test_hub_downloads.py.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from src.config.errors import UsageError, one_line, warn
from src.config.paths import locate, not_found_locally
from src.storage.atomic_folder import rewrite
from src.storage.cache_folder import compute_once
from src.storage.jsonl import read_json

TIMEOUT = 30  # seconds to wait for a response of the Hub
WEIGHT_FORMATS = ("*.safetensors", "*.bin")  # download only the first format that a repository has
UNUSED = ("*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.pth", "*.tflite")
UNUSED += ("onnx/*", "original/*", "coreml/*", "openvino/*")

records: dict[str, dict] = {}  # name or URL -> commit, or size and ETag; environment.json lists them


def fetch_once(key: str, fetch: Callable[[], dict], root: Path, what: str) -> dict:
    """Return the record of `fetch()`. One process of the launch calls it, so all ranks use the same version."""
    if key not in records:
        records[key] = compute_once(root, key, fetch, what)
    return records[key]


def is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def reuse(record: dict, where: str, error: Exception, hint: str = "") -> dict:
    """Return the record of an earlier fetch, because of `error`. Raise UsageError if the record is empty."""
    if not record:
        raise UsageError(f"{where}: {hint or 'not fetched: '}{one_line(error, 400)}") from error
    if not is_offline():
        warn(f"{where}: no answer ({one_line(error)}): using the version fetched earlier", any_rank=True)
    return record


def dataset_commit(name: str, revision: str | None, root: Path) -> str:
    """Return the commit hash of a Hub dataset at `revision` (branch, tag or commit): the same one on all ranks."""
    return _fetch("dataset", name, revision, "dataset_name", root, lambda info: {})["commit"]


def model_folder(name: str, revision: str, field: str, root: Path, weights: bool = True, code: bool = False) -> str:
    """Return the folder of a model or tokenizer: a local folder, or the snapshot of a Hub repository.

    Without `weights`, download only configuration and tokenizer. With `code`, also download the Python files that
    trust_remote_code runs.
    """

    def download(info: Any) -> dict:
        from huggingface_hub import snapshot_download

        files = [file.rfilename for file in info.siblings or []]
        available = [pattern for pattern in WEIGHT_FORMATS if any(file.endswith(pattern[1:]) for file in files)]
        unwanted = [*UNUSED, *(available[1:] if weights else WEIGHT_FORMATS), *([] if code else ["*.py"])]
        folder = snapshot_download(name, revision=info.sha, ignore_patterns=unwanted, etag_timeout=TIMEOUT)
        return {"folder": folder}

    if Path(folder := locate(name)).is_dir():
        if not Path(folder, "config.json").exists() and Path(folder, "final", "config.json").exists():
            raise UsageError(f"{field}: {name} is the folder of a run: give {name}/final, the model in it")
        return folder
    part = "model" if weights else "tokenizer"
    return _fetch(part, name, revision, field, root, download)["folder"]


def _fetch(part: str, name: str, revision: str | None, field: str, root: Path, download: Callable) -> dict:
    """Return the record of a repository: its commit, and what `download(its information)` returns.

    If the Hub does not answer, return the last record, or what another program has downloaded."""
    repo_type, key = "dataset" if part == "dataset" else "model", f"{part} {name}@{revision or 'main'}"
    where = f"{field}: {name}"
    last = root / "commits" / hashlib.sha256(key.encode()).hexdigest()[:32]

    def earlier() -> dict:
        from huggingface_hub import snapshot_download

        record = read_json(last)
        if not record or not Path(record.get("folder", "/")).is_dir():
            record = {}
            with suppress(Exception):
                folder = snapshot_download(name, revision=revision, repo_type=repo_type, local_files_only=True)
                record = {"folder": folder, "commit": Path(folder).name}
        return record

    def fetch() -> dict:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:
            if is_offline():
                raise OSError("HF_HUB_OFFLINE is set")
            info = HfApi().repo_info(name, revision=revision, repo_type=repo_type, timeout=TIMEOUT)
            record = {"commit": info.sha} | download(info)
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:  # the former also for gated ones
            return reuse({}, where, error, not_found_locally(name))
        except Exception as error:
            return reuse(earlier(), where, error, not_found_locally(name))
        last.parent.mkdir(parents=True, exist_ok=True)
        rewrite(last, json.dumps(record))
        return record

    return fetch_once(key, fetch, root, f"fetching {name} from the Hub")
