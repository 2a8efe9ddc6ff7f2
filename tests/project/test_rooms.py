"""Two houses and their rooms: one-way imports without circles, the wall, the tests that documents link to."""

import ast
import re
from collections.abc import Container
from pathlib import Path

import pytest

from engine.tools.map import first_lines
from engine.tools.update import FOLDERS
from tests.helpers import kit

HOUSES = ("engine", "src")
# Rooms and files of engine/, each of which may import the ones before it.
ORDER = ["startup", "config", "storage", "process", "rows", "distributed", "models", "task", "find_tasks"]
ORDER += ["plan", "run", "checkpointing", "tools"]
ROOMS_OF_ROWS = {"config", "storage", "process"}
MOST_NAMES = 20  # that the rest takes of engine/rows/
# --help, before slow imports, and --schema; the end of a program in which an import fails.
SIDEWAYS = {("startup", "config"), ("startup", "find_tasks"), ("startup", "process")}


def imports(folder: Path) -> set[tuple[str, str]]:
    """Return (house or room, what it imports) of all files of the houses below `folder`, such as ("data", "config")."""
    edges = set()
    for path in [path for house in HOUSES for path in (folder / house).rglob("*.py")]:
        house, *rest = path.relative_to(folder).with_suffix("").parts
        here = rest[0] if house == "engine" else house
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                top, _, inside = name.partition(".")
                if top in (*HOUSES, "addons", "samples"):
                    edges.add((here, inside.split(".")[0] if top == "engine" else top))
    return {(one, other) for one, other in edges if one != other}


def upward(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the imports that go up: engine to src, either house to addons or samples, a room to a later one."""
    order = [*ORDER, "src", "addons", "samples"]
    return {(one, other) for one, other in edges if order.index(other) > order.index(one)} - SIDEWAYS


def test_imports_go_one_way():
    edges = imports(kit.REPOSITORY)
    assert len(edges) > 20
    assert {room for edge in edges for room in edge} == {*ORDER, "src"}
    assert upward(edges) == set()


@pytest.mark.parametrize(
    "file, text, edge",
    [
        ("engine/config/file.py", "def lazy():\n    from engine.plan import dataset\n", ("config", "plan")),
        ("engine/run/file.py", "import src.training.evaluation\n", ("run", "src")),
        ("engine/run/file.py", "from addons.tools import fork\n", ("run", "addons")),
        ("src/tasks/file.py", "from addons.tasks import seq2seq\n", ("src", "addons")),
    ],
)
def test_mutant_import_that_goes_up_is_caught(tmp_path, file, text, edge):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    assert upward(imports(tmp_path)) == {edge}


def copied_tests(text: str) -> list[str]:
    """Return the imports of a test that `make update` brings to a copy which has tests/src/ of its own."""
    return re.findall(r"^ *(?:from|import) +(tests\.(?:src|project)\b.*)", text, re.M)


def test_tests_that_are_updated_import_no_tests_of_a_copy():
    """The mutant: an import of what a copy may have deleted."""
    for name in (*FOLDERS, "tests/conftest.py"):
        path = kit.REPOSITORY / name
        for file in [path] if path.suffix else path.rglob("*.py"):
            assert copied_tests(file.read_text()) == [], file
    assert copied_tests("import re\n    from tests.src.test_step import train\n") == [
        "tests.src.test_step import train"
    ]


# ---- circles, and the wall between rows and the rest -------------------------------------------------------------------


def modules(folder: Path) -> dict[str, set[str]]:
    """Return {module of the engine: what it imports, as modules or names of them, late imports and types, too}."""
    imported: dict[str, set[str]] = {}
    for path in sorted((folder / "engine").rglob("*.py")):
        names = imported.setdefault(".".join(path.relative_to(folder).with_suffix("").parts), set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return imported


def module_of(name: str, known: Container[str]) -> str:
    """Return the module that an imported name is, or is in."""
    return name if name in known else name.rpartition(".")[0]


def circles(imported: dict[str, set[str]]) -> list[str]:
    """Return the modules that import themselves by way of others."""
    edges = {one: {module_of(name, imported) for name in names} for one, names in imported.items()}

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = edges.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen

    return [module for module in edges if module in reached(module)]


def names_of_rows(imported: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return {name of engine/rows/: files of the rest of the engine that take it}."""
    taken: dict[str, set[str]] = {}
    for module, names in imported.items():
        for name in names:
            if name.startswith("engine.rows") and not module.startswith("engine.rows"):
                taken.setdefault(name, set()).add(module.replace(".", "/") + ".py")
    return taken


def test_no_module_imports_itself_by_way_of_others(tmp_path):
    assert circles(modules(kit.REPOSITORY)) == []
    files = {
        "a": "def late():\n    from engine.b import c\n",
        "b": "import engine.d\n",
        "d": "from engine.a import late\n",
    }
    write_engine(tmp_path, files | {"e": "import engine.a\n"})
    assert circles(modules(tmp_path)) == ["engine.a", "engine.b", "engine.d"]


def write_engine(folder: Path, files: dict[str, str]) -> None:
    """Write modules of an engine."""
    (folder / "engine").mkdir()
    for name, text in files.items():
        (folder / "engine" / f"{name}.py").write_text(text)


def test_rows_import_no_torch_and_few_rooms():
    """No ranks either: these are in engine/distributed."""
    of_rows = {name for module, names in modules(kit.REPOSITORY).items() if "engine.rows" in module for name in names}
    assert {name.split(".")[1] for name in of_rows if name.startswith("engine.")} == {*ROOMS_OF_ROWS, "rows"}
    assert not {name.split(".")[0] for name in of_rows} & {"torch", "accelerate"}


def test_names_that_cross_the_wall_stand_on_the_page():
    taken = names_of_rows(modules(kit.REPOSITORY))
    assert 10 < len(taken) <= MOST_NAMES
    page = (kit.REPOSITORY / "docs" / "architecture.md").read_text()
    table = re.findall(r"^\| `(engine\.rows\.[\w.]+)` \| (.+) \|$", page, re.M)
    assert {name: set(re.findall(r"`([\w/]+\.py)`", files)) for name, files in table} == taken


def test_the_map_has_a_sentence_for_every_file():
    lines = first_lines()
    files = [path for house in HOUSES for path in (kit.REPOSITORY / house).rglob("*.py")]
    assert {str(path.relative_to(kit.REPOSITORY)) for path in files} <= lines.keys()
    assert lines["engine/rows/read.py"].startswith("Raw rows of files")


def misplaced(text: str) -> list[str]:
    """Return the functions, classes and variables (`name` in `path.py`) that a text looks for in the wrong file."""
    places = re.findall(r"`([\w.]+)` in\s+`([\w/]+\.py)`", text)
    assert places
    return [
        f"{name} in {path}"
        for name, path in places
        if not re.search(rf"\b{name.rpartition('.')[2]}\b", (kit.REPOSITORY / path).read_text())
    ]


def test_names_stand_in_the_files_of_architecture():
    """The mutant: a name in a file that lacks it."""
    assert misplaced((kit.REPOSITORY / "docs" / "architecture.md").read_text()) == []
    assert misplaced("`find_start` in `train.py`, `main` in\n`eval.py`, `StepLosses` in `eval.py`") == [
        "StepLosses in eval.py"
    ]


# ---- tests that README.md and docs/ name -----------------------------------------------------------------------------

PAGES = [kit.REPOSITORY / "README.md", *sorted((kit.REPOSITORY / "docs").rglob("*.md"))]


def linked_tests(text: str) -> list[tuple[str, str]]:
    """Return (file, name) of every `tests/room/test_x.py::name` in a page; the name is empty for a link to a file."""
    return re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)


def has_all_addons() -> bool:
    """Return whether each add-on of addons/README.md is here; else, links to tests of add-ons are not checked."""
    page = kit.REPOSITORY / "addons" / "README.md"
    names = re.findall(r"^\| `([\w/]+)` \|", page.read_text().partition("\n## ")[0], re.M) if page.exists() else []
    return bool(names) and all(list(page.parent.glob(f"{name}*")) for name in names)


def missing_tests(text: str) -> list[str]:
    """Return the linked tests that do not exist."""
    missing = []
    for file, name in linked_tests(text):
        path = kit.REPOSITORY / file
        if not path.exists() and file.startswith("tests/addons/") and not has_all_addons():
            continue
        source = path.read_text() if path.exists() else None
        if source is None or (name and f"\ndef {name}(" not in source):
            missing.append(f"{file}::{name}" if name else file)
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(kit.REPOSITORY)))
def test_linked_tests_exist(page):
    missing = missing_tests(page.read_text())
    assert not missing, f"{page.name} links to tests that do not exist (renamed? fix the link): {missing}"


def named_tests(text: str) -> set[str]:
    """Return the files and folders of tests that code names, as in `Tests: tests/room/test_x.py`."""
    return {name.rstrip("/.") for name in re.findall(r"(?<![\w/`\"])tests/[a-z][\w/.]*", text)}


@pytest.mark.parametrize("room", [*HOUSES, "addons", "samples", "cluster", "train.py", "eval.py"])
def test_tests_that_code_names_exist(room):
    """In docstrings and comments. Tests of add-ons may be gone with one of them."""
    place = kit.REPOSITORY / room
    files = [path for path in [place, *place.rglob("*")] if path.suffix in (".py", ".sh", ".sbatch", ".yaml", ".yml")]
    missing = set()
    for path in files:
        for name in named_tests(path.read_text()):
            is_of_addon = name.startswith("tests/addons") and not has_all_addons()
            if not is_of_addon and not (kit.REPOSITORY / name).exists():
                missing.add(f"{path.relative_to(kit.REPOSITORY)}: {name}")
    assert missing == set()
    assert named_tests("Tests: tests/room/test_x.py, tests/room/.") == {"tests/room/test_x.py", "tests/room"}


def test_every_guarantee_links_to_a_test():
    page = (kit.REPOSITORY / "docs" / "project" / "guarantees.md").read_text()
    tables = re.findall(r"^\| guarantee \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.M)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 35
    assert [row for row in rows if not linked_tests(row)] == []


def test_mutant_link_to_a_removed_test_is_caught():
    gone = ["tests/project/test_rooms.py::test_removed", "tests/removed/test_x.py"]
    assert missing_tests("see `{}` and `{}`".format(*gone)) == gone
    assert missing_tests("see `tests/project/test_rooms.py::test_linked_tests_exist`") == []
