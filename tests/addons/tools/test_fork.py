"""`make fork`: the copy has the core, the add-ons that are named and what they need, and passes its own tests."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from addons.tools import fork
from src.config import addons
from src.config.errors import UsageError
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
    assert {"train.py", "src/tasks/causal_lm.py", "src/tasks/text_classification.py", "samples/stdlib_code.py"} < {
        *files
    }
    assert not {"benchmarks/results.json"} & {*files}
    assert (copy / "README.md").read_text().startswith("# crane\n")
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


def test_new_files_are_copied_unless_git_ignores_them(tmp_path, monkeypatch):
    """A task of one's own need not be committed."""
    for name in ("tracked.py", "new.py", "ignored.py"):
        (tmp_path / name).touch()
    (tmp_path / ".gitignore").write_text("ignored.py\n")
    for words in (["init", "-q"], ["add", "tracked.py", ".gitignore"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(fork, "REPOSITORY", tmp_path)
    assert sorted(fork.files_of_checkout()) == [".gitignore", "new.py", "tracked.py"]


def test_tests_of_the_copy_pass(copy):
    """The map, links and run files of the documents, the schema, and the checks of the core's tasks without training."""
    words = ["tests/test_rooms.py", "tests/reporting/test_readme.py", "tests/config/test_schema.py"]
    words += ["tests/conformance/test_task.py"]
    chosen = "rooms or run_files or links or linked or declare or eight or (text_classification and rows)"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", chosen, *words],
        cwd=copy,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("names", [["streaming"], ["data"], ["backends/deepspeed"], ["techniques/ema"]], ids=str)
def test_tests_of_a_copy_need_nothing_that_it_lacks(tmp_path, names):
    """They are collected, and no test of a whole room stays where the room has lost a part."""
    kit.need_addon(names[0])
    fork.fork(tmp_path / "copy", [], names, "x")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/addons"]
    done = subprocess.run(words, cwd=tmp_path / "copy", capture_output=True, text=True, env=env)
    assert done.returncode in (0, 5), done.stdout[-3000:]  # 5: all skipped
    assert not (tmp_path / "copy" / "tests/addons/techniques/test_technique_chain.py").exists()


def test_folder_with_files_and_unknown_names_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=str(tmp_path)):
        fork.fork(tmp_path, [], [], "x")
    with pytest.raises(UsageError, match="did you mean causal_lm"):
        fork.fork(tmp_path / "new", ["casual_lm"], [], "x")
    with pytest.raises(UsageError, match="did you mean tools/ledger"):
        fork.fork(tmp_path / "new", [], ["tools/leger"], "x")
    assert not (tmp_path / "new").exists()
