"""Checkpoints written by many processes, and the memory that reading takes. Whole runs: test_fsdp2_checkpoints.py."""

import os
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from engine.checkpointing import async_writer
from engine.checkpointing.tensor_files import TensorReader, collect_shards, shard_folder
from engine.config.errors import UsageError
from engine.distributed.host_group import HostGroup
from engine.storage import verify_hashes
from tests.helpers import kit

# ---- many writers ------------------------------------------------------------------------------------------------------


def half_by_half(folder: Path, pause=lambda: None, error: Exception | None = None) -> None:
    """Write a file in two halves, with `pause()` between them, and fail then, if there is an error."""
    with open(folder / "part", "wb", buffering=0) as file:
        file.write(b"1" * 1000)
        pause()
        file.write(b"2" * 1000)
    if error:
        raise error


def test_shards_are_collected_when_complete(tmp_path):
    """The file exists long before it is complete; the mutant would look for the file only."""
    parts, folder, seen = tmp_path / "parts", tmp_path / "step", threading.Event()
    folder.mkdir()

    def write_shard() -> None:
        with shard_folder(parts, 1) as own:
            half_by_half(own, pause=lambda: seen.wait(300))

    threading.Thread(target=write_shard).start()
    kit.until((parts / "1" / "part").exists)
    threading.Timer(0.5, seen.set).start()
    hashes = collect_shards(parts, 2, folder)
    assert (folder / "part").read_bytes() == b"1" * 1000 + b"2" * 1000
    assert hashes == {"part": {"hash": verify_hashes.hash_file(folder / "part"), "weights": []}}
    assert not parts.exists()


def _writer(rank: int) -> async_writer.BackgroundWriter:
    accelerator = SimpleNamespace(is_main_process=rank == 0, process_index=rank, num_processes=2, mixed_precision="no")
    backend = SimpleNamespace(accelerator=accelerator, hosts=None, is_sharded=True)
    return async_writer.BackgroundWriter(backend, 3)


@pytest.mark.parametrize(
    "failing, error, of_rank, of_main",
    [
        (0, OSError(28, "disk full"), nullcontext(), pytest.raises(OSError, match=r"disk full$")),
        (1, OSError(28, "disk full"), nullcontext(), pytest.raises(OSError, match="disk full, on rank 1")),
        (1, TypeError("a bug"), pytest.raises(TypeError), pytest.raises(OSError, match="a bug, on rank 1")),
    ],
)
def test_failed_save_leaves_no_shards(tmp_path, failing, error, of_rank, of_main):
    """They would fill a disk that is nearly full, so that no later save succeeds: of two failed ones, one is left at most.

    An error of a rank reaches the main process. One of the disk costs a checkpoint; any other also ends the rank."""
    writers = [_writer(rank) for rank in (0, 1)]
    for step in (4, 8, 12):
        folder, lost = tmp_path / f"step_{step}", step < 12
        for rank, expected in ((1, of_rank), (0, of_main)):
            writer = writers[rank]
            writer.folders += 1
            with expected if lost else nullcontext(), writer.temporary_folder(folder) as temporary:
                half_by_half(temporary, error=error if lost and rank == failing else None)
                if writer.is_main:
                    writer.publish(temporary, folder, step, writer.add_shards(temporary))
        left = [path for path in tmp_path.rglob("part") if path.parent != folder]
        assert len(left) == (1 if lost and failing == 0 else 0), left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_12"]


def test_silent_rank_is_not_waited_for_longer_than_patience(tmp_path):
    with pytest.raises(OSError, match="rank 1 has not written"):
        collect_shards(tmp_path, 2, tmp_path, patience=0.3)


def _check_folder(folders: list[Path]) -> str:
    accelerator = Accelerator(cpu=True)
    folder, hosts = folders[accelerator.process_index], HostGroup(accelerator, 20)
    try:
        async_writer.check_shared_folder(accelerator.is_main_process, hosts, folder)
    except UsageError as error:
        return str(error)
    return ""


def test_folder_that_not_all_nodes_share_is_refused_on_all_ranks(tmp_path):
    """The folder has one name everywhere, and is another one on the third node."""
    folders = [tmp_path / "run", tmp_path / "run", tmp_path / "else"]
    found = kit.spawn(3, _check_folder, folders, out=tmp_path / "out")
    assert all("output_dir: 1 processes do not see " in text for text in found)


# ---- read --------------------------------------------------------------------------------------------------------------


def _grown(folder: Path, mutant: bool) -> float:
    """Return by how many MB this process has grown at most while it read every tensor and kept none."""
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1])  # noqa: E731
    reader, before, most = TensorReader(folder, "model"), resident(), 0
    for name in sorted(reader.where):
        reader.full(name)
        reader.mapped *= not mutant  # the mutant keeps the file open
        most = max(most, resident() - before)
    return most * os.sysconf("SC_PAGE_SIZE") / 1e6


def test_reading_does_not_hold_tensors_twice(tmp_path):
    (tmp_path / "step").mkdir()
    save_file({str(i): torch.full((1 << 21,), float(i)) for i in range(30)}, tmp_path / "step" / "model.safetensors")
    [grown] = kit.spawn(1, _grown, tmp_path / "step", False, out=tmp_path / "out")
    [mutant] = kit.spawn(1, _grown, tmp_path / "step", True, out=tmp_path / "out2")
    assert grown < 150 < 200 < mutant  # of 252 MB, a window of 64 MiB and what was read last
