"""Convert raw files to Arrow once per disk, and open them memory-mapped.

Tests: tests/data/test_dataset.py, tests/data/test_preprocessing.py and tests/data/test_bad_rows.py.
"""

import hashlib
import json
import os
from itertools import combinations
from pathlib import Path

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.data import file_readers
from src.data.arrow_columns import quoted
from src.data.file_errors import describe_file_error
from src.data.sources import NO_ROOM, Source
from src.download.cache_folder import cache_root
from src.storage.shared_work import SharedWork, write_atomic

MANY = 256  # files, above which they are converted to Arrow in groups
GROUP = 64 << 20  # bytes of files in a group


def load_raw_rows(source: Source, cfg: RunConfig, split: str, work: SharedWork):
    """Return the raw rows as a memory-mapped `datasets.Dataset`, converted to Arrow by one process of those that see the
    disk, or None where a named data set has no such split."""
    import datasets

    if source.saved():
        try:
            loaded = datasets.load_from_disk(source.name)
        except Exception as error:
            raise UsageError(source.explain(error)) from error
        loaded = loaded if isinstance(loaded, dict) else {"train": loaded}
        return loaded.get(_chosen(split, loaded))
    groups = _groups(source)
    file_readers.install()
    about = (
        source.builder,
        source.name,
        source.hub,
        split,
        datasets.__version__,
        Path(file_readers.__file__).read_text(),
    )
    keys = [repr((source.stamps(group), *about)) for group in groups]
    folder = cache_root(cfg) / "raw"
    records = [folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json" for key in keys]
    for record in records:
        if record.exists() and not _whole(record):
            with work.exclusive(record, f"reading {source}"):  # another process may have made it again by now
                if not _whole(record):
                    record.replace(record.with_suffix(".lost"))
    work.run_all(records, lambda i: _convert(source, cfg, split, groups[i], records[i]), f"reading {source}")
    known = [json.loads(record.read_text()) for record in records]
    if known[0]["files"] is None:
        return None
    source.parts, source.unread = (known[0].get(key) or [] for key in ("parts", "unread"))
    parts = [[datasets.Dataset.from_file(file) for file in one["files"]] for one in known]
    for record, one, part in zip(records, known, parts, strict=True):
        if (found := sum(map(len, part))) != one["rows"]:
            record.replace(record.with_suffix(".lost"))
            raise UsageError(
                f"{source.field}: the cache of {source} has {found} rows, {one['rows']} were read: run again"
            )
    return _joined(source, groups, [(i, rows) for i, part in enumerate(parts) for rows in part])


def _groups(source: Source) -> list[list[str]]:
    """Return the files in groups that one process converts at a time: each by itself, unless they are very many."""
    if not source.builder:
        return [source.files]
    if len(source.files) <= MANY:
        return [[file] for file in source.files]
    groups, size = [[]], 0
    for file in source.files:
        if groups[-1] and size > GROUP:
            groups, size = [*groups, []], 0
        groups[-1].append(file)
        size += os.path.getsize(file)
    return groups


def _joined(source: Source, groups: list[list[str]], parts: list[tuple]):
    """Return all rows as one data set; UsageError names two files whose columns do not go together."""
    import datasets

    rows = [part for _, part in parts]
    try:
        return datasets.concatenate_datasets(rows) if rows else datasets.Dataset.from_dict({})
    except Exception as error:
        for (j, one), (i, other) in combinations(parts, 2):  # a third may go with the first, and not with the second
            try:
                datasets.concatenate_datasets([one, other])
            except Exception:
                if found := describe_file_error(groups[i][0]):
                    raise UsageError(found) from error
                columns = [", ".join(f"{f.name}: {f.type}" for f in part.data.schema) for part in (other, one)]
                raise UsageError(
                    f"{source.field}: {groups[i][0]} has other columns ({columns[0]}) than {groups[j][0]} ({columns[1]})"
                ) from error
        raise


def _convert(source: Source, cfg: RunConfig, split: str, group: list[str], record: Path) -> None:
    """Convert raw rows to Arrow files in the cache of `datasets`, and write down which they are."""
    import datasets

    cache = str(cache_root(cfg)) if cfg.cache_dir else None
    lost, parts, stamps = record.with_suffix(".lost"), [], source.stamps(group)
    # `datasets` knows a file by its path and time alone, and not by how it was read: so its cache gets our name for the data.
    ours = {"description": record.stem} if group else {}
    mode = "reuse_cache_if_exists" if lost.exists() else None  # or `datasets` would take what is there, whole or not
    try:
        if source.builder:
            rows = datasets.load_dataset(
                source.builder, data_files={split: group}, split=split, cache_dir=cache, download_mode=mode, **ours
            )
            if (
                source.builder == "json"
                and quoted(rows)
                and (found := next(filter(None, map(describe_file_error, group)), None))
            ):
                raise UsageError(found)
        else:
            config, revision, _ = source.hub
            builder = datasets.load_dataset_builder(source.name, config, revision=revision, cache_dir=cache, **ours)
            chosen = _chosen(split, list(builder.info.splits or builder.config.data_files or []))
            if not chosen:
                write_atomic(record, json.dumps({"files": None}))
                return
            parts = [str(file) for file in (builder.config.data_files or {}).get(chosen, [])] if source.files else []
            source.check_folder(builder.config.data_files)
            if cfg.streaming and not source.files:  # its other splits are not to be downloaded
                if builder.config.data_files:  # or the files of other splits would be opened, too
                    builder.config.data_files = {chosen: builder.config.data_files[chosen]}
                coming = builder.as_streaming_dataset(split=chosen)
                coming = coming.take(cfg.max_eval_examples) if cfg.max_eval_examples else coming
                rows = datasets.Dataset.from_generator(coming.__iter__, features=coming.features, cache_dir=cache)
            else:
                builder.download_and_prepare(download_mode=mode)
                rows = builder.as_dataset(split=chosen)
    except UsageError:
        raise
    except Exception as error:
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, OSError) and cause.errno in NO_ROOM:
            raise cause from error  # the disk's fault, not that of the files
        raise UsageError(source.explain(error, group)) from error
    if changed := [file for file, was, now in zip(group, stamps, source.stamps(group), strict=True) if was != now]:
        raise UsageError(f"{source.field}: {changed[0]} changed while it was read: start again when it is complete")
    files = [file["filename"] for file in rows.cache_files]
    sizes = [os.path.getsize(file) for file in files]
    write_atomic(
        record, json.dumps({"files": files, "rows": len(rows), "bytes": sizes, "parts": parts, "unread": source.unread})
    )
    lost.unlink(missing_ok=True)


def _whole(record: Path) -> bool:
    """Return whether the Arrow files that a record names are there as they were written."""
    try:
        known = json.loads(record.read_text())
        sizes = [os.path.getsize(file) for file in known["files"] or []]
    except OSError:
        return False
    return sizes == known.get("bytes", sizes)


def _chosen(split: str, names) -> str | None:
    """Return which split of a named data set is meant: for evaluation, the test set where there is no other."""
    wanted = ("validation", "test") if split == "validation" else (split,)
    return next((name for name in wanted if name in names), None)
