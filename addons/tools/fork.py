"""Copy of this template for a project of its own: without history and results, with the add-ons that are named.

    make fork DEST=folder [TASKS="causal_lm seq2seq"] [ADDONS="adapters/peft techniques"] [NAME=my-project]

Without TASKS and ADDONS, the copy has all add-ons; else only these and what they need. It has the tests that
addons/README.md names for them (of several: if it has all of them), no run file that names a missing add-on, and no line
of README.md and AGENTS.md about what it lacks. Tests: tests/addons/tools/test_fork.py.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from engine.config.addons import addon_names
from engine.config.errors import UsageError, did_you_mean
from engine.config.paths import REPOSITORY, SCHEMA_FILE, path_of_flag, read_yaml
from engine.process.exit_codes import run_main
from engine.task_registry import OPTIONS

CODE = (
    "engine/",
    "src/",
    "addons/",
    "configs/",
    "samples/",
    "tests/",
)  # where new files are copied, though git does not track them


def fork(target: Path, tasks: list[str], addons: list[str], name: str) -> list[str]:
    """Copy the template to the folder `target`, named `name`; return the add-ons that the copy has.

    Raise UsageError for an unknown task or add-on, or a folder that is not empty."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"DEST: {target} is not an empty folder: give another folder")
    if target.resolve().is_relative_to(REPOSITORY.resolve()):
        raise UsageError(f"DEST: {target} is inside this repository: give a folder outside of it")
    here = all_addons()
    kept = chosen(here, tasks, addons) if tasks or addons else here
    gone = {*here, *rooms_of(here)} - {*kept, *rooms_of(kept)}  # a room that is left empty goes, too
    left_out = {"benchmarks/results.json", *tests_of(gone)}
    left_out |= {"benchmarks/support.py"} if "techniques" in gone else set()  # it imports them
    files = [
        file for file in files_of_checkout() if not (file in left_out or is_of(file, gone) or names_one(file, gone))
    ]
    if not kept:
        files = [file for file in files if not file.startswith(("addons/", "tests/addons/"))]
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / file, target / file, follow_symlinks=False)  # CLAUDE.md is a link to AGENTS.md
    write_pages(target, {*files}, gone, name)
    schema = subprocess.run([sys.executable, "train.py", "--schema"], cwd=target, check=True, capture_output=True)
    (target / SCHEMA_FILE.relative_to(REPOSITORY)).write_bytes(schema.stdout)
    return kept


def files_of_checkout() -> list[str]:
    """Return the files that git tracks, and new ones of CODE that it does not ignore: a task need not be committed."""
    return _git_files("--cached") + [file for file in _git_files("--others") if file.startswith(CODE)]


def untracked_elsewhere() -> list[str]:
    """Return the files that are not copied: outside of CODE, git neither tracks nor ignores them, such as notes."""
    return [file for file in _git_files("--others") if not file.startswith(CODE)]


def _git_files(which: str) -> list[str]:
    command = ["git", "ls-files", "-z", which, "--exclude-standard"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"make fork needs a git checkout of the template: {done.stderr.strip()}")
    return [file for file in done.stdout.split("\0") if file and os.path.lexists(REPOSITORY / file)]


def all_addons() -> list[str]:
    """Return "ROOM/NAME" of all add-ons; "ROOM" for a room that is a single one."""
    rooms = sorted(path.name for path in (REPOSITORY / "addons").iterdir() if path.is_dir())
    return [addon for room in rooms for addon in [f"{room}/{name}" for name in addon_names(room)] or [room]]


def rooms_of(addons: Iterable[str]) -> set[str]:
    return {addon.split("/")[0] for addon in addons}


def chosen(here: list[str], tasks: list[str], addons: list[str]) -> list[str]:
    """Return the add-ons that TASKS and ADDONS (ROOM/NAME, or ROOM for all in it) name, and those that they need."""
    for task in tasks:
        if task not in OPTIONS:
            raise UsageError(
                f"TASKS: unknown task {task!r}{did_you_mean(task, OPTIONS)}; there are {', '.join(OPTIONS)}"
            )
    names = {*here, *rooms_of(here)}
    for name in addons:
        if name not in names:
            raise UsageError(f"ADDONS: unknown add-on {name!r}{did_you_mean(name, names)}; addons/README.md lists them")
    wanted: set[str] = {f"tasks/{task}" for task in tasks} | set(addons)
    kept: list[str] = []
    while more := [addon for addon in here if addon not in kept and {addon, addon.split("/")[0]} & wanted]:
        kept += more
        wanted |= {need for addon in more for need in needs(addon)}
    return kept


def needs(addon: str) -> list[str]:
    """Return the add-ons that the files of this one name in a first line such as `# Needs addons/tasks/seq2seq/.`"""
    path = REPOSITORY / "addons" / addon
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    first_lines = [file.read_text(encoding="utf-8").partition("\n")[0] for file in files]
    needed = re.findall(r"\baddons/([\w/]+)", " ".join(line for line in first_lines if line.startswith("# Needs ")))
    return [name.strip("/") for name in needed]


# ---- what a copy without some add-ons lacks --------------------------------------------------------------------------


def tests_of(gone: set[str]) -> set[str]:
    """Return the tests that rows of these add-ons name in addons/README.md; of their rooms, those that no row names."""
    page = (REPOSITORY / "addons" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+)` \|(.*)$", page, re.M)
    of_room = r"tests/addons/(\w+)/test_(?!conformance)\w+\.py"  # that one looks at the add-ons that are there
    whole = [file for file in files_of_checkout() if (match := re.match(of_room, file)) and match[1] in rooms_of(gone)]
    tests = {file for addon, row in rows if addon in gone for file in re.findall(r"`(tests/[\w/]+\.py)`", row)}
    return tests | {file for file in whole if f"`{file}`" not in page}


def is_of(file: str, gone: set[str]) -> bool:
    """Return whether a file is a part of these add-ons or rooms, or of the tests of these rooms."""
    match = re.match(r"(?:tests/(?=\S+/test_))?addons/(\w+)/(\w+)", file)  # what tests share stays
    return match is not None and bool({match[1], f"{match[1]}/{match[2]}"} & gone)


def names_one(file: str, gone: set[str]) -> bool:
    """Return whether a run file names one of these add-ons: by its task, a technique, an optimizer or a field."""
    if not re.fullmatch(r"configs/\w+\.yaml", file):
        return False
    values = read_yaml(REPOSITORY / file)
    fields = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))["properties"]
    rooms = {"tasks": "task", "optimizers": "optim", "schedules": "lr_scheduler_type"}
    named = {f"{room}/{values.get(field)}" for room, field in rooms.items()}
    named |= {f"techniques/{name}" for name in values.get("techniques") or ()}
    named |= {fields[name].get("x-add-on", "").removeprefix("addons/") for name in values if name in fields}
    return bool(named & gone)


# ---- the pages of a copy ---------------------------------------------------------------------------------------------


def write_pages(target: Path, copied: set[str], gone: set[str], name: str) -> None:
    """Write the pages without what they say about files that the copy lacks; README.md has the name of the project."""
    left_out = {*files_of_checkout()} - copied
    targets = missing_targets(copied, left_out)
    for page in ("README.md", "AGENTS.md"):
        text = without_missing((REPOSITORY / page).read_text(encoding="utf-8"), copied, left_out, targets)
        text = re.sub(r"\A# .*", f"# {name}", text) if page == "README.md" else text
        (target / page).write_text(text, encoding="utf-8")
    page = target / "addons" / "README.md"
    if page.exists():
        here, missing = without_rows(page.read_text(encoding="utf-8"), gone)
        page.write_text(without_missing(here, copied, set(), targets) + missing, encoding="utf-8")


def missing_targets(copied: set[str], left_out: set[str]) -> set[str]:
    """Return the targets of the Makefile whose recipes need a file that the copy lacks."""
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    recipes = dict(re.findall(r"^([a-z-]+):.*\n((?:\t.*\n)*)", makefile, re.M))
    needed = {target: re.findall(r"call need,([\w/.]+)", recipe) for target, recipe in recipes.items()}
    return {target for target, paths in needed.items() if any(is_missing(path, copied, left_out) for path in paths)}


def is_missing(path: str, copied: set[str], left_out: set[str]) -> bool:
    """Return whether the template has this file or folder, and the copy does not.

    An example (addons/tasks/NAME.py) stands for its folder, and `addons/ROOM/` for all that is in the room."""

    def has(files: set[str]) -> bool:
        return any(file == folder or file.startswith(f"{folder}/") for file in files)

    folder = path.strip("/")
    if re.fullmatch(r"addons/\w+/", path):
        return has(left_out)
    while folder and not has(copied) and not has(left_out):
        folder = folder.rpartition("/")[0]
    return bool(folder) and not has(copied)


def without_missing(page: str, copied: set[str], left_out: set[str], targets: set[str]) -> str:
    """Return a page without the lines that name a file that the copy lacks, or one of these targets of make.

    With the first line of a paragraph or an item, the rest of it goes, too: so what is said of an add-on in the middle
    of a paragraph has to stand on a line of its own."""
    kept, before = [], ""
    is_code = is_going = has_dropped = False
    for line in page.splitlines():
        paths = re.findall(
            r"(?<![\w/.-])((?:engine|src|addons|tests|configs|samples|benchmarks|docs)/(?:[\w/.]*[\w/])?)", line
        )
        names_missing = any(is_missing(path, copied, left_out) for path in paths)
        names_missing |= not targets.isdisjoint(re.findall(r"\bmake ([a-z-]+)", line))
        is_code ^= line.startswith("```")
        if is_code or not before.strip() or re.match(r"[|*>]|\d+\.", line):
            is_going = names_missing
        if not line.strip():
            is_going = False
        is_second_blank = not line and has_dropped and kept[-1:] == [""]
        if is_going or names_missing:
            has_dropped = True
        elif not is_second_blank:
            kept.append(line)
            has_dropped = False
        before = line
    return "\n".join(kept) + "\n"


def without_rows(page: str, gone: set[str]) -> tuple[str, str]:
    """Return addons/README.md without the rows of missing add-ons, and a section with these rows.

    A test finds there which add-on a test belongs to that docs/ name and the copy lacks."""
    missing = [row[0] for row in re.finditer(r"^\| `([\w/]+)` \|.*\n", page, re.M) if row[1] in gone]
    for row in missing:
        page = page.replace(row, "")
    page = re.sub(r"^\| \*\*.*\n(?=\| \*\*|\n)", "", page, flags=re.M)  # headings without a row
    heading = re.findall(r"^\| add-on \|.*\n.*\n", page, re.M)
    return page, "".join(["\n## In the template, not in this copy\n\n", *heading, *missing] if missing else [])


def main(argv: list[str]) -> None:
    """Make the copy, and put all files into a new git repository."""
    parser = argparse.ArgumentParser(prog="make fork", description="Copy this template for a project of its own.")
    parser.add_argument("target")
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--addons", nargs="*", default=[])
    parser.add_argument("--name", default="")
    args = parser.parse_args(argv)
    target = Path(path_of_flag(args.target, "DEST")).absolute()
    kept = fork(target, args.tasks, args.addons, args.name or target.name)
    for words in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", *words], cwd=target, check=True, stdout=subprocess.DEVNULL)
    if untracked := untracked_elsewhere():
        print(f"Not copied, because git does not track it: {', '.join(untracked)}")
    print(f"{target}: the core, and the add-ons {', '.join(kept) or 'none'}.")
    run_files = {path.name for path in (REPOSITORY / "configs").glob("*.yaml")} - {*os.listdir(target / "configs")}
    print(f"Not copied, because an add-on is missing: {', '.join(sorted(run_files))}\n" * bool(run_files), end="")
    print("Next: cd there, git commit, make setup, make test.")


if __name__ == "__main__":
    run_main(main)
