"""Folders are complete or absent, and every kind of damage is found."""

import itertools
import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from engine.checkpointing.tensor_files import collect_shards, shard_folder
from engine.storage import atomic_folder, verify_hashes

SMALL, LARGE = b"two words", bytes(range(256)) * 1200
NAMES = {"small.txt", "empty.txt", "inner/large.bin", "manifest.json"}


def contents(folder: Path) -> None:
    """Write what a checkpoint is made of: files, one of them empty, one in a folder."""
    (folder / "small.txt").write_bytes(SMALL)
    (folder / "empty.txt").write_bytes(b"")
    (folder / "inner").mkdir()
    (folder / "inner" / "large.bin").write_bytes(LARGE)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def folder(tmp_path):
    """An intact folder of four files."""
    atomic_folder.publish(tmp_path / "step", contents, step=7)
    return tmp_path / "step"


def in_a_child(work, *args) -> int:
    """Return the exit code of a forked process that does `work`."""
    process = multiprocessing.get_context("fork").Process(target=work, args=args)
    process.start()
    process.join(60)
    return process.exitcode


# ---- complete or absent ------------------------------------------------------------------------------------------------


CALLS = {
    "write": (Path, "write_bytes"),
    "fsync": (os, "fsync"),
    "rename": (Path, "rename"),
}


def publish_until(folder: Path, at: str, end, publish=atomic_folder.publish) -> None:
    """Publish to `folder`, and let `end()` happen at the n-th of one of `CALLS`."""
    what, number = at.split()
    owner, name = CALLS[what]
    original, numbers = getattr(owner, name), itertools.count(1)

    def counted(*args, **kwargs):
        if next(numbers) == int(number):
            end()
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counted)
        publish(folder, contents, step=8)


def fail() -> None:
    raise BaseException("as KeyboardInterrupt")


def die() -> None:
    os._exit(9)


# Four files, two folders: the seventh fsync, after the rename, is that of the folder that holds it.
BEFORE = ["write 2", "fsync 1", "fsync 6", "rename 1"]


@pytest.mark.parametrize("end", [fail, die])
@pytest.mark.parametrize("at", BEFORE)
def test_end_before_the_rename_leaves_the_folder_as_it_was(tmp_path, at, end):
    """Absent, or with the old contents; the next call removes what a kill has left."""
    step, left = tmp_path / "step", [".step.tmp"] if end is die else []
    assert in_a_child(publish_until, step, at, end)
    assert [path.name for path in tmp_path.iterdir()] == left
    atomic_folder.publish(step, contents)
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    before = files(step)
    assert set(before) == NAMES
    assert in_a_child(publish_until, step, at, end)
    assert files(step) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [*left, "step"]


def test_end_at_or_after_the_renames_loses_nothing(folder):
    """Of two renames the first takes the old folder away: it must be put back."""
    before = files(folder)
    assert in_a_child(publish_until, folder, "rename 2", fail)
    assert files(folder) == before
    assert in_a_child(publish_until, folder, "rename 2", die)
    assert not folder.exists()
    (folder.parent / ".env.old").write_text("of the user")
    (folder.parent / ".cache.tmp").mkdir()
    atomic_folder.remove_unfinished(folder.parent, "st*")
    assert files(folder) == before
    assert sorted(path.name for path in folder.parent.iterdir()) == [".cache.tmp", ".env.old", "step"]
    assert in_a_child(publish_until, folder, "fsync 7", die)
    assert verify_hashes.verify(folder) == []
    assert files(folder) != before  # the new contents


def test_mutant_that_writes_in_place_is_caught(folder):
    def naive(folder: Path, write, **metadata) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write(folder)

    before = files(folder)
    assert in_a_child(publish_until, folder, "write 2", die, naive)
    assert files(folder) != before
    assert folder.exists()  # and half of it can be read


# ---- on the disk, in this order ----------------------------------------------------------------------------------------


def record(monkeypatch) -> list[tuple[str, str]]:
    """Return a list that fills with what is fsynced and renamed, in this order."""
    events, fsync, rename = [], os.fsync, Path.rename

    def synced(descriptor):
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        return fsync(descriptor)

    def renamed(self, target):
        events.append(("rename", str(self)))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    return events


def in_order(events: list[tuple[str, str]], temporary: Path) -> bool:
    """Return whether all was on the disk before the rename, a folder after what lies in it, and the rename after it."""
    moved = events.index(("rename", str(temporary)))
    synced = [path for kind, path in events[:moved] if kind == "fsync"]
    everything = {str(temporary / name) for name in [*NAMES, "inner", ""]} <= set(synced)
    return everything and synced[-1] == str(temporary) and ("fsync", str(temporary.parent)) in events[moved:]


@pytest.mark.parametrize("mutant", [None, "never", "after the rename"])
def test_all_is_on_the_disk_before_the_rename(tmp_path, monkeypatch, mutant):
    """Also the folders that publish creates: after a power cut checkpoints/ must be there with its contents."""
    late, flush = [], atomic_folder.fsync
    if mutant:
        monkeypatch.setattr(atomic_folder, "fsync", late.append)
    events = record(monkeypatch)
    atomic_folder.publish(tmp_path / "run" / "checkpoints" / "step", contents)
    if mutant == "after the rename":
        for path in late:
            flush(Path(str(path).replace(".step.tmp", "step")))
    assert in_order(events, tmp_path / "run" / "checkpoints" / ".step.tmp") == (mutant is None)
    synced = {path for kind, path in events if kind == "fsync"}
    assert mutant or {str(tmp_path / "run"), str(tmp_path)} <= synced


# ---- damage; flipped, shortened and removed files: tests/engine/checkpointing/test_resume.py --------------------------------


def test_mutant_manifest_without_its_own_hash_is_caught(folder, monkeypatch):
    manifest = folder / "manifest.json"
    stated = verify_hashes.read_manifest(folder)["manifest"]
    manifest.write_text(manifest.read_text().replace('"step": 7', '"step": 8'))
    assert verify_hashes.verify(folder) != []
    monkeypatch.setattr(verify_hashes, "_digest", lambda body: stated)
    assert verify_hashes.verify(folder) == []


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"manifest": 1}', "\0" * 900, "[" * 100_000, "\xff\xfe"])
def test_any_text_in_a_manifest_is_an_error_and_no_crash(folder, text):
    (folder / "manifest.json").write_text(text, encoding="latin-1")
    [error] = verify_hashes.verify(folder)
    assert error.startswith("manifest.json")
    assert verify_hashes.read_metadata(folder) == {}


def test_extra_tensors_are_an_error_and_other_files_are_not(folder):
    """A model.safetensors beside the shards of another step would be read in their place."""
    assert verify_hashes.read_metadata(folder) == {"step": 7}
    (folder / "notes.txt").write_text("mine")
    assert verify_hashes.verify(folder) == []
    (folder / "extra.safetensors").write_bytes(b"")
    [error] = verify_hashes.verify(folder)
    assert error.startswith("extra.safetensors ")


@pytest.mark.parametrize("name", ["../outside", "{absolute}", "pipe", "inner"])
def test_manifest_that_names_no_file_of_its_folder(folder, tmp_path, name):
    """A hash of /dev/zero has no end, and a pipe waits for a writer."""
    (tmp_path / "outside").write_bytes(b"")
    os.mkfifo(folder / "pipe")
    name = name.format(absolute=tmp_path / "outside")
    body = verify_hashes.read_manifest(folder)
    del body["manifest"]
    body["files"][name] = verify_hashes.hash_file(tmp_path / "outside") | {"size": (folder / name).stat().st_size}
    (folder / "manifest.json").write_text(json.dumps(body | {"manifest": verify_hashes._digest(body)}))
    assert verify_hashes.verify(folder) == [f"{name} is missing, or not a file of this folder"]


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o027, 0o640)])
def test_file_modes_follow_the_umask_of_shards_too(tmp_path, umask, mode):
    import torch
    from safetensors.torch import save_file

    def shard(folder):
        save_file({"weight": torch.ones(3)}, folder / f"of {folder.name}.safetensors")

    def gather(folder):
        shard(folder)
        (folder / "state.json").write_text("{}")
        assert {path.stat().st_mode & 0o777 for path in folder.glob("*.safetensors")} == {0o600}
        return {name: about["hash"] for name, about in collect_shards(tmp_path / "parts", 2, folder).items()}

    before = os.umask(umask)
    try:
        with shard_folder(tmp_path / "parts", 1) as own:
            shard(own)
        atomic_folder.publish(tmp_path / "step", gather)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "step").iterdir()}
    assert len(modes) == 4
    assert set(modes.values()) == {mode}
    assert verify_hashes.verify(tmp_path / "step") == []


# ---- rewrite ----------------------------------------------------------------------------------------------------------


def _die_at_fsync(path: Path) -> None:
    os.fsync = lambda descriptor: os._exit(9)
    atomic_folder.rewrite(path, "new, and longer than the old one")


def test_rewrite_leaves_the_old_text_or_the_new(tmp_path):
    path = tmp_path / "status.json"
    atomic_folder.rewrite(path, "old")
    assert in_a_child(_die_at_fsync, path) == 9
    assert path.read_text() == "old"
    [left] = tmp_path.glob(".status.json.*.tmp")
    assert left.read_text() == "new, and longer than the old one"  # written before it is flushed
    atomic_folder.rewrite(path, "new")
    assert path.read_text() == "new"
    atomic_folder.remove_unfinished(tmp_path, "*.json")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
