"""Tensors by name in safetensors files: one file, or one for each rank; read in full or as shards.

The files of all ranks together hold the full tensors that one process would write.
Tests: tests/engine/checkpointing/test_sharded.py, tests/engine/distributed/test_fsdp2_checkpoints.py.
"""

# Why not torch.distributed.checkpoint or accelerate's save_state (torch 2.13, accelerate 1.15): FileSystemWriter pickles its
# .metadata and the reader unpickles it (filesystem.py, finish and read_metadata). accelerate uses both for FSDP2, and
# torch.save otherwise. HuggingFaceStorageWriter needs no pickle, but each of its files holds a slice of every tensor,
# without an index (hf_storage.py, finish), until the coordinator reads all files and writes them again. It skips
# save_pretrained, which converts the weights that transformers fuses in memory. It stores only tensors and no hashes.
# Every save also needs collectives, so one rank's disk that does not answer would stop all ranks.

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from engine.process import private_apis
from engine.storage import atomic_folder, run_store, verify_hashes

Tensors = dict[str, torch.Tensor]
Shards = dict[str, dict[str, Any]]  # file that another rank has written -> its hash, and the rows of its weights
WEIGHTS = "*model*.safetensors"
SEVERAL = "model-*-of-*.safetensors"
SHARD_TIMEOUT = 600.0  # seconds that the main process's background thread waits for the files of other ranks
REOPEN_AFTER = 1 << 26  # bytes read before a memory-mapped file is reopened: until then they count as memory


def file_name(part: str, rank: int, world: int) -> str:
    """Return the name of a rank's file in the scheme of transformers: model-00001-of-00002.safetensors."""
    return f"{part}-{rank + 1:05d}-of-{world:05d}.safetensors" if world > 1 else f"{part}.safetensors"


def digest(value: torch.Tensor) -> str:
    """Return dtype, shape and hash of a tensor in host memory."""
    data = value.reshape(-1).view(torch.uint8).numpy()
    return f"{value.dtype} {list(value.shape)} {sha256(data).hexdigest()[:16]}"


def weights_sha256(folder: Path, shards: Shards | None = None) -> str:
    """Return the SHA-256 of the weights in a checkpoint or model folder: of their sorted names, types, shapes and hashes.

    It does not depend on how many files hold them. docs/tracking.md has these lines for everybody. `shards`: files of
    other ranks, which have hashed them."""
    rows = [row for about in (shards or {}).values() for row in about["weights"]]
    for path in folder.glob(WEIGHTS):
        if path.name not in (shards or {}):
            rows += weight_rows(path)
    return sha256(json.dumps(sorted(rows)).encode()).hexdigest()


def weight_rows(path: Path) -> list[list]:
    """Return [name, dtype, shape, SHA-256] of each tensor in a file."""
    rows = []
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        for name, tensor in json.loads(file.read(size)).items():
            if name != "__metadata__":
                start, end = tensor["data_offsets"]
                file.seek(8 + size + start)
                rows.append([name, tensor["dtype"], tensor["shape"], sha256(file.read(end - start)).hexdigest()])
    return rows


# ---- write -----------------------------------------------------------------------------------------------------------


def write_tensors(named: Tensors, file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors by name as one safetensors file; it refuses two names for the same memory, so tied ones are copied."""
    separate = {}
    addresses = set()
    for name, value in named.items():
        value = value.contiguous()
        address = value.untyped_storage().data_ptr()
        separate[name] = value.clone() if address in addresses else value
        addresses.add(address)
    save_file(separate, file, metadata)


def write_index(folder: Path, shards: Shards | None = None) -> None:
    """Write model.safetensors.index.json, which `from_pretrained` needs to load several weight files.

    `shards`: files of other ranks, which need not be here."""
    others = {name: about for name, about in (shards or {}).items() if fnmatch(name, SEVERAL)}
    paths = [path for path in sorted(folder.glob(SEVERAL)) if path.name not in others]
    if not paths and not others:  # the base model is left out
        return
    weight_map = {name: path.name for name, path in file_of_tensors(paths).items()}
    weight_map |= {row[0]: name for name, about in others.items() for row in about["weights"]}
    size = sum(path.stat().st_size for path in paths) + sum(about["hash"]["size"] for about in others.values())
    body = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(body, indent=2) + "\n")


def file_of_tensors(paths: list[Path]) -> dict[str, Path]:
    """Return {name of a tensor: the file that holds it}."""
    file_of = {}
    for path in paths:
        names = safe_open(path, "pt").keys()
        file_of |= dict.fromkeys(names, path)
    return file_of


def is_disk_error(error: BaseException) -> bool:
    """Return True for any OSError, also one that safetensors has wrapped in an error of its own."""
    is_wrapped = isinstance(error, SafetensorError) and "os error" in str(error)
    return is_wrapped or isinstance(error, OSError)


# ---- ranks that write a folder together on a shared disk -------------------------------------------------------------


@contextmanager
def shard_folder(shards: Path, rank: int) -> Iterator[Path]:
    """Yield SHARDS/RANK for this rank's files; afterwards write their hashes, or the error, to SHARDS/RANK.json.

    RANK.json is written last, so its existence tells the main process that the files are complete. An error of the disk
    ends here: the main process counts it for all ranks."""
    folder = shards / str(rank)
    outcome = shards / f"{rank}.json"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
        files = sorted(path for path in folder.iterdir() if path.is_file())
        for path in files:
            atomic_folder.fsync(path)
        result = {}
        for path in files:
            weights = weight_rows(path) if fnmatch(path.name, WEIGHTS) else []
            result[path.name] = {"hash": verify_hashes.hash_file(path), "weights": weights}
        run_store.current.send_shard(folder)
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)  # a full disk needs the space, if only for the next line
        atomic_folder.rewrite(outcome, json.dumps({"error": str(error)}))
        if not is_disk_error(error):
            raise
    else:
        atomic_folder.rewrite(outcome, json.dumps({"files": result}))
    finally:
        run_store.current.send_outcome(outcome)


def collect_shards(shards: Path, world: int, folder: Path, patience: float = SHARD_TIMEOUT) -> Shards:
    """Move all other ranks' files into `folder`, unless they are in the store of the run; return what they hold.

    Raise OSError if a rank has failed or is late."""
    deadline = time.monotonic() + patience
    files: Shards = {}
    for rank in range(1, world):
        outcome = shards / f"{rank}.json"
        while (result := run_store.current.read_outcome(outcome)) is None:
            if time.monotonic() > deadline:
                raise OSError(f"rank {rank} has not written its shard in {patience:g} s")
            time.sleep(0.02)
        if "error" in result:  # if it is one of code, that rank also ends the run
            raise OSError(f"{result['error']}, on rank {rank}")
        for name in result["files"]:
            if outcome.exists():
                (shards / str(rank) / name).rename(folder / name)
        files |= result["files"]
    shutil.rmtree(shards, ignore_errors=True)
    return files


# ---- read ------------------------------------------------------------------------------------------------------------


class TensorReader:
    """Reads the tensors of one part of a checkpoint by name, in full or as shards, from any number of files."""

    def __init__(self, checkpoint: Path, part: str):
        single_file = checkpoint / file_name(part, 0, 1)
        shards = sorted(checkpoint.glob(f"{part}-*-of-*.safetensors"))
        self.where = file_of_tensors([single_file] if single_file.exists() else shards)
        self.path: Path | None = None
        self.file: Any = None
        self.mapped = 0

    def _slice(self, name: str):
        if self.path != self.where[name] or self.mapped > REOPEN_AFTER:
            self.path = self.where[name]
            self.mapped = 0
            self.file = safe_open(self.path, "pt")
        return self.file.get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        return tuple(self._slice(name).get_shape())

    def full(self, name: str) -> torch.Tensor:
        """Return the full tensor, copied out of the memory-mapped file."""
        rows = self._slice(name)
        value = (rows[:] if rows.get_shape() else self.file.get_tensor(name)).clone()
        self.mapped += value.nbytes
        return value

    def like(self, name: str, parameter: torch.Tensor | None) -> torch.Tensor:
        """Return the tensor sharded like `parameter`; each process reads only its own slice.

        Return the full tensor if `parameter` is not sharded or has another shape (as for the optimizer's step)."""
        rows = self._slice(name)
        if not isinstance(parameter, DTensor) or self.shape(name) != tuple(parameter.shape):
            return self.full(name)
        local = parameter.to_local()
        slices = private_apis.local_slices(parameter)
        shape = [part.stop - part.start for part in slices]
        value = rows[slices].clone() if all(shape) else torch.empty(shape, dtype=local.dtype)
        self.mapped += value.nbytes
        return DTensor.from_local(
            value.to(local.device),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
