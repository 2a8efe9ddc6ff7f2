"""`make fork`: the copy has the core, the add-ons that are named and what they need, and passes its own tests."""

import json
import os
import re
import subprocess
import sys

import pytest

from addons.tools import fork
from src.config import addons
from src.config.errors import UsageError
from tests.helpers import kit

pytestmark = pytest.mark.skipif(not (kit.REPOSITORY / ".git").exists(), reason="the copy is made of tracked files")

KEPT = "tools/ledger"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A fork with one add-on."""
    folder = tmp_path_factory.mktemp("fork") / "crane"
    fork.main([str(folder), "--tasks", "causal_lm", "--addons", KEPT, "--name", "crane"])
    return folder


def test_copy_holds_the_named_addons_and_nothing_of_the_others(copy):
    files = subprocess.run(["git", "ls-files"], cwd=copy, capture_output=True, text=True).stdout.splitlines()
    assert {"train.py", "src/tasks/causal_lm.py", "src/tasks/text_classification.py", "samples/stdlib_code.py"} < {
        *files
    }
    assert not {*fork.RESULTS} & {*files}
    assert (copy / "README.md").read_text().startswith("# crane\n")
    assert [file for file in files if file.startswith("addons/")] == ["addons/README.md", f"addons/{KEPT}.py"]
    tests = [file for file in files if re.match(r"tests/addons/\w+/test_", file)]
    assert tests == [f"tests/addons/{KEPT.replace('/', '/test_')}.py"]
    schema = json.loads((copy / "configs" / "schema.json").read_text())
    assert not [rules for rules in schema["properties"].values() if "x-add-on" in rules]
    assert not {*schema["properties"]["task"]["enum"]} & {*addons.addon_names("tasks")}


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


def test_run_files_of_missing_addons_stay_behind(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(fork, "REPOSITORY", tmp_path)
    monkeypatch.setattr(fork, "SCHEMA_FILE", tmp_path / "configs" / "schema.json")
    fork.SCHEMA_FILE.write_text(json.dumps({"properties": {"seed": {}, "peft": {"x-add-on": "addons/adapters/peft"}}}))
    values = [{"task": "masked_lm"}, {"peft": {"r": 8}}, {"techniques": {"sam": {}}}, {"optim": "muon"}, {"seed": 1}]
    names = [
        kit.write_yaml(tmp_path / "configs" / f"{i}.yaml", each).relative_to(tmp_path) for i, each in enumerate(values)
    ]
    gone = {"tasks/masked_lm", "adapters/peft", "techniques/sam", "optimizers/muon"}
    assert [fork.names_one(str(name), gone) for name in names] == [True] * 4 + [False]
    assert not any(fork.names_one(str(name), {"tasks/seq2seq"}) for name in names)


def test_needed_addons_are_copied_too(tmp_path, monkeypatch):
    monkeypatch.setattr(fork, "REPOSITORY", tmp_path)
    monkeypatch.setattr(addons, "ADDONS", tmp_path / "addons")
    texts = {
        "tasks/a": "",
        "tasks/b": "# Needs addons/tasks/a.py.\n",
        "tasks/c/__init__": "# Needs addons/tasks/b/, addons/data.\n",
    }
    texts |= {"tasks/c/part": "", "data/d": "# Needs nothing\n", "data/_part": "", "stream/__init__": ""}
    for name, text in texts.items():
        path = tmp_path / "addons" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    here = fork.all_addons()
    assert here == ["data/d", "stream", "tasks/a", "tasks/b", "tasks/c"]
    monkeypatch.setattr(fork, "OPTIONS", {"a": None, "b": None, "c": None})
    assert sorted(fork.chosen(here, ["c"], [])) == ["data/d", "tasks/a", "tasks/b", "tasks/c"]
    assert fork.chosen(here, ["a"], ["stream"]) == ["stream", "tasks/a"]
    assert fork.is_of("addons/data/_part.py", {"data"})
    assert not fork.is_of("addons/data/_part.py", {"data/d"})
    assert fork.is_of("addons/tasks/c/part.py", {"tasks/c"})


def test_folder_with_files_and_unknown_names_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=str(tmp_path)):
        fork.fork(tmp_path, [], [], "x")
    with pytest.raises(UsageError, match="did you mean causal_lm"):
        fork.fork(tmp_path / "new", ["casual_lm"], [], "x")
    with pytest.raises(UsageError, match="did you mean tools/ledger"):
        fork.fork(tmp_path / "new", [], ["tools/leger"], "x")
    assert not (tmp_path / "new").exists()
