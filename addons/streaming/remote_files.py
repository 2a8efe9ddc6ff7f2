"""Remote files read by a stream: version lookup before training, an error if a file changes.

Tests: tests/addons/streaming/.
"""

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from src.config.errors import UsageError, one_line
from src.storage import http_files, hub
from src.storage.cache_folder import SharedWork

AT_ONCE = 16  # files looked up in parallel


def look_up_files(urls: list[str], field: str, work: SharedWork) -> dict[str, dict]:
    """Return {url: version} with the size and ETag of each file, None if unknown. One process looks them up.

    Raise UsageError if a file is missing.
    """

    def look_up_all() -> dict:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return {"files": list(pool.map(lambda url: _look_up(url, field), urls))}

    # A URL may hold a signature, so the key is hashed and the values are redacted.
    found = work.compute_once(json.dumps([field, urls]), look_up_all, f"looking up {len(urls)} files")
    versions = dict(zip(urls, found["files"], strict=True))
    hub.records.update(versions)
    return versions


def _look_up(url: str, field: str) -> dict:
    try:
        version = http_files.look_up(url, field)
    except OSError as error:
        raise UsageError(f"{field}: {url}: not found: {one_line(error)}") from error
    return {key: version[key] for key in ("url", "bytes", "etag")}  # without the time, which differs between mirrors


_looked_up: dict[str, dict] = {}  # URL -> version found before training


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
    if answer.ok:
        await http_files.require_file(answer)
        first_asked = re.match(r"bytes=(\d+)-", params.headers.get("Range", ""))
        url = _plain((answer.history[0] if answer.history else answer).url)
        _refuse_change(url, answer.status, answer.headers, int(first_asked[1]) if first_asked else None)


def _refuse_change(url: str, status: int, headers: Mapping[str, str], first_byte: int | None) -> None:
    """Raise UsageError if a response is of another version than the one looked up, or of other bytes."""
    before, size = _looked_up.get(url, {}), headers.get("Content-Length")
    if status == 206:
        range_sent, _, size = headers.get("Content-Range", "").rpartition("/")
        if first_byte is not None and not range_sent.startswith(f"bytes {first_byte}-"):
            raise UsageError(
                f"{url}: the server answers Content-Range: {range_sent}/{size}, but the request starts at byte "
                f"{first_byte}"
            )
    if headers.get("Content-Encoding", "identity") != "identity":
        return  # the size and ETag of the compressed file
    for name, key, value in (("size", "bytes", size), ("ETag", "etag", headers.get("ETag", "W/"))):
        if (
            before.get(key)
            and value not in (None, "*", "0")
            and not value.startswith("W/")
            and str(before[key]) != value
        ):
            raise UsageError(f"{url} changed while it was read: its {name} is {value}, was {before[key]}")


def _plain(url) -> str:
    from yarl import URL

    return str(URL(url).with_fragment(None))
