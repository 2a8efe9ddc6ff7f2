"""Makefile targets in a folder of their own (setup, clean), and the check of packages."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import kit


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with the Makefile and no package to install."""
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")  # pip warns of a cache that another user owns
    shutil.copy(kit.REPOSITORY / "Makefile", tmp_path / "Makefile")
    shutil.copytree(kit.REPOSITORY / "engine", tmp_path / "engine")
    (tmp_path / "requirements.txt").touch()
    return tmp_path


def run(*words, folder=kit.REPOSITORY) -> tuple[int, list[str], str]:
    """Return (exit code, lines on stderr that are not make's, stdout)."""
    words = [str(word) for word in words]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    return done.returncode, errors, done.stdout


def make(folder: Path, *words) -> tuple[int, list[str], str]:
    return run("make", f"PYTHON={sys.executable}", *words, folder=folder)


def test_clean_keeps_data_runs_and_environment(project):
    kept = ["data/mine.jsonl", "data/__pycache__/mine.jsonl", "runs/a/final/model.safetensors", ".venv/done"]
    for name in [*kept, "engine/__pycache__/a.pyc", ".ruff_cache/a", ".pytest_cache/a"]:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    assert make(project, "clean")[0] == 0
    assert all((project / name).read_text() == "x" for name in kept)
    assert not (project / "engine" / "__pycache__").exists()
    assert not (project / ".ruff_cache").exists()
    assert make(project, "distclean")[0] == 0
    assert not (project / ".venv").exists()
    assert all((project / name).exists() for name in kept if not name.startswith(".venv"))


def test_lint_runs_all_tools(project):
    """Each of the three finds something, and the exit code is that of a failure."""
    if not (kit.REPOSITORY / ".venv" / "done").exists():
        pytest.skip("the tools are those of .venv")
    (project / ".venv").symlink_to((kit.REPOSITORY / ".venv").resolve())
    shutil.copy(kit.REPOSITORY / "pyproject.toml", project)
    shutil.rmtree(project / "engine" / "tools")
    (project / "train.py").write_text("import os\ncount : int = 'one'\n")
    code, _, text = make(project, "lint")
    assert code == 2
    assert [word for word in ("F401", "would be reformatted", "bad-assignment") if word not in text] == []


@pytest.mark.cluster
def test_setup_again_after_a_failure(project):
    (project / "requirements.txt").write_text("./no-such-folder\n")
    assert make(project, "setup")[0] == 2
    assert not (project / ".venv" / "done").exists()
    (project / "requirements.txt").write_text("")
    assert make(project, "setup")[:2] == (0, [])
    assert "Nothing to be done" in make(project, "setup")[2]


def test_missing_packages_are_one_sentence():
    code, [line], _ = run(sys.executable, "-S", "train.py")  # -S: no site-packages
    assert code == 2
    assert "requirements.txt" in line
    assert "make setup" in line


@pytest.mark.parametrize(
    "words, part", [(["NPROC=two"], "NPROC is 'two'"), (["CONFIG=a b.yaml"], "'a b.yaml'"), (["config=x"], "CONFIG=x")]
)
def test_invalid_variable(project, words, part):
    """make itself would train another configuration."""
    code, [line], _ = make(project, "train", *words)
    assert code == 2
    assert part in line
