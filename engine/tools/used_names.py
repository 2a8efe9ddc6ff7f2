"""Names of engine/, addons/ and tests/ that a copy's own code uses and that are not there, found without running it.

Tests: tests/engine/tools/test_update.py.
"""

import ast
import symtable
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

HOUSES = ("engine", "addons", "tests")


def missing_names(folder: Path, files: Iterable[str]) -> dict[str, set[str]]:
    """Return {file: names such as MODULE.NAME} of what these files import, or take from a module, and `folder` lacks."""
    names_in = cache(defined_names)
    missing = {}
    for file in files:
        try:
            tree = ast.parse((folder / file).read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # it is deleted, or no Python of this version
        missing[file] = {name for name in uses(tree) if not is_there(folder, name, names_in)}
    return missing


def uses(tree: ast.Module) -> Iterator[str]:
    """Yield what a program takes of HOUSES, as MODULE.NAME or MODULE.NAME.ATTRIBUTE."""
    known = {}  # local name -> what it stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.name, alias.asname) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(f"{node.module}.{alias.name}", alias.name, alias.asname) for alias in node.names]
        else:
            continue
        for whole, name, other_name in names:
            if whole.split(".")[0] in HOUSES:
                yield whole.removesuffix(".*")
                known[other_name or name] = whole
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner in known:
                yield f"{known[owner]}.{node.attr}"


def is_there(folder: Path, name: str, names_in: Callable[[Path], set[str] | None]) -> bool:
    """Return whether a module of `folder` has this name; what a class or a function has is not looked at."""
    path, parts = folder, name.split(".")
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    if not parts:
        return True
    file = path / f"{parts[0]}.py"
    rest = parts[1:] if file.exists() else parts
    names = names_in(file if file.exists() else path / "__init__.py")
    return not rest or names is None or rest[0] in names


def defined_names(file: Path) -> set[str] | None:
    """Return the names that a module assigns, defines or imports; None if it may have any, as one with a conflict."""
    if not file.exists():
        return set()
    try:
        table = symtable.symtable(file.read_text(encoding="utf-8"), str(file), "exec")
    except SyntaxError:
        return None
    names = {each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()}
    return None if "__getattr__" in names else names
