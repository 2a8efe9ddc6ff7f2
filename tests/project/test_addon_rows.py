"""addons/README.md: a row for each add-on, with what it costs and the tests that it has; a row for each hook, with its users."""

import re

import pytest

from engine.config.addon import Addon
from engine.config.find_addons import ADDONS, addon_names, addons_with_fields
from tests.helpers import kit

if not ADDONS.exists():
    pytest.skip("the add-ons are not here", allow_module_level=True)

ROOMS = sorted(path.name for path in ADDONS.iterdir() if path.is_dir() and not path.name.startswith("__"))
BY_NAME = ("tasks", "techniques", "optimizers", "schedules", "backends")  # a run file or an accelerate file names these


def rows(page: str) -> dict[str, list[str]]:
    """Return {add-on: [what it does and costs, its tests]}."""
    found = re.findall(r"^\| `([\w/]+)` \| (.+) \| (.+) \|$", page.partition("\n## ")[0], re.M)
    return {name: cells for name, *cells in found}


def listed() -> set[str]:
    """Return the add-ons that are here. A room with an `__init__.py` is one add-on, unless its files have names, too."""
    names = {room: {f"{room}/{name}" for name in addon_names(room)} for room in ROOMS}
    single = {room for room in ROOMS if room not in BY_NAME and (ADDONS / room / "__init__.py").exists()}
    return set().union(*(names[room] for room in ROOMS if room not in single), single)


def differences(table: dict[str, list[str]], here: set[str]) -> list[str]:
    """Return add-ons without a row, and tests that are not here."""
    found = [f"{name} has no row" for name in sorted(here - table.keys())]
    files_of = {name: re.findall(r"`(tests/addons/[\w/]+\.py)`", tests) for name, (*_, tests) in table.items()}
    shared = {
        file for name, files in files_of.items() if name not in here for file in files
    }  # went with another add-on
    for name, files in files_of.items():
        missing = [file for file in files if not (kit.REPOSITORY / file).exists() and file not in shared]
        if name in here and (missing or not files):
            found.append(f"{name}: {', '.join(missing) or 'its tests'} missing")
    return found


def test_rows_are_those_of_the_folder():
    assert differences(rows((ADDONS / "README.md").read_text()), listed()) == []


def test_mutants_of_the_table_are_caught():
    page = (ADDONS / "README.md").read_text()
    table, here = rows(page), listed()
    some = "tools/ledger"
    if some not in here:
        pytest.skip(f"the add-on {some} is not here")
    assert differences({name: cells for name, cells in table.items() if name != some}, here) == [f"{some} has no row"]
    moved = table | {some: [table[some][0], "`tests/addons/tools/test_gone.py`"]}
    assert differences(moved, here) == [f"{some}: tests/addons/tools/test_gone.py missing"]
    assert differences(table | {some: ["", "none"]}, here) == [f"{some}: its tests missing"]


# ---- hooks ---------------------------------------------------------------------------------------------------------------


def users_of_hooks() -> dict[str, set[str]]:
    """Return {name in Addon: add-ons that define it}."""
    paths = {cls: cls.__module__.removeprefix("addons.").replace(".", "/") for cls in addons_with_fields()}
    hooks = [name for name in vars(Addon) if not name.startswith("_")]
    return {hook: {path for cls, path in paths.items() if hook in vars(cls)} for hook in hooks}


def errors_of_hooks(page: str, users: dict[str, set[str]]) -> list[str]:
    """Return hooks with other users than in their row, those with one user and no reason, and rows without a hook."""
    table = page.partition("\n| hook | ")[2].partition("\n\n")[0]
    rows_of_hooks = re.findall(r"^\| `(\w+)` \| (.+?) \| (.*?) ?\|$", table, re.M)
    here = {cls.__module__.removeprefix("addons.").replace(".", "/") for cls in addons_with_fields()}
    found = sorted(users.keys() - {hook for hook, *_ in rows_of_hooks})
    for hook, cell, reason in rows_of_hooks:
        names = set(re.findall(r"`([\w/]+)`", cell))  # a copy may have left out some of them
        if names & here != users.get(hook) or (len(names) == 1 and not reason):
            found.append(hook)
    return found


def test_rows_of_hooks_are_those_of_the_code():
    """The mutants: another user, a hook without a row, one without a reason, a row without a hook."""
    page, users = (ADDONS / "README.md").read_text(), users_of_hooks()
    assert errors_of_hooks(page, users) == []
    assert errors_of_hooks(page, users | {"save": {"tasks/reward"}}) == ["save"]
    assert errors_of_hooks(page, users | {"other": set()}) == ["other"]
    assert errors_of_hooks(re.sub(r"(\| `finish` \| .*? \|) .* \|", r"\1 |", page), users) == ["finish"]
    assert errors_of_hooks(page, {hook: them for hook, them in users.items() if hook != "finish"}) == ["finish"]
