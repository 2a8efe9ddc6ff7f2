"""Hashes of the files of a folder, and the manifest that holds them: `verify` finds damage.

Tests: tests/engine/storage/test_atomic_folder.py, tests/engine/checkpointing/test_resume.py.
"""

import hashlib
import json
from pathlib import Path

import xxhash

from engine.storage import jsonl

MANIFEST = "manifest.json"


def manifest_text(files: dict[str, Path], entries: dict[str, dict], metadata: dict) -> str:
    """Return the text of a manifest of `entries`, and of `files` by name, which are hashed if they have no entry."""
    all_entries = entries | {name: hash_file(path) for name, path in files.items() if name not in entries}
    body = {"hash": "xxh3_128", "about": metadata, "files": all_entries}
    return json.dumps(body | {"manifest": _digest(body)}, indent=1)


def verify(folder: Path) -> list[str]:
    """Return one error for each file in `folder` that differs from its manifest. Read every byte.

    Allow files that the manifest does not list, except safetensors, which might be read instead of listed ones."""
    body = read_manifest(folder)
    if body.pop("manifest", "") != _digest(body):
        return [f"{MANIFEST} is missing or damaged"]
    errors = [_file_error(folder, name, entry) for name, entry in body["files"].items()]
    extra = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in body["files"])
    return [error for error in errors if error] + [f"{name} is not listed in {MANIFEST}: remove it" for name in extra]


def _file_error(folder: Path, name: str, entry: dict) -> str | None:
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts or not path.is_file():
        return f"{name} is missing, or not a file of this folder"
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            return f"{name} has {size:,} bytes, {entry['size']:,} were written"
        return None if hash_file(path) == entry else f"{name}: its hash is not the one in {MANIFEST}"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"


def read_manifest(folder: Path) -> dict:
    """Return the manifest of a folder without verifying it, or {} if there is no readable manifest."""
    return jsonl.read_json(folder / MANIFEST)


def read_metadata(folder: Path) -> dict:
    """Return the metadata that `publish` recorded in the manifest of a folder, or {} if there is none."""
    return read_manifest(folder).get("about", {})


def hash_file(path: Path) -> dict:
    """Return the manifest entry of a file: size and hash. The hash detects damage, not tampering."""
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return {"size": file.tell(), "xxh3_128": digest.hexdigest()}


def _digest(body: dict) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
