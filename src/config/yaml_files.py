"""Reader of YAML and JSON files, with errors that name the file and the line.

Tests: tests/config/test_config.py, tests/config/test_bad_input.py.
"""

import json
import re
from pathlib import Path

import yaml

from src.config.errors import UsageError, did_you_mean
from src.config.paths import REPOSITORY, locate


class Loader(yaml.SafeLoader):
    """Safe YAML loader that raises an error if a key is given twice."""

    def construct_mapping(self, node, deep=False):
        keys = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            keys.append(key)
        return super().construct_mapping(node, deep)


def _mapping(pairs: list[tuple]) -> dict:
    if twice := {key for key, _ in pairs if [name for name, _ in pairs].count(key) > 1}:
        raise ValueError(f"the key {min(twice)!r} is given twice")
    return dict(pairs)


# Python writes 1e-05, which is text in YAML 1.1, because it has no point.
Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+][0-9]+$"), list("-+0123456789"))


def read_yaml(path: str | Path) -> dict:
    """Return the mapping in a YAML or JSON file. Raise UsageError with the file and, if known, the line."""
    found = locate(str(path))
    kind = "JSON" if found.endswith(".json") else "YAML"
    try:
        with open(found, encoding="utf-8") as file:
            value = json.load(file, object_pairs_hook=_mapping) if kind == "JSON" else yaml.load(file, Loader)
    except FileNotFoundError:
        near = [str(file) for file in Path(path).parent.glob("*.yaml")]
        known = near + [f"configs/{file.name}" for file in REPOSITORY.glob("configs/*.yaml")]
        raise UsageError(f"{path}: no such file, here or in {REPOSITORY}{did_you_mean(str(path), known)}") from None
    except IsADirectoryError:
        raise UsageError(f"{path}: this is a folder; expected a YAML or JSON file") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: not readable as {kind}: {' '.join(str(error).split())}") from None
    if value is None:
        raise UsageError(f"{path}: the file is empty: expected lines of the form `name: value`")
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{path}: expected lines of the form `name: value`")
    return value
