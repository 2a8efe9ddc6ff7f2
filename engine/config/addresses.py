"""Addresses of files and folders in a store, such as s3://bucket/run, and their local copies, which an add-on makes.

Tests: tests/engine/config/test_paths.py, tests/addons/stores/.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

from engine.config.errors import UsageError
from engine.config.paths import check_length, expand

address_of: dict[str, str] = {}  # local copy of a file or folder -> where it is in a store
copies_of_main: dict[str, str] = {}  # the same of the main process, which may have its copies elsewhere


def store_addon(what: str) -> ModuleType:
    """Return the add-on that reads and writes stores; raise UsageError, which begins with `what`, if it is not here."""
    from engine.config.find_addons import addon_names, load_addon  # slow, and --help comes before

    names = addon_names("stores")
    if not names:
        raise UsageError(
            f"{what} is an address, which needs addons/stores/: restore it, or give a local file or folder"
        )
    return load_addon("stores", names[0])


def local_copy(name: str, field: str, cfg: Any = None) -> str:
    """Return the local copy of a file or folder in a store, such as s3://bucket/run; any other name unchanged."""
    if "://" not in name or name.startswith(("http://", "https://")):
        return name
    return store_addon(f"{field}: {name}").local_copy(name, field, cfg)


def local_folder(output_dir: str) -> str:
    """Return the run folder, or one in runs/ of the same name if it is an address: for tools that train a few steps here."""
    return f"runs/{Path(output_dir).name}" if "://" in output_dir else output_dir


def path_of_flag(name: str, flag: str) -> str:
    """Return the name of a file or folder after a flag that is no field, such as --config, expanded; or its local copy.

    Raise UsageError if that is not possible."""
    try:
        return local_copy(check_length(expand(name)), flag)
    except ValueError as error:
        raise UsageError(f"{flag}: {name}: {error}") from None


def on_this_node(path: Path | None) -> Path | None:
    """Return the local copy here of what the main process has at `path`; any other path unchanged."""
    for copy, address in copies_of_main.items():
        if path is not None and path.is_relative_to(copy):
            here = next(each for each, known in address_of.items() if known == address)
            return Path(here, path.relative_to(copy))
    return path


# ---- lookup ----------------------------------------------------------------------------------------------------------
