"""Atomic folders and files: write beside the target, fsync, hash, rename.

Tests: tests/engine/storage/test_atomic_folder.py. This file does not depend on the contents of the files.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.storage.verify_hashes import MANIFEST, manifest_text


def publish(folder: Path, write: Callable[[Path], dict | None], **metadata) -> None:
    """Publish in `folder` what `write(temporary folder)` writes, and a manifest; on an error leave `folder` unchanged.

    `write` may return manifest entries of files that other processes have written, flushed and hashed."""
    with temporary_folder(folder) as temporary:
        entries = write(temporary) or {}
        put_in_place(temporary, folder, entries, **metadata)


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder`, to be filled and handed to `put_in_place`; afterwards remove it.

    An error leaves nothing behind. A kill leaves a folder with a name that begins with a dot. Nothing reads such a folder,
    and the next call removes it."""
    temporary, _ = _hidden(folder)
    _recover(folder)
    new_folders = [path for path in (folder.parent, *folder.parent.parents) if not path.exists()]
    try:
        temporary.mkdir(parents=True)
        for path in new_folders:
            fsync(path.parent)
        yield temporary
    finally:
        _recover(folder)  # after an error this puts the old contents back, and frees the space on a full disk


def put_in_place(temporary: Path, folder: Path, entries: dict[str, dict], **metadata) -> None:
    """Add a manifest to a temporary folder, and rename it to `folder`, in place of the old contents.

    `entries` are those of the manifest for files that other processes have written, flushed and hashed. All files are
    fsynced before the rename, the manifest last; one rename publishes them."""
    _, old = _hidden(folder)
    _write_manifest(temporary, entries, metadata)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    fsync(folder.parent)


def _hidden(folder: Path) -> list[Path]:
    return [folder.with_name(f".{folder.name}.{ending}") for ending in ("tmp", "old")]


def _recover(folder: Path) -> None:
    """Undo a `publish` that ended between its two renames, and remove what it has left."""
    temporary, old = _hidden(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def remove_unfinished(parent: Path, name: str) -> None:
    """Recover from kills during `publish` or `rewrite` of `name` (a pattern). Other hidden files are the user's.

    Call this only in the process that holds the run lock, so that nothing is being published in `parent`."""
    for hidden in (*parent.glob(f".{name}.old"), *parent.glob(f".{name}.tmp")):
        if hidden.is_dir():
            _recover(parent / hidden.stem[1:])
    for parts in parent.glob(f".{name}.*.parts"):
        shutil.rmtree(parts, ignore_errors=True)
    for file in parent.glob(f".{name}.*.tmp"):  # of `rewrite`
        file.unlink(missing_ok=True)


def _write_manifest(folder: Path, entries: dict[str, dict], metadata: dict) -> None:
    """Hash the files that are not in `entries`, write the manifest, and fsync everything."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    _follow_umask(list(files.values()), folder)
    (folder / MANIFEST).write_text(manifest_text(files, entries, metadata))
    for path in [path for name, path in files.items() if name not in entries]:
        fsync(path)
    fsync(folder / MANIFEST)
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        fsync(path)


def _follow_umask(files: list[Path], folder: Path) -> None:
    """Give `files` the permissions that the umask gives new files: safetensors creates its files with mode 0600.

    Read the umask from the mode of the new `folder`: os.umask would change it for all threads."""
    mode = folder.stat().st_mode & 0o666
    for path in files:
        if path.stat().st_mode & 0o777 != mode:
            with suppress(PermissionError):  # the file system has no permissions
                path.chmod(mode)


def rewrite(path: Path, text: str) -> None:
    """Replace a file atomically: at any moment, also after a kill, it holds the old text or a new one.

    Several processes may write it at once: ranks that fail together, or a file system that ignores locks."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        fsync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Wait until everything written to a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
