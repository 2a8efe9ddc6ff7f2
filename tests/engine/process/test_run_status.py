"""status.json and the exit code of a run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import train
from engine.process import run_status
from tests.helpers import kit
from tests.helpers.stopping import begin, check_stopped, recipe


def exit_code(folder: Path, launcher_code: int = 1) -> int:
    command = [sys.executable, "-m", "engine.process.run_status", str(folder), str(launcher_code)]
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
    command = [sys.executable, "-m", "engine.process.run_status", str(tmp_path), "7"]
    done = subprocess.run(command, cwd=kit.REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "7\n"
