"""Copy of this template for a project of its own: without history and results, with the add-ons that are named.

    make fork DEST=folder [TASKS="causal_lm seq2seq"] [ADDONS="adapters/peft techniques"] [NAME=my-project]

Without TASKS and ADDONS, the copy has all add-ons; else only these and what they need, with the tests that
addons/README.md names for them (of several: if it has all of them), and no run file that names a missing add-on.
What is about the template stays here: tests/project/, its check, its figures and its README.
Tests: tests/addons/tools/test_fork.py.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from engine.config.errors import UsageError, did_you_mean
from engine.config.paths import REPOSITORY, SCHEMA_FILE, path_of_flag, read_yaml
from engine.process.exit_codes import run_main
from engine.task_registry import OPTIONS
from engine.tools import addon_files
from engine.tools.manifest import VERSION, write_manifest

# New files are copied from here, though git does not track them.
CODE = ("engine/", "src/", "addons/", "configs/", "samples/", "tests/")
OF_THE_TEMPLATE = ("tests/project/", ".ci/run", "CHANGELOG.md", "benchmarks/results.json", "benchmarks/support.py")
README = """# {name}

Made from a training template on Hugging Face Accelerate (version {version} of its engine). The run file in `configs/` says
what is trained, the accelerate file in `accelerate_configs/` says where; change the where, and the numbers do not move.

```bash
make train       # installs the packages, trains configs/stdlib_lm.yaml; make lists all targets
make eval        # evaluates the newest run
make test-fast   # tests
make update      # a newer engine: docs/forking.md
```

| where | whose |
|---|---|
| `train.py`, `eval.py`, `src/`, `tests/src/`, `configs/`, `accelerate_configs/`, `samples/`, `docs/` | yours to edit |
| `engine/`, `addons/` and their tests | the template's: used as they are, replaced by `make update FROM=…` |

Add-ons: {addons}.

[docs/forking.md](docs/forking.md) shows how to add a task, a loss or a number in the log, and what may be removed. The
pages in `docs/` are those of the template: they also name add-ons and tests that are only there.
"""
NOTE = """
> A copy of the template. What this page says of `tests/project/`, of `CHANGELOG.md` and of add-ons that are not here is
> about the template; `make` says so if a target needs one. Edit `train.py`, `eval.py` and `src/`: `make update` replaces
> `engine/` and `addons/`.
"""


def fork(target: Path, tasks: list[str], addons: list[str], name: str) -> list[str]:
    """Copy the template to the folder `target`, named `name`; return the add-ons that the copy has.

    Raise UsageError for an unknown task or add-on, or a folder that is not empty."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"DEST: {target} is not an empty folder: give another folder")
    if target.resolve().is_relative_to(REPOSITORY.resolve()):
        raise UsageError(f"DEST: {target} is inside this repository: give a folder outside of it")
    here = addon_files.addons_in(REPOSITORY)
    kept = chosen(here, tasks, addons) if tasks or addons else here
    missing = {*here} - {*kept}
    page = REPOSITORY / "addons" / "README.md"
    files = [file for file in files_of_checkout() if not file.startswith(OF_THE_TEMPLATE)]
    left_out = addon_files.of_missing_addons(files, page.read_text(encoding="utf-8"), kept, missing)
    gone = addon_files.with_rooms(missing) - addon_files.with_rooms(kept)
    left_out |= {file for file in files if names_one(file, gone)}
    for file in files:
        if file not in left_out:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / file, target / file, follow_symlinks=False)  # CLAUDE.md is a link to AGENTS.md
    write_pages(target, name, kept)
    schema = subprocess.run([sys.executable, "train.py", "--schema"], cwd=target, check=True, capture_output=True)
    (target / SCHEMA_FILE.relative_to(REPOSITORY)).write_bytes(schema.stdout)
    write_manifest(target)
    return kept


def write_pages(target: Path, name: str, kept: list[str]) -> None:
    """Write the README.md of a copy, and a note into its AGENTS.md."""
    addons = ", ".join(sorted(kept)) or "none"
    version = (target / VERSION).read_text(encoding="utf-8").strip()
    (target / "README.md").write_text(README.format(name=name, version=version, addons=addons), encoding="utf-8")
    page = target / "AGENTS.md"
    title, _, rest = page.read_text(encoding="utf-8").partition("\n")
    page.write_text(f"{title}\n{NOTE}{rest}", encoding="utf-8")


# ---- files of the checkout -------------------------------------------------------------------------------------------


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


# ---- add-ons that are named ------------------------------------------------------------------------------------------


def chosen(here: list[str], tasks: list[str], addons: list[str]) -> list[str]:
    """Return the add-ons that TASKS and ADDONS (ROOM/NAME, or ROOM for all in it) name, and those that they need."""
    for task in tasks:
        if task not in OPTIONS:
            raise UsageError(
                f"TASKS: unknown task {task!r}{did_you_mean(task, OPTIONS)}; there are {', '.join(OPTIONS)}"
            )
    names = addon_files.with_rooms(here)
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


def names_one(file: str, gone: set[str]) -> bool:
    """Return whether a run file names one of these add-ons: by its task, a technique, an optimizer or a field."""
    if not re.fullmatch(r"configs/[\w.]+\.yaml", file):
        return False
    values = read_yaml(REPOSITORY / file)
    fields = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))["properties"]
    rooms = {"tasks": "task", "optimizers": "optim", "schedules": "lr_scheduler_type"}
    named = {f"{room}/{values.get(field)}" for room, field in rooms.items()}
    named |= {f"techniques/{name}" for name in values.get("techniques") or ()}
    named |= {fields[name].get("x-add-on", "").removeprefix("addons/") for name in values if name in fields}
    return bool(named & gone)


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
