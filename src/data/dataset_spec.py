"""From the fields of a run file to the source of each split.

Tests: tests/data/test_dataset.py and tests/config/test_bad_input.py.
"""

import glob
import os
import stat
from pathlib import Path
from typing import NamedTuple

from src.config.errors import UsageError, warn
from src.config.paths import locate
from src.config.schema import RunConfig
from src.data.sources import BUILDERS, Source
from src.download import sample_datasets

SHORT = 4096  # bytes that are looked at to find out whether a file is empty: more only while they are blank


class DatasetSpec(NamedTuple):
    """What a source of a mixture names, or the run itself."""

    dataset_name: str | None
    dataset_config_name: str | None
    dataset_revision: str | None
    train_file: list[str]
    validation_file: list[str]
    where: str = ""  # before the name of a field in messages


def resolve_source(named: DatasetSpec | RunConfig, split: str, cache: Path) -> Source | None:
    """Return where a split is (a sample is made in `cache`), or None where nothing is named; UsageError where there is nothing under a name."""
    where = getattr(named, "where", "")
    field, patterns = f"{where}{split}_file", {"train": named.train_file, "validation": named.validation_file}[split]
    if patterns:
        files = [file for pattern in patterns for file in _expand(pattern, field)]
        source = Source(field, files)
        drop_empty_files(source)
        kinds = {Path(file.split("?")[0]).suffix for file in source.files}
        if len(kinds) > 1 or not kinds <= set(BUILDERS):
            raise UsageError(f"{field}: {source}: give files of one kind among {', '.join(BUILDERS)}")
        source.builder = BUILDERS[kinds.pop()]
        return source
    if not named.dataset_name or named.train_file:
        return None
    field = f"{where}dataset_name"
    folder = sample_datasets.sample_folder(named.dataset_name, cache) or locate(named.dataset_name)
    if not os.path.isdir(folder):
        return Source(field, [], None, named.dataset_name, (named.dataset_config_name, named.dataset_revision, split))
    return Source(field, _files_below(folder, field), None, folder, (named.dataset_config_name, None, split))


def _expand(pattern: str, field: str) -> list[str]:
    if "://" in pattern:
        return [pattern]
    found, files = locate(pattern), []
    for path in [found] if os.path.lexists(found) else sorted(glob.glob(found, recursive=True)):
        if not os.path.isdir(path):
            files.append(_readable(os.path.abspath(path), field))
        elif path == found or "**" not in pattern or Path(path).suffix in BUILDERS:
            advice = "give it as --dataset_name, or a glob of its files"
            raise UsageError(f"{field}: {pattern}: {'' if path == found else f'{path} '}is a folder: {advice}")
    if not files:
        raise UsageError(f"{field}: {pattern}: no such file")
    return files


def _readable(file: str, field: str) -> str:
    """Return `file`; UsageError where it is none that can be read, such as a symbolic link to nothing."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise UsageError(f"{field}: {file} is not a regular file")
        open(file, "rb").close()
    except OSError as error:
        link = f" (a symbolic link to {os.readlink(file)})" if os.path.islink(file) else ""
        raise UsageError(f"{field}: {file}{link} cannot be read: {error.strerror}") from error
    return file


def _files_below(folder: str, field: str) -> list[str]:
    """Return the files in a folder that are not hidden; UsageError names one that `datasets` would skip without a word."""

    def unreadable(error: OSError):
        raise UsageError(f"{field}: {error.filename} cannot be read: {error.strerror}") from error

    files = []
    for place, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for link in (path for name in folders if os.path.islink(path := os.path.join(place, name))):
            raise UsageError(
                f"{field}: {link} is a symbolic link to a folder, which is not followed: give its files with "
                f"{field.removesuffix('dataset_name')}train_file"
            )
        files += [_readable(os.path.join(place, name), field) for name in names if not name.startswith(".")]
    return sorted(files)


def _is_empty(file: str) -> bool:
    """Return whether a file holds no row, as far as that is quickly known."""
    size = os.path.getsize(file)
    if file.endswith(".parquet") and size:
        from pyarrow import ArrowInvalid, parquet

        try:
            return parquet.read_metadata(file).num_rows == 0
        except (ArrowInvalid, OSError):
            return False
    if file.endswith((".parquet", ".arrow", ".txt")):
        return size == 0
    with open(file, "rb") as text:
        blank = not any(part.strip() for part in iter(lambda: text.read(SHORT), b""))
    return blank or (file.endswith(".csv") and size <= SHORT and _lines(file) < 2)


def _lines(file: str) -> int:
    return sum(1 for line in Path(file).read_bytes().splitlines() if line.strip())


def drop_empty_files(source: Source) -> None:
    """Leave out files without a row, as a writer of shards may have left them, and say so; those behind URLs as soon as their
    servers have said their size, or when they are here."""
    told = {url: answer["bytes"] for url, answer in source.told.items()}
    empty = [file for file in source.files if (told.get(file) == 0 if "://" in file else _is_empty(file))]
    if empty and len(empty) == len(source.files):
        raise UsageError(f"{source.field}: {source} is empty: give a file with at least one row")
    for file in empty:
        warn(f"{source.field}: {source.origins.get(file, file)} is empty and left out")
    source.files = [file for file in source.files if file not in set(empty)]
