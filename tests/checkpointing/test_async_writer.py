"""Saves beside training: what is written is the state of its step, a failing disk costs checkpoints and not the run."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

import train
from src.checkpointing import async_writer, checkpoint_list, checkpointer, format, host_copy, model_folder
from src.config.parsing import RunConfig
from src.distributed.strategies import make_strategy
from src.reporting import ledger
from src.runtime.exit_codes import run_main
from src.storage import atomic_folder
from src.training.state import TrainState
from src.training.step import ModelWithLoss
from tests.helpers import kit

STEPS = 12


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return kit.tiny_files(tmp_path_factory.mktemp("tiny"))


def recipe(data, **fields) -> list[str]:
    values = data | {
        "global_batch_size": 8,
        "per_device_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 4,
        "save_total_limit": 10,
    }
    return kit.flags(**values | fields)


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return {world: kit.run_training(world, folder / f"{world}", *recipe(data)) for world in (1, 2)}


def command(data, folder: Path, world: int = 1, **fields) -> tuple[list, list[str]]:
    """Return (exit codes, what the ranks printed) of a run in `folder`/run."""
    folder.mkdir(exist_ok=True)
    return kit.run_command("train.py", *recipe(data, **fields), "--output_dir", "run", folder=folder, world=world)


def saved(folder: Path) -> list[int]:
    """Return the steps of the checkpoints of a run, all of which must be intact, with nothing half-written beside them."""
    found = checkpoint_list.list_checkpoints(folder)
    assert [atomic_folder.verify(path) for path in found] == [[]] * len(found)
    assert not list((folder / "checkpoints").glob(".*"))
    return [checkpoint_list.step_of(path) for path in found]


def at_step(number: int) -> Path:
    return Path("checkpoints", f"step_{number:08d}")


def same_state(one: Path, other: Path) -> bool:
    """Return whether two checkpoints hold the same weights, optimizer and progress, to the last bit."""
    names = ("model.safetensors", "optimizer.safetensors")
    states = [json.loads((folder / "state.json").read_text()) for folder in (one, other)]
    for state in states:
        state["meter"] = {k: v for k, v in state["meter"].items() if k not in ("seconds", "waited")}
    return all(kit.same(load_file(one / name), load_file(other / name)) for name in names) and all(
        states[0][name] == states[1][name] for name in ("progress", "meter", "numbers", "scaler")
    )


# ---- what goes wrong in a save -----------------------------------------------------------------------------------------


def fail_at(steps, error: Exception, monkeypatch):
    """Let the writing of these checkpoints fail when most of each is written."""
    write = format.write_checkpoint

    def failing(folder, model, tensors, state, *shard):
        write(folder, model, tensors, state, *shard)
        if state["progress"]["step"] in steps:
            raise error

    monkeypatch.setattr(format, "write_checkpoint", failing)


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("world", [1, 2])
def test_a_save_that_fails_is_warned_about_and_training_goes_on(data, straight, tmp_path, monkeypatch, world):
    """The checkpoint before is looked at in the next test, and where the disk is really full."""
    fail_at([8], FULL, monkeypatch)
    folder = tmp_path / "here"
    codes, outputs = command(data, folder, world, save_total_limit=1)
    assert codes == [0] * world, outputs
    assert "warning: THE CHECKPOINT OF STEP 8 COULD NOT BE SAVED: No space left on device" in outputs[0]
    assert "failure 1 of 3 in a row" in outputs[0]
    assert saved(folder / "run") == [12]
    assert kit.same(kit.Run(folder / "run").weights, straight[world].weights)
    assert kit.timeless(folder / "run") == kit.timeless(straight[world].folder)


@pytest.mark.parametrize("world", [1, 2])
def test_after_so_many_failures_in_a_row_the_run_ends_on_all_ranks(data, tmp_path, monkeypatch, world):
    fail_at(range(5, 99), FULL, monkeypatch)
    folder = tmp_path / "here"
    fields = {"save_steps": 2, "max_failed_saves": 2, "max_steps": 40, "save_total_limit": 1}
    codes, outputs = command(data, folder, world, **fields)
    assert codes == [1] * world, outputs
    last = outputs[0].rstrip().splitlines()[-1]
    assert last.startswith("failed: no checkpoint could be saved: No space left on device")
    assert "Traceback" not in "".join(outputs)
    assert saved(folder / "run") == [4]
    assert json.loads((folder / "run" / "status.json").read_text())["exit_code"] == 1
    assert kit.last_step(folder / "run") < 14  # the second failure is that of step 8


def test_a_run_that_ended_so_goes_on_when_the_disk_is_mended(data, straight, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        fail_at(range(5, 99), FULL, patch)
        assert command(data, tmp_path / "here", save_steps=2, max_failed_saves=2)[0] == [1]
    run = kit.run_training(1, tmp_path / "here" / "run", *recipe(data))
    assert kit.same(run.weights, straight[1].weights)
    assert kit.timeless(run.folder) == kit.timeless(straight[1].folder)


def test_a_success_in_between_begins_the_count_anew(data, tmp_path, monkeypatch):
    fail_at([2, 6, 10], FULL, monkeypatch)
    codes, outputs = command(data, tmp_path / "here", save_steps=2, max_failed_saves=2)
    assert codes == [0], outputs
    assert outputs[0].count("failure 1 of 2 in a row") == 3
    assert "failure 2" not in outputs[0]
    assert saved(tmp_path / "here" / "run") == [4, 8, 12]


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_no_fault_of_the_disk_ends_all_ranks_with_its_traceback(data, tmp_path, monkeypatch, world):
    fail_at([8], RuntimeError("a bug in the writing"), monkeypatch)
    folder, began = tmp_path / "here", time.monotonic()
    codes, outputs = command(data, folder, world, max_steps=1000, save_steps=8)
    assert codes == [1] * world, outputs
    assert time.monotonic() - began < 40  # 20 s, and the time to start
    assert "rank 0 failed:\nTraceback" in outputs[0]
    assert "in failing" in outputs[0]  # where it was raised, in the other thread
    assert outputs[0].rstrip().endswith("RuntimeError: a bug in the writing")
    assert "a bug in the writing" in (folder / "run" / "logs" / "rank_0.log").read_text()
    assert "Traceback" not in "".join(outputs[1:])
    assert checkpoint_list.list_checkpoints(folder / "run") == []


def test_a_fault_in_the_last_save_is_not_lost(data, tmp_path, monkeypatch):
    fail_at([STEPS], RuntimeError("a bug in the writing"), monkeypatch)
    codes, outputs = command(data, tmp_path / "here")
    assert codes == [1]
    assert outputs[0].rstrip().endswith("RuntimeError: a bug in the writing")


@pytest.mark.parametrize("world", [1, 2])
def test_a_final_model_that_cannot_be_written_fails_the_run_and_the_same_command_mends_it(
    data, straight, tmp_path, world
):
    def failing(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_folder, "write_final", failing)
        codes, outputs = command(data, tmp_path / "here", world)
    assert codes == [1] * world, outputs
    assert "final could not be written: [Errno 28] No space left on device" in outputs[0].rstrip().splitlines()[-1]
    assert "Traceback" not in "".join(outputs)
    run = kit.run_training(world, tmp_path / "here" / "run", *recipe(data))
    assert kit.same(run.weights, straight[world].weights)


def test_old_checkpoints_that_cannot_be_removed_are_no_failed_save(data, tmp_path, monkeypatch):
    rmtree = shutil.rmtree

    def failing(path, *args, **kwargs):
        if Path(path).name.startswith("step_"):
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rmtree(path, *args, **kwargs)

    monkeypatch.setattr(checkpoint_list.shutil, "rmtree", failing)
    codes, outputs = command(data, tmp_path / "here", save_steps=2, save_total_limit=1, max_failed_saves=1)
    assert codes == [0], outputs
    assert "COULD NOT BE SAVED" not in outputs[0]
    assert "Device or resource busy" in outputs[0]
    assert saved(tmp_path / "here" / "run") == [2, 4, 6, 8, 10, 12]


def test_the_first_save_may_come_before_the_first_line_of_metrics(data, tmp_path):
    codes, outputs = command(data, tmp_path / "here", logging_steps=1000, save_steps=2)
    assert "COULD NOT BE SAVED" not in outputs[0]
    assert codes == [0]
    assert saved(tmp_path / "here" / "run") == [2, 4, 6, 8, 10, 12]


# ---- a disk that is really full, or read-only --------------------------------------------------------------------------


class Disk:
    """A small file system of its own."""

    def __init__(self, folder: Path):
        self.folder = folder

    def leave(self, free: int) -> None:
        """Fill it up to so many bytes."""
        with (self.folder / "ballast").open("ab") as file:
            file.write(bytes(max(0, shutil.disk_usage(self.folder).free - free)))

    def clear(self) -> None:
        (self.folder / "ballast").unlink()


@pytest.fixture
def mounted():
    """Return a function that mounts a file system of 8 MB on a folder, where root may do that."""
    done = []

    def mount(folder: Path, *options: str) -> Disk:
        folder.mkdir(parents=True, exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", ",".join(("size=8m", *options)), "tmpfs", str(folder)]
        if subprocess.run(words, check=False, capture_output=True).returncode:
            pytest.skip("no file system can be mounted here")
        done.append(folder) if folder not in done else None
        return Disk(folder)

    yield mount
    for folder in reversed(done):
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def interrupted(data, straight, tmp_path, mounted):
    """A run with a checkpoint of step 4, and with checkpoints/ a file system of its own."""
    folder = tmp_path / "here" / "run"
    with pytest.MonkeyPatch.context() as patch:
        kit.exit_in_update(6, patch)
        with pytest.raises(kit.RankFailed):
            kit.run_training(1, folder, *recipe(data))
    shutil.move(folder / "checkpoints", folder / "before")
    disk = mounted(folder / "checkpoints")
    shutil.move(folder / "before" / "step_00000004", disk.folder)
    (folder / "before").rmdir()
    return folder, disk


def test_on_a_full_disk_the_run_finishes_and_the_checkpoint_before_is_intact(data, straight, interrupted, monkeypatch):
    """ENOSPC in the middle of a real file, as when somebody else takes the room after it was looked at."""
    monkeypatch.setattr(async_writer.CheckpointWriter, "disk_error", lambda *_: None)
    folder, disk = interrupted
    size = sum(file.stat().st_size for file in (disk.folder / "step_00000004").iterdir())
    disk.leave(size // 2)
    codes, outputs = command(data, folder.parent)
    assert codes == [0], outputs
    for step in (8, 12):
        assert f"THE CHECKPOINT OF STEP {step} COULD NOT BE SAVED" in outputs[0]
    assert "No space left on device" in outputs[0] or "os error 28" in outputs[0]
    assert saved(folder) == [4]
    assert kit.same(kit.Run(folder).weights, straight[1].weights)
    disk.clear()
    kit.run_training(1, folder, *recipe(data))
    assert saved(folder) == [4, 8, 12]
    assert same_state(folder / at_step(12), straight[1].folder / at_step(12))


def test_on_a_read_only_disk_the_run_finishes_and_the_checkpoint_before_is_intact(data, straight, interrupted):
    folder, disk = interrupted
    subprocess.run(["mount", "-o", "remount,ro", str(disk.folder)], check=True)
    codes, outputs = command(data, folder.parent)
    assert codes == [0], outputs
    assert outputs[0].count("COULD NOT BE SAVED: Read-only file system") == 2
    assert kit.same(kit.Run(folder).weights, straight[1].weights)
    subprocess.run(["mount", "-o", "remount,rw", str(disk.folder)], check=True)
    assert saved(folder) == [4]


def test_without_room_nothing_is_written_and_the_run_finishes_with_all_its_lines(data, straight, tmp_path, mounted):
    """Half a megabyte is free, which is less than what the check leaves for others: every save is refused by it."""
    disk = mounted(tmp_path / "here" / "run")
    disk.leave(1 << 19)
    codes, outputs = command(data, tmp_path / "here", max_failed_saves=9)
    assert codes == [0], outputs
    assert outputs[0].count("COULD NOT BE SAVED: 1.") == 3
    assert "MB are needed, 0.5 MB are free" in outputs[0]
    assert not (disk.folder / "checkpoints").exists()
    run = kit.Run(disk.folder)
    assert kit.same(run.weights, straight[1].weights)
    assert run.losses() == straight[1].losses()
    assert sorted(ledger.read(disk.folder)[1]) == list(range(1, STEPS + 1))


def test_the_room_that_counts_is_that_of_the_disk_with_the_checkpoints(data, interrupted):
    folder, disk = interrupted
    disk.leave(1 << 19)
    codes, outputs = command(data, folder.parent)
    assert codes == [0], outputs
    assert outputs[0].count("MB are needed, 0.5 MB are free") == 3  # at both saves, and at the end


# ---- beside training ---------------------------------------------------------------------------------------------------


def _slow(argv, held: int, released: int, mutant: bool, seconds: float = 0.0):
    """Train on this rank while the save of step `held` waits for the update of step `released`, or for some seconds.

    Return how many updates were done before that save went on, on the rank that writes."""
    count, seen, gate, update, publish = [0], [], threading.Event(), train.optimizer_step, atomic_folder.publish

    def counted(*args):
        result = update(*args)
        count[0] += 1
        if count[0] == released:
            gate.set()
        return result

    def slow(folder, write, **about):
        if folder.name == f"step_{held:08d}":
            time.sleep(seconds)
            seen.append(gate.wait(30))
        return publish(folder, write, **about)

    train.optimizer_step, atomic_folder.publish = counted, slow
    if seconds:
        gate.set()
    if mutant:
        host_copy.HostCopy.take = lambda self, tensors: tensors
    train.main([str(word) for word in argv])
    return seen


@pytest.mark.parametrize("world, mutant", [(1, False), (2, False), (1, True)])
def test_training_goes_on_while_a_disk_is_slow_and_what_is_written_is_the_state_of_its_step(
    data, straight, tmp_path, world, mutant
):
    """Nothing of step 4 is written before step 7 is done; the mutant hands the live tensors to the writer."""
    argv = [*recipe(data), "--output_dir", tmp_path / "run"]
    [seen, *others] = kit.spawn(world, _slow, argv, 4, 7, mutant, out=tmp_path / "out")
    assert seen == [True]
    assert others == [[]] * (world - 1)
    assert saved(tmp_path / "run") == [4, 8, 12]
    equal = [same_state(tmp_path / "run" / at_step(n), straight[world].folder / at_step(n)) for n in (4, 8, 12)]
    assert not equal[0] if mutant else all(equal)
    assert kit.same(kit.Run(tmp_path / "run").weights, straight[world].weights)


def test_what_was_copied_is_what_a_run_goes_on_from(data, straight, tmp_path):
    """The slow checkpoint is no worse than another: going on from it ends bitwise where an undisturbed run does."""
    kit.spawn(1, _slow, [*recipe(data), "--output_dir", tmp_path / "run"], 4, 7, False, out=tmp_path / "out")
    start = tmp_path / "run" / at_step(4)
    run = kit.run_training(1, tmp_path / "fork", *recipe(data), "--resume", start)
    assert kit.same(run.weights, straight[1].weights)


@pytest.mark.parametrize("world", [1, 2])
def test_a_save_that_would_wait_too_long_for_the_one_before_is_left_out(data, straight, tmp_path, monkeypatch, world):
    monkeypatch.setattr(checkpointer, "SLOW_DISK", 1.5)
    argv = [*recipe(data), "--output_dir", tmp_path / "run"]
    kit.spawn(world, _slow, argv, 4, 10, False, out=tmp_path / "out")
    said = (tmp_path / "out" / "rank0.txt").read_text()
    assert "the checkpoint of step 8 is skipped: the disk still writes the one before it" in said
    assert saved(tmp_path / "run") == [4, 12]
    assert kit.same(kit.Run(tmp_path / "run").weights, straight[world].weights)


def test_the_end_of_the_run_waits_for_its_last_checkpoint(data, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "SLOW_DISK", 0.5)
    argv = [*recipe(data, save_steps=11), "--output_dir", tmp_path / "run"]
    kit.spawn(1, _slow, argv, 11, 0, False, 3.0, out=tmp_path / "out")
    assert saved(tmp_path / "run") == [11, 12]


def _stopped(argv, *args):
    """Train on this rank, and get a SIGTERM in the sixth update."""
    count, update = [0], train.optimizer_step

    def stopping(*rest):
        count[0] += 1
        if count[0] == 6:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # for the thread that hears it
        return update(*rest)

    train.optimizer_step = stopping
    sys.argv = ["train.py", *(str(word) for word in argv)]
    run_main(lambda argv: _slow(argv, *args))


def test_a_run_that_is_stopped_says_that_all_is_saved_only_when_it_is(data, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "SLOW_DISK", 0.5)
    argv = [*recipe(data), "--output_dir", tmp_path / "run"]
    with pytest.raises(kit.RankFailed) as ended:
        kit.spawn(1, _stopped, argv, 4, 0, False, 4.0, out=tmp_path / "out")
    done = kit.last_step(tmp_path / "run")
    assert done >= 6
    if "Saved to" in ended.value.texts[0]:
        assert ended.value.codes == [75]
        assert saved(tmp_path / "run")[-1] == done
    else:
        assert ended.value.codes == [1]


def test_the_log_says_what_each_save_cost(straight):
    log = (straight[1].folder / "logs" / "rank_0.log").read_text()
    assert log.count("saved: training paused ") == 3
    assert "3 checkpoints saved; training paused " in log


# ---- which checkpoints are kept ----------------------------------------------------------------------------------------


def kept(folder: Path, steps, values=None, **fields) -> list[int]:
    """Return which of the checkpoints of `steps`, evaluated to `values`, are kept."""
    run, progress = RunConfig(output_dir=str(folder), **fields), TrainState()
    for number in steps:
        (folder / at_step(number)).mkdir(parents=True, exist_ok=True)
    for progress.step, value in sorted((values or {}).items()):
        progress.update_best({"loss": value, "f1": value}, run)
    checkpoint_list.prune(run, progress.best_step)
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
def test_the_last_the_best_and_every_so_many_are_kept(tmp_path, fields, values, expected):
    assert kept(tmp_path, EVERY, values, **fields) == expected


@pytest.mark.parametrize("greater", [False, True])
def test_a_run_keeps_its_best_checkpoint_by_what_it_has_evaluated(data, tmp_path, greater):
    fields = {"save_steps": 2, "eval_steps": 2, "save_total_limit": 1, "save_keep_every": 6}
    fields |= {"metric_for_best_model": "loss", "greater_is_better": greater}
    run = kit.run_training(1, tmp_path / "run", *recipe(data, **fields))
    losses = {line["step"]: line["loss"] for line in run.kind("eval")}
    assert len(losses) == 6
    best = (max if greater else min)(losses, key=losses.get)
    assert saved(run.folder) == sorted({best, 6, 12})


def test_the_new_one_is_there_before_an_old_one_goes(data, straight, tmp_path):
    """Killed between the two, and in the middle of removing one."""
    for name in ("before", "in the middle"):
        folder = tmp_path / name / "run"
        with pytest.MonkeyPatch.context() as patch:

            def dying(run, best_step, name=name):
                if doomed := checkpoint_list.checkpoints_to_delete(run, best_step):
                    if name != "before":
                        (doomed[0] / "model.safetensors").unlink()
                    os._exit(9)

            patch.setattr(checkpoint_list, "prune", dying)
            with pytest.raises(kit.RankFailed):
                kit.run_training(1, folder, *recipe(data, save_total_limit=1))
        assert [path.name for path in checkpoint_list.list_checkpoints(folder)] == ["step_00000004", "step_00000008"]
        assert atomic_folder.verify(folder / at_step(8)) == []
        assert bool(atomic_folder.verify(folder / at_step(4))) == (name != "before")
        run = kit.run_training(1, folder, *recipe(data, save_total_limit=1))
        assert kit.same(run.weights, straight[1].weights)
        assert saved(folder) == [12]


def test_mutant_that_removes_the_old_one_first_is_caught(data, tmp_path, monkeypatch):
    """As accelerate's save_state does: a failing save, and nothing is left."""
    publish = atomic_folder.publish

    def first_the_old(folder, write, **about):
        for old in folder.parent.glob("step_*"):
            shutil.rmtree(old)
        return publish(folder, write, **about)

    monkeypatch.setattr(atomic_folder, "publish", first_the_old)
    fail_at([8, 12], FULL, monkeypatch)
    command(data, tmp_path / "here", save_total_limit=1)
    assert saved(tmp_path / "here" / "run") == []


# ---- what is in a checkpoint -------------------------------------------------------------------------------------------


def test_a_checkpoint_is_safetensors_and_json_and_nothing_else(straight):
    for run in straight.values():
        for number in (4, 8, 12):
            names = sorted(path.name for path in (run.folder / at_step(number)).rglob("*"))
            assert names == [
                "config.json",
                "generation_config.json",
                "manifest.json",
                "model.safetensors",
                "optimizer.safetensors",
                "state.json",
            ]


def test_names_are_canonical_and_tied_weights_are_there_once(straight):
    from transformers import GPT2LMHeadModel

    folders = [straight[world].folder / at_step(12) for world in (1, 2)]
    plain = GPT2LMHeadModel.from_pretrained(folders[0])
    names = {name for name, _ in plain.named_parameters()}  # each once, under its first name
    assert "lm_head.weight" not in names
    for folder in folders:
        assert load_file(folder / "model.safetensors").keys() == names
        moments = {name.split("/", 1)[1] for name in load_file(folder / "optimizer.safetensors")}
        assert moments == names
    assert plain.lm_head.weight is plain.transformer.wte.weight


def test_the_host_copy_holds_tied_tensors_once_and_uses_its_memory_again():
    weight = torch.arange(6.0).view(2, 3)
    tensors = {"model": {"a": weight, "b": weight, "c": weight[:1], "d": weight.t()}, "other": {"a": weight + 1}}
    copy = host_copy.HostCopy()
    first = copy.take(tensors)
    assert first["model"]["a"] is first["model"]["b"]
    assert first["model"]["c"].data_ptr() != first["model"]["a"].data_ptr()
    assert all(torch.equal(first[p][n], value) for p, named in tensors.items() for n, value in named.items())
    addresses = [value.data_ptr() for named in first.values() for value in named.values()]
    weight.mul_(10)
    assert first["model"]["a"][1, 2] == 5  # a copy
    second = copy.take(tensors)
    assert [value.data_ptr() for named in second.values() for value in named.values()] == addresses
    assert second["model"]["a"][1, 2] == 50


# ---- further parts -----------------------------------------------------------------------------------------------------


def objective_of(tied: bool):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(**kit.TINY, tie_word_embeddings=tied)
    return ModelWithLoss(AutoModelForCausalLM.from_config(config), task=None)


class Meter:
    def resume(self, state):
        self.state = state


@pytest.mark.parametrize("tied", [False, True])
def test_a_further_part_is_saved_and_comes_back(tmp_path, tied):
    """An average of weights beside the optimizer: bitwise the same after a save, a rest and a load."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    def made():
        model_with_loss = objective_of(tied)
        average = AveragedModel(model_with_loss.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return model_with_loss, {
            "optimizer": torch.optim.AdamW(model_with_loss.model.parameters(), lr=0.1),
            "average": average,
        }

    model_with_loss, parts = made()
    for n in range(3):
        ids = torch.arange(8)[None] + n
        model_with_loss.model(input_ids=ids, labels=ids).loss.backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        parts["average"].update_parameters(model_with_loss.model)
    strategy = make_strategy(Accelerator(cpu=True), RunConfig())
    tensors, numbers = format.collect_tensors(strategy, model_with_loss, parts)
    assert tensors.keys() == {"model", "optimizer", "average"}
    host = host_copy.HostCopy().take(tensors)
    state = {"progress": asdict(TrainState(step=3)), "meter": {}, "scaler": None, "numbers": numbers}
    atomic_folder.publish(
        tmp_path / "step", lambda folder: format.write_checkpoint(folder, model_with_loss, host, state)
    )
    assert atomic_folder.verify(tmp_path / "step") == []
    assert (tmp_path / "step" / "average.safetensors").exists()

    other, fresh = made()
    assert not kit.same(parts["average"].state_dict(), fresh["average"].state_dict())
    format.load_checkpoint(tmp_path / "step", strategy, other, fresh, Meter())
    assert kit.same(parts["average"].state_dict(), fresh["average"].state_dict())
    assert fresh["average"].n_averaged == 3
    average = fresh["average"].module
    assert (average.lm_head.weight is average.transformer.wte.weight) == tied
    one, two = (part["optimizer"].state_dict()["state"] for part in (parts, fresh))
    assert one.keys() == two.keys()
    assert all(kit.same(one[index], two[index]) for index in one)


# ---- the gradient scaler of fp16 ---------------------------------------------------------------------------------------


def _fp16(argv):
    """Train with autocast to float16 and a real gradient scaler, which accelerate itself gives to GPUs only.

    It begins so high that the first updates overflow, and doubles every third update that does not."""
    start = train.init_accelerator

    def scaled(run):
        accelerator = start(run)
        accelerator.state._mixed_precision = "fp16"
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3)
        return accelerator

    train.init_accelerator = scaled
    train.main([str(word) for word in argv])


@pytest.fixture(scope="module")
def fp16(data, tmp_path_factory):
    """A run under a scaler, and the recipe of it."""
    folder, flags = tmp_path_factory.mktemp("fp16"), recipe(data, max_steps=16, save_steps=5, max_skipped_steps=99)
    kit.spawn(1, _fp16, [*flags, "--output_dir", folder / "run"], out=folder / "out")
    return kit.Run(folder / "run"), flags


def scaler_of(run: kit.Run) -> dict:
    return checkpoint_list.read_state(run.folder / at_step(16))["scaler"]


@pytest.mark.parametrize("mutant", [False, True])
def test_the_scaler_survives_a_kill(fp16, tmp_path, monkeypatch, mutant):
    """The mutant begins with a new scaler, as somebody does who forgets it."""
    straight, flags = fp16
    assert 0 < straight.kind("train")[-1]["skipped"] < 16  # it has shrunk, and some updates were made
    argv = [*flags, "--output_dir", tmp_path / "run"]
    with monkeypatch.context() as patch:
        kit.exit_in_update(13, patch)
        with pytest.raises(kit.RankFailed):
            kit.spawn(1, _fp16, argv, out=tmp_path / "out")
    assert saved(tmp_path / "run") == [5, 10]
    if mutant:
        monkeypatch.setattr(torch.amp.GradScaler, "load_state_dict", lambda self, state: None)
    kit.spawn(1, _fp16, argv, out=tmp_path / "out")
    run = kit.Run(tmp_path / "run")
    assert kit.same(run.weights, straight.weights) == (not mutant)
    assert mutant or scaler_of(run) == scaler_of(straight)
    assert (kit.timeless(run.folder) == kit.timeless(straight.folder)) == (not mutant)
