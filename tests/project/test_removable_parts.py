"""What docs/forking.md says may be removed: without it, the template trains, evaluates, lints and collects its tests."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import kit

PAGE = (kit.REPOSITORY / "docs" / "forking.md").read_text()
TABLE = re.search(r"^\| you do not need \| remove \|\n.*\n((?:\|.*\n)+)", PAGE, re.M)[1]
ROWS = dict(re.findall(r"^\| (.+?) \| (.+) \|$", TABLE, re.M))
ADDONS = ("addons/", "tests/addons/")  # may be gone already


def remove(folder: Path, cell: str) -> None:
    """Delete the files and folders of a row, which are there."""
    for name in re.findall(r"`([^`]+)`", cell):
        found = [*folder.glob(name)]
        assert found or name.startswith(ADDONS), name
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def run(folder: Path, *words: object) -> str:
    """Run Python in `folder`; return what it prints."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def copy_of_template(folder: Path) -> Path:
    for path in kit.REPOSITORY.iterdir():
        if path.name in (".git", ".venv", ".ruff_cache", "runs", "data"):
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            folder.mkdir(exist_ok=True)
            shutil.copy(path, folder, follow_symlinks=False)
    return folder


def numbers(folder: Path, tiny: dict, out: Path) -> list[dict]:
    """Train two steps, and evaluate the run again; return its metrics without times."""
    run(folder, "train.py", *kit.flags(**tiny, max_steps=2, logging_steps=1), "--output_dir", out)
    run(folder, "eval.py", "--checkpoint", out)
    return kit.timeless(out)


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory) -> list[dict]:
    return numbers(kit.REPOSITORY, tiny, tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.cluster
@pytest.mark.parametrize("part", [*ROWS, "everything"])
def test_template_works_without(tmp_path, tiny, whole, part):
    folder = copy_of_template(tmp_path / "copy")
    for name, cell in ROWS.items():
        if part in (name, "everything"):
            remove(folder, cell)
    assert numbers(folder, tiny, tmp_path / "run") == whole
    run(folder, "-m", "ruff", "check", ".")
    run(folder, "-m", "pytest", "--collect-only", "-q", "tests")


def test_what_was_removed_is_named_in_one_sentence(tmp_path, tiny):
    folder = copy_of_template(tmp_path / "copy")
    for name, cell in ROWS.items():
        if "chats" in name:
            remove(folder, cell)
    kit.write_jsonl(tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": "a"}]}] * 4)
    data = {"train_file": tmp_path / "chats.jsonl", "validation_file": None}
    flags = kit.flags(**{name: value for name, value in (tiny | data).items() if value is not None})
    command = [sys.executable, "train.py", *flags, "--output_dir", tmp_path / "run"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "chats: this copy has removed engine/text/chat.py: restore it" in done.stderr
