"""The rooms of src/: imports between them go one way, and the map in docs/architecture.md shows every file."""

import ast
import re
from pathlib import Path

import pytest

from tests.helpers import kit

SOURCE = kit.REPOSITORY / "src"
ORDER = ["config", "storage", "runtime", "download", "text", "distributed", "models", "tasks"]
ORDER += ["data", "training", "checkpointing", "reporting"]  # each may import the ones before it


def imports(folder: Path) -> set[tuple[str, str]]:
    """Return (room, room that it imports) of all files below `folder`."""
    found = set()
    for path in folder.rglob("*.py"):
        room = path.relative_to(folder).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == "src":
                names = [f"src.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            found |= {(room, name.split(".")[1]) for name in names if name.startswith("src.")}
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


def headers() -> dict[str, str]:
    """Return the first line of the docstring of each file, by its path below src/."""
    files = [
        path for path in sorted(SOURCE.rglob("*.py")) if path.name != "__init__.py" and "metrics" not in path.parts
    ]
    return {
        str(path.relative_to(SOURCE)): (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
        for path in files
    }


def test_the_map_shows_every_file_by_its_first_line():
    page = (kit.REPOSITORY / "docs" / "architecture.md").read_text()
    rows = dict(re.findall(r"^\| `([\w/]+\.py)` \| (.+) \|$", page, re.M))
    assert rows == headers()


@pytest.mark.parametrize("room", ORDER)
def test_every_room_of_src_is_mirrored_in_tests(room):
    assert list((kit.REPOSITORY / "tests" / room).glob("test_*.py"))
