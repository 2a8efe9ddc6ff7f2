"""Hub repositories: the commit of a dataset, the snapshot of a model, fetched once per disk.

Tests: tests/download/test_hub_downloads.py. One process of those that see the disk asks and downloads. With HF_HUB_OFFLINE=1,
or where the Hub does not answer, what was fetched before is used.
"""

import hashlib
import json
from pathlib import Path

from src.config.errors import UsageError, warn
from src.config.paths import locate, not_found_locally
from src.download.http_files import ask_once, fetched, is_offline
from src.storage.shared_work import SharedWork, write_atomic

FORMATS = ("*.safetensors", "*.bin")  # of weights, the first that a repository has
NEVER = ("*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.pth", "*.tflite", "onnx/*", "original/*", "coreml/*", "openvino/*")


def dataset_commit(name: str, revision: str | None, root: Path, work: SharedWork) -> str:
    """Return the commit of a Hub data set that a branch, tag or commit stands for; the last known where nobody answers."""
    last = root / "commits" / hashlib.sha256(repr((name, revision)).encode()).hexdigest()[:32]

    def find() -> dict:
        from huggingface_hub import HfApi

        try:
            if is_offline():
                raise OSError("HF_HUB_OFFLINE is set")
            found = {"commit": HfApi().dataset_info(name, revision=revision, timeout=30).sha}
        except Exception as error:
            if not last.exists() or _denied(error):
                raise UsageError(f"dataset_name: {name}: {not_found_locally(name)}{_first(error)}") from error
            if not is_offline():
                warn(
                    f"the Hub does not answer for {name} ({_first(error)}): the commit that was fetched last is used",
                    alone=True,
                )
            return json.loads(last.read_text())
        last.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(last, json.dumps(found))
        return found

    return ask_once(f"dataset {name}@{revision or 'main'}", root, work, find, f"asking the Hub for {name}")["commit"]


def model_folder(name: str, revision: str, field: str, root: Path, weights: bool = True, code: bool = False) -> str:
    """Return the folder of a model or tokenizer: a local one, or the snapshot of a Hub repository, fetched once.

    Without `weights`, only configuration and tokenizer; with `code`, also the Python files that trust_remote_code runs."""
    folder = locate(name)
    if Path(folder).is_dir():
        return folder
    what = f"model {name}@{revision}" if weights else f"tokenizer {name}@{revision}"
    if what in fetched:  # main may have moved since
        return fetched[what]["folder"]
    last = root / "commits" / hashlib.sha256(what.encode()).hexdigest()[:32]

    def find() -> dict:
        from huggingface_hub import HfApi, snapshot_download

        try:
            if is_offline():
                raise OSError("HF_HUB_OFFLINE is set")
            found = HfApi().model_info(name, revision=revision, timeout=30)
            files = [file.rfilename for file in found.siblings]
            formats = [kind for kind in FORMATS if any(file.endswith(kind[1:]) for file in files)]
            unwanted = [*NEVER, *(formats[1:] if weights else FORMATS), *([] if code else ["*.py"])]
            path = snapshot_download(name, revision=found.sha, ignore_patterns=unwanted, etag_timeout=30)
            told = {"folder": path, "commit": found.sha}
        except Exception as error:
            if not _denied(error) and (told := _known(last) or _cached(name, revision)):
                if not is_offline():
                    warn(f"the Hub does not answer for {name} ({_first(error)}): what was fetched before is used", True)
                return told
            raise UsageError(
                f"{field}: {name}: {not_found_locally(name)}{_first(error)} (give a folder made by save_pretrained, or a Hub id)"
            ) from error
        last.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(last, json.dumps(told))
        return told

    return ask_once(what, root, SharedWork(root), find, f"fetching {name} from the Hub")["folder"]


def _known(last: Path) -> dict | None:
    """Return what was fetched last, where it still is."""
    told = json.loads(last.read_text()) if last.exists() else None
    return told if told and Path(told["folder"]).is_dir() else None


def _cached(name: str, revision: str) -> dict | None:
    """Return what others have put into the cache of the Hub."""
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(name, revision=revision, local_files_only=True)
    except Exception:
        return None
    return {"folder": path, "commit": Path(path).name}


def _denied(error: Exception) -> bool:
    """Return whether the Hub answered that there is no such repository or revision, or that it is not for everybody."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    return isinstance(error, GatedRepoError | RepositoryNotFoundError | RevisionNotFoundError)


def _first(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    code = getattr(getattr(error, "response", None), "status_code", None)
    way = "; if it is private or gated, set HF_TOKEN to a token that may read it" if code in (401, 403) else ""
    return (" ".join(lines[:2])[:300] or type(error).__name__) + way
