"""Names of files, folders and data: ~ and $NAME, lookup, allowlists for names from a checkpoint; YAML and JSON files.

Tests: tests/engine/config/test_paths.py, tests/engine/config/test_config.py, tests/engine/config/test_foreign_code.py.
"""

import glob
import json
import os
import re
from pathlib import Path

import yaml

from engine.config.errors import UsageError, did_you_mean

REPOSITORY = Path(__file__).resolve().parents[2]
SCHEMA_FILE = REPOSITORY / "configs" / "schema.json"  # written by make schema
STORES = ("http", "https", "s3", "gs", "gcs", "hf", "az", "abfs", "abfss", "adl")  # other schemes may run code
VARIABLE = re.compile(r"\$(\{[^}]*\}|[A-Za-z_]\w*)", re.ASCII)
MARGIN = 256  # bytes of a path that files within a run folder need
DIFFERS_BY_PROCESS = {"RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"}  # all processes need the same names


# ---- names that the user gives ---------------------------------------------------------------------------------------


def expand(name: str) -> str:
    """Return a name with the home folder for ~ and the values of $NAME and ${NAME}, as a shell does; a URL unchanged.

    Raise ValueError for a variable without a value, and for a ~ that stands for no home folder."""
    if "://" in name:  # it must not carry a secret of the environment to another host
        return name
    variables = [variable.strip("{}") for variable in VARIABLE.findall(name)]
    expanded = os.path.expandvars(os.path.expanduser(name))
    unset = [variable for variable in variables if not os.environ.get(variable)]
    is_home = expanded[:1] != "~" and "~" not in Path(expanded).parts
    if (unset or not is_home) and _find(name):  # a file may really have such a name
        return name
    if unset:
        raise ValueError(f"the environment variable {unset[0]} is not set: set it, or write out its value")
    differing = DIFFERS_BY_PROCESS.intersection(variables)
    if differing:
        raise ValueError(f"{differing.pop()} has another value in each process: give a name that all processes share")
    if not is_home:
        raise ValueError("~ stands for no home folder here: write out the folder, or begin with ~/")
    return expanded


def check_length(name: str) -> str:
    """Return `name`; raise ValueError if it, or a part of it, is longer than its file system allows."""
    if "\0" in name:
        raise ValueError("the name of a file or folder cannot hold a NUL character")
    if "://" in name:
        return name
    path = Path(os.path.abspath(name))
    folder = next(each for each in (path, *path.parents) if os.path.isdir(each))
    longest = max(len(os.fsencode(part)) for part in path.parts)
    allowed = os.pathconf(folder, "PC_NAME_MAX")
    if longest > allowed:
        raise ValueError(f"a name of {longest} bytes is too long for {folder}: give one of at most {allowed}")
    length = len(os.fsencode(path))
    allowed = os.pathconf(folder, "PC_PATH_MAX") - MARGIN
    if length > allowed:
        raise ValueError(f"a path of {length} bytes is too long: give one of at most {allowed}")
    return name


def locate(name: str) -> str:
    """Return the absolute path of a file, folder or glob, looked up in the working directory, then in the repository.

    Return any other name (a Hub id, a URL, a file that does not exist yet) unchanged.
    """
    return _find(name) or name


def _find(name: str) -> str | None:
    """Return the absolute path of a file, folder or glob that is here, or None."""
    for folder in (Path.cwd(), REPOSITORY):
        if name and os.path.exists(folder / name):  # False, too, for a name that is too long
            return str((folder / name).resolve())
        if glob.has_magic(name) and "://" not in name and glob.glob(str(folder / name), recursive=True):
            return str(folder / name)
    return None


def not_found_locally(name: str) -> str:
    """Return text to put before an error of the Hub if `name` is not a local file or folder, else an empty string."""
    return "" if Path(locate(name)).exists() else "no such folder here, and the Hub did not provide it: "


# ---- names from a checkpoint or a dataset ----------------------------------------------------------------------------


def plain_data(value) -> bool:
    """Return True if all data names in `value`, also in lists and dicts, are local paths, Hub ids or URLs of STORES."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return all(plain_data(item) for item in value)
    scheme, separator, _ = str(value).partition("://")
    return "::" not in str(value) and (not separator or scheme.lower() in STORES)


def is_plain_name(value) -> bool:
    """Return True if `value` is a plain name, as of transformers' own attention kernels; a Hub repository runs code."""
    return isinstance(value, str) and value.replace("_", "").isalnum()


# ---- YAML and JSON files ---------------------------------------------------------------------------------------------


class Loader(yaml.SafeLoader):
    """Safe YAML loader that raises an error if a key is given twice."""

    def construct_mapping(self, node, deep=False):
        keys = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if key in keys:
                problem = f"the key {key!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            keys.append(key)
        return super().construct_mapping(node, deep)


# Python writes 1e-05, which is text in YAML 1.1, because it has no point.
Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+][0-9]+$"), list("-+0123456789"))


def read_yaml(path: str | Path) -> dict:
    """Return the mapping in a YAML or JSON file. Raise UsageError with the file and, if known, the line."""
    file = Path(locate(str(path)))
    file_format = "JSON" if str(path).endswith(".json") else "YAML"
    try:
        text = file.read_text(encoding="utf-8")
        value = json.loads(text) if file_format == "JSON" else yaml.load(text, Loader)
    except FileNotFoundError:
        run_files = [f"configs/{each.name}" for each in REPOSITORY.glob("configs/*.yaml")]
        hint = did_you_mean(str(path), run_files)
        raise UsageError(f"{path}: no such file, here or in {REPOSITORY}{hint}") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: not readable as {file_format}: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{path}: expected lines of the form `name: value`")
    return value
