"""Which files belong to which add-on: its code, and the tests that addons/README.md names for it.

`make fork` and `make update` leave out what belongs to add-ons that a copy lacks. Tests: tests/addons/tools/test_fork.py,
tests/engine/tools/test_update.py.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from engine.config.find_addons import NAMED_BY, needs_of


def addons_in(folder: Path) -> list[str]:
    """Return "ROOM/NAME" of all add-ons in a copy or in the template; "ROOM" for a room that is a single one."""
    found = []
    for room in sorted(path for path in (folder / "addons").glob("[!_]*") if path.is_dir()):
        if (room / "__init__.py").exists() and room.name not in NAMED_BY:
            found.append(room.name)
            continue
        files = [path for path in room.glob("[!_]*") if path.suffix == ".py" or (path / "__init__.py").exists()]
        found += sorted(f"{room.name}/{path.stem}" for path in files)
    return found


def with_rooms(addons: Iterable[str]) -> set[str]:
    """Return the add-ons and their rooms."""
    return {part for addon in addons for part in (addon, addon.split("/")[0])}


def with_needs(folder: Path, addons: Iterable[str]) -> list[str]:
    """Return the add-ons in `folder` that are among `addons` or that these need; a room stands for all in it."""
    here, wanted = addons_in(folder), {*addons}
    kept = [addon for addon in here if {addon, addon.split("/")[0]} & wanted]
    wanted |= {str(Path(need).with_suffix("").relative_to("addons")) for need in needed_by(folder, kept)}
    return [addon for addon in here if {addon, addon.split("/")[0]} & wanted]


def needed_by(folder: Path, addons: Iterable[str]) -> list[str]:
    """Return the paths that first lines of these add-ons name, such as `# Needs addons/tasks/seq2seq/.`, and theirs."""
    given = [f"addons/{addon}" for addon in addons]
    paths = [*given]
    for name in paths:  # it grows
        path = folder / name
        for file in path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]:
            paths += [need for need in needs_of(file) if need not in paths] if file.exists() else []
    return paths[len(given) :]


def of_missing_addons(folder: Path, files: Iterable[str], here: Iterable[str], missing: Iterable[str]) -> set[str]:
    """Return the files of `folder` that belong to add-ons that a copy lacks: of `missing`, and of rooms in which none is
    `here`; but not files beginning with _ that one of `here` needs.

    A test of several add-ons, by addons/README.md, needs all of them; one that no row names, all of its room. What tests
    share in a room stays while a test needs it."""
    files = {*files}
    if not here:
        return {file for file in files if file.startswith(("addons/", "tests/addons/"))}
    page = (folder / "addons" / "README.md").read_text(encoding="utf-8") if "addons/README.md" in files else ""
    gone = with_rooms(missing) - with_rooms(here)
    rows = re.findall(r"^\| `([\w/]+)` \|(.*)$", page, re.M)
    named = {file for addon, row in rows if addon in gone for file in re.findall(r"`(tests/[\w/]+\.py)`", row)}
    gone_files = (named | {file for file in files if _is_of(file, gone, page)}) - {*needed_by(folder, here)}
    return gone_files | _in_empty_rooms(folder, {*files} - gone_files)


def _in_empty_rooms(folder: Path, files: set[str]) -> set[str]:
    """Return those of `files` that stand in a room of tests/addons/ without a test, and that no other test imports."""
    tests = {file: re.match(r"tests/addons/(\w+)/.*py$", file) for file in files}
    rooms = {match[1] for match in tests.values() if match}
    rooms -= {match[1] for file, match in tests.items() if match and "/test_" in file}
    for file in sorted(files):
        if file.startswith("tests/addons/") and file.split("/")[2] not in rooms:
            rooms -= {*re.findall(r"\btests\.addons\.(\w+)", (folder / file).read_text(encoding="utf-8"))}
    return {file for file, match in tests.items() if match and match[1] in rooms}


def _is_of(file: str, gone: set[str], page: str) -> bool:
    if code := re.match(r"addons/(\w+)/(\w+)", file):
        return bool({code[1], f"{code[1]}/{code[2]}"} & gone)
    if test := re.match(r"tests/addons/(\w+)/test_(\w+)", file):
        is_of_room = f"`{file}`" not in page and test[2] != "conformance"  # that one looks at what is there
        return test[1] in gone or (is_of_room and any(addon.startswith(f"{test[1]}/") for addon in gone))
    return False
