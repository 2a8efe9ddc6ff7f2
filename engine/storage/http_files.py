"""Files behind URLs (http, https, s3, gs, hf, …): downloaded by fsspec once per disk, complete or absent.

A file that is in the cache is used, and its date is printed: remove it there to download it again. fsspec transfers the
bytes. This file adds what neither fsspec nor `datasets` does: the caches of both write down the URL with its query
string, which may be a secret; those of fsspec have no locks, and an incomplete file has its final name.
Tests: tests/engine/storage/test_http_files.py.
"""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from engine.config.errors import UsageError, one_line
from engine.config.redact import redact_all
from engine.storage import atomic_folder, hub, jsonl
from engine.storage.cache_folder import exclusive
from engine.storage.hub import is_offline
from engine.storage.verify_hashes import hash_file

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientTimeout

TIMEOUT = (10, 120)  # seconds to wait for the connection, and for the next byte
TRIES = 3  # attempts, each from the start of the file
RECORD = "fetched.json"  # written last: a download without it is incomplete


def content_key(file: str) -> list | None:
    """Return [size, hash] of a downloaded file, wherever the cache is; None for other files."""
    folder = Path(file).parent
    record = jsonl.read_json(folder / RECORD) if folder.parent.name == "downloads" else {}
    return [record["size"], record["xxh3_128"]] if record else None


def fetch_file(url: str, field: str, root: Path) -> str:
    """Return the path of the local copy of `url`. One process downloads it if there is no complete copy."""
    folder = root / "downloads" / hashlib.sha256(url.encode()).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    if url not in hub.records:
        with exclusive(folder / RECORD, f"downloading {url}"):
            hub.records[url] = _find_copy(url, field, folder) or _download(url, field, folder)
    return str(folder / hub.records[url]["file"])


def _find_copy(url: str, field: str, folder: Path) -> dict:
    """Return the record of the copy in `folder` and print its date; {} if there is no complete copy."""
    record = jsonl.read_json(folder / RECORD)
    copy = folder / record.get("file", "")
    if not copy.is_file() or copy.stat().st_size != record.get("size"):
        return {}
    name = Path(urlparse(url).path).name
    date = record["downloaded"]
    if os.environ.get("RANK", "0") == "0":
        print(f"{field}: using {name}, downloaded {date}; to download it again, remove {folder}", flush=True)
    return record


def _download(url: str, field: str, folder: Path) -> dict:
    """Download a file, publish it under its name in `folder`, and return its record."""
    if is_offline():
        raise UsageError(f"{field}: {url}: not fetched: HF_HUB_OFFLINE is set")
    part = folder / "part"
    file = folder / f"file{Path(urlparse(url).path).suffix}"
    print(f"downloading {url}", flush=True)
    for attempt in range(1, TRIES + 1):
        try:
            store, path = open_store(url)
            store.get_file(path, str(part))
            break
        except Exception as error:  # of any kind: each store has its own
            if attempt == TRIES:
                raise UsageError(f"{field}: {url}: not fetched: {one_line(error)}") from error
            time.sleep(attempt)
    content = hash_file(part)
    if content["size"] == 0:
        raise UsageError(f"{field}: {url} is empty: remove it")
    atomic_folder.fsync(part)
    part.replace(file)
    record = {"url": redact_all(url), "file": file.name, "downloaded": time.strftime("%Y-%m-%d")} | content
    atomic_folder.rewrite(folder / RECORD, json.dumps(record))
    return record


# ---- fsspec ----------------------------------------------------------------------------------------------------------


def open_store(url: str) -> tuple[Any, str]:
    """Return the file system of fsspec for a URL, and the path there."""
    import fsspec

    options: dict[str, Any] = {}
    if url.startswith("http"):
        client = {"trust_env": True, "timeout": client_timeout(), "raise_for_status": require_file}
        options = {"client_kwargs": client, "headers": {"Accept-Encoding": "identity"}}
        options["encoded"] = "%" in url  # or %2F in the query of a signed URL would become /
    return fsspec.core.url_to_fs(url, **options)


def client_timeout() -> "ClientTimeout":
    """Return the timeouts of one request. By default, aiohttp would end a transfer after 5 minutes."""
    from aiohttp import ClientTimeout

    return ClientTimeout(total=None, sock_connect=TIMEOUT[0], sock_read=TIMEOUT[1])


async def require_file(answer: "ClientResponse") -> None:
    """Raise OSError for a response that does not hold the file. 202, for example, says that it is being prepared."""
    if answer.status not in (200, 203, 206):
        raise OSError(f"the server answers {answer.status} {answer.reason}")
