"""status.json, exit code of a run, and the lock of the run folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import train
from src.checkpointing import resume
from src.runtime import run_status
from tests.helpers import kit
from tests.helpers.stopping import begin, check_stopped, recipe


def exit_code(folder: Path, launcher_code: int = 1) -> int:
    command = [sys.executable, "-m", "src.runtime.run_status", str(folder), str(launcher_code)]
    return int(subprocess.run(command, cwd=kit.REPOSITORY, capture_output=True, text=True, check=True).stdout)


def outcome(folder: Path) -> tuple:
    status = run_status.read_status(folder)
    return status["status"], status["step"], status["exit_code"]


def test_status_of_a_run(tiny, tmp_path, monkeypatch):
    """Running, stopped, failed, complete."""
    flags, folder = recipe(tiny, max_steps=100_000, lr_scheduler_type="constant"), tmp_path / "run"
    assert exit_code(folder, launcher_code=143) == 143
    ranks = begin(tmp_path, flags, world=1)
    status = run_status.read_status(folder)
    assert status.pop("time")
    running = {"status": "running", "step": 0, "exit_code": None, "reason": "", "launcher": os.getpid()}
    assert status == running
    ranks.signal(signal.SIGTERM)
    step = check_stopped(ranks, folder)
    assert run_status.read_status(folder)["reason"].startswith(f"Stopped by SIGTERM at step {step}")
    assert exit_code(folder) == 75

    compute, last = train.compute_gradient, iter([2, 1, 0])
    with monkeypatch.context() as patch:
        patch.setattr(train, "compute_gradient", lambda *args: 1 / next(last) and compute(*args))
        assert kit.Ranks("train.py", *flags, folder=tmp_path).wait() == [1]
    assert outcome(folder) == ("failed", step + 2, 1)  # of the last line
    assert run_status.read_status(folder)["reason"] == "ZeroDivisionError: division by zero"

    assert kit.Ranks("train.py", *flags, "--max_steps", step + 2, folder=tmp_path).wait() == [0]
    assert outcome(folder) == ("complete", step + 2, 0)
    assert exit_code(folder, launcher_code=1) == 0


def test_exit_code_that_is_no_number_is_not_printed(tmp_path):
    """A shell may compute with the code, which runs a command in an index."""
    harm = {"status": "failed", "step": 1, "reason": "x", "exit_code": "a[$(touch x)]"}
    (tmp_path / "status.json").write_text(json.dumps(harm))
    command = [sys.executable, "-m", "src.runtime.run_status", str(tmp_path), "7"]
    done = subprocess.run(command, cwd=kit.REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "7\n"


# ---- lock --------------------------------------------------------------------------------------------------------------


def test_second_run_in_a_folder_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(run_status, "lock_run_folder", partial(run_status.lock_run_folder, patience=0.5))
    flags, folder = recipe(tiny, max_steps=100_000), tmp_path / "run"
    first = begin(tmp_path, flags, world=1)
    second = kit.Ranks("train.py", *flags, "--output_dir", folder, folder=tmp_path / "elsewhere", world=2)
    assert second.wait() == [2, 2], second.text()
    assert "output_dir: another process trains in" in second.text()
    assert first.processes[0].is_alive()
    first.signal(signal.SIGTERM)
    step = check_stopped(first, folder)
    train_steps = [line["step"] for line in kit.timeless(folder) if line["kind"] == "train"]
    assert train_steps == list(range(1, step + 1))


@pytest.mark.parametrize("first_ends", [False, True])
def test_two_runs_begin_in_a_new_folder_at_the_same_moment(tiny, tmp_path, monkeypatch, first_ends):
    """The second one ends on all ranks, and leaves the status of the first one alone, though that has ended meanwhile."""

    def archive(*args):
        Path("chosen").touch()
        kit.until(Path("go").exists)
        original(*args)

    original, folder = resume.archive_stale_outputs, tmp_path / "run"
    flags = recipe(tiny, max_steps=100_000)
    with monkeypatch.context() as patch:
        patch.setattr(run_status, "lock_run_folder", partial(run_status.lock_run_folder, patience=0.5))
        patch.setattr(resume, "archive_stale_outputs", archive)
        second = kit.Ranks("train.py", *flags, "--output_dir", folder, folder=tmp_path / "elsewhere", world=2)
    kit.until((tmp_path / "elsewhere" / "chosen").exists)
    first = begin(tmp_path, flags, world=1)
    if first_ends:
        first.signal(signal.SIGTERM)
        check_stopped(first, folder)
    (tmp_path / "elsewhere" / "go").touch()
    assert second.wait() == [2, 2], second.text()
    assert outcome(folder)[0] == ("stopped" if first_ends else "running")
    if not first_ends:
        first.signal(signal.SIGTERM)
        check_stopped(first, folder)


def test_new_run_in_the_place_of_a_deleted_one(tiny, tmp_path):
    """The old run ends, because it no longer holds the lock of its folder."""
    old = begin(tmp_path, recipe(tiny, max_steps=100_000))
    while (tmp_path / "run").exists():  # the run may write while its folder is deleted
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    new = kit.Ranks("train.py", *recipe(tiny), "--output_dir", tmp_path / "run", folder=tmp_path / "new", world=2)
    assert old.wait() == [1, 1], old.text()
    assert "another process trains in" in old.text()
    assert new.wait() == [0, 0], new.text()
    assert outcome(tmp_path / "run")[0] == "complete"  # the other old rank, which loses its connection, writes nothing
    straight = kit.run_training(2, tmp_path / "straight", *recipe(tiny))
    assert kit.same(kit.Run(tmp_path / "run").weights, straight.weights)


def test_copy_of_the_lock_file_does_not_end_a_run(tmp_path):
    """As a restored backup, or a disk that gives files new numbers: no other process trains, so the folder is locked again."""
    run_status.lock_run_folder(tmp_path)
    file = tmp_path / "logs" / "run.lock"
    Path(shutil.copy(file, tmp_path / "copy")).replace(file)
    assert not run_status.has_lost_lock(tmp_path)
    script = "import sys, src.runtime.run_status as s; s.lock_run_folder(s.Path(sys.argv[1]), 0)"
    other = subprocess.run([sys.executable, "-c", script, tmp_path], cwd=kit.REPOSITORY, capture_output=True, text=True)
    assert "another process trains in" in other.stderr, other
    assert not run_status.has_lost_lock(tmp_path)
