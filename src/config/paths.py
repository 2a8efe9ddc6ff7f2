"""Lookup of the files and folders that a run file names.

Tests: tests/config/test_config.py.
"""

import glob
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SCHEMA_FILE = REPOSITORY / "configs" / "schema.json"  # written by make schema


def locate(name: str) -> str:
    """Return the absolute path of a file, folder or glob, looked up in the working directory, then in the repository.

    Return any other name (a Hub id, a URL, a file that does not exist yet) unchanged.
    """
    for folder in (Path.cwd(), REPOSITORY):
        if name and (folder / name).exists():
            return str((folder / name).resolve())
        if glob.has_magic(name) and "://" not in name and glob.glob(str(folder / name), recursive=True):
            return str(folder / name)
    return name


def not_found_locally(name: str) -> str:
    """Return text to put before an error of the Hub if `name` is not a local file or folder, else an empty string."""
    return "" if Path(locate(name)).exists() else "no such folder here, and the Hub did not provide it: "
