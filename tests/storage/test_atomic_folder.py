"""Folders are complete or not there, every kind of damage is found, and lines are whole or still to come."""

import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from src.checkpointing.sharded import ShardWriters
from src.storage import atomic_folder, held_folder, jsonl

SMALL, LARGE = b"two words", bytes(range(256)) * 1200


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


# ---- complete or nothing ---------------------------------------------------------------------------------------------


def test_a_published_folder_is_complete_and_says_what_it_is(folder):
    assert set(files(folder)) == {"small.txt", "empty.txt", "inner/large.bin", "manifest.json"}
    assert atomic_folder.verify(folder) == []
    assert atomic_folder.read_metadata(folder) == {"step": 7}
    assert [path.name for path in folder.parent.iterdir()] == ["step"]
    entries = json.loads((folder / "manifest.json").read_text())["files"]
    assert {name: entry["size"] for name, entry in entries.items()} == {
        "small.txt": len(SMALL),
        "empty.txt": 0,
        "inner/large.bin": len(LARGE),
    }


class Ending(BaseException):
    """What is no Exception, as KeyboardInterrupt."""


FAULTS = [ValueError("no"), OSError(errno.ENOSPC, "No space left on device"), Ending()]


def publish_until(folder: Path, at: str, end, publish=atomic_folder.publish) -> None:
    """Publish to `folder`, and let `end()` happen: in write, at the manifest, at the n-th fsync, at the n-th rename."""
    what, _, number = at.partition(" ")
    left = [int(number or 1)]

    def counted(original):
        def call(*args, **kwargs):
            left[0] -= 1
            if not left[0]:
                end()
            return original(*args, **kwargs)

        return call

    def write(temporary):
        (temporary / "half.txt").write_bytes(b"half of it")
        if what == "write":
            end()
        contents(temporary)

    with pytest.MonkeyPatch.context() as patch:
        if what == "manifest":
            patch.setattr(atomic_folder.json, "dumps", counted(json.dumps))
        if what == "fsync":
            patch.setattr(os, "fsync", counted(os.fsync))
        if what == "rename":
            patch.setattr(Path, "rename", counted(Path.rename))
        publish(folder, write, step=8)


# Five files, two folders: the eighth fsync, after the rename, is that of the folder that holds it.
BEFORE = ["write", "manifest 1", "manifest 2", "fsync 1", "fsync 5", "fsync 6", "fsync 7", "rename 1"]


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("at", BEFORE)
def test_an_error_leaves_nothing(tmp_path, at, error):
    def end():
        raise error

    with pytest.raises(type(error)):
        publish_until(tmp_path / "step", at, end)
    assert list(tmp_path.iterdir()) == []
    atomic_folder.publish(tmp_path / "step", contents)
    assert atomic_folder.verify(tmp_path / "step") == []


@pytest.mark.parametrize("at", [*BEFORE, "rename 2"])
def test_an_error_leaves_what_was_there_before(folder, at):
    """Of two renames the first takes the old one away: what comes after it must put it back."""
    before = files(folder)

    def end():
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError):
        publish_until(folder, at, end)
    assert folder.exists()
    assert files(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["step"]


@pytest.mark.parametrize("at", [*BEFORE, "fsync 8"])
def test_a_kill_leaves_nothing_that_is_read_and_the_next_removes_it(tmp_path, at):
    assert in_a_child(publish_until, tmp_path / "step", at, lambda: os._exit(9)) == 9
    if at == "fsync 8":  # after the rename
        assert atomic_folder.verify(tmp_path / "step") == []
    else:
        assert [path.name for path in tmp_path.iterdir()] == [".step.tmp"]
    atomic_folder.publish(tmp_path / "step", contents)
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    assert set(files(tmp_path / "step")) == {"small.txt", "empty.txt", "inner/large.bin", "manifest.json"}


@pytest.mark.parametrize("at", BEFORE)
def test_a_kill_leaves_what_was_there_before(folder, at):
    before = files(folder)
    assert in_a_child(publish_until, folder, at, lambda: os._exit(9)) == 9
    assert files(folder) == before


def test_a_kill_between_two_renames_loses_nothing_even_if_the_next_one_fails(folder):
    before = files(folder)
    assert in_a_child(publish_until, folder, "rename 2", lambda: os._exit(9)) == 9

    def fail(temporary):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError):
        atomic_folder.publish(folder, fail)
    kept = [path for path in (folder, folder.with_name(".step.old")) if path.exists()]
    assert kept, "the old one is gone, and there is no new one"
    assert files(kept[0]) == before


def naive(folder: Path, write, **about) -> None:
    """Writes at its place, which is what a rename before the writing comes to."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write(folder)


def test_mutant_that_writes_in_place_is_caught(folder):
    before = files(folder)
    assert in_a_child(publish_until, folder, "write", lambda: os._exit(9), naive) == 9
    assert files(folder) != before
    assert folder.exists()  # and half of it can be read


# ---- on the disk, in this order --------------------------------------------------------------------------------------


def record(monkeypatch) -> list[tuple[str, str]]:
    """Return a list that fills with what is fsynced, written and renamed, in this order."""
    events, fsync, rename, write = [], os.fsync, Path.rename, Path.write_text

    def synced(descriptor):
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        return fsync(descriptor)

    def renamed(self, target):
        events.append(("rename", str(self)))
        return rename(self, target)

    def written(self, *args, **kwargs):
        events.append(("write", str(self)))
        return write(self, *args, **kwargs)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(Path, "write_text", written)
    return events


def in_order(events: list[tuple[str, str]], temporary: Path) -> bool:
    """Return whether the manifest was written last, all was on the disk before the rename, and the rename after it."""
    names = ["small.txt", "empty.txt", "inner/large.bin", "manifest.json", "inner", ""]
    moved = events.index(("rename", str(temporary)))
    synced = [path for kind, path in events[:moved] if kind == "fsync"]
    everything = {str(temporary / name) for name in names} <= set(synced)
    # A folder is on the disk when its entries are: it comes after what lies in it.
    inside_out = everything and synced.index(str(temporary)) == len(synced) - 1
    manifest = events.index(("write", str(temporary / "manifest.json")))
    after_all = all(event[0] != "write" for event in events[manifest + 1 :])
    return inside_out and after_all and ("fsync", str(temporary.parent)) in events[moved:]


def test_all_is_on_the_disk_before_the_rename_and_the_rename_after_it(tmp_path, monkeypatch):
    stood = []

    def write(temporary):
        contents(temporary)
        stood.append((temporary / "manifest.json").exists())

    events = record(monkeypatch)
    atomic_folder.publish(tmp_path / "step", write)
    assert stood == [False]
    assert in_order(events, tmp_path / ".step.tmp")


def test_folders_that_publish_makes_on_the_way_are_on_the_disk_too(tmp_path, monkeypatch):
    """checkpoints/ itself is made by the first save: after a power cut it must be there with what it holds."""
    events = record(monkeypatch)
    atomic_folder.publish(tmp_path / "run" / "checkpoints" / "step", contents)
    synced = {path for kind, path in events if kind == "fsync"}
    assert {str(tmp_path / "run" / "checkpoints"), str(tmp_path / "run"), str(tmp_path)} <= synced


def test_mutants_that_do_not_wait_for_the_disk_are_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_folder, "fsync", lambda path: None)
    events = record(monkeypatch)
    atomic_folder.publish(tmp_path / "step", contents)
    assert not in_order(events, tmp_path / ".step.tmp")


def test_mutant_that_renames_before_the_disk_has_it_is_caught(tmp_path, monkeypatch):
    late, flush = [], atomic_folder.fsync
    monkeypatch.setattr(atomic_folder, "fsync", late.append)
    events = record(monkeypatch)
    atomic_folder.publish(tmp_path / "step", contents)
    for path in late:
        flush(Path(str(path).replace(".step.tmp", "step")))
    assert not in_order(events, tmp_path / ".step.tmp")


# ---- every kind of damage --------------------------------------------------------------------------------------------


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def bits(path: Path) -> list[int]:
    """Return positions of bits: all of them in a small file, and all over a large one, its ends included."""
    count = 8 * path.stat().st_size
    return list(range(count) if count < 20_000 else {*range(64), *range(0, count, 12_007), *range(count - 64, count)})


def undetected(folder: Path, name: str, faults=atomic_folder.verify) -> list[int]:
    """Return the bits of a file that can be flipped without a word that names the file."""
    path, missed = folder / name, []
    original = path.read_bytes()
    for bit in bits(path):
        flip(path, bit)
        found = faults(folder)
        if len(found) != 1 or not found[0].startswith(name):
            missed.append(bit)
        path.write_bytes(original)
    return missed


@pytest.mark.parametrize("name", ["small.txt", "inner/large.bin", "manifest.json"])
def test_one_flipped_bit_is_found_wherever_it_is(folder, name):
    assert undetected(folder, name) == []
    assert atomic_folder.verify(folder) == []


def test_mutant_manifest_without_a_hash_of_its_own_is_caught(folder):
    def unhashed(folder):
        body = json.loads((folder / "manifest.json").read_bytes())
        return [atomic_folder._file_error(folder / name, name, entry) for name, entry in body["files"].items()]

    def faults(folder):
        try:
            return [fault for fault in unhashed(folder) if fault]
        except Exception as error:
            return [f"manifest.json: {error}"]

    assert undetected(folder, "manifest.json", faults) != []


def test_mutant_that_looks_at_sizes_only_is_caught(folder, monkeypatch):
    def fault(path, name, entry):
        return None if path.stat().st_size == entry["size"] else name

    monkeypatch.setattr(atomic_folder, "_file_error", fault)
    assert len(undetected(folder, "small.txt")) == 8 * len(SMALL)


HOW = ["removed", "longer", "a folder", "a loop", "cut short", "emptied"]
DAMAGE = [(name, how) for name in ("small.txt", "inner/large.bin", "manifest.json") for how in HOW]
DAMAGE += [("empty.txt", how) for how in HOW[:4]]


@pytest.mark.parametrize("name, how", DAMAGE)
def test_a_damaged_file_is_named(folder, name, how):
    path = folder / name
    data = path.read_bytes()
    if how in ("removed", "a folder", "a loop"):
        path.unlink()
    {
        "removed": lambda: None,
        "cut short": lambda: path.write_bytes(data[:-1]),
        "emptied": lambda: path.write_bytes(b""),
        "longer": lambda: path.write_bytes(data + b"x"),
        "a folder": path.mkdir,
        "a loop": lambda: path.symlink_to(path.name),
    }[how]()
    [fault] = atomic_folder.verify(folder)
    assert fault.startswith(name)
    said = {"removed": "missing", "a loop": "cannot be read"}
    assert said.get(how, "") in fault


def test_a_file_that_the_disk_does_not_give_is_named_with_the_reason(folder, monkeypatch):
    def failing(path, *args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(atomic_folder, "open", failing, raising=False)
    found = atomic_folder.verify(folder)
    assert sorted(found) == [
        "empty.txt cannot be read: Input/output error",
        "inner/large.bin cannot be read: Input/output error",
        "small.txt cannot be read: Input/output error",
    ]


def as_nobody(folder: Path) -> None:
    os.seteuid(65534)
    os._exit(atomic_folder.verify(folder) == ["small.txt cannot be read: Permission denied"])


def test_a_file_that_may_not_be_read_is_named():
    if os.getuid():
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        os.chmod(name, 0o755)
        atomic_folder.publish(Path(name, "step"), contents)
        Path(name, "step", "small.txt").chmod(0o600)
        assert in_a_child(as_nobody, Path(name, "step")) == 1


@pytest.mark.parametrize(
    "text", ["[]", "null", "3", '"manifest"', "{}", '{"manifest": 1}', "\0" * 900, "[" * 100_000, "", "\xff\xfe"]
)
def test_whatever_stands_in_a_manifest_it_is_a_fault_and_no_crash(folder, text):
    (folder / "manifest.json").write_text(text, encoding="latin-1")
    [fault] = atomic_folder.verify(folder)
    assert fault.startswith("manifest.json")
    assert atomic_folder.read_metadata(folder) == {}


def test_tensors_that_nobody_wrote_are_a_fault_and_other_files_are_not(folder):
    """A model.safetensors beside the shards of another step would be read in their place."""
    assert atomic_folder.verify(folder) == []
    (folder / "notes.txt").write_text("mine")
    assert atomic_folder.verify(folder) == []
    (folder / "stray.safetensors").write_bytes(b"")
    assert atomic_folder.verify(folder) == ["stray.safetensors is of no part of it: remove it"]


def test_a_manifest_of_another_folder_is_a_fault(folder):
    def write(temporary):
        (temporary / "small.txt").write_bytes(b"TWO WORDS")

    atomic_folder.publish(folder.with_name("other"), write)
    shutil.copy(folder.with_name("other") / "manifest.json", folder)
    assert atomic_folder.verify(folder) == ["small.txt: its hash is not the one that was written"]


# ---- lines -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB, where root may mount one."""
    (tmp_path / "disk").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path / "disk"], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield tmp_path / "disk"
    subprocess.run(["umount", "-l", tmp_path / "disk"], check=True)


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_wait_for_the_flush_and_are_strict_json(tmp_path):
    lines = jsonl.JsonlWriter(tmp_path / "a.jsonl")
    lines.add({"step": 1})
    lines.add({"step": 2})
    assert not (tmp_path / "a.jsonl").exists()
    lines.flush()
    lines.flush()
    assert read_lines(tmp_path / "a.jsonl") == [{"step": 1}, {"step": 2}]
    with pytest.raises(ValueError):
        lines.add({"loss": float("nan")})
    lines.flush()
    assert len(read_lines(tmp_path / "a.jsonl")) == 2


def fill(small_disk: Path, lines) -> int:
    """Add lines to a full disk that has room for a few of them; return how many were added before one was refused."""
    count = 0
    (small_disk / "ballast").write_bytes(bytes(52 * 1024))
    while not lines.waiting and count < 10_000:
        count += 1
        lines.add({"step": count, "rest": "x" * 700})
        lines.try_flush()
    return count


def test_a_full_disk_gets_whole_lines_only_and_what_it_did_not_take_later(small_disk, capsys):
    """A real one: the write that does not fit is taken in part, as write(2) has it."""
    path = small_disk / "metrics.jsonl"
    lines = jsonl.JsonlWriter(path)
    count = fill(small_disk, lines)
    assert 1 < count < 10_000
    assert [line["step"] for line in read_lines(path)] == list(range(1, count))
    assert path.read_bytes().endswith(b"}\n")
    assert f"{path} cannot be written (No space left on device); its 1 last lines are kept" in capsys.readouterr().err
    lines.add({"step": count + 1, "rest": "x" * 5000})
    with pytest.raises(OSError):
        lines.flush()
    assert [line["step"] for line in read_lines(path)] == list(range(1, count))
    (small_disk / "ballast").unlink()
    lines.add({"step": count + 2})
    lines.try_flush()
    assert [line["step"] for line in read_lines(path)] == list(range(1, count + 3))
    assert lines.waiting == []


class Naive(jsonl.JsonlWriter):
    """Appends as people do."""

    def flush(self):
        text, self.waiting = "".join(self.waiting), []
        with self.path.open("a") as file:
            file.write(text)


def test_mutant_lines_that_are_half_written_are_caught(small_disk):
    path = small_disk / "metrics.jsonl"
    lines = Naive(path)
    (small_disk / "ballast").write_bytes(bytes(52 * 1024))
    with pytest.raises(OSError):
        for count in range(10_000):
            lines.add({"step": count, "rest": "x" * 700})
            lines.flush()
    assert not path.read_bytes().endswith(b"}\n")


def test_a_file_that_cannot_be_opened_keeps_its_lines(tmp_path, capsys):
    lines = jsonl.JsonlWriter(tmp_path / "there" / "a.jsonl")
    lines.add({"step": 1})
    lines.try_flush()
    assert "No such file or directory" in capsys.readouterr().err
    (tmp_path / "there").mkdir()
    lines.add({"step": 2})
    lines.try_flush()
    assert read_lines(tmp_path / "there" / "a.jsonl") == [{"step": 1}, {"step": 2}]


# ---- cut_back and rewrite --------------------------------------------------------------------------------------------

FIVE = "".join(f'{{"step": {n}}}\n' for n in range(1, 6))


@pytest.mark.parametrize(
    "text, kept",
    [
        (FIVE, FIVE[: 3 * 12]),
        (FIVE[:-1], FIVE[: 3 * 12]),  # the last line lacks its end
        (FIVE[:-5], FIVE[: 3 * 12]),  # half a line, as a kill leaves it
        (FIVE[: 3 * 12], FIVE[: 3 * 12]),  # nothing to cut
        (FIVE[: 3 * 12 - 1], FIVE[: 2 * 12]),  # the line that is to be kept is not whole
        (FIVE[: 2 * 12] + '{"st', FIVE[: 2 * 12]),
        (FIVE[12:], FIVE[12 : 3 * 12]),
        (FIVE[4 * 12 :], ""),  # all of it
        (FIVE + '[1]\n"x"\n\n\0\0\0\0\n', FIVE[: 3 * 12]),  # what is no object
        ("half of the only li", ""),
        ("\n", ""),
        ("", ""),
    ],
)
def test_cut_back_leaves_the_lines_up_to_a_step(tmp_path, text, kept):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    inode = path.stat().st_ino
    jsonl.truncate_after(path, lambda line: line["step"] <= 3)
    assert path.read_text() == kept
    assert path.stat().st_ino == inode  # in place


def test_cut_back_of_no_file_makes_none(tmp_path):
    jsonl.truncate_after(tmp_path / "none.jsonl", lambda line: True)
    assert list(tmp_path.iterdir()) == []


def test_cut_back_drops_many_lines_and_reads_only_those(tmp_path):
    path, read = tmp_path / "a.jsonl", []
    path.write_text("".join(f'{{"step": {n}}}\n' for n in range(5000)))
    jsonl.truncate_after(path, lambda line: read.append(line["step"]) or line["step"] <= 3000)
    assert read == list(range(4999, 2999, -1))
    assert len(read_lines(path)) == 3001


def test_rewrite_leaves_the_old_text_or_the_new(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    atomic_folder.rewrite(path, "old")
    events = record(monkeypatch)
    assert in_a_child(_rewrite_with, path, lambda *_: os._exit(9)) == 9
    assert path.read_text() == "old"
    atomic_folder.rewrite(path, "new")
    assert path.read_text() == "new"
    assert events == [("write", str(tmp_path / ".status.json.tmp")), ("fsync", str(tmp_path / ".status.json.tmp"))]
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def _rewrite_with(path: Path, fsync) -> None:
    os.fsync = fsync
    atomic_folder.rewrite(path, "new, and longer than the old one")


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_file_modes_follow_the_umask_shards_too(tmp_path, umask, mode):
    import torch
    from safetensors.torch import save_file

    def write(folder, name="model-00001-of-00002"):
        save_file({"weight": torch.ones(3)}, folder / f"{name}.safetensors")
        (folder / "state.json").write_text("{}") if name.endswith("1-of-00002") else None

    before = os.umask(umask)
    try:
        parts = tmp_path / "parts"
        ShardWriters(1, 2, 5).write_shard(parts, lambda folder: write(folder, "model-00002-of-00002"))

        def gathered(folder):
            write(folder)
            assert {path.stat().st_mode & 0o777 for path in folder.glob("*.safetensors")} == {0o600}
            return ShardWriters(0, 2, 5).collect_shards(parts, folder)

        atomic_folder.publish(tmp_path / "step", gathered)
    finally:
        os.umask(before)
    found = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "step").iterdir()}
    assert len(found) == 4
    assert set(found.values()) == {mode}
    assert atomic_folder.verify(tmp_path / "step") == []


@pytest.mark.parametrize("name", ["../outside", "{absolute}", "pipe", "inner"])
def test_manifest_naming_no_file_of_its_folder(folder, tmp_path, name):
    """A hash of /dev/zero has no end, and a pipe waits for a writer."""
    (tmp_path / "outside").write_bytes(b"")
    os.mkfifo(folder / "pipe")
    name = name.format(absolute=tmp_path / "outside")
    body = json.loads((folder / atomic_folder.MANIFEST).read_text())
    del body["manifest"]
    body["files"][name] = {
        "size": (folder / name).stat().st_size,
        "xxh3_128": atomic_folder.hash_file(tmp_path / "outside")["xxh3_128"],
    }
    (folder / atomic_folder.MANIFEST).write_text(json.dumps(body | {"manifest": atomic_folder._digest(body)}))
    assert atomic_folder.verify(folder) == [f"{name} is not a file of this folder"]


def test_rewrite_does_not_follow_symlinks(tmp_path):
    (tmp_path / "outside").write_text("kept")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("eval.json", ".eval.json.tmp"):
        (folder / name).symlink_to(tmp_path / "outside")
    atomic_folder.rewrite(folder / "eval.json", "new")
    assert (folder / "eval.json").read_text() == "new"
    assert (tmp_path / "outside").read_text() == "kept"


@pytest.mark.parametrize("recreated", [False, True])
def test_nothing_is_written_in_place_of_a_held_folder(tmp_path, monkeypatch, recreated):
    monkeypatch.setattr(held_folder, "_held", {})
    run, lines = tmp_path / "run", jsonl.JsonlWriter(tmp_path / "run" / "metrics.jsonl")
    run.mkdir()
    held_folder.hold(run)
    lines.add({"step": 1})
    lines.flush()
    assert held_folder.lost_folder() == ""

    def replace():
        (run / "metrics.jsonl").unlink(missing_ok=True)
        for path in sorted(run.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        run.rmdir()
        if recreated:
            run.mkdir()

    def write(folder: Path) -> None:
        (folder / "a").write_text("a")
        replace()
        folder.mkdir(parents=True)  # as save_pretrained does
        (folder / "a").write_text("a")

    with pytest.raises(OSError, match="deleted or moved"):
        atomic_folder.publish(run / "checkpoints" / "step_00000001", write)
    assert not (run / "checkpoints" / "step_00000001").exists()
    assert held_folder.lost_folder()
    lines.add({"step": 2})
    for call in (
        lines.flush,
        lambda: atomic_folder.rewrite(run / "status.json", ""),
        lambda: atomic_folder.publish(run / "final", write),
    ):
        with pytest.raises(OSError, match="deleted or moved"):
            call()
    assert not [path for path in run.rglob("*") if path.is_file()]
    atomic_folder.rewrite(tmp_path / "other.json", "")  # other folders are of no concern
