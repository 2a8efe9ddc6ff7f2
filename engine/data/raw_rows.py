"""Raw rows of a source: converted by `datasets` to Arrow in its cache, memory-mapped.

JSON, CSV, Parquet and Arrow files are read by the builders of builders.py. Tests: tests/engine/data/test_bad_rows.py.
"""

import errno
import glob
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config.errors import DISK_FULL, UsageError, one_line
from engine.config.run_config import RunConfig
from engine.data.column_types import join_features
from engine.data.file_columns import features_of_file
from engine.data.row_errors import line_of
from engine.data.sources import Source, named_files, warn_of_unread_media
from engine.storage.cache_folder import cache_root
from engine.storage.code_hash import code_hash

if TYPE_CHECKING:
    from datasets import Dataset, Features


READERS = ("builders.py", "column_types.py", "file_columns.py", "csv_reader.py", "json_reader.py")


@dataclass(frozen=True)
class RawRows:
    """Memory-mapped raw rows of a split, and the files that hold these rows, in the same order."""

    source: Source
    rows: "Dataset"
    files: tuple[tuple[str, int], ...] = ()  # (file, number of its rows); () if only `datasets` knows
    splits: tuple[str, ...] = ()  # names of all splits of a dataset given by name

    def describe_row(self, row: int) -> str:
        """Return the file and line of a row (its number in the file, from 0, if lines are not rows)."""
        name = str(self.source.name)
        number = row
        for file, count in self.files:
            if number < count:
                name = f"{self.source.display_names([file])}, {line_of(file, number)}"
                return f"{name}: {self.source.split} data"
            number -= count
        return f"{name}, row {row}: {self.source.split} data"


def load_raw_rows(source: Source, cfg: RunConfig, apply: Callable[[Callable, list], Iterable] = map) -> RawRows | None:
    """Return the raw rows of a source, or None if a dataset given by name has no such split.

    `apply` is `map`, or does the same in several processes: each file is converted alone, so that its types show."""
    import datasets

    refuse_references()
    folder = str(cache_root(cfg)) if cfg.cache_dir else None
    if not source.builder:
        with _read_errors(source):
            return _load_named(source, folder)
    files = list(source.files)
    features = join_features(apply(partial(_read_features, source), files), source.builder)
    arrow_files = apply(partial(_convert_file, source, folder, features or None), files)
    parts = [datasets.concatenate_datasets(list(map(datasets.Dataset.from_file, names))) for names in arrow_files]
    rows = datasets.concatenate_datasets(parts)
    return RawRows(source, rows, tuple(zip(source.files, map(len, parts), strict=True)))


def _read_features(source: Source, file: str) -> "Features | dict":
    """Return the features of the columns of a local file; {} if `datasets` knows them without us."""
    with _read_errors(source, [file]):
        return features_of_file(source.builder, file)


def _options(source: Source, folder: str | None, files: Sequence[str]) -> dict:
    """Return options of `datasets`. Its own cache key ignores how a file is read, so ours is added to it."""
    import datasets

    content = (source.builder, source.name, source.hub, source.rows_of, datasets.__version__)
    code = code_hash(Path(__file__).with_name(name) for name in ("raw_rows.py", *READERS))
    key = (source.file_keys(files), *content, code)
    added = {"description": hashlib.sha256(repr(key).encode()).hexdigest()[:32]} if files else {}
    return {"cache_dir": folder} | added


def _convert_file(source: Source, folder: str | None, features: "Features | None", file: str) -> list[str]:
    """Convert a file to Arrow files in the cache of `datasets`, and return their names."""
    from engine.data.builders import load_builder

    options = _options(source, folder, [file]) | {"features": features}
    split = source.rows_of
    with _read_errors(source, [file]):
        name = glob.escape(file)  # `datasets` would take a[1].csv for the pattern of a1.csv
        builder = load_builder(str(source.builder), data_files={split: [name]}, **options)
        builder.download_and_prepare()
        rows = builder.as_dataset(split=split)
        if not len(rows):
            raise ValueError("it is empty")
    return [part["filename"] for part in rows.cache_files]


def _load_named(source: Source, folder: str | None) -> RawRows | None:
    """Return the rows of a folder or Hub dataset."""
    import datasets

    from engine.data.builders import load_builder

    if source.saved_to_disk:
        loaded = datasets.load_from_disk(source.name)
        splits = loaded if isinstance(loaded, dict) else {"train": loaded}
        files_of_split = {}
        for name, rows in splits.items():
            files_of_split[name] = [part["filename"] for part in rows.cache_files]
        named_files(source, files_of_split)
        rows = splits.get(source.choose_split(splits))
        if rows is None:
            return None
        rows.data.validate(full=True)  # wrong offsets in a file would show other memory, or end the process
        return RawRows(source, rows, splits=tuple(splits))
    options = _options(source, folder, source.files)
    builder = load_builder(str(source.name), source.config_name, revision=source.revision, **options)
    data_files = builder.config.data_files or {}
    names = [str(name) for name in builder.info.splits or data_files]
    split = source.choose_split(names)
    if not split:
        return None
    named_files(source, data_files)
    rows = source.load_split(builder, split, folder)
    files = [str(file) for file in data_files.get(split, [])] if source.files else []
    warn_of_unread_media(source, files, getattr(builder, "EXTENSIONS", ()), rows)
    return RawRows(source, rows, ((files[0], len(rows)),) if len(files) == 1 else (), tuple(names))


def refuse_references() -> None:
    """Make fsspec refuse reference://, which a dataset's README.md may name.

    Some versions of fsspec run templates in reference files as code."""
    import fsspec

    text = "reference:// is refused, because it may run code: give the files themselves"
    fsspec.register_implementation("reference", "refused.NoSuchClass", clobber=True, errtxt=text)


# ---- errors ----------------------------------------------------------------------------------------------------------


@contextmanager
def _read_errors(source: Source, files: Sequence[str] = ()) -> Iterator[None]:
    """Raise UsageError with file and reason instead of an error in reading `files` (default: all of a folder)."""
    try:
        yield
    except Exception as error:
        cause = _root_cause(error)
        if isinstance(cause, OSError) and cause.errno in DISK_FULL:
            raise cause from error
        if isinstance(cause, OSError) and str(cause).startswith("Not enough disk space"):  # of `datasets`
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise UsageError(explain_read_error(source, error, files)) from error


def _root_cause(error: BaseException) -> BaseException:
    """Return the error that `datasets` wraps.

    After an error at a URL it opens it again, with an argument that fsspec rejects: that TypeError is not the cause."""
    while error.__cause__ is not None and not isinstance(error, UsageError | ImportError):
        hidden = error.__context__ if isinstance(error.__cause__, TypeError) else None
        error = hidden or error.__cause__
    return error


def explain_read_error(source: Source, error: BaseException, files: Sequence[str] = ()) -> str:
    """Return the message for `files` (of a folder: all) that `datasets` could not read: file, line if known, reason."""
    cause = _root_cause(error)
    files = files or source.files
    if isinstance(cause, UsageError):
        text = str(cause)
    else:
        name = source.display_names(files) or source.name
        text = f"{source.field}: {name} could not be read, or has no rows: {one_line(cause, 400)}"
    for file in files:
        text = text.replace(file, source.display_names([file]))
    return text
