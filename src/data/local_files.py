"""Local data files and folders: expand globs, refuse unreadable files and those outside, report unread ones.

Tests: tests/data/test_dataset.py, tests/data/test_bad_rows.py and tests/config/test_bad_input.py.
"""

import glob
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from src.config.errors import UsageError, warn
from src.config.paths import locate, plain_data

if TYPE_CHECKING:
    from src.data.sources import Source

# File suffix -> the builder of `datasets` that reads such files
BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow"}
CHUNK = 4096  # bytes per read when checking for a blank file
NO_DATA = {"dataset_infos.json", "config.json", "metadata.json", "LICENSE.txt", "README.txt", "requirements.txt"}
NO_DATA |= {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt"}
_warned: set[str] = set()


def expand(pattern: str, field: str) -> list[str]:
    """Return the sorted files of a path or glob, or the URL. Raise UsageError if a file is missing or unreadable."""
    if "://" in pattern:
        return [pattern]
    path = locate(pattern)
    found = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True))
    files = []
    for name in found:
        if not os.path.isdir(name):
            files.append(_readable(os.path.abspath(name), field))
        elif name == path or "**" not in pattern or Path(name).suffix in BUILDERS:
            folder = "" if name == path else f"{name} "
            advice = "give it as --dataset_name, or a glob of its files"
            raise UsageError(f"{field}: {pattern}: {folder}is a folder: {advice}")
    if not files:
        raise UsageError(f"{field}: {pattern}: no such file")
    return files


def list_folder(folder: str, field: str) -> list[str]:
    """Return all files below a folder except hidden ones. Raise UsageError for what `datasets` skips silently."""

    def refuse_unreadable(error: OSError):
        raise UsageError(f"{field}: {error.filename} cannot be read: {error.strerror}") from error

    files = []
    for parent, folders, names in os.walk(folder, onerror=refuse_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if os.path.islink(path := os.path.join(parent, name)):
                raise UsageError(
                    f"{field}: {path} is a symlink to a folder, which is not followed: give its files as "
                    f"{field.removesuffix('dataset_name')}train_file"
                )
        files += [_readable(os.path.join(parent, name), field) for name in names if not name.startswith(".")]
    return sorted(files)


def _readable(file: str, field: str) -> str:
    """Return `file`. Raise UsageError if it cannot be read, for example because it is a broken symlink."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise UsageError(f"{field}: {file} is not a regular file")
        open(file, "rb").close()
    except OSError as error:
        link = f" (a symlink to {os.readlink(file)})" if os.path.islink(file) else ""
        raise UsageError(f"{field}: {file}{link} cannot be read: {error.strerror}") from error
    return file


def is_empty(file: str) -> bool:
    """Return True if a quick check (size, Parquet metadata, blank text) shows that a file has no rows."""
    size = os.path.getsize(file)
    if file.endswith(".parquet") and size:
        from pyarrow import ArrowInvalid, parquet

        try:
            return parquet.read_metadata(file).num_rows == 0
        except (ArrowInvalid, OSError):
            return False
    if file.endswith((".parquet", ".arrow", ".txt")):
        return size == 0
    if file.endswith(".csv") and size <= CHUNK:  # the header alone is no row
        return sum(1 for line in Path(file).read_bytes().splitlines() if line.strip()) < 2
    with open(file, "rb") as text:
        return not any(chunk.strip() for chunk in iter(lambda: text.read(CHUNK), b""))


# ---- a folder given as `dataset_name` ----------------------------------------------------------------------------------


def named_files(source: "Source", data_files: Mapping | None) -> list[str]:
    """Return the files of all splits that `datasets` reads from a local folder, or [] for a Hub dataset.

    Raise UsageError if its README.md names files outside the folder."""
    named = [str(file) for files in (data_files or {}).values() for file in files] if source.files else []
    for file in named:
        if not _is_inside(file, str(source.name)):
            raise UsageError(
                f"{source.field}: {source.name}: its README.md names {file}, which is not in this folder: move it there, "
                "or give it as --train_file"
            )
    return named


def unread_files(source: "Source", named: list[str]) -> list[str]:
    """Return the files of a folder that look like data but are in no split.

    `datasets` reads files of one type only, and finds the split in the file name."""
    read = {os.path.abspath(file) for file in named}
    candidates = [file for file in source.files if Path(file).suffix in BUILDERS and Path(file).name not in NO_DATA]
    return [file for file in candidates if os.path.abspath(file) not in read] if read else []


def warn_of_unread(field: str, files: list[str]) -> None:
    """Warn about unread files of a folder, once for all of its splits."""
    if files and files[0] not in _warned:
        _warned.add(files[0])
        more = " …" if len(files) > 3 else ""
        warn(
            f"{field}: {', '.join(files[:3])}{more} not read: in a folder, datasets reads files of one type only, and "
            "finds the split in the file name; to use all files, list them as --train_file"
        )


def _is_inside(file: str, folder: str) -> bool:
    """Return True if the path of a file is inside a folder, or if it is a plain URL of a known kind of server.

    Symlinks are not resolved: they are the user's choice."""
    if "://" in file or "::" in file:
        return plain_data(file)
    return Path(os.path.abspath(file)).is_relative_to(os.path.abspath(folder))
