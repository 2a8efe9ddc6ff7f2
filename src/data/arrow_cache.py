"""Raw rows as Arrow files: converted by `datasets` once per machine or shared disk, checked, memory-mapped.

Each group of source files has a record (raw/KEY.json, written last). It lists the Arrow files in the cache of
`datasets` and their sizes.
Tests: tests/data/test_dataset.py, tests/data/test_preprocessing.py and tests/data/test_bad_rows.py.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.data import file_readers
from src.data.arrow_columns import has_quoted_text
from src.data.dataset_folder import refuse_files_outside, unread_files
from src.data.file_errors import describe_file_error, explain_read_error
from src.data.row_errors import locate_row
from src.data.sources import Source
from src.storage import disk_errors
from src.storage.cache_folder import cache_root
from src.storage.shared_work import SharedWork, write_atomic

if TYPE_CHECKING:
    from datasets import Dataset

MANY = 256  # above this number, files are converted in groups instead of one by one
GROUP = 64 << 20  # bytes of files in a group


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
        found, split = locate_row(self.files, row), f"{self.source.split} data"
        if not found:
            return f"{split}, row {row}"
        for file, url in self.source.origins.items():
            found = found.replace(file, url)
        return f"{found}: {split}"


def load_raw_rows(source: Source, cfg: RunConfig, work: SharedWork) -> RawRows | None:
    """Return the raw rows of a source, or None if a dataset given by name has no such split."""
    if source.saved_to_disk:
        splits = _load_from_disk(source)
        rows = splits.get(source.choose_split(splits))
        return RawRows(source, rows, _arrow_files(rows), (), tuple(splits)) if rows is not None else None
    import datasets

    file_readers.install()
    groups = _groups(source)
    paths = [_record_path(source, cfg, group) for group in groups]
    for path in paths:
        _invalidate_if_damaged(path, source, work)
    work.run_all(paths, lambda i: _convert(source, cfg, groups[i], paths[i]), f"reading {source}")
    records = [json.loads(path.read_text()) for path in paths]
    if records[0]["files"] is None:
        return None
    tables = [[datasets.Dataset.from_file(file) for file in record["files"]] for record in records]
    for path, record, parts in zip(paths, records, tables, strict=True):
        if (found := sum(map(len, parts))) != record["rows"]:
            path.replace(path.with_suffix(".lost"))
            raise UsageError(
                f"{source.field}: the Arrow cache of {source} has {found} rows instead of {record['rows']}: "
                "run again to rebuild it"
            )
    rows = _concatenate(source, [(groups[i][:1], part) for i, parts in enumerate(tables) for part in parts])
    files, unread, splits = (tuple(records[0].get(key) or ()) for key in ("parts", "unread", "splits"))
    return RawRows(source, rows, files or source.files, unread, splits)


def _load_from_disk(source: Source) -> dict:
    import datasets

    try:
        loaded = datasets.load_from_disk(source.name)
    except Exception as error:
        raise UsageError(explain_read_error(source, error)) from error
    return loaded if isinstance(loaded, dict) else {"train": loaded}


def _arrow_files(rows) -> tuple[str, ...]:
    return tuple(file["filename"] for file in rows.cache_files)


def _groups(source: Source) -> list[Sequence[str]]:
    """Return the files in groups, each converted by one process. A group is one file, unless there are more than MANY.

    The files of a folder or Hub dataset are one group."""
    if not source.builder:
        return [source.files]
    if len(source.files) <= MANY:
        return [[file] for file in source.files]
    groups: list = [[]]
    size = 0
    for file in source.files:
        if groups[-1] and size > GROUP:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += os.path.getsize(file)
    return groups


def _record_path(source: Source, cfg: RunConfig, group: Sequence[str]) -> Path:
    import datasets

    readers = Path(file_readers.__file__).read_text()
    content = (source.builder, source.name, source.hub, source.rows_of, datasets.__version__, readers)
    key = hashlib.sha256(repr((source.file_keys(group), *content)).encode()).hexdigest()[:32]
    return cache_root(cfg) / "raw" / f"{key}.json"


def _invalidate_if_damaged(path: Path, source: Source, work: SharedWork) -> None:
    """Rename a record to .lost, so that its Arrow files are made again, if they are missing or have other sizes."""
    if path.exists() and not _is_intact(path):
        with work.exclusive(path, f"reading {source}"):  # another process may have made new ones by now
            if not _is_intact(path):
                path.replace(path.with_suffix(".lost"))


def _is_intact(path: Path) -> bool:
    """Return True if all Arrow files of a record exist with the recorded sizes."""
    try:
        record = json.loads(path.read_text())
        sizes = [os.path.getsize(file) for file in record["files"] or []]
    except OSError:
        return False
    return sizes == record.get("bytes", sizes)


def _convert(source: Source, cfg: RunConfig, group: Sequence[str], path: Path) -> None:
    """Convert a group of files to Arrow files in the cache of `datasets`, and write their record to `path`."""
    keys = source.file_keys(group)
    lost = path.with_suffix(".lost")
    options = {"cache_dir": str(cache_root(cfg)) if cfg.cache_dir else None}
    if group:  # the cache key of `datasets` ignores how a file is read, so add our cache key to it
        options["description"] = path.stem
    # In this mode `datasets` makes new Arrow files. By default it would reuse the damaged ones.
    mode = "reuse_cache_if_exists" if lost.exists() else None
    try:
        if source.builder:
            rows, found = _convert_files(source, group, mode, options), {}
        else:
            rows, found = _convert_named(source, mode, options)
    except UsageError:
        raise
    except Exception as error:
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, OSError) and cause.errno in disk_errors.FULL:
            raise cause from error  # the disk is the problem, not the files
        raise UsageError(explain_read_error(source, error, group)) from error
    if rows is None:
        write_atomic(path, json.dumps({"files": None}))
        return
    for file, before, after in zip(group, keys, source.file_keys(group), strict=True):
        if before != after:
            raise UsageError(f"{source.field}: {file} changed while it was read: start again when it is complete")
    files = _arrow_files(rows)
    record = {"files": files, "rows": len(rows), "bytes": [os.path.getsize(file) for file in files]}
    write_atomic(path, json.dumps(record | found))
    lost.unlink(missing_ok=True)


def _convert_files(source: Source, group: Sequence[str], mode: str | None, options: dict) -> "Dataset":
    import datasets

    files, split = {source.rows_of: list(group)}, source.rows_of
    rows = datasets.load_dataset(source.builder, data_files=files, split=split, download_mode=mode, **options)
    errors = map(describe_file_error, group) if source.builder == "json" and has_quoted_text(rows) else ()
    if found := next(filter(None, errors), None):
        raise UsageError(found)
    return rows


def _convert_named(source: Source, mode: str | None, options: dict) -> tuple["Dataset | None", dict]:
    """Return (rows, lists of files for the record) of a folder or Hub dataset; (None, {}) if the split is missing."""
    import datasets

    builder = datasets.load_dataset_builder(source.name, source.config_name, revision=source.revision, **options)
    data_files = builder.config.data_files
    names = [str(name) for name in builder.info.splits or data_files or []]
    if not (split := source.choose_split(names)):
        return None, {}
    refuse_files_outside(source, data_files)
    found = {"unread": unread_files(source, data_files), "splits": names}
    if source.files:
        found["parts"] = [str(file) for file in (data_files or {}).get(split, [])]
    return source.load_split(builder, split, mode, options["cache_dir"]), found


def _concatenate(source: Source, parts: list[tuple[Sequence[str], "Dataset"]]) -> "Dataset":
    """Return all rows as one dataset. Raise UsageError with two file names if their columns do not match."""
    import datasets

    try:
        return datasets.concatenate_datasets([rows for _, rows in parts]) if parts else datasets.Dataset.from_dict({})
    except Exception as error:
        for (first, rows), (second, other) in combinations(parts, 2):  # not all differ from the first file
            with suppress(Exception):
                datasets.concatenate_datasets([rows, other])
                continue
            columns = [", ".join(f"{f.name}: {f.type}" for f in part.data.schema) for part in (other, rows)]
            text = f"{source.field}: {second[0]} has other columns ({columns[0]}) than {first[0]} ({columns[1]})"
            raise UsageError(describe_file_error(second[0]) or text) from error
        raise
