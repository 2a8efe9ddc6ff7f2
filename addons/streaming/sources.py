"""Sources of a stream: files that are read from where they are, and evaluation data of a Hub dataset beside a stream.

Tests: tests/addons/streaming/test_remote_files.py and tests/addons/streaming/test_hub_streams.py.
"""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import xxhash

from addons.streaming import remote_files
from src.config.errors import UsageError
from src.data import sources
from src.data.sources import Source, at_commit, drop_files
from src.storage.cache_folder import SharedWork, cache_root

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

SAMPLE = 1 << 14  # bytes


@dataclass(frozen=True)
class StreamSource(Source):
    """Training data that is read during training."""

    remote: Mapping[str, dict] = dataclasses.field(default_factory=dict)  # URL -> its size and ETag

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
        known = self.remote.get(file, {})
        return known.get("bytes"), known.get("etag")

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


@dataclass(frozen=True)
class HubEvaluation(Source):
    """Evaluation data of a Hub dataset beside a stream: only its first rows are read, and no file of other splits."""

    first_rows: int | None = None

    @property
    def hub(self) -> tuple | None:
        return (*(super().hub or ()), *([self.first_rows] if self.first_rows else []))

    def load_split(self, builder: "DatasetBuilder", split: str, cache: str | None) -> "Dataset":
        from datasets import Dataset

        files = builder.config.data_files
        if files:  # otherwise `datasets` would open the files of other splits too
            builder.config.data_files = {split: files[split]}
        rows = builder.as_streaming_dataset(split=split)
        rows = rows.take(self.first_rows) if self.first_rows else rows
        return Dataset.from_generator(rows.__iter__, features=rows.features, cache_dir=cache)


def fetch_evaluation(source: Source, cfg: Any, work: SharedWork) -> Source:
    """Download the files of evaluation data; of a Hub dataset, look up its commit."""
    found = sources.fetch_source(source, cfg, work)
    return found if source.builder or source.files else HubEvaluation(**vars(found), first_rows=cfg.max_eval_examples)


def look_up_stream(source: Source, cfg: Any, work: SharedWork) -> Source:
    """Return the source of a stream with the size and ETag of its URLs, or with the commit of its Hub repository."""
    root = cache_root(cfg)
    stream = StreamSource(**vars(source))
    if not source.builder:
        return stream if source.files else at_commit(stream, root, work)
    urls = [file for file in source.files if "://" in file]
    if not urls:
        return stream
    if source.builder == "text":  # datasets opens it with an argument that fsspec refuses
        raise UsageError(
            f"{source.field}: {urls[0]}: a .txt file cannot be streamed from a server: give jsonl, csv or parquet, or "
            "remove --streaming"
        )
    remote = remote_files.look_up_files(urls, source.field, work)
    return drop_files(replace(stream, remote=remote), {url for url in urls if remote[url].get("bytes") == 0})
