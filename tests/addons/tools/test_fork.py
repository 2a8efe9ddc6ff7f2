"""`make fork`: the copy has the core, the add-ons that are named and what they need, and passes its own tests."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from addons.tools import fork
from engine.config import addons
from engine.config.errors import UsageError
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


# ---- pages -------------------------------------------------------------------------------------------------------------

# Targets of make that need a tool.
TOOLS = {"preview", "find-lr", "find-batch-size", "report", "ledger", "storm", "same", "fork"}


def named_but_missing(folder, readme: str, agents: str) -> set[str]:
    """Return what these two pages name of add-ons, and is not in `folder`."""
    text = readme + agents
    paths = {path for path in re.findall(r"\b((?:tests/)?addons/[\w/.]*)", text) if "NAME" not in path}
    missing = {path for path in paths if not (folder / path.rstrip(".")).exists()}
    tools = {path.stem.replace("_", "-") for path in (folder / "addons" / "tools").glob("[a-z]*.py")}
    tools = {{"html-report": "report", "kill-storm": "storm"}.get(name, name) for name in tools}
    missing |= {word for word in re.findall(r"\bmake ([a-z-]+)", text) if word in TOOLS - tools}
    missing |= {
        path for path in re.findall(r"`((?:configs|benchmarks)/\w+\.\w+)`", text) if not (folder / path).exists()
    }
    names = {"SAM": "techniques/sam", "EMA": "techniques/ema", "ZeRO": "backends/deepspeed", "LoRA": "adapters/peft"}
    for word, addon in names.items():
        if re.search(rf"\b{word}\b", readme) and not (folder / "addons" / f"{addon}.py").exists():
            missing.add(word)
    return missing


def test_pages_of_the_copy_name_nothing_that_is_not_there(copy):
    """The mutant: the pages of the template."""
    readme, agents = (copy / "README.md").read_text(), (copy / "AGENTS.md").read_text()
    assert named_but_missing(copy, readme, agents) == set()
    assert "make ledger" in agents  # it was copied
    template = [(kit.REPOSITORY / name).read_text() for name in ("README.md", "AGENTS.md")]
    if fork.all_addons() != [KEPT, "techniques/asam", "techniques/sam"]:
        assert len(named_but_missing(copy, *template)) > 1
    assert (copy / "CLAUDE.md").is_symlink()
    assert (copy / "CLAUDE.md").read_text() == agents
    here, _, missing = (copy / "addons" / "README.md").read_text().partition("## In the template, not in this copy")
    assert set(re.findall(r"^\| `(\w+/\w+)` \|", here, re.M)) == {KEPT, "techniques/asam", "techniques/sam"}
    assert f"`{KEPT}`" not in missing


def test_copy_without_addons_has_no_folder_for_them(tmp_path):
    """All else of the pages stays: without add-ons to leave out, they are those of the template."""
    fork.fork(tmp_path / "copy", ["causal_lm"], [], "x")
    assert not (tmp_path / "copy" / "addons").exists()
    assert not (tmp_path / "copy" / "tests" / "addons").exists()
    pages = [(tmp_path / "copy" / name).read_text() for name in ("README.md", "AGENTS.md")]
    assert named_but_missing(tmp_path / "copy", *pages) == set()
    assert "make smoke" in pages[0]
    text = (kit.REPOSITORY / "AGENTS.md").read_text()
    assert fork.without_missing(text, {*fork.files_of_checkout()}, set(), set()) == text


def test_rest_of_a_paragraph_goes_with_its_first_line():
    page = "# A\n\nSee `addons/x.py`\nand more.\n\n1. B\n   in addons/x.py.\n   C\n\n* `addons/x.py`\n  D\n* E\n\n```\nmake x\nmake y\n```\n"
    left = "# A\n\n1. B\n   C\n\n* E\n\n```\nmake y\n```\n"
    assert fork.without_missing(page, {"src/a.py"}, {"addons/x.py"}, {"x"}) == left


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


def test_tests_of_the_copy_pass(copy):
    """The map, links and run files of the documents, the schema, and the checks of the core's tasks without training."""
    words = ["tests/project/test_rooms.py", "tests/project/test_readme.py", "tests/engine/config/test_schema.py"]
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
