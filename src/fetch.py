"""From the network to this disk, once: http files, commits of Hub data sets, Hub models. Then everybody reads local files.

Leave alone. Guarded by tests/test_fetch.py. One process of those that see the disk asks and downloads; a download is complete
when its record is there, which is written last. With HF_HUB_OFFLINE=1, or without a network, what was fetched before is used.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlparse

from src import store
from src.inputs import UsageError, absent, locate, warn
from src.together import Crew, leave

SILENCE = (10, 120)  # seconds to wait for a connection, and for the next byte
TRIES = 3  # attempts that bring no byte, before the file is given up
CHUNK = 1 << 20
FORMATS = ("*.safetensors", "*.bin")  # of weights, the first that a repository has
NEVER = ("*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.pth", "*.tflite", "onnx/*", "original/*", "coreml/*", "openvino/*")

record: dict[str, dict] = {}  # what this run was fetched from, for environment.json


def offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _ask(key: str, root: Path, crew: Crew, find: Callable[[], dict], what: str) -> dict:
    """Return what `find()` returns, called by one process of the launch on this disk, and once."""
    if key in record:
        return record[key]
    answer = crew.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    with suppress(OSError):
        if not crew.recent(answer.stat().st_mtime):
            answer.unlink()  # an earlier launch of the same name asked
    crew.once(answer, lambda: leave(answer, json.dumps(find())), what)
    record[key] = found = json.loads(answer.read_text())
    return found


# ---- files -----------------------------------------------------------------------------------------------------------


def stamp(file: str) -> list | None:
    """Return what the server said of a fetched file, by which it can be told from others; None for any other file."""
    known = Path(file).parent / "fetched.json"
    if Path(file).parent.parent.name != "downloads" or not known.exists():
        return None
    told = json.loads(known.read_text())
    return [told["url"], told["bytes"], told["etag"] or told["modified"] or os.stat(file).st_mtime_ns]


def file(url: str, field: str, root: Path, crew: Crew, origins: dict[str, str]) -> str:
    """Return the local copy of the file at `url`, downloaded by one process if it is not there or changed since."""
    folder = root / "downloads" / hashlib.sha256(url.encode()).hexdigest()[:32]
    told = _ask(url, root, crew, lambda: _current(url, field, folder, crew), f"downloading {url}")
    local = str(folder / told["file"])
    origins[local] = url
    return local


def _current(url: str, field: str, folder: Path, crew: Crew) -> dict:
    """Return the record of a complete and current download of `url` in `folder`."""
    known = folder / "fetched.json"
    told = json.loads(known.read_text()) if known.exists() else None
    if told and (offline() or not (folder / told["file"]).exists()):
        told = told if (folder / told["file"]).exists() else None
        if told:
            return told
    if offline():
        raise UsageError(f"{field}: {url}: not fetched yet, and HF_HUB_OFFLINE is set: run once without it (make data)")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        fresh = _http(url, folder, told, crew) if url.startswith("http") else _other(url, folder)
    except OSError as error:  # what requests and fsspec raise is of this kind, too
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if told:
            warn(f"{url} cannot be reached ({reason}): what was fetched before is used")
            return told
        raise UsageError(
            f"{url}: not fetched: {reason}. What has come is kept; the same command goes on from there"
        ) from error
    except ValueError as error:
        raise UsageError(f"{field}: {url}: {error}") from error
    if fresh:
        leave(known, json.dumps(fresh))
    return fresh or told


def _http(url: str, folder: Path, told: dict | None, crew: Crew) -> dict | None:
    """Download `url`, going on from where an attempt before was cut off; return its record, or None if `told` is current."""
    import requests

    part, about, name = folder / "part", folder / "part.json", _name(url)
    failures = 0
    while True:
        begun = part.stat().st_size if part.exists() and about.exists() else 0
        version = json.loads(about.read_text())["version"] if begun else None
        headers = {"Accept-Encoding": "identity"}
        if begun and version:
            headers |= {"Range": f"bytes={begun}-", "If-Range": version}
        elif told and told["etag"]:
            headers["If-None-Match"] = told["etag"]
        elif told and told["modified"]:
            headers["If-Modified-Since"] = told["modified"]
        came, reason = 0, ""
        try:
            with requests.get(url, headers=headers, stream=True, timeout=SILENCE) as answer:
                if answer.status_code == 304:
                    return None
                if answer.status_code in (401, 403, 404, 410):
                    raise ValueError(f"the server answers {answer.status_code} {answer.reason}")
                answer.raise_for_status()
                begun = begun if answer.status_code == 206 else 0
                etag, modified = (answer.headers.get(word) for word in ("ETag", "Last-Modified"))
                strong = etag if etag and not etag.startswith("W/") else None
                length = answer.headers.get("Content-Length")
                total = begun + int(length) if length else None
                leave(about, json.dumps({"version": strong or modified}))
                with open(part, "ab" if begun else "wb") as target:
                    for chunk in _shown(answer.iter_content(CHUNK), url, begun, total):
                        target.write(chunk)
                        target.flush()  # what is killed now goes on from here
                        came += len(chunk)
                        crew.check()
            if total is None or begun + came == total:
                store.flush(part)
                part.replace(folder / name)
                about.unlink(missing_ok=True)
                return {"url": url, "file": name, "bytes": begun + came, "etag": etag, "modified": modified}
            reason = f"the connection ended after {begun + came:,} of {total:,} bytes"
        except requests.RequestException as error:
            reason = " ".join(str(error).split())[:300]
        failures = (
            0 if came and version else failures + 1
        )  # a server that lets us go on may be cut off any number of times
        if failures >= TRIES:
            raise OSError(f"{reason} (tried {TRIES} times)")
        time.sleep(2**failures / 2)


def _other(url: str, folder: Path) -> dict:
    """Copy a file from any other kind of store that fsspec knows (s3, gs, hf, …)."""
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
        told = system.info(path)
        system.get_file(path, str(folder / "part"))
    except ImportError as error:
        raise ValueError(str(error)) from error
    store.flush(folder / "part")
    (folder / "part").replace(folder / _name(url))
    size = (folder / _name(url)).stat().st_size
    return {
        "url": url,
        "file": _name(url),
        "bytes": size,
        "etag": told.get("ETag") or told.get("etag"),
        "modified": None,
    }


def _name(url: str) -> str:
    return unquote(Path(urlparse(url).path).name) or "file"


def _shown(chunks, url: str, begun: int, total: int | None):
    """Yield `chunks` under a progress bar in bytes."""
    from tqdm import tqdm

    interval = 0.2 if sys.stderr.isatty() else 10.0
    options = {"unit": "B", "unit_scale": True, "mininterval": interval, "delay": 1, "leave": False}
    with tqdm(total=total, initial=begun, desc=f"downloading {_name(url)}", **options) as bar:
        for chunk in chunks:
            yield chunk
            bar.update(len(chunk))


# ---- the Hub ---------------------------------------------------------------------------------------------------------


def dataset_commit(name: str, revision: str | None, root: Path, crew: Crew) -> str:
    """Return the commit of a Hub data set that a branch, tag or commit stands for; the last known where nobody answers."""
    last = root / "commits" / hashlib.sha256(repr((name, revision)).encode()).hexdigest()[:32]

    def find() -> dict:
        from huggingface_hub import HfApi

        try:
            if offline():
                raise OSError("HF_HUB_OFFLINE is set")
            found = {"commit": HfApi().dataset_info(name, revision=revision, timeout=30).sha}
        except Exception as error:
            if not last.exists() or _denied(error):
                raise UsageError(f"dataset_name: {name}: {absent(name)}{_first(error)}") from error
            if not offline():
                warn(f"the Hub does not answer for {name} ({_first(error)}): the commit that was fetched last is used")
            return json.loads(last.read_text())
        last.parent.mkdir(parents=True, exist_ok=True)
        leave(last, json.dumps(found))
        return found

    return _ask(f"dataset {name}@{revision or 'main'}", root, crew, find, f"asking the Hub for {name}")["commit"]


def model_folder(name: str, revision: str, field: str, root: Path, weights: bool = True, code: bool = False) -> str:
    """Return the folder of a model or tokenizer: a local one, or the snapshot of a Hub repository, fetched once.

    Without `weights`, only configuration and tokenizer; with `code`, also the Python files that trust_remote_code runs."""
    folder = locate(name)
    if Path(folder).is_dir():
        return folder

    def find() -> dict:
        from huggingface_hub import HfApi, snapshot_download

        try:
            if offline():
                path = snapshot_download(name, revision=revision, local_files_only=True)
                return {"folder": path, "commit": Path(path).name}
            found = HfApi().model_info(name, revision=revision, timeout=30)
            files = [file.rfilename for file in found.siblings]
            formats = [kind for kind in FORMATS if any(file.endswith(kind[1:]) for file in files)]
            unwanted = [*NEVER, *(formats[1:] if weights else FORMATS), *([] if code else ["*.py"])]
            path = snapshot_download(name, revision=found.sha, ignore_patterns=unwanted, etag_timeout=30)
            return {"folder": path, "commit": found.sha}
        except Exception as error:
            if not offline() and not _denied(error) and (path := _cached(name, revision)):
                warn(f"the Hub does not answer for {name} ({_first(error)}): what was fetched before is used")
                return {"folder": path, "commit": Path(path).name}
            raise UsageError(
                f"{field}: {name}: {absent(name)}{_first(error)} (give a folder made by save_pretrained, or a Hub id)"
            ) from error

    what = f"model {name}@{revision}" if weights else f"tokenizer {name}@{revision}"
    return _ask(what, root, Crew(root), find, f"fetching {name} from the Hub")["folder"]


def _cached(name: str, revision: str) -> str | None:
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, revision=revision, local_files_only=True)
    except Exception:
        return None


def _denied(error: Exception) -> bool:
    """Return whether the Hub answered that there is no such repository or revision, or that it is not for everybody."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    return isinstance(error, GatedRepoError | RepositoryNotFoundError | RevisionNotFoundError)


def _first(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] or type(error).__name__
