"""Hashes of weights: equal weights have one hash, however many files hold them.

Tests: tests/addons/adapters/test_base_model.py.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
import xxhash

from engine.config.errors import UsageError
from engine.config.run_config import RunConfig
from engine.storage.atomic_folder import rewrite
from engine.storage.cache_folder import cache_root, exclusive
from engine.storage.jsonl import read_json
from engine.storage.verify_hashes import hash_file

CHUNK = 1 << 24  # bytes read at a time for a hash


def weight_files(folder: Path) -> list[Path]:
    """Return the files with weights of a model folder, as `from_pretrained` chooses them."""
    return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def hash_of_weights(cfg: RunConfig, folder: Path) -> str:
    """Return a hash of the names, dtypes, shapes and values in a model folder, however many files hold them.

    It is read once: the cache keeps the hash until size or time of a file changes. One process of a machine reads."""
    files = weight_files(folder)
    if not files:
        raise UsageError(f"{folder} holds no weights of a model (model*.safetensors)")
    stats = [(str(path.resolve()), path.stat()) for path in files]
    key = repr([(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for name, stat in stats])
    target = cache_root(cfg) / "model_hashes" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    known = read_json(target).get("weights")
    if known:
        return known
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError:  # a cache that is read-only
        return _read_hash(files)
    with exclusive(target, f"reading the weights in {folder}"):
        value = read_json(target).get("weights") or _read_hash(files)
        with suppress(OSError):
            rewrite(target, json.dumps({"weights": value, "folder": str(folder)}))
    return value


def _read_hash(files: list[Path]) -> str:
    if files[0].suffix == ".bin":
        return _combined((path.name, hash_file(path)["xxh3_128"]) for path in files)
    return _combined(each for path in files for each in _hashes_of_file(path))


def _hashes_of_file(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, hash) of each tensor of a safetensors file, in its order."""
    with open(path, "rb", buffering=0) as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, end = entry["data_offsets"]
            digest = xxhash.xxh3_128(f"{entry['dtype']} {entry['shape']}".encode())
            file.seek(8 + size + first)
            while first < end:
                data = file.read(min(CHUNK, end - first))
                if not data:
                    raise UsageError(f"{path} is damaged: it ends before {name} does")
                digest.update(data)
                first += len(data)
            yield name, digest.hexdigest()


def hash_of_tensors(tensors: dict[str, torch.Tensor]) -> str:
    """Return a hash of names, dtypes, shapes and values of tensors in host memory."""
    hashes = []
    for name, value in tensors.items():
        digest = xxhash.xxh3_128(f"{value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        hashes.append((name, digest.hexdigest()))
    return _combined(hashes)


def _combined(hashes: Iterable[tuple[str, str]]) -> str:
    return "xxh3:" + xxhash.xxh3_128_hexdigest(json.dumps(sorted(hashes)).encode())
