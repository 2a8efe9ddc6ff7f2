"""Checkpoints of sharded models: each rank writes some of the tensors; read them back in full or as shards.

Tests: tests/checkpointing/test_sharded.py, tests/distributed/test_fsdp2.py. The files of all ranks together hold the
full tensors that one process would write.
"""

# Why not torch.distributed.checkpoint or accelerate's save_state (torch 2.13, accelerate 1.15): FileSystemWriter pickles its
# .metadata and the reader unpickles it (filesystem.py, finish and read_metadata). accelerate uses both for FSDP2, and
# torch.save otherwise. HuggingFaceStorageWriter needs no pickle, but each of its files holds a slice of every tensor,
# without an index (hf_storage.py, finish), until the coordinator reads all files and writes them again. It skips
# save_pretrained, which converts the weights that transformers fuses in memory. It stores only tensors and no hashes.
# Every save also needs collectives, so one rank's disk that does not answer would stop all ranks.

import json
import math
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open

from src.config.errors import Failure, UsageError
from src.distributed.host_group import HostGroup
from src.runtime import private_apis
from src.storage import atomic_folder
from src.storage.disk_errors import DiskError, is_disk_error

if TYPE_CHECKING:
    from accelerate import Accelerator

REOPEN_AFTER = 1 << 26  # bytes read before a memory-mapped file is reopened: until then they count as memory


def file_name(part: str, rank: int, world: int) -> str:
    """Return the name of a rank's file in the scheme of transformers: model-00001-of-00002.safetensors."""
    return f"{part}-{rank + 1:05d}-of-{world:05d}.safetensors" if world > 1 else f"{part}.safetensors"


# ---- write -----------------------------------------------------------------------------------------------------------


def assign_tensors_to_ranks(tensors: dict[str, dict], world: int) -> dict[tuple[str, str], int]:
    """Return {(part, name): rank that writes it}, balanced by size; one rank writes a whole layer and its moments.

    Layers stay whole because transformers converts some models layer by layer when it saves them."""
    layer_of: dict[tuple[str, str], str] = {}
    layer_of_tensor: dict[int, str] = {}  # tied weights have several names
    sizes: dict[str, int] = {}
    for part, named in tensors.items():
        for name, value in named.items():
            layer = layer_of_tensor.setdefault(id(value), _layer(name.split("/", 1)[-1]))
            layer_of[part, name] = layer
            sizes[layer] = sizes.get(layer, 0) + value.nbytes
    loads, rank_of = [0] * world, {}
    for layer in sorted(sizes, key=lambda layer: (-sizes[layer], layer)):
        rank_of[layer] = min(range(world), key=lambda rank: (loads[rank], rank))
        loads[rank_of[layer]] += sizes[layer]
    return {key: rank_of[layer] for key, layer in layer_of.items()}


def _layer(name: str) -> str:
    """Return a parameter name up to its first number, which is the layer index, or the whole name without one."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match[0] if match else name


class ShardWriters(NamedTuple):
    """One of the ranks that write a folder together on a shared disk."""

    rank: int
    world: int
    patience: float  # seconds that the main process waits for the files of the other ranks

    def write_shard(self, parts: Path, write: Callable[[Path], None]) -> None:
        """Write this rank's files to PARTS/RANK, and their hashes or the error to PARTS/RANK.json.

        RANK.json is written last, so its existence tells the main process that the files are complete."""
        folder, outcome = parts / str(self.rank), parts / f"{self.rank}.json"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            write(folder)
            files = sorted(path for path in folder.iterdir() if path.is_file())
            for path in files:
                atomic_folder.fsync(path)
            hashes = {path.name: atomic_folder.hash_file(path) for path in files}
        except Exception as error:
            atomic_folder.rewrite(outcome, json.dumps({"error": str(error), "disk": is_disk_error(error)}))
            if not is_disk_error(error):
                raise
        else:
            atomic_folder.rewrite(outcome, json.dumps({"files": hashes}))

    def collect_shards(self, parts: Path, folder: Path) -> dict[str, dict]:
        """Move all other ranks' files into `folder`; return their hashes.

        Raise DiskError if a rank's disk failed or a rank is late, Failure if a rank has an error that ends the run."""
        end, hashes = time.monotonic() + self.patience, {}
        for rank in range(1, self.world):
            outcome = parts / f"{rank}.json"
            while not outcome.exists():
                if time.monotonic() > end:
                    raise DiskError(
                        None,
                        f"rank {rank} has not written its shard in {self.patience:g} s: do all nodes see this folder?",
                    )
                time.sleep(0.02)
            result = json.loads(outcome.read_text())
            if "error" in result:
                text = f"{result['error']}, on rank {rank}"
                raise DiskError(None, text) if result["disk"] else Failure(text)
            for name in result["files"]:
                (parts / str(rank) / name).rename(folder / name)
            hashes |= result["files"]
        shutil.rmtree(parts, ignore_errors=True)
        return hashes


def check_shared_folder(accelerator: "Accelerator", host_group: HostGroup, folder: Path) -> None:
    """Raise UsageError on every rank if any rank does not see the main process's `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / ".seen"
    if accelerator.is_main_process:
        marker.write_text("")
    host_group.sum([0.0])  # a barrier
    missing = host_group.sum([float(not marker.exists())])[0]
    if accelerator.is_main_process:
        marker.unlink(missing_ok=True)
    if missing:
        raise UsageError(
            f"output_dir: {math.ceil(missing)} processes do not see {folder.resolve()} of the main process, but each writes its "
            "shard of a checkpoint there: give a folder on a disk that all nodes share"
        )


# ---- read ------------------------------------------------------------------------------------------------------------


class TensorReader:
    """Reads the tensors of one part of a checkpoint by name, in full or as shards, from any number of files."""

    def __init__(self, checkpoint: Path, part: str):
        alone = checkpoint / file_name(part, 0, 1)
        paths = [alone] if alone.exists() else sorted(checkpoint.glob(f"{part}-*-of-*.safetensors"))
        self.where = {name: path for path in paths for name in safe_open(path, "pt").keys()}  # noqa: SIM118
        self.path: Path | None = None
        self.file: Any = None
        self.mapped = 0

    def _slice(self, name: str):
        if self.path != self.where[name] or self.mapped > REOPEN_AFTER:
            self.path, self.mapped = self.where[name], 0
            self.file = safe_open(self.path, "pt")
        return self.file.get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
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
        from torch.distributed.tensor import DTensor

        rows = self._slice(name)
        if not isinstance(parameter, DTensor) or self.shape(name) != tuple(parameter.shape):
            return self.full(name)
        mesh, placements, local = parameter.device_mesh, parameter.placements, parameter.to_local()
        slices = private_apis.local_slices(parameter)
        shape = [part.stop - part.start for part in slices]
        value = rows[slices].clone() if all(shape) else torch.empty(shape, dtype=local.dtype)
        self.mapped += value.nbytes
        return DTensor.from_local(
            value.to(local.device), mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
