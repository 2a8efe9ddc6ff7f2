"""environment.json and code.diff: the commit of the code and its uncommitted changes."""

import json
import os
import shutil
import subprocess

import pytest
from accelerate import Accelerator

from src.config.schema import RunConfig
from src.distributed.strategies import Strategy
from src.reporting import environment


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Return a git repository with a committed train.py, in place of this one."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("a = 1\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    monkeypatch.setattr(environment, "REPOSITORY", folder)
    return folder


def git(folder, *words):
    plain = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}  # no signature, no hooks of the user
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, env=os.environ | plain)


def save_diff(folder) -> None:
    environment.write_environment(folder, Strategy(Accelerator(cpu=True), RunConfig()), RunConfig(), "tokens", 0)


def test_clean_repository_has_no_diff(repository, tmp_path):
    (tmp_path / "code.diff").write_text("from an earlier start")
    save_diff(tmp_path)
    written = json.loads((tmp_path / "environment.json").read_text())
    assert len(written["git_commit"]) == 40
    assert written["git_dirty"] is False
    assert not (tmp_path / "code.diff").exists()


def test_diff_is_redacted_and_runs_no_program(repository, tmp_path):
    (repository / "train.py").write_text("a = 'https://host/?sig=secret'\n")
    git(repository, "config", "diff.external", f"touch {tmp_path / 'executed'}")
    save_diff(tmp_path)
    diff = (tmp_path / "code.diff").read_text()
    assert "-a = 1\n" in diff
    assert "https://host/?***'" in diff
    assert "secret" not in diff
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("missing", ["repository", "tracked train.py", "git"])
def test_no_commit_without_git(repository, tmp_path, monkeypatch, missing):
    if missing == "repository":
        shutil.rmtree(repository / ".git")
    elif missing == "git":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:  # this code, unpacked inside another repository
        (repository / "inner").mkdir()
        shutil.copy(repository / "train.py", repository / "inner")
        monkeypatch.setattr(environment, "REPOSITORY", repository / "inner")
    assert environment.code_version() == (None, "")
