"""Background writer of checkpoints and final/: copy to the host, files in a temporary folder, hashes, one rename.

If the model is replicated, only the main process writes, and no other rank waits for its disk. If the model is sharded,
each rank writes its share of the tensors, and the main process publishes the folder. The background thread never calls
a collective. Tests: tests/engine/checkpointing/test_async_writer.py, tests/engine/checkpointing/test_sharded.py.
"""

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch

from engine.checkpointing.tensor_files import Shards, Tensors, collect_shards, is_disk_error, shard_folder, write_index
from engine.config.errors import UsageError, warn
from engine.distributed.backends import Backend
from engine.distributed.host_group import HostGroup
from engine.distributed.sharded_tensors import gather_full
from engine.process.exit_codes import on_exit
from engine.storage import atomic_folder

log = logging.getLogger("run")
EXIT_WAIT = 60.0  # seconds that a process that ends waits for its write; a launcher may kill it sooner
NAME = "checkpoint writer"  # of the thread


def finish_writing(seconds: float | None = None) -> bool:
    """Wait for the write in progress, at most `seconds` (None: EXIT_WAIT); return True if none is in progress.

    Its data are in host memory already, so an error after the copy need not cost the checkpoint."""
    # By name, because a reference to a writer would keep the model in memory.
    writing = [thread for thread in threading.enumerate() if thread.name == NAME]
    for thread in writing:
        thread.join(EXIT_WAIT if seconds is None else seconds)
    return not any(thread.is_alive() for thread in writing)


class BackgroundWriter:
    """Writes folders one at a time in a background thread; counts failed writes in a row."""

    def __init__(self, backend: Backend, max_failures: int):
        self.accelerator = backend.accelerator
        self.hosts = backend.hosts
        self.max_failures = max_failures
        self.is_main = self.accelerator.is_main_process
        self.rank = 0  # among the ranks that write
        self.world = 1
        if backend.is_sharded:
            self.rank = self.accelerator.process_index
            self.world = self.accelerator.num_processes
        self.writes = self.is_main or self.world > 1
        self.folders = 0  # folders started, the same number on all ranks that write
        self.shards: Path | None = None  # where the other ranks wrote their shards of the last folder
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None  # no OSError, in the last write
        self.failures = 0  # failed writes in a row
        self.reason = ""  # why the last one failed
        self.slowest = 0.0  # seconds of the slowest write
        on_exit(finish_writing)

    def start(self, what: str, work: Callable[..., None], *args: Any) -> None:
        """Start `work(*args)`, which writes `what`. An OSError is counted as a failure, any other error kept in `error`."""
        self.folders += 1
        self.thread = threading.Thread(target=self._run, args=(what, work, *args), name=NAME, daemon=True)
        self.thread.start()

    def _run(self, what: str, work: Callable[..., None], *args: Any) -> None:
        began = time.perf_counter()
        try:
            work(*args)
            self.failures = 0
        except BaseException as error:
            if is_disk_error(error):
                self._count_failure(what, error)
            else:
                self.error = error
        self.slowest = max(self.slowest, time.perf_counter() - began)

    def _count_failure(self, what: str, error: BaseException) -> None:
        self.failures += 1
        self.reason = getattr(error, "strerror", None) or str(error)
        file = getattr(error, "filename", None)
        if file:
            self.reason += f": {file}"
        log.info("%s could not be saved", what, exc_info=error)  # if it is a bug, logs/ has its traceback
        consequence = "training continues" if self.failures < self.max_failures else "the run ends"
        warn(
            f"{what} COULD NOT BE SAVED: {self.reason}. Older checkpoints are intact; {consequence} ({self.failures} failed "
            f"in a row; max_failed_saves is {self.max_failures})"
        )

    def failed(self) -> bool:
        """Return whether too many writes in a row failed on this rank; raise an error that is no OSError."""
        if self.error is not None:
            raise self.error
        return self.failures >= self.max_failures

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the write in progress; return True if none is in progress any more."""
        if self.thread is not None:
            self.thread.join(seconds)
        return self.thread is None or not self.thread.is_alive()

    def is_busy(self, seconds: float) -> bool:
        """Wait like `wait`; return whether a rank that writes still does. Only these ranks call this, a collective."""
        busy = float(not self.wait(seconds))
        return bool(self.hosts.sum([busy])[0] if self.world > 1 else busy)

    def wait_on_all_ranks(self) -> None:
        """Wait until no rank writes. All ranks check once a second, so that no collective times out on a slow disk."""
        while self.hosts.sum([0.0 if self.wait(1.0) else 1.0])[0]:
            pass

    def finish(self) -> bool:
        """Wait until no rank writes; return whether the last write succeeded on every rank."""
        self.wait_on_all_ranks()
        self.failed()  # raises an error before the others are asked: this rank has the traceback
        return not self.hosts.sum([float(self.failures)])[0]

    # ---- in the background thread ------------------------------------------------------------------------------------

    def temporary_folder(self, folder: Path) -> AbstractContextManager[Path]:
        """Return the folder in which this rank writes its files of `folder`, removed afterwards; use it in `with`.

        On the main process it becomes `folder` by `publish`. On other ranks it is a shard, complete at the end of
        `with`."""
        shards = folder.with_name(f".{folder.name}.{self.folders}.parts")
        if not self.is_main:
            return shard_folder(shards, self.rank)
        if self.shards is not None:  # of a write that failed: no rank writes there any more, but it takes space
            shutil.rmtree(self.shards, ignore_errors=True)
        self.shards = shards if self.world > 1 else None
        return atomic_folder.temporary_folder(folder)

    def add_shards(self, temporary: Path) -> Shards:
        """Move the shards of all other ranks into the main process's temporary folder, when they are complete."""
        if self.shards is None:
            return {}
        shards = collect_shards(self.shards, self.world, temporary)
        write_index(temporary, shards)
        return shards

    def publish(self, temporary: Path, folder: Path, step: int, shards: Shards) -> None:
        """Rename the main process's temporary folder to `folder`, with a manifest; `shards`: those of other ranks."""
        precision = self.accelerator.mixed_precision
        hashes = {name: about["hash"] for name, about in shards.items()}
        atomic_folder.put_in_place(temporary, folder, hashes, step=step, mixed_precision=precision)


# ---- copy to the host -----------------------------------------------------------------------------------------------


class HostCopy:
    """Host memory for one copy of the training state: allocated by `reserve` or the first copy, reused by the next ones."""

    def __init__(self, rank: int = 0, world: int = 1):
        """Copies of one of the `world` ranks that write a checkpoint together hold only what this rank writes."""
        self.rank = rank
        self.world = world
        self.memory: dict[tuple[str, str], torch.Tensor] = {}
        self.reserving: threading.Thread | None = None

    def reserve(self, tensors: dict[str, dict[str, Any]]) -> None:
        """Allocate the memory of `take` for tensors on a GPU in the background: pinning takes 0.14 s a GB. Call it once."""
        rank_of = assign_tensors_to_ranks(tensors, self.world)
        values = {(part, name): value for part, name, value in each_tensor(tensors)}
        first = {id(value): key for key, value in reversed(values.items())}  # tied weights share the copy of the first
        shapes = []
        for key in first.values():
            is_mine = rank_of[key] == self.rank
            # An early save has allocated some memory, and may still be written from it.
            if is_mine and key not in self.memory and getattr(values[key], "is_cuda", False):
                shapes.append((key, values[key].shape, values[key].dtype))
        self.reserving = threading.Thread(target=self._allocate, args=(shapes,), daemon=True)
        self.reserving.start()

    def _allocate(self, shapes: list[tuple[tuple[str, str], torch.Size, torch.dtype]]) -> None:
        with suppress(RuntimeError):  # `take` tries again
            for key, shape, dtype in shapes:
                self.memory[key] = torch.empty(shape, dtype=dtype, pin_memory=True)

    def take(self, tensors: dict[str, dict[str, Any]]) -> dict[str, Tensors]:
        """Return copies of this rank's tensors in host memory; tied weights share one copy. Waits for the device.

        Sharded tensors are gathered one at a time (a collective)."""
        if self.reserving:
            self.reserving.join()
        rank_of = assign_tensors_to_ranks(tensors, self.world)
        copies: dict[str, Tensors] = {part: {} for part in tensors}
        copied: dict[int, torch.Tensor | None] = {}  # id of a tensor -> copy, or None if another rank writes it
        is_any_on_device = False
        for part, name, value in each_tensor(tensors):
            if id(value) not in copied:
                full = gather_full(value)
                if full.device.type != "cpu":
                    is_any_on_device = True
                is_mine = rank_of[part, name] == self.rank
                copied[id(value)] = self._copy((part, name), full) if is_mine else None
            copy = copied[id(value)]
            if copy is not None:
                copies[part][name] = copy
        if is_any_on_device:
            torch.accelerator.synchronize()
        return copies

    def _copy(self, key: tuple[str, str], value: torch.Tensor) -> torch.Tensor:
        memory = self.memory.get(key)
        if memory is None or memory.shape != value.shape or memory.dtype != value.dtype:
            memory = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self.memory[key] = memory
        return memory.copy_(value, non_blocking=True)


def assign_tensors_to_ranks(tensors: dict[str, dict[str, Any]], world: int) -> dict[tuple[str, str], int]:
    """Return {(part, name): rank that writes it}, balanced by size; one rank writes a layer and all its moments.

    Layers are not divided because transformers converts some models layer by layer when it saves them."""
    layer_of: dict[tuple[str, str], str] = {}
    layer_of_tensor: dict[int, str] = {}  # tied weights have several names
    sizes: dict[str, int] = {}
    for part, name, value in each_tensor(tensors):
        plain = name.split("/", 1)[-1]
        match = re.match(r".*?\.\d+(?=\.)", plain)  # up to the first number, the index of the layer
        layer = layer_of_tensor.setdefault(id(value), match[0] if match else plain)
        layer_of[part, name] = layer
        sizes[layer] = sizes.get(layer, 0) + value.nbytes
    loads = [0] * world
    rank_of = {}
    for layer in sorted(sizes, key=lambda layer: (-sizes[layer], layer)):
        rank = min(range(world), key=lambda rank: (loads[rank], rank))
        rank_of[layer] = rank
        loads[rank] += sizes[layer]
    return {key: rank_of[layer] for key, layer in layer_of.items()}


def each_tensor(tensors: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    """Yield (part, name, tensor) of all parts of a checkpoint."""
    for part, named in tensors.items():
        for name, value in named.items():
            yield part, name, value


# ---- ranks that write a folder together on a shared disk -------------------------------------------------------------


def check_shared_folder(is_main: bool, hosts: HostGroup, folder: Path) -> None:
    """Raise UsageError on every rank if any rank does not see the main process's `folder`."""
    marker = folder / ".seen"
    if is_main:
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_text("")
    hosts.sum([0.0])  # a barrier
    missing = hosts.sum([float(not marker.exists())])[0]
    if is_main:
        marker.unlink()
    if missing:
        raise UsageError(
            f"output_dir: {missing:.0f} processes do not see {folder.resolve()} of the main process, but each writes its shard "
            "of a checkpoint there: give a folder on a disk that all nodes share"
        )
