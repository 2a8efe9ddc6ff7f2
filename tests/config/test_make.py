"""Makefile targets that work on files, in a folder of their own: setup, clean."""

import shutil
import subprocess
import sys

import pytest

from tests.helpers import kit


@pytest.fixture
def project(tmp_path):
    """A folder with the Makefile, and no package to install."""
    (tmp_path / "src").mkdir()
    for name in ("Makefile", "src/__init__.py"):
        shutil.copy(kit.REPOSITORY / name, tmp_path / name)
    (tmp_path / "requirements.txt").touch()
    return tmp_path


@pytest.fixture
def old_python(tmp_path):
    """A Python that runs scripts as Python 3.10.4 would see itself."""
    code = "import sys, runpy; sys.version_info = (3, 10, 4); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
    path = tmp_path / "python3.10"
    path.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n")
    path.chmod(0o755)
    return path


def make(folder, *words) -> subprocess.CompletedProcess:
    words = ["make", f"PYTHON={sys.executable}", *map(str, words)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def ours(done: subprocess.CompletedProcess) -> list[str]:
    """Return the lines on stderr that are not make's own."""
    return [line for line in done.stderr.splitlines() if not line.startswith("make")]


def test_clean_keeps_data_runs_and_the_environment(project):
    kept = ["data/mine.jsonl", "data/__pycache__/mine.jsonl", "runs/a/final/model.safetensors", ".venv/done"]
    for name in [*kept, "src/__pycache__/a.pyc", ".ruff_cache/a", ".pytest_cache/a"]:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    assert make(project, "clean").returncode == 0
    assert all((project / name).read_text() == "x" for name in kept)
    assert not (project / "src" / "__pycache__").exists()
    assert not (project / ".ruff_cache").exists()
    assert make(project, "distclean").returncode == 0
    assert not (project / ".venv").exists()
    assert all((project / name).exists() for name in kept if not name.startswith(".venv"))


def test_setup_refuses_an_old_python_in_one_sentence(project, old_python):
    done = make(project, "setup", f"PYTHON={old_python}")
    assert done.returncode == 2
    [line] = ours(done)
    assert line.startswith("error: ")
    for part in ("Python 3.11", "3.10.4", "make setup PYTHON="):
        assert part in line
    assert not (project / ".venv").exists()


def test_setup_names_a_python_that_is_missing(project):
    done = make(project, "setup", "PYTHON=python0")
    assert done.returncode == 2
    [line] = ours(done)
    assert "python0" in line
    assert "make setup PYTHON=" in line


def test_setup_after_a_failed_one_and_over_a_broken_environment(project):
    (project / "requirements.txt").write_text("./no-such-folder\n")
    failed = make(project, "setup")
    assert failed.returncode == 2
    assert "requirements.txt" in failed.stdout  # what it does, before it takes minutes
    assert not (project / ".venv" / "done").exists()

    (project / "requirements.txt").write_text("")
    (project / ".venv" / "bin" / "python").unlink()
    (project / ".venv" / "bin" / "python").symlink_to("/nowhere/python3.9")
    done = make(project, "setup")
    assert (done.returncode, ours(done)) == (0, [])
    version = [project / ".venv" / "bin" / "python", "-m", "pip", "--version"]
    assert subprocess.run(version, capture_output=True, check=False).returncode == 0
    assert "Nothing to be done" in make(project, "setup").stdout


def test_train_py_under_an_old_python(old_python):
    done = subprocess.run(
        [old_python, "train.py", "--help"], cwd=kit.REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "3.10.4" in line
    assert "make setup PYTHON=" in line


def test_train_py_without_its_packages():
    """-S: Python without site-packages, as one in which nothing is installed."""
    done = subprocess.run(
        [sys.executable, "-S", "train.py"], cwd=kit.REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "torch, accelerate" in line
    assert "make setup" in line


@pytest.mark.parametrize(
    "words, named", [(["NPROC=two"], "'two'"), (["NPROC=0"], "'0'"), (["CONFIG=a b.yaml"], "'a b.yaml'")]
)
def test_variables_that_make_cannot_take(project, words, named):
    done = make(project, "train", *words)
    assert done.returncode == 2
    assert f"{words[0].partition('=')[0]} is {named}" in done.stderr
    assert not (project / ".venv").exists()


def test_report_without_a_run(project):
    """RUN is left out, and there is none in runs/."""
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (project / ".venv" / "bin" / "python").chmod(0o755)
    shutil.copytree(kit.REPOSITORY / "src", project / "src", dirs_exist_ok=True)
    for target in ("report", "ledger"):
        done = make(project, "-o", ".venv/done", target)
        assert done.returncode == 2
        [line] = ours(done)
        assert "runs/" in line
