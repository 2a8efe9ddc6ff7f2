"""Versions of remote files: look up size, ETag and time; reject responses of another version.

Downloads and streams use the same checks.
Tests: tests/download/test_http_files.py, tests/addons/streaming/test_remote_files.py.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from src.config.errors import UsageError
from src.config.redact import redact

TIMEOUT = (10, 120)  # seconds to wait for the connection, and for the next byte
TRIES = 3  # requests without progress before giving up on a server
WITH_DATA = (200, 203, 206)  # HTTP statuses of responses that hold the file
BUSY = (202, 408, 429, 500, 502, 503, 504)  # HTTP statuses to retry; 202: the file is being prepared
NOT_FOR_US = (401, 403, 404, 410)  # access denied, or no such file


class FileChanged(UsageError):
    """A response has another version of a file than the one looked up, or another byte range."""


@contextmanager
def open_url(method: str, url: str, headers: dict | None = None) -> Iterator:
    """Yield the response to a request, with its body unread. urllib3 retries on no response and on a BUSY status."""
    import requests
    from urllib3.util import Retry

    waits = {"backoff_factor": 0.5, "retry_after_max": 60}  # seconds
    retry = Retry(TRIES - 1, read=1, status_forcelist=BUSY, raise_on_status=False, **waits)
    adapter = requests.adapters.HTTPAdapter(max_retries=retry)
    with requests.Session() as session:
        session.mount("http://", adapter)
        session.mount("https://", adapter)
        headers = {"Accept-Encoding": "identity"} | (headers or {})
        options = {"headers": headers, "stream": True, "allow_redirects": True, "timeout": TIMEOUT}
        with session.request(method, url, **options) as answer:
            yield answer


def look_up(url: str, field: str) -> dict:
    """Return size, ETag and time of a remote file; each is None if the server does not send it.

    Raise UsageError if the file is missing or access is denied, OSError if the server does not answer.
    """
    return _look_up_http(url, field) if url.startswith("http") else _look_up_in_store(url, field)


def _look_up_http(url: str, field: str) -> dict:
    with open_url("HEAD", url) as answer:
        known = answer.status_code in WITH_DATA and answer.headers.get("Content-Length", "0") != "0"
    if not known:  # some servers refuse HEAD (signed URLs), or answer without a length
        with open_url("GET", url, {"Range": "bytes=0-0"}) as answer:
            pass
    if answer.status_code in NOT_FOR_US:
        raise UsageError(f"{field}: {url}: the server answers {answer.status_code} {answer.reason}")
    empty = answer.status_code == 416  # an empty file has no first byte
    if not empty:
        require_data(answer)
    return _version(url, answer.status_code, answer.headers)


def require_data(answer) -> None:
    """Raise OSError if a response does not hold the file."""
    answer.raise_for_status()
    if answer.status_code not in WITH_DATA:
        raise OSError(f"the server answers {answer.status_code} {answer.reason}")


def _look_up_in_store(url: str, field: str) -> dict:
    """Return the version of a file in an object store that fsspec reads (s3, gs, hf, …)."""
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
        info = system.info(path)
    except FileNotFoundError as error:
        raise UsageError(f"{field}: {url}: no such file") from error
    except OSError:
        raise
    except Exception as error:  # the package for this store is missing, or there are no credentials
        raise UsageError(f"{field}: {url}: {error or type(error).__name__}") from error
    times = [info[name] for name in ("mtime", "LastModified", "last_modified", "updated") if info.get(name)]
    modified = str(times[0]) if times else None
    return {
        "url": redact(url),
        "bytes": info.get("size"),
        "etag": info.get("ETag") or info.get("etag"),
        "modified": modified,
    }


def _version(url: str, status: int, headers: Mapping[str, str]) -> dict:
    """Return the version of the whole file from response headers. Ignore weak ETags: different bytes may share one."""
    size = (
        headers.get("Content-Range", "").rpartition("/")[2] if status in (206, 416) else headers.get("Content-Length")
    )
    known = is_plain(headers) and size and size.isdigit()
    etag = headers.get("ETag", "W/")
    return {
        "url": redact(url),
        "bytes": int(size or 0) if known else None,
        "etag": None if etag.startswith("W/") else etag,
        "modified": headers.get("Last-Modified"),
    }


def is_plain(headers: Mapping[str, str]) -> bool:
    """Return True if a response is not compressed. Some stores compress without being asked."""
    return headers.get("Content-Encoding", "identity") == "identity"


def difference(before: dict, now: dict) -> str | None:
    """Return the first difference of two versions in words, None if they are equal. Skip fields unknown in either."""
    for key, name in (("bytes", "size"), ("etag", "ETag"), ("modified", "Last-Modified")):
        if before.get(key) is None or now.get(key) is None:
            continue
        if before[key] != now[key]:
            return f"{name} is {now[key]}, was {before[key]}"
        if key == "etag":
            return None  # with the same ETag, the time may differ between mirrors
    return None


def is_unchanged(before: dict, now: dict) -> bool:
    """Return True if the ETag or the time proves that a file is the same. An equal size is no proof."""
    known = any(before.get(key) and before[key] == now.get(key) for key in ("etag", "modified"))
    return known and difference(before, now) is None


def check_answer(url: str, version: dict, status: int, headers: Mapping[str, str], first_byte: int | None) -> None:
    """Raise FileChanged if a response has another version of the file, or does not begin at `first_byte`."""
    if status == 416 and first_byte:
        raise FileChanged(f"{url} changed: it no longer has byte {first_byte:,}")
    if status == 206 and first_byte is not None:
        content_range = headers.get("Content-Range", "")
        part = re.match(r"bytes (\d+)-", content_range)
        if not part or int(part[1]) != first_byte:
            raise FileChanged(
                f"{url}: the server answers Content-Range: {content_range or 'nothing'}, but the request "
                f"starts at byte {first_byte}"
            )
    if status in WITH_DATA and is_plain(headers):
        now = _version(url, status, headers)
        if found := difference(version, now | {"bytes": now["bytes"] or None}):  # some servers write 0 for unknown
            raise FileChanged(f"{url} changed while it was read: its {found}")
