"""Folders that are complete or not there: written beside their place, flushed to the disk, hashed, renamed, verified.

Leave alone. Guarded by tests/storage/test_atomic_folder.py. Knows nothing of what is in the files.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash

from src.config.errors import warn

MANIFEST = "manifest.json"
CHUNK = 1 << 22


_held: dict[Path, int] = {}  # the run folder -> a descriptor of it, which keeps its inode number from being used again


def hold(folder: Path) -> None:
    """Remember which folder this path means now; from here on nothing of ours is written to another one in its place."""
    if folder.absolute() not in _held:
        with suppress(OSError):
            _held[folder.absolute()] = os.open(folder, os.O_RDONLY)


def lost(path: Path | None = None) -> str:
    """Return why the folder that this process holds (one with `path` in it, if given) is not there any more, or nothing."""
    for folder, descriptor in _held.items():
        if path is not None and not path.absolute().is_relative_to(folder):
            continue
        try:
            if not os.path.samestat(os.stat(folder), os.fstat(descriptor)):
                return f"{folder} was deleted or moved, and another folder is in its place"
        except (FileNotFoundError, NotADirectoryError):
            return f"{folder} was deleted or moved"
        except OSError:  # a file system that does not answer now says nothing about the folder
            continue
    return ""


def check_held(path: Path) -> None:
    """Raise OSError if `path` is in a folder that was deleted, moved or replaced since `hold`."""
    if reason := lost(path):
        raise OSError(errno.ESTALE, f"{reason}; nothing is written there")


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
        found = {name: known.get(name) or entry(path) for path in files if (name := str(path.relative_to(temporary)))}
        files = [path for path in files if path.name not in known]
        body = {"hash": "xxh3_128", "about": about, "files": found}
        (temporary / MANIFEST).write_text(json.dumps(body | {"manifest": _digest(body)}, indent=1))
        for path in [*files, temporary / MANIFEST, *(p for p in temporary.rglob("*") if p.is_dir()), temporary]:
            flush(path)
        check_held(folder)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        for parent in (folder.parent, *parents):
            flush(parent)
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


def tidy(parent: Path) -> None:
    """Put back what a kill left between the two renames of `publish`, and remove what it left unfinished.

    Only for who holds the run: nothing is being published in there."""
    for left in parent.glob(".*.old"):
        folder = parent / left.name[1:].removesuffix(".old")
        shutil.rmtree(left, ignore_errors=True) if folder.exists() else left.rename(folder)
    for left in (*parent.glob(".*.tmp"), *parent.glob(".*.parts")):
        shutil.rmtree(left, ignore_errors=True)


def faults(folder: Path) -> list[str]:
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
    found = [fault for name, written in body["files"].items() if (fault := _fault(folder, name, written))]
    stray = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in body["files"])
    return found + [f"{name} is of no part of it: remove it" for name in stray]


def about(folder: Path) -> dict:
    """Return what `publish` was told about a folder; nothing where there is no manifest."""
    try:
        return json.loads((folder / MANIFEST).read_bytes())["about"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _fault(folder: Path, name: str, written: dict) -> str | None:
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts or (path.exists() and not path.is_file()):
        return f"{name} is not a file of this folder"
    try:
        size = path.stat().st_size
        if size != written["size"]:
            return f"{name} has {size:,} bytes, {written['size']:,} were written"
        return None if entry(path) == written else f"{name}: its hash is not the one that was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"


def entry(path: Path) -> dict:
    """Return size and hash of a file. Not cryptographic: it finds damage at the speed of memory, not malice."""
    digest, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return {"size": size, "xxh3_128": digest.hexdigest()}


def _digest(body: dict) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def flush(path: Path) -> None:
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
    flush(temporary)
    temporary.replace(path)


class Lines:
    """Appends whole lines to a file; what the disk does not take is kept, and tried again with the next."""

    def __init__(self, path: Path):
        self.path, self.waiting = path, []

    def add(self, line: dict) -> None:
        """Take a line as strict JSON; it reaches the file with the next flush."""
        self.waiting.append(json.dumps(line, allow_nan=False) + "\n")

    def flush(self) -> None:
        """Write what is waiting, all of it or, with an OSError, nothing."""
        if not self.waiting:
            return
        check_held(self.path)
        data = "".join(self.waiting).encode()
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)
                raise
        self.waiting = []

    def offer(self) -> None:
        """Write what is waiting; where that fails, warn and keep it."""
        try:
            self.flush()
        except OSError as error:
            if error.errno == errno.ESTALE and lost(self.path):
                return  # Watch ends this process at its next look, and says why
            warn(
                f"{self.path} cannot be written ({error.strerror}); its {len(self.waiting)} last lines are kept for later"
            )


def objects(path: Path) -> list[dict]:
    """Return the objects of a file of JSON lines that can be read: damage costs a line, not the run."""
    found = []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        found += [line] if isinstance(line, dict) and isinstance(line.get("step"), int) and "kind" in line else []
    return found


def cut_back(path: Path, keeps: Callable[[dict], bool]) -> None:
    """Drop the last lines of a file of JSON objects, up to the last one that is whole and that `keeps` accepts.

    Truncates in place, which is one operation of the file system; reads only the lines that go."""
    if not path.exists():
        return
    data = path.read_bytes()
    end = len(data)
    while end:
        start = data.rfind(b"\n", 0, end - 1) + 1
        try:
            if data[end - 1 : end] == b"\n" and keeps(json.loads(data[start:end])):
                break
        except (ValueError, KeyError, TypeError):
            pass  # half a line, as a kill leaves it
        end = start
    if end < len(data):
        os.truncate(path, end)
