"""`make fork`: the copy has the core, the add-ons that are named and what they need, and passes its own tests."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache

import pytest
import yaml

from addons.tools import fork
from engine.config import find_addons as addons
from engine.config.errors import UsageError
from engine.tools import addon_files, update
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
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=kit.REPOSITORY, capture_output=True, text=True).stdout
    assert (copy / update.RECORD).read_text() == commit
    names = [name for name in files if update.is_managed(name)]
    edited = {name for name in names if (copy / name).read_bytes() != (kit.REPOSITORY / name).read_bytes()}
    assert {name for name in edited if not name.endswith(".md")} == {"pyproject.toml", "uv.lock"}  # its name
    kept = {file for file in files if file.startswith("addons/") and "/_" not in file}
    assert kept == {"addons/README.md", f"addons/{KEPT}.py", "addons/techniques/asam.py", "addons/techniques/sam.py"}
    tests = {file for file in files if re.match(r"tests/addons/\w+/test_", file)}
    assert {file for file in tests if "techniques" not in file} == {f"tests/addons/{KEPT.replace('/', '/test_')}.py"}
    assert not {f"tests/addons/techniques/test_{name}.py" for name in ("averages", "neftune", "sam")} & tests
    run_files = [yaml.safe_load((copy / file).read_text()) for file in files if re.match(r"configs/\w+\.yaml", file)]
    assert {values["task"] for values in run_files} <= {"causal_lm", "text_classification"}
    assert not any({"peft", "streaming"} & values.keys() for values in run_files)
    schema = json.loads((copy / "configs" / "schema.json").read_text())
    fields = schema["properties"].keys()
    assert [name for name in ("peft", "streaming", "techniques", "push_to_hub") if name in fields] == ["techniques"]
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
    assert not fork.names_missing(copy, agents)
    assert "make ledger" in agents
    assert not re.search("make same|tests/project|benchmarks/support", agents)
    assert (copy / "CLAUDE.md").is_symlink()
    assert (copy / "CLAUDE.md").read_text() == agents


def test_copy_is_named_and_links_only_to_its_files(copy):
    project = tomllib.loads((copy / "pyproject.toml").read_text())["project"]
    lock = tomllib.loads((copy / "uv.lock").read_text())["package"]
    assert (project["name"], project["description"]) == ("crane", "crane")
    assert [package["name"] for package in lock if package["source"] == {"virtual": "."}] == ["crane"]
    citation = yaml.safe_load((copy / "CITATION.cff").read_text())
    assert (citation["title"], citation["authors"]) == ("crane", [{"name": "The authors of crane"}])
    assert citation["references"][0]["title"] == yaml.safe_load((kit.REPOSITORY / "CITATION.cff").read_text())["title"]
    for page in copy.rglob("*.md"):
        links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
        here = [
            name
            for name in links
            if ":" not in name and (kit.REPOSITORY / page.relative_to(copy)).parent.joinpath(name).exists()
        ]
        assert [name for name in here if not (page.parent / name).exists()] == [], page


def test_copy_without_addons(tmp_path):
    """It has no folder for them, and names the add-on of a field, a task or a schedule that it lacks."""
    copy = tmp_path / "copy"
    fork.fork(copy, [], ["none"], "x")
    assert not (copy / "addons").exists()
    assert not (copy / "tests" / "addons").exists()
    assert "Add-ons: none." in (copy / "README.md").read_text()
    assert "addons/" not in (copy / "AGENTS.md").read_text()
    (copy / "addons" / "techniques").mkdir(parents=True)
    (copy / "addons" / "techniques" / "mine.py").write_text("class Mine: pass\n")  # its base class is not here
    files = {
        "techniques": "techniques/__init__.py",
        "peft": "adapters/peft",
        "mlm_probability": "tasks/masked_lm",
    }
    files |= {"task": "tasks/kto", "lr_scheduler_type": "schedules/one_cycle"}
    values = {
        "techniques": "{mine: {}}",
        "peft": "{type: lora}",
        "mlm_probability": 0.3,
        "lr_scheduler_type": "one_cycle",
    }
    for given in (values, {"task": "kto"}):
        command = [sys.executable, "train.py", *kit.flags(**given)]
        done = subprocess.run(command, cwd=copy, env=kit.PLAIN_ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 2
        for name in given:
            assert re.search(
                rf"{name}: this is of the add-on addons/\S+; addons/{files[name]} is not here", done.stderr
            )


ALL = addon_files.addons_in(kit.REPOSITORY)
checkout = cache(fork.files_of_checkout)


@cache
def imports_of(file: str) -> set[str]:
    """Return the modules of addons/ and tests/ that a file imports, and the names that it imports from them."""
    names = set()
    for node in ast.walk(ast.parse((kit.REPOSITORY / file).read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
    return {name for name in names if name.startswith(("addons.", "tests."))}


def modules_in(files: set[str]) -> set[str]:
    return set().union(*(imports_of(file) for file in files if file.endswith(".py")))


def files_of(addon: str) -> set[str]:
    """Return the files of a copy with this add-on and what it needs."""
    kept = fork.chosen(ALL, [], [addon])
    files = {file for file in checkout() if not file.startswith(fork.OF_THE_TEMPLATE)}
    return files - addon_files.of_missing_addons(kit.REPOSITORY, files, kept, {*ALL} - {*kept})


@pytest.mark.parametrize("addon", ALL)
def test_each_addon_alone_has_the_files_that_it_imports(addon):
    """The files of a copy import none of the template that it lacks; no room of tests is without a test."""
    files = files_of(addon)
    everything = {file for file in checkout() if file.endswith(".py")}
    missing = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in everything - files}
    allowed = {"addons.data.size_warmups"}  # tests/conformance/checks.py, behind need_addon
    assert modules_in({file for file in files if file.startswith(("addons/", "tests/"))}) & missing <= allowed
    rooms = {file.split("/")[2] for file in files if re.match(r"tests/addons/\w+/", file)}
    imported = {name.split(".")[2] for name in modules_in(files) if name.startswith("tests.addons.")}
    assert rooms - imported <= {file.split("/")[2] for file in files if re.match(r"tests/addons/\w+/test_", file)}


# One of each kind, and those with private needs: half a minute each. The files of all are compared above.
TRIED = ["adapters/peft", "schedules/one_cycle", "streaming", "tasks/embeddings", "techniques/unfreeze"]


@pytest.mark.cluster
@pytest.mark.parametrize("addon", [addon for addon in ALL if addon in TRIED])
def test_an_addon_alone_trains(tmp_path, addon):
    """Its copy has a schema and a --help with its fields, collects its tests, and a task or a technique trains a step."""
    copy = tmp_path / "copy"
    fork.main([str(copy), "--addons", addon])
    run_in(copy, "train.py", "--help")
    assert_pytest(copy, "--collect-only", "tests")
    room, _, name = addon.partition("/")
    if room == "tasks":
        code = f"from pathlib import Path; from tests.addons.tasks import recipes; from tests.conformance.test_task import make_flags; print(*make_flags(recipes.{name}, Path('rows')), sep='\\n')"
        (copy / "rows").mkdir()
        flags = run_in(copy, "-c", code).splitlines()
        run_in(copy, "train.py", *flags, "--max_steps", "1", "--output_dir", "run")
    elif room == "techniques":
        options = {"unfreeze": {"steps": {"*": 1}}, "progressive_resizing": None}.get(name, {})
        if options is not None:
            values = {**kit.tiny_files(tmp_path), "techniques": json.dumps({name: options})}
            run_in(copy, "train.py", *kit.flags(**values, max_steps=2, output_dir="run"))


def run_in(folder, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=kit.PLAIN_ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


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
    words += ["tests/engine/test_find_tasks.py", "tests/conformance/test_task.py", "-k", "not rows and not train"]
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
