"""A process of a run that another start has replaced writes and deletes nothing, and one of the new start is not misled."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from addons.stores import run_in_store
from addons.stores._lease import Lease
from addons.stores._store import Store
from engine.config.errors import Failure
from engine.config.run_config import RunConfig
from engine.storage import verify_hashes


def save(folder: Path, step: int) -> Path:
    """Write a checkpoint of two files."""
    checkpoint = folder / "checkpoints" / f"step_{step:08d}"
    checkpoint.mkdir(parents=True)
    files = {name: checkpoint / name for name in ("state.json", "model.safetensors")}
    for path in files.values():
        path.write_text(f'{{"step": {step}}}')
    entries = {name: verify_hashes.hash_file(path) for name, path in files.items()}
    (checkpoint / verify_hashes.MANIFEST).write_text(verify_hashes.manifest_text(files, entries, {}))
    return checkpoint


@dataclass
class Machine:
    """A machine with a local folder of its own, in one launch of a run."""

    address: str
    folder: Path

    def start(self) -> run_in_store.RunInStore:
        return run_in_store.open_run(RunConfig(output_dir=self.address, cache_dir=str(self.folder)))


@pytest.fixture
def machine(address, tmp_path, monkeypatch):
    monkeypatch.setattr(run_in_store, "on_exit", lambda close: None)
    monkeypatch.setattr(Lease, "_is_free", lambda lease, holder: True)  # as if the holder's time had run out
    return lambda name: Machine(address, tmp_path / name)


def test_run_that_slept_while_another_took_over(machine, address):
    """It has not heard of that yet: its thread, which renews the lease, slept, too."""
    old = machine("old").start()
    old.lease.ended.set()
    old.publish(save(old.folder, 4))
    new = machine("new").start()
    for step in (8, 12):
        new.publish(save(new.folder, step))
    (new.folder / "metrics.jsonl").write_text("new\n" * 12)
    new.publish(save(new.folder, 16))
    new.lease.ended.set()
    before = {name: about for name, about in Store(address, "").list().items() if not name.startswith(".lease")}
    assert len(before) == 13

    assert old.lease.lost == ""  # the mutant looks at this alone
    (old.folder / "metrics.jsonl").write_text("old\n")
    checkpoint = save(old.folder, 20)
    for act in (
        old.prune,
        lambda: old.publish(checkpoint),
        lambda: old.rename(old.folder / "metrics.jsonl", checkpoint),
    ):
        old.lease.lost = ""
        with pytest.raises(Failure, match="taken over"):
            act()
    old.lease.lost = ""
    old._end()
    assert {name: about for name, about in Store(address, "").list().items() if not name.startswith(".lease")} == before


def test_second_save_of_a_step_replaces_the_first_one(machine, address):
    """Its files that the new one lacks are gone; those of a folder whose name begins alike stay."""
    run = machine("one").start()
    run.lease.ended.set()
    first = save(run.folder, 4)
    store = Store(address, "")
    for name in ("step_00000004/optimizer.safetensors", "step_00000004.old1/model.safetensors"):
        store.put(first / "model.safetensors", f"checkpoints/{name}")
    run.publish(first)
    folder = "checkpoints/step_00000004"
    names = {*store.list("checkpoints")}
    assert names == {f"{folder}/{path.name}" for path in first.iterdir()} | {f"{folder}.old1/model.safetensors"}


def test_node_that_reads_the_lease_of_the_launch_before(machine, monkeypatch):
    """A launch that was killed, started again on the same address and port, whose second node is faster than the first."""
    first, second = machine("first"), machine("second")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")

    def start_second() -> run_in_store.RunInStore:
        with monkeypatch.context() as patch:
            patch.setenv("RANK", "1")
            return second.start()

    killed = first.start()
    killed.lease.ended.set()
    killed.publish(save(killed.folder, 4))
    assert start_second().token == killed.token
    killed.publish(save(killed.folder, 8))

    early = start_second()
    newest = early.folder / "checkpoints" / "step_00000008"
    assert (early.token, newest.exists()) == (killed.token, False)
    restarted = first.start()
    restarted.lease.ended.set()
    early.agree(restarted.token)
    assert verify_hashes.verify(newest) == []

    file = newest / "model.safetensors"
    file.write_bytes(file.read_bytes()[::-1])
    restarted = first.start()
    restarted.lease.ended.set()
    early = start_second()
    assert (early.token, verify_hashes.verify(newest)) == (restarted.token, [])

    early.send_shard(save(early.folder / "elsewhere", 12))  # it writes as of this launch
    with pytest.raises(Failure, match="may not write there any more"):
        early_of_killed = start_second()
        early_of_killed.token = killed.token
        early_of_killed.send_shard(early.folder)


NAMES = {
    f"{folder}/{name}"
    for folder in ("final", "checkpoints/step_00000004", "checkpoints/step_00000012")
    for name in "ab"
}
MANIFESTS = {f"{name.rpartition('/')[0]}/{verify_hashes.MANIFEST}" for name in NAMES}
OLD = {f"final.old1/{verify_hashes.MANIFEST}", f"checkpoints/old_step_00000099.old1/{verify_hashes.MANIFEST}"}


@pytest.mark.parametrize(
    "kind, removed, folder",
    [
        ("", "", "final"),
        ("", "final", "checkpoints/step_00000012"),
        ("resume", "", "checkpoints/step_00000012"),
        ("report", "", None),
    ],
)
def test_what_is_read_of_a_run(kind, removed, folder):
    """Never what a run has renamed, though its name is the last one."""
    record = {"metrics.jsonl", "logs/rank_0.log"}
    names = dict.fromkeys(
        {name for name in NAMES | MANIFESTS if not removed or not name.startswith(removed)} | OLD | record
    )
    wanted = run_in_store._to_read(names, kind)
    assert wanted == record | {name for name in names if folder and name.startswith(f"{folder}/")}


def test_local_folder_is_below_the_cache(tmp_path):
    """Whatever the last part of an address is."""
    for name in ("..", "...", "a b", "ü"):
        folder = run_in_store._scratch(RunConfig(cache_dir=str(tmp_path)), "key", f"s3://bucket/{name}")
        assert folder.parent.parent == tmp_path / "stores"
        assert ".." not in folder.parts
