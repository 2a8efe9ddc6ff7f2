"""The JSON schema of the run file, for editors and --help: all fields, and the options of each task.

configs/schema.json holds it; `make schema` writes it after a field has changed. Tests: tests/config/test_schema.py.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from src.config.addons import addons_with_fields
from src.config.fields import json_schema
from src.config.schema import RunConfig


def run_file_schema(tasks: Mapping[str, Callable[[], type]]) -> dict:
    """Return the JSON schema; `tasks`: name of a task -> function that returns its dataclass of options."""
    return from_fields(own_schema(), {task: json_schema(kind()) for task, kind in tasks.items()})


def own_schema() -> dict[str, dict]:
    """Return the JSON schema of each field that no task declares: of the core, then of add-ons, which are named."""
    found = json_schema(RunConfig)
    for addon in addons_with_fields():
        path = addon.__name__.replace(".", "/")
        found |= {name: rules | {"x-add-on": path} for name, rules in json_schema(addon.Fields).items()}
    return found


def from_fields(own: dict[str, dict], options: dict[str, dict[str, dict]]) -> dict:
    """Return the JSON schema of the run file's own fields and the options of each task: {name: JSON schema}."""
    # A name that only a task has is declared empty here, so that "additionalProperties" accepts it, and in full below.
    names = {name: {} for fields in options.values() for name in fields}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "run file of train.py",
        "type": "object",
        "additionalProperties": False,
        "properties": own | {"task": own["task"] | {"enum": list(options)}} | names,
        "allOf": [_options_if_task(task, fields) for task, fields in options.items()],
    }


def _options_if_task(task: str, fields: dict[str, dict]) -> dict:
    condition: dict[str, Any] = {"properties": {"task": {"const": task}}}
    if task != RunConfig.task:  # the default task needs no name
        condition["required"] = ["task"]
    return {"if": condition, "then": {"properties": fields}}


def to_json(schema: dict) -> str:
    """Return the text of configs/schema.json."""
    return json.dumps(schema, indent=1, ensure_ascii=False)
