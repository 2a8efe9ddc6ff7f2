"""Checks of a folder given as `dataset_name`: refuse files outside it, report files that `datasets` does not read.

Tests: tests/data/test_bad_rows.py and tests/config/test_bad_input.py.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from src.config.errors import UsageError, warn
from src.config.paths import plain_data
from src.data.local_files import BUILDERS
from src.data.sources import Source

NO_DATA = {"dataset_infos.json", "config.json", "metadata.json", "LICENSE.txt", "README.txt", "requirements.txt"}
NO_DATA |= {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt"}

_warned: set[str] = set()


def refuse_files_outside(source: Source, data_files: Mapping | None) -> None:
    """Raise UsageError if the README.md of a folder names files outside the folder.

    The files of all splits are checked, because `datasets` reads all of them."""
    for file in _named_files(source, data_files):
        if not _is_inside(file, str(source.name)):
            raise UsageError(
                f"{source.field}: {source.name}: its README.md names {file}, which is not in this folder: move it there, "
                "or give it as --train_file"
            )


def unread_files(source: Source, data_files: Mapping | None) -> list[str]:
    """Return the files of a folder that look like data but are in no split.

    `datasets` reads files of one type only, and finds the split in the file name."""
    read = {os.path.abspath(file) for file in _named_files(source, data_files)}
    if not read:
        return []
    candidates = [file for file in source.files if Path(file).suffix in BUILDERS and Path(file).name not in NO_DATA]
    return [file for file in candidates if os.path.abspath(file) not in read]


def warn_of_unread(field: str, files: list[str]) -> None:
    """Warn about unread files of a folder, once for all of its splits."""
    if files and files[0] not in _warned:
        _warned.add(files[0])
        more = " …" if len(files) > 3 else ""
        warn(
            f"{field}: {', '.join(files[:3])}{more} not read: in a folder, datasets reads files of one type only, and "
            "finds the split in the file name; to use all files, list them as --train_file"
        )


def _named_files(source: Source, data_files: Mapping | None) -> list[str]:
    """Return the files of all splits that `datasets` reads from a local folder, or [] for a Hub dataset."""
    return [str(file) for files in (data_files or {}).values() for file in files] if source.files else []


def _is_inside(file: str, folder: str) -> bool:
    """Return True if the path of a file is inside a folder, or if it is a plain URL of a known kind of server.

    Symlinks are not resolved: they are the user's choice."""
    if "://" in file or "::" in file:
        return plain_data(file)
    return Path(os.path.abspath(file)).is_relative_to(os.path.abspath(folder))
