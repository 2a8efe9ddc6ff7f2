"""Errors for users (exit codes 2, 1, 75) and warnings; look up files that a run file names; read YAML.

Tests: tests/config/test_config.py and tests/config/test_bad_input.py.
"""

import difflib
import glob
import os
import sys
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]


class UsageError(Exception):
    """The user can mend this; the message names the culprit and the way out. Ends every rank with exit code 2."""


class Failure(Exception):
    """The run cannot go on, as all ranks know alike; ends every rank with exit code 1 and this sentence."""


class Stopped(Exception):
    """The run was asked to stop, and everything is saved; ends every rank with exit code 75, and may be started again."""


def warn(text: str, alone: bool = False) -> None:
    """Say on each node once what somebody asked for and does not get; `alone`: no other process knows."""
    if alone or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"warning: {text}\n", end="", file=sys.stderr, flush=True)  # in one piece: threads warn, too


def optional(what: str, call, *args):
    """Return what `call(*args)` returns; its failure is a warning, for output that no run may fail for."""
    try:
        return call(*args)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        warn(f"{what} failed, the run is not affected: {type(error).__name__}: {reason}", alone=True)
        return None


def nearest(name: str, names) -> str:
    """Return '; did you mean X?' for the nearest of `names`, or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> dict:
    """Return the mapping in a YAML or JSON file; UsageError names the file and, where there is one, the line."""
    found = locate(str(path))
    try:
        with open(found, encoding="utf-8") as file:
            value = yaml.load(file, _Loader)
    except FileNotFoundError:
        near = [str(file) for file in Path(path).parent.glob("*.yaml")]
        known = near + [f"configs/{file.name}" for file in REPOSITORY.glob("configs/*.yaml")]
        raise UsageError(f"{path}: no such file, neither here nor in {REPOSITORY}{nearest(str(path), known)}") from None
    except IsADirectoryError:
        raise UsageError(f"{path}: a folder, where a YAML or JSON file was expected") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if value is None:
        raise UsageError(f"{path}: the file is empty: expected lines of the form `name: value`")
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{path}: expected lines of the form `name: value`")
    return value


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


def absent(name: str) -> str:
    """Return a remark for the case that `name` is no file or folder, and so was taken for a name of the Hub."""
    return "" if Path(locate(name)).exists() else "there is no such folder here, and the Hub did not give it: "
