"""configs/schema.json: the JSON schema of the run file, which editors and --help read."""

import json
import subprocess
import sys

import pytest

from src.config import help_text
from src.config.addons import missing_addon
from src.config.paths import SCHEMA_FILE, read_yaml
from src.tasks import OPTIONS
from tests.helpers import kit

SCHEMA = json.loads(SCHEMA_FILE.read_text())["properties"]
needs_all_addons = pytest.mark.skipif(
    not set(SCHEMA["task"]["enum"]) <= OPTIONS.keys() or any(map(missing_addon, SCHEMA)),
    reason="configs/schema.json also has the fields of add-ons that are not here",
)
TASKS_PAGE = (kit.REPOSITORY / "docs" / "tasks.md").read_text()
RUN_FILES = [path for path in sorted((kit.REPOSITORY / "configs").glob("*.yaml")) if f"`{path.name}`" in TASKS_PAGE]
TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list}


@pytest.fixture(scope="module")
def schema() -> dict:
    return json.loads(SCHEMA_FILE.read_text())


def train(*words: str) -> tuple[str, str]:
    """Return what the command prints, and the modules that it imports."""
    command = [sys.executable, "-X", "importtime", str(kit.REPOSITORY / "train.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@needs_all_addons
def test_file_is_what_the_fields_declare():
    """If this fails, run `make schema`."""
    assert train("--schema")[0] == SCHEMA_FILE.read_text()


def fits(value, rules: dict) -> bool:
    """Return whether a value of a run file is valid: the few words of JSON schema that the file uses."""
    if "anyOf" in rules:
        return any(fits(value, part) for part in rules["anyOf"])
    if "const" in rules or "enum" in rules:
        return value in rules.get("enum", [rules.get("const")])
    types = rules["type"] if isinstance(rules["type"], list) else [rules["type"]]
    is_type = any(isinstance(value, TYPES.get(name, type(None))) for name in types)
    if isinstance(value, bool) and "boolean" not in types:
        return False
    if isinstance(value, list):
        return is_type and all(fits(one, rules["items"]) for one in value)
    if isinstance(value, int | float):
        low, high = rules.get("minimum", value), rules.get("maximum", value)
        above, below = rules.get("exclusiveMinimum", value - 1), rules.get("exclusiveMaximum", value + 1)
        return is_type and low <= value <= high and above < value < below
    return is_type


def fields_of(schema: dict, task: str) -> dict[str, dict]:
    """Return {name: rules} of the fields that a run of this task has."""
    own, options = help_text.fields_in(schema)
    return own | options[task]


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_run_files_name_the_schema_and_follow_it(schema, path):
    assert "\n# yaml-language-server: $schema=schema.json\n" in path.read_text()
    values = read_yaml(path)
    fields = fields_of(schema, values.get("task", "causal_lm"))
    for name, value in values.items():
        assert name in schema["properties"]
        assert fits(value, fields[name]), name


@pytest.mark.parametrize(
    "name, value",
    [
        ("seed", -1),
        ("seed", 1.5),
        ("seed", True),
        ("dtype", "float16"),
        ("per_device_batch_size", "aut"),
        ("packing", 1),
    ],
)
def test_schema_refuses_wrong_values(schema, name, value):
    assert not fits(value, fields_of(schema, "causal_lm")[name])
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("task", OPTIONS)
def test_help_is_shown_without_slow_imports(task):
    shown, imported = train("--task", task, "--help")
    assert "--global_batch_size N" in shown
    assert f"task {task}:" in shown
    assert not {"torch", "pydantic", "transformers"} & {line.split("|")[-1].strip() for line in imported.splitlines()}
