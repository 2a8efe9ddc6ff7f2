"""`make fork`: the copy has the core, the add-ons that are named and what they need, and passes its own tests."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from addons.tools import fork
from engine.config import addons
from engine.config.errors import UsageError
from engine.tools import manifest
from tests.helpers import kit

pytestmark = pytest.mark.skipif(not (kit.REPOSITORY / ".git").exists(), reason="the copy is made of tracked files")

KEPT = "tools/ledger"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A fork with two add-ons; the second one needs another."""
    kit.need_addon("techniques/asam")
    folder = tmp_path_factory.mktemp("fork") / "crane"
    fork.main([str(folder), "--tasks", "causal_lm", "--addons", KEPT, "techniques/asam", "--name", "crane"])
    return folder


def test_copy_holds_the_named_addons_and_nothing_of_the_others(copy):
    files = subprocess.run(["git", "ls-files"], cwd=copy, capture_output=True, text=True).stdout.splitlines()
    assert {"train.py", "src/tasks/causal_lm.py", "samples/stdlib_code.py"} < {*files}
    assert not [file for file in files if file.startswith(fork.OF_THE_TEMPLATE)]
    assert manifest.read_manifest(copy) == manifest.hashes(manifest.engine_files(copy))
    kept = {file for file in files if file.startswith("addons/") and "/_" not in file}
    assert kept == {"addons/README.md", f"addons/{KEPT}.py", "addons/techniques/asam.py", "addons/techniques/sam.py"}
    tests = {file for file in files if re.match(r"tests/addons/\w+/test_", file)}
    assert {file for file in tests if "techniques" not in file} == {f"tests/addons/{KEPT.replace('/', '/test_')}.py"}
    assert not {f"tests/addons/techniques/test_{name}.py" for name in ("averages", "neftune", "sam")} & tests
    run_files = [yaml.safe_load((copy / file).read_text()) for file in files if re.match(r"configs/\w+\.yaml", file)]
    assert {values["task"] for values in run_files} <= {"causal_lm", "text_classification"}
    assert not any({"peft", "streaming"} & values.keys() for values in run_files)
    schema = json.loads((copy / "configs" / "schema.json").read_text())
    assert [name for name, rules in schema["properties"].items() if "x-add-on" in rules] == ["techniques"]
    assert not {*schema["properties"]["task"]["enum"]} & {*addons.addon_names("tasks")}


# ---- pages -------------------------------------------------------------------------------------------------------------


def test_pages_of_the_copy_are_about_the_copy(copy):
    """Every file and target that its README.md names is there."""
    readme, agents = (copy / "README.md").read_text(), (copy / "AGENTS.md").read_text()
    assert readme.startswith("# crane\n")
    assert "Add-ons: techniques/asam, techniques/sam, tools/ledger.\n" in readme
    files = re.findall(r"`([\w/]+(?:/|\.py))`|\]\(([^)]+)\)", readme)
    missing = [name for pair in files for name in pair if name and not (copy / name).exists()]
    assert missing == []
    shown = subprocess.run(["make"], cwd=copy, capture_output=True, text=True, check=True).stdout
    assert {*re.findall(r"\bmake ([a-z-]+)", readme)} - {"lists"} <= {*re.findall(r"^  ([a-z-]+)", shown, re.M)}
    assert "\n> A copy of the template." in agents
    assert (copy / "CLAUDE.md").is_symlink()
    assert (copy / "CLAUDE.md").read_text() == agents


def test_copy_without_addons_has_no_folder_for_them(tmp_path):
    fork.fork(tmp_path / "copy", ["causal_lm"], [], "x")
    assert not (tmp_path / "copy" / "addons").exists()
    assert not (tmp_path / "copy" / "tests" / "addons").exists()
    assert "Add-ons: none." in (tmp_path / "copy" / "README.md").read_text()


# ---- files -------------------------------------------------------------------------------------------------------------


def test_new_files_of_code_are_copied_and_others_are_named(tmp_path, monkeypatch):
    """A task of one's own need not be committed; a file of secrets is not copied."""
    (tmp_path / "src").mkdir()
    new = ["src/new.py", "src/ignored.py", ".env.local", "notes.txt", "a b.txt"]
    for name in ("tracked.py", *new):
        (tmp_path / name).touch()
    (tmp_path / "link.md").symlink_to("tracked.py")
    (tmp_path / ".gitignore").write_text("ignored.py\n")
    for words in (["init", "-q"], ["add", "tracked.py", "link.md", ".gitignore"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(fork, "REPOSITORY", tmp_path)
    assert sorted(fork.files_of_checkout()) == [".gitignore", "link.md", "src/new.py", "tracked.py"]
    assert sorted(fork.untracked_elsewhere()) == [".env.local", "a b.txt", "notes.txt"]


@pytest.mark.parametrize("name", [".env", ".env.local", ".envrc", ".netrc", "src/.env", "key.pem"])
def test_git_ignores_files_of_secrets(name):
    assert subprocess.run(["git", "check-ignore", "-q", name], cwd=kit.REPOSITORY).returncode == 0


def test_edits_of_the_copy_are_red_in_no_test_of_files(copy, tmp_path):
    """A new task, no docs/ and another README.md: the tests that look at files pass, and all are collected."""
    edited = shutil.copytree(copy, tmp_path / "edited", symlinks=True)
    (edited / "src" / "tasks" / "mine.py").write_text("from src.tasks.causal_lm import Options, Task\n")
    shutil.copy(edited / "accelerate_configs" / "cpu.yaml", edited / "accelerate_configs" / "mine.yaml")
    shutil.rmtree(edited / "docs")
    (edited / "README.md").rename(edited / "readme.txt")
    words = ["tests/engine/config/test_schema.py", "tests/engine/distributed/test_accelerate_configs.py"]
    words += ["tests/engine/test_task_registry.py", "tests/conformance/test_task.py", "-k", "not rows and not train"]
    for more in (["--collect-only"], words):
        assert_pytest(edited, *more)


def assert_pytest(folder, *words: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "pytest", "-q", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env)
    assert done.returncode in (0, 5), done.stdout[-3000:]  # 5: all skipped


@pytest.mark.parametrize("names", [["streaming"], ["data"], ["backends/deepspeed"], ["techniques/ema"]], ids=str)
def test_tests_of_a_copy_need_nothing_that_it_lacks(tmp_path, names):
    """They are collected, and no test of a whole room stays where the room has lost a part."""
    kit.need_addon(names[0])
    fork.fork(tmp_path / "copy", [], names, "x")
    assert_pytest(tmp_path / "copy", "--collect-only", "tests/addons")
    assert not (tmp_path / "copy" / "tests/addons/techniques/test_technique_chain.py").exists()


def test_run_file_that_is_none_is_refused(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text("words\n")
    monkeypatch.setattr(fork, "REPOSITORY", tmp_path)
    with pytest.raises(UsageError, match=r"configs/mine\.yaml: expected lines of the form"):
        fork.names_one("configs/mine.yaml", {"techniques/ema"})


def test_folder_with_files_and_unknown_names_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=str(tmp_path)):
        fork.fork(tmp_path, [], [], "x")
    with pytest.raises(UsageError, match="did you mean causal_lm"):
        fork.fork(tmp_path / "new", ["casual_lm"], [], "x")
    with pytest.raises(UsageError, match="did you mean tools/ledger"):
        fork.fork(tmp_path / "new", [], ["tools/leger"], "x")
    assert not (tmp_path / "new").exists()
