"""Copy of this template for a project of its own: without history, results, and the tasks that are not wanted.

    make fork DEST=folder [TASKS="causal_lm seq2seq"] [NAME=my-project]

Everything of a task TASK is src/tasks/TASK.py, tests/tasks/test_TASK.py, run files (YAML) with `task: TASK`, a line of
OPTIONS in src/tasks/__init__.py, a function TASK in tests/conformance/recipes.py, and its part of configs/schema.json.
The copy also loses modules that only removed files import, and what README.md and docs/ say of removed files. Tests:
tests/config/test_fork.py.
"""

import argparse
import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from src.config.errors import UsageError, did_you_mean
from src.config.help_text import fields_in
from src.config.paths import REPOSITORY
from src.config.run_file_schema import from_fields, to_json

ALWAYS_KEPT = ("causal_lm", "text_classification")  # tests of the core train them
RESULTS = ("benchmarks/results.json",)
REGISTRY, RECIPES = "src/tasks/__init__.py", "tests/conformance/recipes.py"
SCHEMA = "configs/schema.json"


def fork(target: Path, wanted: list[str], name: str, source: Path = REPOSITORY) -> tuple[list[str], list[str]]:
    """Copy the template to the folder `target`, named `name`; return (tasks that are kept, removed files).

    Without `wanted`, all tasks are kept. Raise UsageError for an unknown task, or a folder that is not empty."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"DEST: {target} is not an empty folder: give another folder")
    if target.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"DEST: {target} is inside this repository: give a folder outside of it")
    tasks = re.findall(r'^    "(\w+)": _options\(', (source / REGISTRY).read_text(), re.M)
    for task in wanted:
        if task not in tasks:
            raise UsageError(f"TASKS: unknown task {task!r}{did_you_mean(task, tasks)}; there are {', '.join(tasks)}")
    kept = [task for task in tasks if not wanted or task in (*wanted, *ALWAYS_KEPT)]
    files = _tracked(source)
    removed = _removed_files(source, files, [task for task in tasks if task not in kept])
    for file in files:
        if file not in removed:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / file, target / file)
    for task in tasks:
        if task not in kept:
            _unregister(target, task)
    own, options = fields_in(json.loads((source / SCHEMA).read_text(encoding="utf-8")))
    schema = from_fields(own, {task: fields for task, fields in options.items() if task in kept})
    (target / SCHEMA).write_text(to_json(schema) + "\n", encoding="utf-8")
    title = (target / "README.md").read_text()
    (target / "README.md").write_text(re.sub(r"\A# .*", f"# {name}", title))
    for page in (target / "README.md", *(target / "docs").glob("*.md")):
        page.write_text(without_mentions(page.read_text(), removed))
    return kept, sorted(removed)


def _tracked(source: Path) -> list[str]:
    """Return the files that git tracks, without results."""
    done = subprocess.run(["git", "ls-files"], cwd=source, capture_output=True, text=True)
    files = [file for file in done.stdout.splitlines() if file not in RESULTS and (source / file).exists()]
    if done.returncode or not files:
        raise UsageError(f"make fork needs a git checkout of the template: {done.stderr.strip() or 'no files'}")
    return files


# ---- what a task consists of -----------------------------------------------------------------------------------------


def _removed_files(source: Path, files: list[str], tasks: list[str]) -> set[str]:
    """Return the files of these tasks, and the modules and models that only removed files use."""
    removed = {f"src/tasks/{task}.py" for task in tasks} | {f"tests/tasks/test_{task}.py" for task in tasks}
    for file in files:
        if re.fullmatch(r"configs/\w+\.yaml", file):
            found = re.search(r"^task: *(\w+)", (source / file).read_text(), re.M)
            if found and found[1] in tasks:
                removed.add(file)
        elif re.match(
            r"tests/(?!conformance/).*/test_\w+\.py", file
        ):  # a test elsewhere that trains the task and does not skip it
            names = "|".join(tasks) or "(?!)"
            uses = rf"\brecipes\.({names})\b|\bsrc\.tasks(\.| import .*\b)({names})\b|\btask=[\"']({names})\b"
            text = (source / file).read_text()
            if re.search(uses, text) and "need_task(" not in text:
                removed.add(file)
    removed &= set(files)
    users = _users(source, files)
    while more := {file for file, by in users.items() if by and by <= removed and file not in removed}:
        removed |= more
    return removed


def _users(source: Path, files: list[str]) -> dict[str, set[str]]:
    """Return, for each module of src/ and tests/helpers/ and each model of configs/models/, the files that name it."""
    users: dict[str, set[str]] = {
        f: set() for f in files if re.match(r"(src/.+|tests/helpers)/(?!__init__)\w+\.py|configs/models/", f)
    }
    for file in files:
        if file.endswith(".py"):
            names = _imported(ast.parse((source / file).read_text()))
            used = {f"{name.replace('.', '/')}.py" for name in names}
        elif file.endswith(".yaml"):
            used = set(re.findall(r"configs/models/\w+\.yaml", (source / file).read_text()))
        else:
            continue
        for name in used & set(users):
            users[name].add(file)
    return users


def _imported(tree: ast.Module) -> set[str]:
    """Return the names of all modules that a file imports, also those of `from package import module`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _unregister(target: Path, task: str) -> None:
    """Remove a task's line of OPTIONS and its recipe."""
    registry, recipes = target / REGISTRY, target / RECIPES
    registry.write_text(re.sub(rf'^    "{task}": .*\n', "", registry.read_text(), flags=re.M))
    text = recipes.read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == task:
            lines = text.splitlines(keepends=True)
            text = "".join(lines[: node.lineno - 1]) + "".join(lines[node.end_lineno or 0 :]).lstrip("\n")
    head, _, listed = text.partition("\nRECIPES =")
    recipes.write_text(f"{head}\nRECIPES =" + re.sub(rf"\b{task}\b(, )?", "", listed).replace(", ]", "]"))


# ---- documents -------------------------------------------------------------------------------------------------------


def without_mentions(page: str, removed: set[str]) -> str:
    """Return a page without the table rows, lines of code, list items and sentences that name a removed file."""
    names = {form for file in removed for form in (file, file.removeprefix("src/"), f"`{Path(file).name}`")}
    pattern = re.compile(rf"(?<![\w/])({'|'.join(map(re.escape, names)) or '(?!)'})")

    kept = []
    for block in re.split(r"(\n\n+)", page):
        if block.startswith("```") or "|\n|" in block:
            parts = block.splitlines(keepends=True)
        elif re.match(r"[*-] |\d+\. ", block):
            parts = re.split(r"(?m)^(?=[*-] |\d+\. )", block)
        else:
            parts = re.split(r"(?<=\D[.])(?=\s)", block)
        left = "".join(part for part in parts if not pattern.search(part))
        kept.append(left.lstrip(" ") if left != block else block)
    return re.sub(r"\n{3,}", "\n\n", "".join(kept)).rstrip("\n") + "\n"


# ---- command line ----------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    """Make the copy, remove unused imports, and put all files into a new git repository."""
    parser = argparse.ArgumentParser(prog="make fork", description="Copy this template for a project of its own.")
    parser.add_argument("target", type=Path)
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--name", default="")
    args = parser.parse_args(argv)
    target = args.target.absolute()
    kept, removed = fork(target, args.tasks, args.name or target.name)
    quiet = {"cwd": target, "check": True, "stdout": subprocess.DEVNULL}
    for words in (["check", "--fix", "--select", "F401,I"], ["format"]):
        subprocess.run([sys.executable, "-m", "ruff", *words, "."], **quiet)
    for words in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", *words], **quiet)
    print(f"{target}: tasks {', '.join(kept)}; {len(removed)} files of other tasks removed.")
    print("Next: cd there, git commit, make setup, make test-fast.")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        sys.exit(f"error: {error}")
