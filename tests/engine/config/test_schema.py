"""configs/schema.json: the JSON schema of the run file, which editors and --help read."""

import json
import os
import re
import subprocess
import sys

import pytest

from engine.config.paths import SCHEMA_FILE
from engine.config.show_help import format_help
from tests.helpers import kit

PROPERTIES = json.loads(SCHEMA_FILE.read_text())["properties"]
TASKS = PROPERTIES["task"]["enum"]  # of the last `make schema`


def train(*words: str) -> tuple[str, str]:
    """Return what the command prints, and the modules that it imports."""
    command = [sys.executable, "-X", "importtime", str(kit.REPOSITORY / "train.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_help_is_shown_without_slow_imports():
    shown, imported = train("--task", "causal_lm", "--help")
    assert "--global_batch_size N" in shown
    assert "\n  --ddp_timeout " not in shown
    assert all("\n  --ddp_timeout " in train(*words)[0] for words in (["--help", "all"], ["--help=all"]))
    assert "task causal_lm:" in shown
    assert not {"torch", "pydantic", "transformers"} & {line.split("|")[-1].strip() for line in imported.splitlines()}


def test_importing_the_package_reads_no_flags_and_prints_nothing(tmp_path):
    """Also by a program of the name of ours: only `src.begin` shows --help and ends the process at Ctrl-C."""
    program = tmp_path / "train.py"
    program.write_text("import signal\nimport engine.startup\nprint(signal.getsignal(signal.SIGINT).__name__)\n")
    command = [sys.executable, program, "--help"]
    environment = os.environ | {"PYTHONPATH": str(kit.REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("default_int_handler\n", "")


@pytest.mark.parametrize("task", TASKS)
def test_help_shows_every_field_once_with_one_default(task):
    schema = json.loads(SCHEMA_FILE.read_text())
    [options] = [r["then"]["properties"] for r in schema["allOf"] if r["if"]["properties"]["task"]["const"] == task]
    fields = {name for name, rules in PROPERTIES.items() if rules} | options.keys()
    shown = format_help(schema, task, "eval.py", everything=True)
    assert sorted(re.findall(r"^  --(\w+)", shown, re.M)) == sorted(["help", "schema", "config", "checkpoint", *fields])
    assert " ".join(shown.split()).count("(default: ") == len(fields)
