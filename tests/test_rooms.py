"""Rooms of src/: one-way imports, the map in docs/architecture.md, and the tests that the documents link to."""

import ast
import re
from pathlib import Path

import pytest

from tests.helpers import kit

SOURCE = kit.REPOSITORY / "src"
ORDER = ["config", "storage", "runtime", "text", "distributed", "models", "tasks"]
ORDER += ["data", "training", "checkpointing", "reporting", "tools"]  # each may import the ones before it


def imports(folder: Path) -> set[tuple[str, str]]:
    """Return (room, room that it imports) of all files below `folder`."""
    found = set()
    for path in folder.glob("*/**/*.py"):
        names = re.findall(r"^ *(?:from|import) src(?:\.| import )(\w+)", path.read_text(), re.M)
        found |= {(path.relative_to(folder).parts[0], name) for name in names}
    return {(one, other) for one, other in found if one != other}


def upward(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(one, other) for one, other in edges if ORDER.index(other) > ORDER.index(one)}


def test_imports_between_rooms_go_one_way():
    edges = imports(SOURCE)
    assert len(edges) > 20
    assert {room for edge in edges for room in edge} == set(ORDER)
    assert upward(edges) == set()


def test_mutant_import_of_a_higher_room_is_caught(tmp_path):
    for room, text in (("data", ""), ("config", "def lazy():\n    from src.data import dataset\n")):
        (tmp_path / room).mkdir()
        (tmp_path / room / "file.py").write_text(text)
    assert upward(imports(tmp_path)) == {("config", "data")}


def test_the_map_shows_every_file_by_its_first_line():
    page = (kit.REPOSITORY / "docs" / "architecture.md").read_text()
    rows = dict(re.findall(r"^\| `([\w/]+\.py)` \| (.+) \|$", page, re.M))
    files = [path for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
    assert rows.keys() == {str(path.relative_to(SOURCE)) for path in files}
    for path in files:
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert rows[str(path.relative_to(SOURCE))] == text.split("\n")[0]


# ---- tests that README.md and docs/ name -----------------------------------------------------------------------------

PAGES = [kit.REPOSITORY / "README.md", *sorted((kit.REPOSITORY / "docs").glob("*.md"))]


def linked_tests(text: str) -> list[tuple[str, str]]:
    """Return (file, name) of every `tests/room/test_x.py::name` in a page; the name is empty for a link to a file."""
    return re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)


def is_of_deleted_addon(file: str) -> bool:
    """Return whether a test file was deleted with its add-on or the whole room; addons/README.md names its add-ons."""
    match = re.match(r"tests/addons/(\w+)/", file)
    page = kit.REPOSITORY / "addons" / "README.md"
    if not match or not page.exists() or not (page.parent / match[1]).exists():
        return match is not None
    rows, of_room = page.read_text(), rf"^\| `({match[1]}/\w+)` \|"  # no row names the tests of a whole room
    names = re.findall(rf"^\| `([\w/]+)` \|.*`{file}`", rows, re.M) or re.findall(of_room, rows, re.M)
    return not all(list(page.parent.glob(f"{name}*")) for name in names)


def missing_tests(text: str) -> list[str]:
    """Return the linked tests that do not exist."""
    missing = []
    for file, name in linked_tests(text):
        path = kit.REPOSITORY / file
        if not path.exists() and is_of_deleted_addon(file):
            continue
        source = path.read_text() if path.exists() else None
        if source is None or (name and f"\ndef {name}(" not in source):
            missing.append(f"{file}::{name}" if name else file)
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_tests_exist(page):
    missing = missing_tests(page.read_text())
    assert not missing, f"{page.name} links to tests that do not exist (renamed? fix the link): {missing}"


def test_every_guarantee_links_to_a_test():
    page = (kit.REPOSITORY / "docs" / "guarantees.md").read_text()
    tables = re.findall(r"^\| guarantee \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.M)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 35
    assert [row for row in rows if not linked_tests(row)] == []


def test_mutant_link_to_a_removed_test_is_caught():
    gone = ["tests/test_rooms.py::test_removed", "tests/removed/test_x.py"]
    assert missing_tests("see `{}` and `{}`".format(*gone)) == gone
    assert missing_tests("see `tests/test_rooms.py::test_linked_tests_exist`") == []
