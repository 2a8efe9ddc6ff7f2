"""Source of a split, resolved once: local files, URLs, a folder, or a Hub dataset at one commit.

Tests: tests/data/test_dataset.py, tests/download/test_http_files.py and tests/config/test_bad_input.py.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from src.config.errors import UsageError, warn
from src.config.paths import locate
from src.config.schema import RunConfig
from src.data.dataset_spec import DatasetSpec
from src.data.local_files import BUILDERS, expand, is_empty, list_folder
from src.download import http_files, hub, remote_files, samples
from src.download.cache_folder import cache_root
from src.storage.shared_work import SharedWork

SAMPLE = 1 << 14  # bytes


@dataclass(frozen=True)
class Source:
    """Raw rows of one split: files for a builder of `datasets`, or a folder or Hub dataset by name."""

    field: str  # field of the run file (YAML), for messages
    split: str  # train or validation: what the rows are for
    files: tuple[str, ...] = ()  # for a folder: all its files, also those of other splits
    builder: str | None = None
    name: str | None = None
    config_name: str | None = None
    revision: str | None = None  # Hub revision, replaced by its commit when looked up
    dataset_split: str | None = None  # split of a dataset given by name to train on, if it is not "train"
    held_out: float | None = None  # share of the training rows that are evaluation data (src/data/held_out.py)
    first_rows: int | None = None  # read only so many rows of a Hub dataset (evaluation beside a stream)
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)  # downloaded file -> its URL
    remote: Mapping[str, dict] = dataclasses.field(default_factory=dict)  # streamed URL -> its size and ETag

    def __str__(self) -> str:
        return self.display_names(self.files) or str(self.name)

    def display_names(self, files: Iterable[str]) -> str:
        """Return the first three of `files` for messages: URLs instead of their local copies."""
        return ", ".join(self.origins.get(file, file) for file in list(files)[:3])

    @property
    def hub(self) -> tuple | None:
        """(config name, revision, split) of a dataset given by name, and what else chooses its rows; else None."""
        given = [value for value in (self.dataset_split, self.first_rows) if value]
        return None if self.builder else (self.config_name, self.revision, self.rows_of, *given)

    @property
    def rows_of(self) -> str:
        """The split that is read: held-out rows are rows of the training data."""
        return "train" if self.held_out else self.split

    def choose_split(self, names: Iterable[str]) -> str | None:
        """Return the one of `names` to read, or None. For validation use "test" if "validation" is missing.

        Raise UsageError if `dataset_split` is no split of the dataset, or the one that is evaluated."""
        names, given, training = [str(name) for name in names], self.dataset_split, self.rows_of == "train"
        wanted = (given or "train",) if training else ("validation", "test")
        found = next((name for name in wanted if name in names), None)
        what = f"{self.field.removesuffix('dataset_name')}dataset_split is {given}"
        if given and training and found is None:
            raise UsageError(f"{what}, but the splits of {self.name} are {', '.join(names)}: give one of them")
        if given and not training and found == given:
            raise UsageError(
                f"{what}, which is also the evaluation data: give another split, or a validation_file, or "
                "validation_split (a share of these rows)"
            )
        return found

    @property
    def saved_to_disk(self) -> bool:
        """Whether this is a folder that `save_to_disk` wrote."""
        names = ("dataset_info.json", "dataset_dict.json")
        return not self.builder and any(file.endswith(names) for file in self.files)

    def unused_split(self, names: Iterable[str]) -> str | None:
        """Return the dataset's own evaluation split if held-out rows take its place."""
        own = (name for name in ("validation", "test") if name in names and name != self.dataset_split)
        return next(own, None) if self.held_out and self.split == "validation" else None

    # ---- identity of the data ----------------------------------------------------------------------------------------

    def key(self) -> list:
        """Return the values that identify this data on this disk, for cache keys."""
        return [self.file_keys(self.files), self.builder, self.name, self.hub, self.held_out]

    def file_keys(self, files: Iterable[str]) -> list:
        """Return [path, size, timestamps] of local files, the server's version of downloaded ones, [URL] of others."""
        return [self._file_key(file) for file in files]

    def _file_key(self, file: str) -> list:
        if version := http_files.server_version(file):
            return version
        if "://" in file:
            return [file]
        found = os.stat(file)
        return [file, found.st_size, found.st_mtime_ns, found.st_ctime_ns]

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


def resolve_source(spec: DatasetSpec, cache: Path) -> Source:
    """Return the source that a run file names, without downloading it. Raise UsageError if local files are missing."""
    if spec.files:
        files = tuple(file for pattern in spec.files for file in expand(pattern, spec.field))
        source = drop_empty_files(Source(spec.field, spec.split, files, held_out=spec.held_out))
        kinds = {Path(file.split("?")[0]).suffix for file in source.files}
        if len(kinds) > 1 or not kinds <= set(BUILDERS):
            raise UsageError(f"{spec.field}: {source}: give files of one type only ({', '.join(BUILDERS)})")
        return replace(source, builder=BUILDERS[kinds.pop()])
    name = str(spec.name)  # a spec without files has a name
    folder = samples.sample_folder(name, cache) or locate(name)
    source = Source(spec.field, spec.split, (), None, spec.name, spec.config_name, spec.revision)
    source = replace(source, dataset_split=spec.dataset_split, held_out=spec.held_out)
    if not os.path.isdir(folder):
        return source
    return replace(source, files=tuple(list_folder(folder, spec.field)), name=folder, revision=None)


def fetch_source(source: Source, cfg: RunConfig, work: SharedWork) -> Source:
    """Download the URLs of a source, or look up the commit of its Hub repository. Return the updated source."""
    root = cache_root(cfg)
    if source.builder:
        urls = [file for file in source.files if "://" in file]
        local = {url: http_files.fetch_file(url, source.field, root, work) for url in urls}
        files = tuple(local.get(file, file) for file in source.files)
        fetched = replace(source, files=files, origins={file: url for url, file in local.items()})
        return drop_empty_files(fetched) if urls else source
    if source.files:
        return source
    return _at_commit(replace(source, first_rows=cfg.max_eval_examples if cfg.streaming else None), root, work)


def look_up_stream(source: Source, cfg: RunConfig, work: SharedWork) -> Source:
    """Return the source of a stream with the size and ETag of its URLs, or with the commit of its Hub repository."""
    root = cache_root(cfg)
    if source.saved_to_disk:
        raise UsageError(
            f"{source.field}: {source.name} was written by save_to_disk, which cannot be streamed: remove --streaming (such "
            "data is memory-mapped without conversion)"
        )
    if not source.builder:
        return source if source.files else _at_commit(source, root, work)
    urls = [file for file in source.files if "://" in file]
    if not urls:
        return source
    if source.builder == "text":  # datasets opens it with an argument that fsspec refuses
        raise UsageError(
            f"{source.field}: {urls[0]}: a .txt file cannot be streamed from a server: give jsonl, csv or parquet, or "
            "remove --streaming"
        )
    return drop_empty_files(replace(source, remote=remote_files.look_up_files(urls, source.field, work)))


def _at_commit(source: Source, root: Path, work: SharedWork) -> Source:
    return replace(source, revision=hub.dataset_commit(str(source.name), source.revision, root, work))


def drop_empty_files(source: Source) -> Source:
    """Return the source without files that hold no rows, with a warning for each. Shard writers leave such files.

    A URL counts as empty if its downloaded file is empty, or if its server reports zero bytes."""
    empty = {
        file
        for file in source.files
        if (source.remote.get(file, {}).get("bytes") == 0 if "://" in file else is_empty(file))
    }
    if empty and len(empty) == len(set(source.files)):
        raise UsageError(f"{source.field}: {source} is empty: give a file with at least one row")
    for file in sorted(empty):
        warn(f"{source.field}: {source.display_names([file])} is empty and skipped")
    return replace(source, files=tuple(file for file in source.files if file not in empty))
