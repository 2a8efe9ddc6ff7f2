"""Local data files: expand globs, list folders, refuse unreadable files, recognize empty ones.

Tests: tests/data/test_dataset.py, tests/data/test_bad_rows.py and tests/config/test_bad_input.py.
"""

import glob
import os
import stat
from pathlib import Path

from src.config.errors import UsageError
from src.config.paths import locate

# File suffix -> the builder of `datasets` that reads such files
BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow"}
CHUNK = 4096  # bytes per read when checking for a blank file


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
