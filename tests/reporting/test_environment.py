"""What environment.json says of the code: its commit, and what was changed since."""

import shutil
import subprocess

import pytest

from src.reporting import environment


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of its own with a train.py, where git is asked."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("a = 1\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    monkeypatch.setattr(environment, "REPOSITORY", folder)
    return folder


def git(folder, *words):
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


def test_a_clean_repository_leaves_no_diff(repository, tmp_path):
    (tmp_path / "code.diff").write_text("of the start before")
    environment.save_diff(tmp_path)
    assert len(environment.git_commit()) == 40
    assert environment.uncommitted() == ""
    assert not (tmp_path / "code.diff").exists()


def test_changes_and_new_files_are_saved_redacted(repository, tmp_path):
    (repository / "train.py").write_text("a = 'https://user:secret@host/'\n")
    (repository / "new.py").write_text("")
    (repository / "data.jsonl").write_text("")
    git(repository, "config", "diff.external", f"touch {tmp_path / 'executed'}")
    environment.save_diff(tmp_path)
    diff = (tmp_path / "code.diff").read_text()
    assert "-a = 1\n" in diff
    assert "***@host" in diff
    assert "secret" not in diff
    assert "# not in git: new.py" in diff
    assert "data.jsonl" not in diff
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("without", ["repository", "tracked", "git"])
def test_code_that_git_does_not_know(repository, tmp_path, monkeypatch, capfd, without):
    if without == "repository":
        shutil.rmtree(repository / ".git")
    elif without == "tracked":  # unpacked inside somebody's repository
        (repository / "inner").mkdir()
        shutil.copy(repository / "train.py", repository / "inner")
        monkeypatch.setattr(environment, "REPOSITORY", repository / "inner")
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.git_commit() is None
    assert environment.uncommitted() is None
    environment.save_diff(tmp_path)
    assert not (tmp_path / "code.diff").exists()
    assert capfd.readouterr().err == ""
