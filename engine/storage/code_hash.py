"""Hash of code by its syntax trees: it does not change with comments, docstrings, layout, or the place of a file.

For cache keys, so that an edit that changes no behavior prepares no data again. Tests: tests/engine/storage/test_code_hash.py.
"""

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

OWN = ("engine", "src", "addons", "samples")  # packages of this repository: their files may be moved


def code_hash(files: Iterable[Path]) -> str:
    """Return a hash of the code in Python files. Their names and order do not count.

    A name that is imported counts, but not the file of this repository that it comes from, nor the place of the import:
    moving a file sorts them anew. It is the same in every version of Python, which `ast.dump` is not."""
    hashes = sorted(_hash_of(file.read_bytes()) for file in files)
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


@cache
def _hash_of(code: bytes) -> str:
    """Return the hash of one file; cached, because a tree takes some milliseconds."""
    tree = ast.parse(code)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name for node in imports for name in _imported_names(node)}
    return hashlib.sha256(repr((sorted(names), _plain(tree))).encode()).hexdigest()


def _imported_names(node: ast.Import | ast.ImportFrom) -> set[tuple[str, str]]:
    """Return (name, name that the file uses or an empty string) of each import; of a library, with its module."""
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    is_relative = isinstance(node, ast.ImportFrom) and node.level > 0
    names = set()
    for alias in node.names:
        path = ".".join([*modules, alias.name])
        is_own = is_relative or path.split(".")[0] in OWN
        names.add((path.rpartition(".")[2] if is_own else path, alias.asname or ""))
    return names


def _plain(value: Any) -> Any:
    """Return a part of a syntax tree as (its type, its fields that hold something): versions of Python add others."""
    if isinstance(value, list):
        return [_plain(item) for item in value if not _does_nothing(item)]
    if not isinstance(value, ast.AST):
        return value
    fields = [(name, _plain(field)) for name, field in ast.iter_fields(value)]
    return type(value).__name__, [(name, field) for name, field in fields if field is not None and field != []]


def _does_nothing(statement: Any) -> bool:
    """Return True for a docstring, which is an expression of one constant, and for an import."""
    is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_constant or isinstance(statement, ast.Import | ast.ImportFrom)
