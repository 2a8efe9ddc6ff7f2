"""Saves beside training: what is written is the state of its step; a failing disk costs checkpoints, not the run."""

import errno
import json
import os
import shutil
import subprocess
import time

import pytest
import torch
from safetensors import SafetensorError

import train
from engine.checkpointing import async_writer, checkpoint_folder, checkpointer, model_card
from engine.checkpointing.tensor_files import is_disk_error, write_tensors
from engine.config.parsing import RunConfig
from engine.storage import atomic_folder
from tests.engine.checkpointing import recipe
from tests.engine.checkpointing.recipe import STEPS, command
from tests.helpers import kit
from tests.helpers.backend_runs import at_step, same_state, saved

# ---- what goes wrong in a save -----------------------------------------------------------------------------------------


def fail_at(steps, error: Exception, patch) -> None:
    """Let the writing of these checkpoints fail when most of each is written."""
    write = checkpoint_folder.write_state

    def failing(folder, state, shards):
        if state["progress"]["step"] in steps:
            raise error
        return write(folder, state, shards)

    patch.setattr(checkpoint_folder, "write_state", failing)


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("mutant", [False, True])
def test_failed_saves_are_warned_about_and_change_nothing(tiny, straight, tmp_path, monkeypatch, mutant):
    """The mutant removes the old checkpoint first, as accelerate's save_state does."""
    temporary_folder = atomic_folder.temporary_folder

    def remove_first(folder):
        for old in folder.parent.glob("step_*"):
            shutil.rmtree(old)
        return temporary_folder(folder)

    if mutant:
        monkeypatch.setattr(atomic_folder, "temporary_folder", remove_first)
    fail_at([8, 12], FULL, monkeypatch)
    codes, outputs = command(recipe.flags(tiny, save_total_limit=1), tmp_path, world=2)
    assert codes == [0, 0], outputs
    assert "warning: THE CHECKPOINT OF STEP 8 COULD NOT BE SAVED: No space left on device" in outputs[0]
    assert outputs[0].count("; training paused") == 1
    assert saved(tmp_path / "run") == ([] if mutant else [4])
    assert kit.same(kit.Run(tmp_path / "run").weights, straight[2].weights)
    assert kit.timeless(tmp_path / "run") == kit.timeless(straight[2].folder)


def no_card(*args) -> None:
    raise FULL


@pytest.mark.parametrize(
    "what, text, steps",
    [("checkpoints", "no checkpoint could be saved", [2, 4]), ("final", "final could not be written", range(2, 13, 2))],
)
def test_failures_end_all_ranks_and_the_same_command_resumes(tiny, straight, tmp_path, what, text, steps):
    """Two saves in a row, or the final model."""
    flags = recipe.flags(tiny, save_steps=2, max_failed_saves=2)
    with pytest.MonkeyPatch.context() as patch:
        if what == "final":
            patch.setattr(model_card, "write_card", no_card)
        else:
            fail_at(range(5, 99), FULL, patch)
        codes, outputs = command(flags, tmp_path, world=2)
    assert codes == [1, 1], outputs
    assert f"{text}: No space left on device" in outputs[0].rstrip().splitlines()[-1]
    assert saved(tmp_path / "run") == list(steps)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 1
    assert (kit.last_step(tmp_path / "run") < STEPS) == (what == "checkpoints")  # the second failure is that of step 8
    run = kit.run_training(2, tmp_path / "run", *flags)
    assert recipe.same_run(run, straight[2])


@pytest.mark.parametrize("mutant", [False, True])
def test_error_of_code_in_a_save_ends_the_run(tiny, tmp_path, monkeypatch, mutant):
    """The mutant counts every exception as a failed save."""
    fail_at(range(1, 99), KeyError("no such part"), monkeypatch)
    if mutant:
        monkeypatch.setattr(async_writer, "is_disk_error", lambda error: True)
    codes, outputs = command(recipe.flags(tiny, max_failed_saves=9), tmp_path, world=2)
    assert codes == [0 if mutant else 1] * 2, outputs
    assert ("training continues" in outputs[0]) == mutant
    assert ("in failing" in outputs[0]) == (not mutant)  # where it was raised, in the other thread
    if not mutant:
        assert outputs[0].rstrip().endswith("KeyError: 'no such part'")
        assert "no such part" not in outputs[1]
        assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 1


def test_oserror_of_code_is_a_failed_save(tiny, tmp_path, monkeypatch):
    """A save_pretrained that reads a file that it has not written: the warning names it, logs/ has the traceback."""
    fail_at([8], FileNotFoundError(errno.ENOENT, "No such file or directory", "own.json"), monkeypatch)
    codes, outputs = command(recipe.flags(tiny), tmp_path)
    assert codes == [0], outputs
    assert "COULD NOT BE SAVED: No such file or directory: own.json." in outputs[0]
    [log] = (tmp_path / "run" / "logs").glob("*.log")
    assert ", in failing" in log.read_text()
    assert ", in failing" not in outputs[0]
    assert saved(tmp_path / "run") == [4, 12]


def test_oserror_that_safetensors_wraps_is_of_the_disk(tmp_path):
    with pytest.raises(SafetensorError) as caught:
        write_tensors({"a": torch.zeros(1)}, tmp_path / "missing" / "file.safetensors")
    assert is_disk_error(caught.value)
    assert not is_disk_error(SafetensorError("a bug"))


# ---- a disk that is really full, or read-only --------------------------------------------------------------------------


@pytest.fixture
def disk(interrupted):
    """The checkpoints/ of an interrupted run, with step 4: a file system with room for a checkpoint and a half."""
    folder = interrupted()
    folder, before = folder / "checkpoints", (folder / "checkpoints").rename(folder / "before") / "step_00000004"
    folder.mkdir()
    size = sum(file.stat().st_size for file in before.iterdir())
    words = ["mount", "-t", "tmpfs", "-o", f"size={size * 3 // 2}", "tmpfs", folder]
    if subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    shutil.move(before, folder)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_full_disk_costs_checkpoints_and_not_the_run(tiny, straight, disk, tmp_path):
    """ENOSPC in the middle of a file."""
    codes, outputs = command(recipe.flags(tiny), tmp_path)
    assert codes == [0], outputs
    for step in (8, 12):
        assert f"THE CHECKPOINT OF STEP {step} COULD NOT BE SAVED" in outputs[0]
    assert saved(disk.parent) == [4]
    assert kit.same(kit.Run(disk.parent).weights, straight[1].weights)
    subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
    run = kit.run_training(1, disk.parent, *recipe.flags(tiny))
    assert saved(disk.parent) == [4, 8, 12]
    assert recipe.same_run(run, straight[1])


# ---- beside training ---------------------------------------------------------------------------------------------------


def hold(step: int, until: int, patch, seconds: float = 0.0) -> None:
    """Let the save of `step` wait, in its thread, for the line of step `until` in metrics.jsonl, and then so many seconds."""
    temporary_folder = atomic_folder.temporary_folder

    def slow(folder):
        if folder == at_step(folder.parents[1], step):
            kit.until(lambda: kit.last_step(folder.parents[1]) >= until)
            time.sleep(seconds)
        return temporary_folder(folder)

    patch.setattr(atomic_folder, "temporary_folder", slow)


@pytest.mark.parametrize("world, mutant", [(1, False), (2, False), (1, True)])
def test_slow_disk_gets_the_state_of_its_step(tiny, straight, tmp_path, monkeypatch, world, mutant):
    """Nothing of step 4 is written before step 8 is done, whose save waits for it. The mutant hands the live tensors of
    step 4 to the writer."""
    hold(4, 8, monkeypatch)
    if mutant:
        takes, copy = iter([lambda self, tensors: tensors]), async_writer.HostCopy.take
        monkeypatch.setattr(async_writer.HostCopy, "take", lambda *given: next(takes, copy)(*given))
    run = kit.run_training(world, tmp_path / "run", *recipe.flags(tiny))
    assert saved(run.folder) == [4, 8, 12]
    equal = [same_state(at_step(run, n), at_step(straight[world], n)) for n in (4, 8, 12)]
    assert not equal[0] if mutant else all(equal)
    assert kit.same(run.weights, straight[world].weights)


def test_save_is_skipped_while_the_one_before_is_written(tiny, straight, tmp_path, monkeypatch):
    hold(4, 10, monkeypatch)
    monkeypatch.setattr(checkpointer, "SLOW_DISK", 1.5)
    run = kit.run_training(2, tmp_path / "run", *recipe.flags(tiny))
    assert "the checkpoint of step 8 is " in (tmp_path / "run.out" / "rank0.txt").read_text()
    assert saved(run.folder) == [4, 12]
    assert kit.same(run.weights, straight[2].weights)


@pytest.mark.parametrize("rank, mutant", [(1, False), (0, True)])
def test_error_does_not_cost_the_checkpoint_in_progress(tiny, tmp_path, monkeypatch, rank, mutant):
    """A rank fails after step 5, when step 4 is copied but not yet written; the mutant exits at once."""
    hold(4, 5, monkeypatch, 3600.0 if mutant else 3.0)  # longer than a process takes to end that does not wait for this
    update = train.optimizer_step

    def failing(*args):
        if kit.last_step(tmp_path / "run") >= 5 and int(os.environ["RANK"]) == rank:
            raise ValueError("a cosmic ray")
        return update(*args)

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
