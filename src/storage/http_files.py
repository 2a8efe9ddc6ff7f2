"""Files behind URLs (http, https, s3, gs, hf, …): downloaded by fsspec once per disk, complete or absent.

fsspec looks up the version and transfers the bytes. This file adds what neither fsspec nor `datasets` does. The caches
of both write down the URL with its query string, which may be a secret. Those of fsspec have no locks, and an
incomplete file has its final name. That of `datasets` fails where the server does not answer, and notices no change of
a file without an ETag. Tests: tests/storage/test_http_files.py.
"""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from src.config.errors import UsageError, errors_of, one_line, warn
from src.config.redact import redact_all
from src.storage import atomic_folder, jsonl
from src.storage.cache_folder import exclusive
from src.storage.hub import fetch_once, is_offline

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientTimeout

TIMEOUT = (10, 120)  # seconds to wait for the connection, and for the next byte
TRIES = 3  # attempts, each from the start of the file
TIMES = ("Last-Modified", "mtime", "LastModified", "last_modified", "updated")  # names in `info` of fsspec
RECORD = "fetched.json"  # written last: a download without it is incomplete


def server_version(file: str) -> list | None:
    """Return the version of a downloaded file: [hash of the URL, size, ETag or time]. Return None for other files."""
    folder = Path(file).parent
    if folder.parent.name != "downloads" or not (record := jsonl.read_json(folder / RECORD)):
        return None
    return [folder.name, record["bytes"], record["etag"] or record["modified"] or os.stat(file).st_mtime_ns]


def fetch_file(url: str, field: str, root: Path) -> str:
    """Return the path of the local copy of `url`. One process downloads it unless the copy is complete and current."""
    folder = root / "downloads" / hashlib.sha256(url.encode()).hexdigest()[:32]
    what = f"downloading {url}"

    def fetch() -> dict:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder / RECORD, what):  # another launch may download the same file
            return _fetch(url, field, folder)

    return str(folder / fetch_once(url, fetch, root, what)["file"])


def _fetch(url: str, field: str, folder: Path) -> dict:
    """Return the record of a complete copy in `folder`. The copy is current if the server answers."""
    record = jsonl.read_json(folder / RECORD)
    copy = folder / record.get("file", "")
    record = record if copy.is_file() and copy.stat().st_size == record["bytes"] else {}
    if is_offline() and not record:
        raise UsageError(f"{field}: {url}: not fetched: HF_HUB_OFFLINE is set")
    if is_offline():
        return record
    failure = ""
    for failures in range(TRIES):
        time.sleep(failures)
        try:
            version = look_up(url, field)
            return record if record and _is_current(record, version) else _download(url, field, version, folder)
        except UsageError as error:
            failure = str(error)
            if failures + 1 == TRIES and not record:
                raise
    warn(f"{failure}: using the version fetched earlier", any_rank=True)
    return record


def _is_current(record: dict, version: dict) -> bool:
    """Return True if the ETag, or the time of a file without one, proves that the copy is current. A size does not."""
    key = "etag" if version["etag"] else "modified"
    return version[key] is not None and record[key] == version[key] and version["bytes"] in (None, record["bytes"])


def _download(url: str, field: str, version: dict, folder: Path) -> dict:
    """Download a file and return its record. Raise UsageError if the copy is incomplete, or the file changes meanwhile."""
    part, file = folder / "part", folder / f"file{Path(urlparse(url).path).suffix}"
    store, path = _open_store(url)
    print(f"downloading {url}", flush=True)
    with errors_of(f"{field}: {url}: not fetched"):
        store.get_file(path, str(part))
        size = part.stat().st_size
        if version["bytes"] not in (None, size):
            raise OSError(f"the connection ended after {size:,} of {version['bytes']:,} bytes")
        if look_up(url, field) != version:
            raise OSError("the file changed while it was downloaded")
        with open(part, "rb") as content:
            if "html" in version["type"] and content.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
                raise OSError("the server sent a web page instead of data: does the URL need a login?")
    if version["bytes"] is None:
        warn(f"{url}: the server does not send the length, so a truncated file may not be noticed", any_rank=True)
    atomic_folder.fsync(part)
    part.replace(file)
    record = version | {"file": file.name, "bytes": size}
    atomic_folder.rewrite(folder / RECORD, json.dumps(record))
    return record


# ---- fsspec ----------------------------------------------------------------------------------------------------------


def look_up(url: str, field: str) -> dict:
    """Return size, ETag, time and media type of a remote file; the first three are None if the server does not say.

    Raise UsageError if the server does not answer, or the file is missing or empty or access is denied."""
    try:
        store, path = _open_store(url)
        info = store.info(path)
    except Exception as error:  # fsspec reports any error of a web server as a missing file
        raise UsageError(f"{field}: {url}: not available: {one_line(error.__cause__ or error)}") from error
    if info.get("size") == 0:
        raise UsageError(f"{field}: {url} is empty: remove it")
    etag = info.get("ETag") or info.get("etag") or "W/"
    return {
        "url": redact_all(url),
        "bytes": info.get("size"),
        "etag": None if etag.startswith("W/") else etag,  # different bytes may share a weak ETag
        "modified": next((str(info[name]) for name in TIMES if info.get(name)), None),
        "type": info.get("mimetype", ""),
    }


def _open_store(url: str) -> tuple[Any, str]:
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
