"""An add-on imports no other add-on, unless its first line names it: `# Needs addons/tasks/distillation/.`"""

import ast
import re
from pathlib import Path

import pytest

from engine.config.find_addons import ADDONS, addon_names
from engine.config.paths import REPOSITORY

TESTS = REPOSITORY / "tests" / "addons"
ONE_ADDON = {"streaming"}  # a folder of addons/ that is one add-on, not a room of them


def is_of_another_room(part: list[str], own: str) -> bool:
    """Return whether a module is one that another room shares (`addons.techniques._batch_loss`)."""
    return part[2].startswith("_") and part[1] != own.split("/")[0]


def undeclared(path: Path, text: str) -> set[str]:
    """Return the add-ons (ROOM/NAME) that a file of addons/ imports and its first line does not name."""
    own = "/".join(path.relative_to(ADDONS).with_suffix("").parts[:2])
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    parts = [name.split(".") for name in names if name.startswith("addons.")]
    used = {
        "/".join(part[1:3])
        for part in parts
        if len(part) > 2
        and (part[2] in addon_names(part[1]) or is_of_another_room(part, own))
        and not (part[1] in ONE_ADDON and own.startswith(part[1]))
    }
    declared = re.findall(r"addons/(\w+/\w+)", text.split("\n")[0]) if text.startswith("# Needs ") else []
    return used - {own, *declared}


@pytest.mark.parametrize("path", sorted(ADDONS.rglob("*.py")), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_first_line_names_the_addons_that_a_file_imports(path):
    assert undeclared(path, path.read_text(encoding="utf-8")) == set()


def imported_tests(text: str) -> list[str]:
    """Return the tests of add-ons that a file imports; a copy has them only with their add-on."""
    return re.findall(r"^ *(?:from|import) +(tests\.addons\S*(?:\.| import .*\b)test_\w+)", text, re.M)


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_file_imports_the_tests_of_an_addon(path):
    assert imported_tests(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "mutant",
    ["from tests.addons.techniques.test_sam import fields", "from tests.addons.techniques import kit, test_sam"],
)
def test_mutant_import_of_a_test_is_caught(mutant):
    assert len(imported_tests(f"import re\n    {mutant}\n")) == 1


@pytest.mark.skipif("distillation" not in addon_names("tasks"), reason="the add-on tasks/distillation is not here")
def test_mutant_import_of_another_addon_is_caught():
    path, text = (
        ADDONS / "tasks" / "preference" / "pairs.py",
        "from addons.tasks.distillation.frozen_teacher import A\n",
    )
    assert undeclared(path, text) == {"tasks/distillation"}
    assert undeclared(path, "def f():\n    from addons.tasks import distillation, preference\n") == {
        "tasks/distillation"
    }
    assert undeclared(path, "# Needs addons/tasks/distillation/.\n" + text) == set()
    text = "from addons.techniques._batch_loss import BatchLossTask\n"
    assert undeclared(path, text) == {"techniques/_batch_loss"}
    assert undeclared(path, "# Needs addons/techniques/_batch_loss.py.\n" + text) == set()
