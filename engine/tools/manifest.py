"""engine/MANIFEST: a hash of each file that `make update` brings to copies, so that it knows which ones a copy has edited.

    make manifest

A hash is git's own of the text (`git hash-object FILE`): a repository gives back the text by `git cat-file blob HASH`.
Only the template writes it, and `make fork` for the files that it copies. Tests: tests/engine/tools/test_update.py.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from engine.config.errors import UsageError
from engine.config.paths import REPOSITORY
from engine.process.exit_codes import run_main

VERSION, MANIFEST = "engine/VERSION", "engine/MANIFEST"
FOLDERS = ("engine", "addons", "tests/engine", "tests/addons", "tests/conformance", "tests/helpers", "tests/gpu")
FOLDERS += ("configs/chat_templates",)
PINS = ("requirements.txt", "requirements-extra.txt")  # merged pin by pin
FILES = ("tests/__init__.py", "tests/conftest.py", "pyproject.toml", "uv.lock", *PINS)
YOURS = ("tests/conformance/recipes.py",)  # data for the tests of src/tasks


def git_hash(text: bytes) -> str:
    """Return the hash by which git knows a file with this text."""
    return hashlib.sha1(b"blob %d\0" % len(text) + text, usedforsecurity=False).hexdigest()


def engine_files(folder: Path) -> dict[str, bytes]:
    """Return {path: text} of the files in a copy, or in the template, that `make update` looks after.

    Raise UsageError for a link: what it points to may be anywhere."""
    tops = [folder / name for name in (*FOLDERS, *FILES)]
    above = {parent for top in tops for parent in top.parents if parent.is_relative_to(folder) and parent != folder}
    paths = [path for top in tops for path in (top, *top.rglob("*"))]
    texts = {}
    for path in sorted({*above, *paths}):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise UsageError(f"{path} is a link: make update takes and replaces files only; put what it names there")
        if path.is_file() and path.parent.name != "__pycache__" and name not in (MANIFEST, *YOURS):
            texts[name] = with_unix_lines(path.read_bytes())
    return texts


def with_unix_lines(text: bytes) -> bytes:
    """Return a text with the line endings that git stores, as .gitattributes says; what is binary unchanged."""
    return text if b"\0" in text else text.replace(b"\r\n", b"\n")


def hashes(texts: Mapping[str, bytes]) -> dict[str, str]:
    return {name: git_hash(text) for name, text in texts.items()}


def manifest_text(lines: Mapping[str, str]) -> str:
    """Return the text of a MANIFEST with these {path: hash}."""
    return "".join(f"{lines[name]}  {name}\n" for name in sorted(lines))


def read_manifest(folder: Path) -> dict[str, str]:
    """Return {path: hash} of engine/MANIFEST in a copy; raise UsageError if it is not there or damaged."""
    file = folder / MANIFEST
    try:
        pairs = [line.split("  ", 1) for line in file.read_text(encoding="utf-8").splitlines()]
        return {name: known for known, name in pairs}
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} is not readable ({error}): restore it by git checkout {MANIFEST}") from None


def write_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text(manifest_text(hashes(engine_files(folder))), encoding="utf-8")


def main(argv: list[str]) -> None:
    """Write the MANIFEST of the template."""
    if not (REPOSITORY / "tests" / "project").exists():
        raise UsageError(
            "make manifest is for the template only: in a copy, it would take your edits for the template's text"
        )
    write_manifest(REPOSITORY)


if __name__ == "__main__":
    run_main(main)
