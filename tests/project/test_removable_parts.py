"""What docs/forking.md says may be removed: without it, the template trains, evaluates, lints and collects its tests."""

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from engine.config.errors import UsageError, may_be_removed
from tests.helpers import kit

PAGE = (kit.REPOSITORY / "docs" / "forking.md").read_text()
TABLE = re.search(r"^\| you do not need \| remove \|\n.*\n((?:\|.*\n)+)", PAGE, re.M)[1]
ROWS = dict(re.findall(r"^\| (.+?) \| (.+) \|$", TABLE, re.M))
ADDONS = ("addons/", "tests/addons/")  # may be gone already


def remove(folder: Path, cell: str) -> None:
    """Delete the files and folders of a row, which are there."""
    for name in re.findall(r"`([^`]+)`", cell):
        found = [*folder.glob(name)]
        assert found or name.startswith(ADDONS), name
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def run(folder: Path, *words: object, codes: tuple[int, ...] = (0,)) -> str:
    """Run Python in `folder`; return what it prints."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in codes, (done.stdout + done.stderr)[-3000:]
    return done.stdout


PYREFLY = ("-m", "pyrefly", "check", "--python-interpreter-path", sys.executable)


def missing_modules(folder: Path) -> list[str]:
    """Return the modules of this repository that a file imports, at its beginning or later, and that are not there."""
    houses = [
        name for name in ("engine", "src", "addons", "samples", "tests", "benchmarks") if (folder / name).exists()
    ]
    text = run(folder, *PYREFLY, "--only", "missing-import", *houses, "train.py", "eval.py", codes=(0, 1))
    return re.findall(r"Cannot find module `((?:engine|src|addons|samples|tests|benchmarks)\b[\w.]*)`", text)


def copy_of_template(folder: Path) -> Path:
    for path in kit.REPOSITORY.iterdir():
        if path.name in (".git", ".venv", ".ruff_cache", "runs", "data"):
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            folder.mkdir(exist_ok=True)
            shutil.copy(path, folder, follow_symlinks=False)
    return folder


def numbers(folder: Path, tiny: dict, out: Path) -> list[dict]:
    """Train two steps, and evaluate the run again; return its metrics without times."""
    run(folder, "train.py", *kit.flags(**tiny, max_steps=2, logging_steps=1), "--output_dir", out)
    run(folder, "eval.py", "--checkpoint", out)
    return kit.timeless(out)


@pytest.mark.cluster
def test_template_works_without_all_of_them(tmp_path, tiny):
    """The numbers are those of the whole template."""
    folder = copy_of_template(tmp_path / "copy")
    for cell in ROWS.values():
        remove(folder, cell)
    whole = numbers(kit.REPOSITORY, tiny, tmp_path / "whole")
    assert numbers(folder, tiny, tmp_path / "run") == whole
    run(folder, "-m", "ruff", "check", ".")
    run(folder, *PYREFLY)
    run(folder, "-m", "pytest", "--collect-only", "-q", "tests")


CODE = {
    name: cell for name, cell in ROWS.items() if re.search(r"`(engine|src|addons|accelerate_configs|cluster)/", cell)
}


@pytest.mark.cluster
@pytest.mark.parametrize("name", CODE)
def test_rest_is_imported_without_one_of_them(tmp_path, name):
    folder = copy_of_template(tmp_path / "copy")
    remove(folder, CODE[name])
    run(folder, *PYREFLY)
    assert missing_modules(folder) == []


def test_missing_modules_are_seen(tmp_path):
    """Of a test, within a function."""
    folder = copy_of_template(tmp_path / "copy")
    (folder / "engine/models/router_loss.py").unlink()
    (folder / "tests/src/test_mine.py").write_text(
        "def test():\n    from engine.models.router_loss import RouterLoss\n"
    )
    assert set(missing_modules(folder)) == {"engine.models.router_loss"}


ROOMS = sorted(path.name for path in (kit.REPOSITORY / "addons").glob("[!_]*") if path.is_dir())
ABOUT_FILES = ["tests/engine/config/test_schema.py", "tests/engine/test_find_tasks.py"]
ABOUT_FILES += [f"tests/project/test_{name}.py" for name in ("requirements", "addon_imports", "addon_rows")]
ABOUT_FILES += ["tests/project/test_readme.py::test_pages_name_what_exists"]
ABOUT_FILES += ["tests/project/test_pages.py::test_schema_is_what_the_fields_declare"]


# What is missing without one room is missing without half of them; each takes a quarter of a minute.
@pytest.mark.cluster
@pytest.mark.parametrize("rooms", [ROOMS[::2], ROOMS[1::2], ["."]], ids=["one_half", "other_half", "all"])
def test_core_is_whole_without_rooms_of_addons(tmp_path, rooms):
    """`rm -r addons/ROOM`, or all of addons/: the schema, --help, the tests that look at files; all of the core begin."""
    folder = copy_of_template(tmp_path / "copy")
    for room in rooms:
        shutil.rmtree(folder / "addons" / room)
    schema = run(folder, "train.py", "--schema")
    (folder / "configs" / "schema.json").write_text(schema)
    run(folder, "train.py", "--help", "all")
    run(folder, "-m", "pytest", "-q", "-m", "not cluster", *ABOUT_FILES)
    if rooms == ["."]:
        run(folder, "-m", "pytest", "--collect-only", "-q", "tests", "--ignore", "tests/addons")


@pytest.mark.cluster
def test_tests_skip_without_a_task_that_may_be_removed(tmp_path):
    folder = copy_of_template(tmp_path / "copy")
    remove(folder, ROWS["text classification"])
    core = [path for path in folder.glob("tests/[ces]*/**/test_*.py") if '"text_classification"' in path.read_text()]
    assert core
    run(folder, "-m", "pytest", "-q", "--fast", "-m", "not cluster", *core)


@pytest.mark.cluster
def test_what_was_removed_is_named_in_one_sentence(tmp_path, tiny):
    """A run on chats without their code."""
    folder = copy_of_template(tmp_path / "copy")
    [cell] = [cell for name, cell in ROWS.items() if name.startswith("chats")]
    template = (folder / "configs" / "chat_templates" / "chatml.jinja").rename(tmp_path / "chatml.jinja")
    remove(folder, cell)
    chats = kit.write_jsonl(tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": "a"}]}] * 4)
    values = tiny | {"train_file": chats, "tokenizer_name": kit.tiny_tokenizer(tmp_path / "tokenizer", ["a b"])}
    values |= {"model_config": kit.write_yaml(tmp_path / "llama.yaml", kit.LLAMA), "chat_template": template}
    flags = kit.flags(**values, output_dir=tmp_path / "run")
    done = subprocess.run([sys.executable, "train.py", *flags], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "chats: this copy has removed engine/rows/choose_template.py: restore it" in done.stderr


def test_only_missing_files_of_the_engine_count_as_removed():
    with (
        pytest.raises(UsageError, match=r"^FSDP2: this copy has removed engine/distributed/gone\.py"),
        may_be_removed("FSDP2"),
    ):
        import_module("engine.distributed.gone")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"), may_be_removed("FSDP2"):
        import_module("no_such_library")
