"""Sources of a stream: files that are read from where they are, and evaluation data of a Hub dataset beside a stream.

Tests: tests/addons/streaming/test_remote_files.py and tests/addons/streaming/test_hub_streams.py.
"""

import dataclasses
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import xxhash

from engine.config.errors import UsageError, one_line
from engine.config.redact import redact_all
from engine.rows import sources
from engine.rows.sources import Source, at_commit
from engine.storage import http_files, hub

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

AT_ONCE = 16  # files looked up in parallel
SAMPLE = 1 << 14  # bytes


@dataclass(frozen=True)
class StreamSource(Source):
    """Training data that is read during training."""

    remote: Mapping[str, dict] = dataclasses.field(default_factory=dict)  # URL -> its size and ETag

    def open_file(self, path: str) -> Any:
        client = {"trust_env": True, "timeout": http_files.client_timeout()}
        return _open_url(path, client_kwargs=client | same_version(path, self.remote.get(path)))

    def versions(self) -> list[tuple]:
        """Return (path below the common folder, bytes, ETag) of each file; unknown values are None.

        The result stays the same if files are moved, and on nodes with their own copies."""
        names = [self.origins.get(file, file) for file in self.files]
        names = [name.split("?")[0] if "://" in name else name for name in names]
        start = len(os.path.commonprefix(names).rpartition("/")[0])  # noqa: RUF071 (URLs, too; cut at a /)
        return [(name[start:].lstrip("/"), *self._size(file)) for name, file in zip(names, self.files, strict=True)]

    def _size(self, file: str) -> tuple[int | None, str | None]:
        if "://" not in file:
            return os.path.getsize(file), None
        version = self.remote.get(file, {})
        return version.get("bytes"), version.get("etag")

    def sample(self) -> str | None:
        """Return a hash of bytes from the start, middle and end of the first 1000 files, or None without local files.

        Small files are read completely. Large files are read at a few offsets, SAMPLE bytes each."""
        files = [file for file in self.files[:1000] if "://" not in file]
        digest = xxhash.xxh3_128()
        count = max(2, min(16, 2000 // max(1, len(files))))
        for name in files:
            with open(name, "rb") as file:
                last = max(0, os.path.getsize(name) - SAMPLE)
                for offset in sorted({last * i // (count - 1) for i in range(count)}):
                    file.seek(offset)
                    digest.update(file.read(SAMPLE))
        return digest.hexdigest() if files else None


def _open_url(url: str, **options: Any) -> Any:
    """Open a URL to read its bytes where they are, in parts."""
    from datasets import DownloadConfig
    from datasets.utils.file_utils import xopen

    options = {} if url.startswith("hf://") else options
    return xopen(url, "rb", download_config=DownloadConfig(storage_options=options))


def look_up_stream(source: Source, cfg: Any) -> Source:
    """Return the source of a stream with the size and ETag of its URLs, or with the commit of its Hub repository."""
    stream = StreamSource(**vars(source))
    if not source.kind:
        return stream if source.files else at_commit(stream)
    urls = [file for file in source.files if "://" in file]
    if not urls:
        return stream
    with ThreadPoolExecutor(AT_ONCE) as pool:
        remote = dict(zip(urls, pool.map(lambda url: _look_up(url, source.field), urls), strict=True))
    hub.records.update(remote)
    return replace(stream, remote=remote)


def _look_up(url: str, field: str) -> dict:
    """Return the size and ETag of a remote file; None if the server does not say.

    Raise UsageError if the server does not answer, or the file is missing or empty or access is denied."""
    try:
        store, path = http_files.open_store(url)
        info = store.info(path)
    except Exception as error:  # fsspec reports any error of a web server as a missing file
        raise UsageError(f"{field}: {url}: not available: {one_line(error.__cause__ or error)}") from error
    if info.get("size") == 0:
        raise UsageError(f"{field}: {url} is empty: remove it")
    etag = info.get("ETag") or info.get("etag") or "W/"
    etag = None if etag.startswith("W/") else etag  # different bytes may share a weak ETag
    return {"url": redact_all(url), "bytes": info.get("size"), "etag": etag}


# ---- evaluation data beside a stream ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class HubEvaluation(Source):
    """Evaluation data of a Hub dataset beside a stream: only its first rows are read, and no file of other splits."""

    first_rows: int | None = None

    @property
    def hub(self) -> tuple | None:
        return (*(super().hub or ()), *([self.first_rows] if self.first_rows else []))

    def open_file(self, path: str) -> Any:
        return _open_url(path)

    def fetch_files(self, builder: "DatasetBuilder", files: list[str], cache: str | None) -> list[str]:
        return files

    def load_split(self, builder: "DatasetBuilder", split: str, cache: str | None) -> "Dataset":
        from datasets import Dataset

        files = builder.config.data_files
        if files:  # otherwise `datasets` would open the files of other splits too
            builder.config.data_files = {split: files[split]}
        rows = builder.as_streaming_dataset(split=split)
        rows = rows.take(self.first_rows) if self.first_rows else rows
        return Dataset.from_generator(rows.__iter__, features=rows.features, cache_dir=cache)


def fetch_evaluation(source: Source, cfg: Any) -> Source:
    """Download the files of evaluation data; of a Hub dataset, look up its commit."""
    fetched = sources.fetch_source(source, cfg)
    if source.kind or source.files:
        return fetched
    return HubEvaluation(**vars(fetched), first_rows=cfg.max_eval_examples)


# ---- a file that changes while it is read ----------------------------------------------------------------------------

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
    """Raise UsageError if a response has another version than the one looked up, or does not hold the file."""
    answer = params.response
    if not answer.ok:
        return
    await http_files.require_file(answer)
    headers, url = answer.headers, _plain((answer.history[0] if answer.history else answer).url)
    if headers.get("Content-Encoding", "identity") != "identity":
        return  # the size and ETag of the compressed file
    before, size = _looked_up.get(url, {}), headers.get("Content-Length")
    if answer.status == 206:
        size = headers.get("Content-Range", "").rpartition("/")[2]
    if before.get("bytes") and size not in (None, "", "*", "0") and str(before["bytes"]) != size:
        raise UsageError(f"{url} changed while it was read: its size is {size}, was {before['bytes']}")
    etag = headers.get("ETag", "W/")  # a weak one says nothing about the bytes
    if before.get("etag") and not etag.startswith("W/") and before["etag"] != etag:
        raise UsageError(f"{url} changed while it was read: its ETag is {etag}, was {before['etag']}")


def _plain(url) -> str:
    from yarl import URL

    return str(URL(url).with_fragment(None))
