"""Newer engine for a copy, by git: with its tests, the add-ons that the copy has, and the pins and targets that these need.

    make update FROM=folder-or-git-address [REF=tag] [SINCE=commit] [COPY=folder]

git fetches all of FROM into the copy, as refs/template/. What FROM has changed since the commit that the copy came from
(engine/FROM names it, or SINCE) is applied to the files that `is_managed`, by `git apply --3way`; all others stay to the
byte. A file that the copy has deleted stays away. Nothing of FROM runs, but for `train.py --schema` of the copy with the
new engine; nothing is committed. COPY is by default the repository of this file. Exit codes: 0, 1 if something is left to
do by hand, 2 if nothing was changed. Tests: tests/engine/tools/test_update.py.
"""

import argparse
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from engine.config.addresses import path_of_flag
from engine.config.errors import UsageError
from engine.config.paths import REPOSITORY, SCHEMA_FILE
from engine.process.exit_codes import EXIT_FAILED, run_main
from engine.tools import addon_files
from engine.tools.used_names import missing_names

VERSION = "engine/VERSION"
RECORD = "engine/FROM"  # one line: the commit that the copy came from; behind it that of FROM, if FROM is a copy, too
MANIFEST = "engine/MANIFEST"  # of copies of versions before 2.0
FOLDERS = ("engine/", "addons/", "tests/engine/", "tests/addons/", "tests/conformance/", "tests/helpers/", "tests/gpu/")
FOLDERS += ("configs/chat_templates/",)
ADDONS = ("addons/", "tests/addons/")
PINS = ("requirements.txt", "requirements-extra.txt")
FILES = ("tests/__init__.py", "tests/conftest.py", "pyproject.toml", "uv.lock", *PINS)
RECIPES = "tests/conformance/recipes.py"
YOURS = (RECIPES, RECORD, MANIFEST)
SHOWN = ("train.py", "eval.py", "src/", "tests/src/", RECIPES)  # yours, but few change all of it
PIN = re.compile(r"^([\w.-]+)==([^\s;#]+).*\n?", re.M)
ITEM = re.compile(r"\n(?=\n| *[*#|] )")  # paragraphs, list items and lines of tables of CHANGELOG.md
COMMIT = re.compile(r"\b[0-9a-f]{40,64}\b")


def is_managed(name: str) -> bool:
    """Return whether an update looks after a file."""
    return (name.startswith(FOLDERS) or name in FILES) and name not in YOURS


def update(copy: Path, source: str, ref: str = "HEAD", since: str | None = None) -> list[str]:
    """Update the files of the folder `copy`, print what is new, and return a sentence for each thing that is left to do.

    Raise UsageError with all files as they were."""
    check_clean(copy)
    fetch(copy, source)
    top = Path(git(copy, "rev-parse", "--show-toplevel").strip())
    new = commit_of(copy, ref, "REF")
    old = commit_of(copy, since, "SINCE") if since else origin(copy, top, new)
    changed, mine, theirs = changed_files(top, old, new), files_of(copy), files_in(top, new)
    away = files_left_out(copy, top, old, new, changed, mine)
    taken, edited, sentences = choose(changed, mine, away)
    check_line_endings(copy, edited)

    own_code = [name for name in mine if name.endswith(".py") and not (name in theirs and is_managed(name))]
    missing_before = missing_names(copy, own_code) if old != new else {}  # then it says again what is to do
    try:
        sentences += apply(copy, top, old, new, taken)
        for name in {*PINS} & {*changed} & {*mine} - {*taken}:
            sentences += update_pins(copy / name, show(top, old, name), show(top, new, name))
        (copy / RECORD).write_text(" ".join([new, *COMMIT.findall(show(top, new, RECORD))]) + "\n")
        git(copy, "rm", "--quiet", "--force", "--ignore-unmatch", MANIFEST)
        git(copy, "add", "--", RECORD, *({*PINS} & {*mine}))
    except (OSError, UsageError) as error:
        git(copy, "restore", "--source=HEAD", "--staged", "--worktree", "--", ".")
        git(copy, "clean", "-fdq", "--", ".")  # there were no new files before
        raise UsageError(f"the changes cannot be applied; all files are as they were: {error}") from None
    print_news(top, old, new, changed, mine, away)
    for file, names in missing_names(copy, own_code).items():
        if gone := sorted(names - missing_before.get(file, set())):
            sentences.append(f"{file}: gone from the engine: {', '.join(gone)}")
    return sentences


def print_news(top: Path, old: str, new: str, changed: dict, mine: Iterable[str], away: Iterable[str]) -> None:
    """Print what CHANGELOG.md of FROM has got since, files that stay away, and those of the user that FROM has changed."""
    if old == new:
        print(f"Up to date: engine {show(top, new, VERSION).strip()} ({new[:12]})")
        return
    before, after = (ITEM.split(show(top, commit, "CHANGELOG.md")) for commit in (old, new))
    print(*(item for item in after if item not in before), sep="\n")
    print(f"Engine {show(top, old, VERSION).strip()} -> {show(top, new, VERSION).strip()} ({old[:12]} -> {new[:12]})")
    if deleted := sorted(name for name in away if not name.startswith(ADDONS)):
        print(f"Changes of files that this copy does not have, left out: {', '.join(deleted)}")
    yours = [name for name in changed if name.startswith(SHOWN) and (name in mine or changed[name][0] is None)]
    if yours:
        print("The template has changed files of yours, which are as they were. To merge that, after a commit:")
        print(f"  git diff {old[:12]} {new[:12]} -- {' '.join(sorted(yours))} | git apply --3way")


# ---- git -------------------------------------------------------------------------------------------------------------

PLAIN = ("--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")


def run_git(folder: Path, *words: str, patch: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    command = ["git", "--literal-pathspecs", *words]
    return subprocess.run(command, cwd=folder, input=patch, capture_output=True, check=False)


def reason_of(done: subprocess.CompletedProcess[bytes]) -> str:
    return " ".join(done.stderr.decode(errors="replace").split()) or "no message"


def text_of(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return what a command printed, of a file that is not UTF-8 so that writing gives its bytes back."""
    return done.stdout.decode(errors="surrogateescape")


def git(folder: Path, *words: str) -> str:
    """Return what a command printed; raise UsageError if it fails."""
    done = run_git(folder, *words)
    if done.returncode:
        raise UsageError(f"git {' '.join(words[:2])}: {reason_of(done)}")
    return text_of(done)


def show(top: Path, commit: str, name: str) -> str:
    """Return the text of a file in a commit, an empty one if it is not there."""
    return text_of(run_git(top, "show", f"{commit}:{name}"))


def check_clean(copy: Path) -> None:
    """Raise UsageError if git could not take the update back."""
    if run_git(copy, "ls-files", "--error-unmatch", VERSION).returncode:
        raise UsageError(
            f"git does not track {copy / VERSION}: commit the copy first, so that you can review the update"
        )
    if changed := git(copy, "status", "--porcelain", "--", ".").splitlines():
        names = ", ".join(line[3:] for line in changed[:3]) + ", …" * (len(changed) > 3)
        raise UsageError(
            f"git has uncommitted changes or new files ({names}): commit them, or git stash -u, then again"
        )


def fetch(copy: Path, source: str) -> None:
    """Fetch all branches and tags of FROM into the copy, as refs/template/."""
    folder = Path(path_of_flag(source, "FROM"))
    if folder.is_dir() and folder.resolve() == copy.resolve():
        raise UsageError(f"FROM: {source} is this copy: give the folder or the git address of the template")
    address = str(folder.absolute()) if folder.is_dir() else source
    refs = ["+HEAD:refs/template/HEAD"] + [f"+refs/{kind}/*:refs/template/{kind}/*" for kind in ("heads", "tags")]
    done = run_git(copy, "fetch", "--quiet", "--no-tags", "--prune", "--no-recurse-submodules", "--", address, *refs)
    if done.returncode:
        raise UsageError(f"FROM: git cannot fetch {source}: {reason_of(done)}")


def commit_of(copy: Path, name: str, flag: str) -> str:
    """Return the commit of a tag, branch or number of FROM."""
    places = [f"refs/template/{place}{name}" for place in ("tags/", "heads/", "")]
    for place in [*places, *([name] if re.fullmatch("[0-9a-f]{4,64}", name) else [])]:
        done = run_git(copy, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{place}^{{commit}}")
        if not done.returncode:
            return text_of(done).strip()
    words = ("for-each-ref", "--format=%(refname:lstrip=3)", "--sort=-version:refname", "refs/template/tags")
    tags = git(copy, *words).split()
    raise UsageError(f"{flag}: FROM has no tag, branch or commit {name}; tags: {', '.join(tags[:5]) or 'none'}")


def files_of(copy: Path) -> dict[str, str]:
    """Return {path: hash} of the files that git tracks in the copy."""
    lines = git(copy, "ls-files", "--stage", "-z").split("\0")[:-1]
    return {name: info.split()[1] for info, name in (line.split("\t", 1) for line in lines)}


def files_in(top: Path, commit: str) -> list[str]:
    return git(top, "ls-tree", "-r", "-z", "--name-only", commit).split("\0")[:-1]


def changed_files(top: Path, old: str, new: str) -> dict[str, tuple[str | None, str | None]]:
    """Return {path: (hash before, hash after)} of the files that differ; None where there is no file."""
    fields = git(top, "diff-tree", "-r", "-z", "--no-renames", old, new).split("\0")
    changed = {}
    for info, name in zip(fields[:-1:2], fields[1::2], strict=True):
        _, _, before, after, _ = info.split()
        changed[name] = (before if before.strip("0") else None, after if after.strip("0") else None)
    return changed


# ---- where the copy came from ----------------------------------------------------------------------------------------


def origin(copy: Path, top: Path, new: str) -> str:
    """Return the commit that the copy came from; raise UsageError if `new` does not come after it."""
    record = (copy / RECORD).read_text() if (copy / RECORD).exists() else ""
    commits = [each for each in COMMIT.findall(record) if not run_git(copy, "cat-file", "-e", each).returncode]
    if not commits:
        return most_alike(copy, top, new)
    for commit in commits:
        if not run_git(copy, "merge-base", "--is-ancestor", commit, new).returncode:
            return commit
    raise UsageError(
        f"{RECORD}: this copy came from {' '.join(commits)}, and {new} of FROM does not come after it: give a newer REF, or "
        "by SINCE=commit the one of FROM that the engine of this copy is"
    )


def most_alike(copy: Path, top: Path, new: str) -> str:
    """Return the commit of FROM whose files are most like the copy's, of several the oldest, so that no change is missed.

    For a copy of a version before 2.0, or not made by `make fork`, or of a commit that is not in FROM."""
    mine = {name: own for name, own in files_of(copy).items() if is_managed(name)}
    words = ("log", "--first-parent", "-m", "--reverse", "--raw", "--no-abbrev", "--no-renames", "--format=%x01%H")
    score = most = 0
    best = ""
    for block in git(top, "-c", "core.quotePath=false", *words, new).split("\1")[1:]:
        commit, *lines = block.split("\n")
        for info, _, name in (line.partition("\t") for line in lines if line):
            before, after = info.split()[2:4]
            score += (mine.get(name) == after) - (mine.get(name) == before)
        if score > most:
            most, best = score, commit
    if 2 * most < len(mine):
        raise UsageError(
            f"{RECORD} names no commit of FROM, and none is like this copy: give the one that it came from by SINCE=commit"
        )
    print(
        f"{RECORD} names no commit of FROM: as if by SINCE={best}, which has {most} of {len(mine)} files of this copy."
    )
    return best


# ---- what is applied -------------------------------------------------------------------------------------------------


def files_left_out(copy: Path, top: Path, old: str, new: str, changed: Iterable[str], mine: Iterable[str]) -> set[str]:
    """Return the changed files that the copy lacks and does not want: it has deleted them, or the folder in which they are
    new, or they are of an add-on that it has not."""
    old_files = files_in(top, old)
    with tempfile.TemporaryDirectory() as temporary:
        archive = run_git(top, "archive", "--format=tar", new).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            addons = [each for each in files if each.name.startswith(ADDONS)]
            files.extractall(temporary, addons, filter="data")
        template = Path(temporary)
        kept = addon_files.with_needs(template, addon_files.addons_in(copy))
        missing = {*addon_files.addons_in(template)} - {*kept}
        new_files = [name for name in files_in(top, new) if is_managed(name)]
        unwanted = addon_files.of_missing_addons(template, new_files, kept, missing) | {*old_files}
    for name in changed:
        folder = f"{PurePosixPath(name).parent}/"
        if name.startswith(ADDONS):
            continue
        if any(each.startswith(folder) for each in old_files) and not any(each.startswith(folder) for each in mine):
            unwanted.add(name)
    return {name for name in changed if is_managed(name) and name in unwanted and name not in mine}


def choose(changed: dict, mine: dict[str, str], away: set[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the files whose changes are applied, those of them that the copy has edited, and a sentence for each that the
    copy has edited and FROM has deleted."""
    taken, edited, sentences = [], [], []
    for name, (before, after) in sorted(changed.items()):
        own = mine.get(name)
        is_edited = own not in (before, after)
        if own == after or not is_managed(name) or name in away or (name in PINS and is_edited):
            continue
        if after is None and is_edited:
            sentences.append(f"{name}: you have edited it, the new version has deleted it; your file stays")
        else:
            taken.append(name)
            edited += [name] * is_edited
    return taken, edited, sentences


def check_line_endings(copy: Path, names: list[str]) -> None:
    """Raise UsageError for Windows line endings in git: each line would differ."""
    lines = git(copy, "ls-files", "--eol", "-z", "--", *names).split("\0") if names else []
    if windows := [line.split("\t")[1] for line in lines if line.startswith(("i/crlf", "i/mixed"))]:
        raise UsageError(
            f"{', '.join(windows)}: git holds Windows line endings, so that each line differs: put `* text=auto eol=lf` into "
            ".gitattributes, git add --renormalize ., git commit, then again"
        )


def apply(copy: Path, top: Path, old: str, new: str, names: list[str]) -> list[str]:
    """Apply what has changed in these files; return a sentence for each conflict. Raise UsageError if git cannot."""
    if not names:
        return []
    words = ("diff-tree", "-r", "-p", "--binary", "--full-index", *PLAIN)
    patch = run_git(top, *words, old, new, "--", *names).stdout
    prefix = git(copy, "rev-parse", "--show-prefix").strip()
    done = run_git(top, "apply", "--3way", "--whitespace=nowarn", f"--directory={prefix}", patch=patch)
    conflicts = git(copy, "diff", "--name-only", "--relative", "--diff-filter=U", "-z").split("\0")[:-1]
    if done.returncode and not conflicts:
        raise UsageError(reason_of(done))
    return [f"{name}: both of you have changed it: resolve it as after a git merge" for name in conflicts]


def update_pins(file: Path, old: str, new: str) -> list[str]:
    """Write the new pins into requirements that the copy has edited; return a sentence for each pin that both changed.

    Pins that the copy has added, changed or removed stay so."""
    text = file.read_bytes().decode(errors="surrogateescape")
    before, after, mine = (dict(PIN.findall(each)) for each in (old, new, text))
    lines = {match[1]: match[0] for match in PIN.finditer(new)}
    sentences = []
    for name in before | after:
        was, now, own = before.get(name), after.get(name), mine.get(name)
        if now in (was, own):
            continue
        if own == was is None:
            text = f"{text.rstrip()}\n{lines[name]}"
        elif own == was:
            text = re.sub(rf"^{re.escape(name)}==.*\n?", lines.get(name, ""), text, flags=re.M)
        elif own:
            sentences.append(f"{file.name}: your {name}=={own} stays, the new version has {now or 'removed it'}")
    file.write_bytes(text.encode(errors="surrogateescape"))
    return sentences


def write_schema(copy: Path) -> list[str]:
    """Write configs/schema.json from the fields of the new engine and of the copy; return a sentence if that fails."""
    name = SCHEMA_FILE.relative_to(REPOSITORY)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "train.py", "--schema"], cwd=copy, env=env, capture_output=True, check=False)
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip() or "no message").splitlines()[-1]
        return [f"{name}: it is as it was, because train.py --schema fails; later, make schema: {last}"]
    (copy / name).write_bytes(done.stdout)
    git(copy, "add", "--", str(name))
    return []


def main(argv: list[str]) -> None:
    """Update a copy; end with 1 if something is left to do."""
    parser = argparse.ArgumentParser(prog="make update", description="Bring the engine of a copy up to date.")
    parser.add_argument("source", metavar="FROM")
    parser.add_argument("--ref", metavar="REF", default="HEAD")
    parser.add_argument("--since", metavar="SINCE")
    parser.add_argument("--copy", metavar="COPY", default=REPOSITORY, type=Path)
    args = parser.parse_args(argv)
    copy = Path(path_of_flag(str(args.copy), "COPY"))
    sentences = update(copy, args.source, args.ref, args.since)
    sys.stdout.flush()  # before code of the new engine runs
    sentences += write_schema(copy)
    for sentence in sentences:
        print(f"TO DO {sentence}")
    first = "do what stands above; " if sentences else ""
    print(f"Next: {first}git diff HEAD; make lint, make test-fast and make smoke; then git commit --all.")
    print("Nothing is committed: git reset --hard takes all back.")
    if sentences:
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    run_main(main)
