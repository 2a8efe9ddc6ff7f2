"""Hub repositories: dataset commits and model snapshots, fetched once per machine or shared disk.

`huggingface_hub` downloads, locks and caches; each process asks it for the commit. With HF_HUB_OFFLINE=1, or when the Hub
does not answer, it uses the commit that a name meant before, and refuses incomplete files. This file warns of an earlier
commit, and limits the wait for a silent Hub; `check_same_data` compares the commits of all ranks.
Tests: tests/engine/storage/test_hub_downloads.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.config.errors import UsageError, one_line, warn
from engine.config.paths import locate, not_found_locally
from engine.storage.git_lfs import refuse_pointers_of_model

TIMEOUT = 30  # seconds to wait for a response of the Hub
UNUSED = ("*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.pth", "*.tflite")
UNUSED += ("onnx/*", "original/*", "coreml/*", "openvino/*")

records: dict[str, dict] = {}  # name or URL -> commit, or size and hash; environment.json lists them


def is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def dataset_commit(name: str, revision: str | None) -> str:
    """Return the commit hash of a Hub dataset at `revision` (branch, tag or commit)."""
    return _fetch("dataset", name, revision, "dataset_name", lambda commit: {})["commit"]


def fetch_model(name: str, revision: str, field: str, weights: bool = True, code: bool = False) -> str:
    """Return the folder of a model or tokenizer: a local folder, or the snapshot of a Hub repository.

    Without `weights`, download only configuration and tokenizer. With `code`, also download the Python files that
    trust_remote_code runs.
    """

    def download(commit: str) -> dict:
        from huggingface_hub import snapshot_download

        unwanted = [*UNUSED, *([] if code else ["*.py"]), *([] if weights else ["*.safetensors"])]
        options = {"revision": commit, "etag_timeout": TIMEOUT}
        folder = snapshot_download(name, ignore_patterns=[*unwanted, "*.bin"], **options)
        if weights and not any(Path(folder).rglob("*.safetensors")):  # only the older format
            snapshot_download(name, ignore_patterns=unwanted, **options)
        return {"folder": folder}

    folder = locate(name)
    if Path(folder).is_dir():
        refuse_pointers_of_model(folder, field, weights)
        return folder
    part = "model" if weights else "tokenizer"
    return _fetch(part, name, revision, field, download)["folder"]


def _fetch(part: str, name: str, revision: str | None, field: str, download: Callable) -> dict:
    """Return the record of a repository: its commit, and what `download(commit)` returns."""
    key = f"{part} {name}@{revision or 'main'}"
    if key in records:
        return records[key]
    from huggingface_hub import HfApi, get_session
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    repo_type = "dataset" if part == "dataset" else "model"
    where = f"{field}: {name}"

    class Hub(HfApi):
        """Asks for a commit within TIMEOUT, and remembers a failure, after which the cache may have answered."""

        failure: Exception | None = None

        def repo_info(self, *args, **options) -> Any:
            try:
                return super().repo_info(*args, timeout=TIMEOUT, **options)
            except Exception as error:
                self.failure = error
                raise

    hub = Hub()
    get_session().timeout = TIMEOUT  # of the list of files; by default both wait forever
    try:
        try:
            commit = hub.resolve_revision(name, repo_type=repo_type, revision=revision)
        except (RepositoryNotFoundError, RevisionNotFoundError):
            raise
        except HfHubHTTPError:  # such as 429, too many requests: only 500 and above use the cache
            commit = hub.resolve_revision(name, repo_type=repo_type, revision=revision, local_files_only=True)
        record = {"commit": commit.resolved} | download(commit)
    except Exception as error:
        raise UsageError(f"{where}: {not_found_locally(name) or 'not fetched: '}{one_line(error, 400)}") from error
    if hub.failure and not is_offline():
        warn(f"{where}: no answer ({one_line(hub.failure)}): using the version fetched earlier")
    records[key] = record
    return record
