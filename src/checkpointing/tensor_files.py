"""Tensors by name in safetensors files: one file, or one for each rank; read in full or as shards.

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
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from src.distributed.sharded_tensors import gather_full, is_partial
from src.runtime import private_apis

Tensors = dict[str, torch.Tensor]
REOPEN_AFTER = 1 << 26  # bytes read before a memory-mapped file is reopened: until then they count as memory


def file_name(part: str, rank: int, world: int) -> str:
    """Return the name of a rank's file in the scheme of transformers: model-00001-of-00002.safetensors."""
    return f"{part}-{rank + 1:05d}-of-{world:05d}.safetensors" if world > 1 else f"{part}.safetensors"


# ---- copy to the host ------------------------------------------------------------------------------------------------


class HostCopy:
    """Host memory for one copy of the training state: allocated by the first copy, reused by the next ones."""

    def __init__(self, rank: int = 0, world: int = 1):
        """Copies of one of the `world` ranks that write a checkpoint together hold only what this rank writes."""
        self.rank, self.world = rank, world
        self.memory: dict[tuple[str, str], torch.Tensor] = {}

    def take(self, tensors: dict[str, dict[str, Any]]) -> dict[str, Tensors]:
        """Return copies of this rank's tensors in host memory; tied weights share one copy. Waits for the device.

        Sharded tensors are gathered one at a time (a collective)."""
        rank_of = assign_tensors_to_ranks(tensors, self.world)
        copies: dict[str, Tensors] = {part: {} for part in tensors}
        copied: dict[Any, torch.Tensor | None] = {}  # storage key -> copy, or None if another rank writes it
        from_device = False
        for part, named in tensors.items():
            for name, value in named.items():
                storage = _storage_key(value)
                if storage not in copied:
                    full = gather_full(value)
                    from_device |= full.device.type != "cpu"
                    copied[storage] = self._copy((part, name), full) if rank_of[part, name] == self.rank else None
                if (copy := copied[storage]) is not None:
                    copies[part][name] = copy
        if from_device:
            torch.accelerator.synchronize()
        return copies

    def _copy(self, key: tuple[str, str], value: torch.Tensor) -> torch.Tensor:
        memory = self.memory.get(key)
        if memory is None or memory.shape != value.shape or memory.dtype != value.dtype:
            memory = self.memory[key] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        return memory.copy_(value, non_blocking=True)


def _storage_key(value: Any) -> Any:
    """Return a key that is equal for two names only if they are the same tensor (tied weights)."""
    if is_partial(value) or not value.nbytes:
        return id(value)
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def assign_tensors_to_ranks(tensors: dict[str, dict[str, Any]], world: int) -> dict[tuple[str, str], int]:
    """Return {(part, name): rank that writes it}, balanced by size; one rank writes a layer and all its moments.

    Layers are not divided because transformers converts some models layer by layer when it saves them."""
    layer_of: dict[tuple[str, str], str] = {}
    layer_of_tensor: dict[int, str] = {}  # tied weights have several names
    sizes: dict[str, int] = {}
    for part, named in tensors.items():
        for name, value in named.items():
            plain = name.split("/", 1)[-1]
            match = re.match(r".*?\.\d+(?=\.)", plain)  # up to the first number, the index of the layer
            layer = layer_of_tensor.setdefault(id(value), match[0] if match else plain)
            layer_of[part, name] = layer
            sizes[layer] = sizes.get(layer, 0) + value.nbytes
    loads, rank_of = [0] * world, {}
    for layer in sorted(sizes, key=lambda layer: (-sizes[layer], layer)):
        rank_of[layer] = min(range(world), key=lambda rank: (loads[rank], rank))
        loads[rank_of[layer]] += sizes[layer]
    return {key: rank_of[layer] for key, layer in layer_of.items()}


def digest(value: torch.Tensor) -> str:
    """Return dtype, shape and hash of a tensor in host memory."""
    return f"{value.dtype} {list(value.shape)} {sha256(value.reshape(-1).view(torch.uint8).numpy()).hexdigest()[:16]}"


# ---- write -----------------------------------------------------------------------------------------------------------


def write_tensors(named: Tensors, file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors by name as one safetensors file; it refuses two names for the same memory, so tied ones are copied."""
    result, seen = {}, set()
    for name, value in named.items():
        value = value.contiguous()
        memory = value.untyped_storage().data_ptr()
        result[name] = value.clone() if memory in seen else value
        seen.add(memory)
    save_file(result, file, metadata)


def write_index(folder: Path) -> None:
    """Write model.safetensors.index.json, which `from_pretrained` needs to load several weight files."""
    paths = sorted(folder.glob("model-*-of-*.safetensors"))
    weight_map = {name: path.name for path in paths for name in safe_open(path, "pt").keys()}  # noqa: SIM118
    size = sum(path.stat().st_size for path in paths)
    body = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(body, indent=2) + "\n")


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
