"""Hub repositories: dataset commits and model snapshots, fetched once per machine or shared disk.

`huggingface_hub` downloads and caches. This file gives all ranks the same commit, and records the last complete fetch.
The record is used with HF_HUB_OFFLINE=1, or when the Hub does not answer: `HfApi.resolve_revision` remembers a commit
before its files are complete, and waits forever for a silent Hub. Tests: tests/storage/test_hub_downloads.py.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from src.config.errors import UsageError, did_you_mean, one_line, warn
from src.config.paths import locate, not_found_locally
from src.storage.atomic_folder import read_json
from src.storage.cache_folder import SharedWork, sample_names, write_atomic

TIMEOUT = 30  # seconds to wait for a response of the Hub
WEIGHT_FORMATS = ("*.safetensors", "*.bin")  # download only the first format that a repository has
UNUSED = ("*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.pth", "*.tflite")
UNUSED += ("onnx/*", "original/*", "coreml/*", "openvino/*")

records: dict[str, dict] = {}  # name or URL -> commit, or size and ETag; environment.json lists them


def fetch_once(key: str, fetch: Callable[[], dict], work: SharedWork, what: str) -> dict:
    """Return the record of `fetch()`. One process of the launch calls it, so all ranks use the same version."""
    if key not in records:
        records[key] = work.compute_once(key, fetch, what)
    return records[key]


def is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def dataset_commit(name: str, revision: str | None, root: Path, work: SharedWork) -> str:
    """Return the commit hash of a Hub dataset at `revision` (branch, tag or commit): the same one on all ranks."""

    def ask() -> dict:
        from huggingface_hub import HfApi

        return {"commit": HfApi().dataset_info(name, revision=revision, timeout=TIMEOUT).sha}

    key, fix = f"dataset {name}@{revision or 'main'}", did_you_mean(name, sample_names())
    last = _record_file(root, key)
    fetch = lambda: _ask_or_reuse(name, f"dataset_name: {name}", last, ask, lambda: None, fix)  # noqa: E731
    return fetch_once(key, fetch, work, f"asking the Hub for {name}")["commit"]


def model_folder(name: str, revision: str, field: str, root: Path, weights: bool = True, code: bool = False) -> str:
    """Return the folder of a model or tokenizer: a local folder, or the snapshot of a Hub repository.

    Without `weights`, download only configuration and tokenizer. With `code`, also download the Python files that
    trust_remote_code runs.
    """
    folder = locate(name)
    if Path(folder).is_dir():
        return folder

    def download() -> dict:
        from huggingface_hub import HfApi, snapshot_download

        info = HfApi().model_info(name, revision=revision, timeout=TIMEOUT)
        files = [file.rfilename for file in info.siblings or []]
        available = [pattern for pattern in WEIGHT_FORMATS if any(file.endswith(pattern[1:]) for file in files)]
        unwanted = [*UNUSED, *(available[1:] if weights else WEIGHT_FORMATS), *([] if code else ["*.py"])]
        folder = snapshot_download(name, revision=info.sha, ignore_patterns=unwanted, etag_timeout=TIMEOUT)
        return {"folder": folder, "commit": info.sha}

    def cached() -> dict:  # by another program
        from huggingface_hub import snapshot_download

        folder = snapshot_download(name, revision=revision, local_files_only=True)
        return {"folder": folder, "commit": Path(folder).name}

    key, fix = (
        f"{'model' if weights else 'tokenizer'} {name}@{revision}",
        " (a folder of save_pretrained, or a Hub id?)",
    )
    last = _record_file(root, key)
    fetch = lambda: _ask_or_reuse(name, f"{field}: {name}", last, download, cached, fix)  # noqa: E731
    return fetch_once(key, fetch, SharedWork(root), f"fetching {name} from the Hub")["folder"]


def _record_file(root: Path, key: str) -> Path:
    return root / "commits" / hashlib.sha256(key.encode()).hexdigest()[:32]


def _ask_or_reuse(
    name: str, where: str, last: Path, ask: Callable[[], dict], cached: Callable[[], dict | None], fix: str
) -> dict:
    """Return `ask()` and save it in the file `last`. If the Hub does not answer, return what was saved, or `cached()`.

    Raise UsageError if the Hub refuses, or if there is nothing."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        if is_offline():
            raise OSError("HF_HUB_OFFLINE is set")
        record = ask()
    except Exception as error:
        reason, record = _short_reason(error), None
        if not isinstance(error, RepositoryNotFoundError | RevisionNotFoundError):  # the former also for gated ones
            with suppress(Exception):
                saved = read_json(last)
                record = saved if saved and Path(saved.get("folder", "/")).is_dir() else cached()
        if record is None:
            raise UsageError(f"{where}: {not_found_locally(name)}{reason}{fix}") from error
        if not is_offline():
            warn(f"the Hub does not answer for {name} ({reason}): using the version fetched earlier", any_rank=True)
        return record
    last.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(last, json.dumps(record))
    return record


def _short_reason(error: Exception) -> str:
    code = getattr(getattr(error, "response", None), "status_code", None)
    hint = "; if it is private or gated, set HF_TOKEN to a token that may read it" if code in (401, 403) else ""
    return one_line(error, 300) + hint
