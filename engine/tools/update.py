"""Newer engine for a copy: with its tests, the add-ons that the copy has, and the pins and targets that these need.

    make update FROM=folder-or-git-address [REF=tag]

FROM is the template: a folder, as it stands there, or what git clones; REF is a tag, branch or commit of it. What a copy
owns stays: train.py, eval.py, src/, configs/ (but configs/chat_templates/), docs/, README.md, tests/src/ and files that
it has added. Of the rest, a file that the copy has not edited (it has its hash in engine/MANIFEST) is replaced or
deleted, an edited one is merged, and one that the copy has deleted stays away. Nothing of FROM runs, but for `train.py
--schema` of the copy with the new engine; nothing is committed. Exit codes: 0, 1 if something is left to do by hand, 2.
Tests: tests/engine/tools/test_update.py.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from engine.config.errors import UsageError
from engine.config.paths import REPOSITORY, SCHEMA_FILE, path_of_flag
from engine.process.exit_codes import EXIT_FAILED, run_main
from engine.tools import addon_files
from engine.tools.manifest import MANIFEST, PINS, VERSION, engine_files, hashes, manifest_text, read_manifest

PIN = re.compile(r"^([\w.-]+)==([^\s;#]+)", re.M)
LOCK = "uv.lock"


@dataclass
class Changes:
    """What an update writes and deletes, and what the user has to know. Nothing is written while it is found out."""

    texts: dict[str, bytes] = field(default_factory=dict)  # path -> new text
    deleted: list[str] = field(default_factory=list)
    merged: list[str] = field(default_factory=list)
    away: list[str] = field(default_factory=list)  # the copy has deleted them
    own: list[str] = field(default_factory=list)  # the copy has added them to engine/
    addons: list[str] = field(default_factory=list)  # they were delivered, and FROM lacks them
    executable: set[str] = field(default_factory=set)
    pins: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)  # a sentence each


def update(copy: Path, source: str, ref: str | None) -> Changes:
    """Update the files of the folder `copy`, print what is new, and return what was done.

    Raise UsageError before anything is written."""
    with tempfile.TemporaryDirectory() as temporary:
        before = version_of(copy, "this copy")
        check_git(copy)
        template = fetch(source, ref, copy, Path(temporary))
        after = version_of(template, "FROM")
        if after < before:
            raise UsageError(
                f"FROM has version {show(after)}, this copy {show(before)}: to take an update back, use git revert"
            )
        check_template(template)
        try:
            news = news_between(template / "CHANGELOG.md", before, after)
            changes = find_changes(copy, template, lambda known: find_text(known, copy, template))
        except OSError as error:
            raise UsageError(f"{error.filename}: {error.strerror}; nothing was written") from None
    write(copy, changes)
    print(f"Engine {show(before)} -> {show(after)}\n\n{news}")
    return changes


# ---- before anything is written --------------------------------------------------------------------------------------


def version_of(folder: Path, what: str) -> tuple[int, ...]:
    """Return the version in engine/VERSION."""
    file = folder / VERSION
    if not file.exists():
        raise UsageError(
            f"{what} has no {VERSION}: it is of the layout before engine/ and src/, or another project "
            "(docs/forking.md, Update, says how to bring tasks over)"
        )
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(r"\d+(\.\d+)*", text):
        raise UsageError(f"{what}: {VERSION} holds {text!r}, not a version such as 1.0.0")
    return tuple(map(int, text.split(".")))


def show(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def git(folder: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, check=False)


def check_git(copy: Path) -> None:
    """Raise UsageError if git could not take the update back."""
    if git(copy, "ls-files", "--error-unmatch", VERSION).returncode:
        raise UsageError(
            f"git does not track {copy / VERSION}: commit the copy first, so that you can review the update"
        )
    changed = git(copy, "status", "--porcelain", "--", ".").stdout.decode(errors="replace").splitlines()
    if changed:
        shown = ", ".join(line[3:] for line in changed[:3]) + ", …" * (len(changed) > 3)
        raise UsageError(
            f"git has uncommitted changes or new files ({shown}): commit them, or git stash -u, then again"
        )


def check_template(template: Path) -> None:
    """Raise UsageError if FROM is not whole: what it lacks would count as deleted by the new version."""
    if not (template / MANIFEST).exists():
        raise UsageError(f"FROM has no {MANIFEST}: it is not the template; nothing was written")
    names = {"train.py", VERSION, *read_manifest(template)}
    missing = sorted(name for name in names if not (template / name).is_file())
    if missing:
        shown = ", ".join(missing[:3]) + ", …" * (len(missing) > 3)
        raise UsageError(
            f"FROM lacks files that its {MANIFEST} lists ({shown}): give the whole template, not a copy of which parts "
            "were removed; nothing was written"
        )


def fetch(source: str, ref: str | None, copy: Path, temporary: Path) -> Path:
    """Return the folder of the template: `source` itself, or a clone of it at `ref`."""
    folder = Path(path_of_flag(source, "FROM"))
    if folder.is_dir() and not ref:
        if folder.resolve() == copy.resolve():
            raise UsageError(f"FROM: {source} is this copy: give the folder or the git address of the template")
        if (folder / ".git").exists() or not (folder / "HEAD").exists():  # else a bare repository: cloned below
            return folder.absolute()
    address, clone = str(folder.absolute()) if folder.is_dir() else source, temporary / "template"
    done = git(temporary, "clone", "--quiet", "--no-checkout", "--", address, str(clone))
    if done.returncode:
        raise UsageError(f"FROM: {source} is no folder, and git cannot clone it: {one_line(done.stderr)}")
    name, commit = ref or "HEAD", None
    for spelled in (name, f"origin/{name}"):  # a branch is only there by its remote's name
        found = git(clone, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{spelled}^{{commit}}")
        commit = commit or found.stdout.decode().strip()
    if not commit:
        tags = git(clone, "tag", "--list", "--sort=-version:refname").stdout.decode().split()
        raise UsageError(f"REF: {source} has no tag, branch or commit {ref}; tags: {', '.join(tags[:5]) or 'none'}")
    done = git(clone, "checkout", "--quiet", "--detach", commit)
    if done.returncode:
        raise UsageError(f"REF: git cannot check out {ref or commit}: {one_line(done.stderr)}")
    return clone


def one_line(text: bytes) -> str:
    return " ".join(text.decode(errors="replace").split()) or "no message"


def last_line(text: bytes) -> str:
    return (text.decode(errors="replace").strip() or "no message").splitlines()[-1]


def news_between(changelog: Path, before: tuple[int, ...], after: tuple[int, ...]) -> str:
    """Return the sections of CHANGELOG.md for the versions after `before`, up to `after`."""
    text = changelog.read_text(encoding="utf-8", errors="replace") if changelog.exists() else ""
    sections = {}
    for section in re.split(r"^(?=## )", text, flags=re.M)[1:]:
        if number := re.match(r"## v?(\d+(?:\.\d+)*)", section):
            sections[tuple(map(int, number[1].split(".")))] = section
    news = [text for version, text in sections.items() if before < version <= after]
    return "".join(news) or "CHANGELOG.md of FROM has no newer section.\n"


# ---- three sides of each file ----------------------------------------------------------------------------------------


def find_text(known: str, *folders: Path) -> bytes | None:
    """Return the text with this hash from the history of one of these folders, or None.

    A copy's first commit has the files as they were delivered, and a clone of the template all their versions."""
    for folder in folders:
        done = git(folder, "cat-file", "blob", known)
        if not done.returncode:
            return done.stdout
    return None


def find_changes(copy: Path, template: Path, ancestor: Callable[[str], bytes | None]) -> Changes:
    """Compare the copy, the template, and what the copy's MANIFEST says was delivered; return what has to change."""
    base, ours, theirs = read_manifest(copy), engine_files(copy), engine_files(template)
    ours_by_hash, theirs_by_hash = hashes(ours), hashes(theirs)
    check_no_open_conflict(ours)
    changes = Changes(addons=addons_that_from_lacks(copy, template, base))
    unwanted = not_wanted(copy, template, theirs)
    stay = {name for name in ours.keys() - theirs.keys() if serves_one_of(name, changes.addons)}
    for name in sorted({*base, *ours, *theirs} - stay):
        is_new = name not in base and name not in ours
        if is_new and name in unwanted:
            continue
        here, there, known = ours_by_hash.get(name), theirs_by_hash.get(name), base.get(name)
        if here == there:
            continue
        if here is None and known:
            changes.away += [name] * (there != known)
        elif here == known and there:
            if name in PINS:  # for the list of pins
                merge(changes, name, ours[name], theirs[name], ours[name], is_known=True)
            changes.texts[name] = theirs[name]
        elif here == known:
            changes.deleted.append(name)
        elif there is None and known is None:
            changes.own.append(name)
        elif there is None:
            changes.conflicts.append(f"{name}: you have edited it, the new version has deleted it; your file stays")
        elif there != known:
            delivered_text = ancestor(known) if known else None
            merge(changes, name, ours[name], theirs[name], delivered_text, is_known=bool(known))
    delivered = {name for name in theirs if name in base or name in ours or name in changes.texts}
    lines = {name: theirs_by_hash[name] for name in delivered}
    lines |= {name: base[name] for name in stay if name in base}
    changes.executable = {name for name in theirs if os.access(template / name, os.X_OK)}
    changes.texts[MANIFEST] = manifest_text(lines).encode()
    changes.own = [name for name in changes.own if name.startswith("engine/")]
    changes.away = [name for name in changes.away if name in theirs and name not in unwanted]
    return changes


def not_wanted(copy: Path, template: Path, theirs: dict[str, bytes]) -> set[str]:
    """Return the files of the template that belong to add-ons that the copy lacks."""
    here = addon_files.addons_in(copy)
    missing = set(addon_files.addons_in(template)) - {*here}
    return addon_files.of_missing_addons(template, theirs, here, missing)


def addons_that_from_lacks(copy: Path, template: Path, base: dict[str, str]) -> list[str]:
    """Return the add-ons of the copy that were delivered and are not in FROM, which may be a copy without them."""
    missing = sorted({*addon_files.addons_in(copy)} - {*addon_files.addons_in(template)})
    delivered = {part for name in base for part in (name, *map(str, PurePosixPath(name).parents))}
    return [name for name in missing if {f"addons/{name}", f"addons/{name}.py"} & delivered]


def serves_one_of(name: str, addons: list[str]) -> bool:
    """Return whether a file stands in the room of one of these add-ons or of its tests, or beside the rooms."""
    in_room = re.match(r"(?:tests/)?addons/(?:([^/]+)/)?", name)
    if not in_room or not addons:
        return False
    return in_room[1] is None or in_room[1] in addon_files.with_rooms(addons)


def check_no_open_conflict(ours: dict[str, bytes]) -> None:
    """Raise UsageError for a NAME.new of an earlier update."""
    for name in ours:
        if name.endswith(".new") and name.removesuffix(".new") in ours:
            old = name.removesuffix(".new")
            raise UsageError(f"{name} is an open conflict of an earlier update: bring it into {old}, delete it, commit")


def decode(text: bytes, file: str) -> str:
    """Return the text of a file; raise UsageError if it is not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        line = text[: error.start].count(b"\n") + 1
        raise UsageError(f"{file}, line {line}: byte {text[error.start]:#x} is not UTF-8: save it as UTF-8") from None


def merge(changes: Changes, name: str, ours: bytes, theirs: bytes, base: bytes | None, is_known: bool) -> None:
    """Merge a file that both sides have changed since `base`, the text that was delivered.

    `base` is None if nobody has that text any more, or if the file was never delivered: then `is_known` is False."""
    if name in PINS:
        own, new = decode(ours, f"{name} of this copy"), decode(theirs, f"{name} of FROM")
        old = base.decode(errors="replace") if base is not None else None
        text, lines, conflicts = merge_pins(own, new, old)
        changes.texts[name] = text.encode()
        changes.pins += [f"{name}: {line}" for line in lines]
        changes.conflicts += [f"{name}: {line}" for line in conflicts]
    elif name == LOCK:
        changes.conflicts.append(f"{LOCK}: you have edited it; your file stays: run make lock, or uv lock")
    elif merged := merge_texts(ours, base, theirs):
        changes.texts[name], conflicts = merged
        changes.merged.append(name)
        if conflicts:
            changes.conflicts.append(f"{name}: both of you have changed the same lines; look for <<<<<<< in it")
    else:
        changes.texts[f"{name}.new"] = theirs
        if not is_known:
            why = "you have added it, and so has the new version"
        elif base is None:
            why = "both of you have changed it, and its text as delivered is in neither history"
        else:
            why = "both of you have changed it, and git cannot merge it, as a binary file"
        changes.conflicts.append(f"{name}: {why}; your file stays, the new one is {name}.new")


def merge_texts(ours: bytes, base: bytes | None, theirs: bytes) -> tuple[bytes, int] | None:
    """Return the text that `git merge-file` makes, and its number of conflicts; None if it cannot, as without `base`."""
    if base is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("ours", ours), ("base", base), ("theirs", theirs)):
            (Path(folder) / name).write_bytes(text)
        labels = ["-L", "this copy", "-L", "as delivered", "-L", "new version"]
        done = git(Path(folder), "merge-file", "-p", *labels, "ours", "base", "theirs")
    return (done.stdout, done.returncode) if done.returncode <= 127 else None


def merge_pins(ours: str, theirs: str, base: str | None) -> tuple[str, list[str], list[str]]:
    """Return a copy's requirements with the new pins, a line for each that changes, and one for each conflict.

    Pins that the copy has added, changed alone or removed stay so. Without `base`, the new pins count."""
    new, own = dict(PIN.findall(theirs)), dict(PIN.findall(ours))
    old = dict(PIN.findall(base)) if base is not None else {name: own[name] for name in own if name in new}
    versions, lines, conflicts = dict(own), [], []
    for name in [*old, *(each for each in new if each not in old)]:
        mine, wanted, known = own.get(name), new.get(name), old.get(name)
        if wanted == known or mine == wanted:
            continue
        if mine == known:
            versions[name] = wanted
            lines.append(f"{name} {mine or 'new'} -> {wanted or 'removed'}")
        elif mine is None:
            continue  # the copy has removed it
        else:
            conflicts.append(f"your {name}=={mine} stays, the new version has {wanted or 'removed it'}")
    kept = []
    for line in ours.splitlines(keepends=True):
        pin = PIN.match(line)
        if not pin:
            kept.append(line)
        elif versions[pin[1]]:
            kept.append(line.replace(f"=={pin[2]}", f"=={versions[pin[1]]}", 1))
    text = "".join(kept)
    for line in theirs.splitlines():
        pin = PIN.match(line)
        if pin and pin[1] in versions and pin[1] not in own:
            text = f"{text.rstrip()}\n{line}\n"
    return text, lines, conflicts


# ---- writing ---------------------------------------------------------------------------------------------------------


def write(copy: Path, changes: Changes) -> None:
    """Write and delete files; raise UsageError if that fails, with all files as they were.

    If this is killed, `git stash -u` takes back what was done."""
    names = [*changes.deleted, *changes.texts]
    before = {name: (copy / name).read_bytes() for name in names if (copy / name).is_file()}
    modes = {name: (copy / name).stat().st_mode for name in before}
    name = ""  # of the file that is being written
    try:
        for name in changes.deleted:
            (copy / name).unlink()
            remove_empty(copy, (copy / name).parent)
        for name, text in changes.texts.items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(text)
            if name in changes.executable:
                (copy / name).chmod((copy / name).stat().st_mode | 0o111)
    except OSError as error:
        outcome = take_back(copy, [name for name in names if name not in before], before, modes)
        raise UsageError(f"{error.filename or copy / name}: {error.strerror}; {outcome}") from None


def take_back(copy: Path, new: list[str], before: dict[str, bytes], modes: dict[str, int]) -> str:
    """Delete the files `new` and write those of `before`; return a sentence on the outcome."""
    try:
        for name in new:  # these first, since the disk may be full
            if (copy / name).is_file():
                (copy / name).unlink()
            remove_empty(copy, (copy / name).parent)
        for name, text in before.items():
            if not (copy / name).exists() or (copy / name).read_bytes() != text:
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                (copy / name).write_bytes(text)
                (copy / name).chmod(modes[name])
    except OSError as error:
        return f"nor could it be taken back ({error.strerror}): git checkout . && git clean -fd does that"
    return "all files are as they were: fix this, then again"


def remove_empty(copy: Path, folder: Path) -> None:
    """Remove a folder, and those above it, if nothing but compiled files is left: it would look like a room of add-ons."""
    while not folder.is_dir():
        folder = folder.parent
    while folder != copy and not [path for path in folder.iterdir() if path.name != "__pycache__"]:
        shutil.rmtree(folder)
        folder = folder.parent


def write_schema(copy: Path) -> list[str]:
    """Write configs/schema.json from the fields of the new engine and of the copy; return a sentence if that fails."""
    file = copy / SCHEMA_FILE.relative_to(REPOSITORY)
    if file.is_symlink() or file.parent.is_symlink():
        return [f"{file}: it is as it was, because it is a link: put the file there, then make schema"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "train.py", "--schema"], cwd=copy, env=env, capture_output=True, check=False)
    name = SCHEMA_FILE.relative_to(REPOSITORY)
    if done.returncode:
        return [
            f"{name}: it is as it was, because train.py --schema fails; later, make schema: {last_line(done.stderr)}"
        ]
    file.write_bytes(done.stdout)
    return []


def report(changes: Changes) -> None:
    """Print what was done, and the conflicts."""
    written = {*changes.texts} - {MANIFEST, *changes.merged, *PINS}
    print(f"Replaced or added: {len(written)} files. Deleted: {', '.join(changes.deleted) or 'none'}.")
    for title, names in {
        "Merged with your edits": changes.merged,
        "Pins": changes.pins,
        "Yours in engine/, which stay": changes.own,
        "Add-ons that FROM lacks, left alone (delete them if the news above says so)": changes.addons,
        "New versions of files that you have deleted, left away": changes.away,
    }.items():
        if names:
            print(f"{title}: {', '.join(names)}")
    print_conflicts(changes.conflicts)


def print_conflicts(sentences: list[str]) -> None:
    for sentence in sentences:
        print(f"CONFLICT {sentence}")
    sys.stdout.flush()


def print_next(has_conflicts: bool) -> None:
    """Print what to do now: code with marks of a conflict does not even run."""
    first = "resolve the conflicts above (git grep -n '^<<<<<<<' shows those in files); " if has_conflicts else ""
    print(f"Nothing is committed. Next: {first}git diff; make lint, make test-fast and make smoke; then git commit.")


def main(argv: list[str]) -> None:
    """Update this copy; end with 1 if there are conflicts."""
    parser = argparse.ArgumentParser(prog="make update", description="Bring the engine of this copy up to date.")
    parser.add_argument("source", metavar="FROM")
    parser.add_argument("--ref", metavar="REF")
    args = parser.parse_args(argv)
    changes = update(REPOSITORY, args.source, args.ref)
    report(changes)  # before code of the new engine runs, which could be killed
    failures = write_schema(REPOSITORY)
    print_conflicts(failures)
    has_conflicts = bool(changes.conflicts or failures)
    print_next(has_conflicts)
    if has_conflicts:
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    run_main(main)
