"""environment.json: the commit of the code, and whether it was changed."""

import json
import os
import subprocess

from accelerate import Accelerator

from src.config.schema import RunConfig
from src.distributed.strategies import Strategy
from src.reporting import environment


def git(folder, *words):
    plain = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}  # no signature, no hooks of the user
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, env=os.environ | plain)


def commit_and_change(folder, code, monkeypatch) -> tuple[str | None, bool | None]:
    """Return (commit, whether the code was changed) as a start of a run with the code in `code` records them."""
    monkeypatch.setattr(environment, "REPOSITORY", code)
    environment.write_environment(folder, Strategy(Accelerator(cpu=True), RunConfig()), RunConfig(), "tokens", 0)
    written = json.loads((folder / "environment.json").read_text())
    return written["git_commit"], written["git_dirty"]


def test_commit_of_the_code_and_its_changes(tmp_path, monkeypatch):
    code, inner = tmp_path / "code", tmp_path / "code" / "inner"
    inner.mkdir(parents=True)
    (code / "train.py").write_text("a = 1\n")
    assert commit_and_change(tmp_path, code, monkeypatch) == (None, None)
    git(code, "init", "-q")
    git(code, "add", ".")
    git(code, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    commit, is_changed = commit_and_change(tmp_path, code, monkeypatch)
    assert (len(commit), is_changed) == (40, False)
    (code / "train.py").write_text("a = 2\n")
    assert commit_and_change(tmp_path, code, monkeypatch) == (commit, True)
    (inner / "train.py").write_text("")  # this code, unpacked inside another repository
    assert commit_and_change(tmp_path, inner, monkeypatch) == (None, None)
