"""Raw rows of a source: converted to Arrow by `datasets` in its cache, checked, memory-mapped.

Tests: tests/data/test_dataset.py and tests/data/test_bad_rows.py.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.data import readers
from src.data.arrow_columns import has_quoted_text
from src.data.local_files import named_files, unread_files
from src.data.readers import describe_file_error, explain_read_error
from src.data.row_errors import locate_row
from src.data.sources import Source
from src.storage import disk_errors
from src.storage.cache_folder import cache_root

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class RawRows:
    """Memory-mapped raw rows of a split, and the files that hold these rows, in the same order."""

    source: Source
    rows: "Dataset"
    files: tuple[str, ...]
    unread: tuple[str, ...] = ()  # files of a folder that look like data and are in no split
    splits: tuple[str, ...] = ()  # names of all splits of a dataset given by name

    def describe_row(self, row: int) -> str:
        """Return the file and line of a row, else its number in the split."""
        location, split = locate_row(self.files, row), f"{self.source.split} data"
        if not location:
            return f"{split}, row {row}"
        for file, url in self.source.origins.items():
            location = location.replace(file, url)
        return f"{location}: {split}"


def load_raw_rows(source: Source, cfg: RunConfig, apply: Callable[[Callable, list], Iterable] = map) -> RawRows | None:
    """Return the raw rows of a source, or None if a dataset given by name has no such split.

    `apply` is `map`, or does the same in several processes: each file is converted alone, so that its types show."""
    import datasets

    readers.install()
    cache = str(cache_root(cfg)) if cfg.cache_dir else None
    if not source.builder:
        with _read_errors(source, source.files):
            return _load_named(source, cache)
    arrows = apply(partial(_convert_file, source, cache), list(source.files))
    parts = [datasets.concatenate_datasets([datasets.Dataset.from_file(name) for name in names]) for names in arrows]
    return RawRows(source, _concatenate(source, parts), source.files)


@contextmanager
def _read_errors(source: Source, files: Sequence[str]) -> Iterator[None]:
    """Raise UsageError with file and reason instead of an error in reading `files`; that of a full disk as it is."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, OSError) and cause.errno in disk_errors.FULL:
            raise cause from error
        raise UsageError(explain_read_error(source, error, files)) from error


def _options(source: Source, cache: str | None, files: Sequence[str]) -> dict:
    """Return options of `datasets`. Its own cache key ignores how a file is read, so ours is added to it."""
    import datasets

    content = (source.builder, source.name, source.hub, source.rows_of, datasets.__version__)
    key = (source.file_keys(files), *content, Path(readers.__file__).read_text())
    added = {"description": hashlib.sha256(repr(key).encode()).hexdigest()[:32]} if files else {}
    return {"cache_dir": cache} | added


def _convert_file(source: Source, cache: str | None, file: str) -> list[str]:
    """Convert a file to Arrow files in the cache of `datasets`, and return their names."""
    import datasets

    options, split = _options(source, cache, [file]), source.rows_of
    with _read_errors(source, [file]):
        rows = datasets.load_dataset(source.builder, data_files={split: [file]}, split=split, **options)
        if source.builder == "json" and has_quoted_text(rows) and (error := describe_file_error(file)):
            raise UsageError(error)
    return _arrow_files(rows)


def _arrow_files(rows: "Dataset") -> list[str]:
    return [file["filename"] for file in rows.cache_files]


def _load_named(source: Source, cache: str | None) -> RawRows | None:
    """Return the rows of a folder or Hub dataset."""
    import datasets

    if source.saved_to_disk:
        loaded = datasets.load_from_disk(source.name)
        splits = loaded if isinstance(loaded, dict) else {"train": loaded}
        rows = splits.get(source.choose_split(splits))
        return RawRows(source, rows, tuple(_arrow_files(rows)), (), tuple(splits)) if rows is not None else None
    options = _options(source, cache, source.files)
    builder = datasets.load_dataset_builder(source.name, source.config_name, revision=source.revision, **options)
    data_files = builder.config.data_files or {}
    names = [str(name) for name in builder.info.splits or data_files]
    if not (split := source.choose_split(names)):
        return None
    named = named_files(source, data_files)
    rows = source.load_split(builder, split, cache)
    files = [str(file) for file in data_files.get(split, [])] if source.files else []
    return RawRows(source, rows, tuple(files or source.files), tuple(unread_files(source, named)), tuple(names))


def _concatenate(source: Source, parts: list["Dataset"]) -> "Dataset":
    """Return the rows of all files as one dataset. Raise UsageError with two file names if their columns do not match."""
    import datasets

    try:
        return datasets.concatenate_datasets(parts)
    except Exception as error:
        for (first, rows), (second, other) in combinations(zip(source.files, parts, strict=True), 2):
            with suppress(Exception):  # not all differ from the first file
                datasets.concatenate_datasets([rows, other])
                continue
            columns = [", ".join(f"{f.name}: {f.type}" for f in part.data.schema) for part in (other, rows)]
            message = f"{source.field}: {second} has other columns ({columns[0]}) than {first} ({columns[1]})"
            raise UsageError(describe_file_error(second) or message) from error
        raise
