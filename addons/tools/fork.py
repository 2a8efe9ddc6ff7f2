"""Copy of this template for a project of its own: without history and results, with the add-ons that are named.

    make fork DEST=folder [TASKS="causal_lm seq2seq"] [ADDONS="adapters/peft techniques"] [NAME=my-project]

Without TASKS and ADDONS, the copy has all add-ons; else only these and what they need (ADDONS=none: none), with the tests
that addons/README.md names for them (of several: if it has all of them), and no run file that names a missing add-on.
What is about the template stays here: tests/project/, its check, its figures and its README. AGENTS.md loses each
sentence that names what the copy lacks, and other pages the links to it.
Tests: tests/addons/tools/test_fork.py.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path, PurePosixPath

from engine.config.addresses import path_of_flag
from engine.config.errors import UsageError, did_you_mean
from engine.config.find_addons import known_addons
from engine.config.paths import REPOSITORY, SCHEMA_FILE, read_yaml
from engine.find_tasks import OPTIONS
from engine.process.exit_codes import run_main
from engine.tools import addon_files
from engine.tools.update import COMMIT, RECORD, VERSION

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
| `engine/`, the add-ons and their tests | the template's: used as they are, replaced by `make update FROM=…` |

Add-ons: {addons}.

[docs/forking.md](docs/forking.md) shows how to add a task, a loss or a number in the log, and what may be removed. The
pages in `docs/` are those of the template: they also name add-ons and tests that are only there.
"""
NOTE = """
> A copy of the template. Edit `train.py`, `eval.py` and `src/`: `make update` replaces `engine/` and the add-ons.
"""
CITATION = """cff-version: 1.2.0
title: {name}
message: If this project helped your work, please cite it.
type: software
authors:
  - name: The authors of {name}
references:
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
    files = [file for file in files_of_checkout() if not file.startswith(OF_THE_TEMPLATE)]
    left_out = addon_files.of_missing_addons(REPOSITORY, files, kept, missing)
    gone = addon_files.with_rooms(missing) - addon_files.with_rooms(kept)
    left_out |= {file for file in files if names_one(file, gone)}
    for file in files:
        if file not in left_out:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / file, target / file, follow_symlinks=False)  # CLAUDE.md is a link to AGENTS.md
    schema = subprocess.run([sys.executable, "train.py", "--schema"], cwd=target, check=True, capture_output=True)
    (target / SCHEMA_FILE.relative_to(REPOSITORY)).write_bytes(schema.stdout)
    write_pages(target, name, kept)
    rename(target / "uv.lock", name)
    rename(target / "pyproject.toml", name)
    write_record(target)
    return kept


def write_record(target: Path) -> None:
    """Write the commit that the copy is made from to engine/FROM, for `make update`: before that of this repository, which
    may be a copy, too."""
    own = REPOSITORY / RECORD
    commits = [git("rev-parse", "HEAD").strip(), *(COMMIT.findall(own.read_text()) if own.exists() else [])]
    (target / RECORD).write_text(f"{' '.join(commits)}\n")


def write_pages(target: Path, name: str, kept: list[str]) -> None:
    """Write README.md and CITATION.cff of a copy, and adapt its AGENTS.md and its links."""
    addons = ", ".join(sorted(kept)) or "none"
    version = (target / VERSION).read_text(encoding="utf-8").strip()
    (target / "README.md").write_text(README.format(name=name, version=version, addons=addons), encoding="utf-8")
    lines = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8").splitlines(keepends=True)
    of_template = [line for line in lines if not line.startswith(("cff-version", "message"))]
    reference = "".join(("    " if i else "  - ") + line for i, line in enumerate(of_template))
    (target / "CITATION.cff").write_text(CITATION.format(name=name) + reference, encoding="utf-8")
    page = target / "AGENTS.md"
    title, _, rest = page.read_text(encoding="utf-8").partition("\n")
    page.write_text(f"{title}\n{NOTE}{true_in(target, rest)}", encoding="utf-8")
    for page in target.rglob("*.md"):
        if not page.is_symlink():
            page.write_text(without_dead_links(target, page), encoding="utf-8")


def rename(file: Path, name: str) -> None:
    """Give pyproject.toml, or uv.lock, the name of the copy in place of the template's."""
    template = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    normalized = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "copy"
    text = file.read_text(encoding="utf-8").replace(f'name = "{template["name"]}"', f'name = "{normalized}"')
    text = text.replace(f'description = "{template["description"]}"', f"description = {json.dumps(name)}")
    file.write_text(text, encoding="utf-8")


# ---- pages of a copy -------------------------------------------------------------------------------------------------


def without_dead_links(target: Path, page: Path) -> str:
    """Return the text of a page without links to files that the copy lacks; their words stay."""

    def words(link: re.Match) -> str:
        path = link[2].partition("#")[0]
        in_template = (REPOSITORY / page.relative_to(target)).parent / path
        return link[1] if in_template.exists() and not (page.parent / path).exists() else link[0]

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", words, page.read_text(encoding="utf-8"))


def true_in(target: Path, text: str) -> str:
    """Return a page without the sentences, lines of code and rows of tables that name what `target` lacks."""
    kept, is_code = [], False
    beginning = re.compile(r"(\n*)( *(?:\d+\. |[*-] )?)")  # of a block: empty lines, and the sign of a list
    for block in re.split(r"\n(?=```|\n|[*|>#-] |\|| *\d+\. |make )", text):
        is_code ^= block.startswith("```")
        if is_code or block.lstrip("\n").startswith(("|", "#")) or not names_missing(target, block):
            kept += [] if names_missing(target, block) else [block]
            continue
        empty_lines, sign = beginning.match(block).groups()  # pyrefly: ignore[missing-attribute]
        sentences = re.split(r"(?<=[.]) +(?=[A-Z`\[*])", " ".join(block[len(empty_lines + sign) :].split()))
        true = [sentence for sentence in sentences if not names_missing(target, sentence)]
        indent = " " * len(sign)
        filled = textwrap.fill(
            " ".join(true), 120, initial_indent=sign, subsequent_indent=indent, break_on_hyphens=False
        )
        kept += [empty_lines + filled] * bool(true)
    return "\n".join(kept)


def names_missing(target: Path, text: str) -> bool:
    """Return whether a text names a file, a folder or a target of make that the template has and `target` lacks."""
    for name in re.findall(r"[\w./-]*\w(?:/|\.(?:py|md|yaml|json)\b)[\w./-]*", text):
        path = PurePosixPath(name)
        while not (REPOSITORY / path).exists():  # addons/tasks/NAME.py: is the room there?
            path = path.parent
        if not (target / path).exists():
            return True
    rules = (target / "engine" / "make.mk").read_text(encoding="utf-8") + (target / "Makefile").read_text(
        encoding="utf-8"
    )
    for name in re.findall(r"\bmake ([a-z-]+)", text):
        rule = re.search(rf"^{name}:.*\n((?:\t.*\n)+)", rules, re.M)
        if rule and not all((target / need).exists() for need in re.findall(r"call need,([\w./]+)", rule[1])):
            return True
    return False


# ---- files of the checkout -------------------------------------------------------------------------------------------


def files_of_checkout() -> list[str]:
    """Return the files that git tracks, and new ones of CODE that it does not ignore: a task need not be committed."""
    return _git_files("--cached") + [file for file in _git_files("--others") if file.startswith(CODE)]


def untracked_elsewhere() -> list[str]:
    """Return the files that are not copied: outside of CODE, git neither tracks nor ignores them, such as notes."""
    return [file for file in _git_files("--others") if not file.startswith(CODE)]


def _git_files(which: str) -> list[str]:
    names = git("ls-files", "-z", which, "--exclude-standard").split("\0")
    return [file for file in names if file and os.path.lexists(REPOSITORY / file)]


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"make fork needs a git checkout of the template, with a commit: {done.stderr.strip()}")
    return done.stdout


# ---- add-ons that are named ------------------------------------------------------------------------------------------


def chosen(here: list[str], tasks: list[str], addons: list[str]) -> list[str]:
    """Return the add-ons that TASKS and ADDONS (ROOM/NAME, ROOM for all in it, or none) name, and those that they need."""
    for task in tasks:
        if task not in OPTIONS:
            raise UsageError(
                f"TASKS: unknown task {task!r}{did_you_mean(task, OPTIONS)}; there are {', '.join(OPTIONS)}"
            )
    names = addon_files.with_rooms(here)
    if addons == ["none"]:
        addons = []
    for name in addons:
        if name not in names:
            raise UsageError(f"ADDONS: unknown add-on {name!r}{did_you_mean(name, names)}; addons/README.md lists them")
    return addon_files.with_needs(REPOSITORY, {f"tasks/{task}" for task in tasks} | {*addons})


def names_one(file: str, gone: set[str]) -> bool:
    """Return whether a run file names one of these add-ons: by its task, a technique, an optimizer or a field."""
    if not re.fullmatch(r"configs/[\w.]+\.yaml", file):
        return False
    known, values = known_addons(), read_yaml(REPOSITORY / file)
    options = {
        name for name, addon in known.items() if addon.startswith("addons/tasks/")
    }  # other tasks may have them, too
    words = {*values} - options | {f"{field}={value}" for field, value in values.items()}
    words |= {f"techniques={name}" for name in values.get("techniques") or ()}
    named = {known[word].removeprefix("addons/") for word in words & known.keys()}
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
    print("Next: cd there, git commit, make setup, make test, make train.")


if __name__ == "__main__":
    run_main(main)
