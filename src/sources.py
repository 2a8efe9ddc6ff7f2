"""Where the raw rows of a split are, as the run file names them: files, URLs, a folder, a name of the Hub.

Leave alone. Guarded by tests/test_data.py, tests/test_fetch.py and tests/test_bad_input.py.
"""

import errno
import hashlib
import json
import os
import re
import socket
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from src import fetch, hub, remote
from src.columns import quoted
from src.faults import fault
from src.fields import RunConfig
from src.inputs import UsageError, absent
from src.together import Crew, leave

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
MANY = 256  # files, above which they are converted to Arrow in groups
GROUP = 64 << 20  # bytes of files in a group


def cache_root(run: RunConfig) -> Path:
    """Return the folder of downloads and prepared data; one a node if `cache_per_node` says so."""
    import datasets

    root = Path(run.cache_dir) if run.cache_dir else Path(datasets.config.HF_DATASETS_CACHE)
    return root / f"node_{socket.gethostname()}" if run.cache_per_node else root


@dataclass
class Source:
    """Raw rows of a split: files for a builder of `datasets`, or a folder or Hub name."""

    field: str
    files: list[str]  # local ones; URLs until they are fetched
    builder: str | None = None
    name: str | None = None
    hub: tuple | None = None  # configuration, revision, split
    origins: dict[str, str] = field(default_factory=dict)  # local file -> the URL that it was fetched from
    told: dict[str, dict] = field(default_factory=dict)  # URL of a stream -> what its server says of it
    parts: list[str] = field(default_factory=list)  # the files of this split, where a folder holds those of others, too

    def __str__(self) -> str:
        return ", ".join(self.origins.get(file, file) for file in self.files[:3]) or str(self.name)

    def fetch(self, run: RunConfig, crew: Crew, files: bool = True) -> None:
        """Bring URLs to this disk (those of a stream are only looked up), and find out which commit of a Hub repository is meant."""
        root = cache_root(run)
        if self.builder and not files:
            urls = [file for file in self.files if "://" in file]
            if urls and self.builder == "text":  # datasets opens it with an argument that fsspec refuses
                raise UsageError(
                    f"{self.field}: {urls[0]}: a .txt file cannot be streamed from a server: give jsonl, csv or parquet, or "
                    "leave --streaming out"
                )
            self.told = remote.look_up(urls, self.field, root, crew) if urls else {}
            return
        if self.builder:
            self.files = [
                fetch.file(file, self.field, root, crew, self.origins) if "://" in file else file for file in self.files
            ]
        elif not self.files:
            config, revision, split = self.hub
            self.hub = (config, hub.dataset_commit(self.name, revision, root, crew), split)

    def key(self) -> list:
        """Return what tells this data from other data: paths, sizes and times of local files, what a server says of others,
        name and commit of a Hub repository."""
        return [self._stamps(self.files), self.builder, self.name, self.hub]

    def _stamps(self, files: list[str]) -> list:
        return [
            fetch.stamp(f) or ([f] if "://" in f else [f, os.stat(f).st_size, os.stat(f).st_mtime_ns]) for f in files
        ]

    def versions(self) -> list[tuple]:
        """Return (name below the folder that all have in common, bytes, ETag) of each file, None where that is not known: what
        stays as it is where files are moved, and where a node has copies of its own."""
        names = [url.split("?")[0] if "://" in (url := self.origins.get(f, f)) else url for f in self.files]
        start = len(os.path.commonprefix(names).rpartition("/")[0])  # noqa: RUF071 (of URLs, too, and cut at a /)
        return [(name[start:].lstrip("/"), *self._size(file)) for name, file in zip(names, self.files, strict=True)]

    def _size(self, file: str) -> tuple[int | None, str | None]:
        if "://" not in file:
            return os.path.getsize(file), None
        return (self.told[file]["bytes"], self.told[file]["etag"]) if file in self.told else (None, None)

    def sizes(self) -> dict[str, int]:
        """Return names and sizes of the first files, so that a run can say which changed."""
        return {name: size for name, size, _ in self.versions()[:1000]}

    def rows(self, run: RunConfig, split: str, crew: Crew):
        """Return the raw rows as a memory-mapped `datasets.Dataset`, converted to Arrow by one process of those that see the
        disk, or None where a named data set has no such split."""
        import datasets

        if any(file.endswith(("dataset_info.json", "dataset_dict.json")) for file in self.files):
            try:
                loaded = datasets.load_from_disk(self.name)
            except Exception as error:
                raise UsageError(self.explain(error)) from error
            loaded = loaded if isinstance(loaded, dict) else {"train": loaded}
            return loaded.get(_chosen(split, loaded))
        groups = self._groups()
        keys = [
            repr((self._stamps(group), self.builder, self.name, self.hub, split, datasets.__version__))
            for group in groups
        ]
        folder = cache_root(run) / "raw"
        records = [folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json" for key in keys]
        for record in records:
            if record.exists() and not _whole(record):
                with crew.turn(record, f"reading {self}"):  # another process may have made it again by now
                    if not _whole(record):
                        record.rename(record.with_suffix(".lost"))
        crew.share(records, lambda i: self._convert(run, split, groups[i], records[i]), f"reading {self}")
        known = [json.loads(record.read_text()) for record in records]
        if known[0]["files"] is None:
            return None
        self.parts = known[0].get("parts") or []
        parts = [[datasets.Dataset.from_file(file) for file in one["files"]] for one in known]
        for record, one, part in zip(records, known, parts, strict=True):
            if (found := sum(map(len, part))) != one["rows"]:
                record.unlink(missing_ok=True)
                raise UsageError(
                    f"{self.field}: the cache of {self} has {found} rows, {one['rows']} were read: run again"
                )
        return self._joined(groups, [(i, rows) for i, part in enumerate(parts) for rows in part])

    def _groups(self) -> list[list[str]]:
        """Return the files in groups that one process converts at a time: each by itself, unless they are very many."""
        if not self.builder:
            return [self.files]
        if len(self.files) <= MANY:
            return [[file] for file in self.files]
        groups, size = [[]], 0
        for file in self.files:
            if groups[-1] and size > GROUP:
                groups, size = [*groups, []], 0
            groups[-1].append(file)
            size += os.path.getsize(file)
        return groups

    def _joined(self, groups: list[list[str]], parts: list[tuple]):
        """Return all rows as one data set; UsageError names two files whose columns do not go together."""
        import datasets

        rows = [part for _, part in parts]
        try:
            return datasets.concatenate_datasets(rows) if rows else datasets.Dataset.from_dict({})
        except Exception as error:
            for (j, one), (i, other) in combinations(parts, 2):
                try:
                    datasets.concatenate_datasets([one, other])
                except Exception:
                    if found := fault(groups[i][0]):
                        raise UsageError(found) from error
                    columns = [", ".join(f"{f.name}: {f.type}" for f in rows.data.schema) for rows in (other, one)]
                    raise UsageError(
                        f"{self.field}: {groups[i][0]} has other columns ({columns[0]}) than {groups[j][0]} ({columns[1]})"
                    ) from error
            raise

    def _convert(self, run: RunConfig, split: str, group: list[str], record: Path) -> None:
        """Convert raw rows to Arrow files in the cache of `datasets`, and write down which they are."""
        import datasets

        cache = str(cache_root(run)) if run.cache_dir else None
        lost, parts = (
            record.with_suffix(".lost"),
            [],
        )  # what `datasets` has is not whole, which it does not notice itself
        mode = "reuse_cache_if_exists" if lost.exists() else None
        try:
            if self.builder:
                rows = datasets.load_dataset(
                    self.builder, data_files={split: group}, split=split, cache_dir=cache, download_mode=mode
                )
                if self.builder == "json" and quoted(rows) and (found := next(filter(None, map(fault, group)), None)):
                    raise UsageError(found)
            else:
                config, revision, _ = self.hub
                builder = datasets.load_dataset_builder(self.name, config, revision=revision, cache_dir=cache)
                chosen = _chosen(split, list(builder.info.splits or builder.config.data_files or []))
                if not chosen:
                    leave(record, json.dumps({"files": None}))
                    return
                parts = [str(file) for file in (builder.config.data_files or {}).get(chosen, [])] if self.files else []
                if run.streaming and not self.files:  # its other splits are not to be downloaded
                    if builder.config.data_files:  # or the files of other splits would be opened, too
                        builder.config.data_files = {chosen: builder.config.data_files[chosen]}
                    source = builder.as_streaming_dataset(split=chosen)
                    source = source.take(run.max_eval_examples) if run.max_eval_examples else source
                    rows = datasets.Dataset.from_generator(source.__iter__, features=source.features, cache_dir=cache)
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
            raise UsageError(self.explain(error, group)) from error
        files = [file["filename"] for file in rows.cache_files]
        sizes = [os.path.getsize(file) for file in files]
        leave(record, json.dumps({"files": files, "rows": len(rows), "bytes": sizes, "parts": parts}))
        lost.unlink(missing_ok=True)

    def stream(self, run: RunConfig, file: str | None = None, columns: list[str] | None = None):
        """Return the raw rows of the training data, or of one of its files, as a `datasets.IterableDataset`."""
        import datasets

        datasets.config.STREAMING_READ_MAX_RETRIES = 3  # of 20, each of which waits for as long as all of these do
        if file is None:
            config, revision, split = self.hub
            try:
                named = {"path": self.name, "name": config, "revision": revision, "split": split, "streaming": True}
                rows = datasets.load_dataset(**named)
                if columns and rows.info.builder_name == "parquet":
                    rows = datasets.load_dataset(**named, columns=columns)
                return rows
            except Exception as error:
                raise UsageError(self.explain(error)) from error
        # Of a Parquet file only the columns that are needed travel.
        only = {"columns": columns} if columns and self.builder == "parquet" else {}
        if "://" in file:
            only["storage_options"] = {"client_kwargs": {"trust_env": True, "timeout": remote.silence()}}
        return datasets.load_dataset(self.builder, data_files={"train": [file]}, split="train", streaming=True, **only)

    def explain(self, error: Exception, files: list[str] | None = None) -> str:
        """Return one sentence that names the file, and the line where there is one."""
        name = ", ".join((files or [])[:3]) or str(self)
        for file in files or self.files:
            if found := fault(file):
                return found.replace(file, self.origins.get(file, file))
        while error.__cause__ is not None or (isinstance(error, TypeError) and error.__context__ is not None):
            error = (
                error.__cause__ or error.__context__
            )  # the TypeError comes of how `datasets` explains a fault of a URL
        if absent_column := re.search(r"No match for FieldRef.Name\((.*?)\)", str(error)):
            return f"{self.field}: {name}: there is no column `{absent_column[1]}`, as in other files"
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        if "corresponds to no data" in reason:
            return f"{self.field}: {name} holds no rows: give data with at least one"
        return f"{self.field}: {name} could not be read: {'' if self.builder else absent(self.name)}{reason}"


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
