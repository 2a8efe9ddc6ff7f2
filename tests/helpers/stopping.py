"""A run that is stopped while it trains: start it, check that all is saved, resume it."""

import time
from pathlib import Path

import pytest

import train
from engine.checkpointing import checkpoint_folder
from engine.process import run_status
from engine.storage import verify_hashes
from tests.helpers import kit

MAX_STEPS = 100


def recipe(tiny: dict, **fields) -> list[str]:
    """Return flags of a run that only a stop saves, so that without that save there is nothing to resume from."""
    values = {"global_batch_size": 8, "per_device_batch_size": 2, "per_device_eval_batch_size": 4, "output_dir": "run"}
    values |= {"max_steps": MAX_STEPS, "learning_rate": 3e-3, "logging_steps": 1, "eval_steps": 30}
    return kit.flags(**tiny | values | {"save_steps": 10_000} | fields)


def endless_run_file(folder: Path, **fields) -> Path:
    """Write data and a run file, of more steps than any test waits for, to `folder`."""
    values = {name: str(value) for name, value in kit.tiny_files(folder).items()}
    values |= {"global_batch_size": 8, "per_device_batch_size": 2, "max_steps": 10**6, "logging_steps": 1}
    return kit.write_yaml(folder / "run.yaml", values | {"lr_scheduler_type": "constant"} | fields)


def _slow_soon(optimizer_step):
    """Return an optimizer_step that takes 0.2 s after 15 steps, so that no run ends before a test on a loaded machine stops it."""
    calls = 0

    def step(*args):
        nonlocal calls
        calls += 1
        if calls > 15:
            time.sleep(0.2)
        return optimizer_step(*args)

    return step


def begin(folder: Path, flags: list[str], world: int = 2, env=None) -> kit.Ranks:
    """Start the command in `folder`, and return when it has trained a step more than before. It becomes slow soon."""
    before = kit.last_step(folder / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "optimizer_step", _slow_soon(train.optimizer_step))
        ranks = kit.Ranks("train.py", *flags, folder=folder, world=world, env=env)
    kit.until(lambda: kit.last_step(folder / "run") > before)
    return ranks


def check_stopped(ranks: kit.Ranks, folder: Path) -> int:
    """Assert that all ranks end with exit code 75 and that every logged step is saved; return the step."""
    codes = ranks.wait()
    assert codes == [75] * len(codes), ranks.text()
    step = check_saved(folder)
    assert f"at step {step:,}. Saved to run" in ranks.text()
    return step


def check_saved(folder: Path) -> int:
    """Assert that the run has stopped and that every logged step is saved; return the step."""
    newest = checkpoint_folder.newest_intact(folder)
    assert newest
    assert verify_hashes.verify(newest) == []
    step = checkpoint_folder.step_of(newest)
    assert step == kit.last_step(folder)
    status = run_status.read_status(folder)
    assert (status["status"], status["step"], status["exit_code"]) == ("stopped", step, 75)
    return step


def check_resumes(folder: Path, flags: list[str], undisturbed: kit.Run, world: int = 2) -> None:
    """Run the same command again, and assert that the run is bitwise the undisturbed one."""
    ranks = kit.Ranks("train.py", *flags, folder=folder, world=world)
    assert ranks.wait() == [0] * world, ranks.text()
    assert kit.timeless(folder / "run") == kit.timeless(undisturbed.folder)
    assert kit.same(kit.Run(folder / "run").weights, undisturbed.weights)
    assert run_status.read_status(folder / "run")["status"] == "complete"
