"""--help, shown before the imports that take seconds, and --schema: the JSON schema of the run file, for editors, too.

configs/schema.json holds the schema, which --help reads; `make schema` writes it after a field has changed.
Tests: tests/engine/config/test_schema.py.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

DESCRIPTION = (
    "Precedence: defaults < the YAML of --config < flags. Without a run file, model or data, train.py trains "
    "configs/stdlib_lm.yaml, and eval.py evaluates the newest run. A bool flag alone means true; --NAME none clears a "
    "field with the default none. --task NAME --help shows the options of another task, --help all every field. "
    "README.md links all docs."
)
OWN_FLAGS = {"eval.py": {"checkpoint": "run, checkpoint or final model; its configuration applies"}}
PLACEHOLDERS = {"string": "TEXT", "integer": "N", "number": "X", "boolean": "true|false", "object": "{NAME: VALUE}"}


def show_help(argv: list[str]) -> None:
    """Print the help of the task of --task, or of the run file of --config, and exit."""
    # engine/startup.py calls this before the slow imports, so no import here takes long.
    from engine.config.addresses import path_of_flag
    from engine.config.paths import SCHEMA_FILE, read_yaml

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("config", "task", "help"):
        parser.add_argument(f"--{name}", nargs="?")
    given, _ = parser.parse_known_args(argv[1:])
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    in_file = read_yaml(path_of_flag(given.config, "--config")).get("task") if given.config else None
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # --help | head
    task = given.task or in_file or schema["properties"]["task"]["default"]
    print(format_help(schema, task, Path(argv[0]).name, everything=given.help == "all"))
    sys.exit(0)


def show_schema(tasks: Mapping[str, Callable[[], type]]) -> None:
    """Print the JSON schema of the run file and exit."""
    print(json.dumps(run_file_schema(tasks), indent=1, ensure_ascii=False))
    sys.exit(0)


def format_help(schema: dict, task: str, program: str, everything: bool) -> str:
    """Return the help of the fields of all tasks and of the task's options, which the JSON schema of the run file has.

    Fields that few runs set are only named, unless `everything` is asked for."""
    core = {name: field for name, field in schema["properties"].items() if field}
    tasks = {rule["if"]["properties"]["task"]["const"]: rule["then"]["properties"] for rule in schema["allOf"]}
    of_task = tasks.get(task, {})
    rare = [name for name, field in (core | of_task).items() if field.get("x-rare")]
    hidden = [] if everything else rare
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} [--config configs/NAME.yaml] [--flag value …]",
        description=DESCRIPTION,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
        add_help=False,
        epilog=f"{len(hidden)} more fields, by --help all: {', '.join(hidden)}" if hidden else None,
    )
    group = parser.add_argument_group("command")
    group.add_argument("--help", action="store_true", help="print this text and exit; --help all: every field")
    group.add_argument("--schema", action="store_true", help="print the JSON schema of the run file and exit")
    group.add_argument("--config", metavar="FILE", help="run file: YAML with the fields below")
    for name, text in OWN_FLAGS.get(program, {}).items():
        group.add_argument(f"--{name}", metavar="TEXT", help=text)
    groups: dict[str, Any] = {}  # the fields of an add-on stand in a group of the core's
    for fields, heading in ((core, "run"), (of_task, f"task {task}")):
        for name, field in fields.items():
            heading = field.get("x-group", heading)
            if name in hidden:
                continue
            groups[heading] = groups.get(heading) or parser.add_argument_group(heading)
            groups[heading].add_argument(f"--{name}", metavar=_placeholder(field), help=_help(field))
    return parser.format_help().rstrip()


def _placeholder(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        parts = [part for part in field["anyOf"] if part["type"] != "null"]
        return "|".join(part.get("const") or _placeholder(part) for part in parts)
    if "items" in field:
        return f"{_placeholder(field['items'])} …"
    return PLACEHOLDERS[field["type"]]


def _help(field: dict[str, Any]) -> str:
    """Return the help text with all choices, and with the default unless the text names it already."""
    text = field["description"]
    if "enum" in field:
        text += f"; one of {', '.join(map(str, field['enum']))}"
    if "(default: " not in text:
        text += f" (default: {_default(field['default'])})"
    return text.replace("%", "%%")


def _default(value: Any) -> str:
    """Return a default as it is written in a run file."""
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


# ---- the JSON schema -------------------------------------------------------------------------------------------------


def run_file_schema(tasks: Mapping[str, Callable[[], type]]) -> dict:
    """Return the JSON schema; `tasks`: name of a task -> function that returns its dataclass of options."""
    from engine.config.find_addons import addon_names, addons_with_fields, known_addons
    from engine.config.option import declared_options, json_schema
    from engine.config.run_config import RunConfig, config_class

    properties = json_schema(config_class())
    fields_of_copy = [name for name in properties if name not in declared_options(RunConfig)]
    if fields_of_copy:  # they come last
        properties[fields_of_copy[0]].setdefault("x-group", "your fields")
    for addon in addons_with_fields():
        properties |= json_schema(addon)
    properties["task"]["enum"] = list(tasks)
    options = {task: json_schema(options_type()) for task, options_type in tasks.items()}
    # A name that only a task has is declared empty here, so that "additionalProperties" accepts it, and in full below.
    names: dict[str, dict] = {}
    for fields in options.values():
        names |= {name: {} for name in fields}
    addons = known_addons()
    for task in addon_names("tasks"):
        addons |= dict.fromkeys(options[task], f"addons/tasks/{task}")
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "run file of train.py",
        "type": "object",
        "additionalProperties": False,
        "properties": properties | names,
        "allOf": [_options_if_task(task, fields, properties["task"]["default"]) for task, fields in options.items()],
        "x-add-ons": dict(sorted(addons.items())),
    }


def _options_if_task(task: str, fields: dict[str, dict], default: str) -> dict:
    condition: dict[str, Any] = {"properties": {"task": {"const": task}}}
    if task != default:  # the default task needs no name
        condition["required"] = ["task"]
    return {"if": condition, "then": {"properties": fields}}
