"""Checkpoints written by many processes, and tensors read back whole or as shards."""

import json
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from src.checkpointing import async_writer
from src.checkpointing.async_writer import collect_shards, write_shard
from src.checkpointing.tensor_files import TensorReader, assign_tensors_to_ranks, file_name, write_index
from src.config.errors import DiskError, Failure, UsageError
from src.distributed.host_group import HostGroup
from src.distributed.sharded_tensors import gather_full, is_partial
from src.storage import atomic_folder
from tests.helpers import kit

# ---- which rank writes what --------------------------------------------------------------------------------------------


def tensors_of_model(layers: int = 5, tied: bool = False) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of a small model and its optimizer as collect_tensors gives them."""
    shapes = {"model.embed_tokens.weight": (50, 8), "model.norm.weight": (8,), "lm_head.weight": (50, 8)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.mlp.experts.{n}.weight": (8 + layer, 8) for n in range(2)}
        shapes[f"model.layers.{layer}.norm.weight"] = (8,)
    model = {name: torch.zeros(shape) for name, shape in shapes.items()}
    moments = {f"{key}/{name}": torch.zeros_like(value) for key in ("exp_avg", "step") for name, value in model.items()}
    if tied:
        model["lm_head.weight"] = model["model.embed_tokens.weight"]
    return {"model": model, "optimizer": moments}


def layer_of(name: str) -> str:
    words = name.split("/")[-1].split(".")
    return ".".join(words[:3]) if "layers" in words else ".".join(words)


@pytest.mark.parametrize("world", [1, 2, 3, 30])
@pytest.mark.parametrize("tied", [False, True])
def test_each_tensor_has_one_writer_and_layers_stay_whole(world, tied):
    """Each rank computes the writers alone: the order of the tensors must not matter."""
    tensors = tensors_of_model(tied=tied)
    writer = assign_tensors_to_ranks(tensors, world)
    backwards = {part: dict(reversed(named.items())) for part, named in tensors.items()}
    assert tied or assign_tensors_to_ranks(backwards, world) == writer
    assert set(writer) == {(part, name) for part, named in tensors.items() for name in named}
    assert set(writer.values()) <= set(range(world))
    if tied:
        assert writer["model", "lm_head.weight"] == writer["model", "model.embed_tokens.weight"]
        del writer["model", "lm_head.weight"]
    by_layer = {}
    for (_, name), rank in writer.items():
        by_layer.setdefault(layer_of(name), set()).add(rank)
    assert all(len(ranks) == 1 for ranks in by_layer.values())
    assert len({rank for ranks in by_layer.values() for rank in ranks}) == min(world, len(by_layer))


# ---- many writers ------------------------------------------------------------------------------------------------------


def writes(rank: int, pause=lambda: None, error: Exception | None = None):
    """Return a function that writes this rank's file in two halves, with `pause()` between them, and may fail then."""

    def write(folder: Path) -> None:
        with open(folder / f"part{rank}", "wb", buffering=0) as file:
            file.write(bytes([rank]) * 1000)
            pause()
            file.write(bytes([rank + 100]) * 1000)
        if error:
            raise error

    return write


def test_shards_are_collected_when_complete_and_published(tmp_path):
    """The file of rank 1 exists long before it is complete; the mutant would look for the file only."""
    parts, seen = tmp_path / ".step.1.parts", threading.Event()
    threads = [
        threading.Thread(target=write_shard, args=(parts, rank, writes(rank, pause)))
        for rank, pause in ((1, lambda: seen.wait(300)), (2, lambda: None))
    ]

    def gather(folder: Path) -> dict:
        writes(0)(folder)
        for thread in threads:
            thread.start()
        kit.until((parts / "1" / "part1").exists)
        assert (parts / "1" / "part1").stat().st_size <= 1000
        threading.Timer(0.5, seen.set).start()
        return collect_shards(parts, 3, folder)

    atomic_folder.publish(tmp_path / "step", gather, step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    assert (tmp_path / "step" / "part1").read_bytes() == bytes([1]) * 1000 + bytes([101]) * 1000
    listed = atomic_folder.read_manifest(tmp_path / "step")["files"]
    assert sorted(listed) == ["part0", "part1", "part2"]
    assert atomic_folder.verify(tmp_path / "step") == []
    (tmp_path / "step" / "part2").write_bytes(bytes(2000))
    assert [error.split(":")[0] for error in atomic_folder.verify(tmp_path / "step")] == ["part2"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), TypeError("a bug")])
def test_error_of_a_rank_reaches_the_main_process(tmp_path, error):
    """An error of the disk costs a checkpoint; any other also ends the rank."""
    is_bug = isinstance(error, TypeError)
    with pytest.raises(TypeError) if is_bug else nullcontext():
        write_shard(tmp_path / "parts", 1, writes(1, error=error))
    text = "a bug, on rank 1" if is_bug else "No space left on device, on rank 1"
    with pytest.raises(Failure if is_bug else DiskError, match=text):
        collect_shards(tmp_path / "parts", 2, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["parts"]


def test_silent_rank_is_not_waited_for_longer_than_patience(tmp_path):
    """It has written a file, but not that its files are complete."""
    (tmp_path / "parts" / "1").mkdir(parents=True)
    writes(1)(tmp_path / "parts" / "1")
    with pytest.raises(OSError, match="rank 1 has not written"):
        collect_shards(tmp_path / "parts", 2, tmp_path, patience=0.3)
    assert not (tmp_path / "part1").exists()


def _check_folder(folders: list[Path]) -> str:
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    accelerator = SimpleNamespace(
        is_main_process=rank == 0, process_index=rank, num_processes=world, parallelism_config=None
    )
    try:
        async_writer.check_shared_folder(accelerator, HostGroup(accelerator, 20), folders[rank])
    except UsageError as error:
        return str(error)
    return ""


def test_folder_that_not_all_nodes_share_is_refused_on_all_ranks(tmp_path):
    """The folder has one name everywhere, and is another one on the third node."""
    assert kit.spawn(3, _check_folder, [tmp_path / "run"] * 3, out=tmp_path / "out") == [""] * 3
    folders = [tmp_path / "run", tmp_path / "run", tmp_path / "else"]
    found = kit.spawn(3, _check_folder, folders, out=tmp_path / "out2")
    assert all("output_dir: 1 processes do not see " in text for text in found)
    assert list((tmp_path / "run").iterdir()) == []


# ---- read --------------------------------------------------------------------------------------------------------------

SHAPES = {"a": (7, 5), "b": (2, 3), "c": (1,), "d": (12,), "e": (3, 2, 4)}


def written(folder: Path, world: int) -> dict[str, torch.Tensor]:
    """Write the tensors of SHAPES and a number into as many files as `world`; return them all."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    tensors["step/a"] = torch.tensor(3.0)
    for rank in range(world):
        mine = {name: value for i, (name, value) in enumerate(tensors.items()) if i % world == rank}
        save_file(mine, folder / file_name("model", rank, world))
    if world > 1:
        write_index(folder)
    return tensors


@pytest.mark.parametrize("world", [1, 2, 4])
def test_reader_finds_every_tensor_in_any_number_of_files(tmp_path, world):
    """What was read does not change with the file."""
    folder = tmp_path / "step"
    tensors = written(folder, world)
    reader = TensorReader(folder, "model")
    read = {name: reader.full(name) for name in reader.where}
    assert TensorReader(folder, "optimizer").where == {}
    index = folder / "model.safetensors.index.json"
    assert index.exists() == (world > 1)
    if world > 1:
        named = json.loads(index.read_text())["weight_map"]
        assert {name: folder / file for name, file in named.items()} == reader.where
        assert {file.name for file in folder.glob("*.safetensors")} >= {f"model-00002-of-0000{world}.safetensors"}
    for file in folder.glob("*.safetensors"):
        with file.open("r+b") as opened:
            opened.write(bytes(file.stat().st_size))
    assert kit.same(read, tensors)


def _read_shards(folder: Path, mesh_shape: tuple[int, ...]) -> list[bool]:
    """Return, for each tensor, whether its shards are those of torch, and add up to the whole."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", mesh_shape)
    placements = [Replicate()] * (len(mesh_shape) - 1) + [Shard(0)]
    tensors = load_file(folder / "model.safetensors")
    reader, right = TensorReader(folder, "model"), []
    for name in SHAPES:
        parameter = distribute_tensor(tensors[name], mesh, placements)
        empty = torch.nn.Parameter(torch.zeros_like(parameter))
        found = reader.like(name, empty)
        assert isinstance(found, DTensor)
        assert (found.placements, found.device_mesh) == (parameter.placements, mesh)
        right.append(torch.equal(found.to_local(), parameter.to_local()))
        assert torch.equal(gather_full(found), tensors[name])
    other = reader.like("step/a", empty)  # of another shape than the parameter, so each process has it
    assert not is_partial(other)
    assert torch.equal(other, tensors["step/a"])
    return right


@pytest.mark.parametrize("mesh", [(3,), (2, 2)])
def test_each_process_reads_its_own_rows(tmp_path, mesh):
    """Seven rows over three or four processes; and two rows, so some processes have none."""
    written(tmp_path / "step", 1)
    world = torch.tensor(mesh).prod().item()
    assert kit.spawn(world, _read_shards, tmp_path / "step", mesh, out=tmp_path / "out") == [[True] * 5] * world


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
