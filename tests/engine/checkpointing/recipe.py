"""The run that most tests of checkpoints train, what they look at in its folder, and how it is damaged."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from engine.checkpointing import resume, run_identity
from src.training.schedules import has_same_rates
from tests.helpers import kit
from tests.helpers.backend_runs import at_step, same_state

STEPS = 12
FIELDS = {
    "global_batch_size": 8,
    "per_device_batch_size": 4,
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_steps": 4,
    "save_total_limit": 10,
}


def values(tiny: dict, **fields) -> dict:
    """Return the fields of the run, other `fields` on top; None removes one."""
    return {name: value for name, value in (tiny | FIELDS | fields).items() if value is not None}


def flags(tiny: dict, **fields) -> list[str]:
    return kit.flags(**values(tiny, **fields))


def command(argv: list, folder: Path, world: int = 1) -> tuple[list, list[str]]:
    """Return (exit codes, what each rank printed) of train.py in `folder`/run."""
    return kit.run_command("train.py", *argv, "--output_dir", "run", folder=folder, world=world)


def identity_of(tiny: dict, **fields) -> dict:
    """Return the identity of the run on one process."""
    task, splits = kit.open_data(**values(tiny, **fields))
    return run_identity.identity("no", 1, task.cfg, splits)


def finder(folder: Path, tiny: dict, **fields) -> Callable[[], tuple[Path | None, list[str]]]:
    """Return a function: what the main process would resume from, and its messages about that."""
    task, splits = kit.open_data(**values(tiny, **fields), output_dir=folder)
    current = run_identity.identity("no", 1, task.cfg, splits)
    return partial(resume.find_checkpoint, task.cfg, task.options, current, has_same_rates)


def same_run(one: kit.Run, other: kit.Run) -> bool:
    """Return whether two runs ended with the same state and wrote the same lines, but for times."""
    return (
        kit.same(one.weights, other.weights)
        and same_state(at_step(one, STEPS), at_step(other, STEPS))
        and kit.timeless(one.folder) == kit.timeless(other.folder)
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a run folder but its logs."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".log"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


DAMAGE = {
    "middle bit flipped": lambda path: flip(path, 4 * path.stat().st_size + 3),
    "last byte cut off": lambda path: os.truncate(path, path.stat().st_size - 1),
    "removed": lambda path: path.unlink(),
}
