"""Which files belong to which add-on: its code, and the tests that addons/README.md names for it.

`make fork` and `make update` leave out what belongs to add-ons that a copy lacks. Tests: tests/addons/tools/test_fork.py,
tests/engine/tools/test_update.py.
"""

import re
from collections.abc import Iterable
from pathlib import Path


def addons_in(folder: Path) -> list[str]:
    """Return "ROOM/NAME" of all add-ons in a copy or in the template; "ROOM" for a room that is a single one."""
    found = []
    for room in sorted(path for path in (folder / "addons").glob("[!_]*") if path.is_dir()):
        files = [path for path in room.glob("[!_]*") if path.suffix == ".py" or (path / "__init__.py").exists()]
        names = sorted(f"{room.name}/{path.stem}" for path in files)
        found += names or [room.name] * any(room.rglob("*.py"))
    return found


def with_rooms(addons: Iterable[str]) -> set[str]:
    """Return the add-ons and their rooms."""
    return {part for addon in addons for part in (addon, addon.split("/")[0])}


def of_missing_addons(files: Iterable[str], page: str, here: Iterable[str], missing: Iterable[str]) -> set[str]:
    """Return the files of add-ons that a copy lacks: of `missing`, and of rooms in which none is `here`.

    `page` is addons/README.md. A test of several add-ons needs all of them; one that no row names, all of its room. What
    tests share in a room stays."""
    if not here:
        return {file for file in files if file.startswith(("addons/", "tests/addons/"))}
    gone = with_rooms(missing) - with_rooms(here)
    rows = re.findall(r"^\| `([\w/]+)` \|(.*)$", page, re.M)
    named = {file for addon, row in rows if addon in gone for file in re.findall(r"`(tests/[\w/]+\.py)`", row)}
    return named | {file for file in files if _is_of(file, gone, page)}


def _is_of(file: str, gone: set[str], page: str) -> bool:
    if code := re.match(r"addons/(\w+)/(\w+)", file):
        return bool({code[1], f"{code[1]}/{code[2]}"} & gone)
    if test := re.match(r"tests/addons/(\w+)/test_(\w+)", file):
        is_of_room = f"`{file}`" not in page and test[2] != "conformance"  # that one looks at what is there
        return test[1] in gone or (is_of_room and any(addon.startswith(f"{test[1]}/") for addon in gone))
    return False
