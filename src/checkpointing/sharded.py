"""Files written by many ranks, and tensors read back whole or in parts.

Tests: tests/distributed/test_fsdp2.py. What is written is what one process would write, cut into as many files.
"""

import json
import math
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from src.config.errors import UsageError
from src.distributed.sharded_tensors import is_partial
from src.runtime import private_apis
from src.storage import atomic_folder


def assign_tensors_to_ranks(tensors: dict[str, dict], world: int) -> dict[tuple[str, str], int]:
    """Return which rank writes each (part, name): the layers of the model shared out by size, each whole and with its moments.

    transformers stores some models in another form than it computes with, and converts them layer by layer."""
    sizes, groups, first = {}, {}, {}
    for part, named in tensors.items():
        for name, value in named.items():
            bare = name.split("/", 1)[-1]
            found = re.match(r".*?\.\d+(?=\.)", bare)
            group = groups[part, name] = first.setdefault(id(value), found[0] if found else bare)
            sizes[group] = sizes.get(group, 0) + value.nbytes
    loads, rank_of = [0] * world, {}
    for group in sorted(sizes, key=lambda group: (-sizes[group], group)):
        rank_of[group] = min(range(world), key=lambda rank: (loads[rank], rank))
        loads[rank_of[group]] += sizes[group]
    return {key: rank_of[group] for key, group in groups.items()}


def file_name(part: str, rank: int, world: int) -> str:
    return f"{part}-{rank + 1:05d}-of-{world:05d}.safetensors" if world > 1 else f"{part}.safetensors"


# ---- many writers ------------------------------------------------------------------------------------------------------


class ShardWriters(NamedTuple):
    """Processes that write one folder together, on a disk that all of them see."""

    rank: int
    world: int
    patience: float  # seconds that the main process waits for the others' files

    def write_shard(self, parts: Path, write: Callable[[Path], None]) -> None:
        """Leave in `parts` what `write(folder)` wrote on this rank, with hashes, or why it could not."""
        folder, word = parts / str(self.rank), parts / f"{self.rank}.json"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            write(folder)
            files = sorted(path for path in folder.iterdir() if path.is_file())
            for path in files:
                atomic_folder.fsync(path)
            said = {"files": {path.name: atomic_folder.hash_file(path) for path in files}}
        except Exception as error:
            atomic_folder.rewrite(word, json.dumps({"fault": str(error)}))
            if not (isinstance(error, OSError) or "os error" in str(error)):  # no fault of a disk: it ends the run
                raise
        else:
            atomic_folder.rewrite(word, json.dumps(said))

    def collect_shards(self, parts: Path, folder: Path) -> dict[str, dict]:
        """Move the files of all other ranks into `folder` and return their entries; OSError if some rank has none."""
        end, entries = time.monotonic() + self.patience, {}
        for rank in range(1, self.world):
            word = parts / f"{rank}.json"
            while not word.exists():
                if time.monotonic() > end:
                    raise OSError(None, f"rank {rank} has not written its part: do all nodes see this folder?")
                time.sleep(0.02)
            said = json.loads(word.read_text())
            if "fault" in said:
                raise OSError(None, f"{said['fault']}, on rank {rank}")
            for name in said["files"]:
                (parts / str(rank) / name).rename(folder / name)
            entries |= said["files"]
        shutil.rmtree(parts, ignore_errors=True)
        return entries


def check_shared_folder(accelerator, host_group, folder: Path) -> None:
    """Raise UsageError on every rank unless all of them see `folder` of the main process."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / ".seen"
    if accelerator.is_main_process:
        mark.write_text("")
    host_group.sum([0.0])
    blind = host_group.sum([float(not mark.exists())])[0]
    if accelerator.is_main_process:
        mark.unlink(missing_ok=True)
    if blind:
        raise UsageError(
            f"output_dir: {math.ceil(blind)} processes do not see {folder.resolve()} of the main process, but each writes its "
            "shard of a checkpoint there: give a folder on a disk that all nodes share"
        )


# ---- back into the process ---------------------------------------------------------------------------------------------


class TensorReader:
    """Reads the tensors of a part of a checkpoint by name, whole or in slices, whatever number of files they are in.

    What was read of a file that stays mapped would count twice in memory, so a file is opened anew every 64 MiB."""

    def __init__(self, checkpoint: Path, part: str):
        alone = checkpoint / file_name(part, 0, 1)
        paths = [alone] if alone.exists() else sorted(checkpoint.glob(f"{part}-*-of-*.safetensors"))
        self.where = {name: path for path in paths for name in safe_open(path, "pt").keys()}  # noqa: SIM118
        self.path, self.file, self.mapped = None, None, 0

    def _rows(self, name: str):
        if self.path != self.where[name] or self.mapped > 1 << 26:
            self.path, self.mapped = self.where[name], 0
            self.file = safe_open(self.path, "pt")
        return self.file.get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._rows(name).get_shape())

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor in memory of its own."""
        rows = self._rows(name)
        value = (rows[:] if rows.get_shape() else self.file.get_tensor(name)).clone()
        self.mapped += value.nbytes
        return value

    def like(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Return a tensor, sharded as `parameter` is if it has its shape: each process reads its own rows only."""
        from torch.distributed.tensor import DTensor

        rows = self._rows(name)
        if not is_partial(parameter) or self.shape(name) != tuple(parameter.shape):
            return self.whole(name)
        mesh, placements, own = parameter.device_mesh, parameter.placements, parameter.to_local()
        slices = private_apis.local_slices(parameter)
        shape = [part.stop - part.start for part in slices]
        local = rows[slices].clone() if all(shape) else torch.empty(shape, dtype=own.dtype)
        self.mapped += local.nbytes
        return DTensor.from_local(
            local.to(own.device), mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
