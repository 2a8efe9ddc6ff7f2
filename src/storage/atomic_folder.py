"""Atomic folders: write beside the target, fsync, hash, rename, verify.

Tests: tests/storage/test_atomic_folder.py. Knows nothing of what is in the files.
"""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash

from src.storage.held_folder import check_held

MANIFEST = "manifest.json"
CHUNK = 1 << 22


def publish(folder: Path, write: Callable[[Path], dict | None], **about) -> None:
    """Leave `folder` with what `write(temporary folder)` wrote and a manifest of it, or as it was.

    `write` may return entries of files that others have written, flushed and hashed.

    The temporary folder stands beside it, so the rename that makes it visible is one operation of the file system. All
    files are on the disk before that, the manifest last. OSError leaves nothing behind; a kill leaves a folder whose
    name begins with a dot, which nobody reads and the next call removes."""
    temporary, old = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "old"))
    check_held(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)  # a kill between the two renames below
    for left in (temporary, old):
        shutil.rmtree(left, ignore_errors=True)
    try:
        parents = [
            p.parent for p in (folder.parent, *folder.parent.parents) if not p.exists()
        ]  # of folders that mkdir makes
        temporary.mkdir(parents=True)
        known = write(temporary) or {}
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        _follow_umask(files, temporary)
        found = {
            name: known.get(name) or hash_file(path) for path in files if (name := str(path.relative_to(temporary)))
        }
        files = [path for path in files if path.name not in known]
        body = {"hash": "xxh3_128", "about": about, "files": found}
        (temporary / MANIFEST).write_text(json.dumps(body | {"manifest": _digest(body)}, indent=1))
        for path in [*files, temporary / MANIFEST, *(p for p in temporary.rglob("*") if p.is_dir()), temporary]:
            fsync(path)
        check_held(folder)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        for parent in (folder.parent, *parents):
            fsync(parent)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(temporary, ignore_errors=True)  # gives the space back that ran out
        raise
    shutil.rmtree(old, ignore_errors=True)


def _follow_umask(files: list[Path], folder: Path) -> None:
    """Give `files` the permissions of any new file: safetensors creates its own with 0600. The mode of the new `folder` tells
    the umask, which cannot be read without changing it for all threads."""
    mode = folder.stat().st_mode & 0o666
    for path in files:
        if path.stat().st_mode & 0o777 != mode:
            with suppress(PermissionError):  # a file system without modes
                path.chmod(mode)


def remove_leftovers(parent: Path) -> None:
    """Put back what a kill left between the two renames of `publish`, and remove what it left unfinished.

    Only for who holds the run: nothing is being published in there."""
    for left in parent.glob(".*.old"):
        folder = parent / left.name[1:].removesuffix(".old")
        shutil.rmtree(left, ignore_errors=True) if folder.exists() else left.rename(folder)
    for left in (*parent.glob(".*.tmp"), *parent.glob(".*.parts")):
        shutil.rmtree(left, ignore_errors=True)


def verify(folder: Path) -> list[str]:
    """Return why the contents of `folder` are not what `publish` wrote, each naming its file; nothing if they are.

    Reads every byte once. Of files that the manifest does not list, tensors are a fault, since they might be read instead."""
    try:
        body = json.loads((folder / MANIFEST).read_bytes())
        stated = body.pop("manifest")
        if stated != _digest(body):
            return [f"{MANIFEST}: its hash is not the one that was written"]
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        return [f"{MANIFEST} cannot be read: {' '.join(str(error).split())[:200]}"]
    found = [fault for name, written in body["files"].items() if (fault := _file_error(folder, name, written))]
    stray = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in body["files"])
    return found + [f"{name} is of no part of it: remove it" for name in stray]


def read_metadata(folder: Path) -> dict:
    """Return what `publish` was told about a folder; nothing where there is no manifest."""
    try:
        return json.loads((folder / MANIFEST).read_bytes())["about"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _file_error(folder: Path, name: str, written: dict) -> str | None:
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts or (path.exists() and not path.is_file()):
        return f"{name} is not a file of this folder"
    try:
        size = path.stat().st_size
        if size != written["size"]:
            return f"{name} has {size:,} bytes, {written['size']:,} were written"
        return None if hash_file(path) == written else f"{name}: its hash is not the one that was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"


def hash_file(path: Path) -> dict:
    """Return size and hash of a file. Not cryptographic: it finds damage at the speed of memory, not malice."""
    digest, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return {"size": size, "xxh3_128": digest.hexdigest()}


def _digest(body: dict) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def fsync(path: Path) -> None:
    """Return when the disk has what was written to a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rewrite(path: Path, text: str) -> None:
    """Replace a file's contents all at once: who reads it, or is killed, finds the old text or the new."""
    check_held(path)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # a symlink there would lead elsewhere
    temporary.write_text(text, encoding="utf-8")
    fsync(temporary)
    temporary.replace(path)
