"""The text of --help, from the JSON schema of the run file: every field in its group, with type, help and default.

Tests: tests/config/test_config.py, tests/config/test_command_line.py.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

DESCRIPTION = (
    "Precedence: defaults < the YAML of --config < flags. Without a run file, model or data, train.py trains "
    "configs/stdlib_lm.yaml, and eval.py evaluates the newest run. A bool flag alone means true; --NAME none clears a "
    "field with the default none. --task NAME --help shows the options of another task. README.md links all docs."
)
OWN_FLAGS = {  # of a command, beside the fields of the run file
    "train.py": {},
    "eval.py": {"checkpoint": "run, checkpoint or final model; its configuration applies"},
}
PLACEHOLDERS = {"string": "TEXT", "integer": "N", "number": "X", "boolean": "true|false", "object": "{NAME: VALUE}"}


def fields_in(schema: dict) -> tuple[dict[str, dict], dict[str, dict[str, dict]]]:
    """Return (the run file's own fields, the options of each task) in the JSON schema of the run file."""
    options = {rule["if"]["properties"]["task"]["const"]: rule["then"]["properties"] for rule in schema["allOf"]}
    return {name: field for name, field in schema["properties"].items() if field}, options


def format_help(task: str, own: dict[str, dict], options: dict[str, dict], also: dict[str, str]) -> str:
    """Return the help of the run file's own fields and the task's options, by their JSON schemas.

    `also`: further flags and their help."""
    program = Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} [--config configs/NAME.yaml] [--flag value …]",
        description=DESCRIPTION,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
        add_help=False,
    )
    group = parser.add_argument_group("command")
    group.add_argument("--help", action="store_true", help="print this text and exit")
    group.add_argument("--schema", action="store_true", help="print the JSON schema of the run file and exit")
    group.add_argument("--config", metavar="FILE", help="run file: YAML with the fields below")
    for name, text in also.items():
        group.add_argument(f"--{name}", metavar="TEXT", help=text)
    groups = {}  # the fields of an add-on stand in a group of the core's
    for fields, heading in ((own, "run"), (options, f"task {task}")):
        for name, field in fields.items():
            heading = field.get("x-group", heading)
            group = groups[heading] = groups.get(heading) or parser.add_argument_group(heading)
            text = f"{field['description']}{_choices(field)}{_default(field)}".replace("%", "%%")
            groups[heading].add_argument(f"--{name}", metavar=_placeholder(field), help=text)
    return parser.format_help().rstrip()


def _placeholder(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return "|".join(part.get("const") or _placeholder(part) for part in field["anyOf"] if part["type"] != "null")
    return f"{_placeholder(field['items'])} …" if "items" in field else PLACEHOLDERS[field["type"]]


def _choices(field: dict[str, Any]) -> str:
    return f"; one of {', '.join(map(str, field['enum']))}" if "enum" in field else ""


def _default(field: dict[str, Any]) -> str:
    """Return ' (default: X)', or an empty string if the help already names the default."""
    default = field["default"]
    if "(default: " in field["description"]:
        return ""
    if default in (None, []):
        return " (default: none)"
    if isinstance(default, list):
        return f" (default: {' '.join(map(str, default))})"
    return f" (default: {str(default).lower() if isinstance(default, bool) else default})"
