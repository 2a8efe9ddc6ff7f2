"""Source of a split: local files, URLs, a folder, or a Hub dataset at one commit; unreadable files are refused.

Tests: tests/engine/plan/test_dataset.py, tests/engine/rows/test_bad_rows.py and tests/engine/storage/test_http_files.py.
"""

import dataclasses
import glob
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.config.errors import UsageError, warn_once
from engine.config.paths import locate, plain_data
from engine.config.run_config import RunConfig
from engine.storage import http_files, hub
from engine.storage.cache_folder import cache_root, sample_folder, sample_module
from engine.storage.git_lfs import refuse_pointers

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

# File suffix -> kind of files, as engine/rows/read.py and `datasets` name it
KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow"}
COMPRESSED = {".gz", ".bz2", ".lz4", ".xz", ".zst", ".zip"}  # `datasets` reads them in folders
IMAGES = {".heic", ".heif", ".avif", ".jxl"}  # that `datasets` does not read
# Suffixes of files that are nothing but data; others are data if they are named like a split
DATA = KINDS.keys() - {".json", ".txt"} | {".tsv", ".ndjson"} | COMPRESSED | IMAGES
SPLITS = re.compile(r"(train|training|valid|validation|val|dev|test|testing|eval|evaluation)([^a-z]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """Raw rows of one split: files of one kind, or a folder or Hub dataset by name."""

    field: str  # field of the run file (YAML), for messages
    split: str  # train or validation: what the rows are for
    files: tuple[str, ...] = ()  # for a folder: all its files, also those of other splits
    kind: str | None = None  # of `files`: json, csv, parquet, arrow or text
    name: str | None = None
    config_name: str | None = None
    revision: str | None = None  # Hub revision, replaced by its commit when looked up
    dataset_split: str | None = None  # split of a dataset given by name to train on, if it is not "train"
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)  # downloaded file -> its URL
    computed: Any = None  # class of rows that a file of samples/ computes; then there are no files

    def __str__(self) -> str:
        return self.display_names(self.files) or str(self.name)

    def display_names(self, files: Iterable[str]) -> str:
        """Return the first three of `files` for messages: URLs instead of their local copies."""
        return ", ".join(self.origins.get(file, file) for file in list(files)[:3])

    @property
    def hub(self) -> tuple | None:
        """(config name, revision, split) of a dataset given by name, and what else chooses its rows; else None."""
        given = [self.dataset_split] if self.dataset_split else []
        return None if self.kind else (self.config_name, self.revision, self.rows_of, *given)

    def choose_split(self, names: Iterable[str]) -> str | None:
        """Return the one of `names` to read, or None. For validation use "test" if "validation" is missing.

        Raise UsageError if `dataset_split` is no split of the dataset, or the one that is evaluated."""
        names = [str(name) for name in names]
        given = self.dataset_split
        is_training = self.rows_of == "train"
        wanted = (given or "train",) if is_training else ("validation", "test")
        split = next((name for name in wanted if name in names), None)
        is_wrong = split is None if is_training else split == given
        if given and is_wrong:
            where = self.field.removesuffix("dataset_name")
            raise UsageError(
                f"{where}dataset_split is {given}: give a split of {self.name} that is not its evaluation data: "
                f"{', '.join(names)}"
            )
        return split

    @property
    def saved_to_disk(self) -> bool:
        """True for a folder that `save_to_disk` wrote."""
        names = ("dataset_info.json", "dataset_dict.json")
        return not self.kind and any(file.endswith(names) for file in self.files)

    def key(self) -> list:
        """Return the values that identify this data on this disk, for cache keys."""
        return [self.file_keys(self.files), self.kind, self.name, self.hub]

    def file_keys(self, files: Iterable[str]) -> list:
        """Return [path, size, timestamps] of local files, [size, hash] of downloaded ones, [URL] of others."""
        keys = []
        for file in files:
            key = [file]
            if "://" not in file:
                status = os.stat(file)
                key += [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
            keys.append(http_files.content_key(file) or key)
        return keys

    # ---- what a class of an add-on may replace -----------------------------------------------------------------------

    @property
    def rows_of(self) -> str:
        """The split that is read."""
        return self.split

    def open_file(self, path: str) -> Any:
        """Open a file that is not on this disk, to read its bytes."""
        raise NotImplementedError

    @property
    def first_rows(self) -> int | None:
        """How many rows are read; None: all."""
        return None

    def choose_rows(self, rows: list[dict], features: Mapping[str, Any]) -> np.ndarray:
        """Return for each of these raw rows whether it belongs to this source. `features`: of columns with types."""
        return np.ones(len(rows), bool)

    def explain_no_rows(self, count: int) -> str:
        """Return the message of an error: `choose_rows` has chosen none of `count` raw rows."""
        return f"{self.split} data: {self} holds no rows"

    def fetch_files(self, builder: "DatasetBuilder", files: list[str], cache: str | None) -> list[str]:
        """Return where files of a dataset given by name are on this disk; those of the Hub are downloaded."""
        if self.files:
            return files
        from datasets import DownloadConfig, DownloadManager

        folder = os.path.join(cache, "downloads") if cache else None
        config = DownloadConfig(cache_dir=folder, token=builder.token, use_etag=False)
        return [str(file) for file in DownloadManager(builder.dataset_name, download_config=config).download(files)]

    def load_split(self, builder: "DatasetBuilder", split: str, cache: str | None) -> "Dataset":
        """Return the rows of a split of a dataset given by name, in the cache of `datasets`."""
        builder.download_and_prepare()
        return builder.as_dataset(split=split)


def find_sources(cfg: RunConfig, split: str) -> dict[str, Source]:
    """Return each source that the run file names for a split, by its name in the mixture ("" without a mixture)."""
    if cfg.mixture and not (split == "validation" and cfg.validation_file):
        sources = {}
        for name, fields in cfg.mixture.items():
            sources[name] = find_source(fields, split, f"mixture: {name}: ", cache_root(cfg))
    else:
        sources = {"": find_source(vars(cfg), split, "", cache_root(cfg))}
    return {name: source for name, source in sources.items() if source}


def find_source(fields: Mapping, split: str, where: str, cache: Path) -> Source | None:
    """Return the source that these fields name for a split, without downloading it; None if they name none.

    `where` stands before a field in messages. Raise UsageError if local files are missing."""
    if fields.get(f"{split}_file"):
        return _source_of_files(fields[f"{split}_file"], split, f"{where}{split}_file")
    if not fields.get("dataset_name") or fields.get("train_file"):
        return None
    name = str(fields["dataset_name"])
    dataset_split = fields.get("dataset_split")
    source = Source(
        f"{where}dataset_name",
        split,
        name=name,
        config_name=fields.get("dataset_config_name"),
        dataset_split=None if dataset_split == "train" else dataset_split,  # the default: one cache key
    )
    rows = getattr(sample_module(name), "Rows", None)
    if rows:
        for of_hub in ("dataset_config_name", "dataset_revision"):
            if fields.get(of_hub):
                raise UsageError(f"{where}{of_hub} is {fields[of_hub]}, but {name} is a file of samples/: remove it")
        return replace(source, computed=rows)
    folder = sample_folder(name, cache) or locate(name)
    if os.path.isdir(folder):
        return replace(source, files=tuple(_list_folder(folder, source.field)), name=folder)
    return replace(source, revision=fields.get("dataset_revision"))


def _source_of_files(patterns: list[str], split: str, field: str) -> Source:
    """Return the source of these files, globs and URLs; raise UsageError unless all are of one known type."""
    files: list[str] = []
    for pattern in patterns:
        files += _expand(pattern, field)
    source = Source(field, split, tuple(files))
    suffixes = {Path(file.split("?")[0] if "://" in file else file).suffix for file in files}
    if len(suffixes) > 1 or not suffixes <= set(KINDS):
        tar = "; of .tar shards give the folder as --dataset_name" if ".tar" in suffixes else ""
        raise UsageError(f"{field}: {source}: give files of one type only ({', '.join(KINDS)}){tar}")
    return replace(source, kind=KINDS[suffixes.pop()])


def fetch_source(source: Source, cfg: RunConfig) -> Source:
    """Download the URLs of a source, or look up the commit of its Hub repository. Return the updated source."""
    if not source.kind:
        return source if source.files or source.computed else at_commit(source)
    root = cache_root(cfg)
    local = {url: http_files.fetch_file(url, source.field, root) for url in source.files if "://" in url}
    for url, file in local.items():
        refuse_pointers([file], source.field, url)
    files = tuple(local.get(file, file) for file in source.files)
    return replace(source, files=files, origins={file: url for url, file in local.items()})


def at_commit(source: Source) -> Source:
    """Return a source of the Hub with the commit of its revision."""
    return replace(source, revision=hub.dataset_commit(str(source.name), source.revision))


# ---- local files -----------------------------------------------------------------------------------------------------


def _expand(pattern: str, field: str) -> list[str]:
    """Return the sorted files of a path or glob, or the URL. Raise UsageError for a missing, unreadable or empty file."""
    if "://" in pattern:
        return [pattern]
    path = locate(pattern)
    files = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True))
    files = [os.path.abspath(file) for file in files if "**" not in pattern or not os.path.isdir(file)]
    if not files:
        raise UsageError(f"{field}: {pattern}: no such file")
    empty = [file for file in files if os.path.getsize(_require_readable(file, field)) == 0]
    if empty:
        raise UsageError(f"{field}: {', '.join(empty[:5])} is empty ({len(empty)} of {len(files)} files): remove it")
    return files


def _list_folder(folder: str, field: str) -> list[str]:
    """Return all files below a folder except hidden ones. Raise UsageError for what `datasets` skips silently."""
    paths = [path for path in sorted(Path(folder).rglob("*")) if "/." not in str(path)[len(folder) :]]
    for path in (Path(folder), *paths):
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):  # `rglob` would skip its files
            raise UsageError(f"{field}: {path} is a folder that cannot be read")
    return [_require_readable(str(path), field) for path in paths if path.is_symlink() or not path.is_dir()]


def _require_readable(file: str, field: str) -> str:
    """Return `file`. Raise UsageError for a folder (or a symlink to one), a pipe (it would hang), a broken symlink, and a
    pointer of Git LFS."""
    if not os.path.isfile(file) or not os.access(file, os.R_OK):
        raise UsageError(
            f"{field}: {file} is not a readable file: give a folder as --dataset_name, or a glob of its files"
        )
    refuse_pointers([file], field)
    return file


# ---- a folder given as `dataset_name` --------------------------------------------------------------------------------


def named_files(source: Source, data_files: Mapping | None) -> list[str]:
    """Return the files of all splits that `datasets` reads from a local folder, or [] for a Hub dataset.

    Raise UsageError if its README.md, or state.json of `save_to_disk`, names files outside the folder. Symlinks are the
    user's choice. Warn of files that `datasets` does not read: it reads files of one type, and finds the split in the
    file name."""
    files: list[str] = []
    if source.files and data_files:
        for files_of_split in data_files.values():
            files += [str(file) for file in files_of_split]
    for file in files:
        is_inside = Path(os.path.abspath(file)).is_relative_to(os.path.abspath(str(source.name)))
        is_remote = "://" in file or "::" in file
        if not (plain_data(file) if is_remote else is_inside):
            raise UsageError(f"{source.field}: {source.name} names {file} as its data, which is not in this folder")
    empty = [
        file for file in files if Path(file).suffix in KINDS and os.path.isfile(file) and not os.path.getsize(file)
    ]
    if empty:
        raise UsageError(f"{source.field}: {empty[0]} is empty ({len(empty)} of {len(files)} files): remove it")
    copies = [file for file in files if _is_copy(Path(file))]
    if copies and source.split == "train":
        warn_once(f"{source.field}: {copies[0]} is read, too: remove it if it is a copy")
    data = {file for file in source.files if _is_data(Path(file))}
    unread = sorted(data - {os.path.abspath(file) for file in files})
    if files and unread and source.split == "train" and not source.saved_to_disk:  # caches of `map` lie beside it
        warn_once(
            f"{source.field}: {unread[0]} and {len(unread) - 1} more not read, as the files of a folder are of one type, "
            "and named after its splits: convert or rename them, or list all as --train_file",
        )
    return files


def _is_copy(file: Path) -> bool:
    """Return whether a file may be a copy of another one, such as a.jsonl.bak: `datasets` reads it for its middle name."""
    return file.suffix.lower() not in DATA | KINDS.keys() and not KINDS.keys().isdisjoint(file.suffixes[:-1])


def _is_data(file: Path) -> bool:
    is_of_split = file.suffix in KINDS and SPLITS.match(file.stem)
    return file.suffix.lower() in DATA or bool(is_of_split)


def warn_of_unread_media(source: Source, files: Iterable[str], suffixes: Iterable[str], rows: "Dataset") -> None:
    """Warn if a split of a folder of images or sounds has more such files than its rows name: its metadata leaves some out.

    `files`: of the split; `suffixes`: of what `datasets` reads as rows of this folder."""
    columns = sum(hasattr(feature, "decode_example") for feature in rows.features.values())  # two for images and masks
    named = len(rows) * columns
    count = sum(Path(file).suffix.lower() in set(suffixes) for file in files)
    if columns and named < count:
        warn_once(
            f"{source.field}: {count - named} of {count} files of the {source.split} data of {source.name} are not read, as "
            "its metadata does not name them",
        )
