"""Source of a split, resolved once: local files, URLs, a folder, or a Hub dataset at one commit.

Tests: tests/data/test_dataset.py, tests/data/test_mixture.py, tests/storage/test_http_files.py and tests/config/test_bad_input.py.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from src.config.errors import UsageError, warn
from src.config.paths import locate
from src.config.schema import RunConfig
from src.data.local_files import BUILDERS, expand, is_empty, list_folder
from src.storage import http_files, hub
from src.storage.cache_folder import cache_root, sample_folder
from src.storage.shared_work import SharedWork

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset, DatasetBuilder

    from src.data.raw_rows import RawRows


NAME_FIELDS = ("dataset_name", "dataset_config_name", "dataset_revision", "dataset_split")


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
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)  # downloaded file -> its URL

    def __str__(self) -> str:
        return self.display_names(self.files) or str(self.name)

    def display_names(self, files: Iterable[str]) -> str:
        """Return the first three of `files` for messages: URLs instead of their local copies."""
        return ", ".join(self.origins.get(file, file) for file in list(files)[:3])

    @property
    def hub(self) -> tuple | None:
        """(config name, revision, split) of a dataset given by name, and what else chooses its rows; else None."""
        given = [self.dataset_split] if self.dataset_split else []
        return None if self.builder else (self.config_name, self.revision, self.rows_of, *given)

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

    # ---- what a class of an add-on may replace -----------------------------------------------------------------------

    @property
    def rows_of(self) -> str:
        """The split that is read."""
        return self.split

    def choose_rows(self, raw: "RawRows", ids: range) -> "np.ndarray | None":
        """Return for each of these raw rows whether it belongs to this source; None: all do."""

    def explain_no_rows(self, count: int) -> str:
        """Return the message of an error: `choose_rows` has chosen none of `count` raw rows."""
        raise NotImplementedError

    def load_split(self, builder: "DatasetBuilder", split: str, cache: str | None) -> "Dataset":
        """Return the rows of a split of a dataset given by name, in the cache of `datasets`."""
        builder.download_and_prepare()
        return builder.as_dataset(split=split)

    # ---- identity of the data ----------------------------------------------------------------------------------------

    def key(self) -> list:
        """Return the values that identify this data on this disk, for cache keys."""
        return [self.file_keys(self.files), self.builder, self.name, self.hub]

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


def find_sources(cfg: RunConfig, split: str) -> dict[str, Source]:
    """Return each source that the run file names for a split, by its name in the mixture ("" without a mixture)."""
    if cfg.mixture and not (split == "validation" and cfg.validation_file):
        named = [(name, fields, f"mixture: {name}: ") for name, fields in cfg.mixture.items()]
    else:
        named = [("", vars(cfg), "")]
    sources = {name: find_source(fields, split, where, cache_root(cfg)) for name, fields, where in named}
    return {name: source for name, source in sources.items() if source}


def find_source(fields: Mapping, split: str, where: str, cache: Path) -> Source | None:
    """Return the source that these fields name for a split, without downloading it; None if they name none.

    `where` stands before a field in messages. Raise UsageError if local files are missing."""
    if patterns := fields.get(f"{split}_file"):
        field = f"{where}{split}_file"
        files = tuple(file for pattern in patterns for file in expand(pattern, field))
        source = drop_empty_files(Source(field, split, files))
        suffixes = {Path(file.split("?")[0]).suffix for file in source.files}
        if len(suffixes) > 1 or not suffixes <= set(BUILDERS):
            raise UsageError(f"{field}: {source}: give files of one type only ({', '.join(BUILDERS)})")
        return replace(source, builder=BUILDERS[suffixes.pop()])
    if not fields.get("dataset_name") or fields.get("train_file"):
        return None
    name, config_name, revision, trained = (fields.get(key) for key in NAME_FIELDS)
    trained = None if trained == "train" else trained  # the default: the same data has one cache key
    source = Source(f"{where}dataset_name", split, (), None, name, config_name, revision, trained)
    folder = sample_folder(str(name), cache) or locate(str(name))
    if not os.path.isdir(folder):
        return source
    return replace(source, files=tuple(list_folder(folder, source.field)), name=folder, revision=None)


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
    return at_commit(source, root, work)


def at_commit(source: Source, root: Path, work: SharedWork) -> Source:
    return replace(source, revision=hub.dataset_commit(str(source.name), source.revision, root, work))


def drop_empty_files(source: Source) -> Source:
    """Return the source without files that hold no rows, with a warning for each. Shard writers leave such files."""
    return drop_files(source, {file for file in source.files if "://" not in file and is_empty(file)})


def drop_files(source: Source, empty: set[str]) -> Source:
    """Return the source without its `empty` files, with a warning for each; raise UsageError if no file is left."""
    if empty and len(empty) == len(set(source.files)):
        raise UsageError(f"{source.field}: {source} is empty: give a file with at least one row")
    for file in sorted(empty):
        warn(f"{source.field}: {source.display_names([file])} is empty and skipped")
    return replace(source, files=tuple(file for file in source.files if file not in empty))
