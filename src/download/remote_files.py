"""Remote files read by a stream: version lookup before training, retries, an error if a file changes.

Tests: tests/addons/streaming/.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

from src.config.errors import UsageError, one_line, warn
from src.download import fetch_records, remote_version
from src.storage.shared_work import SharedWork

if TYPE_CHECKING:
    from aiohttp import ClientTimeout

PATIENCE = 120.0  # seconds without a new row before giving up on a server
PAUSE = 10.0  # maximum seconds between two attempts
AT_ONCE = 16  # files looked up in parallel


def client_timeout() -> "ClientTimeout":
    """Return the timeouts of one request. By default, datasets would wait 5 minutes, 20 times."""
    from aiohttp import ClientTimeout

    connect, read = remote_version.TIMEOUT
    return ClientTimeout(total=None, sock_connect=connect, sock_read=read)


# ---- the version that was looked up ----------------------------------------------------------------------------------


def look_up_files(urls: list[str], field: str, work: SharedWork) -> dict[str, dict]:
    """Return {url: version} with the size and ETag of each file, None if unknown. One process looks them up.

    Raise UsageError if a file is missing.
    """

    def look_up_all() -> dict:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                return {"files": list(pool.map(lambda url: _look_up(url, field), urls))}
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    # A URL may hold a signature, so the key is hashed and the values are redacted.
    found = work.compute_once(json.dumps([field, urls]), look_up_all, f"looking up {len(urls)} files")
    versions = dict(zip(urls, found["files"], strict=True))
    fetch_records.records.update(versions)
    return versions


def _look_up(url: str, field: str) -> dict:
    try:
        version = remote_version.look_up(url, field)
    except OSError as error:
        raise UsageError(f"{field}: {url}: not found: {one_line(error)}") from error
    return {key: version[key] for key in ("url", "bytes", "etag")}  # without the time, which differs between mirrors


_looked_up: dict[str, dict] = {}  # URL -> version found before training
_warned: set[str] = set()


def same_version(url: str, version: dict | None) -> dict:
    """Return options that make aiohttp compare every response with `version`."""
    _looked_up[_plain(url)] = version or {}
    return {"trace_configs": [_answer_hook()]}


@cache
def _answer_hook():
    """Return the TraceConfig that calls `_check`. Cached, because fsspec opens a connection for each set of options."""
    from aiohttp import TraceConfig

    trace = TraceConfig()
    trace.on_request_end.append(_check)
    return trace


async def _check(session, context, params) -> None:
    """Raise UsageError if a response has another version or another byte range, or does not hold the file."""
    answer = params.response
    url = _plain((answer.history[0] if answer.history else answer).url)
    if answer.status in range(201, 206) and answer.status not in remote_version.WITH_DATA:
        raise UsageError(f"{url}: the server answers {answer.status} {answer.reason}")
    range_asked = re.fullmatch(r"bytes=(\d+)-\d*", params.headers.get("Range", ""))
    first_byte = int(range_asked[1]) if range_asked else None
    remote_version.check_answer(url, _looked_up.get(url, {}), answer.status, answer.headers, first_byte)
    if not remote_version.is_plain(answer.headers) and "Content-Length" not in answer.headers and url not in _warned:
        _warned.add(url)
        warn(f"{url}: compressed and sent without a length, so a truncated file would not be noticed", any_rank=True)


def _plain(url) -> str:
    from yarl import URL

    return str(URL(url).with_fragment(None))


# ---- retries ---------------------------------------------------------------------------------------------------------


def retry_reads(begin: Callable[[], Iterator], name: str) -> Iterator:
    """Yield the items of `begin()`, which must yield the same items at each call.

    If the server fails, call `begin` again and skip the items already yielded. Give up after PATIENCE seconds without a
    new item. The retries of `datasets` cover neither opening a file nor reading a file in one request.
    """
    done, last, pause = 0, time.monotonic(), 0.5
    while True:
        try:
            for number, item in enumerate(begin()):
                if number == done:
                    yield item
                    done, last, pause = done + 1, time.monotonic(), 0.5
            return
        except Exception as error:
            # fsspec may report a failing server as a missing file. The file existed when it was looked up.
            lost = "://" in name and isinstance(error, FileNotFoundError) and error.__cause__ is None
            if not (lost or is_transient(error)) or time.monotonic() + pause - last > PATIENCE:
                raise
            if pause == 0.5:
                warn(f"{name}: {one_line(error, 200)}: retrying for {PATIENCE:g} s", any_rank=True)
        time.sleep(pause)
        pause = min(2 * pause, PAUSE)


def is_transient(error: BaseException | None) -> bool:
    """Return True if an error comes from the connection or a busy server, so that a retry may succeed."""
    from aiohttp import ClientError

    while error is not None:
        status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status >= 500 or status in (408, 429)
        # Compare names, because huggingface_hub has changed its HTTP library more than once.
        names = {kind.__name__ for kind in type(error).__mro__}
        if isinstance(error, ClientError | ConnectionError | TimeoutError):
            return True
        if names & {"TransportError", "RequestException"}:
            return True
        error = error.__cause__ or error.__context__  # fsspec reports any error of a server as FileNotFoundError
    return False
