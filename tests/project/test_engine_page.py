"""engine/README.md: exactly the names of the engine that train.py, eval.py, src/ and the examples of documents take."""

import ast
import re
from collections import Counter

import pytest

from tests.helpers import kit

MOST_NAMES, MOST_LINES = 90, 2500  # of train.py, eval.py and src/
OWNED = [kit.REPOSITORY / "train.py", kit.REPOSITORY / "eval.py", *sorted((kit.REPOSITORY / "src").rglob("*.py"))]
DOCUMENTS = [*sorted((kit.REPOSITORY / "docs").rglob("*.md")), *(kit.REPOSITORY / "addons").glob("README.md")]
PAGE = (kit.REPOSITORY / "engine" / "README.md").read_text()
OWN_CODE = [path.read_text() for path in OWNED]
EXAMPLES = [block for path in DOCUMENTS for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.S)]
FORKING = (kit.REPOSITORY / "docs" / "forking.md").read_text()


def is_module(name: str) -> bool:
    path = kit.REPOSITORY.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def names_taken(code: str) -> set[str]:
    """Return the names of the engine that a program imports, or uses as attributes of a module, as MODULE.NAME."""
    tree = ast.parse(code)
    modules: dict[str, str] = {}
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):  # a whole module is no name that the page could list
            names |= {alias.name for alias in node.names if alias.name.split(".")[0] == "engine"}
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "engine":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if is_module(name):
                    modules[alias.asname or alias.name] = name
                else:
                    names.add(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            names.add(f"{modules[node.value.id]}.{node.attr}")
    return names


def names_listed(page: str) -> list[str]:
    return re.findall(r"^\| `(engine\.[\w.]+)` \| .+ \|$", page, re.M)


def is_defined(name: str) -> bool:
    """Return whether the module of a name defines it; a name that it only imports from another one does not count."""
    module, _, last = name.rpartition(".")
    file = kit.REPOSITORY.joinpath(*module.split(".")).with_suffix(".py")
    defined = set()
    for node in ast.parse(file.read_text()).body if file.exists() else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        if isinstance(node, ast.Assign):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return last in defined


def problems(page: str, own_code: list[str], examples: list[str], forking: str) -> list[str]:
    """Return what is wrong with the page, or with what these programs take from the engine."""
    own = set().union(*map(names_taken, own_code))
    taken = own.union(*map(names_taken, examples))
    documented = set(re.findall(r"`(engine\.[\w.]+\.\w+)`", forking))
    listed = names_listed(page)
    lines = sum(code.count("\n") for code in own_code)
    found = [f"{name} is taken, but not on the page" for name in sorted(taken - set(listed))]
    found += [f"{name} is on the page, but nothing takes it" for name in sorted({*listed} - taken - documented)]
    found += [f"{name} is on the page twice" for name, count in Counter(listed).items() if count > 1]
    found += [f"{name} is not defined there" for name in listed if not is_defined(name)]
    if len(own) > MOST_NAMES:
        found.append(f"{len(own)} names of the engine are taken, more than {MOST_NAMES}")
    if lines > MOST_LINES:
        found.append(f"train.py, eval.py and src/ have {lines} lines, more than {MOST_LINES}")
    return found


def test_page_lists_what_is_taken():
    assert len(names_listed(PAGE)) > 50
    assert problems(PAGE, OWN_CODE, EXAMPLES, FORKING) == []


TASK = "| `engine.task.Task` | a task |\n"
MUTANTS = [  # added to the page, a program of ours, an example in a document, what is found
    ("", "from engine.storage import hub\nhub.download()\n", "", "hub.download is taken, but not on the page"),
    ("", "", "from engine.config.redact import redact\n", "redact is taken, but not on the page"),
    ("", "import engine.storage.hub\n", "", "engine.storage.hub is taken, but not on the page"),
    ("| `engine.config.redact.redact` | x |\n", "", "", "redact is on the page, but nothing takes it"),
    (TASK, "", "", "engine.task.Task is on the page twice"),
    ("| `engine.task.Removed` | x |\n", "from engine.task import Removed\n", "", "engine.task.Removed is not defined"),
    (
        "| `engine.find_tasks.Batch` | x |\n",
        "from engine.find_tasks import Batch\n",
        "",
        "engine.find_tasks.Batch is not defined there",
    ),
    ("", "\n".join(f"from engine.task import T{i}" for i in range(90)), "", "more than 90"),
    ("", "\n" * MOST_LINES, "", "more than 2500"),
]


@pytest.mark.parametrize("row, code, example, text", MUTANTS)
def test_mutant_of_page_or_program_is_caught(row, code, example, text):
    found = problems(f"{PAGE}\n{row}", [*OWN_CODE, code], [*EXAMPLES, example], FORKING)
    assert any(text in sentence for sentence in found), found
