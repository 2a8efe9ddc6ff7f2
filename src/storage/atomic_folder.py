"""Atomic folders: write beside the target, fsync, hash, rename, verify.

Tests: tests/storage/test_atomic_folder.py. Knows nothing about the contents of the files.
"""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash

from src.storage.lost_run_folder import check_held

MANIFEST = "manifest.json"
CHUNK = 1 << 22

# ---- write -------------------------------------------------------------------------------------------------------------


def publish(folder: Path, write: Callable[[Path], dict | None], **metadata) -> None:
    """Leave in `folder` what `write(temporary folder)` wrote and a manifest of it, or leave it as it was.

    `write` may return manifest entries of files that other processes have written, flushed and hashed.

    The temporary folder stands beside the target, so one rename makes it visible. All files are on the disk before that,
    the manifest last. OSError leaves nothing behind; a kill leaves a folder whose name begins with a dot, which is never
    read and which the next call removes."""
    temporary, old = (folder.with_name(f".{folder.name}.{ending}") for ending in ("tmp", "old"))
    check_held(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)  # a kill came between the two renames below
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    new_folders = [path for path in (folder.parent, *folder.parent.parents) if not path.exists()]
    try:
        temporary.mkdir(parents=True)
        _write_manifest(temporary, write(temporary) or {}, metadata)
        check_held(folder)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        for parent in (folder.parent, *(path.parent for path in new_folders)):
            fsync(parent)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(temporary, ignore_errors=True)  # frees the space on a full disk
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write_manifest(folder: Path, known: dict[str, dict], metadata: dict) -> None:
    """Hash the files that are not `known`, write the manifest, and wait until the disk has all of it."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    _follow_umask(list(files.values()), folder)
    entries = {name: known.get(name) or hash_file(path) for name, path in files.items()}
    body = {"hash": "xxh3_128", "about": metadata, "files": entries}
    (folder / MANIFEST).write_text(json.dumps(body | {"manifest": _digest(body)}, indent=1))
    for path in [path for name, path in files.items() if name not in known]:
        fsync(path)
    fsync(folder / MANIFEST)
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        fsync(path)


def _follow_umask(files: list[Path], folder: Path) -> None:
    """Give `files` the permissions of any new file; safetensors creates its own with 0600.

    The mode of the new `folder` shows the umask, which cannot be read without changing it for all threads."""
    mode = folder.stat().st_mode & 0o666
    for path in files:
        if path.stat().st_mode & 0o777 != mode:
            with suppress(PermissionError):  # a file system without modes
                path.chmod(mode)


def remove_leftovers(parent: Path) -> None:
    """Restore the folder that a kill moved away between the two renames of `publish`, and remove unfinished folders.

    Only for the process that has locked the run: nothing is being published in `parent`."""
    for old in parent.glob(".*.old"):
        folder = parent / old.name[1:].removesuffix(".old")
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(folder)
    for unfinished in (*parent.glob(".*.tmp"), *parent.glob(".*.parts")):
        shutil.rmtree(unfinished, ignore_errors=True)


def rewrite(path: Path, text: str) -> None:
    """Replace a file's contents in one step: a reader, or a kill, finds the old text or the new one."""
    check_held(path)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # a symlink there would lead elsewhere
    temporary.write_text(text, encoding="utf-8")
    fsync(temporary)
    temporary.replace(path)


def fsync(path: Path) -> None:
    """Return when the disk has what was written to a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- read --------------------------------------------------------------------------------------------------------------


def verify(folder: Path) -> list[str]:
    """Return what in `folder` is not as `publish` wrote it, one sentence a file; reads every byte.

    Files that the manifest does not list are allowed, except safetensors, which might be read instead of the listed ones."""
    try:
        body = json.loads((folder / MANIFEST).read_bytes())
        stated = body.pop("manifest")
        if stated != _digest(body):
            return [f"{MANIFEST}: its hash is not the one that was written"]
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        return [f"{MANIFEST} cannot be read: {' '.join(str(error).split())[:200]}"]
    errors = [_file_error(folder, name, entry) for name, entry in body["files"].items()]
    extra = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in body["files"])
    return [error for error in errors if error] + [f"{name} does not belong to it: remove it" for name in extra]


def _file_error(folder: Path, name: str, entry: dict) -> str | None:
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts or (path.exists() and not path.is_file()):
        return f"{name} is not a file of this folder"
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            return f"{name} has {size:,} bytes, {entry['size']:,} were written"
        return None if hash_file(path) == entry else f"{name}: its hash is not the one that was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"


def read_manifest(folder: Path) -> dict:
    """Return the manifest of a folder, not verified; an empty one if there is none."""
    try:
        body = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def read_metadata(folder: Path) -> dict:
    """Return the metadata that `publish` was given for a folder; nothing if there is no manifest."""
    return read_manifest(folder).get("about", {})


def hash_file(path: Path) -> dict:
    """Return the manifest entry of a file: size and hash. Not cryptographic: it finds damage, not malice."""
    digest, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return {"size": size, "xxh3_128": digest.hexdigest()}


def _digest(body: dict) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
