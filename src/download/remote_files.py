"""Files read where they are (streaming): look up size and ETag, retry reads, refuse changed files.

Tests: tests/download/test_remote_files.py and tests/download/test_hub_downloads.py.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from src.config.errors import UsageError, warn
from src.config.redact import redact
from src.download import http_files
from src.storage.shared_work import SharedWork

PATIENCE = 120.0  # seconds without anything new, after which a server is given up
PAUSE = 10.0  # seconds between two attempts, at most
ASKED = 16  # files that are asked after at a time


def client_timeout():
    """Return how long one answer is waited for: datasets would wait 5 minutes, 20 times."""
    from aiohttp import ClientTimeout

    return ClientTimeout(total=None, sock_connect=http_files.SILENCE[0], sock_read=http_files.SILENCE[1])


# ---- the version that was looked up ------------------------------------------------------------------------------------

_looked_up: dict[str, dict] = {}  # URL -> what its server said
_warned: set[str] = set()


@cache
def _watcher():
    """Return what makes aiohttp show us each answer; one for all, because fsspec keeps a connection for each set of options."""
    from aiohttp import TraceConfig

    trace = TraceConfig()
    trace.on_request_end.append(_compare)
    return trace


def same_version(url: str, told: dict | None) -> dict:
    """Return options for aiohttp with which every answer is compared with what was said of `url` when it was looked up."""
    _looked_up[_plain(url)] = told or {}
    return {"trace_configs": [_watcher()]}


def _plain(url) -> str:
    from yarl import URL

    return str(URL(url).with_fragment(None))


async def _compare(session, context, params) -> None:
    """Raise UsageError where an answer is of another version of a file than the one that was looked up, or another part of it."""
    answer = params.response
    url = _plain((answer.history[0] if answer.history else answer).url)
    told, headers = _looked_up.get(url, {}), answer.headers
    if answer.status in range(201, 206) and answer.status not in http_files.WITH_DATA:
        raise UsageError(f"{url}: the server answers {answer.status} {answer.reason}")
    if answer.status not in http_files.WITH_DATA:
        return
    if headers.get("Content-Encoding", "identity") != "identity":
        if "Content-Length" not in headers and url not in _warned:
            _warned.add(url)
            warn(f"{url}: compressed and without a length: an early end would not be noticed", alone=True)
        return
    whole = (
        headers.get("Content-Length") if answer.status != 206 else headers.get("Content-Range", "").rpartition("/")[2]
    )
    asked = re.fullmatch(r"bytes=(\d+)-\d*", params.headers.get("Range", ""))
    begun = re.match(r"bytes (\d+)-", headers.get("Content-Range", ""))
    if answer.status == 206 and asked and (not begun or begun[1] != asked[1]):
        said = headers.get("Content-Range") or "nothing"
        raise UsageError(f"{url}: the server answers Content-Range: {said}, to a request from byte {asked[1]}")
    if told.get("bytes") is not None and (whole or "").isdigit() and int(whole) not in (0, told["bytes"]):
        raise UsageError(
            f"{url} changed while it was trained on: it has {int(whole):,} bytes, and had {told['bytes']:,}"
        )
    if told.get("etag") and headers.get("ETag", told["etag"]).removeprefix("W/") != told["etag"]:
        raise UsageError(
            f"{url} changed while it was trained on: its ETag is {headers['ETag']}, and was {told['etag']}"
        )


# ---- patience ------------------------------------------------------------------------------------------------------


def retry_reads(begin: Callable[[], Iterator], name: str) -> Iterator:
    """Yield what `begin()` yields, the same each time it is called; where a server fails it is called again, and what has come
    is passed over, until PATIENCE is over since the last of it."""
    came, last, pause = 0, time.monotonic(), 0.5
    while True:
        try:
            for number, item in enumerate(begin()):
                if number == came:
                    yield item
                    came, last, pause = came + 1, time.monotonic(), 0.5
            return
        except Exception as error:
            # Of a server that fails fsspec may say that a file is not there; but it was, when it was looked up.
            lost = "://" in name and isinstance(error, FileNotFoundError) and error.__cause__ is None
            waits = lost or is_transient(error)
            if not waits or time.monotonic() + pause - last > PATIENCE:
                raise
            if pause == 0.5:
                warn(f"{name}: {' '.join(str(error).split())[:200]}: trying for {PATIENCE:g} s", alone=True)
        time.sleep(pause)
        pause = min(2 * pause, PAUSE)


def is_transient(error: BaseException | None) -> bool:
    """Return whether a fault is that of a connection or of a busy server, which may be over soon."""
    from aiohttp import ClientError

    while error is not None:
        status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status >= 500 or status in (408, 429)
        names = {
            kind.__name__ for kind in type(error).__mro__
        }  # the Hub's client has changed its library more than once
        if isinstance(error, ClientError | ConnectionError | TimeoutError) or names & {
            "TransportError",
            "RequestException",
        }:
            return True
        error = error.__cause__ or error.__context__  # fsspec calls any fault of a server FileNotFoundError
    return False


def look_up_files(urls: list[str], field: str, root: Path, work: SharedWork) -> dict[str, dict]:
    """Return what their servers say of files (bytes and ETag, None where they do not say), asked by one process and at once;
    UsageError names one that is not there."""

    def find() -> dict:
        with ThreadPoolExecutor(ASKED) as pool:
            try:
                return {"answers": list(pool.map(lambda url: _said_of(url, field), urls))}  # in a file, so without URLs
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    found = http_files.ask_once(key := json.dumps([field, urls]), root, work, find, f"looking up {len(urls)} files")
    told = dict(zip(urls, found["answers"], strict=True))
    http_files.fetched.pop(key)
    http_files.fetched.update(told)  # one by one, for environment.json
    return told


def _said_of(url: str, field: str) -> dict:
    for failures in range(1, http_files.TRIES + 1):
        try:
            if not url.startswith("http"):
                import fsspec

                system, path = fsspec.core.url_to_fs(url)
                told = system.info(path)
                return {"url": redact(url), "bytes": told.get("size"), "etag": told.get("ETag") or told.get("etag")}
            return _head(url)
        except (ValueError, ImportError, FileNotFoundError) as error:
            raise UsageError(f"{field}: {url}: {str(error) or 'no such file'}") from error
        except OSError as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            refused = getattr(getattr(error, "response", None), "status_code", 500) < 500
            if refused or failures == http_files.TRIES:
                raise UsageError(f"{field}: {url}: not found: {reason} (tried {failures} times)") from error
        time.sleep(2**failures / 2)


def _head(url: str) -> dict:
    """Return what a server says of a file; where it has no answer to HEAD, as for signed URLs, to a GET of the first byte."""
    import requests

    answer = requests.head(
        url, headers={"Accept-Encoding": "identity"}, allow_redirects=True, timeout=http_files.SILENCE
    )
    if not answer.ok or answer.headers.get("Content-Length") == "0":
        headers = {"Accept-Encoding": "identity", "Range": "bytes=0-0"}
        with requests.get(url, headers=headers, stream=True, timeout=http_files.SILENCE) as answer:
            pass  # the rest of it is not read
    if answer.status_code in (401, 403, 404, 410):
        raise ValueError(f"the server answers {answer.status_code} {answer.reason}")
    if answer.status_code != 416:  # the first byte of an empty file
        answer.raise_for_status()
        if answer.status_code not in http_files.WITH_DATA:
            raise requests.RequestException(f"the server answers {answer.status_code} {answer.reason}")
    size = answer.headers.get("Content-Range", "").rpartition("/")[2] or answer.headers.get("Content-Length", "")
    plain = answer.headers.get("Content-Encoding", "identity") == "identity" and size.isdigit()
    etag = answer.headers.get("ETag", "W/")
    return {"url": redact(url), "bytes": int(size) if plain else None, "etag": None if etag.startswith("W/") else etag}
