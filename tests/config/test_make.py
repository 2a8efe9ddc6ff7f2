"""Makefile targets in a folder of their own (setup, clean, report), and the check of Python and its packages."""

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
    (tmp_path / "src").mkdir()
    for name in ("Makefile", "src/__init__.py"):
        shutil.copy(kit.REPOSITORY / name, tmp_path / name)
    (tmp_path / "requirements.txt").touch()
    return tmp_path


def write_python(path: Path, code: str = "") -> Path:
    """Write a Python that runs `code` before a script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    start = "import sys, runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
    arguments = f"-c '{code}; {start}' \"$@\"" if code else '"$@"'
    path.write_text(f"#!/bin/sh\nexec {sys.executable} {arguments}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def old_python(tmp_path) -> Path:
    return write_python(tmp_path / "python3.10", "import sys; sys.version_info = (3, 10, 4)")


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
    for name in [*kept, "src/__pycache__/a.pyc", ".ruff_cache/a", ".pytest_cache/a"]:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    assert make(project, "clean")[0] == 0
    assert all((project / name).read_text() == "x" for name in kept)
    assert not (project / "src" / "__pycache__").exists()
    assert not (project / ".ruff_cache").exists()
    assert make(project, "distclean")[0] == 0
    assert not (project / ".venv").exists()
    assert all((project / name).exists() for name in kept if not name.startswith(".venv"))


def test_setup_with_an_old_python(project, old_python):
    code, [line], _ = make(project, "setup", f"PYTHON={old_python}")
    assert code == 2
    for part in ("error: ", "Python 3.11", "3.10.4", "make setup PYTHON="):
        assert part in line
    assert not (project / ".venv").exists()


def test_setup_again_after_a_failure(project):
    """And over a broken environment."""
    (project / "requirements.txt").write_text("./no-such-folder\n")
    code, _, output = make(project, "setup")
    assert code == 2
    assert "requirements.txt" in output  # printed before it takes minutes
    assert not (project / ".venv" / "done").exists()

    (project / "requirements.txt").write_text("")
    python = project / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python3.9")
    assert make(project, "setup")[:2] == (0, [])
    assert run(python, "-m", "pip", "--version")[0] == 0
    assert "Nothing to be done" in make(project, "setup")[2]


def test_train_py_without_its_packages():
    code, [line], _ = run(sys.executable, "-S", "train.py")  # -S: no site-packages
    assert code == 2
    assert "requirements.txt" in line
    assert "make setup" in line


@pytest.mark.parametrize(
    "words, part",
    [
        (["NPROC=two"], "NPROC is 'two'"),
        (["NPROC=0"], "'0'"),
        (["CONFIG=a b.yaml"], "CONFIG is 'a b.yaml'"),
        (["config=x.yaml"], "CONFIG=x.yaml"),
    ],
)
def test_invalid_variable(project, words, part):
    done = subprocess.run(["make", "train", *words], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert part in done.stderr
    assert not (project / ".venv").exists()


@pytest.mark.parametrize("target", ["report", "ledger"])
def test_report_without_a_run(project, target):
    write_python(project / ".venv" / "bin" / "python")
    shutil.copytree(kit.REPOSITORY / "src", project / "src", dirs_exist_ok=True)
    code, [line], _ = make(project, "-o", ".venv/done", target)
    assert code == 2
    assert "runs/" in line


@pytest.mark.parametrize("words", [["report", "RUN=runs/a"], ["find-lr"], ["storm"], ["fork", "DEST=x"]])
def test_tool_that_is_not_here(project, words):
    """The folder has no addons/."""
    code, [line], _ = make(project, "-o", ".venv/done", *words)
    assert code == 2
    assert line.startswith("error: addons/tools/")
    assert f"make {words[0]}" in line
