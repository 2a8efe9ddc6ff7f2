"""configs/schema.json: the JSON schema of the run file, which editors and --help read."""

import json
import subprocess
import sys

import pytest

from src.config.addons import missing_addon
from src.config.paths import SCHEMA_FILE
from src.tasks import OPTIONS
from tests.helpers import kit

PROPERTIES = json.loads(SCHEMA_FILE.read_text())["properties"]
needs_all_addons = pytest.mark.skipif(
    not set(PROPERTIES["task"]["enum"]) <= OPTIONS.keys() or any(map(missing_addon, PROPERTIES)),
    reason="configs/schema.json also has the fields of add-ons that are not here",
)


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


def test_help_is_shown_without_slow_imports():
    shown, imported = train("--task", "text_classification", "--help")
    assert "--global_batch_size N" in shown
    assert "task text_classification:" in shown
    assert not {"torch", "pydantic", "transformers"} & {line.split("|")[-1].strip() for line in imported.splitlines()}
