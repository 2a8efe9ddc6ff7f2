"""--help of train.py and eval.py before their other imports, which take seconds: from configs/schema.json.

Import it before anything else. Tests: tests/config/test_schema.py.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

from src.config.help_text import OWN_FLAGS, fields_in, format_help
from src.config.paths import SCHEMA_FILE


def quick_help(argv: list[str]) -> str | None:
    """Return the help of a command, or None if parsing.parse has to read a run file or to import a task for it."""
    program, words = Path(argv[0]).name, argv[1:]
    if program not in OWN_FLAGS or not {"-h", "--help"} & {*words} or "--config" in words or not SCHEMA_FILE.exists():
        return None
    own, options = fields_in(json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))
    tasks = [word.removeprefix("--task=") for word in words if word.startswith("--task=")]
    tasks += [word for before, word in pairwise(words) if before == "--task"]
    task = tasks[-1] if tasks else own["task"]["default"]
    if task not in options:
        return None
    return format_help(task, own, options[task], OWN_FLAGS[program])


if text := quick_help(sys.argv):
    print(text)
    sys.exit(0)
