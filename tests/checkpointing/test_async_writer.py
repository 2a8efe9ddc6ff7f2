"""Saves beside training: what is written is the state of its step; a failing disk costs checkpoints, not the run."""

import errno
import json
import os
import shutil
import subprocess
import threading
import time

import pytest
from safetensors import SafetensorError

import train
from src.checkpointing import async_writer, checkpoint_folder, checkpointer, model_folder
from src.config.errors import is_disk_error
from src.config.parsing import RunConfig
from src.storage import atomic_folder
from tests.checkpointing import recipe
from tests.checkpointing.recipe import STEPS, command
from tests.helpers import kit
from tests.helpers.backend_runs import at_step, same_state, saved

# ---- what goes wrong in a save -----------------------------------------------------------------------------------------


def fail_at(steps, error: Exception, patch) -> None:
    """Let the writing of these checkpoints fail when most of each is written."""
    write = checkpoint_folder.write_checkpoint

    def failing(folder, model_with_loss, tensors, state, *rest):
        write(folder, model_with_loss, tensors, state, *rest)
        if state["progress"]["step"] in steps:
            raise error

    patch.setattr(checkpoint_folder, "write_checkpoint", failing)


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("mutant", [False, True])
def test_failed_saves_are_warned_about_and_change_nothing(tiny, straight, tmp_path, monkeypatch, mutant):
    """The mutant removes the old checkpoint first, as accelerate's save_state does."""
    publish = atomic_folder.publish

    def remove_first(folder, write, **metadata):
        for old in folder.parent.glob("step_*"):
            shutil.rmtree(old)
        return publish(folder, write, **metadata)

    if mutant:
        monkeypatch.setattr(atomic_folder, "publish", remove_first)
    fail_at([8, 12], FULL, monkeypatch)
    codes, outputs = command(recipe.flags(tiny, save_total_limit=1), tmp_path, world=2)
    assert codes == [0, 0], outputs
    assert "warning: THE CHECKPOINT OF STEP 8 COULD NOT BE SAVED: No space left on device" in outputs[0]
    assert outputs[0].count("; training paused") == 1
    assert saved(tmp_path / "run") == ([] if mutant else [4])
    assert kit.same(kit.Run(tmp_path / "run").weights, straight[2].weights)
    assert kit.timeless(tmp_path / "run") == kit.timeless(straight[2].folder)


def test_failures_in_a_row_end_all_ranks_and_the_same_command_resumes(tiny, straight, tmp_path):
    flags = recipe.flags(tiny, save_steps=2, max_failed_saves=2)
    with pytest.MonkeyPatch.context() as patch:
        fail_at(range(5, 99), FULL, patch)
        codes, outputs = command(flags, tmp_path, world=2)
    assert codes == [1, 1], outputs
    assert "No space left on device" in outputs[0].rstrip().splitlines()[-1]
    assert saved(tmp_path / "run") == [2, 4]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 1
    assert kit.last_step(tmp_path / "run") < STEPS  # the second failure is that of step 8
    run = kit.run_training(2, tmp_path / "run", *flags)
    assert recipe.same_run(run, straight[2])


MISSING = FileNotFoundError(errno.ENOENT, "No such file or directory", "config.json")


@pytest.mark.parametrize("mutant", [False, True])
def test_bug_that_looks_like_a_disk_error_ends_the_run(tiny, tmp_path, monkeypatch, mutant):
    """A fork's save_pretrained reads a file that it has not written. The mutant counts every OSError as the disk's."""
    fail_at(range(1, 99), MISSING, monkeypatch)
    if mutant:
        monkeypatch.setattr(async_writer, "is_disk_error", lambda error: isinstance(error, OSError))
    codes, outputs = command(recipe.flags(tiny, max_failed_saves=9), tmp_path, world=2)
    assert codes == [0 if mutant else 1] * 2, outputs
    assert ("training continues" in outputs[0]) == mutant
    assert ("in failing" in outputs[0]) == (not mutant)  # where it was raised, in the other thread
    if not mutant:
        assert outputs[0].rstrip().endswith("FileNotFoundError: [Errno 2] No such file or directory: 'config.json'")
        assert "config.json" not in outputs[1]
        assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 1


def test_disk_errors_are_told_by_their_number():
    disk = [FULL, PermissionError(errno.EACCES, "denied"), TimeoutError(errno.ETIMEDOUT, "nfs")]
    disk.append(SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"))
    code = [MISSING, OSError("no file named config.json"), TimeoutError("of a library"), RuntimeError("a bug")]
    code.append(SafetensorError("No such file or directory (os error 2)"))
    assert [is_disk_error(error) for error in disk + code] == [True] * len(disk) + [False] * len(code)


def test_failed_final_model_ends_all_ranks_and_the_same_command_writes_it(tiny, straight, tmp_path):
    def failing(*args):
        raise FULL

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_folder, "write_card", failing)
        codes, outputs = command(recipe.flags(tiny), tmp_path, world=2)
    assert codes == [1, 1], outputs
    assert "final could not be written: No space left on device" in outputs[0].rstrip().splitlines()[-1]
    assert recipe.same_run(kit.run_training(2, tmp_path / "run", *recipe.flags(tiny)), straight[2])


# ---- a disk that is really full, or read-only --------------------------------------------------------------------------


@pytest.fixture
def disk(interrupted):
    """An interrupted run; its checkpoints/ with step 4 is a file system of its own, of 8 MB."""
    folder = interrupted()
    shutil.move(folder / "checkpoints", folder / "before")
    (folder / "checkpoints").mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder / "checkpoints")]
    if subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    shutil.move(folder / "before" / "step_00000004", folder / "checkpoints")
    yield folder / "checkpoints"
    subprocess.run(["umount", "-l", str(folder / "checkpoints")], check=True)


def test_full_disk_costs_checkpoints_and_not_the_run(tiny, straight, disk, tmp_path):
    """ENOSPC in the middle of a file."""
    size = sum(file.stat().st_size for file in (disk / "step_00000004").iterdir())
    with (disk / "ballast").open("ab") as file:
        file.write(bytes(shutil.disk_usage(disk).free - size // 2))
    codes, outputs = command(recipe.flags(tiny), tmp_path)
    assert codes == [0], outputs
    for step in (8, 12):
        assert f"THE CHECKPOINT OF STEP {step} COULD NOT BE SAVED" in outputs[0]
    assert saved(disk.parent) == [4]
    assert kit.same(kit.Run(disk.parent).weights, straight[1].weights)
    (disk / "ballast").unlink()
    run = kit.run_training(1, disk.parent, *recipe.flags(tiny))
    assert saved(disk.parent) == [4, 8, 12]
    assert recipe.same_run(run, straight[1])


# ---- beside training ---------------------------------------------------------------------------------------------------


def _slow(argv, held: int, released: int, mutant: bool = False):
    """Train on this rank while the save of step `held` waits for the update of step `released`.

    Return how many updates were done before that save continued, on the rank that writes. The mutant hands the live
    tensors to the writer; there, training waits while that save is written, so that its files agree with each other."""
    count, seen, update, publish = [0], [], train.optimizer_step, atomic_folder.publish
    gate, written = threading.Event(), threading.Event()

    def counted(*args):
        result = update(*args)
        count[0] += 1
        if count[0] == released:
            gate.set()
            assert not mutant or written.wait(300)
        return result

    def slow(folder, write, **metadata):
        if folder.name == f"step_{held:08d}":
            seen.append(gate.wait(300))
        result = publish(folder, write, **metadata)
        if folder.name == f"step_{held:08d}":
            written.set()
        return result

    train.optimizer_step, atomic_folder.publish = counted, slow
    if mutant:
        takes = iter([lambda self, tensors: tensors])  # only the first save: training does not wait for the others
        copy = async_writer.HostCopy.take
        async_writer.HostCopy.take = lambda *given: next(takes, copy)(*given)
    train.main([str(word) for word in argv])
    return seen


@pytest.mark.parametrize("world, mutant", [(1, False), (2, False), (1, True)])
def test_slow_disk_gets_the_state_of_its_step(tiny, straight, tmp_path, world, mutant):
    """Nothing of step 4 is written before step 7 is done."""
    flags = recipe.flags(tiny, output_dir=tmp_path / "run")
    [seen, *others] = kit.spawn(world, _slow, flags, 4, 7, mutant, out=tmp_path / "out")
    assert seen == [True]
    assert others == [[]] * (world - 1)
    assert saved(tmp_path / "run") == [4, 8, 12]
    equal = [same_state(at_step(tmp_path / "run", n), at_step(straight[world], n)) for n in (4, 8, 12)]
    assert not equal[0] if mutant else all(equal)
    assert kit.same(kit.Run(tmp_path / "run").weights, straight[world].weights)


def test_save_is_skipped_while_the_one_before_is_written(tiny, straight, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "SLOW_DISK", 1.5)
    kit.spawn(2, _slow, recipe.flags(tiny, output_dir=tmp_path / "run"), 4, 10, out=tmp_path / "out")
    assert "the checkpoint of step 8 is " in (tmp_path / "out" / "rank0.txt").read_text()
    assert saved(tmp_path / "run") == [4, 12]
    assert kit.same(kit.Run(tmp_path / "run").weights, straight[2].weights)


@pytest.mark.parametrize("rank, mutant", [(1, False), (0, True)])
def test_error_does_not_cost_the_checkpoint_in_progress(tiny, tmp_path, monkeypatch, rank, mutant):
    """A rank fails after step 5, when step 4 is copied but not yet written; the mutant exits at once."""
    publish, update, count = atomic_folder.publish, train.optimizer_step, [0]

    def slow(*args, **metadata):
        while not (tmp_path / "failed").exists():
            time.sleep(0.02)
        time.sleep(3600.0 if mutant else 3.0)  # longer than a process takes to end that does not wait for this
        return publish(*args, **metadata)

    def failing(*args):
        count[0] += 1
        if count[0] == 6 and int(os.environ["RANK"]) == rank:
            (tmp_path / "failed").touch()
            raise ValueError("a cosmic ray")
        return update(*args)

    monkeypatch.setattr(atomic_folder, "publish", slow)
    monkeypatch.setattr(train, "optimizer_step", failing)
    if mutant:
        monkeypatch.setattr(async_writer, "on_exit", lambda close: None)
    codes, outputs = command(recipe.flags(tiny), tmp_path, world=2)
    assert codes == [1, 1], outputs
    assert "ValueError: a cosmic ray" in outputs[rank]
    found = checkpoint_folder.list_checkpoints(tmp_path / "run") if mutant else saved(tmp_path / "run")
    assert found == ([] if mutant else [4])


# ---- which checkpoints are kept ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, kept",
    [
        ({"save_total_limit": 3}, [1, 8, 9, 10]),
        ({"save_total_limit": 2, "save_keep_every": 4}, [1, 4, 8, 9, 10]),
        ({"save_total_limit": 1, "metric_for_best_model": "loss"}, [1, 3, 10]),
    ],
)
def test_newest_best_and_every_nth_checkpoint_are_kept(tmp_path, fields, kept):
    """A renamed or linked one, too: step 1."""
    at_step(tmp_path, 1).parent.mkdir()
    at_step(tmp_path, 1).symlink_to(tmp_path)
    (tmp_path / "checkpoints" / "mine").mkdir()
    for step in range(2, 11):
        at_step(tmp_path, step).mkdir()
    checkpoint_folder.prune(RunConfig(output_dir=str(tmp_path), **fields), best_step=3)
    assert [checkpoint_folder.step_of(path) for path in checkpoint_folder.list_checkpoints(tmp_path)] == kept
    assert (tmp_path / "checkpoints" / "mine").exists()
