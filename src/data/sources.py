"""A source of raw rows: local files, URLs, a folder, or a Hub dataset.

Tests: tests/data/test_dataset.py, tests/download/test_http_files.py and tests/config/test_bad_input.py.
"""

import errno
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from src.config.errors import UsageError, warn
from src.config.paths import not_found_locally
from src.config.redact import redact
from src.config.safe_values import plain_data
from src.config.schema import RunConfig
from src.data import file_readers
from src.data.file_errors import describe_file_error
from src.download import http_files as fetch
from src.download import hub, remote_files
from src.download.cache_folder import cache_root
from src.storage.shared_work import SharedWork

SAMPLE = 1 << 14  # bytes
BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow"}
NO_DATA = ("dataset_infos.json", "config.json", "metadata.json", "LICENSE.txt", "README.txt", "requirements.txt")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


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
    unread: list[str] = field(default_factory=list)  # files of a folder that look like data and are in no split

    def __str__(self) -> str:
        return ", ".join(self.origins.get(file, file) for file in self.files[:3]) or str(self.name)

    def fetch(self, cfg: RunConfig, work: SharedWork, files: bool = True) -> None:
        """Bring URLs to this disk (those of a stream are only looked up), and find out which commit of a Hub repository is meant."""
        root = cache_root(cfg)
        if self.saved() and not files:
            raise UsageError(
                f"{self.field}: {self.name} was written by save_to_disk, which cannot be streamed: leave --streaming out (it is "
                "memory-mapped, and nothing is converted)"
            )
        if self.builder and not files:
            urls = [file for file in self.files if "://" in file]
            if urls and self.builder == "text":  # datasets opens it with an argument that fsspec refuses
                raise UsageError(
                    f"{self.field}: {urls[0]}: a .txt file cannot be streamed from a server: give jsonl, csv or parquet, or "
                    "leave --streaming out"
                )
            self.told = remote_files.look_up_files(urls, self.field, work) if urls else {}
            return
        if self.builder:
            urls = [file for file in self.files if "://" in file]
            copies = {url: fetch.fetch_file(url, self.field, root, work) for url in urls}
            self.files = [copies.get(file, file) for file in self.files]
            self.origins = {copy: url for url, copy in copies.items()}
        elif not self.files:
            config, revision, split = self.hub
            self.hub = (config, hub.dataset_commit(self.name, revision, root, work), split)

    def saved(self) -> bool:
        """Return whether this is a folder that `save_to_disk` has written."""
        return not self.builder and any(f.endswith(("dataset_info.json", "dataset_dict.json")) for f in self.files)

    def key(self) -> list:
        """Return what tells this data from other data: paths, sizes and times of local files, what a server says of others,
        name and commit of a Hub repository."""
        return [self.stamps(self.files), self.builder, self.name, self.hub]

    def stamps(self, files: list[str]) -> list:
        return [
            fetch.server_version(f)
            or ([f] if "://" in f else [f, (s := os.stat(f)).st_size, s.st_mtime_ns, s.st_ctime_ns])
            for f in files
        ]

    def versions(self) -> list[tuple]:
        """Return (name below the folder that all have in common, bytes, ETag) of each file, None where that is not known: what
        stays as it is where files are moved, and where a node has copies of its own."""
        names = [redact(url).split("?")[0] if "://" in (url := self.origins.get(f, f)) else url for f in self.files]
        start = len(os.path.commonprefix(names).rpartition("/")[0])  # noqa: RUF071 (of URLs, too, and cut at a /)
        return [(name[start:].lstrip("/"), *self._size(file)) for name, file in zip(names, self.files, strict=True)]

    def _size(self, file: str) -> tuple[int | None, str | None]:
        if "://" not in file:
            return os.path.getsize(file), None
        return (self.told[file]["bytes"], self.told[file]["etag"]) if file in self.told else (None, None)

    def sizes(self) -> dict[str, int]:
        """Return names and sizes of the first files, so that a run can say which changed."""
        return {name: size for name, size, _ in self.versions()[:1000]}

    def sample(self) -> str | None:
        """Return a hash of bytes from the start, middle and end of the first files, None if none of them is local.

        Small files are read whole; of large ones at most SAMPLE bytes at each of a few places."""
        files, digest = [file for file in self.files[:1000] if "://" not in file], xxhash.xxh3_128()
        places = max(2, min(16, 2000 // max(1, len(files))))
        for name in files:
            with open(name, "rb") as file:
                last = max(0, os.path.getsize(name) - SAMPLE)
                for at in sorted({last * i // (places - 1) for i in range(places)}):
                    file.seek(at)
                    digest.update(file.read(SAMPLE))
        return digest.hexdigest() if files else None

    def stream(self, cfg: RunConfig, file: str | None = None, columns: list[str] | None = None):
        """Return the raw rows of the training data, or of one of its files, as a `datasets.IterableDataset`."""
        import datasets

        file_readers.install()
        datasets.config.STREAMING_READ_MAX_RETRIES = 3  # of 20, each of which waits for as long as all of these do
        if file is None:
            config, revision, split = self.hub
            try:
                if columns is None:  # the first time
                    builder = datasets.load_dataset_builder(self.name, config, revision=revision)
                    self.check_folder(builder.config.data_files)
                    warn_of_unread(self.field, self.unread)
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
            about = remote_files.same_version(file, self.told.get(file))
            only["storage_options"] = {
                "client_kwargs": {"trust_env": True, "timeout": remote_files.client_timeout(), **about}
            }
        return datasets.load_dataset(self.builder, data_files={"train": [file]}, split="train", streaming=True, **only)

    def check_folder(self, data_files) -> None:
        """Raise UsageError if the README.md of a folder names files outside, for any split: all are read. Remember the files that
        look like data and are in no split: `datasets` goes by their names, and takes one kind."""
        named = [str(file) for files in (data_files or {}).values() for file in files] if self.files else []
        if outside := [file for file in named if not _inside(file, self.name)]:
            raise UsageError(
                f"{self.field}: {self.name}: its README.md names {outside[0]}, which is not in this folder: move it there, "
                "or give it as --train_file"
            )
        known = {os.path.abspath(file) for file in named}
        looks = [f for f in self.files if Path(f).suffix in BUILDERS and Path(f).name not in NO_DATA]
        self.unread = [file for file in looks if known and os.path.abspath(file) not in known]

    def explain(self, error: Exception, files: list[str] | None = None) -> str:
        """Return one sentence that names the file, and the line where there is one."""
        name = ", ".join(self.origins.get(file, file) for file in (files or [])[:3]) or str(self)
        while (below := error.__cause__) is not None:
            # To explain a fault behind a URL, datasets opens it anew, with an argument that fsspec refuses.
            error = error.__context__ if isinstance(below, TypeError) and error.__context__ is not None else below
        for file in files or self.files:
            if (
                found := str(error)
                if isinstance(error, UsageError) and file in str(error)
                else describe_file_error(file)
            ):
                return found.replace(file, self.origins.get(file, file))
        if isinstance(error, UsageError):
            return str(error)
        if absent_column := re.search(r"No match for FieldRef.Name\((.*?)\)", str(error)):
            return f"{self.field}: {name}: there is no column `{absent_column[1]}`, as in other files"
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        if "corresponds to no data" in reason:
            return f"{self.field}: {name} holds no rows: give data with at least one"
        return f"{self.field}: {name} could not be read: {'' if self.builder else not_found_locally(self.name)}{reason}"


_warned: set[str] = set()


def warn_of_unread(field: str, files: list[str]) -> None:
    """Warn once, though all splits are of one folder."""
    if files and files[0] not in _warned:
        _warned.add(files[0])
        warn(
            f"{field}: {', '.join(files[:3])}{' …' * (len(files) > 3)} not read: of a folder, datasets takes files of one kind, those "
            "that are named like a split; give all as --train_file if they are meant"
        )


def _inside(file: str, folder: str) -> bool:
    """Return whether a file is in a folder by its path (a symlink there is the user's), or on a plain server."""
    if "://" in file or "::" in file:
        return plain_data(file)
    return Path(os.path.abspath(file)).is_relative_to(os.path.abspath(folder))
