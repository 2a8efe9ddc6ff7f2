"""Look up files and folders that a run file names."""

import glob
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def locate(name: str) -> str:
    """Return the absolute path of a file, folder or glob, looked up in the working directory, then in the repository.

    A name that is none (a Hub id, a URL, something yet to be made) comes back as it is.
    """
    for folder in (Path.cwd(), REPOSITORY):
        if name and (folder / name).exists():
            return str((folder / name).resolve())
        if glob.has_magic(name) and "://" not in name and glob.glob(str(folder / name), recursive=True):
            return str(folder / name)
    return name


def not_found_locally(name: str) -> str:
    """Return a remark for the case that `name` is no file or folder, and so was taken for a name of the Hub."""
    return "" if Path(locate(name)).exists() else "there is no such folder here, and the Hub did not give it: "
