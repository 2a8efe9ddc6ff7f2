"""No file of engine/, src/ and addons/ but private_apis.py and the backends uses a private name of a library."""

import ast

import pytest

from tests.helpers import kit

FILES = sorted(path for folder in ("engine", "src", "addons") for path in (kit.REPOSITORY / folder).rglob("*.py"))
FILES += [kit.REPOSITORY / name for name in ("train.py", "eval.py")]
USERS = ("private_apis.py", "deepspeed.py", "tensor_parallel.py")  # a backend of addons/ names its own
OF_THE_CLASS = ("self", "cls", "super()")  # a builder of `datasets` is extended by methods with such names
NOT_PRIVATE = ("os._exit", "._replace", "sys._current_frames")  # documented, in spite of their names


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def private_names(source: str) -> list[str]:
    """Return private attributes of anything but self and super(), and imports of private names or modules."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) not in OF_THE_CLASS:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("engine", "src", "addons")):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [name for name in names if is_private(name)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            found += [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant) and is_private(arg.value)]
    return [name for name in found if not name.endswith(NOT_PRIVATE)]


def test_no_private_names():
    for path in FILES:
        names = private_names(path.read_text())
        assert bool(names) == (path.name in USERS), (path, names)


@pytest.mark.parametrize(
    "mutant",
    ["model._no_split_modules", "from torch._dynamo import utils", "getattr(batches, '_workers', [])", "a.b._c = 1"],
)
def test_mutant_private_name_is_caught(mutant):
    assert private_names(mutant)
