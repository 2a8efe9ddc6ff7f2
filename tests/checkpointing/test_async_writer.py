"""Saves beside training: what is written is the state of its step; a failing disk costs checkpoints, not the run."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

import train
from src.checkpointing import (
    async_writer,
    checkpoint_format,
    checkpoint_list,
    checkpointer,
    host_copy,
    model_folder,
    writer_thread,
)
from src.config.parsing import RunConfig
from src.storage import atomic_folder
from src.storage.disk_errors import DiskError, is_disk_error
from src.training.train_state import TrainState
from tests.checkpointing import recipe
from tests.checkpointing.recipe import STEPS, at_step, command, same_state, saved
from tests.helpers import kit
from tests.helpers.stopping import send_here

# ---- what goes wrong in a save -----------------------------------------------------------------------------------------


def fail_at(steps, error: Exception, patch) -> None:
    """Let the writing of these checkpoints fail when most of each is written."""
    write = checkpoint_format.write_checkpoint

    def failing(folder, model_with_loss, tensors, state, *rest):
        write(folder, model_with_loss, tensors, state, *rest)
        if state["progress"]["step"] in steps:
            raise error

    patch.setattr(checkpoint_format, "write_checkpoint", failing)


FULL = OSError(errno.ENOSPC, "No space left on device")
BUG = RuntimeError("a bug in the writing")


def test_failed_save_is_warned_about_and_changes_nothing(tiny, straight, tmp_path, monkeypatch):
    fail_at([8], FULL, monkeypatch)
    codes, outputs = command(recipe.flags(tiny, save_total_limit=1), tmp_path, world=2)
    assert codes == [0, 0], outputs
    assert "warning: THE CHECKPOINT OF STEP 8 COULD NOT BE SAVED: No space left on device" in outputs[0]
    assert "2 checkpoints saved; training paused" in outputs[0]
    assert saved(tmp_path / "run") == [12]
    assert recipe.same_run(kit.Run(tmp_path / "run"), straight[2])


def test_failures_in_a_row_end_all_ranks_and_the_same_command_resumes(tiny, straight, tmp_path):
    flags = recipe.flags(tiny, save_steps=2, max_failed_saves=2)
    with pytest.MonkeyPatch.context() as patch:
        fail_at(range(5, 99), FULL, patch)
        codes, outputs = command(flags, tmp_path, world=2)
    assert codes == [1, 1], outputs
    assert "No space left on device" in outputs[0].rstrip().splitlines()[-1]
    assert "Traceback" not in "".join(outputs)
    assert saved(tmp_path / "run") == [2, 4]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 1
    assert kit.last_step(tmp_path / "run") < STEPS  # the second failure is that of step 8
    run = kit.run_training(2, tmp_path / "run", *flags)
    assert recipe.same_run(run, straight[2])


def test_successful_save_resets_the_count_of_failures(tiny, tmp_path, monkeypatch):
    fail_at([2, 6, 10], FULL, monkeypatch)
    codes, outputs = command(recipe.flags(tiny, save_steps=2, max_failed_saves=2), tmp_path)
    assert codes == [0], outputs
    assert outputs[0].count("(1 failed in a row; max_failed_saves is 2)") == 3
    assert saved(tmp_path / "run") == [4, 8, 12]


@pytest.mark.parametrize("world, step", [(2, 8), (1, STEPS)], ids=["in the middle", "in the last save"])
def test_bug_in_the_writer_ends_all_ranks_with_its_traceback(tiny, tmp_path, monkeypatch, world, step):
    fail_at([step], BUG, monkeypatch)
    fields = {"max_steps": 1000, "save_steps": 8} if world == 2 else {}
    codes, outputs = command(recipe.flags(tiny, **fields), tmp_path, world)
    assert codes == [1] * world, outputs
    assert "Traceback" in outputs[0]
    assert "in failing" in outputs[0]  # where it was raised, in the other thread
    assert outputs[0].rstrip().endswith("RuntimeError: a bug in the writing")
    assert "a bug in the writing" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert "a bug in the writing" not in "".join(outputs[1:])


MISSING = FileNotFoundError(errno.ENOENT, "No such file or directory", "config.json")


@pytest.mark.parametrize("mutant", [False, True])
def test_bug_that_looks_like_a_disk_error_ends_the_run(tiny, tmp_path, monkeypatch, mutant):
    """A fork's save_pretrained reads a file that it has not written. The mutant counts every OSError as the disk's."""
    fail_at(range(1, 99), MISSING, monkeypatch)
    if mutant:
        monkeypatch.setattr(async_writer, "is_disk_error", lambda error: isinstance(error, OSError))
    codes, outputs = command(recipe.flags(tiny, max_failed_saves=9), tmp_path)
    assert codes == [0 if mutant else 1], outputs
    assert ("training continues" in outputs[0]) == mutant
    assert ("Traceback" in outputs[0]) == (not mutant)
    if not mutant:
        assert outputs[0].rstrip().endswith("FileNotFoundError: [Errno 2] No such file or directory: 'config.json'")
        assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 1


def test_disk_errors_are_told_by_their_number():
    disk = [
        FULL,
        PermissionError(errno.EACCES, "denied"),
        DiskError(None, "late"),
        TimeoutError(errno.ETIMEDOUT, "nfs"),
    ]
    disk.append(SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"))
    code = [
        BUG,
        MISSING,
        OSError("no file named config.json"),
        OSError(None, "of a library"),
        TimeoutError("of a library"),
    ]
    code.append(SafetensorError("No such file or directory (os error 2)"))
    assert [is_disk_error(error) for error in disk + code] == [True] * len(disk) + [False] * len(code)


def test_failed_final_model_ends_all_ranks_and_the_same_command_writes_it(tiny, straight, tmp_path):
    def failing(*args):
        raise FULL

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_folder, "write_final", failing)
        codes, outputs = command(recipe.flags(tiny), tmp_path, world=2)
    assert codes == [1, 1], outputs
    assert "[Errno 28] No space left on device" in outputs[0].rstrip().splitlines()[-1]
    assert "Traceback" not in "".join(outputs)
    assert recipe.same_run(kit.run_training(2, tmp_path / "run", *recipe.flags(tiny)), straight[2])


def test_old_checkpoints_that_cannot_be_removed_are_no_failed_save(tiny, tmp_path, monkeypatch):
    rmtree = shutil.rmtree

    def failing(path, *args, **kwargs):
        if Path(path).name.startswith("step_"):
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rmtree(path, *args, **kwargs)

    monkeypatch.setattr(checkpoint_list.shutil, "rmtree", failing)
    codes, outputs = command(recipe.flags(tiny, save_total_limit=1, max_failed_saves=1), tmp_path)
    assert codes == [0], outputs
    assert "COULD NOT BE SAVED" not in outputs[0]
    assert "Device or resource busy" in outputs[0]
    assert saved(tmp_path / "run") == [4, 8, 12]


# ---- a disk that is really full, or read-only --------------------------------------------------------------------------


def mount(folder: Path, *options: str) -> None:
    """Mount a file system of 8 MB, if root may do that."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", ",".join(("size=8m", *options)), "tmpfs", str(folder)]
    if subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")


def leave_free(disk: Path, free: int) -> None:
    """Fill a disk up to so many bytes."""
    with (disk / "ballast").open("ab") as file:
        file.write(bytes(max(0, shutil.disk_usage(disk).free - free)))


@pytest.fixture
def disk(interrupted):
    """An interrupted run; its checkpoints/ with step 4 is a file system of its own."""
    folder = interrupted()
    shutil.rmtree(folder / at_step(8))
    shutil.move(folder / "checkpoints", folder / "before")
    mount(folder / "checkpoints")
    shutil.move(folder / "before" / "step_00000004", folder / "checkpoints")
    (folder / "before").rmdir()
    yield folder / "checkpoints"
    subprocess.run(["umount", "-l", str(folder / "checkpoints")], check=True)


def test_full_disk_costs_checkpoints_and_not_the_run(tiny, straight, disk, tmp_path):
    """ENOSPC in the middle of a file, as when another process takes the room after it was checked."""
    size = sum(file.stat().st_size for file in (disk / "step_00000004").iterdir())
    leave_free(disk, size // 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_writer.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
        codes, outputs = command(recipe.flags(tiny), tmp_path)
    assert codes == [0], outputs
    for step in (8, 12):
        assert f"THE CHECKPOINT OF STEP {step} COULD NOT BE SAVED" in outputs[0]
    assert saved(disk.parent) == [4]
    assert kit.same(kit.Run(disk.parent).weights, straight[1].weights)
    codes, outputs = command(recipe.flags(tiny), tmp_path)  # now the check finds it, before a byte is written
    assert outputs[0].count("MB are free") == 3  # both saves, and the end
    (disk / "ballast").unlink()
    run = kit.run_training(1, disk.parent, *recipe.flags(tiny))
    assert saved(disk.parent) == [4, 8, 12]
    assert recipe.same_run(run, straight[1])


def test_read_only_disk_costs_checkpoints_and_not_the_run(tiny, straight, disk, tmp_path):
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    codes, outputs = command(recipe.flags(tiny), tmp_path)
    assert codes == [0], outputs
    assert outputs[0].count("COULD NOT BE SAVED: Read-only file system") == 2
    assert kit.same(kit.Run(disk.parent).weights, straight[1].weights)
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert saved(disk.parent) == [4]


def test_without_room_nothing_is_written_and_no_line_is_lost(tiny, straight, tmp_path):
    """Half a megabyte is free, less than the check leaves for others: every save is refused by it."""
    run = tmp_path / "run"
    mount(run)
    try:
        leave_free(run, 1 << 19)
        codes, outputs = command(recipe.flags(tiny, max_failed_saves=9), tmp_path)
        assert codes == [0], outputs
        assert outputs[0].count("COULD NOT BE SAVED: 1.") == 3
        assert re.search(r"MB are needed, 0\.[1-5] MB are free", outputs[0])
        assert not (run / "checkpoints").exists()
        assert kit.same(kit.Run(run).weights, straight[1].weights)
        assert kit.Run(run).losses() == straight[1].losses()
        assert kit.first_other_step(run) is None
        assert len(kit.ledger_text(run).splitlines()) == 1 + STEPS
    finally:
        subprocess.run(["umount", "-l", str(run)], check=True)


# ---- beside training ---------------------------------------------------------------------------------------------------


def _slow(argv, held: int, released: int, mutant: bool = False, seconds: float = 0.0):
    """Train on this rank while the save of step `held` waits for the update of step `released`, or for some seconds.

    Return how many updates were done before that save continued, on the rank that writes. The mutant hands the live
    tensors to the writer; there, training waits while that save is written, so that its files agree with each other."""
    count, seen, update, publish = [0], [], train.optimizer_step, atomic_folder.publish
    gate, written = threading.Event(), threading.Event()

    def counted(*args):
        result = update(*args)
        count[0] += 1
        if count[0] == released:
            gate.set()
            assert not mutant or written.wait(100)
        return result

    def slow(folder, write, **metadata):
        if folder.name == f"step_{held:08d}":
            time.sleep(seconds)
            seen.append(gate.wait(100))
        result = publish(folder, write, **metadata)
        if folder.name == f"step_{held:08d}":
            written.set()
        return result

    train.optimizer_step, atomic_folder.publish = counted, slow
    if seconds:
        gate.set()
    if mutant:
        host_copy.HostCopy.take = lambda self, tensors: tensors
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
    equal = [same_state(tmp_path / "run" / at_step(n), straight[world].folder / at_step(n)) for n in (4, 8, 12)]
    assert not equal[0] if mutant else all(equal)
    assert kit.same(kit.Run(tmp_path / "run").weights, straight[world].weights)


def test_save_is_skipped_while_the_one_before_is_written(tiny, straight, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "SLOW_DISK", 1.5)
    kit.spawn(2, _slow, recipe.flags(tiny, output_dir=tmp_path / "run"), 4, 10, out=tmp_path / "out")
    assert "the checkpoint of step 8 is " in (tmp_path / "out" / "rank0.txt").read_text()
    assert saved(tmp_path / "run") == [4, 12]
    assert kit.same(kit.Run(tmp_path / "run").weights, straight[2].weights)


def test_end_of_the_run_waits_for_its_last_checkpoint(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "SLOW_DISK", 0.5)
    flags = recipe.flags(tiny, save_steps=11, output_dir=tmp_path / "run")
    kit.spawn(1, _slow, flags, 11, 0, False, 3.0, out=tmp_path / "out")
    assert saved(tmp_path / "run") == [11, 12]


@pytest.mark.parametrize("rank, mutant", [(0, False), (1, False), (0, True)])
def test_error_does_not_cost_the_checkpoint_in_progress(tiny, tmp_path, monkeypatch, rank, mutant):
    """A rank fails after step 5, when step 4 is copied but not yet written; the mutant exits at once."""
    publish, update, count = atomic_folder.publish, train.optimizer_step, [0]

    def slow(*args, **metadata):
        time.sleep(60.0 if mutant else 1.0 + 3 * rank)  # other ranks end two seconds after the one that failed
        return publish(*args, **metadata)

    def failing(*args):
        count[0] += 1
        if count[0] == 6 and int(os.environ["RANK"]) == rank:
            raise ValueError("a cosmic ray")
        return update(*args)

    monkeypatch.setattr(atomic_folder, "publish", slow)
    monkeypatch.setattr(train, "optimizer_step", failing)
    if mutant:
        monkeypatch.setattr(writer_thread, "on_exit", lambda close: None)
    codes, outputs = command(recipe.flags(tiny), tmp_path, world=2)
    assert codes == [1, 1], outputs
    assert "ValueError: a cosmic ray" in outputs[rank]
    found = checkpoint_list.list_checkpoints(tmp_path / "run") if mutant else saved(tmp_path / "run")
    assert found == ([] if mutant else [4])


def _stopped(argv, *args):
    """Train on this rank, and get a SIGTERM in the sixth update."""
    from src.runtime.exit_codes import run_main

    count, update = [0], train.optimizer_step

    def stopping(*rest):
        count[0] += 1
        if count[0] == 6:
            send_here(signal.SIGTERM)
        return update(*rest)

    train.optimizer_step = stopping
    sys.argv = ["train.py", *(str(word) for word in argv)]
    run_main(lambda argv: _slow(argv, *args))


def test_stopped_run_reports_saved_only_if_it_is(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "SLOW_DISK", 0.5)
    flags = recipe.flags(tiny, output_dir=tmp_path / "run")
    with pytest.raises(kit.RankFailed) as ended:
        kit.spawn(1, _stopped, flags, 4, 0, False, 4.0, out=tmp_path / "out")
    done = kit.last_step(tmp_path / "run")
    assert done >= 6
    is_saved = saved(tmp_path / "run")[-1] == done
    assert ("Saved to" in ended.value.texts[0]) == is_saved
    assert ended.value.codes == [75 if is_saved else 1]


def test_log_reports_the_cost_of_each_save(straight):
    log = (straight[1].folder / "logs" / "rank_0.log").read_text()
    assert log.count("saved: training ") == 3
    assert "3 checkpoints saved; training paused " in log


# ---- which checkpoints are kept ----------------------------------------------------------------------------------------


def kept(folder: Path, steps, values=None, **fields) -> list[int]:
    """Return which of the checkpoints of `steps`, evaluated to `values`, are kept."""
    cfg, progress = RunConfig(output_dir=str(folder), **fields), TrainState()
    for number in steps:
        (folder / at_step(number)).mkdir(parents=True, exist_ok=True)
    for progress.step, value in sorted((values or {}).items()):
        progress.update_best({"loss": value, "f1": value}, cfg)
    checkpoint_list.prune(cfg, progress.best_step)
    return [checkpoint_list.step_of(path) for path in checkpoint_list.list_checkpoints(folder)]


EVERY = range(1, 11)
VALUES = {n: abs(n - 3.5) for n in EVERY}  # 3 and 4 are best, 10 is worst


@pytest.mark.parametrize(
    "fields, values, expected",
    [
        ({"save_total_limit": 1}, None, [10]),
        ({"save_total_limit": 3}, None, [8, 9, 10]),
        ({"save_total_limit": 99}, None, list(EVERY)),
        ({"save_total_limit": 2, "save_keep_every": 4}, None, [4, 8, 9, 10]),
        ({"save_total_limit": 2}, VALUES, [9, 10]),  # without a metric, none is best
        ({"save_total_limit": 2, "metric_for_best_model": "loss"}, VALUES, [3, 9, 10]),
        ({"save_total_limit": 2, "metric_for_best_model": "loss", "greater_is_better": True}, VALUES, [9, 10]),
        ({"save_total_limit": 1, "metric_for_best_model": "loss", "save_keep_every": 5}, VALUES, [3, 5, 10]),
        ({"save_total_limit": 1, "metric_for_best_model": "loss"}, VALUES | {3: None, 4: None}, [2, 10]),
        ({"save_total_limit": 1, "metric_for_best_model": "f1"}, VALUES | {2: 99.0}, [2, 10]),
        ({"save_total_limit": 1, "metric_for_best_model": "loss"}, {11: 0.0} | VALUES, [10]),  # 11 is not there
    ],
)
def test_newest_best_and_every_nth_checkpoint_are_kept(tmp_path, fields, values, expected):
    assert kept(tmp_path, EVERY, values, **fields) == expected


@pytest.mark.parametrize("moment", ["before", "in the middle"])
def test_new_checkpoint_is_complete_before_an_old_one_is_removed(tiny, straight, tmp_path, moment):
    """Killed before an old checkpoint is removed, and in the middle of that."""
    flags = recipe.flags(tiny, save_total_limit=1)

    def dying(cfg, best_step):
        if doomed := checkpoint_list.checkpoints_to_delete(cfg, best_step):
            if moment != "before":
                (doomed[0] / "model.safetensors").unlink()
            os._exit(9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_list, "prune", dying)
        with pytest.raises(kit.RankFailed):
            kit.run_training(1, tmp_path / "run", *flags)
    assert atomic_folder.verify(tmp_path / "run" / at_step(8)) == []
    assert bool(atomic_folder.verify(tmp_path / "run" / at_step(4))) == (moment != "before")
    assert recipe.same_run(kit.run_training(1, tmp_path / "run", *flags), straight[1])
    assert saved(tmp_path / "run") == [12]


def test_mutant_that_removes_the_old_one_first_is_caught(tiny, tmp_path, monkeypatch):
    """As accelerate's save_state does: after a failed save, no checkpoint is left."""
    publish = atomic_folder.publish

    def remove_first(folder, write, **metadata):
        for old in folder.parent.glob("step_*"):
            shutil.rmtree(old)
        return publish(folder, write, **metadata)

    monkeypatch.setattr(atomic_folder, "publish", remove_first)
    fail_at([8, 12], FULL, monkeypatch)
    command(recipe.flags(tiny, save_total_limit=1), tmp_path)
    assert saved(tmp_path / "run") == []
