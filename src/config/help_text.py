"""The text of --help: every field in its group, with type, help and default.

Tests: tests/config/test_config.py.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

from src.config.fields import TYPES, declared_options, field_types

DESCRIPTION = (
    "Precedence: defaults < the YAML of --config < flags. Without a run file, model or data, train.py trains "
    "configs/stdlib_lm.yaml, and eval.py evaluates the newest run. A bool flag alone means true; --NAME none clears a "
    "field with the default none. --task NAME --help shows the options of another task. README.md links all docs."
)


def format_help(task: str, kinds: tuple[type, type], also: dict[str, str]) -> str:
    """Return the help of all fields of RunConfig and the task's options; `also`: further flags and their help."""
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
    group.add_argument("--config", metavar="FILE", help="run file: YAML with the fields below")
    for name, text in also.items():
        group.add_argument(f"--{name}", metavar="TEXT", help=text)
    for kind, heading in zip(kinds, ("run", f"task {task}"), strict=True):
        types, rules = field_types(kind), declared_options(kind)
        group = None
        for field in dataclasses.fields(kind):
            option = rules[field.name]
            if option.group or group is None:
                group = parser.add_argument_group(option.group or heading)
            choices = f"; one of {', '.join(option.choices)}" if option.choices else ""
            text = f"{option.help}{choices}{_default(field, option.help)}".replace("%", "%%")
            group.add_argument(f"--{field.name}", metavar=_metavar(types[field.name]), help=text)
    return parser.format_help().rstrip()


def _metavar(type_: Any) -> str:
    if get_origin(type_) is list:
        return f"{TYPES[get_args(type_)[0]][1]} …"
    return TYPES[type_][1]


def _default(field: dataclasses.Field, help: str) -> str:
    """Return ' (default: X)', or an empty string if the help already names the default."""
    if "(default: " in help:
        return ""
    if field.default in (None, dataclasses.MISSING):
        return " (default: none)"
    return f" (default: {str(field.default).lower() if isinstance(field.default, bool) else field.default})"
